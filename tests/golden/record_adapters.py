"""Record logits of a small LLaMA with LoRA adapters from PEFT: `python -m tests.golden.record_adapters`.

Needs torch, transformers and peft. `tests/golden/adapters.npz` gets the configuration and shapes of the model, and of
each adapter its configuration file, the shapes of its tensors, and logits. Weights are of `weights.random_state_dict`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.golden.weights import random_state_dict

TARGET = Path(__file__).parent / "adapters.npz"
CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "other": {"r": 6, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 3, "lora_alpha": 6.5, "target_modules": "all-linear", "use_rslora": True},
    "head": {"r": 2, "lora_alpha": 2, "target_modules": ["lm_head", "down_proj"]},
    "patterns": {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj", "up_proj"],
        "rank_pattern": {"up_proj": 5, "model.layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"o_proj": 7, "layers.0.mlp.up_proj": 1},
    },
}  # fmt: skip


@torch.no_grad()
def main() -> None:
    """Record all adapters."""
    meta: dict[str, Any] = {"config": {**CONFIG, "model_type": "llama"}, "adapters": {}}
    ids = np.random.Generator(np.random.Philox(0)).integers(0, CONFIG["vocab_size"], 20)
    arrays: dict[str, Any] = {"ids": ids}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        state = random_state_dict(shapes, 7)
        model.load_state_dict({n: torch.from_numpy(a) for n, a in state.items()})
        made = peft.get_peft_model(model, peft.LoraConfig(**settings))
        with tempfile.TemporaryDirectory() as place:
            made.save_pretrained(place, save_embedding_layers=False)
            file = Path(place, "adapter_model.safetensors")
            theirs = {n: a.shape for n, a in load_file(file).items()}
            save_file(random_state_dict(theirs, seed), file)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
            model.load_state_dict({n: torch.from_numpy(a) for n, a in state.items()})
            loaded = peft.PeftModel.from_pretrained(model, place).eval()
            config = json.loads(Path(place, "adapter_config.json").read_text())
        meta["shapes"] = shapes
        meta["adapters"][name] = {"config": config, "shapes": theirs, "seed": seed}
        arrays[name] = loaded(torch.from_numpy(ids)[None]).logits[0].numpy()
    arrays["meta"] = json.dumps(meta, sort_keys=True)
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main()
