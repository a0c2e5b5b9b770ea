"""What is wrong on purpose, against numbers of the authors' own code.

The numbers come from mkirchhof/Probabilistic_Contrastive_Learning at b0f70c0, run in double precision on
the inputs that `points` makes, with its sampler replaced by these points in the order anchors, positives,
negatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pcl.networks import mlp
from pcl.pairs import Pairs
from pcl.published import objectives
from pcl.published.data import AuthorsJointProcess, AuthorsProcess
from pcl.published.models import PublishedEncoder, published_encoder
from pcl.published.objectives import (
    PublishedELK,
    PublishedHIB,
    PublishedInfoNCE,
    PublishedMCInfoNCE,
    PublishedSampler,
)
from pcl.published.sphere import published_acceptance
from pcl.studies.controlled import (
    AUTHORS,
    WorldSettings,
    fresh_encoder,
    make_loss,
    make_world,
    measure_world,
    published_row,
    spelled_out,
    training_config,
)
from pcl.training import train_encoder
from pcl.vmf import VonMisesFisher

DOUBLE = torch.float64
K, B, M, D = 3, 4, 2, 10


def points(start: int, *shape: int) -> torch.Tensor:
    """Unit vectors that need no generator."""
    i = torch.arange(start, start + math.prod(shape) * D, dtype=DOUBLE).view(*shape, D)
    return nn.functional.normalize(torch.sin(i * i / 7 + i), dim=-1)


Z, NEGATIVES = points(0, K, B), points(2000, K, B, M)
POSITIVES = nn.functional.normalize(points(1000, K, B) + Z, dim=-1)


def posterior(loc: torch.Tensor, kappa: torch.Tensor | float = 1.0) -> VonMisesFisher:
    kappas = torch.as_tensor(kappa, dtype=DOUBLE).expand(loc.shape[:-1])
    return VonMisesFisher(loc, kappas, validate_args=False)


@pytest.mark.parametrize(
    ("loss", "rolled", "theirs"),
    [
        (PublishedMCInfoNCE(20.0, K), False, 0.00813648746013157),
        (PublishedMCInfoNCE(20.0, K), True, 0.04538531724552508),
        (PublishedHIB(1.0, 0.0, K), False, 0.7404824060511794),
        (PublishedHIB(1.0, 0.0, K), True, 1.073613450388316),
        (PublishedHIB(2.0, 1.0, K), False, 0.730593995331123),
        (PublishedHIB(2.0, 1.0, K), True, 1.3546937261046412),
    ],
)
def test_sampled_losses_agree_with_the_authors_on_common_draws(
    loss: nn.Module, rolled: bool, theirs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: Iterator[torch.Tensor] = iter((Z, POSITIVES, NEGATIVES))
    monkeypatch.setattr(objectives, "published_sample", lambda *_: next(draws))
    parts = [posterior(Z[0]), posterior(POSITIVES[0])]
    negatives = None if rolled else posterior(NEGATIVES[0])
    found = PublishedSampler(loss)(*parts, negatives)
    # their log K is a single-precision number
    assert found.item() == pytest.approx(theirs, rel=0, abs=5e-8)


@pytest.mark.parametrize(
    ("n_neg", "theirs"), [(1, 0.023167446073000073), (2, 0.027499695914037423)]
)
def test_elk_agrees_with_the_authors(n_neg: int, theirs: float) -> None:
    kappa = 16 + 4 * torch.arange(B, dtype=DOUBLE)
    negatives = posterior(NEGATIVES[0, :, :n_neg], (kappa + 2)[:, None])
    pair = posterior(Z[0], kappa), posterior(POSITIVES[0], kappa + 1)
    found = PublishedELK(0.5)(*pair, negatives)
    assert found.item() == pytest.approx(theirs, rel=1e-10)


@pytest.mark.parametrize(
    ("rolled", "theirs"), [(False, 7.2437882239206886e-06), (True, 0.10901722071684627)]
)
def test_infonce_is_their_loss_with_one_sample_at_the_mode(
    rolled: bool, theirs: float
) -> None:
    negatives = None if rolled else posterior(NEGATIVES[0])
    pair = posterior(Z[0]), posterior(POSITIVES[0])
    found = PublishedInfoNCE(20.0)(*pair, negatives)
    assert found.item() == pytest.approx(theirs, rel=1e-9)


def test_the_acceptance_agrees_with_the_authors() -> None:
    theirs = [
        0.9990657232039787,
        0.9903446732008504,
        0.9754043721633958,
        0.965249595503504,
    ]
    cosine = (Z[0] * POSITIVES[0]).sum(-1)
    ours = published_acceptance(cosine, 20.0, 10, fitted=True)
    # their constant is a single-precision number
    assert ours.tolist() == pytest.approx(theirs, rel=1e-8)
    assert published_acceptance(cosine, 20.0, 10).tolist() != pytest.approx(theirs)


def waves(start: int, *shape: int) -> torch.Tensor:
    """Inputs between 0 and 1 that need no generator."""
    i = torch.arange(start, start + math.prod(shape), dtype=DOUBLE)
    return (torch.sin(i).view(shape) + 1) / 2


def their_encoder() -> PublishedEncoder:
    """Their Encoder(n_hidden=1, dim_hidden=8) with weights 0.5 sin(1.3 i), rescaled on
    20 inputs."""
    encoder = PublishedEncoder(mlp([10, 8, 8, 10]), mlp([10, 8, 8, 1])).double()
    start = 0
    for p in encoder.parameters():
        i = torch.arange(start, start + p.numel(), dtype=DOUBLE)
        p.data.copy_((0.5 * torch.sin(1.3 * i)).view_as(p))
        start += p.numel()
    encoder.set_range(waves(0, 20, 10), 16.0, 32.0)
    return encoder


def test_the_encoder_agrees_with_the_authors() -> None:
    q = their_encoder()(waves(0, 20, 10)[:3] + 0.3)
    assert q.concentration.tolist() == pytest.approx(
        [22.722565349916483, 23.286175631483488, 32.05059618512551], rel=1e-6
    )
    assert q.loc[:, 0].tolist() == pytest.approx(
        [-0.38614029506098824, -0.2476229829589444, -0.3451196889024031], rel=1e-6
    )


def test_whole_trainings_agree_with_the_authors_on_common_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their loop for four steps of each phase: rates, halving, Adam's fresh start, what
    rests, the rolled negative first and fresh ones after."""
    losses = [
        *(0.6531323797463284, 0.5275206654611301),
        *(0.37623946424103777, 0.3546599413786331),
        *(0.3700657476436473, 0.38434533799114745),
        *(0.3004790372808809, 0.3084885931220114),
    ]

    def spread(loc: torch.Tensor, kappa: torch.Tensor, n: int, *_: Any) -> torch.Tensor:
        noise = points(0, n, *loc.shape[:-1])
        return nn.functional.normalize(loc + noise / kappa.sqrt()[..., None], dim=-1)

    steps = itertools.count()

    def draw(n: int, n_neg: int, _: torch.Generator) -> Pairs:
        x = waves(1000 * next(steps), n, 2 + M, 10)
        return Pairs(x[:, 0], x[:, 1], x[:, 2:] if n_neg else None)

    monkeypatch.setattr(objectives, "published_sample", spread)
    row = published_row()
    small: Any = {"steps": 8, "batch_size": B, "n_samples": K, "n_neg": M}
    small |= {"lr_mu": 0.01, "lr_kappa": 0.01, "n_points": 8}
    settings = WorldSettings(**{**row.changes, **row.at["cpu"], **small})
    encoder, config = their_encoder(), training_config(settings, 4)
    run = train_encoder(encoder, make_loss(settings), draw, config)
    assert run.curve["loss"] == pytest.approx(losses, rel=1e-6)
    q = encoder(waves(0, 20, 10)[:3] + 0.3)
    assert q.concentration.tolist() == pytest.approx(
        [11.572108691709369, 18.777179336815713, 13.511918603176266], rel=1e-5
    )
    assert q.loc[:, 0].tolist() == pytest.approx(
        [-0.36657325798614215, -0.3340233418542387, -0.36875661803775506], rel=1e-5
    )


