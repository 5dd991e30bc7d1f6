"""Errors that a user meets: each says what is wrong, where, why, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class MonoplanError(Exception):
    """Base of every error raised on purpose: `where` is the user's line; `why` and `fix` are optional."""

    def __init__(self, what: str, *, where: object = None, why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        lines = [what]
        if where is not None and str(where):
            lines.append(f"  where: {where}{_typed_line(where)}")
        if why:
            lines.append(f"  why:   {why}")
        if fix:
            lines.append(f"  to do: {fix}")
        super().__init__(printable("\n".join(lines)))


def _typed_line(where: object) -> str:
    """The text of a line that was typed at a prompt, where Python or IPython kept it: no file has it."""
    file, line = getattr(where, "file", ""), getattr(where, "line", 0)
    if not isinstance(file, str) or not file.startswith("<"):
        return ""
    import linecache

    text = linecache.getline(file, line).strip()
    return f": {text}" if text else ""


def printable(text: str) -> str:
    """Text for a terminal: characters that would steer it (escapes, marks of direction, returns) are written out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def in_words(error: BaseException) -> str:
    """An error of somebody else in one line: `KeyError: 'a'`, or its name alone if it says nothing."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)  # the text of a SyntaxError names its file again
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class TypeRuleError(MonoplanError, TypeError):
    """Operands or attributes of an op do not fit together (rank, shape or dtype)."""


class TraceError(MonoplanError):
    """`forward` did something that can't be captured in a graph."""


class ParseError(MonoplanError, ValueError):
    """IR text that does not parse; names line and column."""


class VerifyError(MonoplanError):
    """A graph that breaks the rules of the IR: a bug in a pass or in hand-written IR."""


class ArgumentError(MonoplanError, ValueError):
    """A call with wrong arguments: number, rank, shape, dtype or value."""


class CompileError(MonoplanError):
    """The C or CUDA compiler is missing, or failed."""


class PlanError(MonoplanError, RuntimeError):
    """A running plan reported an error; names the IR line and the user's line."""


class LoadError(MonoplanError, ValueError):
    """A checkpoint, tokenizer or configuration that can't be used."""


@contextmanager
def located(where: object, *kinds: type[MonoplanError]) -> Iterator[None]:
    """Errors of these kinds get that place."""
    try:
        yield
    except kinds as error:
        raise type(error)(error.what, where=where, why=error.why, fix=error.fix) from None


@contextmanager
def writing(what: str, where: object, fix: str = "name a place that can be written and has room") -> Iterator[None]:
    """Failures of the file system while something is written there become an ArgumentError."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"can't write {what} to {where}", why=error.strerror or str(error), fix=fix) from None


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """`did you mean X?`, with a text before it; empty where nothing known is like the word."""
    import difflib

    near = difflib.get_close_matches(word, list(known), 1)
    return f"{before}did you mean {near[0]}?" if near else ""


def install_extra(name: str) -> str:
    """The command that installs an extra, for a checkout or for the folder that was installed."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not os.path.isfile(os.path.join(root, "pyproject.toml")):
        return f"pip install '.[{name}]' in the checkout of monoplan"
    return f"pip install '{'.' if root == os.path.realpath(os.getcwd()) else root}[{name}]'"
