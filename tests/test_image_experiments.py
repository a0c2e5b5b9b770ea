"""The experiments on images, in seconds, on generated shapes."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from pcl import experiments
from pcl.encoders import small_resnet
from pcl.experiments import (
    EXPERIMENTS,
    IMAGE_SMOKE,
    IMAGES,
    TABLE9,
    Job,
    Selecting,
    UnknownName,
    image_encoder,
    image_task,
    judge_certainty,
    load_views,
    run_job,
    train_on_images,
    with_table9,
)
from pcl.ledger import paper_numbers

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
SMOKE = {**IMAGES, **IMAGE_SMOKE}


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
    for entry in paper_numbers():
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


def test_the_best_weights_survive_a_killed_run(tmp_path, monkeypatch):
    config, path = (
        {**SMOKE, "steps": 9, "select_every": 1, "select_from": 0.0},
        tmp_path / "run.pt",
    )
    whole = train_on_images(config, 1)[0].state_dict()
    calls = []
    real = experiments.encode

    def dies(*args, **kwargs):
        calls.append(None)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(experiments, "encode", dies)
    original = experiments.fit
    monkeypatch.setattr(
        experiments,
        "fit",
        lambda *args, **kwargs: original(*args, **kwargs, checkpoint_every=2),
    )
    with pytest.raises(KeyboardInterrupt):
        train_on_images(config, 1, path)
    assert torch.load(path, weights_only=True)["run"]["step"] == 6
    resumed = train_on_images(config, 1, path)[0].state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_scores_that_are_no_numbers_or_come_too_early_are_not_kept():
    selecting = Selecting(nn.Linear(1, 1), wait=2)
    for step, score in enumerate((0.9, 0.8, math.nan, 0.1, 0.3, 0.2)):
        nn.init.constant_(selecting.encoder.weight, float(step))
        selecting.keep(score)
    assert selecting.best.weight.item() == 4 and not any(
        p.requires_grad for p in selecting.best.parameters()
    )


@pytest.mark.parametrize("pretrained", [True, False])
def test_batches_hold_whole_images_and_crops_in_the_share_asked_for(pretrained):
    config = {**SMOKE, "crop_share": 0.5, "pretrained": pretrained}
    task = image_task(config, 1)
    whole = task.data.views["full"].data.flatten(1)
    x, x_pos, x_neg = task.draw(200, 2, torch.Generator().manual_seed(0))
    assert x.shape == x_pos.shape == (
        200,
        *task.data.views["full"].data.shape[1:],
    ) and x_neg.shape[:2] == (200, 2)
    found = (x.flatten(1)[:, None] == whole).all(-1).any(-1).double().mean()
    assert 0.35 < found < 0.65


def test_no_test_image_is_ever_drawn():
    for labels in ("cifar10h-soft", "cifar10h-hard", "cifar10h-soft+cifar10-hard"):
        for seed in range(1, 6):
            task = image_task({**SMOKE, "labels": labels, "crop_share": 0.0}, seed)
            held_out = task.data.views["full"].data[
                torch.cat([task.fold.test, task.fold.validation])
            ]
            x, x_pos, x_neg = task.draw(60, 1, torch.Generator().manual_seed(seed))
            drawn = torch.cat([x, x_pos, x_neg[:, 0]])
            assert not (drawn[:, None] == held_out).all(-1).any()


def test_votes_and_labels_together_draw_from_both_and_pair_like_with_like():
    config = {**SMOKE, "labels": "cifar10h-soft+cifar10-hard", "crop_share": 0.0}
    task = image_task(config, 1)
    train = load_views("generated", "train", config["n_train"], ("full",), True)
    voted, labelled = (
        task.data.views["full"].data[task.fold.train],
        train.views["full"].data,
    )
    x, x_pos, _ = task.draw(400, 0, torch.Generator().manual_seed(0))
    among = [(x[:, None] == rows).all(-1) for rows in (voted, labelled)]
    shares = [hits.any(-1).double().mean().item() for hits in among]
    fair = len(voted) / (len(voted) + config["n_train"])
    assert sum(shares) == 1 and shares[0] == pytest.approx(fair, abs=0.1)
    both = among[1].any(-1) & (x_pos[:, None] == labelled).all(-1).any(-1)
    own, other = (
        train.labels[(part[both][:, None] == labelled).all(-1).long().argmax(-1)]
        for part in (x, x_pos)
    )
    assert both.sum() > 20 and torch.equal(
        own, other
    )  # one label each, so a positive shares it


def test_an_oracle_of_entropy_scores_one_and_its_opposite_minus_one():
    task = image_task(SMOKE, 1)
    entropy = {
        tuple(x.tolist()): e
        for x, e in zip(
            task.data.views["full"].data, task.data.human.entropy.tolist(), strict=True
        )
    }

    def oracle(x, sign=-1.0):
        return torch.tensor([sign * entropy.get(tuple(row.tolist()), 0.0) for row in x])

    assert judge_certainty(task, oracle, lambda x: x)[0][
        "entropy_corr"
    ] == pytest.approx(1)
    assert judge_certainty(task, lambda x: oracle(x, 1.0), lambda x: x)[0][
        "entropy_corr"
    ] == pytest.approx(-1)


def test_encoders_start_at_the_kappa_asked_for():
    for change in ({}, {"pretrained": False}, {"hidden": None}):
        config = {**SMOKE, **change}
        task = image_task(config, 1)
        encoder = image_encoder(config, task, 1).eval()
        kappa = (
            encoder(task.data.views["full"].data[task.fold.train[:256]])
            .concentration.median()
            .item()
        )
        assert kappa == pytest.approx(config["start_kappa"], rel=1e-3)


def test_what_preset_paper_leaves_open_is_the_published_choice():
    config = Job("table4", "elk", "paper", 1).config()
    assert (
        config["n_neg"] is None
        and with_table9(config)["n_neg"] == 1
        and with_table9(config)["kappa_pos"] == 32
    )
    assert with_table9({**config, "n_neg": 5})["n_neg"] == 5
    assert [
        with_table9(Job("table5", row, "paper", 1).config())["dim"]
        for row in EXPERIMENTS["table5"].rows
    ] == [8, 16, 8]
    places, published = (
        ("best_m", "best_kappa_pos", "best_dim"),
        [e for e in paper_numbers() if e.experiment == "table9"],
    )
    for entry in published:  # no number where neither version is legible
        if entry.metric in places:
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
        experiments, "resnet18_small", lambda: small_resnet(widths=(8, 16))
    )  # the real one is slow
    less = {"source": "generated", "n_images": 250, "n_train": 150, "steps": 2, "batch_size": 4, "n_samples": 4,
            "select_every": 1, "pretrain_epochs": 1}  # fmt: skip
    outcome = EXPERIMENTS[name].measure(
        {**Job(name, row, "paper", 1).config(), **less}, 1
    )
    assert all(math.isfinite(value) for value in outcome.metrics.values()), (
        outcome.metrics
    )
    if name == "table9":  # one setting after the other, from the first of each
        dims, kappas = outcome.curve["dim"], outcome.curve["kappa_pos"]
        assert dims[:4] == [8, 8, 8, 16] and kappas[:4] == [16] * 4


def test_unknown_labels_are_named():
    with pytest.raises(UnknownName, match="did you mean 'cifar10h-soft'"):
        image_task({**SMOKE, "labels": "cifar10h-sof"}, 1)


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


@pytest.mark.parametrize("chapter", ["410_images", "450_credible_images"])
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
