"""diff(): what each pass did, as text."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import nn
from monoplan.inspect.diff import diff, wants_color
from monoplan.ir.errors import ArgumentError
from monoplan.nn import functional as F


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.silu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def fast() -> Any:
    return mp.compile(Block(), mp.spec("batch", 16), target="reference")


def test_each_pass_that_changed_something_has_a_title_and_a_diff(fast: Any) -> None:
    text = fast.diff()
    changed = [s for s in fast._latest().stages[1:] if s.changed]
    titles = [line for line in text.splitlines() if line.startswith("=== pass ")]
    assert len(titles) == len(changed)
    for title, stage in zip(titles, changed, strict=True):
        assert stage.name in title and stage.rule in title and " ms)" in title
    assert "(1 rewrite, " in titles[0]
    assert "=== nothing changed: dce, " in text.splitlines()[-1]


def test_lines_carry_the_users_location(fast: Any) -> None:
    removed = [line for line in fast.diff().splitlines() if line.startswith("-")]
    assert any(line.startswith("-  %rms_norm = rms_norm(") and 'test_diff.py":' in line for line in removed)
    assert "test_diff.py" not in fast.diff(locs=False)


def test_plain_text_unless_it_is_a_terminal(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert "\x1b[" not in fast.diff()
    coloured = fast.diff(color=True)
    assert "\x1b[32m+" in coloured and "\x1b[31m-" in coloured

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert wants_color(Terminal()) and not wants_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


def test_long_lines_can_be_cut(fast: Any) -> None:
    assert max(map(len, diff(fast._latest().stages, color=False, width=60).splitlines())) == 60


def test_there_is_nothing_before_the_first_call() -> None:
    fast = mp.compile(Block())
    with pytest.raises(ArgumentError, match="nothing is compiled yet"):
        fast.diff()
    fast(np.zeros((2, 16), "f4"))
    assert "=== pass" in fast.diff()
