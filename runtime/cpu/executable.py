"""Runs a plan on the CPU: builds the C source, loads it with cffi and calls its one entry point without the GIL."""

from __future__ import annotations

import os
import weakref
from _signal import SIGINT, default_int_handler, getsignal  # type: ignore[import-not-found]  # without enums: quick
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import getrefcount
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from monoplan.ir.dims import evaluate
from monoplan.ir.errors import ArgumentError, CompileError, PlanError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.printer import print_op
from monoplan.ir.types import address, aligned, product
from monoplan.runtime.build import cache, toolchain
from monoplan.runtime.build.background import stoppable
from monoplan.runtime.build.toolchain import declared
from monoplan.runtime.machine import features
from monoplan.runtime.machine.threads import default_threads

if TYPE_CHECKING:  # codegen is imported by the functions that need it: running a plan does not
    from monoplan.codegen.plan import Plan, Step
    from monoplan.codegen.source import Source
    from monoplan.codegen.target import Target
    from monoplan.runtime.ranks.comm import Communicator

Array = np.ndarray[Any, Any]

# What a run on the CPU needs besides the plan, kept for the next run: a decode loop changes little of it.
#
# The addresses of inputs are remembered by weak references: they keep no array alive, an array that took the place of
# a dead one is not mistaken for it, and numpy does not let an array be resized while there is one.


# Bytes of a result from which it pays that vectors cross no cache line. Those of 16 bytes do not, in numpy's memory.
ALIGNED_FROM = 16 << 10
REUSED_UP_TO = 1 << 20  # bytes of a result whose memory is kept for the next one
LONG = 50_000_000  # operations and bytes: below, a run ends in milliseconds; above, two system calls are nothing


def _and_view(memory: Array) -> tuple[Array, Array]:
    return memory, memory[:]


_block = _and_view(np.empty(0))
_UNSHARED = getrefcount(_block[0])  # references to memory that only a tuple has, and one array that is in the tuple too


class _Nothing:
    """Dies at once: a reference to it is one to no array."""


_no_array: weakref.ref[Any] = weakref.ref(_Nothing())


Maker = Callable[[Any], Array]
# Memory of the last two results of one output: `y = f(x)` in a loop has one of them while the next is made.
# Each with where the result begins in it, as a pointer, an array there, and that array's shape.
Block = tuple[Array, Any, Array, tuple[int, ...]]
Spare = deque[Block]


def _unused(spare: Spare, shape: tuple[int, ...]) -> Block | None:
    """Memory that nobody has, and that no other thread gets; what was used last is in the caches, and comes first."""
    try:
        for _ in range(len(spare)):
            block = spare.pop()
            if getrefcount(block[0]) == _UNSHARED and block[3] == shape:
                return block
            spare.appendleft(block)
    except IndexError:  # another thread took it meanwhile
        pass
    return None


def _maker(ffi: Any, number: int, shape: tuple[int, ...], dtype: Any, wide: bool, spare: Spare) -> Maker:
    """What makes the array of a result and writes its address to the table of outputs."""
    empty, from_buffer = np.empty, ffi.from_buffer
    if not wide and dtype.kind in "fiub":

        def plain(table: Any) -> Array:
            made = empty(shape, dtype)
            table[number] = from_buffer(made)
            return made

        return plain
    nbytes = product(shape) * dtype.itemsize + 64

    def new() -> Block:
        memory = empty(nbytes, np.uint8)
        start = from_buffer(memory)
        skipped = -int(ffi.cast("intptr_t", start)) % 64
        return memory, ffi.cast("void *", start + skipped), np.ndarray(shape, dtype, memory, skipped), shape

    def placed(table: Any) -> Array:
        _, table[number], made, _ = new()
        return made

    def placed_again(table: Any) -> Array:
        block = _unused(spare, shape) or new()
        table[number] = block[1]
        made: Array = block[2].view()  # of the same memory, and quicker than a new array of it
        spare.append(block)  # only now: another thread that takes it sees that it is shared
        return made

    return placed_again if nbytes <= REUSED_UP_TO else placed


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that follows from the values of the symbols."""

    symbols: Any
    offsets: Any
    total: int  # bytes of the arena
    threads: int
    long: bool  # whether a run takes long enough to be interrupted
    count: int  # of the outputs
    aliases: tuple[int, ...]  # for each output the input that it is, or 0 if it is none; empty if none is one
    fresh: tuple[tuple[int, Maker], ...]  # the other outputs, and what makes them

    @classmethod
    def of(cls, ffi: Any, plan: Plan, values: Mapping[str, int], spare: Sequence[Spare]) -> Layout:
        """The layout for values of all of the plan's symbols."""
        offsets, total = plan.arena.layout(values)
        aliases, fresh = [], []
        vectors = features.vector_bytes(features.detect().isa) > 16
        for number, (where, v) in enumerate(zip(plan.outputs, plan.graph.outputs, strict=True)):
            aliases.append(where if isinstance(where, int) else 0)
            if not isinstance(where, int):
                shape, dtype = tuple(evaluate(d, values) for d in v.type.shape), v.type.dtype.numpy
                wide = vectors and product(shape) * dtype.itemsize >= ALIGNED_FROM
                fresh.append((number, _maker(ffi, number, shape, dtype, wide, spare[number])))
        numbers = [values[name] for name in plan.symbols]
        return cls(
            ffi.new("int64_t[]", numbers),
            ffi.new("int64_t[]", list(offsets) or [0]),
            total,
            values["threads"],
            evaluate(plan.work, values) > LONG,
            len(plan.outputs),
            tuple(aliases) if len(fresh) < len(aliases) else (),
            tuple(fresh),
        )


