"""`make reproduce`: live runs against records, the screen, the quiet build."""

import importlib.util
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pcl import reproduction
from pcl.cli import main
from pcl.experiments import Job, jobs
from pcl.ledger import Record, read
from pcl.reproduction import (
    FACTOR,
    MOVED,
    SCREEN,
    disagreements,
    main_claim,
    record_of,
    screen,
)

QUIET = Path(__file__).resolve().parents[1] / "book" / "pcl_quiet.py"


def recorded(job: Job) -> Record:
    found = [r for r in read().records if r.key == job.key]
    assert found, f"record {job} first: pcl run quick"
    return found[-1]


def test_the_quick_runs_are_those_a_tolerance_was_measured_for() -> None:
    assert {(job.experiment, job.row) for job in jobs("quick")} == set(MOVED)
    assert len(jobs("quick")) == 2


@pytest.mark.parametrize("job", jobs("quick"), ids=lambda job: job.experiment)
def test_a_live_run_agrees_with_itself_and_not_with_another(job: Job) -> None:
    then = recorded(job)
    assert disagreements(then, then) == []
    for metric, moved in MOVED[job.experiment, job.row].items():
        for sign in (-1, 1):
            near, far = (
                replace(
                    then,
                    metrics={
                        **then.metrics,
                        metric: then.metrics[metric] + sign * share * FACTOR * moved,
                    },
                )
                for share in (0.99, 1.01)
            )
            assert disagreements(near, then) == []
            (text,) = disagreements(far, then)
            assert metric in text and "allowed" in text
        lost = replace(then, metrics={**then.metrics, metric: math.nan})
        assert disagreements(lost, then)


def test_other_settings_and_a_missing_record_are_said() -> None:
    then = recorded(jobs("quick")[0])
    other = replace(then, settings={**then.settings, "steps": 3})
    assert "another steps" in disagreements(other, then)[0]
    assert "no record" in disagreements(then, None)[0]
    assert record_of(then, [replace(then, seed=99)]) is None
    later = replace(then, created="2099-01-01T00:00:00+00:00")
    assert record_of(then, [later, then]) == later


def test_the_screen_fits_and_marks_what_is_live() -> None:
    live = [recorded(job) for job in jobs("quick")]
    text = screen(read().records, live)
    lines = text.splitlines()
    assert len(lines) == 1 + len(SCREEN) <= 24 and max(map(len, lines)) <= 120
    assert text.count("live") == 6 and "live" not in screen(read().records)
    for where in ("circle", "ambiguous"):
        told = [line for line in lines if line.startswith(where)]
        assert len(told) == 3 and all("live" in line for line in told)
    sentence = main_claim(read().records)
    assert sentence.endswith(".") and "directions (" in sentence
    assert main_claim([]).startswith("Did the main claim reproduce? Not tested")


@pytest.mark.parametrize("columns", [60, 80, 100, 119])
def test_a_narrow_terminal_gets_the_same_numbers_stacked(columns: int) -> None:
    live = [recorded(job) for job in jobs("quick")]
    wide, narrow = (screen(read().records, live, n) for n in (400, columns))
    assert max(map(len, narrow.splitlines())) <= columns
    assert len(narrow.splitlines()) <= 3 * len(SCREEN)
    _, *body = wide.splitlines()
    for line in body:
        for word in line.split():
            assert word == "-" or word in narrow.replace(";", " ")


@pytest.mark.parametrize("good", [True, False])
def test_the_exit_code_is_the_live_runs_word(
    good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(job: Job) -> Record:
        then = recorded(job)
        return (
            then if good else replace(then, metrics={**then.metrics, "kappa_mae": 99.0})
        )

    monkeypatch.setattr(reproduction, "run_job", trained)
    monkeypatch.setattr(reproduction.train_live, "__defaults__", (trained,))
    before = len(read())
    assert main(["reproduce"]) == (0 if good else 1)
    out = capsys.readouterr().out
    assert ("DISAGREES" in out) != good and "the main claim" in out
    assert len(read()) == before  # nothing is recorded


# ------------------------------------------------------------------------------------
# the quiet build


def quiet(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(QUIET), str(tmp_path / "log"), sys.executable, "-c"]
    return subprocess.run([*command, code], capture_output=True, text=True, timeout=60)


def test_a_build_is_one_line_of_progress_at_each_tenth(tmp_path: Path) -> None:
    code = "for i in range(101): print(f'reading sources... [{i:3d}%] page{i}')"
    done = quiet(tmp_path, code)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 11
    assert "page57" in (tmp_path / "log").read_text() and "page57" not in done.stdout


def test_a_failed_build_shows_its_end(tmp_path: Path) -> None:
    code = "import sys; print('noise\\n' * 99); print('the cause'); sys.exit(3)"
    done = quiet(tmp_path, code)
    assert done.returncode == 3 and "the cause" in done.stdout
    assert done.stdout.count("noise") < 40


def test_the_share_is_read_through_colours() -> None:
    spec = importlib.util.spec_from_file_location("pcl_quiet", QUIET)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (
        module.share_of("\x1b[01mreading sources... \x1b[39;49;00m[ 42%] \x1b[35mx")
        == 42
    )
    assert module.share_of("done") is None
