"""Pointwise ops as expressions: literals, inlining, types."""

from __future__ import annotations

import pytest

from monoplan.ir.dims import same_dims
from monoplan.ir.graph import definitions
from monoplan.passes.expressions import expression_of, inline, is_pointwise, with_accumulators
from tests.passes.support import parse

TEXT = """\
graph g(%x: f32[4], %z: f32[4], %i: i32[4]) {
  %c = full() {shape=(), value=2, dtype=f32} : f32[]
  %many = full() {shape=(4,), value=2.0, dtype=f32} : f32[4]
  %a = mul(%x, %c) : f32[4]
  %b = add(%a, %x) : f32[4]
  %p = pointwise(%a, %z, %a) {expr="sub(mul(x0, x1), x2)"} : f32[4]
  %m = add(%x, %many) : f32[4]
  %g = gelu(%x) {approximate="tanh"} : f32[4]
  %s = softmax(%x) {axis=-1} : f32[4]
  return %b, %p, %m, %g, %s
}
"""
GRAPH = parse(TEXT)
DEFS = definitions(GRAPH)
OPS = {op.results[0].name: op for op in GRAPH.ops}


@pytest.mark.parametrize(
    ("name", "text", "operands"),
    [
        ("a", "mul(x0, 2)", ["x"]),
        ("b", "add(x0, x1)", ["a", "x"]),
        ("p", "sub(mul(x0, x1), x0)", ["a", "z"]),
        ("m", "add(x0, x1)", ["x", "many"]),
        ("g", "gelu(x0, approximate='tanh')", ["x"]),
    ],
)
def test_expression_of(name: str, text: str, operands: list[str]) -> None:
    e = expression_of(OPS[name], DEFS)
    assert (e.text, [v.name for v in e.operands]) == (text, operands)


def test_inline() -> None:
    outer, a = expression_of(OPS["p"], DEFS), OPS["a"].result
    e = inline(outer, a, expression_of(OPS["a"], DEFS))
    assert e.text == "sub(mul(mul(x1, 2), x0), mul(x1, 2))" and [v.name for v in e.operands] == ["z", "x"]


def test_with_accumulators() -> None:
    e = expression_of(OPS["p"], DEFS)
    z, a = OPS["p"].operands[1], OPS["a"].result
    moved = with_accumulators(e, [z], [a])
    assert moved.text == "sub(mul(x1, x0), x1)" and moved.operands == (z, a)


def test_kinds_and_shapes() -> None:
    assert [name for name, op in OPS.items() if is_pointwise(op)] == ["a", "b", "p", "m", "g"]
    vector, number = OPS["a"].result.type, OPS["c"].result.type
    assert same_dims(vector.shape, GRAPH.inputs[2].type.shape) and not same_dims(number.shape, vector.shape)
