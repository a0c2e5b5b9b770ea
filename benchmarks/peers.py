"""Beside the neighbours: the same numbers as other libraries, and a place inside their
models. `make peers` installs them apart and records what comes out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata

import numpy as np
import torch
from torch import Tensor, nn

import pcl
import pcl._torchvision  # what follows imports torchvision, which needs this
from benchmarks.record import measured_now, of_values
from pcl.ledger import Record, write

Found = dict[str, float]
CHECKS: dict[str, tuple[str, Callable[[], Found]]] = {}  # by row: distribution, check


def check(row: str, peer: str) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Enter a comparison into the list; its numbers are what is recorded."""

    def enter(function: Callable[[], Found]) -> Callable[[], Found]:
        CHECKS[row] = peer, function
        return function

    return enter


def views(n: int = 64, features: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two noisy views of random points."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=rng)
    noise = 0.3 * torch.randn(2, n, features, generator=rng)
    return x + noise[0], x + noise[1]


def require(good: bool, what: str) -> None:
    """End with one line where a claim does not hold."""
    if not good:
        raise SystemExit(f"make peers: {what} does not hold")


@check("lightly.ntxent", "lightly")
def lightly() -> Found:
    """InfoNCE, symmetrised over two views, is NTXentLoss up to log M: the negatives of
    the other library are all other 2 B - 2 items of both views."""
    from lightly.loss import NTXentLoss

    x, y = (v.requires_grad_() for v in views())
    n, temperature = len(x), 0.1
    theirs = NTXentLoss(temperature=temperature)(x, y)
    loc = nn.functional.normalize(torch.cat([x, y]), dim=-1)
    partner = torch.arange(2 * n).roll(n)
    items = torch.arange(2 * n)
    others = (items != items[:, None]) & (items != partner[:, None])
    rows = items.expand(2 * n, -1)[others].view(2 * n, 2 * n - 2)
    q, q_pos, q_neg = (
        pcl.VonMisesFisher(z, 1.0) for z in (loc, loc[partner], loc[rows])
    )
    ours = pcl.InfoNCE(kappa_pos=1 / temperature)(q, q_pos, q_neg)
    value = abs(float((ours + np.log(2 * n - 2) - theirs).detach()))
    there, here = (torch.autograd.grad(loss, x)[0] for loss in (theirs, ours))
    slope = float((there - here).abs().max() / there.abs().max())
    require(value < 1e-4 and slope < 1e-3, "the equality with lightly's NTXentLoss")
    return {"value_difference": value, "gradient_difference": slope}


@check("transformers.vit", "transformers")
def transformers() -> Found:
    """A vision transformer with random weights becomes an encoder that is trained
    through, and its pooled output feeds a head."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    vit = ViTModel(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=8,
        )
    )

    class Pooled(nn.Module):
        """The model's one vector per image."""

        def __init__(self) -> None:
            super().__init__()
            self.vit, self.last = vit, nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.vit(pixel_values=x).pooler_output)

    encoder = pcl.NormEncoder(Pooled())
    images = torch.rand(48, 3, 16, 16)
    pcl.set_median_kappa(encoder, images, 20.0)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    loss = pcl.ExactInfoNCE(kappa_pos=20.0)
    seen = []
    for _ in range(30):
        value = loss(
            *(encoder(images + 0.02 * torch.randn(48, 3, 16, 16)) for _ in "ab")
        )
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    require(
        np.mean(seen[-5:]) < np.mean(seen[:5]) - 0.2, "learning inside transformers"
    )
    return {"loss_at_start": seen[0], "loss_at_end": float(np.mean(seen[-5:]))}


