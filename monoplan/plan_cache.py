"""Plans on disk, a layer around the driver: what was compiled before is not traced, rewritten and rendered again.

`plan-<key>.sealed` holds the final graph, the plan and the source of a traced graph; its key is that graph's text with
all locations. `call-<key>.sealed` leads there from a module of the library itself without tracing it; its key is the
module's structure and the types of the arguments. Both keys also hold the options, the target and the text of every
file that has a part in it. Entries are data (ir/records.py) and lie sealed in the cache's folder of facts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import monoplan
from monoplan.built import Planned, Planning, Request, Traced, Tracing
from monoplan.frontend.guards import Guards
from monoplan.frontend.module import Module, structure
from monoplan.frontend.pytree import flatten
from monoplan.frontend.specs import Spec
from monoplan.frontend.tensor import Tensor
from monoplan.ir import records
from monoplan.ir.graph import Graph, all_ops
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.printer import print_graph
from monoplan.ir.shape_constraints import ShapeConstraint
from monoplan.options import Options
from monoplan.runtime.build import cache_places, facts

if TYPE_CHECKING:
    from monoplan.passes.manager import Pass, Stage

KEPT = 256  # entries of each kind; the longest unused go first
_FOLDERS = ("ir", "passes", "codegen", "frontend", "models")
_SUFFIXES = (".py", ".j2", ".h")


def cached(request: Request, trace: Tracing, plan: Planning) -> tuple[Tracing, Planning]:
    """The same two stages, which look in the cache first and keep what they make there."""
    from monoplan.runtime.machine import features

    found = _Cached(request, trace, plan)
    if features.is_tried():
        found.open()
    return found.trace, found.plan


class _Cached:
    """The keys of one request, and the stages around which the cache lies.

    On a machine that was not tried before no cache has a plan: the keys, which hold the target, wait until the plan is
    there, so that tracing and passes run while the machine is tried.
    """

    def __init__(self, request: Request, trace: Tracing, plan: Planning) -> None:
        self.request, self.straight_trace, self.straight_plan = request, trace, plan
        self.is_open = self.known_call = False
        self.choices: str | None = None  # None: what would be made is not what the keys stand for
        self.call: str | None = None
        self.key: str | None = None

    def open(self) -> None:
        """Finds the keys of the call."""
        from monoplan.runtime.cpu.executable import host_target

        r = self.request
        if is_usable(r.passes):
            self.choices = choices(r.options, host_target(), r.dtype, monoplan.__version__)
            r.clock.lap("machine")
            self.call = call_key(r.module, r.arguments, self.choices)
        self.is_open = True

    def trace(self, request: Request) -> Traced:
        """A call that was seen before leads to its plan untraced."""
        seen = recall_call(self.call)
        if seen is None:
            return self.straight_trace(request)
        self.known_call = True
        self.key, out_tree, names = seen
        guards = Guards.of(request.module, names)
        return Traced(tensors(request.module), out_tree, lambda: self.straight_trace(request).graph, guards)

    def plan(self, request: Request, traced: Traced) -> Planned:
        """A graph that was seen before is neither rewritten nor lowered; its stages are made when they are read."""
        if self.is_open:
            self._find_plan_key(traced)
            known = recall_plan(self.key)
            if known is not None:
                graph, constraints, (plan, source) = known
                request.clock.lap("passes")
                self._keep_call(traced)
                remake = functools.partial(self._remake, traced, plan.target)
                return Planned(graph, constraints, plan, source, remake=remake, key=self.key)
        planned = self.straight_plan(request, traced)
        if not self.is_open:
            self.open()
            self._find_plan_key(traced)
        if self.key is not None:
            _remember("plan", self.key, (planned.graph, planned.shape_constraints, (planned.plan, planned.source)))
        self._keep_call(traced)
        return replace(planned, key=self.key)

    def _find_plan_key(self, traced: Traced) -> None:
        if self.key is None and self.choices is not None:
            self.key = plan_key(traced.graph, self.choices)

    def _keep_call(self, traced: Traced) -> None:
        if not self.known_call:
            remember_call(self.call, self.request.module, traced, self.key)

    def _remake(self, traced: Traced, target: Any) -> tuple[Sequence[Stage], Any]:
        from monoplan.codegen.plan import make_plan
        from monoplan.passes.manager import run_passes

        stages = run_passes(traced.graph, self.request.passes(), self.request.options.stop_after)
        return stages, make_plan(stages[-1].graph, target)


def plan_key(graph: Graph, choices: str) -> str:
    """The name of a traced graph's plan; `choices` are the options and what else decides."""
    files = sorted({op.loc.file for op in all_ops(graph)})  # whole: the text has them as seen from their project
    return _digest(print_graph(graph, locs=True), *files, choices)


def call_key(module: Module, arguments: Mapping[str, Any], choices: str) -> str | None:
    """The name of a call of a module, or None if it must be traced to be known."""
    leaves, tree = flatten(dict(arguments))
    made_of = structure(module) if all(isinstance(x, Spec) for _, x in leaves) else None
    if made_of is None:
        return None
    return _digest(made_of, repr(tree), *(f"{name} {x}" for name, x in leaves), choices)


def is_usable(passes: Callable[[], Sequence[Pass]]) -> bool:
    """Whether plans are made by the code that the keys stand for: not with passes, ops, weight formats or templates of
    others."""
    from monoplan.codegen.formats import FORMATS

    places = [*(o.reference.__module__ for o in REGISTRY.values()), *(type(f).__module__ for f in FORMATS)]
    pipeline = sys.modules.get("monoplan.passes.pipeline")  # who has others imports it to put them there
    ours = pipeline is None or all(any(p is own for own in pipeline.OURS) for p in passes())
    source = sys.modules.get("monoplan.codegen.source")  # and here, for other templates
    pristine = source is None or source.is_pristine()
    return makers() != "" and ours and all(p.startswith("monoplan.") for p in places) and pristine


