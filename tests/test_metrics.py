"""Metrics against scipy, their invariances, and the paper's size within its budget."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pcl.metrics import (
    as_vector,
    mae,
    mean_abs_cosine,
    pair_cosines,
    pearson,
    recovery,
    rmse,
    spearman,
)

floats = st.floats(-1e3, 1e3, width=32)


@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.float32, (2, 40), elements=floats))
def test_spearman_is_scipys(pair: np.ndarray) -> None:
    a, b = pair
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert np.isnan(spearman(a, b))
        return
    assert spearman(a, b) == pytest.approx(
        scipy.stats.spearmanr(a, b).statistic, abs=1e-12
    )
    assert spearman(a.astype(np.float64), b.astype(np.float64)) == pytest.approx(
        spearman(a, b), abs=1e-15
    )


def test_signed_zeros_and_infinities_rank_as_numbers() -> None:
    a = np.array([-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf], dtype=np.float32)
    b = np.array([0.0, 1.0, 2.0, 2.0, 3.0, 4.0], dtype=np.float32)
    assert spearman(a, b) == 1.0


@settings(deadline=None, max_examples=40)
@given(hnp.arrays(np.float64, (2, 30), elements=st.floats(-50, 50)))
def test_spearman_sees_only_order(pair: np.ndarray) -> None:
    a, b = pair.round(3)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return
    assert spearman(3 * a + 1, b) == pytest.approx(spearman(a, b), abs=1e-12)
    assert spearman(-a, b) == pytest.approx(-spearman(a, b), abs=1e-12)


def test_errors_against_plain_loops() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 100))
    assert rmse(a, b) == pytest.approx(
        (sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 100) ** 0.5
    )
    assert mae(a, b) == pytest.approx(
        sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 100
    )
    assert pearson(a, b) == pytest.approx(scipy.stats.pearsonr(a, b).statistic)


@pytest.mark.parametrize("block", [1, 7, 512])
def test_pair_cosines_against_plain_loops(block: int) -> None:
    mu = torch.nn.functional.normalize(
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    plain = [float(mu[i] @ mu[j]) for i in range(20) for j in range(i + 1, 20)]
    assert pair_cosines(mu, block) == pytest.approx(plain, abs=1e-6)


def test_recovery_is_blind_to_rotation_only() -> None:
    g = torch.Generator().manual_seed(0)
    mu = torch.nn.functional.normalize(torch.randn(100, 6, generator=g), dim=-1)
    kappa = torch.rand(100, generator=g) + 1
    q = torch.linalg.qr(torch.randn(6, 6, generator=g)).Q
    assert recovery(mu, kappa, mu @ q.T, kappa)["mu_rmse"] < 1e-6
    squeezed = torch.nn.functional.normalize(
        mu * torch.tensor([3.0, 1, 1, 1, 1, 1]), dim=-1
    )
    assert recovery(mu, kappa, squeezed, kappa)["mu_rmse"] > 0.1


def posteriors(n: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    mu = torch.nn.functional.normalize(torch.randn(n, dim, generator=g), dim=-1)
    return mu, 16 + 16 * torch.rand(n, generator=g)


def test_recovery_pairs_the_first_inputs_and_compares_all_concentrations() -> None:
    (mu, kappa), (mu_hat, kappa_hat) = posteriors(90, 6, 0), posteriors(90, 4, 1)
    found = recovery(mu, kappa, mu_hat, kappa_hat, n_paired=30)
    true, ours = pair_cosines(mu[:30]), pair_cosines(mu_hat[:30])
    assert found == {
        "mu_rmse": rmse(true, ours),
        "mu_mae": mae(true, ours),
        "mu_rank": spearman(true, ours),
        "kappa_median": kappa_hat.median().item(),
        "kappa_rmse": rmse(kappa, kappa_hat),
        "kappa_mae": mae(kappa, kappa_hat),
        "kappa_rank": spearman(kappa, kappa_hat),
    }
    more = recovery(mu, kappa, mu_hat, kappa_hat, n_paired=1000)
    assert more == recovery(mu, kappa, mu_hat, kappa_hat)


def test_recovery_compares_no_concentration_with_an_infinite_one() -> None:
    mu, kappa = posteriors(20, 3, 0)
    certain = torch.where(torch.arange(20) == 7, torch.inf, kappa)
    found = recovery(mu, certain, mu, kappa)
    assert list(found) == ["mu_rmse", "mu_mae", "mu_rank", "kappa_median"]
    assert found["mu_rmse"] == 0 and found["kappa_median"] == kappa.median()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rmse(torch.ones(3), torch.ones(4)), ValueError, "as many entries"),
        (lambda: spearman(torch.ones(1), torch.ones(1)), ValueError, "at least 2"),
        (
            lambda: spearman(torch.arange(3), torch.ones(3)),
            TypeError,
            "a must hold floats",
        ),
        (
            lambda: spearman(torch.ones(2), torch.tensor([1.0, float("nan")])),
            ValueError,
            "b has NaN",
        ),
        (lambda: pair_cosines(torch.ones(3)), ValueError, "shape"),
        (
            lambda: recovery(*posteriors(3, 2, 0), *posteriors(4, 2, 0)),
            ValueError,
            "mu and mu_hat must describe the same inputs",
        ),
        (
            lambda: recovery(*posteriors(3, 2, 0), *posteriors(3, 2, 0), n_paired=1),
            ValueError,
            "n_paired must be at least 2",
        ),
        (
            lambda: recovery(
                torch.eye(2), torch.tensor([1.0, float("nan")]), *posteriors(2, 2, 0)
            ),
            ValueError,
            "kappa has NaN",
        ),
        (
            lambda: as_vector("kappa", torch.tensor([float("nan")])),
            ValueError,
            "kappa has NaN",
        ),
        (
            lambda: mean_abs_cosine(torch.ones(2, 3), torch.ones(4)),
            ValueError,
            "last dimension",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_all_pairs_of_ten_thousand_fit_the_budget() -> None:
    """5e7 pairs within 30 seconds of one core and 2 GiB above the interpreter with torch
    loaded."""
    code = """
import resource, time, torch
from pcl.metrics import recovery
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
g = torch.Generator().manual_seed(0)
mu = torch.nn.functional.normalize(torch.randn(10_000, 10, generator=g), dim=-1)
kappa = 16 + 16 * torch.rand(10_000, generator=g)
mu_hat = torch.nn.functional.normalize(mu + 0.1 * torch.randn(10_000, 10, generator=g), dim=-1)
torch.set_num_threads(1)
before, start = peak(), time.process_time()
result = recovery(mu, kappa, mu_hat, kappa)
print(time.process_time() - start, peak() - before, result["mu_rank"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, gib, rank = map(float, done.stdout.split())
    assert seconds < 30 and gib < 2 and 0.8 < rank < 1
