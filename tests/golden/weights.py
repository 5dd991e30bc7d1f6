"""Random weights that any machine can make again, so that goldens need not store them.

Every value follows from the tensor's name, its shape and a seed alone. Only integer sums, one product and one
rounding are used: neither the platform's libm nor a change of numpy's own normal distribution can move a bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


def random_state_dict(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Float32Array]:
    """Return a float32 tensor for each name: matrices of unit gain, norm weights near 1, small biases."""
    return {name: _random_tensor(name, tuple(shape), seed) for name, shape in shapes.items()}


def fingerprint(tensors: Mapping[str, Float32Array]) -> str:
    """Return a sha256 over names, shapes and bits, to tell wrong weights from wrong arithmetic."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name], dtype="<f4")
        digest.update(f"{name}{tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Float32Array:
    noise = _near_normal(f"{name}|{shape}|{seed}", math.prod(shape)).reshape(shape)
    if len(shape) > 1:
        # The last axis is what a Linear sums over, so activations keep their size from layer to layer.
        noise = noise / math.sqrt(shape[-1])
    elif name.endswith(".bias"):
        noise = 0.1 * noise
    else:
        noise = 1.0 + 0.1 * noise
    return noise.astype(np.float32)


def _near_normal(text: str, count: int) -> NDArray[np.float64]:
    """Return `count` values of mean 0 and variance 1: sums of twelve uniform 16-bit integers."""
    key = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key).random_raw(3 * count)
    halves = np.ascontiguousarray(bits, dtype="<u8").view("<u2").reshape(count, 12)
    return halves.sum(axis=1, dtype=np.int64) / 65536.0 - (6.0 - 6.0 / 65536.0)
