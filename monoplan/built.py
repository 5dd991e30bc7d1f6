"""A plan that is ready to run: what it is called with, how it was made, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.frontend.pytree import Tree
from monoplan.frontend.tensor import Tensor
from monoplan.inspect.dump import dump
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols, interpret
from monoplan.ir.ops.collective import among
from monoplan.ir.sizes import Question
from monoplan.options import Options
from monoplan.passes.explain import explain
from monoplan.passes.manager import Stage, run_passes
from monoplan.runtime.ranks.comm import Communicator

Array = np.ndarray[Any, Any]


@dataclass
class Built:
    """A plan ready to run, with every stage of its making."""

    graph: Graph
    stages: Sequence[Stage]
    plan: Any
    source: Any
    executable: Any
    out_tree: Tree
    tensors: Mapping[str, Tensor]
    target: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    tp: Communicator | None = None
    questions: tuple[Question, ...] = ()  # that the traced graph has about the sizes of a call

    def show(self, stages: Sequence[Stage]) -> None:
        """Takes the stages of its making, and lets the plan tell of them."""
        self.stages = stages
        self.plan = replace(self.executable.plan, notes=lambda: explain(self.stages, self.executable.plan))

    def remake(self, graph: Graph, pipeline: Sequence[Any], options: Options) -> list[Stage]:
        """The stages of a plan that came from the cache, run now that somebody asks; its graph becomes theirs."""
        from monoplan.codegen.plan import make_plan

        stages = run_passes(graph, pipeline, options.stop_after)
        self.graph = stages[-1].graph
        self.executable.plan = make_plan(self.graph, self.executable.plan.target)
        self.show(stages)
        return stages

    def check(self, arrays: Sequence[Array]) -> dict[str, int]:
        """The values of the symbols; raises when the arguments do not fit."""
        symbols = bind_symbols(self.graph.inputs, [a.shape for a in arrays])
        for question in self.questions:
            question.check(symbols)
        return symbols

    def run(self, arrays: Sequence[Array], symbols: Mapping[str, int]) -> list[Array]:
        if self.executable is None:
            params = {path: t.numpy() for path, t in self.tensors.items()}
            with among(self.tp):
                return interpret(self.graph, list(arrays), _as_types(self.graph, params))
        return self.executable.run(arrays, symbols)  # type: ignore[no-any-return]

    def place_outputs(self, arrays: Sequence[Array]) -> list[Any]:
        """Outputs among the leaves of forward's result that are not tensors."""
        return list(arrays)

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
        total = sum(self.milliseconds.values())
        steps = len(list(self.plan.steps())) if self.plan is not None else 0
        origin = "cache" if self.hit else "built"
        lines = [f"monoplan: {self.graph.name}: {steps} kernels, {origin}, {total:.0f} ms ("
                 + ", ".join(f"{k} {v:.0f}" for k, v in self.milliseconds.items()) + ")"]
        for s in self.stages[1:]:
            if level >= 2:
                lines.append(f"  {s.name}: {s.rewrites} rewrites, {s.seconds * 1e3:.1f} ms")
            if level >= 3:
                lines += [f"    {m}" for m in s.misses]
        if level >= 4 and self.executable is not None:
            lines.append(self.source_text)
        return "\n".join(lines) + "\n"

    def dump(self, folder: Path) -> Path:
        """Every stage, the plan, the source and how it was built, as files in a folder."""
        return dump(self, folder)


def _as_types(graph: Graph, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {p.path: arrays[p.path].astype(p.value.type.dtype.numpy, copy=False) for p in graph.params}
