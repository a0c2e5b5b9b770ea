"""Properties of every exported loss, kernel and metric, over shapes, types and sizes that hypothesis picks.

`covers` says which names a property is about; the last test compares these with what the modules export.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from example_losses import closed, example, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pcl import harmonics, kernels, losses, marginal, metrics, neighbours, nonisotropic
from pcl.harmonics import (
    clenshaw,
    coefficients,
    harmonic_counts,
    magnitude,
    upper_edges,
    zonal_harmonics,
)
from pcl.losses import LOSSES, ExactInfoNCE, loss_landscape
from pcl.marginal import log_marginal
from pcl.nonisotropic import NonIsotropicVMF, fit_nonisotropic
from pcl.vmf import VonMisesFisher, fit_vmf

COVERED: set[str] = set()
DTYPES = (torch.float32, torch.float64)
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def covers(*names: str) -> Callable[[Callable], Callable]:
    """Note that a test states a property of these names."""
    COVERED.update(names)
    return lambda test: test


class World:
    """Random posteriors and rotations of one dimension, type and seed."""

    def __init__(self, dim: int, dtype: torch.dtype, seed: int, largest: float) -> None:
        self.dim, self.dtype, self.largest = dim, dtype, largest
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def kappa(self, *shape: int) -> Tensor:
        """Concentrations over many orders of magnitude."""
        return (
            self.largest
            ** torch.rand(*shape, generator=self.generator, dtype=self.dtype)
            - 1
        )

    def posteriors(self, *shape: int) -> VonMisesFisher:
        return VonMisesFisher(
            nn.functional.normalize(self.normal(*shape, self.dim), dim=-1),
            self.kappa(*shape),
        )

    def rotation(self) -> Tensor:
        return torch.linalg.qr(self.normal(self.dim, self.dim).double())[0].to(
            self.dtype
        )

    def close(self, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
        """Equal up to the rounding of the type, for numbers of about this size."""
        tolerance = (2e-4 if self.dtype == torch.float32 else 1e-9) * max(1.0, scale)
        assert a.dtype == b.dtype == self.dtype
        torch.testing.assert_close(
            a, b, rtol=2e-4 if self.dtype == torch.float32 else 1e-9, atol=tolerance
        )


@st.composite
def worlds(draw: st.DrawFn, largest: float = 1e4) -> World:
    dim = draw(st.one_of(st.integers(2, 6), st.sampled_from([10, 17, 64])))
    return World(
        dim, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20)), largest
    )


def rotated(q: VonMisesFisher, rotation: Tensor) -> VonMisesFisher:
    return VonMisesFisher(
        nn.functional.normalize(q.loc @ rotation, dim=-1), q.concentration
    )


def taken(q: VonMisesFisher, index: Tensor) -> VonMisesFisher:
    return VonMisesFisher(q.loc[index], q.concentration[index])


def leaves(*posteriors: VonMisesFisher) -> tuple[list[VonMisesFisher], list[Tensor]]:
    """The same posteriors on new parameters that gradients can reach."""
    parameters = [
        x.detach().clone().requires_grad_()
        for q in posteriors
        for x in (q.loc, q.concentration)
    ]
    return [
        VonMisesFisher(a, b)
        for a, b in zip(parameters[::2], parameters[1::2], strict=True)
    ], parameters


# --- losses
# ----------------------------------------------------------------------------------------------------------

CLOSED, SAMPLED = closed(), sampled()


sizes = st.tuples(
    st.integers(2, 5), st.sampled_from(["batch", "own", "shared"]), st.integers(1, 4)
)


def batch(world: World, size: tuple[int, str, int]) -> list[VonMisesFisher | None]:
    rows, negatives, m = size
    shape = {"batch": None, "own": (rows, m), "shared": (1, m)}[negatives]
    return [
        world.posteriors(rows),
        world.posteriors(rows),
        None if shape is None else world.posteriors(*shape),
    ]


def call(loss: nn.Module, parts: list[VonMisesFisher | None], seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return loss(*parts)


@covers("losses.ContrastiveLoss", "losses.make_loss")
@covers(*(f"losses.{kind.__name__}" for kind in LOSSES.values()))
@pytest.mark.parametrize("name", LOSSES)
@few
@given(world=worlds(), size=sizes)
def test_losses_have_one_finite_value_per_row_and_finite_slopes(
    name: str, world: World, size: tuple[int, str, int]
) -> None:
    parts, parameters = leaves(*(q for q in batch(world, size) if q is not None))
    parts = [*parts, *[None] * (3 - len(parts))]
    per_row, mean, total = (
        call(example(name, reduction=r), parts) for r in ("none", "mean", "sum")
    )
    assert (
        per_row.shape == (size[0],)
        and per_row.dtype == world.dtype
        and per_row.isfinite().all()
    )
    torch.testing.assert_close(mean, per_row.mean())
    torch.testing.assert_close(total, per_row.sum())
    slopes = torch.autograd.grad(
        mean, parameters, allow_unused=True, materialize_grads=True
    )
    assert all(s.isfinite().all() and s.dtype == world.dtype for s in slopes)


@pytest.mark.parametrize("name", CLOSED)
@few
@given(world=worlds(), size=sizes)
def test_closed_losses_see_neither_rotations_nor_the_order_of_rows(
    name: str, world: World, size: tuple[int, str, int]
) -> None:
    q, q_pos, q_neg = parts = batch(world, size)
    loss = example(name, reduction="none")
    value, turn = loss(*parts), world.rotation()
    scale = (
        20 + world.largest * 1e-3 + value.abs().max().item()
    )  # float32 cosines times the largest concentration
    world.close(
        loss(*(None if p is None else rotated(p, turn) for p in parts)), value, scale
    )
    order = torch.randperm(size[0], generator=world.generator)
    own = (
        None if q_neg is None else q_neg if size[1] == "shared" else taken(q_neg, order)
    )
    world.close(loss(taken(q, order), taken(q_pos, order), own), value[order], scale)
    if size[1] == "shared":
        expanded = VonMisesFisher(
            q_neg.loc.expand(size[0], -1, -1), q_neg.concentration.expand(size[0], -1)
        )
        world.close(loss(q, q_pos, expanded), value, scale)


@pytest.mark.parametrize("name", SAMPLED)
@few
@given(world=worlds(), size=sizes, chunk=st.integers(1, 9))
def test_sampled_losses_depend_on_the_seed_only(
    name: str, world: World, size: tuple[int, str, int], chunk: int
) -> None:
    parts = batch(world, size)
    value = call(example(name, reduction="none"), parts, seed=1)
    assert call(example(name, reduction="none"), parts, seed=1).equal(value)
    world.close(
        call(example(name, reduction="none", chunk_size=chunk), parts, seed=1),
        value,
        20,
    )


@pytest.mark.parametrize("name", SAMPLED)
@few
@given(world=worlds(), size=sizes)
def test_sampled_losses_of_points_see_neither_rotations_nor_order(
    name: str, world: World, size: tuple[int, str, int]
) -> None:
    """Where every posterior is a point, all draws are the same, and what holds on
    average holds for each."""
    parts = [
        None
        if p is None
        else VonMisesFisher(p.loc, torch.full_like(p.concentration, math.inf))
        for p in batch(world, size)
    ]
    q, q_pos, q_neg = parts
    loss, turn = example(name, reduction="none"), world.rotation()
    value = call(loss, parts)
    world.close(
        call(loss, [None if p is None else rotated(p, turn) for p in parts]), value, 40
    )
    order = torch.randperm(size[0], generator=world.generator)
    own = (
        None if q_neg is None else q_neg if size[1] == "shared" else taken(q_neg, order)
    )
    world.close(
        call(loss, [taken(q, order), taken(q_pos, order), own]), value[order], 40
    )


@pytest.mark.parametrize("name", LOSSES)
@few
@given(world=worlds(), rows=st.integers(2, 4), m=st.integers(1, 3))
def test_losses_refuse_what_has_no_meaning(
    name: str, world: World, rows: int, m: int
) -> None:
    loss = example(name)
    q, q_pos, q_neg = (
        world.posteriors(rows),
        world.posteriors(rows),
        world.posteriors(rows, m),
    )
    other = World(world.dim + 1, world.dtype, 0, 10.0)
    single = World(
        world.dim,
        torch.float32 if world.dtype == torch.float64 else torch.float64,
        0,
        10.0,
    )
    first = torch.tensor([0])
    for bad in ((q, world.posteriors(rows + 1)), (q, q_neg), (q_neg, q_pos), (q, q_pos, q_pos), (q, other.posteriors(rows)),
                (q, q_pos, world.posteriors(rows + 1, m)), (taken(q, first), taken(q_pos, first))):  # fmt: skip
        with pytest.raises(ValueError, match="q"):
            loss(*bad)
    with pytest.raises(TypeError, match="q_pos has dtype"):
        loss(q, single.posteriors(rows))
    with pytest.raises(TypeError, match="q must be a VonMisesFisher"):
        loss(q.loc, q_pos)
    loc, kappa = q.loc, q.concentration
    for wrong in ((loc * math.nan, kappa), (loc, kappa * math.nan)):
        with pytest.raises(ValueError, match=r"loc|concentration"):
            VonMisesFisher(*wrong)


@covers("harmonics.upper_edges", "harmonics.magnitude")
@pytest.mark.parametrize("dim", [3, 10, 64])
def test_bins_lie_above_and_bound_the_terms_of_the_series(dim: int) -> None:
    generator, n_terms = torch.Generator().manual_seed(dim), 24
    kappas = 40 * torch.rand(3, 1, 50, generator=generator, dtype=torch.float64)
    t = 2 * torch.rand(1, 50, generator=generator, dtype=torch.float64) - 1
    found = [upper_edges(k) for k in kappas]
    for k, (edges, bins) in zip(kappas, found, strict=True):
        assert len(edges) <= 16 and bool((edges.diff() > 0).all())
        assert bool((edges[bins] >= k * (1 - 1e-12)).all())
    counts = harmonic_counts(dim, n_terms).double()
    at = [coefficients(edges, dim, n_terms)[0] for edges, _ in found]
    at[0] = at[0] * counts[:, None]
    bound = magnitude(t, *(list(x) for x in zip(*found, strict=True)), at, dim)
    a = [coefficients(k[0], dim, n_terms)[0] for k in kappas]
    terms = counts[:, None] * a[0] * a[1] * a[2]
    size = (terms * zonal_harmonics(t[0], dim, n_terms)).abs().sum(0)
    assert bound.shape == t.shape and bool((bound[0] >= size * (1 - 1e-9)).all())


@covers("losses.Draws")
@pytest.mark.parametrize("name", SAMPLED)
@few
@given(world=worlds(), size=sizes)
def test_draws_are_cosines_that_can_be_cut_along_the_samples(
    name: str, world: World, size: tuple[int, str, int]
) -> None:
    loss, parts = example(name), batch(world, size)
    draws = loss.draw(*parts, torch.Generator().manual_seed(0))
    cosines = draws.cosines(*draws.sampled, *draws.fixed)
    assert cosines.shape == (loss.n_samples, len(draws.positive), draws.n)
    assert (cosines.abs() <= 1 + 1e-3).all() and (draws.positive < draws.n).all()
    first = draws.cosines(*(x[:1] for x in draws.sampled), *draws.fixed)
    world.close(first[0], cosines[0], 20)


@covers("losses.loss_landscape")
@few
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    dim=st.integers(2, 12),
)
def test_the_landscape_broadcasts_and_falls_towards_the_positive(
    dtype: torch.dtype, rows: int, columns: int, dim: int
) -> None:
    cos = torch.linspace(-0.9, 0.9, columns, dtype=dtype).requires_grad_()
    kappa = torch.logspace(0, 2, rows, dtype=dtype)[:, None].requires_grad_()
    value = loss_landscape(
        ExactInfoNCE(20.0, reduction="none"), cos, kappa, dim=dim, n_neg=5
    )
    assert value.shape == (rows, columns) and value.dtype == dtype
    slopes = torch.autograd.grad(value.sum(), [cos, kappa])
    assert all(s.isfinite().all() for s in slopes) and (slopes[0] < 0).all()


# --- kernels
# ---------------------------------------------------------------------------------------------------------


@covers(
    "harmonics.coefficients",
    "harmonics.clenshaw",
    "harmonics.harmonic_growth",
    "harmonics.bessel_top",
    "harmonics.bessel_down",
)
@few
@given(dim=st.integers(2, 40), n=st.integers(2, 24), kappa=st.floats(0.1, 200))
def test_coefficients_fall_with_the_degree_and_sum_to_the_density(
    dim: int, n: int, kappa: float
) -> None:
    both = torch.tensor([kappa, 2 * kappa], dtype=torch.float64)
    a, slopes = coefficients(both, dim, n)
    assert (a[0] == 1).all() and (a.diff(dim=0) < 0).all() and (a >= 0).all()
    assert (a[1:, 1] > a[1:, 0]).all() and (slopes[1:] > 0).all()
    step = 1e-5 * kappa
    up, down = (coefficients(both + s, dim, n)[0] for s in (step, -step))
    torch.testing.assert_close(slopes, (up - down) / (2 * step), rtol=1e-5, atol=1e-9)
    growth = [harmonics.harmonic_growth(dim, degree) for degree in range(n - 1)]
    counts = harmonic_counts(dim, n)
    torch.testing.assert_close(counts[1:] / counts[:-1], torch.tensor(growth).double())
    # one rung down from the top is the ratio of the order below
    order = 64.0 + dim / 2
    _, short, slope = harmonics.bessel_top(order, both)
    lower = harmonics.bessel_down(order - 1, both, short, slope)
    expected = harmonics.bessel_top(order - 1 + 1e-12, both)[1:]
    torch.testing.assert_close(lower[1:], expected, rtol=1e-9, atol=1e-12)
    # the sweep sums the terms
    t = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None].repeat(1, 2)
    left = (counts[:, None, None] * a[:, None])[:, None]
    (total,) = clenshaw(t, left, torch.ones_like(left), dim, False)
    terms = counts[:, None, None] * a[:, None] * zonal_harmonics(t, dim, n)
    scale = float(terms.abs().sum(0).max())
    torch.testing.assert_close(total, terms.sum(0), rtol=0, atol=1e-12 * scale)


@covers("harmonics.zonal_harmonics", "harmonics.harmonic_counts")
@few
@given(
    dim=st.integers(2, 40),
    n=st.integers(1, 24),
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (3,), (2, 1, 4)]),
)
def test_harmonics_are_bounded_alternate_and_are_orthogonal(
    dim: int, n: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    t = (
        torch.rand(shape, dtype=dtype, generator=torch.Generator().manual_seed(n)) * 2
        - 1
    )
    values, signs = zonal_harmonics(t, dim, n), (-1.0) ** torch.arange(n)
    slack = 200 * torch.finfo(dtype).eps
    assert (
        values.shape == (n, *shape)
        and values.dtype == dtype
        and (values.abs() <= 1 + slack).all()
    )
    mirrored = signs.to(dtype).view(n, *[1] * len(shape)) * values
    torch.testing.assert_close(
        zonal_harmonics(-t, dim, n), mirrored, rtol=0, atol=slack
    )
    x, weights = map(
        torch.from_numpy, np.polynomial.legendre.leggauss(64 + 2 * n + dim)
    )
    angle = (x + 1) * math.pi / 2
    measure = weights * angle.sin() ** (dim - 2)
    grid = harmonic_counts(dim, n).sqrt()[:, None] * zonal_harmonics(
        angle.cos(), dim, n
    )  # of unit length
    squares = (grid * measure) @ grid.T / measure.sum()
    torch.testing.assert_close(
        squares, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    "call",
    [lambda: harmonic_counts(1, 3), lambda: zonal_harmonics(torch.zeros(2), 1, 3)],
)
def test_harmonics_need_a_sphere_with_an_angle(call: Callable) -> None:
    with pytest.raises(ValueError, match="dim must be at least 2"):
        call()


SYMMETRIC = (
    "log_expected_likelihood",
    "log_bhattacharyya",
    "cosine_similarity",
    "squared_distance",
)
KERNELS = (*SYMMETRIC, "kl")
# Rounding of a cosine, times the largest concentrations it meets, in units of
# World.close.
SCALE = {
    "squared_distance": 1e6,
    "kl": 1e2,
    "log_expected_likelihood": 1e2,
    "log_bhattacharyya": 1e2,
    "cosine_similarity": 1.0,
}


@covers(*(f"kernels.{name}" for name in KERNELS))
@pytest.mark.parametrize("name", KERNELS)
@few
@given(world=worlds(), n=st.integers(1, 4), m=st.integers(1, 4))
def test_kernels_broadcast_and_see_no_rotation(
    name: str, world: World, n: int, m: int
) -> None:
    kernel, (p, q) = getattr(kernels, name), (world.posteriors(n), world.posteriors(m))
    value, turn = kernel(p, q, pairwise=True), world.rotation()
    assert (
        value.shape == (n, m) and value.dtype == world.dtype and value.isfinite().all()
    )
    column = VonMisesFisher(p.loc[:, None], p.concentration[:, None])
    world.close(kernel(column, q), value, SCALE[name] * 1e-2)
    world.close(
        kernel(rotated(p, turn), rotated(q, turn), pairwise=True), value, SCALE[name]
    )
    order = torch.randperm(n, generator=world.generator)
    world.close(kernel(taken(p, order), q, pairwise=True), value[order])
    if name in SYMMETRIC:
        world.close(kernel(q, p, pairwise=True).mT, value)
    else:
        assert (value >= 0).all() and (
            kernel(p, p) <= 1e-6 * (1 + p.concentration)
        ).all()
    if name == "log_bhattacharyya":
        assert (value <= 1e-6).all() and kernel(p, p).abs().max() < 1e-5


@pytest.mark.parametrize("name", KERNELS)
@few
@given(world=worlds(), n=st.integers(1, 4))
def test_kernels_have_finite_slopes_and_refuse_other_dimensions(
    name: str, world: World, n: int
) -> None:
    kernel = getattr(kernels, name)
    (p, q), parameters = leaves(world.posteriors(n), world.posteriors(n))
    slopes = torch.autograd.grad(
        kernel(p, q).sum(), parameters, allow_unused=True, materialize_grads=True
    )
    assert all(s.isfinite().all() and s.dtype == world.dtype for s in slopes)
    with pytest.raises(ValueError, match="p and q"):
        kernel(p, World(world.dim + 1, world.dtype, 0, 10.0).posteriors(n))
    with pytest.raises(ValueError, match="p and q"):
        kernel(world.posteriors(n + 1, 2), world.posteriors(n + 2, 2))
    with pytest.raises(TypeError, match="q must be a VonMisesFisher"):
        kernel(p, q.loc)


@covers("kernels.elk_at")
@few
@given(world=worlds())
def test_the_expected_likelihood_knows_the_means_by_their_gap_only(
    world: World,
) -> None:
    p, q = world.posteriors(5), world.posteriors(5)
    gap = (p.loc.double() - q.loc.double()).square().sum(-1) / 2
    kappas = p.concentration.double(), q.concentration.double()
    value = kernels.elk_at(world.dim, gap, *kappas)
    world.close(value.to(p.loc.dtype), kernels.log_expected_likelihood(p, q), 100)
    torch.testing.assert_close(kernels.elk_at(world.dim, gap, *kappas[::-1]), value)


@covers("marginal.log_marginal")
@few
@given(
    world=worlds(largest=1e3),
    n=st.integers(1, 3),
    m=st.integers(1, 4),
    kappa_pos=st.floats(0.1, 200.0),
)
def test_the_marginal_is_symmetric_broadcasts_and_rises_with_the_cosine(
    world: World, n: int, m: int, kappa_pos: float
) -> None:
    cos = (
        2 * torch.rand(n, m, generator=world.generator, dtype=world.dtype) - 1
    ).requires_grad_()
    k1, k2 = world.kappa(n, 1).requires_grad_(), world.kappa(1, m).requires_grad_()
    value = log_marginal(cos, k1, k2, kappa_pos, world.dim)
    assert (
        value.shape == (n, m) and value.dtype == world.dtype and value.isfinite().all()
    )
    world.close(log_marginal(cos, k2, k1, kappa_pos, world.dim), value, 20)
    fixed = torch.full_like(k1, kappa_pos)
    for swapped in ((fixed, k2, k1), (k1, fixed, k2)):
        world.close(log_marginal(cos, *swapped, world.dim), value, 20)
    flat = [x.expand(n, m).reshape(-1) for x in (cos, k1, k2)]
    world.close(log_marginal(*flat, kappa_pos, world.dim).reshape(n, m), value, 20)
    slopes = torch.autograd.grad(value.sum(), [cos, k1, k2])
    assert all(s.isfinite().all() for s in slopes)
    closer = log_marginal((cos + 0.1).clamp(max=1), k1, k2, kappa_pos, world.dim)
    assert (closer >= value - 1e-4 * (1 + value.abs())).all()
    empty = log_marginal(cos[:0], k1[:0], k2, kappa_pos, world.dim)
    assert empty.shape == (0, m) and empty.dtype == world.dtype
    for bad in (
        (cos * math.nan, k1, k2, 1.0),
        (cos, -1 - k1, k2, 1.0),
        (cos, k1, k2, math.nan),
        (cos + 3, k1, k2, 1.0),
    ):
        with pytest.raises(ValueError, match=r"cos|kappa"):
            log_marginal(*bad, world.dim)


@covers("nonisotropic.fit_nonisotropic")
@few
@given(seed=st.integers(0, 2**20), dim=st.integers(2, 6))
def test_a_stretched_fit_is_no_worse_than_a_round_one_and_knows_no_order_of_axes(
    seed: int, dim: int
) -> None:
    world = World(dim, torch.float64, seed, 30.0)
    scale = 2 + world.kappa(dim)
    made = NonIsotropicVMF(world.posteriors(1).loc[0], scale)
    x = made.rsample((60,), generator=world.generator)
    found = fit_nonisotropic(x)
    reached = found.log_prob(x).mean()
    assert reached >= fit_vmf(x).log_prob(x).mean() - 1e-9
    axes = torch.randperm(dim, generator=world.generator)
    again = fit_nonisotropic(x[:, axes])
    assert (again.log_prob(x[:, axes]).mean() - reached).abs() < 1e-4


@covers("nonisotropic.NonIsotropicVMF")
@few
@given(world=worlds(largest=100.0), n=st.integers(1, 3), m=st.integers(1, 3))
def test_the_non_isotropic_density_turns_with_its_axes_and_reduces_to_the_isotropic(
    world: World, n: int, m: int
) -> None:
    loc, scale = world.posteriors(n).loc, 0.5 + world.kappa(n, world.dim)
    q, x = NonIsotropicVMF(loc, scale), world.posteriors(m, 1).loc
    value = q.log_prob(x)
    assert (
        value.shape == (m, n) and value.dtype == world.dtype and value.isfinite().all()
    )
    axes = torch.randperm(world.dim, generator=world.generator)
    world.close(
        NonIsotropicVMF(loc[:, axes], scale[:, axes]).log_prob(x[..., axes]), value, 100
    )
    same = scale[:, :1].expand(-1, world.dim)
    world.close(
        NonIsotropicVMF(loc, same).log_prob(x),
        VonMisesFisher(loc, scale[:, 0]).log_prob(x),
        100,
    )
    draws = q.rsample((5,), generator=world.generator)
    assert draws.shape == (5, n, world.dim) and draws.dtype == world.dtype
    assert (torch.linalg.vector_norm(draws, dim=-1) - 1).abs().max() < 1e-5
    for bad in (
        (loc * math.nan, scale),
        (loc, scale * math.nan),
        (loc, -scale),
        (loc, scale[:, 1:]),
        (2 * loc, scale),
    ):
        with pytest.raises(ValueError, match=r"loc|concentration"):
            NonIsotropicVMF(*bad)


# --- metrics
# ---------------------------------------------------------------------------------------------------------

numbers = st.floats(-1e3, 1e3, width=32)
kinds = st.sampled_from([np.float32, np.float64, torch.float32, torch.float64])


@st.composite
def two_columns(draw: st.DrawFn, least: int = 2) -> tuple:
    """Two vectors of one length, as arrays or as tensors."""
    n, kind = draw(st.integers(least, 30)), draw(kinds)
    pair = [draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(2)]
    return tuple(
        torch.tensor(x, dtype=kind)
        if isinstance(kind, torch.dtype)
        else np.array(x, dtype=kind)
        for x in pair
    )


@covers("metrics.rmse", "metrics.mae")
@few
@given(pair=two_columns(least=1), seed=st.integers(0, 99))
def test_errors_are_symmetric_homogeneous_and_ordered(pair: tuple, seed: int) -> None:
    a, b = pair
    order = np.random.default_rng(seed).permutation(len(a))
    for error in (metrics.rmse, metrics.mae):
        value = error(a, b)
        assert (
            isinstance(value, float) and value == error(b, a) >= 0 and error(a, a) == 0
        )
        assert error(-2 * a, -2 * b) == pytest.approx(2 * value, rel=1e-6, abs=1e-9)
        assert error(a[order], b[order]) == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert metrics.mae(a, b) <= metrics.rmse(a, b) * (1 + 1e-6) + 1e-12


@covers("metrics.pearson", "metrics.spearman")
@few
@given(pair=two_columns(), seed=st.integers(0, 99))
def test_correlations_are_symmetric_bounded_and_blind_to_scale(
    pair: tuple, seed: int
) -> None:
    a, b = pair
    order = np.random.default_rng(seed).permutation(len(a))
    for correlation in (metrics.pearson, metrics.spearman):
        value = correlation(a, b)
        if (
            len(set(np.asarray(a).tolist())) == 1
            or len(set(np.asarray(b).tolist())) == 1
        ):
            assert math.isnan(value), "a constant has no correlation"
            continue
        assert isinstance(value, float) and -1 - 1e-9 <= value <= 1 + 1e-9
        for other in (
            correlation(b, a),
            correlation(4 * a, b),
            -correlation(-a, b),
            correlation(a[order], b[order]),
        ):
            assert other == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert correlation(a, a) == pytest.approx(1)
    assert metrics.spearman(np.asarray(a).astype(np.float64) ** 3, b) == pytest.approx(
        metrics.spearman(a, b), nan_ok=True
    )


@covers("metrics.as_vector")
@pytest.mark.parametrize("name", ["rmse", "mae", "pearson", "spearman"])
@few
@given(pair=two_columns())
def test_comparisons_refuse_nan_whole_numbers_and_other_lengths(
    name: str, pair: tuple
) -> None:
    compare, (a, b) = getattr(metrics, name), pair
    assert np.array_equal(metrics.as_vector("a", a), np.asarray(a))
    for bad, error in (((a * math.nan, b), "a has NaN"), ((a, b * math.nan), "b has NaN"), ((a[1:], b), "as many entries"),
                       ((a[:0], b[:0]), "at least")):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            compare(*bad)
    with pytest.raises(TypeError, match="a must hold floats"):
        compare(np.arange(len(b)), b)


@covers("metrics.pair_cosines", "metrics.recovery", "metrics.mean_abs_cosine")
@few
@given(world=worlds(), n=st.integers(3, 12), block=st.integers(1, 20))
def test_recovery_sees_no_rotation(world: World, n: int, block: int) -> None:
    p, q, turn = world.posteriors(n), world.posteriors(n), world.rotation()
    cosines = metrics.pair_cosines(p.loc, block=block)
    assert (
        cosines.shape == (n * (n - 1) // 2,)
        and cosines.dtype == np.float32
        and np.abs(cosines).max() <= 1 + 1e-5
    )
    np.testing.assert_allclose(
        metrics.pair_cosines(rotated(p, turn).loc), cosines, atol=2e-6
    )
    before = metrics.recovery(p.loc, p.concentration, q.loc, q.concentration)
    after = metrics.recovery(
        rotated(p, turn).loc, p.concentration, q.loc @ turn.T, q.concentration
    )
    for name in ("mu_rmse", "mu_mae", "kappa_rmse", "kappa_mae", "kappa_rank"):
        assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-5)
    perfect = metrics.recovery(
        p.loc, p.concentration, rotated(p, turn).loc, p.concentration
    )
    assert (
        perfect["mu_rmse"] < 1e-5
        and perfect["kappa_rmse"] == 0
        and perfect["kappa_rank"] == pytest.approx(1)
    )
    draws = p.sample((8,), generator=world.generator)
    spread = metrics.mean_abs_cosine(draws, p.loc)
    assert (
        spread.shape == (n,)
        and spread.dtype == world.dtype
        and ((spread >= 0) & (spread <= 1 + 1e-5)).all()
    )
    world.close(metrics.mean_abs_cosine(draws @ turn, p.loc @ turn), spread)
    for bad in (lambda: metrics.pair_cosines(p.loc[:1]), lambda: metrics.pair_cosines(p.loc[0]),
                lambda: metrics.recovery(p.loc, p.concentration, q.loc[1:], q.concentration[1:]),
                lambda: metrics.recovery(p.loc * math.nan, p.concentration, q.loc, q.concentration),
                lambda: metrics.mean_abs_cosine(draws, p.loc[:, 1:])):  # fmt: skip
        with pytest.raises(ValueError, match=r"mu|samples|NaN"):
            bad()


@covers("neighbours.nearest", "neighbours.Neighbours", "neighbours.as_embeddings")
@covers("metrics.hits_at_k", "metrics.recall_at_k", "metrics.as_classes")
@few
@given(
    world=worlds(),
    n=st.integers(3, 10),
    m=st.integers(3, 12),
    k=st.integers(1, 2),
    block=st.integers(1, 200),
)
def test_neighbours_are_those_of_a_full_search(
    world: World, n: int, m: int, k: int, block: int
) -> None:
    queries, base, turn = (
        world.normal(n, world.dim),
        world.normal(m, world.dim),
        world.rotation(),
    )
    found = neighbours.nearest(queries, base, k, block=block)
    unit = [nn.functional.normalize(x.double(), dim=-1) for x in (queries, base)]
    full = (unit[0] @ unit[1].T).topk(k).values
    assert (
        found.indices.shape == found.cosines.shape == (n, k)
        and found.cosines.dtype == torch.float64
    )
    torch.testing.assert_close(found.cosines, full, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        neighbours.nearest(3 * queries @ turn, base @ turn, k).cosines,
        full,
        rtol=0,
        atol=1e-5,
    )
    labels = torch.randint(3, (n,), generator=world.generator)
    others = torch.randint(3, (m,), generator=world.generator)
    hits = [
        metrics.hits_at_k(queries, labels, j, base, others) for j in range(1, m + 1)
    ]
    assert all((a <= b).all() for a, b in pairwise(hits)), "more neighbours, more hits"
    recall = metrics.recall_at_k(queries, labels, k)
    assert 0 <= recall <= 1 and recall == pytest.approx(
        metrics.hits_at_k(queries, labels, k).double().mean().item()
    )
    order = torch.randperm(n, generator=world.generator)
    assert metrics.recall_at_k(queries[order], 7 - labels[order], k) == pytest.approx(
        recall
    ), "neither order nor names matter"
    for bad in (lambda: neighbours.nearest(queries * math.nan), lambda: neighbours.nearest(queries, base, m + 1),
                lambda: neighbours.nearest(queries, world.normal(m, world.dim + 1)),
                lambda: metrics.hits_at_k(queries, labels[1:])):  # fmt: skip
        with pytest.raises(ValueError, match=r"queries|database|k must|labels"):
            bad()


@covers("neighbours.unit_rows", "neighbours.cosine_gaps")
@few
@given(world=worlds(), n=st.integers(1, 10), s=st.integers(1, 5))
def test_gaps_see_directions_only(world: World, n: int, s: int) -> None:
    queries, items = world.normal(n, world.dim), world.normal(n, s, world.dim)
    unit = neighbours.unit_rows(items, torch.float64)
    torch.testing.assert_close(unit.norm(dim=-1), torch.ones(n, s).double())
    gaps = neighbours.cosine_gaps(queries, items)
    assert gaps.shape == (n, s) and ((gaps >= 0) & (gaps <= 2 + 1e-9)).all()
    assert neighbours.cosine_gaps(4 * queries, items / 2).equal(gaps)
    assert (neighbours.cosine_gaps(queries, queries.unsqueeze(1)) == 0).all()
    cosines = torch.einsum(
        "nd,nsd->ns", neighbours.unit_rows(queries, torch.float64), unit
    )
    torch.testing.assert_close(1 - gaps, cosines, rtol=0, atol=1e-12)


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Certainties, some of them equal, and answers of both kinds."""
    n = draw(st.integers(2, 40))
    certainty = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    right = draw(st.integers(1, n - 1))
    correct = draw(st.permutations([True] * right + [False] * (n - right)))
    return np.array(
        certainty, dtype=draw(st.sampled_from([np.float32, np.float64]))
    ), np.array(correct)


