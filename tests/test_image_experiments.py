"""The experiments on images, in seconds, on generated shapes."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pcl.experiments import Job, experiments, run_job
from pcl.names import UnknownName
from pcl.networks import small_resnet
from pcl.scores import published_numbers
from pcl.studies import cifar10h
from pcl.studies.cifar10h import (
    IMAGE_SMOKE,
    TABLE9,
    ImageSettings,
    image_encoder,
    image_task,
    load_items,
    train_on_images,
    with_table9,
)

EXPERIMENTS = experiments()

NAMES = (
    "image_choices",
    "table4",
    "table5",
    "table9",
    "table10",
    "table11",
    "image_baselines",
    "figure5",
    "figure6",
    "figure8",
)
SMOKE = ImageSettings(**IMAGE_SMOKE)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_runs_in_smoke_form(name):
    for row in EXPERIMENTS[name].rows:
        record = run_job(Job(name, row, "smoke", 1))
        assert all(math.isfinite(value) for value in record.metrics.values()), (
            row,
            record.metrics,
        )


def test_rows_and_metrics_of_the_published_tables_are_there():
    drawn = ("figure5", "figure6", "figure8")
    known = {
        name: run_job(Job(name, row, "smoke", 1))
        for name in drawn
        for row in EXPERIMENTS[name].rows
    }
    for entry in published_numbers():
        if entry.experiment in NAMES:
            assert entry.row in EXPERIMENTS[entry.experiment].rows, entry
        if entry.experiment in known:
            assert entry.metric in known[entry.experiment].metrics, entry


def test_a_run_repeats_and_its_curve_belongs_to_the_validation_images():
    first, second = (
        run_job(Job("table4", "exact-infonce", "smoke", 2)) for _ in range(2)
    )
    assert first.metrics == second.metrics and first.curve == second.curve
    assert run_job(Job("table4", "exact-infonce", "smoke", 3)).metrics != first.metrics


def test_an_image_row_keeps_its_own_values_above_the_presets():
    for name in NAMES:
        for row, chosen in EXPERIMENTS[name].rows.items():
            for preset, own in chosen.at.items():
                config = Job(name, row, preset, 1).config()
                assert {**chosen.changes, **own}.items() <= config.items()


def test_only_the_books_own_experiments_belong_to_no_paper():
    works = {name: EXPERIMENTS[name].work for name in NAMES}
    assert {n for n, work in works.items() if work == "own"} == {
        "image_choices",
        "image_baselines",
    }


def test_the_best_weights_survive_a_killed_run(tmp_path, monkeypatch):
    settings = replace(SMOKE, steps=9, select_every=1, select_from=0.0)
    path = tmp_path / "run.pt"
    whole = train_on_images(settings, 1)[0].state_dict()
    calls = []
    real = cifar10h.encode

    def dies(*args, **kwargs):
        calls.append(None)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(cifar10h, "encode", dies)
    original = cifar10h.train_encoder
    monkeypatch.setattr(
        cifar10h,
        "train_encoder",
        lambda *args, **kwargs: original(*args, **kwargs, checkpoint_every=2),
    )
    with pytest.raises(KeyboardInterrupt):
        train_on_images(settings, 1, path)
    assert torch.load(path, weights_only=True)["run"]["step"] == 6
    resumed = train_on_images(settings, 1, path)[0].state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_experiments_that_only_measure_other_things_share_a_finished_encoder(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cifar10h, "revision", lambda: "committed")
    asked = [
        Job(name, row, "cpu", 1).settings()
        for name, row in (
            ("table4", "mcinfonce"),
            ("figure5", "mcinfonce"),
            ("figure6", "clear-query"),
            ("figure8", "mcinfonce"),
        )
    ]
    files = [cifar10h.finished_file(with_table9(settings), 1) for settings in asked]
    assert len(set(files)) == 1 and None not in files
    other = replace(asked[0], dropout=0.1)
    assert cifar10h.finished_file(with_table9(other), 1) not in files
    assert cifar10h.finished_file(with_table9(asked[0]), 2) not in files
    monkeypatch.setattr(cifar10h, "revision", lambda: "changed-dirty")
    assert cifar10h.finished_file(asked[0], 1) is None


def all_items(frozen=True):
    """Every image of the folds."""
    return load_items("generated", "test", SMOKE.n_images, ("full",), frozen)


@pytest.mark.parametrize("pretrained", [True, False])
def test_batches_hold_whole_images_and_crops_in_the_share_asked_for(pretrained):
    task = image_task(replace(SMOKE, crop_share=0.5, pretrained=pretrained), 1)
    full = all_items(pretrained).views["full"]
    whole = full.flatten(1)
    x, x_pos, x_neg = task.draw(200, 2, torch.Generator().manual_seed(0))
    assert x.shape == x_pos.shape == (
        200,
        *full.shape[1:],
    ) and x_neg.shape[:2] == (200, 2)
    found = (x.flatten(1)[:, None] == whole).all(-1).any(-1).double().mean()
    assert 0.35 < found < 0.65


def test_no_test_image_is_ever_drawn():
    for labels in ("cifar10h-soft", "cifar10h-hard", "cifar10h-soft+cifar10-hard"):
        for seed in range(1, 6):
            task = image_task(replace(SMOKE, labels=labels, crop_share=0.0), seed)
            held_out = torch.cat(
                [items.views["full"] for items in (task.judged, task.validation)]
            )
            assert len(held_out) == 100
            x, x_pos, x_neg = task.draw(60, 1, torch.Generator().manual_seed(seed))
            drawn = torch.cat([x, x_pos, x_neg[:, 0]])
            assert not (drawn[:, None] == held_out).all(-1).any()


def test_votes_and_labels_together_draw_from_both_and_pair_like_with_like():
    both_kinds = replace(SMOKE, labels="cifar10h-soft+cifar10-hard", crop_share=0.0)
    task = image_task(both_kinds, 1)
    train = load_items("generated", "train", SMOKE.n_train, ("full",), True)
    voted, labelled = task.train.views["full"], train.views["full"]
    x, x_pos, _ = task.draw(400, 0, torch.Generator().manual_seed(0))
    among = [(x[:, None] == rows).all(-1) for rows in (voted, labelled)]
    shares = [hits.any(-1).double().mean().item() for hits in among]
    fair = len(voted) / (len(voted) + SMOKE.n_train)
    assert sum(shares) == 1 and shares[0] == pytest.approx(fair, abs=0.1)
    both = among[1].any(-1) & (x_pos[:, None] == labelled).all(-1).any(-1)
    own, other = (
        train.labels[(part[both][:, None] == labelled).all(-1).long().argmax(-1)]
        for part in (x, x_pos)
    )
    assert both.sum() > 20 and torch.equal(
        own, other
    )  # one label each, so a positive shares it


def test_the_parts_of_a_fold_are_disjoint_and_know_their_votes():
    votes = all_items().known("votes")
    for seed in range(1, 6):
        task = image_task(SMOKE, seed)
        parts = zip(task.fold, (task.train, task.validation, task.judged), strict=True)
        together = torch.cat(list(task.fold))
        assert together.unique().numel() == together.numel() == SMOKE.n_images
        for where, items in parts:
            assert items.known("votes").equal(votes[where])
            assert items.sizes.keys() == {"random", "centre"}


def test_encoders_start_at_the_kappa_asked_for():
    for change in ({}, {"pretrained": False}, {"hidden": None}):
        settings = replace(SMOKE, **change)
        task = image_task(settings, 1)
        encoder = image_encoder(settings, task, 1).eval()
        kappa = encoder(task.train.views["full"][:256]).concentration.median().item()
        assert kappa == pytest.approx(settings.start_kappa, rel=1e-3)


def test_what_preset_paper_leaves_open_is_the_published_choice():
    settings = Job("table4", "elk", "paper", 1).settings()
    assert settings.n_neg is None
    assert with_table9(settings).n_neg == 1 and with_table9(settings).kappa_pos == 32
    assert with_table9(replace(settings, n_neg=5)).n_neg == 5
    assert [
        with_table9(Job("table5", row, "paper", 1).settings()).dim
        for row in EXPERIMENTS["table5"].rows
    ] == 2 * [8, 16, 8]  # ours, and the same as published
    places, published = (
        ("best_m", "best_kappa_pos", "best_dim"),
        [e for e in published_numbers() if e.experiment == "table9"],
    )
    for entry in published:  # the scripts have what neither text shows legibly
        if entry.metric in places and entry.value is not None:
            loss = entry.row.split("-")[0]
            assert (
                entry.value
                == TABLE9[loss, entry.row.removeprefix(f"{loss}-")][
                    places.index(entry.metric)
                ]
            ), entry
    assert sum(entry.metric in places for entry in published) == 3 * len(TABLE9)


def papers_kinds():
    """One row of each kind: rows that differ in a number only are one."""
    kinds = {}
    for name in NAMES:
        for row in EXPERIMENTS[name].rows:
            config = Job(name, row, "paper", 1).config()
            words = (
                config.get(key) for key in ("loss", "labels", "pretrained", "baseline")
            )
            kinds.setdefault((EXPERIMENTS[name].measure, *words), (name, row))
    return kinds.values()


@pytest.mark.parametrize(("name", "row"), papers_kinds())
def test_every_kind_of_row_runs_with_the_papers_settings(
    name, row, monkeypatch, tmp_path
):
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path)
    )  # what is pretrained here is not for others
    monkeypatch.setattr(
        cifar10h, "resnet18_small", lambda: small_resnet(widths=(8, 16))
    )  # the real one is slow
    less = {"source": "generated", "n_images": 250, "n_train": 150, "steps": 2, "batch_size": 4, "n_samples": 4,
            "select_every": 1, "pretrain_epochs": 1}  # fmt: skip
    settings = replace(Job(name, row, "paper", 1).settings(), **less)
    outcome = EXPERIMENTS[name].measure(settings, 1, None, "cpu")
    assert all(math.isfinite(value) for value in outcome.metrics.values()), (
        outcome.metrics
    )
    if name == "table9":  # one setting after the other, away from published answers
        dims, kappas = outcome.curve["dim"], outcome.curve["kappa_pos"]
        loss = row.split("-")[0]
        answer = TABLE9[loss, row.removeprefix(f"{loss}-")][2]
        assert dims[0] != answer and answer in dims and len(set(kappas[:3])) == 1


def test_unknown_labels_are_named():
    with pytest.raises(UnknownName, match="did you mean 'cifar10h-soft'"):
        image_task(replace(SMOKE, labels="cifar10h-sof"), 1)


EXECUTE = """
import os, sys
from pathlib import Path

def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo") or (event == "subprocess.Popen" and "npm" in str(args[:2])):
        os.write(2, f"a chapter must not fetch anything: {event} {args}".encode())
        os._exit(3)

from nbdev.test import test_nb
sys.addaudithook(watch)
sys.exit(not test_nb(Path(sys.argv[1]))[0])
"""


@pytest.mark.parametrize(
    "chapter", ["410_datasets", "412_cifar10", "414_pairs", "450_credible_images"]
)
def test_chapters_run_where_no_data_is_and_fetch_none(root, tmp_path, chapter):
    env = {
        **os.environ,
        "PCL_DATA": "",
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(root),
        "MPLBACKEND": "agg",
    }
    words = [sys.executable, "-c", EXECUTE, str(root / "nbs" / f"{chapter}.ipynb")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
