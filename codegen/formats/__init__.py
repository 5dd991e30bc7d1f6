"""Weight formats: one file for each, with its packing, its meaning in numpy and its C and CUDA load functions.

Nothing outside of this folder knows a format by its name.
"""

from __future__ import annotations

from monoplan.codegen.formats.base import Layout, Make, Native, ParamUse, Plain, WeightFormat
from monoplan.codegen.formats.bf16 import BF16
from monoplan.codegen.formats.bf16_12 import BF16In12Bits
from monoplan.codegen.formats.blocks import BLOCK_FORMATS
from monoplan.codegen.formats.f16 import F16
from monoplan.codegen.formats.f32 import F32
from monoplan.codegen.target import Target
from monoplan.ir.errors import CompileError
from monoplan.ir.types import Array, TensorType

# In the order of preference: the first one that takes a weight keeps it.
FORMATS: list[WeightFormat] = [BF16In12Bits(), F32(), F16(), BF16(), *BLOCK_FORMATS]


def format_of(layout: Layout) -> WeightFormat:
    """The format of a layout."""
    return next(f for f in FORMATS if f.name == layout.format)


def choose_format(weight: TensorType, target: Target) -> WeightFormat | None:
    """The format in which a product keeps a weight; None if no format takes it, and other kernels must."""
    found = next((f for f in FORMATS if f.takes(weight, target)), None)
    if found is None and weight.dtype.is_low_bit:
        raise CompileError(f"{target.isa} has no kernels for weights in {weight}", fix='load with dtype="bfloat16"')
    return found


def cuda_headers() -> list[tuple[str, str]]:
    """Names and texts of the CUDA headers of formats that have one."""
    return [(f.cuda_header, f.cuda_text()) for f in FORMATS if f.cuda_header]


def format_headers() -> list[tuple[str, str]]:
    """Names and texts of the C headers of all formats."""
    return list(dict(header for f in FORMATS for header in f.headers()).items())


__all__ = [
    "FORMATS", "Array", "Layout", "Make", "Native", "ParamUse", "Plain", "WeightFormat", "choose_format",
    "cuda_headers", "format_headers", "format_of",
]  # fmt: skip
