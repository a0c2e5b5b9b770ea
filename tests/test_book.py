"""The book's machinery: nbdev directives become tags, and a build refuses what a reader
would stumble over."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
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


def test_a_chapter_links_the_reference_of_every_module_it_feeds(
    extension: ModuleType,
) -> None:
    sources = [
        "#| default_exp losses",
        "#| export\nx = 1",
        "#| export published.objectives\ny = 1",
        "#|export kernels\nz = 1",
    ]
    cells = [{"cell_type": "markdown", "source": "# Title"}]
    cells += [{"cell_type": "code", "source": source} for source in sources]
    names = extension.modules_of({"cells": cells})
    assert names == ["losses", "published.objectives", "kernels"]
    extension.add_run_note({"cells": cells}, "260_losses", names)
    pages = [f"{{doc}}`pcl.{name} </reference/{name}>`" for name in names]
    assert f"{pages[0]}, {pages[1]} and {pages[2]}." in cells[0]["source"]


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
    listed.append(toc["root"])
    there = {
        f"nbs/{p.stem}"
        for p in (root / "nbs").iterdir()
        if p.suffix in (".ipynb", ".md")
    }
    assert sorted(listed) == sorted(there)


def build(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Build the small book in `folder`, if nothing else is said as `make book` builds the real one."""
    command = [str(Path(sys.executable).parent / "jupyter-book"), "build", "-W"]
    return subprocess.run(
        [*command, "--keep-going", *(words or ["--all"]), "."],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | env,
    )


def small_book(root: Path, folder: Path, **pages: list[str] | str) -> Path:
    """A book with the real one's settings; a list is a notebook, whose items are code unless they start as Markdown does."""
    for name in ("_config.yml", "references.bib"):
        shutil.copy(root / name, folder)
    shutil.copytree(
        root / "book", folder / "book", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "nbs").mkdir()
    files = [{"file": f"nbs/{name.removeprefix('n')}"} for name in pages]
    toc = {"format": "jb-book", "root": "nbs/intro", "defaults": {"numbered": 2}}
    toc |= {"parts": [{"caption": "I", "chapters": files}]} if files else {}
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc))
    (folder / "nbs" / "intro.md").write_text("# Title\n\n```{bibliography}\n```\n")
    for name, text in pages.items():
        write_page(folder, name.removeprefix("n"), text)
    return folder


def write_page(folder: Path, name: str, text: list[str] | str) -> None:
    """Write one page of a small book."""
    if isinstance(text, str):
        (folder / "nbs" / f"{name}.md").write_text(text)
        return
    cells = []
    for number, source in enumerate(text):
        prose = source.startswith(("# ", "## ", "*Figure", ":::"))
        code = {} if prose else {"outputs": [], "execution_count": None}
        kind = "markdown" if prose else "code"
        cell = {"cell_type": kind, "id": f"c{number}", "metadata": {}}
        cells.append(cell | {"source": source} | code)
    spec = {"display_name": "python3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": spec}}
    notebook |= {"nbformat": 4, "nbformat_minor": 5}
    (folder / "nbs" / f"{name}.ipynb").write_text(json.dumps(notebook))


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
    with (small_book(root, tmp_path) / "nbs" / "intro.md").open("a") as page:
        page.write(f"\n{text}\n")
    done = build(tmp_path)
    assert (done.returncode == 0) == builds, done.stdout[-2000:] + done.stderr[-2000:]


ERRATA = """---
jupytext:
  text_representation:
    format_name: myst
kernelspec:
  display_name: python3
  name: python3
---
# Errata

```{code-cell} python3
assert 3 == 4
```
"""


