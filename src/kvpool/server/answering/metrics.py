"""What Prometheus reads: every number of the engines' statistics, and how long requests waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpool.engine.generation import Chunk
from kvpool.server.answering.engine_metrics import EngineCollector
from kvpool.server.asking.served import LiveRequest, ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_RECENT = 2048  # measurements that are kept
_RECENT_SECONDS = 30.0


class Latencies:
    """Times and counts of requests, as they happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queued = Histogram(
            "kvpool_queue_seconds", "From request to its first blocks.", buckets=_SECONDS, registry=registry
        )
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

    def tokens(self, running: LiveRequest, news: Sequence[Chunk]) -> float | None:
        """New tokens of a request arrived. Returns the seconds since those before them, if there were any."""
        count = sum(len(chunk.token_ids) for chunk in news)
        now, before = time.perf_counter(), running.last
        if not count:
            return None
        self._generated.inc(count)
        running.last = now
        if before is None:
            self._queued.observe(running.generation.queue_seconds or 0.0)
            self._first.observe(now - running.began)
            self._recent["first_token_ms"].append((now, now - running.began))
            return None
        self._between.observe(now - before)
        self._recent["between_tokens_ms"].append((now, now - before))
        return now - before

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


class Metrics:
    """The registry of one server."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry)
        self._registry.register(EngineCollector(models))

    def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return bytes(generate_latest(self._registry))
