"""Sizes that only a call knows: what does not fit them is refused with the line, on every target, and never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.driver import build_graph_executable
from monoplan.frontend.tensor import Tensor
from monoplan.ir.parser import parse_graph
from monoplan.ir.shape_constraints import SizeError, shape_constraints
from monoplan.nn import functional as F


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def numbers(n: int) -> Any:
    return np.arange(1, n + 1, dtype=np.float32)


# what forward does, a size that fits, one that does not, and what the error says
CASES: list[tuple[str, Callable[[Any], Any], int, int, str]] = [
    ("first three", lambda x: x[:3], 3, 2, "slice: 3 elements from 0 go past 2, the size of axis 0"),
    ("last three", lambda x: x[-3:] * 1, 3, 2, "the start -1 is negative"),
    ("third", lambda x: x[2] * 1, 3, 2, "1 elements from 2 go past 2"),
    ("last", lambda x: x[-1] * 1, 1, 0, "the start -1 is negative"),
    ("from the fifth", lambda x: x[4:].sum(), 4, 3, "the length -1 is negative"),
    ("every other from the third", lambda x: x[2:9:2], 9, 8, "4 elements from 2 in steps of 2 go past 8"),
    ("filled up", lambda x: F.cat([x, F.zeros(8 - x.shape[0])]), 8, 9, r"a size in \[-1\] is negative"),
    ("numbered", lambda x: F.arange(x.shape[0] - 2) * 2, 2, 1, "the length -1 is negative"),
    ("cut", lambda x: x.split([4, x.shape[0] - 4])[1].sum(), 4, 3, "is negative"),
    ("largest", lambda x: x.max(), 1, 0, "axis 0 of f32.0. has no elements"),
    ("place of the largest", lambda x: x.argmax(), 1, 0, "has no elements"),
    ("shares", lambda x: F.softmax(x), 1, 0, "has no elements"),
]


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize(("function", "good", "bad", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_size_that_does_not_fit(
    function: Callable[[Any], Any], good: int, bad: int, message: str, target: str
) -> None:
    fast = mp.compile(Apply(function), mp.spec("n"), target=target)
    want = function(Tensor(numbers(good))).numpy()
    np.testing.assert_array_equal(fast(numbers(good)), want)
    for _ in range(2):  # the second call is not taken for a known one
        with pytest.raises(SizeError, match=message) as caught:
            fast(numbers(bad))
    text = str(caught.value)
    assert __file__ in text and f"n = {bad}" in text and "to do:" in text
    np.testing.assert_array_equal(fast(numbers(good)), want)


def test_without_specs_such_a_size_gets_a_plan_of_its_own() -> None:
    """Python's slices end where the array does; the plan for all sizes can't, so it is not used, nor made again."""

    def function(x: Any) -> Any:
        a, b = F.cumsum(x[40:], 0), F.cumsum(x, 0)
        return b + F.cumsum(b + 1, 0), a.sum()

    module = Apply(function)
    fast = mp.compile(module)
    for n in (60, 50, 20, 3, 1, 60, 20, 3):
        for got, want in zip(fast(numbers(n)), module(Tensor(numbers(n))), strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)
    assert len(fast.built) == 5  # 60, any, 20, 3 and 1


def test_a_table_that_is_too_short() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.PositionalEmbedding(4, 2)

        def forward(self, x: Any) -> Any:
            return x + self.table(x.shape[0])

    fast = mp.compile(Positions(), mp.spec("seq", 2))
    assert fast(np.zeros((4, 2), np.float32)).shape == (4, 2)
    with pytest.raises(SizeError, match="7 elements from 0 go past 4"):
        fast(np.zeros((7, 2), np.float32))


def test_symbols_are_not_negative() -> None:
    fast = mp.compile(Apply(lambda x: x * 2), mp.spec("n+5"))
    assert fast(numbers(5)).shape == (5,)
    with pytest.raises(mp.ArgumentError, match="got size 3 at dimension 0, for which n would be -2"):
        fast(numbers(3))


def test_ops_that_are_alike_are_asked_once_and_inside_of_loops() -> None:
    text = """graph g(%x: f32[n, 4]) {
  %a = slice(%x) {axis=0, start=0, length=2, step=1} : f32[2, 4]
  %b = slice(%x) {axis=0, start=0, length=2, step=1} : f32[2, 4]
  %c = slice(%x) {axis=0, start=1, length=n-1, step=1} : f32[n-1, 4]
  %d = slice(%a) {axis=1, start=1, length=2, step=1} : f32[2, 2]
  return %b, %c, %d
}"""
    graph = parse_graph(text)
    assert len(shape_constraints(graph)) == 2
    compiled = build_graph_executable(graph)
    assert [a.shape for a in compiled([np.zeros((2, 4), np.float32)])] == [(2, 4), (1, 4), (2, 2)]
    with pytest.raises(SizeError, match="go past 1"):
        compiled([np.zeros((1, 4), np.float32)])
