"""Collectives of one rank are the identity; more ranks need a communicator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.ir.ops.collective import among
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


class Two:
    """A group of two ranks where the other one always has the double."""

    size = 2

    def gather(self, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        return [x, 2 * x]


def test_several_ranks_within_among() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with among(Two()):
        assert np.array_equal(run("all_reduce", x, world=2), 3 * x)
        assert np.array_equal(run("all_gather", x, axis=0, world=2), np.concatenate([x, 2 * x]))
        assert np.array_equal(run("fused_all_reduce", x, x, world=2, expr="add(mul(x0, 2.0), x1)"), 7 * x)
        with pytest.raises(ArgumentError, match="over 3 ranks needs a communicator") as caught:
            run("all_reduce", x, world=3)
        assert "there is one of 2" in caught.value.why
    with pytest.raises(ArgumentError, match="needs a communicator"):
        run("all_reduce", x, world=2)


def test_the_tail_of_a_sum() -> None:
    x = tensor_type("f32", "n", 8)
    assert infer("fused_all_reduce", x, tensor_type("f32", 8), world=2, expr="add(x0, x1)") == x
    assert infer("fused_all_reduce", x, world=2, expr="gt(x0, 0.0)") == tensor_type("bool", "n", 8)
    refuses("world must be 1 or more", "fused_all_reduce", x, world=0, expr="x0")
    refuses("do not broadcast", "fused_all_reduce", x, tensor_type("f32", "m", "n", 8), world=2, expr="add(x0, x1)")
