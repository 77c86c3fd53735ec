"""`kvpool fleet`: a cluster of any size on a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.replay import command_options as opt
from kvpool.replay.command_options import load_trace, parse_capacities
from kvpool.replay.fleet import ROUTINGS, FleetConfig, FleetResult, simulate_fleet
from kvpool.replay.formats import DEFAULT_MAX_ERRORS
from kvpool.terminal import check_files, console, progress_bar, write_json


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(fleet)


def fleet(
    trace: opt.TraceFile,
    nodes: Annotated[str, typer.Option(help="How many machines: 16,100.")] = "16",
    capacity: Annotated[str, typer.Option(help="Blocks of each machine's cache.")] = "10k",
    routing: Annotated[str, typer.Option(help=f"{', '.join(ROUTINGS)}.")] = ",".join(ROUTINGS),
    limit: opt.Limit = None,
    max_errors: opt.MaxErrors = DEFAULT_MAX_ERRORS,
    json: opt.Json = None,
    quiet: opt.Quiet = False,
) -> None:
    """Replays a trace on a cluster: what it reuses, compared with one infinite cache, and what the router needs for it.

    \b
    kvpool fleet TRACE --nodes 16,100 --capacity 2k --routing prefix,round-robin

    Above 64 nodes the cluster is made of cells, of which up to eight are simulated. See docs/cluster.md.
    """
    out = console(to_stderr=json == "-")
    check_files(json)
    sizes = [_count(text) for text in nodes.split(",")]
    blocks = parse_capacities(capacity)
    if None in blocks:
        raise InvalidArgumentError(f"--capacity {capacity}: a machine has some number of blocks, not inf")
    configs = [
        FleetConfig(size, room, name.strip())
        for size in sizes
        for room in blocks
        if room is not None
        for name in routing.split(",")
    ]
    loaded = load_trace(Path(trace), max_errors, limit)
    results = []
    with progress_bar(f"simulating {loaded.name}", len(configs) * len(loaded), quiet) as advance:
        results = [simulate_fleet(loaded, config, advance) for config in configs]
    if not quiet:
        _print_table(out, results)
    if json is not None:
        write_json(json, [result.row() for result in results])


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"--nodes takes numbers, as 16,100; got {text!r}") from None


_LEGEND = """\
blocks    of each node's cache
ideal     block hits, of those of one infinite cache for all nodes
ttft, p95 seconds until a prompt is computed: mean, and 95 % of them
node      requests of the busiest node, over the mean
cell      blocks that the busiest cell is asked for, over the mean
MiB       the index of a cell
kB/s      events of a node
dec/s     decisions of a router, per second of CPU time"""


def _print_table(out: Any, results: list[FleetResult]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    titles = ("nodes", "cells", "blocks", "routing", "ideal", "ttft", "p95", "node", "cell", "MiB", "kB/s", "dec/s")
    for title in titles:
        table.add_column(title, justify="left" if title == "routing" else "right")
    for result in results:
        decided = "" if result.decisions_per_second is None else f"{result.decisions_per_second:,.0f}"
        table.add_row(
            f"{result.nodes:,}",
            f"{result.cells:,}",
            f"{result.capacity:,}",
            result.routing,
            f"{result.share_of_ideal:.1%}",
            f"{result.mean_seconds_to_first_token:.2f}",
            f"{result.p95_seconds_to_first_token:.2f}",
            f"{result.busiest_over_mean:.2f}",
            f"{result.busiest_cell_over_mean:.2f}",
            f"{result.index_bytes / 2**20:.1f}",
            f"{result.event_bytes_per_second / 1000:.1f}",
            decided,
        )
    out.print(table)
    out.print(_LEGEND, style="dim")
