"""Decode of one model by one process with n threads, and by n ranks of one thread each under mpirun.

    python benchmarks/tensor_parallel.py                      # the shape of Llama 3.2 1B, random (2.5 GB on disk)
    python benchmarks/tensor_parallel.py --shape 135m
    python benchmarks/tensor_parallel.py --model DIR --ranks 2 --rounds 3

The two take turns, so that a machine that others use treats them alike; the medians are compared. The load of the
machine is printed, too: figures from a busy machine mean little, all the more where ranks wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # vocabulary, width, inner width, layers, heads, key/value heads
    "1b": dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
               num_attention_heads=32, num_key_value_heads=8),
    "135m": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                 num_attention_heads=9, num_key_value_heads=3),
    "tiny": dict(vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
                 num_attention_heads=8, num_key_value_heads=2),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (default: random weights of --shape)")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if shutil.which("mpirun") is None:
        print("there is no mpirun on PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="monoplan-tp-") as folder:
        if args.model is None:
            make_model(args.shape, Path(folder))
            args.model = folder
        return compare(args)


def make_model(shape: str, folder: Path) -> None:
    """A checkpoint of random weights: every rank reads its part of the same file, as it would of a real one.

    Drawing a billion numbers takes longer than the benchmark. A million are drawn, and repeated in every matrix, each
    time from another place on: no product reads the same numbers twice while they are in a cache.
    """
    import numpy as np

    from monoplan.frontend.parameter import no_init
    from monoplan.models import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[shape], attention_bias=False, tie_word_embeddings=True, dtype="bfloat16")
    with no_init():
        model = LlamaForCausalLM(config)
    drawn = np.random.default_rng(0).standard_normal(1_000_003, np.float32) * np.float32(config.initializer_range)
    for number, parameter in enumerate(model.parameters()):
        numbers = np.roll(drawn.astype(parameter.dtype.numpy), number * 7919)
        values = np.resize(numbers, parameter.full_shape) if len(parameter.full_shape) > 1 else None
        parameter.load(np.ones(parameter.full_shape, np.float32) if values is None else values)
    model.save_pretrained(folder)


def compare(args: argparse.Namespace) -> int:
    """Runs both in turns and prints the medians."""
    own = [
        sys.executable,
        __file__,
        "--worker",
        "--model",
        args.model,
        "--tokens",
        str(args.tokens),
        "--prompt",
        str(args.prompt),
        "--dtype",
        args.dtype,
    ]
    root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    launch = ["mpirun", *root, "--bind-to", "core", "-n", str(args.ranks), *own]
    environ = {**os.environ, "OMP_PROC_BIND": "true"}
    kinds = {
        f"1 process, {args.ranks} threads": (own, {**environ, "MONOPLAN_NUM_THREADS": str(args.ranks)}),
        f"{args.ranks} ranks, 1 thread each": (launch, {**environ, "MONOPLAN_NUM_THREADS": "1"}),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for round_ in range(args.rounds):
        for name, (command, env) in kinds.items():
            load = os.getloadavg()[0]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            result = {**json.loads(done.stdout.strip().splitlines()[-1]), "load_before": load}
            found[name].append(result)
            print(
                f"round {round_}: {name}: decode {result['decode']:.2f} tokens/s, prompt {result['prompt']:.1f} "
                f"tokens/s, peak memory of a process {result['peak'] / 2**20:.0f} MiB, load {load:.2f}",
                file=sys.stderr,
            )
    medians = {
        name: {key: statistics.median(r[key] for r in runs) for key in ("decode", "prompt", "peak")}
        for name, runs in found.items()
    }
    one, many = medians.values()
    ratio = many["decode"] / one["decode"]
    if args.json:
        print(json.dumps({"medians": medians, "decode_ratio": ratio, "runs": found}, indent=2))
    else:
        for name, m in medians.items():
            print(
                f"{name}: decode {m['decode']:.2f} tokens/s, prompt {m['prompt']:.1f} tokens/s, "
                f"peak memory of a process {m['peak'] / 2**20:.0f} MiB"
            )
        print(f"decode of the ranks: {ratio:.2f} x the one process")
    return 0


def worker(args: argparse.Namespace) -> int:
    """One process of either kind; rank 0 prints the result."""
    import resource

    import numpy as np

    import monoplan as mp
    from monoplan.models import AutoLlamaModel
    from monoplan.runtime.ranks.comm import launched, mpi

    comm = mpi() if launched() else None
    model = AutoLlamaModel.from_pretrained(args.model, dtype=args.dtype)
    llm = mp.compile(model, tp=comm).prepare()
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, args.prompt))
    llm.step(ids[:, :4], llm.new_cache(1, 16))  # touches every page of the weights
    cache = llm.new_cache(1, args.prompt + args.tokens + 1)
    begin = time.perf_counter()
    token = llm.step(ids, cache)["token"][:, None]
    prompt = args.prompt / (time.perf_counter() - begin)
    times = []
    for _ in range(args.tokens):
        begin = time.perf_counter()
        token = llm.step(token, cache)["token"][:, None]
        times.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peaks = comm.collect(peak) if comm is not None else [peak]
    if comm is None or comm.rank == 0:
        print(json.dumps({"decode": 1 / statistics.median(times), "prompt": prompt, "peak": max(peaks)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
