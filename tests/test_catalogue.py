"""The data sets of the catalogue: labels, splits and counts, on miniatures of every form
and on the real files where they are here."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pcl.catalogue.characters as characters
import pcl.catalogue.fine_grained as fine_grained
import pcl.catalogue.human_labels as human_labels
import pcl.catalogue.tiny_imagenet as tiny_imagenet
import pcl.datasets as registry
from pcl.datasets import (
    DataError,
    Dataset,
    File,
    ImageSet,
    Tree,
    as_zip,
    catalogue,
    dataset,
    describe,
    locate,
    measure_file,
    measure_tree,
    status,
    verify,
)
from pcl.folder import list_images


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one data folder, an empty cache and a registry of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PCL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("pcl.datasets.DATASETS", dict(catalogue()))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def picture(kind: str, shade: int, size: tuple[int, int] = (9, 7)) -> bytes:
    Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    out = io.BytesIO()
    Image.new("RGB", size, (shade, shade, shade)).save(out, kind)
    return out.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def measured(folder: Path, form: Any) -> dict[str, File | Tree]:
    """The sums of the miniatures that lie in a folder; others stay as they are."""
    found: dict[str, File | Tree] = {}
    for name, what in form.items():
        path = folder / name
        if not path.exists():
            found[name] = what
        elif isinstance(what, Tree):
            found[name] = measure_tree(path, what.patterns)
        else:
            found[name] = measure_file(path)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Path], Dataset]:
    """Lets an entry accept the miniatures in a folder, by patching their sums in."""

    def patch(module: Any, name: str, folder: Path) -> Dataset:
        entry = getattr(module, name)
        files = measured(folder, entry.files)
        others = tuple(measured(folder, form) for form in entry.others)
        entry = dataclasses.replace(entry, files=files, others=others, remote={})
        monkeypatch.setattr(module, name, entry)
        monkeypatch.setitem(registry.DATASETS, entry.name, entry)
        return entry

    return patch


def shades(images: Any) -> list[int]:
    """The grey of the miniatures, rounded to what a lossy format keeps."""
    return [
        int(round(images[i].double().mean().item() / 10) * 10)
        for i in range(len(images))
    ]


# --- fine-grained photographs

BIRDS = {
    "001.Auk/b.jpg": 20,
    "001.Auk/a.jpg": 10,
    "050.Gull/c.jpg": 30,
    "051.Jay/d.jpg": 40,
    "100.Owl/e.jpg": 50,
    "101.Wren/f.jpg": 60,
    "200.Kite/g.jpg": 70,
}


def bird_forms(folder: Path, form: str) -> None:
    jpgs = {name: picture("JPEG", shade) for name, shade in BIRDS.items()}
    if form == "archive":
        inside = {f"CUB_200_2011/images/{n}": c for n, c in jpgs.items()}
        rest = {"attributes.txt": b"1 x", "CUB_200_2011/parts/p.jpg": b"no bird"}
        write(folder, {"CUB_200_2011.tgz": tarred(inside | rest)})
    elif form == "folder":
        write(folder / "deep" / "CUB_200_2011" / "images", jpgs)
        write(folder / "deep" / "CUB_200_2011", {"images.txt": b"1 x"})
    else:
        rows = [f"{n},{int(n[:3])},{n[4:].split('/')[0]}" for n in sorted(BIRDS)]
        table = "\n".join(["name,class_id,class_name", *rows]).encode()
        write(
            folder / "cub200", {"images.zip": zipped(jpgs), "index.csv": table + b"\n"}
        )


@pytest.mark.parametrize("form", ["archive", "folder", "copy"])
def test_birds_of_every_form_are_the_same(folder: Path, small: Any, form: str) -> None:
    bird_forms(folder, form)
    root = folder / "deep" if form == "folder" else folder
    entry = small(fine_grained, "CUB", root)
    assert status("cub200").state == "here"
    parts = {split: entry.load(split, fetch=False) for split in entry.splits}
    kinds = {split: part.classes for split, part in parts.items()}
    assert kinds["train"] == ("Auk", "Gull", "Jay", "Owl")
    assert kinds["fit"] == ("Auk", "Gull") and kinds["val"] == ("Jay", "Owl")
    assert kinds["test"] == ("Wren", "Kite")
    assert parts["train"].labels.tolist() == [0, 0, 1, 2, 3]
    assert shades(parts["train"].images) == [10, 20, 30, 40, 50], "in order of names"
    assert parts["test"].labels.tolist() == [0, 1]
    assert parts["val"].images[0].shape == (3, 7, 9)
    listed = list_images("cub200:test")
    assert listed.labels is not None and listed.labels.tolist() == [0, 1]
    assert listed.open(0).size == (9, 7) and listed.paths[0].endswith("f.jpg")


def test_the_copy_is_taken_first_and_a_damaged_form_is_named(
    folder: Path, small: Any
) -> None:
    bird_forms(folder, "archive")
    bird_forms(folder, "copy")
    entry = small(fine_grained, "CUB", folder)
    assert (entry.form() or {}).keys() == fine_grained.CUB_COPY.keys()
    path = folder / "cub200" / "index.csv"
    path.write_bytes(path.read_bytes() + b"x")
    assert status("cub200").state == "corrupt"
    with pytest.raises(DataError, match=r"index\.csv has .* bytes where .*delete it"):
        entry.load("test", fetch=False)
    path.unlink()
    assert entry.load("test", fetch=False).classes == ("Wren", "Kite")


def test_a_folder_with_another_file_is_refused(folder: Path, small: Any) -> None:
    bird_forms(folder, "folder")
    entry = small(fine_grained, "CUB", folder / "deep")
    write(folder / "deep/CUB_200_2011/images/001.Auk", {"new.jpg": b"x"})
    assert status("cub200").state == "corrupt"
    with pytest.raises(DataError, match="holds 8 files, not 7: delete it"):
        entry.load("train", fetch=False)


def test_an_archive_is_packed_once_and_packed_again_when_damaged(
    folder: Path, tmp_path: Path
) -> None:
    write(folder, {"a.tgz": tarred({"in/x": b"first", "in/y": b"second"})})
    file = measure_file(folder / "a.tgz")
    made = as_zip(folder / "a.tgz", file)
    assert zipfile.ZipFile(made).read("in/y") == b"second"
    before = made.stat().st_mtime_ns
    assert as_zip(folder / "a.tgz", file).stat().st_mtime_ns == before
    made.write_bytes(made.read_bytes()[:-1])
    assert zipfile.ZipFile(as_zip(folder / "a.tgz", file)).read("in/x") == b"first"
    with pytest.raises(DataError, match="SHA-256"):
        as_zip(folder / "a.tgz", File(file.size, "0" * 64))


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_packing_refuses_what_reaches_out_of_its_folder(
    folder: Path, tmp_path: Path, name: str
) -> None:
    write(folder, {"a.tgz": tarred({"good": b"1", name: b"2"})})
    with pytest.raises(DataError, match="no plain file inside its folder"):
        as_zip(folder / "a.tgz", measure_file(folder / "a.tgz"))
    left = [p.name for p in (tmp_path / "cache" / "pcl").rglob("*") if p.is_file()]
    assert left == [] and not (tmp_path / "x").exists()


def annotations(rows: list[tuple[str, int]]) -> np.ndarray:
    """A table in the form of the development kit of CARS-196."""
    kinds = [("class", object), ("fname", object)]
    return np.array([(number, name) for name, number in rows], dtype=kinds)


def mat(**values: Any) -> bytes:
    from scipy.io import savemat

    out = io.BytesIO()
    savemat(out, values)
    return out.getvalue()


def car_forms(folder: Path, form: str) -> None:
    names = np.array([f"Car {k}" for k in range(1, 197)], dtype=object)
    early = [("00001.jpg", 99), ("00002.jpg", 1)]
    late = [("00001.jpg", 50), ("00002.jpg", 1), ("00003.jpg", 196)]
    if form == "copy":
        jpgs = {
            f"{k}.webp": picture("WEBP", shade)
            for k, shade in ((1, 20), (2, 40), (3, 30), (4, 10), (5, 50))
        }
        rows = "\n".join(
            ["name,class_id,class_name"]
            + [
                f"{k}.webp,{c},Car {c}"
                for k, c in zip((1, 2, 3, 4, 5), (1, 1, 50, 99, 196), strict=True)
            ]
        )
        content = {"images.zip": zipped(jpgs), "index.csv": rows.encode()}
        return write(folder / "cars196", content)
    kit = {
        "devkit/cars_meta.mat": mat(class_names=names),
        "devkit/cars_train_annos.mat": mat(annotations=annotations(early)),
    }
    write(
        folder,
        {
            "car_devkit.tgz": tarred(kit),
            "cars_test_annos_withlabels.mat": mat(annotations=annotations(late)),
            "cars_train.tgz": tarred(
                {
                    "cars_train/00001.jpg": picture("JPEG", 10),
                    "cars_train/00002.jpg": picture("JPEG", 20),
                }
            ),
            "cars_test.tgz": tarred(
                {
                    "cars_test/00001.jpg": picture("JPEG", 30),
                    "cars_test/00002.jpg": picture("JPEG", 40),
                    "cars_test/00003.jpg": picture("JPEG", 50),
                }
            ),
        },
    )


@pytest.mark.parametrize("form", ["archives", "copy"])
def test_cars_of_both_forms_have_the_same_classes(
    folder: Path, small: Any, form: str
) -> None:
    car_forms(folder, form)
    entry = small(fine_grained, "CARS", folder)
    parts = {split: entry.load(split, fetch=False) for split in entry.splits}
    for split, kinds in {
        "train": {20: "Car 1", 40: "Car 1", 30: "Car 50"},
        "fit": {20: "Car 1", 40: "Car 1"},
        "val": {30: "Car 50"},
        "test": {10: "Car 99", 50: "Car 196"},
    }.items():
        part = parts[split]
        named = [part.classes[k] for k in part.labels.tolist()]
        assert dict(zip(shades(part.images), named, strict=True)) == kinds
    assert parts["test"].classes == ("Car 99", "Car 196"), "by number, not by name"


def test_products_are_split_by_their_tables(folder: Path, small: Any) -> None:
    top = "Stanford_Online_Products"
    head = "image_id class_id super_class_id path\n"
    train = "1 1 1 lamp_final/11_0.JPG\n2 1 1 lamp_final/11_1.JPG\n3 5660 1 x_final/7_0.JPG\n"
    test = "4 11319 2 mug_final/9_0.JPG\n"
    names = [line.split()[3] for line in (train + test).splitlines()]
    files = {f"{top}/{n}": picture("JPEG", 10 * k) for k, n in enumerate(names)}
    tables = {
        f"{top}/Ebay_train.txt": head + train,
        f"{top}/Ebay_test.txt": head + test,
    }
    content = zipped(files | {n: t.encode() for n, t in tables.items()})
    write(folder, {f"{top}.zip": content})
    entry = small(fine_grained, "SOP", folder)
    train_part, test_part = (entry.load(s, fetch=False) for s in ("train", "test"))
    assert train_part.classes == ("lamp_final/11", "x_final/7")
    assert train_part.labels.tolist() == [0, 0, 1] and shades(test_part.images) == [30]
    assert entry.load("val", fetch=False).classes == ("x_final/7",)


# --- characters


def test_characters_of_both_forms_are_the_same(folder: Path, small: Any) -> None:
    Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    ink = np.random.default_rng(0).integers(0, 2, (6, 105, 105)).astype(bool)
    names = ["Aa/character01", "Aa/character02", "Bb/character01"]

    def png(drawing: np.ndarray) -> bytes:
        out = io.BytesIO()
        Image.fromarray(~drawing).save(out, "PNG")
        return out.getvalue()

    for split, rows in {"background": range(4), "evaluation": range(4, 6)}.items():
        members = {
            f"images_{split}/{names[i // 2]}/0{i}_0{i % 2 + 1}.png": png(ink[i])
            for i in rows
        }
        write(folder, {f"images_{split}.zip": zipped(dict(reversed(members.items())))})
    entry = small(characters, "OMNIGLOT", folder)
    official = {split: entry.load(split, fetch=False) for split in entry.splits}
    for split in official:
        (folder / f"images_{split}.zip").unlink()
    out = io.BytesIO()
    np.savez(
        out,
        ink=np.packbits(ink, axis=-1),
        character=np.arange(6) // 2,
        background=np.arange(6) < 4,
    )
    sets = ["background", "background", "evaluation"]
    rows_ = [f"{k},{sets[k]},{n.replace('/', ',')}" for k, n in enumerate(names)]
    table = "\n".join(["character,set,alphabet,name", *rows_]).encode()
    write(
        folder / "omniglot", {"omniglot.npz": out.getvalue(), "characters.csv": table}
    )
    entry = small(characters, "OMNIGLOT", folder)
    for split, before in official.items():
        after = entry.load(split, fetch=False)
        assert after.classes == before.classes
        assert torch.equal(after.labels, before.labels)
        assert torch.equal(after.images.ink(), before.images.ink())
        assert torch.equal(after.images[1], before.images[1])
    first = official["background"].images
    assert (first.ink([0])[0].numpy() == ink[0]).all(), "1 is ink"
    assert first[0].shape == (3, 105, 105) and set(first[0].unique().tolist()) == {
        0,
        255,
    }


def test_one_split_of_omniglot_needs_one_zip(folder: Path, small: Any) -> None:
    member = {"images_evaluation/A/character01/0_01.png": picture("PNG", 0, (105, 105))}
    write(folder, {"images_evaluation.zip": zipped(member)})
    entry = small(characters, "OMNIGLOT", folder)
    assert entry.load("evaluation", fetch=False).images.ink().all()
    with pytest.raises(DataError, match=r"Omniglot is not.*images_background\.zip"):
        entry.load("background", fetch=False)


# --- Tiny ImageNet


@pytest.mark.parametrize("form", ["zip", "copy"])
def test_tiny_imagenet_of_both_forms(folder: Path, small: Any, form: str) -> None:
    kinds = {"train": ["n02", "n01"], "val": ["n01", "n02"]}
    if form == "zip":
        top, lines, members = "tiny-imagenet-200", [], {}
        for k, kind in enumerate(kinds["train"]):
            member = f"{top}/train/{kind}/images/{kind}_{k}.JPEG"
            members[member] = picture("JPEG", 10 + 10 * k, (64, 64))
        for k, kind in enumerate(kinds["val"]):
            members[f"{top}/val/images/val_{k}.JPEG"] = picture("JPEG", 30, (64, 64))
            lines.append(f"val_{k}.JPEG\t{kind}\t0\t0\t1\t1")
        members[f"{top}/val/val_annotations.txt"] = "\n".join(lines).encode()
        members[f"{top}/test/images/test_0.JPEG"] = b"not looked at"
        write(folder, {f"{top}.zip": zipped(members)})
    else:
        members = {}
        for split, listed in kinds.items():
            for k, kind in enumerate(listed):
                shade = 10 + 10 * k if split == "train" else 30
                members[f"{split}/{kind}/{k}.JPEG"] = picture("JPEG", shade, (64, 64))
        write(folder / "tiny-imagenet", {"images.zip": zipped(members)})
    entry = small(tiny_imagenet, "TINY", folder)
    train, val = (entry.load(split, fetch=False) for split in ("train", "val"))
    assert train.classes == val.classes == ("n01", "n02")
    found = dict(zip(shades(train.images), train.labels.tolist(), strict=True))
    assert found == {10: 1, 20: 0} and sorted(val.labels.tolist()) == [0, 1]


# --- human labels


def test_fashion_of_both_forms_is_the_same(folder: Path, small: Any) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (3, 28, 28)).astype(np.uint8)
    labels = np.array([9, 0, 4], np.uint8)
    counts = generator.integers(0, 30, (3, 10))

    def idx(array: np.ndarray) -> bytes:
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        return gzip.compress(head + array.tobytes())

    lines = "\n".join(",".join(map(str, row)) for row in counts)
    write(folder, {"fmh_counts.csv": lines.encode()})
    names = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
    mnist = {name: b"MNIST's own file of this name" for name in names}
    write(folder / "MNIST", mnist)
    write(folder / "fashion", dict(zip(names, (idx(images), idx(labels)), strict=True)))
    official = small(human_labels, "FASHION", folder).load("test", fetch=False)
    (folder / "fmh_counts.csv").unlink()
    out = io.BytesIO()
    np.savez(out, images=images, labels=labels, counts=counts.astype(np.uint8))
    write(folder, {"fashion-mnist-h.npz": out.getvalue()})
    copy = small(human_labels, "FASHION", folder).load("test", fetch=False)
    for found in (official, copy):
        assert found.human is not None and found.classes[9] == "ankle boot"
        assert (found.human.counts.numpy() == counts).all()
        torch.testing.assert_close(found.human.probs.sum(-1), torch.ones(3).double())
        assert found.images.shape == (3, 3, 28, 28)
        assert (found.images[1, 2].numpy() == images[1]).all()
        assert found.labels.tolist() == [9, 0, 4]


def noisy_arrays(n: int = 50000) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0).integers
    names = ("clean_label", "worse_label", "aggre_label")
    names += ("random_label1", "random_label2", "random_label3")
    return {name: draw(0, 10, n) for name in names}


def test_noisy_labels_of_both_forms_are_the_same(folder: Path, small: Any) -> None:
    arrays = noisy_arrays(40)
    out = io.BytesIO()
    torch.save(arrays, out)
    named = io.BytesIO()
    with zipfile.ZipFile(out) as source, zipfile.ZipFile(named, "w") as target:
        for info in source.infolist():  # a pickle of NumPy 1, as the authors' is
            body = source.read(info)
            old = b"cnumpy._core.multiarray\n_reconstruct"
            target.writestr(info.filename, body.replace(old, old.replace(b"._", b".")))
    write(folder, {"CIFAR-10_human.pt": named.getvalue()})
    small(human_labels, "CIFAR10N", folder)
    official = human_labels.load_cifar10n(fetch=False)
    (folder / "CIFAR-10_human.pt").unlink()
    votes = np.stack([arrays[f"random_label{k}"] for k in (1, 2, 3)], 1)
    copy = io.BytesIO()
    rest = {"aggregate": "aggre", "worse": "worse", "clean": "clean"}
    others = {new: arrays[f"{old}_label"].astype(np.uint8) for new, old in rest.items()}
    np.savez(copy, votes=votes.astype(np.uint8), **others)
    write(folder, {"cifar10n.npz": copy.getvalue()})
    small(human_labels, "CIFAR10N", folder)
    for found in (official, human_labels.load_cifar10n(fetch=False)):
        assert (found.votes.numpy() == votes).all()
        assert (found.aggregate.numpy() == arrays["aggre_label"]).all()
        assert (found.worse.numpy() == arrays["worse_label"]).all()
    counts = human_labels.read_noisy_votes("train").counts
    assert (counts.sum(-1) == 3).all() and counts[0, votes[0, 0]] >= 1


def test_a_pickle_that_holds_more_than_arrays_is_refused() -> None:
    out = io.BytesIO()
    torch.save({"clean_label": print}, out)
    with pytest.raises(Exception, match=r"Weights only load failed|Unsupported"):
        human_labels.read_pickled_arrays(out.getvalue())


def test_cues_of_both_forms_are_the_same(folder: Path, small: Any) -> None:
    said = {"bird1-cat2": ["bird", "cat", "na"], "cat1-dog3": ["dog", "dog", "cat"]}
    top = folder / "texture-vs-shape"
    pictures = {
        f"{n.split('1')[0]}/{n}.png": picture("PNG", 10 + 10 * k)
        for k, n in enumerate(said)
    }
    images, answers = human_labels.CUE_FOLDERS["conflict"]
    write(top / "stimuli" / images, pictures)
    for subject in range(3):
        rows = ["object_response,category,imagename"]
        for name, words in said.items():
            kind = name.split("1")[0]
            rows.append(f"{words[subject]},{kind},001_s5n_{kind}_00_{name}.png")
        path = f"x_subject-0{subject}_session_1.csv"
        write(top / "raw-data" / answers, {path: "\n".join(rows).encode()})
        write(top / "raw-data" / answers, {"x_alexnet_session_1.csv": b"no person"})
    official = small(human_labels, "CUES", folder).load("conflict", fetch=False)
    greys = shades(official.images)
    (folder / "texture-vs-shape").rename(folder / "away")
    kinds = human_labels.CUE_CLASSES
    rows = [",".join(["name", "shape", "texture", "width", *kinds, "na"])]
    for name, words in said.items():
        shape = name.split("1")[0]
        votes = [str(words.count(kind)) for kind in (*kinds, "na")]
        rows.append(",".join([f"{images}/{shape}/{name}.png", shape, "", "9", *votes]))
    members = {f"{images}/{n}": c for n, c in pictures.items()}
    content = {"images.zip": zipped(members), "votes.csv": "\n".join(rows).encode()}
    write(folder / "cue-conflict", content)
    copy = small(human_labels, "CUES", folder).load("conflict", fetch=False)
    for found in (official, copy):
        assert found.human is not None
        assert found.labels.tolist() == [kinds.index("bird"), kinds.index("cat")]
        assert found.human.counts.sum(-1).tolist() == [2, 3], "no answer is no vote"
        assert found.human.counts[1, kinds.index("dog")] == 2
        textures = human_labels.texture_labels(found.images.names)
        assert textures.tolist() == [kinds.index("cat"), kinds.index("dog")]
    assert greys == shades(copy.images) == [10, 20]


# --- all of them


NEW = ("cub200", "cars196", "sop", "omniglot", "tiny-imagenet")
NEW += ("fashion-mnist-h", "cifar10n", "cue-conflict")


def test_every_set_says_its_licence_and_what_to_do(folder: Path) -> None:
    rows = {row.name: row for row in describe()}
    for name in NEW:
        row = rows[name]
        assert row.state == "missing" and row.licence and row.address.startswith("http")
        assert "PCL_DATA" in row.how
        entry = dataset(name)
        split = next(iter(entry.splits))
        with pytest.raises(DataError, match=r"is not on this machine: .*PCL_DATA"):
            entry.load(split, fetch=False)
    assert "ImageNet" in rows["cub200"].title


def test_a_large_file_is_verified_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"hello")
    file = measure_file(path)
    assert verify(path, file) == path
    with pytest.raises(DataError, match=r"5 bytes where 6 .*: delete it, then ask"):
        verify(path, File(6, file.sha256), "ask")
    with pytest.raises(DataError, match=r"SHA-256.*: delete it, then get it again"):
        verify(path, File(5, "0" * 64))
    with pytest.raises(DataError, match=r"cannot be read.*: get it again"):
        verify(tmp_path / "absent", file)
    path.rename(tmp_path / "g")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    assert locate("link", [tmp_path]) is None, "a link to nothing is no file"


def real(name: str, split: str) -> ImageSet:
    """A split of a real set, or a reason to skip."""
    entry = dataset(name)
    if entry.form() is None or (entry.base and dataset(entry.base).form() is None):
        pytest.skip(f"{name} is not here; {entry.advice}")
    return entry.load(split, fetch=False)


@pytest.mark.parametrize(
    ("name", "split", "images", "classes", "first", "last"),
    [
        ("cub200", "train", {5864}, 100, "Black_footed_Albatross", "Brown_Pelican"),
        ("cub200", "fit", {2889}, 50, "Black_footed_Albatross", "Eared_Grebe"),
        ("cub200", "val", {2975}, 50, "Horned_Grebe", "Brown_Pelican"),
        ("cub200", "test", {5924}, 100, "White_Pelican", "Common_Yellowthroat"),
        ("cars196", "train", {8048, 8054}, 98, "AM General Hummer SUV 2000", ""),
        ("cars196", "test", {8122, 8131}, 98, "", "smart fortwo Convertible 2012"),
        (
            "omniglot",
            "background",
            {19280},
            964,
            "Alphabet_of_the_Magi/character01",
            "",
        ),
        ("omniglot", "evaluation", {13180}, 659, "Angelic/character01", ""),
        ("tiny-imagenet", "train", {12000, 100000}, 200, "n01443537", "n12267677"),
        ("tiny-imagenet", "val", {2000, 10000}, 200, "n01443537", "n12267677"),
        ("fashion-mnist-h", "test", {10000}, 10, "T-shirt/top", "ankle boot"),
        ("cifar10n", "train", {50000}, 10, "airplane", "truck"),
        ("cue-conflict", "conflict", {1280}, 16, "airplane", "truck"),
        ("cue-conflict", "edges", {160}, 16, "airplane", "truck"),
        ("cue-conflict", "silhouettes", {160}, 16, "airplane", "truck"),
    ],
)
def test_real_sets_have_the_published_sizes(
    name: str, split: str, images: set[int], classes: int, first: str, last: str
) -> None:
    found = real(name, split)
    assert len(found.images) == len(found.labels) and len(found.labels) in images
    assert len(found.classes) == classes
    assert set(found.labels.tolist()) == set(range(classes))
    assert found.classes[0].startswith(first) and found.classes[-1].endswith(last)
    image = found.images[len(found.labels) // 2]
    assert image.dtype == torch.uint8 and image.shape[0] == 3


def test_noisy_labels_are_about_the_images_they_stand_beside() -> None:
    found = real("cifar10n", "train")
    noisy = human_labels.load_cifar10n(fetch=False)
    assert torch.equal(noisy.clean, found.labels), "the order is CIFAR-10's"
    assert found.human is not None
    top = found.human.counts.max(-1)
    clear = top.values > 1
    assert torch.equal(noisy.aggregate[clear], top.indices[clear])
    shares = [(top.values == k).double().mean().item() for k in (3, 2, 1)]
    assert shares == pytest.approx([0.604, 0.336, 0.061], abs=1e-3)
