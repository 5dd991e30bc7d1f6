"""PyTorch models through `from_torch`, beside inductor with freezing, OpenVINO and eager torch, in one run.

    python benchmarks/torch_models.py [bert vit whisper resnet] [--batch 1 8] [--dtype f32 bf16] [--threads 2]
                                      [--repeats 5] [--peers inductor openvino eager] [--where]
    python benchmarks/torch_models.py bert vit --gpu --batch 1 32 --dtype bf16 [--peers reduce-overhead max-autotune]

Needs torch; transformers, torchvision and openvino for what is asked of them. Calls alternate; times are medians in
milliseconds. The last column is the fastest peer's time over monoplan's. `first` is what the first call took, with its
compilation: give both compilers empty caches (MONOPLAN_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR) where that matters.
`--where` shows what each kernel takes.

`--gpu`: arguments and results stay on the GPU. Two rows for each case: `call`, where the host waits for the results of
each call, and `queued`, the time of one of 20 calls that are enqueued behind each other.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

import monoplan as mp
from monoplan.pytorch.program import as_array

Call = Callable[[], Any]
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def bert() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    from transformers import BertConfig, BertModel

    def inputs(batch: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(5, 30000, (batch, 128)), "attention_mask": torch.ones(batch, 128).long()}

    return BertModel(BertConfig()), inputs


def vit() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), lambda batch: {"pixel_values": torch.randn(batch, 3, 224, 224)}


def whisper() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    from transformers import WhisperConfig, WhisperModel

    heads, width = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}, {"d_model": 512}
    config = WhisperConfig(
        encoder_layers=6, decoder_layers=1, encoder_ffn_dim=2048, decoder_ffn_dim=2048, **heads, **width
    )
    return WhisperModel(config).encoder, lambda batch: {"input_features": torch.randn(batch, 80, 3000)}


def resnet() -> tuple[torch.nn.Module, Callable[[int], dict[str, torch.Tensor]]]:
    models = importlib.import_module("torchvision.models")
    return models.resnet50(weights=None), lambda batch: {"x": torch.randn(batch, 3, 224, 224)}


def import_torchvision() -> None:
    """Its build for CUDA too, whose own operators a torch for CPUs cannot load: the models do not use them."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass
    except RuntimeError:
        global library  # operators live as long as it does
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


MODELS = {"bert": bert, "vit": vit, "whisper": whisper, "resnet": resnet}


def first(found: Any) -> Any:
    """The first output of a model."""
    return (
        first(next(iter(found.values() if isinstance(found, dict) else found)))
        if isinstance(found, dict | tuple)
        else found
    )


class Compiled:
    """monoplan's call."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        on_gpu = any(value.is_cuda for value in inputs.values())
        self.arrays = inputs if on_gpu else {name: as_array(value) for name, value in inputs.items()}
        self.fast: Any = mp.compile(mp.from_torch(model, **inputs), target="cuda" if on_gpu else "cpu")

    def __call__(self) -> Any:
        return self.fast(**self.arrays)

    def profile(self) -> Any:
        return self.fast.profile(**self.arrays)


def monoplan(model: Any, inputs: dict[str, Any], dtype: str, threads: int) -> tuple[Call, str]:
    return Compiled(model, inputs), dtype


def inductor(model: Any, inputs: dict[str, Any], dtype: str, threads: int) -> tuple[Call, str]:
    import torch._inductor.config as config

    config.freezing = True
    torch._dynamo.reset()
    compiled = torch.compile(model)
    return lambda: compiled(**inputs), dtype


def openvino(model: Any, inputs: dict[str, Any], dtype: str, threads: int) -> tuple[Call, str]:
    """Of the f32 model: where the CPU has no bf16, OpenVINO takes f16."""
    import openvino as ov

    wide = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    converted = ov.convert_model(torch.export.export(model.float(), (), wide))
    model.to(TYPES[dtype])
    asked = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1"}
    compiled = ov.Core().compile_model(converted, "CPU", {**asked, "INFERENCE_PRECISION_HINT": dtype})
    request, given = compiled.create_infer_request(), [value.numpy() for value in wide.values()]

    def call() -> Any:
        request.infer(given, share_inputs=True)
        return request.get_output_tensor(0).data

    return call, compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()


def eager(model: Any, inputs: dict[str, Any], dtype: str, threads: int) -> tuple[Call, str]:
    return lambda: model(**inputs), dtype


def in_mode(mode: str) -> Callable[..., tuple[Call, str]]:
    """torch.compile with CUDA graphs."""

    def peer(model: Any, inputs: dict[str, Any], dtype: str, threads: int) -> tuple[Call, str]:
        torch._dynamo.reset()
        compiled = torch.compile(model, mode=mode)

        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(**inputs)

        call(), call()  # the second one records the graph
        return call, dtype

    return peer


PEERS = {"inductor": inductor, "openvino": openvino, "eager": eager}
GPU_PEERS = {mode: in_mode(mode) for mode in ("reduce-overhead", "max-autotune")} | {"eager": eager}
QUEUED = 20


def measure(calls: dict[str, Call], repeats: int, count: int = 1) -> dict[str, float]:
    """Median seconds of a call of each; they take turns, `count` calls at a time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(count):
                call()
            wait()
            times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(taken) for name, taken in times.items()}


