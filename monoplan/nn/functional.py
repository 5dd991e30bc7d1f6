"""monoplan.nn.functional: the functions of monoplan.frontend.functional under PyTorch's name."""

from typing import TYPE_CHECKING, Any

from monoplan.frontend import functional as _functional
from monoplan.frontend.arrays import *  # noqa: F403
from monoplan.frontend.functional import *  # noqa: F403
from monoplan.frontend.op_functions import *  # noqa: F403  (once more: type checkers do not follow __all__ += …)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The function of an op that was defined after this module was imported."""
        return getattr(_functional, name)


__all__ = _functional.__all__
