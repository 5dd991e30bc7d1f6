"""The matcher itself: commutative operands, optional operands, attributes, readers, near misses."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import definitions
from monoplan.ir.ops.elementwise import add, cast, exp, mul, neg, sigmoid, silu, sub
from monoplan.ir.ops.linear import linear
from monoplan.ir.ops.reduce import mean, rms_norm
from monoplan.ir.types import bf16
from monoplan.passes.manager import Notes
from monoplan.passes.pattern import Match, Rewrite, Wild, _match, _pattern, apply_rewrite, rewrite_pass
from tests.passes.support import fires, parse, refuses, run, unchanged

SILU = Rewrite("silu", "x * sigmoid(x) -> silu(x)", lambda x: mul(x, sigmoid(x)), lambda x: silu(x))


def graph(*lines: str, outputs: str = "%y", inputs: str = "%x: f32[2, 4]") -> str:
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


SIGMOID = "%s = sigmoid(%x) : f32[2, 4]"


@pytest.mark.parametrize("product", ["mul(%x, %s)", "mul(%s, %x)"])
def test_commutative_operands_match_in_both_orders(product: str) -> None:
    after = fires(SILU, graph(SIGMOID, f"%y = {product} : f32[2, 4]"), count=1)
    assert [op.name for op in after.ops] == ["silu"] and after.outputs[0].name == "y"


def test_other_operands_match_in_their_order() -> None:
    minus = Rewrite("minus", "x - exp(x)", lambda x: sub(x, exp(x)), lambda x: neg(x))
    refuses(minus, graph("%e = exp(%x) : f32[2, 4]", "%y = sub(%e, %x) : f32[2, 4]"))


def test_a_wildcard_stands_for_one_value() -> None:
    text = graph("%s = sigmoid(%z) : f32[2, 4]", "%y = mul(%x, %s) : f32[2, 4]", inputs="%x: f32[2, 4], %z: f32[2, 4]")
    refuses(SILU, text)


def test_the_same_inner_value_may_be_read_twice() -> None:
    square = Rewrite("square", "exp(x) * exp(x)", lambda x: mul(exp(x), exp(x)), lambda x: exp(add(x, x)))
    # Two exps in the pattern are two ops in the graph, or one that is read twice.
    fires(square, graph("%e = exp(%x) : f32[2, 4]", "%y = mul(%e, %e) : f32[2, 4]"), count=1)


def test_inner_values_may_be_read_by_several_ops_of_the_match() -> None:
    def centred(x: Any) -> Any:
        c = sub(x, mean(x, axes=(-1,), keepdims=True))
        return mul(c, exp(c))

    rule = Rewrite("diamond", "c * exp(c)", centred, lambda x: rms_norm(x))
    text = graph(
        "%m = mean(%x) {axes=(-1,), keepdims=True} : f32[2, 1]",
        "%c = sub(%x, %m) : f32[2, 4]",
        "%e = exp(%c) : f32[2, 4]",
        "%y = mul(%c, %e) : f32[2, 4]",
    )
    _, notes = run(rule, parse(text))
    assert notes.rewrites == 1
    refuses(rule, text.replace("return %y", "return %y, %c"), "%c has 3 readers, it must have one")


def test_a_second_reader_refuses_and_is_named() -> None:
    text = graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]", "%z = exp(%s) : f32[2, 4]", outputs="%y, %z")
    notes = refuses(SILU, text, "%s has 2 readers, it must have one")
    (miss,) = notes.misses
    assert miss.rule == "silu" and miss.where == "%y = mul(%x, %s) : f32[2, 4]"
    assert str(miss) == f"silu did not fire at {miss.where}: %s has 2 readers, it must have one"


def test_an_inner_value_that_is_an_output_refuses() -> None:
    text = graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]", outputs="%y, %s")
    refuses(SILU, text, "%s has 2 readers")


def test_the_root_may_have_many_readers_and_be_an_output() -> None:
    text = graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]", "%z = exp(%y) : f32[2, 4]", outputs="%y, %z, %y")
    fires(SILU, text, count=1)


def test_a_wildcard_matches_an_absent_operand() -> None:
    rule = Rewrite(
        "biases", "linear(neg(x), w, b)", lambda x, w, b: linear(neg(x), w, b), lambda x, w, b: neg(linear(x, w))
    )
    seen: list[Any] = []
    watched = Rewrite("biases", rule.rule, rule.find, rule.make, lambda m: bool(seen.append(m["b"])) or m["b"] is None)
    lines = ("%n = neg(%x) : f32[2, 4]", "%y = linear(%n, %w, {}) : f32[2, 3]")
    inputs = "%x: f32[2, 4], %w: f32[3, 4], %b: f32[3]"
    fires(watched, graph(*lines, inputs=inputs).replace("{}", "_"), count=1)
    refuses(watched, graph(*lines, inputs=inputs).replace("{}", "%b"))
    assert seen[0] is None and seen[1].name == "b"


def test_none_in_a_pattern_matches_an_absent_operand_only() -> None:
    rule = Rewrite("plain", "no bias", lambda x, w: linear(x, w, None), lambda x, w: linear(neg(x), neg(w)))
    inputs = "%x: f32[2, 4], %w: f32[3, 4], %b: f32[3]"
    pattern = _pattern(rule)
    for operand, count in (("_", 1), ("%b", 0)):
        g = parse(graph(f"%y = linear(%x, %w, {operand}) : f32[2, 3]", inputs=inputs))
        assert len(list(_match(pattern, pattern.root, g.outputs[0], definitions(g), {}))) == count


def test_attributes_bind_by_name_and_must_agree() -> None:
    def norm_of(x: Any, eps: Any) -> Any:
        return rms_norm(x, None, eps=eps)

    rule = Rewrite("twice", "", lambda x, *, eps: norm_of(norm_of(x, eps), eps), lambda x, eps: norm_of(x, eps))
    norm = "%{} = rms_norm(%{}, _) {{eps={}, dims=1}} : f32[2, 4]"
    after, notes = run(rule, parse(graph(norm.format("a", "x", 0.5), norm.format("y", "a", 0.5))))
    assert notes.rewrites == 1 and after.ops[0].attrs["eps"] == 0.5
    refuses(rule, graph(norm.format("a", "x", 0.5), norm.format("y", "a", 0.25)))


def test_attributes_that_a_pattern_does_not_name_match_anything() -> None:
    rule = Rewrite("any", "a cast", lambda x: exp(cast(x)), lambda x: exp(x))
    text = graph("%c = cast(%x) {dtype=f32} : f32[2, 4]", "%y = exp(%c) : f32[2, 4]")
    fires(rule, text, count=1)


def test_attributes_that_a_pattern_fixes_must_be_equal() -> None:
    rule = Rewrite("fixed", "a cast to bf16", lambda x: exp(cast(x, dtype=bf16)), lambda x: exp(x))
    refuses(rule, graph("%c = cast(%x) {dtype=f32} : f32[2, 4]", "%y = exp(%c) : f32[2, 4]"))


def test_bindings_are_never_changed() -> None:
    """The first order of a commutative op fails late; what it bound must not be left behind."""
    g = parse(
        graph(
            "%a = exp(%x) : f32[2, 4]",
            "%b = neg(%x) : f32[2, 4]",
            "%y = mul(%a, %b) : f32[2, 4]",
            inputs="%x: f32[2, 4]",
        )
    )
    rule = Rewrite("order", "neg(p) * exp(q)", lambda p, q: mul(neg(p), exp(q)), lambda p, q: mul(p, q))
    pattern = _pattern(rule)
    start: dict[Any, Any] = {}
    found = list(_match(pattern, pattern.root, g.outputs[0], definitions(g), start))
    assert start == {} and len(found) == 1
    assert found[0]["p"] is g.inputs[0] and found[0]["q"] is g.inputs[0]
    # The same for attributes: a failed attempt leaves the bindings it was given as they were.
    given = {"eps": 1}
    assert list(_match(pattern, pattern.root, g.inputs[0], definitions(g), given)) == [] and given == {"eps": 1}


def test_every_binding_is_found() -> None:
    g = parse(graph("%y = add(%x, %z) : f32[2, 4]", inputs="%x: f32[2, 4], %z: f32[2, 4]"))
    pattern = _pattern(Rewrite("sum", "a + b", lambda a, b: add(a, b), lambda a, b: add(b, a)))
    found = [(m["a"].name, m["b"].name) for m in _match(pattern, pattern.root, g.outputs[0], definitions(g), {})]
    assert found == [("x", "z"), ("z", "x")]


def test_when_may_choose_among_the_bindings() -> None:
    rule = Rewrite(
        "right",
        "a + b where a is y",
        lambda a, b: add(exp(a), b),
        lambda a, b: add(exp(a), neg(neg(b))),
        when=lambda m: m["a"].name == "z" or "a is not z",
    )
    lines = ("%p = exp(%x) : f32[2, 4]", "%q = exp(%z) : f32[2, 4]", "%y = add(%p, %q) : f32[2, 4]")
    g = parse(graph(*lines, inputs="%x: f32[2, 4], %z: f32[2, 4]"))
    new, count = apply_rewrite(rule, g, Notes())
    assert count == 1 and definitions(new)[new.outputs[0]].operands[0] is not g.ops[0].result


def test_a_reason_is_a_near_miss_and_false_is_not() -> None:
    text = graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]")
    refuses(Rewrite("silu", "", SILU.find, SILU.make, lambda m: "because"), text, "because")
    refuses(Rewrite("silu", "", SILU.find, SILU.make, lambda m: False), text)


def test_a_replacement_of_another_type_refuses() -> None:
    rule = Rewrite("narrow", "", SILU.find, lambda x: cast(x, dtype=bf16))
    text = graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]")
    refuses(rule, text, "the result would be bf16[2, 4] in place of f32[2, 4]")
    wrong = Rewrite("wrong", "", SILU.find, lambda x: linear(x, x))
    refuses(wrong, text, "the result would be f32[2, 2] in place of f32[2, 4]")
    ill = Rewrite("ill", "", SILU.find, lambda x: linear(x, mean(x, axes=(0, 1))))
    refuses(ill, text, "linear: the weight must be [out, in], got f32[]")


def test_make_must_end_in_a_new_op() -> None:
    with pytest.raises(TypeError, match="lazy: make\\(\\) must end in a new op"):
        run(Rewrite("lazy", "", SILU.find, lambda x: x), parse(graph(SIGMOID, "%y = mul(%x, %s) : f32[2, 4]")))


def test_ops_over_weights_in_setup_are_left_alone() -> None:
    text = """\
