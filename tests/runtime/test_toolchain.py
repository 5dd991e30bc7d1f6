"""Finding, running and counting the compiler; fake compilers are small shell scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from cffi import FFI

from monoplan.ir.errors import CompileError
from monoplan.runtime.build import cache, cache_places, compilers, facts, processes, toolchain
from tests import needs

IMPORT_ROOT = Path(toolchain.__file__).parents[3]
SOURCE = '#include "answer.h"\nint answer(void) { return ANSWER; }\n'
HEADERS = (("answer.h", "#define ANSWER 42\n"),)
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler here")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    compilers._identify_signed.cache_clear()
    compilers._openmp.cache_clear()
    return tmp_path / "cache"


def script(path: Path, body: str, version: str = "fakecc 1.0 (Free Software Foundation)") -> Path:
    """An executable that answers --version and else runs `body`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit 0; fi\n{body}\n')
    path.chmod(0o755)
    return path


def counting(path: Path, log: Path) -> Path:
    """A compiler that writes a line to `log` each time any process starts it."""
    real = shutil.which(COMPILERS[0])
    path.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {real} "$@"\n')
    path.chmod(0o755)
    return path


def open_answer(path: str) -> int:
    ffi = FFI()
    ffi.cdef("int answer(void);")
    return int(ffi.dlopen(path).answer())


def plan(source: str = SOURCE, flags: tuple[str, ...] = ()) -> tuple[cache.BuildKey, object]:
    return toolchain.plan_build(source, flags, target="test", abi=1, headers=HEADERS)


@needs_compiler
@pytest.mark.filterwarnings("ignore:monoplan. plans run on one thread")  # a clang without OpenMP
@pytest.mark.parametrize("name", needs.COMPILERS)
def test_real_compiler_from_cc(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CC", name)
    compiler = compilers.find_compiler()
    assert compiler.kind == name and os.path.isabs(compiler.path) and compiler.version_line
    library, entry = toolchain.load(*plan(), open_answer)
    assert library == 42 and not entry.hit
    assert toolchain.load(*plan(), open_answer)[1].hit


def test_search_order_and_broken_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    script(tmp_path / "bin/clang", "exit 1", "clang version 14")
    assert compilers.find_compiler().kind == "clang"
    script(tmp_path / "bin/gcc", "exit 1")
    assert compilers.find_compiler().path.endswith("bin/gcc")
    stub = script(tmp_path / "bin/cc", "exit 1")
    assert compilers.find_compiler().path.endswith("bin/cc")
    stub.write_text("#!/bin/sh\necho no developer tools >&2; exit 1\n")
    assert compilers.find_compiler().path.endswith("bin/gcc")


def test_no_compiler_tells_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path / "cc", "").write_text("#!/bin/sh\necho no developer tools >&2; exit 72\n")
    with pytest.raises(CompileError) as caught:
        compilers.find_compiler()
    text = str(caught.value)
    for part in ("apt install gcc", "dnf install gcc", "xcode-select --install", "no developer tools", "clang"):
        assert part in text


@pytest.mark.parametrize("setting", ["/no/such/compiler", "gcc 'unbalanced", "no-such-cc -m64", "/etc/passwd"])
def test_cc_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("CC", setting)
    with pytest.raises(CompileError) as caught:
        compilers.find_compiler()
    assert f"CC={setting!r}" in str(caught.value) and "unset it" in str(caught.value)


