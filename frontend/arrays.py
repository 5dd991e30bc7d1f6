"""Functions that make, arrange and look up elements: shapes, joining, padding, lookups, scatter, einsum.

They are part of monoplan.nn.functional. Those that have no op of their own are made of views, lookups and products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from monoplan.frontend.op_functions import write
from monoplan.frontend.tensor import (
    Tensor,
    adapted,
    as_tensor,
    call,
    full_axis,
    is_number,
    matmul,
    pointwise,
    scalar_like,
    whole_index,
)
from monoplan.ir.dims import Dim, Expr, equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType, as_dtype, bool_, f32, i64, product, promote, u8


class Sorted(NamedTuple):
    """Values and the indices they came from."""

    values: Tensor
    indices: Tensor


# -- choosing, casting ---------------------------------------------------------------------------------


def where(condition: Any, input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """input where the condition holds, else other; numbers take the other's element type."""
    a, b = adapted(input, other) if not (is_number(input) and is_number(other)) else (as_tensor(input), other)
    b = scalar_like(b, a) if is_number(b) else b
    return write(pointwise("where", as_tensor(condition), a, b), out)


def masked_fill(input: Any, mask: Any, value: Any) -> Tensor:
    """The input with `value` where the mask holds, in the input's element type."""
    x = as_tensor(input)
    return where(mask, filling("masked_fill", value, x.dtype), x)


def filling(name: str, value: Any, dtype: DType) -> Tensor:
    """A number, or a tensor without dimensions, as an element of a type that it must fit."""
    if isinstance(value, Tensor | np.ndarray | Expr):
        t = as_tensor(value) if not isinstance(value, Expr) else scalar_like(value, Tensor(0))
        if t.ndim:
            raise ArgumentError(f"{name}: the value must be a number or a tensor without dimensions, got {t.type}")
        return t.to(dtype)  # type: ignore[no-any-return]
    if dtype.is_integer and not math.isfinite(value):
        raise ArgumentError(f"{name}: {value} is no {dtype}", fix="cast the tensor to floats first")
    return Tensor(np.asarray(int(value) if dtype.is_integer else value).astype(dtype.numpy))


def cast(input: Any, dtype: Any) -> Tensor:
    """The input in another element type; floats to integers truncate."""
    return as_tensor(input).to(dtype)  # type: ignore[no-any-return]


# -- shapes --------------------------------------------------------------------------------------------


def reshape(input: Any, shape: Sequence[Dim]) -> Tensor:
    """The same elements in another shape; one size may be -1."""
    return as_tensor(input).reshape(tuple(shape))


def transpose(input: Any, dim0: int, dim1: int) -> Tensor:
    """Two dimensions swapped."""
    return as_tensor(input).transpose(dim0, dim1)


def permute(input: Any, dims: Sequence[int]) -> Tensor:
    """Dimensions in another order."""
    return as_tensor(input).permute(tuple(dims))


def narrow(input: Any, dim: int, start: Dim, length: Dim) -> Tensor:
    """`length` elements of a dimension from `start`."""
    return as_tensor(input).narrow(dim, start, length)


def expand(input: Any, shape: Sequence[Dim]) -> Tensor:
    """Broadcast to a larger shape; -1 keeps a size."""
    return as_tensor(input).expand(tuple(shape))