def choices(options: Options, target: Any, dtype: Any, version: str) -> str:
    """All that decides about a plan besides its graph: options, target, and the code that makes it."""
    chosen = (options.fuse, options.passes, options.stop_after, target, str(dtype), version, platform.python_version())
    return f"{chosen!r} {Path(__file__).resolve().parent} {makers()}"


@functools.cache
def makers() -> str:
    """The digest of the code that traces, rewrites and renders; "" if its files changed since they were imported."""
    here = os.path.dirname(os.path.realpath(__file__))
    walks = (os.walk(os.path.realpath(os.path.join(here, folder))) for folder in _FOLDERS)
    files = sorted(os.path.join(at, name) for walk in walks for at, _, names in walk for name in names)
    found = [(path, os.stat(path)) for path in files if path.endswith(_SUFFIXES)]
    if max(s.st_mtime for _, s in found) >= monoplan._imported:
        return ""
    # Reading them takes longer than all else that a known plan needs: the digest is kept for as long as none changes.
    signature = _digest(*(f"{path} {s.st_ino} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}" for path, s in found))
    known = facts.recall("makers", here)
    if known is not None and known["signature"] == signature:
        return str(known["digest"])
    digest = hashlib.sha256()
    for path, _ in found:
        text = Path(path).read_bytes()
        digest.update(f"{os.path.basename(path)} {len(text)} ".encode() + text)
    facts.remember("makers", here, {"signature": signature, "digest": digest.hexdigest()})
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def recall_plan(key: str | None) -> tuple[Graph, tuple[ShapeConstraint, ...], tuple[Any, Any]] | None:
    """Final graph, shape_constraints about sizes, plan and source of a traced graph."""
    found: tuple[Graph, tuple[ShapeConstraint, ...], tuple[Any, Any]] | None = (
        None if key is None else _recall("plan", key)
    )
    return found


def recall_call(key: str | None) -> tuple[str, Any, tuple[tuple[str, str], ...]] | None:
    """The key of the plan, the structure of the results, and the names of the values that forward reads."""
    found: tuple[str, Any, tuple[tuple[str, str], ...]] | None = None if key is None else _recall("call", key)
    return found


def remember_call(key: str | None, module: Module, traced: Traced, plan: str | None) -> None:
    """Keeps a call, if every param of its graph is one of the module's own and can be found by its path, and every op
    has its line in a model of the library: a layer that is compiled by itself has the lines of who called it."""
    models = os.path.join(os.path.dirname(__file__), "models")
    folders = (models + os.sep, os.path.realpath(models) + os.sep)
    graph = traced.graph
    ours = all(op.loc.file.startswith(folders) for op in all_ops(graph) if op.loc.file)
    if key is not None and plan is not None and ours and {p.path for p in graph.params} <= tensors(module).keys():
        _remember("call", key, (plan, traced.out_tree, traced.guards.names()))


def tensors(module: Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by their paths."""
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


def _recall(kind: str, key: str) -> Any:
    import monoplan.ir.ops  # noqa: F401  (fills the registry of ops)

    table = facts.recall_file(_name(kind, key), used=True)
    if table is None:
        return None
    try:
        return records.load(table, classes())
    except records.RecordError:  # of another version of this code: the digest was right
        return None


def _remember(kind: str, key: str, value: Any) -> None:
    """Keeps an entry for later processes; failing to write it is no error."""
    try:
        table = records.dump(value, classes())
    except records.RecordError:  # results in a class of the user's
        return
    facts.remember_file(_name(kind, key), table)
    folder = cache_places.cache_root() / "facts"
    with contextlib.suppress(OSError):
        entries = sorted(folder.glob(f"{kind}-*.sealed"), key=lambda p: p.stat().st_mtime)
        for old in entries[:-KEPT]:
            old.unlink()


def _name(kind: str, key: str) -> str:
    return f"{kind}-{key}.sealed"


@functools.cache
def classes() -> tuple[type, ...]:
    """The classes that an entry may be made of."""
    from monoplan.codegen import backend, kernels, memory, operands, plan, source, target, views
    from monoplan.codegen.cpu import schedule_attention as attention
    from monoplan.codegen.cpu import schedule_conv as conv
    from monoplan.codegen.cpu import schedule_linear as linear
    from monoplan.codegen.formats import Layout, ParamUse
    from monoplan.frontend.pytree import Tree
    from monoplan.ir import dims, expr, graph, shape_constraints, types

    return (
        graph.Graph,
        graph.Param,
        graph.Op,
        graph.Value,
        graph.Loc,
        types.TensorType,
        dims.Expr,
        dims.FloorDiv,
        expr.Arg,
        expr.Const,
        expr.Call,
        shape_constraints.ShapeConstraint,
        Tree,
        plan.Plan,
        plan.Step,
        plan.StepLoop,
        ParamUse,
        memory.Arena,
        memory.Lifetime,
        views.Buffer,
        views.View,
        Layout,
        operands.Operand,
        operands.Body,
        target.Target,
        source.Source,
        source.Function,
        backend.Schedule,
        linear.LinearSchedule,
        linear.ExpertsSchedule,
        linear.Blocking,
        attention.AttentionSchedule,
        *sorted(kernels.Kernel.__subclasses__(), key=lambda cls: cls.__name__),
        conv.ConvSchedule,
    )
