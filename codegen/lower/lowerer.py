"""Graph to kernels: gives every value its storage and every op its kernel. Views cost nothing; copies are explicit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from monoplan.codegen.formats import Layout, ParamUse
from monoplan.codegen.kernels import Kernel, Pointwise
from monoplan.codegen.operands import Body, Operand
from monoplan.codegen.target import Target
from monoplan.codegen.views import Buffer, View, table_buffer, whole
from monoplan.ir.dims import Dim
from monoplan.ir.errors import CompileError
from monoplan.ir.expr import Arg, Call, Node, count_ops
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, product


@dataclass(frozen=True)
class Loop:
    """The items run `count` times: rolled layers, which read tables at the turn's number, or a scan with its slices."""

    count: Dim
    items: tuple[Kernel | Loop, ...]
    scan: bool = False


@dataclass
class Lowered:
    """The kernels of a graph in order, and what they need."""

    items: list[Kernel | Loop] = field(default_factory=list)
    params: list[ParamUse] = field(default_factory=list)
    outputs: list[Buffer | int] = field(default_factory=list)  # a buffer, or the number of the input it aliases
    views: dict[Value, View] = field(default_factory=dict)  # where each value lies, for those who look inside


Rule = Callable[["Lowerer", Op], None]
RULES: dict[str, Rule] = {}
# Ops whose kernels write to any strides.
_STRIDED = ("rope", "norm", "fused_norm", "experts", "fused_experts", "latent_rope_cache")


def lowers(*kinds: str) -> Callable[[Rule], Rule]:
    """Registers a lowering rule for op kinds."""

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = rule
        return rule

    return register


def lower(graph: Graph, target: Target) -> Lowered:
    """The kernels of a graph for a target."""
    lowerer = Lowerer(graph, target)
    lowerer.run_graph()
    return lowerer.result


