"""Any device: on one that refuses tensors of the CPU, everything on the sphere computes
what it computes here, and every objective trains."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import elsewhere
import pytest
import torch
from example_losses import learning
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from training_world import Encoder, draw

import pcl.objectives
from pcl.checkpoints import read_checkpoint
from pcl.devices import connect, find_device
from pcl.encoders import NormEncoder, encode, mlp_encoder
from pcl.fisher_bingham import FisherBingham
from pcl.losses import LOSSES, ExactInfoNCE, MCInfoNCE
from pcl.networks import device_of, mlp, small_resnet
from pcl.objectives import ByLabel, Classify, Contrast, Learns, Objective
from pcl.pretraining import pretrain_classifier
from pcl.training import (
    Config,
    Epochs,
    local_batch,
    make_optimizer,
    train,
    train_step,
)
from pcl.training import (
    train_encoder as fit,
)
from pcl.vmf import HypersphericalUniform, VonMisesFisher

AWAY = torch.device("privateuseone", 0)
TINY = Config(steps=12, batch_size=16, log_every=3, kappa_from=0.25)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is known to torch, and draws are the same here and there."""
    elsewhere.register()
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, elsewhere.moved(getattr(torch, name)))
    torch.manual_seed(0)


# --- the device itself


def test_the_device_is_as_strict_as_a_gpu() -> None:
    there = torch.arange(3.0).to("elsewhere")
    assert there.device == AWAY and torch.zeros(2, device=AWAY).device == AWAY
    assert torch.tensor([1.0], device="elsewhere").device == AWAY
    assert there.new_zeros(2).device == there[1:].device == (there + 1).device == AWAY
    assert (there * torch.tensor(2.0)).tolist() == [0, 2, 4], (
        "a scalar may be the CPU's"
    )
    assert there.cpu().device.type == "cpu" and there.sum().item() == 3
    for mixed in (
        lambda: there + torch.ones(3),
        lambda: torch.cat([there, torch.ones(1)]),
    ):
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            mixed()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()


def test_a_network_moves_and_its_gradients_are_there() -> None:
    net = mlp([3, 4, 2]).to("elsewhere")
    net(torch.ones(5, 3, device=AWAY)).sum().backward()
    assert device_of(net) == AWAY
    assert all(p.grad is not None and p.grad.device == AWAY for p in net.parameters())


# --- everything on the sphere

LAYERS = (
    "bessel", "polar", "vmf", "harmonics", "kernels", "pair_integral", "marginal", "information", "mixtures",
    "nonisotropic", "fisher_bingham", "neighbours", "losses", "anisotropic", "published.sphere",
    "published.objectives",
)  # fmt: skip
# Exported, but with no tensor among the arguments that could be on a device.
EXEMPT = {
    "keep_eager": "a decorator",
    "harmonic_growth": "a number from two numbers",
    "harmonic_counts": "a table from two numbers, made on the CPU",
    "ContrastiveLoss": "a base class",
    "make_loss": "makes a loss from its name",
    "differentiable_once": "a first derivative as it is; refuses a second one",
    "Draws": "a tuple of what a loss has drawn",
    "published_coefficients": "a table from three numbers, made on the CPU",
    "normalizer_fits": "two curves from one number, fitted on the CPU",
    "Neighbours": "a tuple of what a search has found",
    "Modes": "a tuple of what a climb has found",
    "forward_rule": "a decorator",
    "marginal_curvature": "indexes by lists, which the device of these tests cannot",
    "holds": "a Python truth value from a tensor",
    "upper_edges": "bins inside log_marginal, which is called there",
    "draw_together": "draws inside the sampled losses, which are called there",
    "are_few": "a Python truth value from two numbers",
    "random_stream": "a block within which draws are made",
    "stream_version": "a number",
    "draw_ticket": "None outside of torch.func",
    "magnitude": "a bound inside log_marginal, which is called there",
}


