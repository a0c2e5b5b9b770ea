"""Representation uncertainty on your own images, from a folder to a map, on a CPU.

    python examples/own_images.py photos --out results            # one folder per class
    python examples/own_images.py photos --out results --pairs views   # no labels: two augmentations of each image
    python examples/own_images.py --digits --out results          # scikit-learn's digits, nothing to download
    python examples/own_images.py --cifar10 2000 --out results    # the first 2000 test images of CIFAR-10

Writes a folder's features, the head with its card, the ranking and the map; prints what a credible retrieval answers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from pcl.embedding import (
    DEFAULT_MODEL,
    Embedded,
    embed,
    make_loss,
    plot_map,
    rank,
    train_from,
    write_table,
)
from pcl.features import extract, fingerprint, frozen_backbone
from pcl.heads import export_head, save_head
from pcl.metrics import hits_at_k, rejection_curve
from pcl.retrieval import CredibleRetriever
from pcl.trust import uniformity
from pcl.vmf import VonMisesFisher


def digits() -> Embedded:
    """Pixels of scikit-learn's digits in place of features."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    paths = [f"digit {i}" for i in range(len(pixels))]
    classes = [str(d) for d in range(10)]
    return Embedded(
        pixels.float()[:, None],
        paths,
        labels,
        classes,
        "pixels of 8 x 8 digits",
        source="digits",
    )


def cifar10(n: int, out: Path) -> Embedded:
    """Frozen features of CIFAR-10's test images; the images come as arrays, so no
    folder is needed."""
    from pcl.images import load_cifar10

    images = load_cifar10("test")
    net = frozen_backbone()
    features = torch.from_numpy(
        extract(net, images.images[:n], out / "cache", label="cifar10").copy()
    )
    paths = [f"test image {i}" for i in range(len(features))]
    name = f"{DEFAULT_MODEL}@{net.side}px#{fingerprint(net)[:12]}"
    return Embedded(
        features[:, None],
        paths,
        images.labels[:n].long(),
        list(images.classes),
        name,
        source="CIFAR-10",
    )


def take(q: VonMisesFisher, rows: torch.Tensor) -> VonMisesFisher:
    """Some of the posteriors."""
    return VonMisesFisher(q.loc[rows], q.concentration[rows], validate_args=False)


def answer_queries(q: VonMisesFisher, labels: torch.Tensor, rows: torch.Tensor) -> None:
    """Let the last fifth of the images query the rest, with credible sets and with the
    right to stay silent."""
    n_base = int(0.8 * len(rows))
    base, queries = rows[:n_base], rows[n_base:]
    sets = CredibleRetriever(take(q, base), labels=labels[base]).query(
        take(q, queries), level=0.95
    )
    mixed = (sets.n_classes > 1).double().mean()
    print(
        f"95 % credible sets: {sets.count.double().median():.0f} images (median), of "
        f"several classes for {mixed:.0%}"
    )
    hits = hits_at_k(q.loc[queries], labels[queries], 1, q.loc[base], labels[base])
    shares = torch.tensor([0.0, 0.2, 0.4, 0.6])
    right = rejection_curve(q.concentration[queries], hits, shares)
    print(
        "nearest neighbour right:",
        ", ".join(
            f"{r:.1%} with {s:.0%} silent" for s, r in zip(shares, right, strict=True)
        ),
    )


def draw_map(q: VonMisesFisher, data: Embedded, path: Path) -> None:
    """The uncertainty-aware map of the data set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 6), layout="constrained")
    plot_map(ax, q, data.labels, data.classes)
    fig.savefig(path)


def read_options() -> argparse.Namespace:
    """The options, refused where they would have no effect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        help="images, in one folder per class or in one flat folder",
    )
    parser.add_argument(
        "--digits", action="store_true", help="use scikit-learn's digits"
    )
    parser.add_argument(
        "--cifar10",
        type=int,
        metavar="N",
        help="use the first N test images of CIFAR-10",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for the results"
    )
    parser.add_argument("--model", help=f"any model of timm (default {DEFAULT_MODEL})")
    parser.add_argument("--weights", help="pretrained (default), random, or a file")
    parser.add_argument("--size", type=int, help="side of the images in pixels")
    parser.add_argument("--pairs", default="labels", choices=["labels", "views"])
    parser.add_argument("--loss", default="exact", choices=["exact", "mc"])
    parser.add_argument("--kappa-pos", type=float, default=20.0)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    if (args.folder is not None) + args.digits + (args.cifar10 is not None) != 1:
        parser.error("name one of a folder, --digits and --cifar10")
    if args.cifar10 is not None and args.cifar10 < 1:
        parser.error(f"--cifar10 takes a number of images, got {args.cifar10}")
    if args.folder is None and (
        args.model or args.weights or args.size is not None or args.pairs == "views"
    ):
        parser.error("--model, --weights, --size and --pairs views are for a folder")
    return args


def read_images(args: argparse.Namespace) -> Embedded:
    """Features of the images asked for."""
    if args.digits:
        return digits()
    if args.cifar10:
        return cifar10(args.cifar10, args.out)
    options = {
        "views": 4 if args.pairs == "views" else 0,
        "weights": args.weights or "pretrained",
        "size": args.size,
    }
    data = embed(
        args.folder,
        args.out / "features.safetensors",
        args.model or DEFAULT_MODEL,
        **options,
    )
    print(
        f"{len(data.paths)} images embedded, {len(data.broken)} could not be read",
        *data.broken,
        sep="\n  ",
    )
    return data


def main() -> None:
    """Do everything."""
    args = read_options()
    data = read_images(args)
    head = train_from(
        data,
        args.pairs,
        args.dim,
        make_loss(args.loss, args.kappa_pos),
        steps=args.steps,
        batch_size=128,
    )
    save_head(head, args.out / "head.safetensors")
    export_head(head, args.out / "head.pt2")
    print(
        "held-out pairs:",
        {name: round(value, 3) for name, value in head.card["metrics"].items()},
    )

    table = rank(data, head)
    written = write_table(table, args.out / "ranking.parquet")
    print(f"most ambiguous ({written}):", *table["path"][:5], sep="\n  ")
    with torch.no_grad():
        q = head(data.features[:, 0].float())
    rows = torch.randperm(len(data.paths), generator=torch.Generator().manual_seed(0))
    held = rows[: int(0.2 * len(rows))]  # what `train_from` kept out of training
    if len(held) < 8:
        print(
            f"{len(held)} held-out images are too few to test whether the posteriors "
            "fill the sphere"
        )
    else:
        print(uniformity(take(q, held[:2000]), args.kappa_pos))
    if data.labels is not None:
        answer_queries(q, data.labels, rows.flip(0))  # the held-out images ask
    draw_map(q, data, args.out / "map.svg")
    print(f"map: {args.out / 'map.svg'}")


if __name__ == "__main__":
    try:
        main()
    except (
        ValueError,
        OSError,
        ImportError,
        RuntimeError,
    ) as error:  # wrong files or options: one line will do
        sys.exit(f"own_images: {error}")
