"""Scans in plans: on the CPU for any number of threads, on the CUDA emulator, as data, and under inspection."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn, plan_cache
from monoplan.codegen.cpu import render
from monoplan.codegen.cpu.render import render_cpu
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.plan import StepLoop, make_plan
from monoplan.codegen.target import Target
from monoplan.frontend.pytree import flatten
from monoplan.frontend.tracer import Trace, trace
from monoplan.ir import records
from monoplan.ir.errors import CompileError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from monoplan.runtime.cpu.executable import CpuExecutable, host_target
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import upload_params
from tests.codegen import cuda_emulator
from tests.codegen.scans import SPECS, Scans, arguments
from tests.needs import needs
from tests.tolerances import check

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def module() -> Scans:
    return Scans()


@pytest.fixture(scope="module")
def traced(module: Scans) -> Trace:
    return trace(module, *SPECS)


@pytest.fixture(scope="module")
def final(traced: Trace) -> Graph:
    return run_passes(traced.graph, PIPELINE)[-1].graph


@pytest.fixture(scope="module")
def fast(module: Scans) -> Any:
    return mp.compile(module, *SPECS)


def exact(traced: Trace, inputs: tuple[Array, ...]) -> list[Array]:
    params = {path: t.numpy() for path, t in traced.params.items()}
    return interpret(traced.graph, list(inputs), params, exact=True)


def names(module: Scans, inputs: tuple[Array, ...]) -> list[str]:
    return [name for name, _ in flatten(module(*map(mp.Tensor, inputs)))[0]]


@pytest.mark.parametrize("seq", [0, 1, 5])
def test_all_sorts(module: Scans, traced: Trace, fast: Any, seq: int) -> None:
    inputs = arguments(seq)
    got = [a for _, a in flatten(fast(*inputs))[0]]
    for name, a, want in zip(names(module, inputs), got, exact(traced, inputs), strict=True):
        assert a.shape == want.shape, name
        check(a, want, a.dtype, "model")


def test_same_bits_for_any_number_of_threads(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one worker runs the loops alone or all share every turn."""
    made, inputs = fast.built[0][2].executable, list(arguments(5))
    want = [a.tobytes() for a in made.run(inputs, {"seq": 5, "batch": 2})]
    monkeypatch.setattr(render, "ALONE", 0)
    shared = render_cpu(made.plan, "test")
    assert "< 0;" in shared.text and "< 0;" not in made.text
    for source, threads in ((made.source, 1), (made.source, 3), (shared, 2), (shared, 3)):
        other = CpuExecutable(made.plan, source, made.params, threads)
        assert [a.tobytes() for a in other.run(inputs, {"seq": 5, "batch": 2})] == want, threads


def test_the_plan_does_not_grow_with_the_length(fast: Any) -> None:
    loops = {str(i.count): i for i in fast.plan.items if isinstance(i, StepLoop)}
    gru = next(i for i in fast.plan.items if isinstance(i, StepLoop))
    assert str(gru.count) == "seq" and gru.scan and set(loops) == {"seq", "6"}
    # The product over the slices has left the loop; the state and y are written by one kernel, with no copy.
    assert [s.kernel.op.name for s in gru.steps] == ["linear", "pointwise"]
    assert [o.name for o in gru.steps[1].kernel.writes] == ["y", "z0"]
    assert "for (int64_t turn = 0; turn < n_seq" in fast.source()
    assert "scans: seq x 2, seq x 3" in fast.plan.summary and "seq" in str(fast.plan)


def test_a_plan_is_the_same_after_it_was_data(final: Graph) -> None:
    plan = make_plan(final, host_target())
    source = render_cpu(plan, "test")
    table = json.loads(json.dumps(records.dump((plan, source), plan_cache.classes())))
    again, source_again = records.load(table, plan_cache.classes())
    assert str(again) == str(plan) and source_again.text == source.text == render_cpu(again, "test").text


