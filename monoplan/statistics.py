"""How large the numbers are that a model multiplies with each column of its weights, measured on a text.

`monoplan quantize --statistics FILE` weighs errors by it: a column that meets large numbers is rounded with more care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from monoplan.driver import build_graph_executable
from monoplan.frontend.specs import spec
from monoplan.frontend.tracer import trace
from monoplan.ir.builder import Builder
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.ops.elementwise import mul
from monoplan.ir.ops.reduce import mean
from monoplan.ir.types import Array

WINDOW = 512  # tokens that see each other


def column_squares(
    model: Any, ids: list[int], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Array]:
    """The mean square of what each column of a weight is multiplied with, over the tokens of a text, by the weight's
    path. The model must be in float32."""
    window = min(WINDOW, model.config.max_position_embeddings)
    if len(ids) < 2:
        raise ArgumentError("a text of less than two tokens says nothing about a model")
    found = trace(model, spec(1, "tokens", dtype="int64"), all_logits=True)
    graph, paths = _with_squares(found.graph)
    run = build_graph_executable(graph, {p.path: np.asarray(found.params[p.path].numpy()) for p in graph.params})
    sums: list[Any] = [0.0] * len(paths)
    for begin in range(0, len(ids), window):
        part = np.array([ids[begin : begin + window]], np.int64)
        for number, squares in enumerate(run([part])):
            sums[number] += squares.astype(np.float64) * part.size
        progress(begin + part.size, len(ids))
    return {path: total / len(ids) for path, total in zip(paths, sums, strict=True)}


def _with_squares(graph: Graph) -> tuple[Graph, list[str]]:
    """A graph whose outputs are the mean squares of what goes into each product with a weight, and their paths."""
    paths = {p.value: p.path for p in graph.params}
    entering: dict[str, Value] = {}
    for op in graph.ops:
        x, weight = op.operands[:2] if op.name == "linear" else (None, None)
        if x is not None and weight in paths:
            entering[paths[weight]] = x
    builder = Builder(v.name for v in graph.values)
    with builder:
        means = {x: mean(mul(x, x), axes=tuple(range(x.type.rank - 1))) for x in dict.fromkeys(entering.values())}
    outputs = tuple(means[x] for x in entering.values())
    ops = tuple(_needed((*graph.ops, *builder.ops), set(outputs)))[::-1]
    used = {v for op in ops for v in op.operands}
    params = tuple(p for p in graph.params if p.value in used)
    return graph.replace(ops=ops, params=params, outputs=outputs, writes=()), list(entering)


def _needed(ops: tuple[Op, ...], wanted: set[Any]) -> Iterator[Op]:
    """The ops that values come from, last first."""
    for op in reversed(ops):
        if not wanted.isdisjoint(op.results):
            wanted.update(op.operands)
            yield op
