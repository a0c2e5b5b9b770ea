"""One example of every loss in the table, for the tests over all of them."""

from __future__ import annotations

import inspect
from typing import Any

from pcl.losses import LOSSES, ContrastiveLoss, make_loss

# Options for all losses; each takes what it knows.
OPTIONS: dict[str, Any] = {"kappa_pos": 20.0, "n_samples": 7, "a": 4.0, "b": -1.0}
# Where a loss needs others: ELK's factor is a temperature.
OWN_OPTIONS: dict[str, dict[str, Any]] = {"elk": {"kappa_pos": 1.0}}


def example(name: str, **options: Any) -> ContrastiveLoss:
    """The loss of that name, with the options given and else with those above."""
    return make_loss(name, **{**OPTIONS, **OWN_OPTIONS.get(name, {}), **options})


def sampled() -> list[str]:
    """The losses that draw samples."""
    return [n for n, k in LOSSES.items() if "n_samples" in inspect.signature(k).parameters]  # fmt: skip


def closed() -> list[str]:
    """The losses that draw none."""
    return [name for name in LOSSES if name not in sampled()]


def learning(name: str) -> ContrastiveLoss:
    """The example with all parameters that the loss can learn."""
    takes = inspect.signature(LOSSES[name]).parameters
    return example(name, **{key: True for key in takes if key.startswith("learn_")})
