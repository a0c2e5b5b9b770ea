"""The ledger under faults, two writers and hostile files; the published numbers; the
rules of the scoreboard."""

import errno
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

import pcl
from pcl import ledger
from pcl.ledger import (
    RULES,
    LedgerError,
    PaperEntry,
    Record,
    ScoreRow,
    format_ours,
    from_json,
    judge,
    latest,
    mean_and_error,
    paper_configs,
    paper_numbers,
    parse_cell,
    read,
    report_json,
    report_text,
    revision,
    scoreboard,
    to_json,
    tolerance,
    write,
)


def record(**changes: object) -> Record:
    base = {
        "experiment": "table1",
        "row": "ambiguous",
        "preset": "cpu",
        "seed": 0,
        "metrics": {"kappa_rmse": 6.0},
    }
    return Record(**{**base, **changes})


def cell(
    experiment: str, row: str, metric: str, version: str | None = None
) -> PaperEntry:
    (found,) = [
        e
        for e in paper_numbers()
        if (e.experiment, e.row, e.metric) == (experiment, row, metric)
        and version in (None, e.version)
    ]
    return found


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


# ----------------------------------------------------------------------------------------------------------
# records


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("experiment", "../up"),
        ("experiment", "/abs"),
        ("row", "a/b"),
        ("row", ".."),
        ("row", "a\\b"),
        ("row", ""),
        ("row", "a--b"),
        ("row", "a\x00b"),
        ("row", "a\n"),
        ("row", 3),
        ("row", "x" * 65),
        ("preset", "cpu "),
        ("preset", None),
        ("seed", -1),
        ("seed", 1.0),
        ("seed", True),
        ("seed", "0"),
        ("metrics", {}),
        ("metrics", None),
        ("metrics", {"a": None}),
        ("metrics", {"a": "1"}),
        ("metrics", {"a": True}),
        ("metrics", {1: 1.0}),
        ("metrics", {"": 1.0}),
        ("metrics", {"a": torch.tensor(1.0)}),
        ("metrics", {"a": 1j}),
        ("metrics", {"a": 10**400}),
        ("config", {"a": [1]}),
        ("config", {"a": {"b": 1}}),
        ("config", {"a": "inf"}),
        ("config", []),
        ("config", {"a": Path("x")}),
        ("curve", {"a": [1.0], "b": []}),
        ("curve", {"a": "123"}),
        ("curve", {"a": [None]}),
        ("curve", [{"step": 1}]),
        ("seconds", -1.0),
        ("seconds", math.nan),
        ("seconds", "1"),
        ("device", ""),
        ("device", None),
        ("versions", {"torch": 2}),
        ("revision", ""),
        ("created", "soon"),
        ("created", "2026-01-01T00:00:00"),
        ("created", "2026-01-01T00:00:00+01:00"),
        ("created", 5),
        ("schema", 2),
        ("schema", True),
        ("schema", "1"),
    ],
)
def test_a_violation_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field}"):
        record(**{field: value})


def test_a_record_changed_after_it_was_made_is_checked_again(tmp_path: Path) -> None:
    r = record()
    r.metrics["kappa_rmse"] = "six"  # type: ignore[index]
    with pytest.raises(ValueError, match="metrics"):
        write(r, tmp_path)
    assert files(tmp_path) == []


def test_numpy_scalars_are_numbers() -> None:
    r = record(metrics={"a": np.float32(0.5), "b": np.float64(2.0), "c": np.int64(3)})
    assert r.metrics == {"a": 0.5, "b": 2.0, "c": 3.0} and all(
        type(v) is float for v in r.metrics.values()
    )


number = st.floats() | st.integers(-(2**53), 2**53)
text = st.text(min_size=1, max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | number
    | st.text(max_size=20).filter(lambda s: s not in ("nan", "inf", "-inf"))
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(text, number, min_size=1, max_size=5),
    st.dictionaries(text, scalars, max_size=5),
    st.lists(number, max_size=6),
    st.integers(0, 2**70),
)
def test_what_goes_in_comes_out(
    metrics: dict, config: dict, column: list, seed: int
) -> None:
    r = record(
        metrics=metrics,
        config=config,
        curve={"a": column, "b": column[::-1]},
        seed=seed,
    )
    again = from_json(to_json(r))
    assert repr(again) == repr(r)  # repr, because nan != nan
    json.loads(
        to_json(r),
        parse_constant=lambda token: pytest.fail(f"not strict JSON: {token}"),
    )


