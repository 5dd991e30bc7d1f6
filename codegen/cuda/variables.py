"""Template variables of CUDA products and attention."""

from __future__ import annotations

import math
from typing import Any

from monoplan.codegen.backend import Variables
from monoplan.codegen.expressions import C_TYPES, c_dim, c_literal, compute_type, convert
from monoplan.codegen.formats import WeightFormat
from monoplan.codegen.kernels import Attention, Gather, Linear
from monoplan.codegen.operands import Operand
from monoplan.ir.dims import Dim
from monoplan.ir.types import f32, f64, i64


def packed_element(k: Gather, format: WeightFormat) -> str:
    """An element of a table that is also a linear weight: it lies row by row."""
    return format.cuda_value(f"x[at * {k.depth} + i0]")


def attention(k: Attention) -> Variables:
    q, kk, v, y = (k.operand(n) for n in ("q", "k", "v", "y"))
    wide = f64 if f64 in (q.dtype, kk.dtype, v.dtype) else f32
    visible = ["key < written"]
    if k.causal:
        visible.append("key <= position")
    if k.window is not None:
        visible.append(f"key > position - {k.window}")
    mask_add = ""
    if k.has("mask"):
        mask = k.operand("mask")
        text = mask.at("b", "h", "s0", "key")
        if mask.dtype.is_float:
            mask_add = text
        else:
            visible.append(text)
    past = f"(int64_t){k.operand('past').at('b')}" if k.has("past") else "keys - queries"
    return {
        "attn": {
            "real": C_TYPES[wide.name],
            "wide": wide.name,
            "q": q.at("b", "s0", "h", "i"),
            "k": kk.at("b", "g", "key", "i"),
            "v": v.at("b", "g", "key", "i"),
            "scale": c_literal(k.scale, wide),
            "before": past,
            "first_key": "0" if k.window is None else f"mp_max(0, before + s0 - {k.window - 1})",
            "last_key": "mp_min(written, before + s0 + 1)" if k.causal else "written",
            "visible": " && ".join(visible),
            "mask_add": mask_add,
            "softcap": "" if k.softcap is None else c_literal(k.softcap, wide),
            "tanh": "tanh" if wide == f64 else "mp_tanhf",
            "exp": "exp" if wide == f64 else "mp_expf",
            "statement": y.store("v_out", wide, "b", "s0", "h", "i"),
            # the tensor-core kernels: pointers to rows, distances between them, softmax in powers of two
            "scale2": c_literal(k.scale * math.log2(math.e), f32),
            "past": past,
            "window": k.window,
            "first": "0" if k.window is None else f"(int)mp_max(0, length - {k.window})",
            "k_type": kk.ctype,
            "v_type": v.ctype,
            "k_row": kk.pointer("b", "g", "0", "0"),
            "v_row": v.pointer("b", "g", "0", "0"),
            "k_pitch": kk.view.strides[2],
            "v_pitch": v.view.strides[2],
            "q_row": q.pointer("b", "0", "(g * GROUP + gid)", "0"),
            "store_out": y.store("out / all", f32, "b", "0", "h", "d"),
            "q_base": q.pointer("b", "0", "h", "0"),
            "q_pitch": q.view.strides[1],
            "y_base": y.pointer("b", "0", "h", "0"),
            "y_pitch": y.view.strides[1],
            "out0": convert("out[d][2 * r] * scale", f32, y.dtype),
            "out1": convert("out[d][2 * r + 1] * scale", f32, y.dtype),
        }
    }


def linear(k: Linear) -> Variables:
    x, w = k.operand("x"), k.operand("w")
    kept = k.format
    normed = value = x.at("row", "i")
    if k.norm == "rms":
        normed = f"{value} * scales[r]"
        if k.has("norm_weight"):
            normed = f"({normed}) * {k.operand('norm_weight').at('i')}"
    gamma = k.operand("norm_weight") if k.norm == "rms" and k.has("norm_weight") else None
    found: Variables = {
        "w_type": w.ctype,
        "w_name": w.dtype.name,
        "x_type": x.ctype,
        "x": value,
        "x_normed": normed,
        "w": kept.cuda_value(w.place("n", "i")),
        "eps": c_literal(k.eps, f32),
        "lane_elements": 128 // kept.bits,
        "gamma": "" if gamma is None else gamma.pointer("0"),
        "gamma_type": "" if gamma is None else gamma.ctype,
        # Only weights may be read before the kernels in front are done: one of them may have made this vector.
        "gamma_early": gamma is not None and "param" in (gamma.view.buffer.kind, gamma.view.buffer.table_kind),
        "x_row": x.pointer("0", "0"),
        "x_any_row": x.pointer("row", "0"),
        "vectors": _vectors(k),
        "pack": _PACK.get(w.dtype.name, ""),
        "x_prepared": convert(normed, f32, w.dtype),
        "head_norms": [],
        "xs": "xs",
    }
    return {"mm": found | _EPILOGUES[k.epilogue](k)}


