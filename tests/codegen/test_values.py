"""Values that are easy to get wrong: NaN and infinities, subnormals, every half float, integers that wrap."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.source import headers
from monoplan.driver import build_graph_executable
from monoplan.ir.builder import build_graph
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.graph import Graph, Value
from monoplan.ir.interpreter import interpret
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import DTYPES, TensorType, tensor_type
from monoplan.runtime.build.compilers import find_compiler
from tests.tolerances import check

UNARY = (
    "neg", "abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "tanh", "asinh", "acosh", "atanh", "cbrt", "sigmoid", "erf", "erfc", "relu", "silu",
    "softplus",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "pow", "atan2", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")


def op(name: str, *operands: Any, **attrs: Any) -> Any:
    return REGISTRY[name](*operands, **attrs)


def compare(graph: Graph, inputs: list[Any], kind: str = "pointwise", scale: float = 1.0) -> None:
    """Compiled equals exact, output by output; a failure names the op."""
    got, want = build_graph_executable(graph)(inputs), interpret(graph, inputs, exact=True)
    for v, a, b in zip(graph.outputs, got, want, strict=True):
        try:
            check(a, b, v.type.dtype, kind, scale)
        except AssertionError as error:
            raise AssertionError(f"{v}: {error}") from None


def special(dtype: str) -> Any:
    """NaN, infinities, both zeros, the largest and the smallest numbers, and a few plain ones."""
    d = DTYPES[dtype].numpy
    limits = {"f16": (65504.0, 2**-24), "bf16": (3.3895314e38, 2.0**-133), "f32": (3.4028235e38, 1e-45)}
    largest, smallest = limits.get(dtype, (1.797e308, 5e-324))
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0, smallest, -smallest, largest, -largest, 1.0, -1.0, 0.3, -2.5, 11.0]
    return np.array(values).astype(d)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_special_values(dtype: str) -> None:
    x = special(dtype)
    n = len(x)
    kinds = ("none", "tanh", "fast", "fast_tanh")

    def forward(x: Value, y: Value) -> list[Value]:
        found = [op(name, x) for name in UNARY] + [op("gelu", x, approximate=k) for k in kinds]
        row, column = op("reshape", y, shape=(1, n)), op("reshape", y, shape=(n, 1))
        found += [op(name, column, row) for name in BINARY]
        found += [op("where", op("gt", x, y), x, y), op("cast", x, dtype=DTYPES["bool"])]
        found += [op("cast", x, dtype=DTYPES[d]) for d in ("f64", "f32", "f16", "bf16")]
        return found

    t = TensorType(DTYPES[dtype], (n,))
    compare(build_graph("special", forward, {"x": t, "y": t}), [x, x])


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_special_values_in_rows(dtype: str) -> None:
    """Reductions, softmax and sorting of rows that hold NaN, infinities, or nothing else."""
    nan, inf = np.nan, np.inf
    rows = [
        [1, 2, 3, 2],
        [nan, 1, 2, nan],
        [-inf, -inf, 1, 0],
        [-inf] * 4,
        [3, 2, 1, 0],
        [1, inf, 2, inf],
        [1, nan, inf, -inf],
        [-0.0, 0.0, -0.0, 0.0],
        [nan] * 4,
    ]
    x = np.array(rows).astype(DTYPES[dtype].numpy)

    def forward(x: Value) -> list[Value]:
        found = [op(name, x, axes=axes) for name in ("sum", "mean", "max", "min") for axes in ((1,), (0,), None)]
        found += [op("argmax", x, axis=a) for a in (0, 1, None)] + [op("softmax", x)]
        for start in (1, 2):  # a row sees NaN, or only -inf
            found.append(op("causal_softmax", op("slice", x, axis=0, start=start, length=3)))
        found += [*op("sort", x), *op("sort", x, descending=True), *op("topk", x, k=2), op("cumsum", x)]
        found += [op("rms_norm", x), op("layer_norm", x)]
        return found

    compare(build_graph("rows", forward, {"x": TensorType(DTYPES[dtype], x.shape)}), [x], "reduce")


@np.errstate(all="ignore")
def test_every_half_float() -> None:
    """Loads and stores of f16 and bf16 are numpy's, for every pattern and for f32 in between them."""
    patterns = np.arange(65536, dtype=np.uint16)
    halves = {d: patterns.view(DTYPES[d].numpy) for d in ("f16", "bf16")}
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = np.concatenate([h.astype(np.float32) for h in halves.values()])
    ties = (edges[:-1] / 2 + edges[1:] / 2).astype(np.float32)
    wide = np.concatenate([wide, edges, ties])

    def forward(f16: Value, bf16: Value, f32: Value) -> list[Value]:
        widened = [op("cast", v, dtype=DTYPES["f32"]) for v in (f16, bf16)]
        return [*widened, *(op("cast", f32, dtype=DTYPES[d]) for d in ("f16", "bf16"))]

    types = {"f16": tensor_type("f16", 65536), "bf16": tensor_type("bf16", 65536), "f32": tensor_type("f32", len(wide))}
    got = build_graph_executable(build_graph("halves", forward, types))([*halves.values(), wide])
    want = [h.astype(np.float32) for h in halves.values()] + [wide.astype(h.dtype) for h in halves.values()]
    for a, b in zip(got, want, strict=True):
        both_nan = np.isnan(a) & np.isnan(b)
        bits = np.uint32 if a.dtype == np.float32 else np.uint16
        np.testing.assert_array_equal(a.view(bits)[~both_nan], b.view(bits)[~both_nan])


