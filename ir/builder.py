"""Builds graphs: emits ops with complete attributes, inferred types and deterministic names."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from monoplan.ir.dims import comparisons_raise
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph, Loc, Op, Param, Value
from monoplan.ir.opdef import OpDef, current_builder
from monoplan.ir.types import TensorType

NOWHERE = Loc()


class Builder:
    """Appends ops to a list; results are named by op kind: %linear, %linear_1, …"""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.ops: list[Op] = []
        self.loc = Loc()
        self._taken = set(taken)
        self._count: dict[str, int] = {}
        self._tokens: list[contextvars.Token[Builder | None]] = []

    def __enter__(self) -> Builder:
        self._tokens.append(current_builder.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        current_builder.reset(self._tokens.pop())

    def fresh(self, stem: str) -> str:
        """A name that no value has yet."""
        n = self._count.get(stem, 0)
        while True:
            name = f"{stem}_{n}" if n else stem
            n += 1
            if name not in self._taken:
                self._count[stem] = n
                self._taken.add(name)
                return name

    def nested(self) -> Builder:
        """A builder for the body of an op; no name of it is given twice, inside or outside."""
        inner = Builder()
        inner._taken, inner._count = self._taken, self._count
        return inner

    def emit(
        self,
        opdef: OpDef,
        operands: Sequence[Value | None],
        attrs: Mapping[str, Any],
        *,
        names: Sequence[str] = (),
        loc: Loc | None = None,
    ) -> Value | tuple[Value, ...]:
        """Appends one op and gives its result or results."""
        op = make_op(opdef, operands, attrs, names=names, loc=self.loc if loc is None else loc, fresh=self.fresh)
        self.ops.append(op)
        return op.results[0] if len(op.results) == 1 else op.results


def make_op(
    opdef: OpDef,
    operands: Sequence[Value | None],
    attrs: Mapping[str, Any],
    *,
    fresh: Callable[[str], str],
    names: Sequence[str] = (),
    loc: Loc = NOWHERE,
) -> Op:
    """One op with inferred result types; a type error names the op and its place."""
    try:
        with comparisons_raise(None):
            operands, attrs = opdef.complete_operands(operands, attrs)
            opdef.check_operands(operands)
            full = opdef.complete_attrs(attrs)
            types = opdef.infer([None if v is None else v.type for v in operands], full)
    except MonoplanError as error:
        if error.where is None and str(loc):
            raise type(error)(error.what, where=loc, why=error.why, fix=error.fix) from None
        raise
    chosen = [names[i] if i < len(names) else fresh(opdef.name) for i in range(len(types))]
    return Op(opdef, tuple(operands), full, tuple(Value(t, n) for t, n in zip(types, chosen, strict=True)), loc)


def build_graph(
    name: str,
    fn: Callable[..., Value | Sequence[Value]],
    inputs: Mapping[str, TensorType],
    params: Mapping[str, TensorType] | None = None,
) -> Graph:
    """A graph from a Python function over values: the short way for tests."""
    params = params or {}
    values = {n: Value(t, n) for n, t in {**inputs, **params}.items()}
    with Builder(taken=values) as b:
        out = fn(**values)
    return Graph(
        name,
        tuple(values[n] for n in inputs),
        tuple(Param(values[n], n) for n in params),
        tuple(b.ops),
        (out,) if isinstance(out, Value) else tuple(out),
    )
