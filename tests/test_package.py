"""The package: what a wheel and a source distribution bring along, and that an
installed one works away from any checkout."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

DISTRIBUTION = "probabilistic-contrastive-learning"
ROOT = Path(__file__).resolve().parent.parent
VERSION = re.findall(
    r'^__version__ = "(.*)"', (ROOT / "pcl" / "__init__.py").read_text(), re.MULTILINE
)[0]


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
    (archive,) = target.glob("*.tar.gz")
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
    parts = re.findall(
        r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL
    )
    return "\n".join(parts)


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
        "pcl": "**/*.py",
        "nbs": "*",
        "tests": "*.py",
        "book": "**/*",
        "changes": "*",
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
        "setup.py",
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
        "nbs/intro.md",
        "pcl/py.typed",
    } <= inside


def test_the_wheel_carries_the_chapters_the_ledger_and_the_types(
    root: Path, wheel: Path
) -> None:
    assert wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = (root / "pcl").rglob("*.py")
    wanted = {p.relative_to(root).as_posix() for p in modules} | {
        "pcl/py.typed",
        "pcl/results/published/pcl.toml",
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


def test_an_editable_install_is_a_path_that_every_tool_sees(
    sdist: Path, tmp_path: Path
) -> None:
    """A hook would do for Python, but type checkers and editors do not run hooks."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    target = tmp_path / "editable"
    target.mkdir()
    code = f"from setuptools.build_meta import build_editable; build_editable({str(target)!r})"
    quiet([sys.executable, "-c", code], cwd=source)
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        inside = [n for n in archive.namelist() if ".dist-info/" not in n]
        (path,) = [n for n in inside if n.endswith(".pth")]
        assert inside == [path], "nothing but the path"
        assert archive.read(path).decode().strip() == str(source)


@pytest.fixture(scope="module")
def changelog(root: Path) -> ModuleType:
    """The script that assembles the changelog, loaded from its file."""
    path = root / "book" / "pcl_changelog.py"
    spec = importlib.util.spec_from_file_location("pcl_changelog", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fragment_of_the_changelog_parses(
    root: Path, changelog: ModuleType
) -> None:
    strangers = {p.name for p in (root / "changes").iterdir() if p.suffix != ".md"}
    assert strangers == set(), "a fragment is a Markdown file"
    changelog.fragments(root / "changes")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Fixed\nThe sampler no longer hangs.", None),
        ("Added\nOne. Two!\nThree, as in `pcl.vmf`?\n", None),
        ("Improved\nIt is better.", "one of Added"),
        ("Fixed", "one to three sentences"),
        ("Fixed\nNo full stop", "one to three sentences"),
        ("Fixed\nOne. Two. Three. Four.", "one to three sentences"),
    ],
)
def test_a_fragment_is_a_kind_and_one_to_three_sentences(
    tmp_path: Path, changelog: ModuleType, text: str, wrong: str | None
) -> None:
    (tmp_path / "a.md").write_text(text)
    if wrong is None:
        assert changelog.parse(tmp_path / "a.md")[0] in changelog.KINDS
    else:
        with pytest.raises(ValueError, match=f"a.md: .*{wrong}"):
            changelog.parse(tmp_path / "a.md")


def test_a_release_moves_the_fragments_into_the_changelog(
    tmp_path: Path, changelog: ModuleType
) -> None:
    (tmp_path / "settings.ini").write_text("[DEFAULT]\nversion = 0.2.0\n")
    old = "# Changelog\n\nWords.\n\n## [0.1.0] - 2026-11-17\n\n### Added\n- All.\n"
    (tmp_path / "CHANGELOG.md").write_text(old)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("# Changes\n")
    (tmp_path / "changes" / "b.md").write_text("Added\nA loss,\nand its proof.\n")
    (tmp_path / "changes" / "a.md").write_text("Fixed\nA slip.\n")
    assert changelog.release(tmp_path, "2026-12-01") == ""
    new = "## [0.2.0] - 2026-12-01\n\n### Added\n- A loss, and its proof.\n\n### Fixed\n- A slip.\n\n"
    head, tail = old.split("## [0.1.0]")
    released = f"{head}{new}## [0.1.0]{tail}"
    assert (tmp_path / "CHANGELOG.md").read_text() == released
    assert [p.name for p in (tmp_path / "changes").iterdir()] == ["README.md"]

    assert "nothing to release" in changelog.release(tmp_path, "2026-12-02")
    (tmp_path / "changes" / "c.md").write_text("Fixed\nAnother.\n")
    assert "raise the version" in changelog.release(tmp_path, "2026-12-02")
    assert (tmp_path / "CHANGELOG.md").read_text() == released, "left as it was"
    assert (tmp_path / "changes" / "c.md").exists()


