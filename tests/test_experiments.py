"""Experiments: the paper's presets, checkpoints, locks, and several jobs at a time."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from pcl.experiments import (
    Job,
    checkpoint_file,
    experiments,
    jobs,
    open_executor,
    record_job,
    run,
    run_apart,
    run_job,
    sole_run,
)
from pcl.ledger import read
from pcl.names import UsageError
from pcl.studies.controlled import WorldSettings

EXPERIMENTS = experiments()
TRAINED = [name for name, e in EXPERIMENTS.items() if e.settings is WorldSettings]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("PCL_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


FEW = {
    "steps": 2,
    "batch_size": 16,
    "n_samples": 4,
    "n_eval": 64,
    "n_paired": 32,
    "smoothing_steps": 20,
}


@pytest.mark.parametrize("name", TRAINED)
def test_the_papers_preset_still_runs(name):
    kinds = {}  # rows that differ in numbers only, once
    for row, own in EXPERIMENTS[name].rows.items():
        config = Job(name, row, "paper", 1).config()
        assert config["width"] is None or "width" in own.at["paper"]
        few = {
            **config,
            **FEW,
            "dim": min(config["dim"], 20),
            "enc_dim": config["enc_dim"] and min(config["enc_dim"], 20),
        }
        kind = {**few, "loss_kappa_pos": few["loss_kappa_pos"] is None}
        kinds[
            tuple(
                (key, value)
                for key, value in kind.items()
                if key not in ("kappa_min", "kappa_max", "kappa_pos")
            )
        ] = row, few
    for row, few in kinds.values():
        settings = WorldSettings(**few)
        metrics = EXPERIMENTS[name].measure(settings, 1, None, "cpu").metrics
        assert all(
            math.isfinite(value)
            for metric, value in metrics.items()
            if not metric.endswith("rank")
        ), (row, metrics)


def test_the_papers_own_numbers_stand_in_its_preset():
    config = Job("table1", "ambiguous", "paper", 1).config()
    wanted = {
        "steps": 100_000,
        "batch_size": 512,
        "n_samples": 512,
        "n_neg": 32,
        "n_neg_frozen": 0,
    }
    assert {**wanted, "kappa_from": 0.5, "mu_until": 0.5}.items() <= config.items()
    assert [
        Job("figure3", f"k{k}", "paper", 1).config()["n_samples"] for k in (1, 64)
    ] == [1, 64]
    assert Job("figure2", "d2", "paper", 1).config()["steps"] == 8192


@pytest.mark.parametrize(
    ("name", "dims", "batch_size", "n_samples"),
    [
        ("figure4", (4, 8, 10, 16, 32), 512, 512),
        ("figure4", (64,), 512, 256),
        ("figure4", (128,), 256, 256),
        ("figure7", (10, 16), 512, 512),
        ("figure7", (32, 40, 48, 56, 64), 256, 256),
    ],
)
def test_the_papers_smaller_sizes_in_high_dimension_stand_in_its_preset(
    name, dims, batch_size, n_samples
):  # table 6
    for dim in dims:
        config = Job(name, f"d{dim}", "paper", 1).config()
        assert (
            config["enc_dim"] or config["dim"],
            config["batch_size"],
            config["n_samples"],
        ) == (dim, batch_size, n_samples)
        assert (config["steps"], config["pairs"]) == (
            100_000,
            "published" if name == "figure7" else "exact",
        )


def test_rows_as_published_have_the_authors_seeds_and_settings():
    seeds = {job.row: [] for job in jobs("table1", preset="paper")}
    for job in jobs("table1", preset="paper"):
        seeds[job.row].append(job.seed)
    assert seeds["ambiguous"] == [1, 2, 3, 4, 5]
    assert seeds["ambiguous-as-published"] == [4, 5, 6, 7, 8]
    assert [
        job.seed for job in jobs("table1", "ambiguous-as-published", seeds=[1])
    ] == [1]
    scripts = {  # M, M while directions learn, phases, batches
        ("table1", "ambiguous-as-published"): (32, 0, 0.5, 100_000),
        ("table3", "mcinfonce-as-published"): (32, 0, 0.5, 100_000),
        ("table3", "hib-as-published"): (0, 0, 0.0, 100_000),
        ("table3", "elk-as-published"): (1, 0, 0.0, 100_000),
        ("figure2", "d2-as-published"): (1, 1, 0.5, 8192),
        ("figure3", "k4-as-published"): (32, 0, 0.5, 100_000),
        ("figure4", "d8-as-published"): (32, 0, 0.5, 100_000),
    }
    for (name, row), wanted in scripts.items():
        c = Job(name, row, "paper", 4).config()
        found = c["n_neg"], c["n_neg_frozen"], c["kappa_from"], c["steps"]
        assert found == wanted, (name, row)
        assert (c["batch_size"], c["lr_mu"], c["lr_kappa"]) == (512, 1e-4, 1e-4)
        assert c["published"] and c["pairs"] == c["encoder"] == "authors"
    hib = Job("table3", "hib-as-published", "paper", 4).config()
    assert (hib["a"], hib["b"], hib["mu_until"]) == (1.0, 0.0, 1.0)


LONG = {"steps": 700, "n_points": 12, "batch_size": 8, "width": 8}
KILLED = f"""
import functools, os, signal
from pcl.experiments import Job, experiments, record_job
from pcl.studies import controlled