@np.errstate(all="ignore")
def test_half_floats_without_compiler_support(tmp_path: Path) -> None:
    """The f16 conversions for compilers that have no _Float16."""
    for name, text in headers("cpu"):
        (tmp_path / name).write_text(text)
    source = (
        '#include "mp_math.h"\n'
        "void load(const uint16_t *x, float *y, int n) { for (int i = 0; i < n; ++i) y[i] = mp_load_f16(x[i]); }\n"
        "void store(const float *x, uint16_t *y, int n) { for (int i = 0; i < n; ++i) y[i] = mp_to_f16(x[i]); }\n"
    )
    (tmp_path / "half.c").write_text(source)
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-U__FLT16_MANT_DIG__", "-fPIC", "-shared", "half.c"]
    subprocess.run([*find_compiler().command, *flags, "-o", "half.so"], cwd=tmp_path, check=True)
    ffi = FFI()
    ffi.cdef("void load(const uint16_t *, float *, int); void store(const float *, uint16_t *, int);")
    library = ffi.dlopen(str(tmp_path / "half.so"))
    halves = np.arange(65536, dtype=np.uint16)
    wide = np.empty(65536, np.float32)
    library.load(ffi.from_buffer("uint16_t[]", halves), ffi.from_buffer("float[]", wide, require_writable=True), 65536)
    want = halves.view(np.float16).astype(np.float32)
    same = (wide.view(np.uint32) == want.view(np.uint32)) | (np.isnan(wide) & np.isnan(want))
    assert same.all(), halves[~same][:10]
    rng = np.random.default_rng(1)
    exponents = rng.uniform(-30, 18, 100_000)
    some = (np.sign(rng.standard_normal(100_000)) * 2.0**exponents).astype(np.float32)
    some = np.concatenate([some, want, (want[:-1] / 2 + want[1:] / 2).astype(np.float32)])
    got = np.empty(len(some), np.uint16)
    into = ffi.from_buffer("uint16_t[]", got, require_writable=True)
    library.store(ffi.from_buffer("float[]", some), into, len(some))
    expected = some.astype(np.float16)
    same = (got == expected.view(np.uint16)) | (np.isnan(got.view(np.float16)) & np.isnan(expected))
    assert same.all(), some[~same][:10]


