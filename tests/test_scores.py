"""Works and their published numbers, the rules of the scoreboard, and its reports."""

import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from pcl import scores
from pcl.ledger import Record, check_name, read
from pcl.scores import (
    RULES,
    ScoreRow,
    choose,
    counted,
    counts,
    format_ours,
    judge,
    report_json,
    report_markdown,
    report_text,
    scoreboard,
    tolerance,
    without_cause,
)
from pcl.works import (
    CAUSES,
    PublishedCell,
    cells_of,
    parse_cell,
    published_configs,
    published_numbers,
    published_part,
    works,
)


def record(**changes: object) -> Record:
    base = {
        "experiment": "table1",
        "row": "ambiguous",
        "preset": "cpu",
        "seed": 0,
        "metrics": {"kappa_rmse": 6.0},
    }
    return Record(**{**base, **changes})


def cell(
    experiment: str, row: str, metric: str, version: str | None = None
) -> PublishedCell:
    (found,) = [
        e
        for e in published_numbers()
        if (e.experiment, e.row, e.metric) == (experiment, row, metric)
        and version in (None, e.version)
    ]
    return found


# ------------------------------------------------------------------------------------------------
# published numbers

CELLS = {
    "table1": 11,
    "table2": 12 + 3 + 9 + 1,
    "table3": 12,
    "table4": 6 + 1 + 6,
    "table5": 12,
    "table7": 11,
    "table8": 8,
    "table9": 22,
    "table10": 4,
    "table11": 6,
    "figure2": 4,
    "figure3": 3,
    "figure4": 4,
    "figure5": 1,
    "figure6": 1,
    "figure7": 4,
    "figure8": 1,
}


def test_every_table_and_figure_is_there_with_its_source() -> None:
    entries = published_numbers("pcl")
    assert (
        Counter(e.experiment for e in entries) == CELLS and sum(CELLS.values()) == 142
    )
    assert len({(e.experiment, e.row, e.metric, e.version) for e in entries}) == 142
    for e in entries:
        assert re.match(r"(paper|thesis)\b.*(table|figure|section)", e.source), e
        assert (
            e.rule in RULES
            and check_name("row", e.row)
            and check_name("experiment", e.experiment)
        )
        assert (e.value is None) == (e.rule == "none") and e.better in (
            "lower",
            "higher",
            "",
        )
        assert (e.seeds == 5) if e.stderr is not None else (e.seeds is None)
        if (
            e.printed not in ("not legible", "no number")
            and e.rule in ("value", "choice")
            and e.version != "both"
        ):
            assert e.version in ("paper", "thesis", "paper, text", "script")


