"""Texts that must stay as they are, word for word: recorded under tests/golden/, compared by tests."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "golden"


def compare(request: pytest.FixtureRequest, path: Path, text: str) -> None:
    """Fails with a diff unless the file has this text; --golden-update or MONOPLAN_GOLDEN_UPDATE=1 writes it."""
    if os.environ.get("MONOPLAN_GOLDEN_UPDATE") or request.config.getoption("--golden-update", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return
    if not path.exists():
        pytest.fail(f"there is no {path.name}; MONOPLAN_GOLDEN_UPDATE=1 writes it:\n{text}", pytrace=False)
    wanted = path.read_text("utf-8")
    if wanted != text:
        lines = difflib.unified_diff(
            wanted.splitlines(), text.splitlines(), f"golden {path.name}", "this run", lineterm=""
        )
        pytest.fail("\n".join(lines), pytrace=False)
