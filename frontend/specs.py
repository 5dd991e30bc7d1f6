"""Specs: the types of arguments before there are any, as `mp.spec` writes them or as an array shows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend.context import user_location
from monoplan.frontend.tensor import Tensor
from monoplan.ir.dims import Dim, Expr, as_dim
from monoplan.ir.errors import ArgumentError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import TensorType, as_dtype, f32


@dataclass(frozen=True, slots=True)
class Spec:
    """The type of one argument, with symbolic sizes by name."""

    type: TensorType

    def __str__(self) -> str:
        return str(self.type)


def spec(*shape: Any, dtype: Any = f32) -> Spec:
    """A placeholder for an argument: `spec("batch", "seq", 256)`, `spec("batch", "seq", dtype="int64")`."""
    return Spec(TensorType(as_dtype(dtype), tuple(_size(d, at, shape) for at, d in enumerate(shape))))


def spec_of(x: Any) -> Any:
    """The static Spec of a concrete leaf; other leaves are constants and stay as they are."""
    if isinstance(x, Tensor):
        return Spec(x.type)
    if isinstance(x, np.ndarray):
        return Spec(TensorType(as_dtype(x.dtype), x.shape))
    return x


def _size(given: Any, at: int, shape: tuple[Any, ...]) -> Dim:
    """One size of a spec; what other libraries write for "any size" gets told how it is written here."""
    # Not int(given): 2.5 would become 2, and True a size.
    number = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if number or isinstance(given, str | Expr):
        size = as_dim(given)
        if isinstance(size, Expr) or size >= 0:
            return size
    why = "a size is a whole number of 0 or more, or a name"
    fix = 'write a number, or a name such as "batch" for a size that differs from call to call'
    if given is None or number or isinstance(given, str):
        named = ", ".join(['"batch"' if i == at else repr(d) for i, d in enumerate(shape)])
        why = f"{why}: a size that is known only at the call has a name"
        fix = f'for any size write a name such as "batch": mp.spec({named})'
    elif isinstance(given, tuple | list):
        why = "each size is an argument of its own"
        fix = f"mp.spec({', '.join(map(repr, given))})" if len(shape) == 1 else "write the sizes without parentheses"
    raise ArgumentError(f"spec: {given!r:.60} at dimension {at} is not a size", where=user_location(), why=why, fix=fix)
