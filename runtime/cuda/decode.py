"""A plan that runs again and again on the same sizes and addresses, with the host some runs ahead of the device.

Before each run a few numbers travel to the device, after it a few come back, through pinned memory and without waiting:
an event says when they are there. What a run chooses (a token) lies where the next one reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.codegen.plan import Plan, StepLoop
from monoplan.codegen.views import Buffer
from monoplan.ir.errors import PlanError
from monoplan.ir.types import Array

AHEAD = 3  # runs that may be under way: enough that the device never waits, few enough to throw away at a stop
_ALIGN = 256


class Block:
    """Small arrays side by side in one piece of device memory, with a few copies of it in pinned host memory."""

    def __init__(self, device: Any, parts: Mapping[str, tuple[tuple[int, ...], Any]], slots: int = 1) -> None:
        self.device, self.parts = device, dict(parts)
        self.starts: dict[str, int] = {}
        total = 0
        for name, (shape, dtype) in self.parts.items():
            self.starts[name] = total
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            total += -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        self.memory = device.allocate(total)
        self.host: Array = device.pinned(total * slots)[: total * slots].reshape(slots, total)
        self.host[:] = 0
        self.copies = [self.host[slot] for slot in range(slots)]
        self.views = [{name: self._view(copy, name) for name in self.parts} for copy in self.copies]

    def address(self, name: str) -> int:
        """Where an array lies on the device."""
        return int(self.memory.address) + self.starts[name]

    def _view(self, copy: Array, name: str) -> Array:
        (shape, dtype), start = self.parts[name], self.starts[name]
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return copy[start : start + nbytes].view(dtype).reshape(shape)

    def array(self, name: str, slot: int = 0) -> Array:
        """An array of a copy on the host."""
        return self.views[slot][name]

    def upload(self, slot: int = 0) -> None:
        """A copy to the device; it must stay as it is until that is done."""
        self.device.upload(self.memory.address, self.copies[slot])

    def download(self, slot: int = 0) -> None:
        """From the device into a copy, which is there when the device has come so far."""
        self.device.download(self.copies[slot], self.memory.address)


class DecodeLoop:
    """The runs of one executable on fixed sizes and addresses.

    `sends` goes to the device before each run, `returns` comes back after it. `held` is what the addresses belong to.
    """

    def __init__(
        self,
        executable: Any,
        values: Mapping[str, int],
        inputs: Sequence[int],
        outputs: Sequence[int],
        sends: Block,
        returns: Block,
        held: Any = None,
    ) -> None:
        self.executable, self.device = executable, executable.device
        self.sends, self.returns, self.held = sends, returns, held
        self.places = (values, inputs, outputs)
        self.calls: Any = None  # made at the first run: by then it is settled how launches go
        self.slots = len(sends.copies)
        assert len(returns.copies) == self.slots > AHEAD
        self.graph: Any = None
        self.events = [self.device.event() for _ in range(self.slots)]
        self.sent = self.read = 0

    @property
    def under_way(self) -> int:
        """Runs whose results were not read yet."""
        return self.sent - self.read

    def enqueue(self, fill: Callable[[int], None], after: Callable[[], None]) -> None:
        """Puts one more run behind those under way.

        `fill` writes the numbers it needs into a slot of `sends`; `after` may put more work behind it.
        """
        if self.under_way >= AHEAD:
            raise PlanError(f"{self.under_way} runs are under way, no more than {AHEAD} may be")
        # The slot is free: the run that had it last was read, so its copies are done.
        slot = self.sent % self.slots
        fill(slot)
        with self.device.lock:
            self.sends.upload(slot)
            self._launch()
            after()
            self.returns.download(slot)
            self.device.record(self.events[slot])
        self.sent += 1

    def _launch(self) -> None:
        if self.calls is None:
            self.calls = self.executable.calls(*self.places)
        if self.graph is None and self.executable.graphs:
            self.graph = self.device.capture(self.calls.enqueue)
        if self.graph is not None:
            self.device.launch_graph(self.graph)
        else:
            self.calls.enqueue()

    def next(self) -> int:
        """Waits for the oldest run; the slot of `returns` with its results."""
        if not self.under_way:
            raise PlanError("no run is under way")
        slot = self.read % self.slots
        self.device.wait(self.events[slot])
        self.read += 1
        return slot

    def drop(self) -> None:
        """Waits for all runs under way and forgets their results."""
        if self.under_way:
            self.device.synchronize()
        self.sent = self.read = 0


def may_share(plan: Plan, given: int, result: int) -> bool:
    """Whether an output may be written over an input: nobody reads the input once the output is begun."""
    reads, writes = [], []
    for place, item in enumerate(plan.items):  # the steps of a loop have one place: its turns mix them
        for step in item.steps if isinstance(item, StepLoop) else (item,):
            for o in step.kernel.operands:
                b = o.view.buffer.root
                numbers = b.table if b.kind == "table" else (b.index,)
                kind = b.table_kind if b.kind == "table" else b.kind
                if kind == "input" and given in numbers:
                    reads.append(place)
                if kind == "output" and result in numbers and o.written:
                    writes.append(place)
    return isinstance(plan.outputs[result], Buffer) and bool(writes) and max(reads, default=-1) < min(writes)
