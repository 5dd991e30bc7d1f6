"""Random expression graphs with a bound on the error of each value.

`Grower` adds ops one by one. For every value it knows the largest magnitude, an absolute bound on the distance
between a compiled and an exact run (Lipschitz constants times the bounds of the operands, plus the rounding that
the table of tolerances grants), and whether it is exact: comparisons, sorting and conversions to integers read
exact values only, since a rounding could flip them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.builder import Builder
from monoplan.ir.dims import Dim, Expr, evaluate
from monoplan.ir.errors import MonoplanError
from monoplan.ir.graph import Graph, Param, Value
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.rules import broadcast
from monoplan.ir.types import DTYPES, DType, TensorType, bool_, product
from tests.codegen.random_views import DIMS, B, S, step_view
from tests.tolerances import tolerance

TYPICAL = {"b": 3, "s": 5}
LARGE = 60.0  # magnitudes beyond it are scaled down
LIPSCHITZ = {
    "neg": 1.0, "abs": 1.0, "relu": 1.0, "tanh": 1.0, "sigmoid": 0.25, "sin": 1.0, "cos": 1.0, "erf": 1.13,
    "silu": 1.1, "gelu": 1.13,
}  # fmt: skip
KEEP = ("neg", "abs", "relu")  # exact stays exact
SHRINK = {"tanh": 1.0, "sigmoid": 1.0, "sin": 1.0, "cos": 1.0, "erf": 1.0}

Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, eq=False)
class Node:
    """A value with what is known about its numbers."""

    value: Value
    magnitude: float
    error: float
    exact: bool
    low: float = -math.inf  # a lower bound

    @property
    def dtype(self) -> DType:
        return self.value.type.dtype

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.value.type.shape


class Grower:
    """Grows several independent graphs into one; `pick` chooses from a list."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.builder = Builder()
        self.inputs: list[Value] = []
        self.params: list[Value] = []
        self.ranges: dict[str, tuple[float, float]] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Node] = []
        self.input(DTYPES["bool"], (B, S), 0, 1)  # every symbol must be the size of an input

    def graph(self, steps: int) -> None:
        """One more graph of `steps` ops; whatever nobody reads is an output."""
        self.nodes = []
        first = len(self.builder.ops)
        self.leaf()
        for _ in range(steps):
            grow = self.pick(STEPS)
            try:
                grow(self)
            except MonoplanError:
                continue  # the operands did not fit: a graph of fewer ops
        read = {v for op in self.builder.ops[first:] for v in op.reads}
        ends = [n for n in self.nodes if n.value not in read]
        self.outputs += ends
        if self.pick((True, False)):
            self.outputs.append(self.pick(self.nodes))

    def finish(self) -> Graph:
        params = tuple(Param(v, v.name) for v in self.params)
        outputs = tuple(n.value for n in self.outputs)
        return Graph("random", tuple(self.inputs), params, tuple(self.builder.ops), outputs)

    def array(self, v: Value, sizes: dict[str, int], rng: np.random.Generator) -> Any:
        """Contents of an input or a param."""
        shape = tuple(evaluate(d, sizes) for d in v.type.shape)
        low, high = self.ranges[v.name]
        if v.type.dtype.is_float:
            return rng.uniform(low, high, shape).astype(v.type.dtype.numpy)
        return rng.integers(int(low), int(high), shape, endpoint=True).astype(v.type.dtype.numpy)

    # -- pieces ---------------------------------------------------------------------------------------------

    def emit(self, name: str, *operands: Node | None, **attrs: Any) -> Any:
        return self.builder.emit(REGISTRY[name], [None if n is None else n.value for n in operands], attrs)

    def add(self, value: Value, magnitude: float, error: float, exact: bool, kind: str, low: float = -math.inf) -> Node:
        """A new node; an inexact one gets its own rounding on top of the error it inherits."""
        d = value.type.dtype
        if d.is_float and not exact:
            relative, absolute = tolerance(d, kind)
            error += relative * magnitude + absolute
        node = Node(value, magnitude, error if d.is_float else 0.0, exact or not d.is_float, low)
        self.nodes.append(node)
        return self.scaled(node) if magnitude > LARGE and d.is_float else node

    def scaled(self, n: Node) -> Node:
        factor = self.constant(1.0 / 16, n.dtype)
        made = self.emit("mul", n, factor)
        return self.add(made, n.magnitude / 16, n.error / 16, False, "pointwise")

    def constant(self, number: float, dtype: DType) -> Node:
        value = self.builder.emit(REGISTRY["full"], [], {"value": number, "dtype": dtype})
        assert isinstance(value, Value)
        return Node(value, abs(number), 0.0, True, number)

    def input(self, dtype: DType, shape: Sequence[Dim], low: float, high: float, param: bool = False) -> Node:
        static = not any(isinstance(d, Expr) for d in shape)
        kept = self.params if param and static else self.inputs
        value = Value(TensorType(dtype, tuple(shape)), self.builder.fresh("w" if kept is self.params else "x"))
        kept.append(value)
        self.ranges[value.name] = (low, high)
        node = Node(value, max(abs(low), abs(high)), 0.0, True, low)
        self.nodes.append(node)
        return node

    def keep(self, value: Value, like: Node) -> None:
        """A value with the numbers of another node: a view or a lookup."""
        self.nodes.append(Node(value, like.magnitude, like.error, like.exact, like.low))

    def shape(self) -> tuple[Dim, ...]:
        return tuple(self.pick(DIMS) for _ in range(self.pick((0, 1, 1, 2, 2, 2, 3, 3, 4))))

    def leaf(self, dtype: DType | None = None, shape: Sequence[Dim] | None = None) -> Node:
        names = ("f32", "f32", "f32", "f32", "f64", "f16", "bf16", "i32", "i64", "u8", "i8", "bool")
        d = dtype or DTYPES[self.pick(names)]
        dims = self.shape() if shape is None else shape
        low, high = {"f": (-2.0, 2.0), "i": (-9.0, 9.0), "u": (0.0, 9.0), "b": (0.0, 1.0)}[d.kind]
        return self.input(d, dims, low, high, param=self.pick((False, False, True)))

    def choose(self, test: Callable[[Node], bool]) -> Node:
        """A node that passes the test, or a new float leaf that does (f32, rank 2)."""
        fitting = [n for n in self.nodes if test(n) and small(n)]
        return self.pick(fitting[-6:]) if fitting else self.leaf(DTYPES["f32"], (self.pick(DIMS), 3))

    def partner(self, n: Node, test: Callable[[Node], bool]) -> Node:
        """A node that broadcasts with n, or a leaf made for it."""
        fitting = [m for m in self.nodes if test(m) and broadcasts(n, m)]
        if fitting and self.pick((True, True, False)):
            return self.pick(fitting[-6:])  # type: ignore[no-any-return]
        shape = [self.pick((d, d, 1)) for d in n.shape][self.pick((0, 0, 1)) :]
        made = self.leaf(n.dtype if n.dtype != bool_ else DTYPES["f32"], shape)
        return made if test(made) else self.leaf(DTYPES["f32"], shape)


