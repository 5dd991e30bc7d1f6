"""The GPU's table of kernel families, and kernels as it needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monoplan.codegen.backend import BackEnd, Family, Variables
from monoplan.codegen.cpu import variables as shared
from monoplan.codegen.cuda import schedule as choose
from monoplan.codegen.cuda import variables as own
from monoplan.codegen.cuda.attention import attention_variants
from monoplan.codegen.cuda.experts import expert_variants
from monoplan.codegen.cuda.experts import experts as expert_variables
from monoplan.codegen.cuda.launches import Exchange, Launch, Variant, Word, ceil_div, pointer_word
from monoplan.codegen.cuda.linear import LinearVariants
from monoplan.codegen.cuda.schedule import CudaSchedule
from monoplan.codegen.formats import format_of
from monoplan.codegen.kernels import (
    Attention,
    Collective,
    Experts,
    Gather,
    Heads,
    Kernel,
    KVUpdate,
    Latent,
    Linear,
    Matmul,
    Norm,
    Pointwise,
    Reduce,
    Rope,
    Route,
    Sample,
    Scan,
    Scatter,
    Softmax,
    Sort,
    Window,
)
from monoplan.codegen.lower.lowerer import Loop, Lowered
from monoplan.codegen.moves import Items, all_kernels, attended, map_kernels, moved, residuals
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, View, whole
from monoplan.ir.dims import Dim
from monoplan.ir.expr import Arg
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, bf16, f16, f32, i8, product

if TYPE_CHECKING:
    from monoplan.codegen.cuda.render import Renderer

Blocks = Callable[[Any, Any, Variables], Dim]


@dataclass(frozen=True, kw_only=True)
class CudaFamily(Family):
    """`variants(renderer, kernel, schedule)`: the ways a step of this family may run, in order of preference."""

    variants: Callable[[Renderer, Any, Any], tuple[Variant, ...]]


def _plain(
    variables: Callable[[Any], Variables], blocks: Blocks, schedule: Callable[[Any], CudaSchedule] = choose.plain
) -> CudaFamily:
    """A family with one template and one launch of `blocks(kernel, schedule, variables)` blocks."""

    def variants(renderer: Renderer, k: Kernel, s: CudaSchedule) -> tuple[Variant, ...]:
        names = variables(k)
        function, words = renderer.function(k, k.family, [pointer_word(o) for o in k.pointers], s=s, **names)
        return (Variant(k.family, (Launch(function, (blocks(k, s, names), 1, 1), s.threads, words),)),)

    return CudaFamily(schedule=lambda k, target: schedule(k), variables=lambda k, s: variables(k), variants=variants)


def _rows(k: Any, s: CudaSchedule, names: Variables) -> Dim:
    """A block for each row."""
    return product(k.outer)


def _threads(size: Callable[[Any], Dim]) -> Blocks:
    """Blocks of as many threads as a kernel needs."""
    return lambda k, s, names: ceil_div(size(k), s.threads)


def _loop(k: Pointwise, s: CudaSchedule, names: Variables) -> Dim:
    return ceil_div(names["loop"].outer_size * names["loop"].inner, s.threads)


def _sample(k: Sample, s: CudaSchedule, names: Variables) -> Dim:
    rows = product(k.rows)
    return rows if k.mode == "sample" else ceil_div(rows * k.vocabulary, s.threads)


def _exchange(renderer: Renderer, k: Collective, s: CudaSchedule) -> tuple[Variant, ...]:
    """Ranks meet on the host, or through their own library: there is nothing to launch."""
    x, y = (Word("operand", o, offset=o.view.offset * o.dtype.itemsize) for o in (k.operand("x"), k.operand("y")))
    assert k.mode == "gather", "sums over ranks are lowered to a gather and a pointwise kernel"
    return (Variant("collective", (Exchange(x, y, k.rows, k.columns, k.world, k.operand("x").dtype),)),)


def _prepare(lowered: Lowered, target: Target) -> Lowered:
    items = lowered.items
    for change in (_without_scratch, _split_norm, _split_values):
        items = map_kernels(items, change)
    lowered = replace(lowered, items=items)
    lowered = moved(lowered, attended(lowered.items, lambda k: choose.attention(k, target).prefill is not None))
    for find in (narrowed, residuals):
        lowered = moved(lowered, find(lowered.items))
    return replace(lowered, items=_with_halves(lowered.items))


def _without_scratch(k: Kernel) -> Iterator[Kernel]:
    """Products need no scratch of the arena but for scores: their variants have a workspace. Routes have registers."""
    kept = tuple(o for o in k.scratch if o.name == "scores")
    yield replace(k, scratch=kept) if isinstance(k, Linear | Route) else k


def _split_norm(k: Kernel) -> Iterator[Kernel]:
    """A layer norm in front of a product becomes a kernel of its own: its mean can't be applied to finished sums."""
    if not isinstance(k, Linear) or k.norm != "layer":
        yield k
        return
    x, dtype = k.operand("x"), k.format.x_dtype
    buffer = Buffer(f"{x.view.buffer.name}_normed", dtype, k.rows * k.depth, "arena")
    normed = whole(buffer, (k.rows, k.depth))
    operands = [
        x,
        *(Operand(short, k.operand(f"norm_{short}").view) for short in ("weight", "bias") if k.has(f"norm_{short}")),
    ]
    operands.append(Operand("y", normed, written=True))
    yield Norm(
        op=k.op,
        operands=tuple(operands),
        kind="layer",
        eps=k.eps,
        body=Body(Arg(0), (x.dtype,)),
        outer=(k.rows,),
        inner=k.depth,
    )
    left = (
        Operand("x", normed) if o.name == "x" else o for o in k.operands if o.name not in ("norm_weight", "norm_bias")
    )
    yield replace(k, norm="none", eps=0.0, operands=tuple(left))


