"""The engine: texts do not depend on their neighbours, beginnings are shared, nobody is left without an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError
from monoplan.llm import PAGE, CompiledLM
from monoplan.models.llama import LlamaForCausalLM
from monoplan.serve.engine import Engine
from monoplan.serve.request import Busy, Piece, Request, Sampling
from tests.models.support import tiny_config

VOCABULARY = 64


@pytest.fixture(scope="module")
def lm() -> CompiledLM:
    config = tiny_config(vocab_size=VOCABULARY, max_position_embeddings=1024)
    made = mp.compile(LlamaForCausalLM(config))
    made.paged_plan()
    return made


class Answer:
    """Collects what the engine says about one request."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ended = threading.Event()
        self.request: Request | None = None

    def __call__(self, piece: Piece) -> None:
        assert not self.ended.is_set(), "a piece after the last one"
        self.pieces.append(piece)
        if piece.finish_reason is not None:
            self.ended.set()

    def wait(self) -> Piece:
        assert self.ended.wait(60), "no answer"
        return self.pieces[-1]

    def wait_ids(self) -> list[int]:
        self.wait()
        return self.ids

    @property
    def ids(self) -> list[int]:
        return [p.token.token for p in self.pieces if p.token is not None]


def ask(engine: Engine, prompt: list[int], count: int = 20, **settings: Any) -> Answer:
    answer = Answer()
    answer.request = engine.submit(prompt, Sampling(count, **settings), answer)
    return answer


def prompts(count: int, longest: int = 150, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCABULARY, size=int(rng.integers(1, longest))).tolist() for _ in range(count)]


@pytest.fixture
def engine(lm: CompiledLM) -> Iterator[Engine]:
    with Engine(lm, streams=6, step_tokens=48) as made:
        yield made


def test_texts_are_those_of_a_single_stream(lm: CompiledLM, engine: Engine) -> None:
    asked = prompts(14)
    settings = [{}, {"temperature": 0.9, "seed": 3, "top_k": 20}, {"temperature": 1.2, "repetition_penalty": 1.3}] * 5
    answers = [ask(engine, p, **s) for p, s in zip(asked, settings, strict=False)]
    for p, s, answer in zip(asked, settings, answers, strict=False):
        assert answer.wait().finish_reason == "length"
        assert answer.ids == lm.generate_ids(p, 20, eos_token_id=(), **s)


def test_equal_beginnings_run_once(lm: CompiledLM, engine: Engine) -> None:
    (long,) = prompts(1, seed=5)
    long = (long * 200)[:200]
    first = ask(engine, long)
    first.wait()
    before = engine.stats.prompt_tokens
    for tail in ([], [7, 8, 9]):
        again = ask(engine, long + tail)
        again.wait()
        assert again.request is not None and again.request.cached_tokens == len(long) + len(tail) - max(1, len(tail))
        assert again.ids == lm.generate_ids(long + tail, 20, eos_token_id=())
    assert engine.stats.prompt_tokens - before <= len("789")
    other = ask(engine, long[:100] + [1, 2])
    other.wait()
    assert other.request is not None and other.request.cached_tokens == 100
    assert other.ids == lm.generate_ids(long[:100] + [1, 2], 20, eos_token_id=())


def test_equal_beginnings_that_come_together_run_once(lm: CompiledLM) -> None:
    (one, other) = prompts(2, seed=6)
    long, short = (one * 200)[:200], other[:9]
    with Engine(lm, streams=4, step_tokens=32) as engine:
        answers = [ask(engine, p) for p in (long, long + [5], long[:150] + [3], short)]
        for p, answer in zip((long, long + [5], long[:150] + [3], short), answers, strict=True):
            assert answer.wait_ids() == lm.generate_ids(p, 20, eos_token_id=())
        cached = [a.request.cached_tokens for a in answers if a.request is not None]
        assert cached[0] == cached[3] == 0 and min(cached[1:3]) >= 2 * PAGE  # whole pages at least
        started = [a.request.started or 0.0 for a in answers if a.request is not None]
        assert started[3] < started[1]  # who needs nothing of others does not wait


def test_texts_that_lose_their_pages_are_the_same(lm: CompiledLM) -> None:
    asked = prompts(8, seed=2)
    with Engine(lm, streams=8, cache_tokens=5 * PAGE, step_tokens=64) as engine:
        answers = [ask(engine, p, 60) for p in asked]
        for p, answer in zip(asked, answers, strict=True):
            assert answer.wait().finish_reason == "length" and answer.ids == lm.generate_ids(p, 60, eos_token_id=())
        assert engine.stats.preemptions > 0 and engine.stats.cache_usage == 0


def test_a_cache_that_is_too_small_for_a_prompt(lm: CompiledLM) -> None:
    with Engine(lm, cache_tokens=PAGE) as engine:
        with pytest.raises(ArgumentError, match="the cache room for 64"):
            ask(engine, [1] * 65)
        assert ask(engine, [1] * 60, 100).wait().finish_reason == "length"


def test_eos_and_logprobs(lm: CompiledLM, engine: Engine) -> None:
    want = lm.generate_ids([1, 2, 3], 20, eos_token_id=())
    end = want[4]
    answer = ask(engine, [1, 2, 3], eos_ids=frozenset([end]), logprobs=3)
    assert answer.wait().finish_reason == "eos" and answer.ids == want[: want.index(end) + 1]
    for piece in answer.pieces:
        assert piece.token is not None and len(piece.token.top) == 3
        assert piece.token.top[0] == (piece.token.token, piece.token.logprob)
        assert [p for _, p in piece.token.top] == sorted((p for _, p in piece.token.top), reverse=True)


