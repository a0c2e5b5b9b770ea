"""The marginal against independent oracles; the closed kernels and the non-isotropic
vMF against quadrature."""

import math
import warnings
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ive

from pcl import marginal, pair_integral
from pcl.bessel import bessel_ratio
from pcl.kernels import (
    cosine_similarity,
    kl,
    log_bhattacharyya,
    log_expected_likelihood,
    squared_distance,
)
from pcl.marginal import log_marginal
from pcl.nonisotropic import NonIsotropicVMF, fit_nonisotropic
from pcl.published.sphere import published_log_prob
from pcl.vmf import VonMisesFisher

F64 = torch.float64


def tensor(*x: float) -> torch.Tensor:
    return torch.tensor(x[0] if len(x) == 1 else x, dtype=F64)


def by_exact_series(
    cosines: list[float],
    kappas: tuple[float, ...],
    dim: int,
    digits: int = 200,
    n_terms: int = 400,
) -> torch.Tensor:
    """The series in arithmetic with so many digits that its cancellation does not
    matter."""
    logs = exact_logs(cosines, kappas, dim, digits, n_terms)
    return tensor(*(float(log) for log in logs))


def exact_logs(
    cosines: list[Any], kappas: tuple[Any, ...], dim: int, digits: int, n_terms: int
) -> list[Any]:
    """The logarithms of the series with all their digits."""
    with mpmath.workdps(digits):
        nu, products = mpmath.mpf(dim) / 2 - 1, [mpmath.mpf(1)] * n_terms
        for kappa in (mpmath.mpf(k) for k in kappas):
            ratio = mpmath.besseli(nu + n_terms + 1, kappa) / mpmath.besseli(
                nu + n_terms, kappa
            )
            ratios = []
            for v in range(n_terms - 1, -1, -1):
                ratio = 1 / (2 * (nu + v + 1) / kappa + ratio)
                ratios.append(ratio)
            a = mpmath.mpf(1)
            for degree, ratio in enumerate(ratios[:0:-1], 1):
                a *= ratio
                products[degree] *= a
        for degree in range(1, n_terms):  # the number of harmonics
            count = (
                mpmath.mpf(2)
                if dim == 2
                else mpmath.binomial(degree + dim - 3, degree)
                * (2 * degree + dim - 2)
                / (dim - 2)
            )
            products[degree] *= count
        logs = []
        for t in (mpmath.mpf(c) for c in cosines):
            before, now, total = mpmath.mpf(1), t, products[0]
            for degree in range(1, n_terms):
                total += products[degree] * now
                before, now = (
                    now,
                    ((2 * degree + dim - 2) * t * now - degree * before)
                    / (degree + dim - 2),
                )
            logs.append(mpmath.log(total))
    return logs


def by_adaptive_quadrature(
    t: float, kappas: tuple[float, float, float], dim: int
) -> float:
    """Formula 43 in polar angles by scipy's adaptive quadrature, with its own Bessel
    functions."""
    x, y, z = kappas

    def log_scaled(d: int, k: float) -> float:  # log C_d(k) + k
        if (
            ive(d / 2 - 1, k) == 0
        ):  # underflow at a tiny k: the leading terms will do, where the volume factor is nil
            return (
                math.lgamma(d / 2)
                - math.log(2)
                - d / 2 * math.log(math.pi)
                + k
                - k * k / (2 * d)
            )
        return (
            (d / 2 - 1) * math.log(k)
            - d / 2 * math.log(2 * math.pi)
            - math.log(ive(d / 2 - 1, k))
        )

    def log_f(theta: float) -> float:
        r = math.sqrt(y * y + z * z + 2 * y * z * math.cos(theta))
        w = x * math.sqrt(1 - t * t) * math.sin(theta)
        value = (
            x * t * math.cos(theta)
            + w
            - x
            + r
            - y
            - z
            - log_scaled(dim - 1, w)
            - log_scaled(dim, r)
        )
        return value + (dim - 2) * math.log(math.sin(theta))

    peak = max((log_f(a), a) for a in np.linspace(1e-4, math.pi - 1e-4, 4001))
    total = quad(
        lambda a: math.exp(log_f(a) - peak[0]),
        0,
        math.pi,
        points=[peak[1]],
        epsabs=0,
        epsrel=1e-11,
        limit=400,
    )[0]
    area = math.log(2) + dim / 2 * math.log(math.pi) - math.lgamma(dim / 2)
    return area + sum(log_scaled(dim, k) for k in kappas) + peak[0] + math.log(total)


CONCENTRATIONS = [
    (1.0, 2.0, 3.0),
    (20.0, 28.0, 20.0),
    (150.0, 150.0, 128.0),
    (0.01, 1e6, 20.0),
    (1e6, 1e6, 40.0),
    (1e6, 7.0, 300.0),
]
COSINES = [-1.0, -0.97, -0.3, 0.0, 0.4, 0.999, 1.0]


