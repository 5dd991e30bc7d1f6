"""The server: an ASGI application that speaks the OpenAI protocol in front of an engine."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hmac
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.models.text.tokenizer import MissingTokenizer
from monoplan.serve import ALIAS
from monoplan.serve.answers import (
    DONE,
    Answer,
    AnswerClass,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    TokenTexts,
    as_failure,
    embeddings_answer,
    event,
    to_json,
)
from monoplan.serve.chat import CallParser, call_form, chat_ids
from monoplan.serve.constraint import Grammars
from monoplan.serve.metrics import Metrics
from monoplan.serve.protocol import (
    Asked,
    Fields,
    Model,
    RequestError,
    as_request_error,
    chat_request,
    check_model,
    completion_request,
    embeddings_request,
    error_body,
    messages_of,
    parse_json,
    tools_of,
)
from monoplan.serve.request import Busy, EmbeddingRequest, Piece
from monoplan.serve.request import Request as EngineRequest

T = TypeVar("T")
MAX_BODY, REQUESTS = 4 << 20, 512  # bytes of a body, requests at once
BODY_SECONDS = 60.0  # to send a body
EMBEDDED = 8  # texts of one request for embeddings that the engine has at once
THREADS = 4  # for tokenizing, templates and grammars
PAGE = {"/": ("index.html", "text/html"), "/page/chat.css": ("chat.css", "text/css")}
PAGE |= {"/page/chat.js": ("chat.js", "text/javascript")}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
_POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_OPEN = {"/health", *PAGE}  # without an API key


def make_app(
    engine: Any,
    name: str,
    *,
    api_key: str | None = None,
    max_body: int = MAX_BODY,
    requests: int = REQUESTS,
    hosts: Sequence[str] | None = None,
    cors: Sequence[str] = (),
) -> Starlette:
    """An ASGI application in front of a started engine, which its owner closes.

    `name` is the model's in the protocol. With an `api_key` every route but /health and the page wants it. Bodies may
    have `max_body` bytes, and `requests` may be under way at once. `hosts`: names under which the server may be
    addressed (None: any), which keeps other sites' pages from a server on localhost. `cors`: origins of other sites
    whose pages may use it.
    """
    server = Server(engine, name, max_body, requests)
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model_card),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        Route("/v1/embeddings", server.embeddings, methods=["POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.prometheus),
        Route("/version", server.version),
        *(Route(path, functools.partial(_page, *file)) for path, file in PAGE.items()),
    ]
    middleware = [Middleware(Door, server=server, api_key=api_key, hosts=hosts)]
    if cors:
        headers = ["Authorization", "Content-Type"]
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=headers)
        )
    handlers: Any = {RequestError: server.refused, HTTPException: server.refused, Exception: server.failed}
    handlers[ClientDisconnect] = _nobody
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.server = server
    return app


class Door:
    """Looks at every request before it is read: its host, its key, whether there is room for it."""

    def __init__(self, app: ASGIApp, server: Server, api_key: str | None, hosts: Sequence[str] | None) -> None:
        self.app, self.server, self.hosts = app, server, None if hosts is None else frozenset(hosts)
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        server = self.server
        try:
            self._check(Request(scope))
            if scope["method"] != "POST":
                return await self.app(scope, receive, send)
            server.check_room()
        except RequestError as error:
            return await server.answer_error(error)(scope, receive, send)
        server.active += 1
        try:
            await self.app(scope, receive, send)
        finally:
            server.active -= 1

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        bare = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and host[-1:] != "]" else host
        if self.hosts is not None and bare.strip("[]").lower() not in self.hosts:
            why = "it listens on this machine only; name others with --allow-host"
            raise RequestError(403, f"the server is not known as {bare!r:.80}", why=why)
        if self.key is not None and request.url.path not in _OPEN and request.method != "OPTIONS":
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
            if not hmac.compare_digest(given.encode("latin-1", "replace"), self.key):
                raise RequestError(401, "the API key is missing or wrong", code="invalid_api_key")


class Pieces:
    """What the engine's thread says of some requests, for the event loop: one wake-up for all that came meanwhile."""

    def __init__(self) -> None:
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self._come: collections.deque[tuple[int, float, Piece]] = collections.deque()
        self._told = False

    def put(self, index: int, piece: Piece) -> None:
        """Called by the engine's thread."""
        self._come.append((index, time.monotonic(), piece))
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._event.set)

    async def get(self) -> dict[int, list[tuple[float, Piece]]]:
        """What has come, by request; waits for it."""
        await self._event.wait()
        self._event.clear()
        self._told = False  # before the queue is emptied: what comes now wakes us again
        found: dict[int, list[tuple[float, Piece]]] = {}
        while self._come:
            index, at, piece = self._come.popleft()
            found.setdefault(index, []).append((at, piece))
        return found


