"""Run a long command with one line of progress; its output goes to a file.

    python book/pcl_quiet.py LOG COMMAND ...

On a terminal the line is drawn over itself, elsewhere it is printed once at each tenth. If the command fails, the end of
its output is shown.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

SHARE = re.compile(r"\[\s*(\d+)%\]")  # as Sphinx writes it
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SHOWN = 30  # lines of a failure


def share_of(line: str) -> int | None:
    """The per cent that a line of output speaks of."""
    found = SHARE.search(COLOUR.sub("", line))
    return int(found[1]) if found else None


def main(log: str, *command: str) -> int:
    """Run the command and return its exit code."""
    start, tenth, terminal = time.monotonic(), -1, sys.stdout.isatty()
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with path.open("w") as file, subprocess.Popen(command, text=True, **merged) as run:
        for line in run.stdout or ():
            file.write(line)
            share = share_of(line)
            what = COLOUR.sub("", line).partition("...")[0].strip()
            if share is None or (not terminal and share // 10 == tenth):
                continue
            tenth = share // 10
            spent = f"{time.monotonic() - start:.0f} s"
            text = f"book: {what} {share} %, {spent}"
            print(
                f"\r{text:60}" if terminal else text,
                end="" if terminal else "\n",
                flush=True,
            )
    if terminal:
        print()
    if run.returncode:
        print("".join(path.read_text().splitlines(keepends=True)[-SHOWN:]), end="")
        print(f"failed; all of its output is in {path}")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
