"""Items, tasks, their judge, and the weights that are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from torch import nn

from pcl.encoders import SphereEncoder, mlp_encoder
from pcl.estimators import Prediction, estimator
from pcl.names import UnknownName
from pcl.protocols import SHARES, Items, Selecting, Task, judge, rejection


def make_items(seed: int = 0, n: int = 120) -> Items:
    """Items that know everything."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=generator)
    signal = 1.5 * nn.functional.one_hot(labels, 4).float()
    votes = (signal + torch.rand(n, 4, generator=generator)).double()

    def look():
        return signal + torch.randn(n, 4, generator=generator)

    views = {"full": look(), "random": look(), "centre": look()}
    sizes = {name: torch.rand(n, generator=generator) for name in ("random", "centre")}
    return Items(views, labels, votes / votes.sum(-1, keepdim=True), sizes)


RETRIEVAL = {
    "recall_at_1",
    "r_auroc",
    "aurc",
    "recall_at_1_40",
    "recall_at_1_80",
    "recall_trend",
}
ALL = {"entropy_corr", "crop_corr", "crop_corr_centre"} | RETRIEVAL


def norm(x):
    """An estimator that needs nothing."""
    return Prediction(x, x.norm(dim=-1))


def test_every_metric_is_what_a_plain_loop_finds():
    items = make_items()
    metrics, x = judge(norm, items), items.views["full"].double()
    sure = np.array([math.hypot(*row) for row in x.tolist()])
    entropy = [-sum(p * math.log(p) for p in row) for row in items.votes.tolist()]
    assert metrics["entropy_corr"] == pytest.approx(-spearmanr(sure, entropy)[0])
    for key, name in (("crop_corr", "random"), ("crop_corr_centre", "centre")):
        length = [math.hypot(*row) for row in items.views[name].tolist()]
        expected = spearmanr(length, items.sizes[name])[0]
        assert metrics[key] == pytest.approx(expected)
    right = []
    for i in range(len(x)):
        cosines = nn.functional.cosine_similarity(x[i : i + 1], x)
        cosines[i] = -2
        right.append(bool(items.labels[cosines.argmax()] == items.labels[i]))
    right = np.array(right)
    assert metrics["recall_at_1"] == pytest.approx(right.mean())
    ranks, n_right = rankdata(sure), right.sum()
    pairs = n_right * (~right).sum()
    auroc = (ranks[right].sum() - n_right * (n_right + 1) / 2) / pairs
    assert metrics["r_auroc"] == pytest.approx(auroc)
    surest = right[np.argsort(-sure)]
    errors = [1 - surest[: m + 1].mean() for m in range(len(surest))]
    assert metrics["aurc"] == pytest.approx(np.mean(errors))
    kept = [surest[: len(surest) - round(share * len(surest))] for share in SHARES]
    recalls = [part.mean() for part in kept]
    curve = rejection(norm, items)
    assert curve["rejected"] == SHARES.tolist() and SHARES[-1] == pytest.approx(0.8)
    assert curve["recall_at_1"] == pytest.approx(recalls)
    assert metrics["recall_at_1_40"] == curve["recall_at_1"][8]
    assert metrics["recall_at_1_80"] == curve["recall_at_1"][16]
    assert metrics["recall_trend"] == pytest.approx(spearmanr(SHARES, recalls)[0])
    assert metrics.keys() == ALL


@pytest.mark.parametrize(
    ("less", "gone"),
    [
        ({"votes": None}, {"entropy_corr"}),
        ({"sizes": {}}, {"crop_corr", "crop_corr_centre"}),
        ({"labels": None}, RETRIEVAL),
        ({"labels": None, "votes": None}, RETRIEVAL | {"entropy_corr"}),
        ({"votes": None, "sizes": {}}, ALL - RETRIEVAL),
    ],
)
def test_a_metric_appears_where_its_ingredient_does(less, gone):
    items = make_items()
    found, everything = judge(norm, replace(items, **less)), judge(norm, items)
    assert found == {key: v for key, v in everything.items() if key not in gone}


def test_items_that_know_nothing_are_not_judged():
    with pytest.raises(ValueError, match="neither labels nor votes nor sizes"):
        judge(norm, Items({"full": torch.ones(3, 2)}))
    with pytest.raises(ValueError, match=r"no labels: make them with Items"):
        rejection(norm, replace(make_items(), labels=None))


def test_an_oracle_of_entropy_scores_one_and_its_opposite_minus_one():
    items = replace(make_items(), sizes={})
    entropy = torch.special.entr(items.votes).sum(-1)
    for sign in (1, -1):
        found = judge(lambda x, sign=sign: Prediction(x, -sign * entropy), items)
        assert found["entropy_corr"] == pytest.approx(sign)


def test_only_the_order_of_certainties_counts():
    items = make_items()
    plain = judge(norm, items)
    bent = judge(lambda x: Prediction(x, x.double().norm(dim=-1) ** 3 - 7), items)
    assert bent == pytest.approx(plain)
    turned = judge(lambda x: Prediction(x, -x.norm(dim=-1)), items)
    assert turned["crop_corr"] == pytest.approx(-plain["crop_corr"])
    assert turned["r_auroc"] == pytest.approx(1 - plain["r_auroc"])


