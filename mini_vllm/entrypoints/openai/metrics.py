"""Counters of the server with vLLM's names, as Prometheus reads them.

Mirrors `vllm/v1/metrics/loggers.py:404` `PrometheusStatLogger`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mini_vllm.entrypoints.engine_core import News
from mini_vllm.observe.stats import Stats

if TYPE_CHECKING:
    from mini_vllm.entrypoints.async_llm import Stream
    from mini_vllm.entrypoints.openai.serving import Served

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
           10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip


class Metrics:
    """What one server counts; written as news come, read by `/metrics`."""

    def __init__(self, served: Served) -> None:
        self.served, self.registry = served, CollectorRegistry()
        labels = ("model_name", "engine")
        own = (served.name, "0")

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"vllm:{name}", what, labels, registry=self.registry).labels(*own)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, labels, registry=self.registry).labels(*own)

        def seconds(name: str, what: str) -> Histogram:
            made = Histogram(f"vllm:{name}", what, labels, buckets=SECONDS, registry=self.registry)
            return made.labels(*own)

        self.running = gauge("num_requests_running", "Requests in the running batch")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for their first step")
        self.usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all")
        self.queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache")
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the cache")
        self.preemptions = counter("num_preemptions", "Requests that lost their blocks")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began")
        self.tokens = counter("generation_tokens", "Tokens generated")
        self.success = Counter(
            "vllm:request_success", "Requests that ended", (*labels, "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self.first = seconds("time_to_first_token_seconds", "From arrival to the first token")
        self.between = seconds("inter_token_latency_seconds", "Between two steps' tokens")
        self.whole = seconds("e2e_request_latency_seconds", "From arrival to the end")
        self._told = Stats()
        served.engine.observers.append(self.said)

    def said(self, stream: Stream, news: News | None) -> None:
        """A step gave a stream new tokens, or it was aborted (None)."""
        if news is None:
            self._ended("abort", stream.num_open)
            return
        now = time.monotonic()
        if stream.last_news is None:
            self.prompt_tokens.inc(len(stream.prompt_token_ids))
            self.first.observe(now - stream.arrived)
        else:
            self.between.observe(now - stream.last_news)
        for delta in news.deltas:
            self.tokens.inc(len(delta.token_ids))
            if delta.finish_reason is not None:
                self._ended(delta.finish_reason, 1)
        if stream.num_open <= 0:
            self.whole.observe(now - stream.arrived)

    def _ended(self, reason: str, count: int) -> None:
        self.success.labels(self.served.name, "0", reason).inc(count)

    def text(self) -> tuple[bytes, str]:
        """Everything, in Prometheus' format, and its content type."""
        now, before = self.served.engine.stats, self._told
        self.running.set(now.running)
        self.waiting.set(now.waiting)
        self.usage.set(now.usage)
        self.preemptions.inc(now.preemptions - before.preemptions)
        self.queries.inc(now.prefix_queries - before.prefix_queries)
        self.hits.inc(now.prefix_hits - before.prefix_hits)
        self._told = now
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
