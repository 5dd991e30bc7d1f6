"""Tensor: a numpy array with PyTorch's manners, or a value of the graph that is being traced.

Every operation goes through `call`: on concrete tensors it runs the op's numpy reference, under a tracer it
emits the op. The same model code is therefore both the eager program and the source of the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from monoplan.frontend.context import Tracing, current, user_location
from monoplan.frontend.operators import Arithmetic, Shapes
from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.arrays import plain_array
from monoplan.ir.dims import Dim, Expr
from monoplan.ir.errors import ArgumentError, TraceError, TypeRuleError
from monoplan.ir.graph import Loc, Value
from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.types import DType, TensorType, as_dtype, bool_, f32, i64, product

_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "power": "pow",
    "maximum": "maximum", "minimum": "minimum", "matmul": "matmul", "equal": "eq", "not_equal": "ne",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
}  # fmt: skip


class Tensor(Arithmetic, Shapes):
    """Concrete when `_array` is set, traced when `_value` is."""

    __slots__ = ("_array", "_value", "_aliases", "_stale", "__weakref__")
    __array_priority__ = 100

    def __init__(self, data: Any, dtype: Any = None) -> None:
        array = data.numpy() if isinstance(data, Tensor) else plain_array(data)
        if dtype is not None:
            array = array.astype(as_dtype(dtype).numpy, copy=False)
        elif not isinstance(data, np.ndarray | Tensor) and array.dtype == np.float64:
            array = array.astype(np.float32)  # Python floats mean f32, as in PyTorch
        as_dtype(array.dtype)
        self._set(array, None)

    def _set(self, array: np.ndarray[Any, Any] | None, value: Value | None) -> None:
        self._array: np.ndarray[Any, Any] | None = array
        self._value: Value | None = value
        self._aliases: list[weakref.ref[Tensor]] = []  # traced tensors that share its storage in eager mode
        self._stale: Loc | None = None  # where an alias was written, since when this value is wrong

    @classmethod
    def traced(cls, value: Value) -> Tensor:
        """A tensor that stands for a graph value."""
        t = cls.__new__(cls)
        t._set(None, value)
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
        return self.type.shape if self._array is None else self._array.shape

    @property
    def device(self) -> str:
        """Where tensors are; a plan's target is chosen by compile()."""
        return "cpu"

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> Dim:
        return product(self.shape)

    # -- out of the graph ---------------------------------------------------------------------------------

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
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def _number(self, asked: str) -> Any:
        if self._array is None:
            raise TraceError(
                f"{asked} was called on a traced tensor",
                where=user_location(),
                why="its value is known only when the plan runs",
                fix="keep it a tensor (F.where for a choice), or pass the number to forward as an argument",
            )
        return self._array.item()

    def item(self) -> Any:
        """The one element as a Python number."""
        return self._number(".item()")

    def tolist(self) -> Any:
        return self._number(".tolist()") if self.is_traced else self.numpy().tolist()

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __index__(self) -> int:
        if self.is_traced or self.dtype.is_integer:
            return int(self._number("use as an index or a count"))
        raise TypeError(f"only integer tensors can be an index, got {self.type}")

    def __bool__(self) -> bool:
        if self.is_traced:
            raise TraceError(
                "Python control flow depends on the value of a traced tensor",
                where=user_location(),
                why="`if` and `while` are decided while forward is captured, when there are no values",
                fix="use F.where(condition, a, b), or make the condition a plain Python argument",
            )
        return bool(self.numpy())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0].__index__()

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if self._value is not None:
            return f"Tensor(traced {self._value}: {self.type})"
        values = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
        return f"Tensor({values}, dtype={self.dtype})"

    # -- numpy's functions --------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """numpy's operators are ops; its other functions work on concrete tensors only."""
        if method == "__call__" and not kwargs and ufunc.__name__ in _UFUNCS and len(inputs) == 2:
            return binary(_UFUNCS[ufunc.__name__], *inputs)
        return getattr(ufunc, method)(*_plain(inputs, ufunc.__name__), **_plain(kwargs, ufunc.__name__))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """np.concatenate, np.where …: on concrete tensors they give arrays, traced ones they can't take."""
        return func(*_plain(args, func.__name__), **_plain(kwargs, func.__name__))

    # -- writing into a tensor ----------------------------------------------------------------------------

    def assign(self, new: Tensor) -> Tensor:
        """Takes over the contents of `new`: how `out=` and `inplace=` work, eager and traced alike."""
        if self.type != new.type:
            raise ArgumentError(f"out is {self.type}, the result is {new.type}", where=user_location())
        tracing = current()
        if tracing is not None:
            tracing.overwrite(self)
            self._array = None if new.is_traced else new.numpy().copy()
            self._value = new._value
            return self
        array = self.numpy()
        if not array.flags.writeable:
            raise ArgumentError("out is read-only: broadcast or memory-mapped", where=user_location())
        array[...] = new.numpy()
        return self

    def copy_(self, source: Any) -> Tensor:
        """Overwrites the contents, broadcast and cast to this tensor's type."""
        other = as_tensor(source).to(self.dtype)
        return self.assign(other if other.type == self.type else other.expand(self.shape))

    # -- for the mixins -----------------------------------------------------------------------------------

    def _call(self, op: str, *operands: Any, **attrs: Any) -> Any:
        return call(op, *operands, **attrs)

    def _binary(self, op: str, a: Any, b: Any) -> Any:
        return binary(op, a, b)

    def _view(self, op: str, **attrs: Any) -> Any:
        result = call(op, self, **attrs)
        for view in result if isinstance(result, tuple) else (result,):
            _share(self, view)
        return result


