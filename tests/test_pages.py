"""The book's pages: citations resolve, pages of the table of contents exist, and the
citation file is complete."""

import ast
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "nbs").glob("*.md"), *(ROOT / "nbs").glob("*.ipynb")])
CITE = re.compile(r"\{cite(?::[a-z]+)?\}`([^`]+)`")
LINK = re.compile(r"\]\(([^)#:\s]+\.(?:md|ipynb))\)")
ENTRY = re.compile(r"^@\w+\{([^,\s]+),", re.MULTILINE)
FENCE = re.compile(r"^(`{3,})[^`\n]*\n.*?^\1\s*$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Markdown of a page: the file itself, or the Markdown cells of a notebook."""
    if page.suffix == ".md":
        return page.read_text(encoding="utf-8")
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )


def bib_keys() -> list[str]:
    return ENTRY.findall((ROOT / "references.bib").read_text(encoding="utf-8"))


def toc_files(node: object) -> list[str]:
    """Every `root` and `file` entry of the table of contents."""
    if isinstance(node, dict):
        own = [value for key, value in node.items() if key in ("root", "file")]
        return own + [name for value in node.values() for name in toc_files(value)]
    if isinstance(node, list):
        return [name for value in node for name in toc_files(value)]
    return []


def test_bibliography_has_unique_keys_and_the_fields_a_reader_needs() -> None:
    keys = bib_keys()
    assert len(keys) == len(set(keys))
    for entry in (ROOT / "references.bib").read_text(encoding="utf-8").split("\n@")[1:]:
        assert re.search(r"^\s*author\s*=", entry, re.MULTILINE), entry
        assert re.search(r"^\s*title\s*=", entry, re.MULTILINE), entry


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_citations_resolve(page: Path) -> None:
    cited = {
        key.strip() for group in CITE.findall(prose(page)) for key in group.split(",")
    }
    assert cited <= set(bib_keys()), (
        f"not in references.bib: {sorted(cited - set(bib_keys()))}"
    )


def test_the_citation_pattern_sees_every_form() -> None:
    text = "{cite}`a` and {cite:t}`b`, both {cite}`c,d`"
    assert [key for group in CITE.findall(text) for key in group.split(",")] == [
        "a",
        "b",
        "c",
        "d",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_resolve(page: Path) -> None:
    missing = [
        target
        for target in LINK.findall(prose(page))
        if not (page.parent / target).is_file()
    ]
    assert not missing, f"{page.name} links to {missing}"


def test_every_page_in_the_table_of_contents_exists() -> None:
    names = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))
    assert names and names[0] == "nbs/intro"
    assert len(names) == len(set(names)), "a page is listed twice"
    missing = [
        name
        for name in names
        if not any((ROOT / f"{name}{suffix}").is_file() for suffix in (".md", ".ipynb"))
    ]
    assert not missing


def test_citation_file_names_this_work_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
        "version",
        "license",
        "references",
    } <= set(citation)
    init = (ROOT / "pcl" / "__init__.py").read_text(encoding="utf-8")
    assert f'"{citation["version"]}"' in init, (
        "CITATION.cff and the package disagree about the version"
    )
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference)
    titles = [reference["title"] for reference in citation["references"]]
    assert any(
        title.startswith("Probabilistic Contrastive Learning Recovers")
        for title in titles
    )


def test_the_example_on_the_root_page_runs() -> None:
    example, *_ = re.findall(  # the loop below it is run with those of README
        r"^```python\n(.*?)^```",
        prose(ROOT / "nbs" / "intro.md"),
        re.MULTILINE | re.DOTALL,
    )
    *statements, last = ast.parse(example).body
    assert isinstance(last, ast.Expr)
    names: dict[str, object] = {}
    exec(compile(ast.Module(statements, []), "intro.md", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "intro.md", "eval"), names)
    assert isinstance(value, torch.Tensor) and value.isfinite().all()


def test_figures_in_markdown_have_alt_text() -> None:
    for page in PAGES:
        for block in FENCE.finditer(prose(page)):
            if block.group(0).lstrip("`").startswith(("{figure}", "{image}")):
                assert re.search(r"^:alt: \S+", block.group(0), re.MULTILINE), (
                    f"{page.name}: a figure without alt text"
                )


def test_opening_figure_is_vector_and_described() -> None:
    root = ET.parse(ROOT / "nbs" / "images" / "posterior.svg").getroot()
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert {"title", "desc"} <= tags
    assert "image" not in tags, "a bitmap inside the drawing"
