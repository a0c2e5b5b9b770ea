"""Anisotropic positives: the Fisher-Bingham normaliser and its draws, AnInfoNCE, the
saddlepoint kernel, two kinds of pairs, and the finite world of tables."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pcl.anisotropic import (
    AnInfoNCE,
    PosteriorAnInfoNCE,
    quadratic_log_partition,
)
from pcl.finite import World, expected_log_mean
from pcl.fisher_bingham import (
    log_anisotropic_pair,
    log_fisher_bingham,
    sample_fisher_bingham,
)
from pcl.generative import AnisotropicProcess
from pcl.losses import ELK, InfoNCE
from pcl.metrics import linear_identifiability, permutation_score
from pcl.objectives import parameter_groups
from pcl.published.data import ShellProcess
from pcl.published.objectives import PublishedAnInfoNCE
from pcl.training import Config, train
from pcl.two_kinds import TwoKinds
from pcl.vmf import HypersphericalUniform, VonMisesFisher


def points(n: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sphere = HypersphericalUniform(dim, dtype=torch.float64)
    return sphere.sample((n,), generator=generator)


def posteriors(n: int, dim: int, seed: int = 0) -> VonMisesFisher:
    generator = torch.Generator().manual_seed(seed + 100)
    kappa = 5 + 20 * torch.rand(n, generator=generator, dtype=torch.float64)
    return VonMisesFisher(points(n, dim, seed), kappa)


# --- the normaliser


@pytest.mark.parametrize("b", [(0.0, 0.0), (1.0, 2.0), (0.0, 40.0), (-7.0, 0.3)])
@pytest.mark.parametrize("a", [(0.0, 0.0), (-3.0, 0.5), (-2.0, -60.0), (20.0, -20.0)])
def test_log_fisher_bingham_is_the_integral_over_the_circle(
    b: tuple[float, float], a: tuple[float, float]
) -> None:
    def f(t: mpmath.mpf) -> mpmath.mpf:
        c, s = mpmath.cos(t), mpmath.sin(t)
        return mpmath.exp(b[0] * c + b[1] * s + a[0] * c * c + a[1] * s * s)

    with mpmath.workdps(25):
        pieces = [mpmath.pi * k / 8 for k in range(-8, 9)]
        exact = float(mpmath.log(mpmath.quad(f, pieces)))
    found = log_fisher_bingham(*(torch.tensor(v, dtype=torch.float64) for v in (b, a)))
    assert found.item() == pytest.approx(exact, abs=1e-10)


def series(b: list[float], a: list[float]) -> float:
    """log Z by the power series of its integrand: positive terms, no contour."""
    with mpmath.workdps(30):
        low, half = mpmath.mpf(min(a)), mpmath.mpf(len(a)) / 2
        shifted = [v - low for v in a]
        p: list[mpmath.mpf] = []
        c = [mpmath.mpf(1)]
        total = term = mpmath.rgamma(half)
        while len(p) < 10 or term > total * mpmath.mpf(10) ** -18:
            n = len(c)
            terms = (
                x**n / 2 + n * mpmath.mpf(y) ** 2 / 4 * x ** (n - 1)
                for x, y in zip(shifted, b, strict=True)
            )
            p.append(mpmath.fsum(terms))
            c.append(mpmath.fdot(p, reversed(c)) / n)
            term = c[-1] * mpmath.rgamma(n + half)
            total += term
        return float(low + mpmath.log(2 * mpmath.pi**half * total))


@pytest.mark.parametrize("dim", [2, 3, 10, 64, 128])
def test_log_fisher_bingham_is_its_power_series(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    one, last = torch.eye(dim, dtype=torch.float64)[[0, -1]]
    noise = -40 * torch.rand(dim, generator=generator, dtype=torch.float64)
    cases = [
        (20 * points(1, dim)[0], noise),
        (0.01 * one, -60 * (1 - one)),  # two unequal peaks
        (one, -60 * one),  # a ridge
        (80 * last + 1e-3 * one, -40 * (1 - one)),  # pull and stiffness in the balance
    ]
    for b, a in cases:
        found = log_fisher_bingham(b, a).item()
        assert found == pytest.approx(series(b.tolist(), a.tolist()), abs=1e-10)


@pytest.mark.parametrize("dim", [3, 5, 16, 128])
def test_log_fisher_bingham_sees_no_order_of_axes_and_no_common_shift(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    b, a = 10 * torch.randn(2, 7, dim, generator=generator, dtype=torch.float64)
    order = torch.randperm(dim, generator=generator)
    value = log_fisher_bingham(b, a)
    torch.testing.assert_close(log_fisher_bingham(b[:, order], a[:, order]), value)
    torch.testing.assert_close(log_fisher_bingham(-b, a), value)
    torch.testing.assert_close(log_fisher_bingham(b, a + 3), value + 3)
    finer = log_fisher_bingham(b, a, nodes=200)
    torch.testing.assert_close(value, finer, rtol=0, atol=1e-10)


def test_derivatives_of_the_normaliser_are_right() -> None:
    b, a = torch.randn(
        2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    b.requires_grad_(), a.requires_grad_()
    assert torch.autograd.gradcheck(log_fisher_bingham, (b, a))


def test_a_normaliser_keeps_the_type_and_refuses_nonsense() -> None:
    assert log_fisher_bingham(torch.ones(3), torch.ones(2, 3)).dtype == torch.float32
    with pytest.raises(ValueError, match="linear has 3 coordinates and quadratic 4"):
        log_fisher_bingham(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="quadratic must be finite"):
        log_fisher_bingham(torch.ones(3), torch.ones(3) * math.nan)
    with pytest.raises(ValueError, match="D at least 2"):
        log_fisher_bingham(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="linear must be a floating-point"):
        sample_fisher_bingham(torch.ones(3, dtype=torch.long), torch.ones(3))


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_draws_have_the_moments_of_the_normaliser(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    b = 6 * points(1, dim, 1).requires_grad_()
    a = -9 * torch.rand(1, dim, generator=generator, dtype=torch.float64)
    a.requires_grad_()
    first, second = torch.autograd.grad(log_fisher_bingham(b, a).sum(), (b, a))
    y = sample_fisher_bingham(
        b.detach().expand(8000, dim), a.detach().expand(8000, dim), generator
    )
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(8000).double())
    for moment, exact in ((y, first[0]), (y**2, second[0])):
        error = (moment.mean(0) - exact) / (moment.std(0) / 8000**0.5)
        assert error.abs().max() < 4.5


def test_draws_repeat_with_their_generator() -> None:
    b, a = points(20, 4), -torch.ones(4).double()
    one, two = (
        sample_fisher_bingham(b, a, torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert one.equal(two)


# --- losses


def brute(
    loss: AnInfoNCE, q: VonMisesFisher, q_pos: VonMisesFisher, q_neg: VonMisesFisher
) -> Tensor:
    """AnInfoNCE with explicit loops; negatives are shared."""
    rows = []
    for z, own in zip(q.loc, q_pos.loc, strict=True):
        scores = [-(z - y) @ loss.precision @ (z - y) / 2 for y in (own, *q_neg.loc[0])]
        total = torch.stack(scores).exp().sum() / (len(scores) - 1)
        rows.append(total.log() - scores[0])
    return torch.stack(rows).mean()


@pytest.mark.parametrize("full", [True, False])
def test_aninfonce_is_its_definition(full: bool) -> None:
    torch.manual_seed(0)
    loss = AnInfoNCE(5, full).double()
    with torch.no_grad():
        loss.log_precision.normal_()
    q, q_pos, other = (posteriors(6, 5, seed) for seed in range(3))
    q_neg = VonMisesFisher(other.loc[None], other.concentration[None])
    value = loss(q, q_pos, q_neg)
    torch.testing.assert_close(value, brute(loss, q, q_pos, q_neg))
    own = VonMisesFisher(other.loc.expand(6, 6, 5), other.concentration.expand(6, 6))
    torch.testing.assert_close(loss(q, q_pos, own), value)
    torch.testing.assert_close(loss.lambda_, torch.linalg.eigvalsh(loss.precision))
    with pytest.raises(NotImplementedError, match="call critic"):
        loss.score(torch.ones(1), torch.ones(1), torch.ones(1), 5)
    with pytest.raises(ValueError, match="dim=4"):
        loss(posteriors(3, 4), posteriors(3, 4, 1))


def test_equal_eigenvalues_make_it_infonce_and_kappa_pos_their_value() -> None:
    loss = AnInfoNCE(4, lambda_=7.0).double()
    with torch.no_grad():
        loss.log_precision.copy_(math.log(7.0) * torch.eye(4))
    q, q_pos = posteriors(8, 4), posteriors(8, 4, 1)
    torch.testing.assert_close(loss(q, q_pos), InfoNCE(7.0)(q, q_pos))
    assert loss.kappa_pos.item() == pytest.approx(7.0)


@pytest.mark.parametrize("bad", [1, 0, 2.0, True])
def test_a_dimension_is_an_integer_from_two_on(bad: object) -> None:
    with pytest.raises(ValueError, match="dim must be an integer"):
        AnInfoNCE(bad)  # type: ignore[arg-type]


def test_the_published_loss_has_no_other_negatives() -> None:
    q = posteriors(4, 3)
    with pytest.raises(ValueError, match="q_neg must be None"):
        PublishedAnInfoNCE(3).double()(
            q, q, VonMisesFisher(q.loc[None], q.concentration[None])
        )


def test_the_saddlepoint_is_close_to_a_sum_over_two_circles() -> None:
    turns = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    circle = torch.stack([turns.cos(), turns.sin()], -1)
    lambda_ = torch.tensor([2.0, 15.0], dtype=torch.float64)
    gap = circle[:, None] - circle
    pull = torch.exp(-(gap * gap * lambda_).sum(-1) / 2)
    h1, h2 = 12 * points(40, 2), 7 * points(40, 2, 1)
    near = (h1 * h2).sum(-1) > 0
    left, right = ((h @ circle.T).exp() for h in (h1, h2))
    exact = torch.einsum("na,ab,nb->n", left, pull, right).log()
    exact = exact + 2 * math.log(2 * math.pi / 400)
    error = (log_anisotropic_pair(h1, h2, lambda_) - exact)[near]
    assert error.abs().max() < 0.12 and error.std() < 0.05


def test_the_gradient_of_the_saddlepoint_is_that_of_its_value() -> None:
    h1, h2 = (15 * points(3, 4, seed) for seed in (0, 1))
    lambda_ = torch.tensor([3.0, 6.0, 12.0, 24.0], dtype=torch.float64)
    tilt = torch.tensor([0.5, -0.3, 0.0, 0.2], dtype=torch.float64)
    parts = [x.requires_grad_() for x in (h1, h2, lambda_, tilt)]
    assert torch.autograd.gradcheck(log_anisotropic_pair, parts, atol=1e-4, rtol=1e-3)


def test_what_is_added_to_every_entry_of_a_tilt_only_shifts() -> None:
    h1, h2 = 12 * points(6, 4), 7 * points(6, 4, 1)
    lambda_ = torch.tensor([3.0, 6.0, 12.0, 24.0], dtype=torch.float64)
    tilt = torch.tensor([0.5, -0.3, 0.0, 0.2], dtype=torch.float64)
    value = log_anisotropic_pair(h1, h2, lambda_, tilt)
    torch.testing.assert_close(
        log_anisotropic_pair(h1, h2, lambda_, tilt + 3), value - 3
    )
    flat = log_anisotropic_pair(h1, h2, lambda_, torch.zeros(4).double())
    torch.testing.assert_close(flat, log_anisotropic_pair(h1, h2, lambda_))


def test_the_saddlepoint_with_a_tilt_is_close_to_a_sum_over_two_circles() -> None:
    turns = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    circle = torch.stack([turns.cos(), turns.sin()], -1)
    lambda_ = torch.tensor([2.0, 15.0], dtype=torch.float64)
    tilt = torch.tensor([-0.8, 0.8], dtype=torch.float64)
    gap = circle[:, None] - circle
    log_pull = -(gap * gap * lambda_).sum(-1) / 2 - (circle**2 @ tilt)[:, None]
    h1, h2 = 12 * points(40, 2), 7 * points(40, 2, 1)
    near = (h1 * h2).sum(-1) > 0
    left, right = ((h @ circle.T).exp() for h in (h1, h2))
    exact = torch.einsum("na,ab,nb->n", left, log_pull.exp(), right).log()
    exact = exact + 2 * math.log(2 * math.pi / 400)
    error = (log_anisotropic_pair(h1, h2, lambda_, tilt) - exact)[near]
    assert error.abs().max() < 0.12 and error.std() < 0.05


def test_log_z_is_nearly_linear_in_the_squares() -> None:
    values = torch.tensor([5.0] * 5 + [25.0] * 5, dtype=torch.float64)
    c, b = quadratic_log_partition(values)
    z = points(500, 10)
    log_z = log_fisher_bingham(values * z, -values / 2) - (values * z * z).sum(-1) / 2
    rest = log_z - c - z**2 @ b
    assert rest.std() < 0.3 * log_z.std() and rest.mean().abs() < 0.05
    assert b.sum().abs() < 1e-12 and (b[:5] > 0).all()
    c, b = quadratic_log_partition(torch.full((6,), 9.0, dtype=torch.float64))
    assert b.abs().max() < 1e-12  # isotropic positives have one constant


def test_far_pairs_under_stiff_positives_have_a_saddle_too() -> None:
    h1 = torch.tensor([[5.0, 0, 0, 0], [30.0, 0, 0, 0], [1e-3, 0, 0, 0]]).double()
    h2 = torch.tensor([[-30.0, 0, 0, 0], [-30.0, 1, 0, 0], [50.0, 0, 0, 0]]).double()
    value = log_anisotropic_pair(h1, h2, torch.tensor([500.0, 1, 40, 2]).double())
    assert value.isfinite().all()


@pytest.mark.parametrize("full", [True, False])
def test_posterior_critic_turns_with_its_matrix(full: bool) -> None:
    torch.manual_seed(1)
    loss = PosteriorAnInfoNCE(4, full).double()
    with torch.no_grad():
        loss.log_precision.normal_()
    q, p = posteriors(5, 4), posteriors(5, 4, 1)
    loss.normalised = False
    torch.testing.assert_close(loss.critic(p, q), loss.critic(q, p).T)
    loss.normalised = True  # by the anchor's Z: no longer symmetric
    table = loss.critic(q, p)
    assert (loss.critic(p, q) - table.T).abs().max() > 0.01
    table.sum().backward()
    assert loss.log_precision.grad.isfinite().all()
    if full:
        turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
        with torch.no_grad():
            log = (loss.log_precision + loss.log_precision.T) / 2
            loss.log_precision.copy_(turn @ log @ turn.T)
        turned = [VonMisesFisher(x.loc @ turn.T, x.concentration) for x in (q, p)]
        torch.testing.assert_close(loss.critic(*turned), table.detach())


# --- the worlds


def test_an_observation_leads_back_to_its_latent() -> None:
    process = AnisotropicProcess(5, [1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    pairs = process.sample(50, 3, generator)
    assert pairs.x.shape == (50, 5) and pairs.x_neg.shape == (50, 3, 5)
    steps = (process.posterior(pairs.x).loc - process.posterior(pairs.x_pos).loc) ** 2
    assert process.posterior(pairs.x).concentration.isinf().all()
    assert steps.mean() < 0.5
    again = process.looks(50, generator)
    assert again[0].equal(again[1])  # without posteriors two looks are one
    assert process.kappa_pos == pytest.approx(120 ** (1 / 5))


def test_looks_share_their_latent() -> None:
    process = AnisotropicProcess(6, [9.0] * 6, (200.0, 300.0))
    generator = torch.Generator().manual_seed(0)
    x, again = process.looks(400, generator)
    mu, mu_again = process.posterior(x).loc, process.posterior(again).loc
    assert (mu * mu_again).sum(-1).mean() > 0.95 and not x.equal(again)
    x, x_pos, _ = process.sample(400, 0, generator)
    cosines = (process.posterior(x).loc * process.posterior(x_pos).loc).sum(-1)
    assert cosines.mean() < 0.85


@pytest.mark.parametrize("kind", [AnisotropicProcess, ShellProcess])
@pytest.mark.parametrize("bad", [[1.0, 2.0], [1.0, 2.0, -1.0], [1.0, 2.0, math.inf]])
def test_lambda_is_one_positive_number_per_axis(kind: type, bad: list[float]) -> None:
    with pytest.raises(ValueError, match="lambda_ must hold 3 positive numbers"):
        kind(3, bad)


# --- two kinds


class Line(nn.Module):
    """A linear encoder with one certainty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> VonMisesFisher:
        h = self.line(x)
        return VonMisesFisher(
            nn.functional.normalize(h, dim=-1), 1 + h.norm(dim=-1), validate_args=False
        )


