"""Runs a plan on a GPU: one launch list for each set of sizes and addresses, captured as a graph when it comes again.

Arguments may be numpy arrays (copied in; results are numpy arrays) or device arrays, that is anything with
`__cuda_array_interface__` or DLPack (used in place; if any is one, results are CuPy arrays). A KV cache of numpy arrays
has a twin on the device, kept as long as the array lives: it is uploaded once, and after a run only the rows that the
plan wrote travel back. With `resident = True` not even those do, until `sync()`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from monoplan.codegen.cuda.launches import Exchange, Launch, Product, Variant, Word
from monoplan.codegen.cuda.render import CudaSource
from monoplan.codegen.kernels import Attention, Collective
from monoplan.codegen.plan import Plan, Step, StepLoop
from monoplan.codegen.views import Buffer
from monoplan.ir.dims import Dim, evaluate
from monoplan.ir.errors import PlanError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.runtime.cpu.executable import INDEX, describe_failure
from monoplan.runtime.cuda.arrays import Arguments, ErrorRecord, Results, Twins
from monoplan.runtime.cuda.device import Device, LaunchSpec, MatrixSpec, ProductSpec, gpu
from monoplan.runtime.ranks.comm import Communicator

# Collectives of a plan on a GPU: through NCCL where ranks have GPUs of their own, else through the host's memory.
#
# Ranks only give each other their bytes here; the sum, in rank order and with what follows it, is a kernel of the
# plan.


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange with everything known: addresses, and rows of `width` bytes."""

    x: int
    y: int
    rows: int
    width: int


def exchange_spec(a: Exchange, values: Mapping[str, int], x: int, y: int) -> ExchangeSpec:
    """An action of the plan for these sizes and addresses."""
    return ExchangeSpec(x, y, evaluate(a.rows, values), evaluate(a.columns, values) * a.dtype.itemsize)


def exchange(device: Any, comm: Communicator | None, spec: ExchangeSpec) -> None:
    """Puts x[rows] of every rank to y[rows, rank], in the order of the device's other work."""
    if comm is None:
        raise PlanError("the plan exchanges values with other ranks, but has no communicator", fix="compile with tp=")
    if not spec.rows * spec.width:
        return
    if hasattr(comm, "gather_bytes"):
        _on_device(device, comm, spec)
        return
    nbytes = spec.rows * spec.width
    mine = device.pinned(nbytes)[:nbytes].reshape(spec.rows, spec.width)
    device.download(mine, spec.x)
    device.synchronize()
    parts = comm.gather(mine)
    joined = device.pinned(nbytes * comm.size)[: nbytes * comm.size]
    np.stack(parts, axis=1, out=joined.reshape(spec.rows, comm.size, spec.width))
    device.upload(spec.y, joined)
    device.synchronize()  # the array must outlive the copy


def _on_device(device: Any, comm: Any, spec: ExchangeSpec) -> None:
    nbytes, cupy = spec.rows * spec.width, device.cupy
    if spec.rows == 1:
        comm.gather_bytes(spec.x, spec.y, nbytes, device.stream.ptr)
        return
    with device.stream:  # NCCL puts the ranks first: rows are put together again
        parts = cupy.empty((comm.size, spec.rows, spec.width), np.uint8)
        comm.gather_bytes(spec.x, parts.data.ptr, nbytes, device.stream.ptr)
        memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(spec.y, nbytes * comm.size, None), 0)
        cupy.ndarray((spec.rows, comm.size, spec.width), np.uint8, memory)[...] = parts.swapaxes(0, 1)


def take_turns(comm: Communicator) -> None:
    """Ranks of one host that have not chosen a GPU take its GPUs in turn; before the process uses one."""
    from monoplan.runtime.cuda.device import gpu, import_cupy

    cuda = import_cupy().cuda
    count = cuda.runtime.getDeviceCount()
    unchosen = not hasattr(comm, "device") and not gpu.cache_info().currsize and cuda.Device().id == 0
    if unchosen and comm.local_rank % count:
        cuda.Device(comm.local_rank % count).use()