@covers("metrics.r_auroc", "metrics.rejection_curve", "metrics.rejection_area")
@few
@given(pair=outcomes(), seed=st.integers(0, 99))
def test_rejection_depends_on_the_order_of_certainties_only(
    pair: tuple[np.ndarray, np.ndarray], seed: int
) -> None:
    certainty, correct = pair
    order = np.random.default_rng(seed).permutation(len(certainty))
    tensors = torch.tensor(certainty), torch.tensor(correct)
    same = [
        (np.exp(certainty / 4), correct),
        (certainty[order], correct[order]),
        tensors,
    ]
    auroc, area = (
        metrics.r_auroc(certainty, correct),
        metrics.rejection_area(certainty, correct),
    )
    share = np.array([0.0, 0.25])
    curve = metrics.rejection_curve(certainty, correct, share)
    for other in same:
        assert metrics.r_auroc(*other) == pytest.approx(auroc)
        assert metrics.rejection_area(*other) == pytest.approx(area)
        np.testing.assert_allclose(metrics.rejection_curve(*other, share), curve)
    assert 0 <= auroc <= 1 and metrics.r_auroc(-certainty, correct) == pytest.approx(
        1 - auroc
    )
    assert (
        curve[0] == pytest.approx(correct.mean())
        and ((curve >= 0) & (curve <= 1 + 1e-12)).all()
    )
    best, worst = (
        metrics.rejection_area(np.where(correct, s, -s).astype(np.float64), correct)
        for s in (1.0, -1.0)
    )
    assert (
        best - 1e-12 <= area <= worst + 1e-12
        and metrics.r_auroc(correct.astype(np.float64), correct) == 1
    )
    for metric in (metrics.r_auroc, metrics.rejection_curve, metrics.rejection_area):
        with pytest.raises(ValueError, match="certainty has NaN"):
            metric(certainty * math.nan, correct)
        with pytest.raises(ValueError, match="certainty and correct"):
            metric(certainty[1:], correct)


