"""Text of graphs: what is printed is read back to the same text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.ir.builder import Builder, build_graph
from monoplan.ir.dims import symbol
from monoplan.ir.graph import Graph, Loc, Op, Value
from monoplan.ir.ops.elementwise import add, cast, exp, mul, where
from monoplan.ir.ops.fused import repeat_layers
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.reduce import rms_norm, softmax, sum_
from monoplan.ir.ops.shape import arange, full, reshape, split
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import format_attr, print_graph
from monoplan.ir.types import f16, f32, tensor_type
from monoplan.ir.verifier import verify

FFN = """\
graph ffn(%x: f32[batch, seq, 8], %mask: bool[seq]) {
  param %norm.weight: f32[8] = "norm.weight"
  param %w: f32[16, 8] = "layers.0.\\"w\\""
  setup %cast = cast(%w) {dtype=f16} : f16[16, 8]
  %rms_norm = rms_norm(%x, %norm.weight) {eps=1e-06, dims=1} : f32[batch, seq, 8]
  %linear = linear(%rms_norm, %cast) : f32[batch, seq, 16]
  %split, %split_1 = split(%linear) {sizes=(8, 8), axis=2} : f32[batch, seq, 8], f32[batch, seq, 8]
  %swiglu = swiglu(%split, %split_1) : f32[batch, seq, 8]
  %slice = slice(%swiglu) {axis=1, start=seq-1, length=1, step=1} : f32[batch, 1, 8]
  %full = full() {shape=(), value=-inf, dtype=f32} : f32[]
  return %slice, %full
}
"""


def assert_round_trip(graph: Graph) -> None:
    for locs in (False, True):
        text = print_graph(graph, locs=locs)
        again = parse_graph(text)
        assert print_graph(again, locs=locs) == text
        verify(again)


def test_a_graph_in_text() -> None:
    graph = parse_graph(FFN)
    assert str(graph) == FFN
    verify(graph)
    assert graph.symbols == ("batch", "seq") and len(graph.setup) == 1 and len(graph.outputs) == 2
    assert graph.params[1].path == 'layers.0."w"'
    assert graph.ops[1].operands[2] is None and graph.ops[1].operand("x") is graph.ops[0].result


def test_blank_lines_and_comments_are_skipped() -> None:
    text = "// a head\n\n" + FFN.replace("  return", "\n  // before the end\n  return") + "\n// a tail\n"
    assert str(parse_graph(text)) == FFN


def test_writes() -> None:
    text = """\
graph g(%cache: f32[2, 1, n, 4], %rows: f32[2, 3, 1, 4], %lengths: i32[2]) {
  %kv_update = kv_update(%cache, %rows, %lengths) : f32[2, 1, n, 4]
  %exp = exp(%rows) : f32[2, 3, 1, 4]
  return %exp, %kv_update -> %cache
}
"""
    graph = parse_graph(text)
    assert graph.writes == ((0, 1),) and str(graph) == text


def test_locations() -> None:
    b = Builder(taken=["x"])
    x = Value(tensor_type("f32", 2), "x")
    b.loc = Loc("model.layers.3", "/home/me/my model.py", 17)
    y = b.emit(exp, [x], {})
    b.loc = Loc("", 'quote".py', 3)
    z = b.emit(exp, [y], {})  # type: ignore[list-item]
    b.loc = Loc()
    w = b.emit(exp, [z], {})  # type: ignore[list-item]
    graph = Graph("g", (x,), (), tuple(b.ops), (w,))  # type: ignore[arg-type]
    assert_round_trip(graph)
    again = parse_graph(print_graph(graph, locs=True))
    assert [op.loc for op in again.ops] == [op.loc for op in graph.ops]
    assert str(again.ops[0].loc) == "/home/me/my model.py:17 in model.layers.3"
    assert all(op.loc == Loc() for op in parse_graph(print_graph(graph)).ops)


def _body() -> Graph:
    def step(h: Value, scale: Value, w: Value) -> tuple[Value, Value]:
        y = linear(rms_norm(h, scale), w)
        return add(h, y), y

    types = {"h": tensor_type("f32", "n", 4), "scale": tensor_type("f32", 4), "w": tensor_type("f32", 4, 4)}
    return build_graph("layer", step, types)


def repeated() -> Graph:
    """Three turns of a body that carries h, shares scale and has its own w."""
    body = _body()

    def whole(x: Value, scale: Value, **ws: Value) -> Any:
        return repeat_layers(x, scale, *ws.values(), count=3, carried=1, shared=1, body=body)

    weights = {f"w{i}": tensor_type("f32", 4, 4) for i in range(3)}
    return build_graph("g", whole, {"x": tensor_type("f32", "n", 4), "scale": tensor_type("f32", 4)}, weights)


def test_nested_body() -> None:
    graph = repeated()
    assert_round_trip(graph)
    again = parse_graph(print_graph(graph))
    (op,) = again.ops
    assert len(op.results) == 4 and op.attrs["body"].name == "layer" and len(op.attrs["body"].ops) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "1"),
        (True, "True"),
        (None, "None"),
        (1e-05, "1e-05"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (0.1, "0.1"),
        ((), "()"),
        ((2,), "(2,)"),
        ((2, (3, 4)), "(2, (3, 4))"),
        ('a "b"', '"a \\"b\\""'),
        (f16, "f16"),
        (symbol("n") + 1, "n+1"),
    ],
)
def test_attributes(value: object, text: str) -> None:
    assert format_attr(value) == text


def test_other_attributes_are_refused() -> None:
    with pytest.raises(TypeError, match="can't be a dict"):
        format_attr({})


NAMES = st.sampled_from(["x", "layers.0.w", "a-b", "q$1", "_"])
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(st.tuples(st.integers(0, 6), FLOATS, st.integers(1, 9)), max_size=8), NAMES)
def test_random_graphs_round_trip(steps: list[tuple[int, float, int]], name: str) -> None:
    x = Value(tensor_type("f32", "batch", 6), name)
    with Builder(taken=[name]) as b:
        current: Any = x
        for kind, number, whole in steps:
            if kind == 0:
                current = mul(current, full(value=number))
            elif kind == 1:
                current = reshape(reshape(current, shape=(symbol("batch") * 6,)), shape=(symbol("batch"), 6))
            elif kind == 2:
                parts = split(current, sizes=(2, 4), axis=-1)
                current = mul(current, sum_(parts[whole % 2], axes=(1,), keepdims=True))
            elif kind == 3:
                current = softmax(current, axis=-1)
            elif kind == 4:
                b.loc = Loc(f"layers.{whole}", 'a "file".py', whole)
                current = add(current, exp(current))
            elif kind == 5:
                current = cast(cast(current, dtype=f16), dtype=f32)
            else:
                places = cast(arange(length=6, start=symbol("batch") * whole), dtype=f32)
                current = where(full(value=True, dtype=_bool()), current, places)
        graph = Graph("g", (x,), (), tuple(b.ops), (current,))
    assert_round_trip(graph)


def _bool() -> Any:
    from monoplan.ir.types import bool_

    return bool_


def test_names_are_deterministic() -> None:
    b = Builder(taken=["exp_1"])
    x = Value(tensor_type("f32", 2), "x")
    names = [b.emit(exp, [x], {}).name for _ in range(3)]  # type: ignore[union-attr]
    assert names == ["exp", "exp_2", "exp_3"]
    assert isinstance(b.ops[0], Op) and repr(b.ops[0]) == "<exp -> %exp>"
