"""Pointwise ops as expressions: how single ops, fused chains and the tails of fused kernels are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monoplan.ir.expr import Arg, Call, Const, Node, arg_indices, expr_dtype, parse_expr, substitute_args
from monoplan.ir.graph import Op, Value
from monoplan.ir.lazy_dataclass import dataclass

LARGEST = 48  # ops in one expression; longer ones are hard to read and gain nothing


@dataclass(frozen=True)
class Expression:
    """A tree over values."""

    node: Node
    operands: tuple[Value, ...]

    @property
    def text(self) -> str:
        return str(self.node)


def is_pointwise(op: Op) -> bool:
    return op.opdef.kind in ("pointwise", "fused_pointwise")


def expression_of(op: Op, defs: Mapping[Value, Op]) -> Expression:
    """A pointwise op's tree; scalar constants become literals where that does not change its type."""
    if op.opdef.kind == "fused_pointwise":
        node, operands = parse_expr(op.attrs["expr"]), list(op.reads)
    else:
        operands = list(op.reads)
        node = Call(op.name, tuple(Arg(i) for i in range(len(operands))), tuple(op.attrs.items()))
    for i, v in enumerate(operands):
        source = defs.get(v)
        if source is not None and source.name == "full" and not source.attrs["shape"]:
            node = _inline_constant(node, i, source, operands)
    return _compact(node, operands)


def _inline_constant(node: Node, index: int, source: Op, operands: Sequence[Value]) -> Node:
    types = [v.type.dtype for v in operands]
    literal = Const(source.attrs["value"])
    plain = substitute_args(node, lambda j: literal if j == index else Arg(j))
    try:
        same = expr_dtype(plain, types) == expr_dtype(node, types)
    except TypeError:
        same = False
    if same and _typed_alike(plain, node, types):
        return plain
    typed = Call("cast", (literal,), (("dtype", source.attrs["dtype"]),))
    return substitute_args(node, lambda j: typed if j == index else Arg(j))


def _typed_alike(a: Node, b: Node, types: Sequence[object]) -> bool:
    """Whether every call of two trees of one shape has the same type: a literal must not change what is inside."""
    if isinstance(a, Call) and isinstance(b, Call):
        if expr_dtype(a, types) != expr_dtype(b, types):  # type: ignore[arg-type]
            return False
        return all(_typed_alike(x, y, types) for x, y in zip(a.args, b.args, strict=True))
    return True


def _compact(node: Node, operands: Sequence[Value]) -> Expression:
    """Without operands that do not occur, and with equal ones joined."""
    used = sorted(arg_indices(node))
    kept: list[Value] = []
    place: dict[int, int] = {}
    for i in used:
        v = operands[i]
        if v not in kept:
            kept.append(v)
        place[i] = kept.index(v)
    return Expression(substitute_args(node, lambda i: Arg(place[i])), tuple(kept))


def inline(outer: Expression, value: Value, inner: Expression) -> Expression:
    """`outer` with `value` replaced by `inner`."""
    shift = len(outer.operands)
    moved = substitute_args(inner.node, lambda i: Arg(i + shift))
    at = outer.operands.index(value)
    node = substitute_args(outer.node, lambda i: moved if i == at else Arg(i))
    return _compact(node, (*outer.operands, *inner.operands))


def with_accumulators(outer: Expression, sums: Sequence[Value], extras: Sequence[Value]) -> Expression:
    """The expression over accumulators first (x0 …), then extra operands in the given order."""
    order = [*sums, *extras]
    node = substitute_args(outer.node, lambda i: Arg(order.index(outer.operands[i])))
    return Expression(node, tuple(order))
