"""/v1/embeddings: vectors are those of the model's states in float64, whatever runs beside them, for any client."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.api import Compiled
from monoplan.frontend.module import Module
from monoplan.frontend.specs import spec
from monoplan.ir.errors import ArgumentError
from monoplan.ir.tolerances import tolerance
from monoplan.llm import PAGE, CompiledLM
from monoplan.models.generate.generation import ModelStep
from monoplan.runtime.ranks.comm import Communicator, threads
from monoplan.serve.app import make_app
from monoplan.serve.engine import Engine
from tests.ranks import run_ranks
from tests.serve.support import NAME, Call, caller
from tests.serve.test_engine import Answer, ask

PATH = "/v1/embeddings"
Array = np.ndarray[Any, Any]


class States(ModelStep):
    """The states of all tokens behind the last norm, of a text without a cache."""

    def forward(self, input_ids: Any) -> Any:
        return self.lm.model(input_ids, all_tokens=True)


def reference(module: Module) -> Any:
    """Vectors of token ids by the numpy interpreter in float64."""
    states = Compiled(States(module), target="reference", input_ids=spec(1, "seq", dtype="int64"))

    def vector(ids: list[int], pooling: str = "mean") -> Array:
        found = states(input_ids=np.array([ids])).astype(np.float64)[0]
        pooled = found.mean(0) if pooling == "mean" else found[-1]
        return np.asarray(pooled / np.linalg.norm(pooled))

    return vector


@pytest.fixture(scope="module")
def want(lm: CompiledLM) -> Any:
    return reference(lm.model)


@pytest.fixture(scope="module", params=["mean", "last"])
def pooled(lm: CompiledLM, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(lm, step_tokens=48, pooling=request.param) as made:
        yield made


def embed(engine: Engine, ids: list[int]) -> tuple[Any, Answer]:
    answer = Answer()
    return engine.embed(ids, answer), answer


def near(got: Any, expected: Array) -> bool:
    rtol, atol = tolerance("f32", "model")
    return bool(np.allclose(got, expected, rtol=rtol, atol=atol))


def test_vectors_are_those_of_float64(pooled: Engine, want: Any) -> None:
    """Of texts in one piece, in several, of one token more than some, and beside answers that share their beginning."""
    draw = np.random.default_rng(2)
    texts = [draw.integers(2, 200, size=n).tolist() for n in (1, 2, 48, 49, PAGE, 3 * PAGE + 7)]
    answers = [ask(pooled, texts[-1][:150], 30) for _ in range(2)]
    asked = [embed(pooled, ids) for ids in (*texts, texts[-1])]
    for ids, (request, answer) in zip((*texts, texts[-1]), asked, strict=True):
        assert answer.wait().finish_reason == "stop"
        assert near(request.vector, want(ids, pooled.pooling))
    assert all(a.wait_ids() == pooled.lm.generate_ids(texts[-1][:150], 30, eos_token_id=()) for a in answers)
    assert answers[0].request is not None and pooled.stats.running == 0


def test_a_vector_whose_pages_were_taken_is_the_same(lm: CompiledLM, want: Any) -> None:
    draw = np.random.default_rng(3)
    texts = [draw.integers(2, 200, size=150).tolist() for _ in range(4)]
    with Engine(lm, cache_tokens=4 * PAGE, step_tokens=32) as engine:
        answers = [ask(engine, texts[0], 60), *(embed(engine, ids)[1] for ids in texts[1:])]
        asked = [embed(engine, ids) for ids in texts]
        for ids, (request, answer) in zip(texts, asked, strict=True):
            answer.wait()
            assert near(request.vector, want(ids))
        assert all(answer.wait().finish_reason in ("stop", "length") for answer in answers)
        assert engine.stats.preemptions > 0
        with pytest.raises(ArgumentError, match="room for 256"):
            embed(engine, texts[0] * 2)


@pytest.mark.full
def test_ranks_give_the_same_vector(lm: CompiledLM, want: Any) -> None:
    ids = list(range(2, 90))

    def rank(comm: Communicator) -> Any:
        engine = Engine(mp.compile(lm.model, tp=comm), step_tokens=48)
        if comm.rank:
            return engine.follow()
        with engine:
            request, answer = embed(engine, ids)
            answer.wait()
        return request.vector

    assert near(run_ranks(threads(2), rank)[0], want(ids))


def test_what_may_be_asked_for(call: Call, lm: CompiledLM, want: Any) -> None:
    texts = ["one", "one two", "x"]
    ids = [lm.tokenizer.encode(text) for text in texts]
    answer = call(PATH, {"input": texts, "model": NAME}).json()
    assert answer["object"] == "list" and answer["model"] == NAME
    assert answer["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert all(one["object"] == "embedding" for one in answer["data"])
    for one, tokens in zip(answer["data"], ids, strict=True):
        assert near(one["embedding"], want(tokens))
    first = answer["data"][0]["embedding"]
    for given in ("one", ids[0], [ids[0]]):
        assert call(PATH, {"input": given}).json()["data"][0]["embedding"] == first
    packed = call(PATH, {"input": "one", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == first
    cut = call(PATH, {"input": "one", "dimensions": 5}).json()["data"][0]["embedding"]
    assert near(cut, np.array(first[:5]) / np.linalg.norm(first[:5])) and len(cut) == 5
    many = call(PATH, {"input": [[2 + i % 50, 3] for i in range(100)]}).json()["data"]
    assert [one["index"] for one in many] == list(range(100)) and many[0]["embedding"] == many[50]["embedding"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input must be"),
        ({"input": ""}, "input is empty"),
        ({"input": ["a", ""]}, "input is empty"),
        ({"input": []}, "input must be"),
        ({"input": [1, "a"]}, "input must be"),
        ({"input": [10**6]}, "token id 1000000"),
        ({"input": "a b " * 1000}, "the context of the model"),
        ({"input": ["a"] * 2049}, "the limit is 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format must be"),
        ({"input": "a", "dimensions": 0}, "dimensions must be"),
        ({"input": "a", "dimensions": 10**6}, "dimensions must be"),
    ],
)
def test_what_is_refused(call: Call, body: Any, words: str) -> None:
    answer = call(PATH, body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_a_full_queue_and_a_failed_engine(lm: CompiledLM) -> None:
    with Engine(lm, queue=1) as engine:
        refused = caller(make_app(engine, NAME))(PATH, {"input": ["a"] * 60})
        assert refused.status_code in (200, 429)  # by how fast the engine is
        while engine.stats.running or engine.stats.waiting:  # what the refused request had put in
            time.sleep(0.01)
        engine._call_plan = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        failed = caller(make_app(engine, NAME))(PATH, {"input": "a"})
        assert failed.status_code == 500 and "a step failed" in failed.text
        assert engine.stats.running == engine.stats.waiting == 0


def test_pooling_is_checked(lm: CompiledLM) -> None:
    with pytest.raises(ArgumentError, match="pooling must be mean or last, got 'max'"):
        Engine(lm, pooling="max")
