"""f32 as it is."""

from __future__ import annotations

from monoplan.codegen.formats.base import Plain
from monoplan.ir.types import f32


class F32(Plain):
    name, dtype, bits = "f32", f32, 32
    header, c_type, native = "mp_format_f32.h", "float", "mp_pack_32"