def two_draws(
    n: int, n_neg: int, generator: torch.Generator
) -> tuple[Tensor | None, ...]:
    process = AnisotropicProcess(4, [3.0, 6.0, 12.0, 24.0], (8.0, 32.0))
    x, x_pos, _ = process.sample(n, 0, generator)
    negatives = process.draw((1, n_neg), generator) if n_neg else None
    return (x, x_pos, *process.looks(n, generator), negatives)


@pytest.mark.parametrize("n_neg", [0, 8])
def test_two_kinds_train_and_every_parameter_has_one_group(n_neg: int) -> None:
    loss = PosteriorAnInfoNCE(4)
    objective = TwoKinds(Line(), loss, ELK(1.0), {"loss": 5.0})
    groups = parameter_groups(objective)
    assert set(groups) == {"mu", "loss"} and len(groups["loss"]) == 1
    before = loss.log_precision.detach().clone()
    run = train(objective, two_draws, Config(steps=3, batch_size=8, n_neg=n_neg))
    assert run.step == 3 and not loss.log_precision.equal(before)
    assert objective.identity()["losses"] == ["PosteriorAnInfoNCE", "ELK"]


def test_two_kinds_refuse_a_batch_of_one_kind() -> None:
    def one_kind(
        n: int, n_neg: int, generator: torch.Generator
    ) -> tuple[Tensor | None, ...]:
        return two_draws(n, n_neg, generator)[:3]

    objective = TwoKinds(Line(), InfoNCE(5.0), ELK(1.0))
    with pytest.raises(ValueError, match="it gave 3 parts"):
        train(objective, one_kind, Config(steps=1, batch_size=8))


