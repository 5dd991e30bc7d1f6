"""exp, log, sin and their kin: at most 2 units in the last place, the same bits in a loop's body and in its tail."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from monoplan.driver import build_graph_executable
from monoplan.ir.builder import build_graph
from monoplan.ir.graph import Value
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, tensor_type
from monoplan.runtime.machine.features import levels, machine, read_cpu

Array = np.ndarray[Any, Any]
UNARY: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh",
        "cosh", "tanh", "asinh", "acosh", "atanh", "cbrt", "sigmoid", "erf", "erfc", "silu", "softplus",
        "sqrt", "rsqrt",
    )),
    *(("gelu", {"approximate": kind}) for kind in ("none", "tanh", "fast", "fast_tanh")),
]  # fmt: skip
BINARY = ("pow", "atan2")
CASES = [(name, attrs) for name, attrs in UNARY] + [(name, {}) for name in BINARY]
NAMES = ["_".join([name, *attrs.values()]) for name, attrs in CASES]
ISAS = [isa for isa in levels(machine(), read_cpu()[1]) if isa != "amx"]
COUNT = 100_000
# Of these the f64 reference is not that exact: by the C library, or of an argument that it rounds.
ROUGH = {"erf": 3.0, "erfc": 5.0, "gelu_none": 3000.0, "gelu_tanh": 800.0}


@functools.cache
def plan_of(isa: str, dtype: str) -> Any:
    """One plan of all functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOPLAN_ISA", isa)

        def forward(x: Value, y: Value) -> list[Value]:
            found = [REGISTRY[name](x, **attrs) for name, attrs in UNARY]
            return [*found, *(REGISTRY[name](x, y) for name in BINARY)]

        t = tensor_type(dtype, "n")
        return build_graph_executable(build_graph("functions", forward, {"x": t, "y": t}))


