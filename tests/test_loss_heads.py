"""Heads that predict losses: oracles of the ranking losses, the stop-gradient, files
that come back whole, and losses of images that a classifier has not seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pcl.estimators import out_of_fold_losses
from pcl.heads import HeadError, load_head, save_head
from pcl.loss_heads import (
    LossHead,
    load_loss_head,
    ranking_loss,
    squared_loss,
    train_loss_head,
)
from pcl.published.objectives import ranking_as_printed, ranking_as_released
from pcl.sharing import export_onnx, from_pretrained, save_pretrained


def batch(n: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions and losses, some of them tied."""
    rng = torch.Generator().manual_seed(seed)
    u, losses = torch.rand(2, n, generator=rng, dtype=torch.float64)
    losses[:3] = losses[3]
    return u, losses


def all_pairs(u: Tensor, losses: Tensor, margin: float, leeway: float) -> float:
    """The ranking loss by loops."""
    terms = [
        max(0.0, margin - (float(u[i]) - float(u[j])))
        for i in range(len(u))
        for j in range(len(u))
        if float(losses[i]) - float(losses[j]) > leeway
    ]
    return sum(terms) / max(1, len(terms))


@pytest.mark.parametrize("margin", [0.1, 0.7])
@pytest.mark.parametrize("leeway", [0.0, 0.3, 5.0])
def test_ranking_is_the_mean_hinge_over_all_pairs(margin: float, leeway: float) -> None:
    u, losses = batch()
    found = float(ranking_loss(u, losses, margin, leeway))
    assert found == pytest.approx(all_pairs(u, losses, margin, leeway), abs=1e-14)


def test_ranking_ignores_order_shift_and_ties() -> None:
    u, losses = batch()
    perm = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    value = float(ranking_loss(u, losses))
    assert float(ranking_loss(u[perm], losses[perm])) == pytest.approx(value)
    assert float(ranking_loss(u + 7, 3 * losses)) == pytest.approx(value)
    assert float(ranking_loss(u, torch.ones(9))) == 0
    for bad in ({"margin": 0.0}, {"leeway": -1.0}):
        with pytest.raises(ValueError, match="margin must be positive"):
            ranking_loss(u, losses, **bad)


def test_published_pairs_are_disjoint_and_signed_as_they_say() -> None:
    u, losses = batch()
    printed, released = [], []
    for i in range(0, 8, 2):
        gap = float(u[i] - u[i + 1])
        sign = 1.0 if losses[i] > losses[i + 1] else -1.0  # a tie: the second is larger
        printed.append(max(0.0, sign * (gap + 0.1)))
        released.append(max(0.0, 0.1 - sign * gap))
    assert float(ranking_as_printed(u, losses)) == pytest.approx(sum(printed) / 4)
    assert float(ranking_as_released(u, losses)) == pytest.approx(sum(released) / 4)


def test_losses_are_targets_and_get_no_gradient() -> None:
    for loss in (squared_loss, ranking_loss, ranking_as_released):
        u, losses = (part.requires_grad_() for part in batch())
        loss(u, losses).backward()
        assert losses.grad is None and u.grad is not None


@pytest.mark.parametrize("stopped", [True, False])
def test_stop_gradient_is_what_it_says(stopped: bool) -> None:
    """A classifier trained beside the head gets the same gradient, or another one."""
    torch.manual_seed(0)
    body, top = torch.nn.Linear(5, 4), torch.nn.Linear(4, 3)
    head, x, y = LossHead(4, 8, stop_gradient=stopped), torch.randn(6, 5), [0, 1, 2] * 2
    grads = []
    for weight in (0.0, 1.0):
        features = body(x)
        losses = torch.nn.functional.cross_entropy(
            top(features), torch.tensor(y), reduction="none"
        )
        total = losses.mean() + weight * squared_loss(head(features), losses)
        grads.append(
            torch.autograd.grad(total, [*body.parameters(), *top.parameters()])
        )
    same = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert same == stopped


def test_squares_find_the_expected_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    kind = torch.randint(3, (3000,), generator=rng)
    mean = torch.tensor([0.5, 1.0, 3.0])
    losses = -mean[kind] * torch.rand(3000, generator=rng).log()
    x = torch.nn.functional.one_hot(kind).float()
    head = train_loss_head(x, losses, "l2", hidden=32, steps=300, lr_mu=1e-2)
    with torch.no_grad():
        found = head(torch.eye(3))
    truth = [losses[kind == k].mean() for k in range(3)]
    np.testing.assert_allclose(found, truth, atol=0.15)


