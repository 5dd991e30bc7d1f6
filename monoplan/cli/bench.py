"""`monoplan bench`: tokens per second of a prompt (pp) and of generation (tg), as llama-bench counts them."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoplan.cli.common import Timings, UsageError, add_model_options, load, peak_memory, real, whole

if TYPE_CHECKING:
    from monoplan.llm import CompiledLM


def add_bench(parser: argparse.ArgumentParser) -> None:
    """The options of bench."""
    add, own = parser.add_argument, "(default: %(default)s)"
    add("-p", "--n-prompt", type=whole(0), default=512, metavar="N", help=f"tokens of the prompt {own}")
    add("-n", "--n-gen", type=whole(0), default=128, metavar="N", help=f"tokens to generate {own}")
    add("-r", "--repetitions", type=whole(1), default=5, metavar="N", help=f"times each {own}")
    add("--json", action="store_true", help="a JSON object in place of the table")
    add("--profile", metavar="FILE", nargs="?", const="", help="the time of each step instead; FILE: a Chrome trace")
    search = "on a GPU: first search better constants (default: 30 s)"
    add("--tune", type=real(0), nargs="?", const=30.0, metavar="SECONDS", help=search)
    add("--limits", action="store_true", help="measure what this machine can do instead")
    add_model_options(parser)


def bench(args: argparse.Namespace) -> int:
    """Prints the table, or JSON; a note on stderr where the memory's bandwidth is not known."""
    if args.limits:
        from monoplan.runtime.machine.limits import measure, measure_target

        print(measure_target("cuda", 1) if args.target == "cuda" else measure(args.threads, fresh=True))
        return 0
    nothing = args.profile is None and args.n_prompt == args.n_gen == 0
    if nothing and args.tune is None:
        raise UsageError("there is nothing to measure: --n-prompt and --n-gen are both 0", fix="give one of them")
    timings = Timings()
    llm = load(args, timings)
    quiet = getattr(args, "quiet", False)  # a rank other than 0
    if args.tune is not None:
        before, after = llm.tune(args.tune, min(1024, llm.max_length - 1))
        print(f"tuned: {before:.3f} -> {after:.3f} ms a token, kept for this device and model", file=sys.stderr)
    if args.profile is not None:
        # The one token behind the prompt needs room, too.
        return _profile(llm, _fitting("--n-prompt", args.n_prompt, llm.max_length - 1, quiet), args.profile)
    if nothing:
        return 0  # --tune alone
    from monoplan.runtime.machine.limits import memory_bandwidth

    bandwidth = memory_bandwidth(args.target)
    rows = [
        _row(llm, name, _fitting(option, count, llm.max_length, quiet), step, args.repetitions, bandwidth)
        for name, option, count, step in (
            ("pp", "--n-prompt", args.n_prompt, _prompt),
            ("tg", "--n-gen", args.n_gen, _generation),
        )
        if count > 0
    ]
    about = {
        "model": Path(llm.name_or_path).name,
        "parameters": llm.num_parameters,
        "weight_bytes": llm.weight_bytes,
        "dtype": args.dtype,
        "target": args.target,
        "load_s": timings.load,
        "pack_s": timings.pack,
        "compile_s": timings.compile,
        "memory_bandwidth": bandwidth,
        "peak_memory": peak_memory(),
    }
    if args.json:
        print(json.dumps({**about, "tests": rows}, indent=2))
        return 0
    print(_table(about, rows))
    if bandwidth is None and not quiet:
        print("the memory's bandwidth was not measured: no share of it is shown", file=sys.stderr)
    timings.print_start(args)
    return 0


def _fitting(option: str, count: int, most: int, quiet: bool) -> int:
    """As many tokens as the context has room for; says so where they are fewer than requested."""
    if count > most and not quiet:
        print(f"{option} {count} is cut to {most}: the context of the model has no room for more", file=sys.stderr)
    return min(count, most)


def _profile(llm: CompiledLM, count: int, file: str) -> int:
    """Where the time of a prompt and of one token goes."""
    from monoplan.cli.model_argument import step_arguments

    ids = _ids(llm, max(count, 1))
    # Without a prompt the one token is the first of all.
    for name, past in (("prompt", False), ("one token", True)) if count > 0 else (("one token", False),):
        profile = llm.compiled.profile(**step_arguments(llm, ids, past=past))
        print(f"{name}: {profile}")
    if file:
        print(f"trace of one token in {profile.save(file)}", file=sys.stderr)
    return 0


def _ids(llm: CompiledLM, count: int) -> Any:
    import numpy as np

    return np.random.Generator(np.random.Philox(0)).integers(0, llm.config.vocab_size, (1, count))


def _row(llm: CompiledLM, name: str, count: int, run_once: Any, times: int, bandwidth: float | None) -> dict[str, Any]:
    run_once(llm, min(count, 8))  # the first run touches every page of the weights
    speeds = []
    for _ in range(times):
        begin = time.perf_counter()
        run_once(llm, count)
        speeds.append(count / (time.perf_counter() - begin))
    mean = statistics.fmean(speeds)
    row: dict[str, Any] = {
        "test": f"{name}{count}",
        "tokens_per_s": mean,
        "stdev": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "samples": speeds,
    }
    if name == "tg":
        # Each token reads every weight once; the embedding table is left out, where only a row of it is read.
        row["bytes_per_s"] = mean * llm.bytes_per_token
        if bandwidth:
            row["bandwidth_share"] = row["bytes_per_s"] / bandwidth
    return row


def _prompt(llm: CompiledLM, count: int) -> None:
    llm.step(_ids(llm, count), llm.new_cache(1, count))


def _generation(llm: CompiledLM, count: int) -> None:
    import numpy as np

    if llm.target == "cuda":  # as generate does it: the tokens stay on the device
        llm.generate_ids([0], count, eos_token_id=())
        return
    cache, token = llm.new_cache(1, count), np.zeros((1, 1), np.int64)
    for _ in range(count):
        token = llm.step(token, cache)["token"][:, None]


def _table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    head = ["model", "size", "params", "dtype", "target", "test", "tokens/s", "GB/s"]
    if about["memory_bandwidth"]:
        head.append("of memory")
    lines = []
    for row in rows:
        speed = f"{row['tokens_per_s']:.2f} ± {row['stdev']:.2f}"
        cells = [
            about["model"],
            f"{about['weight_bytes'] / 2**20:.0f} MiB",
            f"{about['parameters'] / 1e6:.1f} M",
            about["dtype"],
            about["target"],
            row["test"],
            speed,
            f"{row['bytes_per_s'] / 1e9:.2f}" if "bytes_per_s" in row else "",
        ]
        if about["memory_bandwidth"]:
            cells.append(f"{row['bandwidth_share']:.0%}" if "bandwidth_share" in row else "")
        lines.append(cells)
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    lines = [head, ["-" * w for w in widths], *lines]
    texts = [" | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(f"| {text} |" for text in texts)
