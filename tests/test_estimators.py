"""Estimators: the registry, its first members, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pcl.encoders import NormEncoder
from pcl.estimators import (
    ESTIMATORS,
    TOGETHER,
    Prediction,
    by_kappa,
    check_prediction,
    encode,
    estimator,
    fit_probe,
    register_estimator,
)
from pcl.marginal import log_marginal
from pcl.names import UnknownName
from pcl.proxies import ProxyELK, ProxyELNivMF
from pcl.published.estimators import (
    RELEASED,
    PublishedHeteroscedastic,
    PublishedMatches,
    PublishedRandomFeatures,
    ReleasedELK,
    ReleasedInfoNCE,
    ReleasedMCInfoNCE,
    RoundNivMF,
    dropout_as_published,
    hib_as_published,
    nivmf_as_published,
    released_log_normalizer,
)
from pcl.uncertainties import (
    ELEVEN,
    Adapter,
    Heteroscedastic,
    Matches,
    RandomFeatures,
    Recipe,
    SpectralBound,
    agreement,
    by_ce,
    by_ensemble,
    by_infonce,
    by_margin,
    by_mcdropout,
    by_neighbour_within,
    by_pair,
    by_posterior,
    fit_dropout,
    fit_posterior,
    numbered,
    posteriors,
    seeded,
)
from pcl.vmf import VonMisesFisher


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


TINY = Recipe(dim=4, hidden=8, steps=3, batch_size=16)
TRAINED = (*ELEVEN, "exact-posterior", "pair")


def options(name: str) -> dict[str, object]:
    """What a builder needs besides features and labels."""
    torch.manual_seed(0)
    if name == "kappa":
        return {"encoder": NormEncoder(nn.Linear(3, 4))}
    if name == "energy":
        return {"classifier": nn.Linear(3, 5)}
    return {"recipe": TINY} if name in TRAINED else {}


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
    if name in TOGETHER:
        with pytest.raises(ValueError, match="k must lie between"):
            build(features, labels, seed=3, **options(name))(x[2:3])
        return
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
            estimator(name)(wrong, labels, **options(name))
    with pytest.raises(ValueError, match=r"rows of shape \(3,\)"):
        estimator(name)(features, labels, **options(name))(x[:, :2])


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


# The eleven, and what the release has instead of them.


def test_the_eleven_and_the_baselines_are_known_by_name():
    assert len(set(ELEVEN)) == 11
    assert {*TRAINED, "energy", "feature-norm", "neighbour-within"} <= ESTIMATORS.keys()
    assert TOGETHER <= ESTIMATORS.keys() and not TOGETHER & set(ELEVEN)


@pytest.mark.parametrize("name", TRAINED)
def test_training_follows_the_seed_and_the_labels(name, data):
    features, labels, x = data
    build = estimator(name)
    first, other = (build(features, labels, seed=s, recipe=TINY)(x) for s in (1, 2))
    assert not first.certainty.equal(other.certainty)
    turned = build(features, labels.roll(1) // 2, seed=1, recipe=TINY)(x)
    assert not first.certainty.equal(turned.certainty)


def test_an_adapter_standardises_and_survives_constant_features():
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)) * 5 + 3
    features[:, 2] = 7.0
    body = Adapter(features, TINY)
    z = (features - body.mean) / body.scale
    assert z.isfinite().all() and (z[:, 2] == 0).all()
    assert z[:, [0, 1, 3]].std(0).sub(1).abs().max() < 1e-4
    flat = Adapter(torch.ones(5, 4), TINY)
    assert flat(torch.ones(5, 4)).isfinite().all()


def test_classes_are_numbered_and_shares_become_the_largest():
    kinds, n = numbered(torch.tensor([7, 3, 7, 9]))
    assert kinds.tolist() == [1, 0, 1, 2] and n == 3
    soft = torch.tensor([[0.2, 0.8], [0.9, 0.1]])
    assert numbered(soft)[0].tolist() == [1, 0]


def test_views_make_pairs_without_labels_and_nothing_does_not(data):
    features, labels, x = data
    looks = torch.stack([features, features + 0.01], 1)
    found = by_infonce(features, views=looks, recipe=TINY)(x)
    other = by_infonce(features, labels, recipe=TINY)(x)
    assert not found.certainty.equal(other.certainty)
    with pytest.raises(ValueError, match="views"):
        by_infonce(features, recipe=TINY)


def test_smoothed_labels_are_less_sure(data):
    features, labels, x = data
    long = Recipe(dim=4, hidden=8, steps=60, rate=1e-2, batch_size=32)
    plain, smooth = (
        by_ce(features, labels, recipe=long, smoothing=s)(x) for s in (0.0, 0.3)
    )
    assert smooth.certainty.mean() < plain.certainty.mean()


def test_a_start_of_kappa_is_kept():
    features = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    for kappa in (3.0, 1000.0):
        q = posteriors(features, TINY, 0, kappa)(features)
        kappas = q.concentration.detach()
        assert float(kappas.median()) == pytest.approx(kappa, rel=0.3)


def test_nivmf_equals_elk_where_k_is_round_and_not_elsewhere():
    torch.manual_seed(0)
    elk = ProxyELK(4, 6, kappa=9.0)
    axes = ProxyELNivMF(4, 6, kappa=9.0, n_samples=60_000)
    axes.directions = elk.directions
    loc = nn.functional.normalize(torch.randn(5, 6), dim=-1)
    q = VonMisesFisher(loc, torch.full((5,), 25.0))
    with torch.no_grad():
        gap = (axes.logits(q) - elk.logits(q)).abs().max()
        axes.log_concentration[:, 1] += 0.7
        moved = (axes.logits(q) - elk.logits(q)).abs().max()
    assert gap < 0.04 and moved > 0.4


def test_nivmf_learns_k_and_the_release_does_not(data, monkeypatch):
    features, labels, x = data
    made = []
    for kind in (ProxyELNivMF, RoundNivMF):
        monkeypatch.setattr(
            kind, "read", lambda self, q, kind=kind: made.append(self) or q
        )
    estimator("nivmf")(features, labels, recipe=TINY)(x)
    learned = made[-1].log_concentration
    nivmf_as_published(features, labels, recipe=TINY)(x)
    fixed = made[-1].log_concentration
    assert learned.std() > 0 and fixed.std() == 0
    assert not made[-1].directions.requires_grad


def test_a_match_and_none_are_all_there_is_and_hib_needs_its_pairs(data):
    features, labels, x = data
    q = posteriors(features, TINY, 0, 30.0)(features[:8])
    with torch.no_grad():
        loss = Matches(8.0, -1.0, 16)
        match, none = loss.log_match(q)
        torch.testing.assert_close(match.exp() + none.exp(), torch.ones(8, 8))
        same = torch.arange(8) % 2
        torch.manual_seed(3)
        value = loss(q, same)
        torch.manual_seed(3)
        match, none = loss.log_match(q)
    terms = {True: [], False: []}
    for i in range(8):
        for j in range(8):
            if i != j:
                kind = bool(same[i] == same[j])
                terms[kind].append(float((match if kind else none)[i, j]))
    wanted = -sum(sum(v) / len(v) for v in terms.values())
    assert float(value) == pytest.approx(wanted, rel=1e-5)
    assert hib_as_published(features, labels, recipe=TINY)(x).certainty.shape == (7,)


def heteroscedastic(
    kind: type[Heteroscedastic],
) -> tuple[Heteroscedastic, torch.Tensor]:
    torch.manual_seed(1)
    net = kind(nn.Identity(), 6, 3, 1.0, 16, 0)
    return net, torch.randn(1, 6)


def test_het_xl_draws_the_covariance_it_says_and_the_release_rank_two():
    normals = torch.randn(300_000, 1, 7, generator=torch.Generator().manual_seed(2))
    for kind in (Heteroscedastic, PublishedHeteroscedastic):
        net, e = heteroscedastic(kind)
        with torch.no_grad():
            v, d = net.covariance(e)
            wanted = v.T @ v + torch.diag(d[0])
            found = net.noise(e, normals)[:, 0].T.cov()
            log_det = net.log_det(e)[0]
        right = kind is Heteroscedastic
        off = float((found - wanted).norm() / wanted.norm())
        assert (off < 0.02) == right and (off > 0.2) == (not right)
        rank = int(torch.linalg.matrix_rank(found, rtol=1e-4))
        assert rank == (6 if right else 2)
        gap = abs(float(log_det - torch.logdet(wanted)))
        assert (gap < 1e-4) == right and (gap > 0.5) == (not right)


def test_het_xl_is_sure_by_either_and_refuses_a_third(data):
    features, labels, x = data
    found = [
        estimator("het-xl")(features, labels, recipe=TINY, by=by)(x).certainty
        for by in ("entropy", "det")
    ]
    assert not found[0].equal(found[1])
    with pytest.raises(UnknownName):
        estimator("het-xl")(features, labels, recipe=TINY, by="trace")


def test_sngp_has_the_variance_of_the_closed_form_and_the_release_noise():
    features = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    for kind in (RandomFeatures, PublishedRandomFeatures):
        torch.manual_seed(0)
        net = kind(nn.Identity(), 6, 4, 64, 0.5)
        net.see(features[:200])
        net.see(features[200:])
        with torch.no_grad():
            seen, new = net.cosines(features).double(), net.cosines(2 - features)
            closed = torch.eye(64).double() + seen.T @ seen
            new = new.double()
            wanted = ((new @ closed.inverse()) * new).sum(-1)
            found = net.variance(2 - features).double()
        right = kind is RandomFeatures
        assert ((found - wanted).abs().max() < 1e-5) == right
        assert ((found.abs().max() < 1e-3) and bool((found < 0).any())) == (not right)


def test_a_spectral_bound_binds_only_what_is_larger():
    torch.manual_seed(0)
    for scale in (0.01, 40.0):
        weight = scale * torch.randn(20, 12)
        limit = SpectralBound(weight, 2.0)
        for _ in range(60):
            found = limit(weight)
        norm = float(torch.linalg.matrix_norm(found, 2))
        assert norm < 2.01
        assert found.equal(weight) == (scale < 1)
        assert limit.eval()(weight).equal(limit(weight))


def test_agreement_is_by_the_mean_or_by_the_members():
    probs = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]])
    assert agreement(probs, "entropy").item() == pytest.approx(-math.log(2))
    inner = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert agreement(probs, "jsd").item() == pytest.approx(-(math.log(2) - inner))
    alike = probs[:1].repeat(3, 1, 1)
    assert agreement(alike, "jsd").item() == pytest.approx(0, abs=1e-6)
    with pytest.raises(UnknownName):
        agreement(probs, "variance")


def test_dropout_is_on_at_test_and_off_in_the_release(data):
    features, labels, x = data
    how = {"recipe": TINY, "rate": 0.3, "by": "jsd"}
    on = by_mcdropout(features, labels, **how)(x).certainty
    off = dropout_as_published(features, labels, **how)(x).certainty
    assert on.min() < -1e-4 and off.abs().max() < 1e-6
    net, _, _ = fit_dropout(features, labels, 0, TINY, 0.3)
    found = by_mcdropout(features, labels, **how)(x)
    assert found.embedding.equal(net.embed(x))  # no unit of the embedding is off


def test_released_dropout_of_the_other_backbone_blurs_the_embedding(data):
    features, labels, x = data
    how = {"recipe": TINY, "rate": 0.3, "by": "jsd"}
    make = dropout_as_published(features, labels, noisy=True, **how)
    clean, found = by_mcdropout(features, labels, **how)(x), make(x)
    assert found.certainty.min() < -1e-4  # its passes differ
    assert not found.embedding.equal(clean.embedding)  # the last of them is retrieved
    assert found.embedding.equal(make(x).embedding)
    net, _, _ = fit_dropout(features, labels, 0, TINY, 0.3)
    with seeded(1):
        passes = [net.train().embed(x) for _ in range(10)]
    assert found.embedding.equal(passes[-1])


def test_ensemble_heads_differ_and_share_an_embedding(data):
    features, labels, x = data
    found = by_ensemble(features, labels, recipe=TINY, by="jsd", n_members=3)(x)
    assert (found.certainty < 0).all() and found.logits.shape == (7, 3)
    torch.testing.assert_close(found.logits.exp().sum(-1), torch.ones(7))


def test_a_pair_is_scored_by_both_posteriors_and_their_angle(data):
    features, labels, x = data
    encoder = fit_posterior(features, labels, 0, TINY, 20.0)
    q = encode(encoder, x)
    for own in (True, False):
        found = by_pair(features, labels, recipe=TINY, own=own)(x)
        where = nn.functional.normalize(q.loc if own else x, dim=-1).double()
        cosines = where @ where.T - 3 * torch.eye(7)
        for i in range(7):
            j = int(cosines[i].argmax())
            cos = (q.loc[i] @ q.loc[j]).clamp(-1, 1)
            pair = q.concentration[i], q.concentration[j]
            wanted = log_marginal(cos, *pair, 20.0, 4)
            torch.testing.assert_close(found.certainty[i], wanted)
    kappa = by_posterior(features, labels, recipe=TINY)(x).certainty
    torch.testing.assert_close(kappa, q.concentration)


def test_the_neighbour_within_leaves_the_item_out(data):
    features, _, x = data
    found = by_neighbour_within(features)(torch.cat([x, x[:1]]))
    assert found.certainty[0].item() == pytest.approx(1)  # its copy is another item
    assert found.certainty[1] < 1


def test_a_margin_is_over_the_crowds_of_both_partners(data):
    features, _, x = data
    for both in (True, False):
        found = by_margin(features, share=0.5, both=both)(x)  # k is 4 of 7
        unit = nn.functional.normalize(x, dim=-1).double()
        cosines = unit @ unit.T - 3 * torch.eye(7)
        ordered = cosines.sort(-1, descending=True).values
        partner = cosines.argmax(-1)
        wanted = ordered[:, 0] - ordered[:, 3]
        wanted = wanted + (ordered[:, 0] - ordered[partner, 3] if both else 0)
        torch.testing.assert_close(found.certainty, wanted)
    for wrong in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="share must lie"):
            by_margin(features, share=wrong)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_form_learns_otherwise_than_its_formula(data, name):
    features, labels, x = data
    right, released = (
        how(features, labels, recipe=TINY)(x)
        for how in (estimator(name), RELEASED[name])
    )
    assert released.certainty.shape == (7,) and bool(
        released.certainty.isfinite().all()
    )
    assert not right.certainty.equal(released.certainty)


def test_a_released_match_keeps_its_slope_and_draws_by_the_usual_rule():
    loss = PublishedMatches(8.0, 0.0, 500)
    assert not any(p.requires_grad for p in loss.parameters())
    q = VonMisesFisher(torch.eye(64)[:1], torch.tensor([16.0]))
    torch.manual_seed(0)
    along = [float(m.draw(q)[..., 0].mean()) for m in (Matches(8.0, 0.0, 500), loss)]
    assert along[1] < along[0] - 0.1


def test_a_released_contrast_leaves_the_positive_out_and_counts_itself():
    torch.manual_seed(0)
    ends = nn.functional.normalize(torch.randn(6, 5, dtype=torch.float64), dim=-1)
    e = (7.0 * ends @ ends.T).exp()
    rows = []
    for i in range(6):
        mine = (i + 3) % 6
        below = 1 + sum(e[i, j] for j in range(6) if j not in (i, mine))
        rows.append(-((e[i, mine] + 1) / below).log())
    wanted = torch.stack(rows).mean()
    for kappa, loss, tolerance in (
        (3.0, ReleasedInfoNCE(7.0), 1e-9),
        (1e7, ReleasedMCInfoNCE(7.0, 64), 1e-2),
    ):
        sure = torch.full((3,), kappa, dtype=torch.float64)
        pairs = [VonMisesFisher(part, sure) for part in ends.split(3)]
        assert float(loss(*pairs) - wanted) == pytest.approx(0, abs=tolerance)


def test_a_released_normaliser_has_the_slopes_of_its_fits():
    for dim, at, slope in ((512, 8.0, 0.0573), (2048, 1000.0, -0.7710)):
        kappa = torch.tensor(at, dtype=torch.float64, requires_grad=True)
        released_log_normalizer(dim, kappa).backward()
        assert float(kappa.grad) == pytest.approx(slope, abs=1e-3)
    with pytest.raises(ValueError, match="no normaliser for dim 100"):
        released_log_normalizer(100, torch.ones(()))
    right, released = ProxyELK(3, 64, kappa=20.0), ReleasedELK(3, 64, kappa=20.0)
    released.load_state_dict(right.state_dict())
    torch.manual_seed(0)
    loc = nn.functional.normalize(torch.randn(4, 64), dim=-1)
    for kappa, low, high in ((30.0, 0.0, 0.02), (1000.0, 0.3, 10.0)):
        q = VonMisesFisher(loc, torch.full((4,), kappa))
        with torch.no_grad():
            first, second = (one.similarity(q) for one in (right, released))
        first, second = (s - s.mean(1, keepdim=True) for s in (first, second))
        apart = float((first - second).abs().max() / first.abs().max())
        assert low < apart < high  # the fit was made for small concentrations
