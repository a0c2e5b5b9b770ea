"""The README keeps its promises: its lines run, and its table is the ledger's."""

from __future__ import annotations

import re
from pathlib import Path

from pcl.claims import claims_markdown, judged_claims
from pcl.cli import main
from pcl.ledger import read
from pcl.scores import choose, scoreboard


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
    assert block
    rows = judged_claims(read(root / "results").records)
    assert block[1] == claims_markdown(rows) + "\n", "paste `pcl claims --markdown`"


def test_the_command_above_the_table_prints_it(root: Path, capsys, monkeypatch) -> None:
    monkeypatch.delenv("PCL_RESULTS", raising=False)
    readme = (root / "README.md").read_text()
    (words,) = re.findall(r"`pcl (claims --markdown)`", readme)
    assert main(words.split()) == 0
    assert f"<!-- scoreboard -->\n{capsys.readouterr().out}<!--" in readme


def test_no_cause_is_promised_that_is_not_given(root: Path) -> None:
    """A reason beside every difference is a promise: the ledger must keep it."""
    readme = (root / "README.md").read_text()
    assert "a cause" in readme
    rows = choose(scoreboard(read(root / "results").records))
    assert all(row.cause_kind for row in rows if row.verdict == "differs")
