"""Plans as programs of their own that a sanitizer watches: recorded calls are run there again."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.codegen.views import Buffer
from monoplan.runtime.build.compilers import find_compiler
from monoplan.runtime.build.toolchain import BASE_FLAGS
from monoplan.runtime.cpu.executable import CpuExecutable, flags_for

Array = np.ndarray[Any, Any]
DRIVER = Path(__file__).with_name("sanitizer_driver.c")
KINDS = {"address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"), "thread": ("-fsanitize=thread",)}
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}  # fmt: skip
SECONDS = 1200  # of one compiler or program: only a hang takes so long


@dataclass
class Call:
    """One run of a plan: sizes, inputs as they were before it, outputs."""

    symbols: dict[str, int]
    inputs: list[Array]
    outputs: list[Array]


@dataclass
class Recorded:
    """A plan and the calls of it."""

    executable: CpuExecutable
    calls: list[Call] = field(default_factory=list)


@contextmanager
def recording(most: int = 6) -> Iterator[list[Recorded]]:
    """Records every plan that is run meanwhile, and its first calls of each size."""
    found: dict[int, Recorded] = {}
    plans: list[Recorded] = []
    run = CpuExecutable.run

    def recorded(self: CpuExecutable, inputs: Sequence[Array], symbols: Any) -> list[Array]:
        before = [np.array(a) for a in inputs]
        outputs = run(self, inputs, symbols)
        if id(self) not in found:
            found[id(self)] = Recorded(self)
            plans.append(found[id(self)])
        calls = found[id(self)].calls
        if len(calls) < most:
            calls.append(Call(dict(symbols), before, [np.array(a) for a in outputs]))
        return outputs

    CpuExecutable.run = recorded  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        CpuExecutable.run = run  # type: ignore[method-assign]


def compile_watched(executable: CpuExecutable, folder: Path, kind: str, text: str | None = None) -> Path:
    """The program of a plan, with the flags of its shared library and a sanitizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in executable.build_headers():
        (folder / name).write_text(content, "utf-8")
    (folder / "plan.c").write_text(executable.text if text is None else text, "utf-8")
    shutil.copyfile(DRIVER, folder / "driver.c")
    flags = [flag for flag in BASE_FLAGS if flag not in ("-shared", "-fPIC")]
    flags += [*flags_for(executable.plan.target), "-g1", *KINDS[kind]]
    compiler = find_compiler().command
    _checked([*compiler, *flags, "-fopenmp", "-c", "plan.c", "-o", "plan.o"], folder)
    _checked([*compiler, *flags, "plan.o", "driver.c", "-o", "plan", "-lpthread", "-lm"], folder)
    return folder / "plan"


def run_watched(program: Path, recorded: Recorded, threads: Sequence[int]) -> list[tuple[int, list[Array]]]:
    """Every call with every number of threads: the plan's code and outputs. Raises with the sanitizer's report."""
    calls = [(call, count) for call in recorded.calls for count in threads]
    plan = recorded.executable.plan
    parts = [_table(recorded.executable.params, 64), _numbers(len(calls))]
    for call, count in calls:
        values = {**call.symbols, "threads": count}
        offsets, room = plan.arena.layout(values)
        numbers = [values[name] for name in plan.symbols]
        parts += [_numbers(count, len(numbers), *numbers, len(offsets), *offsets, room), _table(call.inputs, 0)]
        parts += [_numbers(len(call.outputs), *(a.nbytes for a in call.outputs))]
        for where, a in zip(plan.outputs, call.outputs, strict=True):
            alias = not isinstance(where, Buffer)
            parts.append(_numbers(-1 - where if alias else a.nbytes, a.itemsize, 0))  # type: ignore[operator]
    folder = program.parent
    (folder / "calls").write_bytes(b"".join(parts))
    # Some kernels place programs where the thread sanitizer does not expect them.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    _checked([*fixed, str(program), "calls", "outputs"], folder)
    data = (folder / "outputs").read_bytes()
    found, at = [], 0
    for call, _ in calls:
        (code,) = struct.unpack_from("i", data, at)
        at += 4
        outputs = []
        for a in call.outputs:
            outputs.append(np.frombuffer(data, np.uint8, a.nbytes, at).view(a.dtype).reshape(a.shape))
            at += a.nbytes
        found.append((code, outputs))
    return found


def _checked(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0 and "Sanitizer" not in report, f"{command[:3]} in {folder}:\n{report[:6000]}"


def _numbers(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def _table(arrays: Sequence[Array], align: int) -> bytes:
    """Buffers with their contents; `align` 0: as little as their elements need."""
    parts = [_numbers(len(arrays))]
    for a in arrays:
        dense = np.ascontiguousarray(a)
        parts += [_numbers(a.nbytes, align or a.itemsize, 1), dense.tobytes()]
    return b"".join(parts)
