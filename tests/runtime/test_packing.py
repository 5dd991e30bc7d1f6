"""Weights in their kernels' layouts: every column is where the layout says, by the C library and without it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.schedule_linear import parse_layout
from monoplan.ir.types import bf16
from monoplan.runtime import packing
from monoplan.runtime.weights import pack

# layout, rows, depth: whole groups and groups that are filled up, depths that are no multiple of a vector
LAYOUTS = [
    ("panel16x2", 64, 24), ("panel16x2", 70, 37), ("panel8x4", 9, 5), ("panel32x3", 146, 130), ("panel16x1", 1, 1),
    ("panel16x2:gated", 64, 24), ("panel8x4:gated", 146, 67), ("panel32x4:gated", 20, 9),
    ("panel16x4:heads64", 192, 24), ("panel16x3:heads40", 200, 11), ("panel8x1:heads8", 24, 3),
    ("panel32x3:heads80", 240, 7),
]  # fmt: skip
TILES = [
    ("tiles32x2", 146, 96), ("tiles32x4:gated", 146, 64), ("tiles32x2:heads64", 192, 160),
    ("tiles32x3:heads80", 240, 32),
]  # fmt: skip
CASES = [(*case, dtype) for case in LAYOUTS for dtype in ("float32", "float16", "bfloat16")]
WEIGHTS = ("usual", "every bit", "two scales", "zeros")


def row_of(column: int, count: int, layout: str) -> int:
    """The row of the weight that a column of all panels is, or -1: written down once more, one at a time."""
    panel, panels, group = parse_layout(layout)
    if group.startswith("heads"):
        dim = int(group.removeprefix("heads"))
        head, j = divmod(column, panel * panels)
        return head * dim + j if j < dim else -1
    if group == "gated":
        number, j = divmod(column, panel)
        row = number * (panel // 2) + j % (panel // 2)
        return -1 if row >= count // 2 else row + (count // 2 if j >= panel // 2 else 0)
    return column if column < count else -1


def read_column(packed: Any, column: int, layout: str) -> Any:
    """A column of a packed weight."""
    panel, _, _ = parse_layout(layout)
    number, j = divmod(column, panel)
    one = packed.reshape(-1, *packed.shape[-2:])[number]
    if packed.dtype == bf16.numpy:  # beside the column half a panel away
        j = 2 * j if j < panel // 2 else 2 * (j - panel // 2) + 1
    return one[:, j]


def read_coded(packed: Any, number: int, depth: int) -> Any:
    """A panel [depth, 32] of bf16 in 12 bits, as mp_coded.h describes it: written down once more, number by number."""
    size = depth * 48 + 64
    panel = packed[number * size : (number + 1) * size]
    upper, begins = panel[:16], int(panel[16:24].view(np.int64)[0])
    panel = panel[64:]
    found = np.empty((depth, 32), np.uint16)
    for k in range(depth):
        for c in range(32):
            row, column = k % 32 // 2, 2 * (c % 16) + k % 2  # of a tile, which has 16 x 32
            quarter = panel[(k // 32 * 2 + c // 16) * 768 + row // 4 * 192 :][:192]
            at = column // 8 * 16 + row % 2 * 8 + column % 8
            code, lower = int(quarter[at]) >> 4 * (row // 2 % 2) & 15, int(quarter[64 + row // 2 % 2 * 64 + at])
            found[k, c] = int(upper[code]) << 8 | lower
    odd = packed[number * size + 64 + begins :][: depth * 32 * 8 + 8].view(np.uint32).reshape(-1, 2)
    for place, value in odd[: np.flatnonzero(odd[:, 0] == 0xFFFFFFFF)[0]]:
        half, inside = divmod(int(place) % 1024, 512)
        found[int(place) // 1024 * 32 + inside // 32 * 2 + inside % 2, half * 16 + inside % 32 // 2] = value
    return found.view(bf16.numpy)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("layout", "rows", "depth", "dtype"), CASES)
def test_every_column_is_in_its_place(
    layout: str, rows: int, depth: int, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(packing, "native_library", lambda: None)
    w = np.random.default_rng(rows).standard_normal((rows, depth)).astype(dtype)
    packed = pack(w, layout)
    panel, panels, _ = parse_layout(layout)
    assert packed.shape[1:] == (panels, depth, panel)
    seen = []
    for column in range(packed.shape[0] * panels * panel):
        row = row_of(column, rows, layout)
        want = w[row] if row >= 0 else np.zeros(depth, w.dtype)
        assert read_column(packed, column, layout).tobytes() == want.tobytes(), (column, row)
        seen.append(row)
    assert sorted(r for r in seen if r >= 0) == list(range(rows))


def test_a_weight_at_an_odd_address() -> None:
    w = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    odd = np.frombuffer(b"x" + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    assert not odd.flags.aligned
    assert pack(odd, "panel16x2").tobytes() == pack(w, "panel16x2").tobytes()


def weights(kind: str, rows: int, depth: int) -> Any:
    rng = np.random.default_rng(rows)
    w = rng.standard_normal((rows, depth)).astype(bf16.numpy)
    if kind == "every bit":  # NaN, infinities and subnormal numbers among them
        return rng.integers(0, 1 << 16, (rows, depth), np.uint16).view(bf16.numpy)
    if kind == "two scales":
        w[::2] *= bf16.numpy.type(1e-30)
    return np.zeros_like(w) if kind == "zeros" else w


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("layout", "rows", "depth"), TILES)
def test_coded_weights_keep_every_bit(
    layout: str, rows: int, depth: int, kind: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(packing, "native_library", lambda: None)
    w = weights(kind, rows, depth)
    packed = pack(w, layout)
    seen = []
    columns = -(-rows // 2 // 64) * 128 if layout.endswith("gated") else -(-rows // 64) * 64
    columns = 3 * 96 if "heads80" in layout else columns
    for number in range(columns // 32):
        panel = read_coded(packed, number, depth)
        for c in range(32):
            row = row_of(number * 32 + c, rows, layout)
            want = w[row] if row >= 0 else np.zeros(depth, w.dtype)
            assert np.ascontiguousarray(panel[:, c]).tobytes() == want.tobytes(), (number, c, row)
            seen.append(row)
    assert sorted(r for r in seen if r >= 0) == list(range(rows))


def test_coded_weights_are_small() -> None:
    """Three quarters of bf16, a line for each panel, and about one number in 10,000 that has no code."""
    w = (np.random.default_rng(0).standard_normal((1024, 1024)) * 0.02).astype(bf16.numpy)
    assert 0.75 < pack(w, "tiles32x4").nbytes / w.nbytes < 0.752


def test_memory_is_taken_once_where_panels_are_alike() -> None:
    """Whatever their numbers are: what was taken and does not suffice is not given back."""
    for kind in WEIGHTS:
        taken: list[int] = []

        def make(shape: tuple[int, ...], dtype: Any, taken: list[int] = taken) -> Any:
            taken.append(shape[0])
            return np.zeros(shape, dtype)

        packed = packing.pack_coded(weights(kind, 320, 96), np.arange(320), make)
        assert len(taken) == 1 and packed.nbytes <= taken[0], kind
    w = weights("usual", 320, 96)
    w[200:230] = weights("every bit", 30, 96)  # in no panel that is looked at
    rows = np.arange(320)
    assert packing.pack_coded(w, rows).tobytes() == packing._pack_coded_slowly(w, rows.reshape(-1, 32)).tobytes()


def test_coded_weights_of_both_ways_are_the_same() -> None:
    for kind, depth in itertools.product(WEIGHTS, (96, 672)):  # of the longer one a sample is looked at
        w = weights(kind, 146, depth)
        rows = np.arange(160)
        rows[146:] = -1
        assert packing.pack_coded(w, rows).tobytes() == packing._pack_coded_slowly(w, rows.reshape(-1, 32)).tobytes()