def is_float(n: Node) -> bool:
    return n.dtype.is_float


def is_number(n: Node) -> bool:
    return n.dtype != bool_


def small(n: Node) -> bool:
    return evaluate(product(n.shape), TYPICAL) <= 600


def broadcasts(a: Node, b: Node) -> bool:
    if any(x.dtype.name == "u64" for x in (a, b)):
        return False
    try:
        shape = broadcast([a.shape, b.shape], "test")
    except MonoplanError:
        return False
    return evaluate(product(shape), TYPICAL) <= 600


# -- steps ----------------------------------------------------------------------------------------------------


def step_unary(g: Grower) -> None:
    n = g.choose(is_float)
    name = g.pick(tuple(LIPSCHITZ))
    attrs = {"approximate": g.pick(("none", "tanh", "fast", "fast_tanh"))} if name == "gelu" else {}
    made = g.emit(name, n, **attrs)
    slope = 1.75 if attrs.get("approximate") == "fast_tanh" else LIPSCHITZ[name]
    g.add(
        made,
        SHRINK.get(name, n.magnitude),
        slope * n.error,
        n.exact and name in KEEP,
        "pointwise",
        0.0 if name in ("abs", "relu", "sigmoid") else -math.inf,
    )


def step_positive(g: Grower) -> None:
    """log, sqrt, rsqrt and division away from zero; exp of small numbers."""
    n = g.choose(is_float)
    name = g.pick(("log", "sqrt", "rsqrt", "div", "exp"))
    if name == "exp":
        if n.magnitude > 4:
            n = g.add(g.emit("tanh", n), 1.0, n.error, False, "pointwise")
        g.add(g.emit("exp", n), math.exp(n.magnitude), math.exp(n.magnitude) * n.error, False, "pointwise", 0.0)
        return
    raised = g.emit("add", Node(g.emit("abs", n), 0, 0, False), g.constant(0.5, n.dtype))
    base = g.add(raised, n.magnitude + 0.5, n.error, False, "pointwise", 0.5)
    if name == "div":
        g.add(g.emit("div", n, base), 1.0, 2 * n.error + 4 * base.error, False, "pointwise")
        return
    slope = {"log": 2.0, "sqrt": 0.71, "rsqrt": 1.42}[name]
    size = max(abs(math.log(0.5)), abs(math.log(base.magnitude + 1)), math.sqrt(base.magnitude))
    g.add(g.emit(name, base), size, slope * base.error, False, "pointwise")


