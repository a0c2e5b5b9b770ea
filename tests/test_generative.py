"""Worlds with known posteriors: reproducible, and their pairs follow the laws that they
name."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from pcl.bessel import bessel_ratio
from pcl.generative import PaperProcess, Process, UniformProcess
from pcl.marginal import log_marginal
from pcl.metrics import rmse
from pcl.published.data import (
    AuthorsJointProcess,
    AuthorsProcess,
    ForwardPairsProcess,
    PublishedPairsProcess,
    PublishedPartnersProcess,
    PublishedProcess,
    RedrawnPartnersProcess,
)
from pcl.published.sphere import published_acceptance, published_coefficients

DOUBLE = torch.float64


@pytest.mark.parametrize("dim", [2, 3, 10, 64])
@pytest.mark.parametrize(("depth", "slope"), [(0, 0.4), (2, 0.4), (3, 0.2)])
def test_the_mixing_can_be_undone(dim: int, depth: int, slope: float) -> None:
    process = UniformProcess(dim, depth=depth, slope=slope)
    x = process.draw((500,), torch.Generator().manual_seed(0))
    q = process.posterior(x)
    torch.testing.assert_close(
        process.observe(q.loc, q.concentration), x, rtol=1e-4, atol=1e-4
    )


def test_sampling_is_reproducible_and_shaped() -> None:
    process = UniformProcess(5)
    first, second = (
        process.sample(7, 3, torch.Generator().manual_seed(4)) for _ in range(2)
    )
    assert (
        first.x.shape == first.x_pos.shape == (7, 6)
        and first.x_neg is not None
        and first.x_neg.shape == (7, 3, 6)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert process.sample(7).x_neg is None
    assert not torch.equal(UniformProcess(5, seed=1).layers, process.layers)


def test_pair_frequencies_follow_h_on_the_circle() -> None:
    """Angles of positive pairs, binned, against the exact density for their own kappas:
    a chi-squared test."""
    process = UniformProcess(2, (4.0, 40.0), kappa_pos=10.0, dtype=DOUBLE)
    pairs = process.sample(40_000, generator=torch.Generator().manual_seed(2))
    q, q_pos = process.posterior(pairs.x), process.posterior(pairs.x_pos)
    sine = q.loc[:, 0] * q_pos.loc[:, 1] - q.loc[:, 1] * q_pos.loc[:, 0]
    angle = torch.atan2(sine, (q.loc * q_pos.loc).sum(-1)).numpy()
    edges = np.linspace(-np.pi, np.pi, 41)
    nodes, weights = np.polynomial.legendre.leggauss(6)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.pi / 40
    grid = torch.tensor(middle[:, None] + half * nodes).reshape(-1, 1)
    rng = np.random.default_rng(0).choice(
        40_000, 2000, replace=False
    )  # the kappas' law, by a sample of the pairs themselves
    h = log_marginal(
        grid.cos(),
        q.concentration[rng],
        q_pos.concentration[rng],
        torch.tensor(10.0, dtype=DOUBLE),
        2,
    ).exp()
    share = (h.mean(1).reshape(40, 6).numpy() * weights * half).sum(1) / (2 * np.pi)
    counts = np.histogram(angle, edges)[0]
    keep = share * 40_000 > 10
    statistic = ((counts - 40_000 * share) ** 2 / (40_000 * share))[keep].sum()
    assert share.sum() == pytest.approx(1, abs=1e-6)
    assert scipy.stats.chi2.sf(statistic, keep.sum() - 1) > 1e-3


def test_negatives_are_base_draws() -> None:
    process = UniformProcess(3, dtype=DOUBLE)
    x_neg = process.sample(4000, 2, torch.Generator().manual_seed(3)).x_neg
    assert x_neg is not None
    q = process.posterior(x_neg.reshape(-1, 4))
    assert (
        scipy.stats.kstest(q.loc[:, 0].numpy(), "uniform", (-1, 2)).pvalue > 1e-3
    )  # a coordinate is uniform on the 2-sphere
    assert (
        scipy.stats.kstest(
            (q.concentration.log().numpy() - np.log(16)) / np.log(2), "uniform"
        ).pvalue
        > 1e-3
    )


def test_posterior_of_single_precision_observations() -> None:
    process = UniformProcess(10)
    mu = torch.nn.functional.normalize(torch.randn(1000, 10), dim=-1)
    kappa = torch.empty(1000).uniform_(16, 32)
    q = process.posterior(process.observe(mu, kappa))
    assert rmse(q.concentration.float(), kappa) < 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dim": 1}, "dim"),
        ({"dim": 3, "kappa_range": (0.0, 1.0)}, "kappa_range"),
        ({"dim": 3, "kappa_range": (2.0, 1.0)}, "kappa_range"),
        ({"dim": 3, "kappa_pos": float("nan")}, "kappa_pos"),
        ({"dim": 3, "slope": 0.0}, "invertible"),
        ({"dim": 3, "depth": -1}, "invertible"),
    ],
)
def test_bad_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UniformProcess(**options)


def test_wrong_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        UniformProcess(3).posterior(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="n_neg"):
        UniformProcess(3).sample(4, -1)


# The paper's process
# ---------------------------------------------------------------------------------------------


class FiniteProcess(PaperProcess):
    """The paper's process on the circle, with 16 observations only: every probability
    is a finite sum."""

    def __init__(self, **options: object) -> None:
        super().__init__(2, smoothing_steps=300, dtype=DOUBLE, **options)
        corners = torch.linspace(0.02, 0.98, 4, dtype=DOUBLE)
        self.points = torch.cartesian_prod(corners, corners)

    def draw(
        self, shape: tuple[int, ...], generator: torch.Generator | None = None
    ) -> torch.Tensor:
        return self.points[torch.randint(len(self.points), shape, generator=generator)]

    def counts(self, pairs: list) -> np.ndarray:
        """How often each of the 16 x 16 pairs was drawn."""
        x, x_pos = (
            torch.cat([getattr(batch, name) for batch in pairs])
            for name in ("x", "x_pos")
        )
        first, second = (
            torch.cdist(side, self.points).argmin(1) for side in (x, x_pos)
        )
        return torch.bincount(16 * first + second, minlength=256).numpy()

    def cosines(self) -> torch.Tensor:
        mu = self.mu(self.points)
        return (mu @ mu.T).clamp(-1, 1)

    def vmf_law(self) -> np.ndarray:
        """P0 P0 S h / Z, by the exact kernel."""
        kappa = self.kappa(self.points)
        weights = log_marginal(
            self.cosines(), kappa[:, None], kappa, self.kappa_pos, 2
        ).exp()
        return (weights / weights.sum()).flatten().numpy()

    def published_law(self) -> np.ndarray:
        """The same with the harmonic coefficients of the published acceptance in place
        of a_l(kappa_pos)."""
        degree = torch.arange(60, dtype=DOUBLE)
        a = torch.stack(
            [bessel_ratio(float(order), self.kappa(self.points)) for order in range(59)]
        ).cumprod(0)
        a = torch.cat([torch.ones(1, 16, dtype=DOUBLE), a]).T  # (16, 60)
        weight = published_coefficients(2, self.kappa_pos, 60) * torch.where(
            degree == 0, 1.0, 2.0
        )
        waves = torch.cos(degree * self.cosines().acos().unsqueeze(-1))
        weights = (weight * a[:, None] * a * waves).sum(-1)
        return (weights / weights.sum()).flatten().numpy()


class PublishedFiniteProcess(FiniteProcess, PublishedPairsProcess):
    """The same observations, paired by the published acceptance."""


class RedrawnFiniteProcess(FiniteProcess, RedrawnPartnersProcess):
    """The same observations; the anchor keeps its latent, exact acceptance."""


class ForwardFiniteProcess(FiniteProcess, ForwardPairsProcess):
    """The same observations, paired forwards."""


class PartnersFiniteProcess(FiniteProcess, PublishedPartnersProcess):
    """The same observations, paired as the authors' code does."""


