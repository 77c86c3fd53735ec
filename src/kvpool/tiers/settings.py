"""TierConfig: every setting of the tiers of a process, defined once. `read_tiers` reads them from one section of a TOML
file, from the environment and from options of a command.

    [tiers]
    disk = "/var/cache/kvpool"
    disk_bytes = "50GB"

The environment overrides the file (`KVPOOL_TIERS_DISK_BYTES=10GB`), and options of a command override both. An empty
variable takes a setting of the file away. An empty `KVPOOL_TIERS_DISK` or `KVPOOL_TIERS_REMOTE` takes the whole tier away,
with all its settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from kvpool.checks import show
from kvpool.config.cache_config import HOST_WRITES
from kvpool.errors import ConfigError
from kvpool.fields import Given, given_in, setting, settings_of
from kvpool.files import other_format, read_plain
from kvpool.tiers.compressed_tier import CompressionOptions
from kvpool.tiers.disk.disk_tier import MIN_CAPACITY_BYTES, DiskOptions
from kvpool.tiers.node.node_tier import NodeOptions
from kvpool.tiers.opening import opener_of, schemes
from kvpool.tiers.options import FLAG, choice, count, option_kinds, seconds, size, text
from kvpool.tiers.remote.mooncake import MooncakeOptions
from kvpool.tiers.remote.redis_node import RedisOptions
from kvpool.tiers.remote.s3 import S3Options

SECTION = "tiers"
FORMAT = 1
"""Of a file of settings, which says it by `format = 1` before its first section, or means it by saying nothing."""
OTHER_SECTIONS = frozenset({"server", "models", "ray", "node"})  # a file of other commands needs none of tiers
PREFIX = "KVPOOL_TIERS_"
DEFAULT_DISK_BYTES = 10 * 2**30
REQUEST_TIMEOUT = 2.0
"""Seconds that a request waits for tiers at most, unless it is set; one call to a tier has `CALL_TIMEOUT`."""
LONGEST_TIMEOUT = 3600.0
MAX_COUNT = 2**31 - 1
_STORES: Mapping[str, Any] = {
    "redis://": RedisOptions,
    "rediss://": RedisOptions,
    "s3://": S3Options,
    "mooncake://": MooncakeOptions,
    "node:": NodeOptions,
}
_DIRECTORY = text("be the path of a directory, without a question mark", lambda path: bool(path) and "?" not in path)
_REMOTE = text("be the address of a tier, such as node: or redis://HOST", is_secret=True)


def _of_tier(options: Any, name: str, help: str = "") -> Any:
    """A setting of one tier, which its address may also have as an option."""
    return setting(None, help, option_kinds(options)[name], in_address=name)


@dataclass(frozen=True)
class TierConfig:
    """All settings of tiers, checked. None means not set."""

    timeout: float | None = setting(
        None,
        f"Longest wait for --disk and --remote, in seconds (default {REQUEST_TIMEOUT:g}).",
        seconds(LONGEST_TIMEOUT),
        option="tier_timeout",
    )
    min_uses: int | None = setting(None, kind=count(1, MAX_COUNT))  # of a block before it is stored
    host_bytes: int | None = setting(None, kind=size(0), option="host_memory")
    offload_on_evict: bool | None = setting(None, kind=FLAG)
    offload_min_priority: int | None = setting(None, kind=count(0, 100))
    host_write: str | None = setting(None, kind=choice(*HOST_WRITES))
    disk: str | None = setting(None, "Keep prefixes in this directory: the next start finds them.", _DIRECTORY)
    disk_bytes: int | None = _of_tier(DiskOptions, "bytes", help="As much as --disk may hold (default 10GiB).")
    disk_threads: int | None = _of_tier(DiskOptions, "threads")
    disk_direct: bool | None = _of_tier(DiskOptions, "direct")
    disk_read_only: bool | None = _of_tier(DiskOptions, "read_only")
    disk_timeout: float | None = _of_tier(DiskOptions, "timeout")
    disk_compression: str | None = _of_tier(CompressionOptions, "compress")
    disk_dtype: str | None = _of_tier(CompressionOptions, "dtype")
    remote: str | None = setting(
        None, "Share prefixes through a store: node:, redis://, rediss://, s3://, mooncake://.", _REMOTE
    )
    remote_namespace: str | None = _of_tier(RedisOptions, "namespace")
    remote_ttl: float | None = _of_tier(RedisOptions, "ttl")
    remote_timeout: float | None = _of_tier(RedisOptions, "timeout")
    remote_max_value_bytes: int | None = setting(None, kind=size(1), in_address="max_value_bytes")
    remote_compression: str | None = _of_tier(CompressionOptions, "compress")
    remote_dtype: str | None = _of_tier(CompressionOptions, "dtype")

    @classmethod
    def of(cls, **keywords: Any) -> TierConfig:
        """From keywords of a client, such as `tier_timeout` and `disk`; raises `ConfigError` for a wrong one."""
        given = {}
        for name, value in keywords.items():
            setting_name = name.removeprefix("tier_")
            if value is not None or setting_name in _NEVER_NONE:
                given[setting_name] = Given(value, name, is_keyword=True)
        return _checked(given)

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        return f"TierConfig({', '.join(f'{name}={value!r}' for name, value in shown.items() if value is not None)})"

    @property
    def directory(self) -> Path | None:
        """The directory of the disk tier."""
        return None if self.disk is None else Path(self.disk).expanduser()

    @property
    def disk_address(self) -> str | None:
        """The disk tier as `open_tier` takes it."""
        if self.disk is None:
            return None
        capacity = DEFAULT_DISK_BYTES if self.disk_bytes is None else self.disk_bytes
        return _with_options(f"disk:{self.disk}?bytes={capacity}", self._options("disk_", skip="bytes"))

    @property
    def remote_address(self) -> str | None:
        """The remote tier as `open_tier` takes it."""
        return None if self.remote is None else _with_options(self.remote, self._options("remote_"))

    def engine_options(self) -> dict[str, Any]:
        """The same settings as keywords of `Engine`."""
        found = {
            "disk": self.disk_address,
            "remote": self.remote_address,
            "tier_timeout": self.timeout,
            "tier_min_uses": self.min_uses,
            "host_bytes": self.host_bytes,
            "cache": {
                name: getattr(self, name)
                for name in ("offload_on_evict", "offload_min_priority", "host_write")
                if getattr(self, name) is not None
            }
            or None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _options(self, prefix: str, skip: str = "") -> dict[str, str]:
        """The settings of one tier as options of its address."""
        found = {}
        for each in fields(self):
            name, value = each.metadata["in_address"], getattr(self, each.name)
            if each.name.startswith(prefix) and value is not None and name != skip:
                found[name] = str(int(value)) if isinstance(value, bool) else f"{value}"
        return found


_SETTINGS = {each.name: each for each in fields(TierConfig)}
_NEVER_NONE = ("timeout", "min_uses")  # clients have a default of their own
COMMAND_OPTIONS = {option: each.name for option, each in settings_of(TierConfig).items() if each.metadata["help"]}
"""Options that commands of engines have, and the settings that they set."""


def help_of(name: str) -> str:
    """What a setting is for, in the help of commands."""
    return str(_SETTINGS[name].metadata["help"])


def read_tiers(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> TierConfig:
    """The settings of the section `[tiers]` of a file, overridden by `KVPOOL_TIERS_…`, overridden by `options` of a command.

    Raises `ConfigError` with the file (or the variable, or the option), the key, the wrong value and what would be right.

    >>> read_tiers(environ={"KVPOOL_TIERS_DISK": "cache", "KVPOOL_TIERS_DISK_BYTES": "1GB"}).disk_address
    'disk:cache?bytes=1073741824'
    """
    found = {} if path is None else _of_file(Path(path))
    for name, given in _of_environment(os.environ if environ is None else environ).items():
        if given.value == "":
            _take_away(found, name)
        else:
            found[name] = given
    for name, value in (options or {}).items():
        if value is not None:
            option = _SETTINGS[name].metadata["option"] or name
            found[name] = Given(value, f"--{option.replace('_', '-')}")
    return _checked(found)


# --- sources ---------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; raises ConfigError with the file name if it is none."""
    try:
        text = read_plain(path).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration {path} is no text in UTF-8") from None
    toml = _toml()
    try:
        found = dict(toml.loads(text))
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"the configuration {path} is not TOML: {error}") from None
    if problem := other_format(found.pop("format", FORMAT), FORMAT, FORMAT, "write it anew by docs/tiers.md"):
        raise ConfigError(f"the configuration {path} {problem}")
    for name, value in found.items():  # sections of other programs may be there
        known = {SECTION, *OTHER_SECTIONS}
        if isinstance(value, (dict, list)) and name not in known and (meant := get_close_matches(name, known, 1, 0.8)):
            raise ConfigError(f"the configuration {path} has an unknown section [{name}]; did you mean [{meant[0]}]?")
    return found