def wait() -> None:
    """For the GPU, if there is one: the current streams of torch and CuPy wait for plans."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()


def floats(value: Any) -> Any:
    """A result of numpy, torch or CuPy as numbers on the host."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float32)
    return (value if isinstance(value, torch.Tensor) else torch.from_dlpack(value)).float().cpu().numpy()


def difference(found: Any, wanted: Any) -> float:
    return float(np.abs(floats(found) - floats(wanted)).max())


def row(name: str, batch: int, dtype: str, peers: Iterable[str], args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model, x = model.eval(), inputs(batch)
    if args.gpu:
        model, x = model.cuda(), {n: v.cuda() for n, v in x.items()}
    wanted = first(model(**x))
    model, x = model.to(TYPES[dtype]), {n: v.to(TYPES[dtype]) if v.is_floating_point() else v for n, v in x.items()}
    calls: dict[str, Any] = {}
    about: dict[str, str] = {}
    known = GPU_PEERS if args.gpu else PEERS
    for peer in ("monoplan", *peers):
        start = time.perf_counter()
        calls[peer], kind = (known.get(peer) or monoplan)(model, x, dtype, args.threads)
        off = difference(first(calls[peer]()), wanted)
        about[peer] = f"{peer} {kind}, first {time.perf_counter() - start:.1f} s, off by {off:.1g}"
    details, digits = "; ".join(about.values()), 3 if args.gpu else 1
    for kind, count in (("call", 1), ("queued", QUEUED)) if args.gpu else (("", 1),):
        times = measure(calls, args.repeats, count)
        cells = (f"{times[n] * 1e3:9.{digits}f}" if n in times else f"{'-':>9}" for n in ("monoplan", *known))
        others = [t for n, t in times.items() if n != "monoplan"]
        ratio = f"{min(others) / times['monoplan']:6.2f} x" if others else ""
        print(f"{name:8} {batch:5} {dtype:5} {' '.join(cells)} {ratio}   {kind} ({details})", flush=True)
    if args.where:
        print(calls["monoplan"].profile())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="*", default=list(MODELS), choices=[*MODELS, []])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--dtype", nargs="*", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS | GPU_PEERS))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--where", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    import_torchvision()
    os.environ["MONOPLAN_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    known = GPU_PEERS if args.gpu else PEERS
    peers = list(known) if args.peers is None else args.peers
    print(f"{'':8} batch dtype {'monoplan':>9} {' '.join(f'{n[:9]:>9}' for n in known)} fastest peer / monoplan")
    for name in args.models:
        for dtype in args.dtype:
            for batch in args.batch:
                row(name, batch, dtype, peers, args)
                gc.collect()


if __name__ == "__main__":
    with torch.no_grad():
        main()
