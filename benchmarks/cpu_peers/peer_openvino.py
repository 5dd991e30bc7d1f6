"""OpenVINO: the converted model, one request, its keys and values as state inside of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cpu_peers.engine import Ids, Job, StepEngine, Unavailable
from cpu_peers.workload import DTYPES


def settings(job: Job) -> dict[str, Any]:
    """Threads and precisions as the other peers have them; compiled code is kept for the warm start. With compressed
    weights it chooses the precisions itself: x and the cache become 8 bits where that is faster."""
    precision = job.work.dtype if job.work.dtype in DTYPES else None
    return {
        "INFERENCE_NUM_THREADS": job.threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        **({} if precision is None else {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}),
        "CACHE_DIR": str(job.cache / "openvino"),
    }


class OpenVinoEngine(StepEngine):
    def __init__(self, request: Any, about: str) -> None:
        self.request, self.about, self.length = request, about, 0

    def reset(self, capacity: int) -> None:
        self.request.reset_state()
        self.length = 0

    def step(self, ids: Ids) -> int:
        after = self.length + ids.shape[1]
        self.request.infer(
            {
                "input_ids": ids,
                "attention_mask": np.ones((1, after), np.int64),
                "position_ids": np.arange(self.length, after)[None],
                "beam_idx": np.zeros(1, np.int32),
            },
            share_inputs=True,
        )
        self.length = after
        return int(self.request.get_tensor("logits").data[0, -1].argmax())


def open_engine(job: Job, variant: str) -> OpenVinoEngine:
    import openvino

    core = openvino.Core()
    if job.file is not None:
        raise Unavailable("OpenVINO has no reader for this file")
    try:
        compiled = core.compile_model(job.work.openvino, "CPU", settings(job))
    except RuntimeError as error:
        if "precision" not in str(error).lower():
            raise
        raise Unavailable(f"{job.work.dtype} on this CPU: {str(error).strip().splitlines()[-1]}") from error
    used = compiled.get_property("INFERENCE_PRECISION_HINT"), compiled.get_property("INFERENCE_NUM_THREADS")
    about = f"openvino {openvino.__version__}, computes in {used[0].get_type_name()}, {used[1]} threads"
    return OpenVinoEngine(compiled.create_infer_request(), about)
