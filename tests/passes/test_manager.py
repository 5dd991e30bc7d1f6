"""Runs passes in order: stages, stopping early, and errors that name the pass."""

from __future__ import annotations

import pytest

from monoplan.ir.errors import ArgumentError, VerifyError
from monoplan.ir.graph import Graph, Loc
from monoplan.ir.printer import print_graph
from monoplan.passes.manager import NearMiss, Notes, Pass, run_passes
from monoplan.passes.pipeline import DCE, PIPELINE, UNFUSED
from tests.passes.support import parse

TEXT = """\
graph g(%x: f32[4]) {
  %s = sigmoid(%x) : f32[4] @ "act" "model.py":7
  %y = mul(%x, %s) : f32[4] @ "act" "model.py":8
  %dead = exp(%x) : f32[4]
  return %y
}
"""


def breaking(graph: Graph, notes: Notes) -> Graph:
    return graph.replace(ops=tuple(reversed(graph.ops)))


def test_stages_hold_every_graph_in_order() -> None:
    graph = parse(TEXT)
    stages = run_passes(graph, PIPELINE)
    assert [s.name for s in stages] == ["trace", *(p.name for p in PIPELINE)]
    assert stages[0].graph is graph and stages[0].changed
    dce, last = stages[1], stages[-1]
    assert dce.changed and len(dce.graph.ops) == 2 and dce.rule == DCE.rule
    assert [op.name for op in last.graph.ops] == ["silu"]
    assert all(s.changed == (s.graph is not before.graph) for before, s in zip(stages, stages[1:], strict=False))
    assert all(s.seconds >= 0 and s.rewrites >= 0 for s in stages)
    idioms = next(s for s in stages if s.name == "idioms")
    assert idioms.rewrites == 1 and idioms.done[0].rule == "silu" and idioms.done[0].loc == Loc("act", "model.py", 8)


def test_stop_after_names_the_last_pass() -> None:
    stages = run_passes(parse(TEXT), PIPELINE, stop_after="remove-identities")
    assert [s.name for s in stages] == ["trace", "dce", "remove-identities"]


def test_the_unfused_pipeline_keeps_ops_apart() -> None:
    assert [op.name for op in run_passes(parse(TEXT), UNFUSED)[-1].graph.ops] == ["sigmoid", "mul"]


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    with pytest.raises(VerifyError, match="pass backwards made a wrong graph: %s is read before") as caught:
        run_passes(parse(TEXT), (DCE, Pass("backwards", "", breaking)))
    assert "a bug of the pass" in caught.value.fix and "%y = mul(%x, %s)" in str(caught.value.where)


def test_a_pass_that_fails_is_named() -> None:
    def refuse(graph: Graph, notes: Notes) -> Graph:
        raise ArgumentError("no", where="here", fix="do")

    def crash(graph: Graph, notes: Notes) -> Graph:
        raise KeyError("missing")

    with pytest.raises(ArgumentError, match="pass picky: no") as refused:
        run_passes(parse(TEXT), [Pass("picky", "", refuse)])
    assert (refused.value.where, refused.value.fix) == ("here", "do")
    with pytest.raises(VerifyError, match="pass clumsy failed: KeyError: 'missing'") as crashed:
        run_passes(parse(TEXT), [Pass("clumsy", "", crash)])
    assert isinstance(crashed.value.__cause__, KeyError)


def test_notes_count_and_remember() -> None:
    notes = Notes()
    op = parse(TEXT).ops[1]
    notes.fired("rule", op)
    notes.missed("rule", op, "reason")
    assert notes.rewrites == 1 and notes.done[0].what == "mul"
    assert str(notes.misses[0]) == "rule did not fire at %y = mul(%x, %s) : f32[4] (model.py:8 in act): reason"
    assert notes.misses == [NearMiss("rule", op, "reason")]


def test_the_graph_of_a_stage_is_never_changed() -> None:
    graph = parse(TEXT)
    before = print_graph(graph, locs=True)
    run_passes(graph, PIPELINE, check=True)
    assert print_graph(graph, locs=True) == before


def test_names_of_passes_are_stable() -> None:
    """Users name passes in options; a name may come twice, where a pass runs twice."""
    assert [p.name for p in PIPELINE] == [
        "dce",
        "remove-identities",
        "widen-activations",
        "idioms",
        "hoist-setup",
        "fold-conv",
        "hoist-setup",
        "merge-equal-ops",
        "hoist-from-scans",
        "sink-reshapes",
        "pull-last-token",
        "fuse-attention",
        "remove-identities",
        "linear-bias",
        "merge-parallel-linears",
        "fuse-norm-experts",
        "fuse-norm-linear",
        "fuse-qkv",
        "fuse-latent",
        "fuse-pointwise",
        "fuse-gated",
        "fuse-residual-add",
        "fuse-into-producer",
        "fuse-linear-norm",
        "fuse-into-reduce",
        "fuse-head-argmax",
        "fuse-route",
        "dce",
        "roll-layers",
    ]
    assert all(p.rule for p in PIPELINE)
