"""bf16 as it is. In a panel a column lies beside the one half a panel away: one load, a shift and a mask widen both."""

from __future__ import annotations

from monoplan.codegen.formats.base import Plain
from monoplan.ir.types import Array, bf16


class BF16(Plain):
    name, dtype, bits = "bf16", bf16, 16
    header, c_type, native = "mp_format_bf16.h", "mp_bf16", "mp_pack_16"
    tensor_cores = True

    def columns(self, rows: Array) -> Array:
        panel = rows.shape[1]
        return rows.reshape(-1, 2, panel // 2).swapaxes(1, 2).reshape(-1, panel)
