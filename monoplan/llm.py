"""CompiledLM: a language model as one plan, which serves its calls and its generation.

`mp.compile(model)` gives one for a LlamaForCausalLM. The plan is GenerationStep: prompt, single tokens and
anything in between, any batch, any cache; it is compiled at the first use. A second plan is made only for
what that one can't say: logits of every token, or positions other than the cache's. On a GPU greedy text has a
plan of its own, without the sampling; all plans share the weights there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from monoplan.frontend.kv_cache import KVCache, WindowKVCache
from monoplan.frontend.module import HeldWeights, Module
from monoplan.frontend.pytree import flatten, unflatten
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.inspect.inspection import Shown
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Array, DType, TensorType, as_weight_dtype, bf16, f16, i8, plain_array
from monoplan.models.config import config_of
from monoplan.models.generate.decoding import Row, Settings, greedy_arrays, pieces, sampling_arrays, whole_rows
from monoplan.models.generate.generation import (
    CheckStep,
    EmbeddingStep,
    GenerationMixin,
    GreedyStep,
    ModelStep,
    Session,
    adapter_specs,
    bounded_layers,
    cache_spec,
    check_specs,
    embedding_specs,
    empty_cache,
    greedy_specs,
    make_room,
    paged_specs,
    step_specs,
)
from monoplan.models.text.tokenizer import Tokenizer
from monoplan.options import Options, find_target, known_kv_dtype
from monoplan.parallel import find_communicator
from monoplan.progress import progress

if TYPE_CHECKING:
    from monoplan.api import Compiled, Stats
    from monoplan.built import Built
    from monoplan.models.llama import LlamaForCausalLM


PAGE = 64  # tokens of a page of the cache that many texts share


class PositionedStep(ModelStep):
    """Logits of every token, at positions that the caller gives."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, past_key_values: KVCache, num_valid: Tensor) -> Tensor:
        """[batch, seq, vocab]."""
        logits: Tensor = self.lm(input_ids, position_ids, past_key_values, num_valid=num_valid, all_logits=True)
        return logits


