"""What a run on the CPU needs besides the plan, kept for the next run: a decode loop changes little of it.

The addresses of inputs are remembered by weak references: they keep no array alive, an array that took the place of
a dead one is not mistaken for it, and numpy does not let an array be resized while there is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from monoplan.codegen.plan import Plan
from monoplan.codegen.views import Buffer
from monoplan.ir.arrays import address, aligned
from monoplan.ir.dims import evaluate

Array = np.ndarray[Any, Any]
LONG = 50_000_000  # operations and bytes: below, a run ends in milliseconds; above, two system calls are nothing
_referent = weakref.ref.__call__


class _Nothing:
    """Dies at once: a reference to it is one to no array."""


def pointer(ffi: Any, a: Array) -> Any:
    """Where a dense array's data begins."""
    # The buffer interface is four times as quick as numpy's own, but it has no name for bfloat16.
    return ffi.from_buffer(a) if a.dtype.kind in "fiub" else ffi.cast("void *", address(a))


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that follows from the values of the symbols."""

    symbols: Any
    offsets: Any
    total: int  # bytes of the arena
    threads: int
    long: bool  # whether a run takes long enough to be interrupted
    aliases: tuple[int, ...]  # for each output the input that it is, or 0 if it is none
    fresh: tuple[tuple[int, tuple[int, ...], Any], ...]  # number, shape and dtype of the other outputs

    @classmethod
    def of(cls, ffi: Any, plan: Plan, values: Mapping[str, int]) -> Layout:
        """The layout for values of all of the plan's symbols."""
        offsets, total = plan.arena.layout(values)
        aliases, fresh = [], []
        for number, (where, v) in enumerate(zip(plan.outputs, plan.graph.outputs, strict=True)):
            aliases.append(0 if isinstance(where, Buffer) else where)
            if isinstance(where, Buffer):
                fresh.append((number, tuple(evaluate(d, values) for d in v.type.shape), v.type.dtype.numpy))
        work = sum(n * (evaluate(s.kernel.flops, values) + evaluate(s.kernel.bytes, values)) for s, n in plan.steps())
        numbers = [values[name] for name in plan.symbols]
        return cls(
            ffi.new("int64_t[]", numbers),
            ffi.new("int64_t[]", list(offsets) or [0]),
            total,
            values["threads"],
            work > LONG,
            tuple(aliases),
            tuple(fresh),
        )

    def outputs(self, inputs: Sequence[Array]) -> list[Array]:
        """Arrays for the results; one that aliases an input is that input."""
        found: list[Any] = list(map(inputs.__getitem__, self.aliases)) if inputs else [None] * len(self.aliases)
        for number, shape, dtype in self.fresh:
            found[number] = np.empty(shape, dtype)
        return found


class Frame:
    """The arena and the argument structures of one run at a time."""

    __slots__ = ("ffi", "args", "error", "arena", "layout", "_inputs", "_outputs", "_seen")

    def __init__(self, ffi: Any, plan: Plan, params: Any) -> None:
        self.ffi = ffi
        self.args, self.error = ffi.new("mp_args *"), ffi.new("mp_error *")
        self.arena: Array = aligned((0,), np.uint8)
        self.layout: Layout | None = None
        count = len(plan.graph.inputs)
        self._inputs, self._outputs = ffi.new("void *[]", count + 1), ffi.new("void *[]", len(plan.outputs) + 1)
        # The arrays whose addresses are in the table of inputs.
        self._seen: list[weakref.ref[Any]] = [weakref.ref(_Nothing())] * count
        self.args.inputs, self.args.outputs, self.args.params = self._inputs, self._outputs, params

    def fill(self, layout: Layout, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Points to everything that this run reads and writes."""
        if layout is not self.layout:
            self._arrange(layout)
        if not all(map(is_, map(_referent, self._seen), inputs)):
            for number, a in enumerate(inputs):
                if self._seen[number]() is not a:
                    self._inputs[number] = pointer(self.ffi, a)
                    self._seen[number] = weakref.ref(a)
        for number, _, _ in layout.fresh:
            self._outputs[number] = pointer(self.ffi, outputs[number])

    def _arrange(self, layout: Layout) -> None:
        args = self.args
        if self.arena.nbytes < layout.total:
            self.arena = aligned((layout.total,), np.uint8)
        args.arena = self.ffi.cast("char *", address(self.arena))
        args.symbols, args.offsets, args.threads = layout.symbols, layout.offsets, layout.threads
        self.layout = layout  # last: a frame that was left half filled is filled again
