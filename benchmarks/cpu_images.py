"""Convolutions of ResNet shapes beside torch, a small ViT beside torch.compile: one image, f32, one thread, one run.

    python benchmarks/cpu_images.py [conv] [vit]

Needs `pip install torch`. Each pair alternates in one process; the best of several turns counts, of both.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MONOPLAN_NUM_THREADS", "1")

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn as tnn

import monoplan as mp
import monoplan.nn.functional as F
from monoplan import nn

# channels, outputs, height, kernel, stride, of ResNet-18 and ResNet-50
CONVS = (
    (3, 64, 224, 7, 2), (64, 64, 56, 3, 1), (64, 128, 56, 3, 2), (128, 128, 28, 3, 1), (128, 256, 28, 3, 2),
    (256, 256, 14, 3, 1), (256, 512, 14, 3, 2), (512, 512, 7, 3, 1), (64, 128, 56, 1, 2), (64, 64, 56, 1, 1),
    (64, 256, 56, 1, 1), (256, 64, 56, 1, 1), (256, 128, 56, 1, 1), (128, 512, 28, 1, 1), (512, 128, 28, 1, 1),
    (256, 1024, 14, 1, 1), (1024, 256, 14, 1, 1), (512, 2048, 7, 1, 1), (2048, 512, 7, 1, 1),
)  # fmt: skip
TURNS, SECONDS = 6, 0.06  # of each side, in turns


def best(*sides: Callable[[], Any]) -> list[float]:
    """The shortest time of each side, which take turns."""
    found = [float("inf")] * len(sides)
    for side in sides:
        side()
    for _ in range(TURNS):
        for i, side in enumerate(sides):
            until = time.perf_counter() + SECONDS
            while (start := time.perf_counter()) < until:
                side()
                found[i] = min(found[i], time.perf_counter() - start)
    return found


def copied(module: Any, source: tnn.Module) -> Any:
    """Our module with torch's weights."""
    module.load_state_dict({name: value.detach().numpy() for name, value in source.state_dict().items()})
    return module


def convs() -> None:
    """Each shape by itself, with bias."""
    ratios = []
    for channels, columns, size, kernel, stride in CONVS:
        theirs = tnn.Conv2d(channels, columns, kernel, stride, kernel // 2).eval()
        ours = mp.compile(copied(nn.Conv2d(channels, columns, kernel, stride, kernel // 2), theirs))
        x = np.random.default_rng(0).standard_normal((1, channels, size, size), np.float32)
        given = torch.from_numpy(x)
        wanted = theirs(given).numpy()
        assert np.allclose(ours(x), wanted, atol=1e-3)
        mine, other = best(lambda ours=ours, x=x: ours(x), lambda theirs=theirs, given=given: theirs(given))  # type: ignore[misc]
        flops = 2 * wanted.size * channels * kernel * kernel
        ratios.append(other / mine)
        shape = f"{channels:5} {columns:5} {size:4}² {kernel}x{kernel} /{stride}"
        rate = f"{mine * 1e3:7.3f} ms {flops / mine / 1e9:6.1f} GFLOP/s"
        print(f"{shape}  {rate}   torch {other * 1e3:7.3f} ms   {other / mine:5.2f} x", flush=True)
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.2f} x, least {min(ratios):.2f} x")


def vit(base: Any, linear: Any, norm: Any, conv: Any, parameter: Any, blocks: Any, relative: Any) -> Any:
    """A vision transformer of width 192 with 4 layers over 16 x 16 patches, in either library."""
    width, heads, layers = 192, 3, 4

    class Block(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = norm(width), norm(width)
            self.qkv, self.proj = linear(width, 3 * width), linear(width, width)
            self.fc1, self.fc2 = linear(width, 4 * width), linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, seq = x.shape[0], x.shape[1]
            q, k, v = (
                t.reshape(batch, seq, heads, width // heads).transpose(1, 2)
                for t in self.qkv(self.norm1(x)).split(width, -1)
            )
            y = relative.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, width)
            x = x + self.proj(y)
            return x + self.fc2(relative.gelu(self.fc1(self.norm2(x))))

    class Vit(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.patch = conv(3, width, 16, 16)
            self.position = parameter(np.zeros((1, 196, width), np.float32))
            self.blocks = blocks([Block() for _ in range(layers)])
            self.norm, self.head = norm(width), linear(width, 1000)

        def forward(self, x: Any) -> Any:
            x = self.patch(x).flatten(2).transpose(1, 2) + self.position
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    return Vit()


def vits() -> None:
    """The whole model, eager torch and torch.compile beside it."""
    theirs = vit(
        tnn.Module, tnn.Linear, tnn.LayerNorm, tnn.Conv2d, lambda a: tnn.Parameter(torch.from_numpy(a)), tnn.ModuleList,
        tnn.functional,
    ).eval()  # fmt: skip
    ours = mp.compile(
        copied(vit(nn.Module, nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Parameter, nn.ModuleList, F), theirs)
    )
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)
    given = torch.from_numpy(x)
    compiled = torch.compile(theirs)
    assert np.allclose(ours(x), compiled(given).numpy(), atol=1e-3)
    mine, eager, other = best(lambda: ours(x), lambda: theirs(given), lambda: compiled(given))
    print(
        f"ViT 192 x 4   {mine * 1e3:.2f} ms   torch {eager * 1e3:.2f} ms ({eager / mine:.2f} x)   "
        f"torch.compile {other * 1e3:.2f} ms ({other / mine:.2f} x)"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["conv", "vit"]
    with torch.inference_mode():
        for name, run in (("conv", convs), ("vit", vits)):
            if name in chosen:
                run()
