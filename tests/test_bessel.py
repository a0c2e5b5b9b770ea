"""pcl.bessel against mpmath at 50 digits, closed forms, finite differences and bad
input."""

import math
from functools import cache

import mpmath as mp
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pcl import bessel
from pcl.bessel import (
    bessel_ratio,
    log_iv,
    log_normalizer,
    log_peak,
    log_sphere_area,
    mean_gap,
)

DIMS = [2, 3, 4, 5, 8, 10, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
KAPPAS = [
    0.0,
    1e-6,
    1e-3,
    0.1,
    1.0,
    3.0,
    10.0,
    11.0,
    30.0,
    100.0,
    300.0,
    1e3,
    1e4,
    1e6,
    1e8,
]
INF = float("inf")


@cache
def oracle(dim: int, kappa: float) -> tuple[mp.mpf, mp.mpf, mp.mpf, mp.mpf, mp.mpf]:
    "log I_nu, log C, A, A' and A'' from mpmath's own Bessel functions."
    with mp.workdps(50):
        nu, k = mp.mpf(dim) / 2 - 1, mp.mpf(kappa)
        if k == 0:
            log_area = mp.log(2) + (nu + 1) * mp.log(mp.pi) - mp.loggamma(nu + 1)
            return (
                (mp.mpf(0) if nu == 0 else -mp.inf),
                -log_area,
                mp.mpf(0),
                mp.mpf(1) / dim,
                mp.mpf(0),
            )
        i0, i1, i2, i3 = (mp.besseli(nu + j, k) for j in range(4))
        log_c = nu * mp.log(k) - (nu + 1) * mp.log(2 * mp.pi) - mp.log(i0)
        a, b, c = i1 / i0, i2 / i1, i3 / i2
        # I_v' = I_{v+1} + (v / k) I_v gives the slopes of the ratios
        a1, b1 = a * (b - a + 1 / k), b * (c - b + 1 / k)
        a2 = a1 * (b - a + 1 / k) + a * (b1 - a1 - 1 / k**2)
        return mp.log(i0), log_c, a, a1, a2


def relative(value: float, truth: mp.mpf) -> float:
    "Relative error, or the absolute one where the truth is zero."
    with mp.workdps(50):
        return float(abs(mp.mpf(value) - truth) / (abs(truth) if truth else 1))


@pytest.mark.parametrize("dtype, bar", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("dim", DIMS)
def test_log_normalizer_meets_the_oracle(dim, dtype, bar):
    kappa = torch.tensor(KAPPAS, dtype=dtype)
    ours = log_normalizer(dim, kappa)
    assert ours.dtype == dtype
    for k, value in zip(kappa.tolist(), ours.tolist(), strict=True):
        truth = oracle(dim, k)[1]
        assert float(abs(value - truth)) <= bar * max(abs(float(truth)), k, dim)


@pytest.mark.parametrize("dim", DIMS)
def test_short_vectors_read_off_a_table_meet_the_oracle(dim):
    kappa = torch.tensor([*KAPPAS[:-1], 7e6 * dim / 2] * 5, dtype=torch.float64)
    table = log_normalizer(dim, kappa)
    assert not torch.equal(table, log_normalizer(dim, kappa.requires_grad_()))
    for k, value in zip(kappa.tolist()[: len(KAPPAS)], table.tolist(), strict=False):
        truth = oracle(dim, k)[1]
        assert float(abs(value - truth)) <= 1e-14 * max(abs(float(truth)), k, dim), k
    single = log_normalizer(dim, kappa.detach().float())
    torch.testing.assert_close(single, table.float(), rtol=1e-6, atol=1e-6 * dim)


def test_the_table_is_left_alone_where_it_does_not_reach():
    long = torch.tensor([0.0, 3.0, INF] * 40, dtype=torch.float64)
    assert torch.equal(log_normalizer(7, long)[:3], log_normalizer(7, long[:3]))
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="non-negative"):
            log_normalizer(7, torch.full((100,), bad, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least 2"):
        log_normalizer(1, torch.ones(100))
    kappa = torch.linspace(0.1, 30, 100, dtype=torch.float64)
    one = torch.ones_like(kappa)
    slope = torch.func.jvp(lambda k: log_normalizer(7, k), (kappa,), (one,))[1]
    torch.testing.assert_close(slope, -bessel_ratio(2.5, kappa), rtol=1e-12, atol=0)
    mapped = torch.vmap(lambda k: log_normalizer(7, k))(kappa.expand(3, 100))
    torch.testing.assert_close(mapped[0], log_normalizer(7, kappa), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_ratio_and_slopes_meet_the_oracle(dim):
    kappa = torch.tensor(KAPPAS, dtype=torch.float64, requires_grad=True)
    (minus_a,) = torch.autograd.grad(
        log_normalizer(dim, kappa).sum(), kappa, create_graph=True
    )
    (minus_a1,) = torch.autograd.grad(minus_a.sum(), kappa)
    ratio = bessel_ratio(dim / 2 - 1, kappa)
    (a1,) = torch.autograd.grad(ratio.sum(), kappa, create_graph=True)
    (a2,) = torch.autograd.grad(a1.sum(), kappa)
    for i, k in enumerate(KAPPAS):
        *_, a_true, a1_true, a2_true = oracle(dim, k)
        assert relative(ratio[i].item(), a_true) <= 1e-12, k
        assert relative(-minus_a[i].item(), a_true) <= 1e-12, k
        assert relative(-minus_a1[i].item(), a1_true) <= 1e-9, k
        assert relative(a1[i].item(), a1_true) <= 1e-9, k
        assert relative(a2[i].item(), a2_true) <= 1e-9, k


@pytest.mark.parametrize("dim", DIMS)
def test_log_iv_meets_the_oracle(dim):
    for value, k in zip(
        log_iv(dim / 2 - 1, torch.tensor(KAPPAS, dtype=torch.float64)).tolist(),
        KAPPAS,
        strict=True,
    ):
        truth = float(oracle(dim, k)[0])
        assert value == truth or abs(value - truth) <= 1e-12 * max(abs(truth), k, dim)


@pytest.mark.parametrize("dim", DIMS)
def test_peak_and_gap_meet_the_oracle(dim):
    kappa = torch.tensor(KAPPAS, dtype=torch.float64, requires_grad=True)
    peak, gap = log_peak(dim, kappa), mean_gap(dim, kappa)
    (slope,) = torch.autograd.grad(peak.sum(), kappa, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), kappa)
    for i, k in enumerate(KAPPAS):
        _, log_c, a, a1, _ = oracle(dim, k)
        with mp.workdps(50):
            truth = float(log_c + mp.mpf(k))
            assert relative(gap[i].item(), 1 - a) <= 1e-12, k
            assert relative(slope[i].item(), 1 - a) <= 1e-12, k
        assert abs(peak[i].item() - truth) <= 1e-14 * max(abs(truth), dim), k
        assert relative(-bend[i].item(), a1) <= 1e-9, k


@pytest.mark.parametrize("dim", [2, 3, 10, 64, 512])
def test_peak_and_gap_keep_their_digits_at_any_concentration(dim):
    """Beyond 1e16 a subtraction would leave nothing: the leading terms of Hankel's
    expansion are the truth there."""
    kappa = torch.tensor([1e14, 1e20, 1e30, 1e100, 1e250], dtype=torch.float64)
    half = (dim - 1) / 2
    torch.testing.assert_close(
        mean_gap(dim, kappa) * kappa, torch.full_like(kappa, half), rtol=1e-8, atol=0
    )
    torch.testing.assert_close(
        log_peak(dim, kappa),
        half * (kappa / (2 * math.pi)).log(),
        rtol=1e-12,
        atol=1e-8,
    )
    ends = torch.tensor([0.0, INF], dtype=torch.float64)
    assert mean_gap(dim, ends).tolist() == [1.0, 0.0]
    assert log_peak(dim, ends)[1] == INF and log_peak(dim, ends)[0] == -log_sphere_area(
        dim
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.floats(-0.95, 400.0), st.floats(-6.0, 7.0))
@example(-0.75, 0.0)  # the ratio is above one
def test_any_real_order(nu, log10_kappa):
    kappa = 10.0**log10_kappa
    with mp.workdps(50):
        order = mp.mpf(nu)
        i0, i1 = mp.besseli(order, kappa), mp.besseli(order + 1, kappa)
        log, ratio = float(mp.log(i0)), i1 / i0
    k = torch.tensor(kappa, dtype=torch.float64)
    assert abs(log_iv(nu, k).item() - log) <= 1e-12 * max(abs(log), kappa, 1.0)
    assert relative(bessel_ratio(nu, k).item(), ratio) <= 1e-12


def test_closed_forms():
    k = torch.logspace(-3, 2.5, 40, dtype=torch.float64)
    torch.testing.assert_close(bessel_ratio(-0.5, k), k.tanh(), rtol=1e-13, atol=0)
    torch.testing.assert_close(
        log_normalizer(3, k),
        (k / (4 * math.pi * k.sinh())).log(),
        rtol=1e-12,
        atol=1e-13,
    )
    torch.testing.assert_close(
        log_iv(0.0, k), torch.special.i0e(k).log() + k, rtol=1e-12, atol=1e-13
    )
    areas = log_sphere_area(torch.tensor([2, 3, 4])).exp()
    torch.testing.assert_close(
        areas,
        torch.tensor([2 * math.pi, 4 * math.pi, 2 * math.pi**2], dtype=torch.float64),
    )


def test_uniform_and_dirac_limits():
    ends = torch.tensor([0.0, INF], dtype=torch.float64, requires_grad=True)
    log_c = log_normalizer(torch.tensor([[2], [10], [500]]), ends)
    assert torch.equal(log_c[:, 0], -log_sphere_area(torch.tensor([2, 10, 500])))
    assert torch.equal(log_c[:, 1], torch.full((3,), -INF, dtype=torch.float64))
    (grad,) = torch.autograd.grad(
        log_normalizer(10, ends).sum(), ends, create_graph=True
    )
    assert grad.tolist() == [0.0, -1.0]
    (curvature,) = torch.autograd.grad(grad.sum(), ends)
    torch.testing.assert_close(
        curvature,
        torch.tensor([-0.1, 0.0], dtype=torch.float64),
        rtol=1e-14,
        atol=1e-290,
    )
    assert bessel_ratio(4.0, ends).tolist() == [0.0, 1.0]
    assert log_iv(torch.tensor([0.0, 2.0, -0.5]), torch.tensor(0.0)).tolist() == [
        0.0,
        -INF,
        INF,
    ]
    assert (
        log_iv(torch.tensor([0.0, 2.0, -0.5]), torch.tensor(INF)).tolist() == [INF] * 3
    )


def test_the_slope_of_log_iv_at_order_zero_is_finite_at_the_origin():
    kappa = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(log_iv(torch.zeros(2), kappa).sum(), kappa)
    assert grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda k: log_normalizer(2, k),
        lambda k: log_normalizer(10, k),
        lambda k: log_normalizer(torch.tensor([[3], [40], [300]]), k),
        lambda k: log_iv(1.5, k),
        lambda k: bessel_ratio(0.0, k),
        lambda k: bessel_ratio(31.5, k),
        lambda k: log_peak(torch.tensor([[3], [40], [300]]), k),
        lambda k: mean_gap(10, k),
        lambda k: bessel_ratio(torch.tensor([[0.0], [7.0], [90.0]]), k),
    ],
)
def test_gradcheck_and_gradgradcheck(function):
    kappa = torch.tensor(
        [0.3, 2.0, 20.0, 33.0, 200.0], dtype=torch.float64, requires_grad=True
    )
    assert torch.autograd.gradcheck(function, kappa)
    assert torch.autograd.gradgradcheck(function, kappa)


@pytest.mark.parametrize("nu", [0.0, 0.5, 4.0, 31.0, 100.0])
def test_the_start_of_the_ladder_leaves_no_trace(nu):
    """The only internal choice is the number of steps: climbing further changes nothing
    beyond rounding."""
    # the log is accurate in absolute terms near kappa = 0, where it vanishes; the ratio
    # and its slopes in relative ones
    kappa = torch.logspace(-3, 6, 400, dtype=torch.float64)
    order, steps = (
        torch.tensor([nu], dtype=torch.float64),
        max(0, math.ceil(bessel._ORDER_FLOOR - nu)),
    )
    (log, ratio), slopes = (
        kernel(kappa, order, steps)
        for kernel in (bessel._log_and_ratio, bessel._ratio_slopes)
    )
    (log_up, ratio_up), slopes_up = (
        kernel(kappa, order, steps + 20)
        for kernel in (bessel._log_and_ratio, bessel._ratio_slopes)
    )
    three_roundings_a_step = 3 * (steps + 20) * torch.finfo(torch.float64).eps
    torch.testing.assert_close(log, log_up, rtol=1e-14, atol=three_roundings_a_step)
    torch.testing.assert_close(ratio, ratio_up, rtol=2e-14, atol=0)
    torch.testing.assert_close(slopes, slopes_up, rtol=1e-11, atol=0)


def test_no_kink_in_kappa():
    """A jump of the slope would show as a spike of the second difference, far above the
    smooth A'' h^2."""
    for dim in (2, 3, 10, 64, 66, 512):
        kappa = torch.linspace(0, 4 * dim + 200, 40_001, dtype=torch.float64)
        h = (kappa[1] - kappa[0]).item()
        ratio = bessel_ratio(dim / 2 - 1, kappa)
        bend = ratio.diff(n=2) / h**2
        k = kappa[1:-1].clone().requires_grad_()
        (a1,) = torch.autograd.grad(
            bessel_ratio(dim / 2 - 1, k).sum(), k, create_graph=True
        )
        (a2,) = torch.autograd.grad(a1.sum(), k)
        noise = 8 * torch.finfo(torch.float64).eps / h**2
        assert (bend - a2).abs().max() <= 1e-4 * a2.abs().max() + noise


def test_orders_and_kappas_broadcast_as_one_call_each():
    dims, kappa = (
        torch.tensor([2, 3, 64, 1000]),
        torch.tensor([0.0, 0.5, 70.0, 1e5], dtype=torch.float64),
    )
    table = log_normalizer(dims[:, None], kappa)
    rows = torch.stack([log_normalizer(d, kappa) for d in dims.tolist()])
    assert table.shape == (4, 4)
    torch.testing.assert_close(table, rows, rtol=1e-13, atol=1e-12)
    assert log_normalizer(dims[:, None], torch.tensor(3.0)).shape == (4, 1)
    assert log_normalizer(5, torch.zeros(0)).shape == (0,)
    assert bessel_ratio(torch.zeros(0, 1), torch.ones(3)).shape == (0, 3)


def test_pieces_fit_together():
    kappa = (
        torch.rand(
            2 * bessel._CHUNK + 17,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(0),
        )
        * 90
    )
    whole = log_normalizer(10, kappa.view(1, -1).T)
    assert whole.shape == (len(kappa), 1)
    picks = torch.tensor(
        [0, bessel._CHUNK - 1, bessel._CHUNK, 2 * bessel._CHUNK, len(kappa) - 1]
    )
    assert torch.equal(whole[picks, 0], log_normalizer(10, kappa[picks]))


def test_functional_transforms():
    kappa = torch.tensor([0.0, 0.7, 9.0, 80.0], dtype=torch.float64)
    slope = torch.func.vmap(torch.func.grad(lambda k: log_normalizer(10, k)))
    assert torch.equal(slope(kappa), -bessel_ratio(4.0, kappa))
    curve = torch.func.vmap(
        torch.func.grad(torch.func.grad(lambda k: log_normalizer(10, k)))
    )
    k = kappa.clone().requires_grad_()
    (a1,) = torch.autograd.grad(bessel_ratio(4.0, k).sum(), k)
    assert torch.equal(curve(kappa), -a1)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(lambda k: log_peak(10, k)))(kappa),
        mean_gap(10, kappa),
    )
    orders = torch.tensor([0.0, 3.0, 50.0], dtype=torch.float64)
    mapped = torch.func.vmap(bessel_ratio, in_dims=(0, None))(orders, kappa)
    torch.testing.assert_close(
        mapped, bessel_ratio(orders[:, None], kappa), rtol=1e-14, atol=0
    )


