"""The golden fixture: IR text that a pass must make, word for word."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "golden" / "passes"
Golden = Callable[[str], None]


def _updating(request: pytest.FixtureRequest) -> bool:
    return bool(os.environ.get("MONOPLAN_GOLDEN_UPDATE")) or bool(
        request.config.getoption("--golden-update", default=False)
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """golden(text): fails with a diff unless text is that of tests/golden/passes/<file>.<test>.ir.

    MONOPLAN_GOLDEN_UPDATE=1 writes the file in place of comparing.
    """
    module = request.path.stem.removeprefix("test_")
    test = re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_")
    path = FOLDER / f"{module}.{test}.ir"

    def compare(text: str) -> None:
        if _updating(request):
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"there is no {path.name}; MONOPLAN_GOLDEN_UPDATE=1 writes it:\n{text}", pytrace=False)
        wanted = path.read_text()
        if wanted != text:
            lines = difflib.unified_diff(
                wanted.splitlines(), text.splitlines(), f"golden {path.name}", "this run", lineterm=""
            )
            pytest.fail("\n".join(lines), pytrace=False)

    return compare
