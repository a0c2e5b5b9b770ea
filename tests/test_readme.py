"""The README keeps its promises: its lines run, and its table is the ledger's."""

from __future__ import annotations

import re
from pathlib import Path

from pcl.ledger import read, report_markdown, scoreboard


def test_the_ten_lines_run(root: Path, capsys) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


def test_the_table_is_computed_from_the_ledger(root: Path) -> None:
    block = re.search(
        r"<!-- scoreboard -->\n(.*?)<!-- /scoreboard -->",
        (root / "README.md").read_text(),
        re.DOTALL,
    )
    command = re.search(
        r"`pcl report --markdown ([^`]+)`", (root / "README.md").read_text()
    )
    assert block and command
    rows = [
        r
        for r in scoreboard(read(root / "results").records)
        if r.experiment in command[1].split()
    ]
    assert block[1] == report_markdown(rows) + "\n", f"paste what {command[0]} prints"
