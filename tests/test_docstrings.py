"""What `help` shows: parameters with their meaning, and examples that run; and what the
top of the package offers to people and to tools."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pcl
from pcl._front import TOP_LEVEL, lazily

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def load(root: Path, name: str) -> ModuleType:
    """A script of the book, loaded from its file."""
    spec = importlib.util.spec_from_file_location(name, root / "book" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docstrings(root: Path) -> ModuleType:
    """The step of `make export` that writes docstrings."""
    load(root, "pcl_reference")
    return load(root, "pcl_docstrings")


TOY = '''"""A toy."""

__all__ = ["grow", "Box", "Point", "Shape"]


def grow(
    size: int,  # in metres
    by: float
    # a factor,
    | None = None,
    *rest: int,
    name: str = "x",
    # what else \\\\kappa needs
    **options: object,
) -> int:  # the new size
    """Make it larger.

    >>> grow(1)
    1
    """
    return size


def plain(size: int) -> int:
    """Nothing to add."""
    return size


class Base:
    """The first."""

    def __init__(
        self,
        size: int,  # how large
    ) -> None:
        pass

    @property
    def full(self) -> bool:  # never
        "Whether it is."
        return False

    def _private(
        self,
        x: int,  # hidden
    ) -> None:
        """Stays."""


class Box(Base):
    r"""Holds \\alpha."""


class Point(NamedTuple):
    """A place."""

    x: float  # to the right
    y: float = 0.0


class Shape(Protocol):
    """What has an area."""

    area: float  # in m^2
'''


@pytest.fixture
def toy(tmp_path: Path, docstrings: ModuleType) -> dict[str, str]:
    """The docstrings of a small package after the step, by name."""
    (tmp_path / "toy.py").write_text(TOY)
    assert docstrings.rewrite(tmp_path) == ["toy"]
    once = (tmp_path / "toy.py").read_text()
    assert docstrings.rewrite(tmp_path) == [], "the second time changes nothing"
    assert (tmp_path / "toy.py").read_text() == once
    code = [line for line in once.splitlines() if "#" in line]
    assert code == [line for line in TOY.splitlines() if "#" in line], "code is kept"
    found = {}
    for node in ast.walk(ast.parse(once)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_docstring(node) or ""
    return found


def test_comments_become_sections(toy: dict[str, str]) -> None:
    assert toy["grow"] == (
        "Make it larger.\n\nArgs:\n    size (int): in metres\n"
        "    by (float | None): a factor,\n    *rest (int)\n    name (str)\n"
        "    **options (object): what else \\\\kappa needs\n\n"
        "Returns:\n    int: the new size\n\nExample:\n    >>> grow(1)\n    1"
    )
    assert toy["plain"] == "Nothing to add."
    assert toy["_private"] == "Stays."


def test_every_kind_of_class_lists_what_it_is_built_from(toy: dict[str, str]) -> None:
    size = "\n\nArgs:\n    size (int): how large"
    assert toy["Base"] == "The first." + size
    assert toy["Box"] == "Holds \\alpha." + size, "from its base, raw as it was"
    assert toy["full"] == "Whether it is.\n\nReturns:\n    bool: never"
    assert toy["Point"] == (
        "A place.\n\nArgs:\n    x (float): to the right\n    y (float)"
    )
    assert toy["Shape"] == "What has an area.\n\nAttributes:\n    area (float): in m^2"


def test_building_is_never_explained_by_a_base_of_torch(toy: dict[str, str]) -> None:
    assert toy["__init__"] == "The class lists the parameters."
    for name in ("MCInfoNCE", "ExactInfoNCE", "NormEncoder", "VonMisesFisher"):
        said = inspect.getdoc(getattr(pcl, name).__init__)
        assert said == "The class lists the parameters.", name


def public(root: Path) -> list[str]:
    """The public modules of the package."""
    paths = (p.relative_to(root / "pcl") for p in (root / "pcl").rglob("[a-z]*.py"))
    return sorted(".".join(path.with_suffix("").parts) for path in paths)


def test_help_shows_every_parameter_that_has_a_comment(
    root: Path, docstrings: ModuleType
) -> None:
    reference = sys.modules["pcl_reference"]
    shown = 0
    for module in reference.read_package(root / "pcl"):
        live = importlib.import_module(f"pcl.{module.name}")
        for entry in module.entries:
            said = " ".join((inspect.getdoc(getattr(live, entry.name)) or "").split())
            for p in entry.parameters:
                if p.meaning and entry.what != "constant":
                    meaning = " ".join(p.meaning.split())
                    assert f"{p.name} ({p.kind}): {meaning}" in said, entry.name
                    shown += 1
    assert shown > 600


def test_the_example_of_a_page_is_the_one_of_help(root: Path, docstrings) -> None:
    reference = sys.modules["pcl_reference"]
    doc = "Says.\n\nArgs:\n    x (int)\n\nExample:\n    >>> f(1)\n    2"
    assert reference.split_doc(doc) == ("Says.", ">>> f(1)\n2")
    entry = reference.Entry("f", "function", "110_bessel", *reference.split_doc(doc))
    text = reference.entry_text("toy", entry)
    assert "```pycon\n>>> f(1)\n2\n```" in text and "Args:" not in text


def test_a_name_at_the_top_says_what_it_takes_and_shows_an_example() -> None:
    """What a user meets first explains itself."""
    silent = []
    for name in TOP_LEVEL:
        thing = getattr(pcl, name)
        said = inspect.getdoc(thing) or ""
        takes = set(inspect.signature(thing).parameters) - {"args", "kwargs"}
        silent += [f"{name}: no example"] if "Example:\n    >>> " not in said else []
        silent += [f"{name}: no Args"] if takes and "Args:\n" not in said else []
    assert silent == []


def examples(root: Path) -> list[doctest.DocTest]:
    """Every example in the docstrings of the package."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(f"pcl.{name}") for name in public(root)]
    return [t for m in modules for t in finder.find(m, m.__name__) if t.examples]


