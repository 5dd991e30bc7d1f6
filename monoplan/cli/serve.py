"""The command serve: a model behind the OpenAI protocol."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from monoplan.cli.common import Timings, UsageError, add_model_options, load, ranks, whole
from monoplan.ir.errors import ArgumentError

LOCAL = ("localhost", "127.0.0.1", "::1")


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The options of serve."""
    add, own = parser.add_argument, "(default: %(default)s)"
    add_model_options(parser, positional=True)
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=f"where to listen {own}: this machine only")
    add("--port", type=whole(0), default=8000, metavar="N", help=f"0: any free one {own}")
    add("--name", metavar="NAME", help="of the model in the protocol (default: the file's own)")
    add(
        "--api-key",
        metavar="KEY",
        help="that clients must send (default: MONOPLAN_API_KEY, which no list of processes shows)",
    )
    add("--streams", type=whole(1), default=32, metavar="N", help=f"answers that are written at once {own}")
    add("--queue", type=whole(1), default=256, metavar="N", help=f"requests that may wait {own}")
    add("--cache-tokens", type=whole(1), metavar="N", help="size of the KV cache (default: by the memory there is)")
    pooling = "what /v1/embeddings gives, its plan compiled at the start (default: mean, compiled at the first use)"
    add("--embeddings", choices=("mean", "last"), help=pooling)
    add("--max-body", type=whole(1), default=4 << 20, metavar="BYTES", help=f"of a request {own}")
    add("--allow-host", action="append", default=[], metavar="NAME", help="a name of this server besides localhost")
    add("--cors", action="append", default=[], metavar="ORIGIN", help="a site whose pages may use it; may be repeated")
    add("-q", "--quiet", action="store_true", help="no log")


def serve(args: argparse.Namespace) -> int:
    """Serves until Ctrl-C or SIGTERM; then running answers are finished. A second signal ends them."""
    import uvicorn

    from monoplan.serve.app import make_app
    from monoplan.serve.engine import Engine, EngineError
    from monoplan.serve.graceful import GracefulServer

    key = args.api_key if args.api_key is not None else os.environ.get("MONOPLAN_API_KEY")
    if key is not None and not key.strip():
        raise UsageError("the API key is empty", fix="give one, or leave --api-key and MONOPLAN_API_KEY out")
    comm = ranks(args)
    first = comm is None or comm.rank == 0
    # Before the model is loaded: a port in use should not take seconds to notice.
    listener = _listen(args.host, args.port) if first else None
    if not first:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 finishes what runs, and says when the others end
    llm = load(args, Timings(), prepare=False)  # the engine has a plan of its own
    name = model_name(args.name, llm)
    hosts = [*LOCAL, *args.allow_host] if _is_local(args.host) else None
    sizes = {"streams": args.streams, "queue": args.queue, "cache_tokens": args.cache_tokens}
    engine = Engine(llm, **sizes, pooling=args.embeddings or "mean")
    if args.embeddings is not None:
        llm.embedding_plan()
    if listener is None:
        engine.follow()
        return 0
    engine.start()
    with listener:
        app = make_app(
            engine,
            name,
            api_key=key,
            max_body=args.max_body,
            requests=args.streams + args.queue,
            hosts=hosts,
            cors=args.cors,
        )
        level = "warning" if args.quiet else "info"
        config = uvicorn.Config(app, log_level=level, access_log=not args.quiet, server_header=False)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"monoplan: {name} at http://{shown}:{port}  (chat at /, OpenAI protocol at /v1)", flush=True)
        if key is None and not _is_local(args.host):
            print("monoplan: anybody who reaches this address can use it; --api-key asks for a key", file=sys.stderr)
        server = GracefulServer(config, app.state.server, fails=comm is not None)
        if comm is not None:  # uvicorn gives these handlers back: mpirun's signal, late, doesn't end what says why
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, server.handle_exit)
        try:
            server.run(sockets=[listener])
        finally:
            engine.close(finish=False)  # nothing runs any more, unless somebody was in a hurry
    if comm is not None and (failure := engine.stats.failure) is not None:
        raise EngineError("the ranks can't go on", why=failure, fix="start them again")
    return 0


def model_name(given: str | None, llm: Any) -> str:
    """What the model is called in the protocol."""
    return given or Path(llm.name_or_path or "model").name.removesuffix(".gguf")


def _listen(host: str, port: int) -> socket.socket:
    if port > 65535:
        raise UsageError(f"--port must be 0 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(found[0], found[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
        listener.listen(2048)  # before its address is printed: whoever reads it may connect at once
    except OSError as error:
        raise ArgumentError(
            f"can't listen on {host}, port {port}",
            why=error.strerror or str(error),
            fix="choose another --port or --host",
        ) from None
    return listener


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL
