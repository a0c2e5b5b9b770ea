"""The exact marginal of all pairs against its Monte-Carlo estimate, forward and backward."""

import math

import torch
from torch import Tensor

from benchmarks.timing import Row, best_times, show
from pcl.bessel import log_normalizer, log_sphere_area
from pcl.kernels import log_marginal
from pcl.vmf import VonMisesFisher

PAIRS, SAMPLES, DIM, KAPPA_POS, ROUNDS, BLOCK = 512, 512, 10, 20.0, 2, 32


def problem() -> list[Tensor]:
    "Means and concentrations of two batches, as leaves."
    g = torch.Generator().manual_seed(0)
    means = [torch.nn.functional.normalize(torch.randn(PAIRS, DIM, generator=g), dim=-1) for _ in range(2)]
    kappas = [torch.empty(PAIRS).uniform_(16, 32, generator=g) for _ in range(2)]
    return [x.requires_grad_() for x in (*means, *kappas)]


def exact(mu1: Tensor, mu2: Tensor, kappa1: Tensor, kappa2: Tensor) -> Tensor:
    "log S h of all pairs, gradients left in the leaves."
    value = log_marginal(mu1 @ mu2.T, kappa1[:, None], kappa2[None], KAPPA_POS, DIM)
    value.mean().backward()
    return value.detach()


def sampled(mu1: Tensor, mu2: Tensor, kappa1: Tensor, kappa2: Tensor) -> Tensor:
    "The same by draws of both posteriors, in blocks of rows so that no array exceeds the memory."
    g = torch.Generator().manual_seed(1)
    z = VonMisesFisher(mu1, kappa1).rsample((SAMPLES,), generator=g)
    z_pos = VonMisesFisher(mu2, kappa2).rsample((SAMPLES,), generator=g)
    leaves = [x.detach().requires_grad_() for x in (z, z_pos)]
    constant = float(log_sphere_area(DIM) + log_normalizer(DIM, torch.tensor(KAPPA_POS))) - math.log(SAMPLES)
    blocks = []
    for rows in leaves[0].split(BLOCK, 1):
        value = torch.logsumexp(KAPPA_POS * torch.einsum("sid,sjd->sij", rows, leaves[1]), 0) + constant
        (value.sum() / PAIRS**2).backward(retain_graph=True)
        blocks.append(value.detach())
    torch.autograd.backward([z, z_pos], [x.grad for x in leaves])
    return torch.cat(blocks)


def rows() -> list[Row]:
    """One row, after a check that both compute the same number where 512 draws can see it."""
    leaves = problem()
    near = leaves[0].detach() @ leaves[1].detach().T > 0.5
    gap = (exact(*leaves) - sampled(*leaves))[near].abs().median()
    assert gap < 0.2, f"the two do not estimate the same number: {gap}"
    best = best_times({"ours": lambda: exact(*leaves), "peer": lambda: sampled(*leaves)}, ROUNDS)
    name = f"log_marginal, {PAIRS} x {PAIRS} pairs, D={DIM}, with backward"
    return [Row(name, best["ours"], f"{SAMPLES}-sample Monte Carlo", best["peer"], 20.0)]


if __name__ == "__main__":
    show(rows())
