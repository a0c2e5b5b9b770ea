"""The losses against a straightforward transcription of MCInfoNCE, forward and backward, in one process."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pcl.losses import ExactNWJ, MCInfoNCE
from pcl.vmf import VonMisesFisher, published_sample

ROWS, SAMPLES, NEGATIVES, DIM, KAPPA_POS, ROUNDS = 512, 128, 32, 10, 20.0, 4


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


def interleaved(*calls: Callable[[], Tensor]) -> list[float]:
    "Best time of each call with its backward pass, taken in turns so that a busy machine slows all."
    best = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call().backward()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def rows() -> list[dict]:
    "One row per loss; the ratio is the transcription's time over ours, the bar what it must reach."
    torch.manual_seed(0)
    q, q_pos, q_neg = posteriors(ROWS), posteriors(ROWS), posteriors(ROWS, NEGATIVES)
    sampled, exact = MCInfoNCE(KAPPA_POS, SAMPLES), ExactNWJ(KAPPA_POS)
    ours, ours_exact, peer = interleaved(
        lambda: sampled(q, q_pos, q_neg), lambda: exact(q, q_pos), lambda: transcribed_mcinfonce(q, q_pos, q_neg)
    )
    scale = f"B={ROWS}, D={DIM}"
    common = {"peer": f"transcribed MCInfoNCE, K={SAMPLES}, M={NEGATIVES}", "peer_s": peer}
    return [
        {"name": f"MCInfoNCE {scale}, K={SAMPLES}, M={NEGATIVES}", "ours_s": ours, **common, "ratio": peer / ours, "bar": 4.0},
        {"name": f"ExactNWJ {scale}, in-batch", "ours_s": ours_exact, **common, "ratio": peer / ours_exact, "bar": 20.0},
    ]


if __name__ == "__main__":
    print(f"{'':42s} {'ours, s':>9s} {'peer, s':>9s} {'ratio':>6s} {'bar':>5s}")
    for row in rows():
        print(f"{row['name']:42s} {row['ours_s']:9.4f} {row['peer_s']:9.4f} {row['ratio']:6.1f} {row['bar']:5.1f}")
