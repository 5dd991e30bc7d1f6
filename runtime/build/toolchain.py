"""C sources become libraries and programs in the cache, and libraries are loaded from there."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from monoplan.ir.errors import CompileError
from monoplan.runtime.build import cache, cache_places, facts
from monoplan.runtime.build.compilers import Compiler, find_compiler, has_openmp, known_compiler, remember_used
from monoplan.runtime.build.processes import BuildLog, CompileTimeout, run, run_all
from monoplan.runtime.warn import warn

T = TypeVar("T")

BASE_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
)  # fmt: skip
# Everything that is called in a loop is inlined: what gcc finds out between functions changes nothing, and takes an
# eighth of its time.
GCC_FLAGS = ("-fno-ipa-cp", "-fno-ipa-sra", "-fno-ipa-icf", "-fno-ipa-vrp")
LIBRARIES = ("-lm",)
MESSAGE_LINES = 30


def build_flags(flags: Sequence[str], compiler: Compiler | None = None) -> tuple[str, ...]:
    """All flags of compile_shared for `flags`: what belongs into the BuildKey."""
    compiler = compiler or find_compiler()
    openmp = ("-fopenmp",) if has_openmp(compiler) else ()  # without it the source copes by #ifdef _OPENMP
    quicker = GCC_FLAGS if compiler.kind == "gcc" else ()
    return (*BASE_FLAGS, *quicker, *openmp, *flags, *LIBRARIES)


def compile_shared(
    source_path: Path, out_path: Path, flags: Sequence[str], compiler: Compiler | None = None
) -> BuildLog:
    """Compiles one C file to a shared library; `flags` hold no relative paths (see _compile)."""
    compiler = compiler or find_compiler()
    *front, library = build_flags(flags, compiler)
    return _compile(compiler, front, source_path, out_path, [library])


def compile_parts(folder: Path, parts: Sequence[str], flags: Sequence[str], compiler: Compiler) -> BuildLog:
    """Compiles parts of folder/plan.c side by side, links them to folder/plan.so; the log's command is the whole's.

    `flags` are those of build_flags.
    """
    *front, library = flags
    names = [f"part{i}" for i in range(len(parts))]
    for name, text in zip(names, parts, strict=True):
        (folder / f"{name}.c").write_text(text, "utf-8")
    alone = [flag for flag in front if flag != "-shared"]
    commands = [[*compiler.command, *alone, "-c", f"{name}.c", "-o", f"{name}.o"] for name in names]
    link = [*compiler.command, *front, *(f"{name}.o" for name in names), "-o", "plan.so", library]
    try:
        done = run_all(commands, folder, folder, progress=True)
        if all(code == 0 for code, _ in done):
            done += run_all([link], folder, folder)
    except CompileTimeout as error:
        raise _timeout(error, folder / "plan.c") from None
    except OSError as error:
        raise CompileError(f"{compiler.path} can't be started: {error}") from error
    for code, log in done:
        if code != 0:
            raise _failure(code, log, _keep(folder / "plan.c"))
    for name in names:
        (folder / f"{name}.c").unlink()
        (folder / f"{name}.o").unlink()
    whole = (*compiler.command, *front, "plan.c", "-o", "plan.so", library)
    out, err = ("".join(getattr(log, name) for _, log in done) for name in ("stdout", "stderr"))
    return BuildLog(whole, out, err, sum(log.seconds for _, log in done[-2:]))


def compile_program(source_path: Path, out_path: Path, flags: Sequence[str], compiler: Compiler) -> BuildLog:
    """Compiles one C file to a program, as the CPU probes need."""
    return _compile(compiler, ["-std=gnu11", *flags], source_path, out_path, [])


def _compile(compiler: Compiler, front: Sequence[str], source: Path, out: Path, back: Sequence[str]) -> BuildLog:
    """Runs the compiler with `front` flags before the source and `back` after it."""
    # The compiler runs beside the source and sees bare names: its messages stay short, build.sh works
    # wherever the entry lies, and two builders in two temporary directories make the same bytes.
    source, out = source.absolute(), out.absolute()
    target = out.name if out.parent == source.parent else str(out)
    command = [*compiler.command, *front, source.name, "-o", target, *back]
    try:
        code, log = run(command, source.parent, out.parent, progress=True)
    except CompileTimeout as error:
        raise _timeout(error, source) from None
    except OSError as error:
        raise CompileError(f"{compiler.path} can't be started: {error}") from error
    if code != 0:
        raise _failure(code, log, _keep(source))
    return log


def _failure(code: int, log: BuildLog, kept: Path) -> CompileError:
    lines = (log.stderr + log.stdout).strip().splitlines() or ["(it printed nothing)"]
    shown = lines[:MESSAGE_LINES]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more lines")
    message = "".join(f"\n    {line}" for line in shown)
    how = f"was killed by signal {-code}" if code < 0 else f"failed with status {code}"
    return CompileError(
        f"the C compiler {how}:{message}",
        where=kept,
        why=f"cd {shlex.quote(str(kept.parent))} && {shlex.join(log.command)}",
        fix="read the source at the path above; set CC to try another compiler",
    )


def _timeout(error: CompileTimeout, source: Path) -> CompileTimeout:
    kept = _keep(source)
    return CompileTimeout(error.command, kept.parent, error.limit, kept)


def _keep(source: Path) -> Path:
    """Where the source outlives its failed build: as it is, or copied out of a temporary build directory."""
    if not cache.TEMP_NAME.fullmatch(source.parent.name):
        return source
    try:
        kept = cache_places.cache_root() / "failed" / hashlib.sha256(source.read_bytes()).hexdigest()[:16]
        shutil.copytree(source.parent, kept, dirs_exist_ok=True)
    except OSError:
        return source
    return kept / source.name


def plan_build(
    source: str,
    flags: Sequence[str],
    *,
    target: str,
    abi: int,
    headers: Sequence[tuple[str, str]] = (),
    parts: Callable[[], Sequence[str]] = tuple,
) -> tuple[cache.BuildKey, Callable[[Path], None]]:
    """The key of a C plan and the function that builds it: what cache.get_or_build and load take.

    `parts` gives translation units that together are the source, if there are such: they are compiled side by side.
    """
    compiler = known_compiler()
    whole = build_flags(flags, compiler)  # asked once: the binary must be what the key says
    key = cache.BuildKey(source, tuple(headers), compiler.identity, whole, target, abi)

    def build(folder: Path) -> None:
        if compiler.absent is not None:
            raise compiler.absent
        if "-fopenmp" not in whole:
            text = f"plans run on one thread: {compiler.path} does not compile and link with -fopenmp"
            cache_places.warn_once("openmp", f"{text}; once that is repaired, `monoplan doctor` asks again")
        units = parts()
        if len(units) > 1:
            log = compile_parts(folder, units, whole, compiler)
        else:
            log = _compile(compiler, whole[:-1], folder / "plan.c", folder / "plan.so", whole[-1:])
        if not (folder / "plan.so").is_file():
            kept = _keep(folder / "plan.c")
            raise CompileError(
                f"the C compiler {shlex.join(compiler.command)} reported no error, but made no plan.so",
                where=kept,
                why=f"cd {shlex.quote(str(kept.parent))} && {shlex.join(log.command)}",
                fix="set CC to a C compiler, or unset it to search cc, gcc and clang",
            )
        script = f'#!/bin/sh\ncd "$(dirname "$0")" && {shlex.join(log.command)}\n'
        (folder / "build.sh").write_text(script, "utf-8", errors="surrogateescape")  # paths are the user's
        (folder / "build.log").write_text(log.text, "utf-8")
        remember_used(compiler, "-fopenmp" in whole)

    return key, build


def load(key: cache.BuildKey, build: Callable[[Path], None], opener: Callable[[str], T]) -> tuple[T, cache.Entry]:
    """opener(path) and the entry it opened; survives a noexec cache, a concurrent clear and a stale entry."""
    errors: list[str] = []
    for again in range(4, -1, -1):
        # The last try is made where nobody clears the cache between the build and the load.
        entry, errors = (cache.get_or_build if again else cache.build_privately)(key, build), []
        for path in load_candidates(entry):
            try:
                library = opener(str(path))
            except OSError as error:
                # cffi repeats the path and adds a remark on searching for it, which nobody asked for.
                errors.append(f"{path}: {str(error).partition('  Additionally')[0].removeprefix(f'{path}: ')}")
                continue
            if errors:
                cache_places.warn_once("noexec", f"the cache's plan does not load, a copy does ({errors[0]})")
            return library, entry
        if not entry.binary.exists():
            continue  # cleared between the lookup and the load
        if not entry.hit:
            break  # just built, whole, and still refused everywhere
        warn(f"cache entry {entry.path} does not load ({errors[0]}): rebuilt")
        cache.discard(entry.path)
    raise CompileError("the compiled plan can't be loaded", why="; ".join(errors))


def load_candidates(entry: cache.Entry) -> Iterator[Path]:
    """Paths to load the binary from: its own, then copies elsewhere (the cache may be mounted noexec)."""
    yield entry.binary
    for base in (os.environ.get("XDG_RUNTIME_DIR") or None, None):
        try:
            copy = cache_places.private_directory(base) / entry.binary.name
            shutil.copyfile(entry.binary, copy)
        except OSError:
            continue
        yield copy


# cffi declarations, parsed once per machine: the C parser is slow to import, and what it finds does not change.


@functools.cache
def declared(cdef: str) -> Any:
    """An FFI object for these declarations."""
    return declared_by(tables(cdef))


def declared_by(text: str) -> Any:
    """An FFI object by the tables of its declarations, which are believed as machine code is."""
    import _cffi_backend  # type: ignore[import-untyped]

    return _cffi_backend.FFI("monoplan_declarations", **ast.literal_eval(text))


def tables(cdef: str) -> str:
    """What cffi makes of declarations, as text."""
    import _cffi_backend

    key = f"cffi {_cffi_backend.__version__}\n{cdef}"
    fact = facts.recall("cffi-tables", key)
    if fact is None:
        fact = {"tables": repr(_tables(_parsed(cdef)))}
        facts.remember("cffi-tables", key, fact)
    return str(fact["tables"])


def _tables(code: str) -> dict[str, Any]:
    """The tables of types and functions in the Python code that cffi makes: literals, which are read and not run."""
    (call,) = (node.value for node in ast.parse(code).body if isinstance(node, ast.Assign))
    assert isinstance(call, ast.Call)
    return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def _parsed(cdef: str) -> str:
    """Declarations as the Python code that cffi makes of them: it needs no parser any more."""
    import cffi
    from cffi import recompiler

    ffi = cffi.FFI()
    ffi.cdef(cdef)
    # Not ffi.emit_python_code, which prints and needs a file: a full disk must not matter here.
    made = recompiler.Recompiler(ffi, "monoplan_declarations", target_is_python=True)
    made.collect_type_table()
    made.collect_step_tables()
    text = io.StringIO()
    made.write_source_to_f(text, None)
    return text.getvalue()
