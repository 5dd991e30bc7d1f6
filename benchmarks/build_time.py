"""How long a plan takes: cold (an empty cache, the C compiler runs) and warm (another process made it before).

    python benchmarks/build_time.py [--cold 3] [--warm 7]

Every number is the median over fresh processes, in milliseconds. "machine" is what compile() asks the CPU and the C
compiler once and then remembers; "load" is the sum, all that compile() does but for packing the weights, whose time is
that of the model's size; "whole compile()" has the weights and Python's imports in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

SMALL = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
         "num_key_value_heads": 4, "max_position_embeddings": 1024, "attention_bias": False}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    **{f"LLaMA, {n} layers": {**SMALL, "num_hidden_layers": n} for n in (2, 8, 32)},
    "SmolLM2 135M, bf16": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "attention_bias": False,
        "tie_word_embeddings": True, "dtype": "bfloat16",
    },
}  # fmt: skip
CODE = """
import json, sys, time
import numpy
start = time.perf_counter()
import monoplan as mp
from monoplan.models import LlamaConfig, LlamaForCausalLM
imported = time.perf_counter()
model = LlamaForCausalLM.from_config(LlamaConfig(**json.loads(sys.argv[1])))
ready = time.perf_counter()
llm = mp.compile(model).prepare()
done = time.perf_counter()
laps = dict(llm.stats.milliseconds)
laps.update(total=(done - ready) * 1e3, hits=llm.stats.cache_hits, lines=llm.source().count("\\n"))
print(json.dumps(laps))
"""


def run(config: dict[str, Any], folder: str, bytecode: str) -> dict[str, float]:
    """One process that compiles a model with a cache in a folder."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"MONOPLAN_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": bytecode}
    command = [sys.executable, "-c", CODE, json.dumps(config)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(out.stdout)
    stages = ("machine", "trace", "passes", "codegen", "build")  # a plan from the cache skips some
    found["load"] = sum(found.get(name, 0.0) for name in stages)
    return found


def median(runs: list[dict[str, float]], name: str) -> str:
    return f"{statistics.median(r[name] for r in runs):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=3)
    parser.add_argument("--warm", type=int, default=7)
    args = parser.parse_args()
    before = os.getloadavg()[0]
    print(
        "| model | source lines | cold: machine | trace | passes | codegen | gcc | load | whole compile() "
        "| warm: load | whole compile() |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as bytecode:
        for name, config in MODELS.items():
            cold, warm = [], []
            with tempfile.TemporaryDirectory() as folder:
                run(config, folder, bytecode)  # leaves Python's own bytecode behind
            for _ in range(args.cold):
                with tempfile.TemporaryDirectory() as folder:
                    cold.append(run(config, folder, bytecode))
                    warm += [run(config, folder, bytecode) for _ in range(-(-args.warm // args.cold))]
            assert all(r["hits"] for r in warm) and not any(r["hits"] for r in cold)
            names = ("lines", "machine", "trace", "passes", "codegen", "build", "load", "total")
            cells = [median(cold, k) for k in names]
            cells += [median(warm, k) for k in ("load", "total")]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    cores = os.cpu_count()
    print(f"\nLoad average {before:.1f} before and {os.getloadavg()[0]:.1f} after, on {cores} cores.")


if __name__ == "__main__":
    main()
