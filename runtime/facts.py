"""Facts about this machine that cost time to find out, kept in the cache directory for later processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from pathlib import Path

from monoplan.runtime import cache_places

DAY = 86400.0  # a negative fact is asked again after this: the user may have installed what was missing


def recall(name: str, key: str) -> dict[str, object] | None:
    """A fact that this or an earlier process remembered and that has not expired."""
    for root in cache_places.read_roots():
        try:
            fact = json.loads(_fact_path(root, name, key).read_text("utf-8"))
            if fact["key"] == key and (fact["expires"] is None or time.time() < fact["expires"]):
                return dict(fact["value"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # absent or damaged: it is asked again
    return None


def remember(name: str, key: str, value: dict[str, object], seconds: float | None = None) -> None:
    """Keeps a fact for later processes, for ever or for `seconds`; failing to write it is no error."""
    path = _fact_path(cache_places.cache_root(), name, key)
    temp = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    expires = None if seconds is None else time.time() + seconds
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp.write_text(json.dumps({"key": key, "value": value, "expires": expires}), "utf-8")
        os.replace(temp, path)


def _fact_path(root: Path, name: str, key: str) -> Path:
    return root / "facts" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