Array = np.ndarray[Any, Any]
KEPT = 64  # launch lists (and graphs) that are kept for sizes and addresses seen before
TICKETS = 4096
_ALIGN = 256


class Calls:
    """Everything one run does, with sizes and addresses known; a graph of it once it has run before."""

    def __init__(self, device: Device, actions: list[tuple[Callable[[Any], None], Any, int]]) -> None:
        self.device, self.actions, self.runs = device, actions, 0
        self.graph: Any = None
        self.held: Any = None  # what the addresses belong to, if nobody else keeps it
        self._parts: tuple[Calls, Calls] | None = None

    def enqueue(self) -> None:
        """Puts the work on the stream, one launch after another."""
        for act, argument, _ in self.actions:
            act(argument)

    def only(self, step: int) -> Calls:
        """The launches of one step, for measurements."""
        return Calls(self.device, [a for a in self.actions if a[2] == step])

    def run(self) -> None:
        """As a graph from the second time on: capturing costs more than one run gains."""
        self.runs += 1
        if self.graph is None and self.runs == 2:
            self.graph = self.device.capture(self.enqueue)
        if self.graph is not None:
            self.device.launch_graph(self.graph)
        else:
            self.enqueue()

    @cached_property
    def cut(self) -> int | None:
        """Where the host may look for errors: nothing behind it reports one. None: it has to wait for the end."""
        return next((i for i, (act, _, _) in enumerate(self.actions) if act is _cut), None)

    def run_ahead(self, report: Callable[[], None]) -> bool:
        """The same in two parts, with `report` between them. Whether there is anything to report."""
        if self._parts is None:
            assert self.cut is not None
            first, rest = self.actions[: self.cut], self.actions[self.cut + 1 :]
            self._parts = Calls(self.device, first), Calls(self.device, rest)
        self.runs += 1
        checked, unchecked = self._parts
        if checked.actions:
            checked.run()
            report()
        if unchecked.actions:
            unchecked.run()
        return bool(checked.actions)


def _cut(_: Any) -> None:
    """Stands in a list of actions behind the last one that may report an error."""


