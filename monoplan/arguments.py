"""Arguments of a call beside those that a plan was compiled for: what fits, and what an error says of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from monoplan.built import Built
from monoplan.foreign import is_array
from monoplan.frontend.pytree import Tree
from monoplan.frontend.specs import Spec
from monoplan.ir.errors import ArgumentError
from monoplan.ir.opdef import exactly


def as_compiled(x: Any, tree: Tree, specs: Iterator[Any], name: str = "") -> Any:
    """Arguments in the form that a plan was compiled for, as far as they have it.

    Lists and numbers become arrays where the plan takes arrays, and dicts get its order of the keys.
    """
    if tree.kind == "leaf":
        spec = next(specs)
        if not isinstance(spec, Spec) or not isinstance(x, list | tuple | int | float | np.generic):
            return x
        try:
            made = np.asarray(x)
            wanted = spec.type.dtype
            if made.dtype.kind in "iub" or (made.dtype.kind == "f" and wanted.is_float):
                return np.asarray(x, wanted.numpy)
            return made
        except (ValueError, OverflowError) as error:
            what = f"argument {name}: expected {spec.type}, got a {type(x).__name__}"
            raise ArgumentError(what, why=str(error)) from None
    if isinstance(x, dict) and tree.kind == "dict" and x.keys() == set(tree.keys):
        parts = zip(tree.keys, tree.children, strict=True)
        return {k: as_compiled(x[k], t, specs, _path(name, k)) for k, t in parts}
    if type(x) in (list, tuple) and tree.kind == type(x).__name__ and len(x) == len(tree.children):
        children = zip(tree.keys, x, tree.children, strict=True)
        return type(x)(as_compiled(v, t, specs, _path(name, i)) for i, v, t in children)
    for _ in range(_count_leaves(tree)):
        next(specs)
    return x


def _count_leaves(tree: Tree) -> int:
    return 1 if tree.kind == "leaf" else sum(map(_count_leaves, tree.children))


def match(tree: Tree, values: list[tuple[str, Any]], known: Tree, specs: list[Any], built: Built) -> dict[str, int]:
    """The values of a plan's symbols; raises unless arguments have its structure, constants, types and sizes."""
    if tree != known:
        problem = _difference(tree, known, iter(values), iter(specs))
        assert problem is not None, "trees that differ do so somewhere"
        raise problem
    arrays = []
    for (name, v), s in zip(values, specs, strict=True):
        if isinstance(s, Spec):
            if not is_array(v):
                raise ArgumentError(f"argument {name}: expected an array {s.type}, got {type(v).__name__}")
            if v.dtype != s.type.dtype.numpy:
                shown = f"dtype {v.dtype} with shape {list(v.shape)}"
                raise ArgumentError(f"argument {name}: expected {s.type}, got {shown}")
            arrays.append(v)
        elif not same_constant(s, v):
            raise ArgumentError(f"argument {name}: this plan was compiled for {s!r}, got {v!r}")
    return built.check(arrays)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two leaves that are no arrays are the same: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    return type(a) is type(b) and bool(exactly(a) == exactly(b))


def _difference(
    got: Tree, known: Tree, values: Iterator[tuple[str, Any]], specs: Iterator[Any], name: str = ""
) -> ArgumentError | None:
    """The first place where two structures differ, as an error; None if they are equal there and below."""
    if got.kind == known.kind == "leaf":
        next(values), next(specs)  # types and sizes are compared later
        return None
    if got.kind == known.kind == "dict" and set(got.keys) != set(known.keys):
        return _wrong_keys(got, known, list(values), list(specs), name)
    if (got.kind, got.cls, got.meta, got.keys) != (known.kind, known.cls, known.meta, known.keys):
        expected = _described(known, next(specs) if known.kind == "leaf" else None)
        shown = _described(got, next(values)[1] if got.kind == "leaf" else None)
        if expected == shown:  # objects that hold something besides arrays, such as the limit of a KVCache
            expected, shown = f"{expected} with {known.meta}", f"{shown} with {got.meta}"
        return ArgumentError(f"argument {name}: expected {expected}, got {shown}")
    for key, ours, theirs in zip(known.keys, got.children, known.children, strict=True):
        found = _difference(ours, theirs, values, specs, _path(name, key))
        if found is not None:
            return found
    return None


def _wrong_keys(got: Tree, known: Tree, values: list[tuple[str, Any]], specs: list[Any], name: str) -> ArgumentError:
    """The error for a missing or a surplus key; the lists begin with the leaves of the two dicts."""
    for i, key in enumerate(known.keys):
        if key not in got.keys:
            at = sum(map(_count_leaves, known.children[:i]))
            expected = _described(known.children[i], specs[at] if known.children[i].kind == "leaf" else None)
            what = f"argument {_path(name, key)} is missing: expected {expected}, as the plan was compiled with"
            return ArgumentError(what, fix="give it, or compile without it")
    i, key = next((i, key) for i, key in enumerate(got.keys) if key not in known.keys)
    at = sum(map(_count_leaves, got.children[:i]))
    shown = _described(got.children[i], values[at][1] if got.children[i].kind == "leaf" else None)
    what = f"argument {_path(name, key)} is one too many: got {shown}, but the plan was compiled without it"
    return ArgumentError(what, fix="leave it out, or compile with it")


def _described(tree: Tree, leaf: Any = None) -> str:
    """A part of the arguments in words; `leaf` is the Spec or the value of one that has no parts."""
    if tree.kind == "leaf":
        if isinstance(leaf, Spec):
            return f"an array {leaf.type}"
        return f"an array {leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else f"{leaf!r:.60}"
    if tree.kind == "none":
        return "None"
    if tree.kind == "dict":
        return f"a dict with {', '.join(map(str, tree.keys)) or 'no keys'}"
    return tree.cls.__name__ if tree.cls is not None else f"a {tree.kind} of {len(tree.children)}"


def _path(name: str, key: Any) -> str:
    """The name of a part, as `flatten` gives it."""
    return f"{name}.{key}" if name else str(key)
