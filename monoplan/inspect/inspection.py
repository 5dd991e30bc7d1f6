"""What a Compiled can tell about its plan: IR, source, diff, verify, bisect, profile, report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.pytree import flatten, unflatten
from monoplan.ir.errors import ArgumentError
from monoplan.ir.ops.collective import among
from monoplan.ir.printer import print_graph
from monoplan.ir.types import Array

if TYPE_CHECKING:
    from monoplan.built import Built
    from monoplan.codegen.plan import Plan
    from monoplan.frontend.module import Module
    from monoplan.inspect.bisect import Finding
    from monoplan.inspect.profile import Profile
    from monoplan.inspect.verify import Subject, Verification
    from monoplan.runtime.ranks.comm import Communicator


class Shown:
    """What a plan shows without a call, and a file of it: mixed into Compiled and CompiledLM."""

    def _latest(self) -> Built:
        raise NotImplementedError

    def ir(self, stage: str | None = None, *, locs: bool = False) -> str:
        """IR text after a stage ("trace" or a pass's name), or after all passes."""
        return print_graph(self._latest().stage(stage).graph, locs=locs)

    def source(self) -> str:
        """The generated source, whole."""
        return self._latest().source_text

    @property
    def plan(self) -> Plan | None:
        """Steps, buffers, arena; prints as a table. None with target="reference", which has no plan."""
        found: Plan | None = self._latest().plan
        return found

    def dump(self, folder: str | os.PathLike[str]) -> Path:
        """Every stage, the plan, the source and the build log as files in a folder."""
        return self._latest().dump(Path(folder))

    def save(self: Any, path: str | os.PathLike[str]) -> Path:
        """The plans made so far as a file, with weights (and tokenizer), which `mp.load` reads: see docs/saving.md."""
        from monoplan.saved import save

        return save(self, path)

    def __reduce__(self: Any) -> Any:
        from monoplan.saved import from_bytes, to_bytes

        return from_bytes, (to_bytes(self),)

    def diff(self, *, color: bool | None = None, locs: bool = True) -> str:
        """A unified diff of the IR for each pass that changed something; coloured where stdout is a terminal."""
        from monoplan.inspect.diff import diff

        return diff(self._latest().stages, color=color, locs=locs)

    def explain(self) -> str:
        """In words: what went into each kernel, what every pass did, and what did not fuse and why."""
        from monoplan.passes.explain import explain

        built = self._latest()
        return explain(built.stages, built.plan)


class Inspection(Shown):
    """Mixed into Compiled, which finds the plan that fits the arguments."""

    module: Module
    target: str
    tp: Communicator | None = None

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Built, list[Any], list[Array], dict[str, int]]:
        raise NotImplementedError

    def subject(self, *args: Any, **kwargs: Any) -> Subject:
        """The plan for these arguments, ready to be examined; the arguments are not changed."""
        from monoplan.driver import module_source
        from monoplan.inspect.verify import Subject

        built, _, arrays, symbols = self._bind(args, kwargs)
        arrays = [a if isinstance(a, np.ndarray) else a.get() for a in arrays]  # the tools compare on the host
        # What a rank computes begins with its part of the graph.
        source = module_source(built.tensors)
        stages = built.stages[1:] if built.tp is not None and built.tp.size > 1 else built.stages
        return Subject(
            built.stages[0].graph.name,
            self.target,
            stages,
            built.executable,
            lambda path: source.read(path, None),
            arrays,
            symbols,
            output_names(built),
        )

    def verify(self, *args: Any, nodes: bool = False, against: Any = None, **kwargs: Any) -> Verification:
        """Compares a call with the float64 interpreter: each output, with `nodes` each value on the way.

        `against` is the torch module that from_torch took: then outputs are compared with its own, in float64.
        """
        from monoplan.inspect.verify import verify

        subject = self.subject(*args, **kwargs)
        if against is not None:
            from monoplan.pytorch.program import exact_outputs

            subject.exact = exact_outputs(against, self.module.bind_arguments(args, kwargs))
        with among(self.tp):
            if self.tp is not None:  # now, on every rank: later some might want it and others not
                subject.exact, subject.plain  # noqa: B018
            found = verify(subject, nodes=nodes)
        other = None if found.ok else other_weight(self._bind(args, kwargs)[0])
        return found if other is None else replace(found, notes=(*found.notes, f"{other.what}: {other.why}"))

    def bisect(self, *args: Any, folder: str | Path | None = None, **kwargs: Any) -> Finding:
        """The first pass whose graph changes the numbers, or the first kernel that does, with a folder to repeat it."""
        from monoplan.inspect.bisect import bisect

        if self.tp is not None and self.tp.size > 1:
            raise ArgumentError(
                "bisect examines one rank: its questions would differ between several",
                fix="compile without tp=, or use verify()",
            )
        if (other := other_weight(self._bind(args, kwargs)[0])) is not None:
            raise other
        return bisect(self.subject(*args, **kwargs), folder)

    def profile(self, *args: Any, repeat: int = 10, **kwargs: Any) -> Profile:
        """The time of each step of a call, its bytes and flops, and its share of what the machine can do."""
        from monoplan.inspect.profile import profile

        return profile(self.subject(*args, **kwargs), repeat=repeat)

    def report(self, path: str | Path, *args: Any, **kwargs: Any) -> Path:
        """One HTML page that shows all of it; with the arguments of a call also the times of its steps."""
        from monoplan.inspect.report import write_report

        if not args and not kwargs:
            return write_report(Path(path), self._latest(), {})
        built = self._bind(args, kwargs)[0]
        profiles = {"call": self.profile(*args, **kwargs)} if built.executable is not None else {}
        return write_report(Path(path), built, profiles)


def other_weight(built: Built) -> ArgumentError | None:
    """The error for an array that was changed in place since the plan copied it: it would look like a wrong kernel."""
    from monoplan.driver import module_source
    from monoplan.runtime.cpu.weights import prepare

    if built.target != "cpu" or built.tp is not None:
        return None
    now = prepare(built.graph, built.executable.plan.params, module_source(built.tensors))
    for use, old, new in zip(built.executable.plan.params, built.executable.params, now, strict=True):
        if not np.array_equal(old.reshape(-1).view(np.uint8), new.reshape(-1).view(np.uint8)):
            return ArgumentError(
                f"the weight {use.value} is no longer what {built.graph.name} was compiled with",
                why="its array was changed in place, and the plan has a copy of it",
                fix="load weights by load_state_dict or load_parameter, or compile again",
            )
    return None


def output_names(built: Built) -> list[str]:
    """Names of the graph's outputs: places in forward's result, then the arguments that forward writes."""
    graph = built.stages[0].graph
    returned = len(graph.outputs) - len(graph.writes)
    marks = [_Mark() for _ in range(returned)]
    names = {id(leaf): name for name, leaf in flatten(unflatten(built.out_tree, marks))[0]}
    written = {j: graph.inputs[i].name for i, j in graph.writes}
    found = [names[id(m)] for m in marks]
    found = ["result" if n == "x" else n for n in found]
    return [*found, *(f"{written[j]} (written)" for j in range(returned, len(graph.outputs)))]


class _Mark:
    """Stands for an output while the structure of the result is asked for its names."""
