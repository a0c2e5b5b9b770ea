"""The losses against explicit loops, quadrature, and everything that should not change
them."""

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from example_losses import closed, example, sampled
from scipy.special import ive
from torch import Tensor
from torch.nn import functional as F

from pcl import folder, losses
from pcl.kernels import log_expected_likelihood
from pcl.losses import (
    ELK,
    HIB,
    LOSSES,
    ContrastiveLoss,
    ExactInfoNCE,
    ExactNWJ,
    InfoNCE,
    MCInfoNCE,
    loss_landscape,
    make_loss,
)
from pcl.marginal import log_marginal
from pcl.names import UnknownName
from pcl.polar import draw_gap, polar_ratio, turn_rate
from pcl.published.objectives import PublishedHIB, PublishedMCInfoNCE
from pcl.studies import controlled
from pcl.vmf import VonMisesFisher

B, M, K, D = 5, 3, 7, 4
KAPPA_POS = 6.0


def posteriors(
    *shape: int,
    dim: int = D,
    seed: int = 0,
    low: float = 1.0,
    high: float = 30.0,
    dtype=torch.float64,
):
    g = torch.Generator().manual_seed(seed)
    loc = F.normalize(torch.randn(*shape, dim, generator=g, dtype=dtype), dim=-1)
    return VonMisesFisher(
        loc, low + (high - low) * torch.rand(shape, generator=g, dtype=dtype)
    )


def batch(dim: int = D, rows: int = B, n_neg: int = M, **kwargs):
    return (
        posteriors(rows, dim=dim, seed=1, **kwargs),
        posteriors(rows, dim=dim, seed=2, **kwargs),
        posteriors(rows, n_neg, dim=dim, seed=3, **kwargs),
    )


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str, **options) -> ContrastiveLoss:
    """A loss of the table, or one as the authors' code has it."""
    given = {"kappa_pos": KAPPA_POS, "n_samples": K, "a": 2.0, "b": 1.0, **options}
    return make_loss(name, {**LOSSES, **PUBLISHED}, **given)


PUBLISHED = {
    "mcinfonce as published": PublishedMCInfoNCE,
    "hib as published": PublishedHIB,
}
CLOSED = closed()
SAMPLED = [*sampled(), *PUBLISHED]
ALL = [*CLOSED, *SAMPLED]


# --- explicit loops
# -----------------------------------------------------------------------------------------------


def critic(name: str, q, i: int, other, j) -> float:
    """The score of one pair, from scalar formulas that share no code with the
    losses."""
    cos = float(q.loc[i] @ other.loc[j])
    k1, k2, nu = float(q.concentration[i]), float(other.concentration[j]), D / 2 - 1
    if name == "infonce":
        return KAPPA_POS * cos
    if name == "elk":
        length = math.sqrt(k1**2 + k2**2 + 2 * k1 * k2 * cos)
        c = [
            nu * math.log(k) - math.log(ive(nu, k)) - k for k in (k1, k2, length)
        ]  # log C up to -D/2 log(2 pi)
        return KAPPA_POS * (c[0] + c[1] - c[2] - D / 2 * math.log(2 * math.pi))
    # the series of S h, by scipy's Bessel functions and the recurrence for Gegenbauer
    # polynomials
    total = 0.0
    g, g_next = 1.0, cos
    for n in range(80):
        weight = math.prod(ive(nu + n, k) / ive(nu, k) for k in (k1, k2, KAPPA_POS))
        multiplicity = (2 * n + D - 2) / (D - 2) * math.comb(n + D - 3, n)
        total += multiplicity * weight * g
        g, g_next = (
            g_next,
            ((2 * n + 2 + 2 * nu) * cos * g_next - (n + 1) * g) / (n + 1 + 2 * nu),
        )
    return math.log(total)


def looped_closed_form(name: str, q, q_pos, q_neg) -> list[float]:
    values = []
    for i in range(B):
        pos = critic(name, q, i, q_pos, i)
        if q_neg is not None:
            negs = [critic(name, q, i, q_neg, (i, m)) for m in range(M)]
        else:
            negs = [critic(name, q, i, q_pos, j) for j in range(B) if j != i]
        if name == "exact-nwj":
            values.append(-pos + sum(math.exp(n) for n in negs) / len(negs) - 1)
        else:
            below = math.exp(pos) / len(negs) + sum(
                math.exp(n) / len(negs) for n in negs
            )
            values.append(-math.log(math.exp(pos) / below))
    return values


def explicit_samples(q, q_pos, q_neg, seed: int):
    """The very samples that a loss draws with this seed, as unit vectors: z (K, B, D)
    and others (K, B, N, D)."""
    draws = losses._draw(q, q_pos, q_neg, K, seeded(seed))
    if q_neg is None:
        z, z_pos = draws.sampled
        return z, z_pos
    z, along, across = draws.sampled
    other = torch.empty(K, B, 1 + M, D, dtype=torch.float64)
    for k in range(K):
        for i in range(B):
            for n in range(1 + M):
                mu = q_pos.loc[i] if n == 0 else q_neg.loc[i, n - 1]
                e = F.normalize(
                    z[k, i] - (z[k, i] @ mu) * mu, dim=0
                )  # the direction of z seen from the mean
                rest = F.normalize(
                    torch.randn(D, dtype=torch.float64, generator=seeded(7)), dim=0
                )
                rest = rest - (rest @ mu) * mu - (rest @ e) * e
                w, c = along[k, i, n], across[k, i, n]
                filler = (
                    (1 - w**2 - c**2).clamp(min=0).sqrt()
                )  # whatever is orthogonal to both does not enter
                other[k, i, n] = w * mu + c * e + filler * F.normalize(rest, dim=0)
    torch.testing.assert_close(
        other.norm(dim=-1), torch.ones(K, B, 1 + M, dtype=torch.float64)
    )
    return z, other


