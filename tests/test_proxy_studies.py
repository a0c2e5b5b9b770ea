"""Proxy losses on unseen classes: protocol, starts, released forms, scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from pcl.experiments import EXPERIMENTS, Job, experiments
from pcl.grouping import map_at_k
from pcl.neighbours import nearest
from pcl.published.metrics import published_map_at_k
from pcl.published.objectives import PublishedNivMF, PublishedProxyKL
from pcl.studies import proxies
from pcl.studies.proxies import (
    COLD,
    FIGURE_5,
    KINDS,
    ByProxy,
    CutNorm,
    Embedding,
    ProxySettings,
    judge_retrieval,
    load_zero_shot,
    make_proxy_loss,
    precision_sums,
    recall_by_distance,
    start,
    train_by_proxies,
    within,
)
from pcl.studies.proxy_posterior import calibration_gap, fifths, load_noisy

SMALL = Job("proxies", "cub-cos", "smoke", 1)


def settings(**changes: object) -> ProxySettings:
    experiments()
    return replace(SMALL.settings(), **changes)  # type: ignore[arg-type]


def clustered(n: int = 240, classes: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % classes
    centres = torch.randn(classes, 8, generator=generator)
    z = centres[labels] + 0.8 * torch.randn(n, 8, generator=generator)
    return z * (0.5 + torch.rand(n, 1, generator=generator)), labels


def test_average_precision_is_that_of_the_library() -> None:
    z, labels = clustered()
    size = torch.bincount(labels)[labels]
    for k in (5, 30, 1000):
        sums = precision_sums(z, labels, k)
        right = float((sums / (size - 1).clamp(max=k)).mean())
        assert right == pytest.approx(
            map_at_k(z, labels, k), abs=1e-5
        )  # near ties in float32
        released = float((sums / size).mean())
        assert released == pytest.approx(published_map_at_k(z, labels, k), abs=1e-5)


def test_retrieval_by_distance_is_that_of_explicit_distances() -> None:
    z, labels = clustered()
    gaps = torch.cdist(z.double(), z.double()).fill_diagonal_(torch.inf)
    wanted = 100 * float((labels[gaps.argmin(1)] == labels).double().mean())
    assert recall_by_distance(z, labels) == pytest.approx(wanted)
    unit = nn.functional.normalize(z, dim=1)
    found = judge_retrieval(unit, labels, nearest(unit, k=2).indices)
    assert found["recall_1_l2"] == pytest.approx(found["recall_1"])
    assert found["recall_1"] <= found["recall_2"]


def test_within_a_class_the_mean_is_zero() -> None:
    z, labels = clustered()
    rest = within(z.norm(dim=1), labels)
    means = [float(rest[labels == c].mean()) for c in labels.unique()]
    assert max(map(abs, means)) < 1e-6


def test_no_test_class_is_trained_on() -> None:
    data = load_zero_shot("generated")
    assert not set(data.labels.tolist()) & set(data.test_labels.tolist())


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_loss_starts_at_the_class_means_with_vectors_of_its_kappa(
    name: str,
) -> None:
    s, data = settings(loss=name), load_zero_shot("generated")
    rows = torch.arange(len(data.labels))
    loss = make_proxy_loss(s, data.n_classes, 20.0)
    made = Embedding(nn.Identity(), data.views.shape[-1], s.dim)
    start(s, made, loss, data, rows, 20.0)
    with torch.no_grad():
        z = made(data.views[0])
        mean = torch.stack(
            [
                nn.functional.normalize(z[data.labels == c], dim=1).sum(0)
                for c in range(data.n_classes)
            ]
        )
        cos = nn.functional.cosine_similarity(
            mean, proxies.directions_of(loss).locs.float()
        )
    assert bool((cos > 1 - 1e-4).all())
    wanted = 20.0 if KINDS[name].option == "kappa" else 10.0
    assert float(z.norm(dim=1).median()) == pytest.approx(wanted, rel=1e-3)


def test_the_released_start_is_given_to_three_losses_only() -> None:
    warm = {name for name in FIGURE_5 if KINDS[name].started}
    assert warm == {"b-vmf", "el-vmf", "el-nivmf"} and set(COLD) == set(FIGURE_5) - warm
    data = load_zero_shot("generated")
    rows = torch.arange(len(data.labels))
    for name in FIGURE_5:
        s = settings(loss=name, one_start=False)
        torch.manual_seed(0)
        loss = make_proxy_loss(s, data.n_classes, 20.0)
        before = proxies.directions_of(loss).directions.detach().clone()
        made = Embedding(nn.Identity(), data.views.shape[-1], s.dim)
        start(s, made, loss, data, rows, 20.0)
        moved = not torch.equal(before, proxies.directions_of(loss).directions)
        assert moved == (name in warm), name


def test_all_that_learns_has_a_learning_rate() -> None:
    for name in KINDS:
        loss = make_proxy_loss(settings(loss=name), 6, 20.0)
        groups = ByProxy(nn.Linear(4, 6), loss, {}).groups()
        named = [id(p) for group in groups.values() for p in group]
        assert len(named) == len(set(named))
        assert {id(p) for p in loss.parameters()} <= set(named), name


def test_a_cut_length_gets_no_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    encoder = CutNorm(nn.Linear(4, 3))
    encoder(x).concentration.detach()
    assert not encoder(x).concentration.requires_grad and encoder(x).loc.requires_grad


def test_the_released_divergence_prefers_the_far_side() -> None:
    torch.manual_seed(0)
    loss = PublishedProxyKL(5, 16, kappa=20.0).double()
    own = torch.arange(5)
    with torch.no_grad():
        near, far = (loss(sign * 30 * loss.locs, own) for sign in (1, -1))
    assert far < near


def test_the_released_density_differs_from_the_exact_one_by_class_and_place() -> None:
    torch.manual_seed(0)
    loss = PublishedNivMF(3, 512, kappa=40.0).double()
    x = nn.functional.normalize(torch.randn(4, 512).double(), dim=1)
    with torch.no_grad():
        found = loss.log_prob_pairs(x)
        k = loss.log_concentration.exp()
        for i in range(4):
            for c in range(3):
                a, b = k[c] * x[i], k[c] * loss.locs[c]
                cos = a @ b / a.norm() / b.norm()
                peak = 868 - 0.0002662 * b.norm() - 0.0009685 * b.norm() ** 2
                wanted = peak + k[c].log().sum() - b.norm().log() + b.norm() * cos
                assert found[i, c] == pytest.approx(float(wanted), rel=1e-9)


def test_the_ablated_density_differs_by_the_factor_of_each_class_alone() -> None:
    torch.manual_seed(0)
    s = settings(loss="nivmf-no-factor", released=True)
    without = make_proxy_loss(s, 3, 20.0).double()
    whole = PublishedNivMF(3, s.dim, kappa=20.0).double()
    with torch.no_grad():
        without.log_concentration += torch.randn(3, s.dim).double()
        for name in ("directions", "log_concentration"):
            getattr(whole, name).copy_(getattr(without, name))
        log_k = whole.log_concentration
        length = (log_k.exp() * whole.locs).norm(dim=-1)
        x = nn.functional.normalize(torch.randn(4, s.dim).double(), dim=1)
        gap = whole.log_prob_pairs(x) - without.log_prob_pairs(x)
    wanted = (log_k.sum(-1) - length.log()).expand(4, 3)
    torch.testing.assert_close(gap, wanted)


def test_the_same_seed_trains_the_same_embedding() -> None:
    s, data = settings(loss="el-nivmf"), load_zero_shot("generated")
    rows = torch.arange(len(data.labels))
    first, again, other = (
        train_by_proxies(s, data, rows, 20.0, 1e-3, seed).encoder.net.line.weight
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_papers_settings_stand_in_its_preset() -> None:
    experiments()
    config = Job("proxies", "cars-el-nivmf", "paper", 1).config()
    known = {"dim": 512, "batch_size": 106, "weight_decay": 4e-4, "rates": "1e-5"}
    known |= {"lr_proxy": 5000.0, "lr_concentration": 50_000.0, "trained": "all"}
    assert {k: config[k] for k in known} == known
    assert config["steps"] == 11_400  # 150 epochs of 8054 images
    assert all("cpu" in e.presets for n, e in EXPERIMENTS.items() if "prox" in n)


def test_beliefs_that_are_certain_and_wrong_have_the_largest_gap() -> None:
    sure, wrong = torch.ones(30), torch.zeros(30, dtype=torch.bool)
    assert calibration_gap(sure, wrong) == pytest.approx(1.0)
    assert calibration_gap(sure, ~wrong) == pytest.approx(0.0)


def test_fifths_of_the_length_tell_right_from_wrong_labels() -> None:
    length = torch.arange(1.0, 101.0)
    good = torch.arange(100) % 2 == 0
    pull = torch.where(good, 1.0, length)
    found = fifths(pull, length, good)
    assert found["right"] == pytest.approx([1 / float(pull.mean())] * 5)
    parts = length.split(20)
    wanted = [float(part[1::2].mean() / pull.mean()) for part in parts]
    assert found["wrong"] == pytest.approx(wanted)


def test_a_quarter_of_the_generated_labels_is_wrong() -> None:
    data, clean = load_noisy("generated", "any", 160)
    wrong = data.labels != clean
    assert wrong.tolist() == (torch.arange(len(clean)) % 4 == 0).tolist()
    assert set(data.labels.tolist()) == set(clean.tolist())


def test_equal_trials_are_settled_by_the_gentler_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxies, "recall", lambda z, labels: 50.0)
    s = settings(loss="l2", sharpness=0.0, rates="2e-3 1e-3", steps=1, lr_proxy=1.5)
    found = proxies.search.__wrapped__(s)
    assert (found.sharpness, found.lr) == (min(KINDS["l2"].sharpness), 1e-3)


@pytest.mark.parametrize(("loss", "trials"), [("cos", 3), ("anchor", 1), ("elk", 9)])
def test_the_printed_grid_is_searched_by_the_median_of_three_seeds(
    loss: str, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formulas 46 and 47; the first seed of every trial is a lucky one."""
    loss = {"elk": "el-vmf"}.get(loss, loss)
    seen: list[tuple[float, float, int]] = []
    train = proxies.train_by_proxies

    def watched(s, data, rows, sharpness, lr, seed):  # type: ignore[no-untyped-def]
        seen.append((sharpness, s.temperature, seed))
        return train(s, data, rows, sharpness, lr, seed)

    def level(z, labels) -> float:  # type: ignore[no-untyped-def]
        return 99.0 if seen[-1][2] == 0 else float(len(seen))

    monkeypatch.setattr(proxies, "train_by_proxies", watched)
    monkeypatch.setattr(proxies, "recall", level)
    s = settings(loss=loss, sharpness=0.0, rates="1e-3", steps=1, printed=True)
    found = proxies.search.__wrapped__(s)
    assert len(seen) == 3 * trials and found.recall == len(seen)
    assert (found.sharpness, found.temperature) == seen[-1][:2]
    heat = {1.0, 1 / 32, 1 / 256}
    if trials == 9:
        assert {t for _, t, _ in seen} == heat
        assert {k for k, _, _ in seen} == {10.0, 50.0, 200.0}
        made = proxies.make_proxy_loss(found.put_into(s), 4, found.sharpness)
        assert float(made.temperature) == pytest.approx(found.temperature)
    elif loss == "cos":
        assert {1 / k for k, _, _ in seen} == heat
