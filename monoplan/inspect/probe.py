"""The instrumented plan: the same source with a time stamp after each step, and copies of what each step wrote.

It is made from the source text, edited by hand or not, so what is measured and compared is what runs. It is a
build of its own with a cache entry of its own: a plan that nobody looks into is not changed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.hand_over import lies_as_tiles
from monoplan.codegen.operands import Operand
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.source import CallOfStep, after_calls
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import evaluate
from monoplan.ir.errors import CompileError
from monoplan.ir.types import bf16
from monoplan.runtime.cpu.executable import CDEF, CpuExecutable

Array = np.ndarray[Any, Any]

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
    """One run of a step: inside rolled layers there is one for each turn."""

    number: int
    step: Step
    turn: int | None
    writes: tuple[tuple[int, Operand], ...]  # number of the copy, and what is copied


def events(plan: Plan) -> Iterator[Event]:
    """All steps in the order in which they run."""
    number = copy = 0
    for item in plan.items:
        loop = isinstance(item, StepLoop)
        steps = item.steps if isinstance(item, StepLoop) else (item,)
        for turn in range(item.count if isinstance(item, StepLoop) else 1):
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
    event = copy = 0
    for item in plan.items:
        steps = item.steps if isinstance(item, StepLoop) else (item,)
        copies = sum(len(s.kernel.writes) for s in steps)
        inner = 0
        for i, step in enumerate(steps):
            if isinstance(item, StepLoop):
                found[step.number] = (step, f"{event + i} + {len(steps)} * turn", f"{copy + inner} + {copies} * turn")
            else:
                found[step.number] = (step, str(event), str(copy))
            inner += len(step.kernel.writes)
        count = item.count if isinstance(item, StepLoop) else 1
        event, copy = event + count * len(steps), copy + count * copies
    return found


class ProbedCpu(CpuExecutable):
    """The instrumented build of a plan; shares the plan's weights."""

    declarations = CDEF + PROBE_CDEF

    def __init__(self, base: CpuExecutable) -> None:
        self.base, self.events = base, tuple(events(base.plan))
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
        marks = np.zeros(len(self.events) + 1, np.int64)
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
        order = [(e.step.number, e.turn) for e in self.events]
        times = np.array(marks[1:], dtype=np.float64).reshape(repeat, len(order))
        return order, times, statistics.median(plain[1:]), statistics.median(looked[1:])

    def watch(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> Watched:
        """Outputs, and the contents of every buffer right after each step that wrote it."""
        sizes = {**symbols, "threads": self.threads}
        copies: list[Array] = []
        for event in self.events:
            for _, o in event.writes:
                b = o.view.buffer
                copies.append(np.zeros(evaluate(b.size, sizes), b.dtype.numpy))
        lengths = np.array([a.nbytes for a in copies] or [0], np.int64)
        table = self.ffi.new("void *[]", [self._address(a) for a in copies] or [self.ffi.NULL])
        self._probe = self.ffi.new("mp_probe *")
        self._probe.copies, self._probe.sizes = table, self.ffi.from_buffer("int64_t[]", lengths)
        outputs = self.run(inputs, symbols)
        return Watched(self.plan, self.events, copies, outputs, dict(sizes))


def probe(executable: Any) -> Any:
    """What looks into an executable, on the CPU or on a GPU."""
    if isinstance(executable, CpuExecutable):
        return ProbedCpu(executable)
    from monoplan.inspect.probe_cuda import ProbedCuda

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
