"""Nested arguments and results: dicts, lists, tuples, None, and classes that flatten themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from monoplan.frontend.tensor import Tensor
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.opdef import exactly


@dataclass(frozen=True)
class Tree:
    """The structure of a nested value; `leaf` at the bottom."""

    kind: str  # "leaf", "constant", "none", "dict", "list", "tuple", "object"
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()
    cls: Any = None
    meta: Any = None  # what an object needs besides its leaves to be rebuilt; the value of a constant


def flatten(x: Any, name: str = "") -> tuple[list[tuple[str, Any]], Tree]:
    """Named leaves and the structure; an object with `tree_flatten() -> (parts, meta)` is a branch."""
    if x is None:
        return [], Tree("none")
    if isinstance(x, Tensor):
        return [(name or "x", x)], Tree("leaf")
    if isinstance(x, dict):
        return _branch(Tree("dict", tuple(x)), list(x.items()), name)
    if isinstance(x, tuple | list):
        cls = type(x) if hasattr(x, "_fields") else None
        kind = "list" if isinstance(x, list) else "tuple"
        return _branch(Tree(kind, tuple(range(len(x))), cls=cls), list(enumerate(x)), name)
    if hasattr(x, "tree_flatten"):
        parts, meta = x.tree_flatten()
        return _branch(Tree("object", tuple(parts), cls=type(x), meta=meta), list(parts.items()), name)
    return [(name or "x", x)], Tree("leaf")


def _branch(tree: Tree, items: list[tuple[Any, Any]], name: str) -> tuple[list[tuple[str, Any]], Tree]:
    leaves: list[tuple[str, Any]] = []
    children = []
    for key, child in items:
        found, sub = flatten(child, f"{name}.{key}" if name else str(key))
        leaves += found
        children.append(sub)
    return leaves, Tree(tree.kind, tree.keys, tuple(children), tree.cls, tree.meta)


class NoOutline(Exception):  # noqa: N818  (no error: the long way knows better)
    """A value has parts that `outline` does not know."""


_CONSTANTS = frozenset((bool, int, float, str, type(None)))


def outline(x: Any, arrays: list[Any], adopt: Callable[[Any], Any] | None = None) -> Any:
    """What to look a nested value up by, and its arrays, appended in the order of `flatten`: much quicker than that.

    Values of equal outlines have equal structures and equal constants. An object may have `tree_outline(arrays)`,
    which does the same; `adopt` takes arrays of other libraries. Raises NoOutline for anything else.
    """
    kind = type(x)
    if kind is np.ndarray or kind is np.memmap:
        arrays.append(x)
        return None
    if kind is Tensor:
        arrays.append(x._array)
        return None
    if kind in _CONSTANTS:
        return kind, exactly(x)  # 1, 1.0 and True are equal, but not the same constant
    if kind is dict:
        return dict, tuple(x), *[outline(v, arrays, adopt) for v in x.values()]
    if kind is list or kind is tuple:
        return kind, *[outline(v, arrays, adopt) for v in x]
    own = getattr(kind, "tree_outline", None)
    if own is not None:
        return own(x, arrays)
    if adopt is None or not hasattr(kind, "__dlpack__"):
        raise NoOutline
    arrays.append(adopt(x))
    return None


def with_constants(tree: Tree, leaves: Sequence[Any], is_leaf: Callable[[Any], bool]) -> Tree:
    """The structure in which leaves that are no leaves after all (a number, a string) stand as constants."""
    rest = list(leaves)

    def walk(t: Tree) -> Tree:
        if t.kind == "leaf":
            value = rest.pop(0)
            return t if is_leaf(value) else Tree("constant", meta=value)
        return replace(t, children=tuple(walk(c) for c in t.children))

    return walk(tree)


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The nested value again, with other leaves."""
    rest = list(leaves)
    value = _build(tree, rest)
    if rest:
        raise ValueError(f"{len(rest)} leaves too many")
    return value


def unflattener(tree: Tree) -> Callable[[Sequence[Any]], Any]:
    """unflatten for one structure, to be called often; the number of leaves is not checked."""
    flat = all(c.kind == "leaf" for c in tree.children)
    if tree.kind == "leaf":
        return itemgetter(0)
    if tree.kind == "dict" and flat:
        return lambda leaves: dict(zip(tree.keys, leaves, strict=True))
    if tree.kind in ("list", "tuple") and tree.cls is None and flat:
        return list if tree.kind == "list" else tuple
    return lambda leaves: unflatten(tree, leaves)


def _build(tree: Tree, rest: list[Any]) -> Any:
    if tree.kind == "none":
        return None
    if tree.kind == "constant":
        return tree.meta
    if tree.kind == "leaf":
        if not rest:
            raise ValueError("too few leaves")
        return rest.pop(0)
    parts = [_build(c, rest) for c in tree.children]
    if tree.kind == "dict":
        return dict(zip(tree.keys, parts, strict=True))
    if tree.kind == "object":
        return tree.cls.tree_unflatten(dict(zip(tree.keys, parts, strict=True)), tree.meta)
    if tree.cls is not None:
        return tree.cls(*parts)
    return parts if tree.kind == "list" else tuple(parts)
