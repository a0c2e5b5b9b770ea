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
PAGES = sorted((Path(__file__).parent.parent / "nbs").glob("*.md"))


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


@pytest.mark.parametrize("path", [*CHAPTERS, *PAGES], ids=lambda path: path.stem)
def test_paragraphs_are_short(path: Path) -> None:
    for text in prose_of(path) if path in CHAPTERS else [path.read_text()]:
        for part in paragraphs_of(text):
            words = part.split()
            assert len(words) <= LONGEST, f"{len(words)} words: {' '.join(words[:12])}"


TEXT = re.compile(
    r"(?:`{3,}|~{3,})\{(?:figure|glossary|note|tip|warning|admonition|prf:)"
)
ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|cf|vs|al|etc|corr|resp|approx|[A-Z])\.")
RUN_IN = re.compile(
    r"^\s*>?\s*(?:(?:[-*]|\d+\\?\.)\s+)?(?:\*{1,2}[^*]*[.:?!]\*{1,2}\s*)?(?:(?:Yes|No)\.)?"
)
BETWEEN = re.compile(r"[.!?][\"'*_]*\s+(?=[\"'*_]*[A-Z\d])")


def lines_of_prose(text: str) -> list[str]:
    """Lines of a cell or page that hold sentences: no tables, headings, formulas, or
    fences but those whose content is text."""
    kept, code, formula = [], "", False
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    for line in text.splitlines():
        bare, fence = line.strip(), re.match(r"\s*(`{3,}|~{3,})(.*)", line)
        if code or formula:
            code = "" if bare == code else code
            formula = formula and "$$" not in bare
        elif fence and fence[2] and not TEXT.match(bare):
            code = fence[1]
        elif bare.startswith("$$"):
            formula = bare.count("$$") == 1
        elif not fence and not re.match(r"\||#|:::|:\w[\w-]*:|<", bare):
            kept.append(line)
    return kept


def sentences_in(line: str) -> int:
    """How many sentences a line holds, so far as full stops tell."""
    line = re.sub(r"`[^`]*`|\$[^$]*\$", "Xx", line)
    line = re.sub(r"\[[^\]]*\]\([^)]*\)", "Xx", line)
    while (shorter := re.sub(r"\([^()]*\)", "", line)) != line:
        line = shorter
    return 1 + len(BETWEEN.findall(ABBREVIATED.sub("x", RUN_IN.sub("", line).strip())))


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("One sentence. Another one.", 2),
        ("It holds. $x$ is small. `y` is not!", 3),
        ("It tends to $x$. Then it stays.", 2),
        ("*Figure.* Order comes first, level last.", 1),
        ("**1.** Is it so? Compute it.", 2),
        ("- *More pairs.* A point (e.g. this. And that) stays one.", 1),
        ("As of Kirchhof et al. (2023), cf. E. Rusak and D. 2 by [it. So](a.b).", 1),
        ("It grows by 0.5 nats... and so on.", 1),
    ],
)
def test_sentences_are_told_apart_by_their_stops(line: str, count: int) -> None:
    assert sentences_in(line) == count


def test_tables_formulas_and_code_hold_no_sentences() -> None:
    text = (
        "---\na: B. C\n---\n# A. Head\n\nOne.\n\n| A. B. | C |\n\n$$\nA. B\n$$ (eq-a)\n\n"
        "```python\nx. Y\n```\n```{figure} a.svg\n:alt: A. B\n\nTwo.\n```\nThree."
    )
    assert [line for line in lines_of_prose(text) if line] == ["One.", "Two.", "Three."]


@pytest.mark.parametrize("path", [*CHAPTERS, *PAGES], ids=lambda path: path.stem)
def test_a_line_holds_one_sentence(path: Path) -> None:
    texts = prose_of(path) if path in CHAPTERS else [path.read_text()]
    for line in (line for text in texts for line in lines_of_prose(text)):
        assert sentences_in(line) == 1, line