experiments()["table3"].presets["smoke"].update({LONG!r})
real, calls = controlled.compare, []

def compare(*args):
    calls.append(1)
    if len(calls) == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

controlled.train_in_world = functools.partial(controlled.train_in_world, look=compare)
record_job(Job("table3", "infonce", "smoke", 1))
"""


def test_a_killed_job_resumes_to_the_same_numbers(monkeypatch):
    monkeypatch.setitem(
        EXPERIMENTS["table3"].presets,
        "smoke",
        {**EXPERIMENTS["table3"].presets["smoke"], **LONG},
    )
    job = Job("table3", "infonce", "smoke", 1)
    # a process of its own, not a fork: torch's threads do not survive a fork
    assert (
        subprocess.run([sys.executable, "-c", KILLED], check=False).returncode
        == -signal.SIGKILL
    )
    assert torch.load(checkpoint_file(job), weights_only=True)["run"]["step"] == 500
    resumed = record_job(job)
    assert not checkpoint_file(job).exists()
    assert resumed.metrics == run_job(job).metrics
    assert [r.key for r in read().records if r.preset == "smoke"] == [job.key]


def test_two_processes_do_not_run_the_same_job():
    job = Job("table1", "ambiguous", "smoke", 1)
    with (
        sole_run(checkpoint_file(job)),
        pytest.raises(RuntimeError, match="another process"),
    ):
        record_job(job)
    assert record_job(job).metrics  # and the lock is free again


def test_the_command_says_in_one_line_that_a_job_is_taken(capsys):
    from pcl.cli import main

    with sole_run(checkpoint_file(Job("table1", "ambiguous", "smoke", 1))):
        assert (
            main(
                [
                    "run",
                    "table1",
                    "--row",
                    "ambiguous",
                    "--preset",
                    "smoke",
                    "--seeds",
                    "1",
                ]
            )
            == 1
        )
    assert capsys.readouterr().err.startswith(
        "pcl: table1--ambiguous--smoke--s1 is being run by another process"
    )


def test_several_jobs_at_a_time_give_the_records_of_one_after_the_other():
    todo = jobs("table1", "ambiguous", "smoke", (1, 2, 3))
    first = dict(run(todo[:1]))
    start = time.time()
    apart = dict(run_apart(todo, 2))
    assert (
        apart[todo[0]] is None and first[todo[0]] is not None
    )  # recorded before, so not run again
    threads = torch.get_num_threads()
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // 2)
    )  # as a job of two has: sums round as their split among threads
    try:
        for job in todo[1:]:
            assert apart[job].metrics == run_job(job).metrics
    finally:
        torch.set_num_threads(threads)
    assert {r.key for r in read().records if r.preset == "smoke"} == {
        job.key for job in todo
    }
    assert time.time() - start < 600, "it hangs"


def test_a_failing_job_is_named_and_stops_no_other():
    todo = jobs("table1", "ambiguous", "smoke", (1, 2))
    with (
        sole_run(checkpoint_file(todo[0])),
        pytest.raises(RuntimeError, match=r"(?s)ambiguous seed 1: .*another process"),
    ):
        list(run_apart(todo, 2))
    assert [r.seed for r in read().records if r.preset == "smoke"] == [2]


def test_executors_that_cannot_be_had_are_named(monkeypatch):
    with pytest.raises(UsageError, match="did you mean 'local'"):
        open_executor("locall", 1, 1.0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="--executor local"):
        open_executor("slurm", 1, 1.0)
