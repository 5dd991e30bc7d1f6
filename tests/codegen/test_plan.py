"""Barriers: a plan gives the same bits for any number of threads, run after run; steps that clash wait."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.plan import StepLoop, make_plan
from monoplan.codegen.target import Target, cpu_target, cuda_target
from monoplan.driver import build_graph_executable
from monoplan.ir.builder import build_graph
from monoplan.ir.dims import symbol
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import tensor_type
from tests.codegen.mixed import mixed_arrays, mixed_graph, rolled_graph
from tests.codegen.random_graphs import Grower
from tests.tolerances import check

TARGET = cpu_target("neon", 16)
THREADS = (1, 2, 3, 7)
REPEATS = 20


def same_bits(run: Any, inputs: list[Any], want: list[Any]) -> None:
    """Runs with several numbers of threads, repeatedly; every bit must be that of `want`."""
    for threads in THREADS:
        run.executable.threads = threads
        for _ in range(REPEATS):
            for a, b in zip(run(inputs), want, strict=True):
                assert a.tobytes() == b.tobytes(), f"{threads} threads give other bits"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_model_for_any_number_of_threads(dtype: str) -> None:
    graph = mixed_graph(dtype)
    run = build_graph_executable(graph, mixed_arrays(dtype, 1, 1)[1])
    for batch, seq in ((1, 1), (2, 5), (3, 13)):
        inputs, params = mixed_arrays(dtype, batch, seq)
        run.executable.threads = 1
        want = run(inputs)
        same_bits(run, inputs, want)
        exact = interpret(graph, inputs, params, exact=True)
        for v, a, b in zip(graph.outputs, want, exact, strict=True):
            if v.type.dtype.is_float:
                check(a, b, v.type.dtype, "model")


def test_random_graphs_for_any_number_of_threads() -> None:
    source = random.Random(11)
    g = Grower(lambda options: options[source.randrange(len(options))])
    for _ in range(6):
        g.graph(steps=14)
    rng = np.random.default_rng(0)
    params = {v.name: g.array(v, {}, rng) for v in g.params}
    run = build_graph_executable(g.finish(), params)
    inputs = [g.array(v, {"b": 3, "s": 11}, rng) for v in g.inputs]
    run.executable.threads = 1
    same_bits(run, inputs, run(inputs))


def test_rolled_layers_for_any_number_of_threads() -> None:
    graph, types = rolled_graph(count=5)
    rng = np.random.default_rng(0)
    params = {n: rng.standard_normal(t.shape).astype("f4") for n, t in types.items()}  # type: ignore[arg-type]
    run = build_graph_executable(graph, params)
    for batch in (1, 9):
        caches = [rng.standard_normal((batch, 1, 4, 6)).astype("f4") for _ in range(5)]
        inputs = [rng.standard_normal((batch, 6)).astype("f4"), rng.integers(0, 4, batch), *caches]
        run.executable.threads = 1
        want = run(inputs)
        same_bits(run, inputs, want)
        for a, b in zip(want, interpret(graph, inputs, params, exact=True), strict=True):
            scale = float(np.abs(b).max())
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


def barriers(graph: Any) -> list[bool]:
    return [s.barrier for s, _ in make_plan(graph, TARGET).steps()]


def test_only_steps_that_clash_wait() -> None:
    def op(name: str, *operands: Value, **attrs: Any) -> Value:
        return REGISTRY[name](*operands, **attrs)  # type: ignore[no-any-return]

    def apart(x: Value) -> list[Value]:
        return [op("neg", x), op("abs", x), op("exp", x)]

    def chain(x: Value) -> Value:
        return op("neg", op("abs", op("exp", x)))

    def diamond(x: Value) -> Value:
        return op("add", op("exp", x), op("abs", x))

    types = {"x": tensor_type("f32", "n")}
    assert barriers(build_graph("apart", apart, types)) == [False, False, False]
    assert barriers(build_graph("chain", chain, types)) == [False, True, True]
    assert barriers(build_graph("diamond", diamond, types)) == [False, False, True]


def test_a_loop_waits_for_its_turn_before() -> None:
    plan = make_plan(rolled_graph()[0], TARGET)
    loop = next(i for i in plan.items if isinstance(i, StepLoop))
    assert loop.steps[0].barrier
    after = plan.items[plan.items.index(loop) + 1]
    assert not isinstance(after, StepLoop) and after.barrier


@pytest.mark.parametrize("target", [TARGET, cuda_target(90, 132, 232448)], ids=lambda t: t.name)
def test_sizes_must_come_from_an_input(target: Target) -> None:
    graph = build_graph("lost", lambda: REGISTRY["arange"](length=symbol("n")), {})
    with pytest.raises(CompileError, match="arange: the size n is not known, since no input has it"):
        make_plan(graph, target)


@pytest.mark.parametrize("target", [TARGET, cuda_target(90, 132, 232448)], ids=lambda t: t.name)
def test_a_dimension_cant_have_a_name_of_the_plans_own(target: Target) -> None:
    graph = build_graph("own", lambda x: REGISTRY["exp"](x), {"x": tensor_type("f32", "threads")})
    with pytest.raises(CompileError, match="can't be named threads"):
        make_plan(graph, target)


def test_the_table() -> None:
    plan = make_plan(mixed_graph(), TARGET)
    text = str(plan)
    assert text.startswith("plan mixed: ") and "symbols: batch, seq" in text and "peak" in text
    assert len(text.splitlines()) == len(list(plan.steps())) + 3
    numbers = plan.table({"batch": 2, "seq": 3, "threads": 1})
    assert "batch*" not in numbers.split("ir\n")[0] and "at batch=2, seq=3, threads=1" in numbers