@pytest.mark.parametrize(
    ("where", "printed", "value", "stderr"),
    [
        (("table1", "ambiguous", "kappa_rmse"), "6.15 ± 0.61", 6.15, 0.61),
        (("table1", "ambiguous", "mu_rmse"), "0.04 ± 0.00", 0.04, 0.0),
        (("table1", "clear", "kappa_rmse"), "125.02 ± 10.64", 125.02, 10.64),
        (("table1", "clear", "kappa_rank"), "0.64 ± 0.04", 0.64, 0.04),
        (("table1", "injective", "mu_rmse"), "0.05 ± 0.01", 0.05, 0.01),
        (("table1", "injective", "kappa_median"), "→ ∞", math.inf, None),
        (("table2", "gaussian", "kappa_rmse", "paper"), "12.76 ± 0.66", 12.76, 0.66),
        (("table2", "gaussian", "kappa_rank", "paper"), "0.78 ± 0.02", 0.78, 0.02),
        (("table2", "laplace", "kappa_rmse", "paper"), "10^7 ± 10^7", 1e7, 1e7),
        (("table2", "laplace", "kappa_rank", "paper"), "0.54 ± 0.14", 0.54, 0.14),
        (("table2", "vmf", "spread_rank", "thesis"), "0.75", 0.75, None),
        (("table2", "gaussian", "spread_rank", "thesis"), "0.70", 0.70, None),
        (("table2", "laplace", "kappa_median", "thesis"), "≈ 2000", 2000.0, None),
        (("table2", "gaussian", "mu_rmse", "thesis"), "not legible", None, None),
        (("table3", "hib", "kappa_rmse"), "10^14 ± 10^14", 1e14, 1e14),
        (("table3", "hib", "kappa_rank"), "-0.02 ± 0.09", -0.02, 0.09),
        (("table3", "elk", "kappa_rmse"), "21.70 ± 0.31", 21.7, 0.31),
        (("table3", "elk", "mu_rank"), "1.00 ± 0.00", 1.0, 0.0),
        (("table4", "hib", "crop_corr", "paper"), "0.72", 0.72, None),
        (("table4", "elk", "entropy_corr", "paper"), "0.10", 0.1, None),
        (("table4", "mcinfonce", "crop_corr", "paper"), "0.70", 0.7, None),
        (("table4", "mcinfonce", "crop_corr", "paper, text"), "0.72", 0.72, None),
        (("table4", "elk", "entropy_corr", "thesis"), "0.14 ± 0.05", 0.14, 0.05),
        (("table4", "mcinfonce", "entropy_corr", "thesis"), "0.29 ± 0.01", 0.29, 0.01),
        (("table5", "cifar10h-hard", "entropy_corr", "paper"), "0.26", 0.26, None),
        (("table5", "cifar10-hard", "crop_corr", "paper"), "0.72", 0.72, None),
        (("table5", "cifar10h-hard", "crop_corr", "thesis"), "0.64 ± 0.02", 0.64, 0.02),
        (("table7", "mcinfonce", "best_m"), "32", 32.0, None),
        (("table7", "elk", "best_phasewise"), "no", 0.0, None),
        (("table7", "hib", "best_a"), "1", 1.0, None),
        (("table7", "hib", "best_b"), "0", 0.0, None),
        (("table7", "elk", "best_m"), "1", 1.0, None),
        (("table7", "mcinfonce", "best_phasewise"), "yes", 1.0, None),
        (("table8", "shared", "kappa_rmse"), "7.31 ± 1.53", 7.31, 1.53),
        (("table8", "shared", "kappa_rank"), "0.87 ± 0.02", 0.87, 0.02),
        (("table9", "hib-cifar10h-soft", "best_b"), "1", 1.0, None),
        (("table9", "mcinfonce-cifar10h-hard", "best_dim"), "16", 16.0, None),
        (("table9", "mcinfonce-cifar10h-hard", "best_m"), "0", 0.0, None),
        (("table9", "mcinfonce-cifar10h-hard", "best_kappa_pos"), "16", 16.0, None),
        (("table9", "hib-cifar10h-soft", "best_phasewise"), "yes", 1.0, None),
        (("table9", "mcinfonce-cifar10-hard", "best_kappa_pos"), "64", 64.0, None),
        (("table10", "scratch", "crop_corr"), "0.62", 0.62, None),
        (("table10", "scratch", "entropy_corr"), "0.31", 0.31, None),
        (("table11", "infonce", "mu_rmse"), "0.83 ± 0.00", 0.83, 0.0),
        (("table11", "infonce", "recall_at_1"), "0.858", 0.858, None),
        (("table11", "mcinfonce", "recall_at_1"), "0.863", 0.863, None),
        (("figure2", "d2", "kappa_rmse"), "2.89 ± 0.56", 2.89, 0.56),
        (("figure2", "d2", "kappa_rank"), "0.82 ± 0.05", 0.82, 0.05),
        (("figure3", "k16", "kappa_rmse"), "4.55", 4.55, None),
        (("figure3", "k4", "kappa_rank"), "0.77", 0.77, None),
        (("figure4", "d32", "kappa_rank"), "≥ 0.6", 0.6, None),
        (("figure5", "mcinfonce", "recall_trend"), "increasing", 1.0, None),
        (("figure6", "clear-query", "images_in_interval"), "1", 1.0, None),
        (("figure7", "d10-d64", "kappa_rank"), "decreasing", -1.0, None),
        (("figure8", "mcinfonce", "entropy_gap"), "no number", None, None),
    ],
)
def test_a_published_cell(
    where: tuple, printed: str, value: float | None, stderr: float | None
) -> None:
    e = cell(*where)
    assert (e.printed, e.value, e.stderr) == (printed, value, stderr)


def test_the_standard_row_is_the_same_wherever_it_is_repeated() -> None:
    rows = [
        ("table1", "ambiguous"),
        ("table2", "vmf"),
        ("table3", "mcinfonce"),
        ("table8", "independent"),
    ]
    metrics = ("mu_rmse", "mu_rank", "kappa_rmse", "kappa_rank")
    seen = {
        tuple(
            cell(e, r, m, "paper" if e == "table2" else None).printed for m in metrics
        )
        for e, r in rows
    }
    assert seen == {("0.04 ± 0.00", "0.99 ± 0.00", "6.15 ± 0.61", "0.82 ± 0.04")}


def test_table_6_is_configuration() -> None:
    configs = published_configs()
    table6 = {k: c for k, c in configs.items() if c["source"].startswith("table 6")}
    assert (
        len(table6) == 12
        and len(configs) == 15
        and all(c["source"] for c in configs.values())
    )
    assert configs["d2"]["n_batches"] == 8192 and configs["d2"]["dim"] == 2
    assert configs["mc-samples"]["n_samples"] == [1, 4, 16, 64, 256, 512]
    assert (
        configs["encoder-dim-128"]["batch_size"] == 256
        and configs["encoder-dim-64"]["batch_size"] == 512
    )
    assert configs["high-dim-32-64"]["dim"] == [32, 40, 48, 56, 64]
    assert (
        configs["controlled"]["kappa_pos"] == 20
        and configs["cifar"]["n_batches"] == 8192
    )


@pytest.mark.parametrize(
    "printed", ["", "0,5", "0.5 +- 0.1", "± 0.1", "about 3", "1e3", "≥", "10^x"]
)
def test_an_unreadable_cell_is_refused(printed: str) -> None:
    with pytest.raises(ValueError, match="printed"):
        parse_cell(printed)


