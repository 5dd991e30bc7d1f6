"""Tokens per second with and without drafts that are looked up, on text that repeats and on text that does not.

    python benchmarks/cpu_drafts.py --dtype float32

The model is SmolLM2-135M-Instruct (or --model). Plain and drafted runs take turns; figures are the best of the rounds.
Both must give the same tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

COUNTED = "one two three four five six seven eight nine ten. "
FUNCTIONS = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n"
PROMPTS = {
    "counted": COUNTED * 6,
    "functions": FUNCTIONS * 3,
    "story": "Once upon a time",
    "history": "The history of the Roman empire begins",
    "sky": "The sky is blue because",
}


def timed(lm: Any, prompt: str, count: int, **settings: Any) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    times: list[float] = []
    stream = lm.generate(
        prompt, count, eos_token_id=(), callback=lambda *_: times.append(time.perf_counter()), **settings
    )
    for _ in stream:
        pass
    return times[-1] - times[0], stream.result.ids


def main() -> None:
    """Prints a line for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="a checkpoint (default: SmolLM2-135M-Instruct)")
    add("--dtype", default="auto")
    add("--temperature", type=float, default=0.0)
    add("--tokens", type=int, default=256)
    add("--repeats", type=int, default=3)
    args = parser.parse_args()
    import monoplan as mp
    from monoplan.models import AutoModel
    from monoplan.models.load.default_model import default_model_path

    lm = mp.compile(AutoModel.from_pretrained(args.model or default_model_path(), dtype=args.dtype))
    for name, prompt in PROMPTS.items():
        best, texts = {}, {}
        for _ in range(args.repeats):
            for lookup in (False, True):
                seconds, texts[lookup] = timed(lm, prompt, args.tokens, lookup=lookup, temperature=args.temperature)
                best[lookup] = min(best.get(lookup, seconds), seconds)
        if texts[False] != texts[True]:
            raise SystemExit(f"{name}: the texts differ")
        plain, drafted = ((args.tokens - 1) / best[lookup] for lookup in (False, True))
        print(f"{name:10} {plain:7.1f} tokens/s, with drafts {drafted:7.1f}: {drafted / plain:.2f} x", flush=True)


if __name__ == "__main__":
    main()