@covers("metrics.annotator_entropy", "metrics.entropy_correlation")
@few
@given(
    n=st.integers(3, 12),
    classes=st.integers(2, 10),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(DTYPES),
)
def test_entropy_sees_no_order_of_classes(
    n: int, classes: int, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 50, (n, classes), generator=generator).to(dtype) + 0.5
    probs = counts / counts.sum(-1, keepdim=True)
    entropy = metrics.annotator_entropy(probs)
    assert entropy.shape == (n,) and entropy.dtype == torch.float64
    assert ((entropy >= 0) & (entropy <= math.log(classes) + 1e-6)).all()
    classes_order = torch.randperm(classes, generator=generator)
    assert metrics.annotator_entropy(probs[:, classes_order]).equal(entropy)
    certainty = torch.rand(n, generator=generator, dtype=dtype)
    value = metrics.entropy_correlation(certainty, probs)
    assert metrics.entropy_correlation(
        torch.exp(3 * certainty), probs[:, classes_order]
    ) == pytest.approx(value, nan_ok=True)
    rows = torch.randperm(n, generator=generator)
    assert metrics.entropy_correlation(certainty[rows], probs[rows]) == pytest.approx(
        value, nan_ok=True
    )
    for bad in (probs * math.nan, probs * 2, -probs, probs[:, :1]):
        with pytest.raises(ValueError, match="probs"):
            metrics.annotator_entropy(bad)