class Frame:
    """The arena and the argument structures of one run at a time."""

    __slots__ = ("ffi", "args", "error", "arena", "layout", "inputs", "outputs", "seen")

    def __init__(self, ffi: Any, plan: Plan, params: Any) -> None:
        self.ffi = ffi
        self.args, self.error = ffi.new("mp_args *"), ffi.new("mp_error *")
        self.arena: Array = aligned((0,), np.uint8)
        self.layout: Layout | None = None
        count = len(plan.graph.inputs)
        self.inputs, self.outputs = ffi.new("void *[]", count + 1), ffi.new("void *[]", len(plan.outputs) + 1)
        # The arrays whose addresses are in the table of inputs.
        self.seen: list[weakref.ref[Any]] = [_no_array] * count
        self.args.inputs, self.args.outputs, self.args.params = self.inputs, self.outputs, params

    def point(self, number: int, array: Array | int) -> None:
        """Makes an array an input, or what lies at an address."""
        if isinstance(array, int):
            self.inputs[number], self.seen[number] = self.ffi.cast("void *", array), _no_array
            return
        # The buffer interface is four times as quick as numpy's own, but it has no name for bfloat16.
        simple = array.dtype.kind in "fiub"
        self.inputs[number] = self.ffi.from_buffer(array) if simple else self.ffi.cast("void *", address(array))
        self.seen[number] = weakref.ref(array)

    def arrange(self, layout: Layout) -> None:
        """Makes it a frame for these sizes."""
        args = self.args
        if self.arena.nbytes < layout.total:
            self.arena = aligned((layout.total,), np.uint8)
        args.arena = self.ffi.cast("char *", address(self.arena))
        args.symbols, args.offsets, args.threads = layout.symbols, layout.offsets, layout.threads
        args.stoppable = 0
        self.layout = layout  # last: a frame that was left half filled is filled again


ABI = 1
_MAIN = main_thread().ident

CDEF = """
typedef struct { int32_t code, step; int64_t place, value, limit; } mp_error;
typedef struct {
    const int64_t *symbols; void *const *inputs; void *const *outputs; void *const *params;
    char *arena; const int64_t *offsets; int32_t threads, stoppable; void *exchange; void *comm; int64_t room;
} mp_args;
int mp_run_plan(const mp_args *, mp_error *);
void mp_listen(void);
int mp_heard(void);
"""
Runner = Callable[[Sequence[Array]], list[Array]]
INDEX, _POSITION, _CACHE_FULL, _COUNT, _COMM, _STOPPED = 1, 2, 3, 4, 5, 6


@dataclass
class _Forks:
    """A forked child has none of its parent's OpenMP threads and would wait for them for ever."""

    used: bool = False  # a plan of this process ran on several threads
    orphaned: bool = False  # so did one of the parent's, before the fork

    def after_fork(self) -> None:
        self.orphaned = self.orphaned or self.used


_forks = _Forks()
_kept: list[Any] = []  # one plan's library: with the last one OpenMP would be unloaded, and its threads still live
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forks.after_fork)


def host_target() -> Target:
    """The CPU target of this machine (or of MONOPLAN_ISA)."""
    from monoplan.codegen.target import cpu_target

    found = features.detect()
    return cpu_target(found.isa, features.vector_bytes(found.isa))


def flags_for(target: Target) -> tuple[str, ...]:
    """Compiler flags of a target, beyond those every build has."""
    return (*features.compile_flags(features.detect()), f"-DMP_LANES={target.lanes}", "-fwrapv", "-fopenmp-simd")


