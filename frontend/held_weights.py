"""Which weights a module has: plans copy them, and must be made anew when it gets others."""

from __future__ import annotations

from typing import Any

from monoplan.frontend.module import Module
from monoplan.frontend.parameter import Parameter, changes
from monoplan.frontend.tensor import Tensor


class HeldWeights:
    """The weights of a module as they are now. A change in place is not noticed."""

    def __init__(self, module: Module) -> None:
        self.module, self._changes, self._held = module, changes(), _held_by(module)

    def are_replaced(self) -> bool:
        """Whether the module has others since. Asked at every call: as a rule one comparison says no."""
        if (now := changes()) == self._changes:
            return False
        held = _held_by(self.module)
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            return True
        self._changes = now  # it was some other module's
        return False


def _held_by(module: Module) -> list[Any]:
    """All that plans copy: parameters and persistent buffers, each with what its values are in."""
    found: list[Any] = []
    for part in module.modules():
        for name, t in (*part._parameters.items(), *part._buffers.items()):
            if t is not None and name not in part._transient:
                found += [t, _values_in(t)]
    return found


def _values_in(t: Tensor) -> Any:
    """Another object when the tensor gets other values, but not when a deferred one is read."""
    return t._source or t._stored if isinstance(t, Parameter) else t._array
