"""The house rules: what importing costs, where imports may point, and that pcl/ is what
the notebooks say."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

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
    loaded = python("import sys, pcl; dir(pcl); print(*sys.modules)").split()
    assert [n for n in (*HEAVY, "torch", "numpy", "scipy") if n in loaded] == []
    ours = {n for n in loaded if n.startswith("pcl.")}
    assert ours == {"pcl._front"}, "a module of ours is loaded before it is asked for"


def test_every_module_imports_without_extras(root: Path) -> None:
    """The library proper needs torch, numpy and scipy only: everything else is refused
    at import."""
    names = list(modules(root))
    refuse = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}))"
    load = f"import importlib; [importlib.import_module('pcl.' + name) for name in {names!r}]"
    python(refuse + "; " + load)


@pytest.mark.parametrize("what", ["pcl", "pcl.losses"])
def test_import_is_cheap(what: str) -> None:
    code = f"import torch, time; t = time.process_time(); import {what}; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) <= 0.3


def layers(root: Path) -> list[list[str]]:
    """The layers that contributors read: a list of modules for each."""
    text = (root / "CONTRIBUTING.md").read_text()
    lines = re.findall(r"^[0-9] ((?:[a-z_0-9.*]+ ?)+)$", text, re.MULTILINE)
    return [line.split() for line in lines]


def modules(root: Path) -> dict[str, Path]:
    """The public modules of the package by their dotted name."""
    package = root / "pcl"
    found = (path.relative_to(package) for path in package.rglob("*.py"))
    parts = {path: path.with_suffix("").parts for path in found}
    return {
        ".".join(names): package / path
        for path, names in parts.items()
        if not any(name.startswith("_") for name in names)
    }


def place_of(name: str, table: list[list[str]]) -> tuple[int, int]:
    """Layer and place of a module; a file of `published` stands at its layer's end."""
    for depth, names in enumerate(table):
        for position, pattern in enumerate(names):
            if fnmatch(name, pattern):
                return depth, position
    raise AssertionError(f"{name} has no place in the layers of CONTRIBUTING.md")


