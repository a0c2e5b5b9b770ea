"""Studies of pretrained uncertainties: their controls are what they say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pcl.experiments import experiments
from pcl.loss_heads import LossHead
from pcl.pairs import seen_anew
from pcl.retrieval import keep_certain, safe_retrieval
from pcl.studies import pretrained, pretrained_uses
from pcl.studies.conflict import ConflictSettings, measure_conflict
from pcl.studies.pretrained import Frozen


@pytest.fixture
def data() -> Frozen:
    """Six classes of forty items around directions of their own."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 6
    near = torch.randn(6, 8, generator=rng)[labels]
    return Frozen(near + 1.5 * torch.randn(240, 8, generator=rng), labels)


@pytest.mark.parametrize("per_class", [False, True])
def test_errors_of_what_is_left_are_those_of_safe_retrieval(
    data: Frozen, per_class: bool
) -> None:
    sure = torch.rand(240, generator=torch.Generator().manual_seed(1))
    ranked = pretrained_uses.rank_neighbours(data, 0.2)
    found = pretrained_uses.safe_errors(ranked, data.labels, {"one": sure}, 0.2)
    want = safe_retrieval(data.x, sure, data.labels, 0.2, 0.2, per_class=per_class)
    end = "_per_class" if per_class else ""
    for part in ("reject", "clean", "both"):
        assert found[f"one_{part}{end}"] == pytest.approx(1 - getattr(want, part))
    assert found["full"] == pytest.approx(1 - want.full)


def test_a_whole_class_may_be_cleaned_away(data: Frozen) -> None:
    sure = (data.labels > 0).float()  # the forty least certain are one class
    ranked = pretrained_uses.rank_neighbours(data, 1 / 6)
    found = pretrained_uses.safe_errors(ranked, data.labels, {"one": sure}, 1 / 6)
    want = safe_retrieval(data.x, sure, data.labels, 1 / 6, 1 / 6)
    assert found["one_clean"] == pytest.approx(1 - want.clean)
    near = torch.zeros(3, 1, dtype=torch.long)
    few = pretrained_uses.Ranked(near, near == 1)
    with pytest.raises(ValueError, match="one neighbour that stays"):
        pretrained_uses.left_out(few, torch.tensor([False, True, True]))


def test_chance_has_the_expectation_that_is_stated(data: Frozen) -> None:
    ranked = pretrained_uses.rank_neighbours(data, 0.1)
    found = pretrained_uses.random_errors(ranked, 0.1, 400, seed=0)
    full = float(ranked.wrong[:, 0].double().mean())
    for part, want in (("reject", full), ("clean", found["random_clean_expected"])):
        error = found[f"random_{part}_spread"] / math.sqrt(400)
        assert abs(found[f"random_{part}"] - want) < 3.5 * error
    assert found["random_clean_expected"] > full  # a sparser database is a worse one
    drawn = keep_certain(torch.rand(240), 0.1)
    assert int((~drawn).sum()) == 24


def test_some_classes_and_some_images_of_each(data: Frozen) -> None:
    few = pretrained_uses.some_of(data, 3, 5, seed=0)
    assert sorted(torch.bincount(few.labels)[few.labels.unique()].tolist()) == [5] * 3
    found = torch.cdist(few.x, data.x).argmin(1)
    assert torch.equal(data.labels[found], few.labels), "images keep their classes"
    other = pretrained_uses.some_of(data, 3, 5, seed=1)
    assert not torch.equal(few.x, other.x)
    whole = pretrained_uses.some_of(data, 0, 0, seed=0)
    assert torch.equal(whole.x, data.x) and torch.equal(whole.labels, data.labels)
    with pytest.raises(ValueError, match="a class has only 40 images"):
        pretrained_uses.some_of(data, 0, 41, seed=0)


def test_the_control_knows_what_it_must_find() -> None:
    rows = experiments()["left_out_at_random"].rows
    assert {"omniglot-4", "omniglot-20", "cub-whole"} <= rows.keys()
    settings = pretrained_uses.ControlSettings(backbone="generated", draws=400)
    found = pretrained_uses.measure_control(settings, 1, None, "cpu").metrics
    for part, want in (
        ("reject", found["full"]),
        ("clean", found["random_clean_expected"]),
    ):
        error = found[f"random_{part}_spread"] / math.sqrt(400)
        assert abs(found[f"random_{part}"] - want) < 3.5 * error
    full = found["full"]
    want = math.sqrt(full * (1 - full) / found["images"])
    assert found["full_error"] == pytest.approx(want)
    assert found["second"] != full


def test_people_have_a_set_of_their_own_that_shares_no_image() -> None:
    names = ("train", "val", *pretrained.SETS, *pretrained.PEOPLE)
    rows = [pretrained.load_frozen(n, "generated", 1000).x for n in names]
    every = torch.cat(rows)
    assert len(every.unique(dim=0)) == len(every)
    made = experiments()["pretrained"].rows
    assert {"cue", "cue-l2", "cue-neighbour", "lite2", "lite2-energy"} <= made.keys()


