"""What the tests of the build cache share: one key, builds of it, and processes that build it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monoplan.runtime.build import cache

IMPORT_ROOT = Path(cache.__file__).parents[3]  # where `import monoplan` was found
KEY = cache.BuildKey("int f(void);", (("vec/v.h", "#pragma once\n"),), "cc 1", ("-O3",), "test", 1)

# A child process: builds KEY in MONOPLAN_CACHE_DIR; `{body}` is what happens inside build(folder).
CHILD = """
import os, sys, time
from pathlib import Path
from monoplan.runtime.build import cache
key = cache.BuildKey("int f(void);", (("vec/v.h", "#pragma once\\n"),), "cc 1", ("-O3",), "test", 1)
def build(folder):
    {body}
    (folder / "plan.so").write_bytes(b"binary" * 1000)
entry = cache.get_or_build(key, build)
assert "unread" in sys.argv or entry.binary.read_bytes() == b"binary" * 1000
print("hit" if entry.hit else "built")
"""


def build(folder: Path) -> None:
    (folder / "plan.so").write_bytes(b"binary" * 1000)
    (folder / "build.log").write_text("the log\n")


def never(folder: Path) -> None:
    raise AssertionError("built although the entry was there")


def start_child(body: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CHILD.format(body=body), *arguments],
        env={**os.environ, "PYTHONPATH": str(IMPORT_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def plans(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "plans").iterdir())


def truncate(path: Path) -> None:
    (path / "plan.so").write_bytes((path / "plan.so").read_bytes()[:10])
