"""The OpenAI protocol, request by request: what is answered, in which form, and what is refused in words."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from monoplan.serve.app import make_app
from monoplan.serve.engine import Engine
from tests.serve.support import NAME, Call, SlowEngine, caller, tiny_lm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream; its last event must be [DONE]."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]" and all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part[6:]) for part in parts[:-2]]


def single_stream(lm: Any, prompt: str, count: int) -> str:
    return str(lm.generate_batch([prompt], count)[0].text)


def test_a_completion(call: Call, lm: Any) -> None:
    answer = call(COMPLETIONS, {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}).json()
    assert answer["object"] == "text_completion" and answer["model"] == NAME and answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice["text"] == single_stream(lm, "Once upon", 12) and choice["finish_reason"] == "length"
    used = {
        "prompt_tokens": 9,
        "completion_tokens": 12,
        "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["usage"] == used


def test_a_stream_of_a_completion_is_the_same_text(call: Call, lm: Any) -> None:
    chunks = events(call(COMPLETIONS, {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "stream": True}))
    assert "".join(c["choices"][0]["text"] for c in chunks) == single_stream(lm, "Once upon", 12)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["text"] == "" and len({c["id"] for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)


@pytest.mark.parametrize("prompt", ["ab", [66, 67], ["ab", "ab"], [[66, 67], [66, 67]]])
def test_prompts_in_every_form(call: Call, lm: Any, prompt: Any) -> None:
    answer = call(COMPLETIONS, {"prompt": prompt, "max_tokens": 5, "temperature": 0}).json()
    expected = single_stream(lm, "ab", 5)
    many = len(prompt) if not isinstance(prompt, str) and not isinstance(prompt[0], int) else 1
    assert lm.tokenizer.encode("ab") == [66, 67]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, expected) for i in range(many)]
    assert answer["usage"]["prompt_tokens"] == 2 * many


def test_echo_and_several_answers(call: Call, lm: Any) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 3, "temperature": 0, "echo": True}
    answer = call(COMPLETIONS, body).json()
    expected = [p + single_stream(lm, p, 3) for p in ("ab", "ab", "c", "c")]
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 12
    chunks = events(call(COMPLETIONS, {**body, "stream": True}))
    texts = ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)]
    assert texts == expected


def test_a_chat(call: Call, lm: Any) -> None:
    answer = call(CHAT, {"model": NAME, "messages": HI, "max_completion_tokens": 7, "temperature": 0}).json()
    expected = lm.generate_batch([lm.tokenizer.chat(HI)], 7)[0]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text} and choice["logprobs"] is None
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(expected.prompt_ids)


def test_a_stream_of_a_chat_has_the_parts_in_order(call: Call, lm: Any) -> None:
    body = {
        "messages": HI,
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    chunks = events(call(CHAT, body))
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(c["choices"][0]["delta"]) == {"content"} for c in middle)
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 7
    assert all(c["usage"] is None for c in chunks[:-1]) and first["object"] == "chat.completion.chunk"
    text = "".join(c["choices"][0]["delta"]["content"] for c in middle)
    assert (
        text == call(CHAT, {**body, "stream": False, "stream_options": None}).json()["choices"][0]["message"]["content"]
    )


def test_logprobs_of_both_kinds(call: Call) -> None:
    body = {"prompt": "ab", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = call(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 4
    assert all(
        max(best.values()) == own for best, own in zip(found["top_logprobs"], found["token_logprobs"], strict=True)
    )
    body = {"messages": HI, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    call(CHAT, body)  # the others find the keys of its prompt: computed in one piece they differ in their last bits
    content = call(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"] < 0
    chunks = events(call(CHAT, {**body, "stream": True}))
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


def test_logprobs_of_parts_of_characters(call: Call) -> None:
    """Tokens of the tiny model are bytes: those without a text of their own must not share one name."""
    body = {"prompt": "ab", "max_tokens": 7, "temperature": 0, "logprobs": 20, "guided_regex": "€a€"}
    answer = call(COMPLETIONS, body).json()["choices"][0]
    found, euro = answer["logprobs"], [rf"bytes:\x{byte:02x}" for byte in "€".encode()]
    assert answer["text"] == "€a€" and found["tokens"] == [*euro, "a", *euro]
    assert found["text_offset"] == [0, 0, 0, 1, 2, 2, 2]
    for token, own, best in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert best[token] == own and len(best) in (20, 21)


def test_seeds_and_temperatures(call: Call) -> None:
    body = {"prompt": "ab", "max_tokens": 12, "temperature": 1.5, "seed": 5, "n": 2}
    one, again, other = (
        [c["text"] for c in call(COMPLETIONS, {**body, "seed": seed}).json()["choices"]] for seed in (5, 5, 77)
    )
    assert one == again != other and one[0] != one[1]
    plain = call(COMPLETIONS, {**body, "top_k": 1, "n": 1}).json()["choices"][0]["text"]
    assert plain == call(COMPLETIONS, {**body, "temperature": 0, "n": 1}).json()["choices"][0]["text"]


def test_stop_texts_and_biases(call: Call) -> None:
    bias = {"66": 100}  # always an a
    body = {"prompt": "x", "max_tokens": 6, "temperature": 0, "logit_bias": bias}
    assert call(COMPLETIONS, body).json()["choices"][0]["text"] == "aaaaaa"
    stopped = call(COMPLETIONS, {**body, "stop": ["aaa"]}).json()["choices"][0]
    assert stopped == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    ended = call(COMPLETIONS, {**body, "logit_bias": {"0": 100}}).json()
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["usage"]["completion_tokens"] == 0
    going = call(COMPLETIONS, {**body, "logit_bias": {"0": 100}, "ignore_eos": True}).json()
    assert going["choices"][0]["finish_reason"] == "length"
    two = {**body, "logit_bias": {"66": 100, "67": 100}, "max_tokens": 20}
    (plain, varied) = (
        call(COMPLETIONS, {**two, "frequency_penalty": x}).json()["choices"][0]["text"] for x in (0.0, 2.0)
    )
    assert set(plain) < set(varied) == {"a", "b"}


def test_answers_follow_a_schema(call: Call) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        body = {"messages": HI, "temperature": 1.0, "seed": seed, "max_tokens": 400, "response_format": form, "n": 2}
        for choice in call(CHAT, body).json()["choices"]:
            made = json.loads(choice["message"]["content"])
            assert made["city"] in ("Paris", "Oslo") and 0 <= made["count"] <= 99 and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"regex": "a{3}b"}}, ("aaab",)),
        ({"guided_grammar": 'start: "x" "y"'}, ("xy",)),
        ({"grammar": 'root ::= "p" "q"'}, ("pq",)),
        ({"response_format": {"type": "regex", "regex": "zz"}}, ("zz",)),
        ({"response_format": {"type": "text"}, "logit_bias": {"66": 100}, "max_tokens": 2}, ("aa",)),
        ({"structured_outputs": {"json": {"const": 5}}}, ("5",)),
    ],
)
def test_answers_follow_grammars_of_every_kind(call: Call, given: Any, texts: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI})):
        (choice,) = call(path, {"temperature": 0, "max_tokens": 50, **prompt, **given}).json()["choices"]
        assert (choice["text"] if path is COMPLETIONS else choice["message"]["content"]) in texts


def test_any_json_object(call: Call) -> None:
    body = {"messages": HI, "max_tokens": 30, "response_format": {"type": "json_object"}, "seed": 1}
    assert call(CHAT, body).json()["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_required_calls(call: Call) -> None:
    body = {"messages": HI, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    body |= {"seed": 3, "temperature": 0.8}
    (choice,) = call(CHAT, body).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert made["function"]["name"] == "weather" and set(json.loads(made["function"]["arguments"])) == {"city", "count"}
    chunks = events(call(CHAT, {**body, "stream": True}))
    calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather" and calls[0]["id"] and all(c["index"] == 0 for c in calls)
    assert "".join(c["function"]["arguments"] for c in calls) == made["function"]["arguments"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_named_call(call: Call) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": HI, "tools": [other, TOOL], "tool_choice": choice, "max_tokens": 400, "seed": 2}
    (made,) = call(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "weather" and json.loads(made["function"]["arguments"])["count"] >= 0


def test_tools_reach_the_template_unless_none_is_chosen(call: Call) -> None:
    counts = [
        call(CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": choice, "max_tokens": 1}).json()["usage"][
            "prompt_tokens"
        ]
        for choice in ("auto", "none")
    ]
    plain = call(CHAT, {"messages": HI, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert counts[0] > counts[1] == plain


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {}, "prompt", "prompt must be"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt must be"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt", "prompt must be"),
    (COMPLETIONS, {"prompt": [999999]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": "a" * 1025}, "prompt", "context"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt", "limit"),
    (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n", "more than"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, "logprobs", "not supported"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "from 0 to 20"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "from 0"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "a number"),
    (COMPLETIONS, {"prompt": "a", "top_p": 2}, "top_p", "from 0 to 1"),
    (COMPLETIONS, {"prompt": "a", "min_p": -0.1}, "min_p", "from 0 to 1"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k", "whole number"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "from 1"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "from 1"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n", "whole number"),
    (COMPLETIONS, {"prompt": "a", "seed": "x"}, "seed", "whole number"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "from 0.01"),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop", "a text or a list"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, "stop", "limits"),
    (COMPLETIONS, {"prompt": "a", "stop": "a" * 1025}, "stop", "limits"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "no token id"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "-100 to 100"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "an object"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "true or false"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (CHAT, {}, "messages", "at least one"),
    (CHAT, {"messages": []}, "messages", "at least one"),
    (CHAT, {"messages": "hi"}, "messages", "a list"),
    (CHAT, {"messages": HI * 2049}, "messages", "limit"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 2000}]}, "messages", "context"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": HI, "tools": [5]}, "tools", "tools[0]"),
    (CHAT, {"messages": HI, "tools": [TOOL] * 129}, "tools", "limit"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "tool_choice must be"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": "x"}}}, "tool_choice", "weather"),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"function": {"name": [1]}}}, "tool_choice", "weather"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions", "give tools"),
    (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities", "not supported"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, "response_format", "JSON schema"),
    (CHAT, {"messages": HI, "grammar": 5}, "grammar", "needs a text"),
    (CHAT, {"messages": HI, "guided_choice": []}, "guided_choice", "list of texts"),
    (CHAT, {"messages": HI, "guided_regex": "a", "grammar": "b"}, "grammar", "exclude"),
    (CHAT, {"messages": HI, "guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "can't give"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED, ids=[f"{b!r:.60}" for _, b, _, _ in REFUSED])
def test_what_makes_no_sense_is_refused_in_words(call: Call, path: str, body: Any, param: str, words: str) -> None:
    response = call(path, body)
    error = response.json()["error"]
    assert response.status_code == 400 and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param and words in error["message"]


@pytest.mark.parametrize(
    "given",
    [
        {"guided_regex": "(("},
        {"guided_grammar": "start: nothing"},
        {"guided_json": {"type": "nothing"}},
        {"guided_json": "{"},
        {"guided_json": {"$ref": "file:///etc/passwd"}},
        {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
        {"grammar": "root ::= ("},
    ],
)
def test_damaged_grammars_are_refused(call: Call, given: Any) -> None:
    response = call(CHAT, {"messages": HI, **given})
    assert response.status_code == 400 and "can't be used" in response.json()["error"]["message"]


def test_bodies_that_are_no_json(call: Call) -> None:
    json_type = {"content-type": "application/json"}
    for content in (b"", b"{", b"\xff", b"[]", b"5", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"):
        response = call(CHAT, method="POST", content=content, headers=json_type)
        assert response.status_code == 400 and "body" in response.json()["error"]["message"]
    assert call(CHAT, method="POST", content=b"{}").status_code == 415
    text = '{"prompt": "\\ud800", "max_tokens": 1}'
    assert "surrogate" in call(COMPLETIONS, method="POST", content=text, headers=json_type).json()["error"]["message"]
    wrong = '{"model": "\\ud800", "prompt": "x"}'
    assert call(COMPLETIONS, method="POST", content=wrong, headers=json_type).status_code == 404


def test_other_routes_and_models(call: Call) -> None:
    assert call("/nothing").status_code == 404 and call("/nothing").json()["error"]["type"] == "not_found_error"
    assert call(CHAT).status_code == 405
    wrong = call(CHAT, {"model": "gpt-4", "messages": HI})
    assert wrong.status_code == 404 and wrong.json()["error"]["code"] == "model_not_found"
    assert call(CHAT, {"model": "monoplan", "messages": HI, "max_tokens": 1}).status_code == 200
    (card,) = call("/v1/models").json()["data"]
    assert card["id"] == NAME and card["object"] == "model" and call(f"/v1/models/{NAME}").json() == card
    assert call("/v1/models/other").status_code == 404
    assert call("/health").json() == {"status": "ok"} and "version" in call("/version").json()


def test_tokens_of_texts(call: Call, lm: Any) -> None:
    ids = lm.tokenizer.encode("hé")
    assert call("/tokenize", {"prompt": "hé"}).json() == {"count": 3, "max_model_len": 1024, "tokens": ids}
    assert call("/tokenize", {"content": "hé"}).json()["tokens"] == ids
    assert call("/tokenize", {"prompt": "h", "return_token_strs": True}).json()["token_strs"] == ["h"]
    assert call("/tokenize", {"messages": HI}).json()["tokens"] == lm.tokenizer.chat(HI)
    assert call("/detokenize", {"tokens": ids}).json() == {"prompt": "hé", "content": "hé"}
    for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {"tokens": ["a"]})):
        assert call(path, body).status_code == 400
    assert call("/detokenize", {"tokens": [10**9]}).status_code == 400


def test_metrics_have_the_names_that_dashboards_know(call: Call) -> None:
    call(COMPLETIONS, {"prompt": "ab", "max_tokens": 3})
    call(COMPLETIONS, {"prompt": 5})
    text = call("/metrics").text
    label = f'{{model_name="{NAME}"}}'
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}{label}" in values
    for name in (
        "prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count", "request_decode_time_seconds_count",
    ):  # fmt: skip
        assert float(values[f"vllm:{name}{label}"]) > 0, name
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"):
        assert f"vllm:{name}{label}" in values
    assert float(values[f'vllm:request_success_total{{finished_reason="length",model_name="{NAME}"}}']) > 0
    assert float(values['monoplan:requests_refused_total{status="400"}']) > 0


def test_an_api_key(engine: Any) -> None:
    call = caller(make_app(engine, NAME, api_key="sécret"))
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic sécret".encode()}, {"x-api-key": ""}):
        for path in ("/v1/models", "/metrics", "/nothing"):
            response = call(path, headers=headers)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    right = "sécret".encode()
    assert call("/v1/models", headers={"authorization": b"Bearer " + right}).status_code == 200
    assert call("/v1/models", headers={"x-api-key": right}).status_code == 200
    assert call("/health").status_code == call("/").status_code == 200


def test_the_size_of_a_body_is_limited(engine: Any) -> None:
    call = caller(make_app(engine, NAME, max_body=200))
    assert call(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200
    response = call(COMPLETIONS, {"prompt": "a" * 300})
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"

    async def many() -> Any:  # without a length in front
        for _ in range(100):
            yield b"x" * 50

    assert (
        call(COMPLETIONS, method="POST", content=many(), headers={"content-type": "application/json"}).status_code
        == 413
    )


def test_other_sites_have_no_access(engine: Any) -> None:
    call = caller(make_app(engine, NAME, hosts=["localhost", "::1"]))
    assert call("/v1/models").status_code == call("/v1/models", headers={"host": "[::1]:8000"}).status_code == 200
    assert call("/v1/models", headers={"host": "localhost:80"}).status_code == 200
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        assert call("/v1/models", headers={"host": host}).status_code == 403
    assert "access-control-allow-origin" not in call("/v1/models", headers={"origin": "https://a.example"}).headers
    allowed = caller(make_app(engine, NAME, cors=["https://a.example"], api_key="k"))
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert allowed(CHAT, method="OPTIONS", headers=asked).headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in allowed("/health", headers={"origin": "https://b.example"}).headers


def test_a_full_queue_is_429_and_a_closing_server_503(lm: Any) -> None:
    with SlowEngine(lm, streams=1, queue=1) as engine:
        app = make_app(engine, NAME)

        async def crowd() -> list[int]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                body = {"prompt": "a", "max_tokens": 4, "logit_bias": {"66": 100}}
                answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(6)))
                busy = next(a for a in answers if a.status_code == 429)
                assert busy.headers["retry-after"] and busy.json()["error"]["code"] == "rate_limit_exceeded"
                return [a.status_code for a in answers]

        statuses = asyncio.run(crowd())
        assert set(statuses) == {200, 429}
        several = caller(app)(COMPLETIONS, {"prompt": "a", "max_tokens": 4, "n": 8})
        assert several.status_code == 429  # all answers or none
        limited = caller(make_app(engine, NAME, requests=0))
        assert limited(COMPLETIONS, {"prompt": "a"}).status_code == 429
        app.state.server.closing = True
        closed = caller(app)
        assert closed(COMPLETIONS, {"prompt": "a"}).status_code == closed("/health").status_code == 503
        app.state.server.closing, engine._failure = False, "out of memory"
        failed = closed(COMPLETIONS, {"prompt": "a"})
        assert failed.status_code == closed("/health").status_code == 503 and "out of memory" in failed.text
        engine._failure = None


class DyingEngine(Engine):
    """An engine whose third step fails: by an error, or so that its thread ends."""

    steps, error = 0, Exception

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            raise self.error("no memory")
        super().step()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_nobody_waits_for_an_engine_that_failed(lm: Any, ends: bool, stream: bool) -> None:
    with DyingEngine(lm) as engine:
        engine.error = SystemExit if ends else RuntimeError
        call = caller(make_app(engine, NAME))
        response = call(COMPLETIONS, {"prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": stream})
        if stream:
            assert "no memory" in events(response)[-1]["error"]["message"]
        else:
            assert response.status_code == 500 and "no memory" in response.json()["error"]["message"]
        again = call(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        assert again.status_code == call("/health").status_code == (503 if ends else 200)


def test_a_grammar_that_fails_on_the_way_ends_its_own_answer(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from monoplan.serve.constraint import GrammarConstraint

    def mask(self: Any) -> Any:
        self._matcher.consume_token(0)  # what it does not allow
        self._check()

    monkeypatch.setattr(GrammarConstraint, "mask", mask)
    response = call(COMPLETIONS, {"prompt": "a", "guided_regex": "abc"})
    assert response.status_code == 400 and "can't be followed" in response.json()["error"]["message"]
    assert call(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_model_without_tokenizer_takes_ids(lm: Any) -> None:
    from monoplan import compile as compiled
    from monoplan.models import LlamaForCausalLM
    from tests.models.support import tiny_config

    with Engine(compiled(LlamaForCausalLM.from_config(tiny_config(), seed=3))) as engine:
        call = caller(make_app(engine, NAME))
        answer = call(COMPLETIONS, {"prompt": [3, 4], "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] <= 3 and answer["choices"][0]["text"] == ""
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI}), ("/tokenize", {"prompt": "x"})):
            assert "no tokenizer" in call(path, body).json()["error"]["message"]


def test_a_model_without_chat_template() -> None:
    with Engine(tiny_lm(None)) as engine:
        response = caller(make_app(engine, NAME))(CHAT, {"messages": HI})
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
