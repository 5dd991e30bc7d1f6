"""A LLaMA in plain torch, written for speed: the static-cache script of the benchmark, and what OpenVINO converts.

The layers are the same for both; they differ in what keeps the keys and values (`Static`, `Growing`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-5


class Static:
    """Keys and values in buffers of a fixed size, written in place at `position` [seq]."""

    def __init__(
        self, shape: dict[str, Any], capacity: int, dtype: torch.dtype, batch: int = 1, device: str = "cpu"
    ) -> None:
        sizes = (batch, shape["num_key_value_heads"], capacity, shape["head_dim"])
        layers = range(shape["num_hidden_layers"])
        self.keys = [torch.zeros(sizes, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(sizes, dtype=dtype, device=device) for _ in layers]
        self.slots = torch.arange(capacity, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        """A prompt from an empty cache looks at itself only; one token looks at the cache, a group of heads at once."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        if q.shape[2] > 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        grouped = q.view(keys.shape[0], keys.shape[1], -1, q.shape[3])
        seen = (self.slots <= position).view(1, 1, 1, -1)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen).view(q.shape)


class Growing:
    """Keys and values that come in as tensors and go out longer: the form that OpenVINO turns into its own state."""

    def __init__(self, past: tuple[Tensor, ...], mask: Tensor, group: int) -> None:
        self.past, self.mask, self.group = past, mask, group
        self.present: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        keys = torch.cat([self.past[2 * layer], k], dim=2)
        values = torch.cat([self.past[2 * layer + 1], v], dim=2)
        self.present += [keys, values]
        each = [_repeat(x, self.group) for x in (keys, values)]
        return F.scaled_dot_product_attention(q, *each, attn_mask=self.mask)


def _repeat(x: Tensor, group: int) -> Tensor:
    if group == 1:
        return x
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, group, length, size).reshape(batch, heads * group, length, size)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


class Layer(nn.Module):  # type: ignore[misc]
    """One decoder layer; `joined`: q, k and v are one matrix, gate and up another."""

    def __init__(self, shape: dict[str, Any], number: int, weights: dict[str, Tensor], joined: bool) -> None:
        super().__init__()
        self.number, self.head = number, shape["head_dim"]
        self.heads, self.kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]

        def take(name: str) -> Tensor:
            return weights.pop(f"model.layers.{number}.{name}.weight")

        def side_by_side(*names: str) -> nn.ParameterList:
            parts = [take(name) for name in names]
            return nn.ParameterList(fixed(p) for p in ([torch.cat(parts)] if joined else parts))

        self.qkv = side_by_side("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.gate_up = side_by_side("mlp.gate_proj", "mlp.up_proj")
        self.out, self.down = fixed(take("self_attn.o_proj")), fixed(take("mlp.down_proj"))
        self.norm, self.post_norm = fixed(take("input_layernorm")), fixed(take("post_attention_layernorm"))
        self.sizes = [n * self.head for n in (self.heads, self.kv_heads, self.kv_heads)]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, position: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = _products(_norm(x, self.norm), self.qkv, self.sizes)
        q = _rotate(q.reshape(batch, seq, self.heads, self.head).transpose(1, 2), cos, sin)
        k = _rotate(k.reshape(batch, seq, self.kv_heads, self.head).transpose(1, 2), cos, sin)
        v = v.reshape(batch, seq, self.kv_heads, self.head).transpose(1, 2)
        seen = cache.attend(self.number, q, k, v, position)
        x = x + F.linear(seen.transpose(1, 2).reshape(batch, seq, self.heads * self.head), self.out)
        gate, up = _products(_norm(x, self.post_norm), self.gate_up, [self.down.shape[1]] * 2)
        return x + F.linear(F.silu(gate) * up, self.down)


def fixed(weight: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(weight, requires_grad=False)


def _products(x: Tensor, weights: Any, sizes: list[int]) -> Any:
    """x by each of the matrices, or by the one that they were joined to."""
    return F.linear(x, weights[0]).split(sizes, dim=-1) if len(weights) == 1 else [F.linear(x, w) for w in weights]


class Llama(nn.Module):  # type: ignore[misc]
    """ids [batch, seq] and positions [seq] to the logits [batch, 1, vocab] of the last token."""

    frequencies: Tensor

    def __init__(self, shape: dict[str, Any], weights: dict[str, Tensor], joined: bool) -> None:
        super().__init__()
        self.embedding, self.norm = (fixed(weights.pop(f"model.{n}.weight")) for n in ("embed_tokens", "norm"))
        self.layers = nn.ModuleList(Layer(shape, n, weights, joined) for n in range(shape["num_hidden_layers"]))
        steps = torch.arange(0, shape["head_dim"], 2, dtype=torch.float32) / shape["head_dim"]
        self.register_buffer("frequencies", 1.0 / (shape["rope_theta"] ** steps), persistent=False)

    def forward(self, ids: Tensor, position: Tensor, cache: Any) -> Tensor:
        x = F.embedding(ids, self.embedding)
        angles = position[:, None].to(torch.float32) * self.frequencies[None]
        angles = torch.cat((angles, angles), dim=-1)[None, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, cache, position)
        return F.linear(_norm(x[:, -1:], self.norm), self.embedding)


def load(folder: Path, shape: dict[str, Any], dtype: torch.dtype, *, joined: bool = True) -> Llama:
    """The model with the weights of a checkpoint; `joined`: products with the same input are one."""
    from safetensors.torch import load_file

    weights = {name: value.to(dtype) for name, value in load_file(folder / "model.safetensors").items()}
    return Llama(shape, weights, joined).eval()
