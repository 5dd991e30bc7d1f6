"""KVCache: the keys and values of past tokens, one pair of tensors for each layer.

A cache is an argument of forward: `update` and `advance` work on concrete tensors and under a tracer, where
they become the graph's writes. Growing, cutting and selecting rows happen between calls, on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from monoplan.frontend.context import current
from monoplan.frontend.pytree import NoOutline
from monoplan.frontend.tensor import Tensor, as_tensor, call
from monoplan.ir.cache_rows import row_numbers, row_width
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
        """Writes k and v [batch, seq, kv_heads, head_dim] behind the past tokens; the layer's whole cache. A cache
        without values takes None for v: the values are in the keys."""
        caches = self.k[layer], self.v[layer] if self.v else self.k[layer]
        for cache, rows in zip(caches, (k, v) if self.v else (k,), strict=False):
            cache.assign(call("kv_update", cache, rows, self.past(layer), num_valid, self.table))
        return caches

    def past(self, layer: int) -> Tensor:
        """How many tokens of each row a layer's cache has: i32 [batch]."""
        return self.lengths

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
        return row_numbers(self.k[0].shape[3], self.dtype)

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


def grown(longest: int, extra: int, capacity: int, limit: int | None) -> int:
    """The capacity of a cache with room for `extra` tokens behind the longest row: doubled, up to the limit."""
    needed = longest + extra
    if limit is not None and needed > max(limit, capacity):
        raise ArgumentError(
            f"KVCache: {longest} tokens and {extra} more need {needed} places, the limit is {limit}",
            fix="raise the limit, shorten the prompt, generate fewer tokens, or truncate() the cache",
        )
    made = capacity
    while made < needed:
        made *= 2
    return made if limit is None or made == capacity else min(made, limit)