def _of_file(path: Path) -> dict[str, Given]:
    file = read_toml(path)
    section = file.get(SECTION, {} if OTHER_SECTIONS.intersection(file) else None)
    if not isinstance(section, dict):
        others = f"; it has {', '.join(file)}" if file else ""
        raise ConfigError(f"the configuration {path} has no section [{SECTION}]{others}")
    return given_in(path, SECTION, section, TierConfig)


def _of_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _SETTINGS or variable != variable.upper():
            known = ", ".join(PREFIX + each.upper() for each in _SETTINGS)
            raise ConfigError(f"the environment has {show(variable)}, which is no setting of tiers; these are: {known}")
        found[name] = Given(value, variable)
    return found


def _take_away(found: dict[str, Given], name: str) -> None:
    """An empty variable unsets a setting. If it names a tier, all settings of that tier are unset."""
    for each in list(found):
        if each == name or (name in ("disk", "remote") and each.startswith(f"{name}_")):
            del found[each]


def _toml() -> Any:
    try:
        return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ConfigError(
            "a configuration file needs tomli on Python 3.10: pip install '.[tiers]' in a checkout of kvpool"
        ) from None


# --- checks ----------------------------------------------------------------------------------------------------------


def _checked(given: Mapping[str, Given]) -> TierConfig:
    """Refuses wrong values, and values that would have no effect."""
    found = {name: each.checked(_SETTINGS[name].metadata["kind"]) for name, each in given.items()}
    for name, each in given.items():
        tier, divider, _ = name.partition("_")
        if tier in ("disk", "remote") and divider and tier not in given:
            raise ConfigError(f"{each} needs {_other(each, tier)} as well")
        if (tier == "offload" or name == "host_write") and not found.get("host_bytes"):
            raise ConfigError(f"{each} needs {_other(each, 'host_bytes')} as well")
        if name.endswith("_dtype") and f"{tier}_compression" not in given:
            raise ConfigError(f"{each} needs {_other(each, f'{tier}_compression')} as well")
    if found.get("disk_bytes", MIN_CAPACITY_BYTES) < MIN_CAPACITY_BYTES:
        raise ConfigError(f"{given['disk_bytes']} must be at least {MIN_CAPACITY_BYTES} bytes")
    if "remote" in found:
        _check_remote(given, found["remote"])
    return TierConfig(**found)


