"""monoplan and its peers on one CPU, side by side in one run: same weights, shapes, threads and prompt, in turns.

    python benchmarks/cpu_llama.py --model 135m --dtype bf16 --json out.json

Decode: one token after 128. Prefill: 512 tokens. `--contexts 128 1024 2048`: how decode grows with the context, and a
prompt of 2048. `--starts 3`: process start to first token, with an empty cache and with a warm one. Every peer has a
process of its own, which is stopped while another one is timed; a peer that can't run is skipped with its reason. Who
breaks it off (Ctrl-C, SIGTERM) has the table of the rounds that were whole.
Figures are medians over the rounds; the limits of the machine are measured before and after each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from cpu_peers.report import as_json, as_text, summary
from cpu_peers.rounds import Outcome, Plan, run
from cpu_peers.worker import FAKES, LEVELS, PEERS
from cpu_peers.workload import FORMATS, QUANTIZED, SHAPES, Workload

USUAL = [peer for peer in PEERS if peer not in (*FAKES, *LEVELS, "limits")]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=SHAPES, default="135m", help="the shape; weights are random")
    add("--dtype", choices=("bf16", "f32"), default="bf16")
    what = "a GGUF file in a low-bit format instead, or a quantized Hugging Face checkpoint: random blocks"
    add("--format", choices=(*FORMATS, *QUANTIZED), help=what)
    add("--threads", type=int, default=2)
    add("--cpus", type=int, nargs="+", metavar="N", help="CPUs that all peers run on (default: one of each core)")
    add(
        "--peers",
        nargs="+",
        choices=[*USUAL, *LEVELS, *FAKES],
        default=USUAL,
        metavar="PEER",
        help=f"{', '.join(USUAL)} (default: all of these); {', '.join(LEVELS)}",
    )
    add("--repeats", type=int, default=5, help="rounds (default: 5)")
    add("--contexts", type=int, nargs="+", default=[], metavar="N", help="context lengths at which decode is timed")
    add("--starts", type=int, default=0, metavar="N", help="cold and warm starts of each peer (default: none)")
    add("--file", type=Path, help="a model file that peers which can read it are started from as well")
    add("--folder", type=Path, help="where the models are kept for the next run (default: a temporary folder)")
    add("--log", type=Path, help="a file for what the workers print")
    add("--timeout", type=float, default=1800.0, help="seconds that a worker may take for an answer")
    add("--json", type=Path, help="a file for all figures and every single time")
    return parser


def choose_cpus(threads: int) -> list[int]:
    """As many CPUs as threads, each of another core while there are such."""
    allowed, cores = sorted(os.sched_getaffinity(0)), set[str]()
    first: list[int] = []
    rest: list[int] = []
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        (rest if core in cores else first).append(cpu)
        cores.add(core)
    if threads > len(allowed):
        raise SystemExit(f"{threads} threads, but this process may use {len(allowed)} CPUs: ask for fewer (--threads)")
    return (first + rest)[:threads]


def say(text: str, begun: float = time.monotonic()) -> None:
    """Progress, which is not part of the result, with the seconds since the start."""
    print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # the workers are ended with it
    cpus = args.cpus or choose_cpus(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            work=Workload(args.model, args.format or args.dtype, folder),
            peers=args.peers,
            threads=args.threads,
            cpus=cpus,
            repeats=args.repeats,
            cache=folder / "cache",
            contexts=args.contexts,
            starts=args.starts,
            file=args.file and args.file.resolve(),
            timeout=args.timeout,
            log=args.log,
        )
        outcome, ended = Outcome(), None
        try:
            run(plan, outcome, say)
        except (KeyboardInterrupt, SystemExit) as error:
            ended, plan.repeats = error, outcome.keep_whole_rounds()
            if not plan.repeats:
                raise
            say(f"broken off: the table has {plan.repeats} of {args.repeats} rounds")
    found = summary(plan, outcome)
    print(as_text(plan, outcome, found))
    if args.json:
        args.json.write_text(json.dumps(as_json(plan, outcome, found), indent=1))
    if ended is not None:
        raise ended


if __name__ == "__main__":
    main()
