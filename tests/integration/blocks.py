"""Blocks of well-known models, small, as users write them."""

from __future__ import annotations

import math
from typing import Any

from monoplan import nn
from monoplan.frontend.kv_cache import KVCache
from monoplan.frontend.specs import spec
from monoplan.frontend.tensor import Tensor
from monoplan.models import LlamaConfig
from monoplan.models.llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from monoplan.nn import functional as F

HIDDEN, HEADS, DIM, INNER, VOCAB, CONTEXT = 32, 4, 8, 48, 40, 24


def cache_spec(kv_heads: int, dtype: str) -> KVCache:
    """A cache of one layer for any batch and capacity."""
    tensors = [[spec("batch", kv_heads, "capacity", DIM, dtype=dtype)] for _ in "kv"]
    lengths = spec("batch", dtype="int32")
    return KVCache.tree_unflatten({"k": tensors[0], "v": tensors[1], "lengths": lengths}, (None,))


class LlamaBlock(nn.Module):
    """A decoder layer with RoPE, grouped heads and a KV cache."""

    kv_heads = 2
    options: dict[str, Any] = {"attention_bias": False}

    def __init__(self, dtype: str) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=1,
            head_dim=DIM,
            num_attention_heads=HEADS,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=CONTEXT,
            dtype=dtype,
            **self.options,
        )
        self.layer = LlamaDecoderLayer(config, 0)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def specs(self, dtype: str) -> tuple[Any, ...]:
        return spec("batch", "seq", HIDDEN, dtype=dtype), cache_spec(self.kv_heads, dtype), spec("batch", dtype="int32")

    def forward(self, x: Tensor, cache: KVCache, num_valid: Tensor) -> Tensor:
        y: Tensor = self.layer(x, self.rotary_emb(cache.positions(x.shape[1])), cache, num_valid)
        cache.advance(num_valid)
        return y


class QwenBlock(LlamaBlock):
    """Biases in the projections of q, k and v, and norms of q and k."""

    kv_heads = 1
    options = {"attention_bias": True, "attention_out_bias": False, "qk_norm": True}


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is [in, out], tokens are flattened."""

    def __init__(self, out: int, features: int, dtype: str) -> None:
        super().__init__()
        made = nn.Linear(features, out, dtype=dtype)
        self.weight = nn.Parameter(made.weight.numpy().T.copy())
        self.bias = made.bias

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[:-1]
        return (x.reshape(-1, x.shape[-1]) @ self.weight + self.bias).reshape(*lead, self.bias.shape[0])


class Gpt2Block(nn.Module):
    """Token and learned position embeddings, then a block with LayerNorm, written-out attention and GELU."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.wpe = nn.Embedding(CONTEXT, HIDDEN, dtype=dtype)
        self.ln_1, self.ln_2, self.ln_f = (nn.LayerNorm(HIDDEN, dtype=dtype) for _ in range(3))
        self.c_attn, self.c_proj = Conv1D(3 * HIDDEN, HIDDEN, dtype), Conv1D(HIDDEN, HIDDEN, dtype)
        self.c_fc, self.mlp_proj = Conv1D(4 * HIDDEN, HIDDEN, dtype), Conv1D(HIDDEN, 4 * HIDDEN, dtype)

    def specs(self, dtype: str) -> tuple[Any, ...]:
        return (spec("batch", "seq", dtype="int64"),)

    def attention(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = (
            t.reshape(batch, seq, HEADS, DIM).transpose(1, 2) for t in self.c_attn(x).split(HIDDEN, dim=-1)
        )  # [batch, heads, seq, dim]
        scores = q @ k.transpose(-2, -1) / math.sqrt(DIM)
        visible = F.arange(seq).unsqueeze(1) >= F.arange(seq).unsqueeze(0)
        weights = F.softmax(F.masked_fill(scores, F.logical_not(visible), float("-inf")), dim=-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(batch, seq, HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(F.arange(ids.shape[1]))
        x = x + self.attention(self.ln_1(x))
        x = x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return self.ln_f(x)


class GptJBlock(nn.Module):
    """Attention and MLP side by side behind one norm; interleaved RoPE on a part of each head."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=dtype) for _ in range(4)
        )
        self.fc_in, self.fc_out = nn.Linear(HIDDEN, 4 * HIDDEN, dtype=dtype), nn.Linear(4 * HIDDEN, HIDDEN, dtype=dtype)
        self.rope = nn.RoPE(DIM, CONTEXT, algo=nn.RoPE.Algo.GPT_J, rotary_dim=4)

    def specs(self, dtype: str) -> tuple[Any, ...]:
        return spec("batch", "seq", HIDDEN, dtype=dtype), cache_spec(HEADS, dtype), spec("batch", dtype="int32")

    def forward(self, x: Tensor, cache: KVCache, num_valid: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        h = self.ln_1(x)
        positions = cache.positions(seq)
        q, k, v = (p(h).reshape(batch, seq, HEADS, DIM) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rope(q, positions), self.rope(k, positions)
        past = cache.lengths
        k, v = cache.update(0, k, v, num_valid)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, past=past)
        attention = self.out_proj(y.transpose(1, 2).reshape(batch, seq, HIDDEN))
        cache.advance(num_valid)
        return x + attention + self.fc_out(F.gelu_tanh(self.fc_in(h)))


class MlpBlock(nn.Module):
    """The basic layers' MLPBlock: norm, linear, GELU, linear, residual."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(HIDDEN, eps=1e-5, dtype=dtype)
        self.linear1 = nn.Linear(HIDDEN, INNER, bias=False, dtype=dtype)
        self.linear2 = nn.Linear(INNER, HIDDEN, bias=False, dtype=dtype)
        self.dropout = nn.Dropout(0.1)
        self.eval()

    def specs(self, dtype: str) -> tuple[Any, ...]:
        return (spec("batch", "seq", HIDDEN, dtype=dtype),)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear2(F.gelu(self.linear1(self.layer_norm(x)), approximate="tanh")))


class GptBlock(nn.Module):
    """The nn modules' GPTBlock: embedding, norm, RoPE in place, MLP, norm."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.ln1, self.ln2 = nn.RMSNorm(HIDDEN, 1e-5, dtype=dtype), nn.RMSNorm(HIDDEN, 1e-5, dtype=dtype)
        self.rope = nn.RoPE(DIM, CONTEXT, 10000.0, nn.RoPE.Algo.GPT_NEOX, "f32")
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 4 * HIDDEN, dtype=dtype), nn.Linear(4 * HIDDEN, HIDDEN, dtype=dtype)

    def specs(self, dtype: str) -> tuple[Any, ...]:
        return spec("batch", "seq", dtype="int64"), spec("seq", dtype="int64")

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        batch, seq = input_ids.shape
        normalized = self.ln1(self.wte(input_ids)).reshape(batch, seq, HEADS, DIM)
        rotated = self.rope(normalized, positions, True)
        return self.ln2(self.fc2(F.gelu(self.fc1(rotated.reshape(batch, seq, HIDDEN)))))


BLOCKS: dict[str, Any] = {
    "llama": LlamaBlock, "qwen": QwenBlock, "gpt2": Gpt2Block, "gptj": GptJBlock, "mlp": MlpBlock, "gpt": GptBlock,
}  # fmt: skip