def _other(given: Given, name: str) -> str:
    """The name of another setting, written in the same way."""
    return name if given.is_keyword else f"{SECTION}.{name}"


def _check_remote(given: Mapping[str, Given], address: str) -> None:
    scheme, divider, _ = address.partition(":")
    if not divider or opener_of(scheme) is None:
        raise ConfigError(f"{given['remote'].name} must be the address of a tier, which begins with one of {schemes()}")
    kind = next((start for start in _STORES if address.startswith(start)), f"{scheme}://")
    if kind in _STORES and not address.startswith(kind):
        raise ConfigError(f"{given['remote'].name} must be the address of a tier, which begins with {kind}")
    is_ours = kind in _STORES or scheme == "disk"  # others read what options they have
    in_address = {part.partition("=")[0] for part in urlsplit(address).query.split("&")}
    for name, each in given.items():
        if not name.startswith("remote_"):
            continue
        option = _SETTINGS[name].metadata["in_address"]
        stores = [store for store, options in _STORES.items() if option in option_kinds(options)]
        if stores and kind not in stores and is_ours:
            raise ConfigError(f"{each} is for {', '.join(stores)}, and the store is {kind}")
        if option in in_address:
            raise ConfigError(f"{each} is in the address of the store, too; say it once")


def _with_options(address: str, options: Mapping[str, str]) -> str:
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
    return address if not query else f"{address}{'&' if '?' in address else '?'}{query}"