def numbers_in(text: str) -> list[str]:
    """Numbers in prose, without links, citations, references and formulas."""
    text = re.sub(r"\{[a-z:]+\}`[^`]*`|\[[^\]]*\]\([^)]*\)|`[^`]*`|\$[^$]*\$", "", text)
    text = re.sub(r"^:.*$", "", text, flags=re.MULTILINE)  # the layout of cards
    return re.findall(
        r"\d[\d.,]*", text.replace("CIFAR-10", "").replace("::::{grid}", ":")
    )


def test_numbers_are_found_where_they_are_typed() -> None:
    text = "It is 0.87, in [chapter 20](020_a.ipynb), {cite}`b2023`, at $\\kappa = 16$."
    assert [n.rstrip(".,") for n in numbers_in(text)] == ["0.87"]


def test_page_two_types_no_number() -> None:
    page = next(path for path in CHAPTERS if path.stem == "020_what_holds")
    for text in prose_of(page):
        assert not numbers_in(text), text


ANSWER = re.compile(r"\*\*The answer(?P<one> in a sentence)?\b[^*]*\*\*")
LONGEST_ANSWER = 60  # words
STOP = re.compile(r"[.!?](?=\s|$)")


def answers_in(text: str) -> list[tuple[int, int, bool]]:
    """Sentences and words of the answers in a cell, and whether one promises to be one
    sentence; a yes or no before it is none."""
    found = []
    for part in paragraphs_of(text):
        if match := ANSWER.match(part.strip()):
            said = part.strip()[match.end() :].strip(" .:\n")
            said = re.sub(r"^(?:yes|no)\.\s", "", said, flags=re.IGNORECASE)
            said = re.sub(r"\[[^\]]*\]\([^)]*\)", "x", said) + "."
            stops = STOP.findall(ABBREVIATED.sub("x", said))
            found.append((len(stops), len(said.split()), bool(match["one"])))
    return found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("**The answer in a sentence**: it does.", [(1, 2, True)]),
        ("**The answer in a sentence:** it is. So.", [(2, 3, True)]),
        ("**The answer:** no.\nIt is. [So](a.md).\n\nMore. And more.", [(2, 3, False)]),
        ("**The answer.** One. Two. Three.", [(3, 3, False)]),
        ("**The answer** is one.\n\n**In short**: two.", [(1, 2, False)]),
    ],
)
def test_answers_are_measured(text: str, found: list[tuple[int, int, bool]]) -> None:
    assert answers_in(text) == found


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_an_answer_is_one_or_two_sentences(path: Path) -> None:
    for text in prose_of(path):
        for sentences, words, one in answers_in(text):
            assert sentences <= (1 if one else 2), f"{sentences} sentences"
            assert words <= LONGEST_ANSWER, f"{words} words"


def test_answers_are_found() -> None:
    assert sum(len(answers_in(t)) for p in CHAPTERS for t in prose_of(p)) > 80


def test_what_stands_in_for_a_moving_figure_says_where_a_still_one_is() -> None:
    count = 0
    for path in CHAPTERS:
        for cell in cells_of(path):
            if cell["cell_type"] == "code" and "With scripts, " in cell["source"]:
                said = " ".join(re.findall(r'"([^"]*)"', cell["source"]))
                said = re.search(r"With scripts, [^.]*\.", said)
                count += 1
                assert said and re.search(r"; the .*\b(above|below)\b", said[0]), (
                    path.stem
                )
    assert count >= 6


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


# Printed because they are typed: names of losses and estimators, and an object's own.
LOSSES = {"exact-infonce", "exact-nwj", "kappa_pos"}
TYPED = {
    **{name: LOSSES for name in ("268_by_label", "270_other_losses")},
    "433_estimators": {"probe-entropy"},
    "610_auroc": {"recall_at_1", "r_auroc"},
    "717_sharing_heads": {"kappa_pos"},  # a card
    "730_your_own_data": {"kappa_pos"},  # a loss as it prints itself
}
KEPT = Path(__file__).parent.parent / "_build" / "outputs" / "nbs"  # by the last build
CHAPTER_FILE = re.compile(r"(?<![\w/.-])[1-9]\d\d_[a-z]\w+")
NAME = re.compile(r"(?<![\w/.-])[A-Za-z]\w*(?:[-_]\w+)+(?![\w/])")


