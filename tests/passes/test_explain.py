"""What explain() says about kernels, passes and near misses."""

from __future__ import annotations

from monoplan.codegen.plan import make_plan
from monoplan.codegen.target import cpu_target
from monoplan.frontend.tracer import trace
from monoplan.models import LlamaForCausalLM
from monoplan.models.generate.generation import step_specs
from monoplan.passes.explain import explain
from monoplan.passes.manager import Stage, run_passes
from monoplan.passes.pipeline import PIPELINE
from tests.integration.support import small_config
from tests.passes.conftest import Golden
from tests.passes.support import parse
from tests.passes.test_roll_layers import model

TARGET = cpu_target("avx2", 32)
MLP = """\
graph mlp(%x: f32[n, 4]) {
  param %g: f32[4] = "norm.weight"
  param %w: f32[6, 4] = "up.weight"
  param %v: f32[4, 6] = "down.weight"
  %h = rms_norm(%x, %g) {eps=1e-06, dims=1} : f32[n, 4] @ "norm" "/home/me/model.py":7
  %u = linear(%h, %w, _) : f32[n, 6] @ "up" "/home/me/model.py":8
  %s = sigmoid(%u) : f32[n, 6] @ "" "/home/me/model.py":8
  %a = mul(%u, %s) : f32[n, 6] @ "" "/home/me/model.py":8
  %d = linear(%a, %v, _) : f32[n, 4] @ "down" "/home/me/model.py":9
  %y = add(%x, %d) : f32[n, 4] @ "" "/home/me/model.py":9
  %m = max(%y) {axes=(-1,), keepdims=True} : f32[n, 1] @ "" "/home/me/model.py":10
  %e = exp(%m) : f32[n, 1] @ "" "/home/me/model.py":11
  %z = sub(%y, %m) : f32[n, 4] @ "" "/home/me/model.py":11
  return %z, %e
}
"""


def stages_of(text: str) -> list[Stage]:
    return run_passes(parse(text), PIPELINE)


def test_explain(golden: Golden) -> None:
    stages = stages_of(MLP)
    golden(explain(stages, make_plan(stages[-1].graph, TARGET)))


def test_half_precision_is_explained_as_well() -> None:
    """Widening makes nearly all values anew: kernels are still said to be made of the ops of forward."""
    wide, half = ([line.split(": ", 1)[1] for line in kernels(text)] for text in (MLP, MLP.replace("f32", "bf16")))
    assert half[0] == "cast = cast"  # of x
    assert half[1:3] == wide[:2] and "= rms_norm + linear + sigmoid + mul at " in wide[0]


def kernels(text: str) -> list[str]:
    stages = stages_of(text)
    return explain(stages, make_plan(stages[-1].graph, TARGET)).split("\n\n")[0].splitlines()[1:]


def test_a_graph_without_a_plan_and_without_fusions() -> None:
    stages = stages_of("graph g(%x: f32[4]) {\n  %y = softmax(%x) {axis=-1} : f32[4]\n  return %y\n}\n")
    assert explain(stages) == "what was rewritten\n  nothing\n\nwhat did not fuse, and why\n  nothing that came near\n"


def test_misses_of_all_layers_are_one_line() -> None:
    lines = []
    for i in range(3):
        lines += [
            f"%a{i} = exp(%{'x' if i == 0 else f'b{i - 1}'}) : f32[4]",
            f"%c{i} = neg(%a{i}) : f32[4]",
            f"%b{i} = softmax(%c{i}) {{axis=-1}} : f32[4]",
        ]
    text = "\n".join(["graph g(%x: f32[4]) {", *(f"  {line}" for line in lines), "  return %b2, %a0, %a1, %a2", "}"])
    (line,) = (line for line in explain(stages_of(text)).splitlines() if "readers" in line)
    assert line == "  fuse-pointwise: exp %a0 (3 times): it can't join neg %c0: %a0 has 2 readers, it must have one"


def test_what_found_another_place_is_not_a_miss() -> None:
    """The residual add has two readers and so joins no chain, but it became the tail of its product."""
    text = MLP.replace("return %z, %e", "return %z, %e, %y")
    assert not any("add %y" in line for line in explain(stages_of(text)).splitlines())


def test_layers_that_did_not_roll_are_mentioned() -> None:
    text = explain(stages_of(model(3, outputs="%d0, %d1")))
    assert "roll-layers: fused_linear" in text and "of layer 0 is read after the loop" in text


def test_what_is_computed_for_the_last_token_only_is_explained_as_well() -> None:
    """Pulling the pick of a row forward makes values anew: each kernel still names the ops of forward behind it."""
    config = small_config()
    model = LlamaForCausalLM.from_config(config, seed=0)
    stages = run_passes(trace(model.generation_step(), **step_specs(config, model.dtype)).graph, PIPELINE)
    lines = explain(stages, make_plan(stages[-1].graph, TARGET)).split("\n\n")[0].splitlines()[1:]
    last = [line.split(": ", 1)[1].partition(" at ")[0] for line in lines if "layers.2" in line or "lm_head" in line]
    assert last[-3:] == [
        "fused_linear = rms_norm + 2 linear + silu + mul",
        "fused_linear = linear + add",
        "fused_linear = rms_norm + linear",
    ]
    assert not any("fused_linear = fused_linear" in line for line in lines)
