"""Sharding: the graphs of all ranks compute what the one graph does, with the collectives where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monoplan.frontend.specs import spec
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import interpret
from monoplan.ir.ops.collective import among
from monoplan.ir.printer import print_graph
from monoplan.ir.verifier import verify
from monoplan.models import LlamaConfig, LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.models.moe import MoeForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig
from monoplan.passes.manager import Notes, run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.passes.shard.rewrite import shard_pass
from monoplan.passes.shard.rules import cut, cut_ceil, cut_heads, cut_shared
from monoplan.runtime.ranks.comm import Communicator, threads
from tests.passes.conftest import Golden
from tests.passes.support import parse, random_arguments
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
MLP_PLAN = {"mlp.gate": "colwise", "mlp.up": "colwise", "mlp.down": "rowwise"}
MLP = """
graph mlp(%x: f32[batch, 8]) {
  param %g: f32[12, 8] = "mlp.gate.weight"
  param %u: f32[12, 8] = "mlp.up.weight"
  param %ub: f32[12] = "mlp.up.bias"
  param %d: f32[8, 12] = "mlp.down.weight"
  param %db: f32[8] = "mlp.down.bias"
  %gate = linear(%x, %g, _) : f32[batch, 12]
  %up = linear(%x, %u, %ub) : f32[batch, 12]
  %act = swiglu(%gate, %up) : f32[batch, 12]
  %down = linear(%act, %d, %db) : f32[batch, 8]
  %y = add(%x, %down) : f32[batch, 8]
  return %y
}
"""


class Ranks:
    """References talk to each other through values of Python."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.size = comm, comm.size

    def gather(self, x: Array) -> list[Array]:
        return self.comm.collect(x)


def shard(graph: Graph, plan: Mapping[str, str], rank: int, size: int) -> tuple[Graph, Notes]:
    notes = Notes()
    made = shard_pass(plan, rank, size).run(graph, notes)
    verify(made)
    return made, notes


def same_numbers(graph: Graph, plan: Mapping[str, str], size: int, *, passes: bool = False) -> list[Graph]:
    """Runs the graphs of all ranks beside each other and compares with the one graph."""
    inputs, params = random_arguments(graph)
    wanted = interpret(graph, inputs, params, exact=True)
    graphs = [shard(graph, plan, rank, size)[0] for rank in range(size)]
    if passes:
        graphs = [run_passes(g, PIPELINE)[-1].graph for g in graphs]

    def run(comm: Communicator) -> list[Array]:
        with among(Ranks(comm)):
            return interpret(graphs[comm.rank], inputs, params, exact=True)

    for rank, got in enumerate(run_ranks(threads(size), run)):
        for j, (a, b) in enumerate(zip(got, wanted, strict=True)):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=f"output {j} of rank {rank}")
    return graphs


def names(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops]


def test_mlp(golden: Golden) -> None:
    graphs = same_numbers(parse(MLP), MLP_PLAN, 2)
    golden(print_graph(graphs[1]))
    assert names(graphs[0]).count("all_reduce") == 1 and "all_gather" not in names(graphs[0])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 12])
def test_any_number_of_ranks(size: int) -> None:
    """12 rows between 5 ranks: parts of 2 and 3."""
    graphs = same_numbers(parse(MLP), MLP_PLAN, size, passes=True)
    widths = (
        [g.params[0].value.type.shape[0] for g in graphs]
        if size == 1
        else [next(op.result.type.shape[0] for op in g.setup if op.name == "slice") for g in graphs]
    )
    assert sum(int(w) for w in widths) == 12  # type: ignore[call-overload]


def test_one_rank_changes_nothing() -> None:
    graph = parse(MLP)
    assert shard(graph, MLP_PLAN, 0, 1)[0] is graph


def test_too_many_ranks() -> None:
    with pytest.raises(ArgumentError, match="12 can't be divided between 13 ranks"):
        shard(parse(MLP), MLP_PLAN, 0, 13)


def test_the_bias_of_a_sum_is_added_once() -> None:
    made, notes = shard(parse(MLP), MLP_PLAN, 0, 2)
    at = names(made).index("all_reduce")
    assert names(made)[at - 1 : at + 2] == ["linear", "all_reduce", "add"]
    assert made.ops[at - 1].operands[2] is None and notes.rewrites == 1 and not notes.misses


