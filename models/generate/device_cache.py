"""A KV cache that lives on a GPU: what KVCache does between calls, done by the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import DType

STEP = 64  # capacities are multiples of it, up to the limit


class DeviceCache:
    """Keys and values [batch, kv_heads, capacity, head_dim] of each layer in device memory; lengths on the host."""

    def __init__(
        self,
        device: Any,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: DType,
        limit: int,
    ) -> None:
        self.device, self.layers, self.batch, self.kv_heads, self.head_dim = device, layers, batch, kv_heads, head_dim
        self.dtype, self.limit = dtype, limit
        self.capacity = min(-(-max(capacity, 1) // STEP) * STEP, limit)
        self.memory = [self._zeros(self.capacity) for _ in range(2 * layers)]  # all keys, then all values
        self.lengths = Tensor(np.zeros(batch, np.int32))
        self.loops: dict[Any, Any] = {}  # what was captured for this memory, by its owner's key

    @property
    def row(self) -> int:
        """Bytes of one token in one head."""
        return self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return 2 * self.layers * self.batch * self.kv_heads * self.capacity * self.row

    @property
    def addresses(self) -> list[int]:
        """Of the keys of all layers, then of their values."""
        return [int(m.address) for m in self.memory]

    def _zeros(self, capacity: int, batch: int | None = None) -> Any:
        nbytes = (self.batch if batch is None else batch) * self.kv_heads * capacity * self.row
        memory = self.device.allocate(nbytes)
        self.device.clear(memory.address, nbytes)  # what no token wrote is multiplied by 0, so it must be finite
        return memory

    def reserve(self, extra: int) -> None:
        """Makes room for `extra` more tokens of the longest row; capacity doubles, up to the limit."""
        longest = int(self.lengths.numpy().max())
        needed = longest + extra
        if needed <= self.capacity:
            return
        if needed > self.limit:
            raise ArgumentError(
                f"KV cache: {longest} tokens and {extra} more need {needed} places, the limit is {self.limit}",
                fix="shorten the prompt, or generate fewer tokens",
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._replace(min(capacity, self.limit), range(self.batch))

    def select(self, rows: Sequence[int]) -> DeviceCache:
        """This cache with these rows only, in this order."""
        self._replace(self.capacity, rows)
        self.lengths = Tensor(self.lengths.numpy()[list(rows)])
        self.batch = len(rows)
        return self

    def _replace(self, capacity: int, rows: Sequence[int]) -> None:
        """New memory with the tokens of some rows, one tensor at a time; nothing may be under way."""
        self.device.synchronize()
        self.loops.clear()
        lengths = self.lengths.numpy()
        for i, old in enumerate(self.memory):
            new = self._zeros(capacity, len(rows))
            for at, row in enumerate(rows):
                self.device.copy_rows(
                    new.address + at * self.kv_heads * capacity * self.row,
                    capacity * self.row,
                    old.address + row * self.kv_heads * self.capacity * self.row,
                    self.capacity * self.row,
                    int(lengths[row]) * self.row,
                    self.kv_heads,
                )
            self.device.synchronize()  # the old memory is given back now
            self.memory[i] = new
        self.capacity = capacity

    def truncate(self, n: Any) -> None:
        """Forgets all but the first n tokens of each row (a number, or one for each row)."""
        keep = np.broadcast_to(np.asarray(n), (self.batch,))
        self.lengths = Tensor(np.minimum(self.lengths.numpy(), keep).astype(np.int32))

    def on_host(self) -> KVCache:
        """A copy in numpy arrays; places behind a row's length are 0."""
        made = KVCache(self.layers, self.batch, self.kv_heads, self.head_dim, self.capacity, self.dtype, self.limit)
        for t, memory in zip((*made.k, *made.v), self.memory, strict=True):
            self.device.download(t.numpy(), memory.address)
        self.device.synchronize()
        for t in (*made.k, *made.v):
            for row, length in enumerate(self.lengths.numpy()):
                t.numpy()[row, :, length:] = 0
        made.lengths = Tensor(self.lengths.numpy().copy())
        return made

    @classmethod
    def from_host(cls, device: Any, cache: KVCache, limit: int) -> DeviceCache:
        """The same tokens on the device."""
        size = cache.layers, cache.batch, cache.kv_heads, cache.head_dim, cache.capacity
        made = cls(device, *size, cache.dtype, limit)
        for t, memory in zip((*cache.k, *cache.v), made.memory, strict=True):
            padded = np.zeros((*t.shape[:2], made.capacity, made.head_dim), t.numpy().dtype)
            padded[:, :, : min(t.shape[2], made.capacity)] = t.numpy()[:, :, : made.capacity]
            device.upload(memory.address, padded)
            device.synchronize()
        made.lengths = Tensor(cache.lengths.numpy().copy())
        return made
