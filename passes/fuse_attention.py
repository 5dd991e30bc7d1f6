"""Attention written out (matmul, softmax, matmul) becomes the attention op, without repeated heads."""

from __future__ import annotations

from typing import Any

from monoplan.ir.dims import equal
from monoplan.ir.graph import Value
from monoplan.ir.ops.attention import attention
from monoplan.ir.ops.elementwise import add, div, mul
from monoplan.ir.ops.linear import matmul
from monoplan.ir.ops.reduce import causal_softmax, softmax
from monoplan.ir.ops.shape import repeat, transpose
from monoplan.passes.pattern import Match, Rewrite, rewrite_pass


def _swap(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _fits(m: Match) -> bool | str:
    q, kt, v = m["q"].type, m["kt"].type, m["v"].type
    if q.rank not in (3, 4) or kt.rank != q.rank or v.rank != q.rank:
        return f"q, k and v have ranks {q.rank}, {kt.rank} and {v.rank}; attention takes 3 or 4"
    for a, b in ((q, kt), (kt, v)):
        if not all(equal(x, y) for x, y in zip(a.shape[: q.rank - 2], b.shape[: q.rank - 2], strict=True)):
            return "the leading dimensions of q, k and v differ"
    if not isinstance(q.shape[-3], int):
        return "the number of heads is symbolic"
    if "axis" in m.values and m["axis"] not in (-1, q.rank - 1):
        return f"softmax is over axis {m['axis']}, not the last"
    if "scale" in m.values and m.scalar("scale") is None:
        return "the scale is not a constant"
    if q.dtype != kt.dtype or q.dtype != v.dtype:
        return "q, k and v differ in element type"
    return True


def _attention(q: Value, kt: Value, v: Value, scale: float, causal: bool, mask: Value | None = None) -> Any:
    """k comes transposed for the matmul; transposing it back costs nothing, it is a view."""
    k = transpose(kt, axes=_swap(kt.type.rank))
    return attention(q, k, v, mask, None, causal=causal, scale=scale)


def _rules(kind: str, softmax_of: Any, causal: bool) -> list[Rewrite]:
    """The rule for scores that are multiplied, divided, or not scaled at all."""
    rule = f"matmul({kind}(matmul(q, k') * scale), v) -> attention"
    return [
        Rewrite(
            f"fuse-attention-{kind}", rule,
            find=lambda q, kt, v, scale: matmul(softmax_of(mul(matmul(q, kt), scale)), v),
            make=lambda q, kt, v, match: _attention(q, kt, v, float(match.scalar("scale")), causal),
            when=_fits,
        ),
        Rewrite(
            f"fuse-attention-{kind}", rule,
            find=lambda q, kt, v, scale: matmul(softmax_of(div(matmul(q, kt), scale)), v),
            make=lambda q, kt, v, match: _attention(q, kt, v, 1.0 / float(match.scalar("scale")), causal),
            when=_fits,
        ),
        Rewrite(
            f"fuse-attention-{kind}", rule,
            find=lambda q, kt, v: matmul(softmax_of(matmul(q, kt)), v),
            make=lambda q, kt, v: _attention(q, kt, v, 1.0, causal),
            when=_fits,
        ),
    ]


def _masked_fits(m: Match) -> bool | str:
    verdict = _fits(m)
    if verdict is not True:
        return verdict
    return m["mask"].type.rank <= m["q"].type.rank or "the mask has more dimensions than the scores"


_MASKED = [
    Rewrite(
        "fuse-attention-masked", "matmul(softmax(matmul(q, k') * scale + mask), v) -> attention with a mask",
        find=lambda q, kt, v, scale, mask, *, axis: matmul(softmax(add(mul(matmul(q, kt), scale), mask), axis=axis), v),
        make=lambda q, kt, v, mask, match: _attention(q, kt, v, float(match.scalar("scale")), False, mask),
        when=_masked_fits,
    ),
    Rewrite(
        "fuse-attention-masked", "matmul(softmax(matmul(q, k') / scale + mask), v) -> attention with a mask",
        find=lambda q, kt, v, scale, mask, *, axis: matmul(softmax(add(div(matmul(q, kt), scale), mask), axis=axis), v),
        make=lambda q, kt, v, mask, match: _attention(q, kt, v, 1.0 / float(match.scalar("scale")), False, mask),
        when=_masked_fits,
    ),
]


def _move_repeat(x: Value, match: Match) -> Any:
    axes = match["axes"]
    axis = match["axis"] % x.type.rank
    return repeat(transpose(x, axes=axes), repeats=match["repeats"], axis=axes.index(axis))


TRANSPOSE_OF_REPEAT = Rewrite(
    "transpose-of-repeat", "transpose(repeat(x)) -> repeat(transpose(x))",
    find=lambda x, *, repeats, axis, axes: transpose(repeat(x, repeats=repeats, axis=axis), axes=axes),
    make=_move_repeat,
)


def _heads_repeated(m: Match) -> bool | str:
    rank = m["k"].type.rank
    if m["a"] % rank != rank - 3 or m["b"] % rank != rank - 3:
        return "keys or values are repeated along another dimension than the heads"
    return True


DROP_REPEATED_HEADS = Rewrite(
    "drop-repeated-heads", "attention(q, repeat(k), repeat(v)) -> attention(q, k, v) with shared heads",
    find=lambda q, k, v, mask, past, *, n, a, b, causal, scale, softcap, window, layout: attention(
        q, repeat(k, repeats=n, axis=a), repeat(v, repeats=n, axis=b), mask, past, causal=causal, scale=scale,
        softcap=softcap, window=window, layout=layout,
    ),
    make=lambda q, k, v, mask, past, causal, scale, softcap, window, layout: attention(
        q, k, v, mask, past, causal=causal, scale=scale, softcap=softcap, window=window, layout=layout
    ),
    when=_heads_repeated,
)
ATTENTION_LAYOUT = Rewrite(
    "attention-layout", "transpose(attention(transpose(q), k, v)) -> attention in the layout [batch, seq, heads, dim]",
    find=lambda q, k, v, mask, past, *, causal, scale, softcap, window: transpose(
        attention(transpose(q, axes=(0, 2, 1, 3)), k, v, mask, past, causal=causal, scale=scale, softcap=softcap,
                  window=window, layout="bhsd"),
        axes=(0, 2, 1, 3),
    ),
    make=lambda q, k, v, mask, past, causal, scale, softcap, window: attention(
        q, k, v, mask, past, causal=causal, scale=scale, softcap=softcap, window=window, layout="bshd"
    ),
)

FUSE_ATTENTION = rewrite_pass(
    "fuse-attention", "matmul, softmax, matmul -> one attention with a running softmax; repeated heads are shared",
    *_rules("causal_softmax", lambda s: causal_softmax(s), True),
    *_rules("softmax", lambda s: softmax(s, axis=-1), False),
    *_MASKED,
    TRANSPOSE_OF_REPEAT,
    DROP_REPEATED_HEADS,
    ATTENTION_LAYOUT,
)
