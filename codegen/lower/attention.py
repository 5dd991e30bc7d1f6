"""Lowering of attention: one kernel whatever the layout, and the scratch memory that its schedule wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from monoplan.codegen.cpu.schedule_attention import choose_attention
from monoplan.codegen.kernels import Attention
from monoplan.codegen.lower.lowerer import Lowerer, lowers
from monoplan.codegen.operands import Operand
from monoplan.codegen.target import Target
from monoplan.codegen.views import View
from monoplan.ir.cache_rows import row_numbers
from monoplan.ir.dims import Dim
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Op
from monoplan.ir.types import DType, f32, u32


@lowers("attention")
def lower_attention(lo: Lowerer, op: Op) -> None:
    """One kernel from scores to weighted values; views bring every layout to [b, s, h, d] and [b, g, t, d]."""
    q, k, v = (lo.read(o) for o in op.operands[:3] if o is not None)
    y = lo.destination(op.result)
    heads_first = op.attrs["layout"] == "bhsd"

    def four(view: View, swap: bool) -> View:
        if len(view.shape) == 3:
            view = View(view.buffer, (1, *view.shape), (0, *view.strides), view.offset)
        return view.transposed((0, 2, 1, 3)) if swap else view

    q, y, k, v = four(q, heads_first), four(y, heads_first), four(k, False), four(v, False)
    table = op.operand("table")
    pages = None if table is None else lo.dense(lo.read(table))
    if pages is not None:
        k, v = k.paged(pages), v.paged(pages)
    batch, seq, heads, dim = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], row_numbers(v.shape[3], v.dtype)
    for name, size in (
        ("heads", heads),
        ("key/value heads", kv_heads),
        ("values in a head", dim),
        ("values", value_dim),
    ):
        if not isinstance(size, int):
            what = f"attention: the number of {name} is {size}, a size that is known only at the call"
            why = "the kernel keeps a head's sums in registers"
            raise CompileError(what, where=op.loc, why=why, fix="give a plain number in the spec")
    operands = [Operand("q", q), Operand("k", k), Operand("v", v)]
    mask, past = op.operand("mask"), op.operand("past")
    if mask is not None:
        operands.append(Operand("mask", lo.read(mask).expanded((batch, heads, seq, keys))))
    if past is not None:
        operands.append(Operand("past", lo.read(past)))
    if pages is not None:
        operands.append(Operand("table", pages))
    if (sinks := op.operand("sinks")) is not None:
        operands.append(Operand("sinks", lo.read(sinks)))
    operands.append(Operand("y", y, written=True))
    a: Any = op.attrs
    scale = a["scale"] if a["scale"] is not None else dim**-0.5  # type: ignore[operator]
    kernel = Attention(
        op=op,
        operands=tuple(operands),
        batch=batch,
        seq=seq,
        keys=keys,
        heads=heads,  # type: ignore[arg-type]
        kv_heads=kv_heads,  # type: ignore[arg-type]
        head_dim=dim,  # type: ignore[arg-type]
        value_dim=value_dim,  # type: ignore[arg-type]
        causal=a["causal"],
        scale=scale,
        softcap=a["softcap"],
        window=a["window"],
        flops=batch * seq * keys * heads * (dim + value_dim) * 2,
    )
    lo.emit(replace(kernel, scratch=_scratch(lo, kernel)) if lo.target.is_cpu else kernel)


def _scratch(lo: Lowerer, k: Attention) -> tuple[Operand, ...]:
    """Few queries: what tasks leave for each other (sums, largest score and total of each head and chunk)."""
    s = choose_attention(k, lo.target)
    found = []
    if s.has_few and not s.simple:
        few = k.seq if isinstance(k.seq, int) else s.few
        width = -(-k.value_dim // s.lanes) * s.lanes + 2
        shape = (k.batch * few * k.heads * (k.keys // s.least + 1), width)
        found.append(Operand("partial", lo.fresh(f32, shape, "scratch"), written=True))
    return (*found, *tile_scratch(k, lo.target, lambda name, dtype, shape: lo.fresh(dtype, shape, "scratch")))


def tile_scratch(
    k: Attention, target: Target, fresh: Callable[[str, DType, Sequence[Dim]], View]
) -> tuple[Operand, ...]:
    """Many queries on tile units: the keys and values as tiles; `fresh` makes storage."""
    s = choose_attention(k, target)
    if not (s.has_many and s.tiles):
        return ()
    keys = (k.keys + (s.keys - 1)) // s.keys * s.keys
    return tuple(
        Operand(name, fresh(name, u32, (k.batch * k.kv_heads, keys, s.parts * dim // 2)), written=True)
        for name, dim in (("k_tiles", k.head_dim), ("v_tiles", k.value_dim))
    )
