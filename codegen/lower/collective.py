"""Lowering of collectives: an exchange between ranks, with the pointwise tail of a sum in the same kernel.

On a GPU ranks meet outside of kernels: there a sum is an exchange, and a pointwise kernel over the ranks' parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.kernels import Collective
from monoplan.codegen.lower.lowerer import Lowerer, expanded_rows, lowers, rows_by_columns
from monoplan.codegen.operands import Body, Operand
from monoplan.ir.expr import Arg, Call, Node, parse_expr, substitute_args
from monoplan.ir.graph import Op, Value
from monoplan.ir.types import product


@lowers("collective", "fused_collective")
def lower_collective(lo: Lowerer, op: Op) -> None:
    """One rank: the value itself. Several: every rank's part of it, summed or joined."""
    x = op.given(0)
    world, shape = op.attrs["world"], x.type.shape
    extras = [v for v in op.operands[1:] if v is not None]
    node = parse_expr(op.attrs["expr"]) if op.name == "fused_all_reduce" else Arg(0)
    if world == 1:
        if op.name == "fused_all_reduce":
            lo.pointwise(node, [lo.read(v) for v in (x, *extras)], lo.destination(op.result))
        else:
            lo.views[op.result] = lo.read(x)
        return
    gather = op.name == "all_gather"
    if not gather and not lo.target.is_cpu:
        _sum_after(lo, op, x, extras, node, world)
        return
    axis = op.attrs["axis"] % len(shape) if gather else len(shape) - 1
    rows, columns = product(shape[:axis]), product(shape[axis:])
    operands = [Operand("x", lo.dense(rows_by_columns(lo, lo.read(x), rows, columns)))]
    operands += [Operand(f"e{i}", expanded_rows(lo, lo.read(v), shape, rows, columns)) for i, v in enumerate(extras)]
    y = lo.destination(op.result).shaped((rows, world, columns) if gather else (rows, columns))
    operands.append(Operand("y", y, written=True))
    body = Body(node, (x.type.dtype, *(v.type.dtype for v in extras)))
    lo.emit(
        Collective(
            op=op,
            operands=tuple(operands),
            mode="gather" if gather else "reduce",
            world=world,
            number=_number(lo),
            body=body,
            rows=rows,
            columns=columns,
            flops=product(shape) * (world - 1),
        )
    )


def _sum_after(lo: Lowerer, op: Op, x: Value, extras: Sequence[Value], node: Node, world: int) -> None:
    """Every rank's x side by side, then one kernel: their sum, in rank order, and the tail."""
    size = product(x.type.shape)
    parts = lo.fresh(x.type.dtype, (world, *x.type.shape))
    given = Operand("x", lo.dense(rows_by_columns(lo, lo.read(x), 1, size)))
    joined = Operand("y", parts.shaped((1, world, size)), written=True)
    lo.emit(
        Collective(
            op=op,
            operands=(given, joined),
            mode="gather",
            world=world,
            number=_number(lo),
            body=Body(Arg(0), (x.type.dtype,)),
            rows=1,
            columns=size,
            flops=0,
        )
    )
    total: Node = Arg(0)
    for rank in range(1, world):
        total = Call("add", (total, Arg(rank)))
    tail = substitute_args(node, lambda i: total if i == 0 else Arg(i + world - 1))
    ranks = [parts.sliced(0, rank, 1).shaped(x.type.shape) for rank in range(world)]
    lo.pointwise(tail, [*ranks, *(lo.read(v) for v in extras)], lo.destination(op.result))


def _number(lo: Lowerer) -> int:
    """The next one among the plan's collectives."""
    number, lo.root.collectives = lo.root.collectives, lo.root.collectives + 1
    return number
