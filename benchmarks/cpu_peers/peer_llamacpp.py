"""llama.cpp through `xllamacpp`, which has its server in the process: prompts are ids, times are the server's own."""

from __future__ import annotations

import json
from typing import Any

from cpu_peers.engine import Engine, Job


class LlamaCppEngine(Engine):
    def __init__(self, server: Any, about: str) -> None:
        self.server, self.about = server, about

    def prefill(self, ids: list[int], capacity: int) -> float:
        return float(self._complete(ids, 1)["timings"]["prompt_ms"]) / 1e3

    def decode(self, ids: list[int], steps: int, capacity: int) -> list[float]:
        timings = self._complete(ids, steps + 1)["timings"]  # the first token is the prompt's
        if timings["predicted_n"] != steps + 1:
            raise RuntimeError(f"asked for {steps + 1} tokens, got {timings['predicted_n']}")
        return [timings["predicted_ms"] / steps / 1e3] * steps

    def tokens(self, ids: list[int], count: int, capacity: int) -> list[int]:
        choice = self._complete(ids, count, logprobs=1)["choices"][0]
        return [int(entry["id"]) for entry in choice["logprobs"]["content"]]

    def _complete(self, ids: list[int], count: int, **more: Any) -> dict[str, Any]:
        request = {
            "prompt": ids,
            "n_predict": count,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            **more,
        }
        answer = self.server.handle_completions(request)
        found: dict[str, Any] = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in found:
            raise RuntimeError(f"llama.cpp answered {found}")
        return found


def open_engine(job: Job, variant: str) -> LlamaCppEngine:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(job.file or job.work.gguf)
    params.n_ctx, params.n_parallel = job.capacity, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    if job.work.dtype == "f32":  # else its own 16 bits
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.port, params.n_threads_http, params.warmup = 0, 1, False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    return LlamaCppEngine(server, f"xllamacpp {xllamacpp.__version__}; {xllamacpp.get_system_info()}")
