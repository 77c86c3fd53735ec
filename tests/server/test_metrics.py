"""/metrics has every number of an engine's statistics, of tiers too."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from live import Live, access, call, refusal, word_tokenizer
from models import tiny_model
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvpool.engine import Chunk, SamplingParams
from kvpool.engine.generation import Generation, Sample
from kvpool.scheduling import SchedulerStats
from kvpool.server.latencies import LastHour, Latencies
from kvpool.stats import CacheStats
from kvpool.tiers.contract import TierStats
from kvpool.tiers.transport.tier_transport import TieringStats
from managers import Clock

# What has another name among the metrics, or is the sum of what they say.
SAID_OTHERWISE = {
    "pools": "blocks",
    "groups": "group_blocks",
    "num_sequences": "sequences",
    "num_swapped": "sequences",
    "num_cached_runs": "cached_runs",
    "tenants": "tenant_cached_blocks",
    "pressure": "memory_pressure",
}
PARTS = {name: f"tiering_{name}_" for name in ("decisions", "fetches", "stores", "handovers")} | {"tiers": "tier_"}


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Live]:
    """A server whose model has a disk tier."""
    from kvpool.engine import Engine
    from kvpool.server import ServedModel, create_app

    model, options = tiny_model("llama"), {"kv_blocks": 32, "block_size": 4, "disk": str(tmp_path)}
    with Engine(model, tokenizer=word_tokenizer(), device="cpu", **options) as engine:
        live = Live(create_app([ServedModel("tiny", engine)]))
        yield live
        live.stop()


def test_given_an_engine_with_tiers_then_every_number_of_its_statistics_is_a_metric(tiered: Live) -> None:
    call(tiered, "/v1/completions", {"prompt": "w5 w6 w7 w8 w9 w10", "max_tokens": 2})
    names = {family.name for family in text_string_to_metric_families(call(tiered, "/metrics"))}
    wanted = {SAID_OTHERWISE.get(field.name, field.name) for field in fields(CacheStats)}
    wanted |= {f"scheduler_{field.name}" for field in fields(SchedulerStats)}
    wanted |= {f"tiering_{name}" for name in TieringStats._fields if name not in PARTS}
    # `holders` of a node are many; the node itself tells of them.
    told = {f"tier_{field.name}" for field in fields(TierStats)} - {"tier_name", "tier_problem", "tier_holders"}
    wanted |= told | {"tier_works"}
    assert {f"kvpool_{name}" for name in wanted} - names == set()
    assert {
        part for part, start in PARTS.items() if not any(name.startswith(f"kvpool_{start}") for name in names)
    } == set()


def test_given_the_table_of_the_docs_then_every_metric_in_it_is_there(tiered: Live) -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    named = set(re.findall(r"`(kvpool_[a-z_]+)`", page.split("### Metrics")[1].split("## ")[0]))
    call(tiered, "/v1/completions", {"prompt": "w5 w6", "max_tokens": 2})
    refusal(tiered, "/nowhere")
    found = {family.name for family in text_string_to_metric_families(call(tiered, "/metrics"))}
    of_images = {name for name in named if name.startswith("kvpool_encoder_")}
    assert {name.removesuffix("_total") for name in named - of_images} <= found


def test_given_keys_then_metrics_and_statistics_need_an_admins(serve: Callable[..., Live]) -> None:
    live = serve(access=access("a", "root"))
    for path in ("/metrics", "/v1/cache/stats"):
        assert refusal(live, path)[0] == 401
        assert refusal(live, path, key="sk-a")[0] == 403
        assert call(live, path, key="sk-root")


def test_given_requests_of_tenants_then_each_is_counted_and_there_are_not_too_many_names(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.server.latencies.MOST_TENANTS", 2)
    live = serve(access=access("a", "b", "c", "d", "root"))
    for tenant in "abcda":
        call(live, "/v1/completions", {"prompt": [5, 6, 7, 8, 9], "max_tokens": 2, "ignore_eos": True}, f"sk-{tenant}")
    text = call(live, "/metrics", key="sk-root")
    told = {
        family.name: {sample.labels.get("tenant"): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }
    rest = "(other tenants)"
    assert told["kvpool_tenant_requests"] == {"a": 2, "b": 1, rest: 2}
    assert told["kvpool_tenant_prompt_tokens"] == {"a": 10, "b": 5, rest: 10}
    assert told["kvpool_tenant_cached_tokens"] == {"a": 4, "b": 0, rest: 0}
    assert told["kvpool_tenant_generated_tokens"] == {"a": 4, "b": 2, rest: 4}
    assert f'kvpool_build_info{{python="{platform.python_version()}",torch="' in text
    assert "process_resident_memory_bytes" in text


def test_given_a_client_that_leaves_then_the_model_and_its_tenant_count_the_same_tokens() -> None:
    generation = Generation("r", np.array([5], np.int32), SamplingParams(), None)
    latencies = Latencies(CollectorRegistry())
    meter = latencies.begin("tiny", "a")
    meter.tokens(SimpleNamespace(last=None, generation=generation), [Chunk(0, "", (6, 7))])  # type: ignore[arg-type]
    generation.samples[0] = Sample(0, [6, 7, 8])  # the last one was not read
    meter.end([generation], "left")
    told = {sample.name: sample.value for metric in latencies.collect() for sample in metric.samples}
    assert told["kvpool_generated_tokens_total"] == told["kvpool_tenant_generated_tokens_total"] == 3


def test_given_a_restart_then_tokens_from_disk_are_told_and_counted_as_such(tmp_path: Path) -> None:
    from kvpool.engine import Engine
    from kvpool.server import ServedModel, create_app

    asked = {"prompt": " ".join(f"w{number}" for number in range(40, 61)), "max_tokens": 2}
    options: dict[str, Any] = {"tokenizer": word_tokenizer(), "device": "cpu", "kv_blocks": 32, "block_size": 4}
    told = []
    for _ in range(2):
        with Engine(tiny_model("llama"), **options, disk=str(tmp_path), tier_timeout=30.0) as engine:
            live = Live(create_app([ServedModel("tiny", engine)]))
            told.append(call(live, "/v1/cache/query", {"prompt": asked["prompt"]}))
            call(live, "/v1/completions", asked)
            text = call(live, "/metrics")
            hits = engine.stats().cache
            live.stop()
    assert told[0] == {"prompt_tokens": 21, "cached_tokens": 0, "tiers": {}}
    assert told[1] == {"prompt_tokens": 21, "cached_tokens": 20, "tiers": {"DISK": 20}}
    assert hits.hit_tokens == {"GPU": 0, "HOST": 0, "DISK": 20, "REMOTE": 0}
    assert hits.hit_blocks == {"GPU": 0, "HOST": 0, "DISK": 5, "REMOTE": 0}
    assert 'kvpool_hit_tokens_total{model="tiny",tier="DISK"} 20.0' in text


def test_given_the_last_hour_then_older_counts_are_gone() -> None:
    clock = Clock()
    hour = LastHour(clock)
    clock.now = 30.0
    hour.add({"evicted": 5, "prompt": 9})
    clock.now = 3000.0
    hour.add({"evicted": 1})
    assert hour.counts() == {"evicted": 6, "prompt": 9}
    clock.now = 3700.0
    assert hour.counts() == {"evicted": 1}
    hour.add({"first_seen": 2})
    assert hour.counts() == {"evicted": 1, "first_seen": 2}
    clock.now = 10_000.0
    assert hour.counts() == {}
