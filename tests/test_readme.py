"""The README keeps its promises: its lines run, and its table is the ledger's."""

from __future__ import annotations

import re
from pathlib import Path

from pcl.cli import main
from pcl.ledger import read
from pcl.scores import choose, report_markdown, scoreboard


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
        r"`pcl report --markdown( --all)? ([^`]+)`", (root / "README.md").read_text()
    )
    assert block and command
    found = scoreboard(read(root / "results").records)
    rows = choose(found, command[2].split(), bool(command[1]))
    assert block[1] == report_markdown(rows) + "\n", f"paste what {command[0]} prints"
    assert sum(not row.published for row in rows) <= 12, "our own rows are an aside"


def test_the_command_under_the_table_prints_it(root: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("PCL_RESULTS", raising=False)
    readme = (root / "README.md").read_text()
    (words,) = re.findall(r"`pcl (report --markdown [^`]+)`", readme)
    assert main(words.split()) == 0
    assert f"<!-- scoreboard -->\n{capsys.readouterr().out}<!--" in readme
