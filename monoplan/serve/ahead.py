"""Answers on a GPU, with the host a run ahead: a run reads the tokens that the one before it chose, where they lie.

While the device works on a run, the host takes the tokens of the run before it, tells its clients and puts the next run
behind. Logits stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.ir.types import Array
from monoplan.models.generate.device_generation import input_addresses, returned
from monoplan.runtime.cuda.decode import AHEAD, Block, DecodeLoop, may_share


class AnswerRuns:
    """Runs of the paged plan for single tokens of so many rows, with so wide a table."""

    def __init__(self, executable: Any, caches: Sequence[int], pages: int, rows: int, width: int, spare: Any) -> None:
        self.executable, self.device, graph = executable, executable.device, executable.plan.graph
        kinds = {v.name.rpartition(".")[2]: v.type.dtype.numpy for v in graph.inputs if v.type.rank < 4}
        state = {name: kinds.pop(name) for name in ("input_ids", "history")}
        shapes = {name: (rows, width) if name == "table" else (rows,) for name in kinds}
        self.sends = Block(self.device, {name: (shapes[name], kinds[name]) for name in kinds}, AHEAD + 1)
        self.state = Block(self.device, {name: ((rows, 1), kind) for name, kind in state.items()})
        self.returns = returned(self.device, rows, AHEAD + 1)
        self.shared = may_share(executable.plan, [v.name for v in graph.inputs].index("input_ids"), 0)
        self.token = self.returns.address("token") if self.shared else self.state.address("input_ids")
        places = {name: self.sends.address(name) for name in kinds}
        places |= {"input_ids": self.token, "history": self.state.address("history")}
        sizes = {"batch": rows, "seq": 1, "hist": 1, "pages": pages, "width": width}
        self.values = {**{s: sizes[s] for s in graph.symbols}, "threads": 1}
        chosen = [self.returns.address(name) for name in ("token", "logprob")]
        outputs = [0 if isinstance(where, int) else int(spare.address) for where in executable.plan.outputs]
        outputs[:2] = chosen
        self.inputs, self.outputs = input_addresses(graph, caches, places), outputs
        self.loop = DecodeLoop(executable, self.values, self.inputs, outputs, self.sends, self.returns, spare)
        self.tried = False

    def begin(self, ids: Array, arrays: Mapping[str, Array]) -> None:
        """A first run, which reads these tokens."""
        self.loop.drop()
        self.state.array("input_ids")[:, 0] = ids
        self.state.upload()
        if not self.tried:  # whatever is made at a first run must not be made while a graph is captured
            self._fill(arrays, 0)
            with self.device.lock:
                self.sends.upload()
                self._place()
                self.executable.calls(self.values, self.inputs, self.outputs).enqueue()
                self.device.synchronize()
            self.tried = True
        self._place()
        self.enqueue(arrays)

    def _place(self) -> None:
        if self.shared:
            self.device.copy(self.token, self.state.address("input_ids"), 8 * len(self.state.array("input_ids")))

    def enqueue(self, arrays: Mapping[str, Array]) -> None:
        """One more run, which reads the tokens that the last one chooses."""
        self.loop.enqueue(lambda slot: self._fill(arrays, slot), self._after)

    def _fill(self, arrays: Mapping[str, Array], slot: int) -> None:
        for name in self.sends.parts:
            self.sends.array(name, slot)[...] = arrays[name]

    def _after(self) -> None:
        if not self.shared:
            self.device.copy(self.token, self.returns.address("token"), 8 * len(self.state.array("input_ids")))
        self.executable.error.fetch()

    @property
    def under_way(self) -> int:
        return self.loop.under_way

    def next(self) -> dict[str, Array]:
        """What the oldest run chose: token and logprob of each row."""
        slot = self.loop.next()
        self.executable.check(self.values)
        return {name: np.array(self.returns.array(name, slot)) for name in ("token", "logprob")}
