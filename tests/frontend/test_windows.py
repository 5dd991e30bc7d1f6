"""Convolutions, pools and resampling as functions and layers: PyTorch's meaning, arguments and printed form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.ir.errors import ArgumentError, MonoplanError
from tests.tolerances import check

RECORDED = np.load(Path(__file__).parents[1] / "golden" / "windows.npz")
CALLS = json.loads(str(RECORDED["calls"]))


@pytest.mark.parametrize("name", sorted({name for name, _ in CALLS}))
def test_what_pytorch_gives(name: str) -> None:
    """Random settings, recorded by tests/golden/record_windows.py."""
    for i, (function, options) in enumerate(CALLS):
        if function != name:
            continue
        tensors = [mp.Tensor(RECORDED[f"{what}{i}"]) for what in "xwb" if f"{what}{i}" in RECORDED]
        got = getattr(F, name)(*tensors, **options)
        assert got.shape == RECORDED[f"y{i}"].shape, f"call {i}: {options}"
        check(got.numpy(), RECORDED[f"y{i}"], "f32", "matmul", scale=8)


def test_half_and_double() -> None:
    x, w = np.ones((1, 2, 4, 4), np.float16), np.ones((3, 2, 3, 3), np.float16)
    assert F.conv2d(x, w).numpy().dtype == np.float16 and F.conv2d(x, w).numpy()[0, 0, 0, 0] == 18
    assert F.interpolate(x.astype(np.float64), scale_factor=2, mode="bilinear").numpy().dtype == np.float64
    assert F.avg_pool2d(x.astype(np.int64), 2).numpy().dtype == np.float32
    assert F.max_pool2d(np.arange(16).reshape(1, 4, 4), 2).numpy().tolist() == [[[5, 7], [13, 15]]]
    nan = np.array([[[1, np.nan, 0, 3]]], np.float32)
    np.testing.assert_array_equal(F.max_pool1d(nan, 2).numpy(), [[[np.nan, 3]]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.conv2d(x[0, 0], x), r"must be \[\(batch,\) channels, height, width\]"),
        (lambda x: F.conv2d(x, x[0]), r"the weight must be \[out, in / groups, height, width\]"),
        (lambda x: F.conv2d(x, x, padding="full"), "neither numbers nor 'same' nor 'valid'"),
        (lambda x: F.conv2d(x, x, stride=2, padding="same"), "padding='same' needs a stride of 1"),
        (lambda x: F.conv2d(x, x, stride=(1, 2, 3)), "stride must be a whole number or 2 of them"),
        (lambda x: F.conv2d(x, x, dilation=1.5), "dilation must be a whole number"),
        (lambda x: F.conv_transpose1d(x[0], x[0], output_padding=1), "output_padding must be smaller"),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), "return_indices=True is not supported"),
        (lambda x: F.max_pool2d(x, 2, 0), "the stride must be 1 or more"),
        (lambda x: F.max_pool2d(x, 2, padding=2), "more than half of the kernel"),
        (lambda x: F.avg_pool2d(x, 2, divisor_override=0), "divisor_override must not be 0"),
        (lambda x: F.adaptive_avg_pool2d(x, (1, 2, 3)), "output_size must be a size or 2 of them"),
        (lambda x: F.interpolate(x, size=3, mode="linear"), "mode='linear' does not fit"),
        (lambda x: F.interpolate(x, size=3, scale_factor=2), "either size or scale_factor"),
        (lambda x: F.interpolate(x, size=3, align_corners=True), "align_corners is for linear modes"),
        (lambda x: F.interpolate(x, size=(3, 3, 3)), "takes 2 sizes"),
        (lambda x: F.interpolate(x, size=3, antialias=True), "antialias"),
        (lambda x: nn.Conv2d(3, 4, 3, groups=2), "groups=2 must divide 3 and 4 channels"),
        (lambda x: nn.Conv2d(3, 4, 0), "kernel_size must be a whole number of 1 or more"),
        (lambda x: nn.Conv2d(3, 4, 1, padding_mode="reflect"), "padding_mode='reflect' is not supported"),
    ],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(MonoplanError, match=message):
        call(mp.Tensor(np.zeros((2, 2, 4, 4), np.float32)))


def test_layers() -> None:
    """Keys, shapes and the printed form of PyTorch's layers; values within the bound of its initialization."""
    conv = nn.Conv2d(6, 9, (3, 5), 2, "valid", groups=3, bias=False)
    assert repr(conv) == "Conv2d(6, 9, kernel_size=(3, 5), stride=(2, 2), padding='valid', groups=3, bias=False)"
    assert {n: p.shape for n, p in conv.named_parameters()} == {"weight": (9, 2, 3, 5)}
    assert 0.1 < np.abs(conv.weight.numpy()).max() <= 1 / np.sqrt(2 * 15)
    back = nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2)
    text = "kernel_size=(3,), stride=(2,), padding=(1,), output_padding=(1,), groups=2"
    assert repr(back) == f"ConvTranspose1d(4, 6, {text})"
    assert {n: p.shape for n, p in back.named_parameters()} == {"weight": (4, 3, 3), "bias": (6,)}
    assert np.abs(back.bias.numpy()).max() <= 1 / np.sqrt(9)
    assert repr(nn.Conv1d(2, 3, 4, padding=1, dilation=2)) == (
        "Conv1d(2, 3, kernel_size=(4,), stride=(1,), padding=(1,), dilation=(2,))"
    )
    assert repr(nn.MaxPool2d(3, 2, 1)) == ("MaxPool2d(kernel_size=3, stride=2, padding=1, dilation=1, ceil_mode=False)")
    assert repr(nn.AvgPool2d(2)) == "AvgPool2d(kernel_size=2, stride=2, padding=0)"
    assert repr(nn.AvgPool1d(2)) == "AvgPool1d(kernel_size=(2,), stride=(2,), padding=(0,))"
    assert repr(nn.AdaptiveAvgPool2d((1, None))) == "AdaptiveAvgPool2d(output_size=(1, None))"
    assert repr(nn.Upsample(scale_factor=2)) == "Upsample(scale_factor=2, mode='nearest')"


