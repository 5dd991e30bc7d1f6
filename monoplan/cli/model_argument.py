"""The MODEL of `inspect`, `verify`, `bisect`, `report` and `golden`: a checkpoint, or a Module of the user's own.

    path/to/checkpoint           a Hugging Face directory or a GGUF file
    file.py                      model() and specs() of that file
    file.py:Name, pkg.mod:name   a Module class without arguments, a function that makes a Module, or a Module;
                                 specs() of the same file

`specs()` returns what `mp.compile(model, ...)` takes: a spec, a tuple of them, or a dict by argument name. The file
may also define `inputs()`, which returns the arrays to run with; otherwise they are random.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from monoplan.cli.common import DEFAULT_PROMPT, EXTRAS, OWN_MODEL, UsageError, check_threads, find_model
from monoplan.frontend.context import is_internal
from monoplan.ir.errors import ArgumentError, MonoplanError, in_words
from monoplan.ir.graph import Loc
from monoplan.ir.lazy_dataclass import dataclass


@dataclass
class Opened:
    """A compiled model and a way to get arguments for it."""

    compiled: Any  # a Compiled
    arguments: Callable[[], dict[str, Any]]  # of one call, by name
    more: dict[str, Callable[[], dict[str, Any]]]  # further calls worth a profile, by what they are
    label: str
    model: Any = None  # of a checkpoint
    lm: Any = None  # its CompiledLM


def open_model(args: argparse.Namespace, **options: Any) -> Opened:
    """The model of the command line, compiled."""
    check_threads(args)
    parse_sizes(getattr(args, "size", []))  # now: a mistake in them is found before the model is loaded
    if getattr(args, "inputs", None):
        load_npz(args.inputs)
    settings = {"threads": args.threads, "kv_dtype": args.kv_dtype, **options}
    text: str = args.model or find_model(None)
    file, _, name = text.rpartition(":") if ":" in text and not Path(text).exists() else (text, "", "")
    if file.endswith(".py"):
        return _own(load_file(Path(file)), name, args, settings, text)
    if name:
        return _own(import_module(file, fix=f"give {OWN_MODEL}"), name, args, settings, text)
    return _checkpoint(find_model(text), args, settings)


def _checkpoint(path: str, args: argparse.Namespace, settings: dict[str, Any]) -> Opened:
    import monoplan
    from monoplan.models.auto import AutoLlamaModel

    model = AutoLlamaModel.from_pretrained(path, dtype=args.dtype or "auto")
    llm = monoplan.compile(model, target=args.target, options=settings)

    def prompt() -> dict[str, Any]:
        return step_arguments(llm, _prompt_ids(llm, getattr(args, "prompt", DEFAULT_PROMPT)))

    def token() -> dict[str, Any]:
        return step_arguments(llm, _prompt_ids(llm, getattr(args, "prompt", DEFAULT_PROMPT)), past=True)

    return Opened(llm.compiled, prompt, {"prompt": prompt, "one token": token}, Path(path).name, llm.model, llm)


def step_arguments(llm: Any, ids: Any, *, past: bool = False) -> dict[str, Any]:
    """Arguments of the plan of generation for some ids; with `past` they are in the cache and one more token comes."""
    from monoplan.models.generate.decoding import Settings, sampling_arrays

    given = llm.prompt_array(ids, more=int(past))
    batch, seq = given.shape
    cache = llm.new_cache(batch, seq + 1)
    if past:
        llm.step(given, cache)
        given, seq = given[:, -1:], 1
    cache.slide(seq)
    return {
        "input_ids": given,
        "past_key_values": cache.without_limit(),
        "num_valid": np.full(batch, seq, np.int32),
        **sampling_arrays(Settings(), [0.0] * batch),
    }


def _prompt_ids(llm: Any, prompt: str) -> Any:
    from monoplan.models.text.tokenizer import MissingTokenizer

    try:
        if llm.tokenizer is not None:
            return llm.tokenizer.encode(prompt)
    except MissingTokenizer:
        if prompt != DEFAULT_PROMPT:  # a text that somebody wants is not to be replaced by another
            raise
    rng = np.random.default_rng(0)
    return rng.integers(0, llm.config.vocab_size, min(8, llm.max_length - 1) or 1)


def _own(module: ModuleType, name: str, args: argparse.Namespace, settings: dict[str, Any], label: str) -> Opened:
    import monoplan
    from monoplan.frontend.module import Module

    where = getattr(module, "__file__", None) or module.__name__
    wanted = name or "model"
    if not hasattr(module, wanted):
        raise ArgumentError(f"{where} has no {wanted}", fix="define model() and specs(), or give file.py:Name")
    found = getattr(module, wanted)
    made = found if isinstance(found, Module) else _called(found, wanted, where)
    if not isinstance(made, Module):
        raise ArgumentError(f"{wanted} of {where} gave a {type(made).__name__}, not a Module")
    specs = getattr(module, "specs", None) or getattr(made, "specs", None)
    if specs is None:
        raise ArgumentError(
            f"{where} has no specs()",
            why="the sizes of the inputs are not known",
            fix='def specs(): return mp.spec("batch", 256)',
        )
    with users_errors(f"specs() of {where} failed"):
        given = specs()
    positional = () if isinstance(given, dict) else tuple(given) if isinstance(given, tuple | list) else (given,)
    by_name = given if isinstance(given, dict) else {}
    compiled = monoplan.compile(
        made, *positional, target=args.target, dtype=_module_dtype(args), options=settings, **by_name
    )

    def arguments() -> dict[str, Any]:
        return _own_arguments(module, made, compiled, args)

    return Opened(compiled, arguments, {"call": arguments}, label)


def _called(found: Any, name: str, where: str) -> Any:
    """What a class or function gives without arguments."""
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ArgumentError(
            f"{name} of {where} can't be called without arguments",
            why=str(error),
            fix="define a function in the file that makes the Module: def model(): return ...",
        ) from None
    except ValueError:
        pass  # a builtin that does not tell its parameters
    with users_errors(f"{name} of {where} failed"):
        return found()


def _own_arguments(module: ModuleType, made: Any, compiled: Any, args: argparse.Namespace) -> dict[str, Any]:
    if not args.inputs and hasattr(module, "inputs"):
        with users_errors(f"inputs() of {module.__file__ or module.__name__} failed"):
            given = module.inputs()
        if isinstance(given, dict):
            return dict(given)
        values = given if isinstance(given, tuple | list) else (given,)
        return dict(made.bind_arguments(tuple(values), {}))
    from monoplan.frontend.pytree import flatten, unflatten
    from monoplan.inspect.walk import example_inputs

    _, specs, built = compiled.built[0]
    tree = compiled.built[0][0]
    graph = built.stages[0].graph
    arrays = example_inputs(graph, parse_sizes(args.size), args.seed)
    if args.inputs:
        given = load_npz(args.inputs)
        arrays = [given.pop(v.name, a) for v, a in zip(graph.inputs, arrays, strict=True)]
        if given:
            names = ", ".join(v.name for v in graph.inputs)
            raise ArgumentError(f"{args.inputs} has {next(iter(given))!r}, which is no input", fix=f"inputs: {names}")
    rest = iter(arrays)
    leaves = [next(rest) if hasattr(s, "type") else s for s in specs]
    result = unflatten(tree, leaves)
    assert isinstance(result, dict) and len(flatten(result)[0]) == len(leaves)
    return result


def parse_sizes(texts: list[str]) -> dict[str, int]:
    """`["batch=2", "seq=7"]` as numbers."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not number.isdigit():
            raise UsageError(f"--size {text!r} is not NAME=NUMBER")
        found[name] = int(number)
    return found


def load_npz(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file by name."""
    try:
        data = np.load(path)
        if isinstance(data, np.ndarray):
            raise ValueError("it holds one array without a name; np.savez writes names")
        with data:
            return {k: data[k] for k in data.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:  # the last: cut short
        raise ArgumentError(f"can't read the arrays of {path}", why=str(error)) from None


# Python files of the user's: loaded, and their errors told as messages with the line, not as long tracebacks.


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


def _module_dtype(args: argparse.Namespace) -> str | None:
    """A Module of the user's own keeps its types unless one is given."""
    return None if args.dtype == "auto" else args.dtype
