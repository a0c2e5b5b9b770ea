"""Data sets: what is read is right, archives stay packed, and the registry says what is
here."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from pcl.datasets import (
    DATASETS,
    DataError,
    Dataset,
    File,
    HumanLabels,
    ImageSet,
    ZippedImages,
    check_bytes,
    dataset,
    describe,
    download,
    generated_images,
    get,
    installing,
    locate,
    open_zip,
    read_archive,
    read_arrays,
    read_rows,
    register,
    status,
)
from pcl.names import UnknownName


def described(content: bytes) -> File:
    return File(len(content), hashlib.sha256(content).hexdigest())


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one data folder, an empty cache and a registry of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PCL_DATA", str(tmp_path / "data"))
    dataset("generated")
    monkeypatch.setattr("pcl.datasets.DATASETS", dict(DATASETS))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


# --- files and archives


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
from pcl.datasets import File, installing
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
    with installing(target, described(b"whole")) as part:
        part.write_bytes(b"whole")
    assert [p.name for p in tmp_path.iterdir()] == ["file"], (
        "the leftover went with the next attempt"
    )


def test_a_wrong_size_is_named() -> None:
    with pytest.raises(DataError, match="expected"):
        check_bytes(b"", File(1, ""), "x")


def packed(files: dict[str, bytes], kind: int = 0) -> bytes:
    """A zip of these files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = kind << 16
            archive.writestr(info, content)
    return out.getvalue()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_a_zip_that_reaches_out_of_its_folder_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="no plain file inside its folder"):
        open_zip(packed({"good": b"1", name: b"2"}), "a.zip")


def test_a_zip_with_links_or_no_zip_is_refused() -> None:
    with pytest.raises(DataError, match="no plain file inside its folder"):
        open_zip(packed({"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777), "a.zip")
    with pytest.raises(DataError, match=r"a\.zip is no readable archive"):
        open_zip(b"no archive", "a.zip")
    with pytest.raises(DataError, match="lacks 1 images, such as x"):
        ZippedImages(packed({"y": b""}), ["x"])


def test_arrays_are_never_unpickled() -> None:
    evil = io.BytesIO()
    np.save(evil, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(evil.getvalue())


# --- the registry


def png(size: tuple[int, int], colour: str) -> bytes:
    Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def birds(folder: Path) -> Dataset:
    """A set of the form of CUB-200: a zip of images of different sizes and a table."""
    contents = {
        "birds/images.zip": packed(
            {"1/a.png": png((9, 7), "red"), "2/b.png": png((4, 6), "blue")}
        ),
        "birds/index.csv": b"name,class_id\n1/a.png,1\n2/b.png,2\n",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    def read(split: str) -> ImageSet:
        rows = read_rows(data.content("birds/index.csv"))
        rows = [row for row in rows if row["class_id"] == "12"[split == "test"]]
        names = [row["name"] for row in rows]
        images = ZippedImages(data.content("birds/images.zip"), names)
        return ImageSet(images, torch.tensor([0]), ("bird",))

    data = Dataset(
        name="birds",
        title="Birds",
        files={name: described(content) for name, content in contents.items()},
        licence="none",
        address="http://birds.example",
        splits=dict.fromkeys(("train", "test"), tuple(contents)),
        read=read,
    )
    return data


def test_a_zip_with_a_table_is_read_without_unpacking(folder: Path) -> None:
    data = register(birds(folder))
    assert dataset("birds") is data and status("birds").state == "here"
    train, test = data.load("train"), data.load("test")
    assert train.images[0].shape == (3, 7, 9) and train.images[0].dtype == torch.uint8
    assert test.images[0].shape == (3, 6, 4) and test.images[0][2].min() == 255
    assert sorted(p.name for p in folder.rglob("*")) == [
        "birds",
        "images.zip",
        "index.csv",
    ]


def test_two_sets_may_have_files_of_one_name(folder: Path) -> None:
    register(birds(folder))
    (folder / "apes").mkdir()
    (folder / "apes" / "images.zip").write_bytes(b"others")
    assert status("birds").state == "here"


def test_what_is_missing_or_damaged_is_said_with_the_remedy(folder: Path) -> None:
    data = register(birds(folder))
    path = folder / "birds" / "index.csv"
    path.write_bytes(b"name")
    assert status("birds").state == "corrupt"
    with pytest.raises(DataError, match=r"index\.csv has 4 bytes.*http://birds"):
        data.load("test")
    path.unlink()
    found = status("birds")
    assert found.state == "missing" and found.files["birds/images.zip"].startswith(
        "found"
    )
    with pytest.raises(DataError, match="Birds is not on this machine: get it from"):
        get("birds")
    row = next(row for row in describe() if row.name == "birds")
    assert row.state == "missing" and "http://birds.example" in row.how
    assert {row.name for row in describe()} >= {"generated", "cifar10", "cifar10h"}


def test_labels_alone_come_with_the_images_they_are_about(folder: Path) -> None:
    votes = torch.ones(2000, 10, dtype=torch.int64)
    np.savez(folder / "second.npz", votes=votes.numpy())
    content = (folder / "second.npz").read_bytes()

    def read(split: str) -> HumanLabels:
        counts = torch.from_numpy(read_arrays(data.content("second.npz"))["votes"])
        return HumanLabels(counts, counts / counts.sum(-1, keepdim=True))

    data = register(
        Dataset(
            name="second",
            title="A second opinion",
            files={"second.npz": described(content)},
            licence="none",
            address="",
            splits={"test": ("second.npz",)},
            read=read,
            base="generated",
        )
    )
    found = data.load("test")
    assert found.human is not None and torch.equal(found.human.counts, votes)
    assert torch.equal(found.images, dataset("generated").load("test").images)
    assert "pcl data second" in data.advice


def test_a_source_that_fails_is_followed_by_the_next(folder: Path) -> None:
    def fails() -> None:
        raise DataError("the first is closed")

    def serves() -> None:
        (folder / "x").write_bytes(b"x")

    data = Dataset(
        name="x",
        title="X",
        files={"x": described(b"x")},
        licence="none",
        address="",
        splits={"all": ("x",)},
        read=lambda split: ImageSet([], torch.tensor([]), ()),
        remote={"first": fails, "second": serves},
    )
    with pytest.raises(DataError, match="X is not on this machine"):
        data.load("all", fetch=False)
    data.load("all")
    assert data.content("x") == b"x"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'cifar10h'"):
        dataset("cifar10hh")
    with pytest.raises(UnknownName, match="unknown split 'tset': did you mean 'test'"):
        dataset("generated").load("tset")


def test_importing_the_registry_loads_no_catalogue() -> None:
    code = (
        "import sys, pcl.datasets; print(*[m for m in sys.modules if 'catalogue' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_only_the_catalogue_knows_cifar(root: Path) -> None:
    """Besides the experiments on it, old names that lead there, the table of what may
    be shipped, and the words that tables have for names."""
    others = ("_modidx.py", "_moved.py", "cli.py", "experiments.py", "shipping.py")
    others += ("tables.py",)
    knows = {
        p.relative_to(root / "pcl").as_posix()
        for p in (root / "pcl").rglob("*.py")
        if "cifar" in p.read_text().lower()
    }
    rest = {p for p in knows if p not in others and not p.startswith("studies/")}
    assert rest == {"catalogue/cifar10.py", "catalogue/human_labels.py"}


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
