"""`kvpool serve --ray`, and the application for Ray's own `serve run` and `serve deploy`.

    serve run kvpool.server.on_ray.ray_application:build config=kvpool.toml

`serve_on_ray` joins a cluster or starts one, runs the application, and takes it down at the end.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvpool.engine import options as opt
from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError
from kvpool.server.auth import Access
from kvpool.server.on_ray.engine_replica import EngineReplica, ReplicaPlan
from kvpool.server.on_ray.ray_settings import RaySettings, read_ray, routing_of
from kvpool.server.serve_settings import ModelSettings, ServeSettings, read_serve

ROUTER = "kvpool.server.on_ray.ray_router.PrefixRouter"
_MOST_IN_FRONT = 10_000  # requests that one front has at once; the engines have limits of their own
_OBJECT_STORE = 200 << 20  # bytes of a cluster that is started here: only messages pass through it


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
    """A front and the engines behind it. Replicas publish events at `host`, or at the address by which Ray knows them."""
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
    engines.setdefault("ray_actor_options", needs_of(plan.model.options))
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
    """A deployment. If Ray refuses its options, raises an error of one line."""
    try:
        return serve.deployment(kind, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"[ray.{options['name']}] has options that Ray Serve refuses: {error}") from None


def travelling(models: list[ModelSettings]) -> ModelSettings:
    """The model with absolute paths, which are the same wherever a replica starts."""
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


def needs_of(options: EngineOptions) -> dict[str, Any]:
    """What a replica takes of its machine by default: a CPU, and a GPU where the cluster has GPUs."""
    if options.device is not None and options.device.startswith("cuda:"):
        raise ConfigError(f"Ray gives each replica its GPU: --device cuda, not {options.device}")
    has_gpus = options.device == "cuda"
    if options.device is None:
        import ray

        has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return {"num_cpus": 1, **({"num_gpus": 1} if has_gpus else {})}


def ray_serve() -> Any:
    """Ray Serve, or an error that says how to get it."""
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving on Ray needs {error.name}: pip install '.[ray]' in a checkout of kvpool") from None
    return serve


def serve_on_ray(
    ray_settings: RaySettings, settings: ServeSettings, models: list[ModelSettings], access: Access, *, quiet: bool
) -> None:
    """Serves until it is interrupted."""
    serve = ray_serve()
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    travelling(models)  # raises for impossible settings before a cluster is started
    is_own = _join(ray, ray_settings)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        where = ray.get_runtime_context().gcs_address
        opt.tell(f"starting {models[0].name} on {'a Ray of its own' if is_own else f'Ray at {where}'} ...", quiet)
        port = settings.port or _free_port(settings.host)
        serve.start(proxy_location=ray_settings.proxies, http_options={"host": settings.host, "port": port})
        run = application(ray_settings, settings, models, access, host="127.0.0.1" if is_own else None)
        serve.run(run, name=ray_settings.name, route_prefix=ray_settings.prefix)
        where = f"http://{settings.host}:{port}{ray_settings.prefix.rstrip('/')}"
        opt.tell(f"{models[0].name} at {where}/v1 (API), {where}/route/stats; Ctrl-C ends it", quiet)
        ended.wait()
        opt.tell("finishing", quiet)
        _take_down(serve, ray_settings.name)
    finally:
        ray.shutdown()  # of a cluster that it started; one that it joined goes on


def _join(ray: Any, settings: RaySettings) -> bool:
    """Joins the cluster of the settings or the one on this machine, or starts one. Returns whether it started one."""
    where = settings.address or os.environ.get("RAY_ADDRESS")
    if where != "local":
        try:
            ray.init(where or "auto", log_to_driver=False, logging_level="error")
            return False
        except (ConnectionError, ValueError) as error:
            if where is not None:
                raise ConfigError(f"no Ray cluster at {where!r}: {error}; `ray start --head` starts one") from None
    ray.init(
        "local",
        num_cpus=max(os.cpu_count() or 1, settings.replicas),
        object_store_memory=_OBJECT_STORE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    return True


def _free_port(host: str) -> int:
    """A port that is free on this machine; Ray's proxies on all machines listen at the same one."""
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])


def _take_down(serve: Any, name: str) -> None:
    """Ends the application. Ray Serve itself goes on, because others may have applications there."""
    serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()
