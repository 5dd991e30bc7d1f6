"""Element types and corner cases as PyTorch has them: what each call gives was read off PyTorch 2.13."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import monoplan.nn.functional as F
from monoplan import nn
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import trace
from monoplan.ir.errors import ArgumentError, TypeRuleError

HALF, BRAIN, FLOAT = (Tensor([1.0, 2.0, 4.0], d) for d in ("f16", "bf16", "f32"))
SMALL, LONG, FLAGS = Tensor([1, 2, 3], "i32"), Tensor([1, 2, 3]), Tensor([True, False, True])
ONE, ONE_LONG, ONE_DOUBLE = Tensor(1.5), Tensor(2), Tensor(1.5, "f64")

TYPES: dict[str, tuple[Any, str]] = {
    "half / integers": (HALF / LONG, "f16"),
    "integers / half": (SMALL / BRAIN, "bf16"),
    "half ** integers": (HALF**SMALL, "f16"),
    "integers ** half": (LONG**HALF, "f16"),
    "integers / integers": (LONG / SMALL, "f32"),
    "integers ** integers": (SMALL**LONG, "i64"),
    "half + 0-d f32": (HALF + ONE, "f16"),
    "f32 + 0-d f64": (FLOAT * ONE_DOUBLE, "f32"),
    "i32 + 0-d i64": (SMALL + ONE_LONG, "i32"),
    "i32 + 0-d f32": (SMALL + ONE, "f32"),
    "i64 + 0-d half": (LONG + Tensor(1.0, "f16"), "f16"),
    "bools + 0-d i64": (FLAGS + ONE_LONG, "i64"),
    "0-d + 0-d": (ONE + ONE_DOUBLE, "f64"),
    "half + 2.5": (HALF + 2.5, "f16"),
    "i32 + 2.5": (SMALL + 2.5, "f32"),
    "i32 // 2": (SMALL // 2, "i32"),
    "half // i64": (HALF // LONG, "f16"),
    "where of 0-d": (F.where(FLAGS, HALF, ONE), "f16"),
    "where of numbers": (F.where(FLAGS, 1.0, 0), "f32"),
    "masked_fill of bools": (F.masked_fill(FLAGS, FLAGS, 1), "bool"),
    "masked_fill of integers": (F.masked_fill(SMALL, FLAGS, 2.7), "i32"),
    "masked_fill by a tensor": (F.masked_fill(HALF, FLAGS, ONE), "f16"),
    "sum of bools": (FLAGS.sum(), "i64"),
    "prod of i32": (SMALL.prod(), "i64"),
    "prod as i32": (LONG.prod(dtype="i32"), "i32"),
    "cumsum of i32": (F.cumsum(SMALL, 0), "i64"),
    "cumprod of bools": (F.cumprod(FLAGS, 0), "i64"),
    "max of bools": (FLAGS.max(), "bool"),
    "var of half": (HALF.var(), "f16"),
    "linear of integers": (F.linear(LONG, Tensor([[2**60, 0, 1]])), "i64"),
    "logical_and of floats": (F.logical_and(FLOAT, 0), "bool"),
    "bits of bools": (FLAGS ^ True, "bool"),
    "bits of integers": (SMALL & 2, "i32"),
    "exp of integers": (F.exp(LONG), "f32"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_element_type(name: str) -> None:
    got, wanted = TYPES[name]
    assert got.dtype.name == wanted


def test_values() -> None:
    assert F.linear(LONG, Tensor([[2**60, 0, 1]])).tolist() == [2**60 + 3]  # no float has that many digits
    assert F.masked_fill(SMALL, FLAGS, 2.7).tolist() == [2, 2, 2] and (SMALL << 30).tolist() == [
        2**30,
        -(2**31),
        -(2**30),
    ]
    with pytest.raises(ArgumentError, match="masked_fill: -inf is no i32"):
        F.masked_fill(SMALL, FLAGS, -math.inf)
    with pytest.raises(TypeRuleError, match="linear needs floating point operands"):
        F.linear(FLAGS, FLAGS.reshape(1, 3))
    assert F.mish(Tensor([9.0], "f16")).tolist() == [9.0]  # exp(9)**2 is beyond f16
    assert F.logsumexp(Tensor([-math.inf, -math.inf]), 0).item() == -math.inf
    assert F.var(Tensor([1.0])).numpy().item() != F.var(Tensor([1.0])).numpy().item()  # NaN
    assert F.cummax(Tensor([1.0, 3.0, 3.0, math.nan, 5.0]), 0).indices.tolist() == [0, 1, 2, 3, 3]


def test_empty_lists_of_dimensions() -> None:
    x = Tensor(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    for got in (x.sum(()), x.sum([]), F.sum(x, dim=[]), x.mean(()) * 6, F.amax(x, ()) * 3):
        assert got.shape == () and got.item() == 15
    assert x.any(()).shape == (2, 3) and F.var(x, []).shape == ()
    assert (
        Tensor(3.0).sum(0).item() == 3 and Tensor(3.0).argmax(-1).item() == 0 and F.sort(Tensor(3.0)).values.item() == 3
    )


def test_squeeze() -> None:
    x = Tensor(np.zeros((1, 2, 1)))
    assert x.squeeze().shape == (2,) and x.squeeze(()).shape == (1, 2, 1) and F.squeeze(x, 1).shape == (1, 2, 1)
    assert x.squeeze((0, 1)).shape == (2, 1) and x.squeeze(-1).shape == (1, 2) and Tensor(1.0).squeeze(0).shape == ()

    class Squeezed(nn.Module):
        def forward(self, x: Any, dim: Any = None) -> Any:
            return x.squeeze() if dim is None else x.squeeze(dim)

    assert [str(v.type) for v in trace(Squeezed(), spec("n", 1, 4)).graph.outputs] == ["f32[n, 4]"]
    with pytest.raises(TypeRuleError, match="a size that is known only at the call"):
        trace(Squeezed(), spec("n", 1, 4), dim=0)


def test_joining_and_repeating() -> None:
    x = Tensor([[1, 2], [3, 4]])
    assert F.repeat_interleave(x, 2).tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert F.repeat_interleave(x, Tensor([1, 2]), 0).tolist() == [[1, 2], [3, 4], [3, 4]]
    assert F.repeat_interleave(x, 0, 1).shape == (2, 0) and x.repeat(2, 1, 2).shape == (2, 2, 4)
    with pytest.raises(ArgumentError, match="a tensor is needed, got None"):
        F.cat([x, None])
    assert F.cat([Tensor(np.zeros(0, np.float32)), x]).dtype.name == "f32"
    for bad in (x, [], None):
        with pytest.raises(ArgumentError, match="cat takes a list"):
            F.cat(bad)


def test_masks_while_traced() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 0]

    with pytest.raises(TypeRuleError, match="a traced tensor can't be indexed by a mask"):
        trace(Chosen(), spec(3))


def test_where_the_first_query_stands(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((2, 1, n, 4)).astype(np.float32) for n in (2, 5, 5))
    for align, start in (("lower_right", 3), ("upper_left", 0)):
        got = F.scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment=align)
        seen = np.arange(5) <= np.arange(2)[:, None] + start
        want = F.scaled_dot_product_attention(q, k, v, seen)
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-5, atol=1e-6)
        flat = F.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0], is_causal=True, causal_alignment=align)
        np.testing.assert_allclose(flat.numpy(), got.numpy()[0, 0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="causal_alignment='left' is not one of"):
        F.scaled_dot_product_attention(q, k, v, is_causal=True, causal_alignment="left")
