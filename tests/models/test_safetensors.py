"""safetensors directories: copies of what the files held, shards, and one LoadError for each kind of damage."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Part
from monoplan.models.config import LlamaConfig
from monoplan.models.load import weight_file
from monoplan.models.load.checkpoint import open_model
from monoplan.models.load.safetensors import INDEX, SINGLE, open_checkpoint, save_checkpoint

Array = NDArray[Any]


def small_state() -> dict[str, Array]:
    random = np.random.default_rng(1)
    return {
        "a.weight": random.standard_normal((3, 5)).astype(np.float32),
        "b.weight": random.standard_normal((4, 2, 2)).astype(ml_dtypes.bfloat16),
        "c.weight": random.standard_normal(7).astype(np.float16),
        "d.empty": np.zeros((0, 4), np.float32),
        "e.scalar": np.array(3, np.int64),
        "f.mask": np.array([True, False]),
    }


def assert_same(checkpoint: Any, state: Mapping[str, Array]) -> None:
    assert set(checkpoint.names()) == set(state)
    for name, array in state.items():
        found = checkpoint.tensor(name)
        assert checkpoint.shape(name) == found.shape == array.shape
        assert checkpoint.dtype(name) == found.dtype == array.dtype
        np.testing.assert_array_equal(found.astype(np.float64), array.astype(np.float64))


def test_single_file_and_what_the_library_reads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state(), {"model_type": "llama"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", SINGLE]
    assert_same(open_checkpoint(tmp_path), small_state())
    assert_same(open_checkpoint(tmp_path / SINGLE), small_state())
    by_library = load_file(tmp_path / SINGLE)
    assert by_library["b.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(by_library["a.weight"], small_state()["a.weight"])
    header = (tmp_path / SINGLE).read_bytes()[8:60]
    assert b'"__metadata__":{"format":"pt"}' in header


def test_a_tensor_is_a_copy_of_its_own(tmp_path: Path) -> None:
    save_file({"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    first, second = checkpoint.tensor("w"), checkpoint.tensor("w")
    assert first.flags.writeable and not np.shares_memory(first, second)
    cut(tmp_path / SINGLE, 0)
    assert first.sum() == 66.0  # of a mapped file this would end the process


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    state = {"a": np.zeros((64, 64), np.float32), "b": np.ones((2, 4), np.float32)}
    for length in (0, 5, 300, 20_000):
        save_file(state, tmp_path / SINGLE)
        size = (tmp_path / SINGLE).stat().st_size
        checkpoint = open_checkpoint(tmp_path)
        cut(tmp_path / SINGLE, min(length, size - 4))
        for part in (None, Part(0, 1, 1), Part(1, 0, 2)):
            with pytest.raises(LoadError, match="changed while it was being loaded") as caught:
                checkpoint.tensor("b", part)
            text = str(caught.value)
            assert "tensor 'b'" in text and "bytes" in text and SINGLE in text and "load the model again" in text


def test_a_file_that_is_written_to_is_an_error_and_one_that_is_replaced_is_not(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file({"a": np.zeros(4, np.float32)}, path)
    checkpoint = open_checkpoint(tmp_path)
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "new")
    (tmp_path / "new").rename(path)
    assert checkpoint.tensor("a").sum() == 0.0
    assert open_checkpoint(tmp_path).tensor("a").sum() == 4.0
    checkpoint = open_checkpoint(tmp_path)
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(0, 1))  # the clock of a file system may be too coarse to tell
    with pytest.raises(LoadError, match="changed while it was being loaded") as caught:
        checkpoint.tensor("a")
    assert "written to since it was opened" in str(caught.value)


def test_an_open_file_can_be_copied_and_pickled(tmp_path: Path) -> None:
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / SINGLE)
    checkpoint = open_checkpoint(tmp_path)
    for other in (copy.deepcopy(checkpoint), pickle.loads(pickle.dumps(checkpoint))):
        assert other.tensor("a").tolist() == [0, 1, 2, 3]
    stored = pickle.dumps(checkpoint)
    os.utime(tmp_path / SINGLE, ns=(0, 1))
    with pytest.raises(LoadError, match="it is not the file that was opened first"):
        pickle.loads(stored)


def test_parts_of_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "_BLOCK", 100)
    array = np.arange(7 * 6 * 5, dtype=np.float32).reshape(7, 6, 5)
    save_file({"x": np.zeros(3, np.uint8), "w": array}, tmp_path / SINGLE)
    checkpoint, got = open_checkpoint(tmp_path), 0
    true = os.preadv

    def count(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal got
        got += (n := true(descriptor, buffers, offset))
        return n

    monkeypatch.setattr(os, "preadv", count)
    for axis, size in enumerate(array.shape):
        for start, length in ((0, size), (1, size - 1), (size - 1, 1), (2, 0)):
            got = 0
            found = checkpoint.tensor("w", Part(axis, start, length))
            assert found.flags.c_contiguous and found.flags.aligned
            np.testing.assert_array_equal(found, np.take(array, range(start, start + length), axis))
            if axis == 0:
                assert got == found.nbytes, "a rank reads only its rows"


def test_a_tensor_at_an_odd_byte_is_aligned(tmp_path: Path) -> None:
    entries = {
        "x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "y": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    write_raw(tmp_path / SINGLE, json.dumps(entries), b"abc" + np.array([1.5, 2.5], "<f4").tobytes())
    found = open_checkpoint(tmp_path).tensor("y")
    assert found.flags.aligned and found.tolist() == [1.5, 2.5]


def test_shards_and_saving_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state(), max_shard_bytes=64)
    shards = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors" and len(shards) > 1
    index = json.loads((tmp_path / INDEX).read_text())
    assert set(index["weight_map"]) == set(small_state())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in small_state().values())
    assert_same(open_checkpoint(tmp_path), small_state())
    # Fewer files the next time: the old ones must not stay and be read instead.
    changed = {"a.weight": np.ones((2, 2), np.float32)}
    save_checkpoint(tmp_path, changed)
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]
    save_checkpoint(tmp_path, small_state(), max_shard_bytes=64)
    assert not (tmp_path / SINGLE).exists()
    assert_same(open_checkpoint(tmp_path), small_state())


def test_saving_takes_any_memory_order_and_refuses_other_dtypes(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_checkpoint(tmp_path, {"t": array.T, "s": array[:, ::2], "v": array.astype(">f4")})
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.tensor("t"), array.T)
    np.testing.assert_array_equal(checkpoint.tensor("s"), array[:, ::2])
    np.testing.assert_array_equal(checkpoint.tensor("v"), array)
    with pytest.raises(LoadError, match="can't save tensor 'z' of dtype complex64"):
        save_checkpoint(tmp_path, {"z": np.zeros(2, np.complex64)})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensor("t"), array.T)


def test_a_failed_save_leaves_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, small_state())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(ArgumentError, match="can't write the model(.|\n)*disk full"):
        save_checkpoint(tmp_path, {"a.weight": np.zeros(3, np.float32)})
    assert_same(open_checkpoint(tmp_path), small_state())
    assert [file.name for file in tmp_path.iterdir()] == [SINGLE]


def test_unknown_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, small_state())
    with pytest.raises(LoadError, match="there is no tensor 'nope'"):
        open_checkpoint(tmp_path).tensor("nope")


def write_raw(path: Path, header: str, data: bytes, length: int | None = None) -> None:
    text = header.encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


ONE = '{"x": {"dtype": "%s", "shape": %s, "data_offsets": %s}}'


@pytest.mark.parametrize(
    ("header", "data", "length"),
    [
        (ONE % ("F32", "[2]", "[0, 8]"), b"1234567", None),  # the data is cut
        (ONE % ("F32", "[2]", "[0, 8]"), b"123456789", None),  # there is more than the header says
        (ONE % ("F32", "[2]", "[0, 8]"), b"12345678", 2**63),  # an absurd header length
        (ONE % ("F32", "[2]", "[0, 8]"), b"12345678", 200),  # a header longer than the file
        (ONE % ("F32", "[2]", "[4, 12]"), b"1234567890ab", None),  # a hole at the beginning
        (ONE % ("F32", "[3]", "[0, 8]"), b"12345678", None),  # shape and size disagree
        (ONE % ("F32", "[-2]", "[0, 8]"), b"12345678", None),
        (ONE % ("F32", "[4611686018427387904, 4]", "[0, 8]"), b"12345678", None),  # overflows 64 bits
        (ONE % ("F32", "[2]", "[8, 0]"), b"12345678", None),
        (ONE % ("F32", "[2.0]", "[0, 8]"), b"12345678", None),
        (ONE % ("F32", "[true, 2]", "[0, 8]"), b"12345678", None),
        (ONE % ("F32", "[2]", "[0, 8, 8]"), b"12345678", None),
        (ONE % ("F32", '"2"', "[0, 8]"), b"12345678", None),
        ('{"x": {"dtype": 1, "shape": [2], "data_offsets": [0, 8]}}', b"12345678", None),
        (ONE[:-1] % ("F32", "[2]", "[0, 8]") + "," + ONE[1:] % ("F32", "[2]", "[0, 8]"), b"12345678", None),  # twice
        (
            ONE[:-1].replace("x", "y") % ("F32", "[1]", "[0, 4]") + "," + ONE[1:] % ("F32", "[2]", "[0, 8]"),
            b"12345678",
            None,
        ),  # two tensors overlap
        ("{garbage", b"", None),
        ("[]", b"", None),
        ('{"x": 1}', b"", None),
        ("", b"", None),
    ],
)
def test_damaged_headers(tmp_path: Path, header: str, data: bytes, length: int | None) -> None:
    write_raw(tmp_path / SINGLE, header, data, length)
    with pytest.raises(LoadError, match="model.safetensors is damaged") as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_dtypes_that_numpy_lacks_are_named(tmp_path: Path) -> None:
    for kind in ("F8_E5M2", "F33"):
        write_raw(tmp_path / SINGLE, ONE % (kind, "[2]", "[0, 2]"), b"12")
        with pytest.raises(LoadError, match=f"tensor 'x' has the dtype {kind}"):
            open_checkpoint(tmp_path)


def test_any_cut_and_any_flipped_header_byte(tmp_path: Path) -> None:
    """Whatever happens to the bytes of the header: a LoadError, or tensors that lie within the file."""
    save_checkpoint(tmp_path, small_state())
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in [0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError):
            open_checkpoint(tmp_path)
    random = np.random.default_rng(2)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.integers(header)] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(tmp_path)
            for name in checkpoint.names():
                checkpoint.tensor(name).tobytes()
            outcomes.add("loaded")
        except LoadError:
            outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}  # a letter of a name may change unseen; lengths and offsets may not


@pytest.mark.parametrize(
    "name", ["../w.safetensors", "/w.safetensors", "a/b.safetensors", "..", "", "c:w", "a\\b", "a" * 300, "é" * 200]
)
def test_an_index_may_not_leave_the_directory(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "w.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(LoadError, match="not a plain file name"):
        open_checkpoint(directory)


def test_damaged_indexes(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": null}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(LoadError, match="index"):
            open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(LoadError, match="the shard model-00002-of-00002.safetensors is missing"):
        open_checkpoint(tmp_path)
    save_file({"v": np.zeros(2, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(LoadError, match="1 tensors of the index are not in their shards"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": 7}}))
    with pytest.raises(LoadError, match="the shard 7 is missing"):
        open_checkpoint(tmp_path)


def test_directories_without_usable_weights(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(LoadError, match="is a pickle file") as caught:
        open_checkpoint(tmp_path)
    assert "convert" in str(caught.value)
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "other.safetensors")
    assert open_checkpoint(tmp_path).names() == ["w"]
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "another.safetensors")
    with pytest.raises(LoadError, match="several safetensors files"):
        open_checkpoint(tmp_path)


def test_open_model_of_a_directory(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    state = {"model.norm.weight": np.ones(8, np.float32)}
    save_checkpoint(tmp_path, state, config.to_dict())
    found = open_model(tmp_path)
    assert found.config == config
    assert_same(found.weights, state)
    with pytest.raises(LoadError, match="there is no tokenizer.json"):
        found.tokenizer()


def test_paths_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("~nobody-of-that-name/model", tmp_path / ("x" * 5000), "a\0b"):
        with pytest.raises(LoadError):
            open_model(path)


def test_open_model_says_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no such model"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="the directory is empty"):
        open_model(tmp_path)
    (tmp_path / "readme.md").write_text("hello")
    with pytest.raises(LoadError, match="no model in the directory"):
        open_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(LoadError, match="model.bin is a pickle file") as caught:
        open_model(tmp_path / "model.bin")
    assert "convert to safetensors" in str(caught.value)
    with pytest.raises(LoadError, match="readme.md is not a model"):
        open_model(tmp_path / "readme.md")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(LoadError, match="is a pickle file"):
        open_model(tmp_path)
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / SINGLE)
    with pytest.raises(LoadError, match="weights alone are no model"):
        open_model(tmp_path / SINGLE)
