"""Rotary embedding, scaled dot-product attention and the key/value cache."""

from __future__ import annotations

import numpy as np

from monoplan.ir.cache_rows import packed_rows, row_numbers, row_width, unpacked_rows
from monoplan.ir.dims import Dim, equal, same_dims
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import op, require
from monoplan.ir.rules import broadcasts_to
from monoplan.ir.types import Array, TensorType, bool_, i8, i32, promote

ROPE_ALGORITHMS = ("gpt_neox", "gpt_j")


def _rope_type(x: TensorType, positions: TensorType, sin: TensorType, cos: TensorType, *, algo: str) -> TensorType:
    require(algo in ROPE_ALGORITHMS, f"rope: algo={algo!r} is not one of {', '.join(ROPE_ALGORITHMS)}")
    require(
        x.dtype.is_float and x.rank in (3, 4), f"rope: x must be [seq, heads, dim] or [batch, seq, heads, dim], got {x}"
    )
    require(
        positions.dtype.is_integer and positions.rank in (1, 2) and positions.rank <= x.rank - 2,
        f"rope: positions must be integers [seq] or [batch, seq], got {positions} for x {x}",
    )
    lead = x.shape[: x.rank - 2][-positions.rank :]
    require(same_dims(positions.shape, lead), f"rope: positions {positions} do not fit x {x}")
    require(sin.rank == 2 and sin.shape == cos.shape, f"rope: tables must be [positions, dim/2], got {sin} and {cos}")
    dim, half = x.shape[-1], sin.shape[1]
    require(isinstance(dim, int) and dim % 2 == 0, f"rope: the head dimension must be even, got {dim} in {x}")
    require(isinstance(half, int) and 2 * half <= dim, f"rope: tables rotate {2 * half} of {dim} dimensions")  # type: ignore[operator]
    return x


@op(_rope_type, "rope")
def rope(x: Array, positions: Array, sin: Array, cos: Array, *, algo: str = "gpt_neox") -> Array:
    """Rotates pairs of the head dimension by each position's angle: (i, i+half) or, for gpt_j, (2i, 2i+1)."""
    bad = np.argwhere((positions < 0) | (positions >= sin.shape[0]))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        wrong = f"beyond the table of {sin.shape[0]} positions" if positions[place] >= 0 else "negative"
        raise ArgumentError(f"rope: position {int(positions[place])} at {list(place)} is {wrong}")
    half = sin.shape[1]
    s, c = sin[positions][..., None, :], cos[positions][..., None, :]  # (…, seq, 1, half)
    first = slice(0, 2 * half, 2) if algo == "gpt_j" else slice(0, half)
    second = slice(1, 2 * half, 2) if algo == "gpt_j" else slice(half, 2 * half)
    y = np.array(np.broadcast_to(x, x.shape), dtype=np.result_type(x, s))
    a, b = x[..., first], x[..., second]
    y[..., first] = a * c - b * s
    y[..., second] = a * s + b * c
    return y


LAYOUTS = ("bhsd", "bshd")


def _paged_type(cache: TensorType, table: TensorType, batch: Dim, name: str) -> TensorType:
    """The cache [batch, heads, positions, dim] that a table [batch, pages] makes of pages [count, heads, size, dim]."""
    require(
        table.dtype == i32 and table.rank == 2 and equal(table.shape[0], batch),
        f"{name}: the table must be i32[batch, pages], got {table}",
    )
    require(
        cache.rank == 4 and isinstance(cache.shape[2], int) and cache.shape[2] > 0,
        f"{name}: pages must be [number, heads, size, dim] with a size that is known, got {cache}",
    )
    return cache.with_shape((batch, cache.shape[1], table.shape[1] * cache.shape[2], cache.shape[3]))


def _check_pages(table: Array, cache: Array) -> None:
    bad = table[(table < 0) | (table >= len(cache))]
    if bad.size:
        raise ArgumentError(f"page {int(bad[0])} of a table is not one of the cache's {len(cache)}")


def _joined_pages(cache: Array, table: Array) -> Array:
    """Pages [number, heads, size, dim] in the order of each sequence: [batch, heads, positions, dim]."""
    _check_pages(table, cache)
    joined = np.swapaxes(cache[table], 1, 2)  # [batch, heads, pages, size, dim]
    return joined.reshape(*joined.shape[:2], -1, joined.shape[-1])


