"""The assumption-exact process: invertible, reproducible, and its pairs follow the exact marginal."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from pcl.generative import UniformProcess
from pcl.kernels import log_marginal
from pcl.metrics import rmse

DOUBLE = torch.float64


@pytest.mark.parametrize("dim", [2, 3, 10, 64])
@pytest.mark.parametrize(("depth", "slope"), [(0, 0.4), (2, 0.4), (3, 0.2)])
def test_the_mixing_can_be_undone(dim: int, depth: int, slope: float) -> None:
    process = UniformProcess(dim, depth=depth, slope=slope)
    x = process.draw((500,), torch.Generator().manual_seed(0))
    q = process.posterior(x)
    torch.testing.assert_close(process.observe(q.loc, q.concentration), x, rtol=1e-4, atol=1e-4)


def test_sampling_is_reproducible_and_shaped() -> None:
    process = UniformProcess(5)
    first, second = (process.sample(7, 3, torch.Generator().manual_seed(4)) for _ in range(2))
    assert first.x.shape == first.x_pos.shape == (7, 6) and first.x_neg is not None and first.x_neg.shape == (7, 3, 6)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert process.sample(7).x_neg is None
    assert not torch.equal(UniformProcess(5, seed=1).layers, process.layers)


def test_pair_frequencies_follow_h_on_the_circle() -> None:
    """Angles of positive pairs, binned, against the exact density for their own kappas: a chi-squared test."""
    process = UniformProcess(2, (4.0, 40.0), kappa_pos=10.0, dtype=DOUBLE)
    pairs = process.sample(40_000, generator=torch.Generator().manual_seed(2))
    q, q_pos = process.posterior(pairs.x), process.posterior(pairs.x_pos)
    sine = q.loc[:, 0] * q_pos.loc[:, 1] - q.loc[:, 1] * q_pos.loc[:, 0]
    angle = torch.atan2(sine, (q.loc * q_pos.loc).sum(-1)).numpy()
    edges = np.linspace(-np.pi, np.pi, 41)
    nodes, weights = np.polynomial.legendre.leggauss(6)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.pi / 40
    grid = torch.tensor(middle[:, None] + half * nodes).reshape(-1, 1)
    rng = np.random.default_rng(0).choice(40_000, 2000, replace=False)  # the kappas' law, by a sample of the pairs themselves
    h = log_marginal(grid.cos(), q.concentration[rng], q_pos.concentration[rng], torch.tensor(10.0, dtype=DOUBLE), 2).exp()
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
    assert scipy.stats.kstest(q.loc[:, 0].numpy(), "uniform", (-1, 2)).pvalue > 1e-3  # a coordinate is uniform on the 2-sphere
    assert scipy.stats.kstest((q.concentration.log().numpy() - np.log(16)) / np.log(2), "uniform").pvalue > 1e-3


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
        ({"dim": 3, "slope": 0.0}, "invertible"),
    ],
)
def test_bad_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UniformProcess(**options)


def test_wrong_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="features"):
        UniformProcess(3).posterior(torch.zeros(2, 3))
