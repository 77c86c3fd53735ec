"""NodeSettings: the settings of `kvpool node`, from the section `[node]` of a TOML file and from options of the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.fields import Given, Kind, given_in, setting
from kvpool.tiers.keys import tenant_tag
from kvpool.tiers.node.region import MIN_BYTES
from kvpool.tiers.node.values import Quotas
from kvpool.tiers.options import choice, size, text
from kvpool.tiers.settings import TierConfig, read_toml

SECTION = "node"


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError
    return float(value)


def _shares(value: Any) -> dict[str, float]:
    return {str(name): _share(share) for name, share in dict(value).items()}


def _endpoint(value: Any) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not 0 <= int(port) <= 65535:
        raise ValueError
    return host.strip("[]"), int(port)


_SHARE = Kind("must be a share above 0 and up to 1", _share, type=float)
_SHARES = Kind("must name tenants with a share each, as { acme = 0.25 }", _shares)
_REMOTE = text("be an address", is_secret=True)
_ENDPOINT = Kind("must be HOST:PORT, as 127.0.0.1:9464", _endpoint)


@dataclass(frozen=True)
class NodeSettings:
    """What a node is started with."""

    bytes: int = setting(0, "How much memory it owns: 32GB.", size(MIN_BYTES), variable="KVPOOL_NODE_BYTES")
    disk: str | None = setting(
        None, "Keep values in this directory, too: one writer for a machine.", text("be the path of a directory")
    )
    disk_bytes: int | None = setting(None, "As much as --disk may hold (default 10GiB).", size(1))
    remote: str | None = setting(
        None, "A store behind it: redis://, rediss://, s3://.", _REMOTE, variable="KVPOOL_NODE_REMOTE"
    )
    policy: str = setting(
        "lru",
        "What is evicted first: lru (default), priority or adaptive.",
        choice("adaptive", "lru", "priority"),
    )
    engine_share: float = setting(1.0, "The largest share of the memory that one engine may fill (default 1).", _SHARE)
    tenant_share: float = setting(1.0, "The same for one tenant (default 1).", _SHARE)
    tenants: Mapping[str, float] = setting(dict, kind=_SHARES)
    metrics: tuple[str, int] | None = setting(None, "Serve /metrics and /stats at HOST:PORT.", _ENDPOINT)

    @property
    def quotas(self) -> Quotas:
        """Who may fill how much."""
        tenants = {tenant_tag(name): share for name, share in self.tenants.items()}
        return Quotas(self.engine_share, self.tenant_share, tenants)

    @property
    def tiers(self) -> TierConfig:
        """The tiers behind the node."""
        return TierConfig.of(disk=self.disk, disk_bytes=self.disk_bytes, remote=self.remote)


def read_node(path: Path | None, options: Mapping[str, Any]) -> NodeSettings:
    """The settings of a file, overridden by `options` of a command (None: not given). `ConfigError` names what is wrong."""
    given: dict[str, Given] = {}
    if path is not None:
        section = read_toml(path).get(SECTION)
        if not isinstance(section, dict):
            raise ConfigError(f"the configuration {path} has no section [{SECTION}]")
        given = given_in(path, SECTION, section, NodeSettings)
    for name, value in options.items():
        if value is not None:
            given[name] = Given(value, f"--{name.replace('_', '-')}")
    kinds = {each.name: each.metadata["kind"] for each in fields(NodeSettings)}
    found = {name: each.checked(kinds[name]) for name, each in given.items()}
    if "bytes" not in found:
        raise ConfigError(f"say how much memory the node owns: --bytes 32GB, or bytes in the section [{SECTION}]")
    if "disk_bytes" in found and "disk" not in found:
        raise ConfigError(f"{given['disk_bytes'].name} needs a disk as well")
    if str(found.get("remote", "")).startswith("node:"):
        raise ConfigError(
            f"{given['remote'].name} is for what lies behind the node, and a node cannot be its own store"
        )
    return NodeSettings(**found)
