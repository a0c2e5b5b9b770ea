"""Run the chapters before Sphinx reads them: a process per core, one thread in each. In a large build their kernels are forked
from a process that has imported the large packages already (`pcl_kernels`).

Every page that is about to be read runs, unless `PCL_REUSE=1` allows outputs from before. Those are taken where three
things are as they were: the page's code cells with their tags, the library (`pcl/**/*.py`) and the ledger (`results/`).
Installed packages and data sets are not among them: a build without the variable runs everything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import myst_nb.core.execute
import nbformat
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.execute.direct import NotebookClientDirect
from myst_nb.core.read import create_nb_reader
from nbclient.exceptions import DeadKernelError
from pcl_kernels import fork_kernels
from sphinx.errors import ExtensionError
from sphinx.util import logging

REUSE = "PCL_REUSE"
WORKERS = min(os.cpu_count() or 1, 8)  # each holds torch, and memory ends as well
MANY = 8  # pages for which it pays to import the large packages once, ahead of all
STARTS = 3  # tries to start a kernel: its ports are picked free, and may be taken since
SLOW = 60  # seconds that are worth a line, and no more: the machine may be busy
DRAWING = "image/svg+xml"
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
say = logging.getLogger(__name__).info


def notebook_of(app: Any, docname: str) -> Any | None:
    """A page as its parser will see it; None if it has nothing to run."""
    path = app.env.doc2path(docname)
    source = [Path(path).read_text(encoding="utf-8")]
    reader = create_nb_reader(
        path, app.env.myst_config, app.env.mystnb_config, source[0]
    )
    if reader is None:
        return None
    app.pcl_translate(app, docname, source)
    return reader.read(source[0])


@cache
def foundations(root: Path) -> str:
    """Hash of what all chapters stand on: the library and the ledger."""
    paths = [*(root / "pcl").rglob("*.py"), *(root / "results").rglob("*.*")]
    digest = hashlib.sha256()
    for path in sorted(p for p in paths if p.is_file()):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_of(notebook: Any) -> list[Any]:
    """The code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def key_of(notebook: Any, root: Path) -> str:
    """Hash of what a page's outputs depend on; its prose is not part of it."""
    code = [(c.source, c.metadata.get("tags", [])) for c in code_of(notebook)]
    text = json.dumps([foundations(root), code])
    return hashlib.sha256(text.encode()).hexdigest()


def kept_file(root: Path, docname: str) -> Path:
    """Where the outputs of a page are kept."""
    return root / "_build" / "outputs" / f"{docname}.ipynb"


def kept(root: Path, docname: str) -> Any | None:
    """The page as it ran last, if it is there and whole."""
    try:
        return nbformat.read(kept_file(root, docname), 4)
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        return None


def keep(root: Path, docname: str, notebook: Any) -> None:
    """Keep a page that ran; a reader sees the old file or the new one."""
    path = kept_file(root, docname)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    nbformat.write(notebook, part)
    part.replace(path)


def complaints(
    notebook: Any,
    stderr: bool,  # is output to it an error?
) -> list[str]:
    """What went wrong in which cell, counted from 1 as an editor shows them."""
    found = []
    for number, cell in enumerate(notebook.cells, 1):
        allowed = "raises-exception" in cell.metadata.get("tags", [])
        for output in cell.get("outputs", []):
            if output.output_type == "error" and not allowed:
                trace = COLOUR.sub("", "\n".join(output.traceback))
                found.append(f"cell {number}: {output.ename}: {output.evalue}\n{trace}")
            elif output.get("name") == "stderr" and stderr:
                found.append(f"cell {number} writes to stderr: {output.text.rstrip()}")
    return found


def take_solution_seconds(notebook: Any) -> float:
    """What the solutions of exercises took, from the times that stand beside the cells;
    the times are taken away."""
    total = 0.0
    for cell in code_of(notebook):
        times = cell.metadata.pop("execution", {})
        line = cell.metadata.get("mystnb", {}).get("code_prompt_show", "")
        if line.startswith("Solution") and "shell.execute_reply" in times:
            ends = (times["iopub.execute_input"], times["shell.execute_reply"])
            start, end = (
                datetime.fromisoformat(t.replace("Z", "+00:00")) for t in ends
            )
            total += (end - start).total_seconds()
    return total


def execute(notebook: Any, folder: str, timeout: int) -> Any:
    """Run all cells. A kernel that ends before it answers has run none of them, so
    another one is started; a kernel that a cell ends is not."""
    how = {"allow_errors": False, "record_timing": True}
    for _ in range(STARTS - 1):
        try:
            return single_nb_execution(notebook, folder, timeout, **how)
        except DeadKernelError:
            raise
        except RuntimeError as error:
            say(f"{error}; starting another")
    return single_nb_execution(notebook, folder, timeout, **how)


