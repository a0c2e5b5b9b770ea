"""The losses against a straightforward transcription of MCInfoNCE, forward and backward, in one process."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import Row, best_times, show
from pcl.losses import ExactNWJ, MCInfoNCE
from pcl.vmf import VonMisesFisher, published_sample

ROWS, SAMPLES, NEGATIVES, DIM, KAPPA_POS, ROUNDS = 512, 128, 32, 10, 20.0, 3


def transcribed_mcinfonce(q: VonMisesFisher, q_pos: VonMisesFisher, q_neg: VonMisesFisher) -> Tensor:
    "Formula 7 read off the page: classic rejection sampling of every vector, then sums over arrays of all samples."
    z, z_pos, z_neg = (published_sample(p.loc, p.concentration, SAMPLES) for p in (q, q_pos, q_neg))
    pos = KAPPA_POS * (z * z_pos).sum(-1)
    neg = KAPPA_POS * (z.unsqueeze(2) * z_neg).sum(-1)
    below = torch.logsumexp(torch.cat([pos.unsqueeze(2), neg], 2), 2) - math.log(neg.shape[2])
    return (math.log(SAMPLES) - torch.logsumexp(pos - below, 0)).mean()


def posteriors(*shape: int) -> VonMisesFisher:
    "Leaves that require gradients, so that each call differentiates in all parameters."
    loc = F.normalize(torch.randn(*shape, DIM), dim=-1).requires_grad_()
    return VonMisesFisher(loc, (16 + 16 * torch.rand(shape)).requires_grad_())


def rows() -> list[Row]:
    """The ratio is the transcription's time over ours, forward and backward."""
    torch.manual_seed(0)
    q, q_pos, q_neg = posteriors(ROWS), posteriors(ROWS), posteriors(ROWS, NEGATIVES)
    sampled, exact = MCInfoNCE(KAPPA_POS, SAMPLES), ExactNWJ(KAPPA_POS)
    best = best_times({
        "MCInfoNCE": lambda: sampled(q, q_pos, q_neg).backward(),
        "ExactNWJ": lambda: exact(q, q_pos).backward(),
        "transcription": lambda: transcribed_mcinfonce(q, q_pos, q_neg).backward(),
    }, ROUNDS)
    scale = f"K={SAMPLES}, M={NEGATIVES}"
    peer, seconds = f"transcribed MCInfoNCE, {scale}", best["transcription"]
    return [
        Row(f"MCInfoNCE B={ROWS}, D={DIM}, {scale}", best["MCInfoNCE"], peer, seconds, 4.0),
        Row(f"ExactNWJ B={ROWS}, D={DIM}, in-batch", best["ExactNWJ"], peer, seconds, 20.0),
    ]


if __name__ == "__main__":
    show(rows())
