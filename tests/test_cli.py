"""The command `pcl`: what it prints, what it records, and how it answers a slip."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pcl import ledger
from pcl.cli import main, parse_seeds
from pcl.datasets import status
from pcl.experiments import PRESETS, Job, experiments, jobs, run_job
from pcl.names import UnknownName
from pcl.provenance import data_folder

EXPERIMENTS = experiments()


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test writes to a ledger of its own."""
    folder = tmp_path / "results"
    monkeypatch.setenv("PCL_RESULTS", str(folder))
    return folder


def test_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in EXPERIMENTS)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["rum", "quick"], "'run'"),
        (["run", "samplr"], "'sampler'"),
        (["run", "quik"], "'quick'"),
        (["run", "sampler", "--row", "D=10_kappa=21"], "'D=10_kappa=20'"),
        (["run", "sampler", "--preset", "smokey"], "'smoke'"),
        (["run", "xyzzy"], "known are"),
        (["run", "quick", "--row", "ambiguous"], "is a group"),
        (["report", "tabel1"], "'table1'"),
        (["data", "cifar100"], "'cifar10'"),
    ],
)
def test_unknown_names_get_the_nearest_match_and_exit_code_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str], own_ledger: Path
) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err
    assert not own_ledger.exists()


def test_run_records_and_a_second_run_finds_it_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "run",
        "sampler",
        "--row",
        "D=10_kappa=20",
        "--preset",
        "smoke",
        "--seeds",
        "1-2",
    ]
    assert main(words) == 0
    assert "2 runs recorded" in capsys.readouterr().out
    assert main(words) == 0
    assert "0 runs recorded" in capsys.readouterr().out
    assert main([*words, "--force"]) == 0
    assert len(ledger.read()) == 4 and len(ledger.latest(ledger.read())) == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_of_every_experiment_runs_at_smoke(name: str) -> None:
    todo = jobs(name, preset="smoke", seeds=[1])
    records = []
    for job in todo:
        start = time.process_time()  # a loaded machine stretches any other clock
        records.append(run_job(job))
        assert time.process_time() - start < 60, job.row
    assert [record.key for record in records] == [job.key for job in todo]
    assert all(record.metrics for record in records)
    assert run_job(todo[0]).metrics == records[0].metrics, (
        "the same seed must give the same numbers"
    )


def test_every_experiment_has_every_preset() -> None:
    assert all(tuple(e.presets) == PRESETS for e in EXPERIMENTS.values())


def test_report_speaks_to_people_and_to_machines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report"]) == 0
    assert "not yet run" in capsys.readouterr().out
    assert main(["report", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {
        "experiment",
        "row",
        "preset",
        "metric",
        "paper",
        "ours",
        "spread",
        "seeds",
        "seconds",
        "verdict",
    } <= set(rows[0])


def test_report_can_be_asked_for_one_experiment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["report", "table1", "--json"]) == 0
    assert {row["experiment"] for row in json.loads(capsys.readouterr().out)} == {
        "table1"
    }


def test_report_skips_a_broken_file_and_says_so(
    capsys: pytest.CaptureFixture[str], own_ledger: Path
) -> None:
    (own_ledger / "table1").mkdir(parents=True)
    (own_ledger / "table1" / "half.json").write_text('{"experiment": "tab')
    assert main(["report"]) == 0
    assert "half.json" in capsys.readouterr().err


def test_doctor_reports_data_found_missing_and_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCL_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "cifar10h: missing; run `pcl data cifar10h`" in said
    assert "threads" in said and "device" in said and "Licence" in said
    (tmp_path / "cifar10h-probs.npy").write_bytes(b"not the labels")
    assert status("cifar10h", [tmp_path]).state == "corrupt"


def test_notebooks_are_copied_and_nothing_is_replaced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a folder" / "chapters"
    assert main(["notebooks", str(target)]) == 0
    copied = {p.name for p in target.iterdir()}
    assert copied == {p.name for p in data_folder("nbs").glob("*.ipynb")} and copied
    first = sorted(copied)[0]
    (target / first).write_text("mine")
    assert main(["notebooks", str(target)]) == 2
    assert (target / first).read_text() == "mine" and first in capsys.readouterr().err
    assert main(["notebooks", str(target), "--force"]) == 0
    assert json.loads((target / first).read_text())["nbformat"] == 4


def test_one_chapter_is_copied_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["notebooks", str(tmp_path), "--chapter", "370"]) == 0
    assert main(["notebooks", str(tmp_path), "--chapter", "20"]) == 0
    assert [p.name[:3] for p in sorted(tmp_path.iterdir())] == ["020", "370"]
    assert main(["notebooks", str(tmp_path), "--chapter", "371"]) == 2
    assert "unknown chapter '371': did you mean " in capsys.readouterr().err