def test_one_version_everywhere(root: Path, installed: Path, tmp_path: Path) -> None:
    code = f"import pcl; from importlib.metadata import version; print(pcl.__version__, version({DISTRIBUTION!r}))"
    assert run(installed, tmp_path, "python", "-c", code).split() == [VERSION, VERSION]
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    assert str(citation["version"]) == VERSION
    assert f"version = {VERSION}\n" in (root / "settings.ini").read_text()
    log = (root / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(.*?)\]", log, re.MULTILINE)
    waiting = [p for p in (root / "changes").glob("*.md") if p.name != "README.md"]
    assert released[0] == VERSION or waiting, "a version that the changelog leaves out"


def test_an_empty_environment_imports_every_module_and_runs_the_readme(
    root: Path, installed: Path, tmp_path: Path
) -> None:
    paths = [p.relative_to(root / "pcl") for p in (root / "pcl").rglob("*.py")]
    names = [".".join(p.with_suffix("").parts).removesuffix(".__init__") for p in paths]
    names = sorted(set(names) - {"__init__"})
    code = f"""
import importlib
for name in {names!r}:
    place = importlib.import_module("pcl." + name).__file__
    assert place.startswith({str(installed)!r}), place
"""
    run(installed, tmp_path, "python", "-c", code)
    (tmp_path / "readme.py").write_text(readme_lines(root))
    assert "tensor" in run(installed, tmp_path, "python", "readme.py")


def test_what_is_not_installed_is_answered_with_a_command_that_works(
    installed: Path, tmp_path: Path
) -> None:
    """It names packages that an index has, and not our own, which none has yet."""
    code = """
from pcl.files import install_hint
for extra in ("train", "images", "heads", "onnx"):
    print(install_hint(extra))
"""
    extras = metadata_of_extras()
    for extra, line in zip(
        ("train", "images", "heads", "onnx"),
        run(installed, tmp_path, "python", "-c", code).splitlines(),
        strict=True,
    ):
        start, *packages = re.split(r" (?=')", line)
        assert start == "pip install" and DISTRIBUTION not in line
        assert [p.strip("'") for p in packages] == extras[extra]


def metadata_of_extras() -> dict[str, list[str]]:
    """The packages of each extra, as the project lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def test_the_name_of_the_distribution_stands_in_one_place(root: Path) -> None:
    """The code asks the metadata for it; words may name it."""
    named = [
        path.name
        for folder in ("pcl", "nbs", "book", "benchmarks", "examples")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".ipynb") and DISTRIBUTION in path.read_text()
    ]
    assert named == []
    assert f'name = "{DISTRIBUTION}"' in (root / "pyproject.toml").read_text()


def test_a_release_is_off_until_the_name_is_ours(root: Path) -> None:
    """Nothing is uploaded unless the repository says so, and only from a tag whose
    version is the package's."""
    workflow = yaml.safe_load((root / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert publish["if"] == "vars.PUBLISH == 'yes'" and publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    assert workflow["permissions"] == {"contents": "read"}
    steps = " ".join(str(step.get("run", "")) for step in build["steps"])
    assert "python -m build" in steps and "tests/test_package.py" in steps
    assert "GITHUB_REF_NAME" in steps


def test_the_command_works_away_from_the_checkout(
    root: Path, installed: Path, tmp_path: Path
) -> None:
    run(installed, tmp_path, "pcl", "notebooks", "chapters")
    assert len(list((tmp_path / "chapters").glob("*.ipynb"))) == len(
        list((root / "nbs").glob("*.ipynb"))
    )
    assert "sampler" in run(installed, tmp_path, "pcl", "report", "sampler"), (
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