def looped_cosines(
    q, q_pos, q_neg, seed: int, rolled: bool
) -> list[list[tuple[list[float], list[list[float]]]]]:
    """Per row: for each sample the cosine with the positive and those with the
    negatives."""
    z, other = explicit_samples(q, q_pos, q_neg, seed)
    rows = []
    for i in range(B):
        row = []
        for k in range(K):
            if q_neg is not None:
                cosines = [float(z[k, i] @ other[k, i, n]) for n in range(1 + M)]
            else:
                negatives = [(i - 1) % B] if rolled else [j for j in range(B) if j != i]
                cosines = [float(z[k, i] @ other[k, j]) for j in [i, *negatives]]
            row.append(cosines)
        rows.append(row)
    return rows


def looped_mcinfonce(name: str, q, q_pos, q_neg) -> list[float]:
    as_published, values = name in PUBLISHED, []
    for row in looped_cosines(q, q_pos, q_neg, SEED, rolled=as_published):
        total = 0.0
        for pos, *negs in row:  # formula 7
            up, m = math.exp(KAPPA_POS * pos), len(negs)
            down = sum(math.exp(KAPPA_POS * n) / m for n in negs) + (
                up if as_published else up / m
            )
            total += up / down
        values.append(-math.log(total / K))
    return values


def looped_hib(name: str, q, q_pos, q_neg) -> list[float]:
    as_published, (a, b), values = name in PUBLISHED, (2.0, 1.0), []
    for row in looped_cosines(q, q_pos, q_neg, SEED, rolled=as_published):
        m = len(row[0]) - 1
        match = [[1 / (1 + math.exp(-(a * c + b))) for c in sample] for sample in row]
        if as_published:
            pos = sum(math.log(s[0]) for s in match) / K
            neg = (
                sum(sum(math.log(1 - s[1 + n]) for s in match) / K for n in range(m))
                / m
                / m
            )
        else:  # formula 54
            pos = math.log(sum(s[0] for s in match) / K)
            neg = (
                sum(math.log(sum(1 - s[1 + n] for s in match) / K) for n in range(m))
                / m
            )
        values.append(-pos - neg)
    return values


SEED = 11
# From a loss's name and a batch to one value per row, by loops.
ORACLES = {
    "infonce": looped_closed_form,
    "exact-infonce": looped_closed_form,
    "exact-nwj": looped_closed_form,
    "elk": looped_closed_form,
    "mcinfonce": looped_mcinfonce,
    "mcinfonce as published": looped_mcinfonce,
    "hib": looped_hib,
    "hib as published": looped_hib,
}


def without_oracle() -> list[str]:
    return [name for name in LOSSES if name not in ORACLES]


