"""Attention written out (matmul, softmax, matmul) becomes the attention op, without repeated heads.

A row that sees no key is 0 then, as that op defines it; the softmax that was written out makes NaN of it.
"""

from __future__ import annotations

from math import inf
from typing import Any

from monoplan.ir.dims import same_dims
from monoplan.ir.graph import Value
from monoplan.ir.ops.attention import attention
from monoplan.ir.ops.elementwise import add, div, logical_not, mul, where
from monoplan.ir.ops.linear import matmul
from monoplan.ir.ops.reduce import causal_softmax, softmax
from monoplan.ir.ops.shape import repeat, transpose
from monoplan.ir.rules import broadcasts_to
from monoplan.passes.pattern import Match, Rewrite, Wild, rewrite_pass


def _fits(m: Match) -> bool | str:
    q, kt, v = m["q"].type, m["kt"].type, m["v"].type
    if q.rank not in (3, 4) or kt.rank != q.rank or v.rank != q.rank:
        return f"q, k and v have ranks {q.rank}, {kt.rank} and {v.rank}; attention takes 3 or 4"
    for a, b in ((q, kt), (kt, v)):
        if not same_dims(a.shape[: q.rank - 2], b.shape[: q.rank - 2]):
            return "the leading dimensions of q, k and v differ"
    if not isinstance(q.shape[-3], int):
        return "the number of heads is symbolic"
    if "axis" in m.values and m["axis"] not in (-1, q.rank - 1):
        return f"softmax is over axis {m['axis']}, not the last"
    if "scale" in m.values and m.scalar("scale") is None:
        return "the scale is not a constant"
    if "scale" in m.values and not float(m.scalar("scale")):  # type: ignore[arg-type]
        return "the scale is 0"
    if q.dtype != kt.dtype or q.dtype != v.dtype:
        return "q, k and v differ in element type"
    return True


def _attention(q: Value, kt: Value, v: Value, scale: float, causal: bool, mask: Value | None = None) -> Any:
    """k comes transposed for the matmul; transposing it back costs nothing, it is a view."""
    rank = kt.type.rank
    k = transpose(kt, axes=(*range(rank - 2), rank - 1, rank - 2))
    return attention(q, k, v, mask, None, causal=causal, scale=scale)


def _times(m: Match) -> float:
    return float(m.scalar("scale"))  # type: ignore[arg-type]


def _over(m: Match) -> float:
    return 1.0 / float(m.scalar("scale"))  # type: ignore[arg-type]


def _rules(kind: str, softmax_of: Any, causal: bool) -> list[Rewrite]:
    """The rule for scores that are multiplied, divided, or not scaled at all."""
    rule = f"matmul({kind}(matmul(q, k') * scale), v) -> attention"
    return [
        Rewrite(
            f"fuse-attention-{kind}",
            rule,
            find=lambda q, kt, v, scale: matmul(softmax_of(mul(matmul(q, kt), scale)), v),
            make=lambda q, kt, v, match: _attention(q, kt, v, _times(match), causal),
            when=_fits,
        ),
        Rewrite(
            f"fuse-attention-{kind}",
            rule,
            find=lambda q, kt, v, scale: matmul(softmax_of(div(matmul(q, kt), scale)), v),
            make=lambda q, kt, v, match: _attention(q, kt, v, _over(match), causal),
            when=_fits,
        ),
        Rewrite(
            f"fuse-attention-{kind}",
            rule,
            find=lambda q, kt, v: matmul(softmax_of(matmul(q, kt)), v),
            make=lambda q, kt, v: _attention(q, kt, v, 1.0, causal),
            when=_fits,
        ),
    ]


def _mask_fits(m: Match, kinds: str) -> bool | str:
    verdict = _fits(m)
    if verdict is not True:
        return verdict
    q, kt, mask = m["q"].type, m["kt"].type, m["mask"].type
    if mask.dtype.kind not in kinds:
        return f"the mask is {mask}"
    scores = (*q.shape[:-1], kt.shape[-1])
    return broadcasts_to(mask.shape, scores) or f"the mask {mask} stretches the scores {list(scores)}"