def test_batch_norm(rng: np.random.Generator) -> None:
    """PyTorch's keys and meaning in inference."""
    norm = nn.BatchNorm2d(3, eps=0.1)
    assert repr(norm) == "BatchNorm2d(3, eps=0.1, momentum=0.1, affine=True, track_running_stats=True)"
    state = norm.state_dict()
    assert list(state) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    names = ("weight", "bias", "running_mean")
    values = {n: rng.standard_normal(3, np.float32) for n in names} | {"running_var": np.array([1, 2, 3], np.float32)}
    norm.load_state_dict({**values, "num_batches_tracked": np.array(7)})
    x = rng.standard_normal((2, 3, 4, 5), np.float32)
    w, b, mean, var = (v[:, None, None].astype(np.float64) for v in values.values())
    check(norm(x).numpy(), (x - mean) / np.sqrt(var + 0.1) * w + b, "f32", "reduce", scale=4)
    plain, rows = nn.BatchNorm1d(3, affine=False), x[0].reshape(3, -1)
    np.testing.assert_allclose(plain(rows.T).numpy(), rows.T, rtol=1e-4)
    np.testing.assert_allclose(plain(rows[None]).numpy(), rows[None], rtol=1e-4)
    with pytest.raises(ArgumentError, match="has not 3 channels"):
        plain(x)
    with pytest.raises(ArgumentError, match="inference only"):
        nn.BatchNorm2d(3, track_running_stats=False)