def test_the_encoder_has_no_cap_and_refuses_ranges_without_width() -> None:
    encoder = published_encoder(4, 3, [8])
    encoder.shift.fill_(40.0)
    assert encoder(torch.rand(5, 4)).concentration.min() > 1e17
    with pytest.raises(ValueError, match="low and high"):
        encoder.set_range(torch.rand(5, 4), 32.0, 16.0)


def test_own_negatives_are_sampled_by_the_published_rule() -> None:
    """At D = 64 and kappa = 16 the published rule forgets the direction; the loss of
    points does not."""
    torch.manual_seed(0)
    loc = nn.functional.normalize(torch.randn(64, 64), dim=-1)
    kappa = torch.full((64,), 16.0)
    q = VonMisesFisher(loc, kappa)
    own = VonMisesFisher(loc[:, None], kappa[:, None])
    sampler = PublishedSampler(PublishedMCInfoNCE(20.0, 128))
    parts = [objectives._PublishedDraws(p.loc, p.concentration) for p in (q, q, own)]
    draws = sampler.draw(*parts, None)
    cosine = draws.cosines(*draws.sampled, *draws.fixed)
    assert cosine.shape == (128, 64, 2) and cosine.mean().abs() < 0.005  # exact: 0.056


def test_one_switch_turns_all_of_it_on() -> None:
    switched = WorldSettings(published=True, smoothing_steps=20, width=8)
    whole = spelled_out(switched)
    assert AUTHORS.items() <= {k: getattr(whole, k) for k in AUTHORS}.items()
    world = make_world(switched, 4)
    assert type(world) is AuthorsProcess and world.fitted
    encoder, _ = fresh_encoder(switched, world, 4)
    assert isinstance(encoder, PublishedEncoder) and not encoder.joint
    kinds = {
        "mcinfonce": PublishedMCInfoNCE,
        "hib": PublishedHIB,
        "elk": PublishedELK,
        "infonce": PublishedInfoNCE,
    }
    for name, kind in kinds.items():
        loss = make_loss(WorldSettings(published=True, loss=name))
        assert isinstance(loss, PublishedSampler) and type(loss.loss) is kind
    joint = WorldSettings(published=True, shared_backbone=True, smoothing_steps=20)
    assert type(make_world(joint, 4)) is AuthorsJointProcess
    kept, _ = fresh_encoder(joint, make_world(joint, 4), 4)
    assert isinstance(kept, PublishedEncoder) and kept.joint


