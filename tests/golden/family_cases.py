"""Random small configurations of model families: every key of the transformers class that changes numbers.

`config(kind, seed)` gives the arguments of the configuration class. Sizes are small, vocabularies odd, windows shorter
than the prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.golden.weights import random_state_dict

Config = dict[str, Any]
VOCABULARY = 67


def config(kind: str, seed: int) -> Config:
    """The arguments of the configuration class of a model_type, the same ones for a seed."""
    pick = random.Random(f"{kind} {seed}")
    made: Config = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made["initializer_range"] = 0.02
    return {**made, **KINDS[kind](pick)}


def weights(kind: str, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Any]:
    """Random weights of a model. Gemma's norms multiply by 1 + weight: with weights near 1, scores would be so large
    that float32 does not decide between two tokens."""
    made = random_state_dict(shapes, seed)
    if kind.startswith("gemma"):
        made |= {name: made[name] - 1 for name in made if name.endswith("norm.weight")}
    return dict(made)


def _llama_like(pick: random.Random, head_dims: tuple[int, ...] = (8, 16, 32), positions: int = 512) -> Config:
    """Sizes under LLaMA's names."""
    kv_heads, groups, dim = pick.choice((1, 2, 3)), pick.choice((1, 2, 4)), pick.choice(head_dims)
    return {
        "hidden_size": kv_heads * groups * dim,
        "intermediate_size": pick.choice((48, 83, 112)),
        "num_hidden_layers": pick.choice((2, 3, 4)),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": pick.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": pick.random() < 0.5,
    }


def _scaled(pick: random.Random, theta: float = 10000.0) -> Config:
    """rope_parameters of a random kind."""
    kinds: list[Config] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ]
    return {**pick.choice(kinds), "rope_theta": pick.choice((theta, 500000.0))}


def _windows(pick: random.Random, layers: int) -> Config:
    kinds = [pick.choice(("sliding_attention", "full_attention")) for _ in range(layers)]
    return {"sliding_window": pick.choice((5, 16, 100)), "layer_types": pick.choice((None, kinds))}


def _gemma(pick: random.Random) -> Config:
    free = {"head_dim": pick.choice((8, 32)), "attention_bias": pick.random() < 0.3}
    return {**_llama_like(pick), **free, "hidden_act": pick.choice(("gelu", "gelu_pytorch_tanh", "silu"))}


def _gemma2(pick: random.Random) -> Config:
    made = {**_gemma(pick), "hidden_activation": pick.choice(("gelu_pytorch_tanh", "gelu", "silu"))}
    del made["hidden_act"]
    made |= _windows(pick, made["num_hidden_layers"])
    made["query_pre_attn_scalar"] = pick.choice((8, 16, 144))
    made["final_logit_softcapping"] = pick.choice((None, 2.0, 30.0))
    made["attn_logit_softcapping"] = pick.choice((None, 1.5, 50.0))
    return made


