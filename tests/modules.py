"""Small modules that several tests compile: in goldens, under sanitizers, as C programs, and as files."""

from __future__ import annotations

from typing import Any

import numpy as np

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn


class Block(nn.Module):
    """README's."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: mp.Tensor) -> mp.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPT2(nn.Module):
    """Embeddings, two layers with one product for q, k and v, and the head."""

    def __init__(self, words: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(words, dim), nn.Embedding(32, dim)
        self.ln = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
        self.attn = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(2)])
        self.proj = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)])
        self.fc = nn.ModuleList([nn.Linear(dim, 4 * dim) for _ in range(2)])
        self.out = nn.ModuleList([nn.Linear(4 * dim, dim) for _ in range(2)])
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids: mp.Tensor, places: mp.Tensor) -> dict[str, mp.Tensor]:
        x = self.wte(ids) + self.wpe(places)
        batch, seq, dim = x.shape
        for i in range(2):
            parts = self.attn[i](self.ln[2 * i](x)).reshape(batch, seq, 3, self.heads, dim // self.heads)
            q, k, v = (parts[:, :, j].transpose(1, 2) for j in range(3))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + self.proj[i](mixed.reshape(batch, seq, dim))
            x = x + self.out[i](F.gelu(self.fc[i](self.ln[2 * i + 1](x)), approximate="tanh"))
        return {"logits": self.head(x), "last": x[:, seq - 2 :]}


class MLP(nn.Module):
    """Sizes that fit no vector, and a product of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(37, 53), nn.Linear(53, 11)

    def forward(self, x: mp.Tensor, scale: mp.Tensor) -> tuple[mp.Tensor, mp.Tensor]:
        y = self.second(F.relu(self.first(x))) * scale
        return y, F.softmax(y.reshape(-1), dim=-1)


class GPT2Block(nn.Module):
    """Layer norms, biases, one product for q, k and v, and gelu."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: mp.Tensor) -> mp.Tensor:
        batch, seq, dim = x.shape
        parts = self.c_attn(self.ln_1(x)).reshape(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = (parts[:, :, i].transpose(1, 2) for i in range(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.c_proj(mixed.reshape(batch, seq, dim))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class ViT(nn.Module):
    """A vision transformer: patches by a convolution, a class token, two layers, a head; sizes that fit no vector."""

    def __init__(self, dim: int = 40, heads: int = 5, classes: int = 11) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, dim, 7, stride=7)
        self.token, self.places = (nn.Parameter(_small(n, dim)) for n in (1, 16))
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(5)])
        self.mixed = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(2)])
        self.proj = nn.ModuleList([nn.Linear(dim, dim) for _ in range(2)])
        self.wide = nn.ModuleList([nn.Linear(dim, 3 * dim) for _ in range(2)])
        self.narrow = nn.ModuleList([nn.Linear(3 * dim, dim) for _ in range(2)])
        self.head = nn.Linear(dim, classes)

    def forward(self, image: mp.Tensor) -> mp.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        batch, _, dim = x.shape
        x = F.cat([self.token.unsqueeze(0).expand(batch, 1, dim), x], dim=1) + self.places
        for i in range(2):
            parts = self.mixed[i](self.norms[2 * i](x)).reshape(batch, 16, 3, self.heads, dim // self.heads)
            q, k, v = (parts[:, :, j].transpose(1, 2) for j in range(3))
            seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, 16, dim)
            x = x + self.proj[i](seen)
            x = x + self.narrow[i](F.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return self.head(self.norms[4](x[:, 0]))


def _small(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(0, 0.1, shape).astype(np.float32)
