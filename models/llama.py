"""LLaMA and its family (Mistral, Qwen2, Qwen3, SmolLM) as plain modules, with Hugging Face's parameter names.

Nothing here knows about the compiler: the same `forward` runs eagerly on numpy, and traced it is the graph.
Shapes are written as [batch, seq, ...]; a KV cache holds [batch, kv heads, capacity, head dim].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from monoplan.frontend import functional as F
from monoplan.frontend.context import current
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.layers import Embedding, LayerNorm, Linear, RMSNorm
from monoplan.frontend.module import Module, ModuleList
from monoplan.frontend.parameter import Parameter, no_init, normal
from monoplan.frontend.tensor import Tensor, as_tensor
from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import LOW_BITS, DType, Part, as_dtype, as_weight_dtype
from monoplan.models.config import LlamaConfig
from monoplan.models.generate.generation import CheckStep, GenerationMixin, GenerationStep, empty_cache, make_room
from monoplan.models.rope_scaling import context_length
from monoplan.models.rotary import TABLE_POSITIONS, LlamaRotaryEmbedding, RopeRows

__all__ = ["LlamaForCausalLM", "LlamaModel", "LlamaRMSNorm", "LlamaRotaryEmbedding"]
LlamaRMSNorm = RMSNorm


def repeat_kv(keys: Tensor, values: Tensor, ngroup: int) -> tuple[Tensor, Tensor]:
    """Each key/value head `ngroup` times: [..., keys, heads, dim] -> [..., keys, heads * ngroup, dim]."""
    return F.repeat_interleave(keys, ngroup, -2), F.repeat_interleave(values, ngroup, -2)


def multi_head_attention(querys: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Causal attention written out, on [..., seq, heads, dim]; the last query stands at the last key."""
    q, k, v = (x.transpose(-3, -2) for x in (querys, keys, values))  # [..., heads, seq, dim]
    weights = F.causal_softmax(q @ k.transpose(-2, -1) * scaling)
    return (weights @ v).transpose(-3, -2)


