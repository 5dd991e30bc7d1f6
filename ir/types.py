"""Element types and tensor types."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable
from dataclasses import field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from monoplan.ir.dims import LARGEST, Dim, as_dim, format_dim, same_dims
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.lazy_dataclass import dataclass

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, repr=False)
class DType:
    """An element type; prints as its short name (`f32`).

    Low-bit types (`q4_k`) are those of weights alone: blocks of `block` numbers, each of `block_bytes` bytes. What they
    mean is float32, and that is what numpy sees of them.
    """

    name: str
    kind: str  # "f" float, "i" signed, "u" unsigned, "b" bool, "q" low-bit
    bits: int
    block: int = 1
    block_bytes: int = 0

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype that holds it (bf16 comes from ml_dtypes)."""
        return _NUMPY[self.values.name]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return max(self.bits // 8, 1)

    def stored_bytes(self, count: int) -> int:
        """Bytes of so many numbers; low-bit ones come in whole blocks."""
        return count // self.block * self.block_bytes if self.is_low_bit else count * self.itemsize

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_low_bit(self) -> bool:
        return self.kind == "q"

    @property
    def values(self) -> DType:
        """The type of its numbers when they are read: f32 for low-bit types, else itself."""
        return f32 if self.kind == "q" else self

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"

    @property
    def accumulator(self) -> DType:
        """The type sums are kept in: f64 for f64, f32 for narrower floats, 64 bits for integers."""
        if self.kind == "f":
            return f64 if self.bits == 64 else f32
        return u64 if self.kind == "u" else i64


f64, f32 = DType("f64", "f", 64), DType("f32", "f", 32)
f16, bf16 = DType("f16", "f", 16), DType("bf16", "f", 16)
i8, i16, i32, i64 = (DType(f"i{n}", "i", n) for n in (8, 16, 32, 64))
u8, u16, u32, u64 = (DType(f"u{n}", "u", n) for n in (8, 16, 32, 64))
bool_ = DType("bool", "b", 8)

# The block formats that weights may stay in: numbers and bytes of a block. First those of GGUF files; then those that
# hold the numbers of Hugging Face checkpoints: fp8 (e4m3) with a scale in f32 for each block, int4 and int8 with a
# scale of the type that they are named by and a byte, the zero point.
LOW_BITS: dict[str, DType] = {
    name: DType(name, "q", size * 8 // block, block, size)
    for name, block, size in (
        ("q4_0", 32, 18), ("q4_1", 32, 20), ("q5_0", 32, 22), ("q5_1", 32, 24), ("q8_0", 32, 34), ("q2_k", 256, 84),
        ("q3_k", 256, 110), ("q4_k", 256, 144), ("q5_k", 256, 176), ("q6_k", 256, 210), ("iq4_nl", 32, 18),
        ("iq4_xs", 256, 136), ("mxfp4", 32, 17), ("fp8_128", 128, 132), ("fp8_32", 32, 36),
        *((f"int4_{n}_{t}", n, n // 2 + 3) for n in (128, 64, 32) for t in ("f16", "bf16")),
        *((f"int4_{n}_f32", n, n // 2 + 5) for n in (128, 64, 32)),
        *((f"int8_{n}_f32", n, n + 5) for n in (128, 64, 32)),
    )
}  # fmt: skip
DTYPES: dict[str, DType] = {d.name: d for d in (f64, f32, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, bool_)}
ALL_TYPES = DTYPES | LOW_BITS  # by the names that IR text and stored plans have
FLOATS = (f64, f32, f16, bf16)
INTEGERS = (i8, i16, i32, i64, u8, u16, u32, u64)

_LONG = {"float": "f", "int": "i", "uint": "u"}
_NUMPY: dict[str, np.dtype[Any]] = {
    name: np.dtype(bool if name == "bool" else ml_dtypes.bfloat16 if name == "bf16" else name[0] + str(d.bits // 8))
    for name, d in DTYPES.items()
}
_BY_NUMPY = {dtype: DTYPES[name] for name, dtype in _NUMPY.items()}  # the name of a numpy dtype takes long to find
_ALIASES: dict[str, DType] = {np.dtype(n).name: DTYPES[k] for k, n in _NUMPY.items()} | {
    "float": f32,
    "double": f64,
    "half": f16,
    "int": i64,
    "long": i64,
}


def as_dtype(spec: Any) -> DType:
    """A DType from a DType, a short or numpy name (`f32`, `float32`), or a numpy dtype."""
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, str):
        name = spec.removeprefix("torch.").removeprefix("np.")
        if name in DTYPES:
            return DTYPES[name]
        if name in _ALIASES:
            return _ALIASES[name]
    else:
        try:
            dtype = np.dtype(spec)
            return _BY_NUMPY[dtype] if dtype in _BY_NUMPY else _ALIASES[dtype.name]
        except (TypeError, KeyError):
            pass
    raise TypeRuleError(f"{spec!r} is not an element type", fix="use one of " + ", ".join(DTYPES))


@functools.cache
def torch_types(torch: Any) -> dict[Any, np.dtype[Any]]:
    """numpy's types of torch's, where numpy (and CuPy) have the same; bfloat16 is not among them."""
    names = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    return {getattr(torch, name): np.dtype(name) for name in names}


def as_weight_dtype(spec: Any, *, low_bits: bool = False) -> DType:
    """A DType that weights may be converted to: a floating point one, since an integer type would round them away.

    low_bits: or one of blocks with scales, by its name; int8, int4 and fp8 are the plain ones of that width.
    """
    fix = "use one of " + ", ".join(d.name for d in FLOATS) + (", q8_0, q4_0, q4_k or fp8" if low_bits else "")
    if low_bits and isinstance(spec, str | DType):
        name = {"int8": "q8_0", "int4": "q4_0", "fp8": "fp8_128"}.get(str(spec), str(spec))
        if name in LOW_BITS:
            return LOW_BITS[name]
    try:
        found = as_dtype(spec)
    except TypeRuleError as error:
        raise ArgumentError(f"dtype: {error.what}", fix=fix) from None
    if not found.is_float:
        why = f"{found} would cut weights to whole numbers"
        raise ArgumentError(f"dtype={spec!r}: weights must be of a floating point type", why=why, fix=fix)
    return found


def promote(*dtypes: DType) -> DType:
    """The common type of operands: floats win over integers, wider over narrower; bf16 with f16 gives f32."""
    result = dtypes[0]
    for d in dtypes[1:]:
        result = _promote2(result, d)
    return result


def _promote2(a: DType, b: DType) -> DType:
    if a == b:
        return a.values
    if a.is_low_bit or b.is_low_bit:  # a low-bit weight takes the type of what it is multiplied with
        return b.values if a.is_low_bit else a
    if a.is_float or b.is_float:
        if a.is_float and b.is_float:
            return max(a, b, key=lambda d: d.bits) if a.bits != b.bits else f32
        return a if a.is_float else b
    if a.kind == "b" or b.kind == "b":
        return b if a.kind == "b" else a
    if a.kind != b.kind and max(a.bits, b.bits) == 64:
        return i64  # numpy would go to f64 for u64 beside a signed type
    return _ALIASES[np.promote_types(a.numpy, b.numpy).name]


@dataclass(frozen=True, slots=True, eq=False)
class TensorType:
    """Element type and shape; prints as `f32[batch, 64]`."""

    dtype: DType
    shape: tuple[Dim, ...]
    _text: str = field(default="", init=False)  # graphs print their types over and over

    def __str__(self) -> str:
        if not self._text:
            text = f"{self.dtype}[{', '.join(format_dim(d) for d in self.shape)}]"
            object.__setattr__(self, "_text", text)
        return self._text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, TensorType) and self.dtype == other.dtype and same_dims(self.shape, other.shape)
        )

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape))

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """The number of elements."""
        return product(self.shape)

    def with_shape(self, shape: Iterable[Dim]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)


MOST_DIMS = 32  # what every release of numpy can hold


def unfit(t: TensorType) -> str:
    """What is wrong with the sizes of a type, if anything is: too many, negative, or too large to be counted."""
    if t.rank > MOST_DIMS:
        return f"it has {t.rank} dimensions, more than {MOST_DIMS}"
    sizes = [d for d in t.shape if isinstance(d, int)]
    if any(d < 0 for d in sizes):
        return "a size is negative"
    # Sizes of 0 do not help: numpy counts the others all the same.
    too_large = any(d > LARGEST for d in sizes) or math.prod(d for d in sizes if d) * t.dtype.itemsize > LARGEST
    return f"it is larger than {LARGEST} bytes" if too_large else ""


def product(dims: Iterable[Dim]) -> Dim:
    """The product of dimensions (1 for none)."""
    result: Dim = 1
    for d in dims:
        result = result * d
    return result


def tensor_type(dtype: Any, *shape: Any) -> TensorType:
    """A TensorType from loose parts: `tensor_type("f32", "batch", 64)`."""
    return TensorType(as_dtype(dtype), tuple(as_dim(d) for d in shape))


# The names of what plans can be made for.


TARGETS = ("cpu", "cuda", "reference")


def known_target(name: Any) -> str:
    """The name of a target; an error that lists the known ones if it is not one of them."""
    if name not in TARGETS:
        raise ArgumentError(f"unknown target {name!r}", fix="use one of " + ", ".join(TARGETS))
    return str(name)


# Small facts about numpy arrays' memory.


def address(a: np.ndarray[Any, Any]) -> int:
    """Where an array's data begins."""
    return int(a.__array_interface__["data"][0])


def aligned(shape: tuple[int, ...], dtype: Any, align: int = 64, zero: bool = False) -> np.ndarray[Any, Any]:
    """An array whose data begins at a multiple of `align` bytes: vectors that cross a cache line cost two. It is 0, or
    anything."""
    raw = (np.zeros if zero else np.empty)(math.prod(shape) * np.dtype(dtype).itemsize + align, np.uint8)
    return np.ndarray(shape, dtype, raw, -address(raw) % align)


def plain_array(x: Any) -> np.ndarray[Any, Any]:
    """An array of numpy's own class in the same memory; of a masked one, whose mask would be lost, an error."""
    masked = sys.modules.get("numpy.ma")  # whoever has one has imported it
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise ArgumentError(
            "a masked array can't be used",
            why="the mask would be lost, and hidden values be computed with",
            fix="fill it, x.filled(0), and pass the mask as an array of its own",
        )
    return np.asarray(x)


class Part(NamedTuple):
    """`length` places of an axis of an array, from `start`."""

    axis: int
    start: int
    length: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of an array of that shape."""
        return (*shape[: self.axis], self.length, *shape[self.axis + 1 :])

    def cut(self, a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """This part of an array, as a view."""
        return a[(slice(None),) * self.axis + (slice(self.start, self.start + self.length),)]
