"""What Prometheus is told, under the names that vLLM uses, so that its dashboards work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from monoplan.serve.request import Piece, Request

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960)
_COUNTS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # vLLM's words


class _EngineCollector(Collector):
    """The engine's own counts, read when somebody asks for them."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name = engine, name

    def collect(self) -> Iterator[Any]:
        s = self._engine.stats
        for kind, name, text, value in (
            (GaugeMetricFamily, "num_requests_running", "Requests that run now", s.running),
            (GaugeMetricFamily, "num_requests_waiting", "Requests that wait for their turn", s.waiting),
            (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the KV cache that is used, 1 is all", s.cache_usage),
            (CounterMetricFamily, "prompt_tokens", "Tokens of prompts", s.prompt_tokens),
            (CounterMetricFamily, "generation_tokens", "Tokens that were generated", s.generation_tokens),
            (CounterMetricFamily, "prefix_cache_queries", "Tokens of prompts that were looked up", s.prefix_queries),
            (CounterMetricFamily, "prefix_cache_hits", "Tokens of prompts that were there already", s.prefix_hits),
            (CounterMetricFamily, "num_preemptions", "Requests that gave up their memory for others", s.preemptions),
        ):
            family = kind(f"vllm:{name}", text, labels=["model_name"])
            family.add_metric([self._name], value)
            yield family
        family = CounterMetricFamily("vllm:request_success", "Ended requests", labels=["model_name", "finished_reason"])
        counts = dict.fromkeys(_REASONS.values(), 0)
        for reason, count in s.finished.items():
            counts[_REASONS.get(reason, reason)] = counts.get(_REASONS.get(reason, reason), 0) + count
        for reason, count in counts.items():
            family.add_metric([self._name, reason], count)
        yield family


class Metrics:
    """Counts and times of one server."""

    def __init__(self, engine: Any, name: str) -> None:
        from monoplan import __version__

        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, name))

        def histogram(own: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(f"vllm:{own}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(name)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token", _SHORT)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of an answer", _SHORT)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end", _LONG)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step", _LONG)
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token", _LONG)
        self._decode = histogram("request_decode_time_seconds", "From the first token to the end", _LONG)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt", _COUNTS)
        self._answer = histogram("request_generation_tokens", "Tokens of an answer", _COUNTS)
        self._refused = Counter(
            "monoplan:requests_refused", "Requests without an answer", ["status"], registry=self.registry
        )
        Gauge("monoplan:info", "The version", ["version"], registry=self.registry).labels(__version__).set(1)

    def watch(self, pieces: list[tuple[float, Piece]], last: float | None) -> float | None:
        """Notes the times of tokens that came; `last` is when the one before them did, None if there was none."""
        times = [at for at, piece in pieces if piece.token is not None or piece.text]
        known = times if last is None else [last, *times]
        for before, after in itertools.pairwise(known):
            self._between.observe(after - before)
        return known[-1] if known else None

    def ended(self, request: Request) -> None:
        """Notes a request that has ended."""
        end = time.monotonic() if request.ended is None else request.ended
        self._whole.observe(end - request.arrived)
        self._prompt.observe(len(request.prompt_ids))
        self._answer.observe(len(request.ids))
        if request.started is not None:
            self._queue.observe(request.started - request.arrived)
        if request.first is not None:
            self._first.observe(request.first - request.arrived)
            self._decode.observe(end - request.first)
            if request.started is not None:
                self._prefill.observe(request.first - request.started)

    def refused(self, status: int) -> None:
        """Notes a request without an answer."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text form."""
        return generate_latest(self.registry)