def test_every_failing_chapter_fails_the_build_with_its_cell(
    root: Path, tmp_path: Path
) -> None:
    small_book(
        root,
        tmp_path,
        n110_good=["# Good", "x = 1", "#| eval: false\n1 / 0"],
        n120_wrong=["# Wrong", "x = 1", "#| hide\nassert x == 2"],
        n130_loud=["# Loud", "import sys\nprint('hm', file=sys.stderr)"],
        n140_dead=["# Dead", "import os\nos._exit(3)"],
        errata=ERRATA,
    )
    done = build(tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    for line in (
        "nbs/120_wrong, cell 3: AssertionError",
        "nbs/130_loud, cell 2 writes to stderr: hm",
        "nbs/140_dead, DeadKernelError",
        "nbs/errata, cell 2: AssertionError",
    ):
        assert line in said, line
    assert "nbs/110_good," not in said


def test_chapters_print_the_number_of_their_file(root: Path, tmp_path: Path) -> None:
    theorem = ":::{prf:theorem}\n:label: thm-a\nYes.\n:::"
    small_book(
        root,
        tmp_path,
        n260_losses=["# Losses", f"## First\n\n$$x$$ (eq-a)\n\n{theorem}"],
        n265_more=[
            "# More",
            "## Links\n\n{eq}`eq-a`, {prf:ref}`thm-a`, {numref}`fig-a`\n\n"
            "```{figure} a.svg\n:name: fig-a\n:alt: a\n\nCaption.\n```",
        ],
        glossary="# Words\n\n## Section\n",
    )
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    (tmp_path / "nbs" / "a.svg").write_text(svg)
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    html = tmp_path / "_build" / "html"
    losses, more = (
        (html / "nbs" / f"{name}.html").read_text()
        for name in ("260_losses", "265_more")
    )
    for page in (losses, more):
        sidebar = re.search(r'<nav class="bd-links.*?</nav>', page, re.DOTALL)
        assert sidebar and {">260. Losses<", ">265. More<"} <= set(
            re.findall(r">[^<>]+<", sidebar[0])
        )
    text = re.sub(r"<[^>]*>", "", losses)
    for written in ("260. Losses#", "260.1. First#", "(260.1)#", "Theorem 260.1"):
        assert written in text
    text = re.sub(r"<[^>]*>", "", more)
    for written in ("265.1. Links#", "(260.1), Theorem 260.1, Figure 265.1"):
        assert written in text
    assert 'url=nbs/intro.html"' in (html / "index.html").read_text()


def load(root: Path, name: str) -> ModuleType:
    """A module of the book's machinery."""
    sys.path.insert(0, str(root / "book"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('def f(x):\n    """Double it. Or not."""\n', "f: Double it"),
        ('class A:\n    """One\n    thing."""\n\ndef b(): pass\n', "A, b: One thing"),
        ("# How many.\nCOUNT = 3\n", "COUNT: How many"),
        ("import os\n", "Imports"),
        ("print(1)\n", "Library code"),
        ('register(Experiment("a", "Is it so?", base=1))\n', "a: Is it so?"),
        ('C = register(Dataset(name="b", title="Birds."))\n', "b: Birds"),
        ("a = b = c = d = 1\n", "a, b, c and others"),
        ("_x = 1\n", "_x"),
    ],
)
def test_a_library_cell_is_folded_under_a_line(
    root: Path, source: str, line: str
) -> None:
    assert load(root, "pcl_fold").summary_of(source) == line


def test_no_folded_or_hidden_cell_holds_an_assertion(
    root: Path, extension: ModuleType
) -> None:
    fold = load(root, "pcl_fold")
    for path in (root / "nbs").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        texts = ["".join(c["source"]) for c in cells]
        exported = {n for n, text in enumerate(texts) if fold.EXPORTED.search(text)}
        for cell in cells:
            if cell["cell_type"] == "code":
                extension.translate_cell(cell)
        fold.fold_cells(cells, exported)
        for place, cell in enumerate(cells):
            tags = {fold.FOLD, fold.WHOLE, "remove-input", "remove-cell"}
            if tags & set(cell["metadata"].get("tags", [])):
                # A function of the library may tell the type checker what it knows.
                inside = place not in exported
                found = fold.checks_in(ast.parse(cell["source"]), inside)
                assert not found, f"{path.name} folds {found[0]}"
            if {fold.FOLD, fold.WHOLE} & set(cell["metadata"].get("tags", [])):
                line = cell["metadata"].get("mystnb", {}).get("code_prompt_show")
                assert line, f"{path.name} folds a cell without a line on it"


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("assert x", "outside"),
        ("for a in b:\n    if a:\n        assert a == 1", "outside"),
        ("for a in b:\n    torch.testing.assert_close(a, 1)", "outside"),
        ("np.testing.assert_allclose(a, 1)", "outside"),
        ("assert_close(a, 1)", "outside"),
        ("with a:\n    x = [assert_equal(b) for b in a]", "outside"),
        ("def f(a):\n    assert a is not None\n    return a", "inside"),
        ("class A:\n    def f(self):\n        assert_close(self, 1)", "inside"),
        ("asserted = 1\nprint('assert x')", "nowhere"),
    ],
)
def test_a_check_is_seen_wherever_it_stands(
    root: Path, source: str, where: str
) -> None:
    fold = load(root, "pcl_fold")
    tree = ast.parse(source)
    assert bool(fold.checks_in(tree)) == (where != "nowhere")
    assert bool(fold.checks_in(tree, inside=False)) == (where == "outside")
    assert fold.asserts(source) == (where == "outside"), "and its cell is not folded"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("runs = Runs(latest(read())).where(preset='cpu')", True),
        ("for run in read():\n    print(run)", True),
        ("show(verdicts('table1'))", True),
        ("board = scoreboard(ledger)", True),
        ("text = archive.read('a.txt')", False),
        ("print('read()')  # read()", False),
    ],
)
def test_a_chapter_says_that_it_reads_recorded_runs(
    root: Path, extension: ModuleType, source: str, reads: bool
) -> None:
    sys.modules.setdefault("pcl_records", load(root, "pcl_records"))

    def note(library: set[int] = frozenset()) -> str:  # type: ignore[assignment]
        title = {"cell_type": "markdown", "source": "# Title"}
        cells = [title, {"cell_type": "code", "source": source}]
        extension.add_run_note({"cells": cells}, "110_a", [], library=library)
        return cells[0]["source"]

    assert (extension.LEDGER in note()) == reads
    assert (extension.COMPUTED in note()) != reads
    assert extension.COMPUTED in note({1}), "a function is defined, not called"


