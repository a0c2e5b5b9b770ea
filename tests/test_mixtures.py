"""Posteriors with several modes: oracles by quadrature and loops, properties, faults, and
the world in which they are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pcl.encoders import encode, grown, mixture_encoder
from pcl.generative import TwoModeProcess
from pcl.losses import ELK, ExactInfoNCE, ExactNWJ, InfoNCE, MCInfoNCE
from pcl.marginal import log_marginal
from pcl.mixtures import (
    MixtureOfVMF,
    as_mixture,
    joined,
    log_marginal_between,
    mapped,
)
from pcl.published.objectives import PublishedMCInfoNCE
from pcl.studies.modes import ModesSettings, compare_modes, constant_like, measure_table
from pcl.training import Config
from pcl.training import train_encoder as fit
from pcl.vmf import VonMisesFisher


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def mixtures(
    generator: torch.Generator,
    *shape: int,
    dim: int = 3,
    parts: int = 2,
    dtype: torch.dtype = torch.float64,
) -> MixtureOfVMF:
    loc = torch.randn(*shape, parts, dim, dtype=dtype, generator=generator)
    kappa = 4 + 20 * torch.rand(*shape, parts, dtype=dtype, generator=generator)
    logits = torch.randn(*shape, parts, dtype=dtype, generator=generator)
    return MixtureOfVMF(nn.functional.normalize(loc, dim=-1), kappa, logits=logits)


def circle(n: int = 720) -> tuple[Tensor, float]:
    angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack([angle.cos(), angle.sin()], -1), 2 * math.pi / n


def sphere() -> tuple[Tensor, Tensor]:
    nodes, weights = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(64))
    angle = torch.arange(128, dtype=torch.float64) * (2 * math.pi / 128)
    ring = (1 - nodes**2).sqrt()[:, None]
    parts = [ring * angle.cos(), ring * angle.sin(), nodes[:, None].expand(-1, 128)]
    area = (weights[:, None] * (2 * math.pi / 128)).expand(-1, 128)
    return torch.stack(parts, -1).reshape(-1, 3), area.reshape(-1)


# --- the distribution


def test_density_mean_and_entropy_agree_with_quadrature(
    generator: torch.Generator,
) -> None:
    for dim, (points, area) in ((2, circle()), (3, sphere())):
        q = mixtures(generator, dim=dim, parts=3)
        mass = q.log_prob(points).exp() * area
        assert abs(mass.sum() - 1) < 1e-9
        torch.testing.assert_close(q.mean, (mass[:, None] * points).sum(0))
        square = (mass[:, None] * points**2).sum(0)
        torch.testing.assert_close(q.variance, square - q.mean**2)
        exact = -(mass * q.log_prob(points)).sum()
        assert abs(q.entropy(20_000, generator) - exact) < 0.02


def test_entropy_of_one_or_of_equal_components_is_exact(
    generator: torch.Generator,
) -> None:
    one = mixtures(generator, parts=1)
    torch.testing.assert_close(one.entropy(2), one.components.entropy()[0])
    twice = MixtureOfVMF(one.loc.expand(2, 3), one.concentration.expand(2), logits=torch.zeros(2))  # fmt: skip
    assert twice.entropy(2) <= one.entropy(2) + math.log(2) + 1e-12


def test_sets_of_highest_density_hold_their_level(generator: torch.Generator) -> None:
    points, area = sphere()
    q = mixtures(generator)
    mass = q.log_prob(points).exp() * area
    for level in (0.5, 0.9):
        inside = q.in_credible_set(points, level, 20_000, generator)
        assert abs((mass * inside).sum() - level) < 0.02
    assert q.in_credible_set(q.mode, 0.1, 1000, generator)


def test_draws_follow_the_density(generator: torch.Generator) -> None:
    q = mixtures(generator, 2, dim=5)
    z = q.sample((20_000,), generator=generator)
    assert z.shape == (20_000, 2, 5)
    torch.testing.assert_close(z.mean(0), q.mean, rtol=0, atol=0.015)
    again = [q.sample((3,), torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*again) and q.sample((0,)).shape == (0, 2, 5)


def test_no_neighbour_of_a_mode_is_higher(generator: torch.Generator) -> None:
    q = mixtures(generator, 20, parts=3)
    top = q.modes()
    near = top.loc + 1e-3 * torch.randn(30, 20, 3, 3, dtype=torch.float64, generator=generator)  # fmt: skip
    near = nn.functional.normalize(near, dim=-1).movedim(-2, 0)
    assert (q.log_prob(near).movedim(0, -1) <= top.log_prob + 1e-12).all()
    assert (top.log_prob.diff(dim=-1) <= 0).all() and top.distinct[:, 0].all()


def test_close_components_have_one_mode_and_far_ones_two() -> None:
    for angle, count in ((0.2, 1), (1.5, 2)):
        loc = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]]).double()
        q = MixtureOfVMF(loc, 16.0, weights=torch.tensor([0.6, 0.4]).double())
        assert q.modes().distinct.sum() == count


def test_shapes_are_those_of_a_torch_distribution(generator: torch.Generator) -> None:
    q = mixtures(generator, 4, 1, dim=5)
    wide = q.expand((4, 6))
    assert wide.batch_shape == (4, 6) and wide.event_shape == (5,)
    z = wide.sample((2,), generator=generator)
    torch.testing.assert_close(wide.log_prob(z), q.log_prob(z))
    by_part = wide.component_log_prob(z)
    assert by_part.shape == (2, 4, 6, 2)
    torch.testing.assert_close(by_part.logsumexp(-1), wide.log_prob(z))
    assert "n_components: 2" in repr(q)


def test_empty_and_equal_components_have_finite_slopes(
    generator: torch.Generator,
) -> None:
    for dtype in (torch.float32, torch.float64):
        q = mixtures(generator, 3, dim=5, dtype=dtype)
        loc = q.loc[:, :1].expand(-1, 3, -1).clone().requires_grad_()
        kappa = torch.full((3, 3), 20.0, dtype=dtype, requires_grad=True)
        logits = torch.tensor([[0.0, 0.0, -math.inf]] * 3, dtype=dtype).requires_grad_()
        edge = MixtureOfVMF(loc, kappa, logits=logits)
        plain = VonMisesFisher(loc[:, 0].detach(), kappa[:, 0].detach())
        torch.testing.assert_close(edge.log_prob(q.mode), plain.log_prob(q.mode))
        value = edge.log_prob(q.mode).sum() + edge.entropy(8).sum() + edge.mean.sum()
        for loss in (ExactInfoNCE(20.0), ExactNWJ(20.0), MCInfoNCE(20.0, 4)):
            value = value + loss(edge, edge)
        for slope in torch.autograd.grad(value, (loc, kappa, logits)):
            assert slope.isfinite().all()
    weights = torch.tensor([1.0, 0.0]).double().requires_grad_()
    q = MixtureOfVMF(torch.eye(2).double(), 5.0, weights=weights)
    (slope,) = torch.autograd.grad(q.log_prob(torch.eye(2).double()).sum(), weights)
    assert slope.isfinite().all() and q.weights.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "weights or logits"),
        ({"logits": torch.zeros(2)}, "weights or logits"),
        ({"weights": torch.tensor([0.5, -0.5])}, "not negative"),
        ({"weights": torch.zeros(2)}, "empty"),
        ({"weights": torch.ones(3)}, "one per component"),
        ({"weights": None, "logits": torch.tensor([0.0, math.nan])}, "NaN"),
        ({"concentration": torch.tensor([1.0, math.inf])}, "finite"),
        ({"loc": torch.ones(2, 3)}, "unit vectors"),
        ({"loc": torch.tensor([1.0, 0.0, 0.0])}, r"\(..., J, D\)"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, Tensor], message: str) -> None:
    good = {"loc": torch.eye(3)[:2], "concentration": 4.0, "weights": torch.ones(2)}
    MixtureOfVMF(**good)
    with pytest.raises(ValueError, match=message):
        MixtureOfVMF(**(good | change))


# --- the pair ratio


def test_the_pair_ratio_is_the_double_integral(generator: torch.Generator) -> None:
    points, step = circle()
    p, q = mixtures(generator, dim=2, parts=3), mixtures(generator, dim=2)
    move = VonMisesFisher(points[:, None], torch.tensor(12.0).double())
    mass = [d.log_prob(points).exp() for d in (p, q)]
    double_sum = 2 * math.pi * step**2 * (mass[0] @ move.log_prob(points).exp() @ mass[1])  # fmt: skip
    torch.testing.assert_close(log_marginal_between(p, q, 12.0).exp(), double_sum)


def test_all_pairs_and_one_by_one_agree(generator: torch.Generator) -> None:
    p, q = mixtures(generator, 3, dim=6), mixtures(generator, 4, dim=6, parts=3)
    table = log_marginal_between(
        mapped(p, lambda t: t[:, None]), mapped(q, lambda t: t[None]), 20.0
    )
    for i in range(3):
        for j in range(4):
            total = sum(
                float(p.weights[i, a] * q.weights[j, b])
                * log_marginal(
                    (p.loc[i, a] * q.loc[j, b]).sum(),
                    p.concentration[i, a],
                    q.concentration[j, b],
                    20.0,
                    6,
                ).exp()
                for a in range(2)
                for b in range(3)
            )
            torch.testing.assert_close(table[i, j].exp(), total)


def test_a_mixture_of_one_is_its_component(generator: torch.Generator) -> None:
    q = mixtures(generator, 4, dim=6)
    single = VonMisesFisher(q.loc[:, 0], q.concentration[:, 0])
    cos = (single.loc * single.loc.roll(1, 0)).sum(-1)
    kappas = single.concentration, single.concentration.roll(1)
    torch.testing.assert_close(
        log_marginal_between(single, mapped(single, lambda t: t.roll(1, 0)), 20.0),
        log_marginal(cos, *kappas, 20.0, 6),
    )
    with pytest.raises(ValueError, match="dimension"):
        log_marginal_between(q, mixtures(generator, 4, dim=5), 20.0)


# --- losses


def parts(generator: torch.Generator, negatives: str) -> list[MixtureOfVMF | None]:
    shape = {"batch": None, "own": (5, 3), "shared": (1, 3)}[negatives]
    extra = None if shape is None else mixtures(generator, *shape, dim=6)
    return [mixtures(generator, 5, dim=6), mixtures(generator, 5, dim=6), extra]


@pytest.mark.parametrize("negatives", ["batch", "own", "shared"])
def test_exact_losses_are_loops_over_pair_ratios(
    generator: torch.Generator, negatives: str
) -> None:
    q, q_pos, q_neg = parts(generator, negatives)
    infonce, nwj = (
        kind(20.0, reduction="none")(q, q_pos, q_neg)
        for kind in (ExactInfoNCE, ExactNWJ)
    )
    for i in range(5):
        row = mapped(q, lambda t, i=i: t[i])
        up = log_marginal_between(row, mapped(q_pos, lambda t, i=i: t[i]), 20.0).exp()
        if q_neg is None:
            others = mapped(q_pos, lambda t, i=i: torch.cat([t[:i], t[i + 1 :]]))
        else:
            others = mapped(q_neg, lambda t, i=i: t[i if len(t) > 1 else 0])
        down = log_marginal_between(row, others, 20.0).exp()
        torch.testing.assert_close(
            infonce[i], -(up / ((up + down.sum()) / len(down))).log()
        )
        torch.testing.assert_close(nwj[i], down.mean() - 1 - up.log())


@pytest.mark.parametrize("negatives", ["batch", "own", "shared"])
def test_sampled_loss_of_one_component_is_formula_7(
    generator: torch.Generator, negatives: str
) -> None:
    several = parts(generator, negatives)
    single = [q and VonMisesFisher(q.loc[..., 0, :], q.concentration[..., 0]) for q in several]  # fmt: skip
    loss = MCInfoNCE(8.0, 4000, reduction="none")
    values = [
        loss(*(q and change(q) for q in single), generator=generator)
        for change in (lambda q: q, as_mixture)
    ]
    torch.testing.assert_close(*values, rtol=0.05, atol=0.05)


def test_sampled_loss_tends_to_the_exact_one_with_many_negatives(
    generator: torch.Generator,
) -> None:
    q = mixtures(generator, 2, dim=3)
    q_neg = mixtures(generator, 1, 300, dim=3)
    exact = ExactInfoNCE(4.0, reduction="none")(q, q, q_neg)
    sampled = MCInfoNCE(4.0, 1000, reduction="none")(q, q, q_neg, generator=generator)
    torch.testing.assert_close(sampled, exact, rtol=0.03, atol=0.03)


def test_losses_for_one_mode_refuse_several(generator: torch.Generator) -> None:
    q = mixtures(generator, 3)
    for loss in (ELK(2.0), InfoNCE(2.0), PublishedMCInfoNCE(2.0, 4)):
        with pytest.raises(TypeError, match="one mode"):
            loss(q, q)
    with pytest.raises(TypeError, match="as_mixture"):
        ExactInfoNCE(2.0)(q, VonMisesFisher(q.loc[:, 0], q.concentration[:, 0]))


# --- encoders, training and the world


def test_a_mixture_trains_in_the_common_loop() -> None:
    world = TwoModeProcess(3)
    torch.manual_seed(0)
    encoder = grown(mixture_encoder(world.features, 3, 1, [16]), 2)
    config = Config(steps=3, batch_size=8, n_neg=4, log_every=1)
    run = fit(encoder, ExactInfoNCE(20.0), lambda *a: world.sample(*a), config)
    assert all(math.isfinite(value) for value in run.curve["loss"])
    q = encode(encoder, world.draw((5,)), 2)
    assert isinstance(q, MixtureOfVMF) and q.batch_shape == (5,)


def test_growing_changes_nothing_but_the_directions() -> None:
    torch.manual_seed(0)
    one = mixture_encoder(7, 3, 2, [16])
    x = torch.randn(9, 7)
    z = one(x).mode
    torch.testing.assert_close(grown(one, 4, 0.0)(x).log_prob(z), one(x).log_prob(z))
    assert grown(one, 4)(x).n_components == 4 and one.n_components == 2
    with pytest.raises(ValueError, match="multiple of 2"):
        grown(one, 3)


def test_the_world_shows_the_posterior_its_latent_came_from(
    generator: torch.Generator,
) -> None:
    world = TwoModeProcess(4, unimodal=0.5, dtype=torch.float64)
    q = world.posterior(world.draw((4000,), generator))
    cos = (q.loc[:, 0] * q.loc[:, 1]).sum(-1)
    assert abs((cos > 1 - 1e-9).double().mean() - 0.5) < 0.04
    assert q.mean.mean(0).norm() < 0.05, "posteriors average to the uniform density"
    assert (q.weights[:, 0] > 0.5 - 1e-9).all()
    pairs = world.sample(4000, 0, generator)
    p, p_pos = world.posterior(pairs.x), world.posterior(pairs.x_pos)
    ratio = log_marginal_between(p, mapped(p_pos, lambda t: t.roll(1, 0)), 20.0).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(4000)
    with pytest.raises(ValueError, match="heavier"):
        TwoModeProcess(4, heavier=(0.3, 0.7))


def test_judgement_is_blind_to_rotations_and_order_only(
    generator: torch.Generator,
) -> None:
    true = TwoModeProcess(3, dtype=torch.float64)
    p = true.posterior(true.draw((300,), generator))
    turn = torch.linalg.qr(
        torch.randn(3, 3, dtype=torch.float64, generator=generator)
    ).Q
    same = MixtureOfVMF(
        (p.loc @ turn).flip(1), p.concentration.flip(1), logits=p.log_weights.flip(1)
    )
    judged = compare_modes(same, p)
    assert judged["modes_within"] == 1 and judged["weight_rmse"] < 1e-9
    assert judged["anchor_error"] < 1e-6
    assert compare_modes(constant_like(p), p)["modes_within"] < 0.05
    middle = as_mixture(VonMisesFisher(nn.functional.normalize(p.mean, dim=-1), 5.0))
    assert compare_modes(middle, p)["modes_within"] == 0
    assert joined([same, p]).batch_shape == (600,)
    for ends in (judged, compare_modes(p, p)):
        assert abs(ends["follow_low"] - 1) < 1e-6 > abs(ends["follow_high"] - 1)
    crossed = p.loc.clone()  # one coordinate follows the other mode
    crossed[:, :, 0] = p.loc[:, :, 0].flip(1)
    mixed = MixtureOfVMF(
        nn.functional.normalize(crossed, dim=-1),
        p.concentration,
        logits=p.log_weights,
    )
    ends = compare_modes(mixed, p)
    assert ends["follow_low"] < 0 < ends["follow_high"]


def test_free_posteriors_come_down_to_the_exact_law_of_pairs_and_never_below() -> None:
    few = ModesSettings(
        dim=4, inputs=32, first=0.3, lr=0.05, lr_first=0.1, kappa_start=8.0
    )
    gaps = []
    for steps in (10, 40):
        outcome = measure_table(replace(few, steps=steps), seed=0)
        gaps.append(outcome.metrics["loss"] - outcome.metrics["loss_true"])
        assert len(outcome.curve["loss"]) == steps
    assert 0 <= gaps[1] < 0.5 * gaps[0]
    assert outcome.metrics["loss_true"] < outcome.metrics["loss_constant"] - 0.5
