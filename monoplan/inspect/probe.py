"""The instrumented plan: the same source with a time stamp after each step, and copies of what each step wrote.

It is made from the source text, edited by hand or not, so what is measured and compared is what runs. It is a
build of its own with a cache entry of its own: a plan that nobody looks into is not changed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.expressions import c_dim
from monoplan.codegen.moves import lies_as_tiles
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.source import CallOfStep, after_calls
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.errors import CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, bf16
from monoplan.runtime.cpu.executable import CDEF, CpuExecutable
from monoplan.runtime.cuda.arrays import Results
from monoplan.runtime.cuda.executable import Calls, CudaExecutable, _Resolver, choose_variant

_HEADER = Path(__file__).resolve().with_name("mp_probe.h")
PROBE_CDEF = """
typedef struct { int64_t *times; void *const *copies; const int64_t *sizes; } mp_probe;
int mp_run_probed(const mp_args *, mp_error *, mp_probe *);
"""
_ENTRY = """
int mp_run_probed(const mp_args *args, mp_error *error, mp_probe *probe);
int mp_run_probed(const mp_args *args, mp_error *error, mp_probe *probe)
{
    mp_watch = probe;
    return mp_run_plan(args, error);
}
"""


@dataclass(frozen=True)
class Event:
    """One run of a step: inside rolled layers and scans there is one for each turn."""

    number: int
    step: Step
    turn: int | None
    writes: tuple[tuple[int, Operand], ...]  # number of the copy, and what is copied


def events(plan: Plan, symbols: Mapping[str, int]) -> Iterator[Event]:
    """All steps in the order in which they run, for these sizes."""
    number = copy = 0
    for item in plan.items:
        loop = isinstance(item, StepLoop)
        steps = item.steps if isinstance(item, StepLoop) else (item,)
        for turn in range(evaluate(item.count, symbols) if isinstance(item, StepLoop) else 1):
            for step in steps:
                writes = tuple(enumerate(step.kernel.writes, copy))
                yield Event(number, step, turn if loop else None, writes)
                number, copy = number + 1, copy + len(writes)


def instrument(text: str, plan: Plan) -> str:
    """The source with marks and copies behind every step; raises where an edited source lost a step."""
    numbers, found = _numbers(plan), set()

    def more(call: CallOfStep) -> Iterator[str]:
        if call.number not in numbers:
            return
        found.add(call.number)
        step, event, copy = numbers[call.number]
        yield f"mp_mark(run, t, T, {event} + 1);"
        for i, o in enumerate(step.kernel.writes):
            yield f"mp_keep(t, {copy} + {i}, {call.arguments[step.kernel.pointers.index(o)]});"
        yield "mp_kept(run, T);"

    marked = after_calls(text, "mp_mark(run, t, T, 0);", more)
    if missing := sorted(set(numbers) - found):
        raise CompileError(
            f"the source has no call of step {missing[0]}, so it can't be looked into",
            fix="leave the calls `name(run, t, T, number, …);` as statements of their own",
        )
    include = '#include "mp_plan.h"'
    return marked.replace(include, f'{include}\n#include "mp_probe.h"', 1) + _ENTRY


def _numbers(plan: Plan) -> dict[int, tuple[Step, str, str]]:
    """Each step with the C expressions of its event's number and of its first copy's."""
    found: dict[int, tuple[Step, str, str]] = {}
    event: Dim = 0
    copy: Dim = 0
    for item in plan.items:
        steps = item.steps if isinstance(item, StepLoop) else (item,)
        copies = sum(len(s.kernel.writes) for s in steps)
        inner = 0
        for i, step in enumerate(steps):
            if isinstance(item, StepLoop):
                turns = (f"{len(steps)} * turn", f"{copies} * turn")
                found[step.number] = (step, f"{c_dim(event + i)} + {turns[0]}", f"{c_dim(copy + inner)} + {turns[1]}")
            else:
                found[step.number] = (step, c_dim(event), c_dim(copy))
            inner += len(step.kernel.writes)
        count: Dim = item.count if isinstance(item, StepLoop) else 1
        event, copy = event + count * len(steps), copy + count * copies
    return found


class ProbedCpu(CpuExecutable):
    """The instrumented build of a plan; shares the plan's weights."""

    declarations = CDEF + PROBE_CDEF

    def __init__(self, base: CpuExecutable) -> None:
        self.base = base
        self._probe: Any = None
        super().__init__(base.plan, base.source, base.params, base.threads, instrument(base.text, base.plan))
        self.comm = base.comm

    def parts(self) -> tuple[str, ...]:
        return ()  # one translation unit: the probe is its variable

    def build_headers(self) -> tuple[tuple[str, str], ...]:
        return (*super().build_headers(), ("mp_probe.h", _HEADER.read_text("utf-8")))

    def enter(self, args: Any, error: Any) -> int:
        return int(self.library.mp_run_probed(args, error, self._probe))

    def times(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> tuple[list[Array], Array]:
        """Outputs, and the nanoseconds of each event."""
        marks = np.zeros(sum(1 for _ in events(self.plan, symbols)) + 1, np.int64)
        self._probe = self.ffi.new("mp_probe *")
        self._probe.times = self.ffi.from_buffer("int64_t[]", marks)
        outputs = self.run(inputs, symbols)
        return outputs, np.diff(marks)

    def profile_times(
        self, inputs: Sequence[Array], symbols: Mapping[str, int], repeat: int
    ) -> tuple[list[tuple[int, int | None]], Array, float, float]:
        """Events, nanoseconds of each by run, and the medians of a plain and of an instrumented call."""
        plain, looked, marks = [], [], []
        for _ in range(repeat + 1):  # by turns, so that a busy moment of the machine meets both
            begin = time.perf_counter_ns()
            self.base.run(inputs, symbols)
            middle = time.perf_counter_ns()
            marks.append(self.times(inputs, symbols)[1])
            plain.append(middle - begin)
            looked.append(time.perf_counter_ns() - middle)
        # The first run of each touches pages and caches for the first time.
        order = [(e.step.number, e.turn) for e in events(self.plan, symbols)]
        times = np.array(marks[1:], dtype=np.float64).reshape(repeat, len(order))
        return order, times, statistics.median(plain[1:]), statistics.median(looked[1:])

    def watch(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> Watched:
        """Outputs, and the contents of every buffer right after each step that wrote it."""
        sizes = {**symbols, "threads": self.threads}
        copies: list[Array] = []
        found = tuple(events(self.plan, symbols))
        for event in found:
            for _, o in event.writes:
                b = o.view.buffer
                copies.append(np.zeros(evaluate(b.size, sizes), b.dtype.numpy))
        lengths = np.array([a.nbytes for a in copies] or [0], np.int64)
        table = self.ffi.new("void *[]", [self._address(a) for a in copies] or [self.ffi.NULL])
        self._probe = self.ffi.new("mp_probe *")
        self._probe.copies, self._probe.sizes = table, self.ffi.from_buffer("int64_t[]", lengths)
        outputs = self.run(inputs, symbols)
        return Watched(self.plan, found, copies, outputs, dict(sizes))


def probe(executable: Any) -> Any:
    """What looks into an executable, on the CPU or on a GPU."""
    if isinstance(executable, CpuExecutable):
        return ProbedCpu(executable)
    return ProbedCuda(executable)


@dataclass(frozen=True)
class Watched:
    """A run of a plan with everything that it wrote."""

    plan: Plan
    events: tuple[Event, ...]
    copies: list[Array]
    outputs: list[Array]
    symbols: dict[str, int]

    def read(self, view: View, copy: int) -> Array:
        """A view of a buffer's contents."""
        return read_view(view, self.copies[copy], self.symbols)


def read_view(view: View, contents: Array, symbols: Mapping[str, int]) -> Array:
    """The elements of a view of a flat buffer."""
    if lies_as_tiles(view.buffer, contents.size, symbols):
        contents = _rows_of_tiles(contents, view.buffer.tiled)
    shape = tuple(evaluate(d, symbols) for d in view.shape)
    strides = tuple(evaluate(d, symbols) * contents.itemsize for d in view.strides)
    start = contents[evaluate(view.offset, symbols) :]
    return (
        np.array(np.lib.stride_tricks.as_strided(start, shape, strides)) if all(shape) else np.zeros(shape, start.dtype)
    )


def _rows_of_tiles(contents: Array, columns: int) -> Array:
    """What lies there as bf16 tiles [row / 32][column / 32][32][32], row by row."""
    rows = contents.size // columns
    blocks = -(-rows // 32)
    tiles = contents.view(bf16.numpy)[: blocks * 32 * columns].reshape(blocks, columns // 32, 32, 32)
    return tiles.transpose(0, 2, 1, 3).reshape(-1)[: rows * columns]


def same_buffer(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers are one: tables are made anew for every use."""
    return a is b or (a.kind == b.kind == "table" and (a.table_kind, a.table) == (b.table_kind, b.table))


# Looks into a plan on a GPU: what each step wrote, and how long it takes.
#
# Steps run one by one, each after the one before has ended, so what is copied is what the step made. Times are those
# of each step alone, captured as a graph and replayed; the plan itself is not changed.


class ProbedCuda:
    """The same executable, step by step."""

    def __init__(self, base: CudaExecutable) -> None:
        self.base, self.device = base, base.device

    def watch(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> Watched:
        """Outputs, and the contents of every buffer right after each step that wrote it."""
        base, device = self.base, self.device
        with base._lock:
            values = {**symbols, "threads": 1}
            given = base._arguments.bind(inputs, base._twins)
            results = Results(device, base.plan, values, base._arguments, on_device=False)
            resolver, lists = self._lists(values, given.addresses, results.addresses)
            copies: list[Array] = []
            found = tuple(events(base.plan, values))
            for event, actions in zip(found, lists, strict=True):
                Calls(device, actions).enqueue()
                for _, o in event.writes:
                    b = o.view.buffer
                    copies.append(np.zeros(evaluate(b.size, values), b.dtype.numpy))
                    device.download(copies[-1], resolver.buffer(b, event.turn or 0))
                device.synchronize()
            results.fetch(base.error)
            base.check(symbols)
            base._twins.written(inputs, symbols, keep=False)
            return Watched(base.plan, found, copies, results.finish(inputs), dict(values))

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
            found = tuple(events(base.plan, values))
            for event, actions in zip(found, whole, strict=True):
                of_step.setdefault(event.step.number, []).extend(actions)
            runs = Counter(e.step.number for e in found)
            each = {n: self._measure(actions, repeat) / runs[n] for n, actions in of_step.items()}
            plain = self._measure([a for actions in whole for a in actions], repeat)
        order = [(e.step.number, e.turn) for e in found]
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
        return resolver, [self._actions(event, chosen, resolver) for event in events(base.plan, values)]

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
