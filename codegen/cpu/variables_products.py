"""Text that the template of packed linears needs, with their epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monoplan.codegen.cpu.schedule_linear import TILE_ROWS, TILE_SOME, LinearSchedule
from monoplan.codegen.cpu.variables_attention import symbol_args, symbol_params
from monoplan.codegen.expressions import c_dim, c_literal
from monoplan.codegen.hand_over import c_as_tiles
from monoplan.codegen.kernels import Linear
from monoplan.codegen.operands import Operand
from monoplan.codegen.views import View
from monoplan.ir.expr import Arg, Call
from monoplan.ir.types import bf16, f32, i64

Facts = dict[str, Any]

# The slot in which the sums of panel p wait on tile units: see Blocking.
_WAITING = {"slices": "0", "heads": "(slot + p - p0)", "strips": "(p - p0)"}


def linear(k: Linear, s: LinearSchedule) -> Facts:
    x, y = k.operand("x"), k.operand("y")
    value = x.with_view(View(x.view.buffer, (k.depth,), (x.view.strides[1],))).at("i").replace("x[", "row[", 1)
    normed = value
    if k.norm != "none":
        normed = f"({value} - mean - rest) * scale" if k.norm == "layer" else f"{value} * scale"
        if k.has("norm_weight"):
            normed = f"({normed}) * {k.operand('norm_weight').at('i')}"
        if k.has("norm_bias"):
            normed = f"{normed} + {k.operand('norm_bias').at('i')}"
    block = [x, *(k.operand(n) for n in ("norm_weight", "norm_bias") if k.has(n))]
    found: Facts = {
        "w_type": s.format.c_type, "format": s.format, "x_type": x.ctype, "x_stride": "x_stride",
        "x_value": value, "x_centred": f"{value} - mean - rest" if k.norm == "layer" else value, "x_normed": normed,
        "eps": c_literal(k.eps, f32), "columns": k.columns // 2 if k.epilogue == "gated" else k.columns,
        "block_params": ", ".join(f"const {o.ctype} *{o.name}" for o in block) + ", const int64_t x_stride",
        "block_args": ", ".join(
            [f"x + {c_dim(x.view.offset)}" if o.name == "x" else o.name for o in block] + [c_dim(x.view.strides[0])]
        ),
        "widen": s.format.c_type != "float", "choose_block": _choose_block(s.row_blocks),
        "register_tile": f"mp_tile_{s.blocking.block}x{s.vectors}x{s.blocking.abreast}",
        "own_rows": "float *xs = xt + (int64_t)t * K * MOST",
    }
    if s.tiles:
        units = s.groups if k.epilogue == "heads" else -(-k.columns // s.panel)  # panels that only pad are left out
        found |= {"tile_rows": TILE_ROWS, "units": units, "asked": _asked(k, s), "some": TILE_SOME,
                  "slot": _WAITING[s.blocking.waits],
                  "own_rows": "mp_bf16 *xs = (mp_bf16 *)xt + (int64_t)t * K * 3 * MOST"}  # fmt: skip
    # The epilogue and the nest for many rows are functions of their own: they take the kernel's arguments along.
    inner = ("x", "w", "norm_weight", "norm_bias", "xt", "partial", "found")
    counts = ["rows"] if s.gives_tiles and k.epilogue != "heads" else []
    found |= _pass_on(k, "finish", [o for o in k.pointers if o.name not in inner], counts)
    found |= _pass_on(k, "many", [o for o in k.pointers if o.name != "found"])
    found["finish"] = _epilogue(k, s, s.panels)
    if s.tiles:
        found["unit"] = {**_epilogue(k, s, s.blocking.unit), "short": _short(k, s)}
    if k.epilogue == "argmax":
        found["store_best"] = y.store("best", i64, "r")
    return found


def _asked(k: Linear, s: LinearSchedule) -> list[str]:
    """Where the epilogue of row `row` and panel `p` reads: from far away, as the residual stream is."""
    dense = [e for e in k.group("e") if not e.view.is_virtual and e.view.strides[-1] == 1 and e.dtype == f32]
    return [e.pointer("row", f"p * {s.panel}") for e in dense if k.epilogue == "pointwise"]


def _epilogue(k: Linear, s: LinearSchedule, panels: int) -> Facts:
    """What becomes of the sums of one row and so many panels."""
    panel = s.panel
    if k.epilogue == "heads":
        return _heads(k, s)
    gated = k.epilogue == "gated"
    columns, each = (k.columns // 2, panel // 2) if gated else (k.columns, panel * panels)
    bias = k.operand("bias") if k.has("bias") else None

    def summed(place: str, column: str) -> str:
        return place if bias is None else f"{place} + {bias.at(column)}"

    found: Facts = {
        "count": str(each) if columns % (panel * panels // 2 if gated else each) == 0 else f"mp_min({each}, N - first)",
        "sum": summed("sums[j]", "n"), "gate": summed("gates[j]", "n"), "up": summed("ups[j]", "(N + n)"),
    }  # fmt: skip
    if k.body is not None and k.epilogue != "argmax":
        made = ["gate", "up"] if gated else ["sum"]
        found["value"] = k.body.c([*made, *(e.at("row", "n") for e in k.group("e"))])
        found["statement"] = k.operand("y").store(found["value"], k.body.dtype, "row", "n")
    return found


def _short(k: Linear, s: LinearSchedule) -> str:
    """The function by vectors that makes what becomes bf16, where there is one."""
    swiglu = k.body is not None and k.body.node == Call("swiglu", (Arg(0), Arg(1))) and not k.has("bias")
    return "mp_vswiglu_short" if s.gives_tiles and k.epilogue == "gated" and swiglu else ""


def _pass_on(k: Linear, prefix: str, operands: Sequence[Operand], counts: Sequence[str] = ()) -> Facts:
    """Parameters and arguments of a helper function of the kernel."""
    params = ["mp_run *run MP_UNUSED", "const int step MP_UNUSED"]
    args = ["run", "step"]
    for o in operands:
        params.append(f"{'' if o.written else 'const '}{o.ctype} *{o.name} MP_UNUSED")
        args.append(o.name)
    if k.epilogue == "argmax":
        params.append("int64_t *mine MP_UNUSED")
        args.append("mine")
    params += [f"const int64_t {name} MP_UNUSED" for name in counts]
    return {f"{prefix}_params": ", ".join([*params, *symbol_params(k)]),
            f"{prefix}_args": ", ".join([*args, *counts, *symbol_args(k)])}


def _choose_block(blocks: Sequence[int]) -> str:
    """The smallest block that takes all rows, else the largest."""
    text = str(blocks[-1])
    for b in reversed(blocks[:-1]):
        text = f"rows <= {b} ? {b} : {text}"
    return text


def _heads(k: Linear, s: LinearSchedule) -> Facts:
    y, kc, vc = k.operand("y"), k.operand("k_cache"), k.operand("v_cache")
    table = k.operand("sin")
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "i + HALF")
    norms = []
    if k.has("q_norm"):
        norms.append({"condition": "head < HEADS", "weight": k.operand("q_norm").at("j")})
    if k.has("k_norm"):
        norms.append({"condition": "head >= HEADS && head < HEADS + KV", "weight": k.operand("k_norm").at("j")})
    # Machines with tile units have an instruction that rounds rows of bf16.
    caches = [o for o in (kc, vc) if s.tiles and o.dtype == bf16 and o.view.strides[-1] == 1 and k.head_dim % 16 == 0]
    rows = [o.pointer("b0", "kv", "at", "0") for o in caches] if len(caches) == 2 else []
    return {
        "cache_rows": rows, "round": 32 if k.head_dim % 32 == 0 else 16,
        "has_bias": k.has("bias"), "head_bias": k.operand("bias").at("(head * DIM + j)") if k.has("bias") else "",
        "head_norms": norms, "qk_eps": c_literal(k.qk_eps, f32), "position": k.operand("positions").at("b0", "s0"),
        "table_rows": table.shape[0], "sin": table.at("angle", "i"), "cos": k.operand("cos").at("angle", "i"),
        "first": first, "second": second, "store_q": y.store("sums[j]", f32, "b0", "s0", "head", "j"),
        "q_tiles": c_as_tiles(k.rows, k.seq) if s.gives_tiles else "",
        "length": k.operand("lengths").at("b0"), "capacity": kc.shape[2],
        "count": f"(int64_t){k.operand('valid').at('b0')}" if k.has("valid") else c_dim(k.seq),
        "store_k": kc.store("sums[j]", f32, "b0", "kv", "at", "j"),
        "store_v": vc.store("sums[j]", f32, "b0", "kv", "at", "j"),
    }
