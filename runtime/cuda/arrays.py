"""Arguments and results of a plan on a GPU: numpy arrays in one copy, device arrays in place, caches as twins."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.codegen.kernels import Experts, Heads, KVUpdate, Latent, Linear
from monoplan.codegen.plan import Plan
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.errors import ArgumentError

Array = np.ndarray[Any, Any]
_ALIGN = 256


def _rounded(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


class Bound:
    """Addresses of a call's inputs; `held` keeps alive what they belong to."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.held: list[Any] = []
        self.on_device = False
        self.lasting = True  # the caller's work, too, goes by the order of streams: nothing dies or moves too early


class Arguments:
    """Brings inputs to the device. Small blocks are kept by size, so that addresses stay the same from call to call."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._blocks: dict[tuple[Any, ...], tuple[Any, Array]] = {}

    def block(self, kind: str, sizes: tuple[int, ...]) -> tuple[Any, Array, list[int]]:
        """Device memory and pinned host memory for arrays of these sizes, and where each begins."""
        starts = [0]
        for n in sizes:
            starts.append(starts[-1] + _rounded(n))
        key = (kind, *sizes)
        if key not in self._blocks:
            if len(self._blocks) > 32:
                self._blocks.clear()
            self._blocks[key] = (self.device.allocate(starts[-1]), self.device.pinned(starts[-1]))
        memory, host = self._blocks[key]
        return memory, host, starts

    def bind(self, inputs: Sequence[Any], twins: Twins) -> Bound:
        """Addresses of all inputs on the device."""
        bound = Bound()
        bound.lasting = all(not isinstance(a, np.ndarray) and self.device.is_lasting(a) for a in inputs)
        small = [(i, a) for i, a in enumerate(inputs) if isinstance(a, np.ndarray) and not twins.has(i)]
        memory, host, starts = self.block("in", tuple(a.nbytes for _, a in small))
        for (_, a), start in zip(small, starts, strict=False):
            host[start : start + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        if starts[-1]:
            self.device.upload(memory.address, host[: starts[-1]])
        places = {i: memory.address + start for (i, _), start in zip(small, starts, strict=False)}
        bound.held.append(memory)
        for i, a in enumerate(inputs):
            if i in places:
                bound.addresses.append(places[i])
            elif isinstance(a, np.ndarray):
                bound.addresses.append(twins.address(i, a))
            else:
                bound.on_device = True
                array = self.device.as_device_array(a, twins.has(i))
                bound.held.append(array)
                bound.addresses.append(int(array.data.ptr))
        return bound


class Results:
    """Outputs of one run: device arrays, or one block that is fetched together with the error record."""

    def __init__(
        self, device: Any, plan: Plan, values: Mapping[str, int], arguments: Arguments, *, on_device: bool
    ) -> None:
        self.device, self.plan, self.on_device = device, plan, on_device
        self.shapes, self.types = [], []
        for where, v in zip(plan.outputs, plan.graph.outputs, strict=True):
            if isinstance(where, Buffer):
                self.shapes.append(tuple(evaluate(d, values) for d in v.type.shape))
                self.types.append(v.type.dtype.numpy)
        self.arrays: list[Any] = []
        self.addresses = [0] * len(plan.outputs)
        numbers = [b.index for b in plan.outputs if isinstance(b, Buffer)]
        if on_device:
            self.arrays = [device.empty(s, t) for s, t in zip(self.shapes, self.types, strict=True)]
            places = [int(a.data.ptr) for a in self.arrays]
        else:
            sizes = tuple(int(np.prod(s)) * t.itemsize for s, t in zip(self.shapes, self.types, strict=True))
            self.memory, self.host, self.starts = arguments.block("out", sizes)
            places = [self.memory.address + s for s in self.starts[:-1]]
        for number, place in zip(numbers, places, strict=True):
            self.addresses[number] = place

    def fetch(self, error: ErrorRecord) -> None:
        """Waits for the run; its results and its error record are on the host afterwards."""
        if not self.on_device and self.starts[-1]:
            self.device.download(self.host[: self.starts[-1]], self.memory.address)
        error.fetch()
        self.device.synchronize()

    def finish(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs in order."""
        if not self.on_device:
            for shape, kind, start in zip(self.shapes, self.types, self.starts, strict=False):
                nbytes = int(np.prod(shape)) * kind.itemsize
                self.arrays.append(self.host[start : start + nbytes].copy().view(kind).reshape(shape))
        fresh = iter(self.arrays)
        return [next(fresh) if isinstance(where, Buffer) else inputs[where] for where in self.plan.outputs]


