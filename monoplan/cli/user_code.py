"""Python files of the user's: loaded, and their errors told as messages with the line, not as long tracebacks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from monoplan.cli.main import EXTRAS
from monoplan.frontend.context import is_internal
from monoplan.ir.errors import ArgumentError, MonoplanError, in_words
from monoplan.ir.graph import Loc

_INSTALLED = tuple({os.path.join(p, "") for k, p in sysconfig.get_paths().items() if k.endswith("lib")})


def load_file(path: Path) -> ModuleType:
    """The module of a file; its folder joins the search path, so that it may import its neighbours."""
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}")
    place = str(path.resolve().parent)
    if place not in sys.path:
        sys.path.insert(0, place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        with users_errors(f"{path} can't be loaded"):
            spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(path.stem) is module:  # nobody is to find half of it
            del sys.modules[path.stem]
        raise
    return module


def import_module(name: str, *, fix: str) -> ModuleType:
    """The module of that name, found from the working directory as well; `fix` is for a name that there is not."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with users_errors(f"the Python module {name} can't be loaded"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
                raise ArgumentError(f"there is no Python module {name}", fix=fix) from None
            raise


@contextlib.contextmanager
def users_errors(what: str) -> Iterator[None]:
    """Within it, an error of the user's code is one of ours that says `what`, the error and its line."""
    try:
        yield
    except (MonoplanError, BrokenPipeError):  # the first have a message, the second is for the command line
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            raise  # the command line knows what to install
        fix = "correct it there; MONOPLAN_DEBUG=1 shows the whole traceback"
        if isinstance(error, ModuleNotFoundError):
            fix = f"install {error.name}, or correct the name"
        why = error.text.strip() if isinstance(error, SyntaxError) and error.text else ""
        raise ArgumentError(f"{what}: {in_words(error)}", where=_place(error), why=why, fix=fix) from error


def _place(error: Exception) -> Loc:
    """The innermost line of an error's traceback that is neither ours nor of an installed library."""
    if isinstance(error, SyntaxError) and error.filename:
        return Loc("", error.filename, error.lineno or 0)
    place = Loc()
    tb = error.__traceback__
    while tb is not None:
        name = tb.tb_frame.f_code.co_filename
        if not is_internal(name) and not name.startswith(_INSTALLED):
            place = Loc("", name, tb.tb_lineno)
        tb = tb.tb_next
    return place