def _split_values(k: Kernel) -> Iterator[Kernel]:
    """q and k in one format and v in another are two products with one epilogue."""
    if not isinstance(k, Linear) or not k.has("v_w"):
        yield k
        return
    joined, values = (k.heads + k.kv_heads) * k.head_dim, k.kv_heads * k.head_dim
    rest = tuple(o for o in k.operands if o.name != "v_w")
    yield replace(k, operands=rest, columns=joined, flops=k.rows * (2 * joined * k.depth))
    own = Operand("w", k.operand("v_w").view)
    yield replace(
        k,
        operands=tuple(own if o.name == "w" else o for o in rest),
        columns=values,
        first_head=k.heads + k.kv_heads,
        flops=k.rows * (2 * values * k.depth),
    )


def narrowed(items: Items) -> dict[Buffer, Buffer]:
    """f32 values to store in half precision: those that only half-precision products or attention read.

    The tensor cores would round them in the same way; so they are rounded once, where they are made.
    """
    readers: dict[Buffer, list[DType | None]] = {}
    makers: dict[Buffer, list[bool]] = {}
    for k in all_kernels(items):
        for o in (*k.operands, *k.scratch):
            buffer, part = o.view.buffer.root, o.view.buffer.of is not None
            if o.written:
                own = isinstance(k, Linear | Attention | Norm | Rope) and o.name == "y" and not part
                makers.setdefault(buffer, []).append(own)
            else:
                readers.setdefault(buffer, []).append(None if part else _wanted(k, o))
    new: dict[Buffer, Buffer] = {}
    for b, wanted in readers.items():
        kinds = set(wanted)
        if (
            b.kind == "arena"
            and b.dtype == f32
            and len(kinds) == 1
            and None not in kinds
            and all(makers.get(b, [False]))
        ):
            new[b] = replace(b, dtype=kinds.pop())  # type: ignore[arg-type]
    return new


def _with_halves(items: Items) -> list[Kernel | Loop]:
    """Norms whose results products read in half precision and others in f32 write both."""
    makers: dict[Buffer, list[Kernel | None]] = {}
    wanted: dict[Buffer, set[DType]] = {}
    for k in all_kernels(items):
        for o in (*k.operands, *k.scratch):
            b, fits = o.view.buffer.root, o.view.is_whole and o.view.buffer.of is None
            if o.written:
                makers.setdefault(b, []).append(k if _norms(k) and o.name == "y" and fits else None)
            elif isinstance(k, Linear) and fits and (dtype := _wanted(k, o)) is not None:
                wanted.setdefault(b, set()).add(dtype)
    halves = {
        b: Buffer(f"{b.name}_half", next(iter(kinds)), b.size, "arena")
        for b, kinds in wanted.items()
        if b.kind == "arena" and b.dtype == f32 and len(kinds) == 1 and None not in makers.get(b, [None])
    }

    def change(k: Kernel) -> Iterator[Kernel]:
        def half(o: Operand) -> View:
            return replace(o.view, buffer=halves[o.view.buffer])

        if _norms(k) and k.operand("y").view.buffer in halves:
            k = replace(k, operands=(*k.operands, Operand("half", half(k.operand("y")), written=True)))
        if isinstance(k, Linear) and k.operand("x").view.buffer in halves and _wanted(k, k.operand("x")) is not None:
            yield replace(k, operands=tuple(o.with_view(half(o)) if o.name == "x" else o for o in k.operands))
        else:
            yield k

    return map_kernels(items, change)