def test_the_note_of_every_chapter_that_opens_the_ledger_says_so(
    root: Path, extension: ModuleType
) -> None:
    """By another rule than the note's: what a chapter imports to read records."""
    records, fold = load(root, "pcl_records"), load(root, "pcl_fold")
    opens = re.compile(
        r"^from pcl\.(?:ledger import .*\bread\b|experiments import .*\bresults_of\b|"
        r"scores import .*\bscoreboard\b|claims import .*\bjudged_claims\b)",
        re.MULTILINE,
    )
    seen = 0
    for path in (root / "nbs").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        texts = ["".join(cell["source"]) for cell in cells]
        exported = {n for n, text in enumerate(texts) if fold.EXPORTED.search(text)}
        for cell in cells:
            if cell["cell_type"] == "code":
                extension.translate_cell(cell)
        own = [text for n, text in enumerate(texts) if n not in exported]
        if any(opens.search(text) for text in own):
            seen += 1
            assert records.reads_records(cells, exported), path.name
    assert seen > 20


def test_a_solution_is_folded_with_what_it_prints(root: Path) -> None:
    tags = {"tags": ["hide-input"]}
    cell = {"cell_type": "code", "source": "# Solution 1\nprint(1)\n", "metadata": tags}
    load(root, "pcl_fold").fold_cells([cell], set())
    assert tags["tags"] == ["hide-cell"] and cell["source"] == "print(1)\n"


