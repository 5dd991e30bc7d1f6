"""The C compiler of this machine: found, identified, run; and the loading of what it made.

Answers that cost a compiler process (its version, whether OpenMP links) are kept as facts in the cache
directory: a second process which finds its plan in the cache starts no compiler at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from monoplan.ir.errors import CompileError
from monoplan.runtime import cache, cache_files
from monoplan.runtime.processes import BuildLog, run, run_all
from monoplan.runtime.warn import warn

T = TypeVar("T")

BASE_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
)  # fmt: skip
LIBRARIES = ("-lm",)
MESSAGE_LINES = 30
VERSION_SECONDS = 30  # for the answer to --version
DAY = 86400.0  # a negative fact is asked again after this: the user may have installed what was missing

_INSTALL = """install one of:
           Debian, Ubuntu   apt install gcc libc6-dev
           Fedora, RHEL     dnf install gcc
           macOS            xcode-select --install
         or set CC to the compiler to use"""
_OPENMP_PROBE = """#ifdef _OPENMP
#include <omp.h>
int probe(void) { return omp_get_max_threads(); }
#else
int probe(void) { return 1; }
#endif
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that answered --version."""

    path: str
    arguments: tuple[str, ...]  # the rest of CC: `CC="ccache gcc"`
    kind: str  # "gcc", "clang" or "unknown"
    version_line: str

    @property
    def command(self) -> tuple[str, ...]:
        """How to start it."""
        return (self.path, *self.arguments)

    @property
    def identity(self) -> str:
        """Its part of the cache key. No mtime: in a container image built again it is the same compiler."""
        return f"{shlex.join(self.command)} | {self.version_line}"


def find_compiler() -> Compiler:
    """The compiler named by CC, else the first of cc, gcc, clang that works."""
    setting = os.environ.get("CC", "").strip()
    if setting:
        try:
            return _identify(shlex.split(setting))
        except (ValueError, CompileError) as error:
            reason = error.what if isinstance(error, CompileError) else str(error)
            fix = "correct CC, or unset it to search cc, gcc and clang"
            raise CompileError(f"CC={setting!r} can't be run", why=reason, fix=fix) from None
    tried = []
    for name in ("cc", "gcc", "clang"):
        try:
            return _identify([name])
        except CompileError as error:  # on macOS /usr/bin/cc exists, and fails until the tools are installed
            tried.append(error.what)
    raise CompileError("no C compiler was found", why="; ".join(tried), fix=_INSTALL)


def _identify(words: Sequence[str]) -> Compiler:
    path = shutil.which(os.path.expanduser(words[0])) if words else None
    if path is None:
        raise CompileError(f"{words[0] if words else 'the empty command'} is not an executable on PATH")
    command = (os.path.abspath(path), *words[1:])
    found = _identify_signed(command, _signature(command))
    if found is None:
        raise CompileError(f"{shlex.join(command)} --version did not end within {VERSION_SECONDS} s")
    return found


def _signature(command: tuple[str, ...]) -> str:
    """Path, mtime and size of each word that is a program: changes when one of them is replaced."""
    found = [os.path.realpath(p) for w in command if not w.startswith("-") and (p := shutil.which(w))]
    stats = [os.stat(p) for p in found]
    return json.dumps([command, [(p, s.st_mtime_ns, s.st_size) for p, s in zip(found, stats, strict=True)]])


@functools.cache
def _identify_signed(command: tuple[str, ...], signature: str) -> Compiler | None:
    """The compiler; None for one that does not answer, which is worth no second wait."""
    fact = recall("compiler", signature)
    if fact is None:
        try:
            code, log = run([*command, "--version"], Path.cwd(), None, timeout=VERSION_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            raise CompileError(f"{shlex.join(command)} --version does not run: {error}") from error
        lines = (log.stdout + log.stderr).strip().splitlines()
        if code != 0 or not lines:
            said = " ".join(lines)[:300]
            raise CompileError(f"{shlex.join(command)} --version failed with status {code}: {said}")
        fact = {"version": lines[0].strip(), "kind": _kind("\n".join(lines))}
        # A wrapper script does not change when the compiler behind it does, so even this answer ages.
        remember("compiler", signature, fact, DAY)
    return Compiler(command[0], command[1:], str(fact["kind"]), str(fact["version"]))


def _kind(text: str) -> str:
    if "clang" in text.lower():
        return "clang"
    return "gcc" if "Free Software Foundation" in text or "gcc" in text.lower() else "unknown"


def recall(name: str, key: str) -> dict[str, object] | None:
    """A fact that this or an earlier process remembered and that has not expired."""
    for root in cache.read_roots():
        try:
            fact = json.loads(_fact_path(root, name, key).read_text("utf-8"))
            if fact["key"] == key and (fact["expires"] is None or time.time() < fact["expires"]):
                return dict(fact["value"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # absent or damaged: it is asked again
    return None


def remember(name: str, key: str, value: dict[str, object], seconds: float | None = None) -> None:
    """Keeps a fact for later processes, for ever or for `seconds`; failing to write it is no error."""
    path = _fact_path(cache.cache_root(), name, key)
    temp = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    expires = None if seconds is None else time.time() + seconds
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp.write_text(json.dumps({"key": key, "value": value, "expires": expires}), "utf-8")
        os.replace(temp, path)


def _fact_path(root: Path, name: str, key: str) -> Path:
    return root / "facts" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def has_openmp(compiler: Compiler, *, fresh: bool = False) -> bool:
    """Whether -fopenmp compiles and links; `fresh` asks again where the known answer is no."""
    try:
        return _openmp(compiler, _signature(compiler.command), fresh)
    except _Undecided:
        return False  # for now: the next plan asks again


class _Undecided(Exception):
    """No probe was built, neither with OpenMP nor without: that says nothing about OpenMP."""


@functools.cache  # which does not keep exceptions
def _openmp(compiler: Compiler, signature: str, fresh: bool) -> bool:
    fact = recall("openmp", signature)
    if fact is None or (fresh and not fact["works"]):
        fact = {"works": _openmp_links(compiler)}
        remember("openmp", signature, fact, None if fact["works"] else DAY)
    return bool(fact["works"])


def _openmp_links(compiler: Compiler) -> bool:
    """Builds the probe; "no" needs a compiler that can build it without OpenMP, and then fails with it once more.

    A full disk or too little memory fails the same way as a missing libgomp, and would cost a day of single threads.
    """

    def status(folder: Path, *flags: str) -> int:
        command = [*compiler.command, "-fPIC", "-shared", *flags, "probe.c", "-o", "probe.so"]
        return run(command, folder, folder)[0]

    for place in dict.fromkeys((None, cache.cache_root())):
        with (
            contextlib.suppress(OSError),
            tempfile.TemporaryDirectory(prefix="monoplan-", dir=place) as name,
        ):
            folder = Path(name)
            (folder / "probe.c").write_text(_OPENMP_PROBE, "utf-8")
            if status(folder, "-fopenmp") == 0:
                return True
            if status(folder) == 0 and (again := status(folder, "-fopenmp")) >= 0:
                return again == 0
    raise _Undecided


def build_flags(flags: Sequence[str], compiler: Compiler | None = None) -> tuple[str, ...]:
    """All flags of compile_shared for `flags`: what belongs into the BuildKey."""
    compiler = compiler or find_compiler()
    openmp = ("-fopenmp",) if has_openmp(compiler) else ()  # without it the source copes by #ifdef _OPENMP
    return (*BASE_FLAGS, *openmp, *flags, *LIBRARIES)


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


def _compile(
    compiler: Compiler, front: Sequence[str], source: Path, out: Path, back: Sequence[str]
) -> BuildLog:
    """Runs the compiler with `front` flags before the source and `back` after it."""
    # The compiler runs beside the source and sees bare names: its messages stay short, build.sh works
    # wherever the entry lies, and two builders in two temporary directories make the same bytes.
    source, out = source.absolute(), out.absolute()
    target = out.name if out.parent == source.parent else str(out)
    command = [*compiler.command, *front, source.name, "-o", target, *back]
    try:
        code, log = run(command, source.parent, out.parent, progress=True)
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


def _keep(source: Path) -> Path:
    """Where the source outlives its failed build: as it is, or copied out of a temporary build directory."""
    if not cache_files.TEMP_NAME.fullmatch(source.parent.name):
        return source
    try:
        kept = cache.cache_root() / "failed" / hashlib.sha256(source.read_bytes()).hexdigest()[:16]
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
    parts: Sequence[str] = (),
) -> tuple[cache.BuildKey, Callable[[Path], None]]:
    """The key of a C plan and the function that builds it: what cache.get_or_build and load take.

    `parts` are translation units that together are the source: they are compiled side by side.
    """
    compiler = find_compiler()
    whole = build_flags(flags, compiler)  # asked once: the binary must be what the key says
    key = cache.BuildKey(source, tuple(headers), compiler.identity, whole, target, abi)

    def build(folder: Path) -> None:
        if "-fopenmp" not in whole:
            text = f"plans run on one thread: {compiler.path} does not compile and link with -fopenmp"
            cache.warn_once("openmp", f"{text}; once that is repaired, `monoplan doctor` asks again")
        if len(parts) > 1:
            log = compile_parts(folder, parts, whole, compiler)
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

    return key, build


def load(
    key: cache.BuildKey, build: Callable[[Path], None], opener: Callable[[str], T]
) -> tuple[T, cache.Entry]:
    """opener(path) and the entry it opened; survives a noexec cache, a concurrent clear and a stale entry."""
    errors: list[str] = []
    for _ in range(4):
        entry, errors = cache.get_or_build(key, build), []
        for path in load_candidates(entry):
            try:
                library = opener(str(path))
            except OSError as error:
                # cffi repeats the path and adds a remark on searching for it, which nobody asked for.
                errors.append(
                    f"{path}: {str(error).partition('  Additionally')[0].removeprefix(f'{path}: ')}"
                )
                continue
            if errors:
                cache.warn_once("noexec", f"the cache's plan does not load, a copy does ({errors[0]})")
            return library, entry
        if not entry.binary.exists():
            continue  # cleared between the lookup and the load
        if not entry.hit:
            break  # just built, whole, and still refused everywhere
        warn(f"cache entry {entry.path} does not load ({errors[0]}): rebuilt")
        cache_files.discard(entry.path)
    raise CompileError("the compiled plan can't be loaded", why="; ".join(errors))


def load_candidates(entry: cache.Entry) -> Iterator[Path]:
    """Paths to load the binary from: its own, then copies elsewhere (the cache may be mounted noexec)."""
    yield entry.binary
    for base in (os.environ.get("XDG_RUNTIME_DIR") or None, None):
        try:
            copy = cache.private_directory(base) / entry.binary.name
            shutil.copyfile(entry.binary, copy)
        except OSError:
            continue
        yield copy
