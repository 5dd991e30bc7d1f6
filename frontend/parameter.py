"""Parameter: a tensor of the model's state that knows how it is sharded between ranks."""

from __future__ import annotations

import contextlib
import contextvars
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from monoplan.frontend.tensor import Tensor
from monoplan.ir.dims import Dim
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Array, DType, Part, TensorType, as_dtype, plain_array

_changes = 0


def changes() -> int:
    """How often a tensor of some module got other values or gave its place to another one, but for changes in place:
    whoever compiled since the last of them has all weights."""
    return _changes


def note_change() -> None:
    global _changes
    _changes += 1


class Parameter(Tensor):
    """A learned tensor. With tp_size > 1 it holds shard tp_rank of a full tensor cut along tp_dim.

    It may be deferred: then it knows its type, and reads its values from a checkpoint when they are wanted.
    """

    __slots__ = ("tp_dim", "tp_rank", "tp_size", "_stored", "_source", "_deferred_type", "_origin", "_blocks")

    def __init__(self, data: Any, dtype: Any = None, *, tp_dim: int = 0, tp_rank: int = 0, tp_size: int = 1) -> None:
        if tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise LoadError(f"tp_rank {tp_rank} is not a rank of a group of {tp_size}")
        self._stored: np.ndarray[Any, Any] | None = None
        self._source: Callable[..., Any] | None = None
        self._deferred_type: TensorType | None = None
        self._origin: Callable[[], Any] | None = None
        self._blocks: Callable[..., Any] | None = None
        super().__init__(data, dtype)
        if not 0 <= tp_dim < max(self.ndim, 1):
            raise LoadError(f"tp_dim {tp_dim} is not a dimension of {self.type}")
        self.tp_dim, self.tp_rank, self.tp_size = tp_dim, tp_rank, tp_size

    @property
    def _array(self) -> np.ndarray[Any, Any] | None:  # type: ignore[override]
        if self._stored is None and self._source is not None:
            self._stored = self.read()
        return self._stored

    @_array.setter
    def _array(self, array: np.ndarray[Any, Any] | None) -> None:
        self._stored, self._source = array, None
        note_change()

    @property
    def type(self) -> TensorType:
        """Element type and shape; asking for it reads nothing."""
        if self._source is not None and self._deferred_type is not None:
            return self._deferred_type
        return super().type

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def origin(self) -> Any:
        """Where its values come from, while they are still there; None if that is not known, or not all are its own."""
        return self._origin() if self._origin is not None and self.is_deferred and self.tp_size == 1 else None

    @property
    def is_deferred(self) -> bool:
        """Whether its values are still in the checkpoint."""
        return self._stored is None and self._source is not None

    def defer(
        self,
        source: Callable[..., Any],
        origin: Callable[[], Any] | None = None,
        low_bit: DType | None = None,
        blocks: Callable[..., Any] | None = None,
    ) -> None:
        """Takes its values from `source()`, a full tensor of any float type, each time they are wanted.

        With `low_bit` it is a weight of that type from now on: `blocks(part)` gives its rows as bytes, for plans, and
        `source` what they mean. (It may also be another float type, which needs no blocks.)

        The array that `source` gives is nobody else's. `source(part)` gives a Part of the full tensor alone. `origin()`
        says which file it is from (models/load/weight_file.py): what was made of it may be found again by that.
        """
        kept = self.type if low_bit is None else self.type.with_dtype(low_bit)
        self._stored, self._source, self._deferred_type, self._origin = None, source, kept, origin
        self._blocks = blocks
        note_change()

    def read(self, convert: Callable[[Any, Any], Any] | None = None, part: Part | None = None) -> np.ndarray[Any, Any]:
        """Its values, or a part of them; those of a deferred parameter are read anew and not kept, as a compiler wants
        them once. `convert(array, dtype)` may be faster than numpy's astype."""
        if self._stored is not None or self._source is None or self._deferred_type is None:
            return self.numpy() if part is None else part.cut(self.numpy())
        if self.tp_size > 1:
            own = self._own_part()
            if part is None or part.axis == own.axis:
                inside = part or Part(own.axis, 0, own.length)
                array = self._source(Part(own.axis, own.start + inside.start, inside.length))
            else:
                array = part.cut(self._source(own))
        else:
            array = self._source() if part is None else self._source(part)
        array = np.asarray(array)
        wanted = self._deferred_type.dtype.numpy
        if array.dtype == wanted:
            return array
        return array.astype(wanted) if convert is None else convert(array, wanted)  # type: ignore[no-any-return]

    def read_blocks(self, part: Part | None = None) -> np.ndarray[Any, Any]:
        """A weight of a low-bit type as the file has it: [rows, bytes], or a part of that."""
        assert self._blocks is not None
        own = self._own_part() if self.tp_size > 1 else None
        if own is None or part is None or own.axis == part.axis:
            inside = (
                part if own is None else own if part is None else Part(own.axis, own.start + part.start, part.length)
            )
            return self._blocks(inside)  # type: ignore[no-any-return]
        return low_bit_part(self._blocks(own), part, self.type.dtype)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any = "f32", **tp: int) -> Parameter:
        """A parameter of zeros, to be loaded later."""
        return cls(np.zeros(shape, as_dtype(dtype).numpy), **tp)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this is a shard of."""
        shape = [int(n) for n in self.type.shape]  # type: ignore[call-overload]
        return tuple(n * self.tp_size if i == self.tp_dim else n for i, n in enumerate(shape))

    def shard(self, full: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """This rank's part of a full tensor."""
        return full if self.tp_size == 1 else self._own_part().cut(full)

    def _own_part(self) -> Part:
        size = int(self.type.shape[self.tp_dim])  # type: ignore[call-overload]
        return Part(self.tp_dim, self.tp_rank * size, size)

    def load(self, data: Any) -> None:
        """Takes its values (its shard, of a full tensor) from a tensor or array, in its own dtype."""
        array = data.numpy() if isinstance(data, Tensor) else plain_array(data)
        own = self.numpy()
        if array.shape == self.full_shape:
            array = self.shard(array)
        elif array.shape != own.shape:
            shard = f" (or the shard {list(own.shape)})" if self.tp_size > 1 else ""
            raise LoadError(f"expected {list(self.full_shape)}{shard}, got {list(array.shape)}")
        self._array = array.astype(own.dtype)  # a copy: the array is its owner's, or a file's that others may cut

    def load_blob(self, blob: Any) -> None:
        """Takes its values from raw bytes of its own dtype and shape."""
        self._array = from_blob(blob, self)

    def __repr__(self) -> str:
        return f"Parameter({self.type})"


