"""`kvpool route`: one OpenAI endpoint in front of several servers."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer

from kvpool.cluster.proxy.backends import Backend, ProxyLimits
from kvpool.errors import ConfigError


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(route)


def route(
    backend: Annotated[
        list[str],
        typer.Option(
            "--backend",
            "--decode",
            help="A server and where it publishes: http://HOST:PORT=tcp://HOST:PORT; once for each.",
        ),
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="A server that computes long prompts for the others, through the tier that all have."),
    ] = None,
    prefill_tokens: Annotated[
        int, typer.Option(help="How many tokens of a prompt must be missing for that.", min=1)
    ] = 256,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8080,
    block_size: Annotated[int, typer.Option(help="Tokens in a block of the servers' caches.", min=1)] = 16,
    health_seconds: Annotated[
        float, typer.Option(help="How often servers are asked whether they live.", min=0.01)
    ] = 1.0,
    body_bytes: Annotated[int, typer.Option(help="The largest body; as large as the servers'.", min=1)] = 4 << 20,
    send_seconds: Annotated[float, typer.Option(help="How long a client may keep the proxy waiting.", min=0.01)] = 30.0,
    silence_seconds: Annotated[
        float, typer.Option(help="How long a server may say nothing in an answer; then status 504.", min=0.01)
    ] = 600.0,
    lost_seconds: Annotated[
        float, typer.Option(help="After how long a server that answers nobody has lost its requests.", min=0.01)
    ] = 30.0,
    max_connections: Annotated[int, typer.Option(help="Connections at once; more get status 503.", min=1)] = 8192,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Answer under any name, also at 127.0.0.1: a proxy in front checks who asks."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")] = False,
) -> None:
    """Send each request to the server that has most of its prompt cached and least to do.

    \b
    kvpool serve DIR --port 8001 --publish tcp://127.0.0.1:5557
    kvpool serve DIR --port 8002 --publish tcp://127.0.0.1:5567
    kvpool route --backend http://127.0.0.1:8001=tcp://127.0.0.1:5557 \\
                 --backend http://127.0.0.1:8002=tcp://127.0.0.1:5567

    \b
    # both servers with --remote redis://…
    kvpool route --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

    Servers are kvpool's, vLLM's, or others with OpenAI's API, /tokenize and vLLM's events. API keys are passed on to them.
    / shows all nodes in the browser, /route/stats is for scripts and /metrics for Prometheus; other machines need
    $KVPOOL_ROUTE_KEY. See docs/cluster.md.
    """
    uvicorn = _uvicorn()
    from kvpool.cluster.proxy.app import KEY_VARIABLE, Proxy, create_proxy_app, holders_of
    from kvpool.web import bounded_http

    if not quiet:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
    limits = ProxyLimits(body_bytes, send_seconds, silence_seconds, lost_seconds)
    backends = [Backend.parse(text) for text in backend]
    proxy = Proxy(
        backends,
        block_size=block_size,
        limits=limits,
        health_seconds=health_seconds,
        prefill=[Backend.parse(text) for text in prefill or ()],
        prefill_tokens=prefill_tokens,
        may_look=holders_of(os.environ.get(KEY_VARIABLE)),
    )
    options = {"log_level": "warning", "lifespan": "on", "access_log": False, "timeout_graceful_shutdown": 30}
    bounds = {"http": bounded_http(), "ws": "none", "limit_concurrency": max_connections}
    config = uvicorn.Config(create_proxy_app(proxy, any_name=insecure), host, port, **options, **bounds)
    _announced(uvicorn, config, proxy, quiet).run()


def _announced(uvicorn: Any, config: Any, proxy: Any, quiet: bool) -> Any:
    """A server that prints its address when it listens, and does not wait for open pages when it ends."""

    class AnnouncedProxy(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for socket in server.sockets:
                    where = "http://{}:{}".format(*socket.getsockname()[:2])
                    if not quiet:
                        pages = f"{where}/ (live view), {where}/route/stats"
                        print(
                            f"{len(proxy.backends.urls)} servers behind {where}/v1, {pages}",
                            file=sys.stderr,
                            flush=True,
                        )

        async def shutdown(self, sockets: Any = None) -> None:
            proxy.view.is_closing = True
            await super().shutdown(sockets)

    return AnnouncedProxy(config)


def _uvicorn() -> Any:
    try:
        import httpx  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the proxy needs {error.name}: pip install '.[cluster]' in a checkout of kvpool") from None
    return uvicorn
