"""Conformal caps and class sets: the exact law over 1000 splits, brute-force references
for every score, and errors that name the fix."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import betabinom, chisquare
from torch import Tensor
from torch.nn.functional import normalize

from pcl.conformal import (
    ConformalCaps,
    Threshold,
    adaptive_scores,
    calibrate,
    calibrate_caps,
    calibrate_classes,
    cap_scores,
    class_scores,
    class_sets,
    conformal_rank,
    coverage_range,
    covered_law,
)
from pcl.names import UnknownName
from pcl.retrieval import CredibleRetriever
from pcl.studies.conformal import (
    ConformalSettings,
    draw_split,
    label_sets,
    measure_conformal,
    partner_sets,
)
from pcl.vmf import VonMisesFisher

NAN = float("nan")


def rows(n: int, dim: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(n, dim, generator=g, dtype=torch.float64), dim=-1)


def pairs(n: int, seed: int = 0, dim: int = 5) -> tuple[VonMisesFisher, Tensor]:
    """Posteriors whose concentrations say nothing true, and partners nearby."""
    g = torch.Generator().manual_seed(seed)
    loc = rows(n, dim, seed + 1)
    noise = torch.randn(n, dim, generator=g, dtype=torch.float64)
    kappa = torch.empty(n, dtype=torch.float64).uniform_(0, 4, generator=g).exp()
    return VonMisesFisher(loc, kappa), normalize(loc + 0.3 * noise, dim=-1)


# -- the law


@pytest.mark.parametrize(
    ("n", "m", "level"), [(9, 1, 0.9), (20, 30, 0.5), (200, 300, 0.95)]
)
def test_the_law_is_the_beta_binomial(n: int, m: int, level: float) -> None:
    k = conformal_rank(n, level)
    peer = betabinom(m, k, n + 1 - k)
    np.testing.assert_allclose(
        covered_law(n, m, level), peer.pmf(np.arange(m + 1)), rtol=1e-9, atol=1e-300
    )
    low, high = coverage_range(n, m, level, 0.95)
    assert peer.cdf(round(low * m) - 1) <= 0.025 < peer.cdf(round(low * m)) + 1e-12
    assert peer.cdf(round(high * m)) >= 0.975 - 1e-12


def test_the_rank_reads_the_level_as_written() -> None:
    """0.55 * 100 is above 55 in floating point."""
    assert math.ceil(100 * 0.55) == 56
    assert conformal_rank(99, 0.55) == 55
    assert conformal_rank(9, 0.9) == 9
    for n in range(19, 400):
        assert conformal_rank(n, 0.95) == -((-(n + 1) * 95) // 100)


@pytest.mark.parametrize("score", ["cap", "cosine"])
def test_coverage_over_1000_splits_follows_the_exact_law(score: str) -> None:
    """Random splits of a fixed pool give independent counts with the exact law; the
    chance of a false alarm is below one in 10,000 and the seed is fixed."""
    q, partners = pairs(150)
    scores = cap_scores(q, partners, score)  # type: ignore[arg-type]
    assert scores.unique().numel() == 150
    g, counts = torch.Generator().manual_seed(1), []
    for _ in range(1000):
        mixed = scores[torch.randperm(150, generator=g)]
        limit = calibrate(mixed[:60], 0.9).values
        counts.append(int((mixed[60:] <= limit).sum()))
    law, seen = covered_law(60, 90, 0.9).numpy(), np.bincount(counts, minlength=91)
    edges = [0, 72, 76, 78, 80, 82, 84, 86, 88, 91]  # at least 25 expected in each
    expected = np.add.reduceat(law, edges[:-1]) * 1000
    assert expected.min() > 25
    assert chisquare(np.add.reduceat(seen, edges[:-1]), expected).pvalue > 1e-4
    mean = conformal_rank(60, 0.9) / 61
    sd = math.sqrt(float((law * (np.arange(91) / 90 - mean) ** 2).sum()) / 1000)
    assert abs(np.mean(counts) / 90 - mean) < 4 * sd
    low, high = coverage_range(60, 90, 0.9)
    inside = np.mean([low <= c / 90 <= high for c in counts])
    assert inside > 0.99 - 4 * math.sqrt(0.99 * 0.01 / 1000)


def test_coverage_within_classes_over_1000_splits() -> None:
    """Given who is held out, every class follows its own law."""
    g = torch.Generator().manual_seed(3)
    y = torch.arange(160) % 2
    scores = torch.rand(160, 2, generator=g, dtype=torch.float64)
    scores[y == 1] *= 10  # one threshold would serve this class badly
    hits = torch.zeros(2)
    for _ in range(1000):
        order = torch.randperm(80, generator=g)
        held = torch.cat([2 * order[:40], 2 * order[:40] + 1])
        new = torch.cat([2 * order[40:], 2 * order[40:] + 1])
        limit = calibrate_classes(scores[held], y[held], 0.8, by_class=True)
        found = class_sets(scores[new], limit).gather(1, y[new, None]).squeeze(1)
        hits += torch.stack([found[y[new] == c].double().mean() for c in (0, 1)])
    law = betabinom(40, 33, 8)  # k = ceil(41 * 0.8)
    for share in (hits / 1000).tolist():
        assert abs(share - 33 / 41) < 4 * law.std() / 40 / math.sqrt(1000)


def test_equal_scores_cover_more_never_less() -> None:
    limit = calibrate(torch.zeros(50), 0.9).values
    assert float(limit) == 0  # and a new zero is inside with certainty
    g = torch.Generator().manual_seed(0)
    coarse = torch.randint(3, (400, 60), generator=g).double()
    inside = [row[50:] <= calibrate(row[:50], 0.7).values for row in coarse]
    assert torch.stack(inside).double().mean() > 0.7


# -- caps


def test_the_score_of_a_cap_is_the_mass_left_outside() -> None:
    q, partners = pairs(40)
    level = 1 - torch.exp(-cap_scores(q, partners))
    cosine = (q.loc * partners).sum(-1)
    torch.testing.assert_close(q.credible_cosine(level), cosine, rtol=0, atol=1e-7)


def test_a_far_too_certain_head_still_has_an_order() -> None:
    q, partners = pairs(200)
    sure = VonMisesFisher(q.loc, 50 * q.concentration.clamp(max=20))
    scores = cap_scores(sure, partners)
    assert (scores > 40).sum() > 50  # levels that round to one
    assert scores.isfinite().all() and scores.unique().numel() == 200
    caps = calibrate_caps(sure, partners, 0.5)
    inside = (q.loc * partners).sum(-1) >= caps.cosine(sure) - 1e-9
    assert int(inside.sum()) == conformal_rank(200, 0.5)


@pytest.mark.parametrize("score", ["cap", "cosine"])
def test_retrieval_returns_just_the_items_of_low_score(score: str) -> None:
    q, partners = pairs(80)
    items = rows(300, 5, 9)
    caps = calibrate_caps(q, partners, 0.8, score)  # type: ignore[arg-type]
    sets = caps.query(CredibleRetriever(items), q)
    for i, found in enumerate(sets.split()):
        one = VonMisesFisher(q.loc[i].expand(300, 5), q.concentration[i].expand(300))
        fits = cap_scores(one, items, score)  # type: ignore[arg-type]
        wanted = (fits <= caps.threshold.values).nonzero().squeeze(1)
        assert torch.equal(found.sort().values, wanted)


def test_groups_have_their_own_caps() -> None:
    q, partners = pairs(90)
    groups = torch.arange(90) % 3 * 5  # named 0, 5, 10
    caps = calibrate_caps(q, partners, 0.9, groups=groups)
    for g in (0, 5, 10):
        some = groups == g
        alone = calibrate_caps(
            VonMisesFisher(q.loc[some], q.concentration[some]), partners[some], 0.9
        )
        mine = VonMisesFisher(q.loc[some], q.concentration[some])
        torch.testing.assert_close(alone.cosine(mine), caps.cosine(q, groups)[some])
    assert caps.levels.shape == (3,) and caps.threshold.counts.tolist() == [30] * 3


def test_within_is_query_at_the_same_rim() -> None:
    q, _ = pairs(30)
    base = CredibleRetriever(rows(200, 5, 4), torch.arange(200) % 4)
    by_level, by_rim = base.query(q, 0.9), base.within(q, q.credible_cosine(0.9))
    assert torch.equal(by_level.indices, by_rim.indices)
    assert torch.equal(by_level.n_classes, by_rim.n_classes)  # type: ignore[arg-type]
    assert (base.within(q, -1.0).count == 200).all()
    single = base.within(VonMisesFisher(q.loc[0], q.concentration[0]), 0.5)
    assert single.count.shape == ()
    for wrong in (NAN, torch.zeros(3)):
        with pytest.raises(ValueError, match="cosine must be one number, or one for"):
            base.within(q, wrong)


# -- classes


def aps_reference(p: np.ndarray, u: float, penalty: float, free: int) -> np.ndarray:
    """APS and RAPS word by word, for one image."""
    order = sorted(range(len(p)), key=lambda c: (-p[c], c))
    out = np.empty(len(p))
    for place, c in enumerate(order):
        before = sum(p[other] for other in order[:place])
        out[c] = before + u * p[c] + penalty * max(0, place + 1 - free)
    return out


@pytest.mark.parametrize(("penalty", "free"), [(0.0, 1), (0.07, 2)])
def test_aps_and_raps_against_explicit_loops(penalty: float, free: int) -> None:
    g = torch.Generator().manual_seed(2)
    p = (3 * torch.randn(60, 7, generator=g, dtype=torch.float64)).softmax(-1)
    p[0] = 1 / 7  # ties go by the class's number
    u = torch.rand(60, 1, generator=torch.Generator().manual_seed(5), dtype=p.dtype)
    drawn = adaptive_scores(p, penalty, free, torch.Generator().manual_seed(5))
    whole = adaptive_scores(p, penalty, free)
    for i in range(60):
        told = aps_reference(p[i].numpy(), float(u[i]), penalty, free)
        np.testing.assert_allclose(drawn[i], told, atol=1e-12)
        told = aps_reference(p[i].numpy(), 1.0, penalty, free)
        np.testing.assert_allclose(whole[i], told, atol=1e-12)


def test_class_sets_against_explicit_loops() -> None:
    g = torch.Generator().manual_seed(4)
    p = (2 * torch.randn(300, 5, generator=g, dtype=torch.float64)).softmax(-1)
    y = torch.multinomial(p, 1, generator=g)[:, 0]
    scores = adaptive_scores(p)
    found = class_sets(scores[200:], calibrate_classes(scores[:200], y[:200], 0.9))
    seen = sorted(aps_reference(p[i].numpy(), 1, 0, 1)[y[i]] for i in range(200))
    limit = seen[181 - 1]  # ceil(201 * 0.9)
    for i in range(100):
        told = aps_reference(p[200 + i].numpy(), 1, 0, 1) <= limit + 1e-12
        assert found[i].tolist() == told.tolist()


def test_class_scores_are_those_of_the_nearest_item() -> None:
    q, _ = pairs(25)
    items, labels = rows(60, 5, 7), torch.arange(60) % 3
    labels[labels == 1] = 3  # class 1 has no items
    scores = class_scores(CredibleRetriever(items, labels), q)
    assert scores.shape == (25, 4) and scores[:, 1].isinf().all()
    for c in (0, 2, 3):
        mine = items[labels == c]
        best = mine[(q.loc @ mine.T).argmax(1)]
        torch.testing.assert_close(scores[:, c], cap_scores(q, best))
    sets = CredibleRetriever(items, labels).query(q, 0.8)
    limit = Threshold(
        torch.tensor([-math.log1p(-0.8)], dtype=torch.float64),
        torch.tensor([1]),
        None,
        0.8,
    )
    assert torch.equal(class_sets(scores, limit).sum(1), sets.n_classes)


# -- errors


def test_errors_say_what_to_do() -> None:
    q, partners = pairs(30)
    with pytest.raises(
        ValueError, match=r"8 held-out scores cannot.*at least 9, or ask"
    ):
        calibrate(torch.rand(8), 0.9)
    with pytest.raises(ValueError, match="0 held-out scores cannot"):
        calibrate(torch.empty(0), 0.9)
    with pytest.raises(ValueError, match="0 held-out scores cannot"):
        calibrate(torch.empty(0), 0.9, torch.empty(0, dtype=torch.long))
    for level in (0.0, 1.0, -1.0, NAN):
        with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
            calibrate_caps(q, partners, level)
        with pytest.raises(ValueError, match=r"^level must lie strictly"):
            calibrate(torch.rand(30), level, torch.arange(30) % 2)
    with pytest.raises(ValueError, match="scores must not be NaN: drop"):
        calibrate(torch.tensor([0.0] * 20 + [NAN]), 0.5)
    with pytest.raises(ValueError, match=r"scores must have shape \(n,\)"):
        calibrate(torch.rand(3, 3), 0.5)
    with pytest.raises(ValueError, match="group 7: 1 held-out scores cannot"):
        calibrate(torch.rand(21), 0.9, torch.tensor([1] * 20 + [7]))
    with pytest.raises(ValueError, match="confidence must lie"):
        coverage_range(20, 10, 0.9, 1.0)
    with pytest.raises(ValueError, match="partners must have shape"):
        cap_scores(q, partners[:3])
    with pytest.raises(ValueError, match="partners has rows with NaN"):
        cap_scores(q, partners * NAN)
    with pytest.raises(ValueError, match="concentration has NaN"):
        cap_scores(
            VonMisesFisher(q.loc, q.concentration * NAN, validate_args=False), partners
        )
    with pytest.raises(ValueError, match=r"batch shape \(n,\)"):
        cap_scores(VonMisesFisher(q.loc[0], 3.0), partners[:1])
    with pytest.raises(UnknownName, match="unknown score 'angle'"):
        cap_scores(q, partners, "angle")  # type: ignore[arg-type]


def test_errors_of_groups_and_classes() -> None:
    q, partners = pairs(30)
    plain, by_group = (
        calibrate_caps(q, partners, 0.8, groups=g) for g in (None, torch.arange(30) % 2)
    )
    with pytest.raises(ValueError, match="groups must be given for queries just when"):
        by_group.cosine(q)
    with pytest.raises(ValueError, match="groups must be given for queries just when"):
        plain.cosine(q, torch.arange(30) % 2)
    with pytest.raises(ValueError, match=r"groups \[2\] have no held-out scores"):
        by_group.cosine(q, torch.arange(30) % 3)
    with pytest.raises(ValueError, match="one cosine for all have no level"):
        _ = ConformalCaps(plain.threshold, "cosine").levels
    p = torch.full((20, 3), 1 / 3)
    y = torch.arange(20) % 2
    with pytest.raises(ValueError, match=r"classes \[2\] have no held-out label"):
        calibrate_classes(1 - p, y, 0.5, by_class=True)
    with pytest.raises(ValueError, match="labels must be from 0 to 2"):
        calibrate_classes(1 - p, y + 2, 0.5)
    with pytest.raises(ValueError, match=r"shape \(n, classes\)"):
        calibrate_classes(p[:, 0], y, 0.5)
    limit = calibrate_classes(1 - p, y, 0.5)
    with pytest.raises(ValueError, match="must not be NaN"):
        class_sets(p * NAN, limit)
    with pytest.raises(ValueError, match="as in calibration"):
        class_sets(p, replace(limit, values=torch.zeros(2)))
    with pytest.raises(ValueError, match="sum to 1"):
        adaptive_scores(2 * p)
    with pytest.raises(ValueError, match="none negative or NaN"):
        adaptive_scores(p * NAN)
    with pytest.raises(ValueError, match="must not be negative"):
        adaptive_scores(p, -1.0)
    with pytest.raises(ValueError, match="needs labels"):
        class_scores(CredibleRetriever(partners), q)
    with pytest.raises(ValueError, match="renumber"):
        class_scores(CredibleRetriever(partners, torch.arange(30) - 1), q)


# -- the study


@pytest.fixture(scope="module")
def smoke() -> ConformalSettings:
    from pcl.experiments import experiments, resolve

    found = resolve(experiments()["conformal"], "cifar10h", "smoke")
    return ConformalSettings(**{k: v.value for k, v in found.items()})


def test_parts_of_a_split_are_disjoint_and_partners_have_the_answer(
    smoke: ConformalSettings,
) -> None:
    split = draw_split(smoke, 1)
    assert len(split.database) == 100 and len(split.held_out.answers) == 300
    assert len(split.new.answers) == 100
    for part in (split.held_out, split.new):
        place = (part.partners.loc @ split.database.loc.T).argmax(1)
        own = split.database.labels
        assert own is not None and torch.equal(own[place], part.answers)


def test_the_study_counts_what_its_sets_hold(smoke: ConformalSettings) -> None:
    split = draw_split(smoke, 2)
    told = measure_conformal(smoke, 2, None, "cpu").metrics
    sets = partner_sets(split, smoke)["conformal"]
    assert told["conformal_coverage"] == sets[0].double().mean()
    classes = label_sets(split, smoke, 2)
    hit = classes["by_class"].gather(1, split.new.answers[:, None])
    assert told["class_by_class_coverage"] == hit.double().mean()
    assert "nearest_entropy" not in told and "class_constant_entropy" not in told
    votes = measure_conformal(replace(smoke, answers="votes"), 1, None, "cpu").metrics
    low = coverage_range(300, 100, 0.9, 1 - 1e-6)[0]
    for name, value in [*votes.items(), *told.items()]:
        if name.endswith("_coverage") and "caps" not in name and "recal" not in name:
            assert value >= low, name
