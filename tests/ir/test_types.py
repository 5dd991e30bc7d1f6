"""Element types, promotion and tensor types."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from monoplan.ir.dims import symbol
from monoplan.ir.errors import TypeRuleError
from monoplan.ir.types import (
    DTYPES,
    FLOATS,
    INTEGERS,
    TensorType,
    as_dtype,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    promote,
    tensor_type,
    u8,
    u16,
    u32,
    u64,
)


def test_numpy_types_have_the_right_size() -> None:
    for d in DTYPES.values():
        assert d.numpy.itemsize == d.itemsize
        assert as_dtype(d.numpy) is d and as_dtype(d.name) is d and as_dtype(d) is d
    assert bf16.numpy == ml_dtypes.bfloat16 and bool_.itemsize == 1


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("float32", f32),
        ("torch.bfloat16", bf16),
        ("half", f16),
        ("np.int64", i64),
        (np.float64, f64),
        (bool, bool_),
        ("double", f64),
        ("long", i64),
        (np.uint16, u16),
        ("float", f32),
    ],
)
def test_spellings(spec: object, wanted: object) -> None:
    assert as_dtype(spec) is wanted


@pytest.mark.parametrize("spec", ["f8", "complex64", object(), np.dtype("complex128"), "", None.__class__])
def test_what_is_not_an_element_type(spec: object) -> None:
    with pytest.raises(TypeRuleError, match="is not an element type"):
        as_dtype(spec)


def test_promotion_is_symmetric_and_idempotent() -> None:
    for a, b in itertools.product(DTYPES.values(), repeat=2):
        both = promote(a, b)
        assert both is promote(b, a)
        assert promote(a, both) is both and promote(b, both) is both
        assert both.is_float == (a.is_float or b.is_float), f"{a} with {b} gave {both}"


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (f16, bf16, f32),
        (f16, i64, f16),
        (bool_, i8, i8),
        (bool_, bool_, bool_),
        (u8, i8, DTYPES["i16"]),
        (u32, i32, i64),
        (u64, i64, i64),
        (u64, i8, i64),
        (f64, bf16, f64),
        (bool_, f16, f16),
        (u64, u8, u64),
    ],
)
def test_promotion(a: object, b: object, wanted: object) -> None:
    assert promote(a, b) is wanted  # type: ignore[arg-type]


def test_accumulators() -> None:
    assert [d.accumulator for d in FLOATS] == [f64, f32, f32, f32]
    assert {d.accumulator for d in INTEGERS} == {i64, u64}


def test_tensor_types() -> None:
    t = tensor_type("f32", "batch", 4)
    assert str(t) == "f32[batch, 4]" and t.rank == 2 and t.size == 4 * symbol("batch")
    assert t == TensorType(f32, (symbol("batch"), 4)) and hash(t) == hash(tensor_type("f32", "batch", 4))
    assert t != tensor_type("f32", "seq", 4) and t != tensor_type("f32", 3, 4) and t != tensor_type("f32", "batch")
    assert t.with_dtype(f16) == tensor_type("f16", "batch", 4) and t.with_shape((1,)) == tensor_type("f32", 1)
    assert tensor_type("i64").size == 1 and t != "f32[batch, 4]"