def _norms(k: Kernel) -> bool:
    return isinstance(k, Norm) or (isinstance(k, Linear) and k.epilogue == "normed")


def _wanted(k: Kernel, o: Operand) -> DType | None:
    """The half type that a reader would round an operand to; None: it reads f32."""
    if isinstance(k, Linear) and o.name == "x" and k.norm == "none":
        dtype = k.format.x_dtype
    elif isinstance(k, Attention) and o.name == "q":
        dtype = k.operand("k").dtype
        if dtype == i8:  # rounds more than that
            dtype = bf16
    else:
        return None
    return dtype if dtype in (bf16, f16) else None


def _reduce(k: Reduce) -> Variables:
    return shared.reduce(k, first="best < 0")


def _norm(renderer: Renderer, k: Norm, s: CudaSchedule) -> tuple[Variant, ...]:
    """A warp for each short row, else a block."""
    template, kept = ("norm_short", "kept[j]") if s.team == 32 else ("norm", "")
    words = [pointer_word(o) for o in k.pointers]
    function, given = renderer.function(k, template, words, s=s, **shared.norm(k, kept))
    blocks = ceil_div(product(k.outer) * s.team, s.threads)
    return (Variant("norm", (Launch(function, (blocks, 1, 1), s.threads, given),)),)


def _matmul(k: Matmul) -> Variables:
    return shared.matmul(k, "n", "sum")


def _gather(k: Gather) -> Variables:
    return shared.gather(k, own.packed_element)


def _lookup(renderer: Renderer, k: Gather, s: CudaSchedule) -> tuple[Variant, ...]:
    """A thread for each element, or a warp for each tile that has a part of the row."""
    names, words = _gather(k), [pointer_word(o) for o in k.pointers]
    layout = k.operand("x").view.buffer.layout
    if layout is None or not format_of(layout).tile:
        function, given = renderer.function(k, "gather", words, s=s, **names)
        blocks = ceil_div(product(k.outer) * product(k.inner), s.threads)
        return (Variant("gather", (Launch(function, (blocks, 1, 1), s.threads, given),)),)
    function, given = renderer.function(k, "gather_tiles", words, s=s, **names)
    return (Variant("gather", (Launch(function, (product(k.outer) * -(-k.depth // 256), 1, 1), 32, given),)),)


FAMILIES: dict[type[Kernel], CudaFamily] = {
    Pointwise: _plain(shared.pointwise, _loop),
    Reduce: _plain(_reduce, lambda k, s, names: ceil_div(product(k.outer) * s.team, s.threads), choose.reduce),
    Norm: CudaFamily(schedule=lambda k, target: choose.norm(k), variables=lambda k, s: shared.norm(k), variants=_norm),
    Softmax: _plain(shared.softmax, _rows),
    Matmul: _plain(_matmul, lambda k, s, names: product(k.batch) * ceil_div(k.rows, 16) * ceil_div(k.columns, 16)),
    Linear: CudaFamily(
        schedule=choose.linear,
        variables=lambda k, s: own.linear(k),
        variants=lambda renderer, k, s: LinearVariants(renderer, k, s).all(),
    ),
    Attention: CudaFamily(
        schedule=choose.attention, variables=lambda k, s: own.attention(k), variants=attention_variants
    ),
    Experts: CudaFamily(schedule=choose.experts, variables=lambda k, s: expert_variables(k), variants=expert_variants),
    Window: _plain(shared.window, _threads(lambda k: product(k.operand("y").shape))),
    Gather: CudaFamily(schedule=lambda k, target: choose.plain(k), variables=lambda k, s: _gather(k), variants=_lookup),
    Rope: _plain(shared.rope, _threads(lambda k: product(k.operand("x").shape[:3]) * 32)),
    Heads: _plain(shared.heads, lambda k, s, names: k.batch * k.seq),
    Latent: _plain(shared.latent, lambda k, s, names: k.batch * k.seq),
    KVUpdate: _plain(shared.kv_update, _threads(lambda k: product(k.operand("rows").shape))),
    Scan: _plain(shared.scan, _rows, choose.scan),
    Scatter: _plain(shared.scatter, _threads(lambda k: product(k.outer))),
    Route: _plain(shared.route, _threads(lambda k: k.rows * 32)),
    Sort: _plain(shared.sort, _rows, choose.sort),
    Sample: _plain(shared.sample, _sample, choose.sample),
    Collective: CudaFamily(schedule=lambda k, target: choose.plain(k), variables=lambda k, s: {}, variants=_exchange),
}

CUDA = BackEnd(FAMILIES, _prepare)
