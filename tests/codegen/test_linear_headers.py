"""The loops of products as C, without a plan around them: odd sizes, every format, several threads, debug builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from monoplan.codegen.cpu.schedule_linear import blocking, few_rows
from monoplan.codegen.formats import FORMATS, Layout, WeightFormat
from monoplan.codegen.source import headers
from monoplan.codegen.target import Target, cpu_target
from monoplan.ir.tolerances import compare
from monoplan.ir.types import bf16
from monoplan.runtime.build.toolchain import compile_shared
from monoplan.runtime.cpu.executable import flags_for, host_target
from monoplan.runtime.machine.features import vector_bytes

EMULATED = ("-DMP_TILES_EMULATED", "-Wno-psabi", "-DMP_LANES=16", "-fwrapv", "-fopenmp-simd")
PLAIN = [f for f in FORMATS if not f.for_tiles and not f.blocks]
ISAS = ("avx512", "avx2", "neon", "generic", "scalar")
DECLARED = "void product(const void *, const float *, float *, int64_t, float *, float *, int);"
# Every element of y is written once: y is NaN before, and a second write adds to it.
FRAME = """
#include "{loops}"
#include "{header}"

enum {{ K = {depth}, N = {columns}, WIDTH = {width} }};
typedef struct {{ const float *x; float *y; }} arguments;

