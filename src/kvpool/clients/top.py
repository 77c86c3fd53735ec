"""`kvpool top`: a running server in the terminal, from its Prometheus metrics.

It shows memory by tier, requests, reuse, speed and latencies.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvpool.clients.load import Endpoint, fetch_text
from kvpool.errors import InvalidArgumentError

_NUMBER = r"[-+0-9.eE]+|[-+]?Inf|NaN"
_SAMPLE = re.compile(rf'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:[^"}}]|"(?:[^"\\]|\\.)*")*)\}})?\s+({_NUMBER})(?:\s|$)')
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = tuple[tuple[str, str], ...]
_STATES = (
    ("referenced", "red", "█"),
    ("pinned", "magenta", "▓"),
    ("cached", "cyan", "▒"),
    ("free", "bright_black", "░"),
)
_TIMES = (("first token", "kvpool_first_token_seconds"), ("between tokens", "kvpool_between_tokens_seconds"))
_SHORT = {"referenced": "used"}
BAR_WIDTH = 24
_MINUTE = 60.0  # over shorter times, requests that end and requests that begin are hardly the same


@dataclass
class Scrape:
    """All numbers of a server at one moment.

    >>> look = read_metrics('kvpool_blocks{state="free",tier="GPU"} 12\\nkvpool_generated_tokens_total 7\\n', at=0.0)
    >>> look.total("kvpool_blocks", state="free"), look.total("kvpool_generated_tokens_total")
    (12.0, 7.0)
    """

    at: float
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **wanted: str) -> float:
        """The sum over all samples with these labels."""
        return sum(
            value for labels, value in self.samples.get(name, {}).items() if wanted.items() <= dict(labels).items()
        )

    def values(self, name: str, label: str) -> list[str]:
        """The values that a label has, in order of appearance."""
        found = (dict(labels).get(label) for labels in self.samples.get(name, {}))
        return list(dict.fromkeys(value for value in found if value is not None))

    def since(self, before: Scrape) -> Scrape:
        """How much every number has grown. After a restart of the server, it counts from 0."""
        changed = {}
        for name, samples in self.samples.items():
            known = before.samples.get(name, {})
            olds = ((at, value, known.get(at, 0.0)) for at, value in samples.items())
            changed[name] = {at: value - old if value >= old else value for at, value, old in olds}
        return Scrape(self.at - before.at, changed)

    def quantile(self, histogram: str, share: float) -> float | None:
        """The quantile `share` of a histogram, from its buckets; None if it has no observations."""
        counts: defaultdict[float, float] = defaultdict(float)  # over all models
        for labels, count in self.samples.get(f"{histogram}_bucket", {}).items():
            counts[_bound(labels)] += count
        buckets = sorted(counts.items())
        if not buckets or not buckets[-1][1]:
            return None
        wanted = share * buckets[-1][1]
        for (low, below), (high, within) in pairwise([(0.0, 0.0), *buckets]):
            if within >= wanted and within > below:
                return low if math.isinf(high) else low + (high - low) * (wanted - below) / (within - below)
        return buckets[-1][0]


def read_metrics(text: str, at: float) -> Scrape:
    """The numbers in a text of /metrics; other lines are ignored."""
    look = Scrape(at)
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        if found is not None:
            labels = tuple((name, _unescaped(value)) for name, value in _LABEL.findall(found[2] or ""))
            look.samples.setdefault(found[1], {})[labels] = float(found[3])
    return look


def _bound(labels: Labels) -> float:
    return float(dict(labels)["le"])


def _unescaped(text: str) -> str:
    return re.sub(r"\\[\\\"n]", lambda found: _ESCAPES[found[0]], text)


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(top)


def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    key: Annotated[
        str, typer.Option(envvar="KVPOOL_API_KEY", help="An admin's API key, where there are keys.", show_default=False)
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a running server: its blocks, requests, reuse and latencies. Ctrl-C ends it.

    Rates are those since the last refresh, percentiles those of the last minute; with --once, since the server started.
    """
    from rich.console import Console
    from rich.live import Live

    endpoint = Endpoint.at(url, key=key)
    look = _look(endpoint)
    if once:
        Console().print(screen(url, look, None))
        return
    looks = deque([look])
    with Live(screen(url, look, None), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                trouble = ""
                try:
                    looks.append(_look(endpoint))
                except InvalidArgumentError as error:
                    trouble = str(error)
                while looks[-1].at - looks[0].at > _MINUTE and len(looks) > 2:
                    looks.popleft()
                before = looks[-2] if len(looks) > 1 else None
                live.update(screen(url, looks[-1], before, trouble, looks[0]), refresh=True)
        except KeyboardInterrupt:
            return


def _look(endpoint: Endpoint) -> Scrape:
    try:
        text = asyncio.run(fetch_text(endpoint, "/metrics"))
    except InvalidArgumentError:
        raise
    except (OSError, asyncio.TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        where = f"{endpoint.host}:{endpoint.port}"
        raise InvalidArgumentError(f"nobody answers at {where}: {str(error) or type(error).__name__}") from None
    look = read_metrics(text, time.monotonic())
    if "kvpool_blocks" not in look.samples:
        raise InvalidArgumentError(f"{endpoint.host}:{endpoint.port} has metrics, but none of kvpool's")
    return look


def screen(url: str, look: Scrape, before: Scrape | None, trouble: str = "", longer_ago: Scrape | None = None) -> Any:
    """The text of one screen. Rates are those since the look `before`, percentiles those since `longer_ago`.

    Without a look before, both are those since the server started.
    """
    recent = look if before is None else look.since(before)
    longer = recent if before is None or longer_ago is None else look.since(longer_ago)
    head = Text.assemble((f"kvpool top  {url}", "bold"), (f"   {trouble}", "bold red"))
    return Group(
        head, Text(), _memory(look), Text(), _requests(look, recent, before is not None), Text(), _latencies(longer)
    )


def _memory(look: Scrape) -> Table:
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
    """Blocks by state as a bar. Rounding keeps its length."""
    shown, sofar, drawn = Text(), 0.0, 0
    for state, colour, letter in _STATES:
        sofar += counts[state] - (counts["pinned"] if state == "cached" else 0.0)
        upto = round(width * sofar / total) if total else 0
        shown.append(letter * (upto - drawn), colour)
        drawn = max(drawn, upto)
    return shown


def _requests(look: Scrape, recent: Scrape, is_recent: bool) -> Table:
    table = Table.grid(padding=(0, 3))
    states = {state: look.total("kvpool_sequences", state=state) for state in ("running", "waiting", "swapped")}
    table.add_row("sequences", "   ".join(f"{count:,.0f} {state}" for state, count in states.items()))
    seconds = recent.at if is_recent and recent.at > 0 else None
    tokens, requests = recent.total("kvpool_generated_tokens_total"), recent.total("kvpool_requests_ended_total")
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


def _by(look: Scrape, name: str, label: str) -> dict[str, float]:
    """The values of a counter by one of its labels, without zeros."""
    counts = {value: look.total(name, **{label: value}) for value in look.values(name, label)}
    return {value: count for value, count in counts.items() if count}


def _latencies(recent: Scrape) -> Table:
    table = Table("", "p50", "p90", "p99", box=None)
    for title, name in (*_TIMES, ("whole request", "kvpool_request_seconds")):
        found = [recent.quantile(name, share) for share in (0.5, 0.9, 0.99)]
        table.add_row(title, *("-" if value is None else f"{1e3 * value:,.0f} ms" for value in found))
    return table
