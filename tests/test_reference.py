"""The reference: every exported name has its entry, pages link both ways with the
chapters, and they build without warnings."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn


@pytest.fixture(scope="module")
def reference(root: Path) -> ModuleType:
    """The generator, loaded from its file."""
    spec = importlib.util.spec_from_file_location(
        "pcl_reference", root / "book" / "pcl_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules["pcl_reference"] = importlib.util.module_from_spec(
        spec
    )  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(root: Path) -> dict[str, list[str]]:
    """The names that each module exports, as Python sees them."""
    paths = [p.relative_to(root / "pcl") for p in (root / "pcl").rglob("[a-z]*.py")]
    names = [".".join(p.with_suffix("").parts) for p in paths]
    modules = {name: importlib.import_module(f"pcl.{name}") for name in sorted(names)}
    return {
        name: list(module.__all__) for name, module in modules.items() if module.__all__
    }


def test_every_exported_name_has_an_entry_and_a_chapter(
    root: Path, reference: ModuleType, exported: dict
) -> None:
    modules = {m.name: m for m in reference.read_package(root / "pcl")}
    assert {
        name: [e.name for e in m.entries] for name, m in modules.items()
    } == exported
    for module in modules.values():
        for entry in module.entries:
            assert (root / "nbs" / f"{entry.chapter}.ipynb").exists(), (
                f"{module.name}.{entry.name}: no chapter"
            )
            assert entry.doc or entry.what == "constant", (
                f"{module.name}.{entry.name} has no docstring"
            )


def has_no_constructor(thing: type) -> bool:
    """Whether it only says what others have to offer."""
    return getattr(thing, "_is_protocol", False) or thing.__init__ is nn.Module.__init__


def test_entries_agree_with_python(root: Path, reference: ModuleType) -> None:
    """Parameters and defaults, read from the text, are those of the running function or
    constructor."""
    compared = 0
    for module in reference.read_package(root / "pcl"):
        live = importlib.import_module(f"pcl.{module.name}")
        for entry in module.entries:
            thing = getattr(live, entry.name)
            if entry.what == "constant" or (
                inspect.isclass(thing)
                and (issubclass(thing, BaseException) or has_no_constructor(thing))
            ):
                continue
            expected = [p for p in inspect.signature(thing).parameters.values()]
            listed = [p for p in entry.parameters if p.name != "*"]
            assert [p.name.lstrip("*") for p in listed] == [p.name for p in expected], (
                f"{module.name}.{entry.name}"
            )
            assert [p.default is None for p in listed] == [
                p.default is p.empty for p in expected
            ], entry.name
            compared += 1
    assert compared > 100


def test_what_stands_beside_a_parameter_is_read(
    root: Path, tmp_path: Path, reference: ModuleType
) -> None:
    (tmp_path / "toy.py").write_text('''"""A toy | with *stars*."""

__all__ = ["LIMIT", "Box", "grow", "Shape"]

# %% ../nbs/01_toy.ipynb #abc
LIMIT = 3  # no more than this
# What grows,
# and how.
Shape = tuple[int, int]


class Base:
    def __init__(
        self,
        size: int,  # how large
        *,
        name: str = "x",  # noqa: A002
    ) -> None:
        pass


class Box(Base):
    "Holds $5$ things in {braces}."

    @property
    def full(self) -> bool:  # never
        "Whether it is."


# %% ../nbs/02_toy.ipynb #def
def grow(box: Box, *by: int) -> Box:  # the same box
    "Make `a_b` larger."
''')
    (module,) = reference.read_package(tmp_path)
    limit, box, grow, shape = module.entries
    assert (
        module.chapters == ["01_toy", "02_toy"]
        and limit.doc == "no more than this"
        and shape.doc == "What grows, and how."
    )
    assert [(p.name, p.default, p.meaning) for p in box.parameters] == [
        ("size", None, "how large"), ("*", None, ""), ("name", "'x'", ""),
    ]  # fmt: skip
    assert [(m.name, m.what, m.returns.meaning) for m in box.members] == [
        ("full", "property", "never")
    ]
    assert [p.meaning for p in grow.parameters] == [
        "",
        "",
    ] and grow.returns.meaning == "the same box"
    assert reference.signature(grow) == "grow(box: Box, *by: int) -> Box"
    text = reference.module_text(module)
    for written in (
        r"A toy \| with \*stars\*",
        r"\$5\$ things in \{braces\}",
        "Make `a_b` larger",
        "{doc}`/nbs/02_toy`",
    ):
        assert written in text
    (tmp_path / "toy.py").write_text('__all__ = ["ghost"]\n')
    with pytest.raises(ValueError, match="ghost"):
        reference.read_package(tmp_path)


def cell(kind: str, source: str) -> dict:
    """A cell of a toy chapter."""
    code = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "id": "a", "metadata": {}, "source": source, **code}


def test_modules_of_a_subpackage_are_read_where_nbdev_puts_them(
    root: Path, tmp_path: Path, reference: ModuleType
) -> None:
    shutil.copy(root / "settings.ini", tmp_path)
    (tmp_path / "pcl").mkdir()
    (tmp_path / "nbs").mkdir()
    chapters = {  # a module's first chapter names it as its default
        "110_ball": [
            "#| default_exp ball",
            "#| export\nclass Ball:\n    'Round.'\n    def __init__(self, size: int):\n        pass",
        ],
        "115_flat": [
            "#| default_exp published.ball",
            "#| export\nfrom pcl import ball",
            "#| export\nclass Ball:\n    'The same name, elsewhere.'",
        ],
        "120_more": [
            "#| export published.ball\nfrom pcl.ball import Ball as Round",
            "#| export published.ball\nclass FlatBall(Round):\n    'Not so round.'",
        ],
        "130_private": [
            "#| export published.ball\ndef _squash() -> None:\n    pass",
        ],
    }
    for stem, code in chapters.items():
        cells = [
            cell("markdown", f"# {stem}\n> About it."),
            *(cell("code", c) for c in code),
        ]
        notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        (tmp_path / "nbs" / f"{stem}.ipynb").write_text(json.dumps(notebook))
    export = "from nbdev.doclinks import nbdev_export; nbdev_export()"
    subprocess.run([sys.executable, "-c", export], cwd=tmp_path, check=True)

    modules = {m.name: m for m in reference.write_pages(tmp_path)}
    assert list(modules) == ["ball", "published.ball"]
    assert modules["published.ball"].chapters == [
        "115_flat",
        "120_more",
        "130_private",
    ]
    flat = next(e for e in modules["published.ball"].entries if e.name == "FlatBall")
    assert [p.name for p in flat.parameters] == ["size"], "from the right base class"
    page = (tmp_path / "reference" / "published.ball.md").read_text()
    for written in (
        r"# pcl\.published\.ball",
        "About it.",
        "{doc}`/nbs/115_flat`, {doc}`/nbs/120_more`, {doc}`/nbs/130_private`",
    ):
        assert written in page
    names = (tmp_path / "reference" / "names.txt").read_text()
    assert "{doc}`pcl.published.ball </reference/published.ball>`" in names
    assert "{ref}`FlatBall <ref-published-ball-class-FlatBall>`" in names


def test_a_page_of_the_reference_that_stays_as_it_is_keeps_its_date(
    tmp_path: Path, reference: ModuleType
) -> None:
    (tmp_path / "pcl").mkdir()
    (tmp_path / "pcl" / "toy.py").write_text('__all__ = ["A"]\nA = 1\n')
    reference.write_pages(tmp_path)
    page, stranger = (tmp_path / "reference" / n for n in ("toy.md", "old.md"))
    stranger.write_text("# Gone\n")
    before = page.stat().st_mtime_ns
    reference.write_pages(tmp_path)
    assert page.stat().st_mtime_ns == before and not stranger.exists()
    (tmp_path / "pcl" / "toy.py").write_text('__all__ = ["A"]\nA = 2\n')
    reference.write_pages(tmp_path)
    assert "A = 2" in page.read_text()


@pytest.fixture(scope="module")
def built(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book of the reference alone: its chapters are empty, but export where the real
    ones do."""
    book = tmp_path_factory.mktemp("book")
    for name in ("_config.yml", "_toc.yml", "references.bib"):
        shutil.copy(root / name, book)
    for name in ("book", "pcl"):
        shutil.copytree(
            root / name, book / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    (book / "nbs").mkdir()
    for path in (root / "nbs").glob("*.md"):
        (book / "nbs" / path.name).write_text(
            path.read_text()
            if path.stem in ("bibliography", "reference")
            else f"# {path.stem}\n"
        )
    kernel = {
        "kernelspec": {
            "display_name": "python3",
            "language": "python",
            "name": "python3",
        }
    }
    for path in (root / "nbs").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = [
            c
            for c in cells
            if re.match(r"#\|\s*(default_exp|export)[ \t]+\w+", "".join(c["source"]))
        ]
        cells = [
            {
                "cell_type": "markdown",
                "id": "a",
                "metadata": {},
                "source": f"# {path.stem}",
            },
            *code,
        ]
        notebook = {
            "cells": cells,
            "metadata": kernel,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (book / "nbs" / path.name).write_text(json.dumps(notebook))
    config = (
        (book / "_config.yml")
        .read_text()
        .replace("execute_notebooks: force", 'execute_notebooks: "off"')
    )
    (book / "_config.yml").write_text(config)
    words = [
        str(Path(sys.executable).parent / "jupyter-book"),
        "build",
        "-W",
        "--keep-going",
        "--all",
        ".",
    ]
    done = subprocess.run(words, cwd=book, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return book / "_build" / "html"


def article(page: Path) -> str:
    """The main part of a page."""
    match = re.search(
        r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert match is not None
    return match[0]


def test_every_exported_name_is_in_the_built_pages(
    root: Path, built: Path, reference: ModuleType, exported: dict[str, list[str]]
) -> None:
    index = article(built / "nbs" / "reference.html")
    entries = {
        (m.name, e.name): e
        for m in reference.read_package(root / "pcl")
        for e in m.entries
    }
    for module, names in exported.items():
        text = article(built / "reference" / f"{module}.html")
        headings = [
            unescape(re.sub(r"<.*?>", "", h)).rstrip("#")
            for h in re.findall(r"<h2>(.*?)</h2>", text)
        ]
        assert headings == names
        assert 'href="http' not in text, (
            "a dot between two words was taken for an address"
        )
        assert "{doc}" not in text and "{ref}" not in text and "\\_" not in text
        for name in names:
            anchor = (
                reference.label(module, entries[module, name]).lower().replace("_", "-")
            )
            assert (
                f'id="{anchor}"' in text
                and f'href="../reference/{module}.html#{anchor}"' in index
            )


def test_pages_and_chapters_link_to_each_other(
    built: Path, root: Path, reference: ModuleType
) -> None:
    for module in reference.read_package(root / "pcl"):
        page = article(built / "reference" / f"{module.name}.html")
        for chapter in module.chapters:
            assert f'href="../nbs/{chapter}.html"' in page
            assert f'href="../reference/{module.name}.html"' in article(
                built / "nbs" / f"{chapter}.html"
            )
