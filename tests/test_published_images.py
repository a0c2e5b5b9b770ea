"""The authors' image loader, last layer and settings, against exact sums and their own code.

The frequencies come from mkirchhof/Probabilistic_Contrastive_Learning at b0f70c0: its loader's two
samplers on the votes below, 20,000 calls each for positives and single negatives, 4000 for four
negatives at once."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pcl.experiments import Job, experiments
from pcl.published.data import PublishedImagePairs
from pcl.published.models import published_last_layer, set_published_start
from pcl.published.objectives import PublishedELK, PublishedHIB, PublishedMCInfoNCE
from pcl.studies.cifar10h import (
    GRID,
    IMAGE_SMOKE,
    TABLE9,
    ImageSettings,
    away_from,
    grid_axes,
    grid_setting,
    image_encoder,
    image_loss,
    image_task,
    image_training,
    select,
)

VOTES = torch.tensor(
    [[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.0, 1.0], [0.7, 0.3]], dtype=torch.double
)
THEIRS = {
    "positives": [
        [0.3977, 0.0935, 0.1894, 0.0428, 0.2767],
        [0.1119, 0.2526, 0.1679, 0.3352, 0.1326],
        [0.2343, 0.1815, 0.1783, 0.2100, 0.1958],
        [0.0287, 0.2951, 0.1635, 0.4211, 0.0916],
        [0.3144, 0.1401, 0.1829, 0.1268, 0.2359],
    ],
    "one negative": [
        [0.0566, 0.2835, 0.1708, 0.3821, 0.1069],
        [0.3354, 0.1187, 0.2061, 0.0724, 0.2673],
        [0.1951, 0.2030, 0.1936, 0.2073, 0.2011],
        [0.4371, 0.0680, 0.1921, 0.0000, 0.3028],
        [0.1215, 0.2468, 0.1875, 0.2882, 0.1559],
    ],
    "four negatives": [
        [0.0637, 0.2849, 0.1877, 0.3441, 0.1196],
        [0.3187, 0.1324, 0.2107, 0.0780, 0.2601],
        [0.1957, 0.1994, 0.1960, 0.1999, 0.2090],
        [0.4051, 0.0813, 0.2114, 0.0000, 0.3022],
        [0.1287, 0.2457, 0.1904, 0.2751, 0.1601],
    ],
}
SMOKE = ImageSettings(**IMAGE_SMOKE)


def drawn_from(chance: Tensor) -> Tensor:
    """The law of one image drawn from those that a coin accepts, not normalised."""
    law = torch.zeros_like(chance)
    for coins in itertools.product((0.0, 1.0), repeat=len(chance)):
        taken = torch.tensor(coins, dtype=torch.double)
        if taken.any():
            weight = torch.where(taken > 0, chance, 1 - chance).prod()
            law += weight * taken / taken.sum()
    return law


def exact(what: str) -> Tensor:
    """The law of each image's partner, or of its first negative."""
    if what == "positives":
        own = torch.stack([drawn_from(VOTES[:, c]) for c in range(2)])
        laws = VOTES @ own
    else:
        laws = torch.stack([drawn_from(1 - VOTES @ votes) for votes in VOTES])
    return laws / laws.sum(1, keepdim=True)


def ours(what: str, calls: int) -> Tensor:
    """Frequencies of this library's sampler, by anchor."""
    n_neg = {"positives": 0, "one negative": 1, "four negatives": 4}[what]
    sampler, generator = PublishedImagePairs(VOTES), torch.Generator().manual_seed(0)
    counts = torch.zeros(5, 5, dtype=torch.double)
    for _ in range(calls):
        x, x_pos, x_neg = sampler.sample(5, n_neg, generator)
        found = x_pos[:, None] if x_neg is None else x_neg
        counts[x] += torch.nn.functional.one_hot(found, 5).sum(1)
    return counts / counts.sum(1, keepdim=True)


@pytest.mark.parametrize("what", ["positives", "one negative"])
def test_ours_and_theirs_draw_by_the_exact_law(what: str) -> None:
    law, calls = exact(what), 8000
    for found, n in ((ours(what, calls), calls), (torch.tensor(THEIRS[what]), 20_000)):
        bound = 4.5 * (law * (1 - law) / n).sqrt() + 1e-4
        assert ((found - law).abs() <= bound).all(), (what, n)


def test_several_negatives_of_ours_are_those_of_theirs() -> None:
    found, theirs = ours("four negatives", 4000), torch.tensor(THEIRS["four negatives"])
    bound = 4.5 * (2 * theirs * (1 - theirs) / 16_000).sqrt() + 1e-4
    assert ((found - theirs).abs() <= bound).all()
    assert (found - exact("one negative")).abs().max() > 0.02  # the law is another one


def test_negatives_are_the_first_256_of_the_images_drawn_from() -> None:
    labels, indices = torch.arange(2000) % 10, torch.arange(1999, 999, -1)
    sampler = PublishedImagePairs(labels, indices)
    x, x_pos, x_neg = sampler.sample(200, 8, torch.Generator().manual_seed(0))
    assert x.unique().numel() == 200 and labels[x].equal(labels[x_pos])
    assert x_neg is not None and set(x_neg.flatten().tolist()) <= set(range(1744, 2000))
    assert x_neg.unique().numel() > 200
    assert (
        labels[x_neg] == labels[x][:, None]
    ).any()  # the class was checked too early


