"""`torch.compile(model, backend="monoplan")`: every graph that Dynamo captures becomes one plan.

Parameters and buffers are recognised and packed once; they are read again when they have changed. Sizes that Dynamo
takes as symbols are symbols of the plan. Inference only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Interpreter
from torch.fx.traceback import preserve_node_meta

from monoplan.api import compile
from monoplan.ir.errors import ArgumentError
from monoplan.pytorch.program import as_array, from_torch


def monoplan(graph: Any, examples: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """A backend of torch.compile; `options` are those of compile()."""
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in examples):
        raise ArgumentError(
            "the backend monoplan is for inference",
            why="gradients are enabled, and the graph has tensors that need them",
            fix="call the model under torch.no_grad() or torch.inference_mode()",
        )
    return _Plan(graph, examples, options)


class _Plan:
    """What torch.compile calls: the tensors of a graph in, its results out."""

    def __init__(self, graph: Any, examples: Sequence[Any], options: dict[str, Any]) -> None:
        self.graph, self.options = graph, options
        places = [n for n in graph.graph.nodes if n.op == "placeholder"]
        state = [_is_state(n, x) for n, x in zip(places, examples, strict=True)]
        self.state = [i for i, found in enumerate(state) if found]
        self.tensors = [i for i, x in enumerate(examples) if isinstance(x, torch.Tensor) and not state[i]]
        shapes = {i: places[i].meta["example_value"].shape for i in self.tensors}
        self.dynamic = {
            f"x{i}": names
            for i, shape in shapes.items()
            if (names := {d: str(n) for d, n in enumerate(shape) if isinstance(n, torch.SymInt) and not _is_fixed(n)})
        }
        spots = {
            str(n): (i, d) for i, shape in shapes.items() for d, n in enumerate(shape) if isinstance(n, torch.SymInt)
        }
        self.sizes: dict[int, tuple[int, int]] = {}  # arguments that are sizes: of which tensor, and dimension
        for i, x in enumerate(examples):
            if isinstance(x, torch.Tensor):
                continue
            if str(x) not in spots:
                what = f"an argument {x!r} of type {type(x).__name__} in a torch graph is not covered"
                why = "a number that changes from call to call would be part of the plan"
                raise ArgumentError(what, why=why, fix="pass a tensor; with dynamic=False each number has its own plan")
            self.sizes[i] = spots[str(x)]
        self.versions: list[tuple[int, int]] = []
        self.plan: Any = None  # made by the first call: torch.export can't run while Dynamo does

    def _build(self, values: Sequence[Any]) -> None:
        self.versions = self._versions(values)
        module = _Captured(self, values)
        examples = {f"x{i}": _example(values[i], self.dynamic.get(f"x{i}", {})) for i in self.tensors}
        with torch.no_grad():
            captured = from_torch(module, dynamic=self.dynamic or None, **examples)
        self.plan = compile(captured, **self.options)

    def _versions(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        """Where the weights lie and how often they were changed."""
        given = (values[i] for i in self.state)
        return [(x.data_ptr(), -1 if x.is_inference() else x._version) for x in given]

    def __call__(self, *values: Any) -> Any:
        if self.plan is None or self._versions(values) != self.versions:
            self._build(values)
        results = self.plan(**{f"x{i}": _given(values[i]) for i in self.tensors})
        return tuple(_as_torch(x) for x in results)


def _is_state(node: Any, example: Any) -> bool:
    named = any(kind in str(node.target) for kind in ("_parameters_", "_buffers_"))
    return isinstance(example, torch.nn.Parameter) or (named and isinstance(example, torch.Tensor))


def _is_fixed(size: Any) -> bool:
    return bool(size.node.expr.is_number)


def _example(tensor: Any, dynamic: dict[int, str]) -> Any:
    """A tensor for the capture: torch.export takes sizes of 0 and 1 as fixed, so those that change are 2 or more."""
    sizes = [max(2, n) if d in dynamic else n for d, n in enumerate(tensor.shape)]
    return tensor.detach() if list(tensor.shape) == sizes else tensor.new_zeros(sizes)


class _Captured(torch.nn.Module):  # type: ignore[misc]
    """Dynamo's graph as a module with its own parameters, for torch.export."""

    def __init__(self, plan: _Plan, values: Sequence[Any]) -> None:
        super().__init__()
        for i in plan.state:
            self.register_buffer(f"w{i}", values[i].detach())
        self.eval()
        plan.graph.eval()

        def forward(*tensors: Any, **named: Any) -> Any:
            """The graph's results; nodes keep the lines of the user's files."""
            values: list[Any] = [None] * (len(plan.state) + len(plan.tensors) + len(plan.sizes))
            for i in plan.state:
                values[i] = getattr(self, f"w{i}")
            for i, x in zip(plan.tensors, (*tensors, *named.values()), strict=True):
                values[i] = x
            for i, (tensor, dim) in plan.sizes.items():
                values[i] = values[tensor].shape[dim]
            with preserve_node_meta():
                return tuple(Interpreter(plan.graph).run(*values))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(f"x{i}", kind) for i in plan.tensors]
        )
        self.forward = forward


def _given(x: Any) -> Any:
    """A tensor that a plan can take as it is, or its contents as an array."""
    plain = type(x) is torch.Tensor and x.is_cpu and not x.requires_grad and not x.is_neg()
    return x if plain and x.dtype is not torch.bfloat16 else as_array(x)


def _as_torch(array: Any) -> Any:
    if array.dtype.kind not in "fiub":  # bfloat16; its name takes ten times as long
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
