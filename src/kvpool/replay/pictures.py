"""Pictures of a trace and of its replays, with matplotlib, which is imported here and nowhere else."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.manager import KVCacheManager
from kvpool.replay.simulate import ReplayConfig, ReplayResult, replay
from kvpool.replay.statistics import footprint, reuses, working_set
from kvpool.replay.trace import Trace

SUNBURST_DEPTH = 5
SUNBURST_CHILDREN = 12  # of one node; the rest is drawn as one
OCCUPANCY_SAMPLES = 200
_MUTED = "#9aa4b2"


def _figure(width: float = 7.0, height: float = 4.2) -> tuple[Any, Any]:
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
    for policy in dict.fromkeys(result.policy for result in results):
        points = [(r.capacity, r.hit_ratio) for r in results if r.policy == policy and r.capacity is not None]
        level = next((r.hit_ratio for r in results if r.policy == policy and r.capacity is None), None)
        bound = any(r.bound for r in results if r.policy == policy)
        if points:
            sizes, ratios = zip(*sorted(points), strict=True)
            axes.plot(sizes, ratios, "--" if bound else "o-", label=policy, color="black" if bound else None, ms=4)
        elif level is not None:
            axes.axhline(level, color=_MUTED, ls=":", label=policy)
    axes.set_xscale("log")
    axes.set_xlabel("capacity (blocks)")
    axes.set_ylabel("block hit ratio")
    axes.set_ylim(bottom=0)
    figure.legend(frameon=False, loc="outside upper center", ncols=4)
    return figure


def reuse_distances(trace: Trace) -> Any:
    """How long, and how many new blocks, lie between two uses of a block: cumulative, over reuses."""
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


def occupancy(trace: Trace, config: ReplayConfig) -> Any:
    """What the cache holds over time, by tier and by the time since the last use."""
    times, layers = _sample_occupancy(trace, config)
    figure, axes = _figure()
    names = [name for name in layers if max(layers[name], default=0)]
    axes.stackplot(times, [layers[name] for name in names], labels=names, lw=0)
    axes.set_xlabel("minutes")
    axes.set_ylabel("blocks")
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    return figure


_AGES = ((60.0, "used < 1 min ago"), (600.0, "1–10 min"), (float("inf"), "> 10 min"))


def _sample_occupancy(trace: Trace, config: ReplayConfig) -> tuple[list[float], dict[str, list[int]]]:
    every = max(1, len(trace) // OCCUPANCY_SAMPLES)
    times: list[float] = []
    layers: dict[str, list[int]] = {f"GPU, {label}": [] for _, label in _AGES}
    layers |= {"host": [], "disk": []}

    def observe(index: int, manager: KVCacheManager) -> None:
        if index % every:
            return
        now = trace.timestamps[: index + 1].max() / 1000
        counts = dict.fromkeys(layers, 0)
        for age, num_blocks, tier in manager_runs(manager, now):
            name = "host" if tier == Tier.HOST else "disk"
            if tier == Tier.GPU:
                name = "GPU, " + next(label for limit, label in _AGES if age < limit)
            counts[name] += num_blocks
        times.append(now / 60)
        for name, count in counts.items():
            layers[name].append(count)

    replay(trace, config, observe=observe)
    return times, layers


def manager_runs(manager: KVCacheManager, now: float) -> list[tuple[float, int, Tier]]:
    """(seconds since the last use, blocks, tier) of every cached run."""
    cache = manager._state.cache
    return [(now - node.last_access_at, node.num_blocks, node.tier) for node in cache.nodes()]


def sunburst(trace: Trace) -> Any:
    """The tree of prompts from the inside out: how many requests go through each of the first blocks."""
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


def all_pictures(trace: Trace, results: Sequence[ReplayResult]) -> dict[str, Callable[[], Any]]:
    """Every picture that this trace and these results allow, by title; drawn when called."""
    pictures: dict[str, Callable[[], Any]] = {}
    if any(result.capacity is not None for result in results):
        pictures["Hit ratio by capacity"] = lambda: hit_curves(results)
    if trace.num_ids:
        pictures["Distance between uses of a block"] = lambda: reuse_distances(trace)
        pictures["Working set"] = lambda: working_sets(trace)
        pictures["Tree of prompts"] = lambda: sunburst(trace)
    policies = [r for r in results if r.capacity is not None and not r.bound]
    if policies:
        middle = policies[len(policies) // 2]
        config = ReplayConfig(middle.policy, middle.capacity)
        title = f"What the cache holds ({middle.policy}, {middle.capacity:,} blocks)"
        pictures[title] = lambda: occupancy(trace, config)
    return pictures


def to_svg(figure: Any) -> str:
    """A figure as an `<svg>` element, without the XML header; the same every time."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def save_pictures(folder: Path, trace: Trace, results: Sequence[ReplayResult]) -> list[Path]:
    """Writes every picture as PNG and SVG; returns the paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"cannot write to {folder}: {error.strerror or error}") from None
    paths = []
    for title, draw in all_pictures(trace, results).items():
        figure = draw()
        name = "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
        for suffix in (".png", ".svg"):
            path = folder / f"{name}{suffix}"
            figure.savefig(path, dpi=150)
            paths.append(path)
    return paths
