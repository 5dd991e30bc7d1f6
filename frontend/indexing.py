"""Shapes and indices as users write them: -1, negative axes, slices, Ellipsis, an index tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend.context import user_location
from monoplan.ir.dims import Dim, Expr, divide_exactly, equal
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.types import TensorType, product

_KINDS = "ints, slices, None, ... and one tensor of integers"


def take(x: Any, index: tuple[Any, ...]) -> Any:
    """x[index]: basic indexing, and lookups by one integer tensor beside slices."""
    index = tuple(i.__index__() if isinstance(i, np.integer) else i for i in index)
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    if used > x.ndim:
        raise TypeRuleError(f"{used} indices for a tensor of rank {x.ndim}", where=user_location())
    dots = [at for at, i in enumerate(index) if i is Ellipsis]
    if len(dots) > 1:
        raise TypeRuleError("an index may have one ...", where=user_location())
    if dots:
        at = dots[0]
        index = (*index[:at], *[slice(None)] * (x.ndim - used), *index[at + 1 :])
    tables = [i for i in index if not (i is None or isinstance(i, slice | int | Expr)) or isinstance(i, bool)]
    if len(tables) > 1 or (tables and any(isinstance(i, int | Expr) for i in index)):
        raise _wrong_index()
    axis = 0
    for i in index:
        if i is None:
            x = x.unsqueeze(axis)
        elif isinstance(i, slice):
            x = x if i == slice(None) else _slice(x, axis, i)
        elif isinstance(i, int | Expr):
            x = x.select(axis, i)
            axis -= 1
        else:
            x, axis = _lookup(x, axis, i)
        axis += 1
    return x


def _lookup(x: Any, axis: int, index: Any) -> tuple[Any, int]:
    """Elements of an axis by a tensor of integers, and the last axis that they take."""
    table = type(x)(index) if isinstance(index, list | np.ndarray) else index
    if not hasattr(table, "is_traced") or not table.dtype.is_integer:
        raise _wrong_index()
    return x._call("gather", x, table, axis=axis), axis + table.ndim - 1


def _wrong_index() -> TypeRuleError:
    return TypeRuleError(
        f"indexing takes {_KINDS} (not beside ints)",
        where=user_location(),
        fix="use F.index_select, F.take_along or F.where for other lookups",
    )


def _slice(x: Any, axis: int, s: slice) -> Any:
    size: Dim = x.shape[axis]
    step = 1 if s.step is None else s.step
    if not isinstance(step, int) or step < 1:
        raise TypeRuleError(f"slices need a positive step, got {step}", where=user_location())
    start, stop = (_bound(given, default, size) for given, default in ((s.start, 0), (s.stop, size)))
    length = stop - start
    if step != 1:
        length = (length + (step - 1)) // step
    if isinstance(length, int):
        length = max(length, 0)
    return x._view("slice", axis=axis, start=start, length=length, step=step)


def _bound(given: Any, default: Dim, size: Dim) -> Dim:
    """An end of a slice, counted from the front and kept inside where that is known."""
    d: Dim = default if given is None else given.__index__() if isinstance(given, np.integer) else given
    if not isinstance(d, int | Expr):
        raise TypeRuleError(f"the ends of a slice are ints, got {type(d).__name__}", where=user_location())
    if isinstance(d, int) and d < 0:
        d = size + d
    if isinstance(d, int) and isinstance(size, int):
        d = min(max(d, 0), size)
    return d


def complete_shape(t: TensorType, shape: tuple[Any, ...]) -> tuple[Dim, ...]:
    """A target shape whose -1 is filled in."""
    sizes = tuple(s.__index__() if isinstance(s, np.integer) else s for s in shape)
    unknown = [i for i, s in enumerate(sizes) if isinstance(s, int) and s == -1]
    if not unknown:
        return sizes
    rest = product(s for i, s in enumerate(sizes) if i not in unknown)
    # With no elements every size fits: numpy refuses, and so do we.
    missing = None if equal(rest, 0) else divide_exactly(t.size, rest)
    if len(unknown) > 1 or missing is None:
        raise TypeRuleError(f"reshape: {t} does not divide into {list(sizes)}", where=user_location())
    return tuple(missing if i == unknown[0] else s for i, s in enumerate(sizes))


def full_axis(dim: int, rank: int) -> int:
    """An axis counted from the front."""
    if not -rank <= dim < rank:
        raise TypeRuleError(f"dimension {dim} is out of range for rank {rank}", where=user_location())
    return dim % rank


def axes_of(dim: Any) -> Any:
    """PyTorch's dim (None, an int, a list) as the attribute of a reduction."""
    return dim if dim is None or isinstance(dim, tuple) else tuple(dim) if isinstance(dim, list) else (dim,)
