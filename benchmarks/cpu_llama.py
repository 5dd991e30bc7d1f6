"""monoplan and its peers on one CPU, side by side in one run: same weights, shapes, threads and prompt, alternating.

    python benchmarks/cpu_llama.py --shape 135m --dtype bfloat16 --json out.json

Decode: one token after a context of 128. Prefill: 512 tokens. Medians over repeats; the machine's limits are measured
before and after, in the same process. A peer that can't be imported is skipped with its reason.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
             "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100000.0},
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_theta": 10000.0},
}
CONTEXT, PROMPT = 128, 512


@dataclass
class Engine:
    """A way to run the model: `prefill(ids)` from empty, `decode(token)` one step further."""

    name: str
    prefill: Callable[[np.ndarray[Any, Any]], Any]
    decode: Callable[[np.ndarray[Any, Any]], Any]


def weights(config: Any) -> Any:
    """A model with random weights, made from one block so that a large one is ready in seconds."""
    from monoplan.frontend.init import no_init
    from monoplan.models import LlamaForCausalLM

    with no_init():
        model = LlamaForCausalLM(config)
    block = (np.random.default_rng(0).normal(size=1 << 20) * 0.02).astype(np.float32)
    for _, p in model.named_parameters():
        like = p.numpy()
        p.load(np.ones(like.shape, like.dtype) if like.ndim == 1 else np.resize(block, like.shape).astype(like.dtype))
    return model


def monoplan_engine(model: Any, threads: int) -> Engine:
    import monoplan as mp

    llm = mp.compile(model, options={"threads": threads})
    cache = llm.new_cache(1, PROMPT + CONTEXT)

    def prefill(ids: np.ndarray[Any, Any]) -> None:
        cache.reset()
        llm(ids, past_key_values=cache)

    return Engine("monoplan", prefill, lambda token: llm(token, past_key_values=cache))


def torch_engine(model: Any, config: dict[str, Any], dtype: str, threads: int, compiled: bool) -> Engine:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.set_num_threads(threads)
    peer = LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=True, max_position_embeddings=4096))
    peer = peer.to(getattr(torch, dtype)).eval()
    state = {n: torch.from_numpy(p.numpy().astype(np.float32)).to(getattr(torch, dtype))
             for n, p in model.named_parameters()}
    peer.load_state_dict(state, strict=False)
    cache = StaticCache(config=peer.config, max_cache_len=PROMPT + CONTEXT)
    run = torch.compile(peer.forward, dynamic=False) if compiled else peer.forward
    length = 0

    @torch.no_grad()  # type: ignore[misc, no-untyped-call]
    def step(ids: np.ndarray[Any, Any]) -> Any:
        nonlocal length
        at = torch.arange(length, length + ids.shape[1])
        out = run(torch.from_numpy(ids), past_key_values=cache, cache_position=at, logits_to_keep=1)
        length += ids.shape[1]
        return out.logits

    def prefill(ids: np.ndarray[Any, Any]) -> None:
        nonlocal length
        length = 0
        cache.reset()
        step(ids)

    return Engine("torch.compile" if compiled else "torch eager", prefill, step)


def engines(model: Any, config: dict[str, Any], args: argparse.Namespace) -> tuple[list[Engine], dict[str, str]]:
    """Every engine that runs here, and why the others do not."""
    makers = {
        "monoplan": lambda: monoplan_engine(model, args.threads),
        "torch eager": lambda: torch_engine(model, config, args.dtype, args.threads, False),
        "torch.compile": lambda: torch_engine(model, config, args.dtype, args.threads, True),
    }
    found, skipped = [], {}
    for name, make in makers.items():
        if name not in args.engines:
            skipped[name] = "not asked for"
            continue
        try:
            found.append(make())
        except ImportError as error:
            skipped[name] = str(error)
    for name, package in (("llama.cpp", "llama_cpp"), ("OpenVINO", "openvino_genai")):
        try:
            __import__(package)
            skipped[name] = f"{package} is here, but needs the weights in its own file format"
        except ImportError as error:
            skipped[name] = str(error)
    return found, skipped


def measure(found: list[Engine], repeats: int, vocabulary: int) -> dict[str, dict[str, float]]:
    """Median seconds of prefill and decode; engines take turns, so that a slow minute hits all of them."""
    ids = np.random.default_rng(1).integers(0, vocabulary, (1, PROMPT))
    times: dict[str, dict[str, list[float]]] = {e.name: {"prefill": [], "decode": []} for e in found}
    for turn in range(repeats + 1):
        for engine in found:
            begin = time.perf_counter()
            engine.prefill(ids)
            prefill = time.perf_counter() - begin
            engine.prefill(ids[:, :CONTEXT])
            steps = []
            for _ in range(12):
                begin = time.perf_counter()
                engine.decode(ids[:, :1])
                steps.append(time.perf_counter() - begin)
            if turn:  # the first turn compiles and warms up
                times[engine.name]["prefill"].append(prefill)
                times[engine.name]["decode"] += steps
    return {n: {k: float(np.median(v)) for k, v in t.items()} for n, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["monoplan", "torch eager", "torch.compile"])
    parser.add_argument("--json")
    args = parser.parse_args()
    from monoplan.models import LlamaConfig
    from monoplan.runtime.limits import measure as measure_limits

    shape = SHAPES[args.shape]
    config = LlamaConfig(**shape, tie_word_embeddings=True, attention_bias=False, max_position_embeddings=4096,
                         dtype=args.dtype)
    model = weights(config)
    nbytes = sum(p.numpy().nbytes for _, p in model.named_parameters())
    flops = 2 * PROMPT * sum(p.numpy().size for n, p in model.named_parameters() if "embed" not in n)
    before = measure_limits(args.threads, fresh=True)
    found, skipped = engines(model, shape, args)
    result = measure(found, args.repeats, shape["vocab_size"])
    after = measure_limits(args.threads, fresh=True)
    bandwidth = max(before.memory, after.memory)
    print(f"{args.shape} {args.dtype}, {args.threads} threads, {platform.machine()}; weights {nbytes / 1e6:.0f} MB; "
          f"read bandwidth {before.memory / 1e9:.1f} before, {after.memory / 1e9:.1f} GB/s after")
    print("| engine | decode ms | tokens/s | share of read bandwidth | prefill 512 s | tokens/s | GFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for name, t in result.items():
        share = nbytes / t["decode"] / bandwidth
        print(f"| {name} | {t['decode'] * 1e3:.1f} | {1 / t['decode']:.1f} | {share:.0%} | {t['prefill']:.2f} | "
              f"{PROMPT / t['prefill']:.0f} | {flops / t['prefill'] / 1e9:.0f} |")
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"arguments": vars(args), "seconds": result, "skipped": skipped, "bytes": nbytes,
                       "read_bandwidth": [before.memory, after.memory]}, f, indent=1)


if __name__ == "__main__":
    main()
