"""Recurrent layers: numbers that torch 2.13 gave for the same weights, state-dict keys, shapes and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.ir.errors import ArgumentError

KEYS = [
    f"{kind}_{side}_l{layer}{direction}"
    for layer in range(2)
    for direction in ("", "_reverse")
    for kind in ("weight", "bias")
    for side in ("ih", "hh")
]
# Of two layers in both directions: y[0, 1], y[4, 0], and the last h (GRU) or c (LSTM) at [:, 1, 2].
TORCH = {
    "GRU": (
        [0.3881290, 0.7327793, 0.3097942, 0.9933797, -0.5325820, 0.2952009],
        [0.0320639, 0.6170581, 0.3671208, -0.0840877, 0.1859368, -0.2680219],
        [-0.8283135, 0.4682206, 0.8383548, 0.2952009],
    ),
    "LSTM": (
        [0.0888232, -0.0146531, -0.0585393, 0.1677692, -0.1032870, 0.3179771],
        [0.0700981, 0.1471708, 0.1765685, -0.1221398, 0.5144143, 0.1404909],
        [-1.0614474, 0.6071997, 0.3438699, 0.3469684],
    ),
}
X = np.cos(np.arange(20)).astype(np.float32).reshape(5, 2, 2)
H = np.sin(np.arange(24)).astype(np.float32).reshape(4, 2, 3)


def made(kind: str, **options: Any) -> Any:
    layer = getattr(nn, kind)(2, 3, num_layers=2, bidirectional=True, **options)
    shapes = {k: p.shape for k, p in layer.named_parameters()}
    assert list(shapes) == KEYS
    values = (np.sin(np.arange(np.prod(s)) * (i + 1)).reshape(s) for i, s in enumerate(shapes.values()))
    layer.load_state_dict({k: v.astype(np.float32) for k, v in zip(shapes, values, strict=True)})
    return layer


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_numbers_of_torch(kind: str, batch_first: bool) -> None:
    x = np.swapaxes(X, 0, 1) if batch_first else X
    states: Any = mp.Tensor(H) if kind == "GRU" else (mp.Tensor(H), mp.Tensor(2 * H))
    y, last = made(kind, batch_first=batch_first)(mp.Tensor(x), states)
    out = np.swapaxes(y.numpy(), 0, 1) if batch_first else y.numpy()
    assert out.shape == (5, 2, 6)
    first, end, state = TORCH[kind]
    np.testing.assert_allclose(out[0, 1], first, atol=1e-6)
    np.testing.assert_allclose(out[4, 0], end, atol=1e-6)
    np.testing.assert_allclose((last if kind == "GRU" else last[1]).numpy()[:, 1, 2], state, atol=1e-6)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_without_a_batch_or_a_first_state(kind: str) -> None:
    layer = made(kind)
    whole, _ = layer(mp.Tensor(X))
    alone, last = layer(mp.Tensor(X[:, 1]))
    np.testing.assert_allclose(alone.numpy(), whole.numpy()[:, 1], atol=1e-6)
    assert (last if kind == "GRU" else last[0]).shape == (4, 3)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_cell_is_a_step_of_its_layer(kind: str) -> None:
    cell = getattr(nn, f"{kind}Cell")(2, 3)
    assert list(cell.state_dict()) == ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    layer = getattr(nn, kind)(2, 3)
    layer.load_state_dict({f"{k}_l0": v for k, v in cell.state_dict().items()})
    step = cell(mp.Tensor(X[0]))
    y, _ = layer(mp.Tensor(X[:1]))
    np.testing.assert_allclose((step if kind == "GRU" else step[0]).numpy(), y.numpy()[0], atol=1e-6)


def test_bias_is_optional() -> None:
    assert list(nn.GRU(2, 3, bias=False).state_dict()) == ["weight_ih_l0", "weight_hh_l0"]
    assert list(nn.LSTMCell(2, 3, bias=False).state_dict()) == ["weight_ih", "weight_hh"]
    assert str(nn.GRU(2, 3, bias=False, batch_first=True)) == "GRU(2, 3, bias=False, batch_first=True)"
    assert nn.GRU(2, 3, bias=False)(mp.Tensor(X))[0].shape == (5, 2, 3)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match=r"GRU: the input is f32\[5, 2, 3\], but it needs 2 dimensions or 3"):
        nn.GRU(2, 3)(mp.Tensor(np.zeros((5, 2, 3), np.float32)))
    with pytest.raises(ArgumentError, match=r"a first state is f32\[4, 2, 3\], but \[1, 2, 3\] is needed"):
        nn.GRU(2, 3)(mp.Tensor(X), mp.Tensor(H))
    with pytest.raises(ArgumentError, match="proj_size=2 is not supported"):
        nn.LSTM(2, 3, proj_size=2)
