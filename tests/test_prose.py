"""How the chapters are written: what closes them, exercises, the length of paragraphs,
and words in the place of identifiers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

CHAPTERS = sorted((Path(__file__).parent.parent / "nbs").glob("*.ipynb"))


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
