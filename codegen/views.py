"""Storage: buffers, and strided views of them. Views make reshape, transpose, slice and expand free."""

from __future__ import annotations

from collections.abc import Sequence

from monoplan.codegen.formats.base import Layout
from monoplan.ir.dims import Dim, divide_exactly, equal
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.ir.types import DType, product


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A piece of storage; identity is the object.

    kind: input, output, param (weights), arena (planned), scratch (arena for one step), table (one of several inputs
    or params, chosen by the loop counter of rolled layers), slice (a part of another buffer, which moves on with each
    turn of a scan), and two without memory: iota (element i is `start` + i) and const (every element is `start`).
    """

    name: str
    dtype: DType
    size: Dim  # in elements
    kind: str
    index: int = -1  # number among the inputs, outputs or params
    start: Dim | float | bool = 0
    table: tuple[int, ...] = ()  # numbers of the inputs or params behind a table, by turn
    table_kind: str = ""  # "input" or "param"
    layout: Layout | None = None  # how the weight of a product is packed; None: row-major
    tiled: int = 0  # columns of a matrix that lies here as bf16 tiles when it has many rows: see hand_over
    queries: Dim | None = None  # of a sequence, where those rows are queries: a few of them lie as they are
    of: Buffer | None = None  # the buffer of which a slice is a part
    first: Dim = 0  # element of it where the slice of the first turn begins
    stride: Dim = 0  # elements from there to the slice of the next turn

    @property
    def root(self) -> Buffer:
        """The buffer whose memory it is."""
        return self if self.of is None else self.of.root


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a buffer at offset + sum(index * stride), all counted in elements.

    Of a cache in pages of `page` positions, index 2 is a position: page table[index 0, position / page] has it, in
    dimension 0, at position % page. Only kernels that know of it get such a view.
    """

    buffer: Buffer
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim = 0
    page: int = 0
    pages: Dim = 0  # how many there are
    table: View | None = None

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    @property
    def is_virtual(self) -> bool:
        """Whether it needs no memory (iota or const)."""
        return self.buffer.kind in ("iota", "const")

    @property
    def is_contiguous(self) -> bool:
        return all(
            equal(n, 1) or equal(s, want)
            for n, s, want in zip(self.shape, self.strides, row_major(self.shape), strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole buffer in row-major order."""
        return self.is_contiguous and equal(self.offset, 0) and equal(product(self.shape), self.buffer.size)

    def paged(self, table: View) -> View:
        """These pages [number, heads, size, dim] as the cache of sequences: [batch, heads, positions, dim]."""
        count, heads, size, dim = self.shape
        assert isinstance(size, int)
        shape = (table.shape[0], heads, table.shape[1] * size, dim)
        return View(self.buffer, shape, self.strides, self.offset, size, count, table)

    def transposed(self, axes: Sequence[int]) -> View:
        return View(self.buffer, tuple(self.shape[a] for a in axes), tuple(self.strides[a] for a in axes), self.offset)

    def sliced(self, axis: int, start: Dim, length: Dim, step: int = 1) -> View:
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis]
        shape[axis], strides[axis] = length, strides[axis] * step
        return View(self.buffer, tuple(shape), tuple(strides), offset)

    def expanded(self, shape: Sequence[Dim]) -> View:
        """Broadcast by numpy's rule: stride 0 along new or stretched dimensions."""
        lead = len(shape) - len(self.shape)
        strides: list[Dim] = [0] * lead
        for n, s, want in zip(self.shape, self.strides, shape[lead:], strict=True):
            strides.append(0 if equal(n, 1) and not equal(want, 1) else s)
        return View(self.buffer, tuple(shape), tuple(strides), self.offset)

    def is_same(self, other: View) -> bool:
        """Whether both are the same places of one buffer, in the same order."""
        places = zip(self.shape, self.strides, other.strides, strict=True)
        alike = self.buffer is other.buffer and self.shape == other.shape and equal(self.offset, other.offset)
        return alike and all(equal(n, 1) or equal(a, b) for n, a, b in places)

    def reshaped(self, shape: Sequence[Dim]) -> View | None:
        """The same elements in another shape without a copy, or None where the strides do not allow it."""
        shape = tuple(shape)
        if self.is_contiguous or any(equal(n, 0) for n in shape):
            return View(self.buffer, shape, row_major(shape), self.offset)
        strides = _reshape_strides(self.shape, self.strides, shape)
        return None if strides is None else View(self.buffer, shape, strides, self.offset)

    def shaped(self, shape: Sequence[Dim]) -> View:
        """The same of a view that is dense: it can have any shape."""
        found = self.reshaped(shape)
        assert found is not None
        return found


def row_major(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Strides of a dense row-major tensor."""
    strides: list[Dim] = []
    step: Dim = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * n
    return tuple(reversed(strides))


def whole(buffer: Buffer, shape: Sequence[Dim]) -> View:
    """All of a buffer, dense."""
    return View(buffer, tuple(shape), row_major(shape))


def _reshape_strides(old: Sequence[Dim], strides: Sequence[Dim], new: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Matches runs of old and new dimensions of equal product; each old run must itself be dense."""
    pairs = [(n, s) for n, s in zip(old, strides, strict=True) if not equal(n, 1)]
    result: list[Dim] = []
    wanted = list(new)
    while pairs or wanted:
        while wanted and equal(wanted[0], 1):
            result.append(0)
            wanted.pop(0)
        if not pairs or not wanted:
            if pairs or wanted:
                return None
            break
        run, news = [pairs.pop(0)], [wanted.pop(0)]
        while not equal(product(n for n, _ in run), product(news)):
            have, need = product(n for n, _ in run), product(news)
            grow_old = isinstance(have, int) and isinstance(need, int) and have < need
            if not (isinstance(have, int) and isinstance(need, int)):
                grow_old = divide_exactly(have, need) is None and bool(pairs)
            if grow_old and pairs:
                run.append(pairs.pop(0))
            elif not grow_old and wanted:
                news.append(wanted.pop(0))
            else:
                return None
        if any(not equal(run[i][1], run[i + 1][0] * run[i + 1][1]) for i in range(len(run) - 1)):
            return None
        step = run[-1][1]
        part: list[Dim] = []
        for n in reversed(news):
            part.append(step)
            step = step * n
        result += reversed(part)
    return tuple(result)


def merge_dims(views: Sequence[View]) -> tuple[tuple[Dim, ...], list[tuple[Dim, ...]]]:
    """A common shape with adjacent dimensions joined wherever every view allows it, and each view's strides.

    Views must have the same shape already (see `expanded`). Fewer dimensions mean simpler loops in the source.
    """
    shape: list[Dim] = []
    strides: list[list[Dim]] = [[] for _ in views]
    for axis, n in enumerate(views[0].shape):
        if equal(n, 1):
            continue
        steps = [v.strides[axis] for v in views]
        if shape and all(equal(strides[i][-1], n * s) for i, s in enumerate(steps)):
            shape[-1] = shape[-1] * n
            for i, s in enumerate(steps):
                strides[i][-1] = s
        else:
            shape.append(n)
            for i, s in enumerate(steps):
                strides[i].append(s)
    return tuple(shape), [tuple(s) for s in strides]


def slice_buffer(name: str, of: Buffer, shape: Sequence[Dim], first: Dim, stride: Dim) -> Buffer:
    """A part of a buffer that a turn of a scan reads or writes, `stride` elements further on in each turn."""
    return Buffer(name, of.dtype, product(shape), "slice", of=of, first=first, stride=stride)


def table_buffer(name: str, like: Buffer, numbers: Sequence[int]) -> Buffer:
    """A buffer chosen by the turn of a rolled loop among several inputs or params."""
    return Buffer(name, like.dtype, like.size, "table", table=tuple(numbers), table_kind=like.kind, layout=like.layout)
