"""Chains of pointwise ops become one op, and move into the kernel that makes or reads their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monoplan.ir.builder import make_op
from monoplan.ir.dims import same_dims
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.expr import Arg, count_ops, parse_expr, substitute_args
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.fused import (
    fused_all_reduce,
    fused_conv2d,
    fused_gather,
    fused_linear,
    fused_matmul,
    fused_norm,
    fused_reduce,
    pointwise,
)
from monoplan.passes.expressions import LARGEST, Expression, expression_of, inline, is_pointwise, with_accumulators
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import distinct_readers, too_many
from monoplan.passes.rebuild import Overwrites, drop_dead

CHEAP = 4  # ops on whole numbers that may be done again for every element of a larger value


def fuse_pointwise(graph: Graph, notes: Notes) -> Graph:
    """Inlines a pointwise op into the one op whose work needs it, when both have the same shape, or it is cheap."""
    return _fused(graph, notes, "fuse-pointwise", _chain)


class _Fusion:
    """What the fusions of this file know about the graph they go over; `defs` follows what they make."""

    def __init__(self, graph: Graph, notes: Notes) -> None:
        self.notes = notes
        self.defs = definitions(graph)
        self.readers = distinct_readers(graph)
        self.overwrites = Overwrites(graph)
        self.setup = set(graph.setup)
        self.order = {r: i for i, op in enumerate(graph.ops) for r in op.results}
        self.groups: dict[Value, set[Op]] = {}  # ops of the graph whose work a new op does

    def source(self, v: Value) -> Op | None:
        """The op of the plan that makes a value."""
        op = self.defs.get(v)
        return None if op is None or op in self.setup else op

    def group(self, op: Op) -> set[Op]:
        """The ops of the graph that `op`, old or new, stands for."""
        return set(self.groups.get(op.results[0], (op,)))

    def refusal(self, source: Op, at: int, group: set[Op] | None = None) -> str:
        """Why `source` can't be computed by its reader at place `at`; a whole group may be that reader."""
        for v in source.results:
            found = self.readers.get(v, set())
            if len(found) != 1 and not (group and found and found <= group):
                return too_many(v, self.readers)
        return self.overwrites.refusal([source], at)


def _fused(
    graph: Graph,
    notes: Notes,
    rule: str,
    fuse: Callable[[Op, int, _Fusion], Op | None],
    takes: Callable[[Op], bool] = is_pointwise,
) -> Graph:
    """The graph with each op that is taken as `fuse` makes it anew at its place, or as it is."""
    fusion = _Fusion(graph, notes)
    ops: list[Op] = []
    for at, op in enumerate(graph.ops):
        made = fuse(op, at, fusion) if takes(op) else None
        if made is not None:
            fusion.defs[made.result] = made
            notes.fired(rule, made)
        ops.append(made or op)
    return drop_dead(graph.replace(ops=tuple(ops))) if notes.rewrites else graph


def _chain(op: Op, at: int, fusion: _Fusion) -> Op | None:
    """The op with every producer inlined that may be, and with its constants as literals."""
    e = expression_of(op, fusion.defs)
    changed = set(e.operands) != set(op.reads)  # constants became literals
    group = fusion.group(op)
    while True:
        misses: dict[Value, str] = {}
        for v in e.operands:
            source = fusion.source(v)
            if source is None or not is_pointwise(source):
                continue
            shorter = expression_of(source, fusion.defs)
            longer = inline(e, v, shorter)
            reason = fusion.refusal(source, at, group) or _refuse_chain(source, op, shorter, longer)
            if not reason:
                e, changed = longer, True
                group |= fusion.group(source)
                break
            misses[v] = reason
        else:
            break
    for v, reason in misses.items():
        fusion.notes.missed("fuse-pointwise", fusion.defs[v], f"it can't join {op.name} {op.result}: {reason}")
    made = _like(op, pointwise, list(e.operands), {"expr": e.text}) if changed and e.operands else None
    if made is not None:
        fusion.groups[op.result] = group
    return made


def _refuse_chain(source: Op, op: Op, small: Expression, joined: Expression) -> str:
    # Whole numbers are places and lengths: a few more additions cost less than a kernel of their own.
    cheap = source.result.type.dtype.is_integer and count_ops(small.node) <= CHEAP
    if not cheap and not same_dims(source.result.type.shape, op.result.type.shape):
        return f"{source.result} is {source.result.type}, smaller than {op.result.type}: it would be computed again"
    if count_ops(joined.node) > LARGEST:
        return f"the expression would have more than {LARGEST} ops"
    return ""


