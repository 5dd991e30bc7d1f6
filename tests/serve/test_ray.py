"""The example of docs/serving.md: two replicas under Ray Serve, one of which is killed while requests run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import monoplan as mp
from monoplan.ir.errors import ArgumentError
from monoplan.models import AutoModel
from tests.integration.mpi_support import launcher, options
from tests.models.support import tiny_checkpoint
from tests.needs import needs

pytestmark = [pytest.mark.full, needs("ray")]
DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
BODY = {"prompt": "Once upon", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_two_replicas_answer_and_one_may_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray import serve
    from ray.util.state import list_actors

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    checkpoint = tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=1024)
    # Where ports and temporary files are its own: other Ray clusters of this machine stay as they are.
    ray.init(num_cpus=2, include_dashboard=True, address="local", log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18731})
        found = re.search(r"<!-- run: ray -->\n```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
        assert found is not None
        exec(found[1].replace("path/to/model", str(checkpoint)), {})
        url = "http://127.0.0.1:18731"

        def ask(number: int) -> tuple[int, str]:
            try:
                answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
            except httpx.TransportError as error:
                return 0, type(error).__name__
            return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

        expected = ask(0)
        assert expected[0] == 200 and len(expected[1]) > 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, range(40))) == {expected}
            metrics = list(pool.map(lambda _: httpx.get(f"{url}/metrics", timeout=60).text, range(60)))
        seen = set(map(_prompt_tokens, metrics))
        assert len(seen) == 2 and min(seen) > 0  # both had some

        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}, timeout=60) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        # How many tokens come in one event depends on the load of the machine; the text does not.
        events = [json.loads(line)["choices"] for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        assert "".join(choices[0]["text"] for choices in events if choices) == expected[1]

        actors = list_actors(address=ray.get_runtime_context().gcs_address, limit=1000)  # other clusters may run here
        replicas = [a for a in actors if "ServeReplica" in a["class_name"] and a["state"] == "ALIVE"]
        assert len(replicas) == 2
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = [pool.submit(ask, number) for number in range(60)]
            time.sleep(0.1)
            os.kill(replicas[0]["pid"], signal.SIGKILL)
            answers = [task.result() for task in running]
        assert expected in answers
        assert all(a == expected or a[0] == 0 or a[0] >= 500 for a in answers), answers  # the right text, or an error
        end = time.monotonic() + 240
        while ask(0) != expected or _running(serve) != 2:
            assert time.monotonic() < end, "the replica did not come back"
            time.sleep(0.5)
    finally:
        serve.shutdown()
        ray.shutdown()


@needs("mpi")
def test_a_replica_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun starts the ranks of a replica; when one dies, Ray starts the replica again."""
    import ray
    from ray import serve

    from monoplan.serve.ray_app import application

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    checkpoint = tiny_checkpoint(tmp_path / "tiny", max_position_embeddings=1024)
    lm = mp.compile(AutoModel.from_pretrained(checkpoint, dtype="float32"))
    expected = lm.generate_batch(["Once upon"], 40, eos_token_id=())[0].text
    ray.init(num_cpus=2, include_dashboard=False, address="local", log_to_driver=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": 18732})
        given = {"model": checkpoint, "dtype": "float32", "num_cpus": 2, "ranks": 2}
        given["launcher"] = " ".join([str(launcher()), *options()])
        serve.run(application(given), name="monoplan", route_prefix="/")

        def ask() -> str:
            answer = httpx.post("http://127.0.0.1:18732/v1/completions", json=BODY, timeout=60)
            return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else ""

        assert ask() == expected
        followers = _followers()
        assert len(followers) == 1
        os.kill(followers[0], signal.SIGKILL)
        end = time.monotonic() + 240
        while ask() != expected or _followers() in (followers, []):
            assert time.monotonic() < end, "the replica did not come back"
            time.sleep(0.5)
    finally:
        serve.shutdown()
        ray.shutdown()


def _followers() -> list[int]:
    """The processes of ranks other than 0."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (process / "cmdline").read_text().split("\0")
            if line[1:3] == ["-m", "monoplan.serve.ray_rank"]:
                found.append(int(process.name))
    return found


def _running(serve: Any) -> int:
    states = serve.status().applications["monoplan"].deployments["monoplan"].replica_states
    return int({getattr(key, "value", key): count for key, count in states.items()}.get("RUNNING", 0))


def _prompt_tokens(text: str) -> float:
    found = re.search(r"vllm:prompt_tokens_total\{.*\} (\S+)", text)
    assert found is not None
    return float(found[1])


def test_options_are_checked() -> None:
    from monoplan.serve.ray_app import application

    for args, words in (
        ({"modle": "x"}, "did you mean model"),
        ({"streams": "many"}, "a number"),
        ({"replicas": "x"}, "two"),
        ({"ranks": "x"}, "a number"),
    ):
        with pytest.raises(ArgumentError, match=words):
            application(args)
