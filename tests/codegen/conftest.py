"""Fixtures of the compiled tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monoplan.runtime.cpu import executable as cpu


@pytest.fixture
def quick() -> Iterator[None]:
    """Plans are built with -O1: half the time, for tests that are not about the compiler's optimizations."""
    flags_for = cpu.flags_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "flags_for", lambda target: (*flags_for(target), "-O1"))
        yield
