"""Collectives of one rank are the identity; more ranks need a plan."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import tensor_type
from tests.ir.support import infer, refuses, run


def test_one_rank() -> None:
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    assert np.array_equal(run("all_reduce", x), x) and np.array_equal(run("all_gather", x, axis=0), x)


def test_more_ranks_need_a_communicator() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ArgumentError, match="all_reduce over 4 ranks needs a communicator"):
        run("all_reduce", x, world=4)
    with pytest.raises(ArgumentError, match="all_gather over 2 ranks"):
        run("all_gather", x, world=2)


def test_types() -> None:
    x = tensor_type("bf16", "n", 8)
    assert infer("all_reduce", x, world=4) == x
    assert infer("all_gather", x, world=4) == tensor_type("bf16", "n", 32)
    assert infer("all_gather", x, axis=0, world=2) == tensor_type("bf16", "2*n", 8)
    refuses("world must be 1 or more", "all_reduce", x, world=0)
    refuses("axis 2 is out of range", "all_gather", x, axis=2)
