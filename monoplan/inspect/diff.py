"""What each pass did, as a unified diff of the IR."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from monoplan.ir.printer import print_graph

_COLORS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m", "=": "\x1b[1m"}
_RESET = "\x1b[0m"
CONTEXT = 2


def diff(stages: Sequence[Any], *, color: bool | None = None, locs: bool = True, width: int | None = None) -> str:
    """For each pass that changed something: its rule, how often it fired, its time, and the lines it changed.

    Coloured where stdout is a terminal, unless `color` says otherwise; `width` cuts long lines.
    """
    painted = wants_color(sys.stdout) if color is None else color
    lines = list(_lines(stages, locs))
    if width is not None:
        lines = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    if painted:
        lines = [f"{_COLORS[line[0]]}{line}{_RESET}" if line[:1] in _COLORS else line for line in lines]
    return "\n".join(lines) + "\n"


def stage_diff(old: Any, new: Any, *, locs: bool = False, context: int = CONTEXT) -> list[str]:
    """The diff of two stages without its head lines."""
    before, after = (print_graph(s.graph, locs=locs).splitlines() for s in (old, new))
    return list(difflib.unified_diff(before, after, old.name, new.name, lineterm="", n=context))[2:]


def stage_title(number: int, stage: Any) -> str:
    """`pass 3, idioms: rule (2 rewrites, 1.2 ms)`."""
    times = "1 rewrite" if stage.rewrites == 1 else f"{stage.rewrites} rewrites"
    return f"pass {number}, {stage.name}: {stage.rule} ({times}, {stage.seconds * 1e3:.1f} ms)"


def _lines(stages: Sequence[Any], locs: bool) -> Iterator[str]:
    quiet: list[str] = []
    previous = stages[0]
    for number, stage in enumerate(stages[1:], 1):
        if stage.graph is previous.graph:
            quiet.append(stage.name)
            continue
        yield f"=== {stage_title(number, stage)}"
        yield from stage_diff(previous, stage, locs=locs)
        yield ""
        previous = stage
    if quiet:
        yield f"=== nothing changed: {', '.join(quiet)}"


def wants_color(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR is set; FORCE_COLOR insists."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or bool(getattr(stream, "isatty", lambda: False)())
