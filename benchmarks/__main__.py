"""Run every benchmark in one go and write it to the ledger: `make bench`. With --quick:
tiny sizes, nothing written."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import (
    bench_bessel,
    bench_gradient,
    bench_kernels,
    bench_losses,
    bench_metrics,
    bench_vmf,
    growth,
    roofline,
)
from benchmarks.record import measured_now, of_row, of_values, peers
from benchmarks.timing import show
from pcl.ledger import Record, write

MODULES = (
    bench_bessel,
    bench_vmf,
    bench_gradient,
    bench_kernels,
    bench_losses,
    bench_metrics,
)


def heading(module: Any) -> None:
    print(f"\n{module.__doc__.splitlines()[0]}", flush=True)


def comparisons(where: Mapping[str, Any], quick: bool, preset: str) -> Iterator[Record]:
    """Every ratio."""
    for module in MODULES:
        heading(module)
        start = time.perf_counter()
        rows = module.rows(quick)
        show(rows)
        share = (time.perf_counter() - start) / len(rows)
        yield from (of_row(row, where, preset, share) for row in rows)


def roofs(where: Mapping[str, Any], quick: bool, preset: str) -> Iterator[Record]:
    """The machine, and how near the hot paths come to what it can do."""
    heading(roofline)
    peak, found = roofline.machine(quick), roofline.paths(quick)
    roofline.show(peak, found)
    limits = {
        "gigabytes_per_second": peak.bandwidth / 1e9,
        "gigaflops": peak.flops / 1e9,
    }
    yield of_values("roofline", "machine", limits, {**where, **peers()}, {}, preset)
    for path in found:
        moved, computed = path.fractions(peak)
        settings = {
            **where,
            "name": path.name,
            "bytes": path.n_bytes,
            "flops": path.n_flops,
            "counted": path.counted,
            "bandwidth_fraction": moved,
            "flops_fraction": computed,
        }
        curve = {"seconds": list(path.seconds)}
        yield of_values(
            "roofline",
            path.slug,
            {"fraction": max(moved, computed)},
            settings,
            curve,
            preset,
            sum(path.seconds),
        )


def curves(where: Mapping[str, Any], quick: bool, preset: str) -> Iterator[Record]:
    """How time and memory grow."""
    heading(growth)
    found = growth.curves(quick)
    growth.show(found)
    for c in found:
        settings = {
            **where,
            **{key: value for key, value in vars(c.base).items() if key != c.axis},
            "axis": c.axis,
            "fitted": min(growth.TAIL, len(c.sizes)),
        }
        exponents = {
            "time_exponent": c.exponent(c.seconds)[0],
            "memory_exponent": c.exponent(c.memory)[0],
        }
        columns = {
            "size": c.sizes,
            "seconds": c.seconds,
            "low": c.low,
            "high": c.high,
            "bytes": c.memory,
            "bytes_low": c.memory_low,
            "bytes_high": c.memory_high,
        }
        curve = {key: list(map(float, column)) for key, column in columns.items()}
        yield of_values(
            "growth",
            f"{c.base.loss}.{c.axis}",
            exponents,
            settings,
            curve,
            preset,
            sum(c.seconds),
        )


def run(quick: bool = False, preset: str = "cpu") -> Iterator[Record]:
    """Every record of one run, as soon as it is measured."""
    where = measured_now()
    for part in (comparisons, roofs, curves):
        yield from part(where, quick, preset)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes to see that everything runs; not recorded",
    )
    quick = parser.parse_args(arguments).quick
    start, places = time.perf_counter(), set()
    for record in run(quick, "smoke" if quick else "cpu"):
        if not quick:
            places.add(str(write(record).parent.parent))
    print(
        f"\n{time.perf_counter() - start:.0f} s. "
        + (f"Recorded in {', '.join(places)}" if places else "Not recorded.")
    )


if __name__ == "__main__":
    main()
