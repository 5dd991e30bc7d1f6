"""Flattening reshapes move behind what works on each row by itself."""

from __future__ import annotations

import pytest

from monoplan.ir.graph import Graph
from monoplan.passes.canonicalize import REMOVE_IDENTITIES
from monoplan.passes.sink_reshapes import SINK_RESHAPES
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses, run, same_numbers

FLAT = "%f = reshape(%x) {shape=(batch*seq, 4)} : f32[batch*seq, 4]"
PARAMS = ('param %w: f32[6, 4] = "w"', 'param %b: f32[6] = "b"', 'param %g: f32[4] = "g"')
X = "%x: f32[batch, seq, 4], %z: f32[batch, seq, 4]"


def graph(*lines: str, inputs: str = X, outputs: str = "%y") -> str:
    lines = (*PARAMS, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("linear(%f, %w, %b)", 6),
        ("rms_norm(%f, %g) {eps=1e-06, dims=1}", 4),
        ("gelu(%f)", 4),
        ("add(%f, %g)", 4),
        ("layer_norm(%f, _, _) {eps=1e-06, dims=1}", 4),
        ("mul(%f, %f)", 4),
    ],
    ids=["linear", "rms_norm", "unary", "row", "layer_norm", "square"],
)
def test_row_wise(line: str, width: int) -> None:
    after = fires(SINK_RESHAPES, graph(FLAT, f"%y = {line} : f32[batch*seq, {width}]"), count=1)
    assert names(after) == [line.split("(")[0], "reshape"] and after.ops[0].operands[0] is after.inputs[0]


def test_conv1d(golden: Golden) -> None:
    """norm, flatten, product, bias, activation, back: nothing is left of the reshapes."""
    text = graph(
        "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[batch, seq, 4]",
        FLAT.replace("%x", "%n"),
        "%l = linear(%f, %w, _) : f32[batch*seq, 6]",
        "%a = add(%l, %b) : f32[batch*seq, 6]",
        "%t = tanh(%a) : f32[batch*seq, 6]",
        "%y = reshape(%t) {shape=(batch, seq, 6)} : f32[batch, seq, 6]",
    )
    after = fires(SINK_RESHAPES, text, golden, count=3)
    clean, _ = run(REMOVE_IDENTITIES, after)
    assert names(clean) == ["rms_norm", "linear", "add", "tanh"]
    same_numbers(after, clean)


def test_two_operands_that_were_flattened_alike() -> None:
    text = graph(FLAT, FLAT.replace("%f", "%h").replace("%x", "%z"), "%y = add(%f, %h) : f32[batch*seq, 4]")
    assert names(fires(SINK_RESHAPES, text, count=1)) == ["add", "reshape"]


def test_a_reshape_that_is_read_elsewhere_too_stays_for_that() -> None:
    lines = ("%y = exp(%f) : f32[batch*seq, 4]", "%s = softmax(%f) {axis=0} : f32[batch*seq, 4]")
    text = graph(FLAT, *lines, outputs="%y, %s")
    assert names(fires(SINK_RESHAPES, text, count=1)) == ["reshape", "exp", "reshape", "softmax"]


def test_heads_that_are_joined_and_flattened_at_once(golden: Golden) -> None:
    """The output of attention goes to the product as [tokens, heads * dim] in one reshape."""
    text = graph(
        "%f = reshape(%h) {shape=(batch*seq, 4)} : f32[batch*seq, 4]",
        "%l = linear(%f, %w, %b) : f32[batch*seq, 6]",
        "%r = reshape(%l) {shape=(batch, seq, 6)} : f32[batch, seq, 6]",
        "%y = add(%r, %s) : f32[batch, seq, 6]",
        inputs="%h: f32[batch, seq, 2, 2], %s: f32[batch, seq, 6]",
    )
    after = fires(SINK_RESHAPES, text, golden, count=1)
    clean, _ = run(REMOVE_IDENTITIES, after)
    assert names(clean) == ["reshape", "linear", "add"]
    refuses(SINK_RESHAPES, text.replace("return %y", "return %y, %l"))


def test_what_must_stay() -> None:
    heads = "%h = reshape(%x) {shape=(batch, seq, 1, 4)} : f32[batch, seq, 1, 4]"
    refuses(SINK_RESHAPES, graph(heads, "%y = rms_norm(%h, %g) {eps=1e-06, dims=1} : f32[batch, seq, 1, 4]"))
    columns = "%f = reshape(%x) {shape=(batch, seq*4)} : f32[batch, 4*seq]"
    refuses(SINK_RESHAPES, graph(columns, "%y = exp(%f) : f32[batch, 4*seq]"))
    refuses(SINK_RESHAPES, graph(FLAT, "%y = softmax(%f) {axis=0} : f32[batch*seq, 4]"))
    refuses(SINK_RESHAPES, graph(FLAT, "%y = rms_norm(%f, _) {eps=1e-06, dims=2} : f32[batch*seq, 4]"))
    other = graph(FLAT, "%y = add(%f, %r) : f32[batch*seq, 4]", inputs=f"{X}, %r: f32[batch*seq, 4]")
    refuses(SINK_RESHAPES, other)
    column = graph(FLAT, "%y = add(%f, %r) : f32[batch*seq, 4]", inputs=f"{X}, %r: f32[batch*seq, 1]")
    refuses(SINK_RESHAPES, column)
    refuses(SINK_RESHAPES, graph(FLAT, "%y = linear(%z, %f, _) : f32[batch, seq, batch*seq]"))
    narrow = "%f = reshape(%s) {shape=(batch*seq, 1)} : f32[batch*seq, 1]"
    stretched = graph(narrow, "%y = mul(%f, %g) : f32[batch*seq, 4]", inputs="%s: f32[batch, seq, 1]")
    refuses(SINK_RESHAPES, stretched)
    refuses(SINK_RESHAPES, graph("%y = exp(%x) : f32[batch, seq, 4]"))


def test_a_cache_that_is_overwritten_is_read_before() -> None:
    text = graph(
        "%f = reshape(%c) {shape=(16, 4)} : f32[16, 4]",
        "%k = kv_update(%c, %r, %lengths, _) : f32[2, 1, 8, 4]",
        "%y = exp(%f) : f32[16, 4]",
        inputs="%c: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]",
        outputs="%y, %k -> %c",
    )
    refuses(SINK_RESHAPES, text)
