"""Tensor: a numpy array with PyTorch's manners, or a value of the graph that is being traced.

Every operation goes through `call`: on concrete tensors it runs the op's numpy reference, under a tracer it emits the
op. The same model code is therefore both the eager program and the source of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from monoplan.frontend.context import Tracing, current, user_location
from monoplan.ir.dims import Dim, Expr, divide_exactly
from monoplan.ir.errors import ArgumentError, TraceError, TypeRuleError
from monoplan.ir.graph import Value
from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.types import DType, TensorType, as_dtype, bool_, f32, i64, product


class Tensor:
    """Concrete when `_array` is set, traced when `_value` is. Operators follow numpy's broadcasting."""

    __slots__ = ("_array", "_value", "_base", "_views", "__weakref__")
    __array_priority__ = 100

    def __init__(self, data: Any, dtype: Any = None) -> None:
        array = data.numpy() if isinstance(data, Tensor) else np.asarray(data)
        if dtype is not None:
            array = array.astype(as_dtype(dtype).numpy, copy=False)
        elif not isinstance(data, np.ndarray | Tensor) and array.dtype == np.float64:
            array = array.astype(np.float32)  # Python floats mean f32, as in PyTorch
        as_dtype(array.dtype)
        self._array: np.ndarray[Any, Any] | None = array
        self._value: Value | None = None
        self._base: Tensor | None = None
        self._views: list[weakref.ref[Tensor]] = []

    @classmethod
    def traced(cls, value: Value) -> Tensor:
        """A tensor that stands for a graph value."""
        t = cls.__new__(cls)
        t._array, t._value, t._base, t._views = None, value, None, []
        return t

    @property
    def is_traced(self) -> bool:
        return self._value is not None

    @property
    def type(self) -> TensorType:
        """Element type and shape."""
        if self._value is not None:
            return self._value.type
        assert self._array is not None
        return TensorType(as_dtype(self._array.dtype), self._array.shape)

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> Dim:
        return product(self.shape)

    # -- out of the graph ---------------------------------------------------------------------------------------

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array of a concrete tensor."""
        if self._array is None:
            raise TraceError(
                "a traced tensor has no values yet: it can't become a numpy array",
                where=user_location(),
                why="forward is being captured as a graph, before any input is known",
                fix="use monoplan.nn.functional in place of numpy, or compute this outside of forward",
            )
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def item(self) -> Any:
        """The one element as a Python number."""
        if self._array is None:
            raise TraceError(
                ".item() was called on a traced tensor",
                where=user_location(),
                why="its value is known only when the plan runs",
                fix="keep it as a tensor (F.where for a choice), or pass the number to forward as an argument",
            )
        return self._array.item()

    def tolist(self) -> Any:
        return self.item() if self.is_traced else self.numpy().tolist()

    def __bool__(self) -> bool:
        if self.is_traced:
            raise TraceError(
                "Python control flow depends on the value of a traced tensor",
                where=user_location(),
                why="`if` and `while` are decided while forward is captured, when there are no values",
                fix="use F.where(condition, a, b), or make the condition a plain Python argument",
            )
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0].__index__()

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if self._value is not None:
            return f"Tensor(traced {self._value}: {self.type})"
        return f"Tensor({np.array2string(self.numpy(), separator=', ', prefix='Tensor(')}, dtype={self.dtype})"

    # -- arithmetic ---------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return binary("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return binary("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return binary("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return binary("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return binary("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return binary("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return binary("div", other, self)

    def __pow__(self, other: Any) -> Tensor:
        if isinstance(other, int) and other == 2:
            return binary("mul", self, self)
        return binary("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return binary("pow", other, self)

    def __neg__(self) -> Tensor:
        return call("neg", self)

    def __abs__(self) -> Tensor:
        return call("abs", self)

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, as_tensor(other))

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(as_tensor(other), self)

    def __eq__(self, other: Any) -> Any:
        return binary("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return binary("ne", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return binary("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return binary("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return binary("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return binary("ge", self, other)

    def __and__(self, other: Any) -> Tensor:
        return binary("logical_and", self, other)

    def __or__(self, other: Any) -> Tensor:
        return binary("logical_or", self, other)

    def __invert__(self) -> Tensor:
        return call("logical_not", self)

    __hash__ = object.__hash__

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """numpy functions work on concrete tensors; on traced ones they can't be captured."""
        binary_ops = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div",
                      "power": "pow", "maximum": "maximum", "minimum": "minimum", "matmul": "matmul"}
        if method == "__call__" and not kwargs and ufunc.__name__ in binary_ops and len(inputs) == 2:
            name = binary_ops[ufunc.__name__]
            a, b = inputs
            return matmul(as_tensor(a), as_tensor(b)) if name == "matmul" else binary(name, a, b)
        if any(isinstance(x, Tensor) and x.is_traced for x in inputs):
            raise TraceError(
                f"numpy.{ufunc.__name__} was called on a traced tensor",
                where=user_location(),
                why="numpy computes at once, but the tensor has no values while forward is captured",
                fix=f"use the function of the same name in monoplan.nn.functional in place of numpy.{ufunc.__name__}",
            )
        plain = [x.numpy() if isinstance(x, Tensor) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    # -- shape --------------------------------------------------------------------------------------------------

    def view(self, *shape: Any) -> Tensor:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return _as_view(self, call("reshape", self, shape=_complete_shape(self.type, tuple(sizes))))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions swapped."""
        axes = list(range(self.ndim))
        a, b = _axis(dim0, self.ndim), _axis(dim1, self.ndim)
        axes[a], axes[b] = axes[b], axes[a]
        return _as_view(self, call("transpose", self, axes=tuple(axes)))

    def permute(self, *dims: Any) -> Tensor:
        """Dimensions in another order."""
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
        return _as_view(self, call("transpose", self, axes=tuple(_axis(d, self.ndim) for d in order)))

    @property
    def T(self) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:
        return self.transpose(-2, -1)

    def narrow(self, dim: int, start: Dim, length: Dim) -> Tensor:
        """`length` elements of a dimension from `start`."""
        return _as_view(self, call("slice", self, axis=_axis(dim, self.ndim), start=start, length=length))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """The tensor cut into `chunks` pieces along a dimension (the last may be smaller)."""
        size = self.shape[_axis(dim, self.ndim)]
        whole = divide_exactly(size, chunks)
        if whole is not None:
            return self.split([whole] * chunks, dim)
        piece = -(-size.__index__() // chunks)
        return self.split(piece, dim)

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Pieces of the given size (the last may be smaller), or of the given sizes, along a dimension."""
        axis = _axis(dim, self.ndim)
        if isinstance(split_size, int | Expr):
            n, step = self.shape[axis].__index__(), split_size.__index__()
            sizes = [min(step, n - i) for i in range(0, n, step)]
        else:
            sizes = list(split_size)
        parts = call("split", self, sizes=tuple(sizes), axis=axis)
        return tuple(_as_view(self, p) for p in (parts if isinstance(parts, tuple) else (parts,)))

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a larger shape; -1 keeps a size."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape)
        lead = len(sizes) - self.ndim
        full = [self.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(sizes)]
        return _as_view(self, call("expand", self, shape=tuple(full)))

    def unsqueeze(self, dim: int) -> Tensor:
        at = dim % (self.ndim + 1)
        return self.reshape((*self.shape[:at], 1, *self.shape[at:]))

    def squeeze(self, dim: int) -> Tensor:
        at = _axis(dim, self.ndim)
        return self.reshape((*self.shape[:at], *self.shape[at + 1 :]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        a, b = _axis(start_dim, self.ndim), _axis(end_dim, self.ndim)
        return self.reshape((*self.shape[:a], product(self.shape[a : b + 1]), *self.shape[b + 1 :]))

    def contiguous(self) -> Tensor:
        """The tensor itself: layout in memory is the compiler's business."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return _index(self, index if isinstance(index, tuple) else (index,))

    # -- types and reductions -----------------------------------------------------------------------------------

    def to(self, dtype: Any) -> Tensor:
        """In another element type."""
        target = as_dtype(dtype)
        return self if target == self.dtype else call("cast", self, dtype=target)

    def float(self) -> Tensor:
        return self.to(f32)

    def sum(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return call("sum", self, axes=_axes(dim), keepdims=keepdim)

    def mean(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return call("mean", self, axes=_axes(dim), keepdims=keepdim)

    def max(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return call("max", self, axes=_axes(dim), keepdims=keepdim)

    def min(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return call("min", self, axes=_axes(dim), keepdims=keepdim)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return call("argmax", self, axis=dim, keepdims=keepdim)

    # -- writing into a tensor ----------------------------------------------------------------------------------

    def assign(self, new: Tensor) -> Tensor:
        """Takes over the contents of `new`: how `out=` and `inplace=` work, eager and traced alike."""
        if self.type != new.type:
            raise ArgumentError(f"out is {self.type}, the result is {new.type}", where=user_location())
        if self._array is not None and new._array is not None:
            if not self._array.flags.writeable:
                raise ArgumentError("out is read-only (a broadcast or memory-mapped tensor)", where=user_location())
            self._array[...] = new._array
            return self
        live_views = [ref for ref in self._views if ref() is not None]
        if self._base is not None or live_views:
            raise TraceError(
                "a traced tensor that shares storage with a view was written in place",
                where=user_location(),
                why="the graph has no aliases: the other view would not see the change",
                fix="drop inplace=/out= here, or take the view after the write",
            )
        self._array, self._value = new._array, new._value
        return self


def call(op: str | OpDef, *operands: Any, **attrs: Any) -> Any:
    """Applies an op: emits it under a tracer when an operand is traced (or a parameter), else runs the reference."""
    opdef = REGISTRY[op] if isinstance(op, str) else op
    tensors = [None if x is None else as_tensor(x) for x in operands]
    tracing = current()
    if tracing is not None and (not tensors or any(t is not None and tracing.is_graph_value(t) for t in tensors)):
        values = [None if t is None else tracing.value_of(t) for t in tensors]
        results = tracing.emit(opdef, values, attrs)
        return Tensor.traced(results) if isinstance(results, Value) else tuple(map(Tensor.traced, results))
    for t in tensors:
        if t is not None and t.is_traced:
            raise TraceError("a traced tensor was used after its trace had ended", where=user_location())
    return _run(opdef, tensors, attrs)


def _run(opdef: OpDef, tensors: Sequence[Tensor | None], attrs: dict[str, Any]) -> Any:
    full, rest = opdef.complete_operands(list(tensors), attrs)
    opdef.check_operands(full)
    complete = opdef.complete_attrs(rest)
    try:
        types = opdef.infer([None if t is None else t.type for t in full], complete)
        outs = opdef.evaluate([None if t is None else t.numpy() for t in full], complete, types)
    except (TypeRuleError, ArgumentError) as error:
        if error.where is None:
            raise type(error)(error.what, where=user_location(), why=error.why, fix=error.fix) from None
        raise
    results = tuple(Tensor(a) for a in outs)
    return results[0] if len(results) == 1 else results


def as_tensor(x: Any) -> Tensor:
    """A Tensor from a Tensor, an array or a Python number."""
    return x if isinstance(x, Tensor) else Tensor(x)


def scalar_like(x: Any, other: Tensor) -> Tensor:
    """A Python number in the element type that keeps the other operand's, as PyTorch's scalars do."""
    if isinstance(x, bool):
        dtype = bool_ if other.dtype == bool_ else other.dtype
    elif isinstance(x, int):
        dtype = i64 if other.dtype == bool_ else other.dtype
    else:
        dtype = other.dtype if other.dtype.is_float else f32
    return Tensor(np.asarray(x, dtype.numpy))


def binary(op: str, a: Any, b: Any) -> Any:
    """A two-operand op; Python numbers adapt to the tensor, integers become floats where the op needs them."""
    if not isinstance(a, Tensor) and not isinstance(a, np.ndarray):
        a, b = scalar_like(a, as_tensor(b)), as_tensor(b)
    elif not isinstance(b, Tensor) and not isinstance(b, np.ndarray):
        a, b = as_tensor(a), scalar_like(b, as_tensor(a))
    a, b = as_tensor(a), as_tensor(b)
    if op in ("div", "pow"):
        a, b = floating(a), floating(b)
    return call(op, a, b)


def floating(x: Tensor) -> Tensor:
    """Integers and bools as f32; floats unchanged."""
    return x if x.dtype.is_float else x.to(f32)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product; one-dimensional operands are treated as in numpy."""
    left = a.unsqueeze(0) if a.ndim == 1 else a
    right = b.unsqueeze(-1) if b.ndim == 1 else b
    y: Tensor = call("matmul", left, right)
    y = y.squeeze(-2) if a.ndim == 1 else y
    return y.squeeze(-1) if b.ndim == 1 else y


def _index(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Basic indexing: ints, slices, None and Ellipsis."""
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    if any(isinstance(i, Tensor | np.ndarray | list) for i in index):
        raise TypeRuleError("indexing takes ints, slices, None and ...", where=user_location(),
                            fix="use F.gather, F.embedding or F.take_along for lookups by tensor")
    if used > x.ndim:
        raise TypeRuleError(f"{used} indices for a tensor of rank {x.ndim}", where=user_location())
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (x.ndim - used), *index[at + 1 :])
    axis = 0
    for i in index:
        if i is None:
            x = x.unsqueeze(axis)
            axis += 1
        elif isinstance(i, slice):
            if i != slice(None):
                x = _slice(x, axis, i)
            axis += 1
        else:
            size = x.shape[axis]
            start = size + i if isinstance(i, int) and i < 0 else i
            x = x.narrow(axis, start, 1).squeeze(axis)
    return x


def _slice(x: Tensor, axis: int, s: slice) -> Tensor:
    size: Dim = x.shape[axis]
    step = 1 if s.step is None else s.step
    if not isinstance(step, int) or step < 1:
        raise TypeRuleError(f"slices need a positive step, got {step}", where=user_location())
    bounds = []
    for given, default in ((s.start, 0), (s.stop, size)):
        d: Dim = default if given is None else given
        if isinstance(d, int) and d < 0:
            d = size + d
        if isinstance(d, int) and isinstance(size, int):
            d = min(max(d, 0), size)
        bounds.append(d)
    start, stop = bounds
    length = stop - start
    if step != 1:
        length = (length + (step - 1)) // step
    if isinstance(length, int):
        length = max(length, 0)
    return _as_view(x, call("slice", x, axis=axis, start=start, length=length, step=step))


def _as_view(base: Tensor, view: Tensor) -> Tensor:
    """Remembers that `view` shares the storage of `base`, so that in-place writes can be refused."""
    if view.is_traced and view is not base:
        view._base = base
        base._views = [r for r in base._views if r() is not None] + [weakref.ref(view)]
    return view


def _complete_shape(t: TensorType, shape: tuple[Any, ...]) -> tuple[Dim, ...]:
    unknown = [i for i, s in enumerate(shape) if isinstance(s, int) and s == -1]
    if not unknown:
        return shape
    rest = product(s for i, s in enumerate(shape) if i not in unknown)
    missing = divide_exactly(t.size, rest)
    if len(unknown) > 1 or missing is None:
        raise TypeRuleError(f"reshape: {t} does not divide into {list(shape)}", where=user_location())
    return tuple(missing if i == unknown[0] else s for i, s in enumerate(shape))


def _axis(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise TypeRuleError(f"dimension {dim} is out of range for rank {rank}", where=user_location())
    return dim % rank


def _axes(dim: Any) -> Any:
    return dim if dim is None or isinstance(dim, tuple) else tuple(dim) if isinstance(dim, list) else (dim,)


__all__ = ["Tensor", "Tracing", "as_tensor", "binary", "call", "floating", "matmul"]
