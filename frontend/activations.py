"""Activations as layers, with PyTorch's names, arguments and printed form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, check_device, check_size, checked_dtype
from monoplan.frontend.tensor import Tensor


class Activation(Module):
    """A function as a layer: the constructor takes its arguments behind the input, with their defaults."""

    function: Callable[..., Tensor]
    __signature__: inspect.Signature

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None) -> None:
        super().__init_subclass__()
        if function is None:  # a user's subclass of one of these
            return
        _, *options = inspect.signature(function).parameters.values()
        cls.__signature__ = inspect.Signature([p for p in options if p.kind is p.POSITIONAL_OR_KEYWORD])
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

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__signature__.parameters}

    def forward(self, x: Any) -> Tensor:
        return self.function(x, **self._options())

    def extra_repr(self) -> str:
        return ", ".join(f"{n}={v!r}" for n, v in self._options().items() if n != "inplace" or v)


class CELU(Activation, function=F.celu): ...


class ELU(Activation, function=F.elu): ...


class GELU(Activation, function=F.gelu): ...


class GLU(Activation, function=F.glu): ...


class Hardshrink(Activation, function=F.hardshrink): ...


class Hardsigmoid(Activation, function=F.hardsigmoid): ...


class Hardswish(Activation, function=F.hardswish): ...


class Hardtanh(Activation, function=F.hardtanh): ...


class LeakyReLU(Activation, function=F.leaky_relu): ...


class LogSigmoid(Activation, function=F.logsigmoid): ...


class LogSoftmax(Activation, function=F.log_softmax): ...


class Mish(Activation, function=F.mish): ...


class ReLU(Activation, function=F.relu): ...


class ReLU6(Activation, function=F.relu6): ...


class SELU(Activation, function=F.selu): ...


class SiLU(Activation, function=F.silu): ...


class Sigmoid(Activation, function=F.sigmoid): ...


class Softmax(Activation, function=F.softmax): ...


class Softmin(Activation, function=F.softmin): ...


class Softplus(Activation, function=F.softplus): ...


class Softshrink(Activation, function=F.softshrink): ...


class Softsign(Activation, function=F.softsign): ...


class Tanh(Activation, function=F.tanh): ...


class Tanhshrink(Activation, function=F.tanhshrink): ...


class Threshold(Activation, function=F.threshold): ...


class PReLU(Module):
    """The input, weight times it where it is negative; one weight, or one for each channel (dimension 1)."""

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: Any = None, dtype: Any = "f32") -> None:
        super().__init__()
        check_size("PReLU", num_parameters=num_parameters)
        check_device("PReLU", device)
        self.num_parameters, self.init = num_parameters, float(init)
        self.weight = Parameter(np.full(num_parameters, init, checked_dtype("PReLU", dtype).numpy))

    def forward(self, x: Any) -> Tensor:
        return F.prelu(x, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"


__all__ = [
    "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid",
    "LogSoftmax", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmin", "Softplus",
    "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold",
]  # fmt: skip