def exported() -> dict[str, Any]:
    """Every function and class that the modules of the sphere and of the losses export."""
    found = {}
    for name in LAYERS:
        if (Path(pcl.__file__).parent / f"{name.replace('.', '/')}.py").exists():
            module = importlib.import_module(f"pcl.{name}")
            found |= {n: getattr(module, n) for n in module.__all__}
    return {n: o for n, o in found.items() if callable(o)}


def cosines(*shape: int) -> Tensor:
    return torch.linspace(-0.9, 0.9, torch.Size(shape).numel()).view(shape)


def directions(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return nn.functional.normalize(torch.randn(*shape, 5, generator=generator), dim=-1)


def posteriors(loc: Tensor, kappa: Tensor) -> list[VonMisesFisher]:
    return [VonMisesFisher(loc, kappa), VonMisesFisher(loc.flip(0), kappa + 3)]


def of_pairs(kernel: Callable[..., Tensor]) -> Callable[..., object]:
    def call(loc: Tensor, kappa: Tensor, **_: Tensor) -> object:
        p, q = posteriors(loc, kappa)
        return kernel(p, q), kernel(p, q, pairwise=True)

    return call


def of_loss(make: Callable[[], nn.Module]) -> Callable[..., object]:
    def call(loc: Tensor, kappa: Tensor, **_: Tensor) -> object:
        p, q = posteriors(loc, kappa)
        far = VonMisesFisher(loc.roll(1, 0)[:, None], kappa[:, None])
        loss = make().to(loc.device)
        return (
            loss(p, q),
            loss(p, q, far),
            loss(p, q, VonMisesFisher(loc[None, 1:], kappa[None, 1:])),
        )

    return call


def of_distribution(q: Any, points: Tensor) -> list[object]:
    """All that a distribution offers."""
    out: list[object] = [q.log_prob(points), q.sample((3,)), q.rsample()]
    q = q.expand((2, *q.batch_shape))
    out += [q.log_prob(points), q.rsample((2,))]
    for name in ("mean", "mode", "variance", "covariance_matrix"):
        try:
            out.append(getattr(q, name))
        except (NotImplementedError, AttributeError):  # it does not offer that
            pass
    return out


def of_fisher_bingham(q: Any, points: Tensor) -> list[object]:
    """What the distribution offers that draws by refusal."""
    moments = [q.mode, q.mean, q.second_moment, q.entropy()]
    return [q.log_prob(points), q.log_mgf(points), q.sample((3,)), *moments]


def whole_vmf(loc: Tensor, kappa: Tensor, cos: Tensor, **_: Tensor) -> object:
    q = VonMisesFisher(loc, kappa)
    uniform = HypersphericalUniform(5, device=loc.device)
    out = of_distribution(q, loc.flip(0))
    out += [
        q.entropy(),
        q.cosine_cdf(cos),
        q.cosine_icdf((cos + 1) / 2),
        q.credible_cosine(0.9),
    ]
    kl = torch.distributions.kl_divergence
    return [*out, kl(q, VonMisesFisher(loc.flip(0), kappa)), kl(q, uniform)]


def whole_uniform(loc: Tensor, **_: Tensor) -> object:
    q = HypersphericalUniform(5, device=loc.device)
    return [q.log_prob(loc), q.sample((3,)), q.mean, q.variance, q.entropy()]


def whole_mixture(loc: Tensor, kappa: Tensor, cos: Tensor, **_: Tensor) -> object:
    q = a_mixture(loc, kappa, cos)
    out = [q.log_prob(loc[:2]), q.mean, q.variance, q.entropy(8), *q.modes()]
    inside = q.in_credible_set(loc[:2], 0.9, 50)
    return [*out, q.mode, q.weights, q.expand((3, 2)).sample((3,)), inside]


def a_mixture(loc: Tensor, kappa: Tensor, cos: Tensor, **_: Tensor) -> Any:
    kind = importlib.import_module("pcl.mixtures").MixtureOfVMF
    return kind(loc.view(2, 2, 5), kappa.view(2, 2), logits=cos.view(2, 2))


def drawn_gap(loc: Tensor, kappa: Tensor, **_: Tensor) -> object:
    polar = importlib.import_module("pcl.polar")
    return polar.draw_gap(
        5, kappa, polar.polar_ratio(5, kappa.shape, kappa, None), None
    )


def summed(kappa: Tensor, cos: Tensor, **_: Tensor) -> object:
    harmonics = importlib.import_module("pcl.harmonics")
    left, right = (
        harmonics.coefficients(k.double(), 5, 12)[0] for k in (kappa, kappa + 1)
    )
    return harmonics.clenshaw(cos.double(), left[:, None], right[:, None], 5, True)


def thrice(kappa: Tensor) -> Tensor:
    return torch.stack([kappa, kappa + 1, kappa + 2]).double()


# Parts of an operation that carries its own derivative: they are called without one.
PLAIN = {
    "ratio_slopes", "fit_fisher_bingham", "fit_nonisotropic", "gap_moments", "turn_rate", "cosine_law", "solve_gap",
    "bessel_top", "bessel_down", "coefficients", "clenshaw",
    "marginal_integral", "marginal_with_point", "fisher_information", "expected_rank", "pairs_needed",
}  # fmt: skip
# How each exported thing is called. Names of modules that are not there yet, or no more, do no harm.
CALLS: dict[str, Callable[..., object]] = {
    "bessel_ratio": lambda kappa, f, **_: f(1.5, kappa),
    "log_iv": lambda kappa, f, **_: f(1.5, kappa),
    "ratio_slopes": lambda kappa, f, **_: f(1.5, kappa),
    "log_sphere_area": lambda whole, f, **_: f(whole),
    "log_normalizer": lambda kappa, f, **_: f(5, kappa),
    "log_peak": lambda kappa, f, **_: f(5, kappa),
    "mean_gap": lambda kappa, f, **_: f(5, kappa),
    "contraction": lambda kappa, f, **_: f(5, kappa),
    "log_acceptance": lambda kappa, cos, f, **_: f(5, kappa, 1 - cos, 1 / (1 + kappa)),
    "polar_ratio": lambda kappa, f, **_: f(5, kappa.shape, kappa, None),
    "draw_gap": lambda f, **inputs: drawn_gap(**inputs),
    "first_accepted": lambda kappa, f, **_: f(5, kappa.flatten(), 3, None),
    "random_numbers": lambda kappa, f, **_: f("normal", (4, 5), kappa, None),
    "capped_kappa": lambda kappa, f, **_: f(kappa),
    "gap_moments": lambda kappa, f, **_: f(5, kappa.double()),
    "turn_rate": lambda kappa, cos, f, **_: f(5, kappa, 1 - cos),
    "cosine_law": lambda kappa, cos, f, **_: f(5, kappa.double(), 1 - cos.double()),
    "solve_gap": lambda kappa, cos, f, **_: f(5, kappa.double(), (1 + cos.double()) / 2, (1 - cos.double()) / 2),
    "bessel_top": lambda kappa, f, **_: f(40.0, kappa.double()),
    "bessel_down": lambda kappa, cos, f, **_: f(3.5, kappa.double(), cos.double().abs(), cos.double().abs()),
    "coefficients": lambda kappa, f, **_: f(kappa.double(), 5, 12),
    "clenshaw": lambda f, **inputs: summed(**inputs),
    "elk_at": lambda kappa, cos, f, **_: f(5, 1 - cos.double(), kappa.double(), 1 + kappa.double()),
    "kl_at": lambda kappa, cos, f, **_: f(5, 1 - cos.double(), kappa.double(), 1 + kappa.double()),
    "marginal_integral": lambda kappa, cos, f, **_: f(cos.double(), thrice(kappa), 5, 1e-9, True),
    "marginal_with_point": lambda kappa, cos, f, **_: f(cos.double(), thrice(kappa) * kappa.new_tensor([[1], [1], [1e30]]), 5),
    "published_acceptance": lambda cos, f, **_: f(cos, 5.0, 5),
    "check_points": lambda loc, f, **_: f(loc, 5, loc.shape[:-1]),
    "as_embeddings": lambda loc, f, **_: f("rows", loc),
    "unit_rows": lambda loc, f, **_: f(loc, torch.float64),
    "cosine_gaps": lambda loc, f, **_: f(loc, loc[:, None]),
    "nearest": lambda loc, f, **_: tuple(f(loc, loc.flip(0), 2)),
    "unit_vector": lambda loc, f, **_: f.check(loc),
    "published_cosine": lambda kappa, f, **_: f(5, kappa, 3),
    "published_sample": lambda loc, kappa, f, **_: f(loc, kappa, 3),
    "VonMisesFisher": lambda f, **inputs: whole_vmf(**inputs),
    "HypersphericalUniform": lambda f, **inputs: whole_uniform(**inputs),
    "MixtureOfVMF": lambda f, **inputs: whole_mixture(**inputs),
    "parameters_of": lambda f, **inputs: f(a_mixture(**inputs)),
    "from_parameters": lambda loc, kappa, f, **_: f(loc, kappa).mean,
    "mapped": lambda f, **inputs: f(a_mixture(**inputs), lambda part: part[:1]).mean,
    "joined": lambda f, **inputs: f([a_mixture(**inputs)] * 2).mean,
    "as_mixture": lambda loc, kappa, f, **_: f(VonMisesFisher(loc, kappa)).mean,
    "mixed_score": lambda f, **inputs: f(lambda cos, *_: cos, a_mixture(**inputs), a_mixture(**inputs)),
    "log_marginal_between": lambda f, **inputs: f(a_mixture(**inputs), a_mixture(**inputs), 10.0),
    "NonIsotropicVMF": lambda loc, f, **_: of_distribution(f(loc, 3 + loc.abs()), loc.flip(0)),
    "published_log_prob": lambda loc, f, **_: f(exported()["NonIsotropicVMF"](loc, 3 + loc.abs()), loc.flip(0)),
    "fit_vmf": lambda loc, f, **_: [f(loc).loc, f(loc).concentration, f(loc, loc[:, 0].abs()).loc],
    "zonal_harmonics": lambda cos, f, **_: f(cos, 5, 6),
    "log_marginal": lambda kappa, cos, f, **_: [f(cos, kappa, kappa + 1, 10.0, 5), f(cos[:, None], kappa, kappa, kappa[0], 5)],
    "fisher_information": lambda kappa, f, **_: [f(kappa, kappa, 10.0, 5), f(kappa, 3.0, 10.0, 5, 7)],
    "expected_rank": lambda kappa, f, **_: f(kappa, 1 / kappa),
    "pairs_needed": lambda kappa, f, **_: f(0.7, kappa, 10.0, 5),
    "loss_landscape": lambda kappa, cos, f, **_: f(ExactInfoNCE(5.0, reduction="none").to(cos.device), cos, kappa, 5, 8),
    "PublishedInfoNCE": lambda f, **inputs: of_loss(lambda: f(5.0))(**inputs),
    "PublishedELK": lambda f, **inputs: of_loss(lambda: f(5.0))(**inputs),
    "fitted_log_normalizer": lambda kappa, f, **_: f(10, kappa),
    "PublishedMCInfoNCE": lambda f, **inputs: of_loss(lambda: f(5.0, 4))(**inputs),
    "PublishedSampler": lambda f, **inputs: of_loss(lambda: f(MCInfoNCE(5.0, 4)))(**inputs),
    "AcceptedInfoNCE": lambda f, **inputs: of_loss(lambda: f(5.0))(**inputs),
    "PublishedHIB": lambda f, **inputs: of_loss(lambda: f(1.0, 0.0, 4))(**inputs),
    "log_fisher_bingham": lambda loc, f, **_: f(3 * loc, -loc.abs()),
    "sample_fisher_bingham": lambda loc, f, **_: f(3 * loc, -loc.abs(), torch.Generator().manual_seed(1)),
    "saddle_fisher_bingham": lambda loc, f, **_: f(3 * loc, -loc.abs()),
    "FisherBingham": lambda loc, f, **_: of_fisher_bingham(f(3 * loc, -loc.abs()), loc.flip(0)),
    "fit_nonisotropic": lambda loc, f, **_: (lambda fit: [fit.loc, fit.concentration])(f(directions(40).to(loc.device))),
    "fit_fisher_bingham": lambda loc, f, **_: (lambda fit: [fit.linear, fit.quadratic])(f(directions(40).to(loc.device))),
    "log_product_kernel": lambda loc, kappa, f, **_: f(FisherBingham(3 * loc, -loc.abs()), VonMisesFisher(loc, kappa)),
    "parabola_log_normalizer": lambda kappa, f, **_: f(128, kappa),
    "PublishedProxyELK": lambda loc, f, **_: f(3, 5).to(loc.device)(
        4 * loc, torch.zeros_like(loc[:, 0]).long()
    ),
    "PublishedProxyB": lambda loc, f, **_: f(3, 5).to(loc.device)(
        4 * loc, torch.zeros_like(loc[:, 0]).long()
    ),
    "PublishedProxyKL": lambda loc, f, **_: f(3, 5).to(loc.device)(
        4 * loc, torch.zeros_like(loc[:, 0]).long()
    ),
    "PublishedNivMF": lambda loc, f, **_: f(3, 5).to(loc.device)(
        4 * loc, torch.zeros_like(loc[:, 0]).long()
    ),
    "PublishedNivMFNoFactor": lambda loc, f, **_: f(3, 5).to(loc.device)(
        4 * loc, torch.zeros_like(loc[:, 0]).long()
    ),
    "ranking_as_printed": lambda cos, kappa, f, **_: f(cos, kappa.detach()),
    "ranking_as_released": lambda cos, kappa, f, **_: f(cos, kappa.detach()),
    "log_anisotropic_pair": lambda loc, f, **_: f(9 * loc, 7 * loc.flip(0), 1 + loc[0].abs()),
    "quadratic_log_partition": lambda loc, f, **_: list(f(1 + loc[0].abs())),
    "AnInfoNCE": lambda f, **inputs: of_loss(lambda: f(5, normalised=True))(**inputs),
    "PosteriorAnInfoNCE": lambda f, **inputs: of_loss(lambda: f(5))(**inputs),
    "PublishedAnInfoNCE": lambda loc, kappa, f, **_: f(5).to(loc.device)(*posteriors(loc, kappa)),
} | {
    name: lambda f, **inputs: of_pairs(f)(**inputs)
    for name in ("log_expected_likelihood", "log_bhattacharyya", "kl", "cosine_similarity", "squared_distance")
} | {
    name: lambda loc, f, **_: f(3, 5, n_samples=2).to(loc.device)(4 * loc, torch.zeros_like(loc[:, 0]).long())
    for name in ("PublishedELNivMF", "LinearELNivMF", "ExponentialELNivMF", "NudgedELNivMF")
} | {
    kind.__name__: lambda f, name=name, **inputs: of_loss(lambda: learning(name))(**inputs)
    for name, kind in LOSSES.items()
}  # fmt: skip


def test_everything_exported_is_called_or_exempt() -> None:
    names = exported().keys()
    assert len(names) > 25 and names - CALLS.keys() - EXEMPT.keys() == set()
    assert not CALLS.keys() & EXEMPT.keys()


def leaves(out: object) -> list[Tensor]:
    return [part for part in tree_leaves(out) if isinstance(part, Tensor)]


def called(name: str, thing: Any, where: str) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors that a call gives on a device, and the gradients of their sum."""
    inputs = {
        "loc": directions(4),
        "kappa": torch.tensor([0.5, 3.0, 20.0, 400.0]),
        "cos": cosines(4),
    }
    inputs = {
        key: value.to(where).requires_grad_(name not in PLAIN)
        for key, value in inputs.items()
    }
    whole = {"whole": torch.tensor([3, 5]).to(where)}  # dimensions
    torch.manual_seed(3)
    out = leaves(CALLS[name](f=thing, **inputs, **whole))
    smooth = [x for x in out if x.requires_grad]
    if not smooth:
        return out, []
    total = torch.stack([x.double().sum() for x in smooth]).sum()
    slopes = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return out, [slope for slope in slopes if slope is not None]


@pytest.mark.parametrize("name", sorted(exported().keys() - EXEMPT.keys()))
def test_it_computes_there_what_it_computes_here(name: str) -> None:
    thing = exported()[name]
    (here, slopes_here), (there, slopes_there) = (
        called(name, thing, where) for where in ("cpu", "elsewhere")
    )
    assert len(here) == len(there) and len(slopes_here) == len(slopes_there)
    for a, b in chain(
        zip(here, there, strict=True), zip(slopes_here, slopes_there, strict=True)
    ):
        assert b.device == AWAY, (
            f"{name} gave a tensor of shape {tuple(b.shape)} on {b.device}"
        )
        torch.testing.assert_close(b.cpu(), a, equal_nan=True)


def test_losses_and_distributions_are_among_them() -> None:
    """The walk finds what it is for."""
    found = exported()
    losses = [
        n for n, o in found.items() if inspect.isclass(o) and issubclass(o, nn.Module)
    ]
    kinds = [
        n
        for n, o in found.items()
        if inspect.isclass(o) and issubclass(o, torch.distributions.Distribution)
    ]
    assert len(losses) >= 7 and len(kinds) >= 3


# --- training


class Proxies(nn.Module):
    """One point per class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.eye(3, 4))

    def forward(self, q: VonMisesFisher, labels: Tensor) -> Tensor:
        cosines = q.loc @ self.points.T
        return nn.functional.cross_entropy(q.concentration[:, None] * cosines, labels)


