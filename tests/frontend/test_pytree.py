"""Nested arguments: flattening, names of leaves, rebuilding."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from monoplan.frontend.pytree import NoOutline, Tree, flatten, outline, unflatten, unflattener, with_constants
from monoplan.frontend.tensor import Tensor

Pair = namedtuple("Pair", ["first", "second"])


class Box:
    """An object that says how to flatten itself."""

    def __init__(self, content: Any, label: str) -> None:
        self.content, self.label = content, label

    def tree_flatten(self) -> Any:
        return {"content": self.content}, self.label

    @classmethod
    def tree_unflatten(cls, parts: dict[str, Any], meta: Any) -> Box:
        return cls(parts["content"], meta)


def test_leaves_have_names() -> None:
    nested = {"x": 1, "more": [2, (3, None)], "box": Box({"k": 4}, "label"), "pair": Pair(5, 6)}
    leaves, _ = flatten(nested)
    assert leaves == [("x", 1), ("more.0", 2), ("more.1.0", 3), ("box.content.k", 4), ("pair.0", 5), ("pair.1", 6)]
    assert flatten(7) == ([("x", 7)], Tree("leaf")) and flatten(None) == ([], Tree("none"))


@pytest.mark.parametrize(
    "nested",
    [1, None, [], {}, (), (1,), [1, [2, [3]]], {"a": {"b": None}, "c": (1, 2)}, Pair(1, [2]), {3: 1, "x": "text"}],
    ids=str,
)
def test_round_trip(nested: Any) -> None:
    leaves, tree = flatten(nested)
    again = unflatten(tree, [leaf for _, leaf in leaves])
    assert again == nested and type(again) is type(nested)
    assert flatten(again)[1] == tree
    made = unflattener(tree)([leaf for _, leaf in leaves])
    assert made == nested and type(made) is type(nested)


def test_objects_are_rebuilt() -> None:
    leaves, tree = flatten(Box([1, 2], "label"))
    box = unflatten(tree, [10, 20])
    assert isinstance(box, Box) and box.content == [10, 20] and box.label == "label"
    assert flatten(Box([1, 2], "other"))[1] != tree and flatten(Box([7, 8], "label"))[1] == tree


def test_tensors_are_leaves() -> None:
    t = Tensor([1.0, 2.0])
    ((name, leaf),), tree = flatten({"t": t})
    assert name == "t" and leaf is t and unflatten(tree, [t])["t"] is t


def test_constants() -> None:
    nested = {"logits": Tensor([1.0]), "count": 3, "name": "x", "none": None}
    leaves, tree = flatten(nested)
    kept = with_constants(tree, [leaf for _, leaf in leaves], lambda x: isinstance(x, Tensor))
    assert unflatten(kept, ["other"]) == {"logits": "other", "count": 3, "name": "x", "none": None}


def test_wrong_number_of_leaves() -> None:
    _, tree = flatten([1, 2])
    with pytest.raises(ValueError, match="too few"):
        unflatten(tree, [1])
    with pytest.raises(ValueError, match="1 leaves too many"):
        unflatten(tree, [1, 2, 3])


def test_outlines_are_equal_where_structures_and_constants_are() -> None:
    a, b = np.zeros(2), Tensor(np.zeros(3))
    values: list[Any] = [
        a,
        [a],
        (a,),
        [a, b],
        {"x": a},
        {"x": a, "y": b},
        {"y": a, "x": b},
        {"x": [a]},
        {"x": (a,)},
        None,
        [None],
        [],
        (),
        {},
        0,
        1,
        1.0,
        True,
        "1",
        [1],
        [1.0],
        [True],
        [a, 1],
        [1, a],
        ["x", a],
        {"x": 1},
        [[a], b],
        [a, [b]],
    ]
    for i, x in enumerate(values):
        for j, y in enumerate(values):
            assert (outline(x, []) == outline(y, [])) == (i == j), (x, y)
    assert outline([a, 2], []) == outline([b, 2], []) != outline([b, 3], []), "the arrays are not part of it"


def test_outlines_collect_the_arrays_that_flatten_finds() -> None:
    a, b, c = np.zeros(2), Tensor(np.zeros(3)), np.zeros(4)
    nested, arrays = {"x": [a, (b, 1)], "y": c, "z": a}, []
    outline(nested, arrays)
    leaves = [x.numpy() if isinstance(x, Tensor) else x for _, x in flatten(nested)[0] if not isinstance(x, int)]
    assert [id(x) for x in arrays] == [id(x) for x in leaves]


@pytest.mark.parametrize(
    "x",
    [Box([1], "label"), Pair(1, 2), np.float32(1), [object()], {"x": {1, 2}}],
    ids=["box", "pair", "scalar", "object", "set"],
)
def test_what_has_no_outline(x: Any) -> None:
    with pytest.raises(NoOutline):
        outline(x, [])
