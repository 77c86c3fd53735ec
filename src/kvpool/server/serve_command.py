"""`kvpool serve`: an OpenAI-compatible endpoint for a model.

What this imports is light: it checks what it was given before torch, transformers and FastAPI are imported.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvpool.engine import options as opt
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.server.auth import ENVIRONMENT, Access, new_key


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(serve)


@dataclass(frozen=True)
class ServerOptions:
    """The keys of `[server]` in a file, as options. One that was not given is None."""

    host: Annotated[
        str | None,
        typer.Option(help="The address to listen at (default 127.0.0.1). Others than this machine's own need keys."),
    ] = None
    port: Annotated[int | None, typer.Option(help="8000; 0 takes a free one.", min=0, max=65535)] = None
    keys: Annotated[
        Path | None,
        typer.Option(
            help=f"Who may ask: a line 'TENANT SHA256 [admin]' each. Also ${ENVIRONMENT}: TENANT:KEY[:admin],..."
        ),
    ] = None
    share_cache: Annotated[
        bool | None, typer.Option(help="Let tenants reuse each other's prefixes; their timing tells.")
    ] = None
    insecure: Annotated[bool | None, typer.Option(help="Listen at any address, under any name, without keys.")] = None
    max_requests: Annotated[
        int | None, typer.Option(help="Requests that run or wait at once (default 512); more get status 429.", min=1)
    ] = None
    traces: Annotated[
        str | None,
        typer.Option(help="Send a span of each request to this OpenTelemetry collector: http://HOST:4318/v1/traces."),
    ] = None
    max_sequences: Annotated[int | None, typer.Option(help="Sequences in one step (default 256).", min=1)] = None
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer (default: what the model can).", min=1)
    ] = None
    chat_template: Annotated[
        str | None, typer.Option(help="A file with a chat template that takes the place of the model's own.")
    ] = None
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools, where its chat template does not tell: docs/server.md."
        ),
    ] = None
    allow_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            help="A site whose pages may ask this server (CORS), such as https://chat.example; * for all.",
        ),
    ] = None
    tls_cert: Annotated[str | None, typer.Option(help="A certificate, to serve https.")] = None
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning (default), error.")] = None
    image_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--image-host",
            help="A host that images in messages may be fetched from, at ports 80 and 443 or as HOST:PORT.",
        ),
    ] = None


@opt.command
def serve(
    called: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)
    ] = None,
    *,
    engine_options: opt.EngineOptions,
    host_memory: opt.HostMemory = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model (default: its file's name).")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="A LoRA adapter; clients ask for it as the model NAME. May be repeated."
        ),
    ] = None,
    server_options: ServerOptions,
    on_ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Engines as replicas on Ray Serve, routed by what each has cached: docs/cluster.md."
        ),
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="Engines on Ray (default 1).", min=1)] = None,
    new_key_for: Annotated[
        str | None,
        typer.Option("--new-key", help="Print a new key of a tenant and its line for the file of keys, and end."),
    ] = None,
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
    _check_packages()
    from kvpool.server.running import ended_by_sigterm, serve_models
    from kvpool.server.serve_settings import read_serve

    if called is not None:
        if engine_options.model is not None:
            raise ConfigError(f"the model is {called} or --model {engine_options.model}: name it once")
        engine_options = engine_options.changed(model=called)
    settings, models = read_serve(engine_options, host_memory, name, asdict(server_options), adapter or ())
    access = Access.read(settings.keys, os.environ, share=settings.share_cache)
    _check_address(settings.host, access, settings.insecure)
    if on_ray:
        from kvpool.server.on_ray.ray_application import serve_on_ray
        from kvpool.server.on_ray.ray_settings import read_ray

        serve_on_ray(read_ray(engine_options.config, {"replicas": replicas}), settings, models, access, quiet=quiet)
        return
    if replicas is not None:
        raise ConfigError("--replicas is for --ray; without it there is one engine for each model")
    with ended_by_sigterm():
        serve_models(settings, models, access, quiet=quiet)


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


def _check_packages() -> None:
    """Looks for packages without importing them."""
    for name in ("uvicorn", "fastapi", "prometheus_client", "torch", "transformers"):
        if find_spec(name) is None:
            raise ConfigError(f"the server needs {name}: pip install '.[server]' in a checkout of kvpool")