class Lowerer:
    """Walks the ops of one graph (or of a rolled body, sharing the plan's params)."""

    def __init__(self, graph: Graph, target: Target, parent: Lowerer | None = None) -> None:
        self.graph, self.target, self.parent = graph, target, parent
        self.root: Lowerer = parent.root if parent else self
        self.views: dict[Value, View] = {}
        self.items: list[Kernel | Loop] = []
        self.result: Lowered = Lowered() if parent is None else parent.root.result
        self.destinations: dict[Value, View] = {}  # where a result must be written
        self.also: dict[Value, list[View]] = {}  # where a pointwise result may be written as well
        self.stored: dict[Value, list[View]] = {}  # where it was
        self.protected: set[Buffer] = set()  # what the turns of a scan share: none of them may overwrite it
        self.param_values: set[Value] = set()
        self.param_index: dict[tuple[Value, Layout | None], Buffer] = {}
        self.table_params: dict[Value, tuple[Value, ...]] = {}  # body inputs of rolled layers that are weights
        self.packed_tables: set[Value] = set()  # weights that a plain linear packs: lookups read that copy
        self.writable: set[Buffer] = set()
        self.op: Op = graph.ops[0] if graph.ops else None  # type: ignore[assignment]
        self.names = 0
        self.collectives = 0

    # -- storage ------------------------------------------------------------------------------------------------

    def fresh(self, dtype: DType, shape: Sequence[Dim], kind: str = "arena") -> View:
        """New dense storage."""
        root = self.root
        root.names += 1
        return whole(Buffer(f"b{root.names}", dtype, product(shape), kind), shape)

    def destination(self, value: Value) -> View:
        """Storage for a result: the output buffer if it is an output, the carried buffer of a loop, else new."""
        view = self.destinations.get(value)
        if view is None:
            view = self.fresh(value.type.dtype, value.type.shape)
        self.views[value] = view
        return view

    def read(self, value: Value) -> View:
        """The storage of an operand (a param in row-major order)."""
        if value not in self.views and value in self.root.param_values:
            if value.type.dtype.is_low_bit:
                raise CompileError(
                    f"{value} is {value.type}, which {self.target.name} can't read here",
                    why="low-bit weights are read by linears (of f32 or half floats) and embeddings, on CPUs",
                    fix="load the model in another type: dtype='bfloat16'",
                )
            return whole(self.param(value, None), value.type.shape)
        return self.views[value]

    def is_param(self, value: Value) -> bool:
        return value in self.root.param_values

    def param(self, value: Value, layout: Layout | None) -> Buffer:
        """The plan's param for a value in a layout."""
        root = self.root
        key = (value, layout)
        if key not in root.param_index and value in root.table_params:
            columns = [self.param(v, layout) for v in root.table_params[value]]
            root.param_index[key] = (
                columns[0] if len(columns) == 1 else table_buffer(value.name, columns[0], [b.index for b in columns])
            )
        if key not in root.param_index:
            number = len(root.result.params)
            root.result.params.append(ParamUse(value, layout))
            root.param_index[key] = Buffer(
                f"p{number}", value.type.dtype, value.type.size, "param", index=number, layout=layout
            )
        return root.param_index[key]

    def dense(self, view: View) -> View:
        """The view itself if it is real and dense, else a dense copy."""
        if view.is_contiguous and not view.is_virtual:
            return view
        return self.copy(view)

    def copy(self, view: View, into: View | None = None, *more: View) -> View:
        """A copy kernel; the result is dense unless `into` says where to, and lies in other places as well."""
        target = into if into is not None else self.fresh(view.dtype, view.shape)
        self.pointwise(Arg(0), [view], target, more)
        return target

    # -- kernels ------------------------------------------------------------------------------------------------

    def emit(self, kernel: Kernel) -> None:
        self.items.append(kernel)

    def pointwise(self, node: Node, inputs: Sequence[View], out: View, more: Sequence[View] = ()) -> None:
        """out = node(inputs…), broadcasting; each input is expanded to the output's shape. `more`: written like out."""
        operands = [Operand(f"x{i}", v.expanded(out.shape)) for i, v in enumerate(inputs)]
        operands.append(Operand("y", out, written=True))
        operands += [Operand(f"z{i}", v, written=True) for i, v in enumerate(more)]
        body = Body(node, tuple(v.dtype for v in inputs))
        flops = product(out.shape) * count_ops(node)
        self.emit(Pointwise(op=self.op, operands=tuple(operands), body=body, flops=flops))

    # -- walking ------------------------------------------------------------------------------------------------

    def run_graph(self) -> None:
        """Lowers a whole graph: inputs and outputs get buffers of their own."""
        g = self.graph
        self.param_values = {p.value for p in g.params} | {r for op in g.setup for r in op.results}
        written = {i for i, _ in g.writes}
        for i, v in enumerate(g.inputs):
            buffer = Buffer(v.name, v.type.dtype, v.type.size, "input", index=i)
            self.views[v] = whole(buffer, v.type.shape)
            if i in written:
                self.writable.add(buffer)
        self.packed_tables = {
            op.operands[1]
            for op in g.ops
            if op.opdef.kind in ("linear", "fused_linear", "linear_argmax", "linear_norm")
            and not op.attrs.get("gated", False)
            and op.operands[0] is not None
            and op.operands[0].type.dtype.bits <= 32
            and op.operands[1] is not None
        }
        aliases = aliased_outputs(g)
        defined = {r: op for op in g.ops for r in op.results}
        outputs: list[Buffer | int] = []
        for j, v in enumerate(g.outputs):
            if j in aliases:
                outputs.append(aliases[j])
                continue
            buffer = Buffer(f"out{j}", v.type.dtype, v.type.size, "output", index=j)
            outputs.append(buffer)
            if v in defined and v not in self.destinations:
                self.destinations[v] = whole(buffer, v.type.shape)
        for v, where in zip(g.outputs, outputs, strict=True):
            while v in defined and defined[v].name == "reshape":  # what an output is a reshape of is written there
                v = defined[v].reads[0]
            if isinstance(where, Buffer) and v in defined:
                self.destinations.setdefault(v, whole(where, v.type.shape))
        self.lower_ops()
        for v, where in zip(g.outputs, outputs, strict=True):
            if isinstance(where, Buffer) and self.read(v).buffer is not where:
                self.op = definitions(g).get(v) or self.op or _copying(v)
                self.copy(self.read(v), whole(where, v.type.shape))
        self.result.items = self.items
        self.result.outputs = outputs
        self.result.views.update(self.views)

    def lower_ops(self) -> None:
        self._place_parts()
        for op in self.graph.ops:
            self.op = op
            rule = RULES.get(op.opdef.kind)
            if rule is None:
                raise CompileError(f"{op.name} has no kernel for target {self.target.name}", where=op.loc)
            rule(self, op)

    def _place_parts(self) -> None:
        """Parts of a concat that nobody else reads are written to their places in it, where their kernels can."""
        made = {r: op for op in self.graph.ops for r in op.results}
        reads = Counter([v for op in self.graph.ops for v in op.reads] + list(self.graph.outputs))
        for op in self.graph.ops:
            if op.name != "concat":
                continue
            axis, start = op.attrs["axis"] % op.result.type.rank, 0
            y = self.destinations.get(op.result) or self.fresh(op.result.type.dtype, op.result.type.shape)
            for v in op.reads:
                piece: View | None = y.sliced(axis, start, v.type.shape[axis])
                start = start + v.type.shape[axis]  # type: ignore[operator, assignment]
                while v in made and made[v].name == "reshape" and reads[v] == 1:
                    v = made[v].reads[0]
                fits = v in made and made[v].opdef.kind in _STRIDED and reads[v] == 1 and v.type.dtype == y.dtype
                piece = piece.reshaped(v.type.shape) if fits and piece is not None else None
                if piece is not None and v not in self.destinations:
                    self.destinations[v], self.destinations[op.result] = piece, y

    def inplace_view(self, op: Op, result: int) -> View:
        """Storage of an in-place result: the operand's own where that is allowed, else a copy of it."""
        view = self.read(op.given(op.opdef.inplace[result]))
        kind = view.buffer.kind
        allowed = kind == "arena" or view.buffer in self.root.writable or view.buffer.table_kind == "input"
        allowed = allowed and view.buffer not in self.protected
        if not (allowed and view.is_contiguous):
            wanted = self.destinations.get(op.results[result])
            view = self.copy(view, wanted)
        else:
            self._save_aliases(op, view)
        self.views[op.results[result]] = view
        return view

    def _save_aliases(self, op: Op, view: View) -> None:
        """Copies what later ops still read from storage that `op` is about to change (slices taken before it)."""
        at = self.graph.ops.index(op) + 1
        later = {v: None for o in self.graph.ops[at:] for v in o.reads} | {v: None for v in self.graph.outputs}
        for v in later:
            old = self.views.get(v)
            if old is not None and old.buffer is view.buffer:
                self.views[v] = self.copy(old)