def test_every_loss_of_the_table_has_an_oracle():
    assert without_oracle() == [], (
        "write each of these as explicit loops in this file, and name it in ORACLES"
    )


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", ORACLES)
def test_every_loss_equals_its_loops(name, in_batch):
    q, q_pos, q_neg = batch()
    q_neg = None if in_batch else q_neg
    expected = ORACLES[name](name, q, q_pos, q_neg)
    seed = {"generator": seeded(SEED)} if name in SAMPLED else {}
    value = make(name, reduction="none")(q, q_pos, q_neg, **seed)
    tolerance = 1e-10 if name in SAMPLED else 1e-8
    torch.testing.assert_close(
        value,
        torch.tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


class Toy(InfoNCE):
    """A loss that somebody has just derived."""


def test_a_new_line_of_the_table_is_seen_everywhere(monkeypatch):
    monkeypatch.setitem(LOSSES, "toy", Toy)
    assert type(make_loss("toy", kappa_pos=3.0, n_samples=4)) is Toy
    assert type(folder.make_loss("toy")) is Toy and "toy" in folder.head_losses()
    assert "toy" in closed() and "toy" not in sampled()
    assert type(example("toy")) is Toy and without_oracle() == ["toy"]
    assert type(controlled.make_loss(controlled.WorldSettings(loss="toy"))) is Toy


def test_a_loss_takes_the_options_it_knows_and_refuses_the_unknown():
    shared = {"kappa_pos": 3.0, "n_samples": 4, "learn_kappa_pos": True, "a": 2.0, "b": 0.0}  # fmt: skip
    assert make_loss("hib", **shared).ab == (2.0, 0.0)
    assert make_loss("elk", **shared).log_kappa_pos.requires_grad
    assert make_loss("mcinfonce", chunk_size=2, **shared).chunk_size == 2
    assert make_loss("exact-nwj", log_normalizer=1.0, **shared).log_normalizer == 1
    with pytest.raises(UnknownName, match="unknown loss 'elc': did you mean 'elk'"):
        make_loss("elc", **shared)
    with pytest.raises(UnknownName, match="option of elk 'kappa': did you mean"):
        make_loss("elk", kappa=3.0)
    with pytest.raises(UnknownName, match="option of elk 'chunk_size'"):
        make_loss("elk", chunk_size=3, **shared)
    with pytest.raises(TypeError, match="'a' and 'b'"):
        make_loss("hib", n_samples=4)


def test_elk_scores_are_the_expected_likelihood_kernel():
    q, q_pos, _ = batch(dim=10)
    scores = ELK(3.0).score(
        (q.loc * q_pos.loc).sum(-1), q.concentration, q_pos.concentration, 10
    )
    torch.testing.assert_close(
        scores, 3 * log_expected_likelihood(q, q_pos), rtol=1e-10, atol=1e-10
    )


class AxisInfoNCE(InfoNCE):
    """A critic that weighs the axes: it must see vectors, cosines do not tell."""

    def __init__(self, weights, **kwargs):
        super().__init__(KAPPA_POS, **kwargs)
        self.weights = torch.nn.Parameter(weights)

    def critic(self, q, candidates):
        product = self.weights * q.loc[:, None] * candidates.loc
        return self.kappa_pos * product.sum(-1)


@pytest.mark.parametrize("negatives", ["own", "shared", "batch"])
def test_a_critic_that_weighs_axes_equals_a_loop_and_trains(negatives):
    q, q_pos, q_neg = batch()
    if negatives == "shared":
        q_neg = posteriors(1, M, seed=3)
    weights = torch.tensor([2.0, 1.0, 0.5, 0.25], dtype=torch.float64)
    expected = []
    for i in range(B):
        others = {
            "own": lambda i=i: q_neg.loc[i],
            "shared": lambda: q_neg.loc[0],
            "batch": lambda i=i: q_pos.loc[[j for j in range(B) if j != i]],
        }[negatives]()

        def score(z, i=i):
            products = (float(weights[d] * q.loc[i, d] * z[d]) for d in range(D))
            return KAPPA_POS * sum(products)

        up, m = math.exp(score(q_pos.loc[i])), len(others)
        down = up / m + sum(math.exp(score(z)) / m for z in others)
        expected.append(-math.log(up / down))
    loss = AxisInfoNCE(weights, reduction="none")
    value = loss(q, q_pos, None if negatives == "batch" else q_neg)
    torch.testing.assert_close(
        value, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
    )
    value.mean().backward()
    with torch.no_grad():
        loss.weights -= 1e-3 * loss.weights.grad
    after = loss(q, q_pos, None if negatives == "batch" else q_neg)
    assert loss.weights.grad.norm() > 0 and after.mean() < value.mean()


@pytest.mark.parametrize("name", CLOSED)
def test_a_critic_scores_shared_candidates_in_either_shape(name):
    q, _, _ = batch()
    shared = posteriors(1, M, seed=3)
    row = VonMisesFisher(shared.loc[0], shared.concentration[0])
    loss = make(name)
    cos = (q.loc @ row.loc.T).clamp(-1, 1)
    scores = loss.score(cos, q.concentration[:, None], row.concentration[None], D)
    assert scores.shape == (B, M)
    assert loss.critic(q, shared).equal(scores) and loss.critic(q, row).equal(scores)
    every = VonMisesFisher(shared.loc.expand(B, M, D), shared.concentration)
    torch.testing.assert_close(loss.critic(q, every), scores)


@pytest.mark.parametrize("name", ALL)
def test_reductions(name):
    q, q_pos, q_neg = batch()
    values = {}
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        values[reduction] = make(name, reduction=reduction)(q, q_pos, q_neg)
    assert values["none"].shape == (B,)
    torch.testing.assert_close(values["none"].sum(), values["sum"])
    torch.testing.assert_close(values["none"].mean(), values["mean"])


# --- gradients
# ----------------------------------------------------------------------------------------------------


def parameters(dim: int, rows: int = 2, n_neg: int = 2) -> list[Tensor]:
    """Unconstrained means and certainties of a small batch."""
    q, q_pos, q_neg = batch(dim=dim, rows=rows, n_neg=n_neg, low=2.0, high=8.0)
    return [
        x.clone().requires_grad_()
        for p in (q, q_pos, q_neg)
        for x in (1.3 * p.loc, p.concentration)
    ]


def build(tensors) -> list[VonMisesFisher]:
    return [
        VonMisesFisher(F.normalize(mu, dim=-1), kappa)
        for mu, kappa in zip(tensors[::2], tensors[1::2], strict=True)
    ]


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", CLOSED)
def test_gradcheck_closed_forms(name, in_batch):
    used = slice(0, 4) if in_batch else slice(0, 6)
    tensors = [
        x.detach() if name == "infonce" and i % 2 else x
        for i, x in enumerate(parameters(D)[used])
    ]
    assert torch.autograd.gradcheck(
        lambda *x: make(name, reduction="none")(*build(x)), tensors
    )


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", SAMPLED)
def test_gradcheck_sampled_losses_end_to_end(name, in_batch):
    # In dimension 3 the sampler inverts the cosine's cdf, so common random numbers make
    # the loss smooth in every kappa.
    # Vectors drawn in full follow their mean by a rotation: unbiased, but not the
    # sampler's own map. Those means are fixed.
    tensors = parameters(3)[: 4 if in_batch else 6]
    tensors = [
        x.detach() if i == 0 or (in_batch and i == 2) else x
        for i, x in enumerate(tensors)
    ]

    def loss(*x):
        return make(name, reduction="none", chunk_size=3)(
            *build(x), generator=seeded(5)
        )

    assert torch.autograd.gradcheck(loss, tensors)


@pytest.mark.parametrize("dim", [2, 5])
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", SAMPLED)
def test_gradcheck_from_the_samples_on(name, in_batch, dim, monkeypatch):
    # In other dimensions the sampler rejects; here its draws are held fixed and
    # everything after them is checked.
    triple = batch(dim=dim, rows=2, n_neg=2)[: 2 if in_batch else 3]
    draws = losses._draw(*triple, *([None] if in_batch else []), 4, seeded(1))
    n_sampled = len(draws.sampled)

    def loss(*x):
        z, *rest = x
        z = F.normalize(z, dim=-1)
        fixed = draws._replace(
            sampled=(z, *rest[: n_sampled - 1]), fixed=rest[n_sampled - 1 :]
        )
        monkeypatch.setattr(losses, "_draw", lambda *_: fixed)
        return make(name, reduction="none", chunk_size=3)(*triple)

    assert torch.autograd.gradcheck(
        loss,
        [x.detach().clone().requires_grad_() for x in (*draws.sampled, *draws.fixed)],
    )


@pytest.mark.parametrize(
    ("dim", "kappa"),
    [(2, 0.5), (2, 6.0), (4, 0.5), (4, 6.0), (10, 0.0), (10, 20.0), (64, 200.0)],
)
def test_interpolated_turn_rates(dim, kappa):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        concentration = torch.full((6,), kappa, dtype=dtype)
        gap = draw_gap(
            dim,
            concentration,
            polar_ratio(dim, (300, 6), concentration, seeded()),
            seeded(),
        )
        exact = turn_rate(dim, concentration.double(), gap.double())
        relative = (losses._turn_rates(dim, concentration, gap) - exact).abs() / exact
        assert relative.max() < tolerance


@pytest.mark.parametrize(
    "n_samples", [8, 64]
)  # below and above the number of interpolation points
def test_kappa_gradient_of_the_two_numbers_is_unbiased(n_samples):
    dim, kappa = 5, 2.0
    concentration = torch.full((4_000,), kappa, dtype=torch.float64, requires_grad=True)
    along, across = losses._AlongAcross.apply(concentration, dim, n_samples, seeded(3))
    a = float(ive(dim / 2, kappa) / ive(dim / 2 - 1, kappa))
    second = 1 - (dim - 1) * a / kappa  # E w^2
    d_a = 1 - a * a - (dim - 1) * a / kappa
    d_second = -(dim - 1) * (d_a / kappa - a / kappa**2)
    # E w, E w^2, and E (u^2 (1 - w^2)) = E (1 - w^2) / (D - 1)
    for statistic, mean, slope in (
        (along, a, d_a),
        (along**2, second, d_second),
        (across**2, (1 - second) / (dim - 1), -d_second / (dim - 1)),
    ):
        rows = statistic.detach().mean(0)
        assert abs(rows.mean() - mean) < 4 * rows.std() / math.sqrt(len(rows))
        (gradient,) = torch.autograd.grad(
            statistic.mean(0).sum(), concentration, retain_graph=True
        )
        assert abs(gradient.mean() - slope) < 4 * gradient.std() / math.sqrt(
            len(gradient)
        )


# --- formula 6 and the bias of its estimate
# --------------------------------------------------------------------------


def circle(angle: float, kappa: float, rows: int) -> VonMisesFisher:
    loc = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    return VonMisesFisher(
        loc.expand(rows, 2), torch.full((rows,), kappa, dtype=torch.float64)
    )


def formula_6(angles, kappas, kappa_pos: float, n: int = 120) -> float:
    """-log E[ratio] on the circle with one negative; the trapezoidal rule is spectrally
    accurate for periodic integrands."""
    grid = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    weights = [
        torch.softmax(k * torch.cos(grid - a), 0)
        for a, k in zip(angles, kappas, strict=True)
    ]
    kernel = torch.exp(kappa_pos * torch.cos(grid[:, None] - grid))
    ratio = kernel[:, :, None] / (kernel[:, :, None] + kernel[:, None, :])  # z, z+, z-
    return -math.log(float(torch.einsum("i,j,k,ijk->", *weights, ratio)))


def test_bias_falls_like_one_over_the_number_of_samples():
    angles, kappas, kappa_pos, rows = (0.0, 0.6, 2.0), (3.0, 2.0, 1.5), 4.0, 10_000
    target = formula_6(angles, kappas, kappa_pos)
    q, q_pos, q_neg = (circle(a, k, rows) for a, k in zip(angles, kappas, strict=True))
    q_neg = VonMisesFisher(q_neg.loc[:, None], q_neg.concentration[:, None])
    sizes, biases = [8, 16, 32, 64, 128], []
    for n_samples in sizes:
        with torch.no_grad():
            loss = MCInfoNCE(kappa_pos, n_samples, reduction="none")(
                q, q_pos, q_neg, generator=seeded(n_samples)
            )
        # The mean ratio is unbiased: subtracting its known fluctuation leaves the bias
        # with far less noise.
        relative = torch.exp(target - loss)
        assert abs(relative.mean() - 1) < 4 * relative.std() / math.sqrt(rows)
        biases.append(float((loss - target + relative - 1).mean()))
    slope = (
        torch.linalg.lstsq(
            torch.stack(
                [
                    torch.log(torch.tensor(sizes, dtype=torch.float64)),
                    torch.ones(len(sizes), dtype=torch.float64),
                ],
                1,
            ),
            torch.log(torch.tensor(biases, dtype=torch.float64))[:, None],
        )
        .solution[0]
        .item()
    )
    assert min(biases) > 0
    assert -1.15 < slope < -0.85


def test_many_samples_reach_formula_6_and_its_kappa_derivative():
    angles, kappas, kappa_pos = (0.0, 0.6, 2.0), (3.0, 2.0, 1.5), 4.0
    parts = [circle(a, k, 40) for a, k in zip(angles, kappas, strict=True)]
    leaves = [p.concentration.clone().requires_grad_() for p in parts]
    q, q_pos, q_neg = (
        VonMisesFisher(p.loc, k) for p, k in zip(parts, leaves, strict=True)
    )
    q_neg = VonMisesFisher(q_neg.loc[:, None], leaves[2][:, None])
    loss = MCInfoNCE(kappa_pos, 2000, reduction="none")(
        q, q_pos, q_neg, generator=seeded(1)
    )
    gradients = torch.autograd.grad(loss.sum(), leaves)
    target, step = formula_6(angles, kappas, kappa_pos), 1e-4
    assert abs(loss.mean() - target) < 4 * loss.std() / math.sqrt(40) + 1e-3
    for i, gradient in enumerate(gradients):
        up, down = (
            [k + s * (j == i) for j, k in enumerate(kappas)] for s in (step, -step)
        )
        slope = (
            formula_6(angles, up, kappa_pos) - formula_6(angles, down, kappa_pos)
        ) / (2 * step)
        assert abs(gradient.mean() - slope) < 4 * gradient.std() / math.sqrt(40) + 1e-3


# --- what must not matter
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLOSED)
def test_order_of_rows_and_negatives_does_not_matter(name):
    q, q_pos, q_neg = batch()
    rows, cols = (
        torch.randperm(B, generator=seeded(1)),
        torch.randperm(M, generator=seeded(2)),
    )
    pick = [
        VonMisesFisher(p.loc[rows], p.concentration[rows]) for p in (q, q_pos, q_neg)
    ]
    loss = make(name, reduction="none")
    torch.testing.assert_close(loss(*pick), loss(q, q_pos, q_neg)[rows])
    torch.testing.assert_close(loss(*pick[:2]), loss(q, q_pos)[rows])
    shuffled = VonMisesFisher(q_neg.loc[:, cols], q_neg.concentration[:, cols])
    torch.testing.assert_close(loss(q, q_pos, shuffled), loss(q, q_pos, q_neg))


