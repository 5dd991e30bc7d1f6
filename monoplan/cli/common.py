"""What the commands that run a model share: arguments, loading and compiling, timings, peak memory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from monoplan.ir.errors import ArgumentError
from monoplan.ir.types import TARGETS

if TYPE_CHECKING:
    from monoplan.llm import CompiledLM
    from monoplan.runtime.ranks.comm import Communicator

DTYPES = ("bfloat16", "float32", "float16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it is compiled."""
    add, own = parser.add_argument, "(default: %(default)s)"
    path = "Hugging Face directory or GGUF file (default: SmolLM2-135M-Instruct, fetched at first use)"
    add("-m", "--model", metavar="PATH", help=path)
    add("-t", "--threads", type=int, metavar="N", help="on the CPU (default: as many as run at once)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help=f"of the weights {own}")
    add("--target", choices=TARGETS, default=TARGETS[0], help=f"where to run {own}")
    add_rank_argument(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int, temp: float, top_p: float) -> None:
    """How tokens are chosen."""
    add, own = parser.add_argument, "(default: %(default)s)"
    add("-n", "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"at most N new tokens {own}")
    add("--temp", "--temperature", type=float, default=temp, help=f"0: always the best token {own}")
    add("--top-k", type=int, default=0, help=f"of the K best tokens only; 0: of all {own}")
    add("--top-p", type=float, default=top_p, help=f"of the best that together have probability P {own}")
    add("--min-p", type=float, default=0.0, help=f"of those with P times the best one's probability {own}")
    add("--repeat-penalty", type=float, default=1.0, help=f"above 1: less of what was said {own}")
    add("--seed", type=int, default=0, help=f"same seed, same text {own}")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate` that the command line gave."""
    return {
        "max_new_tokens": args.max_tokens,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repeat_penalty,
        "seed": args.seed,
        "stop": args.stop,
    }


class Timings:
    """Seconds and tokens of each stage; printed on stderr at the end, also after Ctrl-C."""

    def __init__(self) -> None:
        self.load = self.compile = self.prompt = self.generation = 0.0
        self.prompt_tokens = self.new_tokens = 0
        self._last = 0.0

    def begin(self, prompt_tokens: int) -> None:
        """A prompt is about to run."""
        self.prompt_tokens += prompt_tokens
        self._first, self._last = True, time.perf_counter()

    def token(self, *_: Any) -> None:
        """A token has come; the first one took the time of the prompt."""
        now = time.perf_counter()
        if self._first:
            self.prompt += now - self._last
        else:
            self.generation += now - self._last
            self.new_tokens += 1
        self._first, self._last = False, now

    def __str__(self) -> str:
        lines = [f"load        {self.load:8.2f} s", f"compile     {self.compile:8.2f} s"]
        for name, seconds, count in (
            ("prompt", self.prompt, self.prompt_tokens),
            ("generation", self.generation, self.new_tokens),
        ):
            if seconds > 0:
                lines.append(f"{name:<11} {count / seconds:8.1f} tokens/s  ({count} tokens, {seconds:.2f} s)")
        if (peak := peak_memory()) is not None:
            lines.append(f"peak memory {peak / 2**20:8.0f} MiB")
        return "\n".join(lines)

    def print(self) -> None:
        """Writes them to stderr, after what was streamed to stdout."""
        sys.stdout.flush()
        print(f"\n{self}", file=sys.stderr, flush=True)


def peak_memory() -> int | None:
    """The most memory this process ever had, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def load(args: argparse.Namespace, timings: Timings) -> CompiledLM:
    """The model of the command line, compiled."""
    if args.threads is not None and args.threads < 1:
        raise ArgumentError(f"--threads must be 1 or more, got {args.threads}")
    comm = ranks(args)
    path = Path(args.model) if args.model else from_first(comm, _default_model)
    import monoplan
    from monoplan.models.auto import AutoLlamaModel

    begin = time.perf_counter()
    model = AutoLlamaModel.from_pretrained(path, dtype=args.dtype, device=args.target)
    loaded = time.perf_counter()
    llm: CompiledLM = monoplan.compile(model, target=args.target, options={"threads": args.threads}, tp=comm)
    llm.prepare(**(sampling(args) if hasattr(args, "temp") else {}))
    timings.load, timings.compile = loaded - begin, time.perf_counter() - loaded
    return llm


def _default_model() -> Path:
    from monoplan.models.load.default_model import default_model_path

    return default_model_path()


def has_chat(llm: CompiledLM) -> bool:
    """Whether the model came with a chat format."""
    return llm.tokenizer is not None and llm.tokenizer.chat_template is not None


# Commands under mpirun: every rank runs the same command; rank 0 reads and prints, and an error ends all of them.


T = TypeVar("T")


def add_rank_argument(parser: argparse.ArgumentParser) -> None:
    """--tp."""
    what = "divide the model between the ranks of mpirun (default: auto, if there are several)"
    parser.add_argument("--tp", choices=("auto", "mpi", "nccl", "none"), default="auto", help=what)


def ranks(args: argparse.Namespace) -> Communicator | None:
    """The group of mpirun, if the command is to be divided. Ranks other than 0 print nothing but errors."""
    from monoplan.runtime.ranks.comm import communicator, launched

    if getattr(args, "group", None) is not None:  # made before, in this command
        return args.group  # type: ignore[no-any-return]
    mode = getattr(args, "tp", "none")
    if mode == "none" or (mode == "auto" and not launched()):
        return None
    comm = args.group = communicator("nccl" if mode == "nccl" else "mpi")
    assert comm is not None
    if comm.rank > 0 and sys.stdout.name != os.devnull:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        args.quiet = True
    return comm


def from_first(comm: Communicator | None, make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, which alone has the terminal."""
    if comm is None:
        return make()
    shared: T = comm.share(make() if comm.rank == 0 else None)
    return shared


def end_ranks(error: BaseException | None, status: int) -> None:
    """After a failure of this rank: tells of it and ends the others, which would wait; returns if there are none."""
    module: Any = sys.modules.get("monoplan.runtime.ranks.mpi")
    if module is not None:
        module.end_all(error, status)