def said_by(cell: dict[str, Any]) -> str:
    """What a cell that ran shows, without drawings."""
    said = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        drawn = any(kind.startswith("image/") for kind in data)
        parts = [output.get("text", ""), data.get("text/html", "")]
        parts += [data.get("text/markdown", "")]
        if not data.get("text/html") and not drawn:
            parts.append(data.get("text/plain", ""))
        said += ["".join(part) for part in parts]
    text = re.sub(r"<(script|style|svg).*?</\1>", "", "\n".join(said), flags=re.DOTALL)
    return re.sub(r"<[^>]*>", " ", text)


def test_what_a_cell_shows_is_read_without_tags_and_drawings() -> None:
    outputs = [
        {"text": ["kappa_mae ", "7"]},
        {"data": {"text/html": "<p title='mu_mae'>one<svg>r_auroc</svg></p>"}},
        {"data": {"image/svg+xml": "<svg/>", "text/plain": "<Figure two>"}},
    ]
    assert said_by({"outputs": outputs}).split() == ["kappa_mae", "7", "one"]
    assert NAME.findall("in `kappa_mae` a/kappa_mae.svg, d10-told.") == [
        "kappa_mae",
        "d10-told",
    ]


def code_of(cells: list[dict[str, Any]]) -> list[str]:
    """The code of cells, without directives and what they leave of them."""
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    marked = re.compile(r"^#(?:\||\s*Solution ).*\n?", re.MULTILINE)
    return [marked.sub("", source).strip() for source in sources]


# The chapters on the machinery print what is typed and stored.
@pytest.mark.parametrize(
    "path", [p for p in CHAPTERS if p.stem < "9"], ids=lambda path: path.stem
)
def test_what_a_chapter_prints_says_metrics_and_rows_in_words(path: Path) -> None:
    kept = KEPT / path.name
    if not kept.exists():
        pytest.skip("the book is not built: make book")
    ran = json.loads(kept.read_text())["cells"]
    if code_of(ran) != code_of(cells_of(path)):
        pytest.skip("the chapter was changed after the book was built")
    wrong = identifiers() - {"in-batch"} - TYPED.get(path.stem, set())
    for place, cell in enumerate(ran, start=1):
        if "remove-cell" not in cell["metadata"].get("tags", []):
            said = said_by(cell)
            found = wrong & set(NAME.findall(said)) | set(CHAPTER_FILE.findall(said))
            assert not found, f"cell {place} prints {found}"


SMOKE = ("It runs", "In smoke form", "Does it still run?")
AFTER_SMOKE = (*SMOKE, "Paper, ours, verdict", "In short", "Exercises")


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_smoke_runs_stand_at_the_end(path: Path) -> None:
    headings = [heading for heading, _ in sections_of(path)]
    smoke = [place for place, heading in enumerate(headings) if heading in SMOKE]
    if smoke:
        assert set(headings[smoke[0] :]) <= set(AFTER_SMOKE), headings[smoke[0] :]


def draws(cell: dict[str, Any]) -> bool:
    """Whether a cell shows a figure of matplotlib's on the page."""
    source = cell["source"]
    return (
        cell["cell_type"] == "code"
        and "plt.show()" in source
        and not source.startswith("#| hide")
    )


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_figure_is_described_for_who_cannot_see_it(path: Path) -> None:
    for place, cell in enumerate(cells_of(path), start=1):
        image = cell["metadata"].get("mystnb", {}).get("image", {})
        assert not draws(cell) or image.get("alt", "").strip(), f"cell {place}: no alt"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_phone_can_stack_the_panels_of_every_figure(path: Path) -> None:
    for place, cell in enumerate(cells_of(path), start=1):
        halves = "subfigures(" in cell["source"]
        assert not (draws(cell) and halves), f"cell {place}: draw two figures"
