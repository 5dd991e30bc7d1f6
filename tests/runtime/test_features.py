"""ISA levels: what flags claim, what a trial allows, what the compiler gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from monoplan.ir.errors import ArgumentError
from monoplan.runtime.build import cache_places, compilers, processes
from monoplan.runtime.machine import features
from monoplan.runtime.machine.features import CpuFeatures
from tests.needs import COMPILERS, needs

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("gcc", "clang"))), reason="no C compiler here")

AVX2 = frozenset({"sse2", "avx", "avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512vbmi"}
ALL_X86 = ("scalar", "generic", "avx2", "avx512", "amx")
N1 = frozenset("fp asimd atomics crc32 asimdrdm fphp asimdhp asimddp".split())


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    for name in ("MONOPLAN_ISA", "CC"):
        monkeypatch.delenv(name, raising=False)
    features._detect.cache_clear()


def accept(candidate: CpuFeatures) -> str:
    return ""


def refuse(*levels: str) -> object:
    return lambda candidate: "the probe died of SIGILL" if candidate.isa in levels else ""


@pytest.mark.parametrize(
    ("arch", "flags", "count"),
    [
        ("x86_64", frozenset(), 2),
        ("x86_64", AVX2 - {"fma"}, 2),
        ("x86_64", AVX2, 3),
        ("x86_64", AVX512 - {"avx512vl"}, 3),
        ("x86_64", AVX512 - {"f16c"}, 2),
        ("x86_64", AVX512, 4),
        ("x86_64", AMX - {"amx_bf16"}, 4),
        ("x86_64", AMX, 5),
    ],
)
def test_levels_of_x86(arch: str, flags: frozenset[str], count: int) -> None:
    assert features.levels(arch, flags) == ALL_X86[:count]


def test_levels_elsewhere() -> None:
    assert features.levels("aarch64", frozenset()) == ("scalar", "generic", "neon")
    assert features.levels("riscv64", AMX) == ("scalar", "generic")


@pytest.mark.parametrize(
    ("isa", "flags", "expected"),
    [
        ("scalar", AMX, ""),
        ("generic", AMX, ""),
        ("avx2", AMX, "-mavx2 -mfma -mf16c"),
        ("avx512", AVX512, "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl"),
        (
            "amx",
            AMX,
            "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl"
            " -mamx-tile -mamx-bf16 -mamx-int8 -mavx512bf16 -mavx512vnni -mavx512vbmi",
        ),
        ("neon", frozenset(), "-march=armv8-a"),
        ("neon", N1, "-march=armv8.2-a+fp16+dotprod+lse"),
        ("neon", N1 - {"asimdrdm"}, "-march=armv8-a+fp16+dotprod+lse"),
        ("neon", N1 | {"bf16", "i8mm"}, "-march=armv8.2-a+fp16+dotprod+lse+bf16+i8mm"),
    ],
)
def test_compile_flags_are_explicit(isa: str, flags: frozenset[str], expected: str) -> None:
    found = CpuFeatures("any", isa, tuple(sorted(flags)))
    assert " ".join(features.compile_flags(found)) == expected


def test_vector_bytes() -> None:
    assert [features.vector_bytes(isa) for isa in (*ALL_X86, "neon")] == [0, 16, 32, 64, 64, 16]


def test_strongest_level_that_survives_its_trial() -> None:
    assert features.choose("x86_64", AMX, "", accept).isa == "amx"
    found = features.choose("x86_64", AMX, "", refuse("amx"))
    assert found.isa == "avx512" and "-mamx-tile" in found.note and "SIGILL" in found.note
    assert features.choose("x86_64", AMX, "", refuse("amx", "avx512")).isa == "avx2"
    assert features.choose("x86_64", AMX, "", refuse("amx", "avx512", "avx2")).isa == "generic"
    assert features.choose("aarch64", N1, "", refuse("neon")).isa == "generic"


def test_options_are_dropped_before_the_level() -> None:
    def old_compiler(candidate: CpuFeatures) -> str:
        return "unknown flag" if "-mavx512bf16" in features.compile_flags(candidate) else ""

    found = features.choose("x86_64", AMX, "", old_compiler)
    assert found.isa == "amx" and "avx512_bf16" not in found.flags and "unknown flag" in found.note
    assert "-mamx-tile" in features.compile_flags(found)


def test_flags_hold_only_what_matters() -> None:
    assert "sse2" not in features.choose("x86_64", AMX, "", accept).flags
    a, b = (features.choose("x86_64", AVX2 | {extra}, "", accept) for extra in ("sse2", "new_in_this_kernel"))
    assert a.key == b.key
    assert a.key != features.choose("x86_64", AVX512, "", accept).key


@pytest.mark.parametrize("wanted", ALL_X86)
def test_wanted_level(wanted: str) -> None:
    found = features.choose("x86_64", AMX, wanted, accept)
    assert found.isa == wanted and "MONOPLAN_ISA" in found.note
    # A lower level shows nothing of the higher ones: two machines that differ only there share their builds.
    less = {"avx2": AVX2, "avx512": AMX - {"amx_tile"}, "amx": AMX}.get(wanted, frozenset())
    assert found.key == features.choose("x86_64", less, wanted, accept).key


@pytest.mark.parametrize(
    ("wanted", "part"), [("avx512", "not possible"), ("neon", "not possible"), ("sse9", "not a level")]
)
def test_wanted_level_that_is_impossible(wanted: str, part: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        features.choose("x86_64", AVX2, wanted, accept)
    text = str(caught.value)
    assert part in text and "MONOPLAN_ISA" in text and "possible here: scalar, generic, avx2" in text


def test_wanted_level_that_crashes() -> None:
    with pytest.raises(ArgumentError, match=r"a trial failed(.|\n)*SIGILL(.|\n)*scalar, generic, avx2$"):
        features.choose("x86_64", AVX512, "avx512", refuse("avx512"))


def cpuinfo(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.skipif(sys.platform == "darwin", reason="/proc/cpuinfo is Linux")
def test_read_cpuinfo(tmp_path: Path) -> None:
    x86 = "processor\t: {}\nmodel name\t: Some CPU @ 2.00GHz\nflags\t\t: fpu sse2 {}\nbugs\t: x\n\n"
    text = x86.format(0, "avx2 amx_tile") + x86.format(1, "avx2")
    assert features.read_cpu(cpuinfo(tmp_path / "a", text)) == (
        "Some CPU @ 2.00GHz",
        frozenset({"fpu", "sse2", "avx2"}),  # only what every core has
    )
    arm = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n"
    model, flags = features.read_cpu(cpuinfo(tmp_path / "b", arm))
    assert model.endswith("Neoverse-N1") and flags == {"fp", "asimd", "asimddp"}
    assert features.read_cpu(tmp_path / "missing")[1] == frozenset()


def test_read_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "machdep.cpu.brand_string": "Apple M2\n",
        "hw.optional.arm": "hw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_I8MM: 0\n",
        "machdep.cpu.features": "FPU AVX1.0 FMA\nAVX2 BMI1\n",
    }
    monkeypatch.setattr(features, "sysctl", lambda *keys, names=False: answers[keys[0]])
    monkeypatch.setattr(features, "machine", lambda: "aarch64")
    assert features._read_macos() == ("Apple M2", frozenset({"bf16"}))
    monkeypatch.setattr(features, "machine", lambda: "x86_64")
    assert {"fma", "avx2"} <= features._read_macos()[1]


@pytest.mark.parametrize("name", COMPILERS)
def test_detect_here(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CC", name)
    found = features.detect()
    assert found.arch == features.machine()
    assert found.isa in features.levels(found.arch, features.read_cpu()[1])
    runs = processes.compiler_runs()
    assert features.detect() is found
    features._detect.cache_clear()  # as a new process: the trial is remembered on disk
    assert features.detect() == found
    assert processes.compiler_runs() == runs


@pytest.mark.skipif(features.machine() != "aarch64", reason="aarch64 only")
@pytest.mark.parametrize("name", COMPILERS)
def test_nothing_is_lost_on_arm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The probe itself must be right: one that can't compile would silently cost fp16 and dot products."""
    monkeypatch.setenv("CC", name)
    found = features.detect()
    assert found.isa == "neon" and found.note == "detected"
    assert set(found.flags) == features.read_cpu()[1] & features._KNOWN["neon"]


