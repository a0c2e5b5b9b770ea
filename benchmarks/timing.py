"""How every benchmark measures, and how it prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One comparison: how many times faster we are than a peer, and how many times we should be."""

    name: str
    ours_s: float
    peer: str
    peer_s: float
    bar: float | None  # None where the peer is a floor, not a rival

    @property
    def ratio(self) -> float:
        """The peer's time over ours."""
        return self.peer_s / self.ours_s


def best_times(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best time of each call, the calls taking turns so that a busy machine slows all of them alike."""
    best = dict.fromkeys(calls, math.inf)
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def show(rows: Iterable[Row]) -> None:
    """Print a table, one line per comparison."""
    print(f"{'':58s} {'ours':>10s} {'peer':>10s} {'ratio':>7s} {'bar':>5s}  peer", flush=True)
    for r in rows:
        bar = "-" if r.bar is None else f"{r.bar:g}"
        print(f"{r.name:58s} {r.ours_s * 1e3:8.1f}ms {r.peer_s * 1e3:8.1f}ms {r.ratio:7.2f} {bar:>5s}  {r.peer}", flush=True)
