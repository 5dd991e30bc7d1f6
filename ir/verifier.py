"""The rules of the IR, checked after every pass: always on."""

from __future__ import annotations

from collections.abc import Iterable

from monoplan.ir.dims import Expr, symbols_in
from monoplan.ir.errors import MonoplanError, VerifyError
from monoplan.ir.graph import Graph, Op, Value, bodies
from monoplan.ir.printer import print_op
from monoplan.ir.types import unfit


def verify(graph: Graph, checked: set[Op] | None = None, outer: Iterable[str] = ()) -> None:
    """Raises VerifyError unless every value is defined once and before use, and every type rule agrees.

    Ops are frozen: one in `checked` has kept its types since it was put there, and its rule is not run again. A body
    may have the symbols of the graph around it, `outer`.
    """
    checked = set() if checked is None else checked
    defined: set[Value] = set()
    names: set[str] = set()

    def define(v: Value, where: Op | str) -> None:
        if v in defined or v.name in names:
            raise VerifyError(f"{v} is defined twice", where=where if isinstance(where, str) else _line(where))
        defined.add(v)
        names.add(v.name)

    for v in graph.inputs:
        define(v, f"inputs of {graph.name}")
    paths: dict[str, Value] = {}
    for p in graph.params:
        define(p.value, f"params of {graph.name}")
        if paths.setdefault(p.path, p.value).type != p.value.type:
            what = f"the parameters {paths[p.path]} and {p.value} are both {p.path!r}, but of different types"
            raise VerifyError(what, why=f"{paths[p.path].type} and {p.value.type}")
        if any(isinstance(d, Expr) for d in p.value.type.shape):
            raise VerifyError(f"the parameter {p.value} has a symbolic size: {p.value.type}", where=p.path)
    for v in (*graph.inputs, *(p.value for p in graph.params)):
        if why := unfit(v.type):
            raise VerifyError(f"{v} has a type that can't be: {why}")
    symbols = {*graph.symbols, *outer}
    settled = {p.value for p in graph.params}
    overwritten: dict[Value, Op] = {}
    for number, op in enumerate((*graph.setup, *graph.ops)):
        for v in op.reads:
            if v not in defined:
                raise VerifyError(f"{v} is read before its definition", where=_line(op))
            if v in overwritten:
                raise VerifyError(
                    f"{v} is read after {overwritten[v].name} overwrote its storage",
                    where=_line(op),
                    fix=f"read what {overwritten[v].name} gives from there on, or read {v} before it",
                )
        if number < len(graph.setup):
            if not settled.issuperset(op.reads):
                raise VerifyError("a setup op reads a value that is not a parameter", where=_line(op))
            settled.update(op.results)
        if op not in checked:
            _check_types(op)
            _check_sizes(op, symbols)
            for body in bodies(op):
                verify(body, outer=symbols)
            checked.add(op)
        for name in op.opdef.inplace.values():
            target = op.operand(name)
            if target is not None:
                overwritten[target] = op
        for r in op.results:
            define(r, op)
    for v in graph.outputs:
        if v not in defined:
            raise VerifyError(f"output {v} of {graph.name} is not defined")
        if v in overwritten:
            raise VerifyError(f"output {v} of {graph.name} was overwritten", where=print_op(overwritten[v]))
    for i, j in graph.writes:
        if not (0 <= i < len(graph.inputs) and 0 <= j < len(graph.outputs)):
            raise VerifyError(f"{graph.name}: output {j} can't replace input {i}: there is no such pair")
        source, target = graph.outputs[j], graph.inputs[i]
        if source.type != target.type:
            raise VerifyError(f"output {source}: {source.type} can't replace input {target}: {target.type}")


def _check_sizes(op: Op, symbols: set[str]) -> None:
    """Raises VerifyError unless each size can be counted and follows from those of the inputs."""
    for r in op.results:
        if why := unfit(r.type):
            raise VerifyError(f"{r} has a type that can't be: {why}", where=_line(op))
    used = set().union(*(symbols_in(v) for v in (*op.attrs.values(), *(r.type.shape for r in op.results))))
    if unknown := sorted(used - symbols):
        raise VerifyError(
            f"{op.name} has the symbolic size {unknown[0]!r}, which no input has",
            where=_line(op),
            fix=f"use the sizes of inputs: {', '.join(sorted(symbols)) or 'they have no symbolic ones'}",
        )


def _line(op: Op) -> str:
    return print_op(op, locs=True)


def _check_types(op: Op) -> None:
    try:
        op.opdef.check_operands(op.operands)
        if op.opdef.complete_attrs(op.attrs) != dict(op.attrs):
            raise VerifyError("attributes are not complete", where=_line(op))
        types = op.opdef.infer([None if v is None else v.type for v in op.operands], op.attrs)
    except VerifyError:
        raise
    except MonoplanError as error:
        raise VerifyError(error.what, where=_line(op), why=error.why) from None
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise VerifyError(f"{op.name}: attributes or operands do not fit ({error})", where=_line(op)) from None
    written = tuple(r.type for r in op.results)
    if types != written:
        raise VerifyError(f"the type rule of {op.name} gives {types}, the results say {written}", where=_line(op))
