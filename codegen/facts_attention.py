"""Text that the CPU templates of attention need."""

from __future__ import annotations

from typing import Any

from monoplan.codegen.expressions import c_literal, c_symbol
from monoplan.codegen.kernels import Attention, Kernel
from monoplan.codegen.schedule_attention import AttentionSchedule
from monoplan.ir.types import f32, f64

Facts = dict[str, Any]


def attention(k: Attention, s: AttentionSchedule) -> Facts:
    q, kk, v, y = (k.operand(n) for n in ("q", "k", "v", "y"))
    wide = f64 if f64 in (q.dtype, kk.dtype, v.dtype) else f32
    real = "double" if wide == f64 else "float"
    visible = ["key < written"]
    if k.causal:
        visible.append("key <= position")
    if k.window is not None:
        visible.append(f"key > position - {k.window}")
    mask_add, mask_strip, flags = "", "", []
    if k.has("mask"):
        mask = k.operand("mask")
        text, strip = (mask.at("b", "h", row, "key") for row in ("s0", "(s0 + row)"))
        if mask.dtype.is_float:
            mask_add, mask_strip = text, strip
        else:
            visible.append(text)
            flags.append(strip)
    if k.window is not None:
        flags.append(f"key > position - {k.window}")
    before = f"(int64_t){k.operand('past').at('b')}" if k.has("past") else "keys - queries"
    first = f"mp_max(0, before + s0 - {k.window - 1})" if k.window is not None else "0"
    last = "mp_min(written, before + s0 + count)" if k.causal else "written"
    pointers = [o for o in k.pointers if o.name != "past"]
    return {"attn": {
        "real": real, "q": q.at("b", "s0", "h", "i"), "q_strip": q.at("b", "(s0 + row)", "h", "i"),
        "k": kk.at("b", "g", "key", "i"), "v": v.at("b", "g", "key", "i"), "scale": c_literal(k.scale, wide),
        "before": before, "first_key": first, "last_key": last, "visible": " && ".join(visible), "mask_add": mask_add,
        "mask_strip": mask_strip, "visible_strip": " && ".join(flags) or "1", "masked": bool(flags or mask_strip),
        "shown": "position + 1 - j0" if k.causal else "width",
        "softcap": "" if k.softcap is None else c_literal(k.softcap, wide),
        "tanh": "tanh" if wide == f64 else "mp_tanhf", "exp": "exp" if wide == f64 else "mp_expf",
        "statement": y.store("v_out", wide, "b", "s0", "h", "i"),
        "statement_strip": y.store("v_out", wide, "b", "(s0 + row)", "h", "i"),
        "rows": -(-s.queries * (k.heads // k.kv_heads) // s.block) * s.block,
        "value_padded": -(-k.value_dim // s.panel) * s.panel,
        "params": ", ".join(["const mp_run *run MP_UNUSED", *(f"{'' if o.written else 'const '}{o.ctype} *{o.name}"
                                                              for o in pointers), *symbol_params(k)]),
        "args": ", ".join(["run", *(o.name for o in pointers), *symbol_args(k)]),
    }}


def symbol_params(k: Kernel) -> list[str]:
    return [f"const int64_t {c_symbol(name)} MP_UNUSED" for name in sorted(k.symbols - {"threads"})]


def symbol_args(k: Kernel) -> list[str]:
    return [c_symbol(name) for name in sorted(k.symbols - {"threads"})]
