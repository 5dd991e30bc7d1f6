"""Lowering of products: packed linears with their prologues and epilogues, general matmuls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monoplan.codegen.cpu.schedule_linear import (
    THIRDS_BLOCK,
    TILE_ROWS,
    blocking,
    experts_layout,
    experts_tiled,
    few_rows,
    linear_layout,
)
from monoplan.codegen.expressions import compute_type
from monoplan.codegen.formats import choose_format, format_of
from monoplan.codegen.kernels import Experts, Heads, KVUpdate, Latent, Linear, Matmul, Norm, Reduce, Rope, Route
from monoplan.codegen.lower.lowerer import Lowerer, expanded_rows, lowers, rows_by_columns
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.views import Buffer, View, whole
from monoplan.ir.cache_rows import row_numbers
from monoplan.ir.dims import Dim
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Call, parse_expr, substitute_args
from monoplan.ir.graph import Op, Value
from monoplan.ir.ops.linear import gate_expr
from monoplan.ir.types import DType, bf16, f16, f32, f64, i8, i64, product, promote

FAST = (f32, bf16, f16)


def can_pack(lo: Lowerer, x: Value, weight: Value) -> bool:
    """Whether the packed kernel takes this product: constant weights in a format, floats up to f32."""
    return lo.is_param(weight) and x.type.dtype in FAST and choose_format(weight.type, lo.target) is not None


def _rows(x: Value) -> Dim:
    return product(x.type.shape[:-1])


def _prologue(lo: Lowerer, op: Op, x: Value) -> list[Operand]:
    """x as rows, with the weights of the norm in front."""
    depth = x.type.shape[-1]
    rows = rows_by_columns(lo, lo.read(x), _rows(x), depth)
    if not isinstance(rows.strides[1], int):  # the template's inner loop knows no symbols
        rows = lo.copy(rows)
    operands = [Operand("x", rows)]
    for name in ("bias", "norm_weight", "norm_bias"):
        v = op.operand(name) if name in op.opdef.operand_names else None
        if v is not None:
            part = lo.dense(lo.read(v))
            operands.append(Operand(name, part if isinstance(part.offset, int) else lo.copy(part)))
    return operands


@lowers("linear", "fused_linear", "linear_argmax", "linear_norm")
def lower_linear(lo: Lowerer, op: Op) -> None:
    """A linear layer with constant weights becomes one packed kernel; otherwise a norm (if any) and a matmul."""
    x, weight = op.given(0), op.given(1)
    if not can_pack(lo, x, weight):
        _lower_general_linear(lo, op, x, weight)
        return
    a = op.attrs
    gated = a.get("gated", False)
    operands, common = _packed(lo, op, x, weight, "gated" if gated else "pointwise")
    columns: int = common["columns"]
    acc = promote(x.type.dtype, weight.type.dtype)
    y = lo.destination(op.result)
    if op.name == "linear_argmax":
        best = View(y.buffer, (_rows(x),), (1,), y.offset)
        operands.append(Operand("y", best, written=True))
        found = Operand("found", lo.fresh(i64, (lo_threads(), _rows(x), 2), "scratch"), written=True)
        common |= {"epilogue": "argmax", "body": Body(Arg(0), (f32,))}
        lo.emit(Linear(**common, operands=tuple(operands), scratch=(*_scratch(lo, x, operands[1].view), found)))
        return
    n = columns // 2 if gated else columns
    extras = [v for v in op.operands[len(op.opdef.operand_names) :] if v is not None]
    for i, v in enumerate(extras):
        operands.append(Operand(f"e{i}", expanded_rows(lo, lo.read(v), op.result.type.shape, _rows(x), n)))
    operands.append(Operand("y", y.shaped((_rows(x), n)), written=True))
    node = parse_expr(a["expr"]) if op.name != "linear" else Arg(0)
    body = Body(node, (*([acc] * (2 if gated else 1)), *(v.type.dtype for v in extras)))
    more: list[Operand] = []
    if op.name == "linear_norm":
        more = [Operand("made", lo.fresh(f32, (_rows(x), columns), "scratch"), written=True)]
        names = {"norm_weight": "tail_weight", "norm_bias": "tail_bias"}
        operands = [replace(o, name=names.get(o.name, o.name)) for o in operands]
        common |= {"epilogue": "normed", "tail_norm": a["norm"]}
    scratch = (*_scratch(lo, x, operands[1].view), *more)
    lo.emit(Linear(**common, operands=tuple(operands), body=body, scratch=scratch))


@lowers("linear_route")
def lower_linear_route(lo: Lowerer, op: Op) -> None:
    """A gated product whose last columns are the scores of a choice."""
    a, x, weight = op.attrs, op.given(0), op.given(1)
    rows, scores, body = _rows(x), a["scores"], parse_expr(a["expr"])
    chosen = [
        Operand(n, lo.destination(r), written=True) for n, r in zip(("share", "ids"), op.results[1:], strict=True)
    ]
    if not can_pack(lo, x, weight):
        made = _product(lo, op, x, weight, None)
        half, last = made.shape[-1] // 2, len(made.shape) - 1  # type: ignore[operator]
        parts = [made.sliced(last, i * half, half - scores // 2) for i in range(2)]
        lo.pointwise(body, parts, lo.destination(op.results[0]))
        found, flat = lo.fresh(f32, (rows, scores)), made.shaped((rows, 2 * half))
        for i in range(2):
            part = flat.sliced(1, (i + 1) * half - scores // 2, scores // 2)
            lo.copy(part, found.sliced(1, i * (scores // 2), scores // 2))
        _emit_route(lo, op, [Operand("x", found), *chosen], rows, scores - a["gates"], a["k"])
        return
    operands, common = _packed(lo, op, x, weight, "gated")
    y = lo.destination(op.results[0]).shaped((rows, (common["columns"] - scores) // 2))
    operands += [Operand("y", y, written=True), *chosen]
    kept = Operand("scores", lo.fresh(f32, (rows, scores), "scratch"), written=True)
    common |= {"epilogue": "routed", "scores": scores}
    acc = promote(x.type.dtype, weight.type.dtype)
    scratch = (*_scratch(lo, x, operands[1].view), kept)
    lo.emit(Linear(**common, operands=tuple(operands), body=Body(body, (acc, acc)), scratch=scratch))


def _packed(lo: Lowerer, op: Op, x: Value, weight: Value, epilogue: str) -> tuple[list[Operand], dict[str, Any]]:
    """What a product reads, with its packed weight, and what its kernel has whatever stands behind it."""
    columns, depth = weight.type.shape
    assert isinstance(columns, int) and isinstance(depth, int)
    operands = _prologue(lo, op, x)
    packed = lo.param(weight, linear_layout(lo.target, weight.type, epilogue))
    operands.insert(1, Operand("w", View(packed, (columns, depth), (depth, 1))))
    common = {"op": op, "norm": _in_front(op), "eps": op.attrs.get("eps", 0.0), "rows": _rows(x), "depth": depth}
    return operands, common | {"columns": columns, "epilogue": epilogue, "flops": _rows(x) * (2 * columns * depth)}


def _in_front(op: Op) -> str:
    """The norm of x in front of a product."""
    return "none" if op.name == "linear_norm" else str(op.attrs.get("norm", "none"))


def lo_threads() -> Dim:
    """The number of threads as a symbol: scratch memory may be per thread."""
    from monoplan.ir.dims import symbol

    return symbol("threads")


def _scratch(lo: Lowerer, x: Value, weight: View, *others: View) -> tuple[Operand, ...]:
    """Rows of x, normed and transposed into blocks: one copy for all threads, or a block for each when rows are few;
    and for each thread the sums of many rows between strips of k."""
    depth, layout = x.type.shape[-1], weight.buffer.layout
    assert layout is not None
    if not layout.panel:
        return ()
    assert isinstance(depth, int)
    b, few = blocking(lo.target, layout, depth), few_rows(lo.target, layout)[-1]
    packed = format_of(layout)
    if packed.blocks:  # rows as integers, and a block of them for each thread when they are few
        rows = _rows(x) + (TILE_ROWS - 1) + lo_threads() * few  # up to whole blocks, of whatever loop
        layouts = [layout, *(o.buffer.layout for o in others)]
        floats = sum(format_of(each).x_floats(depth) for each in layouts if each is not None)
        found = [Operand("xt", lo.fresh(f32, (rows, floats), "scratch"), written=True)]
        if b.sums:
            found.append(Operand("partial", lo.fresh(f32, (lo_threads(), b.sums), "scratch"), written=True))
        return tuple(found)
    # Floats for each k: on tile units rows are bf16, or a few of them in three parts.
    many, own = (b.block // 2, -(-3 * few // 2)) if format_of(layout).for_tiles else (b.block, few)
    block, floats = b.block, depth
    if b.tiled_from:  # three bf16 parts of 32 k take the room of 48 floats
        block = many = THIRDS_BLOCK
        floats = -(-depth // 32) * 48
    rows = (_rows(x) + (block - 1)) // block * many + lo_threads() * own
    sums = lo.fresh(f32, (lo_threads(), b.sums), "scratch")
    xt = lo.fresh(f32, (rows, floats), "scratch")
    return Operand("xt", xt, written=True), Operand("partial", sums, written=True)


def _lower_general_linear(lo: Lowerer, op: Op, x: Value, weight: Value) -> None:
    """Weights that are computed, or f64: the norm, then a matmul by the transposed weight, then the epilogue."""
    a = op.attrs
    if op.name == "linear":
        _product(lo, op, x, weight, lo.destination(op.result))
        return
    made = _product(lo, op, x, weight, None)
    columns = weight.type.shape[0]
    if op.name == "linear_argmax":
        y = lo.destination(op.result)
        strides = y.strides[:-1] if op.attrs["keepdims"] else y.strides
        out = View(y.buffer, made.shape[:-1], strides, y.offset)
        lo.emit(
            Reduce(
                op=op,
                operands=(Operand("x0", made), Operand("y", out, written=True)),
                kind="argmax",
                pre=Body(Arg(0), (made.dtype,)),
                post=Body(Arg(0), (i64,)),
                outer=made.shape[:-1],
                inner=(columns,),
            )
        )
        return
    if op.name == "linear_norm":
        _normed_rows(lo, op, made)
        return
    parts = [made]
    if a["gated"]:
        half = columns // 2
        parts = [made.sliced(len(made.shape) - 1, i * half, half) for i in range(2)]
    extras = [lo.read(v) for v in op.operands[len(op.opdef.operand_names) :] if v is not None]
    lo.pointwise(parse_expr(a["expr"]), [*parts, *extras], lo.destination(op.result))


def _normed_rows(lo: Lowerer, op: Op, made: View) -> None:
    """The norm behind a product, with its tail, by a kernel of its own."""
    extras = [v for v in op.operands[len(op.opdef.operand_names) :] if v is not None]
    weights = [(short, v) for name, short in _NORM_OPERANDS if (v := op.operand(name)) is not None]
    operands = [Operand("x", made), *(Operand(short, lo.dense(lo.read(v))) for short, v in weights)]
    operands += [Operand(f"e{i}", lo.read(v).expanded(op.result.type.shape)) for i, v in enumerate(extras)]
    lo.emit(
        Norm(
            op=op,
            operands=(*operands, Operand("y", lo.destination(op.result), written=True)),
            kind=op.attrs["norm"],
            eps=op.attrs["eps"],
            body=Body(parse_expr(op.attrs["expr"]), (made.dtype, *(v.type.dtype for v in extras))),
            outer=made.shape[:-1],
            inner=made.shape[-1],
        )
    )


def _packed_product(lo: Lowerer, op: Op, x: Value, weight: Value) -> View:
    """The same with a packed weight."""
    operands, common = _packed(lo, op, x, weight, "pointwise")
    acc = promote(x.type.dtype, weight.type.dtype)
    y = lo.fresh(compute_type(acc), (*x.type.shape[:-1], weight.type.shape[0]))
    out = y.shaped((_rows(x), weight.type.shape[0]))
    operands, scratch = [*operands, Operand("y", out, written=True)], _scratch(lo, x, operands[1].view)
    lo.emit(Linear(**common, operands=tuple(operands), body=Body(Arg(0), (acc,)), scratch=scratch))
    return y


def _normed(lo: Lowerer, op: Op, x: Value) -> View:
    """The norm in front of a product, by a kernel of its own; half floats stay f32."""
    depth = x.type.shape[-1]
    normed = lo.fresh(compute_type(x.type.dtype), (_rows(x), depth))
    weights = [
        Operand(short, lo.dense(lo.read(v)))
        for name, short in _NORM_OPERANDS
        if name in op.opdef.operand_names and (v := op.operand(name)) is not None
    ]
    operands = (Operand("x", rows_by_columns(lo, lo.read(x), _rows(x), depth)), *weights)
    lo.emit(
        Norm(
            op=op,
            operands=(*operands, Operand("y", normed, written=True)),
            kind=op.attrs.get("norm", "rms"),
            eps=op.attrs["eps"],
            body=Body(Arg(0), (x.type.dtype,)),
            outer=(_rows(x),),
            inner=depth,
        )
    )
    return whole(normed.buffer, x.type.shape)


def _product(lo: Lowerer, op: Op, x: Value, weight: Value, into: View | None) -> View:
    """linear(norm(x), weight, bias) by a norm kernel (if any) and a matmul; half floats stay f32 in between."""
    if into is None and (weight.type.dtype.is_low_bit or can_pack(lo, x, weight)):
        return _packed_product(lo, op, x, weight)
    xs = lo.read(x) if _in_front(op) == "none" else _normed(lo, op, x)
    acc = promote(x.type.dtype, weight.type.dtype)
    bias = op.operand("bias") if "bias" in op.opdef.operand_names else None
    y = into if into is not None else lo.fresh(compute_type(acc), (*x.type.shape[:-1], weight.type.shape[0]))
    body = Body(Arg(0), (acc,))
    if bias is not None:
        body = Body(Call("add", (Arg(0), Arg(1))), (acc, bias.type.dtype))
    extras = [] if bias is None else [lo.read(bias)]
    _emit_matmul(lo, op, xs, lo.read(weight).transposed((1, 0)), y, extras, body)
    return y


_NORM_OPERANDS = (("norm_weight", "weight"), ("norm_bias", "bias"))


@lowers("matmul", "fused_matmul")
def lower_matmul(lo: Lowerer, op: Op) -> None:
    """Batched product of two values."""
    a, b = op.given(0), op.given(1)
    acc = promote(a.type.dtype, b.type.dtype)
    extras = [v for v in op.operands[2:] if v is not None]
    node = parse_expr(op.attrs["expr"]) if op.name == "fused_matmul" else Arg(0)
    body = Body(node, (acc, *(v.type.dtype for v in extras)))
    _emit_matmul(lo, op, lo.read(a), lo.read(b), lo.destination(op.result), [lo.read(v) for v in extras], body)


def _emit_matmul(lo: Lowerer, op: Op, a: View, b: View, y: View, extras: list[View], body: Body) -> None:
    if len(y.shape) == 1:  # a vector times a matrix
        a = View(a.buffer, (1, *a.shape), (0, *a.strides), a.offset)
        y = View(y.buffer, (1, *y.shape), (0, *y.strides), y.offset)
    batch = y.shape[:-2]
    rows, columns, depth = y.shape[-2], y.shape[-1], a.shape[-1]
    left = a.expanded((*batch, rows, depth))
    right = b.expanded((*batch, depth, columns))
    operands = [Operand("a", left), Operand("b", right)]
    operands += [Operand(f"e{i}", v.expanded((*batch, rows, columns))) for i, v in enumerate(extras)]
    operands.append(Operand("y", y, written=True))
    acc: DType = body.types[0]
    kept = acc if acc.is_integer else f64 if acc == f64 else f32
    lo.emit(
        Matmul(
            op=op,
            operands=tuple(operands),
            body=body,
            batch=batch,
            rows=rows,
            columns=columns,
            depth=depth,
            accumulator=kept,
            flops=product(y.shape) * 2 * depth,
        )
    )


@lowers("qkv_rope_cache")
def lower_qkv(lo: Lowerer, op: Op) -> None:
    """The QKV product whose epilogue norms, rotates and writes heads to q and to the caches."""
    a = op.attrs
    x, weight = op.given(0), op.given(1)
    v_weight = op.operand("v_weight")
    normed = op.operand("q_norm") is not None or op.operand("k_norm") is not None
    k_cache = op.operand("k_cache")
    apart = k_cache is not None and k_cache.type.dtype == i8  # a row's scale is known when all of it is
    if not can_pack(lo, x, weight) or (v_weight is not None and (normed or apart) and not lo.target.is_cpu):
        _lower_general_qkv(lo, op, x, weight)
        return
    columns, depth = weight.type.shape
    operands = _prologue(lo, op, x)
    kc, vc = lo.inplace_view(op, 1), lo.inplace_view(op, 2)
    dim = row_numbers(kc.shape[3], kc.dtype)
    assert isinstance(dim, int) and isinstance(columns, int) and isinstance(depth, int)
    packed = lo.param(weight, linear_layout(lo.target, weight.type, "heads", dim))
    operands.insert(1, Operand("w", View(packed, (columns, depth), (depth, 1))))
    if v_weight is not None:
        rest = a["kv_heads"] * dim
        packed = lo.param(v_weight, linear_layout(lo.target, v_weight.type, "heads", dim))
        operands.insert(2, Operand("v_w", View(packed, (rest, depth), (depth, 1))))
        columns += rest
    batch, seq = x.type.shape[:2]
    operands.append(Operand("positions", lo.read(op.given("positions")).expanded((batch, seq))))
    for name in ("sin", "cos", "lengths", "valid", "q_norm", "k_norm", "table"):
        v = op.operand(name)
        if v is not None:
            operands.append(Operand(name, lo.dense(lo.read(v))))
    if operands[-1].name == "table":
        kc, vc = kc.paged(operands[-1].view), vc.paged(operands[-1].view)
    operands += [Operand("k_cache", kc, written=True), Operand("v_cache", vc, written=True)]
    operands.append(Operand("y", lo.destination(op.results[0]), written=True))
    table = next(o for o in operands if o.name == "sin")
    half = table.shape[1]
    assert isinstance(half, int)
    rows = _rows(x)
    lo.emit(
        Linear(
            op=op,
            operands=tuple(operands),
            norm=a["norm"],
            eps=a["eps"],
            rows=rows,
            depth=depth,
            columns=columns,
            epilogue="heads",
            heads=a["heads"],
            kv_heads=a["kv_heads"],
            head_dim=dim,
            rotary=2 * half,
            algo=a["algo"],
            qk_eps=a["qk_eps"],
            batch=batch,
            seq=seq,
            flops=rows * (2 * columns * depth),
            scratch=_scratch(lo, x, *(o.view for o in operands if o.name in ("w", "v_w"))),
        )
    )


def _lower_general_qkv(lo: Lowerer, op: Op, x: Value, weight: Value) -> None:
    """The same by one kernel for each part, for weights that are computed, or f64."""
    a = op.attrs
    batch, seq = x.type.shape[:2]
    caches = [lo.inplace_view(op, 1), lo.inplace_view(op, 2)]
    dim = row_numbers(caches[0].shape[3], caches[0].dtype)
    assert isinstance(dim, int)
    v_weight = op.operand("v_weight")
    joined = a["heads"] + (1 if v_weight is not None else 2) * a["kv_heads"]
    cut = _product(lo, op, x, weight, None).shaped((batch, seq, joined, dim))
    q, k = cut.sliced(2, 0, a["heads"]), cut.sliced(2, a["heads"], a["kv_heads"])
    if v_weight is None:
        v = cut.sliced(2, a["heads"] + a["kv_heads"], a["kv_heads"])
    else:
        v = _product(lo, op, x, v_weight, None).shaped((batch, seq, a["kv_heads"], dim))
    positions, sin, cos, lengths = (op.given(n) for n in ("positions", "sin", "cos", "lengths"))
    half = sin.type.shape[1]
    assert isinstance(half, int)
    tables = (
        Operand("positions", lo.read(positions).expanded((batch, seq))),
        Operand("sin", lo.dense(lo.read(sin))),
        Operand("cos", lo.dense(lo.read(cos))),
    )

    def turned(part: View, norm: str, into: View | None) -> View:
        scale = op.operand(norm)
        if scale is not None:
            normed = lo.fresh(part.dtype, part.shape)
            operands = (
                Operand("x", part),
                Operand("weight", lo.dense(lo.read(scale))),
                Operand("y", normed, written=True),
            )
            lo.emit(
                Norm(
                    op=op,
                    operands=operands,
                    kind="rms",
                    eps=a["qk_eps"],
                    body=Body(Arg(0), (part.dtype,)),
                    outer=part.shape[:3],
                    inner=dim,
                )
            )
            part = normed
        y = into if into is not None else lo.fresh(part.dtype, part.shape)
        lo.emit(
            Rope(
                op=op,
                operands=(Operand("x", part), *tables, Operand("y", y, written=True)),
                algo=a["algo"],
                rotary=2 * half,
                head_dim=dim,
                limit=sin.type.shape[0],
            )
        )
        return y

    turned(q, "q_norm", lo.destination(op.results[0]))
    valid = op.operand("valid")
    counts = [Operand("lengths", lo.read(lengths))]
    counts += [] if valid is None else [Operand("valid", lo.read(valid))]
    table = op.operand("table")
    if table is not None:
        counts.append(Operand("table", lo.dense(lo.read(table))))
        caches = [cache.paged(counts[-1].view) for cache in caches]
    for cache, rows in zip(caches, (turned(k, "k_norm", None), v), strict=True):
        operands = (Operand("rows", rows), *counts, Operand("cache", cache, written=True))
        lo.emit(KVUpdate(op=op, operands=operands, capacity=cache.shape[2]))


@lowers("heads_rope_cache")
def lower_heads(lo: Lowerer, op: Op) -> None:
    """Norms and rotation of q and k, and the cache writes, of a product that stands by itself."""
    x, positions, sin = (op.given(n) for n in ("x", "positions", "sin"))
    batch, seq = x.type.shape[:2]
    kc, vc, half = lo.inplace_view(op, 1), lo.inplace_view(op, 2), sin.type.shape[1]
    assert isinstance(kc.shape[3], int) and isinstance(half, int)
    operands = [Operand("x", lo.read(x)), Operand("positions", lo.read(positions).expanded((batch, seq)))]
    for name in ("sin", "cos", "lengths", "valid", "q_norm", "k_norm", "table"):
        if (v := op.operand(name)) is not None:
            operands.append(Operand(name, lo.dense(lo.read(v))))
    if operands[-1].name == "table":
        kc, vc = kc.paged(operands[-1].view), vc.paged(operands[-1].view)
    operands += [Operand("k_cache", kc, written=True), Operand("v_cache", vc, written=True)]
    operands.append(Operand("y", lo.destination(op.results[0]), written=True))
    sizes = {"batch": batch, "seq": seq, "head_dim": kc.shape[3], "rotary": 2 * half}
    lo.emit(Heads(op=op, operands=tuple(operands), **sizes, **op.attrs))  # type: ignore[arg-type]


@lowers("latent_rope_cache")
def lower_latent(lo: Lowerer, op: Op) -> None:
    """Norm, rotations and cache write of latent attention, beside the products of the queries if they have them."""
    names = ("latent", "key", "query", "positions", "sin")
    latent, key, query, positions, sin = (lo.read(op.given(n)) for n in names)
    batch, seq, heads, dim = query.shape
    cache, rank, half = lo.inplace_view(op, 1), latent.shape[-1], sin.shape[1]
    assert isinstance(heads, int) and isinstance(dim, int) and isinstance(rank, int) and isinstance(half, int)
    operands = [Operand("latent", latent), Operand("key", key), Operand("query", query)]
    operands.append(Operand("positions", positions.expanded((batch, seq))))
    for name in ("sin", "cos", "lengths", "valid", "norm_weight", "table"):
        if (v := op.operand(name)) is not None:
            operands.append(Operand("latent_weight" if name == "norm_weight" else name, lo.dense(lo.read(v))))
    if operands[-1].name == "table":
        cache = cache.paged(operands[-1].view)
    operands.append(Operand("k_cache", cache, written=True))
    y = lo.destination(op.results[0])
    turned = y.sliced(3, y.shape[3] - dim, dim)  # type: ignore[operator]
    operands.append(Operand("turned", turned, written=True))
    sizes = {"batch": batch, "seq": seq, "heads": heads, "rank": rank, "head_dim": dim, "rotary": 2 * half}
    kernel = Latent(op=op, operands=tuple(operands), **sizes, **op.attrs)  # type: ignore[arg-type]
    plain, matrices = op.operand("plain"), op.operand("matrices")
    if plain is None or matrices is None:
        lo.emit(kernel)
        return
    rows, ids = batch * seq, View(Buffer("heads", i64, heads, "iota", start=0), (batch * seq, heads), (0, 1))
    given, shape = lo.read(plain), (rows, heads, plain.type.shape[3])
    x = given.reshaped(shape)
    if x is None or x.strides[-1] != 1:
        x = lo.copy(given).shaped(shape)
    into = y.sliced(3, 0, rank).reshaped((rows, heads, rank))
    made = into if into is not None else lo.fresh(y.dtype, (rows, heads, rank))
    body = Body(Arg(0), (promote(x.dtype, matrices.type.dtype),))
    operands = [Operand("x", x), Operand("w", _expert_matrices(lo, [matrices])[0])]
    operands += [Operand("ids", ids), Operand("y", made, written=True), *kernel.operands]
    _emit_experts(lo, op, operands, body, beside=kernel)
    if into is None:
        lo.copy(made.shaped((batch, seq, heads, rank)), y.sliced(3, 0, rank))


@lowers("route")
def lower_route(lo: Lowerer, op: Op) -> None:
    """The choice of experts; the probabilities of all of a row lie in scratch memory."""
    x, bias = op.given(0), op.operands[1]
    rows, columns = x.type.shape
    assert isinstance(columns, int)
    experts = columns - op.attrs["gates"]
    operands = [Operand("x", lo.read(x))] + ([] if bias is None else [Operand("bias", lo.dense(lo.read(bias)))])
    operands += [Operand(n, lo.destination(r), written=True) for n, r in zip(("share", "ids"), op.results, strict=True)]
    _emit_route(lo, op, operands, rows, experts, op.attrs["k"])


def _emit_route(lo: Lowerer, op: Op, operands: list[Operand], rows: Dim, experts: int, choices: int) -> None:
    chances = Operand("chances", lo.fresh(f32, (rows, experts), "scratch"), written=True)
    lo.emit(Route(op=op, operands=tuple(operands), scratch=(chances,), rows=rows, experts=experts, choices=choices))


def _expert_matrices(lo: Lowerer, weights: list[Value]) -> list[View]:
    """The matrices as their layout has them, one behind the other; as they are where there is none."""
    layouts = {experts_layout(lo.target, w.type) if lo.is_param(w) else None for w in weights}
    layout = layouts.pop()
    if layout is not None and not layouts:
        return [whole(lo.param(w, layout), w.type.shape) for w in weights]
    if low := [w.type for w in weights if w.type.dtype.is_low_bit]:
        what = f"experts of {low[0].shape[1]} columns in {low[0].dtype} can't be multiplied"
        why = "they must be weights of one type whose columns fill panels or tiles"
        raise CompileError(what, why=why, fix="load the model in another type: dtype='bfloat16'")
    return [lo.dense(lo.read(w)) for w in weights]


@lowers("experts", "fused_experts")
def lower_experts(lo: Lowerer, op: Op) -> None:
    """Products by chosen matrices."""
    x, weight, ids, up, *biases = op.operands[:6]
    assert x is not None and weight is not None and ids is not None
    rows, choices = ids.type.shape
    depth = weight.type.shape[2]
    found = _expert_matrices(lo, [v for v in (weight, up) if v is not None])
    norm = "rms" if op.name == "fused_experts" else "none"
    if norm == "rms" and found[0].buffer.layout is None:  # the kernel for such matrices reads x as it is
        given, norm = _normed(lo, op, x), "none"
    else:
        given = lo.read(x)
    if x.type.rank == 2 or given.is_virtual or given.strides[-1] != 1:
        given = lo.dense(given)
    steps = (depth, 0, 1) if x.type.rank == 2 else given.strides
    operands = [Operand("x", View(given.buffer, (rows, choices, depth), steps, given.offset))]
    operands += [Operand(name, view) for name, view in zip(("w", "up"), found, strict=False)]
    matrices, acc = len(found), promote(x.type.dtype, weight.type.dtype)
    operands += [Operand(n, lo.dense(lo.read(v))) for n, v in zip(("b", "up_b"), biases, strict=True) if v is not None]
    added = [o.dtype for o in operands[1 + matrices :]]
    gamma = op.operand("norm_weight") if norm == "rms" else None
    operands += [] if gamma is None else [Operand("norm_weight", lo.dense(lo.read(gamma)))]
    operands += [Operand("ids", lo.read(ids)), Operand("y", lo.destination(op.result), written=True)]
    expr = gate_expr(op.attrs["gate"]) if up is not None else Arg(0)
    if added:
        expr = substitute_args(expr, lambda i: Call("add", (Arg(i), Arg(matrices + i))))
    _emit_experts(lo, op, operands, Body(expr, (*[acc] * matrices, *added)), norm)


def _emit_experts(
    lo: Lowerer, op: Op, operands: list[Operand], body: Body, norm: str = "none", beside: Latent | None = None
) -> None:
    """The kernel with its scratch memory: on CPUs every thread sorts the choices for itself."""
    weight, ids = next(o.view for o in operands if o.name == "w"), next(o.view for o in operands if o.name == "ids")
    rows, choices = ids.shape
    experts, columns, depth = weight.shape
    assert isinstance(choices, int) and isinstance(experts, int)
    assert isinstance(columns, int) and isinstance(depth, int)
    matrices = sum(o.name in ("w", "up") for o in operands)
    scratch: tuple[Operand, ...] = ()
    if lo.target.is_cpu:
        sorted_ = lo.fresh(i64, (lo_threads(), 2 * rows * choices + experts + 1), "scratch")
        scratch = (Operand("sorted", sorted_, written=True),)
        layout = weight.buffer.layout
        if layout is not None:  # rows as a pass takes them, of each matrix in blocks
            floats = format_of(layout).x_floats(depth) if format_of(layout).blocks else depth
            block = 16 if experts_tiled(lo.target, layout) else few_rows(lo.target, layout)[1]
            size = (rows * choices + (block - 1) * experts + block, floats)
            scratch += (Operand("xt", lo.fresh(f32, size, "scratch"), written=True),)
    lo.emit(
        Experts(
            op=op,
            operands=tuple(operands),
            scratch=scratch,
            norm=norm,
            eps=op.attrs["eps"] if norm != "none" else 0.0,
            rows=rows,
            choices=choices,
            experts=experts,
            columns=columns,
            depth=depth,
            body=body,
            beside=beside,
            flops=rows * choices * (2 * columns * depth * matrices),
        )
    )
