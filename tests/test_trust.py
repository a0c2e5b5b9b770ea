"""Trust: scores against explicit sums, tests of uniformity against their null law,
recalibration against the truth."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from pcl.generative import UniformProcess
from pcl.heads import UncertaintyHead
from pcl.marginal import log_marginal
from pcl.pairs import FeaturePairs
from pcl.trust import (
    Recalibration,
    choose,
    error_of_mean,
    harmonic_tests,
    kappa_interval,
    match_reliability,
    pair_coverage,
    pair_nats,
    recalibrate,
    recalibration_interval,
    uniformity,
)
from pcl.vmf import HypersphericalUniform, VonMisesFisher

PROCESS = UniformProcess(4, kappa_range=(4.0, 60.0), kappa_pos=20.0)


def posteriors(n: int, seed: int = 0) -> tuple[VonMisesFisher, VonMisesFisher]:
    x, x_pos, _ = PROCESS.sample(n, generator=torch.Generator().manual_seed(seed))
    found = [PROCESS.posterior(part) for part in (x, x_pos)]
    first, second = (
        VonMisesFisher(q.loc.float(), q.concentration.float()) for q in found
    )
    return first, second


def spoil(q: VonMisesFisher, a: float, b: float) -> VonMisesFisher:
    return VonMisesFisher(q.loc, a * q.concentration**b)


def test_pair_nats_are_log_probabilities_above_chance() -> None:
    q, q_pos = posteriors(20)
    found = pair_nats(q, q_pos, 20.0, n_candidates=10)
    for i in range(20):
        block = range(10 * (i // 10), 10 * (i // 10) + 10)
        scores = torch.stack(
            [
                log_marginal(
                    (q.loc[i] @ q_pos.loc[j]).reshape(1),
                    q.concentration[i],
                    q_pos.concentration[j],
                    20.0,
                    4,
                )[0]
                for j in block
            ]
        )
        wanted = scores[i % 10] - torch.logsumexp(scores, 0) + math.log(10)
        assert abs(float(found[i] - wanted)) < 1e-4
    assert found.max() <= math.log(10)
    assert len(pair_nats(q, q_pos, 20.0, n_candidates=8)) == 16, (
        "a rest with fewer candidates is left out"
    )
    with pytest.raises(ValueError, match="at least 2"):
        pair_nats(q, q_pos, 20.0, n_candidates=1)


@pytest.mark.parametrize("dim", [2, 3, 4, 8])
def test_p_values_are_uniform_where_the_sphere_is(dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    p_values = []
    for _ in range(150):
        mu = HypersphericalUniform(dim, dtype=torch.float64).sample(
            (120,), generator=generator
        )
        kappa = 3 + 50 * torch.rand(120, dtype=torch.float64, generator=generator)
        p_values.append(
            [d.p_value for d in harmonic_tests(VonMisesFisher(mu, kappa), 3)]
        )
    for column in zip(*p_values, strict=True):
        assert kstest(column, "uniform").pvalue > 1e-3


def test_the_statistic_is_rayleighs_in_degree_one_and_the_sizes_are_those_of_harmonics() -> (
    None
):
    mu = HypersphericalUniform(5, dtype=torch.float64).sample(
        (40,), generator=torch.Generator().manual_seed(0)
    )
    found = harmonic_tests(
        VonMisesFisher(mu, torch.full((40,), 7.0, dtype=torch.float64)), 1
    )[0]
    assert (
        abs(found.statistic - 5 * 40 * float(mu.mean(0).square().sum())) < 1e-9
        and found.dof == 5
    )
    for dim, sizes in ((3, [3, 5, 7, 9]), (2, [2, 2, 2]), (8, [8, 35])):
        mu = torch.nn.functional.normalize(torch.randn(40, dim), dim=-1)
        degrees = harmonic_tests(VonMisesFisher(mu, torch.ones(40)), len(sizes))
        assert [degree.dof for degree in degrees] == sizes


def test_energies_add_up_to_the_divergence() -> None:
    """One direction for all images: the summed posterior is one vMF, whose chi-squared
    divergence is known."""
    kappa, mu = 2.0, torch.zeros(50, 3, dtype=torch.float64)
    mu[:, 0] = 1
    found = harmonic_tests(
        VonMisesFisher(mu, torch.full((50,), kappa, dtype=torch.float64)), 20
    )
    # C(k)^2 / C(2k) * S - 1 on the 2-sphere, C(k) = k / (4 pi sinh k)
    wanted = (kappa / math.sinh(kappa)) ** 2 * math.sinh(2 * kappa) / (2 * kappa) - 1
    assert abs(sum(d.energy for d in found) - wanted) < 1e-9


def test_z_is_one_on_the_sphere_and_spreads_on_a_piece_of_it() -> None:
    q = PROCESS.posterior(PROCESS.draw((1600,), torch.Generator().manual_seed(0)))
    half = q.loc[:, 0] > 0
    whole = uniformity(VonMisesFisher(q.loc[:700], q.concentration[:700]), 20.0)
    piece = uniformity(
        VonMisesFisher(q.loc[half][:700], q.concentration[half][:700]), 20.0
    )
    assert abs(whole.z_mean - 1) < 0.05 and whole.z_spread < 0.1
    assert (
        piece.z_spread > 0.15
        and piece.degrees[0].p_value < 1e-20
        and piece.z_mean > 1.3
    )
    assert "degree 1" in str(piece) and "Z(x)" in str(piece)
    with pytest.raises(ValueError, match="at least 8"):
        uniformity(VonMisesFisher(q.loc[:5], q.concentration[:5]), 20.0)


@pytest.mark.parametrize(("a", "b"), [(0.4, 1.5), (4.0, 0.8), (1.0, 1.0)])
def test_recalibration_finds_the_remedy(a: float, b: float) -> None:
    q, q_pos = posteriors(2048, seed=1)
    found = recalibrate(spoil(q, a, b), spoil(q_pos, a, b), 20.0)
    for kappa in (6.0, 16.0, 40.0):
        mended = found.a * (a * kappa**b) ** found.b
        assert abs(mended / kappa - 1) < 0.25
    assert found.nats_after >= found.nats_before - 1e-6
    levels = torch.tensor([0.2, 0.5, 0.8])
    fresh = [found(spoil(part, a, b)) for part in posteriors(1024, seed=2)]
    assert (pair_coverage(fresh[0], fresh[1], 20.0, levels) - levels).abs().max() < 0.05


def test_recalibration_can_be_built_into_a_head() -> None:
    head = UncertaintyHead(5, 3, 8)
    x = torch.randn(10, 5)
    before = head(x)
    for step in (Recalibration(2.0, 0.5, 0, 0), Recalibration(0.3, 1.2, 0, 0)):
        before = step(before)
        step.apply_to(head)
    torch.testing.assert_close(head(x).concentration, before.concentration)
    torch.testing.assert_close(head(x).loc, before.loc)


def test_true_posteriors_cover_what_they_state_and_spoiled_ones_do_not() -> None:
    q, q_pos = posteriors(2048, seed=3)
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    error = 3.5 * (levels * (1 - levels) / 2048).sqrt()
    assert ((pair_coverage(q, q_pos, 20.0, levels) - levels).abs() < error).all()
    narrow = [spoil(part, 8.0, 1.0) for part in (q, q_pos)]
    assert (pair_coverage(*narrow, 20.0, levels)[1] < 0.45).all()
    assert (
        match_reliability(q, q_pos, 20.0).error
        < match_reliability(*[spoil(p, 0.1, 1.0) for p in (q, q_pos)], 20.0).error
    )


def test_match_reliability_counts_what_happened() -> None:
    q, q_pos = posteriors(24)
    found = match_reliability(q, q_pos, 20.0, n_candidates=6, n_bins=4)
    assert int(found.count.sum()) == 24 * 6
    assert abs(float((found.observed * found.count).sum()) - 24) < 1e-9, (
        "every contest has one winner"
    )
    assert abs(float((found.predicted * found.count).sum()) - 24) < 1e-6, (
        "and its probabilities add up to one"
    )
    with pytest.raises(ValueError, match="n_candidates"):
        match_reliability(q, q_pos, 20.0, n_candidates=25)


def parts(n: int) -> list[FeaturePairs]:
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(6, 8, generator=generator)
    found = []
    for _ in range(3):
        labels = torch.arange(n) % 6
        found.append(
            FeaturePairs(
                centres[labels] + torch.randn(n, 8, generator=generator), labels
            )
        )
    return found


def test_choose_prefers_what_predicts_held_out_pairs() -> None:
    options = {"hidden": 16, "steps": 25, "batch_size": 48, "n_pairs": 512}
    found = choose(*parts(120), dims=(2, 4), kappa_pos=(10.0,), **options)
    assert (
        len(found.candidates) == 2 and found.head is found.heads[found.chosen.dim, 10.0]
    )
    best = max(row.nats for row in found.candidates)
    assert all(abs(row.behind - (best - row.nats)) < 1e-5 for row in found.candidates)
    assert found.chosen.behind <= found.chosen.error and found.test_error > 0
    assert abs(found.test_nats - found.chosen.nats) < 0.5
    with pytest.raises(ValueError, match="dims"):
        choose(*parts(60), dims=())


def test_angles_do_not_lose_digits(recwarn: pytest.WarningsRecorder) -> None:
    """Equal directions are inside every band, opposite ones outside."""
    mu: Tensor = torch.nn.functional.normalize(
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    q = VonMisesFisher(mu, torch.full((4,), 30.0))
    levels = torch.tensor([1e-6, 1 - 1e-6], dtype=torch.float64)
    assert pair_coverage(q, q, 10.0, levels).tolist() == [1.0, 1.0]
    assert pair_coverage(
        q, VonMisesFisher(-mu, q.concentration), 10.0, levels
    ).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_recalibration_needs_no_gradients_from_its_caller(quiet: type) -> None:
    q, q_pos = posteriors(512)
    wanted = recalibrate(q, q_pos, 20.0)
    with quiet():
        inside = [
            VonMisesFisher(part.loc * 1, part.concentration * 1, validate_args=False)
            for part in (q, q_pos)
        ]
        assert recalibrate(inside[0], inside[1], 20.0) == wanted


def test_recalibration_says_when_it_stops_at_a_bound(
    recwarn: pytest.WarningsRecorder,
) -> None:
    assert not recalibrate(*posteriors(512), 20.0).at_bound and not recwarn.list
    turned = [
        VonMisesFisher(part.loc, 400 / part.concentration) for part in posteriors(512)
    ]  # the surer, the wronger
    with pytest.warns(UserWarning, match="more held-out images") as caught:
        found = recalibrate(turned[0], turned[1], 20.0)
    assert (
        found.at_bound
        and found.b == pytest.approx(0.05)
        and caught[0].filename == __file__
    )
    found.apply_to(head := UncertaintyHead(5, 4, 8))
    assert head.card.calibration_at_bound
    Recalibration(2.0, 0.5, 0, 0).apply_to(fresh := UncertaintyHead(5, 4, 8))
    assert not fresh.card.calibration_at_bound


def test_the_error_of_a_mean_counts_every_two_pairs_that_share_an_image() -> None:
    generator = torch.Generator().manual_seed(0)
    i, j = torch.randint(
        9, (2, 60), generator=generator
    )  # the same pair again, turned round, and an image with itself
    values = torch.randn(9, generator=generator)[i] + torch.randn(
        60, generator=generator
    )
    off = (values - values.mean()).double()
    wanted = sum(
        float(off[k] * off[m]) for k in range(60) for m in range(60)
        if {int(i[k]), int(j[k])} & {int(i[m]), int(j[m])}
    )  # fmt: skip
    assert wanted > float(off @ off)
    assert error_of_mean(values, i, j) == pytest.approx(math.sqrt(wanted) / 60)
    apart = torch.arange(120).view(2, 60)
    assert error_of_mean(values, *apart) == pytest.approx(
        float(values.std(correction=0)) / 60**0.5
    )
    assert error_of_mean(values[:50], i, j) == error_of_mean(
        values[:50], i[:50], j[:50]
    )


def test_choose_states_errors_over_images() -> None:
    """Few images in many pairs: as if the pairs were independent, the error would be
    far too small."""
    train, validate, _ = parts(60)
    few = FeaturePairs(validate.features[:24], validate.targets[:24])  # type: ignore[index]
    found = choose(
        train,
        few,
        few,
        dims=(3,),
        kappa_pos=(10.0,),
        hidden=16,
        steps=5,
        batch_size=32,
        n_pairs=1024,
    )
    x, x_pos, _ = few(1024, 0, torch.Generator().manual_seed(1))
    with torch.no_grad():
        nats = pair_nats(found.head(x), found.head(x_pos), 10.0)
    assert found.test_nats == pytest.approx(float(nats.mean()), abs=1e-5)
    assert found.test_error > 2 * float(nats.std()) / 1024**0.5


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_recalibration_names_concentrations_without_a_scale(bad: float) -> None:
    q, q_pos = posteriors(40)
    kappa = q.concentration.clone()
    kappa[3] = bad
    wrong = VonMisesFisher(q.loc, kappa, validate_args=False)
    for pair in ((wrong, q_pos), (q_pos, wrong)):
        with pytest.raises(ValueError, match="concentrations above 0, finite"):
            recalibrate(*pair, 20.0)


def test_levels_may_be_a_list() -> None:
    q, q_pos = posteriors(200)
    listed = pair_coverage(q, q_pos, 20.0, [0.5, 0.9])
    assert torch.equal(listed, pair_coverage(q, q_pos, 20.0, torch.tensor([0.5, 0.9])))


@pytest.mark.filterwarnings("error")
def test_uniformity_takes_posteriors_that_carry_gradients() -> None:
    q, _ = posteriors(64)
    parts = (part.clone().requires_grad_() for part in (q.loc, q.concentration))
    carried = VonMisesFisher(*parts)  # as an encoder gives them
    assert str(uniformity(carried, 20.0)) == str(uniformity(q, 20.0))


def by_weights(
    q: VonMisesFisher, q_pos: VonMisesFisher, weight: Tensor, p: Tensor
) -> Tensor:
    """The loss of one block with every pair weighted, as question and as candidate."""
    logs = [part.concentration.double().log() for part in (q, q_pos)]
    k, k_pos = ((p[0] + p[1].exp() * log).exp() for log in logs)
    cos = (q.loc.double() @ q_pos.loc.double().T).clamp(-1, 1)
    table = log_marginal(cos, k[:, None], k_pos, 20.0, 4)
    bottom = (table + weight.log()).logsumexp(1)
    return (weight * (bottom - table.diagonal())).sum() / weight.sum()


def fitted(
    q: VonMisesFisher, q_pos: VonMisesFisher, weight: Tensor, p: Tensor
) -> Tensor:
    """Its minimiser, by Newton steps with differences of exact slopes."""

    def slope(p: Tensor) -> Tensor:
        p = p.detach().requires_grad_()
        (found,) = torch.autograd.grad(by_weights(q, q_pos, weight, p), p)
        return found

    while slope(p).abs().max() > 1e-8:
        steps = 1e-4 * torch.eye(2, dtype=torch.float64)
        curve = torch.stack([(slope(p + s) - slope(p - s)) / 2e-4 for s in steps])
        p = p - torch.linalg.solve(curve, slope(p))
    return p


def test_the_interval_is_the_infinitesimal_jackknife() -> None:
    """Refit with one pair a little heavier: the sum of the squared moves of log kappa
    is the variance."""
    n = 64
    q, q_pos = posteriors(n, seed=3)
    ones = torch.ones(n, dtype=torch.float64)
    best = fitted(q, q_pos, ones, torch.zeros(2, dtype=torch.float64))
    mend = Recalibration(math.exp(best[0]), math.exp(best[1]), 0.0, 0.0)
    kappa = torch.tensor([5.0, 40.0], dtype=torch.float64)
    moves = []
    for i in range(n):
        heavier = ones.clone()
        heavier[i] += 1e-3
        p = fitted(q, q_pos, heavier, best)
        moves.append(
            (p[0] - best[0] + (p[1].exp() - best[1].exp()) * kappa.log()) / 1e-3
        )
    wanted = torch.stack(moves).square().sum(0).sqrt()
    found = recalibration_interval(mend, q, q_pos, 20.0, kappa, 0.95, None, n)
    half = (found.high / found.low).log() / 2 / 1.959964
    torch.testing.assert_close(half, wanted, rtol=2e-2, atol=0)
    torch.testing.assert_close(found.kappa, mend.a * kappa**mend.b)
    wider = recalibration_interval(mend, q, q_pos, 20.0, kappa, 0.99, None, n)
    assert (wider.high > found.high).all() and (wider.low < found.low).all()


def test_pairs_of_shared_images_widen_the_interval() -> None:
    q, q_pos = posteriors(32, seed=1)
    double = [
        VonMisesFisher(p.loc.repeat(2, 1), p.concentration.repeat(2))
        for p in (q, q_pos)
    ]
    mend, kappa = recalibrate(q, q_pos, 20.0, 32), torch.tensor(16.0)
    names = torch.arange(32).repeat(2), torch.arange(32, 64).repeat(2)
    once = recalibration_interval(mend, q, q_pos, 20.0, kappa, n_candidates=32)
    for images, factor in ((names, 1.0), (None, math.sqrt(0.5))):
        twice = recalibration_interval(
            mend, *double, 20.0, kappa, images=images, n_candidates=32
        )
        ratio = (twice.high / twice.low).log() / (once.high / once.low).log()
        assert abs(float(ratio) - factor) < 1e-6


def test_the_interval_of_one_image_is_where_the_likelihood_is_high() -> None:
    generator = torch.Generator().manual_seed(2)
    mode = torch.zeros(5, dtype=torch.float64)
    mode[0] = 1.0
    kappa, k_pos = (torch.tensor(k, dtype=torch.float64) for k in (12.0, 20.0))
    z = VonMisesFisher(mode, kappa).sample((200,), generator=generator)
    z_pos = VonMisesFisher(z, k_pos).sample(generator=generator)
    mu = VonMisesFisher(z_pos, 2 * kappa).sample(generator=generator)
    partners = VonMisesFisher(mu, (2 * kappa).expand(200))
    found = kappa_interval(mode, partners, 20.0)

    def fits(k: Tensor) -> float:
        return float(log_marginal(mu @ mode, k, 2 * kappa, 20.0, 5).sum())

    peak = fits(found.kappa)
    assert found.low < 12 < found.high
    assert peak >= max(fits(found.kappa * s) for s in (0.999, 1.001))
    for end in (found.low, found.high):
        assert abs(peak - fits(end) - 3.841459 / 2) < 1e-4
    # partners on the spot cannot exclude a point, scattered ones not the uniform law
    same = VonMisesFisher(mode.expand(3, 5), (2 * kappa).expand(3))
    assert float(kappa_interval(mode, same, 20.0).high) == math.inf
    away = VonMisesFisher(-mode.expand(3, 5), (2 * kappa).expand(3))
    assert (
        float(kappa_interval(mode, away, 20.0).low)
        == 0
        == float(kappa_interval(mode, away, 20.0).kappa)
    )


def test_intervals_refuse_what_has_none() -> None:
    q, q_pos = posteriors(16)
    mend, kappa = Recalibration(1.0, 1.0, 0.0, 0.0), torch.tensor(16.0)
    stuck = Recalibration(1.0, 20.0, 0.0, 0.0, at_bound=True)
    with pytest.raises(ValueError, match="stopped at a bound"):
        recalibration_interval(stuck, q, q_pos, 20.0, kappa)
    with pytest.raises(ValueError, match="level must lie between 0 and 1"):
        recalibration_interval(mend, q, q_pos, 20.0, kappa, level=95)
    for bad in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="kappa must be above 0"):
            recalibration_interval(mend, q, q_pos, 20.0, torch.tensor(bad))
    with pytest.raises(ValueError, match="images must name two images"):
        names = torch.arange(3), torch.arange(3)
        recalibration_interval(mend, q, q_pos, 20.0, kappa, images=names)
    far = Recalibration(1e4, 0.1, 0.0, 0.0)
    with pytest.raises(ValueError, match="not a minimum"):
        recalibration_interval(far, q, q_pos, 20.0, kappa)
    with pytest.raises(ValueError, match=r"loc must have shape \(D,\)"):
        kappa_interval(q.loc, q_pos, 20.0)
    with pytest.raises(ValueError, match="level must lie"):
        kappa_interval(q.loc[0], q_pos, 20.0, level=0.0)
