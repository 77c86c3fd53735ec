"""`kvpool node`: one cache for all engines of a machine."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.errors import ConfigError
from kvpool.fields import command, options_of
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.node.settings import NodeSettings, read_node
from kvpool.tiers.node.wire import node_directory
from kvpool.tiers.opening import open_tier
from kvpool.tiers.upkeep import shown_bytes

NodeOptions: Any = options_of(NodeSettings, "NodeOptions")


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(node)


@command
def node(
    name: Annotated[
        str, typer.Argument(help="A name, or a directory in memory for its files; engines use it as node:NAME.")
    ] = "",
    *,
    options: NodeOptions,
    config: Annotated[
        Path | None, typer.Option(envvar="KVPOOL_CONFIG", help="A TOML file with a section [node].")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")] = False,
) -> None:
    """Own memory that all engines of this machine use as one cache.

    \b
    kvpool node --bytes 64GB --disk /var/cache/kvpool --metrics 127.0.0.1:9464
    kvpool serve --model DIR --remote node:

    Engines find it as node: (or node:NAME), map the memory, and copy straight. The memory stays when the node stops: the
    next one begins warm. Only processes of the same user can use it. See docs/node.md.
    """
    if not hasattr(os, "eventfd"):
        raise ConfigError("kvpool node needs Linux")
    if not quiet:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run(node_directory(name), read_node(config, asdict(options)), quiet)


def run(directory: Path, settings: NodeSettings, quiet: bool) -> None:
    """Serves until SIGTERM or SIGINT."""
    from kvpool.tiers.node.metrics import MetricsServer
    from kvpool.tiers.node.server import NodeServer

    behind = settings.tiers
    with ExitStack() as closing:
        tiers: list[KeyedTier] = []
        for address in (behind.disk_address, behind.remote_address):
            if address is not None:
                tiers.append(open_tier(address))
                closing.callback(tiers[-1].close)
        server = NodeServer(directory, settings.bytes, policy=settings.policy, quotas=settings.quotas, tiers=tiers)
        closing.callback(server.close)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        where = ""
        if settings.metrics is not None:
            http = MetricsServer(*settings.metrics, look=lambda seconds: dict(server.call(server.stats, seconds)))
            closing.callback(http.close)
            where = f", http://{settings.metrics[0]}:{http.port}/metrics"
        if not quiet:
            found = f"{len(server.index):,} values of an earlier node" if server.is_warm else "empty"
            memory = shown_bytes(server.index.region.num_bytes)
            print(f"node:{directory} owns {memory}, {found}{where}", file=sys.stderr, flush=True)
        server.serve()
