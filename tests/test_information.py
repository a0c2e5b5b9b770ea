"""Fisher information against quadrature of independent series; expected ranks against
simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad, quad
from scipy.special import eval_gegenbauer, gammaln, ive

from pcl.information import expected_rank, fisher_information, pairs_needed
from pcl.metrics import spearman


def pair_ratio(t: float, kappas: tuple[float, ...], dim: int) -> float:
    """S h from scipy's Bessel functions and Gegenbauer polynomials."""
    nu, total = dim / 2 - 1, 1.0
    for degree in range(1, 40):
        count = (
            (2 * degree + dim - 2) / degree * math.comb(degree + dim - 3, degree - 1)
        )
        zonal = (
            eval_gegenbauer(degree, nu, t) / eval_gegenbauer(degree, nu, 1.0)
            if nu
            else math.cos(degree * math.acos(t))
        )
        a = math.prod(float(ive(nu + degree, k) / ive(nu, k)) for k in kappas)
        total += count * a * zonal
    return total


def base(angle: float, dim: int) -> float:
    log_area = gammaln(dim / 2) - gammaln((dim - 1) / 2) - math.log(math.pi) / 2
    return math.exp(log_area) * math.sin(angle) ** (dim - 2)


def ratio_and_score(angle: float, kappas: tuple[float, ...], dim: int) -> tuple:
    t, step = math.cos(angle), 1e-5
    up, here, down = (
        pair_ratio(t, (kappas[0] * math.exp(s), *kappas[1:]), dim)
        for s in (step, 0.0, -step)
    )
    return here, (up - down) / (2 * step) / here


@pytest.mark.parametrize(
    ("kappas", "dim"),
    [((3.0, 5.0, 4.0), 2), ((2.0, 6.0, 3.0), 3), ((9.0, 4.0, 8.0), 7)],
)
def test_information_is_the_integral_of_the_squared_score(
    kappas: tuple[float, float, float], dim: int
) -> None:
    def integrand(angle: float) -> float:
        ratio, score = ratio_and_score(angle, kappas, dim)
        return base(angle, dim) * ratio * score**2

    wanted = quad(integrand, 0, math.pi, epsabs=1e-10)[0]
    found = float(fisher_information(*kappas, dim))
    assert abs(found / wanted - 1) < 1e-6


def test_one_negative_by_a_double_integral() -> None:
    kappas, dim = (3.0, 5.0, 4.0), 3

    def integrand(one: float, two: float) -> float:
        (w, s), (w_neg, s_neg) = (ratio_and_score(a, kappas, dim) for a in (one, two))
        chance = w / (w + w_neg)
        return (
            base(one, dim)
            * base(two, dim)
            * w
            * chance
            * (1 - chance)
            * (s - s_neg) ** 2
        )

    wanted = dblquad(integrand, 0, math.pi, 0, math.pi, epsabs=1e-6, epsrel=1e-5)[0]
    found = float(fisher_information(*kappas, dim, n_negatives=1))
    assert abs(found / wanted - 1) < 1e-3


def test_negatives_of_several_levels_by_drawing_lists() -> None:
    """Partners and negatives differ in concentration, too."""
    rng, dim, levels, m = np.random.default_rng(0), 3, (2.0, 20.0), 3
    angle = np.linspace(0, math.pi, 1001)[1:-1]
    table = [[ratio_and_score(a, (6.0, k, 8.0), dim) for a in angle] for k in levels]
    w, s = (np.array(table)[..., i].ravel() for i in (0, 1))
    law = np.tile([base(a, dim) for a in angle], 2)
    law /= law.sum()
    n = 60_000
    pick = np.concatenate(
        [
            rng.choice(len(law), (n, 1), p=law * w / (law @ w)),
            rng.choice(len(law), (n, m), p=law),
        ],
        1,
    )
    chance = w[pick] / w[pick].sum(1, keepdims=True)
    values = (chance * s[pick] ** 2).sum(1) - (chance * s[pick]).sum(1) ** 2
    found = float(fisher_information(6.0, torch.tensor(levels), 8.0, dim, m))
    assert abs(values.mean() - found) < 4 * values.std() / math.sqrt(n)


@pytest.mark.parametrize("dim", [2, 10, 64])
def test_more_negatives_tell_more_up_to_the_whole(dim: int) -> None:
    counts = (1, 2, 7, 50, 10**4, 10**8, math.inf)
    values = [float(fisher_information(24.0, 20.0, 20.0, dim, m)) for m in counts]
    assert values == sorted(values) and values[0] > 0
    assert abs(values[-2] / values[-1] - 1) < 1e-4


