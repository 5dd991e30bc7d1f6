"""Template variables of a kernel: its loads, stores and loop shapes as C, one function per family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monoplan.codegen.backend import Variables
from monoplan.codegen.expressions import C_TYPES, c_dim, c_literal, load
from monoplan.codegen.formats import format_of
from monoplan.codegen.kernels import (
    Collective,
    Gather,
    KVUpdate,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Sample,
    Scan,
    Softmax,
    Sort,
)
from monoplan.codegen.operands import Operand
from monoplan.codegen.reductions import reduction_variables
from monoplan.codegen.views import View, merge_dims
from monoplan.ir.dims import Dim
from monoplan.ir.types import DType, f32, f64, i64, product


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


def _merged(operands: Sequence[Operand]) -> tuple[tuple[Dim, ...], list[Operand]]:
    shape, strides = merge_dims([o.view for o in operands])
    merged = [o.with_view(View(o.view.buffer, shape, s, o.view.offset)) for o, s in zip(operands, strides, strict=True)]
    return shape, merged


def pointwise(k: Pointwise) -> Variables:
    shape, merged = _merged(k.operands)
    index = [*names("o", shape[:-1]), "i"] if shape else []
    *inputs, out = merged
    value = k.body.c([x.at(*index) for x in inputs])
    return {"loop": Loop(shape[:-1], shape[-1] if shape else 1, out.store(value, k.body.dtype, *index))}


def reduce(k: Reduce) -> Variables:
    return {"reduction": reduction_variables(k, first="i == 0")}


def _real(dtype: DType) -> str:
    return "double" if dtype == f64 else "float"


def norm(k: Norm) -> Variables:
    index = [*names("o", k.outer), "i"]
    x = k.operand("x")
    real = _real(x.dtype)
    value = f"({x.at(*index)} - mean - rest) * scale" if k.kind == "layer" else f"{x.at(*index)} * scale"
    if k.has("weight"):
        value = f"({value}) * {k.operand('weight').at('i')}"
    if k.has("bias"):
        value = f"{value} + {k.operand('bias').at('i')}"
    tail = k.body.c(["v", *(e.at(*index) for e in k.group("e"))])
    return {
        "normal": {
            "outer_size": product(k.outer),
            "real": real,
            "x": x.at(*index),
            "sqrt": "sqrt" if real == "double" else "sqrtf",
            "centred": f"{x.at(*index)} - mean - rest" if k.kind == "layer" else x.at(*index),
            "value": value,
            "eps": c_literal(k.eps, f64 if real == "double" else f32),
            "statement": k.operand("y").store(tail, k.body.dtype, *index),
        }
    }


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
            "exp": "exp" if wide == f64 else "mp_expf",
            "maximum": f"mp_maximum_{wide.name}",
            "row": f"o{len(k.outer) - 1}",
            "rows": k.outer[-1] if k.outer else 1,
            "statement": k.operand("y").store("v", wide, *index),
        }
    }


def matmul(k: Matmul) -> Variables:
    batch = names("b", k.batch)
    tail = k.body.c(["acc[j]", *(e.at(*batch, "m", "(n0 + j)") for e in k.group("e"))])
    return {
        "prod": {
            "outer_size": product(k.batch) * k.rows,
            "acc_type": C_TYPES[k.accumulator.name],
            "a": k.operand("a").at(*batch, "m", "i"),
            "b": k.operand("b").at(*batch, "i", "(n0 + j)"),
            "statement": k.operand("y").store(tail, k.body.dtype, *batch, "m", "(n0 + j)"),
        }
    }


def gather(k: Gather) -> Variables:
    outer, inner = names("o", k.outer), names("i", k.inner)
    x = k.operand("x")
    layout = x.view.buffer.layout if k.packed else None
    value = x.at(*outer, "at", *inner) if layout is None else load(x.dtype, "row[i0]")
    tail = k.body.c([value, *(e.at(*outer, *inner) for e in k.group("e"))])
    return {
        "lookup": {
            "outer_size": product(k.outer),
            "inner_size": product(k.inner),
            "index": k.operand("index").at(*outer),
            "statement": k.operand("y").store(tail, k.body.dtype, *outer, *inner),
            "layout": layout,
            "format": layout and format_of(layout),
            "ctype": C_TYPES[x.dtype.name],
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
        }
    }


def scan(k: Scan) -> Variables:
    index = [*names("o", k.outer), "i"]
    x = k.operand("x")
    return {
        "running": {
            "outer_size": product(k.outer),
            "acc_type": C_TYPES[x.compute.name],
            "x": x.at(*index),
            "statement": k.operand("y").store("v", x.compute, *index),
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
            "va": x.at(*outer, "from[a]"),
            "vb": x.at(*outer, "from[b]"),
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
