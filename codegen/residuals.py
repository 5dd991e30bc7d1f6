"""Residual streams in place: fewer buffers, less memory traffic."""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.kernels import Kernel, Linear
from monoplan.codegen.lower.lowerer import Loop
from monoplan.codegen.moves import Items
from monoplan.codegen.views import Buffer


def residuals(items: Items) -> dict[Buffer, Buffer]:
    """Buffers of rolled layers that may be one: each sum of a residual stream is written over the value it adds to.

    In a turn `y = x + f(…)` is followed by `x = y + g(…)`: with y in x's place a sum is read and written in one place
    of the caches, and a library's product can add into it. That holds when nobody reads x between the two, and nobody
    y after them.
    """
    new: dict[Buffer, Buffer] = {}
    for item in items:
        kernels = [k for k in item.items if isinstance(k, Kernel)] if isinstance(item, Loop) else []
        for n in range(len(kernels)):
            pair = _residual(kernels, n)
            if pair is not None and not set(pair) & {*new, *new.values()}:
                new[pair[0]] = pair[1]
    return new


def _residual(kernels: Sequence[Kernel], n: int) -> tuple[Buffer, Buffer] | None:
    """The buffer that product n writes and the one whose place it may take."""
    k = kernels[n]
    if not isinstance(k, Linear) or k.epilogue != "pointwise" or not k.has("e0"):
        return None
    y, x = k.operand("y").view, k.operand("e0").view
    if any(o.view.buffer is x.buffer for o in k.reads if o.name != "e0"):  # all of it is read while y is written
        return None
    same = y.is_whole and x.is_whole and x.dtype == y.dtype and len(x.strides) == len(y.strides)
    if not same or {x.buffer.kind, y.buffer.kind} != {"arena"} or x.buffer is y.buffer:
        return None
    for other in kernels[n + 1 :]:
        if any(o.view.buffer is x.buffer for o in (*other.reads, *other.scratch)):
            return None
        if any(o.view.buffer is x.buffer for o in other.writes):
            # the kernel that makes the next x reads y element by element, and is the last to do so
            last = kernels.index(other)
            reads = [o for o in other.reads if o.view.buffer is y.buffer]
            adds = isinstance(other, Linear) and all(o.name == "e0" and o.view.is_whole for o in reads)
            later = any(o.view.buffer is y.buffer for q in kernels[last + 1 :] for o in (*q.operands, *q.scratch))
            earlier = any(o.view.buffer is y.buffer for q in kernels[:n] for o in (*q.operands, *q.scratch))
            return (y.buffer, x.buffer) if adds and not later and not earlier else None
    return None