class ErrorRecord:
    """What went wrong in a run: 48 bytes on the device (mp_error)."""

    FIELDS = np.dtype(
        [
            ("code", "i4"),
            ("step", "i4"),
            ("place", "i8"),
            ("value", "i8"),
            ("limit", "i8"),
            ("lock", "i4"),
            ("unused", "i4"),
        ]
    )

    def __init__(self, device: Any) -> None:
        self.device = device
        self.memory = device.allocate(self.FIELDS.itemsize)
        self.address: int = self.memory.address
        self.host = device.pinned(self.FIELDS.itemsize)[: self.FIELDS.itemsize]
        self._fetched = device.event(sleep=False)
        self._clear()

    def _clear(self) -> None:
        self.host[:] = 0
        self.device.upload(self.address, self.host)
        self.device.synchronize()

    def fetch(self) -> None:
        self.device.download(self.host, self.address)

    def fetch_soon(self) -> None:
        """The same, to be waited for by `wait` while later work goes on."""
        self.fetch()
        self.device.record(self._fetched)

    def wait(self) -> None:
        self.device.wait(self._fetched)

    def take(self) -> dict[str, int] | None:
        """The error of the run that was fetched, if there was one; the record is empty again."""
        record = self.host.view(self.FIELDS)[0]
        if not record["code"]:
            return None
        found = {name: int(record[name]) for name in ("code", "step", "place", "value", "limit")}
        self._clear()
        return found


class _Twin:
    """A numpy array's copy on the device. `dirty`: rows [low, high) of its third dimension are newer there."""

    def __init__(self, array: Array, memory: Any) -> None:
        self.array, self.memory = weakref.ref(array), memory
        self.low, self.high = 0, 0


