"""Text that the CPU templates of attention need."""

from __future__ import annotations

from typing import Any

from monoplan.codegen.cpu.schedule_attention import LOG2E, AttentionSchedule
from monoplan.codegen.expressions import c_dim, c_literal, c_symbol
from monoplan.codegen.hand_over import c_as_tiles
from monoplan.codegen.kernels import Attention, Kernel
from monoplan.codegen.operands import Operand
from monoplan.ir.types import bf16, f32, f64

Facts = dict[str, Any]


def attention(k: Attention, s: AttentionSchedule) -> Facts:
    q, kk, v, y = (k.operand(n) for n in ("q", "k", "v", "y"))
    wide = f64 if s.simple else f32
    # Weights are powers of two: what multiplies scores for that is part of the scale. Where something comes between, it
    # multiplies their distances: a score of -3.4e38, by a mask, is finite and must stay so.
    between = k.softcap is not None or (k.has("mask") and k.operand("mask").dtype.is_float)
    scale = k.scale if s.simple or between else k.scale * LOG2E
    before = f"(int64_t){k.operand('past').at('b')}" if k.has("past") else "keys - queries"
    first = f"mp_max(0, before + s0 - {k.window - 1})" if k.window is not None else "0"
    found: Facts = {
        "q": q.at("b", "s0", "h", "i"), "q_strip": q.at("b", "row", "h", "i"), "scale": c_literal(scale, wide),
        "k": kk.at("b", "g", "key", "i"), "v": v.at("b", "g", "key", "i"), "before": before, "first_key": first,
        "last_key": "mp_min(written, before + s1 + 1)" if k.causal else "written", "window": k.window or 0,
        "softcap": "" if k.softcap is None else c_literal(k.softcap, wide),
        "statement": y.store("v_out", wide, "b", "s0", "h", "i"),
        "statement_strip": y.store("v_out", wide, "b", "row", "h", "i"),
        "distance": f"(%s) * {c_literal(LOG2E, f32)}" if between else "%s", **_mask(k),
    }
    found |= _pass_on(k, "read", ("q", "k", "v", "mask")) | _pass_on(k, "strip", ("q", "k", "v", "mask", "y"))
    found |= _pass_on(k, "write", ("y",)) | _pass_on(k, "cache", ("k", "v")) | _pass_on(k, "many", ("q", "past", "y"))
    found |= _rows("k", kk, k.head_dim, s) | _rows("v", v, k.value_dim, s)
    dense = not q.view.is_virtual and q.view.strides[3] == 1
    found |= {"q_row": q.pointer("b", "row", "h", "i0") if dense else "", "q_is_bf16": q.dtype == bf16}
    found["many_rows"] = c_as_tiles(k.batch * k.seq)
    pairs = s.pairs and found["k_vectors"] and kk.dtype == bf16 and k.head_dim % (2 * s.lanes) == 0
    found["k_pairs"], found["v_pairs"] = pairs, s.pairs and found["v_vectors"] and v.dtype == bf16 and s.wide % 2 == 0
    if s.few_tiles:
        found |= {"v_pairs": True, "k_next": kk.pointer("b1", "g1", "key1", "0")}
    found["value_block"] = -(-k.value_dim // s.block) * s.block
    return {"attn": found}


def _pass_on(k: Attention, prefix: str, names: tuple[str, ...]) -> Facts:
    """Parameters and arguments of a helper function that needs these operands."""
    operands = [o for o in k.pointers if o.name in names]
    params = [f"{'' if o.written else 'const '}{o.ctype} *{o.name}" for o in operands]
    return {f"{prefix}_params": ", ".join(params + symbol_params(k)),
            f"{prefix}_args": ", ".join([*(o.name for o in operands), *symbol_args(k)])}


def _mask(k: Attention) -> Facts:
    """A mask of the user's: what it adds, or where it lets through; by query `s0`, and by row of a strip."""
    found: Facts = {"mask": k.has("mask"), "mask_add": "", "mask_flag": "", "strip_add": "", "strip_flag": ""}
    if k.has("mask"):
        mask = k.operand("mask")
        kind = "add" if mask.dtype.is_float else "flag"
        found[f"mask_{kind}"], found[f"strip_{kind}"] = (mask.at("b", "h", row, "key") for row in ("s0", "row"))
    return found


def _rows(name: str, o: Operand, dim: int, s: AttentionSchedule) -> Facts:
    """How rows of keys or values are read: where they lie if they are dense, else element by element."""
    dense = not o.view.is_virtual and o.view.strides[3] == 1 and o.dtype.bits <= 32

    def row(key: str) -> str:
        return o.pointer("b", "g", key, "0") if dense else ""

    return {
        f"{name}_vectors": dense and dim % s.lanes == 0, f"{name}_line": -(-dim // s.lanes) * s.lanes,
        f"{name}_type": o.ctype, f"{name}_load": f"mp_vload_{o.dtype.name}", f"{name}_row": row("key"),
        f"{name}_block": row("j0"),
        f"{name}_bits": "" if o.view.is_virtual else o.place("b", "g", "key", "i"),
        f"{name}_bytes": dim * o.dtype.itemsize, f"{name}_stride": c_dim(o.view.strides[2]),
        f"{name}_direct": dense and o.dtype == f32 and (name == "k" or dim % s.block == 0),
    }  # fmt: skip


def symbol_params(k: Kernel) -> list[str]:
    return [f"const int64_t {c_symbol(name)} MP_UNUSED" for name in sorted(k.mentioned)]


def symbol_args(k: Kernel) -> list[str]:
    return [c_symbol(name) for name in sorted(k.mentioned)]