class CompiledLM(GenerationMixin, Shown):
    """A compiled LlamaForCausalLM: call it as the model, or let it generate."""

    def __init__(
        self, model: Module, *, target: str | None = None, dtype: Any = None, options: Any = None, tp: Any = None
    ) -> None:
        from monoplan.models.llama import LlamaForCausalLM

        if not isinstance(model, LlamaForCausalLM):
            raise ArgumentError(f"CompiledLM needs a LlamaForCausalLM, got {type(model).__name__}")
        self._given, self._wanted = model, None if dtype is None else as_weight_dtype(dtype, low_bits=True)
        self._held = HeldWeights(model)
        self.target = find_target(target, model)
        self.model = self._in_dtype()
        self.config, self.dtype = model.config, self.model.dtype
        self.name_or_path = model.name_or_path
        self.last_cache: KVCache | None = None
        self.tp = find_communicator(tp, self.model)
        made = Options.make(options)
        self.prefill_chunk = made.prefill_chunk
        self.resident, self._cache_kind = made.resident, known_kv_dtype(made.kv_dtype)
        if self._cache_kind == i8 and self.config.latent:
            what = "a cache of latent attention can't be kept in 8 bits: its rows are keys and values at once"
            raise ArgumentError(what, fix="leave kv_dtype out")
        self.spare: dict[str, Any] = {}  # on a GPU: the cache of the last text, for the next one
        if made.tp_plan is None and self.tp is not None:
            made = dataclasses.replace(made, tp_plan=self.model.tp_plan)
        self._arguments: dict[str, Any] = {"target": self.target, "options": made, "tp": self.tp}
        self._plans: dict[str, Any] = {}
        self._matrices: dict[str, Any] = {}  # of adapters, as plans take them
        self._draft: tuple[Module, CompiledLM] | None = None  # the last draft model, compiled
        self._weights: dict[str, Any] = {}  # in device memory, for all plans

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The model's tokenizer; None if it was made without one."""
        return self.model.tokenizer

    @property
    def compiled(self) -> Compiled:
        """The plan of GenerationStep; the first use compiles it."""
        return self._plan("generation")

    def prepare(self, **settings: Any) -> CompiledLM:
        """Compiles now what the first call would compile, or the first `generate` with these settings."""
        greedy = settings.get("temperature", 1.0) == 0 and settings.get("repetition_penalty", 1.0) == 1
        self._plan("greedy" if greedy and self._stays else "generation")
        return self

    def tune(self, seconds: float = 30.0, context: int = 1024) -> tuple[float, float]:
        """On a GPU: searches better constants for the kernels of a greedy token after `context` others.

        Takes about `seconds`. What is found is kept for this device and model, also for later processes. Gives the
        milliseconds of a token before and after.
        """
        if not self._stays:
            what = "tune needs target='cuda' and one rank: plans for other targets have no constants to search"
            raise ArgumentError(what)
        if not 0 < context < self.max_length:
            raise ArgumentError(f"context must be 1 to {self.max_length - 1} tokens, got {context}")
        cache = self.new_cache(1, context + 1)
        cache.lengths = Tensor(np.array([context], np.int32))
        arguments = {"input_ids": np.zeros((1, 1), np.int64), "num_valid": np.ones(1, np.int32)}
        plan = self._plan("greedy")
        built, _, arrays, symbols = plan._bind((), {"past_key_values": cache.without_limit(), **arguments})
        times: tuple[float, float] = built.executable.tune(arrays, symbols, seconds, progress("tuning"))
        self.spare.clear()  # its graph has the old kernels
        return times

    def new_cache(self, batch: int = 1, capacity: int = 0) -> KVCache:
        """An empty KV cache for `batch` rows; it grows as needed, without recompilation."""
        kind, heads = self.cache_dtype, self.cache_heads()
        return self.model.new_cache(batch, capacity, dtype=kind, kv_heads=heads, windows=self._windows)

    @property
    def _windows(self) -> bool:
        """Whether layers with a window keep only that: on one CPU. Pages and GPUs keep all tokens."""
        return self.target == "cpu" and (self.tp is None or self.tp.size == 1)

    @property
    def cache_dtype(self) -> DType:
        """Of keys and values: options.kv_dtype, f16 beside low-bit weights, which err much more, else as the model."""
        if self._cache_kind is not None:
            return self._cache_kind
        return f16 if any(p.type.dtype.is_low_bit for p in self.model.parameters()) else self.dtype

    def paged_plan(self) -> Compiled:
        """The plan of GenerationStep over a PagedKVCache with pages of PAGE tokens."""
        return self._plan("paged")

    def embedding_plan(self) -> Compiled:
        """The plan of EmbeddingStep over the same pages."""
        return self._plan("embedding")

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """LlamaForCausalLM.load_adapter of the model that was compiled."""
        self._given.load_adapter(name, Path(path))
        self._matrices.pop(name, None)

    @property
    def adapters(self) -> dict[str, Any]:  # type: ignore[override]
        """Adapters by name."""
        return self._given.adapters

    def _adapter(self, name: str) -> str:
        if self.target == "cuda" or (self.tp is not None and self.tp.size > 1):
            what = "adapters are kept beside the weights on one CPU, not on a GPU or by several ranks"
            raise ArgumentError(what, fix="merge it into the weights: AutoModel.from_pretrained(…, adapter=…)")
        return super()._adapter(name)

    def _steps(self, rows: list[Row], session: Session | None, **how: Any) -> Any:
        if not self._stays:
            return super()._steps(rows, session, **how)
        from monoplan.models.generate.device_generation import DeviceSteps

        s = rows[0].settings
        plain = s.temperature == 0 and s.repetition_penalty == 1 and rows[0].result.logprobs is None
        return DeviceSteps(self, self._plan("greedy" if plain else "generation").built[0][2].executable, rows, session)

    def _drafts(self, lookup: bool, draft: Any) -> dict[str, Any]:
        if self.target == "cuda" or (self.tp is not None and self.tp.size > 1):
            what = "drafts are checked on one CPU, not on a GPU or by several ranks"
            raise ArgumentError(what, fix="leave lookup and draft out, or use target='cpu'")
        if hasattr(draft, "generation_step"):
            if self._draft is None or self._draft[0] is not draft:
                self._draft = draft, CompiledLM(draft, target=self.target, options=self._arguments["options"])
            draft = self._draft[1]
        self._plan("check")
        if self.target == "cpu":
            from monoplan.codegen.cpu.schedule_attention import few_queries
            from monoplan.runtime.cpu.executable import host_target

            self.most_checked = few_queries(host_target())
        return super()._drafts(lookup, draft)

    @property
    def _stays(self) -> bool:
        """Generation on a GPU stays there, unless ranks must meet between the steps."""
        return self.target == "cuda" and self.resident and (self.tp is None or self.tp.size == 1)

    def cache_heads(self, plan: str = "generation") -> int | None:
        """The key/value heads of this rank; None: all."""
        if self.tp is None or self.tp.size == 1:
            return None
        _, _, built = self._plan(plan).built[0]
        heads = next(v.type.shape[1] for v in built.graph.inputs if v.name.endswith("past_key_values.k.0"))
        return int(heads)

    def __call__(
        self,
        input_ids: Any,
        position_ids: Any = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        *,
        num_valid: Any = None,
        all_logits: bool = False,
    ) -> Array:
        """Logits as LlamaForCausalLM.forward gives them, as numpy; a given cache is written and grows.

        Positions that simply go on from the cache run the plan of generation; other positions and all_logits
        run a second plan, compiled when first needed.
        """
        ids = _whole_numbers("input_ids", input_ids, np.int64)
        if ids.ndim != 2 or not ids.size:
            what = f"input_ids must be [batch, seq] with at least one token, got {list(ids.shape)}"
            raise ArgumentError(what)
        batch, seq = ids.shape
        cache = self.new_cache(batch, seq) if past_key_values is None else past_key_values
        if cache.batch != batch:
            raise ArgumentError(f"input_ids have {batch} rows, the cache {cache.batch}")
        if use_cache and past_key_values is None:
            self.last_cache = cache
        valid = whole_rows(batch, seq) if num_valid is None else _whole_numbers("num_valid", num_valid, np.int32)
        if position_ids is None and not all_logits:
            return self.step(ids, cache, valid)["logits"]
        _check_valid(valid, batch, seq)
        counted = np.minimum(np.arange(seq), valid[:, None] - 1)  # padding repeats the last token's place in its row
        expected = np.asarray(cache.lengths).astype(np.int64)[:, None] + counted
        positions = expected if position_ids is None else _whole_numbers("position_ids", position_ids, np.int64)
        if positions.shape not in ((seq,), (1, seq), (batch, seq)):
            what = f"position_ids must be [batch, seq] or [seq], got {list(positions.shape)}"
            raise ArgumentError(what, why=f"input_ids are {list(ids.shape)}")
        positions = np.take_along_axis(np.broadcast_to(positions, ids.shape), counted, axis=1)
        if not all_logits and np.array_equal(positions, expected):
            return self.step(ids, cache, valid)["logits"]
        logits: Array = self._run(
            "positioned", input_ids=ids, position_ids=positions, past_key_values=cache, num_valid=valid
        )
        return logits if all_logits else logits[np.arange(batch), valid - 1][:, None]

    def step(self, input_ids: Array, past_key_values: KVCache, num_valid: Array | None = None) -> dict[str, Array]:
        """The best next token [batch], its log probability, and logits [batch, 1, vocab].

        One run of the plan; several where the prompt is longer than options.prefill_chunk.
        """
        batch, seq = input_ids.shape
        valid = whole_rows(batch, seq) if num_valid is None else num_valid
        _check_valid(valid, batch, seq)
        choice = greedy_arrays(batch)
        make_room(past_key_values, valid)
        out: dict[str, Array] = {}
        for ids, count in pieces(input_ids, valid, past_key_values, self.prefill_chunk, self.config):
            out = self._call_plan("generation", past_key_values, input_ids=ids, num_valid=count, **choice)
        return out

    def step_arguments(self, input_ids: Any = None) -> dict[str, Any]:
        """All arguments of a greedy step from an empty cache: what verify, bisect and profile run on."""
        few = np.arange(min(8, self.config.vocab_size, self.max_length), dtype=np.int64)[None]
        ids = self.prompt_array(few if input_ids is None else input_ids)
        cache = self.new_cache(len(ids), ids.shape[1])
        return {
            "input_ids": ids,
            "past_key_values": cache.without_limit(),
            "num_valid": np.full(len(ids), ids.shape[1], np.int32),
            **sampling_arrays(Settings(), [0.0] * len(ids)),
        }

    def prompt_array(self, ids: Any, more: int = 0) -> Array:
        """Token ids as int64 [batch, seq], which must have room in the context, with `more` tokens behind them."""
        found = np.atleast_2d(_whole_numbers("the prompt", ids, np.int64))
        if found.ndim != 2 or not found.size:
            raise ArgumentError(f"the prompt must be [batch, seq] with at least one token, got {list(found.shape)}")
        if found.shape[1] + more > self.max_length:
            behind = f" and {more} more behind it" if more else ""
            what = f"the prompt has {found.shape[1]} tokens{behind}, the context of the model {self.max_length}"
            raise ArgumentError(what, fix="shorten the prompt")
        return found

    def verify(self, input_ids: Any = None, **options: Any) -> Any:
        """Compiled.verify for a step on these tokens [batch, seq] (default: a few)."""
        return self.compiled.verify(**self.step_arguments(input_ids), **options)

    def bisect(self, input_ids: Any = None, **options: Any) -> Any:
        """Compiled.bisect for a step on these tokens [batch, seq] (default: a few)."""
        return self.compiled.bisect(**self.step_arguments(input_ids), **options)

    def profile(self, input_ids: Any = None, **options: Any) -> Any:
        """Compiled.profile for a step on these tokens [batch, seq] (default: a few)."""
        return self.compiled.profile(**self.step_arguments(input_ids), **options)

    def report(self, path: Any, input_ids: Any = None, **options: Any) -> Any:
        """Compiled.report for a step on these tokens [batch, seq] (default: a few)."""
        return self.compiled.report(path, **self.step_arguments(input_ids), **options)

    def _run_step(self, **arguments: Any) -> dict[str, Array]:
        out: dict[str, Array] = self._run("generation", **arguments)
        return out

    def _run_check(self, **arguments: Any) -> dict[str, Array]:
        out: dict[str, Array] = self._run("check", **arguments)
        return out

    def _run(self, plan: str, *, past_key_values: KVCache, num_valid: Array, **arguments: Any) -> Any:
        """Runs a plan on the tensors of a cache, which grows first where it must.

        With an adapter it is one that takes matrices for the same layers: adapters share it, whatever their ranks.
        """
        if (adapter := arguments.pop("adapter", None)) is not None:
            if adapter not in self._matrices:
                self._matrices[adapter] = self.adapters[adapter].arrays(self.dtype)
            arguments["adapter"] = self._matrices[adapter]
            plan = f"{plan} {' '.join(sorted(arguments['adapter']))}"
        batch, seq = arguments["input_ids"].shape
        _check_valid(num_valid, batch, seq)
        make_room(past_key_values, num_valid)
        return self._call_plan(plan, past_key_values, num_valid=num_valid, **arguments)

    def _call_plan(self, plan: str, cache: KVCache, **arguments: Any) -> Any:
        # The cache's limit is the host's business, and not in the plan's signature.
        cache.slide(arguments["num_valid"])
        made, bounded = cache.without_limit(), bounded_layers(self.config) if self._windows else ()
        if bounded and not isinstance(made, WindowKVCache):
            made = WindowKVCache.of(made, self.config.sliding_window or 0, bounded)
        return self._plan(plan)(past_key_values=made, **arguments)

    def _in_dtype(self) -> LlamaForCausalLM:
        """The model that was given, or one of its own in another dtype: RoPE's tables stay float32 all the same.
        Low-bit weights are expanded where a dtype is given; with them a GPU computes in bfloat16."""
        low_bit = any(p.type.dtype.is_low_bit for p in self._given.parameters())
        rest = "bfloat16" if self.target == "cuda" else "float32"
        if self._wanted is None:
            same = not (low_bit and self.target == "cuda") or self._given.dtype == bf16
        else:
            same = self._wanted == self._given.dtype and not low_bit
        return self._given if same else self._given.with_dtype(self._wanted, rest)

    def _plan(self, name: str) -> Compiled:
        if self._held.are_replaced():
            self._held, self.model = HeldWeights(self._given), self._in_dtype()
            self.dtype = self.model.dtype
            for old in (self._plans, self._matrices, self._weights, self.spare):
                old.clear()
        if name not in self._plans:
            from monoplan.api import Compiled

            kind, *adapted = name.split()
            if kind in ("generation", "exported"):
                step: Module = self.model.generation_step()
                specs = step_specs(self.config, self.cache_dtype, windows=self._windows and kind == "generation")
            elif kind == "paged":
                step, specs = self.model.generation_step(), paged_specs(self.config, self.cache_dtype, PAGE)
            elif kind == "embedding":
                step, specs = EmbeddingStep(self.model), embedding_specs(self.config, self.cache_dtype, PAGE)
            elif kind == "greedy":
                step, specs = GreedyStep(self.model), greedy_specs(self.config, self.cache_dtype)
            elif kind == "check":
                step, specs = CheckStep(self.model), check_specs(self.config, self.cache_dtype, self._windows)
            else:
                step = PositionedStep(self.model)
                ids = spec("batch", "seq", dtype="int64")
                specs = {
                    "input_ids": ids,
                    "position_ids": ids,
                    "num_valid": spec("batch", dtype="int32"),
                    "past_key_values": cache_spec(self.config, self.cache_dtype, windows=self._windows),
                }
            if adapted:
                matrices = next(m for m in self._matrices.values() if sorted(m) == adapted)
                specs["adapter"] = adapter_specs(matrices, self.dtype)
            from monoplan.runtime.cpu.weights import sharing

            with sharing(self._weights):
                self._plans[name] = Compiled(step, **self._arguments, **specs)
        return self._plans[name]

    def _latest(self) -> Built:
        """What is shown is the plan of generation."""
        return self.compiled._latest()

    def export(
        self, folder: str | os.PathLike[str], *, isa: str | None = None, name: str = "model", chat: bool = True
    ) -> Path:
        """Compiled.export of the plan of generation; with `chat` also a program that talks, if there is a tokenizer."""
        from monoplan.export import chat_files, export

        # A program of its own keeps all tokens in all layers.
        plan = self._plan("exported") if self._windows and bounded_layers(self.config) else self.compiled
        return export(plan._latest(), Path(folder), isa, name, chat_files(self) if chat else None)

    @property
    def stats(self) -> Stats:
        """Counts of compilations and calls, and milliseconds of each stage."""
        return self.compiled.stats

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has learned."""
        return sum(math.prod(p.full_shape) for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """The size of the weights as the model has them."""
        return sum(p.type.dtype.stored_bytes(math.prod(p.full_shape)) for p in self.model.parameters())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that a token reads: all but the embedding, unless it is the head as well."""
        from monoplan.codegen.formats import choose_format
        from monoplan.runtime.cpu.executable import host_target

        read, target = 0, host_target() if self.target == "cpu" else None
        for name, p in self.model.named_parameters():
            if name.endswith("embed_tokens.weight") and not self.config.tie_word_embeddings:
                continue
            count, dtype = math.prod(p.full_shape), p.type.dtype
            shape = p.full_shape if len(p.full_shape) == 2 else None
            kept = choose_format(TensorType(dtype, shape), target) if target is not None and shape else None
            read += dtype.stored_bytes(count) if kept is None else int(kept.bytes(count))
        return read


