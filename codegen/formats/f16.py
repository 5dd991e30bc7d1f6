"""f16 as it is; loads widen it to f32."""

from __future__ import annotations

from monoplan.codegen.formats.base import Plain
from monoplan.ir.types import f16


class F16(Plain):
    name, dtype, bits = "f16", f16, 16
    header, c_type, native = "mp_format_f16.h", "mp_f16", "mp_pack_16"
    tensor_cores = True
