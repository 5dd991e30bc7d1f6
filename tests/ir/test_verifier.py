"""Every rule of the verifier, broken once."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.ops.elementwise import add, exp, gelu
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import tensor_type
from monoplan.ir.verifier import verify

F2 = tensor_type("f32", 2)

CACHE = """\
graph g(%cache: f32[2, 1, 8, 4], %rows: f32[2, 3, 1, 4], %lengths: i32[2]) {{
  %kv_update = kv_update(%cache, %rows, %lengths, _) : f32[2, 1, 8, 4]
  {line}
  return {outputs}
}}
"""


def value(name: str, t: Any = F2) -> Value:
    return Value(t, name)


def make(opdef: Any, operands: list[Value | None], results: list[Value], **attrs: Any) -> Op:
    return Op(opdef, tuple(operands), opdef.complete_attrs(attrs), tuple(results), Loc("here", "f.py", 3))


def refused(graph: Graph, match: str) -> VerifyError:
    with pytest.raises(VerifyError, match=match) as caught:
        verify(graph)
    return caught.value


def test_a_sound_graph_passes() -> None:
    x, y = value("x"), value("y")
    verify(Graph("g", (x,), (), (make(exp, [x], [y]),), (y, x)))
    verify(Graph("empty", (), (), (), ()))


def test_defined_twice() -> None:
    x, y = value("x"), value("y")
    refused(Graph("g", (x, x), (), (), ()), "%x is defined twice")
    refused(Graph("g", (x, value("x")), (), (), ()), "%x is defined twice")
    refused(Graph("g", (x,), (Param(value("x"), "w"),), (), ()), "%x is defined twice")
    again = refused(Graph("g", (x,), (), (make(exp, [x], [y]), make(exp, [x], [y])), (y,)), "%y is defined twice")
    assert '@ "here" "f.py":3' in str(again.where)
    refused(Graph("g", (x,), (), (make(exp, [x], [y]), make(exp, [x], [value("y")])), (y,)), "%y is defined twice")


def test_read_before_definition() -> None:
    x, y, z = value("x"), value("y"), value("z")
    early = (make(exp, [y], [z]), make(exp, [x], [y]))
    error = refused(Graph("g", (x,), (), early, (z,)), "%y is read before its definition")
    assert "%z = exp(%y)" in str(error.where)
    refused(Graph("g", (x,), (), (), (y,)), "output %y of g is not defined")
    # The same name is not the same value.
    refused(Graph("g", (x,), (), (make(exp, [value("x")], [y]),), (y,)), "%x is read before its definition")


def test_types_are_inferred_again() -> None:
    x = value("x")
    wrong = value("y", tensor_type("f16", 2))
    refused(Graph("g", (x,), (), (make(exp, [x], [wrong]),), (wrong,)), r"gives \(f32\[2\],\), the results say")
    ids, out = value("ids", tensor_type("i64", 2)), value("y", tensor_type("i64", 2))
    refused(Graph("g", (ids,), (), (make(exp, [ids], [out]),), (out,)), "exp needs floating point")
    three = value("z", tensor_type("f32", 3))
    refused(Graph("g", (x, three), (), (make(add, [x, three], [value("y")]),), ()), "do not broadcast")
    two = Op(exp, (x,), {}, (value("y"), value("z")))
    refused(Graph("g", (x,), (), (two,), ()), "the type rule of exp gives")


def test_attributes_are_complete_and_known() -> None:
    x, y = value("x"), value("y")
    refused(Graph("g", (x,), (), (Op(gelu, (x,), {}, (y,)),), (y,)), "attributes are not complete")
    extra = Op(gelu, (x,), {"approximate": "none", "exact": True}, (y,))
    refused(Graph("g", (x,), (), (extra,), (y,)), "unknown attributes exact")
    missing = Op(REGISTRY["reshape"], (x,), {}, (y,))
    refused(Graph("g", (x,), (), (missing,), (y,)), "attributes shape are required")
    odd = Op(REGISTRY["reshape"], (x,), {"shape": 3}, (y,))
    refused(Graph("g", (x,), (), (odd,), (y,)), "reshape: attributes or operands do not fit")


def test_operands_are_complete() -> None:
    x, y = value("x"), value("y")
    refused(Graph("g", (x,), (), (Op(add, (x,), {}, (y,)),), (y,)), r"add takes \(a, b\); got 1 operands")
    refused(Graph("g", (x,), (), (Op(add, (x, None), {}, (y,)),), (y,)), "operand b is missing")


def test_setup_reads_parameters_only() -> None:
    x, w, y, z = value("x"), value("w"), value("y"), value("z")
    good = Graph("g", (x,), (Param(w, "w"),), (), (z,), (make(exp, [w], [y]), make(exp, [y], [z])))
    verify(good)
    refused(good.replace(setup=(make(exp, [x], [y]), make(exp, [y], [z]))), "a setup op reads a value that is not")


def test_overwritten_storage_is_not_read() -> None:
    verify(parse_graph(CACHE.format(line="%exp = exp(%rows) : f32[2, 3, 1, 4]", outputs="%kv_update")))
    late = parse_graph(CACHE.format(line="%exp = exp(%cache) : f32[2, 1, 8, 4]", outputs="%exp"))
    refused(late, "%cache is read after kv_update overwrote its storage")
    refused(parse_graph(CACHE.format(line="", outputs="%cache")), "output %cache of g was overwritten")
    twice = "%again = kv_update(%cache, %rows, %lengths, _) : f32[2, 1, 8, 4]"
    refused(parse_graph(CACHE.format(line=twice, outputs="%again")), "%cache is read after kv_update")
    chain = "%again = kv_update(%kv_update, %rows, %lengths, _) : f32[2, 1, 8, 4]"
    verify(parse_graph(CACHE.format(line=chain, outputs="%again")))


def test_writes_keep_the_type_of_their_input() -> None:
    x, y, z = value("x"), value("y"), value("z", tensor_type("f16", 2))
    to_half = make(REGISTRY["cast"], [x], [z], dtype=z.type.dtype)
    graph = Graph("g", (x,), (), (make(exp, [x], [y]), to_half), (y, z), writes=((0, 0),))
    verify(graph)
    refused(graph.replace(writes=((0, 1),)), r"output %z: f16\[2\] can't replace input %x: f32\[2\]")
    refused(graph.replace(writes=((0, 2),)), "there is no such pair")
    refused(graph.replace(writes=((1, 0),)), "there is no such pair")


REPEAT = """\
graph g(%x: f32[2], %w0: f32[2], %w1: f32[2]) {
  %repeat_layers = repeat_layers(%x, %w0, %w1) {count=2, carried=1, shared=0} : f32[2]
    graph body(%h: f32[2], %w: f32[2]) {
      %add = add(%h, %w) : f32[2]
      return %add
    }
  return %repeat_layers
}
"""


def test_sizes_follow_from_those_of_inputs() -> None:
    for line in (
        "%a = full() {shape=(n, m), value=0.0, dtype=f32} : f32[n, m]",
        "%a = slice(%x) {axis=0, start=m, length=1, step=1} : f32[1]",
    ):
        text = f"graph g(%x: f32[n]) {{\n  {line}\n  return %a\n}}\n"
        with pytest.raises(VerifyError, match="has the symbolic size 'm', which no input has"):
            verify(parse_graph(text))
    text = 'graph g(%x: f32[n]) {\n  param %w: f32[n] = "w"\n  return %x, %w\n}\n'
    with pytest.raises(VerifyError, match="the parameter %w has a symbolic size"):
        verify(parse_graph(text))


def test_one_path_is_one_parameter() -> None:
    text = 'graph g(%x: f32[2]) {{\n  param %a: f32[2] = "w"\n  param %b: {} = "w"\n  return %x, %a, %b\n}}\n'
    verify(parse_graph(text.format("f32[2]")))
    with pytest.raises(VerifyError, match="the parameters %a and %b are both 'w', but of different types"):
        verify(parse_graph(text.format("f32[3]")))


def test_bodies_are_verified_too() -> None:
    graph = parse_graph(REPEAT)
    verify(graph)
    (op,) = graph.ops
    body = op.attrs["body"]
    stray = value("stray")
    broken = body.replace(ops=(make(add, [body.inputs[0], stray], [body.outputs[0]]),))
    bad = Op(op.opdef, op.operands, {**op.attrs, "body": broken}, op.results)
    refused(graph.replace(ops=(bad,)), "%stray is read before its definition")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("count=2", "count=3", "3 operands, expected 1 carried"),
        ("%w: f32[2]) {", "%w: f32[1]) {", r"body input %w is f32\[1\], got f32\[2\]"),
    ],
)
def test_repeat_operands_fit_the_body(old: str, new: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_graph(REPEAT.replace(old, new))
