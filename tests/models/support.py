"""Small models and tokenizers for the tests of models and of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from monoplan.frontend.parameter import no_init
from monoplan.models import LlamaConfig, LlamaForCausalLM
from tests.golden.weights import fingerprint, random_state_dict

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
LETTERS = [chr(code) for code in range(32, 127)]
BOS, EOS = 0, 1  # then the letters, and three ids without text
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant: {% endif %}"
)


class Golden:
    """A recorded case: arrays of transformers' run, and the model it was recorded from."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        self.meta: dict[str, Any] = json.loads(str(self.arrays["meta"]))

    def model(self, dtype: str = "float32", spelling: str = "new") -> LlamaForCausalLM:
        """The model with the recorded weights, which follow from their names and a seed."""
        config = LlamaConfig.from_dict({**self.meta["configs"][spelling], "dtype": dtype})
        shapes = {name: tuple(shape) for name, shape in self.meta["shapes"].items()}
        state = random_state_dict(shapes, self.meta["seed"])
        assert fingerprint(state) == self.meta["weights_sha256"]
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        with no_init():
            model = LlamaForCausalLM(config)
        model.load_state_dict(state)
        return model

    def run(self, model: Any, record: int) -> Any:
        """Logits of every token of a record, through a cache in the recorded chunks if there are any."""
        ids, positions = (self.arrays[n][record].astype(np.int64) for n in ("input_ids", "position_ids"))
        if not self.meta["chunks"]:
            return np.asarray(model(ids, positions, all_logits=True))
        cache, parts, done = model.new_cache(len(ids)), [], 0
        for length in self.meta["chunks"]:
            part = slice(done, done + length)
            parts.append(np.asarray(model(ids[:, part], positions[:, part], cache, all_logits=True)))
            done += length
        return np.concatenate(parts, axis=1)


def tiny_config(**changes: Any) -> LlamaConfig:
    """Two layers, four heads over two, and a vocabulary of single letters."""
    small: dict[str, Any] = {
        "vocab_size": len(LETTERS) + 5,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "initializer_range": 0.4,
    }
    return LlamaConfig(**{**small, **changes})


def tiny_tokenizer_files(directory: Path, *, chat: bool = True) -> None:
    """Writes a tokenizer that has one token for each printable ASCII letter."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<s>": BOS, "</s>": EOS, **{letter: 2 + i for i, letter in enumerate(LETTERS)}}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<s>", "</s>"])
    core.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    if chat:
        settings["chat_template"] = TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def tiny_checkpoint(directory: Path, *, chat: bool = True, **changes: Any) -> Path:
    """A saved model of random weights with its tokenizer."""
    LlamaForCausalLM.from_config(tiny_config(**changes), seed=3).save_pretrained(directory)
    tiny_tokenizer_files(directory, chat=chat)
    return directory
