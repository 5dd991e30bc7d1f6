"""Layers against formulas in float64, their initial values, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from monoplan import nn
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.types import FLOATS, DType, bf16
from tests.tolerances import check


def wide(t: Any) -> np.ndarray:
    return np.asarray(t.numpy() if hasattr(t, "numpy") else t, np.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(dtype: DType, bias: bool, rng: np.random.Generator) -> None:
    layer = nn.Linear(6, 4, bias=bias, dtype=dtype)
    x = rng.standard_normal((2, 3, 6)).astype(dtype.numpy)
    residual = rng.standard_normal((2, 3, 4)).astype(dtype.numpy)
    y = np.einsum("bsk,ok->bso", wide(x), wide(layer.weight)) + (wide(layer.bias) if bias else 0)
    check(layer(x).numpy(), y, dtype, "matmul")
    check(layer(x, residual).numpy(), y + wide(residual), dtype, "matmul", scale=2)
    assert layer.weight.shape == (4, 6) and list(layer.state_dict()) == ["weight", "bias"][: 1 + bias]


def test_linear_starts_as_in_pytorch() -> None:
    nn.manual_seed(3)
    layer = nn.Linear(400, 300)
    bound = 1 / math.sqrt(400)
    for p in (layer.weight, layer.bias):
        values = wide(p)
        assert np.abs(values).max() <= bound and abs(values.mean()) < bound / 10
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_seeds() -> None:
    def draw() -> np.ndarray:
        return nn.Linear(4, 4).weight.numpy().copy()

    nn.manual_seed(0)
    first, second = draw(), draw()
    nn.manual_seed(0)
    np.testing.assert_array_equal(draw(), first)
    assert not np.array_equal(first, second)
    with nn.no_init():
        assert not draw().any() and not nn.Embedding(3, 3).weight.numpy().any()
        assert nn.RMSNorm(3).weight.tolist() == [1, 1, 1]
    assert draw().any()


def test_embedding(rng: np.random.Generator) -> None:
    layer = nn.Embedding(1000, 8, padding_idx=-1)
    assert layer.padding_idx == 999 and not layer.weight.numpy()[999].any()
    assert wide(layer.weight).std() == pytest.approx(1, rel=0.05)
    ids = np.array([[1, 999], [5, 1]])
    got = layer(ids).numpy()
    assert got.shape == (2, 2, 8) and not got[0, 1].any()
    np.testing.assert_array_equal(got[1, 0], layer.weight.numpy()[5])
    with pytest.raises(ArgumentError, match=r"index 1000 at position \[0\] is out of range \[0, 1000\)"):
        layer(np.array([1000]))
    with pytest.raises(ArgumentError, match="padding_idx 4 is not one of 4 rows"):
        nn.Embedding(4, 2, padding_idx=4)
    with pytest.raises(TypeRuleError, match="ids must be integers"):
        layer(np.array([1.0]))
    assert repr(nn.Embedding(4, 2, 1)) == "Embedding(num_embeddings=4, embedding_dim=2, padding_idx=1)"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [5, (3, 5)])
def test_norms(dtype: DType, shape: Any, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((2, 3, 5)) + 0.5).astype(dtype.numpy)
    rms, layer = nn.RMSNorm(shape, dtype=dtype), nn.LayerNorm(shape, dtype=dtype)
    for p in (rms.weight, layer.weight, layer.bias):
        p.load(rng.standard_normal(p.shape))
    axes = (-1,) if shape == 5 else (-2, -1)
    v = wide(x)
    mean, square = v.mean(axes, keepdims=True), (v * v).mean(axes, keepdims=True)
    check(rms(x).numpy(), v / np.sqrt(square + 1e-6) * wide(rms.weight), dtype, "reduce", scale=2)
    wanted = (v - mean) / np.sqrt(square - mean**2 + 1e-5) * wide(layer.weight) + wide(layer.bias)
    check(layer(x).numpy(), wanted, dtype, "reduce", scale=4)


def test_norms_without_parameters(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 4)).astype(np.float32)
    plain = nn.LayerNorm(4, elementwise_affine=False)
    assert not list(plain.parameters()) and abs(wide(plain(x)).mean()) < 1e-6
    assert list(nn.LayerNorm(4, bias=False).state_dict()) == ["weight"]
    bare = nn.RMSNorm(4, elementwise_affine=False)
    assert np.allclose((wide(bare(x)) ** 2).mean(-1), 1, atol=1e-4)
    assert repr(nn.LayerNorm((2, 3))) == "LayerNorm((2, 3), eps=1e-05, elementwise_affine=True)"


@pytest.mark.parametrize("layer", [nn.RMSNorm(4), nn.LayerNorm(4)], ids=["rms", "layer"])
def test_norm_shape_mismatch(layer: nn.Module) -> None:
    with pytest.raises(ArgumentError, match=r"normalized_shape is \[4\], the input ends with the shape \[5\]"):
        layer(np.zeros((2, 5), np.float32))


ACTIVATIONS: list[tuple[nn.Module, Any, str]] = [
    (nn.GELU(), lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)), "GELU(approximate='none')"),
    (nn.GELU("tanh"), lambda x: 0.5 * x * (1 + math.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
     "GELU(approximate='tanh')"),
    (nn.GELU("fast"), lambda x: x / (1 + math.exp(-1.702 * x)), "GELU(approximate='fast')"),
    (nn.GELU("fast_tanh"), lambda x: 0.5 * x * (1 + math.tanh(1.702 * x)), "GELU(approximate='fast_tanh')"),
    (nn.SiLU(), lambda x: x / (1 + math.exp(-x)), "SiLU()"),
    (nn.ReLU(), lambda x: max(x, 0.0), "ReLU()"),
    (nn.Tanh(), math.tanh, "Tanh()"),
    (nn.Sigmoid(), lambda x: 1 / (1 + math.exp(-x)), "Sigmoid()"),
    (nn.LogSigmoid(), lambda x: -math.log1p(math.exp(-x)), "LogSigmoid()"),
    (nn.ELU(2.0), lambda x: x if x > 0 else 2 * math.expm1(x), "ELU(alpha=2.0)"),
    (nn.LeakyReLU(negative_slope=0.5, inplace=False), lambda x: max(x, x / 2), "LeakyReLU(negative_slope=0.5)"),
    (nn.PReLU(), lambda x: max(x, x / 4), "PReLU(num_parameters=1)"),
    (nn.Hardtanh(), lambda x: min(max(x, -1.0), 1.0), "Hardtanh(min_val=-1.0, max_val=1.0)"),
    (nn.Mish(), lambda x: x * math.tanh(math.log1p(math.exp(x))), "Mish()"),
    (nn.Softplus(2.0), lambda x: math.log1p(math.exp(2 * x)) / 2, "Softplus(beta=2.0, threshold=20.0)"),
    (nn.Threshold(0.1, 7.0), lambda x: x if x > 0.1 else 7.0, "Threshold(threshold=0.1, value=7.0)"),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "formula", "shown"), ACTIVATIONS, ids=[a[2] for a in ACTIVATIONS])
def test_activations(layer: nn.Module, formula: Any, shown: str) -> None:
    x = np.array([-2.0, -0.5, 0.0, 0.3, 4.0], np.float32)
    check(layer(x).numpy(), np.array([formula(float(v)) for v in x]), "f32", "pointwise")
    assert repr(layer) == shown


def test_a_subclass_of_an_activation() -> None:
    class Slow(nn.ELU):
        """An activation of a user."""

        def __init__(self) -> None:
            super().__init__(alpha=0.5)

    assert repr(Slow()) == "Slow(alpha=0.5)" and Slow.__doc__ == "An activation of a user."
    assert Slow()(np.array([-50.0], np.float32)).tolist() == [-0.5]
    with pytest.raises(TypeError, match=r"ELU\(alpha.*unexpected keyword argument 'beta'"):
        nn.ELU(beta=2.0)


def test_gelu_of_the_seeds() -> None:
    y = nn.GELU("tanh")(np.array([-2.0, -1.0, 0.0, 1.0, 2.0], np.float32)).tolist()
    assert abs(y[2]) < 1e-6 and y[3] < y[4] and y[2] < y[3]


def test_inplace_activations() -> None:
    x = np.array([-1.0, 2.0], np.float32)
    assert nn.ReLU(inplace=True)(x).tolist() == [0, 2] and x.tolist() == [0, 2]
    nn.SiLU(inplace=True)(x)
    assert x[1] == pytest.approx(2 / (1 + math.exp(-2))) and repr(nn.SiLU(True)) == "SiLU(inplace=True)"


def test_softmax_and_identities(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3)).astype(np.float32)
    e = np.exp(wide(x))
    check(nn.Softmax(dim=0)(x).numpy(), e / e.sum(0), "f32", "reduce")
    assert repr(nn.Softmax(dim=1)) == "Softmax(dim=1)"
    with pytest.raises(TypeRuleError, match="axis 2 is out of range"):
        nn.Softmax(2)(x)
    assert nn.Dropout(0.3)(x).numpy() is x and nn.Identity(54, unused=True)(x).numpy() is x
    assert repr(nn.Dropout()) == "Dropout(p=0.5, inplace=False)"
    with pytest.raises(ArgumentError, match="p must be a probability"):
        nn.Dropout(1.5)


def test_sequential() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    x = np.ones((4, 3), np.float32)
    h = np.maximum(wide(x) @ wide(net[0].weight).T + wide(net[0].bias), 0)
    check(net(x).numpy(), h @ wide(net[2].weight).T + wide(net[2].bias), "f32", "matmul")
    assert list(net.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"] and len(net) == 3
    assert list(net[1:].state_dict()) == ["2.weight", "2.bias"] and len(net.append(nn.Tanh())) == 4
    named = nn.Sequential({"up": nn.Linear(2, 2), "act": nn.Tanh()})
    assert list(named.state_dict()) == ["up.weight", "up.bias"] and len(list(named)) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(0, 4), "in_features must be a whole number of 1 or more, got 0"),
        (lambda: nn.Linear(4, 2.0), "out_features must be a whole number"),  # type: ignore[arg-type]
        (lambda: nn.Linear(4, 4, dtype="int32"), "parameters are floating point"),
        (lambda: nn.Linear(4, 4, device="cuda:0"), "device='cuda:0' is not a place for parameters"),
        (lambda: nn.RMSNorm((4, 0)), "normalized_shape must be a whole number"),
        (lambda: nn.Embedding(4, -1), "embedding_dim must be"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_devices_and_types() -> None:
    class Device:
        type = "cpu"

    assert nn.Linear(2, 2, True, "bfloat16", "cpu").weight.dtype is bf16
    for layer in (nn.Embedding(2, 2, None, None, Device()), nn.RMSNorm(2, 1e-6, np.float16, "cpu:0")):
        assert layer.weight.dtype.is_float