def fuse_gated(graph: Graph, notes: Notes) -> Graph:
    """f(a, b) over the two halves of one linear -> a gated linear: gate and up are made side by side."""
    if not any(op.name == "split" for op in graph.ops):
        return graph
    return _fused(graph, notes, "fuse-gated", _gated)


def _gated(op: Op, at: int, fusion: _Fusion) -> Op | None:
    e = expression_of(op, fusion.defs)
    cuts = {cut.results[0]: cut for v in e.operands if (cut := fusion.source(v)) is not None and cut.name == "split"}
    for cut in cuts.values():
        source = fusion.source(cut.operands[0]) if cut.operands[0] is not None else None
        if source is None or not _takes_gate(source) or len(cut.results) != 2:
            continue
        if reason := _refuse_gate(op, e, cut, source, at, fusion):
            fusion.notes.missed("fuse-gated", op, reason)
            continue
        extras = [v for v in e.operands if v not in cut.results]
        tail = with_accumulators(e, cut.results, extras)
        if (made := _fused_linear(op, source, extras, tail.text, gated=True)) is not None:
            return made
    return None


def _takes_gate(source: Op) -> bool:
    plain = source.name == "fused_linear" and not source.attrs["gated"] and source.attrs["expr"] == "x0"
    return source.name == "linear" or plain


def _refuse_gate(op: Op, e: Expression, cut: Op, source: Op, at: int, fusion: _Fusion) -> str:
    first, second = cut.results
    if cut.attrs["axis"] not in (-1, first.type.rank - 1):
        return f"{source.result} is cut along axis {cut.attrs['axis']}, not the last"
    if first.type != second.type:
        return "the two halves differ in size"
    if not all(v in e.operands for v in cut.results):
        return "only one of the halves is read here"
    if not same_dims(first.type.shape, op.result.type.shape):
        return f"the halves {first.type} are stretched to {op.result.type}"
    return fusion.refusal(cut, at) or fusion.refusal(source, at)


def _fused_linear(op: Op, source: Op, extras: list[Value], expr: str, gated: bool) -> Op | None:
    if source.name == "linear":
        head = [*source.operands, None, None]
        attrs: dict[str, Any] = {"norm": "none", "eps": 0.0}
    else:
        head = list(source.operands[:5])
        attrs = {"norm": source.attrs["norm"], "eps": source.attrs["eps"]}
    return _like(op, fused_linear, [*head, *extras], attrs | {"gated": gated, "expr": expr})


def _like(op: Op, opdef: Any, operands: list[Any], attrs: dict[str, Any]) -> Op | None:
    """The new op in place of `op`, or None if their types differ."""
    try:
        made = make_op(opdef, operands, attrs, names=[op.result.name], loc=op.loc, fresh=str)
    except TypeRuleError:
        return None
    return Op(made.opdef, made.operands, made.attrs, op.results, op.loc) if made.result.type == op.result.type else None


def fuse_into_producer(graph: Graph, notes: Notes) -> Graph:
    """A pointwise op becomes the tail of the kernel that makes one of its operands."""
    return _fused(graph, notes, "fuse-into-producer", _into_producer)


_TAILS = (
    "linear",
    "fused_linear",
    "matmul",
    "fused_matmul",
    "conv",
    "fused_conv",
    "norm",
    "fused_norm",
    "fused_gather",
    "fused_reduce",
    "fused_collective",
)


def _takes_tail(source: Op) -> bool:
    if source.name == "fused_linear" and source.attrs["gated"]:
        return False
    return source.opdef.kind in _TAILS or source.name in ("embedding", "all_reduce") or _over_axes(source)


def _over_axes(op: Op) -> bool:
    """Whether it is a reduction that fused_reduce can stand for; argmax has one axis."""
    return op.opdef.kind == "reduce" and set(op.attrs) == {"axes", "keepdims"}


def _into_producer(op: Op, at: int, fusion: _Fusion) -> Op | None:
    e = expression_of(op, fusion.defs)
    sources = [s for v in e.operands if (s := fusion.source(v)) is not None and _takes_tail(s)]
    # Products first, since their tails are free; among equals the last, so that the others are ready.
    for source in sorted(sources, key=lambda s: (s.opdef.kind not in _TAILS[:6], -fusion.order[s.result])):
        v = source.result
        reason = fusion.refusal(source, at)
        if not reason and not same_dims(v.type.shape, op.result.type.shape):
            reason = f"{v.type} is stretched to {op.result.type}"
        made = None if reason else _with_tail(op, source, e, [x for x in e.operands if x is not v])
        if made is not None:
            return made
        reason = reason or "the tail does not fit"
        fusion.notes.missed("fuse-into-producer", source, f"{op.name} {op.result} can't join it: {reason}")
    return None


