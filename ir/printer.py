"""Graph to text: one line per op, deterministic; the parser reads it back."""

from __future__ import annotations

import json
import math
from typing import Any

from monoplan.ir.dims import Expr
from monoplan.ir.graph import Graph, Loc, Op
from monoplan.ir.types import DType


def print_graph(graph: Graph, *, locs: bool = False) -> str:
    """The text of a graph; with `locs`, each line ends with its module path and the user's file and line."""
    return "\n".join(_graph_lines(graph, locs)) + "\n"


def print_op(op: Op, *, locs: bool = False) -> str:
    """The one line of an op (without the body of a repeat)."""
    results = ", ".join(map(str, op.results))
    last = max((i for i, v in enumerate(op.operands) if v is not None), default=-1)  # absent ones behind it go unsaid
    operands = ", ".join("_" if v is None else str(v) for v in op.operands[: last + 1])
    attrs = ", ".join(f"{k}={format_attr(v)}" for k, v in op.attrs.items() if not isinstance(v, Graph))
    text = f"{results} = {op.name}({operands})" + (f" {{{attrs}}}" if attrs else "")
    text += " : " + ", ".join(str(r.type) for r in op.results)
    return text + _loc_suffix(op.loc) if locs else text


def format_attr(v: Any) -> str:
    """An attribute's text: Python literals, bare names for dtypes, bare expressions for dims."""
    if isinstance(v, bool) or v is None:
        return str(v)
    if isinstance(v, float):
        return repr(v) if math.isfinite(v) else ("nan" if math.isnan(v) else "inf" if v > 0 else "-inf")
    if isinstance(v, tuple):
        inner = ", ".join(format_attr(x) for x in v)
        return f"({inner},)" if len(v) == 1 else f"({inner})"
    if isinstance(v, str):
        return json.dumps(v)
    if isinstance(v, int | Expr | DType):
        return str(v)
    raise TypeError(f"an attribute can't be a {type(v).__name__}: {v!r}")


def _graph_lines(graph: Graph, locs: bool) -> list[str]:
    signature = ", ".join(f"{v}: {v.type}" for v in graph.inputs)
    lines = [f"graph {graph.name}({signature}) {{"]
    for p in graph.params:
        lines.append(f"  param {p.value}: {p.value.type} = {json.dumps(p.path)}")
    for op in graph.setup:
        lines += _op_lines(op, locs, "setup ")
    for op in graph.ops:
        lines += _op_lines(op, locs, "")
    target = {j: graph.inputs[i] for i, j in graph.writes}
    outputs = (f"{v} -> {target[j]}" if j in target else str(v) for j, v in enumerate(graph.outputs))
    lines.append("  return " + ", ".join(outputs))
    lines.append("}")
    return lines


def _op_lines(op: Op, locs: bool, prefix: str) -> list[str]:
    lines = [f"  {prefix}{print_op(op, locs=locs)}"]
    for v in op.attrs.values():
        if isinstance(v, Graph):
            lines += ["  " + "  " + line for line in _graph_lines(v, locs)]
    return lines


def _loc_suffix(loc: Loc) -> str:
    if loc == Loc():
        return ""
    return f" @ {json.dumps(loc.path)} {json.dumps(loc.short.file)}:{loc.line}"
