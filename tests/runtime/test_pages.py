"""Memory for weights: zeros that begin with a line, and share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.ir.types import address
from monoplan.runtime.cpu import weights as memory
from monoplan.runtime.cpu.weights import BLOCK, HUGE_PAGE, Pages


@pytest.mark.parametrize("expected", [1000, 3 * HUGE_PAGE, BLOCK, 10 * BLOCK])
def test_arrays_of_pages_are_zero_and_share_nothing(expected: int) -> None:
    pages = Pages(expected)
    shapes = [(3, 5), (1,), (0, 7), (64, 1024), (HUGE_PAGE // 4 + 3,), (2, 2 * HUGE_PAGE), (BLOCK // 8,), (9,)]
    made = [pages.take(shape, np.float32) for shape in shapes]
    for number, (a, shape) in enumerate(zip(made, shapes, strict=True)):
        assert a.shape == shape and a.dtype == np.float32 and a.flags.c_contiguous and a.flags.writeable
        assert address(a) % 64 == 0 or a.size == 0
        assert not a.any()
        a[...] = number
    assert all((a == number).all() for number, a in enumerate(made))


def test_they_live_as_long_as_one_of_them() -> None:
    pages = Pages(BLOCK)
    first, second = (pages.take((1000,), np.int64) for _ in range(2))
    second[:] = 7
    del pages, first
    assert (second == 7).all()


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "HAS_HUGE_PAGES", False)
    assert not Pages(BLOCK).take((100,), np.float32).any()
