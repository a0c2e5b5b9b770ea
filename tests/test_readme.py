"""The README keeps its promises: its lines run, and its table is the ledger's."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from pcl.claims import claims_markdown, judged_claims
from pcl.cli import main
from pcl.ledger import read
from pcl.metrics import hits_at_k, r_auroc
from pcl.scores import choose, scoreboard
from pcl.watch import KappaWarning


def code_of(path: Path) -> list[str]:
    """The Python that a page shows."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def body(code: str) -> list[str]:
    """Its lines, without blanks and imports."""
    lines = [line for line in code.splitlines() if line.strip()]
    return [line for line in lines if not line.startswith(("import", "from"))]


def test_the_ten_lines_run(root: Path, capsys) -> None:
    code, _ = code_of(root / "README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    assert "tensor" in capsys.readouterr().out


def test_the_plain_loop_runs_and_kappa_looks_as_it_should(root: Path) -> None:
    _, code = code_of(root / "README.md")
    assert len(body(code)) < 20
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KappaWarning)
        exec(compile(code, "README.md", "exec"), found)
    encoder, x, y = found["encoder"], found["x"][1200:], found["y"][1200:]
    noise = torch.rand(x.shape) - 0.3
    with torch.no_grad():
        q = encoder(x)
        medians = [
            encoder(x + share * (noise - x)).concentration.median()
            for share in (0.0, 0.3, 0.6)
        ]
    low, middle, high = q.concentration.quantile(torch.tensor([0.05, 0.5, 0.95]))
    assert high > 1.5 * low and 5 < middle < 25
    right = hits_at_k(q.loc, y)
    assert right.double().mean() > 0.88 and r_auroc(q.concentration, right) > 0.75
    assert medians[0] > medians[1] > medians[2]


def test_the_loop_of_the_introduction_runs(root: Path) -> None:
    first, loop, *_ = code_of(root / "nbs" / "intro.md")
    assert len(body(loop)) < 20
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KappaWarning)
        exec(compile(first + loop, "intro.md", "exec"), found)
    kappa = found["encoder"](found["x"]).concentration.detach()
    low, high = kappa.quantile(torch.tensor([0.05, 0.95]))
    assert high > 1.5 * low


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
