"""Type rules that several ops share, and the short forms of @op for pointwise ops and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from monoplan.ir.dims import Dim, equal, same_dims
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.opdef import CForm, OpDef, TypeRule, normalize_axis, op, op_name, require
from monoplan.ir.types import DType, TensorType, bool_, promote


def broadcast(shapes: Sequence[tuple[Dim, ...]], name: str) -> tuple[Dim, ...]:
    """The common shape by numpy's rule; a symbolic size only meets itself or 1."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        size: Dim = 1
        for s in shapes:
            d = s[axis] if len(s) >= -axis else 1
            if equal(d, 1) or equal(d, size):
                continue
            if not equal(size, 1):
                text = " and ".join(str(list(s)).replace("'", "") for s in shapes)
                raise TypeRuleError(f"{name}: shapes {text} do not broadcast: {size} meets {d} at dimension {axis}")
            size = d
        result.append(size)
    return tuple(result)


def broadcasts_to(shape: tuple[Dim, ...], target: tuple[Dim, ...]) -> bool:
    """Whether `shape` stretches to just `target`."""
    tail = target[len(target) - len(shape) :] if len(shape) <= len(target) else ()
    return len(shape) <= len(target) and all(equal(a, 1) or equal(a, b) for a, b in zip(shape, tail, strict=True))


def require_some(name: str, x: TensorType, axes: Sequence[int]) -> None:
    """Raises a TypeRuleError if an axis that must have elements is known to have none."""
    for axis in axes:
        require(not equal(x.shape[axis], 0), f"{name}: axis {axis} of {x} has no elements")


def numeric(name: str, *, floats: bool = False) -> Any:
    """A pointwise rule: broadcast shapes, promoted dtype; `floats` refuses integers and bools."""

    def rule(*types: TensorType, **_: Any) -> TensorType:
        dtype = promote(*(t.dtype for t in types))
        shown = ", ".join(map(str, types))
        require(dtype != bool_, f"{name} needs numbers, got {shown}")
        require(
            dtype.is_float or not floats, f"{name} needs floating point operands, got {shown}", fix="cast to f32 first"
        )
        return TensorType(dtype, broadcast([t.shape for t in types], name))

    return rule


def comparison(name: str) -> Any:
    """A pointwise rule with a bool result."""

    def rule(*types: TensorType, **_: Any) -> TensorType:
        return TensorType(bool_, broadcast([t.shape for t in types], name))

    return rule


def logical(name: str) -> Any:
    """A pointwise rule over bools."""

    def rule(*types: TensorType, **_: Any) -> TensorType:
        require(all(t.dtype == bool_ for t in types), f"{name} needs bool operands, got {', '.join(map(str, types))}")
        return TensorType(bool_, broadcast([t.shape for t in types], name))

    return rule


def pointwise(
    c: CForm,
    rule: Callable[..., TypeRule] = numeric,
    *,
    floats: bool = False,
    commutative: bool = False,
    cuda: CForm | None = None,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Registers a pointwise op with its C expression (see CForm) and one of the rules above."""

    def register(fn: Callable[..., Any]) -> OpDef:
        name = op_name(fn)
        made = rule(name, floats=True) if floats else rule(name)
        return op(made, "pointwise", c=c, cuda=cuda, floats=floats, commutative=commutative)(fn)

    return register


def reduction(
    *,
    floats: bool = False,
    numbers: bool = False,
    some: bool = False,
    result: Callable[[DType], DType] = lambda dtype: dtype,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Registers a reduction with the attributes axes and keepdims; codegen/reductions.py says how it runs.

    It takes any element type, `floats` or `numbers` (not bools) only; with `some`, axes must have elements. `result`
    gives the element type of the result.
    """

    def register(fn: Callable[..., Any]) -> OpDef:
        name = op_name(fn)

        def rule(x: TensorType, *, axes: Any, keepdims: bool) -> TensorType:
            require(x.dtype.is_float or not floats, f"{name} needs floating point operands, got {x}")
            require(x.dtype != bool_ or not numbers, f"{name} needs numbers, got {x}")
            over = normalized_axes(axes, x.rank, name)
            if some:
                require_some(name, x, over)
            return TensorType(result(x.dtype), reduced_shape(x, over, keepdims))

        return op(rule, "reduce", floats=floats, bounded=some)(fn)

    return register


def reduced_shape(x: TensorType, axes: tuple[int, ...], keepdims: bool) -> tuple[Dim, ...]:
    """The shape after a reduction over (normalized) axes."""
    if keepdims:
        return tuple(1 if i in axes else d for i, d in enumerate(x.shape))
    return tuple(d for i, d in enumerate(x.shape) if i not in axes)


def normalized_axes(axes: tuple[int, ...] | int | None, rank: int, name: str) -> tuple[int, ...]:
    """Axes counted from the front, sorted; None means all."""
    if axes is None:
        return tuple(range(rank))
    given = (axes,) if isinstance(axes, int) else axes
    result = tuple(sorted(normalize_axis(a, rank, name) for a in given))
    require(len(set(result)) == len(result), f"{name}: an axis is named twice in {given}")
    return result


def linear_type(x: TensorType, weight: TensorType, bias: TensorType | None, name: str = "linear") -> TensorType:
    """x[…, K] with weight[N, K] and bias[N] gives […, N]; activations may be wider than weights."""
    require(weight.rank == 2, f"{name}: the weight must be [out, in], got {weight}")
    require(
        x.rank >= 1 and equal(x.shape[-1], weight.shape[1]),
        f"{name}: the input {x} has {x.shape[-1] if x.rank else 'no'} features, the weight {weight} takes "
        f"{weight.shape[1]}",
    )
    require(
        bias is None or (bias.rank == 1 and equal(bias.shape[0], weight.shape[0])),
        f"{name}: the bias {bias} does not fit the weight {weight}",
    )
    dtype = promote(x.dtype, weight.dtype)
    require(dtype.is_float, f"{name} needs floating point operands, got {x} and {weight}")
    return TensorType(dtype, (*x.shape[:-1], weight.shape[0]))


def norm_type(x: TensorType, weight: TensorType | None, bias: TensorType | None, dims: int, name: str) -> TensorType:
    """A norm over the last `dims` dimensions, whose weight and bias have just that shape."""
    require(x.dtype.is_float, f"{name} needs floating point operands, got {x}")
    require(1 <= dims <= x.rank, f"{name}: normalizes {dims} dimensions, the input is {x}")
    for what, p in (("weight", weight), ("bias", bias)):
        if p is not None:
            fits = same_dims(p.shape, x.shape[x.rank - dims :])
            require(
                fits,
                f"{name}: the {what} {p} does not match the last {dims} dimension(s) of {x}",
                why="normalized_shape must equal the trailing dimensions of the input",
            )
    return x