def test_one_derivative_too_many_is_refused():
    grad = torch.func.grad
    three, k = (
        torch.tensor(3.0, dtype=torch.float64),
        torch.tensor(3.0, dtype=torch.float64, requires_grad=True),
    )
    (a1,) = torch.autograd.grad(bessel_ratio(4.0, k), k, create_graph=True)
    (a2,) = torch.autograd.grad(a1, k, create_graph=True)
    assert torch.equal(
        grad(grad(grad(lambda k: log_normalizer(10, k))))(three), -a2.detach()
    )
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.grad(a2, k)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        grad(grad(grad(lambda k: bessel_ratio(4.0, k))))(three)


def test_inputs_are_left_alone():
    kappa, nu = (
        torch.rand(50, dtype=torch.float64),
        torch.arange(50.0, dtype=torch.float64),
    )
    kept = kappa.clone(), nu.clone()
    log_iv(nu, kappa), log_iv(2.0, kappa), log_normalizer(10, kappa)
    assert torch.equal(kappa, kept[0]) and torch.equal(nu, kept[1])


@pytest.mark.parametrize(
    "function",
    [
        lambda k: log_normalizer(10, k),
        lambda k: log_iv(1.0, k),
        lambda k: log_peak(10, k),
    ],
)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), -INF])
def test_bad_kappa_is_named(function, bad):
    with pytest.raises(ValueError, match="kappa must be non-negative"):
        function(torch.tensor([1.0, bad]))


@pytest.mark.parametrize(
    "kappa", [torch.arange(3), 7, torch.tensor([True]), torch.tensor([1j])]
)
def test_kappa_of_the_wrong_type_is_named(kappa):
    with pytest.raises(TypeError, match="kappa must be a floating-point"):
        log_normalizer(10, kappa)


@pytest.mark.parametrize(
    "dim, error",
    [
        (1, ValueError),
        (0, ValueError),
        (torch.tensor([3, 1]), ValueError),
        (3.0, TypeError),
        (True, TypeError),
    ],
)
def test_bad_dim_is_named(dim, error):
    for function in (log_normalizer, log_peak, mean_gap):
        with pytest.raises(error, match="dim must be"):
            function(dim, torch.ones(2))
    with pytest.raises(error, match="dim must be"):
        log_sphere_area(dim)


def test_bad_order_is_named():
    for nu in (-1.0, float("nan"), INF, torch.tensor([0.0, -3.0])):
        with pytest.raises(ValueError, match="nu must be"):
            bessel_ratio(nu, torch.ones(2))
    with pytest.raises(TypeError, match="nu is not differentiable"):
        bessel_ratio(torch.ones(2, requires_grad=True), torch.ones(2))