def test_the_residual_is_added_in_the_sum() -> None:
    made, _ = shard(parse(MLP), MLP_PLAN, 0, 2)
    final = run_passes(made, PIPELINE)[-1].graph
    (total,) = [op for op in final.ops if op.name == "fused_all_reduce"]
    assert total.attrs["expr"] in ("add(x1, add(x0, x2))", "add(x2, add(x0, x1))", "add(x1, add(x2, x0))")
    assert names(final) == ["fused_linear", "linear", "fused_all_reduce"]


def test_a_rowwise_linear_alone_takes_its_part_of_a_whole_input() -> None:
    graphs = same_numbers(parse(MLP), {"mlp.down": "rowwise"}, 3)
    assert "slice" in names(graphs[0]) and "all_gather" not in names(graphs[0])


def test_colwise_alone_is_gathered_and_noted() -> None:
    graph = parse(MLP)
    graphs = same_numbers(graph, {"mlp.gate": "colwise", "mlp.up": "colwise"}, 2)
    assert names(graphs[0]).count("all_gather") == 1  # of the product, not of both its factors
    _, notes = shard(graph, {"mlp.gate": "colwise"}, 0, 2)
    assert "gathered" in notes.misses[0].reason


def test_colwise_gather() -> None:
    for size in (2, 5):  # 12 rows of 5 ranks: parts are filled up to the largest
        same_numbers(parse(MLP), {"mlp.gate": "colwise_rep", "mlp.up": "colwise_gather"}, size)


HEADS = """
graph heads(%x: f32[batch, seq, 24]) {{
  param %q: f32[{q}, 24] = "a.q_proj.weight"
  param %k: f32[{k}, 24] = "a.k_proj.weight"
  param %v: f32[{k}, 24] = "a.v_proj.weight"
  param %o: f32[24, {q}] = "a.o_proj.weight"
  %lq = linear(%x, %q, _) : f32[batch, seq, {q}]
  %lk = linear(%x, %k, _) : f32[batch, seq, {k}]
  %lv = linear(%x, %v, _) : f32[batch, seq, {k}]
  %rq = reshape(%lq) {{shape=(batch, seq, {h}, 4)}} : f32[batch, seq, {h}, 4]
  %rk = reshape(%lk) {{shape=(batch, seq, {g}, 4)}} : f32[batch, seq, {g}, 4]
  %rv = reshape(%lv) {{shape=(batch, seq, {g}, 4)}} : f32[batch, seq, {g}, 4]
  %tq = transpose(%rq) {{axes=(0, 2, 1, 3)}} : f32[batch, {h}, seq, 4]
  %tk = transpose(%rk) {{axes=(0, 2, 1, 3)}} : f32[batch, {g}, seq, 4]
  %tv = transpose(%rv) {{axes=(0, 2, 1, 3)}} : f32[batch, {g}, seq, 4]
{body}
  %tz = transpose(%z) {{axes=(0, 2, 1, 3)}} : f32[batch, seq, {h}, 4]
  %rz = reshape(%tz) {{shape=(batch, seq, {q})}} : f32[batch, seq, {q}]
  %y = linear(%rz, %o, _) : f32[batch, seq, 24]
  return %y
}}
"""
FUSED = (
    """  %z = attention(%tq, %tk, %tv, _, _) {{causal=True, scale=0.5, softcap=None, window=None, layout="bhsd"}} """
    """: f32[batch, {h}, seq, 4]"""
)
WRITTEN_OUT = """  %ek = repeat(%tk) {{repeats={r}, axis=1}} : f32[batch, {h}, seq, 4]
  %ev = repeat(%tv) {{repeats={r}, axis=1}} : f32[batch, {h}, seq, 4]
  %kt = transpose(%ek) {{axes=(0, 1, 3, 2)}} : f32[batch, {h}, 4, seq]
  %s = matmul(%tq, %kt) : f32[batch, {h}, seq, seq]
  %p = causal_softmax(%s) : f32[batch, {h}, seq, seq]
  %z = matmul(%p, %ev) : f32[batch, {h}, seq, 4]"""
HEAD_PLAN = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}


