"""Chains of pointwise ops, and their way into the kernels that make or read their values."""

from __future__ import annotations

import pytest

from monoplan.passes.fuse_pointwise import FUSE_GATED, FUSE_INTO_PRODUCER, FUSE_INTO_REDUCE, FUSE_POINTWISE
from monoplan.passes.rebuild import check_fusions
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, run

XZ = "%x: f32[n, 4], %z: f32[n, 4]"
CACHE = "%cache: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]"
WRITE = "%k = kv_update(%cache, %r, %lengths, _) : f32[2, 1, 8, 4]"
PARAMS = ('param %w: f32[6, 4] = "w"', 'param %b: f32[6] = "b"', 'param %g: f32[4] = "g"', 'param %e: f32[9, 4] = "e"')


def graph(*lines: str, inputs: str = XZ, outputs: str = "%y") -> str:
    lines = (*PARAMS, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


def full(value: str, name: str = "c", dtype: str = "f32") -> str:
    return f"%{name} = full() {{shape=(), value={value}, dtype={dtype}}} : {dtype}[]"


# -- chains ---------------------------------------------------------------------------------------------------


def test_chain(golden: Golden) -> None:
    text = graph(
        full("0.5"),
        "%a = exp(%x) : f32[n, 4]",
        "%b1 = mul(%a, %c) : f32[n, 4]",
        "%d = add(%b1, %z) : f32[n, 4]",
        "%f = add(%d, %g) : f32[n, 4]",
        "%y = maximum(%f, %z) : f32[n, 4]",
    )
    after = fires(FUSE_POINTWISE, text, golden)
    assert [op.name for op in after.ops] == ["pointwise"]


def test_a_tree_is_one_op_too() -> None:
    text = graph(
        "%a = exp(%x) : f32[n, 4]",
        "%d = neg(%z) : f32[n, 4]",
        "%f = sin(%a) : f32[n, 4]",
        "%y = sub(%f, %d) : f32[n, 4]",
    )
    (op,) = fires(FUSE_POINTWISE, text).ops
    assert op.attrs["expr"] in ("sub(sin(exp(x1)), neg(x0))", "sub(sin(exp(x0)), neg(x1))")


def test_a_value_that_is_read_twice_by_its_one_reader() -> None:
    (op,) = fires(FUSE_POINTWISE, graph("%a = exp(%x) : f32[n, 4]", "%y = mul(%a, %a) : f32[n, 4]")).ops
    assert op.attrs["expr"] == "mul(exp(x0), exp(x0))" and len(op.operands) == 1


def test_a_value_that_only_the_chain_reads() -> None:
    """%a has two readers, and both become part of one op."""
    text = graph("%a = exp(%x) : f32[n, 4]", "%s = sigmoid(%a) : f32[n, 4]", "%y = mul(%a, %s) : f32[n, 4]")
    (op,) = fires(FUSE_POINTWISE, text).ops
    assert op.attrs["expr"] == "mul(exp(x0), sigmoid(exp(x0)))"
    refuses(FUSE_POINTWISE, text.replace("return %y", "return %y, %s"), "%a has 2 readers, it must have one")


@pytest.mark.parametrize(
    ("value", "dtype", "expr"),
    [
        ("2.5", "f32", "mul(x0, 2.5)"),
        ("2.5", "f64", "mul(x0, cast(2.5, dtype=f64))"),
        ("-inf", "f32", "mul(x0, float('-inf'))"),
    ],
)
def test_constants_become_literals(value: str, dtype: str, expr: str) -> None:
    text = graph(full(value, dtype=dtype), f"%y = mul(%x, %c) : {dtype}[n, 4]")
    before = parse(text)
    (op,) = run(FUSE_POINTWISE, before)[0].ops
    assert op.attrs["expr"] == expr and op.result.type == before.outputs[0].type
    if value != "-inf":
        fires(FUSE_POINTWISE, text, count=1)


def test_a_literal_does_not_change_types_inside() -> None:
    """i32 + i64 constant is i64: the literal must not make the sum an i32 that overflows."""
    text = graph(
        full("3000000000", dtype="i64"),
        "%a = add(%i, %c) : i64[n]",
        "%y = cast(%a) {dtype=f32} : f32[n]",
        inputs="%i: i32[n]",
    )
    (op,) = fires(FUSE_POINTWISE, text).ops
    assert "cast(3000000000, dtype=i64)" in op.attrs["expr"]


def test_a_single_op_stays() -> None:
    refuses(FUSE_POINTWISE, graph("%y = add(%x, %z) : f32[n, 4]"))
    refuses(FUSE_POINTWISE, graph("%y = mul(%x, %x) : f32[n, 4]"))
    refuses(FUSE_POINTWISE, graph(full("1.0"), full("2.0", "d"), "%y = add(%c, %d) : f32[]"))


def test_two_readers_stay() -> None:
    lines = ("%a = exp(%x) : f32[n, 4]", "%y = neg(%a) : f32[n, 4]", "%u = abs(%a) : f32[n, 4]")
    refuses(FUSE_POINTWISE, graph(*lines, outputs="%y, %u"), "it can't join neg %y: %a has 2 readers, it must have one")
    refuses(FUSE_POINTWISE, graph(*lines[:2], outputs="%y, %a"), "%a has 2 readers")


def test_a_smaller_value_is_not_computed_again() -> None:
    text = graph("%a = exp(%s) : f32[n, 1]", "%y = add(%x, %a) : f32[n, 4]", inputs=f"{XZ}, %s: f32[n, 1]")
    refuses(FUSE_POINTWISE, text, "%a is f32[n, 1], smaller than f32[n, 4]: it would be computed again")


@pytest.mark.parametrize(("ops", "joins"), [(1, True), (4, True), (5, False)])
def test_a_few_ops_on_whole_numbers_are_done_again(ops: int, joins: bool) -> None:
    """Positions from lengths: cheaper than a kernel of their own; a longer calculation is not."""
    chain = [f"%a{i + 1} = neg(%a{i}) : i32[n, 1]" for i in range(ops)]
    text = graph(*chain, f"%y = add(%t, %a{ops}) : i32[n, 4]", inputs="%t: i32[n, 4], %a0: i32[n, 1]")
    after = run(FUSE_POINTWISE, parse(text))[0]
    assert [op.result.type.shape[1] for op in after.ops] == ([4] if joins else [1, 4])


def test_expressions_end_somewhere() -> None:
    names = ["x", *(f"a{i}" for i in range(60))]
    lines = [f"%{b} = neg(%{a}) : f32[n, 4]" for a, b in zip(names, names[1:], strict=False)]
    after, notes = run(FUSE_POINTWISE, parse(graph(*lines, outputs="%a59")))
    assert [op.name for op in after.ops] == ["pointwise", "pointwise"]
    assert any("more than 48 ops" in m.reason for m in notes.misses)


def test_values_grow_no_faster_than_the_limit() -> None:
    names = ["x", *(f"a{i}" for i in range(10))]
    lines = [f"%{b} = add(%{a}, %{a}) : f32[n, 4]" for a, b in zip(names, names[1:], strict=False)]
    after = fires(FUSE_POINTWISE, graph(*lines, outputs="%a9"))
    assert all(len(op.attrs["expr"]) < 1000 for op in after.ops)


def test_a_cache_is_read_before_it_is_written() -> None:
    text = graph(
        "%a = exp(%cache) : f32[2, 1, 8, 4]",
        WRITE,
        "%y = neg(%a) : f32[2, 1, 8, 4]",
        inputs=CACHE,
        outputs="%y, %k -> %cache",
    )
    refuses(FUSE_POINTWISE, text, "%cache is overwritten in between")


def test_every_group_is_convex() -> None:
    text = graph(
        "%a = exp(%x) : f32[n, 4]",
        "%m = softmax(%a) {axis=-1} : f32[n, 4]",
        "%d = neg(%m) : f32[n, 4]",
        "%f = neg(%z) : f32[n, 4]",
        "%h = add(%d, %f) : f32[n, 4]",
        "%y = add(%h, %a) : f32[n, 4]",
    )
    before = parse(text)
    after, notes = run(FUSE_POINTWISE, before)
    check_fusions(before, after, "fuse-pointwise")
    assert notes.rewrites and [op.name for op in after.ops] == ["exp", "softmax", "pointwise"]


# -- gated linears --------------------------------------------------------------------------------------------

LINEAR = "%l = linear(%x, %w, {}) : f32[n, 6]"
CUT = "%a, %u = split(%l) {sizes=(3, 3), axis=-1} : f32[n, 3], f32[n, 3]"


@pytest.mark.parametrize(
    "tail",
    [
        ["%y = swiglu(%a, %u) : f32[n, 3]"],
        ["%y = swiglu(%u, %a) : f32[n, 3]"],
        ["%y = pointwise(%a, %u) {expr=\"mul(gelu(x0, approximate='tanh'), x1)\"} : f32[n, 3]"],
        ['%y = pointwise(%a, %u, %s) {expr="add(mul(relu(x0), x1), x2)"} : f32[n, 3]'],
    ],
    ids=["swiglu", "halves swapped", "geglu", "with a residual"],
)
@pytest.mark.parametrize("bias", ["_", "%b"], ids=["plain", "bias"])
def test_gated(tail: list[str], bias: str, golden: Golden) -> None:
    text = graph(LINEAR.format(bias), CUT, *tail, inputs="%x: f32[n, 4], %s: f32[n, 3]")
    (op,) = fires(FUSE_GATED, text, golden, count=1).ops
    assert op.name == "fused_linear" and op.attrs["gated"]


def test_gated_behind_a_norm() -> None:
    product = '%l = fused_linear(%x, %w, _, %g, _) {norm="rms", eps=1e-06} : f32[n, 6]'
    (op,) = fires(FUSE_GATED, graph(product, CUT, "%y = swiglu(%a, %u) : f32[n, 3]"), count=1).ops
    assert op.attrs["norm"] == "rms" and op.attrs["gated"] and op.attrs["eps"] == 1e-6


def test_what_is_not_gated() -> None:
    swiglu = "%y = swiglu(%a, %u) : f32[n, 3]"
    linear = LINEAR.format("_")
    third = graph(linear, CUT, swiglu, "%v = exp(%u) : f32[n, 3]", outputs="%y, %v")
    refuses(FUSE_GATED, third, "%u has 2 readers, it must have one")
    refuses(FUSE_GATED, graph(linear, CUT, swiglu, outputs="%y, %l"), "%l has 2 readers, it must have one")
    uneven = graph(
        linear,
        CUT.replace("(3, 3)", "(2, 4)").replace("f32[n, 3], f32[n, 3]", "f32[n, 2], f32[n, 4]"),
        "%y = exp(%a) : f32[n, 2]",
        outputs="%y, %u",
    )
    refuses(FUSE_GATED, uneven, "the two halves differ in size")
    one = graph(linear, CUT, "%y = exp(%a) : f32[n, 3]", outputs="%y, %u")
    refuses(FUSE_GATED, one, "only one of the halves is read here")
    rows = "%a, %u = split(%l) {sizes=(2, 2), axis=0} : f32[2, 6], f32[2, 6]"
    cut = graph(linear.replace("n, 6", "4, 6"), rows, "%y = swiglu(%a, %u) : f32[2, 6]", inputs="%x: f32[4, 4]")
    refuses(FUSE_GATED, cut, "%l is cut along axis 0, not the last")
    wider = graph(
        linear,
        CUT,
        '%y = pointwise(%a, %u, %s) {expr="mul(mul(x0, x1), x2)"} : f32[2, n, 3]',
        inputs="%x: f32[n, 4], %s: f32[2, n, 3]",
    )
    refuses(FUSE_GATED, wider, "are stretched to f32[2, n, 3]")
    busy = '%l = fused_linear(%x, %w, _, _, _) {expr="neg(x0)"} : f32[n, 6]'
    refuses(FUSE_GATED, graph(busy, CUT, swiglu))
    thirds = "%a, %u, %v = split(%l) {sizes=(2, 2, 2), axis=-1} : f32[n, 2], f32[n, 2], f32[n, 2]"
    refuses(FUSE_GATED, graph(linear, thirds, "%y = swiglu(%a, %u) : f32[n, 2]", outputs="%y, %v"))
    other = graph("%l = exp(%s) : f32[n, 6]", CUT, swiglu, inputs="%s: f32[n, 6]")
    refuses(FUSE_GATED, other)


# -- into the producer ----------------------------------------------------------------------------------------

PRODUCERS = {
    "linear": ("%p = linear(%x, %w, %b) : f32[n, 6]", "n, 6"),
    "fused_linear": ('%p = fused_linear(%x, %w, _, _, _, %s) {expr="add(x0, x1)"} : f32[n, 6]', "n, 6"),
    "matmul": ("%p = matmul(%x, %t) : f32[n, 6]", "n, 6"),
    "fused_matmul": ('%p = fused_matmul(%x, %t, %s) {expr="mul(x0, x1)"} : f32[n, 6]', "n, 6"),
    "rms_norm": ("%p = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[n, 4]", "n, 4"),
    "layer_norm": ("%p = layer_norm(%x, %g, %g) {eps=1e-06, dims=1} : f32[n, 4]", "n, 4"),
    "fused_norm": ('%p = fused_norm(%x, %g, _, %z) {norm="rms", eps=1e-06, expr="add(x0, x1)"} : f32[n, 4]', "n, 4"),
    "embedding": ("%p = embedding(%rows, %e) : f32[n, 4]", "n, 4"),
    "fused_gather": ('%p = fused_gather(%rows, %e, %z) {expr="add(x0, x1)"} : f32[n, 4]', "n, 4"),
    "sum": ("%p = sum(%x) {axes=(-1,), keepdims=True} : f32[n, 1]", "n, 1"),
    "mean": ("%p = mean(%x) {axes=(0,), keepdims=False} : f32[4]", "4"),
    "max": ("%p = max(%x) {axes=(1,), keepdims=False} : f32[n]", "n"),
    "fused_reduce": (
        "%p = fused_reduce(%x, %z, %q) "
        '{inputs=2, reduce="sum", axes=(-1,), pre="mul(x0, x1)", post="add(x0, x1)"} : f32[n]',
        "n",
    ),
}
MANY = f"{XZ}, %s: f32[n, 6], %t: f32[4, 6], %rows: i64[n], %q: f32[n]"


@pytest.mark.parametrize("name", PRODUCERS)
def test_tail(name: str, golden: Golden) -> None:
    line, shape = PRODUCERS[name]
    extra = f'%y = pointwise(%p, %extra) {{expr="mul(tanh(x0), x1)"}} : f32[{shape}]'
    after = fires(FUSE_INTO_PRODUCER, graph(line, extra, inputs=f"{MANY}, %extra: f32[{shape}]"), golden, count=1)
    assert len(after.ops) == 1 and "tanh" in str(dict(after.ops[0].attrs))


def test_a_single_op_is_a_tail() -> None:
    (op,) = fires(FUSE_INTO_PRODUCER, graph(LINEAR.format("_"), "%y = gelu(%l) : f32[n, 6]"), count=1).ops
    assert op.name == "fused_linear" and op.attrs["expr"] == "gelu(x0, approximate='none')"


def test_tails_of_tails_in_one_sweep() -> None:
    text = graph(LINEAR.format("_"), "%t = tanh(%l) : f32[n, 6]", "%y = add(%t, %b) : f32[n, 6]")
    (op,) = fires(FUSE_INTO_PRODUCER, text, count=2).ops
    assert op.attrs["expr"] == "add(tanh(x0), x1)"


def test_an_extra_that_the_tail_has_already_is_named_once() -> None:
    text = graph(PRODUCERS["fused_linear"][0], "%y = mul(%p, %s) : f32[n, 6]", inputs=MANY)
    (op,) = fires(FUSE_INTO_PRODUCER, text, count=1).ops
    assert op.attrs["expr"] == "mul(add(x0, x1), x1)" and len(op.reads) == 3


def test_the_last_product_takes_the_sum_of_several() -> None:
    """A parallel block: x + attention + mlp."""
    lines = (
        "%l = linear(%x, %w, _) : f32[n, 6]",
        "%m = linear(%z, %w, _) : f32[n, 6]",
        '%y = pointwise(%s, %l, %m) {expr="add(add(x0, x1), x2)"} : f32[n, 6]',
    )
    after = fires(FUSE_INTO_PRODUCER, graph(*lines, inputs=MANY), count=1)
    assert [op.name for op in after.ops] == ["linear", "fused_linear"]


def test_a_product_takes_the_tail_before_a_norm_does() -> None:
    lines = (
        "%v = rms_norm(%z, %g) {eps=1e-06, dims=1} : f32[n, 4]",
        "%l = linear(%x, %o, _) : f32[n, 4]",
        "%y = add(%v, %l) : f32[n, 4]",
    )
    after = fires(FUSE_INTO_PRODUCER, graph('param %o: f32[4, 4] = "o"', *lines), count=1)
    assert [op.name for op in after.ops] == ["rms_norm", "fused_linear"]


def test_tails_that_stay() -> None:
    linear = LINEAR.format("_")
    both = graph(linear, "%y = tanh(%l) : f32[n, 6]", outputs="%y, %l")
    refuses(FUSE_INTO_PRODUCER, both, "tanh %y can't join it: %l has 2 readers, it must have one")
    wider = graph(linear, "%y = add(%l, %s) : f32[2, n, 6]", inputs="%x: f32[n, 4], %s: f32[2, n, 6]")
    refuses(FUSE_INTO_PRODUCER, wider, "f32[n, 6] is stretched to f32[2, n, 6]")
    reduced = graph(PRODUCERS["sum"][0], "%y = add(%p, %x) : f32[n, 4]")
    refuses(FUSE_INTO_PRODUCER, reduced, "f32[n, 1] is stretched to f32[n, 4]")
    refuses(FUSE_INTO_PRODUCER, graph("%l = softmax(%x) {axis=-1} : f32[n, 4]", "%y = tanh(%l) : f32[n, 4]"))
    gated = '%l = fused_linear(%x, %w, _, _, _) {gated=True, expr="swiglu(x0, x1)"} : f32[n, 3]'
    refuses(FUSE_INTO_PRODUCER, graph(gated, "%y = tanh(%l) : f32[n, 3]"))
    long = "x0"
    for _ in range(48):
        long = f"neg({long})"
    full_up = graph(f'%p = fused_linear(%x, %w, _, _, _) {{expr="{long}"}} : f32[n, 6]', "%y = tanh(%p) : f32[n, 6]")
    refuses(FUSE_INTO_PRODUCER, full_up, "the tail does not fit")


def test_a_product_of_a_cache_that_is_overwritten() -> None:
    text = graph(
        "%l = linear(%cache, %w, _) : f32[2, 1, 8, 6]",
        WRITE,
        "%y = tanh(%l) : f32[2, 1, 8, 6]",
        inputs=CACHE,
        outputs="%y, %k -> %cache",
    )
    refuses(FUSE_INTO_PRODUCER, text, "%cache is overwritten in between")


# -- into the reduction ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("axes", ["(-1,)", "(0,)", "None"])
def test_reduce(reduce: str, axes: str) -> None:
    size = {"(-1,)": "n", "(0,)": "4", "None": ""}[axes]
    text = graph("%a = mul(%x, %z) : f32[n, 4]", f"%y = {reduce}(%a) {{axes={axes}, keepdims=False}} : f32[{size}]")
    (op,) = fires(FUSE_INTO_REDUCE, text, count=1).ops
    assert op.name == "fused_reduce" and op.attrs["pre"] == "mul(x0, x1)" and op.attrs["reduce"] == reduce


def test_reduce_with_a_tail(golden: Golden) -> None:
    text = graph(
        full("2.0"),
        '%a = pointwise(%x, %z) {expr="exp(sub(x0, x1))"} : f32[n, 4]',
        '%y = fused_reduce(%a, %q) {inputs=1, reduce="sum", axes=(-1,), pre="x0", post="mul(x0, x1)"} : f32[n]',
        inputs=MANY,
    )
    fires(FUSE_INTO_REDUCE, text, golden, count=1)


def test_a_value_that_is_stretched_before_it_is_summed() -> None:
    text = graph("%a = mul(%x, %g) : f32[n, 4]", "%y = sum(%a) {axes=(-1,), keepdims=True} : f32[n, 1]")
    (op,) = fires(FUSE_INTO_REDUCE, text, count=1).ops
    assert op.attrs["inputs"] == 2


def test_reductions_that_stay() -> None:
    total = "%y = sum(%a) {axes=(-1,)} : f32[n]"
    both = graph("%a = exp(%x) : f32[n, 4]", total, outputs="%y, %a")
    refuses(FUSE_INTO_REDUCE, both, "it can't join sum %y: %a has 2 readers, it must have one")
    refuses(FUSE_INTO_REDUCE, graph("%a = exp(%x) : f32[n, 4]", "%y = argmax(%a) {axis=-1} : i64[n]"))
    refuses(FUSE_INTO_REDUCE, graph("%a = softmax(%x) {axis=-1} : f32[n, 4]", total))
    taken = '%y = fused_reduce(%a) {inputs=1, reduce="sum", axes=(-1,), pre="neg(x0)"} : f32[n]'
    refuses(FUSE_INTO_REDUCE, graph("%a = exp(%x) : f32[n, 4]", taken))
    refuses(FUSE_INTO_REDUCE, graph("%y = sum(%x) {axes=(-1,)} : f32[n]"))


def test_an_operand_that_the_tail_reads_too_is_not_made_twice() -> None:
    attrs = 'inputs=1, reduce="sum", axes=(0,), keepdims=True, pre="x0", post="add(x0, x1)"'
    own = f"%y = fused_reduce(%a, %a) {{{attrs}}} : f32[1]"
    refuses(FUSE_INTO_REDUCE, graph("%a = exp(%s) : f32[1]", own, inputs="%s: f32[1]"))


def test_a_sum_over_a_cache_that_is_overwritten() -> None:
    text = graph(
        "%a = exp(%cache) : f32[2, 1, 8, 4]",
        WRITE,
        "%y = sum(%a) {axes=None} : f32[]",
        inputs=CACHE,
        outputs="%y, %k -> %cache",
    )
    refuses(FUSE_INTO_REDUCE, text, "%cache is overwritten in between")
