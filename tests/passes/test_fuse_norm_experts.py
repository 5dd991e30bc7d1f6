"""A norm in front of experts and their router."""

from __future__ import annotations

from monoplan.passes.fuse_norm_experts import FUSE_NORM_EXPERTS
from tests.passes.conftest import Golden
from tests.passes.support import fires, refuses

PARAMS = (
    'param %g: f32[4] = "g"', 'param %router: f32[3, 4] = "router"', 'param %w: f32[3, 6, 4] = "w"',
    'param %up: f32[3, 6, 4] = "up"',
)  # fmt: skip
NORM = "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[2, n, 4]"
ROWS = "%rows = reshape(%n) {shape=(2*n, 4)} : f32[2*n, 4]"
ROUTER = "%s = linear(%n, %router, _) : f32[2, n, 3]"
EXPERTS = '%y = expert_linear(%rows, %w, %ids, %up, _, _) {gate="silu"} : f32[2*n, 2, 6]'


def graph(*lines: str, inputs: str = "%x: f32[2, n, 4], %ids: i64[2*n, 2]", outputs: str = "%y, %s") -> str:
    return "\n".join(
        [f"graph g({inputs}) {{", *(f"  {line}" for line in (*PARAMS, *lines)), f"  return {outputs}", "}"]
    )


def test_experts_and_their_router(golden: Golden) -> None:
    """Experts norm their rows; the router has a norm of its own, which becomes its prologue later."""
    after = fires(FUSE_NORM_EXPERTS, graph(NORM, ROWS, ROUTER, EXPERTS), golden, count=1)
    assert [op.name for op in after.ops] == ["rms_norm", "linear", "reshape", "fused_experts"]


def test_experts_alone() -> None:
    inputs = "%x: f32[n, 4], %ids: i64[n, 2]"
    norm = "%n = rms_norm(%x, _) {eps=1e-06, dims=1} : f32[n, 4]"
    experts = '%y = expert_linear(%n, %w, %ids, _, _, _) {gate=""} : f32[n, 2, 6]'
    after = fires(FUSE_NORM_EXPERTS, graph(norm, experts, inputs=inputs, outputs="%y"), count=1)
    assert [op.name for op in after.ops] == ["fused_experts"]


def test_a_norm_with_another_reader_stays() -> None:
    text = graph(NORM, ROWS, ROUTER, EXPERTS, outputs="%y, %s, %n")
    refuses(FUSE_NORM_EXPERTS, text, "%n is read by other ops than products, too")


def test_a_router_whose_weight_is_computed_leaves_the_norm() -> None:
    inputs = "%x: f32[2, n, 4], %ids: i64[2*n, 2], %v: f32[3, 4]"
    text = graph(NORM, ROWS, ROUTER.replace("%router", "%v"), EXPERTS, inputs=inputs)
    refuses(FUSE_NORM_EXPERTS, text, "%n is read by other ops than products, too")


def test_a_norm_of_linears_alone_is_left_to_others() -> None:
    two = "%y = linear(%n, %router, _) : f32[2, n, 3]"
    refuses(FUSE_NORM_EXPERTS, graph(NORM, ROUTER, two, inputs="%x: f32[2, n, 4]"))


def test_rows_of_each_choice_are_normed_before() -> None:
    inputs = "%x: f32[n, 2, 4], %ids: i64[n, 2]"
    norm = "%n = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[n, 2, 4]"
    experts = '%y = expert_linear(%n, %w, %ids, _, _, _) {gate=""} : f32[n, 2, 6]'
    refuses(FUSE_NORM_EXPERTS, graph(norm, experts, inputs=inputs, outputs="%y"), "each choice has a row of its own")


def test_a_norm_of_larger_rows_stays() -> None:
    norm = NORM.replace("dims=1", "dims=2").replace("%g", "_")
    refuses(FUSE_NORM_EXPERTS, graph(norm, ROWS, EXPERTS, outputs="%y"), "the norm covers 2 dimensions")