def test_integers_wrap_as_numpy_says() -> None:
    """Chains of narrow integers wrap at each op; comparisons see the wrapped value; unsigned stays unsigned."""
    names = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
    types = {n: tensor_type(n, 40) for n in names}
    rng = np.random.default_rng(2)
    inputs = []
    for n in names:
        info = np.iinfo(DTYPES[n].numpy)
        edge = [info.min, info.max, 0, 1, info.max // 2, info.min // 2]
        inputs.append(np.concatenate([np.array(edge, info.dtype), rng.integers(info.min, info.max, 34, info.dtype)]))

    def forward(**values: Value) -> list[Value]:
        found = []
        for v in values.values():
            d = v.type.dtype
            total = "lt(add(x0, x0), sub(x0, 100))"
            found += [op("pointwise", v, expr=e) for e in (total, "gt(mul(x0, x0), neg(x0))", "eq(abs(x0), x0)")]
            found += [op("neg", v), op("abs", v), op("relu", v), op("maximum", op("add", v, v), v)]
            found += [op("cast", v, dtype=DTYPES[n]) for n in (*names, "bool", "f32", "f64")]
            found += [op("sum", v), op("cumsum", v), op("max", v), op("argmax", v)]
            square = op("reshape", op("slice", v, axis=0, start=0, length=36), shape=(6, 6))
            found.append(op("matmul", square, square))
            constant = op("full", value=int(np.iinfo(d.numpy).max), dtype=d)
            found += [op("add", v, constant), op("mul", constant, constant), op("lt", v, constant)]
        return found

    graph = build_graph("wrap", forward, types)
    with np.errstate(all="ignore"):
        compare(graph, inputs)


def test_constants_of_any_sign_and_size() -> None:
    """Literals stay literals: negative ones after a minus sign, ones too large for f32, exact 64-bit ones."""
    values = [
        ("f32", -1.5),
        ("f64", 1e300),
        ("f32", -1e39),
        ("i64", -(2**63)),
        ("u64", 2**64 - 1),
        ("i32", -(2**31)),
        ("bf16", 0.1),
        ("f16", -0.1),
        ("u32", 2**32 - 1),
        ("bool", True),
        ("f32", 5e-324),
    ]

    def forward(x: Value) -> list[Value]:
        found = [x]
        for name, value in values:
            c = op("full", value=value, dtype=DTYPES[name])
            found += [c, op("expand", c, shape=(2, 3))]
            if name != "bool":
                found += [op("neg", c), op("sub", c, op("neg", c)), op("abs", op("neg", op("neg", c)))]
                found.append(op("add", c, x))
        found += [op("pointwise", x, expr=e) for e in ("neg(neg(-2.5))", "sub(x0, -3)", "pow(x0, -2)")[1:]]
        return found

    compare(build_graph("literals", forward, {"x": tensor_type("f32", 3)}), [np.array([1, 2, 3], np.float32)])


@pytest.mark.parametrize("columns", [7, 4097])
def test_layer_norm_of_a_large_mean(columns: int) -> None:
    """Deviations of 1 around 10,000: rounding in the mean alone would move them by a thousandth."""
    x = (np.random.default_rng(0).normal(size=(3, columns)) + 1e4).astype(np.float32)
    text = f"graph g(%x: f32[n, {columns}]) {{\n  %y = layer_norm(%x, _, _) {{eps=1e-5, dims=1}} : f32[n, {columns}]\n"
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    (got,) = build_graph_executable(parse_graph(text + "  return %y\n}"))([x])
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_unsigned_beside_signed() -> None:
    """Both are i64 then, in the reference too; numpy would go to floats."""
    a, b = np.array([2**64 - 1, 5], np.uint64), np.array([-1, 2**62 + 1], np.int64)
    lines = ("%s = add(%a, %b) : i64[2]", "%e = eq(%a, %b) : bool[2]", "return %s, %e")
    text = "\n".join(["graph g(%a: u64[2], %b: i64[2]) {", *lines, "}"])
    for run in (build_graph_executable(parse_graph(text)), lambda inputs: interpret(parse_graph(text), inputs)):
        total, same = run([a, b])
        np.testing.assert_array_equal(total, [-2, 2**62 + 6])
        np.testing.assert_array_equal(same, [True, False])


@pytest.mark.parametrize("value", [300, -129, float("nan"), float("inf")])
def test_a_constant_that_its_type_does_not_have(value: float) -> None:
    with pytest.raises(TypeRuleError, match="is no i8, which goes from -128 to 127"):
        REGISTRY["full"].infer([], {"shape": (2,), "value": value, "dtype": DTYPES["i8"]})


@pytest.mark.parametrize("width", [1, 3, 256, 257, 600])
def test_largest_and_smallest(width: int) -> None:
    """Of f32 by vectors: NaN of either sign wins, the first of equals is the place, and 0 equals -0."""
    kinds = ("max", "min", "argmax", "argmin")
    graph = build_graph("ends", lambda x: [op(k, x, axes=(1,)) if k in kinds[:2] else op(k, x, axis=1) for k in kinds],
                        {"x": tensor_type("f32", "n", width)})  # fmt: skip
    rng, run = np.random.default_rng(width), build_graph_executable(graph)
    x = rng.integers(-4, 4, (40, width)).astype(np.float32) * rng.choice(np.float32([1, 1e-40, 5e37]), (40, 1))
    x[rng.random(x.shape) < 0.3] *= -1  # both zeros
    for row, value in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        x[row, rng.integers(width)] = value
        x[row + 4, :] = value
    for kind, got in zip(kinds, run([x]), strict=True):
        np.testing.assert_array_equal(got, getattr(np, kind)(x, axis=1))


@pytest.mark.parametrize("axis", [0, 1])
def test_errors_of_long_running_sums_do_not_add_up(axis: int, rng: np.random.Generator) -> None:
    """In f32 the steps of this one round the same way: the last sums would be off by a hundredth."""

    class Running(nn.Module):
        def forward(self, x: Any, factors: Any) -> Any:
            return F.cumsum(x, axis), F.cumprod(factors, axis)

    x = (rng.standard_normal(2**20, np.float32) + 1000).reshape((-1, 1) if axis == 0 else (1, -1))
    factors = 1 + x * np.float32(1e-9)
    wanted = x.astype(np.float64).cumsum(axis), factors.astype(np.float64).cumprod(axis)
    for found in (mp.compile(Running())(x, factors), Running()(mp.Tensor(x), mp.Tensor(factors))):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)
