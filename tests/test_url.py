"""The URL benchmark's study: what learns, what chooses and what is judged stay apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pcl import uncertainties
from pcl.auroc import auroc
from pcl.catalogue.characters import Drawings
from pcl.datasets import DataError, ImageSet
from pcl.estimators import Prediction, estimator
from pcl.experiments import experiments
from pcl.metrics import hits_at_k
from pcl.pairs import View
from pcl.published.estimators import RELEASED
from pcl.studies import url
from pcl.studies import url_end_to_end as end_to_end
from pcl.uncertainties import ELEVEN

TOY = url.UrlSettings("ce", "generated", trials=2, steps=4, dim=4, hidden=8, most=0)
CLASSES = {"cub200:train": 100, "cars196:train": 98, "tiny-imagenet:train": 200}


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pools of the real names, two images a class; what was loaded is listed."""
    asked: list[str] = []

    def load(source: str, *_: object, **__: object) -> url.Pool:
        asked.append(source)
        labels = torch.arange(2 * CLASSES.get(source, 12)) // 2
        rng = torch.Generator().manual_seed(len(source))
        near = torch.randn(int(labels[-1]) + 1, 8, generator=rng)[labels]
        return url.Pool(near + torch.randn(len(labels), 8, generator=rng), labels)

    monkeypatch.setattr(url, "load_pool", load)
    url._validation_hits.cache_clear()
    yield asked
    for kept in (url._validation_hits, url.search, url.fixed_hits, url._cosine):
        kept.cache_clear()


def test_upstream_and_validation_have_the_classes_that_are_stated(named):
    tiny, fine = (replace(TOY, upstream=u) for u in ("tiny", "fine"))
    assert len(url.upstream(tiny).labels.unique()) == 200
    assert {k: len(p.labels.unique()) for k, p in url.validation(tiny).items()} == {
        "cub": 100,
        "cars": 98,
    }
    assert len(url.upstream(fine).labels.unique()) == 50 + 49
    held = {k: p.labels.unique() for k, p in url.validation(fine).items()}
    assert held["cub"].tolist() == list(range(50, 100))
    assert held["cars"].tolist() == list(range(49, 98))


@pytest.mark.parametrize("upstream", ["tiny", "fine"])
def test_a_search_never_loads_a_downstream_set(named, upstream):
    url.search.cache_clear()
    url.search(replace(TOY, upstream=upstream))
    assert named and not set(named) & set(url.HUMAN.values())


def test_a_search_keeps_the_best_of_each_goal_and_drops_poor_retrieval(monkeypatch):
    scores = iter(
        [
            {"recall": 0.05, "own": 0.9, "fixed": 0.9},
            {"recall": 0.5, "own": 0.6, "fixed": 0.5},
            {"recall": 0.5, "own": 0.5, "fixed": 0.7},
        ]
    )
    monkeypatch.setattr(url, "on_validation", lambda *_: next(scores))
    url.search.cache_clear()
    found = url.search(replace(TOY, trials=3))
    assert found.chosen == {"own": 1, "fixed": 2}
    url.search.cache_clear()


def test_trials_stay_in_their_ranges_and_repeat():
    for name, space in url.SPACES.items():
        for k in range(30):
            trial = url.draw_trial(name, k, 64)
            assert trial == url.draw_trial(name, k, 64)
            assert trial["steps"] in (8, 16, 32, 64) and 3e-4 <= trial["lr"] <= 1e-2
            for key, (kind, *ends) in space.items():
                value = trial[key]
                assert (
                    value in ends if kind == "one of" else ends[0] <= value <= ends[1]
                )


