"""compile() in fresh processes: the cache, the compiler and the environment variables that are honoured."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import monoplan as mp
from monoplan.ir.errors import CompileError
from tests.monoplan.test_api import SPECS, Block

ROOT = Path(mp.__file__).resolve().parents[1]


def run_python(code: str, cache: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process; its cache is `cache`."""
    env = {**os.environ, "MONOPLAN_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)


PROGRAM = """
    import numpy as np, monoplan as mp, sys
    from monoplan.frontend.module import Module
    from monoplan.runtime.build import processes

    class Twice(Module):
        def forward(self, x):
            return (x + x) * x + 1

    fast = mp.compile(Twice(), mp.spec("n"))
    assert abs(fast(np.zeros(4, "f4")) - 1).max() < 1e-6
    print(processes.compiler_runs(), fast.stats.cache_hits, fast.plan.graph.name)
"""


def test_a_second_process_starts_no_compiler(tmp_path: Path) -> None:
    first = run_python(PROGRAM, tmp_path)
    assert first.returncode == 0, first.stderr
    assert int(first.stdout.split()[0]) >= 1 and first.stdout.split()[1] == "0"
    second = run_python(PROGRAM, tmp_path)
    assert second.stdout.split()[:2] == ["0", "1"], second.stderr


def test_a_first_process_asks_a_compiler_nothing_twice(tmp_path: Path) -> None:
    """Weights are packed by several threads, beside the one that builds the plan: all of them need a compiler."""
    program = """
        import monoplan as mp
        from monoplan import nn
        from monoplan.runtime.build import processes

        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        mp.compile(model, mp.spec("n", 64))
        print(processes.compiler_runs())
    """
    done = run_python(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 5  # --version, the trial of the CPU, OpenMP, the library that packs, the plan


def test_environment_variables(tmp_path: Path) -> None:
    done = run_python(PROGRAM, tmp_path / "cache", MONOPLAN_DUMP=str(tmp_path / "dump"), MONOPLAN_DEBUG="1")
    assert done.returncode == 0 and "monoplan: Twice: " in done.stderr and "dce" not in done.stderr
    assert {"00_trace.ir", "plan.c", "plan.txt"} <= {p.name for p in (tmp_path / "dump" / "Twice").iterdir()}
    levels = [run_python(PROGRAM, tmp_path / "cache", MONOPLAN_DEBUG=str(n)).stderr for n in (0, 2, 3, 4)]
    assert levels[0] == "" and "cache" in levels[1] and "dce" in levels[1] and "mp_run_plan" not in levels[2]
    assert "mp_run_plan" in levels[3]
    bad = run_python(PROGRAM, tmp_path / "cache", MONOPLAN_DEBUG="loud")
    assert bad.returncode and "MONOPLAN_DEBUG='loud' is not a number" in bad.stderr
    bad = run_python(PROGRAM, tmp_path / "cache", MONOPLAN_DEBUG="9")
    assert bad.returncode and "MONOPLAN_DEBUG='9' is not a number from 0 to 4" in bad.stderr
    more = PROGRAM + "    print(fast.built[0][2].executable.threads)"
    threads = run_python(more, tmp_path / "cache", MONOPLAN_NUM_THREADS="3")
    assert threads.stdout.splitlines()[-1] == "3"
    bad = run_python(PROGRAM, tmp_path / "cache", MONOPLAN_NUM_THREADS="many")
    assert bad.returncode and "MONOPLAN_NUM_THREADS='many' is not a number of threads" in bad.stderr


def test_a_missing_compiler(tmp_path: Path) -> None:
    done = run_python(PROGRAM, tmp_path, CC="/nonexistent/cc")
    assert done.returncode and "CompileError: CC='/nonexistent/cc' can't be run" in done.stderr
    assert "to do: correct CC" in done.stderr


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """The message holds what the compiler said, its command and the path of the source, which is kept."""
    edited = tmp_path / "plan.c"
    edited.write_text("#error this is wrong\n" + mp.compile(Block(), *SPECS).source())
    with pytest.raises(CompileError, match="this is wrong") as caught:
        mp.compile(Block(), *SPECS, options={"source": str(edited)})
    text = str(caught.value)
    assert "status 1" in text and "-O3" in text and "plan.c" in text
    kept = next(line.split("where: ")[1] for line in text.splitlines() if "where: " in line)
    assert Path(kept).read_text() == edited.read_text()


def test_cc_is_honoured(tmp_path: Path) -> None:
    log = tmp_path / "log"
    wrapper = tmp_path / "mycc"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec cc "$@"\n')
    wrapper.chmod(0o755)
    done = run_python(PROGRAM, tmp_path / "cache", CC=str(wrapper))
    assert done.returncode == 0, done.stderr
    assert "plan.c" in log.read_text()


@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache_as_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = run_python(PROGRAM, tmp_path / "cache")
    assert done.returncode == 0 and done.stderr.count("can't be used") == 1


def test_an_unusable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_python(PROGRAM, tmp_path / "file" / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("can't be used") == 1 and "using a temporary one" in done.stderr
