"""Scans under the passes: what does not depend on the state leaves the loop, and fusions happen inside of it."""

from __future__ import annotations

from monoplan.ir.graph import Graph, Op
from monoplan.ir.printer import print_graph
from monoplan.passes.canonicalize import HOIST_SETUP
from monoplan.passes.fuse_linear import MERGE_PARALLEL_LINEARS
from monoplan.passes.hoist_from_scans import HOIST_FROM_SCANS
from monoplan.passes.manager import Notes, run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.passes.roll_layers import ROLL_LAYERS
from monoplan.passes.shard.rewrite import shard_pass
from monoplan.passes.widen_activations import WIDEN_ACTIVATIONS
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, same_numbers


def scan(ops: str, outputs: str, results: str = ": f32[batch, 4], f32[seq, batch, 4]", more: str = "") -> str:
    """A scan over %x with the state %h, and what it shares: the weights %w and %b, and the input %k."""
    names = "%a, %y" if results.count("f32[") > 1 else "%a"
    body = "\n".join(f"      {line}" for line in ops.strip().splitlines())
    return f"""graph g(%h: f32[batch, 4], %x: f32[seq, batch, 4], %k: f32[4]) {{
  param %w: f32[4, 4] = "w"
  param %b: f32[4] = "b"
  {names} = scan(%h, %x, %w, %b, %k) {{length=seq, state=1, slices=1, reverse=False}} {results}
    graph cell(%s: f32[batch, 4], %v: f32[batch, 4], %w1: f32[4, 4], %b1: f32[4], %k1: f32[4]) {{
{body}
      return {outputs}
    }}
{more}  return {names}
}}
"""


def body_of(graph: Graph) -> Graph:
    (op,) = (o for o in graph.ops if o.name == "scan")
    return op.attrs["body"]  # type: ignore[no-any-return]


def op_names(graph: Graph) -> list[str]:
    return [o.name for o in graph.ops]


GRU = """
%gx = linear(%v, %w1, %b1) : f32[batch, 4]
%gh = linear(%s, %w1, %b1) : f32[batch, 4]
%sum = add(%gx, %gh) : f32[batch, 4]
%n = tanh(%sum) : f32[batch, 4]
"""


def test_a_product_over_the_slices_runs_once(golden: Golden) -> None:
    after = fires(HOIST_FROM_SCANS, scan(GRU, "%n, %n"), golden, count=1)
    assert op_names(after) == ["linear", "scan"] and op_names(body_of(after)) == ["linear", "add", "tanh"]


def test_what_leads_to_a_product_leaves_with_it() -> None:
    ops = """
%t = transpose(%v) {axes=(1, 0)} : f32[4, batch]
%u = transpose(%t) {axes=(1, 0)} : f32[batch, 4]
%c = slice(%u) {axis=1, start=0, length=1} : f32[batch, 1]
%r = reshape(%c) {shape=(batch,)} : f32[batch]
%q = reshape(%r) {shape=(batch, 1)} : f32[batch, 1]
%two = full() {shape=(), value=2.0, dtype=f32} : f32[]
%e = mul(%q, %two) : f32[batch, 1]
%m = mul(%e, %k1) : f32[batch, 4]
%i = rms_norm(%m, %b1) {eps=1e-06} : f32[batch, 4]
%gx = linear(%i, %w1, %b1) : f32[batch, 4]
%n = add(%gx, %s) : f32[batch, 4]
"""
    after = fires(HOIST_FROM_SCANS, scan(ops, "%n, %n"))
    assert op_names(body_of(after)) == ["add"] and [v.name for v in body_of(after).inputs] == ["s", "gx"]


