"""What Prometheus reads: every number of the engines' statistics, and how long requests waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvpool.engine.generation import Chunk
from kvpool.server.asking.served import LiveRequest, ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_TOTALS = (
    *("requests", "allocation_failures", "extend_failures", "prompt_tokens", "partial_hit_tokens", "blocks_allocated"),
    *("blocks_merged", "copies_on_write", "forks", "swaps_out", "swaps_in", "swapped_blocks", "offloaded_blocks"),
    *("onboarded_blocks",),
)


_RECENT = 2048  # measurements that are kept
_RECENT_SECONDS = 30.0


class Latencies:
    """Times and counts of requests, as they happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._first = Histogram(
            "kvpool_first_token_seconds", "From request to first token.", buckets=_SECONDS, registry=registry
        )
        self._between = Histogram(
            "kvpool_between_tokens_seconds", "Between two steps of a request.", buckets=_BETWEEN, registry=registry
        )
        self._whole = Histogram(
            "kvpool_request_seconds", "From request to the end of the answer.", buckets=_SECONDS, registry=registry
        )
        self._open = Gauge(
            "kvpool_http_requests_under_way", "Requests that wait or are being answered.", registry=registry
        )
        self._recent: dict[str, deque[tuple[float, float]]] = {
            "first_token_ms": deque(maxlen=_RECENT), "between_tokens_ms": deque(maxlen=_RECENT)
        }  # fmt: skip
        self._generated = Counter("kvpool_generated_tokens", "Tokens that were sampled.", registry=registry)
        self._refused = Counter(
            "kvpool_http_refused", "Requests that were refused, by status.", ["status"], registry=registry
        )

    @contextmanager
    def request(self) -> Iterator[None]:
        """Measures one request of a client."""
        began = time.perf_counter()
        self._open.inc()
        try:
            yield
        finally:
            self._open.dec()
            self._whole.observe(time.perf_counter() - began)

    def tokens(self, running: LiveRequest, news: Sequence[Chunk]) -> None:
        """New tokens of a request arrived."""
        count = sum(len(chunk.token_ids) for chunk in news)
        now = time.perf_counter()
        if count:
            self._generated.inc(count)
            seconds = now - (running.last or running.began)
            (self._first if running.last is None else self._between).observe(seconds)
            self._recent["first_token_ms" if running.last is None else "between_tokens_ms"].append((now, seconds))
            running.last = now

    def recent(self) -> dict[str, list[float]]:
        """Median and 99th percentile, in milliseconds, of what was measured in the last half minute."""
        since = time.perf_counter() - _RECENT_SECONDS
        found = {}
        for name, measured in self._recent.items():
            durations = sorted(seconds for when, seconds in measured.copy() if when > since)
            if durations:
                last = len(durations) - 1
                found[name] = [round(1e3 * durations[int(share * last)], 2) for share in (0.5, 0.99)]
        return found

    def refused(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()


class EngineCollector:
    """Turns the statistics of engines into metrics when somebody asks."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """All metrics of all models."""
        looks = [(model.name, model.engine.stats()) for model in self._models]
        yield from self._pools(looks)
        for name in _TOTALS:
            total = CounterMetricFamily(
                f"kvpool_{name}", f"{name.replace('_', ' ')} since the start.".capitalize(), labels=["model"]
            )
            for model, look in looks:
                total.add_metric([model], getattr(look.cache, name))
            yield total
        yield self._labelled(looks, "hit_tokens", "Prompt tokens found in the cache, by tier.", "tier")
        yield self._labelled(looks, "evictions", "Cached blocks that left, by reason.", "reason")
        queues = GaugeMetricFamily("kvpool_sequences", "Requests by state.", labels=["model", "state"])
        for model, look in looks:
            for state in ("waiting", "running", "swapped"):
                queues.add_metric([model, state], getattr(look, f"num_{state}"))
        yield queues
        tenants = GaugeMetricFamily(
            "kvpool_tenant_cached_blocks", "Idle cached blocks of a tenant.", labels=["model", "tenant", "pool"]
        )
        for model, look in looks:
            for tenant, blocks in look.cache.tenants.items():
                for pool, count in enumerate(blocks):
                    tenants.add_metric([model, tenant, str(pool)], count)
        yield tenants

    def _pools(self, looks: list[tuple[str, Any]]) -> Iterable[Metric]:
        blocks = GaugeMetricFamily("kvpool_blocks", "Blocks by state.", labels=["model", "pool", "tier", "state"])
        size = GaugeMetricFamily("kvpool_block_bytes", "Bytes of one block.", labels=["model", "pool"])
        for model, look in looks:
            for pool in look.cache.pools:
                for state in ("free", "referenced", "cached", "pinned"):
                    blocks.add_metric([model, str(pool.pool), pool.tier.name, state], getattr(pool, state))
                if pool.tier == 0:
                    size.add_metric([model, str(pool.pool)], pool.block_bytes)
        yield blocks
        yield size

    @staticmethod
    def _labelled(looks: list[tuple[str, Any]], field: str, words: str, label: str) -> Metric:
        metric = CounterMetricFamily(f"kvpool_{field}", words, labels=["model", label])
        for model, look in looks:
            for key, count in getattr(look.cache, field).items():
                metric.add_metric([model, key], count)
        return metric


class Metrics:
    """The registry of one server."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry)
        self._registry.register(EngineCollector(models))

    def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return bytes(generate_latest(self._registry))
