"""Edited sources: `compile(..., source=path)` or MONOPLAN_OVERRIDE=folder builds a file in place of the generated text.

MONOPLAN_OVERRIDE takes what MONOPLAN_DUMP wrote: `folder/<plan>/plan.c`, or `folder/plan.c` when it belongs to the
plan. A source of another graph is refused: its steps would read and write the wrong memory.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from monoplan.codegen.text import comment_text, file_name
from monoplan.ir.errors import ArgumentError, CompileError, writing
from monoplan.ir.printer import print_graph

if TYPE_CHECKING:
    from monoplan.built import Built

# What MONOPLAN_DUMP and `Compiled.dump` write: every stage of a plan as files to read, to edit and to build.


def dump(built: Built, folder: Path) -> Path:
    """Writes the files; raises ArgumentError where the folder does not take them."""
    fix = "name a folder that can be written (-o, MONOPLAN_DUMP, options={'dump': ...} or dump(folder))"
    with writing("the dump", folder, fix):
        return _write(built, folder)


def _write(built: Built, folder: Path) -> Path:
    """Numbered files: IR after each stage that changed something, kernels, plan, source, headers, how it was built.

    Ranks that share a model write to folders of their own inside it.
    """
    if built.tp is not None and built.tp.size > 1:
        folder = folder / f"rank{built.tp.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9][0-9]*_*.ir"):
        old.unlink()  # of another graph: its stages would lie among these
    for i, s in enumerate(built.stages):
        if s.changed:
            head = f"// {s.name}: {s.rule} ({s.rewrites} rewrites, {s.seconds * 1e3:.1f} ms)\n"
            (folder / f"{i:02d}_{s.name}.ir").write_text(head + print_graph(s.graph, locs=True), "utf-8")
    if built.executable is None:
        return folder
    lines = [f"{step.number}: {step.kernel.family} {step.schedule}" for step, _ in built.plan.steps()]
    (folder / "kernels.txt").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "plan.txt").write_text(str(built.plan), "utf-8")
    suffix = "c" if built.target == "cpu" else "cu"
    (folder / f"plan.{suffix}").write_text(built.source_text, "utf-8")
    for made in sorted(Path(built.executable.entry.path).glob("*")):
        if made.suffix in (".h", ".cuh") or made.name in ("build.sh", "build.log"):
            shutil.copyfile(made, folder / made.name)  # without the headers build.sh builds nothing
    return folder


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
    from monoplan.codegen.source import step_lines  # a start-up without an edited source does not need it

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