@needs_compiler
@pytest.mark.parametrize("isa", ["scalar", "generic"])
def test_override_by_environment(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    assert features.detect().isa not in ("scalar",)
    monkeypatch.setenv("MONOPLAN_ISA", f" {isa.upper()} ")
    assert features.detect().isa == isa  # seen without clearing anything
    monkeypatch.setenv("MONOPLAN_ISA", "avx1024")
    with pytest.raises(ArgumentError, match=r"avx1024(.|\n)*scalar, generic"):
        features.detect()


@needs_compiler
def test_whether_a_compiler_will_be_asked_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_ISA", "generic")
    assert features.is_tried()  # there is nothing to try
    monkeypatch.setenv("MONOPLAN_ISA", "avx1024")
    assert features.is_tried()  # nor here: detect raises at once
    monkeypatch.delenv("MONOPLAN_ISA")
    compilers.find_compiler()
    for new in (True, False, False):
        runs = processes.compiler_runs()
        tried = features.is_tried()
        found = features.detect()
        assert tried is (processes.compiler_runs() == runs)
        assert tried is (not new or found.isa in ("scalar", "generic"))
        features._detect.cache_clear()  # as a new process
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert features.is_tried()


@pytest.fixture
def write_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts another program in place of those that try the CPU."""
    monkeypatch.setattr(features, "_HERE", tmp_path)

    def write(source: str) -> None:
        for name in ("trial_x86.c", "trial_arm.c"):
            (tmp_path / name).write_text(source)

    return write


@needs_compiler
@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("raise(4);", "SIGILL"),
        ("return 3;", "nonsense"),
        ("return 2;", "tile permission"),
        ("#error too old", "too old"),
    ],
)
def test_failing_probe(write_trial: Callable[[str], None], body: str, part: str) -> None:
    write_trial(f"#include <signal.h>\nint main(void) {{\n{body}\n}}\n")
    trial = features._Trial(compilers.find_compiler(), "model")
    isa = "neon" if features.machine() == "aarch64" else "avx2"
    candidate = CpuFeatures(features.machine(), isa, ())
    assert part in trial(candidate)
    write_trial("int main(void) { return 0; }\n")
    # A crash is remembered; a build that failed is not, until the same compiler has built something.
    assert bool(trial(candidate)) is (body != "#error too old")


@needs_compiler
def test_refused_flag_is_remembered_once_something_was_built(
    write_trial: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trial("int main(void) { return 0; }\n")
    compiler = compilers.find_compiler()
    bad, good = CpuFeatures("aarch64", "neon", ("a",)), CpuFeatures("aarch64", "neon", ("b",))
    table = {bad: ("-mno-such-flag-here",), good: ()}
    monkeypatch.setattr(features, "compile_flags", lambda candidate: table[candidate])
    trial = features._Trial(compiler, "model")
    assert "no-such-flag" in trial(bad)
    assert trial(good) == ""
    runs = processes.compiler_runs()
    again = features._Trial(compiler, "model")
    assert "no-such-flag" in again(bad) and again(good) == ""
    assert processes.compiler_runs() == runs


@needs_compiler
def test_probe_runs_elsewhere_when_the_temporary_directory_is_noexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isa = "neon" if features.machine() == "aarch64" else "avx2"
    if isa not in features.levels(features.machine(), features.read_cpu()[1]):
        pytest.skip(f"no {isa} here")
    real, places = subprocess.run, []

    def run(command: list[str], **options: object) -> object:
        places.append(Path(command[0]))
        if len(places) == 1:
            raise PermissionError("noexec")
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    trial = features._Trial(compilers.find_compiler(), "model")
    assert trial(CpuFeatures(features.machine(), isa, ())) == ""
    assert len(places) == 2 and places[1].is_relative_to(cache_places.cache_root())


def test_without_a_compiler_flags_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(features, "machine", lambda: "x86_64")
    monkeypatch.setattr(features, "read_cpu", lambda: ("model", AMX))
    found = features.detect()
    assert found.isa == "avx512" and "no C compiler" in found.note  # AMX needs a permission that was not seen


def test_amx_needs_the_permission_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features._Trial, "_run", lambda *_: "")
    trial = features._Trial(compilers.Compiler("cc", (), "gcc", "1"), "model")
    candidate = CpuFeatures("x86_64", "amx", ())
    monkeypatch.setattr(features, "request_tiles", lambda: False)
    assert "permission" in trial(candidate)
    monkeypatch.setattr(features, "request_tiles", lambda: True)
    assert trial(candidate) == ""


def test_request_tiles_never_raises() -> None:
    assert features.request_tiles() in (True, False)
    if features.machine() != "x86_64":
        assert not features.request_tiles()


@needs("clang")  # it compiles for other machines
@pytest.mark.parametrize(
    ("target", "probe", "found", "instructions"),
    [
        ("x86_64", "trial_x86.c", CpuFeatures("x86_64", "avx2", tuple(AVX2)), "vfmadd vcvtps2ph vpaddd"),
        ("x86_64", "trial_x86.c", CpuFeatures("x86_64", "avx512", tuple(AVX512)), "vpmullq vpaddw vprold"),
        ("x86_64", "trial_x86.c", CpuFeatures("x86_64", "amx", tuple(AMX)), "tdpbf16ps vdpbf16ps vpdpbusd vpermb"),
        (
            "aarch64",
            "trial_arm.c",
            CpuFeatures("aarch64", "neon", tuple(N1 | {"bf16", "i8mm", "asimdfhm"})),
            "fmla sdot smmla bfdot fmlal ldadd",
        ),
    ],
)
def test_probes_execute_what_they_claim(
    tmp_path: Path, target: str, probe: str, found: CpuFeatures, instructions: str
) -> None:
    """The assembly of each probe holds the instructions of its level, on whatever machine this runs."""
    (tmp_path / "unistd.h").write_text("long syscall(long, ...);\n")
    source = Path(features.__file__).resolve().parent / probe
    command = ["clang", f"--target={target}-linux-gnu", "-ffreestanding", "-O0", "-S", f"-I{tmp_path}"]
    command += [*features.compile_flags(found), "-Wall", "-Werror", "-o", "-", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    for name in instructions.split():
        assert f"\t{name}" in done.stdout, name