def test_bad_requests_of_the_published_loader_are_named() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match="must not exceed the 5 images"):
        PublishedImagePairs(VOTES).sample(6, 0, generator)
    with pytest.raises(ValueError, match="no negatives"):
        PublishedImagePairs(torch.zeros(4, dtype=torch.long)).sample(2, 1, generator)
    with pytest.raises(ValueError, match="labels or soft labels"):
        PublishedImagePairs(torch.tensor([[0, 1], [1, 2]]))


def test_the_last_layer_starts_by_xaviers_rule_or_where_it_is_put() -> None:
    torch.manual_seed(0)
    features = torch.rand(100, 64)
    layer = published_last_layer(64, 8, 16.0)
    assert layer.bias is None
    rows = torch.cat(
        [published_last_layer(64, 8, 16.0).weight.flatten() for _ in range(20)]
    )
    assert rows.std().item() == pytest.approx(16 * math.sqrt(2 / 72), rel=0.03)
    set_published_start(layer, features, 3.0)
    assert layer(features).norm(dim=-1).median().item() == pytest.approx(3.0, rel=1e-5)


# (row, n_neg, kappa_pos, D, phases): e_dim_z, g_pos_kappa, n_neg, n_phases of the five scripts
SCRIPTS = [
    ("table4", "hib-as-published", 0, 32.0, 8, 0.5, PublishedHIB),
    ("table4", "elk-as-published", 1, 32.0, 8, 0.0, PublishedELK),
    ("table4", "mcinfonce-as-published", 32, 16.0, 8, 0.5, PublishedMCInfoNCE),
    ("table5", "cifar10h-hard-as-published", 0, 16.0, 16, 0.0, PublishedMCInfoNCE),
    ("table5", "cifar10-hard-as-published", 0, 64.0, 8, 0.5, PublishedMCInfoNCE),
]


@pytest.mark.parametrize(("name", "row", "m", "k", "d", "phases", "loss"), SCRIPTS)
def test_rows_as_published_have_the_settings_of_the_scripts(
    name: str, row: str, m: int, k: float, d: int, phases: float, loss: type
) -> None:
    for preset in ("cpu", "paper"):
        s = Job(name, row, preset, 1).settings()
        assert (s.n_neg, s.kappa_pos, s.dim, s.kappa_from) == (m, k, d, phases)
        assert (s.batch_size, s.crop_share, s.weight_decay) == (128, 0.0, 0.01)
        assert s.start_kappa == (k if preset == "cpu" else None)
        assert (s.a, s.b, s.published) == (2.0, 1.0, True)
        config = image_training(s, 1)
        assert config.n_neg_frozen == 0 and config.clip == math.inf
        assert isinstance(image_loss(s).loss, loss)  # type: ignore[arg-type]
    assert (s.steps, s.n_samples, s.lr, s.select_every) == (100_000, 128, 1e-4, 500)


def test_rows_without_crops_differ_from_ours_in_nothing_else() -> None:
    for loss in ("hib", "elk", "mcinfonce"):
        with_crops, whole = (
            Job("table4", row, "cpu", 1).config() for row in (loss, f"{loss}-whole")
        )
        changed = {key for key in with_crops if with_crops[key] != whole[key]}
        assert changed == {"crop_share"} and whole["crop_share"] == 0.0


def test_a_published_encoder_starts_at_kappa_pos_and_has_no_cap() -> None:
    for pretrained in (True, False):
        row = published_smoke(pretrained=pretrained, start_kappa=16.0)
        task = image_task(row, 1)
        encoder = image_encoder(row, task, 1)
        kappa = encoder.eval()(task.train.views["full"][:256]).concentration
        assert kappa.median().item() == pytest.approx(16.0, rel=1e-3)
        assert encoder.kappa_max == math.inf


def published_smoke(**changes: object) -> ImageSettings:
    """A row as published on generated shapes, changed."""
    settings = Job("table4", "mcinfonce-as-published", "smoke", 1).settings()
    return replace(settings, **changes)


def test_weights_are_kept_by_centre_crops() -> None:
    class Kept(torch.nn.Module):
        def __init__(self, encoder: torch.nn.Module):
            super().__init__()
            self.encoder, self.scores = encoder, list[float]()

        def keep(self, score: float) -> None:
            self.scores.append(score)

    row = published_smoke()
    task = image_task(row, 1)
    kept = Kept(image_encoder(row, task, 1))
    by_centre, by_random = (
        select(kept, task.validation, crops)["crop_corr"]  # type: ignore[arg-type]
        for crops in ("centre", "random")
    )
    assert kept.scores == [by_centre, by_random] and by_centre != by_random


def test_the_search_starts_at_no_published_answer() -> None:
    for loss, labels in TABLE9:
        n_neg, kappa_pos, dim, phases = TABLE9[loss, labels]
        start = away_from(loss, labels)
        answers = {"m": n_neg, "dim": dim, "kappa_pos": kappa_pos, "phasewise": phases}
        assert all(start[axis] != answer for axis, answer in answers.items())
        assert start["a"] != 2 and start["b"] != 1
        assert set(grid_axes(loss)) <= set(GRID)
        for axis, value in start.items():
            replace(SMOKE, **grid_setting(axis, value))
    assert experiments()["table9"].seeds == (1, 2, 3)
