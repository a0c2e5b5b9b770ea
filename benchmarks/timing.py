"""How every benchmark measures, what it keeps, and how it prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from statistics import mean, median, quantiles
from typing import Any


@dataclass(frozen=True)
class Row:
    """One comparison with a named peer, round by round."""

    slug: str  # its name in the ledger
    name: str  # what was measured
    peer: str
    ours: Sequence[float]  # one value per round: seconds, or a slope
    theirs: Sequence[float]  # the peer's value in the same round
    bar: (
        float | None
    )  # least ratio for a speed, largest bias for a slope; None where nothing was promised
    kind: str = "speed"  # speed: theirs / ours; slope: ours / theirs, which should be 1
    group: str = ""  # the heading it stands under

    @property
    def ratios(self) -> list[float]:
        """One ratio per round; both sides of it were measured within moments of each
        other."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [b / a if self.kind == "speed" else a / b for a, b in pairs]

    @property
    def ratio(self) -> float:
        """The median over rounds; the mean for slopes, whose errors average out."""
        return (median if self.kind == "speed" else mean)(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these."""
        return quartiles(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the bar was met; None without a bar."""
        if self.bar is None:
            return None
        return (
            self.ratio >= self.bar
            if self.kind == "speed"
            else abs(self.ratio - 1) <= self.bar
        )


@dataclass(frozen=True)
class Bars:
    """What one bench compares with what: the rows share the rounds of `ours`."""

    slug: str
    name: str
    group: str
    peers: Mapping[str, tuple[str, float | None]] = field(
        default_factory=dict
    )  # call -> (peer's name, bar)

    def rows(self, times: Mapping[str, Sequence[float]]) -> list[Row]:
        """One row per peer that was measured."""
        return [
            Row(
                f"{self.slug}.{call}",
                self.name,
                peer,
                times["ours"],
                times[call],
                bar,
                group=self.group,
            )
            for call, (peer, bar) in self.peers.items()
            if call in times
        ]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; a single value is both."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of every call in every round: the calls take turns, and take turns at
    going first."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        calls[name]()  # warms up: tables, caches, threads
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - start)
    return times


def installed(name: str) -> Any | None:
    """A peer's module, or None where it is not installed: then its rows are left out,
    and the run says so."""
    try:
        return import_module(name)
    except ImportError:
        return None


def show(rows: Iterable[Row]) -> None:
    """Print a table, one line per comparison."""
    print(
        f"{'':62s} {'ours':>11s} {'peer':>11s} {'ratio':>8s} {'quartiles':>15s} "
        f"{'bar':>6s}  peer",
        flush=True,
    )
    for r in rows:
        bar = "-" if r.bar is None else f"{r.bar:g}{'' if r.met else ' !'}"
        ours, peer = (
            f"{median(v) * 1e3:9.2f}ms" if r.kind == "speed" else f"{mean(v):11.5f}"
            for v in (r.ours, r.theirs)
        )
        spread = "{:.3g}..{:.3g}".format(*r.quartiles)
        print(
            f"{r.name:62s} {ours} {peer} {r.ratio:8.3f} {spread:>15s} {bar:>6s}  "
            f"{r.peer}",
            flush=True,
        )
