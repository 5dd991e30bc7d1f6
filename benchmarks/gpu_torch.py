"""The peer: decode and prefill of the same LLaMA shapes by torch.compile with a static cache, random bf16 weights.

    python benchmarks/gpu_torch.py 1b --batch 1 8 --context 1024 --prefill 2048 [--mode max-autotune] [--budget 120]

The model is the hand-written script of the CPU benchmark (joined products, greedy token on the device), which is faster
than transformers' own classes. Each number is the median of CUDA-event times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]


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


def random_model(torch: Any, shape: dict[str, Any]) -> Any:
    """The script with random weights on the device; the head is tied, which moves the same bytes."""
    from cpu_peers.torch_llama import Llama

    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head

    def noise(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16) * (0.7 * sizes[-1] ** -0.5)

    weights = {"model.embed_tokens.weight": noise(shape["vocab_size"], hidden)}
    ones = {"input_layernorm", "post_attention_layernorm"}
    matrices = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for n in range(shape["num_hidden_layers"]):
        weights |= {f"model.layers.{n}.{name}.weight": noise(*sizes) for name, sizes in matrices.items()}
        weights |= {f"model.layers.{n}.{name}.weight": noise(1, hidden)[0] + 1 for name in ones}
    weights["model.norm.weight"] = noise(1, hidden)[0] + 1
    return Llama({**shape, "rope_theta": 500000.0}, weights, True).eval().cuda()


def main() -> None:
    """Measures and prints a table."""
    from gpu_decoder import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, nargs="*", default=[1024])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--mode", default="reduce-overhead")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which nothing new is begun")
    parser.add_argument("--json")
    args = parser.parse_args()
    import torch
    from cpu_peers.torch_llama import Static

    begun, shape = time.perf_counter(), SHAPES[args.shape]
    model = random_model(torch, shape)
    rows = []

    @torch.inference_mode()  # type: ignore[misc, no-untyped-call]
    def measure(batch: int, seq: int, context: int, compiled: bool) -> None:
        what = f"decode, batch {batch}, context {context}" if seq == 1 else f"prefill of {seq}"
        what += "" if compiled else ", eager"
        if time.perf_counter() - begun > args.budget:
            print(f"torch {args.mode}: {what}: left out, the time is over", flush=True)
            return
        torch._dynamo.reset()
        cache = Static(shape, context, torch.bfloat16, batch, "cuda")
        for kept in (*cache.keys, *cache.values):  # else CUDA graphs are left out: the caches are written in place
            torch._dynamo.mark_static_address(kept)
        ids = torch.randint(0, shape["vocab_size"], (batch, seq), device="cuda")
        place = torch.arange(context - seq, context, device="cuda")

        def step(ids: Any, place: Any) -> Any:
            return model(ids, place, cache)[:, -1].argmax(-1)

        run = torch.compile(step, mode=args.mode, fullgraph=True, dynamic=False) if compiled else step
        start = time.perf_counter()
        for _ in range(3):
            run(ids, place)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        ms = times(torch, lambda: run(ids, place), 50 if seq == 1 else 10)
        rows.append({"what": what, "mode": args.mode, "ms": ms, "first_calls_s": seconds})
        line = f"torch {torch.__version__} {args.mode}: {what:40s} {ms:9.3f} ms   first calls {seconds:.1f} s"
        print(line, flush=True)

    for context in args.context:
        for batch in args.batch:
            measure(batch, 1, context, True)
    for length in args.prefill:
        measure(1, length, length, False)
        measure(1, length, length, True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
