"""Decode and prefill of LLaMA shapes on one GPU, random weights: time and share of the bandwidth of the same run.

    python benchmarks/gpu_llama.py 1b --batch 1 8 32 --context 1024 8192 --prefill 2048 --tune 30 --json out.json
    python benchmarks/gpu_torch.py 1b          the same shapes by torch.compile (reduce-overhead, static cache)

Each number is the median of CUDA-event times between graph replays that are enqueued ahead.
"""

from __future__ import annotations

import argparse
import json
import time

from gpu_decoder import SHAPES, Decoder, ReadLoop, time_runs


def main() -> None:
    """Runs the chosen measurements and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, nargs="*", default=[1024])
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument(
        "--full", action="store_true", help="the step of generation: penalty, sampling, log probability"
    )
    parser.add_argument("--plain", action="store_true", help="also without overlapping launches")
    parser.add_argument("--kernels", action="store_true", help="also each kernel by itself")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of tuning before a second round")
    parser.add_argument(
        "--format",
        default="bf16",
        help="bf16, bf16_12, q4_k_m or a block format: q4_0, fp8_128, int4_128_f16 and so on",
    )
    parser.add_argument("--json")
    args = parser.parse_args()
    decoder = Decoder(args.shape, args.full, args.format)
    loop = ReadLoop(decoder.device)
    limit = loop.bytes_per_second()
    print(
        f"{decoder.device.name}, {args.shape} {args.format}, {decoder.weight_bytes / 1e9:.3f} GB: "
        f"read bandwidth {limit / 1e12:.2f} TB/s; seconds: "
        + ", ".join(f"{k} {v:.2f}" for k, v in decoder.times.items())
    )
    rows = []

    def report(what: str, ms: float, read: int = 0, rate: float = 0.0) -> None:
        """A row; `read` bytes at `rate`, that of the read loop around it, are the least it could take."""
        floor = read / rate * 1e3 if read else 0.0
        rows.append({"what": what, "ms": ms, "floor_ms": floor, "bandwidth": rate})
        share = f"   floor {floor:8.3f} ms at {rate / 1e12:.3f} TB/s   {floor / ms:6.1%}" if read else ""
        print(f"{what:40s} {ms:9.3f} ms{share}", flush=True)

    def decode(title: str) -> None:
        for context in args.context:
            for batch in args.batch:
                for overlap in (True, False) if args.plain else (True,):
                    decoder.executable.overlap = overlap
                    calls = decoder.calls(batch, 1, context)
                    before = loop.bytes_per_second()
                    ms = decoder.milliseconds(calls)
                    rate = (before + loop.bytes_per_second()) / 2
                    what = f"{title}, batch {batch}, context {context}{'' if overlap else ', no overlap'}"
                    report(what, ms, decoder.bytes_per_step(batch, context), rate)
                    for name, count, us in decoder.kernels(calls) if args.kernels else ():
                        print(f"    {name:30s} {count:3d} x {us:8.2f} us", flush=True)
                    del calls
                    decoder.forget()
        decoder.executable.overlap = True

    decode("decode")
    for length in args.prefill:
        calls = decoder.calls(1, length, length)
        report(f"prefill of {length}", decoder.milliseconds(calls, 10, graph=False))
        for step, count in decoder.plan.steps() if args.kernels else ():
            only = calls.only(step.number)
            us = 1e3 * time_runs(decoder.device, only.enqueue, 5) / count
            print(f"    {step.number} {step.kernel.op.name:30s} {count:3d} x {us:8.2f} us", flush=True)
        del calls
        decoder.forget()
    if args.tune:
        start = time.perf_counter()
        constants = decoder.tune(args.tune)
        print(f"tuned in {time.perf_counter() - start:.1f} s: {json.dumps(constants)}")
        args.kernels = False
        decode("tuned decode")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"shape": args.shape, "bandwidth": limit, "times": decoder.times, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
