"""What a loss hands to the device: operations, and reads that the host waits for. They
starve a GPU. Counted, not timed, so that any machine gives the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench_losses import DIM, KAPPA_POS, posteriors
from pcl.encoders import mlp_encoder
from pcl.losses import ELK, HIB, ExactInfoNCE, ExactNWJ, InfoNCE, MCInfoNCE

BATCH, SAMPLES = 256, 16
BAR = 600, 2  # operations and reads, forward and backward
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}
LOSSES: dict[str, Callable[[], torch.nn.Module]] = {
    "InfoNCE": lambda: InfoNCE(KAPPA_POS),
    "ExactInfoNCE": lambda: ExactInfoNCE(KAPPA_POS),
    "ExactNWJ": lambda: ExactNWJ(KAPPA_POS),
    "ELK": lambda: ELK(KAPPA_POS),
    "MCInfoNCE": lambda: MCInfoNCE(KAPPA_POS, SAMPLES),
    "HIB": lambda: HIB(1.0, 0.0, SAMPLES),
}


class Counter(TorchDispatchMode):
    """Counts operations, and those that the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += 1
        name = function._schema.name.removeprefix("aten::")
        self.reads += name in READS or self.picks_by_truth(name, args)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def picks_by_truth(name: str, args: Any) -> bool:
        """Whether the shape of the result depends on values."""
        if name not in ("index", "index_put_", "index_put"):
            return False
        return any(x is not None and x.dtype == torch.bool for x in args[1])


@contextmanager
def lists_counted(counter: Counter) -> Iterator[None]:
    """`tolist` reads a whole tensor at once, and passes no dispatcher on a CPU."""
    plain = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        counter.reads += 1
        return plain(self)

    Tensor.tolist = tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.tolist = plain  # type: ignore[method-assign]


@dataclass(frozen=True)
class Found:
    """What one pass handed to the device."""

    slug: str  # its name in the ledger
    operations: int
    reads: int
    judged: bool = True  # whether the bar is about it

    @property
    def met(self) -> bool | None:
        """Whether both numbers are within the bar; None where it is not judged."""
        if not self.judged:
            return None
        return self.operations <= BAR[0] and self.reads <= BAR[1]


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Operations and reads of a call, after one that builds what is built once."""
    call()
    counter = Counter()
    with counter, lists_counted(counter):
        call()
    return counter.operations, counter.reads


def count(loss: torch.nn.Module, batch: int = BATCH, dim: int = DIM) -> tuple[int, int]:
    """Operations and reads of one forward and backward pass, posteriors given."""
    torch.manual_seed(0)
    q, q_pos = posteriors(batch, dim=dim), posteriors(batch, dim=dim)
    return counted(lambda: loss(q, q_pos).backward())


def encoder_and_optimizer() -> dict[str, tuple[int, int]]:
    """What the rest of a training step takes: two views through an encoder and back,
    and one step of Adam."""
    torch.manual_seed(0)
    encoder = mlp_encoder(DIM, DIM, [64, 64, 64])
    views = torch.randn(2, BATCH, DIM).unbind()
    optimizer = torch.optim.Adam(encoder.parameters())

    def there_and_back() -> None:
        optimizer.zero_grad()
        for q in map(encoder, views):
            (q.loc.sum() + q.concentration.sum()).backward()

    return {
        "encoder": counted(there_and_back),
        "optimizer": counted(optimizer.step),
    }


def counts() -> dict[str, Found]:
    """Every loss, and beside them what else a step does."""
    found = {name: Found(name.lower(), *count(make())) for name, make in LOSSES.items()}
    rest = encoder_and_optimizer().items()
    return found | {name: Found(name, *numbers, judged=False) for name, numbers in rest}


def main() -> None:
    """Print the counts beside the bar."""
    print(f"batch {BATCH}, D = {DIM}; the bar is {BAR[0]} operations, {BAR[1]} reads")
    for name, found in counts().items():
        word = "  above the bar" if found.met is False else ""
        print(
            f"{name:13s} {found.operations:5d} operations {found.reads:3d} reads{word}"
        )


if __name__ == "__main__":
    main()
