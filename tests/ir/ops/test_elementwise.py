"""Pointwise ops against Python's math, element by element."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from monoplan.ir.ops.elementwise import GELU_KINDS
from monoplan.ir.types import FLOATS, INTEGERS, DType, as_dtype, bf16, f32, tensor_type
from tests.ir.support import infer, refuses, run
from tests.tolerances import check

INF, NAN = math.inf, math.nan
SAMPLES = [-3.5, -1.0, -0.25, 0.0, 0.1, 0.5, 1.0, 2.75, 6.0]


def logistic(x: float) -> float:
    return 0.5 * (1 + math.tanh(x / 2))


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


UNARY: dict[str, Callable[[float], float]] = {
    "neg": operator.neg,
    "abs": math.fabs,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "expm1": lambda x: 2 * math.sinh(x / 2) * math.exp(x / 2),
    "log": lambda x: math.log2(x) * math.log(2),
    "sqrt": lambda x: x**0.5,
    "rsqrt": lambda x: x**-0.5,
    "log2": lambda x: math.log(x) / math.log(2),
    "log10": lambda x: math.log(x) / math.log(10),
    "log1p": lambda x: 2 * math.atanh(x / (2 + x)),
    "cbrt": lambda x: math.copysign(math.pow(math.fabs(x), 1 / 3), x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": lambda x: math.sin(x) / math.cos(x),
    "asin": lambda x: math.atan2(x, math.sqrt(1 - x * x)),
    "acos": lambda x: math.atan2(math.sqrt(1 - x * x), x),
    "atan": lambda x: math.atan2(x, 1.0),
    "sinh": lambda x: (math.exp(x) - math.exp(-x)) / 2,
    "cosh": lambda x: (math.exp(x) + math.exp(-x)) / 2,
    "tanh": lambda x: (math.exp(2 * x) - 1) / (math.exp(2 * x) + 1),
    "asinh": lambda x: math.copysign(math.log(math.fabs(x) + math.sqrt(x * x + 1)), x),
    "acosh": lambda x: math.log(x + math.sqrt(x * x - 1)),
    "atanh": lambda x: math.log((1 + x) / (1 - x)) / 2,
    "sigmoid": logistic,
    "erf": lambda x: 1 - math.erfc(x),
    "erfc": lambda x: 1 - math.erf(x),
    "softplus": lambda x: math.log1p(math.exp(x)),
    "relu": lambda x: x if x > 0 else 0.0,
    "silu": lambda x: x * logistic(x),
}
DOMAIN: dict[str, Callable[[float], bool]] = {
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt"), lambda x: x > 0),
    **dict.fromkeys(("asin", "acos"), lambda x: abs(x) <= 1),
    "atanh": lambda x: abs(x) < 1,
    "acosh": lambda x: x >= 1,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str, dtype: DType) -> None:
    x = np.array([s for s in SAMPLES if DOMAIN.get(name, math.isfinite)(s)], dtype.numpy)
    wanted = np.array([UNARY[name](float(v)) for v in x])
    check(run(name, x), wanted, dtype, "pointwise")
    exact = run(name, x, exact=True)
    check(exact, wanted, "f64", "pointwise")


BINARY: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": math.pow,
    "atan2": lambda y, x: math.asin(y / math.hypot(x, y)),
    "maximum": max,
    "minimum": min,
    "swiglu": lambda g, u: g * logistic(g) * u,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_binary_with_broadcasting(name: str, dtype: DType, rng: np.random.Generator) -> None:
    a = (np.abs(rng.standard_normal((3, 1, 2))) + 0.2).astype(dtype.numpy)
    b = rng.uniform(0.5, 2.0, (4, 2)).astype(dtype.numpy)
    wanted = np.empty((3, 4, 2))
    for i, j, k in np.ndindex(3, 4, 2):
        wanted[i, j, k] = BINARY[name](float(a[i, 0, k]), float(b[j, k]))
    check(run(name, a, b), wanted, dtype, "pointwise")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(dtype: DType) -> None:
    top, low = np.iinfo(dtype.numpy).max, np.iinfo(dtype.numpy).min
    x = np.array([0, 1, 5, top], dtype.numpy)
    span = int(top) - int(low) + 1

    def wrap(v: int) -> int:
        return (v - int(low)) % span + int(low)

    for name, python in (("add", operator.add), ("sub", operator.sub), ("mul", operator.mul)):
        assert run(name, x, x[::-1]).tolist() == [wrap(python(int(a), int(b))) for a, b in zip(x, x[::-1], strict=True)]
    assert run("neg", x).tolist() == [wrap(-int(v)) for v in x]
    assert run("relu", x).tolist() == x.tolist() and run("abs", x).tolist() == x.tolist()
    assert run("maximum", x, np.array(2, dtype.numpy)).tolist() == [2, 2, 5, top]


def test_special_values() -> None:
    edge = np.array([-INF, INF, NAN], np.float32)
    expected = {
        "exp": [0, INF, NAN],
        "sigmoid": [0, 1, NAN],
        "tanh": [-1, 1, NAN],
        "relu": [0, INF, NAN],
        "silu": [0, INF, NAN],
        "erf": [-1, 1, NAN],
        "abs": [INF, INF, NAN],
        "sqrt": [NAN, INF, NAN],
        "rsqrt": [NAN, 0, NAN],
    }
    for name, wanted in expected.items():
        np.testing.assert_array_equal(run(name, edge), np.array(wanted, np.float32), err_msg=name)
    assert run("log", np.array([0.0, -1.0], np.float32)).tolist()[0] == -INF
    assert math.isnan(run("maximum", edge[2:], np.float32(1))[0])
    assert math.isnan(run("minimum", np.float32(1), edge[2:])[0])
    assert run("div", np.float32(1), np.float32(0)) == INF
    # Far out, silu is 0 on the left and x on the right, without overflow.
    assert run("silu", np.array([-1000.0, 1000.0], np.float32)).tolist() == [0, 1000]


@pytest.mark.parametrize("kind", GELU_KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gelu(kind: str, dtype: DType) -> None:
    def one(x: float) -> float:
        if kind == "none":
            return x * normal_cdf(x)
        if kind == "tanh":  # 0.5 (1 + tanh y) is logistic(2 y)
            return x * logistic(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return x * logistic(1.702 * x if kind == "fast" else 2 * 1.702 * x)

    x = np.array(SAMPLES, dtype.numpy)
    check(run("gelu", x, approximate=kind), np.array([one(float(v)) for v in x]), dtype, "pointwise")


def test_gelu_refuses_other_kinds() -> None:
    refuses(
        "approximate='exact' is not one of none, tanh, fast, fast_tanh",
        "gelu",
        tensor_type("f32", 2),
        approximate="exact",
    )


COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


@pytest.mark.parametrize("name", COMPARE)
def test_comparisons(name: str) -> None:
    a, b = [1.0, 2.0, 3.0, NAN, INF], [1.0, 3.0, 2.0, NAN, INF]
    wanted = [COMPARE[name](x, y) for x, y in zip(a, b, strict=True)]
    assert run(name, np.array(a, np.float32), np.array(b, np.float64)).tolist() == wanted
    assert run(name, np.array([True, False]), np.array([True, True])).tolist() == [
        COMPARE[name](True, True),
        COMPARE[name](False, True),
    ]


def test_logic_and_where() -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    assert run("logical_and", a, b).tolist() == [True, False, False, False]
    assert run("logical_or", a, b).tolist() == [True, True, True, False]
    assert run("logical_not", a).tolist() == [False, False, True, True]
    x, y = np.array([[1.0], [2.0]], np.float16), np.array([10.0, 20.0], np.float32)
    got = run("where", np.array([True, False]), x, y)
    assert got.dtype == np.float32 and got.tolist() == [[1, 20], [2, 20]]
    # The side that is not chosen may be anything.
    assert run("where", np.array([True]), np.float32(1), np.float32(NAN)).tolist() == [1]


def test_cast() -> None:
    x = np.array([-1.75, 0.0, 2.5, 300.0], np.float32)
    assert run("cast", x, dtype=as_dtype("i32")).tolist() == [-1, 0, 2, 300]
    assert run("cast", x, dtype=as_dtype("bool")).tolist() == [True, False, True, True]
    assert run("cast", np.array([True, False]), dtype=f32).tolist() == [1, 0]
    # To bf16: 1 + 2**-8 lies halfway and goes to the even neighbour, 1 + 3 * 2**-8 goes up.
    halfway = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32)
    assert run("cast", halfway, dtype=bf16).astype(np.float64).tolist() == [1.0, 1 + 2.0**-6]


def test_types_and_refusals() -> None:
    assert infer("add", tensor_type("i8", "n", 1), tensor_type("f16", 3)) == tensor_type("f16", "n", 3)
    assert infer("lt", tensor_type("i8", "n"), tensor_type("f16")) == tensor_type("bool", "n")
    refuses("exp needs floating point operands, got i32", "exp", tensor_type("i32", 2))
    refuses("add needs numbers", "add", tensor_type("bool", 2), tensor_type("bool", 2))
    refuses("n meets 3 at dimension -1|3 meets n", "mul", tensor_type("f32", "n"), tensor_type("f32", 3))
    refuses("logical_and needs bool", "logical_and", tensor_type("bool", 2), tensor_type("i8", 2))
    refuses("the condition must be bool", "where", tensor_type("i8"), tensor_type("f32"), tensor_type("f32"))


@pytest.mark.parametrize("name", ["exp", "erf", "gelu", "silu", "relu"])
def test_no_elements_and_no_dimensions(name: str) -> None:
    assert run(name, np.zeros((0, 3), np.float32)).shape == (0, 3)
    got: Any = run(name, np.float32(0.0))
    assert got.shape == () and got == (1 if name == "exp" else 0)