def labelled() -> Epochs:
    return Epochs(
        draw(48, 0, torch.Generator().manual_seed(1))[0], torch.arange(48) % 3
    )


OBJECTIVES: dict[str, tuple[Callable[[], Objective], Any]] = {
    "exact": (
        lambda: Contrast(Encoder(), ExactInfoNCE(5.0, learn_kappa_pos=True)),
        draw,
    ),
    "sampled": (lambda: Contrast(Encoder(), MCInfoNCE(5.0, 4)), draw),
    "labels": (lambda: ByLabel(Encoder(), Proxies()), labelled()),
    "classes": (lambda: Classify(mlp([6, 8, 3])), labelled()),
}


def test_every_objective_is_here() -> None:
    kinds = {
        o
        for n in pcl.objectives.__all__
        if inspect.isclass(o := getattr(pcl.objectives, n)) and issubclass(o, Objective)
    }
    assert {type(make()) for make, _ in OBJECTIVES.values()} == kinds - {Objective}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_there_is_training_here(name: str) -> None:
    make, batches = OBJECTIVES[name]
    curves, weights = [], []
    for where in ("cpu", "elsewhere"):
        torch.manual_seed(0)
        objective = make()
        run = train(objective, batches, TINY, place=connect(where))
        assert device_of(objective).type == where
        curves.append(torch.tensor(run.curve["loss"]))
        weights.append([p.detach().cpu() for p in objective.parameters()])
    torch.testing.assert_close(curves[1], curves[0])
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_in_half_precision(name: str) -> None:
    make, batches = OBJECTIVES[name]
    torch.manual_seed(0)
    objective, place = make(), connect("elsewhere")
    seen: list[torch.dtype] = []
    for layer in objective.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    model = place.setup_module(objective)
    optimizer = make_optimizer(objective, TINY)
    batch = local_batch(objective, batches, TINY, 6, place)
    torch.manual_seed(1)  # the same draws for both
    whole = objective(batch, Learns()).item()
    seen.clear()
    torch.manual_seed(1)
    with torch.autocast("elsewhere", torch.bfloat16):
        half = train_step(place, model, optimizer, batch, TINY, 6)
    assert set(seen) == {torch.bfloat16} and half == pytest.approx(whole, abs=0.1)
    assert all(
        p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters()
    )


