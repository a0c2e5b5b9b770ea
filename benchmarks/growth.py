"""Time and memory of the losses against D, K, M and B: each size in forked children,
its exponent by least squares."""

from __future__ import annotations

import ctypes
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
# processes per size: memory is seen once in each, and times differ between them more
# than within
CHILDREN = 3
REPEATS = 5  # steps timed in each


@dataclass(frozen=True)
class Size:
    """One training step."""

    loss: str  # mcinfonce or exact_infonce
    B: int = 256
    D: int = 16
    K: int = 64  # samples; the exact loss has none
    # negatives: of its own for each row (MCInfoNCE), shared by all (exact); 0 for in-
    # batch
    M: int = 32


@dataclass(frozen=True)
class Curve:
    """Time and memory along one axis."""

    base: Size
    axis: str
    sizes: Sequence[int]
    seconds: Sequence[float]  # median of all steps of all children
    low: Sequence[float]  # their quartiles
    high: Sequence[float]
    memory: Sequence[
        float
    ]  # bytes above what the process held before the step: median of the children
    memory_low: Sequence[float]  # least and most of them
    memory_high: Sequence[float]

    def exponent(self, values: Sequence[float]) -> tuple[float, float | None]:
        """Slope of log value over log size for the largest sizes, and its standard
        error by the distance from the line."""
        seen = [
            (math.log(n), math.log(v))
            for n, v in zip(self.sizes, values, strict=True)
            if v > 0
        ][-TAIL:]
        x, y = zip(*seen, strict=True)
        slope, start = linear_regression(x, y)
        off = [b - start - slope * a for a, b in seen]
        spread = sum((a - sum(x) / len(x)) ** 2 for a in x)
        return slope, math.sqrt(sum(e * e for e in off) / (len(x) - 2) / spread) if len(
            x
        ) > 2 else None


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
QUICK: dict[str, dict[str, tuple[int, ...]]] = {
    "mcinfonce": {"B": (32, 64)},
    "exact_infonce": {"M": (256, 1024)},
}
BASES = {
    "mcinfonce": Size("mcinfonce"),
    "exact_infonce": Size("exact_infonce", B=512, K=0, M=0),
}


def step(size: Size) -> Callable[[], None]:
    """One forward and backward pass on fixed posteriors."""
    torch.manual_seed(0)
    q, q_pos = (posteriors(size.B, dim=size.D) for _ in range(2))
    if size.loss == "mcinfonce":
        q_neg = posteriors(size.B, size.M, dim=size.D)
        mc = MCInfoNCE(KAPPA_POS, size.K)
        return lambda: mc(q, q_pos, q_neg).backward()
    exact, pool = (
        ExactInfoNCE(KAPPA_POS),
        posteriors(1, size.M, dim=size.D) if size.M else None,
    )
    return lambda: exact(q, q_pos, pool).backward()


def peak_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def forget_peak() -> None:
    """Let the peak start again from what is held now; where the system has no such
    switch it stays, a lower bound follows."""
    try:
        with open("/proc/self/clear_refs", "w") as switch:
            switch.write("5")
    except OSError:
        pass


def give_back() -> None:
    """Return freed memory to the system, so that the step has to ask for its own; where
    that cannot be done, less is seen."""
    gc.collect()
    trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None)
        if sys.platform == "linux"
        else None
    )
    if trim is not None:
        trim(0)


def measure(size: Size, threads: int, repeats: int) -> tuple[list[float], int]:
    """Seconds of some steps, and the memory of the first: run in a fresh process, which
    holds nothing else."""
    torch.set_num_threads(threads)
    step(
        replace(size, B=32, K=min(size.K, 4), M=min(size.M, 64))
    )()  # code, tables and threads are there; little memory is
    call = step(size)
    give_back()
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
    # A fork server has torch imported but has run nothing: its children share neither
    # memory in use nor dead threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.growth"])
    threads, repeats, children = (
        torch.get_num_threads(),
        2 if quick else REPEATS,
        1 if quick else CHILDREN,
    )
    found = []
    for loss, axes in (QUICK if quick else AXES).items():
        base = (
            replace(BASES[loss], B=32, K=min(8, BASES[loss].K))
            if quick
            else BASES[loss]
        )
        for axis, sizes in axes.items():
            tasks = [
                (Size(**{**vars(base), axis: n}), threads, repeats) for n in sizes
            ] * children  # sizes take turns
            with context.Pool(1, maxtasksperchild=1) as pool:
                results = pool.starmap(measure, tasks, chunksize=1)
            times = [
                [t for some, _ in results[i :: len(sizes)] for t in some]
                for i in range(len(sizes))
            ]
            memory = [
                [float(m) for _, m in results[i :: len(sizes)]]
                for i in range(len(sizes))
            ]
            found.append(
                Curve(
                    base,
                    axis,
                    sizes,
                    [median(t) for t in times],
                    [quartiles(t)[0] for t in times],
                    [quartiles(t)[1] for t in times],
                    [median(m) for m in memory],
                    [min(m) for m in memory],
                    [max(m) for m in memory],
                )
            )
    return found


def show(found: Sequence[Curve]) -> None:
    """Print the exponents with their standard errors, and the largest size."""
    print(
        f"{'':34s} {'time ~ n^':>14s} {'memory ~ n^':>14s}   at the largest", flush=True
    )
    for c in found:
        where = f"{c.axis}={c.sizes[-1]}: {c.seconds[-1] * 1e3:.0f} ms, {c.memory[-1] / 2**20:.0f} MiB"
        both = map(c.exponent, (c.seconds, c.memory))
        fits = [
            f"{slope:.2f}" + ("" if error is None else f" ± {error:.2f}")
            for slope, error in both
        ]
        print(
            f"{c.base.loss + ' against ' + c.axis:34s} {fits[0]:>14s} {fits[1]:>14s}   "
            f"{where}"
        )


if __name__ == "__main__":
    show(curves())
