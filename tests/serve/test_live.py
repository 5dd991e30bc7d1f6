"""A real server: clients that leave, the official client, requests that are anything, and very many of them."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monoplan.serve.app import make_app
from monoplan.serve.engine import Engine
from tests.serve.support import NAME, SlowEngine, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def slow(lm: Any) -> Iterator[tuple[Any, str]]:
    """An engine that takes its time, and the address of a server in front of it."""
    with SlowEngine(lm) as engine, serving(make_app(engine, NAME)) as url:
        yield engine, url


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(slow: tuple[Any, str], stream: bool) -> None:
    engine, url = slow
    before = engine.stats.finished.get("cancelled", 0)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in client.recv(4096)
        until(lambda: engine.stats.running == 1)
    until(lambda: engine.stats.finished.get("cancelled", 0) == before + 1)
    until(lambda: engine.stats.running == 0)


def test_long_preparation_does_not_hold_up_others(slow: tuple[Any, str]) -> None:
    """While a prompt of 300,000 characters is tokenized, /health answers."""
    _, url = slow

    async def both() -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            long = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "ab " * 100_000}))
            answers = 0
            while not long.done():
                assert (await client.get("/health")).status_code == 200
                answers += 1
            return answers, long.result().status_code

    answers, status = asyncio.run(both())
    assert status == 400 and answers > 2


def test_the_official_client(lm: Any) -> None:
    openai = pytest.importorskip("openai")
    with Engine(lm) as engine, serving(make_app(engine, NAME, api_key="k")) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == [NAME]
            plain = client.chat.completions.create(model=NAME, messages=HI, max_tokens=9, temperature=0)
            expected = lm.generate_batch([lm.tokenizer.chat(HI)], 9)[0].text
            assert plain.choices[0].message.content == expected and plain.usage.completion_tokens == 9
            chunks = list(
                client.chat.completions.create(
                    model=NAME,
                    messages=HI,
                    max_tokens=9,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
            assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.total_tokens > 9
            told = client.chat.completions.create(model=NAME, messages=HI, max_tokens=3, logprobs=True, top_logprobs=2)
            assert len(told.choices[0].logprobs.content[0].top_logprobs) == 2
            assert (
                client.completions.create(model=NAME, prompt="x", max_tokens=3, logprobs=1).choices[0].logprobs.tokens
            )
            schema = {
                "type": "object",
                "properties": {"x": {"enum": ["a", "b"]}},
                "required": ["x"],
                "additionalProperties": False,
            }
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
            made = client.chat.completions.create(model=NAME, messages=HI, max_tokens=300, response_format=form)
            assert json.loads(made.choices[0].message.content)["x"] in "ab"
            tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
            given = {"model": NAME, "messages": HI, "tools": tools, "tool_choice": "required", "max_tokens": 400}
            (call, *_) = client.chat.completions.create(**given).choices[0].message.tool_calls
            assert call.function.name == "f" and json.loads(call.function.arguments)["x"] in "ab"
            with client.chat.completions.stream(**given, parallel_tool_calls=False) as stream:
                final = stream.get_final_completion()
            assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)["x"] in "ab"
            answered = [
                *HI,
                final.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": final.choices[0].message.tool_calls[0].id, "content": "5"},
            ]
            assert client.chat.completions.create(model=NAME, messages=answered, tools=tools, max_tokens=2).choices
            vectors = client.embeddings.create(model=NAME, input=["one", "two"])  # as base64, unless it is asked not to
            plain = client.embeddings.create(model=NAME, input="two", encoding_format="float")
            assert vectors.data[1].embedding == pytest.approx(plain.data[0].embedding) and vectors.usage.total_tokens
            assert len(client.embeddings.create(model=NAME, input="two", dimensions=8).data[0].embedding) == 8
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model=NAME, input="one", dimensions=9999)
            with pytest.raises(openai.NotFoundError, match="there is no model"):
                client.chat.completions.create(model="other", messages=HI)
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(model=NAME, messages=HI, temperature=-1)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()


# Bodies that are nearly right: a field of a good one is replaced by something else.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
CALLS = [{"function": {"name": "f", "arguments": "{}"}}]
NEAR = st.sampled_from(
    [0, 1, -1, 2, 1e9, -0.5, 2**70, "", "a", [], [[]], [None], {}, {"type": "function"}, {"type": "json_object"},
     "auto", "required", [{"role": "user"}], [{"role": "assistant", "tool_calls": CALLS}], {"0": 1}, {"1": "x"},
     {"include_usage": 1},
     [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], {"function": {"name": "f"}}]
)  # fmt: skip
FIELDS = """
    model prompt messages suffix echo n best_of logprobs top_logprobs stream stream_options max_tokens
    max_completion_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed stop
    logit_bias ignore_eos response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    grammar tools tool_choice parallel_tool_calls functions modalities chat_template_kwargs add_generation_prompt
    content tokens add_special input encoding_format dimensions
