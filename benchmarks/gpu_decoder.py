"""LLaMA shapes with random weights on a GPU, and the loop that says how fast its memory can be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from monoplan.api import Compiled
from monoplan.codegen.cuda.render import render_cuda
from monoplan.codegen.formats import format_of
from monoplan.codegen.kernels import Linear
from monoplan.codegen.plan import make_plan
from monoplan.frontend.module import Module
from monoplan.frontend.parameter import no_init
from monoplan.frontend.specs import spec
from monoplan.ir.dims import evaluate
from monoplan.ir.types import LOW_BITS
from monoplan.models.config import LlamaConfig
from monoplan.models.generate.generation import cache_spec
from monoplan.models.llama import LlamaForCausalLM
from monoplan.runtime.cpu.weights import prepare
from monoplan.runtime.cuda.device import gpu
from monoplan.runtime.cuda.executable import CudaExecutable
from monoplan.runtime.cuda.weights import Packer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip


class GreedyStep(Module):
    """The model and the best next token: what a greedy decoder runs."""

    def __init__(self, lm: Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Any, past_key_values: Any, num_valid: Any) -> Any:
        """Token ids [batch, 1]."""
        return self.lm(input_ids, past_key_values=past_key_values, num_valid=num_valid).argmax(dim=-1)


def config_of(shape: str) -> LlamaConfig:
    return LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=40960,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        attention_bias=False,
        dtype="bfloat16",
    )


def keep_in(lm: LlamaForCausalLM, kind: str) -> None:
    """Makes the matrices of a model low-bit weights, with the types that a file of this kind has."""
    layers = lm.config.num_hidden_layers
    for name, parameter in lm.named_parameters():
        if parameter.ndim != 2 or "rotary" in name:
            continue
        own = kind
        if kind == "q4_k_m":
            number = int(name.split(".")[2]) if ".layers." in name else 0
            # Tensors that quantize.py gives more bits: the head, and values and down projections of some layers.
            more = number < layers // 8 or number >= 7 * layers // 8 or (number - layers // 8) % 3 == 2
            wide = "embed" in name or "lm_head" in name or (more and ("v_proj" in name or "down_proj" in name))
            own = "q6_k" if wide else "q4_k"
        parameter.defer(lambda part=None: None, None, LOW_BITS[own], lambda part=None: None)


class Decoder:
    """A shape's plan with random weights that were made on the device."""

    def __init__(self, shape: str, full: bool = False, kind: str = "bf16") -> None:
        self.config = config_of(shape)
        self.times: dict[str, float] = {}
        self.device = gpu()
        self.cupy, self.packer = self.device.cupy, Packer(self.device)
        start = time.perf_counter()
        with no_init():
            lm = LlamaForCausalLM(self.config)
        if kind not in ("bf16", "bf16_12"):
            keep_in(lm, kind)
        step: Module = GreedyStep(lm)
        specs = {
            "input_ids": spec("batch", "seq", dtype="int64"),
            "past_key_values": cache_spec(self.config, "bfloat16"),
            "num_valid": spec("batch", dtype="int32"),
        }
        if full:
            from monoplan.models.generate.generation import GenerationStep, step_specs

            step, specs = GenerationStep(lm), step_specs(self.config, "bfloat16")
        built = Compiled(step, target="reference", **specs).built[0][2]
        self.graph, tensors = built.stages[-1].graph, built.tensors
        self.lap("trace and passes", start)
        start = time.perf_counter()
        self.plan = make_plan(self.graph, replace(self.device.target, compact=kind == "bf16_12"))
        self.source = render_cuda(self.plan, "benchmark")
        self.lap("codegen", start)
        start = time.perf_counter()
        self.params = [self._random(use, tensors) for use in self.plan.params]
        self.lap("random weights", start)
        start = time.perf_counter()
        self.executable = CudaExecutable(self.plan, self.source, self.params, self.device)
        self.lap("build", start)

    def lap(self, name: str, start: float) -> None:
        self.times[name] = time.perf_counter() - start

    def _random(self, use: Any, tensors: Any) -> Any:
        t = use.value.type
        if any(p.value is use.value and "rotary" in p.path for p in self.graph.params):
            (array,) = prepare(self.graph, [use], lambda path: tensors[path].numpy())
            memory = self.device.allocate(array.nbytes)
            self.device.upload(memory.address, array)
            self.device.synchronize()
            return memory
        shape = tuple(int(d) for d in t.shape)
        matrix = len(shape) == 2
        kept = None if use.layout is None else format_of(use.layout)
        if t.dtype.is_low_bit:
            return _Held(kept.pack_rows(self.blocks(shape, kept)))
        made = self.noise(shape, 0.7 * shape[-1] ** -0.5 if matrix else 0.1, 0.0 if matrix else 1.0)
        if kept is None or not kept.tile:
            return made
        tiles = self.packer.tiles(kept, made.address, *shape)  # none of such weights has tiles that are kept raw
        self.device.synchronize()
        return tiles

    def blocks(self, shape: tuple[int, ...], kept: Any) -> Any:
        """Random blocks whose scales give weights of a usual size."""
        xp, dtype = self.cupy, kept.dtype
        raw = xp.random.randint(0, 256, (shape[0], shape[1] // dtype.block, dtype.block_bytes), dtype=xp.uint8)
        size = 0.2 * shape[1] ** -0.5 / (64 if dtype.block == 256 or kept.floats else 1)
        for place, kind in kept.scales:
            scale = np.array([size], kind).view(np.uint8)
            raw[..., place : place + len(scale)] = xp.asarray(scale)
        if kept.zeros:
            raw[..., -1] = 0 if kept.signed else 8
        if kept.name == "mxfp4":
            raw[..., 0] = 120
        return raw.reshape(shape[0], -1)

    @property
    def weight_bytes(self) -> int:
        """What the products of a step read."""
        numbers: set[int] = set()
        for step, _ in self.plan.steps():
            if isinstance(step.kernel, Linear):
                b = step.kernel.operand("w").view.buffer
                numbers |= set(b.table or (b.index,))
        return sum(self.params[i].nbytes for i in numbers)

    def bytes_per_step(self, batch: int, context: int) -> int:
        """Weights and KV cache, each read once."""
        c = self.config
        cache = 2 * c.num_key_value_heads * c.head_dim * context * batch * 2
        return self.weight_bytes + c.num_hidden_layers * cache

    def noise(self, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Any:
        """Normal numbers as bf16 bits."""
        xp = self.cupy
        n = int(np.prod(shape))
        out = xp.empty(n, xp.uint16)
        for i in range(0, n, 1 << 28):
            piece = xp.random.standard_normal(min(1 << 28, n - i), dtype=xp.float32) * np.float32(std) + np.float32(
                mean
            )
            out[i : i + piece.size] = (piece.view(xp.uint32) + xp.uint32(0x8000)) >> xp.uint32(16)
        xp.cuda.get_current_stream().synchronize()
        return _Held(out)

    def inputs(self, batch: int, seq: int, context: int) -> tuple[dict[str, int], list[Any]]:
        """Arguments of a step: a cache with `context` tokens of which the last `seq` are new."""
        values = {"batch": batch, "seq": seq, "capacity": max(context, 16), "hist": 1}
        special = {
            "lengths": np.full(batch, context - seq, np.int32),
            "num_valid": np.full(batch, seq, np.int32),
            "input_ids": np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, seq)),
        }
        found = []
        for v in self.graph.inputs:
            name = v.name.rpartition(".")[2]
            shape = tuple(evaluate(d, values) for d in v.type.shape)
            if v.type.rank == 4:
                found.append(self.noise(shape, 1.0))
                continue
            array = special.get(name, np.zeros(shape)).astype(v.type.dtype.numpy)
            memory = self.device.allocate(array.nbytes)
            self.device.upload(memory.address, np.ascontiguousarray(array))
            self.device.synchronize()
            found.append(memory)
        symbols = {s: values[s] for s in self.graph.symbols}
        return {**symbols, "threads": 1}, found

    def outputs(self, values: dict[str, int]) -> list[Any]:
        sizes = [evaluate(v.type.size, values) * v.type.dtype.itemsize for v in self.graph.outputs]
        return [self.device.allocate(max(16, n)) for n in sizes]

    def calls(self, batch: int, seq: int, context: int) -> Any:
        """The launches of one step; what they point to is kept with them."""
        values, inputs = self.inputs(batch, seq, context)
        outputs = self.outputs(values)
        found = self.executable.calls(values, [m.address for m in inputs], [m.address for m in outputs])
        found.held = (inputs, outputs)
        return found

    def milliseconds(self, calls: Any, count: int = 60, graph: bool = True) -> float:
        """The median time of a step."""
        device = self.device
        calls.enqueue()
        device.synchronize()
        if graph:
            return float(device.measure(device.capture(calls.enqueue), count, warm=5))
        return time_runs(device, calls.enqueue, count)

    def forget(self) -> None:
        """Frees the caches of earlier measurements."""
        self.executable._calls.clear()
        self.cupy.get_default_memory_pool().free_all_blocks()

    def tune(self, seconds: float, context: int = 1024) -> dict[str, dict[str, int]]:
        """Tunes the decode kernels for one sequence."""
        from monoplan.runtime.cuda.tune import tune

        values, inputs = self.inputs(1, 1, context)
        outputs = self.outputs(values)
        places = [m.address for m in inputs], [m.address for m in outputs]
        self.executable.overlap = True
        return tune(self.executable, lambda: self.executable.measure(values, *places), seconds, values=values)

    def kernels(self, calls: Any) -> list[tuple[str, int, float]]:
        """Each step's name, how often it runs and the microseconds of one turn, by itself in a graph."""
        found = []
        for step, count in self.plan.steps():
            only = calls.only(step.number)
            if len(only.actions) >= 8:
                found.append((f"{step.number} {step.kernel.op.name}", count, 1e3 * self.milliseconds(only, 20) / count))
        return found


class _Held:
    def __init__(self, array: Any) -> None:
        self.array, self.address, self.nbytes = array, int(array.data.ptr), array.nbytes


def time_runs(device: Any, run: Callable[[], None], count: int, warm: int = 5) -> float:
    """Median milliseconds between events around runs that are enqueued ahead."""
    events = [device.cupy.cuda.Event() for _ in range(count + 1)]
    for _ in range(warm):
        run()
    events[0].record(device.stream)
    for e in events[1:]:
        run()
        e.record(device.stream)
    device.synchronize()
    return statistics.median(device.cupy.cuda.get_elapsed_time(a, b) for a, b in zip(events, events[1:], strict=False))


class ReadLoop:
    """A sum over 2 GB: what reading memory can give here."""

    source = r"""
    extern "C" __global__ void __launch_bounds__(512) total(const uint4 *x, float *y, const long long n) {
        float s = 0.0f;
        const long long step = (long long)gridDim.x * blockDim.x;
        for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += 8 * step) {
            uint4 v[8];
            #pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = i + j * step < n ? __ldcs(x + i + j * step) : make_uint4(0, 0, 0, 0);
            #pragma unroll
            for (int j = 0; j < 8; ++j) s += __uint_as_float(v[j].x) + __uint_as_float(v[j].y)
                    + __uint_as_float(v[j].z) + __uint_as_float(v[j].w);
        }
        if (s == 1.2345f) y[0] = s;
    }"""

    def __init__(self, device: Any) -> None:
        xp = device.cupy
        self.device = device
        self.data = xp.random.standard_normal(1 << 29, dtype=xp.float32)
        self.result = xp.zeros(1, xp.float32)
        self.kernel = xp.RawKernel(self.source, "total")
        xp.cuda.get_current_stream().synchronize()

    def bytes_per_second(self) -> float:
        """The better of two grids, medians of 20 runs each."""
        args = self.data, self.result, np.int64(self.data.nbytes // 16)
        best = 0.0
        for blocks in (2, 4):
            grid = (self.device.target.cores * blocks,)
            with self.device.stream:
                ms = time_runs(self.device, lambda grid=grid: self.kernel(grid, (512,), args), 20)
            best = max(best, self.data.nbytes / ms * 1e3)
        return best
