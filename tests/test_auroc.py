"""AUROC with errors: values and errors against loops and scikit-learn, properties, faults."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import tukey_hsd
from sklearn.metrics import roc_auc_score

from pcl.auroc import (
    alignment,
    auroc,
    auroc_draws,
    auroc_gap,
    crop_share,
    excess_area,
    mixed_auroc,
    ood_auroc,
    rank_intervals,
    url_score,
)
from pcl.metrics import entropy_correlation, r_auroc, rejection_area

few = settings(max_examples=60, deadline=None)
LEVELS = st.integers(-3, 3)  # few of them, so that there are ties


def loops(score: list[float], right: list[bool]) -> tuple[float, float]:
    """Value and DeLong's error, pair by pair."""
    up = [s for s, r in zip(score, right, strict=True) if r]
    down = [s for s, r in zip(score, right, strict=True) if not r]

    def wins(a: float, b: float) -> float:
        return 1.0 if a > b else 0.5 if a == b else 0.0

    table = [[wins(a, b) for b in down] for a in up]
    rows = [sum(line) / len(down) for line in table]
    columns = [sum(column) / len(up) for column in zip(*table, strict=True)]
    value = sum(rows) / len(up)
    variance = 0.0
    for placed in (rows, columns):
        n = len(placed)
        variance += sum((v - value) ** 2 for v in placed) / (n - 1) / n
    return value, math.sqrt(variance)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[float], list[bool]]:
    """Certainties with ties, and outcomes with at least two of each kind."""
    right = [True, True, False, False, *draw(st.lists(st.booleans(), max_size=20))]
    score = draw(st.lists(LEVELS, min_size=len(right), max_size=len(right)))
    return [float(s) for s in score], right


@few
@given(answers())
def test_delong_is_its_definition_pair_by_pair(case: tuple) -> None:
    score, right = case
    found = auroc(np.array(score), np.array(right))
    value, error = loops(score, right)
    assert math.isclose(found.value, value, abs_tol=1e-12)
    assert math.isclose(found.error, error, abs_tol=1e-12)
    assert math.isclose(found.value, roc_auc_score(right, score), abs_tol=1e-12)
    assert (found.n_right, found.n_wrong) == (sum(right), len(right) - sum(right))


@few
@given(answers(), st.sampled_from([1e-9, 1.0, 1e4]), st.sampled_from([0.0, 1e4]))
def test_neither_unit_nor_offset_nor_file_order_matter(
    case: tuple, unit: float, offset: float
) -> None:
    score, right = np.array(case[0]), np.array(case[1])
    plain = auroc(score, right)
    assert auroc(unit * score, right) == plain
    assert auroc(offset + score, right) == plain
    back = auroc(score[::-1].copy(), right[::-1].copy())
    assert math.isclose(back.value, plain.value) and math.isclose(
        back.error, plain.error, abs_tol=1e-12
    )
    turned = auroc(-score, right)
    assert math.isclose(turned.value, 1 - plain.value, abs_tol=1e-12)
    assert math.isclose(turned.error, plain.error, abs_tol=1e-12)


@few
@given(answers(), st.randoms(use_true_random=False))
def test_clusters_of_one_are_delong_but_for_one_observation(
    case: tuple, random: object
) -> None:
    score, right = np.array(case[0]), np.array(case[1])
    n, m, k = right.sum(), (~right).sum(), len(right)
    alone = auroc(score, right, np.arange(k)).error
    value, _ = loops(*case)
    up, down = score[right][:, None], score[~right]
    table = (up > down) + (up == down) / 2
    parts = ((table.mean(1) - value) ** 2).sum() / n**2
    parts += ((table.mean(0) - value) ** 2).sum() / m**2
    assert math.isclose(alone, math.sqrt(parts * k / (k - 1)), abs_tol=1e-12)


def world(seed: int, n_classes: int = 20, size: int = 30) -> tuple:
    rng = np.random.default_rng(seed)
    classes = np.repeat(np.arange(n_classes), size)
    hard, bold = rng.standard_normal((2, n_classes))
    seen = rng.standard_normal(len(classes))
    certainty = seen + bold[classes] + rng.standard_normal(len(classes))
    return certainty, seen + hard[classes] + rng.logistic(size=len(seen)) > 0, classes


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_errors_are_those_of_two_thousand_bootstrap_draws(seed: int) -> None:
    certainty, correct, classes = world(seed)
    rng = np.random.default_rng(seed)
    other = certainty + rng.standard_normal(len(certainty))
    for by in (None, classes):
        draws = [auroc_draws(c, correct, by) for c in (certainty, other)]
        assert abs(auroc(certainty, correct, by).error / draws[0].std() - 1) < 0.1
        gap = auroc_gap(certainty, other, correct, by)
        assert abs(gap.error / (draws[0] - draws[1]).std() - 1) < 0.1
        assert math.isclose(
            gap.value, r_auroc(certainty, correct) - r_auroc(other, correct)
        )


