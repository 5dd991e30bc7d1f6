"""The user's side: tensors, modules, layers and functions, and the tracer that turns forward into a graph."""