MP_INLINE float value(const void *c, int64_t row, int64_t i) {{ return ((const arguments *)c)->x[row * K + i]; }}
MP_INLINE float normed(const void *c, int64_t i, float x, mp_stats s)
{{
    (void)c;
    return (x - s.mean - s.rest) * s.scale + i;
}}
static void finish(const void *c, int64_t g, int64_t row, float *sums)
{{
    float *const y = ((const arguments *)c)->y + row * N;
    for (int64_t n = g * WIDTH; n < N && n < (g + 1) * WIDTH; ++n)
        y[n] = y[n] != y[n] ? sums[n - g * WIDTH] : y[n] + sums[n - g * WIDTH];
}}
{more}
void product(const void *w, const float *x, float *y, int64_t rows, float *xt, float *partial, int threads)
{{
    static const atomic_int silence;
    mp_run run = {{.signal = &silence, .patience = 1000}};
    const arguments a = {{x, y}};
    #pragma omp parallel num_threads(threads)
    {{
        const int t = omp_get_thread_num(), T = omp_get_num_threads();
        _Alignas(64) float sums[{sums}];
        {shape}
        {call}
    }}
}}
"""
VECTORS = """static const mp_linear shape = {{
            .K = K, .panel = {panel}, .row_bytes = {row_bytes}, .panels = {panels}, .groups = {groups}, .tail = 1,
            .few = {{{few}}}, .block = {block}, .sizes = {{{sizes}}}, .abreast = {abreast}, .part = 8,
            .chunk = {chunk}, .slice = 7, .strip = 14, .slots = 2,
            .tiled_from = {tiled_from}, .by_panel = {{{by_panel}}}, .widen = {widen},
            .tile = {{{tiles}}}, .row = read_row, .finish = finish,
        }};"""
READ_ROW = """
static void read_row(const void *c, int64_t row, int64_t from, int64_t end, mp_stats *stats, float *values)
{{
    const mp_prologue x = {{.norm = {norm}, .eps = 1e-5f, .value = value, .normed = normed}};
    mp_row_part(&x, K, c, row, from, end, stats, values);
}}
"""
TILES = """const mp_linear_tiles shape = {{
            .K = K, .panels = {panels}, .groups = {groups}, .tail = 1, .near = 64, .far = 256, .unit = 1,
            .units = (N + 31) / 32, .part = 64, .blocks = 2, .slice = 32, .strip = {strip}, .slots = {slots},
            .piece = 3, .least = 1, .every = 1, .sums = {waiting},
            .x = {{.norm = {norm}, .eps = 1e-5f, .value = value, .normed = normed}},
            .few = finish, .rows = finish_rows,
        }};"""
FINISH_ROWS = """
static void finish_rows(const void *c, int64_t g, int64_t block, int64_t from, int64_t to, float *sums)
{
    for (int64_t r = from; r < to; ++r) finish(c, g, block + r, sums + r * 32);
}
"""


def built(text: str, folder: Path, flags: tuple[str, ...]) -> Any:
    for name, header in headers("cpu"):
        (folder / name).write_text(header)
    (folder / "product.c").write_text(text)
    compile_shared(folder / "product.c", folder / "product.so", [*flags, f"-I{folder}", "-Wall", "-Wextra", "-Werror"])
    ffi = FFI()
    ffi.cdef(DECLARED)
    library = ffi.dlopen(str(folder / "product.so"))

    def run(w: Any, x: Any, columns: int, room: int, threads: int) -> Any:
        y = np.full((len(x), columns), np.nan, np.float32)
        xt, partial = np.zeros(room, np.float32), np.zeros(threads * room, np.float32)
        at = [ffi.cast("void *", a.ctypes.data) for a in (w, x, y, xt, partial)]
        library.product(at[0], at[1], at[2], len(x), at[3], at[4], threads)
        return y

    return run


def weights(packed: WeightFormat, layout: Layout, columns: int, depth: int) -> tuple[Any, Any]:
    """Random ones as they are packed, and what they mean."""
    rng = np.random.default_rng(depth)
    w = (rng.standard_normal((columns, depth)) * depth**-0.5).astype(packed.dtype.numpy)
    rows = layout.rows(columns)
    made = packed.pack(w, rows, layout, np.empty, None)
    room = np.zeros(made.nbytes + 64, np.uint8)  # panels begin at a cache line
    at = -room.ctypes.data % 64
    kept = room[at : at + made.nbytes]
    kept[:] = made.reshape(-1).view(np.uint8)
    return kept, packed.unpack(made, depth, layout)[rows >= 0].astype(np.float64)


def rows_of(x: Any, norm: str) -> Any:
    exact = x.astype(np.float64)
    if norm == "MP_NO_NORM":
        return exact
    centred = exact - exact.mean(-1, keepdims=True) if norm == "MP_LAYER_NORM" else exact
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + np.arange(x.shape[1])


def vector_product(packed: WeightFormat, target: Target, norm: str, depth: int, columns: int, tiled_from: int) -> str:
    """A C file with the product of such panels on vectors, or from some rows on, on tile units."""
    panel = packed.panel(target)
    layout = Layout(packed.name, panel, 4)
    nest, few = blocking(target, layout, depth), few_rows(target, layout)
    names = {
        "depth": depth,
        "columns": columns,
        "width": layout.width,
        "panel": panel,
        "panels": 4,
        "name": packed.name,
        "groups": -(-columns // layout.width),
        "row_bytes": panel * packed.bits // 8,
        "few": ", ".join(map(str, few)),
        "block": nest.block,
        "abreast": nest.abreast,
        "sizes": ", ".join(map(str, nest.sizes)),
        "tiles": ", ".join(f"mp_tile_{rows}x{panel // target.lanes}x{nest.abreast}" for rows in nest.sizes),
        "widen": "0" if packed.c_type == "float" else "widen",
        "by_panel": ", ".join(f"panel_{rows}" for rows in few),
        "norm": norm,
        "tiled_from": tiled_from,
        "chunk": 64 if tiled_from else 3 * nest.block,
    }
    fields = packed.c_fields(panel, panel // target.lanes)
    ahead = f"{fields}, .line = {max(1, 64 * 8 // (panel * packed.bits))}, .near = 3, .far = 9"
    loops = [f"MP_PANEL_FUNCTION(panel_{rows}, {rows}, {ahead})" for rows in few]
    loops.append(f"MP_WIDEN_FUNCTION(widen, {fields})")
    return FRAME.format(
        loops="mp_linear.h",
        header=packed.header,
        more="\n".join([READ_ROW.format(**names), *loops]),
        shape=VECTORS.format(**names),
        sums=few[-1] * layout.width,
        call="mp_linear_run(&shape, &run, t, T, rows, w, xt, partial, sums, &a);",
        **names,
    )


@pytest.mark.parametrize(("norm", "level"), [("MP_NO_NORM", "-O3"), ("MP_RMS_NORM", "-O1"), ("MP_LAYER_NORM", "-O0")])
@pytest.mark.parametrize("packed", PLAIN, ids=lambda f: f.name)
def test_vectors(packed: WeightFormat, norm: str, level: str, tmp_path: Path) -> None:
    target, depth, columns = host_target(), 41, 300
    layout = Layout(packed.name, packed.panel(target), 4)
    few = few_rows(target, layout)
    run = built(vector_product(packed, target, norm, depth, columns, 0), tmp_path, (*flags_for(target), level))
    w, exact = weights(packed, layout, columns, depth)
    rng = np.random.default_rng(0)
    for rows in (0, 1, few[-1] - 1, few[-1], few[-1] + 1, 66, 68, 69, 70, 72):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        want = rows_of(x, norm) @ exact.T
        got = [run(w, x, columns, 1 << 16, threads) for threads in (1, 2, 3)]
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5 * max(1.0, float(np.abs(want).max(initial=0))))
        assert all(one.tobytes() == got[0].tobytes() for one in got), rows


@pytest.mark.parametrize("packed", PLAIN, ids=lambda f: f.name)
def test_floats_on_tile_units(packed: WeightFormat, tmp_path: Path) -> None:
    """In three parts nothing of a float is lost, and what is infinite or no number comes out as on vectors."""
    target, depth, columns = cpu_target("tiles", 64), 200, 300
    layout = Layout(packed.name, 32, 4)
    run = built(vector_product(packed, target, "MP_NO_NORM", depth, columns, 33), tmp_path, EMULATED)
    w, exact = weights(packed, layout, columns, depth)
    rng = np.random.default_rng(0)
    for rows in (32, 33, 70, 300):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        want = x.astype(np.float64) @ exact.T
        got = [run(w, x, columns, 1 << 17, threads) for threads in (1, 2, 3)]
        assert compare(got[0], want, "f32", "matmul").ok
        assert all(one.tobytes() == got[0].tobytes() for one in got), rows
    x[3, 7], x[40, 199], x[64, 0], x[65] = np.inf, -np.inf, np.nan, 3e38
    with np.errstate(all="ignore"):
        want = np.where(np.arange(300)[:, None] == 65, got[0], x.astype(np.float64) @ exact.T).astype(np.float32)
    got[0] = run(w, x, columns, 1 << 17, 2)
    rest = np.arange(300) != 65
    np.testing.assert_allclose(got[0][rest], want[rest], rtol=1e-5, atol=5e-6)
    assert np.isinf(got[0][3]).all() and np.isinf(got[0][40]).all() and np.isnan(got[0][64]).all()


@pytest.mark.parametrize("strip", [96, 32])  # whole rows stay in L2, or a slice at a time
@pytest.mark.parametrize("packed", [f for f in FORMATS if f.for_tiles], ids=lambda f: f.name)
def test_tile_units(packed: WeightFormat, strip: int, tmp_path: Path) -> None:
    depth, columns, panels = 96, 300, 4
    layout = Layout(packed.name, 32, panels)
    slots = 3 if strip < depth else 1
    names = {
        "depth": depth,
        "columns": columns,
        "width": 32,
        "panels": panels,
        "groups": -(-columns // layout.width),
        "strip": strip,
        "slots": slots,
        "waiting": 2048 + slots * 2 * 1024,
        "norm": "MP_RMS_NORM",
    }
    text = FRAME.format(
        loops="mp_linear_tiles.h",
        header=packed.header,
        more=FINISH_ROWS,
        shape=TILES.format(**names),
        call="mp_linear_tiles_run(&shape, &run, t, T, rows, x, w, xt, partial, sums, &a);",
        sums=8 * layout.width,
        **names,
    )
    run = built(text, tmp_path, EMULATED)
    w, exact = weights(packed, layout, columns, depth)
    rng = np.random.default_rng(0)
    for rows in (0, 1, 3, 8, 9, 33, 200):
        x = rng.standard_normal((rows, depth)).astype(np.float32)
        given = rows_of(x, "MP_RMS_NORM")
        rounded = given.astype(np.float32).astype(bf16.numpy).astype(np.float64) if rows > 8 else given
        got = [run(w, x, columns, 1 << 17, threads) for threads in (1, 2, 3)]
        room = {"rtol": 1e-2, "atol": 1e-1} if rows > 8 else {"rtol": 1e-5, "atol": 1e-3}
        np.testing.assert_allclose(got[0], rounded @ exact.T, **room)
        assert all(one.tobytes() == got[0].tobytes() for one in got), rows


def test_every_register_tile_that_a_schedule_wants_is_there() -> None:
    text = dict(headers("cpu"))["mp_linear.h"]
    for isa in ISAS:
        target = cpu_target(isa, vector_bytes(isa))
        for packed in (f for f in FORMATS if not f.for_tiles and not f.blocks):
            panel = packed.panel(target)
            for panels in range(1, 9):
                nest = blocking(target, Layout(packed.name, panel, panels), 4096)
                for rows in nest.sizes:
                    name = f"mp_tile_{rows}x{panel // target.lanes}x{nest.abreast}"
                    assert f"MP_TILE_FUNCTION({name}," in text, (isa, packed.name, panels)
                assert nest.slice * nest.abreast * panel * 4 <= 32 << 10  # MP_MOST_SLICE


def test_a_slice_of_tile_units_has_room() -> None:
    target = cpu_target("amx", 64)
    tiled = next(f for f in FORMATS if f.for_tiles)
    slices = [blocking(target, Layout(tiled.name, 32, 2), depth).slice for depth in range(32, 20000, 32)]
    assert max(slices) <= 768  # MP_TILE_SLICE
