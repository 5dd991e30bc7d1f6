"""Tools to make a changed graph from an old one, and the dce pass."""

from __future__ import annotations

from monoplan.ir.graph import Value
from monoplan.ir.printer import print_graph
from monoplan.ir.types import tensor_type
from monoplan.passes.pipeline import DCE
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead, replace_values, substitute
from tests.passes.conftest import Golden
from tests.passes.support import parse, run, same_numbers, unchanged

DEAD = """\
graph g(%x: f32[4], %unused: f32[2]) {
  param %w: f32[4] = "w"
  param %v: f32[4] = "v"
  setup %s = neg(%w) : f32[4]
  setup %t = exp(%v) : f32[4]
  %a = add(%x, %s) : f32[4]
  %b = mul(%a, %t) : f32[4]
  %c = exp(%b) : f32[4]
  %values, %indices = sort(%a) {axis=-1, descending=False} : f32[4], i64[4]
  return %a, %indices
}
"""
CACHE = """\
graph g(%c: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]) {
  %y = exp(%c) : f32[2, 1, 8, 4]
  %k = kv_update(%c, %r, %lengths, _) : f32[2, 1, 8, 4]
  %z = neg(%y) : f32[2, 1, 8, 4]
  return %z, %k -> %c
}
"""


def test_dce(golden: Golden) -> None:
    before = parse(DEAD)
    after, _ = run(DCE, before)
    golden(print_graph(after))
    same_numbers(before, after)
    unchanged(DCE, after)


def test_dce_keeps_state_writes_and_inputs() -> None:
    graph = parse(CACHE)
    assert drop_dead(graph) is graph
    unused = parse(DEAD)
    assert drop_dead(unused).inputs == unused.inputs


def test_dce_drops_a_write_that_nobody_wants() -> None:
    graph = parse(CACHE.replace(", %k -> %c", ""))
    assert [op.name for op in drop_dead(graph).ops] == ["exp", "neg"]


def test_substitute_infers_types_again_where_they_change() -> None:
    graph = parse("graph g(%x: f32[4]) {\n  %a = exp(%x) : f32[4]\n  %b = neg(%a) : f32[4]\n  return %b\n}\n")
    wide = Value(tensor_type("f64", 4), "wide")
    new = {graph.inputs[0]: wide}
    made = substitute(graph.ops, new)
    assert [str(op.result.type) for op in made] == ["f64[4]", "f64[4]"] and new[graph.ops[1].result] is made[1].result
    same = Value(tensor_type("f32", 4), "same")
    kept = substitute(graph.ops, {graph.inputs[0]: same})
    assert kept[0].result is graph.ops[0].result and kept[1] is graph.ops[1]


def test_replace_values_reaches_outputs() -> None:
    graph = parse("graph g(%x: f32[4], %z: f32[4]) {\n  %a = exp(%x) : f32[4]\n  return %a, %x\n}\n")
    x, z = graph.inputs
    changed = replace_values(graph, {x: z})
    assert changed.outputs == (graph.ops[0].result, z) and changed.ops[0].operands == (z,)


def test_fresh_names_do_not_clash() -> None:
    graph = parse("graph g(%x: f32[4], %exp: f32[4]) {\n  %exp_1 = exp(%x) : f32[4]\n  return %exp_1\n}\n")
    assert builder_for(graph).fresh("exp") == "exp_2"


def test_overwrites_know_what_may_not_move() -> None:
    graph = parse(CACHE)
    overwrites = Overwrites(graph)
    exp, _, neg = graph.ops
    cache = graph.inputs[0]
    assert cache in overwrites and exp.result not in overwrites
    assert overwrites.refusal([exp], 2) == "%c is overwritten in between"
    assert overwrites.refusal([exp], 1) == "" and overwrites.refusal([neg], 2) == ""
