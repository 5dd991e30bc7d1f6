"""What a kernel may read before the kernels in front of it are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monoplan.codegen.cuda.schedule import CudaExperts, RowSchedule
from monoplan.codegen.kernels import Attention, Experts, Heads, Kernel, KVUpdate, Latent, Linear, Norm, Reduce, Route
from monoplan.codegen.operands import Operand
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, equal, symbols_of
from monoplan.ir.types import product

if TYPE_CHECKING:
    from monoplan.codegen.plan import Plan

# Their kernels let the next one start before they are done.
OVERLAPPED = (Linear, Attention, Experts, Norm, Reduce, Route)


def stable_past(plan: Plan, k: Attention) -> bool:
    """Whether attention may read `past` and earlier keys before the kernels in front of it are done.

    They must be as they were when the plan began: `past` an input that no step writes, the caches written only behind
    that very length.
    """
    past = k.operand("past").view.buffer
    if past.kind != "input":
        return False
    caches = {(b.table_kind or b.kind, b.table or b.index) for b in (k.operand(n).view.buffer for n in ("k", "v"))}
    for step, _ in plan.steps():
        other = step.kernel
        for o in other.writes:
            b = o.view.buffer
            if _overlap(b, past):
                return False
            if (b.table_kind or b.kind, b.table or b.index) in caches:
                writes_rows = isinstance(other, Linear | KVUpdate | Heads | Latent | Experts)
                if not writes_rows or other.operand("lengths").view.buffer is not past:
                    return False
    return all(kind == "input" for kind, _ in caches)


def settled(plan: Plan, k: Kernel, operand: Operand, rows: Dim) -> bool:
    """Whether an operand has its value before the kernels in front of a step with `rows` rows, which are one, are done.

    It is a weight, an input that no step writes, or was written before a kernel that is over: one that does not let the
    next kernel start early.
    """
    buffer = operand.view.buffer
    if "param" in (buffer.kind, buffer.table_kind) or operand.view.is_virtual:
        return True
    steps = [step for step, _ in plan.steps()]
    writers = [s.number for s in steps if any(_overlap(o.view.buffer, buffer) for o in s.kernel.writes)]
    if buffer.kind == "input":
        return not writers
    between = [s.kernel for s in steps if max(writers, default=k.step) < s.number < k.step]
    return any(not isinstance(other, OVERLAPPED) and _runs_for(other, rows) for other in between)


def chosen_early(plan: Plan, k: Experts) -> bool:
    """Whether the choices of experts are there before the step in front is done, where both have few pairs.

    That step is a product with the same choices: it lets the next one start when they are there (RowSchedule.late).
    """
    steps = [step for step, _ in plan.steps()]
    (at,) = [i for i, step in enumerate(steps) if step.number == k.step]
    front, way = (steps[at - 1].kernel, steps[at - 1].schedule) if at else (None, None)
    if not isinstance(front, Experts) or not isinstance(way, CudaExperts) or not isinstance(way.row, RowSchedule):
        return False
    ids = k.operand("ids").view
    same = equal(front.rows, k.rows) and front.choices == k.choices and front.operand("ids").view.is_same(ids)
    return same and not any(_overlap(o.view.buffer, ids.buffer) for o in front.writes)


def _overlap(a: Buffer, b: Buffer) -> bool:
    """Whether two buffers may have memory in common."""
    if a.root is b.root:
        return True
    inputs = [set(c.table if c.table_kind == "input" else (c.index,) if c.kind == "input" else ()) for c in (a, b)]
    return bool(inputs[0] & inputs[1])


def _runs_for(k: Kernel, rows: Dim) -> bool:
    """Whether a kernel has something to write where `rows` is 1, and is launched: no size of it is another symbol's."""
    return any(symbols_of(product(o.shape)) <= symbols_of(rows) for o in k.writes)
