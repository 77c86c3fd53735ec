"""Pictures of a trace and of its replays, with matplotlib, which is imported here and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.config.layers import ceil_div
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.replay.simulate import ReplayConfig, ReplayResult, best_run, hit_curve, replay
from kvpool.replay.trace import Trace, footprint, reuses, to_blocks, working_set

SUNBURST_DEPTH = 5
SUNBURST_CHILDREN = 12  # of one node; the others are drawn as one
OCCUPANCY_SAMPLES = 200
MAX_TICKS = 8
OCCUPANCY_LAYERS = 8  # the rest is drawn as one
_MUTED = "#9aa4b2"


def _figure(width: float = 5.6, height: float = 3.6) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgumentError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def hit_curves(results: Sequence[ReplayResult]) -> Any:
    """Hit ratio over capacity, one line per policy; bounds are dashed."""
    figure, axes = _figure()
    for policy in dict.fromkeys(result.label for result in results):
        points = hit_curve(results, policy)
        level = next((r.hit_ratio for r in results if r.label == policy and r.capacity is None), None)
        bound = any(r.bound for r in results if r.label == policy)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "--" if bound else "o-",
                label=policy,
                color="black" if bound else None,
                ms=4,
            )
        elif level is not None:
            axes.axhline(level, color=_MUTED, ls=":", label=policy)
    axes.set_xscale("log")
    sizes = sorted({result.capacity for result in results if result.capacity is not None})
    axes.set_xticks(sizes[:: ceil_div(len(sizes), MAX_TICKS)] if sizes else [])
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1000:g}k" if size >= 1000 else f"{size:g}")
    axes.minorticks_off()
    axes.set_xlabel("capacity (blocks)")
    axes.set_ylabel("block hit ratio")
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside upper center", ncols=4)
    return figure


def reuse_distances(trace: Trace) -> Any:
    """The time, and the number of new blocks, between two uses of a block, as cumulative distributions."""
    found = reuses(trace)
    figure, axes = _figure()
    for values, label in ((found.seconds, "seconds"), (found.new_blocks.astype(float), "new blocks")):
        ordered = np.sort(values)
        if len(ordered):
            steps = np.unique(np.linspace(0, len(ordered) - 1, 400).astype(int))
            axes.plot(np.maximum(ordered[steps], 0.1), (steps + 1) / len(ordered), label=label)
    axes.set_xscale("log")
    axes.set_xlabel("distance to the use before")
    axes.set_ylabel("fraction of reuses")
    if axes.lines:
        figure.legend(frameon=False, loc="outside upper center", ncols=4)
    return figure


def working_sets(trace: Trace) -> Any:
    """Different blocks per window of time, and all blocks ever used."""
    figure, axes = _figure()
    span = max(trace.duration, 1.0)
    for parts in (100, 20):
        starts, counts = working_set(trace, span / parts)
        axes.step(starts / 60, counts, where="post", label=f"in {span / parts:,.0f} s")
    times, total = footprint(trace)
    axes.plot(times / 60, total, color=_MUTED, label="since the start")
    axes.set_yscale("log")
    axes.set_xlabel("minutes")
    axes.set_ylabel("different blocks")
    figure.legend(frameon=False, loc="outside upper center", ncols=4)
    return figure


class Occupancy(NamedTuple):
    """What a cache held over time: blocks at each sample, by tier and age, and by the tenant whose request computed them."""

    minutes: list[float]
    by_age: dict[str, list[int]]
    by_tenant: dict[str, list[int]]  # empty when the trace does not say who asked


_AGES = ((60.0, "used < 1 min ago"), (600.0, "1–10 min"), (float("inf"), "> 10 min"))
_NOBODY = "no tenant"


def sample_occupancy(trace: Trace, config: ReplayConfig) -> Occupancy:
    """Replays a trace and looks into the cache from time to time."""
    every = max(1, len(trace) // OCCUPANCY_SAMPLES)
    by_age: dict[str, list[int]] = {name: [] for name in (*(f"GPU, {label}" for _, label in _AGES), "host", "disk")}
    found = Occupancy([], by_age, {})
    tenants = _tenants_by_serial(trace)
    found.by_tenant.update({name: [] for name in dict.fromkeys(tenants)})

    def observe(index: int, manager: KVCacheManager) -> None:
        if index % every:
            return
        now = trace.timestamps[: index + 1].max() / 1000
        ages, owners = dict.fromkeys(found.by_age, 0), dict.fromkeys(found.by_tenant, 0)
        for run in manager.inspect.runs():
            name = "host" if run.tier == Tier.HOST else "disk"
            if run.tier == Tier.GPU:
                name = "GPU, " + next(label for limit, label in _AGES if run.idle_seconds < limit)
            ages[name] += run.num_blocks
            if tenants:
                owners[tenants[run.published_by - 1]] += run.num_blocks
        found.minutes.append(now / 60)
        for layers, counts in ((found.by_age, ages), (found.by_tenant, owners)):
            for name, count in counts.items():
                layers[name].append(count)

    replay(trace, config, observe=observe)
    return found


def _tenants_by_serial(trace: Trace) -> list[str]:
    """The tenant of each sequence, by the manager's numbers. Requests without a prompt have none."""
    if trace.tenants is None:
        return []
    asks = np.diff(trace.offsets) > 0
    return [name or _NOBODY for name, asked in zip(trace.tenants, asks.tolist(), strict=True) if asked]


