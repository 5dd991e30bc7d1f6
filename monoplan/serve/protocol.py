"""The OpenAI protocol: what a request may say, checked, and what answers and errors look like."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from monoplan.ir.errors import ArgumentError, MonoplanError
from monoplan.ir.lazy_dataclass import dataclass
from monoplan.models.generate.decoding import is_real, is_whole
from monoplan.serve.chat import calls_schema, message_of, tool_of
from monoplan.serve.request import Sampling

MESSAGES, TOOLS, PROMPTS, CHOICES, BIASES, INPUTS = 2048, 128, 128, 128, 1024, 2048  # at most, of each
STOPS, STOP_CHARACTERS = 16, 1024  # stop texts, and all of them together: each token is compared with them
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
KINDS |= {405: "invalid_request_error", 413: "invalid_request_error", 415: "invalid_request_error"}
KINDS |= {429: "rate_limit_error", 500: "server_error", 501: "not_supported_error", 503: "unavailable_error"}


class RequestError(MonoplanError):
    """A request that gets no answer: its status, and which of its fields is to blame."""

    def __init__(
        self, status: int, what: str, param: str | None = None, code: str | None = None, why: str = ""
    ) -> None:
        super().__init__(what, why=why)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return error_body(self.status, self.what + (f": {self.why}" if self.why else ""), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    error = {"message": message, "type": KINDS.get(status, "server_error"), "param": param, "code": code}
    return {"error": error}


def as_request_error(error: MonoplanError, param: str | None = None) -> RequestError:
    """An error of ours as the answer to a request: what its author can do about it is in the words."""
    if isinstance(error, RequestError):
        return error
    why = "; ".join(text for text in (error.why, error.fix) if text)
    return RequestError(400, error.what, param, why=why)


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RequestError(400, "the body is not JSON", why=why) from None
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object", why=f"it is {body!r:.60}")
    return body


class Fields:
    """The fields of a request's body. A field that is null counts as missing, and unknown ones are not looked at."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body

    def get(self, name: str, default: Any = None) -> Any:
        """A field as it stands."""
        value = self.body.get(name)
        return default if value is None else value

    def whole(self, name: str, default: Any, least: int, most: int) -> Any:
        """A whole number."""
        return self._fits(
            name, default, lambda v: is_whole(v) and least <= v <= most, f"a whole number from {least} to {most}"
        )

    def real(self, name: str, default: float, least: float, most: float) -> float:
        """A number."""
        value = self._fits(
            name, default, lambda v: is_real(v) and least <= v <= most, f"a number from {least:g} to {most:g}"
        )
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self._fits(name, default, lambda v: isinstance(v, bool), "true or false"))

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        found: str | None = self._fits(name, default, lambda v: isinstance(v, str), "a text")
        return found

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty if it is missing."""
        found: dict[str, Any] = self._fits(name, {}, lambda v: isinstance(v, dict), "an object")
        return found

    def items(self, name: str, most: int) -> list[Any]:
        """A list of at most so many; empty if it is missing."""
        found: list[Any] = self._fits(name, [], lambda v: isinstance(v, list), "a list")
        if len(found) > most:
            raise RequestError(400, f"{name} has {len(found)} entries, the limit is {most}", name)
        return found

    def refuse(self, name: str, why: str, *allowed: Any) -> None:
        """A field that is known and can't be served, unless it says nothing."""
        value = self.get(name)
        if value is not None and not any(value == other for other in (*allowed, "", [], {}, False)):
            raise RequestError(400, f"{name} is not supported", name, "unsupported_value", why)

    def _fits(self, name: str, default: Any, fits: Any, expected: str) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not fits(value):
            raise RequestError(400, f"{name} must be {expected}", name, why=f"it is {value!r:.60}")
        return value


@dataclass(frozen=True)
class Model:
    """What requests are checked against."""

    names: tuple[str, ...]  # the first one is shown
    vocab_size: int
    max_length: int
    eos_ids: frozenset[int]
    hidden_size: int  # numbers of an embedding


@dataclass(frozen=True)
class Asked:
    """What requests of both kinds say."""

    sampling: Sampling
    n: int
    stream: bool
    usage: bool  # in a chunk of its own
    grammar: tuple[str, Any] | None  # kind and value, as Grammars.make takes them


@dataclass(frozen=True)
class CompletionRequest:
    """A checked body of /v1/completions."""

    asked: Asked
    prompts: list[str | list[int]]
    echo: bool


@dataclass(frozen=True)
class ChatRequest:
    """A checked body of /v1/chat/completions."""

    asked: Asked
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]  # those that the model is told of
    forced: str | None  # list: calls as a schema enforces them; a name: the arguments of this tool
    values: dict[str, Any]  # further variables of the template
    reply: bool  # whether the template begins an answer


@dataclass(frozen=True)
class EmbeddingsRequest:
    """A checked body of /v1/embeddings."""

    inputs: list[str | list[int]]
    base64: bool
    dimensions: int | None  # the first ones alone; None: all