def test_cc_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mycc"
    path.write_text("#!/bin/sh\necho licence expired >&2; exit 9\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    with pytest.raises(CompileError, match=r"CC=.*mycc(.|\n)*status 9: licence expired"):
        compilers.find_compiler()


def test_a_compiler_that_hangs_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mycc"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))
    monkeypatch.setattr(compilers, "VERSION_SECONDS", 0.2)
    before = processes.compiler_runs()
    for _ in range(2):
        with pytest.raises(CompileError, match=r"CC=.*mycc(.|\n)*--version did not end within 0.2 s"):
            compilers.find_compiler()
    assert processes.compiler_runs() == before + 1


def test_cc_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "my wrapper"
    script(wrapper, "")
    wrapper.write_text('#!/bin/sh\necho "$@" >&2\n[ "$1 $2" = "real cc" ] && echo wrapped 3.1\n')
    monkeypatch.setenv("CC", f"'{wrapper}' real cc")
    compiler = compilers.find_compiler()
    assert compiler.command == (str(wrapper), "real", "cc")
    assert compiler.version_line == "wrapped 3.1" and compiler.kind == "unknown"
    assert "real cc" in compiler.identity and "wrapped 3.1" in compiler.identity


def test_version_is_asked_once_and_again_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = script(tmp_path / "cc", "", "fake 1")
    monkeypatch.setenv("CC", str(fake))
    before = processes.compiler_runs()
    assert [compilers.find_compiler().version_line for _ in range(3)] == ["fake 1"] * 3
    assert processes.compiler_runs() == before + 1
    script(fake, "", "fake 2.0")
    assert compilers.find_compiler().version_line == "fake 2.0"
    assert processes.compiler_runs() == before + 2


@needs_compiler
def test_second_process_starts_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "runs"
    monkeypatch.setenv("CC", str(counting(tmp_path / "cc", log)))
    monkeypatch.setenv("PYTHONPATH", str(IMPORT_ROOT))
    code = (
        "from monoplan.runtime.build import processes, toolchain\n"
        "from monoplan.runtime.machine import features\n"
        "flags = features.compile_flags(features.detect())\n"
        "key, build = toolchain.plan_build('int f(void) { return 1; }', flags, target='t', abi=1)\n"
        "_, entry = toolchain.load(key, build, str)\n"
        "print(entry.hit, processes.compiler_runs())\n"
    )
    outs = [subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) for _ in range(2)]
    first = log.read_text().splitlines()
    assert outs[0] == f"False {len(first)}\n" and len(first) >= 3  # version, OpenMP, plan, perhaps CPU probes
    assert outs[1] == "True 0\n"
    assert log.read_text().splitlines() == first


@needs_compiler
def test_entry_can_be_rebuilt_by_hand(tmp_path: Path) -> None:
    _, entry = toolchain.load(*plan(), open_answer)
    assert "-ffp-contract=fast" in entry.log and "plan.c -o plan.so" in entry.log
    copy = tmp_path / "elsewhere"
    shutil.copytree(entry.path, copy)
    (copy / "plan.so").unlink()
    subprocess.run(["sh", str(copy / "build.sh")], check=True, cwd="/")
    assert open_answer(str(copy / "plan.so")) == 42
    assert (copy / "plan.so").read_bytes() == entry.binary.read_bytes()  # no path in the bytes


@needs_compiler
def test_key_follows_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {plan()[0].digest(), plan(flags=("-DX",))[0].digest()}
    monkeypatch.setenv("CC", str(counting(tmp_path / "cc", tmp_path / "log")))
    assert len(digests | {plan()[0].digest()}) == 3


@needs_compiler
@pytest.mark.filterwarnings("ignore:monoplan. plans run on one thread")  # a clang without OpenMP
@pytest.mark.parametrize("name", needs.COMPILERS)
def test_failing_compile_shows_all_that_helps(root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CC", name)
    wrong = SOURCE + "int broken(void) { return missing_name; }\n"
    with pytest.raises(CompileError) as caught:
        toolchain.load(*plan(wrong), open_answer)
    text = str(caught.value)
    assert "missing_name" in text and "plan.c:3" in text and "-O3" in text
    assert isinstance(caught.value.where, Path)
    assert caught.value.where.read_text() == wrong
    assert (caught.value.where.parent / "answer.h").exists()
    assert list((root / "plans").iterdir()) == []
    # The command that is shown can be pasted, and fails in the same way.
    again = subprocess.run(["sh", "-c", caught.value.why], capture_output=True, text=True)
    assert again.returncode != 0 and "missing_name" in again.stderr


def test_long_message_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "i=0; while [ $i -lt 100 ]; do echo message $i >&2; i=$((i+1)); done; exit 4"
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    (tmp_path / "a.c").write_text("")
    with pytest.raises(CompileError) as caught:
        toolchain.compile_shared(tmp_path / "a.c", tmp_path / "a.so", ())
    text = str(caught.value)
    assert "status 4" in text and "message 29\n" in text and "message 30" not in text
    assert "70 more lines" in text and caught.value.where == tmp_path / "a.c"


@pytest.mark.parametrize(("body", "part"), [("exit 1", "printed nothing"), ("kill -9 $$", "killed by signal 9")])
def test_silent_and_killed_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, part: str) -> None:
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    (tmp_path / "a.c").write_text("")
    with pytest.raises(CompileError, match=part):
        toolchain.compile_shared(tmp_path / "a.c", tmp_path / "a.so", ())


