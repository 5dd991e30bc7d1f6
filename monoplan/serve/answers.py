"""Answers in OpenAI's form, whole or in chunks, from the pieces that the engine gives."""

from __future__ import annotations

import base64
import codecs
import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from monoplan.ir.errors import ArgumentError, LoadError
from monoplan.ir.types import Array
from monoplan.serve.chat import CallParser, Part
from monoplan.serve.constraint import Grammars
from monoplan.serve.protocol import EmbeddingsRequest, RequestError
from monoplan.serve.request import Piece, Request, TokenLogprob, unit

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a request may hold, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


class TokenTexts:
    """The bytes and the text of single tokens."""

    def __init__(self, tokenizer: Any, grammars: Grammars) -> None:
        self._tokenizer, self._grammars = tokenizer, grammars
        self._known: dict[int, tuple[str, list[int]]] = {}

    def of(self, token: int) -> tuple[str, list[int]]:
        """A token's text, and its bytes: a part of a character has bytes of its own, but no text."""
        if token not in self._known:
            try:
                data = bytes(self._grammars.vocabulary.decode_bytes([token]))
            except (ArgumentError, LoadError):  # a vocabulary that llguidance can't read
                data = self._text(token).encode()
            self._known[token] = data.decode("utf-8", "replace"), list(data)
        return self._known[token]

    def _text(self, token: int) -> str:
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token], skip_special_tokens=False))


class Choice:
    """One answer: what came of it, and what is new."""

    def __init__(self, index: int, request: Request, first: bool, parser: CallParser | None, before: str) -> None:
        self.index, self.request, self.first, self._parser = index, request, first, parser  # first: of its prompt
        self.parts: list[Part] = [Part(before)] if before else []  # new ones
        self.tokens: list[TokenLogprob] = []  # new ones, if log probabilities were asked for
        self.finish_reason: str | None = None
        self.begun, self.offset = False, 0  # whether a chunk went out; characters before the next token
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # tells how many

    def push(self, pieces: Iterable[Piece]) -> None:
        """Takes what the engine gave; raises what went wrong there."""
        for piece in pieces:
            if piece.finish_reason == "error":
                raise as_failure(piece.error)
            if piece.finish_reason == "cancelled":
                raise RequestError(503, "the server is shutting down", code="unavailable")
            if piece.text:
                self.parts += [Part(piece.text)] if self._parser is None else self._parser.push(piece.text)
            if piece.finish_reason is not None:
                self.parts += [] if self._parser is None else self._parser.finish()
                self.finish_reason = REASONS[piece.finish_reason]
                if self._parser is not None and self._parser.count and self.finish_reason == "stop":
                    self.finish_reason = "tool_calls"
            asked = self.request.sampling
            if asked.logprobs is not None and piece.token is not None and piece.token.token not in asked.eos_ids:
                self.tokens.append(piece.token)

    def take(self) -> tuple[list[Part], list[TokenLogprob]]:
        """What is new, with parts of the same kind joined."""
        joined: list[Part] = []
        for part in self.parts:
            if joined and part.name is None and joined[-1].call == part.call:
                last = joined[-1]
                joined[-1] = Part(last.text + part.text, last.call, last.name, last.id)
            else:
                joined.append(part)
        parts, tokens = joined, self.tokens
        self.parts, self.tokens = [], []
        return parts, tokens


def embeddings_answer(name: str, vectors: Sequence[Array], made: EmbeddingsRequest, tokens: int) -> dict[str, Any]:
    """The body of an answer of /v1/embeddings."""
    data: list[dict[str, Any]] = []
    for index, vector in enumerate(vectors):
        own = vector if made.dimensions is None else unit(vector[: made.dimensions])
        numbers = base64.b64encode(own.astype("<f4").tobytes()).decode() if made.base64 else own.tolist()
        data.append({"object": "embedding", "index": index, "embedding": numbers})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def as_failure(error: Any) -> RequestError:
    """What a request is told of an error that ended it."""
    if isinstance(error, ArgumentError):  # what was asked for can't be done
        return RequestError(400, error.what, why=error.why)
    return RequestError(500, getattr(error, "what", "") or "the answer failed", why=getattr(error, "why", ""))


