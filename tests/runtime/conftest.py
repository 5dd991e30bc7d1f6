"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import ChoiceLoader, DictLoader

from monoplan.codegen import source as rendering
from monoplan.runtime.build import cache_places


@pytest.fixture
def templates() -> Iterator[dict[str, str]]:
    """Templates that take the place of the package's own, by name: `cpu/softmax.c.j2`."""
    environment = rendering.environment()
    honest, planted = environment.loader, dict[str, str]()
    environment.loader = ChoiceLoader([DictLoader(planted), honest])
    environment.cache.clear()
    yield planted
    environment.loader = honest
    environment.cache.clear()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty build cache of the test's own."""
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MONOPLAN_CACHE_MAX_BYTES", raising=False)
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    return tmp_path / "cache"