class CpuExecutable:
    """A loaded plan with its weights."""

    declarations = CDEF

    def __init__(
        self,
        plan: Plan,
        source: Source,
        params: Sequence[Array] | Callable[[], Sequence[Array]],
        threads: int,
        text: str | None = None,
    ) -> None:
        """`params` may be a function that makes them: it runs while the C compiler does."""
        self.plan, self.source, self.threads = plan, source, threads
        self._edited = text
        self.ffi = self._declared()
        if callable(params):
            with stoppable() as work:
                loaded = work.begin(self._load)
                self.params = list(params())
                self.library, self.entry = loaded.result()
        else:
            self.params = list(params)
            self.library, self.entry = self._load()
        if not _kept:
            _kept.append(self.library)
        self._params = self.ffi.new("void *[]", [self._address(a) for a in self.params] or [self.ffi.NULL])
        self._frames: list[Frame] = []  # of the runs that are over, for the next ones
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._spare: list[Spare] = [deque(maxlen=2) for _ in plan.outputs]
        self._named = plan.symbols[:-1]  # the last one is the number of threads
        self.comm: Communicator | None = None  # with the other ranks, where the plan has collectives

    @property
    def text(self) -> str:
        """The source that was built: the plan's, or one that somebody edited."""
        return self.source.text if self._edited is None else self._edited

    def _declared(self) -> Any:
        return declared(self.declarations)

    def _load(self) -> tuple[Any, Any]:
        """The library, built unless the cache has it, and its entry there."""
        key, build = toolchain.plan_build(
            self.text,
            flags_for(self.plan.target),
            target=features.detect().key,
            abi=ABI,
            headers=self.build_headers(),
            parts=self.parts,
        )
        try:
            return toolchain.load(key, build, self.ffi.dlopen)
        except CompileError as error:
            raise _with_origin(error, self.text) from None

    def parts(self) -> tuple[str, ...]:
        """Translation units for compilers side by side, where the source is large and nobody edited it."""
        return self.source.parts(default_threads().count) if self.text == self.source.text else ()

    def build_headers(self) -> tuple[tuple[str, str], ...]:
        """Names and texts of the headers that the source includes."""
        from monoplan.codegen.source import headers, included

        return included(self.text, headers("cpu"))

    def enter(self, args: Any, error: Any) -> int:
        """Calls the entry point."""
        return self.library.mp_run_plan(args, error)  # type: ignore[no-any-return]

    @property
    def hit(self) -> bool:
        """Whether the binary came from the cache."""
        return self.entry.hit

    def _address(self, a: Array) -> Any:
        return self.ffi.cast("void *", address(a))

    def _layout(self, symbols: Mapping[str, int]) -> Layout:
        """What follows from these values of the symbols, kept for the next run."""
        values = (*map(symbols.__getitem__, self._named), 1 if _forks.orphaned else self.threads)
        found = self._layouts.get(values)
        if found is None:
            if len(self._layouts) > 4096:
                self._layouts.clear()
            sizes = dict(zip(self.plan.symbols, values, strict=True))
            found = self._layouts[values] = Layout.of(self.ffi, self.plan, sizes, self._spare)
        return found

    def run(self, inputs: Sequence[Array], symbols: Mapping[str, int]) -> list[Array]:
        """Outputs for inputs that were checked already; an output that aliases an input is that input."""
        return self._run(self._layout(symbols), symbols, inputs)

    def runner(self, symbols: Mapping[str, int]) -> Runner:
        """`run` for these values of the symbols, to be called often."""
        return partial(self._run, self._layout(symbols), symbols)

    def _run(self, layout: Layout, symbols: Mapping[str, int], inputs: Sequence[Array]) -> list[Array]:
        if layout.threads > 1:
            if _forks.orphaned:
                layout = self._layout(symbols)
            _forks.used = True
        try:  # two Python threads may call at once: each takes a frame of its own
            frame = self._frames.pop()
        except IndexError:
            frame = Frame(self.ffi, self.plan, self._params)
        if layout is not frame.layout:
            frame.arrange(layout)
        seen, table = frame.seen, frame.outputs
        for number, a in enumerate(inputs):
            if seen[number]() is not a:
                frame.point(number, a)
        outputs: list[Any] = list(map(inputs.__getitem__, layout.aliases)) if layout.aliases else [None] * layout.count
        for number, make in layout.fresh:
            outputs[number] = make(table)
        if self.comm is not None:
            code = self._enter_among(self.comm, frame.args, frame.error)
        elif layout.long:
            code = self._enter_listening(frame.args, frame.error)
        else:
            code = self.enter(frame.args, frame.error)
        if code:
            error, frame.error = frame.error, self.ffi.new("mp_error *")
        self._frames.append(frame)  # not after an exception: its error is not known to be empty
        if code == _STOPPED:
            _interrupted()
        if code:
            raise self._failure(code, error, symbols)
        return outputs

    def _enter_listening(self, args: Any, error: Any) -> int:
        """The same while an interrupt ends the run."""
        # Only Python's main thread gets signals; a handler of the user's own decides itself what an interrupt is.
        args.stoppable = get_ident() == _MAIN and getsignal(SIGINT) is default_int_handler
        if not args.stoppable:
            return self.enter(args, error)
        heard = 0
        try:
            self.library.mp_listen()  # an interrupt from before is raised when this returns, not after the whole run
            code = self.enter(args, error)
        finally:
            heard = self.library.mp_heard()
        return _STOPPED if heard else code

    def _enter_among(self, comm: Communicator, args: Any, error: Any) -> int:
        """The same with the other ranks, which would wait for one that was interrupted.

        One call at a time, or their exchanges would mix.
        """
        with comm.lock:
            meeting, null = comm.exchange, self.ffi.NULL
            if meeting is None:
                args.exchange, args.comm, args.room = null, null, 0
            else:
                meeting.check()
                args.exchange = self.ffi.cast("void *", meeting.function)
                args.comm, args.room = self.ffi.cast("void *", meeting.context), meeting.room
            return self.enter(args, error)

    def _failure(self, code: int, error: Any, symbols: Mapping[str, int]) -> PlanError | ArgumentError:
        step = next(s for s, _ in self.plan.steps() if s.number == error.step)
        if code == _COMM or (self.comm is not None and self.comm.failure()):
            why = self.comm.failure() if self.comm is not None else ""
            return PlanError("the ranks can't go on together", where=step.kernel.op.loc, why=why)
        limit = self._rows(step, error.limit) if code == INDEX and self.comm is not None else error.limit
        return describe_failure(step, code, error.place, error.value, limit, symbols)

    def _rows(self, step: Step, limit: int) -> int:
        """How many rows a divided table has on all ranks together."""
        op = step.kernel.op
        made = {r: o for o in self.plan.graph.setup for r in o.results}
        cut = made.get(op.operand("weight")) if "weight" in op.opdef.operand_names else None  # type: ignore[arg-type]
        if cut is None or cut.name != "slice" or cut.operands[0] is None:
            return limit
        return int(cut.operands[0].type.shape[0])  # type: ignore[call-overload]


