"""Traces, replays, plans and clusters give the same figures as ever, to the last digit that counts.

`same_results.json` has a line for each case. A change that is meant to give other figures writes it again, and its diff shows
which: `python tests/replay/test_same_results.py`.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from conversations import conversations
from llama_config import LLAMA

from kvpool import DType, LayerSpec, StatePart, StateSpec
from kvpool.cli import main
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, replay, write_trace
from kvpool.replay.bounds import MODELS, run_model
from kvpool.replay.capacity_plan import PlanRequest, make_plan
from kvpool.replay.fleet import FleetConfig, simulate_fleet
from kvpool.replay.parallel import Interconnect
from kvpool.replay.pictures import all_pictures, sample_occupancy
from kvpool.replay.serving import ServingConfig, simulate_serving
from kvpool.replay.simulate import PrefillTime
from kvpool.replay.synth import WorkloadModel, fit, synthesise
from kvpool.replay.trace import footprint, reuses, summary, to_blocks, working_set
from kvpool.scheduling import LinearCostModel

RESULTS = Path(__file__).with_name("same_results.json")
POLICIES = ("2q", "adaptive", "arc", "clock", "cost", "fifo", "lfu", "lru", "priority", "s3fifo", "sieve")
LAYERS = (LayerSpec(kv_heads=1, head_dim=5, dtype=DType.FP8_E4M3),)
STATE = StateSpec((StatePart("recurrent", (10, 8), DType.FLOAT32),))
SMALL = WorkloadModel(
    unit=16,
    num_stems=4,
    stem_blocks=3.0,
    first_blocks=(0.7, 0.6),
    turn_blocks=(0.2, 0.5),
    gap_seconds=(0.5, 1.0),
    output_tokens=(1.5, 0.5),
    continues=(0.6, 0.4),
)
WORKLOADS = {
    "usual": WorkloadModel(),
    "small": SMALL,
    "tenants": SMALL.with_tenants(6),
    "few tenants": SMALL.with_tenants(2),
    "shared": WorkloadModel(unit=16, unshared=0.0, num_stems=2, stem_skew=0.0, continues=(0.0,)),
    "bursts": WorkloadModel(unit=16, burstiness=4.0, unshared=1.0).with_rate(20.0),
    "even": WorkloadModel(unit=16, burstiness=0.01, continues=(0.9,), gap_seconds=(-3.0, 0.1)),
}
WINDOWED = {**LLAMA, "model_type": "mistral", "sliding_window": 1024}
HYBRID = {
    **LLAMA,
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "head_dim": 128,
}
PLANS: dict[str, dict[str, Any]] = {
    "one GPU": {"model": LLAMA, "gpu": "h200"},
    "tiers": {"model": LLAMA, "gpu": "h100", "host_bytes": 2**38, "disk_bytes": 2**42, "concurrency": 200},
    "long": {"model": LLAMA, "gpu": "a100", "context": 100_000, "kv_dtype": "fp8", "block_size": 64},
    "window": {"model": WINDOWED, "gpu": "l4", "context": 4000, "concurrency": 3, "num_gpus": 2},
    "states": {"model": HYBRID, "gpu": "h200", "concurrency": 40},
    "ranks": {"model": LLAMA, "gpu": "h200", "tensor_parallel": 4, "data_parallel": 2, "concurrency": 64},
    "many ranks": {"model": LLAMA, "gpu": "h200", "tensor_parallel": 16, "link": Interconnect(50e9, 20e-6, "here")},
}
SERVED: dict[str, dict[str, Any]] = {
    "calm": {},
    "busy": {"speed": 50.0, "slo_ttft": 0.5, "slo_tpot": 0.02},
    "crowded": {"speed": 500.0, "max_sequences": 5, "max_tokens_per_step": 600, "slo_ttft": 1.0},
}
CLUSTERS: dict[str, FleetConfig] = {
    "prefix": FleetConfig(4, 60),
    "session": FleetConfig(5, 60, "session"),
    "round robin": FleetConfig(3, 40, "round-robin", prefill_tokens_per_second=500.0),
    "cells": FleetConfig(9, 60, cell=2, policy="lfu", event_seconds=2.0),
    "many cells": FleetConfig(30, 40, "session", cell=1),
    "slow": FleetConfig(2, 100, prefill_tokens_per_second=200.0, decode_tokens_per_second=5.0),
}


def rows(trace: Trace) -> list[list[Any]]:
    return [
        [round(r.timestamp, 6), r.ids.tolist(), r.input_length, r.output_length, r.session, r.tenant] for r in trace
    ]


def row(found: Any) -> dict[str, Any]:
    data: dict[str, Any] = found.row()
    for name in ("decisions_per_second", "index_bytes"):  # of this machine
        data.pop(name, None)
    return data | ({"hits": found.hits.tolist()} if getattr(found, "hits", None) is not None else {})


def served(trace: Trace, cache: ReplayConfig, layers: Any = (), **options: Any) -> dict[str, Any]:
    layers = layers or [LayerSpec(kv_heads=2, head_dim=64)] * 4
    return row(simulate_serving(trace, ServingConfig(cache, layers, LinearCostModel(smoothing=1e-9), **options)))


def looked_at(trace: Trace) -> dict[str, Any]:
    found = reuses(trace)
    shown = {"seconds": found.seconds, "new": found.new_blocks, "set": working_set(trace, 9.0), "all": footprint(trace)}
    return {"summary": summary(trace), **{name: np.array(values).tolist() for name, values in shown.items()}}


def drawn(trace: Trace) -> list[Any]:
    configs = [ReplayConfig(policy, size, host=20) for policy in ("lru", "lfu") for size in (30, 60, 90)]
    found = []
    for picture in all_pictures(trace, [replay(trace, config) for config in configs], configs):
        figure = picture.draw()
        for axes in figure.axes:
            lines = [[line.get_label(), np.round(line.get_xydata(), 6).tolist()] for line in axes.get_lines()]
            wedges = [[round(p.theta1, 3), round(p.theta2, 3), p.r] for p in axes.patches if hasattr(p, "theta1")]
            areas = [[c.get_label(), float(np.round(c.get_paths()[0].vertices.sum(), 3))] for c in axes.collections]
            words = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()]
            limits = [round(float(x), 4) for x in (*axes.get_xlim(), *axes.get_ylim())]
            texts = [[t.get_text(), *np.round(t.get_position(), 3).tolist()] for t in axes.texts]
            found.append([picture.title, picture.caption, lines, wedges, areas, words, limits, texts])
        found.append([text.get_text() for legend in figure.legends for text in legend.get_texts()])
    return found


def printed(*words: str) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(list(words))
    said = re.sub(r"(takes\. )[\d.]+ s|/\S*/", r"\1", out.getvalue())  # the time of this run, and its folder
    lines = (re.sub(r"[\s\u2500-\u257f]+", " ", line).strip() for line in said.splitlines())
    return [str(code), *filter(None, lines)]


def commands() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace, tokens, model, out = (f"{folder}/{name}" for name in ("t.jsonl", "tokens.jsonl", "m.json", "o.jsonl"))
        write_trace(synthesise(SMALL.with_tenants(3), 80, seed=5), trace)
        Path(tokens).write_text(
            "".join(f'{{"timestamp": {n}, "tokens": {[*range(n % 7 * 9), n]}}}\n' for n in range(40)) + "none\n"
        )
        Path(model).write_text(json.dumps(LLAMA))
        runs = {
            "info": ["trace", "info", trace],
            "info of tokens": ["trace", "info", tokens],
            "convert": ["trace", "convert", tokens, out, "--block-size", "4", "--limit", "30"],
            "info of blocks": ["trace", "info", out],
            "synth": ["trace", "synth", out, "--requests", "50", "--like", trace, "--seed", "3"],
            "info of synth": ["trace", "info", out],
            "replay": ["replay", trace, "--policy", "lru,lfu", "--capacity", "10,40,inf"],
            "tiers": ["replay", trace, "--tiers", "gpu=20,host=30", "--host-write", "through"],
            "whole blocks": ["replay", trace, "--capacity", "20:50", "--full-blocks-only", "--limit", "60"],
            "served": ["replay", trace, "--capacity", "60", "--model", model, "--gpu", "h200", "--speed", "9"],
            "of tokens": ["replay", tokens, "--capacity", "8,30", "--block-size", "2", "--objective", "both"],
            "plan": ["plan", "--model", model, "--gpu", "h200", "--context", "32k", "--concurrency", "20"],
            "plan of ranks": ["plan", "--model", model, "--gpu", "l4", "--tensor-parallel", "2", "--host", "64GB"],
            "plan by trace": ["plan", "--model", model, "--gpu", "h100", "--trace", trace, "--disk", "1TB"],
            "cluster": ["fleet", trace, "--nodes", "2,5", "--capacity", "30,60", "--routing", "session,round-robin"],
        }
        alone = {"replay": ["--workers", "1"]}
        return {name: printed(*words, *alone.get(words[0], [])) for name, words in runs.items()}


def cases() -> dict[str, Callable[[], Any]]:
    chat, talks = conversations(300), synthesise(SMALL.with_tenants(3), 120, seed=2)
    small, quick = talks.head(40), conversations(60)
    lengths = TraceBuilder("lengths", reuse_known=False)
    for number in range(30):
        lengths.add(number * number * 10.0, (), 100 * number, number % 7)
    late = TraceBuilder("late", unit=16).add(5000, [1, 2], 20, 0).add(1000, [1], 16, 2).add(1000, [], 0, 1)
    found: dict[str, Callable[[], Any]] = {}
    for name, model in WORKLOADS.items():
        found[f"synthesise {name}"] = lambda model=model: rows(synthesise(model, 25, seed=4))
    for trace in (chat, talks, lengths.build(), late.build()):
        found[f"fit {trace.name}"] = lambda trace=trace: asdict(fit(trace))
    for trace in (small, late.build()):
        found[f"look at {trace.name}"] = lambda trace=trace: looked_at(trace)
    for name in MODELS:
        for sizes in ((12, 0, 0), (40, 30, 0), (20, 0, 60), (None, 0, 0)):
            found[f"{name} {sizes}"] = lambda name=name, sizes=sizes: row(run_model(talks, name, *sizes))
    for policy in POLICIES:
        found[f"replay of {policy}"] = lambda policy=policy: row(replay(chat, ReplayConfig(policy, 120)))
    configs = [
        *(ReplayConfig(policy, 30, objective="seconds") for policy in ("adaptive", "cost")),
        ReplayConfig("lru", 30, host=40, layers=LAYERS),
        ReplayConfig("adaptive", 20, host=30, disk=60, host_write="through"),
        ReplayConfig("lru", 20, block_size=64, time=PrefillTime(1.0, 0.5, 0.1, 0.2), disk=9),
        ReplayConfig("lru", None, layers=(*LAYERS, STATE)),
        ReplayConfig("lru", 60, host=20, disk=30, layers=(*LAYERS, STATE), checkpoint_every=64),
    ]
    for number, config in enumerate(configs):
        found[f"replay {number} {config.policy}"] = lambda config=config: row(replay(talks, config))
    for name, options in SERVED.items():
        found[f"serve {name}"] = lambda options=options: served(quick, ReplayConfig("lru", 200), **options)
    found["serve tiers"] = lambda: served(quick, ReplayConfig("lru", 60, host=200, disk=100), speed=20.0)
    found["serve states"] = lambda: served(
        quick, ReplayConfig("lru", 300, layers=(*LAYERS, STATE), host=100), (*LAYERS, STATE), speed=20.0
    )
    found["serve seconds"] = lambda: served(quick, ReplayConfig("adaptive", 80, objective="seconds"), speed=20.0)
    found["serve odd"] = lambda: served(late.build(), ReplayConfig("lru", 9))
    for name, options in PLANS.items():
        found[f"plan {name}"] = lambda options=options: asdict(make_plan(PlanRequest(**options)))
    for name, cluster in CLUSTERS.items():
        found[f"cluster {name}"] = lambda cluster=cluster: row(simulate_fleet(talks, cluster))
    found["cluster of nothing"] = lambda: row(simulate_fleet(late.build().head(0), FleetConfig(2, 4)))
    found["blocks of tokens"] = lambda: rows(to_blocks(TraceBuilder("t").add(0, [1, 2, 3, 1, 2], 5, 1).build(), 2))
    found["occupancy"] = lambda: asdict_of(sample_occupancy(talks, ReplayConfig("lru", 40, host=20)))
    found["pictures"] = lambda: drawn(talks)
    found["commands"] = commands
    return found


def asdict_of(named: Any) -> dict[str, Any]:
    fields: dict[str, Any] = named._asdict()
    return fields


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def differences(now: Any, then: Any, at: str = "") -> list[str]:
    """Where two results differ."""
    if (
        isinstance(now, float)
        and isinstance(then, (float, int))
        and math.isclose(now, then, rel_tol=1e-9, abs_tol=1e-12)
    ):
        return []
    if type(now) is type(then) and isinstance(now, (dict, list)) and len(now) == len(then):
        pairs = now.items() if isinstance(now, dict) else enumerate(now)
        if isinstance(now, list) or now.keys() == then.keys():
            return [found for key, value in pairs for found in differences(value, then[key], f"{at}/{key}")]
    return [] if now == then else [f"{at}: {now!r} instead of {then!r}"]


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_given_the_same_arguments_then_the_results_are_those_of_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = differences(plain(CASES[name]()), json.loads(RESULTS.read_text())[name])
    assert not found, "is that meant? " + "\n".join(found[:9])


if __name__ == "__main__":
    os.environ["COLUMNS"] = "160"
    written = [f"{json.dumps(name)}: {json.dumps(plain(case()))}" for name, case in CASES.items()]
    RESULTS.write_text("{\n" + ",\n".join(written) + "\n}\n")
