"""The two random streams: the law of both, on all paths of the second, its gradients,
and what it may and may not depend on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import normalize

from pcl import polar, vmf
from pcl.losses import MCInfoNCE
from pcl.polar import random_numbers, random_stream, stream_version
from pcl.vmf import VonMisesFisher

F32, F64 = torch.float32, torch.float64
KAPPAS = (0.0, 1e-3, 1.0, 20.0, 1e6)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior(
    batch: int, dim: int, kappa: Tensor | float, dtype: torch.dtype = F64
) -> VonMisesFisher:
    loc = torch.randn(batch, dim, generator=seeded(dim), dtype=dtype)
    return VonMisesFisher(normalize(loc, dim=-1), torch.as_tensor(kappa, dtype=dtype))


def p_value(q: VonMisesFisher, z: Tensor) -> float:
    """Whether the cosines follow their exact law, each its own."""
    gap = (z.double() - q.loc.double()).square().sum(-1) / 2
    kappa = q.concentration.double().expand(gap.shape)
    lower, *_ = polar.cosine_law(q.dim, kappa, gap)
    return float(stats.kstest(lower.flatten().numpy(), "uniform").pvalue)


@pytest.mark.parametrize("dim", (2, 3, 4, 10, 128))
@pytest.mark.parametrize("dtype", (F32, F64))
def test_few_draws_of_many_posteriors_follow_the_law(
    dim: int, dtype: torch.dtype
) -> None:
    kappa = torch.tensor(KAPPAS, dtype=dtype).repeat_interleave(60)
    q = posterior(300, dim, kappa, dtype)
    assert polar.are_few(6, 300)
    assert p_value(q, q.sample((6,), generator=seeded(1))) > 1e-3


@pytest.mark.parametrize("dim", (2, 3, 10, 128))
@pytest.mark.parametrize("dtype", (F32, F64))
def test_many_draws_follow_the_law(dim: int, dtype: torch.dtype) -> None:
    """Long enough for several pieces of normal numbers, and of uniform ones."""
    n, batch = max(9_000, 56_000 // dim), 5
    q = posterior(batch, dim, torch.tensor(KAPPAS), dtype)
    assert n * batch * dim > polar._PIECE and not polar.are_few(n, batch)
    z = q.sample((n,), generator=seeded(2))
    assert float((z.double().norm(dim=-1) - 1).abs().max()) < 1e-6
    assert p_value(q, z[:1000]) > 1e-3 and p_value(q, z[-1000:]) > 1e-3
    tangent = normalize(z[:, 0] - (z[:, 0] @ q.loc[0])[:, None] * q.loc[0], dim=-1)
    assert float(tangent.mean(0).norm()) < 5 / n**0.5


def test_proposals_that_run_out_are_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With hardly any proposals at once, almost every draw is completed by rounds."""
    monkeypatch.setattr(polar, "_proposals", lambda n: 3)
    q = posterior(200, 10, 50.0)
    assert p_value(q, q.sample((20,), generator=seeded(3))) > 1e-3


def test_large_concentrations_are_points_in_every_size() -> None:
    q = posterior(4, 50, torch.tensor([0.0, 7.0, 1e30, float("inf")]), F32)
    for n in (2, 2000):
        z = q.sample((n,), generator=seeded(4))
        assert torch.equal(z[:, 3], q.loc[3].expand(n, 50))
        torch.testing.assert_close(z[:, 2], q.loc[2].expand(n, 50))


