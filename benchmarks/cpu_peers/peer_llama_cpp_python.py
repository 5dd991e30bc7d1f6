"""llama.cpp through `llama-cpp-python`, which is built where it is installed, with all that this very CPU has.

The wheel of `xllamacpp` is built for any CPU with AVX2; this one says what a build of one's own is worth.
"""

from __future__ import annotations

from typing import Any

from cpu_peers.engine import Ids, Job, StepEngine

F32 = 0  # llama.cpp's number of the type


class LlamaCppPythonEngine(StepEngine):
    def __init__(self, llm: Any, about: str) -> None:
        self.llm, self.about = llm, about

    def reset(self, capacity: int) -> None:
        self.llm.reset()

    def step(self, ids: Ids) -> int:
        self.llm.eval(ids[0].tolist())
        return int(self.llm.sample(temp=0.0))


def open_engine(job: Job, variant: str) -> LlamaCppPythonEngine:
    import llama_cpp

    kinds = {"type_k": F32, "type_v": F32} if job.work.dtype == "f32" else {}  # else its own 16 bits
    llm = llama_cpp.Llama(
        model_path=str(job.file or job.work.gguf),
        n_ctx=job.capacity,
        n_threads=job.threads,
        n_threads_batch=job.threads,
        n_batch=2048,
        n_ubatch=512,
        verbose=False,
        **kinds,
    )
    system = llama_cpp.llama_print_system_info().decode()
    return LlamaCppPythonEngine(llm, f"llama-cpp-python {llama_cpp.__version__}; {system}")