# -------------------------------------------------------------------------------------------------------
# scoreboard


OPEN = {"not yet run", "not testable here"}


def board(*records: Record) -> list[ScoreRow]:
    return [s for s in scoreboard(records) if s.verdict not in OPEN]


def test_an_empty_ledger_has_not_been_run() -> None:
    rows = scoreboard([])
    assert len(rows) == len(published_numbers())
    assert {(s.preset, s.ours, s.seeds) for s in rows} == {("-", None, 0)}
    assert {s.verdict for s in rows} == OPEN
    for s in rows:
        assert (s.verdict == "not testable here") == bool(s.cause), s


def test_smoke_runs_are_never_judged() -> None:
    assert board(record(preset="smoke"), record(experiment="own", preset="smoke")) == []


def test_presets_are_kept_apart_and_repetitions_are_not_seeds() -> None:
    rows = board(
        record(created="2026-01-01T00:00:00+00:00", metrics={"kappa_rank": 0.1}),
        record(
            created="2026-01-02T00:00:00+00:00",
            metrics={"kappa_rank": 0.8},
            seconds=10.0,
        ),
        record(seed=1, metrics={"kappa_rank": 0.84}, seconds=20.0),
        record(preset="paper", metrics={"kappa_rank": 0.1}),
    )
    assert [(s.preset, s.seeds, s.seconds, s.verdict) for s in rows] == [
        ("cpu", 2, 30.0, "reproduced"),
        ("paper", 1, 0.0, "differs"),
    ]
    assert (
        math.isclose(rows[0].ours, 0.82)
        and math.isclose(rows[0].spread, 0.02)
        and rows[1].spread is None
    )


def test_two_versions_are_two_lines() -> None:
    rows = board(
        record(experiment="table4", row="mcinfonce", metrics={"crop_corr": 0.685})
    )
    assert {s.version: s.paper for s in rows} == {
        "paper": "0.70",
        "paper, text": "0.72",
        "thesis": "0.68 ± 0.01",
    }


def test_the_injective_row_has_a_rule_of_its_own() -> None:
    def two(value: float, *curve: float) -> list[Record]:
        series = {"curve": {"kappa_median": list(curve)}} if curve else {}
        metrics = {"kappa_median": value}
        return [
            record(row="injective", seed=seed, metrics=metrics, series=series)
            for seed in (0, 1)
        ]

    (row,) = board(*two(5000.0))
    assert row.rule == "diverges" and row.verdict == "reproduced" and row.paper == "→ ∞"
    assert board(*two(1280.0))[0].verdict == "differs"
    assert board(*two(math.inf))[0].verdict == "reproduced"
    fallen = two(5000.0, 1.0, 100.0, 9000.0, 6000.0, 5000.0)
    assert (board(*fallen)[0].verdict, board(*fallen)[0].reason) == (
        "differs",
        "a curve has fallen since half-way",
    )
    rising = two(5000.0, 1.0, 10.0, 100.0, 1000.0, 5000.0)
    assert board(*rising)[0].verdict == "reproduced"
    assert board(rising[0], fallen[1])[0].verdict == "differs"


def test_a_trend_is_read_from_the_rows_of_its_sweep() -> None:
    def sweep(values: dict[str, float], seed: int = 0) -> list[Record]:
        return [
            record(experiment="figure7", row=k, seed=seed, metrics={"mu_rank": v})
            for k, v in values.items()
        ]

    falling, rising = (
        {"d10": 0.9, "d40": 0.5, "d64": 0.1},
        {"d10": 0.1, "d40": 0.5, "d64": 0.9},
    )
    (both,) = board(*sweep(falling), *sweep(falling, seed=1))
    assert (both.verdict, both.seeds) == ("reproduced", 2)
    assert board(*sweep(falling))[0].verdict == "inconclusive"  # one seed
    assert board(*sweep(rising))[0].verdict == "differs"
    assert board(*sweep({"d10": 0.9, "d64": 0.5})) == []  # two points make no trend
    assert board(*sweep(falling), *sweep(rising, seed=1))[0].ours == 0.0


