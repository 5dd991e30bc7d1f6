"""Template variables of attention on the CPU: views, sizes of blocks, and the variants that a kernel has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monoplan.codegen.cpu.schedule_attention import AttentionSchedule
from monoplan.codegen.expressions import c_literal, c_symbol
from monoplan.codegen.hand_over import c_as_tiles
from monoplan.codegen.kernels import Attention, Kernel
from monoplan.ir.types import f64


@dataclass(frozen=True)
class Variant:
    """A way in which a kernel runs: the function of mp_attention.h, when it is the one, and the room that it needs."""

    function: str
    when: str
    room: str
    type: str = "float"


def attention(k: Attention, s: AttentionSchedule) -> dict[str, Any]:
    views = [f".{o.name} = {o.c_view()}" for o in k.operands]
    views += [f".has_{name} = 1" for name in ("mask", "past") if k.has(name)]
    return {
        "attn": {
            "scale": c_literal(k.scale, f64),
            "softcap": c_literal(k.softcap or 0.0, f64),
            "views": views,
            "sizes": [] if s.simple else _sizes(k, s),
            "variants": _variants(k, s),
        }
    }


def _sizes(k: Attention, s: AttentionSchedule) -> list[str]:
    """Fields of mp_attention that the schedule decides, a line for each variant."""
    found = []
    if s.has_few:
        few = {
            "least": s.least,
            "chunk": s.chunk,
            "rows": s.rows,
            "wide": s.wide,
            "pairs": s.pairs,
            "ahead": s.ahead,
            "far": s.far,
            "prefetch_keys": s.prefetch_keys,
            "partial": "partial",
        }
        found.append(_fields(few | ({"few_tiles": 1, "few_heads": s.few_heads} if s.few_tiles else {})))
    if s.has_many:
        many: dict[str, Any] = {"columns": s.columns, "block": s.keys}
        if s.tiles:
            many |= {"part": s.part, "k_tiles": "k_tiles", "v_tiles": "v_tiles"}
        else:
            many |= {"tile_rows": s.block, "tile_vectors": s.vectors}
        found.append(_fields(many))
    as_tiles = c_as_tiles(k.batch * k.seq)
    handed = {"q_tiles": s.takes_tiles, "y_tiles": s.gives_tiles}
    return found + [f".{name} = {as_tiles}" for name, wanted in handed.items() if wanted]


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(f".{name} = {int(v) if isinstance(v, bool) else v}" for name, v in values.items())


def _variants(k: Attention, s: AttentionSchedule) -> list[Variant]:
    if s.simple:
        return [Variant("mp_attention_double", "", "MP_DOUBLE_ROOM(DIM, VALUE)", "double")]

    def whole(n: int, unit: int) -> int:
        return -(-n // unit) * unit

    dim, value = whole(k.head_dim, s.lanes), whole(k.value_dim, s.lanes)
    found = []
    if s.has_many:
        function = "mp_attention_many_tiles" if s.tiles else "mp_attention_many"
        room = f"MP_STRIP_ROOM(DIM, {whole(k.value_dim, s.block)}, {s.columns}, {s.keys})"
        if s.tiles:
            room = f"MP_STRIP_TILES_ROOM(DIM, VALUE, {s.keys})"
        found.append(Variant(function, f"if (a.queries > {s.few}) " if s.has_few else "", room))
    if s.has_few:
        room = f"MP_FEW_ROOM(GROUP, {dim}, {value}, {s.rows}, {s.chunk})"
        found.append(Variant("mp_attention_few", f"if (a.queries <= {s.few}) " if s.has_many else "", room))
    return found


def symbol_params(k: Kernel) -> list[str]:
    return [f"const int64_t {c_symbol(name)} MP_UNUSED" for name in sorted(k.mentioned)]


def symbol_args(k: Kernel) -> list[str]:
    return [c_symbol(name) for name in sorted(k.mentioned)]
