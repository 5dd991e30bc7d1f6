"""Lowering of views, copies, generators and pointwise ops."""

from __future__ import annotations

from monoplan.codegen.lower.lowerer import Lowerer, lowers, single
from monoplan.codegen.views import Buffer, View, whole
from monoplan.ir.dims import Dim
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Node, parse_expr
from monoplan.ir.graph import Op, Value


def _operand(op: Op, i: int) -> Value:
    v = op.operands[i]
    assert v is not None
    return v


@lowers("view")
def lower_view(lo: Lowerer, op: Op) -> None:
    """Reshape, transpose, slice, expand and split move no data (a reshape may need a copy first)."""
    x = lo.read(_operand(op, 0))
    a = op.attrs
    if op.name == "transpose":
        lo.views[op.result] = x.transposed(a["axes"])
    elif op.name == "slice":
        lo.views[op.result] = x.sliced(a["axis"] % len(x.shape), a["start"], a["length"], a["step"])
    elif op.name == "expand":
        lo.views[op.result] = x.expanded(a["shape"])
    elif op.name == "reshape":
        view = x.reshaped(a["shape"])
        if view is None:
            view = lo.copy(x).reshaped(a["shape"])
        assert view is not None
        lo.views[op.result] = view
    elif op.name == "split":
        axis = a["axis"] % len(x.shape)
        start: Dim = 0
        for r, size in zip(op.results, a["sizes"], strict=True):
            lo.views[r] = x.sliced(axis, start, size)
            start = start + size
    else:
        raise CompileError(f"view op {op.name} has no lowering", where=op.loc)


@lowers("copy")
def lower_copy(lo: Lowerer, op: Op) -> None:
    """Concat writes each operand into its slice; repeat reads each element several times."""
    y = lo.destination(op.result)
    axis = op.attrs["axis"] % len(y.shape)
    if op.name == "concat":
        start: Dim = 0
        for v in op.reads:
            x = lo.read(v)
            piece = y.sliced(axis, start, x.shape[axis])
            node = Arg(0) if x.dtype == y.dtype else single("cast", 1, {"dtype": y.dtype})
            lo.pointwise(node, [x], piece)
            start = start + x.shape[axis]
        return
    x = lo.read(_operand(op, 0))
    n = op.attrs["repeats"]
    wide = View(
        x.buffer,
        (*x.shape[: axis + 1], n, *x.shape[axis + 1 :]),
        (*x.strides[: axis + 1], 0, *x.strides[axis + 1 :]),
        x.offset,
    )
    into = y.reshaped(wide.shape)
    assert into is not None
    lo.copy(wide, into)


@lowers("generate")
def lower_generate(lo: Lowerer, op: Op) -> None:
    """arange and full have no storage: readers see their formula."""
    t = op.result.type
    if op.name == "full":
        buffer = Buffer(op.result.name, t.dtype, 1, "const", start=op.attrs["value"])
        lo.views[op.result] = View(buffer, t.shape, (0,) * t.rank)
    else:
        buffer = Buffer(op.result.name, t.dtype, t.size, "iota", start=op.attrs["start"])
        lo.views[op.result] = whole(buffer, t.shape)


@lowers("pointwise")
def lower_pointwise(lo: Lowerer, op: Op) -> None:
    """One pointwise op by itself."""
    _lower_expression(lo, op, single(op.name, len(op.reads), dict(op.attrs)))


@lowers("fused_pointwise")
def lower_fused_pointwise(lo: Lowerer, op: Op) -> None:
    """A chain of pointwise ops in one loop."""
    _lower_expression(lo, op, parse_expr(op.attrs["expr"]))


def _lower_expression(lo: Lowerer, op: Op, node: Node) -> None:
    more = lo.stored[op.result] = lo.also.get(op.result, [])
    lo.pointwise(node, [lo.read(v) for v in op.reads], lo.destination(op.result), more)
