"""torch: transformers' LlamaForCausalLM with its static cache, and the hand-written script; eager and compiled.

torch.compile sees a prompt of each length and a single token as functions of their own shapes. All of them are called
in the warm-up; after it a recompilation is an error and not a slow step (`settle`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from cpu_peers.engine import Ids, Job, StepEngine, Unavailable
from cpu_peers.workload import DTYPES


class TorchEngine(StepEngine):
    """`forward(ids, position, cache)` gives logits; there is a cache per capacity."""

    def __init__(self, compiled: bool, about: str) -> None:
        self.compiled, self.about = compiled, f"torch {torch.__version__}, {about}"
        self.caches: dict[int, Any] = {}
        self.cache: Any = None
        self.functions: dict[tuple[int, int], Any] = {}
        self.length, self.capacity = 0, 0

    def new_cache(self, capacity: int) -> Any:
        raise NotImplementedError

    def forward(self, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        raise NotImplementedError

    def reset(self, capacity: int) -> None:
        if capacity not in self.caches:
            self.caches[capacity] = self.new_cache(capacity)
        self.cache, self.capacity, self.length = self.caches[capacity], capacity, 0

    def step(self, ids: Ids) -> int:
        seq = ids.shape[1]
        position = torch.arange(self.length, self.length + seq)
        key = seq, self.capacity
        if key not in self.functions:
            self.functions[key] = self._function()
        with torch.inference_mode():
            logits = self.functions[key](torch.from_numpy(ids), position, self.cache)
            token = int(logits[0, -1].argmax())
        self.length += seq
        return token

    def _function(self) -> Any:
        if not self.compiled:
            return self.forward
        return torch.compile(self.forward, dynamic=False, fullgraph=True)

    def settle(self) -> None:
        if self.compiled:
            torch.compiler.set_stance("fail_on_recompile")


class Transformers(TorchEngine):
    def __init__(self, model: Any, compiled: bool, version: str) -> None:
        super().__init__(compiled, f"transformers {version}")
        self.model = model
        # Versions that ask for the places in the cache would else count its tokens in every step.
        self.asks_places = "cache_position" in inspect.signature(model.model.forward).parameters

    def new_cache(self, capacity: int) -> Any:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=capacity)
        c = self.model.config
        # Made now and not inside of the compiled function, which would be compiled twice.
        cache.early_initialization(1, c.num_key_value_heads, c.head_dim, self.model.dtype, torch.device("cpu"))
        return cache

    def reset(self, capacity: int) -> None:
        super().reset(capacity)
        self.cache.reset()

    def forward(self, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        places = {"cache_position": position} if self.asks_places else {}
        out = self.model(ids, position_ids=position[None], past_key_values=cache, logits_to_keep=1, **places)
        logits: torch.Tensor = out.logits
        return logits


class Script(TorchEngine):
    def __init__(self, model: Any, shape: dict[str, Any], compiled: bool, about: str) -> None:
        super().__init__(compiled, about)
        self.model, self.shape = model, shape

    def new_cache(self, capacity: int) -> Any:
        from cpu_peers.torch_llama import Static

        return Static(self.shape, capacity, self.model.embedding.dtype)

    def forward(self, ids: torch.Tensor, position: torch.Tensor, cache: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, position, cache)
        return logits


def open_engine(job: Job, variant: str) -> TorchEngine:
    torch.set_num_threads(job.threads)
    if job.file is not None:
        raise Unavailable("torch does not read this file")
    compiled, frozen = "compile" in variant, "frozen" in variant
    dtype = getattr(torch, DTYPES[job.work.dtype])
    # Each prompt length and capacity is a specialisation, and all of them are wanted.
    torch._dynamo.config.recompile_limit = 64
    if variant.startswith("transformers"):
        import transformers

        model = transformers.LlamaForCausalLM.from_pretrained(job.work.checkpoint, dtype=dtype).eval()
        return Transformers(model, compiled, transformers.__version__)
    from cpu_peers.torch_llama import load

    if frozen:  # weights become constants that inductor may store in the order of its matrix products
        import torch._inductor.config as inductor

        inductor.freezing = True
    script = load(job.work.checkpoint, job.work.shape, dtype)
    about = "static-cache script" + (", inductor freezing" if frozen else "")
    return Script(script, job.work.shape, compiled, about)
