"""From arguments to a runnable plan: trace, passes, lowering, source, binary, weights."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.built import Built
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.pytree import Tree
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import Trace, trace
from monoplan.inspect.override import override_text
from monoplan.ir.arrays import Part
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Param, Value
from monoplan.ir.interpreter import bind_symbols
from monoplan.ir.printer import print_graph
from monoplan.ir.sizes import Question, questions
from monoplan.ir.types import DType
from monoplan.ir.verifier import verify
from monoplan.options import Options
from monoplan.parallel import check_ranks, check_world, in_turn, tp_plan
from monoplan.passes.manager import Stage, run_passes
from monoplan.passes.pipeline import PIPELINE, UNFUSED
from monoplan.passes.rebuild import replace_values
from monoplan.passes.shard.rewrite import shard_pass
from monoplan.progress import progress
from monoplan.runtime.build.background import begin, stoppable
from monoplan.runtime.ranks.comm import Communicator

if TYPE_CHECKING:
    from monoplan.codegen.cuda.render import CudaSource
    from monoplan.runtime.cpu.weights import Source

Array = np.ndarray[Any, Any]
VERSION = "0.1.0"


def build(
    module: Module, arguments: Mapping[str, Any], target: str, dtype: DType | None, options: Options,
    tp: Communicator | None = None,
) -> Built:  # fmt: skip
    """Compiles one signature of a module."""
    clock = _Clock()
    if target == "cpu" and tp is None:
        with stoppable():
            return _build_cpu(module, arguments, dtype, options, clock)
    traced, graph = _traced(module, arguments, dtype)
    check_world(graph, tp)
    clock.lap("trace")
    divided = tp_plan(module, options) if tp is not None else {}
    first = [shard_pass(divided, tp.rank, tp.size)] if tp is not None and tp.size > 1 else []
    if tp is not None and first:
        check_ranks(tp, graph, traced.params, options, divided, target, VERSION)
    pipeline = [*first, *_pipeline(options, first)]
    stages = run_passes(graph, pipeline, options.stop_after)
    clock.lap("passes")
    if target == "reference":
        final = stages[len(first)].graph
        return Built(
            final, stages, None, None, None, traced.out_tree, traced.params, target, clock.laps, tp, questions(graph)
        )
    final, tensors = stages[-1].graph, traced.params
    executable = make_executable(final, module_source(tensors), target, options, clock, tp)
    return _built(final, stages, executable, traced.out_tree, tensors, target, clock, questions(graph), tp)


def _traced(module: Module, arguments: Mapping[str, Any], dtype: DType | None) -> tuple[Trace, Graph]:
    args, kwargs = module.unbind_arguments(arguments)
    traced = trace(module, *args, **kwargs)
    graph = traced.graph.replace(writes=getattr(traced, "mutated", ()))
    return traced, graph if dtype is None else with_param_dtype(graph, dtype)


def _build_cpu(
    module: Module, arguments: Mapping[str, Any], dtype: DType | None, options: Options, clock: _Clock
) -> Built:
    """A plan for this CPU: what the cache has seen before is neither traced nor lowered again, unless somebody asks."""
    from monoplan import plan_cache
    from monoplan.runtime.cpu import packing
    from monoplan.runtime.cpu.executable import host_target
    from monoplan.runtime.machine import features

    pipeline = _pipeline(options)
    traced = functools.cache(lambda: _traced(module, arguments, dtype))
    passed = functools.cache(lambda: run_passes(traced()[1], pipeline, options.stop_after))
    if not features.is_tried():  # this machine is new: no cache has the plan, and it is made while a compiler runs
        begin(features.detect)
        traced()
        clock.lap("trace")
        passed()
        clock.lap("passes")
    if any(len(p.shape) > 1 for p in module.parameters()):
        begin(packing.native_library)
    choices = plan_cache.choices(options, host_target(), dtype, VERSION)
    usable = plan_cache.is_usable(pipeline)
    clock.lap("machine")
    call = plan_cache.call_key(module, arguments, choices) if usable else None
    seen = plan_cache.recall_call(call)
    if seen is None:
        check_world(traced()[1], None)
        key = plan_cache.plan_key(traced()[1], choices) if usable else None
        out_tree, tensors = traced()[0].out_tree, traced()[0].params
    else:
        (key, out_tree), tensors = seen, plan_cache.tensors(module)
    clock.lap("trace")
    known = plan_cache.recall_plan(key)
    stages = passed() if known is None else []
    final, asked, ready = (stages[-1].graph, questions(traced()[1]), None) if known is None else known
    clock.lap("passes")
    executable = make_executable(final, module_source(tensors), "cpu", options, clock, ready=ready)
    if known is None:
        plan_cache.remember_plan(key, final, asked, executable.plan, executable.source)
    if seen is None:
        plan_cache.remember_call(call, module, traced()[1], key, out_tree)
    built = _built(final, stages, executable, out_tree, tensors, "cpu", clock, asked)
    if known is not None:
        built.show(plan_cache.Stages(lambda: built.remake(traced()[1], pipeline, options)))
    return built


def make_executable(
    graph: Graph, params: Source | Callable[[str], Array], target: str, options: Options, clock: _Clock | None = None,
    tp: Communicator | None = None, ready: tuple[Any, Any] | None = None,
) -> Any:  # fmt: skip
    """Plan, source (unless they are `ready`), weights and binary; `params` gives a tensor by its path."""
    clock = clock or _Clock()
    if target == "cuda":
        from monoplan.runtime.cuda.exchange import take_turns
        from monoplan.runtime.cuda.executable import compile_cuda

        if tp is not None:
            take_turns(tp)

        def override(source: CudaSource) -> str | None:
            return override_text(options.source, graph.name, source.text, [f.name for f in source.functions], "cu")

        with in_turn(tp, print_graph(graph) if tp is not None else ""):
            made = compile_cuda(graph, params, VERSION, override, clock.lap)
        made.comm = tp
        return made
    from monoplan.runtime.cpu.executable import CpuExecutable
    from monoplan.runtime.cpu.weights import prepare
    from monoplan.runtime.machine.threads import check_threads, default_threads

    plan, source = ready if ready is not None else _lower(graph)
    clock.lap("codegen")

    def packed() -> list[Array]:
        arrays = prepare(graph, plan.params, params, progress("packing weights"))
        clock.lap("weights")
        return arrays

    count = default_threads().count if tp is None else tp.local_threads(default_threads().count)
    threads = count if options.threads is None else check_threads(options.threads)
    text = override_text(options.source, graph.name, source.text)
    if tp is None:
        executable = CpuExecutable(plan, source, packed, threads, text)
    else:
        arrays = packed()
        with in_turn(tp, text or source.text):
            executable = CpuExecutable(plan, source, arrays, threads, text)
    executable.comm = tp
    clock.lap("build")
    return executable


def _lower(graph: Graph) -> tuple[Any, Any]:
    """Plan and source of a graph for this CPU."""
    from monoplan.codegen.cpu.render import render_cpu
    from monoplan.codegen.plan import make_plan
    from monoplan.runtime.cpu.executable import host_target

    plan = make_plan(graph, host_target())
    return plan, render_cpu(plan, VERSION)


def module_source(tensors: Mapping[str, Tensor]) -> Source:
    """The tensors of a module, to make weights of; those of deferred parameters are read and not kept."""
    from monoplan.runtime.cpu.packing import converted
    from monoplan.runtime.cpu.weights import Source

    def read(path: str, part: Part | None = None) -> Array:
        if isinstance(t := tensors[path], Parameter):
            return t.read(converted, part)
        return t.numpy() if part is None else part.cut(t.numpy())

    def gives_away(path: str) -> bool:
        return isinstance(t := tensors[path], Parameter) and t.is_deferred

    return Source(read, gives_away)


@dataclass(frozen=True)
class GraphExecutable:
    """A graph compiled by itself: takes and gives arrays as the interpreter does; inputs are never changed."""

    graph: Graph
    executable: Any
    questions: tuple[Question, ...]

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        wanted = self.graph.inputs
        if len(inputs) != len(wanted):
            names = ", ".join(f"{v.name}: {v.type}" for v in wanted)
            raise ArgumentError(f"{self.graph.name} takes {len(wanted)} inputs ({names}), got {len(inputs)}")
        symbols = bind_symbols(wanted, [a.shape for a in inputs])
        for question in self.questions:
            question.check(symbols)
        written = {i for i, _ in self.graph.writes}
        given = []
        for i, (v, a) in enumerate(zip(wanted, inputs, strict=True)):
            if a.dtype != v.type.dtype.numpy:
                raise ArgumentError(f"argument {v.name}: expected {v.type}, got dtype {a.dtype}")
            given.append(np.array(a, order="C") if i in written else np.require(a, None, ["C", "A"]))
        return self.executable.run(given, symbols)  # type: ignore[no-any-return]


def build_graph_executable(
    graph: Graph, params: Mapping[str, Array] | None = None, target: str = "cpu", options: Options | None = None
) -> GraphExecutable:
    """Compiles a graph as it is, without passes: for IR text, tests and tools."""
    verify(graph)
    arrays = params or {}
    if missing := [p.path for p in graph.params if p.path not in arrays]:
        raise ArgumentError(f"{graph.name}: no values for the parameters {', '.join(missing)}")
    for p in graph.params:  # kernels read as much as the type says
        if arrays[p.path].shape != p.value.type.shape:
            got = list(arrays[p.path].shape)
            raise ArgumentError(f"parameter {p.path}: expected {p.value.type}, got shape {got}")
    made = make_executable(graph, lambda path: arrays[path], target, options or Options())
    return GraphExecutable(graph, made, questions(graph))


def _built(
    graph: Graph, stages: Sequence[Stage], executable: Any, out_tree: Tree, tensors: Mapping[str, Tensor], target: str,
    clock: _Clock, asked: tuple[Question, ...], tp: Communicator | None = None,
) -> Built:  # fmt: skip
    plan, source = executable.plan, executable.source
    made = Built(graph, stages, plan, source, executable, out_tree, tensors, target, clock.laps, tp, asked)
    made.show(stages)
    return made


def _pipeline(options: Options, first: Sequence[Any] = ()) -> Sequence[Any]:
    pipeline = PIPELINE if options.fuse else UNFUSED
    known = [p.name for p in (*first, *pipeline)]
    for name in (*(options.passes or ()), *([options.stop_after] if options.stop_after else [])):
        if name not in known:
            raise ArgumentError(f"there is no pass named {name!r}", fix="passes are: " + ", ".join(known))
    return [p for p in pipeline if options.passes is None or p.name in options.passes]


def with_param_dtype(graph: Graph, dtype: DType) -> Graph:
    """The graph with floating point params in another element type; results are inferred again."""
    new: dict[Value, Value] = {}
    params = []
    for p in graph.params:
        if p.value.type.dtype.is_float and p.value.type.dtype != dtype:
            new[p.value] = Value(p.value.type.with_dtype(dtype), p.value.name)
        params.append(Param(new.get(p.value, p.value), p.path))
    changed = replace_values(graph.replace(params=tuple(params)), new)
    verify(changed)
    return changed


class _Clock:
    """Milliseconds of each stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + (now - self.last) * 1e3
        self.last = now
