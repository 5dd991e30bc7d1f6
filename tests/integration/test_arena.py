"""The planned memory, checked by a simulation: what a step reads is what was written there, whatever the sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monoplan.codegen.memory import find_lifetimes
from monoplan.codegen.plan import Plan, Step, StepLoop, make_plan
from monoplan.codegen.slots import ALIGN
from monoplan.codegen.views import Buffer
from monoplan.frontend.tracer import trace
from monoplan.ir.dims import evaluate
from monoplan.ir.graph import Graph
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE, UNFUSED
from tests.codegen.scans import SPECS, Scans
from tests.integration.support import TARGET, small_config, step_graph
from tests.matrices import partly
from tests.passes.random_graphs import random_graph


def in_order(plan: Plan, symbols: dict[str, int]) -> list[tuple[Step, int]]:
    """Every step as often as it runs (loops three times at most), with the number of its turn."""
    found = []
    for item in plan.items:
        if isinstance(item, StepLoop):
            found += [(step, turn) for turn in range(min(evaluate(item.count, symbols), 3)) for step in item.steps]
        else:
            found.append((item, 0))
    return found


class Memory:
    """Arena places by buffer, and who wrote each of them last."""

    def __init__(self, plan: Plan, symbols: dict[str, int]) -> None:
        self.plan, self.symbols = plan, symbols
        self.offsets, total = plan.arena.layout(symbols)
        self.owner = np.full(-(-total // ALIGN), -1, np.int64)
        self.numbers: dict[Buffer, int] = {}
        self.replaces = {life.buffer: life.may_replace for life in plan.arena.lifetimes}

    def place(self, b: Buffer) -> slice:
        start = self.offsets[self.plan.arena.slot_of[b]]
        size = evaluate(b.size * b.dtype.itemsize, self.symbols)
        assert start + size <= len(self.owner) * ALIGN
        return slice(start // ALIGN, -(-(start + size) // ALIGN))

    def run(self, step: Step) -> None:
        """Checks what a step reads, and writes its results."""
        k = step.kernel
        where = f"step {step.number} {k.op.name}"
        reads = [b for b in (o.view.buffer.root for o in k.reads) if b.kind == "arena"]
        writes = [b for b in (o.view.buffer.root for o in (*k.writes, *k.scratch)) if b.kind in ("arena", "scratch")]
        for b in reads:
            owners = set(self.owner[self.place(b)].tolist())
            assert owners == {self.numbers.get(b, -2)}, f"{where} reads {b.name}, which was overwritten"
        for i, b in enumerate(writes):
            for other in (*writes[:i], *(r for r in reads if r is not b and r not in self.replaces[b])):
                apart = other is b or not overlap(self.place(b), self.place(other))
                assert apart, f"{where}: {b.name} and {other.name}"
        for b in writes:
            self.owner[self.place(b)] = self.numbers.setdefault(b, len(self.numbers))


def overlap(a: slice, b: slice) -> bool:
    return a.start < b.stop and b.start < a.stop


def places(step: Step, turn: int, memory: Memory, written: bool) -> set[Any]:
    """What a step touches, as granules of the arena or as the arrays outside of it."""
    k = step.kernel
    found: set[Any] = set()
    for o in (*k.writes, *k.scratch) if written else k.reads:
        b = o.view.buffer.root
        if b.kind in ("arena", "scratch"):
            part = memory.place(b)
            found |= set(range(part.start, part.stop))
        elif b.kind == "table" and b.table_kind == "input":
            found.add(("input", b.table[turn]))
        elif b.kind in ("input", "output"):
            found.add((b.kind, b.index))
    return found


def check_barriers(plan: Plan, memory: Memory) -> None:
    """Steps between two barriers run at the same time on different threads: they must not meet."""
    reads: set[Any] = set()
    writes: set[Any] = set()
    for step, turn in in_order(plan, memory.symbols):
        if step.barrier:
            reads, writes = set(), set()
        r, w = places(step, turn, memory, False), places(step, turn, memory, True)
        clash = (r & writes) | (w & (reads | writes))
        assert not clash, f"step {step.number} {step.kernel.op.name} does not wait for {sorted(map(str, clash))[:3]}"
        reads |= r
        writes |= w


def check_plan(plan: Plan, symbols: dict[str, int]) -> None:
    memory = Memory(plan, symbols)
    for step, _ in in_order(plan, symbols):
        memory.run(step)
    check_barriers(plan, memory)
    assert plan.arena.layout(symbols)[1] <= plan.arena.unshared(symbols) + ALIGN * len(plan.arena.lifetimes)


def scan_graph() -> Graph:
    return run_passes(trace(Scans(), *SPECS).graph, PIPELINE)[-1].graph


PLANS = {
    **{f"llama {layers} layers": (lambda layers=layers: step_graph(small_config(layers))) for layers in (1, 3)},
    "llama bf16": lambda: step_graph(small_config(4, dtype="bfloat16")),
    "windows": lambda: step_graph(
        small_config(4, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=4)
    ),
    "scans": scan_graph,
}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: make_plan(make(), TARGET) for name, make in PLANS.items()}


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=15)
@given(sizes=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 64), st.integers(1, 9), st.integers(1, 8)))
def test_llama(plans: dict[str, Plan], name: str, sizes: tuple[int, ...]) -> None:
    plan = plans[name]
    check_plan(plan, dict(zip(("batch", "seq", "capacity", "hist", "threads"), sizes, strict=True)))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("seed", partly(range(24), lambda seed: seed < 6))
def test_random_graphs(seed: int, fused: bool) -> None:
    plan = make_plan(run_passes(random_graph(seed), PIPELINE if fused else UNFUSED)[-1].graph, TARGET)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        check_plan(plan, {name: int(rng.integers(1, 20)) for name in plan.symbols})


def test_a_carried_buffer_lives_through_the_loop(plans: dict[str, Plan]) -> None:
    plan = plans["llama 3 layers"]
    (loop,) = (item for item in plan.items if isinstance(item, StepLoop))
    first, last = loop.steps[0].number, loop.steps[-1].number
    carried = loop.steps[-1].kernel.writes[0].view.buffer  # the residual stream
    life = next(x for x in plan.arena.lifetimes if x.buffer is carried)
    assert life.first < first and life.last >= last
    inner = [x for x in plan.arena.lifetimes if first <= x.first and x.last <= last]
    assert inner and all(plan.arena.slot_of[x.buffer] != plan.arena.slot_of[carried] for x in inner)
    assert find_lifetimes([]) == []


def test_buffers_are_shared_and_written_in_place(plans: dict[str, Plan]) -> None:
    arena = plans["llama 3 layers"].arena
    assert len(arena.slots) < len(arena.lifetimes)
    values = {"batch": 1, "seq": 64, "capacity": 64, "hist": 1, "threads": 2}
    assert arena.layout(values)[1] < 0.8 * arena.unshared(values)
