"""Tensor: a numpy array with PyTorch's manners, or a value of the graph that is being traced.

Every operation goes through `call`: on concrete tensors it runs the op's numpy reference, under a tracer it
emits the op. The same model code is therefore both the eager program and the source of the graph.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.context import current, user_location
from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.dims import Dim, Expr, divide_exactly, equal, symbols_in
from monoplan.ir.errors import ArgumentError, TraceError, TypeRuleError
from monoplan.ir.graph import Loc, Value
from monoplan.ir.opdef import REGISTRY, OpDef
from monoplan.ir.types import (
    DType,
    TensorType,
    as_dtype,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i32,
    i64,
    plain_array,
    product,
    promote,
)

if TYPE_CHECKING:
    from monoplan.frontend.op_functions import OpMethods
else:
    OpMethods = object

_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "power": "pow",
    "maximum": "maximum", "minimum": "minimum", "matmul": "matmul", "equal": "eq", "not_equal": "ne",
    "less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge",
    "floor_divide": "floor_divide", "remainder": "remainder", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "left_shift": "left_shift", "right_shift": "right_shift",
}  # fmt: skip
_NUMBERS = (bool, int, float, np.generic, Expr)


def _operator(op: str) -> tuple[Callable[[Any, Any], Tensor], Callable[[Any, Any], Tensor]]:
    """The two methods of an operator: with the tensor on its left, and on its right."""
    return lambda self, other: binary(op, self, other), lambda self, other: binary(op, other, self)


class Tensor(OpMethods):
    """Concrete when `_array` is set, traced when `_value` is.

    Pointwise ops and reductions are methods too: `op_functions.py` makes them from the registry.
    """

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
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank

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

    # -- arithmetic, with numpy's broadcasting; Python numbers take the tensor's element type ----------

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __floordiv__, __rfloordiv__ = _operator("floor_divide")
    __mod__, __rmod__ = _operator("remainder")
    __matmul__, __rmatmul__ = _operator("matmul")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")
    __lshift__, __rlshift__ = _operator("left_shift")
    __rshift__, __rrshift__ = _operator("right_shift")
    __lt__, __gt__ = _operator("lt")[0], _operator("gt")[0]
    __le__, __ge__ = _operator("le")[0], _operator("ge")[0]

    def __eq__(self, other: Any) -> Any:
        return binary("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return binary("ne", self, other)

    def __pow__(self, other: Any) -> Tensor:
        square = self.dtype.is_float and isinstance(other, int | float) and other == 2
        return binary("mul", self, self) if square else binary("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return binary("pow", other, self)

    def __neg__(self) -> Tensor:
        return call("neg", self)

    def __abs__(self) -> Tensor:
        return call("abs", self)

    def __invert__(self) -> Tensor:
        return call("logical_not" if self.dtype == bool_ else "bitwise_not", self)

    __hash__ = object.__hash__

    # -- other shapes over the same elements; no copy in eager mode ------------------------------------

    def view(self, *shape: Any) -> Tensor:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return self._view("reshape", shape=_complete_shape(self.type, _sizes(shape)))

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two dimensions swapped."""
        axes = list(range(self.ndim))
        a, b = full_axis(dim0, self.ndim), full_axis(dim1, self.ndim)
        axes[a], axes[b] = axes[b], axes[a]
        return self._view("transpose", axes=tuple(axes))

    def permute(self, *dims: Any) -> Tensor:
        """Dimensions in another order."""
        return self._view("transpose", axes=tuple(full_axis(d, self.ndim) for d in _sizes(dims)))

    @property
    def T(self) -> Tensor:
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:
        return self.transpose(-2, -1)

    def narrow(self, dim: int, start: Dim, length: Dim) -> Tensor:
        """`length` elements of a dimension from `start`."""
        return self._view("slice", axis=full_axis(dim, self.ndim), start=start, length=length)

    def select(self, dim: int, index: Dim) -> Tensor:
        """One element of a dimension, which disappears."""
        size = self.shape[full_axis(dim, self.ndim)]
        at = size + index if isinstance(index, int) and index < 0 else index
        return self.narrow(dim, at, 1).squeeze(dim)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
        """The tensor cut into `chunks` pieces along a dimension (the last may be smaller)."""
        size = self.shape[full_axis(dim, self.ndim)]
        whole = divide_exactly(size, chunks)
        if whole is not None:
            return self.split([whole] * chunks, dim)
        return self.split(-(-size.__index__() // chunks), dim)

    def split(self, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
        """Pieces of the given size (the last may be smaller), or of the given sizes, along a dimension."""
        axis = full_axis(dim, self.ndim)
        if isinstance(split_size, int | Expr):
            n, step = self.shape[axis].__index__(), split_size.__index__()
            if step < 1:
                raise TypeRuleError(f"split: pieces must have 1 element or more, got {step}")
            sizes = [min(step, n - i) for i in range(0, n, step)] or [0]
        else:
            sizes = list(split_size)
        parts = self._view("split", sizes=tuple(sizes), axis=axis)
        return parts if isinstance(parts, tuple) else (parts,)

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """The slices along a dimension, without it."""
        return tuple(self.select(dim, i) for i in range(self.shape[full_axis(dim, self.ndim)].__index__()))

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a larger shape; -1 keeps a size."""
        sizes = _sizes(shape)
        lead = len(sizes) - self.ndim
        full = [self.shape[i - lead] if isinstance(s, int) and s == -1 else s for i, s in enumerate(sizes)]
        return self._view("expand", shape=tuple(full))

    def repeat(self, *sizes: Any) -> Tensor:
        """The tensor so many times along each dimension; further dimensions are put in front."""
        counts = _sizes(sizes)
        if len(counts) < self.ndim or any(isinstance(n, int) and n < 0 for n in counts):
            raise TypeRuleError(f"repeat: {list(counts)} does not fit {self.type}", where=user_location())
        shape = (*[1] * (len(counts) - self.ndim), *self.shape)
        pairs = [d for n, size in zip(counts, shape, strict=True) for d in (n, size)]
        apart = self.reshape(tuple(d for size in shape for d in (1, size)))
        joined = call("expand", apart, shape=tuple(pairs))
        return call("reshape", joined, shape=tuple(n * size for n, size in zip(counts, shape, strict=True)))

    def unsqueeze(self, dim: int) -> Tensor:
        at = full_axis(dim, self.ndim + 1)
        return self.reshape((*self.shape[:at], 1, *self.shape[at:]))

    def squeeze(self, dim: Any = None) -> Tensor:
        """Without dimensions of size 1: all of them, or those of `dim` that have this size."""
        chosen = range(self.ndim) if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
        axes = {full_axis(d, self.ndim or 1) for d in chosen}
        if dim is not None and any(isinstance(self.shape[a], Expr) for a in axes if self.ndim):
            raise TypeRuleError(
                f"squeeze: a dimension {dim} of {self.type} has a size that is known only at the call",
                where=user_location(),
                fix="use select(dim, 0) to take its first element",
            )
        return self.reshape(tuple(d for i, d in enumerate(self.shape) if i not in axes or not equal(d, 1)))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if self.ndim == 0:
            return self.reshape((1,))
        a, b = full_axis(start_dim, self.ndim), full_axis(end_dim, self.ndim)
        return self.reshape((*self.shape[:a], product(self.shape[a : b + 1]), *self.shape[b + 1 :]))

    def contiguous(self) -> Any:
        """The tensor itself: layout in memory is the compiler's business."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return _take(self, index if isinstance(index, tuple) else (index,))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeRuleError(
            "a tensor can't be changed by index",
            why="a traced tensor has no storage of its own",
            fix="x = F.index_put(x, (i,), v) changes elements by index, x = F.where(mask, v, x) by a mask; "
            "rows of a cache: F.kv_update",
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Says which function has the name of a method that a tensor does not have."""
            functions = sys.modules.get("monoplan.nn.functional")
            known = not name.startswith("_") and name in getattr(functions, "__all__", ())
            hint = f": use F.{name} (monoplan.nn.functional)" if known else ""
            raise AttributeError(f"a Tensor has no attribute {name!r}{hint}", name=name, obj=self)

    def _view(self, op: str, **attrs: Any) -> Any:
        """Applies an op whose result shares this tensor's storage."""
        result = call(op, self, **attrs)
        for view in result if isinstance(result, tuple) else (result,):
            _share(self, view)
        return result

    # -- other element types; last, since `int` and `float` are methods from here on -------------------

    def to(self, dtype: Any) -> Any:
        """In another element type ("cpu" is where tensors are anyway)."""
        if isinstance(dtype, str) and dtype == "cpu":
            return self
        target = as_dtype(dtype)
        return self if target == self.dtype else call("cast", self, dtype=target)

    def float(self) -> Tensor:
        return self.to(f32)

    def double(self) -> Tensor:
        return self.to(f64)

    def half(self) -> Tensor:
        return self.to(f16)

    def bfloat16(self) -> Tensor:
        return self.to(bf16)

    def int(self) -> Tensor:
        return self.to(i32)

    def long(self) -> Tensor:
        return self.to(i64)

    def type_as(self, other: Tensor) -> Tensor:
        return self.to(other.dtype)


def call(op: str | OpDef, *operands: Any, **attrs: Any) -> Any:
    """Applies an op: emits it under a tracer if an operand is traced (or a parameter), else runs it."""
    opdef = REGISTRY[op] if isinstance(op, str) else op
    tensors = [None if x is None else as_tensor(x) for x in operands]
    tracing = current()
    if tracing is None:
        return _run(opdef, tensors, attrs)
    traced = any(t is not None and tracing.is_graph_value(t) for t in tensors)
    if not tensors or traced or any(map(symbols_in, attrs.values())):  # a constant spread over a symbolic size
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
    if x is None:
        raise ArgumentError("a tensor is needed, got None", where=user_location())
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


def adapted(*operands: Any) -> list[Tensor]:
    """Operands as tensors; Python numbers take the element type of the first that is more than a number."""
    given = [x if isinstance(x, _NUMBERS) else as_tensor(x) for x in operands]
    like = next((x for x in given if isinstance(x, Tensor)), None)
    if like is None:
        like = given[-1] = as_tensor(given[-1])
    return [x if isinstance(x, Tensor) else scalar_like(x, like) for x in given]


def pointwise(op: str, *operands: Any, **attrs: Any) -> Any:
    """A pointwise op; Python numbers adapt to the tensors, integers become floats where it needs them."""
    opdef = REGISTRY[op]
    tensors = meeting(opdef, adapted(*operands))
    if opdef.floats and not any(t.dtype.is_float for t in tensors):
        tensors = [floating(t) for t in tensors]
    return call(opdef, *tensors, **attrs)


def meeting(opdef: OpDef, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Operands of a pointwise op; those without dimensions take the element type of the others, unless theirs is of a
    higher kind (a float beside integers): they do not widen it, as in PyTorch."""
    ranked = [t.dtype for t in opdef.promoted(tensors) if t.ndim]
    if not ranked or len(ranked) == len(tensors):
        return tensors
    common = promote(*ranked)
    return [
        t.to(common) if not t.ndim and _RANK[t.dtype.kind] <= _RANK[common.kind] and n not in opdef.own_type else t
        for n, t in zip(opdef.operand_names, tensors, strict=True)
    ]


_RANK = {"b": 0, "i": 1, "u": 1, "f": 2, "q": 2}


def binary(op: str, a: Any, b: Any) -> Any:
    """An operator: a pointwise op, a matrix product or a power, which integers to a constant power have too."""
    if op == "pow":
        return _power(a, b)
    if op in _BITS:
        x, y = adapted(a, b)
        bools = x.dtype == y.dtype == bool_
        return pointwise(_BITS[op][0] if bools else _BITS[op][1], x, y)
    return matmul(*adapted(a, b)) if op == "matmul" else pointwise(op, a, b)


_BITS = {"and": ("logical_and", "bitwise_and"), "or": ("logical_or", "bitwise_or"), "xor": ("ne", "bitwise_xor")}


def _power(a: Any, b: Any) -> Tensor:
    """a ** b; of integers in their own type, exact but for wrapping around as `*` does."""
    if not is_number(a) and isinstance(b, int | np.integer) and b >= 0:
        base = as_tensor(a)
        if not base.dtype.is_float:
            return _whole_power(base, int(b))
    x, y = adapted(a, b)
    fractions = isinstance(b, int | np.integer)  # a negative power
    if fractions or x.dtype.is_float or y.dtype.is_float or x.dtype == y.dtype == bool_:
        return pointwise("pow", x, y)
    return pointwise("integer_pow", x, y)


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


def is_number(x: Any) -> bool:
    """Whether it is a number that adapts to tensors: Python's, numpy's or a symbolic size."""
    return isinstance(x, _NUMBERS)


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


# -- shapes and indices as users write them: -1, negative axes, slices, Ellipsis, an index tensor ------


def _take(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """x[index]: basic indexing, and lookups by tensors of integers, as numpy and PyTorch have them."""
    index = tuple(i.__index__() if isinstance(i, np.integer) else _table(i) for i in index)
    masks = [isinstance(i, Tensor) and i.dtype == bool_ for i in index]
    index = tuple(j for i, mask in zip(index, masks, strict=True) for j in (_places(i) if mask else (i,)))
    used = sum(1 for i in index if i is not None and i is not Ellipsis)
    if used > x.ndim:
        raise TypeRuleError(f"{used} indices for a tensor of rank {x.ndim}", where=user_location())
    dots = [at for at, i in enumerate(index) if i is Ellipsis]
    if len(dots) > 1:
        raise TypeRuleError("an index may have one ...", where=user_location())
    if dots:
        at = dots[0]
        index = (*index[:at], *[slice(None)] * (x.ndim - used), *index[at + 1 :])
    if any(isinstance(i, Tensor) for i in index):
        return _look_up(x, index)
    axis = 0
    for i in index:
        if i is None:
            x = x.unsqueeze(axis)
        elif isinstance(i, slice):
            x = x if i == slice(None) else _slice(x, axis, i)
        else:
            x = x.select(axis, i)
            axis -= 1
        axis += 1
    return x


def _table(i: Any) -> Any:
    """An index as given, with arrays, lists and bools as tensors."""
    if isinstance(i, list | np.ndarray | bool | np.bool_):
        i = Tensor(i)
    if not (i is None or i is Ellipsis or isinstance(i, int | Expr | slice | Tensor)):
        raise _wrong_index(f"an index can't be a {type(i).__name__}")
    if isinstance(i, Tensor) and i.dtype.is_float:
        raise _wrong_index(f"an index must be integers, got {i.type}")
    return i


def _places(mask: Tensor) -> tuple[Tensor, ...]:
    """The indices of a mask's true elements, one tensor for each of its dimensions."""
    if mask.is_traced:
        raise _wrong_index(
            "a traced tensor can't be indexed by a mask",
            why="how many elements it chooses is known only when the plan runs",
            fix="keep all elements: F.where(mask, x, 0), F.masked_fill, or a sum over x * mask",
        )
    if not mask.ndim:
        raise _wrong_index("a single bool is no index")
    return tuple(Tensor(i) for i in np.nonzero(mask.numpy()))


def _wrong_index(what: str, why: str = "", fix: str = "") -> TypeRuleError:
    return TypeRuleError(
        what,
        where=user_location(),
        why=why,
        fix=fix or "use ints, slices, None, ..., tensors of integers; F.index_select, F.take_along or F.where",
    )


def _look_up(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    """x[index] with tensors among the indices; ints beside them are tensors too.

    The dimensions of the (broadcast) tensors stand where theirs were, if those were neighbours; else in front.
    """
    tables: list[tuple[int, Tensor]] = []  # axis and index
    axis, apart = 0, False
    for i in index:
        if i is None:
            x = x.unsqueeze(axis)
        elif isinstance(i, slice):
            x = x if i == slice(None) else _slice(x, axis, i)
        else:
            at = Tensor(i) if isinstance(i, int) else i if isinstance(i, Tensor) else scalar_like(i, Tensor(0))
            tables.append((axis, at))
        axis += 1
    axes = [a for a, _ in tables]
    apart = axes != list(range(axes[0], axes[0] + len(axes)))
    if apart:
        x = x.permute(*axes, *(a for a in range(x.ndim) if a not in axes))
        axes = list(range(len(axes)))
    first, sizes = axes[0], [x.shape[a] for a in axes]
    place = whole_index([t for _, t in tables], sizes)
    if len(axes) > 1:
        x = x.reshape((*x.shape[:first], product(sizes), *x.shape[axes[-1] + 1 :]))
    return call("gather", x, place, axis=first)


def whole_index(indices: Sequence[Tensor], sizes: Sequence[Dim]) -> Tensor:
    """One index into dimensions joined in row-major order, of one for each. Negative ones count from the end; what is
    out of range in its own dimension is -1, or as it was where there is only one."""
    place: Any = None
    inside: Any = None
    for i, n in zip(indices, sizes, strict=True):
        # What is out of range stays as it was: the error shows it.
        i = i if i.dtype.kind == "u" else pointwise("where", (i < 0) & (i + n >= 0), i + n, i)
        if len(indices) == 1:
            return i  # the lookup checks it
        i = i.to(i64)
        fits = (i >= 0) & (i < n)
        place, inside = (i, fits) if place is None else (place * n + i, inside & fits)
    return pointwise("where", inside, place, -1)


def _slice(x: Tensor, axis: int, s: slice) -> Tensor:
    size: Dim = x.shape[axis]
    step = 1 if s.step is None else s.step
    if not isinstance(step, int) or step == 0:
        raise TypeRuleError(f"the step of a slice is an int other than 0, got {step}", where=user_location())
    if step < 0:
        return _backwards(x, axis, s, step)
    start, stop = (_bound(given, default, size) for given, default in ((s.start, 0), (s.stop, size)))
    length = stop - start
    if step != 1:
        length = (length + (step - 1)) // step
    if isinstance(length, int):
        length = max(length, 0)
    return x._view("slice", axis=axis, start=start, length=length, step=step)


def _backwards(x: Tensor, axis: int, s: slice, step: int) -> Tensor:
    """A slice with a negative step, as numpy has it: from the last element on, unless it says where."""
    size: Dim = x.shape[axis]
    if isinstance(size, int):
        places = range(size)[s]
        length: Dim = len(places)
        return call("slice", x, axis=axis, start=places.start if length else 0, length=length, step=step)
    start = size - 1 if s.start is None else _bound(s.start, 0, size)
    stop = -1 if s.stop is None else _bound(s.stop, 0, size)
    length = (start - stop + (-step - 1)) // -step
    return call("slice", x, axis=axis, start=start, length=length, step=step)


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


def _complete_shape(t: TensorType, shape: tuple[Any, ...]) -> tuple[Dim, ...]:
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


def axes_of(dim: Any, rank: int) -> Any:
    """PyTorch's dim (None, an int, a list) as the attribute of a reduction; what has no dimensions takes 0 and -1."""
    axes = dim if dim is None or isinstance(dim, tuple) else tuple(dim) if isinstance(dim, list) else (dim,)
    return None if rank == 0 and axes is not None and set(axes) <= {0, -1} else axes


def _sizes(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """(2, 3) from reshape(2, 3) and from reshape((2, 3))."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
