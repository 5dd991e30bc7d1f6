"""What this CPU can do: its flags, the ISA level that was seen to work, and the compiler flags for it.

A level that the CPU claims is tried once in a child process before anything is compiled for it: some machines
report instructions that they lack, and AMX needs the kernel's permission. The outcome is remembered on disk.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from monoplan.ir.errors import ArgumentError, CompileError
from monoplan.runtime import cache, compilers, facts, toolchain
from monoplan.runtime.once import Once

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
_MACOS_ARM = {
    "FEAT_FP16": "asimdhp", "FEAT_DotProd": "asimddp", "FEAT_LSE": "atomics", "FEAT_FHM": "asimdfhm",
    "FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_CRC32": "crc32", "FEAT_RDM": "asimdrdm",
}  # fmt: skip
_NO_TILES = "the kernel refused the tile permission"
_ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}

# Each instruction runs where the compiler's flags allow it; argc is 1, and unknown to the optimiser.
_X86_PROBE = """
#include <immintrin.h>
#include <unistd.h>
int main(int argc, char **argv) {
    (void)argv;
#ifdef __AVX2__
    __m256 a = _mm256_set1_ps((float)argc);
    a = _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_fmadd_ps(a, a, a), 0));
    __m256i b = _mm256_add_epi32(_mm256_set1_epi32(argc), _mm256_cvtps_epi32(a));
    if (_mm256_extract_epi32(b, 7) != 3) return 3;
#endif
#ifdef __AVX512F__
    __m512i c = _mm512_add_epi16(_mm512_set1_epi16((short)argc), _mm512_set1_epi16(2));
    c = _mm512_mullo_epi64(c, _mm512_set1_epi64(argc));
    __m256i d = _mm256_maskz_rol_epi32(0xff, _mm512_castsi512_si256(c), 16);
    if (_mm256_extract_epi32(d, 0) != 0x30003) return 3;
#endif
#ifdef __AVX512VNNI__
    c = _mm512_dpbusd_epi32(c, c, c);
    if (_mm_extract_epi32(_mm512_castsi512_si128(c), 0) != 0x30003 + 18) return 3;
#endif
#ifdef __AVX512VBMI__
    __m512i f = _mm512_permutexvar_epi8(_mm512_set1_epi8((char)argc), _mm512_set1_epi16(0x201));
    if (_mm_extract_epi32(_mm512_castsi512_si128(f), 0) != 0x2020202) return 3;
#endif
#ifdef __AVX512BF16__
    __m512 e = _mm512_set1_ps((float)argc);
    __m512bh h = _mm512_cvtne2ps_pbh(e, e);
    if (_mm_cvtss_f32(_mm512_castps512_ps128(_mm512_dpbf16_ps(e, h, h))) != 3.0f) return 3;
