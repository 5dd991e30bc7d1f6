"""Lowering of views, copies, generators and pointwise ops."""

from __future__ import annotations

from monoplan.codegen.lower.lowerer import Lowerer, lowers, single
from monoplan.codegen.views import Buffer, View, whole
from monoplan.ir.dims import Dim, equal
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Node, parse_expr
from monoplan.ir.graph import Op, Value


@lowers("view")
def lower_view(lo: Lowerer, op: Op) -> None:
    """Reshape, transpose, slice, expand and split move no data (a reshape may need a copy first)."""
    x = lo.read(op.given(0))
    a = op.attrs
    if op.name == "transpose":
        lo.views[op.result] = x.transposed(a["axes"])
    elif op.name == "slice":
        part = x.sliced(a["axis"] % len(x.shape), a["start"], a["length"], a["step"])
        lo.views[op.result] = part if a["step"] > 0 or _read_by_element(lo, op.result) else lo.copy(part)
    elif op.name == "expand":
        lo.views[op.result] = x.expanded(a["shape"])
    elif op.name == "reshape":
        view = x.reshaped(a["shape"])
        lo.views[op.result] = lo.copy(x).shaped(a["shape"]) if view is None else view
    elif op.name == "split":
        axis = a["axis"] % len(x.shape)
        start: Dim = 0
        for r, size in zip(op.results, a["sizes"], strict=True):
            lo.views[r] = x.sliced(axis, start, size)
            start = start + size
    else:
        raise CompileError(f"view op {op.name} has no lowering", where=op.loc)


_BY_ELEMENT = ("pointwise", "fused_pointwise", "reduce", "fused_reduce", "scan", "softmax", "gather")


def _read_by_element(lo: Lowerer, value: Value) -> bool:
    """Whether only kernels read it that compute the place of each element: a negative stride is no matter to them."""
    return all(o.opdef.kind in _BY_ELEMENT for o in lo.graph.ops if value in o.reads)


@lowers("copy")
def lower_copy(lo: Lowerer, op: Op) -> None:
    """Concat and pad write each operand into its slice; repeat reads each element several times."""
    y = lo.destination(op.result)
    if op.name == "pad":
        _lower_pad(lo, op, y)
        return
    axis = op.attrs["axis"] % len(y.shape)
    if op.name == "concat":
        start: Dim = 0
        for v in op.reads:
            x = lo.read(v)
            piece = y.sliced(axis, start, x.shape[axis])
            if not x.is_same(piece):  # else it was written there
                node = Arg(0) if x.dtype == y.dtype else single("cast", 1, {"dtype": y.dtype})
                lo.pointwise(node, [x], piece)
            start = start + x.shape[axis]
        return
    x = lo.read(op.given(0))
    n = op.attrs["repeats"]
    wide = View(
        x.buffer,
        (*x.shape[: axis + 1], n, *x.shape[axis + 1 :]),
        (*x.strides[: axis + 1], 0, *x.strides[axis + 1 :]),
        x.offset,
    )
    lo.copy(wide, y.shaped(wide.shape))


def _lower_pad(lo: Lowerer, op: Op, y: View) -> None:
    """Strips before and after each axis, which narrow what is left for the next one; then x in the middle."""
    x = lo.read(op.given(0))
    for axis, (before, after) in enumerate(zip(op.attrs["before"], op.attrs["after"], strict=True)):
        for start, length in ((0, before), (y.shape[axis] - after, after)):
            if not equal(length, 0):
                strip = y.sliced(axis, start, length)
                constant = Buffer(f"{op.result.name}_pad", y.dtype, 1, "const", start=op.attrs["value"])
                lo.pointwise(Arg(0), [View(constant, strip.shape, (0,) * len(strip.shape))], strip)
        y = y.sliced(axis, before, x.shape[axis])
    lo.pointwise(Arg(0), [x], y)


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
