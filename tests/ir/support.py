"""Runs one op of the registry as the interpreter would, and checks what its type rule promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import TensorType, as_dtype


def run(name: str, *operands: Any, exact: bool = False, **attrs: Any) -> Any:
    """The result of an op's reference; shapes and element types must be those of its type rule."""
    opdef = REGISTRY[name]
    full, rest = opdef.complete_operands([None if x is None else np.asarray(x) for x in operands], attrs)
    opdef.check_operands(full)
    complete = opdef.complete_attrs(rest)
    types = opdef.infer([None if x is None else type_of(x) for x in full], complete)
    outs = opdef.evaluate(full, complete, types, exact=exact)
    for a, t in zip(outs, types, strict=True):
        wanted = np.dtype(np.float64) if exact and t.dtype.is_float else t.dtype.numpy
        assert a.shape == t.shape and a.dtype == wanted, f"{name} gave {a.dtype}{a.shape}, its rule says {t}"
    return outs[0] if len(outs) == 1 else outs


def infer(name: str, *types: TensorType | None, **attrs: Any) -> Any:
    """The result types of an op."""
    opdef = REGISTRY[name]
    full, rest = opdef.complete_operands(list(types), attrs)
    opdef.check_operands(full)
    found = opdef.infer(full, opdef.complete_attrs(rest))
    return found[0] if len(found) == 1 else found


def refuses(match: str, name: str, *types: TensorType | None, **attrs: Any) -> None:
    """The op's type rule refuses these operands and says `match`."""
    with pytest.raises(TypeRuleError, match=match):
        infer(name, *types, **attrs)


def type_of(x: Any) -> TensorType:
    return TensorType(as_dtype(x.dtype), x.shape)
