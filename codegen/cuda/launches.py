"""The plan for a GPU: kernels as it likes them, and for each step the launches it may become, by the number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from monoplan.codegen.expressions import c_dim, c_symbol
from monoplan.codegen.kernels import Attention, Kernel, KVUpdate, Linear, Norm
from monoplan.codegen.lower.lowerer import lower
from monoplan.codegen.memory import plan_arena
from monoplan.codegen.moves import Items, all_kernels, map_kernels, moved
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.plan import Plan, number_steps
from monoplan.codegen.residuals import residuals
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, whole
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.expr import Arg
from monoplan.ir.graph import Graph
from monoplan.ir.types import DType, bf16, f16, f32


@dataclass(frozen=True, slots=True)
class Word:
    """One argument of a launch: an operand's buffer or the workspace at a byte offset, a symbol's value, a number …"""

    kind: str  # operand, workspace, tickets, symbol, number (the offset itself), error, step
    operand: Operand | None = None
    name: str = ""
    offset: Dim = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch. Every kernel waits for the one before it by itself, so launches may overlap (see mp_wait)."""

    function: str
    grid: tuple[Dim, Dim, Dim]
    block: int
    words: tuple[Word, ...]
    shared: int = 0
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Product:
    """out[rows, columns] = x[rows, depth] · w[columns, depth]ᵀ (+ add) by the vendor's library, all dense."""

    rows: Dim
    columns: int
    depth: int
    x: Word
    w: Word
    out: Word
    dtype: DType
    out_dtype: DType
    add: Word | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """x[rows, columns] of every rank as y[rows, rank, columns]; both dense. Sums are a kernel that follows."""

    x: Word
    y: Word
    rows: Dim
    columns: Dim
    world: int
    dtype: DType


Action = Launch | Product | Exchange


@dataclass(frozen=True, slots=True)
class Between:
    """That a size (rows of x, new tokens, sequences …) lies in [low, high]; high 0: no limit."""

    size: Dim
    low: int = 0
    high: int = 0

    def holds(self, values: Mapping[str, int]) -> bool:
        size = evaluate(self.size, values)
        return self.low <= size and (self.high == 0 or size <= self.high)

    def __str__(self) -> str:
        size = c_dim(self.size)
        if self.low == self.high:
            return f"{size} = {self.low}"
        return f"{self.low} <= {size} <= {self.high}" if self.high else f"{size} >= {self.low}"


@dataclass(frozen=True, slots=True)
class Variant:
    """Actions that do a step when all conditions hold."""

    name: str
    actions: tuple[Action, ...]
    conditions: tuple[Between, ...] = ()
    workspace: Dim = 0  # bytes

    def fits(self, values: Mapping[str, int]) -> bool:
        return all(c.holds(values) for c in self.conditions)


def make_cuda_plan(graph: Graph, target: Target) -> Plan:
    """Lowers, adapts, schedules and places a graph."""
    lowered = lower(graph, target)
    items = map_kernels(map_kernels(lowered.items, _without_scratch), _split_norm)
    lowered = replace(lowered, items=items)
    for choose in (narrowed, residuals):
        lowered = moved(lowered, choose(lowered.items))
    arena = plan_arena(lowered.items)
    items_ = number_steps(lowered, arena, target)
    return Plan(graph, target, items_, arena, tuple(lowered.params), tuple(lowered.outputs), lowered.views)


def _without_scratch(k: Kernel) -> Iterator[Kernel]:
    """Products need no scratch of the arena: their variants have a workspace."""
    yield replace(k, scratch=()) if isinstance(k, Linear) else k


def _split_norm(k: Kernel) -> Iterator[Kernel]:
    """A layer norm in front of a product becomes a kernel of its own: its mean can't be applied to finished sums."""
    if not isinstance(k, Linear) or k.norm != "layer":
        yield k
        return
    x, dtype = k.operand("x"), k.operand("w").dtype
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


def narrowed(items: Items) -> dict[Buffer, Buffer]:
    """f32 values to store in half precision: those that only half-precision products or attention read.

    The tensor cores would round them in the same way; so they are rounded once, where they are made.
    """
    readers: dict[Buffer, list[DType | None]] = {}
    makers: dict[Buffer, list[bool]] = {}
    for k in all_kernels(items):
        for o in (*k.operands, *k.scratch):
            if o.written:
                makers.setdefault(o.view.buffer, []).append(isinstance(k, Linear | Attention | Norm) and o.name == "y")
            else:
                readers.setdefault(o.view.buffer, []).append(_wanted(k, o))
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


def _wanted(k: Kernel, o: Operand) -> DType | None:
    """The half type that a reader would round an operand to; None: it reads f32."""
    if isinstance(k, Linear) and o.name == "x" and k.norm == "none":
        dtype = k.operand("w").dtype
    elif isinstance(k, Attention) and o.name == "q":
        dtype = k.operand("k").dtype
    else:
        return None
    return dtype if dtype in (bf16, f16) else None


def stable_past(plan: Plan, k: Attention) -> bool:
    """Whether attention may read `past` and earlier keys before the kernels in front of it are done.

    They must be as they were when the plan began: `past` an input that no step writes, the caches written only behind
    that very length.
    """
    past = k.operand("past").view.buffer
    if past.kind != "input":
        return False
    caches = {(b.table_kind or b.kind, b.table or b.index) for b in (k.operand(n).view.buffer for n in ("k", "v"))}
    for step, _ in plan.steps():
        other = step.kernel
        for o in other.writes:
            b = o.view.buffer
            if (
                b is past
                or (b.kind == "input" and b.index == past.index)
                or past.index in b.table
                and b.table_kind == "input"
            ):
                return False
            if (b.table_kind or b.kind, b.table or b.index) in caches:
                if not isinstance(other, Linear | KVUpdate) or other.operand("lengths").view.buffer is not past:
                    return False
    return all(kind == "input" for kind, _ in caches)


def pointer_word(o: Operand) -> tuple[str, Word]:
    """A parameter that is an operand's buffer."""
    return f"{'' if o.written else 'const '}{o.ctype} *{o.name}", Word("operand", o)


def symbol_words(k: Kernel) -> list[tuple[str, Word]]:
    return [(f"const int64_t {c_symbol(n)}", Word("symbol", name=n)) for n in sorted(k.symbols - {"threads"})]


def ceil_div(d: Dim, n: int) -> Dim:
    return (d + (n - 1)) // n