def test_links_to_other_services_come_from_one_setting(extension: ModuleType) -> None:
    assert extension.launch_links("", "260_losses") == ""
    links = extension.launch_links("someone/pcl@stable", "260_losses")
    assert "gh/someone/pcl/stable?labpath=nbs/260_losses.ipynb" in links
    assert "github/someone/pcl/blob/stable/nbs/260_losses.ipynb" in links


def test_drawings_turn_for_dark_pages_and_pictures_stay(root: Path) -> None:
    page = load(root, "pcl_page")
    svg = '<svg><path style="stroke: #000000; fill: #0b3c5d"/><image href="#000000"/>'
    dark = page.dark_version(svg)
    assert "#0b3c5d" not in dark and '<image href="#000000"/>' in dark
    for colour in ("#000000", "#333333", "#0b3c5d", "#440154", "#1f77b4"):
        parts = [int(page.on_dark(colour)[i : i + 2], 16) for i in (1, 3, 5)]
        assert max(parts) > 120, f"{colour} cannot be seen on a dark page"


def test_a_colour_map_stays_as_it_is_on_dark_pages(root: Path) -> None:
    drawn = [
        '<g id="axes_1"><g id="QuadContourSet_1"><path style="fill: #00224e"/></g>',
        '<g id="line2d_1"><path style="fill: #ffffff"/></g>',
        '<g id="patch_1"><path style="fill: #00224f"/></g>',
        '<g id="matplotlib.axis_1"><g id="line2d_2"><path style="stroke: #000000"/>',
        '</g></g></g><g id="axes_2"><g id="line2d_3"><path style="fill: #ffffff"/>',
    ]
    dark = load(root, "pcl_page").dark_version("<svg>" + "".join(drawn) + "</g></g>")
    over_map, beside_map = dark.split('<g id="axes_2">')
    assert "#00224e" in over_map and "#ffffff" in over_map and "#00224f" in over_map
    assert "#000000" not in over_map and "#ffffff" not in beside_map


def test_words_upon_a_picture_keep_their_colour_and_words_beside_it_turn(
    root: Path,
) -> None:
    drawn = [
        '<g id="axes_1"><g id="patch_2"><path d="M 10 90 L 90 90 L 90 20 L 10 20 z"/></g>',
        '<image href="a"/><g id="text_1"><g transform="translate(20 30) scale(.1)"/></g>',
        '<g id="text_2"><g style="fill: #ffffff" transform="translate(40 50)"/></g>',
        '<g id="text_3"><g style="fill: #111111" transform="translate(40 12)"/></g>',
        '<g id="text_4"><g transform="translate(40 14)"/></g></g>',
        '<g id="axes_2"><g id="patch_3"><path d="M 10 190 L 90 120 z"/></g>',
        '<g id="text_5"><g style="fill: #ffffff" transform="translate(40 150)"/></g></g>',
    ]
    dark = load(root, "pcl_page").dark_version("<svg>" + "".join(drawn))
    assert '<g style="fill: #000000" transform="translate(20 30) scale(.1)"/>' in dark
    assert '<g style="fill: #ffffff" transform="translate(40 50)"/>' in dark
    assert "#111111" not in dark and '<g transform="translate(40 14)"/>' in dark
    assert '<g style="fill: #ffffff" transform="translate(40 150)"/>' not in dark


def test_a_drawing_has_a_second_layout_where_there_is_one(
    root: Path, tmp_path: Path
) -> None:
    run, page = load(root, "pcl_run"), load(root, "pcl_page")
    drawn = "<svg>\n</svg>\n"
    output = {
        "data": {run.DRAWING: drawn},
        "metadata": {run.DRAWING: {"phone": "<svg>narrow</svg>"}},
    }
    run.take_phone_layouts([output, {"output_type": "stream"}], tmp_path)
    assert output["metadata"] == {run.DRAWING: {}}  # not kept twice
    (layout,) = tmp_path.iterdir()
    assert layout.read_text() == "<svg>narrow</svg>"
    stem = layout.name.removesuffix("-phone.svg")
    for name, narrow in ((stem, True), ("another", False)):
        image = page.PICTURE.match(f'<img alt="a" src="../_images/{name}.svg" />')
        shown = page.two_pictures(image, tmp_path)
        assert shown.count("<img") == 2 and shown.count("<source") == 2 * narrow
        assert (f"{name}-phone-dark.svg" in shown) is narrow


