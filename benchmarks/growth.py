"""Time and memory of the losses against D, K, M and B: each size in a forked child, its exponent by least squares."""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median

import torch

from benchmarks.bench_losses import KAPPA_POS, posteriors
from benchmarks.timing import quartiles
from pcl.losses import ExactInfoNCE, MCInfoNCE

TAIL = 4  # sizes that enter the fit: the largest, where fixed costs count least


@dataclass(frozen=True)
class Size:
    """One training step."""

    loss: str  # mcinfonce or exact_infonce
    B: int = 256
    D: int = 16
    K: int = 64  # samples; the exact loss has none
    M: int = 32  # negatives: of its own for each row (MCInfoNCE), shared by all (exact); 0 for in-batch


@dataclass(frozen=True)
class Curve:
    """Time and memory along one axis."""

    base: Size
    axis: str
    sizes: Sequence[int]
    seconds: Sequence[float]  # median of the repeats
    low: Sequence[float]
    high: Sequence[float]
    memory: Sequence[float]  # bytes above what the process held before the step

    def exponent(self, values: Sequence[float]) -> float:
        """Slope of log value over log size for the largest sizes."""
        x, y = ([math.log(v) for v in column[-TAIL:]] for column in (self.sizes, values))
        return linear_regression(x, y).slope


AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "mcinfonce": {
        "B": (32, 64, 128, 256, 512, 1024, 2048),
        "D": (8, 16, 32, 64, 128, 256, 512),
        "K": (8, 16, 32, 64, 128, 256, 512),
        "M": (4, 8, 16, 32, 64, 128, 256),
    },
    "exact_infonce": {
        "B": (64, 128, 256, 512, 1024, 2048),
        "D": (8, 16, 32, 64, 128),
        "M": (128, 256, 512, 1024, 2048, 4096, 8192),
    },
}
QUICK: dict[str, dict[str, tuple[int, ...]]] = {"mcinfonce": {"B": (32, 64)}, "exact_infonce": {"M": (256, 1024)}}
BASES = {"mcinfonce": Size("mcinfonce"), "exact_infonce": Size("exact_infonce", B=512, K=0, M=0)}


def step(size: Size) -> Callable[[], None]:
    """One forward and backward pass on fixed posteriors."""
    torch.manual_seed(0)
    q, q_pos = (posteriors(size.B, dim=size.D) for _ in range(2))
    if size.loss == "mcinfonce":
        q_neg = posteriors(size.B, size.M, dim=size.D)
        mc = MCInfoNCE(KAPPA_POS, size.K)
        return lambda: mc(q, q_pos, q_neg).backward()
    exact, pool = ExactInfoNCE(KAPPA_POS), posteriors(1, size.M, dim=size.D) if size.M else None
    return lambda: exact(q, q_pos, pool).backward()


def peak_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Let the peak start again from what is held now; where the system has no such switch it stays, a lower bound follows."""
    try:
        with open("/proc/self/clear_refs", "w") as switch:
            switch.write("5")
    except OSError:
        pass


def measure(size: Size, threads: int, repeats: int) -> tuple[list[float], int]:
    """Seconds of some steps, and the memory of the first: run in a fresh process, which holds nothing else."""
    torch.set_num_threads(threads)
    step(replace(size, B=32, K=min(size.K, 4), M=min(size.M, 64)))()  # code, tables and threads are there; little memory is
    call = step(size)
    gc.collect()
    forget_peak()
    before = peak_bytes()
    call()
    memory = peak_bytes() - before
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times, memory


def curves(quick: bool = False) -> list[Curve]:
    """Every axis of both losses; one each if quick."""
    # A fork server has torch imported but has run nothing: its children share neither memory in use nor dead threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.growth"])
    threads, repeats = torch.get_num_threads(), 2 if quick else 7
    found = []
    for loss, axes in (QUICK if quick else AXES).items():
        base = replace(BASES[loss], B=32, K=min(8, BASES[loss].K)) if quick else BASES[loss]
        for axis, sizes in axes.items():
            tasks = [(Size(**{**vars(base), axis: n}), threads, repeats) for n in sizes]
            with context.Pool(1, maxtasksperchild=1) as pool:
                results = pool.starmap(measure, tasks, chunksize=1)
            spread = [quartiles(times) for times, _ in results]
            found.append(Curve(
                base, axis, sizes, [median(times) for times, _ in results],
                [low for low, _ in spread], [high for _, high in spread], [float(max(m, 1)) for _, m in results],
            ))
    return found


def show(found: Sequence[Curve]) -> None:
    """Print the exponents, and the largest size."""
    print(f"{'':34s} {'time ~ n^':>10s} {'memory ~ n^':>12s}   at the largest", flush=True)
    for c in found:
        where = f"{c.axis}={c.sizes[-1]}: {c.seconds[-1] * 1e3:.0f} ms, {c.memory[-1] / 2**20:.0f} MiB"
        print(f"{c.base.loss + ' against ' + c.axis:34s} {c.exponent(c.seconds):10.2f} {c.exponent(c.memory):12.2f}   {where}")


if __name__ == "__main__":
    show(curves())
