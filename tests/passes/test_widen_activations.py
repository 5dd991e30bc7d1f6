"""Half-precision values between kernels become f32; weights, caches, inputs and outputs stay half."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir.interpreter import interpret
from monoplan.ir.types import f32
from monoplan.passes.widen_activations import WIDEN_ACTIVATIONS
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, random_arguments, refuses, run

BLOCK = """\
graph g(%ids: i64[batch, seq], %c: {t}[batch, 1, capacity, 4], %lengths: i32[batch], %bias: {t}[4]) {{
  param %e: {t}[9, 4] = "e"
  param %g: {t}[4] = "g"
  param %w: {t}[4, 4] = "w"
  %x = embedding(%ids, %e) : {t}[batch, seq, 4]
  %n = rms_norm(%x, %g) {{eps=1e-06, dims=1}} : {t}[batch, seq, 4]
  %l = linear(%n, %w, _) : {t}[batch, seq, 4]
  %r = reshape(%l) {{shape=(batch, seq, 1, 4)}} : {t}[batch, seq, 1, 4]
  %k = kv_update(%c, %r, %lengths, _) : {t}[batch, 1, capacity, 4]
  %a = attention(%r, %k, %k, _, %lengths) {{causal=True, layout="bshd"}} : {t}[batch, seq, 1, 4]
  %f = reshape(%a) {{shape=(batch, seq, 4)}} : {t}[batch, seq, 4]
  %s = add(%f, %x) : {t}[batch, seq, 4]
  %y = add(%s, %bias) : {t}[batch, seq, 4]
  return %y, %k -> %c
}}
"""


@pytest.mark.parametrize("half", ["bf16", "f16"])
def test_a_half_block(half: str, golden: Golden) -> None:
    after = fires(WIDEN_ACTIVATIONS, BLOCK.format(t=half), golden)
    assert [str(v.type.dtype) for v in after.outputs] == [half, half]
    computed = {op.name: op.results[0].type.dtype for op in after.ops if op.name != "cast"}
    assert computed["embedding"].name == half and computed["kv_update"].name == half
    assert all(computed[n] == f32 for n in ("rms_norm", "linear", "attention", "add"))


@pytest.mark.parametrize("wide", ["f32", "f64"])
def test_wider_models_stay(wide: str) -> None:
    refuses(WIDEN_ACTIVATIONS, BLOCK.format(t=wide))


def test_values_are_rounded_less() -> None:
    before = parse(BLOCK.format(t="bf16"))
    after, _ = run(WIDEN_ACTIVATIONS, before)
    inputs, params = random_arguments(before)
    exact = interpret(before, inputs, params, exact=True)[0]
    plain, widened = (interpret(g, inputs, params)[0].astype(np.float64) for g in (before, after))
    assert np.abs(widened - exact).max() < np.abs(plain - exact).max()
    assert np.abs(widened - exact).max() <= 2.0**-8 * np.abs(exact).max()


def test_a_model_without_half_values_between_kernels_stays() -> None:
    text = """\
graph g(%x: bf16[4], %n: i64[2]) {
  %w = cast(%x) {dtype=f32} : f32[4]
  %y = exp(%w) : f32[4]
  %m = add(%n, %n) : i64[2]
  return %y, %m, %x
}
"""
    refuses(WIDEN_ACTIVATIONS, text)


def test_a_weight_that_is_computed_with_is_widened() -> None:
    text = """\
graph g(%x: f32[4]) {
  param %w: bf16[4] = "w"
  %e = exp(%w) : bf16[4]
  %y = add(%x, %e) : f32[4]
  return %y
}
"""
    after = fires(WIDEN_ACTIVATIONS, text, count=1)
    assert [op.name for op in after.ops] == ["exp", "cast", "add"]


def test_a_weight_in_another_shape_stays_half() -> None:
    text = """\
graph g(%x: f32[n, 4]) {
  param %w: bf16[4, 6] = "w"
  param %v: bf16[2, 4] = "v"
  %t = transpose(%w) {axes=(1, 0)} : bf16[6, 4]
  %c = concat(%t, %v) {axis=0} : bf16[8, 4]
  %y = linear(%x, %c, _) : f32[n, 8]
  return %y
}
"""
    refuses(WIDEN_ACTIVATIONS, text)


def test_select_rows_and_gather_are_sources() -> None:
    text = """\
graph g(%rows: i64[2]) {
  param %t: bf16[2, 3, 4] = "t"
  %s = select_rows(%t, %rows) : bf16[2, 1, 4]
  %y = exp(%s) : bf16[2, 1, 4]
  return %y
}
"""
    after = fires(WIDEN_ACTIVATIONS, text, count=1)
    assert [str(op.results[0].type.dtype) for op in after.ops] == ["bf16", "f32", "f32", "bf16"]


def test_a_scatter_keeps_its_type() -> None:
    """Both of its tensors have one type, of which only one may be a weight or a cast."""
    text = """\
graph g(%x: bf16[n, 4], %i: i64[n, 4], %y: f32[n, 4]) {
  %c = cast(%y) {dtype=bf16} : bf16[n, 4]
  %a = add(%x, %x) : bf16[n, 4]
  %s = scatter(%a, %i, %c) {axis=1, reduce="add"} : bf16[n, 4]
  %z = add(%s, %s) : bf16[n, 4]
  return %z
}
"""
    after, _ = run(WIDEN_ACTIVATIONS, parse(text))
    types = {op.name: op.results[0].type.dtype.name for op in after.ops if op.name != "cast"}
    assert types == {"add": "f32", "scatter": "bf16"}
    assert after.outputs[0].type.dtype.name == "bf16"
