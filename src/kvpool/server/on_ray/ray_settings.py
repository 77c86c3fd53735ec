"""The section `[ray]` of a configuration: how many replicas, where, and options for Ray Serve.

[ray]
replicas = 4

[ray.engines]                          # options of Ray Serve's deployment of engines, as Ray names them
ray_actor_options = {num_gpus = 1}

[ray.routing]                          # weights: docs/cluster.md
session_tokens = 512
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvpool.checks import check_int, check_number, show
from kvpool.cluster.index import MAX_NODES
from kvpool.cluster.router import RoutingConfig
from kvpool.errors import ConfigError
from kvpool.fields import checked, kinds_of, setting
from kvpool.tiers.settings import read_toml


@dataclass(frozen=True)
class RaySettings:
    """What runs where. `engines` and `front` are passed to Ray Serve unchanged."""

    address: str | None = setting(None)  # "local": a new one; None: $RAY_ADDRESS, the one on this machine, or a new one
    name: str = setting("kvpool")  # of the application
    prefix: str = setting("/")  # of its paths
    proxies: str = setting("EveryNode")  # where Ray listens for clients: HeadOnly, or every machine with replicas
    replicas: int = setting(1, kind=int)
    wait_seconds: float = setting(60.0, kind=float)  # a request waits so long for a replica
    engines: Mapping[str, Any] = setting(dict, kind=dict)
    front: Mapping[str, Any] = setting(dict, kind=dict)
    routing: Mapping[str, Any] = setting(dict, kind=dict)


def read_ray(config: Path | None, given: Mapping[str, Any]) -> RaySettings:
    """The settings of a file, overridden by options. An option that is None was not given."""
    where = f"{config}: [ray]"
    table = checked({} if config is None else read_toml(config).get("ray", {}), where, kinds_of(RaySettings))
    settings = RaySettings(**{**table, **{key: value for key, value in given.items() if value is not None}})
    check_int(settings.replicas, f"{where} replicas", 1, MAX_NODES)
    if check_number(settings.wait_seconds, f"{where} wait_seconds", "a number of seconds above 0") <= 0:
        raise ConfigError(f"{where}: wait_seconds={settings.wait_seconds} must be a number of seconds above 0")
    for section in (settings.engines, settings.front):
        if "name" in section:
            raise ConfigError(
                f"{config}: the deployments have names of their own; [ray] name is that of the application"
            )
    _check_count(settings, table, given)
    routing_of(settings)
    return settings


def _check_count(settings: RaySettings, table: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses two settings for the number of replicas, and more replicas than one router can know."""
    scaled = {"num_replicas", "autoscaling_config"} & settings.engines.keys()
    if scaled and ("replicas" in table or given.get("replicas") is not None):
        raise ConfigError(f"[ray.engines] has {min(scaled)}, and replicas is given, too: say it once")
    scaling = settings.engines.get("autoscaling_config")
    most = scaling.get("max_replicas", 1) if isinstance(scaling, dict) else settings.engines.get("num_replicas", 1)
    if isinstance(most, int) and most > MAX_NODES:
        raise ConfigError(
            f"{most} replicas are more than the {MAX_NODES} that one router knows: start several applications"
        )


def routing_of(settings: RaySettings) -> RoutingConfig:
    """The weights of the router, checked."""
    known = {each.name for each in fields(RoutingConfig)}
    for key in settings.routing:
        if key not in known:
            raise ConfigError(f"[ray.routing] has no key {show(key)}; it has {', '.join(sorted(known))}")
    return RoutingConfig(**settings.routing)
