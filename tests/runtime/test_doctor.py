"""The doctor's page: complete, aligned, and never an exception."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import types
from pathlib import Path

import pytest

from monoplan.runtime.build import cache, cache_places, compilers
from monoplan.runtime.machine import doctor, features

LABELS = (
    "python numpy compiler cpu isa features threads cache cached gpu safetensors tokenizers gguf tqdm huggingface_hub "
    "cupy mpi4py"
).split()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    for name in ("MONOPLAN_ISA", "MONOPLAN_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    fake = tmp_path / "mycc"  # quick; the real one is asked in one test
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "my clang 9"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    features._detect.cache_clear()
    compilers._identify_signed.cache_clear()
    compilers._openmp.cache_clear()
    return tmp_path / "cache"


def rows() -> dict[str, str]:
    """The page as label -> value; continued lines are joined."""
    found: dict[str, str] = {}
    label = ""
    for line in doctor.report(colour=False).splitlines():
        name, value = re.fullmatch(r"(\S*) +(.*)", line).groups()  # type: ignore[union-attr]
        label = name or label
        found[label] = f"{found[label]}\n{value}" if not name else value
    return found


def fake_cupy(monkeypatch: pytest.MonkeyPatch, runtime: object) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "14.0" if name == "cupy-cuda13x" else real(name))
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)


def test_page_is_complete_and_aligned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy

    monkeypatch.delenv("CC")
    page = doctor.report(colour=False)
    found = rows()
    assert set(LABELS) <= set(found)
    assert found["numpy"] == numpy.__version__ and found["cache"] == str(root)
    assert found["cached"] == "0 entries, 0 B of at most 2.0 GB"
    assert re.match(r"\d+: ", found["threads"])
    assert "\x1b" not in page and page.endswith("\n")
    width = max(len(label) for label in found)
    assert all(line[width : width + 2] == "  " and line[width + 2] != " " for line in page.splitlines())


def test_cache_is_counted() -> None:
    key = cache.BuildKey("", (), "cc", (), "test", 1)
    cache.get_or_build(key, lambda folder: (folder / "plan.so").write_bytes(b"x" * 5000) and None)
    assert re.match(r"1 entry, \d kB of", rows()["cached"])


def test_no_compiler_is_part_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = rows()
    assert "no C compiler was found" in found["compiler"] and "apt install gcc" in found["compiler"]
    assert "no C compiler" in found["isa"]


def test_compiler_and_openmp(tmp_path: Path) -> None:
    found = rows()
    assert found["compiler"] == f"{tmp_path / 'mycc'} (from CC)" and found["version"] == "my clang 9 (clang)"
    assert found["openmp"].startswith("no")


def test_overrides_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_ISA", "scalar")
    monkeypatch.setenv("MONOPLAN_NUM_THREADS", "3")
    found = rows()
    assert found["isa"] == "scalar (set by MONOPLAN_ISA)"
    assert found["threads"] == "3: MONOPLAN_NUM_THREADS"


def test_bad_settings_are_shown_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MONOPLAN_ISA", "avx1024")
    monkeypatch.setenv("MONOPLAN_NUM_THREADS", "many")
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "file/x"))
    with pytest.warns(RuntimeWarning):
        found = rows()
    assert "avx1024" in found["cpu"] and "'many'" in found["threads"]
    assert "temporary" in found["cache"]


def test_cupy_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name.startswith("cupy"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = rows()
    assert "CuPy is not installed" in found["gpu"] and found["cupy"] == "not installed"


def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": b"Fast GPU", "major": 9, "minor": 0, "totalGlobalMem": 150_000_000_000}
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=lambda index: properties)
    fake_cupy(monkeypatch, runtime)
    found = rows()
    assert found["gpu"] == "0: Fast GPU, compute capability 9.0, 150.0 GB" and found["cupy"] == "14.0"
    assert "driver for CUDA does not answer" in found["cuda"] and "NVRTC" in found["cuda"]
    runtime.driverGetVersion, runtime.runtimeGetVersion = (lambda: 13010), (lambda: 12090)
    properties |= {"major": 7, "minor": 0}
    found = rows()
    assert "driver for CUDA 13.1, runtime 12.9" in found["cuda"] and "cuBLASLt" in found["cuda"]
    assert found["gpu"].endswith("(too old: kernels need 7.5)")


def test_cuda_trouble_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def trouble() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    fake_cupy(monkeypatch, types.SimpleNamespace(getDeviceCount=trouble))
    assert "cudaErrorInsufficientDriver" in rows()["gpu"]
    fake_cupy(monkeypatch, types.SimpleNamespace(getDeviceCount=lambda: 0))
    assert "no device" in rows()["gpu"]
    monkeypatch.setitem(sys.modules, "cupy", None)  # import raises
    assert "does not import" in rows()["gpu"]


@pytest.mark.parametrize(("tty", "no_colour", "expected"), [(True, "1", False), (True, "", True), (False, "", False)])
def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, tty: bool, no_colour: str, expected: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty, raising=False)
    assert ("\x1b[1m" in doctor.report()) is expected
