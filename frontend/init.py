"""Initial values of parameters, as PyTorch draws them, from one seedable numpy generator."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType, as_dtype

Array = np.ndarray[Any, Any]

_generator = np.random.default_rng(0)
_skipped: contextvars.ContextVar[bool] = contextvars.ContextVar("skipped", default=False)


def manual_seed(seed: int) -> None:
    """Makes the parameters of modules that are created from now on repeatable."""
    global _generator
    _generator = np.random.default_rng(seed)


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """Within it, new parameters are zeros that cost no time and, until written, no memory: for loaders."""
    token = _skipped.set(True)
    try:
        yield
    finally:
        _skipped.reset(token)


def uniform(shape: tuple[int, ...], bound: float, dtype: Any) -> Array:
    """Values in [-bound, bound)."""
    if _skipped.get():
        return np.zeros(shape, as_dtype(dtype).numpy)
    values = _generator.random(shape, dtype=np.float32)
    values *= np.float32(2 * bound)
    values -= np.float32(bound)
    return values.astype(as_dtype(dtype).numpy, copy=False)


def normal(shape: tuple[int, ...], dtype: Any) -> Array:
    """Values with mean 0 and standard deviation 1."""
    if _skipped.get():
        return np.zeros(shape, as_dtype(dtype).numpy)
    return _generator.standard_normal(shape, dtype=np.float32).astype(as_dtype(dtype).numpy, copy=False)


def linear_bound(in_features: int) -> float:
    """The bound that PyTorch's Linear uses for weight and bias."""
    return 1 / math.sqrt(in_features) if in_features > 0 else 0.0


def checked_dtype(name: str, dtype: Any) -> DType:
    """A floating point element type for a layer's parameters."""
    found = as_dtype("f32" if dtype is None else dtype)
    if not found.is_float:
        raise ArgumentError(f"{name}: parameters are floating point, got dtype {found}")
    return found


def check_device(name: str, device: Any) -> None:
    """Parameters live in host memory; the target of a plan is chosen when it is compiled."""
    kind = getattr(device, "type", device)
    if kind is not None and str(kind).split(":")[0] != "cpu":
        raise ArgumentError(
            f"{name}: device={device!r} is not a place for parameters",
            fix='leave device out, and choose where to run by mp.compile(model, target="cuda")',
        )


def check_size(name: str, **sizes: int) -> None:
    """Sizes of layers are whole numbers of 1 or more."""
    for what, n in sizes.items():
        if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
            raise ArgumentError(f"{name}: {what} must be a whole number of 1 or more, got {n!r}")