@pytest.mark.parametrize("dim", [2, 3, 4, 7, 10, 64, 128, 512])
@pytest.mark.parametrize("kappas", CONCENTRATIONS)
def test_marginal_against_many_digits(dim, kappas):
    single = torch.tensor(COSINES)
    truth = by_exact_series(COSINES + single.tolist(), kappas, dim)
    exact, rounded = truth.chunk(2)
    assert (log_marginal(tensor(*COSINES), *kappas, dim) - exact).abs().max() < 1e-8
    # single precision cannot hold a number of hundreds to 1e-4, so beyond one it is
    # 1e-4 of the number
    assert (
        (log_marginal(single, *kappas, dim) - rounded).abs()
        / rounded.abs().clamp(min=1)
    ).max() < 1e-4


@pytest.mark.parametrize("dim", [3, 5, 16, 64, 128, 256])
def test_marginal_against_adaptive_quadrature(dim):
    for t in (-0.8, 0.1, 0.9):
        for kappas in (
            (5.0, 9.0, 30.0),
            (80.0, 60.0, 1e3),
            (4e3, 900.0, 1e3),
            (400.0, 300.0, 256.0),
        ):
            value = float(log_marginal(tensor(t), *kappas, dim))
            assert abs(value - by_adaptive_quadrature(t, kappas, dim)) < 1e-8


@pytest.mark.parametrize("dim", [2, 10, 40])
def test_marginal_against_monte_carlo(dim):
    g, n, kappas = (
        torch.Generator().manual_seed(dim),
        200_000,
        (1.2 * dim, 1.5 * dim, 1.0 * dim),
    )
    for t in (0.9, 0.3, -0.2):
        first, second = torch.zeros(dim, dtype=F64), torch.zeros(dim, dtype=F64)
        first[0], second[0], second[1] = 1, t, math.sqrt(1 - t * t)
        z = VonMisesFisher(first, tensor(kappas[0])).sample((n,), generator=g)
        q = VonMisesFisher(
            second, tensor(kappas[1])
        )  # z+ is integrated by hand: an expected likelihood per draw
        log_e = (
            log_expected_likelihood(VonMisesFisher(z, tensor(kappas[2])), q)
            + math.log(2)
            + dim / 2 * math.log(math.pi)
        )
        ratio = (log_e - math.lgamma(dim / 2)).exp()
        value = float(log_marginal(tensor(t), *kappas, dim).exp())
        assert abs(float(ratio.mean()) - value) < 4 * float(ratio.std()) / math.sqrt(n)


@pytest.mark.parametrize("dim", [2, 3, 10, 64, 200])
def test_slope_in_the_cosine_is_the_marginal_two_dimensions_up(dim):
    for kappas in ((3.0, 8.0, 5.0), (20.0, 28.0, 20.0), (400.0, 1e6, 300.0)):
        t = torch.linspace(-1, 1, 33, dtype=F64, requires_grad=True)
        value = log_marginal(t, *kappas, dim)
        (slope,) = torch.autograd.grad(value.sum(), t)
        factor = dim * math.prod(
            float(bessel_ratio(dim / 2 - 1, tensor(k))) for k in kappas
        )
        torch.testing.assert_close(
            slope,
            factor * (log_marginal(t, *kappas, dim + 2) - value).exp(),
            rtol=2e-7,
            atol=0,
        )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 512),
    st.floats(-1, 1),
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e3)),
    st.permutations([0, 1, 2]),
)
def test_symmetric_in_all_three_concentrations(dim, t, kappas, order):
    value = log_marginal(tensor(t), *kappas, dim)
    turned = log_marginal(tensor(t), *(kappas[i] for i in order), dim)
    assert value.isfinite() and (value - turned).abs() < 4e-9


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("dim", [2, 3, 17, 64, 512])
def test_extremes_are_finite_and_increase_with_the_cosine(dim, dtype):
    kappa = torch.tensor([0, 1e-6, 1e-2, 1, 30, 1e3, 1e6, math.inf], dtype=dtype)
    cos = torch.linspace(-1, 1, 21, dtype=dtype)
    inputs = [
        x.clone().requires_grad_()
        for x in torch.meshgrid(cos, kappa, kappa, kappa[:6], indexing="ij")
    ]
    value = log_marginal(*inputs, dim)
    value.sum().backward()
    assert value.isfinite().all() and all(
        x.grad is not None and x.grad.isfinite().all() for x in inputs
    )
    assert (inputs[0].grad >= 0).all()
    slack = 1e-8 if dtype == F64 else 1e-5
    assert (value.diff(dim=0) >= -slack * value.abs()[1:].clamp(min=1)).all()
    certain = (
        (inputs[1].detach() > 0.5)
        & (inputs[2].detach() > 0.5)
        & (inputs[3].detach() > 0.5)
    )
    if dim < 64:  # there a step of 0.1 in the cosine is worth more than a rounding
        assert (value.diff(dim=0)[certain[1:]] > 0).all()


@pytest.mark.parametrize("dim", [2, 3, 10, 64])
@pytest.mark.parametrize("force_integral", [False, True])
def test_gradients(dim, force_integral, monkeypatch):
    if force_integral:
        monkeypatch.setattr(marginal, "_n_terms", lambda *_: None)
    g = torch.Generator().manual_seed(3)
    cos = (torch.rand(3, 4, generator=g, dtype=F64) * 1.8 - 0.9).requires_grad_()
    kappa1, kappa2 = (
        tensor(0.3, 20.0, 200.0)[:, None].requires_grad_(),
        tensor(2.0, 9.0, 50.0, 700.0)[None].requires_grad_(),
    )
    kappa_pos = tensor(15.0).requires_grad_()
    inputs = (cos, kappa1, kappa2, kappa_pos)
    assert torch.autograd.gradcheck(
        lambda *x: log_marginal(*x, dim), inputs, eps=1e-4, atol=1e-5, rtol=1e-5
    )


