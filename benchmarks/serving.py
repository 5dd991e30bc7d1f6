"""Servers under load: closed loops, Poisson arrivals of mixed lengths, and prompts with a shared beginning.

`monoplan serve` and llama.cpp's server run the same GGUF file with the same number of threads, each in a process of its
own, and are asked by the same client over HTTP. They take turns; a table has the median of the turns. Times are what a
client sees: to the first token, and between two events of a stream.

    python benchmarks/serving.py                       # SmolLM2-135M, 8 streams of 128 in, 128 out
    python benchmarks/serving.py --model FILE.gguf --streams 32 --rate 4 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from monoplan.models.load.default_model import default_model_path
from monoplan.runtime.machine.threads import default_threads

PREFIX = 1000  # tokens of the shared beginning


@dataclass
class Seen:
    """What a client saw of one answer."""

    began: float
    first: float = 0.0
    events: list[float] = field(default_factory=list)  # when text came
    tokens: int = 0  # as the server counts them


@dataclass(frozen=True)
class Ask:
    """One request: token ids, and how many to write."""

    prompt: list[int]
    answer: int


async def ask(port: int, request: Ask, done: Callable[[], Any]) -> Seen:
    """Streams one answer through a bare socket: a client that costs little, on the cores that the server needs."""
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "max_tokens": request.answer,
        "temperature": 0,
        "ignore_eos": True,
    }
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    seen = Seen(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    status, held = await reader.readline(), b""
    while chunk := await reader.read(1 << 16):
        now = time.perf_counter()
        held += chunk
        *lines, held = held.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"])
            if (usage := event.get("usage")) is not None:
                seen.tokens = usage["completion_tokens"]
            if event["choices"] and event["choices"][0]["text"]:
                seen.first = seen.first or now
                seen.events.append(now)
    writer.close()
    if b" 200 " not in status or not seen.tokens:
        raise RuntimeError(f"the server answered {status!r} {held[:200]!r}")
    done()
    return seen


async def closed(port: int, asks: Sequence[Ask], streams: int, done: Callable[[], Any]) -> list[Seen]:
    """So many clients, each of which asks again when it has its answer."""
    left, seen = iter(asks), []

    async def client() -> None:
        for request in left:
            seen.append(await ask(port, request, done))

    await asyncio.gather(*(client() for _ in range(streams)))
    return seen


async def opened(port: int, asks: Sequence[Ask], rate: float, seed: int, done: Callable[[], Any]) -> list[Seen]:
    """Requests arrive at random, whether the server is ready or not."""
    clock, tasks = random.Random(seed), []
    for request in asks:
        tasks.append(asyncio.create_task(ask(port, request, done)))
        await asyncio.sleep(clock.expovariate(rate))
    return await asyncio.gather(*tasks)


def row(seen: Sequence[Seen]) -> dict[str, float]:
    """Tokens a second of all together, and times in milliseconds."""
    span = max(s.events[-1] for s in seen) - min(s.began for s in seen)
    first = sorted((s.first - s.began) * 1e3 for s in seen)
    between = sorted((b - a) * 1e3 for s in seen for a, b in zip(s.events, s.events[1:], strict=False)) or [0.0]
    made = {"tokens/s": sum(s.tokens for s in seen) / span}
    for name, times in (("first", first), ("between", between)):
        made[f"{name} p50"] = times[len(times) // 2]
        made[f"{name} p99"] = times[min(len(times) - 1, int(len(times) * 0.99))]
    return made


class Prompts:
    """Random ids, none of which begins like another."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.draw, self.vocabulary = random.Random(seed), vocabulary

    def ids(self, count: int) -> list[int]:
        """A prompt of plain tokens."""
        return self.draw.choices(range(min(1000, self.vocabulary // 2), self.vocabulary), k=count)

    def mixed(self, prompt: int, answer: int, count: int, prefixes: Sequence[list[int]]) -> list[Ask]:
        """Lengths around the given ones; half of the prompts begin with one of a few texts."""
        made = []
        for number in range(count):
            size = max(8, int(self.draw.lognormvariate(0, 0.7) * prompt))
            before = self.draw.choice(prefixes) if prefixes and number % 2 else []
            made.append(
                Ask([*before, *self.ids(min(size, 4 * prompt))], max(4, int(self.draw.uniform(0.25, 1.75) * answer)))
            )
        return made


# The servers.


@contextlib.contextmanager
def running(command: Sequence[str], mark: str) -> Iterator[int]:
    """The port of a server that is started for the block, and ended with it."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the block)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = next((line for line in process.stdout if mark in line), None)
        if found is None:
            raise ConnectionError("it did not start")
        yield int(found.split(mark)[1].split()[0].rstrip("/").rpartition(":")[2])
    except OSError as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if process.poll() is None:
            raise
        log.seek(0)
        told = "".join(log.readlines()[-5:])
        raise RuntimeError(f"{' '.join(command)}: {error}; status {process.poll()}; {told}") from error
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def llama_server(path: str, threads: int, streams: int, context: int) -> None:
    """llama.cpp's server by xllamacpp, until the process is ended."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = path, streams, streams * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.port, params.n_threads_http, params.verbosity = 0, 4, 0
    server = xllamacpp.Server(params)
    print(f"listening: {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """How each server is started, and what stands before its address."""
    python, file = [sys.executable], str(args.model)
    own = [
        "-m",
        "monoplan",
        "serve",
        file,
        "--port",
        "0",
        "-q",
        "-t",
        str(args.threads),
        "--streams",
        str(args.streams),
        "--dtype",
        args.dtype,
    ]
    peer = [
        __file__,
        "--model",
        file,
        "--threads",
        str(args.threads),
        "--streams",
        str(args.streams),
        "--as-llama-server",
    ]
    peer += ["--context", str(args.context)]
    return {"monoplan": (python + own, " at "), "llama-server": (python + peer, "listening: ")}


# The loads.


Load = Callable[[int, Callable[[], Any]], Awaitable[list[Seen]]]


def loads(args: argparse.Namespace, vocabulary: int, turn: int) -> dict[str, tuple[int, Load]]:
    """Name of a load -> its number of requests, and what runs it. Each turn has prompts of its own."""
    prompts = Prompts(vocabulary, 1000 * turn + args.seed)
    few = max(2, args.requests // args.streams // 2)
    single = [Ask(prompts.ids(args.prompt), args.answer) for _ in range(few)]
    many = [Ask(prompts.ids(args.prompt), args.answer) for _ in range(args.requests)]
    prefixes = [prompts.ids(args.prompt) for _ in range(3)]
    mixed = prompts.mixed(args.prompt, args.answer, args.requests, prefixes)
    shared = prompts.ids(PREFIX)
    with_prefix = [Ask([*shared, *prompts.ids(args.prompt)], 8) for _ in range(6)]
    without = [Ask(prompts.ids(args.prompt), 8) for _ in range(5)]
    made: dict[str, tuple[int, Load]] = {
        "1 stream": (few, lambda port, done: closed(port, single, 1, done)),
        f"{args.streams} streams": (args.requests, lambda port, done: closed(port, many, args.streams, done)),
        f"open, {args.rate:g}/s": (args.requests, lambda port, done: opened(port, mixed, args.rate, turn, done)),
        f"prefix {PREFIX}, new": (1, lambda port, done: closed(port, with_prefix[:1], 1, done)),
        f"prefix {PREFIX}, known": (5, lambda port, done: closed(port, with_prefix[1:], 1, done)),
        "no prefix": (5, lambda port, done: closed(port, without, 1, done)),
    }
    return {name: load for name, load in made.items() if not args.loads or any(word in name for word in args.loads)}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the servers in turns and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="a GGUF file (default: SmolLM2-135M-Instruct)")
    add("--peers", nargs="+", default=["monoplan", "llama-server"], choices=["monoplan", "llama-server"])
    add("--loads", nargs="*", help="only those whose names have one of these words: stream, open, prefix ...")
    add("--streams", type=int, default=8)
    add("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    add("--answer", type=int, default=128, help="tokens of an answer (default: 128)")
    add("--requests", type=int, default=32, help="of each load (default: 32)")
    add("--rate", type=float, default=1.0, help="requests a second of the open loop (default: 1)")
    add("--repeats", type=int, default=3, help="turns of each server (default: 3)")
    add("--threads", type=int, default=default_threads().count)
    add("--context", type=int, default=2048, help="tokens that a stream of llama-server has room for")
    add("--dtype", default="auto", help="of monoplan's weights (default: auto, the file's own low-bit types)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write every turn to this file")
    add("--as-llama-server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.model = args.model or default_model_path()
    if args.as_llama_server:
        return llama_server(str(args.model), args.threads, args.streams, args.context)
    from monoplan.models.auto import AutoLlamaModel

    vocabulary = AutoLlamaModel.from_pretrained(args.model).config.vocab_size
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    total = args.repeats * len(args.peers) * sum(count for count, _ in loads(args, vocabulary, 0).values())
    with contextlib.ExitStack() as stack, tqdm(total=total, unit="request", file=sys.stderr) as bar:
        ports = {}
        for peer in args.peers:
            command, mark = commands(args)[peer]
            ports[peer] = stack.enter_context(running(command, mark))
            asyncio.run(_ready(ports[peer]))
        for turn in range(args.repeats):
            for name, (_, load) in loads(args, vocabulary, turn).items():
                for peer in args.peers if turn % 2 == 0 else args.peers[::-1]:
                    bar.set_description(f"{peer}, {name}")
                    seen = asyncio.run(load(ports[peer], lambda: bar.update()))  # type: ignore[arg-type]
                    results.setdefault(name, {}).setdefault(peer, []).append(row(seen))
                    told = ", ".join(f"{key} {value:.1f}" for key, value in row(seen).items())
                    tqdm.write(f"turn {turn}, {name}, {peer}: {told}", file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    sizes = f"{args.threads} threads; {args.prompt} in, {args.answer} out"
    print(f"{args.model.name}, {sizes}; milliseconds, medians of {args.repeats} turns\n")
    names = ["tokens/s", "first p50", "first p99", "between p50", "between p99"]
    print(f"| load | server | {' | '.join(names)} |\n|---|---|{'--:|' * len(names)}")
    for name, peers in results.items():
        for peer, turns in peers.items():
            values = [statistics.median(turn[key] for turn in turns) for key in names]
            print(f"| {name} | {peer} | {' | '.join(f'{value:.1f}' for value in values)} |")


async def _ready(port: int) -> None:
    """Waits until a server answers, and lets it run once."""
    for _ in range(600):
        with contextlib.suppress(OSError, RuntimeError, IndexError):
            await ask(port, Ask([40] * 8, 4), lambda: None)
            return
        await asyncio.sleep(0.2)
    raise RuntimeError("the server does not answer")


if __name__ == "__main__":
    main()
