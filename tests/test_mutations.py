"""Checks with power: break a claim of the theory, and the cell that guards it fails.

A mutation replaces a piece of one cell. The cells that the guard needs run in their
order, without a figure on a screen; all but the guard must still pass.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """A claim that is made false, and the cells that have to run to see it."""

    claim: str
    chapter: str
    needs: str  # cells before the guard, by id
    guard: str  # the cell that must fail
    old: str
    new: str
    where: str = ""  # the cell that is changed; by default the guard itself


LOSSES = "92e84206 d4699d8a 13ee5173 d2fab00e"
DRAWS = f"{LOSSES} 7f7542b8 85e4ef8b 4467d3d6 9fc9ec29 6fcc40a4"
SAMPLED = (
    f"{LOSSES} 45c78b45 c64ea54f 5ad53918 67382949 "
    "7f7542b8 85e4ef8b 4467d3d6 9fc9ec29 6fcc40a4 0262b11f 4da7293c"
)
EXACT = "21903ed3 22289809 de47ba62"
OTHER = "1f3498a9 c04bc4b8 a0ab6304"
WORLDS = "ee9635fe 904297f5 14ae4f9a"
CIRCLE = "2bd75950 59d8d1ff"

MUTATIONS = (
    # five cells that once let a broken claim through
    Mutation(
        "the tangent coordinate lies on S^(D-2)",
        "260",
        DRAWS,
        "f803192b",
        "2 / (dim - 3)",
        "2 / (dim - 2)",
        "7f7542b8",
    ),
    Mutation(
        "formula 6 and ExactInfoNCE agree at the rate 1/M, for one kappa_pos",
        "265",
        EXACT,
        "f056248f",
        "ExactInfoNCE(6.0)",
        "ExactInfoNCE(6.3)",
    ),
    Mutation(
        "exact losses have no bias: told 17 for 20",
        "265",
        f"{EXACT} 69cbbb7c 3c082fd1",
        "74d42598",
        "kind(20.0,",
        "kind(17.0,",
    ),
    Mutation(
        "exact losses have no bias: told 24 for 20",
        "265",
        f"{EXACT} 69cbbb7c 3c082fd1",
        "74d42598",
        "kind(20.0,",
        "kind(24.0,",
    ),
    Mutation(
        "the pair ratio settles at the truth, beside ELK and HIB",
        "270",
        f"{OTHER} ec72d8d6",
        "d81b3f62",
        "fitted_kappa(ExactInfoNCE(20.0,",
        "fitted_kappa(ExactInfoNCE(24.0,",
    ),
    Mutation(
        "a wrong kappa_pos is absorbed by half its difference",
        "235",
        "2bd75950",
        "724f0cb1",
        "(1 / kappa_pos - 1 / told) / 2)",
        "(1 / kappa_pos - 1 / told) * 0.6)",
    ),
    Mutation(
        "the bias of formula 7 is Var / (2 K E^2)",
        "260",
        SAMPLED,
        "d9e1fb27",
        "bias, error = gap.mean().item()",
        "bias, error = 1.2 * gap.mean().item()",
    ),
    # and others across the theory
    Mutation(
        "uneven means can be compensated, exactly",
        "210",
        "db8c2f96 590401fb 627f530f",
        "68ebd976",
        "answer = tilt *",
        "answer = 1.01 * tilt *",
    ),
    Mutation(
        "the price of finite M has a half before the variance",
        "220",
        f"{WORLDS} 2a1480fd e7607385 dfa6cf89",
        "99d4e7ae",
        "spread / (2 * ratio**2)",
        "spread / ratio**2",
        "e7607385",
    ),
    Mutation(
        "the aggregate is uniform at the minimum, because of the crowding",
        "220",
        f"{WORLDS} 2a1480fd 69c8ae06",
        "5a1c0e02",
        "limit_loss(tiny, logits.softmax(-1))",
        "-(tiny.joint * pair_ratio(tiny, logits.softmax(-1)).log()).sum()",
    ),
    Mutation(
        "an encoder with a uniform aggregate has q = S h",
        "220",
        f"{WORLDS} 2a1480fd",
        "69c8ae06",
        "w.n * enc @ w.positive @ enc.T",
        "w.n * enc @ w.positive**1.01 @ enc.T",
    ),
    Mutation(
        "a vMF multiplies harmonics by ratios that start at nu",
        "225",
        "2bd75950",
        "ff7aa054",
        "orders = dim / 2 - 1 +",
        "orders = dim / 2 +",
    ),
    Mutation(
        "N_l is the dimension of the harmonics",
        "230",
        "c2ec1047 94de813d",
        "e12ef20d",
        "math.factorial(l + dim - 3)",
        "math.factorial(l + dim - 2)",
    ),
    Mutation(
        "closer modes put more mass nearby, if a density has one mode",
        "230",
        "c2ec1047",
        "5a1c0e11",
        "torch.exp(8 * w),",
        "torch.exp(8 * w.abs()),",
    ),
    Mutation(
        "the slope in the cosine has the factor D",
        "230",
        "c2ec1047 94de813d",
        "e12ef20d",
        "identity = dim *",
        "identity = (dim - 1) *",
    ),
    Mutation(
        "a Dirac has the mean cosine one",
        "230",
        "c2ec1047",
        "5a1c0e13",
        "1.0 if math.isinf(k)",
        "0.999 if math.isinf(k)",
    ),
    Mutation(
        "redrawn partners are divided by the crowding of the anchor",
        "235",
        CIRCLE,
        "5a1c0e22",
        '"redrawn": self.kernel / (self.kernel @ aggregate)[:, None]',
        '"redrawn": self.kernel / (self.kernel @ aggregate)',
    ),
    Mutation(
        "MCInfoNCE's limit finds the truth for redrawn partners",
        "235",
        f"{CIRCLE} 5a1c0e22",
        "5a1c0e2a",
        "self.kernel @ (self.world.base @ answers)",
        "(self.kernel @ (self.world.base @ answers)) ** 0.98",
        "5a1c0e22",
    ),
    Mutation(
        "the critic for redrawn partners is made of normalisers",
        "235",
        f"{CIRCLE} 527050e5 5a1c0e22",
        "5a1c0e25",
        "small.kappa_pos * points",
        "0.99 * small.kappa_pos * points",
    ),
    Mutation(
        "spread is traded for concentration with 2 kappa_pos",
        "235",
        CIRCLE,
        "807665f8",
        "(2 * kappa_pos)",
        "(2.2 * kappa_pos)",
    ),
    Mutation(
        "the large-l expansion has n^2 (n + 1)",
        "235",
        "2bd75950",
        "0faa793d",
        "(2 * n**2 * (n + 1))",
        "(2 * n**3)",
    ),
    Mutation(
        "the factors 1/M of formula 6",
        "260",
        f"{LOSSES} 45c78b45 c64ea54f 5ad53918 67382949",
        "bb113349",
        "- math.log(scores.shape[1] - 1)",
        "- math.log(scores.shape[1])",
        "67382949",
    ),
    Mutation(
        "NWJ averages over its negatives",
        "265",
        f"{EXACT} 69cbbb7c",
        "cfed2b84",
        "scores.shape[1] - 1\n        )",
        "scores.shape[1]\n        )",
        "69cbbb7c",
    ),
    Mutation(
        "ELK is the overlap to the power of its temperature",
        "270",
        OTHER,
        "9fd101b5",
        "self.kappa_pos * log_overlap",
        "1.001 * self.kappa_pos * log_overlap",
        "a0ab6304",
    ),
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave precision, threads, seed and figures as they were."""
    dtype, threads, state = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_rng_state(),
    )
    with mpl.rc_context():
        mpl.use("agg")
        yield
        mpl.pyplot.close("all")
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@cache
def sources(chapter: str) -> dict[str, str]:
    """The code cells of a chapter by id."""
    (path,) = (ROOT / "nbs").glob(f"{chapter}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    return {c["id"]: "".join(c["source"]) for c in cells if c["cell_type"] == "code"}


def in_order(mutation: Mutation) -> list[str]:
    """What runs before the guard, in the order of the chapter."""
    needed = set(mutation.needs.split())
    assert needed <= sources(mutation.chapter).keys()
    return [cell for cell in sources(mutation.chapter) if cell in needed]


def run(mutation: Mutation, changed: dict[str, str]) -> None:
    """Run the cells up to the guard; an error before it is not the guard's."""
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.set_default_dtype(torch.float32)

    def execute(cell: str) -> None:
        text = changed.get(cell, sources(mutation.chapter)[cell])
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, f"{mutation.chapter}[{cell}]", "exec"), names)

    for cell in in_order(mutation):
        try:
            execute(cell)
        except AssertionError as error:
            raise RuntimeError(f"cell {cell} failed before the guard") from error
    execute(mutation.guard)


@cache
def passes_as_it_is(chapter: str, needs: str, guard: str) -> bool:
    """Whether a guard passes on the chapter as it stands; once for each guard."""
    run(Mutation("", chapter, needs, guard, "", ""), {})
    return True


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.claim)
def test_a_false_claim_fails_its_guard(mutation: Mutation) -> None:
    where = mutation.where or mutation.guard
    source = sources(mutation.chapter)[where]
    assert source.count(mutation.old) >= 1, "the piece to replace is not there"
    assert passes_as_it_is(mutation.chapter, mutation.needs, mutation.guard)
    with pytest.raises(AssertionError):
        run(mutation, {where: source.replace(mutation.old, mutation.new)})


def test_mutations_cover_every_theory_chapter() -> None:
    assert {m.chapter for m in MUTATIONS} == {
        *("210", "220", "225", "230", "235", "260", "265", "270")
    }
    assert len({m.claim for m in MUTATIONS}) == len(MUTATIONS) >= 17
