"""Plans on disk: a graph that was lowered before goes through neither passes nor templates again.

The key is the traced graph with its locations, the options and the target, and the text of every file that makes a plan
of them; an entry is one pickle in the build cache's folder of facts, trusted like the binaries beside it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import platform
import threading
from pathlib import Path
from typing import Any

from monoplan.ir.graph import Graph
from monoplan.ir.printer import print_graph
from monoplan.options import Options
from monoplan.runtime import cache

KEPT = 256  # entries; the longest unused go first
_MAKERS = ("ir", "passes", "codegen")
_SUFFIXES = (".py", ".j2", ".h")


def plan_key(graph: Graph, options: Options, target: Any, version: str) -> str:
    """The name of a plan: everything that may change it."""
    digest = hashlib.sha256(print_graph(graph, locs=True).encode())
    choices = (options.fuse, options.passes, options.stop_after, target, version, platform.python_version())
    digest.update(repr(choices).encode() + makers().encode())
    return digest.hexdigest()


@functools.cache
def makers() -> str:
    """The digest of the code that makes plans."""
    digest = hashlib.sha256()
    for folder in _MAKERS:
        for path in sorted((Path(__file__).resolve().parent / folder).resolve().rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def recall(key: str) -> tuple[Graph, Any, Any] | None:
    """Final graph, plan and source under a key, if they were remembered."""
    import monoplan.ir.ops  # noqa: F401  (ops are pickled by name)

    for root in cache.read_roots():
        path = _path(root, key)
        try:
            made: tuple[Graph, Any, Any] = pickle.loads(path.read_bytes())
            os.utime(path)
            return made
        except OSError:
            continue
        except Exception:  # a damaged entry is no entry
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def remember(key: str, graph: Graph, plan: Any, source: Any) -> None:
    """Keeps a plan for later processes; failing to write it is no error."""
    path = _path(cache.cache_root(), key)
    temp = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp.write_bytes(pickle.dumps((graph, plan, source), pickle.HIGHEST_PROTOCOL))
        os.replace(temp, path)
        entries = sorted(path.parent.glob("plan-*.pickle"), key=lambda p: p.stat().st_mtime)
        for old in entries[:-KEPT]:
            old.unlink()


def _path(root: Path, key: str) -> Path:
    return root / "facts" / f"plan-{key}.pickle"
