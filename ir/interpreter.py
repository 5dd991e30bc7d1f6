"""Runs a graph on the numpy references: the oracle for every pass and every kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.ir.dims import Dim, Expr, evaluate, substitute, symbols_of
from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.types import Array, TensorType

Watch = Callable[[Op, Value, Array], None]


def interpret(
    graph: Graph,
    inputs: Sequence[Array],
    params: Mapping[str, Array] | None = None,
    *,
    exact: bool = False,
    watch: Watch | None = None,
) -> list[Array]:
    """Outputs of the graph. `exact` computes every float in f64; `watch` sees each intermediate value."""
    if len(inputs) != len(graph.inputs):
        wanted = ", ".join(f"{v.name}: {v.type}" for v in graph.inputs)
        raise ArgumentError(f"{graph.name} takes {len(graph.inputs)} inputs ({wanted}), got {len(inputs)}")
    if missing := [p.path for p in graph.params if p.path not in (params or {})]:
        raise ArgumentError(f"{graph.name}: no values for the parameters {', '.join(missing)}")
    symbols = bind_symbols(graph.inputs, [a.shape for a in inputs])
    env: dict[Value, Array] = {}
    for v, a in zip(graph.inputs, inputs, strict=True):
        env[v] = _as_type(a, v, exact)
    for p in graph.params:
        a = (params or {})[p.path]
        if a.shape != p.value.type.shape:
            raise ArgumentError(f"parameter {p.path}: expected {p.value.type}, got shape {list(a.shape)}")
        env[p.value] = _as_type(a, p.value, exact)
    for op in (*graph.setup, *graph.ops):
        run_op(op, env, symbols, exact=exact, watch=watch)
    return [env[v] for v in graph.outputs]


def run_op(
    op: Op, env: dict[Value, Array], symbols: Mapping[str, int], *, exact: bool, watch: Watch | None = None
) -> None:
    """Evaluates one op into `env`."""
    operands = [None if v is None else env[v] for v in op.operands]
    if op.opdef.kind == "repeat":
        outs = _run_repeat(op, operands, symbols, exact)
    elif op.opdef.kind == "loop":
        outs = run_scan(op, operands, symbols, exact, lambda _, xs: _run_body(op.attrs["body"], xs, symbols, exact))
    else:
        attrs = {k: concrete(v, symbols) for k, v in op.attrs.items()}
        types = [TensorType(r.type.dtype, ()) for r in op.results]
        try:
            outs = op.opdef.evaluate(operands, attrs, types, exact=exact)
        except MonoplanError as error:
            raise type(error)(error.what, where=op.loc, why=error.why, fix=error.fix) from None
        except MemoryError as error:
            why = f"{', '.join(str(r.type) for r in op.results)}: {error}"
            raise ArgumentError(f"{op.name}: its result does not fit into memory", where=op.loc, why=why) from None
    for r, a in zip(op.results, outs, strict=True):
        if a.shape != concrete(r.type.shape, symbols):
            raise ArgumentError(f"{op.name} gave the shape {list(a.shape)}, {r} is {r.type}", where=op.loc)
        env[r] = a
        if watch is not None:
            watch(op, r, a)


def _run_body(body: Graph, inputs: Sequence[Any], symbols: Mapping[str, int], exact: bool) -> list[Array]:
    """One turn: the body sees the values of its inputs and the symbols around it."""
    env: dict[Value, Array] = dict(zip(body.inputs, inputs, strict=True))
    for op in body.ops:
        run_op(op, env, symbols, exact=exact)
    return [env[v] for v in body.outputs]


def _stacked(v: Value, found: Mapping[int, Array], symbols: Mapping[str, int], exact: bool) -> Array:
    """What turns gave for an output of a body, by the number of their slice, as one array."""
    dtype = np.dtype(np.float64) if exact and v.type.dtype.is_float else v.type.dtype.numpy
    whole = np.empty((len(found), *concrete(v.type.shape, symbols)), dtype)
    for i, a in found.items():
        whole[i] = a
    return whole


def run_scan(
    op: Op,
    operands: Sequence[Array | None],
    symbols: Mapping[str, int],
    exact: bool,
    turn: Callable[[int, Sequence[Any]], list[Array]],
) -> tuple[Array, ...]:
    """A scan: the state goes round, slices are taken one by one, the other operands stay. `turn` runs the body on the
    inputs of a turn."""
    body, count, slices = op.attrs["body"], op.attrs["state"], op.attrs["slices"]
    state, xs, fixed = operands[:count], operands[count : count + slices], operands[count + slices :]
    found: list[dict[int, Array]] = [{} for _ in body.outputs[count:]]
    length = concrete(op.attrs["length"], symbols)
    for number, i in enumerate(range(length - 1, -1, -1) if op.attrs["reverse"] else range(length)):
        outs = turn(number, [*state, *(x[i, ...] for x in xs if x is not None), *fixed])
        state = outs[:count]
        for column, a in zip(found, outs[count:], strict=True):
            column[i] = a
    ys = [_stacked(v, column, symbols, exact) for v, column in zip(body.outputs[count:], found, strict=True)]
    return (*state, *ys)  # type: ignore[arg-type]


def _run_repeat(op: Op, operands: Sequence[Array | None], symbols: Mapping[str, int], exact: bool) -> tuple[Array, ...]:
    """A rolled loop: carried values go round, shared ones stay, the rest is one slice for each turn."""
    body, count = op.attrs["body"], op.attrs["count"]
    carried, shared = op.attrs["carried"], op.attrs["shared"]
    state: list[Any] = list(operands[:carried])
    fixed = list(operands[carried : carried + shared])
    tables = [operands[i : i + count] for i in range(carried + shared, len(operands), count)]
    collected: list[list[Array]] = [[] for _ in range(len(body.outputs) - carried)]
    for turn in range(count):
        outs = _run_body(body, [*state, *fixed, *(t[turn] for t in tables)], symbols, exact)
        state = list(outs[:carried])
        for column, a in zip(collected, outs[carried:], strict=True):
            column.append(a)
    return (*state, *(a for column in collected for a in column))


def concrete(v: Any, symbols: Mapping[str, int]) -> Any:
    """An attribute with its symbolic dims replaced by ints."""
    if isinstance(v, Expr):
        return evaluate(v, symbols)
    if isinstance(v, tuple):
        return tuple(concrete(x, symbols) for x in v)
    return v


def bind_symbols(values: Sequence[Value], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """The values of all symbols that make the inputs' types fit these shapes; raises ArgumentError."""
    known: dict[str, int] = {}
    waiting: list[tuple[Value, int, Dim, int]] = []
    for v, shape in zip(values, shapes, strict=True):
        if len(shape) != v.type.rank:
            raise ArgumentError(f"argument {v.name}: expected {v.type} (rank {v.type.rank}), got shape {list(shape)}")
        waiting += [(v, i, d, n) for i, (d, n) in enumerate(zip(v.type.shape, shape, strict=True))]
    progress = True
    while waiting and progress:
        progress = False
        rest = []
        for item in waiting:
            v, axis, dim, size = item
            left = substitute(dim, dict(known)) if isinstance(dim, Expr) else dim
            if not isinstance(left, Expr):
                progress = True
                if left != size:
                    note = f" ({dim} with {_known(dim, known)})" if isinstance(dim, Expr) else ""
                    raise ArgumentError(
                        f"argument {v.name}: expected {v.type}, got size {size} at dimension {axis}, not {left}{note}"
                    )
            elif (solved := _solve(left, size)) is not None:
                progress = True
                if solved[1] < 0:
                    got = f"got size {size} at dimension {axis}, for which {solved[0]} would be {solved[1]}"
                    raise ArgumentError(f"argument {v.name}: expected {v.type}, {got}")
                known[solved[0]] = solved[1]
            else:
                rest.append(item)
        waiting = rest
    if waiting:
        v, axis, dim, size = waiting[0]
        raise ArgumentError(f"argument {v.name}: {dim} = {size} at dimension {axis} has no solution in whole numbers")
    return known


def _solve(e: Expr, size: int) -> tuple[str, int] | None:
    """The one symbol of a linear `a * s + b == size`, or None."""
    names = symbols_of(e)
    if len(names) != 1:
        return None
    (name,) = names
    b = evaluate(e, {name: 0})
    a = evaluate(e, {name: 1}) - b
    if a == 0 or (size - b) % a or evaluate(e, {name: (size - b) // a}) != size:
        return None
    return name, (size - b) // a


def _known(dim: Dim, known: Mapping[str, int]) -> str:
    return ", ".join(f"{n}={known[n]}" for n in sorted(symbols_of(dim)) if n in known)


def _as_type(a: Array, v: Value, exact: bool) -> Array:
    """Checks an input's dtype; widens it for the exact run."""
    if a.dtype != v.type.dtype.numpy and not (exact and v.type.dtype.is_float and a.dtype == np.float64):
        raise ArgumentError(f"argument {v.name}: expected {v.type}, got dtype {a.dtype}")
    return a.astype(np.float64) if exact and v.type.dtype.is_float else a
