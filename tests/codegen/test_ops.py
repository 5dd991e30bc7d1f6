"""Every op alone, compiled for the CPU, in every element type it takes, against the float64 interpreter.

All cases of one element type share one graph, hence one compiler run; the plan is called at several sizes.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.reductions import LONG_ROW
from monoplan.driver import build_graph_executable
from monoplan.ir.builder import Builder
from monoplan.ir.graph import Graph, Param, Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.types import DTYPES, tensor_type
from monoplan.options import Options
from monoplan.runtime.cpu import executable as cpu
from tests.codegen.cases import CASES, SIZES, Case
from tests.matrices import partly
from tests.tolerances import check

KINDS = {
    "pointwise": "pointwise", "view": "pointwise", "copy": "pointwise", "generate": "pointwise",
    "gather": "pointwise", "sort": "pointwise", "fused_pointwise": "pointwise", "collective": "pointwise",
    "fused_collective": "pointwise",
    "sample": "pointwise", "kv_update": "pointwise", "rope": "pointwise", "fused_gather": "pointwise",
    "reduce": "reduce", "softmax": "reduce", "scan": "reduce", "norm": "reduce", "fused_norm": "reduce",
    "fused_reduce": "reduce", "pool": "reduce", "adaptive_pool": "reduce", "scatter": "reduce",
}  # fmt: skip
ALWAYS = ("f32", "bf16", "i64", "bool")
PAIRS = [(d, name) for d in DTYPES for name in REGISTRY if any(c.op == name and c.accepts(DTYPES[d]) for c in CASES)]


def graph_of(cases: Sequence[Case], dtype: str) -> tuple[Graph, list[int]]:
    """One graph of many cases, and how many results each has; operand j of case i is called c<i>_<j>."""
    inputs, params, outputs, counts = [], [], [], []
    with Builder() as b:
        for i, c in enumerate(cases):
            operands: list[Value | None] = []
            for j, (a, t) in enumerate(zip(c.operands, c.types(DTYPES[dtype]), strict=True)):
                value = None if t is None else Value(t, b.fresh(f"c{i}_{j}"))
                operands.append(value)
                if value is not None and a is not None:
                    (params if a.param else inputs).append(value)
            made = b.emit(REGISTRY[c.op], operands, c.attributes(DTYPES[dtype]))
            results = made if isinstance(made, tuple) else (made,)
            outputs += results
            counts.append(len(results))
    graph = Graph(f"ops_{dtype}", tuple(inputs), tuple(Param(v, v.name) for v in params), tuple(b.ops), tuple(outputs))
    return graph, counts


def arrays_of(cases: Sequence[Case], dtype: str, sizes: dict[str, int], param: bool) -> dict[str, Any]:
    """Contents of all inputs or all params; the seed depends on the operand only."""
    found = {}
    for i, c in enumerate(cases):
        for j, a in enumerate(c.operands):
            if a is not None and a.param == param:
                rng = np.random.default_rng([zlib.crc32(c.op.encode()), i, j])
                found[f"c{i}_{j}"] = a.array(DTYPES[dtype], sizes, rng)
    return found


Calls = list[tuple[Case, list[tuple[dict[str, int], list[Any], list[Any]]]]]


@functools.cache
def results(dtype: str) -> Calls | Exception:
    """For each case of an element type: the sizes, compiled and exact results of each call; or what went wrong."""
    flags_for = cpu.flags_for
    with pytest.MonkeyPatch.context() as patch:  # half the time; see test_ops_as_plans_are_built
        patch.setattr(cpu, "flags_for", lambda target: (*flags_for(target), "-O1"))
        try:
            return run_all(dtype)
        except Exception as error:
            return error


def run_all(dtype: str) -> Calls:
    cases = [c for c in CASES if c.accepts(DTYPES[dtype])]
    graph, counts = graph_of(cases, dtype)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text
    params = arrays_of(cases, dtype, SIZES[0], param=True)
    run = build_graph_executable(graph, params)
    found: list[tuple[Case, list[Any]]] = [(c, []) for c in cases]
    for sizes in SIZES:
        inputs = list(arrays_of(cases, dtype, sizes, param=False).values())
        got, want = run(inputs), interpret(graph, inputs, params, exact=True)
        at = 0
        for (_, calls), n in zip(found, counts, strict=True):
            calls.append((sizes, got[at : at + n], want[at : at + n]))
            at += n
    return found


@pytest.mark.parametrize(
    ("dtype", "op"), partly(PAIRS, lambda pair: pair[0] in ALWAYS), ids=[f"{d}-{name}" for d, name in PAIRS]
)
def test_op(dtype: str, op: str) -> None:
    kind = KINDS.get(REGISTRY[op].kind, "matmul")
    found = results(dtype)
    if isinstance(found, Exception):
        raise found
    for c, calls in found:
        for sizes, got, want in calls if c.op == op else ():
            for a, b in zip(got, want, strict=True):
                check_case(a, b, kind, c, dtype, sizes)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "u8", "bool"])
def test_ops_as_plans_are_built(dtype: str) -> None:
    for c, calls in run_all(dtype):
        for sizes, got, want in calls:
            for a, b in zip(got, want, strict=True):
                check_case(a, b, KINDS.get(REGISTRY[c.op].kind, "matmul"), c, dtype, sizes)


def check_case(got: Any, want: Any, kind: str, c: Case, dtype: str, sizes: dict[str, int]) -> None:
    try:
        check(got, want, got.dtype, kind, c.scale)
    except AssertionError as error:
        shown = ", ".join("_" if a is None else a.text for a in c.operands)
        raise AssertionError(f"{c.op}({shown}) {dict(c.attrs)} for {dtype} at {sizes}:\n{error}") from None


def test_threads_share_long_rows() -> None:
    """Rows in parts, the last of which is shorter: results depend on no number of threads; NaN is the largest."""
    rows = {"f32": ("sum", "mean", "max", "min"), "i32": ("sum", "max", "min")}
    inputs, outputs, expected = {}, [], []
    rng = np.random.default_rng(0)
    with Builder() as b:
        for dtype, names in rows.items():
            value = Value(tensor_type(dtype, 2, LONG_ROW + 7), f"x_{dtype}")
            array = rng.integers(-1000, 1000, value.type.shape).astype(dtype.replace("f", "float").replace("i", "int"))
            array[1, 5000] = 3000
            inputs[value] = array
            for name in names:
                outputs.append(b.emit(REGISTRY[name], [value], {"axes": (1,)}))
                expected.append(getattr(np, name)(array.astype(np.float64), axis=1))
    graph = Graph("rows", tuple(inputs), (), tuple(b.ops), tuple(outputs))
    one, three = (build_graph_executable(graph, options=Options(threads=n)) for n in (1, 3))
    made = [np.asarray(a) for a in one(list(inputs.values()))]
    for a, exact in zip(made, expected, strict=True):
        np.testing.assert_array_equal(a, exact.astype(a.dtype))
    assert [np.asarray(a).tobytes() for a in three(list(inputs.values()))] == [a.tobytes() for a in made]
    next(iter(inputs.values()))[0, LONG_ROW + 3] = np.nan
    assert all(np.isnan(a[0]) for a in three(list(inputs.values()))[:4])


def test_every_op_has_cases() -> None:
    missing = sorted(set(REGISTRY) - {c.op for c in CASES} - {"repeat_layers", "scan"})
    assert not missing, f"ops without a compiled test: {missing}"


@pytest.mark.parametrize("op", REGISTRY)
def test_every_op_is_documented(op: str) -> None:
    opdef = REGISTRY[op]
    assert opdef.doc and callable(opdef.rule) and callable(opdef.reference)
    tested = [d for d, name in PAIRS if name == op]
    floats = {"f64", "f32", "f16", "bf16"}
    no_floats = op.startswith(("logical_", "bitwise_")) or op in ("left_shift", "right_shift", "integer_pow")
    some = ("repeat_layers", "scan", "expert_linear", "fused_experts", "route", "linear_route", "heads_rope_cache",
            "latent_rope_cache")  # fmt: skip
    assert op in some or floats <= set(tested) or no_floats, f"{op} is tested in {tested} only"