def test_a_run_measures_every_set_and_repeats():
    first, second = (url.measure_url(TOY, 2) for _ in range(2))
    assert first.metrics == second.metrics
    for name in ("one", "two"):
        keys = ("recall", "own", "own_error", "fixed", "gap", "human", "constant")
        assert {f"{k}_{name}" for k in keys} <= first.metrics.keys()
    pool = url.load_pool("generated:2", "")
    made = url.build(
        TOY, url.search(TOY).trials[url.search(TOY).chosen["own"]], 2, True
    )
    p = made(pool.features)
    hits = hits_at_k(p.embedding, pool.labels)
    wanted = auroc(p.certainty, hits, pool.labels)
    assert first.metrics["own_one"] == pytest.approx(wanted.value)
    assert first.metrics["own_error_one"] == pytest.approx(wanted.error)


def test_the_cosine_has_no_gap_to_itself_and_needs_no_search():
    found = url.measure_url(replace(TOY, estimator="neighbour-within"), 1)
    for name in ("one", "two"):
        assert found.metrics[f"gap_{name}"] == 0
        assert found.metrics[f"own_{name}"] == found.metrics[f"fixed_{name}"]
    assert "steps" not in found.series


def test_ten_classes_have_heavier_tails_than_a_normal():
    """Two standard errors of a difference over ten classes, and over very many."""
    few, many = url.by_student(-0.2, 0.1, 10), url.by_student(0.2, 0.1, 100_001)
    assert few == pytest.approx(0.0766, abs=1e-4)  # Student's t, nine degrees
    assert many == pytest.approx(0.0455, abs=1e-4)  # the normal's
    assert url.CLASSES.keys() == url.DOWNSTREAM.keys()


def test_a_missing_set_is_said_with_its_reason_and_not_scored(monkeypatch, capsys):
    real = url._judge_set

    def judge(settings, source, made):
        if source == "generated:3":
            raise DataError("not here")
        return real(settings, source, made)

    monkeypatch.setattr(url, "_judge_set", judge)
    found = url.measure_url(TOY, 1)
    assert "two is left out: not here" in capsys.readouterr().out
    assert found.metrics["missing_two"] == 1 and "own_two" not in found.metrics
    assert "own_mean" not in found.metrics


def test_a_constant_certainty_is_said():
    pool = url.load_pool("generated:2", "")
    p = estimator("feature-norm")(pool.features)(pool.features)
    flat = p._replace(certainty=torch.ones(len(pool.labels)))
    said = url.judge_own(pool, flat)
    said |= url.judge_fixed(TOY, "generated:2", flat.certainty)
    assert said["constant"] == said["constant_fixed"] == 1
    assert not {"own", "area", "fixed", "gap"} & said.keys()  # never scored
    assert url.judge_own(pool, p)["constant"] == 0


def test_a_row_with_a_constant_certainty_has_no_mean(monkeypatch):
    def build(settings, *_):
        return lambda x: Prediction(x, torch.ones(len(x)))

    monkeypatch.setattr(url, "build", build)
    url.search.cache_clear()
    found = url.measure_url(replace(TOY, curve=False), 1).metrics
    url.search.cache_clear()
    assert found["constant_one"] == found["constant_fixed_two"] == 1
    assert found["constant_seen"] == 1 and "recall_mean" in found
    assert not [k for k in found if k.startswith(("own", "fixed", "ood", "mixed"))]


def test_candidates_are_what_the_registry_builds():
    pool = url.load_pool("generated:1", "")
    found = url.candidates(TOY, pool.features)
    for share in (0.04,):
        for word, both in (("one", False), ("both", True)):
            made = estimator("local-margin")(pool.features, share=share, both=both)
            got = found[f"{word}-{share}"]
            torch.testing.assert_close(got, made(pool.features).certainty)
    assert len(found) == 1 + 2 * len(url.SHARES) + 4
    assert all(len(v) == len(pool.labels) for v in found.values())


def test_larger_sets_are_thinned_evenly():
    whole, thin = (url.load_pool("generated:1", "", most=m) for m in (0, 50))
    assert len(thin.labels) == 40 and thin.features.equal(whole.features[::3])


