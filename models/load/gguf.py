"""GGUF files: metadata, configuration, and weights under Hugging Face names, dequantized when asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monoplan.ir.arrays import Part
from monoplan.ir.errors import LoadError
from monoplan.models.load.gguf_config import ROPE_TENSORS, read_config
from monoplan.models.load.gguf_header import FLOATS, Header, StoredTensor

Array = NDArray[Any]

_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip


class GGUFCheckpoint:
    """The tensors of a GGUF file under Hugging Face names, its metadata, and the configuration in it.

    A tensor is read at each call, into memory of its own (see weight_file.py); block formats become float32.
    """

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, dict(metadata)
        try:
            self.config = read_config(self.metadata, tensors)
        except LoadError as error:
            raise LoadError(error.what, where=path, why=error.why, fix=error.fix) from None
        self._tensors = {_hf_name(name): tensor for name, tensor in tensors.items() if name not in ROPE_TENSORS}

    def names(self) -> list[str]:
        """Return the names of all tensors; one that has no Hugging Face name keeps its own."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype that `tensor` gives: the stored one, or float32 for block formats."""
        return FLOATS.get(self._find(name).kind, np.dtype(np.float32))

    def stored_type(self, name: str) -> str:
        """Return the format in the file: F32, F16, BF16, Q8_0, Q4_K and so on."""
        return self._find(name).kind

    def tensor(self, name: str, part: Part | None = None) -> Array:
        """Return a copy of a tensor, or of a part of it, with the rows of q and k in Hugging Face order."""
        stored, heads = self._find(name), self._permuted_heads(name)
        if heads is None:
            return stored.values(part)
        if part is None or part.axis > 0:
            return _unpermute(stored.values(part), heads)
        rows = stored.shape[0] // heads  # are permuted within each head
        if rows and part.start % rows == part.length % rows == 0:
            return _unpermute(stored.values(part), part.length // rows)
        return part.cut(_unpermute(stored.values(), heads)).copy()

    def _permuted_heads(self, name: str) -> int | None:
        if self.metadata["general.architecture"] != "llama":
            return None  # only the llama writer interleaves the halves of a head
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if ".k_proj." in name else None

    def _find(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise LoadError(f"there is no tensor {name!r}", where=self.path)
        return self._tensors[name]


def open_gguf(path: str | Path) -> GGUFCheckpoint:
    """Open a GGUF file of a llama, qwen2 or qwen3 model and check its whole header."""
    path = Path(path)
    header = Header(path)
    return GGUFCheckpoint(path, header.tensors, header.metadata)


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[3] not in _NAMES:
        return name
    return f"model.layers.{match[2]}.{_NAMES[match[3]]}.{match[4]}" if match[1] else f"{_NAMES[match[3]]}.{match[4]}"


def _unpermute(array: Array, heads: int) -> Array:
    """Undo the row order of llama files, which put the pairs that RoPE turns side by side."""
    if array.shape[0] % (2 * heads):
        raise LoadError(f"{array.shape[0]} rows of q or k can't be split into {heads} heads")
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
