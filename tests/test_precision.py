"""bfloat16 autocast and torch.compile: the promises of the chapter on losses, for every
loss."""

from __future__ import annotations

import inspect
import math
import shutil
import subprocess
import sys

import pytest
import torch
from example_losses import closed, example, sampled
from torch import Tensor, nn

import pcl.losses
from pcl.encoders import SphereEncoder, mlp_encoder
from pcl.losses import LOSSES, ContrastiveLoss
from pcl.objectives import Contrast
from pcl.vmf import VonMisesFisher

# The promises, as the chapter on losses states them.
# closed losses behind an encoder in bfloat16: in standard deviations that follow from
# rounding
BFLOAT16_SIGMAS = 4
COMPILED = {"rtol": 1e-5, "atol": 1e-5}

NEGATIVES = ("batch", "own", "shared")


def test_every_exported_loss_is_in_the_table() -> None:
    things = {n: getattr(pcl.losses, n) for n in pcl.losses.__all__}
    modules = {
        n for n, x in things.items() if inspect.isclass(x) and issubclass(x, nn.Module)
    }
    assert modules - {ContrastiveLoss.__name__} == {
        kind.__name__ for kind in LOSSES.values()
    }


def posteriors(*shape: int, seed: int) -> VonMisesFisher:
    generator = torch.Generator().manual_seed(seed)
    loc = nn.functional.normalize(torch.randn(*shape, 8, generator=generator), dim=-1)
    return VonMisesFisher(loc, 1 + 30 * torch.rand(shape, generator=generator))


def batch(negatives: str) -> list[VonMisesFisher | None]:
    rows = {"batch": None, "own": (16, 5), "shared": (1, 5)}[negatives]
    return [
        posteriors(16, seed=1),
        posteriors(16, seed=2),
        None if rows is None else posteriors(*rows, seed=3),
    ]


