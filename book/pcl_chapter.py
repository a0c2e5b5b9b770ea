"""Run and render one chapter: `python book/pcl_chapter.py 260`, or `make chapter N=260`.

The page stands in a small book of its own, with the pages that run nothing around it. Links to other chapters
lead nowhere there; `make pages` checks them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

# What a link to a page that is left out gives rise to.
ELSEWHERE = ["ref", "myst.xref_missing"]
NOISE = re.compile(r"WARNING: label '.*' not found|IPKernelApp")


def find(folder: Path, wanted: str) -> str:
    """The stem of the page that a number or a name means; ends with one line if there is none."""
    pages = sorted(p for p in folder.iterdir() if p.suffix in (".ipynb", ".md"))
    name = Path(wanted).name.removesuffix(".ipynb").removesuffix(".md")
    for page in pages:
        if name and name in (page.stem, page.stem.split("_")[0]):
            return page.stem
    numbers = " ".join(p.stem.split("_")[0] for p in pages if p.stem[0].isdigit())
    print(
        f"No chapter {wanted!r}: give a number or a name, as in make chapter N=260; "
        f"there are {numbers}"
    )
    sys.exit(1)


def runs(page: Path) -> bool:
    """Does a page have code to run?"""
    return page.suffix == ".ipynb" or "\nkernelspec:" in page.read_text("utf-8")


def small_toc(root: Path, stem: str) -> dict[str, Any]:
    """The table of contents with one chapter and the pages that run nothing."""
    toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    quiet = {f"nbs/{p.stem}" for p in (root / "nbs").glob("*.md") if not runs(p)}
    shown = quiet - {"nbs/reference"} | {f"nbs/{stem}"}
    for part in toc["parts"]:
        part["chapters"] = [c for c in part["chapters"] if c["file"] in shown]
    toc["parts"] = [part for part in toc["parts"] if part["chapters"]]
    return toc


def small_config(root: Path) -> dict[str, Any]:
    """The book's settings, with paths that hold elsewhere and without warnings on missing pages."""
    config = yaml.safe_load((root / "_config.yml").read_text(encoding="utf-8"))
    sphinx = config["sphinx"]
    sphinx["local_extensions"] = {
        name: str(root / folder) for name, folder in sphinx["local_extensions"].items()
    }
    sphinx["config"]["suppress_warnings"] = ELSEWHERE
    return config


def render(root: Path, stem: str) -> int:
    """Build a page and say where it is; the exit code is that of the build."""
    folder = root / "_build" / "chapter"
    folder.mkdir(parents=True, exist_ok=True)
    toc, config = folder / "toc.yml", folder / "config.yml"
    toc.write_text(yaml.safe_dump(small_toc(root, stem)), encoding="utf-8")
    config.write_text(yaml.safe_dump(small_config(root)), encoding="utf-8")
    words = ["build", "-q", "--toc", toc, "--config", config, "--path-output", folder]
    command = [Path(sys.executable).parent / "jupyter-book", *words, root]
    env = os.environ | {"PCL_REUSE": "1"}
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True
    )
    for line in (done.stdout * (done.returncode != 0) + done.stderr).splitlines():
        if not NOISE.search(line):
            print(line)
    page = folder / "_build" / "html" / "nbs" / f"{stem}.html"
    if done.returncode == 0:
        print(f"The chapter is at {page}")
    return done.returncode


def main(root: Path, *words: str) -> int:
    """Build a page and say where it is, or with --find only see that it is there."""
    stem = find(root / "nbs", next((w for w in words if w != "--find"), ""))
    return 0 if "--find" in words else render(root, stem)


if __name__ == "__main__":
    sys.exit(main(Path.cwd(), *sys.argv[1:]))
