"""Template variables of CUDA products and attention."""

from __future__ import annotations

import math
from typing import Any

from monoplan.codegen.backend import Variables
from monoplan.codegen.cpu import variables as shared
from monoplan.codegen.cuda.schedule import rows_aligned, whole_heads
from monoplan.codegen.expressions import C_TYPES, c_dim, c_index, c_literal, compute_type, convert
from monoplan.codegen.formats import WeightFormat
from monoplan.codegen.kernels import Attention, Experts, Gather, Linear
from monoplan.codegen.operands import Operand
from monoplan.ir.types import bf16, f16, f32, f64, i8, i64


def packed_element(k: Gather, format: WeightFormat) -> str:
    """An element of a table that is also a linear weight: it lies row by row, or in tiles."""
    if format.tile:
        return "value"
    return format.cuda_value(f"x[at * {k.depth} + i0]")


def attention(k: Attention) -> Variables:
    q, kk, v, y = (k.operand(n) for n in ("q", "k", "v", "y"))
    wide = f64 if f64 in (q.dtype, kk.dtype, v.dtype) else f32
    visible = ["key < written"]
    if k.causal:
        visible.append("key <= position")
    if k.window is not None:
        visible.append(f"key > position - {k.window}")
    adjusted, shown = "dot", "true"
    if k.softcap is not None:
        cap = c_literal(k.softcap, wide)
        adjusted = f"{cap} * {'tanh' if wide == f64 else 'mp_tanhf'}(dot / {cap})"
    if k.has("mask"):
        mask = k.operand("mask")
        text = mask.at("b", "h", "s0", "key")
        if mask.dtype.is_float:
            adjusted = f"{adjusted} + {text}"
        else:
            visible.append(text)
            shown = text
    head = f"(g * {k.heads // k.kv_heads} + head)"
    sink, group_sink = (k.operand("sinks").at(i) if k.has("sinks") else "-INFINITY" for i in ("h", head))
    log2e = c_literal(math.log2(math.e), f32)
    return {
        "attn": {
            "past": f"(int64_t){k.operand('past').at('b')}" if k.has("past") else "keys - queries",
            # any types and masks: elements
            "real": C_TYPES[wide.name],
            "q": q.at("b", "s0", "h", "i"),
            "k": _cached(kk, k.head_dim),
            "v": _cached(v, k.value_dim),
            "scale": c_literal(k.scale, wide),
            "first_key": "0" if k.window is None else f"mp_max(0, before + s0 - {k.window - 1})",
            "last_key": "mp_min(written, before + s0 + 1)" if k.causal else "written",
            "visible": " && ".join(visible),
            "adjusted": adjusted,
            "sink": f"({C_TYPES[wide.name]}){sink}",
            "store": y.store("value", wide, "b", "s0", "h", "i"),
            # the tensor-core kernels: rows, distances between them, softmax in powers of two
            "scale2": c_literal(k.scale * math.log2(math.e), f32),
            "window": k.window or 0,
            "shown": shown,
            "sink2": f"{log2e} * {sink}",
            "group_sink": f"{log2e} * {group_sink}",
            "q_row": q.pointer("b", "0", "h", "0"),
            "k_rows": _rows(kk),
            "v_rows": _rows(v),
            "y_row": y.pointer("b", "0", "h", "0"),
            "q_pitch": q.view.strides[1],
            "y_pitch": y.view.strides[1],
            # one token: heads of the group that shares a key head
            "group_query": q.pointer("b", "0", head, "0"),
            "store_group": y.store("value", f32, "b", "0", head, "d"),
        }
    }


def _rows(cache: Operand) -> str:
    """The rows of key head g of sequence b, see mp_rows.cuh."""
    view = cache.view
    if view.table is None:
        return f"mp_rows_of({cache.pointer('b', 'g', '0', '0')}, {c_dim(view.strides[2])})"
    first = f"{cache.name} + {c_index([('g', view.strides[1])], view.offset)}"
    table = f"table + {c_index([('b', view.table.strides[0])])}"
    sizes = ", ".join(map(c_dim, (view.pages, view.strides[0], view.strides[2])))
    return f"mp_paged_rows_of<{view.page}>({first}, {table}, {sizes})"


def _cached(o: Operand, dim: int) -> str:
    """Number i of a row of a cache; in 8 bits its scale lies behind the row."""
    value = o.at("b", "g", "key", "i")
    return f"{value} * mp_row_scale({o.pointer('b', 'g', 'key', str(dim))})" if o.dtype == i8 else value


def linear(k: Linear) -> Variables:
    x, w = k.operand("x"), k.operand("w")
    normed = value = x.at("row", "i")
    gamma = k.operand("norm_weight") if k.norm == "rms" and k.has("norm_weight") else None
    if k.norm == "rms":
        normed = f"{value} * scale"
    if gamma is not None:
        normed = f"({normed}) * {gamma.at('i')}"
    found: Variables = {
        "header": k.format.cuda_header,
        "choice_header": "mp_route.cuh" if k.epilogue == "routed" else "",
        "rms": int(k.norm == "rms"),
        "eps": c_literal(k.eps, f32),
        "gamma": "(const float *)0" if gamma is None else gamma.pointer("0"),
        "gamma_kind": gamma_kind(gamma),
        "x": value,
        "x_normed": normed,
        "x_rounded": convert(normed, f32, k.format.x_dtype),
        "x_row": x.pointer("row", "0"),
        "x_first_row": x.pointer("0", "0"),
        "w": k.format.cuda_value(w.place("n", "i")),
        "few": few_weights(k),
    }
    return {"mm": found | _EPILOGUES[k.epilogue](k)}


