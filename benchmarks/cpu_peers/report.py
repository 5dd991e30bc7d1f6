"""What is said about a run: tables for the reader, and everything as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from pathlib import Path
from statistics import mean, median
from typing import Any

from cpu_peers.rounds import Outcome, Plan
from cpu_peers.workload import LONG_PROMPT, PROMPT, Workload

OURS = "monoplan"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pooled(rounds: list[list[float]]) -> float:
    """The median of all steps of all rounds."""
    return median(second for each in rounds for second in each)


Limits = list[list[dict[str, Any]]]  # two of each turn: before and after it


def share(work: float, rounds: list[list[float]], limits: Limits, name: str) -> float | None:
    """The median over rounds of a rate, as a part of the limit around its turn."""
    if any(found[name] is None for pair in limits for found in pair):
        return None
    parts = zip(rounds, limits, strict=True)
    return median(work / median(each) / mean(found[name] for found in pair) for each, pair in parts)


def all_limits(outcome: Outcome) -> Limits:
    """Those around all turns of all peers."""
    return [pair for pairs in outcome.limits.values() for pair in pairs]


def roof(work: Workload, limits: Limits) -> tuple[str, str]:
    """The limit of a prompt: the tile unit for 16 bits where there is one, else multiply-adds; and its name."""
    tiles = work.dtype == "bf16" and all(found["tiles"] is not None for pair in limits for found in pair)
    return ("tiles", "tile rate") if tiles else ("multiply", "f32 multiply-add rate")


def summary(plan: Plan, outcome: Outcome) -> dict[str, dict[str, Any]]:
    """The figures of each peer."""
    work = plan.work
    unit, _ = roof(work, all_limits(outcome))
    reference = outcome.tokens.get(OURS) or next(iter(outcome.tokens.values()), [])
    found: dict[str, dict[str, Any]] = {}
    for peer, seconds in outcome.seconds.items():
        decode, prefill, flops = seconds["decode"], seconds["prefill"], work.prefill_flops(PROMPT)
        tokens, memory, limits = outcome.tokens[peer], outcome.memory[peer], outcome.limits[peer]
        found[peer] = {
            "decode_s": pooled(decode),
            "prefill_s": pooled(prefill),
            "decode_tokens_per_s": 1 / pooled(decode),
            "prefill_tokens_per_s": PROMPT / pooled(prefill),
            "decode_of_read_bandwidth": share(work.weight_bytes, decode, limits, "read"),
            "prefill_flops_per_s": flops / pooled(prefill),
            "prefill_of_limit": share(flops, prefill, limits, unit),
            "peak_over_weights": memory["peak"] / work.weight_bytes,
            "anonymous_over_weights": memory["anonymous"] / work.weight_bytes,
            "same_tokens": same_tokens(tokens, reference),
        }
        if plan.contexts:
            found[peer] |= growth(plan, seconds, limits)
        for kind, each in outcome.starts.get(peer, {}).items():
            found[peer][f"start_{kind.replace(' ', '_')}_s"] = median(each)
    return found


def same_tokens(tokens: list[int], reference: list[int]) -> int:
    """How many tokens from the first on are the same."""
    pairs = enumerate(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(reference)))


def growth(plan: Plan, seconds: dict[str, list[list[float]]], limits: Limits) -> dict[str, Any]:
    """How decode grows with the context, beside the time to read its keys and values; a long prompt by a short one."""
    times = {tokens: pooled(seconds[f"decode {tokens}"]) for tokens in plan.contexts}
    predicted = plan.work.kv_bytes / median(found["read"] for pair in limits for found in pair)
    slope = paired_slope({tokens: seconds[f"decode {tokens}"] for tokens in plan.contexts})
    longer = pooled(seconds["prefill long"]) / LONG_PROMPT / (pooled(seconds["prefill"]) / PROMPT)
    return {"context_s": times, "slope_s": slope, "slope_over_predicted": slope / predicted, "long_prompt": longer}


def paired_slope(rounds: dict[int, list[list[float]]]) -> float:
    """The median slope of steps one at each length: where they took turns, others on the machine slow down all."""
    columns = {tokens: [second for each in found for second in each] for tokens, found in rounds.items()}
    return median(slope_of(dict(zip(columns, step, strict=True))) for step in zip(*columns.values(), strict=True))


def slope_of(times: dict[int, float]) -> float:
    """Seconds per token of context: the line of least squares."""
    x, y = sum(times) / len(times), sum(times.values()) / len(times)
    spread = sum((c - x) ** 2 for c in times)
    return sum((c - x) * (t - y) for c, t in times.items()) / spread if spread else 0.0


def as_text(plan: Plan, outcome: Outcome, found: dict[str, dict[str, Any]]) -> str:
    """The tables, and why peers are missing."""
    work, (_, limit) = plan.work, roof(plan.work, all_limits(outcome))

    def percent(part: float | None) -> str:
        return "–" if part is None else f"{part:.0%}"

    parts = [_heading(plan, outcome)]
    rows = [
        [
            peer,
            f"{f['decode_s'] * 1e3:.2f}",
            f"{f['decode_tokens_per_s']:.1f}",
            percent(f["decode_of_read_bandwidth"]),
            f"{f['prefill_tokens_per_s']:.0f}",
            f"{f['prefill_flops_per_s'] / 1e9:.0f}",
            percent(f["prefill_of_limit"]),
            f"{f['peak_over_weights']:.2f}",
            f"{f['anonymous_over_weights']:.2f}",
            f"{f['same_tokens']} of {len(outcome.tokens[peer])}",
        ]
        for peer, f in found.items()
    ]
    head = [
        "peer",
        "decode ms",
        "tokens/s",
        "of read bandwidth",
        f"prefill {PROMPT} tokens/s",
        "GFLOP/s",
        f"of {limit}",
        "peak memory / weights",
        "own memory / weights",
        "same tokens",
    ]
    parts.append(table(head, rows))
    others = {peer: f for peer, f in found.items() if not peer.startswith(OURS)}
    if OURS in found and others:
        parts.append(_against(found[OURS], others))
    if plan.contexts:
        head = [
            "peer",
            *(f"decode ms after {c}" for c in plan.contexts),
            "µs per token of context",
            "over what the KV bytes predict",
            f"prefill per token, {LONG_PROMPT} / {PROMPT}",
        ]
        rows = [
            [
                peer,
                *(f"{f['context_s'][c] * 1e3:.2f}" for c in plan.contexts),
                f"{f['slope_s'] * 1e6:.3f}",
                f"{f['slope_over_predicted']:.2f}",
                f"{f['long_prompt']:.2f}",
            ]
            for peer, f in found.items()
        ]
        parts.append(f"{work.kv_bytes} bytes of keys and values per token of context\n" + table(head, rows))
    if outcome.starts:
        kinds = list(dict.fromkeys(k for each in outcome.starts.values() for k in each))
        rows = [
            [peer, *(f"{median(each[k]):.2f}" if k in each else "–" for k in kinds)]
            for peer, each in outcome.starts.items()
        ]
        parts.append("Process start to first token, seconds\n" + table(["peer", *kinds], rows))
    parts += [f"skipped {peer}: {why}" for peer, why in outcome.skipped.items()]
    return "\n\n".join(parts)


def _heading(plan: Plan, outcome: Outcome) -> str:
    def span(name: str, unit: str) -> str | None:
        seen = [found[name] for pair in all_limits(outcome) for found in pair]
        known = [value / 1e9 for value in seen if value is not None]
        return f"{min(known):.1f} – {max(known):.1f} {unit}" if known else None

    limits = {
        "read loop": span("read", "GB/s"),
        "f32 multiply-adds": span("multiply", "GFLOP/s"),
        "bf16 tiles": span("tiles", "GFLOP/s"),
    }
    shown = "; ".join(f"{name} {text}" for name, text in limits.items() if text)
    first = (
        f"{datetime.date.today()}, {cpu_name()}, {plan.threads} threads; {plan.work.model} {plan.work.dtype}, "
        f"weights {plan.work.weight_bytes / 1e6:.0f} MB; {plan.repeats} rounds"
    )
    return f"{first}\n{shown}"


def _against(ours: dict[str, Any], others: dict[str, dict[str, Any]]) -> str:
    texts = []
    for what in ("decode", "prefill"):
        best = min(others, key=lambda peer: others[peer][f"{what}_s"])
        texts.append(f"{what} {others[best][f'{what}_s'] / ours[f'{what}_s']:.2f} x the fastest peer ({best})")
    return f"{OURS}: " + ", ".join(texts)


def as_json(plan: Plan, outcome: Outcome, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Everything, with every single time."""
    work = plan.work
    return {
        "date": str(datetime.date.today()),
        "machine": cpu_name(),
        "threads": plan.threads,
        "cpus": plan.cpus,
        "model": work.model,
        "dtype": work.dtype,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "repeats": plan.repeats,
        "peers": found,
        "measured": dataclasses.asdict(outcome),
    }


def cpu_name() -> str:
    """The processor, as the system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