def heads_graph(h: int, g: int, body: str) -> Graph:
    sizes = {"h": h, "g": g, "q": 4 * h, "k": 4 * g, "r": h // g}
    return parse(HEADS.format(body=body.format(**sizes), **sizes))


@pytest.mark.parametrize("body", [FUSED, WRITTEN_OUT], ids=["attention", "written_out"])
@pytest.mark.parametrize(
    ("h", "g", "size"),
    [(4, 4, 2), (4, 2, 2), (4, 2, 4), (4, 1, 2), (4, 1, 4), (9, 3, 2), (6, 2, 3), (6, 2, 4), (9, 3, 5)],
)
def test_attention_heads(body: str, h: int, g: int, size: int) -> None:
    """MHA, GQA and MQA; key/value heads that ranks share; heads that do not divide evenly."""
    graph = heads_graph(h, g, body)
    graphs = same_numbers(graph, HEAD_PLAN, size)
    # Written out, nothing says that heads and groups belong together: uneven parts of both do not fit.
    gathered = body is WRITTEN_OUT and (h, g, size) in [(9, 3, 2), (6, 2, 3), (9, 3, 5)]
    assert all(("all_gather" in names(made)) == gathered and names(made).count("all_reduce") == 1 for made in graphs)
    first = next(op for op in graphs[0].ops if op.name in ("attention", "matmul"))
    assert first.operands[0] is not None and int(first.operands[0].type.shape[1]) < h  # type: ignore[call-overload]


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ArgumentError, match="4 query heads can't be divided between 5 ranks"):
        shard(heads_graph(4, 2, FUSED), HEAD_PLAN, 0, 5)


@pytest.mark.parametrize("vocabulary", [16, 13])
@pytest.mark.parametrize("size", [2, 3])
def test_vocabulary(vocabulary: int, size: int) -> None:
    """A tied table of any number of rows is cut once: for the lookup and for the head."""
    text = f"""
    graph lm(%ids: i64[batch]) {{
      param %e: f32[{vocabulary}, 8] = "model.embed_tokens.weight"
      %x = embedding(%ids, %e) : f32[batch, 8]
      %y = linear(%x, %e, _) : f32[batch, {vocabulary}]
      return %y
    }}
    """
    graph = parse(text)
    plan = {"embed_tokens": "vocab", "lm_head": "colwise_gather"}
    for passes in (False, True):
        graphs = same_numbers(graph, plan, size, passes=passes)
    assert all(len([op for op in g.setup if op.name == "slice"]) == 1 for g in graphs)


def test_an_id_that_nobody_has_is_reported() -> None:
    graph = parse("""
    graph lm(%ids: i64[batch]) {
      param %e: f32[6, 8] = "embed.weight"
      %x = embedding(%ids, %e) : f32[batch, 8]
      return %x
    }
    """)
    made, _ = shard(graph, {"embed": "vocab"}, 1, 2)
    for bad in (-1, 6):
        with among(Ranks(threads(2)[0])), pytest.raises(ArgumentError, match=f"index {bad} .* is out of range"):
            interpret(made, [np.array([bad])], {"embed.weight": np.zeros((6, 8), np.float32)})