@needs("g++")
def test_on_the_cuda_emulator(traced: Trace, final: Graph, module: Scans) -> None:
    device = cuda_emulator.EmulatedDevice()
    plan = make_plan(final, device.target)
    params = upload_params(plan, lambda path: traced.params[path].numpy(), device)
    made = CudaExecutable(plan, render_cuda(plan, "test"), params, device)
    for seq in (0, 1, 4):
        inputs = arguments(seq)
        got = made.run(list(inputs), bind_symbols(plan.graph.inputs, [a.shape for a in inputs]))
        for a, want in zip(got, exact(traced, inputs), strict=True):
            check(a, want, a.dtype, "model")


def _plan(forward: Callable[..., Any], *specs: Any, target: Target | None = None) -> Any:
    class Given(nn.Module):
        def forward(self, x: Any) -> Any:
            return forward(x)

    graph = run_passes(trace(Given(), *specs).graph, PIPELINE)[-1].graph
    return make_plan(graph, target or host_target())


def test_slices_that_vectors_can_not_begin_at_are_copied_on_a_gpu() -> None:
    device = cuda_emulator.EmulatedDevice()

    def steps(width: int) -> list[str]:
        def forward(x: Any) -> Any:
            return mp.scan(lambda s, v: (s + F.softmax(v, -1), None), x[0], x)[0]

        plan = _plan(forward, mp.spec("n", 2, width), target=device.target)
        (loop,) = (i for i in plan.items if isinstance(i, StepLoop))
        return [s.kernel.op.name for s in loop.steps]

    assert steps(4) == ["softmax", "add"]  # 32 bytes from slice to slice
    assert steps(3) == ["scan", "softmax", "add"]  # 24


def test_a_scan_inside_of_a_scan_is_refused() -> None:
    def inner(s: Any, x: Any) -> Any:
        return mp.scan(lambda a, b: (a + b, None), s, x)[0], None

    def forward(x: Any) -> Any:
        return mp.scan(inner, x[0, 0], x)[0]

    with pytest.raises(CompileError, match="a scan inside of another scan's cell can't be compiled") as error:
        _plan(forward, mp.spec("n", 4, 3))
    assert "test_scan.py" in str(error.value.where) and "reshape" in error.value.fix


# -- tools ---------------------------------------------------------------------------------------------------------


def test_tools_look_into_the_turns(fast: Any, tmp_path: Path) -> None:
    inputs = arguments(3)
    found = fast.verify(*inputs, nodes=True)
    assert found.ok
    rows = [r for r in found.nodes if r.name.startswith("%add") and "[2]" in r.name]
    assert rows and "(turn 2)" in rows[0].where
    assert fast.bisect(*inputs).ok
    profile = fast.profile(*inputs, repeat=1)
    gru = next(s for s in profile.steps if s.family == "linear" and s.runs == 3)
    assert gru.nanoseconds > 0 and [turn for n, turn, _ in profile.events if n == gru.number] == [0, 1, 2]
    text = fast.explain()
    assert "4 add + 2 sigmoid + 2 mul + tanh + sub" in text and "(runs seq times)" in text
    page = Path(fast.report(tmp_path / "report.html", *inputs)).read_text("utf-8")
    assert "scan, seq turns" in page
    empty = fast.profile(*arguments(0), repeat=1)
    assert next(s for s in empty.steps if s.number == gru.number).runs == 0


def test_bisect_names_the_turn_of_a_wrong_kernel(fast: Any, module: Scans, tmp_path: Path) -> None:
    text = fast.source()
    start = text.index("MP_KERNEL pointwise_5(")
    value = text.index("const float v = ", start) + len("const float v = ")
    path = tmp_path / "plan.c"
    path.write_text(f"{text[:value]}0.01f + {text[value:]}", "utf-8")
    other = mp.compile(module, *SPECS, options={"source": str(path)})
    finding = other.bisect(*arguments(3), folder=tmp_path / "found")
    assert finding.kind == "kernel" and finding.number == 5
    assert finding.node.endswith("[0]") and "(turn 0)" in finding.where
