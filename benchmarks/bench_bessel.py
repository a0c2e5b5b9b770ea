"""The log normaliser of the von Mises-Fisher distribution against scipy's exponentially scaled Bessel function."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ive

from benchmarks.timing import Row, best_times, show
from pcl.bessel import log_normalizer

DIM, SIZE, ROUNDS = 10, 1_000_000, 7


def scipy_log_normalizer(dim: int, kappa: np.ndarray) -> np.ndarray:
    """The textbook formula, as far as scipy carries it."""
    nu = dim / 2 - 1
    return nu * np.log(kappa) - (nu + 1) * math.log(2 * math.pi) - np.log(ive(nu, kappa)) - kappa


def rows() -> list[Row]:
    """One row per precision."""
    table = []
    for dtype in (torch.float64, torch.float32):
        kappa = torch.empty(SIZE, dtype=dtype).uniform_(0.1, 500, generator=torch.Generator().manual_seed(0))
        peer = kappa.double().numpy()
        np.testing.assert_allclose(log_normalizer(DIM, kappa), scipy_log_normalizer(DIM, peer), rtol=1e-6, atol=1e-6)
        calls = {
            "ours": lambda kappa=kappa: log_normalizer(DIM, kappa),
            "scipy": lambda peer=peer: scipy_log_normalizer(DIM, peer),
        }
        best = best_times(calls, ROUNDS)
        name = f"log_normalizer D={DIM}, {SIZE:,} values, {str(dtype).removeprefix('torch.')}"
        table.append(Row(name, best["ours"], "scipy.special.ive", best["scipy"], bar=1.0))
    return table


def finite_share(dim: int) -> tuple[float, float]:
    """Share of concentrations between 1e-3 and 1e6 at which ours and scipy's log normaliser are finite."""
    kappa = torch.logspace(-3, 6, 1000, dtype=torch.float64)
    with np.errstate(divide="ignore"):
        peer = scipy_log_normalizer(dim, kappa.numpy())
    return log_normalizer(dim, kappa).isfinite().double().mean().item(), float(np.isfinite(peer).mean())


if __name__ == "__main__":
    show(rows())
    for dim in (10, 512, 2048):
        ours, peer = finite_share(dim)
        print(f"finite for D={dim}: ours {ours:.0%}, scipy {peer:.0%} of kappa in [1e-3, 1e6]")
