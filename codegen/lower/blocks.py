"""Lowering of reductions, norms, lookups, sorting and sampling."""

from __future__ import annotations

from monoplan.codegen.cpu.schedule_linear import linear_layout
from monoplan.codegen.expressions import compute_type
from monoplan.codegen.formats import choose_format
from monoplan.codegen.kernels import Gather, KVUpdate, Norm, Reduce, Rope, Sample, Scan, Scatter, Softmax, Sort
from monoplan.codegen.lower.lowerer import Lowerer, lowers, single
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.reductions import LONG_ROW, PART_OF_ROW, REDUCTIONS
from monoplan.codegen.views import View
from monoplan.ir.dims import Dim
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, parse_expr
from monoplan.ir.graph import Op
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.rules import broadcast, normalized_axes
from monoplan.ir.types import TensorType, f64, i64, product


def outer_inner(view: View, axes: tuple[int, ...]) -> View:
    """The view with the dimensions of `axes` moved to the end."""
    kept = [i for i in range(len(view.shape)) if i not in axes]
    return view.transposed([*kept, *axes])


def squeezed(view: View, axes: tuple[int, ...], keepdims: bool) -> View:
    """A reduction's result without the dimensions it kept as 1."""
    if not keepdims:
        return view
    left = [i for i in range(len(view.shape)) if i not in axes]
    return View(view.buffer, tuple(view.shape[i] for i in left), tuple(view.strides[i] for i in left), view.offset)


