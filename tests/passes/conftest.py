"""The golden fixture: IR text that a pass must make, word for word."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests import golden_text

FOLDER = golden_text.FOLDER / "passes"
Golden = Callable[[str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """golden(text): fails with a diff unless text is that of tests/golden/passes/<file>.<test>.ir."""
    module = request.path.stem.removeprefix("test_")
    test = re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_")
    return lambda text: golden_text.compare(request, FOLDER / f"{module}.{test}.ir", text)