def test_an_evaluation_feeds_inputs_of_the_cpu() -> None:
    x = draw(20, 0, torch.Generator().manual_seed(2))[0]

    def evaluate(encoder: nn.Module) -> dict[str, float]:
        q = encode(encoder, x, 7)
        assert q.loc.device.type == q.concentration.device.type == "cpu"
        assert encode(encoder, x.to("elsewhere")).loc.device == AWAY
        return {"kappa": q.concentration.mean().item()}

    here, there = (
        fit(
            Encoder(),
            ExactInfoNCE(5.0),
            draw,
            TINY,
            place=connect(where),
            evaluate=evaluate,
        )
        for where in ("cpu", "elsewhere")
    )
    assert there.curve["kappa"] == pytest.approx(here.curve["kappa"], rel=1e-4)


class Stop(Exception):
    """Ends a run from inside."""


@pytest.mark.parametrize("first, second", [("cpu", "elsewhere"), ("elsewhere", "cpu")])
def test_a_checkpoint_moves_between_devices(
    tmp_path: Path, first: str, second: str
) -> None:
    file, drawn = tmp_path / "run.pt", iter(range(8))

    def stopping(n: int, n_neg: int, generator: torch.Generator) -> Any:
        if next(drawn, None) is None:
            raise Stop
        return draw(n, n_neg, generator)

    with pytest.raises(Stop):
        fit(
            Encoder(), MCInfoNCE(5.0, 4), stopping, TINY, place=connect(first), checkpoint=file, checkpoint_every=4,
        )  # fmt: skip
    content = read_checkpoint(file)
    assert content["run"]["step"] == 8
    assert {t.device.type for t in leaves(content)} == {"cpu"}
    moved = fit(
        Encoder(), MCInfoNCE(5.0, 4), draw, TINY, place=connect(second), checkpoint=file
    )
    stayed = fit(Encoder(), MCInfoNCE(5.0, 4), draw, TINY, place=connect("cpu"))
    assert moved.curve["step"] == stayed.curve["step"]
    assert moved.curve["loss"] == pytest.approx(stayed.curve["loss"], rel=1e-4)