#endif
#if defined(__AMX_BF16__) || defined(__AMXBF16__) /* the second: clang before 16 */
    if (syscall(158, 0x1023, 18) != 0) return 2; /* arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) */
    struct { unsigned char head[16]; unsigned short bytes[16]; unsigned char rows[16]; } shape = {0};
    static unsigned short ones[16 * 32];
    static float sums[16 * 16];
    for (int i = 0; i < 16 * 32; i++) ones[i] = argc == 1 ? 0x3f80 : 0;
    shape.head[0] = 1; /* the palette */
    for (int i = 0; i < 3; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_loadd(1, ones, 64);
    _tile_loadd(2, ones, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
    if (sums[255] != 32.0f) return 3;
#endif
    return 0;
}
"""
_ARM_PROBE = """
#include <arm_neon.h>
int main(int argc, char **argv) {
    (void)argv;
    float32x4_t a = vdupq_n_f32((float)argc);
    if (vgetq_lane_f32(vfmaq_f32(a, a, a), 3) != 2.0f) return 3;
    int8x16_t b = vdupq_n_s8((signed char)argc);
    int32x4_t sums = vdupq_n_s32(0);
    (void)b, (void)sums;
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
    float16x8_t h = vdupq_n_f16((float16_t)argc);
    if (vgetq_lane_f16(vfmaq_f16(h, h, h), 7) != 2.0f) return 3;
#endif
#ifdef __ARM_FEATURE_FP16_FML
    if (vgetq_lane_f32(vfmlalq_low_f16(a, h, h), 3) != 2.0f) return 3;
#endif
#ifdef __ARM_FEATURE_DOTPROD
    if (vgetq_lane_s32(vdotq_s32(sums, b, b), 3) != 4) return 3;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    if (vgetq_lane_s32(vmmlaq_s32(sums, b, b), 3) != 8) return 3;
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    bfloat16x8_t f = vcombine_bf16(vcvt_bf16_f32(a), vcvt_bf16_f32(a));
    if (vgetq_lane_f32(vbfdotq_f32(a, f, f), 3) != 3.0f) return 3;
#endif
    static int counter;
    return __atomic_fetch_add(&counter, argc, __ATOMIC_SEQ_CST);
}
"""


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
        return "-".join((sys.platform, _libc(), self.arch, "+".join((self.isa, *self.flags))))


def detect() -> CpuFeatures:
    """The features of this machine, tried and remembered; MONOPLAN_ISA chooses a lower level."""
    return _detect(os.environ.get("MONOPLAN_ISA", "").strip().lower(), os.environ.get("CC", ""))


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


@Once
def _detect(wanted: str, _cc: str) -> CpuFeatures:
    arch, (model, flags) = machine(), read_cpu()
    try:
        trial: Callable[[CpuFeatures], str] = _Trial(compilers.find_compiler(), model)
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

    def __call__(self, candidate: CpuFeatures) -> str:
        if candidate.isa in (*_BASELINE, _EMULATED):
            return ""
        flags = compile_flags(candidate)
        key = json.dumps([self.compiler.identity, self.model, candidate.key, platform.release(), flags])
        fact = facts.recall("isa", key)
        objection = str(fact["objection"]) if fact else self._run(candidate, key, flags)
        # Asked in this process too: the remembered probe may have run outside of its sandbox.
        if not objection and candidate.isa == "amx" and not request_tiles():
            return _NO_TILES
        return objection

    def _run(self, candidate: CpuFeatures, key: str, flags: tuple[str, ...]) -> str:
        # Any of these may be mounted noexec, or be absent; the same order as when a plan is loaded.
        for place in dict.fromkeys((None, os.environ.get("XDG_RUNTIME_DIR") or None, cache.cache_root())):
            try:
                with tempfile.TemporaryDirectory(prefix="monoplan-", dir=place) as folder:
                    code = self._run_in(Path(folder), candidate.arch, flags)
            except OSError:
                continue
            except subprocess.TimeoutExpired:
                return "the probe did not end"
            except CompileError as error:
                lines = error.what.splitlines()
                reason = next((line for line in lines[1:] if "error" in line), lines[-1]).strip()
                self.unbuilt.append((key, f"the compiler refuses: {reason}"))
                return self.unbuilt[-1][1]
            return self._conclude(key, code)
        return "no place to run the probe" if candidate.isa == "amx" else ""

    def _run_in(self, folder: Path, arch: str, flags: tuple[str, ...]) -> int:
        source, program = folder / "probe.c", folder / "probe"
        source.write_text(_ARM_PROBE if arch == "aarch64" else _X86_PROBE, "utf-8")
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
    except ImportError:  # then no CPU plan can be loaded either; the CUDA road must not stumble here
        return False
    ffi = FFI()
    ffi.cdef("long syscall(long number, ...);")
    arch_prctl, request, tile_data = 158, 0x1023, 18
    arguments = (ffi.cast("long", request), ffi.cast("long", tile_data))
    return bool(ffi.dlopen(None).syscall(arch_prctl, *arguments) == 0)


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
    command = ["sysctl", *(() if names else ("-n",)), *keys]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _libc() -> str:
    """Name and version: a library of a newer system does not load on an older one that shares the cache."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    except (AttributeError, ValueError, OSError):
        return "".join(platform.libc_ver()) or platform.release()
