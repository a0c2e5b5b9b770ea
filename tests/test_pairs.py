"""Pairs follow their probabilities, folds partition, crops are crops."""

from __future__ import annotations

import time

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from pcl import pairs as module
from pcl.datasets import generated_images
from pcl.pairs import FeaturePairs, PairSampler, crop, crop_sizes, folds, view


@pytest.mark.parametrize(("n", "n_folds"), [(10000, 5), (17, 3), (20, 4)])
def test_folds_partition_and_rotate(n: int, n_folds: int) -> None:
    made = folds(n, n_folds, seed=3)
    assert torch.equal(
        torch.cat([fold.test for fold in made]).sort().values, torch.arange(n)
    )
    for i, fold in enumerate(made):
        assert torch.equal(torch.cat(fold).sort().values, torch.arange(n))
        assert torch.equal(fold.validation, made[(i + 1) % n_folds].test)
    assert all(
        torch.equal(a.test, b.test)
        for a, b in zip(made, folds(n, n_folds, seed=3), strict=True)
    )
    with pytest.raises(ValueError, match="n_folds"):
        folds(10, 2)


def by_hand(probs: torch.Tensor) -> torch.Tensor:
    """The probability of every (anchor, positive, negative), by loops over the text of
    appendix C.1."""
    n, classes = probs.shape
    out = torch.zeros(n, n, n, dtype=torch.float64)
    for a in range(n):
        for c in range(classes):
            for p in range(n):
                for m in range(n):
                    if probs[:, c].sum() > 0:
                        positive = probs[p, c] / probs[:, c].sum()
                        negative = (1 - probs[m, c]) / (1 - probs[:, c]).sum()
                        out[a, p, m] += probs[a, c] * positive * negative / n
    return out


@pytest.mark.parametrize("kind", ["soft", "hard", "sparse"])
def test_pairs_have_the_probabilities_of_the_text(kind: str) -> None:
    g = torch.Generator().manual_seed(7)
    chosen = torch.tensor([9, 2, 5, 7])
    labels: torch.Tensor = torch.rand(10, 4, generator=g, dtype=torch.float64)
    if kind == "hard":
        labels = torch.tensor([3, 3, 0, 1, 2, 0, 1, 3, 2, 3])
        probs = torch.nn.functional.one_hot(labels).double()[chosen]
    else:
        labels = (
            labels * (torch.rand(10, 4, generator=g) < 0.6)
            if kind == "sparse"
            else labels
        )
        labels[:, 1] += 0.01
        labels = labels / labels.sum(-1, keepdim=True)
        probs = labels[chosen]
    a, p, m = PairSampler(labels, chosen).sample(100_000, 3, g)
    assert m is not None and m.shape == (100_000, 3)
    place = torch.full((10,), -1)
    place[chosen] = torch.arange(4)
    for column in m.T:
        seen = torch.bincount(
            16 * place[a] + 4 * place[p] + place[column], minlength=64
        )
        expected = by_hand(probs).flatten()
        possible = expected > 0
        assert (seen[~possible] == 0).all()
        assert chisquare(seen[possible], 100_000 * expected[possible]).pvalue > 1e-4


def test_pairs_are_drawn_without_a_loop_and_reproducibly() -> None:
    probs = torch.rand(6000, 10, generator=torch.Generator().manual_seed(0)).softmax(-1)
    sampler = PairSampler(probs)
    start = time.process_time()
    first = sampler.sample(512, 64, torch.Generator().manual_seed(1))
    assert time.process_time() - start < 1.0
    again = sampler.sample(512, 64, torch.Generator().manual_seed(1))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))  # type: ignore[arg-type]
    assert sampler.sample(3, 0, torch.Generator()).x_neg is None