@pytest.mark.parametrize("name", [*sampled(), "hib as published"])
def test_order_does_not_matter_to_sampled_losses_either(name):
    # Many identical rows: the averages of the loss must agree within their noise
    # however the negatives are ordered.
    one = batch(rows=1)
    many = [
        VonMisesFisher(
            p.loc.expand(4000, *p.loc.shape[1:]),
            p.concentration.expand(4000, *p.concentration.shape[1:]),
        )
        for p in one
    ]
    flipped = VonMisesFisher(many[2].loc.flip(1), many[2].concentration.flip(1))
    loss = make(name, reduction="none")
    a, b = (
        loss(*many, generator=seeded(1)),
        loss(many[0], many[1], flipped, generator=seeded(2)),
    )
    assert abs(a.mean() - b.mean()) < 4 * math.sqrt((a.var() + b.var()) / 4000)


@pytest.mark.parametrize("name", sampled())
def test_order_of_rows_does_not_matter_to_sampled_losses_in_a_batch(name):
    # As published the order matters on purpose: the one negative is the positive of the
    # row before.
    q, q_pos, _ = batch()
    rows = torch.randperm(B, generator=seeded(1))
    moved = [VonMisesFisher(p.loc[rows], p.concentration[rows]) for p in (q, q_pos)]
    loss, n = make(name, reduction="none"), 100
    with torch.no_grad():
        a = torch.stack([loss(q, q_pos, generator=seeded(s))[rows] for s in range(n)])
        b = torch.stack([loss(*moved, generator=seeded(n + s)) for s in range(n)])
    assert (
        (a.mean(0) - b.mean(0)).abs() < 4 * ((a.var(0) + b.var(0)) / n).sqrt()
    ).all()


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_rotations_do_not_matter(name, in_batch):
    triple = batch()[: 2 if in_batch else 3]
    rotation = torch.linalg.qr(
        torch.randn(D, D, dtype=torch.float64, generator=seeded(4))
    ).Q
    turned = [
        VonMisesFisher(F.normalize(p.loc @ rotation.T, dim=-1), p.concentration)
        for p in triple
    ]
    if name in CLOSED:
        loss = make(name, reduction="none")
        torch.testing.assert_close(loss(*turned), loss(*triple))
        return
    loss, n = make(name), 100
    with torch.no_grad():
        a, b = (
            torch.stack(
                [loss(*group, generator=seeded(s)) for s in range(first, first + n)]
            )
            for group, first in ((triple, 0), (turned, n))
        )
    assert abs(a.mean() - b.mean()) < 4 * math.sqrt((a.var() + b.var()) / n)


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda c: MCInfoNCE(20.0, 50, chunk_size=c),
        lambda c: HIB(2.0, 0.0, 50, chunk_size=c),
    ],
)
def test_chunk_size_does_not_matter(make, in_batch):
    def run(chunk_size):
        triple = batch(dim=10, rows=16, dtype=torch.float32)[: 2 if in_batch else 3]
        leaves = [
            x.clone().requires_grad_() for p in triple for x in (p.loc, p.concentration)
        ]
        value = make(chunk_size)(
            *[VonMisesFisher(*leaves[i : i + 2]) for i in range(0, len(leaves), 2)],
            generator=seeded(1),
        )
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    whole = run(50)
    for chunk_size in (1, 7, None):
        for a, b in zip(run(chunk_size), whole, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max())
            )