def patterns(dtype: str, count: int, seed: int) -> Array:
    """Edges, numbers of everyday size and random bits."""
    d = DTYPES[dtype].numpy
    rng, info = np.random.default_rng(seed), np.finfo(d)
    edges = [
        0.0,
        np.inf,
        np.nan,
        1.0,
        0.5,
        2.0,
        3.0,
        0.55,
        0.6,
        0.86,
        1e-20,
        info.max,
        info.tiny,
        info.smallest_subnormal,
    ]
    edges += [87.5, 88.7, 88.8, 89.0, 103.9, 104.1, 126.5, 149.5, 709.7, 709.8, 745.1, 745.2, 1e10, 1e30]
    half = np.pi / 2 * np.arange(1, 40)
    both = np.array([*edges, *half]).astype(d)
    sizes = [rng.uniform(-s, s, count // 6).astype(d) for s in (1, 10, 100)]
    bits = np.frombuffer(rng.bytes(count // 2 * d.itemsize), d)
    return np.concatenate([both, -both, *sizes, bits])


@np.errstate(all="ignore")
def exact(name: str, attrs: dict[str, Any], operands: list[Array]) -> Array:
    """The reference in a wider type: f64 for f32, long double for f64."""
    wide = np.float64 if operands[0].dtype == np.float32 else np.longdouble
    return np.asarray(REGISTRY[name].reference(*(a.astype(wide) for a in operands), **attrs))


@np.errstate(all="ignore")
def units(got: Array, want: Array) -> Array:
    """Distances in units of the last place; infinite where one is NaN or infinite and the other is not."""
    info = np.finfo(got.dtype)
    near = want.astype(got.dtype)
    exponent = np.frexp(np.where(np.isfinite(want), want, 1))[1]
    one = want.dtype.type(1)
    spacing = np.maximum(np.ldexp(one, exponent - 1 - info.nmant), want.dtype.type(info.smallest_subnormal))
    distance = np.abs(got.astype(want.dtype) - want) / spacing
    largest = np.ldexp(one, info.maxexp)
    over = np.isinf(got) & (np.abs(want) > largest * (1 - info.eps * 2)) & (np.sign(got) == np.sign(want))
    same = (got == near) | (np.isnan(got) & np.isnan(want)) | over
    return np.where(same, np.where(np.isfinite(distance), distance, 0.0), np.nan_to_num(distance, nan=np.inf)).astype(
        float
    )


def check(case: int, operands: list[Array], got: Array, limit: float) -> None:
    off = units(got, exact(*CASES[case], operands))
    worst = int(np.argmax(off))
    given = ", ".join(repr(a[worst]) for a in operands)
    assert off[worst] <= limit, f"{NAMES[case]}({given}) is {got[worst]!r}, off by {off[worst]:.2f} units"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_within_two_units(isa: str, dtype: str) -> None:
    if dtype == "f64" and np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("no type is wider than f64 here")
    x, y = patterns(dtype, COUNT, 1), patterns(dtype, COUNT, 2)[::-1].copy()
    y[::3] = np.rint(np.nan_to_num(y[::3]))  # whole exponents
    y[1::7] = np.clip(y[1::7], -30, 30)
    got = plan_of(isa, dtype)([x, y])
    for i, name in enumerate(NAMES):
        operands = [x] if i < len(UNARY) else [x, y]
        check(i, operands, got[i], 2.0 if dtype == "f32" else ROUGH.get(name, 2.0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_bits_do_not_depend_on_the_place(isa: str, dtype: str) -> None:
    """A number at the start of an array, in its middle, in its tail or alone gives the same bits."""
    x, y = patterns(dtype, 600, 3), patterns(dtype, 600, 4)[::-1].copy()
    run = plan_of(isa, dtype)
    whole = run([x, y])
    for start, stop in ((0, 1), (5, 8), (17, 48), (100, 131), (3, 250), (len(x) - 1, len(x))):
        for name, a, b in zip(NAMES, whole, run([x[start:stop].copy(), y[start:stop].copy()]), strict=True):
            assert (
                a[start:stop].tobytes() == b.tobytes()
                or (np.isnan(a[start:stop]) == np.isnan(b)).all()
                and (a[start:stop][~np.isnan(b)].tobytes() == b[~np.isnan(b)].tobytes())
            ), f"{name}: elements {start} to {stop} differ alone"


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_powers(dtype: str) -> None:
    """As C and numpy have them: bases below 0, whole exponents, infinities."""
    inf, nan = np.inf, np.nan
    some = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, 1e30, -1e30, 16777217.0, inf, -inf, nan]
    x, y = (a.reshape(-1).astype(DTYPES[dtype].numpy) for a in np.meshgrid(some, some))
    got = plan_of(ISAS[-1], dtype)([x, y])[NAMES.index("pow")]
    with np.errstate(all="ignore"):
        want = np.power(x, y)
    assert (np.isnan(got) == np.isnan(want)).all()
    fine = ~np.isnan(want)
    assert (np.signbit(got) == np.signbit(want))[fine].all()
    np.testing.assert_allclose(got[fine], want[fine], rtol=1e-6)
    assert got[(x == -inf) & (y == 0.5)].tolist() == [inf]


def test_far_below_zero() -> None:
    """What is nearly 0 is not 0."""
    x = np.array([-87.5, -95.0, -103.0], np.float32)
    got = dict(zip(NAMES, plan_of(ISAS[-1], "f32")([x, x]), strict=True))
    np.testing.assert_allclose(got["silu"], [-8.72e-37, -5.24e-40, -1.91e-43], rtol=2e-2)
    np.testing.assert_allclose(got["sigmoid"][:2], [9.97e-39, 5.51e-42], rtol=1e-2)


@pytest.mark.parametrize("isa", ISAS)
def test_zeros_keep_their_sign(isa: str) -> None:
    """Of odd functions and of x times a gate; NaN of either sign stays one."""
    x = np.array([0.0, -0.0, np.nan, -np.nan], np.float32)
    got = dict(zip(NAMES, plan_of(isa, "f32")([x, x]), strict=True))
    for name in ("erf", "gelu_none", "gelu_tanh", "tanh", "silu"):
        assert np.signbit(got[name][:2]).tolist() == [False, True], name
        assert np.isnan(got[name]).tolist() == [False, False, True, True], name


@pytest.mark.parametrize("isa", ISAS)
def test_roots_are_rounded_as_ieee_754_wants_it(isa: str) -> None:
    """Every mantissa of two exponents; then 0, subnormal, tiny and huge numbers, alone and among others."""
    mantissas = np.arange(0x3F800000, 0x40800000, dtype=np.uint32).view(np.float32)
    some = np.array([0.0, -0.0, 1e-45, 1e-39, 2e-38, 7.8e-31, 7.9e-31, 3.4e38, np.inf], np.float32)
    spread = np.full(64 * len(some), 2.0, np.float32)
    spread[:: 64 - 1][: len(some)] = some
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOPLAN_ISA", isa)
        t = tensor_type("f32", "n")
        run = build_graph_executable(build_graph("roots", lambda x: [REGISTRY["sqrt"](x)], {"x": t}))
    for x in (mantissas, some, spread):
        assert run([x])[0].tobytes() == np.sqrt(x).tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize("case", range(len(UNARY)), ids=NAMES[: len(UNARY)])
def test_every_float(case: int) -> None:
    """All 2^32 of them."""
    name, attrs = UNARY[case]
    t = tensor_type("f32", "n")
    run = build_graph_executable(build_graph("every", lambda x: [REGISTRY[name](x, **attrs)], {"x": t}))
    step = 1 << 20
    for first in range(0, 1 << 32, step):
        x = np.arange(first, first + step, dtype=np.uint64).astype(np.uint32).view(np.float32)
        check(case, [x], run([x])[0], 2.0)
