"""Uncertainty heads: what they learn from, what is saved, what is refused, and what
they say outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pcl.heads import (
    RECIPE,
    HeadError,
    UncertaintyHead,
    export_head,
    load_head,
    read_card,
    save_head,
    train_head,
)
from pcl.losses import HIB, ExactInfoNCE, MCInfoNCE
from pcl.vmf import VonMisesFisher

FAST = {"hidden": 16, "steps": 3, "batch_size": 16}


def blobs(n: int = 60, n_features: int = 6) -> tuple[Tensor, Tensor]:
    """Three classes, each a noisy point."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 3
    centres = 3 * torch.randn(3, n_features, generator=generator)
    return centres[labels] + torch.randn(n, n_features, generator=generator), labels


@pytest.fixture(scope="module")
def head() -> UncertaintyHead:
    features, labels = blobs()
    return train_head(
        features, labels, dim=4, backbone="blobs", data="three blobs", **FAST
    )


def test_the_recipe_is_the_one_that_was_chosen() -> None:
    assert (RECIPE.batch_size, RECIPE.steps, RECIPE.kappa_from) == (256, 1000, 0.0)
    fresh = UncertaintyHead(1280)
    assert (fresh.dim, fresh.hidden) == (8, 512)


def test_direction_and_length_are_mu_and_kappa(head: UncertaintyHead) -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    v = head.net((x.float() - head.mean) / head.scale)
    q = head(x)
    assert isinstance(q, VonMisesFisher)
    torch.testing.assert_close(q.loc * q.concentration[:, None], v)


def test_training_separates_classes_and_lowers_the_loss() -> None:
    features, labels = blobs(150)
    trained = train_head(features, labels, dim=4, hidden=32, steps=60, batch_size=32)
    q = trained(features)
    cosines = (q.loc @ q.loc.T).fill_diagonal_(-2)
    assert (labels[cosines.argmax(1)] == labels).double().mean() > 0.9
    assert trained.card.metrics["loss"] < -0.5
    assert not trained.training


def test_training_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    features, labels = blobs()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = train_head(features, labels, dim=3, **FAST)
    assert torch.equal(torch.rand(1), expected)
    second = train_head(features, labels, dim=3, **FAST)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            first.state_dict().values(), second.state_dict().values(), strict=True
        )
    )
    other = train_head(features, labels, dim=3, seed=1, **FAST)
    assert not torch.equal(other.net[0].weight, first.net[0].weight)  # type: ignore[arg-type,union-attr]


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    from pcl.checkpoints import CheckpointError

    features, labels = blobs()
    train_head(features, labels, dim=3, checkpoint=tmp_path / "run.pt", **FAST)
    train_head(features, labels, dim=3, checkpoint=tmp_path / "run.pt", **FAST)
    with pytest.raises(CheckpointError, match="another run"):
        train_head(features + 1, labels, dim=3, checkpoint=tmp_path / "run.pt", **FAST)


@pytest.mark.parametrize(
    "loss",
    [MCInfoNCE(10.0, 4), HIB(10.0, 0.0, 4), ExactInfoNCE(5.0, learn_kappa_pos=True)],
)
def test_any_loss_will_do(loss: torch.nn.Module) -> None:
    features, labels = blobs()
    card = train_head(features, labels, dim=3, loss=loss, **FAST).card
    assert card.loss.startswith(type(loss).__name__)
    json.dumps(card.entries(), allow_nan=False)


def test_wrong_types_are_named() -> None:
    with pytest.raises(ValueError, match="dim"):
        UncertaintyHead(4, dim=1)
    with pytest.raises(ValueError, match="6 features"):
        UncertaintyHead(6)(torch.rand(2, 5))


# --- files


def test_saved_and_loaded_it_gives_the_same_bits(
    head: UncertaintyHead, tmp_path: Path
) -> None:
    card = save_head(head, tmp_path / "deep" / "head.safetensors")
    assert [p.name for p in sorted(card.parent.iterdir())] == [
        "head.json",
        "head.safetensors",
    ]
    again = load_head(
        tmp_path / "deep" / "head.safetensors", backbone="blobs", n_features=6
    )
    x = blobs()[0]
    for a, b in zip(head.tensors(x), again.tensors(x), strict=True):
        assert torch.equal(a, b)
    assert again.card == head.card


def test_a_head_of_before_the_soft_cap_keeps_its_clamp(
    head: UncertaintyHead, tmp_path: Path
) -> None:
    path, x = tmp_path / "head.safetensors", blobs()[0]
    card = json.loads(save_head(head, path).read_text())
    assert load_head(path).cap == "soft"
    for old in ({"kappa": "a |v|^b"}, {}):  # as such cards say it, or say nothing
        before = {k: v for k, v in card.items() if k != "kappa"} | old
        path.with_suffix(".json").write_text(json.dumps(before))
        again = load_head(path)
        assert again.cap == "hard"
        assert torch.equal(again(x).concentration, head(x).concentration)
        again.kappa_max = 1.0  # far below what it says: a clamp has one value there
        assert again(x).concentration.max() == 1.0
        assert json.loads(save_head(again, path).read_text())["kappa"] == "a |v|^b"
    soft = UncertaintyHead(6, 4, 16)
    soft.load_state_dict(head.state_dict())
    soft.kappa_max = 1.0
    assert soft(x).concentration.min() > 1.0


