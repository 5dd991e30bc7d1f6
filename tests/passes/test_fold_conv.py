"""Scales and shifts behind convolutions, and their tails."""

from __future__ import annotations

import pytest

from monoplan.passes.fold_conv import FOLD_CONV
from monoplan.passes.fuse_pointwise import FUSE_INTO_PRODUCER
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

PARAMS = (
    'param %w: f32[6, 2, 3, 3] = "w"', 'param %b: f32[6] = "b"', 'param %s: f32[6, 1, 1] = "s"',
    'param %t: f32[1, 6, 1, 1] = "t"', 'param %one: f32[3] = "one"',
)  # fmt: skip
WINDOW = "{stride=(1, 2), padding=(1, 1, 0, 2), dilation=(1, 1), groups=2}"
OUT = "f32[n, 6, h, 3]"


def graph(*lines: str, inputs: str = "%x: f32[n, 4, h, 5]", outputs: str = "%y", bias: str = "%b") -> str:
    conv = f"%c = conv2d(%x, %w, {bias}) {WINDOW} : {OUT}"
    lines = (*PARAMS, conv, *lines)
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


@pytest.mark.parametrize("bias", ["_", "%b"], ids=["plain", "bias"])
@pytest.mark.parametrize("op", ["mul", "div", "add", "sub"])
def test_one_number_for_each_channel(op: str, bias: str) -> None:
    after = fires(FOLD_CONV, graph(f"%y = {op}(%c, %s) : {OUT}", bias=bias), count=1)
    assert after.ops[-1].name == "conv2d" and op not in [o.name for o in after.ops if o.result.type.rank == 4][-1:]


def test_batch_norm(golden: Golden) -> None:
    text = graph(f"%d = sub(%c, %t) : {OUT}", f"%e = mul(%d, %s) : {OUT}", f"%y = add(%t, %e) : {OUT}", bias="_")
    after = fires(FOLD_CONV, text, golden, count=3)
    assert [o.name for o in after.ops].count("conv2d") == 1 and after.ops[-1].name == "conv2d"


def test_others_stay() -> None:
    refuses(FOLD_CONV, graph(f"%y = mul(%c, %one) : {OUT}"), "not one number for each channel")
    refuses(FOLD_CONV, graph(f"%y = mul(%c, %c) : {OUT}"), "not one number for each channel")
    refuses(FOLD_CONV, graph(f"%y = sub(%s, %c) : {OUT}"))
    given = graph(f"%y = mul(%c, %v) : {OUT}", inputs="%x: f32[n, 4, h, 5], %v: f32[6, 1, 1]")
    refuses(FOLD_CONV, given, "is not a constant")
    refuses(FOLD_CONV, graph(f"%y = mul(%c, %s) : {OUT}", outputs="%y, %c"), "%c has 2 readers")
    half = graph(f"%y = mul(%c, %s) : {OUT}").replace("%w: f32[6, 2, 3, 3]", "%w: bf16[6, 2, 3, 3]")
    refuses(FOLD_CONV, half, "it would be rounded twice")


def test_tails(golden: Golden) -> None:
    inputs = f"%x: f32[n, 4, h, 5], %r: {OUT}"
    text = graph(f"%a = add(%c, %r) : {OUT}", f"%y = relu(%a) : {OUT}", inputs=inputs)
    (op,) = fires(FUSE_INTO_PRODUCER, text, golden, count=2).ops
    assert op.name == "fused_conv2d" and op.attrs["expr"] == "relu(add(x0, x1))"
    refuses(FUSE_INTO_PRODUCER, graph(f"%y = relu(%c) : {OUT}", outputs="%y, %c"), "2 readers")
    wide = graph("%y = add(%c, %z) : f32[2, n, 6, h, 3]", inputs="%x: f32[n, 4, h, 5], %z: f32[2, n, 6, h, 3]")
    refuses(FUSE_INTO_PRODUCER, wide, "is stretched to")
