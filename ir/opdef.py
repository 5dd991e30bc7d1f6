"""One definition per op: schema, type rule, numpy reference and doc, from one decorated function."""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.ir.dims import Expr
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, TensorType, as_dtype, bf16, f16, f32, promote

if TYPE_CHECKING:
    from monoplan.ir.builder import Builder

# A rule gets operand types (None where absent) by position and attributes by name, or all of them as one `Given`; it
# gives one type or more.
TypeRule = Callable[..., "TensorType | tuple[TensorType, ...]"]
# A pointwise op as C: a text; texts by element type; or a function of the operands' type and the attributes that gives
# one. In a text, {0} and {1} stand for operands in their common type, {t} for the name of that type (f32, i8), {f} for
# the suffix of its math functions (f or nothing), {type} for the C type of the result, {name} for an attribute. Texts
# by type are looked up by its name, then as signed or unsigned, integer, float or bool, then as any.
CForm = str | Mapping[str, str] | Callable[[DType, Mapping[str, Any]], str]

REGISTRY: dict[str, OpDef] = {}
_watchers: list[Callable[[OpDef], object]] = []
REQUIRED = inspect.Parameter.empty
NESTED = ("repeat", "loop")  # kinds of ops that have a body: rolled layers, and scans


class Given(SimpleNamespace):
    """Types of operands and attributes by the names that an op's function gives them, for rules of many."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


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
    by_name: bool  # the rule takes a Given
    reference: Callable[..., Any]
    doc: str
    kind: str  # the kernel family or "pointwise", "view", "reduce" …: what passes and lowering switch on
    inplace: Mapping[int, str]  # result number -> the operand whose storage it takes over
    bounded: bool  # the rule compares sizes: where they are symbolic it is checked again at each call
    floats: bool  # the rule takes floats only: functions of the frontend cast integers to f32
    commutative: bool
    own_type: tuple[str, ...]  # operands of a pointwise op that take no part in promotion: the condition of where
    low_bit: tuple[str, ...]  # operands that may be weights in a low-bit type
    c: CForm | None  # pointwise ops only
    cuda: CForm | None  # where it differs from C
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
        """Result types by the type rule; remembered, since every layer of a model needs the same."""
        key: Any = (tuple(types), tuple(attrs.items())) if self.kind not in NESTED else None  # a body would stay alive
        try:
            known = self._inferred.get(key)
        except TypeError:  # an attribute that has no hash: the rule will say what is wrong with it
            key, known = None, None
        if known is None:
            self._check_low_bits(types)
            result = self.apply_rule(types, attrs)
            known = result if isinstance(result, tuple) else (result,)
            if key is not None and len(self._inferred) < 4096:
                self._inferred[key] = known
        for name, v in attrs.items():  # not remembered: 1 and True are one key
            if not _ACCEPTED[self.attr_types[name]](v):
                raise TypeRuleError(f"{self.name}: {name}={v!r} is not of type {self.attr_types[name]}")
        return known

    def apply_rule(
        self, types: Sequence[TensorType | None], attrs: Mapping[str, Any]
    ) -> TensorType | tuple[TensorType, ...]:
        """What the type rule says of these operands and attributes."""
        if not self.by_name:
            return self.rule(*types, **attrs)
        named = dict(zip(self.operand_names, types, strict=False))
        more = {} if self.variadic is None else {self.variadic: tuple(types[len(named) :])}
        return self.rule(Given(**named, **more, **attrs))

    def _check_low_bits(self, types: Sequence[TensorType | None]) -> None:
        for i, t in enumerate(types):
            if t is not None and t.dtype.is_low_bit and self.kind not in NESTED:
                name = (*self.operand_names, self.variadic)[min(i, len(self.operand_names))]
                fix = "load the model in another type (dtype='float32'), or use it in a linear or an embedding"
                require(name in self.low_bit, f"{self.name} takes no low-bit weight, got {t}", fix=fix)

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
        met = self._promoted_operands(operands) if self.kind == "pointwise" else operands
        wide = operands if moves else [None if a is None else _widen(a, exact) for a in met]
        with np.errstate(all="ignore"):
            out = self.reference(*wide, **attrs)
        outs = out if isinstance(out, tuple) else (out,)
        kept = []
        for a, t in zip(outs, results, strict=True):
            dtype = np.dtype(np.float64) if exact and t.dtype.is_float else t.dtype.numpy
            with np.errstate(all="ignore"):
                kept.append(np.asarray(a).astype(dtype, copy=False))
        return tuple(kept)

    def promoted(self, of_operands: Sequence[Any]) -> list[Any]:
        """What belongs to operands that promotion brings to one type, from a sequence with one item per operand."""
        return [x for n, x in zip(self.operand_names, of_operands, strict=True) if n not in self.own_type]

    def _promoted_operands(self, operands: Sequence[Array | None]) -> Sequence[Array | None]:
        """Operands in the type that promotion gives, where numpy's would be another: u64 beside i32 is i64."""
        common = promote(*(as_dtype(a.dtype) for a in self.promoted(operands)))
        if not common.is_integer:
            return operands
        return [
            a if a is None or n in self.own_type else a.astype(common.numpy, copy=False)
            for n, a in zip(self.operand_names, operands, strict=True)
        ]

    def signature(self) -> str:
        parts = [f"{n}?" if n in self.optional else n for n in self.operand_names]
        if self.variadic:
            parts.append(f"*{self.variadic}")
        return f"({', '.join(parts)})"

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """Emits the op into the current builder: how patterns, passes and tests write IR in Python."""
        builder = current_builder.get()
        if builder is None:
            raise TypeRuleError(
                f"{self.name} was applied to graph values outside of a Builder",
                fix="write `with Builder() as b:` around it, or use monoplan.nn.functional for tensors",
            )
        return builder.emit(self, operands, attrs)

    def __repr__(self) -> str:
        return f"<op {self.name}{self.signature()}>"


