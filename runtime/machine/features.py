"""What this CPU can do: its flags, the ISA level that was seen to work, and the compiler flags for it.

A level that the CPU claims is tried once in a child process before anything is compiled for it: some machines
report instructions that they lack, and AMX needs the kernel's permission. The outcome is remembered on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path

from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.build import cache_places, compilers, facts, toolchain
from monoplan.runtime.build.facts import Once
from monoplan.runtime.build.processes import CompileTimeout

# What the system says about its CPU: architecture, model and flags, and the C library that goes with it.


_MACOS_ARM = {
    "FEAT_FP16": "asimdhp", "FEAT_DotProd": "asimddp", "FEAT_LSE": "atomics", "FEAT_FHM": "asimdfhm",
    "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_CRC32": "crc32", "FEAT_RDM": "asimdrdm",
}  # fmt: skip
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def machine() -> str:
    """The architecture by one name on every system."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}.get(name, name)


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, frozenset[str]]:
    """Model name and flags, by their Linux names; flags that only some of the cores have don't count."""
    if sys.platform == "darwin":
        return _read_macos()
    values: dict[str, list[str]] = {}
    try:
        for line in cpuinfo.read_text("utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            values.setdefault(name.strip(), []).append(value.strip())
    except OSError:
        pass  # no /proc: an unknown CPU of no special abilities
    sets = [frozenset(text.split()) for text in values.get("flags", values.get("Features", []))]
    part = values.get("CPU part", ["unknown"])[0]
    model = values.get("model name", [f"{machine()} {_ARM_PARTS.get(part, part)}"])[0]
    return model, frozenset.intersection(*sets) if sets else frozenset()


def _read_macos() -> tuple[str, frozenset[str]]:
    model = sysctl("machdep.cpu.brand_string").strip()
    if machine() == "x86_64":
        return model, frozenset(sysctl("machdep.cpu.features", "machdep.cpu.leaf7_features").lower().split())
    lines = sysctl("hw.optional.arm", names=True).splitlines()  # hw.optional.arm.FEAT_BF16: 1
    present = {line[:-3].rpartition(".")[2] for line in lines if line.endswith(": 1")}
    return model, frozenset(linux for apple, linux in _MACOS_ARM.items() if apple in present)


def sysctl(*keys: str, names: bool = False) -> str:
    """Output of macOS's sysctl for `keys`; empty where there is none."""
    import subprocess

    command = ["sysctl", *(() if names else ("-n",)), *keys]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def libc() -> str:
    """Name and version: a library of a newer system does not load on an older one that shares the cache."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    except (AttributeError, ValueError, OSError):
        return "".join(platform.libc_ver()) or platform.release()


_HERE = Path(__file__).resolve().parent
_EMULATED = "tiles"  # code for AMX in plain C: for tests, and only when asked for
_BASELINE = ("scalar", "generic")  # need nothing of the CPU
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_NEEDS = {
    "x86_64": {"avx2": _AVX2, "avx512": _AVX512, "amx": _AVX512 | {"amx_tile", "amx_bf16"}},
    "aarch64": {"neon": frozenset[str]()},  # part of the architecture
}
_FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    "amx": ("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
# What a level may have beyond its needs: name in /proc/cpuinfo -> compiler flag, or -march= extension.
_X86_OPTIONS = {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni", "avx512vbmi": "-mavx512vbmi"}
_ARM_OPTIONS = {
    "asimdhp": "fp16", "asimddp": "dotprod", "atomics": "lse", "asimdfhm": "fp16fml",
    "bf16": "bf16", "i8mm": "i8mm",
}  # fmt: skip
# What Armv8.2 adds to user code. gcc's header ties the fp16 and dot product intrinsics to arch=armv8.2-a, and
# does not inline them under -march=armv8-a+fp16+dotprod.
_ARMV82 = frozenset({"crc32", "atomics", "asimdrdm"})
# The flags that code of a level may ask for: a lower level by MONOPLAN_ISA must not see those of a higher.
_KNOWN = {
    "avx2": _AVX2,
    "avx512": _AVX512.union(_X86_OPTIONS),
    "amx": _NEEDS["x86_64"]["amx"].union(_X86_OPTIONS, {"amx_int8"}),
    "neon": _ARMV82.union(_ARM_OPTIONS),
}
_VECTOR_BYTES = {"amx": 64, "avx512": 64, "avx2": 32, "neon": 16, "generic": 16, "scalar": 0, _EMULATED: 64}
_NO_TILES = "the kernel refused the tile permission"


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """The part of the CPU's abilities that generated code may use."""

    arch: str  # "x86_64", "aarch64", or what the platform calls itself
    isa: str
    flags: tuple[str, ...]  # those that code of this level may use, as Linux names them, sorted
    note: str = field(default="", compare=False)  # how the level was chosen, for the doctor

    @property
    def key(self) -> str:
        """The target part of the cache key: system, C library, architecture, level and flags."""
        return "-".join((sys.platform, libc(), self.arch, "+".join((self.isa, *self.flags))))


def detect() -> CpuFeatures:
    """The features of this machine, tried and remembered; MONOPLAN_ISA chooses a lower level."""
    return _detect(*_asked())


def _asked() -> tuple[str, str]:
    """What the environment says: the wanted level, and the compiler that must know it."""
    return os.environ.get("MONOPLAN_ISA", "").strip().lower(), os.environ.get("CC", "")


def levels(arch: str, flags: frozenset[str]) -> tuple[str, ...]:
    """The levels that a CPU of these flags claims, weakest first."""
    return (*_BASELINE, *(isa for isa, needs in _NEEDS.get(arch, {}).items() if needs <= flags))


def compile_flags(features: CpuFeatures) -> tuple[str, ...]:
    """Explicit compiler flags of the level, never "native"; none for generic and scalar."""
    if features.isa == "neon":
        base = "armv8.2-a" if _ARMV82 <= set(features.flags) else "armv8-a"
        extensions = (flag for name, flag in _ARM_OPTIONS.items() if name in features.flags)
        return ("+".join((f"-march={base}", *extensions)),)
    if features.isa == _EMULATED:
        return ("-DMP_TILES_EMULATED", "-Wno-psabi")  # vectors wider than registers: nobody outside sees them
    if features.isa in _BASELINE:
        return ()
    steps = ("avx2", "avx512", "amx")
    flags = [flag for isa in steps[: steps.index(features.isa) + 1] for flag in _FLAGS[isa]]
    if features.isa != "avx2":
        flags += [flag for name, flag in _X86_OPTIONS.items() if name in features.flags]
    return tuple(flags)


def vector_bytes(isa: str) -> int:
    """Width of the vectors that code of this level uses; 0 for scalar."""
    return _VECTOR_BYTES[isa]


def known() -> tuple[str, ...]:
    """Levels that code can be generated for, here or elsewhere."""
    return tuple(isa for isa in _VECTOR_BYTES if isa != _EMULATED)


def plain(isa: str) -> CpuFeatures:
    """A level without options, on whichever architecture has it."""
    arch = next((arch for arch, needs in _NEEDS.items() if isa in needs), "any CPU")
    return CpuFeatures(arch, isa, tuple(sorted(_NEEDS.get(arch, {}).get(isa, ()))))


def choose(arch: str, flags: frozenset[str], wanted: str, trial: Callable[[CpuFeatures], str]) -> CpuFeatures:
    """The strongest claimed level, or `wanted`, for which `trial` has no objection (an empty string)."""
    claimed = levels(arch, flags)
    if wanted and wanted not in (*claimed, _EMULATED):
        known = wanted in _VECTOR_BYTES
        raise ArgumentError(
            f"MONOPLAN_ISA={wanted!r} is not {'possible on this CPU' if known else 'a level'}",
            fix=f"possible here: {', '.join(claimed)}",
        )
    objections: list[str] = []
    for isa in (wanted,) if wanted else reversed(claimed):
        full = CpuFeatures(arch, isa, tuple(sorted(flags & _KNOWN.get(isa, frozenset()))))
        # An old compiler, or a lying CPU, may fail only at the options: the plain level is the second try.
        plain = replace(full, flags=tuple(f for f in full.flags if f not in _X86_OPTIONS | _ARM_OPTIONS))
        for candidate in dict.fromkeys((full, plain)):
            objection = trial(candidate)
            if not objection:
                first = "set by MONOPLAN_ISA" if wanted else "detected"
                return replace(candidate, note="; ".join((first, *objections)))
            objections.append(f"{' '.join(compile_flags(candidate))}: {objection}")
    raise ArgumentError(
        f"MONOPLAN_ISA={wanted!r} is claimed by this CPU, but a trial failed",
        why="; ".join(objections),
        fix=f"possible here: {', '.join(i for i in claimed if i != wanted)}",
    )


def is_tried() -> bool:
    """Whether detect() will answer at once: else it lets a compiler build a trial, and runs it."""
    if _detect.knows(*_asked()):
        return True
    wanted, _ = _asked()
    arch, (model, flags) = machine(), read_cpu()
    untried: list[CpuFeatures] = []

    def recall(candidate: CpuFeatures) -> str:
        objection = trial.recall(candidate)
        if objection is None:
            untried.append(candidate)
        return objection or ""

    with contextlib.suppress(CompileError, ArgumentError):  # nothing can be tried: detect() says why
        trial = _Trial(compilers.known_compiler(), model)
        choose(arch, flags, wanted, recall)
    return not untried


@Once
def _detect(wanted: str, _cc: str) -> CpuFeatures:
    arch, (model, flags) = machine(), read_cpu()
    try:
        trial: Callable[[CpuFeatures], str] = _Trial(compilers.known_compiler(), model)
    except CompileError:  # nothing can be built either, so nothing can crash
        untried = choose(arch, flags - {"amx_tile"}, wanted, lambda _: "")
        return replace(untried, note="not tried: no C compiler")
    return choose(arch, flags, wanted, trial)


@dataclass(slots=True)
class _Trial:
    """Builds and runs the probe of a candidate; says why it can't be used, or an empty string."""

    compiler: compilers.Compiler
    model: str
    unbuilt: list[tuple[str, str]] = field(default_factory=list)

    def recall(self, candidate: CpuFeatures) -> str | None:
        """What an earlier trial said; None: there was none."""
        if candidate.isa in (*_BASELINE, _EMULATED):
            return ""
        fact = facts.recall("isa", self._key(candidate))
        if fact is None and self.compiler.absent is not None:  # nothing can be tried, nor built
            return "not tried: no C compiler" if candidate.isa == "amx" else ""
        return str(fact["objection"]) if fact else None

    def _key(self, candidate: CpuFeatures) -> str:
        flags = compile_flags(candidate)
        return json.dumps([self.compiler.identity, self.model, candidate.key, platform.release(), flags])

    def __call__(self, candidate: CpuFeatures) -> str:
        objection = self.recall(candidate)
        if objection is None:
            objection = self._run(candidate, self._key(candidate), compile_flags(candidate))
        # Asked in this process too: the remembered probe may have run outside of its sandbox.
        if not objection and candidate.isa == "amx" and not request_tiles():
            return _NO_TILES
        return objection

    def _run(self, candidate: CpuFeatures, key: str, flags: tuple[str, ...]) -> str:
        import subprocess
        import tempfile

        # Any of these may be mounted noexec, or be absent; the same order as when a plan is loaded.
        for place in dict.fromkeys((None, os.environ.get("XDG_RUNTIME_DIR") or None, cache_places.cache_root())):
            try:
                with tempfile.TemporaryDirectory(prefix="monoplan-", dir=place) as folder:
                    code = self._run_in(Path(folder), candidate.arch, flags)
            except OSError:
                continue
            except subprocess.TimeoutExpired:
                return "the probe did not end"
            except CompileTimeout:
                raise  # it says nothing about the level
            except CompileError as error:
                lines = error.what.splitlines()
                reason = next((line for line in lines[1:] if "error" in line), lines[-1]).strip()
                self.unbuilt.append((key, f"the compiler refuses: {reason}"))
                return self.unbuilt[-1][1]
            return self._conclude(key, code)
        return "no place to run the probe" if candidate.isa == "amx" else ""

    def _run_in(self, folder: Path, arch: str, flags: tuple[str, ...]) -> int:
        import subprocess

        source, program = folder / "probe.c", folder / "probe"
        kind = "arm" if arch == "aarch64" else "x86"
        shutil.copyfile(_HERE / f"trial_{kind}.c", source)
        toolchain.compile_program(source, program, ("-O0", *flags), self.compiler)
        return subprocess.run([str(program)], timeout=30, capture_output=True).returncode

    def _conclude(self, key: str, code: int) -> str:
        if code < 0:
            objection = f"the probe died of {signal.Signals(-code).name}"
        else:
            objection = {0: "", 2: _NO_TILES}.get(code, "the probe computed nonsense")
        facts.remember("isa", key, {"objection": objection}, facts.DAY if objection else None)
        # Refused flags are remembered only now that the compiler has shown that it can build at all.
        for refused, reason in self.unbuilt:
            facts.remember("isa", refused, {"objection": reason}, facts.DAY)
        self.unbuilt.clear()
        return objection


def request_tiles() -> bool:
    """Asks the kernel for AMX state, for this process and its threads; once is enough, more is harmless."""
    if machine() != "x86_64" or sys.platform != "linux":
        return False
    try:
        from cffi import FFI
    except ImportError:  # then no CPU plan can be loaded either; the CUDA path must not stumble here
        return False
    ffi = FFI()
    ffi.cdef("long syscall(long number, ...);")
    arch_prctl, request, tile_data = 158, 0x1023, 18
    arguments = (ffi.cast("long", request), ffi.cast("long", tile_data))
    return bool(ffi.dlopen(None).syscall(arch_prctl, *arguments) == 0)
