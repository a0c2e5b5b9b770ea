"""The slope of E[mu.z] in kappa from each sampler's own gradient, over the exact slope:
1 is right, the rest is bias."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import Row, installed, show
from pcl.bessel import bessel_ratio
from pcl.published.sphere import published_sample
from pcl.vmf import VonMisesFisher

CASES = ((5, 2.0), (10, 20.0))
GROUP = "Slope in kappa"
BIAS = 0.005  # the bar for our own sampler
Sampler = Callable[
    [Tensor, Tensor, int], Tensor
]  # mean, concentration, number -> points that carry a gradient


def exact_slope(dim: int, kappa: float) -> float:
    """A'(kappa) = 1 - A^2 - (D-1) A / kappa, for the von Mises-Fisher distribution."""
    a = float(bessel_ratio(dim / 2 - 1, torch.tensor(kappa, dtype=torch.float64)))
    return 1 - a * a - (dim - 1) * a / kappa


def power_slope(dim: int, kappa: float) -> float:
    """The same for the power spherical distribution, whose mean cosine is kappa /
    (kappa + D - 1)."""
    return (dim - 1) / (kappa + dim - 1) ** 2


def sampled_slope(sampler: Sampler, dim: int, kappa: float, draws: int) -> float:
    """d/dkappa of the mean cosine of some draws."""
    loc = torch.nn.functional.normalize(
        torch.arange(1.0, dim + 1, dtype=torch.float64), dim=0
    )
    concentration = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
    (sampler(loc, concentration, draws) @ loc).mean().backward()
    assert concentration.grad is not None
    return float(concentration.grad)


def tfp_slope(dim: int, kappa: float, draws: int) -> float:
    """The same from TensorFlow Probability's gradient tape."""
    import tensorflow as tf
    import tensorflow_probability as tfp

    loc = tf.math.l2_normalize(tf.range(1.0, dim + 1, dtype=tf.float64))
    concentration = tf.constant(kappa, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(concentration)
        cosine = tf.reduce_mean(
            tf.linalg.matvec(
                tfp.distributions.VonMisesFisher(loc, concentration).sample(draws), loc
            )
        )
    slope = tape.gradient(cosine, concentration)
    return 0.0 if slope is None else float(slope)


def slopes(
    dim: int, kappa: float, draws: int
) -> dict[str, tuple[str, Callable[[], float], float, float | None]]:
    """What to measure: slug -> (name, one estimate, the exact value, the bar)."""
    exact = exact_slope(dim, kappa)
    ours: Sampler = lambda loc, k, n: VonMisesFisher(loc, k).rsample((n,))  # noqa: E731
    found: dict[str, tuple[str, Callable[[], float], float, float | None]] = {
        "ours": (
            "VonMisesFisher.rsample",
            lambda: sampled_slope(ours, dim, kappa, draws),
            exact,
            BIAS,
        ),
        "classic": (
            "classic rejection loop",
            lambda: sampled_slope(published_sample, dim, kappa, draws),
            exact,
            None,
        ),
    }
    light = installed("power_spherical")
    if light:
        power: Sampler = lambda loc, k, n: light.PowerSpherical(loc, k).rsample((n,))  # noqa: E731
        call = lambda: sampled_slope(power, dim, kappa, draws)  # noqa: E731
        found["power_spherical"] = ("power_spherical", call, exact, None)
        found["power_spherical-own"] = (
            "power_spherical",
            call,
            power_slope(dim, kappa),
            None,
        )
    if installed("tensorflow") and installed("tensorflow_probability"):
        found["tfp"] = (
            "tensorflow-probability",
            lambda: tfp_slope(dim, kappa, draws),
            exact,
            None,
        )
    return found


def rows(quick: bool = False) -> list[Row]:
    """Every sampler that has a gradient, at two concentrations."""
    draws, rounds = (500, 3) if quick else (50_000, 24)
    torch.manual_seed(0)
    table = []
    for dim, kappa in CASES:
        for slug, (name, estimate, exact, bar) in slopes(dim, kappa, draws).items():
            law = (
                "its own exact slope"
                if slug.endswith("-own")
                else "exact A'(kappa) of the vMF"
            )
            title = f"dE[mu.z]/dkappa, D={dim}, kappa={kappa:g}: {name}"
            values = [estimate() for _ in range(rounds)]
            table.append(
                Row(
                    f"slope.D={dim}.{slug}",
                    title,
                    law,
                    values,
                    [exact] * rounds,
                    bar,
                    "slope",
                    GROUP,
                )
            )
    return table


if __name__ == "__main__":
    show(rows())
