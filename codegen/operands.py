"""What kernels compute with: operands, which are views under a name, and bodies, which are expressions; both as C."""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.expressions import C_TYPES, c_dim, c_expr, c_index, c_literal, compute_type, convert, load
from monoplan.codegen.formats import format_of
from monoplan.codegen.views import View
from monoplan.ir.dims import Dim, Expr, symbols_of
from monoplan.ir.expr import Node, expr_dtype
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, bool_, product


@dataclass(frozen=True, slots=True)
class Operand:
    """A view under the name it has in the kernel's source."""

    name: str
    view: View
    written: bool = False

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def ctype(self) -> str:
        layout = self.view.buffer.layout
        return C_TYPES[self.view.dtype.name] if layout is None else format_of(layout).c_type

    @property
    def compute(self) -> DType:
        return compute_type(self.view.dtype)

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.view.shape

    @property
    def symbols(self) -> set[str]:
        """Symbols that the text of an element mentions."""
        start = self.view.buffer.start
        places = (*self.view.strides, self.view.offset, start if isinstance(start, Expr) else 0)
        if self.view.table is not None:
            places = (*places, *self.view.table.strides, self.view.pages)
        return {name for d in places for name in symbols_of(d)}

    def index(self, *indices: str) -> str:
        """The element number of an index, as C."""
        table = self.view.table
        if table is not None:  # the kernel has it under the name `table`, beside this one
            owner = self.name[: self.name.rfind(".") + 1]
            b, h, at, i = indices
            place = c_index([(b, table.strides[0]), (f"({at}) / {self.view.page}", 1)])
            indices = (f"MP_PAGE({owner}table[{place}], {c_dim(self.view.pages)})", h, f"({at}) % {self.view.page}", i)
        return c_index(list(zip(indices, self.view.strides, strict=True)), self.view.offset)

    def place(self, *indices: str) -> str:
        """The element as an lvalue."""
        return f"{self.name}[{self.index(*indices)}]"

    def pointer(self, *indices: str) -> str:
        return f"({self.name} + {self.index(*indices)})"

    def at(self, *indices: str) -> str:
        """The element's value in its compute type; constants and ramps need no memory."""
        b = self.view.buffer
        if b.kind == "const":
            assert not isinstance(b.start, Expr)
            return c_literal(b.start, b.dtype)
        if b.kind == "iota":
            start = b.start if isinstance(b.start, int | Expr) else int(b.start)
            text = c_index(list(zip(indices, self.view.strides, strict=True)), self.view.offset + start)
            return f"(({text}) != 0)" if b.dtype == bool_ else f"({C_TYPES[compute_type(b.dtype).name]})({text})"
        return load(self.dtype, self.place(*indices))

    def c_view(self, *outer: str) -> str:
        """An initializer of mp_view (mp_view.h): the dimensions behind those of `outer`, at that index."""
        b, strides = self.view.buffer, self.view.strides
        kind = f"MP_{b.dtype.name.upper()}"
        if b.kind == "const":
            return f"MP_CONSTANT({self.at(*outer)}, {kind})"
        inner = ", ".join([*map(c_dim, strides[len(outer) :]), *["0"] * (4 - len(strides) + len(outer))])
        terms = list(zip(outer, strides, strict=False))
        if b.kind == "iota":
            start = b.start if isinstance(b.start, int | Expr) else int(b.start)
            return f"MP_RAMP({c_index(terms, self.view.offset + start)}, {kind}, {inner})"
        place = c_index(terms, self.view.offset)
        if self.view.table is not None:
            return f"MP_PAGED({self.name}, {kind}, {inner}, table, {c_dim(self.view.table.shape[1])}, {self.view.page})"
        return f"MP_STORED({self.name if place == '0' else f'{self.name} + {place}'}, {kind}, {inner})"

    def with_view(self, view: View) -> Operand:
        return Operand(self.name, view, self.written)

    def store(self, value: str, value_type: DType, *indices: str) -> str:
        """A statement that stores a value."""
        return f"{self.place(*indices)} = {convert(value, value_type, self.dtype)};"


def stored_bytes(o: Operand, elements: Dim) -> Dim:
    """Bytes of so many elements of an operand as it lies in memory."""
    layout = o.view.buffer.layout
    return elements * o.dtype.itemsize if layout is None else format_of(layout).bytes(elements)


def touched(v: View) -> Dim:
    """Elements behind a view: stretched dimensions count once."""
    return product(n for n, s in zip(v.shape, v.strides, strict=True) if not (isinstance(s, int) and s == 0))


@dataclass(frozen=True)
class Body:
    """A pointwise expression with the types of its arguments."""

    node: Node
    types: tuple[DType, ...]

    @property
    def dtype(self) -> DType:
        """The type of the result as the IR has it."""
        return expr_dtype(self.node, self.types)

    @property
    def compute(self) -> DType:
        return compute_type(self.dtype)

    def c(self, args: Sequence[str]) -> str:
        """The expression as C over operands in their compute types."""
        return c_expr(self.node, args, self.types)
