"""A tiny model with a byte-level vocabulary and a chat template that knows tools, and a server in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import monoplan as mp
from monoplan.models import LlamaForCausalLM
from monoplan.models.text.tokenizer import Tokenizer
from monoplan.serve.engine import Engine
from tests.models.support import tiny_config
from tests.models.vocabularies import byte_level

TEMPLATE = (
    "{%- if tools %}<|start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call></tool_call>\n{% endif %}"
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NAME = "tiny"


def wait_for_address(process: subprocess.Popen[str]) -> tuple[str, str, list[str]]:
    """The name and the address that `monoplan serve` prints, and all lines so far; fails with them if it ends."""
    lines: list[str] = []
    assert process.stdout is not None
    for text in process.stdout:
        lines.append(text)
        if found := re.search(r"monoplan: (\S+) at (http://\S+)", text):
            return found[1], found[2], lines
    raise AssertionError("".join(lines))


class SlowEngine(Engine):
    """An engine that rests before each step."""

    rest = 0.02

    def step(self) -> None:
        time.sleep(self.rest)
        super().step()


@functools.cache
def tiny_lm(template: str | None = TEMPLATE, **changes: Any) -> Any:
    """The model, compiled: every byte is a token, 0 ends a text, 1 begins a message."""
    metadata = byte_level(chat_template=template)
    size = len(metadata["tokenizer.ggml.tokens"])
    sizes = {"vocab_size": size, "bos_token_id": 1, "eos_token_id": 0, "max_position_embeddings": 1024, **changes}
    model = LlamaForCausalLM.from_config(tiny_config(**sizes), seed=3)
    model.set_tokenizer(Tokenizer.from_gguf(metadata, vocab_size=size))
    return mp.compile(model)


Call = Callable[..., Any]


def caller(app: Any) -> Call:
    """A function that sends one request to an application and returns its response."""
    import httpx

    def call(path: str, body: Any = None, method: str | None = None, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                given = options if body is None else {"json": body, **options}
                return await client.request(method or ("GET" if body is None else "POST"), path, **given)

        return asyncio.run(send())

    return call


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """The address of a real server, which ends with the block."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not end"
