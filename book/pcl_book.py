"""Sphinx extension of the book: nbdev directives, chapter numbers, outputs computed ahead
of reading, offline assets, the note on top of every chapter, the reference."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

DIRECTIVE = re.compile(r"^#\|\s*(?P<name>[\w-]+)(?:\s*:\s*(?P<value>\S+)|\s+.*)?\s*$")
TAG_OF = {
    "hide": "remove-cell",
    "default_exp": "remove-cell",
    "hide_input": "remove-input",
    "hide_output": "remove-output",
}
TAG_OF_VALUE = {
    ("echo", "false"): "remove-input",
    ("eval", "false"): "skip-execution",
    ("include", "false"): "remove-cell",
    ("code-fold", "true"): "hide-input",
}
# Lines of the theme that only matter online: a font preload that a page opened from
# disk may not make (the icons are drawn by
# script), and thebe, which is declared twice and would fetch itself from a server.
ONLINE_ONLY = re.compile(
    r'^.*(?:<link rel="preload" as="font"|THEBE_JS_URL|sphinx-thebe\.).*\n',
    re.MULTILINE,
)
# What opens a branch of the side bar has a name for those who do not see the arrow.
NAMELESS = (
    '<summary><span class="toctree-toggle"',
    '<summary aria-label="Pages below"><span class="toctree-toggle"',
)
NUMBER = re.compile(r"nbs/(\d{3})_")
INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="refresh" content="0; url={page}"></head>
<body><a href="{page}">{title}</a></body></html>
"""
SWITCH = "PCL_RERUN"
MODULE = re.compile(
    r"^#\|\s*(?:default_exp|export)[ \t]+(?P<name>[\w.]+)", re.MULTILINE
)
RUN_NOTE = (
    ":::{{container}} pcl-run\n"
    "Run this chapter yourself: {{download}}`{stem}.ipynb <{stem}.ipynb>`{launch}, "
    "or `pcl notebooks . --chapter {number}`. {how}{where}\n:::"
)
LAUNCH = (
    ", in [Binder](https://mybinder.org/v2/gh/{name}/{branch}?labpath=nbs/{stem}.ipynb)"
    ", in [Colab](https://colab.research.google.com/github/{name}/blob/{branch}/nbs/"
    "{stem}.ipynb)"
)
REFERENCE = " What it adds to the library is listed in the reference of {pages}."
PAGE = "{{doc}}`pcl.{name} </reference/{name}>`"
COMPUTED = "Everything on this page is computed while it runs."
LEDGER = "It reads recorded runs from the ledger, and computes the rest while it runs."
RECORDED = f"It reads recorded results; start Jupyter with the environment variable `{SWITCH}=1` to run its experiments for real."


def tag_of(line: str) -> str | None:
    """The cell tag that says what an nbdev directive line says; None if the line needs
    no tag."""
    match = DIRECTIVE.match(line)
    if match is None:
        return None
    name, value = match["name"], (match["value"] or "").lower()
    return TAG_OF_VALUE.get((name, value)) or TAG_OF.get(name)


def translate_cell(cell: dict[str, Any]) -> None:
    """Drop the leading directives of a code cell, leaving their meaning behind as
    tags."""
    lines = "".join(cell["source"]).splitlines(keepends=True)
    tags = cell.setdefault("metadata", {}).setdefault("tags", [])
    while lines and DIRECTIVE.match(lines[0].strip()):
        tag = tag_of(lines.pop(0).strip())
        if tag and tag not in tags:
            tags.append(tag)
    # A cell is tagged, never deleted: a hidden import must still run.
    cell["source"] = "".join(lines).lstrip("\n")


def modules_of(notebook: dict[str, Any]) -> list[str]:
    """The modules that a chapter exports to, in the order of their first cell."""
    sources = (
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    )
    found = (match["name"] for text in sources for match in MODULE.finditer(text))
    return list(dict.fromkeys(found))


def launch_links(
    place: str,  # owner/name@branch of a public repository, or nothing
    stem: str,  # of the chapter's file
) -> str:
    """Links that open a chapter where it can run without being installed."""
    name, _, branch = place.partition("@")
    return LAUNCH.format(name=name, branch=branch or "main", stem=stem) if name else ""


def add_run_note(
    notebook: dict[str, Any],
    stem: str,  # of its file
    described: list[str],  # the modules with a page in the reference
    place: str = "",  # where Binder and Colab find the chapters
    library: Collection[int] = (),  # positions of the cells that are exported
) -> None:
    """Put the download link, the rerun switch where the chapter has experiments, and
    the reference under the title."""
    from pcl_records import reads_records

    first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    code = "\n".join(
        "".join(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
    )
    how = (
        RECORDED
        if "results_of(" in code
        else LEDGER
        if reads_records(notebook["cells"], library)
        else COMPUTED
    )
    pages = [PAGE.format(name=name) for name in described]
    listed = " and ".join(filter(None, [", ".join(pages[:-1]), *pages[-1:]]))
    where = REFERENCE.format(pages=listed) if pages else ""
    first["source"] = (
        "".join(first["source"]).rstrip()
        + "\n\n"
        + RUN_NOTE.format(
            stem=stem,
            launch=launch_links(place, stem),
            number=stem.partition("_")[0],
            how=how,
            where=where,
        )
        + "\n"
    )


def on_source_read(app: Any, docname: str, source: list[str]) -> None:
    """Translate a notebook between the file on disk and the parser."""
    from pcl_figures import mark_captions
    from pcl_fold import EXPORTED, fold_cells
    from pcl_records import experiments_in, records_behind

    if not str(app.env.doc2path(docname)).endswith(".ipynb"):
        return
    notebook = json.loads(source[0])
    reference = Path(app.srcdir) / "reference"
    described = [  # before the directives are dropped
        name for name in modules_of(notebook) if (reference / f"{name}.md").exists()
    ]
    cells = notebook["cells"]
    exported = {n for n, c in enumerate(cells) if EXPORTED.search("".join(c["source"]))}
    for cell in cells:
        if cell["cell_type"] == "code":
            translate_cell(cell)
    fold_cells(cells, exported)
    known = experiments_in(Path(app.srcdir) / "results")
    mark_captions(cells, records_behind(cells, known))
    place = app.config.pcl_launch
    add_run_note(notebook, Path(docname).name, described, place, exported)
    source[0] = json.dumps(notebook)


def renumber(env: Any) -> None:
    """Give every chapter the number in its file name, and its sections with it."""
    for docname, numbers in env.toc_secnumbers.items():
        match = NUMBER.match(docname)
        if match is None:
            continue
        first = int(match[1])
        for anchor, number in numbers.items():
            numbers[anchor] = (first, *number[1:]) if number else number
        references = env.tocs[docname].findall(lambda node: "anchorname" in node)
        for node in (env.titles[docname], env.longtitles[docname], *references):
            if node.get("secnumber"):
                node["secnumber"] = [first, *node["secnumber"][1:]]


def number_chapters_by_file(app: Any) -> None:
    """Renumber after Sphinx has counted the chapters and before it numbers figures,
    equations and theorems."""
    from sphinx.environment.collectors.toctree import TocTreeCollector

    # Jupyter Book's extensions replace the method, and Sphinx's class by one of their own.
    collector = [TocTreeCollector, *TocTreeCollector.__subclasses__()][-1]
    count = collector.assign_section_numbers

    def assign_section_numbers(self: Any, env: Any) -> list[str]:
        before = env.toc_secnumbers
        count(self, env)
        renumber(env)
        now = env.toc_secnumbers
        return [name for name in now if now[name] != before.get(name)]

    collector.assign_section_numbers = assign_section_numbers  # type: ignore[method-assign]


def copy_mathjax(outdir: Path) -> None:
    """Copy MathJax from the installed package, so that no page asks the network for
    it."""
    # The package's name has hyphens in it, so it can be found but not imported by name.
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "sphinx-mathjax-offline is not installed: pip install -c constraints.txt "
            "-e '.[book]'"
        )
    target = outdir / "_static" / "vendor"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(
        Path(spec.origin).parent / "static" / "mathjax" / "tex-svg-full.js", target
    )


def on_build_finished(app: Any, exception: Exception | None) -> None:
    """Make the pages complete offline."""
    if exception is not None or app.builder.format != "html":
        return
    copy_mathjax(Path(app.outdir))
    if app.config.root_doc != "index":
        index = INDEX.format(
            title=app.config.html_title, page=f"{app.config.root_doc}.html"
        )
        (Path(app.outdir) / "index.html").write_text(index, encoding="utf-8")
    for page in Path(app.outdir).rglob("*.html"):
        text = ONLINE_ONLY.sub("", page.read_text(encoding="utf-8"))
        page.write_text(text.replace(*NAMELESS), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Write the reference, before Sphinx looks for pages, and register the handlers."""
    # Sphinx finds them beside this file.
    import pcl_figures
    import pcl_page
    import pcl_records
    from pcl_reference import write_pages
    from pcl_run import connect

    if (Path(app.srcdir) / "pcl").is_dir():
        write_pages(Path(app.srcdir))
    # Late, so that every other extension has done with the numbering.
    app.connect("builder-inited", number_chapters_by_file, priority=900)
    connect(app, on_source_read)
    app.connect("source-read", on_source_read)
    app.connect("build-finished", on_build_finished)
    app.add_config_value("pcl_launch", "", "env")
    pcl_figures.connect(app)
    pcl_page.connect(app)
    pcl_records.connect(app)
    app.add_css_file("pcl.css")
    return {"parallel_read_safe": True, "parallel_write_safe": True}