def test_a_view_is_a_row() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, 3, generator=rng), torch.rand(40, 2, generator=rng)
    options = {"hidden": 8, "steps": 5, "batch_size": 16}
    a = train_loss_head(x, y, **options)
    b = train_loss_head(x.flatten(0, 1), y.flatten(), **options)
    for mine, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert a.card.images == 40 and a.card.loss == "l2"


@pytest.mark.parametrize(
    ("x", "y", "options", "error", "why"),
    [
        (torch.ones(4, 3), torch.ones(3), {}, ValueError, "one number for each row"),
        (torch.ones(4), torch.ones(4), {}, ValueError, "one number for each row"),
        (torch.ones(4, 3), torch.full((4,), math.nan), {}, ValueError, "finite"),
        (torch.ones(4, 3), torch.ones(4), {"kind": "l1"}, ValueError, "kind of loss"),
        (torch.ones(4, 3), torch.ones(4), {"step": 3}, TypeError, "did you mean"),
    ],
)
def test_bad_input_is_named(
    x: Tensor, y: Tensor, options: dict, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        train_loss_head(x, y, **options)
    with pytest.raises(ValueError, match="3 features"):
        LossHead(3)(torch.ones(2, 4))


@pytest.fixture
def head() -> LossHead:
    """A small trained head."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(100, 6, generator=rng)
    return train_loss_head(
        x, x.norm(dim=1), hidden=16, steps=30, backbone="pixels", data="noise"
    )


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_files_come_back(
    tmp_path: Path, head: LossHead, dtype: torch.dtype | None
) -> None:
    path = tmp_path / "loss.safetensors"
    card = json.loads(save_head(head, path, dtype).read_text())
    assert card["kind"] == "loss" and card["depth"] == 2 and "calibration" not in card
    again = load_loss_head(path, "pixels", 6)
    assert again.card == head.card and again.mean.dtype == torch.float32
    for name, value in head.state_dict().items():
        want = value if dtype is None else value.half().float()
        assert torch.equal(again.state_dict()[name], want), name
    with pytest.raises(HeadError, match="load_loss_head"):
        load_head(path)
    with pytest.raises(HeadError, match="not of 'resnet'"):
        load_loss_head(path, "resnet")
    path.write_bytes(b"no weights")
    with pytest.raises(HeadError, match="checksum"):
        load_loss_head(path)


def test_what_float16_cannot_hold_is_refused(tmp_path: Path, head: LossHead) -> None:
    head.mean.fill_(1e6)
    with pytest.raises(ValueError, match="mean does not fit"):
        save_head(head, tmp_path / "loss.safetensors", torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_a_posterior_head_is_no_loss_head(tmp_path: Path) -> None:
    from pcl.heads import UncertaintyHead

    save_head(UncertaintyHead(6, 4, 8), tmp_path / "head.safetensors")
    with pytest.raises(HeadError, match="lacks kind, depth"):
        load_loss_head(tmp_path / "head.safetensors")


def test_a_folder_and_onnx_give_the_same_numbers(
    tmp_path: Path, head: LossHead
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = save_pretrained(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "pcl-loss-head" and config["depth"] == 2
    words = (folder / "README.md").read_text()
    assert "loss-prediction" in words and "Maps 6 features of pixels" in words
    again = from_pretrained(folder)
    assert isinstance(again, LossHead)
    export_onnx(again, tmp_path / "head.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "head.onnx", providers=["CPUExecutionProvider"]
    )
    assert [out.name for out in session.get_outputs()] == ["uncertainty"]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    (found,) = session.run(None, {"features": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, head(x), rtol=1e-5)


def test_out_of_fold_losses_are_of_classifiers_that_have_not_seen_them() -> None:
    """Labels that are noise cannot be learned, and out of fold it shows."""
    rng = torch.Generator().manual_seed(0)
    x, labels = torch.randn(80, 160, generator=rng), torch.arange(80) % 2
    losses = out_of_fold_losses(x, labels, epochs=40)
    assert float(losses.mean()) > math.log(2)
    assert torch.equal(losses, out_of_fold_losses(x, labels, epochs=40))
    with pytest.raises(ValueError, match="folds must lie"):
        out_of_fold_losses(x, labels, folds=1)
