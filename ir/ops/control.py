"""Rolled layers: one body that runs several times over a table of weights."""

from __future__ import annotations

from typing import Any

from monoplan.ir.errors import VerifyError
from monoplan.ir.graph import Graph
from monoplan.ir.opdef import op, require
from monoplan.ir.types import TensorType


def _repeat_type(*xs: TensorType, count: int, carried: int, shared: int, body: Graph) -> tuple[TensorType, ...]:
    slices = len(body.inputs) - carried - shared
    require(
        len(xs) == carried + shared + slices * count,
        f"repeat_layers: {len(xs)} operands, expected {carried} carried + {shared} shared + {slices} x {count}",
    )
    given = [*xs[: carried + shared], *(xs[carried + shared + i * count] for i in range(slices))]
    for v, t in zip(body.inputs, given, strict=True):
        require(v.type == t, f"repeat_layers: body input {v} is {v.type}, got {t}")
    for v, o in zip(body.inputs[:carried], body.outputs, strict=False):
        require(v.type == o.type, f"repeat_layers: carried {v} is {v.type} at the start and {o.type} at the end")
    per_turn = [o.type for o in body.outputs[carried:] for _ in range(count)]
    return (*(o.type for o in body.outputs[:carried]), *per_turn)


@op(_repeat_type, "repeat")
def repeat_layers(*xs: Any, count: int, carried: int, shared: int, body: Graph) -> Any:
    """`count` turns of body(carried…, shared…, slice of each table…); per-turn outputs follow the carried."""
    raise VerifyError("repeat_layers is run by the interpreter itself")