current_builder: contextvars.ContextVar[Builder | None] = contextvars.ContextVar("builder", default=None)


def op_name(fn: Callable[..., Any]) -> str:
    """The name of the op that a function defines: `sum_` is sum."""
    return fn.__name__.rstrip("_")


def op(
    rule: TypeRule,
    kind: str,
    *,
    inplace: Mapping[int, str] | None = None,
    bounded: bool = False,
    floats: bool = False,
    commutative: bool = False,
    own_type: tuple[str, ...] = (),
    low_bit: tuple[str, ...] = (),
    c: CForm | None = None,
    cuda: CForm | None = None,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Registers an op: positional parameters are operands, keyword-only ones attributes, the body runs it.

    `ir/rules.py` has shorter forms for pointwise ops and reductions.
    """

    def register(fn: Callable[..., Any]) -> OpDef:
        params = inspect.signature(fn).parameters.values()
        positional = [p for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
        opdef = OpDef(
            name=op_name(fn),
            operand_names=tuple(p.name for p in positional),
            optional=tuple(p.name for p in positional if p.default is None),
            variadic=next((p.name for p in params if p.kind is p.VAR_POSITIONAL), None),
            attr_defaults={p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY},
            attr_types={p.name: _annotation(p) for p in params if p.kind is p.KEYWORD_ONLY},
            rule=rule,
            by_name=any(a in ("Given", Given) for a in inspect.get_annotations(rule).values()),
            reference=fn,
            doc=inspect.cleandoc(fn.__doc__ or ""),
            kind=kind,
            inplace=inplace or {},
            bounded=bounded,
            floats=floats,
            commutative=commutative,
            own_type=own_type,
            low_bit=low_bit,
            c=c,
            cuda=cuda,
        )
        if not opdef.doc:
            raise ValueError(f"{opdef.name}: an operator needs a one-line doc")
        if opdef.name in REGISTRY:
            raise ValueError(f"{opdef.name}: defined twice")
        if unknown := [f"{k}: {t}" for k, t in opdef.attr_types.items() if t not in _ACCEPTED]:
            known = ", ".join(_ACCEPTED)
            raise ValueError(f"{opdef.name}: {unknown[0]} is not a type of attributes; those are {known}")
        if (kind == "pointwise") != (c is not None):
            raise ValueError(f"{opdef.name}: a pointwise op needs its C expression, c=…, and no other op has one")
        REGISTRY[opdef.name] = opdef
        for see in _watchers:
            see(opdef)
        return opdef

    return register


def _annotation(p: inspect.Parameter) -> str:
    """The text of an annotation, which is an object in files that evaluate them."""
    return p.annotation.__name__ if isinstance(p.annotation, type) else str(p.annotation)


def watch(see: Callable[[OpDef], object]) -> None:
    """Calls `see` with every op of the registry, and with those that are defined later."""
    _watchers.append(see)
    for opdef in list(REGISTRY.values()):
        see(opdef)


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


def require(condition: bool, what: str, *, why: str = "", fix: str = "") -> None:
    """Raises a TypeRuleError unless the condition holds."""
    if not condition:
        raise TypeRuleError(what, why=why, fix=fix)


def normalize_axis(axis: int, rank: int, name: str) -> int:
    """An axis counted from the front."""
    require(-rank <= axis < rank, f"{name}: axis {axis} is out of range for rank {rank}")
    return axis % rank


def exactly(x: Any) -> Any:
    """A constant for comparison: 0.0 and -0.0 differ, NaN equals itself."""
    return x.hex() if type(x) is float and (x == 0.0 or x != x) else x
