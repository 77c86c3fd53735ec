"""One HTML page about a replay: tables and pictures in the file itself, readable offline and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kvpool.errors import InvalidArgumentError
from kvpool.replay.bounds import FLAT_FIFO, INFINITE
from kvpool.replay.capacity_plan import curve_sentence
from kvpool.replay.pictures import absent_pictures, all_pictures, to_svg
from kvpool.replay.simulate import ReplayConfig, ReplayResult, best_run, hit_curve
from kvpool.replay.trace import Trace, summary

_STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left } tr.bound { opacity: .65 } .best { font-weight: 700 }
figure { margin: 1rem 0; background: #fff; border-radius: .5rem; padding: .5rem }
svg { width: 100%; height: auto; max-width: 44rem; display: block; margin: auto }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .5rem }
.facts div { border: 1px solid #8884; border-radius: .5rem; padding: .5rem; min-width: 0; overflow-wrap: anywhere }
.facts b { display: block; font-size: 1.2rem }
"""


def write_report(
    path: str | Path,
    trace: Trace,
    results: Sequence[ReplayResult],
    configs: Sequence[ReplayConfig] = (),
    rows: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Writes the page. It is self-contained: no scripts, no fonts, no links.

    `configs` are those of the results, for the pictures of the cache. `rows` are the results with further columns (serving).
    """
    try:
        Path(path).write_text(render(trace, results, configs, rows), encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"cannot write {path}: {error.strerror or error}") from None


def render(
    trace: Trace,
    results: Sequence[ReplayResult],
    configs: Sequence[ReplayConfig] = (),
    rows: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The page as text."""
    title = f"Replay of {trace.name}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f"<p>{escape(_sentence(trace, results))}</p>",
        _curve_remark(results),
        _facts(summary(trace)),
        "".join(f"<p>Note: {escape(text)}</p>" for text in trace.problems.sentences()),
        "<h2>Hit ratio</h2>",
        "<p>Blocks that were found, of those asked for.</p>",
        _matrix(results, lambda result: result.hit_ratio),
        "".join(
            f"<p>{escape(text)}</p>" for text in dict.fromkeys(f"{r.policy}: {r.bound}" for r in results if r.bound)
        ),
        "<h2>Time saved</h2>",
        f"<p>{escape(_SAVED)}</p>",
        _matrix(results, lambda result: result.saved_ratio),
        _tiers(results),
    ]
    for picture in all_pictures(trace, results, configs):
        title = escape(picture.title)
        parts.append(
            f'<h2>{title}</h2><p>{escape(picture.caption)}</p><figure role="img" aria-label="{title}">'
            f"{to_svg(picture.draw())}</figure>"
        )
    parts.extend(f"<p>{escape(text)}</p>" for text in absent_pictures(trace))
    table = _rows([result.row() for result in results] if rows is None else rows)
    parts.append(f"<h2>All runs</h2>{table}</body></html>")
    return "\n".join(parts)


def _sentence(trace: Trace, results: Sequence[ReplayResult]) -> str:
    best = best_run(results)
    if best is None:
        return f"{len(trace):,} requests."
    saved = best.hit_tokens / max(best.requested_tokens, 1)
    return (
        f"{len(trace):,} requests asked for {best.requested_blocks:,} blocks of {best.block_size} tokens. "
        f"The best run, {best.policy} with {best.capacity:,} blocks, found {best.hit_ratio:.1%} of them in the cache "
        f"and saved {saved:.1%} of the prompt tokens."
    )


def _curve_remark(results: Sequence[ReplayResult]) -> str:
    """That nothing is shared, or that the curve of the best policy has no knee; empty if neither is so."""
    best = best_run(results)
    points = hit_curve(results, best.label) if best else []
    sentence = curve_sentence(*zip(*points, strict=True)) if points else ""
    return f"<p>{escape(sentence)}</p>" if sentence else ""


def _facts(figures: dict[str, Any]) -> str:
    """Figures of the trace as cards, without its name, which is in the heading, and without unknown figures."""
    cells = []
    for name, (show, label) in _FACTS.items():
        value = figures.get(name)
        if value is not None and not (value == 0 and name in ("sessions", "tenants")):
            cells.append(f"<div><b>{escape(show(value))}</b>{escape(label)}</div>")
    if not figures["reuse_known"]:
        cells.append("<div><b>not known</b>what prompts share</div>")
    return f'<div class="facts">{"".join(cells)}</div>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _duration(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


