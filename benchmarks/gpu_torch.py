"""The peer: decode and prefill of the same LLaMA shapes by torch.compile with a static cache, random bf16 weights.

python benchmarks/gpu_torch.py 1b --batch 1 8 --context 1024 --prefill 2048 [--mode max-autotune]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.gpu_llama import SHAPES


def times(torch: Any, run: Any, count: int, warm: int = 5) -> float:
    """Median milliseconds between events."""
    for _ in range(warm):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for e in events[1:]:
        run()
        e.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, nargs="*", default=[1024])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--mode", default="reduce-overhead")
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=40960, rope_theta=500000.0, rms_norm_eps=1e-5)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"), torch.inference_mode():
        model = LlamaForCausalLM(config).eval()
    rows = []

    def report(what: str, ms: float, seconds: float) -> None:
        rows.append({"what": what, "ms": ms, "compile_s": seconds})
        print(
            f"torch {torch.__version__} {args.mode}: {what:40s} {ms:9.3f} ms   first calls {seconds:.1f} s", flush=True
        )

    @torch.inference_mode()
    def measure(batch: int, seq: int, context: int, compiled: bool) -> None:
        torch._dynamo.reset()
        cache = StaticCache(config=config, max_cache_len=context)
        ids = torch.randint(0, config.vocab_size, (batch, seq), device="cuda")
        place = torch.arange(context - seq, context, device="cuda")

        def step(ids: Any, place: Any) -> Any:
            out = model(ids, past_key_values=cache, cache_position=place, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1)

        step(torch.zeros(batch, 4, dtype=torch.long, device="cuda"), torch.arange(4, device="cuda"))  # makes the cache
        run = torch.compile(step, mode=args.mode, fullgraph=True) if compiled else step
        start = time.perf_counter()
        for _ in range(3):
            run(ids, place)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        name = f"decode, batch {batch}, context {context}" if seq == 1 else f"prefill of {seq}"
        report(
            name if compiled else f"{name}, eager",
            times(torch, lambda: run(ids, place), 50 if seq == 1 else 10),
            seconds,
        )

    for context in args.context:
        for batch in args.batch:
            measure(batch, 1, context, True)
    for length in args.prefill:
        measure(1, length, length, False)
        measure(1, length, length, True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
