"""What a back end can do, as data: schedules read it, templates never do."""

from __future__ import annotations

from monoplan.ir.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A back end and its machine. `lanes` floats fit a vector; weights are packed in panels of columns."""

    name: str  # cpu, cuda
    isa: str  # neon, avx2, avx512, amx, generic, scalar, tiles (amx emulated), sm_90 …
    lanes: int
    panel: int  # columns of a panel in f32
    panel_16: int  # and of one in 16 bits
    row_blocks: tuple[int, ...]  # rows that a pass over a panel of f32 serves when they are few, ascending from 1
    sums: int  # vectors of sums that the registers hold
    abreast: int  # vectors of columns that are read side by side for them
    cores: int = 0  # multiprocessors of a GPU
    shared: int = 0  # bytes of shared memory that one block of a GPU may have
    library: bool = False  # large products go to the vendor's library
    compact: bool = False  # a GPU keeps bf16 weights in 12 bits

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def has_tiles(self) -> bool:
        """Whether there are bf16 tile units."""
        return self.isa in ("amx", "tiles")

    @property
    def capability(self) -> int:
        """The compute capability of a GPU, 90 for sm_90; 0 on a CPU."""
        return int(self.isa.removeprefix("sm_")) if self.name == "cuda" else 0


def cpu_target(isa: str, vector_bytes: int) -> Target:
    """The CPU target of an instruction set: register counts decide the block of rows."""
    lanes = max(vector_bytes // 4, 1)
    if isa in ("avx512", "amx", "tiles"):
        return Target("cpu", isa, 16, 32, 32, (1, 4, 12), 24, 6)
    if isa == "avx2":
        return Target("cpu", isa, 8, 16, 32, (1, 6), 12, 2)
    if isa == "neon":
        return Target("cpu", isa, 4, 16, 16, (1, 4, 6), 24, 4)
    return Target("cpu", isa, lanes, 8, 8, (1, 4), *((8, 2) if lanes > 1 else (32, 8)))


def cuda_target(capability: int, cores: int, shared: int, library: bool = False) -> Target:
    """The target of a GPU: compute capability (90 for sm_90), multiprocessors, shared memory of a block."""
    return Target("cuda", f"sm_{capability}", 1, 1, 1, (1,), 1, 1, cores, shared, library)