@check("timm.resnet", "timm")
def timm() -> Found:
    """`probabilistic` turns a model of timm into an encoder; its features feed a head."""
    import timm as models

    torch.manual_seed(0)
    net = models.create_model("resnet10t", pretrained=False, num_classes=10)
    encoder = pcl.probabilistic(net, dim=8)
    q = pcl.encode(encoder, torch.rand(4, 3, 64, 64))
    features = models.create_model("resnet10t", pretrained=False, num_classes=0)
    with torch.no_grad():
        wide = features.eval()(torch.rand(24, 3, 64, 64))
    labels = torch.arange(24) % 3
    head = pcl.train_head(wide, labels, dim=4, hidden=32, steps=5, batch_size=8)
    require(
        bool(head(wide).concentration.isfinite().all()), "a head on timm's features"
    )
    return {"dim": float(q.loc.shape[-1]), "features": float(wide.shape[-1])}


@check("mapie.sets", "mapie")
def mapie() -> Found:
    """A head's votes as class probabilities, conformalised by MAPIE: the sets hold the
    truth at least as often as asked for, and are larger where kappa is small."""
    from mapie.classification import SplitConformalClassifier
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float(), y[order]
    train, calibrate, test = slice(0, 700), slice(700, 1200), slice(1200, None)
    head = pcl.train_head(x[train], y[train], dim=4, steps=150, batch_size=64)
    base = pcl.encode(head, x[train])

    class Votes(ClassifierMixin, BaseEstimator):
        """Classes of the training images, weighted by the density of a query there."""

        classes_ = np.arange(10)

        def __sklearn_is_fitted__(self) -> bool:
            return True

        def fit(self, X: np.ndarray, y: np.ndarray) -> Votes:
            return self

        def predict_proba(self, X: np.ndarray) -> np.ndarray:
            q = pcl.encode(head, torch.as_tensor(X).float())
            logits = q.concentration[:, None] * (q.loc @ base.loc.T)
            weight = logits.softmax(-1)
            return (
                (weight @ nn.functional.one_hot(y[train], 10).float()).double().numpy()
            )

        def predict(self, X: np.ndarray) -> np.ndarray:
            return self.predict_proba(X).argmax(-1)

    level = 0.95
    sets = SplitConformalClassifier(
        Votes(), confidence_level=level, conformity_score="aps", random_state=0
    )
    sets.conformalize(x[calibrate].numpy(), y[calibrate].numpy())
    _, inside = sets.predict_set(x[test].numpy())
    inside, truth = inside[:, :, 0], y[test].numpy()
    covered = float(inside[np.arange(len(truth)), truth].mean())
    sizes = inside.sum(-1)
    kappa = pcl.encode(head, x[test]).concentration
    order_of_sizes = pcl.spearman(kappa, torch.as_tensor(sizes).float())
    # five standard errors of a coverage measured on the test part, given 500 pairs
    slack = 5 * np.sqrt(level * (1 - level) * (1 / len(truth) + 1 / 500))
    require(covered > level - slack, "MAPIE's coverage on a head's votes")
    require(order_of_sizes < 0, "smaller sets where kappa is large")
    return {"coverage": covered, "size": float(sizes.mean()), "rank": order_of_sizes}


def run(rows: list[str]) -> Iterator[tuple[Record, str]]:
    """The record and a line for each comparison; a peer that is missing is an error."""
    where = measured_now()
    for row in rows:
        peer, function = CHECKS[row]
        start = time.perf_counter()
        version = metadata.version(peer)
        found = function()
        seconds = time.perf_counter() - start
        settings = {**where, "peer": peer, "version": version}
        record = of_values("peers", row, found, settings, {}, "cpu", seconds)
        record = replace(record, work="own")  # about numbers, not about speed
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in found.items())
        yield record, f"{row} ({peer} {version}): {numbers}"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(CHECKS)}; default all")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args(arguments)
    if unknown := [row for row in asked.rows if row not in CHECKS]:
        parser.error(f"unknown {', '.join(unknown)}: there are {', '.join(CHECKS)}")
    for record, line in run(asked.rows or list(CHECKS)):
        print(line, flush=True)
        if not asked.dry:
            write(record)


if __name__ == "__main__":
    main()