def _vectors(k: Linear) -> bool:
    """Whether rows of x can be read eight elements at a time, and written so in the weights' type."""
    x, w = k.operand("x"), k.operand("w")
    parts = [x.dtype, *([k.operand("norm_weight").dtype] if k.norm == "rms" and k.has("norm_weight") else [])]
    dims = (x.view.strides[0], x.view.offset)
    aligned = all(d % 8 == 0 if isinstance(d, int) else all(c % 8 == 0 for _, c in d.terms) for d in dims)
    plain = all(t.is_float and t != f64 for t in parts) and w.dtype.itemsize == 2
    return plain and aligned and k.depth % 8 == 0 and k.depth <= 16384 and x.view.strides[1] == 1


def _bias(k: Linear, column: str) -> str:
    return f" + {k.operand('bias').at(column)}" if k.has("bias") else ""


def _pairable(o: Operand, columns: int) -> bool:
    """Whether columns 2 i and 2 i + 1 of every row lie side by side, at an even place."""

    def even(d: Dim) -> bool:
        return d % 2 == 0 if isinstance(d, int) else all(c % 2 == 0 for _, c in d.terms)

    s = o.view.strides
    dense = isinstance(s[1], int) and s[1] == 1 and even(s[0]) and even(o.view.offset)
    return columns % 2 == 0 and o.dtype.is_float and o.dtype != f64 and dense


def _pointwise(k: Linear) -> Variables:
    assert k.body is not None
    extras, y = k.group("e"), k.operand("y")
    fetch: list[str] = []
    for e in extras:
        if _pairable(e, k.columns):
            fetch.append(f"const float2 {e.name}_both = mp_load_pair(({e.pointer('row', 'n0')}));")
            fetch.append(f"extra.{e.name}_0 = {e.name}_both.x, extra.{e.name}_1 = {e.name}_both.y;")
        else:
            fetch += [f"extra.{e.name}_{j} = {e.at('row', f'n{j}')};" for j in (0, 1)]
    values = [
        k.body.c([f"({side}{_bias(k, f'n{j}')})", *(f"extra.{e.name}_{j}" for e in extras)])
        for j, side in enumerate(("first", "second"))
    ]
    kept = compute_type(k.body.dtype)
    pair = ""
    if _pairable(y, k.columns):
        parts = ", ".join(convert(f"value{j}", k.body.dtype, y.dtype) for j in (0, 1))
        pair = f"mp_store_pair({y.pointer('row', 'n0')}, {parts});"
    return {
        "extra_fields": " ".join(f"{C_TYPES[e.compute.name]} {e.name}_0, {e.name}_1;" for e in extras),
        "fetch": fetch,
        "value_type": C_TYPES[kept.name],
        "value0": values[0],
        "value1": values[1],
        "store_pair": pair,
        "store0": y.store("value0", k.body.dtype, "row", "n0"),
        "store1": y.store("value1", k.body.dtype, "row", "n1"),
    }


def _gated(k: Linear) -> Variables:
    assert k.body is not None
    extras, half = k.group("e"), k.columns // 2
    tail = k.body.c(["gate", "up", *(f"extra.{e.name}" for e in extras)])
    return {
        "extra_fields": " ".join(f"{C_TYPES[e.compute.name]} {e.name};" for e in extras),
        "fetch": [f"extra.{e.name} = {e.at('row', 'n')};" for e in extras],
        "gate": f"first{_bias(k, 'n')}",
        "up": f"second{_bias(k, f'({half} + n)')}",
        "statement": k.operand("y").store(tail, k.body.dtype, "row", "n"),
        # four columns at a time where nothing else is needed: what most of a prompt's time outside products is
        "wide": _wide(k),
        "body": _fast(tail),
        "y_row": k.operand("y").pointer("row", "0"),
    }


def _wide(k: Linear) -> bool:
    """Whether a gated product's results can be written four at a time, in half precision."""
    y = k.operand("y")
    strides = (y.view.strides[0], y.view.offset)
    aligned = all(d % 4 == 0 if isinstance(d, int) else all(c % 4 == 0 for _, c in d.terms) for d in strides)
    plain = (
        not k.group("e") and not k.has("bias") and k.body is not None and k.body.dtype.is_float and k.body.dtype != f64
    )
    return plain and y.dtype.itemsize == 2 and k.columns % 8 == 0 and aligned and y.view.strides[1] == 1


