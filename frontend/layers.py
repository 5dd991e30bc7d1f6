"""Layers with PyTorch's names, state-dict keys, initial values and printed form."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.functional import RopeAlgo
from monoplan.frontend.module import Module
from monoplan.frontend.op_functions import write
from monoplan.frontend.parameter import Parameter, check_size, layer_dtype, linear_bound, normal, uniform
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.frontend.windows import numbers
from monoplan.ir.dims import Dim, equal
from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import Array, DType

# Low-rank products that layers add to their own, by the layer's id.
_ADDED: ContextVar[Mapping[int, tuple[Any, Any]]] = ContextVar("_ADDED", default=MappingProxyType({}))


@contextlib.contextmanager
def with_low_rank(matrices: Mapping[Linear, tuple[Any, Any]]) -> Iterator[None]:
    """Inside, these layers also add input @ a.T @ b.T: a is [rank, in_features], b [out_features, rank]."""
    token = _ADDED.set({id(layer): both for layer, both in matrices.items()})
    try:
        yield
    finally:
        _ADDED.reset(token)


class Linear(Module):
    """input @ weight.T + bias (+ residual), with weight [out_features, in_features]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = "f32", device: Any = None
    ) -> None:
        super().__init__()
        kind = layer_dtype("Linear", dtype, device, in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        bound = linear_bound(in_features)
        self.weight = Parameter(uniform((out_features, in_features), bound, kind))
        self.register_parameter("bias", Parameter(uniform((out_features,), bound, kind)) if bias else None)

    def forward(self, input: Any, residual: Any = None) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        if (added := _ADDED.get().get(id(self))) is not None:
            y = y + F.linear(F.linear(input, added[0]), added[1])
        return y if residual is None else y + residual

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Embedding(Module):
    """Rows of weight [num_embeddings, embedding_dim] by id; the row of padding_idx starts as zeros."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: Any = "f32",
        device: Any = None,
    ) -> None:
        super().__init__()
        kind = layer_dtype("Embedding", dtype, device, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ArgumentError(f"Embedding: padding_idx {padding_idx} is not one of {num_embeddings} rows")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        values = normal((num_embeddings, embedding_dim), kind)
        if self.padding_idx is not None:
            values[self.padding_idx] = 0
        self.weight = Parameter(values)

    def forward(self, input: Any) -> Tensor:
        return F.embedding(input, self.weight)

    def extra_repr(self) -> str:
        tail = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}{tail}"


def _shape(name: str, normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = normalized_shape if isinstance(normalized_shape, tuple | list) else (normalized_shape,)
    for n in sizes:
        check_size(name, normalized_shape=n)
    return tuple(sizes)


class RMSNorm(Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the trailing dimensions `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        dtype: Any = "f32",
        device: Any = None,
        *,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        kind = layer_dtype("RMSNorm", dtype, device).numpy
        self.normalized_shape, self.eps = _shape("RMSNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        weight = Parameter(np.ones(self.normalized_shape, kind)) if elementwise_affine else None
        self.register_parameter("weight", weight)

    def forward(self, x: Any) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, over the trailing dimensions `normalized_shape`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = "f32",
        device: Any = None,
    ) -> None:
        super().__init__()
        kind = layer_dtype("LayerNorm", dtype, device).numpy
        self.normalized_shape, self.eps = _shape("LayerNorm", normalized_shape), float(eps)
        self.elementwise_affine = elementwise_affine
        weight = Parameter(np.ones(self.normalized_shape, kind)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        shift = Parameter(np.zeros(self.normalized_shape, kind)) if elementwise_affine and bias else None
        self.register_parameter("bias", shift)

    def forward(self, x: Any) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class Dropout(Module):
    """The input itself: inference drops nothing."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ArgumentError(f"Dropout: p must be a probability, got {p}")
        self.p, self.inplace = p, inplace

    def forward(self, x: Any) -> Tensor:
        return as_tensor(x)

    def extra_repr(self) -> str:
        return f"p={self.p}, inplace={self.inplace}"


class Identity(Module):
    """The input itself; arguments of the constructor are taken and ignored, as in PyTorch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        return x


class Sequential(Module):
    """Modules applied one after the other; a dict gives them names."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        named = modules[0].items() if len(modules) == 1 and isinstance(modules[0], Mapping) else None
        for name, module in enumerate(modules) if named is None else named:
            self.add_module(str(name), module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)
        return x

    def append(self, module: Module) -> Sequential:
        self.add_module(str(len(self._modules)), module)
        return self

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Sequential(dict(list(self._modules.items())[index]))
        return list(self._modules.values())[index]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


# Where a token stands: rotary embedding (RoPE), learned and sinusoidal positions.


class RoPE(Module):
    """Rotates pairs of a head's dimensions by angles that grow with the position.

    The tables `sin_cache` and `cos_cache`, [max_seq_len, rotary_dim / 2], are buffers that are not saved.
    They are computed in float64 from theta, or from `inv_freq` [rotary_dim / 2] (for scaled variants; `scale`
    multiplies sine and cosine), or taken as they are from `tables` (sine, cosine).
    """

    Algo = RopeAlgo

    def __init__(
        self,
        head_dim: int,
        max_seq_len: int,
        theta: float = 10000.0,
        algo: RopeAlgo | str = RopeAlgo.GPT_J,
        dtype: Any = "f32",
        device: Any = None,
        *,
        rotary_dim: int | None = None,
        inv_freq: Any = None,
        scale: float = 1.0,
        tables: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__()
        kind = layer_dtype("RoPE", dtype, device, head_dim=head_dim, max_seq_len=max_seq_len)
        rotated = head_dim if rotary_dim is None else rotary_dim
        if head_dim % 2:
            raise ArgumentError(f"RoPE: head_dim must be even, since dimensions rotate in pairs; got {head_dim}")
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise ArgumentError(f"RoPE: rotary_dim must be even and between 2 and {head_dim}, got {rotated}")
        self.head_dim, self.max_seq_len, self.theta = head_dim, max_seq_len, float(theta)
        self.rotary_dim, self.algo = rotated, RopeAlgo(algo)
        sin, cos = self._make_tables(kind, inv_freq, scale, tables)
        self.register_buffer("sin_cache", sin, persistent=False)
        self.register_buffer("cos_cache", cos, persistent=False)

    def _make_tables(self, dtype: DType, inv_freq: Any, scale: float, tables: tuple[Any, Any] | None) -> list[Array]:
        half = self.rotary_dim // 2
        if tables is not None:
            made = [as_tensor(t).numpy() for t in tables]
            for t in made:
                if t.ndim != 2 or t.shape[0] < self.max_seq_len or t.shape[1] != half or t.shape != made[0].shape:
                    raise ArgumentError(
                        f"RoPE: tables must be [{self.max_seq_len}, {half}] (max_seq_len, rotary_dim / 2), "
                        f"got {list(t.shape)}"
                    )
        else:
            if inv_freq is None:
                inv_freq = self.theta ** (-2.0 * np.arange(half, dtype=np.float64) / self.rotary_dim)
            frequencies = np.asarray(inv_freq, np.float64)
            if frequencies.shape != (half,):
                got = list(frequencies.shape)
                raise ArgumentError(f"RoPE: inv_freq must be [{half}] (rotary_dim / 2), got {got}")
            angles = np.arange(self.max_seq_len, dtype=np.float64)[:, None] * frequencies
            made = [np.sin(angles) * scale, np.cos(angles) * scale]
        return [t.astype(dtype.numpy) for t in made]

    def forward(self, x: Any, pos: Any, in_place: Any = False) -> Tensor:
        """forward(x, pos, in_place=False), or forward(y, x, pos), which writes into y.

        x is [seq, heads, head_dim] or [batch, seq, heads, head_dim]; pos integers [seq] or [batch, seq].
        """
        if isinstance(in_place, bool):
            rotated = self._rotate(x, pos)
            return write(rotated, x if in_place else None)
        return write(self._rotate(pos, in_place), x)

    def _rotate(self, x: Any, pos: Any) -> Tensor:
        t = as_tensor(x)
        if t.ndim not in (3, 4) or t.shape[-1] != self.head_dim:
            raise ArgumentError(
                f"RoPE: x must be [(batch,) seq, heads, head_dim] with head_dim {self.head_dim}, got {t.type}"
            )
        return F.rope(t, pos, self.sin_cache, self.cos_cache, self.algo)

    def extra_repr(self) -> str:
        part = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return (
            f"head_dim={self.head_dim}, max_seq_len={self.max_seq_len}, theta={self.theta}, algo={self.algo.name}{part}"
        )


class PositionalEmbedding(Module):
    """A vector for each position, [max_len, embed_dim]: learned, or `PositionalEmbedding.sinusoidal`."""

    def __init__(self, max_len: int, embed_dim: int, dtype: Any = "f32", device: Any = None) -> None:
        super().__init__()
        kind = layer_dtype("PositionalEmbedding", dtype, device, max_len=max_len, embed_dim=embed_dim)
        self.max_len, self.embed_dim, self.learned = max_len, embed_dim, True
        self.weight = Parameter(normal((max_len, embed_dim), kind))

    @classmethod
    def sinusoidal(cls, max_len: int, embed_dim: int, dtype: Any = "f32", device: Any = None) -> PositionalEmbedding:
        """sin(pos / 10000**(2i / dim)) at 2i, the cosine at 2i + 1; a buffer that is not saved."""
        kind = layer_dtype("PositionalEmbedding", dtype, device, max_len=max_len, embed_dim=embed_dim)
        made = cls.__new__(cls)
        Module.__init__(made)
        made.max_len, made.embed_dim, made.learned = max_len, embed_dim, False
        column = np.arange(embed_dim)
        angles = np.arange(max_len)[:, None] / 10000.0 ** (2 * (column // 2) / embed_dim)
        values = np.where(column % 2 == 0, np.sin(angles), np.cos(angles))
        made.register_buffer("weight", values.astype(kind.numpy), persistent=False)
        return made

    def forward(self, seq_len: Dim, offset: Dim = 0) -> Tensor:
        """The vectors of positions offset, offset + 1, …: [seq_len, embed_dim]."""
        if isinstance(seq_len, int) and isinstance(offset, int) and not 0 <= offset <= self.max_len - seq_len:
            raise ArgumentError(
                f"PositionalEmbedding: {seq_len} positions from {offset} on exceed max_len {self.max_len}"
            )
        return self.weight.narrow(0, offset, seq_len)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        kind = "" if self.learned else ", sinusoidal"
        return f"max_len={self.max_len}, embed_dim={self.embed_dim}{kind}"


# Activations.


class FunctionLayer(Module):
    """A function as a layer: the constructor takes its arguments behind the input, with their defaults.

    `arguments` are their names where the constructor takes fewer, or in another order; `shown` those that are printed.
    """

    function: Callable[..., Tensor]
    shown = ""
    __signature__: inspect.Signature

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None, arguments: str = "") -> None:
        super().__init_subclass__()
        if function is None:  # a user's subclass of one of these
            return
        _, *options = inspect.signature(function).parameters.values()
        known = {p.name: p for p in options if p.kind is p.POSITIONAL_OR_KEYWORD}
        cls.__signature__ = inspect.Signature([known[name] for name in arguments.split() or known])
        cls.__doc__, cls.function = function.__doc__, staticmethod(function)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        try:
            bound = self.__signature__.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}{self.__signature__}: {error}") from None
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            setattr(self, name, value)

    def forward(self, input: Any) -> Tensor:
        return self.function(input, **{name: getattr(self, name) for name in self.__signature__.parameters})

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in self.shown.split() or self.__signature__.parameters}
        return ", ".join(f"{n}={v!r}" for n, v in options.items() if n != "inplace" or v)


class CELU(FunctionLayer, function=F.celu): ...


class ELU(FunctionLayer, function=F.elu): ...


class GELU(FunctionLayer, function=F.gelu): ...


class GLU(FunctionLayer, function=F.glu): ...


class Hardshrink(FunctionLayer, function=F.hardshrink): ...


class Hardsigmoid(FunctionLayer, function=F.hardsigmoid): ...


class Hardswish(FunctionLayer, function=F.hardswish): ...


class Hardtanh(FunctionLayer, function=F.hardtanh): ...


class LeakyReLU(FunctionLayer, function=F.leaky_relu): ...


class LogSigmoid(FunctionLayer, function=F.logsigmoid): ...


class LogSoftmax(FunctionLayer, function=F.log_softmax): ...


class Mish(FunctionLayer, function=F.mish): ...


class ReLU(FunctionLayer, function=F.relu): ...


class ReLU6(FunctionLayer, function=F.relu6): ...


class SELU(FunctionLayer, function=F.selu): ...


class SiLU(FunctionLayer, function=F.silu): ...


class Sigmoid(FunctionLayer, function=F.sigmoid): ...


class Softmax(FunctionLayer, function=F.softmax): ...


class Softmin(FunctionLayer, function=F.softmin): ...


class Softplus(FunctionLayer, function=F.softplus): ...


class Softshrink(FunctionLayer, function=F.softshrink): ...


class Softsign(FunctionLayer, function=F.softsign): ...


class Tanh(FunctionLayer, function=F.tanh): ...


class Tanhshrink(FunctionLayer, function=F.tanhshrink): ...


class Threshold(FunctionLayer, function=F.threshold): ...


class PReLU(Module):
    """The input, weight times it where it is negative; one weight, or one for each channel (dimension 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = "f32") -> None:
        super().__init__()
        kind = layer_dtype("PReLU", dtype, device, num_parameters=num_parameters)
        self.num_parameters, self.init = num_parameters, float(init)
        self.weight = Parameter(np.full(num_parameters, init, kind.numpy))

    def forward(self, x: Any) -> Tensor:
        return F.prelu(x, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


# Windows over images and sequences: convolutions, pools and resampling; norms of their channels.


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


__all__ = [
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d", "AvgPool1d", "AvgPool2d",
    "BatchNorm1d", "BatchNorm2d", "CELU", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Dropout", "ELU",
    "Embedding", "Flatten", "GELU", "GLU", "GroupNorm", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh",
    "Identity", "InstanceNorm1d", "InstanceNorm2d", "LayerNorm", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax",
    "MaxPool1d", "MaxPool2d", "Mish", "PositionalEmbedding", "PReLU", "ReLU", "ReLU6", "RMSNorm", "RoPE", "SELU",
    "Sequential", "Sigmoid", "SiLU", "Softmax", "Softmin", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
    "Threshold", "Upsample",
]  # fmt: skip
