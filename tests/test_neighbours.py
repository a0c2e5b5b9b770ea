"""Neighbours against scikit-learn, ties and crowds, and 50,000 x 50,000 within the
memory budget."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from pcl.neighbours import as_embeddings, cosine_gaps, nearest, unit_rows


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


@pytest.mark.parametrize("n", [1024, 1280, 1290, 1500])
@pytest.mark.parametrize("kind", ["spread", "copies", "collapsed"])
def test_groups_of_items_give_the_answers_of_shortlists(n: int, kind: str) -> None:
    """Large searches look at groups first; a small block takes the other way."""
    x = rows(n, 12)
    if kind == "copies":
        x[300:600] = x[torch.arange(300) % 5]
        x[-3:] = x[:3]
    elif kind == "collapsed":
        x = torch.cat([torch.ones(n, 1), 1e-4 * x], 1)
    skip = torch.arange(n).roll(7)
    skip[::3] = -1
    cases = [
        ((x,), {}),
        ((x, x), {}),
        ((x, rows(n + 70, x.shape[1], 5)), {}),
        ((x, x), {"skip": skip}),
    ]
    for args, more in cases:
        fast = nearest(*args, **more)  # type: ignore[arg-type]
        slow = nearest(*args, **more, block=1 << 17)  # type: ignore[arg-type]
        assert torch.equal(fast.indices, slow.indices)
        assert torch.equal(fast.cosines, slow.cosines)


def test_groups_with_several_neighbours() -> None:
    x, base = rows(400, 9), rows(5200, 9, 2)
    base[4000:4100] = base[:100]  # ties across groups
    found, plain = nearest(x, base, 5), nearest(x, base, 5, block=1 << 17)
    assert torch.equal(found.indices, plain.indices)
    assert torch.equal(found.cosines, plain.cosines)


def test_length_does_not_matter() -> None:
    x = rows(100, 8)
    stretched = x * torch.logspace(-6, 6, 100)[:, None]
    assert torch.equal(nearest(stretched).indices, nearest(x).indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_unit_rows_have_length_one_in_the_precision_asked_for(
    dtype: torch.dtype,
) -> None:
    x = rows(50, 7, dtype=dtype)
    unit = unit_rows(x, torch.float64)
    assert unit.dtype == torch.float64
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(50).double())
    torch.testing.assert_close(unit * x.double().norm(dim=-1, keepdim=True), x.double())


def test_gaps_keep_the_digits_that_cosines_lose() -> None:
    turn = torch.logspace(-8, 0, 20, dtype=torch.float64)
    items = torch.stack([turn.cos(), turn.sin()], dim=-1)
    query = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    gaps = cosine_gaps(3 * query, 5 * items[None])[0]
    torch.testing.assert_close(gaps, 2 * (turn / 2).sin() ** 2, rtol=1e-7, atol=0)
    assert cosine_gaps(query, query[None]).item() == 0


def test_embeddings_come_back_as_they_are_without_a_gradient() -> None:
    x = rows(5, 3).requires_grad_()
    checked = as_embeddings("x", x)
    assert torch.equal(checked, x) and not checked.requires_grad
    assert torch.equal(as_embeddings("x", x.detach().numpy()), x)


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
from pcl.neighbours import nearest
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
g = torch.Generator().manual_seed(0)
labels = torch.arange(50_000) % 10
x = torch.randn(50_000, 16, generator=g) + 3 * torch.randn(10, 16, generator=g)[labels]
before = peak()
found = nearest(x).indices[:, 0]
print((labels[found] == labels).double().mean().item(), peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    same, gib = map(float, done.stdout.split())
    assert gib < 2 and 0.9 < same <= 1
