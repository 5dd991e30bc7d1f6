"""Text that the template of packed linears needs, with their epilogues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from monoplan.codegen.cpu.schedule_linear import TILE_ROWS, TILE_SOME, LinearSchedule
from monoplan.codegen.expressions import c_dim, c_literal, c_symbol
from monoplan.codegen.hand_over import c_as_tiles
from monoplan.codegen.kernels import Linear
from monoplan.codegen.operands import Operand
from monoplan.ir.expr import Arg, Call
from monoplan.ir.types import bf16, f32, i64

Facts = dict[str, Any]

_NORMS = {"none": "MP_NO_NORM", "rms": "MP_RMS_NORM", "layer": "MP_LAYER_NORM"}
_WIDTH = 112  # columns of a line of declarations


def linear(k: Linear, s: LinearSchedule) -> Facts:
    """The functions of a packed product read its arguments from a structure `a`."""
    a = {o.name: Operand(f"a.{o.name}", o.view, o.written) for o in k.operands}
    passed = [o for o in k.pointers if o.name not in ("w", "xt", "partial", "found")]
    symbols = _symbols(k, k.mentioned)
    norm = [k.operand(name) for name in ("norm_weight", "norm_bias") if k.has(name)]
    args = [(f"{'' if o.written else 'const '}{o.ctype} *", o.name) for o in passed]
    if k.epilogue == "heads":
        args += [("mp_run *", "run"), ("int ", "step")]
    if k.epilogue == "argmax":
        args.append(("int64_t *", "mine"))
    if s.gives_tiles and k.epilogue != "heads":
        args.append(("int64_t ", "rows"))
    normed = "(x - s.mean - s.rest) * s.scale" if k.norm == "layer" else "x * s.scale"
    if k.has("norm_weight"):
        normed = f"({normed}) * {a['norm_weight'].at('i')}"
    if k.has("norm_bias"):
        normed = f"{normed} + {a['norm_bias'].at('i')}"
    found: Facts = {
        "format": s.format,
        "loops": "mp_linear_tiles.h" if s.tiles else "mp_linear.h",
        "fields": _filled([f"{kind}{name};" for kind, name in (*args, *(("int64_t ", name) for name in symbols))]),
        "given": [name for _, name in args],
        "symbols": symbols,
        "x_value": a["x"].at("row", "i"),
        "x_normed": normed,
        "x_symbols": _symbols(k, k.operand("x").symbols),
        "x_affine": bool(norm),
        "norm_symbols": _symbols(k, {name for o in norm for name in o.symbols}),
        "eps": c_literal(k.eps, f32),
        "norm": _NORMS[k.norm],
        "columns": k.columns // 2 if k.epilogue == "gated" else k.columns,
        "row_bytes": s.panel * s.format.bits // 8,
        "floats": int(s.format.c_type == "float"),
        "kernel_params": ", ".join(f"{'' if o.written else 'const '}{o.ctype} *{o.name}" for o in k.pointers),
        "sums": s.row_blocks[-1] * s.width,
        "epilogues": _epilogues(k, s, a),
    }
    if s.tiles:
        units = s.groups if k.epilogue == "heads" else -(-k.columns // s.panel)  # panels that only pad are left out
        found |= {
            "tile_rows": TILE_ROWS,
            "units": units,
            "prefetch": _prefetched(k, s, a),
            "some": TILE_SOME,
            "tiled_from": TILE_ROWS if s.takes_tiles else 0,
        }
    if k.epilogue == "argmax":
        found["store_best"] = k.operand("y").store("best", i64, "r")
    return found


def _symbols(k: Linear, names: Set[str]) -> list[str]:
    """C names of symbols, among those that are arguments of the kernel."""
    return [c_symbol(name) for name in sorted(names & k.mentioned)]


def _filled(fields: Sequence[str]) -> list[str]:
    """Declarations, as many on a line as fit."""
    lines: list[str] = []
    for field in fields:
        if lines and len(lines[-1]) + len(field) < _WIDTH:
            lines[-1] += f" {field}"
        else:
            lines.append(field)
    return lines


def _prefetched(k: Linear, s: LinearSchedule, a: Mapping[str, Operand]) -> list[str]:
    """Where the epilogue of row `row` and panel `p` reads: from far away, as the residual stream is."""
    dense = [e for e in k.group("e") if not e.view.is_virtual and e.view.strides[-1] == 1 and e.dtype == f32]
    return [a[e.name].pointer("row", f"p * {s.panel}") for e in dense if k.epilogue == "pointwise"]


def _epilogues(k: Linear, s: LinearSchedule, a: Mapping[str, Operand]) -> list[Facts]:
    """The functions that finish rows. On tile units those of many rows may write tiles, those of a few do not."""
    row = "const int64_t row"
    if k.epilogue == "heads":
        return [{"name": "finish", "template": "heads", "row": row, **_heads(k, s, a)}]
    panels = 1 if s.tiles else s.panels
    found = {"name": "finish", "template": k.epilogue, "row": row, **_epilogue(k, s, a, panels)}
    if not s.gives_tiles:
        return [found]
    by_block = "const int64_t block, const int64_t r"  # rows of a block of 32 lie together in tiles
    return [{**found, "name": "finish_few"}, {**found, "template": "tiles", "row": by_block, "short": _short(k)}]


def _epilogue(k: Linear, s: LinearSchedule, a: Mapping[str, Operand], panels: int) -> Facts:
    """What becomes of the sums of one row and so many panels."""
    width = s.panel * panels
    gated = k.epilogue == "gated"
    columns, each = (k.columns // 2, s.panel // 2) if gated else (k.columns, width)
    bias = a["bias"] if k.has("bias") else None

    def summed(place: str, column: str) -> str:
        return place if bias is None else f"{place} + {bias.at(column)}"

    found: Facts = {
        "panels": panels,
        "width": width,
        "half": s.panel // 2,
        "each": each,
        "count": str(each) if columns % (width // 2 if gated else each) == 0 else f"mp_min({each}, {columns} - first)",
        "sum": summed("sums[j]", "n"),
        "gate": summed("gates[j]", "n"),
        "up": summed("ups[j]", f"({columns} + n)"),
    }
    if k.body is not None and k.epilogue != "argmax":
        made = ["gate", "up"] if gated else ["sum"]
        found["value"] = k.body.c([*made, *(a[e.name].at("row", "n") for e in k.group("e"))])
        found["statement"] = a["y"].store(found["value"], k.body.dtype, "row", "n")
    return found


def _short(k: Linear) -> str:
    """The function by vectors that makes what becomes bf16, where there is one."""
    swiglu = k.body is not None and k.body.node == Call("swiglu", (Arg(0), Arg(1))) and not k.has("bias")
    return "mp_vswiglu_short" if k.epilogue == "gated" and swiglu else ""


def _heads(k: Linear, s: LinearSchedule, a: Mapping[str, Operand]) -> Facts:
    y, kc, vc, table = a["y"], a["k_cache"], a["v_cache"], a["sin"]
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "i + HALF")
    norms = []
    if k.has("q_norm"):
        norms.append({"condition": "head < HEADS", "weight": a["q_norm"].at("j")})
    if k.has("k_norm"):
        norms.append({"condition": "head >= HEADS && head < HEADS + KV", "weight": a["k_norm"].at("j")})
    # Machines with tile units have an instruction that rounds rows of bf16.
    caches = [o for o in (kc, vc) if s.tiles and o.dtype == bf16 and o.view.strides[-1] == 1 and k.head_dim % 16 == 0]
    rows = [o.pointer("b0", "kv", "at", "0") for o in caches] if len(caches) == 2 else []
    return {
        "cache_rows": rows,
        "round": 32 if k.head_dim % 32 == 0 else 16,
        "has_bias": k.has("bias"),
        "head_bias": a["bias"].at("(head * DIM + j)") if k.has("bias") else "",
        "head_norms": norms,
        "qk_eps": c_literal(k.qk_eps, f32),
        "position": a["positions"].at("b0", "s0"),
        "table_rows": table.shape[0],
        "sin": table.at("angle", "i"),
        "cos": a["cos"].at("angle", "i"),
        "first": first,
        "second": second,
        "store_q": y.store("sums[j]", f32, "b0", "s0", "head", "j"),
        "q_tiles": c_as_tiles(k.rows, k.seq) if s.gives_tiles else "",
        "length": a["lengths"].at("b0"),
        "capacity": kc.shape[2],
        "count": f"(int64_t){a['valid'].at('b0')}" if k.has("valid") else c_dim(k.seq),
        "store_k": kc.store("sums[j]", f32, "b0", "kv", "at", "j"),
        "store_v": vc.store("sums[j]", f32, "b0", "kv", "at", "j"),
    }
