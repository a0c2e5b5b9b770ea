"""The paper's claims: rules against oracles, verdicts that rest on too little, slips."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pcl.claims import (
    CLAIM_RULES,
    VERDICTS,
    Claim,
    Evidence,
    claim_counts,
    claims_json,
    claims_markdown,
    claims_of,
    claims_text,
    judge_claim,
    judged_claims,
    rule_in_words,
    short_mean,
)
from pcl.experiments import experiments
from pcl.ledger import Record, read
from pcl.works import published_numbers, works

PUBLISHED = {name for name, work in works().items() if work.source}


def record(where: str, seed: int = 1, **metrics: float) -> Record:
    experiment, row = where.split()
    return Record(experiment, row, "cpu", seed, metrics)


def claim(rule: str, *of: str, **more: str) -> Claim:
    return Claim("a", "text", "source", "917_claims", rule, of, **more)


def verdict(asked: Claim, *records: Record) -> str:
    return judge_claim(asked, Evidence(records)).verdict


def many(where: str, metric: str, values: list[float]) -> list[Record]:
    return [record(where, s, **{metric: v}) for s, v in enumerate(values)]


# ------------------------------------------------------------------------------------
# the file


def test_every_claim_is_about_something_that_exists(root: Path) -> None:
    known, cells = (
        experiments(),
        {(c.experiment, c.row, c.metric) for c in published_numbers()},
    )
    assert len(claims_of()) >= 15
    found = [c for work in sorted(PUBLISHED) for c in claims_of(work)]
    assert len({c.text for c in found}) == len(found)
    for c in found:
        assert (root / "nbs" / f"{c.chapter}.ipynb").is_file(), c
        assert c.rule in CLAIM_RULES and c.text.endswith(".") and c.source
        assert c.of or (c.rule == "none" and c.why)
        for reference in filter(None, (*c.of, *c.exact, c.baseline)):
            experiment, row, metric = reference.split()
            cell = (experiment, row, metric) in cells
            both = {row, f"{row}-as-published"}
            assert cell or both & known[experiment].rows.keys(), reference
        assert c.rule != "beats" or c.baseline
    assert all(rule_in_words(rule) for rule in CLAIM_RULES)


def test_an_empty_ledger_tests_nothing() -> None:
    rows = judged_claims([])
    assert {row.verdict for row in rows} == {"not testable here"}
    assert not any(row.counts for row in rows)


def test_the_recorded_claims_can_be_printed_and_counted() -> None:
    rows = judged_claims(read().records)
    assert sum(claim_counts(rows).values()) == len(rows)
    assert all(row.verdict in VERDICTS and row.effect for row in rows)
    table = claims_markdown(rows).splitlines()
    assert len(table) == 2 + len(rows) and len({line.count("|") for line in table}) == 1
    objects = json.loads(json.dumps(claims_json(rows)))
    assert [o["name"] for o in objects] == [row.claim.name for row in rows]
    assert all(row.claim.name in claims_text(rows) for row in rows)
    for row in rows:  # no number was typed: each verdict says whose runs it is about
        assert row.verdict == "not testable here" or row.runs != "-"


# ------------------------------------------------------------------------------------
# the rules

RANKS = st.lists(st.floats(-1, 1), min_size=2, max_size=6)


@settings(max_examples=100, deadline=None)
@given(RANKS, RANKS)
def test_best_and_ordered_against_a_two_sample_rule(
    a: list[float], b: list[float]
) -> None:
    error = math.hypot(*(np.std(v, ddof=1) / math.sqrt(len(v)) for v in (a, b)))
    gap = np.mean(a) - np.mean(b)
    if abs(abs(gap) - 2 * error) < 1e-9:
        return
    runs = many("kappa_pos k20", "kappa_rank", a)
    runs += many("kappa_pos k10", "kappa_rank", b)
    of = ("kappa_pos k20 kappa_rank", "kappa_pos k10 kappa_rank")
    expected = "holds" if gap > 2 * error else "fails"
    assert verdict(claim("best", *of), *runs) == expected
    assert verdict(claim("ordered", *of), *runs) == expected


def test_a_paired_gap_is_surer_than_two_means() -> None:
    base = "recovery ambiguous"
    asked = claim("beats", f"{base} kappa_mae", baseline=f"{base} kappa_mae_constant")
    levels = [1.0, 5.0, 9.0]
    runs = [
        record(base, s, kappa_mae=v - 0.5 - s / 100, kappa_mae_constant=v)
        for s, v in enumerate(levels)
    ]
    assert verdict(asked, *runs) == "holds"
    worse = [
        record(base, s, kappa_mae=v + 1.0 + s / 100, kappa_mae_constant=v)
        for s, v in enumerate(levels)
    ]
    assert verdict(asked, *worse) == "fails"
    assert verdict(asked, *many(base, "kappa_mae", levels)) == "not testable here"


def test_close_is_measured_by_the_paper_s_own_gap() -> None:
    of = ("table2 gaussian kappa_rank", "table2 vmf kappa_rank")  # 0.78 and 0.82

    def asked(gaussian: float) -> str:
        runs = many("table2 gaussian", "kappa_rank", [gaussian, gaussian + 0.001])
        runs += many("table2 vmf", "kappa_rank", [0.8, 0.801])
        return verdict(claim("close", *of), *runs)

    assert (asked(0.9), asked(0.7), asked(0.3)) == ("holds", "holds", "fails")


def test_the_median_of_kappa_is_compared_with_the_middle_of_the_range() -> None:
    of = ("table1 ambiguous kappa_median", "table1 clear kappa_median")

    def asked(ambiguous: float, clear: float) -> str:
        runs = []
        for row, value, low, high in (
            ("ambiguous", ambiguous, 16.0, 32.0),
            ("clear", clear, 64.0, 128.0),
        ):
            kappas = {"kappa_min": low, "kappa_max": high}
            runs += [
                replace(record(f"table1 {row}", s, kappa_median=v), settings=kappas)
                for s, v in enumerate((value, value * 1.01))
            ]
        return verdict(claim("overestimated", *of), *runs)

    assert asked(36.0, 200.0) == "holds"
    assert asked(36.0, 91.0) == "holds in part"  # more, but not most where clear
    assert asked(20.0, 70.0) == "fails"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((70, 13, 12), "holds"),
        ((70, 35, 12), "holds in part"),
        ((70, 69, 12), "fails"),
        ((10, 11, 12), "fails"),
    ],
)
def test_a_sweep_levels_off(errors: tuple[float, ...], expected: str) -> None:
    rows = ("figure3 k4", "figure3 k16", "figure3 k512")
    runs = [
        run
        for row, error in zip(rows, errors, strict=True)
        for run in many(row, "kappa_rmse", [error, error + 0.01])
    ]
    asked = claim("levels off", *(f"{row} kappa_rmse" for row in rows))
    assert verdict(asked, *runs) == expected


def test_cells_decide_together() -> None:
    asked = claim("cells", "table1 ambiguous kappa_rank", "table1 clear kappa_rank")

    def told(ambiguous: float | None, clear: float | None) -> str:
        runs = []
        for row, value in (("ambiguous", ambiguous), ("clear", clear)):
            if value is not None:
                runs += many(f"table1 {row}", "kappa_rank", [value, value + 0.001])
        return verdict(asked, *runs)

    assert told(0.82, 0.64) == "holds" and told(0.82, 0.99) == "holds"  # better
    assert told(0.82, 0.1) == told(0.82, None) == "holds in part"
    assert told(0.1, 0.1) == told(0.1, None) == "fails"
    assert told(None, None) == "not testable here"


# ------------------------------------------------------------------------------------
# whose runs, and what does not count


def test_runs_as_published_decide() -> None:
    asked = claim("positive", "table4 mcinfonce entropy_corr")
    ours = many("table4 mcinfonce", "entropy_corr", [0.3, 0.31])
    theirs = many("table4 mcinfonce-as-published", "entropy_corr", [-0.3, -0.31])
    assert verdict(asked, *ours) == "holds"
    row = judge_claim(asked, Evidence([*ours, *theirs]))
    assert (row.verdict, row.runs) == ("fails", "as published")
    assert row.own["corrected"].startswith("0.30") and row.published.startswith("-0.30")


def test_a_claim_is_not_judged_half_by_one_kind_and_half_by_the_other() -> None:
    of = ("table3 elk kappa_rank", "table3 hib kappa_rank")
    runs = many("table3 elk", "kappa_rank", [0.9, 0.91])
    runs += many("table3 hib", "kappa_rank", [0.1, 0.11])
    runs += many("table3 elk-as-published", "kappa_rank", [-0.5, -0.51])
    row = judge_claim(claim("ordered", *of), Evidence(runs))
    assert (row.verdict, row.runs) == ("holds", "ours")


def test_something_else_than_claimed_does_not_count() -> None:
    asked = claim("positive", "table4 mcinfonce entropy_corr", instead="heads only")
    runs = many("table4 mcinfonce", "entropy_corr", [0.3, 0.31])
    row = judge_claim(asked, Evidence(runs))
    assert (row.verdict, row.weak, row.counts) == ("holds", ("heads only",), False)
    assert judge_claim(asked, Evidence([])).weak == ()  # nothing was run instead


def test_works_beside_the_paper_have_verdicts() -> None:
    records = read().records
    for work in ("aninfonce", "rpm"):
        rows = judged_claims(records, work)
        assert len(rows) >= 7
        for row in rows:  # what was run says so, what was not says why
            told = row.claim.why if row.claim.rule == "none" else row.runs == "ours"
            assert told, row.claim.name
        cifar = [row for row in rows if row.claim.chapter == "387_augmentations"]
        assert not any(row.counts for row in cifar)  # heads are no encoders


def test_one_seed_and_crops_in_training_do_not_count() -> None:
    asked = claim("positive", "table4 mcinfonce crop_corr")
    (single,) = many("table4 mcinfonce", "crop_corr", [0.7])
    row = judge_claim(asked, Evidence([single]))
    assert (row.verdict, row.weak, row.counts) == ("holds", ("one seed",), False)
    both = many("table4 mcinfonce", "crop_corr", [0.7, 0.71])
    assert judge_claim(asked, Evidence(both)).counts
    seen = [replace(run, settings={"crop_share": 0.4}) for run in both]
    assert judge_claim(asked, Evidence(seen)).weak == ("training saw what is measured",)


@pytest.mark.parametrize(
    ("constant", "weak"), [(2.1, ()), (5.5, ("at a reduced budget",))]
)
def test_a_budget_does_not_excuse_what_the_printed_number_misses(
    constant: float, weak: tuple[str, ...]
) -> None:
    asked = replace(
        claim("beats", "table1 ambiguous kappa_rmse"),
        baseline="table1 ambiguous kappa_mae_constant",
    )
    runs = [
        record(
            "table1 ambiguous-as-published",
            seed,
            kappa_mae=7.0 + seed,
            kappa_mae_constant=constant,
        )
        for seed in (4, 5)
    ]
    row = judge_claim(asked, Evidence(runs))  # printed: 6.15 ± 0.61
    assert (row.verdict, row.weak) == ("fails", weak)
    assert row.as_printed is (not weak) and row.counts is (not weak)


def test_only_the_asked_preset_is_evidence() -> None:
    asked = claim("positive", "figure8 mcinfonce entropy_gap")
    runs = many("figure8 mcinfonce", "entropy_gap", [0.2, 0.21])
    assert verdict(asked, *(replace(r, preset="smoke") for r in runs)) == (
        "not testable here"
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(claims_of()), st.lists(st.floats(), min_size=1, max_size=3))
def test_no_result_can_break_a_claim(asked: Claim, values: list[float]) -> None:
    runs = []
    for reference in filter(None, (*asked.of, *asked.exact, asked.baseline)):
        experiment, row, metric = reference.split()
        kappas = {"kappa_min": 16.0, "kappa_max": 32.0}
        runs += [
            Record(experiment, row, "cpu", s, {metric: v}, settings=kappas)
            for s, v in enumerate(values)
        ]
    row = judge_claim(asked, Evidence(runs))
    assert row.verdict in VERDICTS
    assert claims_markdown([row]) and json.dumps(claims_json([row]))


def test_means_show_the_digits_that_their_error_has() -> None:
    assert short_mean(0.9812, 0.0013) == "0.981 ± 0.001"
    assert short_mean(14.351, 0.33) == "14.4 ± 0.3"
    assert short_mean(1196.2, 224.2) == "1196 ± 224"
    assert short_mean(0.1234, None) == "0.123"


def test_level_looks_both_ways() -> None:
    of = ("kappa_pos k20 kappa_rank", "kappa_pos k10 kappa_rank")
    runs = many("kappa_pos k10", "kappa_rank", [0.4, 0.5, 0.6])
    for shift, expected in ((0.0, "holds"), (0.3, "fails"), (-0.3, "fails")):
        own = many("kappa_pos k20", "kappa_rank", [v + shift for v in (0.4, 0.5, 0.6)])
        assert verdict(claim("level", *of), *runs, *own) == expected
    near = many("kappa_pos k20", "kappa_rank", [0.51, 0.61, 0.71])
    assert verdict(claim("level", *of), *runs, *near) == "holds in part"


def test_the_best_inside_a_sweep_is_held_to_both_ends() -> None:
    rows = ("k5", "k10", "k20", "k40")
    of = tuple(f"kappa_pos {row} kappa_rank" for row in rows)
    for levels, expected in (
        ((0.1, 0.5, 0.3, 0.2), "holds"),
        ((0.5, 0.5, 0.3, 0.2), "holds in part"),
        ((0.6, 0.5, 0.3, 0.7), "fails"),
    ):
        runs = [
            run
            for row, level in zip(rows, levels, strict=True)
            for run in many(f"kappa_pos {row}", "kappa_rank", [level, level + 0.001])
        ]
        row = judge_claim(claim("inside", *of), Evidence(runs))
        assert row.verdict == expected
        assert row.effect.startswith("the best between is ahead of the ends by ")
