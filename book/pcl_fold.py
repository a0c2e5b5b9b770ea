"""Library cells are folded under one visible line that says what they hold; the code of
a figure is folded above it, and so is the solution of an exercise. A cell with an assertion
is never folded."""

from __future__ import annotations

import ast
import re
from typing import Any

EXPORTED = re.compile(r"^#\|\s*exporti?\b", re.MULTILINE)
COMMENT = re.compile(r"(?:^#\s.*\n)+", re.MULTILINE)
CAPTION = re.compile(r"\*Figure(?:\s+\((?P<label>fig-[\w-]+)\))?\.\*\s+")
SOLUTION = re.compile(r"# (Solution \d+)\n")
FOLD = "hide-input"
WHOLE = "hide-cell"  # a solution hides what it prints, too
EXPERIMENTS = ("Experiment", "world_experiment", "image_experiment")
OF_OUTPUT = "Code of what is printed below"
OF_FIGURE = "Code of this figure"


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, on one line and without its full stop."""
    text = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?:\s|$)", text)[0].replace("`", "")


def names_in(body: list[ast.stmt]) -> list[str]:
    """The public names that top-level statements define, functions and classes first."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [node.name for node in body if isinstance(node, kinds)]
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [t.id for t in targets if isinstance(t, ast.Name)]
    return [n for n in found if not n.startswith("_")] or found


def registered(body: list[ast.stmt]) -> str:
    """The experiments or data sets that a cell registers, and what the first is about."""
    names, about = [], []
    for node in (n for top in body for n in ast.walk(top)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {k.arg: k.value for k in node.keywords}
            name, words = {
                **dict.fromkeys(EXPERIMENTS, [*node.args[:2], None, None][:2]),
                "Dataset": [given.get("name"), given.get("title")],
            }.get(node.func.id, (None, None))
            if isinstance(name, ast.Constant) and isinstance(words, ast.Constant):
                names.append(str(name.value))
                about.append(str(words.value).rstrip("."))
    return f"{', '.join(names)}: {about[0]}" if names else ""


def only_imports(body: list[ast.stmt]) -> bool:
    """Does a cell bring in names, and do nothing else but name its module?"""
    kinds = ast.Import | ast.ImportFrom | ast.If | ast.Try
    words = (n for n in body if isinstance(n, ast.Expr))
    return all(isinstance(n, kinds | ast.Expr) for n in body) and all(
        isinstance(n.value, ast.Constant) for n in words
    )


def summary_of(source: str) -> str:
    """One line on an exported cell: its names, and what the first of them says it is."""
    body = ast.parse(source).body
    names = names_in(body)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if not any(isinstance(node, kinds) for node in body) and (line := registered(body)):
        return line
    comment = COMMENT.match(source)
    remark = (
        first_sentence(re.sub(r"^#", "", comment[0], flags=re.M)) if comment else ""
    )
    if not names:
        imports = body and only_imports(body)
        return "Imports" if imports else remark or "Library code"
    shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    told = [
        first_sentence(ast.get_docstring(node))
        for node in body
        if isinstance(node, kinds) and node.name in names
    ]
    said = next(filter(None, told), remark)
    return f"{shown}: {said}" if said else shown


def checks_in(
    node: ast.AST,
    inside: bool = True,  # count those in the bodies of functions as well
) -> list[str]:
    """The checks in a piece of code: `assert`, and calls such as
    `torch.testing.assert_close`."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not inside:
            continue
        called = child.func if isinstance(child, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(child, ast.Assert) or name.startswith("assert_"):
            found.append(ast.unparse(child))
        found += checks_in(child, inside)
    return found


def asserts(source: str) -> bool:
    """Does a cell check something where it stands?"""
    return bool(checks_in(ast.parse(source), inside=False))


def fold(cell: dict[str, Any], line: str, how: str = FOLD) -> None:
    """Fold a cell under a line: its code, or all of it."""
    tags = cell["metadata"].setdefault("tags", [])
    tags[:] = [tag for tag in tags if tag not in ("remove-input", FOLD)] + [how]
    prompts = {"code_prompt_show": line, "code_prompt_hide": line}
    cell["metadata"]["mystnb"] = cell["metadata"].get("mystnb", {}) | prompts


def is_caption(cell: dict[str, Any]) -> bool:
    """Is it prose that opens with a figure's caption?"""
    source = "".join(cell["source"])
    return cell["cell_type"] == "markdown" and CAPTION.match(source) is not None


def fold_cells(
    cells: list[dict[str, Any]],  # with tags in the place of directives
    exported: set[int],  # positions of the cells that go into the library
) -> None:
    """Fold exported cells, the code of every figure with a caption, and solutions."""
    for position, cell in enumerate(cells):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if asserts(source):
            tags[:] = [tag for tag in tags if tag != FOLD]
            continue
        if "remove-cell" in tags:
            continue
        after = cells[position + 1 : position + 2]
        if position in exported:
            fold(cell, summary_of(source))
        elif "remove-input" in tags and after and is_caption(after[0]):
            fold(cell, OF_FIGURE)
        elif solution := SOLUTION.match(source):
            cell["source"] = source[solution.end() :].lstrip("\n")
            fold(cell, solution[1], WHOLE)
        elif FOLD in tags:
            line = summary_of(source)
            fold(cell, line if ": " in line or line == "Imports" else OF_OUTPUT)
