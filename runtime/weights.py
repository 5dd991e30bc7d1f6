"""Weights as a plan wants them: setup ops run once, then each param is packed for its kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from monoplan.codegen.lower import ParamUse
from monoplan.ir.arrays import drop_mapped_pages
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.interpreter import run_op
from monoplan.runtime.packing import converted, pack
from monoplan.runtime.pages import Pages
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
    pages = Pages(sum(int(u.value.type.size) * u.value.type.dtype.itemsize for u in uses))

    def pack_one(u: ParamUse) -> Array:
        if counts[u.value] > 1 and u.value in made:
            with one_at_a_time:  # several params are packed from it: made once
                array = shared[u.value] = get(u.value)
        else:
            array = get(u.value)
        packed = pack(array, u.layout, pages.take)
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
