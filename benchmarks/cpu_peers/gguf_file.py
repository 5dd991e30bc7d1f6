"""The benchmark's weights as a GGUF file, for llama.cpp: names, order of the rotated rows, and a made-up vocabulary."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from cpu_peers.workload import BLOCKS, LONGEST, Workload, tensor_shapes

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of tokens in the format
ALL_F32, MOSTLY_BF16 = 0, 32  # file types of the format


def gguf_name(name: str) -> str:
    """The name that llama.cpp looks for."""
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    layer, inner = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[inner]}.weight"


def interleaved(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of q or k in llama.cpp's order: it rotates neighbours, Hugging Face the two halves of a head."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens that nobody needs (prompts are ids), but without which the file does not load."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    more = range(len(tokens), size)
    return tokens + [f"t{i}" for i in more], kinds + [NORMAL] * len(more)


def write_gguf(work: Workload) -> None:
    """Writes the file from the checkpoint's weights, unless it is there."""
    if work.gguf.exists():
        return
    import gguf

    from monoplan.models.load.checkpoint import open_model

    shape, half_done = work.shape, work.gguf.with_suffix(".part")
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    writer = gguf.GGUFWriter(half_done, "llama")
    writer.add_file_type(MOSTLY_BF16 if work.dtype == "bf16" else ALL_F32)
    writer.add_context_length(LONGEST)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape["vocab_size"])
    tokens, kinds = vocabulary(shape["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if work.low_bit:
        _add_blocks(writer, work)
    weights = None if work.low_bit else open_model(work.checkpoint).weights
    for name in [] if weights is None else weights.names():
        value = np.asarray(weights.tensor(name))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = interleaved(value, heads if "q_proj" in name else kv_heads)
        if value.ndim == 1:  # llama.cpp keeps the norms in f32
            writer.add_tensor(gguf_name(name), value.astype(np.float32))
        elif work.dtype == "bf16":
            raw = np.ascontiguousarray(value).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), np.asarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(half_done, work.gguf)


def _add_blocks(writer: Any, work: Workload) -> None:
    """Random blocks, turned by another amount for each tensor: codes of every kind, and scales that keep the size of
    what passes a layer."""
    import gguf

    random = np.random.default_rng(0)
    for number, (name, shape) in enumerate(tensor_shapes(work.shape).items()):
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        kind = work.kind(name)
        block, size = BLOCKS[kind]
        blocks = random.integers(0, 256, (1 << 12, size), dtype=np.uint8)
        wanted = 0.02 if "embed" in name else shape[-1] ** -0.5
        places, spread = SCALES[kind]
        for place in places:
            scales = (wanted / spread * random.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
            blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
        rows = np.resize(np.roll(blocks, 7919 * number, axis=0), (shape[0] * shape[1] // block, size))
        raw = rows.reshape(shape[0], -1)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])


# Where the scales of a block are, and the deviation of values that random codes have when these are 1. (Codes of Q4_K
# are never negative: its minimum, with a scale of its own, stands for the mean.)
SCALES = {"q4_0": ([0], 4.6), "q8_0": ([0], 74.0), "q4_k": ([0, 2], 250.0), "q6_k": ([208], 1360.0)}
