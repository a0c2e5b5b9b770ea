"""`pcl embed` of a folder against decoding its images and running the network on them,
measured apart."""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import Bars, Row, show
from pcl.folder import ListedImages, embed, list_images, timm_backbone

BATCH = 32  # that of `embed`


def write_images(folder: Path, n: int, side: int) -> None:
    """JPEG files of smooth noise."""
    from PIL import Image

    random = np.random.default_rng(0)
    folder.mkdir()
    for i in range(n):
        small = random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((side, side))
        picture.save(folder / f"{i}.jpg", quality=92)


def apart_from(images: ListedImages, model: torch.nn.Module, n: int) -> Tensor:
    """The features, with nothing but decoding and the network: one after the other, a
    batch at a time."""
    found = []
    for start in range(0, n, BATCH):
        stop = min(n, start + BATCH)
        batch = torch.stack([images[i] for i in range(start, stop)])
        with torch.inference_mode():
            found.append(model(batch))
    return torch.cat(found)


def embed_rows(n: int, side: int, size: int, rounds: int) -> list[Row]:
    """Both parts apart, then `embed`, round by round; an untrained network takes as
    long as a trained one."""
    net = timm_backbone("tf_efficientnet_lite0", "random", size)
    ours, apart = [], []
    with tempfile.TemporaryDirectory() as place:
        few, folder = Path(place) / "few", Path(place) / "images"
        write_images(few, min(n, 2 * BATCH), side)  # these warm up
        embed(few, Path(place) / "few.safetensors", net)
        write_images(folder, n, side)
        listing = list_images(folder)
        log = Path(place) / "broken.jsonl"
        images = ListedImages(listing, net.plain, (3, size, size), log, None)
        for turn in range(rounds):
            start = time.perf_counter()
            found = apart_from(images, net.model, n)
            middle = time.perf_counter()
            out = embed(folder, Path(place) / f"{turn}.safetensors", net)
            end = time.perf_counter()
            torch.testing.assert_close(out.features[:, 0], found, rtol=1e-4, atol=1e-4)
            apart.append(middle - start)
            ours.append(end - middle)
    name = f"embed {n:,} images of {side} pixels, network at {size}"
    peers = {"apart": ("decoding and network apart", 1 / 1.1)}
    times = {"ours": ours, "apart": apart}
    return Bars("embed", name, "Features of a folder", peers).rows(times)


def rows(quick: bool = False) -> list[Row]:
    """One comparison; none where timm is not installed."""
    if find_spec("timm") is None:
        return []
    return embed_rows(6, 64, 32, 2) if quick else embed_rows(10_000, 160, 96, 3)


if __name__ == "__main__":
    show(rows())
