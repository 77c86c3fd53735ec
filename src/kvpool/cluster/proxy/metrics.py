"""What a proxy knows of its servers, for Prometheus: the figures of `/route/stats` with a label for each server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvpool.prometheus import metric_lines

_Rows = Iterable[tuple[Mapping[str, object], float]]
_GAUGES = {
    "num_requests": ("requests", "Requests that a server has now."),
    "num_waiting_tokens": ("waiting_tokens", "Tokens of prompts that it still has to compute."),
    "num_context_tokens": ("context_tokens", "Tokens that its running requests read."),
}
_TOTALS = {
    "num_routes": ("routes", "Requests that it was given."),
    "num_hit_tokens": ("hit_tokens", "Tokens of their prompts that it had cached when they came."),
    "num_prompt_tokens": ("prompt_tokens", "Tokens of their prompts."),
}
_REASONS = ("cheapest", "session", "replicated", "spilled")
_HANDOVERS = ("handed_over", "blocks", "tokens", "direct")


def prometheus_text(described: Mapping[str, Any]) -> str:
    """What `/metrics` answers, from what `Proxy.described` tells."""
    return "".join(f"{line}\n" for line in _lines(described))


def _lines(described: Mapping[str, Any]) -> Iterator[str]:
    prefill = described["prefill"]
    pools = {"decode": described["nodes"]} | ({} if prefill is None else {"prefill": prefill["nodes"]})
    nodes = [({"node": url, "pool": pool}, node) for pool, found in pools.items() for url, node in found.items()]
    ready = ((labels, node["is_ready"]) for labels, node in nodes)
    yield from _family("node_ready", "gauge", "Whether a server takes requests.", ready)
    for key, (name, about) in _GAUGES.items():
        yield from _family(f"node_{name}", "gauge", about, ((labels, node[key]) for labels, node in nodes))
    for key, (name, about) in _TOTALS.items():
        yield from _family(f"node_{name}_total", "counter", about, ((labels, node[key]) for labels, node in nodes))
    blocks = (
        ({**labels, "medium": medium}, count) for labels, node in nodes for medium, count in node["blocks"].items()
    )
    yield from _family("node_blocks", "gauge", "Blocks that a server has announced.", blocks)
    events = (
        ({**labels, "kind": kind.removeprefix("num_")}, count)
        for labels, node in nodes
        for kind, count in (node["events"] or {}).items()
    )
    yield from _family("node_messages_total", "counter", "Messages of events, and what happened to them.", events)
    router, index = described["router"], described["index"]
    decisions = (({"reason": reason}, router[f"num_{reason}"]) for reason in _REASONS)
    yield from _family("decisions_total", "counter", "Why a server was chosen.", decisions)
    for name, kind in (("blocks", "gauge"), ("bytes", "gauge"), ("orphans", "counter"), ("refused", "counter")):
        suffix = "_total" if kind == "counter" else ""
        yield from _family(f"index_{name}{suffix}", kind, f"The index: {name}.", [({}, index[f"num_{name}"])])
    if prefill is not None:
        for name in _HANDOVERS:
            about = f"Prefill and decode apart: {name.replace('_', ' ')}."
            yield from _family(f"prefill_{name}_total", "counter", about, [({}, prefill[name])])
        fallbacks = (({"reason": reason}, count) for reason, count in prefill["fallbacks"].items())
        yield from _family("prefill_fallbacks_total", "counter", "Prompts that decode servers computed.", fallbacks)


def _family(name: str, kind: str, about: str, rows: _Rows) -> Iterator[str]:
    return metric_lines(f"kvpool_route_{name}", kind, about, ((labels, int(value)) for labels, value in rows))
