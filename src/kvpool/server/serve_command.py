"""`kvpool serve`: an OpenAI-compatible endpoint for a model."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.engine import options as opt
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.server.auth import ENVIRONMENT, Access, new_key

GRACE_SECONDS = 30
CUT_SECONDS = 2


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(serve)


@opt.command
def serve(
    called: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    *,
    engine_options: opt.EngineOptions,
    host_memory: opt.HostMemory = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address to listen at: 127.0.0.1. Others than this machine's own need keys."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="8000; 0 takes a free one.", min=0, max=65535)] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; default: its file's name.")] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help=f"Who may ask: a line 'TENANT SHA256 [admin]' each. Also ${ENVIRONMENT}: TENANT:KEY[:admin],..."
        ),
    ] = None,
    new_key_for: Annotated[
        str | None,
        typer.Option("--new-key", help="Print a new key of a tenant and its line for the file of keys, and end."),
    ] = None,
    share_cache: Annotated[
        bool | None, typer.Option(help="Let tenants reuse each other's prefixes; their timing tells.")
    ] = None,
    insecure: Annotated[bool | None, typer.Option(help="Listen at any address, under any name, without keys.")] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests that run or wait at once: 512; more get status 429.", min=1)
    ] = None,
    traces: Annotated[
        str | None,
        typer.Option(help="Send a span of each request to this OpenTelemetry collector: http://HOST:4318/v1/traces."),
    ] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Sequences in one step: 256.", min=1)] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer; default: what the model can.", min=1)
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="A file with a chat template that takes the place of the model's own.")
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools, where its chat template does not tell: docs/server.md."
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="A LoRA adapter; clients ask for it as the model NAME. May be repeated."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may ask this server (CORS), such as https://chat.example; * for all."),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="A certificate, to serve https.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
    log_level: Annotated[str | None, typer.Option(help="warning; debug, info and error are the others.")] = None,
    image_host: Annotated[
        list[str] | None,
        typer.Option(help="A host that images in messages may be fetched from; data URLs need none."),
    ] = None,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Engines as replicas on Ray Serve, routed by what each has cached: docs/cluster.md."
        ),
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="Engines on Ray: 1.", min=1)] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Serve models to every OpenAI client.

    \b
    kvpool serve DIR                     # a Hugging Face directory or a GGUF file
    kvpool serve                         # a small model to try
    kvpool serve --config kvpool.toml    # several models, keys, limits, tiers
    kvpool serve DIR --ray --replicas 4  # engines on a Ray cluster
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Requests reuse prefixes of earlier ones: usage.prompt_tokens_details.cached_tokens says how many tokens. Tenants have
    their own keys and do not share prefixes. /metrics is for Prometheus, /docs describes every path, /v1/cache/... shows and
    changes the cache. docs/server.md tells more.
    """
    if new_key_for is not None:
        _print_key(new_key_for)
        return
    uvicorn = _uvicorn()
    from kvpool.server.app import create_app
    from kvpool.server.loading import answering
    from kvpool.server.serve_settings import read_serve
    from kvpool.server.served_model import ServedModel
    from kvpool.server.tracing import Tracing
    from kvpool.web import bounded_http

    if called is not None:
        if engine_options.model is not None:
            raise ConfigError(f"the model is {called} or --model {engine_options.model}: name it once")
        engine_options = engine_options.changed(model=called)
    given: dict[str, Any] = {"host": host, "port": port, "keys": keys, "share_cache": share_cache, "insecure": insecure}
    given |= {"max_requests": max_requests, "max_sequences": max_sequences, "traces": traces}
    given |= {"tool_parser": tool_parser, "chat_template": chat_template, "max_model_len": max_model_len}
    given |= {"allow_origins": allow_origin, "tls_cert": tls_cert, "tls_key": tls_key, "log_level": log_level}
    given |= {"image_hosts": image_host}
    settings, models = read_serve(engine_options, host_memory, name, given, adapter or ())
    access = Access.read(settings.keys, os.environ, share=settings.share_cache)
    _check_address(settings.host, access, settings.insecure)
    if on_ray:
        from kvpool.server.on_ray.ray_application import serve_on_ray
        from kvpool.server.on_ray.ray_settings import read_ray

        serve_on_ray(read_ray(engine_options.config, {"replicas": replicas}), settings, models, access, quiet=quiet)
        return
    if replicas is not None:
        raise ConfigError("--replicas is for --ray; without it there is one engine for each model")
    tracing = None if settings.traces is None else Tracing.to(settings.traces)
    logging.getLogger("kvpool").setLevel(settings.log_level.upper())
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bound(settings.host, settings.port)]
        options: dict[str, Any] = {
            "log_level": settings.log_level,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
            "access_log": False,
            "http": bounded_http(),
            "ws": "none",
        }
        served = []
        with answering(uvicorn, sockets, options):
            for model in models:
                opt.tell_loading(f"loading {model.name} ...", quiet)
                engine = stack.enter_context(model.make_engine())
                served.append(ServedModel(model.name, engine, model.tool_parser, settings.image_hosts))
        app = create_app(
            served,
            access,
            settings.limits,
            tracing,
            any_name=settings.insecure,
            allow_origins=settings.allow_origins,
        )
        for each in served:
            each.engine.warm_up(wait=False)
        config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on", **options)
        _announced(uvicorn, config, ", ".join(model.name for model in served), quiet).run(sockets)


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to an address. They are made before the model is loaded, and do not listen yet."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            made.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = made[0].getsockname()[1]  # with port 0, all sockets take the port of the first
            one.bind((address[0], port or (taken if len(made) > 1 else 0), *address[2:]))
    except OSError as error:
        for one in made:
            one.close()
        why = error.strerror
        if error.errno == errno.EADDRINUSE:
            why = "another program listens there; --port 0 takes a free one"
        raise ConfigError(f"cannot listen at {host}, port {port}: {why}") from None
    return made


