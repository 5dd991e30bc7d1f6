"""Processes and versions of the package that share one cache: each finds its own, and nobody is disturbed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from monoplan.runtime.build import cache, cache_places

PACKAGE = Path(cache.__file__).resolve().parents[2]
FOLDERS = ("ir", "frontend", "passes", "codegen", "runtime", "models", "monoplan")
PROGRAM = textwrap.dedent("""
    import sys
    import numpy as np
    import monoplan as mp
    from monoplan import nn
    layer = nn.Linear(5, 3)
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    fast = mp.compile(layer, mp.spec("n", 5))
    assert np.allclose(fast(x), layer(mp.Tensor(x)).numpy(), atol=1e-5)
    assert f"monoplan {mp.__version__} " in fast.source(), fast.source()[:200]
    print(mp.__version__, fast.stats.cache_hits)
""")


@pytest.fixture
def other_version(tmp_path: Path) -> Path:
    """A copy of the package that calls itself another version."""
    copy = tmp_path / "other"
    for name in FOLDERS:
        shutil.copytree(PACKAGE / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    face = copy / "monoplan" / "__init__.py"
    text = face.read_text()
    assert '__version__ = "0.1.0"' in text
    face.write_text(text.replace('__version__ = "0.1.0"', '__version__ = "9.9.9"'))
    return copy


def start(package: Path, folder: Path) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(package), "MONOPLAN_CACHE_DIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM],
        env=environ,
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.split()


def test_two_versions_share_one_cache(other_version: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    first = [start(package, folder) for package in (PACKAGE, other_version)]
    assert [ended(p)[0] for p in first] == ["0.1.0", "9.9.9"]
    for _ in range(2):  # each finds its own plan, whoever wrote last
        again = [ended(start(package, folder)) for package in (PACKAGE, other_version)]
        assert again == [["0.1.0", "1"], ["9.9.9", "1"]]


def test_plans_load_while_somebody_clears_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load finds its plan, or builds one where nobody clears."""
    import numpy as np

    import monoplan as mp
    from monoplan import nn

    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cleared"))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    done = threading.Event()

    def clear() -> None:
        while not done.is_set():
            cache.clear()
            shutil.rmtree(tmp_path / "cleared" / "facts", ignore_errors=True)

    layer, x = nn.Linear(5, 3), np.ones((2, 5), np.float32)
    wanted = layer(mp.Tensor(x)).numpy()
    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        for _ in range(3):
            assert np.allclose(mp.compile(layer, mp.spec("n", 5))(x), wanted, atol=1e-5)
    finally:
        done.set()
        clearing.join()
