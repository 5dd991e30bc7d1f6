"""What commands share: options and their checks, loading, timings, ranks. Nothing heavy is imported at the top."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from monoplan.ir.errors import ArgumentError

if TYPE_CHECKING:
    from monoplan.llm import CompiledLM
    from monoplan.runtime.ranks.comm import Communicator

INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + the number of the signal, as shells count
# Packages that not every user needs -> the extra that brings them.
EXTRAS = {
    "safetensors": "llm", "tokenizers": "llm", "gguf": "llm", "cupy": "cuda", "mpi4py": "mpi", "huggingface_hub": "hub",
    "starlette": "serve", "uvicorn": "serve", "prometheus_client": "serve", "llguidance": "serve",
}  # fmt: skip
TARGETS = ("cpu", "cuda", "reference")  # those of monoplan.ir.types, which needs numpy
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_DTYPES = ("int8", *DTYPES[1:])
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
DEFAULT_PROMPT = "Once upon a time"
CHECKPOINT = "a Hugging Face directory, a GGUF file, or org/name at the hub"
OWN_MODEL = f"{CHECKPOINT}, or file.py[:Name] or module:name with model() and specs()"
DEFAULT_MODEL = "(default: SmolLM2-135M-Instruct, fetched at first use)"


class UsageError(ArgumentError):
    """A command line that can't be run."""


# Options: each is defined once, for all commands that have it.


def whole(least: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number, of at least `least`."""
    return _number(int, "a whole number", least)


def real(least: float | None = None) -> Callable[[str], float]:
    """The type of an option that is a number."""
    return _number(float, "a number", least)


def _number(kind: Callable[[str], Any], name: str, least: float | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}") from None
        if least is not None and not value >= least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return value

    return parse


def add_model_options(parser: argparse.ArgumentParser, *, positional: bool = False, own: bool = False) -> None:
    """Which model, and how it is compiled; `own`: it may be a Module of the user's own, in any floating point type."""
    add, default = parser.add_argument, "(default: %(default)s)"
    if positional:
        add("model_path", nargs="?", metavar="MODEL", help="the same as --model")
    add("-m", "--model", metavar="MODEL", help=f"{OWN_MODEL if own else CHECKPOINT} {DEFAULT_MODEL}")
    if not own:
        add("--adapter", metavar="PATH", help="a LoRA adapter, a PEFT directory, which is merged into the weights")
    dtypes = (*DTYPES, "float64") if own else DTYPES
    chosen = "(default: the Module's own; auto for checkpoints)" if own else default
    add(
        "--dtype",
        type=lambda text: _SHORT.get(text, text),
        choices=dtypes,
        default=None if own else DTYPES[0],
        help=f"of the weights; auto: a file's own low-bit types, else bfloat16 {chosen}",
    )
    what = "of keys and values; int8: with a scale for each head and token (default: what fits the weights)"
    add("--kv-dtype", choices=KV_DTYPES, help=what)
    add_target(parser)
    add("-t", "--threads", type=whole(1), metavar="N", help="on the CPU (default: as many as run at once)")
    if not own:
        what = "divide the model between the ranks of mpirun (default: auto, if there are several)"
        add("--tp", choices=("auto", "mpi", "nccl", "none"), default="auto", help=what)


def add_target(parser: argparse.ArgumentParser) -> None:
    """--target."""
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0], help="where to run (default: %(default)s)")


def add_input_options(parser: argparse.ArgumentParser, default: str) -> None:
    """What arrays a graph or a Module is run with."""
    add = parser.add_argument
    add("--inputs", metavar="FILE.npz", help=f"arrays by name (default: {default})")
    add("--size", action="append", default=[], metavar="NAME=N", help="the value of a symbolic size; may be repeated")
    add("--seed", type=whole(0), default=0, metavar="N", help="of random arrays (default: %(default)s)")


