"""Brings equal things to one form: no-ops vanish, what depends on weights only moves to setup, equal ops merge."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from monoplan.ir.builder import make_op
from monoplan.ir.dims import Expr, equal
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.interpreter import run_op
from monoplan.ir.opdef import NESTED, exactly
from monoplan.ir.ops.shape import expand, reshape
from monoplan.ir.types import Array, TensorType, bool_, product
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import param_values
from monoplan.passes.rebuild import Overwrites, builder_for, drop_dead, rebuilt, substitute

_TAKES_KNOWN = ("attention", "gather", "logical_and", "bitwise_and")


def dce(graph: Graph, notes: Notes) -> Graph:
    """Drops ops and params that no output needs; state writes are outputs."""
    new = drop_dead(graph)
    kept = set(new.ops)
    for op in graph.ops if new is not graph else ():
        if op not in kept:
            notes.fired("dce", op)
    return new


def remove_identities(graph: Graph, notes: Notes) -> Graph:
    """Drops views, casts and masks that change nothing, and joins two reshapes or transposes in a row."""
    new: dict[Value, Value] = {}
    defs = definitions(graph)
    overwrites = Overwrites(graph)
    known = _known_values(graph)
    ops = []
    for at, old in enumerate(graph.ops):
        op = substitute([old], new)[0]
        if known and (plain := _without_known(op, known)) is not None:
            op = plain
            notes.fired("remove-identities", op)
        inner = defs.get(op.operands[0]) if op.operands and op.operands[0] is not None else None
        if inner is not None and not overwrites.refusal([inner], at) and (joined := _joined(op, inner)) is not None:
            op = joined
            notes.fired("remove-identities", op)
        source = op.operands[0] if op.operands else None
        # What is overwritten in place keeps the op: before and after the write are two values.
        if source is not None and _is_identity(op, source) and not (source in overwrites or op.result in overwrites):
            new[old.results[0]] = source
            notes.fired("remove-identities", op)
            continue
        defs.update(dict.fromkeys(op.results, op))
        ops.append(op)
    if not notes.rewrites:
        return graph
    return drop_dead(graph.replace(ops=tuple(ops), outputs=tuple(new.get(v, v) for v in graph.outputs)))


def _joined(op: Op, inner: Op) -> Op | None:
    """One reshape or transpose in place of two in a row."""
    if inner.name != op.name or op.name not in ("reshape", "transpose"):
        return None
    attrs: dict[str, Any] = dict(op.attrs)
    if op.name == "transpose":
        attrs = {"axes": tuple(inner.attrs["axes"][a] for a in op.attrs["axes"])}
    made = make_op(op.opdef, [inner.operands[0]], attrs, names=[op.result.name], loc=op.loc, fresh=str)
    return Op(made.opdef, made.operands, made.attrs, op.results, op.loc)


def _known_values(graph: Graph) -> dict[Value, Array]:
    """Integers and bools that depend on constants only: indices and masks of known sizes that a model computes."""
    found: dict[Value, Array] = {}
    if not any(op.name in _TAKES_KNOWN for op in graph.ops):
        return found
    for op in graph.ops:
        own = op.opdef.inplace or op.opdef.kind in (*NESTED, "collective") or _is_symbolic(op)
        if own or not all(v in found for v in op.reads) or not all(_is_small(r.type) for r in op.results):
            continue
        with contextlib.suppress(MonoplanError):  # an index out of range: the plan will say so
            run_op(op, found, {}, exact=False)
    return found


def _is_small(t: TensorType) -> bool:
    size = product(t.shape)
    return not t.dtype.is_float and isinstance(size, int) and size <= 1 << 22


def _without_known(op: Op, known: Mapping[Value, Array]) -> Op | None:
    """Attention without a mask that shows all keys, `and` without a true side, no gather of all rows in order."""
    if op.name not in _TAKES_KNOWN or op.results[0] in known:
        return None
    result = op.results[0].type

    def is_true(v: Value | None) -> bool:
        return v in known and v is not None and v.type.dtype == bool_ and bool(known[v].all())

    if op.name == "attention":
        mask = op.operand("mask")
        operands = tuple(None if v is mask else v for v in op.operands)
        return Op(op.opdef, operands, op.attrs, op.results, op.loc) if is_true(mask) else None
    x, other = op.operands
    if op.name == "gather":
        index = known.get(other)  # type: ignore[arg-type]
        rows = x.type.shape[op.attrs["axis"]]  # type: ignore[union-attr]
        if index is None or not np.array_equal(index.reshape(-1), np.arange(rows) if isinstance(rows, int) else ()):
            return None
        made = make_op(reshape, [x], {"shape": result.shape}, loc=op.loc, fresh=str)
    else:
        left = other if is_true(x) else x if is_true(other) else None
        if left is None or left.type.dtype != bool_ or left.type.rank != result.rank:
            return None
        made = make_op(expand, [left], {"shape": result.shape}, loc=op.loc, fresh=str)
    return Op(made.opdef, made.operands, made.attrs, op.results, op.loc)


def _is_identity(op: Op, source: Value) -> bool:
    if len(op.results) != 1 or op.result.type != source.type:
        return False
    a = op.attrs
    if op.name in ("reshape", "expand", "cast"):
        return True
    if op.name == "transpose":
        return tuple(a["axes"]) == tuple(range(source.type.rank))
    if op.name == "slice":
        return equal(a["start"], 0) and a["step"] == 1
    return op.name == "repeat" and a["repeats"] == 1 or op.name in ("all_reduce", "all_gather") and a["world"] == 1


def hoist_setup(graph: Graph, notes: Notes) -> Graph:
    """Moves ops over weights and constants to setup: they run once, when the weights are loaded."""
    fixed = param_values(graph)
    constants = {op.result: op for op in graph.ops if op.opdef.kind == "generate" and not _is_symbolic(op)}
    fresh = builder_for(graph).fresh
    copies: dict[Value, Value] = {}  # a constant's double in setup; the plan keeps its own
    setup, ops = list(graph.setup), []
    for op in graph.ops:
        if not _is_movable(op, graph, fixed, constants):
            ops.append(op)
            continue
        for v in op.reads:
            if v in constants and v not in copies:
                source = constants[v]
                setup.append(make_op(source.opdef, [], source.attrs, loc=source.loc, fresh=fresh))
                copies[v] = setup[-1].result
        moved = rebuilt(op, [copies.get(v, v) if v is not None else None for v in op.operands])
        setup.append(Op(op.opdef, moved.operands, op.attrs, op.results, op.loc))
        fixed.update(op.results)
        notes.fired("hoist-setup", op)
    return graph if not notes.rewrites else drop_dead(graph.replace(setup=tuple(setup), ops=tuple(ops)))


def _is_movable(op: Op, graph: Graph, fixed: set[Value], constants: dict[Value, Op]) -> bool:
    """Whether an op reads a weight, and else only weights and constants; sizes must be known at load."""
    if op.opdef.inplace or op.opdef.kind in (*NESTED, "collective") or not any(v in fixed for v in op.reads):
        return False
    settled = all(v in fixed or v in constants for v in op.reads)
    return settled and not _is_symbolic(op) and not any(r in graph.outputs for r in op.results)


def _is_symbolic(op: Op) -> bool:
    """Whether a size is only known when the plan runs."""
    shapes = any(isinstance(d, Expr) for r in op.results for d in r.type.shape)
    return shapes or any(isinstance(v, Expr) for v in op.attrs.values())


def merge_equal_ops(graph: Graph, notes: Notes) -> Graph:
    """Keeps the first of several ops with the same operands and attributes."""
    new: dict[Value, Value] = {}
    seen: dict[Any, Op] = {}
    overwrites = Overwrites(graph)

    def sweep(ops: tuple[Op, ...]) -> list[Op]:
        kept = []
        for old in ops:
            op = substitute([old], new)[0]
            own = op.opdef.inplace or op.opdef.kind in (*NESTED, "collective")
            # A value that is overwritten in place (a cache made of zeros) is nobody else's.
            if own or any(r in overwrites for r in old.results):
                kept.append(op)
                continue
            key = (op.opdef, op.operands, tuple(map(_same, op.attrs.values())), tuple(r.type for r in op.results))
            first = seen.setdefault(key, op)
            if first is op:
                kept.append(op)
            else:
                new.update(zip(old.results, first.results, strict=True))
                notes.fired("merge-equal-ops", op)
        return kept

    setup, ops = sweep(graph.setup), sweep(graph.ops)
    if not notes.rewrites:
        return graph
    outputs = tuple(new.get(v, v) for v in graph.outputs)
    return drop_dead(graph.replace(setup=tuple(setup), ops=tuple(ops), outputs=outputs))


def _same(v: Any) -> Any:
    """An attribute for comparison: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    return type(v), exactly(v)


DCE = Pass("dce", "drops ops whose results nobody reads", dce)
REMOVE_IDENTITIES = Pass("remove-identities", "drops views, casts and masks that change nothing", remove_identities)
HOIST_SETUP = Pass("hoist-setup", "ops over weights only run once, at load", hoist_setup)
MERGE_EQUAL_OPS = Pass("merge-equal-ops", "one op where several compute the same", merge_equal_ops)
