"""Small calls of every op of the registry: operand types, attributes and value ranges, for compiled tests.

Operands are written as types: `T` stands for the element type under test; `b`, `s`, `q` and `k` are symbolic sizes.
`arg("f32[4, 8]", param=True)` is a weight of the plan; ranges keep out what the reference leaves undefined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from monoplan.ir import ops as _ops  # noqa: F401  (fills the registry)
from monoplan.ir.dims import as_dim, evaluate, symbol
from monoplan.ir.errors import MonoplanError
from monoplan.ir.opdef import REGISTRY
from monoplan.ir.types import DTYPES, DType, TensorType, as_dtype

B, S = symbol("b"), symbol("s")
SIZES = (
    {"b": 2, "s": 5, "q": 5, "k": 9}, {"b": 1, "s": 1, "q": 1, "k": 9}, {"b": 3, "s": 9, "q": 37, "k": 75},
)  # fmt: skip
TESTED = "T"  # an attribute of this value becomes the element type under test


@dataclass(frozen=True)
class Arg:
    """One operand: its type as text, the range of its values (None: by element type), how it is given."""

    text: str
    low: float | None = None
    high: float | None = None
    param: bool = False
    values: Any = None  # these values, broadcast, in place of random ones

    def type(self, tested: DType) -> TensorType:
        name, _, rest = self.text.partition("[")
        dims = [d.strip() for d in rest.rstrip("]").split(",") if d.strip()]
        return TensorType(tested if name == TESTED else as_dtype(name), tuple(as_dim(d) for d in dims))

    def array(self, tested: DType, sizes: Mapping[str, int], rng: np.random.Generator) -> Any:
        t = self.type(tested)
        shape = tuple(evaluate(d, sizes) for d in t.shape)
        if self.values is not None:
            full = np.resize(np.asarray(self.values), shape)
            return full.astype(t.dtype.numpy)
        if t.dtype.is_float:
            low = -2.0 if self.low is None else self.low
            high = max(low, 0) + 2.0 if self.high is None else self.high
            return rng.uniform(low, high, shape).astype(t.dtype.numpy)
        low = (0 if t.dtype.kind != "i" else -9) if self.low is None else int(self.low)
        high = {"b": 1}.get(t.dtype.kind, 9) if self.high is None else int(self.high)
        return rng.integers(low, high, shape, endpoint=True).astype(t.dtype.numpy)


def arg(text: str, low: float | None = None, high: float | None = None, **options: Any) -> Arg:
    return Arg(text, low, high, **options)


@dataclass(frozen=True)
class Case:
    """One call of an op. `scale` is the size of what it adds up, for the tolerance."""

    op: str
    operands: tuple[Arg | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    only: str = ""  # kinds ("f", "iu") or names ("f32 bf16") of element types; empty: all that the type rule takes

    def attributes(self, tested: DType) -> dict[str, Any]:
        return {k: tested if v is TESTED else v for k, v in self.attrs.items()}

    def types(self, tested: DType) -> list[TensorType | None]:
        return [None if a is None else a.type(tested) for a in self.operands]

    @property
    def generic(self) -> bool:
        """Whether the element type under test occurs at all."""
        texts = [a.text for a in self.operands if a is not None]
        return TESTED in self.attrs.values() or any(t.startswith(f"{TESTED}[") for t in texts)

    def accepts(self, tested: DType) -> bool:
        """Whether the op takes this element type; a case without T is run with f32 only."""
        wanted = tested.name in self.only.split() or (" " not in self.only and tested.kind in self.only)
        if (self.only and not wanted) or (not self.generic and tested.name != "f32"):
            return False
        opdef = REGISTRY[self.op]
        try:
            operands, attrs = opdef.complete_operands(self.types(tested), self.attributes(tested))
            opdef.check_operands(operands)
            opdef.infer(operands, opdef.complete_attrs(attrs))
        except MonoplanError:
            return False
        return True


CASES: list[Case] = []


def case(op: str, *operands: str | Arg | None, scale: float = 1.0, only: str = "", **attrs: Any) -> None:
    """Adds a case; text is short for an Arg of default range."""
    made = tuple(arg(a) if isinstance(a, str) else a for a in operands)
    CASES.append(Case(op, made, attrs, scale, only))


# -- pointwise ------------------------------------------------------------------------------------------------

for _name in ("add", "sub", "mul", "maximum", "minimum"):
    case(_name, "T[b, 1, 6]", "T[s, 1]", only="f")
    case(_name, "T[3, 7]", "T[7]")
    case(_name, "T[]", "T[]")
case("add", "T[s]", "i32[s]")
case("sub", "T[s, 2]", "f32[2]")
case("mul", "T[s]", "bool[s]")
case("add", arg("T[9]", 100, 127), arg("T[9]", 100, 127), only="iu")  # wraps around
case("sub", arg("T[9]", 0, 9), arg("T[9]", 100, 127), only="iu")
case("mul", arg("T[9]", 99, 127), arg("T[9]", 99, 127), only="iu")
case("div", "T[b, s]", arg("T[s]", 0.5, 3))
case("div", "T[4]", arg("i32[4]", 1, 5))
case("pow", arg("T[b, s]", 0.1, 3), "T[s]")
case("pow", "T[5]", arg("T[5]", values=[0.0, 1.0, 2.0, 3.0, -1.0]))
for _name in ("neg", "abs", "relu"):
    case(_name, "T[b, s, 3]", only="f")
    case(_name, arg("T[7]", values=[0, 1, -1, 127, -127, -128, 5]), only="i")
    case(_name, "T[7]")
for _name in ("floor", "ceil", "trunc", "round"):
    case(_name, arg("T[b, s, 9]", -9, 9), only="f")
    case(_name, arg("T[9]", values=[0.5, 1.5, 2.5, -0.5, -1.5, -0.25, 3, -0.0, 1e30]), only="f32 f64")
    case(_name, "T[7]", only="iu")
_ODD = [0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan")]
for _name in ("sign", "isnan", "isinf", "isfinite"):
    case(_name, arg("T[b, 7]", values=_ODD), only="f")
    case(_name, "T[s, 7]", only="iub")
for _name in ("floor_divide", "remainder", "fmod"):
    case(_name, arg("T[b, s, 5]", -9, 9), arg("T[5]", values=[2, -3, 0.75, 5, -1.5]), only="f")
    case(_name, arg("T[8]", values=[6, -6, 0, -5, 3, -3, float("inf"), 2]),
         arg("T[8]", values=[3, 3, 2, 0, float("inf"), float("inf"), 2, float("nan")]), only="f")  # fmt: skip
    case(_name, arg("T[b, 12]", values=[7, 7, 100, 0, 5, 1]), arg("T[12]", values=[2, 3, 7, 0, 0, 4, 127]), only="iu")
    case(_name, arg("T[b, 9]", values=[7, -7, -128, -128, 5, -6]), arg("T[9]", values=[-2, 3, -1, 0, -5]), only="i")
case("integer_pow", "T[b, 9]", arg("T[9]", values=[0, 1, 2, 3, 5, 20]), only="iu")
case("integer_pow", arg("T[7]", values=[1, -1, -1, 2, 0, -3, 1]), arg("T[7]", values=[-3, -3, -2, -1, 4, 3]), only="i")
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    case(_name, "T[b, s]", "T[s]", only="iub")
    case(_name, "T[s]", "u8[s]", only="iub")
case("bitwise_not", "T[b, s]", only="iub")
for _name in ("left_shift", "right_shift"):
    case(_name, arg("T[b, 9]", values=[1, 5, 127, 100, 2, 64]), arg("T[9]", values=[0, 1, 3, 7, 8, 64, 100]), only="iu")
    case(_name, arg("T[5]", values=[-1, -128, 100, -7, -7]), arg("T[5]", values=[1, 2, -1, -3, 100]), only="i")
for _name in ("exp", "exp2", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "erfc", "silu", "softplus", "atan"):
    case(_name, arg("T[b, s, 7]", -6, 6))
    case(_name, arg("T[]", -1, 1))
for _name in ("sinh", "cosh", "cbrt", "asinh"):
    case(_name, arg("T[b, s, 7]", -3, 3), scale=10)
for _name in ("asin", "acos", "tan", "atanh"):
    case(_name, arg("T[b, s, 7]", -1, 1))
case("acosh", arg("T[b, s, 7]", 1.05, 9))
for _name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt"):
    case(_name, arg("T[b, s, 7]", 0.05, 9))
case("softplus", arg("T[b, 5]", -3, 3), beta=2.0, threshold=4.0)
case("atan2", "T[b, s]", "T[s]")
case("swiglu", arg("T[b, s, 8]", -5, 5), "T[s, 8]")
for _name in ("none", "tanh", "fast", "fast_tanh"):
    case("gelu", arg("T[b, 17]", -5, 5), approximate=_name, scale=5)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    case(_name, arg("T[b, s]", 0, 3), arg("T[s]", 0, 3))
    case(_name, arg("T[9]", values=[0, 1, 1, 0, 2, 3]), arg("T[9]", values=[0, 1, 0, 1]))
    case(_name, arg("T[9]", 0, 5), arg("i16[9]", -3, 3))
for _name in ("logical_and", "logical_or"):
    case(_name, "bool[b, s]", "bool[s]")
case("logical_not", "bool[b, s]")
case("where", "bool[b, 1]", "T[s]", "T[]")
case("where", "bool[s]", "T[s]", "f32[1]")
case("where", "bool[s]", "T[b, s]", "i8[s]")
for _dtype in DTYPES.values():
    _low = 0 if _dtype.kind == "u" else -100
    case("cast", arg("T[b, 9]", _low, 100), dtype=_dtype, only="f")
    case("cast", arg("T[4, 3]", 0 if _low == 0 else None, 120), dtype=_dtype, only="iub")
case("cast", arg("i64[64]", -(2**62), 2**62), dtype=TESTED, only="iub")  # wraps around

# -- reductions -----------------------------------------------------------------------------------------------

for _name in ("sum", "mean", "max", "min"):
    case(_name, "T[b, s, 6]", scale=6)
    case(_name, "T[b, s, 6]", axes=(-1,), keepdims=True, scale=6)
    case(_name, "T[b, s, 6]", axes=(0, 2), scale=9)
    case(_name, "T[b, 3, 70]", axes=(1,), scale=3)  # by columns
    case(_name, "T[4, 5]", axes=())
    case(_name, "T[]")
case("sum", arg("T[300]", 100, 127), axes=None, scale=4000)
case("prod", "T[b, s, 6]", axes=(2,), scale=64)
case("prod", arg("T[b, s]", -1, 1), keepdims=True)
case("prod", "T[4, 5]", axes=(), scale=2)
for _name in ("any", "all"):
    case(_name, arg("T[b, s, 6]", values=[0, 1, 0, 0, 0, 1, 1]), axes=(1, 2))
    case(_name, arg("T[b, 4, s]", values=[0, 0, 0, 0, 1, 1, 1, 1, 1]), axes=(-1,), keepdims=True)
    case(_name, arg("T[7]", values=_ODD), only="f")
for _name in ("argmax", "argmin"):
    for _axis in (None, 0, 1, -1):
        case(_name, "T[b, s, 6]", axis=_axis)
    case(_name, arg("T[4, 40]", 0, 3), axis=1, keepdims=True)  # ties of integers go to the lowest
    case(_name, "T[1]")
    case(_name, "T[2, 3]", keepdims=True)
case("softmax", arg("T[b, 4, s]", -5, 5))
case("softmax", arg("T[b, s, 5]", -5, 5), axis=1)
case("softmax", "T[6]", axis=0)
case("causal_softmax", "T[b, s, 12]")
case("causal_softmax", "T[5, 3]")  # the first rows see nothing
case("cumsum", "T[b, s, 5]", scale=5)
case("cumsum", "T[b, s, 5]", axis=1, scale=9)
case("cumsum", arg("T[30]", 50, 100), axis=0, only="iu")
for _name in ("cumprod", "cummax", "cummin"):
    case(_name, "T[b, s, 5]", scale=32)
    case(_name, arg("T[b, s, 5]", -1.1, 1.1), axis=1, scale=4)
    case(_name, arg("T[70]", 1, 2), axis=0, only="iu")
    case(_name, arg("T[14]", values=[*_ODD[:4], 3, -3, *_ODD[4:]]), only="f")
case("sort", "T[b, s, 6]", axis=1)
case("sort", arg("T[3, 33]", 0, 4), descending=True)
case("sort", "T[1]")
case("topk", "T[b, s, 9]", k=4)
case("topk", arg("T[7, 2]", 0, 2), k=7, axis=0)
case("topk", arg("T[b, 9]", 0, 4), k=3, largest=False)

# -- shapes ---------------------------------------------------------------------------------------------------

case("reshape", "T[b, s, 6]", shape=(B, 2, 3, S))
case("reshape", "T[]", shape=(1, 1))
case("transpose", "T[b, s, 6]", axes=(2, 0, 1))
case("transpose", "T[]", axes=())
case("slice", "T[b, s, 6]", axis=1, start=S - 1, length=1)
case("slice", "T[b, 9]", axis=-1, start=1, length=3, step=3)
case("slice", "T[b, 9]", axis=1, start=4, length=0)
case("slice", "T[b, s, 3]", axis=1, start=S - 1, length=S, step=-1)
case("slice", "T[9, b]", axis=0, start=7, length=3, step=-3)
case("slice", "T[9]", axis=0, start=3, length=0, step=-1)
case("pad", "T[b, s, 3]", before=(0, 2, 1), after=(0, S, 0), value=1)
case("pad", "T[4]", before=(0,), after=(3,))
case("pad", "T[2, b]", before=(1, 1), after=(1, 1), value=-float("inf"), only="f")
case("expand", "T[1, s, 1]", shape=(B, 2, S, 3))
case("expand", "T[]", shape=(3,))
case("concat", "T[b, s]", "T[b, 2]", "T[b, s]", axis=1)
case("concat", "T[2]", "f32[1]")
case("concat", "T[b, 3]")
case("split", "T[b, s, 6]", sizes=(1, 3, 2))
case("split", "T[s, 4]", sizes=(S - 1, 1), axis=0)
case("repeat", "T[b, s, 3]", repeats=3, axis=1)
case("repeat", "T[4]", repeats=1, axis=0)
case("arange", length=S, dtype=TESTED)
case("arange", length=4, start=B, dtype=TESTED)
case("arange", length=300, start=100, dtype=TESTED)
case("full", shape=(B, 3), value=1, dtype=TESTED)
case("full", value=0.1, dtype=TESTED)
case("full", shape=(2,), value=-float("inf"), dtype=TESTED, only="f")
case("full", shape=(2,), value=1e39, dtype=TESTED, only="f")

# -- lookups --------------------------------------------------------------------------------------------------

case("route", "f32[b, 9]", k=3)
case("route", "f32[b, 12]", "f32[12]", k=4, score="sigmoid", normalize=False, groups=4, kept_groups=2, scale=2.5)
case("route", "f32[b, 8]", k=2, normalize=False, groups=2, kept_groups=1)
case("route", "f32[b, 9]", k=3, gates=2)
IN_PANELS = arg("T[3, 64, 33]", param=True)
case("expert_linear", "T[b, 37]", arg("T[4, 19, 37]", param=True), arg("i64[b, 3]", 0, 3))
case("expert_linear", "T[b, 2, 9]", "T[5, 8, 9]", arg("i32[b, 2]", 0, 4), arg("T[5, 8, 9]", param=True), gate="silu")
case("expert_linear", "T[b, 9]", "T[5, 8, 9]", arg("i32[b, 2]", 0, 4), None, "T[5, 8]")
case(
    "expert_linear",
    "T[b, 9]",
    "T[5, 8, 9]",
    arg("i32[b, 2]", 0, 4),
    "T[5, 8, 9]",
    "T[5, 8]",
    "T[5, 8]",
    gate="mul(mul(minimum(x0, 1.5), sigmoid(mul(minimum(x0, 1.5), 1.7))), add(x1, 1.0))",
)
case("expert_linear", "T[b, 33]", IN_PANELS, arg("i64[b, 2]", 0, 2), IN_PANELS, gate="silu", scale=33)
EXPERT_IDS, GAMMA = arg("i64[b, 2]", 0, 2), arg("T[33]", param=True)
case("fused_experts", "T[b, 33]", IN_PANELS, EXPERT_IDS, IN_PANELS, None, None, GAMMA, gate="silu", eps=1e-5, scale=33)
case("fused_experts", "T[b, 9]", "T[5, 8, 9]", arg("i32[b, 2]", 0, 4), None, None, None, None, eps=1e-3, scale=9)
case("embedding", arg("i64[b, s]", 0, 10), arg("T[11, 6]", param=True))
case("embedding", arg("u8[s]", 0, 10), "T[11, 6]")
case("embedding", arg("i16[]", 0, 3), "T[4, 2]")
case("gather", "T[b, 7, 3]", arg("i32[s, 2]", 0, 6), axis=1)
case("gather", "T[5]", arg("u64[]", 0, 4))
case("take_along", "T[b, 7]", arg("i64[b, s]", 0, 6), axis=1)
case("take_along", "T[5, b]", arg("i8[3, b]", 0, 4), axis=0)
case("scatter", "T[b, 7]", arg("i64[b, s]", 0, 6), "T[b, s]", axis=1)
for _name in ("add", "mul", "max", "min"):
    case("scatter", "T[b, 7]", arg("i64[b, s]", 0, 6), "T[b, s]", axis=-1, reduce=_name, scale=16)
case("scatter", "T[9, 4, b]", arg("i32[12, 3, b]", 0, 8), "T[12, 3, b]", reduce="add", scale=12)
case("scatter", "T[5]", arg("u8[20]", 0, 4), "T[20]", reduce="add", scale=20)
case("select_rows", "T[b, 7, 2]", arg("i32[b]", 0, 6))
case("select_rows", "T[b, 3]", arg("i64[b]", 0, 2))

# -- products -------------------------------------------------------------------------------------------------

case("linear", "T[b, s, 24]", arg("T[40, 24]", param=True), scale=24)
case("linear", "T[s, 24]", arg("T[33, 24]", param=True), arg("T[33]", param=True), scale=24)
case("linear", "T[24]", arg("T[5, 24]", param=True), scale=24)
case("linear", "T[b, 7]", "T[5, 7]", "T[5]", scale=7)  # a weight that is computed
case("linear", "f32[s, 16]", arg("T[9, 16]", param=True), scale=16, only="f")
case("linear", "T[s, 16]", arg("f32[9, 16]", param=True), scale=16)
case("matmul", "T[b, 1, s, 6]", "T[4, 6, 5]", scale=6)
case("matmul", "T[3, 70]", "T[70, 80]", scale=70, only="f")
case("matmul", "T[s, 8]", "f32[8, 3]", scale=8)
case("rms_norm", "T[b, s, 33]", arg("T[33]", param=True), scale=2)
case("rms_norm", "T[b, 4, 3]", eps=1e-3, dims=2, scale=2)
case("layer_norm", "T[b, s, 33]", arg("T[33]", param=True), "T[33]", scale=4)
case("layer_norm", "T[b, 4, 3]", None, None, dims=2, scale=4)
case("layer_norm", "T[5]", "f32[5]", scale=4)

# -- windows --------------------------------------------------------------------------------------------------

_WIN: dict[str, Any] = {"stride": (2, 1), "padding": (1, 2, 0, 1), "dilation": (1, 2)}
case(
    "conv2d", "T[b, 3, s, 60]", arg("T[40, 3, 3, 3]", param=True), arg("T[40]", param=True), padding=(1,) * 4, scale=99
)
case("conv2d", "T[b, 4, s+2, s+4]", arg("T[12, 2, 3, 2]", param=True), groups=2, **_WIN, scale=40)
case("conv2d", "T[b, 70, s, 3]", arg("T[5, 70, 1, 1]", param=True), scale=200)
case("conv2d", "T[b, 200, s+1, 4]", arg("T[36, 200, 2, 2]", param=True), scale=2000, only="f32 bf16")  # strips of k
case("conv2d", "T[b, 2, s+6, 9]", arg("T[33, 2, 1, 2]", param=True), stride=(3, 2), scale=9)
case("conv2d", "T[b, 6, s+3, 7]", arg("T[6, 1, 3, 3]", param=True), arg("T[6]", param=True), groups=6, scale=20)
case("conv2d", "T[b, 4, s+2, 6]", "T[6, 2, 3, 2]", "T[6]", groups=2, **_WIN, scale=24)  # a weight that is computed
case("conv2d", "f32[1, 4, 1, s+2]", arg("T[8, 4, 1, 3]", param=True), scale=24, only="f")
for _kind in ("max", "avg"):
    case("pool2d", "T[b, 2, s+1, 70]", kind=_kind, kernel=(3, 2), stride=(2, 1), padding=(1, 1, 1, 1), scale=2)
    case("pool2d", "T[s+2, 7]", kind=_kind, kernel=(2, 3), stride=(2, 3), padding=(0, 1, 1, 2), include_pad=False)
    case("adaptive_pool2d", "T[b, 3, s, 7]", kind=_kind, size=(3, 5))
case("pool2d", "T[b, s+4, 9]", kind="max", kernel=(2, 3), stride=(1, 2), dilation=(3, 2), padding=(1, 1, 2, 2))
case("pool2d", "T[b, s+1, 6]", kind="avg", kernel=(2, 2), stride=(1, 2), divisor=-3)

# -- attention ------------------------------------------------------------------------------------------------

_TABLE = arg("f32[16, 4]", -1, 1, param=True)
_POSITIONS = arg("i64[b, s]", 0, 15)
for _algo in ("gpt_neox", "gpt_j"):
    case("rope", "T[b, s, 3, 8]", _POSITIONS, _TABLE, _TABLE, algo=_algo)
    case("rope", "T[s, 3, 12]", arg("u8[s]", 0, 15), _TABLE, arg("f32[16, 4]"), algo=_algo)  # a part rotates
case("rope", "T[b, s, 2, 6]", arg("i32[s]", 0, 15), arg("T[16, 3]", -1, 1), arg("T[16, 3]", -1, 1))
_KV = ("T[b, 2, k, 8]", "T[b, 2, k, 6]")
case("attention", "T[b, 4, q, 8]", *_KV, only="f32 bf16")
case("attention", "T[b, 4, q, 8]", *_KV, causal=True, scale=0.3)
case("attention", "T[b, q, 4, 8]", *_KV, causal=True, softcap=5.0, layout="bshd", only="f32 f64")
case("attention", "T[b, 4, q, 8]", *_KV, "bool[b, 1, q, k]", only="f32 f64")
case("attention", "T[b, 4, q, 8]", *_KV, arg("f32[q, k]", -3, 3), window=4, only="f32 bf16")
case("attention", "T[b, 4, q, 8]", *_KV, arg("f32[q, 1]", values=[-3.4028235e38, 0, -1e38]), only="f32 bf16")  # means
case("attention", "T[b, 4, q, 8]", *_KV, None, arg("i32[b]", values=[0, 3, 8]), causal=True, window=3)
case("attention", "T[b, 4, q, 8]", *_KV, None, arg("i32[b]", values=[0, 3, 8]), None, arg("T[4]", -3, 3), causal=True)
case("attention", "T[4, q, 8]", "T[4, k, 8]", "T[4, k, 8]", causal=True, only="f32 f16")
case("attention", "T[1, 1, 5, 4]", "T[1, 1, 3, 4]", "T[1, 1, 3, 4]", causal=True)  # rows that see nothing
_ROWS, _LENGTHS = "T[b, s, 2, 4]", arg("i64[b]", values=[1, 4, 0])
case("kv_update", "T[b, 2, 13, 4]", _ROWS, _LENGTHS)
case("kv_update", "f32[b, 2, 13, 4]", _ROWS, _LENGTHS, arg("i32[b]", values=[1, 0, 1]))
_PAGES, _PAGE_TABLE = "T[12, 2, 4, 4]", arg("i32[b, 4]", values=[8, 1, 3, 11, 5, 2, 7, 9, 6, 4, 0, 10])
case("kv_update", _PAGES, _ROWS, _LENGTHS, None, _PAGE_TABLE)
case("kv_update", "f32[12, 2, 4, 4]", _ROWS, _LENGTHS, arg("i32[b]", values=[1, 0, 1]), _PAGE_TABLE)

# -- sampling -------------------------------------------------------------------------------------------------

_U = arg("f32[b]", values=[0.3, 0.8, 0.55])
_SAMPLE = ("T[b, 30]", _U)
case("random_sample", *_SAMPLE, arg("f32[]", values=1.0), arg("i32[]", values=0), arg("f32[]", values=0.7))
case("random_sample", *_SAMPLE, arg("f32[b]", values=0.9), arg("i64[b]", values=8), arg("f32[]", values=1.3))
case("random_sample", *_SAMPLE, arg("f32[]", values=0.5), arg("i32[]", values=0), arg("f32[]", values=1.0))
case(
    "random_sample",
    *_SAMPLE,
    arg("f32[]", values=1.0),
    arg("i32[]", values=0),
    arg("f32[b]", values=1.5),
    arg("f32[]", values=0.2),
)
case("random_sample", "T[s, b, 30]", _U, arg("f32[]", values=0.9), arg("i32[]", values=5), arg("f32[]", values=0.0))
case(
    "random_sample",
    "T[30]",
    arg("f32[]", values=0.6),
    arg("f32[]", values=0.9),
    arg("i32[]", values=0),
    arg("f32[]", values=1.0),
)
case(
    "repetition_penalty",
    "T[b, 12]",
    arg("i64[b, s]", -1, 13),
    arg("i32[b]", values=[1, 1, 0]),
    arg("f32[b]", values=[1.3, 0.8, 2.0]),
)

# -- one rank -------------------------------------------------------------------------------------------------

case("all_reduce", "T[b, 3]")
case("all_gather", "T[b, 3]", axis=0)
case("fused_all_reduce", "T[b, 3]", "T[3]", world=1, expr="add(x0, x1)")

# -- fused ----------------------------------------------------------------------------------------------------

case("pointwise", "T[b, s]", "T[s]", "T[]", expr="add(mul(x0, 2), maximum(x1, x2))")
case("pointwise", arg("T[9]", 100, 120), arg("T[9]", 100, 120), expr="gt(add(x0, x1), mul(x0, 3))", only="iu")
case("pointwise", "T[b, s]", "T[s]", expr="silu(sub(mul(x0, -0.5), neg(x1)))")
case("pointwise", "T[5]", "bool[5]", "i32[5]", expr="where(x1, cast(x2, dtype=f32), add(x0, 1))")
case("pointwise", "T[5]", "f32[5]", expr="add(cast(x1, dtype=bf16), x0)", only="f")
_X, _W = "T[b, s, 24]", arg("T[40, 24]", param=True)
_G, _HALF = arg("T[24]", param=True), arg("T[20]", param=True)
case("fused_linear", _X, _W, arg("T[40]", param=True), _G, norm="rms", eps=1e-5, expr="silu(x0)", scale=24)
case("fused_linear", _X, _W, None, _G, _G, "T[b, s, 40]", norm="layer", eps=1e-5, expr="add(x0, x1)", scale=48)
case("fused_linear", _X, _W, None, None, None, gated=True, expr="swiglu(x0, x1)", scale=96)
case(
    "fused_linear",
    _X,
    _W,
    arg("T[40]", param=True),
    None,
    None,
    "T[20]",
    gated=True,
    expr="add(mul(x0, x1), x2)",
    scale=96,
)
case("fused_linear", _X, "T[40, 24]", "T[40]", _G, norm="rms", eps=1e-5, gated=True, expr="swiglu(x0, x1)", scale=96)
case("fused_linear", "T[s, 24]", _W, None, None, None, arg("T[s, 1]", 1, 2), expr="div(tanh(x0), x1)", scale=24)
case(
    "fused_linear",
    "T[7]",
    arg("T[10, 7]", param=True),
    None,
    None,
    None,
    "T[]",
    gated=True,
    expr="mul(sub(x0, x1), x2)",
    scale=56,
)
case("fused_matmul", "T[b, s, 6]", "T[6, 5]", "T[5]", expr="relu(add(x0, x1))", scale=6)
_KERNEL = (arg("T[20, 6, 3, 3]", param=True), arg("T[20]", param=True))
_SAME: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1, "scale": 99}
case(
    "fused_conv2d",
    "T[b, 6, s, 5]",
    *_KERNEL,
    "T[b, 20, s, 5]",
    "T[20, 1, 1]",
    **_SAME,
    expr="relu(add(x0, mul(x1, x2)))",
)
case("fused_conv2d", "T[b, 6, s, 5]", *_KERNEL, "T[s, 1]", "T[5]", **_SAME, expr="silu(add(mul(x0, x1), x2))")
case("fused_conv2d", "T[b, 6, s, 5]", "T[20, 6, 3, 3]", None, "T[20, s, 1]", **_SAME, expr="add(x0, x1)")
case("fused_norm", "T[b, s, 24]", _G, None, "T[s, 24]", norm="rms", eps=1e-5, expr="add(x0, x1)", scale=2)
case("fused_norm", "T[b, s, 24]", _G, _G, norm="layer", eps=1e-5, expr="gelu(x0)", scale=4)
case("fused_gather", arg("i64[b, s]", 0, 10), arg("T[11, 6]", param=True), "T[s, 6]", expr="add(mul(x0, 3), x1)")
case("fused_reduce", "T[b, s]", "T[s]", inputs=2, reduce="sum", axes=(1,), pre="mul(x0, x1)", scale=12)
case("fused_reduce", "T[b, s, 3]", "T[b, 1, 3]", inputs=1, reduce="max", axes=(1,), keepdims=True, post="sub(x0, x1)")
case("fused_reduce", "T[b, s]", inputs=1, reduce="mean", post="sqrt(add(abs(x0), 0.1))")
case("linear_argmax", "T[b, s, 24]", arg("T[50, 24]", param=True))
case(
    "linear_argmax",
    "T[b, 24]",
    arg("T[50, 24]", param=True),
    arg("T[50]", param=True),
    _G,
    norm="rms",
    eps=1e-5,
    keepdims=True,
)
case("linear_argmax", "T[7]", arg("T[20, 7]", param=True))
case("linear_argmax", "T[s, 24]", "T[50, 24]", None, _G, _G, norm="layer", eps=1e-5)
_ROWS = (arg("T[50, 24]", param=True), arg("T[50]", param=True), arg("T[50]", param=True))
case("linear_norm", "T[b, s, 24]", *_ROWS, None, "T[s, 50]", norm="rms", eps=1e-3, expr="add(x0, x1)", scale=24)
case("linear_norm", "T[b, 24]", _ROWS[0], None, None, norm="rms", eps=1e-3, scale=24)
case("linear_norm", "T[b, s, 24]", *_ROWS, _ROWS[2], norm="layer", eps=1e-3, expr="silu(x0)", scale=24)
case("linear_norm", "T[24]", *_ROWS, norm="layer", eps=1e-3, scale=24)
case("linear_norm", "T[b, 24]", "T[50, 24]", None, "T[50]", None, "T[b, 1]", norm="rms", eps=1e-3, expr="mul(x0, x1)",
     scale=24)  # fmt: skip
_ROUTED = {"k": 2, "expr": "swiglu(x0, x1)", "only": "f32 bf16 f16", "scale": 24}
case("linear_route", "T[b, s, 24]", arg("T[46, 24]", param=True), arg("T[24]", param=True), scores=8, norm="rms",
     eps=1e-3, **_ROUTED)  # fmt: skip
case("linear_route", "T[b, 64]", arg("T[140, 64]", param=True), scores=12, normalize=False, gates=1,
     **_ROUTED)  # fmt: skip
case("linear_route", "T[b, 24]", "T[46, 24]", "T[24]", scores=8, norm="rms", eps=1e-3, groups=2, kept_groups=1,
     **_ROUTED)  # fmt: skip
_CACHES = ("T[b, 2, 13, 8]", "f32[b, 2, 13, 8]", _LENGTHS)
_LATENT = ("T[b, s, 12]", "T[b, s, 1, 8]", "T[b, s, 3, 8]")
_TURNED = {"eps": 1e-3, "only": "f32 bf16 f16", "scale": 12}
_QKV: dict[str, Any] = {"heads": 4, "kv_heads": 2, "scale": 24}
_HEADS = {"heads": 4, "kv_heads": 2, "eps": 1e-3, "only": "f32 bf16 f16"}
case(
    "heads_rope_cache",
    "T[b, s, 64]",
    _POSITIONS,
    _TABLE,
    _TABLE,
    *_CACHES,
    arg("T[32]", param=True),
    arg("T[16]", param=True),
    arg("i64[b]", values=[1, 0, 1]),
    algo="gpt_neox",
    norm="rms",
    whole=True,
    **_HEADS,
)
case(
    "heads_rope_cache",
    "T[b, s, 64]",
    arg("i32[s]", 0, 15),
    arg("f32[16, 2]", -1, 1),
    arg("f32[16, 2]", -1, 1),
    *_CACHES,
    "T[4, 8]",
    "T[2, 8]",
    algo="gpt_j",
    norm="layer",
    whole=False,
    **_HEADS,
)
case("latent_rope_cache", *_LATENT, _POSITIONS, _TABLE, _TABLE, "T[b, 1, 13, 20]", _LENGTHS, arg("T[12]", param=True),
     arg("i64[b]", values=[1, 0, 1]), algo="gpt_neox", **_TURNED)  # fmt: skip
case("latent_rope_cache", *_LATENT, arg("i32[s]", 0, 15), *[arg("f32[16, 2]", -1, 1)] * 2, "f32[b, 1, 13, 20]",
     _LENGTHS, "T[12]", algo="gpt_j", **_TURNED)  # fmt: skip
case("latent_rope_cache", *_LATENT, _POSITIONS, _TABLE, _TABLE, "T[b, 1, 13, 20]", _LENGTHS, arg("T[12]", param=True),
     None, None, "T[b, s, 3, 5]", arg("T[3, 12, 5]", param=True), algo="gpt_neox", **_TURNED)  # fmt: skip
case("latent_rope_cache", "T[b, s, 32]", "T[b, s, 1, 8]", "T[b, s, 3, 8]", _POSITIONS, _TABLE, _TABLE,
     "T[b, 1, 13, 40]", _LENGTHS, "T[32]", arg("i64[b]", values=[1, 0, 1]), None, "T[b, s, 3, 64]",
     arg("T[3, 32, 64]", param=True), algo="gpt_j", **_TURNED)  # fmt: skip
case("qkv_rope_cache", _X, arg("T[64, 24]", param=True), _POSITIONS, _TABLE, _TABLE, *_CACHES, algo="gpt_neox", **_QKV)
case(
    "qkv_rope_cache",
    _X,
    arg("T[64, 24]", param=True),
    arg("i32[s]", 0, 15),
    _TABLE,
    _TABLE,
    *_CACHES,
    arg("i64[b]", values=[1, 0, 1]),
    arg("T[64]", param=True),
    _G,
    None,
    arg("T[8]", param=True),
    arg("T[8]", param=True),
    algo="gpt_j",
    norm="rms",
    eps=1e-5,
    qk_eps=1e-5,
    **_QKV,
)
case(
    "qkv_rope_cache",
    _X,
    "T[64, 24]",
    _POSITIONS,
    arg("T[16, 2]"),
    arg("T[16, 2]"),
    *_CACHES,
    None,
    "T[64]",
    _G,
    _G,
    "T[8]",
    "T[8]",
    algo="gpt_neox",
    norm="layer",
    eps=1e-5,
    qk_eps=1e-5,
    **_QKV,
)
