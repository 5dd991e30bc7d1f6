"""Inputs for a graph whose user gave none: random floats, and integers that the graph can bear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from monoplan.ir.dims import Dim, evaluate, symbols_of
from monoplan.ir.errors import ArgumentError
from monoplan.ir.graph import Graph, Value
from monoplan.ir.types import TensorType

Array = np.ndarray[Any, Any]

SIZES = {"batch": 2, "seq": 5}  # of symbols, unless the user says otherwise
OTHER = 4
# operand that holds indices -> the operand and axis whose size they must stay below
_INDEXED = {"ids": ("weight", 0), "index": ("x", None), "rows": ("x", 1), "positions": ("sin", 0)}


def sizes_for(graph: Graph, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """A value for each symbol of the inputs."""
    known = {**dict.fromkeys(graph.symbols, OTHER), **{k: v for k, v in SIZES.items() if k in graph.symbols}}
    if unknown := sorted(set(given or {}) - set(known)):
        raise ArgumentError(
            f"{graph.name} has no symbol {unknown[0]!r}", fix="its symbols: " + (", ".join(known) or "none")
        )
    return {**known, **(given or {})}


def example_inputs(graph: Graph, sizes: Mapping[str, int] | None = None, seed: int = 0) -> list[Array]:
    """An array for each input of a graph."""
    full = sizes_for(graph, sizes)
    limits = _limits(graph, full)
    if seed < 0:
        raise ArgumentError(f"the seed of random inputs must be 0 or more, got {seed}")
    rng = np.random.default_rng(seed)
    return [random_array(v.type, rng, full, limits.get(v, OTHER)) for v in graph.inputs]


def example_params(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """An array for each parameter of a graph, by its path; small, so that sums of many stay in range."""
    rng = np.random.default_rng(seed + 1)
    return {p.path: random_array(p.value.type, rng, {}, OTHER, scale=0.1) for p in graph.params}


def random_array(
    t: TensorType, rng: np.random.Generator, sizes: Mapping[str, int], limit: int, scale: float = 1.0
) -> Array:
    """Normal floats, integers below a limit, or bools."""
    shape = tuple(evaluate(d, sizes) for d in t.shape)
    try:
        if t.dtype.is_float:
            return (rng.standard_normal(shape) * scale).astype(t.dtype.numpy)
        if t.dtype.is_integer:
            return rng.integers(0, max(limit, 1), shape).astype(t.dtype.numpy)
        return rng.integers(0, 2, shape).astype(np.bool_)
    except (MemoryError, ValueError) as error:  # too large for this machine, for any, or negative
        raise ArgumentError(f"there can be no random array of {t}", why=str(error), fix="give other sizes") from None


def _limits(graph: Graph, sizes: Mapping[str, int]) -> dict[Value, int]:
    """Integers that are used as indices must lie inside what they index; views and casts in between are followed."""
    origin: dict[Value, Value] = {v: v for v in graph.inputs}
    found: dict[Value, int] = {}
    for op in graph.ops:
        source = op.operands[0] if op.operands else None
        if source in origin and (op.opdef.kind == "view" or op.name == "cast"):
            origin.update(dict.fromkeys(op.results, origin[source]))
        for name, (table, axis) in _INDEXED.items():
            names = op.opdef.operand_names
            if name not in names or table not in names:
                continue
            index, indexed = op.operand(name), op.operand(table)
            if index in origin and indexed is not None:
                at = axis if axis is not None else int(op.attrs.get("axis", 0)) % max(indexed.type.rank, 1)
                size: Dim = indexed.type.shape[at]
                if symbols_of(size) <= set(sizes):
                    root = origin[index]
                    found[root] = min(found.get(root, 1 << 30), evaluate(size, sizes))
    return found
