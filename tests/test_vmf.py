"""The von Mises-Fisher distribution against closed forms, quadrature, scipy and its own
definition."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.distributions import Independent, kl_divergence, transform_to
from torch.nn.functional import normalize

import pcl.vmf as module
from pcl import polar
from pcl.bessel import bessel_ratio, log_normalizer, log_sphere_area
from pcl.published.sphere import published_cosine, published_sample
from pcl.vmf import HypersphericalUniform, VonMisesFisher
from pcl.vmf import fit_vmf as fit

F64 = torch.float64
DIMS = (2, 3, 5, 10, 64, 512, 2048)
KAPPAS = (0.0, 0.1, 1.0, 20.0, 1e3, 1e6)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def direction(
    dim: int, seed: int = 0, batch: tuple[int, ...] = (), dtype: torch.dtype = F64
) -> Tensor:
    return normalize(
        torch.randn(*batch, dim, generator=seeded(seed), dtype=dtype), dim=-1
    )


def gaps(z: Tensor, loc: Tensor) -> Tensor:
    """1 - cos, with all its digits near the mode."""
    return (z.double() - loc.double()).square().sum(-1) / 2


def theta_rule(
    dim: int, kappa: float, nodes: int = 400
) -> tuple[Tensor, Tensor, float]:
    """Gaps and weights of a Gauss-Legendre rule in the angle over all but 1e-17 of the
    mass, and the smallest gap."""
    k = torch.tensor([kappa], dtype=F64)
    b = polar.contraction(dim, k)
    pivot = 2 * b / (1 + b)
    yes = torch.ones(1, dtype=torch.bool)
    inner, outer = (polar._window(dim, k, pivot, side, 45.0) for side in (yes, ~yes))
    middle = 2 * torch.atan2(pivot.sqrt(), (2 - pivot).sqrt())
    x, w = torch.tensor(polar._legendre(nodes), dtype=F64).unbind(-1)
    angle = middle + inner + (outer - inner) * x
    start = float(2 * torch.sin((middle + inner) / 2) ** 2)
    return 2 * torch.sin(angle / 2) ** 2, w * (outer - inner) * torch.sin(angle), start


# ---- sampling


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kappa", KAPPAS)
def test_cosine_follows_its_exact_law(dim: int, kappa: float) -> None:
    vmf = VonMisesFisher(direction(dim), kappa)
    gap = gaps(vmf.sample((1500,), generator=seeded(dim + int(kappa))), vmf.loc)
    lower, *_ = polar.cosine_law(dim, torch.tensor(kappa, dtype=F64), gap)
    assert stats.kstest(lower.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dim", (2, 3, 4, 10, 512))
@pytest.mark.parametrize("kappa", (0.0, 1.0, 20.0, 1e6))
def test_single_precision_draws_follow_the_same_law(dim: int, kappa: float) -> None:
    vmf = VonMisesFisher(direction(dim, dtype=torch.float32), kappa)
    z = vmf.sample((3000,), generator=seeded(1))
    assert z.dtype == torch.float32
    assert float((z.double().norm(dim=-1) - 1).abs().max()) < 1e-6
    lower, *_ = polar.cosine_law(dim, torch.tensor(kappa, dtype=F64), gaps(z, vmf.loc))
    assert stats.kstest(lower.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize("dim", (2, 3, 5, 10, 64))
@pytest.mark.parametrize("where", ("random", "axis", "near axis", "opposite"))
def test_tangent_is_uniform_and_independent_of_the_cosine(dim: int, where: str) -> None:
    axis = torch.eye(dim, dtype=F64)[0]
    loc = {
        "random": direction(dim, 3),
        "axis": axis,
        "near axis": normalize(axis + 1e-9 * direction(dim, 4), dim=-1),
        "opposite": -axis,
    }[where]
    z = VonMisesFisher(loc, 3.0).sample((4000,), generator=seeded(2))
    cosine = z @ loc
    tangent = normalize(z - cosine[:, None] * loc, dim=-1)
    probe = direction(dim, 5)
    probe = normalize(probe - (probe @ loc) * loc, dim=-1)
    side = tangent @ probe
    if dim == 2:
        assert stats.binomtest(int((side > 0).sum()), len(side)).pvalue > 1e-3
    elif dim == 3:
        assert (
            stats.kstest(
                torch.acos(side.clamp(-1, 1)).numpy(), stats.uniform(0, math.pi).cdf
            ).pvalue
            > 1e-3
        )
    else:
        law = stats.beta((dim - 2) / 2, (dim - 2) / 2)
        assert stats.kstest((0.5 + side / 2).numpy(), law.cdf).pvalue > 1e-3
    assert stats.spearmanr(cosine.numpy(), side.numpy()).pvalue > 1e-3
    assert (
        stats.spearmanr(
            cosine.numpy(), side.abs().numpy() + 1e-9 * cosine.numpy()
        ).pvalue
        > 1e-3
        or dim == 2
    )


def test_generator_makes_draws_reproducible_and_leaves_the_global_state_alone() -> None:
    vmf = VonMisesFisher(
        direction(10, batch=(4,)), torch.tensor([0.0, 5.0, 50.0, 5e3], dtype=F64)
    )
    state = torch.get_rng_state()
    first, second = (vmf.rsample((7,), generator=seeded(9)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(first, vmf.rsample((7,), generator=seeded(10)))


def test_a_generator_that_returns_zeros_still_gives_unit_vectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vmf = VonMisesFisher(direction(5), 2.0)
    monkeypatch.setattr(
        torch, "randn", lambda *size, generator, **kwargs: torch.zeros(*size, **kwargs)
    )
    z = vmf.sample((3,))
    assert float((z.norm(dim=-1) - 1).abs().max()) < 1e-12


def test_extreme_concentrations() -> None:
    loc = direction(6, batch=(3,), dtype=torch.float32)
    vmf = VonMisesFisher(loc, torch.tensor([0.0, 1e30, math.inf], requires_grad=True))
    z = vmf.rsample((50,), generator=seeded(0))
    assert torch.equal(z[:, 2], loc[2].expand(50, 6))
    torch.testing.assert_close(z[:, 1], loc[1].expand(50, 6), atol=1e-6, rtol=0)
    (grad,) = torch.autograd.grad(z.square().sum() + z.sum(), vmf.concentration)
    assert bool(grad.isfinite().all()) and float(grad[2]) == 0
    assert vmf.entropy().tolist()[2] == -math.inf
    assert vmf.log_prob(loc)[2] == math.inf and vmf.log_prob(-loc)[2] == -math.inf
    torch.testing.assert_close(vmf.mean.norm(dim=-1), torch.tensor([0.0, 1.0, 1.0]))
    torch.testing.assert_close(vmf.variance[0], torch.full((6,), 1 / 6))
    assert vmf.cosine_cdf(0.5).tolist()[1:] == [0.0, 0.0] and vmf.cosine_icdf(
        0.5
    ).tolist()[1:] == [1.0, 1.0]


# ---- gradients of samples


@pytest.mark.parametrize("dim", (2, 3, 4, 5, 10, 64, 512, 8192))
@pytest.mark.parametrize("kappa", (0.1, 1.0, 20.0, 1e3, 1e6))
def test_moving_quantiles_integrate_to_the_derivatives_of_moments(
    dim: int, kappa: float
) -> None:
    gap, weight, _ = theta_rule(dim, kappa)
    k = torch.tensor(kappa, dtype=F64, requires_grad=True)
    _, _, density, speed = polar.cosine_law(dim, k.detach(), gap)
    mass = weight * density
    torch.testing.assert_close(
        mass.sum(), torch.tensor(1.0, dtype=F64), rtol=1e-11, atol=0
    )
    mean = bessel_ratio(dim / 2 - 1, k)
    (slope,) = torch.autograd.grad(mean, k)
    torch.testing.assert_close((mass * speed).sum(), slope, rtol=1e-9, atol=0)
    # d E[(1 - w)^2] / d kappa: E[y^2 y'] with y' = -speed; E[w^2] = 1 - (D - 1) A /
    # kappa
    mean_gap = (mass * gap).sum()
    by_family = -(mass * (gap - mean_gap) * gap**2).sum()
    torch.testing.assert_close(
        (mass * -2 * gap * speed).sum(), by_family, rtol=1e-8, atol=0
    )


@pytest.mark.parametrize(
    ("dim", "kappa"), ((2, 5.0), (3, 4.0), (5, 2.0), (10, 20.0), (64, 20.0))
)
@pytest.mark.parametrize("dtype", (torch.float32, F64))
def test_sampled_gradients_of_the_cosine_are_unbiased(
    dim: int, kappa: float, dtype: torch.dtype
) -> None:
    rows, draws = 400, 400 if dim == 64 else 1000
    exact = torch.tensor(kappa, dtype=F64, requires_grad=True)
    mean = bessel_ratio(dim / 2 - 1, exact)
    first, second = (
        torch.autograd.grad(m, exact, retain_graph=True)[0]
        for m in (mean, 1 - (dim - 1) * mean / exact)
    )
    concentration = torch.full((rows,), kappa, dtype=dtype, requires_grad=True)
    loc = direction(dim, 1, dtype=dtype)
    cosine = (
        VonMisesFisher(loc, concentration).rsample((draws,), generator=seeded(dim + 2))
        @ loc
    )
    for moment, slope in ((cosine, first), (cosine**2, second)):
        (grad,) = torch.autograd.grad(
            moment.mean(0).sum(), concentration, retain_graph=True
        )
        grad = grad.double()
        error = float(grad.std()) / math.sqrt(rows)
        assert abs(float(grad.mean() - slope)) < 3 * error
        assert abs(float(grad.mean() / slope) - 1) < 0.005


@pytest.mark.parametrize(("dim", "kappa"), ((2, 2.0), (3, 1.0), (5, 4.0), (10, 20.0)))
def test_location_and_concentration_gradients_of_a_known_expectation(
    dim: int, kappa: float
) -> None:
    # E[exp(a.z)] = C(kappa) / C(|kappa mu + a|)
    rows, a = 300, torch.linspace(-0.6, 0.8, dim, dtype=F64)
    loc = direction(dim, 2).requires_grad_()
    k = torch.tensor(kappa, dtype=F64, requires_grad=True)
    value = torch.exp(
        log_normalizer(dim, k) - log_normalizer(dim, (k * loc + a).norm())
    )
    by_loc, by_k = torch.autograd.grad(value, (loc, k))
    by_loc = by_loc - (by_loc @ loc) * loc
    locs = loc.detach().repeat(rows, 1).requires_grad_()
    ks = torch.full((rows,), kappa, dtype=F64, requires_grad=True)
    z = VonMisesFisher(locs, ks).rsample((600,), generator=seeded(5))
    drawn_loc, drawn_k = torch.autograd.grad(torch.exp(z @ a).mean(0).sum(), (locs, ks))
    assert float((drawn_loc @ loc.detach()).abs().max()) < 1e-12  # tangent
    for drawn, exact in ((drawn_loc, by_loc), (drawn_k, by_k)):
        assert bool(
            ((drawn.mean(0) - exact).abs() < 3.5 * drawn.std(0) / math.sqrt(rows)).all()
        )


def test_the_published_pathwise_gradient_is_biased_and_its_law_wrong() -> None:
    kappa = torch.full((400,), 2.0, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(
        published_cosine(5, kappa, 300, seeded(0)).mean(0).sum(), kappa
    )
    assert -0.16 < float(grad.mean()) / 0.147389 - 1 < -0.11
    fine = published_cosine(10, torch.tensor(5.0, dtype=F64), 4000, seeded(1))
    assert (
        stats.kstest(
            VonMisesFisher(direction(10), 5.0).cosine_cdf(fine).numpy(), "uniform"
        ).pvalue
        > 1e-3
    )
    loc = direction(64, batch=(2,))
    wrong = (
        published_sample(loc, torch.tensor([16.0, 16.0], dtype=F64), 4000, seeded(2))
        * loc
    ).sum(-1)
    assert abs(float(wrong.mean()) - 0.2364) > 0.2


def test_second_derivatives_of_samples_are_refused() -> None:
    kappa = torch.tensor(3.0, requires_grad=True)
    vmf = VonMisesFisher(direction(4, dtype=torch.float32), kappa)
    for first in (
        vmf.rsample((2,)).sum(),
        vmf.rsample((2,)).square().sum(),
        vmf.cosine_cdf(0.3),
        vmf.cosine_icdf(0.3),
    ):
        (grad,) = torch.autograd.grad(first, kappa, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            grad.backward()


# ---- the law of the cosine


@pytest.mark.parametrize("dim", (2, 3, 10, 64, 512, 8192))
@pytest.mark.parametrize("kappa", (0.0, 0.1, 1.0, 20.0, 1e3, 1e6))
def test_cdf_agrees_with_quadrature_of_the_density(dim: int, kappa: float) -> None:
    gap, weight, below = theta_rule(dim, kappa)
    centre = float(gap[len(gap) // 2])
    log_f = (dim - 3) / 2 * torch.log(
        (gap / centre) * (2 - gap) / (2 - centre)
    ) - kappa * (gap - centre)
    mass = weight * torch.exp(log_f)
    mean, second = ((mass * gap**p).sum() / mass.sum() for p in (1, 2))
    # E[y] = int P(y > s) ds and E[y^2] = 2 int s P(y > s) ds test the cdf at every node
    lower, upper, *_ = polar.cosine_law(dim, torch.tensor(kappa, dtype=F64), gap)
    torch.testing.assert_close((weight * lower).sum() + below, mean, rtol=1e-11, atol=0)
    torch.testing.assert_close(
        2 * (weight * gap * lower).sum() + below**2, second, rtol=1e-11, atol=0
    )
    torch.testing.assert_close(
        lower + upper, torch.ones_like(lower), rtol=0, atol=1e-14
    )


@settings(max_examples=60, deadline=None)
@given(
    dim=st.sampled_from((2, 3, 4, 7, 10, 64, 512, 8192)),
    log_kappa=st.floats(-3, 6),
    q=st.floats(0.001, 0.999),
)
def test_quantiles_round_trip(dim: int, log_kappa: float, q: float) -> None:
    kappa = torch.tensor([10**log_kappa], dtype=F64)
    level = torch.tensor([q], dtype=F64)
    gap = polar.solve_gap(dim, kappa, level, 1 - level)
    lower, *_ = polar.cosine_law(dim, kappa, gap)
    assert abs(float(lower) / q - 1) < 1e-10
    back = polar.solve_gap(dim, kappa, lower, 1 - lower)
    assert abs(float(back / gap) - 1) < 1e-10  # relative in 1 - cos
    vmf = VonMisesFisher(torch.eye(dim, dtype=F64)[0], kappa)
    t = vmf.cosine_icdf(level)
    assert abs(float(1 - t - gap)) < 4e-16
    assert (
        abs(float(vmf.cosine_icdf(vmf.cosine_cdf(t)) - t)) < 1e-10 * float(gap) + 4e-16
    )
    assert float(vmf.credible_cosine(1 - level)) == pytest.approx(float(t), abs=1e-12)


def test_quantile_edges_and_tiny_levels() -> None:
    vmf = VonMisesFisher(torch.eye(10, dtype=F64)[0], 20.0)
    assert vmf.cosine_icdf(0.0) == -1 and vmf.cosine_icdf(1.0) == 1
    assert vmf.credible_cosine(0.0) == 1 and vmf.credible_cosine(1.0) == -1
    assert [float(vmf.cosine_cdf(t)) for t in (-3.0, -1.0, 1.0, 3.0)] == [0, 0, 1, 1]
    tiny = vmf.credible_cosine(
        torch.tensor(1e-18, dtype=F64)
    )  # 1 - 1e-18 rounds to 1: only the upper tail knows it
    _, upper, *_ = polar.cosine_law(10, torch.tensor(20.0, dtype=F64), 1 - tiny)
    assert float(upper) == pytest.approx(1e-18, rel=1e-8)


@pytest.mark.parametrize("dim", (2, 3, 10, 300))
def test_cdf_and_quantiles_have_exact_gradients(dim: int) -> None:
    loc = torch.eye(dim, dtype=F64)[0]
    kappa = torch.tensor([0.5, 7.0, 60.0], dtype=F64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.9], dtype=F64, requires_grad=True)
    t = VonMisesFisher(loc, kappa).cosine_icdf(q).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t, k: VonMisesFisher(loc, k).cosine_cdf(t), (t, kappa)
    )
    assert torch.autograd.gradcheck(
        lambda q, k: VonMisesFisher(loc, k).cosine_icdf(q), (q, kappa)
    )
    assert torch.autograd.gradcheck(
        lambda q, k: VonMisesFisher(loc, k).credible_cosine(q), (q, kappa)
    )


def test_cap_holds_its_level() -> None:
    vmf = VonMisesFisher(
        direction(20, batch=(3,)), torch.tensor([5.0, 50.0, 500.0], dtype=F64)
    )
    z = vmf.sample((20_000,), generator=seeded(4))
    share = ((z * vmf.loc).sum(-1) >= vmf.credible_cosine(0.9)).double().mean(0)
    assert float((share - 0.9).abs().max()) < 4 * math.sqrt(0.09 / 20_000)


# ---- densities and moments


@pytest.mark.parametrize("dim", (2, 3, 10, 64))
@pytest.mark.parametrize("kappa", (0.5, 10.0, 200.0))
def test_agreement_with_scipy(dim: int, kappa: float) -> None:
    loc = direction(dim)
    vmf, theirs = VonMisesFisher(loc, kappa), stats.vonmises_fisher(loc.numpy(), kappa)
    z = vmf.sample((50,), generator=seeded(0))
    torch.testing.assert_close(
        vmf.log_prob(z),
        torch.as_tensor(theirs.logpdf(z.numpy())),
        rtol=1e-10,
        atol=1e-10,
    )
    assert float(vmf.entropy()) == pytest.approx(
        float(theirs.entropy()), rel=1e-10, abs=1e-10
    )
    drawn = torch.as_tensor(theirs.rvs(3000, random_state=0))
    assert stats.kstest(vmf.cosine_cdf(drawn @ loc).numpy(), "uniform").pvalue > 1e-3
    mu, found = stats.vonmises_fisher.fit(drawn.numpy())
    ours = fit(drawn)
    torch.testing.assert_close(ours.loc, torch.as_tensor(mu), rtol=1e-7, atol=1e-9)
    assert float(ours.concentration) == pytest.approx(float(found), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(dim=st.integers(2, 40), log_kappa=st.floats(-3, 4), seed=st.integers(0, 1000))
def test_density_is_rotation_equivariant_and_normalised(
    dim: int, log_kappa: float, seed: int
) -> None:
    kappa = 10**log_kappa
    rotation, _ = torch.linalg.qr(
        torch.randn(dim, dim, generator=seeded(seed), dtype=F64)
    )
    loc = direction(dim, seed)
    vmf = VonMisesFisher(loc, kappa)
    z = vmf.sample((5,), generator=seeded(seed))
    turned = VonMisesFisher(normalize(loc @ rotation, dim=-1), kappa).log_prob(
        normalize(z @ rotation, dim=-1)
    )
    torch.testing.assert_close(
        turned, vmf.log_prob(z), rtol=1e-9, atol=1e-9 * max(1.0, kappa)
    )
    # int p = |S^(D-2)| int f(w) dw = 1
    gap, weight, _ = theta_rule(dim, kappa)
    tangent = (
        torch.eye(dim, dtype=F64)[1]
        if abs(float(loc[1])) < 0.9
        else torch.eye(dim, dtype=F64)[0]
    )
    tangent = normalize(tangent - (tangent @ loc) * loc, dim=-1)
    points = (1 - gap)[:, None] * loc + torch.sqrt(gap * (2 - gap))[:, None] * tangent
    ring = math.log(2) if dim == 2 else float(log_sphere_area(dim - 1))
    log_f = vmf.log_prob(points) + ring + (dim - 3) / 2 * torch.log(gap * (2 - gap))
    torch.testing.assert_close(
        (weight * torch.exp(log_f)).sum(),
        torch.tensor(1.0, dtype=F64),
        rtol=1e-8,
        atol=0,
    )


def test_samples_turn_with_the_distribution() -> None:
    loc, other = direction(5, 1), direction(5, 2)
    cosine = [
        VonMisesFisher(m, 4.0).sample((2000,), generator=seeded(3)) @ m
        for m in (loc, other)
    ]
    torch.testing.assert_close(cosine[0], cosine[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kappa", (0.0, 0.7, 30.0))
def test_moments_match_draws(kappa: float) -> None:
    vmf = VonMisesFisher(direction(4, 7), kappa)
    z = vmf.sample((40_000,), generator=seeded(8))
    centred = z - vmf.mean
    product = centred[:, :, None] * centred[:, None, :]
    error = product.std(0) / 200
    assert bool(((z.mean(0) - vmf.mean).abs() < 4.5 * z.std(0) / 200).all())
    assert bool(((product.mean(0) - vmf.covariance_matrix).abs() < 4.5 * error).all())
    torch.testing.assert_close(
        vmf.variance, torch.linalg.diagonal(vmf.covariance_matrix)
    )
    assert torch.equal(vmf.mode, vmf.loc)
    log_p = vmf.log_prob(z)
    assert (
        abs(float(-log_p.mean() - vmf.entropy()))
        < 4.5 * float(log_p.std()) / 200 + 1e-12
    )


def test_spread_keeps_its_digits_at_large_concentration() -> None:
    along, across = module._spreads(10, torch.tensor([1e6, 1e8], dtype=F64))
    torch.testing.assert_close(
        along, 4.5 / torch.tensor([1e12, 1e16], dtype=F64), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        across, 1 / torch.tensor([1e6, 1e8], dtype=F64), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", (torch.float32, F64))
def test_density_entropy_and_divergence_at_any_concentration(
    dtype: torch.dtype,
) -> None:
    """Tangent limit in D = 10: a Gaussian of nine dimensions with variance 1 / kappa,
    also where kappa swamps the digits."""
    kappa = torch.tensor([1e10, 1e14, 1e17, 1e30], dtype=dtype)
    loc = torch.eye(10, dtype=dtype)[0]
    vmf, twice = VonMisesFisher(loc, kappa), VonMisesFisher(loc, 2 * kappa)
    at_mode = 4.5 * (kappa.double().log() - math.log(2 * math.pi))
    bar = 1e-8 if dtype == F64 else 1e-4
    torch.testing.assert_close(vmf.log_prob(loc).double(), at_mode, rtol=0, atol=bar)
    torch.testing.assert_close(vmf.entropy().double(), 4.5 - at_mode, rtol=0, atol=bar)
    exact = torch.full_like(at_mode, 4.5 * (1 - math.log(2)))
    torch.testing.assert_close(
        kl_divergence(vmf, twice).double(), exact, rtol=0, atol=bar
    )


def test_single_precision_density_at_large_concentration() -> None:
    loc = direction(10, dtype=torch.float32)
    vmf = VonMisesFisher(loc, 1e6)
    z = vmf.sample((100,), generator=seeded(0))
    exact = VonMisesFisher(normalize(loc.double(), dim=-1), 1e6).log_prob(
        normalize(z.double(), dim=-1)
    )
    torch.testing.assert_close(vmf.log_prob(z).double(), exact, rtol=0, atol=2e-2)


def test_gradients_of_density_entropy_moments_and_divergence() -> None:
    loc, kappa = (
        direction(4, 1, (3,)),
        torch.tensor([0.3, 4.0, 90.0], dtype=F64, requires_grad=True),
    )
    z = direction(4, 2, (3,))
    other = VonMisesFisher(direction(4, 3), 7.0)
    for quantity in (
        lambda k: VonMisesFisher(loc, k).log_prob(z),
        lambda k: VonMisesFisher(loc, k).entropy(),
        lambda k: VonMisesFisher(loc, k).variance,
        lambda k: VonMisesFisher(loc, k).mean,
        lambda k: kl_divergence(VonMisesFisher(loc, k), other),
        lambda k: kl_divergence(other, VonMisesFisher(loc, k)),
        lambda k: kl_divergence(VonMisesFisher(loc, k), HypersphericalUniform(4)),
    ):
        assert torch.autograd.gradcheck(quantity, (kappa,))


# ---- divergences and the uniform distribution


@settings(max_examples=40, deadline=None)
@given(
    dim=st.integers(2, 60),
    a=st.floats(-2, 3),
    b=st.floats(-2, 3),
    seed=st.integers(0, 500),
)
def test_divergence_is_non_negative_and_consistent(
    dim: int, a: float, b: float, seed: int
) -> None:
    p, q = (
        VonMisesFisher(direction(dim, seed), 10**a),
        VonMisesFisher(direction(dim, seed + 1), 10**b),
    )
    definition = (
        log_normalizer(dim, p.concentration)
        - log_normalizer(dim, q.concentration)
        + bessel_ratio(dim / 2 - 1, p.concentration)
        * (p.concentration - q.concentration * (p.loc @ q.loc))
    )
    torch.testing.assert_close(
        kl_divergence(p, q), definition.clamp(min=0), rtol=1e-9, atol=1e-9
    )
    assert float(kl_divergence(p, p)) == 0
    flat = VonMisesFisher(q.loc, 0.0)
    uniform = HypersphericalUniform(dim)
    torch.testing.assert_close(
        kl_divergence(p, flat), kl_divergence(p, uniform), rtol=1e-9, atol=1e-9
    )


def test_divergence_of_points() -> None:
    loc = direction(5)
    point, wide = VonMisesFisher(loc, math.inf), VonMisesFisher(loc, 3.0)
    assert kl_divergence(point, point) == 0
    assert (
        kl_divergence(point, wide) == math.inf
        and kl_divergence(wide, point) == math.inf
    )
    assert kl_divergence(point, VonMisesFisher(-loc, math.inf)) == math.inf
    assert kl_divergence(point, HypersphericalUniform(5)) == math.inf


def test_uniform_distribution() -> None:
    flat = HypersphericalUniform(7, dtype=F64)
    z = flat.sample((3000,), generator=seeded(0))
    assert z.shape == (3000, 7) and z.dtype == F64
    assert stats.kstest((0.5 + z[:, 3] / 2).numpy(), stats.beta(3, 3).cdf).pvalue > 1e-3
    torch.testing.assert_close(
        flat.log_prob(z), VonMisesFisher(direction(7), 0.0).log_prob(z)
    )
    torch.testing.assert_close(flat.entropy(), -flat.log_prob(z)[0])
    wide = flat.expand((2, 3))
    assert (
        wide.sample((4,)).shape == (4, 2, 3, 7)
        and wide.entropy().shape == (2, 3)
        and wide.mean.shape == (2, 3, 7)
    )
    torch.testing.assert_close(wide.variance, torch.full((2, 3, 7), 1 / 7, dtype=F64))
    assert repr(wide) == "HypersphericalUniform(dim: 7, batch_shape: (2, 3))"
    with pytest.raises(ValueError, match="dim must be at least 2"):
        HypersphericalUniform(1)
    with pytest.raises(TypeError, match="dim must be an integer"):
        HypersphericalUniform(3.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unit vectors"):
        flat.log_prob(torch.ones(7))


# ---- fitting


@pytest.mark.parametrize("dim", (2, 3, 10, 128))
def test_fit_is_the_maximum_likelihood(dim: int) -> None:
    truth = VonMisesFisher(
        direction(dim, 1, (4,)), torch.tensor([0.5, 10.0, 1e3, 1e6], dtype=F64)
    )
    draws = truth.sample((500,), generator=seeded(dim)).movedim(0, -2)
    found = fit(draws)
    assert found.batch_shape == (4,)
    residual = 1 - bessel_ratio(dim / 2 - 1, found.concentration)
    torch.testing.assert_close(
        residual, gaps(draws, found.loc[:, None]).mean(-1), rtol=1e-9, atol=2e-16
    )
    torch.testing.assert_close(found.loc, normalize(draws.mean(-2), dim=-1))
    single = fit(draws.float())
    torch.testing.assert_close(
        single.concentration.double(), found.concentration, rtol=1e-3, atol=0
    )
    assert single.loc.dtype == torch.float32


def test_fit_weights_are_repetitions() -> None:
    z = VonMisesFisher(direction(6), 5.0).sample((4,), generator=seeded(1))
    counts = torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=F64)
    repeated, weighted = fit(z.repeat_interleave(counts.long(), 0)), fit(z, counts)
    torch.testing.assert_close(
        repeated.concentration, weighted.concentration, rtol=1e-10, atol=0
    )
    torch.testing.assert_close(repeated.loc, weighted.loc)


def test_fit_limits() -> None:
    z = direction(5)
    assert fit(torch.stack([z, -z])).concentration == 0
    for dtype in (torch.float32, F64):
        assert fit(z.to(dtype).expand(9, 5)).concentration == math.inf


def test_fit_is_differentiable() -> None:
    z = VonMisesFisher(direction(4), 5.0).sample((3,), generator=seeded(2))
    raw = z.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: fit(normalize(x, dim=-1)).concentration, (raw,), rtol=1e-4
    )
    assert torch.autograd.gradcheck(
        lambda x: fit(normalize(x, dim=-1)).loc, (raw,), rtol=1e-4
    )


# ---- the contract of torch.distributions, and bad input


def test_shapes_expand_and_wrappers() -> None:
    vmf = VonMisesFisher(direction(8, batch=(5, 1)), torch.linspace(0, 9, 3, dtype=F64))
    assert vmf.batch_shape == (5, 3) and vmf.event_shape == (8,) and vmf.has_rsample
    assert vmf.rsample((2, 4)).shape == (2, 4, 5, 3, 8)
    for shape in ((0,), (3, 0, 2)):
        z = vmf.rsample(shape)
        assert z.shape == (*shape, 5, 3, 8) and vmf.log_prob(z).shape == (*shape, 5, 3)
    wide = vmf.expand((2, 5, 3))
    assert wide.batch_shape == (2, 5, 3) and wide.sample().shape == (2, 5, 3, 8)
    joint = Independent(vmf, 1)
    assert joint.log_prob(joint.rsample()).shape == (5,)
    assert "VonMisesFisher" in repr(vmf)
    assert (
        vmf.mean.shape == (5, 3, 8)
        and vmf.stddev.shape == (5, 3, 8)
        and vmf.covariance_matrix.shape == (5, 3, 8, 8)
    )
    assert vmf.cosine_cdf(0.3).shape == (5, 3) and vmf.cosine_icdf(
        torch.full((2, 1, 1), 0.3)
    ).shape == (2, 5, 3)
    assert (
        VonMisesFisher(
            direction(8, dtype=torch.float32), torch.tensor(2.0, dtype=F64)
        ).loc.dtype
        == F64
    )


def test_zero_sized_samples_have_gradients() -> None:
    kappa = torch.tensor(2.0, requires_grad=True)
    (grad,) = torch.autograd.grad(
        VonMisesFisher(direction(4, dtype=torch.float32), kappa).rsample((0,)).sum(),
        kappa,
    )
    assert grad == 0


LOC = torch.tensor([0.6, 0.8])


@pytest.mark.parametrize(
    ("loc", "concentration", "error", "message"),
    (
        (LOC, -1.0, ValueError, "concentration must be non-negative.*NormEncoder"),
        (LOC, math.nan, ValueError, "concentration must be non-negative and not NaN"),
        (2 * LOC, 1.0, ValueError, "loc must hold unit vectors.*normalize"),
        (math.nan * LOC, 1.0, ValueError, "loc must hold unit vectors"),
        (torch.ones(1), 1.0, ValueError, "loc must have shape .* D at least 2"),
        (torch.tensor(1.0), 1.0, ValueError, "loc must have shape"),
        (torch.empty(3, 0), 1.0, ValueError, "loc must have shape .* D at least 2"),
        (1.1 * LOC.bfloat16(), 1.0, ValueError, "loc must hold unit vectors"),
        (
            LOC.expand(3, 2),
            torch.ones(4),
            ValueError,
            "concentration of shape .* does not broadcast",
        ),
        (
            torch.tensor([1, 0]),
            1.0,
            TypeError,
            "loc must be float32 or float64.*loc.float",
        ),
        (
            LOC,
            torch.tensor(1),
            TypeError,
            "concentration must be float32 or float64.*concentration.float",
        ),
        ([0.6, 0.8], 1.0, TypeError, "loc must be a tensor"),
        (LOC, None, TypeError, "concentration must be a number"),
        (LOC, "high", TypeError, "concentration must be a number"),
    ),
)
def test_bad_parameters(
    loc: Tensor, concentration: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        VonMisesFisher(loc, concentration)


def test_validation_can_be_switched_off() -> None:
    assert (
        VonMisesFisher(2 * LOC, 1.0, validate_args=False).log_prob(3 * LOC).isfinite()
    )
    with pytest.raises(ValueError, match="value must hold unit vectors"):
        VonMisesFisher(LOC, 1.0).log_prob(3 * LOC)


def test_bad_arguments_of_methods() -> None:
    vmf = VonMisesFisher(LOC.expand(3, 2), 1.0)
    with pytest.raises(ValueError, match=r"value must have shape \(..., 2\)"):
        vmf.log_prob(torch.ones(3) / math.sqrt(3))
    with pytest.raises(ValueError, match=r"value of shape .* does not broadcast"):
        vmf.log_prob(LOC.expand(4, 2))
    with pytest.raises(TypeError, match="value must be a floating-point tensor"):
        vmf.log_prob(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"q must lie in \[0, 1\]"):
        vmf.cosine_icdf(1.5)
    with pytest.raises(ValueError, match="level must not be NaN"):
        vmf.credible_cosine(math.nan)
    with pytest.raises(ValueError, match="t must not be NaN"):
        vmf.cosine_cdf(torch.tensor([0.1, math.nan, 0.2]))
    with pytest.raises(TypeError, match="t must be a floating-point tensor"):
        vmf.cosine_cdf(torch.tensor(0))
    with pytest.raises(ValueError, match=r"t of shape .* does not broadcast"):
        vmf.cosine_cdf(torch.zeros(4))
    with pytest.raises(ValueError, match="same dimension"):
        kl_divergence(vmf, VonMisesFisher(direction(3), 1.0))
    with pytest.raises(ValueError, match="same dimension"):
        kl_divergence(vmf, HypersphericalUniform(3))


@pytest.mark.parametrize(
    ("samples", "weights", "error", "message"),
    (
        (
            torch.tensor([[1, 0]]),
            None,
            TypeError,
            "samples must be a float32 or float64",
        ),
        (LOC, None, ValueError, "samples must have shape"),
        (torch.ones(3, 1), None, ValueError, "D at least 2"),
        (torch.empty(0, 3), None, ValueError, "samples is empty"),
        (2 * LOC.expand(3, 2), None, ValueError, "samples must hold unit vectors"),
        (LOC.expand(3, 2), torch.ones(2), ValueError, "weights must have shape"),
        (
            LOC.expand(3, 2),
            torch.tensor([1, 1, 1]),
            TypeError,
            "weights must be a floating-point",
        ),
        (
            LOC.expand(3, 2),
            torch.tensor([1.0, -1.0, 1.0]),
            ValueError,
            "weights must be finite and non-negative",
        ),
        (LOC.expand(3, 2), torch.zeros(3), ValueError, "positive sum"),
        (
            LOC.expand(3, 2),
            torch.tensor([1.0, math.inf, 1.0]),
            ValueError,
            "weights must be finite",
        ),
        (
            LOC.expand(3, 2),
            torch.tensor([1.0, math.nan, 1.0]),
            ValueError,
            "weights must be finite",
        ),
        (
            LOC.expand(3, 2),
            [1.0, 1.0, 1.0],
            TypeError,
            "weights must be a floating-point",
        ),
    ),
)
def test_bad_samples(
    samples: Tensor, weights: Tensor | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(samples, weights)


@pytest.mark.parametrize("kappa", [0.0, 1e-6, 0.5, 0.999, 1.001, 4.0, 40.0, 1e3, 1e6])
def test_the_closed_form_in_three_dimensions_keeps_its_far_tail(kappa: float) -> None:
    """A polar ratio of (almost) zero is the antipode: single precision must neither
    overshoot it nor lose the way there."""
    ratio = torch.tensor(
        [0.0, 1e-45, 1e-30, 1e-12, 1e-7, 1e-3, 0.5, 0.999, 1.0, 2.0, 1e4, 1e10]
    )
    gap = polar.draw_gap(3, torch.tensor(kappa), ratio, None)
    with mpmath.workdps(60):
        k = mpmath.mpf(max(kappa, 1e-30))
        exact = [
            float(
                -mpmath.log(
                    (mpmath.mpf(float(r)) + mpmath.exp(-2 * k))
                    / (1 + mpmath.mpf(float(r)))
                )
                / k
            )
            for r in ratio
        ]
    torch.testing.assert_close(
        gap, torch.tensor(exact, dtype=torch.float64).float(), rtol=2e-6, atol=0
    )
    assert gap.max() <= 2


# ---- in good standing among torch's distributions


def test_without_values_draws_have_their_shape() -> None:
    loc, kappa = torch.empty(3, 4, device="meta"), torch.empty(3, device="meta")
    z = VonMisesFisher(loc, kappa, validate_args=False).rsample((2, 5))
    assert z.is_meta and z.shape == (2, 5, 3, 4)


def test_an_empty_batch_has_empty_answers() -> None:
    loc = torch.empty(0, 5, requires_grad=True)
    kappa = torch.empty(0, requires_grad=True)
    vmf = VonMisesFisher(loc, kappa)
    uniform = HypersphericalUniform(5)
    assert vmf.rsample((3,)).shape == (3, 0, 5) and vmf.mode.shape == (0, 5)
    assert vmf.covariance_matrix.shape == (0, 5, 5)
    for value in (
        vmf.mean,
        vmf.variance,
        vmf.entropy(),
        vmf.log_prob(torch.empty(0, 5)),
        vmf.cosine_cdf(0.5),
        vmf.cosine_icdf(0.5),
        vmf.credible_cosine(0.9),
        kl_divergence(vmf, vmf),
        kl_divergence(vmf, uniform),
        kl_divergence(uniform, vmf),
    ):
        assert value.shape[0] == 0
        (grad,) = torch.autograd.grad(value.sum(), kappa)
        assert grad.shape == (0,)
    assert VonMisesFisher(LOC, torch.empty(0)).batch_shape == (0,)


@pytest.mark.parametrize("dim", [2, 3, 10, 128])
def test_divergences_with_the_uniform_agree_with_their_integrals(dim: int) -> None:
    uniform = HypersphericalUniform(dim, dtype=F64)
    kappa = torch.tensor([0.0, 0.3, 4.0, 60.0], dtype=F64, requires_grad=True)
    vmf = VonMisesFisher(direction(dim), kappa)
    both = kl_divergence(uniform, vmf)
    z = direction(dim)
    # E over the sphere of the linear log density is its value across the mean
    mean_log = vmf.log_prob(z) - kappa * (z @ direction(dim))
    torch.testing.assert_close(
        both, -uniform.entropy() - mean_log, rtol=1e-9, atol=1e-12
    )
    assert both[0] == 0 and torch.autograd.gradcheck(
        lambda k: kl_divergence(uniform, VonMisesFisher(z, k)),
        (kappa[1:].detach().requires_grad_(),),
    )
    assert kl_divergence(uniform, VonMisesFisher(z, math.inf)) == math.inf
    assert torch.equal(
        kl_divergence(uniform.expand((3,)), uniform), torch.zeros(3, dtype=F64)
    )
    with pytest.raises(ValueError, match="same dimension"):
        kl_divergence(uniform, HypersphericalUniform(dim + 1))


def test_any_vector_becomes_a_direction() -> None:
    to_sphere = transform_to(VonMisesFisher.support)
    x = torch.randn(7, 4, generator=seeded(0), requires_grad=True)
    assert VonMisesFisher.support.check(to_sphere(x)).all()
    torch.testing.assert_close(to_sphere(to_sphere.inv(to_sphere(x))), to_sphere(x))
    assert VonMisesFisher.support.check(to_sphere(torch.zeros(4)))
    assert to_sphere(x).requires_grad


def test_a_uniform_has_no_mode() -> None:
    mode = HypersphericalUniform(3).expand((2,)).mode
    assert mode.shape == (2, 3) and mode.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_directions_in_half_precision_are_stretched_to_length_one(
    dtype: torch.dtype,
) -> None:
    whole = direction(16, batch=(50,), dtype=torch.float32)
    half = whole.to(dtype).requires_grad_()
    vmf = VonMisesFisher(half, torch.full((50,), 20.0, dtype=dtype))
    assert vmf.loc.dtype == vmf.concentration.dtype == torch.float32
    torch.testing.assert_close(vmf.loc.norm(dim=-1), torch.ones(50))
    assert ((vmf.loc * whole).sum(-1) > 0.999).all()
    vmf.rsample().sum().backward()
    assert half.grad is not None and half.grad.isfinite().all()


@pytest.mark.parametrize("dim", (2, 3, 40))
def test_many_values_with_levels_of_their_own_have_the_same_quantiles(dim: int) -> None:
    rng = seeded(3)
    kappa = torch.exp(6 * torch.rand(40_000, dtype=F64, generator=rng))
    level = torch.rand(40_000, dtype=F64, generator=rng)
    level[:6] = torch.tensor([0.0, 1.0, 1e-30, 1 - 1e-16, 1e-9, 0.5], dtype=F64)
    kappa[6:9] = torch.tensor([0.0, 1e-12, 1e30], dtype=F64)
    some = torch.cat([torch.arange(9), torch.arange(9, 40_000, 400)])
    together = polar.solve_gap(dim, kappa, 1 - level, level)[some]
    apart = polar.solve_gap(dim, kappa[some], 1 - level[some], level[some])
    torch.testing.assert_close(together, apart, rtol=1e-11, atol=0)
    wide = torch.logspace(-3, 9, 20_000, dtype=F64)  # too thinly spread for panels
    levels = torch.linspace(0.001, 0.999, 20_000, dtype=F64)
    assert bool(polar.solve_gap(dim, wide, 1 - levels, levels).isfinite().all())
