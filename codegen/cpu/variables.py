"""Template variables of a kernel: its loads, stores and loop shapes as C, one function per family.

CUDA shares those of all families but linear and attention; where its loops differ, the names in them are arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from monoplan.codegen.backend import Variables
from monoplan.codegen.cpu.schedule_attention import AttentionSchedule
from monoplan.codegen.cpu.schedule_conv import WIDE, ConvSchedule
from monoplan.codegen.cpu.schedule_linear import BLOCK_STRIP, TILE_ROWS, TILE_SOME, ExpertsSchedule, LinearSchedule
from monoplan.codegen.expressions import C_TYPES, c_dim, c_index, c_literal, c_symbol, load
from monoplan.codegen.formats import WeightFormat, format_of
from monoplan.codegen.kernels import (
    Attention,
    Collective,
    Conv,
    Experts,
    Gather,
    Heads,
    KVUpdate,
    Latent,
    Linear,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Route,
    Sample,
    Scan,
    Scatter,
    Softmax,
    Sort,
    Window,
)
from monoplan.codegen.moves import c_as_tiles
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.reductions import PART_OF_ROW, SCANS, WIDE_SCANS, reduction_variables
from monoplan.codegen.views import View, merge_dims
from monoplan.ir.dims import Dim, Expr
from monoplan.ir.expr import Arg, Call, Node
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, bf16, f32, f64, i8, i64, product


def names(prefix: str, shape: Sequence[Dim]) -> list[str]:
    return [f"{prefix}{i}" for i in range(len(shape))]


@dataclass(frozen=True)
class Loop:
    """A pointwise loop over merged dimensions."""

    outer: tuple[Dim, ...]
    inner: Dim
    statement: str

    @property
    def flat(self) -> bool:
        return not self.outer

    @property
    def outer_size(self) -> Dim:
        return product(self.outer)

    @property
    def quick(self) -> bool:
        """Whether it is for MP_QUICKLY: functions that are slow for rare arguments, and one dense output."""
        calls = any(f"mp_{name}f(" in self.statement for name in ("sin", "cos", "tan"))
        return self.flat and calls and self.statement.startswith("y[i] = ")

    @property
    def long(self) -> bool:
        return calls_long(self.statement)

    @property
    def blocks(self) -> str:
        """The function of arrays that it is nothing but a call of, if there is one."""
        found = re.fullmatch(r"y\[i\] = (?:mp_)?(\w+)f\(x0\[i\]\);", self.statement)
        return f"mp_{found[1]}_blocks" if self.flat and found and f"mp_{found[1]}" in _OF_ARRAYS else ""


# Functions of mp_functions_vec.h that linear layers end with, by the expression that they are; and all of them.
_BLOCKS: dict[Node, str] = {
    Call("gelu", (Arg(0),), (("approximate", "none"),)): "mp_gelu_none",
    Call("gelu", (Arg(0),), (("approximate", "tanh"),)): "mp_gelu_tanh",
    Call("erf", (Arg(0),)): "mp_erf",
}
_OF_ARRAYS = {
    *_BLOCKS.values(), "mp_exp", "mp_log", "mp_log2", "mp_log10", "mp_tanh", "mp_sin", "mp_cos", "mp_tan", "mp_atan",
    "mp_sqrt", "mp_rsqrt",
}  # fmt: skip
_SHARED = ('#include "mp_functions_vec.h"',)
_LONG = re.compile(r"\bmp_(exp\w*|log\w*|tanh|sigmoid|silu|softplus|erfc?|gelu_\w+|sinh|cosh|cbrt|a\w+h)f\(")


def calls_long(statement: str) -> bool:
    """Whether it is for MP_SIMD_ABREAST: it calls a function of float that is a long chain of steps."""
    return _LONG.search(statement) is not None


def _merged(operands: Sequence[Operand]) -> tuple[tuple[Dim, ...], list[Operand]]:
    shape, strides = merge_dims([o.view for o in operands])
    merged = [o.with_view(View(o.view.buffer, shape, s, o.view.offset)) for o, s in zip(operands, strides, strict=True)]
    return shape, merged


def pointwise(k: Pointwise) -> Variables:
    shape, merged = _merged(k.operands)
    index = [*names("o", shape[:-1]), "i"] if shape else []
    outs = [o for o in merged if o.written]
    value = k.body.c([x.at(*index) for x in merged if not x.written])
    if len(outs) > 1:
        stores = " ".join(o.store("v", k.body.dtype, *index) for o in outs)
        statement = f"{{ const {C_TYPES[k.body.compute.name]} v = {value}; {stores} }}"
    else:
        statement = outs[0].store(value, k.body.dtype, *index)
    loop = Loop(shape[:-1], shape[-1] if shape else 1, statement)
    return {"loop": loop, "m": {"shared": _SHARED if loop.blocks else ()}}


LEAST_COLUMNS = 8  # of a reduction by columns


def reduce(k: Reduce, first: str = "") -> Variables:
    """`first`: whether an element is the first that is seen."""
    part = PART_OF_ROW if k.scratch else 0
    begin, stop = ("begin", "stop") if part else ("0", "inner")
    found = reduction_variables(k, first=first or f"i == {begin}") | {"part": part, "begin": begin, "stop": stop}
    found["columns"] = 0 if found["keeps_place"] else _columns(k)
    found["loop"] = "parts" if part else "columns" if found["columns"] else "rows"
    if found["order"]:
        lowest, nan, than = _ORDERS[found["order"]]
        value = f"{found['value']} + 0.0f" if found["keeps_place"] else found["value"]  # -0 does not come before 0
        found |= {"lowest": lowest, "than": than, "key": f"mp_order_f32({value}, {nan})"}
    return {"reduction": found}


def _columns(k: Reduce) -> int:
    """Sums that lie side by side while their elements do not; 0: they don't, or are too few for vectors."""
    last = k.outer[-1] if k.outer else 0
    strides = [x.view.strides for x in k.group("x")]
    beside = any(at[len(k.outer) - 1] == 1 and at[-1] != 1 for at in strides if k.inner)
    return last if beside and isinstance(last, int) and last >= LEAST_COLUMNS else 0