class Work:
    """The engine's requests behind one HTTP request."""

    def __init__(self, server: Server) -> None:
        self.server, self.pieces = server, Pieces()
        self.requests: list[EngineRequest] = []
        self.choices: list[Choice] = []

    def submit(
        self, prompts: Sequence[Sequence[int]], asked: Asked, constraint: Any, parsers: Any, befores: Any
    ) -> None:
        """Hands all answers to the engine, or none."""
        try:
            for number, ids in enumerate(prompts):
                for i in range(asked.n):
                    index = len(self.requests)
                    one = dataclasses.replace(
                        asked.sampling,
                        seed=asked.sampling.seed + i,  # answers to one prompt differ
                        constraint=None if constraint is None else constraint.copy(),
                    )
                    request = self.server.engine.submit(ids, one, functools.partial(self.pieces.put, index))
                    self.requests.append(request)
                    self.choices.append(Choice(index, request, i == 0, parsers(), befores[number]))
        except BaseException as error:
            self.cancel()
            if isinstance(error, Busy):
                raise self.server.busy(error) from None
            raise

    def cancel(self) -> None:
        """Ends what still runs."""
        for request in self.requests:
            if request.finish_reason is None:
                request.cancel()

    async def steps(self) -> AsyncGenerator[Choice, None]:
        """Each choice that has something new, until all are finished; leaving early cancels the rest."""
        last: dict[int, float | None] = {}
        open_ones = set(range(len(self.requests)))
        try:
            while open_ones:
                for index, come in (await self.pieces.get()).items():
                    last[index] = self.server.metrics.watch(come, last.get(index))
                    choice = self.choices[index]
                    if come[-1][1].finish_reason is not None:
                        open_ones.discard(index)
                        self.server.metrics.ended(self.requests[index])
                    choice.push(piece for _, piece in come)
                    yield choice
        finally:
            self.cancel()