def test_named_test_sets_are_judged_each_by_what_it_has():
    rich, poor = make_items(1), replace(make_items(2), votes=None, sizes={})
    task = Task(make_items(3), make_items(4), {"rich": rich, "poor": poor})
    train = task.train.views["full"], task.train.labels
    for name in ("feature-norm", "neighbour", "probe-entropy"):
        built = estimator(name)(*train)
        found = {which: judge(built, items) for which, items in task.test.items()}
        assert found["rich"].keys() == ALL and found["poor"].keys() == RETRIEVAL
        assert found["rich"] == judge(built, rich)


def test_a_single_class_is_refused_and_judged_without_labels():
    items = make_items()
    alike = replace(items, labels=torch.zeros_like(items.labels))
    for ask in (judge, rejection):
        with pytest.raises(ValueError, match="single class"):
            ask(norm, alike)
    assert judge(norm, replace(alike, labels=None)).keys() == ALL - RETRIEVAL


@pytest.mark.parametrize("all_right", [True, False])
def test_where_no_answer_differs_the_auroc_is_no_number_and_the_rest_goes_on(all_right):
    items = replace(make_items(n=40), sizes={})
    labels = items.labels if all_right else torch.arange(40)
    ideal = nn.functional.one_hot(items.labels, 4).double()
    alone = replace(items, labels=labels)
    found = judge(lambda x: Prediction(ideal, x.norm(dim=-1)), alone)
    assert math.isnan(found["r_auroc"]) and found["recall_at_1"] == float(all_right)
    assert math.isfinite(found["aurc"]) and math.isfinite(found["entropy_corr"])


def test_predictions_that_break_their_promise_are_refused_in_the_judge():
    with pytest.raises(ValueError, match=r"certainty .* shape \(120,\)"):
        judge(lambda x: Prediction(x, x.norm()), make_items())


def test_some_items_know_what_all_of_them_knew():
    items, chosen = make_items(), torch.tensor([5, 3, 3])
    few = items[chosen]
    assert len(few) == 3 and few.labels.equal(items.labels[chosen])
    assert few.votes.equal(items.votes[chosen])
    assert all(few.views[k].equal(v[chosen]) for k, v in items.views.items())
    assert all(few.sizes[k].equal(v[chosen]) for k, v in items.sizes.items())
    bare = Items({"full": torch.ones(4, 2)})[chosen[1:]]
    assert bare.labels is None and bare.votes is None and not bare.sizes


def test_items_whose_parts_do_not_fit_are_refused():
    items = make_items()
    short = items.views["full"][1:]
    for change, message in (
        (
            {"labels": items.labels[1:]},
            "labels must have one entry for each of the 120",
        ),
        ({"votes": items.votes[1:]}, "votes must have one entry"),
        ({"views": {**items.views, "random": short}}, "view 'random' must have one"),
        ({"sizes": {"random": short[:, 0]}}, "sizes of 'random' must have one entry"),
        ({"views": {"random": short}, "sizes": {}}, 'one called "full", got random'),
        ({"labels": items.votes}, "shares of annotators are votes"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(items, **change)
    with pytest.raises(UnknownName, match="did you mean 'centre'"):
        replace(items, sizes={"center": torch.ones(120)})
    for name in ("votes", "labels"):
        with pytest.raises(ValueError, match=f"these items have no {name}"):
            replace(items, **{name: None}).known(name)


def test_a_task_names_its_test_sets_and_their_shapes_agree():
    items, narrow = make_items(), Items({"full": torch.ones(3, 2)})
    with pytest.raises(ValueError, match="test must name at least one set"):
        Task(items, items, {})
    with pytest.raises(ValueError, match=r"items of cars must have the shape \(4,\)"):
        Task(items, items, {"birds": items, "cars": narrow})
    with pytest.raises(ValueError, match="items of validation must have the shape"):
        Task(items, narrow, {"birds": items})


def test_scores_that_are_no_numbers_or_come_too_early_are_not_kept():
    selecting = Selecting(nn.Linear(1, 1), wait=2)
    for step, score in enumerate((0.9, 0.8, math.nan, 0.1, 0.3, 0.2)):
        nn.init.constant_(selecting.encoder.weight, float(step))
        selecting.keep(score)
    assert selecting.best.weight.item() == 4 and not any(
        p.requires_grad for p in selecting.best.parameters()
    )


def test_the_best_weights_are_part_of_the_state():
    first, second = (Selecting(nn.Linear(1, 1)) for _ in range(2))
    first.keep(0.5)
    nn.init.zeros_(first.encoder.weight)
    second.load_state_dict(first.state_dict())
    assert second.score == 0.5 and second.best.weight.equal(first.best.weight)
    second.keep(0.4)
    assert second.best.weight.equal(first.best.weight) and second.seen == 2


def test_the_groups_of_parameters_pass_through_the_wrapper():
    class Speaking(SphereEncoder):
        def groups(self):
            kappa = list(self.kappa_net.parameters())
            return {"mu": list(self.mu_net.parameters()), "kappa": kappa}

    encoder = Speaking(nn.Linear(3, 2), nn.Linear(3, 1))
    for wrapped in (Selecting(encoder), Selecting(Selecting(encoder))):
        found = wrapped.groups()
        assert {k: len(v) for k, v in found.items()} == {"mu": 2, "kappa": 2}
        assert found["kappa"][0] is encoder.kappa_net.weight
    plain = Selecting(Selecting(nn.Linear(3, 2))).groups()
    assert {k: len(v) for k, v in plain.items()} == {"mu": 2, "kappa": 0}
    deep = Selecting(Selecting(mlp_encoder(3, 2, [4]))).groups()
    assert {k: len(v) for k, v in deep.items()} == {"mu": 4, "kappa": 4}