class FittedFiniteProcess(PartnersFiniteProcess):
    """The same with the regression for the constant."""

    fitted = True


def summed_laws(process: FiniteProcess) -> dict[str, np.ndarray]:
    """Every law of pairs, and that of the negatives, as sums over a fine circle."""
    angle = torch.arange(720, dtype=DOUBLE) * (2 * torch.pi / 720)
    z = torch.stack([angle.cos(), angle.sin()], 1)
    seen = process.posterior(process.points).log_prob(z[:, None]).exp().T
    seen = seen / seen.sum(1, keepdim=True)  # P(z | x), (16, 720)
    prior = seen.mean(0)  # F0
    cosine = (z @ z.T).clamp(-1, 1)
    vmf = (process.kappa_pos * cosine).exp()
    fitted, printed = (
        published_acceptance(cosine, process.kappa_pos, 2, flag)
        for flag in (True, False)
    )

    def law(table: torch.Tensor) -> np.ndarray:
        weights = seen @ table @ seen.T
        return (weights / weights.sum()).flatten().numpy()

    def redrawn(accept: torch.Tensor) -> torch.Tensor:
        return accept / (accept @ prior)[:, None]

    return {
        "together, exact": law(vmf),
        "together, published": law(printed),
        "redrawn, exact": law(redrawn(vmf)),
        "redrawn, published": law(redrawn(printed)),
        "redrawn, fitted": law(redrawn(fitted)),
        "forwards": law(vmf / prior),
        "negatives": law(redrawn(1 - printed)),
        "base": law(torch.ones_like(vmf)),
    }


