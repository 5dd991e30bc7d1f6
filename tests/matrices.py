"""Parametrizations of which a plain `pytest` runs a part, and `pytest -m full` the rest (as `.ci/run` does)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def partly(values: Iterable[Any], always: Callable[[Any], bool]) -> list[Any]:
    """The values as parameters: marked `full`, but for those that always run."""

    def parameter(value: Any) -> Any:
        return pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if always(value) else pytest.mark.full
        )

    return [parameter(value) for value in values]
