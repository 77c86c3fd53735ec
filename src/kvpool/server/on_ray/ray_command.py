"""What `kvpool serve --ray` does: joins a cluster or starts one, runs the application, and takes it down at the end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from typing import Any

from kvpool.engine import options as opt
from kvpool.errors import ConfigError
from kvpool.server.auth import Access
from kvpool.server.on_ray.ray_application import application, ray_serve, travelling
from kvpool.server.on_ray.ray_settings import RaySettings
from kvpool.server.serve_settings import ModelSettings, ServeSettings

_OBJECT_STORE = 200 << 20  # bytes of a cluster that is started here: only messages pass through it


def serve_on_ray(
    ray_settings: RaySettings, settings: ServeSettings, models: list[ModelSettings], access: Access, *, quiet: bool
) -> None:
    """Serves until it is told to end."""
    serve = ray_serve()
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    travelling(models)  # refuses what cannot be, before a cluster is started for it
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
    """Joins the cluster of the settings, or the one on this machine, or (True) a new one with room for the replicas."""
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
    """Ends the application. Ray Serve itself is left to others who have applications there."""
    serve.delete(name)
    if not serve.status().applications:
        serve.shutdown()