def run(
    notebook: Any,
    folder: str,  # where it runs
    timeout: int,  # of a cell, in seconds
    stderr: bool,  # is output to it an error?
) -> tuple[Any, float, list[str]]:  # what ran, its seconds, what went wrong
    """Run one page in a process of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"  # small tensors: a second thread only waits
    os.environ["PCL_PHONE"] = "1"  # figures in a second layout, for phones
    try:
        done = execute(notebook, folder, timeout)
    except Exception as error:  # a kernel that dies, or never starts
        return notebook, 0.0, [f"{type(error).__name__}: {error}"]
    wrong = complaints(notebook, stderr)
    if done.err is not None and not wrong:
        wrong = [COLOUR.sub("", str(done.err))]
    return notebook, done.time, wrong


def run_all(app: Any, pages: dict[str, Any]) -> None:
    """Run pages side by side, the slowest of last time first; any failure stops the build after the last one."""
    root, config = Path(app.srcdir), app.env.mystnb_config
    last = {
        name: ran.metadata.pcl.seconds for name in pages if (ran := kept(root, name))
    }
    order = sorted(pages, key=lambda name: -last.get(name, float("inf")))
    seconds, solutions, wrong = {}, 0.0, []
    first = fork_kernels if len(pages) > MANY else None
    with ProcessPoolExecutor(WORKERS, initializer=first) as pool:
        jobs = {}
        for name in order:
            folder = str(Path(app.env.doc2path(name)).parent)
            strict = config.output_stderr == "error"
            job = pool.submit(
                run, pages[name], folder, config.execution_timeout, strict
            )
            jobs[job] = name
        for count, job in enumerate(as_completed(jobs), 1):
            name = jobs[job]
            notebook, seconds[name], failed = job.result()
            note = "  FAILED" if failed else "  slow" if seconds[name] > SLOW else ""
            say(f"[{count:>2}/{len(jobs)}] {name:<28} {seconds[name]:5.1f} s{note}")
            wrong += [f"{name}, {line}" for line in failed]
            solutions += take_solution_seconds(notebook)
            if not failed:
                key = key_of(notebook, root)
                notebook.metadata["pcl"] = {"key": key, "seconds": seconds[name]}
                keep(root, name, notebook)
    if wrong:
        raise ExtensionError("Chapters failed:\n" + "\n".join(wrong))
    slowest = sorted(seconds, key=lambda name: -seconds[name])[:5]
    said = ", ".join(f"{name} {seconds[name]:.0f} s" for name in slowest)
    say(f"Pages that ran: {len(seconds)}; the slowest: {said}")
    say(f"Solutions of exercises among them: {solutions:.1f} s")


def on_outdated(app: Any, env: Any, *changed: set[str]) -> list[str]:
    """Pages whose text is as it was, but not the library, the ledger or their code."""
    if env.mystnb_config.execution_mode != "force":
        return []
    root, read = Path(app.srcdir), getattr(env, "pcl_keys", {})
    pages = {name: notebook_of(app, name) for name in read if name in env.found_docs}
    return [n for n, page in pages.items() if page and key_of(page, root) != read[n]]


def on_reading(app: Any, env: Any, docnames: list[str]) -> None:
    """Run the pages that Sphinx is about to read."""
    if env.mystnb_config.execution_mode != "force":
        return
    root = Path(app.srcdir)
    pages = {name: page for name in docnames if (page := notebook_of(app, name))}
    keys = {name: key_of(page, root) for name, page in pages.items()}
    env.pcl_keys = getattr(env, "pcl_keys", {}) | keys  # saved with what was read
    if os.environ.get(REUSE) == "1" and os.environ.get("PCL_RERUN") != "1":
        for name, key in keys.items():
            ran = kept(root, name)
            if ran is not None and ran.metadata.pcl.key == key:
                del pages[name]
    if len(keys) > len(pages):
        say(f"Pages that keep their outputs: {len(keys) - len(pages)}")
    if pages:
        run_all(app, pages)


def take_phone_layouts(
    outputs: list[Any],  # of a cell
    folder: Path,
) -> None:
    """Write the layouts for phones that stand beside drawings, under the names that
    myst-nb will give those."""
    for output in outputs:
        layout = output.get("metadata", {}).get(DRAWING, {}).pop("phone", None)
        if layout is not None:
            drawn = os.linesep.join(output["data"][DRAWING].splitlines())
            name = hashlib.sha256(drawn.encode("utf-8")).hexdigest()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}-phone.svg").write_text(layout, encoding="utf-8")


def connect(
    app: Any,
    translate: Callable[[Any, str, list[str]], None],  # from directives to tags
) -> None:
    """Register the handlers, and let pages take the outputs that are there."""
    root, app.pcl_translate = Path(app.srcdir), translate

    class Ran(NotebookClientDirect):
        """What myst-nb asks to run a page: takes the outputs, and runs nothing twice."""

        def start_client(self) -> None:
            docname = str(self.path.relative_to(root).with_suffix("").as_posix())
            ran = kept(root, docname)
            if ran is None or ran.metadata.pcl.key != key_of(self.notebook, root):
                super().start_client()
                return
            about = ran.metadata.pop("pcl")
            self.notebook.metadata.update(ran.metadata)
            for cell, done in zip(code_of(self.notebook), code_of(ran), strict=True):
                take_phone_layouts(done.outputs, Path(app.outdir) / "_images")
                cell.outputs = done.outputs
                cell.execution_count = done.execution_count
            self.exec_metadata = {
                "mtime": kept_file(root, docname).stat().st_mtime,
                "runtime": about.seconds,
                "method": self.nb_config.execution_mode,
                "succeeded": True,
                "error": None,
                "traceback": None,
            }

    myst_nb.core.execute.NotebookClientDirect = Ran  # type: ignore[misc]
    app.connect("env-get-outdated", on_outdated)
    app.connect("env-before-read-docs", on_reading)
