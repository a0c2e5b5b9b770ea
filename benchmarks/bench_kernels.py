"""The exact marginal of all pairs against its Monte-Carlo estimate, forward and
backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.timing import Bars, Row, interleaved, show
from pcl.bessel import log_normalizer, log_sphere_area
from pcl.marginal import log_marginal
from pcl.vmf import VonMisesFisher

DIM, KAPPA_POS, BLOCK = 10, 20.0, 32
GROUP = "Exact marginal"


def problem(pairs: int) -> list[Tensor]:
    "Means and concentrations of two batches, as leaves."
    g = torch.Generator().manual_seed(0)
    means = [
        torch.nn.functional.normalize(torch.randn(pairs, DIM, generator=g), dim=-1)
        for _ in range(2)
    ]
    kappas = [torch.empty(pairs).uniform_(16, 32, generator=g) for _ in range(2)]
    return [x.requires_grad_() for x in (*means, *kappas)]


def exact(mu1: Tensor, mu2: Tensor, kappa1: Tensor, kappa2: Tensor) -> Tensor:
    "log S h of all pairs, gradients left in the leaves."
    value = log_marginal(mu1 @ mu2.T, kappa1[:, None], kappa2[None], KAPPA_POS, DIM)
    value.mean().backward()
    return value.detach()


def sampled(
    samples: int, mu1: Tensor, mu2: Tensor, kappa1: Tensor, kappa2: Tensor
) -> Tensor:
    """The same by draws of both posteriors, in blocks of rows so that no array exceeds
    the memory."""
    g = torch.Generator().manual_seed(1)
    z = VonMisesFisher(mu1, kappa1).rsample((samples,), generator=g)
    z_pos = VonMisesFisher(mu2, kappa2).rsample((samples,), generator=g)
    leaves = [x.detach().requires_grad_() for x in (z, z_pos)]
    constant = float(
        log_sphere_area(DIM) + log_normalizer(DIM, torch.tensor(KAPPA_POS))
    ) - math.log(samples)
    blocks = []
    for rows in leaves[0].split(BLOCK, 1):
        value = (
            torch.logsumexp(
                KAPPA_POS * torch.einsum("sid,sjd->sij", rows, leaves[1]), 0
            )
            + constant
        )
        (value.sum() / len(mu1) ** 2).backward(retain_graph=True)
        blocks.append(value.detach())
    torch.autograd.backward([z, z_pos], [x.grad for x in leaves])
    return torch.cat(blocks)


def rows(quick: bool = False) -> list[Row]:
    """One row, after a check that both compute the same number where the draws can see
    it."""
    pairs, samples, rounds = (128, 512, 2) if quick else (512, 512, 5)
    leaves = problem(pairs)
    near = leaves[0].detach() @ leaves[1].detach().T > 0.7
    gap = (exact(*leaves) - sampled(samples, *leaves))[near].abs().median()
    assert gap < 0.2, f"the two do not estimate the same number: {gap}"
    times = interleaved(
        {"ours": lambda: exact(*leaves), "sampled": lambda: sampled(samples, *leaves)},
        rounds,
    )
    name = f"log_marginal, {pairs} x {pairs} pairs, D={DIM}, with backward"
    return Bars(
        "log_marginal",
        name,
        GROUP,
        {"sampled": (f"Monte Carlo, {samples} samples", 20.0)},
    ).rows(times)


if __name__ == "__main__":
    show(rows())
