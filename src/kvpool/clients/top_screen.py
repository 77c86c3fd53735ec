"""What `kvpool top` shows: memory by tier, requests, reuse, speed and latencies."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvpool.clients.metrics import Look

_STATES = (
    ("referenced", "red", "█"),
    ("pinned", "magenta", "▓"),
    ("cached", "cyan", "▒"),
    ("free", "bright_black", "░"),
)
_TIMES = (("first token", "kvpool_first_token_seconds"), ("between tokens", "kvpool_between_tokens_seconds"))
_SHORT = {"referenced": "used"}
BAR_WIDTH = 24


def screen(url: str, look: Look, before: Look | None, trouble: str = "") -> Any:
    """One picture; rates are those since the look before, or since the start where there is none."""
    recent = look if before is None else look.since(before)
    head = Text.assemble((f"kvpool top  {url}", "bold"), (f"   {trouble}", "bold red"))
    return Group(
        head, Text(), _memory(look), Text(), _requests(look, recent, before is not None), Text(), _latencies(recent)
    )


def _memory(look: Look) -> Table:
    table = Table("", "", "blocks", box=None, padding=(0, 1, 0, 0))
    for state, colour, letter in _STATES:
        table.add_column(Text(f"{letter}{_SHORT.get(state, state)}", colour), justify="right", no_wrap=True)
    places = {
        tuple(dict(at)[name] for name in ("model", "pool", "tier")) for at in look.samples.get("kvpool_blocks", {})
    }
    for model, pool, tier in sorted(places):
        place = {"model": model, "pool": pool, "tier": tier}
        counts = {state: look.total("kvpool_blocks", state=state, **place) for state, _, _ in _STATES}
        total = counts["referenced"] + counts["cached"] + counts["free"]  # pinned ones are part of the cached
        numbers = (total, counts["referenced"], counts["pinned"], counts["cached"], counts["free"])
        table.add_row(f"{model}, pool {pool}, {tier}", bar(counts, total), *(f"{number:,.0f}" for number in numbers))
    return table


def bar(counts: dict[str, float], total: float, width: int = BAR_WIDTH) -> Text:
    """Blocks by state as a bar; rounding never hides the last characters."""
    shown, sofar, drawn = Text(), 0.0, 0
    for state, colour, letter in _STATES:
        sofar += counts[state] - (counts["pinned"] if state == "cached" else 0.0)
        upto = round(width * sofar / total) if total else 0
        shown.append(letter * (upto - drawn), colour)
        drawn = max(drawn, upto)
    return shown


def _requests(look: Look, recent: Look, is_recent: bool) -> Table:
    table = Table.grid(padding=(0, 3))
    states = {state: look.total("kvpool_sequences", state=state) for state in ("running", "waiting", "swapped")}
    table.add_row("sequences", "   ".join(f"{count:,.0f} {state}" for state, count in states.items()))
    seconds = recent.at if is_recent and recent.at > 0 else None
    tokens, requests = recent.total("kvpool_generated_tokens_total"), recent.total("kvpool_request_seconds_count")
    if seconds is None:
        table.add_row("since the start", f"{tokens:,.0f} tokens   {requests:,.0f} requests")
    else:
        table.add_row("a second", f"{tokens / seconds:,.1f} tokens   {requests / seconds:,.2f} requests")
    refused = _by(recent, "kvpool_http_refused_total", "status")
    table.add_row("refused", "   ".join(f"{count:,.0f} with {status}" for status, count in refused.items()) or "none")
    prompts = recent.total("kvpool_prompt_tokens_total")
    hits = _by(recent, "kvpool_hit_tokens_total", "tier")
    share = f"{sum(hits.values()) / prompts:.1%} of prompt tokens" if prompts else "no prompts"
    by_tier = "".join(f"   {count:,.0f} from {tier}" for tier, count in hits.items())
    table.add_row("from the cache", share + by_tier)
    evicted = _by(recent, "kvpool_evictions_total", "reason")
    table.add_row(
        "evicted", "   ".join(f"{count:,.0f} blocks: {reason}" for reason, count in evicted.items()) or "none"
    )
    return table


def _by(look: Look, name: str, label: str) -> dict[str, float]:
    """What is not zero of a counter, by one of its labels."""
    counts = {value: look.total(name, **{label: value}) for value in look.values(name, label)}
    return {value: count for value, count in counts.items() if count}


def _latencies(recent: Look) -> Table:
    table = Table("", "p50", "p90", "p99", box=None)
    for title, name in (*_TIMES, ("whole request", "kvpool_request_seconds")):
        found = [recent.quantile(name, share) for share in (0.5, 0.9, 0.99)]
        table.add_row(title, *("-" if value is None else f"{1e3 * value:,.0f} ms" for value in found))
    return table
