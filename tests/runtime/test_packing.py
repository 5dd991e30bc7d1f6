"""Weights in their kernels' layouts: every column is where the layout says, by the C library and without it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from monoplan.codegen.formats import Layout, ParamUse, format_of
from monoplan.codegen.formats.bf16_12 import BF16In12Bits
from monoplan.ir.parser import parse_graph
from monoplan.ir.types import Part, aligned, bf16
from monoplan.passes.manager import Notes
from monoplan.passes.shard.rewrite import shard_pass
from monoplan.runtime.cpu import weights as packing
from monoplan.runtime.cpu.weights import Source, pack, prepare

# panel, panels, order, head_dim; rows, depth: whole groups and padded ones, depths that are no multiple of a vector
LAYOUTS = [
    ((16, 2), 64, 24), ((16, 2), 70, 37), ((8, 4), 9, 5), ((32, 3), 146, 130), ((16, 1), 1, 1),
    ((16, 2, "gated"), 64, 24), ((8, 4, "gated"), 146, 67), ((32, 4, "gated"), 20, 9),
    ((16, 4, "heads", 64), 192, 24), ((16, 3, "heads", 40), 200, 11), ((8, 1, "heads", 8), 24, 3),
    ((32, 3, "heads", 80), 240, 7),
]  # fmt: skip
TILES = [
    ((32, 2), 146, 96), ((32, 4, "gated"), 146, 64), ((32, 2, "heads", 64), 192, 160), ((32, 3, "heads", 80), 240, 32),
]  # fmt: skip
CODED = BF16In12Bits()
CASES = [
    (Layout(name, *panels), rows, depth, dtype)
    for panels, rows, depth in LAYOUTS
    for name, dtype in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16"))
]
WEIGHTS = ("usual", "every bit", "two scales", "zeros")


def row_of(column: int, count: int, layout: Layout) -> int:
    """The row of the weight that a column of all panels is, or -1: written down once more, one at a time."""
    panel, dim = layout.panel, layout.head_dim
    if layout.order == "heads":
        head, j = divmod(column, layout.width)
        return head * dim + j if j < dim else -1
    if layout.order == "gated":
        number, j = divmod(column, panel)
        row = number * (panel // 2) + j % (panel // 2)
        return -1 if row >= count // 2 else row + (count // 2 if j >= panel // 2 else 0)
    return column if column < count else -1


def read_column(packed: Any, column: int, layout: Layout) -> Any:
    """A column of a packed weight."""
    panel = layout.panel
    number, j = divmod(column, panel)
    one = packed.reshape(-1, *packed.shape[-2:])[number]
    if packed.dtype == bf16.numpy:  # beside the column half a panel away
        j = 2 * j if j < panel // 2 else 2 * (j - panel // 2) + 1
    return one[:, j]


def read_coded(packed: Any, number: int, depth: int) -> Any:
    """A panel [depth, 32] of bf16 in 12 bits, as its header describes it: written down once more, by number."""
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
    others = packed[number * size + 64 + begins :][: depth * 32 * 8 + 8].view(np.uint32).reshape(-1, 2)
    for place, value in others[: np.flatnonzero(others[:, 0] == 0xFFFFFFFF)[0]]:
        half, inside = divmod(int(place) % 1024, 512)
        found[int(place) // 1024 * 32 + inside // 32 * 2 + inside % 2, half * 16 + inside % 32 // 2] = value
    return found.view(bf16.numpy)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("layout", "rows", "depth", "dtype"), CASES)
def test_every_column_is_in_its_place(
    layout: Layout, rows: int, depth: int, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(packing, "native_library", lambda: None)
    w = np.random.default_rng(rows).standard_normal((rows, depth)).astype(dtype)
    packed = pack(w, layout)
    assert packed.shape[1:] == (layout.panels, depth, layout.panel)
    seen = []
    for column in range(packed.shape[0] * layout.width):
        row = row_of(column, rows, layout)
        want = w[row] if row >= 0 else np.zeros(depth, w.dtype)
        assert read_column(packed, column, layout).tobytes() == want.tobytes(), (column, row)
        seen.append(row)
    assert sorted(r for r in seen if r >= 0) == list(range(rows))
    check_unpack(packed, w, layout)


def check_unpack(packed: Any, w: Any, layout: Layout) -> None:
    """What the packed bytes mean is the weight itself."""
    back, rows = format_of(layout).unpack(packed, w.shape[1], layout), layout.rows(len(w))
    assert back.shape == (rows.size, w.shape[1]) and back.dtype == w.dtype
    assert back[rows >= 0].tobytes() == w[rows[rows >= 0]].tobytes() and not back[rows < 0].view(np.uint8).any()


def test_a_weight_at_an_odd_address() -> None:
    w = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    odd = np.frombuffer(b"x" + w.tobytes(), np.uint8)[1:].view(np.float32).reshape(w.shape)
    assert not odd.flags.aligned
    assert pack(odd, Layout("f32", 16, 2)).tobytes() == pack(w, Layout("f32", 16, 2)).tobytes()


def made(kind: str, rows: int, depth: int) -> Any:
    rng = np.random.default_rng(rows)
    w = rng.standard_normal((rows, depth)).astype(bf16.numpy)
    if kind == "every bit":  # NaN, infinities and subnormal numbers among them
        return rng.integers(0, 1 << 16, (rows, depth), np.uint16).view(bf16.numpy)
    if kind == "two scales":
        w[::2] *= bf16.numpy.type(1e-30)
    return np.zeros_like(w) if kind == "zeros" else w


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize(("panels", "rows", "depth"), TILES)
def test_coded_weights_keep_every_bit(
    panels: tuple[Any, ...], rows: int, depth: int, kind: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout("bf16_12", *panels)
    if not native:
        monkeypatch.setattr(packing, "native_library", lambda: None)
    w = made(kind, rows, depth)
    packed = pack(w, layout)
    seen = []
    for number in range(layout.rows(rows).size // 32):
        panel = read_coded(packed, number, depth)
        for c in range(32):
            row = row_of(number * 32 + c, rows, layout)
            want = w[row] if row >= 0 else np.zeros(depth, w.dtype)
            assert np.ascontiguousarray(panel[:, c]).tobytes() == want.tobytes(), (number, c, row)
            seen.append(row)
    assert sorted(r for r in seen if r >= 0) == list(range(rows))
    check_unpack(packed, w, layout)


def test_coded_weights_are_small() -> None:
    """Three quarters of bf16, a line for each panel, and about one number in 10,000 that has no code."""
    w = (np.random.default_rng(0).standard_normal((1024, 1024)) * 0.02).astype(bf16.numpy)
    assert 0.75 < pack(w, Layout("bf16_12", 32, 4)).nbytes / w.nbytes < 0.752


def test_memory_is_taken_once_where_panels_are_alike() -> None:
    """Whatever their numbers are: what was taken and does not suffice is not given back."""
    for kind in WEIGHTS:
        taken: list[int] = []

        def make(shape: tuple[int, ...], dtype: Any, taken: list[int] = taken) -> Any:
            taken.append(shape[0])
            return np.zeros(shape, dtype)

        packed = coded(made(kind, 320, 96), np.arange(320), make)
        assert len(taken) == 1 and packed.nbytes <= taken[0], kind
    w = made("usual", 320, 96)
    w[200:230] = made("every bit", 30, 96)  # in no panel that is looked at
    rows = np.arange(320)
    assert coded(w, rows).tobytes() == CODED._pack_slowly(w, rows.reshape(-1, 32)).tobytes()


def coded(w: Any, rows: Any, make: Any = aligned) -> Any:
    return CODED.pack(w, rows, Layout("bf16_12", 32), make, packing._native(CODED.native))


def test_coded_weights_of_both_ways_are_the_same() -> None:
    for kind, depth in itertools.product(WEIGHTS, (96, 672)):  # of the longer one a sample is looked at
        w = made(kind, 146, depth)
        rows = np.arange(160)
        rows[146:] = -1
        assert coded(w, rows).tobytes() == CODED._pack_slowly(w, rows.reshape(-1, 32)).tobytes()


def test_a_rank_reads_only_its_part_of_a_weight() -> None:
    asked: dict[str, Any] = {}
    params = {
        "mlp.gate.weight": np.arange(96, dtype=np.float32).reshape(12, 8),
        "mlp.down.weight": np.arange(96, dtype=np.float32).reshape(8, 12) + 100,
    }
    graph = parse_graph("""
