"""Parameter: a tensor of the model's state that knows how it is sharded between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import LoadError
from monoplan.ir.types import as_dtype


class Parameter(Tensor):
    """A learned tensor. With tp_size > 1 it holds shard tp_rank of a full tensor cut along tp_dim."""

    __slots__ = ("tp_dim", "tp_rank", "tp_size")

    def __init__(self, data: Any, dtype: Any = None, *, tp_dim: int = 0, tp_rank: int = 0, tp_size: int = 1) -> None:
        if tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise LoadError(f"tp_rank {tp_rank} is not a rank of a group of {tp_size}")
        super().__init__(data, dtype)
        if not 0 <= tp_dim < max(self.ndim, 1):
            raise LoadError(f"tp_dim {tp_dim} is not a dimension of {self.type}")
        self.tp_dim, self.tp_rank, self.tp_size = tp_dim, tp_rank, tp_size

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any = "f32", **tp: int) -> Parameter:
        """A parameter of zeros, to be loaded later."""
        return cls(np.zeros(shape, as_dtype(dtype).numpy), **tp)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that this is a shard of."""
        shape = self.numpy().shape
        return tuple(n * self.tp_size if i == self.tp_dim else n for i, n in enumerate(shape))

    def shard(self, full: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """This rank's part of a full tensor."""
        if self.tp_size == 1:
            return full
        size = self.numpy().shape[self.tp_dim]
        index = [slice(None)] * full.ndim
        index[self.tp_dim] = slice(self.tp_rank * size, (self.tp_rank + 1) * size)
        return full[tuple(index)]

    def load(self, data: Any) -> None:
        """Takes its values (its shard, of a full tensor) from a tensor or array, in its own dtype."""
        array = data.numpy() if isinstance(data, Tensor) else np.asarray(data)
        own = self.numpy()
        if array.shape == self.full_shape:
            array = self.shard(array)
        elif array.shape != own.shape:
            shard = f" (or the shard {list(own.shape)})" if self.tp_size > 1 else ""
            raise LoadError(f"expected {list(self.full_shape)}{shard}, got {list(array.shape)}")
        # A memory-mapped tensor of the right type is kept as it is: it costs no memory until it is read.
        same = array.dtype == own.dtype and isinstance(array, np.memmap | np.ndarray) and not array.flags.writeable
        self._array = array if same else array.astype(own.dtype)

    def load_blob(self, blob: Any) -> None:
        """Takes its values from raw bytes of its own dtype and shape."""
        self._array = from_blob(blob, self)

    def __repr__(self) -> str:
        return f"Parameter({self.type})"


def from_blob(blob: Any, like: Tensor, name: str = "") -> np.ndarray[Any, Any]:
    """An array of the type of `like` from bytes, a buffer or an array, copied."""
    own = like.numpy()
    if isinstance(blob, np.ndarray):  # buffers of bf16 have no format that memoryview knows
        raw = np.ascontiguousarray(blob).reshape(-1).view(np.uint8)
    else:
        raw = np.frombuffer(memoryview(blob).cast("B"), np.uint8)
    if raw.nbytes != own.nbytes:
        where = f"{name}: " if name else ""
        raise LoadError(f"{where}expected {own.nbytes} bytes for {like.type}, got {raw.nbytes}")
    return raw.view(own.dtype).reshape(own.shape).copy()