def step_binary(g: Grower) -> None:
    a = g.choose(is_number)
    b = g.partner(a, lambda m: is_number(m) and m.dtype.name != "u64")
    name = g.pick(("add", "sub", "mul", "maximum", "minimum"))
    made = g.emit(name, a, b)
    if name == "mul":
        size, error = a.magnitude * b.magnitude, a.magnitude * b.error + b.magnitude * a.error
    else:
        size = a.magnitude + b.magnitude if name in ("add", "sub") else max(a.magnitude, b.magnitude)
        error = a.error + b.error
    same = a.dtype == b.dtype
    g.add(made, size, error, a.exact and b.exact and same and name in ("maximum", "minimum"), "pointwise")


def step_logic(g: Grower) -> None:
    a = g.choose(lambda n: n.exact)
    b = g.partner(a, lambda m: m.exact)
    name = g.pick(("eq", "ne", "lt", "le", "gt", "ge"))
    cond = g.add(g.emit(name, a, b), 1.0, 0.0, True, "pointwise", 0.0)
    other = [n for n in g.nodes if n.dtype == bool_ and n is not cond and broadcasts(n, cond)]
    if other and g.pick((True, False)):
        both = g.emit(g.pick(("logical_and", "logical_or")), cond, g.pick(other))
        cond = g.add(both, 1.0, 0.0, True, "pointwise", 0.0)
    x = g.partner(cond, is_number)
    y = g.partner(x, lambda m: is_number(m) and broadcasts(cond, m))
    made = g.emit("where", cond, x, y)
    size, error = max(x.magnitude, y.magnitude), max(x.error, y.error)
    g.add(made, size, error, x.exact and y.exact and x.dtype == y.dtype, "pointwise")


def step_cast(g: Grower) -> None:
    n = g.choose(lambda m: True)
    names = ["f64", "f32", "f16", "bf16"]
    if n.exact and n.magnitude < 100:
        names += ["i8", "i16", "i32", "i64", "bool"] + (["u8", "u32"] if n.low >= 0 else [])
    if not n.dtype.is_float:
        names += ["i8", "i16", "u8", "u16", "i64"]
    d = DTYPES[g.pick(names)]
    if d == n.dtype:
        return
    wider = n.dtype.is_float and d.is_float and d.bits > n.dtype.bits
    g.add(g.emit("cast", n, dtype=d), n.magnitude, n.error, n.exact and (wider or not d.is_float), "pointwise", n.low)


def step_reduce(g: Grower) -> None:
    n = g.choose(is_number)
    rank = len(n.shape)
    axes = g.pick((None, (), *((i,) for i in range(rank)), tuple(range(rank)), *([(0, rank - 1)] if rank > 1 else [])))
    names = ["sum", "max", "min"] + (["mean"] if n.dtype.is_float else []) + (["argmax"] if n.exact else [])
    name, keep = g.pick(names), g.pick((True, False))
    count = evaluate(product(n.shape), TYPICAL) if axes is None else 1
    for a in axes or ():
        count *= evaluate(n.shape[a], TYPICAL)
    if name == "argmax":
        axis = g.pick((None, *range(rank)))
        g.add(g.emit("argmax", n, axis=axis, keepdims=keep), 600.0, 0.0, True, "reduce", 0.0)
        return
    made = g.emit(name, n, axes=axes, keepdims=keep)
    factor = count if name == "sum" else 1
    exact = n.exact and name in ("max", "min")
    g.add(made, factor * n.magnitude, factor * n.error, exact, "reduce", n.low if exact else -math.inf)