# Of the largest and smallest element as an integer: what it is of none, what NaN is, how it compares with others.
_ORDERS = {"max": ("INT32_MIN", "INT32_MAX", ">"), "min": ("INT32_MAX", "INT32_MIN", "<")}


def _real(dtype: DType) -> str:
    return "double" if dtype == f64 else "float"


def norm(k: Norm, kept: str = "", x: str = "x", weight: str = "weight", bias: str = "bias") -> Variables:
    """`kept`: where elements of x are after the first pass over them; then the names of operands."""
    index = [*names("o", k.outer), "i"]
    given = k.operand(x)
    real, again = _real(given.dtype), kept or given.at(*index)
    value = f"({again} - mean - rest) * scale" if k.kind == "layer" else f"{again} * scale"
    if k.has(weight):
        value = f"({value}) * {k.operand(weight).at('i')}"
    if k.has(bias):
        value = f"{value} + {k.operand(bias).at('i')}"
    tail = k.body.c(["v", *(e.at(*index) for e in k.group("e"))])
    return {
        "normal": {
            "kind": k.kind,
            "outer_size": product(k.outer),
            "real": real,
            "x": given.at(*index),
            "sqrt": "sqrt" if real == "double" else "sqrtf",
            "centred": f"{again} - mean - rest" if k.kind == "layer" else again,
            "value": value,
            "eps": c_literal(k.eps, f64 if real == "double" else f32),
            "statement": " ".join(o.store(tail, k.body.dtype, *index) for o in k.operands if o.written),
        }
    }


def tail(k: Linear, made: str = "") -> Variables:
    """The norm behind a product; `made`: how its sums are read."""
    found = norm(k.tail, made, "made", "tail_weight", "tail_bias")
    found["normal"] |= {"x": made} if made else {}
    return found


def softmax(k: Softmax) -> Variables:
    index = [*names("o", k.outer), "i"]
    x = k.operand("x")
    real = _real(x.dtype)
    wide = f64 if real == "double" else f32
    return {
        "soft": {
            "outer_size": product(k.outer),
            "real": real,
            "x": x.at(*index),
            "exp": "mp_exp" if wide == f64 else "mp_expf",
            "maximum": f"mp_maximum_{wide.name}",
            "row": f"o{len(k.outer) - 1}",
            "rows": k.outer[-1] if k.outer else 1,
            "statement": k.operand("y").store("v", wide, *index),
        }
    }


def matmul(k: Matmul, column: str = "(n0 + j)", total: str = "acc[j]") -> Variables:
    """`total`: where the sum of a column is found."""
    batch = names("b", k.batch)
    tail = k.body.c([total, *(e.at(*batch, "m", column) for e in k.group("e"))])
    return {
        "prod": {
            "outer_size": product(k.batch) * k.rows,
            "acc_type": C_TYPES[k.accumulator.name],
            "a": k.operand("a").at(*batch, "m", "i"),
            "b": k.operand("b").at(*batch, "i", column),
            "statement": k.operand("y").store(tail, k.body.dtype, *batch, "m", column),
        }
    }


def unpacked_element(k: Gather, format: WeightFormat) -> str:
    """An element of a row that was unpacked."""
    return load(k.operand("x").dtype.values, "row[i0]")


def gather(k: Gather, packed: Callable[[Gather, WeightFormat], str] = unpacked_element) -> Variables:
    """`packed`: element i0 of row `at` of a table that is a packed linear weight."""
    outer, inner = names("o", k.outer), names("i", k.inner)
    x = k.operand("x")
    layout = x.view.buffer.layout if k.packed else None
    value = x.at(*outer, "at", *inner) if layout is None else packed(k, format_of(layout))
    tail = k.body.c([value, *(e.at(*outer, *inner) for e in k.group("e"))])
    return {
        "lookup": {
            "outer_size": product(k.outer),
            "inner_size": product(k.inner),
            "index": k.operand("index").at(*outer),
            "statement": k.operand("y").store(tail, k.body.dtype, *outer, *inner),
            "layout": layout,
            "format": layout and format_of(layout),
            "load_column": layout and format_of(layout).load_column("row", "x", "at", k.depth, layout.panel),
            "ctype": C_TYPES[x.dtype.values.name],
        }
    }