def test_runs_of_our_own_are_shown_with_their_exact_value() -> None:
    own = record(
        experiment="sampler",
        row="d64",
        metrics={"mean_cos": 0.009},
        exact={"mean_cos": 0.2364},
    )
    (row,) = board(own)
    assert (row.paper, row.verdict) == (
        "-",
        "no paper value",
    ) and "exact 0.2364" in row.reason
    (plain,) = board(replace(own, exact={}))
    assert plain.reason == ""


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([e for e in published_numbers() if e.rule == "value"]),
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
    st.none() | st.floats(0, 50),
)
def test_the_value_rule_is_the_documented_one(
    entry: PublishedCell, values: list[float], floor: float | None
) -> None:
    mean = sum(values) / len(values)
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    u = entry.half_unit
    theirs = abs(entry.value) / 20 if entry.stderr is None else entry.stderr + u
    counted = min(
        error, max(theirs, abs(entry.value) / 4)
    )  # a run that exploded must not escape by its scatter
    near, far = u + 2 * theirs, u + 2 * math.sqrt(theirs**2 + counted**2)
    assert math.isclose(tolerance(entry, 0.0), near, rel_tol=1e-9)
    assert math.isclose(tolerance(entry, error), far, rel_tol=1e-9)
    gap = abs(mean - entry.value)
    if min(abs(gap - near), abs(gap - far)) > 1e-9:
        verdict, reason = judge(entry, values, floor=floor)
        agreeing = "reproduced" if len(values) > 1 else "inconclusive"
        assert verdict == (
            agreeing if gap < near else "inconclusive" if gap < far else "differs"
        )
        if verdict == "differs" and entry.better:
            improved = (mean < entry.value) == (entry.better == "lower")
            credited = not entry.constant or (floor is not None and mean < floor)
            assert ("ours is better" in reason) == (improved and credited)
            assert ("ours is worse" in reason) != improved


def test_our_own_scatter_is_no_agreement() -> None:
    """The same means, from seeds that agree and from seeds that do not."""
    rank, bound = (
        cell("table2", "laplace", "kappa_rank", "paper"),
        cell("figure4", "d8", "kappa_rank"),
    )
    for entry, mean, wide in ((rank, 0.13, 0.3), (bound, 0.53, 0.25)):
        assert judge(entry, [mean, mean, mean])[0] == "differs"
        verdict, reason = judge(entry, [mean - wide, mean, mean + wide])
        assert (
            verdict == "inconclusive"
            and "our seeds scatter too widely" in reason
            and "ours is" not in reason
        )
        assert (
            judge(entry, [mean - 4, mean - 3, mean + 1])[0] == "differs"
        )  # no scatter is wide enough for that
    assert (
        judge(rank, [0.2, 0.5, 0.8])[0] == "reproduced"
        and judge(bound, [0.55, 0.56])[0] == "reproduced"
    )
    (line,) = board(record(experiment="figure4", row="d8", metrics={"kappa_rank": 0.3}))
    assert line.verdict == "differs"  # one seed has no scatter to hide behind


@given(
    st.sampled_from([e for e in published_numbers() if e.rule == "value" and e.value])
)
def test_the_published_value_reproduces_itself_and_its_double_does_not(
    entry: PublishedCell,
) -> None:
    assert judge(entry, [entry.value] * 5)[0] == "reproduced"
    if entry.stderr is None or abs(entry.value) > 4 * (entry.stderr + entry.half_unit):
        assert judge(entry, [2 * entry.value] * 5)[0] == "differs"


@settings(deadline=None)
@given(st.sampled_from(published_numbers()), st.lists(st.floats(), max_size=5))
def test_no_result_can_break_the_scoreboard(
    entry: PublishedCell, values: list[float]
) -> None:
    where = {"experiment": entry.experiment, "row": entry.row}
    rows = board(
        *(
            record(**where, seed=i, metrics={entry.metric: v})
            for i, v in enumerate(values)
        )
    )
    json.dumps(report_json(rows), allow_nan=False)
    assert report_text(rows)
    for s in rows:
        assert s.verdict in (
            "reproduced",
            "recomputed",
            "differs",
            "inconclusive",
            "no paper value",
        )
        if any(map(math.isnan, values)) and s.rule != "none":
            assert s.verdict == "differs"


def test_an_order_of_magnitude_is_not_reproduced_by_a_sane_number() -> None:
    hib = cell("table3", "hib", "kappa_rmse")
    assert judge(hib, [5.0])[0] == "differs" and "lower" in judge(hib, [5.0])[1]
    assert "better" in judge(hib, [1.0], floor=2.1)[1]
    assert (
        judge(hib, [3e13, 4e14])[0] == "reproduced"
        and judge(hib, [1e20])[0] == "differs"
    )
    assert judge(hib, [math.inf])[0] == "differs"


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9))
def test_the_rank_correlation_against_scipy(values: list[float]) -> None:
    ours = scores._rank_correlation(values)
    expected = (
        spearmanr(range(len(values)), values).statistic if len(set(values)) > 1 else 0.0
    )
    assert math.isclose(ours, expected, abs_tol=1e-12)


def test_a_row_of_ours_beside_published_ones_shows_what_they_measure() -> None:
    metrics = {"kappa_mae": 5.0, "kappa_rank": 0.9, "spread_mae": 0.1}
    own = [
        s
        for s in scoreboard([record(row="ambiguous-exact", metrics=metrics)])
        if s.verdict == "no paper value"
    ]
    assert {s.metric for s in own} == {"kappa_mae", "kappa_rank"} and all(
        s.label != s.metric for s in own
    )
    free = scoreboard([record(experiment="ours", row="a", metrics=metrics)])
    assert {s.metric for s in free if s.verdict == "no paper value"} == set(metrics)


