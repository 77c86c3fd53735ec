"""A configuration file of LMCache, read where its settings mean the same here; the others are named, and never guessed at."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvpool.config.layers import show
from kvpool.errors import ConfigError
from kvpool.plainfile import read_plain

_GIGABYTE = 2**30
_REMOTE_SCHEMES = ("redis", "rediss", "s3")
_POLICIES = {"LRU": "lru", "LFU": "lfu", "FIFO": "fifo"}
# What is so anyway, or has nothing to correspond to it: said in the log, for the reader to see that it was seen.
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
    """The connector's settings that a file of LMCache stands for; `ConfigError` for what has another meaning here."""
    given = _read(path)
    settings: dict[str, Any] = {}
    for key, value in given.items():
        if value is None or value is False or value in ("", [], {}) or key in _WITHOUT_EFFECT:
            continue  # what is off in LMCache is not there in kvpool
        if key == "max_local_cpu_size":
            settings["host_bytes"] = _bytes(key, value)
        elif key == "local_disk":
            settings["disk"] = _directory(value)
        elif key == "max_local_disk_size":
            settings["disk_bytes"] = _bytes(key, value)
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


def _bytes(key: str, value: Any) -> int:
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
