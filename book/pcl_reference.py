"""The reference: one page per module of pcl, written from its source, with every exported name on it.

The sources are read, not imported, so that a page needs nothing but the file: names come from `__all__`, meanings of
parameters from the comments beside them, and the chapter that defines a name from the line that nbdev leaves above each
exported cell.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

# A module in a subpackage lies one folder further from the chapters.
CHAPTER = re.compile(r"^# %% (?:\.\./)+nbs/(?P<stem>[\w.-]+)\.ipynb")
SPECIAL = re.compile(
    r"([\\*_{}\[\]<>$|#~^]|\.(?=\w))"
)  # a dot inside a word could make it a link
LONGEST_VALUE = 160  # characters of a constant that are still shown
ONE_LINE = 100  # longest signature on one line
SECTIONS = ("Args:", "Attributes:", "Returns:", "Example:")  # what export adds
PROMPT = ">>> "


@dataclass
class Parameter:
    """A parameter or a field, with what stands beside it."""

    name: str  # with its stars, if it has any
    kind: str  # the annotation
    default: str | None
    meaning: str


@dataclass
class Entry:
    """An exported name."""

    name: str
    what: str  # function, class or constant
    chapter: str  # stem of the notebook that defines it
    doc: str
    example: str = ""  # as typed into an interpreter
    parameters: list[Parameter] = field(default_factory=list)
    returns: Parameter | None = None
    members: list[Entry] = field(default_factory=list)
    value: str = ""


@dataclass
class Module:
    """A parsed module of the package."""

    name: str  # below the package: `losses`, or `published.sphere` in a subpackage
    doc: str
    entries: list[Entry]
    chapters: list[str]  # stems of all notebooks that feed it, in order


class Source:
    """One file: its tree, its comments by line, and the chapter of each line."""

    def __init__(
        self,
        path: Path,
        name: str,  # of the module, below the package
    ) -> None:
        text = path.read_text(encoding="utf-8")
        self.name, self.lines, self.tree = name, text.splitlines(), ast.parse(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {
            t.start[0]: t.string.lstrip("# ")
            for t in tokens
            if t.type == tokenize.COMMENT
        }
        self.definitions: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [getattr(node, "target", None)]
            )
            names = [
                getattr(node, "name", None),
                *(t.id for t in targets if isinstance(t, ast.Name)),
            ]
            self.definitions |= {name: node for name in names if name}

    def exported(self) -> list[str]:
        """The names in `__all__`."""
        node = self.definitions.get("__all__")
        return ast.literal_eval(node.value) if isinstance(node, ast.Assign) else []

    def imported(self) -> dict[str, tuple[str, str]]:
        """Where in the package imported names come from: a module and the name there."""
        found = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                parts = node.module.split(".") if node.module else []
                if node.level:
                    parts = ["pcl", *self.name.split(".")[: -node.level], *parts]
                module = ".".join(parts).removeprefix("pcl.")
                found |= {a.asname or a.name: (module, a.name) for a in node.names}
        return found

    def chapters(self) -> list[str]:
        """Stems of the notebooks that the file's cells come from, in order."""
        matches = (CHAPTER.match(text) for text in self.lines)
        return list(dict.fromkeys(match["stem"] for match in matches if match))

    def chapter(self, line: int) -> str:
        """Stem of the notebook that the cell around a line comes from."""
        above = (CHAPTER.match(text) for text in reversed(self.lines[:line]))
        return next((match["stem"] for match in above if match), "")

    def meaning(self, line: int, last: int | None = None) -> str:
        """The comments on a line, or on all up to the last one, or the indented block
        right above, without remarks for tools."""
        beside = (self.comments.get(n, "") for n in range(line, (last or line) + 1))
        said = [
            re.sub(r"\s*# (?:noqa|type:).*", "", comment)
            for comment in beside
            if not comment.startswith(("type:", "noqa", "fmt:"))
        ]
        return " ".join(filter(None, said)) or self.indented(line)

    def indented(self, line: int) -> str:
        """The block of comment lines with a line's own indentation that ends right
        above it."""
        text = self.lines[line - 1]
        start = text[: len(text) - len(text.lstrip())] + "# "
        block: list[str] = []
        while len(start) > 2 and self.lines[line - 2].startswith(start):
            block.insert(0, self.lines[line - 2].strip().lstrip("# "))
            line -= 1
        return " ".join(block)

    def above(self, line: int) -> str:
        """The block of comments that ends right above a line."""
        block: list[str] = []
        while (text := self.lines[line - 2]).startswith("# ") and not CHAPTER.match(
            text
        ):
            block.insert(0, text.lstrip("# "))
            line -= 1
        return " ".join(block)


def split_doc(
    doc: str,  # a docstring without its indentation
) -> tuple[str, str]:
    """What a docstring says, and its example, without the sections in between."""
    lines = doc.splitlines()
    marks = [i for i, x in enumerate(lines) if x in SECTIONS or x.startswith(PROMPT)]
    said = lines[: marks[0]] if marks else lines
    tried = next(
        (i for i, x in enumerate(lines) if x.lstrip().startswith(PROMPT)), None
    )
    example = "" if tried is None else textwrap.dedent("\n".join(lines[tried:]))
    return "\n".join(said).strip(), example.strip()


