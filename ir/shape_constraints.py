"""Shape constraints: type rules that compare symbolic sizes, checked again with the sizes of each call.

Most rules are about equality, and hold for all values or none. Those of `bounded` ops compare: a slice must lie inside
its axis, a size must not be negative, a maximum needs an element. While a graph is made they let symbols pass, unless
no value of them would do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from monoplan.ir.dims import Dim, Expr, symbols_of
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.graph import Graph, Loc, all_ops
from monoplan.ir.interpreter import concrete
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import OpDef
from monoplan.ir.printer import print_op
from monoplan.ir.types import TensorType


class SizeError(ArgumentError):
    """Sizes that have the form that a plan wants, but are too small or too large for one of its ops."""


@dataclass(frozen=True, slots=True)
class ShapeConstraint:
    """A type rule that is checked when sizes are known."""

    opdef: OpDef
    types: tuple[TensorType | None, ...]  # of the operands
    attrs: tuple[tuple[str, Any], ...]
    loc: Loc
    text: str  # the op's line

    def check(self, symbols: Mapping[str, int]) -> None:
        """Raises a SizeError with the op's line unless the rule holds for these values."""
        types = [None if t is None else t.with_shape(concrete(t.shape, symbols)) for t in self.types]
        try:
            self.opdef.apply_rule(types, {name: concrete(v, symbols) for name, v in self.attrs})
        except TypeRuleError as error:
            names = sorted(set().union(*(symbols_of(d) for d in self._dims())))
            values = ", ".join(f"{n} = {symbols[n]}" for n in names)
            raise SizeError(
                error.what,
                where=self.loc,
                why=f"{self.text}, where {values}",
                fix="give sizes that fit, or compile without specs: then such sizes get a plan of their own",
            ) from None

    def _dims(self) -> Iterator[Dim]:
        for t in self.types:
            yield from t.shape if t is not None else ()
        for _, v in self.attrs:
            yield from _dims_in(v)


def shape_constraints(graph: Graph) -> tuple[ShapeConstraint, ...]:
    """The rules to check at each call, once for ops that are alike."""
    found: dict[Any, ShapeConstraint] = {}
    for op in all_ops(graph):
        if not op.opdef.bounded:
            continue
        types = tuple(None if v is None else v.type for v in op.operands)
        made = ShapeConstraint(op.opdef, types, tuple(op.attrs.items()), op.loc, "")
        if any(isinstance(d, Expr) for d in made._dims()):
            key = (op.name, str(types), str(made.attrs))
            found.setdefault(key, ShapeConstraint(op.opdef, types, made.attrs, op.loc, print_op(op)))
    return tuple(found.values())


def _dims_in(v: Any) -> Iterator[Dim]:
    if isinstance(v, tuple):
        for x in v:
            yield from _dims_in(x)
    elif isinstance(v, Expr):
        yield v