class Answer:
    """The answer to one HTTP request: what is the same in its chunks, and how choices are written."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str, choices: Sequence[Choice], texts: TokenTexts, usage: bool) -> None:
        self.choices, self.texts, self.with_usage = choices, texts, usage
        version = _version()
        self.head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self.head["system_fingerprint"] = f"monoplan-{version}"
        # What all chunks begin with, written once: this is done for every token.
        self._begin = b"data: " + to_json({**self.head, "object": self.chunk_kind})[:-1] + b',"choices":['

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens that were read and written."""
        prompts = [choice.request for choice in self.choices if choice.first]
        prompt = sum(len(request.prompt_ids) for request in prompts)
        written = sum(len(choice.request.ids) for choice in self.choices)
        cached = sum(request.cached_tokens for request in prompts)
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written, **details}

    def whole(self) -> dict[str, Any]:
        """The answer in one."""
        return {
            **self.head,
            "object": self.kind,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self.usage,
        }

    def events(self, choice: Choice) -> bytes:
        """What is new of a choice, as server-sent events; why it ended comes alone, in the last one."""
        made = [{"index": choice.index, **delta, "finish_reason": None} for delta in self._deltas(choice)]
        if choice.finish_reason is not None:
            made.append({"index": choice.index, **self._empty(), "finish_reason": choice.finish_reason})
        end = b'],"usage":null}\n\n' if self.with_usage else b"]}\n\n"
        return b"".join(self._begin + to_json(one) + end for one in made)

    def last_event(self) -> bytes:
        """The event that has the usage."""
        return self._begin + b'],"usage":' + to_json(self.usage) + b"}\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def _empty(self) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """chat.completion."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        parts, tokens = choice.take()
        content = "".join(part.text for part in parts if part.call is None)
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.name is not None:
                calls.append(
                    {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
                )
            elif part.call is not None:
                calls[part.call]["function"]["arguments"] += part.text
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = self._logprobs(choice, tokens)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        parts, tokens = choice.take()
        logprobs = self._logprobs(choice, tokens) if tokens else None
        if not choice.begun:
            choice.begun = True
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if tokens and not parts:
            parts = [Part("")]
        for part in parts:
            yield {"delta": _delta(part), "logprobs": logprobs}
            logprobs = None

    def _empty(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text, data = self.texts.of(token)
            return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}

        content = [{**entry(t.token, t.logprob), "top_logprobs": [entry(*best) for best in t.top]} for t in tokens]
        return {"content": content, "refusal": None}


def _delta(part: Part) -> dict[str, Any]:
    if part.call is None:
        return {"content": part.text}
    call: dict[str, Any] = {"index": part.call, "function": {"arguments": part.text}}
    if part.name is not None:
        call = {"index": part.call, "id": part.id, "type": "function"}
        call["function"] = {"name": part.name, "arguments": part.text}
    return {"tool_calls": [call]}


class CompletionAnswer(Answer):
    """text_completion."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        parts, tokens = choice.take()
        text, logprobs = "".join(part.text for part in parts), self._logprobs(choice, tokens)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _deltas(self, choice: Choice) -> Iterator[dict[str, Any]]:
        parts, tokens = choice.take()
        if parts or tokens:
            logprobs = self._logprobs(choice, tokens) if tokens else None
            yield {"text": "".join(part.text for part in parts), "logprobs": logprobs}

    def _empty(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, choice: Choice, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for t in tokens:
            name, logprob = self._name(t.token), max(t.logprob, -9999.0)
            best = {name: logprob}  # the chosen token is always there; of two with one text it, else the better one
            for token, other in t.top:
                best.setdefault(self._name(token), max(other, -9999.0))
            made["tokens"].append(name)
            made["token_logprobs"].append(logprob)
            made["top_logprobs"].append(best)
            made["text_offset"].append(choice.offset)
            choice.offset += len(choice.decode(bytes(self.texts.of(t.token)[1])))
        return made

    def _name(self, token: int) -> str:
        """A token's text; bytes that are no whole characters by their numbers, as OpenAI has them: bytes:\\xe2\\x82."""
        text, data = self.texts.of(token)
        is_whole = text.encode() == bytes(data)
        return text if is_whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _version() -> str:
    from monoplan import __version__

    return __version__


AnswerClass = Callable[[str, Sequence[Choice], TokenTexts, bool], Answer]
