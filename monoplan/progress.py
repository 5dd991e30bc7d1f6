"""A progress bar on stderr for work that takes over a second; nothing where stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def progress(label: str, *, after: float = 1.0) -> Callable[[int, int], None]:
    """A function of (done, total) that shows a bar once `after` seconds have passed, and wipes it at the end."""
    begin = time.monotonic()
    shown = False

    def show(done: int, total: int) -> None:
        nonlocal shown
        if not sys.stderr.isatty():
            return
        if done >= total:
            if shown:
                sys.stderr.write("\r\033[K")
                sys.stderr.flush()
            return
        if time.monotonic() - begin < after:
            return
        shown = True
        filled = done * 24 // total
        sys.stderr.write(f"\r{label} [{'#' * filled}{'.' * (24 - filled)}] {done}/{total}")
        sys.stderr.flush()

    return show
