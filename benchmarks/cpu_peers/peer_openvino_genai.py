"""OpenVINO GenAI: its LLMPipeline on the converted model; prompts are ids, times are the pipeline's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_peers.engine import Engine, Job
from cpu_peers.peer_openvino import settings


class GenAiEngine(Engine):
    def __init__(self, pipeline: Any, about: str) -> None:
        self.pipeline, self.about = pipeline, about

    def prefill(self, ids: list[int], capacity: int) -> float:
        return float(self._generate(ids, 1).perf_metrics.get_ttft().mean) / 1e3

    def decode(self, ids: list[int], steps: int, capacity: int) -> list[float]:
        durations = self._generate(ids, steps + 1).perf_metrics.raw_metrics.m_durations  # microseconds
        if len(durations) < steps:
            raise RuntimeError(f"asked for {steps} steps, got the times of {len(durations)}")
        return [float(d) / 1e6 for d in durations[-steps:]]

    def tokens(self, ids: list[int], count: int, capacity: int) -> list[int]:
        return [int(token) for token in self._generate(ids, count).tokens[0]]

    def _generate(self, ids: list[int], count: int) -> Any:
        import openvino
        import openvino_genai

        wanted = openvino_genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = count, True, False
        wanted.apply_chat_template = False
        array = np.asarray([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(array), openvino.Tensor(np.ones_like(array)))
        return self.pipeline.generate(inputs, wanted)


def open_engine(job: Job, variant: str) -> GenAiEngine:
    import openvino_genai

    path = job.file or job.work.openvino.parent
    pipeline = openvino_genai.LLMPipeline(str(path), "CPU", **settings(job))
    return GenAiEngine(pipeline, f"openvino_genai {openvino_genai.__version__}")
