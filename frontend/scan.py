"""scan: a cell that runs over the slices of tensors, eager as a Python loop, traced as one op with a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from monoplan.frontend.context import current, user_location
from monoplan.frontend.module import Module
from monoplan.frontend.pytree import Tree, flatten, unflatten
from monoplan.frontend.tensor import Tensor, as_tensor, full_axis
from monoplan.ir.dims import Dim, Expr, bounds, equal
from monoplan.ir.errors import ArgumentError, TypeRuleError
from monoplan.ir.graph import Loc
from monoplan.ir.types import TensorType

Cell = Callable[[Any, Any], tuple[Any, Any]]
Leaves = list[tuple[str, Tensor]]


def scan(
    cell: Cell, state: Any, xs: Any = None, *, length: Any = None, dim: int = 0, reverse: bool = False
) -> tuple[Any, Any]:
    """Runs `state, y = cell(state, x)` for each slice x of xs along `dim`; gives the last state and all y, stacked.

    `state`, `xs` and `y` are tensors or nested dicts, lists and tuples of tensors. The state keeps its structure,
    shapes and element types from step to step. Without xs, `length` says how many steps there are, and the cell gets
    None; the length may be symbolic. With `reverse` the last slice comes first; each y lies where its x did.

    Compiled, a scan is one loop of the plan: neither the plan nor its build time grows with the length.
    """
    states, state_tree = _leaves(state, "state")
    slices, x_tree = _leaves(xs, "xs")
    for name, x in slices:
        if x.ndim == 0:
            raise ArgumentError(f"scan: {name} is {x.type}: it has no dimension to slice", where=user_location())
    axes = [full_axis(dim, x.ndim) for _, x in slices]
    count = _length(slices, axes, length)
    moved = [(n, _to_front(x, axis)) for (n, x), axis in zip(slices, axes, strict=True)]
    run = _Scan(cell, state_tree, x_tree, count, bool(reverse))
    final, ys, y_tree = run.eager(states, moved) if current() is None else run.traced(states, moved)
    back = [_from_front(y, dim) for y in ys]
    return unflatten(state_tree, final), unflatten(y_tree, back)


def _leaves(x: Any, name: str) -> tuple[Leaves, Tree]:
    """The tensors of a nested value by their names."""
    found, tree = flatten(x, name)
    for leaf_name, leaf in found:
        if not isinstance(leaf, Tensor | np.ndarray | np.generic | int | float):
            raise ArgumentError(
                f"scan: {leaf_name} is a {type(leaf).__name__}, not a tensor",
                where=user_location(),
                fix="let the cell capture what is no tensor: it is the same in all steps",
            )
    return [(n, as_tensor(leaf)) for n, leaf in found], tree


def _length(slices: Leaves, axes: Sequence[int], length: Any) -> Dim:
    """The number of steps: that of the slices, which must agree with each other and with `length`."""
    where = user_location()
    if length is not None:
        length = length.__index__() if isinstance(length, np.integer) else length
        if isinstance(length, bool) or not isinstance(length, int | Expr) or (isinstance(length, int) and length < 0):
            raise ArgumentError(f"scan: length={length!r} is not a number of steps", where=where)
        low, _ = bounds(length)
        if not slices and (low is None or low < 0):
            raise ArgumentError(
                f"scan: length={length} is negative for some sizes",
                where=where,
                fix="scan over a tensor of that length: its size is checked at each call",
            )
    elif not slices:
        raise ArgumentError("scan: there are neither xs nor a length", where=where, fix="give length=…")
    sizes: list[tuple[str, Dim]] = [(n, x.shape[axis]) for (n, x), axis in zip(slices, axes, strict=True)]
    if length is not None:
        sizes.insert(0, ("length", length))
    first, count = sizes[0]
    for name, size in sizes[1:]:
        if not equal(size, count):
            fix = "give sizes that are always equal the same name in the specs" if isinstance(size, Expr) else ""
            what = f"scan: {name} has {size} slices, but {first} is {count}"
            raise ArgumentError(what if first == "length" else f"{what} long", where=where, fix=fix)
    return count


def _to_front(x: Tensor, axis: int) -> Tensor:
    return x if axis == 0 else x.permute((axis, *(i for i in range(x.ndim) if i != axis)))


def _from_front(y: Tensor, dim: int) -> Tensor:
    """A stacked y with its first dimension at `dim`, or as far back as it can be."""
    at = min(dim, y.ndim - 1) if dim >= 0 else max(y.ndim + dim, 0)
    order = [*range(1, y.ndim)]
    order.insert(at, 0)
    return y if at == 0 else y.permute(tuple(order))


class _Scan:
    """One call of scan: its cell, and the structures of its state and slices."""

    def __init__(self, cell: Cell, state: Tree, xs: Tree, length: Dim, reverse: bool) -> None:
        self.cell, self.state, self.xs, self.length, self.reverse = cell, state, xs, length, reverse

    def step(self, states: Leaves, slices: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], Tree]:
        """The state and y that the cell makes of a state and a slice, as leaves."""
        result = self.cell(unflatten(self.state, [t for _, t in states]), unflatten(self.xs, slices))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeRuleError(
                f"scan: the cell returned a {type(result).__name__}, not a state and a y",
                where=_place(self.cell),
                fix="return state, y (y may be None)",
            )
        after, tree = _leaves(result[0], "state")
        if tree != self.state:
            raise TypeRuleError(
                "scan: the cell returned a state of another structure than it got",
                where=_place(self.cell),
                why=f"it got {_structure(self.state)} and returned {_structure(tree)}",
            )
        for (name, old), (_, new) in zip(states, after, strict=True):
            if old.type != new.type:
                raise _changed(name, old.type, new.type, _place(self.cell))
        ys, y_tree = _leaves(result[1], "y")
        return [t for _, t in after], [t for _, t in ys], y_tree

    def eager(self, states: Leaves, xs: Leaves) -> tuple[list[Tensor], list[Tensor], Tree]:
        """A Python loop. Of no steps, one on zeros says what y would be."""
        length = self.length.__index__()
        order = range(length - 1, -1, -1) if self.reverse else range(length)
        names, kept = [n for n, _ in states], [t for _, t in states]
        arrays = [x.numpy() for _, x in xs]
        columns: dict[int, list[Tensor]] = {}
        tree: Tree | None = None
        for i in order:
            now = list(zip(names, kept, strict=True))
            kept, ys, found = self.step(now, [Tensor(a[i, ...]) for a in arrays])
            if tree is not None and (
                found != tree or [y.type for y in ys] != [y.type for y in next(iter(columns.values()))]
            ):
                raise TypeRuleError(
                    "scan: y has another structure or type than in the step before", where=_place(self.cell)
                )
            columns[i], tree = ys, found
        if tree is None:
            zeros = [Tensor(np.zeros(a.shape[1:], a.dtype)) for a in arrays]
            _, ys, tree = self.step(states, zeros)
            return kept, [Tensor(np.zeros((0, *y.numpy().shape), y.numpy().dtype)) for y in ys], tree
        count = len(next(iter(columns.values())))
        return kept, [Tensor(np.stack([columns[i][j].numpy() for i in range(length)])) for j in range(count)], tree

    def traced(self, states: Leaves, xs: Leaves) -> tuple[list[Tensor], list[Tensor], Tree]:
        """One op, whose body is what the cell does to a state and a slice."""
        tracing = current()
        assert tracing is not None
        attrs = {"length": self.length, "state": len(states), "slices": len(xs), "reverse": self.reverse}
        operands = [tracing.value_of(t) for _, t in (*states, *xs)]
        types = [(n, t.type) for n, t in states]
        types += [(n, t.type.with_shape(t.shape[1:])) for n, t in xs]
        trees: list[Tree] = []

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            named = [(n, t) for (n, _), t in zip(states, inputs, strict=False)]
            after, ys, tree = self.step(named, inputs[len(states) :])
            trees.append(tree)
            return [*after, *ys]

        results = list(map(Tensor.traced, tracing.emit_loop("scan", operands, attrs, types, run)))
        return results[: len(states)], results[len(states) :], trees[0]


def _changed(name: str, old: TensorType, new: TensorType, where: Loc) -> TypeRuleError:
    what = "element type" if old.dtype != new.dtype else "shape"
    fix = f"cast it: .to({str(old.dtype)!r}), or start with {new.dtype}" if what == "element type" else ""
    return TypeRuleError(
        f"scan: the cell changes the {what} of {name}: {old} before the step, {new} after it",
        where=where,
        why="all steps run the same code, so the state keeps its types",
        fix=fix or "start with a state of the shape that the cell returns",
    )


def _place(cell: Cell) -> Loc:
    """Where a cell is written: none of its lines is at work any more."""
    if isinstance(cell, Module):
        return cell.forward_place()
    code, here = getattr(cell, "__code__", None), user_location()
    return here if code is None else Loc(here.path, code.co_filename, code.co_firstlineno)


def _structure(tree: Tree) -> str:
    if tree.kind == "leaf":
        return "a tensor"
    if tree.kind == "dict":
        return f"a dict with {', '.join(map(str, tree.keys)) or 'no keys'}"
    return (
        "None" if tree.kind == "none" else f"a {tree.cls.__name__ if tree.cls else tree.kind} of {len(tree.children)}"
    )