def check_model(fields: Fields, model: Model) -> None:
    """Refuses the name of another model."""
    name = fields.text("model")
    if name is not None and name not in model.names:
        what = f"there is no model {name!r:.80}, this server has {model.names[0]!r}"
        raise RequestError(404, what, "model", "model_not_found")


def completion_request(body: Mapping[str, Any], model: Model) -> CompletionRequest:
    """Checks a body of /v1/completions."""
    fields = Fields(body)
    check_model(fields, model)
    fields.refuse("suffix", "the text in the middle can't be asked for")
    n = fields.whole("n", 1, 1, CHOICES)
    fields.refuse("best_of", "all n answers are given", n)
    logprobs, echo = fields.whole("logprobs", None, 0, 20), fields.flag("echo")
    if echo and logprobs is not None:
        raise RequestError(400, "echo with logprobs is not supported", "logprobs", "unsupported_value")
    prompts = _prompts(fields, "prompt", PROMPTS)
    if len(prompts) * n > CHOICES:
        raise RequestError(400, f"{len(prompts)} prompts with n={n} are more than {CHOICES} answers", "n")
    return CompletionRequest(_asked(fields, model, n, logprobs, 16), prompts, echo)


def embeddings_request(body: Mapping[str, Any], model: Model) -> EmbeddingsRequest:
    """Checks a body of /v1/embeddings."""
    fields = Fields(body)
    check_model(fields, model)
    form = fields.text("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError(400, "encoding_format must be float or base64", "encoding_format", why=f"it is {form!r:.60}")
    dimensions = fields.whole("dimensions", None, 1, model.hidden_size)
    return EmbeddingsRequest(_prompts(fields, "input", INPUTS), form == "base64", dimensions)


def _prompts(fields: Fields, name: str, most: int) -> list[str | list[int]]:
    prompt = fields.get(name)
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(is_whole(token) for token in prompt):
            return [prompt]
        if len(prompt) > most:
            raise RequestError(400, f"{name} has {len(prompt)} entries, the limit is {most}", name)
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if all(isinstance(one, list) and all(map(is_whole, one)) for one in prompt):
            return prompt
    expected = "a text, a list of texts, a list of token ids, or a list of lists of token ids"
    raise RequestError(400, f"{name} must be {expected}", name, why=f"it is {prompt!r:.60}")


def chat_request(body: Mapping[str, Any], model: Model) -> ChatRequest:
    """Checks a body of /v1/chat/completions."""
    fields = Fields(body)
    check_model(fields, model)
    for name in ("functions", "function_call"):
        fields.refuse(name, "give tools and tool_choice", "auto", "none")
    fields.refuse("audio", "the model writes text")
    fields.refuse("modalities", "the model writes text", ["text"])
    messages, tools = messages_of(fields), tools_of(fields)
    best = fields.whole("top_logprobs", None, 0, 20)
    logprobs = (best or 0) if fields.flag("logprobs") else None
    if best and logprobs is None:
        raise RequestError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    told, forced, schema = _choice(fields, tools)
    most = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    asked = _asked(fields, model, fields.whole("n", 1, 1, CHOICES), logprobs, -1, most, schema)
    values = fields.mapping("chat_template_kwargs")
    if bad := {"messages", "tools", "add_generation_prompt", "self", "documents"} & values.keys():
        raise RequestError(400, f"chat_template_kwargs can't give {min(bad)}", "chat_template_kwargs")
    return ChatRequest(asked, messages, told, forced, values, fields.flag("add_generation_prompt", True))


def messages_of(fields: Fields) -> list[dict[str, Any]]:
    """The messages of a request, checked."""
    messages = fields.items("messages", MESSAGES)
    if not messages:
        raise RequestError(400, "messages must be a list with at least one message", "messages")
    return _each(messages, message_of, "messages")


def tools_of(fields: Fields) -> list[dict[str, Any]]:
    """The tools of a request, checked."""
    return _each(fields.items("tools", TOOLS), tool_of, "tools")


def _each(values: list[Any], check: Any, name: str) -> list[dict[str, Any]]:
    try:
        return [check(value, f"{name}[{i}]") for i, value in enumerate(values)]
    except ArgumentError as error:
        raise as_request_error(error, name) from None


def _choice(fields: Fields, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None, Any]:
    """The tools that the model is told of, how calls are enforced, and by which schema."""
    choice = fields.get("tool_choice", "auto" if tools else "none")
    names = [tool["function"]["name"] for tool in tools]
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    if isinstance(named, dict) and named.get("name") in names and isinstance(named["name"], str):
        schema = tools[names.index(named["name"])]["function"].get("parameters") or {"type": "object"}
        return tools, named["name"], schema
    if choice == "none":
        return [], None, None
    if choice in ("auto", "required") and tools:
        parallel = fields.flag("parallel_tool_calls", True)
        return tools, *(("list", calls_schema(tools, parallel)) if choice == "required" else (None, None))
    if choice == "auto":
        return [], None, None
    why = f"it is {choice!r:.80}, the tools are {', '.join(names)[:200] or 'none'}"
    raise RequestError(400, "tool_choice must be none, auto, required or the name of a tool", "tool_choice", why=why)


def _asked(
    fields: Fields,
    model: Model,
    n: int,
    logprobs: int | None,
    most: int,
    most_name: str = "max_tokens",
    schema: Any = None,
) -> Asked:
    """What both kinds of requests say; `most`: tokens where the request does not say how many."""
    stream, options = fields.flag("stream"), Fields(fields.mapping("stream_options"))
    if options.body and not stream:
        raise RequestError(400, "stream_options needs stream: true", "stream_options")
    grammar = _grammar(fields)
    if schema is not None:
        if grammar is not None:
            raise RequestError(
                400, "response_format and a tool_choice that enforces a call exclude each other", "tool_choice"
            )
        grammar = ("json", schema)
    if (ignore := fields.flag("ignore_eos")) and grammar is not None:
        raise RequestError(400, "ignore_eos and a grammar exclude each other", "ignore_eos")
    penalty = "repetition_penalty" if fields.get("repeat_penalty") is None else "repeat_penalty"
    try:
        sampling = Sampling(
            max_new_tokens=fields.whole(most_name, most, 1, 2**31),
            temperature=fields.real("temperature", 1.0, 0, 100),
            top_k=max(fields.whole("top_k", 0, -1, 2**31 - 1), 0),
            top_p=fields.real("top_p", 1.0, 0, 1) or 1e-6,
            min_p=fields.real("min_p", 0.0, 0, 1),
            repetition_penalty=fields.real(penalty, 1.0, 0.01, 100),
            presence_penalty=fields.real("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.real("frequency_penalty", 0.0, -2, 2),
            seed=fields.whole("seed", secrets.randbits(63), -(2**63), 2**64),
            stop=_stops(fields.get("stop", [])),
            eos_ids=frozenset() if ignore else model.eos_ids,
            logit_bias=_biases(fields, model.vocab_size),
            logprobs=logprobs,
        )
    except ArgumentError as error:
        raise as_request_error(error) from None
    return Asked(sampling, n, stream, options.flag("include_usage"), grammar)


def _stops(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError(400, "stop must be a text or a list of texts", "stop", why=f"it is {stop!r:.60}")
    texts = [text for text in texts if text]
    if len(texts) > STOPS or sum(map(len, texts)) > STOP_CHARACTERS:
        what = f"stop has {len(texts)} texts with {sum(map(len, texts))} characters"
        raise RequestError(400, f"{what}, the limits are {STOPS} and {STOP_CHARACTERS}", "stop")
    return tuple(texts)


def _biases(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.mapping("logit_bias")
    if len(given) > BIASES:
        raise RequestError(400, f"logit_bias has {len(given)} entries, the limit is {BIASES}", "logit_bias")
    made: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) < 12 else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                400, f"logit_bias has {key!r:.40}, which is no token id below {vocab_size}", "logit_bias"
            )
        if not is_real(value) or not -100 <= value <= 100:
            raise RequestError(
                400, "logit_bias must have numbers from -100 to 100", "logit_bias", why=f"it has {value!r:.40}"
            )
        made[token] = float(value)
    return made


def _grammar(fields: Fields) -> tuple[str, Any] | None:
    """What the text must follow: response_format of OpenAI, structured_outputs of vLLM, grammar of llama-server."""
    found = list(_formats(fields))
    if len(found) > 1:
        raise RequestError(400, f"{found[0][0]} and {found[1][0]} exclude each other", found[1][0])
    if not found:
        return None
    name, kind, value = found[0]
    fits = {
        "json": isinstance(value, dict | str | bool),
        "regex": isinstance(value, str),
        "grammar": isinstance(value, str),
        "choice": isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value),
    }
    if not fits[kind]:
        expected = {"json": "a JSON schema", "choice": "a list of texts"}.get(kind, "a text")
        raise RequestError(400, f"{name} needs {expected}", name, why=f"it is {value!r:.60}")
    return kind, value


def _formats(fields: Fields) -> Sequence[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = []
    form = fields.mapping("response_format")
    kind = form.get("type")
    if kind == "json_object":
        found.append(("response_format", "json", form.get("schema") or {"type": "object"}))
    elif kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else form.get("schema")
        found.append(("response_format", "json", schema))
    elif kind in ("grammar", "regex"):
        found.append(("response_format", kind, form.get(kind)))
    elif form and kind != "text":
        why = f"it is {kind!r:.60}"
        raise RequestError(
            400,
            "response_format.type must be text, json_object, json_schema, grammar or regex",
            "response_format",
            why=why,
        )
    outputs = fields.mapping("structured_outputs")
    for name in ("json", "regex", "choice", "grammar"):
        if outputs.get(name) is not None:
            found.append(("structured_outputs", name, outputs[name]))
        if fields.get(f"guided_{name}") is not None:
            found.append((f"guided_{name}", name, fields.get(f"guided_{name}")))
    if fields.get("grammar") is not None:
        found.append(("grammar", "grammar", fields.get("grammar")))
    return found
