"""Functions over tensors with PyTorch's names: pointwise, reductions, shapes, lookups. All use `call`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from monoplan.frontend.indexing import axes_of, full_axis
from monoplan.frontend.tensor import Tensor, as_tensor, binary, call, floating, scalar_like
from monoplan.ir.dims import Dim, Expr
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import as_dtype, bool_, f32, i64

Unary = Callable[..., Tensor]


class Sorted(NamedTuple):
    """Values and the indices they came from."""

    values: Tensor
    indices: Tensor


def write(result: Tensor, out: Any, inplace_of: Any = None) -> Tensor:
    """The result, or the tensor that took it over: `inplace` wins over `out`."""
    target = out if inplace_of is None else inplace_of
    return result if target is None else as_tensor(target).assign(result)


def _unary(name: str, *, floats: bool = True) -> Unary:
    """A function of one tensor; `floats`: integers are cast to f32 first."""

    def function(input: Any, *, out: Tensor | None = None) -> Tensor:
        x = as_tensor(input)
        return write(call(name, floating(x) if floats else x), out)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = REGISTRY[name].doc
    return function


def _binary(name: str) -> Unary:
    """A function of two tensors or numbers, which broadcast."""

    def function(input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
        return write(binary(name, input, other), out)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = REGISTRY[name].doc
    return function


exp, log, sqrt, rsqrt = _unary("exp"), _unary("log"), _unary("sqrt"), _unary("rsqrt")
sin, cos, tanh, sigmoid, erf = _unary("sin"), _unary("cos"), _unary("tanh"), _unary("sigmoid"), _unary("erf")
neg, abs = _unary("neg", floats=False), _unary("abs", floats=False)
logical_not = _unary("logical_not", floats=False)
add, sub, mul, div, pow = _binary("add"), _binary("sub"), _binary("mul"), _binary("div"), _binary("pow")
pow.__doc__ = "a to the power b: of floats, and of integers to a constant whole power of 0 or more; else in f32."
maximum, minimum, matmul = _binary("maximum"), _binary("minimum"), _binary("matmul")
eq, ne, lt, le, gt, ge = (_binary(n) for n in ("eq", "ne", "lt", "le", "gt", "ge"))
logical_and, logical_or = _binary("logical_and"), _binary("logical_or")
bmm = matmul


def where(condition: Any, input: Any, other: Any, *, out: Tensor | None = None) -> Tensor:
    """input where the condition holds, else other; numbers take the other's element type."""
    numbers = (bool, int, float, Expr, np.generic)
    if isinstance(input, numbers):
        input = scalar_like(input, as_tensor(other))
    a = as_tensor(input)
    b = scalar_like(other, a) if isinstance(other, numbers) else as_tensor(other)
    return write(call("where", condition, a, b), out)


def masked_fill(input: Any, mask: Any, value: Any) -> Tensor:
    """The input with `value` where the mask holds."""
    x = as_tensor(input)
    return where(mask, scalar_like(value, x) if not isinstance(value, Tensor) else value, x)


def clamp(input: Any, min: Any = None, max: Any = None, *, out: Tensor | None = None) -> Tensor:
    """The input held between min and max."""
    x = as_tensor(input)
    x = x if min is None else binary("maximum", x, min)
    return write(x if max is None else binary("minimum", x, max), out)


def cast(input: Any, dtype: Any) -> Tensor:
    """The input in another element type; floats to integers truncate."""
    return as_tensor(input).to(dtype)  # type: ignore[no-any-return]


# -- reductions ----------------------------------------------------------------------------------------