READS = {
    "one": ['runs = results_of("table1")', "plot(runs)"],
    "among": [
        'NAMES = ("table1", "recovery", "modes")\n'
        "found = {name: results_of(name) for name in NAMES}",
        'for kind in ("a", "b"):\n    draw(found["modes"].row(kind))',
    ],
    "computed": [
        'runs = results_of("table1")',
        "for runs in range(3):\n    plot(runs)",
    ],
    "unpacked": ['a, b = map(results_of, ("table1", "modes"))', "plot(b)"],
    "later": [
        "def last(name):\n    return ledger.where(name)\nledger = read()\n"
        'rows = last("recovery")',
        "plot(rows)",
    ],
    "compared": [
        'runs = [r for n in ("table1", "modes") for r in results_of(n)]',
        'for r in runs:\n    plot(r, bold=r.name == "modes")',
    ],
    "whole": ["board = scoreboard(read())", "plot(board)"],
}


@pytest.mark.parametrize(
    ("case", "behind"),
    [
        ("one", ["table1"]),
        ("among", ["modes"]),
        ("computed", []),
        ("unpacked", ["modes"]),
        ("later", ["recovery"]),
        ("compared", ["modes", "table1"]),
        ("whole", ["records"]),
    ],
)
def test_a_figure_knows_the_records_behind_it(
    root: Path, case: str, behind: list[str]
) -> None:
    cells = [{"cell_type": "code", "source": text} for text in READS[case]]
    known = {"table1", "recovery", "modes"}
    assert load(root, "pcl_records").records_behind(cells, known)[1] == behind


DRAWN = """import matplotlib.pyplot as plt
from matplotlib_inline.backend_inline import set_matplotlib_formats
set_matplotlib_formats("svg")
plt.plot([1, 2]);"""


def test_figures_are_numbered_linked_and_listed(root: Path, tmp_path: Path) -> None:
    small_book(
        root,
        tmp_path,
        n260_losses=[
            "# Losses\n\nSee {numref}`fig-second`.",
            f"#| echo: false\n{DRAWN}\nplt.show()\nprint('printed after it')",
            "*Figure.* It rises. And more.\n\nText {term}`slope` after.",
            DRAWN,
            "*Figure (fig-second).* It rises again. Left: how. Right: why.",
            ":::{prf:theorem} Of slopes\n:label: thm-a\nYes.\n:::",
            DRAWN,
            "*Figure.* It is as Kirchhof et al. say of $x$.\nBut how?\nOr so.",
            DRAWN,
            "*Figure.* Does a line\nbreak *here*?\nIt does.",
        ],
        figures="# All\n\n```{pcl-list} figures\n```\n\n```{pcl-list} theorems\n```\n",
        glossary="# Words\n\n```{glossary}\nslope\n    Rise over run. Or not.\n```\n",
    )
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    html = tmp_path / "_build" / "html"
    page, lists = (
        (html / f"nbs/{n}.html").read_text() for n in ("260_losses", "figures")
    )
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "See Figure 260.2 ." in text or "See Figure 260.2." in text
    assert "Figure 260.1 It rises. And more. Code" in text
    assert text.index("And more. Code") < text.rindex("printed after it")
    assert text.count("left is above") == 1  # where a caption speaks of sides
    for anchor in ("figure-1", "code-of-figure-1", "code-of-figure-2"):
        assert f'id="{anchor}"' in page
    assert "Code of this figure" in page and 'title="Rise over run."' in page
    assert "Cite this page: " in page and "revision " in page
    for name in re.findall(r'src="\.\./(_images/[^"]+\.svg)"', page):
        assert (html / name).exists(), name
    assert page.count("-dark.svg") == 4
    said = " ".join(re.sub(r"<[^>]*>", " ", lists).split())
    for line in (
        "Figure 260.1 It rises. Figure 260.2 It rises again. Figure 260.3 It is as "
        r"Kirchhof et al. say of \(x\) . Figure 260.4 Does a line break here ?",
    ):
        assert line in said, said[-900:]
    for words in ("And more", "Left: how", "But how", "It does"):
        assert words not in said
    for line in ("Figure 260.1 It rises.", "Theorem 260.1 (Of slopes)"):
        assert line in said, said[-500:]