def split(input: Any, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Pieces of the given size or sizes along a dimension."""
    return as_tensor(input).split(split_size, dim)


def chunk(input: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """`chunks` pieces along a dimension."""
    return as_tensor(input).chunk(chunks, dim)


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """A range of dimensions as one."""
    return as_tensor(input).flatten(start_dim, end_dim)


def squeeze(input: Any, dim: Any = None) -> Tensor:
    """Without dimensions of size 1: all of them, or those of `dim` that have this size."""
    return as_tensor(input).squeeze(dim)


def unsqueeze(input: Any, dim: int) -> Tensor:
    """With a new dimension of size 1."""
    return as_tensor(input).unsqueeze(dim)


def cat(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along a dimension; one-dimensional ones without elements are left out."""
    if not isinstance(tensors, tuple | list) or not tensors:
        raise ArgumentError(f"cat takes a list of at least one tensor, got {tensors!r}")
    given = [as_tensor(t) for t in tensors]
    some = [t for t in given if not (t.ndim == 1 and equal(t.shape[0], 0))] or given[:1]
    dtype = promote(*(t.dtype for t in given))
    some[0] = some[0].to(dtype)  # those that are left out count for the element type
    return write(call("concat", *some, axis=dim), out)


concat = concatenate = cat


def stack(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([as_tensor(t).unsqueeze(dim) for t in tensors], dim, out=out)


def repeat_interleave(input: Any, repeats: Any, dim: int | None = None) -> Tensor:
    """Each element of a dimension `repeats` times in a row; without a dimension, of the flat tensor."""
    x = as_tensor(input)
    x, axis = (x.flatten(), 0) if dim is None else (x, full_axis(dim, x.ndim))
    if isinstance(repeats, int) and repeats > 0:
        return call("repeat", x, repeats=repeats, axis=axis)  # type: ignore[no-any-return]
    counts = as_tensor(repeats)
    if counts.is_traced:
        raise ArgumentError(
            "repeat_interleave: repeats must be known while forward is traced",
            why="the size of the result depends on them",
        )
    if not counts.dtype.is_integer or counts.ndim > 1 or (counts.numpy() < 0).any():
        raise ArgumentError(f"repeat_interleave: repeats are ints of 0 or more, got {repeats!r}")
    size = x.shape[axis].__index__()
    if counts.ndim and counts.shape[0] not in (1, size):
        raise ArgumentError(f"repeat_interleave: {counts.shape[0]} repeats for {size} elements")
    return index_select(x, axis, np.repeat(np.arange(size), np.broadcast_to(counts.numpy(), (size,))))


def repeat_kv(hidden_states: Any, n_rep: int, dim: int = -3) -> Tensor:
    """Each head n_rep times in a row: [batch, heads, seq, dim] to [batch, heads * n_rep, seq, dim]."""
    return as_tensor(hidden_states) if n_rep == 1 else repeat_interleave(hidden_states, n_rep, dim)


def movedim(input: Any, source: Any, destination: Any) -> Tensor:
    """Dimensions at other places; the others keep their order."""
    x = as_tensor(input)
    moved = [full_axis(d, x.ndim) for d in _several(source)]
    places = [full_axis(d, x.ndim) for d in _several(destination)]
    order = [d for d in range(x.ndim) if d not in moved]
    for at, d in sorted(zip(places, moved, strict=True)):
        order.insert(at, d)
    return x.permute(*order)


def unflatten(input: Any, dim: int, sizes: Sequence[Dim]) -> Tensor:
    """One dimension as several, of which one may be -1."""
    x = as_tensor(input)
    at = full_axis(dim, x.ndim)
    given = tuple(sizes)
    if -1 in given and not equal(x.shape[at], 0):
        known = product(n for n in given if not (isinstance(n, int) and n == -1))
        given = tuple(x.shape[at] // known if isinstance(n, int) and n == -1 else n for n in given)
    return x.reshape((*x.shape[:at], *given, *x.shape[at + 1 :]))


def unbind(input: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices along a dimension, without it."""
    return as_tensor(input).unbind(dim)


def select(input: Any, dim: int, index: Dim) -> Tensor:
    """One element of a dimension, which disappears."""
    return as_tensor(input).select(dim, index)


def tile(input: Any, dims: Any, *more: Dim) -> Tensor:
    """The input so many times along each of the last dimensions."""
    x, counts = as_tensor(input), (*_several(dims), *more)
    return x.repeat(*[1] * (x.ndim - len(counts)), *counts)


def flip(input: Any, dims: Any, *more: int) -> Tensor:
    """The order of elements turned round along dimensions."""
    x = as_tensor(input)
    for d in {full_axis(d, x.ndim): None for d in (*_several(dims), *more)}:
        n = x.shape[d]
        x = call("slice", x, axis=d, start=n - 1 if not equal(n, 0) else 0, length=n, step=-1)
    return x


def roll(input: Any, shifts: Any, dims: Any = None) -> Tensor:
    """Elements moved along dimensions (none: of the flat input); those that leave at the end come in at the front."""
    x = as_tensor(input)
    if dims is None:
        return roll(x.flatten(), shifts, 0).reshape(x.shape)
    for shift, d in zip(_several(shifts), _several(dims), strict=True):
        n, axis = x.shape[full_axis(d, x.ndim)], full_axis(d, x.ndim)
        if isinstance(n, int) and n:
            k = shift % n
            x = cat([x.narrow(axis, n - k, k), x.narrow(axis, 0, n - k)], axis) if k else x
        elif isinstance(n, Expr):
            x = index_select(x, axis, (arange(n) - shift) % n)
    return x


def pad(input: Any, pad: Sequence[Dim], mode: str = "constant", value: float | int | bool | None = None) -> Tensor:
    """More elements before and after each of the last dimensions, the last one's sizes first; negative ones cut.

    They are `value`, or of the input: "reflect" (mirrored at the first and last element, which are not repeated),
    "replicate" (the nearest one), "circular" (from the other end).
    """
    x = as_tensor(input)
    if len(pad) % 2 or len(pad) // 2 > x.ndim:
        raise ArgumentError(f"pad: {list(pad)} are no pairs for the last dimensions of {x.type}")
    if mode not in ("constant", "reflect", "replicate", "circular"):
        raise ArgumentError(f"pad: mode={mode!r} is not one of constant, reflect, replicate, circular")
    sizes = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)]
    pairs: list[tuple[Dim, Dim]] = [*[(0, 0)] * (x.ndim - len(sizes)), *reversed(sizes)]
    for axis, (before, after) in enumerate(pairs):
        less = [-d if isinstance(d, int) and d < 0 else 0 for d in (before, after)]
        if any(less):
            x = x.narrow(axis, less[0], x.shape[axis] - less[0] - less[1])
    pairs = [(_no_less(b), _no_less(a)) for b, a in pairs]
    if mode == "constant":
        if all(equal(d, 0) for pair in pairs for d in pair):
            return x + 0 if x.dtype != bool_ else x & True  # a new tensor
        filled = filling("pad", 0 if value is None else value, x.dtype).item()
        starts, ends = zip(*pairs, strict=True)
        return call("pad", x, before=starts, after=ends, value=filled)  # type: ignore[no-any-return]
    for axis, (b, a) in enumerate(pairs):
        if not (equal(b, 0) and equal(a, 0)):
            x = index_select(x, axis, _padding_index(x.shape[axis], b, a, mode))
    return x


def _no_less(d: Dim) -> Dim:
    return max(d, 0) if isinstance(d, int) else d


def _padding_index(n: Dim, before: Dim, after: Dim, mode: str) -> Any:
    """Where the elements of a padded dimension of size n come from."""
    most = {"reflect": n - 1, "replicate": None, "circular": n}[mode]
    if any(most is not None and isinstance(most, int) and isinstance(d, int) and d > most for d in (before, after)):
        raise ArgumentError(f"pad: ({before}, {after}) is more than {mode} can take from a dimension of size {n}")
    if isinstance(n, int) and isinstance(before, int) and isinstance(after, int):
        if n == 0:
            raise ArgumentError(f"pad: {mode} needs an element, the dimension has none")
        kinds = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
        return np.pad(np.arange(n), (before, after), mode=kinds[mode])  # type: ignore[call-overload]
    place = arange(before + n + after) - before
    if mode == "reflect":
        return (n - 1) - abs((n - 1) - abs(place))
    if mode == "circular":
        return place % n
    return pointwise("minimum", pointwise("maximum", place, 0), n - 1)


def outer(input: Any, vec2: Any) -> Tensor:
    """All products of an element of one vector with one of another."""
    a, b = as_tensor(input), as_tensor(vec2)
    if a.ndim != 1 or b.ndim != 1:
        raise ArgumentError(f"outer takes two vectors, got {a.type} and {b.type}")
    return a.unsqueeze(1) * b


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Vectors spread over a grid, one dimension for each; with indexing="xy" the first two are swapped."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    axes = [t.reshape(1) if t.ndim == 0 else t for t in map(as_tensor, given)]
    if indexing not in ("ij", "xy") or any(t.ndim != 1 for t in axes):
        raise ArgumentError('meshgrid takes vectors, and indexing="ij" or "xy"')
    swapped = indexing == "xy" and len(axes) > 1
    order = [1, 0, *range(2, len(axes))] if swapped else list(range(len(axes)))
    shape = tuple(axes[i].shape[0] for i in order)
    spread = []
    for i, t in enumerate(axes):
        at = order.index(i)
        spread.append(t.reshape((*[1] * at, t.shape[0], *[1] * (len(axes) - at - 1))).expand(shape))
    return tuple(spread)


def diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal of two dimensions, as the last one; it begins `offset` columns to the right, or rows below."""
    x = as_tensor(input)
    a, b = full_axis(dim1, x.ndim), full_axis(dim2, x.ndim)
    if a == b:
        raise ArgumentError(f"diagonal: dim1 and dim2 are both {dim1}")
    x = x.permute(*(i for i in range(x.ndim) if i not in (a, b)), a, b)
    rows, columns = x.shape[-2:]
    down, right = max(-offset, 0), max(offset, 0)
    if isinstance(rows, int) and isinstance(columns, int):
        length: Dim = max(min(rows - down, columns - right), 0)
    elif equal(rows - down, columns - right) or offset == 0 and equal(rows, columns):
        length = rows - down
    elif equal(rows, columns):
        length = rows - down - right
    else:
        raise ArgumentError(f"diagonal: it is not known which of {rows} and {columns} is smaller")
    if equal(length, 0):
        return x.narrow(-1, 0, 0).flatten(-2).narrow(-1, 0, 0)
    flat, start = x.flatten(-2), down * columns + right
    if isinstance(columns, int):
        return flat._view("slice", axis=flat.ndim - 1, start=start, length=length, step=columns + 1)  # type: ignore[no-any-return]
    return index_select(flat, -1, arange(length) * (columns + 1) + start)


def diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """The last dimension as the diagonal of a new square one; zero elsewhere."""
    x = as_tensor(input)
    n = x.shape[-1] + abs(offset)
    spread = pad(x, (max(offset, 0), max(-offset, 0))) if offset else x  # along the columns
    here = arange(n).unsqueeze(1) + offset == arange(n)
    square = where(here, spread.unsqueeze(-2), zeros((), dtype=x.dtype))
    return movedim(square, (-2, -1), (dim1, dim2))


def diag(input: Any, diagonal: int = 0) -> Tensor:
    """A square matrix with the vector as its diagonal, or the diagonal of a matrix."""
    x = as_tensor(input)
    if x.ndim not in (1, 2):
        raise ArgumentError(f"diag takes a vector or a matrix, got {x.type}")
    return diag_embed(x, diagonal) if x.ndim == 1 else _diagonal(x, diagonal)


_diagonal = diagonal  # `diagonal` is an argument of functions


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,)


# -- lookups -------------------------------------------------------------------------------------------


def gather(input: Any, dim: int, index: Any) -> Tensor:
    """input[…, index[…], …] element by element, as torch.gather; other dimensions of the index may be smaller."""
    x, at = as_tensor(input), as_tensor(index)
    if not x.ndim and not at.ndim:
        return gather(x.reshape(1), 0, at.reshape(1)).reshape(())
    axis = full_axis(dim, x.ndim)
    if x.ndim == at.ndim:
        x = _corner(x, at.shape, axis)
    return call("take_along", x, at, axis=dim)  # type: ignore[no-any-return]


def _corner(x: Tensor, shape: Sequence[Dim], axis: int | None = None) -> Tensor:
    """The first elements of each dimension but `axis`, as many as `shape` has."""
    for i, n in enumerate(shape):
        if i != axis and not equal(x.shape[i], n):
            x = x.narrow(i, 0, n)
    return x


def take_along(input: Any, index: Any, dim: int = -1) -> Tensor:
    """The same as gather, with the index first."""
    return gather(input, dim, index)


def index_select(input: Any, dim: int, index: Any) -> Tensor:
    """Slices of the input along a dimension, by an index of any rank (numpy's take)."""
    return call("gather", input, index, axis=dim)  # type: ignore[no-any-return]


def take(input: Any, index: Any) -> Tensor:
    """Elements of the flat input; negative indices count from the end."""
    x = as_tensor(input).flatten()
    return call("gather", x, whole_index([as_tensor(index)], [x.shape[0]]), axis=0)  # type: ignore[no-any-return]


def select_rows(input: Any, rows: Any) -> Tensor:
    """input[b, rows[b]] for each b, the dimension kept: the last valid token of each sequence."""
    return call("select_rows", input, rows)  # type: ignore[no-any-return]


def one_hot(input: Any, num_classes: int = -1) -> Tensor:
    """1 at the place that each integer names in a new last dimension, 0 elsewhere."""
    x = as_tensor(input)
    if not x.dtype.is_integer:
        raise ArgumentError(f"one_hot takes integers, got {x.type}")
    if num_classes == -1:
        if x.is_traced or equal(x.numel(), 0):
            raise ArgumentError("one_hot: num_classes must be given", why="the values are known only at the call")
        num_classes = int(x.numpy().max()) + 1
    return (x.unsqueeze(-1) == arange(num_classes)).to(i64)  # type: ignore[no-any-return]


# -- changing chosen elements --------------------------------------------------------------------------

_REDUCE = {None: "set", "add": "add", "sum": "add", "multiply": "mul", "prod": "mul", "amax": "max", "amin": "min"}


def scatter(
    input: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Tensor:
    """The input with elements of src (or one value) at the places that the index names along a dimension.

    Of several for one place the last counts; with reduce="add" or "multiply" all do, in the order of the dimension.
    """
    x, at = as_tensor(input), as_tensor(index)
    number = value if src is None else src
    if number is None:
        raise ArgumentError("scatter needs src or a value")
    if isinstance(number, Tensor | np.ndarray) and as_tensor(number).ndim == at.ndim:
        return _scattered(x, dim, at, as_tensor(number), reduce)
    one = filling("scatter", number, x.dtype)
    return _scattered(x, dim, at, one.expand(at.shape) if at.ndim else one, reduce)


def scatter_add(input: Any, dim: int, index: Any, src: Any) -> Tensor:
    """The input with elements of src added at the places that the index names along a dimension, in order."""
    return _scattered(as_tensor(input), dim, as_tensor(index), as_tensor(src), "add")


def scatter_reduce(input: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """Elements of src joined at the places that the index names: "sum", "prod", "mean", "amax" or "amin".

    The input's own element takes part unless include_self is False.
    """
    x, at, source = as_tensor(input), as_tensor(index), as_tensor(src)
    kind = "sum" if reduce == "mean" else reduce
    if kind not in ("sum", "prod", "amax", "amin"):
        raise ArgumentError(f"scatter_reduce: reduce={reduce!r} is not one of sum, prod, mean, amax, amin")
    base = x
    if not include_self:
        low, high = _ends(x.dtype)
        start = {"sum": 0, "prod": 1, "amax": low, "amin": high}[kind]
        base = scatter(x, dim, at, value=start)
    joined = _scattered(base, dim, at, source, kind)
    if reduce != "mean":
        return joined
    ones = scatter(ones_like(x), dim, at, value=0) if not include_self else ones_like(x)
    count = _scattered(ones, dim, at, ones_like(source), "sum")
    count = pointwise("maximum", count, 1)
    return joined / count if x.dtype.is_float else joined // count


def _ends(dtype: DType) -> tuple[Any, Any]:
    """The smallest and the largest element of a type."""
    if dtype.is_float:
        return -math.inf, math.inf
    if dtype == bool_:
        return False, True
    found = np.iinfo(dtype.numpy)
    return int(found.min), int(found.max)


def _scattered(x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str | None) -> Tensor:
    if reduce not in _REDUCE:
        raise ArgumentError(f"scatter: reduce={reduce!r} is not one of add, multiply, sum, prod, amax, amin")
    if src.dtype != x.dtype:
        raise ArgumentError(f"scatter: src is {src.type}, the input {x.type}", fix=f"src.to({str(x.dtype)!r})")
    if not x.ndim:
        return _scattered(x.reshape(1), 0, index.reshape(-1), src.reshape(-1), reduce).reshape(())
    axis, kind = full_axis(dim, x.ndim), _REDUCE[reduce]
    if index.ndim == 1 and equal(index.shape[0], 0):
        return x
    if src.ndim == index.ndim:
        src = _corner(src, index.shape)
    if x.dtype == bool_ and kind != "set":  # or, and: sums of bools stay bools
        joined = "max" if kind in ("add", "max") else "min"
        return call("scatter", x.to(u8), index, src.to(u8), axis=axis, reduce=joined).to(bool_)  # type: ignore[no-any-return]
    return call("scatter", x, index, src, axis=axis, reduce=kind)  # type: ignore[no-any-return]


def _spread_index(x: Tensor, dim: int, index: Any, source: Tensor | None) -> tuple[int, Tensor, tuple[Dim, ...]]:
    """An index of slices as one of elements, and its shape."""
    axis, at = full_axis(dim, x.ndim), as_tensor(index)
    at = at.reshape(1) if not at.ndim else at
    if at.ndim != 1 or not at.dtype.is_integer:
        raise ArgumentError(f"the index must be a vector of integers, got {at.type}")
    shape = (*x.shape[:axis], at.shape[0], *x.shape[axis + 1 :])
    if source is not None and not same_dims(source.shape, shape):
        raise ArgumentError(f"the source is {source.type}, the input and the index want the shape {list(shape)}")
    at = at.reshape((*[1] * axis, at.shape[0], *[1] * (x.ndim - axis - 1)))
    return axis, at.expand(shape), shape


def _index_slices(input: Any, dim: int, index: Any, source: Any, reduce: str | None) -> Tensor:
    x, src = as_tensor(input), as_tensor(source)
    if not x.ndim:
        flat = as_tensor(index).reshape(-1)
        return _index_slices(x.reshape(1), 0, flat, src.reshape(-1), reduce).reshape(())
    if not src.ndim and x.ndim == 1:
        src = src.reshape(1)
    axis, at, _ = _spread_index(x, dim, index, src)
    return _scattered(x, axis, at, src, reduce)


def index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Tensor:
    """The input with alpha times the slices of source added at indices of a dimension, in order."""
    src = as_tensor(source)
    return _index_slices(input, dim, index, src if isinstance(alpha, int) and alpha == 1 else src * alpha, "add")


def index_copy(input: Any, dim: int, index: Any, source: Any) -> Tensor:
    """The input with the slices of source at indices of a dimension; of several for one place the last counts."""
    return _index_slices(input, dim, index, source, None)


def index_fill(input: Any, dim: int, index: Any, value: Any) -> Tensor:
    """The input with one value in the slices at indices of a dimension."""
    x = as_tensor(input)
    if not x.ndim:
        return index_fill(x.reshape(1), 0, index, value).reshape(())
    axis, at, shape = _spread_index(x, dim, index, None)
    return _scattered(x, axis, at, filling("index_fill", value, x.dtype).expand(shape), None)


def index_put(input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Tensor:
    """The input with `values` at the elements that one index for each of the first dimensions names.

    With `accumulate` they are added, in order; else of several for one place the last counts. One mask of the input's
    shape chooses by F.where.
    """
    x, new = as_tensor(input), as_tensor(values)
    if new.dtype != x.dtype:
        raise ArgumentError(f"index_put: the values are {new.type}, the input {x.type}", fix=f"cast to {x.dtype}")
    tables = [as_tensor(i) for i in indices]
    if (
        len(tables) == 1
        and tables[0].dtype == bool_
        and tables[0].ndim <= x.ndim
        and (tables[0].is_traced or not new.ndim)
    ):
        mask = tables[0].reshape((*tables[0].shape, *[1] * (x.ndim - tables[0].ndim)))
        if new.ndim and not equal(new.numel(), 1):
            raise ArgumentError(
                "index_put: a mask takes one value while forward is traced",
                why="how many elements it chooses is known only when the plan runs",
                fix="use F.where(mask, values, input) with values of the input's shape",
            )
        new = new.reshape(())
        return where(mask, x + new if accumulate and x.dtype != bool_ else new, x)
    tables = [as_tensor(p) for t in tables for p in (np.nonzero(t.numpy()) if t.dtype == bool_ else (t,))]
    if not tables or len(tables) > x.ndim or not all(t.dtype.is_integer for t in tables):
        raise ArgumentError(f"index_put: {len(tables)} indices of integers do not fit {x.type}")
    place, rest = whole_index(tables, x.shape[: len(tables)]), x.shape[len(tables) :]
    flat = x.reshape((product(x.shape[: len(tables)]), *rest))
    new = new.expand((*place.shape, *rest)).reshape((place.numel(), *rest))
    at = place.reshape((place.numel(), *[1] * len(rest))).expand(new.shape)
    return _scattered(flat, 0, at, new, "add" if accumulate else None).reshape(x.shape)


# -- sums of products ----------------------------------------------------------------------------------


def einsum(equation: str, *operands: Any) -> Tensor:
    """Sums of products by letters: "bij,bjk->bik". Two operands at a time, from the left, as a matrix product."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
    inputs, _, output = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    tensors = [as_tensor(t) for t in given]
    if len(texts) != len(tensors):
        raise ArgumentError(f"einsum: {equation!r} is for {len(texts)} operands, got {len(tensors)}")
    labels = [_labels(equation, text, t) for text, t in zip(texts, tensors, strict=True)]
    if "->" in equation:
        widest = max(
            (x for label in labels for x in label if x.startswith(".")), key=lambda x: int(x[1:]), default=".-1"
        )
        wanted = _expanded(output, int(widest[1:]) + 1)
    else:
        everything = [x for label in labels for x in label]
        dots = sorted({x for x in everything if x.startswith(".")}, key=lambda x: -int(x[1:]))
        wanted = [*dots, *sorted(x for x in set(everything) if not x.startswith(".") and everything.count(x) == 1)]
    if len(set(wanted)) != len(wanted) or any(x not in {y for label in labels for y in label} for x in wanted):
        raise ArgumentError(f"einsum: the result of {equation!r} repeats a letter, or has one that no operand has")
    parts = [_diagonals(t, label) for t, label in zip(tensors, labels, strict=True)]
    sizes: dict[str, Dim] = {}
    for t, label in parts:
        for x, n in zip(label, t.shape, strict=True):
            if equal(sizes.setdefault(x, n), 1):
                sizes[x] = n
            elif not equal(n, 1) and not equal(n, sizes[x]):
                raise ArgumentError(f"einsum: {x} is {sizes[x]} in one operand of {equation!r}, and {n} in another")
    left, label = parts[0]
    for i, (right, other) in enumerate(parts[1:], 1):
        later = {x for _, rest in parts[i + 1 :] for x in rest} | set(wanted)
        left, label = _contracted(left, label, right, other, later, sizes)
    left, label = _summed(left, label, [x for x in label if x not in wanted])
    missing = [x for x in wanted if x not in label]  # size 1 everywhere
    left = left.reshape((*left.shape, *[1] * len(missing)))
    label = [*label, *missing]
    return left.permute(*(label.index(x) for x in wanted)) if wanted else left


def _labels(equation: str, text: str, t: Tensor) -> list[str]:
    dots = t.ndim - len(text.replace("...", ""))
    found = _expanded(text, dots)
    if len(found) != t.ndim or not all(x.isalpha() or x.startswith(".") for x in found):
        raise ArgumentError(f"einsum: {text!r} in {equation!r} does not fit {t.type}")
    return found


def _expanded(text: str, dots: int) -> list[str]:
    """Letters; ... becomes labels .n, …, .1, .0, numbered from the right since operands broadcast from there."""
    before, mark, after = text.partition("...")
    return [*before, *([f".{i}" for i in reversed(range(max(dots, 0)))] if mark else []), *after]


def _diagonals(t: Tensor, label: list[str]) -> tuple[Tensor, list[str]]:
    """The diagonal of dimensions that share a letter."""
    for x in list(label):
        while label.count(x) > 1:
            a = label.index(x)
            b = label.index(x, a + 1)
            t = diagonal(t, 0, a, b)
            label = [y for i, y in enumerate(label) if i not in (a, b)] + [x]
    return t, label


def _summed(t: Tensor, label: list[str], over: list[str]) -> tuple[Tensor, list[str]]:
    if not over:
        return t, label
    dtype = t.dtype
    y: Tensor = call("sum", t, axes=tuple(label.index(x) for x in over)).to(dtype)
    return y, [x for x in label if x not in over]


def _contracted(
    a: Tensor, la: list[str], b: Tensor, lb: list[str], later: set[str], sizes: dict[str, Dim]
) -> tuple[Tensor, list[str]]:
    """Two operands as one: a matrix product over the letters that nobody needs later, else a plain product."""
    # A dimension of size 1 that is stretched by another operand is not there.
    a, la = _without_ones(a, la, sizes)
    b, lb = _without_ones(b, lb, sizes)
    a, la = _summed(a, la, [x for x in la if x not in lb and x not in later])
    b, lb = _summed(b, lb, [x for x in lb if x not in la and x not in later])
    both = [x for x in la if x in lb]
    batch, inner = [x for x in both if x in later], [x for x in both if x not in later]
    rows, columns = [x for x in la if x not in lb], [x for x in lb if x not in la]
    out = [*batch, *rows, *columns]
    a = a.permute(*(la.index(x) for x in (*batch, *rows, *inner)))
    b = b.permute(*(lb.index(x) for x in (*batch, *inner, *columns)))

    def many(names: list[str]) -> Dim:
        return product(sizes[x] for x in names)

    lead = tuple(sizes[x] for x in batch)
    if not inner:
        a = a.reshape((*lead, *(sizes[x] for x in rows), *[1] * len(columns)))
        b = b.reshape((*lead, *[1] * len(rows), *(sizes[x] for x in columns)))
        return a * b, out
    a = a.reshape((*lead, many(rows), many(inner)))
    b = b.reshape((*lead, many(inner), many(columns)))
    return matmul(a, b).reshape(tuple(sizes[x] for x in out)), out


def _without_ones(t: Tensor, label: list[str], sizes: dict[str, Dim]) -> tuple[Tensor, list[str]]:
    kept = [i for i, x in enumerate(label) if not equal(t.shape[i], 1) or equal(sizes[x], 1)]
    if len(kept) == len(label):
        return t, label
    return t.reshape(tuple(t.shape[i] for i in kept)), [label[i] for i in kept]


# -- new tensors ---------------------------------------------------------------------------------------


def full(size: Any, fill_value: float | int | bool, *, dtype: Any = None) -> Tensor:
    """One value everywhere; the element type is that of the value unless given."""
    shape = tuple(size) if isinstance(size, tuple | list) else (size,)
    kind = bool_ if isinstance(fill_value, bool) else i64 if isinstance(fill_value, int) else f32
    chosen = kind if dtype is None else as_dtype(dtype)
    return call("full", shape=shape, value=fill_value, dtype=chosen)  # type: ignore[no-any-return]


def zeros(*size: Any, dtype: Any = f32) -> Tensor:
    """Zeros, of f32 unless said otherwise."""
    return full(_shape(size), 0, dtype=dtype)


def ones(*size: Any, dtype: Any = f32) -> Tensor:
    """Ones, of f32 unless said otherwise."""
    return full(_shape(size), 1, dtype=dtype)


def full_like(input: Any, fill_value: float | int | bool, *, dtype: Any = None) -> Tensor:
    """One value in the shape and element type of another tensor."""
    x = as_tensor(input)
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype)


def zeros_like(input: Any, *, dtype: Any = None) -> Tensor:
    """Zeros in the shape and element type of another tensor."""
    return full_like(input, 0, dtype=dtype)


def ones_like(input: Any, *, dtype: Any = None) -> Tensor:
    """Ones in the shape and element type of another tensor."""
    return full_like(input, 1, dtype=dtype)


def arange(start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None) -> Tensor:
    """start, start + step, … below end; one argument is the end. Ends may be symbolic sizes.

    In a type of integers fractions are counted with, then those of start and step are cut off, as in PyTorch.
    """
    start, end = (0, start) if end is None else (start, end)
    floats = [v for v in (start, end, step) if isinstance(v, float)]
    is_known = not any(isinstance(v, Expr) for v in (start, end, step))
    if (is_known and step == 0) or not all(map(math.isfinite, floats)):
        raise ArgumentError(f"arange from {start} to {end} by {step} has no end")
    if floats and dtype is not None and as_dtype(dtype).is_integer:
        count = max(math.ceil((end - start) / step), 0) if is_known else None
        start, end, step = (int(v) if isinstance(v, float) else v for v in (start, end, step))
        if count is not None:
            return (arange(count) * step + start).to(dtype)  # type: ignore[no-any-return]
    whole = all(isinstance(v, int | Expr | np.integer) for v in (start, end))
    if whole and isinstance(step, int) and step > 0:
        length = end - start if step == 1 else (end - start + (step - 1)) // step
        length = length if isinstance(length, Expr) else np.maximum(length, 0).item()
        kind = i64 if dtype is None else as_dtype(dtype)
        if step == 1:
            return call("arange", length=length, start=start, dtype=kind)  # type: ignore[no-any-return]
        return (call("arange", length=length) * step + start).to(kind)  # type: ignore[no-any-return]
    if any(isinstance(v, Expr) for v in (start, end, step)):
        raise ArgumentError("arange over symbolic sizes needs ints and a positive step")
    values = np.arange(start, end, step)
    return Tensor(values, dtype if dtype is not None else f32 if values.dtype.kind == "f" else i64)


def tril(input: Any, diagonal: int = 0) -> Tensor:
    """The lower triangle of the last two dimensions; zero elsewhere."""
    x = as_tensor(input)
    return where(_row_minus_column(x) >= -diagonal, x, zeros_like(x))


def triu(input: Any, diagonal: int = 0) -> Tensor:
    """The upper triangle of the last two dimensions; zero elsewhere."""
    x = as_tensor(input)
    return where(_row_minus_column(x) <= -diagonal, x, zeros_like(x))


def _row_minus_column(x: Tensor) -> Tensor:
    rows, columns = x.shape[full_axis(-2, x.ndim)], x.shape[-1]
    return arange(rows).unsqueeze(1) - arange(columns)


def _shape(size: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], tuple | list) else size


def eye(n: Dim, m: Dim | None = None, *, dtype: Any = f32) -> Tensor:
    """1 on the diagonal of a matrix, 0 elsewhere."""
    return (arange(n).unsqueeze(1) == arange(n if m is None else m)).to(dtype)  # type: ignore[no-any-return]


def linspace(start: float, end: float, steps: int, *, dtype: Any = f32) -> Tensor:
    """`steps` numbers from start to end, at equal distances; whole numbers are rounded towards 0."""
    kind = as_dtype(dtype)
    number = int if kind.is_integer else float
    return Tensor(np.linspace(number(start), number(end), steps), kind)


__all__ = [
    "Sorted", "arange", "cast", "cat", "chunk", "concat", "concatenate", "diag", "diag_embed", "diagonal", "einsum",
    "expand", "eye", "flatten", "flip", "full", "full_like", "gather", "index_add", "index_copy", "index_fill",
    "index_put", "index_select", "linspace", "masked_fill", "meshgrid", "movedim", "narrow", "one_hot", "ones",
    "ones_like", "outer", "pad", "permute", "repeat_interleave", "repeat_kv", "reshape", "roll", "scatter",
    "scatter_add", "scatter_reduce", "select", "select_rows", "split", "squeeze", "stack", "take", "take_along", "tile",
    "transpose", "tril", "triu", "unbind", "unflatten", "unsqueeze", "where", "zeros", "zeros_like",
]  # fmt: skip
