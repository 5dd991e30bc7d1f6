"""Attention from its written-out forms: the LLaMA document's per-sample one, batches, masks, repeated heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from monoplan.frontend.module import Module
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import interpret
from monoplan.models.llama import grouped_query_attention
from monoplan.passes.fuse_attention import FUSE_ATTENTION
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from tests.passes.conftest import Golden
from tests.passes.support import fires, parse, refuses, run, same_numbers

INPUTS = "%q: f32[batch, 4, seq, 8], %k: f32[batch, 4, keys, 8], %v: f32[batch, 4, keys, 8]"
SCORES = "f32[batch, 4, seq, keys]"
SCALE = "%scale = full() {shape=(), value=0.25, dtype=f32} : f32[]"
HIDDEN = "%hidden = full() {shape=(), value=-inf, dtype=f32} : f32[]"
TURN = "%kt = transpose(%k) {axes=(0, 1, 3, 2)} : f32[batch, 4, 8, keys]"
PRODUCT = f"%s = matmul(%q, %kt) : {SCORES}"
OUT = "%y = matmul(%p, %v) : f32[batch, 4, seq, 8]"
SOFTMAX = f"%p = softmax(%m) {{axis=-1}} : {SCORES}"


def graph(*lines: str, inputs: str = INPUTS, outputs: str = "%y") -> str:
    return "\n".join([f"graph g({inputs}) {{", *(f"  {line}" for line in lines), f"  return {outputs}", "}"])


def chain(scores: Sequence[str], softmax: str = SOFTMAX, inputs: str = INPUTS, outputs: str = "%y") -> str:
    return graph(SCALE, HIDDEN, TURN, PRODUCT, *scores, softmax, OUT, inputs=inputs, outputs=outputs)


def attention_of(graph: Graph) -> Any:
    (op,) = (op for op in graph.ops if op.name == "attention")
    assert not any(op.name in ("matmul", "softmax", "causal_softmax", "repeat") for op in graph.ops)
    return op


SCALED = f"%m = mul(%s, %scale) : {SCORES}"
DIVIDED = f"%m = div(%s, %scale) : {SCORES}"


@pytest.mark.parametrize("causal", [False, True], ids=["softmax", "causal"])
@pytest.mark.parametrize(
    ("line", "scale"),
    [(SCALED, 0.25), (f"%m = mul(%scale, %s) : {SCORES}", 0.25), (DIVIDED, 4.0), (None, 1.0)],
    ids=["times", "times, scale first", "over", "unscaled"],
)
def test_scores(causal: bool, line: str | None, scale: float) -> None:
    soft = SOFTMAX if not causal else f"%p = causal_softmax(%m) : {SCORES}"
    text = chain([line] if line else [], soft if line else soft.replace("%m", "%s"))
    op = attention_of(fires(FUSE_ATTENTION, text))
    assert (op.attrs["causal"], op.attrs["scale"], op.attrs["layout"]) == (causal, scale, "bhsd")


def test_the_last_axis_by_its_number() -> None:
    fires(FUSE_ATTENTION, chain([SCALED], SOFTMAX.replace("-1", "3")))
    refuses(FUSE_ATTENTION, chain([SCALED], SOFTMAX.replace("-1", "2")), "softmax is over axis 2, not the last")


def test_causal(golden: Golden) -> None:
    fires(FUSE_ATTENTION, chain([SCALED], f"%p = causal_softmax(%m) : {SCORES}"), golden)


# -- masks ----------------------------------------------------------------------------------------------------

ADDED = f"%m = add(%t, %mask) : {SCORES}"
VISIBLE = f"%m = where(%mask, %t, %hidden) : {SCORES}"
COVERED = f"%m = where(%mask, %hidden, %t) : {SCORES}"


def masked(line: str, mask: str, scaled: str = SCALED) -> str:
    return chain([scaled.replace("%m", "%t"), line], inputs=f"{INPUTS}, %mask: {mask}")


@pytest.mark.parametrize("scaled", [SCALED, DIVIDED], ids=["times", "over"])
@pytest.mark.parametrize("shape", ["seq, keys", "batch, 1, seq, keys", "1, keys", "4, seq, keys"])
def test_a_mask_that_is_added(scaled: str, shape: str) -> None:
    op = attention_of(fires(FUSE_ATTENTION, masked(ADDED, f"f32[{shape}]", scaled)))
    assert op.operand("mask").name == "mask" and not op.attrs["causal"]


@pytest.mark.parametrize("line", [VISIBLE, COVERED], ids=["visible", "covered"])
def test_a_mask_that_chooses(line: str, golden: Golden) -> None:
    # Only rows that see something: softmax of -inf alone is NaN, attention gives 0.
    before = parse(masked(line, "bool[seq, keys]"))
    after, notes = run(FUSE_ATTENTION, before)
    assert notes.rewrites and attention_of(after).operand("mask") is not None
    rng = np.random.default_rng(0)
    sizes = [(2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)]
    mask = np.tril(np.ones((3, 5), np.bool_), 2)
    inputs = [*(rng.standard_normal(s) for s in sizes), mask if line is VISIBLE else ~mask]
    for a, b in zip(interpret(before, inputs, exact=True), interpret(after, inputs, exact=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    golden(str(after))


def test_masks_that_do_not_fit() -> None:
    refuses(FUSE_ATTENTION, masked(ADDED, "i32[seq, keys]"), "the mask is i32[seq, keys]")
    finite = masked(VISIBLE, "bool[seq, keys]").replace("value=-inf", "value=-10000.0")
    refuses(FUSE_ATTENTION, finite, "what is masked is not -inf")
    one = INPUTS.replace("batch", "1")
    stretched = masked(ADDED, "f32[5, 1, seq, keys]").replace(INPUTS, one)
    lines = []
    for line in stretched.splitlines():
        size = "5" if line.lstrip().startswith(("%m", "%p", "%y")) else "1"
        lines.append(line.replace("batch", size))
    refuses(FUSE_ATTENTION, "\n".join(lines), "stretches the scores")
    wide = masked(ADDED, "f64[seq, keys]").replace("add(%t, %mask) : f32", "add(%t, %mask) : f64")
    wide = wide.replace("{axis=-1} : f32", "{axis=-1} : f64").replace("%v) : f32", "%v) : f64")
    refuses(FUSE_ATTENTION, wide, "the result would be f32[batch, 4, seq, 8] in place of f64[batch, 4, seq, 8]")


# -- what must stay -------------------------------------------------------------------------------------------


def test_a_second_reader_of_the_weights() -> None:
    refuses(FUSE_ATTENTION, chain([SCALED], outputs="%y, %p"), "%p has 2 readers, it must have one")
    refuses(FUSE_ATTENTION, chain([SCALED], outputs="%y, %s"), "%s has 2 readers, it must have one")


def test_a_scale_that_is_computed() -> None:
    text = chain([SCALED], inputs=f"{INPUTS}, %late: f32[]").replace("mul(%s, %scale)", "mul(%s, %late)")
    refuses(FUSE_ATTENTION, text, "the scale is not a constant")
    for line in (SCALED, DIVIDED):
        refuses(FUSE_ATTENTION, chain([line]).replace("value=0.25", "value=0.0"), "the scale is 0")


def test_heads_that_are_symbolic() -> None:
    refuses(FUSE_ATTENTION, chain([SCALED]).replace("batch, 4,", "batch, heads,"), "the number of heads is symbolic")


def test_ranks_and_leading_dimensions() -> None:
    flat = chain([SCALED]).replace("batch, 4, ", "").replace("(0, 1, 3, 2)", "(1, 0)")
    refuses(FUSE_ATTENTION, flat, "q, k and v have ranks 2, 2 and 2; attention takes 3 or 4")
    shared = chain([SCALED]).replace(": f32[batch, 4, keys, 8]", ": f32[batch, 1, keys, 8]")
    shared = shared.replace("f32[batch, 4, 8, keys]", "f32[batch, 1, 8, keys]")
    refuses(FUSE_ATTENTION, shared, "the leading dimensions of q, k and v differ")


def test_values_of_another_type() -> None:
    text = chain([SCALED]).replace("%v: f32", "%v: f64").replace("%v) : f32", "%v) : f64")
    refuses(FUSE_ATTENTION, text, "q, k and v differ in element type")


def test_a_softmax_that_is_not_attention() -> None:
    alone = graph(SCALE, TURN, PRODUCT, SCALED, SOFTMAX, f"%y = exp(%p) : {SCORES}")
    refuses(FUSE_ATTENTION, alone)


# -- repeated heads -------------------------------------------------------------------------------------------

REPEAT = "repeat(%{0}) {{repeats=2, axis=1}} : f32[batch, 4, keys, 8]"
GROUPED = INPUTS.replace("%k: f32[batch, 4", "%k: f32[batch, 2").replace("%v: f32[batch, 4", "%v: f32[batch, 2")
FUSED = "%y = attention(%q, {0}, {1}, _, _) {{causal=True, scale=0.25}} : f32[batch, 4, seq, 8]"


def test_drop_repeated_heads(golden: Golden) -> None:
    lines = ("%a = " + REPEAT.format("k"), "%b = " + REPEAT.format("v"), FUSED.format("%a", "%b"))
    fires(FUSE_ATTENTION, graph(*lines, inputs=GROUPED), golden, count=1)


def test_repeated_heads_behind_a_transpose(golden: Golden) -> None:
    inputs = "%q: f32[batch, 4, seq, 8], %k: f32[batch, keys, 2, 8], %v: f32[batch, keys, 2, 8]"
    lines = []
    for name, source in (("a", "k"), ("b", "v")):
        lines.append(f"%{name}1 = repeat(%{source}) {{repeats=2, axis=2}} : f32[batch, keys, 4, 8]")
        lines.append(f"%{name} = transpose(%{name}1) {{axes=(0, 2, 1, 3)}} : f32[batch, 4, keys, 8]")
    after = fires(FUSE_ATTENTION, graph(*lines, FUSED.format("%a", "%b"), inputs=inputs), golden, count=3)
    assert attention_of(after).operand("k").type.shape[1] == 2


def test_repeats_that_do_not_match() -> None:
    only_keys = ("%a = " + REPEAT.format("k"), FUSED.format("%a", "%v"))
    refuses(FUSE_ATTENTION, graph(*only_keys, inputs=INPUTS.replace("%k: f32[batch, 4", "%k: f32[batch, 2")))
    longer = "repeat(%{0}) {{repeats=2, axis=2}} : f32[batch, 4, 2*keys, 8]"
    lines = ("%a = " + longer.format("k"), "%b = " + longer.format("v"), FUSED.format("%a", "%b"))
    refuses(FUSE_ATTENTION, graph(*lines), "keys or values are repeated along another dimension than the heads")
    lines = ("%a = " + REPEAT.format("k"), "%b = " + REPEAT.format("v"), FUSED.format("%a", "%b"))
    refuses(FUSE_ATTENTION, graph(*lines, inputs=GROUPED, outputs="%y, %a"), "%a has 2 readers, it must have one")


# -- layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", ["batch, ", ""], ids=["batch", "sample"])
def test_layout(lead: str, golden: Golden) -> None:
    axes = "(0, 2, 1, 3)" if lead else "(1, 0, 2)"
    inputs = f"%q: f32[{lead}seq, 4, 8], %k: f32[{lead}2, keys, 8], %v: f32[{lead}2, keys, 8]"
    lines = (
        f"%t = transpose(%q) {{axes={axes}}} : f32[{lead}4, seq, 8]",
        f"%a = attention(%t, %k, %v, _, _) {{causal=True}} : f32[{lead}4, seq, 8]",
        f"%y = transpose(%a) {{axes={axes}}} : f32[{lead}seq, 4, 8]",
    )
    after = fires(FUSE_ATTENTION, graph(*lines, inputs=inputs), golden, count=1)
    assert attention_of(after).attrs["layout"] == "bshd"


def test_another_permutation_keeps_the_layout() -> None:
    lines = (
        "%t = transpose(%q) {axes=(0, 2, 1, 3)} : f32[batch, 4, seq, 8]",
        "%a = attention(%t, %k, %v, _, _) {causal=True} : f32[batch, 4, seq, 8]",
        "%y = transpose(%a) {axes=(2, 0, 1, 3)} : f32[seq, batch, 4, 8]",
    )
    inputs = INPUTS.replace("%q: f32[batch, 4, seq, 8]", "%q: f32[batch, seq, 4, 8]")
    refuses(FUSE_ATTENTION, graph(*lines, inputs=inputs))
    back = "%y = transpose(%a) {axes=(0, 2, 1, 3)} : f32[batch, seq, 4, 8]"
    both = graph(*lines[:2], lines[1].replace("%a", "%b"), back, inputs=inputs, outputs="%y, %b")
    refuses(FUSE_ATTENTION, both, "%t has 2 readers, it must have one")


# -- the LLaMA document's attention, as a user writes it -------------------------------------------------------


class Sample(Module):
    """multi_head_attention of one sample: [seq, heads, dim], keys and values repeated for their groups."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_query_attention(q, k, v, 8**-0.5)


