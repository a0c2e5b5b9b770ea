"""Run every benchmark in one go and write it to the ledger: `make bench`. With --quick:
tiny sizes, nothing written."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import (
    bench_bessel,
    bench_embed,
    bench_gradient,
    bench_kernels,
    bench_losses,
    bench_metrics,
    bench_pages,
    bench_proxies,
    bench_vmf,
    dispatch,
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
    bench_pages,
    bench_proxies,
    bench_embed,
)


def heading(module: Any) -> None:
    print(f"\n{module.__doc__.splitlines()[0]}", flush=True)


def slug_of(module: Any) -> str:
    """What `--only` calls a part: bessel, vmf, losses, dispatch, growth, ..."""
    return module.__name__.rpartition(".")[2].removeprefix("bench_")


def comparisons(
    where: Mapping[str, Any], quick: bool, preset: str, modules: Sequence[Any] = MODULES
) -> Iterator[Record]:
    """Every ratio."""
    for module in modules:
        heading(module)
        start = time.perf_counter()
        rows = module.rows(quick)
        show(rows)
        share = (time.perf_counter() - start) / max(1, len(rows))
        yield from (of_row(row, where, preset, share) for row in rows)


def counts(where: Mapping[str, Any], quick: bool, preset: str) -> Iterator[Record]:
    """How many operations and host reads each loss takes: the same on any machine."""
    heading(dispatch)
    for name, found in dispatch.counts().items():
        print(f"{name:22s} {found.operations:5d} operations {found.reads:3d} reads")
        settings = {
            **where,
            "name": name,
            "batch": dispatch.BATCH,
            "dim": dispatch.DIM,
            "samples": dispatch.SAMPLES,
            "bar_operations": dispatch.BAR[0] if found.judged else None,
            "bar_reads": dispatch.BAR[1] if found.judged else None,
            "met": found.met,
        }
        numbers = {"operations": found.operations, "reads": found.reads}
        yield of_values("dispatch", found.slug, numbers, settings, {}, preset)


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


PARTS = {slug_of(module): module for module in MODULES}
OTHERS = {"dispatch": counts, "roofline": roofs, "growth": curves}


def run(
    quick: bool = False, preset: str = "cpu", only: Sequence[str] = ()
) -> Iterator[Record]:
    """Every record of one run, as soon as it is measured; of some parts only, if they
    are named."""
    where = measured_now()
    wanted = only or (*PARTS, *OTHERS)
    modules = [module for name, module in PARTS.items() if name in wanted]
    yield from comparisons(where, quick, preset, modules)
    for name, part in OTHERS.items():
        if name in wanted:
            yield from part(where, quick, preset)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes to see that everything runs; not recorded",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        choices=[*PARTS, *OTHERS],
        default=[],
        help=f"some parts, to look at: of {', '.join((*PARTS, *OTHERS))}; not recorded, "
        "since the chapter never mixes runs",
    )
    asked = parser.parse_args(arguments)
    quick, keep = asked.quick, not (asked.quick or asked.only)
    start, places = time.perf_counter(), set()
    for record in run(quick, "smoke" if quick else "cpu", asked.only):
        if keep:
            places.add(str(write(record).parent.parent))
    print(
        f"\n{time.perf_counter() - start:.0f} s. "
        + (f"Recorded in {', '.join(places)}" if places else "Not recorded.")
    )


if __name__ == "__main__":
    main()