def test_draws_at_the_edges_of_the_unit_interval_stay_in_their_row() -> None:
    weights = torch.tensor(
        [[0.0, 0.3, 0.7, 0.0], [0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.5]],
        dtype=torch.float64,
    )
    drawn = module._Weights(weights)
    rows = torch.arange(3).repeat(2)
    for value, expected in [(0.0, [1, 2, 0]), (1 - 2**-53, [2, 2, 3])]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch,
                "rand",
                lambda shape, value=value, **_: torch.full(
                    shape, value, dtype=torch.float64
                ),
            )
            assert drawn.draw(rows, torch.Generator()).tolist() == expected * 2


def test_pairs_feed_the_training_loop() -> None:
    data = torch.randn(20, 5)
    labels = torch.arange(20) % 3
    x, x_pos, x_neg = PairSampler(labels).on(data)(
        7, 2, torch.Generator().manual_seed(0)
    )
    assert (
        x.shape == x_pos.shape == (7, 5)
        and x_neg is not None
        and x_neg.shape == (7, 2, 5)
    )


def test_pair_sampler_refuses_what_it_cannot_draw_from() -> None:
    with pytest.raises(ValueError, match="probabilities"):
        PairSampler(torch.tensor([[0.5, 0.6]]))
    with pytest.raises(ValueError, match="labels must be"):
        PairSampler(torch.rand(3))
    with pytest.raises(ValueError, match="indices"):
        PairSampler(torch.tensor([0, 1]), torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="no negatives for class 0"):
        PairSampler(torch.tensor([0, 0])).sample(2, 1, torch.Generator())
    with pytest.raises(ValueError, match="n must be"):
        PairSampler(torch.tensor([0, 1])).sample(0, 1, torch.Generator())


def without_selves(probs: Tensor) -> Tensor:
    """The probability of every pair whose partner is another image, by loops; an image
    that alone has a class is its own partner."""
    n, classes = probs.shape
    out = torch.zeros(n, n, dtype=torch.float64)
    for a in range(n):
        for c in range(classes):
            others = probs[:, c].clone()
            others[a] = 0
            if others.sum() == 0:
                others[a] = 1
            out[a] += probs[a, c] * others / others.sum() / n
    return out


SOFT = torch.tensor(
    [
        [0.7, 0.3, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.1, 0.2, 0.7, 0.0],
        [0.0, 0.0, 0.9, 0.1],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize("selves", [True, False])
def test_self_pairs_are_as_likely_as_they_should_be(selves: bool) -> None:
    """Exact probabilities on a table of four images; the last class has one image."""
    i, j, _ = PairSampler(SOFT, selves=selves).sample(
        200_000, 0, torch.Generator().manual_seed(3)
    )
    wanted = without_selves(SOFT) if not selves else SOFT / 4 @ (SOFT / SOFT.sum(0)).T
    seen = torch.bincount(4 * i + j, minlength=16)
    possible = wanted.flatten() > 0
    assert (seen[~possible] == 0).all()
    expected = 200_000 * wanted.flatten()[possible]
    assert chisquare(seen[possible], expected).pvalue > 1e-4


def test_negatives_come_by_class_or_from_all() -> None:
    g = torch.Generator().manual_seed(4)
    labels = torch.tensor([0, 0, 1, 2])
    a, _, by_class = PairSampler(labels).sample(50_000, 2, g)
    assert by_class is not None and (labels[by_class] != labels[a][:, None]).all()
    a, _, any_image = PairSampler(labels, negatives="any").sample(50_000, 2, g)
    assert any_image is not None
    assert chisquare(torch.bincount(any_image.flatten())).pvalue > 1e-4
    with pytest.raises(ValueError, match="unknown negatives 'all'"):
        PairSampler(labels, negatives="all")  # type: ignore[arg-type]


def test_labels_are_votes_that_agree() -> None:
    """The same seed draws the same pairs from labels and from their table of ones."""
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(7, (400,), generator=g)
    chosen = torch.randperm(400, generator=g)[:300]
    drawn = [
        PairSampler(targets, chosen).sample(20_000, 3, torch.Generator().manual_seed(6))
        for targets in (labels, one_hot(labels).double())
    ]
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))  # type: ignore[arg-type]
    others = PairSampler(labels, chosen, selves=False).sample(20_000, 0, g)
    assert (others.x != others.x_pos).all()
    assert torch.equal(labels[others.x], labels[others.x_pos])


