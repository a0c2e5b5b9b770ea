"""Heads for networks people have: what may be shipped, how one is made from a folder,
what its card says, and what is answered where there is none."""

from __future__ import annotations

from collections.abc import Callable
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
from pcl.datasets import generated_images
from pcl.features import Backbone
from pcl.heads import HeadError, export_head, read_card
from pcl.loss_heads import LossHead
from pcl.networks import small_resnet
from pcl.sharing import export_onnx

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
    assert not any(shipping.TERMS[r.source.partition(":")[0]].ship for r in shipping.RECIPES.values()), (
        "a recipe whose images may be shipped should ship its weights"
    )  # fmt: skip


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
    assert "float16" in (made / "README.md").read_text()
    model = shipping.pretrained(NAME, tmp_path / "heads")
    images = generated_images(7, seed=2)[0].images
    embedding, certainty = model(images)
    assert embedding.shape == (7, 64) and certainty.shape == (7,)
    wide = torch.cat([images, torch.zeros_like(images)[..., :10]], dim=-1)
    assert not torch.equal(model(wide)[1], certainty), "the middle square is taken"
    for bad in (images.float(), images[0]):
        with pytest.raises(ValueError, match="must be bytes of shape"):
            model(bad)


def test_classes_of_imagenet_give_losses(folder: Path) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 0, 1])
    losses, kind = shipping.own_losses(shipping.Gathered(x, labels, ["n2", "n3"]), NAME)
    scores = shipping.imagenet_classifier(NAME)(x)
    want = -scores.log_softmax(-1)[torch.arange(4), labels + 1]
    assert kind == "losses"
    np.testing.assert_allclose(losses, want, rtol=1e-6)
    other, kind = shipping.own_losses(shipping.Gathered(x, labels, ["cat", "n3"]), NAME)
    assert kind == "entropies"
    p = scores.softmax(-1)
    np.testing.assert_allclose(other, -(p * p.log()).sum(-1), rtol=1e-5)


def test_files_leave_with_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    shipping.train_pretrained(
        NAME, str(folder), tmp_path / "heads", steps=4, hidden=16, batch_size=16
    )
    head = shipping.pretrained(NAME, tmp_path / "heads").head
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = head(x)
    export_head(head, tmp_path / "head.pt2")
    (found,) = torch.export.load(tmp_path / "head.pt2").module()(x)
    np.testing.assert_allclose(found.detach(), want, rtol=1e-6)
    export_onnx(head, tmp_path / "head.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "head.onnx", providers=["CPUExecutionProvider"]
    )
    (there,) = session.run(None, {"features": x.numpy()})
    np.testing.assert_allclose(there, want, rtol=1e-5)


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
    assert "another than recorded" in said and "R-AUROC here" in said
    assert main(["pretrained", NAME, "--train", "--source", str(folder / "no")]) == 2
    assert main(["pretrained", NAME]) == 0
    assert f"{NAME}: here" in capsys.readouterr().out


def test_a_head_is_small_enough_to_ship() -> None:
    for features in (1280, 2048):
        head = LossHead(features)
        assert 2 * sum(v.numel() for v in head.state_dict().values()) < 3e6
