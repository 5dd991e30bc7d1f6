"""Functions that every plan includes, called by themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

import monoplan.codegen
from monoplan.ir.errors import CompileError
from monoplan.runtime.build.compilers import find_compiler
from monoplan.runtime.build.toolchain import compile_program, compile_shared
from monoplan.runtime.cpu.executable import flags_for, host_target

INCLUDE = Path(monoplan.codegen.__file__).parent / "cpu" / "include"
DECLARED = """
int64_t pieces(int64_t owners, int64_t all, int64_t line, int64_t least, int64_t most, int64_t *first, int64_t *count);
void powers(const float *x, float *y, int64_t count);
"""
SOURCE = """
#include "mp_plan.h"
#include "mp_exp.h"

int64_t pieces(int64_t owners, int64_t all, int64_t line, int64_t least, int64_t most, int64_t *first, int64_t *count)
{
    static const atomic_int silence;
    mp_run run = {.signal = &silence};
    int64_t n = 0;
    for (mp_span s; (s = mp_some(&run, 0, (int)owners, all, line, least, most)).count; ++n) {
        first[n] = s.first;
        count[n] = s.count;
    }
    return n;
}

void powers(const float *x, float *y, int64_t count)
{
    for (int64_t i = 0; i < count; i += MP_LANES) mp_vstore(y + i, mp_vexp2_short(mp_vload_f32(x + i)));
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("header")
    source, library = folder / "header.c", folder / "header.so"
    source.write_text(SOURCE)
    compile_shared(source, library, [*flags_for(host_target()), f"-I{INCLUDE}"])
    ffi = FFI()
    ffi.cdef(DECLARED)
    return ffi, ffi.dlopen(str(library))


@pytest.mark.parametrize(
    ("owners", "total", "line", "least", "most"),
    [
        (1, 64, 64, 4, 24),
        (1, 128, 64, 4, 24),
        (2, 64, 64, 4, 24),
        (1, 26, 13, 2, 12),
        (1, 5, 5, 1, 8),
        (3, 100, 50, 4, 16),
        (1, 1, 1, 4, 24),
    ],
)
def test_pieces_are_everything_once(lib: Any, owners: int, total: int, line: int, least: int, most: int) -> None:
    ffi, functions = lib
    first, count = (np.zeros(total, np.int64) for _ in range(2))
    places = [ffi.cast("int64_t *", ffi.from_buffer(a)) for a in (first, count)]
    n = functions.pieces(owners, total, line, least, most, *places)
    spans = list(zip(first[:n].tolist(), count[:n].tolist(), strict=True))
    assert [i for begin, size in spans for i in range(begin, begin + size)] == list(range(total))
    assert all(size <= most and begin // line == (begin + size - 1) // line for begin, size in spans)


def test_the_last_piece_is_not_a_crumb(lib: Any) -> None:
    ffi, functions = lib
    first, count = (np.zeros(64, np.int64) for _ in range(2))
    places = [ffi.cast("int64_t *", ffi.from_buffer(a)) for a in (first, count)]
    n = functions.pieces(1, 64, 64, 4, 24, *places)
    assert count[:n].tolist() == [24, 20, 10, 5, 5]


def test_short_powers_of_two(lib: Any) -> None:
    ffi, functions = lib
    x = np.concatenate([np.linspace(-125.9, 126.0, 9999, dtype=np.float32), np.float32([0.0])])
    y = np.empty_like(x)
    pointers = [ffi.cast("float *", ffi.from_buffer(a)) for a in (x, y)]
    functions.powers(*pointers, len(x))
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() < 1.1e-4
    special = np.float32([-np.inf, -1000.0, -200.0, np.nan] * 4)
    y = np.empty_like(special)
    functions.powers(*(ffi.cast("float *", ffi.from_buffer(a)) for a in (special, y)), len(special))
    np.testing.assert_array_equal(y, np.float32([0.0, 0.0, 0.0, np.nan] * 4))


@pytest.mark.parametrize("sanitizer", ["", "thread", "address,undefined"])
def test_threads_wait_for_each_other_and_leave_together(tmp_path: Path, sanitizer: str) -> None:
    flags = [*flags_for(host_target()), "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", "-pthread"]
    flags += [f"-fsanitize={sanitizer}"] if sanitizer else []
    program, source = tmp_path / "threads", Path(__file__).with_name("threads.c")
    try:
        compile_program(source, program, flags, find_compiler())
    except CompileError:
        if not sanitizer:
            raise
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}")
    for threads in (1, 2, 3, 5):
        done = subprocess.run([str(program), str(threads)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and not done.stderr, done.stderr
