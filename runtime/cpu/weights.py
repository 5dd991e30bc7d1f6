"""Weights as a plan wants them: setup ops run once, then each param is packed for its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monoplan.codegen.lower.lowerer import ParamUse
from monoplan.ir.arrays import Part
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import run_op
from monoplan.runtime.build.background import side_by_side
from monoplan.runtime.cpu.packing import converted, pack
from monoplan.runtime.cpu.pages import Pages
from monoplan.runtime.machine.threads import default_threads

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
WORKERS = 4


@dataclass(frozen=True)
class Source:
    """Tensors by their paths, to make weights of."""

    read: Callable[[str, Part | None], Array]  # a tensor, or a part of it
    gives_away: Callable[[str], bool]  # whether what is read is new each time; else a plan that keeps it keeps a copy

    @classmethod
    def of(cls, get: Callable[[str], Array]) -> Source:
        """Arrays that are somebody's."""
        return cls(lambda path, part: get(path) if part is None else part.cut(get(path)), lambda path: False)


def prepare(
    graph: Graph,
    uses: Sequence[ParamUse],
    source: Source | Callable[[str], Array],
    progress: Progress | None = None,
    *,
    keep: bool = True,
) -> list[Array]:
    """The plan's params in order, in memory of their own (keep=False: some may be memory of the source's).

    `source` gives a tensor by its path; only what few params need is held at a time.
    """
    tensors = source if isinstance(source, Source) else Source.of(source)
    paths = {p.value: p.path for p in graph.params}
    types = {p.value: p.value.type for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}
    shared: dict[Value, Array] = {}

    def get(value: Value, lent: list[Array], part: Part | None = None) -> Array:
        if value in paths:
            array = tensors.read(paths[value], part)
            if not tensors.gives_away(paths[value]):
                lent.append(array)
            return converted(array, types[value].dtype.numpy)
        if value in shared:
            return shared[value]
        op = made[value]
        if (part := _slice_of(op)) is not None and op.reads[0] in paths:
            return get(op.reads[0], lent, part)  # only that part is read
        env: dict[Value, Array] = {v: get(v, lent) for v in op.reads}
        run_op(op, env, {}, exact=False)
        return env[value]

    counts: dict[Value, int] = {}
    for u in uses:
        counts[u.value] = counts.get(u.value, 0) + 1
    one_at_a_time = threading.Lock()
    pages = Pages(sum(int(u.value.type.size) * u.value.type.dtype.itemsize for u in uses))

    def pack_one(u: ParamUse) -> Array:
        lent: list[Array] = []
        if counts[u.value] > 1 and u.value in made:
            with one_at_a_time:  # several params are packed from it: made once
                if u.value not in shared:
                    shared[u.value] = _owned(get(u.value, lent), lent, pages) if keep else get(u.value, lent)
                array = shared[u.value]
        else:
            array = get(u.value, lent)
        packed = pack(array, u.layout, pages.take)
        return _owned(packed, lent, pages) if keep else packed

    # Reading, converting and transposing let go of Python's lock. Few at a time: each holds a tensor meanwhile.
    return side_by_side(pack_one, uses, min(WORKERS, default_threads().count), progress)


def _slice_of(op: Op) -> Part | None:
    """The part of its operand that an op takes, where it does nothing else."""
    if op.name != "slice" or op.attrs["step"] != 1:
        return None
    axis, start, length = (op.attrs[name] for name in ("axis", "start", "length"))
    return Part(axis % op.reads[0].type.rank, start, length)


def _owned(array: Array, lent: Sequence[Array], pages: Pages) -> Array:
    """The array, or a copy if it is memory of one that was lent."""
    if not any(np.may_share_memory(array, a) for a in lent):
        return array
    copy = pages.take(array.shape, array.dtype)
    copy[...] = array
    return copy