def test_partners_of_several_levels_are_averaged() -> None:
    levels = torch.tensor([4.0, 30.0, 200.0])
    together = fisher_information(15.0, levels, 20.0, 6)
    apart = torch.stack([fisher_information(15.0, k, 20.0, 6) for k in levels])
    torch.testing.assert_close(together, apart.mean())
    shape = fisher_information(torch.ones(2, 3), levels, 20.0, 6).shape
    assert shape == (2, 3)


def test_extreme_concentrations_have_their_limits() -> None:
    sharp = [1e7, 2e7, 5e6]
    v = sum(1 / k for k in sharp)
    limit = 9 / (2 * v**2 * sharp[0] ** 2)
    assert abs(float(fisher_information(*sharp, 10)) / limit - 1) < 1e-5
    faint = float(fisher_information(1e-3, 5.0, 5.0, 10))
    assert 0 < faint < 1e-7
    with torch.inference_mode():
        assert float(fisher_information(3.0, 5.0, 5.0, 10)) > 0


def test_expected_rank_is_what_noise_leaves() -> None:
    generator = torch.Generator().manual_seed(0)
    kappa = torch.linspace(5, 50, 40, dtype=torch.float64)
    error = torch.linspace(0.1, 0.9, 40, dtype=torch.float64)
    drawn = torch.tensor(
        [
            float(
                spearman(
                    kappa.log()
                    + error * torch.randn(40, generator=generator, dtype=torch.float64),
                    kappa,
                )
            )
            for _ in range(1500)
        ]
    )
    gap = expected_rank(kappa, error) - float(drawn.mean())
    assert abs(gap) < 4 * float(drawn.std()) / math.sqrt(1500)
    assert abs(expected_rank(kappa, 0 * error) - 1) < 1e-12
    assert abs(expected_rank(kappa, error + 1e9)) < 1e-6
    order = torch.randperm(40, generator=generator)
    assert (
        abs(expected_rank(kappa[order], error[order]) - expected_rank(kappa, error))
        < 1e-12
    )


def test_pairs_needed_reach_the_rank() -> None:
    kappa = torch.linspace(16, 32, 21)
    info = fisher_information(kappa, kappa, 20.0, 10)
    for rank in (0.5, 0.9, 0.99):
        n = pairs_needed(rank, kappa, 20.0, 10)
        assert abs(expected_rank(kappa.double(), (n * info).rsqrt()) - rank) < 2e-3
    fewer = pairs_needed(0.9, kappa, 20.0, 10, n_negatives=4)
    assert fewer > pairs_needed(0.9, kappa, 20.0, 10, n_negatives=64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fisher_information(0.0, 1.0, 1.0, 3), "kappa1 must be above 0"),
        (lambda: fisher_information(1.0, math.nan, 1.0, 3), "kappa2 must be above 0"),
        (lambda: fisher_information(1.0, 1.0, math.inf, 3), "kappa_pos must be above"),
        (lambda: fisher_information(torch.ones(0), 1.0, 1.0, 3), "kappa1 must be"),
        (lambda: fisher_information(1.0, 1.0, torch.ones(2), 3), "one number"),
        (lambda: fisher_information(1.0, 1.0, 1.0, 1), "dim must be an integer"),
        (lambda: fisher_information(1.0, 1.0, 1.0, 3, 0), "n_negatives must be"),
        (lambda: fisher_information(1.0, 1.0, 1.0, 3, math.nan), "n_negatives must"),
        (lambda: expected_rank(torch.ones(3), torch.ones(2)), "the same shape"),
        (lambda: expected_rank(torch.ones(3), torch.ones(3)), "two different values"),
        (lambda: expected_rank(torch.tensor([1.0, 2]), -torch.ones(2)), "at least 0"),
        (lambda: pairs_needed(1.0, torch.tensor([1.0, 2]), 1.0, 3), "between 0 and 1"),
        (lambda: pairs_needed(0.5, torch.ones(1), 1.0, 3), "at least two"),
        (lambda: pairs_needed(0.5, torch.ones(4), 1.0, 3), "two different values"),
        (
            lambda: pairs_needed(0.99, torch.tensor([1.0, 1, 1, 2]), 1.0, 3),
            "out of reach",
        ),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
