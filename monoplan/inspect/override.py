"""Edited sources: `compile(..., source=path)` or MONOPLAN_OVERRIDE=folder builds a file in place of the generated text.

MONOPLAN_OVERRIDE takes what MONOPLAN_DUMP wrote: `folder/<plan>/plan.c`, or `folder/plan.c` when it belongs to the
plan. A source of another graph is refused: its steps would read and write the wrong memory.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from monoplan.codegen.source import step_lines
from monoplan.codegen.text import comment_text, file_name
from monoplan.ir.errors import ArgumentError, CompileError


def override_text(
    source: str | None, name: str, generated: str, entries: Sequence[str] = ("mp_run_plan",), suffix: str = "c"
) -> str | None:
    """The text to build in place of `generated`, or None; `source` is the option, `name` the plan's.

    `entries` are the functions that the runtime calls by name: the one of a C plan, the kernels of a CUDA plan.
    """
    if source is not None:
        return _checked(_read(Path(source)), Path(source), generated, entries)
    folder = os.environ.get("MONOPLAN_OVERRIDE", "").strip()
    if not folder:
        return None
    own, general = Path(folder) / file_name(name) / f"plan.{suffix}", Path(folder) / f"plan.{suffix}"
    if own.is_file():
        found = own
    elif general.is_file():
        if not _read(general).startswith(f"/* {comment_text(name)}:"):
            return None  # it belongs to another plan of the process
        found = general
    elif not Path(folder).is_dir():
        raise ArgumentError(
            f"MONOPLAN_OVERRIDE={folder} is not a folder", fix="MONOPLAN_DUMP=folder writes one to edit"
        )
    else:
        return None
    text = _checked(_read(found), found, generated, entries)
    if text != generated:
        print(f"monoplan: {name} is built from {found}", file=sys.stderr)
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ArgumentError(f"can't read the source {path}", why=str(error)) from None


def _checked(text: str, path: Path, generated: str, entries: Sequence[str]) -> str:
    """Raises when the edited source is no plan, or has the steps of another graph."""
    if missing := [name for name in entries if not re.search(rf"\b{name}\(", text)]:
        raise CompileError(
            f"{path} is not a source of this plan",
            why=f"it has no function {missing[0]}, which the plan is started by",
            fix="edit what MONOPLAN_DUMP=folder writes",
        )
    theirs, ours = step_lines(text), step_lines(generated)
    for a, b in zip(theirs, ours, strict=False):
        if a != b:
            raise CompileError(
                f"{path} was written for another graph",
                where=f"step {b.partition(':')[0]}",
                why=f"it says `{a}`, the plan has `{b}`",
                fix="dump the plan again and repeat the edit",
            )
    if len(theirs) != len(ours):
        raise CompileError(
            f"{path} was written for another graph",
            why=f"it has {len(theirs)} steps, the plan {len(ours)} (counted by the comments above their calls)",
            fix="dump the plan again and repeat the edit",
        )
    return text