def scatter(k: Scatter) -> Variables:
    outer = names("o", k.outer)
    x, y = k.operand("x"), k.operand("y")
    value = x.at(*outer, "i")
    if k.kind != "set":
        value = Body(
            Call({"max": "maximum", "min": "minimum"}.get(k.kind, k.kind), (Arg(0), Arg(1))), (y.dtype, y.dtype)
        ).c([y.at(*outer, "at"), value])
    return {
        "placing": {
            "outer_size": product(k.outer),
            "index": k.operand("index").at(*outer, "i"),
            "statement": y.store(value, y.dtype, *outer, "at"),
        }
    }


def rope(k: Rope) -> Variables:
    x, y = k.operand("x"), k.operand("y")
    index = ["o0", "o1", "o2"]
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "i + HALF")
    real = _real(x.dtype)
    wide = f64 if real == "double" else f32

    def at(o: Operand, last: str) -> str:
        return o.at(*index, f"({last})")

    return {
        "rotation": {
            "outer": x.shape[:3],
            "outer_size": product(x.shape[:3]),
            "position": k.operand("positions").at("o0", "o1"),
            "sin": k.operand("sin").at("at", "i"),
            "cos": k.operand("cos").at("at", "i"),
            "real": real,
            "first": at(x, first),
            "second": at(x, second),
            "store_first": y.store("a * c - b * s", wide, *index, f"({first})"),
            "store_second": y.store("a * s + b * c", wide, *index, f"({second})"),
            "store_rest": y.store(x.at(*index, "i"), wide, *index, "i"),
        }
    }


def _new_rows(k: Heads | Latent, cache: Operand) -> Variables:
    """Where new rows of a cache go, and the angles of their rotation."""
    table = k.operand("sin")
    return {
        "limit": table.shape[0],
        "capacity": cache.shape[2],
        "position": k.operand("positions").at("b0", "s0"),
        "length": k.operand("lengths").at("b0"),
        "count": f"(int64_t){k.operand('valid').at('b0')}" if k.has("valid") else c_dim(k.seq),
        "pages": written_pages(cache, "b0"),
        "sin": table.at("angle", "i"),
        "cos": k.operand("cos").at("angle", "i"),
    }


def heads(k: Heads) -> Variables:
    y, kc, vc = (k.operand(n) for n in ("y", "k_cache", "v_cache"))
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "i + HALF")
    flat = len(k.operand("q_norm").shape) == 1

    def weight(name: str, head: str) -> str:
        return k.operand(name).at(*([f"({head} * DIM + j)"] if flat else [head, "j"]))

    return {
        "turning": {
            **_new_rows(k, kc),
            # what a norm is over begins with this head, and has so many numbers
            "begins": "(head == 0 || head == HEADS)" if k.whole else "1",
            "size": "(head < HEADS ? HEADS : KV) * DIM" if k.whole else "DIM",
            "eps": c_literal(k.eps, f32),
            "x": k.operand("x").at("b0", "s0", "i"),
            "q_weight": weight("q_norm", "head"),
            "k_weight": weight("k_norm", "kv"),
            "first": first,
            "second": second,
            "store_q": y.store("sums[j]", f32, "b0", "s0", "head", "j"),
            "store_k": kc.store("sums[j]", f32, "b0", "kv", "at", "j"),
            "store_v": vc.store("sums[j]", f32, "b0", "kv", "at", "j"),
        }
    }


def latent(k: Latent) -> Variables:
    cache, y = k.operand("k_cache"), k.operand("turned")
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "(i + HALF)")

    def store_row(value: str, column: str) -> str:
        return cache.store(value, f32, "b0", "0", "at", f"({column})")

    found: Variables = {
        **_new_rows(k, cache),
        "eps": c_literal(k.eps, f32),
        "latent": k.operand("latent").at("b0", "s0", "i"),
        "weight": k.operand("latent_weight").at("i"),
        "store_latent": store_row("v", "i"),
        "key_rest": store_row(k.operand("key").at("b0", "s0", "0", "i"), "RANK + i"),
        "query_rest": y.store(k.operand("query").at("b0", "s0", "head", "i"), f32, "b0", "s0", "head", "i"),
    }
    for value, place, turned in (("u", first, "u * cosine - v * sine"), ("v", second, "u * sine + v * cosine")):
        found[f"key_{value}"] = k.operand("key").at("b0", "s0", "0", f"({place})")
        found[f"query_{value}"] = k.operand("query").at("b0", "s0", "head", f"({place})")
        found[f"store_key_{value}"] = store_row(turned, f"RANK + {place}")
        found[f"store_query_{value}"] = y.store(turned, f32, "b0", "s0", "head", f"({place})")
    return {"turning": found}


