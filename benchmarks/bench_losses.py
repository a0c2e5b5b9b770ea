"""The losses against a straightforward transcription of MCInfoNCE, forward and
backward, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Bars, Row, interleaved, show
from pcl.losses import ExactInfoNCE, ExactNWJ, MCInfoNCE
from pcl.published.sphere import published_sample
from pcl.vmf import VonMisesFisher

DIM, KAPPA_POS = 10, 20.0


def transcribed_mcinfonce(
    q: VonMisesFisher, q_pos: VonMisesFisher, q_neg: VonMisesFisher, samples: int
) -> Tensor:
    """Formula 7 read off the page: classic rejection sampling of every vector, then
    sums over arrays of all samples."""
    z, z_pos, z_neg = (
        published_sample(p.loc, p.concentration, samples) for p in (q, q_pos, q_neg)
    )
    pos = KAPPA_POS * (z * z_pos).sum(-1)
    neg = KAPPA_POS * (z.unsqueeze(2) * z_neg).sum(-1)
    below = torch.logsumexp(torch.cat([pos.unsqueeze(2), neg], 2), 2) - math.log(
        neg.shape[2]
    )
    return (math.log(samples) - torch.logsumexp(pos - below, 0)).mean()


def posteriors(
    *shape: int, dim: int = DIM, dtype: torch.dtype = torch.float32
) -> VonMisesFisher:
    "Leaves that require gradients, so that each call differentiates in all parameters."
    loc = F.normalize(torch.randn(*shape, dim, dtype=dtype), dim=-1).requires_grad_()
    return VonMisesFisher(
        loc, (16 + 16 * torch.rand(shape, dtype=dtype)).requires_grad_()
    )


def double(q: VonMisesFisher) -> VonMisesFisher:
    "The same posteriors as leaves in double precision."
    loc, kappa = (
        x.detach().double().requires_grad_() for x in (q.loc, q.concentration)
    )
    return VonMisesFisher(F.normalize(loc, dim=-1), kappa)


def rows(quick: bool = False) -> list[Row]:
    """The ratio is the peer's time over ours, forward and backward."""
    torch.manual_seed(0)
    batch, samples, negatives, shared, rounds = (
        (32, 8, 4, 32, 2) if quick else (512, 128, 32, 512, 5)
    )
    q, q_pos, q_neg, pool = (
        posteriors(batch),
        posteriors(batch),
        posteriors(batch, negatives),
        posteriors(1, shared),
    )
    mc, infonce, nwj = (
        MCInfoNCE(KAPPA_POS, samples),
        ExactInfoNCE(KAPPA_POS),
        ExactNWJ(KAPPA_POS),
    )
    calls: dict[str, Callable[[], object]] = {
        "mcinfonce": lambda: mc(q, q_pos, q_neg).backward(),
        "exact_infonce": lambda: infonce(q, q_pos).backward(),
        "exact_infonce.shared": lambda: infonce(q, q_pos, pool).backward(),
        "exact_nwj": lambda: nwj(q, q_pos).backward(),
        "transcription": lambda: transcribed_mcinfonce(
            q, q_pos, q_neg, samples
        ).backward(),
    }
    scale = f"K={samples}, M={negatives}"
    peers = {"transcription": (f"transcribed MCInfoNCE, {scale}", 4.0)}
    exact_peers = {"transcription": (f"transcribed MCInfoNCE, {scale}", 20.0)}
    names = {
        "mcinfonce": (
            f"MCInfoNCE, B={batch}, D={DIM}, {scale}",
            "MCInfoNCE step",
            peers,
        ),
        "exact_infonce": (
            f"ExactInfoNCE, B={batch}, D={DIM}, in-batch",
            "Exact losses",
            exact_peers,
        ),
        "exact_infonce.shared": (
            f"ExactInfoNCE, B={batch}, D={DIM}, {shared} shared negatives",
            "Exact losses",
            exact_peers,
        ),
        "exact_nwj": (
            f"ExactNWJ, B={batch}, D={DIM}, in-batch",
            "Exact losses",
            exact_peers,
        ),
    }
    times = interleaved(calls, rounds)
    table = []
    for slug, (name, group, bars) in names.items():
        table += Bars(slug, name, group, bars).rows(
            {"ours": times[slug], "transcription": times["transcription"]}
        )
    return table + series_rows(
        q, q_pos, name=names["exact_infonce"][0], rounds=3 * rounds
    )


def series_rows(
    q: VonMisesFisher, q_pos: VonMisesFisher, name: str, rounds: int
) -> list[Row]:
    """What the tables of the training path buy: double precision evaluates the series
    and the integral themselves."""
    loss, pair = ExactInfoNCE(KAPPA_POS), (double(q), double(q_pos))
    calls = {
        "ours": lambda: loss(q, q_pos).backward(),
        "series": lambda: loss(*pair).backward(retain_graph=True),
    }
    peer = {"series": ("the same loss without tables, float64", None)}
    return Bars("exact_infonce", name, "Exact losses", peer).rows(
        interleaved(calls, rounds)
    )


if __name__ == "__main__":
    show(rows())