def test_the_report_is_aligned_and_complete() -> None:
    rows = scoreboard(
        [
            record(metrics={"kappa_rank": 0.80}, seconds=100.0),
            record(seed=1, metrics={"kappa_rank": 0.84}, seconds=100.0),
        ]
    )
    lines = report_text(rows).splitlines()
    assert len(lines) == 2 + len(rows) + 4
    column = lines[0].index("paper")
    assert all(line[column - 2 : column] == "  " for line in lines[2:-4])
    cells = published_numbers()
    absent = sum(any(c.runs == "none" for c in cell.causes) for cell in cells)
    assert absent > 9
    assert lines[-3] == (
        f"1 reproduced, 0 recomputed, 0 differs, 0 inconclusive, {absent} not testable "
        f"here, {len(cells) - 1 - absent} not yet run, 0 no paper value"
    )
    assert lines[-2].startswith("every published number once: 1 reproduced, ")
    assert lines[-1] == "all runs, one after the other: 3 min"
    (ours,) = [s for s in rows if s.seeds]
    assert format_ours(ours) == "0.82 ± 0.02" and "3 min" in report_text([ours])
    keys = {
        "experiment",
        "row",
        "preset",
        "metric",
        "paper",
        "ours",
        "spread",
        "seeds",
        "seconds",
        "verdict",
    }
    objects = json.loads(json.dumps(report_json(rows), allow_nan=False))
    assert len(objects) == len(rows) and all(keys <= set(o) for o in objects)
    assert [o["paper_value"] for o in objects if o["rule"] == "diverges"] == ["inf"]


def test_published_rmse_is_compared_with_what_its_code_computed() -> None:
    """The published code prints a mean absolute error as RMSE: ours is compared by the
    same quantity where it was recorded."""
    both = [
        record(
            seed=s,
            metrics={"kappa_mae": 6.1 + s / 10, "kappa_rmse": 60.0, "kappa_rank": 0.8},
        )
        for s in (1, 2)
    ]
    (line,) = [
        r
        for r in scoreboard(both)
        if (r.experiment, r.row, r.metric) == ("table1", "ambiguous", "kappa_rmse")
    ]
    assert line.ours == pytest.approx(6.25) and line.verdict == "reproduced"


def test_a_single_seed_is_called_one_and_reproduces_nothing() -> None:
    (line,) = board(record(metrics={"kappa_rank": 0.82}))
    assert line.verdict == "inconclusive" and "one seed" in line.reason
    (far,) = board(record(metrics={"kappa_rank": 0.1}))
    assert far.verdict == "differs" and "one seed" in far.reason
    search = record(experiment="table7", row="mcinfonce", metrics={"best_m": 1.0})
    assert board(search)[0].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("picked", "verdict"),
    [
        ((32.0, 32.0, 32.0), "reproduced"),
        ((1.0, 1.0, 1.0), "differs"),
        ((32.0, 1.0, 32.0), "inconclusive"),
    ],
)
def test_searches_that_disagree_say_nothing(
    picked: tuple[float, ...], verdict: str
) -> None:
    runs = [
        record(experiment="table7", row="mcinfonce", seed=i, metrics={"best_m": m})
        for i, m in enumerate(picked)
    ]
    (line,) = board(*runs)
    assert line.verdict == verdict
    assert ("disagree" in line.reason) == (verdict == "inconclusive")
    if verdict == "inconclusive":
        assert line.cause_kind == "unexplained"


@pytest.mark.parametrize(
    ("ranks", "verdict"),
    [((0.8, 0.5, 0.1), "reproduced"), ((0.2, 0.1, 0.3), "inconclusive")],
)
def test_a_trend_of_errors_of_kappa_counts_only_with_its_order(
    ranks: tuple[float, ...], verdict: str
) -> None:
    sweep = [
        record(
            experiment="figure7",
            row=row,
            seed=seed,
            metrics={"kappa_mae": level, "kappa_rank": rank, "mu_mae": level},
        )
        for seed in (4, 5)
        for row, level, rank in zip(
            ("d10", "d40", "d64"), (1, 2, 3), ranks, strict=True
        )
    ]
    found = {s.metric: s for s in scoreboard(sweep) if s.row == "d10-d64" and s.seeds}
    assert found["kappa_rmse"].verdict == verdict
    assert found["mu_rmse"].verdict == "reproduced"  # directions are evidence alone
    assert "3 of 7 places on the sweep were run" in found["mu_rmse"].reason


def test_a_trend_of_errors_without_a_printed_order_does_not_count() -> None:
    """Figure 3 has no order beside its errors, so its trend is no evidence."""
    sweep = [
        record(experiment="figure3", row=row, seed=s, metrics={"kappa_mae": level})
        for s in (4, 5)
        for row, level in (("k1", 50.0), ("k4", 20.0), ("k16", 10.0))
    ]
    found = {s.row: s for s in scoreboard(sweep) if s.seeds and s.published}
    trend = found["k1-k512"]
    assert (trend.ours, trend.verdict) == (-1, "inconclusive")
    assert "none is printed" in trend.reason
    assert trend.cause_kind == "artefact of a rule"


# ------------------------------------------------------------------------------------
# works

