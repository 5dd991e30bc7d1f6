"""Norms in front of linears, residuals and argmax behind them."""

from __future__ import annotations

import pytest

from monoplan.passes.fuse_linear import FUSE_HEAD_ARGMAX, FUSE_LINEAR_NORM, FUSE_NORM_LINEAR, FUSE_RESIDUAL_ADD
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

RMS = "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[n, 4]"
LAYER = "%n = layer_norm(%x, %g, %c) {eps=1e-05, dims=1} : f32[n, 4]"
PARAMS = ('param %g: f32[4] = "g"', 'param %c: f32[4] = "c"', 'param %w: f32[6, 4] = "w"', 'param %b: f32[6] = "b"')


def graph(*lines: str, inputs: str = "%x: f32[n, 4]", outputs: str = "%y") -> str:
    lines = (*PARAMS, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


# -- norm + linear --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["_", "%b"], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "norm",
    [RMS, LAYER, RMS.replace("%g", "_"), LAYER.replace("%g, %c", "_, _")],
    ids=["rms", "layer", "rms without weight", "layer without weights"],
)
def test_norm_linear(norm: str, bias: str, golden: Golden) -> None:
    after = fires(FUSE_NORM_LINEAR, graph(norm, f"%y = linear(%n, %w, {bias}) : f32[n, 6]"), golden, count=1)
    assert [op.name for op in after.ops] == ["fused_linear"]


def test_a_norm_with_two_readers_stays() -> None:
    text = graph(RMS, "%y = linear(%n, %w, _) : f32[n, 6]", "%z = linear(%n, %w, %b) : f32[n, 6]", outputs="%y, %z")
    notes = refuses(FUSE_NORM_LINEAR, text, "%n has 2 readers, it must have one")
    assert {m.rule for m in notes.misses} == {"fuse-rmsnorm-linear"}
    refuses(FUSE_NORM_LINEAR, graph(LAYER, "%y = linear(%n, %w, _) : f32[n, 6]", outputs="%y, %n"), "2 readers")


def test_a_norm_over_more_dimensions_stays() -> None:
    text = graph(
        "%n = rms_norm(%x, _) {eps=1e-06, dims=2} : f32[2, 3, 4]",
        "%y = linear(%n, %w, _) : f32[2, 3, 6]",
        inputs="%x: f32[2, 3, 4]",
    )
    refuses(FUSE_NORM_LINEAR, text, "the norm covers 2 dimensions, the linear reads one")


def test_a_norm_of_the_weight_stays() -> None:
    text = graph(
        "%n = rms_norm(%v, %g) {eps=1e-06, dims=1} : f32[6, 4]",
        "%y = linear(%x, %n, _) : f32[n, 6]",
        inputs="%x: f32[n, 4], %v: f32[6, 4]",
    )
    refuses(FUSE_NORM_LINEAR, text)


def test_a_norm_of_a_cache_that_is_overwritten_stays() -> None:
    text = graph(
        "%n = rms_norm(%cache, %g) {eps=1e-06, dims=1} : f32[2, 1, 8, 4]",
        "%k = kv_update(%cache, %r, %lengths, _) : f32[2, 1, 8, 4]",
        "%y = linear(%n, %w, _) : f32[2, 1, 8, 6]",
        inputs="%cache: f32[2, 1, 8, 4], %r: f32[2, 3, 1, 4], %lengths: i32[2]",
        outputs="%y, %k -> %cache",
    )
    refuses(FUSE_NORM_LINEAR, text, "%cache is overwritten in between")


# -- linear + residual ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["_", "%b"], ids=["plain", "bias"])
@pytest.mark.parametrize("order", ["add(%l, %r)", "add(%r, %l)"])
def test_residual_add(order: str, bias: str) -> None:
    lines = (f"%l = linear(%x, %w, {bias}) : f32[n, 6]", f"%y = {order} : f32[n, 6]")
    (op,) = fires(FUSE_RESIDUAL_ADD, graph(*lines, inputs="%x: f32[n, 4], %r: f32[n, 6]"), count=1).ops
    assert op.name == "fused_linear" and op.attrs["expr"] == "add(x0, x1)" and op.operands[5].name == "r"


def test_residual_of_two_products(golden: Golden) -> None:
    lines = ("%l = linear(%x, %w, _) : f32[n, 6]", "%m = linear(%x, %w, %b) : f32[n, 6]")
    text = graph(*lines, "%y = add(%l, %m) : f32[n, 6]")
    fires(FUSE_RESIDUAL_ADD, text, golden, count=1)


def test_residuals_that_do_not_fit() -> None:
    line = "%l = linear(%x, %w, _) : f32[n, 6]"
    row = graph(line, "%y = add(%l, %b) : f32[n, 6]")
    refuses(FUSE_RESIDUAL_ADD, row, "the residual is not of the product's shape and type")
    more = graph(line, "%y = add(%l, %r) : f32[2, n, 6]", inputs="%x: f32[n, 4], %r: f32[2, n, 6]")
    refuses(FUSE_RESIDUAL_ADD, more, "extra operands f32[2, n, 6] do not broadcast to f32[n, 6]")
    inputs = "%x: f32[n, 4], %r: f32[n, 6]"
    twice = graph(line, "%y = add(%l, %r) : f32[n, 6]", inputs=inputs, outputs="%y, %l")
    refuses(FUSE_RESIDUAL_ADD, twice, "%l has 2 readers")
    refuses(FUSE_RESIDUAL_ADD, graph(line, "%y = mul(%l, %r) : f32[n, 6]", inputs=inputs))