class CudaExecutable:
    """A loaded plan with its weights on the device."""

    def __init__(
        self,
        plan: Plan,
        source: CudaSource,
        params: Sequence[Any],
        device: Device | None = None,
        text: str | None = None,
    ) -> None:
        self.device: Any = gpu() if device is None else device
        self.plan, self.source = plan, source
        self.text = source.text if text is None else text
        self.untuned = source.text if source.untuned is None else source.untuned  # what a tuning belongs to
        loaded: tuple[Any, Any] = self.device.load(self.text, source.parts if text is None else ())
        self.module, self.entry = loaded
        self.functions: dict[str, Any] = {}  # in place of the module's own, while tuning
        self.variants = source.variants
        self.params = list(params)
        self.resident = False  # True: caches are copied back by sync() alone
        self.comm: Communicator | None = None  # with the other ranks, where the plan has collectives
        # False: launches one by one, for debugging; and where ranks meet on the host between two of them.
        self.graphs = not any(isinstance(s.kernel, Collective) for s, _ in plan.steps())
        self.overlap = self.device.target.capability >= 90
        self._twins = Twins(self.device, plan)
        self._arguments = Arguments(self.device)
        self.error = ErrorRecord(self.device)
        self._arena = self._workspace = self.device.allocate(_ALIGN)
        self._tickets = self.device.allocate(TICKETS * 4)  # 0 between launches
        self.device.upload(self._tickets.address, np.zeros(TICKETS, np.uint32))
        self._calls: OrderedDict[Any, Calls] = OrderedDict()
        self._tables = _tables(plan)
        self._overlaps: dict[tuple[int, ...], bool] = {}  # by rough sizes: whether launches overlap
        self._settled: set[tuple[int, ...]] = set()
        # The device's own, since a capture takes all that is put on its stream; but ranks in one process meet in a run.
        self._lock = self.device.lock if self.graphs else threading.Lock()

    @property
    def hit(self) -> bool:
        """Whether the binary came from the cache."""
        return bool(self.entry is not None and self.entry.hit)

    def run(self, inputs: Sequence[Any], symbols: Mapping[str, int]) -> list[Any]:
        """Outputs for inputs that were checked already; an output that aliases an input is that input."""
        with self._lock:
            values = {**symbols, "threads": 1}
            self._check_tables(inputs, values)
            given = self._arguments.bind(inputs, self._twins)
            results = Results(self.device, self.plan, values, self._arguments, on_device=given.on_device)
            if given.on_device:
                self.device.follow()  # the memory of the results may have been the caller's just now
            calls = self._ready(values, given.addresses, results.addresses)
            if given.lasting and self.graphs and calls.cut is not None:
                reported = calls.run_ahead(self.error.fetch_soon)
                self.device.lead()  # the caller's next work waits, the caller does not
                if reported:
                    self.error.wait()
            else:
                calls.run()
                results.fetch(self.error)
            self.check(symbols)
            self._twins.written(inputs, symbols, keep=self.resident)
            return results.finish(inputs)

    def runner(self, symbols: Mapping[str, int]) -> Callable[[Sequence[Any]], list[Any]]:
        """`run` for these values of the symbols."""
        return partial(self.run, symbols=symbols)

    def tune(
        self,
        inputs: Sequence[Any],
        symbols: Mapping[str, int],
        seconds: float = 30.0,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[float, float]:
        """Tunes the decode kernels on these arguments (one row), keeps the constants for later processes.

        Milliseconds of a run before and after.
        """
        from monoplan.runtime.cuda.tune import tune

        with self._lock:
            values = {**symbols, "threads": 1}
            given = self._arguments.bind(inputs, self._twins)
            results = Results(self.device, self.plan, values, self._arguments, on_device=False)

            def run() -> float:
                return self.measure(values, given.addresses, results.addresses)

            before = run()
            tune(self, run, seconds, values=values, progress=progress)
            self._calls.clear()
            return before, run()

    def measure(
        self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int], count: int = 20
    ) -> float:
        """Milliseconds of a run as a graph with the present variants."""
        calls = Calls(self.device, self._actions(values, inputs, outputs))
        return float(self.device.measure(self.device.capture(calls.enqueue), count))

    def begin_caches(self, arrays: Sequence[Array]) -> list[int]:
        """Addresses on the device of caches, numpy arrays of zeros, which stay there until sync()."""
        self.resident = True
        with self._lock:
            return [self._twins.begin(array) for array in arrays]

    def share_caches(self, other: CudaExecutable) -> None:
        """Caches that another executable has begun are this one's, too."""
        self.resident = True
        self._twins.share(other._twins)

    def copy_rows(self, target: int, source: int, pitch: int, width: int, count: int) -> None:
        """Copies `count` pieces of memory of the device, `pitch` bytes apart."""
        with self._lock:
            self.device.copy_rows(target, pitch, source, pitch, width, count)

    def sync(self) -> None:
        """Brings every cache that lives on the device back into its numpy array."""
        with self._lock:
            self._twins.sync()

    def check(self, symbols: Mapping[str, int]) -> None:
        """Raises what the runs reported whose error record was fetched."""
        error = self.error.take()
        if error is not None:
            step = next(s for s, _ in self.plan.steps() if s.number == error["step"])
            raise describe_failure(step, error["code"], error["place"], error["value"], error["limit"], symbols)

    def _check_tables(self, inputs: Sequence[Any], values: Mapping[str, int]) -> None:
        """Raises if a table names a page that the cache does not have, where the host can see both."""
        for step, k, table_number, past_number in self._tables:
            table, past = inputs[table_number], inputs[past_number]
            if not isinstance(table, np.ndarray) or not isinstance(past, np.ndarray):
                continue
            cache = k.operand("k").view
            used = -(-(past.astype(np.int64) + evaluate(k.seq, values)) // cache.page)
            pages = evaluate(cache.pages, values)
            wrong = (np.arange(table.shape[1]) < used[:, None]) & ((table < 0) | (table >= pages))
            if wrong.any():
                place = int(wrong.argmax())
                raise describe_failure(step, INDEX, place, int(table.reshape(-1)[place]), pages, values)

    # -- launch lists -------------------------------------------------------------------------------------------

    def _ready(self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]) -> Calls:
        """The launches of a run; when they come for the second time it is known whether they should overlap.

        They usually should, but small kernels may crowd onto few SMs: the time of the whole run decides.
        """
        calls = self.calls(values, inputs, outputs)
        if calls.runs == 1 and self._twins.repeatable:
            self._settle(calls, values, inputs, outputs)
            calls = self.calls(values, inputs, outputs)
        return calls

    def settle(self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Runs a plan that will run often: whatever is made at a first run is there, and how launches go is decided.

        The plan must be repeatable, and the outputs other memory than the inputs.
        """
        with self._lock:
            if _rough(values) in self._settled:
                return
            calls = self.calls(values, inputs, outputs)
            calls.enqueue()
            self._settle(calls, values, inputs, outputs)
            self._settled.add(_rough(values))
            self.device.synchronize()

    def _settle(self, calls: Calls, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Decides whether launches of these sizes overlap, unless that is known.

        Those of plans with the library's products always do: they take too long for it to matter.
        """
        sizes, products = _rough(values), any(act == self.device.product for act, _, _ in calls.actions)
        if sizes in self._overlaps or products or not (self.overlap and self.graphs):
            return
        times = {}
        for self._overlaps[sizes] in (True, False):
            calls = self.calls(values, inputs, outputs)
            calls.graph = self.device.capture(calls.enqueue)
            times[self._overlaps[sizes]] = self.device.measure(calls.graph, 5)
        self._overlaps[sizes] = times[True] <= times[False]

    def calls(self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]) -> Calls:
        """The launches for these sizes and addresses, made once."""
        overlap = self.overlap and self._overlaps.get(_rough(values), True)
        key = (tuple(values.values()), tuple(inputs), tuple(outputs), overlap)
        found = self._calls.get(key)
        if found is None:
            actions = self._actions(values, inputs, outputs)
            found = self._calls[key] = Calls(self.device, actions)
            found.held = (self._arena, self._workspace)  # a graph of it may outlive their growth
            if not self.graphs:
                found.runs = 2**62
            if len(self._calls) > KEPT:
                self._calls.popitem(last=False)
        self._calls.move_to_end(key)
        return found

    def _actions(self, values: Mapping[str, int], inputs: Sequence[int], outputs: Sequence[int]) -> list[Any]:
        offsets, total = self.plan.arena.layout(values)
        chosen = {s.number: choose_variant(self.variants[s.number], values) for s, _ in self.plan.steps()}
        room = max((evaluate(v.workspace, values) for v in chosen.values()), default=0)
        self._reserve(total, room)
        resolver = _Resolver(self, values, inputs, outputs, offsets)
        resolver.overlap = self.overlap and self._overlaps.get(_rough(values), True)
        actions: list[Any] = []
        todo: list[tuple[Step, int]] = []
        for item in self.plan.items:
            turns = range(evaluate(item.count, values)) if isinstance(item, StepLoop) else (0,)
            todo += [(step, turn) for turn in turns for step in (item.steps if isinstance(item, StepLoop) else (item,))]
        checked = max((i + 1 for i, (step, _) in enumerate(todo) if step.kernel.reports), default=0)
        for i, (step, turn) in enumerate(todo):
            if i == checked <= len(todo) // 2:  # later it would not be worth the second graph
                actions.append((_cut, None, -1))
            self._step(actions, step, chosen[step.number], resolver, turn)
        return actions

    def _reserve(self, arena: int, workspace: int) -> None:
        """Grows the device memory that steps share; launch lists with the old addresses are forgotten."""
        if arena > self._arena.nbytes:
            self._arena = self.device.allocate(arena)
            self._calls.clear()
        if workspace > self._workspace.nbytes:
            self._workspace = self.device.allocate(workspace)
            self._calls.clear()

    def _step(self, actions: list[Any], step: Step, variant: Variant, at: _Resolver, turn: int) -> None:
        device = self.device
        for a in variant.actions:
            if isinstance(a, Launch):
                grid = (evaluate(a.grid[0], at.values), evaluate(a.grid[1], at.values), evaluate(a.grid[2], at.values))
                if 0 in grid:
                    continue
                overlap = at.overlap and bool(actions) and actions[-1][0] in (device.run, device.product)
                words = [at.argument(w, step, turn) for w in a.words]
                function = self.functions.get(a.function) or self.module[a.function]
                spec = LaunchSpec(function, grid, a.block, a.shared, a.cluster, overlap, words)
                actions.append((device.run, device.prepare(spec), step.number))
            elif isinstance(a, Product):
                rows = evaluate(a.rows, at.values)
                if rows:
                    x, w, out = (at.word(p, step, turn) for p in (a.x, a.w, a.out))
                    add, bias = (0 if p is None else at.word(p, step, turn) for p in (a.add, a.bias))
                    product = ProductSpec(x, w, out, rows, a.columns, a.depth, a.dtype, a.out_dtype, add, bias)
                    actions.append((device.product, product, step.number))
            elif isinstance(a, Exchange):
                meeting = exchange_spec(a, at.values, at.word(a.x, step, turn), at.word(a.y, step, turn))
                actions.append((lambda args: exchange(device, self.comm, args), meeting, step.number))


