"""Kappas that say nothing are noticed: before training, inside the loop, at its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from training_world import Encoder, draw

from pcl.encoders import NormEncoder, mlp_encoder
from pcl.heads import UncertaintyHead, prepare, train_head
from pcl.losses import ExactInfoNCE
from pcl.pairs import FeaturePairs
from pcl.training import Config, train_encoder
from pcl.vmf import VonMisesFisher
from pcl.watch import KappaWarning, complaints, look, ranking

SHORT = Config(steps=6, batch_size=16, kappa_from=0.0)
X = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))


@contextmanager
def said() -> Iterator[list[str]]:
    """What the watch says in the block, one entry a warning."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lines
    kappa = [w for w in caught if issubclass(w.category, KappaWarning)]
    lines += [str(w.message) for w in kappa]
    assert all("\n" not in line for line in lines), "one line each"


def trained(encoder: nn.Module, **options: object) -> Tensor:
    train_encoder(encoder, ExactInfoNCE(10.0), draw, SHORT, **options)  # type: ignore[arg-type]
    return torch.cat([p.detach().flatten() for p in encoder.parameters()])


def stuck(bias: float) -> Encoder:
    """Its kappa is 1 + e^bias for every input, and cannot change."""
    encoder = Encoder()
    with torch.no_grad():
        encoder.kappa_net[-1].weight.zero_()
        encoder.kappa_net[-1].bias.fill_(bias)
    return encoder.requires_grad_(False)


def test_the_loop_says_when_kappa_is_constant_and_changes_nothing_by_looking() -> None:
    encoder, alone = stuck(2.0), stuck(2.0)
    for one in (encoder, alone):
        one.mu_net.requires_grad_(True)
    with said() as lines:
        looked_at = trained(encoder, validation=(X, None))
    assert [line.split(":")[0] for line in lines] == ["step 3 of 6", "step 6 of 6"]
    assert all("kappa is 8.39 for nearly every input" in line for line in lines)
    assert all("NormEncoder" in line for line in lines), "and what to do instead"
    with said() as lines:
        assert torch.equal(trained(alone), looked_at)
        assert lines == []


def test_the_loop_says_when_kappa_is_at_its_bound() -> None:
    encoder = mlp_encoder(6, 4, hidden=[8], shared=True)
    with torch.no_grad():
        encoder.kappa_net[-1].bias.fill_(60.0)
    with said() as lines:
        trained(encoder, validation=(X, None))
    assert len(lines) == 2 and all("at its upper bound" in line for line in lines)


def test_the_loop_is_silent_where_all_is_well() -> None:
    with said() as lines:
        trained(Encoder(), validation=(X, None))
    assert lines == []


class Told(nn.Module):
    """Returns what it was given, so that every case can be posed."""

    def __init__(self, loc: Tensor, kappa: Tensor) -> None:
        super().__init__()
        self.loc, self.kappa = loc, nn.Parameter(kappa)

    def forward(self, i: Tensor) -> VonMisesFisher:
        return VonMisesFisher(self.loc[i], self.kappa[i], validate_args=False)


def case(order: str) -> tuple[Told, Tensor, Tensor]:
    """Classes on a sphere, blurred; kappa knows the blur, or not, or the wrong way."""
    rng = torch.Generator().manual_seed(1)
    labels = torch.arange(400) % 4
    blur = torch.rand(400, 1, generator=rng)
    centres = torch.eye(4)[labels]
    loc = normalize(centres + blur * torch.randn(400, 4, generator=rng), dim=-1)
    known = {
        "knows": 1 / (0.1 + blur[:, 0]),
        "shuffled": 1 + torch.rand(400, generator=rng),
        "reversed": 0.1 + blur[:, 0],
    }
    return Told(loc, known[order]), torch.arange(400), labels


@pytest.mark.parametrize("order", ["knows", "shuffled", "reversed"])
def test_mistakes_are_known_or_it_is_said_that_they_are_not(order: str) -> None:
    encoder, x, labels = case(order)
    with said() as lines:
        found = look(encoder, x, labels, "afterwards")
    if order == "knows":
        assert found == {} and lines == []
    else:
        (line,) = lines
        assert line.startswith("afterwards: kappa knows held-out mistakes no better")
        assert list(found) == ["chance"]


def test_few_mistakes_are_no_ground_for_a_word() -> None:
    encoder, _, labels = case("reversed")
    near = torch.randn(400, 4, generator=torch.Generator().manual_seed(2))
    loc = normalize(torch.eye(4)[labels] + 1e-3 * near, dim=-1)
    labels[:2] = 3  # two slips, and whoever has one of them for a neighbour
    q = VonMisesFisher(loc, encoder.kappa.detach())
    assert complaints(q, labels) == {}


def test_a_certainty_that_is_not_a_number_is_the_least_certain() -> None:
    right = torch.tensor([True, True, False])
    assert ranking(torch.tensor([1.0, 2.0, math.nan]), right).auroc == 1.0
    assert ranking(torch.tensor([math.nan, 2.0, 1.0]), right).auroc == 0.5


# ---- before training


def test_a_kappa_of_its_own_on_pairs_by_class_is_warned_of_when_chosen() -> None:
    labels = torch.arange(200) % 5
    own, length = mlp_encoder(6, 4, hidden=[8]), NormEncoder(nn.Linear(6, 4))
    loss, one = ExactInfoNCE(10.0), Config(steps=1, batch_size=16)
    with said() as lines:
        train_encoder(own, loss, FeaturePairs(X, labels), one)
    (line,) = lines
    assert "pairs by class" in line and "pcl.encoders.NormEncoder" in line
    soft = nn.functional.one_hot(labels).float()
    with said() as lines:
        train_encoder(own, loss, FeaturePairs(X, soft), one)
    assert len(lines) == 1
    with said() as lines:  # the length, and pairs that are not by class
        train_encoder(length, loss, FeaturePairs(X, labels), one)
        train_encoder(own, loss, draw, one)
    assert lines == []


def test_one_class_is_warned_of_and_two_are_not() -> None:
    fast = {"dim": 3, "hidden": 8, "steps": 2, "batch_size": 16}
    with said() as lines:
        train_head(X, torch.zeros(200, dtype=torch.long), **fast)
    assert "targets name one class" in lines[0] and "two classes or more" in lines[0]
    with said() as lines:
        train_head(X, torch.arange(200) % 2, **fast)
    assert lines == []


def test_one_column_of_huge_scale_does_not_silence_the_others() -> None:
    wild = torch.cat([X, 1e5 * X[:, :1].roll(1, 0)], 1)
    head = UncertaintyHead(7, dim=3, hidden=8)
    prepare(head, wild, 20.0)
    scaled = ((wild - head.mean) / head.scale).std(0)
    torch.testing.assert_close(scaled, torch.ones(7), rtol=1e-3, atol=1e-3)