# --- metrics


def test_scores_see_rotations_and_permutations_as_they_should() -> None:
    z = points(500, 4)
    turn = torch.linalg.qr(
        torch.randn(
            4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
    ).Q
    assert linear_identifiability(z, z @ turn).min() == pytest.approx(1)
    assert permutation_score(z, -2 * z[:, [2, 0, 3, 1]]) == pytest.approx(1)
    assert permutation_score(z, z @ turn) < 0.95
    partly = torch.cat([z[:, :2], torch.zeros(500, 2, dtype=torch.float64)], 1)
    r2 = linear_identifiability(z, partly)
    assert r2[:2].min() == pytest.approx(1) and r2[2:].max() < 0.1


@pytest.mark.parametrize("metric", [linear_identifiability, permutation_score])
def test_scores_refuse_what_they_cannot_compare(metric: object) -> None:
    z = points(50, 4)
    with pytest.raises(ValueError, match="z and found"):
        metric(z, z[1:])  # type: ignore[operator]
    with pytest.raises(ValueError, match="found must be a table"):
        metric(z, z * math.nan)  # type: ignore[operator]
    with pytest.raises(TypeError, match="z must hold floats"):
        metric(z.long(), z)  # type: ignore[operator]


# --- the finite world


def test_a_world_of_tables_refuses_what_is_no_probability() -> None:
    good = torch.full((2, 3), 1 / 6, dtype=torch.float64)
    rows = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    World(good, *rows)
    with pytest.raises(ValueError, match="pairs must be a table of probabilities"):
        World(good * 2, *rows)
    with pytest.raises(ValueError, match="recognition must be a table"):
        World(good, rows[0] * 0.5, rows[1])
    with pytest.raises(ValueError, match="one row per observation"):
        World(good, rows[1], rows[0])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_expected_log_mean_is_a_mean_over_tuples(n: int) -> None:
    generator = np.random.default_rng(n)
    values = torch.from_numpy(generator.lognormal(0, 2, 4))
    weights = torch.from_numpy(generator.dirichlet(np.ones(4), 3))
    grid = torch.cartesian_prod(*[torch.arange(4)] * n).view(-1, n)
    exact = (weights[:, grid].prod(-1) * values[grid].mean(-1).log()).sum(-1)
    found = expected_log_mean(values, weights, n)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="values must be positive"):
        expected_log_mean(-values, weights, n)