def test_examples_run(root: Path, tmp_path: Path, monkeypatch) -> None:
    """As typed: the names they use are those they import."""
    monkeypatch.chdir(tmp_path)
    found = examples(root)
    assert len(found) >= len(TOP_LEVEL)
    for example in found:
        example.globs = {}
        said: list[str] = []
        with torch.random.fork_rng():
            torch.manual_seed(0)
            runner = doctest.DocTestRunner(optionflags=FLAGS)
            runner.run(example, out=said.append)
        assert not runner.failures, "".join(said)


def test_the_top_of_the_package() -> None:
    assert pcl.__doc__ is not None and len(pcl.__doc__.splitlines()) <= 56
    assert sorted(pcl.__all__) == sorted(TOP_LEVEL)
    assert {*TOP_LEVEL, "vmf", "losses", "__version__"} <= set(dir(pcl))
    for name, home in TOP_LEVEL.items():
        module = importlib.import_module(f"pcl.{home}")
        assert getattr(pcl, name) is getattr(module, name)
        assert name in module.__all__ and name not in public(
            Path(pcl.__file__).parents[1]
        )
    for word in ("vmf", "losses", "heads", "trust"):
        assert f" {word}" in pcl.__doc__, "the map leaves it out"


def test_a_name_that_is_not_there_is_answered_like_any_other() -> None:
    with pytest.raises(AttributeError, match="module 'pcl' has no attribute 'nope'"):
        pcl.nope  # noqa: B018
    assert not hasattr(pcl, "_nope") and not hasattr(pcl, "__wrapped__")
    find, names = lazily("pcl", {"Ghost": "vmf"})
    with pytest.raises(AttributeError, match="Ghost"):
        find("Ghost")
    assert "Ghost" in names()


def test_star_import_and_pickle() -> None:
    import pickle

    here: dict[str, object] = {}
    exec("from pcl import *", here)
    assert set(TOP_LEVEL) <= set(here)
    assert pickle.loads(pickle.dumps(pcl.ExactInfoNCE)) is pcl.ExactInfoNCE


def test_type_checkers_see_the_names_at_the_top(root: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "import torch\nimport pcl\n"
        "q = pcl.VonMisesFisher(torch.ones(3), 2)\n"
        "reveal_type(pcl.ExactInfoNCE(20.0))\npcl.nope\n"
    )
    mypy = (sys.executable, "-m", "mypy", "--config-file=")
    done = subprocess.run(
        [*mypy, "--follow-imports=silent", "--ignore-missing-imports", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(root), "PATH": "/usr/bin:/bin"},
    )
    assert 'Revealed type is "pcl.losses.ExactInfoNCE"' in done.stdout, done.stdout
    assert 'Module has no attribute "nope"' in done.stdout