def _with_tail(op: Op, source: Op, e: Expression, extras: list[Value]) -> Op | None:
    """The producer with its tail extended by the expression."""
    names = len(source.opdef.operand_names)
    kind = source.opdef.kind
    before: list[Value] = []
    if kind in ("fused_linear", "fused_matmul", "fused_conv", "fused_norm", "fused_gather", "fused_collective"):
        before = [v for v in source.operands[names:] if v is not None]
        inner = parse_expr(source.attrs["expr"])
    elif kind == "fused_reduce":
        before = list(source.reads[source.attrs["inputs"] :])
        inner = parse_expr(source.attrs["post"])
    else:
        inner = Arg(0)
    merged = [*before, *(x for x in extras if x not in before)]
    place = {v: i + 1 for i, v in enumerate(merged)}
    moved = substitute_args(inner, lambda i: Arg(0) if i == 0 else Arg(place[before[i - 1]]))
    node = substitute_args(e.node, lambda i: moved if e.operands[i] is source.result else Arg(place[e.operands[i]]))
    if count_ops(node) > LARGEST:
        return None
    expr = str(node)
    if kind in ("linear", "fused_linear"):
        return _fused_linear(op, source, merged, expr, gated=False)
    if kind in ("matmul", "fused_matmul"):
        return _like(op, fused_matmul, [*source.operands[:2], *merged], {"expr": expr})
    if kind in ("conv", "fused_conv"):
        attrs = {k: source.attrs[k] for k in ("stride", "padding", "dilation", "groups")}
        return _like(op, fused_conv2d, [*source.operands[:3], *merged], attrs | {"expr": expr})
    if kind in ("norm", "fused_norm"):
        norm = source.attrs.get("norm") or {"rms_norm": "rms", "layer_norm": "layer"}[source.name]
        head = [*source.operands[:names], None, None, None][:3]
        return _like(
            op,
            fused_norm,
            [*head, *merged],
            {"norm": norm, "eps": source.attrs["eps"], "dims": source.attrs["dims"], "expr": expr},
        )
    if kind in ("gather", "fused_gather"):
        return _like(op, fused_gather, [*source.operands[:2], *merged], {"expr": expr})
    a = source.attrs
    if kind in ("collective", "fused_collective"):
        return _like(op, fused_all_reduce, [source.operands[0], *merged], {"world": a["world"], "expr": expr})
    if kind == "fused_reduce":
        attrs = {k: a[k] for k in ("inputs", "reduce", "axes", "keepdims", "pre")}
        return _like(op, fused_reduce, [*source.reads[: a["inputs"]], *merged], attrs | {"post": expr})
    attrs = {"inputs": 1, "reduce": source.name, "axes": a["axes"], "keepdims": a["keepdims"], "pre": "x0"}
    attrs["post"] = expr
    return _like(op, fused_reduce, [source.operands[0], *merged], attrs)


def fuse_into_reduce(graph: Graph, notes: Notes) -> Graph:
    """A pointwise op whose only reader is a reduction is computed while the reduction reads."""
    return _fused(
        graph, notes, "fuse-into-reduce", _into_reduce, lambda op: op.opdef.kind in ("reduce", "fused_reduce")
    )


def _into_reduce(op: Op, at: int, fusion: _Fusion) -> Op | None:
    a, fused = op.attrs, op.name == "fused_reduce"
    if not (a["inputs"] == 1 and a["pre"] == "x0" if fused else _over_axes(op)):
        return None
    source = fusion.source(op.reads[0])
    if source is None or not is_pointwise(source):
        return None
    e = expression_of(source, fusion.defs)
    if reason := fusion.refusal(source, at):
        fusion.notes.missed("fuse-into-reduce", source, f"it can't join {op.name} {op.result}: {reason}")
        return None
    if not e.operands or source.result in op.reads[1:]:
        return None
    attrs = {
        "inputs": len(e.operands),
        "reduce": a["reduce"] if fused else op.name,
        "axes": a["axes"],
        "keepdims": a["keepdims"],
        "pre": e.text,
        "post": a["post"] if fused else "x0",
    }
    return _like(op, fused_reduce, [*e.operands, *op.reads[1:]], attrs)


FUSE_POINTWISE = Pass("fuse-pointwise", "chains of pointwise ops of one shape become one op", fuse_pointwise)
FUSE_GATED = Pass("fuse-gated", "f(gate, up) over the halves of one linear -> a gated linear (swiglu)", fuse_gated)
FUSE_INTO_PRODUCER = Pass(
    "fuse-into-producer", "a pointwise op becomes the tail of the kernel that makes its operand", fuse_into_producer
)
FUSE_INTO_REDUCE = Pass("fuse-into-reduce", "a pointwise op is computed while its reduction reads", fuse_into_reduce)
