"""The Fisher-Bingham distribution: quadrature, limits, faults."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence
from torch.nn.functional import normalize

from pcl.fisher_bingham import (
    FisherBingham,
    fit_fisher_bingham,
    log_fisher_bingham,
    log_product_kernel,
    sample_fisher_bingham,
)
from pcl.vmf import VonMisesFisher


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))  # fmt: skip


def ring(n: int = 4000) -> Tensor:
    angle = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    return torch.stack([angle.cos(), angle.sin()], -1)


@pytest.mark.parametrize("seed", range(8))
def test_moments_entropy_and_mode_are_those_of_the_circle(seed: int) -> None:
    p = FisherBingham(4 * draws(2, seed=seed), 5 * draws(2, seed=seed + 100))
    x = ring()
    weights = p.log_prob(x).exp() * (2 * math.pi / len(x))
    torch.testing.assert_close(weights.sum().item(), 1.0)
    torch.testing.assert_close(p.mean, weights @ x)
    torch.testing.assert_close(p.second_moment, weights @ x.square())
    torch.testing.assert_close(p.entropy(), -(weights @ p.log_prob(x)))
    assert p.log_prob(p.mode) >= p.log_prob(x).max()
    torch.testing.assert_close(
        p.log_prob(p.mode), p.log_prob(x).max(), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dim", [2, 10, 512, 2048])
def test_equal_widths_are_a_von_mises_fisher_distribution(dim: int) -> None:
    mu = normalize(draws(dim), dim=-1)
    p, q = (
        FisherBingham(30 * mu, torch.full((dim,), -7.0).double()),
        VonMisesFisher(mu, 30.0),
    )
    torch.testing.assert_close(p.mode, mu)
    torch.testing.assert_close(p.mean, q.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(p.entropy(), q.entropy(), rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(kl_divergence(q, p).item(), 0.0, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("dim", "size", "kappa"),
    [(512, 129.0, 2.7), (512, 1e3, 1e3), (256, 1e-2, 1e-2), (3, 1e3, 1e-2)],
)
def test_the_normaliser_does_not_depend_on_the_nodes(
    dim: int, size: float, kappa: float
) -> None:
    """Hard cases among them; 8 units in the last place, or 1e-10."""
    generator = torch.Generator().manual_seed(0)
    a = -size * torch.rand(40, dim, generator=generator, dtype=torch.float64)
    b = kappa * normalize(draws(40, dim), dim=-1)
    found, fine = log_fisher_bingham(b, a), log_fisher_bingham(b, a, nodes=400)
    bound = (8 * torch.finfo(torch.float64).eps * fine.abs()).clamp(min=1e-10)
    assert bool(((found - fine).abs() <= bound).all())


@pytest.mark.parametrize("dim", [2, 3, 8, 32, 128, 512, 2048])
def test_the_normaliser_is_exact_over_five_decades(dim: int) -> None:
    """Every width and every length from 0.01 to 1000, against many times the nodes."""
    sizes = torch.logspace(-2, 3, 6, dtype=torch.float64)
    size, kappa = torch.cartesian_prod(sizes, sizes)[:, :, None].unbind(1)
    generator = torch.Generator().manual_seed(dim)
    a = -size * torch.rand(36, dim, generator=generator, dtype=torch.float64)
    b = kappa * normalize(draws(36, dim), dim=-1)
    many = 400 if dim < 1000 else 130
    found, fine = log_fisher_bingham(b, a), log_fisher_bingham(b, a, nodes=many)
    bound = (8 * torch.finfo(torch.float64).eps * fine.abs()).clamp(min=1e-10)
    assert bool(((found - fine).abs() <= bound).all())


def by_its_power_series(b: torch.Tensor, a: torch.Tensor) -> float:
    """The log normaliser with forty digits, without contour, saddle or quadrature: the
    series in chapter 165, whose terms are all positive."""
    with mpmath.workdps(40):
        low, half = a.min().item(), mpmath.mpf(len(b)) / 2
        shifted = [mpmath.mpf(v) - mpmath.mpf(low) for v in a.tolist()]
        squares = [mpmath.mpf(v) ** 2 / 4 for v in b.tolist()]
        power, p, c = [mpmath.mpf(1)] * len(shifted), [], [mpmath.mpf(1)]
        gamma = term = total = 1 / mpmath.gamma(half)
        while len(p) < 10 or term > total * mpmath.mpf(10) ** -25:
            n, raised = len(c), [x * y for x, y in zip(power, shifted, strict=True)]
            p.append(mpmath.fsum(raised) / 2 + n * mpmath.fdot(squares, power))
            c.append(mpmath.fdot(p, reversed(c)) / n)
            gamma, power = gamma / (half + n - 1), raised
            term = c[-1] * gamma
            total += term
        return low + float(mpmath.log(2 * mpmath.pi**half * total))


def test_the_hardest_law_is_that_of_forty_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    a = -129 * torch.rand(2, 512, generator=generator, dtype=torch.float64)
    b = 2.7 * normalize(draws(2, 512), dim=-1)
    found = log_fisher_bingham(b, a)
    for row, linear, quadratic in zip(found, b, a, strict=True):
        wanted = by_its_power_series(linear, quadratic)
        bound = max(1e-10, 8 * torch.finfo(torch.float64).eps * abs(wanted))
        assert abs(row.item() - wanted) <= bound


def test_two_thousand_dimensions_are_those_of_forty_digits() -> None:
    generator = torch.Generator().manual_seed(1)
    a = -3 * torch.rand(2048, generator=generator, dtype=torch.float64)
    b = 20 * normalize(draws(2048), dim=-1)
    wanted = by_its_power_series(b, a)
    bound = max(1e-10, 8 * torch.finfo(torch.float64).eps * abs(wanted))
    assert abs(log_fisher_bingham(b, a).item() - wanted) <= bound


@pytest.mark.parametrize("dim", [2, 64, 2048])
def test_single_precision_keeps_its_digits(dim: int) -> None:
    b, a = 5 * draws(6, dim).float(), 20 * draws(6, dim, seed=1).float()
    p, exact = FisherBingham(b, a), FisherBingham(b.double(), a.double())
    for name in ("log_normalizer", "mean", "second_moment", "mode"):
        found, wanted = getattr(p, name), getattr(exact, name)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [3, 512])
def test_many_draws_of_few_densities(dim: int) -> None:
    """One matrix for each density, and not for each draw, changes no draw."""
    b, a = 40 * normalize(draws(3, dim), dim=-1), -30 * draws(3, dim, seed=1).abs()
    g = torch.Generator().manual_seed
    n = 400 if dim < 100 else 16
    y = FisherBingham(b, a).sample((n // 2, 2), generator=g(5))
    rows = (part.expand(n, 3, dim) for part in (b, a))
    one_by_one = sample_fisher_bingham(*rows, generator=g(5))
    torch.testing.assert_close(y.flatten(0, 1), one_by_one)
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(n // 2, 2, 3).double())


def test_draws_of_a_long_vector_have_the_right_moments() -> None:
    """Within 4.5 standard errors, in 512 dimensions; the draws are seeded."""
    b = 60 * normalize(draws(512), dim=-1)
    p = FisherBingham(b, 80 * draws(512, seed=1))
    y = p.sample((1500,), generator=torch.Generator().manual_seed(6))
    for found, wanted in ((y, p.mean), (y.square(), p.second_moment)):
        off = (found.mean(0) - wanted) / (found.std(0) / len(y) ** 0.5)
        assert off.abs().max() < 4.5


def test_no_information_has_no_divergence_from_the_uniform() -> None:
    q = VonMisesFisher(torch.eye(4, dtype=torch.float64)[0], 0.0)
    p = FisherBingham(torch.zeros(4).double(), torch.zeros(4).double())
    assert abs(kl_divergence(q, p).item()) < 1e-10


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0])
def test_product_kernels_are_integrals_over_the_circle(order: float) -> None:
    p = FisherBingham(3 * draws(2), 2 * draws(2, seed=1))
    q = VonMisesFisher(normalize(draws(2, seed=2), dim=-1), 4.0)
    x = ring()
    both = (order * (p.log_prob(x) + q.log_prob(x))).exp().mean() * 2 * math.pi
    torch.testing.assert_close(log_product_kernel(p, q, order), both.log())


def test_gradients_of_the_density_and_the_kernel() -> None:
    b, a = draws(2, 3).requires_grad_(), draws(2, 3, seed=1).requires_grad_()
    x = normalize(draws(2, 3, seed=2), dim=-1)
    kappa = torch.tensor([2.0, 5.0]).double().requires_grad_()
    torch.autograd.gradcheck(lambda b, a: FisherBingham(b, a).log_prob(x), (b, a))
    torch.autograd.gradcheck(
        lambda b, a, k: log_product_kernel(FisherBingham(b, a), VonMisesFisher(x, k)),
        (b, a, kappa),
    )
    torch.autograd.gradcheck(
        lambda b, a, k: kl_divergence(VonMisesFisher(x, k), FisherBingham(b, a)),
        (b, a, kappa),
    )


def test_shapes_broadcast_expand_and_keep_their_type() -> None:
    p = FisherBingham(torch.ones(5, 1, 3), torch.zeros(4, 3))
    assert p.batch_shape == (5, 4) and p.event_shape == (3,)
    assert p.sample((2,)).shape == (2, 5, 4, 3) and p.sample().dtype == torch.float32
    assert p.expand((6, 5, 4)).entropy().shape == (6, 5, 4)
    assert p.mode.dtype == p.mean.dtype == torch.float32
    empty = FisherBingham(torch.ones(2, 0, 3), torch.zeros(3))
    assert empty.sample((4,)).shape == (4, 2, 0, 3)
    assert empty.entropy().shape == empty.log_prob(empty.mode).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FisherBingham(torch.ones(3), torch.ones(2)), "same D"),
        (lambda: FisherBingham(torch.ones(3), torch.full((3,), math.nan)), "finite"),
        (lambda: FisherBingham(torch.ones(3), torch.ones(3), validate_args=True).log_prob(torch.ones(3)), "unit"),
        (lambda: fit_fisher_bingham(torch.ones(3)), "shape"),
        (lambda: log_product_kernel(FisherBingham(*torch.ones(2, 3)), VonMisesFisher(torch.eye(3)[0], 1.0), 0.0), "order"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
