"""Lowering of collectives: an exchange between ranks, with the pointwise tail of a sum in the same kernel."""

from __future__ import annotations

from monoplan.codegen.kernels import Body, Collective, Operand
from monoplan.codegen.lower import Lowerer, expanded_rows, lowers, rows_by_columns
from monoplan.codegen.views import View
from monoplan.ir.dims import Dim
from monoplan.ir.expr import Arg, parse_expr
from monoplan.ir.graph import Op
from monoplan.ir.types import product


@lowers("collective", "fused_collective")
def lower_collective(lo: Lowerer, op: Op) -> None:
    """One rank: the value itself. Several: every rank's part of it, summed or joined."""
    x = op.operands[0]
    assert x is not None
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
    axis = op.attrs["axis"] % len(shape) if gather else len(shape) - 1
    rows, columns = product(shape[:axis]), product(shape[axis:])
    operands = [Operand("x", lo.dense(rows_by_columns(lo, lo.read(x), rows, columns)))]
    apart = not lo.target.is_cpu and op.name == "fused_all_reduce"  # a GPU's ranks meet elsewhere: the tail follows
    if not apart:
        operands += [
            Operand(f"e{i}", expanded_rows(lo, lo.read(v), shape, rows, columns)) for i, v in enumerate(extras)
        ]
    made = lo.fresh(x.type.dtype, shape) if apart else lo.destination(op.result)
    y = _rows(made, (rows, world, columns) if gather else (rows, columns))
    operands.append(Operand("y", y, written=True))
    types = (x.type.dtype, *(v.type.dtype for v in extras))
    body = Body(Arg(0), types[:1]) if apart else Body(node, types)
    number, lo.root.collectives = lo.root.collectives, lo.root.collectives + 1
    lo.emit(Collective(op=op, operands=tuple(operands), mode="gather" if gather else "reduce", world=world,
                       number=number, body=body, rows=rows, columns=columns, flops=product(shape) * (world - 1)))
    if apart:
        lo.pointwise(node, [made, *(lo.read(v) for v in extras)], lo.destination(op.result))


def _rows(y: View, shape: tuple[Dim, ...]) -> View:
    """A destination, which is dense, in another shape."""
    found = y.reshaped(shape)
    assert found is not None
    return found
