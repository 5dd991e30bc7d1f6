"""Activations as layers, with PyTorch's names, arguments and printed form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, layer_dtype
from monoplan.frontend.tensor import Tensor


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


__all__ = [
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "LogSoftmax", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmin", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
]  # fmt: skip