@lowers("reduce", "fused_reduce")
def lower_reduce(lo: Lowerer, op: Op) -> None:
    """Reductions over any axes, with what is computed before and after."""
    fused = op.name == "fused_reduce"
    a = op.attrs
    count = a["inputs"] if fused else 1
    inputs = [lo.read(v) for v in op.reads[:count]]
    extras = [lo.read(v) for v in op.reads[count:]]
    shape = broadcast([v.shape for v in inputs], "reduce")
    axes = normalized_axes(a["axes"] if "axes" in a else a["axis"], len(shape), op.name)
    y = lo.destination(op.result)
    out = squeezed(y, axes, a["keepdims"])
    arranged = [outer_inner(v.expanded(shape), axes) for v in inputs]
    outer = tuple(arranged[0].shape[: len(shape) - len(axes)])
    inner = tuple(arranged[0].shape[len(outer) :])
    operands = [Operand(f"x{i}", v) for i, v in enumerate(arranged)]
    operands += [Operand(f"e{i}", squeezed(v.expanded(y.shape), axes, a["keepdims"])) for i, v in enumerate(extras)]
    operands.append(Operand("y", out, written=True))
    kind = a["reduce"] if fused else op.name
    pre = Body(parse_expr(a["pre"]) if fused else Arg(0), tuple(v.dtype for v in inputs))
    if kind not in REDUCTIONS:
        raise CompileError(f"{kind} has no kernel", where=op.loc, fix="add its row to codegen/reductions.py")
    definition = REGISTRY[kind]
    reduced = definition.infer([TensorType(pre.dtype, (1,))], definition.complete_attrs({}))[0].dtype
    post = Body(parse_expr(a["post"]) if fused else Arg(0), (reduced, *(v.dtype for v in extras)))
    scratch: tuple[Operand, ...] = ()
    row, long = REDUCTIONS[kind], product(inner)
    if (
        lo.target.is_cpu
        and isinstance(long, int)
        and long >= LONG_ROW
        and not row.better
        and arranged[0].strides[-1] == 1
    ):
        acc = row.accumulator(pre.compute, compute_type(reduced))  # of each part: threads share a row
        parts = lo.fresh(acc, (product(outer), -(-long // PART_OF_ROW)), "scratch")
        scratch = (Operand("partial", parts, written=True),)
    lo.emit(
        Reduce(
            op=op,
            operands=tuple(operands),
            scratch=scratch,
            kind=kind,
            pre=pre,
            post=post,
            outer=outer,
            inner=inner,
            flops=product(shape),
        )
    )


@lowers("norm", "fused_norm")
def lower_norm(lo: Lowerer, op: Op) -> None:
    """rms_norm and layer_norm, with a pointwise tail."""
    a = op.attrs
    fused = op.name == "fused_norm"
    kind = a["norm"] if fused else {"rms_norm": "rms", "layer_norm": "layer"}[op.name]
    xv = op.given("x")
    dims = a["dims"]
    lead, inner = xv.type.shape[: xv.type.rank - dims], product(xv.type.shape[xv.type.rank - dims :])
    shape = (*lead, inner)

    def rows(view: View) -> View:
        flat = None if view.is_virtual else view.reshaped(shape)
        return lo.copy(view).shaped(shape) if flat is None else flat

    operands = [Operand("x", rows(lo.read(xv)))]
    for name in ("weight", "bias"):
        v = op.operand(name) if name in op.opdef.operand_names else None
        if v is not None:
            operands.append(Operand(name, lo.dense(lo.read(v)).shaped((inner,))))
    extras = [v for v in op.operands[len(op.opdef.operand_names) :] if v is not None]
    operands += [Operand(f"e{i}", rows(lo.read(v).expanded(xv.type.shape))) for i, v in enumerate(extras)]
    y = lo.destination(op.result)
    operands.append(Operand("y", rows(y), written=True))
    body = Body(parse_expr(a["expr"]) if fused else Arg(0), (xv.type.dtype, *(v.type.dtype for v in extras)))
    lo.emit(
        Norm(
            op=op,
            operands=tuple(operands),
            kind=kind,
            eps=a["eps"],
            body=body,
            outer=tuple(lead),
            inner=inner,
            flops=xv.type.size * 4,
        )
    )


@lowers("softmax")
def lower_softmax(lo: Lowerer, op: Op) -> None:
    """softmax along an axis, or causal_softmax along the last."""
    x = lo.read(op.given("x"))
    axis = op.attrs.get("axis", -1) % len(x.shape)
    y = lo.destination(op.result)
    operands = (Operand("x", outer_inner(x, (axis,))), Operand("y", outer_inner(y, (axis,)), written=True))
    lo.emit(
        Softmax(
            op=op,
            operands=operands,
            causal=op.name == "causal_softmax",
            outer=operands[0].shape[:-1],
            inner=operands[0].shape[-1],
            flops=product(x.shape) * 5,
        )
    )


@lowers("scan")
def lower_scan(lo: Lowerer, op: Op) -> None:
    """Running sums and their kin along an axis."""
    x = lo.read(op.given("x"))
    axis = op.attrs["axis"] % len(x.shape)
    y = lo.destination(op.result)
    operands = (Operand("x", outer_inner(x, (axis,))), Operand("y", outer_inner(y, (axis,)), written=True))
    lo.emit(
        Scan(
            op=op,
            operands=operands,
            kind=op.name,
            outer=operands[0].shape[:-1],
            inner=operands[0].shape[-1],
            flops=product(x.shape),
        )
    )


@lowers("sort")
def lower_sort(lo: Lowerer, op: Op) -> None:
    """sort and topk along an axis."""
    x = lo.read(op.given("x"))
    axis = op.attrs["axis"] % len(x.shape)
    values, indices = (lo.destination(r) for r in op.results)
    arranged = outer_inner(x, (axis,))
    outer, inner = arranged.shape[:-1], arranged.shape[-1]
    order = lo.fresh(i64, (product(outer), inner, 2), "scratch")
    operands = (
        Operand("x", arranged),
        Operand("values", outer_inner(values, (axis,)), written=True),
        Operand("indices", outer_inner(indices, (axis,)), written=True),
    )
    keep = op.attrs.get("k", inner)
    lo.emit(
        Sort(
            op=op,
            operands=operands,
            scratch=(Operand("order", order, written=True),),
            outer=outer,
            inner=inner,
            keep=keep,
            descending=op.attrs["largest" if op.name == "topk" else "descending"],
        )
    )


@lowers("gather", "fused_gather")
def lower_gather(lo: Lowerer, op: Op) -> None:
    """embedding, gather, take_along and select_rows: one loop nest, the index gives one coordinate of x."""
    if op.name in ("embedding", "fused_gather"):
        _lower_embedding(lo, op)
        return
    x = lo.read(op.given("x"))
    y = lo.destination(op.result)
    if op.name == "select_rows":
        index = lo.read(op.given("rows"))
        axis = 1
        outer: tuple[Dim, ...] = (x.shape[0],)
        inner = x.shape[2:]
        where = View(index.buffer, outer, index.strides, index.offset)
        source = View(x.buffer, (*outer, x.shape[1], *inner), x.strides, x.offset)
        out = View(y.buffer, (*outer, *inner), (y.strides[0], *y.strides[2:]), y.offset)
    elif op.name == "take_along":
        index = lo.read(op.given("index"))
        axis = op.attrs["axis"] % len(x.shape)
        outer, inner = y.shape, ()
        where = index
        strides = tuple(0 if i == axis else s for i, s in enumerate(x.strides))
        source = View(x.buffer, (*outer, x.shape[axis]), (*strides, x.strides[axis]), x.offset)
        out = y
    else:
        index = lo.read(op.given("index"))
        axis = op.attrs["axis"] % len(x.shape)
        lead, inner = x.shape[:axis], x.shape[axis + 1 :]
        outer = (*lead, *index.shape)
        where = View(index.buffer, outer, (*[0] * axis, *index.strides), index.offset)
        source = View(
            x.buffer,
            (*outer, x.shape[axis], *inner),
            (*x.strides[:axis], *[0] * len(index.shape), x.strides[axis], *x.strides[axis + 1 :]),
            x.offset,
        )
        out = y
    operands = (Operand("x", source), Operand("index", where), Operand("y", out, written=True))
    lo.emit(
        Gather(
            op=op,
            operands=operands,
            body=Body(Arg(0), (x.dtype,)),
            outer=tuple(outer),
            inner=tuple(inner),
            limit=x.shape[axis],
            packed=False,
            depth=0,
        )
    )


def _lower_embedding(lo: Lowerer, op: Op) -> None:
    """Rows of a table. A table that is also a linear weight is read in its packed form, so it is stored once."""
    weight, ids = op.given("weight"), lo.read(op.given("ids"))
    rows, depth = weight.type.shape
    y = lo.destination(op.result)
    outer = ids.shape
    extras = [v for v in op.operands[2:] if v is not None]
    packed = lo.is_param(weight) and (weight in lo.root.packed_tables or weight.type.dtype.is_low_bit)
    packed = packed and choose_format(weight.type, lo.target) is not None
    if packed:
        buffer = lo.param(weight, linear_layout(lo.target, weight.type, "pointwise"))
        source = View(buffer, (*outer, rows, depth), (*[0] * len(outer), 1, 1))
    else:
        x = lo.read(weight)
        source = View(x.buffer, (*outer, rows, depth), (*[0] * len(outer), *x.strides), x.offset)
    operands = [Operand("x", source), Operand("index", ids)]
    operands += [Operand(f"e{i}", lo.read(v).expanded(y.shape)) for i, v in enumerate(extras)]
    operands.append(Operand("y", y, written=True))
    node = parse_expr(op.attrs["expr"]) if op.name == "fused_gather" else Arg(0)
    body = Body(node, (weight.type.dtype.values, *(v.type.dtype for v in extras)))
    assert isinstance(depth, int)
    lo.emit(
        Gather(
            op=op,
            operands=tuple(operands),
            body=body,
            outer=tuple(outer),
            inner=(depth,),
            limit=rows,
            packed=packed,
            depth=depth,
        )
    )


@lowers("scatter")
def lower_scatter(lo: Lowerer, op: Op) -> None:
    """A copy of x, then the elements that change. Half floats are summed in f32 and rounded once."""
    x, index, source = (lo.read(op.given(n)) for n in ("x", "index", "source"))
    kind, axis = op.attrs["reduce"], op.attrs["axis"] % len(x.shape)
    y = lo.destination(op.result)
    half = kind != "set" and compute_type(y.dtype) != y.dtype
    sums = lo.fresh(compute_type(y.dtype), y.shape) if half else y
    lo.pointwise(single("cast", 1, {"dtype": sums.dtype}) if half else Arg(0), [x], sums)
    places = outer_inner(index, (axis,))
    out = outer_inner(sums, (axis,))
    outer = places.shape[:-1]
    out = View(out.buffer, (*outer, out.shape[-1]), out.strides, out.offset)
    operands = (Operand("x", outer_inner(source, (axis,))), Operand("index", places), Operand("y", out, written=True))
    lo.emit(Scatter(op=op, operands=operands, kind=kind, outer=outer, inner=places.shape[-1], limit=out.shape[-1]))
    if half:
        lo.pointwise(single("cast", 1, {"dtype": y.dtype}), [sums], y)


@lowers("rope")
def lower_rope(lo: Lowerer, op: Op) -> None:
    """Rotary embedding by itself."""
    x, y = lo.read(op.given("x")), lo.destination(op.result)
    positions = lo.read(op.given("positions"))
    sin, cos = (lo.dense(lo.read(op.given(n))) for n in ("sin", "cos"))
    dim = x.shape[-1]
    half = sin.shape[1]
    assert isinstance(dim, int) and isinstance(half, int)
    if len(x.shape) == 3:
        x, y = (View(v.buffer, (1, *v.shape), (0, *v.strides), v.offset) for v in (x, y))
    where = positions.expanded(x.shape[:2])
    operands = (
        Operand("x", x),
        Operand("positions", where),
        Operand("sin", sin),
        Operand("cos", cos),
        Operand("y", y, written=True),
    )
    lo.emit(
        Rope(
            op=op,
            operands=operands,
            algo=op.attrs["algo"],
            rotary=2 * half,
            head_dim=dim,
            limit=sin.shape[0],
            flops=product(x.shape) * 3,
        )
    )


@lowers("kv_update")
def lower_kv_update(lo: Lowerer, op: Op) -> None:
    """New rows into the cache's own storage."""
    cache = lo.inplace_view(op, 0)
    operands = [Operand("rows", lo.read(op.given("rows"))), Operand("lengths", lo.read(op.given("lengths")))]
    valid = op.operand("valid")
    if valid is not None:
        operands.append(Operand("valid", lo.read(valid)))
    table = op.operand("table")
    if table is not None:
        operands.append(Operand("table", lo.dense(lo.read(table))))
        cache = cache.paged(operands[-1].view)
    operands.append(Operand("cache", cache, written=True))
    lo.emit(KVUpdate(op=op, operands=tuple(operands), capacity=cache.shape[2]))


@lowers("sample")
def lower_sample(lo: Lowerer, op: Op) -> None:
    """random_sample and repetition_penalty."""
    x = lo.read(op.given("logits"))
    vocabulary = x.shape[-1]
    y = lo.destination(op.result)
    if op.name == "repetition_penalty":
        history = lo.read(op.given("history"))
        operands = [
            Operand("x", x),
            Operand("history", history),
            Operand("counts", lo.read(op.given("counts"))),
            Operand("penalty", lo.read(op.given("penalty"))),
            Operand("y", y, written=True),
        ]
        lo.emit(Sample(op=op, operands=tuple(operands), mode="penalty", rows=x.shape[:-1], vocabulary=vocabulary))
        return
    rows = x.shape[:-1]
    operands = [Operand("x", x)]
    for name in ("random_val", "top_p", "top_k", "temperature", "min_p"):
        v = op.operand(name)
        if v is not None:
            operands.append(Operand(name, lo.read(v).expanded(rows)))
    operands.append(Operand("y", y, written=True))
    heap = lo.fresh(i64, (product(rows), vocabulary), "scratch")
    weights = lo.fresh(f64, (product(rows), vocabulary), "scratch")
    lo.emit(
        Sample(
            op=op,
            operands=tuple(operands),
            mode="sample",
            rows=rows,
            vocabulary=vocabulary,
            scratch=(Operand("heap", heap, written=True), Operand("weights", weights, written=True)),
        )
    )
