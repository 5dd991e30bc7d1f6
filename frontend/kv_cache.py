"""KVCache: the keys and values of past tokens, one pair of tensors for each layer.

A cache is an argument of forward: `update` and `advance` work on concrete tensors and under a tracer, where
they become the graph's writes. Growing, cutting and selecting rows happen between calls, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from monoplan.frontend.pytree import NoOutline
from monoplan.frontend.tensor import Tensor, as_tensor, call
from monoplan.ir.dims import Dim, Expr
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import aligned, as_dtype, i32, i64

_TENSORS, _ARRAY = frozenset((Tensor,)), attrgetter("_array")


class Cache:
    """What forward needs of a cache: keys and values of each layer, the lengths of its rows, and where rows lie."""

    k: list[Tensor]
    v: list[Tensor]
    lengths: Tensor  # i32 [batch]
    table: Tensor | None = None  # i32 [batch, pages] of a cache in pages

    def update(self, layer: int, k: Any, v: Any, num_valid: Any = None) -> tuple[Tensor, Tensor]:
        """Writes k and v [batch, seq, kv_heads, head_dim] behind the past tokens; the layer's whole cache."""
        for cache, rows in ((self.k[layer], k), (self.v[layer], v)):
            cache.assign(call("kv_update", cache, rows, self.lengths, num_valid, self.table))
        return self.k[layer], self.v[layer]

    def positions(self, seq: Dim) -> Tensor:
        """The positions of the next `seq` tokens of each row: int64 [batch, seq]."""
        from monoplan.frontend.functional import arange

        return self.lengths.unsqueeze(1).to(i64) + arange(seq)  # type: ignore[no-any-return]

    def advance(self, n: Any) -> None:
        """Counts n more tokens: a number for all rows, or a tensor [batch]."""
        if isinstance(n, int | np.integer | Expr):
            self.lengths = self.lengths + n
        else:
            self.lengths = self.lengths + as_tensor(n).to(i32)

    @property
    def layers(self) -> int:
        return len(self.k)

    @property
    def kv_heads(self) -> Any:
        return self.k[0].shape[1]

    @property
    def head_dim(self) -> Any:
        return self.k[0].shape[3]

    @property
    def dtype(self) -> Any:
        return self.k[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.numpy().nbytes for t in (*self.k, *self.v))


class PagedKVCache(Cache):
    """Pages [pages, kv_heads, page, head_dim] of keys and values, which rows share out among themselves.

    The tokens of row b are in the pages table[b, 0], table[b, 1], … Who owns which page is for its user to know; see
    monoplan.serve.pages.
    """

    def __init__(self, k: list[Any], v: list[Any], table: Any, lengths: Any) -> None:
        self.k, self.v, self.table, self.lengths = list(k), list(v), table, lengths

    def tree_flatten(self) -> tuple[dict[str, Any], Any]:
        """Leaves by name (see pytree)."""
        return {"k": list(self.k), "v": list(self.v), "table": self.table, "lengths": self.lengths}, ()

    @classmethod
    def tree_unflatten(cls, parts: dict[str, Any], meta: Any) -> PagedKVCache:
        """A cache from its parts, which may be tensors, traced tensors or specs."""
        return cls(parts["k"], parts["v"], parts["table"], parts["lengths"])

    def tree_outline(self, arrays: list[Any]) -> Any:
        """The same for a call like an earlier one (see pytree.outline)."""
        tensors = (*self.k, *self.v, self.table, self.lengths)
        if not _TENSORS.issuperset(map(type, tensors)):
            raise NoOutline
        arrays += map(_ARRAY, tensors)
        return PagedKVCache, len(self.k), len(self.v)


