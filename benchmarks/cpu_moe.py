"""Tokens of a mixture of experts on one CPU, beside llama.cpp on the same file and the bytes that a token reads.

    python benchmarks/cpu_moe.py --kind q4_0 --layers 4

The model has Qwen3-MoE's shape with 8 of 64 experts; weights are random. Decode: one token after 128. Prefill:
512 tokens. Rounds take turns; figures are medians. The bytes of the chosen experts, the attention and the head, at the
speed of the read loop (`monoplan bench --limits`), are what a token can take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cpu_peers.gguf_file import SCALES, vocabulary
from cpu_peers.workload import BLOCKS

KINDS = {**BLOCKS, "bf16": (1, 2), "f32": (1, 4)}  # numbers of a block, and its bytes
HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, CHOSEN, INNER, WORDS = 2048, 32, 4, 128, 64, 8, 768, 32000
PROMPT, STEPS, LONG = 128, 32, 512


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes by llama.cpp's names."""
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (WORDS, HIDDEN),
        "output": (WORDS, HIDDEN),
        "output_norm": (HIDDEN,),
    }
    for i in range(layers):
        layer = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q_norm": (DIM,), "attn_k_norm": (DIM,),
            "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate_inp": (EXPERTS, HIDDEN),
            "ffn_gate_exps": (EXPERTS, INNER, HIDDEN), "ffn_up_exps": (EXPERTS, INNER, HIDDEN),
            "ffn_down_exps": (EXPERTS, HIDDEN, INNER),
        }  # fmt: skip
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def stored(name: str, shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor: vectors and the router are f32."""
    block, size = KINDS[kind]
    return int(np.prod(shape)) * 4 if len(shape) == 1 or "gate_inp" in name else int(np.prod(shape)) // block * size


def active_bytes(layers: int, kind: str) -> int:
    """Bytes of weights that a token reads."""
    return sum(
        stored(name, shape, kind) * CHOSEN // EXPERTS if len(shape) == 3 else stored(name, shape, kind)
        for name, shape in tensors(layers).items()
        if name != "token_embd"
    )


def write(path: Path, layers: int, kind: str) -> None:
    """The file."""
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(6144)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(WORDS)
    words, kinds = vocabulary(WORDS)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random, (block, size), (places, spread) = np.random.default_rng(0), KINDS[kind], SCALES.get(kind, ([], 1.0))
    for number, (name, shape) in enumerate(tensors(layers).items()):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        elif "gate_inp" in name:
            writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32) * np.float32(0.05))
        else:
            values = random.standard_normal((1 << 19, 1), np.float32) * np.float32(shape[-1] ** -0.5)
            blocks = random.integers(0, 256, (1 << 12, size), dtype=np.uint8)
            if block == 1:  # floats: bf16 is the upper half of f32
                blocks = values.view(np.uint8)[:, 4 - size :]
            for place in places:
                scales = (shape[-1] ** -0.5 / spread * random.uniform(0.5, 1.5, len(blocks))).astype(np.float16)
                blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
            rows = np.resize(np.roll(blocks, 7919 * number, axis=0), (int(np.prod(shape)) // block, size))
            raw = rows.reshape(*shape[:-1], -1)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Monoplan:
    """Ours, through its own cache."""

    def __init__(self, path: Path, threads: int) -> None:
        import monoplan as mp
        from monoplan.models import AutoModel

        self.lm = mp.compile(AutoModel.from_pretrained(path), options={"threads": threads})

    def run(self, ids: list[int], steps: int) -> tuple[float, float]:
        """Seconds of the prompt, and of a token behind it."""
        cache, begin = self.lm.new_cache(1, len(ids) + steps), time.perf_counter()
        token = self.lm.step(np.array([ids]), cache)["token"]
        prompt = time.perf_counter() - begin
        begin = time.perf_counter()
        for _ in range(steps):
            token = self.lm.step(token[:, None], cache)["token"]
        return prompt, (time.perf_counter() - begin) / steps


class LlamaCpp:
    """llama.cpp, with the times of its server."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(path), 1024, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.port, params.n_threads_http, params.warmup, params.verbosity = 0, 1, False, 0
        self.server = xllamacpp.Server(params)

    def run(self, ids: list[int], steps: int) -> tuple[float, float]:
        """Seconds of the prompt, and of a token behind it."""
        request = {"prompt": ids, "n_predict": steps + 1, "cache_prompt": False, "ignore_eos": True}
        request |= {"temperature": 0.0, "samplers": ["temperature"]}
        answer: Any = self.server.handle_completions(request)
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / steps / 1e3


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kind", choices=KINDS, default="q4_0")
    add("--layers", type=int, default=4)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--repeats", type=int, default=5)
    add("--peers", nargs="+", choices=("monoplan", "llamacpp"), default=["monoplan", "llamacpp"])
    add("--file", type=Path, help="where the model is kept for the next run (default: a temporary file)")
    args = parser.parse_args()
    from monoplan.runtime.machine.limits import measure

    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder, "moe.gguf")
        if not path.exists():
            write(path, args.layers, args.kind)
        engines = {n: {"monoplan": Monoplan, "llamacpp": LlamaCpp}[n](path, args.threads) for n in args.peers}
        random = np.random.default_rng(1)
        short, long = (random.integers(3, WORDS, n).tolist() for n in (PROMPT, LONG))
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for name, engine in engines.items():
            engine.run(short, 2)
            print(f"{name} is ready", flush=True)
        for _ in range(args.repeats):
            for name, engine in engines.items():
                times[name].append((engine.run(long, 1)[0], engine.run(short, STEPS)[1]))
    memory, read = measure(args.threads).memory, active_bytes(args.layers, args.kind)
    print(f"{args.kind}, {args.layers} layers, {args.threads} threads: a token reads {read / 1e6:.1f} MB,")
    print(f"which the read loop ({memory / 1e9:.1f} GB/s) takes {read / memory * 1e3:.2f} ms for")
    for name, found in times.items():
        prompt, token = (statistics.median(column) for column in zip(*found, strict=True))
        best = min(t for _, t in found)
        share = f"{read / memory / token:.0%} of the read loop (best {read / memory / best:.0%})"
        print(f"{name:10} {1 / token:7.1f} tokens/s, {share}; prompt {LONG / prompt:7.0f} tokens/s")


if __name__ == "__main__":
    main()