def test_generator_makes_sampled_losses_reproducible():
    triple = batch()
    for loss in (MCInfoNCE(KAPPA_POS, K), HIB(1.0, 0.0, K)):
        assert loss(*triple, generator=seeded(1)).equal(
            loss(*triple, generator=seeded(1))
        )
        assert not loss(*triple, generator=seeded(1)).equal(
            loss(*triple, generator=seeded(2))
        )


# --- limits and extremes
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_injective_case_is_infonce(in_batch, dtype):
    triple = [
        VonMisesFisher(p.loc, torch.full(p.batch_shape, math.inf, dtype=dtype))
        for p in batch(dim=10, rows=64, n_neg=8, dtype=dtype)
    ]
    triple = triple[: 2 if in_batch else 3]
    assert abs(MCInfoNCE(20.0, 16)(*triple) - InfoNCE(20.0)(*triple)) < 1e-6


@pytest.mark.parametrize("in_batch", [False, True])
def test_injective_case_of_the_exact_loss_is_infonce(in_batch):
    triple = [
        VonMisesFisher(p.loc, torch.full(p.batch_shape, math.inf, dtype=torch.float64))
        for p in batch(dim=10)
    ]
    triple = triple[: 2 if in_batch else 3]
    # the constant log(S C(kappa_pos)) of the critic cancels
    torch.testing.assert_close(
        ExactInfoNCE(20.0)(*triple), InfoNCE(20.0)(*triple), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [0.0, 1e-8, 1.0, 1e8, math.inf])