def occupancy(minutes: Sequence[float], layers: Mapping[str, Sequence[int]]) -> Any:
    """Blocks over time, stacked. If there are many layers, the smallest are drawn as one."""
    used = sorted((name for name in layers if max(layers[name], default=0)), key=lambda name: -sum(layers[name]))
    largest, rest = used[:OCCUPANCY_LAYERS], used[OCCUPANCY_LAYERS:]
    stack = {name: layers[name] for name in layers if name in largest}
    if rest:
        stack[f"{len(rest)} others"] = np.sum([layers[name] for name in rest], axis=0).tolist()
    figure, axes = _figure()
    axes.stackplot(minutes, list(stack.values()), labels=list(stack), lw=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("blocks")
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    return figure


def sunburst(trace: Trace) -> Any:
    """The tree of prompts, from the inside out: how many requests have each of the first blocks."""
    figure, axes = _figure(5.5, 5.5)
    axes.remove()
    axes = figure.add_subplot(projection="polar")
    axes.set_axis_off()
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    prompts = [tuple(trace.ids_of(index)[:SUNBURST_DEPTH].tolist()) for index in range(len(trace))]
    pending: list[tuple[list[tuple[int, ...]], int, float]] = [([p for p in prompts if p], 0, 0.0)]
    total = max(1, len(pending[0][0]))
    while pending:
        inside, depth, angle = pending.pop()
        groups: dict[int, list[tuple[int, ...]]] = {}
        for prompt in inside:
            if len(prompt) > depth:
                groups.setdefault(prompt[depth], []).append(prompt)
        largest = sorted(groups.values(), key=len, reverse=True)
        for rank, members in enumerate(largest[:SUNBURST_CHILDREN]):
            width = 2 * np.pi * len(members) / total
            shade = colours(0.15 + 0.7 * rank / SUNBURST_CHILDREN)
            axes.bar(angle, 0.9, width, depth + 1, align="edge", color=shade, edgecolor="white", linewidth=0.4)
            if depth + 1 < SUNBURST_DEPTH and len(members) > 1:
                pending.append((members, depth + 1, angle))
            angle += width
        rest = sum(len(members) for members in largest[SUNBURST_CHILDREN:])
        if rest:
            axes.bar(angle, 0.9, 2 * np.pi * rest / total, depth + 1, align="edge", color=_MUTED, alpha=0.4)
    return figure


class Picture(NamedTuple):
    """A title, a sentence that says how to read it, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[], Any]


def all_pictures(trace: Trace, results: Sequence[ReplayResult], configs: Sequence[ReplayConfig] = ()) -> list[Picture]:
    """Every picture that this trace and these results allow."""
    pictures = []
    if any(result.capacity is not None for result in results):
        caption = "Higher is better. Dashed and dotted: bounds that no policy can pass."
        pictures.append(Picture("Hit ratio by capacity", caption, lambda: hit_curves(results)))
    blocks = to_blocks(trace, keep_ends=False)
    if blocks.num_ids:
        caption = (
            "The part of all reuses that come within so many seconds, or so many new blocks, after the use before."
        )
        pictures.append(Picture("Distance between uses of a block", caption, lambda: reuse_distances(blocks)))
        caption = "Different blocks that are used in windows of time, and all that were ever used."
        pictures.append(Picture("Working set", caption, lambda: working_sets(blocks)))
        caption = (
            f"From the inside out: the first {SUNBURST_DEPTH} blocks of prompts, as wide as many requests go through them. "
            f"Grey: all beyond the {SUNBURST_CHILDREN} most frequent; white: prompts that share no more."
        )
        pictures.append(Picture("Tree of prompts", caption, lambda: sunburst(blocks)))
    best = best_run(results)
    shown = [config for result, config in zip(results, configs, strict=False) if result is best]
    return pictures + [picture for config in shown for picture in _occupancy_pictures(trace, config)]


def _occupancy_pictures(trace: Trace, config: ReplayConfig) -> list[Picture]:
    held = cache(lambda: sample_occupancy(trace, config))
    sizes = f"Policy {config.policy}, {config.capacity:,} blocks" + "".join(
        f" + {blocks:,} on the {tier}" for tier, blocks in (("host", config.host), ("disk", config.disk)) if blocks
    )
    pictures = [
        Picture(
            "What the cache holds, by tier and age",
            f"{sizes}; those on the GPU by the time since their last use.",
            lambda: occupancy(held().minutes, held().by_age),
        )
    ]
    if trace.tenants is not None:
        pictures.append(
            Picture(
                "What the cache holds, by tenant",
                f"{sizes}; a block counts for the tenant whose request had it computed.",
                lambda: occupancy(held().minutes, dict(sorted(held().by_tenant.items()))),
            )
        )
    return pictures


def absent_pictures(trace: Trace) -> list[str]:
    """Sentences about pictures that this trace does not allow, and what they need."""
    if trace.tenants is None:
        return [
            f'{trace.name} does not say who asked, so nothing is drawn by tenant; a line may carry "tenant": "name"'
        ]
    return []


def to_svg(figure: Any) -> str:
    """A figure as an `<svg>` element, without the XML header; the same every time."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "kvpool"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save_pictures(
    folder: Path, trace: Trace, results: Sequence[ReplayResult], configs: Sequence[ReplayConfig] = ()
) -> list[Path]:
    """Writes every picture as PNG and SVG; returns the paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {folder}: {error.strerror or error}") from None
    paths = []
    for picture in all_pictures(trace, results, configs):
        figure = picture.draw()
        name = "-".join("".join(c if c.isalnum() else " " for c in picture.title.lower()).split())
        for suffix in (".png", ".svg"):
            path = folder / f"{name}{suffix}"
            try:
                figure.savefig(path, dpi=150)
            except OSError as error:  # a full disk
                raise InvalidArgumentError(f"cannot write {path}: {error.strerror or error}") from None
            paths.append(path)
    return paths
