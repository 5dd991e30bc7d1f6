"""A model that ranks share: rank 0 has the door and decides, the others follow. As threads, and under mpirun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import monoplan as mp
from monoplan.llm import CompiledLM
from monoplan.models import AutoModel
from monoplan.models.llama import LlamaForCausalLM
from monoplan.runtime.ranks.comm import Communicator, threads
from monoplan.serve.engine import Engine
from monoplan.serve.request import Busy
from tests.integration.mpi_support import launcher, options
from tests.models.support import tiny_checkpoint, tiny_config
from tests.needs import check
from tests.ranks import run_ranks
from tests.serve.support import wait_for_address
from tests.serve.test_engine import VOCABULARY, ask, prompts

BODY = {"prompt": "Once upon", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(tiny_config(vocab_size=VOCABULARY, max_position_embeddings=1024))


def test_texts_are_those_of_one_process(model: LlamaForCausalLM) -> None:
    alone = mp.compile(model)
    *asked, one = prompts(5)
    asked += [(one * 200)[:200]]
    settings = [{}, {"temperature": 0.9, "seed": 3}, {}, {"temperature": 1.2, "repetition_penalty": 1.3}, {}]

    def rank(comm: Communicator) -> float:
        lm = mp.compile(model, tp=comm)
        engine = Engine(lm, streams=4, step_tokens=48, cache_tokens=600 - comm.rank)  # the least of all counts
        if comm.rank:
            engine.follow()
            return float(sum(abs(cache.numpy()).sum() for cache in engine._k))
        with engine:
            answers = [ask(engine, p, **s) for p, s in zip(asked, settings, strict=True)]
            for p, s, answer in zip(asked, settings, answers, strict=True):
                assert answer.wait_ids() == alone.generate_ids(p, 20, eos_token_id=(), **s)
            again = [*asked[-1][:150], 3]
            answer = ask(engine, again)
            assert answer.wait_ids() == alone.generate_ids(again, 20, eos_token_id=())
            assert answer.request is not None
            assert answer.request.cached_tokens == 150  # two whole pages, and rows of a third one, copied on all ranks
        return float(sum(abs(cache.numpy()).sum() for cache in engine._k))

    sums = run_ranks(threads(2), rank)
    assert min(sums) > 0 and sums[0] != sums[1]  # each has heads of its own


def test_a_rank_that_fails_ends_all_answers(model: LlamaForCausalLM) -> None:
    ready, told = threading.Barrier(2), []

    def rank(comm: Communicator) -> None:
        engine = Engine(mp.compile(model, tp=comm), streams=4)
        if comm.rank:
            engine._call_plan = lambda *_: 1 / 0  # type: ignore[method-assign,assignment,return-value]
            ready.wait(60)
            engine.follow()
        engine.start()
        ready.wait(60)
        told.append(ask(engine, [1, 2, 3]).wait())
        with pytest.raises(Busy, match="the engine has failed"):
            ask(engine, [1])
        engine.close()

    with pytest.raises(ZeroDivisionError):
        run_ranks(threads(2), rank)
    assert told[0].finish_reason == "error" and "failed: division by zero" in str(told[0].error)


@contextlib.contextmanager
def served(checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """mpirun with two ranks of the command, its address, and what it prints."""
    own = [sys.executable, "-m", "monoplan", "serve", str(checkpoint), "--dtype", "float32", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "MONOPLAN_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(launcher()), *options(), "-n", "2", *own],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        _, address, lines = wait_for_address(process)
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        yield process, address, lines
        reader.join(30)
    finally:
        process.kill()
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of both ranks, rank 0 first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = dict(v.partition("=")[::2] for v in (folder / "environ").read_text().split("\0"))
            line = (folder / "cmdline").read_text().split("\0")
            number = variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK"))
            if number is not None and line[1:4] == ["-m", "monoplan", "serve"]:
                found.append((int(number), int(folder.name)))
    assert [number for number, _ in sorted(found)] == [0, 1]
    return [pid for _, pid in sorted(found)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    check("mpi")
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@pytest.mark.full
@pytest.mark.parametrize("kill", [False, True])
def test_the_command_under_mpirun(checkpoint: Path, kill: bool) -> None:
    lm: CompiledLM = mp.compile(AutoModel.from_pretrained(checkpoint, dtype="float32"))
    with served(checkpoint) as (process, url, lines), httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post("/v1/completions", json={**BODY, "max_tokens": 30})
        expected = lm.generate_batch([BODY["prompt"]], 30, eos_token_id=())[0].text  # type: ignore[list-item]
        assert answer.json()["choices"][0]["text"] == expected
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 3000, "stream": True}) as stream:
            events = (line for line in stream.iter_lines() if line)
            assert next(events).startswith("data: {")
            first, second = ranks_of(process)
            os.kill(second if kill else first, signal.SIGKILL if kill else signal.SIGTERM)
            *_, last, done = events
        assert done == "data: [DONE]"
        if kill:
            assert "rank 1 has ended" in json.loads(last[6:])["error"]["message"]
            assert process.wait(60) != 0
        else:
            assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
            assert process.wait(60) == 0
        end = time.monotonic() + 30
        while kill and not any("rank 1 has ended" in line for line in lines):
            assert time.monotonic() < end, "".join(lines)
            time.sleep(0.05)