class Server:
    """What the routes share."""

    def __init__(self, engine: Any, name: str, max_body: int, requests: int) -> None:
        lm = engine.lm
        self.engine, self.max_body, self.most, self.active, self.closing = engine, max_body, requests, 0, False
        try:
            self.tokenizer = lm.tokenizer
        except MissingTokenizer:
            self.tokenizer = None
        eos = {*lm.config.eos_ids, *(() if self.tokenizer is None else self.tokenizer.eos_ids)}
        self.model = Model((name, ALIAS), lm.config.vocab_size, lm.max_length, frozenset(eos), lm.config.hidden_size)
        self.grammars = Grammars(self.tokenizer, sorted(eos), lm.config.vocab_size)
        self.texts = TokenTexts(self.tokenizer, self.grammars)
        self.metrics = Metrics(engine, name)
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(THREADS, "monoplan-prepare")

    # -- errors ---------------------------------------------------------------------------------------------------

    def answer_error(self, error: RequestError) -> Response:
        """A response that says what is wrong."""
        headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self.metrics.refused(error.status)
        return _json(error.body, error.status, headers)

    async def refused(self, request: Request, error: Exception) -> Response:
        """For errors of requests, ours and Starlette's."""
        if isinstance(error, HTTPException):
            words = {404: f"there is no route {request.url.path!r:.80}", 405: f"{request.method} is not for this route"}
            return _json(error_body(error.status_code, words.get(error.status_code, error.detail)), error.status_code)
        assert isinstance(error, RequestError)
        return self.answer_error(error)

    async def failed(self, request: Request, error: Exception) -> Response:
        """For bugs: the server's log has the rest."""
        self.metrics.refused(500)
        return _json(error_body(500, "the server failed; its log says why"), 500)

    def check_room(self) -> None:
        """Raises if no further request can be taken."""
        if (failure := self.engine.stats.failure) is not None:
            raise RequestError(503, "the engine has failed", code="engine_failed", why=str(failure))
        if self.closing:
            raise RequestError(503, "the server is shutting down", code="unavailable")
        if self.active >= self.most:
            raise RequestError(429, f"the server has {self.active} requests under way", code="rate_limit_exceeded")

    def busy(self, error: Busy) -> RequestError:
        """What a request is told that the engine does not take."""
        status, code = (503, "unavailable") if self.closing else (429, "rate_limit_exceeded")
        return RequestError(status, error.what, code=code, why=error.why)

    # -- requests -------------------------------------------------------------------------------------------------

    async def body(self, request: Request) -> bytes:
        """The body of a request, which is refused before it is read if it is too long."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other sites can't send this without being allowed to
            raise RequestError(415, "the body must be JSON: Content-Type: application/json", why=f"it is {kind!r:.60}")
        too_long = RequestError(413, f"the body has more than {self.max_body} bytes", code="request_too_large")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.max_body:
            raise too_long
        data = bytearray()

        async def read() -> None:
            async for chunk in request.stream():
                data.extend(chunk)
                if len(data) > self.max_body:
                    raise too_long

        try:
            await asyncio.wait_for(read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(408, f"the body did not come in {BODY_SECONDS:.0f} s") from None
        return bytes(data)

    async def in_thread(self, request: Request, work: Callable[[], T]) -> T:
        """Runs what takes long beside the event loop; what its author did wrong is an error of the request."""

        async def run() -> T:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
            except (ArgumentError, LoadError) as error:
                raise as_request_error(error) from None

        return await _while_connected(request, run())

    def prompt_ids(self, prompt: str | list[int], name: str = "prompt") -> list[int]:
        """Token ids of a prompt, checked."""
        ids: list[Any] = self._encoder().encode(prompt) if isinstance(prompt, str) and prompt else list(prompt)
        if not ids:
            raise RequestError(400, f"{name} is empty", name)
        return self.fitting(ids, name)

    def fitting(self, ids: list[int], name: str) -> list[int]:
        """Checks ids against the vocabulary and the context."""
        if bad := next((token for token in ids if not 0 <= token < self.model.vocab_size), None):
            raise RequestError(
                400, f"{name} has the token id {bad}, the vocabulary {self.model.vocab_size} tokens", name
            )
        if len(ids) > self.model.max_length:
            what = f"{name} has {len(ids)} tokens, the context of the model {self.model.max_length}"
            raise RequestError(400, what, name, "context_length_exceeded")
        return ids

    def _encoder(self) -> Any:
        if self.tokenizer is None:
            raise RequestError(400, "the model has no tokenizer: give token ids to /v1/completions")
        return self.tokenizer

    def _constraint(self, asked: Asked) -> Any:
        return None if asked.grammar is None else self.grammars.make(*asked.grammar)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        data = await self.body(request)

        def prepare() -> Any:
            made = completion_request(parse_json(data), self.model)
            ids = [self.prompt_ids(prompt) for prompt in made.prompts]
            texts = [p if isinstance(p, str) else self._encoder().decode(p) for p in made.prompts] if made.echo else []
            return made.asked, ids, self._constraint(made.asked), texts or [""] * len(ids)

        asked, ids, constraint, befores = await self.in_thread(request, prepare)
        return await self.answer(request, CompletionAnswer, ids, asked, constraint, lambda: None, befores)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        data = await self.body(request)

        def prepare() -> Any:
            made = chat_request(parse_json(data), self.model)
            ids = chat_ids(self._encoder(), made.messages, made.tools, made.values, made.reply)
            names = [tool["function"]["name"] for tool in made.tools]
            form, only = call_form(self.tokenizer.chat_template), None
            if made.forced is not None:
                form, only = "list", made.forced if made.forced in names else None
            parsers = (lambda: CallParser(form, names, only)) if names else (lambda: None)
            return made.asked, [self.fitting(ids, "messages")], self._constraint(made.asked), parsers

        asked, ids, constraint, parsers = await self.in_thread(request, prepare)
        return await self.answer(request, ChatAnswer, ids, asked, constraint, parsers, [""])

    async def answer(
        self,
        request: Request,
        form: AnswerClass,
        ids: Sequence[Sequence[int]],
        asked: Asked,
        constraint: Any,
        parsers: Any,
        befores: Sequence[str],
    ) -> Response:
        """Runs the engine's requests behind one of ours, and answers whole or in chunks."""
        self.check_room()  # preparing took a while
        work = Work(self)
        work.submit(ids, asked, constraint, parsers, befores)
        answer = form(self.model.names[0], work.choices, self.texts, asked.usage)
        if asked.stream:
            return EventStream(self._events(work, answer), work.cancel)

        async def wait() -> None:
            async with contextlib.aclosing(work.steps()) as steps:
                async for _ in steps:
                    pass

        await _while_connected(request, wait())
        return _json(answer.whole())

    async def _events(self, work: Work, answer: Answer) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(work.steps()) as steps:
                async for choice in steps:
                    if events := answer.events(choice):
                        yield events
        except RequestError as error:
            self.metrics.refused(error.status)
            yield event(error.body) + DONE
            return
        yield (answer.last_event() if answer.with_usage else b"") + DONE

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        data = await self.body(request)

        def prepare() -> Any:
            made = embeddings_request(parse_json(data), self.model)
            ids = [self.prompt_ids(text, "input") for text in made.inputs]
            self.engine.prepare_embeddings()
            return made, ids

        made, ids = await self.in_thread(request, prepare)
        self.check_room()
        vectors = await _while_connected(request, self._vectors(ids))
        return _json(embeddings_answer(self.model.names[0], vectors, made, sum(map(len, ids))))

    async def _vectors(self, ids: Sequence[Sequence[int]]) -> list[Any]:
        """Vectors of some texts, a few of which are with the engine at a time: others come in between."""
        pieces, found = Pieces(), {}
        running: dict[int, EmbeddingRequest] = {}
        left = collections.deque(enumerate(ids))
        try:
            while left or running:
                while left and len(running) < EMBEDDED:
                    index, one = left.popleft()
                    running[index] = self.engine.embed(one, functools.partial(pieces.put, index))
                for index, come in (await pieces.get()).items():
                    request = running.pop(index)
                    self.metrics.ended(request)
                    if request.vector is None:
                        raise as_failure(come[-1][1].error)
                    found[index] = request.vector
        except Busy as error:
            raise self.busy(error) from None
        finally:
            for request in running.values():
                request.cancel()
        return [found[index] for index in range(len(ids))]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: of a prompt (vLLM), of content (llama-server), or of messages."""
        data = await self.body(request)

        def work() -> dict[str, Any]:
            fields = Fields(parse_json(data))
            check_model(fields, self.model)
            tokenizer = self._encoder()
            if fields.get("messages") is not None:
                values = fields.mapping("chat_template_kwargs")
                reply = fields.flag("add_generation_prompt", True)
                ids = chat_ids(tokenizer, messages_of(fields), tools_of(fields), values, reply)
            else:
                content = fields.get("content") is not None  # llama-server adds nothing unless it is asked to
                special = fields.flag("add_special", False) if content else fields.flag("add_special_tokens", True)
                text = fields.text("content" if content else "prompt")
                if text is None:
                    raise RequestError(400, "there is no prompt", "prompt")
                ids = tokenizer.encode(text, add_special_tokens=special)
            made = {"count": len(ids), "max_model_len": self.model.max_length, "tokens": ids}
            if fields.flag("return_token_strs") or fields.flag("with_pieces"):
                made["token_strs"] = [self.texts.of(token)[0] for token in ids]
            return made

        return _json(await self.in_thread(request, work))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        data = await self.body(request)

        def work() -> dict[str, Any]:
            fields = Fields(parse_json(data))
            check_model(fields, self.model)
            tokens = fields.items("tokens", self.max_body)
            text = self._encoder().decode(tokens, skip_special_tokens=False)
            return {"prompt": text, "content": text}

        return _json(await self.in_thread(request, work))

    # -- what is known --------------------------------------------------------------------------------------------

    def _card(self) -> dict[str, Any]:
        own = {"id": self.model.names[0], "object": "model", "created": self.created, "owned_by": "monoplan"}
        return {**own, "max_model_len": self.model.max_length}

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._card()]})

    async def model_card(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        check_model(Fields({"model": request.path_params["name"]}), self.model)
        return _json(self._card())

    async def health(self, request: Request) -> Response:
        """GET /health: 503 if no request would be taken."""
        failure = self.engine.stats.failure
        status = "failed" if failure is not None else "closing" if self.closing else "ok"
        return _json({"status": status}, 200 if status == "ok" else 503)

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """GET /version."""
        from monoplan import __version__

        return _json({"version": __version__})


class EventStream(Response):
    """Server-sent events; `left` is called when the client leaves, or the server ends, before they are all out."""

    def __init__(self, events: AsyncGenerator[bytes, None], left: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._left = events, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them as they come."""

        async def stream() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _while_connected(Request(scope, receive), stream())
        except (ClientDisconnect, OSError):
            pass
        finally:
            self._left()


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Does some work, and gives it up when the client has left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # until they have cleaned up


async def _nobody(request: Request, error: Exception) -> Response:
    """The client has left: what is answered is for logs."""
    return Response(status_code=499)


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


async def _page(file: str, kind: str, request: Request) -> Response:
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return Response(
        _file(file), headers=headers | {"Referrer-Policy": "no-referrer"}, media_type=f"{kind}; charset=utf-8"
    )


@functools.cache
def _file(name: str) -> bytes:
    return (Path(__file__).parent / "page" / name).read_bytes()