def written_pages(cache: Operand, sequence: str) -> Variables | None:
    """Of a cache in pages: the places of its table that `count` rows from `start` on go to, and the pages' number."""
    table, page = cache.view.table, cache.view.page
    if table is None:
        return None
    row = c_index([(sequence, table.strides[0])])
    return {
        "from": f"{row} + start / {page}",
        "to": f"{row} + (start + count + {page - 1}) / {page}",
        "pages": cache.view.pages,
    }


def kv_update(k: KVUpdate) -> Variables:
    rows, cache = k.operand("rows"), k.operand("cache")
    b, s, h, d = rows.shape
    count = f"(int64_t){k.operand('valid').at('b')}" if k.has("valid") else "rows_given"
    return {
        "update": {
            "batch": b,
            "seq": s,
            "heads": h,
            "dim": d,
            "length": k.operand("lengths").at("b"),
            "count": count,
            "statement": cache.store(rows.at("b", "s", "h", "i"), rows.compute, "b", "h", "at", "i"),
            "value": rows.at("b", "s", "h", "i"),
            "packed": cache.pointer("b", "h", "at", "0") if cache.dtype == i8 else "",
            "pages": written_pages(cache, "b"),
        }
    }


def scan(k: Scan) -> Variables:
    index = [*names("o", k.outer), "i"]
    x = k.operand("x")
    acc = f64 if k.kind in WIDE_SCANS and x.compute.is_float else x.compute
    ctype = C_TYPES[acc.name]

    def join(a: str, b: str) -> str:
        return SCANS[k.kind].format(a=a, b=b, t=acc.name, type=ctype)

    return {
        "running": {
            "outer_size": product(k.outer),
            "acc_type": ctype,
            "next": join("v", x.at(*index)),
            "doubled": join("sums[lane - d]", "v"),
            "behind": join("before", "v"),
            "carried": join("before", "sums[31]"),
            "x": x.at(*index),
            "statement": k.operand("y").store("v", acc, *index),
        }
    }


def experts(k: Experts, s: ExpertsSchedule | None = None, total: str = "sums[{}][i][n - first]") -> Variables:
    """`total`: where the sum of matrix number {} is found; the schedule is that of a CPU."""
    beside = {} if k.latent is None else latent(k.latent)
    x = k.operand("x")
    matrices = [k.operand(n) for n in ("w", "up") if k.has(n)]
    totals = [total.format(i) for i in range(len(matrices))]
    biases = [k.operand(n) for n in ("b", "up_b") if k.has(n)]

    def loads(o: Operand) -> str:
        return f"mp_expert_vector_{o.dtype.name}, mp_expert_number_{o.dtype.name}"

    if s is not None:  # in panels
        packed, y = s.format, k.operand("y")
        passed = [*biases, *(o for o in k.operands if o.name == "norm_weight")]
        given = {o.name: Operand(f"a.{o.name}", o.view, o.written) for o in (x, y, *passed)}
        used = {name for o in given.values() for name in o.symbols}
        made = k.body.c(
            [*["sums[n - first]", "more[n - first]"][: len(matrices)], *(given[o.name].at("e", "n") for o in biases)]
        )
        loop, shared = ("blocks" if packed.blocks else "vectors"), [f'#include "{packed.header}"']
        if packed.blocks:
            shared.append(f"MP_BLOCK_FORMAT({packed.name}, {packed.c_fields(s.panel, 0)})")
            panels = ", ".join(f".{rows} = mp_panel_{packed.name}_{rows}" for rows in ("one", "four"))
            ahead = f".near = {s.near}, .far = {s.far}"
            product = f".K = {k.depth}, {ahead}, .strip = {BLOCK_STRIP}, .format = &mp_block_{packed.name}, {panels}"
            product += f", .expand = MP_EXPAND({packed.name})"
            floats, apart = packed.x_floats(k.depth), str(packed.x_bytes)
        else:
            functions = _panel_functions(s)
            shared += functions["shared"]
            product = f".K = {k.depth}, .by_panel = {{{', '.join(functions['by_panel'])}}}"
            floats, apart = k.depth, "sizeof(float)"
        return {
            **beside,
            "moe": {
                "id": k.operand("ids").at("r", "j"),
                "matrices": matrices,
                "passed": passed,
                "symbols": [c_symbol(name) for name in sorted(used)],
                "panels": {
                    "norm": _NORMS[k.norm],
                    "eps": c_literal(k.eps, f32),
                    "x_normed": f"x * s.scale * {given['norm_weight'].at('i')}"
                    if len(passed) > len(biases)
                    else "x * s.scale",
                    "x_affine": True,
                    "norm_symbols": [c_symbol(name) for name in sorted(used)],
                    "loop": loop,
                    "type": "mp_linear_blocks" if packed.blocks else "mp_linear",
                    "product": product,
                    "panel": s.panel,
                    "shared": int(x.view.strides[1] == 0),
                    "block": s.row_blocks[1],
                    "tiled_from": s.tiled_from,
                    "panel_bytes": packed.panel_bytes(k.depth, s.panel),
                    "row_bytes": 4 * floats,
                    "apart": apart,
                    "x": given["x"].at("r", "j", "i"),
                    "statement": given["y"].store(made, k.body.dtype, "r", "j", "n"),
                },
            },
            "m": {"shared": [f'#include "mp_experts_{loop}.h"', *shared]},
        }
    return {
        **beside,
        "moe": {
            "panels": None,
            "id": k.operand("ids").at("r", "j"),
            "x": x.at("r", "j", "i"),
            "x_at": x.index("r", "j", "0"),
            "x_loads": loads(x),
            "matrices": [
                {
                    "name": o.name,
                    "loads": loads(o),
                    "start": o.index("e", "0", "0"),
                    "bytes": o.dtype.itemsize,
                    "value": o.at("e", "n", "i"),
                }
                for o in matrices
            ],
            "statement": k.operand("y").store(
                k.body.c([*totals, *(o.at("e", "n") for o in biases)]), k.body.dtype, "r", "j", "n"
            ),
        },
    }


