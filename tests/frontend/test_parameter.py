"""Parameters and their shards."""

from __future__ import annotations

import numpy as np
import pytest

from monoplan.frontend.parameter import Parameter
from monoplan.frontend.tensor import Tensor
from monoplan.ir.errors import LoadError
from monoplan.ir.types import Part, bf16, f16

FULL = np.arange(24, dtype=np.float32).reshape(4, 6)


def test_whole() -> None:
    p = Parameter.empty((4, 6))
    assert p.full_shape == (4, 6) and not p.numpy().any() and repr(p) == "Parameter(f32[4, 6])"
    p.load(FULL)
    np.testing.assert_array_equal(p.numpy(), FULL)
    p.load(Tensor(FULL * 2))
    assert p.numpy()[3, 5] == 46 and isinstance(p, Tensor)
    with pytest.raises(LoadError, match=r"expected \[4, 6\], got \[6, 4\]"):
        p.load(FULL.T)


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_shards(tp_dim: int) -> None:
    parts = []
    for rank in range(2):
        shape = (2, 6) if tp_dim == 0 else (4, 3)
        p = Parameter.empty(shape, "f16", tp_dim=tp_dim, tp_rank=rank, tp_size=2)
        assert p.full_shape == (4, 6)
        p.load(FULL)
        assert p.dtype is f16 and p.shape == shape
        parts.append(p.numpy())
        p.load(p.numpy() + 1)  # a shard fits as well
        np.testing.assert_array_equal(p.numpy(), parts[-1] + 1)
    np.testing.assert_array_equal(np.concatenate(parts, axis=tp_dim), FULL)


def test_blobs() -> None:
    p = Parameter.empty((2,), "bf16")
    p.load_blob(np.array([1.5, -2.0], bf16.numpy).tobytes())
    assert p.tolist() == [1.5, -2.0]
    p.load_blob(bytearray(4))
    p.load_blob(memoryview(np.zeros(2, np.uint16)))
    p.numpy()[0] = 3  # the copy is ours
    with pytest.raises(LoadError, match=r"expected 4 bytes for bf16\[2\], got 2"):
        p.load_blob(b"ab")


def test_loaded_values_are_a_copy(tmp_path: object) -> None:
    path = f"{tmp_path}/weights.npy"
    np.save(path, FULL)
    mapped = np.load(path, mmap_mode="r")
    for dtype in ("f32", "f16"):
        p = Parameter.empty((4, 6), dtype)
        p.load(mapped)
        assert not np.shares_memory(p.numpy(), mapped) and type(p.numpy()) is np.ndarray


@pytest.mark.parametrize("tp_dim", [0, 1])
def test_parts_of_deferred_parameters(tp_dim: int) -> None:
    asked = []

    def source(part: Part | None = None) -> object:
        asked.append(part)
        return FULL if part is None else part.cut(FULL)

    whole = Parameter.empty((4, 6), "f16")
    whole.defer(source)
    np.testing.assert_array_equal(whole.read(part=Part(tp_dim, 1, 2)), Part(tp_dim, 1, 2).cut(FULL))
    assert asked.pop() == Part(tp_dim, 1, 2) and whole.is_deferred
    shape = (2, 6) if tp_dim == 0 else (4, 3)
    p = Parameter.empty(shape, "f16", tp_dim=tp_dim, tp_rank=1, tp_size=2)
    p.defer(source)
    own = Part(tp_dim, shape[tp_dim], shape[tp_dim])
    np.testing.assert_array_equal(p.read(), own.cut(FULL))
    assert asked.pop() == own
    for axis in (0, 1):
        part = Part(axis, 1, shape[axis] - 1)
        np.testing.assert_array_equal(p.read(part=part), part.cut(own.cut(FULL)))
        asked.pop()
        p.numpy()
        np.testing.assert_array_equal(p.read(part=part), part.cut(own.cut(FULL)))
        p.defer(source)


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank 2 is not a rank"),
        ({"tp_dim": 2}, "tp_dim 2 is not a dimension"),
        ({"tp_size": 0}, "not a rank of a group of 0"),
    ],
)
def test_wrong_groups(tp: dict[str, int], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Parameter(FULL, **tp)  # type: ignore[arg-type]
