"""Weights as a plan wants them: setup ops run once, then each param is packed for its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from monoplan.codegen.lower import ParamUse
from monoplan.codegen.schedule_linear import parse_layout
from monoplan.ir.arrays import aligned, drop_mapped_pages
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import run_op
from monoplan.runtime.packing import converted, transpose_panels
from monoplan.runtime.threads import default_threads

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
WORKERS = 4


def prepare(
    graph: Graph, uses: Sequence[ParamUse], source: Callable[[str], Array], progress: Progress | None = None
) -> list[Array]:
    """The plan's params in order. `source` gives a tensor by its path; only what few params need is held at a time."""
    paths = {p.value: p.path for p in graph.params}
    types = {p.value: p.value.type for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}
    shared: dict[Value, Array] = {}

    def get(value: Value) -> Array:
        if value in paths:
            array = source(paths[value])
            wanted = types[value].dtype.numpy
            return converted(array, wanted)
        if value in shared:
            return shared[value]
        return _run_setup(made[value], value, get)

    counts: dict[Value, int] = {}
    for u in uses:
        counts[u.value] = counts.get(u.value, 0) + 1
    one_at_a_time = threading.Lock()

    def pack_one(u: ParamUse) -> Array:
        if counts[u.value] > 1 and u.value in made:
            with one_at_a_time:  # several params are packed from it: made once
                array = shared[u.value] = get(u.value)
        else:
            array = get(u.value)
        packed = pack(array, u.layout)
        if packed is not array:
            drop_mapped_pages(array)
        return packed

    # Reading, converting and transposing let go of Python's lock. Few at a time: each holds a tensor meanwhile.
    result = []
    with ThreadPoolExecutor(min(WORKERS, default_threads().count)) as pool:
        for packed in pool.map(pack_one, uses):
            result.append(packed)
            if progress is not None:
                progress(len(result), len(uses))
    return result


def _run_setup(op: Op, value: Value, get: Callable[[Value], Array]) -> Array:
    env: dict[Value, Array] = {v: get(v) for v in op.reads}
    run_op(op, env, {}, exact=False)
    made = env[value]
    for v in op.reads:
        if env[v] is not made:
            drop_mapped_pages(env[v])
    return made


def pack(w: Array, layout: str) -> Array:
    """A weight [rows, depth] in its kernel's layout: groups of panels, each panel [depth][columns].

    Gated: the first half of each panel are gates, the second what they let through.
    """
    if layout == "rows":
        return np.require(w, None, ["C", "A"])  # aligned: a file mapped at an odd offset is not
    panel, panels, group = parse_layout(layout)
    depth, each = w.shape[1], panel * panels
    if group.startswith("heads"):
        parts, each = [w.reshape(-1, int(group.removeprefix("heads")), depth)], 1
    elif group == "gated":
        parts, each = [w[: len(w) // 2], w[len(w) // 2 :]], each // 2
    else:
        parts = [w]
    groups = -(-len(parts[0]) // each)
    out = aligned((groups, panels, depth, panel), w.dtype)
    for g in range(groups):
        rows = [_filled(p[g * each : (g + 1) * each].reshape(-1, depth), panels * panel // len(parts)) for p in parts]
        transpose_panels(_side_by_side([r.reshape(panels, -1, depth) for r in rows]), out[g], layout)
    return out


def _side_by_side(parts: Sequence[Array]) -> Array:
    """Parts [panels, columns, depth] joined to whole panels."""
    if len(parts) == 1:
        return parts[0]
    raw = np.concatenate([p.view(f"u{p.dtype.itemsize}") for p in parts], 1)  # bf16 is slow to copy as itself
    return raw.view(parts[0].dtype)


def _filled(rows: Array, count: int) -> Array:
    """Rows with zeros behind them: the last group, or a head that is smaller than its panels."""
    if len(rows) == count:
        return rows
    padded = np.zeros((count, rows.shape[1]), rows.dtype)
    padded[: len(rows)] = rows
    return padded


def total_bytes(arrays: Mapping[str, Array] | Sequence[Array]) -> int:
    """Bytes of several arrays."""
    items = arrays.values() if isinstance(arrays, Mapping) else arrays
    return sum(a.nbytes for a in items)
