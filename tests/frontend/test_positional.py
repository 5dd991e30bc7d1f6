"""RoPE and positional embeddings."""

from __future__ import annotations

import cmath
import math
from typing import Any

import numpy as np
import pytest

from monoplan import nn
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.types import INTEGERS, DType, bf16
from tests.tolerances import check

Algo = nn.RoPE.Algo


def rotate(x: np.ndarray, positions: Any, algo: Any, rotated: int, theta: float = 10000.0) -> np.ndarray:
    """Pairs as complex numbers, turned by position * theta ** (-2 i / rotated)."""
    y = x.astype(np.float64)
    for b, s, h, i in np.ndindex(*x.shape[:3], rotated // 2):
        p = int(positions[b, s] if np.ndim(positions) == 2 else positions[s])
        one, two = (2 * i, 2 * i + 1) if algo is Algo.GPT_J else (i, i + rotated // 2)
        z = complex(x[b, s, h, one], x[b, s, h, two]) * cmath.rect(1, p * theta ** (-2 * i / rotated))
        y[b, s, h, one], y[b, s, h, two] = z.real, z.imag
    return y


@pytest.mark.parametrize("algo", list(Algo))
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_rope(algo: Any, rotary_dim: int | None, rng: np.random.Generator) -> None:
    layer = nn.RoPE(8, 32, algo=algo, rotary_dim=rotary_dim)
    x = rng.standard_normal((2, 3, 2, 8)).astype(np.float32)
    shared, own = np.array([0, 7, 31]), np.array([[0, 1, 2], [30, 5, 5]])
    for positions in (shared, own):
        wanted = rotate(x, positions, algo, rotary_dim or 8)
        check(layer(x, positions).numpy(), wanted, "f32", "pointwise", scale=8)
    check(layer(x[0], shared).numpy(), rotate(x[:1], shared, algo, rotary_dim or 8)[0], "f32", "pointwise", scale=8)


def test_tables() -> None:
    layer = nn.RoPE(8, 2000, theta=500.0)
    assert layer.algo is Algo.GPT_J and layer.sin_cache.shape == layer.cos_cache.shape == (2000, 4)
    assert list(layer.state_dict()) == [] and len(list(layer.buffers())) == 2, "tables are not saved"
    for p, i in ((0, 0), (1999, 0), (1234, 3)):
        angle = p / 500.0 ** (2 * i / 8)
        assert layer.sin_cache.numpy()[p, i] == np.float32(math.sin(angle))
        assert layer.cos_cache.numpy()[p, i] == np.float32(math.cos(angle))
    assert nn.RoPE(8, 4, dtype="bf16").sin_cache.dtype is bf16
    assert repr(nn.RoPE(8, 16, algo="gpt_neox", rotary_dim=4)) == (
        "RoPE(head_dim=8, max_seq_len=16, theta=10000.0, algo=GPT_NEOX, rotary_dim=4)"
    )


def test_scaled_variants(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 2, 1, 4)).astype(np.float32)
    positions = np.array([1, 6])
    # Linear scaling by 2: the frequencies are halved, so position 6 stands where 3 stood.
    halved = nn.RoPE(4, 8, inv_freq=[0.5, 0.005], algo=Algo.GPT_NEOX)
    plain = nn.RoPE(4, 8, algo=Algo.GPT_NEOX)
    np.testing.assert_allclose(halved(x, positions)[:, 1:].numpy(), plain(x[:, 1:], np.array([3])).numpy(), rtol=1e-6)
    loud = nn.RoPE(4, 8, algo=Algo.GPT_NEOX, scale=2.0)
    np.testing.assert_allclose(loud(x, positions).numpy(), 2 * plain(x, positions).numpy(), rtol=1e-6)
    given = nn.RoPE(4, 8, algo=Algo.GPT_NEOX, tables=(plain.sin_cache, plain.cos_cache.numpy()))
    np.testing.assert_array_equal(given(x, positions).numpy(), plain(x, positions).numpy())


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_positions_of_every_integer_type(dtype: DType) -> None:
    layer = nn.RoPE(2, 8)
    x = np.ones((1, 1, 2), np.float32)
    turned = complex(1, 1) * cmath.rect(1, 5)
    assert np.allclose(layer(x, np.array([5], dtype.numpy)).numpy()[0, 0], [turned.real, turned.imag])
    assert np.allclose(layer(x, [5]).numpy()[0, 0], [turned.real, turned.imag])


def test_in_place_and_out_forms(rng: np.random.Generator) -> None:
    layer = nn.RoPE(4, 8)
    x = rng.standard_normal((3, 2, 4)).astype(np.float32)
    positions = np.array([1, 2, 3])
    wanted = layer(x, positions).numpy().copy()
    y = Tensor(np.zeros_like(x))
    assert layer(y, x, positions) is y
    np.testing.assert_array_equal(y.numpy(), wanted)
    t = Tensor(x.copy())
    assert layer(t, positions, in_place=True) is t
    np.testing.assert_array_equal(t.numpy(), wanted)
    layer(x, positions, True)
    np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.RoPE(7, 8), "head_dim must be even, since dimensions rotate in pairs; got 7"),
        (lambda: nn.RoPE(8, 8, rotary_dim=3), "rotary_dim must be even and between 2 and 8, got 3"),
        (lambda: nn.RoPE(8, 8, rotary_dim=10), "between 2 and 8, got 10"),
        (lambda: nn.RoPE(8, 8, inv_freq=[1.0]), r"inv_freq must be \[4\]"),
        (lambda: nn.RoPE(8, 8, tables=(np.zeros((4, 4)),) * 2), r"tables must be \[8, 4\]"),
        (lambda: nn.RoPE(8, 0), "max_seq_len must be"),
        (lambda: nn.RoPE(8, 8)(np.zeros((1, 2, 6)), [0]), r"with head_dim 8, got f64\[1, 2, 6\]"),
        (lambda: nn.RoPE(8, 8)(np.zeros((2, 8)), [0, 1]), r"x must be \[\(batch,\) seq, heads, head_dim\]"),
        (lambda: nn.RoPE(2, 8)(np.zeros((2, 1, 2)), [0, 8]), r"position 8 at \[1\] is beyond the table of 8 positions"),
    ],
)
def test_rope_errors(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_unknown_algorithm_and_wrong_positions() -> None:
    with pytest.raises(ValueError, match="gptj"):
        nn.RoPE(4, 4, algo="gptj")
    with pytest.raises(TypeRuleError, match="do not fit x"):
        nn.RoPE(2, 8)(np.zeros((3, 1, 2), np.float32), [0, 1])


def test_learned_positions() -> None:
    layer = nn.PositionalEmbedding(10, 4)
    assert list(layer.state_dict()) == ["weight"] and layer.weight.shape == (10, 4)
    np.testing.assert_array_equal(layer(3, offset=2).numpy(), layer.weight.numpy()[2:5])
    assert layer(10).shape == (10, 4) and layer(0).shape == (0, 4)
    for seq_len, offset in ((11, 0), (3, 8), (1, -1)):
        with pytest.raises(ArgumentError, match=f"{seq_len} positions from {offset} on exceed max_len 10"):
            layer(seq_len, offset)
    assert repr(layer) == "PositionalEmbedding(max_len=10, embed_dim=4)"


@pytest.mark.parametrize("dim", [4, 5])
def test_sinusoidal_positions(dim: int) -> None:
    layer = nn.PositionalEmbedding.sinusoidal(6, dim)
    assert list(layer.state_dict()) == [] and not list(layer.parameters())
    for p, i in np.ndindex(6, dim):
        angle = p / 10000 ** (2 * (i // 2) / dim)
        wanted = math.sin(angle) if i % 2 == 0 else math.cos(angle)
        assert layer.weight.numpy()[p, i] == pytest.approx(wanted, abs=1e-7)
    assert repr(layer).endswith("sinusoidal)") and layer(2, 3).shape == (2, dim)