def test_more_looks_are_more_items_of_the_same_classes(monkeypatch):
    given = []

    def make(features, labels, **options):
        given.append((features, labels, options.get("views")))

    monkeypatch.setattr(url, "estimator", lambda name: make)
    trial = {"steps": 1, "lr": 1e-3}
    for name, looks in (("ce", 0), ("ce", 3), ("mcinfonce", 0), ("mcinfonce", 3)):
        url.build(replace(TOY, estimator=name, looks=looks), dict(trial), 0, True)
    one, three, two_views, three_views = given
    assert len(one[0]) == 120 and three[0][:120].equal(one[0])
    assert three[1].equal(one[1].repeat(3)) and not three[0][120:240].equal(one[0])
    assert two_views[2].shape == (120, 2, 8) and three_views[2].shape == (120, 3, 8)
    assert one[2] is None and three[2] is None


def test_thin_sets_get_features_of_what_is_judged_only(monkeypatch):
    asked = []

    def features(source, view, backbone, every=1):
        asked.append(every)
        n = len(range(0, 2000, every))
        return View(torch.arange(2000.0)[::every, None], torch.ones(n))

    images = SimpleNamespace(labels=torch.arange(2000) % 7, human=None)
    data = SimpleNamespace(load=lambda split: images)
    monkeypatch.setattr(url, "set_features", features)
    monkeypatch.setattr(url, "dataset", lambda title: data)
    url.load_pool.cache_clear()
    slow = url.load_some("some:test", "slow", most=300)
    usual = url.load_some("cub200:test", url.DEFAULT_MODEL, most=300)
    monkeypatch.setattr(url, "CUT", 300)  # at the default cut: whole, then thinned
    shared = url.load_some("cub200:test", url.DEFAULT_MODEL, most=300)
    whole = url.load_some("cub200:test", url.DEFAULT_MODEL, most=0)
    url.load_some("some:test", url.DEFAULT_MODEL, most=300)  # shared by no chapter
    url.load_some("cub200:test", url.DEFAULT_MODEL, "random", most=300)
    url.load_pool.cache_clear()
    assert asked == [7, 7, 1, 1, 7, 7] and len(whole.labels) == 2000
    for one in (usual, shared):
        assert one.labels.equal(slow.labels) and one.features.equal(slow.features)
    assert len(slow.labels) == 286


def test_holm_is_stricter_than_each_and_laxer_than_all():
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5}
    found = url.holm(p)
    assert found == pytest.approx({"a": 0.04, "b": 0.09, "c": 0.09, "d": 0.5})
    assert all(found[k] >= p[k] for k in p)
    assert np.isfinite(list(found.values())).all()


def test_every_estimator_has_a_row_for_each_upstream():
    rows = experiments()["url"].rows
    all_of_them = (*url.FREE, *url.TRAINED)
    for upstream in ("tiny", "fine"):
        assert {f"{e}-{upstream}" for e in all_of_them} <= rows.keys()
        assert {f"{e}-{upstream}-as-published" for e in RELEASED} <= rows.keys()
    one_view = set(all_of_them) - set(url.VIEWED)
    for short in ("lite2", "resnet50"):
        assert {e for e in all_of_them if f"{e}-tiny-{short}" in rows} == one_view
    assert {f"{e}-tiny-{w}" for e in all_of_them for w in ("lite0", "whole")} <= set(
        rows
    )
    assert {f"{e}-tiny-lite0-as-published" for e in RELEASED} <= rows.keys()
    assert {f"{e}-tiny-three-looks" for e in url.TRAINED} <= rows.keys()
    more = 2 * len(one_view) + len(url.TRAINED)
    assert len(rows) == 4 * len(all_of_them) + 3 * len(RELEASED) + more
    assert experiments()["url"].seeds_of("ce-tiny") == (1, 2, 3, 4, 5)
    assert experiments()["url"].seeds_of("energy-fine") == (1,)