graph mlp(%x: f32[batch, 8]) {
  param %g: f32[12, 8] = "mlp.gate.weight"
  param %d: f32[8, 12] = "mlp.down.weight"
  %h = linear(%x, %g, _) : f32[batch, 12]
  %y = linear(%h, %d, _) : f32[batch, 8]
  return %y
}
""")
    mine = shard_pass({"mlp.gate": "colwise", "mlp.down": "rowwise"}, 1, 2).run(graph, Notes())

    def read(path: str, part: Part | None) -> Any:
        asked[path] = part
        return params[path].copy() if part is None else part.cut(params[path]).copy()

    weights = [op.reads[1] for op in mine.ops if op.name == "linear"]
    uses = [ParamUse(w, None) for w in weights]
    found = prepare(mine, uses, Source(read, lambda path: True))
    assert asked == {"mlp.gate.weight": Part(0, 6, 6), "mlp.down.weight": Part(1, 6, 6)}
    np.testing.assert_array_equal(found[0], params["mlp.gate.weight"][6:])
    np.testing.assert_array_equal(found[1], params["mlp.down.weight"][:, 6:])


def test_arrays_that_are_lent_are_copied() -> None:
    graph = parse_graph("""
graph g(%x: f32[8]) {
  param %a: f32[8] = "a"
  %y = add(%x, %a) : f32[8]
  return %y
}
""")
    uses, own = [ParamUse(graph.params[0].value, None)], np.ones(8, np.float32)
    assert not np.shares_memory(prepare(graph, uses, lambda path: own)[0], own)
    assert prepare(graph, uses, lambda path: own, keep=False)[0] is own
    assert prepare(graph, uses, Source(lambda path, part: own, lambda path: True))[0] is own
