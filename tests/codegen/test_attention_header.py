"""The loops of mp_attention.h as plain C: sizes that are no constants, under sanitizers, against a naive attention."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from monoplan.codegen.source import headers
from monoplan.runtime.build.compilers import find_compiler
from tests.codegen.sanitizers import KINDS, SECONDS, SETTINGS

DRIVER = Path(__file__).with_name("attention_driver.c")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-fopenmp-simd")
TARGETS = {"vectors": ("-DMP_LANES=4",), "tiles": ("-DMP_LANES=16", "-DMP_TILES_EMULATED")}


@pytest.mark.parametrize("flags", TARGETS.values(), ids=TARGETS)
def test_the_loops_are_attention(flags: tuple[str, ...], tmp_path: Path) -> None:
    for name, text in headers("cpu"):
        (tmp_path / name).write_text(text)
    command = [find_compiler().path, "-std=gnu11", "-O0", *WARNINGS, *KINDS["address"], *flags, "-I.", str(DRIVER)]
    done = subprocess.run([*command, "-o", "driver", "-lm"], cwd=tmp_path, capture_output=True, text=True)
    if done.returncode != 0 and "sanitize" in done.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert done.returncode == 0, done.stderr[:3000]
    env = {**os.environ, **SETTINGS}
    ran = subprocess.run([tmp_path / "driver"], env=env, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[:3000]
