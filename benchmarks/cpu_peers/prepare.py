"""Writes what a peer loads, in a process of its own: `python -m cpu_peers.prepare`, a Workload and a peer's name in.

Converting a model takes several times its memory, which neither the runner nor a worker may keep.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cpu_peers.workload import COMPRESSIONS, QUANTIZED, Workload, write_files

NEEDS = {"llama.cpp": "gguf", "llama-cpp-python": "gguf", "openvino": "openvino", "openvino-genai": "openvino"}
READ_GGUF = ("monoplan", "monoplan-avx512", "monoplan-avx2", "llama.cpp", "llama-cpp-python", "limits")


def prepare(work: Workload, peer: str) -> str | None:
    """Makes the peer's form of the model; a text says why it can't be made."""
    from cpu_peers.client import environment

    data = {"model": work.model, "dtype": work.dtype, "folder": str(work.folder), "form": NEEDS.get(peer, "checkpoint")}
    compressed = data["form"] == "openvino" and work.dtype in COMPRESSIONS
    if work.low_bit and not compressed:
        if peer not in READ_GGUF:
            return "it reads no GGUF file"
        data["form"] = "gguf"
    if work.dtype in QUANTIZED and not compressed and peer not in (*READ_GGUF[:3], "limits"):
        return "it is not given quantized checkpoints"
    done = subprocess.run(
        [sys.executable, "-m", "cpu_peers.prepare"],
        input=json.dumps(data),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return f"no model for it: {last[0].removeprefix('ModuleNotFoundError: ')}"


def main() -> None:
    data = json.loads(sys.stdin.read())
    form = data.pop("form")
    work = Workload(**{**data, "folder": Path(data["folder"])})
    write_files(work)
    if form == "gguf":
        from cpu_peers.gguf_file import write_gguf

        write_gguf(work)
    elif form == "openvino":
        from cpu_peers.openvino_file import write_openvino

        write_openvino(work)


if __name__ == "__main__":
    main()
