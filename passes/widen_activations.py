"""Half-precision models: values between kernels are kept in f32; weights, caches, inputs and outputs stay half.

Activations are a thousandth of the bytes of the weights in decode, so the wider type costs nothing, and each value is
rounded once at the end of the model in place of once per layer.
"""

from __future__ import annotations

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value, definitions
from monoplan.ir.ops.elementwise import cast
from monoplan.ir.types import bf16, f16, f32
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import distinct_readers, param_values
from monoplan.passes.rebuild import builder_for, substitute

HALF = (f16, bf16)


def widen_activations(graph: Graph, notes: Notes) -> Graph:
    """Inserts a cast to f32 behind each source of half activations, infers types again, and casts at the outputs."""
    fixed = param_values(graph)
    readers = distinct_readers(graph)
    states = _states(graph)
    builder = builder_for(graph)
    new: dict[Value, Value] = {}
    narrow: dict[Value, Value] = {}  # the same, as scans and scatters want it
    ops: list[Op] = []

    def widen(value: Value, op: Op | None) -> None:
        if all(r is None or r.name == "cast" for r in readers.get(value, ())):
            return  # nothing is computed from it as it is
        loc = op.loc if op is not None else builder.loc
        made = make_op(cast, [new.get(value, value)], {"dtype": f32}, loc=loc, fresh=builder.fresh)
        ops.append(made)
        new[value] = made.result
        notes.fired("widen-activations", made)

    def as_before(op: Op) -> Op:
        """A scan, whose operands keep the types that its body has, or a scatter, whose have one type."""
        defined = {*graph.inputs, *fixed, *(r for o in ops for r in o.results)}
        for v in op.reads:
            if v not in defined and new[v].type != v.type:
                ops.append(make_op(cast, [new[v]], {"dtype": v.type.dtype}, loc=op.loc, fresh=builder.fresh))
                narrow[v] = ops[-1].result
        return substitute([op], {v: narrow.get(v, new.get(v, v)) for v in op.reads if v not in defined})[0]

    for v in graph.inputs:
        if v.type.dtype in HALF and v not in states:
            widen(v, None)
    for old in graph.ops:
        op = as_before(old) if old.opdef.kind == "loop" or old.name == "scatter" else substitute([old], new)[0]
        ops.append(op)
        if op.opdef.kind in ("view", "copy") and fixed.issuperset(op.reads):
            fixed.update(op.results)  # a weight in another shape stays half
            continue
        for before, after in zip(old.results, op.results, strict=True):
            source = op.name in ("embedding", "gather", "select_rows", "scan", "scatter") or fixed.issuperset(op.reads)
            if after.type.dtype in HALF and source and after not in states and op.name != "cast":
                new[before] = after
                widen(before, op)
    if not notes.rewrites:
        return graph
    outputs, makers = [], definitions(graph)
    for v in graph.outputs:
        changed = new.get(v, v)
        if changed.type.dtype != v.type.dtype:  # a cast that becomes part of the kernel which makes the output
            loc = makers[v].loc if v in makers else builder.loc
            made = make_op(cast, [changed], {"dtype": v.type.dtype}, loc=loc, fresh=builder.fresh)
            ops.append(made)
            changed = made.result
        outputs.append(changed)
    return graph.replace(ops=tuple(ops), outputs=tuple(outputs))


def _states(graph: Graph) -> set[Value]:
    """Caches: inputs that are updated in place, and the values they become."""
    found: set[Value] = set()
    for op in graph.ops:
        for result, name in op.opdef.inplace.items():
            source = op.operand(name)
            if source is not None:
                found |= {source, op.results[result]}
    return found


WIDEN_ACTIVATIONS = Pass(
    "widen-activations",
    "half-precision values between kernels are kept in f32; weights and caches stay half",
    widen_activations,
)
