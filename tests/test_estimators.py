"""Estimators: the registry, its first members, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pcl.encoders import NormEncoder
from pcl.estimators import (
    ESTIMATORS,
    Prediction,
    by_kappa,
    check_prediction,
    encode,
    estimator,
    fit_probe,
    register_estimator,
)
from pcl.names import UnknownName


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training features and classes, and other features."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    features = nn.functional.one_hot(labels, 3).float() + 0.3 * torch.randn(
        60, 3, generator=generator
    )
    return features, labels, torch.randn(7, 3, generator=generator)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for name, builder in list(ESTIMATORS.items()):
        monkeypatch.setitem(ESTIMATORS, name, builder)


def options(name: str) -> dict[str, nn.Module]:
    """What a builder needs besides features and labels."""
    torch.manual_seed(0)
    return {"encoder": NormEncoder(nn.Linear(3, 4))} if name == "kappa" else {}


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_member_keeps_the_promise_and_repeats(name, data):
    features, labels, x = data
    build = estimator(name)
    first, second = (
        build(features, labels, seed=3, **options(name))(x) for _ in range(2)
    )
    assert first.embedding.ndim == 2 and first.certainty.shape == (7,)
    assert first.certainty.is_floating_point() and first.certainty.isfinite().all()
    assert first.certainty.equal(second.certainty)
    assert first.embedding.equal(second.embedding)
    one = build(features, labels, seed=3, **options(name))(x[2:3])
    torch.testing.assert_close(one.certainty, first.certainty[2:3])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_no_member_disturbs_the_global_generator(name, data):
    features, labels, x = data
    chosen = options(name)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    estimator(name)(features, labels, **chosen)(x)
    assert torch.rand(3).equal(expected)


def test_members_say_what_their_names_say(data):
    features, labels, x = data
    norm = estimator("feature-norm")(features)(x)
    near = estimator("neighbour")(features)(x)
    sure = estimator("probe-entropy")(features, labels, seed=2)(x)
    for i, row in enumerate(x):
        assert norm.certainty[i].item() == pytest.approx(math.hypot(*row.tolist()))
        cosines = nn.functional.cosine_similarity(row[None], features)
        assert near.certainty[i].item() == pytest.approx(cosines.max().item(), abs=1e-6)
        probs = sure.logits[i].double().softmax(-1).tolist()
        entropy = -sum(p * math.log(p) for p in probs)
        assert sure.certainty[i].item() == pytest.approx(-entropy, rel=1e-4)
    away = estimator("neighbour")(x[:1])(-x[:1])
    assert away.certainty.item() == pytest.approx(-1)  # a cosine keeps its sign
    assert norm.embedding is x and near.embedding is x
    assert sure.embedding is sure.logits and norm.logits is None


def test_a_probe_learns_hard_and_soft_labels_alike(data):
    features, labels, x = data
    soft = nn.functional.one_hot(labels, 3).double()
    found = [
        estimator("probe-entropy")(features, target, seed=1)(x)
        for target in (labels, labels.to(torch.uint8), soft)
    ]
    assert all(other.logits.equal(found[0].logits) for other in found)
    probe = fit_probe(features, soft.float(), seed=1)
    assert probe(x).equal(found[0].logits)
    other = estimator("probe-entropy")(features, labels, seed=2)(x)
    assert not other.logits.equal(found[0].logits)


def test_kappa_is_that_of_the_encoder_in_batches_and_out_of_training_mode(data):
    features, _, x = data
    encoder = NormEncoder(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 4))).train()
    predict = by_kappa(features, encoder=encoder)
    encoder.train()  # as it is when judged between two steps
    found = predict(x)
    with torch.no_grad():
        q = encoder.eval()(x)
    assert found.certainty.equal(q.concentration) and found.embedding.equal(q.loc)
    parts = encode(encoder, x, batch_size=2)
    torch.testing.assert_close(parts.concentration, q.concentration)


def test_kappa_takes_images_and_refuses_networks_without_posteriors(data):
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)

    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(192, 3)

        def forward(self, x):
            return self.last(x.float().flatten(1))

    found = by_kappa(images, encoder=NormEncoder(Pixels()))(images[:2])
    assert found.certainty.shape == (2,)
    with pytest.raises(TypeError, match=r"NormEncoder"):
        by_kappa(images, encoder=Pixels())


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'feature-norm'"):
        estimator("feature-nrom")


def test_another_builder_under_a_taken_name_is_refused_and_the_same_one_replaced(
    registry,
):
    def first(features, labels=None, seed=0):
        return lambda x: Prediction(x, x[:, 0])

    with pytest.raises(ValueError, match="choose another name"):
        register_estimator("neighbour")(first)
    register_estimator("own")(first)
    assert estimator("own")(torch.ones(2, 3))(torch.eye(3)).certainty.tolist() == [
        1.0,
        0.0,
        0.0,
    ]
    again = register_estimator("own")(first)
    assert estimator("own") is again
    del ESTIMATORS["own"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_features_that_are_no_numbers_are_refused_when_built_and_when_asked(
    name, bad, data
):
    features, labels, x = data
    built = estimator(name)(features, labels, **options(name))
    hole, wrong = features.clone(), x.clone()
    hole[0, 1] = wrong[0, 1] = bad
    with pytest.raises(ValueError, match="features has rows with NaN or infinite"):
        estimator(name)(hole, labels, **options(name))
    with pytest.raises(ValueError, match="x has rows with NaN or infinite"):
        built(wrong)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"kappa"}))
def test_images_and_flat_vectors_are_refused_where_features_are_wanted(name, data):
    features, labels, x = data
    for wrong in (torch.zeros(60, 3, 2, 2), torch.zeros(60), torch.zeros(60, 3).long()):
        with pytest.raises(ValueError, match=r"features must be floats .* extract"):
            estimator(name)(wrong, labels)
    with pytest.raises(ValueError, match=r"rows of shape \(3,\)"):
        estimator(name)(features, labels)(x[:, :2])


def test_labels_are_refused_when_missing_or_of_another_kind(data):
    features, labels, _ = data
    build = estimator("probe-entropy")
    shares = nn.functional.one_hot(labels, 3).double()
    with pytest.raises(ValueError, match="pass labels, one for each of the 60"):
        build(features)
    for wrong in (labels[1:], shares[1:], labels.float(), shares.long()):
        with pytest.raises(ValueError, match=r"labels must be \(60,\) whole numbers"):
            build(features, wrong)
    for wrong in (50 * shares, shares - 0.1, shares * math.nan):
        with pytest.raises(ValueError, match="divide counts by their sum"):
            build(features, wrong)


def test_a_prediction_of_another_length_or_without_order_is_refused_by_name(registry):
    x = torch.ones(4, 2)

    def careless(features, labels=None, seed=0):
        return lambda x: Prediction(x, x[1:, 0])

    register_estimator("careless")(careless)
    with pytest.raises(ValueError, match=r"certainty of careless .*\(4,\)"):
        estimator("careless")(x)(x)
    del ESTIMATORS["careless"]
    good = Prediction(x, x[:, 0])
    assert check_prediction(good, 4) is good
    for wrong, message in (
        (good._replace(certainty=x[:, :1]), r"certainty .* shape \(4,\)"),
        (good._replace(embedding=x[:, 0]), r"embedding .* shape \(4, D\)"),
        (good._replace(embedding=x[:3]), r"embedding .* shape \(4, D\)"),
        (good._replace(certainty=x[:, 0] * math.nan), "NaN in it"),
    ):
        with pytest.raises(ValueError, match=message):
            check_prediction(wrong, 4)