@pytest.mark.parametrize("name", ALL)
def test_no_nan_at_extreme_certainties(name, kappa, dtype):
    for dim in (2, 3, 10):
        triple = batch(dim=dim, dtype=dtype)
        leaves = [
            x.clone().requires_grad_()
            for p in triple
            for x in (p.loc, torch.full_like(p.concentration, kappa))
        ]
        q, q_pos, q_neg = (VonMisesFisher(*leaves[i : i + 2]) for i in (0, 2, 4))
        for negatives in (q_neg, None):
            value = make(name)(q, q_pos, negatives)
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            assert torch.isfinite(value)
            assert all(torch.isfinite(g).all() for g in gradients if g is not None)


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_gradient_of_candidate_means_is_tangent_and_bounded(dim):
    # sqrt(1 - t^2) has no bounded derivative, but moving on the sphere it has: nothing
    # may leak into the radial direction.
    q, q_pos, q_neg = batch(dim=dim, rows=64, low=50.0, high=100.0)
    near = (
        q.loc.detach().clone().requires_grad_()
    )  # candidates on top of the reference, where t is close to 1
    value = MCInfoNCE(20.0, 64, reduction="sum")(
        q, VonMisesFisher(near, q_pos.concentration), q_neg, generator=seeded()
    )
    (gradient,) = torch.autograd.grad(value, near)
    assert (gradient * near).sum(-1).abs().max() < 1e-8
    assert gradient.norm(dim=-1).max() < 2 * 20.0


@pytest.mark.parametrize("name", ALL)
def test_identical_posteriors_have_finite_gradients(name):
    loc = F.normalize(torch.ones(4, 10), dim=-1).requires_grad_()
    kappa = torch.full((4,), math.inf, requires_grad=True)
    q = VonMisesFisher(loc, kappa)
    value = make(name)(q, q, VonMisesFisher(loc[:, None], kappa[:, None]))
    gradients = torch.autograd.grad(value, [loc, kappa], allow_unused=True)
    assert torch.isfinite(value) and all(
        torch.isfinite(g).all() for g in gradients if g is not None
    )


def test_exact_nwj_is_zero_without_information_and_shifts_with_its_normalizer():
    blind = [VonMisesFisher(p.loc, torch.zeros_like(p.concentration)) for p in batch()]
    assert abs(ExactNWJ(KAPPA_POS)(*blind)) < 1e-12
    q, q_pos, q_neg = batch()
    cos = (q.loc[:, None] * q_neg.loc).sum(-1)
    mean_t = (
        log_marginal(cos, q.concentration[:, None], q_neg.concentration, KAPPA_POS, D)
        .exp()
        .mean()
    )
    moved = ExactNWJ(KAPPA_POS, log_normalizer=0.7)(q, q_pos, q_neg) - ExactNWJ(
        KAPPA_POS
    )(q, q_pos, q_neg)
    torch.testing.assert_close(moved, 0.7 + (math.exp(-0.7) - 1) * mean_t)


@pytest.mark.parametrize(
    "make",
    [InfoNCE, ExactInfoNCE, ExactNWJ, ELK, lambda *a, **kw: MCInfoNCE(*a, 16, **kw)],
)
def test_kappa_pos_can_be_learned(make):
    triple = batch(dtype=torch.float32)
    fixed, learned = make(KAPPA_POS), make(KAPPA_POS, learn_kappa_pos=True)
    assert not list(fixed.parameters()) and len(list(learned.parameters())) == 1
    torch.manual_seed(0)
    expected = fixed(*triple)
    torch.manual_seed(0)
    value = learned(*triple)
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    value.backward()
    assert learned.log_kappa_pos.grad.abs() > 0


def test_kappa_pos_gradient_matches_finite_differences():
    triple, step = batch(), 1e-5
    for make in (
        InfoNCE,
        ExactInfoNCE,
        ExactNWJ,
        ELK,
        lambda k, **kw: MCInfoNCE(k, 16, **kw),
    ):

        def value(kappa_pos, make=make):
            torch.manual_seed(0)
            return float(make(kappa_pos)(*triple))

        loss = make(KAPPA_POS, learn_kappa_pos=True).double()
        torch.manual_seed(0)
        loss(*triple).backward()
        slope = (
            value(KAPPA_POS * math.exp(step)) - value(KAPPA_POS * math.exp(-step))
        ) / (2 * step)
        assert abs(float(loss.log_kappa_pos.grad) - slope) < 1e-5


