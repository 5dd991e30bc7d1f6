"""Which outputs of a graph are its inputs, updated in place: also through rolled layers."""

from __future__ import annotations

from monoplan.ir.graph import Graph, Op, Value


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