def _copying(value: Value) -> Op:
    """What a kernel stands for that copies an input of a graph without ops."""
    from monoplan.ir.opdef import REGISTRY

    return Op(REGISTRY["cast"], (value,), {"dtype": value.type.dtype}, (value,))


def single(name: str, arity: int, attrs: dict[str, Any]) -> Node:
    """The expression of one pointwise op."""
    return Call(name, tuple(Arg(i) for i in range(arity)), tuple(attrs.items()))


def rows_by_columns(lowerer: Lowerer, view: View, rows: Dim, columns: Dim) -> View:
    """A view as [rows, columns], copied when its strides do not allow that."""
    flat = None if view.is_virtual else view.reshaped((rows, columns))
    return flat if flat is not None else lowerer.copy(view).shaped((rows, columns))


def expanded_rows(lowerer: Lowerer, view: View, shape: Sequence[Dim], rows: Dim, columns: Dim) -> View:
    """An extra operand of an epilogue as [rows, columns], broadcast with stride 0 where possible."""
    wide = view.expanded(shape)
    lead = wide.strides[:-1]
    if all(isinstance(s, int) and s == 0 for s in lead):
        return View(wide.buffer, (rows, columns), (0, wide.strides[-1]), wide.offset)
    return rows_by_columns(lowerer, wide, rows, columns)


# Which outputs of a graph are its inputs, updated in place: also through rolled layers.


def aliased_outputs(graph: Graph) -> dict[int, int]:
    """Outputs that are an input's own storage after in-place updates, with that input's number: they need no buffer."""
    origin, found = _origins(graph), {}
    for i, j in graph.writes:
        v = graph.outputs[j]
        if v not in graph.inputs and origin.get(v) is graph.inputs[i]:
            found[j] = i
    return found


def _origins(graph: Graph) -> dict[Value, Value]:
    """The input in whose storage a value lies, of those that are an input or its in-place update."""
    origin: dict[Value, Value] = {v: v for v in graph.inputs}
    for op in graph.ops:
        for result, name in op.opdef.inplace.items():
            source = op.operand(name)
            if source in origin:
                origin[op.results[result]] = origin[source]
        if op.opdef.kind == "repeat":
            origin |= _repeat_origins(op, origin)
    return origin


def _repeat_origins(op: Op, origin: dict[Value, Value]) -> dict[Value, Value]:
    """In-place updates inside a rolled body, seen from outside."""
    a = op.attrs
    body, count, carried, shared = a["body"], a["count"], a["carried"], a["shared"]
    inside = _origins(body)
    found: dict[Value, Value] = {}
    for i, out in enumerate(body.outputs[carried:]):
        source = inside.get(out)
        if source is None:
            continue
        column = body.inputs.index(source) - carried - shared
        if column < 0:
            continue
        for turn in range(count):
            operand = op.operands[carried + shared + column * count + turn]
            if operand in origin:
                found[op.results[carried + i * count + turn]] = origin[operand]
    return found