def few_weights(k: Linear | Experts) -> str:
    """How the loop of a few rows reads the weights: a type of mp_linear_few.cuh."""
    kind = f"mp_few_tiles<{k.format.tile}" if k.format.tile else f"mp_few_rows<{k.format.c_type}"
    return f"{kind}, {k.depth}, {k.columns}>"


def gamma_kind(gamma: Operand | None) -> str:
    """Only weights may be read before the kernels in front are done: one of them may have made this vector."""
    if gamma is None:
        return "MP_NO_GAMMA"
    constant = "param" in (gamma.view.buffer.kind, gamma.view.buffer.table_kind)
    return "MP_GAMMA_CONSTANT" if constant else "MP_GAMMA_COMPUTED"


def _bias(k: Linear, column: str) -> str:
    return f" + {k.operand('bias').at(column)}" if k.has("bias") else ""


def _pairable(o: Operand, columns: int) -> bool:
    """Whether columns 2 i and 2 i + 1 of every row lie side by side, at an even place."""
    return columns % 2 == 0 and o.dtype.is_float and o.dtype != f64 and rows_aligned(o.view, 2)


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
    if y.dtype == bf16:
        values = [v.replace("mp_gelu_nonef(", "mp_fast_gelu(") for v in values]
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
        "word": f"mp_pack<{C_TYPES[y.dtype.name]}>(value0, value1)" if y.dtype in (bf16, f16) else "",
        "y_row": y.pointer("row", "0"),
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
        "body": _fast(tail),
        "y_row": k.operand("y").pointer("row", "0"),
    }


def _routed(k: Linear) -> Variables:
    return {**_gated(k), **shared.route(k.choice, f"__ldcg(&scores[r * {k.scores} + e])")}


def _fast(text: str) -> str:
    """An expression whose result is rounded to half precision: silu by the hardware's own exponential."""
    return text.replace("mp_swigluf(", "mp_fast_swiglu(").replace("mp_siluf(", "mp_fast_silu(")


def _argmax(k: Linear) -> Variables:
    return {
        "sum0": f"first{_bias(k, 'n0')}",
        "sum1": f"second{_bias(k, 'n1')}",
        "store_best": k.operand("y").store("found", i64, "row"),
    }


def _normed(k: Linear) -> Variables:
    return {
        "sum0": f"first{_bias(k, 'n0')}",
        "sum1": f"second{_bias(k, 'n1')}",
        "whole": f"part(o0, i){_bias(k, 'i')}",
        **shared.tail(k, f"__ldcg(&made[o0 * {k.columns} + i])"),
    }


def _heads(k: Linear) -> Variables:
    y, kc, vc, table = (k.operand(n) for n in ("y", "k_cache", "v_cache", "sin"))
    norms = []
    for name, condition in (("q_norm", "head < HEADS"), ("k_norm", "head >= HEADS && head < HEADS + KV")):
        if k.has(name):
            weight = k.operand(name)
            values = [weight.at(f"dims.{side}") for side in ("first", "second")]
            norms.append({"condition": condition, "weight0": values[0], "weight1": values[1]})
    biases = [_bias(k, f"(head * DIM + dims.{side})") for side in ("first", "second")]
    found: Variables = {
        "head": f"pair / (DIM / 2) + {k.first_head}" if k.first_head else "pair / (DIM / 2)",
        "head_norms": norms,
        "head_normed": " || ".join(f"({n['condition']})" for n in norms) or "false",
        # whole heads take their bias before, in mp_finish_whole_heads
        "head_first": "first" if whole_heads(k) else f"first{biases[0]}",
        "head_second": "second" if whole_heads(k) else f"second{biases[1]}",
        "packed": kc.dtype == i8,
        "bias0": biases[0],
        "bias1": biases[1],
        "qk_eps": c_literal(k.qk_eps, f32),
        "position": k.operand("positions").at("b0", "s0"),
        "angles": table.shape[0],
        "sin": table.at("angle", "i"),
        "cos": k.operand("cos").at("angle", "i"),
        "length": k.operand("lengths").at("b0"),
        "capacity": kc.shape[2],
        "count": f"(int64_t){k.operand('valid').at('b0')}" if k.has("valid") else f"({c_dim(k.seq)})",
        # whole heads, for the many rows of a prompt
        "sin_at": table.pointer("angle", "i"),
        "cos_at": k.operand("cos").pointer("angle", "i"),
        "q_at": y.pointer("b0", "s0", "head", "0"),
        "k_at": kc.pointer("b0", "kv", "at", "0"),
        "v_at": vc.pointer("b0", "kv", "at", "0"),
    }
    for j, (value, side) in enumerate((("a", "first"), ("b", "second"))):
        found[f"store_q{j}"] = y.store(value, f32, "b0", "s0", "head", f"dims.{side}")
        found[f"store_k{j}"] = kc.store(value, f32, "b0", "kv", "at", f"dims.{side}")
        found[f"store_v{j}"] = vc.store(value, f32, "b0", "kv", "at", f"dims.{side}")
    return found


_EPILOGUES: dict[str, Any] = {
    "pointwise": _pointwise,
    "gated": _gated,
    "heads": _heads,
    "argmax": _argmax,
    "normed": _normed,
    "routed": _routed,
}
