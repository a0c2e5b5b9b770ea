"""The package: what a wheel and a source distribution bring along, and that an
installed one works away from any checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

DISTRIBUTION = "probabilistic-contrastive-learning"
VERSION = "0.1.0"


def quiet(words: list[str | Path], **options: object) -> str:
    """Run a command that has to succeed, and return what it prints."""
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from a copy, because a build leaves its traces
    beside the sources."""
    source, target = (
        tmp_path_factory.mktemp("source") / "pcl",
        tmp_path_factory.mktemp("sdist"),
    )
    built = (
        ".*",
        "__pycache__",
        "_build",
        "build",
        "dist",
        "*.egg-info",
        "reference",
        "data",
        "checkpoints",
    )
    shutil.copytree(root, source, ignore=shutil.ignore_patterns(*built))
    code = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(target)!r}))"
    quiet([sys.executable, "-c", code], cwd=source)
    (archive,) = target.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution and from nothing else."""
    target = tmp_path_factory.mktemp("wheel")
    quiet(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            target,
            sdist,
        ]
    )
    (built,) = target.glob("*.whl")
    return built


def needed(names: list[str]) -> dict[str, metadata.Distribution]:
    """Installed distributions and everything they require, extras left out."""
    found: dict[str, metadata.Distribution] = {}
    while names:
        name = names.pop()
        if name.lower() not in found:
            found[name.lower()] = metadata.distribution(name)
            wanted = [Requirement(line) for line in found[name.lower()].requires or []]
            names += [
                r.name
                for r in wanted
                if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return found


def readme_lines(root: Path) -> str:
    """The code on the first page of the project."""
    (code,) = re.findall(
        r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL
    )
    return code


def imported(code: str) -> set[str]:
    """The top-level modules that some lines of code import."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


@pytest.fixture(scope="module")
def installed(
    root: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A fresh virtual environment that holds the wheel, what its metadata require and what the README's lines import.

    The packages required are large: they are linked from where they are, not downloaded. Nothing else can be seen.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    with zipfile.ZipFile(wheel) as archive:
        (listed,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        about = archive.read(listed).decode()
    direct = [
        Requirement(r)
        for r in re.findall(r"^Requires-Dist: (.*)$", about, re.MULTILINE)
    ]
    of_module = metadata.packages_distributions()
    extra = {
        d for m in imported(readme_lines(root)) - {"pcl"} for d in of_module.get(m, [])
    }
    site = folder / "required"
    site.mkdir()
    for dist in needed(
        [r.name for r in direct if r.marker is None] + sorted(extra)
    ).values():
        for top in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(dist.locate_file(top))).resolve())
    where = quiet(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    ).strip()
    (Path(where) / "required.pth").write_text(str(site))
    pip = [sys.executable, "-m", "pip", "--python", python]
    quiet([*pip, "install", "-q", "--no-index", "--no-deps", wheel])
    assert "No broken requirements" in quiet([*pip, "check"])
    return folder / "venv"


def run(where: Path, cwd: Path, *words: str | Path) -> str:
    """Run a command of the virtual environment in another folder, without this
    project's settings."""
    hidden = ("PCL_RESULTS", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return quiet([where / "bin" / words[0], *words[1:]], cwd=cwd, env=env)


def test_the_source_distribution_is_the_whole_project(root: Path, sdist: Path) -> None:
    assert sdist.name == f"{DISTRIBUTION.replace('-', '_')}-{VERSION}.tar.gz"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = {
        "pcl": "*.py",
        "nbs": "*",
        "tests": "*.py",
        "book": "**/*",
        "results": "**/*.json",
    }
    folders |= {"benchmarks": "*.py", "examples": "*.py"}
    for folder, pattern in folders.items():
        files = [
            p
            for p in (root / folder).glob(pattern)
            if p.is_file() and "__pycache__" not in p.parts
        ]
        assert {p.relative_to(root).as_posix() for p in files} - inside == set(), (
            f"{folder} is not complete"
        )
    single = (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "Makefile",
        "constraints.txt",
        "settings.ini",
        "_toc.yml",
    )
    assert {
        *single,
        "pyproject.toml",
        "references.bib",
        "intro.md",
        "pcl/py.typed",
    } <= inside


def test_the_wheel_carries_the_chapters_the_ledger_and_the_types(
    root: Path, wheel: Path
) -> None:
    assert wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {f"pcl/{p.name}" for p in (root / "pcl").glob("*.py")} | {
        "pcl/py.typed",
        "pcl/results/paper.toml",
    }
    wanted |= {f"pcl/notebooks/{p.name}" for p in (root / "nbs").glob("*.ipynb")}
    wanted |= {
        f"pcl/{p.relative_to(root).as_posix()}"
        for p in (root / "results").glob("*/*.json")
    }
    assert wanted - inside == set(), "missing"
    assert {
        name for name in inside - wanted if name.endswith((".py", ".ipynb"))
    } == set(), "not for users"


def test_one_version_everywhere(root: Path, installed: Path, tmp_path: Path) -> None:
    code = f"import pcl; from importlib.metadata import version; print(pcl.__version__, version({DISTRIBUTION!r}))"
    assert run(installed, tmp_path, "python", "-c", code).split() == [VERSION, VERSION]
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert str(citation["version"]) == VERSION
    assert f"version = {VERSION}\n" in (root / "settings.ini").read_text()
    assert (
        re.findall(r"^## \[(.*?)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[
            0
        ]
        == VERSION
    )


def test_an_empty_environment_imports_every_module_and_runs_the_readme(
    root: Path, installed: Path, tmp_path: Path
) -> None:
    names = sorted(p.stem for p in (root / "pcl").glob("*.py") if p.stem != "__init__")
    code = f"""
import importlib
for name in {names!r}:
    place = importlib.import_module("pcl." + name).__file__
    assert place.startswith({str(installed)!r}), place
"""
    run(installed, tmp_path, "python", "-c", code)
    (tmp_path / "readme.py").write_text(readme_lines(root))
    assert "tensor" in run(installed, tmp_path, "python", "readme.py")


def test_the_command_works_away_from_the_checkout(
    root: Path, installed: Path, tmp_path: Path
) -> None:
    run(installed, tmp_path, "pcl", "notebooks", "chapters")
    assert len(list((tmp_path / "chapters").glob("*.ipynb"))) == len(
        list((root / "nbs").glob("*.ipynb"))
    )
    assert "sampler" in run(installed, tmp_path, "pcl", "report"), (
        "the packaged ledger is read"
    )
    run(
        installed,
        tmp_path,
        "pcl",
        "run",
        "sampler",
        "--row",
        "D=10_kappa=20",
        "--preset",
        "smoke",
        "--seeds",
        "1",
    )
    assert len(list((tmp_path / "results" / "sampler").glob("*.json"))) == 1, (
        "new records go to the working folder"
    )
