"""`monoplan serve` as a process: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from monoplan.cli.main import main
from tests.models.support import tiny_checkpoint
from tests.serve.support import wait_for_address

BODY = {"prompt": "Once", "temperature": 0, "max_tokens": 800, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@contextlib.contextmanager
def command(checkpoint: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command and its address; it is killed if a test leaves it running."""
    line = [sys.executable, "-m", "monoplan", "serve", str(checkpoint), "--dtype", "float32", "--port", "0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        _, address, _ = wait_for_address(process)
        assert process.stdout is not None
        threading.Thread(target=process.stdout.read, daemon=True).start()  # so that its log never blocks it
        for _ in range(500):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            time.sleep(0.02)
        yield process, address
    finally:
        process.kill()
        process.wait()


def test_it_serves_and_finishes_what_runs(checkpoint: Path) -> None:
    with command(checkpoint, "--api-key", "k") as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        assert url.startswith("http://127.0.0.1:")
        client.headers["authorization"] = "Bearer k"
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 3000}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            statuses = []
            for _ in range(500):
                statuses.append(httpx.get(f"{url}/health").status_code)
                if statuses[-1] == 503:
                    break
                time.sleep(0.01)
            assert statuses[-1] == 503
            refused = httpx.post(f"{url}/v1/completions", json=BODY, headers={"authorization": "Bearer k"})
            assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


def test_a_second_signal_ends_it_at_once(checkpoint: Path) -> None:
    with command(checkpoint, "-q", MONOPLAN_API_KEY="secret") as (process, url):
        key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 4000}, headers=key) as answer:
            assert answer.status_code == 200
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_a_port_in_use_and_other_mistakes(checkpoint: Path, capsys: Any, monkeypatch: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(checkpoint), "--port", str(taken.getsockname()[1])]) == 1
    assert "can't listen on 127.0.0.1" in capsys.readouterr().err
    assert main(["serve", str(checkpoint), "--port", "70000"]) == 2
    assert main(["serve", str(checkpoint), "--api-key", " "]) == 2
    assert main(["serve", str(checkpoint), "--streams", "0"]) == 2
    assert "--streams must be 1 or more" in capsys.readouterr().err