def _attention_type(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None,
    past: TensorType | None,
    table: TensorType | None,
    sinks: TensorType | None,
    *,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    layout: str,
) -> TensorType:
    if table is not None:
        require(q.rank == 4 and past is not None, "attention: pages of keys go with queries of rank 4 and with past")
        k, v = (_paged_type(t, table, q.shape[0], "attention") for t in (k, v))
    if k.dtype == v.dtype == i8:  # a cache in 8 bits
        k, v = (TensorType(q.dtype, (*t.shape[:-1], row_numbers(t.shape[-1], i8))) for t in (k, v))
    require(layout in LAYOUTS, f"attention: layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    require(
        q.rank in (3, 4) and k.rank == q.rank == v.rank,
        f"attention: q, k and v must all have rank 3 or 4 ([batch,] heads, seq, dim), got {q}, {k}, {v}",
    )
    require(all(t.dtype.is_float for t in (q, k, v)), f"attention needs floating point operands, got {q}, {k}, {v}")
    heads, seq = (q.shape[-3], q.shape[-2]) if layout == "bhsd" else (q.shape[-2], q.shape[-3])
    kv_heads, keys = k.shape[-3], k.shape[-2]
    require(
        isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads > 0 and heads % kv_heads == 0,
        f"attention: {heads} query heads can't share {kv_heads} key/value heads",
    )
    require(not equal(keys, 0), f"attention: k {k} has no keys")
    require(equal(q.shape[-1], k.shape[-1]), f"attention: q {q} and k {k} differ in the head dimension")
    require(same_dims(k.shape[:-1], v.shape[:-1]), f"attention: k {k} and v {v} do not fit")
    require(q.rank == 3 or equal(q.shape[0], k.shape[0]), f"attention: q {q} and k {k} differ in batch")
    batch: tuple[Dim, ...] = q.shape[: q.rank - 3]
    if mask is not None:
        target = (*batch, heads, seq, keys)
        require(mask.dtype == bool_ or mask.dtype.is_float, f"attention: the mask must be bool or float, got {mask}")
        require(broadcasts_to(mask.shape, target), f"attention: the mask {mask} does not broadcast to {list(target)}")
    if past is not None:
        require(
            past.dtype.is_integer and q.rank == 4 and past.rank == 1 and equal(past.shape[0], q.shape[0]),
            f"attention: past must be integers [batch], got {past}",
        )
    if sinks is not None:
        fits = sinks.dtype.is_float and sinks.shape == (heads,)
        require(fits, f"attention: sinks must be floats [{heads}], one for each head, got {sinks}")
    require(window is None or window > 0, f"attention: the window must be positive, got {window}")
    require(softcap is None or softcap > 0, f"attention: the softcap must be positive, got {softcap}")
    dtype = promote(q.dtype, k.dtype, v.dtype) if q.dtype != k.dtype else q.dtype
    tail = (heads, seq) if layout == "bhsd" else (seq, heads)
    return TensorType(dtype, (*batch, *tail, v.shape[-1]))


