"""How the chapters are written: what closes them, exercises, the length of paragraphs,
and words in the place of identifiers."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

CHAPTERS = sorted((Path(__file__).parent.parent / "nbs").glob("*.ipynb"))


@cache
def cells_of(path: Path) -> list[dict[str, Any]]:
    """The cells of a chapter, each with its source as one text."""
    cells = json.loads(path.read_text())["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def prose_of(path: Path) -> list[str]:
    """The prose of a chapter, cell by cell."""
    return [c["source"] for c in cells_of(path) if c["cell_type"] == "markdown"]


def sections_of(path: Path) -> list[tuple[str, str]]:
    """Heading and text of every section of a chapter."""
    parts = re.split(r"^## +(.+)$", "\n".join(prose_of(path)), flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


WITH_PROSE = [path for path in CHAPTERS if len(prose_of(path)) > 1]


@pytest.mark.parametrize("path", WITH_PROSE, ids=lambda path: path.stem)
def test_a_chapter_closes_in_short(path: Path) -> None:
    sections = sections_of(path)
    headings = [heading for heading, _ in sections]
    assert headings.count("In short") == 1, "one section says it in short"
    after = headings[headings.index("In short") + 1 :]
    assert after in ([], ["Exercises"]), f"{after} come after the closing section"
    items = re.findall(r"^(?:-|\d\.) \S", dict(sections)["In short"], re.MULTILINE)
    assert 3 <= len(items) <= 5, f"{len(items)} lines"


def paragraphs_of(text: str) -> list[str]:
    """Paragraphs and list items of a cell, each formula as one word."""
    text = re.sub(r"\$\$.*?\$\$(?: *\([\w-]+\))?", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"\$[^$]+\$", "formula", text)
    text = re.sub(r"^(?::::+|```+).*$|^:\w+:.*$", "\n", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text)
    return [part for part in parts if not part.lstrip().startswith(("|", "#"))]


LONGEST = 120  # words


def test_formulas_tables_and_fences_are_no_words() -> None:
    text = (
        "One $a + b$ two.\n\n$$ x $$ (eq-a)\n\n- three\n- four\n\n```{note}\nfive\n```"
    )
    words = [part.split() for part in paragraphs_of(text + "\n\n| a | b |\n|---|---|")]
    assert [len(part) for part in words if part] == [3, 2, 2, 1]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_paragraphs_are_short(path: Path) -> None:
    for text in prose_of(path):
        for part in paragraphs_of(text):
            words = part.split()
            assert len(words) <= LONGEST, f"{len(words)} words: {' '.join(words[:12])}"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_the_answer_in_a_sentence_is_a_sentence(path: Path) -> None:
    for text in prose_of(path):
        for part in paragraphs_of(text):
            if part.startswith("**The answer in a sentence"):
                ends = re.findall(r"[.!?](?=\s|$)", part.strip())
                assert len(ends) == 1 and part.strip()[-1] == ".", part


def exercises_of(path: Path) -> list[tuple[int, str]]:
    """Number and solution of every exercise of a chapter."""
    cells, found = cells_of(path), []
    for cell, after in zip(cells, [*cells[1:], None], strict=True):
        if cell["cell_type"] == "markdown":
            last = cell["source"].split("\n\n")[-1]
            asked = re.match(r"\*\*(\d)\.\*\* ", last)
            if asked:
                assert after and after["cell_type"] == "code", (
                    f"{path.stem}: no solution"
                )
                found.append((int(asked[1]), after["source"]))
    return found


def test_exercises_have_folded_solutions_that_print() -> None:
    total = 0
    for path in CHAPTERS:
        found = exercises_of(path)
        total += len(found)
        if "Exercises" in dict(sections_of(path)):
            assert found, f"{path.stem} has a section without an exercise"
        for place, (number, solution) in enumerate(found, 1):
            head = f"#| code-fold: true\n# Solution {place}\n"
            assert number == place and solution.startswith(head), path.stem
            assert "print(" in solution and "assert " not in solution, path.stem
    assert total >= 30


@cache
def identifiers() -> set[str]:
    """Names of metrics and rows that only a program would say."""
    from pcl.datasets import catalogue
    from pcl.experiments import experiments
    from pcl.ledger import read

    names = {name for record in read().records for name in record.metrics}
    names |= {row for e in experiments().values() for row in e.rows}
    return {n for n in names if re.search(r"[-_]", n)} - catalogue().keys()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_metrics_and_rows_have_words(path: Path) -> None:
    coded = re.findall(r"`([^`\n]+)`", "\n".join(prose_of(path)))
    assert not set(coded) & identifiers(), "say it as pcl.tables does, in words"


def test_every_column_of_the_tables_is_words() -> None:
    from pcl.tables import metric_in_words, row_in_words

    for name in identifiers():
        assert "_" not in metric_in_words(name).replace("κ_pos", ""), name
    assert row_in_words("d10-told") == "D = 10, told"


SMOKE = ("It runs", "In smoke form", "Does it still run?")
AFTER_SMOKE = (*SMOKE, "Paper, ours, verdict", "In short", "Exercises")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_smoke_runs_stand_at_the_end(path: Path) -> None:
    headings = [heading for heading, _ in sections_of(path)]
    smoke = [place for place, heading in enumerate(headings) if heading in SMOKE]
    if smoke:
        assert set(headings[smoke[0] :]) <= set(AFTER_SMOKE), headings[smoke[0] :]
