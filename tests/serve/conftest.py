"""The tiny model, an engine for it, a server's application in front, and a client that calls it without a network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from monoplan.serve.engine import Engine
from tests.serve.support import NAME, Call, caller, tiny_lm


@pytest.fixture(scope="module")
def lm() -> Any:
    return tiny_lm()


@pytest.fixture(scope="module")
def engine(lm: Any) -> Iterator[Any]:
    with Engine(lm) as made:
        yield made


@pytest.fixture(scope="module")
def app(engine: Any) -> Any:
    from monoplan.serve.app import make_app

    return make_app(engine, NAME)


@pytest.fixture
def call(app: Any) -> Call:
    return caller(app)
