"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_scan_page() -> None:
    """The blocks of docs/scan.md run as they stand, one after another."""
    page = (Path(__file__).parent.parent / "docs" / "scan.md").read_text("utf-8")
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) > 1
    for i, code in enumerate(blocks):
        exec(compile(code, f"docs/scan.md block {i}", "exec"), names)


def test_thirty_lines(capsys: object) -> None:
    section = README.split("## Thirty lines")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    text = code[1]
    assert len([line for line in text.splitlines() if line.strip()]) <= 30
    names: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), names)
    assert len(list(names["fast"].plan.steps())) == 2  # type: ignore[attr-defined]
