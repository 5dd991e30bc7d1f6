"""Steps of generation without the host between them: outputs feed the next step's inputs on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from monoplan.codegen.views import Buffer
from monoplan.ir.dims import evaluate
from monoplan.ir.errors import ArgumentError

Array = np.ndarray[Any, Any]


def run_loop(
    executable: Any,
    inputs: Sequence[Any],
    symbols: Mapping[str, int],
    steps: int,
    *,
    feed: Mapping[int, int],
    collect: Sequence[int],
    stream: Mapping[int, Array] | None = None,
) -> list[Array]:
    """Runs the plan `steps` times and gives, for each output of `collect`, an array [steps, …].

    `feed` says which output becomes which input of the next step; the same storage size is all they need to share (a
    token [batch] feeds ids [batch, 1]). `stream` gives inputs that change: row i of the array is the input of step i.
    States that the graph itself replaces (the lengths of a cache) are fed back without being named.
    """
    plan, device = executable.plan, executable.device
    pairs = {**{j: i for i, j in plan.graph.writes if isinstance(plan.outputs[j], Buffer)}, **feed}
    with executable._lock:
        values = {**symbols, "threads": 1}
        given = executable._arguments.bind(inputs, executable._twins)
        sizes = [evaluate(v.type.size, values) * v.type.dtype.itemsize for v in plan.graph.outputs]
        outputs = [device.allocate(n) for n in sizes]
        addresses = [m.address for m in outputs]
        for j, i in pairs.items():
            wanted = evaluate(plan.graph.inputs[i].type.size, values) * plan.graph.inputs[i].type.dtype.itemsize
            if wanted != sizes[j]:
                raise ArgumentError(f"output {j} has {sizes[j]} bytes, input {i} takes {wanted}")
        changing = {}
        for i, array in (stream or {}).items():
            memory = device.allocate(array.nbytes)
            device.upload(memory.address, np.ascontiguousarray(array))
            changing[i] = (memory, array.nbytes // max(len(array), 1))
        kept = {j: device.allocate(sizes[j] * steps) for j in collect}
        calls = executable.calls(values, given.addresses, addresses)

        def one() -> None:
            calls.enqueue()
            for j, i in pairs.items():
                device.copy(given.addresses[i], addresses[j], sizes[j])

        graph = None
        for step in range(steps):
            for i, (memory, nbytes) in changing.items():
                device.copy(given.addresses[i], memory.address + step * nbytes, nbytes)
            if step == 1 and executable.graphs:
                graph = device.capture(one)
            if graph is None:
                one()
            else:
                device.launch_graph(graph)
            for j, memory in kept.items():
                device.copy(memory.address + step * sizes[j], addresses[j], sizes[j])
        found = []
        for j, memory in kept.items():
            v = plan.graph.outputs[j]
            array = np.empty((steps, *(evaluate(d, values) for d in v.type.shape)), v.type.dtype.numpy)
            device.download(array, memory.address)
            found.append(array)
        executable.error.fetch()
        device.synchronize()
        executable.check(symbols)
        executable._twins.written(inputs, symbols, keep=executable.resident, steps=steps)
        for j, i in pairs.items():  # the states after the last step, for the caller's arrays
            if isinstance(inputs[i], np.ndarray) and j not in feed:
                device.download(inputs[i], addresses[j])
        device.synchronize()
    return found
