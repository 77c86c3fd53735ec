"""Metrics for Prometheus: all statistics of the engines (cache, scheduler, tiers), and the latencies of requests."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from kvpool.engine.engine_stats import EngineStats
from kvpool.engine.pictures import EncoderStats
from kvpool.scheduling import SchedulerStats
from kvpool.server.latencies import Latencies
from kvpool.server.served_model import ServedModel
from kvpool.stats import CacheStats
from kvpool.version import __version__

# Integers in the statistics of the cache are totals, except for these, which say how many there are now.
_TOTALS = tuple(field.name for field in fields(CacheStats) if field.type == "int" and not field.name.startswith("num_"))
_TIER_TOTALS = (
    *("hits", "misses", "load_failures", "late_loads", "stored", "refused", "store_failures", "late_stores", "removed"),
    *("bytes_loaded", "bytes_stored", "seconds_loading", "seconds_storing"),
)
_TIER_SIZES = ("num_values", "used_bytes", "capacity_bytes")
_TIERING_TOTALS = ("joined", "timed_out", "crowded", "prompt_tokens_loaded", "imports", "imports_without_room")
_TIERING_SIZES = ("held", "blocks_waiting", "staging_bytes")
_TIERING_PARTS = ("decisions", "fetches", "stores", "handovers")
_SPANS = ("lifetime_seconds", "idle_before_eviction_seconds", "reuse_gap_seconds")
_ENCODER_WORDS = {
    "num_pictures": "Encoded images that are kept.",
    "num_bytes": "Bytes of them.",
    "max_bytes": "The most bytes of them.",
    "num_encoded": "Images that the encoder computed.",
    "num_hits": "Images that a step found encoded.",
}

Looks = list[tuple[str, EngineStats]]
Rows = Iterable[tuple[Sequence[str], float]]


class Metrics:
    """The registry of one server."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry)
        self._registry.register(EngineCollector(models))
        ProcessCollector(registry=self._registry)  # process_*: memory, CPU time and open files of the server

    def text(self) -> bytes:
        """All metrics in Prometheus's text form."""
        return bytes(generate_latest(self._registry))


