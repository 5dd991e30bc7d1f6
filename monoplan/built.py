"""What the stages of a compilation hand on, and the plan that is ready to run in the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.guards import Guards
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import Tree
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.ops.collective import among
from monoplan.ir.shape_constraints import ShapeConstraint
from monoplan.ir.types import DType
from monoplan.options import Options

if TYPE_CHECKING:
    from monoplan.passes.manager import Pass, Stage
    from monoplan.runtime.ranks.comm import Communicator

Array = np.ndarray[Any, Any]


class Clock:
    """Milliseconds of each stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + (now - self.last) * 1e3
        self.last = now


@dataclass(frozen=True)
class Request:
    """What is to be compiled, for which target and how; `passes` gives those that will run."""

    module: Module
    arguments: Mapping[str, Any]
    target: str
    dtype: DType | None
    options: Options
    passes: Callable[[], Sequence[Pass]]
    tp: Communicator | None = None
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True)
class Traced:
    """A module's tensors, the structure of its results, and its graph, traced when it is first looked at."""

    tensors: Mapping[str, Tensor]
    out_tree: Tree
    trace: Callable[[], Graph]
    guards: Guards

    @cached_property
    def graph(self) -> Graph:
        return self.trace()


@dataclass(frozen=True)
class Planned:
    """The final graph, its plan and source (none for target "reference"), and the stages that led there.

    A plan from the cache has no stages; `remake` runs the passes and gives stages and plan.
    """

    graph: Graph
    shape_constraints: tuple[ShapeConstraint, ...]  # that the traced graph has about the sizes of a call
    plan: Any = None
    source: Any = None
    stages: Sequence[Stage] = ()
    remake: Callable[[], tuple[Sequence[Stage], Any]] | None = None
    key: str | None = None  # that the plan has in the cache


Tracing = Callable[[Request], Traced]
Planning = Callable[[Request, Traced], Planned]


@dataclass
class Built:
    """A plan ready to run, with every stage of its making."""

    planned: Planned
    executable: Any
    out_tree: Tree
    tensors: Mapping[str, Tensor]
    target: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    tp: Communicator | None = None
    guards: Guards = field(default_factory=Guards)  # plain values of the module that the plan depends on

    def __post_init__(self) -> None:
        planned = self.planned
        self.graph, self.shape_constraints, self.source = planned.graph, planned.shape_constraints, planned.source

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages; those of a plan from the cache are made now, and its graph becomes theirs."""
        if self.planned.remake is not None:
            stages, plan = self.planned.remake()
            self.graph, self.executable.plan = plan.graph, plan
            self.planned = replace(self.planned, graph=plan.graph, plan=plan, stages=stages, remake=None)
        return self.planned.stages

    @property
    def plan(self) -> Any:
        """The plan, which can tell of the stages."""
        if self.executable is None:
            return None
        from monoplan.passes.explain import explain

        return self.executable.plan.with_notes(lambda: explain(self.stages, self.executable.plan))

    def check(self, arrays: Sequence[Array]) -> dict[str, int]:
        """The values of the symbols; raises when the arguments do not fit."""
        symbols = bind_symbols(self.graph.inputs, [a.shape for a in arrays])
        for question in self.shape_constraints:
            question.check(symbols)
        return symbols

    def run(self, arrays: Sequence[Array], symbols: Mapping[str, int]) -> list[Array]:
        if self.executable is None:
            params = {path: t.numpy() for path, t in self.tensors.items()}
            with among(self.tp):
                return interpret(self.graph, list(arrays), _as_types(self.graph, params))
        return self.executable.run(arrays, symbols)  # type: ignore[no-any-return]

    def runner(self, symbols: Mapping[str, int]) -> Callable[[Sequence[Array]], list[Array]]:
        """`run` for these values of the symbols, to be called often."""
        return partial(self.run, symbols=symbols) if self.executable is None else self.executable.runner(symbols)

    @property
    def hit(self) -> bool:
        return bool(self.executable is not None and self.executable.hit)

    @property
    def source_text(self) -> str:
        if self.executable is None:
            raise ArgumentError("target='reference' has no source: it runs the numpy references")
        return str(self.executable.text)

    def stage(self, name: str | None) -> Stage:
        """The stage of that name or number, or the last; of two passes with one name the first."""
        if name is None:
            return self.stages[-1]
        if name.isdigit() and int(name) < len(self.stages):
            return self.stages[int(name)]
        for s in self.stages:
            if s.name == name:
                return s
        raise ArgumentError(f"there is no stage {name!r}", fix="stages are: " + ", ".join(s.name for s in self.stages))

    def describe(self, level: int) -> str:
        """What MONOPLAN_DEBUG shows."""
        from monoplan.passes.explain import alike

        total = sum(self.milliseconds.values())
        steps = len(list(self.plan.steps())) if self.plan is not None else 0
        origin = "cache" if self.hit else "built"
        lines = [
            f"monoplan: {self.graph.name}: {steps} kernels, {origin}, {total:.0f} ms ("
            + ", ".join(f"{k} {v:.0f}" for k, v in self.milliseconds.items())
            + ")"
        ]
        for s in self.stages[1:]:
            if level >= 2:
                lines.append(f"  {s.name}: {s.rewrites} rewrites, {s.seconds * 1e3:.1f} ms")
            if level >= 3:
                lines += [f"    {g[0]}{f' ({len(g)} times)' if len(g) > 1 else ''}" for g in alike(s.misses)]
        if level >= 4 and self.executable is not None:
            lines.append(self.source_text)
        return "\n".join(lines) + "\n"

    def dump(self, folder: Path) -> Path:
        """Every stage, the plan, the source and how it was built, as files in a folder."""
        from monoplan.inspect.override import dump

        return dump(self, folder)


def _as_types(graph: Graph, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {p.path: arrays[p.path].astype(p.value.type.dtype.numpy, copy=False) for p in graph.params}