def _announced(uvicorn: Any, config: Any, name: str, quiet: bool) -> Any:
    """A server that prints its address when it listens."""

    class AnnouncedServer(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for listening in server.sockets:
                    address, port = listening.getsockname()[:2]
                    scheme = "http" if self.config.ssl_certfile is None else "https"
                    where = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
                    pages = f"{where}/ (live view), {where}/docs, {where}/metrics"
                    opt.tell(f"{name} at {where}/v1 (API), {pages}; Ctrl-C ends it", quiet)

        async def shutdown(self, sockets: Any = None) -> None:
            gate = self.config.app.state.server.gate
            gate.is_draining = True
            if gate.under_way:
                opt.tell(f"finishing {gate.under_way} requests, for up to {GRACE_SECONDS} s; Ctrl-C ends them", quiet)
            # A little before uvicorn closes connections, so that the answers that it would cut end with a word.
            cutting = asyncio.get_running_loop().call_later(GRACE_SECONDS - CUT_SECONDS, gate.cut_all)
            try:
                await super().shutdown(sockets)
            finally:
                cutting.cancel()

    return AnnouncedServer(config)


def _print_key(tenant: str) -> None:
    if not tenant or len(tenant.split()) != 1:
        raise InvalidArgumentError(f"--new-key takes the name of a tenant without spaces, got {tenant!r}")
    key, line = new_key(tenant)
    print(f"key, shown only now:    {key}\nline for --keys FILE:   {line}")


def _check_address(host: str, access: Access, insecure: bool) -> None:
    """Refuses an address that other machines can reach if there are no keys."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if access.is_open and not is_local and not insecure:
        raise ConfigError(
            f"--host {host} can be reached by others, and there are no keys: give --keys FILE or {ENVIRONMENT}, or "
            f"--insecure if a proxy in front checks them"
        )


def _uvicorn() -> Any:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'kvpool[server]'") from None
    return uvicorn
