"""Warnings that name the user's line: the first one outside of this package, also when a thread of ours gives them."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_THREADS = (threading.__file__, os.path.join(os.path.dirname(threading.__file__), "concurrent", "futures", "thread.py"))
# Where the user called, for threads that work on it: their own stacks do not reach that far.
_caller: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar("caller", default=None)


def warn(text: str) -> None:
    """A RuntimeWarning at the user's line."""
    file, line = _user_line() or _caller.get() or ("monoplan", 1)
    warnings.warn_explicit(f"monoplan: {text}", RuntimeWarning, file, line)


def context_of_caller() -> contextvars.Context:
    """A context in which warnings name the line that called us: for `submit(context.run, function)`."""
    context = contextvars.copy_context()
    context.run(_caller.set, _user_line() or _caller.get())
    return context


def _user_line() -> tuple[str, int] | None:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_PACKAGE, "<frozen ")) and name not in _THREADS:
            return name, frame.f_lineno
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
