"""Image encoders: any backbone becomes one, residual networks are what they say,
pretraining survives a kill."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import pcl._torchvision  # noqa: F401  (before timm and torchvision, wherever they come in)
from pcl.checkpoints import CheckpointError, load_weights, save_weights
from pcl.datasets import generated_images
from pcl.encoders import (
    NormEncoder,
    SphereEncoder,
    probabilistic,
    set_median_kappa,
    without_classifier,
)
from pcl.losses import ExactInfoNCE
from pcl.networks import augment, mlp, resnet18_small, small_resnet
from pcl.objectives import Contrast, parameter_groups
from pcl.pairs import PairSampler
from pcl.pretraining import pretrain_classifier
from pcl.training import Config
from pcl.training import train_encoder as fit
from pcl.vmf import VonMisesFisher

needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="the images extra is not installed; make test installs it",
)
KINDS: tuple[Literal["norm", "head"], ...] = ("norm", "head")


def test_norm_encoder_reads_direction_and_length() -> None:
    out = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e9, 0.0]])
    q = NormEncoder(nn.Identity(), kappa_max=1e3, cap="hard")(out)
    torch.testing.assert_close(q.loc[0], torch.tensor([0.6, 0.8]))
    assert (
        q.concentration[0] == 5 and q.concentration[1] > 0 and q.concentration[2] == 1e3
    )
    assert (
        NormEncoder(nn.Identity())(out.bfloat16()).concentration.dtype == torch.float32
    )


def test_norm_encoder_has_finite_gradients_at_the_origin() -> None:
    out = torch.zeros(4, 3, requires_grad=True)
    q = NormEncoder(nn.Identity())(out)
    (q.concentration.sum() + q.loc.sum()).backward()
    assert out.grad is not None and out.grad.isfinite().all()


def test_median_kappa_is_set() -> None:
    torch.manual_seed(0)
    encoder = NormEncoder(mlp([6, 12, 4]))
    x = torch.randn(101, 6)
    before = encoder(x).loc
    set_median_kappa(encoder, x, 30.0)
    torch.testing.assert_close(encoder(x).concentration.median(), torch.tensor(30.0))
    torch.testing.assert_close(encoder(x).loc, before)
    with pytest.raises(ValueError, match="linear layer"):
        set_median_kappa(NormEncoder(nn.Identity()), x, 30.0)


@needs_timm
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["resnet10t", "mobilenetv3_small_050", "vit_tiny_patch16_224"]
)
def test_timm_models_become_encoders(name: str, kind: Literal["norm", "head"]) -> None:
    import timm

    model = timm.create_model(name, pretrained=False)
    side = 224 if name.startswith("vit") else 64
    encoder = probabilistic(model, 5, kind).eval()
    q = encoder(torch.randn(2, 3, side, side))
    assert (
        isinstance(q, VonMisesFisher)
        and q.batch_shape == (2,)
        and q.event_shape == (5,)
    )
    assert isinstance(encoder, NormEncoder if kind == "norm" else SphereEncoder)


@needs_timm
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "densenet121"])
def test_torchvision_models_become_encoders(name: str) -> None:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    encoder = probabilistic(model, 5).eval()
    assert encoder(torch.randn(2, 3, 64, 64)).event_shape == (5,)
    assert not any(
        isinstance(m, nn.Linear) and m.out_features == 1000 for m in encoder.modules()
    )


def test_feature_maps_are_pooled_and_modes_are_kept() -> None:
    body = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7))
    body.train()
    encoder = probabilistic(body, 4)
    assert body.training and torch.equal(body[1].running_mean, torch.zeros(7)), (
        "finding the size leaves no trace"
    )
    assert encoder(torch.randn(3, 3, 16, 16)).batch_shape == (3,)


def test_probabilistic_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="dim must be"):
        probabilistic(nn.Identity(), 1)
    with pytest.raises(ValueError, match="'norm' or 'head'"):
        probabilistic(nn.Identity(), 3, "length")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="example"):
        probabilistic(mlp([7, 3]), 3)
    with pytest.raises(ValueError, match="must return features"):
        probabilistic(nn.Flatten(0), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_train_in_the_loop(kind: Literal["norm", "head"]) -> None:
    torch.manual_seed(0)
    shapes, votes = generated_images(200)
    encoder = probabilistic(small_resnet(widths=(4, 8)), 3, kind)
    loss = ExactInfoNCE(kappa_pos=8.0)
    config = Config(steps=4, batch_size=8, n_neg=2, kappa_from=0.0)
    groups = parameter_groups(Contrast(encoder, loss))
    assert ("kappa" in groups) == (kind == "head")
    before = [p.detach().clone() for p in encoder.parameters()]
    run = fit(encoder, loss, PairSampler(votes.probs).on(shapes.images), config)
    assert run.step == 4 and all(torch.isfinite(p).all() for p in encoder.parameters())
    changed = [
        not torch.equal(p, b) for p, b in zip(encoder.parameters(), before, strict=True)
    ]
    assert all(changed), "backbone and head learn together"


@needs_timm
def test_resnet18_small_is_torchvisions_with_another_stem() -> None:
    import torchvision

    torch.manual_seed(0)
    ours, theirs = (
        resnet18_small().eval(),
        torchvision.models.resnet18(num_classes=10).eval(),
    )
    theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    weights = [t for name, t in theirs.state_dict().items()]
    assert [t.shape for t in ours.state_dict().values()] == [t.shape for t in weights]
    ours.load_state_dict(dict(zip(ours.state_dict(), weights, strict=True)))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)


def test_bytes_are_normalised_inside() -> None:
    torch.manual_seed(0)
    net = small_resnet().eval()
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (
        torch.tensor([0.4914, 0.4822, 0.4465]),
        torch.tensor([0.2470, 0.2435, 0.2616]),
    )
    floats = (x / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(net(x), net(floats), rtol=1e-4, atol=1e-5)
    assert without_classifier(net) is net and net(x).shape == (2, net.num_features)


def test_augmentation_mirrors_and_shifts() -> None:
    x = (
        torch.arange(32 * 32, dtype=torch.float32)
        .view(1, 1, 32, 32)
        .expand(64, 3, 32, 32)
        / 8
    )
    seen = augment(x, torch.Generator().manual_seed(0))
    assert seen.shape == x.shape
    padded = nn.functional.pad(x[:1], (4, 4, 4, 4), mode="reflect")[0]
    options = {
        (flip, i, j): (w.flip(-1) if flip else w)
        for flip in (False, True)
        for i in range(9)
        for j in range(9)
        for w in [padded[:, i : i + 32, j : j + 32]]
    }
    found = [
        next(key for key, option in options.items() if torch.equal(option, one))
        for one in seen
    ]
    assert 16 < sum(flip for flip, _, _ in found) < 48 and len(set(found)) > 30


def test_pretraining_learns() -> None:
    torch.manual_seed(0)
    data, _ = generated_images(600)
    net = small_resnet(widths=(8, 16))
    losses = pretrain_classifier(net, data, epochs=5, batch_size=32)
    assert losses[-1] < losses[0] - 0.2 and not net.training


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    data, _ = generated_images(16)
    path, run = tmp_path / "weights.pt", tmp_path / "run.pt"
    small, wide = small_resnet(widths=(4,)), small_resnet(widths=(8,))
    pretrain_classifier(small, data, epochs=1, batch_size=8, path=run)
    with pytest.raises(CheckpointError, match="of another"):
        pretrain_classifier(wide, data, epochs=1, batch_size=8, path=run)
    save_weights({"net": small.state_dict()}, path)
    with pytest.raises(ValueError, match="of another network"):
        load_weights(path, wide)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        load_weights(path, small_resnet(widths=(4,)))
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "none.pt", small_resnet())

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("executed",))

    torch.save({"net": Evil()}, path)
    with pytest.raises(ValueError, match="damaged"):
        load_weights(path, small_resnet())
    with pytest.raises(ValueError, match="batch_size"):
        pretrain_classifier(small_resnet(), data, batch_size=17)


RUN = """
import sys, torch
from pcl.networks import small_resnet
from pcl.pretraining import pretrain_classifier
from pcl.datasets import generated_images
torch.manual_seed(0)
net = small_resnet(widths=(4, 8))
losses = pretrain_classifier(net, generated_images(256)[0], epochs=8, batch_size=32, path=sys.argv[1])
print(repr(losses), sum(p.double().sum().item() for p in net.parameters()))
"""


def here(path: Path) -> str:
    """What the program prints, run in this interpreter: a second start of torch takes
    longer than the program."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["-c", str(path)])
        exec(RUN, {})
    return said.getvalue()


def test_a_killed_pretraining_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "killed.pt")])
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (tmp_path / "killed.pt").exists()
    assert here(tmp_path / "killed.pt") == here(tmp_path / "whole.pt")