def _interrupted() -> NoReturn:
    """The plan raised the signal again: Python's handler runs between two of the next instructions."""
    for _ in range(100):
        pass
    raise KeyboardInterrupt  # another thread has replaced the handler meanwhile


def _with_origin(error: CompileError, text: str) -> CompileError:
    """The compiler's error with the IR lines, and the user's, behind the source lines that it names."""
    from monoplan.codegen.source import origins

    found = "".join(f"\n    from {line}" for line in origins(text, error.what)[:4])
    return CompileError(error.what + found, where=error.where, why=error.why, fix=error.fix)


def describe_failure(
    step: Step, code: int, place: int, value: int, limit: int, symbols: Mapping[str, int]
) -> PlanError | ArgumentError:
    """An error of the running plan in words, with the op's line of IR and the user's line."""
    from monoplan.codegen.kernels import Gather

    k = step.kernel
    op = k.op
    if code == INDEX and "table" in op.opdef.operand_names:
        what = f"page {value} at place {place} of the table is not one of the cache's {limit}"
        fix = "check the table that goes in"
    elif code == INDEX:
        shape = [evaluate(d, symbols) for d in k.outer] if isinstance(k, Gather) else []
        spot = list(map(int, np.unravel_index(place, shape))) if shape and place < product(shape) else [place]
        index = op.operand(next(n for n in ("index", "ids", "rows") if n in op.opdef.operand_names))
        spot = spot[len(spot) - index.type.rank :] if index is not None else spot  # leading ones are x's own
        what, fix = f"index {value} at position {spot} is out of range [0, {limit})", "check the ids that go in"
    elif code == _POSITION:
        what = f"position {value} is beyond the table of {limit} positions"
        fix = "use a longer table (max_position_embeddings) or a shorter sequence"
        if value < 0:
            what, fix = f"position {value} is negative", f"positions lie between 0 and {limit - 1}"
    elif code == _COUNT:
        what = f"sequence {place} has {value} valid rows, of {limit} given"
        fix = "valid counts lie between 0 and the number of rows"
    elif code == _CACHE_FULL:
        what = f"sequence {place} needs {value} positions, the cache has {limit}"
        fix = "reserve more room in the cache before the call"
    else:
        return PlanError(f"{op.name} failed with code {code}", where=op.loc, why=print_op(op))
    return ArgumentError(f"{op.name}: {what}", where=op.loc, why=print_op(op), fix=fix)


__all__ = ["CpuExecutable", "cache", "host_target"]
