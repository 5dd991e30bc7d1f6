"""Record logits of small random models of each family from Hugging Face transformers.

    python -m tests.golden.record_families [KIND ...]

Needs torch and transformers. Each family becomes `tests/golden/families/<model_type>.npz` with RECORDED models: a JSON
text `meta` with their configurations and shapes, token ids, and the logits of some tokens of a prompt and of the steps
that follow it through a cache. Weights come from `weights.random_state_dict`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.golden.family_cases import KINDS, config, weights
from tests.golden.weights import fingerprint

FOLDER = Path(__file__).parent / "families"
RECORDED = 3  # models of a family
PROMPT, STEPS = 40, 6


def make(kind: str, seed: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model of transformers with random weights, saved to a folder; and what its weights are."""
    made = transformers.AutoConfig.for_model(kind, **config(kind, seed))
    made._attn_implementation = "eager"
    made.dtype = "float32"
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval().float()
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    # In the order of the model, as far as it has the same names: experts are tensors of their own only in files.
    order = {name: at for at, (name, _) in enumerate(model.named_parameters())}
    shapes = dict(sorted(shapes.items(), key=lambda entry: order.get(entry[0], len(order))))
    state = weights(kind, shapes, seed)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    return model, {"shapes": shapes, "seed": seed, "weights_sha256": fingerprint(state)}


@torch.no_grad()
def run(model: Any, ids: NDArray[np.int64], prompt: int) -> NDArray[np.float32]:
    """Logits [tokens, vocabulary]: of a prompt in one call, and of the rest one by one through a cache."""
    tokens = torch.from_numpy(ids)[None]
    out = model(tokens[:, :prompt], use_cache=True)
    parts = [out.logits]
    for at in range(prompt, tokens.shape[1]):
        out = model(tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, dim=1)[0].float().numpy()


def main(kinds: list[str]) -> None:
    """Record the named families, or all of them."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for kind in kinds or KINDS:
        arrays: dict[str, Any] = {}
        metas = []
        for seed in range(RECORDED):
            with tempfile.TemporaryDirectory() as place:
                model, meta = make(kind, seed, Path(place))
                meta["config"] = json.loads(Path(place, "config.json").read_text())
            metas.append(meta)
            random = np.random.Generator(np.random.Philox(seed))
            ids = random.integers(0, model.config.vocab_size, PROMPT + STEPS)
            kept = [0, 1, PROMPT - 1, *range(PROMPT, PROMPT + STEPS)]
            arrays |= {f"ids_{seed}": ids, f"logits_{seed}": run(model, ids, PROMPT)[kept]}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        text = json.dumps({"prompt": PROMPT, "kept": kept, "versions": versions, "models": metas})
        np.savez_compressed(FOLDER / f"{kind}.npz", meta=np.array(text), **arrays)
        print(kind, (FOLDER / f"{kind}.npz").stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