LAWS = {
    "together, published": PublishedFiniteProcess,
    "redrawn, exact": RedrawnFiniteProcess,
    "redrawn, published": PartnersFiniteProcess,
    "redrawn, fitted": FittedFiniteProcess,
    "forwards": ForwardFiniteProcess,
}


@pytest.mark.parametrize("name", LAWS)
def test_each_law_of_pairs_is_its_own_sum_on_a_finite_circle(name: str) -> None:
    """Few pairs from each pool, as above; every other law is refused."""
    process = LAWS[name](kappa_pos=10.0, kappa_range=(4.0, 40.0), pool=256)
    generator = torch.Generator().manual_seed(3)
    if "published" in name or "fitted" in name:  # no pools
        batches = [process.sample(40_000, generator=generator)]
    else:
        batches = [process.sample(16, generator=generator) for _ in range(1250)]
    counts = process.counts(batches)
    laws = summed_laws(process)
    fits = {other: chi_squared_p(counts, law) for other, law in laws.items()}
    assert fits.pop(name) > 1e-3, fits
    if "redrawn" in name:  # on the circle the regression is too good to be told apart
        fits = {other: p for other, p in fits.items() if other[:7] != "redrawn"}
        fits["exact or not"] = chi_squared_p(
            counts, laws["redrawn, " + ("fitted" if "exact" in name else "exact")]
        )
    assert max(fits.values()) < 1e-6, fits


def test_published_negatives_are_refused_partners_of_the_anchors_latent() -> None:
    process = PartnersFiniteProcess(kappa_pos=10.0, kappa_range=(4.0, 40.0))
    pairs = process.sample(40_000, 2, torch.Generator().manual_seed(5))
    assert pairs.x_neg is not None and pairs.x_neg.shape == (40_000, 2, 2)
    laws = summed_laws(process)
    for column in range(2):
        negatives = pairs._replace(x_pos=pairs.x_neg[:, column])
        counts = process.counts([negatives])
        assert chi_squared_p(counts, laws["negatives"]) > 1e-3
        assert chi_squared_p(counts, laws["base"]) < 1e-9


def test_sums_and_series_agree_on_the_laws_that_have_both() -> None:
    process = FiniteProcess(kappa_pos=10.0, kappa_range=(4.0, 40.0))
    laws = summed_laws(process)
    np.testing.assert_allclose(laws["together, exact"], process.vmf_law(), atol=1e-9)
    np.testing.assert_allclose(
        laws["together, published"], process.published_law(), atol=1e-9
    )


def test_one_backbone_makes_kappa_a_function_of_the_direction() -> None:
    process = AuthorsJointProcess(5, smoothing_steps=300, dtype=DOUBLE)
    plain = AuthorsProcess(5, smoothing_steps=300, dtype=DOUBLE)
    x = process.draw((50,), torch.Generator().manual_seed(0))
    assert process.mu(x).equal(plain.mu(x))
    assert process.kappa(x).equal(plain.kappa(plain.mu(x)))
    pairs = process.sample(16, 3, torch.Generator().manual_seed(1))
    assert pairs.x_neg is not None and pairs.x_neg.shape == (16, 3, 5)


def test_forward_pairs_need_a_density() -> None:
    with pytest.raises(ValueError, match="family='vmf'"):
        ForwardPairsProcess(smoothing_steps=500, family="laplace").sample(4)


