"""A loop over the first dimension of tensors: one body, as many turns as there are slices."""

from __future__ import annotations

from typing import Any

from monoplan.ir.dims import Dim, bounds, equal
from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph
from monoplan.ir.opdef import op, require
from monoplan.ir.types import TensorType


def _scan_type(
    *xs: TensorType, length: Dim, state: int, slices: int, reverse: bool, body: Graph
) -> tuple[TensorType, ...]:
    low, high = bounds(length)
    require(high is None or high >= 0, f"scan: the length {length} is negative")
    require(0 <= state <= len(body.outputs), f"scan: {state} states, but its body has {len(body.outputs)} outputs")
    require(bool(body.outputs), "scan: its body has no outputs")
    require(
        slices >= 0 and state + slices <= len(xs), f"scan: {state} states and {slices} slices of {len(xs)} operands"
    )
    require(len(xs) == len(body.inputs), f"scan: {len(xs)} operands for {len(body.inputs)} inputs of its body")
    require(not (body.params or body.setup or body.writes), "scan: its body has params, setup ops or writes of its own")
    for i, (v, t) in enumerate(zip(body.inputs, xs, strict=True)):
        if state <= i < state + slices:
            fits = t.rank > 0 and equal(t.shape[0], length)
            require(fits, f"scan: {v} is a slice of {t}, whose first size should be the length, {length}")
            t = t.with_shape(t.shape[1:])
        require(v.type == t, f"scan: body input {v} is {v.type}, got {t}")
    for v, o in zip(body.inputs[:state], body.outputs, strict=False):
        require(v.type == o.type, f"scan: the state {v} is {v.type} before a turn and {o.type} after it")
    return (
        *(o.type for o in body.outputs[:state]),
        *(o.type.with_shape((length, *o.type.shape)) for o in body.outputs[state:]),
    )


@op(_scan_type, "loop")
def scan(*xs: Any, length: Dim, state: int, slices: int, reverse: bool = False, body: Graph) -> Any:
    """`length` turns of body(state…, slices…, shared…) -> (state…, y…): the last state, and all y stacked.

    Operands are the first state, the tensors that are sliced along their first dimension, and what all turns share. In
    `reverse`, the last slice comes first.
    """
    raise VerifyError("scan is run by the interpreter itself")
