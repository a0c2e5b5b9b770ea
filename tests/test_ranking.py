"""Retrieval metrics against scikit-learn and plain loops, their ties, and 50,000 x
50,000 within the memory budget."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from pcl.metrics import (
    annotator_entropy,
    entropy_correlation,
    hits_at_k,
    nearest,
    r_auroc,
    recall_at_k,
    rejection_area,
    rejection_curve,
)


def rows(
    n: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.randn(
        n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("block", [1, 3000, 1 << 24])
def test_neighbours_are_scikit_learns(dtype: torch.dtype, k: int, block: int) -> None:
    queries, database = rows(70, 6, 0, dtype), rows(300, 6, 1, dtype)
    peer = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(
        database.double().numpy()
    )
    distance, index = peer.kneighbors(queries.double().numpy())
    found = nearest(queries, database, k, block=block)
    assert np.array_equal(found.indices.numpy(), index)
    assert found.cosines.numpy() == pytest.approx(1 - distance, abs=1e-12)


def test_neighbours_without_a_database_leave_out_the_query() -> None:
    x = rows(200, 5)
    peer = NearestNeighbors(n_neighbors=3, metric="cosine", algorithm="brute").fit(
        x.double().numpy()
    )
    assert np.array_equal(
        nearest(x, k=3).indices.numpy(), peer.kneighbors(return_distance=False)
    )
    same = nearest(x, x, 3, skip=torch.arange(200))
    assert torch.equal(same.indices, nearest(x, k=3).indices)
    assert torch.equal(
        nearest(x, x, skip=torch.full((200,), -1)).indices[:, 0], torch.arange(200)
    )
    assert torch.equal(nearest(x.numpy(), x.numpy()).indices[:, 0], torch.arange(200))


@pytest.mark.parametrize("scale", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("dim", [3, 64])
def test_a_collapsed_embedding_is_still_ranked_exactly(scale: float, dim: int) -> None:
    """All items closer to each other than single precision resolves."""
    x = torch.cat(
        [
            torch.ones(150, 1, dtype=torch.float64),
            scale * rows(150, dim - 1, 3, torch.float64),
        ],
        dim=1,
    )
    unit = torch.nn.functional.normalize(x, dim=-1)
    distance = torch.stack(
        [(unit - row).square().sum(-1) for row in unit]
    ).fill_diagonal_(math.inf)
    single = (unit.float() @ unit.float().T).fill_diagonal_(-1).argmax(1)
    assert torch.equal(nearest(x).indices[:, 0], distance.argmin(1))
    assert scale > 1e-4 or not torch.equal(
        single, distance.argmin(1)
    )  # what the second look is for


def test_equal_items_come_by_index_in_any_block() -> None:
    x = rows(7, 4)[torch.arange(300) % 7]
    expected = torch.stack(
        [
            torch.tensor([j for j in range(300) if j % 7 == i % 7 and j != i][:5])
            for i in range(300)
        ]
    )
    for block in (1, 1000, 1 << 24):
        assert torch.equal(nearest(x, k=5, block=block).indices, expected)


def test_length_does_not_matter() -> None:
    x = rows(100, 8)
    stretched = x * torch.logspace(-6, 6, 100)[:, None]
    assert torch.equal(nearest(stretched).indices, nearest(x).indices)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_recall_against_plain_loops(k: int) -> None:
    x, labels = rows(60, 3).double(), torch.arange(60) % 7
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
        (lambda: nearest(torch.ones(4)), ValueError, "queries must have shape"),
        (lambda: nearest(torch.ones(0, 4)), ValueError, "not be empty"),
        (
            lambda: nearest(torch.ones(4, 4, dtype=torch.long)),
            TypeError,
            "queries must hold floats",
        ),
        (
            lambda: nearest(torch.full((4, 4), nan)),
            ValueError,
            "queries has rows with NaN",
        ),
        (
            lambda: nearest(x, torch.full((4, 4), math.inf)),
            ValueError,
            "database has rows with NaN or infinite",
        ),
        (lambda: nearest(x, torch.zeros(4, 4)), ValueError, "length zero"),
        (lambda: nearest(x, torch.ones(4, 5)), ValueError, "share D"),
        (lambda: nearest(x, k=4), ValueError, "between 1 and the 3"),
        (lambda: nearest(x, x, k=5), ValueError, "between 1 and the 4"),
        (lambda: nearest(x, k=0), ValueError, "k must"),
        (lambda: nearest(x, block=0), ValueError, "block"),
        (lambda: nearest(x, skip=y), ValueError, "skip needs a database"),
        (
            lambda: nearest(x, x, skip=y + 1),
            ValueError,
            "skip must hold 4 integers from -1 to 3",
        ),
        (lambda: nearest(x[:1], x[:1], skip=torch.tensor([0])), ValueError, "k must"),
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


def test_fifty_thousand_against_themselves_within_two_gib() -> None:
    """2.5e9 cosines: the peak is that of one block, here measured above the interpreter
    with torch loaded."""
    code = """
import resource, torch
from pcl.metrics import recall_at_k
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
g = torch.Generator().manual_seed(0)
labels = torch.arange(50_000) % 10
x = torch.randn(50_000, 16, generator=g) + 3 * torch.randn(10, 16, generator=g)[labels]
before = peak()
print(recall_at_k(x, labels), peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    recall, gib = map(float, done.stdout.split())
    assert gib < 2 and 0.9 < recall <= 1