def test_many_classes_need_no_table() -> None:
    labels = torch.arange(200_000) % 50_000  # a table would take 80 GB
    x, x_pos, x_neg = PairSampler(labels).sample(64, 4, torch.Generator())
    assert (labels[x] == labels[x_pos]).all() and x_neg is not None
    assert (labels[x_neg] != labels[x][:, None]).all()


def test_views_and_lists_draw_from_what_they_are_given() -> None:
    g = torch.Generator().manual_seed(0)
    x, x_pos, x_neg = PairSampler(None, torch.tensor([3, 8])).sample(100, 1, g)
    assert torch.equal(x, x_pos) and set(x.tolist()) == {3, 8}
    assert x_neg is not None and set(x_neg.flatten().tolist()) == {3, 8}
    with pytest.raises(ValueError, match="indices must name the images"):
        PairSampler(None)


@pytest.mark.parametrize("value", [0.0, 1 - 2**-53])
def test_an_image_is_not_its_own_partner_at_the_edges_either(value: float) -> None:
    weights = torch.tensor([[0.2, 0.3, 0.5, 0.0], [0.0, 0.1, 0.1, 0.1]]).double()
    drawn = module._Weights(weights)
    rows = torch.tensor([0, 0, 0, 1, 1, 1])
    skip = torch.tensor([0, 1, 2, 1, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch,
            "rand",
            lambda shape, **_: torch.full(shape, value, dtype=torch.float64),
        )
        found = drawn.draw_other(rows, skip, torch.Generator())
    assert (found != skip).all() and (weights[rows, found] > 0).all()


# --- cached features


def counts(pairs: FeaturePairs, n: int = 40_000) -> Tensor:
    i, j = pairs.indices(n, torch.Generator().manual_seed(0))
    size = len(pairs.features)
    return torch.bincount(i * size + j, minlength=size * size).view(size, size) / n


def test_hard_labels_pair_uniformly_within_a_class_and_never_with_oneself() -> None:
    labels = torch.tensor([7, 7, 7, -1, -1])
    seen = counts(FeaturePairs(torch.rand(5, 2), labels))
    same = (labels[:, None] == labels) & ~torch.eye(5, dtype=torch.bool)
    wanted = same / same.sum(1, keepdim=True)
    assert (seen[~same] == 0).all()
    error = (wanted * (1 - wanted) / (40_000 * seen.sum(1, keepdim=True))).sqrt()
    assert ((seen / seen.sum(1, keepdim=True) - wanted).abs() <= 4 * error).all()


def test_soft_labels_follow_the_papers_rule() -> None:
    generator = torch.Generator().manual_seed(2)
    soft = torch.rand(6, 4, generator=generator).pow(3)
    soft[0] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    soft = soft / soft.sum(1, keepdim=True)
    seen = counts(
        FeaturePairs(torch.rand(6, 2, 3), soft), 200_000
    )  # two views: an image may meet itself
    wanted = soft @ (soft / soft.sum(0)).T / 6
    assert (seen - wanted).abs().max() < 0.004


def test_given_pairs_are_drawn_as_given() -> None:
    given = torch.tensor([[0, 3], [2, 1]])
    seen = counts(FeaturePairs(torch.rand(4, 2), given))
    assert set(map(tuple, seen.nonzero().tolist())) == {(0, 3), (2, 1)}
    assert abs(float(seen[0, 3]) - 0.5) < 0.02


@pytest.mark.parametrize("targets", [None, torch.tensor([0, 0, 1, 1])])
def test_an_image_is_never_shown_twice_in_one_view(targets: Tensor | None) -> None:
    features = torch.arange(12.0).view(
        4, 3, 1
    )  # the number says which image and which view
    x, x_pos, x_neg = FeaturePairs(features, targets)(
        2000, 5, torch.Generator().manual_seed(0)
    )
    assert (x != x_pos).all() and x_neg is not None and x_neg.shape == (2000, 5, 1)
    assert set(x.flatten().tolist()) == set(range(12)) == set(x_neg.flatten().tolist())
    if targets is None:
        assert (x // 3 == x_pos // 3).all()


@pytest.mark.parametrize(
    ("features", "targets", "hint"),
    [
        (torch.rand(4, 3), None, "two views"),
        (torch.rand(4, 3), torch.tensor([0, 0, 1, 2]), "one image"),
        (torch.rand(4, 3), torch.tensor([0, 0, 1]), "targets must be"),
        (torch.rand(4, 3), torch.rand(4), "targets must be"),
        (torch.rand(4, 3), torch.tensor([[0, 4]]), "0 to 3"),
        (torch.rand(4, 3), -torch.rand(4, 2), "0 or more"),
        (torch.rand(4, 3), torch.zeros(4, 2), "positive sum"),
        (torch.rand(4, 3, 2, 1), None, "features must be"),
        (torch.full((4, 3), torch.nan), torch.tensor([0, 0, 1, 1]), "not finite"),
    ],
)
def test_misuse_is_named(features: Tensor, targets: Tensor | None, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        FeaturePairs(features, targets)


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="float"):
        FeaturePairs(torch.ones(4, 3, dtype=torch.long), None)
    with pytest.raises(TypeError, match="as_tensor"):
        FeaturePairs(torch.rand(4, 3), [0, 0, 1, 1])  # type: ignore[arg-type]


# --- crops and views


@pytest.mark.parametrize("mode", ["random", "centre"])
def test_crops_are_a_crop_and_a_resize(mode: str) -> None:
    g = torch.Generator().manual_seed(0)
    pictures = torch.rand(40, 3, 32, 32, generator=g, dtype=torch.float64)
    sizes = crop_sizes(40, g)
    done = crop(pictures, sizes, mode, g)  # type: ignore[arg-type]
    places = []
    for picture, size, out in zip(pictures, sizes, done, strict=True):
        width = round(32 * size.item())
        free = range(32 - width + 1)
        corners = (
            [(y, x) for y in free for x in free]
            if mode == "random"
            else [((32 - width) // 2,) * 2]
        )
        options = torch.stack(
            [picture[:, y : y + width, x : x + width] for y, x in corners]
        )
        resized = interpolate(options, 32, mode="bilinear", align_corners=False)
        error = (resized - out).abs().amax((1, 2, 3))
        assert error.min() < 1e-6, "some crop of that size gives this image"
        places.append(corners[int(error.argmin())])
    assert mode == "centre" or len(set(places)) > 20


def test_crops_keep_bytes_and_refuse_nonsense() -> None:
    picture = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    assert torch.equal(crop(picture, torch.tensor([0.25, 0.7])), picture)
    with pytest.raises(ValueError, match="mode"):
        crop(picture, torch.ones(2), "middle")  # type: ignore[arg-type]
    for sizes in (torch.ones(3), torch.tensor([0.0, 1.0]), torch.tensor([1.1, 1.0])):
        with pytest.raises(ValueError, match="sizes must be 2 numbers"):
            crop(picture, sizes)
    with pytest.raises(ValueError, match="images must be"):
        crop(picture[:, :, :20], torch.ones(2))


def test_views_share_sizes_and_are_reproducible() -> None:
    images = generated_images(40)[0].images
    full, random, centre = (view(images, name) for name in ("full", "random", "centre"))
    assert torch.equal(full.data, images) and (full.sizes == 1).all()
    assert torch.equal(random.sizes, centre.sizes) and not torch.equal(
        random.data, centre.data
    )
    assert torch.equal(centre.data, crop(images, centre.sizes, "centre"))
    assert torch.equal(view(images, "augment-1").data, view(images, "augment-1").data)
    assert not torch.equal(
        view(images, "augment-1").sizes, view(images, "augment-2").sizes
    )
    with pytest.raises(ValueError, match="unknown view 'corner'"):
        view(images, "corner")