def call(op: str | OpDef, *operands: Any, **attrs: Any) -> Any:
    """Applies an op: emits it under a tracer if an operand is traced (or a parameter), else runs it."""
    opdef = REGISTRY[op] if isinstance(op, str) else op
    tensors = [None if x is None else as_tensor(x) for x in operands]
    tracing = current()
    if tracing is None:
        return _run(opdef, tensors, attrs)
    if not tensors or any(t is not None and tracing.is_graph_value(t) for t in tensors):
        values = [None if t is None else tracing.value_of(t) for t in tensors]
        results = tracing.emit(opdef, values, attrs)
        return Tensor.traced(results) if isinstance(results, Value) else tuple(map(Tensor.traced, results))
    for t in tensors:
        if t is not None:
            tracing.note_read(t)
    return _run(opdef, tensors, attrs)


def _run(opdef: OpDef, tensors: Sequence[Tensor | None], attrs: dict[str, Any]) -> Any:
    if any(t is not None and t.is_traced for t in tensors):
        raise TraceError(
            "a traced tensor was used after its trace had ended",
            where=user_location(),
            fix="do not keep tensors of a traced forward: return them",
        )
    full, rest = opdef.complete_operands(list(tensors), attrs)
    try:
        opdef.check_operands(full)
        complete = opdef.complete_attrs(rest)
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
    if isinstance(x, Expr):  # a symbolic size: an int that the plan knows only when it runs
        whole = other.dtype if other.dtype.is_integer else i64
        size: Tensor = call("arange", length=1, start=x, dtype=whole).reshape(())
        return size.to(other.dtype) if other.dtype.is_float else size
    x = x.item() if isinstance(x, np.generic) else x
    if isinstance(x, bool):
        dtype = other.dtype
    elif isinstance(x, int):
        dtype = i64 if other.dtype == bool_ else other.dtype
    else:
        dtype = other.dtype if other.dtype.is_float else f32
    return Tensor(np.asarray(x, dtype.numpy))


def binary(op: str, a: Any, b: Any) -> Any:
    """A two-operand op; Python numbers adapt to the tensor, integers become floats where it needs them."""
    if _is_number(a):
        b = as_tensor(b)
        a = scalar_like(a, b)
    a = as_tensor(a)
    if op == "pow" and isinstance(b, int | np.integer) and b >= 0 and not a.dtype.is_float:
        return _whole_power(a, int(b))
    b = scalar_like(b, a) if _is_number(b) else as_tensor(b)
    if op == "matmul":
        return matmul(a, b)
    if op in ("div", "pow"):
        a, b = floating(a), floating(b)
    return call(op, a, b)


def _whole_power(a: Tensor, exponent: int) -> Tensor:
    """Integers to a constant power of 0 or more, in their own type: exact, and it wraps around as `*` does."""
    a = a.to(i64) if a.dtype == bool_ else a  # as True + 1 is
    if exponent < 2:
        return a * 1 if exponent else a * 0 + 1  # not `a` itself: the result is a new tensor
    result = a
    for bit in f"{exponent:b}"[1:]:  # repeated squaring, from the highest bit
        result = result * result
        result = result * a if bit == "1" else result
    return result


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float | np.generic | Expr)


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


def _share(base: Tensor, view: Tensor) -> None:
    """Remembers that `view` shares the storage of `base`, so that a write to one makes the others stale."""
    if view.is_traced and view is not base:
        # Weak references: an alias that nobody holds any more can't be read, so it need not be refused.
        group = base._aliases or [weakref.ref(base)]
        group[:] = [r for r in group if r() is not None] + [weakref.ref(view)]
        base._aliases = view._aliases = group


def _plain(x: Any, asked: str) -> Any:
    """numpy's arguments with arrays in place of tensors."""
    if isinstance(x, Tensor):
        if x.is_traced:
            raise TraceError(
                f"numpy.{asked} was called on a traced tensor",
                where=user_location(),
                why="numpy computes at once, but the tensor has no values while forward is captured",
                fix=f"use a function of monoplan.nn.functional in place of numpy.{asked}",
            )
        return x.numpy()
    if isinstance(x, tuple | list):
        return type(x)(_plain(i, asked) for i in x)
    return {k: _plain(v, asked) for k, v in x.items()} if isinstance(x, dict) else x


__all__ = ["DType", "Tensor", "Tracing", "as_tensor", "binary", "call", "floating", "matmul", "scalar_like"]
