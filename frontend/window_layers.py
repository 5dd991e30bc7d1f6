"""Convolutions, pools and resampling as layers with PyTorch's names, state-dict keys and initial values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.activations import FunctionLayer
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, check_size, layer_dtype, linear_bound, uniform
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.frontend.windows import numbers
from monoplan.ir.dims import equal
from monoplan.ir.errors import ArgumentError


class _Conv(Module):
    """What convolutions have in common: sizes, weight and bias."""

    spatial = 2
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        channels = {"in_channels": in_channels, "out_channels": out_channels}
        kind = layer_dtype(name, dtype, device, **channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(f"{name}: groups={groups} must divide {in_channels} and {out_channels} channels")
        if padding_mode != "zeros":
            raise ArgumentError(f"{name}: padding_mode={padding_mode!r} is not supported", fix="pad with F.pad first")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = numbers(name, "kernel_size", kernel_size, self.spatial)
        check_size(name, kernel_size=min(self.kernel_size))
        self.stride = numbers(name, "stride", stride, self.spatial)
        self.padding = padding if isinstance(padding, str) else numbers(name, "padding", padding, self.spatial)
        self.dilation = numbers(name, "dilation", dilation, self.spatial)
        self.padding_mode = padding_mode
        first, second = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        shape = (first, second // groups, *self.kernel_size)
        bound = linear_bound(math.prod(shape[1:]))
        self.weight = Parameter(uniform(shape, bound, kind))
        self.register_parameter("bias", Parameter(uniform((out_channels,), bound, kind)) if bias else None)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        if isinstance(self.padding, str) or any(self.padding):
            text += f", padding={self.padding!r}" if isinstance(self.padding, str) else f", padding={self.padding}"
        if any(d != 1 for d in self.dilation):
            text += f", dilation={self.dilation}"
        if any(more := getattr(self, "output_padding", ())):
            text += f", output_padding={more}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        return text if self.bias is not None else f"{text}, bias=False"


class Conv2d(_Conv):
    """The products of a weight [out, in / groups, height, width] with each window of an image, plus bias."""

    def forward(self, input: Any) -> Tensor:
        conv = F.conv1d if self.spatial == 1 else F.conv2d
        return conv(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Conv1d(Conv2d):
    """The products of a weight [out, in / groups, size] with each window of a sequence, plus bias."""

    spatial = 1


class ConvTranspose2d(_Conv):
    """The transpose of Conv2d: each element adds its multiple of a weight [in, out / groups, h, w]; plus bias."""

    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.output_padding = numbers(type(self).__name__, "output_padding", output_padding, self.spatial)

    def forward(self, input: Any) -> Tensor:
        conv = F.conv_transpose1d if self.spatial == 1 else F.conv_transpose2d
        return conv(
            input, self.weight, self.bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class ConvTranspose1d(ConvTranspose2d):
    """The transpose of Conv1d: each element adds its multiple of a weight [in, out / groups, size]; plus bias."""

    spatial = 1


class _ChannelNorm(Module):
    """Weight and bias for each channel."""

    def __init__(self, channels: int, eps: float, affine: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.eps, self.affine = float(eps), affine
        kind = layer_dtype(type(self).__name__, dtype, device, channels=channels).numpy
        self.register_parameter("weight", Parameter(np.ones(channels, kind)) if affine else None)
        self.register_parameter("bias", Parameter(np.zeros(channels, kind)) if affine else None)


class BatchNorm2d(_ChannelNorm):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias for each channel of images; inference only.

    Behind a convolution it becomes part of its weights.
    """

    spatial = 2

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        if not track_running_stats:
            raise ArgumentError(
                f"{type(self).__name__}: track_running_stats=False is not supported", why="inference only"
            )
        self.num_features, self.momentum = num_features, momentum
        kind = layer_dtype(type(self).__name__, dtype, device).numpy
        self.register_buffer("running_mean", np.zeros(num_features, kind))
        self.register_buffer("running_var", np.ones(num_features, kind))
        self.register_buffer("num_batches_tracked", np.array(0, np.int64))

    def forward(self, input: Any) -> Tensor:
        x = as_tensor(input)
        fits = x.ndim == self.spatial + 2 or (self.spatial == 1 and x.ndim == 2)
        if not fits or not equal(x.shape[1], self.num_features):
            raise ArgumentError(f"{type(self).__name__}: {x.type} has not {self.num_features} channels (dimension 1)")
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats=True"
        )


class BatchNorm1d(BatchNorm2d):
    """The same for sequences [batch, channels, length] and rows [batch, channels]."""

    spatial = 1


class GroupNorm(_ChannelNorm):
    """Groups of channels (dimension 1) with mean 0 and variance 1, then weight and bias for each channel."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__(num_channels, eps, affine, device, dtype)
        if num_groups < 1 or num_channels % num_groups:
            raise ArgumentError(f"GroupNorm: {num_groups} groups do not divide {num_channels} channels")
        self.num_groups, self.num_channels = num_groups, num_channels

    def forward(self, input: Any) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


class InstanceNorm2d(_ChannelNorm):
    """Each channel of each image with mean 0 and variance 1, then weight and bias for each channel."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__(num_features, eps, affine, device, dtype)
        if track_running_stats:
            raise ArgumentError(f"{type(self).__name__}: track_running_stats=True is not supported")
        self.num_features, self.momentum = num_features, momentum

    def forward(self, input: Any) -> Tensor:
        return F.instance_norm(input, weight=self.weight, bias=self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats=False"
        )


class InstanceNorm1d(InstanceNorm2d):
    """The same for sequences [batch, channels, length]."""


class _Pool(FunctionLayer):
    """A pool: its windows lie side by side unless a stride is given."""

    shown = "kernel_size stride padding"
    stride: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stride = self.kernel_size if self.stride is None else self.stride


_MAX_POOL = "kernel_size stride padding dilation return_indices ceil_mode"


class MaxPool1d(_Pool, function=F.max_pool1d, arguments=_MAX_POOL):
    shown = "kernel_size stride padding dilation ceil_mode"


class MaxPool2d(_Pool, function=F.max_pool2d, arguments=_MAX_POOL):
    shown = MaxPool1d.shown


class AvgPool1d(_Pool, function=F.avg_pool1d):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in self.shown.split():
            setattr(self, name, numbers("AvgPool1d", name, getattr(self, name), 1))


class AvgPool2d(_Pool, function=F.avg_pool2d): ...


class AdaptiveAvgPool1d(FunctionLayer, function=F.adaptive_avg_pool1d): ...


class AdaptiveAvgPool2d(FunctionLayer, function=F.adaptive_avg_pool2d): ...


class AdaptiveMaxPool1d(FunctionLayer, function=F.adaptive_max_pool1d):
    shown = "output_size"


class AdaptiveMaxPool2d(FunctionLayer, function=F.adaptive_max_pool2d):
    shown = "output_size"


_UPSAMPLE = "size scale_factor mode align_corners recompute_scale_factor"


class Upsample(FunctionLayer, function=F.interpolate, arguments=_UPSAMPLE):
    def extra_repr(self) -> str:
        what = f"scale_factor={self.scale_factor}" if self.scale_factor is not None else f"size={self.size}"
        return f"{what}, mode={self.mode!r}"


class Flatten(Module):
    """A range of dimensions as one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, input: Any) -> Tensor:
        return as_tensor(input).flatten(self.start_dim, self.end_dim)

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"
