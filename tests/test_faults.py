"""Faults of disks, processes and inputs: each gives a clear error, and nothing that was recorded is lost.

The chapters' own tests simulate many of these; here the disks are really full or read-only and the processes really die.
"""

from __future__ import annotations

import ast
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from example_losses import example
from torch import Tensor, nn
from training_world import Encoder, draw

import pcl
from pcl.bessel import log_normalizer
from pcl.checkpoints import CheckpointError, read_checkpoint
from pcl.encoders import SphereEncoder, mlp_encoder
from pcl.experiments import Job
from pcl.generative import UniformProcess
from pcl.ledger import LedgerError, Record, from_json, read, write
from pcl.losses import HIB, LOSSES, ExactInfoNCE, InfoNCE, MCInfoNCE
from pcl.marginal import log_marginal
from pcl.metrics import pair_cosines
from pcl.studies import controlled
from pcl.studies.losses import measure_grid
from pcl.training import Config, Diverged, Draw
from pcl.training import train_encoder as fit
from pcl.vmf import VonMisesFisher

TINY = Config(steps=12, batch_size=8, log_every=5, kappa_from=0.0)


def record(seed: int = 0, points: int = 1) -> Record:
    return Record(
        "table1",
        "ambiguous",
        "cpu",
        seed,
        {"loss": 1.0},
        series={"curve": {"loss": [0.123456789] * points}},
    )


def environment(**more: str) -> dict[str, str]:
    """For a process of our own: this package and these tests, one thread."""
    paths = [
        str(Path(pcl.__file__).parent.parent),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def rescued(place: Path) -> Path:
    """The one folder that a record was rescued to."""
    (folder,) = place.glob("pcl-rescued-*")
    return folder


@pytest.fixture
def rescue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records go that cannot be written."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(
            f"needs the right to mount a small file system: {mounted.stderr.strip()}"
        )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def read_only(folder: Path) -> None:
    """Make the file system read-only: root may write to folders that forbid it, but not
    to these."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file()
    }


# --- killed writers
# --------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pcl.ledger import Record, write
for seed in range(100_000):
    path = write(Record("table1", "ambiguous", "cpu", seed, {"loss": 1.0}, series={"curve": {"loss": [0.5] * 2000}}), sys.argv[1])
    print(path, flush=True)
"""


def test_what_a_killed_writer_has_reported_is_there(tmp_path: Path) -> None:
    """SIGKILL at a random moment, several times over, into one ledger."""
    rng, reported = random.Random(0), []
    for _ in range(5):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writer = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0]
        reported += [
            line
            for line in (first + rest).splitlines(keepends=True)
            if line.endswith(".json\n")
        ]
    found = read(tmp_path)
    assert len(reported) >= 5
    assert {line.strip() for line in reported} <= {
        str(p) for p in tmp_path.glob("table1/*.json")
    }
    assert len(found) == len(list(tmp_path.glob("table1/*.json"))), (
        "every named file is a whole record"
    )
    assert all("unfinished write" in p.reason for p in found.problems)


STALLED = """
import os, sys, time
from pcl.losses import InfoNCE
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw
sync, calls = os.fsync, []
def stall(fd):
    calls.append(fd)  # two for each checkpoint, its file and its folder: at steps 0, 4 and 8
    if len(calls) > 4:
        print("writing", flush=True)
        time.sleep(60)
    sync(fd)
os.fsync = stall
fit(Encoder(), InfoNCE(5.0), draw, Config(steps=12, batch_size=8, log_every=5, kappa_from=0.0), checkpoint=sys.argv[1],
    checkpoint_every=4)
"""