def imports_of(path: Path, name: str) -> dict[str, set[str]]:
    """What a module imports from which of its siblings, anywhere in it."""
    package = ["pcl", *name.split(".")[:-1]]
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            full = ".".join([*start, *filter(None, [node.module])])
            if full.startswith("pcl."):
                names = {alias.name for alias in node.names}
                found.setdefault(full.removeprefix("pcl."), set()).update(names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("pcl."):
                    found.setdefault(alias.name.removeprefix("pcl."), set())
    return found


OLD = ("images", "embedding")  # names for one release, with a warning


def test_imports_point_to_layers_above_or_to_the_left(root: Path) -> None:
    table = layers(root)
    for name, path in modules(root).items():
        if name in OLD:
            continue
        own = place_of(name, table)
        for other in imports_of(path, name):
            if not other.startswith("_"):
                assert place_of(other, table) < own, f"{name} imports {other}"


def test_every_module_of_the_layers_is_there(root: Path) -> None:
    known = modules(root)
    for pattern in (name for names in layers(root) for name in names):
        assert any(fnmatch(name, pattern) for name in known), f"there is no {pattern}"


def test_what_is_wrong_on_purpose_is_imported_by_studies_only(root: Path) -> None:
    for name, path in modules(root).items():
        wrong = [n for n in imports_of(path, name) if n.startswith("published.")]
        assert not wrong or name.startswith(("studies.", "published.")), (name, wrong)


def test_no_private_name_crosses_modules(root: Path) -> None:
    for name, path in modules(root).items():
        for other, names in imports_of(path, name).items():
            private = [n for n in names if n.startswith("_")]
            assert not private or other.startswith("_"), (name, other, private)


def code_lines(path: Path) -> int:
    """Lines of code, without blanks, comments, docstrings and the list of exports."""
    text = path.read_text()
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        kinds = ast.FunctionDef | ast.ClassDef | ast.Module
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    return sum(
        1
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#") and number not in skipped
    )


def test_no_module_is_too_long(root: Path) -> None:
    sizes = {name: code_lines(path) for name, path in modules(root).items()}
    assert {name: size for name, size in sizes.items() if size > 650} == {}


def exported_cells(notebook: Path) -> dict[str, list[str]]:
    """The exported code of a chapter by module."""
    cells = json.loads(notebook.read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    homes = re.findall(r"^#\| *default_exp +(\S+)", "\n".join(sources), re.MULTILINE)
    found: dict[str, list[str]] = {}
    for source in sources:
        if match := re.match(r"#\| *exporti? *(\S*)", source):
            module = match[1] or (homes[-1] if homes else "")
            found.setdefault(module, []).append(source)
    return found


def bound(node: ast.AST) -> set[str]:
    """The names that an import binds."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return {(alias.asname or alias.name).split(".")[0] for alias in node.names}


def test_each_chapter_imports_what_its_exported_cells_use(root: Path) -> None:
    imported: dict[str, dict[str, set[str]]] = {}
    used: dict[str, dict[str, set[str]]] = {}
    for notebook in sorted((root / "nbs").glob("*.ipynb")):
        for module, cells in exported_cells(notebook).items():
            nodes = list(ast.walk(ast.parse("\n".join(cells))))
            names = {n.id for n in nodes if isinstance(n, ast.Name)}
            used.setdefault(module, {})[notebook.stem] = names
            here = set().union(*map(bound, nodes))
            imported.setdefault(module, {})[notebook.stem] = here
    for module, chapters in used.items():
        for stem, names in chapters.items():
            others = {n for s, b in imported[module].items() if s != stem for n in b}
            borrowed = names & others - imported[module][stem]
            assert not borrowed, f"{stem} uses {sorted(borrowed)} of another chapter"


def after_nbdev(root: Path) -> list[list[str]]:
    """What `make export` runs after nbdev, with full paths."""
    _, rest = (root / "Makefile").read_text().split("$(BIN)/nbdev_export\n")
    recipe = rest.split("\n\n")[0]
    scripts = re.findall(r"^\t\$\(BIN\)/python (\S+)$", recipe, re.MULTILINE)
    assert scripts == recipe.replace("\t$(BIN)/python ", "").split()
    return [[str(root / script)] for script in scripts]


def written(root: Path) -> dict[str, str]:
    """The text of every module that chapters write, of the package itself too."""
    own = {n: root / "pcl" / f"{n}.py" for n in ("__init__", "_front", "_moved")}
    return {n: p.read_text() for n, p in (modules(root) | own).items()}


def test_package_is_a_fresh_export(root: Path, tmp_path: Path) -> None:
    for name in ("nbs", "pcl"):
        shutil.copytree(
            root / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"),
        )
    for name in ("settings.ini", "CONTRIBUTING.md"):
        shutil.copy(root / name, tmp_path)
    for path in modules(tmp_path).values():
        path.unlink()
    export = "from nbdev.doclinks import nbdev_export; nbdev_export()"
    steps = [["-c", export], *after_nbdev(root)]
    for step in steps:
        subprocess.run(
            [sys.executable, *step], cwd=tmp_path, check=True, capture_output=True
        )
    committed, exported = written(root), written(tmp_path)
    assert sorted(committed) == sorted(exported)
    other = [name for name in committed if committed[name] != exported[name]]
    assert other == [], "run make export"


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
    for path in modules(root).values():
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
    "target", ["reproduce", "test", "book", "data", "serve", "bench", "peers", "clean"]
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
    _, *code = re.split(r"\n# %% (?:\.\./)+nbs/", path.read_text(), maxsplit=1)
    return "".join(code).splitlines()


def test_code_fits_the_page(root: Path) -> None:
    for path in [*(root / "nbs").glob("*.ipynb"), *(root / "pcl").rglob("[a-z]*.py")]:
        long = [line for line in shown_lines(path) if len(line) > 88]
        assert long == [], f"{path.name}: {long[0]}"


QUIET = ("#|hide", "#|echo:false")  # cells whose code a reader does not see


def test_no_reader_misses_an_assertion(root: Path) -> None:
    for path in sorted((root / "nbs").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            lines = "".join(cell["source"]).splitlines()
            quiet = any(line.replace(" ", "").startswith(QUIET) for line in lines[:4])
            asserts = [line for line in lines if line.lstrip().startswith("assert ")]
            assert not (quiet and asserts), f"{path.name} hides {asserts[0].strip()!r}"


def test_a_chapter_says_in_one_line_what_it_holds(root: Path) -> None:
    """The line below the title becomes the docstring of the module."""
    for path in sorted((root / "nbs").glob("*.ipynb")):
        title = "".join(json.loads(path.read_text())["cells"][0]["source"])
        tagline = next((x for x in title.splitlines() if x.startswith("> ")), "")
        assert 10 < len(tagline) <= 88, f"{path.name}: {tagline!r}"
