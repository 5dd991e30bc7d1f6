"""CompiledLM: a language model as one plan, which serves its calls and its generation.

`mp.compile(model)` gives one for a LlamaForCausalLM. The plan is GenerationStep: prompt, single tokens and anything in
between, any batch, any cache; it is compiled at the first use. A second plan is made only for what that one can't say:
logits of every token, or positions other than the cache's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.module import Module
from monoplan.frontend.tensor import Tensor
from monoplan.frontend.tracer import spec
from monoplan.ir.errors import ArgumentError
from monoplan.models.generation import (
    Array,
    GenerationMixin,
    GenerationStep,
    Settings,
    cache_spec,
    sampling_arrays,
    step_specs,
)
from monoplan.models.llama import LlamaForCausalLM


class PositionedStep(Module):
    """Logits of every token, at positions that the caller gives."""

    def __init__(self, lm: Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, past_key_values: KVCache, num_valid: Tensor
    ) -> Tensor:
        """[batch, seq, vocab]."""
        logits: Tensor = self.lm(input_ids, position_ids, past_key_values, num_valid=num_valid, all_logits=True)
        return logits


class CompiledLM(GenerationMixin):
    """A compiled LlamaForCausalLM: call it as the model, or let it generate."""

    def __init__(
        self, model: LlamaForCausalLM, *, target: str = "cpu", dtype: Any = None, options: Any = None
    ) -> None:
        self.model, self.config, self.target = model, model.config, target
        self.dtype = model.dtype if dtype is None else dtype
        self.name_or_path = model.name_or_path
        self.last_cache: KVCache | None = None
        self._arguments = {"target": target, "dtype": dtype, "options": options}
        self._plans: dict[str, Any] = {}

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The model's tokenizer; None if it was made without one."""
        return self.model.tokenizer

    @property
    def compiled(self) -> Any:
        """The plan of GenerationStep; the first use compiles it."""
        return self._plan("generation")

    def prepare(self) -> CompiledLM:
        """Compiles now what the first call would compile."""
        self._plan("generation")
        return self

    def new_cache(self, batch: int = 1, capacity: int = 0) -> KVCache:
        """An empty KV cache for `batch` rows; it grows as needed, without recompilation."""
        return self.model.new_cache(batch, capacity, dtype=self.dtype)

    def __call__(
        self, input_ids: Any, position_ids: Any = None, past_key_values: KVCache | None = None,
        use_cache: bool | None = None, *, num_valid: Any = None, all_logits: bool = False,
    ) -> Array:  # fmt: skip
        """Logits as LlamaForCausalLM.forward gives them, as a numpy array; a given cache is written and advanced.

        Positions that simply go on from the cache run the plan of generation; other positions and all_logits run a
        second plan, compiled when first needed.
        """
        ids = np.asarray(input_ids, dtype=np.int64)
        if ids.ndim != 2 or not ids.size:
            raise ArgumentError(f"input_ids must be [batch, seq] with at least one token, got {list(ids.shape)}")
        batch, seq = ids.shape
        cache = self.new_cache(batch, seq) if past_key_values is None else past_key_values
        if use_cache and past_key_values is None:
            self.last_cache = cache
        valid = np.full(batch, seq, np.int32) if num_valid is None else np.asarray(num_valid, dtype=np.int32)
        expected = np.asarray(cache.lengths).astype(np.int64)[:, None] + np.arange(seq)
        positions = expected if position_ids is None else np.broadcast_to(np.asarray(position_ids, np.int64), ids.shape)
        if not all_logits and np.array_equal(positions, expected):
            return self.step(ids, cache, valid)["logits"]
        self._reserve(cache, valid)
        logits: Array = self._plan("positioned")(
            input_ids=ids, position_ids=np.ascontiguousarray(positions), past_key_values=cache, num_valid=valid
        )
        return logits if all_logits else logits[np.arange(batch), valid - 1][:, None]

    def step(self, input_ids: Array, past_key_values: KVCache, num_valid: Array | None = None) -> dict[str, Array]:
        """One run of the plan: the best token i64 [batch], its log probability, and logits [batch, 1, vocab]."""
        batch, seq = input_ids.shape
        valid = np.full(batch, seq, np.int32) if num_valid is None else num_valid
        return self._run_step(
            input_ids=input_ids, past_key_values=past_key_values, num_valid=valid,
            **sampling_arrays(Settings(), [0.0] * batch),
        )  # fmt: skip

    def _run_step(self, **arguments: Any) -> dict[str, Array]:
        self._reserve(arguments["past_key_values"], arguments["num_valid"])
        out: dict[str, Array] = self._plan("generation")(**arguments)
        return out

    def _reserve(self, cache: KVCache, valid: Array) -> None:
        cache.reserve(int(valid.max()))

    def _plan(self, name: str) -> Any:
        if name not in self._plans:
            from monoplan.api import Compiled

            if name == "generation":
                step: Module = GenerationStep(self.model)
                specs = step_specs(self.config, self.dtype)
            else:
                step = PositionedStep(self.model)
                ids = spec("batch", "seq", dtype="int64")
                specs = {"input_ids": ids, "position_ids": ids, "num_valid": spec("batch", dtype="int32"),
                         "past_key_values": cache_spec(self.config, self.dtype)}  # fmt: skip
            self._plans[name] = Compiled(step, **self._arguments, **specs)
        return self._plans[name]

    def __getattr__(self, name: str) -> Any:
        # What a Compiled can tell about its plan, this can tell about the plan of generation.
        if name in _INSPECTION:
            return getattr(self.compiled, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has learned."""
        return sum(int(p.numpy().size) for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """The size of the weights in the plan's dtype."""
        return self.num_parameters * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one token of one row reads: all but the embedding, unless it is the head as well."""
        tied = self.config.tie_word_embeddings
        table = 0 if tied else self.config.vocab_size * self.config.hidden_size
        return (self.num_parameters - table) * self.dtype.itemsize


_INSPECTION = frozenset("ir diff source plan dump stats verify bisect profile report explain".split())