def test_rows_as_published_leave_nothing_to_the_switch() -> None:
    for changes in ({}, {"dim": 2, "n_neg": 1}, {"shared_backbone": True}):
        row = published_row(changes)
        assert row.seeds == (4, 5, 6, 7, 8)
        for at in row.at.values():
            settings = WorldSettings(**{**row.changes, **at})
            assert spelled_out(settings) == settings


@pytest.mark.parametrize("published", [False, True])
def test_an_error_of_kappa_stands_beside_two_that_cost_nothing(published: bool) -> None:
    small = {"steps": 2, "batch_size": 8, "width": 8, "n_neg": 2, "n_eval": 300}
    small |= {"n_paired": 20, "smoothing_steps": 20, "pool": 64, "n_points": 1}
    settings = WorldSettings(**small, published=published, lr_mu=0.0, lr_kappa=0.0)
    metrics = measure_world(settings, 4, None, "cpu").metrics
    assert metrics["kappa_mae"] == metrics["kappa_mae_untrained"]  # a rate of zero
    assert 0 < metrics["kappa_mae_constant"] < metrics["kappa_mae_untrained"]
    sure = WorldSettings(**small, published=published, family="dirac")
    assert "kappa_mae_constant" not in measure_world(sure, 4, None, "cpu").metrics
