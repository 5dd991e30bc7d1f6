"""Convolutions as implicit products: whole networks, sizes, threads and instruction sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn
from monoplan.codegen.cpu.schedule_conv import WIDE, choose_conv, conv_layout
from monoplan.codegen.target import cpu_target
from monoplan.ir.types import tensor_type
from tests.tolerances import check


def norm(channels: int) -> nn.BatchNorm2d:
    """A batch norm with other numbers than those of its begin."""
    rng, made = np.random.default_rng(channels), nn.BatchNorm2d(channels)
    values = {n: rng.standard_normal(channels, np.float32) for n in ("weight", "bias", "running_mean")}
    variance = rng.uniform(0.5, 2, channels).astype(np.float32)
    made.load_state_dict({**values, "running_var": variance, "num_batches_tracked": np.array(1)})
    return made


class Net(nn.Module):
    """A residual block, a depthwise convolution and groups, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 24, 5, 2, 2, bias=False), norm(24)
        self.first, self.first_norm = nn.Conv2d(24, 24, 3, padding=1, bias=False), norm(24)
        self.second, self.second_norm = nn.Conv2d(24, 24, 3, padding=1, bias=False), norm(24)
        self.depthwise = nn.Conv2d(24, 24, 3, padding="same", dilation=2, groups=24)
        self.grouped, self.across = nn.Conv2d(24, 36, 3, 2, groups=2), nn.Conv2d(36, 50, 1)
        self.head = nn.Linear(50, 10)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.stem_norm(self.stem(x))), 3, 2, 1)
        x = F.relu(self.second_norm(self.second(F.relu(self.first_norm(self.first(x))))) + x)
        x = F.gelu(self.across(F.silu(self.grouped(F.relu(self.depthwise(x))))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_network_of_any_size(rng: np.random.Generator) -> None:
    """One plan; norms, activations and residuals are part of its convolutions; any number of threads, the same bits."""
    net = Net()
    spec = mp.spec("batch", 3, "height", "width")
    plans = [mp.compile(net, spec, options=mp.Options(threads=n)) for n in (1, 2, 3)]
    kinds = [type(step.kernel).__name__ for step, _ in plans[0].plan.steps()]
    assert kinds == ["Conv", "Window", "Conv", "Conv", "Window", "Conv", "Conv", "Window", "Linear"]
    for shape in ((2, 3, 46, 61), (1, 3, 33, 180)):
        x = rng.standard_normal(shape, np.float32)
        first, *others = (np.asarray(fast(x)) for fast in plans)
        check(first, net(mp.Tensor(x)).numpy(), "f32", "model")
        for other in others:
            np.testing.assert_array_equal(other, first)
        plans[0].verify(x)


def test_views_are_read_in_place(rng: np.random.Generator) -> None:
    """Inputs that are transposed, and the last image of an array that ends where its memory does."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.next = nn.Conv2d(5, 9, 1), nn.Conv1d(9, 4, 2)

        def forward(self, x: Any) -> Any:
            y = self.conv(x.permute(0, 3, 1, 2))
            return y, self.next(y.flatten(2)[:, :, 1:])

    module = Last()
    x = rng.standard_normal((2, 3, 7, 5), np.float32)
    for got, wanted in zip(mp.compile(module)(x), module(mp.Tensor(x)), strict=True):
        check(got, wanted.numpy(), "f32", "matmul", scale=5)


@pytest.mark.parametrize(("isa", "size"), [("avx512", 64), ("avx2", 32), ("neon", 16), ("generic", 16), ("scalar", 4)])
def test_schedules(isa: str, size: int) -> None:
    """Slices divide k evenly, strips are whole slices, and what is converted fits its place in the header."""
    target = cpu_target(isa, size)
    for columns, depth, taps, groups in ((64, 3, 7, 1), (512, 512, 3, 1), (2048, 512, 1, 1), (64, 8, 3, 8)):
        weight = tensor_type("f32", columns, depth, taps, taps)
        layout = conv_layout(target, weight, groups)
        assert layout is not None
        s = choose_conv(target, layout, weight, groups)
        k = depth * taps * taps
        assert s.strip == k or (s.strip % s.slice == 0 and s.strip < k)
        assert s.slice * s.panel <= 128 * 32 and WIDE * s.lanes <= 64 and s.panel % s.rows == 0
        assert s.patch_floats >= s.chunk * s.strip * WIDE * s.lanes + s.lanes
    assert conv_layout(target, tensor_type("f32", 8, 1, 3, 3), 8) is None  # depthwise
    assert conv_layout(target, tensor_type("f64", 8, 8, 3, 3), 1) is None


class Given(nn.Module):
    """Convolutions by a weight that is an argument."""

    def forward(self, x: Any, weight: Any) -> Any:
        twice = F.cat([x, x], 1)
        return F.conv1d(x, weight), F.conv1d(twice, F.cat([weight, weight], 1)), F.conv1d(twice, weight, groups=2)


def test_channels_of_symbolic_size(rng: np.random.Generator) -> None:
    fast = mp.compile(Given(), mp.spec("b", "c", "n"), mp.spec(4, "c", 2))  # c: the loop's own name
    for b, c in ((2, 3), (1, 1), (3, 5), (0, 4)):
        x, weight = rng.standard_normal((b, c, 5), np.float32), rng.standard_normal((4, c, 2), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), 2, 2)
        once = np.einsum("bcnk,ock->bon", windows, weight)
        for got, expected in zip(fast(x, weight), (once, 2 * once, once), strict=True):
            check(got, expected, "f32", "matmul")


def test_an_empty_batch_without_a_plan() -> None:
    y = F.conv2d(mp.Tensor(np.zeros((0, 4, 6, 5), np.float32)), mp.Tensor(np.ones((6, 2, 3, 3), np.float32)), groups=2)
    assert y.shape == (0, 6, 4, 3)
