"""The SSA graph: frozen values, ops and graphs. A pass makes a new Graph; nothing is changed in place."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from monoplan.ir.dims import symbols_of
from monoplan.ir.errors import printable
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import NESTED, OpDef
from monoplan.ir.types import TensorType

_LIBRARY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where the package lies
_ROOTS = ("pyproject.toml", "setup.py", ".git")  # a folder with one of these is a project


@functools.cache
def _from_project(file: str, here: str) -> str:
    """A path from `monoplan/` on for files of the library; else relative to the nearest project, or to here."""
    if file.startswith(os.path.join(_LIBRARY, "monoplan", "")):
        return os.path.relpath(file, _LIBRARY).replace(os.sep, "/")
    folder = os.path.dirname(file)
    while os.path.dirname(folder) != folder:
        if folder == here or any(os.path.exists(os.path.join(folder, name)) for name in _ROOTS):
            return os.path.relpath(file, folder).replace(os.sep, "/")
        folder = os.path.dirname(folder)
    return file


@dataclass(frozen=True, slots=True)
class Loc:
    """Where an op comes from: the module path and the user's file and line."""

    path: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return printable(f"{place} in {self.path}" if place and self.path else place or self.path)

    @property
    def short(self) -> Loc:
        """The same with the file as seen from its project: for IR and sources, which should not depend on machines."""
        return Loc(self.path, _from_project(self.file, os.getcwd()), self.line) if os.path.isabs(self.file) else self


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """One SSA value. Identity is the object: two values with equal fields are different values."""

    type: TensorType
    name: str

    def __str__(self) -> str:
        return f"%{self.name}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One application of an OpDef. Attributes are complete: defaults are filled in when it is built."""

    opdef: OpDef
    operands: tuple[Value | None, ...]
    attrs: Mapping[str, Any]
    results: tuple[Value, ...]
    loc: Loc = Loc()

    @property
    def name(self) -> str:
        return self.opdef.name

    @property
    def result(self) -> Value:
        """The only result."""
        (value,) = self.results
        return value

    @property
    def reads(self) -> tuple[Value, ...]:
        """Operands that are present (optional ones may be None)."""
        operands = self.operands
        return tuple(v for v in operands if v is not None) if None in operands else operands  # type: ignore[return-value]

    def operand(self, name: str) -> Value | None:
        """The operand of that name, as the op's definition calls it."""
        return self.operands[self.opdef.operand_names.index(name)]

    def given(self, operand: str | int) -> Value:
        """An operand that must be there, by its name or its place."""
        v = self.operand(operand) if isinstance(operand, str) else self.operands[operand]
        assert v is not None
        return v

    def __repr__(self) -> str:
        return f"<{self.name} -> {', '.join(map(str, self.results))}>"


@dataclass(frozen=True, slots=True)
class Param:
    """A value from the model's state: a parameter, a buffer or a constant, by its state-dict path."""

    value: Value
    path: str


@dataclass(frozen=True, slots=True)
class Graph:
    """Ops in topological order. `setup` holds ops over params only: they run once, at load.

    `writes` pairs an input with the output that replaces its contents after the call (a cache that forward
    updates).
    """

    name: str
    inputs: tuple[Value, ...]
    params: tuple[Param, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    setup: tuple[Op, ...] = field(default=())
    writes: tuple[tuple[int, int], ...] = field(default=())

    def replace(self, **changes: Any) -> Graph:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def values(self) -> Iterator[Value]:
        """Every value, in the order of definition."""
        yield from self.inputs
        yield from (p.value for p in self.params)
        for op in (*self.setup, *self.ops):
            yield from op.results

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the symbolic dimensions, in the order of first appearance in the inputs."""
        found: dict[str, None] = {}
        for v in self.inputs:
            for d in v.type.shape:
                found.update(dict.fromkeys(sorted(symbols_of(d))))
        return tuple(found)

    def __str__(self) -> str:
        from monoplan.ir.printer import print_graph

        return print_graph(self)


def definitions(graph: Graph) -> dict[Value, Op]:
    """The op that defines each value."""
    return {r: op for op in (*graph.setup, *graph.ops) for r in op.results}


def bodies(op: Op) -> list[Graph]:
    """The graphs inside of an op: that of rolled layers, or of a scan."""
    return [v for v in op.attrs.values() if isinstance(v, Graph)] if op.opdef.kind in NESTED else []


def all_ops(graph: Graph) -> Iterator[Op]:
    """Every op, each followed by those of its body."""
    for op in (*graph.setup, *graph.ops):
        yield op
        for body in bodies(op):
            yield from all_ops(body)


def readers(graph: Graph) -> dict[Value, list[Op | None]]:
    """The ops that read each value, once per use; None stands for the graph's outputs."""
    found: dict[Value, list[Op | None]] = {v: [] for v in graph.values}
    for op in (*graph.setup, *graph.ops):
        for v in op.reads:
            found[v].append(op)
    for v in graph.outputs:
        found[v].append(None)
    return found


def to_networkx(graph: Graph) -> Any:
    """A networkx.DiGraph over ops (and inputs, params, outputs) with `label` attributes."""
    import networkx as nx

    dag = nx.DiGraph()
    where: dict[Value, object] = {}
    for v in (*graph.inputs, *(p.value for p in graph.params)):
        dag.add_node(v, label=f"{v} : {v.type}", kind="input")
        where[v] = v
    for op in (*graph.setup, *graph.ops):
        dag.add_node(op, label=op.name, kind="op")
        for r in op.results:
            where[r] = op
        for v in op.reads:
            dag.add_edge(where[v], op, value=v)
    for i, v in enumerate(graph.outputs):
        dag.add_node(("output", i), label=f"return {v}", kind="output")
        dag.add_edge(where[v], ("output", i), value=v)
    return dag


def to_dot(graph: Graph) -> str:
    """The graph in Graphviz DOT, deterministic."""
    dag = to_networkx(graph)
    ids = {node: f"n{i}" for i, node in enumerate(dag.nodes)}
    shape = {"op": "box", "input": "ellipse", "output": "oval"}
    quote = _quote
    lines = [f"digraph {quote(graph.name)} {{", "  rankdir=TB; node [fontname=monospace];"]
    for node, data in dag.nodes(data=True):
        lines.append(f"  {ids[node]} [label={quote(data['label'])}, shape={shape[data['kind']]}];")
    for a, b, data in dag.edges(data=True):
        lines.append(f"  {ids[a]} -> {ids[b]} [label={quote(str(data['value'].type))}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