""".split()


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from([COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"]),
    changes=st.dictionaries(st.sampled_from(FIELDS), ANYTHING | NEAR, max_size=4),
)
def test_any_body_is_answered_or_refused_but_nothing_fails(call: Any, path: str, changes: Any) -> None:
    good: dict[str, Any] = {"prompt": "a", "messages": HI, "max_tokens": 2, "tokens": [5], "input": "a"}
    response = call(path, {**good, **changes})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_many_requests_some_of_which_leave_or_make_no_sense(lm: Any, count: int) -> None:
    """None is lost without an answer, finished greedy texts are those of single streams, nothing is left over."""
    choose = random.Random(7)
    prompts = ["".join(choose.choices("abcdefgh ", k=choose.randint(1, 60))) for _ in range(12)]
    expected = {(p, n): g.text for n in (1, 5, 17) for p, g in zip(prompts, lm.generate_batch(prompts, n), strict=True)}
    outcomes: dict[str, int] = {}

    async def one(client: httpx.AsyncClient, number: int) -> str:
        pick = random.Random(number)
        prompt, n = pick.choice(prompts), pick.choice((1, 5, 17))
        body = {"prompt": prompt, "max_tokens": n, "temperature": 0}
        kind = pick.choice(["whole", "whole", "stream", "stream", "leave", "leave at once", "damaged", "wrong"])
        if kind == "damaged":
            content = json.dumps(body)[: pick.randint(0, 30)]
            answer = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
        elif kind == "wrong":
            assert (await client.post(COMPLETIONS, json={**body, "temperature": -1})).status_code == 400
        elif kind == "leave at once":
            with pytest.raises(httpx.TimeoutException):
                await client.post(COMPLETIONS, json={**body, "max_tokens": 900, "ignore_eos": True}, timeout=0.02)
        elif kind == "whole":
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[prompt, n]
        else:
            text, ended = "", False
            longer = {"max_tokens": 900, "ignore_eos": True} if kind == "leave" else {}
            async with client.stream("POST", COMPLETIONS, json={**body, **longer, "stream": True}) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    ended = ended or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if kind == "leave":
                            break
            assert kind == "leave" or (ended and text == expected[prompt, n])
        return kind

    async def all_of_them(url: str) -> None:
        limits = httpx.Limits(max_connections=40, max_keepalive_connections=20)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            gate = asyncio.Semaphore(32)

            async def guarded(number: int) -> None:
                async with gate:
                    kind = await one(client, number)
                    outcomes[kind] = outcomes.get(kind, 0) + 1

            await asyncio.gather(*(guarded(number) for number in range(count)))

    with Engine(lm, queue=64) as engine:
        app = make_app(engine, NAME)
        with serving(app) as url:
            asyncio.run(all_of_them(url))
            until(lambda: engine.stats.running == engine.stats.waiting == app.state.server.active == 0)
        gc.collect()
        from monoplan.serve.app import Work

        left = [o for o in gc.get_objects() if isinstance(o, Work)]
        assert not left and sum(outcomes.values()) == count and len(outcomes) == 6
