"""What every peer runs: the shape, the weights on disk in each peer's format, and what a token costs at least.

One set of random weights is drawn per shape. It is stored as a Hugging Face folder and, from that, as a GGUF file, so
that each peer loads the numbers that the others load, in the way its users load a model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0},
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0},
}  # fmt: skip
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# Low-bit files: the type of all matrices, and that of those that llama.cpp's mixtures keep in more bits.
FORMATS = {
    "q4_0": ("q4_0", "q4_0"), "q8_0": ("q8_0", "q8_0"), "q4_k": ("q4_k", "q4_k"), "q6_k": ("q6_k", "q6_k"),
    "q4_k_m": ("q4_k", "q6_k"),
}  # fmt: skip
BLOCKS = {"q4_0": (32, 18), "q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}
# Hugging Face checkpoints whose layers are quantized, all but the embedding: bytes of 128 numbers, quantization_config.
_GROUPS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 128}
QUANTIZED: dict[str, tuple[int, dict[str, Any]]] = {
    "fp8_128": (132, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "int4_128_f16": (67, {"quant_method": "compressed-tensors", "format": "pack-quantized",
                          "config_groups": {"group_0": {"targets": ["Linear"], "weights": _GROUPS}}}),
}  # fmt: skip
# What OpenVINO's own compressor (nncf) has nearest to each: its mode and group. It starts from random weights of f32.
COMPRESSIONS: dict[str, tuple[str, int]] = {
    "q8_0": ("INT8_SYM", -1), "q4_0": ("INT4_SYM", 32), "q4_k": ("INT4_ASYM", 32), "q4_k_m": ("INT4_ASYM", 32),
    "int4_128_f16": ("INT4_ASYM", 128),
}  # fmt: skip
LONGEST = 8192  # positions of the models
CONTEXT, PROMPT, STEPS = 128, 512, 16  # decode after CONTEXT tokens for STEPS steps; prefill of PROMPT
PROMPTS = 3  # in a turn
CAPACITY = 640  # of every KV cache, where a peer fixes it: room for both
LONG_PROMPT = 2048
GROWTH_STEPS = 32  # at each length of the context: growth is a small difference of large times
START_PROMPT = 16  # tokens before the first one of a fresh process


@dataclass(frozen=True)
class Workload:
    """A model of a shape in a data type, and the folder where its files are."""

    model: str
    dtype: str  # bf16 or f32, or one of FORMATS or QUANTIZED
    folder: Path

    @property
    def shape(self) -> dict[str, Any]:
        return SHAPES[self.model]

    @property
    def low_bit(self) -> bool:
        return self.dtype in FORMATS

    @property
    def item(self) -> int:
        """Bytes of a number of the cache, and of a weight that is not in a low-bit format."""
        return 2 if self.dtype == "bf16" else 4

    def kind(self, name: str) -> str:
        """The low-bit type of a matrix: as in llama.cpp's mixtures, the last matrix and half of the values and of the
        down projections have more bits."""
        usual, better = FORMATS[self.dtype]
        if name.endswith("embed_tokens.weight"):
            return better
        layers = self.shape["num_hidden_layers"]
        layer = int(name.split(".")[2])
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return better if more and name.endswith(("v_proj.weight", "down_proj.weight")) else usual

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face folder."""
        return self.folder / f"{self.model}-{self.dtype}"

    @property
    def gguf(self) -> Path:
        """The same weights as a GGUF file."""
        return self.folder / f"{self.model}-{self.dtype}.gguf"

    @property
    def openvino(self) -> Path:
        """The same weights as an OpenVINO model."""
        return self.folder / f"{self.model}-{self.dtype}-openvino" / "openvino_model.xml"

    @property
    def layer_values(self) -> int:
        """Weights of the matrices of all layers."""
        s = self.shape
        heads, kv = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
        each = s["hidden_size"] * (2 * heads + 2 * kv + 3 * s["intermediate_size"])
        return int(each * s["num_hidden_layers"])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each of which a token reads once (the embedding is the last matrix as well)."""
        s = self.shape
        norms = s["hidden_size"] * (2 * s["num_hidden_layers"] + 1)
        if self.low_bit:
            matrices = {n: math.prod(t) for n, t in tensor_shapes(s).items() if len(t) == 2}
            blocks = [(count, *BLOCKS[self.kind(name)]) for name, count in matrices.items()]
            return sum(count // block * size for count, block, size in blocks) + 4 * norms
        if self.dtype in QUANTIZED:
            embedding = 2 * s["vocab_size"] * s["hidden_size"]
            return self.layer_values * QUANTIZED[self.dtype][0] // 128 + embedding + 4 * norms
        return int((self.layer_values + s["vocab_size"] * s["hidden_size"] + norms) * self.item)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one more token of context adds to each step."""
        s = self.shape
        return int(2 * s["num_hidden_layers"] * s["num_key_value_heads"] * s["head_dim"] * self.item)

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt from an empty cache: every layer for every token, the last matrix for one."""
        s = self.shape
        attention = 4 * s["num_attention_heads"] * s["head_dim"] * s["num_hidden_layers"] * tokens * (tokens + 1) / 2
        return 2.0 * tokens * self.layer_values + attention + 2.0 * s["vocab_size"] * s["hidden_size"]

    def prompt(self, tokens: int) -> list[int]:
        """The same random tokens for every peer; the first hundreds of ids are special in some vocabularies."""
        first = min(300, self.shape["vocab_size"] // 2)
        return [int(t) for t in np.random.default_rng(1).integers(first, self.shape["vocab_size"], tokens)]


def config_of(work: Workload) -> dict[str, Any]:
    """The config.json of the model."""
    return {
        **work.shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": LONGEST,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": DTYPES.get(work.dtype, "bfloat16"),
        **({"quantization_config": QUANTIZED[work.dtype][1]} if work.dtype in QUANTIZED else {}),
    }


def tensor_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights, as Hugging Face names them."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape["vocab_size"], hidden)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (queries, hidden),
            f"{at}self_attn.k_proj.weight": (keys, hidden),
            f"{at}self_attn.v_proj.weight": (keys, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, queries),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return found | {"model.norm.weight": (hidden,)}


def random_weights(work: Workload) -> dict[str, np.ndarray[Any, Any]]:
    """Weights from one block of random numbers, turned by another amount per tensor: a large model in seconds.

    Small embeddings and layers that keep the size of their input: so the layers and not the last token of the prompt
    decide which token is next, and peers whose layers differ are seen to differ.
    """
    import ml_dtypes

    dtype = np.dtype(np.float32) if work.dtype == "f32" else np.dtype(ml_dtypes.bfloat16)
    block = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
    found = {}
    for number, (name, shape) in enumerate(tensor_shapes(work.shape).items()):
        scale = 0.02 if "embed" in name else shape[-1] ** -0.5
        if work.dtype in QUANTIZED and len(shape) == 2 and "embed" not in name:
            found |= _quantized(name, (shape[0], shape[1]), np.roll(block, 7919 * number), work.dtype)
            continue
        turned = (np.roll(block, 7919 * number) * np.float32(scale)).astype(dtype)
        found[name] = np.ones(shape, dtype) if len(shape) == 1 else np.resize(turned, shape)
    return found


def _quantized(
    name: str, shape: tuple[int, int], normal: np.ndarray[Any, Any], kind: str
) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a layer in such a checkpoint."""
    import ml_dtypes

    size, groups = shape[1] ** -0.5, -(-shape[1] // 128)
    if kind == "fp8_128":
        codes = np.clip(normal * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        scales = np.full((-(-shape[0] // 128), groups), size / 100, np.float32)
        return {name: np.resize(codes, shape), f"{name}_scale_inv": scales}
    words = np.resize(normal, (shape[0], shape[1] // 8)).view(np.int32)  # any bits
    zeros = np.full((shape[0] // 8, groups), np.int32(0x78897788), np.int32)
    scales = np.full((shape[0], groups), size / 4.6, np.float16)
    made = {"packed": words * np.int32(-1640531527), "scale": scales, "zero_point": zeros, "shape": np.int64(shape)}
    return {f"{name}_{own}": np.asarray(array) for own, array in made.items()}


def write_files(work: Workload) -> None:
    """Writes the checkpoint, unless an earlier run left it here."""
    if work.low_bit:  # the GGUF file is all there is
        return
    done = work.checkpoint / "config.json"  # written last: a folder without it was left half done
    if done.exists():
        return
    from safetensors.numpy import save_file

    work.checkpoint.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(work), work.checkpoint / "model.safetensors", metadata={"format": "pt"})
    done.write_text(json.dumps(config_of(work), indent=1))