def test_a_draw_is_the_auroc_of_what_was_drawn() -> None:
    certainty, correct, classes = world(3, 6, 10)
    certainty = certainty.round()  # ties
    found = auroc_draws(certainty, correct, classes, n_draws=25, seed=4)
    rng = np.random.default_rng(4)
    rows = [np.flatnonzero(classes == k) for k in range(6)]
    for value, drawn in zip(found, rng.integers(6, size=(25, 6)), strict=True):
        chosen = np.concatenate([rows[k] for k in drawn])
        assert math.isclose(value, r_auroc(certainty[chosen], correct[chosen]))
    again = auroc_draws(certainty, correct, classes, n_draws=25, seed=4)
    assert np.array_equal(found, again)
    assert not np.array_equal(found, auroc_draws(certainty, correct, classes, 25, 5))


def test_a_draw_without_wrong_answers_has_no_auroc() -> None:
    correct = np.array([True, True, False, False])
    draws = auroc_draws(np.arange(4.0), correct, [0, 0, 1, 1], n_draws=200)
    assert np.isnan(draws).any() and np.isfinite(draws).any()


@few
@given(answers())
def test_a_gap_is_antisymmetric_and_zero_with_itself(case: tuple) -> None:
    score, right = np.array(case[0]), np.array(case[1])
    other = np.random.default_rng(0).standard_normal(len(score))
    there, back = auroc_gap(score, other, right), auroc_gap(other, score, right)
    assert there.value == -back.value and math.isclose(there.error, back.error)
    assert auroc_gap(score, 3 * score + 1, right) == (0.0, 0.0)


def test_a_gap_s_error_has_delong_s_covariance() -> None:
    certainty, correct, _ = world(5)
    other = -certainty + np.random.default_rng(1).standard_normal(len(certainty))

    def tables(score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        above = score[correct][:, None] > score[~correct]
        return above.mean(1), above.mean(0)

    (v1, w1), (v2, w2) = tables(certainty), tables(other)
    variance = np.var(v1 - v2, ddof=1) / len(v1) + np.var(w1 - w2, ddof=1) / len(w1)
    found = auroc_gap(certainty, other, correct).error
    assert math.isclose(found, math.sqrt(variance), rel_tol=1e-9)


# ------------------------------------------------------------------------------------
# the other questions


@few
@given(answers())
def test_excess_area_is_none_for_the_best_order(case: tuple) -> None:
    score, right = np.array(case[0]), np.array(case[1])
    assert excess_area(right.astype(float), right) == 0
    best = rejection_area(right.astype(float), right)
    assert math.isclose(
        excess_area(score, right), rejection_area(score, right) - best, abs_tol=1e-12
    )
    assert excess_area(score, torch.from_numpy(right)) >= -1e-12


def test_crops_are_counted_with_ties_as_half() -> None:
    whole, part = np.array([3.0, 2.0, 1.0, 1.0]), np.array([1.0, 2.0, 5.0, 0.0])
    found = crop_share(whole, part)
    assert found.value == 0.625
    assert math.isclose(found.error, np.std([1, 0.5, 0, 1], ddof=1) / 2)
    doubled = crop_share(np.tile(whole, 2), np.tile(part, 2), np.tile([0, 1, 2, 3], 2))
    assert math.isclose(doubled.error, found.error)  # copies are no new images


@few
@given(st.lists(LEVELS, min_size=2, max_size=9), st.lists(LEVELS, min_size=2))
def test_ood_counts_pairs(inside: list[int], outside: list[int]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, b in product(inside, outside)]
    found = ood_auroc(np.array(inside, float), np.array(outside, float))
    assert math.isclose(found.value, sum(pairs) / len(pairs), abs_tol=1e-12)
    assert (found.n_right, found.n_wrong) == (len(inside), len(outside))


@few
@given(answers(), answers())
def test_mixed_is_every_pair_with_its_weight(one: tuple, two: tuple) -> None:
    items = [
        (s, r, 0.5 / len(c[0])) for c in (one, two) for s, r in zip(*c, strict=True)
    ]
    up, down = ([x for x in items if x[1] == kind] for kind in (True, False))
    pairs = [
        (a[2] * b[2], (a[0] > b[0]) + (a[0] == b[0]) / 2) for a in up for b in down
    ]
    value = sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)
    found = mixed_auroc(*(np.array(part) for part in (*one, *two)))
    assert math.isclose(found.value, value, abs_tol=1e-12) and found.error >= 0
    same = mixed_auroc(*(np.array(part) for part in (*one, *one)))
    assert math.isclose(same.value, loops(*one)[0], abs_tol=1e-12)


