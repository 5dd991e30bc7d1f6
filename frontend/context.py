"""What is being traced now, and where in the user's code we are."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from monoplan.ir.graph import Loc

if TYPE_CHECKING:
    from monoplan.frontend.tracer import Tracer


_tracing: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("tracing", default=None)

# Frames of these folders are ours, not the user's. Models and tests are written as a user would write them.
_HERE = os.path.dirname(os.path.realpath(__file__))
_ROOT = os.path.dirname(_HERE)
_INTERNAL = tuple(os.path.join(_ROOT, d) + os.sep for d in ("frontend", "ir", "passes", "codegen", "runtime"))
_FACE = (os.path.join(_ROOT, "monoplan") + os.sep, os.path.join(_ROOT, "api.py"))
_real: dict[str, str] = {}


def current() -> Tracer | None:
    """The tracer at work, or None in eager mode."""
    return _tracing.get()


def activate(tracing: Tracer | None) -> contextvars.Token[Tracer | None]:
    return _tracing.set(tracing)


def deactivate(token: contextvars.Token[Tracer | None]) -> None:
    _tracing.reset(token)


_said: contextvars.ContextVar[Loc | None] = contextvars.ContextVar("said", default=None)


@contextlib.contextmanager
def located(loc: Loc) -> Iterator[None]:
    """What is computed here belongs to that line: for code that runs somebody else's program op by op."""
    token = _said.set(loc)
    try:
        yield
    finally:
        _said.reset(token)


def user_location() -> Loc:
    """The innermost line that is not inside the library, with the path of the module being traced."""
    said = _said.get()
    if said is not None:
        return said
    tracing = current()
    path = tracing.module_path() if tracing is not None else ""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_internal(name):
            return Loc(path, _writable(name), frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return Loc(path)


def _writable(filename: str) -> str:
    """A name that UTF-8 files can hold: in an ASCII locale Python keeps other bytes as lone surrogates."""
    return filename if filename.isascii() else os.fsencode(filename).decode("utf-8", errors="replace")


def is_internal(filename: str) -> bool:
    """Whether a file is part of the library and not of the user's program."""
    if filename.startswith("<"):  # typed (<stdin>, <ipython-input-…>), or executed from a text; Python has its own
        return filename.startswith("<frozen ")
    real = _real.get(filename)
    if real is None:
        real = _real[filename] = os.path.realpath(filename)
    return real.startswith(_INTERNAL) or real.startswith(_FACE)


E = TypeVar("E", bound=BaseException)


def shortened(error: E) -> E:
    """An error whose traceback, and that of its cause, has the user's lines only; MONOPLAN_DEBUG keeps all of it."""
    if os.environ.get("MONOPLAN_DEBUG", "0") not in ("", "0"):
        return error
    if error.__cause__ is not None:
        shortened(error.__cause__)
    kept, tb = [], error.__traceback__
    while tb is not None:
        if not is_internal(tb.tb_frame.f_code.co_filename):
            kept.append(tb)
        tb = tb.tb_next
    chain: TracebackType | None = None
    for tb in reversed(kept):
        chain = TracebackType(chain, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return error.with_traceback(chain)
