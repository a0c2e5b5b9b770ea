"""Losses on proxies against pytorch-metric-learning, and against a loop over images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Bars, Row, installed, interleaved, show
from pcl.proxies import ProxyAnchor, ProxyELNivMF, ProxyNCA

Loss = Callable[[Tensor, Tensor], Tensor]


def step(loss: Loss, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def call() -> None:
        loss(images.clone().requires_grad_(), labels).backward()

    return call


def cosine_rows(images: Tensor, labels: Tensor, classes: int, rounds: int) -> list[Row]:
    """The losses of cosines that both libraries have."""
    peer: Any = installed("pytorch_metric_learning.losses")
    if not peer:
        return []
    size = classes, images.shape[1]
    cases: dict[str, tuple[Loss, Loss, str]] = {
        "anchor": (ProxyAnchor(*size), peer.ProxyAnchorLoss(*size), "ProxyAnchor"),
        "nca": (ProxyNCA(*size), peer.NormalizedSoftmaxLoss(*size), "ProxyNCA++"),
        "classic": (
            ProxyNCA(*size, classic=True),
            peer.ProxyNCALoss(*size),
            "ProxyNCA",
        ),
    }
    rows = []
    for slug, (ours, theirs, name) in cases.items():
        calls = {
            "ours": step(ours, images, labels),
            "peer": step(theirs, images, labels),
        }
        peers = {"peer": ("pytorch-metric-learning", 1 / 1.3)}
        title = f"{name}, {len(images)} images, {classes} classes, D={size[1]}"
        bars = Bars(f"proxy-{slug}", title, "Losses on proxies", peers)
        rows += bars.rows(interleaved(calls, rounds))
    return rows


def loop_rows(images: Tensor, labels: Tensor, classes: int, rounds: int) -> list[Row]:
    """EL-nivMF by five samples for the whole batch, and image by image."""
    loss = ProxyELNivMF(classes, images.shape[1], kappa=50.0, n_samples=5)

    def one_by_one(x: Tensor, y: Tensor) -> Tensor:
        parts = [loss(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
        return torch.stack(parts).mean()

    calls = {
        "ours": step(loss, 5 * images, labels),
        "loop": step(one_by_one, 5 * images, labels),
    }
    peers = {"loop": ("our own loss, called image by image", 20.0)}
    title = f"EL-nivMF, {len(images)} images, {classes} classes, D={images.shape[1]}"
    bars = Bars("proxy-el-nivmf", title, "Losses on proxies", peers)
    return bars.rows(interleaved(calls, rounds))


def rows(quick: bool = False) -> list[Row]:
    """Cosine losses, and the sampled one."""
    images, classes, rounds = (8, 4, 2) if quick else (106, 100, 9)
    torch.manual_seed(0)
    x, labels = torch.randn(images, 16 if quick else 512), torch.arange(images)
    sizes = x, labels % classes, classes, rounds
    return cosine_rows(*sizes) + loop_rows(*sizes)


if __name__ == "__main__":
    show(rows())