def _fast(text: str) -> str:
    """An expression whose result is rounded to half precision: silu by the hardware's own exponential."""
    return text.replace("mp_swigluf(", "mp_fast_swiglu(").replace("mp_siluf(", "mp_fast_silu(")


def _argmax(k: Linear) -> Variables:
    return {
        "sum0": f"first{_bias(k, 'n0')}",
        "sum1": f"second{_bias(k, 'n1')}",
        "store_best": k.operand("y").store("found", i64, "row"),
    }


def _heads(k: Linear) -> Variables:
    y, kc, vc, table = (k.operand(n) for n in ("y", "k_cache", "v_cache", "sin"))
    norms = []
    for name, condition in (("q_norm", "head < HEADS"), ("k_norm", "head >= HEADS && head < HEADS + KV")):
        if k.has(name):
            weight = k.operand(name)
            norms.append({"condition": condition, "weight0": weight.at("d0"), "weight1": weight.at("d1")})
    biases = [_bias(k, f"(head * DIM + d{j})") for j in (0, 1)]
    found: Variables = {
        "head_norms": norms,
        "head_normed": " || ".join(f"({n['condition']})" for n in norms),
        # a norm takes its bias before it, in linear_finish
        "head_first": "first" if norms else f"first{biases[0]}",
        "head_second": "second" if norms else f"second{biases[1]}",
        "bias0": biases[0],
        "bias1": biases[1],
        "head_bias": "",
        "qk_eps": c_literal(k.qk_eps, f32),
        "position": k.operand("positions").at("b0", "s0"),
        "table_rows": table.shape[0],
        "sin": table.at("angle", "i"),
        "cos": k.operand("cos").at("angle", "i"),
        "first": "2 * i" if k.algo == "gpt_j" else "i",
        "second": "2 * i + 1" if k.algo == "gpt_j" else "i + HALF",
        "length": k.operand("lengths").at("b0"),
        "capacity": kc.shape[2],
        "count": f"(int64_t){k.operand('valid').at('b0')}" if k.has("valid") else _dim_text(k.seq),
    }
    found |= {
        # four pairs at a time, for the many rows of a prompt
        "wide": _wide_heads(k, norms),
        "q_at": y.pointer("b0", "s0", "head", "0"),
        "k_at": kc.pointer("b0", "kv", "at", "0"),
        "v_at": vc.pointer("b0", "kv", "at", "0"),
        "sin_at": table.pointer("angle", "i"),
        "cos_at": k.operand("cos").pointer("angle", "i"),
        "q_pack": _PACK.get(y.dtype.name, ""),
        "q_type": y.ctype,
        "kv_type": kc.ctype,
        "kv_pack": _PACK.get(kc.dtype.name, ""),
    }
    for j, value in enumerate("ab"):
        found[f"store_q{j}"] = y.store(value, f32, "b0", "s0", "head", f"d{j}")
        found[f"store_k{j}"] = kc.store(value, f32, "b0", "kv", "at", f"d{j}")
        found[f"store_v{j}"] = vc.store(value, f32, "b0", "kv", "at", f"d{j}")
    return found


def _wide_heads(k: Linear, norms: list[dict[str, str]]) -> bool:
    """Whether q and both caches take four dimensions at a time: half precision, all dimensions rotate, rows aligned."""
    places = [k.operand(n) for n in ("y", "k_cache", "v_cache")]
    tables = [k.operand(n) for n in ("sin", "cos")]
    half = all(o.dtype.itemsize == 2 and o.view.strides[3] == 1 and _multiple(o, 8) for o in places)
    floats = all(t.dtype == f32 and t.view.strides[1] == 1 and _multiple(t, 4) for t in tables)
    plain = not norms and not k.has("bias") and k.algo != "gpt_j" and k.rotary == k.head_dim and k.head_dim % 8 == 0
    return plain and half and floats and places[1].dtype == places[2].dtype


def _multiple(o: Operand, n: int) -> bool:
    """Whether every row of an operand begins at a multiple of n elements."""
    dims = (*o.view.strides[:-1], o.view.offset)
    return all(d % n == 0 if isinstance(d, int) else all(c % n == 0 for _, c in d.terms) for d in dims)


_PACK = {"bf16": "mp_pack_brain", "f16": "mp_pack_half"}


def _dim_text(d: Dim) -> str:
    return f"({c_dim(d)})"


_EPILOGUES: dict[str, Any] = {"pointwise": _pointwise, "gated": _gated, "heads": _heads, "argmax": _argmax}
