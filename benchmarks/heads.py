"""Heads as a user makes them: `pcl pretrained --train` from a folder of photographs,
the call that works afterwards, and the head in a program without this library.
`python -m benchmarks.heads` measures all three and records them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import pcl
from benchmarks.record import measured_now, of_values
from pcl.datasets import dataset
from pcl.features import frozen_backbone
from pcl.heads import export_head, read_card
from pcl.ledger import Record, write
from pcl.loss_heads import load_loss_head
from pcl.sharing import export_onnx
from pcl.shipping import RECIPES, gather, head_folder

SOURCE = "cue-conflict:conflict"  # photographs in style, as a folder of one's own
OUTSIDE = """
import sys
sys.modules["pcl"] = None  # from here on `import pcl` fails
import numpy as np, onnxruntime, torch
x = np.load("x.npy")
(found,) = torch.export.load("head.pt2").module()(torch.from_numpy(x))
session = onnxruntime.InferenceSession("head.onnx", providers=["CPUExecutionProvider"])
(there,) = session.run(None, {"features": x})
np.savez("found.npz", export=found.detach().numpy(), onnx=there)
"""


def run_apart(words: Sequence[str], where: Path) -> None:
    """A program of its own, or its last words."""
    done = subprocess.run(words, cwd=where, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"benchmarks.heads: {done.stderr}")


def apart(found: Tensor | np.ndarray, wanted: Tensor) -> float:
    """The largest relative difference."""
    return float((torch.as_tensor(found) / wanted - 1).abs().max())


def made(name: str, images: Sequence[Tensor]) -> tuple[dict[str, float], float]:
    """What a head from a folder of these images is like, and the seconds it took."""
    with tempfile.TemporaryDirectory() as place:
        here = Path(place)
        (here / "images").mkdir()
        for i, image in enumerate(images):
            pixels = image.permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(here / "images" / f"{i:05d}.png")
        with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(here / "cache")}):
            return measure(name, images, here)


def measure(
    name: str, images: Sequence[Tensor], here: Path
) -> tuple[dict[str, float], float]:
    """The same, with the images in a folder and an empty cache beside it."""
    folder = str(here / "images")
    frozen_backbone(160, name)  # a ResNet-50 is fetched before the clock starts
    train = ["pretrained", name, "--train", "--source", folder]
    start = time.perf_counter()
    run_apart([sys.executable, "-m", "pcl.cli", *train], here)
    seconds = time.perf_counter() - start
    weights = head_folder(name) / "model.safetensors"
    head, x = load_loss_head(weights, backbone=name), gather(folder, name).x
    few = torch.stack(list(images[:64]))
    embedding, certainty = pcl.pretrained(name)(few)
    with torch.no_grad():
        wanted = head(x)
    np.save(here / "x.npy", x.numpy())
    export_head(head, here / "head.pt2")
    export_onnx(head, here / "head.onnx")
    run_apart([sys.executable, "-c", OUTSIDE], here)
    found, card = np.load(here / "found.npz"), read_card(weights)["metrics"]
    metrics = {
        "images": float(len(images)),
        "megabytes": weights.stat().st_size / 1e6,
        "embedding_cosine": float(
            torch.cosine_similarity(embedding, x[: len(few)]).min()
        ),
        "call_change": apart(-certainty, wanted[: len(few)]),
        "call_rank": pcl.spearman(-certainty, wanted[: len(few)]),
        "export_change": apart(found["export"], wanted),
        "onnx_change": apart(found["onnx"], wanted),
        "half_change": card["float16, largest relative change"],
        "half_rank": card["float16, rank correlation"],
    }
    return metrics, seconds


def run(names: Sequence[str], images: Sequence[Tensor]) -> Iterator[tuple[Record, str]]:
    """The record and a line for each network."""
    where = measured_now()
    for name in names:
        metrics, seconds = made(name, images)
        settings = {**where, "source": SOURCE, "threads": torch.get_num_threads()}
        curve = {"seconds": [seconds]}
        record = of_values("heads", name, metrics, settings, curve, "cpu", seconds)
        record = replace(record, work="own")  # not against a peer
        numbers = ", ".join(f"{key} {value:.3g}" for key, value in metrics.items())
        yield record, f"{name}: {seconds:.0f} seconds, {numbers}"


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.names if name not in RECIPES]:
        parser.error(f"unknown {', '.join(unknown)}: there are {', '.join(RECIPES)}")
    title, _, split = SOURCE.partition(":")
    photographs = dataset(title).load(split).images
    images = [photographs[i] for i in range(len(photographs))]
    for record, line in run(asked.names or list(RECIPES), images):
        print(line, flush=True)
        if not asked.dry:
            write(record)


if __name__ == "__main__":
    main()
