"""Sampling speed of `VonMisesFisher` beside its peers; `torch.randn` is the floor, and
the ratio the fraction of it reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.special import betaincinv
from scipy.stats import vonmises_fisher
from torch import Tensor

from benchmarks.timing import Bars, Row, installed, interleaved, show
from pcl.published.sphere import published_sample
from pcl.vmf import VonMisesFisher

# draws, batch, dim, kappa, bars against the classic loop and scipy
FULL = ((512, 512, 10, 20.0, (5.0, 2.0)), (64, 512, 128, 200.0, (2.0, 1.0)))
QUICK = ((8, 16, 10, 20.0, (5.0, 2.0)), (8, 16, 128, 200.0, (2.0, 1.0)))
GROUP = "Sampling"


def tfp_sampler(loc: Tensor, kappa: Tensor, draws: int) -> Callable[[], Any] | None:
    """TensorFlow Probability's sampler, compiled to a graph; None where it is not
    installed."""
    tf, tfp = installed("tensorflow"), installed("tensorflow_probability")
    if tf is None or tfp is None:
        return None
    law = tfp.distributions.VonMisesFisher(
        tf.constant(loc.numpy()), tf.constant(kappa.numpy())
    )
    return tf.function(lambda: law.sample(draws))


def batch_rows(
    draws: int, batch: int, dim: int, kappa: float, bar: float, rounds: int
) -> list[Row]:
    """Many draws around each of many means, in single precision."""
    loc = torch.nn.functional.normalize(
        torch.randn(batch, dim, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    concentration = torch.full((batch,), kappa)
    ours = VonMisesFisher(loc, concentration)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.sample((draws,)),
        "classic": lambda: published_sample(loc, concentration, draws),
        "randn": lambda: torch.randn(draws, batch, dim),
    }
    light = installed("power_spherical")
    if light:
        law = light.PowerSpherical(loc, concentration)
        calls["power_spherical"] = lambda: law.sample((draws,))
    other = tfp_sampler(loc, concentration, draws)
    if other:
        calls["tfp"] = other
    peers = {
        "classic": ("classic rejection loop", bar),
        "power_spherical": ("power_spherical (a lighter law)", 1.0),
        "tfp": ("tensorflow-probability", 1.0),
        "randn": ("torch.randn (floor)", None),
    }
    name = f"sample {draws} x {batch}, D={dim}, kappa={kappa:g}, float32"
    return Bars(f"sample.D={dim}", name, GROUP, peers).rows(interleaved(calls, rounds))


def scipy_rows(
    draws: int, dim: int, kappa: float, bar: float, rounds: int
) -> list[Row]:
    """Many draws around one mean in double precision: all that scipy's distribution
    offers."""
    loc = torch.nn.functional.normalize(
        torch.randn(
            dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        ),
        dim=0,
    )
    ours, peer = VonMisesFisher(loc, kappa), vonmises_fisher(loc.numpy(), kappa)
    generator = np.random.default_rng(0)
    calls = {
        "ours": lambda: ours.sample((draws,)),
        "scipy": lambda: peer.rvs(draws, random_state=generator),
    }
    name = f"sample {draws:,} around one mean, D={dim}, kappa={kappa:g}, float64"
    return Bars(
        f"sample.D={dim}", name, GROUP, {"scipy": ("scipy.stats.vonmises_fisher", bar)}
    ).rows(interleaved(calls, rounds))


def quantile_rows(size: int, dim: int, rounds: int) -> list[Row]:
    """The 95 % caps of many queries; scipy inverts the beta distribution, which is the
    law of a cosine at kappa = 0, for as many parameters."""
    kappa = torch.empty(size).uniform_(
        1, 500, generator=torch.Generator().manual_seed(0)
    )
    loc = torch.eye(dim)[0].expand(size, dim)
    law = VonMisesFisher(loc, kappa, validate_args=False)
    flat = VonMisesFisher(loc[0].double(), 0.0).credible_cosine(0.95)
    half = (dim - 1) / 2
    np.testing.assert_allclose(2 * betaincinv(half, half, 0.05) - 1, flat, rtol=1e-9)
    shape = half + kappa.double().numpy() / 100
    each = torch.empty(size).uniform_(
        0.5, 0.99, generator=torch.Generator().manual_seed(1)
    )
    table = []
    for slug, words, level in (("", "", 0.95), (".levels", ", a level each", each)):
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda level=level: law.credible_cosine(level),
            "betaincinv": lambda level=level: betaincinv(shape, half, 1 - level),
        }
        name = f"credible_cosine, {size:,} queries{words}, D={dim}, float32"
        peers = {"betaincinv": ("scipy.special.betaincinv (a lighter law)", 1.0)}
        table += Bars(f"quantile.D={dim}{slug}", name, "Quantiles", peers).rows(
            interleaved(calls, rounds)
        )
    return table


def rows(quick: bool = False) -> list[Row]:
    """Every peer for each case."""
    rounds, table = (2 if quick else 15), []
    for draws, batch, dim, kappa, bars in QUICK if quick else FULL:
        table += batch_rows(draws, batch, dim, kappa, bars[0], rounds)
        table += scipy_rows(draws * batch, dim, kappa, bars[1], rounds)
    size, rounds = (20_000, 2) if quick else (1_000_000, 5)
    return table + quantile_rows(size, 8, rounds)


if __name__ == "__main__":
    show(rows())