class KVCache(Cache):
    """Keys and values [batch, kv_heads, capacity, head_dim] of each layer; row b holds lengths[b] tokens."""

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int = 256,
        dtype: Any = "f32",
        limit: int | None = None,
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
        for name, n in sizes.items():
            if not isinstance(n, int) or n < 1:
                raise ArgumentError(f"KVCache: {name} must be a whole number of 1 or more, got {n!r}")
        if limit is not None and limit < 1:
            raise ArgumentError(f"KVCache: limit must be 1 or more, got {limit}")
        self.limit = limit
        shape = (batch, kv_heads, capacity if limit is None else min(capacity, limit), head_dim)
        kind = as_dtype(dtype).numpy
        self.k: list[Tensor] = [Tensor(aligned(shape, kind, zero=True)) for _ in range(layers)]
        self.v: list[Tensor] = [Tensor(aligned(shape, kind, zero=True)) for _ in range(layers)]
        self.lengths = Tensor(np.zeros(batch, np.int32))

    # -- between calls, on the host -----------------------------------------------------------------------

    @property
    def batch(self) -> Any:
        return self.k[0].shape[0]

    @property
    def capacity(self) -> Any:
        return self.k[0].shape[2]

    def reserve(self, extra: int) -> None:
        """Makes room for `extra` more tokens of the longest row; capacity doubles, up to the limit."""
        longest = max(self.lengths.numpy().tolist())
        needed = longest + extra
        if needed <= self.capacity:
            return
        if self.limit is not None and needed > self.limit:
            raise ArgumentError(
                f"KVCache: {longest} tokens and {extra} more need {needed} places, the limit is {self.limit}",
                fix="raise the limit, shorten the prompt, generate fewer tokens, or truncate() the cache",
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        self._resize(capacity if self.limit is None else min(capacity, self.limit))

    def _resize(self, capacity: int) -> None:
        for tensors in (self.k, self.v):
            for i, t in enumerate(tensors):
                old = t.numpy()
                grown = aligned((*old.shape[:2], capacity, old.shape[3]), old.dtype, zero=True)
                grown[:, :, : old.shape[2]] = old
                tensors[i] = Tensor(grown)  # one layer at a time: the old arrays are freed as we go

    def reset(self) -> None:
        """Forgets all tokens; the storage stays."""
        self.lengths = Tensor(np.zeros(self.batch, np.int32))

    def truncate(self, n: Any) -> None:
        """Forgets all but the first n tokens of each row (a number, or one for each row)."""
        keep = np.broadcast_to(np.asarray(n), (self.batch,))
        if (keep < 0).any():
            raise ArgumentError(f"KVCache: can't keep {keep.min()} tokens")
        self.lengths = Tensor(np.minimum(self.lengths.numpy(), keep).astype(np.int32))

    def clone(self) -> KVCache:
        """A copy that shares nothing."""
        return self._map(lambda a: a.copy())

    def select(self, rows: Sequence[int]) -> KVCache:
        """A cache of these rows, in this order; a row may be named several times (beams), or not at all."""
        index = np.asarray(rows, np.int64).reshape(-1)
        bad = index[(index < 0) | (index >= self.batch)]
        if bad.size or not index.size:
            got = f"row {bad[0]}" if bad.size else "no rows"
            raise ArgumentError(f"KVCache: select got {got}, the cache has rows 0 to {self.batch - 1}")
        return self._map(lambda a: a[index])

    def _map(self, change: Any) -> KVCache:
        parts = {
            "k": [Tensor(change(t.numpy())) for t in self.k],
            "v": [Tensor(change(t.numpy())) for t in self.v],
            "lengths": Tensor(change(self.lengths.numpy())),
        }
        return self.tree_unflatten(parts, (self.limit,))

    # -- as an argument -----------------------------------------------------------------------------------

    def tree_flatten(self) -> tuple[dict[str, Any], Any]:
        """Leaves by name, and what else a cache is made of (see pytree)."""
        return {"k": list(self.k), "v": list(self.v), "lengths": self.lengths}, (self.limit,)

    def tree_outline(self, arrays: list[Any]) -> Any:
        """The same for a call like an earlier one (see pytree.outline): a cache comes again with every token."""
        tensors = (*self.k, *self.v, self.lengths)
        if type(self) is not KVCache or not _TENSORS.issuperset(map(type, tensors)):
            raise NoOutline
        arrays += map(_ARRAY, tensors)
        return KVCache, len(self.k), len(self.v), self.limit

    def without_limit(self) -> KVCache:
        """This cache, tensor for tensor, as a plan takes it: the limit is the host's business."""
        if type(self) is not KVCache:
            return KVCache.tree_unflatten(self.tree_flatten()[0], (None,))
        made = KVCache.__new__(KVCache)
        made.k, made.v, made.lengths, made.limit = self.k, self.v, self.lengths, None
        return made

    @classmethod
    def tree_unflatten(cls, parts: dict[str, Any], meta: Any) -> KVCache:
        """A cache from its parts, which may be tensors, traced tensors or specs."""
        made = cls.__new__(cls)
        made.k, made.v, made.lengths = list(parts["k"]), list(parts["v"]), parts["lengths"]
        (made.limit,) = meta
        return made

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f", limit={self.limit}"
        return (
            f"KVCache(layers={self.layers}, batch={self.batch}, kv_heads={self.kv_heads}, "
            f"head_dim={self.head_dim}, capacity={self.capacity}, dtype={self.dtype}{limit})"
        )
