"""`kvpool route`: one OpenAI endpoint in front of several servers."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from kvpool.cluster.proxy.backends import Backend
from kvpool.errors import ConfigError


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(route)


def route(
    backend: Annotated[
        list[str],
        typer.Option(help="A server and where it publishes: http://HOST:PORT=tcp://HOST:PORT; once for each."),
    ],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the servers' caches.", min=1)] = 16,
    health_seconds: Annotated[float, typer.Option(help="How often servers are asked whether they live.", min=0.01)] = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")] = False,
) -> None:
    """Send each request to the server that has most of its prompt cached and least to do.

    \b
    kvpool serve --model DIR --port 8001 --publish tcp://127.0.0.1:5557
    kvpool serve --model DIR --port 8002 --publish tcp://127.0.0.1:5567
    kvpool route --backend http://127.0.0.1:8001=tcp://127.0.0.1:5557 --backend http://127.0.0.1:8002=tcp://127.0.0.1:5567

    Servers are kvpool's, vLLM's, or any that speak OpenAI's API, /tokenize and vLLM's events. Keys go through to them.
    /route/stats tells of nodes and decisions. See docs/cluster.md.
    """
    uvicorn = _uvicorn()
    from kvpool.cluster.proxy.proxy_app import Proxy, create_proxy_app

    if not quiet:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    proxy = Proxy([Backend.parse(text) for text in backend], block_size=block_size, health_seconds=health_seconds)
    options = {"log_level": "warning", "lifespan": "on", "access_log": False, "timeout_graceful_shutdown": 30}
    config = uvicorn.Config(create_proxy_app(proxy), host, port, **options)
    _announced(uvicorn, config, len(backend), quiet).run()


def _announced(uvicorn: Any, config: Any, num_backends: int, quiet: bool) -> Any:
    """A server that says where it listens once it does."""

    class Announced(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for socket in server.sockets:
                    where = "http://{}:{}".format(*socket.getsockname()[:2])
                    if not quiet:
                        print(f"{num_backends} servers behind {where}/v1, {where}/route/stats", file=sys.stderr, flush=True)

    return Announced(config)


def _uvicorn() -> Any:
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the proxy needs {error.name}: pip install 'kvpool[cluster]'") from None
    return uvicorn
