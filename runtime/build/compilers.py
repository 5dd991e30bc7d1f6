"""The C compiler of this machine: found, identified, and asked whether OpenMP links.

Answers that cost a compiler process are kept as facts: a second process which finds its plan in the cache starts no
compiler at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from monoplan.ir.errors import CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build import cache_places
from monoplan.runtime.build.facts import DAY, Once, recall, remember
from monoplan.runtime.build.processes import CompileTimeout, run

_USED = "used-compiler"  # the name of the fact
VERSION_SECONDS = 30  # for the answer to --version
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
    # Why it can't be started: it is the one that filled the cache, and is not on this machine.
    absent: CompileError | None = field(default=None, compare=False)

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


def known_compiler() -> Compiler:
    """The same; where there is none, the one that built what is in the cache, by whose name it is found."""
    try:
        return find_compiler()
    except CompileError as error:
        fact = None if os.environ.get("CC", "").strip() else recall(_USED, "")
        if fact is None:
            raise
        words = list(map(str, fact["command"]))  # type: ignore[call-overload]
        return Compiler(words[0], tuple(words[1:]), str(fact["kind"]), str(fact["version"]), error)


def remember_used(compiler: Compiler, openmp: bool) -> None:
    """Notes the compiler of a finished build, for a machine that has the cache and no compiler."""
    fact = {"command": list(compiler.command), "kind": compiler.kind, "version": compiler.version_line}
    remember(_USED, "", {**fact, "openmp": openmp})


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


@Once
def _identify_signed(command: tuple[str, ...], signature: str) -> Compiler | None:
    """The compiler; None for one that does not answer, which is worth no second wait."""
    fact = recall("compiler", signature)
    if fact is None:
        try:
            code, log = run([*command, "--version"], Path.cwd(), None, timeout=VERSION_SECONDS)
        except CompileTimeout:
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


def has_openmp(compiler: Compiler, *, fresh: bool = False) -> bool:
    """Whether -fopenmp compiles and links; `fresh` asks again where the known answer is no."""
    if compiler.absent is not None:
        return bool((recall(_USED, "") or {}).get("openmp"))
    try:
        return _openmp(compiler, _signature(compiler.command), fresh)
    except _Undecided:
        return False  # for now: the next plan asks again


class _Undecided(Exception):
    """No probe was built, neither with OpenMP nor without: that says nothing about OpenMP."""


@Once
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

    for place in dict.fromkeys((None, cache_places.cache_root())):
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="monoplan-", dir=place) as name:
            folder = Path(name)
            (folder / "probe.c").write_text(_OPENMP_PROBE, "utf-8")
            if status(folder, "-fopenmp") == 0:
                return True
            if status(folder) == 0 and (again := status(folder, "-fopenmp")) >= 0:
                return again == 0
    raise _Undecided
