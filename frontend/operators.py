"""The methods of Tensor that are plain applications of ops: arithmetic, comparisons, shapes, reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monoplan.frontend.indexing import axes_of, complete_shape, full_axis, take
from monoplan.ir.dims import Dim, Expr, divide_exactly
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.types import DType, TensorType, as_dtype, bf16, f16, f32, f64, i32, i64, product

if TYPE_CHECKING:
    from monoplan.frontend.tensor import Tensor


class Applies:
    """What the mixins below need of a Tensor."""

    __slots__ = ()

    @property
    def type(self) -> TensorType:
        raise NotImplementedError

    def _call(self, op: str, *operands: Any, **attrs: Any) -> Any:
        raise NotImplementedError

    def _binary(self, op: str, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def _view(self, op: str, **attrs: Any) -> Any:
        """Applies an op whose result shares this tensor's storage."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return self.type.rank


class Arithmetic(Applies):
    """Operators, with numpy's broadcasting; Python numbers take the tensor's element type."""

    __slots__ = ()

    def __add__(self, other: Any) -> Tensor:
        return self._binary("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self._binary("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return self._binary("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._binary("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self._binary("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return self._binary("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return self._binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._binary("div", other, self)

    def __pow__(self, other: Any) -> Tensor:
        square = self.dtype.is_float and isinstance(other, int | float) and other == 2
        return self._binary("mul", self, self) if square else self._binary("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return self._binary("pow", other, self)

    def __neg__(self) -> Tensor:
        return self._call("neg", self)

    def __abs__(self) -> Tensor:
        return self._call("abs", self)

    def __matmul__(self, other: Any) -> Tensor:
        return self._binary("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return self._binary("matmul", other, self)

    def __eq__(self, other: Any) -> Any:
        return self._binary("eq", self, other)

    def __ne__(self, other: Any) -> Any:
        return self._binary("ne", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return self._binary("lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return self._binary("le", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return self._binary("gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return self._binary("ge", self, other)

    def __and__(self, other: Any) -> Tensor:
        return self._binary("logical_and", self, other)

    def __or__(self, other: Any) -> Tensor:
        return self._binary("logical_or", self, other)

    def __invert__(self) -> Tensor:
        return self._call("logical_not", self)

    __hash__ = object.__hash__

    def to(self, dtype: Any) -> Any:
        """In another element type ("cpu" is where tensors are anyway)."""
        if isinstance(dtype, str) and dtype == "cpu":
            return self
        target = as_dtype(dtype)
        return self if target == self.dtype else self._call("cast", self, dtype=target)

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

    def sum(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._call("sum", self, axes=axes_of(dim), keepdims=keepdim)

    def mean(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        x = self if self.dtype.is_float else self.to(f32)
        return self._call("mean", x, axes=axes_of(dim), keepdims=keepdim)

    def max(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._call("max", self, axes=axes_of(dim), keepdims=keepdim)

    def min(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._call("min", self, axes=axes_of(dim), keepdims=keepdim)

    def argmax(self, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self._call("argmax", self, axis=dim, keepdims=keepdim)


class Shapes(Applies):
    """Other shapes over the same elements; no copy in eager mode."""

    __slots__ = ()

    def view(self, *shape: Any) -> Tensor:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one size may be -1."""
        return self._view("reshape", shape=complete_shape(self.type, _sizes(shape)))

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

    def unsqueeze(self, dim: int) -> Tensor:
        at = full_axis(dim, self.ndim + 1)
        return self.reshape((*self.shape[:at], 1, *self.shape[at:]))

    def squeeze(self, dim: int) -> Tensor:
        at = full_axis(dim, self.ndim)
        return self.reshape((*self.shape[:at], *self.shape[at + 1 :]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        if self.ndim == 0:
            return self.reshape((1,))
        a, b = full_axis(start_dim, self.ndim), full_axis(end_dim, self.ndim)
        return self.reshape((*self.shape[:a], product(self.shape[a : b + 1]), *self.shape[b + 1 :]))

    def contiguous(self) -> Any:
        """The tensor itself: layout in memory is the compiler's business."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return take(self, index if isinstance(index, tuple) else (index,))

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeRuleError(
            "a tensor can't be changed by index",
            why="a traced tensor has no storage of its own",
            fix="build it with F.where or F.cat, write rows of a cache with F.kv_update",
        )


def _sizes(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """(2, 3) from reshape(2, 3) and from reshape((2, 3))."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