def route(k: Route, x: str = "") -> Variables:
    """`x`: a score, where the scores are no operand."""
    a = k.op.attrs
    sizes = {
        "experts": k.experts,
        "groups": a["groups"],
        "kept": a["kept_groups"],
        "softmax": int(a["score"] == "softmax"),
    }
    return {
        "routing": {
            "x": x or k.operand("x").at("r", "e"),
            "bias": k.operand("bias").pointer("0") if k.has("bias") else "(const float *)0",
            "fields": ", ".join(f".{name} = {value}" for name, value in sizes.items()),
            "in_order": ", ".join(map(str, sizes.values())),
            "factor": f"{c_literal(a['scale'], f32)}{' / sum' if a['normalize'] else ''}",
            "store_share": k.operand("share").store("chance", f32, "r", "j"),
            "gates": a["gates"],
            "store_gate": k.operand("share").store("gate", f32, "r", f"({k.choices} + e - {k.experts})"),
            "store_id": k.operand("ids").store("id", i64, "r", "j"),
        }
    }


def sort(k: Sort) -> Variables:
    outer = names("o", k.outer)
    x = k.operand("x")
    greater, nan = "vb > va", "vb != vb && va == va"
    smaller = "vb < va || (va != va && vb == vb)" if x.dtype.is_float else "vb < va"
    larger = f"{greater} || ({nan})" if x.dtype.is_float else greater
    return {
        "sorting": {
            "outer_size": product(k.outer),
            "ctype": C_TYPES[x.compute.name],
            "va": x.at(*outer, "a"),
            "vb": x.at(*outer, "b"),
            "before": larger if k.descending else smaller,
            "row": x.c_view(*outer),
            "store_value": k.operand("values").store(x.at(*outer, "source"), x.compute, *outer, "i"),
            "store_index": k.operand("indices").store("source", i64, *outer, "i"),
        }
    }


def sample(k: Sample) -> Variables:
    x, y = k.operand("x"), k.operand("y")
    outer = names("o", k.rows)
    found: Variables = {
        "outer_size": product(k.rows),
        "x": x.at(*outer, "i"),
        "real": _real(x.dtype),
        "logits": x.c_view(*outer),
    }
    if k.mode == "penalty":
        found |= {
            "room": k.operand("history").shape[1],
            "counts": k.operand("counts").at("o0"),
            "penalty": k.operand("penalty").at("o0"),
            "history": k.operand("history").at("o0", "j"),
            "statement": y.store("v", f64 if x.dtype == f64 else f32, "o0", "i"),
            "result": y.c_view("o0"),
            "seen": k.operand("history").c_view("o0"),
        }
    else:
        for name in ("top_p", "top_k", "temperature"):
            found[name] = k.operand(name).at(*outer)
        found["random"] = k.operand("random_val").at(*outer)
        found["min_p"] = k.operand("min_p").at(*outer) if k.has("min_p") else "0.0"
        found["store_token"] = y.store("token", i64, *outer)
    return {"sampling": found}


def collective(k: Collective) -> Variables:
    x, y = k.operand("x"), k.operand("y")
    parts = [load(x.dtype, f"part{r}[from + i]") for r in range(k.world)]
    found: Variables = {
        "type": x.ctype,
        "sum_type": C_TYPES[x.compute.name],
        "sum": " + ".join(parts),
        "offset": c_dim(x.view.offset),
    }
    if k.mode == "gather":
        found["places"] = [y.place("row", str(r), "column") for r in range(k.world)]
    else:
        value = k.body.c(["sum", *(e.at("row", "(column + i)") for e in k.group("e"))])
        found["statement"] = y.store(value, k.body.dtype, "row", "(column + i)")
    return {"exchange": found}


