"""Every op of the registry, by family; importing this package fills the registry."""

from monoplan.ir.opdef import REGISTRY
from monoplan.ir.ops import (
    attention,
    collective,
    conv,
    elementwise,
    fused,
    index,
    linear,
    reduce,
    sampling,
    scan,
    shape,
)

__all__ = [
    "REGISTRY", "attention", "collective", "conv", "elementwise", "fused", "index", "linear", "reduce", "sampling",
    "scan", "shape",
]  # fmt: skip
