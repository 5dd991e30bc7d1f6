"""The plan: numbered steps with their schedules, loops, arena and params. Prints as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property

from monoplan.codegen.backend import back_end
from monoplan.codegen.formats import ParamUse
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.lower.lowerer import Loop, Lowered, lower
from monoplan.codegen.memory import Arena, plan_arena
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, View
from monoplan.ir.dims import Dim, Expr, evaluate, symbols_of
from monoplan.ir.errors import CompileError, printable
from monoplan.ir.graph import Graph, Value
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op


@dataclass(frozen=True)
class Step:
    """One kernel call. `barrier`: workers wait for each other before it."""

    number: int
    kernel: Kernel
    schedule: object
    barrier: bool


@dataclass(frozen=True)
class StepLoop:
    """Steps that run `count` times: rolled layers over a table of weights, or the turns of a scan."""

    count: Dim
    steps: tuple[Step, ...]
    scan: bool = False

    @property
    def work(self) -> Dim:
        """Operations and bytes of a turn."""
        total: Dim = 0
        for s in self.steps:
            total = total + s.kernel.flops + s.kernel.bytes
        return total


@dataclass(frozen=True)
class Plan:
    """Everything there is to know about a compiled graph, before it becomes text."""

    graph: Graph
    target: Target
    items: tuple[Step | StepLoop, ...]
    arena: Arena
    params: tuple[ParamUse, ...]
    outputs: tuple[Buffer | int, ...]
    views: Mapping[Value, View] = field(default_factory=dict)  # where each value lies, for verify and bisect
    notes: Callable[[], str] | None = field(default=None, compare=False, repr=False)  # what the passes have to say

    @property
    def name(self) -> str:
        return self.graph.name

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Symbolic dimensions in the order of the plan's arguments; `threads` comes last."""
        return (*self.graph.symbols, "threads")

    @cached_property
    def work(self) -> Dim:
        """Operations and bytes of a run."""
        total: Dim = 0
        for step, times in self.steps():
            total = total + times * (step.kernel.flops + step.kernel.bytes)
        return total

    def steps(self) -> Iterator[tuple[Step, Dim]]:
        """Every step with the number of times it runs, which may be symbolic."""
        for item in self.items:
            if isinstance(item, StepLoop):
                yield from ((s, item.count) for s in item.steps)
            else:
                yield item, 1

    @property
    def whole(self) -> Plan:
        """The plan itself; what stands for one that lies in a file reads it here."""
        return self

    def with_notes(self, notes: Callable[[], str]) -> Plan:
        """The plan, which can tell of the passes."""
        return replace(self, notes=notes)

    def explain(self) -> str:
        """What went into each kernel, and what did not fuse and why."""
        return self.notes() if self.notes is not None else f"{self.name}: {self.summary}\n"

    @property
    def summary(self) -> str:
        steps = list(self.steps())
        rolled = ""
        for what, scan in (("rolled layers", False), ("scans", True)):
            loops = [i for i in self.items if isinstance(i, StepLoop) and i.scan == scan]
            texts = [f"{_factor(i.count)} x {len(i.steps)}" for i in loops]
            rolled += f", {what}: {', '.join(texts)}" if texts else ""
        return f"{len(steps)} kernels{rolled}; symbols: {', '.join(self.graph.symbols) or 'none'}"

    def table(self, symbols: Mapping[str, int] | None = None) -> str:
        """The step table; sizes as numbers where the symbols are given, else as expressions."""
        rows = [("step", "runs", "kernel", "module", "flops", "bytes", "reads -> writes", "ir")]
        for step, count in self.steps():
            k = step.kernel
            rows.append(
                (
                    str(step.number),
                    _amount(count, symbols),
                    k.family,
                    printable(k.op.loc.path) or "-",
                    _amount(k.flops, symbols),
                    _amount(k.bytes, symbols),
                    _buffers(k),
                    print_op(k.op),
                )
            )
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[-1]]) for r in rows]
        values = dict.fromkeys(self.symbols, 1) | dict(symbols or {})
        offsets, peak = self.arena.layout(values)
        shown = ", ".join(f"{k}={v}" for k, v in values.items())
        lines.append(
            f"arena: {len(offsets)} slots for {len(self.arena.lifetimes)} buffers, peak {peak} bytes "
            f"({self.arena.unshared(values)} unshared) at {shown}"
        )
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return f"plan {self.name}: {self.summary}\n{self.table()}"