def test_pretraining_and_encoders_stay_where_they_are() -> None:
    net = small_resnet(3, widths=(4,)).to("elsewhere")
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)

    class Data:
        labels = torch.arange(16) % 3

    Data.images = images  # type: ignore[attr-defined]
    losses = pretrain_classifier(net, Data, epochs=1, batch_size=8)  # type: ignore[arg-type]
    assert len(losses) == 1 and device_of(net) == AWAY
    encoder = NormEncoder(net)
    assert encode(encoder, images, 5).loc.device.type == "cpu"


def test_devices_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        find_device("elsewhere") == "elsewhere"
        and find_device("elsewhere:0") == "elsewhere:0"
    )
    assert connect("elsewhere").device.type == "elsewhere"
    with pytest.raises(
        ValueError, match=r"1 ELSEWHERE device.*elsewhere:1.*1 found.*device='cpu'"
    ):
        find_device("elsewhere:1")
    with pytest.raises(ValueError, match="leave out the number"):
        find_device("elsewhere:0", 2)
    with pytest.raises(ValueError, match="0 found"):
        find_device("meta")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device() == "cuda" and find_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match=r"3 CUDA.*2 found"):
        find_device("auto", 3)


def test_an_encoder_is_asked_for_its_device() -> None:
    encoder = mlp_encoder(3, 4, [8]).to("elsewhere")
    assert encode(encoder, torch.randn(5, 3)).concentration.device.type == "cpu"
    assert device_of(nn.Identity()).type == "cpu"