def test_gradients_at_zero_and_at_a_point_mass():
    kappa = tensor(0.0, 0.0).requires_grad_()
    log_marginal(tensor(0.5, -0.5), kappa, 8.0, 5.0, 10).sum().backward()
    expected = (
        10
        * 0.1
        * bessel_ratio(4.0, tensor(8.0))
        * bessel_ratio(4.0, tensor(5.0))
        * tensor(0.5, -0.5)
    )
    torch.testing.assert_close(kappa.grad, expected)  # N_1 a_1'(0) a_1 a_1 t
    cos, kappa_pos = tensor(0.2).requires_grad_(), tensor(20.0).requires_grad_()
    log_marginal(cos, math.inf, math.inf, kappa_pos, 10).backward()
    assert abs(cos.grad - 20) < 1e-9
    torch.testing.assert_close(kappa_pos.grad, 0.2 - bessel_ratio(4.0, tensor(20.0)))


@pytest.mark.parametrize(
    ("dim", "kappa", "kappa_pos"),
    [(10, 200.0, 100.0), (32, 75.0, 64.0), (64, 150.0, 128.0)],
)
@pytest.mark.parametrize("tolerance", [1e-9, 2e-5])
def test_smooth_across_the_switch(dim, kappa, kappa_pos, tolerance):
    t = torch.linspace(-1, 1, 2001, dtype=F64)[None]
    kappas = [tensor(k)[None, None] for k in (kappa_pos, kappa, kappa)]
    value, slope = marginal._log_marginal_and_slopes(
        t, kappas, dim, tolerance, [True, False, False, False]
    )
    n_terms = marginal._n_terms(dim, (kappa_pos, kappa, kappa))
    (total,), size = marginal._series(t, kappas, dim, n_terms, [False] * 4)
    trusted = 2 * marginal._EPS * size <= tolerance * total
    assert trusted.any() and not trusted.all()  # the switch is inside the range
    truth, derivatives = pair_integral.marginal_integral(
        t[0], torch.cat(kappas).expand(3, 2001), dim, 1e-18, True
    )
    assert (value[0] - truth).abs().max() < 5 * tolerance
    assert ((slope[0] - derivatives[0]).abs() / derivatives[0]).max() < 50 * tolerance
    steps = value[0].diff()
    bend = (
        steps.diff()
    )  # a jump at the switch would stand out of the second differences by its own size
    assert (bend - bend.median()).abs().max() < 5 * tolerance + 2 * (
        truth.diff().diff() - bend.median()
    ).abs().max()


def test_pairs_equal_elements_whatever_the_layout():
    g = torch.Generator().manual_seed(0)
    cos = torch.rand(40, 30, generator=g, dtype=F64) * 2 - 1
    k1, k2 = (
        torch.rand(40, 1, generator=g, dtype=F64) * 40,
        torch.rand(1, 30, generator=g, dtype=F64) * 40,
    )
    pairs = log_marginal(cos, k1, k2, 20.0, 10)
    flat = log_marginal(
        cos.flatten(),
        k1.expand(40, 30).flatten(),
        k2.expand(40, 30).flatten(),
        tensor(20.0),
        10,
    )
    deep = log_marginal(
        cos.reshape(5, 8, 30),
        k1.reshape(5, 8, 1),
        k2,
        torch.full((5, 1, 1), 20.0, dtype=F64),
        10,
    )
    torch.testing.assert_close(pairs.flatten(), flat, rtol=0, atol=2e-9)
    torch.testing.assert_close(pairs.flatten(), deep.flatten(), rtol=0, atol=2e-9)
    assert log_marginal(cos[:0], k1[:0], k2, 20.0, 10).shape == (0, 30)


