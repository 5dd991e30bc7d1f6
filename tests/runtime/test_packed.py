"""Packed weights in the cache: found again, never stale, never damaged, and no more than the cap says."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan import plan_cache
from monoplan.ir.errors import ArgumentError
from monoplan.models import AutoLlamaModel, LlamaForCausalLM
from monoplan.models.load import weight_file
from monoplan.runtime.build import cache, cache_places, trusted
from monoplan.runtime.cpu import block_sums, packed
from tests.models.support import tiny_config

IDS = np.array([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the plans of all tests here, which compile the same."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def root(plans: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with no weights in it."""
    shutil.rmtree(plans / "weights", ignore_errors=True)
    monkeypatch.setenv("MONOPLAN_CACHE_DIR", str(plans))
    monkeypatch.setattr(cache_places, "_state", cache_places._State())
    return plans


@pytest.fixture
def model(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that may be believed though it was written a moment ago."""
    monkeypatch.setattr(weight_file, "SETTLED", -1e9)
    monkeypatch.setattr(plan_cache, "makers", lambda: "the code")
    monkeypatch.delenv("MONOPLAN_CACHE_MAX_WEIGHT_BYTES", raising=False)
    return saved(tmp_path / "model", seed=1)


def saved(folder: Path, seed: int) -> Path:
    LlamaForCausalLM.from_config(tiny_config(), seed=seed).save_pretrained(folder)
    return folder


def run(model: Path, dtype: str | None = None, **options: Any) -> tuple[bytes, bool]:
    """Logits, and whether no weight was packed for them; as a process that compiles this model once."""
    llm = mp.compile(AutoLlamaModel.from_pretrained(model), dtype=dtype, options={"threads": 1, **options})
    result = np.asarray(llm(IDS)).tobytes()
    packed.wait_written()
    laps = llm.stats.milliseconds
    assert ("load" in laps) != ("pack" in laps)
    return result, "load" in laps


def files(root: Path) -> list[Path]:
    return sorted((root / "weights").iterdir()) if (root / "weights").exists() else []


def test_second_start_maps(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, mapped = run(model)
    assert not mapped and len(files(root)) == 1
    assert files(root)[0].stat().st_mode & 0o777 == 0o600

    def unread(*args: Any) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(weight_file.WeightFile, "tensor", unread)
    monkeypatch.setattr(weight_file.WeightFile, "digest", unread)
    assert run(model) == (first, True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_pages_are_shared(model: Path, root: Path) -> None:
    run(model)
    llm = mp.compile(AutoLlamaModel.from_pretrained(model))
    llm(IDS)
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags")
    (found,) = (block for block in blocks if ".packed" in block)
    fields = dict(line.split(":", 1) for line in found.splitlines() if line.endswith("kB"))
    assert "r--p" in found and int(fields["Rss"].split()[0]) > 0
    assert int(fields["Anonymous"].split()[0]) == 0  # all of it is the file's own memory, which others map too


def test_each_dtype_has_its_own(model: Path, root: Path) -> None:
    assert run(model)[0] != run(model, "float16")[0]
    assert len(files(root)) == 2
    assert run(model)[1] and run(model, "float16")[1]
    half = run(model, "float16")[0]
    shutil.rmtree(root / "weights")
    assert run(model, "float16") == (half, False)


def test_changed_file_is_packed_anew(model: Path, tmp_path: Path) -> None:
    """Even if it has the size and the time of the old one."""
    first, _ = run(model)
    path = model / "model.safetensors"
    before = path.stat()
    other = saved(tmp_path / "other", seed=2) / "model.safetensors"
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second, mapped = run(model)
    assert not mapped and second != first
    path.write_bytes((saved(tmp_path / "again", seed=1) / "model.safetensors").read_bytes())
    assert run(model) == (first, True)  # what it was at first, byte for byte


def test_file_written_a_moment_ago_is_not_kept(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "SETTLED", 1e9)
    assert not run(model)[1] and not files(root)


def test_other_weights_are_not_the_files(model: Path, root: Path) -> None:
    first, _ = run(model)
    made = AutoLlamaModel.from_pretrained(model)
    made.load_parameter("model.norm.weight", 2 * np.asarray(made.model.norm.weight.numpy()))
    llm = mp.compile(made)
    assert np.asarray(llm(IDS)).tobytes() != first
    packed.wait_written()
    assert run(model) == (first, True)


def flip(at: Callable[[int], int]) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at(len(data))] ^= 4

    return change


DAMAGE: dict[str, Callable[[bytearray], None]] = {
    "first byte": flip(lambda size: 0),
    "an array": flip(lambda size: size // 3),
    "a sum": flip(lambda size: size - 30),
    "the length": flip(lambda size: size - 2),
    "cut": lambda data: data.__delitem__(slice(len(data) // 2, None)),
    "cut by one": lambda data: data.__delitem__(-1),
    "empty": bytearray.clear,
    "longer": lambda data: data.extend(b"0"),
    "zeros": lambda data: data.__setitem__(slice(1000, 9000), bytes(8000)),
    "swapped": lambda data: data.__setitem__(slice(0, 16), data[8:16] + data[:8]),
}


def test_damage_is_noticed_and_mended(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run(model)
    (path,) = files(root)
    whole = path.read_bytes()
    for how, change in DAMAGE.items():
        data = bytearray(whole)
        change(data)
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o600)
        monkeypatch.setattr(cache_places, "_state", cache_places._State())
        with pytest.warns(RuntimeWarning, match="damaged cache file"):
            assert run(model) == (first, False), how
        assert path.read_bytes() == whole, how


def test_a_file_that_others_can_write_is_not_used(model: Path, root: Path) -> None:
    first, _ = run(model)
    files(root)[0].chmod(0o666)
    assert run(model) == (first, False)


def test_cap(model: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model)
    (first,) = files(root)
    size = first.stat().st_size
    os.utime(first, (1, 1))
    other = saved(tmp_path / "other", seed=2)
    monkeypatch.setenv("MONOPLAN_CACHE_MAX_WEIGHT_BYTES", str(size * 3 // 2))
    run(other)
    assert len(files(root)) == 1 and not first.exists()  # the longest unused went
    assert not run(model, weight_bytes=size // 2)[1] and len(files(root)) == 1  # too large, and removes nothing
    assert not run(other, weight_bytes=0)[1]
    assert cache.info().weights == 1 and cache.info().weight_bytes == size
    assert cache.prune_weights(0) == (1, size) and not files(root)
    monkeypatch.setenv("MONOPLAN_CACHE_MAX_WEIGHT_BYTES", "much")
    with pytest.raises(ArgumentError, match="not a number of bytes"):
        run(model)


@pytest.mark.parametrize("when", ["before", "while"])
def test_full_disk(model: Path, root: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((os, "statvfs", full) if when == "before" else (packed, "_write", full)))
    with pytest.warns(RuntimeWarning, match="not kept for later processes .No space left") as said:
        first, _ = run(model)
        assert run(model) == (first, False)
    assert len([w for w in said if "not kept" in str(w.message)]) == 1
    assert not files(root)  # no temporary file either


def test_writers_at_once(model: Path, root: Path) -> None:
    """Two processes that pack the same: the second rename replaces equal bytes."""
    first, _ = run(model)
    whole = files(root)[0].read_bytes()
    mapped = mp.compile(AutoLlamaModel.from_pretrained(model))
    with trusted.replacing(root, f"weights/{files(root)[0].name}") as stream:
        assert run(model) == (first, True)
        stream.write(whole)
    assert np.asarray(mapped(IDS)).tobytes() == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(model) == (first, True)


def test_sums_notice_any_two_bits() -> None:
    rng = np.random.default_rng(1)
    data = rng.integers(0, 1 << 63, block_sums.WORDS, np.uint64)
    wanted = block_sums.sums(data)
    for count, bits in ((1, 64), (2, 50)):
        for _ in range(500):
            changed = data.copy()
            for at in rng.choice(block_sums.WORDS, count, replace=False):
                changed[at] ^= np.uint64(1) << np.uint64(rng.integers(bits))
            assert block_sums.sums(changed) != wanted


def test_no_compiler_is_needed(model: Path, root: Path, tmp_path: Path) -> None:
    """A process that finds no compiler runs what another one put into the cache; what is new is an error."""
    first, _ = run(model)
    (tmp_path / "bin").mkdir()
    code = (
        "import sys, numpy as np, monoplan as mp\n"
        "from monoplan import plan_cache\n"
        "from monoplan.models import AutoLlamaModel\n"
        "from monoplan.models.load import weight_file\n"
        "weight_file.SETTLED, plan_cache.makers = -1e9, lambda: 'the code'\n"
        f"llm = mp.compile(AutoLlamaModel.from_pretrained({str(model)!r}), options={{'threads': 1}})\n"
        "result = np.asarray(llm(np.array([[3, 1, 4, 1, 5]])))\n"
        "assert 'load' in llm.stats.milliseconds and llm.stats.cache_hits == 1\n"
        "sys.stdout.buffer.write(result.tobytes())\n"
        "try:\n"
        "    mp.compile(mp.nn.Linear(7, 5))(np.ones((3, 7), np.float32))\n"
        "except mp.MonoplanError as error:\n"
        "    assert 'no C compiler was found' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    environ = {k: v for k, v in os.environ.items() if k != "CC"} | {"PATH": str(tmp_path / "bin")}
    environ["PYTHONPATH"] = str(Path(mp.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == first
