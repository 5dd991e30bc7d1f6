"""The one table of tolerances, by element type and kind of computation: tests, verify, bisect and goldens use it.

An element passes when |actual - exact| <= relative * |exact| + absolute * scale, where `exact` was computed in
float64 and `scale` is the size of the terms that were added up. The numbers in the table count units of rounding
of the element type. Integers and bools must be equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.cache_rows import unpacked_rows
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import Array, DType, as_dtype

EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
# A product with low-bit weights rounds x to 15 bits, by the largest of each 32 of them (x and weights to 16, by the
# largest of each 256, on tile units); errors of many even out.
LOW_BIT_EPSILON = 2.0**-16
# Rows of a cache in 8 bits: a number between two codes, which are 1 / 127 of the row's largest apart, may get either.
CACHE_EPSILON, CACHE = 2.0**-6, "cache"
LARGEST = {"f64": 1.7976931348623157e308, "f32": 3.4028234663852886e38, "f16": 65504.0, "bf16": 3.3895313892515355e38}

# kind: (relative, absolute), in epsilons. Halves are computed in f32 and rounded once at the end of each op.
UNITS = {
    "pointwise": (4.0, 1.0),  # a few roundings, functions within 2 units
    "reduce": (8.0, 8.0),  # sums, norms, softmax: `scale` is the size of the summed terms
    "matmul": (8.0, 16.0),  # dot products and attention
    "model": (64.0, 128.0),  # tens of layers, one after the other
    "rewrite": (2.0**16, 2.0**16),  # what a pass may change when both graphs run in f64: the order of sums
}
# A compiled result may be this many times as far from the exact one as the plain reference in its own type.
FACTOR = 4.0

_KINDS = {
    "matmul": (
        "linear", "matmul", "attention", "fused_linear", "fused_matmul", "linear_argmax", "qkv_rope_cache", "conv",
        "fused_conv", "linear_norm", "heads_rope_cache", "latent_rope_cache", "experts",
        "fused_experts", "linear_route",
    ),
    "reduce": (
        "reduce", "norm", "softmax", "scan", "fused_norm", "fused_reduce", "sample", "fused_gather", "rope", "pool",
        "adaptive_pool", "scatter",
    ),
}  # fmt: skip
_KIND_OF = {op_kind: row for row, kinds in _KINDS.items() for op_kind in kinds}


def kind_of(op_kind: str) -> str:
    """The row of the table for an op's kind."""
    return _KIND_OF.get(op_kind, "pointwise")


def tolerance(dtype: Any, kind: str) -> tuple[float, float]:
    """(relative, absolute) for an element type and a kind; (0, 0) for integers."""
    d = as_dtype(dtype)
    if not d.is_float:
        return 0.0, 0.0
    relative, absolute = UNITS[kind]
    return relative * EPSILON[d.name], absolute * EPSILON[d.name]


def errors(got: Array, want: Array, dtype: DType) -> Array:
    """Distances; infinite where one side is NaN or infinite and the other is not the same."""
    if not dtype.is_float:
        return np.where(got == want, 0.0, np.inf)
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), want.astype(np.float64)
        # What lies beyond the type's range may round to infinity.
        b = np.where((np.abs(b) > LARGEST[dtype.name]) & np.isinf(a) & (np.sign(a) == np.sign(b)), a, b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(same, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf))


@dataclass(frozen=True)
class Difference:
    """How far an array is from the exact one, and whether the table allows it."""

    dtype: DType
    size: int
    bad: int  # elements outside the tolerance
    max_abs: float
    max_rel: float
    max_ulp: float  # in units of the last place of the element type
    strange: int  # elements that are NaN or infinite on either side, also where both agree
    place: tuple[int, ...]  # of the worst element
    got: Any
    want: Any
    allowed: float  # at that place
    lost: int = 0  # elements that are NaN or infinite where the exact ones are other numbers
    shared: int = 0  # elements that are NaN or infinite on both sides

    @property
    def ok(self) -> bool:
        return self.bad == 0

    def __str__(self) -> str:
        if self.ok:
            return f"within tolerance: max abs error {self.max_abs:.3g}, {self.max_ulp:.3g} ulp"
        return (
            f"{self.bad} of {self.size} elements are wrong; worst at {list(self.place)}: got {self.got:.9g}, "
            f"expected {self.want:.9g} (off by {abs(self.got - self.want):.3g}, allowed {self.allowed:.3g})"
        )


def compare(
    got: Any,
    want: Any,
    dtype: Any,
    kind: str,
    *,
    scale: float | None = None,
    epsilon: float | None = None,
    plain: Any = None,
) -> Difference:
    """Compares with the exact array; `scale` is the largest exact value unless given.

    `epsilon`: of a rougher type that the value went through on its way. `plain`: the same value computed by the
    references in its own type; what is no worse than FACTOR times its error passes as well. The type "cache": bytes of
    rows with scales, which are compared by what they mean.
    """
    a, b = np.asarray(got), np.asarray(want)
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
    if dtype == CACHE:
        a, b = (unpacked_rows(x).astype(np.float32) for x in (a, b))
        plain = None if plain is None else unpacked_rows(np.asarray(plain)).astype(np.float32)
        dtype, epsilon = "f32", max(epsilon or 0.0, CACHE_EPSILON)
    d = as_dtype(dtype)
    if not a.size:
        return Difference(d, 0, 0, 0.0, 0.0, 0.0, 0, (), 0, 0, 0.0)
    error = errors(a, b, d)
    exact = b.astype(np.float64)
    size = np.abs(np.where(np.isfinite(exact), exact, 0.0))
    relative, absolute = tolerance(d, kind)
    if d.is_float and epsilon is not None:
        factor = max(1.0, epsilon / EPSILON[d.name])
        relative, absolute = relative * factor, absolute * factor
    allowed = relative * size + absolute * (float(size.max()) if scale is None else scale)
    wrong = error > allowed
    if plain is not None and d.is_float and wrong.any():
        theirs = errors(np.asarray(plain), b, d)
        # A reference that overflows somewhere excuses the same place, and no other.
        limit = FACTOR * float(np.max(theirs, initial=0.0, where=np.isfinite(theirs)))
        wrong = wrong & (error > limit) & ~(np.isinf(error) & np.isinf(theirs))
        allowed = np.maximum(allowed, limit)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.where(wrong, error - allowed, -1.0))), a.shape))
    if not wrong.any():
        place = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), a.shape))
    finite = np.where(np.isinf(error), 0.0, error)
    with np.errstate(all="ignore"):
        ours = ~np.isfinite(a.astype(np.float64)) if d.is_float else np.zeros(a.shape, bool)
        strange = int((ours | ~np.isfinite(exact)).sum()) if d.is_float else 0
        rel = np.where(size > 0, finite / np.where(size > 0, size, 1.0), 0.0)
        ulp = finite / _spacing(size, d) if d.is_float else finite
    return Difference(
        d,
        a.size,
        int(wrong.sum()),
        float(error.max()),
        float(rel.max()),
        float(ulp.max()),
        strange,
        place,
        a[place].item(),
        b[place].item(),
        float(allowed[place]),
        int((ours & np.isinf(error)).sum()),
        int((ours & ~np.isinf(error)).sum()),
    )


def _spacing(size: Array, d: DType) -> Array:
    """The unit of the last place at each size."""
    smallest = {"f64": 2.0**-1074, "f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}[d.name]
    exponent = np.floor(np.log2(np.where(size > 0, size, 1.0)))
    return np.maximum(np.where(size > 0, np.exp2(exponent), 0.0) * EPSILON[d.name], smallest)