def test_data_without_a_name_lists_every_set_with_its_licence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["data"]) == 0
    said = capsys.readouterr().out
    assert "data     cifar10: " in said and "data     generated: here" in said


def test_show_says_where_each_setting_comes_from_and_what_was_published(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PCL_RESULTS")
    assert main(["show", "table1", "clear", "--preset", "paper"]) == 0
    said = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert "kappa_min 64.0 row clear" in lines and "dim 10 base" in lines
    assert "steps 100000 preset paper" in lines
    assert any("125.02" in line for line in lines)
    assert any(line.startswith("cost") and "a guess" in line for line in lines)
    assert main(["show", "figure4", "d64", "--preset", "paper"]) == 0
    assert "row d64 at paper" in capsys.readouterr().out


def test_a_dry_run_sums_the_cost_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], own_ledger: Path
) -> None:
    words = ["run", "sampler", "--preset", "smoke", "--seeds", "1"]
    assert main([*words, "--dry-run"]) == 0
    assert "8 of 8 runs to do" in capsys.readouterr().out and not own_ledger.exists()
    assert main([*words, "--row", "D=10_kappa=20"]) == 0
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "7 of 8 runs to do" in said and "as the other rows" in said


def test_an_unknown_device_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], own_ledger: Path
) -> None:
    words = ["run", "sampler", "--row", "D=10_kappa=20", "--preset", "smoke"]
    assert main([*words, "--device", "abacus"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pcl: ") and "abacus" in said and said.count("\n") == 1


def test_a_record_says_where_it_ran(own_ledger: Path) -> None:
    words = ["run", "sampler", "--row", "D=10_kappa=20", "--preset", "smoke"]
    assert main([*words, "--seeds", "1", "--device", "cpu"]) == 0
    (record,) = ledger.read().records
    assert record.machine["device"] == "cpu" and record.machine["threads"] >= 1


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-2"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="seeds are written"):
        parse_seeds(text)


def test_an_unknown_row_says_which_was_meant() -> None:
    with pytest.raises(UnknownName, match="D=64_kappa=16"):
        Job("sampler", "D=64_kappa=17", "smoke", 1).config()


def test_an_interrupted_run_continues_where_it_was(own_ledger: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "pcl.cli",
        "run",
        "sampler",
        "--preset",
        "cpu",
        "--seeds",
        "1-3",
    ]
    env = os.environ | {"PCL_RESULTS": str(own_ledger)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(own_ledger.glob("sampler/*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(ledger.read().records)
    said = subprocess.run(
        words, env=env, capture_output=True, text=True, check=True
    ).stdout
    counted = re.search(r"(\d+) runs recorded in .*, (\d+) were there already", said)
    assert counted and int(counted[2]) == done >= 1 and int(counted[1]) + done == 24
    assert not [p for p in ledger.read().problems if not p.path.name.startswith(".")]


def test_a_reader_who_leaves_early_is_no_error() -> None:
    words = f"{sys.executable!r} -m pcl.cli report --json | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", words], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""


def in_a_shell(words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable!r} -m pcl.cli {words}"],
        capture_output=True,
        text=True,
        env=os.environ | env,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_the_output_gets_one_line() -> None:
    done = in_a_shell("list > /dev/full")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


def test_an_interrupt_while_torch_is_imported_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = in_a_shell("doctor", PYTHONPATH=path)
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("pcl: interrupted")


def test_a_folder_that_cannot_be_made_gets_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    assert main(["notebooks", str(tmp_path / "file" / "deep")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("pcl: ") and said.count("\n") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("PCL_DATA", raising=False)
    assert main(["data", "cifar10"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_report_knows_every_experiment_also_without_a_row_to_show(
    capsys: pytest.CaptureFixture[str], own_ledger: Path
) -> None:
    assert main(["report", "sampler"]) == 0
    said = capsys.readouterr().err
    assert "sampler: 0 runs recorded" in said
    assert f"{own_ledger} does not exist" in said
    assert main(["run", "sampler", "--preset", "smoke", "--seeds", "1"]) == 0
    capsys.readouterr()
    assert main(["report", "sampler"]) == 0
    said = capsys.readouterr().err
    assert "runs recorded; preset smoke is not judged" in said
    assert "does not exist" not in said


def test_what_is_shown_is_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rank", "f", "--head", "h", "--out", "r.csv", "--show", "-3"])
    assert "at least 0 is wanted" in capsys.readouterr().err


def test_an_experiment_that_no_paper_speaks_of_is_shown_when_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    monkeypatch.setenv("PCL_RESULTS", str(root / "results"))
    assert main(["report", "sampler"]) == 0
    assert "D=10_kappa=20" in capsys.readouterr().out
