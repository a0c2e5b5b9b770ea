"""Retrieval metrics against scikit-learn and plain loops, and their ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import roc_auc_score

from pcl.metrics import (
    annotator_entropy,
    entropy_correlation,
    hits_at_k,
    r_auroc,
    recall_at_k,
    rejection_area,
    rejection_curve,
)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_recall_against_plain_loops(k: int) -> None:
    g = torch.Generator().manual_seed(0)
    x, labels = torch.randn(60, 3, generator=g).double(), torch.arange(60) % 7
    unit = torch.nn.functional.normalize(x, dim=-1)
    plain = []
    for i in range(60):
        order = sorted(
            (j for j in range(60) if j != i), key=lambda j: -float(unit[i] @ unit[j])
        )
        plain.append(any(labels[j] == labels[i] for j in order[:k]))
    assert hits_at_k(x, labels, k).tolist() == plain
    assert recall_at_k(x, labels, k) == pytest.approx(sum(plain) / 60)
    split = recall_at_k(x[:20], labels[:20], k, x[20:], labels[20:])
    assert (
        split
        == hits_at_k(x[:20].numpy(), labels[:20].numpy(), k, x[20:], labels[20:])
        .double()
        .mean()
    )


outcomes = hnp.arrays(bool, 40)


@settings(deadline=None, max_examples=80)
@given(hnp.arrays(np.float64, 40, elements=st.integers(-4, 4).map(float)), outcomes)
def test_r_auroc_is_scikit_learns(certainty: np.ndarray, correct: np.ndarray) -> None:
    if correct.all() or not correct.any():
        with pytest.raises(ValueError, match="right and wrong"):
            r_auroc(certainty, correct)
        return
    assert r_auroc(certainty, correct) == pytest.approx(
        roc_auc_score(correct, certainty), abs=1e-12
    )
    thesis = roc_auc_score(
        ~correct, -certainty
    )  # written with an uncertainty and the wrong answers
    assert r_auroc(
        torch.from_numpy(certainty), torch.from_numpy(correct)
    ) == pytest.approx(thesis, abs=1e-12)


def test_r_auroc_at_a_million_stays_exact() -> None:
    certainty = np.arange(1_000_000, dtype=np.float32)
    assert r_auroc(certainty, certainty >= 500_000) == 1.0
    assert (
        r_auroc(
            np.concatenate([[np.inf], certainty]),
            np.concatenate([[True], np.zeros(1_000_000, bool)]),
        )
        == 1.0
    )


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(np.float64, 30, elements=st.floats(-1, 1), unique=True),
    hnp.arrays(bool, 30),
)
def test_rejection_against_plain_loops(
    certainty: np.ndarray, correct: np.ndarray
) -> None:
    order = sorted(range(30), key=lambda i: -certainty[i])
    share = [0.0, 0.1, 0.5, 0.8, 29 / 30]
    plain = [np.mean([correct[i] for i in order[: 30 - round(30 * s)]]) for s in share]
    assert rejection_curve(certainty, correct, share) == pytest.approx(plain)
    area = np.mean([np.mean([not correct[i] for i in order[:m]]) for m in range(1, 31)])
    assert rejection_area(certainty, correct) == pytest.approx(area)


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(np.float64, 24, elements=st.integers(0, 3).map(float)),
    hnp.arrays(bool, 24),
    st.randoms(),
)
def test_ties_do_not_depend_on_the_order_of_the_file(
    certainty: np.ndarray, correct: np.ndarray, random
) -> None:
    shuffle = random.sample(range(24), 24)
    assert rejection_area(certainty, correct) == pytest.approx(
        rejection_area(certainty[shuffle], correct[shuffle])
    )
    one, other = (
        rejection_curve(certainty, correct),
        rejection_curve(certainty[shuffle], correct[shuffle]),
    )
    assert one == pytest.approx(other)
    assert rejection_curve(np.zeros(24), correct) == pytest.approx(correct.mean())


def test_infinite_certainty_counts_as_the_highest() -> None:
    certainty, correct = np.array([np.inf, 2.0, np.inf, 1.0]), np.array([1, 0, 1, 0])
    assert rejection_curve(certainty, correct, [0.0, 0.25, 0.5]) == pytest.approx(
        [0.5, 2 / 3, 1.0]
    )
    assert r_auroc(certainty, correct) == 1.0


def test_annotator_entropy_is_scipys_and_blind_to_the_order() -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(50, [0.8, 0.1, 0.05, 0.05, 0, 0, 0, 0, 0, 0], size=500)
    probs = counts / 50
    assert annotator_entropy(probs).numpy() == pytest.approx(
        scipy.stats.entropy(probs, axis=-1), abs=1e-12
    )
    assert torch.equal(
        annotator_entropy(rng.permuted(probs, axis=1)), annotator_entropy(probs)
    )
    assert annotator_entropy(torch.eye(3, dtype=torch.float32)).tolist() == [0, 0, 0]


def test_entropy_correlation_is_positive_when_good() -> None:
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.full(10, 0.3), size=300)
    certainty = rng.normal(size=300) - scipy.stats.entropy(probs, axis=-1)
    expected = scipy.stats.spearmanr(
        certainty, -scipy.stats.entropy(probs, axis=-1)
    ).statistic
    assert (
        entropy_correlation(certainty, probs) == pytest.approx(expected, abs=1e-12)
        and expected > 0.2
    )
    assert math.isnan(entropy_correlation(np.ones(300), probs))


nan = float("nan")
x = torch.eye(4)
y = torch.arange(4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: recall_at_k(x, y[:3]), ValueError, "labels must have shape"),
        (lambda: recall_at_k(x, y.float()), TypeError, "labels must be whole numbers"),
        (lambda: recall_at_k(x, y, 1, x), ValueError, "database and database_labels"),
        (
            lambda: recall_at_k(x, y, 1, x, y[:3]),
            ValueError,
            "database_labels must have shape",
        ),
        (lambda: r_auroc(torch.ones(4), torch.ones(4)), ValueError, "right and wrong"),
        (
            lambda: r_auroc(torch.ones(4), torch.full((4,), 0.5)),
            ValueError,
            "zeros and ones",
        ),
        (lambda: r_auroc(torch.ones(4), torch.ones(5)), ValueError, "as many entries"),
        (
            lambda: r_auroc(torch.tensor([1.0, nan]), torch.tensor([0, 1])),
            ValueError,
            "certainty has NaN",
        ),
        (
            lambda: r_auroc(torch.tensor([1, 2]), torch.tensor([0, 1])),
            TypeError,
            "certainty must hold floats",
        ),
        (
            lambda: rejection_area(torch.ones(0), torch.ones(0)),
            ValueError,
            "at least one",
        ),
        (
            lambda: rejection_curve(torch.ones(4), torch.ones(4), [1.0]),
            ValueError,
            "somebody",
        ),
        (
            lambda: rejection_curve(torch.ones(4), torch.ones(4), [-0.1]),
            ValueError,
            "fractions",
        ),
        (
            lambda: rejection_curve(torch.ones(4), torch.ones(4), [0.99]),
            ValueError,
            "leaves none",
        ),
        (
            lambda: annotator_entropy(torch.tensor([[25, 25]])),
            TypeError,
            "divide counts",
        ),
        (
            lambda: annotator_entropy(torch.tensor([[25.0, 25.0]])),
            ValueError,
            "add up to 1",
        ),
        (lambda: annotator_entropy(torch.tensor([[nan, 1.0]])), ValueError, "NaN"),
        (
            lambda: annotator_entropy(torch.tensor([[-0.5, 1.5]])),
            ValueError,
            "negative",
        ),
        (lambda: annotator_entropy(torch.ones(3, 1)), ValueError, "two classes"),
        (
            lambda: entropy_correlation(torch.ones(3), torch.full((4, 2), 0.5)),
            ValueError,
            "one row for each",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()