EXPERTS = """
graph experts(%x: f32[n, 8], %ids: i64[n, 2]) {
  param %g: f32[5, 6, 8] = "experts.gate.weight"
  param %u: f32[5, 6, 8] = "experts.up.weight"
  param %gb: f32[5, 6] = "experts.gate.bias"
  param %ub: f32[5, 6] = "experts.up.bias"
  param %d: f32[5, 8, 6] = "experts.down.weight"
  %h = expert_linear(%x, %g, %ids, %u, %gb, %ub) {gate="silu"} : f32[n, 2, 6]
  %y = expert_linear(%h, %d, %ids, _, _, _) {gate=""} : f32[n, 2, 8]
  return %y
}
"""
EXPERTS_PLAN = {"experts.*": "experts"}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_experts(size: int) -> None:
    """Each rank has its own, and one sum is all they exchange."""
    for rank, made in enumerate(same_numbers(parse(EXPERTS), EXPERTS_PLAN, size, passes=True)):
        held = [op.operands[1] for op in made.ops if op.opdef.kind == "experts"]
        assert {w.type.shape[0] for w in held if w is not None} == {(rank + 1) * 5 // size - rank * 5 // size}
        assert sum("all_reduce" in name for name in names(made)) == 1


def test_experts_whose_results_others_read_are_summed_at_once() -> None:
    (made, *_) = same_numbers(parse(EXPERTS.replace("return %y", "return %y, %h")), EXPERTS_PLAN, 2)
    assert names(made).count("all_reduce") == 2
    other = EXPERTS.replace("%ids: i64[n, 2]", "%ids: i64[n, 2], %rows: i64[n, 2]").replace("%d, %ids", "%d, %rows")
    (made, *_) = same_numbers(parse(other), EXPERTS_PLAN, 2)
    assert names(made).count("all_reduce") == 2


def test_an_expert_that_nobody_has_is_reported() -> None:
    made, _ = shard(parse(EXPERTS), EXPERTS_PLAN, 1, 2)
    params = {p.path: np.zeros([int(n) for n in p.value.type.shape], np.float32) for p in made.params}
    with among(Ranks(threads(2)[0])), pytest.raises(ArgumentError, match="there are 3 experts"):
        interpret(made, [np.zeros((1, 8), np.float32), np.array([[0, 5]])], params)


def test_a_mixture_of_experts() -> None:
    """Its layers exchange as many sums as those of LLaMA."""
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True}
    shared = {"shared_expert_intermediate_size": 48, "tie_word_embeddings": True}
    for config, count in ((Qwen3MoeConfig, 2), (Qwen2MoeConfig, 3)):
        given = {**sizes, **(shared if config is Qwen2MoeConfig else {}), "num_experts_per_tok": 2}
        graph, plan = llama_step(MoeForCausalLM, config, **given)
        for rank in range(2):
            made, _ = shard(graph, plan, rank, 2)
            assert names(made).count("all_reduce") == 1 + 2 * count
            assert {op.operands[1].type.shape[0] for op in made.ops if op.name == "expert_linear"} == {2}  # type: ignore[union-attr]


def llama_step(
    family: Any = LlamaForCausalLM, made: Any = LlamaConfig, **config: Any
) -> tuple[Graph, Mapping[str, str]]:
    given = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        **config,
    }
    model = family.from_config(made(**given), seed=0)
    traced = trace(model.generation_step(), **step_specs(model.config, model.dtype))
    return traced.graph.replace(writes=traced.mutated), model.tp_plan


