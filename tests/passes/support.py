"""Runs one pass on IR text: it fires (numbers stay equal, a second run changes nothing), or it refuses and says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from monoplan.ir.dims import evaluate, symbols_of
from monoplan.ir.graph import Graph, Op
from monoplan.ir.interpreter import interpret
from monoplan.ir.parser import parse_graph
from monoplan.ir.printer import print_graph
from monoplan.ir.types import DType, f64
from monoplan.ir.verifier import verify
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Rewrite

Array = np.ndarray[Any, Any]
SIZES = {"batch": 2, "seq": 3, "keys": 5, "capacity": 8}  # every other symbol is 3
RANGES = {"lengths": (0, 5), "valid": (1, 4), "positions": (0, 6), "rows": (0, 3)}  # of integers, by name; else 0 .. 3


def parse(text: str) -> Graph:
    """A graph that obeys the rules of the IR."""
    graph = parse_graph(text)
    verify(graph)
    return graph


def run(pass_: Pass | Rewrite, graph: Graph) -> tuple[Graph, Notes]:
    """The graph after one pass, verified, and what the pass noted."""
    notes = Notes()
    made = (pass_.as_pass() if isinstance(pass_, Rewrite) else pass_).run(graph, notes)
    verify(made)
    return made, notes


def fires(
    pass_: Pass | Rewrite, text: str, golden: Callable[[str], None] | None = None, count: int | None = None
) -> Graph:
    """The pass changes the graph, not its numbers; running it again changes nothing."""
    before = parse(text)
    after, notes = run(pass_, before)
    assert notes.rewrites, f"nothing was rewritten; near misses: {list(map(str, notes.misses))}"
    assert count is None or notes.rewrites == count, f"{notes.rewrites} rewrites in place of {count}:\n{after}"
    if golden is not None:
        golden(print_graph(after))
    same_numbers(before, after)
    unchanged(pass_, after)
    return after


def refuses(pass_: Pass | Rewrite, text: str, reason: str | None = None) -> Notes:
    """The pass leaves the graph alone; `reason` must be in one of its near misses, None: there must be none."""
    before = parse(text)
    after, notes = run(pass_, before)
    assert notes.rewrites == 0 and print_graph(after) == print_graph(before), f"it fired:\n{after}"
    found = [m.reason for m in notes.misses]
    if reason is None:
        assert not found, f"near misses were noted: {found}"
    else:
        assert any(reason in r for r in found), f"{reason!r} is not among the near misses {found}"
    return notes


def unchanged(pass_: Pass | Rewrite, graph: Graph) -> None:
    """The pass has nothing to do on a graph."""
    again, notes = run(pass_, graph)
    assert notes.rewrites == 0, f"a second run made {notes.rewrites} rewrites:\n{again}"
    assert print_graph(again) == print_graph(graph)


def same_numbers(before: Graph, after: Graph, seed: int = 0, *, sizes: Mapping[str, int] | None = None) -> None:
    """Both graphs give the same outputs in float64, for random inputs and params."""
    inputs, params = random_arguments(before, seed, sizes)
    assert [(v.name, v.type) for v in before.inputs] == [(v.name, v.type) for v in after.inputs]
    assert {p.path for p in after.params} <= params.keys()
    wanted = interpret(without_rounding(before), inputs, params, exact=True)
    got = interpret(without_rounding(after), inputs, params, exact=True)
    for v, a, b in zip(before.outputs, got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{v}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=f"output {v}")


def without_rounding(graph: Graph) -> Graph:
    """The graph with casts to narrower floats made casts to f64: an exact run must not round on the way."""

    def exact(v: Any) -> Any:
        if isinstance(v, Graph):
            return without_rounding(v)
        if isinstance(v, DType) and v.is_float:
            return f64
        return re.sub(r"dtype=(bf16|f16|f32)", "dtype=f64", v) if isinstance(v, str) else v

    ops = [Op(o.opdef, o.operands, {k: exact(v) for k, v in o.attrs.items()}, o.results, o.loc) for o in graph.ops]
    return graph.replace(ops=tuple(ops))


def random_arguments(
    graph: Graph, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> tuple[list[Array], dict[str, Array]]:
    """Inputs and params of a graph: normal floats, small integers."""
    rng = np.random.default_rng(seed)
    known = {**SIZES, **(sizes or {})}

    def make(name: str, t: Any) -> Array:
        shape = [evaluate(d, {s: known.get(s, 3) for s in symbols_of(d)}) for d in t.shape]
        if t.dtype.is_float:
            return (rng.standard_normal(shape) * 0.5).astype(t.dtype.numpy)
        if t.dtype.is_integer:
            low, high = RANGES.get(name.rstrip("0123456789_"), (0, 3))
            return rng.integers(low, high, shape).astype(t.dtype.numpy)
        return rng.integers(0, 2, shape).astype(np.bool_)

    return [make(v.name, v.type) for v in graph.inputs], {p.path: make(p.path, p.value.type) for p in graph.params}