# Of the figures of a trace: how each is shown, and what the card says it is.
_FACTS: dict[str, tuple[Callable[[Any], str], str]] = {
    "format": (str, "format of the file"),
    "requests": (_number, "requests"),
    "seconds": (_duration, "from the first to the last"),
    "requests_per_second": (_number, "requests per second"),
    "prompt_tokens": (_number, "tokens of prompts"),
    "prompt_tokens_median": (_number, "tokens in half of the prompts, or fewer"),
    "prompt_tokens_p99": (_number, "tokens in 99 % of the prompts, or fewer"),
    "prompt_tokens_max": (_number, "tokens in the longest prompt"),
    "output_tokens_median": (_number, "tokens in half of the answers, or fewer"),
    "tokens_per_id": (_number, "tokens per block"),
    "ids": (_number, "blocks asked for"),
    "different_ids": (_number, "different blocks"),
    "ids_used_once": (_number, "blocks used only once"),
    "reuse_ratio_infinite_cache": ("{:.1%}".format, "of blocks had been used before"),
    "reuse_gap_seconds_median": (_duration, "between two uses in half of the cases, or less"),
    "reuse_gap_seconds_p90": (_duration, "between two uses in 90 % of the cases, or less"),
    "sessions": (_number, "sessions"),
    "tenants": (_number, "tenants"),
}


_SAVED = (
    "What computing the blocks that were found would have taken, less what loading them from lower tiers takes, of the "
    "time that computing all prompts would take. Deep blocks of long prompts take longer. The optimum is that of blocks."
)


def _matrix(results: Sequence[ReplayResult], figure: Callable[[ReplayResult], float]) -> str:
    """A table with policies as rows and capacities as columns; the best policy of each capacity is bold."""
    capacities = list(dict.fromkeys(result.capacity for result in results))
    policies = list(dict.fromkeys(result.label for result in results))
    table = {(result.label, result.capacity): result for result in results}
    best = {
        size: max((figure(r) for r in results if r.capacity == size and not r.bound), default=None)
        for size in capacities
    }
    head = "".join(f"<th>{'∞' if size is None else f'{size:,}'}</th>" for size in capacities)
    lines = []
    for policy in policies:
        cells, bound = [], False
        for size in capacities:
            result = table.get((policy, size))
            bound = bound or (result is not None and bool(result.bound))
            mark = result is not None and not result.bound and figure(result) == best[size]
            cells.append(f"<td{' class=best' if mark else ''}>{'' if result is None else f'{figure(result):.4f}'}</td>")
        lines.append(f"<tr{' class=bound' if bound else ''}><td>{escape(policy)}</td>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr><th>policy</th>{head}</tr>{"".join(lines)}</table></div>'


def _tiers(results: Sequence[ReplayResult]) -> str:
    """The share of blocks that each tier found, beside that of the optimum; empty without lower tiers."""
    tiers = [tier for tier in _TIER_NAMES if any(result.hit_blocks_by_tier.get(tier) for result in results)]
    shown = [result for result in results if result.policy not in (INFINITE, FLAT_FIFO)]
    if not set(tiers) & {"HOST", "DISK"} or not shown:
        return ""
    head = "".join(f"<th>{_TIER_NAMES[tier]}</th>" for tier in tiers)
    lines = []
    for result in shown:
        cells, found = [], 0
        for tier in tiers:
            found += result.hit_blocks_by_tier.get(tier, 0)
            cells.append(f"<td>{found / max(result.requested_blocks, 1):.4f}</td>")
        kind = " class=bound" if result.bound else ""
        lines.append(f"<tr{kind}><td>{escape(result.label)}</td>{''.join(cells)}</tr>")
    return (
        "<h2>Hits by tier</h2><p>Blocks found on a tier or above it, of those asked for. The optimum of a tier is that of "
        "one cache as large as it and those above it.</p>"
        f'<div class="scroll"><table><tr><th>policy</th>{head}</tr>{"".join(lines)}</table></div>'
    )


_TIER_NAMES = {"GPU": "GPU", "HOST": "host", "DISK": "disk"}


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    columns = [name for name in dict.fromkeys(c for row in rows for c in row) if name not in ("trace", "bound")]
    columns = [name for name in columns if any(row.get(name) for row in rows)]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    lines = ["".join(f"<td>{escape(_cell(row.get(name)))}</td>" for name in columns) for row in rows]
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