@pytest.mark.parametrize(
    ("dim", "low", "high", "kappa_pos"),
    [(128, 200.0, 400.0, 256.0), (64, 3.0, 900.0, 128.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_interpolated_pairs_equal_integrated_ones(
    dim, low, high, kappa_pos, dtype, monkeypatch
):
    g = torch.Generator().manual_seed(1)
    cos = torch.rand(256, 256, generator=g, dtype=dtype) - 0.6
    k1 = torch.empty(256, 1, dtype=dtype).uniform_(low, high, generator=g)
    k2 = torch.empty(1, 256, dtype=dtype).uniform_(low, high, generator=g)

    def run(rows):
        inputs = [x.clone().requires_grad_() for x in (cos[rows], k1[rows], k2)]
        value = log_marginal(*inputs, kappa_pos, dim)
        value.sum().backward()
        return value.detach(), inputs[0].grad, inputs[1].grad

    used: list[int] = []
    monkeypatch.setattr(
        marginal,
        "_interpolate",
        lambda *x, real=marginal._interpolate: used.append(1) or real(*x),
    )
    many = run(slice(None))
    monkeypatch.setattr(marginal, "_tabulated", lambda *x: None)
    one_by_one = run(slice(0, 20))
    assert len(used) == (
        1 if high < 500 else len(used)
    )  # the narrow box must take the short cut; the wide one may
    tolerance = 1e-8 if dtype == F64 else 1e-4
    for a, b in zip(many, one_by_one, strict=True):
        assert ((a[:20] - b).abs() / b.abs().clamp(min=1)).max() < tolerance


@pytest.mark.parametrize(
    ("dim", "low", "high", "kappa_pos"),
    [(5, 16.0, 32.0, 20.0), (10, 8.0, 50.0, 20.0), (64, 102.0, 205.0, 128.0)],
)
@pytest.mark.parametrize("columns", [64, 1])
def test_tables_for_training_equal_the_series_and_forget_nothing(
    dim, low, high, kappa_pos, columns
):
    g = torch.Generator().manual_seed(2)
    cos = (torch.rand(512, columns, generator=g) * 2 - 1).requires_grad_()
    k1 = torch.empty(512, 1).uniform_(low, high, generator=g).requires_grad_()
    k2 = (
        torch.empty((1, columns) if columns > 1 else (512, 1))
        .uniform_(low, high, generator=g)
        .requires_grad_()
    )

    def run(*inputs):
        value = log_marginal(*inputs, kappa_pos, dim)
        return [value.detach(), *torch.autograd.grad(value.sum(), inputs)]

    marginal._table.cache_clear()
    first = run(cos, k1, k2)
    assert (
        marginal._table.cache_info().currsize == 1
    )  # a table was built, so the comparison below is one
    for a, b in zip(first, run(cos.double(), k1.double(), k2.double()), strict=True):
        assert ((a - b).abs() / b.abs().clamp(min=1)).max() < 1e-4
    marginal._table.cache_clear()
    run(cos.detach().requires_grad_(), k1 * 0.9, k2 * 1.1)  # another batch first
    for a, b in zip(first, run(cos, k1, k2), strict=True):
        assert a.equal(b)


def test_rounded_cosines_are_clamped():
    over = torch.tensor([1 + 3e-6, -1 - 3e-6])
    torch.testing.assert_close(
        log_marginal(over, 5.0, 6.0, 7.0, 10),
        log_marginal(over.clamp(-1, 1), 5.0, 6.0, 7.0, 10),
    )


@pytest.mark.parametrize(
    ("arguments", "error", "names"),
    [
        ((tensor(0.1), tensor(-1.0), 1.0, 1.0, 10), ValueError, "kappa1"),
        ((tensor(0.1), 1.0, tensor(math.nan), 1.0, 10), ValueError, "kappa2"),
        ((tensor(0.1), 1.0, 1.0, -3.0, 10), ValueError, "kappa_pos"),
        ((tensor(1.01), 1.0, 1.0, 1.0, 10), ValueError, "cos"),
        ((tensor(math.nan), 1.0, 1.0, 1.0, 10), ValueError, "cos"),
        ((tensor(0.1), 1.0, 1.0, 1.0, 1), ValueError, "dim"),
        ((tensor(0.1), 1.0, 1.0, 1.0, 2.5), ValueError, "dim"),
        ((torch.tensor([1]), 1.0, 1.0, 1.0, 10), TypeError, "cos"),
        ((tensor(0.1), torch.tensor([3]), 1.0, 1.0, 10), TypeError, "kappa1"),
        ((tensor(0.1), 1.0, None, 1.0, 10), TypeError, "kappa2"),
        ((tensor(0.1), 1.0, 1.0, "20", 10), TypeError, "kappa_pos"),
        ((tensor(0.1, 0.2), tensor(1.0, 2.0, 3.0), 1.0, 1.0, 10), ValueError, "kappa1"),
    ],
)
def test_bad_input_is_named(arguments, error, names):
    with pytest.raises(error, match=names):
        log_marginal(*arguments)


def sphere_grid() -> tuple[torch.Tensor, torch.Tensor]:
    "Points of the 2-sphere and their weights."
    nodes, weights = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(240))
    angle = torch.arange(480, dtype=F64) * 2 * math.pi / 480
    ring = (1 - nodes**2).sqrt()[:, None]
    points = torch.stack(
        [ring * angle.cos(), ring * angle.sin(), nodes[:, None].expand(-1, 480)], -1
    )
    return points.reshape(-1, 3), (weights[:, None] * (2 * math.pi / 480)).expand(
        -1, 480
    ).reshape(-1)


def some_vmfs(seed: int, n: int, dim: int = 3) -> VonMisesFisher:
    g = torch.Generator().manual_seed(seed)
    loc = torch.nn.functional.normalize(
        torch.randn(n, dim, generator=g, dtype=F64), dim=-1
    )
    return VonMisesFisher(loc, torch.rand(n, generator=g, dtype=F64) * 30)


def test_closed_kernels_against_quadrature():
    points, weights = sphere_grid()
    p, q = some_vmfs(0, 5), some_vmfs(1, 4)
    log_p, log_q = (
        p.log_prob(points[:, None])[:, :, None],
        q.log_prob(points[:, None])[:, None, :],
    )
    w = weights[:, None, None]
    torch.testing.assert_close(
        log_expected_likelihood(p, q, pairwise=True).exp(),
        (w * (log_p + log_q).exp()).sum(0),
    )
    torch.testing.assert_close(
        log_bhattacharyya(p, q, pairwise=True).exp(),
        (w * ((log_p + log_q) / 2).exp()).sum(0),
    )
    torch.testing.assert_close(
        kl(p, q, pairwise=True), (w * log_p.exp() * (log_p - log_q)).sum(0)
    )
    torch.testing.assert_close(cosine_similarity(p, q, pairwise=True), p.loc @ q.loc.T)


@pytest.mark.parametrize(
    "kernel",
    [
        log_expected_likelihood,
        log_bhattacharyya,
        kl,
        cosine_similarity,
        squared_distance,
    ],
)
def test_all_pairs_match_element_by_element(kernel):
    p, q = some_vmfs(0, 6, 20), some_vmfs(1, 5, 20)
    looped = torch.stack(
        [
            torch.stack(
                [
                    kernel(VonMisesFisher(a, k), VonMisesFisher(b, c))
                    for b, c in zip(q.loc, q.concentration, strict=True)
                ]
            )
            for a, k in zip(p.loc, p.concentration, strict=True)
        ]
    )
    torch.testing.assert_close(
        kernel(p, q, pairwise=True), looped, rtol=1e-9, atol=1e-9
    )


def test_closed_kernels_at_the_ends():
    mu, other = torch.eye(4, dtype=F64)[0], torch.eye(4, dtype=F64)[1]
    point, flat, some = (VonMisesFisher(mu, tensor(k)) for k in (math.inf, 0.0, 7.0))
    torch.testing.assert_close(log_expected_likelihood(point, some), some.log_prob(mu))
    torch.testing.assert_close(
        log_expected_likelihood(flat, some), flat.log_prob(other)
    )
    assert log_expected_likelihood(point, point) == math.inf
    assert (
        log_bhattacharyya(point, some) == -math.inf
        and log_bhattacharyya(point, point) == 0
    )
    assert kl(some, point) == math.inf and kl(point, point) == 0 and kl(flat, flat) == 0
    torch.testing.assert_close(
        kl(some, flat), torch.distributions.kl_divergence(some, flat)
    )
    assert (
        squared_distance(point, some) == math.inf
        and squared_distance(point, point) == 0
    )


def test_closed_kernels_have_gradients():
    loc = torch.nn.functional.normalize(
        torch.randn(3, 6, dtype=F64, generator=torch.Generator().manual_seed(5)), dim=-1
    )
    k1, k2 = (
        tensor(0.5, 4.0, 80.0).requires_grad_(),
        tensor(3.0, 9.0, 1.0).requires_grad_(),
    )
    for kernel in (log_expected_likelihood, log_bhattacharyya, kl):
        for pairwise in (False, True):

            def run(a, b, kernel=kernel, pairwise=pairwise):
                return kernel(
                    VonMisesFisher(loc, a),
                    VonMisesFisher(loc.flip(0), b),
                    pairwise=pairwise,
                )

            assert torch.autograd.gradcheck(run, (k1, k2))


def test_a_point_mass_turns_the_marginal_into_the_expected_likelihood():
    p, q = some_vmfs(0, 6, 12), some_vmfs(1, 6, 12)
    area = math.log(2) + 6 * math.log(math.pi) - math.lgamma(6)
    value = log_marginal(
        cosine_similarity(p, q), p.concentration, q.concentration, math.inf, 12
    )
    torch.testing.assert_close(value, log_expected_likelihood(p, q) + area)


def test_closed_kernels_refuse_bad_input():
    p = some_vmfs(0, 3)
    with pytest.raises(TypeError, match="q must be"):
        log_expected_likelihood(p, torch.zeros(3))
    with pytest.raises(ValueError, match="same dimension"):
        kl(p, some_vmfs(0, 3, 5))
    with pytest.raises(ValueError, match="batch"):
        kl(p, VonMisesFisher(torch.eye(3)[0], 2.0), pairwise=True)
    for pairwise, other in (
        (False, some_vmfs(0, 4)),
        (True, some_vmfs(0, 4).expand((5, 4))),
    ):
        with pytest.raises(ValueError, match="batch shapes that broadcast"):
            log_bhattacharyya(p.expand((2, 3)), other, pairwise=pairwise)


def test_nivmf_is_normalised_and_reduces_to_the_vmf():
    points, weights = sphere_grid()
    mu = torch.nn.functional.normalize(tensor(0.3, -1.0, 0.5), dim=0)
    for concentration in (
        tensor(1.0, 1.0, 1.0),
        tensor(3.0, 8.0, 20.0),
        tensor(2.0, 1.0, 5.0),
    ):
        density = NonIsotropicVMF(mu, concentration)
        assert abs((density.log_prob(points).exp() * weights).sum() - 1) < 1e-8
    round_one = NonIsotropicVMF(mu, torch.full((3,), 6.0, dtype=F64))
    torch.testing.assert_close(
        round_one.log_prob(points), VonMisesFisher(mu, tensor(6.0)).log_prob(points)
    )
    # the published constant: prod(kappa) / |K mu| = 36 too much at K = 6 I
    torch.testing.assert_close(
        published_log_prob(round_one, points) - math.log(36), round_one.log_prob(points)
    )


def test_nivmf_samples_follow_its_density():
    points, weights = sphere_grid()
    density = NonIsotropicVMF(
        torch.nn.functional.normalize(tensor(1.0, 1.0, 1.0), dim=0),
        tensor(3.0, 8.0, 20.0),
    )
    draws = density.rsample((100_000,), generator=torch.Generator().manual_seed(0))
    mass = (density.log_prob(points).exp() * weights)[:, None]
    for moment in (lambda x: x, lambda x: x * x, lambda x: x.roll(1, -1) * x):
        spread = moment(draws).std(0) / math.sqrt(100_000)
        assert (
            (moment(draws).mean(0) - (mass * moment(points)).sum(0)).abs() < 4 * spread
        ).all()


@pytest.mark.parametrize(
    ("concentration", "error"),
    [
        (tensor(1.0, 2.0), ValueError),
        (tensor(1.0, -2.0, 3.0), ValueError),
        (tensor(1.0, math.nan, 3.0), ValueError),
        (torch.tensor([1, 2, 3]), TypeError),
        ([1.0, 2.0, 3.0], TypeError),
    ],
)
def test_nivmf_refuses_bad_input(concentration, error):
    with pytest.raises(error, match="concentration"):
        NonIsotropicVMF(torch.eye(3, dtype=F64)[0], concentration)


@pytest.mark.parametrize(
    ("loc", "error", "message"),
    [
        (tensor(2.0, 0.0, 0.0), ValueError, "loc must hold unit vectors"),
        (tensor(0.0, 0.0, 0.0), ValueError, "loc must hold"),
        (tensor(math.nan, 0.0, 0.0), ValueError, "loc must hold"),
        (torch.tensor([1, 0, 0]), TypeError, "loc must be a floating"),
        (tensor(1.0), ValueError, "loc must have shape"),
        (
            torch.eye(3, dtype=F64)[:2, None].expand(2, 4, 3),
            ValueError,
            "broadcast together",
        ),
    ],
)
def test_nivmf_refuses_a_bad_location(loc, error, message):
    with pytest.raises(error, match=message):
        NonIsotropicVMF(loc, torch.full((5, 3), 2.0, dtype=F64))


def test_nivmf_is_a_distribution_like_the_others():
    density = NonIsotropicVMF(torch.eye(3, dtype=F64)[0], tensor(3.0, 8.0, 20.0))
    wide = density.expand((2, 5))
    assert (
        wide.batch_shape == (2, 5)
        and wide.event_shape == (3,)
        and wide.sample((4,)).shape == (4, 2, 5, 3)
    )
    draws = [
        density.sample((6,), generator=torch.Generator().manual_seed(0))
        for _ in range(2)
    ]
    assert torch.equal(*draws) and density.rsample((0, 2)).shape == (0, 2, 3)
    torch.testing.assert_close(
        wide.log_prob(draws[0][0]), density.log_prob(draws[0][0]).expand(2, 5)
    )
    for bad, message in (
        (2 * draws[0], "unit vectors"),
        (torch.ones(1, dtype=F64), "shape"),
    ):
        with pytest.raises(ValueError, match=message):
            density.log_prob(bad)
    loose = NonIsotropicVMF(
        2 * torch.eye(3, dtype=F64)[0], tensor(3.0, 8.0, 20.0), validate_args=False
    )
    assert loose.log_prob(2 * draws[0]).isfinite().all()


@pytest.mark.parametrize("dim", [2, 10, 512])
def test_marginal_at_the_far_corner_of_its_promise(dim):
    """kappa = 1e6 twice with kappa_pos = 1e3, which neither of the other oracles
    reaches."""
    cosines, kappas = [0.3, 0.8, 1.0], (1e6, 1e6, 1e3)
    truth = by_exact_series(cosines, kappas, dim, digits=600, n_terms=1600)
    error = (log_marginal(tensor(*cosines), *kappas, dim) - truth).abs()
    assert (error < 1e-8).all(), error


def test_one_matrix_per_gradient_is_kept_and_no_more():
    g = torch.Generator().manual_seed(0)
    cos = (torch.rand(60, 50, generator=g, dtype=F64) * 2 - 1).requires_grad_()
    k1, k2 = (
        torch.rand(n, generator=g, dtype=F64).mul(40).requires_grad_() for n in (60, 50)
    )
    kept: dict[int, int] = {}  # by place in memory: the inputs are saved twice

    def keep(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        value = log_marginal(cos, k1[:, None], k2[None], 20.0, 10)
    assert (
        marginal._n_terms(10, (20.0, 40.0, 40.0)) > 20
    )  # a matrix per term would show
    assert (
        value.shape == (60, 50)
        and sum(kept.values()) <= 4 * value.numel() + 60 + 50 + 1
    )  # cos and three slopes, and the concentrations


def exact_curvature(t: float, kappas: tuple[float, ...], dim: int) -> torch.Tensor:
    """Second differences of the series with 120 digits, in steps of 1e-20: (4, 4)."""
    with mpmath.workdps(120):
        step = mpmath.mpf(10) ** -20
        cosines = [mpmath.mpf(t) + i * step for i in (-1, 0, 1)]

        @cache
        def logs(*moves: int) -> list[Any]:
            moved = tuple(
                mpmath.mpf(k) + m * step for k, m in zip(kappas, moves, strict=True)
            )
            return exact_logs(cosines, moved, dim, 120, 160)

        def at(**moves: int) -> Any:
            return logs(*(moves.get(n, 0) for n in "abc"))[1 + moves.get("t", 0)]

        found = torch.zeros(4, 4, dtype=F64)
        for i, m in enumerate("tabc"):
            for j, n in enumerate("tabc"):
                if m == n:
                    total = at(**{m: 1}) - 2 * at() + at(**{m: -1})
                else:
                    ends = [(a, b) for a in (1, -1) for b in (1, -1)]
                    total = sum(a * b * at(**{m: a, n: b}) for a, b in ends) / 4
                found[i, j] = float(total / step**2)
    return found


@pytest.mark.parametrize("dim", [2, 3, 10, 64])
@pytest.mark.parametrize(
    "kappas", [(1e-3, 0.5, 2.0), (9.0, 4.0, 14.0), (30.0, 45.0, 20.0)]
)
def test_curvature_against_many_digits(dim, kappas):
    cosines = (-1.0, -0.6, 0.3, 0.999, 1.0)
    each = tensor(*kappas)[:, None].expand(3, len(cosines))
    found = pair_integral.marginal_curvature(tensor(*cosines), each, dim)
    scale = torch.cat([tensor(1.0)[None], tensor(*kappas).clamp(min=1)])
    for n, t in enumerate(cosines):
        exact = exact_curvature(t, kappas, dim)
        size = (exact * scale * scale[:, None]).abs().max().clamp(min=1e-3)
        error = ((found[..., n] - exact) * scale * scale[:, None]).abs().max()
        assert error < 2e-10 * size, (t, error / size)


@pytest.mark.parametrize("dim", [2, 3, 10, 64, 512])
@pytest.mark.parametrize(
    "kappas", [(0.0, 0.0, 0.0), (0.0, 5.0, 3.0), (20.0, 1e4, 50.0), (1e6, 300.0, 1e6)]
)
def test_curvature_in_the_cosine_from_two_and_four_dimensions_up(dim, kappas):
    t = tensor(-1.0, -0.2, 0.5, 0.99, 1.0)
    each = tensor(*kappas)[:, None].expand(3, len(t))
    kp, k1, k2 = each
    logs = [log_marginal(t, k1, k2, kp, dim + 2 * n) for n in range(3)]
    steps = [
        (dim + 2 * n) * bessel_ratio(dim / 2 - 1 + n, each).prod(0) for n in range(2)
    ]
    slope = steps[0] * (logs[1] - logs[0]).exp()
    second = steps[0] * steps[1] * (logs[2] - logs[0]).exp()
    found = pair_integral.marginal_curvature(t, each, dim)
    assert found.isfinite().all()
    torch.testing.assert_close(
        found[0, 0] + slope**2, second, rtol=2e-7, atol=1e-9
    )  # lem-dimension-shift, twice


def at_point(*kappas: float) -> torch.Tensor:
    found = pair_integral.marginal_curvature(
        tensor(-0.7, 0.0, 0.8), tensor(*kappas)[:, None].expand(3, 3), 10
    )
    assert found.isfinite().all() and torch.equal(found, found.transpose(0, 1))
    return found


def test_curvature_does_not_mind_the_order_and_reaches_its_limits():
    kappas = (8.0, 30.0, 3.0)
    whole = at_point(*kappas)
    for order in ((0, 2, 1), (2, 1, 0), (1, 2, 0)):
        some = torch.tensor([0, *(1 + i for i in order)])
        torch.testing.assert_close(
            at_point(*(kappas[i] for i in order)), whole[some][:, some]
        )
    # towards a point mass the integral runs into the closed form
    torch.testing.assert_close(
        at_point(8.0, 30.0, 9e11), at_point(8.0, 30.0, math.inf), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(
        at_point(8.0, 9e11, math.inf),
        at_point(8.0, math.inf, math.inf),
        atol=1e-9,
        rtol=0,
    )
    assert not at_point(math.inf, math.inf, math.inf).any()
    # towards nothing known it is continuous as well
    torch.testing.assert_close(
        at_point(0.0, 30.0, 8.0), at_point(1e-9, 30.0, 8.0), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("dim", [2, 3, 10, 64])
@pytest.mark.parametrize("kappa", [0.05, 4.0, 40.0, 3e3])
def test_second_derivatives_of_the_marginal(dim, kappa):
    cos = tensor(-0.95, 0.2, 0.97).requires_grad_()
    concentrations = [
        (kappa * torch.linspace(a, b, 3, dtype=F64)).requires_grad_()
        for a, b in ((0.7, 1.4), (1.2, 0.8), (1.0, 1.5))
    ]
    size = max(1.0, kappa)
    assert torch.autograd.gradgradcheck(
        lambda t, *logs: log_marginal(t, *(size * k for k in logs), dim) / size,
        (cos, *((k / size).detach().requires_grad_() for k in concentrations)),
        eps=1e-4,
        atol=2e-4,
        rtol=2e-4,
    )


@pytest.mark.parametrize("kappa", [4.0, 2e5])
def test_the_hessian_of_the_marginal_is_right_in_every_mode(kappa: float) -> None:
    cos, k0 = tensor(0.4, -0.2), tensor(kappa, kappa * 2)

    def value(k: torch.Tensor) -> torch.Tensor:
        return log_marginal(cos, k, k * 0 + 4, 16.0, 5).sum()

    slopes = lambda k: torch.autograd.functional.jacobian(value, k)  # noqa: E731
    width = 1e-3 * kappa
    numeric = torch.stack(
        [(slopes(k0 + d) - slopes(k0 - d)) / (2 * width) for d in width * torch.eye(2)]
    )
    found = torch.autograd.functional.hessian(value, k0)
    assert (found.diag() != 0).all()
    torch.testing.assert_close(found, numeric, rtol=1e-4, atol=1e-9 / kappa)
    func = torch.func
    again = [
        torch.autograd.functional.hessian(value, k0, vectorize=True),
        func.hessian(value)(k0),
        func.jacfwd(func.jacfwd(value))(k0),
        func.jacrev(func.jacfwd(value))(k0),
        func.jacrev(func.jacrev(value))(k0),
    ]
    for other in again:
        torch.testing.assert_close(other, found)
    product = torch.autograd.functional.hvp(value, k0, torch.ones_like(k0))[1]
    torch.testing.assert_close(product, found.sum(1))
    single = func.hessian(lambda k, t: log_marginal(t, k, 4.0, 16.0, 5))
    torch.testing.assert_close(func.vmap(single)(k0, cos), found.diag())
    forward = torch.autograd.functional.jvp(value, k0, torch.ones_like(k0))[1]
    torch.testing.assert_close(forward, slopes(k0).sum())


def test_forward_mode_of_the_marginal_agrees_with_reverse_mode() -> None:
    inputs = tensor(0.4, -0.2), tensor(3.0, 20.0), tensor(8.0, 5.0), tensor(16.0)
    moves = tensor(0.3, -0.1), tensor(1.0, 2.0), tensor(-1.0, 0.5), tensor(0.7)
    ad = torch.autograd.forward_ad
    value = lambda *x: log_marginal(*x, 5).sum()  # noqa: E731
    slopes = torch.autograd.functional.jacobian(value, inputs)
    expected = sum((s * m).sum() for s, m in zip(slopes, moves, strict=True))
    torch.testing.assert_close(torch.func.jvp(value, inputs, moves)[1], expected)
    with ad.dual_level():
        duals = [ad.make_dual(x, m) for x, m in zip(inputs, moves, strict=True)]
        torch.testing.assert_close(ad.unpack_dual(value(*duals)).tangent, expected)
    # an inner derivative in one input, an outer one in another
    mixed = torch.func.jacfwd(torch.func.grad(value), 1)(*inputs)
    whole = torch.autograd.functional.hessian(value, inputs)[0][1]
    torch.testing.assert_close(mixed, whole)
    torch.testing.assert_close(
        torch.func.vmap(lambda t, a, b: log_marginal(t, a, b, 16.0, 5))(*inputs[:3]),
        log_marginal(*inputs, 5),
    )


def test_a_third_derivative_of_the_marginal_is_refused_never_zero() -> None:
    value = lambda k: log_marginal(tensor(0.4), k, 4.0, 16.0, 5).sum()  # noqa: E731
    for wrap in (torch.func.jacfwd, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            wrap(torch.func.hessian(value))(tensor(3.0))
    k = tensor(3.0).requires_grad_()
    (first,) = torch.autograd.grad(value(k), k, create_graph=True)
    (second,) = torch.autograd.grad(first, k, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.grad(second, k, allow_unused=True)


def test_no_warning_whatever_the_layout_of_the_concentrations() -> None:
    kappa = torch.linspace(2, 30, 40, dtype=F64).view(20, 2)[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cos = torch.zeros(20, 20, dtype=F64).requires_grad_()
        log_marginal(cos, kappa[:, None], kappa[None], 16.0, 5).sum().backward()


def test_the_mode_of_a_round_density_is_its_mean_direction() -> None:
    loc = torch.nn.functional.normalize(torch.randn(3, 5).double(), dim=-1)
    rho = NonIsotropicVMF(loc, torch.full((3, 5), 7.0).double())
    torch.testing.assert_close(rho.mode, loc)
    assert NonIsotropicVMF(loc.float(), torch.ones(5)).mode.dtype == torch.float32


def test_a_mode_without_a_side_is_one_of_two() -> None:
    """mu has no part along the widest axis, where the density has two equal tops."""
    rho = NonIsotropicVMF(
        torch.tensor([1.0, 0.0]).double(), torch.tensor([9.0, 1.0]).double()
    )
    angle = torch.linspace(0, torch.pi, 20_001, dtype=torch.float64)
    grid = torch.stack([angle.cos(), angle.sin()], -1)
    assert rho.log_prob(rho.mode) >= rho.log_prob(grid).max() - 1e-6


@pytest.mark.parametrize(
    ("samples", "message"),
    [(torch.ones(3), "shape"), (torch.eye(3)[:1].repeat(4, 1), "one direction")],
)
def test_what_cannot_be_fitted_is_named(samples: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_nonisotropic(samples)
