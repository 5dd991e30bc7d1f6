"""Kernels: what each computes, one dataclass per family, shared by both targets. No decisions here."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from monoplan.codegen.formats import Layout, WeightFormat, format_of
from monoplan.codegen.operands import Body, Operand, stored_bytes, touched
from monoplan.codegen.views import Buffer, whole
from monoplan.ir.dims import Dim, symbols_of
from monoplan.ir.expr import Arg
from monoplan.ir.graph import Op
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, TensorType, f32

_SURE = frozenset("attention conv matmul norm pointwise reduce route sample scan softmax sort window".split())


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Kernel:
    """What all kernels have: the op they compute, their operands, scratch memory and cost."""

    op: Op
    step: int = 0
    operands: tuple[Operand, ...]
    scratch: tuple[Operand, ...] = ()
    flops: Dim = 0
    family: ClassVar[str] = ""  # its template is named after it

    def __init_subclass__(cls, family: str) -> None:
        cls.family = family

    @property
    def reports(self) -> bool:
        """Whether it may find something wrong while it runs: an index, a position, a cache that is full."""
        return self.family not in _SURE

    @property
    def reads(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if not o.written)

    @property
    def writes(self) -> tuple[Operand, ...]:
        return tuple(o for o in self.operands if o.written)

    @property
    def pointers(self) -> tuple[Operand, ...]:
        """Operands that have memory, in the order of the function's parameters."""
        return tuple(o for o in (*self.operands, *self.scratch) if not o.view.is_virtual)

    @property
    def bytes(self) -> Dim:
        """Bytes that must move once: the elements of every operand."""
        total: Dim = 0
        for o in self.operands:
            if not o.view.is_virtual:
                total = total + stored_bytes(o, touched(o.view))
        return total

    @property
    def symbols(self) -> set[str]:
        """Symbols that shapes, strides and offsets of its operands mention."""
        found: set[str] = set()
        for o in (*self.operands, *self.scratch):
            found |= o.symbols.union(*map(symbols_of, o.view.shape))
        return found

    @property
    def mentioned(self) -> set[str]:
        """Symbols that the text of a CPU kernel mentions."""
        return self.symbols - {"threads"}

    def operand(self, name: str) -> Operand:
        return next(o for o in (*self.operands, *self.scratch) if o.name == name)

    def has(self, name: str) -> bool:
        return any(o.name == name for o in self.operands)

    def group(self, prefix: str) -> list[Operand]:
        """Operands named prefix0, prefix1, …"""
        return [o for o in self.operands if o.name.startswith(prefix) and o.name[len(prefix) :].isdigit()]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pointwise(Kernel, family="pointwise"):
    """y[i] = body(x0[i], x1[i], …) over a common shape; operands are already expanded to it. z0, z1, … are as y."""

    body: Body


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Reduce(Kernel, family="reduce"):
    """y[o] = post(reduce over i of pre(x0[o, i], …), e0[o], …); views are arranged as outer then inner dims."""

    kind: str  # the op: a row of codegen/reductions.py
    pre: Body
    post: Body
    outer: tuple[Dim, ...]
    inner: tuple[Dim, ...]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Norm(Kernel, family="norm"):
    """y[o, i] = body(norm(x[o])[i] * weight[i] + bias[i], e0[o, i], …) over the inner dimension."""

    kind: str  # rms, layer
    eps: float
    body: Body
    outer: tuple[Dim, ...]
    inner: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Softmax(Kernel, family="softmax"):
    """y[o, i] = softmax over i of x[o]; causal: row s of S sees columns up to s + (T - S)."""

    causal: bool
    outer: tuple[Dim, ...]
    inner: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Matmul(Kernel, family="matmul"):
    """y[b, m, n] = body(sum over k of a[b, m, k] * b[b, k, n], e0[b, m, n], …): any strides, any type."""

    body: Body
    batch: tuple[Dim, ...]
    rows: Dim
    columns: Dim
    depth: Dim
    accumulator: DType


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Linear(Kernel, family="linear"):
    """A product with packed constant weights, a norm in front and an epilogue behind.

    epilogue: "pointwise" (body over the columns), "gated" (body over pairs of columns n and n + N),
    "heads" (q|k|v heads: optional norm, rotation, q to y, k and v into their caches), "argmax" (only the best column),
    "normed" (rows of sums are normed when they are whole: see `tail`), "routed" (as gated, but the last columns are
    scores, by which experts are chosen when a row of them is whole: see `choice`).
    """

    norm: str  # none, rms, layer
    eps: float
    rows: Dim
    depth: int
    columns: int  # rows of the weight
    epilogue: str
    body: Body | None = None
    # heads epilogue
    first_head: int = 0  # whose columns come first: on a GPU v may have a product of its own
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rotary: int = 0  # dimensions that rotate
    algo: str = ""
    qk_eps: float = 0.0
    # normed epilogue
    tail_norm: str = ""  # rms, layer: `eps` is its
    batch: Dim = 1
    seq: Dim = 1
    # routed epilogue
    scores: int = 0  # half of them behind the gates, half behind what those multiply

    @property
    def gated(self) -> bool:
        """Whether columns n and n + N / 2 are finished together."""
        return self.epilogue in ("gated", "routed")

    @property
    def width(self) -> int:
        """Columns of the result."""
        return (self.columns - self.scores) // 2 if self.gated else self.columns

    @property
    def choice(self) -> Route:
        """The choice behind the product."""
        a, named = self.op.attrs, [o for o in self.operands if o.name in ("share", "ids")]
        experts = self.scores - a["gates"]
        return Route(op=self.op, operands=tuple(named), rows=self.rows, experts=experts, choices=a["k"])

    @property
    def reports(self) -> bool:
        return self.epilogue == "heads"

    @property
    def layout(self) -> Layout:
        """How its weight is kept."""
        found = self.operand("w").view.buffer.layout
        assert found is not None
        return found

    @property
    def format(self) -> WeightFormat:
        """The format of its weight."""
        return format_of(self.layout)

    @property
    def tail(self) -> Norm:
        """The norm behind the product; `made` are its sums, with the bias."""
        sums = whole(Buffer("made", f32, self.rows * self.columns, "scratch"), (self.rows, self.columns))
        named = [o for o in self.operands if o.name in ("tail_weight", "tail_bias", "y", "half")]
        return Norm(
            op=self.op,
            operands=(Operand("made", sums), *named, *self.group("e")),
            kind=self.tail_norm,
            eps=self.eps,
            body=self.body or Body(Arg(0), (f32,)),
            outer=(self.rows,),
            inner=self.columns,
        )

    @property
    def mentioned(self) -> set[str]:
        """Rows are an argument: products of a whole prompt and of its last token are one function."""
        if self.epilogue == "heads":
            return super().mentioned
        return {name for o in self.operands for name in o.symbols} - {"threads"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Latent(Kernel, family="latent"):
    """Of latent attention: query [b, s, h, d] rotated to turned; the norm of latent [b, s, rank] and key [b, s, 1, d],
    rotated, one behind the other to the cache."""

    batch: Dim
    seq: Dim
    heads: int
    rank: int
    head_dim: int
    rotary: int
    algo: str
    eps: float

    NAMES: ClassVar[tuple[str, ...]] = (
        "latent", "key", "query", "positions", "sin", "cos", "lengths", "valid", "latent_weight", "table", "k_cache",
        "turned",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Experts(Kernel, family="experts"):
    """y[r, j, n] = body(sum over k of w[ids[r, j], n, k] * x[r, j, k], the same of up, b[ids[r, j], n], up_b[…]), with
    a norm of x in front.

    `beside`: what the same workers do beside the products; its operands are among the kernel's.
    """

    norm: str  # none, rms
    eps: float
    rows: Dim
    choices: int
    experts: int
    columns: int
    depth: int
    body: Body
    beside: Latent | None = None

    @property
    def latent(self) -> Latent | None:
        """What stands beside the products, with this kernel's operands."""
        if self.beside is None:
            return None
        return replace(self.beside, step=self.step, operands=tuple(o for o in self.operands if o.name in Latent.NAMES))

    @property
    def layout(self) -> Layout | None:
        """How its matrices are kept; None: row by row, whatever they are."""
        return self.operand("w").view.buffer.layout

    @property
    def format(self) -> WeightFormat:
        """The format of matrices with a layout."""
        assert self.layout is not None
        return format_of(self.layout)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Route(Kernel, family="route"):
    """share[r, j] and ids[r, j]: the j-th best of the experts that x[r] has scores of, see the op."""

    rows: Dim
    experts: int
    choices: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Window(Kernel, family="window"):
    """y[n, o, i, j] = body(the sum or the maximum over a window of x[n, …] + bias[o], e0[n, o, i, j], …).

    mode: "conv" (products with w[o, c, a, b]), "max", "avg". Windows follow one another by the strides, or cover
    x evenly (`even`, of pools). The channels of a pool are rows of its batch.
    """

    mode: str
    body: Body
    accumulator: DType
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, bottom, left, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    even: bool = False
    include_pad: bool = True
    divisor: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Conv(Kernel, family="conv"):
    """A convolution with packed constant weights as an implicit product; x, y and extras are as in Window, with rows
    and columns of the output as one dimension. `copied`: patches are read from a padded copy of x in f32."""

    body: Body
    weight: TensorType  # [columns, channels of a group, rows, columns of the kernel]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    groups: int
    copied: bool
    sizes: tuple[Dim, ...]  # rows and columns of x, rows and columns of y

    @property
    def symbols(self) -> set[str]:
        return super().symbols.union(*map(symbols_of, self.sizes))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Attention(Kernel, family="attention"):
    """Online-softmax attention; q and y are [b, s, h, d] views, k and v [b, g, t, d]."""

    batch: Dim
    seq: Dim
    keys: Dim
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Gather(Kernel, family="gather"):
    """y[a, i, c] = body(x[a, index[i], c], e0[…], …): embedding, gather, select_rows and take_along by strides."""

    body: Body
    outer: tuple[Dim, ...]
    inner: tuple[Dim, ...]
    limit: Dim
    packed: bool  # the table is a packed linear weight
    depth: int


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scatter(Kernel, family="scatter"):
    """y[o, index[o, i]] = combine(y[o, index[o, i]], x[o, i]) for i in order; y has its other elements already."""

    kind: str  # the attribute `reduce` of the op
    outer: tuple[Dim, ...]
    inner: Dim
    limit: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Rope(Kernel, family="rope"):
    """Rotary embedding of x [b, s, h, d] by the tables' rows positions[b, s]."""

    algo: str
    rotary: int
    head_dim: int
    limit: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KVUpdate(Kernel, family="kv_update"):
    """cache[b, h, lengths[b] + s, :] = rows[b, s, h, :] for s < valid[b]."""

    capacity: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Heads(Kernel, family="heads"):
    """Heads of q, k and v in x [b, s, columns]: q and k normed, over each head or over all of them (`whole`), and
    rotated; q goes to y, k and v to their caches."""

    batch: Dim
    seq: Dim
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    algo: str
    norm: str
    whole: bool
    eps: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Scan(Kernel, family="scan"):
    """Running sums, products or extremes along the inner dimension."""

    kind: str  # the op: a row of SCANS in codegen/reductions.py
    outer: tuple[Dim, ...]
    inner: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sort(Kernel, family="sort"):
    """The `keep` first of the inner dimension in sorted order, with indices; stable."""

    outer: tuple[Dim, ...]
    inner: Dim
    keep: Dim
    descending: bool


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sample(Kernel, family="sample"):
    """A token id for each row of logits (random_sample), or logits with seen tokens penalized."""

    mode: str  # sample, penalty
    rows: tuple[Dim, ...]
    vocabulary: Dim


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Collective(Kernel, family="collective"):
    """Between ranks. reduce: y[r, c] = body(sum over the ranks of x[r, c], in rank order, e0[r, c], …);
    gather: y[r, world, c] = x[r, c] of every rank."""

    mode: str  # reduce, gather
    world: int
    number: int  # among the plan's collectives: what the ranks compare to be sure that they do the same
    body: Body
    rows: Dim
    columns: Dim
