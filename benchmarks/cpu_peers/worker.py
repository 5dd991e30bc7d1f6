"""A process that runs one peer: `python -m cpu_peers.worker`, a line of JSON in, a line of JSON out.

The first line is the Job; every further one a command: `{"do": "decode", "tokens": 128, "steps": 16, "capacity": 640}`.
An answer has "ok" true and its values, or "ok" false with "kind" (unavailable or failed) and "why".
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

PEERS = {  # name: module and the variant that its `open_engine` is told
    "monoplan": ("peer_monoplan", ""),
    "monoplan-avx512": ("peer_monoplan", "avx512"),
    "monoplan-avx2": ("peer_monoplan", "avx2"),
    "torch-eager": ("peer_torch", "transformers eager"),
    "torch-compile": ("peer_torch", "transformers compile"),
    "script-eager": ("peer_torch", "script eager"),
    "script-compile": ("peer_torch", "script compile"),
    "script-frozen": ("peer_torch", "script compile frozen"),
    "llama.cpp": ("peer_llamacpp", ""),
    "llama-cpp-python": ("peer_llama_cpp_python", ""),
    "openvino": ("peer_openvino", ""),
    "openvino-genai": ("peer_openvino_genai", ""),
    "limits": ("peer_limits", ""),
    "fake": ("peer_fake", ""),
    "fake-missing": ("peer_fake", "missing"),
    "fake-failing": ("peer_fake", "failing"),
}
LEVELS = ("monoplan-avx512", "monoplan-avx2")  # beside each other, when they are asked for
FAKES = ("fake", "fake-missing", "fake-failing")  # for the tests of the runner


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    data = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, data["cpus"])
    try:
        from cpu_peers.engine import Job

        job = Job.from_json(data)
        module, variant = PEERS[job.peer]
        engine = importlib.import_module(f"cpu_peers.{module}").open_engine(job, variant)
    except Exception as error:
        _fail(answers, error)
        return
    _say(answers, {"ok": True, "about": engine.about})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            return
        try:
            _say(answers, {"ok": True, **_answer(job, engine, command)})
        except Exception as error:
            _fail(answers, error)


def _answer(job: Any, engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    what = command["do"]
    if what == "settle":
        engine.settle()
        return {}
    if what == "measure":
        limits: dict[str, Any] = engine.measure()
        return limits
    if what == "growth":
        prompts = [job.work.prompt(tokens) for tokens in command["contexts"]]
        return {"seconds": engine.growth(prompts, command["steps"], command["capacities"])}
    ids = job.work.prompt(command["tokens"])
    if what == "prefill":
        return {"seconds": [engine.prefill(ids, command["capacity"]) for _ in range(command["times"])]}
    if what == "decode":
        return {"seconds": engine.decode(ids, command["steps"], command["capacity"])}
    if what == "tokens":
        return {"tokens": engine.tokens(ids, command["count"], command["capacity"])}
    raise ValueError(f"no such command: {what}")


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _fail(answers: TextIO, error: Exception) -> None:
    from cpu_peers.engine import Unavailable

    missing = isinstance(error, ImportError | Unavailable)
    if not missing:
        traceback.print_exc()
    why = f"{error}" if missing else f"{type(error).__name__}: {error}"
    _say(answers, {"ok": False, "kind": "unavailable" if missing else "failed", "why": why})


if __name__ == "__main__":
    main()