@op(_attention_type, "attention", bounded=True)
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past: Array | None = None,
    table: Array | None = None,
    sinks: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    layout: str = "bhsd",
) -> Array:
    """softmax(q k' * scale, masked) v; k, v [batch, kv heads, keys, dim] are shared by groups of query heads.

    Query i of row b stands at position past[b] + i (keys - queries + i without `past`); `causal` hides later
    keys, `window` keys that lie `window` or more before it; keys from past[b] + queries on are never seen.
    `layout` is that of q and the result: bhsd (heads before seq) or bshd. With a `table` [batch, pages], k and v are
    pages [number, heads, size, dim], and those of row b are table[b, 0], table[b, 1], … `sinks` [heads] are scores of a
    key more, which every query sees and whose value is 0. In i8, rows of k and v are codes with a scale behind them
    (ir/cache_rows.py).
    """
    if table is not None:
        assert past is not None
        seen = -(-(past + q.shape[-2 if layout == "bhsd" else -3]) // k.shape[2])  # behind them a table holds anything
        table = np.where(np.arange(table.shape[1]) < seen[:, None], table, 0)
        k, v = _joined_pages(k, table), _joined_pages(v, table)
    if k.dtype == np.int8:
        k, v = (unpacked_rows(t).astype(q.dtype) for t in (k, v))
    qh = q if layout == "bhsd" else np.swapaxes(q, -3, -2)
    heads, seq, dim = qh.shape[-3:]
    kv_heads, keys = k.shape[-3], k.shape[-2]
    kr, vr = (np.repeat(t, heads // kv_heads, axis=-3) for t in (k, v))
    scores = np.matmul(qh, np.swapaxes(kr, -1, -2)) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    start = np.asarray(keys - seq) if past is None else past.astype(np.int64).reshape(-1, 1, 1, 1)
    position = start + np.arange(seq)[:, None]
    key = np.arange(keys)
    visible = np.broadcast_to((key < start + seq), np.broadcast_shapes(scores.shape, np.shape(start + key))).copy()
    if causal:
        visible &= key <= position
    if window is not None:
        visible &= key > position - window
    if mask is not None:
        visible = visible & mask if mask.dtype == np.bool_ else visible
        scores = scores if mask.dtype == np.bool_ else scores + mask
    scores = np.where(visible, scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks[:, None, None]
    top = top if sink is None else np.maximum(top, sink)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = np.sum(weights, axis=-1, keepdims=True)
    total = total if sink is None else total + np.exp(sink - top)
    # Keys nobody may see can hold anything (an unwritten cache), so their values must not enter as 0 * NaN.
    clean = np.where(np.any(visible, axis=-2)[..., None], vr, 0)
    out = np.matmul(weights, clean) / np.where(total == 0, 1, total)
    return out if layout == "bhsd" else np.swapaxes(out, -3, -2)


def _kv_type(
    cache: TensorType, rows: TensorType, lengths: TensorType, valid: TensorType | None, table: TensorType | None = None
) -> TensorType:
    stored = cache
    if table is not None:
        cache = _paged_type(cache, table, rows.shape[0], "kv_update")
    require(
        cache.rank == 4 and rows.rank == 4,
        f"kv_update: the cache is [batch, heads, capacity, dim], rows [batch, seq, heads, dim]; got {cache} and {rows}",
    )
    b, s, h, d = rows.shape
    require(
        equal(b, cache.shape[0]) and equal(h, cache.shape[1]) and equal(row_width(d, cache.dtype), cache.shape[3]),
        f"kv_update: rows {rows} do not fit the cache {cache}",
    )
    stores = cache.dtype.is_float or cache.dtype == i8
    require(rows.dtype.is_float and stores, f"kv_update needs floats, or a cache in i8, got {cache} and {rows}")
    for t in (lengths, valid):
        require(
            t is None or (t.dtype.is_integer and t.rank == 1 and equal(t.shape[0], b)),
            f"kv_update: lengths and valid counts must be integers [batch], got {t}",
        )
    return stored


@op(_kv_type, "kv_update", inplace={0: "cache"})
def kv_update(
    cache: Array, rows: Array, lengths: Array, valid: Array | None = None, table: Array | None = None
) -> Array:
    """The cache with row s of sequence b at lengths[b] + s (for s < valid[b]); takes over its storage.

    With a `table` [batch, pages], the cache is pages [number, heads, size, dim], as in attention. A cache in i8 takes a
    row as codes with a scale behind them (ir/cache_rows.py).
    """
    out = cache.copy()
    batch, seq, _, _ = rows.shape
    if cache.dtype == np.int8:
        rows = packed_rows(rows)
    size = cache.shape[2]
    capacity = size if table is None else size * table.shape[1]
    for b in range(batch):
        count = seq if valid is None else int(valid[b])
        start = int(lengths[b])
        if start < 0 or count < 0 or count > seq or start + count > capacity:
            raise ArgumentError(
                f"kv_update: {count} rows at position {start} of sequence {b} do not fit a cache of "
                f"{capacity} positions"
            )
        if table is None:
            out[b, :, start : start + count] = np.swapaxes(rows[b, :count], 0, 1)
            continue
        at = np.arange(start, start + count)
        page = table[b, at // size]
        _check_pages(page, cache)
        out[page, :, at % size] = rows[b, :count]
    return out