@covers("metrics.linear_identifiability", "metrics.permutation_score")
@few
@given(world=worlds(), n=st.integers(70, 120))
def test_scores_of_latents_see_no_scale_and_one_of_them_no_rotation(
    world: World, n: int
) -> None:
    z, found = world.normal(n, world.dim), world.normal(n, world.dim)
    r2, score = (
        metrics.linear_identifiability(z, found),
        metrics.permutation_score(z, found),
    )
    assert ((r2 > -1e-9) & (r2 <= 1)).all() and 0 <= score <= 1
    close = pytest.approx(r2, abs=1e-4)
    assert metrics.linear_identifiability(z, 3 * found @ world.rotation()) == close
    order = torch.randperm(world.dim, generator=world.generator)
    turned = metrics.permutation_score(z, -2 * found[:, order])
    assert turned == pytest.approx(score, abs=1e-5)
    assert metrics.permutation_score(found, z) == pytest.approx(score, abs=1e-5)


# --- nothing is left out
# ---------------------------------------------------------------------------------------------


def exported() -> Iterator[str]:
    """Functions and classes of these modules; constants have no properties."""
    sphere = (harmonics, kernels, marginal, nonisotropic, neighbours)
    for module in (losses, *sphere, metrics):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isfunction(thing) or inspect.isclass(thing):
                yield f"{module.__name__.removeprefix('pcl.')}.{name}"


def test_every_exported_loss_kernel_and_metric_has_a_property() -> None:
    missing = set(exported()) - COVERED
    assert missing == set(), (
        f"state a property of {sorted(missing)} in this file, and name them with "
        "@covers"
    )
    assert set(exported()) >= COVERED, (
        "a property of something that is no longer exported"
    )