def _tables(plan: Plan) -> list[tuple[Step, Attention, int, int]]:
    """For each pair of a table and lengths that attention reads, a step that does, and the numbers of these inputs."""
    found: dict[tuple[int, int], tuple[Step, Attention]] = {}
    for step, _ in plan.steps():
        k = step.kernel
        if isinstance(k, Attention) and k.has("table") and k.has("past"):
            table, past = (k.operand(name).view.buffer for name in ("table", "past"))
            if table.kind == past.kind == "input":
                found.setdefault((table.index, past.index), (step, k))
    return [(*reader, *numbers) for numbers, reader in found.items()]


def _rough(values: Mapping[str, int]) -> tuple[int, ...]:
    """Sizes as far as they matter for how kernels share the device: large ones up to the next power of two."""
    return tuple(v if v <= 64 else 1 << (v - 1).bit_length() for v in values.values())


def choose_variant(variants: Sequence[Variant], values: Mapping[str, int]) -> Variant:
    """The first variant for these sizes."""
    return next((v for v in variants if v.fits(values)), variants[-1])


class _Resolver:
    """Words of launches as numbers."""

    def __init__(
        self,
        owner: CudaExecutable,
        values: Mapping[str, int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        self.owner, self.values = owner, values
        self.tables: dict[str, Sequence[int]] = {
            "input": inputs,
            "output": outputs,
            "param": [p.address for p in owner.params],
        }
        self.offsets = offsets
        self.overlap = False

    def argument(self, w: Word, step: Step, turn: int) -> int | MatrixSpec:
        at = self.word(w, step, turn)
        if w.boxes is None:
            return at
        return MatrixSpec(at, self._number(w.boxes.rows), w.boxes.depth, w.boxes.box)

    def word(self, w: Word, step: Step, turn: int) -> int:
        if w.kind == "operand":
            assert w.operand is not None
            return self.buffer(w.operand.view.buffer, turn) + self._number(w.offset)
        if w.kind == "workspace":
            return int(self.owner._workspace.address) + self._number(w.offset)
        if w.kind == "symbol":
            return self.values[w.name]
        if w.kind == "number":
            return self._number(w.offset)
        if w.kind == "tickets":
            return int(self.owner._tickets.address)
        return self.owner.error.address if w.kind == "error" else step.number

    def _number(self, d: Dim) -> int:
        return d if isinstance(d, int) else evaluate(d, self.values)

    def buffer(self, b: Buffer, turn: int) -> int:
        """Where a buffer lies in this turn of its loop."""
        if b.of is not None:
            return self.buffer(b.of, turn) + self._number(b.first + turn * b.stride) * b.dtype.itemsize
        if b.kind in ("arena", "scratch"):
            return int(self.owner._arena.address) + self.offsets[self.owner.plan.arena.slot_of[b]]
        if b.kind == "table":
            return self.tables[b.table_kind][b.table[turn]]
        return self.tables[b.kind][b.index]


__all__ = ["Calls", "CudaExecutable", "_Resolver", "choose_variant", "gpu"]