def test_operands_of_fewer_dimensions_keep_their_place() -> None:
    """A slice of rank 1 beside one of rank 2: sizes align from the back, with the length in front of all."""
    text = """graph g(%h: f32[4, 4], %x: f32[4, 4, 4], %z: f32[4, 4]) {
  param %w: f32[4, 4] = "w"
  %a = scan(%h, %x, %z, %w) {length=4, state=1, slices=2, reverse=False} : f32[4, 4]
    graph cell(%s: f32[4, 4], %v: f32[4, 4], %u: f32[4], %w1: f32[4, 4]) {
      %m = mul(%v, %u) : f32[4, 4]
      %gx = linear(%m, %w1, _) : f32[4, 4]
      %n = add(%gx, %s) : f32[4, 4]
      return %n
    }
  return %a
}
"""
    after = fires(HOIST_FROM_SCANS, text)
    assert op_names(after) == ["reshape", "mul", "linear", "scan"]


def test_what_all_turns_share_is_computed_once() -> None:
    ops = "%e = exp(%k1) : f32[4]\n%f = mul(%e, %b1) : f32[4]\n%n = mul(%s, %f) : f32[batch, 4]"
    after = fires(HOIST_FROM_SCANS, scan(ops, "%n, %v"), count=2)
    assert op_names(after) == ["exp", "mul", "scan"] and op_names(body_of(after)) == ["mul"]


def test_slices_of_results_that_nobody_reads_are_not_made() -> None:
    text = scan(GRU, "%n, %n").replace("  return %a, %y", "  return %a")
    after = fires(HOIST_FROM_SCANS, text)
    (op,) = (o for o in after.ops if o.name == "scan")
    assert len(op.results) == 1 and len(body_of(after).outputs) == 1


def test_what_depends_on_the_state_stays() -> None:
    ops = "%m = add(%s, %v) : f32[batch, 4]\n%n = linear(%m, %w1, %b1) : f32[batch, 4]"
    refuses(HOIST_FROM_SCANS, scan(ops, "%n, %n"))


def test_pointwise_ops_alone_stay() -> None:
    """All slices of %e in memory would cost more than computing it in the kernel that reads it."""
    ops = "%e = exp(%v) : f32[batch, 4]\n%n = add(%s, %e) : f32[batch, 4]"
    refuses(HOIST_FROM_SCANS, scan(ops, "%n, %n"))


def test_a_weight_that_is_a_slice_stays() -> None:
    text = """graph g(%h: f32[4, 4], %x: f32[4, 4, 4], %z: f32[4, 4, 4]) {
  %a = scan(%h, %x, %z) {length=4, state=1, slices=2, reverse=False} : f32[4, 4]
    graph cell(%s: f32[4, 4], %v: f32[4, 4], %u: f32[4, 4]) {
      %gx = linear(%v, %u, _) : f32[4, 4]
      %n = add(%gx, %s) : f32[4, 4]
      return %n
    }
  return %a
}
"""
    refuses(HOIST_FROM_SCANS, text)


# -- other passes, inside of a body --------------------------------------------------------------------------------


def applied(pass_: object, text: str) -> tuple[Graph, Notes]:
    before, notes = parse(text), Notes()
    after: Graph = pass_.apply(before, notes)  # type: ignore[attr-defined]
    same_numbers(before, after)
    return after, notes


def test_setup_ops_of_a_body_are_those_of_the_graph(golden: Golden) -> None:
    """A transposed weight is made at load, and the loop shares it; another use of the weight stays."""
    ops = """
%t = transpose(%w1) {axes=(1, 0)} : f32[4, 4]
%p = linear(%s, %t, _) : f32[batch, 4]
%q = linear(%p, %w1, _) : f32[batch, 4]
"""
    after, notes = applied(HOIST_SETUP, scan(ops, "%q, %q"))
    assert notes.rewrites == 1 and [o.name for o in after.setup] == ["transpose"]
    golden(print_graph(after))


