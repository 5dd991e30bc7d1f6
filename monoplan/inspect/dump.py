"""What MONOPLAN_DUMP and `Compiled.dump` write: every stage of a plan as files to read, to edit and to build."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from monoplan.ir.errors import writing
from monoplan.ir.printer import print_graph

if TYPE_CHECKING:
    from monoplan.built import Built


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
