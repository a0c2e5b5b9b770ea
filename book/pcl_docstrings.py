"""What stands in comments beside parameters goes into docstrings, where `help` and editors look.

nbdev writes a module as the chapter has it. This step comes after it, and changes docstrings only: after the sentences
come the parameters, the result, and the example, each under its heading. An `__init__` without a word gets one, because
`help` would show that of its base. Doing it twice changes nothing.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

from pcl_reference import (
    Classes,
    Entry,
    Parameter,
    Source,
    class_entry,
    function_entry,
    split_doc,
)

WIDTH = 88
OPENING = re.compile(r"(?P<prefix>[rRuU]?)(?P<quotes>\"{3}|'{3}|\"|')")


def wrapped(text: str, indent: str) -> str:
    """A line of a section, and the lines it runs into, indented further."""
    return textwrap.fill(
        text,
        WIDTH - len(indent),
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def listed(parameter: Parameter) -> str:
    """A parameter with its type and its meaning, or the result with its own."""
    kind = f" ({parameter.kind})" if parameter.name and parameter.kind else ""
    name = parameter.name + kind or parameter.kind
    return f"{name}: {parameter.meaning}" if parameter.meaning else name


def sections(
    entry: Entry,
    heading: str,  # of the parameters
    indent: str,  # of the docstring
) -> list[str]:
    """The sections below the sentences: those that have something to say."""
    found = []
    if any(p.meaning for p in entry.parameters):
        lines = [wrapped(listed(p), indent) for p in entry.parameters if p.name != "*"]
        found.append("\n".join([heading, *lines]))
    if entry.returns and entry.returns.meaning:
        found.append("\n".join(["Returns:", wrapped(listed(entry.returns), indent)]))
    if entry.example:
        found.append("Example:\n" + textwrap.indent(entry.example, "    "))
    return found


def docstring_of(node: ast.AST) -> ast.Constant | None:
    """The docstring as it stands in the file, if it starts a line of its own."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return None
    first = node.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return None
    alone = first.lineno > node.lineno and isinstance(first.value.value, str)
    return first.value if alone else None


def rewritten(
    source: Source,
    node: ast.Constant,  # the docstring
    entry: Entry,
    heading: str,
) -> list[str]:
    """The lines of a docstring with its sections."""
    lines = source.lines[node.lineno - 1 : node.end_lineno]
    indent = " " * node.col_offset
    literal = "\n".join(line.removeprefix(indent) for line in lines)
    opening = OPENING.match(literal)
    added = sections(entry, heading, indent)
    if opening is None or not added:
        return lines
    prefix, quotes = opening["prefix"], opening["quotes"]
    body = literal[opening.end() :].rstrip()
    if not body.endswith(quotes):  # a remark for a tool behind it
        return lines
    said, example = split_doc(body.removesuffix(quotes))  # as typed, escapes kept
    if "r" not in prefix.lower():
        added = [part.replace("\\", "\\\\") for part in added]
    if example:
        added[-1] = "Example:\n" + textwrap.indent(example, "    ")
    text = "\n\n".join([f'{prefix}"""{said}', *added]) + '\n"""'
    return [f"{indent}{line}".rstrip() for line in text.split("\n")]


def documented(
    source: Source, classes: Classes
) -> list[tuple[ast.Constant, Entry, str]]:
    """The docstrings of public functions, classes and methods, with what to add."""
    found = []

    def note(node: ast.AST, entry: Entry, heading: str = "Args:") -> None:
        doc = docstring_of(node)
        if doc is not None:
            found.append((doc, entry, heading))

    for node in source.tree.body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, ast.FunctionDef):
            note(node, function_entry(source, node))
        elif isinstance(node, ast.ClassDef):
            called = "Protocol" not in map(ast.unparse, node.bases)
            entry = class_entry(source, node, classes)
            note(node, entry, "Args:" if called else "Attributes:")
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name[0] != "_":
                    note(member, function_entry(source, member, method=True))
    return found


INIT = '"""The class lists the parameters."""'


def silent_inits(source: Source) -> list[tuple[int, str]]:
    """Where a class is built without a word, so that `help` would show its base's: the
    line after the signature, counted from 0, and its indent."""
    found = []
    for node in ast.walk(source.tree):
        bare = isinstance(node, ast.FunctionDef) and node.name == "__init__"
        if not bare or ast.get_docstring(node) is not None:
            continue
        first = node.body[0]
        line = first.lineno - 1
        while line and source.lines[line - 1].strip()[:1] in ("", "#"):
            line -= 1
        if line >= node.lineno:  # not behind the colon
            found.append((line, " " * first.col_offset))
    return found


def rewrite(
    folder: Path,  # of the package
) -> list[str]:  # the modules that changed
    """Give every docstring of the package its sections."""
    paths = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in sorted(folder.rglob("[a-z]*.py"))
    }
    sources = {name: Source(path, name) for name, path in paths.items()}
    classes = {
        (name, node.name): (source, node)
        for name, source in sources.items()
        for node in source.tree.body
        if isinstance(node, ast.ClassDef)
    }
    changed = []
    for name, source in sources.items():
        lines = list(source.lines)
        edits = [
            (doc.lineno - 1, doc.end_lineno, rewritten(source, doc, entry, heading))
            for doc, entry, heading in documented(source, classes)
        ]
        edits += [(at, at, [indent + INIT]) for at, indent in silent_inits(source)]
        for start, end, new in sorted(edits, reverse=True):
            lines[start:end] = new
        old = paths[name].read_text(encoding="utf-8")
        text = "\n".join(lines) + ("\n" if old.endswith("\n") else "")
        if text != old:
            paths[name].write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    rewrite(Path(sys.argv[1] if len(sys.argv) > 1 else "pcl"))