def _gemma3(pick: random.Random) -> Config:
    made = _gemma2(pick)
    del made["attn_logit_softcapping"]
    made["num_hidden_layers"] = pick.choice((3, 7))
    made |= _windows(pick, made["num_hidden_layers"])
    wide = pick.choice(({"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}))
    local = {"rope_type": "default", "rope_theta": pick.choice((10000.0, 2000.0))}
    ropes = {"full_attention": {**wide, "rope_theta": 1e6}, "sliding_attention": local}
    return {**made, "rope_parameters": pick.choice((None, ropes))}


def _phi3(pick: random.Random) -> Config:
    made = _llama_like(pick, head_dims=(16, 32))
    part = pick.choice((1.0, 0.75, 0.5))
    pairs = int(made["hidden_size"] // made["num_attention_heads"] * part) // 2
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
    }
    rope = pick.choice(({"rope_type": "default"}, longrope, longrope))
    made["rope_parameters"] = {**rope, "rope_theta": pick.choice((10000.0, 250000.0)), "partial_rotary_factor": part}
    # Beyond it keys in a cache keep the short factors, here as in transformers.
    made["original_max_position_embeddings"] = pick.choice((32, 400))
    return {**made, "sliding_window": pick.choice((None, 9, 100))}


def _olmo2(pick: random.Random) -> Config:
    return {**_llama_like(pick), "attention_bias": pick.random() < 0.3, "rope_parameters": _scaled(pick)}


def _olmo3(pick: random.Random) -> Config:
    made = {**_olmo2(pick), "num_hidden_layers": pick.choice((3, 5))}
    made |= _windows(pick, made["num_hidden_layers"])
    local = {"rope_type": "default", "rope_theta": pick.choice((10000.0, 500000.0))}
    ropes = {"full_attention": made["rope_parameters"], "sliding_attention": local}
    return {**made, "rope_parameters": pick.choice((None, ropes))}


def _granite(pick: random.Random) -> Config:
    made = {**_olmo2(pick), "mlp_bias": pick.random() < 0.3, "attention_multiplier": pick.choice((0.1, 0.3))}
    made |= {"embedding_multiplier": pick.choice((1.0, 12.0)), "residual_multiplier": pick.choice((1.0, 0.22))}
    return {**made, "logits_scaling": pick.choice((1.0, 8.0))}


def _smollm3(pick: random.Random) -> Config:
    made = {**_olmo2(pick), "mlp_bias": pick.random() < 0.3, "num_hidden_layers": pick.choice((3, 5))}
    layers = [pick.choice((0, 1)) for _ in range(made["num_hidden_layers"])]
    made |= {"no_rope_layers": pick.choice((None, layers)), "no_rope_layer_interval": pick.choice((2, 4))}
    return {**made, "use_sliding_window": pick.random() < 0.5, "sliding_window": pick.choice((None, 7, 60))}


def _gpt2(pick: random.Random) -> Config:
    heads, dim = pick.choice((1, 2, 3)), pick.choice((8, 16, 32))
    made: Config = {"n_embd": heads * dim, "n_head": heads, "n_layer": pick.choice((2, 3, 4)), "n_positions": 512}
    made |= {"n_inner": pick.choice((None, 83, 112)), "layer_norm_epsilon": pick.choice((1e-5, 1e-2))}
    made["activation_function"] = pick.choice(("gelu_new", "gelu", "relu"))
    made |= {"scale_attn_weights": pick.random() < 0.8, "scale_attn_by_inverse_layer_idx": pick.random() < 0.3}
    return {**made, "tie_word_embeddings": pick.random() < 0.7}


def _layer_norms(made: Config) -> Config:
    return {"layer_norm_eps": made.pop("rms_norm_eps"), **made}


def _gpt_neox(pick: random.Random) -> Config:
    made = _layer_norms(_llama_like(pick, head_dims=(16, 32)))
    del made["num_key_value_heads"]
    made |= {"use_parallel_residual": pick.random() < 0.6, "attention_bias": pick.random() < 0.7}
    made["hidden_act"] = pick.choice(("gelu", "gelu_new", "gelu_fast"))
    part = pick.choice((0.25, 0.5, 1.0))
    return {**made, "rope_parameters": pick.choice((None, {**_scaled(pick), "partial_rotary_factor": part}))}


def _stablelm(pick: random.Random) -> Config:
    made = _layer_norms(_llama_like(pick, head_dims=(16, 32)))
    made |= {"use_parallel_residual": pick.random() < 0.4, "use_qkv_bias": pick.random() < 0.5}
    return {**made, "rope_parameters": {**_scaled(pick), "partial_rotary_factor": pick.choice((0.25, 0.5, 1.0))}}


def _cohere(pick: random.Random) -> Config:
    made = _layer_norms(_llama_like(pick))
    made |= {"logit_scale": pick.choice((0.0625, 0.8)), "attention_bias": pick.random() < 0.3}
    return {**made, "use_qk_norm": pick.random() < 0.4, "rope_parameters": _scaled(pick)}


def _cohere2(pick: random.Random) -> Config:
    made = _cohere(pick)
    del made["use_qk_norm"]
    made["num_hidden_layers"] = pick.choice((3, 5))
    return {**made, **_windows(pick, made["num_hidden_layers"])}


def _gptj(pick: random.Random) -> Config:
    made = _gpt2(pick)
    for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"):
        del made[name]
    dim = made["n_embd"] // made["n_head"]
    return {**made, "rotary_dim": pick.choice((dim, dim // 2)), "tie_word_embeddings": False}


def _falcon(pick: random.Random) -> Config:
    made = _llama_like(pick)
    sizes = {"ffn_hidden_size": made.pop("intermediate_size"), "num_kv_heads": made.pop("num_key_value_heads")}
    made |= {**sizes, "layer_norm_epsilon": made.pop("rms_norm_eps"), "activation": pick.choice(("gelu", "relu"))}
    made |= {"new_decoder_architecture": pick.random() < 0.5, "bias": pick.random() < 0.4}
    if made["new_decoder_architecture"]:
        made["num_ln_in_parallel_attn"] = pick.choice((None, 1, 2))
    else:
        made |= {"multi_query": pick.random() < 0.5, "parallel_attn": pick.random() < 0.6}
        if not made["multi_query"]:
            made["num_kv_heads"] = made["num_attention_heads"]
    return {**made, "rope_parameters": _scaled(pick)}


def _mixtral(pick: random.Random) -> Config:
    made = {
        **_llama_like(pick),
        "num_local_experts": pick.choice((4, 7)),
        "num_experts_per_tok": pick.choice((1, 2, 3)),
    }
    made |= {
        "intermediate_size": pick.choice((48, 76)),
        "head_dim": pick.choice((16, 32)),
    }  # torch wants multiples of 4
    return {**made, "sliding_window": pick.choice((None, 9)), "rope_parameters": _scaled(pick)}


def _qwen3_moe(pick: random.Random) -> Config:
    made = {**_llama_like(pick), "num_experts": pick.choice((4, 9)), "num_experts_per_tok": pick.choice((1, 2, 4))}
    made |= {"moe_intermediate_size": pick.choice((24, 44)), "norm_topk_prob": pick.random() < 0.5}
    made |= {"decoder_sparse_step": pick.choice((1, 2)), "mlp_only_layers": pick.choice(([], [1]))}
    made |= {"head_dim": pick.choice((16, 32)), "attention_bias": pick.random() < 0.3}
    made |= {"use_sliding_window": pick.random() < 0.3, "sliding_window": 11}
    return {**made, "rope_parameters": _scaled(pick)}


def _qwen2_moe(pick: random.Random) -> Config:
    made = {**_llama_like(pick), "num_experts": pick.choice((4, 9)), "num_experts_per_tok": pick.choice((1, 2, 4))}
    made |= {"moe_intermediate_size": pick.choice((24, 44)), "norm_topk_prob": pick.random() < 0.5}
    made |= {"decoder_sparse_step": pick.choice((1, 2)), "mlp_only_layers": pick.choice(([], [1]))}
    made |= {"shared_expert_intermediate_size": pick.choice((20, 36)), "qkv_bias": pick.random() < 0.7}
    made |= {"use_sliding_window": pick.random() < 0.5, "sliding_window": 11, "max_window_layers": pick.choice((1, 28))}
    return {**made, "rope_parameters": _scaled(pick)}


def _gpt_oss(pick: random.Random) -> Config:
    made = {
        **_llama_like(pick),
        "num_local_experts": pick.choice((4, 7)),
        "num_experts_per_tok": pick.choice((1, 2, 4)),
    }
    made |= {"intermediate_size": pick.choice((48, 76)), "head_dim": pick.choice((16, 32))}
    made |= {"attention_bias": pick.random() < 0.7, **_windows(pick, made["num_hidden_layers"])}
    made |= {"swiglu_alpha": pick.choice((1.702, 1.1)), "swiglu_limit": pick.choice((7.0, 0.3))}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
    return {**made, "rope_parameters": pick.choice((None, {**yarn, "rope_theta": 150000.0}, _scaled(pick)))}


def _deepseek_v2(pick: random.Random) -> Config:
    made = {**_llama_like(pick), "n_routed_experts": pick.choice((4, 8)), "num_experts_per_tok": pick.choice((1, 2, 3))}
    made["num_key_value_heads"] = made["num_attention_heads"]
    made |= {"moe_intermediate_size": pick.choice((24, 44)), "n_shared_experts": pick.choice((1, 2))}
    made |= {"first_k_dense_replace": pick.choice((0, 1)), "routed_scaling_factor": pick.choice((1.0, 2.5))}
    made |= {"kv_lora_rank": pick.choice((16, 36)), "q_lora_rank": pick.choice((None, 20))}
    made |= {"qk_nope_head_dim": pick.choice((8, 12)), "qk_rope_head_dim": pick.choice((8, 16))}
    made |= {"v_head_dim": pick.choice((8, 20)), "attention_bias": pick.random() < 0.3, "mlp_bias": pick.random() < 0.3}
    if pick.random() < 0.5:
        made |= {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": pick.choice((3, 4))}
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
    scales = {"mscale": pick.choice((0.707, 1.0)), "mscale_all_dim": 0.707}
    return {**made, "rope_parameters": pick.choice(({**yarn, **scales}, {**yarn, **scales}, _scaled(pick)))}


KINDS: dict[str, Callable[[random.Random], Config]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "granite": _granite,
    "smollm3": _smollm3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "stablelm": _stablelm,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "gptj": _gptj,
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
}