def test_images_without_labels_and_validation_classes_share_nothing_with_the_judged() -> (
    None
):
    learnt = (*pretrained.UPSTREAM, *pretrained.SOURCES)
    judged = (*pretrained.SETS, *pretrained.VALIDATION)
    rows = [pretrained.load_frozen(n, "generated", 1000).x for n in (*learnt, *judged)]
    every = torch.cat(rows)
    assert len(every.unique(dim=0)) == len(every)
    sources = {name: pretrained.IMAGES[name] for name in judged}
    assert len(set(sources.values())) == len(sources)
    assert not set(sources.values()) & {pretrained.IMAGES[name] for name in learnt}


def test_a_head_from_other_images_learns_their_entropies_in_equal_parts() -> None:
    settings = pretrained.TransferSettings(
        backbone="generated", learn="letters shapes", losses="entropy", n_train=40
    )
    x, losses = pretrained.upstream(settings, 1)
    parts = [
        pretrained.load_frozen(n, "generated", 20).x for n in ("letters", "shapes")
    ]
    assert torch.equal(x, torch.cat(parts)) and len(x) == 40
    p = pretrained.class_scores("generated")[0](x).softmax(-1)
    torch.testing.assert_close(losses, -(p * p.log()).sum(-1))


def test_means_are_of_the_sets_that_were_judged() -> None:
    def judged(sets: str) -> dict[str, float]:
        settings = pretrained.TransferSettings(
            backbone="generated", sets=sets, kind="random", n_test=60
        )
        return pretrained.measure_transfer(settings, 1, None, "cpu").metrics

    found = judged("cub cub_val cars_val")
    assert found["r_auroc_mean"] == found["r_auroc_fine"] == found["r_auroc_cub"]
    want = (found["r_auroc_cub_val"] + found["r_auroc_cars_val"]) / 2
    assert found["r_auroc_val"] == pytest.approx(want)
    assert "r_auroc_fine" not in judged("cue") and "r_auroc_val" not in judged("cue")
    assert "r_auroc_mean" not in judged("cub_val")


def test_half_precision_is_measured_where_the_head_is_judged() -> None:
    settings = pretrained.TransferSettings(
        backbone="generated", sets="cub", n_test=60, hidden=8
    )
    x = pretrained.load_frozen("cub", "generated", 60).x
    head = LossHead(x.shape[-1], 8)
    found = pretrained.lost_in_half(head, settings)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(p.half())
    assert 0 < found["half_change"] < 0.01 and found["half_rank"] > 0.99
    assert 0 <= found["half_r_auroc"] < 0.05
    nothing = pretrained.lost_in_half(head, settings)
    assert nothing == {"half_change": 0, "half_rank": 1, "half_r_auroc": 0}


def test_the_papers_view_is_a_part_of_the_image_flipped_or_not() -> None:
    ramp = torch.arange(40.0).repeat(3, 40, 1) * 6
    image = (ramp + torch.tensor([0, 5, 10]).view(3, 1, 1)).to(torch.uint8)
    rising, plain = 0, 0
    for seed in range(60):
        rng = torch.Generator().manual_seed(seed)
        seen = seen_anew(image, rng)
        assert seen.shape == image.shape and seen.dtype == torch.uint8
        slope = float((seen[0, :, -1].float() - seen[0, :, 0].float()).mean())
        rising += slope > 0
        assert abs(slope) < 1.5 * 6 * 39
        gap = seen[2].float() - seen[0].float()
        plain += bool((gap - 10).abs().max() <= 1)  # no change of colours
    assert 15 < rising < 45 and 20 < plain < 55
    again = seen_anew(image, torch.Generator().manual_seed(59))
    assert torch.equal(again, seen)


@pytest.mark.parametrize("net", ["whole", "adapter"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_joint_training_differs_from_its_control_by_the_head_alone(
    net: str, before: int
) -> None:
    sizes: dict[str, Any] = {
        "source": "generated",
        "n_train": 64,
        "n_test": 100,
        "batch_size": 16,
    }
    base = ConflictSettings(net=net, before=before, epochs=2, clip=1e9, **sizes)

    def end(**changes: Any) -> tuple[float, ...]:
        found = measure_conflict(replace(base, **changes), 1, None, "cpu")
        last = found.curve["accuracy"]
        return (*last, found.metrics["auroc"])

    stopped = end(stop=True, weight=1.0)
    assert end(stop=False, weight=0.0)[:-1] == stopped[:-1]  # same start, same batches
    assert end(stop=True, weight=10.0)[:-1] == stopped[:-1]
    assert end(stop=False, weight=10.0) != end(stop=True, weight=10.0)
