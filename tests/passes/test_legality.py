"""Convexity: a group of ops may become one kernel only if no path leaves it and comes back."""

from __future__ import annotations

import pytest

from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.ops.elementwise import add, exp
from monoplan.passes.manager import Pass, run_passes
from monoplan.passes.rebuild import check_fusions, fused_groups, is_convex
from tests.passes.support import parse

DIAMOND = """\
graph g(%x: f32[4]) {
  %a = exp(%x) : f32[4]
  %b = neg(%a) : f32[4]
  %c = abs(%b) : f32[4]
  %d = add(%a, %c) : f32[4]
  return %d
}
"""


def ops(graph: Graph) -> dict[str, Op]:
    return {op.result.name: op for op in graph.ops}


def test_is_convex() -> None:
    g = parse(DIAMOND)
    o = ops(g)
    assert is_convex(g, {o["a"], o["b"]}) and is_convex(g, set(g.ops)) and is_convex(g, {o["c"]})
    assert not is_convex(g, {o["a"], o["d"]})  # b and c lie between
    assert not is_convex(g, {o["a"], o["b"], o["d"]})


def test_fused_groups_are_the_ops_whose_work_a_new_op_does() -> None:
    g = parse(DIAMOND)
    o = ops(g)
    made = Op(exp, (o["b"].result,), {}, o["d"].results)
    ((new, group),) = fused_groups(g, g.replace(ops=(*g.ops[:2], made)))
    assert new is made and group == {o["a"], o["c"], o["d"]}


def test_helpers_are_looked_at_once() -> None:
    """Each of 60 new values is read twice by the next one: there are 2^60 ways back."""
    g = parse(DIAMOND)
    ladder, last = [], g.inputs[0]
    for i in range(60):
        ladder.append(Op(add, (last, last), {}, (Value(f"h{i}", last.type),)))
        last = ladder[-1].result
    made = Op(exp, (last,), {}, ops(g)["d"].results)
    ((new, group),) = fused_groups(g, g.replace(ops=(*ladder, made)))
    assert new is made and group == set(g.ops)


def test_a_group_that_is_not_convex_is_refused() -> None:
    g = parse(DIAMOND)
    o = ops(g)
    # %d takes over the work of %a, but reads %b, which is made from it.
    made = Op(add, (g.inputs[0], o["b"].result), {}, o["d"].results)
    broken = g.replace(ops=(o["a"], o["b"], made))
    with pytest.raises(VerifyError, match="pass fuse: a path leaves the group and comes back"):
        check_fusions(g, broken, "fuse")
    with pytest.raises(VerifyError, match="pass fuse-badly.*a path leaves"):
        run_passes(g, [Pass("fuse-badly", "", lambda graph, notes: broken)], check=True)


def test_an_inner_value_that_is_still_read_is_noticed() -> None:
    g = parse(DIAMOND.replace("return %d", "return %d, %c"))
    made = Op(exp, (g.inputs[0],), {}, g.ops[3].results)
    with pytest.raises(VerifyError, match="%c is still read, but nothing makes it"):
        check_fusions(g, g.replace(ops=(made,)), "fuse")
