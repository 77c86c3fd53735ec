"""`kvpool top`: a running server in the terminal."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from kvpool.clients.client import Endpoint, fetch_text
from kvpool.clients.metrics import Look, read_metrics
from kvpool.errors import InvalidArgumentError


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

    Rates and percentiles are those since the look before; with --once, since the server started.
    """
    from rich.console import Console
    from rich.live import Live

    from kvpool.clients.top_screen import screen

    endpoint = Endpoint.at(url, key=key)
    look, before = _look(endpoint), None
    if once:
        Console().print(screen(url, look, None))
        return
    with Live(screen(url, look, None), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                trouble = ""
                try:
                    before, look = look, _look(endpoint)
                except InvalidArgumentError as error:
                    trouble = str(error)
                live.update(screen(url, look, before, trouble), refresh=True)
        except KeyboardInterrupt:
            return


def _look(endpoint: Endpoint) -> Look:
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
