"""The one table of tolerances, by element type and kind of computation, and the check that every test uses.

An element passes when |actual - exact| <= relative * |exact| + absolute * scale, where `exact` was computed
in float64 and `scale` is the size of the terms that were added up (1 unless the test knows better). The
numbers in the table count units of rounding of the element type. Integers and bools must be equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.types import DType, as_dtype

EPSILON = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
LARGEST = {
    "f64": 1.7976931348623157e308,
    "f32": 3.4028234663852886e38,
    "f16": 65504.0,
    "bf16": 3.3895313892515355e38,
}

# kind: (relative, absolute), in epsilons. Halves are computed in f32 and rounded once at the end of each op.
UNITS = {
    "pointwise": (4.0, 1.0),  # a few roundings, library functions within 2 units
    "reduce": (8.0, 8.0),  # sums, norms, softmax: `scale` is the size of the summed terms
    "matmul": (8.0, 16.0),  # dot products and attention
    "model": (64.0, 128.0),  # tens of layers, one after the other
}
# A compiled result may be this many times as far from the exact one as the plain reference in its own type.
FACTOR = 4.0


def tolerance(dtype: Any, kind: str) -> tuple[float, float]:
    """(relative, absolute) for an element type and a kind; (0, 0) for integers."""
    d = as_dtype(dtype)
    if not d.is_float:
        return 0.0, 0.0
    relative, absolute = UNITS[kind]
    return relative * EPSILON[d.name], absolute * EPSILON[d.name]


def check(actual: Any, exact: Any, dtype: Any, kind: str, scale: Any = 1.0) -> None:
    """Fails, showing the worst element and the largest errors, unless every element is within the table."""
    d = as_dtype(dtype)
    got, want = np.asarray(actual), np.asarray(exact)
    assert got.dtype == d.numpy, f"expected an array of {d}, got {got.dtype}"
    assert got.shape == want.shape, f"expected the shape {list(want.shape)}, got {list(got.shape)}"
    if not got.size:
        return
    allowed = np.zeros(got.shape)
    if d.is_float:
        relative, absolute = tolerance(d, kind)
        finite = np.where(np.isfinite(want.astype(np.float64)), want, 0.0)
        allowed = relative * np.abs(finite) + absolute * np.broadcast_to(
            np.asarray(scale, np.float64), got.shape
        )
    error = _errors(got, want, d)
    if not (error <= allowed).all():
        raise AssertionError(_report(got, want, error, allowed, f"{kind} {d}"))


def check_no_worse(actual: Any, plain: Any, exact: Any, dtype: Any, kind: str, scale: Any = 1.0) -> None:
    """Fails when the largest error exceeds FACTOR times the plain reference's, and the table as well."""
    d = as_dtype(dtype)
    want = np.asarray(exact)
    ours, theirs = (float(np.max(_errors(np.asarray(a), want, d), initial=0.0)) for a in (actual, plain))
    if not ours <= FACTOR * theirs:
        check(actual, exact, dtype, kind, scale)


def _errors(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], d: DType) -> np.ndarray[Any, Any]:
    """Distances; infinite where one side is NaN or infinite and the other is not the same."""
    if not d.is_float:
        return np.where(got == want, 0.0, np.inf)
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), want.astype(np.float64)
        # What lies beyond the type's range may round to infinity.
        b = np.where(np.abs(b) > LARGEST[d.name], np.where(np.isinf(a), a, b), b)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(same, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf))


def _report(got: Any, want: Any, error: Any, allowed: Any, title: str) -> str:
    excess = np.where(error > allowed, error - allowed, -1.0)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), got.shape))
    size = np.abs(want.astype(np.float64))
    with np.errstate(all="ignore"):
        relative = np.where(size > 0, error / size, 0.0)
    return (
        f"{title}: {int((error > allowed).sum())} of {got.size} elements differ too much\n"
        f"  worst at {list(place)}: got {got[place]!r}, expected {want[place]!r}, "
        f"off by {error[place]:.3g}, allowed {allowed[place]:.3g}\n"
        f"  max abs error {error.max():.3g}, max rel error {np.nanmax(relative):.3g}"
    )
