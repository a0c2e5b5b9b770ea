"""The book's machinery: nbdev directives become tags, and a build refuses what a reader
would stumble over."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml


@pytest.fixture(scope="module")
def extension(root: Path) -> ModuleType:
    """The local Sphinx extension, loaded from its file."""
    spec = importlib.util.spec_from_file_location(
        "pcl_book", root / "book" / "pcl_book.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "code", "tags"),
    [
        ("#| export\nx = 1\n", "x = 1\n", []),
        ("#| hide\nimport os\n", "import os\n", ["remove-cell"]),
        ("#| default_exp vmf\n", "", ["remove-cell"]),
        ("#| echo: false\n#| export\nx\n", "x\n", ["remove-input"]),
        ("#| eval: false\nx\n", "x\n", ["skip-execution"]),
        ("#|export losses\nx\n", "x\n", []),
        ("# a comment\n#| export\n", "# a comment\n#| export\n", []),
    ],
)
def test_directives_become_tags(
    extension: ModuleType, source: str, code: str, tags: list[str]
) -> None:
    cell = {"cell_type": "code", "source": source, "metadata": {}}
    extension.translate_cell(cell)
    assert cell["source"] == code and cell["metadata"]["tags"] == tags


def test_every_directive_in_the_chapters_is_understood(
    root: Path, extension: ModuleType
) -> None:
    for path in (root / "nbs").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                cell = {**cell, "metadata": {}}
                extension.translate_cell(cell)
                assert "#|" not in cell["source"], (
                    f"{path.name}: a directive below the first line of code"
                )


def test_the_table_of_contents_lists_every_chapter_once(root: Path) -> None:
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    listed = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    there = {
        f"nbs/{p.stem}"
        for p in (root / "nbs").iterdir()
        if p.suffix in (".ipynb", ".md")
    }
    assert sorted(listed) == sorted(there)


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the small book in `folder` the way `make book` builds the real one."""
    words = [
        str(Path(sys.executable).parent / "jupyter-book"),
        "build",
        "-W",
        "--keep-going",
        "--all",
        ".",
    ]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "builds"),
    [
        ("A page with $x^2$ and a link to [itself](intro.md).", True),
        ("A [broken link](nowhere.md).", False),
        ("A reference to {eq}`eq-that-is-not-there`.", False),
        ("A citation of {cite}`nobody1999`.", False),
    ],
)
def test_what_is_broken_fails_the_build(
    root: Path, tmp_path: Path, text: str, builds: bool
) -> None:
    for name in ("_config.yml", "references.bib"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(
        root / "book", tmp_path / "book", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: intro\n")
    (tmp_path / "intro.md").write_text(
        f"# Title\n\n{text}\n\n```{{bibliography}}\n```\n"
    )
    done = build(tmp_path)
    assert (done.returncode == 0) == builds, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_failing_cell_fails_the_build(root: Path, tmp_path: Path) -> None:
    for name in ("_config.yml", "references.bib"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(
        root / "book", tmp_path / "book", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: intro\n")
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# Title"},
        {
            "cell_type": "code",
            "id": "b",
            "metadata": {},
            "source": "assert 1 == 2",
            "outputs": [],
            "execution_count": None,
        },
    ]
    kernel = {
        "kernelspec": {
            "display_name": "python3",
            "language": "python",
            "name": "python3",
        }
    }
    (tmp_path / "intro.ipynb").write_text(
        json.dumps(
            {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        )
    )
    done = build(tmp_path)
    assert done.returncode != 0 and "AssertionError" in done.stdout + done.stderr