@pytest.mark.parametrize("dtype", (F32, F64))
def test_draws_do_not_depend_on_the_number_of_cores(dtype: torch.dtype) -> None:
    q = posterior(10, 20, 30.0, dtype)
    before, drawn = torch.get_num_threads(), []
    try:
        for cores in (1, 3):
            torch.set_num_threads(cores)
            drawn.append(random_numbers("normal", (400_000,), q.loc, seeded(5)))
            drawn.append(random_numbers("uniform", (400_000,), q.loc, seeded(5)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert bool((drawn[1] >= 0).all() & (drawn[1] < 1).all())
    assert len(drawn[0].unique()) > 0.95 * len(drawn[0])


@pytest.mark.parametrize("dtype", (F32, F64))
@pytest.mark.parametrize("size", (2 * polar._PIECE + 1, 3 * polar._PIECE))
def test_pairs_of_normal_numbers_are_independent_and_have_tails(
    size: int, dtype: torch.dtype
) -> None:
    """The two of a pair share a radius, so their squares are what could depend."""
    like = torch.empty(0, dtype=dtype)
    z = random_numbers("normal", (size,), like, seeded(14)).double()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3 and bool(z.isfinite().all())
    first, second = z[: 2 * polar._PIECE].view(2, 2, -1).unbind(1)
    for power in (1, 2, 4):
        pair = torch.stack([first.flatten() ** power, second.flatten() ** power])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4 / polar._PIECE**0.5
    angle = torch.atan2(second, first).flatten() / (2 * torch.pi) + 0.5
    assert stats.kstest(angle.numpy(), "uniform").pvalue > 1e-3
    far = random_numbers("normal", (1 << 22,), like, seeded(15)).abs()
    expected = 2 * stats.norm.sf(4.0) * len(far)
    assert abs(int((far > 4).sum()) - expected) < 4 * expected**0.5


@pytest.mark.parametrize(
    ("n", "batch", "dim", "dtype"), ((90, 40, 128, F32), (60_000, 1, 10, F64))
)
def test_draws_of_any_number_of_cores_are_the_same_points(
    n: int, batch: int, dim: int, dtype: torch.dtype
) -> None:
    q = posterior(batch, dim, torch.linspace(1, 300, batch), dtype)
    before, drawn = torch.get_num_threads(), []
    try:
        for cores in (1, 3):
            torch.set_num_threads(cores)
            drawn.append(q.sample((n,), generator=seeded(16)))
    finally:
        torch.set_num_threads(before)
    assert n * batch * dim > 2 * polar._PIECE
    torch.testing.assert_close(drawn[0], drawn[1], rtol=0, atol=0)


@pytest.mark.parametrize("dim", (2, 3, 10))
@pytest.mark.parametrize("dtype", (F32, F64))
def test_a_tangent_of_zeros_still_gives_a_unit_vector(
    dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generators return exact zeros now and then."""
    usual = random_numbers

    def zeros(law: str, *rest: Any) -> Tensor:
        return usual(law, *rest).mul_(law != "normal")

    monkeypatch.setattr(vmf, "random_numbers", zeros)
    q = posterior(2, dim, 5.0, dtype)
    for n in (4, 50_000):
        z = q.sample((n,), generator=seeded(17))
        assert float((z.norm(dim=-1) - 1).abs().max()) < 1e-5


def test_a_generator_decides_and_the_global_state_stays_alone() -> None:
    q = posterior(10, 20, 30.0)
    state = torch.get_rng_state()
    first, again, other = (q.sample((2000,), generator=seeded(s)) for s in (6, 6, 7))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())
    source = seeded(6)
    assert not torch.equal(q.sample((2000,), source), q.sample((2000,), source))
    torch.manual_seed(8)
    first = q.sample((2000,))
    torch.manual_seed(8)
    assert torch.equal(first, q.sample((2000,)))
    with torch.inference_mode():  # the workers are other threads
        assert torch.equal(q.sample((2000,), generator=seeded(6)), again)


@pytest.mark.parametrize("dim", (2, 3, 10, 64))
@pytest.mark.parametrize(("dtype", "slack"), ((F32, 5e-4), (F64, 1e-9)))
def test_both_ways_to_the_gradient_agree(
    dim: int, dtype: torch.dtype, slack: float
) -> None:
    """The turn rate with few operations against the loop over nodes, and both against
    differences of the exact quantile."""
    kappa = torch.tensor([1e-3, 0.3, 5.0, 20.0, 300.0, 1e5], dtype=dtype)
    q = posterior(6, dim, kappa, dtype)
    z = q.sample((20,), generator=seeded(9))
    gap = ((z - q.loc).double().square().sum(-1) / 2).to(dtype)
    few, many = (polar.turn_rate(dim, kappa, gap, few=x) for x in (True, False))
    torch.testing.assert_close(few, many, rtol=slack, atol=0)
    k = kappa.double().expand(gap.shape)
    lower, upper, *_ = polar.cosine_law(dim, k, gap.double())
    step = 1e-4 * k
    up, down = (polar.solve_gap(dim, k + s, lower, upper) for s in (step, -step))
    wanted = (down - up) / (2 * step)
    found = few.double() * gap.double() * (2 - gap.double())
    torch.testing.assert_close(found, wanted, rtol=max(slack, 2e-5), atol=1e-9)


def test_gradients_flow_through_both_streams_alike() -> None:
    """The same draws, handed to both backward passes, get the same gradients."""
    grads = []
    for version in (1, 2):
        q = posterior(8, 5, torch.linspace(0.5, 90, 8))
        loc, kappa = (x.clone().requires_grad_() for x in (q.loc, q.concentration))
        q = VonMisesFisher(loc, kappa)
        with random_stream(version):
            z = q.rsample((4000,), generator=seeded(10))
        grads.append(
            torch.autograd.grad(
                (z[..., 0] + z[..., 1] ** 2).mean(0).sum(), (loc, kappa)
            )
        )
    for first, second in zip(*grads, strict=True):
        assert float((first - second).abs().max()) < 0.02


def test_the_older_stream_is_the_older_one() -> None:
    """One generator for everything, in the order in which it always came."""
    q = posterior(3, 3, 4.0)
    with random_stream(1):
        assert stream_version() == 1
        z = q.sample((50_000,), generator=seeded(11))
        numbers = random_numbers("normal", (200_000,), q.loc, seeded(12))
    assert stream_version() == 2
    assert torch.equal(numbers, torch.randn(200_000, generator=seeded(12), dtype=F64))
    assert not torch.equal(z, q.sample((50_000,), generator=seeded(11)))


def test_the_stream_is_that_of_its_own_thread() -> None:
    seen: list[int] = []
    with random_stream(1):
        thread = threading.Thread(target=lambda: seen.append(stream_version()))
        thread.start()
        thread.join()
    assert seen == [2]
    with pytest.raises(ValueError, match="version must be 1 or 2"), random_stream(3):
        pass


def test_every_map_draws_for_itself() -> None:
    q = posterior(1, 4, 5.0)

    def draw(shift: Tensor) -> Tensor:
        return VonMisesFisher(q.loc[0], 5.0 + shift).rsample((3,))

    z = torch.vmap(draw, randomness="different")(torch.zeros(5, dtype=F64))
    assert z.shape == (5, 3, 4) and len(z.flatten(0, 1).unique(dim=0)) == 15


@pytest.mark.parametrize("shared", (None, 7))
def test_a_loss_draws_from_its_batches_together(shared: int | None) -> None:
    """The value in expectation does not depend on the stream."""
    q, q_pos = posterior(6, 5, 20.0), posterior(6, 5, 8.0)
    q_neg = None
    if shared:
        other = posterior(shared, 5, 3.0)
        q_neg = VonMisesFisher(other.loc[None], other.concentration[None])
    loss = MCInfoNCE(8.0, 3000, reduction="none")
    values = []
    for version in (1, 2):
        with random_stream(version):
            values.append(loss(q, q_pos, q_neg, generator=seeded(13)))
    torch.testing.assert_close(*values, atol=0.1, rtol=0)
