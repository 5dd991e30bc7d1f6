"""The parameters of a LlamaForCausalLM by name, from its configuration alone: what a checkpoint must hold.

Loading compares them with a checkpoint's headers before the model is made: a damaged config.json may ask for more
than any memory has.
"""

from __future__ import annotations

from monoplan.models.config import LlamaConfig

Shape = tuple[int, ...]


def parameter_shapes(config: LlamaConfig, most_layers: int) -> dict[str, Shape]:
    """Shapes by name, as LlamaForCausalLM(config) has them; of `most_layers` layers where there are more."""
    vocabulary = (config.vocab_size, config.hidden_size)
    found: dict[str, Shape] = {"model.embed_tokens.weight": vocabulary}
    layer = _layer_shapes(config)
    for i in range(min(config.num_hidden_layers, most_layers)):
        found |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (config.hidden_size,), "lm_head.weight": vocabulary}


def _layer_shapes(config: LlamaConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found: dict[str, Shape] = {}
    for name, outputs, inputs, bias in (
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.attention_out_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        found[f"{name}.weight"] = (outputs, inputs)
        if bias:
            found[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        found |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return found | {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
