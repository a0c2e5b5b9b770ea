"""From a folder of images, or a data set such as cifar10:test, to a ranking and a map.

python examples/own_images.py photos --out results  # one folder per class
python examples/own_images.py photos --out results --pairs views  # no labels
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from pcl.folder import embed, rank, train_from, write_table
from pcl.heads import export_head, save_head
from pcl.plots import plot_map


def main(args: argparse.Namespace) -> None:
    views = 4 if args.pairs == "views" else 0
    data = embed(args.folder, args.out / "features.safetensors", views=views)
    head = train_from(data, args.pairs, steps=args.steps, batch_size=128)
    save_head(head, args.out / "head.safetensors")
    export_head(head, args.out / "head.pt2")
    table = rank(data, head)
    written = write_table(table, args.out / "ranking.parquet")
    print(f"most ambiguous ({written}):", *table["path"][:5], sep="\n  ")
    fig = Figure(figsize=(7, 6), layout="constrained")
    with torch.no_grad():
        q = head(data.features[:, 0].float())
    plot_map(fig.subplots(), q, data.labels, data.classes)
    fig.savefig(args.out / "map.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="images, or a data set and its split")
    parser.add_argument("--out", type=Path, required=True, help="for the results")
    parser.add_argument("--pairs", default="labels", choices=["labels", "views"])
    parser.add_argument("--steps", type=int, default=400)
    try:
        main(parser.parse_args())
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        sys.exit(f"own_images: {error}")
