"""Storage: results are always the caller's own, views cost nothing and mean the same, state changes in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.driver import build_graph_executable
from monoplan.ir.builder import build_graph
from monoplan.ir.dims import symbol
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Graph, Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import address, aligned, tensor_type
from monoplan.runtime.cpu import executable as cpu_frame
from tests.tolerances import check

B, S = symbol("b"), symbol("s")
TARGET = cpu_target("generic", 16)


def op(name: str, *operands: Any, **attrs: Any) -> Any:
    return REGISTRY[name](*operands, **attrs)


def arrays(graph: Graph, seed: int = 0, **sizes: int) -> list[Any]:
    from tests.conftest import random_array

    rng = np.random.default_rng(seed)
    return [random_array(v.type, rng, **sizes) for v in graph.inputs]


def compare(graph: Graph, inputs: list[Any], params: dict[str, Any] | None = None, run: Any = None) -> list[Any]:
    """Runs and checks a graph; no output may share memory with an input, a param or another output."""
    run = run or build_graph_executable(graph, params)
    before = [a.copy() for a in inputs]
    got, want = run(inputs), interpret(graph, before, params, exact=True)
    for v, a, b in zip(graph.outputs, got, want, strict=True):
        check(a, b, v.type.dtype, "matmul", 30)
    for i, a in enumerate(got):
        assert not any(np.shares_memory(a, x) for x in (*inputs, *got[:i], *(params or {}).values()))
    for a, b in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(a, b)
    return got  # type: ignore[no-any-return]


def test_outputs_are_the_callers_own() -> None:
    def forward(x: Value, i: Value, w: Value) -> list[Value]:
        y = op("add", x, x)
        found = [x, x, i, w, w, y, y, op("transpose", y, axes=(1, 0)), op("reshape", y, shape=(S * 4,))]
        found += [
            op("transpose", x, axes=(1, 0)),
            op("slice", x, axis=1, start=1, length=2),
            op("slice", w, axis=0, start=2, length=1),
            op("expand", i, shape=(3, 2)),
            op("reshape", x, shape=(4, S)),
        ]
        found += [op("full", value=2.5, shape=(2,)), op("arange", length=S), *op("split", x, sizes=(1, 3))]
        ramp = op("reshape", op("arange", length=S * 4, start=S), shape=(S, 4))
        found += [op("transpose", ramp, axes=(1, 0)), op("slice", ramp, axis=1, start=2, length=1)]
        return found

    types = {"x": tensor_type("f32", "s", 4), "i": tensor_type("i64", 2)}
    graph = build_graph("outputs", forward, types, {"w": tensor_type("f32", 3, 4)})
    params = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    run = build_graph_executable(graph, params)
    for s in (5, 1, 0):
        got = compare(graph, arrays(graph, s=s), params, run)
        got[3][:] = 77  # the plan keeps its own weights
    assert (params["w"] < 20).all() and (run(arrays(graph, s=2))[4] < 20).all()


def test_views_feed_every_kernel() -> None:
    """Transposed, sliced, expanded and virtual operands reach each kernel family, with symbolic sizes."""

    def forward(x: Value, t: Value, ids: Value, c: Value, w: Value, g: Value) -> list[Value]:
        turned = op("transpose", x, axes=(1, 0))  # (s, 6) with strides (1, s)
        cut = op("slice", turned, axis=1, start=1, length=4)
        wide = op("expand", op("slice", t, axis=0, start=S - 1, length=1), shape=(S, 6))
        ramp = op("cast", op("expand", op("arange", length=6), shape=(S, 6)), dtype=tensor_type("f32").dtype)
        const = op("full", value=0.5, shape=(S, 6))
        last = op("reshape", op("slice", t, axis=0, start=S - 1, length=1), shape=(6,))
        found = []
        for v in (turned, wide, ramp, const, op("reshape", turned, shape=(S, 6))):
            found += [op("linear", v, w), op("rms_norm", v, g), op("softmax", v, axis=0), op("cumsum", v, axis=0)]
            found += [op("sum", v, axes=(0,)), op("argmax", v, axis=1), *op("sort", v), op("matmul", v, x)]
            found += [op("gather", v, ids, axis=1), op("concat", v, cut, axis=1), op("repeat", v, repeats=2, axis=0)]
            found += [op("reshape", v, shape=(6, S)), op("layer_norm", v, last, last)]
            found.append(op("fused_linear", v, w, None, last, None, v, norm="rms", eps=1e-5, expr="add(x0, x1)"))
        q = op("reshape", turned, shape=(1, S, 2, 3))
        heads = op("transpose", op("reshape", t, shape=(1, S, 2, 3)), axes=(0, 2, 1, 3))
        found += [op("attention", op("transpose", q, axes=(0, 2, 1, 3)), heads, heads, causal=True)]
        found += [op("attention", q, heads, heads, layout="bshd")]
        tables = [op("slice", f, axis=0, start=0, length=S) for f in (t, turned)]
        tables = [op("slice", f, axis=1, start=0, length=1) for f in tables]
        found.append(op("rope", op("slice", q, axis=3, start=0, length=2), op("arange", length=S), *tables))
        found += [
            op("embedding", ids, wide),
            op(
                "select_rows",
                op("reshape", turned, shape=(S, 2, 3)),
                op("expand", op("full", value=1, dtype=tensor_type("i32").dtype), shape=(S,)),
            ),
        ]
        found += [op("linear", turned, op("transpose", c, axes=(1, 0))), op("linear", const, w, last)]
        return found

    types = {"x": tensor_type("f32", 6, "s"), "t": tensor_type("f32", "s", 6), "ids": tensor_type("i32", 3)}
    types["c"] = tensor_type("f32", 6, 4)
    graph = build_graph("views", forward, types, {"w": tensor_type("f32", 6, 6), "g": tensor_type("f32", 6)})
    rng = np.random.default_rng(3)
    params = {"w": rng.standard_normal((6, 6)).astype("f4"), "g": rng.standard_normal(6).astype("f4")}
    run = build_graph_executable(graph, params)
    for s in (1, 4, 11):
        inputs = arrays(graph, seed=s, s=s)
        inputs[2] = np.zeros(3, np.int32)
        compare(graph, inputs, params, run)


def test_symbols_may_have_any_name() -> None:
    """Names that the templates use themselves mean the caller's size all the same."""
    names = ("t", "i", "o", "n", "x0", "run", "step", "rows", "K", "int", "acc", "outer", "at", "NULL", "y")

    def forward(**values: Value) -> list[Value]:
        found = []
        for name, v in values.items():
            turned = op("transpose", v, axes=(1, 0))
            found += [op("add", turned, turned), op("sum", v, axes=(1,)), op("softmax", turned), op("linear", v, v)]
            found += [op("concat", v, op("full", value=1.0, shape=(symbol(name), 1)), axis=1), *op("sort", turned)]
        return found

    graph = build_graph("names", forward, {n: tensor_type("f32", n, 3) for n in names})
    rng = np.random.default_rng(0)
    compare(graph, [rng.standard_normal((i + 1, 3)).astype("f4") for i in range(len(names))])