def test_versions_and_revision_are_recorded() -> None:
    r = record()
    assert (
        r.versions["torch"] == torch.__version__
        and r.versions["numpy"] == np.__version__
    )
    assert r.versions["pcl"] == pcl.__version__ and "scipy" in r.versions
    assert r.revision == revision() and re.fullmatch(
        r"[0-9a-f]+(-dirty)?|pcl-.*", r.revision
    )
    assert r.created.endswith("+00:00")


def test_the_revision_without_git_is_the_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    revision.cache_clear()
    try:
        assert revision() == f"pcl-{pcl.__version__}"
    finally:
        revision.cache_clear()


# ----------------------------------------------------------------------------------------------------------
# writing


def test_the_file_name_tells_what_it_holds(tmp_path: Path) -> None:
    path = write(record(row="clear", seed=7), tmp_path)
    assert path.parent == tmp_path / "table1"
    assert re.fullmatch(r"clear--cpu--s7--\d{8}T\d{12}-[0-9a-f]{8}\.json", path.name)
    assert path.stat().st_mode & 0o444 == 0o444
    assert read(tmp_path).records == (
        record(row="clear", seed=7, created=read(tmp_path).records[0].created),
    )


KILLED = """
import os, sys
from pcl import ledger
def stall(fd):
    print("writing", flush=True)
    import time; time.sleep(60)
os.fsync = stall
ledger.write(ledger.Record("table1", "ambiguous", "cpu", 0, {"a": 1.0}), sys.argv[1])
"""


def test_a_writer_killed_in_the_middle_leaves_no_record(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(pcl.__file__).parent.parent)}
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=env
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"writing\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    found = read(tmp_path)
    assert len(found) == 0 and not list(tmp_path.rglob("*.json"))
    assert [p.reason.partition(":")[0] for p in found.problems] == [
        "an unfinished write"
    ]
    write(record(), tmp_path)  # and the ledger goes on working
    assert len(read(tmp_path)) == 1


def _write_many(root: str, writer: int) -> None:
    for i in range(50):
        write(record(metrics={"writer": writer, "i": i}), root)


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [
        spawn.Process(target=_write_many, args=(str(tmp_path), w)) for w in range(2)
    ]
    for w in writers:
        w.start()
    while any(
        w.is_alive() for w in writers
    ):  # a reader beside them never sees half a record
        assert all(p.path.suffix == ".tmp" for p in read(tmp_path).problems)
        time.sleep(0.02)
    for w in writers:
        w.join()
        assert w.exitcode == 0
    found = read(tmp_path)
    expected = {(w, i): 1 for w in range(2) for i in range(50)}
    assert Counter((r.metrics["writer"], r.metrics["i"]) for r in found) == expected
    assert found.problems == ()


