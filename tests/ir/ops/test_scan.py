"""The op of scans: its text, its type rule, and what it computes, against a loop over the slices."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir.errors import ParseError, VerifyError
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.shape_constraints import SizeError, shape_constraints
from monoplan.ir.verifier import verify

TEXT = """graph g(%h: f32[2], %x: f32[n, 2], %k: f32[m]) {
  param %w: f32[2, 2] = "w"
  %scan, %scan_1 = scan(%h, %x, %w) {length=n, state=1, slices=1, reverse=False} : f32[2], f32[n, 2]
    graph cell(%s: f32[2], %v: f32[2], %u: f32[2, 2]) {
      %linear = linear(%s, %u) : f32[2]
      %add = add(%linear, %v) : f32[2]
      %mul = mul(%s, %v) : f32[2]
      return %add, %mul
    }
  return %scan, %scan_1
}
"""


def test_its_text_is_read_back() -> None:
    graph = parse_graph(TEXT)
    verify(graph)
    assert graph.ops[0].name == "scan" and print_graph(graph) == TEXT


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_what_it_computes(n: int, reverse: bool, exact: bool) -> None:
    rng = np.random.default_rng(n)
    h, x, w = (rng.normal(size=s).astype(np.float32) for s in ((2,), (n, 2), (2, 2)))
    graph = parse_graph(TEXT.replace("reverse=False", f"reverse={reverse}"))
    last, ys = interpret(graph, [h, x, np.zeros(3, np.float32)], {"w": w}, exact=exact)
    state, want = h.astype(np.float64), np.zeros((n, 2))
    for i in range(n)[::-1] if reverse else range(n):
        want[i] = state * x[i]
        state = w.astype(np.float64) @ state + x[i]
    assert last.dtype == ys.dtype == (np.float64 if exact else np.float32) and ys.shape == (n, 2)
    np.testing.assert_allclose(last, state, rtol=1e-12 if exact else 1e-4, atol=1e-6)
    np.testing.assert_allclose(ys, want, rtol=1e-12 if exact else 1e-4, atol=1e-6)


def test_a_body_may_have_the_sizes_around_it() -> None:
    line = "%mul = mul(%s, %v) : f32[2]"
    text = TEXT.replace(line, "%mul = full() {shape=(m,), value=2.0, dtype=f32} : f32[m]")
    graph = parse_graph(text.replace(": f32[2], f32[n, 2]", ": f32[2], f32[n, m]"))
    verify(graph)
    (_, ys) = interpret(
        graph,
        [np.zeros(2, np.float32), np.zeros((4, 2), np.float32), np.zeros(3, np.float32)],
        {"w": np.eye(2, dtype=np.float32)},
    )
    assert ys.shape == (4, 3) and (ys == 2).all()
    with pytest.raises(VerifyError, match="'o', which no input has"):
        wrong = text.replace("shape=(m,)", "shape=(o,)").replace(": f32[m]\n", ": f32[o]\n")
        verify(parse_graph(wrong.replace(": f32[2], f32[n, 2]", ": f32[2], f32[n, o]")))


def test_sizes_inside_are_checked_at_a_call() -> None:
    text = TEXT.replace("%mul = mul(%s, %v) : f32[2]", "%mul = full() {shape=(m-3,), value=2.0, dtype=f32} : f32[m-3]")
    (rule,) = shape_constraints(parse_graph(text.replace(": f32[2], f32[n, 2]", ": f32[2], f32[n, m-3]")))
    rule.check({"n": 1, "m": 3})
    with pytest.raises(SizeError, match="negative"):
        rule.check({"n": 1, "m": 2})


WRONG = {
    "a first size that is not the length": ("length=n", "length=m", "whose first size should be the length, m"),
    "a state that changes": ("return %add, %mul", "return %u, %mul", r"the state %s is f32\[2\] before .*2, 2\] after"),
    "too few operands": ("scan(%h, %x, %w)", "scan(%h, %x)", "2 operands for 3 inputs of its body"),
    "too many slices": ("slices=1", "slices=3", "1 states and 3 slices of 3 operands"),
    "a negative length": ("length=n", "length=-2", "the length -2 is negative"),
    "other types": ("scan(%h, %x, %w)", "scan(%h, %x, %k)", r"body input %u is f32\[2, 2\], got f32\[m\]"),
    "a param": ("      %linear", '      param %p: f32[2] = "p"\n      %linear', "has params, setup ops or writes"),
    "no outputs": ("return %add, %mul", "return", "no outputs|has 0 results|1 states"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_its_rule(name: str) -> None:
    old, new, message = WRONG[name]
    assert old in TEXT
    with pytest.raises(ParseError, match=message):
        parse_graph(TEXT.replace(old, new))


def test_a_body_is_verified() -> None:
    graph = parse_graph(TEXT)
    (op,) = graph.ops
    body = op.attrs["body"]
    swapped = body.replace(ops=(body.ops[1], body.ops[0], body.ops[2]))
    object.__setattr__(op, "attrs", {**op.attrs, "body": swapped})
    with pytest.raises(VerifyError, match="%linear is read before its definition"):
        verify(graph)
