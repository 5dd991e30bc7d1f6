"""Recurrent layers with PyTorch's names, state-dict keys and formulas, as scans over their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monoplan.frontend import functional as F
from monoplan.frontend.context import user_location
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, check_size, layer_dtype, linear_bound, uniform
from monoplan.frontend.scan import scan
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.dims import same_dims
from monoplan.ir.errors import ArgumentError

Weights = tuple[Any, Any, Any, Any]  # of the input and of the state, and their biases, or None


def _gru_step(x: Tensor, h: Tensor, w: Weights) -> Tensor:
    """The next state of a GRU: reset, update and new gate."""
    xr, xz, xn = F.linear(x, w[0], w[2]).chunk(3, -1)
    hr, hz, hn = F.linear(h, w[1], w[3]).chunk(3, -1)
    n = F.tanh(xn + F.sigmoid(xr + hr) * hn)
    z = F.sigmoid(xz + hz)
    return n + z * (h - n)


def _lstm_step(x: Tensor, state: tuple[Tensor, Tensor], w: Weights) -> tuple[Tensor, Tensor]:
    """The next state of an LSTM: input, forget, cell and output gate."""
    h, c = state
    i, f, g, o = (F.linear(x, w[0], w[2]) + F.linear(h, w[1], w[3])).chunk(4, -1)
    c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
    return F.sigmoid(o) * F.tanh(c), c


class _Recurrent(Module):
    """Weights of one or more cells; `gates` of them in a row."""

    gates = 0

    def __init__(self, input_size: int, hidden_size: int, bias: bool, dtype: Any, device: Any) -> None:
        super().__init__()
        sizes = {"input_size": input_size, "hidden_size": hidden_size}
        self._dtype = layer_dtype(type(self).__name__, dtype, device, **sizes)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bool(bias)

    def _add(self, inputs: int, suffix: str = "") -> None:
        bound, rows = linear_bound(self.hidden_size), self.gates * self.hidden_size
        for name, shape in (("weight_ih", (rows, inputs)), ("weight_hh", (rows, self.hidden_size))):
            self.register_parameter(name + suffix, Parameter(uniform(shape, bound, self._dtype)))
        for name in ("bias_ih", "bias_hh"):
            value = Parameter(uniform((rows,), bound, self._dtype)) if self.bias else None
            if value is not None or not suffix:
                self.register_parameter(name + suffix, value)

    def _weights(self, suffix: str = "") -> Weights:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return tuple(getattr(self, name + suffix, None) for name in names)  # type: ignore[return-value]

    def _checked(self, input: Any, ranks: Sequence[int]) -> Tensor:
        x = as_tensor(input)
        if x.ndim not in ranks or x.shape[-1] != self.input_size:
            wanted = " or ".join(f"{n} dimensions" for n in ranks)
            what = f"{type(self).__name__}: the input is {x.type}, but it needs {wanted}, the last of {self.input_size}"
            raise ArgumentError(what, where=user_location())
        return x

    def _zeros(self, x: Tensor, *lead: Any) -> Tensor:
        return F.zeros((*lead, self.hidden_size), dtype=x.dtype)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class _Cell(_Recurrent):
    """One cell."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, dtype: Any = "f32", device: Any = None
    ) -> None:
        super().__init__(input_size, hidden_size, bias, dtype, device)
        self._add(input_size)


class GRUCell(_Cell):
    """One step of a GRU: the next state [batch, hidden_size] from an input [batch, input_size] and a state."""

    gates = 3

    def forward(self, input: Any, hx: Any = None) -> Tensor:
        x = self._checked(input, (1, 2))
        return _gru_step(x, self._zeros(x, *x.shape[:-1]) if hx is None else as_tensor(hx), self._weights())


class LSTMCell(_Cell):
    """One step of an LSTM: the next h and c [batch, hidden_size] from an input [batch, input_size] and (h, c)."""

    gates = 4

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Tensor]:
        x = self._checked(input, (1, 2))
        h, c = (self._zeros(x, *x.shape[:-1]),) * 2 if hx is None else map(as_tensor, hx)
        return _lstm_step(x, (h, c), self._weights())


class _Stack(_Recurrent):
    """Layers of cells over a sequence: [seq, batch, input_size], with batch_first [batch, seq, …], or without batch."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = "f32",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, dtype, device)
        check_size(type(self).__name__, num_layers=num_layers)
        if proj_size:
            raise ArgumentError(f"{type(self).__name__}: proj_size={proj_size} is not supported", fix="use proj_size=0")
        self.num_layers, self.batch_first, self.bidirectional = num_layers, bool(batch_first), bool(bidirectional)
        self.dropout = float(dropout)  # of training, which a plan does not do
        self._suffixes = ("", "_reverse") if bidirectional else ("",)
        for layer in range(num_layers):
            for suffix in self._suffixes:
                inputs = input_size if layer == 0 else hidden_size * len(self._suffixes)
                self._add(inputs, f"_l{layer}{suffix}")

    def _run(self, input: Any, states: Sequence[Any] | None, count: int) -> tuple[Tensor, list[Tensor]]:
        """The outputs of the last layer, and the last states of all cells, stacked; a cell has `count` of them."""
        x = self._checked(input, (2, 3))
        batched = x.ndim == 3
        x = x.transpose(0, 1) if batched and self.batch_first else x
        total = self.num_layers * len(self._suffixes)
        shape = (total, *x.shape[1:-1], self.hidden_size)
        given = [F.zeros(shape, dtype=x.dtype)] * count if states is None else list(map(as_tensor, states))
        for h in given:
            if not same_dims(h.shape, shape):
                what = f"{type(self).__name__}: a first state is {h.type}, but {list(shape)} is needed"
                raise ArgumentError(what, where=user_location())
        final: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in self._suffixes:
                first = tuple(h[len(final)] for h in given)
                last, y = scan(self._cell(f"_l{layer}{suffix}"), first, x, reverse=bool(suffix))
                final.append(list(last))
                outputs.append(y)
            x = outputs[0] if len(outputs) == 1 else F.cat(outputs, -1)
        x = x.transpose(0, 1) if batched and self.batch_first else x
        return x, [F.stack([s[i] for s in final], 0) for i in range(count)]

    def _cell(self, suffix: str) -> Any:
        raise NotImplementedError

    def extra_repr(self) -> str:
        more = [] if self.num_layers == 1 else [f"num_layers={self.num_layers}"]
        more += [] if self.bias else ["bias=False"]
        more += [f"{n}=True" for n in ("batch_first", "bidirectional") if getattr(self, n)]
        return ", ".join([str(self.input_size), str(self.hidden_size), *more])


class GRU(_Stack):
    """Gated recurrent units over a sequence: output and h_n from input and h_0 [cells, batch, hidden_size]."""

    gates = 3

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Tensor]:
        output, (h,) = self._run(input, None if hx is None else [hx], 1)
        return output, h

    def _cell(self, suffix: str) -> Any:
        weights = self._weights(suffix)

        def cell(state: tuple[Tensor], x: Tensor) -> tuple[tuple[Tensor], Tensor]:
            h = _gru_step(x, state[0], weights)
            return (h,), h

        return cell


class LSTM(_Stack):
    """Long short-term memory over a sequence: output and (h_n, c_n) from input and (h_0, c_0)."""

    gates = 4

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (h, c) = self._run(input, hx, 2)
        return output, (h, c)

    def _cell(self, suffix: str) -> Any:
        weights = self._weights(suffix)

        def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            h, c = _lstm_step(x, state, weights)
            return (h, c), h

        return cell