def chi_squared_p(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of the counts under the law, with cells of fewer than 8 expected counts
    merged."""
    expected = law * counts.sum()
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    statistic = ((counts - expected) ** 2 / np.where(keep, expected, 1))[keep].sum()
    return float(scipy.stats.chi2.sf(statistic, keep.sum() - 1))


@pytest.fixture(scope="module")
def world() -> PaperProcess:
    return PaperProcess(smoothing_steps=500, dtype=DOUBLE)


def test_exact_pairs_follow_h_on_a_finite_circle() -> None:
    """Few pairs from each of many pools, so that draws are close to independent and the
    bias is below their noise."""
    process = FiniteProcess(kappa_pos=10.0, kappa_range=(4.0, 40.0), pool=256)
    generator = torch.Generator().manual_seed(0)
    counts = process.counts(
        [process.sample(8, generator=generator) for _ in range(2500)]
    )
    assert chi_squared_p(counts, process.vmf_law()) > 1e-3
    assert chi_squared_p(counts, process.published_law()) < 1e-9


def test_published_pairs_follow_their_own_law_and_miss_the_vmf() -> None:
    process = PublishedFiniteProcess(kappa_pos=10.0, kappa_range=(4.0, 40.0))
    counts = process.counts(
        [process.sample(20_000, generator=torch.Generator().manual_seed(1))]
    )
    assert chi_squared_p(counts, process.published_law()) > 1e-3
    assert chi_squared_p(counts, process.vmf_law()) < 1e-9


def test_dirac_pairs_follow_the_bare_kernel() -> None:
    process = FiniteProcess(kappa_pos=10.0, family="dirac", pool=256)
    generator = torch.Generator().manual_seed(2)
    counts = process.counts(
        [process.sample(8, generator=generator) for _ in range(2500)]
    )
    weights = (10.0 * process.cosines()).exp()
    assert chi_squared_p(counts, (weights / weights.sum()).flatten().numpy()) > 1e-3
    assert (
        chi_squared_p(counts, process.vmf_law()) > 1e-3
    )  # h with point masses says the same


def test_the_bias_of_a_pool_is_of_order_one_over_its_size() -> None:
    """Total variation between the law of a pool's pick and the exact law, on the finite
    circle."""
    process = FiniteProcess(kappa_pos=10.0, kappa_range=(4.0, 40.0))
    generator = torch.Generator().manual_seed(3)
    law, distances = process.vmf_law(), []
    for pool in (2, 4, 8):
        repeats = 400_000 // pool
        number = torch.randint(16, (2, repeats, pool), generator=generator)
        z = process.sample_posterior(process.points[number], 1, generator)[0]
        weights = (process.kappa_pos * z[0] @ z[1].mT).flatten(1).softmax(1)
        entry = (16 * number[0].unsqueeze(2) + number[1].unsqueeze(1)).flatten(1)
        picked = (
            torch.bincount(entry.flatten(), weights.flatten(), minlength=256) / repeats
        )
        distances.append(np.abs(picked.numpy() - law).sum() / 2)
    scaled = np.array(distances) * [2, 4, 8]
    assert distances[0] > 0.02
    assert (scaled < 1.2 * scaled[0]).all()
    assert distances[2] < 0.4 * distances[0]


@pytest.mark.parametrize("kind", [PaperProcess, PublishedPairsProcess])
def test_paper_batches_are_reproducible_and_shaped(
    world: PaperProcess, kind: type[PaperProcess]
) -> None:
    process = kind(smoothing_steps=500, dtype=DOUBLE)
    first, second = (
        process.sample(64, 3, torch.Generator().manual_seed(4)) for _ in range(2)
    )
    assert (
        first.x.shape == first.x_pos.shape == (64, 10)
        and first.x_neg is not None
        and first.x_neg.shape == (64, 3, 10)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first.x.min() >= 0 and first.x.max() <= 1
    assert process.sample(8).x_neg is None
    torch.testing.assert_close(
        process.mu(first.x), world.mu(first.x), rtol=0, atol=0
    )  # the same seed, the same networks
    other = PaperProcess(smoothing_steps=500, seed=1)
    assert not torch.allclose(other.mu(first.x).double(), world.mu(first.x), atol=0.1)


def test_the_networks_are_as_the_paper_says(world: PaperProcess) -> None:
    assert [tuple(weight.shape) for weight, _ in world.mu_layers] == [(10, 10)] * 3
    assert [tuple(weight.shape) for weight, _ in world.kappa_layers] == [
        (10, 10),
        (1, 10),
    ]
    x = world.draw((5000,), torch.Generator().manual_seed(5))
    kappa, mu = world.kappa(x), world.mu(x)
    assert 13 < kappa.min() < 18 and 29 < kappa.max() < 38
    assert (mu @ mu.T).min() < 0.5
    torch.testing.assert_close(mu.norm(dim=-1), torch.ones(5000, dtype=DOUBLE))
    assert PaperProcess(64, smoothing_steps=200).mu_layers[2][0].shape == (
        64,
        10,
    )  # hidden layers stay at 10 units


def test_smoothing_matches_torch_adam() -> None:
    """The hand-written training against torch's autograd and Adam, for the first
    steps."""
    from pcl.generative import _forward, _random_layers, _smooth

    layers = _random_layers([4, 10, 10, 4], torch.Generator().manual_seed(6))
    weights = [p.clone().requires_grad_() for layer in layers for p in layer]
    copies = list(zip(weights[::2], weights[1::2], strict=True))
    inputs = torch.rand(
        500, 64, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(7)
    )
    optimiser = torch.optim.Adam(weights, lr=0.01)
    rows, columns = torch.tril_indices(64, 64)
    for x in inputs[:20]:
        mu = torch.nn.functional.normalize(_forward(copies, x), dim=-1)
        apart = 1 - mu @ mu.T / 2
        terms = (torch.cdist(x, x) - apart).square() * (2**0.5 - apart.detach()) ** 4
        optimiser.zero_grad()
        terms[rows, columns].mean().backward()
        optimiser.step()
    smoothed = _smooth(layers, 20, torch.Generator().manual_seed(7))
    for (weight, bias), (expected_weight, expected_bias) in zip(
        smoothed, copies, strict=True
    ):
        torch.testing.assert_close(weight, expected_weight.detach())
        torch.testing.assert_close(bias, expected_bias.detach())


@pytest.mark.parametrize("family", ["vmf", "gaussian", "laplace", "dirac"])
def test_moments_of_the_families(family: str) -> None:
    """Mean cosine to the mode: exact for vMF and Dirac, by quadrature-free resampling
    in plain numpy otherwise."""
    process = PaperProcess(5, family=family, smoothing_steps=300, dtype=DOUBLE)
    x = process.draw((4,), torch.Generator().manual_seed(8))
    mu, kappa = process.mu(x), process.kappa(x)
    z = process.sample_posterior(x, 60_000, torch.Generator().manual_seed(9))
    assert z.shape == (60_000, 4, 5)
    torch.testing.assert_close(z.norm(dim=-1), torch.ones(60_000, 4, dtype=DOUBLE))
    cosine = (z * mu).sum(-1)
    rng = np.random.default_rng(0)
    for i in range(4):
        if family == "dirac":
            assert kappa[i] == torch.inf and torch.equal(
                z[:, i], mu[i].expand(60_000, 5)
            )
            continue
        if family == "vmf":
            expected, noise = bessel_ratio(1.5, kappa[i]).item(), 0.0
        else:
            k = kappa[i].item()
            draw = (
                rng.normal(0, k**-0.5, (60_000, 5))
                if family == "gaussian"
                else rng.laplace(0, 1 / k, (60_000, 5))
            )
            points = mu[i].numpy() + draw
            cosines = points @ mu[i].numpy() / np.linalg.norm(points, axis=1)
            expected, noise = cosines.mean(), cosines.std() / 60_000**0.5
        error = float(np.hypot(noise, cosine[:, i].std().item() / 60_000**0.5))
        assert abs(cosine[:, i].mean().item() - expected) < 4 * error


def test_posteriors_of_the_paper_process(world: PaperProcess) -> None:
    x = world.draw((7, 3), torch.Generator().manual_seed(10))
    q = world.posterior(x)
    assert (
        q.batch_shape == (7, 3)
        and torch.equal(q.loc, world.mu(x))
        and torch.equal(q.concentration, world.kappa(x))
    )
    dirac = PaperProcess(family="dirac", smoothing_steps=500)
    assert torch.isinf(dirac.posterior(x).concentration).all()
    with pytest.raises(ValueError, match="sample_posterior"):
        PaperProcess(family="laplace", smoothing_steps=500).posterior(x)


def test_coefficients_of_the_published_acceptance() -> None:
    """Against quadrature by scipy, and against draws: harmonics of latents accepted
    from uniform ones."""
    from scipy.integrate import quad
    from scipy.special import eval_gegenbauer

    ours = published_coefficients(10, 20.0, 12)

    def term(t: float, degree: int) -> float:
        accept = published_acceptance(torch.tensor(t, dtype=DOUBLE), 20.0, 10).item()
        return (
            accept
            * eval_gegenbauer(degree, 4, t)
            / eval_gegenbauer(degree, 4, 1.0)
            * (1 - t * t) ** 3.5
        )

    total = quad(term, -1, 1, (0,), epsabs=1e-13)[0]
    for degree in (1, 2, 5, 11):
        assert ours[degree].item() == pytest.approx(
            quad(term, -1, 1, (degree,), epsabs=1e-13)[0] / total, abs=1e-9
        )
    assert ours[0] == 1 and round(ours[1].item(), 3) == 0.601
    assert bessel_ratio(4.0, torch.tensor(20.0, dtype=DOUBLE)).item() == pytest.approx(
        0.7955, abs=1e-4
    )
    circle = published_coefficients(2, 20.0, 5)
    angle = torch.linspace(0, torch.pi, 20_001, dtype=DOUBLE)
    accept = published_acceptance(angle.cos(), 20.0, 2)
    for degree in range(5):
        wave = torch.trapezoid(
            accept * (degree * angle).cos(), angle
        ) / torch.trapezoid(accept, angle)
        assert circle[degree].item() == pytest.approx(wave.item(), abs=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"family": "cauchy"}, "family"),
        ({"dim": 1}, "dim"),
        ({"pool": 0}, "pool"),
        ({"smoothing_steps": -1}, "smoothing_steps"),
        ({"kappa_range": (32.0, 16.0)}, "kappa_range"),
        ({"kappa_pos": 0.0}, "kappa_pos"),
    ],
)
def test_bad_options_of_the_paper_process_are_refused(
    options: dict, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PaperProcess(**options)


@pytest.mark.parametrize("kind", [PaperProcess, PublishedProcess, UniformProcess])
def test_every_process_says_its_true_parameters(kind: type) -> None:
    options = {} if kind is UniformProcess else {"smoothing_steps": 500}
    process: Process = kind(10, **options)
    x = process.draw((2, 7), torch.Generator().manual_seed(0))
    mu, kappa = process.true_parameters(x)
    assert x.shape == (2, 7, process.features)
    assert mu.shape == (2, 7, process.dim) and kappa.shape == (2, 7)
    posterior = kind(10, **options).posterior(x)
    assert posterior.loc.equal(mu) and posterior.concentration.equal(kappa)
    pairs = process.sample(16, 2, torch.Generator().manual_seed(1))
    assert pairs.x.shape == pairs.x_pos.shape == (16, process.features)
    assert pairs.x_neg is not None and pairs.x_neg.shape == (16, 2, process.features)


def test_another_law_of_pairs_overrides_one_method() -> None:
    class Twins(PaperProcess):
        def draw_pairs(self, n, generator):
            x = self.draw((n,), generator)
            return x, x

    pairs = Twins(smoothing_steps=500).sample(8, 3)
    assert pairs.x.equal(pairs.x_pos) and pairs.x_neg.shape == (8, 3, 10)


def test_a_batch_takes_as_many_tables_as_it_needs() -> None:
    """In 32 dimensions few entries of a table carry its mass; a batch from one table
    would repeat them."""
    world = PaperProcess(32, smoothing_steps=500, pool=512)
    pairs = world.sample(256, generator=torch.Generator().manual_seed(0))
    assert pairs.x.shape == pairs.x_pos.shape == (256, 32)
    assert len(pairs.x.unique(dim=0)) > 128


def test_hopeless_requests_say_what_to_do(world: PaperProcess) -> None:
    with pytest.raises(ValueError, match="features"):
        world.mu(torch.zeros(3, 9))
    with pytest.raises(ValueError, match="n must be"):
        world.sample(0)
    with pytest.raises(RuntimeError, match="raise pool"):
        PaperProcess(smoothing_steps=500, pool=2).sample(512)
    with pytest.raises(RuntimeError, match="use PaperProcess"):
        PublishedPairsProcess(smoothing_steps=500, kappa_pos=1e6).sample(8)
    with pytest.raises(RuntimeError, match="use PaperProcess"):
        PublishedPartnersProcess(smoothing_steps=500, kappa_pos=1e6).sample(2)
    with pytest.raises(RuntimeError, match="smoothing_steps"):
        PaperProcess(64, smoothing_steps=0)
    with pytest.raises(ValueError, match="n_terms"):
        published_coefficients(10, 20.0, 0)