class KVCache(Cache):
    """Keys and values [batch, kv_heads, capacity, head_dim] of each layer; row b holds lengths[b] tokens.

    values=False: there are keys alone, in which a model finds the values (latent attention).
    In i8 the last dimension is head_dim + 4: codes, and behind them the scale of each head and token.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int = 256,
        dtype: Any = "f32",
        limit: int | None = None,
        values: bool = True,
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
        for name, n in sizes.items():
            if not isinstance(n, int) or n < 1:
                raise ArgumentError(f"KVCache: {name} must be a whole number of 1 or more, got {n!r}")
        if limit is not None and limit < 1:
            raise ArgumentError(f"KVCache: limit must be 1 or more, got {limit}")
        self.limit = limit
        rows, kind = capacity if limit is None else min(capacity, limit), as_dtype(dtype).numpy
        width = row_width(head_dim, as_dtype(dtype))
        shapes = [(batch, kv_heads, self._first_capacity(layer, rows), width) for layer in range(layers)]
        self.k: list[Tensor] = [Tensor(aligned(shape, kind, zero=True)) for shape in shapes]
        self.v: list[Tensor] = [Tensor(aligned(shape, kind, zero=True)) for shape in shapes if values]
        self.lengths = Tensor(np.zeros(batch, np.int32))

    # -- between calls, on the host -----------------------------------------------------------------------

    def _first_capacity(self, layer: int, wanted: int) -> int:
        return wanted

    @property
    def batch(self) -> Any:
        return self.k[0].shape[0]

    @property
    def capacity(self) -> Any:
        return self.k[0].shape[2]

    def reserve(self, extra: int) -> None:
        """Makes room for `extra` more tokens of the longest row; capacity doubles, up to the limit."""
        capacity = grown(max(self.lengths.numpy().tolist()), extra, self.capacity, self.limit)
        if capacity > self.capacity:
            self._resize(capacity, range(self.layers))

    def _resize(self, capacity: int, layers: Iterable[int]) -> None:
        for tensors in filter(None, (self.k, self.v)):
            for i in layers:
                old = tensors[i].numpy()
                grown = aligned((*old.shape[:2], capacity, old.shape[3]), old.dtype, zero=True)
                grown[:, :, : old.shape[2]] = old
                tensors[i] = Tensor(grown)  # one layer at a time: the old arrays are freed as we go

    def slide(self, counts: Any) -> None:
        """Makes room for so many tokens (of each row, or of all) where layers keep a window: see WindowKVCache."""

    def can_keep(self, n: int) -> bool:
        """Whether the cache can be cut to the first n tokens of each row."""
        return True

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
        parts, meta = self.tree_flatten()
        changed = {
            name: [Tensor(change(t.numpy())) for t in part] if isinstance(part, list) else Tensor(change(part.numpy()))
            for name, part in parts.items()
        }
        return self.tree_unflatten(changed, meta)

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


STEP = 1024  # windows begin at its multiples: kernels then cut the keys as in a cache that has all of them
MARGIN = 64  # tokens that may be taken back at any time, as drafts are


class WindowKVCache(KVCache):
    """A KVCache whose `bounded` layers keep what a window of `window` tokens sees, and little more.

    A bounded layer has the tokens from starts[b] on, a multiple of STEP, at the beginning of its arrays. Before tokens
    are written, `slide` drops those that no later one sees; a row can then be cut only to a length whose window is
    still there.
    """

    _past: Tensor | None = None

    def __init__(self, *sizes: Any, window: int, bounded: Sequence[int], **options: Any) -> None:
        self.window, self.bounded = window, tuple(bounded)
        super().__init__(*sizes, **options)
        self.starts = Tensor(np.zeros(self.batch, np.int32))

    @property
    def most(self) -> int:
        """Positions of a bounded layer that are enough for one token after the other."""
        return self.window + MARGIN + 2 * STEP

    def _first_capacity(self, layer: int, wanted: int) -> int:
        return min(wanted, self.most) if layer in self.bounded else wanted

    @property
    def _whole(self) -> list[int]:
        """The layers that keep all tokens."""
        return [layer for layer in range(self.layers) if layer not in self.bounded]

    @property
    def capacity(self) -> Any:
        """Positions of the layers that keep all tokens; where there is none, those that there may be."""
        return self.k[self._whole[0]].shape[2] if self._whole else self.limit or 2**31 - 1

    def _resize(self, capacity: int, layers: Iterable[int]) -> None:
        super()._resize(capacity, [layer for layer in layers if layer not in self.bounded])

    def past(self, layer: int) -> Tensor:
        if layer not in self.bounded:
            return self.lengths
        if current() is None:
            return self.lengths - self.starts  # type: ignore[no-any-return]
        if self._past is None:  # one value for all layers of a graph
            self._past = self.lengths - self.starts
        return self._past

    def slide(self, counts: Any) -> None:
        lengths, starts = self.lengths.numpy().tolist(), self.starts.numpy()
        more = [int(counts)] * len(lengths) if np.ndim(counts) == 0 else np.asarray(counts).tolist()
        capacity = self.k[self.bounded[0]].numpy().shape[2]

        def needed() -> int:
            return max(n - s + m for n, s, m in zip(lengths, starts.tolist(), more, strict=True))

        if needed() <= capacity:
            return
        for row, length in enumerate(lengths):
            begin, old = max(0, length - self.window + 1 - MARGIN) // STEP * STEP, int(starts[row])
            if begin > old:
                for t in [tensors[i] for tensors in filter(None, (self.k, self.v)) for i in self.bounded]:
                    rows = t.numpy()[row]
                    rows[:, : length - begin] = rows[:, begin - old : length - old]
                starts[row] = begin
        if needed() > capacity:
            super()._resize(max(needed(), min(2 * capacity, self.most)), self.bounded)

    def can_keep(self, n: int) -> bool:
        return all(self._row_can_keep(row, n) for row in range(self.batch))

    def _row_can_keep(self, row: int, n: int) -> bool:
        length, begin = int(self.lengths.numpy()[row]), int(self.starts.numpy()[row])
        return n <= 0 or n >= length or begin == 0 or n - self.window + 1 >= begin

    def reset(self) -> None:
        super().reset()
        self.starts = Tensor(np.zeros(self.batch, np.int32))

    def truncate(self, n: Any) -> None:
        for row, keep in enumerate(np.broadcast_to(np.asarray(n), (self.batch,)).tolist()):
            if not self._row_can_keep(row, keep):
                begin = int(self.starts.numpy()[row])
                what = f"KVCache: row {row} can't be cut to {keep} tokens: its windows begin at token {begin}"
                raise ArgumentError(what, fix="reset() the cache and run the tokens again")
        super().truncate(n)
        self.starts = Tensor(np.where(self.lengths.numpy() == 0, 0, self.starts.numpy()).astype(np.int32))

    def tree_flatten(self) -> tuple[dict[str, Any], Any]:
        parts, (limit,) = super().tree_flatten()
        return {**parts, "starts": self.starts}, (limit, self.window, *self.bounded)

    def tree_outline(self, arrays: list[Any]) -> Any:
        tensors = (*self.k, *self.v, self.lengths, self.starts)
        if not _TENSORS.issuperset(map(type, tensors)):
            raise NoOutline
        arrays += map(_ARRAY, tensors)
        return WindowKVCache, len(self.k), self.limit, self.window, self.bounded

    def without_limit(self) -> WindowKVCache:
        return self.of(self, self.window, self.bounded, self.starts)

    @classmethod
    def of(cls, cache: KVCache, window: int, bounded: tuple[int, ...], starts: Tensor | None = None) -> WindowKVCache:
        """The tensors of a cache, without its limit; one that keeps all tokens has `starts` of 0."""
        made = cls.__new__(cls)
        made.k, made.v, made.lengths, made.limit = cache.k, cache.v, cache.lengths, None
        made.window, made.bounded = window, bounded
        made.starts = Tensor(np.zeros(cache.batch, np.int32)) if starts is None else starts
        return made

    @classmethod
    def tree_unflatten(cls, parts: dict[str, Any], meta: Any) -> WindowKVCache:
        made = super().tree_unflatten(parts, meta[:1])
        assert isinstance(made, WindowKVCache)
        made.starts = parts["starts"]
        _, made.window, *bounded = meta
        made.bounded = tuple(bounded)
        return made
