"""One definition per op: schema, type rule, numpy reference and doc, from one decorated function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monoplan.ir.dims import Expr
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.types import DType, TensorType, as_dtype, bf16, f16, f32, promote

Array = np.ndarray[Any, Any]
# A rule gets operand types (None where absent) by position and attributes by name; it gives one type or more.
TypeRule = Callable[..., "TensorType | tuple[TensorType, ...]"]

REGISTRY: dict[str, OpDef] = {}
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """All there is to know about an operator."""

    name: str
    operand_names: tuple[str, ...]
    optional: tuple[str, ...]  # operands that may be None
    variadic: str | None  # a last operand that stands for any number of values
    attr_defaults: Mapping[str, Any]  # REQUIRED where there is no default
    attr_types: Mapping[str, str]  # annotations, see _ACCEPTED
    rule: TypeRule
    reference: Callable[..., Any]
    doc: str
    kind: str  # the kernel family or "pointwise", "view", "reduce" …: what passes and lowering switch on
    inplace: Mapping[int, str]  # result number -> the operand whose storage it takes over
    bounded: bool  # the rule compares sizes: where they are symbolic it is asked again at a call, see ir/sizes.py
    _inferred: dict[Any, tuple[TensorType, ...]] = field(default_factory=dict, init=False, repr=False)

    def complete_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes with defaults filled in, in the order of the definition."""
        if unknown := sorted(set(attrs) - set(self.attr_defaults)):
            raise TypeRuleError(f"{self.name}: unknown attributes {', '.join(unknown)}")
        full = {k: _plain(attrs.get(k, default)) for k, default in self.attr_defaults.items()}
        if missing := [k for k, v in full.items() if v is REQUIRED]:
            raise TypeRuleError(f"{self.name}: attributes {', '.join(missing)} are required")
        return full

    def complete_operands(self, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Operands in order, absent ones as None; operands given by name are taken out of `attrs`."""
        rest = dict(attrs)
        full = list(operands)
        for name in self.operand_names[len(full) :]:
            full.append(rest.pop(name, None))
        return full, rest

    def check_operands(self, operands: Sequence[object]) -> None:
        """Raises when the number of operands is wrong or a required one is missing."""
        n = len(self.operand_names)
        if len(operands) < n or (len(operands) > n and self.variadic is None):
            raise TypeRuleError(f"{self.name} takes {self.signature()}; got {len(operands)} operands")
        for name, v in zip(self.operand_names, operands, strict=False):
            if v is None and name not in self.optional:
                raise TypeRuleError(f"{self.name}: operand {name} is missing")

    def infer(self, types: Sequence[TensorType | None], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
        """Result types by the type rule; asked the same again (by every layer of a model), it remembers."""
        key: Any = (tuple(types), tuple(attrs.items())) if self.kind != "repeat" else None  # a body would stay alive
        try:
            known = self._inferred.get(key)
        except TypeError:  # an attribute that has no hash: the rule will say what is wrong with it
            key, known = None, None
        if known is None:
            result = self.rule(*types, **attrs)
            known = result if isinstance(result, tuple) else (result,)
            if key is not None and len(self._inferred) < 4096:
                self._inferred[key] = known
        for name, v in attrs.items():  # not remembered: 1 and True are one key
            if not _ACCEPTED[self.attr_types[name]](v):
                raise TypeRuleError(f"{self.name}: {name}={v!r} is not of type {self.attr_types[name]}")
        return known

    def evaluate(
        self,
        operands: Sequence[Array | None],
        attrs: Mapping[str, Any],
        results: Sequence[TensorType],
        *,
        exact: bool = False,
    ) -> tuple[Array, ...]:
        """The numpy reference. Half floats are computed in f32 and rounded once; `exact` computes in f64."""
        moves = self.kind in ("view", "copy") and not exact and len({a.dtype for a in operands if a is not None}) == 1
        met = _as_one_type(operands[self.name == "where" :]) if self.kind == "pointwise" else operands
        wide = operands if moves else [None if a is None else _widen(a, exact) for a in (*operands[: -len(met)], *met)]
        with np.errstate(all="ignore"):
            out = self.reference(*wide, **attrs)
        outs = out if isinstance(out, tuple) else (out,)
        kept = []
        for a, t in zip(outs, results, strict=True):
            dtype = np.dtype(np.float64) if exact and t.dtype.is_float else t.dtype.numpy
            with np.errstate(all="ignore"):
                kept.append(np.asarray(a).astype(dtype, copy=False))
        return tuple(kept)

    def signature(self) -> str:
        parts = [f"{n}?" if n in self.optional else n for n in self.operand_names]
        if self.variadic:
            parts.append(f"*{self.variadic}")
        return f"({', '.join(parts)})"

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """Applies the op: builds it into the current graph, or runs the reference on concrete tensors."""
        from monoplan.ir.builder import apply

        return apply(self, operands, attrs)

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature()}>"


def op(
    rule: TypeRule, kind: str, *, inplace: Mapping[int, str] | None = None, bounded: bool = False
) -> Callable[[Callable[..., Any]], OpDef]:
    """Registers an op: positional parameters are operands, keyword-only ones attributes, the body runs it."""

    def register(fn: Callable[..., Any]) -> OpDef:
        params = inspect.signature(fn).parameters.values()
        positional = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
        opdef = OpDef(
            name=fn.__name__.rstrip("_"),
            operand_names=tuple(p.name for p in positional),
            optional=tuple(p.name for p in positional if p.default is None),
            variadic=next((p.name for p in params if p.kind is p.VAR_POSITIONAL), None),
            attr_defaults={p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY},
            attr_types={p.name: str(p.annotation) for p in params if p.kind is p.KEYWORD_ONLY},
            rule=rule,
            reference=fn,
            doc=inspect.cleandoc(fn.__doc__ or ""),
            kind=kind,
            inplace=inplace or {},
            bounded=bounded,
        )
        if not opdef.doc:
            raise ValueError(f"{opdef.name}: an operator needs a one-line doc")
        if opdef.name in REGISTRY:
            raise ValueError(f"{opdef.name}: defined twice")
        REGISTRY[opdef.name] = opdef
        return opdef

    return register


def _as_one_type(operands: Sequence[Array | None]) -> Sequence[Array | None]:
    """Operands in the type that promotion gives, where numpy's would be another: u64 beside signed integers is i64."""
    common = promote(*(as_dtype(a.dtype) for a in operands if a is not None))
    if not common.is_integer:
        return operands
    return [None if a is None else a.astype(common.numpy, copy=False) for a in operands]


def _widen(a: Array, exact: bool) -> Array:
    """Half floats as f32, or every float as f64."""
    if a.dtype == bf16.numpy or a.dtype == f16.numpy:
        return a.astype(np.float64 if exact else np.float32)
    if exact and a.dtype == f32.numpy:
        return a.astype(np.float64)
    return a


def _plain(v: Any) -> Any:
    """Attributes are plain immutable Python: lists become tuples, numpy scalars Python numbers."""
    if isinstance(v, list | tuple):
        return tuple(_plain(x) for x in v)
    if isinstance(v, np.generic):
        return v.item()
    return v


def _is_int(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_float(v: Any) -> bool:
    return isinstance(v, float) or _is_int(v)


def _is_dim(v: Any) -> bool:
    return isinstance(v, Expr) or _is_int(v)


def _all(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, tuple) and all(map(accepts, v))


# What each annotation of an attribute takes. IR text may say anything, and attributes become numbers of a source: a
# name where a number belongs would be a variable there.
_ACCEPTED: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int | None": lambda v: v is None or _is_int(v),
    "float": _is_float,
    "float | None": lambda v: v is None or _is_float(v),
    "float | int | bool": lambda v: isinstance(v, bool) or _is_float(v),
    "bool": lambda v: isinstance(v, int),
    "str": lambda v: isinstance(v, str),
    "Dim": _is_dim,
    "DType": lambda v: isinstance(v, DType),
    "tuple[int, ...]": _all(_is_int),
    "tuple[int, ...] | None": lambda v: v is None or _is_int(v) or _all(_is_int)(v),
    "tuple[Dim, ...]": _all(_is_dim),
    "Graph": lambda v: type(v).__name__ == "Graph",
}


def same_as(name: str) -> Callable[..., TensorType]:
    """A rule: the result has the type of that operand (by position 0) and attributes do not matter."""

    def rule(first: TensorType, *_: TensorType | None, **__: Any) -> TensorType:
        return first

    rule.__name__ = f"same_as_{name}"
    return rule


def require(condition: bool, what: str, *, why: str = "", fix: str = "") -> None:
    """Raises a TypeRuleError unless the condition holds."""
    if not condition:
        raise TypeRuleError(what, why=why, fix=fix)


def require_float(name: str, *types: TensorType | None) -> None:
    for t in types:
        require(t is None or t.dtype.is_float, f"{name} needs floating point operands, got {t}")


def normalize_axis(axis: int, rank: int, name: str) -> int:
    """An axis counted from the front."""
    require(-rank <= axis < rank, f"{name}: axis {axis} is out of range for rank {rank}")
    return axis % rank


def dtype_attr(dtype: Any) -> DType:
    """A DType attribute given as a DType or a name."""
    from monoplan.ir.types import as_dtype

    return as_dtype(dtype)


def exactly(x: Any) -> Any:
    """A constant for comparison: 0.0 and -0.0 differ, NaN equals itself."""
    return x.hex() if type(x) is float and (x == 0.0 or x != x) else x
