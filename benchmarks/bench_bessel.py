"""The log normaliser of the von Mises-Fisher distribution against scipy's and mpmath's
Bessel functions."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import ive

from benchmarks.timing import Bars, Row, installed, interleaved, show
from pcl.bessel import log_normalizer

DIM = 10
GROUP = "Log normaliser"


def scipy_log_normalizer(dim: int, kappa: np.ndarray) -> np.ndarray:
    """The textbook formula, as far as scipy carries it."""
    nu = dim / 2 - 1
    return (
        nu * np.log(kappa)
        - (nu + 1) * math.log(2 * math.pi)
        - np.log(ive(nu, kappa))
        - kappa
    )


def mpmath_log_normalizer(dim: int, kappa: np.ndarray) -> np.ndarray:
    """The same in mpmath, one value at a time, at its default of 15 digits."""
    import mpmath as mp

    nu = mp.mpf(dim) / 2 - 1
    constant = (nu + 1) * mp.log(2 * mp.pi)
    return np.array(
        [
            float(nu * mp.log(k) - constant - mp.log(mp.besseli(nu, k)))
            for k in kappa.tolist()
        ]
    )


def rows(quick: bool = False) -> list[Row]:
    """Long vectors in both precisions, a short one, and the few values that mpmath can
    manage."""
    long, rounds = (20_000, 3) if quick else (1_000_000, 11)
    cases = [
        ("f64", torch.float64, long, rounds, 1.0),
        ("f32", torch.float32, long, rounds, 1.0),
        ("short", torch.float64, 1_000, 2 if quick else 101, 1.0),
    ]
    table = []
    for slug, dtype, size, rounds, bar in cases:
        kappa = torch.empty(size, dtype=dtype).uniform_(
            0.1, 500, generator=torch.Generator().manual_seed(0)
        )
        peer = kappa.double().numpy()
        np.testing.assert_allclose(
            log_normalizer(DIM, kappa),
            scipy_log_normalizer(DIM, peer),
            rtol=1e-6,
            atol=1e-6,
        )
        calls = {
            "ours": lambda kappa=kappa: log_normalizer(DIM, kappa),
            "scipy": lambda peer=peer: scipy_log_normalizer(DIM, peer),
        }
        name = f"log_normalizer, D={DIM}, {size:,} values, {str(dtype).removeprefix('torch.')}"
        bars = Bars(
            f"log_normalizer.{slug}", name, GROUP, {"scipy": ("scipy.special.ive", bar)}
        )
        table += bars.rows(interleaved(calls, rounds))
    if installed("mpmath"):
        table += mpmath_rows(50 if quick else 1_000, 2 if quick else 7)
    return table


def mpmath_rows(size: int, rounds: int) -> list[Row]:
    """The oracle of our tests: right to any number of digits, and slow."""
    kappa = torch.empty(size, dtype=torch.float64).uniform_(
        0.1, 500, generator=torch.Generator().manual_seed(0)
    )
    np.testing.assert_allclose(
        log_normalizer(DIM, kappa),
        mpmath_log_normalizer(DIM, kappa.numpy()),
        rtol=1e-9,
        atol=1e-9,
    )
    calls = {
        "ours": lambda: log_normalizer(DIM, kappa),
        "mpmath": lambda: mpmath_log_normalizer(DIM, kappa.numpy()),
    }
    name = f"log_normalizer, D={DIM}, {size:,} values, float64"
    bars = Bars(
        "log_normalizer.short",
        name,
        GROUP,
        {"mpmath": ("mpmath.besseli, 15 digits", 1.0)},
    )
    return bars.rows(interleaved(calls, rounds))


def finite_share(dim: int) -> tuple[float, float]:
    """Share of concentrations between 1e-3 and 1e6 at which ours and scipy's log
    normaliser are finite."""
    kappa = torch.logspace(-3, 6, 1000, dtype=torch.float64)
    with np.errstate(divide="ignore"):
        peer = scipy_log_normalizer(dim, kappa.numpy())
    return log_normalizer(dim, kappa).isfinite().double().mean().item(), float(
        np.isfinite(peer).mean()
    )


if __name__ == "__main__":
    show(rows())
    for dim in (10, 512, 2048):
        ours, peer = finite_share(dim)
        print(
            f"finite for D={dim}: ours {ours:.0%}, scipy {peer:.0%} of kappa in [1e-3, "
            "1e6]"
        )