def test_a_taken_name_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    r = record()
    draws = iter(["aaaaaaaa", "aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(ledger.secrets, "token_hex", lambda n: next(draws))
    first, second = (
        write(r, tmp_path),
        write(replace(r, metrics={"kappa_rmse": 7.0}), tmp_path),
    )
    assert first != second and sorted(
        x.metrics["kappa_rmse"] for x in read(tmp_path)
    ) == [6.0, 7.0]


def test_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(a: str, b: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    path = write(record(), tmp_path)
    assert files(tmp_path) == [path] and len(read(tmp_path)) == 1


@pytest.fixture
def rescue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_full_disk_leaves_nothing_behind_and_loses_nothing(
    tmp_path: Path, rescue: Path, monkeypatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    r, root = record(), tmp_path / "ledger"
    with pytest.raises(LedgerError, match="No space left") as caught:
        write(r, root)
    assert str(root) in str(caught.value) and files(tmp_path) == []
    assert repr(from_json(str(caught.value).partition("yourself:\n")[2])) == repr(r)


def test_where_the_ledger_cannot_be_written_the_record_is_rescued(
    tmp_path: Path, rescue: Path
) -> None:
    root = tmp_path / "ledger"
    root.write_text(
        "a file where a folder should be"
    )  # root ignores permissions, but not this
    r = record()
    with pytest.raises(LedgerError, match="PCL_RESULTS") as caught:
        write(r, root)
    (saved,) = files(rescue)
    assert str(saved) in str(caught.value) and repr(
        from_json(saved.read_text())
    ) == repr(r)
    saved.rename(tmp_path / saved.name)
    assert (
        read(root).records == ()
        and read(root).problems[0].reason == "the ledger must be a folder"
    )


def test_a_read_only_folder_is_named(
    tmp_path: Path, rescue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tempfile.mkstemp

    def read_only(*args: object, dir: Path, **kwargs: object):
        if "locked" in str(dir):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return made(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", read_only)
    with pytest.raises(
        LedgerError, match=r"locked: Permission denied.*The record is safe in"
    ):
        write(record(), tmp_path / "locked")
    assert len(read(rescue / "pcl-rescued")) == 1


# ----------------------------------------------------------------------------------------------------------
# reading


def test_broken_and_foreign_files_are_listed_not_raised(tmp_path: Path) -> None:
    good = write(record(), tmp_path)
    whole, folder = good.read_text(), good.parent
    bad = {
        "empty.json": b"",
        "half.json": whole[: len(whole) // 2].encode(),
        "list.json": b"[1, 2]",
        "null.json": b"null",
        "binary.json": bytes(range(256)),
        "foreign.json": b'{"a": 1}',
        "deep.json": b"[" * 100_000,
        "bare.json": whole.replace("6.0", "NaN").encode(),
        "schema.json": whole.replace('"schema": 1', '"schema": 9').encode(),
        "extra.json": whole.replace('"seed"', '"extra": 1, "seed"').encode(),
        "digits.json": b"9" * 10_000,
        "type.json": whole.replace("6.0", '"six"').encode(),
        "curve.json": whole.replace('"curve": {}', '"curve": 5').encode(),
    }
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    (folder / "folder.json").mkdir()
    (folder / "dangling.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "astray.json").write_text(whole)
    (tmp_path / "table9").mkdir()
    (tmp_path / "table9" / "moved.json").write_text(whole)
    (folder / "figure-data.npz").write_bytes(b"not ours to judge")
    found = read(tmp_path)
    assert len(found) == 1
    assert {p.path.name for p in found.problems} == {
        *bad,
        "folder.json",
        "dangling.json",
        "astray.json",
        "moved.json",
    }
    assert all(p.reason for p in found.problems)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 600), st.binary(min_size=0, max_size=4))
def test_no_damage_to_a_file_can_raise(position: int, junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(record(), folder)
        content = path.read_bytes()
        path.write_bytes(content[:position] + junk + content[position + 3 :])
        found = read(folder)
        assert len(found.records) + len(found.problems) == 1


def test_an_absent_ledger_is_empty(tmp_path: Path) -> None:
    assert (
        len(read(tmp_path / "nowhere")) == 0
        and read(tmp_path / "nowhere").problems == ()
    )


def test_where_the_ledger_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PCL_RESULTS", raising=False)
    root = ledger.checkout()
    assert (
        root is not None
        and ledger.write_root() == root / "results"
        and ledger.read_roots() == [root / "results"]
    )
    monkeypatch.setenv("PCL_RESULTS", str(tmp_path / "named"))
    assert ledger.write_root() == tmp_path / "named" and ledger.read_roots() == [
        tmp_path / "named"
    ]
    write(record())
    assert (
        len(read()) == 1 and len(list((tmp_path / "named" / "table1").iterdir())) == 1
    )


def test_an_installed_package_reads_what_it_ships_and_what_is_local(
    tmp_path: Path, monkeypatch
) -> None:
    package = tmp_path / "site-packages" / "pcl"
    write(record(seed=1), package / "results")
    (package / "results" / "paper.toml").write_bytes(
        (ledger.checkout() / "results" / "paper.toml").read_bytes()
    )
    monkeypatch.delenv("PCL_RESULTS", raising=False)
    monkeypatch.setattr(pcl, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert ledger.checkout() is None and ledger.write_root() == Path("results")
    assert write(record(seed=2)).resolve().is_relative_to(tmp_path / "results")
    assert sorted(r.seed for r in read()) == [1, 2]
    ledger._paper_file.cache_clear()
    try:
        assert len(paper_numbers()) == 142
    finally:
        ledger._paper_file.cache_clear()


def test_reading_the_ledger_imports_no_torch() -> None:
    code = (
        "import sys, pcl.ledger as l; l.read(); l.scoreboard([]); l.versions(); "
        "print([m for m in ('torch', "
        "'torchvision', 'timm', 'matplotlib', 'nbdev') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(pcl.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_recorded_ledger_is_sound() -> None:
    assert read(ledger.checkout() / "results").problems == ()


def test_the_latest_repetition_counts() -> None:
    old, new = (
        record(created="2026-01-01T00:00:00+00:00"),
        record(created="2026-01-02T00:00:00.000001+00:00"),
    )
    other = record(created="2025-01-01T00:00:00+00:00", preset="paper")
    assert latest([new, old, other]) == [other, new]


# ------------------------------------------------------------------------------------------------
# published numbers

CELLS = {
    "table1": 11,
    "table2": 12 + 3 + 9 + 1,
    "table3": 12,
    "table4": 6 + 1 + 6,
    "table5": 12,
    "table7": 11,
    "table8": 8,
    "table9": 22,
    "table10": 4,
    "table11": 6,
    "figure2": 4,
    "figure3": 3,
    "figure4": 4,
    "figure5": 1,
    "figure6": 1,
    "figure7": 4,
    "figure8": 1,
}


def test_every_table_and_figure_is_there_with_its_source() -> None:
    entries = paper_numbers()
    assert (
        Counter(e.experiment for e in entries) == CELLS and sum(CELLS.values()) == 142
    )
    assert len({(e.experiment, e.row, e.metric, e.version) for e in entries}) == 142
    for e in entries:
        assert re.match(r"(paper|thesis)\b.*(table|figure|section)", e.source), e
        assert (
            e.rule in RULES
            and ledger.check_name("row", e.row)
            and ledger.check_name("experiment", e.experiment)
        )
        assert (e.value is None) == (e.rule == "none") and e.better in (
            "lower",
            "higher",
            "",
        )
        assert (e.seeds == 5) if e.stderr is not None else (e.seeds is None)
        if (
            e.printed not in ("not legible", "no number")
            and e.rule in ("value", "choice")
            and e.version != "both"
        ):
            assert e.version in ("paper", "thesis", "paper, text")


@pytest.mark.parametrize(
    ("where", "printed", "value", "stderr"),
    [
        (("table1", "ambiguous", "kappa_rmse"), "6.15 ± 0.61", 6.15, 0.61),
        (("table1", "ambiguous", "mu_rmse"), "0.04 ± 0.00", 0.04, 0.0),
        (("table1", "clear", "kappa_rmse"), "125.02 ± 10.64", 125.02, 10.64),
        (("table1", "clear", "kappa_rank"), "0.64 ± 0.04", 0.64, 0.04),
        (("table1", "injective", "mu_rmse"), "0.05 ± 0.01", 0.05, 0.01),
        (("table1", "injective", "kappa_median"), "→ ∞", math.inf, None),
        (("table2", "gaussian", "kappa_rmse", "paper"), "12.76 ± 0.66", 12.76, 0.66),
        (("table2", "gaussian", "kappa_rank", "paper"), "0.78 ± 0.02", 0.78, 0.02),
        (("table2", "laplace", "kappa_rmse", "paper"), "10^7 ± 10^7", 1e7, 1e7),
        (("table2", "laplace", "kappa_rank", "paper"), "0.54 ± 0.14", 0.54, 0.14),
        (("table2", "vmf", "spread_rank", "thesis"), "0.75", 0.75, None),
        (("table2", "gaussian", "spread_rank", "thesis"), "0.70", 0.70, None),
        (("table2", "laplace", "kappa_median", "thesis"), "≈ 2000", 2000.0, None),
        (("table2", "gaussian", "mu_rmse", "thesis"), "not legible", None, None),
        (("table3", "hib", "kappa_rmse"), "10^14 ± 10^14", 1e14, 1e14),
        (("table3", "hib", "kappa_rank"), "-0.02 ± 0.09", -0.02, 0.09),
        (("table3", "elk", "kappa_rmse"), "21.70 ± 0.31", 21.7, 0.31),
        (("table3", "elk", "mu_rank"), "1.00 ± 0.00", 1.0, 0.0),
        (("table4", "hib", "crop_corr", "paper"), "0.72", 0.72, None),
        (("table4", "elk", "entropy_corr", "paper"), "0.10", 0.1, None),
        (("table4", "mcinfonce", "crop_corr", "paper"), "0.70", 0.7, None),
        (("table4", "mcinfonce", "crop_corr", "paper, text"), "0.72", 0.72, None),
        (("table4", "elk", "entropy_corr", "thesis"), "0.14 ± 0.05", 0.14, 0.05),
        (("table4", "mcinfonce", "entropy_corr", "thesis"), "0.29 ± 0.01", 0.29, 0.01),
        (("table5", "cifar10h-hard", "entropy_corr", "paper"), "0.26", 0.26, None),
        (("table5", "cifar10-hard", "crop_corr", "paper"), "0.72", 0.72, None),
        (("table5", "cifar10h-hard", "crop_corr", "thesis"), "0.64 ± 0.02", 0.64, 0.02),
        (("table7", "mcinfonce", "best_m"), "32", 32.0, None),
        (("table7", "elk", "best_phasewise"), "no", 0.0, None),
        (("table7", "hib", "best_a"), "not legible", None, None),
        (("table8", "shared", "kappa_rmse"), "7.31 ± 1.53", 7.31, 1.53),
        (("table8", "shared", "kappa_rank"), "0.87 ± 0.02", 0.87, 0.02),
        (("table9", "hib-cifar10h-soft", "best_b"), "1", 1.0, None),
        (("table9", "mcinfonce-cifar10h-hard", "best_dim"), "16", 16.0, None),
        (("table9", "mcinfonce-cifar10-hard", "best_kappa_pos"), "64", 64.0, None),
        (("table10", "scratch", "crop_corr"), "0.62", 0.62, None),
        (("table10", "scratch", "entropy_corr"), "0.31", 0.31, None),
        (("table11", "infonce", "mu_rmse"), "0.83 ± 0.00", 0.83, 0.0),
        (("table11", "infonce", "recall_at_1"), "0.858", 0.858, None),
        (("table11", "mcinfonce", "recall_at_1"), "0.863", 0.863, None),
        (("figure2", "d2", "kappa_rmse"), "2.89 ± 0.56", 2.89, 0.56),
        (("figure2", "d2", "kappa_rank"), "0.82 ± 0.05", 0.82, 0.05),
        (("figure3", "k16", "kappa_rmse"), "4.55", 4.55, None),
        (("figure3", "k4", "kappa_rank"), "0.77", 0.77, None),
        (("figure4", "d32", "kappa_rank"), "≥ 0.6", 0.6, None),
        (("figure5", "mcinfonce", "recall_trend"), "increasing", 1.0, None),
        (("figure6", "clear-query", "images_in_interval"), "1", 1.0, None),
        (("figure7", "d10-d64", "kappa_rank"), "decreasing", -1.0, None),
        (("figure8", "mcinfonce", "entropy_gap"), "no number", None, None),
    ],
)
def test_a_published_cell(
    where: tuple, printed: str, value: float | None, stderr: float | None
) -> None:
    e = cell(*where)
    assert (e.printed, e.value, e.stderr) == (printed, value, stderr)


def test_the_standard_row_is_the_same_wherever_it_is_repeated() -> None:
    rows = [
        ("table1", "ambiguous"),
        ("table2", "vmf"),
        ("table3", "mcinfonce"),
        ("table8", "independent"),
    ]
    metrics = ("mu_rmse", "mu_rank", "kappa_rmse", "kappa_rank")
    seen = {
        tuple(
            cell(e, r, m, "paper" if e == "table2" else None).printed for m in metrics
        )
        for e, r in rows
    }
    assert seen == {("0.04 ± 0.00", "0.99 ± 0.00", "6.15 ± 0.61", "0.82 ± 0.04")}


def test_table_6_is_configuration() -> None:
    configs = paper_configs()
    table6 = {k: c for k, c in configs.items() if c["source"].startswith("table 6")}
    assert (
        len(table6) == 12
        and len(configs) == 15
        and all(c["source"] for c in configs.values())
    )
    assert configs["d2"]["n_batches"] == 8192 and configs["d2"]["dim"] == 2
    assert configs["mc-samples"]["n_samples"] == [1, 4, 16, 64, 256, 512]
    assert (
        configs["encoder-dim-128"]["batch_size"] == 256
        and configs["encoder-dim-64"]["batch_size"] == 512
    )
    assert configs["high-dim-32-64"]["dim"] == [32, 40, 48, 56, 64]
    assert (
        configs["controlled"]["kappa_pos"] == 20
        and configs["cifar"]["n_batches"] == 8192
    )


@pytest.mark.parametrize(
    "printed", ["", "0,5", "0.5 +- 0.1", "± 0.1", "about 3", "1e3", "≥", "10^x"]
)
def test_an_unreadable_cell_is_refused(printed: str) -> None:
    with pytest.raises(ValueError, match="printed"):
        parse_cell(printed)


# -------------------------------------------------------------------------------------------------------
# scoreboard


def board(*records: Record) -> list[ScoreRow]:
    return [s for s in scoreboard(records) if s.verdict != "not yet run"]


def test_an_empty_ledger_has_not_been_run() -> None:
    rows = scoreboard([])
    assert len(rows) == 142
    assert {(s.verdict, s.preset, s.ours, s.seeds) for s in rows} == {
        ("not yet run", "-", None, 0)
    }


def test_smoke_runs_are_never_judged() -> None:
    assert board(record(preset="smoke"), record(experiment="own", preset="smoke")) == []


def test_presets_are_kept_apart_and_repetitions_are_not_seeds() -> None:
    rows = board(
        record(created="2026-01-01T00:00:00+00:00", metrics={"kappa_rmse": 99.0}),
        record(created="2026-01-02T00:00:00+00:00", seconds=10.0),
        record(seed=1, metrics={"kappa_rmse": 6.4}, seconds=20.0),
        record(preset="paper", metrics={"kappa_rmse": 60.0}),
    )
    assert [(s.preset, s.seeds, s.seconds, s.verdict) for s in rows] == [
        ("cpu", 2, 30.0, "reproduced"),
        ("paper", 1, 0.0, "differs"),
    ]
    assert (
        math.isclose(rows[0].ours, 6.2)
        and math.isclose(rows[0].spread, 0.2)
        and rows[1].spread is None
    )


def test_two_versions_are_two_lines() -> None:
    rows = board(
        record(experiment="table4", row="mcinfonce", metrics={"crop_corr": 0.685})
    )
    assert {s.version: s.paper for s in rows} == {
        "paper": "0.70",
        "paper, text": "0.72",
        "thesis": "0.68 ± 0.01",
    }


def test_the_injective_row_has_a_rule_of_its_own() -> None:
    run = record(row="injective", metrics={"kappa_median": 5000.0})
    (row,) = board(run)
    assert row.rule == "diverges" and row.verdict == "reproduced" and row.paper == "→ ∞"
    assert board(replace(run, metrics={"kappa_median": 1280.0}))[0].verdict == "differs"
    assert (
        board(replace(run, metrics={"kappa_median": math.inf}))[0].verdict
        == "reproduced"
    )
    fallen = replace(run, curve={"kappa_median": [1.0, 100.0, 9000.0, 6000.0, 5000.0]})
    assert (board(fallen)[0].verdict, board(fallen)[0].reason) == (
        "differs",
        "a curve has fallen since half-way",
    )
    rising = replace(run, curve={"kappa_median": [1.0, 10.0, 100.0, 1000.0, 5000.0]})
    assert board(rising)[0].verdict == "reproduced"
    assert board(rising, replace(fallen, seed=1))[0].verdict == "differs"


def test_a_trend_is_read_from_the_rows_of_its_sweep() -> None:
    def sweep(values: dict[str, float], seed: int = 0) -> list[Record]:
        return [
            record(experiment="figure3", row=k, seed=seed, metrics={"kappa_rmse": v})
            for k, v in values.items()
        ]

    falling, rising = (
        {"k1": 50.0, "k4": 20.0, "k64": 5.0},
        {"k1": 1.0, "k4": 2.0, "k64": 3.0},
    )
    assert (
        board(*sweep(falling))[0].verdict == "reproduced"
        and board(*sweep(falling))[0].seeds == 1
    )
    assert board(*sweep(rising))[0].verdict == "differs"
    assert board(*sweep({"k1": 1.0, "k64": 0.5})) == []  # two points make no trend
    assert board(*sweep(falling), *sweep(rising, seed=1))[0].ours == 0.0


def test_runs_of_our_own_are_shown_with_their_reference() -> None:
    own = record(
        experiment="sampler",
        row="d64",
        metrics={"mean_cos": 0.009},
        config={"reference_mean_cos": 0.2364},
    )
    (row,) = board(own)
    assert (row.paper, row.verdict) == (
        "-",
        "no paper value",
    ) and "exact 0.2364" in row.reason
    (plain,) = board(replace(own, config={}))
    assert plain.reason == ""


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([e for e in paper_numbers() if e.rule == "value"]),
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
)
def test_the_value_rule_is_the_documented_one(
    entry: PaperEntry, values: list[float]
) -> None:
    mean = sum(values) / len(values)
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    u = entry.half_unit
    theirs = abs(entry.value) / 20 if entry.stderr is None else entry.stderr + u
    counted = min(
        error, max(theirs, abs(entry.value) / 4)
    )  # a run that exploded must not escape by its scatter
    near, far = u + 2 * theirs, u + 2 * math.sqrt(theirs**2 + counted**2)
    assert math.isclose(tolerance(entry, 0.0), near, rel_tol=1e-9)
    assert math.isclose(tolerance(entry, error), far, rel_tol=1e-9)
    gap = abs(mean - entry.value)
    if min(abs(gap - near), abs(gap - far)) > 1e-9:
        verdict, reason = judge(entry, values)
        assert verdict == (
            "reproduced" if gap < near else "inconclusive" if gap < far else "differs"
        )
        if verdict == "differs" and entry.better:
            improved = (mean < entry.value) == (entry.better == "lower")
            assert ("better" in reason) == improved and ("worse" in reason) != improved


def test_our_own_scatter_is_no_agreement() -> None:
    """The same means, from seeds that agree and from seeds that do not."""
    rank, bound = (
        cell("table2", "laplace", "kappa_rank", "paper"),
        cell("figure4", "d8", "kappa_rank"),
    )
    for entry, mean, wide in ((rank, 0.13, 0.3), (bound, 0.53, 0.25)):
        assert judge(entry, [mean, mean, mean])[0] == "differs"
        verdict, reason = judge(entry, [mean - wide, mean, mean + wide])
        assert (
            verdict == "inconclusive"
            and "our seeds scatter too widely" in reason
            and "ours is" not in reason
        )
        assert (
            judge(entry, [mean - 4, mean - 3, mean + 1])[0] == "differs"
        )  # no scatter is wide enough for that
    assert (
        judge(rank, [0.2, 0.5, 0.8])[0] == "reproduced"
        and judge(bound, [0.55, 0.56])[0] == "reproduced"
    )
    (line,) = board(record(experiment="figure4", row="d8", metrics={"kappa_rank": 0.3}))
    assert line.verdict == "differs"  # one seed has no scatter to hide behind


@given(st.sampled_from([e for e in paper_numbers() if e.rule == "value" and e.value]))
def test_the_published_value_reproduces_itself_and_its_double_does_not(
    entry: PaperEntry,
) -> None:
    assert judge(entry, [entry.value] * 5)[0] == "reproduced"
    if entry.stderr is None or abs(entry.value) > 4 * (entry.stderr + entry.half_unit):
        assert judge(entry, [2 * entry.value] * 5)[0] == "differs"


@settings(deadline=None)
@given(st.sampled_from(paper_numbers()), st.lists(st.floats(), max_size=5))
def test_no_result_can_break_the_scoreboard(
    entry: PaperEntry, values: list[float]
) -> None:
    where = {"experiment": entry.experiment, "row": entry.row}
    rows = board(
        *(
            record(**where, seed=i, metrics={entry.metric: v})
            for i, v in enumerate(values)
        )
    )
    json.dumps(report_json(rows), allow_nan=False)
    assert report_text(rows)
    for s in rows:
        assert s.verdict in ("reproduced", "differs", "inconclusive", "no paper value")
        if any(map(math.isnan, values)) and s.rule != "none":
            assert s.verdict == "differs"


def test_an_order_of_magnitude_is_not_reproduced_by_a_sane_number() -> None:
    hib = cell("table3", "hib", "kappa_rmse")
    assert judge(hib, [5.0])[0] == "differs" and "better" in judge(hib, [5.0])[1]
    assert (
        judge(hib, [3e13, 4e14])[0] == "reproduced"
        and judge(hib, [1e20])[0] == "differs"
    )
    assert judge(hib, [math.inf])[0] == "differs"


def test_mean_and_error_against_numpy() -> None:
    values = [0.2, 0.5, 0.9, 0.1]
    mean, error = mean_and_error(values)
    assert math.isclose(mean, np.mean(values)) and math.isclose(
        error, np.std(values, ddof=1) / 2
    )


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=9))
def test_the_rank_correlation_against_scipy(values: list[float]) -> None:
    ours = ledger._rank_correlation(values)
    expected = (
        spearmanr(range(len(values)), values).statistic if len(set(values)) > 1 else 0.0
    )
    assert math.isclose(ours, expected, abs_tol=1e-12)


def test_a_row_of_ours_beside_published_ones_shows_what_they_measure() -> None:
    metrics = {"kappa_mae": 5.0, "kappa_rank": 0.9, "spread_mae": 0.1}
    own = [
        s
        for s in scoreboard([record(row="ambiguous-exact", metrics=metrics)])
        if s.verdict == "no paper value"
    ]
    assert {s.metric for s in own} == {"kappa_mae", "kappa_rank"} and all(
        s.label != s.metric for s in own
    )
    free = scoreboard([record(experiment="ours", row="a", metrics=metrics)])
    assert {s.metric for s in free if s.verdict == "no paper value"} == set(metrics)


def test_the_report_is_aligned_and_complete() -> None:
    rows = scoreboard(
        [
            record(seconds=100.0),
            record(seed=1, metrics={"kappa_rmse": 6.4}, seconds=100.0),
        ]
    )
    lines = report_text(rows).splitlines()
    assert len(lines) == 2 + len(rows) + 3
    column = lines[0].index("paper")
    assert all(line[column - 2 : column] == "  " for line in lines[2:-3])
    assert (
        lines[-2]
        == "1 reproduced, 0 differs, 0 inconclusive, 141 not yet run, 0 no paper value"
    )
    assert lines[-1] == "all runs, one after the other: 3 min"
    (ours,) = [s for s in rows if s.seeds]
    assert format_ours(ours) == "6.20 ± 0.20" and "3 min" in report_text([ours])
    keys = {
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
    }
    objects = json.loads(json.dumps(report_json(rows), allow_nan=False))
    assert len(objects) == len(rows) and all(keys <= set(o) for o in objects)
    assert [o["paper_value"] for o in objects if o["rule"] == "diverges"] == ["inf"]


def test_published_rmse_is_compared_with_what_its_code_computed() -> None:
    """The published code prints a mean absolute error as RMSE: ours is compared by the
    same quantity where it was recorded."""
    both = [
        record(seed=s, metrics={"kappa_mae": 6.1 + s / 10, "kappa_rmse": 60.0})
        for s in (1, 2)
    ]
    (line,) = [
        r
        for r in scoreboard(both)
        if (r.experiment, r.row, r.metric) == ("table1", "ambiguous", "kappa_rmse")
    ]
    assert line.ours == pytest.approx(6.25) and line.verdict == "reproduced"


def test_a_single_seed_is_called_one() -> None:
    (line,) = [
        r
        for r in scoreboard([record()])
        if (r.experiment, r.row, r.metric) == ("table1", "ambiguous", "kappa_rmse")
    ]
    assert line.verdict == "reproduced" and "one seed" in line.reason
