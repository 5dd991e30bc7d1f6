"""Other people's clients against a real server: llm with our plugin, and LangChain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from monoplan.serve.app import make_app
from monoplan.serve.engine import Engine
from tests.needs import needs
from tests.serve.support import NAME, serving

pytestmark = [pytest.mark.full, needs("clients")]
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "title": "Answer",
    "description": "An answer.",
    "properties": {"x": {"enum": ["a", "b"]}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(lm: Any) -> Iterator[str]:
    with Engine(lm) as engine, serving(make_app(engine, NAME, api_key="k")) as made:
        yield made


@pytest.fixture
def expected(lm: Any) -> str:
    return str(lm.generate_batch([lm.tokenizer.chat(HI)], 6)[0].text)


def test_langchain(url: str, expected: str) -> None:
    from langchain_openai import ChatOpenAI as chat_class  # noqa: N813

    chat = chat_class(model=NAME, base_url=f"{url}/v1", api_key="k", temperature=0, max_tokens=6, max_retries=0)
    answer = chat.invoke("hi")
    assert answer.content == expected and answer.usage_metadata["output_tokens"] == 6
    assert "".join(chunk.content for chunk in chat.stream("hi")) == expected
    free = chat_class(model=NAME, base_url=f"{url}/v1", api_key="k", max_tokens=300)
    assert free.with_structured_output(SCHEMA, method="json_schema").invoke("hi")["x"] in ("a", "b")
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    (call, *_) = free.bind_tools([tool], tool_choice="required").invoke("hi").tool_calls
    assert call["name"] == "f" and call["args"]["x"] in ("a", "b")


def test_llm_by_our_plugin(url: str, expected: str, tmp_path: Any) -> None:
    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "MONOPLAN_URL": url, **variables}
        line = [sys.executable, "-m", "llm", *words]
        return subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )

    options = ("-m", "monoplan", "-o", "temperature", "0", "-o", "max_tokens", "6")
    for more in ((), ("--no-stream",)):
        answer = run("hi", *options, *more, MONOPLAN_API_KEY="k")
        assert answer.returncode == 0 and answer.stdout.strip() == expected.strip(), answer.stderr
    schema = run("hi", "-m", "monoplan", "--schema", json.dumps(SCHEMA), MONOPLAN_API_KEY="k")
    assert json.loads(schema.stdout)["x"] in ("a", "b"), schema.stderr
    assert "API key" in run("hi", *options, MONOPLAN_API_KEY="wrong").stderr
