"""The house rules: what importing costs, where imports may point, and that pcl/ is what
the notebooks say."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# DESIGN: data flows left to right; a module imports only from its left. Private modules
# serve everyone.
FLOW = (
    "names", "files", "provenance", "bessel", "vmf", "kernels", "losses", "generative", "images", "encoders", "features", "metrics", "retrieval", "training",
    "ledger", "heads", "trust", "embedding", "experiments", "plots", "cli",
)  # fmt: skip
HEAVY = (
    "torchvision", "timm", "PIL", "matplotlib", "seaborn", "nbdev", "IPython", "tqdm", "lightning", "lightning_fabric",
    "submitit", "faiss", "sklearn", "safetensors", "pyarrow",
)  # fmt: skip


def python(code: str, **env: str) -> str:
    """Run code in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_nothing_heavy() -> None:
    loaded = python("import sys, pcl; print(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == []


def test_every_module_imports_without_extras(root: Path) -> None:
    """The library proper needs torch, numpy and scipy only: everything else is refused
    at import."""
    names = [p.stem for p in (root / "pcl").glob("[a-z]*.py")]
    refuse = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
    load = f"import importlib; [importlib.import_module('pcl.' + name) for name in {names!r}]"
    python(refuse + "; " + load)


@pytest.mark.parametrize("what", ["pcl", "pcl.losses"])
def test_import_is_cheap(what: str) -> None:
    code = f"import torch, time; t = time.perf_counter(); import {what}; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(3)) <= 0.3


def imports_of(path: Path) -> set[str]:
    """The sibling modules a module imports, anywhere in it, if only to check types."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= (
                {node.module.split(".")[0]}
                if node.module
                else {alias.name for alias in node.names}
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "pcl."
        ):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("pcl.")
            }
    return found


def test_imports_point_left(root: Path) -> None:
    for path in (root / "pcl").glob("[a-z]*.py"):
        assert path.stem in FLOW, f"{path.stem} has no place in the flow {FLOW}"
        public = {name for name in imports_of(path) if not name.startswith("_")}
        right = [name for name in public if FLOW.index(name) >= FLOW.index(path.stem)]
        assert right == [], f"{path.stem} imports from its right: {right}"


def test_the_flow_is_the_one_that_contributors_read(root: Path) -> None:
    assert f"`{' -> '.join(FLOW)}`" in (root / "CONTRIBUTING.md").read_text()


def test_package_is_a_fresh_export(root: Path, tmp_path: Path) -> None:
    for name in ("nbs", "pcl"):
        shutil.copytree(
            root / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"),
        )
    shutil.copy(root / "settings.ini", tmp_path)
    for path in (tmp_path / "pcl").glob("[a-z]*.py"):
        path.unlink()
    export = "from nbdev.doclinks import nbdev_export; nbdev_export()"
    subprocess.run(
        [sys.executable, "-c", export], cwd=tmp_path, check=True, capture_output=True
    )
    committed = {p.name: p.read_text() for p in (root / "pcl").glob("*.py")}
    exported = {p.name: p.read_text() for p in (tmp_path / "pcl").glob("*.py")}
    assert sorted(committed) == sorted(exported)
    assert [name for name in committed if committed[name] != exported[name]] == [], (
        "run nbdev_export"
    )


def test_notebooks_are_clean(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "settings.ini", tmp_path)
    shutil.copytree(
        root / "nbs",
        tmp_path / "nbs",
        ignore=shutil.ignore_patterns(".ipynb_checkpoints"),
    )
    subprocess.run(
        [sys.executable, "-c", "from nbdev.clean import nbdev_clean; nbdev_clean()"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    for path in sorted((root / "nbs").glob("*.ipynb")):
        assert path.read_text() == (tmp_path / "nbs" / path.name).read_text(), (
            f"run nbdev_clean --fname nbs/{path.name}"
        )
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell.get("outputs") for cell in cells), (
            f"{path.name} carries outputs; the build makes them"
        )


def test_everything_exported_has_a_docstring_and_hints(root: Path) -> None:
    for path in (root / "pcl").glob("[a-z]*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(
                node, ast.FunctionDef | ast.ClassDef
            ) and not node.name.startswith("_"):
                assert ast.get_docstring(node), (
                    f"{path.name}: {node.name} has no docstring"
                )
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                bare = [
                    a.arg
                    for a in node.args.args + node.args.kwonlyargs
                    if a.annotation is None
                ]
                assert node.returns is not None and bare == [], (
                    f"{path.name}: {node.name} lacks type hints {bare}"
                )


@pytest.mark.parametrize(
    "target", ["reproduce", "test", "book", "data", "serve", "bench", "clean"]
)
def test_make_explains_itself(root: Path, target: str) -> None:
    said = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"make {target}" in said


def test_make_names_a_missing_python_in_one_line(root: Path, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, tmp_path)
    done = subprocess.run(
        ["make", "--no-print-directory", "setup", "PYTHON=no-such-python"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert (
        done.stdout.startswith("Missing: no-such-python")
        and done.stdout.count("\n") == 1
    )


def shown_lines(path: Path) -> list[str]:
    """The lines of code of a notebook, or of a module without what nbdev writes into it."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        return [line for source in sources for line in source.splitlines()]
    _, _, code = path.read_text().partition("\n# %% ../nbs/")
    return code.splitlines()


def test_code_fits_the_page(root: Path) -> None:
    for path in [*(root / "nbs").glob("*.ipynb"), *(root / "pcl").rglob("[a-z]*.py")]:
        long = [line for line in shown_lines(path) if len(line) > 88]
        assert long == [], f"{path.name}: {long[0]}"