def test_a_trainer_killed_while_it_writes_keeps_its_last_checkpoint(
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.pt"
    trainer = subprocess.Popen(
        [sys.executable, "-c", STALLED, str(file)],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == b"writing\n"
    assert (
        read_checkpoint(file)["run"]["step"] == 4
        and len(list(tmp_path.glob(".*.part"))) == 1
    )
    unbroken = Encoder()
    fit(unbroken, InfoNCE(5.0), draw, TINY)
    during = Encoder()
    fit(during, InfoNCE(5.0), draw, TINY, checkpoint=tmp_path / "copy.pt")
    trainer.send_signal(signal.SIGKILL)
    trainer.communicate()
    resumed = Encoder()
    fit(resumed, InfoNCE(5.0), draw, TINY, checkpoint=file, checkpoint_every=4)
    assert all(
        torch.equal(a, b)
        for a, b in zip(resumed.parameters(), unbroken.parameters(), strict=True)
    )
    assert list(tmp_path.glob(".*.part")) == []


# --- full and read-only disks
# ----------------------------------------------------------------------------------------


def test_a_full_disk_loses_no_record(small_disk: Path, rescue: Path) -> None:
    """Records of about 30 kB until nothing fits: those on the disk stay whole, the last
    one is rescued elsewhere."""
    written = []
    with pytest.raises(
        LedgerError, match=r"No space left on device.*The record is safe in"
    ) as caught:
        for seed in range(100):
            write(record(seed, points=2500), small_disk)
            written.append(seed)
    assert 3 < len(written) < 40
    found = read(small_disk)
    assert sorted(r.seed for r in found) == written and found.problems == (), (
        "nothing lost, nothing half-written"
    )
    (saved,) = (rescued(rescue) / "table1").iterdir()
    assert str(saved) in str(caught.value) and [
        r.seed for r in read(rescued(rescue))
    ] == [len(written)]


def test_a_full_disk_keeps_the_last_checkpoint(small_disk: Path) -> None:
    file = small_disk / "run.pt"
    config = Config(steps=12, batch_size=8, log_every=5, kappa_from=0.0)
    with pytest.raises(Stop):
        fit(
            Encoder(),
            InfoNCE(5.0),
            stopping(5),
            config,
            checkpoint=file,
            checkpoint_every=4,
        )
    before = file.read_bytes()
    (small_disk / "ballast").write_bytes(b"0" * (512 * 1024 - 2 * len(before)))
    with pytest.raises(
        CheckpointError,
        match=r"cannot be written .*the one before it is still there: free some space",
    ):
        while True:  # the ballast grows until the next checkpoint does not fit
            with open(small_disk / "ballast", "ab") as ballast:
                ballast.write(b"0" * 4096)
            with pytest.raises(Stop):
                fit(
                    Encoder(),
                    InfoNCE(5.0),
                    stopping(5),
                    config,
                    checkpoint=file,
                    checkpoint_every=1,
                )
            before = file.read_bytes()
    assert (
        read_checkpoint(file)
        and list(small_disk.glob(".*.part")) == []
        and file.read_bytes()[:2] == before[:2]
    )
    (small_disk / "ballast").unlink()
    resumed, unbroken = Encoder(), Encoder()
    fit(unbroken, InfoNCE(5.0), draw, config)
    fit(resumed, InfoNCE(5.0), draw, config, checkpoint=file)
    assert all(
        torch.equal(a, b)
        for a, b in zip(resumed.parameters(), unbroken.parameters(), strict=True)
    )


EXTRACTS = """
import os, sys, torch
from pathlib import Path
from pcl.features import extract
disk = Path(sys.argv[1])
images, model = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0)), torch.nn.Identity()
try:
    extract(model, images, disk / "cache", batch_size=20, chunk=20)
except OSError as error:
    print(error)
os.unlink(disk / "ballast")
print("the same:", torch.equal(torch.tensor(extract(model, images, disk / "cache", batch_size=20, chunk=20)), images))
"""


def test_a_full_disk_ends_an_extraction_with_a_message(small_disk: Path) -> None:
    """Writing through a memory map would end the process by a signal, so it runs in one
    of its own."""
    (small_disk / "ballast").write_bytes(b"0" * 300_000)
    command = [sys.executable, "-c", EXTRACTS, str(small_disk)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)
    refused, repaired = done.stdout.splitlines()
    assert re.search(
        r"No space left on device; the features take 0\.4 MiB: make room, or choose "
        r"another folder",
        refused,
    )
    assert repaired == "the same: True" and list(small_disk.rglob("*.part")) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A quota that needs no rights: no file of this process may grow beyond so many
    bytes."""
    resource = pytest.importorskip(
        "resource", reason="file size limits are a matter of Unix"
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_quota_that_stops_every_write_hands_the_record_to_its_owner(
    tmp_path: Path, rescue: Path
) -> None:
    write(record(0), tmp_path / "ledger")
    with (
        largest_file(8192),
        pytest.raises(
            LedgerError, match=r"File too large.*save this text yourself"
        ) as caught,
    ):
        write(record(1, points=2500), tmp_path / "ledger")
    assert from_json(str(caught.value).partition("yourself:\n")[2]).seed == 1
    assert [r.seed for r in read(tmp_path / "ledger")] == [0] and files(rescue) == {}


def test_a_quota_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    with pytest.raises(Stop):
        fit(
            Encoder(),
            InfoNCE(5.0),
            stopping(5),
            TINY,
            checkpoint=file,
            checkpoint_every=4,
        )
    before = file.read_bytes()
    with (
        largest_file(len(before) // 2),
        pytest.raises(
            CheckpointError, match=r"cannot be written .*the one before it is still"
        ),
    ):
        fit(Encoder(), InfoNCE(5.0), draw, TINY, checkpoint=file, checkpoint_every=4)
    assert files(tmp_path) == {"run.pt": before}


def test_a_read_only_ledger_is_read_and_new_records_are_rescued(
    small_disk: Path, rescue: Path
) -> None:
    write(record(0), small_disk)
    before = files(small_disk)
    read_only(small_disk)
    with pytest.raises(
        LedgerError,
        match=r"Read-only file system.*The record is safe in .* or set PCL_RESULTS",
    ):
        write(record(1), small_disk)
    assert files(small_disk) == before and [r.seed for r in read(small_disk)] == [0]
    assert [r.seed for r in read(rescued(rescue))] == [1]


def test_a_command_on_a_read_only_ledger_says_so(
    small_disk: Path, rescue: Path
) -> None:
    read_only(small_disk)
    words = [
        "run",
        "sampler",
        "--row",
        "D=10_kappa=20",
        "--preset",
        "smoke",
        "--seeds",
        "1",
    ]
    env = environment(PCL_RESULTS=str(small_disk), TMPDIR=str(rescue))
    done = subprocess.run(
        [sys.executable, "-m", "pcl.cli", *words],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert re.search(
        r"cannot write to .*Read-only file system.*The record is safe in",
        done.stderr.splitlines()[-1],
    )
    assert len(read(rescued(rescue))) == 1


def test_a_read_only_checkpoint_stops_before_the_first_step(small_disk: Path) -> None:
    read_only(small_disk)
    for path in (small_disk / "run.pt", small_disk / "deeper" / "run.pt"):
        with pytest.raises(
            CheckpointError,
            match=r"run\.pt .*Read-only file system.*choose another file",
        ):
            fit(Encoder(), InfoNCE(5.0), stopping(0), TINY, checkpoint=path)


class Stop(Exception):
    """Ends a run from inside."""


def stopping(after: int):
    """The usual batches, and then the end."""
    count = 0

    def draw_until(
        n: int, n_neg: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        nonlocal count
        count += 1
        if count > after:
            raise Stop
        return draw(n, n_neg, generator)

    return draw_until


def test_a_killed_search_resumes_in_the_cell_it_was_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table 7 ends in its fifth cell; finished cells are not trained again, and the
    numbers are those of an unbroken search."""
    config = replace(Job("table7", "mcinfonce", "smoke", 100).settings(), steps=4)
    unbroken, file, trained = measure_grid(config, 100), tmp_path / "search.pt", []

    def counted(
        encoder: nn.Module,
        loss: nn.Module,
        sample: Draw,
        *args: object,
        **kwargs: object,
    ) -> object:
        drawn = 0

        def draw_until(n: int, n_neg: int, generator: torch.Generator) -> object:
            nonlocal drawn
            if len(trained) == 5 and drawn == 3:
                raise Stop
            drawn += 1
            return sample(n, n_neg, generator)

        trained.append(kwargs["checkpoint"])
        run = fit(encoder, loss, draw_until, *args, **kwargs, checkpoint_every=2)
        steps.append(drawn)
        return run

    steps: list[int] = []
    monkeypatch.setattr(controlled, "train_encoder", counted)
    with pytest.raises(Stop):
        measure_grid(config, 100, file)
    broken = trained[-1]
    assert (
        sorted(tmp_path.iterdir()) == sorted([file, broken])
        and len(read_checkpoint(file)["cells"]) == 4
    )
    trained[0].write_bytes(
        broken.read_bytes()
    )  # what a kill leaves between a cell's last two lines
    resumed = measure_grid(config, 100, file)
    assert trained[5] == broken and steps[4:] == [2, *[4] * 7] and len(trained) == 5 + 8
    assert (resumed.metrics, resumed.curve) == (
        unbroken.metrics,
        unbroken.curve,
    ) and list(tmp_path.iterdir()) == [file]
    assert resumed.seconds > 0 and len(set(trained)) == 12
    with pytest.raises(
        CheckpointError, match="another run: steps is 4 there and 5 here"
    ):
        measure_grid(replace(config, steps=5), 100, file)


# --- two at once
# -----------------------------------------------------------------------------------------------------


def test_two_runs_of_the_same_row_at_once(tmp_path: Path) -> None:
    """Two commands for one row: one runs, the other says so or runs after it; every
    record is whole."""
    words = [
        "run",
        "sampler",
        "--row",
        "D=10_kappa=20",
        "--preset",
        "smoke",
        "--seeds",
        "1,2",
        "--force",
    ]
    ledger = tmp_path / "ledger"
    env = environment(PCL_RESULTS=str(ledger), XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "-m", "pcl.cli", *words]
    both = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in both]
    done = [process.returncode == 0 for process in both]
    assert any(done), said
    refused = [
        err.splitlines()[-1]
        for (_, err), good in zip(said, done, strict=True)
        if not good
    ]
    assert all(
        "is being run by another process: wait for it" in line for line in refused
    ), said
    found = read(ledger)
    assert (
        {r.seed for r in found} == {1, 2}
        and len(found) >= 2 * sum(done)
        and found.problems == ()
    )
    for seed in (1, 2):
        assert len({str(r.metrics) for r in found if r.seed == seed}) == 1, (
            "the same run gives the same numbers"
        )


TOGETHER = """
import sys
from pcl.losses import InfoNCE
from pcl.training import Config, train_encoder as fit
from training_world import Encoder, draw
fit(Encoder(), InfoNCE(5.0), draw, Config(steps=15, batch_size=8, log_every=5, kappa_from=0.0), checkpoint=sys.argv[1],
    checkpoint_every=1)
"""


def test_two_trainers_on_one_checkpoint(tmp_path: Path) -> None:
    """Each writes whole files only and leaves the other's unfinished one alone, so both
    end with the bits of one."""
    file = tmp_path / "run.pt"
    command = [sys.executable, "-c", TOGETHER, str(file)]
    both = [
        subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    alone = subprocess.run(
        [sys.executable, "-c", TOGETHER, str(tmp_path / "alone.pt")], env=environment()
    )
    assert alone.returncode == 0
    a, b = (read_checkpoint(path) for path in (file, tmp_path / "alone.pt"))
    assert a["run"]["step"] == 15 and a["run"]["curve"] == b["run"]["curve"]
    assert all(
        torch.equal(a["objective"][name], b["objective"][name])
        for name in b["objective"]
    )
    assert list(tmp_path.glob(".*.part")) == []


# --- checkpoints that are something else
# -----------------------------------------------------------------------------


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.sprung),)


