"""A graph by itself, ready for verify and bisect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.driver import build_graph_executable
from monoplan.inspect.verify import Subject
from monoplan.ir.graph import Graph
from monoplan.ir.interpreter import bind_symbols
from monoplan.passes.manager import Stage

Array = np.ndarray[Any, Any]


def graph_subject(
    graph: Graph, inputs: Sequence[Array], params: Mapping[str, Array] | None = None, executable: Any = None
) -> Subject:
    """The graph compiled as it is: for the CPU unless an executable is given."""
    arrays = dict(params or {})
    made = build_graph_executable(graph, arrays).executable if executable is None else executable
    stage = Stage("trace", "the graph as it was given", graph, 0, 0.0, (), True)
    symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
    names = [str(v) for v in graph.outputs]
    return Subject(graph.name, made.plan.target.name, [stage], made, arrays.__getitem__, list(inputs), symbols, names)