class EngineCollector:
    """Turns the statistics of engines into metrics whenever Prometheus asks."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """All metrics of all models."""
        looks = [(model.name, model.engine.stats()) for model in self._models]
        yield from _pools(looks)
        yield from _cache(looks)
        yield from _scheduler(looks)
        yield from _tiers(looks)
        yield from _encoders(looks)
        yield _build_info()


def _build_info() -> Metric:
    versions = {"version": __version__, "python": platform.python_version(), "torch": version("torch")}
    return InfoMetricFamily("kvpool_build", "Versions of kvpool and of what it runs on.", versions)


def _encoders(looks: Looks) -> Iterator[Metric]:
    """Metrics of models that take images."""
    seeing = [(model, look) for model, look in looks if look.encoder is not None]
    for name in EncoderStats._fields if seeing else ():
        words = _ENCODER_WORDS[name]
        make = _total if name in ("num_encoded", "num_hits") else _gauge
        yield make(f"encoder_{name.removeprefix('num_')}", words, [], seeing, _one(f"encoder.{name}"))


def _metric(
    kind: type, name: str, words: str, labels: Sequence[str], looks: Looks, rows: Callable[[Any], Rows]
) -> Metric:
    """A metric of all models. `rows` gives the further labels and the value, from the statistics of one model."""
    metric = kind(f"kvpool_{name}", words, labels=["model", *labels])
    for model, look in looks:
        for values, number in rows(look):
            metric.add_metric([model, *values], number)
    return metric  # type: ignore[no-any-return]


def _total(name: str, words: str, labels: Sequence[str], looks: Looks, rows: Callable[[Any], Rows]) -> Metric:
    return _metric(CounterMetricFamily, name, words, labels, looks, rows)


def _gauge(name: str, words: str, labels: Sequence[str], looks: Looks, rows: Callable[[Any], Rows]) -> Metric:
    return _metric(GaugeMetricFamily, name, words, labels, looks, rows)


def _in_words(name: str) -> str:
    return f"{name.replace('_', ' ')} since the start.".capitalize()


def _pools(looks: Looks) -> Iterator[Metric]:
    def states(look: EngineStats) -> Rows:
        for pool in look.cache.pools:
            for state in ("free", "referenced", "cached", "pinned"):
                yield (str(pool.pool), pool.tier.name, state), getattr(pool, state)

    def groups(look: EngineStats) -> Rows:
        for group in look.cache.groups:
            for state in ("referenced", "cached", "pinned"):
                yield (str(group.group), group.tier.name, state), getattr(group, state)

    yield _gauge("blocks", "Blocks by state.", ["pool", "tier", "state"], looks, states)
    yield _gauge(
        "peak_referenced_blocks",
        "The most that requests held at once.",
        ["pool", "tier"],
        looks,
        lambda look: (((str(pool.pool), pool.tier.name), pool.peak_referenced) for pool in look.cache.pools),
    )
    yield _gauge(
        "block_bytes",
        "Bytes of one block.",
        ["pool"],
        looks,
        lambda look: (((str(pool.pool),), pool.block_bytes) for pool in look.cache.pools if pool.tier == 0),
    )
    yield _gauge("group_blocks", "Blocks that a layer group uses, by state.", ["group", "tier", "state"], looks, groups)


def _cache(looks: Looks) -> Iterator[Metric]:
    for name in _TOTALS:
        yield _total(name, _in_words(name), [], looks, _one(f"cache.{name}"))
    by_label = (
        ("hit_tokens", "Prompt tokens found in the cache, by tier.", "tier"),
        ("hit_blocks", "Full blocks of prompts found in the cache, by tier.", "tier"),
        ("evictions", "Cached blocks that left, by reason.", "reason"),
    )
    for name, words, label in by_label:
        yield _total(name, words, [label], looks, _by_key(f"cache.{name}"))
    for name in _SPANS:
        words = f"{name.replace('_', ' ')} of cached runs: count, mean and quantiles.".capitalize()
        yield _gauge(name, words, ["of"], looks, _by_key(f"cache.{name}"))
    yield _gauge("cached_runs", "Runs that can be found.", [], looks, _one("cache.num_cached_runs"))
    yield _gauge("memory_pressure", "0 low, 1 medium, 2 high, 3 critical.", [], looks, _one("cache.pressure"))
    yield _gauge(
        "tenant_cached_blocks",
        "Idle cached blocks of a tenant.",
        ["tenant", "pool"],
        looks,
        lambda look: (
            ((tenant, str(pool)), count)
            for tenant, blocks in look.cache.tenants.items()
            for pool, count in enumerate(blocks)
        ),
    )


def _scheduler(looks: Looks) -> Iterator[Metric]:
    yield _gauge(
        "sequences",
        "Requests by state.",
        ["state"],
        looks,
        lambda look: (((state,), getattr(look, f"num_{state}")) for state in ("waiting", "running", "swapped")),
    )
    for field in fields(SchedulerStats):
        name = f"scheduler_{field.name}"
        yield _total(name, _in_words(field.name), [], looks, _one(f"scheduler.{field.name}"))


def _tiers(looks: Looks) -> Iterator[Metric]:
    """Metrics of models with keyed tiers: each tier, requests that wait for them, and blocks in flight."""
    tiered = [(model, look) for model, look in looks if look.tiers is not None]
    if not tiered:
        return

    def of_tiers(path: str) -> Callable[[EngineStats], Rows]:
        get = attrgetter(path)
        return lambda look: (
            ((str(place), tier.stats.name), get(tier))
            for place, tier in enumerate(_tiers_of(look))
            if get(tier) is not None
        )

    labels = ["place", "tier"]
    for name in _TIER_TOTALS:
        yield _total(f"tier_{name}", _in_words(name), labels, tiered, of_tiers(f"stats.{name}"))
    for name in _TIER_SIZES:
        words = f"{name.replace('_', ' ')} of a tier.".capitalize()
        yield _gauge(f"tier_{name}", words, labels, tiered, of_tiers(f"stats.{name}"))
    yield _gauge("tier_latency_seconds", "How long a tier took to answer lately.", labels, tiered, of_tiers("latency"))
    yield _gauge("tier_bytes_per_second", "How fast a tier was lately.", labels, tiered, of_tiers("bytes_per_second"))
    yield _gauge(
        "tier_works",
        "1, or 0 while a tier answers nothing.",
        labels,
        tiered,
        lambda look: (
            ((str(place), tier.stats.name), float(not tier.stats.problem)) for place, tier in enumerate(_tiers_of(look))
        ),
    )
    for name in _TIERING_TOTALS:
        yield _total(f"tiering_{name}", _in_words(name), [], tiered, _one(f"tiers.{name}"))
    for name in _TIERING_SIZES:
        yield _gauge(f"tiering_{name}", name.replace("_", " ").capitalize() + ".", [], tiered, _one(f"tiers.{name}"))
    yield _gauge("tiering_leases", "Loaded prefixes kept.", [], tiered, lambda look: [((), len(look.tiers.leases))])
    for part in _TIERING_PARTS:
        for field in fields(type(getattr(tiered[0][1].tiers, part))):
            yield _gauge_or_total(part, field.name, tiered)


def _gauge_or_total(part: str, name: str, looks: Looks) -> Metric:
    """A gauge for sums of seconds, which may fall because a load may cost time; else a total, which only grows."""
    make = _gauge if name.endswith("_seconds") else _total
    return make(f"tiering_{part}_{name}", _in_words(name), [], looks, _one(f"tiers.{part}.{name}"))


def _tiers_of(look: EngineStats) -> Sequence[Any]:
    return () if look.tiers is None else look.tiers.tiers


def _one(path: str) -> Callable[[Any], Rows]:
    """The number at a path of attributes, which has no labels but the model."""
    get = attrgetter(path)
    return lambda look: [((), float(get(look)))]


def _by_key(path: str) -> Callable[[Any], Rows]:
    """The numbers of a mapping, each with its key as a label."""
    get = attrgetter(path)
    return lambda look: (((key,), number) for key, number in get(look).items())