def test_what_is_chosen_may_be_chosen_on_fewer_images(monkeypatch):
    asked = {}

    def load(source, backbone, view="full", most=0, thin=False):
        asked[source] = most
        return url._generated(1, "full")

    monkeypatch.setattr(url, "load_pool", load)
    tiny = url.UrlSettings("ce", "tiny", most=0)
    for settings, wanted in ((tiny, 0), (replace(tiny, choose=1500), 1500)):
        url.validation(settings)
        assert set(asked.values()) == {wanted}


def test_shots_are_never_judged_and_join_class_by_class(monkeypatch):
    learnt, judged = [], []

    def among(many, some):
        return (some[:, None] == many).all(-1).any(1)

    def learn(settings, features, labels, seed):
        learnt.append((features, labels))

        def predict(x):
            judged.append(x)
            return Prediction(x, x.norm(dim=-1))

        return predict

    monkeypatch.setattr(url, "learn_shots", learn)
    found = url.measure_shots(url.ShotSettings("ce", "generated:2", "1 2"), 3).metrics
    sizes = [(len(x), len(y.unique())) for x, y in learnt]
    assert sizes == [(12, 12), (24, 12), (60, 12)]  # 12 classes of ten
    for (x, _), other in zip(learnt, judged, strict=True):
        assert len(other) == 60 and not among(other, x).any()
    for (few, _), (more, _) in pairwise(learnt):
        assert among(more, few).all()
    assert found["own_1_generated:2"] == found["own_many_generated:2"]


@pytest.mark.parametrize("name", ELEVEN)
def test_every_estimator_learns_from_a_few_shots(name):
    toy = url.ShotSettings(name, "generated:2", "1 2", steps=2, dim=4, hidden=8)
    found = url.measure_shots(toy, 1).metrics
    assert np.isfinite(list(found.values())).all() and "own_2_generated:2" in found
    assert ("own_1_generated:2" in found) == (name not in url.PAIRED)


@pytest.mark.parametrize("name", ["ce", "nivmf", "infonce"])
def test_a_released_row_searches_the_same_trials_with_another_estimator(name):
    right = replace(TOY, estimator=name)
    both = [url.search(replace(right, released=r)) for r in (False, True)]
    assert both[0].trials == both[1].trials
    assert both[0].scores != both[1].scores


def test_a_row_with_one_view_of_two_sets_reads_no_other(named):
    one = replace(TOY, upstream="tiny", sets="cub cars", crops=False, estimator="elk")
    found = url.measure_url(replace(one, curve=False), 1)
    asked = [source for source in named if source in url.HUMAN.values()]
    assert set(asked) == {"cub200:test", "cars196:test"}
    assert "own_mean" in found.metrics and "crop_cub" not in found.metrics


def test_a_whole_network_is_judged_on_seen_and_unseen_classes_and_repeats():
    toy = end_to_end.WholeSettings("ce", "generated", steps=40, dim=4, hidden=8)
    first, second = (end_to_end.measure_whole(toy, 2) for _ in range(2))
    assert first.metrics == second.metrics
    assert {"own_seen", "own_unseen", "gap_error_unseen"} <= first.metrics.keys()
    steps = first.series["steps"]
    assert steps["step"] == [1, 30, 40]
    assert steps["own"][-1] == first.metrics["own_unseen"]


def test_pixels_need_no_training_and_have_no_gap_to_their_cosine():
    toy = end_to_end.WholeSettings("neighbour-within", "generated")
    found = end_to_end.measure_whole(toy, 1)
    assert found.metrics["gap_unseen"] == 0 and not found.series


def test_a_trunk_takes_the_place_of_the_first_layer(monkeypatch):
    seen = []

    def trunk(hidden: int) -> torch.nn.Module:
        seen.append(torch.nn.Linear(8, hidden))
        return seen[-1]

    pool = url.load_pool("generated:0", "")
    start = []
    monkeypatch.setattr(uncertainties, "fit", lambda *_: start.append(seen[-1].weight))
    recipe = uncertainties.Recipe(4, 8, 1, trunk=trunk)
    made = estimator("ce")(pool.features, pool.labels, recipe=recipe)
    assert len(seen) == 1 and start[0] is seen[0].weight
    assert made(pool.features).embedding.shape == (120, 4)


