"""Sampling speed of `VonMisesFisher` beside its peers; `torch.randn` is the floor, and the ratio the fraction of it reached."""

from __future__ import annotations

import torch
from power_spherical import PowerSpherical

from benchmarks.timing import Row, best_times, show
from pcl.vmf import VonMisesFisher, published_sample

CASES = ((512, 512, 10, 20.0, 5.0), (64, 512, 128, 200.0, 2.0))  # draws, batch, dim, kappa, bar against the classic loop
ROUNDS = 9


def rows() -> list[Row]:
    """Three peers for each case."""
    table = []
    for draws, batch, dim, kappa, bar in CASES:
        loc = torch.nn.functional.normalize(torch.randn(batch, dim, generator=torch.Generator().manual_seed(0)), dim=-1)
        concentration = torch.full((batch,), kappa)
        ours, light = VonMisesFisher(loc, concentration), PowerSpherical(loc, concentration)
        calls = {
            "ours": lambda ours=ours, draws=draws: ours.sample((draws,)),
            "classic rejection loop": lambda loc=loc, k=concentration, draws=draws: published_sample(loc, k, draws),
            "power_spherical": lambda light=light, draws=draws: light.sample((draws,)),
            "torch.randn (floor)": lambda shape=(draws, batch, dim): torch.randn(shape),
        }
        best = best_times(calls, ROUNDS)
        bars = {"classic rejection loop": bar, "power_spherical": 1.0, "torch.randn (floor)": None}
        name = f"sample {draws} x {batch}, D={dim}, kappa={kappa:g}"
        table += [Row(name, best["ours"], peer, best[peer], goal) for peer, goal in bars.items()]
    return table


if __name__ == "__main__":
    show(rows())