OTHER = """
[work]
title = "Another work"
authors = "Somebody"
year = 2020
source = "a shelf"
versions = ["print"]
[metrics]
recall = { label = "Recall@1", better = "higher" }
limit = { label = "limit", better = "" }
[[table]]
experiment = "table1"
title = "A table"
version = "print"
source = "table 1"
chapter = "915_scores"
metrics = ["recall", "limit"]
diverges_above = 7
[table.rows]
ce = ["0.50", "→ ∞"]
[[cause]]
experiment = "table1"
row = "ce"
metric = "recall"
kind = "backbone or data"
text = "other images"
runs = "ours"
"""


def test_another_work_s_tables_carry_its_name() -> None:
    found = cells_of("other", tomllib.loads(OTHER))
    assert {(e.experiment, e.work) for e in found} == {("other.table1", "other")}
    run = record(experiment="other.table1", row="ce", metrics={"recall": 0.9})
    again = replace(run, seed=1)
    (row, _) = scoreboard([run, again], found)
    assert (row.verdict, row.cause, row.work) == ("differs", "other images", "other")
    assert row.cause_kind == "backbone or data"
    assert "other images" in report_text([row]) and "other images" in report_markdown(
        [row]
    )
    same = {"recall": 0.5}
    (agreeing, _) = scoreboard(
        [replace(run, metrics=same), replace(again, metrics=same)], found
    )
    assert (agreeing.verdict, agreeing.cause) == ("reproduced", "")


def test_a_table_says_itself_where_infinity_begins() -> None:
    (_, limit) = cells_of("other", tomllib.loads(OTHER))
    assert judge(limit, [8.0, 9.0])[0] == "reproduced"
    assert judge(limit, [6.0, 9.0])[0] == "differs"
    assert cell("table1", "injective", "kappa_median").threshold == 1280


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("diverges_above = 7", "", "needs diverges_above"),
        ("chapter =", "chaptre =", "did you mean 'chapter'"),
        ('metrics = ["recall"', 'metrics = ["recal"', "did you mean 'recall'"),
        ("[[cause]]", "[[causes]]", "did you mean 'cause'"),
        ('row = "ce"', 'row = "ec"', "which is no cell of it"),
        ('kind = "backbone or data"', 'kind = "backbones"', "backbone or data"),
        ('kind = "backbone or data"', "", "a cause must have kind"),
        ('runs = "ours"', 'runs = "theirs"', "unknown kind of runs 'theirs'"),
    ],
)
def test_a_slip_in_a_file_of_numbers_is_named(
    before: str, after: str, message: str
) -> None:
    assert before in OTHER
    with pytest.raises(ValueError, match=message):
        cells_of("other", tomllib.loads(OTHER.replace(before, after)))


def test_the_logs_of_aninfonce_are_a_work_of_their_own() -> None:
    cells = published_numbers("aninfonce")
    assert {c.experiment for c in cells} == {"aninfonce.logs"} and len(cells) == 18
    assert {c.answered_by for c in cells} == {"axes"}
    learned = [c.value for c in cells if c.row == "linear-published"][2:]
    assert learned == sorted(learned) and all("log" in c.source for c in cells)


def test_what_the_authors_files_give_is_compared_digit_by_digit() -> None:
    (entry,) = [
        c
        for c in published_numbers("url")
        if (c.row, c.metric) == ("mcinfonce-resnet50", "r_auroc")
    ]
    assert (entry.rule, entry.printed) == ("recomputed", "0.569")
    for value, verdict in ((0.5694, "recomputed"), (0.5684, "differs")):
        assert judge(entry, [value])[0] == verdict  # one is enough: nothing is drawn
        assert judge(entry, [value - 0.01, value + 0.01])[0] == verdict
    run = record(experiment="url_results", row=entry.row, metrics={"r_auroc": 0.5694})
    (line,) = [s for s in scoreboard([run], [entry]) if s.published]
    assert (line.verdict, line.runs, dict(line.beside)) == (
        "recomputed",
        "their data",
        {},
    )
    assert "0.5694" in line.reason


@pytest.mark.parametrize(
    ("work", "cells", "absent"), [("url", 117, 2), ("pvu", 37, 21)]
)
def test_the_numbers_of_the_benchmark_are_recomputed(
    work: str, cells: int, absent: int
) -> None:
    every = published_numbers(work)
    found = [c for c in every if c.rule == "recomputed"]
    assert (len(found), len(every) - len(found)) == (cells, absent)
    by = {"url": {"url_results", "url_choices"}, "pvu": {"url_results"}}
    assert {c.answered_by for c in found} == by[work]
    others = [cause.kind for c in every if c not in found for cause in c.causes]
    assert others == ["not testable here"] * absent
    keys = {(c.experiment, c.row, c.metric) for c in found}
    board = [s for s in scoreboard(read()) if s.work == work and s.published]
    lines = [s for s in board if (s.experiment, s.row, s.metric) in keys]
    assert len(lines) == cells
    assert {s.verdict for s in lines} == {"recomputed", "differs"}