def test_outputs_are_kept_while_code_library_and_ledger_stay(
    root: Path, tmp_path: Path
) -> None:
    counter = "n = int(open('runs').read()); open('runs', 'w').write(str(n + 1))\n"
    chapter = ["# Count", counter + "print('run number', n)"]
    small_book(root, tmp_path, n110_count=chapter)
    runs = tmp_path / "nbs" / "runs"
    runs.write_text("0")
    page = tmp_path / "_build" / "html" / "nbs" / "110_count.html"

    def after(*words: str, **env: str) -> int:
        done = build(tmp_path, *words, **env)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        number = int(runs.read_text())
        assert f"run number {number - 1}" in page.read_text()
        return number

    assert after("-q", PCL_REUSE="1") == 1
    assert after("-q", PCL_REUSE="1") == 1
    write_page(tmp_path, "110_count", [*chapter, "# Prose\n\nMore of it."])
    assert after("-q", PCL_REUSE="1") == 1 and "More of it." in page.read_text()
    write_page(tmp_path, "110_count", [*chapter, "x = 1"])
    assert after("-q", PCL_REUSE="1") == 2, "its code changed"
    for changed in ("pcl/bessel.py", "pcl/published/sphere.py", "results/a/b.json"):
        (tmp_path / changed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / changed).write_text("\n")
        before = int(runs.read_text())
        assert after("-q", PCL_REUSE="1") == before + 1, changed
        assert after("-q", PCL_REUSE="1") == before + 1
    assert after("--all") == 6 and after("--all") == 7, "make book runs everything"


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make in a small book, with the tools of this environment."""
    (folder / "ready").touch()  # after everything it depends on: nothing is installed
    tools = [f"BIN={Path(sys.executable).parent}", "READY=ready"]
    return subprocess.run(
        ["make", "--no-print-directory", *words, *tools],
        cwd=folder,
        capture_output=True,
        text=True,
    )


FORKED = """
import sys
import nbformat
sys.path.insert(0, "book")
import pcl_kernels
from pcl_run import run
pcl_kernels.PRELOAD = ("matplotlib.figure", "json.tool")
pcl_kernels.fork_kernels()
def page(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return run(nbformat.v4.new_notebook(cells=cells), ".", 60, True)
ran, _, wrong = page(
    "import os, sys; here = os.getpid(); print('json.tool' in sys.modules)",
    "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()",
    "print('pcl' in sys.modules, 'sphinx' in sys.modules, 'book' in sys.path)",
)
assert not wrong, wrong
said = [cell.outputs[0] for cell in ran.cells]
assert said[0].text.strip() == "True" and "image/png" in said[1].data
assert said[2].text.strip() == "False False False"
ran, _, wrong = page("print('here' in globals())", "1 / 0")
assert ran.cells[0].outputs[0].text.strip() == "False"
assert len(wrong) == 1 and wrong[0].startswith("cell 2: ZeroDivisionError"), wrong
_, _, wrong = page("import os; os._exit(3)")
assert wrong == ["DeadKernelError: Kernel died"], wrong
print("forked")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are forked")
def test_forked_kernels_are_fresh_show_figures_and_may_die(root: Path) -> None:
    words = [sys.executable, "-c", FORKED]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.split() == ["forked"], done.stderr


def test_what_solutions_take_is_added_up_and_taken_off(root: Path) -> None:
    times = {
        "iopub.execute_input": "2026-01-01T00:00:01.500000Z",
        "shell.execute_reply": "2026-01-01T00:00:03.000000Z",
    }
    cells = []
    for line in ("Solution 1", "Imports", "Solution 2"):
        cell = nbformat.v4.new_code_cell("1")
        cell.metadata["mystnb"] = {"code_prompt_show": line}
        cell.metadata["execution"] = dict(times)
        cells.append(cell)
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert load(root, "pcl_run").take_solution_seconds(notebook) == 3.0
    assert not any("execution" in cell.metadata for cell in notebook.cells)


def test_a_kernel_that_never_answers_is_started_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, place, runs = load(root, "pcl_run"), str(tmp_path), []
    refused = RuntimeError("Kernel died before replying to kernel_info")
    killed = book.DeadKernelError("Kernel died")

    def fail(*errors: Exception) -> None:
        left = list(errors)

        def tried(*words: object, **options: object) -> str:
            runs.append(left.pop(0) if left else None)
            if runs[-1] is not None:
                raise runs[-1]
            return "done"

        runs.clear()
        monkeypatch.setattr(book, "single_nb_execution", tried)

    fail(refused, refused)
    assert book.execute({}, place, 60) == "done" and runs == [refused, refused, None]
    fail(refused, refused, refused, refused)
    with pytest.raises(RuntimeError, match="before replying"):
        book.execute({}, place, 60)
    assert len(runs) == book.STARTS
    fail(killed)  # by one of its cells
    with pytest.raises(book.DeadKernelError):
        book.execute({}, place, 60)
    assert runs == [killed]


@pytest.fixture
def small_project(root: Path, tmp_path: Path) -> Path:
    """A book with a library of one module, and all that make needs."""
    chapter = [
        "# Ball\n> Round.",
        "#| default_exp ball",
        "#| export\nx  =  (1,2)",
        "x[0]",
    ]
    link = "# Other\n\nSee {eq}`eq-elsewhere` and {prf:ref}`thm-elsewhere`."
    other = [link, "raise ValueError('only when asked for')"]
    small_book(root, tmp_path, n110_ball=chapter, n120_other=other, words="# Words\n")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "settings.ini"):
        shutil.copy(root / name, tmp_path)
    (tmp_path / "pcl").mkdir()
    return tmp_path


