"""Weights on the device: prepared one at a time, rows put beside those that an epilogue needs with them, uploaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from monoplan.codegen.cuda.render import with_headers
from monoplan.codegen.formats import Layout, WeightFormat, format_of
from monoplan.codegen.formats.tiles import COLUMNS, ROWS
from monoplan.codegen.kernels import Linear
from monoplan.codegen.plan import Plan
from monoplan.ir.errors import CompileError
from monoplan.ir.types import Array
from monoplan.runtime.cpu.weights import Progress, Source, prepare, shared_weights, weight_key
from monoplan.runtime.cuda.device import LaunchSpec

WARPS = 4  # of a block that packs: a tile each


def upload_params(
    plan: Plan, source: Source | Callable[[str], Array], device: Any, progress: Progress | None = None
) -> list[Any]:
    """Device memory of every param in order; the host holds one param at a time beside the model's own arrays."""
    orders, store, packer = row_orders(plan), shared_weights(), Packer(device)
    found = []
    for i, use in enumerate(plan.params):
        key = weight_key(plan.graph, use.value, orders[i].tobytes() if i in orders else b"", use.layout)
        if key in store:
            found.append(store[key])
            continue
        (array,) = prepare(plan.graph, [replace(use, layout=None)], source, keep=False)
        if i in orders:
            array = array[orders[i]]
        memory = _uploaded(array, use.layout, packer)
        found.append(memory)
        store[key] = memory
        if progress is not None:
            progress(i + 1, len(plan.params))
    return found


class Packer:
    """Packs rows of a weight into tiles on the device."""

    def __init__(self, device: Any) -> None:
        self.device, self.functions = device, dict[str, Any]()

    def tiles(self, kept: WeightFormat, address: int, rows: int, depth: int) -> Any:
        """Memory with the tiles of rows that lie at an address, packed by the format's kernel."""
        if kept.cuda_pack not in self.functions:
            module, _ = self.device.load(with_headers([], kept.pack_text()))
            self.functions[kept.cuda_pack] = module, module[kept.cuda_pack]
        count = -(-rows // ROWS) * (depth // COLUMNS)
        memory = self.device.allocate(count * kept.tile_bytes)
        function, words = self.functions[kept.cuda_pack][1], [address, memory.address, rows, depth]
        launch = LaunchSpec(function, (-(-count // WARPS), 1, 1), WARPS * 32, 0, 1, False, words)
        self.device.run(self.device.prepare(launch))
        return memory

    def packed(self, array: Array, kept: WeightFormat) -> Any:
        """Memory with all that the format keeps of an array: its tiles, and behind them those that are kept raw."""
        device, each, head = self.device, kept.tile_bytes, 4 * kept.head_words
        rows = device.allocate(array.nbytes)
        device.upload(rows.address, np.ascontiguousarray(array))
        memory = self.tiles(kept, rows.address, *array.shape)
        heads = np.empty((memory.nbytes // each, kept.head_words), np.uint32)
        dense = device.allocate(heads.nbytes)
        device.copy_rows(dense.address, head, memory.address + each - head, each, head, len(heads))
        device.download(heads, dense.address)
        device.synchronize()
        raw = kept.raw_tiles(array, heads)
        if raw.size == 0:
            return memory
        whole = device.allocate(memory.nbytes + raw.nbytes)
        device.copy(whole.address, memory.address, memory.nbytes)
        device.upload(dense.address, heads)
        device.copy_rows(whole.address + each - head, each, dense.address, head, head, len(heads))
        device.upload(whole.address + memory.nbytes, raw)
        device.synchronize()
        return whole


def _uploaded(array: Array, layout: Layout | None, packer: Packer) -> Any:
    """Memory of the device with an array as its layout wants it; tiles are packed there, where that is fast."""
    kept, device = None if layout is None else format_of(layout), packer.device
    if kept is not None and kept.cuda_pack:
        return packer.packed(array, kept)
    if kept is not None and kept.tile and hasattr(device, "cupy"):
        with device.stream:
            raw = device.cupy.asarray(array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8))
            packed: Any = kept.pack_rows(raw)
            memory = device.allocate(packed.nbytes)
            device.copy(memory.address, packed.data.ptr, packed.nbytes)
            device.synchronize()
            del raw, packed
        device.cupy.get_default_memory_pool().free_all_blocks()
        return memory
    made = array if kept is None else kept.pack_rows(array)
    memory = device.allocate(made.nbytes)
    device.upload(memory.address, np.ascontiguousarray(made))
    device.synchronize()
    return memory


def row_orders(plan: Plan) -> dict[int, Array]:
    """For params whose rows are permuted: which row of the weight goes where."""
    found: dict[int, Array] = {}
    for step, _ in plan.steps():
        k = step.kernel
        if not isinstance(k, Linear) or not (k.gated or k.epilogue == "heads"):
            continue
        order = gated_rows(k.columns) if k.gated else head_rows(k)
        b = k.operand("w").view.buffer
        for number in b.table or (b.index,):
            if number in found and not np.array_equal(found[number], order):
                raise CompileError(
                    "one weight is the QKV product of two kinds of heads",
                    where=k.op.loc,
                    fix="give each its own copy of the parameter",
                )
            found[number] = order
    return found


def gated_rows(columns: int) -> Array:
    """gate 0, up 0, gate 1, up 1, …"""
    return np.arange(columns).reshape(2, columns // 2).T.reshape(-1)


def head_rows(k: Linear) -> Array:
    """Rows whose dimensions rotate together become neighbours; values and what does not rotate stay in order."""
    dim, half = k.head_dim, k.rotary // 2
    natural = np.arange(dim)
    paired = natural.copy()
    if k.algo != "gpt_j":
        paired[: 2 * half] = natural[: 2 * half].reshape(2, half).T.reshape(-1)
    heads = range(k.first_head, k.first_head + k.columns // dim)
    orders = [natural if h >= k.heads + k.kv_heads else paired for h in heads]
    return np.concatenate([i * dim + order for i, order in enumerate(orders)])
