"""A norm in front of experts and their router: each of these products norms x as it reads it."""

from __future__ import annotations

from monoplan.ir.builder import make_op
from monoplan.ir.graph import Graph, Op, Value
from monoplan.ir.ops.fused import fused_experts
from monoplan.ir.ops.linear import expert_linear, linear
from monoplan.ir.ops.reduce import rms_norm
from monoplan.ir.ops.shape import reshape
from monoplan.passes.manager import Notes, Pass
from monoplan.passes.pattern import Match, Readers, Rewrite, distinct_readers, param_values, rewrite_pass
from monoplan.passes.rebuild import Overwrites, builder_for

NAME = "fuse-norm-experts"


def copy_norms(graph: Graph, notes: Notes) -> Graph:
    """A copy of an RMS norm for each of its readers, if all of them are products and experts among them."""
    readers, fixed, overwritten = distinct_readers(graph), param_values(graph), Overwrites(graph)
    builder = builder_for(graph)
    new: dict[Op, list[Op]] = {}
    for norm in graph.ops:
        found = readers.get(norm.results[0], set()) if norm.opdef is rms_norm and norm.attrs["dims"] == 1 else set()
        kinds = {_kind(op, readers, fixed) for op in found}
        if "experts" not in kinds or len(found) < 2:
            continue
        if "other" in kinds or any(v in overwritten for v in norm.reads):
            notes.missed(NAME, norm, f"{norm.result} is read by other ops than products, too: it must be stored")
            continue
        for op in (op for op in graph.ops if op in found):
            copy = make_op(rms_norm, norm.operands, norm.attrs, loc=norm.loc, fresh=builder.fresh)
            operands = tuple(copy.result if v is norm.result else v for v in op.operands)
            new[op] = [copy, Op(op.opdef, operands, op.attrs, op.results, op.loc)]
    return graph.replace(ops=tuple(o for op in graph.ops for o in new.get(op, [op]))) if new else graph


def _kind(op: Op | None, readers: Readers, fixed: set[Value]) -> str:
    """What reads a norm: experts, also of its rows as a matrix; a linear by a weight; something else."""
    if op is not None and op.opdef is expert_linear:
        return "experts" if op.operands[0].type.rank == 2 else "other"  # type: ignore[union-attr]
    if op is not None and op.opdef is reshape:
        experts = all(r is not None and r.opdef is expert_linear for r in readers.get(op.result, ()))
        return "experts" if experts and op.result.type.rank == 2 else "other"
    return "linear" if op is not None and op.opdef is linear and op.operands[1] in fixed else "other"


def _rows(m: Match) -> bool | str:
    if m["dims"] != 1:
        return f"the norm covers {m['dims']} dimensions, experts read one"
    return m.root.operands[0].type.rank == 2 or "each choice has a row of its own"  # type: ignore[union-attr]


_FUSE = rewrite_pass(
    NAME,
    "expert_linear(rms_norm(x, g), w, ids) -> the norm is applied while x is read",
    Rewrite(
        NAME,
        "expert_linear(rms_norm(x, g), w, ids) -> fused_experts",
        find=lambda x, g, w, ids, up, b, c, *, eps, dims, gate: expert_linear(
            rms_norm(x, g, eps=eps, dims=dims), w, ids, up, b, c, gate=gate
        ),
        make=lambda x, g, w, ids, up, b, c, eps, gate: fused_experts(x, w, ids, up, b, c, g, gate=gate, eps=eps),
        when=_rows,
    ),
    Rewrite(
        NAME,
        "expert_linear(reshape(rms_norm(x, g)), w, ids) -> fused_experts",
        find=lambda x, g, w, ids, up, b, c, *, eps, dims, gate, shape: expert_linear(
            reshape(rms_norm(x, g, eps=eps, dims=dims), shape=shape), w, ids, up, b, c, gate=gate
        ),
        make=lambda x, g, w, ids, up, b, c, eps, gate, shape: fused_experts(
            reshape(x, shape=shape), w, ids, up, b, c, g, gate=gate, eps=eps
        ),
        when=lambda m: _rows(m) if m["shape"][-1] == m["x"].type.shape[-1] else "the reshape cuts rows",
    ),
)
FUSE_NORM_EXPERTS = Pass(NAME, _FUSE.rule, lambda graph, notes: _FUSE.run(copy_norms(graph, notes), notes))
