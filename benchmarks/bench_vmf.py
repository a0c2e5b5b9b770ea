"""Sampling speed of `VonMisesFisher` beside its peers, in one interleaved run.

Each row gives seconds for the same number of draws: ours, the peer's and their ratio (peer / ours: above 1 we are
faster). The bar is the ratio to reach; for bare `torch.randn` there is none, the ratio is the fraction of that floor.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from power_spherical import PowerSpherical

from pcl.vmf import VonMisesFisher, published_sample

CASES = ((512, 512, 10, 20.0, 5.0), (64, 512, 128, 200.0, 2.0))  # draws, batch, dim, kappa, bar for the classic loop


def _interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best time of each call, the calls taking turns so that noise hits all of them alike."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _calls(draws: int, batch: int, dim: int, kappa: float) -> dict[str, Callable[[], object]]:
    """The same draws by every peer."""
    loc = torch.nn.functional.normalize(torch.randn(batch, dim, generator=torch.Generator().manual_seed(0)), dim=-1)
    concentration = torch.full((batch,), kappa)
    ours, light = VonMisesFisher(loc, concentration), PowerSpherical(loc, concentration)
    return {
        "ours": lambda: ours.sample((draws,)),
        "classic rejection loop": lambda: published_sample(loc, concentration, draws),
        "power_spherical": lambda: light.sample((draws,)),
        "torch.randn (floor)": lambda: torch.randn(draws, batch, dim),
    }


def rows(rounds: int = 9) -> list[dict[str, Any]]:
    """Timings of all cases."""
    table = []
    for draws, batch, dim, kappa, bar in CASES:
        best = _interleaved(_calls(draws, batch, dim, kappa), rounds)
        bars = {"classic rejection loop": bar, "power_spherical": 1.0, "torch.randn (floor)": None}
        for peer, goal in bars.items():
            table.append(
                {
                    "name": f"sample {draws} x {batch}, D={dim}, kappa={kappa:g}",
                    "ours_s": best["ours"],
                    "peer": peer,
                    "peer_s": best[peer],
                    "ratio": best[peer] / best["ours"],
                    "bar": goal,
                }
            )
    return table


def main() -> None:
    """Print the table."""
    print(f"{'case':40s} {'peer':24s} {'ours':>9s} {'peer':>9s} {'ratio':>6s}  bar")
    for row in rows():
        bar = "-" if row["bar"] is None else f"{row['bar']:g}"
        print(
            f"{row['name']:40s} {row['peer']:24s} {row['ours_s'] * 1e3:7.1f}ms {row['peer_s'] * 1e3:7.1f}ms "
            f"{row['ratio']:6.2f}  {bar}"
        )


if __name__ == "__main__":
    main()