def test_full_disk_in_the_compiler_moves_the_build(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f'case "$PWD" in {root}*) echo "plan.s: No space left on device" >&2; exit 1;; esac; echo > plan.so'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    with pytest.warns(RuntimeWarning, match="using a temporary one"):
        entry = cache.get_or_build(*plan())
    assert entry.binary.exists() and not entry.path.is_relative_to(root)


def test_compiler_works_in_the_build_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = '[ "$TMPDIR" = "$PWD" ] && [ "$LC_ALL" = C ] && echo "$@" > plan.so'
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", body)))
    entry = cache.get_or_build(*plan(flags=("-mfake",)))
    words = entry.binary.read_text().split()
    assert words[-5:] == ["-mfake", "plan.c", "-o", "plan.so", "-lm"]
    assert set(toolchain.BASE_FLAGS) <= set(words)


def test_facts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.recall("a", "key") is None
    facts.remember("a", "key", {"x": 1})
    facts.remember("a", "other", {"x": 2}, 3600)
    assert facts.recall("a", "key") == {"x": 1} and facts.recall("a", "other") == {"x": 2}
    assert facts.recall("b", "key") is None
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 4000)
    assert facts.recall("a", "key") == {"x": 1} and facts.recall("a", "other") is None
    for path in (root / "facts").iterdir():
        path.write_text("[")
    with pytest.warns(RuntimeWarning, match="damaged cache file"):
        assert facts.recall("a", "key") is None
    assert len(list((root / "facts").iterdir())) == 1  # the damaged one is gone


def make(folder: Path) -> None:
    (folder / "plan.so").write_bytes(b"binary")


KEY = cache.BuildKey("", (), "cc", (), "test", 1)


def test_noexec_cache_loads_a_copy(root: Path) -> None:
    def opener(path: str) -> str:
        if Path(path).is_relative_to(root):
            raise OSError("failed to map segment from shared object: Operation not permitted")
        assert Path(path).read_bytes() == b"binary"
        return path

    with pytest.warns(RuntimeWarning, match="a copy does") as caught:
        loaded, entry = toolchain.load(KEY, make, opener)
        toolchain.load(KEY, make, opener)
    assert len(caught) == 1
    assert not Path(loaded).is_relative_to(root) and entry.path.is_relative_to(root)


def test_noexec_copy_prefers_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    candidates = list(toolchain.load_candidates(cache.get_or_build(KEY, make)))
    assert len(candidates) == 3 and candidates[1].is_relative_to(tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert len(list(toolchain.load_candidates(cache.get_or_build(KEY, make)))) == 2


def test_clear_during_load(root: Path) -> None:
    calls = []

    def opener(path: str) -> str:
        calls.append(path)
        if len(calls) == 1:
            cache.clear()  # between the lookup and dlopen
        return Path(path).read_text()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toolchain.load(KEY, make, opener)[0] == "binary"
    assert len(calls) == 2


def test_unloadable_entry_is_rebuilt_once() -> None:
    """As when the entry was linked against a library that this container lacks."""
    cache.get_or_build(KEY, lambda folder: make(folder) or (folder / "plan.so").write_text("stale"))

    def opener(path: str) -> str:
        if Path(path).read_text() == "stale":
            raise OSError("libgomp.so.1: cannot open shared object file")
        return "fine"

    with pytest.warns(RuntimeWarning, match="does not load .*libgomp.*rebuilt"):
        loaded, entry = toolchain.load(KEY, make, opener)
    assert loaded == "fine" and not entry.hit


def test_library_that_never_loads_is_an_error() -> None:
    def opener(path: str) -> str:
        raise OSError("undefined symbol: x")

    with pytest.raises(CompileError, match="undefined symbol: x"):
        toolchain.load(KEY, make, opener)
