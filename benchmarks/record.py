"""From measurements to ledger records: every record of one run carries the run's name
and the machine it ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from math import sqrt
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch

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


def cpu_name() -> str:
    """The processor's name as the system states it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    ]
    return next(
        filter(None, named), platform.processor() or platform.machine() or "unknown"
    )


def machine() -> dict[str, Any]:
    """What every record says about where and when it was measured; `run` is shared by
    the records of one run."""
    return {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "load": round(
            os.getloadavg()[0], 2
        ),  # before the run: above a few tenths, others were at work
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
    config, raw values in the curve."""
    low, high = row.quartiles
    ratios = row.ratios
    unit = (
        {"ours_ms": 1e3 * median(row.ours), "peer_ms": 1e3 * median(row.theirs)}
        if row.kind == "speed"
        else {}
    )
    config = {
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
    return Record(
        "benchmarks", row.slug, preset, 1, {"ratio": row.ratio}, config, curve, seconds
    )


def of_values(
    experiment: str,
    row: str,
    metrics: Mapping[str, float],
    config: Mapping[str, Any],
    curve: Mapping[str, Sequence[float]],
    preset: str = "cpu",
    seconds: float = 0.0,
) -> Record:
    """Any other measurement of the run."""
    return Record(experiment, row, preset, 1, metrics, config, curve, seconds)