def test_drawings_split_into_seen_and_unseen(monkeypatch):
    ink = np.random.default_rng(0).integers(0, 2, (40, 105, 105)).astype(np.uint8)
    drawings = Drawings(np.packbits(ink, axis=-1))
    labels = torch.arange(40) % 2
    sets = {
        "background": ImageSet(drawings, labels, ("a", "b")),
        "evaluation": ImageSet(drawings, labels + 199, ("c",) * 201),
    }
    monkeypatch.setattr(
        end_to_end, "dataset", lambda _: SimpleNamespace(load=sets.__getitem__)
    )
    end_to_end.load_drawings.cache_clear()
    found = end_to_end.load_drawings("omniglot")
    end_to_end.load_drawings.cache_clear()
    sizes = {k: len(p.labels) for k, p in found.items()}
    assert sizes == {"train": 32, "seen": 8, "unseen": 20}
    assert torch.bincount(found["seen"].labels).tolist() == [4, 4]
    assert set(found["unseen"].labels.tolist()) == {199}
    mean = float(found["train"].features.mean())
    assert mean == pytest.approx(float(ink.mean()), abs=0.01)


def test_a_constant_certainty_of_a_whole_network_has_no_score():
    pool = url.load_pool("generated:1", "")
    scores = end_to_end.judge_whole(lambda x: Prediction(x, torch.ones(len(x))), pool)
    assert scores["constant"] == 1 and {"recall", "cosine"} <= scores.keys()
    assert not {"own", "own_error", "gap", "gap_error"} & scores.keys()


def test_a_constant_in_the_middle_of_training_leaves_a_gap_in_the_curve(monkeypatch):
    real = end_to_end.build_whole

    def build(settings, steps, seed):
        found = real(settings, steps, seed)
        flat = steps == 1  # as if the certainty had collapsed there
        return (lambda x: Prediction(x, torch.ones(len(x)))) if flat else found

    monkeypatch.setattr(end_to_end, "build_whole", build)
    toy = end_to_end.WholeSettings("ce", "generated", steps=40, dim=4, hidden=8)
    steps = end_to_end.measure_whole(toy, 2).series["steps"]
    assert np.isnan(steps["own"][0]) and np.isfinite(steps["own"][1:]).all()
    assert np.isfinite(steps["recall"]).all()


YOUNG = end_to_end.YoungSettings(
    "ce", "generated", before=8, epochs="1 40", lr=0.1, dim=4, hidden=8
)


def test_a_young_network_and_a_frozen_one_start_from_the_same_trunk():
    start = end_to_end.learned_trunk(YOUNG, 1)
    before = [p.clone() for p in start.parameters()]
    moved, kept = (end_to_end.go_on(YOUNG, 3, 1, still)[1] for still in (False, True))
    assert isinstance(kept, end_to_end.Still) and not isinstance(moved, type(kept))
    for trunk, same in ((kept.part, True), (moved, False)):
        pairs = zip(before, trunk.parameters(), strict=True)
        assert all(a.equal(b) for a, b in pairs) == same
    pairs = zip(before, start.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)  # the start itself is nobody's to change


def test_a_young_network_is_compared_with_a_frozen_one_and_repeats():
    first, second = (end_to_end.measure_young(YOUNG, 2).metrics for _ in range(2))
    assert first == second
    assert first["kept_40"] < first["kept_1"] <= 1  # longer training moves more
    assert first["alike_40"] < first["alike_1"] <= 1
    for key in ("recall_start", "own_whole_1", "own_error_still_40", "same_1"):
        assert 0 <= first[key] <= 1