def low_bit_part(rows: np.ndarray[Any, Any], part: Part | None, dtype: DType) -> np.ndarray[Any, Any]:
    """A part of a weight whose rows are blocks of bytes; along a row it is made of whole blocks."""
    if part is None or part.axis == 0:
        return rows if part is None else part.cut(rows)
    if part.start % dtype.block or part.length % dtype.block:
        what = f"{part.length} columns from {part.start} are not whole blocks of {dtype.block} of {dtype}"
        raise ArgumentError(what, fix="use fewer ranks, or load the model in another type (dtype='bfloat16')")
    size = dtype.block_bytes
    return Part(1, part.start // dtype.block * size, part.length // dtype.block * size).cut(rows)


def from_blob(blob: Any, like: Tensor, name: str = "") -> np.ndarray[Any, Any]:
    """An array of the type of `like` from bytes, a buffer or an array, copied."""
    own = like.numpy()
    if isinstance(blob, np.ndarray):  # buffers of bf16 have no format that memoryview knows
        raw = np.ascontiguousarray(plain_array(blob)).reshape(-1).view(np.uint8)
    else:
        raw = np.frombuffer(memoryview(blob).cast("B"), np.uint8)
    if raw.nbytes != own.nbytes:
        where = f"{name}: " if name else ""
        raise LoadError(f"{where}expected {own.nbytes} bytes for {like.type}, got {raw.nbytes}")
    return raw.view(own.dtype).reshape(own.shape).copy()


# Initial values of parameters, as PyTorch draws them, from one seedable numpy generator.


_generator: Any = None  # numpy's; made when it is used first, since importing it takes a while
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


def _untouched(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros in fresh pages. For np.zeros the C library clears memory that it has used before."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < mmap.PAGESIZE:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def uniform(shape: tuple[int, ...], bound: float, dtype: Any) -> Array:
    """Values in [-bound, bound)."""
    if _skipped.get():
        return _untouched(shape, as_dtype(dtype).numpy)
    values = _random().random(shape, dtype=np.float32)
    values *= np.float32(2 * bound)
    values -= np.float32(bound)
    return values.astype(as_dtype(dtype).numpy, copy=False)  # type: ignore[no-any-return]


def normal(shape: tuple[int, ...], dtype: Any) -> Array:
    """Values with mean 0 and standard deviation 1."""
    if _skipped.get():
        return _untouched(shape, as_dtype(dtype).numpy)
    return _random().standard_normal(shape, dtype=np.float32).astype(as_dtype(dtype).numpy, copy=False)  # type: ignore[no-any-return]


def _random() -> Any:
    if _generator is None:
        manual_seed(0)
    return _generator


def linear_bound(in_features: int) -> float:
    """The bound that PyTorch's Linear uses for weight and bias."""
    return 1 / math.sqrt(in_features) if in_features > 0 else 0.0


def layer_dtype(name: str, dtype: Any, device: Any, **sizes: int) -> DType:
    """The element type of a layer's parameters; its sizes and its device are checked too."""
    check_size(name, **sizes)
    kind = getattr(device, "type", device)
    if kind is not None and str(kind).split(":")[0] != "cpu":  # parameters live in host memory
        raise ArgumentError(
            f"{name}: device={device!r} is not a place for parameters",
            fix='leave device out, and choose where to run by mp.compile(model, target="cuda")',
        )
    found = as_dtype("f32" if dtype is None else dtype)
    if not found.is_float:
        raise ArgumentError(f"{name}: parameters are floating point, got dtype {found}")
    return found


def check_size(name: str, **sizes: int) -> None:
    """Sizes of layers are whole numbers of 1 or more."""
    for what, n in sizes.items():
        if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
            raise ArgumentError(f"{name}: {what} must be a whole number of 1 or more, got {n!r}")