@pytest.mark.parametrize(
    "disguise", ["plain pickle", "legacy torch file", "torch file"]
)
def test_a_pickle_disguised_as_weights_is_refused(
    tmp_path: Path, disguise: str
) -> None:
    file, sprung = tmp_path / "run.pt", tmp_path / "sprung"
    content = {"format": "pcl.training 1", "objective": Trap(sprung)}
    if disguise == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(
            content, file, _use_new_zipfile_serialization=disguise == "torch file"
        )
    before = file.read_bytes()
    reason = (
        "could run code: it is refused"
        if disguise == "torch file"
        else "is damaged .File is not a zip file.*delete it"
    )
    with pytest.raises(CheckpointError, match=rf"run\.pt .*{reason}"):
        fit(Encoder(), InfoNCE(5.0), stopping(0), TINY, checkpoint=file)
    assert not sprung.exists() and file.read_bytes() == before


def test_nothing_in_the_library_unpickles(root: Path) -> None:
    """Whatever is loaded from a file is loaded as data: no pickle, and torch and numpy
    told so in as many words."""
    for path in (root / "pcl").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {
                    getattr(node, "module", "") or ""
                }
                if names == {"pickle", "UnpicklingError"}:  # to catch what torch raises
                    continue
                assert not names & {
                    "pickle",
                    "dill",
                    "joblib",
                    "cloudpickle",
                    "marshal",
                    "shelve",
                }, f"{path.name}: {names}"
            if isinstance(node, ast.Call):
                called, words = (
                    ast.unparse(node.func),
                    {w.arg: ast.unparse(w.value) for w in node.keywords},
                )
                if called in ("torch.load", "np.load"):
                    wanted = {
                        "torch.load": ("weights_only", "True"),
                        "np.load": ("allow_pickle", "False"),
                    }[called]
                    assert words.get(wanted[0]) == wanted[1], (
                        f"{path.name}, line {node.lineno}: say {'='.join(wanted)}"
                    )


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        torch.zeros(3),
        {"format": "pcl.training 1"},
        {"format": "pcl.training 2"},
        {},
        "text",
    ],
    ids=str,
)
def test_other_content_in_a_checkpoint_is_named(
    tmp_path: Path, content: object
) -> None:
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(
        CheckpointError,
        match=r"run\.pt (is not a checkpoint of format|lacks identity, objective, optimizer)",
    ):
        fit(Encoder(), InfoNCE(5.0), stopping(0), TINY, checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize("part", ["run", "optimizer", "objective"])
def test_a_part_of_another_shape_is_named(tmp_path: Path, part: str) -> None:
    file = tmp_path / "run.pt"
    with pytest.raises(Stop):
        fit(
            Encoder(),
            InfoNCE(5.0),
            stopping(5),
            TINY,
            checkpoint=file,
            checkpoint_every=4,
        )
    content = read_checkpoint(file)
    content[part] = {"unknown": 1}
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="of another encoder or loss"):
        fit(Encoder(), InfoNCE(5.0), stopping(0), TINY, checkpoint=file)


