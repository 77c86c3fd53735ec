"""What Prometheus reads: every number of the engines' statistics, and how long requests waited."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from kvpool.engine.generation import Chunk
from kvpool.server.engine_metrics import EngineCollector
from kvpool.server.served_model import LiveRequest, ServedModel

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_RECENT = 2048  # measurements that are kept
_RECENT_SECONDS = 30.0


class Durations:
    """A histogram that one thread fills, without a lock: something is observed for every token."""

    def __init__(self, name: str, words: str, bounds: Sequence[float]) -> None:
        self._name, self._words = name, words
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def collect(self) -> Iterable[Metric]:
        """The histogram for Prometheus, whose buckets include those below."""
        sums = accumulate(self._counts)
        buckets = [(str(bound), float(count)) for bound, count in zip((*self._bounds, "+Inf"), sums, strict=True)]
        yield HistogramMetricFamily(self._name, self._words, buckets, self._total)


class Latencies:
    """Times and counts of requests, as they happen, in the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queued = Durations("kvpool_queue_seconds", "From request to its first blocks.", _SECONDS)
        self._first = Durations("kvpool_first_token_seconds", "From request to first token.", _SECONDS)
        self._between = Durations("kvpool_between_tokens_seconds", "Between two steps of a request.", _BETWEEN)
        self._whole = Durations("kvpool_request_seconds", "From request to the end of the answer.", _SECONDS)
        self._num_generated = 0
        registry.register(self)
        self._open = Gauge(
            "kvpool_http_requests_under_way", "Requests that wait or are being answered.", registry=registry
        )
        self._recent: dict[str, deque[tuple[float, float]]] = {
            "first_token_ms": deque(maxlen=_RECENT),
            "between_tokens_ms": deque(maxlen=_RECENT),
        }
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
        count = 0
        for chunk in news:
            count += len(chunk.token_ids)
        if not count:
            return None
        self._num_generated += count
        now, before = time.perf_counter(), running.last
        running.last = now
        if before is None:
            self._queued.observe(running.generation.queue_seconds or 0.0)
            self._first.observe(now - running.began)
            self._recent["first_token_ms"].append((now, now - running.began))
            return None
        self._between.observe(now - before)
        self._recent["between_tokens_ms"].append((now, now - before))
        return now - before

    def collect(self) -> Iterable[Metric]:
        """What was measured, for Prometheus."""
        for durations in (self._queued, self._first, self._between, self._whole):
            yield from durations.collect()
        generated = CounterMetricFamily("kvpool_generated_tokens", "Tokens that were sampled.")
        generated.add_metric([], self._num_generated)
        yield generated

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