def test_the_card_says_what_was_done(head: UncertaintyHead, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head.safetensors")
    card = read_card(tmp_path / "head.safetensors")
    assert (
        card["backbone"] == "blobs"
        and card["data"] == "three blobs"
        and card["dim"] == 4
    )
    assert card["loss"] == "ExactInfoNCE(kappa_pos=20)" and card["kappa_pos"] == 20.0
    assert card["metrics"]["loss"] < 1 and {"pcl", "torch"} <= card["versions"].keys()
    assert card["training"]["steps"] == 3 and card["pairs"] == "labels"


def damage_weights(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit_card(path: Path, **changes: object) -> None:
    file = path.with_suffix(".json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def disguise_pickle(path: Path) -> None:
    import hashlib

    torch.save({"weight": torch.ones(2)}, path)
    edit_card(path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("harm", "hint"),
    [
        (damage_weights, "checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "checksum"),
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.with_suffix(".json").unlink(), "card"),
        (lambda path: path.with_suffix(".json").write_text("{"), "not JSON"),
        (lambda path: path.with_suffix(".json").write_text("[]"), "format"),
        (lambda path: edit_card(path, format="pcl.head 0"), "pcl.head 0"),
        (
            lambda path: path.with_suffix(".json").write_text(
                '{"format": "pcl.head 1"}'
            ),
            "lacks",
        ),
        (lambda path: edit_card(path, dim=5), "does not hold"),
        (lambda path: edit_card(path, features=7), "does not hold"),
        (disguise_pickle, "does not hold"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    head: UncertaintyHead, tmp_path: Path, harm, hint: str
) -> None:
    path = tmp_path / "head.safetensors"
    save_head(head, path)
    harm(path)
    with pytest.raises(HeadError, match=hint):
        load_head(path)


def test_another_backbone_is_refused(head: UncertaintyHead, tmp_path: Path) -> None:
    save_head(head, tmp_path / "head.safetensors")
    with pytest.raises(HeadError, match=r"blobs.*resnet18"):
        load_head(tmp_path / "head.safetensors", backbone="resnet18")
    with pytest.raises(HeadError, match=r"6 features.*512"):
        load_head(tmp_path / "head.safetensors", n_features=512)
    with pytest.raises(ValueError, match="safetensors"):
        save_head(head, tmp_path / "head.pt")


@pytest.mark.parametrize("file", [1, 2])
def test_a_writer_that_fails_on_either_file_leaves_the_old_head_whole(
    head: UncertaintyHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: int
) -> None:
    save_head(head, tmp_path / "head.safetensors")
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == file:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("pcl.files.os.fsync", full)
    changed = UncertaintyHead(6, 4, 16)
    with pytest.raises(OSError, match="No space"):
        save_head(changed, tmp_path / "head.safetensors")
    monkeypatch.undo()
    again = load_head(tmp_path / "head.safetensors")
    assert torch.equal(again.net[0].weight, head.net[0].weight)  # type: ignore[arg-type,union-attr]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("old", [True, False])
def test_a_stop_between_the_two_renames_is_noticed(
    head: UncertaintyHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    path = tmp_path / "head.safetensors"
    if old:
        save_head(head, path)
    rename = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr("pcl.files.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_head(UncertaintyHead(6, 4, 16), path)
    monkeypatch.undo()
    with pytest.raises(HeadError, match="checksum" if old else "card"):
        load_head(path)
    assert {p.name for p in tmp_path.iterdir()} <= {"head.safetensors", "head.json"}


OUTSIDE = """
import sys, torch
inputs = torch.load(sys.argv[2], weights_only=True)
module = torch.export.load(sys.argv[1]).module()
torch.save([module(x) for x in inputs], sys.argv[3])
assert not [name for name in sys.modules if name.split(".")[0] == "pcl"]
"""


def test_exported_it_gives_the_same_numbers_in_another_process(
    head: UncertaintyHead, tmp_path: Path
) -> None:
    with torch.no_grad():
        mended = UncertaintyHead(6, 4, 16)
        mended.load_state_dict(head.state_dict())
        mended.calibration.copy_(torch.tensor([1.7, 0.6]))  # calibration travels along
        inputs = [
            torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
            for n in (1, 2, 33)
        ]
        export_head(mended, tmp_path / "head.pt2")
        torch.save(inputs, tmp_path / "x.pt")
        files = [str(tmp_path / name) for name in ("head.pt2", "x.pt", "y.pt")]
        subprocess.run(
            [sys.executable, "-c", OUTSIDE, *files], check=True, cwd=tmp_path
        )
        for x, found in zip(
            inputs, torch.load(tmp_path / "y.pt", weights_only=True), strict=True
        ):
            for a, b in zip(found, mended.tensors(x), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="pt2"):
        export_head(head, tmp_path / "head.onnx")


def test_options_are_those_of_the_configuration() -> None:
    features, labels = blobs()
    with pytest.raises(TypeError, match="stepz"):
        train_head(features, labels, stepz=3)
    assert replace(RECIPE, steps=3).steps == 3


@pytest.mark.parametrize("unit", [1e-25, 1e19])
def test_features_in_any_unit_train_as_well(unit: float) -> None:
    x, labels = blobs()
    fast = {"dim": 3, "hidden": 16, "steps": 5, "batch_size": 32}
    plain = train_head(x, labels, **fast)(x)
    found = train_head(x * unit, labels, **fast)(x * unit)
    assert found.concentration.std() > 0
    torch.testing.assert_close(found.loc, plain.loc, rtol=0.05, atol=0.02)


def test_no_features_have_no_posteriors(head: UncertaintyHead) -> None:
    q = head(torch.empty(0, head.n_features))
    assert q.batch_shape == (0,) and q.sample().shape == (0, head.dim)


def test_a_wrong_option_is_answered_with_the_right_one() -> None:
    x, labels = blobs()
    with pytest.raises(TypeError, match=r"unknown option .* 'setps'.*'steps'"):
        train_head(x, labels, setps=3)
    with pytest.raises(TypeError, match=r"'learning_rate': known are .*\blr_mu\b"):
        train_head(x, labels, learning_rate=1e-3)