@pytest.mark.parametrize(
    "config",
    [
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"qk_norm": True, "mlp_bias": True},
    ],
    ids=["gqa", "mqa", "qk_norm"],
)
def test_llama(config: dict[str, Any]) -> None:
    """No gather but that of the logits; one sum for the embedding and two for each layer; caches have local heads."""
    graph, plan = llama_step(num_hidden_layers=3, **config)
    for rank in range(2):
        made, notes = shard(graph, plan, rank, 2)
        assert names(made).count("all_reduce") == 7 and names(made).count("all_gather") == 1 and not notes.misses
        cache = next(v for v in made.inputs if v.name.endswith("k.0"))
        kv_heads = config.get("num_key_value_heads", 4)
        assert cache.type.shape[1] == max(kv_heads // 2, 1)
        final = run_passes(made, PIPELINE)[-1].graph
        (loop,) = [op for op in final.ops if op.name == "repeat_layers"]  # layers are still rolled, but for a last one
        assert [op.name for op in loop.attrs["body"].ops].count("fused_all_reduce") == 2


def test_styles_and_patterns() -> None:
    with pytest.raises(ArgumentError, match="unknown style 'diagonal' of 'mlp.up'"):
        shard_pass({"mlp.up": "diagonal"}, 0, 2)
    with pytest.raises(ArgumentError, match="rank 2 is not a rank of a group of 2"):
        shard_pass({}, 2, 2)
    with pytest.raises(ArgumentError, match="the tp_plan fits no layer of this model") as caught:
        shard(parse(MLP), {"decoder.*.up": "colwise"}, 0, 2)
    assert "decoder.*.up" in caught.value.why
    with pytest.raises(ArgumentError, match="fits no layer"):
        shard(parse(MLP), {"mlp.*.up": "colwise"}, 0, 2)  # * is one part of a name, not none


def test_a_model_that_speaks_of_ranks_itself_is_left_alone() -> None:
    from monoplan import nn

    graph = trace(nn.RowParallelLinear(8, 6, tp_rank=1, tp_size=2), spec("n", 4)).graph
    assert shard(graph, {}, 1, 2)[0] is graph


CHAIN = """
graph chain(%x: f32[batch, 8]) {{
  param %w: f32[12, 8] = "w.weight"
  %h = linear(%x, %w, _) : f32[batch, 12]
{body}
  return %y
}}
"""


@pytest.mark.parametrize(
    ("body", "gathers"),
    [
        ("  %y = softmax(%h) {axis=-1} : f32[batch, 12]", 1),
        ("  %y = softmax(%h) {axis=0} : f32[batch, 12]", 1),  # only at the end, as an output
        ("  %y = sum(%h) {axes=(0,), keepdims=False} : f32[12]", 1),
        ("  %y = sum(%h) {axes=(1,), keepdims=True} : f32[batch, 1]", 0),  # parts are summed
        ("  %y = max(%h) {axes=(1,), keepdims=False} : f32[batch]", 1),
        ("  %y = cumsum(%h) {axis=1} : f32[batch, 12]", 1),
        ("  %y = rms_norm(%h, _) {eps=1e-05, dims=1} : f32[batch, 12]", 1),
        ("  %y = slice(%h) {axis=1, start=2, length=5, step=1} : f32[batch, 5]", 1),
        (
            "  %a, %b = split(%h) {sizes=(6, 6), axis=1} : f32[batch, 6], f32[batch, 6]\n"
            "  %y = mul(%a, %b) : f32[batch, 6]",
            1,
        ),
        ("  %c = concat(%h, %x) {axis=1} : f32[batch, 20]\n  %y = neg(%c) : f32[batch, 20]", 1),
        (
            "  %r = reshape(%h) {shape=(batch, 4, 3)} : f32[batch, 4, 3]\n"
            "  %e = expand(%r) {shape=(2, batch, 4, 3)} : f32[2, batch, 4, 3]\n"
            "  %y = sum(%e) {axes=(0, 3), keepdims=False} : f32[batch, 4]",
            1,
        ),
        (
            "  %i = argmax(%h) {axis=1, keepdims=True} : i64[batch, 1]\n"
            "  %y = take_along(%h, %i) {axis=1} : f32[batch, 1]",
            1,
        ),
    ],
)
def test_ops_on_parts(body: str, gathers: int) -> None:
    for size in (2, 3):
        graphs = same_numbers(parse(CHAIN.format(body=body)), {"w": "colwise"}, size)
        assert names(graphs[0]).count("all_gather") == gathers


@given(st.integers(1, 64), st.integers(1, 16))
def test_cuts(units: int, size: int) -> None:
    """Parts are whole units, as equal as can be, in order, and cover everything."""
    if units >= size:
        for pieces in (cut(units, size), cut_ceil(units, size)):
            assert pieces[0][0] == 0 and pieces[-1][1] == 1
            assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
            sizes = [(b - a) * units for a, b in pieces]
            assert all(s.denominator == 1 and s >= 1 for s in sizes)
        sizes = [(b - a) * units for a, b in cut(units, size)]
        assert max(sizes) - min(sizes) <= 1
    shared = cut_shared(units, size)
    assert {u for a, b in shared for u in range(int(a * units), int(b * units))} == set(range(units))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_cuts_of_heads(groups: int, group: int, size: int) -> None:
    """Each query head is on one rank, together with the key/value head that it reads; its place there is right."""
    heads = groups * group
    try:
        queries, keys = cut_heads(heads, groups, size)
    except ArgumentError:
        assert heads < size or (groups < size and group < -(-size // groups))
        return
    seen: list[int] = []
    for (q0, q1), (k0, k1) in zip(queries, keys, strict=True):
        first, count = int(q0 * heads), int((q1 - q0) * heads)
        kv_first, kv_count = int(k0 * groups), int((k1 - k0) * groups)
        assert Fraction(first, heads) == q0 and count >= 1 and count % kv_count == 0
        for local in range(count):  # what the attention op of the rank does with its own numbers
            assert kv_first + local // (count // kv_count) == (first + local) // group
        seen += range(first, first + count)
    assert sorted(seen) == list(range(heads))
