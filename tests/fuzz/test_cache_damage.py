"""A cache with damaged files: nothing crashes, hangs or is wrong, and one rebuild mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrices import partly

ROOT = Path(__file__).parents[2]


def damage(cases: int, seed: int) -> None:
    # In a process of its own: children are forked from one that has compiled nothing and started no thread.
    command = [sys.executable, "-m", "tests.fuzz.cache_damage", "--cases", str(cases), "--seed", str(seed)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.parametrize("cases", partly([5, 25], lambda cases: cases == 5))
def test_some_damage(cases: int) -> None:
    damage(cases, seed=0)


@pytest.mark.nightly
def test_much_damage() -> None:
    damage(int(os.environ.get("MONOPLAN_FUZZ_CASES", "10000")), seed=1)
