"""`kvpool serve --ray`, and the application for Ray's own `serve run` and `serve deploy`.

serve run kvpool.server.on_ray.ray_application:build config=kvpool.toml
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError
from kvpool.server.auth import Access
from kvpool.server.on_ray.engine_replica import EngineReplica, ReplicaPlan
from kvpool.server.on_ray.ray_settings import RaySettings, read_ray, routing_of
from kvpool.server.serve_settings import ModelSettings, ServeSettings, read_serve

ROUTER = "kvpool.server.on_ray.ray_router.PrefixRouter"
_MOST_IN_FRONT = 10_000  # requests that one front has at once; those for the engines are counted there


def build(arguments: Mapping[str, str]) -> Any:
    """The application that a configuration describes; `arguments` are `{"config": "kvpool.toml"}`, or `{"model": DIR}`."""
    known = {"config", "model"}
    if unknown := arguments.keys() - known:
        raise ConfigError(f"there is no argument {min(unknown)!r}; there are {', '.join(sorted(known))}")
    config = Path(arguments["config"]) if "config" in arguments else None
    options = EngineOptions(model=arguments.get("model"), config=config)
    settings, models = read_serve(options, None, None, {})
    access = Access.read(settings.keys, os.environ, share=settings.share_cache)
    return application(read_ray(config, {}), settings, models, access)


def application(
    ray_settings: RaySettings,
    settings: ServeSettings,
    models: list[ModelSettings],
    access: Access,
    host: str | None = None,
) -> Any:
    """A front and the engines behind it. Replicas announce their caches at `host`, or as Ray knows their machine."""
    serve = ray_serve()
    from kvpool.server.on_ray.ray_front import Front

    plan = ReplicaPlan(travelling(models), access, settings.limits, settings.traces, host)
    engines: dict[str, Any] = {
        "name": "engines",
        "max_ongoing_requests": settings.limits.requests + 1,  # a replica refuses what is over its limit, and says why
        "graceful_shutdown_timeout_s": 30,
        "request_router_config": {
            "request_router_class": ROUTER,
            "request_router_kwargs": asdict(routing_of(ray_settings)),
        },
        **ray_settings.engines,
    }
    if "autoscaling_config" not in engines:
        engines.setdefault("num_replicas", ray_settings.replicas)
    engines.setdefault("ray_actor_options", _needs(plan.model.options.device))
    # only our router says that a replica was there for a request
    patience = None if "request_router_config" in ray_settings.engines else ray_settings.wait_seconds
    front = {
        "name": "front",
        "max_ongoing_requests": _MOST_IN_FRONT,
        "ray_actor_options": {"num_cpus": 0},  # it waits
        **ray_settings.front,
    }
    behind = _deployment(serve, EngineReplica, engines).bind(plan)
    return _deployment(serve, Front, front).bind(behind, patience, settings.limits.body_bytes)


def _deployment(serve: Any, kind: type, options: dict[str, Any]) -> Any:
    """A deployment; what Ray says against its options, in one line."""
    try:
        return serve.deployment(kind, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[ray.{options['name']}] has options that Ray Serve refuses: {error}") from None


def travelling(models: list[ModelSettings]) -> ModelSettings:
    """The model with paths that mean the same wherever a replica starts."""
    if len(models) != 1:
        raise ConfigError(
            f"{len(models)} models: an application on Ray serves one; start one for each, with name and prefix"
        )
    options = models[0].options
    if options.record is not None:
        raise ConfigError("--record writes the trace of one engine; on Ray there are several")
    if options.publish is not None:
        raise ConfigError(
            "--publish is for one engine; on Ray each replica announces its cache at a free port of its own"
        )
    model = str(Path(options.model).resolve()) if options.model and Path(options.model).exists() else options.model
    config = None if options.config is None else options.config.resolve()
    disk = None if options.disk is None else str(Path(options.disk).expanduser().resolve())
    return replace(models[0], options=options.changed(model=model, config=config, disk=disk))


def _needs(device: str | None) -> dict[str, Any]:
    """What a replica takes of its machine, unless the configuration says: a CPU, and a GPU where there are some."""
    import ray

    if device is not None and device.startswith("cuda:"):
        raise ConfigError(f"Ray gives each replica its GPU: --device cuda, not {device}")
    if device is None:
        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    else:
        has_gpus = device == "cuda"
    return {"num_cpus": 1, **({"num_gpus": 1} if has_gpus else {})}


def ray_serve() -> Any:
    """Ray Serve, or an error that says how to get it."""
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving on Ray needs {error.name}: pip install 'kvpool[ray]'") from None
    return serve