graph g(%x: f32[4]) {
  param %w: f32[4] = "w"
  setup %s = sigmoid(%w) : f32[4]
  %y = mul(%w, %s) : f32[4]
  %z = add(%x, %y) : f32[4]
  return %z
}
"""
    refuses(SILU, text)


def test_a_read_does_not_move_behind_a_write() -> None:
    text = """\
graph g(%c: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]) {
  %s = sigmoid(%c) : f32[2, 1, 8, 4]
  %m = neg(%s) : f32[2, 1, 8, 4]
  %k = kv_update(%c, %r, %lengths, _) : f32[2, 1, 8, 4]
  %y = exp(%m) : f32[2, 1, 8, 4]
  return %y, %k -> %c
}
"""
    deep = Rewrite("deep", "", lambda x: exp(neg(sigmoid(x))), lambda x: silu(x))
    refuses(deep, text, "%c is overwritten in between")
    shallow = Rewrite("shallow", "", lambda x: exp(neg(x)), lambda x: exp(sub(x, add(x, x))))
    fires(shallow, text, count=1)  # %s is a value of its own


def test_a_rule_that_finds_what_it_makes_is_named() -> None:
    endless = Rewrite("endless", "", lambda x: exp(x), lambda x: exp(neg(neg(x))))
    with pytest.raises(VerifyError, match="endless still fires after 100 sweeps"):
        run(endless, parse(graph("%y = exp(%x) : f32[2, 4]")))


def test_rewrites_feed_each_other_until_none_fires() -> None:
    outer = Rewrite("outer", "", lambda x: neg(silu(x)), lambda x: exp(x))
    text = graph(SIGMOID, "%m = mul(%x, %s) : f32[2, 4]", "%y = neg(%m) : f32[2, 4]")
    both = rewrite_pass("both", "", outer, SILU)  # the first can only fire after the second
    after, notes = run(both, parse(text))
    assert [op.name for op in after.ops] == ["exp"] and notes.rewrites == 2
    assert [(f.rule, f.what) for f in notes.done] == [("silu", "silu"), ("outer", "exp")]
    unchanged(both, after)


def test_near_misses_are_those_of_the_last_sweep() -> None:
    """While rules still fire, a value may have readers that are gone at the end."""
    outer = Rewrite("outer", "", lambda x: neg(exp(x)), lambda x: silu(neg(x)))
    text = graph("%e = exp(%x) : f32[2, 4]", "%a = neg(%e) : f32[2, 4]", "%b = neg(%e) : f32[2, 4]", outputs="%a, %b")
    notes = refuses(outer, text, "%e has 2 readers")
    assert len(notes.misses) == 2
    text = text.replace("%b = neg(%e)", "%b = exp(%x)")
    _, notes = run(rewrite_pass("p", "", outer), parse(text))
    assert notes.rewrites == 1 and notes.misses == []


def test_match_tells_about_the_graph() -> None:
    seen: list[Match] = []
    text = """\
graph g(%x: f32[4]) {
  param %w: f32[4] = "w"
  %c = full() {shape=(), value=0.5, dtype=f32} : f32[]
  %a = mul(%x, %c) : f32[4]
  %y = add(%a, %w) : f32[4]
  return %y
}
"""
    find, make = (lambda x, c, w: add(mul(x, c), w)), (lambda x, c, w: add(w, mul(c, x)))
    refuses(Rewrite("look", "", find, make, lambda m: bool(seen.append(m))), text)
    m = seen[0]
    assert m.scalar("c") == 0.5 and m.scalar("x") is None and m.is_param("w") and not m.is_param("x")
    op = m.op("c")
    assert op is not None and op.name == "full" and m.op("w") is None and m.root.name == "add"


def test_wild_is_a_plain_name() -> None:
    assert Wild("axis") == Wild("axis") and Wild("a") != Wild("b")