def test_hib_parameters_can_be_learned():
    loss = HIB(2.0, -1.0, K, learn_ab=True)
    loss(*batch(dtype=torch.float32)).backward()
    assert {n for n, p in loss.named_parameters() if p.grad.abs() > 0} == {"log_a", "b"}


def test_hib_parameter_gradients_match_finite_differences():
    triple, step = batch(), 1e-5
    loss = HIB(2.0, -1.0, K, learn_ab=True).double()
    loss(*triple, generator=seeded(3)).backward()
    a = [
        float(HIB(2.0 * math.exp(s), -1.0, K)(*triple, generator=seeded(3)))
        for s in (step, -step)
    ]
    b = [
        float(HIB(2.0, -1.0 + s, K)(*triple, generator=seeded(3)))
        for s in (step, -step)
    ]
    assert abs(float(loss.log_a.grad) - (a[0] - a[1]) / (2 * step)) < 1e-6
    assert abs(float(loss.b.grad) - (b[0] - b[1]) / (2 * step)) < 1e-6


def test_landscape_is_differentiable_and_broadcasts():
    cos = torch.linspace(-0.5, 0.9, 4, requires_grad=True)
    kappa = torch.tensor([[1.0], [20.0]], requires_grad=True)
    height = loss_landscape(ExactInfoNCE(20.0, reduction="none"), cos, kappa, n_neg=8)
    assert height.shape == (2, 4)
    height.sum().backward()
    assert torch.isfinite(cos.grad).all() and torch.isfinite(kappa.grad).all()


# --- bad input
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_one_row_without_negatives_is_an_error(name):
    with pytest.raises(ValueError, match=r"q has one row.*pass q_neg"):
        make(name)(posteriors(1), posteriors(1))
    assert torch.isfinite(make(name)(posteriors(1), posteriors(1), posteriors(1, 1)))