def grouped_query_attention(querys: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention whose query heads share fewer key/value heads: GQA, and MHA and MQA as its two ends."""
    ngroup = int(querys.shape[-2]) // int(keys.shape[-2])
    if ngroup > 1:
        keys, values = repeat_kv(keys, values, ngroup)
    return multi_head_attention(querys, keys, values, scaling)


class OffsetRMSNorm(RMSNorm):
    """x / sqrt(mean(x**2) + eps) * (1 + weight)."""

    def forward(self, x: Any) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.float() + 1.0, self.eps)


def make_norm(size: int, config: LlamaConfig) -> Module:
    """The norm of a family: see LlamaConfig.norm."""
    if config.norm.startswith("layer"):
        return LayerNorm(size, config.rms_norm_eps, bias=config.norm == "layer", dtype=config.dtype)
    kind = OffsetRMSNorm if config.norm == "rms_offset" else LlamaRMSNorm
    return kind(size, eps=config.rms_norm_eps, dtype=config.dtype)


class LlamaMLP(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), or without a gate down_proj(silu(up_proj(x)))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gated, self.joined = config.gated, config.gated and config.joined
        if self.joined:
            self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=config.dtype)
        else:
            if self.gated:
                self.gate_proj = Linear(hidden, inner, bias=bias, dtype=config.dtype)
            self.up_proj = Linear(hidden, inner, bias=bias, dtype=config.dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=config.dtype)
        self.act_fn = getattr(F, config.activation)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down_proj(self.act_fn(self.up_proj(x)))  # type: ignore[no-any-return]
        gate, up = self.gate_up_proj(x).chunk(2, -1) if self.joined else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.act_fn(gate) * up)


class Sinks(Module):
    """A score for each head that takes its share of attention, and gives nothing."""

    def __init__(self, heads: int, dtype: str) -> None:
        super().__init__()
        self.weight = Parameter(normal((heads,), as_dtype(dtype)))


class LlamaAttention(Module):
    """Multi-head, grouped-query or multi-query attention with RoPE, and a KV cache if there is one."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling, self.softcap = config.layer_scale(layer_idx), config.attention_softcap
        self.window, self.rope_algo = config.layer_window(layer_idx), config.rope_algo
        hidden, bias, out_bias = config.hidden_size, config.attention_bias, config.attention_out_bias
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.joined = config.joined
        if config.joined:
            self.sizes = (queries, keys, keys)
            self.qkv_proj = Linear(hidden, queries + 2 * keys, bias=bias, dtype=config.dtype)
        else:
            self.q_proj = Linear(hidden, queries, bias=bias, dtype=config.dtype)
            self.k_proj = Linear(hidden, keys, bias=bias, dtype=config.dtype)
            self.v_proj = Linear(hidden, keys, bias=bias, dtype=config.dtype)
        self.o_proj = Linear(queries, hidden, bias=out_bias, dtype=config.dtype)
        self.sinks = Sinks(self.num_heads, config.dtype) if config.sinks else None
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = make_norm(self.head_dim, config)
            self.k_norm = make_norm(self.head_dim, config)

    def forward(
        self,
        hidden_states: Tensor,
        rope: RopeRows | None,
        past_key_values: KVCache | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        batch, seq, _ = hidden_states.shape
        q, k, v = self.project(hidden_states)
        q = q.view(batch, seq, self.num_heads, self.head_dim)
        k, v = (t.view(batch, seq, self.num_kv_heads, self.head_dim) for t in (k, v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            rows, sin, cos = rope
            q, k = (F.rope(t, rows, sin, cos, self.rope_algo) for t in (q, k))
        past = table = None
        if past_key_values is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            past, table = past_key_values.past(self.layer_idx), past_key_values.table
            k, v = past_key_values.update(self.layer_idx, k, v, num_valid)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k,
            v,
            is_causal=True,
            scale=self.scaling,
            softcap=self.softcap,
            window=self.window,
            past=past,
            table=table,
            sinks=None if self.sinks is None else self.sinks.weight,
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, self.num_heads * self.head_dim))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, seq, features] each; in one product where a checkpoint joins them."""
        if self.joined:
            return self.qkv_proj(x).split(self.sizes, -1)  # type: ignore[no-any-return]
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class LlamaDecoderLayer(Module):
    """Attention and MLP, each behind a norm and beside a residual connection; with config.parallel side by side."""

    attention_class: ClassVar[Callable[..., Module]] = LlamaAttention

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = make_norm(config.hidden_size, config)
        if config.parallel != 1:
            self.post_attention_layernorm = make_norm(config.hidden_size, config)
        self.residual_scale, self.parallel = config.residual_scale, config.parallel

    def forward(
        self,
        hidden_states: Tensor,
        rope: RopeRows,
        past_key_values: KVCache | None = None,
        num_valid: Tensor | None = None,
    ) -> Tensor:
        x = self.input_layernorm(hidden_states)
        y = self.self_attn(x, rope, past_key_values, num_valid)
        if self.parallel:
            x = x if self.parallel == 1 else self.post_attention_layernorm(hidden_states)
            return hidden_states + y + self.mlp(x)  # type: ignore[no-any-return]
        hidden_states = hidden_states + self._scaled(y)
        return hidden_states + self._scaled(self.mlp(self.post_attention_layernorm(hidden_states)))

    def _scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_scale == 1 else y * self.residual_scale


class LlamaModel(Module):
    """Embedding, decoder layers and the final norm: of the last token of each row, unless all are wanted."""

    def __init__(self, config: LlamaConfig, layer_class: Callable[..., Module] = LlamaDecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype)
        self.layers = ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = make_norm(config.hidden_size, config)
        self.config = config
        self.has_rope = [config.layer_has_rope(i) for i in range(config.num_hidden_layers)]
        if any(self.has_rope):
            self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.local_rope is not None:
            self.rotary_emb_local = LlamaRotaryEmbedding(dataclasses.replace(config, rope_scaling=config.local_rope))
        if not all(self.has_rope) and (positions := context_length(config)) <= TABLE_POSITIONS:
            # A layer without RoPE is rotated by nothing: its products and cache writes then are one kernel as well.
            self.register_buffer("no_sin", np.zeros((positions, 1), np.float32), persistent=False)
            self.register_buffer("no_cos", np.ones((positions, 1), np.float32), persistent=False)

    @property
    def dtype(self) -> DType:
        """The type it computes in."""
        table, norm = self.embed_tokens.weight.dtype.values, self.norm.weight.dtype
        return norm if norm.bits > table.bits else table

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """What the first layer reads."""
        scale, x = self.config.embedding_scale, self.embed_tokens(input_ids)
        return x if scale == 1 else x * scale  # type: ignore[no-any-return]

    def ropes(self, position_ids: Tensor) -> list[RopeRows | None]:
        """The rotation in each layer; None: there is none."""
        c, wide = self.config, self.rotary_emb(position_ids) if any(self.has_rope) else None
        local = wide if c.local_rope is None else self.rotary_emb_local(position_ids)
        none = (position_ids, self.no_sin, self.no_cos) if hasattr(self, "no_sin") else None
        ropes = [wide if c.layer_window(i) is None else local for i in range(c.num_hidden_layers)]
        return [rope if has_rope else none for rope, has_rope in zip(ropes, self.has_rope, strict=True)]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        *,
        num_valid: Tensor | None = None,
        all_tokens: bool = False,
    ) -> Tensor:
        batch, seq = input_ids.shape
        if position_ids is None:
            position_ids = _positions(batch, seq, past_key_values, num_valid)
        elif position_ids.ndim == 1:
            position_ids = position_ids.unsqueeze(0).expand(batch, seq)
        ropes = self.ropes(position_ids)
        hidden_states = self.embed(input_ids, position_ids)
        if hidden_states.dtype.bits < self.dtype.bits:  # a table that is kept in 16 bits beside low-bit weights
            hidden_states = hidden_states.to(self.dtype)
        for layer, rope in zip(self.layers, ropes, strict=True):
            hidden_states = layer(hidden_states, rope, past_key_values, num_valid)
        if past_key_values is not None:
            past_key_values.advance(seq if num_valid is None else num_valid)
        if not all_tokens and num_valid is not None:
            hidden_states = F.select_rows(hidden_states, num_valid - 1)
        elif not all_tokens:
            hidden_states = hidden_states.narrow(1, seq - 1, 1)
        return self.norm(hidden_states)


def _positions(batch: Any, seq: Any, past: KVCache | None, num_valid: Tensor | None) -> Tensor:
    """Positions [batch, seq] that go on from the cache; padding repeats the last one, to stay in range."""
    if past is None:
        positions = F.arange(seq).unsqueeze(0).expand(batch, seq)
        return positions if num_valid is None else F.minimum(positions, num_valid.unsqueeze(-1) - 1)
    positions = past.positions(seq)
    if num_valid is None:
        return positions
    return F.minimum(positions, past.lengths.unsqueeze(1) + num_valid.unsqueeze(1) - 1)


def can_be_low_bit(weight: Parameter) -> bool:
    """Whether a weight can be of a low-bit type: a matrix, or matrices of experts that are whole panels and tiles."""
    return weight.ndim == 2 or (weight.ndim == 3 and weight.full_shape[1] % 16 == 0)


def _reader(t: Tensor) -> Callable[..., Any]:
    """How another model reads this tensor's values, when it wants them."""

    def read(part: Part | None = None) -> Any:
        if isinstance(t, Parameter) and t.is_deferred:
            return t.read(part=part)
        return (t.numpy() if part is None else part.cut(t.numpy())).copy()

    return read


def _origin(t: Tensor) -> Callable[[], Any]:
    """Where that other model's values come from: rounding twice may give other numbers than once."""

    def find() -> Any:
        origin = t.origin if isinstance(t, Parameter) else None
        return None if origin is None else dataclasses.replace(origin, name=f"{origin.name} as {t.dtype}")

    return find


class LlamaForCausalLM(Module, GenerationMixin):
    """The model with its language head: logits [batch, 1, vocab] of the last token of each row.

    `model(input_ids, position_ids=None, past_key_values=None, use_cache=None)` gives logits and nothing else.
    A cache that is passed is written in place and its lengths grow; `use_cache=True` without one makes one,
    which is then `model.last_cache`. A family whose layers differ sets `layer_class`.
    """

    layer_class: ClassVar[Callable[..., Module]] = LlamaDecoderLayer
    model_class: ClassVar[type[LlamaModel]] = LlamaModel

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_class(config, self.layer_class)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias, dtype=config.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.device, self.name_or_path = "cpu", ""
        self.last_cache: KVCache | None = None
        self.adapters: dict[str, Any] = {}
        self._tokenizer: Any = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool | None = None,
        *,
        num_valid: Tensor | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Logits [batch, 1, vocab] of the last token, or [batch, seq, vocab] of all with all_logits.

        Positions go on from the cache's lengths, or from 0. In a batch that is padded on the right,
        `num_valid` (int32 [batch]) says how many tokens of each row count: the last of them gives the logits.
        """
        input_ids = as_tensor(input_ids)
        position_ids, num_valid = (None if x is None else as_tensor(x) for x in (position_ids, num_valid))
        if use_cache and past_key_values is None:
            past_key_values = self.last_cache = self._own_cache(input_ids)
        if past_key_values is not None and current() is None:
            counts = input_ids.shape[1] if num_valid is None else num_valid.numpy()
            make_room(past_key_values, counts)
            past_key_values.slide(counts)
        hidden_states = self.model(input_ids, position_ids, past_key_values, num_valid=num_valid, all_tokens=all_logits)
        logits: Tensor = self.lm_head(hidden_states)
        if logits.dtype.bits == 16:
            logits = logits.float()  # a plan then keeps the sums of the head as they are
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else F.tanh(logits / cap) * cap

    def _own_cache(self, input_ids: Tensor) -> KVCache:
        if current() is not None:
            raise ArgumentError(
                "use_cache=True needs a cache while the model is traced",
                fix="pass past_key_values=…",
                why="a cache that is made inside of the graph would be lost with it",
            )
        batch, seq = input_ids.shape
        return self.new_cache(int(batch), int(seq))

    @property
    def dtype(self) -> DType:
        """The element type that the model computes in: that of its weights, f32 where these are in a low-bit type."""
        return self.model.dtype

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """The tokenizer that came with the weights, made at the first use; None if there was none."""
        if callable(self._tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Gives the model a tokenizer, or a function that makes one."""
        self._tokenizer = tokenizer

    @property
    def tp_plan(self) -> dict[str, str]:
        """How mp.compile(model, tp=…) divides the layers: the configuration's plan, and the vocabulary."""
        return {**self.config.base_model_tp_plan, "embed_tokens": "vocab", "lm_head": "colwise_gather"}

    def new_cache(
        self,
        batch: int = 1,
        capacity: int = 0,
        *,
        dtype: Any = None,
        kv_heads: int | None = None,
        windows: bool = False,
    ) -> KVCache:
        """An empty KV cache for `batch` rows. It grows up to the model's context, from `capacity` on; with `windows`
        layers with a window keep no more than that sees."""
        return empty_cache(self.config, self.dtype if dtype is None else dtype, batch, capacity, kv_heads, windows)

    def _run_step(self, **arguments: Any) -> dict[str, Any]:
        return self._run_eagerly(self.generation_step(), **arguments)

    def _run_check(self, **arguments: Any) -> dict[str, Any]:
        return self._run_eagerly(CheckStep(self), **arguments)

    def _run_eagerly(self, step: Module, adapter: str | None = None, **arguments: Any) -> dict[str, Any]:
        if adapter is not None:
            matrices = self.adapters[adapter].arrays(self.dtype)
            arguments["adapter"] = {name: {k: Tensor(a) for k, a in m.items()} for name, m in matrices.items()}
        return {name: t.numpy() for name, t in step(**arguments).items()}

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Brings a LoRA adapter, a PEFT directory, for generate(…, adapter=name); the weights stay as they are."""
        from monoplan.models.load.adapter import open_adapter

        found, layers = open_adapter(path, self.config), dict(self.named_modules())
        found.check({name: p.full_shape for name, p in self.named_parameters()})
        for weight in found.products:
            if not isinstance(layers[weight.removesuffix(".weight")], Linear):
                what, fix = f"{weight} is no matrix of a linear layer", "merge it: from_pretrained(…, adapter=…)"
                raise LoadError("the adapter can't be kept beside the weights", where=path, why=what, fix=fix)
        self.adapters[name] = found

    def generation_step(self) -> GenerationStep:
        """The module that `compile` makes a plan of: one step of generation, sampling included."""
        return GenerationStep(self)

    @classmethod
    def from_config(cls, config: LlamaConfig, seed: int = 0) -> LlamaForCausalLM:
        """A model of random weights in config.dtype: the same ones for the same seed, on any machine."""
        with no_init():
            model = cls(config)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            shape = parameter.full_shape
            if name.endswith("bias"):
                values = np.zeros(shape, np.float32)
            elif len(shape) == 1:
                values = np.ones(shape, np.float32)
            else:
                random = np.random.Generator(np.random.Philox(key=[seed % 2**64, index]))
                values = random.standard_normal(shape, np.float32) * np.float32(config.initializer_range)
            parameter.load(values)
        return model

    def with_dtype(self, dtype: Any, rest: str = "float32") -> LlamaForCausalLM:
        """The same model with its weights in another element type; this one keeps its own.

        A low-bit type is that of the matrices, which are rounded when they are read; that of the head has 6 bits or
        more, and the rest has the type `rest`. None: matrices in low-bit types stay in them.
        """
        from monoplan.models.quantize import Rounded, head_kind, kind_for

        wanted = None if dtype is None else as_weight_dtype(dtype, low_bits=True)
        plain = rest if wanted is None or wanted.is_low_bit else wanted.numpy.name
        with no_init():
            made = type(self)(dataclasses.replace(self.config, dtype=plain))
        sources = self.state_dict()
        for name, parameter in made.named_parameters():
            source = sources[name]
            read, origin = _reader(source), _origin(source)
            if wanted is None and isinstance(source, Parameter) and source.type.dtype.is_low_bit:
                parameter.defer(read, partial(getattr, source, "origin"), source.type.dtype, source.read_blocks)
            elif wanted is not None and wanted.is_low_bit and can_be_low_bit(parameter):
                shape, is_head = parameter.full_shape, parameter is made.lm_head.weight
                kind = LOW_BITS[(head_kind if is_head else kind_for)(wanted.name, shape[-1])]
                rounded = Rounded(name, shape, read, kind)
                parameter.defer(rounded.values, partial(rounded.origin, origin), kind, rounded.blocks)
            else:
                parameter.defer(read, origin)
        made.device, made.name_or_path, made._tokenizer = self.device, self.name_or_path, self._tokenizer
        return made

    @classmethod
    def from_pretrained(cls, model_path: str | Path, device: str = "cpu", dtype: Any = None) -> LlamaForCausalLM:
        """A model from a Hugging Face directory or a GGUF file; see AutoLlamaModel."""
        from monoplan.models.auto import AutoLlamaModel

        return AutoLlamaModel.from_pretrained(model_path, device, dtype)

    def save_pretrained(self, directory: str | Path, **options: Any) -> None:
        """Writes what from_pretrained and transformers read back: config.json, safetensors, the tokenizer."""
        from monoplan.models.auto import save_model

        save_model(self, directory, **options)
