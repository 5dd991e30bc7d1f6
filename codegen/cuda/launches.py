"""What a step of a GPU plan may become: variants of launches and library products, chosen by sizes at run time."""

from __future__ import annotations

from collections.abc import Mapping

from monoplan.codegen.expressions import c_dim, c_symbol
from monoplan.codegen.kernels import Kernel
from monoplan.codegen.operands import Operand
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType


@dataclass(frozen=True, slots=True)
class Boxes:
    """A dense matrix [rows, depth] of bf16 that the copy engine takes in boxes of `box` rows and 64 columns."""

    rows: Dim
    depth: int
    box: int


@dataclass(frozen=True, slots=True)
class Word:
    """One argument of a launch: an operand's buffer or the workspace at a byte offset, a symbol's value, a number …"""

    kind: str  # operand, workspace, tickets, symbol, number (the offset itself), error, step
    operand: Operand | None = None
    name: str = ""
    offset: Dim = 0
    boxes: Boxes | None = None  # of a matrix there: the argument is a map of it


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch. Every kernel waits for the one before it by itself, so launches may overlap (see mp_wait)."""

    function: str
    grid: tuple[Dim, Dim, Dim]
    block: int
    words: tuple[Word, ...]
    shared: int = 0
    cluster: int = 1

    def reads(self, name: str) -> bool:
        """Whether an operand of that name is among its arguments."""
        return any(w.operand is not None and w.operand.name == name for w in self.words)


@dataclass(frozen=True, slots=True)
class Product:
    """out[rows, columns] = x[rows, depth] · w[columns, depth]ᵀ (+ add) (+ bias) by the vendor's library, all dense.

    A bias is a row of the type of `out`.
    """

    rows: Dim
    columns: int
    depth: int
    x: Word
    w: Word
    out: Word
    dtype: DType
    out_dtype: DType
    add: Word | None = None
    bias: Word | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """x[rows, columns] of every rank as y[rows, rank, columns]; both dense. Sums are a kernel that follows."""

    x: Word
    y: Word
    rows: Dim
    columns: Dim
    world: int
    dtype: DType


Action = Launch | Product | Exchange


@dataclass(frozen=True, slots=True)
class Between:
    """That a size (rows of x, new tokens, sequences …) lies in [low, high]; high 0: no limit."""

    size: Dim
    low: int = 0
    high: int = 0

    def holds(self, values: Mapping[str, int]) -> bool:
        size = evaluate(self.size, values)
        return self.low <= size and (self.high == 0 or size <= self.high)

    def __str__(self) -> str:
        size = c_dim(self.size)
        if self.low == self.high:
            return f"{size} = {self.low}"
        return f"{self.low} <= {size} <= {self.high}" if self.high else f"{size} >= {self.low}"


@dataclass(frozen=True, slots=True)
class Variant:
    """Actions that do a step when all conditions hold."""

    name: str
    actions: tuple[Action, ...]
    conditions: tuple[Between, ...] = ()
    workspace: Dim = 0  # bytes

    def fits(self, values: Mapping[str, int]) -> bool:
        return all(c.holds(values) for c in self.conditions)


def pointer_word(o: Operand) -> tuple[str, Word]:
    """A parameter that is an operand's buffer."""
    return f"{'' if o.written else 'const '}{o.ctype} *{o.name}", Word("operand", o)


def symbol_words(k: Kernel) -> list[tuple[str, Word]]:
    return [(f"const int64_t {c_symbol(n)}", Word("symbol", name=n)) for n in sorted(k.symbols - {"threads"})]


def ceil_div(d: Dim, n: int) -> Dim:
    return (d + (n - 1)) // n
