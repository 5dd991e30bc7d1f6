"""Loading a module's tensors: all of them by a state dict, or one by its name; nothing changes unless it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from monoplan.frontend.parameter import Parameter, from_blob, note_change
from monoplan.frontend.tensor import Tensor
from monoplan.ir.arrays import plain_array
from monoplan.ir.errors import LoadError


class LoadsState:
    """The part of Module that takes values for its parameters and buffers."""

    state_dict: Callable[[], dict[str, Tensor]]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Copies tensors in by name; gives (missing, unexpected), which strict loading refuses.

        Nothing is changed unless every shape fits. A name whose tensor is shared and comes under another name
        (tied embeddings) is not missing.
        """
        own = self.state_dict()
        covered = {id(t) for k, t in own.items() if k in state}
        missing = [k for k, t in own.items() if k not in state and id(t) not in covered]
        unexpected = [k for k in state if k not in own]
        wrong = [text for k, t in own.items() if k in state and (text := _misfit(k, t, state[k]))]
        problems = []
        if strict and missing:
            problems.append("missing: " + ", ".join(missing))
        if strict and unexpected:
            problems.append("unexpected: " + ", ".join(unexpected))
        if wrong:
            problems.append("wrong shape: " + "; ".join(wrong))
        if problems:
            raise LoadError(f"the state dict does not fit {type(self).__name__}", why="; ".join(problems))
        for k, t in own.items():
            if k in state:
                _load(t, state[k])
        return missing, unexpected

    def load_parameter(self, name: str, data: Any) -> None:
        """Loads one parameter or buffer (its shard, if it is a sharded Parameter) from a full tensor."""
        t = self._state_tensor(name)
        if text := _misfit(name, t, data):
            raise LoadError(f"{text}")
        _load(t, data)

    def load_parameter_from_blob(self, name: str, blob: Any) -> None:
        """Loads one parameter from raw bytes of its own dtype and shape."""
        t = self._state_tensor(name)
        replace_values(t, from_blob(blob, t, name))

    def _state_tensor(self, name: str) -> Tensor:
        own = self.state_dict()
        if name not in own:
            raise LoadError(
                f"{type(self).__name__} has no parameter named {name}",
                fix="names are: " + ", ".join(list(own)[:8]) + (" …" if len(own) > 8 else ""),
            )
        return own[name]


def _misfit(name: str, t: Tensor, data: Any) -> str:
    shape = tuple(np.shape(data) if not isinstance(data, Tensor) else data.shape)
    wanted = t.full_shape if isinstance(t, Parameter) else t.shape
    return "" if shape == tuple(wanted) or shape == tuple(t.shape) else f"{name} is {list(wanted)}, got {list(shape)}"


def _load(t: Tensor, data: Any) -> None:
    if isinstance(t, Parameter):
        t.load(data)
    else:
        replace_values(t, (data.numpy() if isinstance(data, Tensor) else plain_array(data)).astype(t.dtype.numpy))


def replace_values(t: Tensor, array: np.ndarray[Any, Any]) -> None:
    """A tensor's values are another array from now on; plans that hold the old one will know."""
    t._array = array
    note_change()
