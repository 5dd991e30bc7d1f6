"""Lowering of convolutions and pools."""

from __future__ import annotations

from monoplan.codegen.cpu.schedule_conv import choose_conv, conv_layout
from monoplan.codegen.expressions import compute_type
from monoplan.codegen.kernels import Conv, Window
from monoplan.codegen.lower.lowerer import Lowerer, lowers
from monoplan.codegen.lower.products import FAST, lo_threads
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.views import View
from monoplan.ir.dims import Dim, equal
from monoplan.ir.expr import Arg, parse_expr
from monoplan.ir.graph import Op, Value
from monoplan.ir.types import f32, product, promote


@lowers("conv", "fused_conv")
def lower_conv(lo: Lowerer, op: Op) -> None:
    """Constant weights become a packed kernel on the CPU; others, and those of small groups, are read as they are."""
    x, weight = op.given(0), op.given(1)
    a = op.attrs
    extras = [v for v in op.operands[3:] if v is not None]
    node = parse_expr(a["expr"]) if op.name == "fused_conv2d" else Arg(0)
    acc = promote(x.type.dtype, weight.type.dtype)
    body = Body(node, (acc, *(v.type.dtype for v in extras)))
    flops = op.result.type.size * (2 * product(weight.type.shape[1:]))
    packable = lo.is_param(weight) and x.type.dtype in FAST
    if packable and conv_layout(lo.target, weight.type, a["groups"]) is not None:
        _packed(lo, op, x, weight, extras, body, flops)
        return
    shape = op.result.type.shape
    operands = [Operand("x", _real(lo, x)), Operand("w", _real(lo, weight)), *_bias(lo, op)]
    operands += [Operand(f"e{i}", lo.read(v).expanded(shape)) for i, v in enumerate(extras)]
    operands.append(Operand("y", lo.destination(op.result), written=True))
    lo.emit(
        Window(
            op=op,
            operands=tuple(operands),
            mode="conv",
            body=body,
            accumulator=compute_type(acc),
            kernel=weight.type.shape[2:],  # type: ignore[arg-type]
            stride=a["stride"],
            padding=a["padding"],
            dilation=a["dilation"],
            groups=a["groups"],
            flops=flops,
        )
    )


def _real(lo: Lowerer, v: Value) -> View:
    view = lo.read(v)
    return lo.copy(view) if view.is_virtual else view


def _bias(lo: Lowerer, op: Op) -> list[Operand]:
    bias = op.operand("bias")
    return [] if bias is None else [Operand("bias", lo.read(bias))]


def _packed(lo: Lowerer, op: Op, x: Value, weight: Value, extras: list[Value], body: Body, flops: Dim) -> None:
    a = op.attrs
    layout = conv_layout(lo.target, weight.type, a["groups"])
    assert layout is not None
    images, columns, *out = op.result.type.shape
    taps, size = weight.type.shape[2:], x.type.shape[2:]
    plain = a["stride"] == (1, 1) and a["padding"] == (0, 0, 0, 0)
    view = _real(lo, x)
    copied = not (plain and x.type.dtype == f32)
    if not copied:
        view = lo.dense(view)
    sizes: tuple[Dim, ...] = (*size, *out)
    if plain and taps == (1, 1):  # positions in one row
        merged = view.reshaped((*view.shape[:2], 1, product(size)))
        if merged is not None:
            view, sizes = merged, (1, product(size), 1, product(out))
    packed = lo.param(weight, layout)
    depth = product(weight.type.shape[1:])
    operands = [Operand("x", view), Operand("w", View(packed, (columns, depth), (depth, 1)))]
    operands += _bias(lo, op)
    for i, v in enumerate(extras):
        operands.append(Operand(f"e{i}", _positions(lo, lo.read(v).expanded(op.result.type.shape))))
    y = lo.destination(op.result).shaped((images, columns, product(out)))
    operands.append(Operand("y", y, written=True))
    schedule = choose_conv(lo.target, layout, weight.type, a["groups"])
    scratch = [
        Operand("patches", lo.fresh(f32, (lo_threads(), schedule.patch_floats), "scratch"), written=True),
        Operand("sums", lo.fresh(f32, (lo_threads(), schedule.sum_floats), "scratch"), written=True),
    ]
    if copied:
        floats = product(x.type.shape[:2]) * _plane(op, taps, sizes)
        scratch.insert(0, Operand("copy", lo.fresh(f32, (floats + 64,), "scratch"), written=True))
    lo.emit(
        Conv(
            op=op,
            operands=tuple(operands),
            scratch=tuple(scratch),
            body=body,
            weight=weight.type,
            stride=a["stride"],
            padding=a["padding"],
            dilation=a["dilation"],
            groups=a["groups"],
            copied=copied,
            sizes=sizes,
            flops=flops,
        )
    )


def _plane(op: Op, taps: tuple[Dim, ...], sizes: tuple[Dim, ...]) -> Dim:
    """Floats of a channel of the copy: see mp_conv_layout."""
    (down, across), (dy, dx) = op.attrs["stride"], op.attrs["dilation"]
    height, width = sizes[2:]
    rows = height if equal(taps[0], 1) else (height - 1) * down + (taps[0] - 1) * dy + 1
    run = width + (taps[1] - 1) * dx // across
    return rows * run * (1 if equal(taps[1], 1) else across)


def _positions(lo: Lowerer, view: View) -> View:
    """Rows and columns of an extra operand as one dimension."""
    images, columns, height, width = view.shape
    down, across = view.strides[2:]
    if not (equal(down, width * across) or equal(height, 1)):
        view = lo.copy(view)
        across = 1
    return View(view.buffer, (images, columns, height * width), (*view.strides[:2], across), view.offset)


@lowers("pool", "adaptive_pool")
def lower_pool(lo: Lowerer, op: Op) -> None:
    """Pools over rows of images: batch and channels are one dimension."""
    (x,) = op.reads
    a, shape, out = op.attrs, x.type.shape, op.result.type.shape
    flat = lo.dense(lo.read(x)).shaped((product(shape[:-2]), 1, *shape[-2:]))
    y = lo.destination(op.result).shaped((product(out[:-2]), 1, *out[-2:]))
    even = op.name == "adaptive_pool2d"
    names = ("kernel", "stride", "padding", "dilation", "include_pad", "divisor")
    windows = {} if even else {name: a[name] for name in names}
    dtype = x.type.dtype
    lo.emit(
        Window(
            op=op,
            operands=(Operand("x", flat), Operand("y", y, written=True)),
            mode=a["kind"],
            body=Body(Arg(0), (dtype,)),
            accumulator=compute_type(dtype),
            even=even,
            flops=op.result.type.size if even else op.result.type.size * product(a["kernel"]),
            **windows,
        )
    )
