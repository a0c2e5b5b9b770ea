"""All-pairs rank correlation against scipy; Recall@1 against scikit-learn and faiss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.timing import Bars, Row, installed, interleaved, show
from pcl.metrics import pair_cosines, recall_at_k, spearman


def spearman_rows(points: int, rounds: int) -> list[Row]:
    """Spearman's correlation of the cosines of all pairs, in two embeddings of the same
    points."""
    g = torch.Generator().manual_seed(0)
    mu = torch.nn.functional.normalize(torch.randn(points, 10, generator=g), dim=-1)
    noisy = torch.nn.functional.normalize(
        mu + 0.2 * torch.randn(points, 10, generator=g), dim=-1
    )
    a, b = pair_cosines(mu), pair_cosines(noisy)
    assert abs(spearman(a, b) - spearmanr(a, b).statistic) < 1e-9
    times = interleaved(
        {"ours": lambda: spearman(a, b), "scipy": lambda: spearmanr(a, b).statistic},
        rounds,
    )
    name = f"spearman, {len(a):,} pairs of {points:,} points, float32"
    return Bars(
        "spearman",
        name,
        "All-pairs Spearman",
        {"scipy": ("scipy.stats.spearmanr", 1.0)},
    ).rows(times)


def recall_rows(items: int, dim: int, rounds: int) -> list[Row]:
    """Recall@1 of a labelled set, each item searched among all others."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (items,), generator=g)
    points = torch.randn(10, dim, generator=g)[labels] + 3 * torch.randn(
        items, dim, generator=g
    )
    unit, classes = (
        torch.nn.functional.normalize(points, dim=-1).numpy(),
        labels.numpy(),
    )
    calls: dict[str, Callable[[], float]] = {
        "ours": lambda: recall_at_k(points, labels)
    }
    neighbours: Any = installed("sklearn.neighbors")
    faiss: Any = installed("faiss")

    def hits(
        found: np.ndarray,
    ) -> float:  # the first column that is not the query itself
        own = np.arange(items)
        return float(
            (
                classes[np.where(found[:, 0] == own, found[:, 1], found[:, 0])]
                == classes
            ).mean()
        )

    def by_sklearn() -> float:
        index = neighbours.NearestNeighbors(
            n_neighbors=2, metric="cosine", algorithm="brute"
        ).fit(points.numpy())
        return hits(index.kneighbors(points.numpy(), return_distance=False))

    def by_faiss() -> float:
        index = faiss.IndexFlatIP(dim)
        index.add(unit)
        return hits(index.search(unit, 2)[1])

    if neighbours:
        calls["sklearn"] = by_sklearn
    if faiss:
        calls["faiss"] = by_faiss
    found = {name: call() for name, call in calls.items()}
    assert max(found.values()) - min(found.values()) < 1e-3, (
        f"the engines disagree: {found}"
    )
    peers = {
        "sklearn": ("scikit-learn NearestNeighbors, brute force", 1.0),
        "faiss": ("faiss IndexFlatIP", 1.0),
    }
    return Bars(
        "recall", f"recall_at_k, k=1, {items:,} items, D={dim}", "Recall@1", peers
    ).rows(interleaved(calls, rounds))


def rows(quick: bool = False) -> list[Row]:
    """Both metrics."""
    if quick:
        return spearman_rows(100, 2) + recall_rows(200, 16, 2)
    return spearman_rows(3_000, 5) + recall_rows(5_000, 128, 11)


if __name__ == "__main__":
    show(rows())