# Options of `generate` and what it calls them.
_SETTINGS = {
    "max_new_tokens": ("max_tokens", "--max-tokens"),
    "temperature": ("temp", "--temp"),
    "top_k": ("top_k", "--top-k"),
    "top_p": ("top_p", "--top-p"),
    "min_p": ("min_p", "--min-p"),
    "repetition_penalty": ("repeat_penalty", "--repeat-penalty"),
    "seed": ("seed", "--seed"),
    "stop": ("stop", "--stop"),
}


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int, temp: float, top_p: float) -> None:
    """How tokens are chosen."""
    add, own = parser.add_argument, "(default: %(default)s)"
    most = f"at most N new tokens; -1: until the text ends or the context is full {own}"
    add("-n", "--max-tokens", type=whole(), default=max_tokens, metavar="N", help=most)
    add("--temp", "--temperature", type=real(), default=temp, metavar="T", help=f"0: always the best token {own}")
    add("--top-k", type=whole(), default=0, metavar="K", help=f"of the K best tokens only; 0: of all {own}")
    best = f"of the best that together have probability P {own}"
    add("--top-p", type=real(), default=top_p, metavar="P", help=best)
    least = f"of those with P times the best one's probability {own}"
    add("--min-p", type=real(), default=0.0, metavar="P", help=least)
    add("--repeat-penalty", type=real(), default=1.0, metavar="X", help=f"above 1: less of what was said {own}")
    add("--seed", type=whole(), default=0, metavar="N", help=f"same seed, same text {own}")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given again")
    add(
        "--lookup",
        action="store_true",
        help="guess tokens from the text so far and check several at once: the same text",
    )
    draft = "a smaller model with the same tokenizer that guesses tokens: the same text"
    add("--draft", metavar="MODEL", help=draft)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate` that the command line gave, checked."""
    from monoplan.models.generate.decoding import Settings

    given = {name: getattr(args, own) for name, (own, _) in _SETTINGS.items()}
    try:
        Settings(**{**given, "stop": tuple(given["stop"])})
    except ArgumentError as error:
        name, _, rest = error.what.partition(" ")
        raise UsageError(f"{_SETTINGS[name][1]} {rest}") from None
    return given


def decoded(data: bytes, what: str, fix: str = "", encoding: str = "utf-8") -> str:
    """Text that came from a file or from stdin; an error that names the first byte that is none."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper()
        why = f"byte {data[error.start]:#04x} at offset {error.start} is not {name} text"
        raise ArgumentError(f"can't read {what}", why=why, fix=fix or f"convert it to {name}") from None


# Timings and memory.


class Timings:
    """Seconds and tokens of each stage; printed on stderr at the end, also after Ctrl-C."""

    def __init__(self) -> None:
        self.load = self.pack = self.compile = self.prompt = self.generation = 0.0
        self.prompt_tokens = self.new_tokens = 0
        self._last = 0.0

    def begin(self, prompt_tokens: int) -> None:
        """A prompt is about to run."""
        self.prompt_tokens += prompt_tokens
        self._first, self._last = True, time.perf_counter()

    def compiled(self, llm: CompiledLM, load: float, compile: float) -> None:  # noqa: A002
        """A model was opened, and its first plan made: reading and packing weights is told apart from the rest."""
        laps = llm.stats.milliseconds
        mapped, self.pack = laps.get("load", 0.0) / 1e3, laps.get("pack", 0.0) / 1e3
        self.load, self.compile = load + mapped, max(0.0, compile - mapped - self.pack)

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
        stages = {"load": self.load, "pack": self.pack, "compile": self.compile}
        lines = [f"{name:<11} {seconds:8.2f} s" for name, seconds in stages.items()]
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

    def print_start(self, args: argparse.Namespace) -> None:
        """Writes those of the start to stderr, unless this is a rank that prints nothing."""
        if not getattr(args, "quiet", False):
            print(f"load {self.load:.2f} s, pack {self.pack:.2f} s, compile {self.compile:.2f} s", file=sys.stderr)


def peak_memory() -> int | None:
    """The most memory this process ever had, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Loading.


def load(args: argparse.Namespace, timings: Timings, prepare: bool = True) -> CompiledLM:
    """The model of the command line, compiled; all values are checked before anything is loaded.

    `prepare`: now, and not at the first use.
    """
    settings = sampling(args) if hasattr(args, "temp") else {}
    comm = ranks(args)
    check_threads(args)
    model_path = from_first(comm, lambda: find_model(args.model))  # the others find it in the cache
    import monoplan
    from monoplan.models.auto import AutoLlamaModel

    begin = time.perf_counter()
    model = AutoLlamaModel.from_pretrained(model_path, dtype=args.dtype, device=args.target, adapter=args.adapter)
    loaded = time.perf_counter()
    options = {"threads": args.threads, "kv_dtype": args.kv_dtype}
    llm: CompiledLM = monoplan.compile(model, target=args.target, options=options, tp=comm)
    if not prepare:
        return llm
    llm.prepare(**settings)
    args.drafts = _drafts(args, comm)
    timings.compiled(llm, loaded - begin, time.perf_counter() - loaded)
    return llm


def _drafts(args: argparse.Namespace, comm: Communicator | None) -> dict[str, Any]:
    """The arguments of `generate` that say where guesses come from."""
    from monoplan.models.auto import AutoModel

    found: dict[str, Any] = {"lookup": True} if getattr(args, "lookup", False) else {}
    if (draft := getattr(args, "draft", None)) is not None:
        path = from_first(comm, lambda: find_model(draft))
        found["draft"] = AutoModel.from_pretrained(path, dtype=args.dtype, device=args.target)
    return found


def find_model(given: str | None) -> str:
    """What from_pretrained takes: the given path or hub id, or the path of the default model; it is on disk then."""
    if given is None:
        from monoplan.models.load.default_model import default_model_path

        return str(default_model_path())
    from monoplan.models.load.hub import local_path

    local_path(given)
    return given


def check_threads(args: argparse.Namespace) -> None:
    """An error for an impossible number of threads, a warning for more than run at once."""
    from monoplan.runtime.machine.threads import check_threads, default_threads

    count = default_threads().count if args.threads is None else check_threads(args.threads)
    best = default_threads({})
    if count > best.count and args.target == "cpu" and not getattr(args, "quiet", False):
        what = f"{count} threads are more than run at once, and slower than {best.count}"
        print(f"monoplan: {what} ({best.reason.partition(': ')[2]})", file=sys.stderr)


def has_chat(llm: CompiledLM) -> bool:
    """Whether the model came with a chat format."""
    return llm.tokenizer is not None and llm.tokenizer.chat_template is not None


# Commands under mpirun: every rank runs the same command; rank 0 reads and prints, and an error ends all of them.


T = TypeVar("T")


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
