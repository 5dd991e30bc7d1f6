"""From arguments to a runnable plan: trace, passes, plan, source, build. plan_cache.py is a layer around it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan import __version__
from monoplan.built import Built, Clock, Planned, Planning, Request, Traced, Tracing
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.inspect.override import override_text
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Param, Value
from monoplan.ir.interpreter import bind_symbols
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.shape_constraints import ShapeConstraint, shape_constraints
from monoplan.ir.types import Array, DType, Part
from monoplan.ir.verifier import verify
from monoplan.options import Options
from monoplan.parallel import check_ranks, check_world, in_turn, tp_plan
from monoplan.progress import progress
from monoplan.runtime.build.background import begin, stoppable
from monoplan.runtime.ranks.comm import Communicator

if TYPE_CHECKING:  # passes are imported by the functions that run them: a plan from the cache needs none
    from monoplan.codegen.plan import Plan
    from monoplan.passes.manager import Pass, Stage
    from monoplan.runtime.cpu.weights import Source


def build(
    module: Module,
    arguments: Mapping[str, Any],
    target: str,
    dtype: DType | None,
    options: Options,
    tp: Communicator | None = None,
) -> Built:
    """Compiles one signature of a module."""
    passes = functools.cache(lambda: _pipeline(module, options, tp))
    if options.passes is not None or options.stop_after:
        passes()  # raises where it does not know a name
    request = Request(module, arguments, target, dtype, options, passes, tp)
    clock = request.clock
    tracing: Tracing = trace_stage
    planning: Planning = plan_stages
    with stoppable():
        if target == "cpu":
            _begin_early()
        if target == "cpu" and tp is None:
            from monoplan.plan_cache import cached

            tracing, planning = cached(request, tracing, planning)
        traced = tracing(request)
        clock.lap("trace")
        planned = planning(request, traced)
        executable = None
        if planned.plan is not None:
            executable = build_stage(planned, module_source(traced.tensors), options, tp, clock)
    return Built(planned, executable, traced.out_tree, traced.tensors, target, clock.laps, tp, traced.guards)


def trace_stage(request: Request) -> Traced:
    """Runs forward once on tensors that record ops."""
    args, kwargs = request.module.unbind_arguments(request.arguments)
    found = trace(request.module, *args, **kwargs)
    graph = found.graph if request.dtype is None else with_param_dtype(found.graph, request.dtype)
    check_world(graph, request.tp)
    return Traced(found.params, found.out_tree, lambda: graph, found.guards)


def plan_stages(request: Request, traced: Traced) -> Planned:
    """Passes, plan and source of a traced graph."""
    stages = pass_stage(request, traced)
    request.clock.lap("passes")
    constraints = shape_constraints(traced.graph)
    if request.target == "reference":  # the graph of this rank, as it was traced
        first = 1 if _is_sharded(request.tp) else 0
        return Planned(stages[first].graph, constraints, stages=stages)
    if request.target == "cpu":
        _begin_packing(request.module)
    plan = plan_stage(stages[-1].graph, request.target, request.options, request.tp)
    source = source_stage(plan)
    request.clock.lap("codegen")
    return Planned(plan.graph, constraints, plan, source, stages)


def pass_stage(request: Request, traced: Traced) -> list[Stage]:
    """The graph after each pass; ranks make sure first that all of them compile the same."""
    from monoplan.passes.manager import run_passes

    if request.tp is not None and _is_sharded(request.tp):
        divided = tp_plan(request.module, request.options)
        check_ranks(request.tp, traced.graph, traced.tensors, request.options, divided, request.target, __version__)
    return run_passes(traced.graph, request.passes(), request.options.stop_after)


def plan_stage(graph: Graph, target: str, options: Options, tp: Communicator | None = None) -> Plan:
    """Kernels, schedules and memory of a graph, for this machine."""
    from monoplan.codegen.plan import make_plan

    if target == "cpu":
        from monoplan.runtime.cpu.executable import host_target

        return make_plan(graph, host_target())
    from monoplan.runtime.cuda.executable import gpu, take_turns

    if tp is not None:
        take_turns(tp)
    return make_plan(graph, replace(gpu().target, compact=options.compact))


def source_stage(plan: Plan) -> Any:
    """The source of a plan: C, or CUDA with what tuning found for this device."""
    if plan.target.is_cpu:
        from monoplan.codegen.cpu.render import render_cpu

        return render_cpu(plan, __version__)
    from monoplan.runtime.cuda.executable import gpu
    from monoplan.runtime.cuda.tune import tuned_source

    return tuned_source(plan, __version__, gpu().name)


def build_stage(
    planned: Planned, params: Source | Callable[[str], Array], options: Options, tp: Communicator | None, clock: Clock
) -> Any:
    """Weights and binary of a source, edited or not; `params` gives a tensor by its path."""
    plan, source = planned.plan, planned.source
    if not plan.target.is_cpu:
        from monoplan.runtime.cuda.executable import CudaExecutable, gpu
        from monoplan.runtime.cuda.weights import upload_params

        text = override_text(options.source, plan.name, source.text, [f.name for f in source.functions], "cu")
        device = gpu()
        weights = upload_params(plan, params, device)
        clock.lap("pack")
        with in_turn(tp, text or source.text):
            executable: Any = CudaExecutable(plan, source, weights, device, text)
    else:
        from monoplan.runtime.build import cache
        from monoplan.runtime.cpu.executable import CpuExecutable
        from monoplan.runtime.cpu.packed import Keeping, kept_or_packed
        from monoplan.runtime.cpu.weights import Source
        from monoplan.runtime.machine.threads import check_threads, default_threads

        def packed() -> list[Array]:
            tensors = params if isinstance(params, Source) else Source.of(params)
            given = (plan.graph, plan.params, tensors, keeping, progress("packing weights"))
            arrays, found, begin_writing = kept_or_packed(*given)
            writers.append(begin_writing)
            clock.lap("load" if found else "pack")
            return arrays

        writers: list[Callable[[], None]] = []

        limit = cache.max_weight_bytes() if options.weight_bytes is None else options.weight_bytes
        keeping = None if planned.key is None or tp is not None else Keeping(planned.key, limit)

        count = default_threads().count if tp is None else tp.local_threads(default_threads().count)
        threads = count if options.threads is None else check_threads(options.threads)
        text = override_text(options.source, plan.name, source.text)
        if tp is None:
            executable = CpuExecutable(plan, source, packed, threads, text)
        else:
            arrays = packed()
            with in_turn(tp, text or source.text):
                executable = CpuExecutable(plan, source, arrays, threads, text)
        for begin_writing in writers:
            begin_writing()
    executable.comm = tp
    clock.lap("build")
    return executable


def _begin_early() -> None:
    """Begins beside the first stages what later ones wait for: trying the machine, if it is new."""
    from monoplan.runtime.machine import features

    if not features.is_tried():
        begin(features.detect)


def _begin_packing(module: Module) -> None:
    """Begins to build the library that packs weights, unless it is there."""
    from monoplan.runtime.cpu import weights

    if any(len(p.shape) > 1 for p in module.parameters()):
        begin(weights.native_library)


def module_source(tensors: Mapping[str, Tensor]) -> Source:
    """The tensors of a module, to make weights of; those of deferred parameters are read and not kept."""
    from monoplan.runtime.cpu.weights import Source, converted

    def read(path: str, part: Part | None = None) -> Array:
        if isinstance(t := tensors[path], Parameter):
            return t.read(converted, part)
        return t.numpy() if part is None else part.cut(t.numpy())

    def gives_away(path: str) -> bool:
        return isinstance(t := tensors[path], Parameter) and t.is_deferred

    def origin(path: str) -> Any:
        return t.origin if isinstance(t := tensors[path], Parameter) else None

    def blocks(path: str, part: Part | None = None) -> Array:
        t = tensors[path]
        assert isinstance(t, Parameter)
        return t.read_blocks(part)

    return Source(read, gives_away, origin, blocks)


@dataclass(frozen=True)
class GraphExecutable:
    """A graph compiled by itself: takes and gives arrays as the interpreter does; inputs are never changed."""

    graph: Graph
    executable: Any
    shape_constraints: tuple[ShapeConstraint, ...]

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        wanted = self.graph.inputs
        if len(inputs) != len(wanted):
            names = ", ".join(f"{v.name}: {v.type}" for v in wanted)
            raise ArgumentError(f"{self.graph.name} takes {len(wanted)} inputs ({names}), got {len(inputs)}")
        symbols = bind_symbols(wanted, [a.shape for a in inputs])
        for question in self.shape_constraints:
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
    plan = plan_stage(graph, target, Options.make(options))
    planned = Planned(graph, shape_constraints(graph), plan, source_stage(plan))
    made = build_stage(planned, lambda path: arrays[path], options or Options(), None, Clock())
    return GraphExecutable(graph, made, planned.shape_constraints)


def _is_sharded(tp: Communicator | None) -> bool:
    return tp is not None and tp.size > 1


def _pipeline(module: Module, options: Options, tp: Communicator | None) -> Sequence[Pass]:
    """The passes that run; on several ranks the one that takes a rank's part of the graph comes first."""
    from monoplan.passes import pipeline as passes

    first = []
    if tp is not None and tp.size > 1:
        from monoplan.passes.shard.rewrite import shard_pass

        first = [shard_pass(tp_plan(module, options), tp.rank, tp.size)]
    pipeline = passes.PIPELINE if options.fuse else passes.UNFUSED
    known = [p.name for p in (*first, *pipeline)]
    for name in (*(options.passes or ()), *([options.stop_after] if options.stop_after else [])):
        if name not in known:
            raise ArgumentError(f"there is no pass named {name!r}", fix="passes are: " + ", ".join(known))
    return [*first, *(p for p in pipeline if options.passes is None or p.name in options.passes)]


def with_param_dtype(graph: Graph, dtype: DType) -> Graph:
    """The graph with floating point params in another element type; results are inferred again."""
    from monoplan.passes.rebuild import replace_values

    new: dict[Value, Value] = {}
    params = []
    for p in graph.params:
        own = p.value.type.dtype
        if (own.is_float or own.is_low_bit) and own != dtype:
            new[p.value] = Value(p.value.type.with_dtype(dtype), p.value.name)
        params.append(Param(new.get(p.value, p.value), p.path))
    changed = replace_values(graph.replace(params=tuple(params)), new)
    verify(changed)
    return changed