def window(k: Window) -> Variables:
    """`sum` is a finished window [top, bottom) x [left, right); x is read at (n, channel, row, column)."""
    x, y, index, acc = k.operand("x"), k.operand("y"), ("n", "o", "i", "j"), k.accumulator
    kind = C_TYPES[acc.name]
    value = x.at("n", "channel", "row", "column")
    weight, channel, depth, start, step = "0", "o", 1, "0", f"{{}} + {value}"
    if k.mode == "conv":
        w = k.operand("w")
        depth = w.shape[1]  # type: ignore[assignment]
        columns = y.shape[1] // k.groups
        channel = f"o / {columns} * ({c_dim(depth)}) + c" if isinstance(depth, Expr) else f"o / {columns} * {depth} + c"
        weight, step = f"({kind}){w.at('o', 'c', 'a', 'b')}", f"{{}} + weight * ({kind}){value}"
    elif k.mode == "max":
        lowest = -math.inf if acc.is_float else -(1 << (acc.bits - 1)) if acc.name.startswith("i") else 0
        start, step = c_literal(lowest, acc), f"mp_maximum_{acc.name}({{}}, {value})"
    return {
        "win": {
            "acc_type": kind,
            "start": start,
            "depth": depth,
            "channel": channel,
            "weight": weight,
            "step": step,
            "finish": f"{{}} / ({kind})({_elements(k)})" if k.mode == "avg" else "{}",
            "total": f"sum + {k.operand('bias').at('o')}" if k.has("bias") else "sum",
            "statement": y.store(k.body.c(["total", *(e.at(*index) for e in k.group("e"))]), k.body.dtype, *index),
            "size": x.shape[2:],
            "out": y.shape,
            "reach": [d * (n - 1) + 1 for n, d in zip(k.kernel, k.dilation, strict=True)],
        }
    }


def _elements(k: Window) -> str:
    """What an average divides by: with padding, as much of it counts at the end as at the begin."""
    if k.divisor is not None:
        return str(k.divisor)
    if k.even:
        return "(bottom - top) * (right - left)"
    if k.include_pad:
        rows, columns = f"mp_min(bottom, height + {k.padding[0]})", f"mp_min(right, width + {k.padding[2]})"
        return f"({rows} - top) * ({columns} - left)"
    return "(mp_min(bottom, height) - mp_max(top, 0)) * (mp_min(right, width) - mp_max(left, 0))"


def conv(k: Conv, s: ConvSchedule) -> Variables:
    """The functions of a packed convolution read its arguments from a structure `a`."""
    a = {o.name: Operand(f"a.{o.name}", o.view, o.written) for o in k.operands}
    passed = [o for o in k.pointers if o.name not in ("w", "copy", "patches", "sums")]
    symbols = [c_symbol(name) for name in sorted(k.mentioned)]
    fields = [f"{'' if o.written else 'const '}{o.ctype} *{o.name};" for o in passed]
    extras = [a[e.name].at("n", "o", "(at + i)") for e in k.group("e")]
    columns, channels, *taps = k.weight.shape
    return {
        "cv": {
            "format": s.format,
            "fields": _filled([*fields, *(f"int64_t {name};" for name in symbols)]),
            "unpacked": [f"const int64_t {name} MP_UNUSED = a.{name};" for name in symbols],
            "given": [*(o.name for o in passed), *symbols],
            "x": a["x"].at("n", "channel", "row", "column"),
            "x_start": "0" if k.copied else k.operand("x").pointer("0", "0", "0", "0"),
            "bias": a["bias"].at("o") if k.has("bias") else "",
            "statement": a["y"].store(k.body.c(["sum", *extras]), k.body.dtype, "n", "o", "(at + i)"),
            "images": k.operand("x").shape[0],
            "channels": channels,
            "columns": columns,
            "taps": taps,
            "depth": product(k.weight.shape[1:]),
            "row_bytes": s.panel * s.format.bits // 8,
            "floats": int(s.format.c_type == "float"),
            "wide": WIDE,
        }
    }


# Text that the template of packed linears needs, with their epilogues.


_LOOPS = {"vectors": "mp_linear.h", "blocks": "mp_linear_blocks.h", "tiles": "mp_linear_tiles.h"}
_NORMS = {"none": "MP_NO_NORM", "rms": "MP_RMS_NORM", "layer": "MP_LAYER_NORM"}
_WIDTH = 112  # columns of a line of declarations


