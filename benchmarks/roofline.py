"""What fraction of the machine's memory bandwidth and arithmetic each hot path reaches.

Bytes are the traffic nobody can avoid: inputs read once, results written once, and what the backward pass needs of the
forward pass written once and read once. Flops are the multiplications and additions of the formula, matrix products
mostly; logarithms, exponentials and random numbers count as nothing. Both are lower bounds, so the fractions are too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.bench_losses import DIM, KAPPA_POS, posteriors
from pcl.bessel import log_normalizer
from pcl.losses import ExactInfoNCE, MCInfoNCE
from pcl.marginal import _EDGE, _table
from pcl.metrics import recall_at_k, spearman
from pcl.vmf import VonMisesFisher


@dataclass(frozen=True)
class Machine:
    """The two roofs."""

    # bytes per second: a copy that fits no cache, read and write both counted
    bandwidth: float
    flops: float  # per second: a large product of float32 matrices


@dataclass(frozen=True)
class Path:
    """A hot path, what it must move and compute, and how long it took."""

    slug: str
    name: str
    n_bytes: float
    n_flops: float
    counted: str  # how the two were counted
    seconds: Sequence[float]

    def fractions(self, machine: Machine) -> tuple[float, float]:
        """Of the bandwidth, and of the arithmetic."""
        took = median(self.seconds)
        return (
            self.n_bytes / took / machine.bandwidth,
            self.n_flops / took / machine.flops,
        )


def timed(call: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round, after one to warm up."""
    call()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def machine(quick: bool = False) -> Machine:
    """Measure both roofs: the best of several rounds, because nothing makes a machine
    faster than it is."""
    length, side, rounds = (1 << 16, 128, 2) if quick else (1 << 27, 4096, 7)
    source, target = torch.ones(length), torch.empty(length)
    a, b = torch.randn(side, side), torch.randn(side, side)
    return Machine(
        2 * 4 * length / min(timed(lambda: target.copy_(source), rounds)),
        2 * side**3 / min(timed(lambda: a @ b, rounds)),
    )


def table_flops(dim: int) -> int:
    """Multiplications and additions per pair when a table gives log S h and its three
    slopes."""
    found = _table(
        int(2.77 / _EDGE), int(3.46 / _EDGE) + 1, KAPPA_POS, dim, 2e-5
    )  # kappa in [16, 32], as in `posteriors`
    if found is None:
        raise ValueError(f"dim={dim} has no table at kappa_pos={KAPPA_POS:g}")
    degrees, _, rank = found[1].shape
    return degrees * (
        3 * (2 * rank + 3) + 4
    )  # three low-rank sums by Clenshaw's rule, one of them with its derivative


def elementwise(quick: bool) -> list[Path]:
    """The log normaliser and the sampler."""
    size, draws, rounds = (10_000, 8, 2) if quick else (1_000_000, 512, 9)
    kappa = torch.linspace(0.1, 500, size, dtype=torch.float64)
    q, batch = posteriors(64 if quick else 512), 64 if quick else 512
    law = VonMisesFisher(q.loc.detach(), q.concentration.detach())
    return [
        Path(
            "log_normalizer",
            f"log_normalizer, {size:,} values, float64",
            16.0 * size,
            0.0,
            "8 bytes read and 8 written per value; its arithmetic is not counted",
            timed(lambda: log_normalizer(DIM, kappa), rounds),
        ),
        Path(
            "sample",
            f"sample {draws} x {batch}, D={DIM}",
            4.0 * draws * batch * DIM,
            4.0 * draws * batch * DIM,
            "4 bytes written per coordinate; 4 flops per coordinate to turn it to its "
            "mean",
            timed(lambda: law.sample((draws,)), rounds),
        ),
    ]


def training(quick: bool) -> list[Path]:
    """One step of the two losses."""
    b, k, m, rounds = (32, 8, 4, 2) if quick else (512, 128, 32, 7)
    wide = 64 if quick else 2048
    q, q_pos, q_neg, r, r_pos = (
        posteriors(b),
        posteriors(b),
        posteriors(b, m),
        posteriors(wide),
        posteriors(wide),
    )
    mc, exact = MCInfoNCE(KAPPA_POS, k), ExactInfoNCE(KAPPA_POS)
    cosines, pairs = float(k * b * (1 + m)), float(wide**2)
    return [
        Path(
            "mcinfonce",
            f"MCInfoNCE step, B={b}, K={k}, M={m}, D={DIM}",
            16 * cosines,
            cosines * (6 * DIM + 24),
            "per cosine: two numbers of the draw written and read; 2D flops forward, "
            "4D backward, 24 for turning, scoring and "
            "summing both ways",
            timed(lambda: mc(q, q_pos, q_neg).backward(), rounds),
        ),
        Path(
            "exact_infonce",
            f"ExactInfoNCE step, B={wide}, in-batch, D={DIM}",
            32 * pairs,
            pairs * (6 * DIM + table_flops(DIM)),
            "per pair: the score and three slopes written and read; 6D flops for the "
            "cosine both ways, and the table's sums",
            timed(lambda: exact(r, r_pos).backward(), rounds),
        ),
    ]


def evaluation(quick: bool) -> list[Path]:
    """The metrics."""
    pairs, items, dim, rounds = (
        (1_000, 200, 16, 2) if quick else (4_000_000, 5_000, 128, 7)
    )
    g = torch.Generator().manual_seed(0)
    a, b, points = (
        torch.randn(pairs, generator=g),
        torch.randn(pairs, generator=g),
        torch.randn(items, dim, generator=g),
    )
    labels = torch.randint(0, 10, (items,), generator=g)
    return [
        Path(
            "spearman",
            f"spearman, {pairs:,} pairs",
            8.0 * pairs,
            6.0 * pairs,
            "both values read once; three products summed; sorting is not counted",
            timed(lambda: spearman(a, b), rounds),
        ),
        Path(
            "recall",
            f"recall_at_k, {items:,} items, D={dim}",
            4.0 * (items * dim + items**2),
            2.0 * items**2 * dim,
            "items read once, cosines once; 2D flops per cosine",
            timed(lambda: recall_at_k(points, labels), rounds),
        ),
    ]


def paths(quick: bool = False) -> list[Path]:
    """Every hot path."""
    torch.manual_seed(0)
    return elementwise(quick) + training(quick) + evaluation(quick)


def show(roofs: Machine, found: Sequence[Path]) -> None:
    """Print the roofs and how near each path comes to them."""
    print(
        f"copy {roofs.bandwidth / 1e9:.1f} GB/s, sgemm {roofs.flops / 1e9:.0f} Gflop/s",
        flush=True,
    )
    for path in found:
        moved, computed = path.fractions(roofs)
        print(
            f"{path.name:52s} {median(path.seconds) * 1e3:8.1f}ms  bandwidth "
            f"{moved:7.2%}  flops {computed:7.2%}",
            flush=True,
        )


if __name__ == "__main__":
    show(machine(), paths())
