"""The blocks of docs/extending.md run as they stand, each section in a process of its own with an empty cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codegen import cuda_emulator

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- run: (\w+)(, cuda)? -->\n```python\n(.*?)```", PAGE, re.S)
# Runs `module` on the inputs x and y of a section as a CUDA plan, and compares it with the eager module.
ON_CUDA = """
from monoplan.frontend.tracer import trace
from monoplan.passes.manager import run_passes
from monoplan.passes.pipeline import PIPELINE
from tests.codegen.cuda_emulator import EmulatedDevice
from tests.codegen.test_cuda_ops import executable

inputs = [globals()[name] for name in ("x", "y") if name in globals()]
traced = trace(module, *(mp.spec(*a.shape) for a in inputs))
graph = run_passes(traced.graph, PIPELINE)[-1].graph
made = executable(graph, {path: t.numpy() for path, t in traced.params.items()}, EmulatedDevice())
wanted = module(*inputs)
wanted = wanted if isinstance(wanted, tuple) else (wanted,)
for got, want in zip(made.run(inputs, {}), wanted, strict=True):
    assert np.allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)
print("on cuda:", len(list(made.plan.steps())), "kernels")
"""


def test_every_block_is_run() -> None:
    assert PAGE.count("```python") == len(BLOCKS)
    names = list(dict.fromkeys(name for name, _, _ in BLOCKS))
    assert names == ["pointwise", "reduction", "rewrite", "family", "format"]


@pytest.mark.parametrize("section", dict.fromkeys(name for name, _, _ in BLOCKS))
def test_section(section: str, tmp_path: Path) -> None:
    parts = [text for name, _, text in BLOCKS if name == section]
    on_cuda = any(cuda for name, cuda, _ in BLOCKS if name == section) and cuda_emulator.available()
    program = tmp_path / f"{section}.py"
    program.write_text("\n".join([*parts, *([ON_CUDA] if on_cuda else [])]), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MONOPLAN_CACHE_DIR": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ("on cuda:" in ran.stdout) == on_cuda