def linear(k: Linear, s: LinearSchedule) -> Variables:
    """The functions of a packed product read its arguments from a structure `a`."""
    a = {o.name: Operand(f"a.{o.name}", o.view, o.written) for o in k.operands}
    passed = [o for o in k.pointers if o.name not in ("w", "v_w", "xt", "partial", "found")]
    other = k.operand("v_w").view.buffer.layout if k.has("v_w") else None
    symbols = _symbols(k, k.mentioned)
    norm = [k.operand(name) for name in ("norm_weight", "norm_bias") if k.has(name)]
    args = [(f"{'' if o.written else 'const '}{o.ctype} *", o.name) for o in passed]
    if k.epilogue == "heads":
        args += [("mp_run *", "run"), ("int ", "step"), ("int ", "writes")]
    if k.epilogue == "argmax":
        args.append(("int64_t *", "mine"))
    if s.gives_tiles and k.epilogue != "heads":
        args.append(("int64_t ", "rows"))
    normed = "(x - s.mean - s.rest) * s.scale" if k.norm == "layer" else "x * s.scale"
    if k.has("norm_weight"):
        normed = f"({normed}) * {a['norm_weight'].at('i')}"
    if k.has("norm_bias"):
        normed = f"{normed} + {a['norm_bias'].at('i')}"
    found: Variables = {
        "format": s.format,
        "other": None if other is None else format_of(other),
        "loop": s.loop,
        "tile_rows": TILE_ROWS,
        "fields": _filled([f"{kind}{name};" for kind, name in (*args, *(("int64_t ", name) for name in symbols))]),
        # `mine`: the best column of each row, so far
        "given": [{"mine": "mp_no_best(found, t, rows)", "writes": "0"}.get(name, name) for _, name in args],
        "symbols": symbols,
        "x_value": a["x"].at("row", "i"),
        "x_normed": normed,
        "x_symbols": _symbols(k, k.operand("x").symbols),
        "x_affine": bool(norm),
        "norm_symbols": _symbols(k, {name for o in norm for name in o.symbols}),
        "eps": c_literal(k.eps, f32),
        "norm": _NORMS[k.norm],
        "columns": k.width,
        "kernel_params": ", ".join(f"{'' if o.written else 'const '}{o.ctype} *{o.name}" for o in k.pointers),
        "sums": s.row_blocks[-1] * s.width,
        "epilogues": _epilogues(k, s, a),
    }
    formats = [f for f in (s.format, found["other"]) if f is not None]
    found["shared"] = [f'#include "{name}"' for name in (_LOOPS[s.loop], *(f.header for f in formats))]
    if k.has("k_cache") and k.operand("k_cache").dtype == i8:
        found["shared"].append('#include "mp_cache_rows.h"')
    if _blocks(k):
        found["shared"] += _SHARED
    if s.loop == "blocks":
        found["shared"] += [f"MP_BLOCK_FORMAT({f.name}, {f.c_fields(s.panel, s.vectors)})" for f in formats]
        found["sliced"] = [f for f in formats if s.blocking.pairs and not f.floats]
        found["shared"] += [f"MP_BLOCK_SLICE({f.name})" for f in found["sliced"]]
    elif not s.tiles:
        panels = _panel_functions(s)
        found["shared"] += panels.pop("shared")
        found |= panels
    if s.tiles:
        units = s.groups if k.epilogue == "heads" else -(-k.columns // s.panel)  # panels that only pad are left out
        found |= {
            "units": units,
            "prefetch": _prefetched(k, s, a),
            "some": TILE_SOME,
            "tiled_from": TILE_ROWS if s.takes_tiles else 0,
        }
    if k.epilogue == "normed":
        found |= tail(k)
    if k.epilogue == "routed":
        found |= route(k.choice, f"scores[r * {k.scores} + e]")
        found["shared"].append('#include "mp_route.h"')
    if k.epilogue == "argmax":
        found["store_best"] = k.operand("y").store("best", i64, "r")
    return found


def _panel_functions(s: LinearSchedule | ExpertsSchedule) -> Variables:
    """The loops over panels of a format; `shared` are lines of the plan's head that make them for all products."""
    packed = s.format
    by_panel = {rows: f"mp_panel_{packed.name}_{rows}" for rows in s.row_blocks}
    fields = packed.c_fields(s.panel, s.vectors)
    ahead = f"{fields}, .line = {s.line}, .near = {s.near}, .far = {s.far}"
    shared = [f"MP_PANEL_FUNCTION({name}, {rows}, {ahead})" for rows, name in by_panel.items()]
    widen = "0" if packed.c_type == "float" else f"mp_widen_{packed.name}"
    if widen != "0":
        shared.append(f"MP_WIDEN_FUNCTION({widen}, {fields})")
    return {"by_panel": list(by_panel.values()), "widen": widen, "shared": shared}


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


def _epilogues(k: Linear, s: LinearSchedule, a: Mapping[str, Operand]) -> list[Variables]:
    """The functions that finish rows. On tile units those of many rows may write tiles, those of a few do not."""
    row = "const int64_t row"
    if k.epilogue == "heads":
        return [{"name": "finish", "template": "heads", "row": row, **_heads(k, s, a)}]
    panels = 1 if s.tiles else s.panels
    template = "pointwise" if k.epilogue == "normed" else k.epilogue
    found = {"name": "finish", "template": template, "row": row, **_epilogue(k, s, a, panels)}
    if not s.gives_tiles:
        return [found]
    by_block = "const int64_t block, const int64_t r"  # rows of a block of 32 lie together in tiles
    many = "routed_tiles" if k.epilogue == "routed" else "tiles"
    return [{**found, "name": "finish_few"}, {**found, "template": many, "row": by_block, "short": _short(k)}]


def _epilogue(k: Linear, s: LinearSchedule, a: Mapping[str, Operand], panels: int) -> Variables:
    """What becomes of the sums of one row and so many panels."""
    width = s.panel * panels
    gated = k.gated
    columns, each = (k.columns // 2, s.panel // 2) if gated else (k.columns, width)
    bias = a["bias"] if k.has("bias") else None

    def summed(place: str, column: str) -> str:
        return place if bias is None else f"{place} + {bias.at(column)}"

    found: Variables = {
        "blocks": _blocks(k),
        "panels": panels,
        "width": width,
        "half": s.panel // 2,
        "each": each,
        "count": str(each) if columns % (width // 2 if gated else each) == 0 else f"mp_min({each}, {columns} - first)",
        "sum": summed("sums[j]", "n"),
        "gate": summed("gates[j]", "n"),
        "up": summed("ups[j]", f"({columns} + n)"),
    }
    if k.epilogue == "normed":
        found |= {"statement": f"a.made[row * {columns} + n] = sum;", "long": False}
    elif k.body is not None and k.epilogue != "argmax":
        made = ["gate", "up"] if gated else ["sum"]
        found["value"] = k.body.c([*made, *(a[e.name].at("row", "n") for e in k.group("e"))])
        found["statement"] = a["y"].store("sum" if found["blocks"] else found["value"], k.body.dtype, "row", "n")
        found["long"] = calls_long(found["statement"])
    return found


def _blocks(k: Linear) -> str:
    """The function of arrays that makes a row of sums the result, if there is one."""
    name = _BLOCKS.get(k.body.node) if k.body is not None and k.body.types[0] == f32 else None
    return f"{name}_blocks" if name and k.epilogue == "pointwise" else ""


def _short(k: Linear) -> str:
    """The function by vectors that makes what becomes bf16, where there is one."""
    node = None if k.body is None else k.body.node
    if k.gated:
        return "mp_vswiglu_short" if node == Call("swiglu", (Arg(0), Arg(1))) and not k.has("bias") else ""
    return "mp_vgelu_short" if node == Call("gelu", (Arg(0),), (("approximate", "none"),)) else ""


def _heads(k: Linear, s: LinearSchedule, a: Mapping[str, Operand]) -> Variables:
    y, kc, vc, table = a["y"], a["k_cache"], a["v_cache"], a["sin"]
    first, second = ("2 * i", "2 * i + 1") if k.algo == "gpt_j" else ("i", "i + HALF")
    norms = []
    if k.has("q_norm"):
        norms.append({"condition": "head < HEADS", "weight": a["q_norm"].at("j")})
    if k.has("k_norm"):
        norms.append({"condition": "head >= HEADS && head < HEADS + KV", "weight": a["k_norm"].at("j")})
    # Machines with tile units have an instruction that rounds rows of bf16.
    store_row, unit = "", 32 if k.head_dim % 32 == 0 else 16  # of a whole row at once
    if kc.dtype == i8:
        store_row = "mp_pack_row(to, sums, DIM);"
    elif s.tiles and k.head_dim % 16 == 0 and all(o.dtype == bf16 and o.view.strides[-1] == 1 for o in (kc, vc)):
        store_row = f"for (int j = 0; j < DIM; j += {unit}) mp_tile_round(to + j, sums + j, {unit});"
    return {
        "cache_rows": [o.pointer("b0", "kv", "at", "0") for o in (kc, vc)],
        "type": kc.ctype,
        "store_row": store_row,
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
        "pages": written_pages(kc, "b0"),
    }


# Template variables of attention on the CPU: views, sizes of blocks, and the variants that a kernel has.


@dataclass(frozen=True)
class Variant:
    """A way in which a kernel runs: the function of mp_attention.h, when it is the one, and the room that it needs."""

    function: str
    when: str
    room: str
    type: str = "float"


def attention(k: Attention, s: AttentionSchedule) -> dict[str, Any]:
    views = [f".{o.name} = {o.c_view()}" for o in k.operands if o.name != "table"]
    views += [f".has_{name} = 1" for name in ("mask", "past", "sinks") if k.has(name)]
    return {
        "attn": {
            "scale": c_literal(k.scale, f64),
            "softcap": c_literal(k.softcap or 0.0, f64),
            "views": views,
            "sizes": [] if s.simple else _sizes(k, s),
            "variants": _variants(k, s),
            "pages": k.operand("k").view.pages,
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
            many |= {"parts": s.parts, "part": s.part, "k_tiles": "k_tiles", "v_tiles": "v_tiles"}
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
            room = f"MP_STRIP_TILES_ROOM(DIM, VALUE, {s.keys}, {s.parts})"
        found.append(Variant(function, f"if (a.queries > {s.few}) " if s.has_few else "", room))
    if s.has_few:
        room = f"MP_FEW_ROOM(GROUP, {dim}, {value}, {s.rows}, {s.chunk})"
        found.append(Variant("mp_attention_few", f"if (a.queries <= {s.few}) " if s.has_many else "", room))
    return found
