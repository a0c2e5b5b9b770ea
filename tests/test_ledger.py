"""The ledger under faults, two writers, hostile files and old schemas."""

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

import pcl
from pcl import ledger, works
from pcl.ledger import (
    AXES,
    SCHEMA,
    LedgerError,
    Record,
    Runs,
    from_json,
    latest,
    lift,
    mean_and_error,
    read,
    to_json,
    work_of,
    write,
)
from pcl.provenance import checkout, revision
from pcl.scores import published_numbers


def record(**changes: object) -> Record:
    base = {
        "experiment": "table1",
        "row": "ambiguous",
        "preset": "cpu",
        "seed": 0,
        "metrics": {"kappa_rmse": 6.0},
    }
    return Record(**{**base, **changes})


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
        ("settings", {"a": [1]}),
        ("settings", {"a": {"b": 1}}),
        ("settings", {"a": "inf"}),
        ("settings", []),
        ("settings", {"a": Path("x")}),
        ("series", {"curve": {"a": [1.0], "b": []}}),
        ("series", {"curve": {"a": "123"}}),
        ("series", {"trials": {"a": [None]}}),
        ("series", {"trials": [{"step": 1}]}),
        ("series", [{"step": 1}]),
        ("exact", {"kappa_rank": 1.0}),
        ("exact", {"kappa_rmse": "1"}),
        ("exact", None),
        ("axes", {"dataset": "cub"}),
        ("axes", {"test": 3}),
        ("axes", {"test": ""}),
        ("work", "../up"),
        ("work", None),
        ("machine", {}),
        ("machine", {"device": ""}),
        ("machine", {"device": "cpu", "threads": 0}),
        ("machine", {"device": "cpu", "threads": "two"}),
        ("machine", {"device": "cpu", "host": "home"}),
        ("seconds", -1.0),
        ("seconds", math.nan),
        ("seconds", "1"),
        ("versions", {"torch": 2}),
        ("revision", ""),
        ("created", "soon"),
        ("created", "2026-01-01T00:00:00"),
        ("created", "2026-01-01T00:00:00+01:00"),
        ("created", 5),
        ("schema", 1),
        ("schema", 3),
        ("schema", True),
        ("schema", "2"),
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
    st.dictionaries(text, st.lists(number, max_size=6), max_size=3),
    st.dictionaries(st.sampled_from(AXES), text),
    st.integers(0, 2**70),
)
def test_what_goes_in_comes_out(
    metrics: dict, config: dict, columns: dict, axes: dict, seed: int
) -> None:
    r = record(
        metrics=metrics,
        settings=config,
        exact=dict(list(metrics.items())[:2]),
        series={name: {"a": c, "b": c[::-1]} for name, c in columns.items()},
        axes=axes,
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
from pcl import ledger, scores
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
    assert (
        list(tmp_path.glob("*/.*.part")) and read(tmp_path).problems == ()
    )  # it lives
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    found = read(tmp_path)
    assert len(found) == 0 and not list(tmp_path.rglob("*.json"))
    assert [p.path.suffix for p in found.problems] == [".part"]
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
        assert read(tmp_path).problems == ()
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
    monkeypatch.setattr(
        ledger.secrets, "token_hex", lambda n: next(draws) if n == 4 else "abcd"
    )
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


def rescued(place: Path) -> Path:
    """The one folder that a record was rescued to."""
    (folder,) = place.glob("pcl-rescued-*")
    return folder


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
    written = Path.write_text

    def read_only(path: Path, *args: object, **kwargs: object) -> int:
        if "locked" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return written(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", read_only)
    with pytest.raises(
        LedgerError, match=r"locked: Permission denied.*The record is safe in"
    ):
        write(record(), tmp_path / "locked")
    assert len(read(rescued(rescue))) == 1


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
        "schema.json": whole.replace('"schema": 2', '"schema": 9').encode(),
        "older.json": whole.replace('"schema": 2', '"schema": 1').encode(),
        "zeroth.json": whole.replace('"schema": 2', '"schema": 0').encode(),
        "extra.json": whole.replace('"seed"', '"extra": 1, "seed"').encode(),
        "digits.json": b"9" * 10_000,
        "type.json": whole.replace("6.0", '"six"').encode(),
        "series.json": whole.replace('"series": {}', '"series": 5').encode(),
        "axes.json": whole.replace('"axes": {}', '"axes": []').encode(),
        ".killed.json.part": b"{",
        ".older.tmp": b"{",
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
    root = checkout()
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
    published = package / "results" / "published"
    published.mkdir()
    (published / "pcl.toml").write_bytes(
        (checkout() / "results" / "published" / "pcl.toml").read_bytes()
    )
    monkeypatch.delenv("PCL_RESULTS", raising=False)
    monkeypatch.setattr(pcl, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert checkout() is None and ledger.write_root() == Path("results")
    assert write(record(seed=2)).resolve().is_relative_to(tmp_path / "results")
    assert sorted(r.seed for r in read()) == [1, 2]
    works._published_files.cache_clear()
    try:
        assert len(published_numbers()) == 142
    finally:
        works._published_files.cache_clear()


def test_reading_the_ledger_imports_no_torch() -> None:
    code = (
        "import sys, pcl.ledger, pcl.scores as s; s.scoreboard(pcl.ledger.read()); "
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
    assert read(checkout() / "results").problems == ()


def test_the_latest_repetition_counts() -> None:
    old, new = (
        record(created="2026-01-01T00:00:00+00:00"),
        record(created="2026-01-02T00:00:00.000001+00:00"),
    )
    other = record(created="2025-01-01T00:00:00+00:00", preset="paper")
    assert latest([new, old, other]) == [other, new]


def test_another_test_set_is_no_repetition() -> None:
    old, new = (
        record(axes={"test": name}, created=f"2026-01-0{i}T00:00:00+00:00")
        for i, name in ((1, "cub"), (2, "cars"))
    )
    assert latest([old, new, replace(new)]) == [old, new]


# ------------------------------------------------------------------------------------
# the schema before

SCHEMA_1 = """{
  "config": {"n_draws": 1000, "dim": 64, "why": null, "reference_cosine": 0.25, "reference_other": 3.0},
  "created": "2026-01-02T03:04:05.000006+00:00",
  "curve": {"step": [1.0, 2.0], "cosine": [0.1, "nan"]},
  "device": "cpu",
  "experiment": "sampler",
  "metrics": {"cosine": 0.24, "gap": "-inf"},
  "preset": "cpu",
  "revision": "abc1234",
  "row": "D=64",
  "schema": 1,
  "seconds": 1.5,
  "seed": 3,
  "versions": {"torch": "2.0"}
}
"""


def test_a_record_of_schema_1_is_read_as_one_of_schema_2() -> None:
    r = from_json(SCHEMA_1)
    assert (r.schema, r.work, r.key) == (SCHEMA, "own", ("sampler", "D=64", "cpu", 3))
    assert r.exact == {"cosine": 0.25}  # reference_other is of no metric: a setting
    assert set(r.settings) == {"n_draws", "dim", "why", "reference_other"}
    assert r.metrics == {"cosine": 0.24, "gap": -math.inf} and r.axes == {}
    assert list(r.series) == ["curve"] and math.isnan(r.curve["cosine"][1])
    assert r.machine == {"device": "cpu"} and r.seconds == 1.5
    assert (r.revision, r.versions) == ("abc1234", {"torch": "2.0"})
    # what chapters read is what the file says
    assert r.config == json.loads(SCHEMA_1)["config"]


def test_lifting_changes_nothing_it_is_given() -> None:
    old = json.loads(SCHEMA_1)
    assert lift(old) == lift(old) and old == json.loads(SCHEMA_1)
    assert set(lift(old)) == set(json.loads(to_json(from_json(SCHEMA_1))))


def test_a_benchmark_s_machine_is_lifted_out_of_its_settings() -> None:
    old = json.loads(SCHEMA_1) | {"experiment": "growth"}
    old["config"] = {"cpu": "fast", "threads": 2, "cores": 4}
    r = from_json(json.dumps(old))
    assert r.machine == {"device": "cpu", "cpu": "fast", "threads": 2}
    assert r.settings == {"cores": 4} and r.work == "speed"
    odd = old | {"config": {"threads": None, "cpu": 5}}
    assert from_json(json.dumps(odd)).settings == odd["config"]


def test_every_recorded_file_is_lifted_without_a_loss() -> None:
    folder = checkout() / "results"
    for path in folder.glob("*/*.json"):
        data = json.loads(path.read_text())
        if data["schema"] != 1:
            continue
        r = from_json(path.read_text())
        machine = {k: v for k, v in r.machine.items() if k != "device"}
        assert ledger.plain({**r.config, **machine}) == data["config"], path
        assert ledger.plain(dict(r.curve)) == data["curve"]
        assert ledger.plain(dict(r.metrics)) == data["metrics"]
        assert r.machine["device"] == data["device"]
        assert repr(from_json(to_json(r))) == repr(r)


def test_a_schema_from_the_future_is_named() -> None:
    later = to_json(record()).replace('"schema": 2', '"schema": 3')
    with pytest.raises(ValueError, match=r"schema 3 comes from a newer pcl.*upgrade"):
        from_json(later.replace('"seed"', '"unheard_of": 1, "seed"'))


def test_the_work_follows_from_the_name_and_may_not_contradict_it() -> None:
    assert record().work == "pcl" and record(experiment="hard").work == "own"
    assert (
        record(experiment="url.table1").work == "url" and work_of("growth") == "speed"
    )
    assert record(experiment="hard", work="url").work == "url"
    with pytest.raises(ValueError, match="work must be 'url'"):
        record(experiment="url.table1", work="pcl")


# ------------------------------------------------------------------------------------
# asking


def several() -> Runs:
    return Runs(
        [
            record(
                row=row,
                seed=s,
                metrics={"a": value, "b": math.nan},
                series={"curve": {"step": [1, 2], "a": [s, value]}},
                axes={"test": "cub"} if row == "k4" else {},
            )
            for row, s, value in (("k1", 1, 1.0), ("k1", 2, 2.0), ("k4", 1, 4.0))
        ],
        "table1",
    )


def test_runs_are_narrowed_down_and_asked() -> None:
    runs = several()
    assert runs.row("k1").values("a") == [1.0, 2.0] and runs.rows == ["k1", "k4"]
    assert (runs.row("k1").mean("a"), runs.row("k1").error("a")) == (1.5, 0.5)
    assert runs.row("k4").error("a") == 0.0
    assert len(runs.where(test="cub")) == 1 and len(runs.preset("smoke")) == 0
    assert [r.seed for r in runs.where(row="k1", preset="cpu")] == [1, 2]
    assert runs.row("k1").curve("a") == [[1.0, 1.0], [2.0, 2.0]]
    assert runs.series("trials") == [] and runs[0].row == "k1" and bool(Runs()) is False


def test_values_are_the_finite_ones_unless_all_are_asked_for() -> None:
    assert several().values("b") == [] and several().values("absent") == []
    assert len(several().values("b", finite=False)) == 3


def test_the_mean_of_nothing_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"no value of 'b' in Runs of table1 k4: 1"):
        several().row("k4").mean("b")
    with pytest.raises(ValueError, match="no value of 'a' in Runs of table1 k9: 0"):
        several().row("k9").error("a")
    with pytest.raises(ValueError, match="did you mean 'preset'"):
        several().where(presett="cpu")


def test_a_sweep_leaves_out_what_was_not_run() -> None:
    places, means, errors = several().sweep("a", {"k4": 4, "k16": 16, "k1": 1})
    assert (places, means, errors) == ([4, 1], [4.0, 1.5], [0.0, 0.5])


def test_mean_and_error_against_numpy() -> None:
    values = [0.2, 0.5, 0.9, 0.1]
    mean, error = mean_and_error(values)
    assert math.isclose(mean, np.mean(values)) and math.isclose(
        error, np.std(values, ddof=1) / 2
    )


def test_the_rescue_folder_is_fresh_and_ones_own(tmp_path: Path, rescue: Path) -> None:
    (rescue / "pcl-rescued").symlink_to(tmp_path)  # as another user might
    root = tmp_path / "file"
    root.write_text("in the way")
    for _ in range(2):
        with pytest.raises(LedgerError, match="The record is safe in"):
            write(record(), root)
    found = list(rescue.glob("pcl-rescued-*"))
    assert len(found) == 2 and {f.stat().st_mode & 0o777 for f in found} == {0o700}
