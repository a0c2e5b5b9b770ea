"""A small encoder and a small world for the tests of the training loop, shared with the
processes they start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pcl.vmf import VonMisesFisher


class Encoder(nn.Module):
    """Always the same first weights; with or without a backbone shared by both
    heads."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.backbone = (
                nn.Sequential(nn.Linear(6, 8), nn.Tanh()) if shared else nn.Identity()
            )
            width = 8 if shared else 6
            self.mu_net = nn.Sequential(
                nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 4)
            )
            self.kappa_net = nn.Sequential(
                nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, 1)
            )

    def groups(self) -> dict[str, list[nn.Parameter]]:
        body = [*self.backbone.parameters(), *self.mu_net.parameters()]
        return {"mu": body, "kappa": list(self.kappa_net.parameters())}

    def forward(self, x: Tensor) -> VonMisesFisher:
        hidden = self.backbone(x)
        outputs = self.mu_net(hidden), self.kappa_net(hidden)
        loc, scalar = (
            out.to(torch.promote_types(out.dtype, torch.float32)) for out in outputs
        )
        return VonMisesFisher(
            nn.functional.normalize(loc, dim=-1),
            1 + scalar.squeeze(-1).exp(),
            validate_args=False,
        )


def draw(
    n: int, n_neg: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pairs of noisy points, and independent negatives."""
    x = torch.randn(n, 6, generator=generator)
    x_pos = x + 0.3 * torch.randn(n, 6, generator=generator)
    return x, x_pos, torch.randn(n, n_neg, 6, generator=generator) if n_neg else None