def test_every_work_is_described() -> None:
    assert next(iter(works())) == "pcl" and list(works())[-2:] == ["own", "speed"]
    pcl = works()["pcl"]
    assert pcl.year == 2023 and "Kirchhof" in pcl.authors and pcl.title and pcl.source
    assert len(published_numbers("pcl")) == 142
    with pytest.raises(ValueError, match="unknown published work 'plc'"):
        published_numbers("plc")


def test_every_table_names_a_chapter_that_exists(root: Path) -> None:
    chapters = {e.chapter for e in published_numbers()}
    assert all((root / "nbs" / f"{name}.ipynb").is_file() for name in chapters)


# ------------------------------------------------------------------------------------
# what a report shows


def test_a_report_is_about_published_cells_unless_all_is_asked_for() -> None:
    beside = record(row="ambiguous-exact", metrics={"kappa_rank": 0.9})
    rows = scoreboard([record(), beside, record(experiment="hard", row="a")])
    cells = len(published_numbers())
    assert all(r.published for r in choose(rows)) and len(choose(rows)) == cells
    assert len(choose(rows, everything=True)) == len(rows) == cells + 2
    assert {r.experiment for r in choose(rows, ["table1"])} == {"table1"}
    assert len(choose(rows, ["table1"], True)) == len(choose(rows, ["table1"])) + 1
    # an experiment without a published cell has nothing else to show
    assert [r.experiment for r in choose(rows, ["hard"])] == ["hard"]
    with pytest.raises(ValueError, match="did you mean 'table1'"):
        choose(rows, ["tabel1"])


def test_the_rules_under_a_table_are_one_line_each() -> None:
    assert all(len(text) < 80 for text in RULES.values())


# ------------------------------------------------------------------------------------
# as published, counted once, with a cause

KNOWN = {"kappa_mae_constant": 2.1, "kappa_mae_untrained": 3.2}


def world(
    where: str,
    level: float,
    rank: float,
    seeds: tuple[int, ...] = (4, 5),
    **known: float,
) -> list[Record]:
    experiment, row = where.split()
    metrics = {"kappa_mae": level, "kappa_rank": rank, **KNOWN, **known}
    return [
        record(experiment=experiment, row=row, seed=s, metrics=metrics) for s in seeds
    ]


def lines_of(where: str, records: list[Record]) -> dict[str, ScoreRow]:
    return {
        s.metric: s
        for s in scoreboard(records)
        if f"{s.experiment} {s.row}" == where and s.seeds
    }


def test_runs_as_published_are_judged_and_ours_stand_beside_them() -> None:
    ours = world("table1 ambiguous", 14.0, 0.8)
    exact = world("table1 ambiguous-exact", 4.0, 0.95)
    theirs = world("table1 ambiguous-as-published", 6.0, 0.81)
    before = lines_of("table1 ambiguous", ours + exact)["kappa_rank"]
    assert (before.runs, before.judged) == ("ours", "table1 ambiguous")
    assert dict(before.beside) == {"exact": "0.95 ± 0"}
    after = lines_of("table1 ambiguous", ours + exact + theirs)
    assert after["kappa_rank"].judged == "table1 ambiguous-as-published"
    assert dict(after["kappa_rank"].beside) == {
        "corrected": "0.8 ± 0",
        "exact": "0.95 ± 0",
    }
    assert (after["kappa_rmse"].constant, after["kappa_rmse"].untrained) == (2.1, 3.2)
    own = [s for s in scoreboard(ours + exact + theirs) if not s.published]
    assert {s.row for s in own} == {"ambiguous-exact"}


def test_one_run_answers_for_every_table_that_prints_it() -> None:
    theirs = world("table1 ambiguous-as-published", 6.0, 0.81, spread_rank=0.75)
    own = world("table2 vmf", 14.0, 0.1)
    for where in (
        "table2 vmf",
        "table3 mcinfonce",
        "table8 independent",
        "figure4 d10",
    ):
        line = lines_of(where, theirs + own)["kappa_rank"]
        assert line.judged == "table1 ambiguous-as-published", where
        assert line.verdict == "reproduced" and line.counted == (where == "figure4 d10")
    assert lines_of("table2 vmf", theirs)["spread_rank"].counted  # printed nowhere else
    (k16,) = lines_of("figure3 k16", theirs).values()
    assert k16.judged == "table1 ambiguous-as-published" and k16.counted
    elsewhere = [replace(r, preset="paper") for r in theirs]
    assert lines_of("figure3 k16", elsewhere) == {}  # there it has 512 samples
    sweep = theirs + world("figure3 k4-as-published", 9.0, 0.7)
    sweep += world("figure3 k64-as-published", 5.0, 0.8)
    assert lines_of("figure3 k1-k512", sweep)["kappa_rmse"].runs == "as published"