def _factor(d: Dim) -> str:
    """A size in front of a multiplication sign."""
    return f"({d})" if isinstance(d, Expr) and len(d.terms) > 1 else str(d)


def _amount(d: Dim, symbols: Mapping[str, int] | None) -> str:
    if symbols is not None and symbols_of(d) <= set(symbols):
        return f"{evaluate(d, symbols):,}"
    return str(d)


def _buffers(k: Kernel) -> str:
    def show(names: Sequence[str]) -> str:
        return " ".join(names) or "-"

    reads = [o.view.buffer.name for o in k.reads if not o.view.is_virtual]
    return f"{show(reads)} -> {show([o.view.buffer.name for o in k.writes])}"


def make_plan(graph: Graph, target: Target) -> Plan:
    """Lowers, schedules and places a graph."""
    if "threads" in graph.symbols:
        raise CompileError(
            "a symbolic dimension can't be named threads: plans use that name for their own",
            fix="give the dimension another name",
        )
    lowered = back_end(target).prepare(lower(graph, target), target)
    _check_symbols(lowered.items, {*graph.symbols, "threads"})
    arena = plan_arena(lowered.items)
    items = _number_steps(lowered, arena, target)
    return Plan(graph, target, items, arena, tuple(lowered.params), tuple(lowered.outputs), lowered.views)


def _check_symbols(items: Sequence[Kernel | Loop], known: set[str]) -> None:
    """Every size that a kernel mentions must follow from the inputs."""
    for item in items:
        if isinstance(item, Loop):
            _check_symbols(item.items, known)
        elif unknown := sorted(item.symbols - known):
            raise CompileError(
                f"{item.op.name}: the size {unknown[0]} is not known, since no input has it",
                where=item.op.loc,
                why=print_op(item.op),
                fix="give the graph an input of that size, or use a fixed number",
            )


def _number_steps(lowered: Lowered, arena: Arena, target: Target) -> tuple[Step | StepLoop, ...]:
    """Numbers the steps, has them scheduled and decides where workers must wait."""
    families = back_end(target).families
    counter = 0
    state = _Hazards(arena)

    def make(kernel: Kernel, always: bool) -> Step:
        nonlocal counter
        numbered = replace(kernel, step=counter)
        family = families[type(kernel)]
        barrier = state.enter(kernel) or always or family.counters
        step = Step(counter, numbered, family.schedule(numbered, target), barrier)
        counter += 1
        return step

    items: list[Step | StepLoop] = []
    for item in lowered.items:
        if isinstance(item, Loop):
            state.clear()
            # The first step of a turn waits for the last of the turn before.
            kernels = [k for k in item.items if isinstance(k, Kernel)]
            steps = tuple(make(k, i == 0) for i, k in enumerate(kernels))
            items.append(StepLoop(item.count, steps, item.scan))
        else:
            after_loop = bool(items) and isinstance(items[-1], StepLoop)  # the loop's own hazards are not known
            items.append(make(item, after_loop))
    return tuple(items)


class _Hazards:
    """What was read and written since the last barrier."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.read: set[object] = set()
        self.written: set[object] = set()

    def clear(self) -> None:
        self.read, self.written = set(), set()

    def enter(self, k: Kernel) -> bool:
        """Whether the kernel must wait; notes what it touches."""
        fixed = ("param", "iota", "const")
        reads = {self._place(o.view.buffer) for o in k.reads if o.view.buffer.root.kind not in fixed}
        writes = {self._place(o.view.buffer) for o in (*k.writes, *k.scratch)}
        clash = bool(reads & self.written or writes & (self.read | self.written))
        if clash:
            self.clear()
        self.read |= reads
        self.written |= writes
        return clash

    def _place(self, b: Buffer) -> object:
        b = b.root
        if b.kind in ("arena", "scratch"):
            return ("slot", self.arena.slot_of[b])
        return (b.table_kind or b.kind, b.table or b.index)
