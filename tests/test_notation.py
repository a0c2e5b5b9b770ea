"""One letter, one meaning: the theory chapters against the table on the notation page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HELD = (
    *("120", "135", "140", "145", "150", "155", "160", "165"),
    *("210", "220", "225", "230", "235", "238", "240", "250"),
    *("260", "265", "270", "280", "282", "285", "290", "362", "375"),
)
GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa "
    "lambda mu nu xi pi rho varrho sigma varsigma tau upsilon phi varphi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega".split()
)
# A letter whose index makes another symbol of it, and how the table writes it.
INDEXED = {"I": r"I_\nu", "a": "a_l", "b": "b_l", "w": "w_j"}


def formulas(text: str) -> list[str]:
    """Every formula of a piece of MyST, displayed or not."""
    text = re.sub(r"`[^`\n]+`", "", text)  # code, and the targets of roles
    displayed = re.findall(r"\$\$(.+?)\$\$", text, re.DOTALL)
    rest = re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
    return displayed + re.findall(r"\$([^$]+?)\$", rest, re.DOTALL)


def letters(formula: str) -> set[str]:
    """The letters of a formula: Latin, Greek, or in another alphabet."""
    formula = re.sub(r"\\(text|mathrm|operatorname|begin|end)\{[^{}]*\}", " ", formula)
    token = re.compile(
        r"\\(?P<alphabet>mathcal|mathbb)\s*\{?(?P<other>[A-Za-z])\}?"
        r"|\\(?P<command>[A-Za-z]+)|(?P<latin>[A-Za-z])"
    )
    found = {r"\chi^2"} if r"\chi^2" in formula else set()
    formula = formula.replace(r"\chi^2", "")
    for match in token.finditer(formula):
        if match["alphabet"]:
            found.add(f"\\{match['alphabet']} {match['other']}")
            continue
        if match["command"] and match["command"] not in GREEK:
            continue
        letter = match["latin"] or "\\" + match["command"]
        index = re.match(r"\s*'*_", formula[match.end() :])
        found.add(INDEXED[letter] if index and letter in INDEXED else letter)
    return found


def chapter(number: str) -> list[str]:
    """The prose cells of a chapter."""
    (path,) = (ROOT / "nbs").glob(f"{number}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    return ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]


def used_letters(number: str) -> set[str]:
    """The letters of all formulas of a chapter."""
    return {
        letter
        for text in chapter(number)
        for formula in formulas(text)
        for letter in letters(formula)
    }


def table() -> list[tuple[str, set[str] | None]]:
    """Letter and chapters of each row; None for all of them."""
    page = (ROOT / "nbs/notation.md").read_text()
    section = page.split("## One letter, one meaning")[1]
    rows = re.findall(r"^\| \$([^$]+)\$ \| .+ \| ([^|]+) \|$", section, re.MULTILINE)
    return [
        (letter, None if where == "all" else set(where.split(", ")))
        for letter, where in rows
    ]


def own_meanings() -> list[tuple[str, str]]:
    """Letter and chapter of every meaning that holds in single chapters only."""
    page = (ROOT / "nbs/notation.md").read_text()
    section = page.split("## Letters of four chapters")[1].split("\n## ")[0]
    rows = re.findall(r"^\| \$([^$]+)\$ \| .+ \| ([^|]+) \|$", section, re.MULTILINE)
    return [
        (INDEXED[letter[0]] if "_" in letter else letter, number)
        for letter, where in rows
        for number in where.split(", ")
    ]


def test_letters_of_a_formula_are_told_apart() -> None:
    formula = r"\hat\mu(x)^\top a_l(\kappa) \mathcal L_M \text{pos} + a\, I(x; x^+)"
    expected = {"\\mu", "x", "a_l", "l", "\\kappa", "\\mathcal L", "M", "a", "I"}
    assert letters(formula) == expected
    assert letters(r"I_{\nu + l} \mathbb E \cos\theta") == {
        r"I_\nu",
        "\\nu",
        "l",
        "\\mathbb E",
        "\\theta",
    }


def test_every_letter_has_one_row() -> None:
    listed = [letter for letter, _ in table()]
    assert len(listed) > 80
    assert sorted(listed) == sorted(set(listed))


@pytest.mark.parametrize("number", HELD)
def test_every_letter_of_a_chapter_is_in_the_table(number: str) -> None:
    rows, own = dict(table()), {a for a, place in own_meanings() if place == number}
    strangers = {
        letter
        for letter in used_letters(number) - own
        if letter not in rows or (rows[letter] and number not in rows[letter])
    }
    assert not strangers, f"chapter {number} uses {strangers}: see nbs/notation.md"


def test_no_row_names_a_chapter_that_does_without_the_letter() -> None:
    used = {number: used_letters(number) for number in HELD}
    for letter, where in table():
        assert where is None or all(letter in used[number] for number in where), letter


def test_no_letter_has_two_meanings_in_one_chapter() -> None:
    own = own_meanings()
    assert len(own) > 50 and len(set(own)) == len(own)
    for letter, number in own:
        assert number in HELD and letter in used_letters(number), (letter, number)
        where = dict(table()).get(letter)
        assert where is None or number not in where, (letter, number)


def test_inner_products_and_spheres_are_written_one_way() -> None:
    for number in HELD:
        for text in chapter(number):
            for formula in formulas(text):
                assert not re.search(r"(?<!\\mathcal )S\^\{D", formula), formula
                assert not re.search(r"[a-z}'_] ?\\cdot(?!s) ?[\\a-z]", formula), (
                    formula
                )
                assert "\\kappa^+" not in formula, formula