def test_products_of_a_body_are_merged() -> None:
    text = scan("%p = linear(%s, %w1, %b1) : f32[batch, 4]\n%q = linear(%s, %w2, _) : f32[batch, 4]", "%p, %q")
    text = text.replace("  param %b", '  param %o: f32[4, 4] = "o"\n  param %b').replace(
        "%w, %b, %k)", "%w, %b, %k, %o)"
    )
    text = text.replace("%k1: f32[4])", "%k1: f32[4], %w2: f32[4, 4])")
    after, _ = applied(MERGE_PARALLEL_LINEARS, text)
    assert op_names(body_of(after))[0] == "linear" and op_names(body_of(after)).count("linear") == 1
    assert "concat" in [o.name for o in after.setup]


def test_half_precision_around_a_scan() -> None:
    """Its operands keep the types of its body, in which half precision is widened as well."""
    text = scan("%p = mul(%s, %v) : f32[batch, 4]\n%q = exp(%p) : f32[batch, 4]", "%q, %p").replace("f32", "bf16")
    lines = "  %x2 = exp(%x) : bf16[seq, batch, 4]\n  %a, %y = scan(%h, %x2, "
    text = text.replace("  %a, %y = scan(%h, %x, ", lines)
    stages = run_passes(parse(text), (WIDEN_ACTIVATIONS,))
    after = stages[-1].graph
    (op,) = (o for o in after.ops if o.name == "scan")
    assert {str(v.type.dtype) for v in op.reads} == {"bf16"} and [str(v.type) for v in after.outputs][
        0
    ] == "bf16[batch, 4]"
    assert {str(r.type.dtype) for o in body_of(after).ops for r in o.results if o.name in ("mul", "exp")} == {"f32"}
    same_numbers(parse(text), after)


def test_layers_with_scans_are_not_rolled() -> None:
    def layer(i: int, x: str) -> list[str]:
        return [
            f"  %p{i} = exp({x}) : f32[4, 4]",
            f"  %q{i} = tanh(%p{i}) : f32[4, 4]",
            f"  %r{i} = scan(%h, %q{i}) {{length=4, state=1, slices=1, reverse=False}} : f32[4]",
            "    graph cell(%s: f32[4], %v: f32[4]) {",
            "      %n = add(%s, %v) : f32[4]",
            "      return %n",
            "    }",
            f"  %t{i} = add(%q{i}, %r{i}) : f32[4, 4]",
            f"  %u{i} = exp(%t{i}) : f32[4, 4]",
        ]

    lines = [line for i in range(3) for line in layer(i, "%x" if i == 0 else f"%u{i - 1}")]
    text = "\n".join(["graph g(%h: f32[4], %x: f32[4, 4]) {", *lines, "  return %u2", "}"])
    refuses(ROLL_LAYERS, text)


def test_the_pipeline_fuses_a_cell(golden: Golden) -> None:
    graph = parse(scan(GRU, "%n, %n"))
    final = run_passes(graph, PIPELINE, check=True)[-1].graph
    golden(print_graph(final))
    same_numbers(graph, final)
    inner: list[Op] = list(body_of(final).ops)
    assert [o.name for o in inner] == ["fused_linear"] and inner[0].attrs["expr"].startswith("tanh(")


def test_ranks_run_scans_whole() -> None:
    """Ranks divide the products outside; inside of a scan they would exchange data in every turn."""
    product = "linear(%s, %w1, %b1) : f32[batch, 4]"
    text = scan(GRU, "%n, %n").replace(product, f'{product} @ "up" "m.py":1')
    line = '  %o = linear(%x, %w, %b) : f32[seq, batch, 4] @ "up" "m.py":2\n  %a, %y = scan(%h, %o, '
    graph = parse(text.replace("  %a, %y = scan(%h, %x, ", line))
    after = run_passes(graph, (shard_pass({"up": "colwise"}, 0, 2),))[-1].graph
    assert op_names(after) == ["linear", "all_gather", "scan"]
    assert op_names(body_of(after)) == ["linear", "linear", "add", "tanh"]
