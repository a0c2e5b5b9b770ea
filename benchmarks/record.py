"""From measurements to ledger records: every record of one run carries the run's
name."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from math import sqrt
from statistics import median, stdev
from typing import Any

from benchmarks.timing import Row, installed
from pcl.ledger import Record

PEERS = {  # module: the name it is installed by
    "scipy": "scipy",
    "mpmath": "mpmath",
    "power_spherical": "power_spherical",
    "tensorflow_probability": "tensorflow-probability",
    "sklearn": "scikit-learn",
    "faiss": "faiss-cpu",
}


def measured_now() -> dict[str, Any]:
    """What the records of one run share, beside the machine: `run` is its name."""
    return {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count() or 1,
        # before the run: above a few tenths, others were at work
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def peers() -> dict[str, str | None]:
    """Which peers are here in which versions, and which are not."""
    here = {name: installed(module) is not None for module, name in PEERS.items()}
    found = ", ".join(
        f"{name} {_version(name)}" for name, there in here.items() if there
    )
    return {
        "peers": found,
        "absent": ", ".join(name for name, there in here.items() if not there) or None,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a build under another name
        return "of unknown version"


def of_row(
    row: Row, where: Mapping[str, Any], preset: str = "cpu", seconds: float = 0.0
) -> Record:
    """A comparison: the ratio is its metric, everything else about it stands in the
    settings, raw values in the curve."""
    low, high = row.quartiles
    ratios = row.ratios
    unit = (
        {"ours_ms": 1e3 * median(row.ours), "peer_ms": 1e3 * median(row.theirs)}
        if row.kind == "speed"
        else {}
    )
    settings = {
        **where,
        "name": row.name,
        "peer": row.peer,
        "bar": row.bar,
        "kind": row.kind,
        "group": row.group,
        "rounds": len(ratios),
        "low": low,
        "high": high,
        "met": row.met,
        **unit,
        "stderr": stdev(ratios) / sqrt(len(ratios)) if len(ratios) > 1 else None,
    }
    curve = {"ours": list(row.ours), "peer": list(row.theirs)}
    return of_values(
        "benchmarks", row.slug, {"ratio": row.ratio}, settings, curve, preset, seconds
    )


def of_values(
    experiment: str,
    row: str,
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
    curve: Mapping[str, Sequence[float]],
    preset: str = "cpu",
    seconds: float = 0.0,
) -> Record:
    """Any measurement of the run, on this machine."""
    series = {"curve": curve} if curve else {}
    return Record(
        experiment,
        row,
        preset,
        1,
        metrics,
        settings,
        series=series,
        seconds=seconds,
        work="speed",
    )