def _masked_rules(of: Any, number: Any) -> list[Rewrite]:
    """A mask that is added, one that names the visible scores, and one that names the hidden ones."""

    def rule(name: str, masked: str, find: Any, visible: Any, when: Any) -> Rewrite:
        words = f"matmul(softmax({masked}), v) -> attention with a mask"
        return Rewrite(
            name,
            words,
            find=find,
            when=when,
            make=lambda q, kt, v, mask, match: _attention(q, kt, v, number(match), False, visible(mask)),
        )

    def chosen(m: Match) -> bool | str:
        return _mask_fits(m, "b") if m.scalar("hidden") == -inf else "what is masked is not -inf"

    return [
        rule(
            "fuse-attention-masked",
            "scores + mask",
            lambda q, kt, v, scale, mask, *, axis: matmul(softmax(add(of(matmul(q, kt), scale), mask), axis=axis), v),
            lambda mask: mask,
            lambda m: _mask_fits(m, "f"),
        ),
        rule(
            "fuse-attention-where",
            "where(mask, scores, -inf)",
            lambda q, kt, v, scale, mask, hidden, *, axis: matmul(
                softmax(where(mask, of(matmul(q, kt), scale), hidden), axis=axis), v
            ),
            lambda mask: mask,
            chosen,
        ),
        rule(
            "fuse-attention-where",
            "where(mask, -inf, scores)",
            lambda q, kt, v, scale, mask, hidden, *, axis: matmul(
                softmax(where(mask, hidden, of(matmul(q, kt), scale)), axis=axis), v
            ),
            lambda mask: logical_not(mask),
            chosen,
        ),
    ]


def _move_repeat(x: Value, match: Match) -> Any:
    axes = match["axes"]
    axis = match["axis"] % x.type.rank
    return repeat(transpose(x, axes=axes), repeats=match["repeats"], axis=axes.index(axis))


TRANSPOSE_OF_REPEAT = Rewrite(
    "transpose-of-repeat",
    "transpose(repeat(x)) -> repeat(transpose(x))",
    find=lambda x, *, repeats, axis, axes: transpose(repeat(x, repeats=repeats, axis=axis), axes=axes),
    make=_move_repeat,
)


def _heads_repeated(m: Match) -> bool | str:
    rank = m["k"].type.rank
    if m["a"] % rank != rank - 3 or m["b"] % rank != rank - 3:
        return "keys or values are repeated along another dimension than the heads"
    return True


DROP_REPEATED_HEADS = Rewrite(
    "drop-repeated-heads",
    "attention(q, repeat(k), repeat(v)) -> attention(q, k, v) with shared heads",
    find=lambda q, k, v, mask, past, table, sinks, *, n, a, b, causal, scale, softcap, window, layout: attention(
        q,
        repeat(k, repeats=n, axis=a),
        repeat(v, repeats=n, axis=b),
        mask,
        past,
        table,
        sinks,
        causal=causal,
        scale=scale,
        softcap=softcap,
        window=window,
        layout=layout,
    ),
    make=lambda q, k, v, mask, past, table, sinks, causal, scale, softcap, window, layout: attention(
        q, k, v, mask, past, table, sinks, causal=causal, scale=scale, softcap=softcap, window=window, layout=layout
    ),
    when=_heads_repeated,
)


def _layout_rule(axes: tuple[int, ...]) -> Rewrite:
    return Rewrite(
        "attention-layout",
        "transpose(attention(transpose(q), k, v)) -> attention over [batch, seq, heads, dim]",
        find=lambda q, k, v, mask, past, table, sinks, *, causal, scale, softcap, window: transpose(
            attention(
                transpose(q, axes=axes),
                k,
                v,
                mask,
                past,
                table,
                sinks,
                causal=causal,
                scale=scale,
                softcap=softcap,
                window=window,
                layout="bhsd",
            ),
            axes=axes,
        ),
        make=lambda q, k, v, mask, past, table, sinks, causal, scale, softcap, window: attention(
            q, k, v, mask, past, table, sinks, causal=causal, scale=scale, softcap=softcap, window=window, layout="bshd"
        ),
    )


ATTENTION_LAYOUT = [_layout_rule((0, 2, 1, 3)), _layout_rule((1, 0, 2))]

FUSE_ATTENTION = rewrite_pass(
    "fuse-attention",
    "matmul, softmax, matmul -> one attention with a running softmax; repeated heads are shared",
    *_rules("causal_softmax", lambda s: causal_softmax(s), True),
    *_rules("softmax", lambda s: softmax(s, axis=Wild("axis")), False),
    *_masked_rules(mul, _times),
    *_masked_rules(div, _over),
    TRANSPOSE_OF_REPEAT,
    DROP_REPEATED_HEADS,
    *ATTENTION_LAYOUT,
)
