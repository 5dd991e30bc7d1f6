"""Weights as a plan wants them: setup ops run once, then each param is packed for its kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.codegen.lower import ParamUse
from monoplan.codegen.schedule import parse_layout
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import run_op
from monoplan.ir.types import bf16

Array = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]


def prepare(
    graph: Graph, uses: Sequence[ParamUse], source: Callable[[str], Array], progress: Progress | None = None
) -> list[Array]:
    """The plan's params in order. `source` gives a tensor by its path; only what one param needs is held at a time."""
    paths = {p.value: p.path for p in graph.params}
    types = {p.value: p.value.type for p in graph.params}
    made = {r: op for op in graph.setup for r in op.results}
    shared: dict[Value, Array] = {}

    def get(value: Value) -> Array:
        if value in paths:
            array = source(paths[value])
            wanted = types[value].dtype.numpy
            return array if array.dtype == wanted else array.astype(wanted)
        if value in shared:
            return shared[value]
        return _run_setup(made[value], value, get)

    counts: dict[Value, int] = {}
    for u in uses:
        counts[u.value] = counts.get(u.value, 0) + 1
    result = []
    for i, u in enumerate(uses):
        array = get(u.value)
        if counts[u.value] > 1 and u.value in made:
            shared[u.value] = array
        result.append(pack(array, u.layout))
        if progress is not None:
            progress(i + 1, len(uses))
    return result


def _run_setup(op: Op, value: Value, get: Callable[[Value], Array]) -> Array:
    env: dict[Value, Array] = {v: get(v) for v in op.reads}
    run_op(op, env, {}, exact=False)
    return env[value]


def pack(w: Array, layout: str) -> Array:
    """A weight [rows, depth] in its kernel's layout: groups of panels, each panel [depth][columns]."""
    if layout == "rows":
        return np.ascontiguousarray(w)
    panel, panels, group = parse_layout(layout)
    parts = [w]
    if group == "gated":
        half = len(w) // 2
        parts = [w[:half], w[half:]]
    each = panel * panels // len(parts)
    if group.startswith("heads"):
        dim = int(group.removeprefix("heads"))
        parts = [w.reshape(-1, dim, w.shape[1])]
    depth = w.shape[1]
    groups = parts[0].shape[0] if group.startswith("heads") else -(-len(parts[0]) // each)
    out = aligned((groups, len(parts), panels // len(parts), depth, panel), w.dtype)
    # bf16 columns lie beside those half a panel away, so that one load, a shift and a mask give two vectors.
    order = np.arange(panel)
    if w.dtype == bf16.numpy:
        order = order.reshape(2, -1).T.reshape(-1)
    for i, part in enumerate(parts):
        into = out[:, i]
        for g in range(groups):
            rows = part[g] if group.startswith("heads") else part[g * each : (g + 1) * each]
            if len(rows) == each:
                into[g] = rows.reshape(-1, panel, depth)[:, order].swapaxes(1, 2)
            else:  # the last group: what is missing is 0
                padded = np.zeros((each, depth), w.dtype)
                padded[: len(rows)] = rows
                into[g] = padded.reshape(-1, panel, depth)[:, order].swapaxes(1, 2)
    return out


def aligned(shape: tuple[int, ...], dtype: Any, align: int = 64) -> Array:
    """An uninitialised array whose data begins at a multiple of `align` bytes."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + align, np.uint8)
    start = -address(raw) % align
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def address(a: Array) -> int:
    """Where an array's data begins."""
    return int(a.__array_interface__["data"][0])


def total_bytes(arrays: Mapping[str, Array] | Sequence[Array]) -> int:
    """Bytes of several arrays."""
    items = arrays.values() if isinstance(arrays, Mapping) else arrays
    return sum(a.nbytes for a in items)