@pytest.mark.parametrize("name", ALL)
def test_mismatched_batches_name_the_argument(name):
    loss, (q, q_pos, q_neg) = make(name), batch()
    for wrong, error, message in [
        (
            (posteriors(B, 2), q_pos, q_neg),
            ValueError,
            r"^q must have a non-empty batch shape \(B,\)",
        ),
        ((q, posteriors(B + 1), q_neg), ValueError, "^q_pos has 6 rows"),
        (
            (q, q_pos, posteriors(B)),
            ValueError,
            r"^q_neg must have a non-empty batch shape \(B, M\)",
        ),
        ((q, q_pos, posteriors(B - 1, M)), ValueError, "^q_neg has 4 rows"),
        ((q, posteriors(B, dim=D + 1), q_neg), ValueError, "^q_pos has dimension 5"),
        ((q, q_pos, posteriors(B, M, dim=D - 1)), ValueError, "^q_neg has dimension 3"),
        (
            (q, posteriors(B, dtype=torch.float32), q_neg),
            TypeError,
            "^q_pos has dtype torch.float32",
        ),
        (
            (q, q_pos, posteriors(B, M, dtype=torch.float32)),
            TypeError,
            "^q_neg has dtype torch.float32",
        ),
        ((q.loc, q_pos, q_neg), TypeError, "^q must be a VonMisesFisher, got Tensor"),
    ]:
        with pytest.raises(error, match=message):
            loss(*wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InfoNCE(0.0), "kappa_pos"),
        (lambda: ExactInfoNCE(math.inf), "kappa_pos"),
        (lambda: ELK(float("nan")), "kappa_pos"),
        (lambda: MCInfoNCE(20.0, 0), "n_samples"),
        (lambda: MCInfoNCE(20.0, 2.5), "n_samples"),
        (lambda: MCInfoNCE(20.0, 4, chunk_size=0), "chunk_size"),
        (lambda: HIB(-1.0, 0.0, 4), "^a must"),
        (lambda: HIB(1.0, math.inf, 4), "^b must"),
        (lambda: HIB(1.0, 0.0, True), "n_samples"),
        (lambda: ExactNWJ(20.0, log_normalizer=math.inf), "log_normalizer"),
        (lambda: InfoNCE(20.0, reduction="max"), "reduction"),
    ],
)
def test_bad_settings_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InfoNCE("20"), "^kappa_pos must be a number, got str"),
        (lambda: InfoNCE(True), "^kappa_pos must be a number, got bool"),
        (
            lambda: MCInfoNCE(torch.nn.Parameter(torch.tensor(20.0)), 4),
            "^kappa_pos must be a number, got Parameter",
        ),
        (
            lambda: ExactNWJ(20.0, log_normalizer=torch.zeros(())),
            "^log_normalizer must be a number, got Tensor",
        ),
        (lambda: HIB(1.0, None, 4), "^b must be a number, got NoneType"),
    ],
)
def test_settings_that_are_no_numbers_name_the_argument(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_landscape_of_a_reduced_loss_is_an_error():
    with pytest.raises(
        ValueError, match=r"^loss has reduction 'mean'.*reduction='none'"
    ):
        loss_landscape(InfoNCE(20.0), torch.tensor(0.5), torch.tensor(4.0))


# --- memory
# -----------------------------------------------------------------------------------------------------------


def test_paper_scale_fits_in_two_gibibytes():
    # Peak memory belongs to a process, so this one is measured in a process of its own.
    script = """
        import resource, torch
        from torch.nn import functional as F
        from pcl.losses import MCInfoNCE
        from pcl.vmf import VonMisesFisher

        def batch(*shape):
            loc = F.normalize(torch.randn(*shape, 10), dim=-1).requires_grad_()
            return VonMisesFisher(loc, (16 + 16 * torch.rand(shape)).requires_grad_())

        MCInfoNCE(20.0, 4)(batch(8), batch(8), batch(8, 2)).backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        MCInfoNCE(20.0, 512)(batch(512), batch(512), batch(512, 32)).backward()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(out.stdout) / 2**20 < 2  # KiB to GiB


def small_batch(rows):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: F.normalize(  # noqa: E731
        torch.randn(*shape, 5, generator=generator, dtype=torch.float64), dim=-1
    )
    a, b, far = draw(3), draw(3), draw(3, 4)
    return a, b, VonMisesFisher(far, 3.0) if rows == "own" else None


@pytest.mark.parametrize("loss", [ExactInfoNCE(16.0), ExactNWJ(16.0), ELK(2.0)])
@pytest.mark.parametrize("rows", ["in_batch", "own"])
def test_second_derivatives_of_losses_without_samples(loss, rows):
    a, b, negatives = small_batch(rows)
    kappa = torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64)

    def value(k, loc=a):
        return loss(
            VonMisesFisher(F.normalize(loc, dim=-1), k), VonMisesFisher(b, k), negatives
        )

    for x, of in ((kappa, value), (a, lambda x: value(kappa, x))):
        slope = lambda y, of=of: torch.autograd.functional.jacobian(of, y)  # noqa: E731
        found = torch.autograd.functional.hessian(of, x).flatten(x.ndim)
        numeric = torch.stack(
            [
                (slope(x + d.view(x.shape)) - slope(x - d.view(x.shape))) / 2e-4
                for d in 1e-4 * torch.eye(x.numel(), dtype=torch.float64)
            ],
            -1,
        )
        assert found.abs().max() > 1e-3
        torch.testing.assert_close(
            found, numeric.view(found.shape), rtol=1e-5, atol=1e-7
        )
        direction = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape)
        for product in (
            torch.autograd.functional.hvp(of, x, direction)[1],
            torch.autograd.functional.vhp(of, x, direction)[1],
        ):
            torch.testing.assert_close(
                product, (found @ direction.flatten()).view_as(x)
            )


@pytest.mark.parametrize("loss", [MCInfoNCE(16.0, 4), HIB(2.0, 0.0, 4)])
@pytest.mark.parametrize("rows", ["in_batch", "own"])
@pytest.mark.parametrize("whose", ["reference", "positive"])
def test_a_second_derivative_of_samples_is_refused_never_zero(loss, rows, whose):
    a, b, negatives = small_batch(rows)
    kappa = torch.tensor([2.0, 4.0, 8.0], dtype=torch.float64)

    def value(k):
        first, second = (k, 4.0) if whose == "reference" else (4.0, k)
        return loss(VonMisesFisher(a, first), VonMisesFisher(b, second), negatives)

    (slope,) = torch.autograd.functional.jacobian(value, (kappa,))
    assert (slope != 0).all()
    for ask in (
        lambda: torch.autograd.functional.hessian(value, kappa),
        lambda: torch.autograd.functional.hvp(value, kappa, torch.ones_like(kappa)),
        lambda: torch.autograd.functional.vhp(value, kappa, torch.ones_like(kappa)),
    ):
        with pytest.raises(RuntimeError, match="differentiable once"):
            ask()
    k = kappa.clone().requires_grad_()
    (first,) = torch.autograd.grad(value(k), k, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(first.square().sum(), k, allow_unused=True)


@pytest.mark.parametrize("rows", ["in_batch", "own"])
def test_sampled_losses_have_second_derivatives_in_their_own_parameter(rows):
    a, b, negatives = small_batch(rows)
    loss = MCInfoNCE(16.0, 4, learn_kappa_pos=True).double()

    def value(log_kappa):
        generator = torch.Generator().manual_seed(1)  # the same draws each time
        return torch.func.functional_call(
            loss,
            {"log_kappa_pos": log_kappa},
            (VonMisesFisher(a, 4.0), VonMisesFisher(b, 6.0), negatives, generator),
        )

    at = loss.log_kappa_pos.detach()
    slope = lambda x: torch.autograd.functional.jacobian(value, x)  # noqa: E731
    numeric = (slope(at + 1e-4) - slope(at - 1e-4)) / 2e-4
    found = torch.autograd.functional.hessian(value, at)
    assert abs(found) > 1e-3
    torch.testing.assert_close(found, numeric, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, -3.0])
@pytest.mark.parametrize("where", ["q", "q_pos", "q_neg"])
def test_a_certainty_that_no_one_checked_is_refused(name, bad, where):
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for key, shape in (("q", (3,)), ("q_pos", (3,)), ("q_neg", (3, 4))):
        loc = F.normalize(torch.randn(*shape, 5, generator=generator), dim=-1)
        kappa = torch.full(shape, 4.0)
        if key == where:
            kappa.view(-1)[1] = bad
        parts[key] = VonMisesFisher(loc, kappa, validate_args=False)
    loss = make_loss(name, kappa_pos=16.0, n_samples=4, a=1.0, b=0.0)
    with pytest.raises(
        ValueError, match=f"{where} has a concentration below 0, or NaN"
    ):
        loss(*parts.values())
