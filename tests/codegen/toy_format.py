"""A weight format of its own in one file: numbers of 8 bits, in steps of 1/64 between -2 and 2.

It shows what a format has to say: what it takes, how it is packed, what it means, and the functions that load it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.codegen.formats import Array, Layout, Make, Native, WeightFormat
from monoplan.codegen.target import Target
from monoplan.ir.types import TensorType, f32

HEADER = """
#ifndef MP_FORMAT_TOY_H
#define MP_FORMAT_TOY_H

#include "mp_tile.h"

typedef struct { uint8_t step; } mp_toy;

MP_FN float mp_toy_value(const mp_toy t) { return (t.step - 128) * (1.0f / 64.0f); }

/* V vectors of one row of a panel. */
MP_FN void mp_load_row_toy(const void *from, mp_vec *wide, const int V)
{
    const mp_toy *const p = (const mp_toy *)from;
    float values[64];
    for (int i = 0; i < V * MP_LANES; ++i) values[i] = mp_toy_value(p[i]);
    mp_vloads(values, wide, V);
}

/* Column c of a weight in panels with K rows: a row of an embedding table. */
MP_FN void mp_load_column_toy(float *to, const mp_toy *w, const int64_t c, const int64_t K, const int panel)
{
    const mp_toy *const from = w + c / panel * panel * K + c % panel;
    for (int64_t k = 0; k < K; ++k) to[k] = mp_toy_value(from[k * panel]);
}

#endif
"""
CUDA_HEADER = """
#include "mp_vec.cuh"

struct mp_toy { uint8_t step; };
MP_FN float mp_weight(const mp_toy t) { return ((int)t.step - 128) * (1.0f / 64.0f); }
template <> MP_FN void mp_widen<mp_toy>(float *f, const uint4 &raw)
{
    const uint32_t u[4] = {raw.x, raw.y, raw.z, raw.w};
    MP_UNROLL
    for (int i = 0; i < 16; ++i) f[i] = mp_weight(mp_toy{(uint8_t)(u[i / 4] >> i % 4 * 8)});
}
"""


class Toy(WeightFormat):
    name, dtype, bits, c_type = "toy", f32, 8, "mp_toy"
    header, cuda_header = "mp_format_toy.h", "mp_format_toy.cuh"

    def takes(self, weight: TensorType, target: Target) -> bool:
        return weight.dtype == f32 and len(weight.shape) == 2

    def panel(self, target: Target) -> int:
        return target.panel

    def pack(self, w: Array, rows: Array, layout: Layout, make: Make, native: Native | None) -> Array:
        steps = np.concatenate([self.pack_rows(w), np.full((1, w.shape[1]), 128, np.uint8)])
        panels = steps[rows.reshape(-1, layout.panel)].swapaxes(1, 2)
        out = make(panels.shape, np.uint8)
        out[:] = panels
        return out

    def unpack(self, packed: Array, depth: int, layout: Layout) -> Array:
        return value(packed.reshape(-1, depth, layout.panel).swapaxes(1, 2).reshape(-1, depth))

    def pack_rows(self, w: Array) -> Array:
        return np.clip(np.rint(w * 64) + 128, 0, 255).astype(np.uint8)

    def headers(self) -> list[tuple[str, str]]:
        return [(self.header, HEADER)]

    def cuda_text(self) -> str:
        return CUDA_HEADER


def value(steps: Any) -> Any:
    """The numbers that steps stand for."""
    return ((steps.astype(np.int32) - 128) / np.float32(64)).astype(np.float32)