# -- a norm behind a product -----------------------------------------------------------------------------------

PRODUCT = "%l = linear(%x, %w, %b) : f32[n, 6]"
ADDED = '%y = fused_norm(%l, %b, _, %b) {norm="rms", eps=1e-05, expr="add(x0, x1)"} : f32[n, 6]'


@pytest.mark.parametrize("line", [
    "%y = rms_norm(%l, %b) {eps=1e-05} : f32[n, 6]", "%y = layer_norm(%l, %b, %b) {eps=1e-05} : f32[n, 6]", ADDED,
], ids=["rms", "layer", "fused"])  # fmt: skip
def test_norm_behind_a_product(line: str) -> None:
    (op,) = fires(FUSE_LINEAR_NORM, graph(PRODUCT, line), count=1).ops
    assert op.name == "linear_norm" and op.attrs["norm"] == ("layer" if "layer" in line else "rms")


def test_norm_behind_golden(golden: Golden) -> None:
    fires(FUSE_LINEAR_NORM, graph(PRODUCT, ADDED), golden, count=1)


def test_norm_behind_that_stays() -> None:
    both = '%y = fused_norm(%l, %b, _, %l) {norm="rms", eps=1e-05, expr="add(x0, x1)"} : f32[n, 6]'
    twice = "%z = relu(%l) : f32[n, 6]", "%m = rms_norm(%l, %b) {eps=1e-05} : f32[n, 6]", "%y = add(%z, %m) : f32[n, 6]"
    refuses(FUSE_LINEAR_NORM, graph(PRODUCT, *twice), "%l has 2 readers")
    refuses(FUSE_LINEAR_NORM, graph(PRODUCT, both), "its norm's tail reads it, too")
    wide = "%l = linear(%x, %w, %b) : f32[2, 6]", "%y = rms_norm(%l, _) {eps=1e-05, dims=2} : f32[2, 6]"
    refuses(FUSE_LINEAR_NORM, graph(*wide, inputs="%x: f32[2, 4]"), "the norm covers 2 dimensions")
    made = "%v = add(%w, %w) : f32[6, 4]", "%l = linear(%x, %v, %b) : f32[n, 6]"
    refuses(FUSE_LINEAR_NORM, graph(*made, ADDED), "takes a constant weight")


# -- head + argmax --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["", RMS, LAYER], ids=["plain", "rms", "layer"])
@pytest.mark.parametrize("axis", ["-1", "1"])
@pytest.mark.parametrize("keepdims", [False, True])
def test_head_argmax(norm: str, axis: str, keepdims: bool) -> None:
    head = "%l = linear(%x, %w, %b) : f32[n, 6]"
    if norm:
        weights = "%g, _" if "rms" in norm else "%g, %c"
        kind = "rms" if "rms" in norm else "layer"
        head = f'%l = fused_linear(%x, %w, %b, {weights}) {{norm="{kind}", eps=1e-05}} : f32[n, 6]'
    size = "n, 1" if keepdims else "n"
    line = f"%y = argmax(%l) {{axis={axis}, keepdims={keepdims}}} : i64[{size}]"
    (op,) = fires(FUSE_HEAD_ARGMAX, graph(head, line), count=1).ops
    assert op.name == "linear_argmax"


def test_argmax_golden(golden: Golden) -> None:
    head = '%l = fused_linear(%x, %w, _, %g, _) {norm="rms", eps=1e-06} : f32[n, 6]'
    fires(FUSE_HEAD_ARGMAX, graph(head, "%y = argmax(%l) {axis=-1} : i64[n]"), golden, count=1)


def test_argmax_that_stays() -> None:
    head = "%l = linear(%x, %w, _) : f32[n, 6]"
    refuses(FUSE_HEAD_ARGMAX, graph(head, "%y = argmax(%l) {axis=0} : i64[6]"), "argmax is over axis 0, not the last")
    refuses(FUSE_HEAD_ARGMAX, graph(head, "%y = argmax(%l) {axis=None} : i64[]"), "argmax is over axis None")
    both = graph(head, "%y = argmax(%l) {axis=-1} : i64[n]", outputs="%y, %l")
    refuses(FUSE_HEAD_ARGMAX, both, "%l has 2 readers, it must have one")
    tail = '%l = fused_linear(%x, %w, _, _, _) {expr="neg(x0)"} : f32[n, 6]'
    refuses(FUSE_HEAD_ARGMAX, graph(tail, "%y = argmax(%l) {axis=-1} : i64[n]"))
    extra = '%l = fused_linear(%x, %w, _, _, _, %b) {expr="add(x0, x1)"} : f32[n, 6]'
    refuses(FUSE_HEAD_ARGMAX, graph(extra, "%y = argmax(%l) {axis=-1} : i64[n]"))
