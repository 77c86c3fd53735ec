"""NodeSettings: the settings of `kvpool node`, from the section `[node]` of a TOML file and from options of the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpool.checks import show
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.tiers.keys import tenant_tag
from kvpool.tiers.node.region import MIN_BYTES
from kvpool.tiers.node.values import Quotas
from kvpool.tiers.options import Kind, choice, size, text
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


_SHARE = Kind("must be a share above 0 and up to 1", _share)
_SHARES = Kind("must name tenants with a share each, as { acme = 0.25 }", _shares)
_ENDPOINT = Kind("must be HOST:PORT, as 127.0.0.1:9464", _endpoint)


@dataclass(frozen=True)
class NodeSettings:
    """What a node is started with."""

    bytes: int = field(default=0, metadata={"kind": size(MIN_BYTES)})
    policy: str = field(default="lru", metadata={"kind": choice("adaptive", "lru", "priority")})
    engine_share: float = field(default=1.0, metadata={"kind": _SHARE})
    tenant_share: float = field(default=1.0, metadata={"kind": _SHARE})
    tenants: Mapping[str, float] = field(default_factory=dict, metadata={"kind": _SHARES})
    metrics: tuple[str, int] | None = field(default=None, metadata={"kind": _ENDPOINT})
    disk: str | None = field(default=None, metadata={"kind": text("be the path of a directory")})
    disk_bytes: int | None = field(default=None, metadata={"kind": size(1)})
    remote: str | None = field(default=None, repr=False, metadata={"kind": text("be an address", is_secret=True)})

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
    given = {name: (f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None}
    known = {each.name: each.metadata["kind"] for each in fields(NodeSettings)}
    if path is not None:
        section = read_toml(path).get(SECTION)
        if not isinstance(section, dict):
            raise ConfigError(f"the configuration {path} has no section [{SECTION}]")
        for name, value in section.items():
            if name not in known:
                raise ConfigError(f"{path}: [{SECTION}] has no key {show(name)}; it has {', '.join(known)}")
            given.setdefault(name, (f"{path}: {SECTION}.{name}", value))
    found = {name: _checked(known[name], *each) for name, each in given.items()}
    if "bytes" not in found:
        raise ConfigError(f"say how much memory the node owns: --bytes 32GB, or bytes in the section [{SECTION}]")
    if "disk_bytes" in found and "disk" not in found:
        raise ConfigError(f"{given['disk_bytes'][0]} needs a disk as well")
    if str(found.get("remote", "")).startswith("node:"):
        raise ConfigError(f"{given['remote'][0]} is for what lies behind the node, and a node cannot be its own store")
    return NodeSettings(**found)


def _checked(kind: Kind, name: str, value: Any) -> Any:
    try:
        return kind.check(value)
    except InvalidArgumentError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (ValueError, TypeError, AttributeError):
        shown = "" if kind.is_secret else f" = {show(value)}"
        raise ConfigError(f"{name}{shown} {kind.rule}") from None
