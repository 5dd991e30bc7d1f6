"""How reductions run, on both targets: one row for each op of the kind `reduce`."""

from __future__ import annotations

from typing import Any

from monoplan.codegen.expressions import C_TYPES, compute_type
from monoplan.codegen.kernels import Reduce
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, f32, f64, product


@dataclass(frozen=True)
class Reduction:
    """A reduction as C. In its texts, `acc` is the accumulator, {t} the name of its element type, {type} its C type,
    and `inner` the number of elements."""

    combine: str = ""  # the new acc, of acc and an element v
    start: str = ""  # of acc; "": the first element
    wide: bool = False  # acc is double for floats and has the result's type for others; else it is as elements are
    finish: str = "acc"  # the result, of acc
    merge: str = ""  # the new acc, of acc and that of another thread v; "": as combine
    simd: bool = False  # combine adds: the compiler may keep partial sums in the lanes of a vector
    better: str = ""  # in place of combine: whether v is preferred to acc. The result is the place of the best
    order: str = ""  # "max" or "min" if it looks for that element: a CPU compares f32 as integers, by vectors

    def accumulator(self, value: DType, result: DType) -> DType:
        return (f64 if value.is_float else result) if self.wide else value


# On CPUs threads share rows from so many elements on, in parts of so many: results depend on no number of threads.
LONG_ROW, PART_OF_ROW = 16384, 4096

_ADD = "({type})(acc + ({type})v)"

# Sums of floats are kept in double: reductions are bound by memory, and long sums stay right.
REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(_ADD, start="0", wide=True, simd=True),
    "mean": Reduction(_ADD, start="0", wide=True, simd=True, finish="(acc / (double)inner)"),
    "max": Reduction("mp_maximum_{t}(acc, v)", order="max"),
    "min": Reduction("mp_minimum_{t}(acc, v)", order="min"),
    "prod": Reduction("({type})(acc * ({type})v)", start="1", wide=True),
    "any": Reduction("(acc != 0 || v != 0)", start="0", finish="(acc != 0)"),
    "all": Reduction("(acc != 0 && v != 0)", start="1", finish="(acc != 0)"),
    "argmax": Reduction(better="v > acc", order="max"),
    "argmin": Reduction(better="v < acc", order="min"),
}

# Ops of the kind `scan`: what a and the element b behind it become, both of the C type {type}.
SCANS = {
    "cumsum": "({type})({a} + {b})",
    "cumprod": "({type})({a} * {b})",
    "cummax": "mp_maximum_{t}({a}, {b})",
    "cummin": "mp_minimum_{t}({a}, {b})",
}
WIDE_SCANS = ("cumsum", "cumprod")  # of floats in double, as sums are: errors of all steps add up


def reduction_variables(k: Reduce, first: str) -> dict[str, Any]:
    """Template variables of a reduction; `first` is the C condition that acc has no element yet.

    `take` is the statement for element v at i, `combined` that for the result v of another thread, whose best is at i.
    """
    row = REDUCTIONS[k.kind]
    outer, inner = ([f"{prefix}{i}" for i in range(len(dims))] for prefix, dims in (("o", k.outer), ("i", k.inner)))
    value, result = k.pre.compute, compute_type(k.post.types[0])
    acc = row.accumulator(value, result)

    def statement(text: str, tie: str = "") -> str:
        if row.better:
            wins = f"{row.better} || (v != v && acc == acc)" if value.is_float else row.better  # NaN wins, as in numpy
            return f"if ({first} || {wins}{tie}) {{ acc = v; best = i; }}"
        text = text.format(t=acc.name, type=C_TYPES[acc.name])
        return f"acc = {text};" if row.start else f"acc = {first} ? v : {text};"

    equal = "v == acc || (v != v && acc != acc)" if value.is_float else "v == acc"
    found = "best" if row.better else row.finish.format(t=acc.name, type=C_TYPES[acc.name])
    tail = k.post.c([f"({C_TYPES[result.name]})({found})", *(e.at(*outer) for e in k.group("e"))])
    return {
        "outer_size": product(k.outer),
        "inner_size": product(k.inner),
        "acc_type": C_TYPES[acc.name],
        "start": row.start or "0",
        "simd": row.simd,
        "keeps_place": bool(row.better),
        "order": row.order if value == f32 else "",
        "value_type": C_TYPES[value.name],
        "value": k.pre.c([x.at(*outer, *inner) for x in k.group("x")]),
        "take": statement(row.combine),
        "combined": statement(row.merge or row.combine, f"\n                || (({equal}) && i < best)"),
        "finish": k.operand("y").store(tail, k.post.dtype, *outer),
    }
