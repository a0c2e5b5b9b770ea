"""Which records lie behind a figure: read off the code of its chapter, linked from its
caption to a page that lists the ledger."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

READERS = {"results_of", "read", "scoreboard"}  # what opens the ledger in a chapter
# And what prints of it, opened by the library.
PRINTERS = {"judged_claims", "verdicts", "claims", "measured", "card_numbers"}
OPENS = re.compile(rf"\b(?:{'|'.join(READERS)})\b")
ALL = "records"  # the whole ledger, where no experiment is named


def experiments_in(results: Path) -> set[str]:
    """The experiments of a ledger."""
    return {path.parent.name for path in results.glob("*/*.json")} - {"published"}


def reads_records(
    cells: list[dict[str, Any]],  # of a chapter, without directives
    library: Collection[
        int
    ] = (),  # positions of cells that only define what others call
) -> bool:
    """Does a chapter itself read recorded runs, and not only define what does?"""
    for position, cell in enumerate(cells):
        if cell["cell_type"] != "code" or position in library:
            continue
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in READERS | PRINTERS:
                    return True
    return False


def is_read(name: ast.Name) -> bool:
    """Does a name stand where its value is asked for?"""
    return isinstance(name.ctx, ast.Load)


def stored(node: ast.AST) -> set[str]:
    """The names that are bound anywhere in a piece of code."""
    inside = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    return {n.id for n in inside if not is_read(n)}


def own_names(statement: ast.stmt) -> set[str]:
    """Names that mean something within a statement only, whatever they meant before."""
    own: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.comprehension | ast.For):
            own |= stored(node.target)
        elif isinstance(node, ast.Lambda | ast.FunctionDef):
            own |= {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        if isinstance(node, ast.FunctionDef | ast.For):
            own |= set().union(*map(stored, node.body))
    return own


def names_in(statement: ast.stmt) -> tuple[set[str], set[str], bool]:
    """Names from before that a statement uses, names that it binds, and whether it opens
    the ledger."""
    own, inside = own_names(statement), list(ast.walk(statement))
    used = {n.id for n in inside if isinstance(n, ast.Name) and is_read(n)} - own
    bound = stored(statement) if isinstance(statement, ast.Assign | ast.For) else own
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        bound = {statement.name}
    return used, bound, bool(used & READERS)


def texts_in(node: ast.AST) -> list[str]:
    """The texts in a piece of code, in their order; none that is only compared with."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    inside = [] if isinstance(node, ast.Compare) else ast.iter_child_nodes(node)
    return [text for child in inside for text in texts_in(child)]


class Chapter:
    """What the names of a chapter stand for, as far as the ledger is concerned."""

    def __init__(self, known: set[str]) -> None:
        self.known = known  # experiments with records
        self.behind: dict[str, set[str]] = {}  # by name: records its value is made of
        self.named: dict[str, set[str]] = {}  # by name: experiments that it lists

    def follow(self, statement: ast.stmt) -> set[str]:
        """The experiments behind a statement; the names that it binds are kept."""
        used, bound, opens = names_in(statement)
        said = [text for text in texts_in(statement) if text in self.known]
        taken = set().union(*(self.behind.get(n, ()) for n in used))
        taken |= {ALL} if opens else set()
        lists = (self.named.get(n, ()) for n in used if not self.behind.get(n))
        meant = set(said).union(*lists)
        # A name among several, or out of the whole ledger, says which.
        found = (meant if ALL in taken else meant & taken) or taken
        computed = any(isinstance(node, ast.Call) for node in ast.walk(statement))
        for name in bound:
            self.behind[name] = found
            self.named[name] = set() if computed else meant
        if found and isinstance(statement, ast.Assign):  # a, b = ... "x" ... "y"
            ends = getattr(statement.targets[0], "elts", [])
            if len(ends) == len(said) > 1:
                for end, text in zip(ends, said, strict=True):
                    self.behind[getattr(end, "id", "")] = {text}
        return found


def records_behind(
    cells: list[dict[str, Any]],  # of a chapter, without directives
    known: set[str],  # experiments with records
) -> dict[int, list[str]]:
    """By the position of a code cell, the experiments whose records it leads back to."""
    if not any(OPENS.search("".join(cell["source"])) for cell in cells):
        return {}
    chapter, found = Chapter(known), {}
    code = {
        position: ast.parse("".join(cell["source"])).body
        for position, cell in enumerate(cells)
        if cell["cell_type"] == "code"
    }
    for _ in range(2):  # a function may use what is bound after it
        for position, body in code.items():
            total = set().union(*map(chapter.follow, body))
            found[position] = sorted(total - {ALL} or total)
    return found


def record_links(docname: str, experiments: list[str]) -> nodes.inline:
    """What a caption says of records: `Records: table1, recovery.`"""
    line = nodes.inline("", " Records: ", classes=["pcl-made-by"])
    for count, name in enumerate(experiments):
        label = ALL if name == ALL else f"{ALL}-{name}"
        said = "the whole ledger" if name == ALL else name
        words = {"refdomain": "std", "reftype": "ref", "reftarget": label}
        words |= {"refdoc": docname, "refexplicit": True, "refwarn": True}
        link = addnodes.pending_xref("", nodes.inline("", said), **words)
        line += [*([nodes.Text(", ")] if count else []), link]
    line += nodes.Text(".")
    return line


class RecordList(SphinxDirective):
    """Every recorded row by experiment: seeds, preset, revisions, and the newest day."""

    def run(self) -> list[nodes.Node]:
        """A section for each experiment, with a label for captions."""
        from pcl.ledger import read

        rows: dict[str, dict[tuple[str, str], list[Any]]] = {}
        for record in read().records:
            mine = rows.setdefault(record.experiment, {})
            mine.setdefault((record.row, record.preset), []).append(record)
        results = Path(self.env.srcdir) / "results"
        sections = []
        for experiment, found in sorted(rows.items()):
            self.env.note_dependency(str(results / experiment))
            section = nodes.section("", nodes.title("", experiment))
            section["names"].append(nodes.fully_normalize_name(f"{ALL}-{experiment}"))
            section["ids"].append(nodes.make_id(f"{ALL}-{experiment}"))
            self.state.document.note_explicit_target(section)
            lines = nodes.bullet_list()
            for (row, preset), records in sorted(found.items()):
                seeds = ", ".join(str(s) for s in sorted({r.seed for r in records}))
                code = ", ".join(sorted({r.revision for r in records}))
                day = max(str(r.created) for r in records)[:10]
                told = f": preset {preset}, seeds {seeds}; {day}, revision {code}"
                name = nodes.literal("", row)
                line = nodes.paragraph("", "", name, nodes.Text(told))
                lines += nodes.list_item("", line)
            section += lines
            sections.append(section)
        return sections


def connect(app: Any) -> None:
    """Register the directive."""
    app.add_directive("pcl-records", RecordList)
