"""Templates hold constants, expressions and calls; loops live in headers, where they are read as C."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from monoplan.codegen.source import HERE

TAGS, LINES = 10, 150
TEMPLATES = sorted(p.relative_to(HERE) for p in HERE.glob("*/templates/*.j2"))


def _name(path: Path) -> str:
    return f"{path.parts[0]}/{path.name}"


@pytest.mark.parametrize("path", TEMPLATES, ids=_name)
def test_templates_are_short(path: Path) -> None:
    """Few control tags, no loop in a loop, no more lines than one reads at once."""
    text = (HERE / path).read_text("utf-8")
    tags = re.findall(r"\{%-?\s*(\w+)", text)
    assert len(tags) <= TAGS, f"{len(tags)} control tags"
    assert len(text.splitlines()) <= LINES
    depth = 0
    for tag in tags:
        depth += {"for": 1, "endfor": -1}.get(tag, 0)
        assert depth <= 1, "a loop in a loop"