def test_layers_are_their_functions(rng: np.random.Generator) -> None:
    image, row = rng.standard_normal((2, 4, 9, 8), np.float32), rng.standard_normal((2, 4, 9), np.float32)
    conv, short, back = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv1d(4, 6, 3, padding="same"), nn.ConvTranspose1d(4, 2, 3, 2)
    wide = nn.ConvTranspose2d(4, 2, (3, 2), (2, 3), groups=2)
    pairs = [
        (conv(image), F.conv2d(image, conv.weight, conv.bias, 2, 1)),
        (short(row), F.conv1d(row, short.weight, short.bias, padding=1)),
        (back(row), F.conv_transpose1d(row, back.weight, back.bias, 2)),
        (wide(image), F.conv_transpose2d(image, wide.weight, wide.bias, (2, 3), groups=2)),
        (nn.GroupNorm(2, 4)(image), F.group_norm(image, 2)),
        (nn.InstanceNorm2d(4, affine=True)(image), F.instance_norm(image)),
        (nn.InstanceNorm1d(4)(row), F.instance_norm(row)),
        (nn.MaxPool2d(2, ceil_mode=True)(image), F.max_pool2d(image, 2, ceil_mode=True)),
        (nn.MaxPool1d(3, 1, 1, 2)(row), F.max_pool1d(row, 3, 1, 1, 2)),
        (nn.AvgPool2d(2, divisor_override=3)(image), F.avg_pool2d(image, 2, divisor_override=3)),
        (nn.AvgPool1d(3, 2, 1, True, False)(row), F.avg_pool1d(row, 3, 2, 1, True, False)),
        (nn.AdaptiveAvgPool2d((3, None))(image), F.adaptive_avg_pool2d(image, (3, 8))),
        (nn.AdaptiveAvgPool1d(2)(row), F.adaptive_avg_pool1d(row, 2)),
        (nn.AdaptiveMaxPool1d(2)(row), F.adaptive_max_pool1d(row, 2)),
        (nn.AdaptiveMaxPool2d(2)(image), F.adaptive_max_pool2d(image, 2)),
        (nn.Upsample((5, 5), mode="bilinear")(image), F.interpolate(image, (5, 5), mode="bilinear")),
        (nn.Flatten()(image), mp.Tensor(image.reshape(2, -1))),
    ]
    for got, wanted in pairs:
        np.testing.assert_array_equal(got.numpy(), wanted.numpy())


class Resampled(nn.Module):
    def forward(self, x: Any) -> Any:
        up = F.interpolate(F.interpolate(x, scale_factor=2), scale_factor=0.5)
        linear = [F.interpolate(x, scale_factor=3, mode="bilinear", align_corners=c) for c in (True, False)]
        other = F.interpolate(x, size=(x.shape[3], 7), mode="bilinear")
        return up, *linear, other, F.max_pool2d(x, 3, 2, ceil_mode=True)


def test_symbolic_sizes(rng: np.random.Generator) -> None:
    """One plan for all sizes, equal to what fixed sizes give."""
    module = Resampled()
    fast = mp.compile(module, mp.spec("batch", 2, "height", "width"))
    for shape in ((1, 2, 5, 6), (2, 2, 9, 4)):
        x = rng.standard_normal(shape, np.float32)
        for got, wanted in zip(fast(x), module(mp.Tensor(x)), strict=True):
            check(got, wanted.numpy(), "f32", "matmul", scale=4)
    assert fast.stats.compiles == 1
    with pytest.raises(MonoplanError, match="a window of 3 does not fit"):
        fast(np.zeros((1, 2, 1, 4), np.float32))


def test_sizes_that_are_not_known_are_refused() -> None:
    class Unknown(nn.Module):
        def __init__(self, call: Any) -> None:
            super().__init__()
            self.call = call

        def forward(self, x: Any) -> Any:
            return self.call(x)

    for call, message in (
        (lambda x: F.interpolate(x, scale_factor=1.5), "scale_factor=1.5 of a symbolic size"),
        (lambda x: F.interpolate(x, size=(7, 7)), "the nearest of height elements for 7 places"),
        (lambda x: F.max_pool2d(x, 1, 2, ceil_mode=True), "whether the last window counts depends on the size"),
    ):
        with pytest.raises(ArgumentError, match=message):
            mp.compile(Unknown(call), mp.spec(1, 2, "height", 8))