class Written(Module):
    """The document's steps one by one: permutes, matmul, scaling, causal_softmax, matmul, permute; K is kept."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from monoplan.frontend import functional as F

        group = int(q.shape[1]) // int(k.shape[1])
        total, heads, dim = k.shape
        if group > 1:
            k, v = (x.unsqueeze(2).expand(total, heads, group, dim).reshape(total, heads * group, dim) for x in (k, v))
        weights = F.causal_softmax(q.permute(1, 0, 2) @ k.permute(1, 2, 0) * 8**-0.5)
        return (weights @ v.permute(1, 0, 2)).permute(1, 0, 2)


@pytest.mark.parametrize("module", [Sample(), Written()], ids=["model", "document"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def test_one_sample_of_the_document(module: Module, heads: int, kv_heads: int) -> None:
    cache = spec("keys", kv_heads, 8)
    traced = trace(module, spec("seq", heads, 8), cache, cache).graph
    after = run_passes(traced, PIPELINE, check=True)[-1].graph
    op = attention_of(after)
    assert op.attrs["causal"] and op.attrs["layout"] == "bshd" and op.attrs["scale"] == np.float32(8**-0.5)
    assert {o.name for o in after.ops} == {"attention", "transpose"}  # of k and v, which are views
    same_numbers(traced, after)


class Batch(Module):
    """A loop over the samples of a batch, as the document runs it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from monoplan.frontend import functional as F

        return F.stack([grouped_query_attention(q[i], k[i], v[i], 0.5) for i in range(2)])


def test_a_loop_over_samples() -> None:
    cache = spec(2, "keys", 2, 8)
    traced = trace(Batch(), spec(2, "seq", 4, 8), cache, cache).graph
    after = run_passes(traced, PIPELINE, check=True)[-1].graph
    assert [op.name for op in after.ops].count("attention") == 2
    assert not any(op.name in ("matmul", "causal_softmax", "repeat") for op in after.ops)
    same_numbers(traced, after)


@pytest.mark.parametrize("batch", ["batch", 3])
def test_a_whole_batch_at_once(batch: Any) -> None:
    cache = spec(batch, "keys", 2, 8)
    traced = trace(Sample(), spec(batch, "seq", 4, 8), cache, cache).graph
    after = run_passes(traced, PIPELINE, check=True)[-1].graph
    assert attention_of(after).attrs["layout"] == "bshd"
    same_numbers(traced, after)
