"""monoplan.nn.functional: the functions of monoplan.frontend.functional under PyTorch's name."""

from monoplan.frontend import functional as _functional
from monoplan.frontend.functional import *  # noqa: F403

__all__ = _functional.__all__
