"""The arena: no two buffers that are alive together overlap, for any sizes; what is reused is reused safely."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monoplan.codegen.kernels import Kernel, Linear, Norm, Pointwise
from monoplan.codegen.plan import Plan, StepLoop, make_plan
from monoplan.codegen.slots import ALIGN
from monoplan.codegen.target import cpu_target
from monoplan.codegen.views import Buffer
from monoplan.ir.builder import build_graph
from monoplan.ir.dims import evaluate
from monoplan.ir.graph import Graph, Value
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import tensor_type
from tests.codegen.mixed import mixed_graph, rolled_graph
from tests.codegen.random_graphs import Grower

TARGET = cpu_target("neon", 16)
ELEMENTWISE = (Pointwise, Norm, Linear)


def unrolled(plan: Plan) -> list[tuple[Kernel, int]]:
    """Kernels in the order they run, with the turn they belong to; a loop runs twice."""
    found: list[tuple[Kernel, int]] = []
    for item in plan.items:
        if isinstance(item, StepLoop):
            found += [(s.kernel, turn) for turn in range(2) for s in item.steps]
        else:
            found.append((item.kernel, -1))
    return found


def lives(plan: Plan) -> list[tuple[Buffer, int, int]]:
    """(buffer, first use, last use) of every stretch of time in which a buffer holds something that is read."""
    runs = unrolled(plan)
    found = []
    buffers = {o.view.buffer: None for k, _ in runs for o in (*k.operands, *k.scratch)}
    for b in buffers:
        if b.kind not in ("arena", "scratch"):
            continue
        start = None
        last = 0
        for i, (k, _) in enumerate(runs):
            reads = any(o.view.buffer is b for o in k.reads)
            writes = any(o.view.buffer is b for o in (*k.writes, *k.scratch))
            whole = any(o.view.buffer is b and o.view.is_whole for o in (*k.writes, *k.scratch))
            if whole and not reads and start is not None:  # new contents: the old stretch is over
                found.append((b, start, last))
                start = i
            if reads or writes:
                start, last = (i if start is None else start), i
        if start is not None:
            found.append((b, start, last))
    return found


def check_plan(graph: Graph, sizes: dict[str, int]) -> Plan:
    plan = make_plan(graph, TARGET)
    runs = unrolled(plan)
    offsets, total = plan.arena.layout(sizes)
    places = []
    for b, first, last in lives(plan):
        at = offsets[plan.arena.slot_of[b]]
        size = evaluate(b.size, sizes) * b.dtype.itemsize
        assert at % ALIGN == 0 and at + size <= total
        places.append((b, first, last, at, at + size))
    for i, (a, first, last, low, high) in enumerate(places):
        for b, first2, last2, low2, high2 in places[:i]:
            if a is b or high <= low2 or high2 <= low or last < first2 or last2 < first:
                continue
            # Only a step that reads and writes element by element may write over what it reads for the last time.
            early, late = ((b, last2), (a, first)) if last2 == first else ((a, last), (b, first2))
            kernel = runs[late[1]][0]
            assert early[1] == late[1] and isinstance(kernel, ELEMENTWISE), f"{a.name} and {b.name} overlap"
            assert any(o.view.buffer is late[0] for o in kernel.writes)
            assert not any(o.view.buffer is late[0] for o in kernel.scratch)
    return plan


def check_random_plan(seed: int, b: int, s: int) -> None:
    source = random.Random(seed)
    g = Grower(lambda options: options[source.randrange(len(options))])
    g.graph(steps=30)
    check_plan(g.finish(), {"b": b, "s": s, "threads": 1 + seed % 8})


SEEDS_AND_SIZES = (st.integers(0, 10**9), st.integers(1, 9), st.integers(1, 40))


@settings(max_examples=8)
@given(*SEEDS_AND_SIZES)
def test_live_buffers_never_overlap(seed: int, b: int, s: int) -> None:
    check_random_plan(seed, b, s)


@pytest.mark.full
@settings(max_examples=60)
@given(*SEEDS_AND_SIZES)
def test_live_buffers_of_many_plans_never_overlap(seed: int, b: int, s: int) -> None:
    check_random_plan(seed, b, s)


@pytest.mark.parametrize(("batch", "seq", "threads"), [(1, 1, 1), (3, 7, 2), (2, 19, 7)])
def test_a_model(batch: int, seq: int, threads: int) -> None:
    sizes = {"batch": batch, "seq": seq, "threads": threads}
    plan = check_plan(mixed_graph(), sizes)
    _, total = plan.arena.layout(sizes)
    assert total < plan.arena.unshared(sizes) / 2
    check_plan(rolled_graph()[0], sizes)


def test_scratch_does_not_take_the_place_of_a_replaceable_operand() -> None:
    """The result of a linear may lie where its residual was; its scratch may not, though that slot looks free."""

    def forward(x: Value, w: Value) -> Value:
        a = REGISTRY["exp"](x)
        residual = REGISTRY["neg"](x)
        wide = REGISTRY["concat"](a, a, axis=1)  # a dies here: its slot is as good for the result as the residual's
        made = REGISTRY["fused_linear"](wide, w, None, None, None, residual, expr="add(x0, x1)")
        return REGISTRY["abs"](made)  # type: ignore[no-any-return]

    graph = build_graph("residual", forward, {"x": tensor_type("f32", "b", 8)}, {"w": tensor_type("f32", 8, 16)})
    for threads in (1, 4):
        for b in (1, 5, 64):
            check_plan(graph, {"b": b, "threads": threads})