def test_every_number_is_counted_once() -> None:
    rows = scoreboard([])
    once = counted(rows)
    places = [(s.experiment, s.row, s.metric) for s in once]
    assert len(set(places)) == len(places) < len(rows)
    assert {s.version for s in once if s.experiment == "table4"} == {"thesis"}
    assert not any(s.experiment == "table5" and s.row == "cifar10h-soft" for s in once)
    assert all(s.rule != "none" for s in once)
    # nothing is lost: what is not counted is printed, legibly, somewhere that is
    shown = {(s.metric, s.row) for s in once}
    homes = {"vmf", "mcinfonce", "independent", "cifar10h-soft", "pretrained"}
    for s in rows:
        if s.rule != "none" and not s.counted:
            assert (s.metric, s.row) in shown or s.row in homes, s
    assert sum(counts(once).values()) == len(once)


def test_a_level_of_kappa_is_no_evidence_without_its_order() -> None:
    alone = lines_of("table1 ambiguous", world("table1 ambiguous", 6.1, 0.3))
    assert alone["kappa_rmse"].verdict == "inconclusive"
    assert "without the order" in alone["kappa_rmse"].reason
    both = lines_of("table1 ambiguous", world("table1 ambiguous", 6.1, 0.8))
    assert both["kappa_rmse"].verdict == both["kappa_rank"].verdict == "reproduced"


@pytest.mark.parametrize(
    ("level", "known", "better"),
    [(1.0, KNOWN, True), (2.5, KNOWN, False), (1.0, {}, False)],
)
def test_better_is_better_than_a_constant(
    level: float, known: dict[str, float], better: bool
) -> None:
    runs = [
        record(seed=s, metrics={"kappa_mae": level, "kappa_rank": 0.8, **known})
        for s in (1, 2)
    ]
    line = lines_of("table1 ambiguous", runs)["kappa_rmse"]
    assert line.verdict == "differs" and line.better == better


def test_what_training_saw_and_where_a_search_starts_take_a_verdict_back() -> None:
    def crops(share: float) -> ScoreRow:
        runs = [
            record(
                experiment="table5",
                row="cifar10-hard",
                seed=s,
                metrics={"crop_corr": 0.69},
                settings={"crop_share": share},
            )
            for s in (1, 2)
        ]
        return next(s for s in board(*runs) if s.version == "thesis")

    assert crops(0.0).verdict == "reproduced"
    assert crops(0.4).verdict == "inconclusive" and "saw" in crops(0.4).reason

    def search(start: float) -> ScoreRow:
        runs = [
            record(
                experiment="table9",
                row="hib-cifar10h-soft",
                seed=s,
                metrics={"best_a": 2.0},
                settings={"a": start},
            )
            for s in (1, 2)
        ]
        return board(*runs)[0]

    assert search(0.5).verdict == "reproduced"
    assert search(2.0).verdict == "inconclusive" and "starts" in search(2.0).reason


def test_every_cell_that_differs_has_a_cause_from_the_list() -> None:
    rows = choose(scoreboard(read().records))
    todo = without_cause(rows)
    assert not todo, f"fill in and add to results/published/pcl.toml:\n\n{todo}"
    for row in rows:
        if row.verdict == "differs":
            assert row.cause_kind in CAUSES and row.cause.endswith("."), row
            assert row.cause_kind != "better" or row.better, row


def test_every_number_of_the_paper_has_a_verdict_and_what_is_missing_a_cause() -> None:
    for row in counted(choose(scoreboard(read().records))):
        assert row.verdict != "not yet run", row
        if row.verdict not in ("reproduced", "recomputed", "no paper value"):
            assert row.cause_kind in CAUSES and row.cause.endswith("."), row


def test_an_open_verdict_says_what_it_lacks() -> None:
    one, *_ = board(record(metrics={"kappa_rank": 0.82}))
    assert one.verdict == "inconclusive" and one.cause_kind == "budget"
    assert "One seed" in one.cause
    theirs = world("table1 ambiguous-as-published", 6.15, 0.1)
    rows = {s.metric: s for s in scoreboard(theirs) if s.row == "ambiguous" and s.seeds}
    level, order = rows["kappa_rmse"], rows["kappa_rank"]
    assert order.verdict == "differs" and level.verdict == "inconclusive"
    assert level.cause_kind == order.cause_kind and level.cause.endswith(order.cause)


def test_a_cell_without_a_cause_is_listed_ready_to_fill_in() -> None:
    theirs = world("table1 clear-as-published", 1.0, 0.1)
    todo = without_cause(scoreboard(theirs))
    entries = tomllib.loads(todo)["cause"]
    assert {(e["row"], e["metric"], e["runs"]) for e in entries} >= {
        ("clear", "kappa_rank", "as published")
    }


def test_every_figure_and_table_of_the_paper_has_its_place(root: Path) -> None:
    shown = published_part("shown")
    named = {(e["name"], e["of"]) for e in shown}
    assert {f"figure {i}" for i in range(1, 9)} <= {name for name, _ in named}
    assert {f"table {i}" for i in range(1, 12)} <= {name for name, _ in named}
    for e in shown:
        pages = [root / "nbs" / f"{e['chapter']}.{end}" for end in ("ipynb", "md")]
        assert any(page.is_file() for page in pages) or e["note"], e