def step_rows(g: Grower) -> None:
    """Softmax, norms, running sums, sorting."""
    n = g.choose(lambda m: m.dtype.is_float and len(m.shape) >= 1)
    rank = len(n.shape)
    axis = g.pick(range(rank))
    name = g.pick(("softmax", "causal_softmax", "rms_norm", "layer_norm", "cumsum", "sort", "topk"))
    if name == "softmax":
        g.add(g.emit("softmax", n, axis=axis), 1.0, 2 * n.error, False, "reduce", 0.0)
    elif name == "causal_softmax":
        g.add(g.emit("causal_softmax", n), 1.0, 2 * n.error, False, "reduce", 0.0)
    elif name in ("rms_norm", "layer_norm"):
        weight = g.leaf(n.dtype, n.shape[-1:]) if g.pick((True, False)) else None
        scale = 2.0 if weight is not None else 1.0
        made = g.emit(name, n, weight, *([None] if name == "layer_norm" else []), eps=0.5)
        g.add(made, 8 * scale, 6 * scale * n.error, False, "reduce")
    elif name == "cumsum":
        count = evaluate(n.shape[axis], TYPICAL)
        g.add(g.emit("cumsum", n, axis=axis), count * n.magnitude, count * n.error, False, "reduce")
    elif n.exact and isinstance(n.shape[axis], int):
        most = range(1, int(n.shape[axis]) + 1)
        extra = {"k": g.pick(most)} if name == "topk" else {"descending": g.pick((True, False))}
        values, indices = g.emit(name, n, axis=axis, **extra)
        g.add(values, n.magnitude, 0.0, True, "pointwise", n.low)
        g.add(indices, 600.0, 0.0, True, "pointwise", 0.0)


def step_product(g: Grower) -> None:
    n = g.choose(lambda m: m.dtype.is_float and len(m.shape) >= 1)
    depth = n.shape[-1]
    count = evaluate(depth, TYPICAL)
    size = 2 * count * n.magnitude
    if isinstance(depth, int) and g.pick((True, False)):
        columns = g.pick((1, 3, 5, 18))
        weight = g.input(n.dtype, (columns, depth), -2.0, 2.0, param=g.pick((True, True, False)))
        bias = g.leaf(n.dtype, (columns,)) if g.pick((True, False)) else None
        made, size = g.emit("linear", n, weight, bias), size + 2
    elif len(n.shape) >= 2:
        lead = [g.pick((d, 1)) for d in n.shape[:-2]][g.pick((0, 1)) :]
        other = g.leaf(n.dtype, (*lead, depth, g.pick(DIMS)))
        made = g.emit("matmul", n, other)
    else:
        return
    # The table's absolute part counts the size of the summed terms.
    unit = tolerance(n.dtype, "matmul")[1] * size
    g.add(made, size, 2 * count * n.error + unit, False, "matmul")


def step_gather(g: Grower) -> None:
    n = g.choose(lambda m: any(isinstance(d, int) for d in m.shape))
    static = [i for i, d in enumerate(n.shape) if isinstance(d, int)]
    if not static:
        return
    axis = g.pick(static)
    limit = n.shape[axis]
    d = DTYPES[g.pick(("i64", "i32", "u8", "i16"))]
    along = g.pick((True, False))
    dims = list(n.shape)
    dims[axis] = g.pick(DIMS)
    index = g.input(d, dims if along else [g.pick(DIMS) for _ in range(g.pick((0, 1, 2)))], 0, int(limit) - 1)
    made = g.emit("take_along" if along else "gather", n, index, axis=axis)
    g.keep(made, n)


def step_ramp(g: Grower) -> None:
    d = DTYPES[g.pick(("i64", "i32", "f32", "u8", "f16"))]
    length, start = g.pick(DIMS), g.pick((0, 3, B))
    made = g.builder.emit(REGISTRY["arange"], [], {"length": length, "start": start, "dtype": d})
    assert isinstance(made, Value)
    g.nodes.append(Node(made, 12.0, 0.0, True, 0.0))


STEPS = (
    step_unary, step_unary, step_positive, step_binary, step_binary, step_binary, step_logic, step_cast, step_view,
    step_view, step_view, step_view, step_reduce, step_reduce, step_rows, step_rows, step_product, step_product,
    step_gather, step_ramp,
)  # fmt: skip
