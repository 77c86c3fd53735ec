"""`kvpool view`: the live view on made-up traffic, to look at without a model."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from kvpool.view.http import serve
from kvpool.view.traffic import Traffic

_STEPS_AHEAD = 200  # so that there is something to see


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(view)


def view(
    blocks: Annotated[
        int, typer.Option(help="Blocks of the pool on the GPU; the host has half as many.", min=64)
    ] = 4096,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8077,
    seed: Annotated[int, typer.Option(help="Which traffic.")] = 0,
) -> None:
    """Open the live view on made-up traffic: a real manager, chats of five tenants, no model.

    \b
    kvpool view                     then open http://127.0.0.1:8077/
    kvpool view --blocks 100000

    For your own: `kvpool serve` shows its model at /, and kvpool.view.serve(manager) any manager in your process.
    """
    traffic, stop = Traffic(blocks, seed), threading.Event()
    for _ in range(_STEPS_AHEAD):
        traffic.step()
    with serve(traffic.manager, port=port, title="made-up traffic", more=traffic.more) as page:
        working = threading.Thread(target=traffic.run, args=(stop,), daemon=True)
        working.start()
        print(f"the live view is at {page.url}; Ctrl-C ends it", flush=True)
        try:
            page.wait()
        except KeyboardInterrupt:
            print()
        finally:
            stop.set()
            working.join()
