"""Looks into a plan on a GPU: what each step wrote, and how long it takes.

Steps run one by one, each after the one before has ended, so what is copied is what the step made. Times are those of
each step alone, captured as a graph and replayed; the plan itself is not changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.inspect.probe import Event, Watched, events
from monoplan.ir.dims import evaluate
from monoplan.runtime.cuda.arrays import Results
from monoplan.runtime.cuda.executable import Calls, CudaExecutable, _Resolver, choose_variant

Array = np.ndarray[Any, Any]


class ProbedCuda:
    """The same executable, step by step."""

    def __init__(self, base: CudaExecutable) -> None:
        self.base, self.device = base, base.device
        self.events = tuple(events(base.plan))

    def watch(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> Watched:
        """Outputs, and the contents of every buffer right after each step that wrote it."""
        base, device = self.base, self.device
        with base._lock:
            values = {**symbols, "threads": 1}
            given = base._arguments.bind(inputs, base._twins)
            results = Results(device, base.plan, values, base._arguments, on_device=False)
            resolver, lists = self._lists(values, given.addresses, results.addresses)
            copies: list[Array] = []
            for event, actions in zip(self.events, lists, strict=True):
                Calls(device, actions).enqueue()
                for _, o in event.writes:
                    b = o.view.buffer
                    copies.append(np.zeros(evaluate(b.size, values), b.dtype.numpy))
                    device.download(copies[-1], resolver.buffer(b, event.turn or 0))
                device.synchronize()
            results.fetch(base.error)
            base.check(symbols)
            base._twins.written(inputs, symbols, keep=False)
            return Watched(base.plan, self.events, copies, results.finish(inputs), dict(values))

    def profile_times(
        self, inputs: Sequence[Array], symbols: Mapping[str, int], repeat: int
    ) -> tuple[list[tuple[int, int | None]], Array, float, float]:
        """Events, nanoseconds of each, and those of the whole plan, as one graph and as the sum of its steps."""
        base = self.base
        with base._lock:
            values = {**symbols, "threads": 1}
            given = base._arguments.bind(inputs, base._twins)
            results = Results(self.device, base.plan, values, base._arguments, on_device=False)
            whole = self._lists(values, given.addresses, results.addresses)[1]
            of_step: dict[int, list[Any]] = {}
            for event, actions in zip(self.events, whole, strict=True):
                of_step.setdefault(event.step.number, []).extend(actions)
            runs = {s.number: n for s, n in base.plan.steps()}
            each = {n: self._measure(actions, repeat) / runs[n] for n, actions in of_step.items()}
            plain = self._measure([a for actions in whole for a in actions], repeat)
        order = [(e.step.number, e.turn) for e in self.events]
        times = np.array([[each[number] for number, _ in order]])
        return order, times, plain, float(times.sum())

    def _lists(
        self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]
    ) -> tuple[_Resolver, list[list[Any]]]:
        """What each event enqueues; the first launch of an event never overlaps with the one before."""
        base = self.base
        base._actions(values, inputs, outputs)  # reserves memory for these sizes
        resolver = _Resolver(base, values, inputs, outputs, base.plan.arena.layout(values)[0])
        chosen = {s.number: choose_variant(base.variants[s.number], values) for s, _ in base.plan.steps()}
        return resolver, [self._actions(event, chosen, resolver) for event in self.events]

    def _actions(self, event: Event, chosen: Mapping[int, Any], resolver: _Resolver) -> list[Any]:
        actions: list[Any] = []
        self.base._step(actions, event.step, chosen[event.step.number], resolver, event.turn or 0)
        return actions

    def _measure(self, actions: list[Any], repeat: int) -> float:
        """Nanoseconds of some launches."""
        if not actions:
            return 0.0
        calls = Calls(self.device, actions)
        if hasattr(self.device, "measure"):
            try:
                return float(self.device.measure(self.device.capture(calls.enqueue), repeat)) * 1e6
            except (NotImplementedError, RuntimeError):  # a product of the library that can't be captured
                return self._enqueued(calls, repeat)
        begin = time.perf_counter_ns()
        calls.enqueue()
        self.device.synchronize()
        return float(time.perf_counter_ns() - begin)

    def _enqueued(self, calls: Calls, repeat: int) -> float:
        """The least nanoseconds between two events with the launches between them; their preparation counts too."""
        cupy, found = self.device.cupy, []
        for _ in range(repeat + 2):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(self.device.stream)
            calls.enqueue()
            end.record(self.device.stream)
            self.device.synchronize()
            found.append(cupy.cuda.get_elapsed_time(begin, end) * 1e6)
        return float(min(found))
