"""Credible sets against their definition, torch against faiss, calibration within
binomial error, safe retrieval."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from pcl.generative import UniformProcess
from pcl.metrics import hits_at_k, recall_at_k, rejection_curve
from pcl.retrieval import (
    CredibleRetriever,
    CredibleSets,
    SafeRetrieval,
    coverage,
    keep_certain,
    safe_retrieval,
)
from pcl.vmf import VonMisesFisher


def sphere(
    n: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(n, dim, generator=g, dtype=torch.float64), dim=-1).to(
        dtype
    )


def queries(
    n: int,
    dim: int,
    low: float = 0.5,
    high: float = 500.0,
    dtype: torch.dtype = torch.float64,
) -> VonMisesFisher:
    kappa = torch.logspace(
        math.log10(low), math.log10(high), n, dtype=torch.float64
    ).to(dtype)
    return VonMisesFisher(sphere(n, dim, 9, dtype), kappa)


def same(a: CredibleSets, b: CredibleSets) -> bool:
    return all(
        torch.equal(getattr(a, x), getattr(b, x))
        for x in ("threshold", "count", "indices", "cosines")
    )


@pytest.mark.parametrize("backend", ["torch", "faiss", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sets_are_the_definition(backend: str, dtype: torch.dtype) -> None:
    database, q = sphere(400, 5, dtype=dtype), queries(12, 5, dtype=dtype)
    labels = torch.arange(400) % 6 - 3  # any whole numbers
    sets = CredibleRetriever(database, labels, backend).query(q, 0.8)
    start = 0
    for i, found in enumerate(sets.split()):
        t = VonMisesFisher(
            q.loc[i].double(), q.concentration[i].double(), validate_args=False
        ).credible_cosine(0.8)
        cosine = normalize(database.double(), dim=-1) @ normalize(
            q.loc[i].double(), dim=-1
        )
        inside = [j for j in range(400) if cosine[j] >= t]
        assert sorted(found.tolist()) == inside and int(sets.count[i]) == len(inside)
        ours = sets.cosines[start : start + len(found)]
        torch.testing.assert_close(ours, cosine[found], rtol=0, atol=1e-12)
        assert bool((ours.diff() <= 0).all())  # nearest first
        start += len(found)
        shares = np.unique(labels[inside], return_counts=True)[1] / max(1, len(inside))
        assert int(sets.n_classes[i]) == len(shares)
        expected = (
            float("nan") if not inside else float(-(shares * np.log(shares)).sum())
        )
        assert float(sets.entropy[i]) == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert start == len(sets.indices)


@pytest.mark.parametrize("dim", [2, 8, 300])
def test_torch_and_faiss_agree_at_the_rim(dim: int) -> None:
    """Items within 1e-12 to 1e-6 of the rim, on both sides: closer than single
    precision resolves."""
    q = queries(60, dim, 5.0, 50.0 * dim)
    t = q.credible_cosine(0.95)
    offset = torch.logspace(-12, -6, 60, dtype=torch.float64) * torch.tensor(
        [1.0, -1.0]
    ).repeat(30)
    tangent = sphere(60, dim, 5)
    tangent = normalize(
        tangent - (tangent * q.loc).sum(-1, keepdim=True) * q.loc, dim=-1
    )
    cosine = (t + offset).clamp(-1, 1)
    rim = cosine[:, None] * q.loc + (1 - cosine**2).sqrt()[:, None] * tangent
    database = torch.cat([sphere(500, dim, 3), rim])
    by_torch, by_faiss = (
        CredibleRetriever(database, backend=b).query(q, 0.95)
        for b in ("torch", "faiss")
    )
    assert same(by_torch, by_faiss)
    member = [500 + i in found.tolist() for i, found in enumerate(by_torch.split())]
    assert member == (offset > 0).tolist()


def test_blocks_and_copies_do_not_change_the_answer() -> None:
    database = sphere(40, 4)[torch.arange(200) % 40]
    q = queries(30, 4)
    whole = CredibleRetriever(database).query(q)
    for backend in ("torch", "faiss"):
        for block in (1, 1000):
            assert same(
                whole,
                CredibleRetriever(database, backend=backend, block=block).query(q),
            )
    first = whole.split()[0]
    assert first[:5].tolist() == sorted(first[:5].tolist())  # copies by index


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_limits_of_kappa_and_level(backend: str) -> None:
    database = torch.cat([sphere(50, 3), -sphere(50, 3)])
    retriever = CredibleRetriever(VonMisesFisher(database, 3.0), backend=backend)
    assert len(retriever) == 100
    point = retriever.query(VonMisesFisher(database[7], math.inf), 0.95)
    assert (
        point.indices.tolist() == [7]
        and point.count.shape == ()
        and int(point.count) == 1
    )
    assert point.n_classes is None and point.entropy is None
    assert (
        int(retriever.query(VonMisesFisher(database[7], 5.0), 1.0).count) == 100
    )  # the antipode too
    uniform = retriever.query(VonMisesFisher(database[7], 0.0), 0.5)
    assert float(uniform.threshold) == pytest.approx(0.0, abs=1e-9)  # a hemisphere
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    each = retriever.query(VonMisesFisher(database[:3], 5.0), levels)
    for i in range(3):
        assert (
            each.split()[i].tolist()
            == retriever.query(
                VonMisesFisher(database[i], 5.0), float(levels[i])
            ).indices.tolist()
        )


@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_a_clear_query_far_from_everything_finds_nothing(backend: str) -> None:
    retriever = CredibleRetriever(sphere(20, 3), torch.arange(20), backend)
    sets = retriever.query(VonMisesFisher(-sphere(20, 3)[:2], 1e9))
    assert (
        sets.count.tolist() == [0, 0]
        and sets.n_classes.tolist() == [0, 0]
        and bool(sets.entropy.isnan().all())
    )
    assert [len(found) for found in sets.split()] == [0, 0]


def test_sets_grow_with_level_and_ambiguity() -> None:
    retriever, loc = CredibleRetriever(sphere(2000, 6)), sphere(1, 6, 4)[0]
    by_level = [
        set(retriever.query(VonMisesFisher(loc, 20.0), p).indices.tolist())
        for p in (0.1, 0.5, 0.9, 0.99)
    ]
    assert all(a <= b for a, b in pairwise(by_level)) and by_level[0] < by_level[-1]
    counts = retriever.query(
        VonMisesFisher(loc.expand(5, 6), torch.tensor([1.0, 3, 10, 30, 100]).double())
    ).count
    assert bool((counts.diff() <= 0).all()) and counts[0] > counts[-1]


def test_without_faiss_auto_takes_torch_and_faiss_says_what_is_missing(
    monkeypatch,
) -> None:
    monkeypatch.setattr("pcl.retrieval.find_spec", lambda name: None)
    assert CredibleRetriever(sphere(5, 3), backend="auto").backend == "torch"
    with pytest.raises(ImportError, match="faiss-cpu"):
        CredibleRetriever(sphere(5, 3), backend="faiss")


def observed(
    process: UniformProcess, n: int, seed: int
) -> tuple[torch.Tensor, VonMisesFisher]:
    g = torch.Generator().manual_seed(seed)
    z = process.base.sample((n,), generator=g)
    kappa = torch.empty(n).uniform_(*process.log_range, generator=g).exp()
    return z, process.posterior(
        process.observe(VonMisesFisher(z, kappa).sample(generator=g), kappa)
    )


levels = torch.tensor(
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99], dtype=torch.float64
)


@pytest.mark.parametrize(
    ("dim", "low", "high"),
    [(2, 1.0, 30.0), (3, 16.0, 32.0), (10, 16.0, 32.0), (64, 100.0, 200.0)],
)
def test_caps_hold_the_latent_as_often_as_they_say(
    dim: int, low: float, high: float
) -> None:
    n = 6000
    z, q = observed(UniformProcess(dim, (low, high)), n, seed=dim)
    error = (levels * (1 - levels) / n).sqrt()
    assert bool(((coverage(q, z, levels) - levels).abs() < 4 * error).all())
    for factor, sign in ((2.0, -1), (0.5, 1)):
        wrong = coverage(VonMisesFisher(q.loc, factor * q.concentration), z, levels)
        assert bool((sign * (wrong - levels) > 4 * error).all())


def test_coverage_is_membership_in_the_cap() -> None:
    q, z = queries(200, 4, 1, 50), sphere(200, 4, 2)
    plain = [
        ((q.loc * z).sum(-1) >= q.credible_cosine(float(p))).double().mean().item()
        for p in levels
    ]
    assert coverage(q, z, levels).tolist() == pytest.approx(plain)
    assert coverage(q, z, [0.0, 1.0]).tolist() == [0.0, 1.0]


def world(n: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 8
    kappa = torch.empty(n).uniform_(1, 4, generator=g).exp()
    return (
        VonMisesFisher(sphere(8, 6, 1, torch.float32)[labels], kappa).sample(
            generator=g
        ),
        kappa,
        labels,
    )


@pytest.mark.parametrize("per_class", [False, True])
def test_safe_retrieval_against_plain_loops(per_class: bool) -> None:
    loc, kappa, labels = world()
    safe = safe_retrieval(loc, kappa, labels, 0.2, 0.3, per_class=per_class)
    groups = (
        [labels == c for c in range(8)]
        if per_class
        else [torch.ones(400, dtype=torch.bool)]
    )

    def kept(drop: float) -> list[int]:
        chosen = []
        for group in groups:
            members = sorted(
                group.nonzero().squeeze(1).tolist(), key=lambda i: -float(kappa[i])
            )
            chosen += members[: len(members) - round(drop * len(members))]
        return chosen

    def recall(queries: list[int], items: list[int]) -> float:
        cosine = (loc @ loc.T).fill_diagonal_(-2)
        hit = [
            labels[items[int(cosine[i, items].argmax())]] == labels[i] for i in queries
        ]
        return sum(map(bool, hit)) / len(hit)

    everything = list(range(400))
    asked, there = (everything, kept(0.2)), (everything, kept(0.3))
    expected = [recall(a, b) for b in there for a in asked]
    assert safe[:4] == pytest.approx(expected)
    assert (safe.n_queries, safe.n_database) == (len(kept(0.2)), len(kept(0.3)))
    assert safe.full < safe.reject < safe.both


def test_safe_retrieval_joins_the_other_metrics() -> None:
    loc, kappa, labels = world()
    nothing = safe_retrieval(loc, kappa, labels, 0, 0)
    assert nothing == SafeRetrieval(*[recall_at_k(loc, labels)] * 4, 400, 400)
    curve = rejection_curve(kappa, hits_at_k(loc, labels), [0.25])
    assert safe_retrieval(loc, kappa, labels, 0.25, 0).reject == pytest.approx(curve[0])
    half = safe_retrieval(
        loc[:200],
        kappa[:200],
        labels[:200],
        database=(loc[200:], kappa[200:], labels[200:]),
    )
    assert half.full == recall_at_k(loc[:200], labels[:200], 1, loc[200:], labels[200:])
    assert (half.n_queries, half.n_database) == (180, 180)


x = sphere(4, 3)
one = VonMisesFisher(x[0], 1.0)
nothing = VonMisesFisher(x[0], float("nan"), validate_args=False)
y = torch.arange(4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: CredibleRetriever(torch.ones(3)), ValueError, "index must have shape"),
        (lambda: CredibleRetriever(x, y[:3]), ValueError, "labels must have shape"),
        (lambda: CredibleRetriever(x, backend="annoy"), ValueError, "backend must be"),
        (lambda: CredibleRetriever(x, block=0), ValueError, "block"),
        (
            lambda: CredibleRetriever(x * float("nan")),
            ValueError,
            "index has rows with NaN",
        ),
        (
            lambda: CredibleRetriever(x).query(x),
            TypeError,
            "q must be a VonMisesFisher",
        ),
        (
            lambda: CredibleRetriever(x).query(VonMisesFisher(sphere(2, 4), 1.0)),
            ValueError,
            "D = 3",
        ),
        (
            lambda: CredibleRetriever(x).query(one.expand((2, 2))),
            ValueError,
            "batch shape",
        ),
        (lambda: CredibleRetriever(x).query(one, 1.5), ValueError, "level"),
        (
            lambda: CredibleRetriever(x).query(one, torch.full((3,), 0.5)),
            ValueError,
            "one for each of the 1",
        ),
        (
            lambda: CredibleRetriever(x).query(nothing),
            ValueError,
            "q.concentration has NaN",
        ),
        (lambda: CredibleRetriever(x).query(one, float("nan")), ValueError, "level"),
        (lambda: coverage(one, x[0], [0.5]), ValueError, "batch shape"),
        (lambda: coverage(VonMisesFisher(x, 1.0), x, [1.5]), ValueError, "levels"),
        (lambda: keep_certain(torch.ones(4), 1.0), ValueError, "drop must lie"),
        (lambda: keep_certain(torch.ones(4), 0.95), ValueError, "leaves none"),
        (
            lambda: keep_certain(torch.tensor([1.0, float("nan")]), 0.5),
            ValueError,
            "certainty has NaN",
        ),
        (
            lambda: safe_retrieval(x, torch.ones(3), y),
            ValueError,
            "kappa must have shape",
        ),
        (
            lambda: safe_retrieval(x, torch.ones(4), y[:3]),
            ValueError,
            "labels must have shape",
        ),
        (
            lambda: safe_retrieval(x, torch.ones(4), y, database=(x, torch.ones(3), y)),
            ValueError,
            "the database's kappa",
        ),
    ],
)
def test_bad_input_names_the_argument(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


def test_names_for_labels_get_a_message_that_says_how_to_number_them() -> None:
    index = torch.eye(3)
    for names in (["a", "b", "c"], np.array(["a", "b", "c"])):
        with pytest.raises(TypeError, match=r"labels must be whole numbers.*unique"):
            CredibleRetriever(index, labels=names)  # type: ignore[arg-type]