def parameters_of(
    source: Source, function: ast.FunctionDef, skip_first: bool = False
) -> list[Parameter]:
    """The parameters of a function, in the order of its signature; a comment on the
    line of `def` is about the result."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(
        args.defaults
    )
    found = [("", arg, default) for arg, default in zip(plain, defaults, strict=True)][
        1 if skip_first else 0 :
    ]
    found += (
        [("*", args.vararg, None)]
        if args.vararg
        else [("", ast.arg("*"), None)]
        if args.kwonlyargs
        else []
    )
    found += [
        ("", arg, default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [("**", args.kwarg, None)] if args.kwarg else []
    return [
        Parameter(
            stars + arg.arg,
            ast.unparse(arg.annotation) if arg.annotation else "",
            ast.unparse(default) if default is not None else None,
            source.meaning(line, (default or arg).end_lineno)
            if (line := getattr(arg, "lineno", function.lineno)) > function.lineno
            else "",
        )
        for stars, arg, default in found
    ]


def fields_of(source: Source, node: ast.ClassDef) -> list[Parameter]:
    """The annotated fields of a dataclass or a named tuple."""
    found = []
    for f in node.body:
        if isinstance(f, ast.AnnAssign) and not (
            kind := ast.unparse(f.annotation)
        ).startswith("ClassVar"):
            default = ast.unparse(f.value) if f.value else None
            found.append(
                Parameter(
                    ast.unparse(f.target),
                    kind,
                    default,
                    source.meaning(f.lineno, f.end_lineno),
                )
            )
    return found


def function_entry(
    source: Source, node: ast.FunctionDef, method: bool = False
) -> Entry:
    """An entry for a function, or for a method without its first parameter."""
    marks = [ast.unparse(d) for d in node.decorator_list]
    bound = method and "staticmethod" not in marks
    doc, example = split_doc(ast.get_docstring(node) or "")
    what = "property" if "property" in marks else "method" if method else "function"
    entry = Entry(
        node.name,
        what,
        source.chapter(node.lineno),
        doc,
        example,
        parameters_of(source, node, bound),
    )
    if node.returns is not None:
        entry.returns = Parameter(
            "",
            ast.unparse(node.returns),
            None,
            source.meaning(node.returns.end_lineno or node.lineno),
        )
    return entry


Classes = dict[tuple[str, str], tuple[Source, ast.ClassDef]]  # by module and name


def base_of(
    source: Source, node: ast.ClassDef, classes: Classes
) -> tuple[Source, ast.ClassDef] | None:
    """The first base class that is defined in the package, if one is."""
    origin = source.imported()
    for base in node.bases:
        if isinstance(base, ast.Name):
            found = classes.get(origin.get(base.id, (source.name, base.id)))
            if found is not None and found[1] is not node:
                return found
    return None


def class_entry(source: Source, node: ast.ClassDef, classes: Classes) -> Entry:
    """An entry for a class: what it is built from, and its public members."""
    said = split_doc(ast.get_docstring(node) or "")
    entry = Entry(node.name, "class", source.chapter(node.lineno), *said)
    functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
    entry.members = [
        function_entry(source, f, method=True)
        for f in functions
        if not f.name.startswith("_")
    ]
    where, at = source, node
    inherited: dict[str, Parameter] = {}  # fields of a dataclass, the base's first
    while True:  # the constructor may be that of a base class in the package
        inherited = {p.name: p for p in fields_of(where, at)} | inherited
        init = next(
            (
                f
                for f in at.body
                if isinstance(f, ast.FunctionDef) and f.name == "__init__"
            ),
            None,
        )
        if init is not None:
            entry.parameters = parameters_of(where, init, skip_first=True)
            return entry
        base = base_of(where, at, classes)
        if base is None:
            entry.parameters = list(inherited.values())
            return entry
        where, at = base


def constant_entry(source: Source, name: str, node: ast.stmt) -> Entry:
    """An entry for a constant, with its value where that is short."""
    value = (
        ast.unparse(node.value)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        else ""
    )
    doc = source.meaning(node.end_lineno or node.lineno) or source.above(node.lineno)
    return Entry(
        name,
        "constant",
        source.chapter(node.lineno),
        doc,
        value=value if len(value) <= LONGEST_VALUE else "",
    )


def read_package(
    folder: Path,  # of the package
) -> list[Module]:
    """Every module that exports something; a name without a definition is an error."""
    paths = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in folder.rglob("[a-z]*.py")
    }
    sources = [Source(paths[name], name) for name in sorted(paths)]
    classes = {
        (s.name, n.name): (s, n)
        for s in sources
        for n in s.tree.body
        if isinstance(n, ast.ClassDef)
    }
    modules = []
    for source in sources:
        entries = []
        for name in source.exported():
            node = source.definitions.get(name)
            if node is None:
                raise ValueError(
                    f"pcl.{source.name} exports {name}, which it does not define"
                )
            if isinstance(node, ast.FunctionDef):
                entries.append(function_entry(source, node))
            elif isinstance(node, ast.ClassDef):
                entries.append(class_entry(source, node, classes))
            else:
                entries.append(constant_entry(source, name, node))
        if entries:
            doc = ast.get_docstring(source.tree) or ""
            modules.append(Module(source.name, doc, entries, source.chapters()))
    return modules


def escaped(text: str) -> str:
    """Text that Markdown leaves alone; what stands between backquotes stays code."""
    parts = re.split(r"(`[^`]+`)", " ".join(text.split()))
    return "".join(
        part if i % 2 else SPECIAL.sub(r"\\\1", part) for i, part in enumerate(parts)
    )


def signature(entry: Entry) -> str:
    """How to call it."""
    if entry.what == "constant":
        return f"{entry.name} = {entry.value}" if entry.value else entry.name
    kinds = [p.name + (f": {p.kind}" if p.kind else "") for p in entry.parameters]
    words = [
        k + (f" = {p.default}" if p.default is not None else "")
        for k, p in zip(kinds, entry.parameters, strict=True)
    ]
    after = f" -> {entry.returns.kind}" if entry.returns else ""
    if entry.what == "property":
        return entry.name + after
    line = f"{entry.name}({', '.join(words)}){after}"
    return (
        line
        if len(line) <= ONE_LINE
        else f"{entry.name}(\n" + "".join(f"    {w},\n" for w in words) + f"){after}"
    )


def explained(entry: Entry, indent: str = "") -> list[str]:
    """One list item for each parameter, and for the result, that has an explanation."""
    items = [
        f"{indent}- `{p.name}`: {escaped(p.meaning)}"
        for p in entry.parameters
        if p.meaning
    ]
    if entry.returns is not None and entry.returns.meaning:
        items.append(f"{indent}- returns: {escaped(entry.returns.meaning)}")
    return items


def label(module: str, entry: Entry) -> str:
    """What the place of a name is called in links; the kind tells names apart that
    differ in capitals only."""
    return f"ref-{module.replace('.', '-')}-{entry.what}-{entry.name}"


def entry_text(module: str, entry: Entry) -> str:
    """The section on one name."""
    lines = [
        f"({label(module, entry)})=",
        f"## {escaped(entry.name)}",
        "",
        "```python",
        signature(entry),
        "```",
        "",
    ]
    lines += [escaped(entry.doc), ""] if entry.doc else []
    lines += [*explained(entry), ""]
    lines += ["```pycon", entry.example, "```", ""] if entry.example else []
    lines += ["Members:", ""] if entry.members else []
    for member in entry.members:
        lines += [
            f"- `{member.name}` ({member.what}): {escaped(member.doc)}",
            "",
            "  ```python",
        ]
        lines += [f"  {line}" for line in signature(member).splitlines()] + [
            "  ```",
            "",
            *explained(member, "  "),
            "",
        ]
        if member.example:
            shown = ["```pycon", *member.example.splitlines(), "```"]
            lines += [*(f"  {line}".rstrip() for line in shown), ""]
    lines.append(f"A {entry.what} of {{doc}}`/nbs/{entry.chapter}`.")
    return "\n".join(lines)


def module_text(module: Module) -> str:
    """The page of a module."""
    chapters = ", ".join(f"{{doc}}`/nbs/{stem}`" for stem in module.chapters)
    head = [
        f"# {escaped(f'pcl.{module.name}')}",
        "",
        escaped(module.doc),
        "",
        f"Derived and tested in {chapters}.",
        "",
    ]
    return (
        "\n".join(head)
        + "\n"
        + "\n\n".join(entry_text(module.name, entry) for entry in module.entries)
        + "\n"
    )


def names_text(modules: list[Module]) -> str:
    """A list of every exported name, by module."""
    lines = []
    for module in modules:
        names = ", ".join(
            f"{{ref}}`{e.name} <{label(module.name, e)}>`" for e in module.entries
        )
        lines += [
            f"{{doc}}`pcl.{module.name} </reference/{module.name}>`",
            f": {names}",
            "",
        ]
    return "\n".join(lines)


def write_pages(
    root: Path,  # the project
) -> list[Module]:
    """Write a page for every module into the folder `reference`, which holds nothing
    else, and a list of all names."""
    modules, target = read_package(root / "pcl"), root / "reference"
    texts = {f"{module.name}.md": module_text(module) for module in modules}
    texts["names.txt"] = names_text(modules)
    target.mkdir(exist_ok=True)
    for stranger in {path.name for path in target.iterdir()} - set(texts):
        (target / stranger).unlink()
    for name, text in texts.items():
        page = target / name
        # A page that stays as it is keeps its date, so Sphinx need not read it again.
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")
    return modules
