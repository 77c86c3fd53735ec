"""`kvpool serve`: an OpenAI-compatible endpoint for a model.

What this imports is light: it checks what it was given before torch, transformers and FastAPI are imported.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer

from kvpool.engine import options as opt
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.server.auth import ENVIRONMENT, Access, new_key
from kvpool.server.serve_settings import ServerOptions, read_serve


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