def test_make_export_formats_cleans_and_exports(small_project: Path) -> None:
    done = make(small_project, "export")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "x = (1, 2)" in (small_project / "nbs" / "110_ball.ipynb").read_text()
    module = (small_project / "pcl" / "ball.py").read_text()
    assert "x = (1, 2)" in module and module.startswith('"""Round."""')


def test_make_chapter_renders_one_chapter_and_says_where(small_project: Path) -> None:
    done = make(small_project, "chapter", "N=110")
    assert done.returncode == 0, done.stdout + done.stderr
    page = Path(done.stdout.splitlines()[-1].removeprefix("The chapter is at "))
    text = page.read_text()
    assert page.stem == "110_ball" and ">110. Ball<" in text
    assert not page.with_stem("120_other").exists()
    assert (small_project / "pcl" / "ball.py").exists(), "exported"

    failed = make(small_project, "chapter", "N=120_other.ipynb")
    assert failed.returncode != 0
    assert "nbs/120_other, cell 2: ValueError: only when asked for" in failed.stdout


@pytest.mark.parametrize("words", [["N=999"], ["N=balls"], []])
def test_make_chapter_answers_an_unknown_one_in_one_line(
    small_project: Path, words: list[str]
) -> None:
    done = make(small_project, "chapter", *words)
    assert done.returncode != 0 and done.stdout.count("\n") == 1
    assert done.stdout.startswith("No chapter ") and "110 120" in done.stdout
