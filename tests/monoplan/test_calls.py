"""Calls that look alike and are not: shared memory, signed zeros, sizes by other names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.ir.errors import ArgumentError, TraceError
from monoplan.nn import functional as F


class Overwrites(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        F.relu(x, inplace=True)
        return x + y


def test_memory_that_is_written_belongs_to_one_argument() -> None:
    """A plan would read it before or after the write, whatever comes; views that do not meet are fine."""
    fast = mp.compile(Overwrites())
    for _ in range(2):  # a new call, and a known one
        a = np.array([-1, 2], np.float32)
        with pytest.raises(ArgumentError, match="arguments x and y share memory, and forward writes into x"):
            fast(a, a)
        np.testing.assert_array_equal(a, [-1, 2])
        np.testing.assert_array_equal(fast(a.copy(), a), [-1, 4])
    longer = np.array([-1, 2, -3, 4, 5], np.float32)
    with pytest.raises(ArgumentError, match="share memory"):
        mp.compile(Overwrites())(longer[:4], longer[1:])
    np.testing.assert_array_equal(fast(longer[:4:2], longer[1:4:2]), [2, 4])
    np.testing.assert_array_equal(longer, [0, 2, 0, 4, 5])


def test_a_view_of_a_weight_is_not_written() -> None:
    """Refused each time, and the weight is as it was."""

    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(-np.ones((2, 3), np.float32))

        def forward(self, x: Any) -> Any:
            flat = self.w.reshape(6)
            if self.careless:
                F.relu(flat, inplace=True)
            return x + flat.reshape(2, 3)

    module = Careless()
    module.careless = True
    for _ in range(2):
        with pytest.raises(TraceError, match="forward writes into a view of w"):
            mp.compile(module)(np.zeros((2, 3), np.float32))
    module.careless = False
    np.testing.assert_array_equal(mp.compile(module)(np.zeros((2, 3), np.float32)), module.w.numpy())


def test_zeros_with_other_signs_and_nan_are_constants_of_their_own() -> None:
    class Times(nn.Module):
        def forward(self, x: Any, factor: float) -> Any:
            return x * factor

    fast = mp.compile(Times())
    x = np.ones(2, np.float32)
    for factor in (0.0, -0.0, 0.0, float("nan"), float("nan"), 1.0):
        np.testing.assert_array_equal(np.signbit(fast(x, factor)), np.signbit(x * np.float32(factor)))
    assert len(fast.built) == 4


def test_many_sizes_that_change_have_names_of_their_own() -> None:
    class Each(nn.Module):
        def forward(self, *xs: Any) -> Any:
            return [x * 2 for x in xs]

    fast = mp.compile(Each())
    first = [3 + 5 * i for i in range(11)]
    for sizes in ([2 + 5 * i for i in range(12)], [*first, 57], [*first, 90]):
        assert [len(y) for y in fast(*(np.ones(n, np.float32) for n in sizes))] == sizes
