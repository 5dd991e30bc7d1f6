"""The check that every test uses, by the package's own table of tolerances (monoplan/ir/tolerances.py).

An element passes when |actual - exact| <= relative * |exact| + absolute * scale, where `exact` was computed
in float64 and `scale` is the size of the terms that were added up (1 unless the test knows better).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.ir.tolerances import EPSILON, FACTOR, LARGEST, UNITS, tolerance
from monoplan.ir.tolerances import errors as _errors
from monoplan.ir.types import as_dtype

__all__ = ["EPSILON", "FACTOR", "LARGEST", "UNITS", "check", "check_no_worse", "tolerance"]


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
        allowed = relative * np.abs(finite) + absolute * np.broadcast_to(np.asarray(scale, np.float64), got.shape)
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


def _report(got: Any, want: Any, error: Any, allowed: Any, title: str) -> str:
    excess = np.where(error > allowed, error - allowed, -1.0)
    place = tuple(int(i) for i in np.unravel_index(int(np.argmax(excess)), got.shape))
    size = np.abs(want.astype(np.float64))
    with np.errstate(all="ignore"):
        relative = np.where((size > 0) & np.isfinite(size), error / size, 0.0)
    return (
        f"{title}: {int((error > allowed).sum())} of {got.size} elements differ too much\n"
        f"  worst at {list(place)}: got {got[place]!r}, expected {want[place]!r}, "
        f"off by {error[place]:.3g}, allowed {allowed[place]:.3g}\n"
        f"  max abs error {error.max():.3g}, max rel error {np.nanmax(relative):.3g}"
    )