def test_alignment_has_the_value_and_the_spread_of_resampling() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(4, 0.5), 300)
    certainty = probs.max(1).round(1)  # ties
    found = alignment(certainty, probs)
    assert found.value == entropy_correlation(certainty, probs)
    plain = []
    for _ in range(300):
        rows = rng.integers(300, size=300)
        plain.append(entropy_correlation(certainty[rows], probs[rows]))
    assert abs(found.error / np.std(plain) - 1) < 0.2
    blocks = alignment(certainty, probs, np.arange(300) // 30)
    assert blocks.value == found.value and blocks.error != found.error
    assert math.isnan(alignment(np.ones(300), probs).value)


def test_the_url_score_is_made_of_its_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    embeddings = torch.randn(10, 4, generator=generator)[labels]
    embeddings += 0.8 * torch.randn(200, 4, generator=generator)
    certainty = torch.rand(200, generator=generator)
    found = url_score(embeddings, certainty, labels)
    unit = embeddings / embeddings.norm(dim=1, keepdim=True)
    hits = labels[(unit @ unit.T).fill_diagonal_(-2).argmax(1)] == labels
    assert math.isclose(found.recall_at_1, hits.double().mean().item())
    assert found.r_auroc == auroc(certainty, hits, labels)


def test_ranks_swap_unless_tukey_is_sure() -> None:
    rng = np.random.default_rng(2)
    runs = {f"m{i}": rng.normal(i / 100, 0.01, 3) for i in range(6)}
    table = tukey_hsd(*runs.values())
    low = table.confidence_interval(0.95).low  # of row minus column
    found = rank_intervals(runs)
    for i, name in enumerate(runs):
        above = sum(low[j, i] > 0 for j in range(6))
        below = sum(low[i, j] > 0 for j in range(6))
        assert (found[name].best, found[name].worst) == (1 + above, 6 - below)
    means = [one.mean for one in found.values()]
    assert means == sorted(means, reverse=True)
    wider = rank_intervals(runs, 0.999)
    assert all(
        wider[n].best <= found[n].best and wider[n].worst >= found[n].worst
        for n in runs
    )
    twin = rank_intervals({"a": [1.0, 1.01], "b": [1.0, 1.01], "c": [9.0]})
    assert twin["a"][1:] == twin["b"][1:] == (2, 3) and twin["c"][1:] == (1, 1)


# ------------------------------------------------------------------------------------
# faults

RIGHT = np.array([True, True, False, False])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc(np.arange(4.0), RIGHT[:3]), "as many entries"),
        (lambda: auroc(np.arange(4.0), RIGHT * 2), "booleans"),
        (lambda: auroc(np.arange(3.0), RIGHT[:3]), "two right and two wrong"),
        (lambda: auroc(np.arange(4.0), np.ones(4)), "right and wrong answers"),
        (lambda: auroc(np.array([0, 1, 2, np.nan]), RIGHT), "NaN"),
        (lambda: auroc(np.arange(4.0), RIGHT, np.zeros(4, int)), "at least two"),
        (lambda: auroc(np.arange(4.0), RIGHT, np.arange(3)), "shape"),
        (lambda: auroc_draws(np.arange(4.0), RIGHT, n_draws=1), "n_draws"),
        (lambda: crop_share(np.ones(3), np.ones(4)), "same images"),
        (lambda: rank_intervals({"a": [1.0, 2.0]}), "two names"),
        (lambda: rank_intervals({"a": [1.0], "b": [2.0]}), "one of them with two"),
        (lambda: rank_intervals({"a": [], "b": [2.0, 3.0]}), "each with a seed"),
        (lambda: rank_intervals({"a": [1.0, 2.0], "b": [1.0]}, 95), "level"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("wrong", [np.arange(4), np.array(["a", "b", "c", "d"])])
def test_certainties_are_floats(wrong: np.ndarray) -> None:
    with pytest.raises(TypeError, match="floats"):
        auroc(wrong, RIGHT)


def test_clusters_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match="whole numbers"):
        auroc(np.arange(4.0), RIGHT, np.array([0.5, 1, 1, 2]))
