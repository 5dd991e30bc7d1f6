"""The user's side: tensors, modules, layers and functions, and the tracer that turns forward into a graph."""

from monoplan.frontend import op_functions  # Tensor has the methods that it makes, whoever imports it

__all__ = ["op_functions"]
