"""A router and a gated product of the same rows."""

from __future__ import annotations

import pytest

from monoplan.passes.fuse_route import FUSE_ROUTE
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

PARAMS = (
    'param %g: f32[4] = "g"', 'param %c: f32[4] = "c"', 'param %bias: f32[6] = "bias"', 'param %b: f32[6] = "b"',
    'param %router: f32[6, 4] = "router"', 'param %half: bf16[6, 4] = "half"', 'param %odd: f32[5, 4] = "odd"',
    'param %gate: f32[3, 4] = "gate"', 'param %up: f32[3, 4] = "up"', 'param %both: f32[6, 4] = "both"',
)  # fmt: skip
JOINED = "setup %w = concat(%gate, %up) {axis=0} : f32[6, 4]"
LINEAR = '{norm="rms", eps=1e-06, gated=False, expr="x0"}'
SCORES = f"%s = fused_linear(%x, %router, _, %g) {LINEAR} : f32[2, n, 6]"
FLAT = "%flat = reshape(%s) {shape=(2*n, 6)} : f32[2*n, 6]"
CHOICE = '%share, %ids = route(%flat) {k=2, score="softmax", normalize=False, groups=1, kept_groups=1, scale=2.0, \
gates=0} : f32[2*n, 2], i64[2*n, 2]'
GATED = '%y = fused_linear(%x, %w, _, %g) {norm="rms", eps=1e-06, gated=True, expr="swiglu(x0, x1)"} : f32[2, n, 3]'
LINES = (JOINED, SCORES, FLAT, CHOICE, GATED)


def graph(*lines: str, outputs: str = "%y, %share, %ids") -> str:
    body = "\n".join(f"  {line}" for line in (*PARAMS, *lines))
    return f"graph g(%x: f32[2, n, 4], %z: f32[2, n, 4]) {{\n{body}\n  return {outputs}\n}}"


def test_one_product_with_both_epilogues(golden: Golden) -> None:
    after = fires(FUSE_ROUTE, graph(*LINES), golden, count=1)
    assert [op.name for op in after.ops] == ["linear_route"]
    assert [op.name for op in after.setup] == ["slice", "slice", "concat"]  # of the router's rows, between the others


def test_a_weight_that_is_one_already() -> None:
    """Both of its halves are slices; the gated product may stand first, and scores need no other shape."""
    lines = (GATED.replace("%w", "%both"), SCORES, FLAT, CHOICE)
    after = fires(FUSE_ROUTE, graph(*lines), count=1)
    assert [op.name for op in after.setup] == ["slice"] * 4 + ["concat"]


def test_products_without_a_norm() -> None:
    scores = "%s = linear(%x, %router, _) : f32[2, n, 6]"
    gated = GATED.replace("_, %g)", "_)").replace('"rms", eps=1e-06', '"none", eps=0.0')
    (op,) = fires(FUSE_ROUTE, graph(JOINED, scores, FLAT, CHOICE, gated), count=1).ops
    assert op.attrs["norm"] == "none" and op.operands[2:] in ((), (None,))


@pytest.mark.parametrize(("old", "new"), [
    ("(%x, %w, _, %g)", "(%z, %w, _, %g)"),
    ("(%x, %w, _, %g)", "(%x, %w, _, %c)"),
    ('eps=1e-06, gated=True', 'eps=1e-05, gated=True'),
], ids=["x", "norm", "eps"])  # fmt: skip
def test_rows_that_differ(old: str, new: str) -> None:
    """There is nothing to fuse, and nothing to say about it."""
    refuses(FUSE_ROUTE, graph(*(line.replace(old, new) for line in LINES)))


@pytest.mark.parametrize(("old", "new", "reason"), [
    ("%router", "%half", "the weights are bf16 and f32"),
    ("(%x, %router, _,", "(%x, %router, %bias,", "the products have biases"),
    ("(%x, %w, _,", "(%x, %w, %bias,", "the products have biases"),
    ("route(%flat)", "route(%flat, %b)", "the choice has a bias"),
    ('gated=False, expr="x0"', 'gated=False, expr="tanh(x0)"', "another epilogue already"),
], ids=["types", "router-bias", "gated-bias", "choice-bias", "epilogue"])  # fmt: skip
def test_products_that_do_not_fit(old: str, new: str, reason: str) -> None:
    refuses(FUSE_ROUTE, graph(*(line.replace(old, new) for line in LINES)), reason)


def test_an_odd_number_of_scores() -> None:
    odd = [line.replace("%router", "%odd").replace("n, 6]", "n, 5]").replace("n, 6)", "n, 5)") for line in LINES]
    refuses(FUSE_ROUTE, graph(*odd), "5 scores have no two halves")


def test_values_that_others_read() -> None:
    refuses(FUSE_ROUTE, graph(*LINES, outputs="%y, %share, %ids, %s"), "%s has 2 readers")
    more = f"%more = fused_linear(%z, %router, _, %g) {LINEAR} : f32[2, n, 6]"
    refuses(FUSE_ROUTE, graph(*LINES, more, outputs="%y, %share, %ids, %more"), "%router is read elsewhere too")