def grads(
    loss: nn.Module, parts: list[VonMisesFisher | None], autocast: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The loss, with its slopes in all means and concentrations; the draws are always
    the same."""
    torch.manual_seed(5)
    leaves = [
        x.detach().clone().requires_grad_()
        for q in parts
        if q is not None
        for x in (q.loc, q.concentration)
    ]
    pairs = iter(zip(leaves[::2], leaves[1::2], strict=True))
    with torch.autocast(
        "cpu", torch.bfloat16, enabled=autocast
    ):  # as torch asks: around the forward pass only
        value = loss(
            *(None if q is None else VonMisesFisher(*next(pairs)) for q in parts)
        )
    slopes = torch.autograd.grad(
        value, leaves, allow_unused=True, materialize_grads=True
    )
    return value.detach(), list(slopes)


# --- autocast
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_no_bit_of_a_loss(name: str, negatives: str) -> None:
    parts = batch(negatives)
    value, slopes = grads(example(name, n_samples=32), parts)
    again, slopes_again = grads(example(name, n_samples=32), parts, autocast=True)
    assert again.dtype == torch.float32 and again.equal(value)
    assert all(a.equal(b) for a, b in zip(slopes, slopes_again, strict=True))


def test_autocast_leaves_draws_on_the_sphere() -> None:
    q = posteriors(64, seed=0)
    torch.manual_seed(0)
    z = q.rsample((100,))
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        again = q.rsample((100,))
    assert (
        again.equal(z)
        and (torch.linalg.vector_norm(again, dim=-1) - 1).abs().max() < 1e-6
    )


def world(seed: int) -> tuple[SphereEncoder, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(128, 16)
        return (
            mlp_encoder(16, 8, [32, 32], shared=True),
            x,
            x + 0.3 * torch.randn(128, 16),
        )


def objective_value(
    loss: nn.Module, seed: int, half: bool, draw_seed: int = 0
) -> Tensor:
    encoder, x, x_pos = world(seed)
    torch.manual_seed(draw_seed)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
        return Contrast(encoder, loss)((x, x_pos, None))


def rounding(loss: nn.Module, seed: int) -> Tensor:
    """Standard deviation of the loss if each number that bfloat16 rounds is off on its
    own, to first order."""
    encoder, x, x_pos = world(seed)
    rounded = [x.requires_grad_(), x_pos.requires_grad_(), *encoder.parameters()]
    for module in encoder.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda module, inputs, out: rounded.append(out)
            )
    slopes = torch.autograd.grad(
        Contrast(encoder, loss)((x, x_pos, None)),
        rounded,
        allow_unused=True,
        materialize_grads=True,
    )
    squares = sum(
        (t * slope).square().sum() for t, slope in zip(rounded, slopes, strict=True)
    )
    return 2**-8 * (squares / (8 * math.log(2))).sqrt()  # type: ignore[union-attr]


def test_the_relative_error_of_rounding_is_the_one_stated() -> None:
    t = torch.exp2(
        20 * torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) - 10
    )
    off = (t.bfloat16().float() - t) / t
    assert off.abs().max() <= 2**-8 and off.std() == pytest.approx(
        2**-8 / math.sqrt(8 * math.log(2)), rel=0.01
    )


@pytest.mark.parametrize("kappa_pos", [5.0, 20.0, 100.0, 500.0])
@pytest.mark.parametrize("name", closed())
def test_behind_an_encoder_in_bfloat16_closed_losses_are_off_by_its_rounding_and_no_more(
    name: str, kappa_pos: float
) -> None:
    for seed in range(100, 104):
        loss = example(name, kappa_pos=kappa_pos)
        off = (
            objective_value(loss, seed, True) - objective_value(loss, seed, False)
        ).abs()
        assert 0 < off < BFLOAT16_SIGMAS * rounding(loss, seed), (
            "zero would mean that nothing ran in bfloat16"
        )


@pytest.mark.parametrize("name", sampled())
def test_behind_an_encoder_in_bfloat16_sampled_losses_move_less_than_with_other_samples(
    name: str,
) -> None:
    single, half = (
        torch.stack(
            [objective_value(example(name, n_samples=32), 0, h, s) for s in range(12)]
        )
        for h in (False, True)
    )
    assert (half.mean() - single.mean()).abs() < single.std()


# --- torch.compile
# ---------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("g++", "clang++")),
    reason="torch.compile on a CPU needs a C++ compiler: apt install g++",
)
needs_plain_path = pytest.mark.skipif(
    " " in torch.__file__,
    reason="torch.compile does not quote the path of torch, and this one has a space",
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "negatives"),
    [(n, "own") for n in LOSSES] + [("mcinfonce", "shared"), ("infonce", "shared")],
)
def test_tracing_changes_nothing_but_rounding(name: str, negatives: str) -> None:
    """The compiler's front end and its derivatives, for explicit negatives, without
    generated code."""
    parts = batch(negatives)
    value, slopes = grads(example(name, n_samples=32), parts)
    compiled, compiled_slopes = grads(
        torch.compile(example(name, n_samples=32), backend="aot_eager"), parts
    )
    torch.testing.assert_close(compiled, value, **COMPILED)
    torch.testing.assert_close(compiled_slopes, slopes, **COMPILED)


@needs_compiler
@needs_plain_path
@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_training_step_agrees(name: str) -> None:
    """Encoder and loss together, with the default backend: loss and gradients of all
    weights."""
    results = []
    for compiled in (False, True):
        encoder, x, x_pos = world(0)
        objective = Contrast(encoder, example(name, n_samples=32))
        run = torch.compile(objective) if compiled else objective
        torch.manual_seed(6)
        loss = run((x, x_pos, None))
        loss.backward()
        # what a loss does not use has no gradient, or a compiled one of zero
        slopes = (
            torch.zeros_like(p) if p.grad is None else p.grad
            for p in encoder.parameters()
        )
        results.append([loss.detach(), *slopes])
    torch.testing.assert_close(results[1], results[0], **COMPILED)


def test_the_compiler_is_imported_by_those_who_use_it_only() -> None:
    code = """
import sys, torch
from pcl.losses import ELK, ExactInfoNCE
from pcl.vmf import VonMisesFisher
q = VonMisesFisher(torch.nn.functional.normalize(torch.randn(4, 3), dim=-1), torch.ones(4).requires_grad_())
ExactInfoNCE(2.0)(q, q).backward()
ELK(2.0)(q, q), q.rsample(), q.entropy(), q.credible_cosine(0.9)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