def test_biases_and_penalties(engine: Engine) -> None:
    assert set(ask(engine, [1, 2], logit_bias={9: 100.0}).wait_ids()) == {9}
    free = ask(engine, [1, 2]).wait_ids()
    assert len(set(ask(engine, [1, 2], presence_penalty=2.0, frequency_penalty=2.0).wait_ids())) >= len(set(free))
    with pytest.raises(ArgumentError, match="token id 64 is out of range"):
        ask(engine, [1], logit_bias={VOCABULARY: 1.0})


class Alternating:
    """Even tokens, then odd ones, in turn; complete after six."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def mask(self) -> Any:
        return np.arange(VOCABULARY) % 2 == len(self.taken) % 2

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return len(self.taken) == 6


def test_a_constraint(engine: Engine) -> None:
    answer = ask(engine, [1, 2], temperature=1.0, constraint=Alternating())
    assert answer.wait().finish_reason == "eos"
    assert [token % 2 for token in answer.ids] == [0, 1, 0, 1, 0, 1]


def test_a_constraint_that_fails_ends_its_own_text_alone(engine: Engine) -> None:
    class Broken(Alternating):
        def mask(self) -> Any:
            raise ValueError("no grammar")

    good, bad = ask(engine, [1, 2], 40), ask(engine, [1, 2], constraint=Broken())
    last = bad.wait()
    assert last.finish_reason == "error" and "no grammar" in str(last.error)
    assert good.wait().finish_reason == "length"


def test_cancelling(engine: Engine) -> None:
    others = [ask(engine, [i], 100) for i in range(6)]
    waiting = ask(engine, [9], 100)
    for answer in (others[0], waiting):
        assert answer.request is not None
        engine.cancel(answer.request)
        assert answer.wait().finish_reason == "cancelled"
    assert all(answer.wait().finish_reason == "length" for answer in others[1:])
    assert engine.stats.finished["cancelled"] == 2 and engine.stats.running == 0


def test_a_full_queue_and_a_closed_engine(lm: CompiledLM) -> None:
    engine = Engine(lm, queue=2)  # not started: nobody takes from the queue
    answers = [ask(engine, [1]) for _ in range(2)]
    with pytest.raises(Busy, match="2 requests are waiting already"):
        ask(engine, [1])
    engine.start()
    engine.close()
    assert [a.wait().finish_reason for a in answers] == ["length"] * 2
    with pytest.raises(Busy, match="closing"):
        ask(engine, [1])


def test_closing_without_finishing(lm: CompiledLM) -> None:
    engine = Engine(lm, streams=1).start()
    answers = [ask(engine, [i], 900) for i in range(3)]
    engine.close(finish=False)
    assert [a.wait().finish_reason for a in answers] == ["cancelled"] * 3


def test_a_step_that_fails_is_told_and_others_go_on(lm: CompiledLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(lm) as engine:
        run, failed = engine._run_plan, []

        def once(texts: Any, count: int) -> None:
            if not failed:
                failed.append(count)
                raise RuntimeError("out of luck")
            run(texts, count)

        monkeypatch.setattr(engine, "_run_plan", once)
        last = ask(engine, [1, 2, 3]).wait()
        assert last.finish_reason == "error" and "out of luck" in str(last.error)
        assert ask(engine, [1, 2, 3]).wait().finish_reason == "length"


def test_an_engine_that_dies_answers_everybody(lm: CompiledLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lm)

    def die() -> None:
        raise SystemExit("gone")

    monkeypatch.setattr(engine, "step", die)
    answer = ask(engine, [1])
    engine.start()
    last = answer.wait()
    assert last.finish_reason == "error" and "gone" in str(last.error)
    assert engine._thread is not None
    engine._thread.join()
    assert engine.stats.failure is not None and "gone" in engine.stats.failure
    with pytest.raises(Busy, match="has failed"):
        ask(engine, [1])


def test_a_listener_that_is_gone(engine: Engine) -> None:
    def gone(piece: Piece) -> None:
        raise RuntimeError("Event loop is closed")

    engine.submit([1, 2], Sampling(900), gone)
    assert ask(engine, [3], 5).wait().finish_reason == "length"
    engine.close()
    assert engine.stats.finished == {"cancelled": 1, "length": 1}


@pytest.mark.parametrize("name", ["streams", "cache_tokens", "step_tokens", "queue"])
def test_bad_sizes(lm: CompiledLM, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be a whole number"):
        Engine(lm, **{name: -1})


def test_bad_requests(engine: Engine) -> None:
    for prompt, words in (([], "empty"), ([VOCABULARY], "out of range"), ([1] * 2000, "2000 tokens")):
        with pytest.raises(ArgumentError, match=words):
            ask(engine, prompt)
    for settings in ({"presence_penalty": 3}, {"logit_bias": {1: 1e9}}, {"logprobs": 21}, {"temperature": -1}):
        with pytest.raises(ArgumentError, match=next(iter(settings))):
            Sampling(**settings)  # type: ignore[arg-type]
