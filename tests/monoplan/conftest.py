"""Fixtures for calls of compiled modules."""

from __future__ import annotations

from typing import Any

import pytest

from monoplan.api import Compiled


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of the calls that were matched with the plans."""
    taken: list[Any] = []
    bind = Compiled._bind

    def noted(self: Any, args: Any, kwargs: Any) -> Any:
        taken.append(args)
        return bind(self, args, kwargs)

    monkeypatch.setattr(Compiled, "_bind", noted)
    return taken
