"""Scores of whole lists and clusters, against loops and against other libraries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pcl.grouping import (
    cluster_diversity,
    clusters,
    map_at_k,
    map_at_r,
    mutual_information,
    nmi,
    spectrum_divergence,
)
from pcl.published.metrics import published_map_at_k


def scene(seed: int, n: int = 120, dim: int = 5) -> tuple[Tensor, Tensor]:
    """Groups of unequal size in which some queries have no companion."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(12, (n,), generator=generator)
    labels[:2] = torch.tensor([50, 51])
    centres = torch.randn(52, dim, generator=generator)
    return centres[labels] + 0.9 * torch.randn(n, dim, generator=generator), labels


def by_loops(z: Tensor, labels: Tensor, k: int | None, with_query: bool) -> float:
    """Mean average precision with explicit loops."""
    unit = torch.nn.functional.normalize(z.double(), dim=1)
    scores = []
    for i in range(len(z)):
        order = [int(j) for j in (-(unit @ unit[i])).argsort(stable=True) if j != i]
        companions = int((labels == labels[i]).sum()) - 1
        places = companions if k is None else k
        right, total = 0, 0.0
        for place, j in enumerate(order[:places], 1):
            if labels[j] == labels[i]:
                right += 1
                total += right / place
        if with_query:
            scores.append(total / (companions + 1))
        elif companions:
            scores.append(total / min(companions, places))
    return float(np.mean(scores))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [1, 7, 1000])
def test_precision_of_lists_is_that_of_plain_loops(seed: int, k: int) -> None:
    z, labels = scene(seed)
    assert map_at_k(z, labels, k) == pytest.approx(by_loops(z, labels, k, False))
    assert map_at_r(z, labels) == pytest.approx(by_loops(z, labels, None, False))
    found = published_map_at_k(z, labels, k)
    assert found == pytest.approx(by_loops(z, labels, k, True), abs=1e-6)


def test_agrees_with_pytorch_metric_learning() -> None:
    accuracy = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    inference = pytest.importorskip("pytorch_metric_learning.utils.inference")
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    z, labels = scene(3)
    knn = inference.CustomKNN(distances.CosineSimilarity())
    theirs = accuracy.AccuracyCalculator(
        include=("mean_average_precision_at_r",), k="max_bin_count", knn_func=knn
    ).get_accuracy(z, labels)
    assert map_at_r(z, labels) == pytest.approx(theirs["mean_average_precision_at_r"])


@pytest.mark.parametrize("seed", range(3))
def test_mutual_information_is_scikit_learns(seed: int) -> None:
    cluster = pytest.importorskip("sklearn.metrics.cluster")
    rng = np.random.default_rng(seed)
    left, right = rng.integers(6, size=90), rng.integers(-3, 3, size=90)
    right[:50] = left[:50]
    theirs = cluster.normalized_mutual_info_score(right, left)
    assert mutual_information(left, right) == pytest.approx(theirs)
    assert mutual_information(right, left) == pytest.approx(theirs), "symmetric"
    assert mutual_information(np.zeros(9), np.zeros(9)) == 1.0


def test_clusters_keep_the_tightest_start_and_their_seed() -> None:
    z = scene(4)[0].double().numpy()

    def width(centres: np.ndarray) -> float:
        gaps = np.square(z[:, None] - centres).sum(-1)
        return float(gaps.min(1).sum())

    assert np.array_equal(clusters(z, 8, 1), clusters(z, 8, 1))
    assert width(clusters(z, 8, 1, 10)) <= width(clusters(z, 8, 1, 1)) + 1e-9


def test_scores_see_directions_and_not_lengths() -> None:
    z, labels = scene(5)
    lengths = torch.rand(len(z), 1, generator=torch.Generator().manual_seed(0)) + 0.1
    for score in (map_at_k, map_at_r, nmi, cluster_diversity):
        assert score(z * lengths, labels) == pytest.approx(score(z, labels), rel=1e-5)
    assert spectrum_divergence(z * 7) == pytest.approx(spectrum_divergence(z))


def test_clear_groups_are_found() -> None:
    labels = torch.arange(80) % 8
    z = torch.eye(8)[labels] + 0.01 * torch.randn(
        80, 8, generator=torch.Generator().manual_seed(0)
    )
    assert nmi(z, labels) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: map_at_k(*scene(0), k=0), ValueError, "k must be at least 1"),
        (lambda: map_at_r(torch.eye(3), torch.arange(3)), ValueError, "two items"),
        (lambda: map_at_r(torch.eye(3), torch.ones(3)), TypeError, "whole numbers"),
        (lambda: nmi(torch.eye(3), torch.ones(2).long()), ValueError, "shape"),
        (
            lambda: cluster_diversity(torch.eye(4), torch.arange(4) // 2),
            ValueError,
            "three items",
        ),
        (
            lambda: spectrum_divergence(torch.full((3, 2), torch.nan)),
            ValueError,
            "embeddings",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()
