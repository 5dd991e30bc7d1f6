"""The arena: buffers that are never alive together share a slot; sizes may be symbolic, so slots are sized when run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monoplan.codegen.kernels import Conv, Kernel, Linear, Norm, Pointwise
from monoplan.codegen.lower.lowerer import Loop
from monoplan.codegen.slots import slot_offsets
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, equal, evaluate, same_dims, symbols_of
from monoplan.ir.lazy_dataclass import dataclass

_TYPICAL = 64  # the value of every symbol when slots are compared for fit


@dataclass(frozen=True)
class Lifetime:
    """The first and last step that touch a buffer."""

    buffer: Buffer
    first: int
    last: int
    may_replace: tuple[Buffer, ...] = ()  # buffers read by the first step whose place it may write over


@dataclass(frozen=True)
class Arena:
    """Slots, each as large as the largest of its buffers, one after another."""

    slots: tuple[tuple[Dim, ...], ...]  # sizes in bytes of the buffers that share each slot
    slot_of: Mapping[Buffer, int]
    lifetimes: tuple[Lifetime, ...]

    def layout(self, symbols: Mapping[str, int]) -> tuple[list[int], int]:
        """Byte offset of each slot and the total, for these values of the symbols."""
        return slot_offsets(self.slots, symbols)

    def unshared(self, symbols: Mapping[str, int]) -> int:
        """Bytes without any sharing, for comparison."""
        return sum(evaluate(_bytes(x.buffer), symbols) for x in self.lifetimes)


def plan_arena(items: Sequence[Kernel | Loop]) -> Arena:
    """Slots by liveness: a buffer takes the free slot that fits best, or opens a new one."""
    lifetimes = find_lifetimes(items)
    slots: list[list[Dim]] = []
    slot_of: dict[Buffer, int] = {}
    busy: dict[int, Lifetime] = {}
    for life in sorted(lifetimes, key=lambda x: (x.first, x.buffer.kind, x.buffer.name)):
        busy = {slot: other for slot, other in busy.items() if other.last >= life.first}
        size = _bytes(life.buffer)
        free = [s for s in range(len(slots)) if s not in busy or _gives_way(busy[s], life)]
        if free:
            slot = min(free, key=lambda s: (_misfit(slots[s], size), s))
        else:
            slot = len(slots)
            slots.append([])
        if not any(equal(size, other) for other in slots[slot]):
            slots[slot].append(size)
        slot_of[life.buffer] = slot
        busy[slot] = life
    return Arena(tuple(map(tuple, slots)), slot_of, tuple(lifetimes))


def _gives_way(old: Lifetime, new: Lifetime) -> bool:
    """Whether the step that makes `new` is the last to read `old`, and may write over it."""
    return old.last == new.first and old.buffer in new.may_replace


def find_lifetimes(items: Sequence[Kernel | Loop]) -> list[Lifetime]:
    """First and last use of every arena buffer; one that crosses the edge of a loop lives through all of it."""
    uses: dict[Buffer, list[int]] = {}
    loops: list[tuple[int, int]] = []
    kernels: list[Kernel] = []

    def walk(part: Sequence[Kernel | Loop]) -> None:
        for item in part:
            if isinstance(item, Loop):
                start = len(kernels)
                walk(item.items)
                loops.append((start, len(kernels) - 1))
                continue
            for o in (*item.operands, *item.scratch):
                if (buffer := o.view.buffer.root).kind in ("arena", "scratch"):
                    uses.setdefault(buffer, []).append(len(kernels))
            kernels.append(item)

    walk(items)
    found = []
    for buffer, steps in uses.items():
        first, last = min(steps), max(steps)
        for start, end in loops:
            crosses = first < start <= last or first <= end < last or _carried(buffer, kernels, start, end)
            if crosses and not (last < start or first > end):
                first, last = min(first, start), max(last, end)
        found.append(Lifetime(buffer, first, last, _replaceable(buffer, kernels[first])))
    return found


def _carried(buffer: Buffer, kernels: Sequence[Kernel], start: int, end: int) -> bool:
    """Whether a turn of the loop reads the buffer before it writes it: its contents come from the turn before."""
    for k in kernels[start : end + 1]:
        if any(o.view.buffer is buffer for o in k.reads):
            return True
        if any(o.view.buffer is buffer for o in (*k.writes, *k.scratch)):
            return False
    return False


def _replaceable(buffer: Buffer, kernel: Kernel) -> tuple[Buffer, ...]:
    """Operands of the kernel that makes `buffer` which it reads element by element, just before it writes there."""
    if not isinstance(kernel, Pointwise | Norm | Linear | Conv):
        return ()
    out = next((o for o in kernel.writes if o.view.buffer is buffer), None)
    if out is None or not out.view.is_whole:
        return ()
    names = "e" if isinstance(kernel, Linear | Conv) else "ex"
    return tuple(
        o.view.buffer
        for o in kernel.reads
        if o.name[0] in names
        and (o.name == "x" or o.name[1:].isdigit())
        and o.view.is_whole
        and o.dtype.itemsize == out.dtype.itemsize
        and same_dims(o.view.strides, out.view.strides)
        and all(p is o or p.view.buffer is not o.view.buffer for p in kernel.reads)
    )


def _bytes(b: Buffer) -> Dim:
    return b.size * b.dtype.itemsize


def _misfit(sizes: Sequence[Dim], size: Dim) -> tuple[int, int]:
    """How badly a buffer fits a slot: 0 if its size is there already, else the difference at typical sizes."""
    if any(equal(size, s) for s in sizes):
        return (0, 0)

    def typical(d: Dim) -> int:
        return evaluate(d, dict.fromkeys(symbols_of(d), _TYPICAL))

    return (1, abs(max(map(typical, sizes)) - typical(size)))
