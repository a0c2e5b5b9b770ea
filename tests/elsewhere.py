"""A device without hardware: its tensors are computed by the CPU, and refuse to meet the
CPU's own tensors of one dimension or more, as those of a GPU do.

Built on torch's device for others to use (privateuseone). Every operation on a tensor of
it arrives at `run`; a tensor made there (`torch.zeros(3, device="elsewhere")`) arrives by
the fallback. Half precision comes with kernels of its own, as each device brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "elsewhere"
HALF = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
aten = torch.ops.aten
OUTSIDE = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
RESHAPES = (
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.unsqueeze_.default,
)
MOVES = (aten._to_copy.default, aten.copy_.default)


class Module:
    """What torch asks of `torch.elsewhere`; numbers are drawn by the CPU's generator."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        pass

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Away(torch.Tensor):
    """A tensor of the device, around the CPU's tensor that holds its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Away:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, raw: Tensor) -> None:
        self.raw = raw

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.raw!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        kwargs = {"dtype": self.dtype, "device": self.device} | kwargs
        return torch.tensor(data, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation with the tensors inside, and wrap what comes out."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func not in MOVES and any(not isinstance(x, Away) and x.ndim for x in tensors):
        raise RuntimeError(
            f"{func}: expected all tensors on one device, found cpu and {NAME}"
        )
    known = {id(x.raw): x for x in tensors if isinstance(x, Away)}

    def inside(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return x.raw if isinstance(x, Away) else x

    def outside(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return known[id(x)] if id(x) in known else Away(x)

    out = func(*tree_map(inside, args), **tree_map(inside, kwargs))
    if func in RESHAPES:  # the tensor outside has a shape of its own to change
        with torch._C._ExcludeDispatchKeyGuard(OUTSIDE):
            func(*args, **kwargs)
    grown = [x for x in tensors if isinstance(x, Away) and x.raw.shape != x.shape]
    assert not grown, f"{func} changed a shape: name it in RESIZED"
    if func is aten.copy_.default and not isinstance(args[0], Away):
        return args[0]
    if func is aten._to_copy.default and "device" in kwargs:
        target = kwargs["device"]
        if target is not None and torch.device(target).type == "cpu":
            return out
    return tree_map(outside, out)


def linear_in_half(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What autocast does to a linear layer."""
    half = torch.get_autocast_dtype(NAME)
    with torch._C._ExcludeDispatchKeyGuard(HALF):
        cast = (None if part is None else part.to(half) for part in (x, weight, bias))
        return torch.nn.functional.linear(*cast)


def moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` or `torch.as_tensor`, which cannot move what they make to a device
    that is written in Python."""

    def there(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != NAME:
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return there


# Torch makes these empty and lets them grow, which a tensor around another cannot.
RESIZED = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
)


def directly(name: str) -> Callable[..., Any]:
    """An operation of torch as one step."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(aten, base), overload or "default")
    return lambda *args, **kwargs: run(op, args, kwargs)


LIBRARIES: list[torch.library.Library] = []  # what they register goes with them


def register() -> None:
    """Make the device known to torch, once per process."""
    if LIBRARIES:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    anything, named = (torch.library.Library(ns, "IMPL") for ns in ("_", "aten"))
    LIBRARIES.extend((anything, named))
    anything.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")
    anything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    named.impl("linear", linear_in_half, "AutocastPrivateUse1")
    for name in RESIZED:
        named.impl(name, directly(name), "PrivateUse1")
