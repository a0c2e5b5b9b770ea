"""Every distribution of ours against what torch asks of its own.

The questions are those of torch's generic distribution tests, asked anew: shapes,
expansion, support, gradients, divergences, validation, copies, vmap.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, kl_divergence, transform_to
from torch.nn.functional import normalize

import pcl
from pcl.fisher_bingham import FisherBingham
from pcl.mixtures import MixtureOfVMF
from pcl.nonisotropic import NonIsotropicVMF
from pcl.vmf import HypersphericalUniform, VonMisesFisher

F64 = torch.float64
DIM = 5
Maker = Callable[..., Any]


def directions(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, DIM, generator=generator, dtype=F64)
    return normalize(noise, dim=-1).to(dtype)


def numbers(*shape: int, dtype: torch.dtype = F64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + 3 * torch.rand(shape, generator=generator, dtype=F64)).to(dtype)


def parameters(kind: type, *batch: int, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    """Good parameters of a kind of distribution, of a batch shape."""
    if kind is HypersphericalUniform:
        return {}
    if kind is FisherBingham:
        linear = 3 * directions(*batch, dtype=dtype)
        return {"linear": linear, "quadratic": numbers(*batch, DIM, dtype=dtype)}
    shape = (*batch, 3) if kind is MixtureOfVMF else batch
    wide = (*shape, DIM) if kind is NonIsotropicVMF else shape
    found = {
        "loc": directions(*shape, dtype=dtype),
        "concentration": numbers(*wide, dtype=dtype),
    }
    if kind is MixtureOfVMF:
        found["weights"] = numbers(*shape, dtype=dtype, seed=2)
    return found


def made(kind: type, *batch: int, dtype: torch.dtype = F64, **options: Any) -> Any:
    if kind is HypersphericalUniform:
        flat = HypersphericalUniform(DIM, dtype=dtype, **options)
        return flat.expand(batch) if batch else flat
    return kind(**parameters(kind, *batch, dtype=dtype), **options)


KINDS = [
    VonMisesFisher,
    HypersphericalUniform,
    MixtureOfVMF,
    NonIsotropicVMF,
    FisherBingham,
]
BATCHES = [(), (1,), (4,), (2, 3), (0,), (2, 0)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_batch = pytest.mark.parametrize("batch", BATCHES, ids=str)
parametric = pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if k is not HypersphericalUniform],
    ids=lambda k: k.__name__,
)


def test_no_distribution_of_ours_is_forgotten() -> None:
    found = set()
    folder = Path(pcl.__path__[0])
    for path in folder.rglob("*.py"):
        if "Distribution)" not in path.read_text():
            continue
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        found |= {
            value
            for value in vars(import_module(name)).values()
            if inspect.isclass(value) and issubclass(value, Distribution)
        }
    found = {kind for kind in found if kind.__module__.startswith("pcl.")}
    assert found == set(KINDS)


# ---- shapes


@every_kind
@every_batch
def test_shapes(kind: type, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    d = made(kind, *batch)
    assert d.batch_shape == torch.Size(batch) and d.event_shape == (DIM,)
    for sample_shape in ((), (1,), (3,), (2, 3), (0,)):
        z = d.sample(sample_shape)
        assert z.shape == (*sample_shape, *batch, DIM)
        assert z.shape == d._extended_shape(torch.Size(sample_shape))
        assert d.log_prob(z).shape == (*sample_shape, *batch)
        assert d.support.check(z).all() and not z.requires_grad
    for name in ("mean", "variance", "stddev", "mode"):
        try:
            value = getattr(d, name)
        except NotImplementedError:
            assert kind is NonIsotropicVMF  # it has none in closed form
            continue
        assert value.shape == (*batch, DIM)


@every_kind
def test_values_broadcast_against_the_batch(kind: type) -> None:
    torch.manual_seed(0)
    d, z = made(kind, 2, 3), directions(4, 1, 3)
    assert d.log_prob(z).shape == (4, 2, 3)
    torch.testing.assert_close(d.log_prob(z)[1, 0], d.log_prob(z[1])[0])
    assert made(kind).log_prob(z).shape == (4, 1, 3)
    with pytest.raises(ValueError, match="broadcast"):
        d.log_prob(directions(5))
    with pytest.raises(ValueError, match="shape"):
        d.log_prob(torch.eye(DIM + 1, dtype=F64)[0])


@every_kind
def test_entropy_and_perplexity_have_the_shape_of_the_batch(kind: type) -> None:
    torch.manual_seed(0)
    d = made(kind, 2, 3)
    if kind is NonIsotropicVMF:
        with pytest.raises(NotImplementedError):
            d.entropy()
        return
    assert d.entropy().shape == (2, 3)
    assert d.perplexity().shape == (2, 3) and (d.perplexity() > 0).all()


# ---- expansion


@every_kind
@pytest.mark.parametrize("to", [(4,), (2, 4), (3, 2, 4), (0, 4)], ids=str)
def test_expansion_repeats_the_batch(kind: type, to: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    d = made(kind, 4)
    wide = d.expand(to)
    assert type(wide) is kind and wide.batch_shape == torch.Size(to)
    assert wide.event_shape == d.event_shape
    assert wide._validate_args == d._validate_args
    z = directions(*to)
    torch.testing.assert_close(wide.log_prob(z), d.log_prob(z))
    assert wide.sample((2,)).shape == (2, *to, DIM)
    for name in d.arg_constraints:
        value = getattr(wide, name)
        torch.testing.assert_close(value, getattr(d, name).expand(value.shape))
    again = wide.expand((7, *to))
    assert again.batch_shape == (7, *to)
    with pytest.raises(RuntimeError):
        d.expand((3,))


@every_kind
def test_a_subclass_expands_or_says_that_it_must_define_how(kind: type) -> None:
    class Child(kind):  # type: ignore[misc, valid-type]
        def __init__(self, **given: Tensor) -> None:
            super().__init__(*(() if given else (DIM,)), **given)

    with pytest.raises(NotImplementedError, match="must also define"):
        Child(**parameters(kind, 4)).expand((2, 4))


# ---- draws and gradients


@every_kind
def test_draws_follow_the_seed_and_have_the_dtype(kind: type) -> None:
    for dtype in (torch.float32, F64):
        d = made(kind, 3, dtype=dtype)
        torch.manual_seed(7)
        first = d.sample((5,))
        torch.manual_seed(7)
        assert torch.equal(first, d.sample((5,))) and first.dtype == dtype
        assert d.log_prob(first).dtype == dtype


@parametric
def test_draws_carry_gradients_if_they_say_so(kind: type) -> None:
    given = {k: x.requires_grad_() for k, x in parameters(kind, 4).items()}
    d = kind(**given)
    assert not d.sample((2,)).requires_grad
    if not d.has_rsample:
        with pytest.raises(NotImplementedError):
            d.rsample((2,))
        return
    torch.manual_seed(0)
    z = d.rsample((2,))
    grads = torch.autograd.grad((z * directions(4, seed=3)).sum(), list(given.values()))
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)


def test_the_uniform_has_nothing_to_differentiate() -> None:
    assert HypersphericalUniform.has_rsample
    assert not made(HypersphericalUniform, 3).rsample().requires_grad


@parametric
def test_the_log_density_has_gradients_in_parameters_and_value(kind: type) -> None:
    given = {k: x.requires_grad_() for k, x in parameters(kind, 3).items()}
    z = directions(3, seed=5).requires_grad_()
    names = list(given)

    def log_prob(value: Tensor, *parts: Tensor) -> Tensor:
        again = dict(zip(names, parts, strict=True))
        if "loc" in again:
            again["loc"] = normalize(again["loc"], dim=-1)
        value = normalize(value, dim=-1)
        return kind(**again, validate_args=False).log_prob(value)

    assert torch.autograd.gradcheck(log_prob, (z, *given.values()))


@every_kind
def test_there_is_nothing_to_enumerate_and_no_cdf_of_a_vector(kind: type) -> None:
    d = made(kind, 2)
    assert not d.has_enumerate_support
    for ask in (d.enumerate_support, lambda: d.cdf(directions(2)), lambda: d.icdf(0.5)):
        with pytest.raises(NotImplementedError):
            ask()


# ---- the density itself


@every_kind
def test_the_density_integrates_to_one_and_its_moments_are_those_of_draws(
    kind: type,
) -> None:
    torch.manual_seed(0)
    d, n = made(kind, 4), 40_000
    flat = HypersphericalUniform(DIM, dtype=F64)
    spread = flat.sample((n,))
    ratio = (d.log_prob(spread[:, None]) + flat.entropy()).exp()
    error = (ratio.std(0) / n**0.5).clamp(min=1e-12)
    assert ((ratio.mean(0) - 1).abs() < 5 * error).all()
    if kind is NonIsotropicVMF:
        return
    z = d.sample((n,))
    error = z.std(0) / n**0.5
    assert ((z.mean(0) - d.mean).abs() < 5 * error).all()
    assert ((z.var(0) / d.variance - 1).abs() < 0.06).all()
    log_p = d.log_prob(z)
    error = (log_p.std(0) / n**0.5).clamp(min=1e-12) + 0.02 * (kind is MixtureOfVMF)
    assert ((-log_p.mean(0) - d.entropy()).abs() < 5 * error).all()


# ---- divergences


REGISTERED = {
    (VonMisesFisher, VonMisesFisher),
    (VonMisesFisher, HypersphericalUniform),
    (HypersphericalUniform, VonMisesFisher),
    (HypersphericalUniform, HypersphericalUniform),
    (VonMisesFisher, FisherBingham),
}


def in_six_dimensions(kind: type) -> Any:
    axis, zero = torch.eye(6, dtype=F64)[0], torch.zeros(6, dtype=F64)
    given = {VonMisesFisher: (axis, 2.0), FisherBingham: (axis, zero)}
    return kind(*given.get(kind, (6,)))


@pytest.mark.parametrize(
    "pair",
    list(itertools.product(KINDS, repeat=2)),
    ids=lambda pair: "-".join(k.__name__ for k in pair),
)
def test_divergences_are_right_or_not_there(pair: tuple[type, type]) -> None:
    torch.manual_seed(0)
    p, q = made(pair[0], 2, 1), made(pair[1], 3)
    if pair not in REGISTERED:
        with pytest.raises(NotImplementedError):
            kl_divergence(p, q)
        return
    found = kl_divergence(p, q)
    assert found.shape == (2, 3) and (found >= 0).all()
    z = p.sample((40_000,))
    gap = p.log_prob(z) - q.log_prob(z)
    error = (gap.std(0) / len(z) ** 0.5).clamp(min=1e-9)
    assert ((gap.mean(0) - found).abs() < 5 * error).all()
    inside = kl_divergence(Independent(made(pair[0], 3), 1), Independent(q, 1))
    assert inside.shape == ()
    with pytest.raises(ValueError, match="same dimension"):
        kl_divergence(p, in_six_dimensions(pair[1]))
    if pair[0] is not pair[1]:
        return
    torch.testing.assert_close(
        kl_divergence(q, q), torch.zeros(3, dtype=F64), rtol=0, atol=1e-12
    )


# ---- validation, copies, words


BAD = {
    "loc": [lambda x: 2 * x, lambda x: x * torch.nan],
    "concentration": [lambda x: -x, lambda x: x * torch.nan],
    "weights": [lambda x: -x, lambda x: x * torch.nan],
    "linear": [lambda x: x * torch.inf, lambda x: x * torch.nan],
    "quadratic": [lambda x: x * torch.inf, lambda x: x * torch.nan],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k in KINDS for name in parameters(k, 4)]
)
def test_bad_parameters_are_refused_on_request(kind: type, name: str) -> None:
    given = parameters(kind, 4)
    for spoil in BAD[name]:
        bad = given | {name: spoil(given[name])}
        with pytest.raises(ValueError, match=name):
            kind(**bad, validate_args=True)
        with pytest.raises(ValueError, match=name):
            kind(**bad)
    if kind is FisherBingham or (kind is NonIsotropicVMF and name == "concentration"):
        return  # always checked: without it there is no such distribution
    Distribution.set_default_validate_args(False)
    try:
        kind(**given | {name: BAD[name][0](given[name])})
    finally:
        Distribution.set_default_validate_args(True)
    kind(**given | {name: BAD[name][0](given[name])}, validate_args=False)


@every_kind
def test_values_outside_the_support_are_refused_on_request(kind: type) -> None:
    outside = 2 * directions(4)
    with pytest.raises(ValueError, match="unit vectors"):
        made(kind, 4).log_prob(outside)
    made(kind, 4, validate_args=False).log_prob(outside)
    assert not kind.support.check(outside).any()  # type: ignore[attr-defined]


@every_kind
def test_parameters_satisfy_their_constraints_and_any_numbers_can_be_made_to(
    kind: type,
) -> None:
    d = made(kind, 4)
    generator = torch.Generator().manual_seed(3)
    for name, constraint in d.arg_constraints.items():
        value = getattr(d, name)
        assert constraint.check(value).all()
        free = torch.randn(value.shape, generator=generator, dtype=F64)
        found = transform_to(constraint)(free)
        assert found.shape == value.shape and constraint.check(found).all()
    assert d.support.event_dim == 1
    point = transform_to(d.support)(torch.randn(4, DIM, generator=generator))
    assert d.support.check(point).all()


@every_kind
def test_copies_are_the_same_distribution(kind: type) -> None:
    d, z = made(kind, 4), directions(4, seed=4)
    for again in (copy.copy(d), copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        assert type(again) is kind and again.batch_shape == d.batch_shape
        assert torch.equal(again.log_prob(z), d.log_prob(z))


@every_kind
def test_it_says_what_it_is(kind: type) -> None:
    words = repr(made(kind, 4))
    assert words.startswith(kind.__name__ + "(") and "\n" not in words


@every_kind
def test_it_fits_into_torch_s_wrappers(kind: type) -> None:
    torch.manual_seed(0)
    d = made(kind, 2, 3)
    whole = Independent(d, 1)
    z = whole.sample((4,))
    assert whole.event_shape == (3, DIM) and z.shape == (4, 2, 3, DIM)
    torch.testing.assert_close(whole.log_prob(z), d.log_prob(z).sum(-1))


# ---- torch.func


@parametric
def test_log_densities_can_be_mapped(kind: type) -> None:
    given, z = parameters(kind, 4, 2), directions(4, 2, seed=4)
    names = list(given)

    for check in (False, None):  # None is torch's default, which checks

        def log_prob(value: Tensor, *parts: Tensor, check: Any = check) -> Tensor:
            again = dict(zip(names, parts, strict=True))
            return kind(**again, validate_args=check).log_prob(value)

        mapped = torch.func.vmap(log_prob)(z, *given.values())
        torch.testing.assert_close(mapped, kind(**given).log_prob(z))


@pytest.mark.parametrize(
    "ask",
    [
        lambda d: d.log_prob(torch.eye(DIM, dtype=F64)[0]),
        lambda d: d.entropy(),
        lambda d: d.mean,
        lambda d: d.variance,
        lambda d: d.covariance_matrix,
        lambda d: d.cosine_cdf(0.3),
        lambda d: d.cosine_icdf(0.3),
        lambda d: d.credible_cosine(0.9),
        lambda d: kl_divergence(d, VonMisesFisher(torch.eye(DIM, dtype=F64)[1], 2.0)),
        lambda d: kl_divergence(HypersphericalUniform(DIM, dtype=F64), d),
    ],
    ids="log_prob entropy mean variance covariance cdf icdf cap kl_to kl_from".split(),
)
def test_maps_equal_batches_with_the_default_validation(ask: Any) -> None:
    loc, kappa = directions(4, 2), numbers(4, 2)
    each = torch.func.vmap(lambda m, k: ask(VonMisesFisher(m, k)))(loc, kappa)
    torch.testing.assert_close(each, ask(VonMisesFisher(loc, kappa)))
    only = torch.func.vmap(lambda k: ask(VonMisesFisher(loc[0], k)), in_dims=1)(kappa.T)
    assert only.shape[0] == 4
    with pytest.raises(ValueError, match="concentration"):
        torch.func.vmap(lambda m, k: ask(VonMisesFisher(m, k)))(loc, -kappa)


@every_kind
def test_every_map_draws_for_itself(kind: type) -> None:
    torch.manual_seed(0)
    given, zero = parameters(kind, 4), torch.zeros(4, DIM, dtype=F64)
    names = list(given)

    def draw(_: Tensor, *parts: Tensor) -> Tensor:
        again = dict(zip(names, parts, strict=True))
        d = kind(**again) if again else made(kind)
        return d.sample((200,))

    equal = [x[:1].expand(x.shape) for x in given.values()]
    for arguments in (given.values(), equal):
        z = torch.func.vmap(draw, randomness="different")(zero, *arguments)
        assert z.shape == (4, 200, DIM)
        assert len(z.flatten(0, 1).unique(dim=0)) == 800
        with pytest.raises(RuntimeError, match="randomness"):
            torch.func.vmap(draw, randomness="error")(zero, *arguments)
    # nothing mapped but an offset: still different draws
    one = made(kind)
    z = torch.func.vmap(lambda x: one.sample() + x, randomness="different")(zero)
    assert len(z.unique(dim=0)) == 4


@parametric
def test_mapped_draws_have_the_law_of_plain_ones(kind: type) -> None:
    torch.manual_seed(0)
    given, n = parameters(kind, 3), 4000
    names = list(given)

    def draw(*parts: Tensor) -> Tensor:
        return kind(**dict(zip(names, parts, strict=True))).sample((n,))

    mapped = torch.func.vmap(draw, randomness="different")(*given.values()).movedim(
        0, 1
    )
    plain = kind(**given).sample((n,))
    for f in (lambda z: z, torch.square):
        error = (f(plain).var(0) + f(mapped).var(0)).sqrt() / n**0.5
        assert ((f(plain).mean(0) - f(mapped).mean(0)).abs() < 4.5 * error).all()


def summaries(kind: type) -> list[str]:
    """What a distribution states in closed form, beside its density."""
    return {
        NonIsotropicVMF: [],
        MixtureOfVMF: ["mean"],  # the entropy is drawn
        VonMisesFisher: ["mean", "entropy"],
        FisherBingham: ["mean", "entropy", "variance"],
    }[kind]


@parametric
def test_second_derivatives_and_forward_mode_of_all_that_is_closed(kind: type) -> None:
    given, z = parameters(kind, 2), directions(2, seed=6)
    for moved, name in itertools.product(given, ["log_prob", *summaries(kind)]):
        if (moved, name) == ("loc", "entropy"):
            continue  # the one does not depend on the other

        def value(x: Tensor, moved: str = moved, name: str = name) -> Tensor:
            x = normalize(x, dim=-1) if moved == "loc" else x
            d = kind(**given | {moved: x})
            found = d.log_prob(z) if name == "log_prob" else getattr(d, name)
            return found() if callable(found) else found

        start = given[moved].requires_grad_()
        assert torch.autograd.gradcheck(value, start, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(value, start)
        total = lambda x: value(x).sum()  # noqa: E731
        bend = torch.autograd.functional.hessian(total, start)
        torch.testing.assert_close(torch.func.hessian(total)(start.detach()), bend)
        given[moved].requires_grad_(False)


@pytest.mark.parametrize("kind", [MixtureOfVMF, FisherBingham])
def test_a_mode_that_is_searched_for_has_no_slope_in_either_mode(kind: type) -> None:
    given = parameters(kind, 2)
    moved = next(name for name in given if name != "loc")
    found = torch.func.jacfwd(lambda x: kind(**given | {moved: x}).mode)(given[moved])
    assert not found.any() and not kind(**given).mode.requires_grad


@pytest.mark.parametrize("name", ["mean", "variance", "entropy", "mode"])
def test_maps_of_a_fisher_bingham_distribution(name: str) -> None:
    given = parameters(FisherBingham, 4)

    def ask(b: Tensor, a: Tensor) -> Tensor:
        found = getattr(FisherBingham(b, a), name)
        return found() if callable(found) else found

    mapped = torch.func.vmap(ask)(*given.values())
    torch.testing.assert_close(mapped, ask(*given.values()))
    with pytest.raises(ValueError, match="finite"):
        torch.func.vmap(ask)(given["linear"], given["quadratic"] / 0)


def test_mapped_draws_have_the_law_and_the_gradient_of_plain_ones() -> None:
    torch.manual_seed(0)
    loc, kappa = directions(3), numbers(3)

    def mean_cosine(m: Tensor, k: Tensor) -> Tensor:
        return (VonMisesFisher(m, k).rsample((20_000,)) @ m).mean()

    draw = torch.func.vmap(
        torch.func.grad_and_value(mean_cosine, argnums=1), randomness="different"
    )
    slope, value = draw(loc, kappa)
    vmf = VonMisesFisher(loc, kappa)
    torch.testing.assert_close(value, vmf.mean.norm(dim=-1), rtol=0, atol=0.015)
    along = torch.linalg.vecdot(loc, (vmf.covariance_matrix @ loc[..., None])[..., 0])
    torch.testing.assert_close(slope, along, rtol=0.1, atol=0.003)


LOC, POINTS, OTHER = directions(3), directions(3, seed=9), made(VonMisesFisher)
FORWARD = {
    "log_prob": lambda k: VonMisesFisher(LOC, k).log_prob(POINTS),
    "entropy": lambda k: VonMisesFisher(LOC, k).entropy(),
    "mean": lambda k: VonMisesFisher(LOC, k).mean,
    "kl": lambda k: kl_divergence(VonMisesFisher(LOC, k), OTHER),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_agrees_with_reverse_mode(name: str) -> None:
    value = lambda k: FORWARD[name](k).sum()  # noqa: E731
    kappa, func, ad = numbers(3), torch.func, torch.autograd.forward_ad
    slope = torch.autograd.functional.jacobian(value, kappa)
    bend = torch.autograd.functional.hessian(value, kappa)
    torch.testing.assert_close(func.jacfwd(value)(kappa), slope)
    with ad.dual_level():
        dual = value(ad.make_dual(kappa, torch.ones_like(kappa)))
        torch.testing.assert_close(ad.unpack_dual(dual).tangent, slope.sum())
    for found in (
        func.hessian(value)(kappa),
        func.jacfwd(func.jacfwd(value))(kappa),
        func.jacrev(func.jacfwd(value))(kappa),
        func.jacrev(func.jacrev(value))(kappa),
    ):
        torch.testing.assert_close(found, bend)
    assert bend.abs().max() > 1e-4


def test_forward_mode_in_the_direction() -> None:
    kappa = numbers(3)

    def value(m: Tensor) -> Tensor:
        return VonMisesFisher(normalize(m, dim=-1), kappa).log_prob(POINTS).sum()

    torch.testing.assert_close(
        torch.func.hessian(value)(LOC), torch.autograd.functional.hessian(value, LOC)
    )


def test_the_old_name_of_the_covariance_warns() -> None:
    d = made(VonMisesFisher, 2)
    with pytest.warns(FutureWarning, match="covariance_matrix"):
        old = d.covariance
    assert torch.equal(old, d.covariance_matrix)
    flat = made(HypersphericalUniform, 2)
    torch.testing.assert_close(
        flat.covariance_matrix, torch.eye(DIM, dtype=F64).expand(2, -1, -1) / DIM
    )