class LoadedLM(CompiledLM):
    """A language model whose plans come from a file: it has no modules, and plans for nothing else."""

    def __init__(self, data: Any, plans: dict[str, Compiled], tokenizer: Callable[[], bytes], believed: bool) -> None:
        self.config, self.dtype = config_of(data["class"], data["config"]), as_weight_dtype(data["dtype"])
        self._kind, self._numbers = known_kv_dtype(str(data["cache_dtype"])), dict(data["numbers"])
        self.prefill_chunk = Options(prefill_chunk=data["prefill_chunk"]).prefill_chunk
        self.name_or_path, self.target, self.tp, self.resident = str(data["name"]), "cpu", None, True
        self.last_cache, self.spare, self._plans = None, {}, plans
        self._draft, self._matrices, self._arguments = None, {}, {"options": Options()}
        self._settings_of_tokenizer, self._text, self._believed = data["tokenizer"], tokenizer, believed
        tree, specs, _ = self._plan("generation").built[0]
        given, wanted = unflatten(tree, specs), step_specs(self.config, self.cache_dtype, windows=self._windows)
        if not isinstance(given, dict) or dict(flatten(given)[0]) != dict(flatten(wanted)[0]):
            raise LoadError("the configuration in the saved plan is not that of its graph")

    @functools.cached_property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The tokenizer that was saved; None if there was none."""
        given = self._settings_of_tokenizer
        return None if given is None else Tokenizer.from_text(self._text(), given, is_checked=self._believed)

    @property
    def cache_dtype(self) -> DType:
        assert self._kind is not None
        return self._kind

    @property
    def adapters(self) -> dict[str, Any]:  # type: ignore[override]
        """None: they are not part of a file."""
        return {}

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        raise ArgumentError("a saved model takes no adapters", fix="merge it before: from_pretrained(…, adapter=…)")

    def new_cache(self, batch: int = 1, capacity: int = 0) -> KVCache:
        return empty_cache(self.config, self.cache_dtype, batch, capacity, windows=self._windows)

    def _plan(self, name: str) -> Compiled:
        if name not in self._plans:
            what = f"the file has no plan for this ({name})"
            raise ArgumentError(what, fix="make the call once before saving: all plans made by then are saved")
        return self._plans[name]

    num_parameters = property(lambda self: int(self._numbers["num_parameters"]))  # type: ignore[assignment]
    weight_bytes = property(lambda self: int(self._numbers["weight_bytes"]))  # type: ignore[assignment]
    bytes_per_token = property(lambda self: int(self._numbers["bytes_per_token"]))  # type: ignore[assignment]


def _whole_numbers(name: str, value: Any, dtype: Any) -> Array:
    """An argument as an array of integers: others are no token ids, and rounding them would hide a mistake."""
    try:
        array = plain_array(value)
    except ArgumentError:
        raise
    except ValueError as error:  # lists of unequal lengths
        raise ArgumentError(f"{name} must be an array of integers", why=str(error)) from None
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"{name} must be an array of integers, got {array.dtype} {list(array.shape)}")
    return array.astype(dtype, copy=False)


def _check_valid(num_valid: Array, batch: int, seq: int) -> None:
    counts = num_valid.tolist()
    if num_valid.shape != (batch,) or min(counts) < 1 or max(counts) > seq:
        raise ArgumentError(f"num_valid must be [batch] numbers from 1 to {seq}, got {counts}")
