"""The log normaliser of the von Mises-Fisher distribution against scipy's exponentially scaled Bessel function."""

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.special import ive

from pcl.bessel import log_normalizer

DIM, SIZE, ROUNDS = 10, 1_000_000, 7


def scipy_log_normalizer(dim: int, kappa: np.ndarray) -> np.ndarray:
    "The textbook formula, as far as scipy carries it."
    nu = dim / 2 - 1
    return nu * np.log(kappa) - (nu + 1) * math.log(2 * math.pi) - np.log(ive(nu, kappa)) - kappa


def interleaved(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[float, float]:
    "Best time of each, taken in turns so that a busy machine slows both."
    best = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for i, call in enumerate((ours, peer)):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0], best[1]


def rows() -> list[dict]:
    "One row per precision; the ratio is the peer's time over ours."
    out = []
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        kappa = torch.empty(SIZE, dtype=dtype).uniform_(0.1, 500, generator=generator)
        peer = kappa.double().numpy()
        ours_s, peer_s = interleaved(partial(log_normalizer, DIM, kappa), partial(scipy_log_normalizer, DIM, peer))
        np.testing.assert_allclose(log_normalizer(DIM, kappa), scipy_log_normalizer(DIM, peer), rtol=1e-6, atol=1e-6)
        name = f"log_normalizer D={DIM}, {SIZE:,} values, {str(dtype).removeprefix('torch.')}"
        out.append({"name": name, "ours_s": ours_s, "peer": "scipy.special.ive", "peer_s": peer_s,
                    "ratio": peer_s / ours_s, "bar": 1.0})
    return out


def finite_share(dim: int) -> tuple[float, float]:
    "Share of concentrations between 1e-3 and 1e6 at which ours and scipy's log normaliser are finite."
    kappa = torch.logspace(-3, 6, 1000, dtype=torch.float64)
    with np.errstate(divide="ignore"):
        peer = scipy_log_normalizer(dim, kappa.numpy())
    return log_normalizer(dim, kappa).isfinite().double().mean().item(), float(np.isfinite(peer).mean())


if __name__ == "__main__":
    print(f"{'':55s} {'ours, s':>9s} {'peer, s':>9s} {'ratio':>6s} {'bar':>5s}")
    for row in rows():
        print(f"{row['name']:55s} {row['ours_s']:9.4f} {row['peer_s']:9.4f} {row['ratio']:6.2f} {row['bar']:5.1f}"
              f"  {row['peer']}")
    for dim in (10, 128, 512, 2048):
        ours, peer = finite_share(dim)
        print(f"finite for kappa in [1e-3, 1e6], D={dim}: ours {ours:.0%}, scipy {peer:.0%}")
