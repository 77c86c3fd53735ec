"""Times and counts of requests, by model and by tenant, recorded in the event loop."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from kvpool.engine.generation import Chunk, Generation
from kvpool.server.answers import missed_by_cause
from kvpool.server.served_model import LiveRequest

MOST_TENANTS = 100
OTHER_TENANTS = "(other tenants)"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_HISTOGRAMS = (
    ("queue", "From request to its first blocks.", _SECONDS),
    ("first_token", "From request to first token.", _SECONDS),
    ("between_tokens", "Between two steps of a request.", _BETWEEN),
    ("request", "From request to the end of its answer, of requests that got a token.", _SECONDS),
)
_RECENT = 2048  # measurements that are kept
_RECENT_SECONDS = 30.0


class Durations:
    """A histogram that one thread fills. It has no lock, because it observes something for every token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def add_to(self, metric: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds it to a metric of Prometheus, where each bucket includes those below it."""
        sums = accumulate(self._counts)
        buckets = [(str(bound), float(count)) for bound, count in zip((*self._bounds, "+Inf"), sums, strict=True)]
        metric.add_metric(labels, buckets, self._total)


class LastHour:
    """Counts of the last sixty minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._minutes: dict[int, Counter[str]] = {}  # the youngest last

    def add(self, counts: Mapping[str, int]) -> None:
        """Counts something now."""
        minute = int(self._clock() // 60)
        self._minutes.setdefault(minute, Counter()).update(counts)
        for old in [each for each in self._minutes if each <= minute - 60]:
            del self._minutes[old]

    def counts(self) -> Counter[str]:
        """The sums. Any thread may ask."""
        since = self._clock() // 60 - 60
        return sum((counts for minute, counts in list(self._minutes.items()) if minute > since), Counter())


class ModelLatencies:
    """Times and tokens of the requests to one model."""

    def __init__(self) -> None:
        self.durations = {name: Durations(bounds) for name, _, bounds in _HISTOGRAMS}
        self.num_generated = 0
        self.missed: Counter[str] = Counter()  # tokens of prompts that were not cached, by cause
        self.prompts = LastHour()  # tokens of prompts, those from the cache, and the others by cause
        self.outcomes: Counter[str] = Counter()
        self._recent: dict[str, deque[tuple[float, float]]] = {
            "first_token_ms": deque(maxlen=_RECENT),
            "between_tokens_ms": deque(maxlen=_RECENT),
        }

    def first(self, now: float, seconds: float, queued: float) -> None:
        """The first token of a client's request came."""
        self.durations["queue"].observe(queued)
        self.durations["first_token"].observe(seconds)
        self._recent["first_token_ms"].append((now, seconds))

    def between(self, now: float, seconds: float) -> None:
        """Further tokens of a prompt came."""
        self.durations["between_tokens"].observe(seconds)
        self._recent["between_tokens_ms"].append((now, seconds))

    def recent(self) -> dict[str, list[float]]:
        """Median and 99th percentile, in milliseconds, of the last half minute."""
        since = time.perf_counter() - _RECENT_SECONDS
        found = {}
        for name, measured in self._recent.items():
            durations = sorted(seconds for when, seconds in measured.copy() if when > since)
            if durations:
                last = len(durations) - 1
                found[name] = [round(1e3 * durations[int(share * last)], 2) for share in (0.5, 0.99)]
        return found


class RequestMeter:
    """Measures one request of a client, which may have several prompts."""

    def __init__(self, latencies: Latencies, model: ModelLatencies, tenant: str) -> None:
        self._latencies = latencies
        self._model = model
        self._tenant = tenant
        self._began = time.perf_counter()
        self._has_token = False
        self._num_counted = 0  # tokens
        latencies.under_way.inc()

    def tokens(self, running: LiveRequest, news: Sequence[Chunk]) -> float | None:
        """New tokens of a prompt arrived. Returns the seconds since the tokens before them, if there were any."""
        count = 0
        for chunk in news:
            count += len(chunk.token_ids)
        if not count:
            return None
        model = self._model
        model.num_generated += count
        self._num_counted += count
        now, before = time.perf_counter(), running.last
        running.last = now
        if before is None:
            if not self._has_token:
                self._has_token = True
                model.first(now, now - self._began, running.generation.queue_seconds or 0.0)
            return None
        model.between(now, now - before)
        return now - before

    def end(self, generations: Sequence[Generation], outcome: str) -> None:
        """The request is over: it was `completed`, the client `left`, or it `failed`."""
        self._latencies.under_way.dec()
        if self._has_token:  # so that the same requests are in this histogram and in that of first tokens
            self._model.durations["request"].observe(time.perf_counter() - self._began)
        self._model.outcomes[outcome] += 1
        missed = missed_by_cause(generations)
        self._model.missed.update(missed)
        prompt, cached = (
            sum(getattr(one, f"num_{kind}_tokens") for one in generations) for kind in ("prompt", "cached")
        )
        self._model.prompts.add({**missed, "prompt": prompt, "cached": cached})
        num_generated = sum(len(sample.token_ids) for one in generations for sample in list(one.samples.values()))
        self._model.num_generated += num_generated - self._num_counted  # what nobody was there to read
        self._latencies.count_tenant(self._tenant, generations, num_generated)


class Latencies:
    """Times and counts of requests, recorded in the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._models: defaultdict[str, ModelLatencies] = defaultdict(ModelLatencies)
        self._tenants: dict[str, Counter[str]] = {}
        self.under_way = Gauge(
            "kvpool_http_requests_under_way", "Requests that wait or are being answered.", registry=registry
        )
        self._refused = PrometheusCounter(
            "kvpool_http_refused", "Requests that were refused, by status.", ["status"], registry=registry
        )
        registry.register(self)

    def of(self, model: str) -> ModelLatencies:
        """Those of one model."""
        return self._models[model]

    def begin(self, model: str, tenant: str) -> RequestMeter:
        """A request of a client begins."""
        return RequestMeter(self, self.of(model), tenant)

    def refused(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()

    def count_tenant(self, tenant: str, generations: Sequence[Generation], num_generated: int) -> None:
        """Counts a request that is over for its tenant. After `MOST_TENANTS`, further tenants are counted together."""
        if tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            tenant = OTHER_TENANTS
        counts = self._tenants.setdefault(tenant, Counter())
        counts["requests"] += 1
        counts["prompt_tokens"] += sum(one.num_prompt_tokens for one in generations)
        counts["cached_tokens"] += sum(one.num_cached_tokens for one in generations)
        counts["generated_tokens"] += num_generated

    def collect(self) -> Iterable[Metric]:
        """What was measured, for Prometheus."""
        for name, words, _ in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"kvpool_{name}_seconds", words, labels=["model"])
            for model, latencies in self._models.items():
                latencies.durations[name].add_to(histogram, [model])
            yield histogram
        generated = CounterMetricFamily("kvpool_generated_tokens", "Tokens that were sampled.", labels=["model"])
        missed = CounterMetricFamily(
            "kvpool_missed_tokens", "Tokens of prompts that were not cached, by cause.", labels=["model", "cause"]
        )
        requests = CounterMetricFamily(
            "kvpool_requests_ended", "Requests by how they ended.", labels=["model", "outcome"]
        )
        for model, latencies in self._models.items():
            generated.add_metric([model], latencies.num_generated)
            for outcome, count in latencies.outcomes.items():
                requests.add_metric([model, outcome], count)
            for cause, count in latencies.missed.items():
                missed.add_metric([model, cause], count)
        yield generated
        yield missed
        yield requests
        for name in ("requests", "prompt_tokens", "cached_tokens", "generated_tokens"):
            words = f"{name.replace('_', ' ')} of a tenant, counted when a request ends.".capitalize()
            metric = CounterMetricFamily(f"kvpool_tenant_{name}", words, labels=["tenant"])
            for tenant, counts in list(self._tenants.items()):
                metric.add_metric([tenant], counts[name])
            yield metric
