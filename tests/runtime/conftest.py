"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jinja2 import ChoiceLoader, DictLoader

from monoplan.codegen import render


@pytest.fixture
def templates() -> Iterator[dict[str, str]]:
    """Templates that take the place of the package's own, by name: `cpu/softmax.c.j2`."""
    environment = render.environment()
    honest, planted = environment.loader, dict[str, str]()
    environment.loader = ChoiceLoader([DictLoader(planted), honest])
    environment.cache.clear()
    yield planted
    environment.loader = honest
    environment.cache.clear()