def sum(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum over dimensions (None: all)."""
    x = as_tensor(input)
    return (x if dtype is None else x.to(dtype)).sum(dim, keepdim)


def mean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The mean over dimensions (None: all); integers as f32."""
    x = as_tensor(input)
    return (x if dtype is None else x.to(dtype)).mean(dim, keepdim)


def max(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The largest elements over dimensions (None: all); values only, see argmax and topk for places."""
    return call("max", input, axes=axes_of(dim), keepdims=keepdim)  # type: ignore[no-any-return]


def min(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """The smallest elements over dimensions (None: all); values only."""
    return call("min", input, axes=axes_of(dim), keepdims=keepdim)  # type: ignore[no-any-return]


amax, amin = max, min


def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the largest element along a dimension (None: of all); ties go to the lowest."""
    return call("argmax", input, axis=dim, keepdims=keepdim)  # type: ignore[no-any-return]


def cumsum(input: Any, dim: int, *, dtype: Any = None, out: Tensor | None = None) -> Tensor:
    """Running sums along a dimension."""
    return write(call("cumsum", input if dtype is None else cast(input, dtype), axis=dim), out)


def sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Sorted:
    """Values in order along a dimension, with their indices; always stable."""
    return Sorted(*call("sort", input, axis=dim, descending=descending))


def argsort(input: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The indices that sort a dimension."""
    return sort(input, dim, descending).indices


def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Sorted:
    """The k largest values along a dimension, with their indices, largest first; ties go to the lowest."""
    if not largest:
        raise ArgumentError("topk gives the largest values only", fix="use F.sort, or F.topk of -input")
    return Sorted(*call("topk", input, k=k, axis=dim))


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


def squeeze(input: Any, dim: int) -> Tensor:
    """Without a dimension of size 1."""
    return as_tensor(input).squeeze(dim)


def unsqueeze(input: Any, dim: int) -> Tensor:
    """With a new dimension of size 1."""
    return as_tensor(input).unsqueeze(dim)


def cat(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors joined along a dimension."""
    if not tensors:
        raise ArgumentError("cat needs at least one tensor")
    return write(call("concat", *tensors, axis=dim), out)


concat = concatenate = cat


def stack(tensors: Sequence[Any], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Tensors of one shape joined along a new dimension."""
    return cat([as_tensor(t).unsqueeze(dim) for t in tensors], dim, out=out)


def repeat_interleave(input: Any, repeats: int, dim: int) -> Tensor:
    """Each element of a dimension `repeats` times in a row."""
    return call("repeat", input, repeats=repeats, axis=dim)  # type: ignore[no-any-return]


def repeat_kv(hidden_states: Any, n_rep: int, dim: int = -3) -> Tensor:
    """Each head n_rep times in a row: [batch, heads, seq, dim] to [batch, heads * n_rep, seq, dim]."""
    return as_tensor(hidden_states) if n_rep == 1 else repeat_interleave(hidden_states, n_rep, dim)


# -- lookups -------------------------------------------------------------------------------------------


def gather(input: Any, dim: int, index: Any) -> Tensor:
    """input[…, index[…], …] element by element, as torch.gather; shapes agree except along `dim`."""
    return call("take_along", input, index, axis=dim)  # type: ignore[no-any-return]


def take_along(input: Any, index: Any, dim: int = -1) -> Tensor:
    """The same as gather, with the index first."""
    return gather(input, dim, index)


def index_select(input: Any, dim: int, index: Any) -> Tensor:
    """Slices of the input along a dimension, by an index of any rank (numpy's take)."""
    return call("gather", input, index, axis=dim)  # type: ignore[no-any-return]


def select_rows(input: Any, rows: Any) -> Tensor:
    """input[b, rows[b]] for each b, the dimension kept: the last valid token of each sequence."""
    return call("select_rows", input, rows)  # type: ignore[no-any-return]


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
    """start, start + step, … below end; one argument is the end. Ends may be symbolic sizes."""
    start, end = (0, start) if end is None else (start, end)
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


# -- between ranks -------------------------------------------------------------------------------------


def all_reduce(input: Any, world: int = 1) -> Tensor:
    """The sum over all ranks of a tensor-parallel group; the input itself when there is one."""
    return call("all_reduce", input, world=world)  # type: ignore[no-any-return]


def all_gather(input: Any, dim: int = -1, world: int = 1) -> Tensor:
    """The tensors of all ranks joined along a dimension; the input itself when there is one rank."""
    return call("all_gather", input, axis=dim, world=world)  # type: ignore[no-any-return]