# --- inputs that are no numbers, and sizes that are absurd
# -----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["anchors", "positives", "negatives"])
def test_inputs_that_are_not_finite_are_named_with_their_step(
    tmp_path: Path, which: str, bad: float
) -> None:
    calls = 0

    def spoiled(n: int, n_neg: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        parts = dict(
            zip(
                ("anchors", "positives", "negatives"),
                draw(n, n_neg, generator),
                strict=True,
            )
        )
        if calls == 7:
            parts[which].view(-1)[3] = bad
        return tuple(parts.values())

    config = Config(steps=12, batch_size=8, n_neg=2, log_every=5, kappa_from=0.0)
    with pytest.raises(
        ValueError, match=f"draw gave {which} with NaN or infinity at step 6"
    ):
        fit(
            Encoder(),
            ExactInfoNCE(5.0),
            spoiled,
            config,
            checkpoint=tmp_path / "run.pt",
            checkpoint_every=3,
        )
    assert read_checkpoint(tmp_path / "run.pt")["run"]["step"] == 6, (
        "what was learned before is kept"
    )


class Overflows(SphereEncoder):
    """Sane for a few calls; then one of its outputs is not a number."""

    def __init__(self, part: str) -> None:
        super().__init__(nn.Linear(6, 4), nn.Linear(6, 1))
        self.part, self.calls = part, 0

    def forward(self, x: Tensor) -> VonMisesFisher:
        self.calls += 1
        q = super().forward(x)
        factor = float("nan") if self.calls > 5 else 1.0
        loc, kappa = (
            (q.loc * factor, q.concentration)
            if self.part == "mu"
            else (q.loc, q.concentration * factor)
        )
        return VonMisesFisher(loc, kappa, validate_args=False)


@pytest.mark.parametrize("part", ["mu", "kappa"])
@pytest.mark.parametrize("name", LOSSES)
def test_posteriors_that_are_not_numbers_are_a_divergence(
    tmp_path: Path, name: str, part: str
) -> None:
    with pytest.raises(
        Diverged, match=r"loss nan at step 5, the last good checkpoint is .*run\.pt"
    ):
        fit(
            Overflows(part),
            example(name),
            draw,
            TINY,
            checkpoint=tmp_path / "run.pt",
            checkpoint_every=4,
        )


def some(n: int = 4) -> VonMisesFisher:
    return VonMisesFisher(
        nn.functional.normalize(torch.randn(n, 8), dim=-1), torch.ones(n)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MCInfoNCE(20.0, 10**12),
            r"n_samples must be a positive integer below 2\^31",
        ),
        (
            lambda: HIB(2.0, 0.0, 10**30),
            r"n_samples must be a positive integer below 2\^31",
        ),
        (
            lambda: MCInfoNCE(20.0, 8, chunk_size=10**30),
            r"chunk_size must be a positive integer",
        ),
        (
            lambda: InfoNCE(1e39),
            "kappa_pos must be a finite number, also in single precision",
        ),
        (
            lambda: log_marginal(
                torch.ones(1), torch.ones(1), torch.ones(1), 20.0, 10**30
            ),
            r"dim must be .* below 2\^31",
        ),
        (lambda: log_normalizer(10**30, torch.ones(1)), r"dim must be below 2\^53"),
        (
            lambda: MCInfoNCE(20.0, 2**31 - 1)(some(1000), some(1000)),
            "Unable to allocate",
        ),
        (lambda: some().rsample((10**13,)), "Unable to allocate"),
        (lambda: mlp_encoder(10**12, 10, [10]), "can't allocate memory"),
        (lambda: UniformProcess(10**7), "can't allocate memory"),
        (lambda: pair_cosines(torch.ones(1, 2).expand(10**7, 2)), "Unable to allocate"),
        (lambda: Config(steps=0), "steps must be at least 1"),
        (lambda: Config(batch_size=-(10**30)), "batch_size must be at least 1"),
        (lambda: Config(lr_mu=float("nan")), "lr_mu must be 0 or more"),
        (lambda: Config(clip=float("nan")), "clip must be positive"),
    ],
)
def test_absurd_sizes_fail_at_once_and_say_why(call, message: str) -> None:
    start = time.process_time()
    with pytest.raises((ValueError, RuntimeError, MemoryError), match=message):
        call()
    assert time.process_time() - start < 2


def test_many_dimensions_are_no_absurdity() -> None:
    """A million dimensions are large, not wrong: the functions still answer, and in
    time."""
    kappa = torch.tensor([0.0, 1.0, 1e6, 1e12])
    assert log_normalizer(10**6, kappa).isfinite().all()
    assert (
        log_marginal(torch.full((4,), 0.5), kappa, kappa, 20.0, 10**6).isfinite().all()
    )
    assert np.isfinite(pair_cosines(some(3).rsample())).all()