def test_the_name_threads_is_taken() -> None:
    graph = build_graph("taken", lambda x: op("neg", x), {"x": tensor_type("f32", "threads")})
    with pytest.raises(CompileError, match="can't be named threads"):
        make_plan(graph, TARGET)


CACHE = {"cache": tensor_type("f32", "b", 2, 7, 3), "rows": tensor_type("f32", "b", "s", 2, 3),
         "lengths": tensor_type("i64", "b")}  # fmt: skip


def cache_inputs(graph: Graph) -> list[Any]:
    inputs = arrays(graph, b=2, s=3)
    inputs[2] = np.array([0, 4])
    return inputs


def test_state_is_updated_in_place() -> None:
    graph = build_graph("state", lambda cache, rows, lengths: op("kv_update", cache, rows, lengths), CACHE)
    state = graph.replace(writes=((0, 0),))
    assert make_plan(graph, TARGET).outputs[0] != 0
    assert make_plan(state, TARGET).outputs == (0,) and len(make_plan(state, TARGET).items) == 1
    inputs = cache_inputs(state)
    (got,), (want,) = build_graph_executable(state)(inputs), interpret(state, inputs)
    np.testing.assert_array_equal(got, want)


def test_old_contents_survive_an_update() -> None:
    """What was cut out of a cache before its update keeps the old values, though it was only a view."""

    def forward(cache: Value, rows: Value, lengths: Value) -> list[Value]:
        old = op("slice", cache, axis=2, start=0, length=4)
        flat = op("reshape", old, shape=(B, 24))
        new = op("kv_update", cache, rows, lengths)
        mine = op("mul", old, op("full", value=2.0))
        kept = op("transpose", mine, axes=(0, 1, 3, 2))
        first = op("mul", lengths, op("full", value=0, dtype=lengths.type.dtype))
        again = op("kv_update", mine, op("slice", rows, axis=1, start=0, length=1), first)
        return [op("add", old, old), old, flat, kept, op("sum", again, axes=(1, 2, 3)), again, new]

    graph = build_graph("old", forward, CACHE)
    compare(graph, cache_inputs(graph))
    state = graph.replace(writes=((0, 6),))
    inputs = cache_inputs(state)
    got, want = build_graph_executable(state)(inputs), interpret(state, inputs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_updates_follow_each_other() -> None:
    def forward(cache: Value, rows: Value, lengths: Value) -> list[Value]:
        one = op("kv_update", cache, rows, lengths)
        second = op("expand", op("full", value=1, dtype=lengths.type.dtype), shape=(B,))
        two = op("kv_update", one, op("neg", rows), second)
        return [op("sum", two), two]

    graph = build_graph("twice", forward, CACHE)
    compare(graph, cache_inputs(graph))
    state = graph.replace(writes=((0, 1),))
    inputs = cache_inputs(state)
    for a, b in zip(build_graph_executable(state)(inputs), interpret(state, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.fixture
def fenced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a plan gets of memory has a fence behind it; a list of the fences, which must stay 0xA5."""
    fences: list[Any] = []

    def allocate(shape: Any, dtype: Any) -> Any:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        memory = aligned((size + 4096,), np.uint8)
        memory[size:] = 0xA5
        fences.append(memory[size:])
        return memory[:size].view(kind).reshape(shape)

    def maker(ffi: Any, number: int, shape: Any, dtype: Any, *_: Any) -> Any:
        def make(table: Any) -> Any:
            made = allocate(shape, dtype)
            table[number] = ffi.cast("void *", address(made))
            return made

        return make

    monkeypatch.setattr(cpu_frame, "_maker", maker)
    monkeypatch.setattr(cpu_frame, "aligned", allocate)
    return fences


def test_sizes_of_zero(fenced: list[Any]) -> None:
    """An empty batch, and dimensions of static size 0, run through every family without touching memory."""

    def forward(x: Value, e: Value, w: Value) -> list[Value]:
        found = [op("add", x, x), op("linear", x, w), op("sum", x, axes=(0,)), op("sum", x, axes=(1,))]
        found += [op("softmax", x), op("rms_norm", x), *op("sort", x), op("cumsum", x)]
        found.append(op("matmul", x, op("transpose", x, axes=(1, 0))))
        found += [op("gather", x, op("arange", length=2), axis=1), op("reshape", x, shape=(4, B)), op("concat", x, x)]
        found += [op("add", e, e), op("sum", e), op("mean", e, axes=(0,))]
        found.append(op("matmul", e, op("reshape", e, shape=(0, 3))))
        found += [op("concat", e, op("full", value=1.0, shape=(3, 2)), axis=1), op("reshape", e, shape=(0, 5))]
        found.append(op("reshape", op("transpose", e, axes=(1, 0)), shape=(7, 0)))
        return found

    types = {"x": tensor_type("f32", "b", 4), "e": tensor_type("f32", 3, 0)}
    graph = build_graph("empty", forward, types, {"w": tensor_type("f32", 5, 4)})
    params = {"w": np.ones((5, 4), np.float32)}
    run = build_graph_executable(graph, params)
    for b in (0, 2):
        compare(graph, arrays(graph, b=b), params, run)
    assert fenced and all((fence == 0xA5).all() for fence in fenced)


def test_products_of_no_rows_write_nothing(fenced: list[Any]) -> None:
    """Every epilogue: one row is a special case, and none is not to be taken for it."""

    def forward(x: Value, w: Value) -> list[Value]:
        product = op("linear", op("rms_norm", x), w)
        return [product, op("linear_argmax", x, w), op("silu", product)]

    graph = build_graph("no_rows", forward, {"x": tensor_type("f32", "b", 16)}, {"w": tensor_type("f32", 40, 16)})
    params = {"w": np.ones((40, 16), np.float32)}
    run = build_graph_executable(graph, params)
    for run.executable.threads in (1, 3):
        compare(graph, arrays(graph, b=0), params, run)
    assert fenced and all((fence == 0xA5).all() for fence in fenced)