class Twins:
    """Inputs that a plan writes: on the device they live as long as their numpy arrays do."""

    def __init__(self, device: Any, plan: Plan) -> None:
        self.device = device
        self.written_inputs = {where for where in plan.outputs if isinstance(where, int)}
        self.lengths = _cache_lengths(plan, self.written_inputs)  # input number of a cache -> that of its lengths
        self.paged = _paged(plan)  # those whose third dimension is a page's
        self._twins: dict[int, _Twin] = {}
        self._block: tuple[Any, Array] | None = None  # where rows are gathered on their way to the host

    @property
    def repeatable(self) -> bool:
        """Whether a run may be done again with the same result: it writes nothing but behind the lengths of caches."""
        return self.written_inputs <= set(self.lengths)

    def has(self, number: int) -> bool:
        return number in self.written_inputs

    def address(self, number: int, array: Array) -> int:
        """The twin's memory; uploaded unless it is a cache that the device knows already."""
        twin = self._twins.get(id(array))
        if twin is None or twin.array() is not array:
            if not array.flags.writeable:
                raise ArgumentError("an argument that forward changes is read-only")
            twin = self._twins[id(array)] = _Twin(array, self.device.allocate(array.nbytes))
            weakref.finalize(array, self._forget, id(array), twin)
            self.device.upload(twin.memory.address, array)
        elif number not in self.lengths:
            self.device.upload(twin.memory.address, array)
        return int(twin.memory.address)

    def begin(self, array: Array) -> int:
        """The memory of a twin that begins with zeros, as its array does: that one is neither read nor sent."""
        twin = self._twins[id(array)] = _Twin(array, self.device.allocate(array.nbytes))
        weakref.finalize(array, self._forget, id(array), twin)
        self.device.clear(twin.memory.address, array.nbytes)
        return int(twin.memory.address)

    def share(self, other: Twins) -> None:
        """From now on both have the same ones."""
        self._twins = other._twins

    def _forget(self, key: int, twin: _Twin) -> None:
        if self._twins.get(key) is twin:
            del self._twins[key]

    def written(self, inputs: Sequence[Any], symbols: Mapping[str, int], *, keep: bool, steps: int = 1) -> None:
        """Takes note of what a run (or several in a row) wrote, and brings it back unless it may stay on the device."""
        news: list[tuple[_Twin, Array]] = []
        copies = False
        spans: dict[int, tuple[int, int]] = {}  # by the input with the lengths: the rows that are new
        for source, rows in set(self.lengths.values()):
            lengths = inputs[source]
            if isinstance(lengths, np.ndarray) and lengths.size:
                spans[source] = (int(lengths.min()), int(lengths.max()) + steps * evaluate(rows, symbols))
        for number in self.written_inputs:
            array = inputs[number]
            if not isinstance(array, np.ndarray):
                continue
            twin = self._twins[id(array)]
            if number not in self.lengths:
                self.device.download(array, twin.memory.address)
                copies = True
                continue
            everything = (0, array.shape[2])
            low, high = everything if number in self.paged else spans.get(self.lengths[number][0], everything)
            high = min(high, array.shape[2])
            twin.low, twin.high = (low, high) if twin.low == twin.high else (min(low, twin.low), max(high, twin.high))
            if not keep:
                news.append((twin, array))
        if news or copies:
            self._fetch(news)

    def sync(self) -> None:
        """Every array as it is on the device."""
        held = [(twin, twin.array()) for twin in self._twins.values()]
        self._fetch([(t, a) for t, a in held if a is not None and t.low < t.high])

    def _fetch(self, news: Sequence[tuple[_Twin, Array]]) -> None:
        """New rows of all caches by way of one block: many small copies to the host would each wait for the last."""
        parts = []
        for twin, array in news:
            batch, heads, capacity, dim = array.shape
            row = dim * array.itemsize
            parts.append((twin, array, batch * heads, capacity * row, twin.low * row, (twin.high - twin.low) * row))
        total = sum(_rounded(count * width) for *_, count, _, _, width in parts)
        if total == 0:
            self.device.synchronize()
            return
        if self._block is None or self._block[0].nbytes < total:
            self._block = (self.device.allocate(total), self.device.pinned(total))
        memory, host = self._block
        at = 0
        for twin, _, count, pitch, start, width in parts:
            self.device.copy_rows(memory.address + at, width, twin.memory.address + start, pitch, width, count)
            at += _rounded(count * width)
        self.device.download(host[:total], memory.address)
        self.device.synchronize()
        at = 0
        for twin, array, count, _, _, width in parts:
            batch, heads, _, dim = array.shape
            rows = host[at : at + count * width].view(array.dtype).reshape(batch, heads, -1, dim)
            array[:, :, twin.low : twin.high] = rows
            twin.low = twin.high = 0
            at += _rounded(count * width)


def _paged(plan: Plan) -> set[int]:
    """Inputs that are the pages of a cache."""
    buffers = [o.view.buffer for step, _ in plan.steps() for o in step.kernel.operands if o.view.table is not None]
    return {number for b in buffers for number in (b.table or (b.index,))}


def _cache_lengths(plan: Plan, written: set[int]) -> dict[int, tuple[int, Dim]]:
    """Caches that a plan writes only behind their lengths: the input with the lengths, and how many rows are new."""
    found: dict[int, tuple[int, Dim]] = {}
    spoiled: set[int] = set()
    for step, _ in plan.steps():
        k = step.kernel
        for o in k.writes:
            b = o.view.buffer
            if b.kind != "input" and b.table_kind != "input":
                continue
            for number in b.table or (b.index,):
                writer = k.latent if isinstance(k, Experts) else k
                if not isinstance(writer, Linear | KVUpdate | Heads | Latent) or number not in written:
                    spoiled.add(number)
                    continue
                lengths = writer.operand("lengths").view.buffer
                seq = writer.operand("rows").shape[1] if isinstance(writer, KVUpdate) else writer.seq
                if lengths.kind == "input":
                    found[number] = (lengths.index, seq)
                else:
                    spoiled.add(number)
    return {n: v for n, v in found.items() if n not in spoiled}
