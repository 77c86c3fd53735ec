"""The settings of a connector: memory of the host, how it is divided and evicted, and the tiers below it.

Each worker writes to its own directory; others may read there. A configuration file of LMCache can be used, too. Settings of
it that have no equal here raise an error that names them.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvpool.checks import check_number, show
from kvpool.config.cache_config import HOST_WRITES
from kvpool.config.layers import MAX_BLOCKS
from kvpool.errors import ConfigError
from kvpool.eviction import make_policy
from kvpool.fields import Given, Kind, setting
from kvpool.files import read_plain
from kvpool.integrations.connector.orders import Introduction
from kvpool.tiers import KeyedTier, KeySpace, opening
from kvpool.tiers.options import FLAG, choice, count, seconds, size, text
from kvpool.tiers.settings import LONGEST_TIMEOUT, REQUEST_TIMEOUT, TierConfig

_CHECKPOINT_SHARE = 4  # checkpoints get one byte in so many of the host, as in a cache of kvpool's own engine
_QUOTA_KEYS = {"guaranteed", "maximum"}


def _above_0(value: Any) -> float:
    if check_number(value, "ttl", "seconds above 0") <= 0:
        raise ValueError
    return float(value)


def _quotas(value: Any) -> Mapping[str, Mapping[str, float]]:
    for salt, limits in value.items():
        if not isinstance(salt, str) or not isinstance(limits, Mapping) or not set(limits) <= _QUOTA_KEYS:
            raise ValueError
    return dict(value)


_TEXT = text("be text that is not empty")
_TTL = Kind("must be seconds above 0; leave it out for no limit", _above_0)
_QUOTAS = Kind("must map a salt to its guaranteed share, maximum share or both", _quotas)


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of a connector, checked before the engine loads a model.

    >>> ConnectorSettings.of({"host_bytes": "2GB", "disk": "/var/cache/kvpool"}).host_bytes
    2147483648
    """

    host_bytes: int | None = setting(None, kind=size(1))
    """Memory of the host in each worker; None: see `sized`."""
    host_blocks: int | None = setting(None, kind=count(1, MAX_BLOCKS))
    """The same in blocks; instead of `host_bytes`."""
    host_write: str | None = setting(None, kind=choice(*HOST_WRITES))
    """When blocks go to the host. `"back"`: when the engine's own cache gives them up next; the block that it gave up first
    leaves the host first. `"through"`: when they are computed. The default is `"back"`, or `"through"` if a setting is given
    that needs it: `policy`, `ttl`, `quotas`, `disk` or `remote`."""
    policy: str | None = setting(None, kind=_TEXT)
    """The order in which blocks leave the host; None: `"adaptive"`, if they are stored when they are computed."""
    ttl: float | None = setting(None, kind=_TTL)
    """Seconds after which an unused block is forgotten by the host."""
    quotas: Mapping[str, Mapping[str, float]] = setting(dict, kind=_QUOTAS)
    """`{salt: {"guaranteed": 0.2, "maximum": 0.5}}`: shares of the host, or numbers of blocks, by `cache_salt`."""
    disk: str | None = setting(None, kind=_TEXT)
    disk_bytes: int | None = setting(None, kind=size(1))
    remote: str | None = setting(None, kind=text("be text that is not empty", is_secret=True))
    timeout: float = setting(REQUEST_TIMEOUT, kind=seconds(LONGEST_TIMEOUT))
    """Seconds that a request waits for the tiers below at most."""
    model_id: str | None = setting(None, kind=_TEXT)
    """Names the weights in tiers, instead of a digest of their files."""
    read_only: bool = setting(False, kind=FLAG)
    """Nothing is stored in tiers; the directory may be one that another process writes to."""

    @classmethod
    def of(cls, given: Mapping[str, Any], option: str = "kv_connector_extra_config") -> ConnectorSettings:
        """From the mapping that an engine got as `option`; unknown keys and wrong values raise `ConfigError`."""
        if not isinstance(given, Mapping):
            raise ConfigError(f'{option} must be a mapping, as {{"disk": …}}; got {show(given)}')
        if "lmcache_config" in given:
            given = _with_lmcache(given)
        names = [each.name for each in fields(cls)]
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
                raise ConfigError(f"{option} has no {show(key)}{hint}")
        if "host_bytes" in given and given.get("host_blocks") is not None:
            raise ConfigError("host_bytes and host_blocks both size the host; give one of them")
        values = dict(given)
        if isinstance(values.get("disk"), str):
            values["disk"] = os.path.expanduser(values["disk"])  # no shell does so within JSON
        return cls(**values)

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) is not each.default:
                checked = Given(value, each.name, is_keyword=True).checked(each.metadata["kind"])
                object.__setattr__(self, each.name, checked)
        if self.read_only and not self.has_tiers:
            raise ConfigError("read_only=True needs disk or remote, to read from")
        if self.policy is not None:
            make_policy(self.policy)
        if self.host_write == "back" and (needing := self._needs_through()):
            raise ConfigError(
                f"host_write='back' has no {needing}, which needs blocks on the host when they are computed; take "
                f"host_write='through', or leave out {needing}"
            )
        self.tiers(self.disk, read_only=self.read_only)

    def of_engine(self, number: int) -> ConnectorSettings:
        """The settings of one of several equal engines. Only one may write to a directory, so each other has a subfolder."""
        if self.disk is None or number == 0:
            return self
        return replace(self, disk=str(Path(self.disk) / f"engine-{number}"))

    def tiers(self, disk: str | None, *, read_only: bool) -> TierConfig:
        """The tiers below the host, with a disk in this directory."""
        return TierConfig.of(
            disk=disk,
            disk_bytes=self.disk_bytes,
            disk_read_only=None if disk is None else read_only,
            remote=self.remote,
            timeout=self.timeout,
        )

    @property
    def has_tiers(self) -> bool:
        """Whether there are tiers below the host."""
        return self.disk is not None or self.remote is not None

    @property
    def writes_back(self) -> bool:
        """Whether blocks are stored when the engine's cache gives them up, if the engine shows that."""
        return self.host_write == "back" or (self.host_write is None and not self._needs_through())

    def _needs_through(self) -> str | None:
        """The first setting that has no meaning with write-back."""
        names = ("policy", "ttl", "quotas", "disk", "remote")
        return next((name for name in names if getattr(self, name) not in (None, {})), None)

    def sized(self, cache_bytes: int, free_bytes: int, num_workers: int) -> ConnectorSettings:
        """With a size of the host, if none was given: that of the engine's own cache, at most a quarter of what is free."""
        if self.host_bytes is not None or self.host_blocks is not None:
            return self
        return replace(self, host_bytes=max(1, min(cache_bytes, free_bytes // 4 // num_workers)))

    def num_rows(self, block_bytes: int) -> int:
        """How many blocks of `block_bytes` the host holds."""
        if self.host_blocks is not None:
            return self.host_blocks
        assert self.host_bytes is not None, "sized() says how many"
        if self.host_bytes < block_bytes:
            raise ConfigError(f"host_bytes={self.host_bytes} holds no block: one has {block_bytes} bytes; raise it")
        return min(self.host_bytes // block_bytes, MAX_BLOCKS)

    def num_checkpoints(self, block_bytes: int, checkpoint_bytes: int) -> tuple[int, int]:
        """How many blocks and how many checkpoints the host holds, if layers keep states."""
        total = self.host_bytes if self.host_blocks is None else self.host_blocks * block_bytes
        assert total is not None, "sized() says how many"
        number = min(total // _CHECKPOINT_SHARE // checkpoint_bytes, MAX_BLOCKS)
        num_rows = (total - number * checkpoint_bytes) // block_bytes
        if not number or not num_rows:
            least = max(_CHECKPOINT_SHARE * checkpoint_bytes, checkpoint_bytes + block_bytes)
            raise ConfigError(
                f"the host has {total} bytes; this model needs {least} or more, for blocks of {block_bytes} bytes and, in a "
                f"quarter of it, states of {checkpoint_bytes} bytes; raise host_bytes"
            )
        return min(num_rows, MAX_BLOCKS), number


def open_worker_tiers(settings: ConnectorSettings, worker: Introduction, *, is_reader: bool = False) -> list[KeyedTier]:
    """The tiers of one worker, fastest first. A reader stores nothing, and needs no lock on the disk."""
    directory = None if settings.disk is None else Path(settings.disk)
    if directory is not None:
        if worker.num_workers > 1:
            directory /= f"rank-{worker.rank}-of-{worker.num_workers}"
        if settings.read_only and not directory.is_dir():
            raise ConfigError(f"there is no directory {directory}, and read_only=True makes none")
        try:
            directory.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"disk={settings.disk!r} cannot be used: {error.strerror or error}") from None
    tiers = settings.tiers(None if directory is None else str(directory), read_only=is_reader or settings.read_only)
    return opening.open_tiers((tiers.disk_address, tiers.remote_address), KeySpace(worker.fingerprint))


def _with_lmcache(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of a file of LMCache, overridden by those that are given beside it."""
    own = {key: value for key, value in given.items() if key != "lmcache_config"}
    path = given["lmcache_config"]
    if not isinstance(path, str) or not path:
        raise ConfigError(f"lmcache_config must be the path of a file, got {show(path)}")
    return {**settings_of(path), **own}


# --- files of LMCache ------------------------------------------------------------------------------------------------


_GIGABYTE = 2**30
_REMOTE_SCHEMES = ("redis", "rediss", "s3")
_POLICIES = {"LRU": "lru"}
# Settings that always hold here, or have no equal. They are logged, so that a user knows that they have no effect.
_WITHOUT_EFFECT = {
    "chunk_size": "blocks have vLLM's block size",
    "local_cpu": "the host always comes first",
    "save_decode_cache": "what was generated is always kept",
    "remote_serde": "values are stored as they are",
    "use_layerwise": "pages are copied whole",
    "save_unfull_chunk": "only whole blocks are kept",
}

_log = logging.getLogger("kvpool")


def settings_of(path: str) -> dict[str, Any]:
    """The settings that a file of LMCache stands for; raises `ConfigError` for those that mean something else here."""
    given = _read(path)
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or value is False or value in ("", [], {}) or key in _WITHOUT_EFFECT:
            continue  # a feature that is off in LMCache needs nothing here
        if key == "max_local_cpu_size":
            settings["host_bytes"] = _gigabytes(key, value)
        elif key == "local_disk":
            settings["disk"] = _directory(value)
        elif key == "max_local_disk_size":
            settings["disk_bytes"] = _gigabytes(key, value)
        elif key == "remote_url":
            settings["remote"] = _remote(value)
        elif key == "cache_policy":
            settings["policy"] = _policy(value)
        else:
            raise ConfigError(
                f"{path}: {key}={show(value)} has no counterpart in kvpool; take it out (docs/from-lmcache.md has them all)"
            )
    if "disk" not in settings:
        settings.pop("disk_bytes", None)
    for key in given:
        if key in _WITHOUT_EFFECT:
            _log.info("kvpool connector: %s in %s has no effect: %s", key, path, _WITHOUT_EFFECT[key])
    return settings


def _read(path: str) -> Mapping[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        given = yaml.safe_load(read_plain(Path(path)).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"lmcache_config={path!r} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {str(error).splitlines()[0]}") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path} must hold settings, got {show(given)}")
    return given


def _gigabytes(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"{key}={show(value)} must be gigabytes above 0")
    return int(value * _GIGABYTE)


def _directory(value: Any) -> str:
    if isinstance(value, str) and (path := unquote(urlsplit(value).path) if value.startswith("file://") else value):
        return path
    raise ConfigError(f"local_disk={show(value)} must be a directory, as file:///path")


def _remote(value: Any) -> str:
    if isinstance(value, str) and urlsplit(value).scheme in _REMOTE_SCHEMES:
        return value
    raise ConfigError(
        f"remote_url={show(value)} must begin with {', '.join(f'{scheme}://' for scheme in _REMOTE_SCHEMES)}; for others "
        "give kvpool's own address as remote (docs/remote-tiers.md)"
    )


def _policy(value: Any) -> str:
    if not isinstance(value, str) or value.upper() not in _POLICIES:
        raise ConfigError(f"cache_policy={show(value)} must be one of {', '.join(_POLICIES)}")
    return _POLICIES[value.upper()]
