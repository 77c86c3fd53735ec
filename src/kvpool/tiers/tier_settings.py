"""read_tiers: the settings of all tiers, from one section of a TOML file, from the environment and from options.

    [tiers]
    disk = "/var/cache/kvpool"
    disk_bytes = "50GB"

The environment overrides the file (`KVPOOL_TIERS_DISK_BYTES=10GB`), and options of a command override both. A variable
that is empty takes a setting of the file away; without `disk` or `remote` what belongs to it goes too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from kvpool.config.cache_config import HOST_WRITES
from kvpool.config.layers import MAX_BYTES, show
from kvpool.errors import ConfigError
from kvpool.formats import other_format
from kvpool.plainfile import read_plain
from kvpool.terminal import parse_bytes
from kvpool.tiers.codecs import ITEM_BYTES
from kvpool.tiers.compressed_tier import CODECS
from kvpool.tiers.url import FALSE, MAX_SECONDS, TRUE

SECTION = "tiers"
FORMAT = 1
"""Of a file of settings, which says it by `format = 1` before its first section, or means it by saying nothing."""
OTHER_SECTIONS = frozenset({"server", "models", "ray"})  # of `kvpool serve`: a file of those needs none of tiers
PREFIX = "KVPOOL_TIERS_"
DEFAULT_DISK_BYTES = 10 * 2**30
REQUEST_TIMEOUT = 2.0
"""Seconds that a request waits for tiers at most, unless it is set; one call to a tier has `CALL_TIMEOUT`."""
LONGEST_TIMEOUT = 3600.0
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TierConfig:
    """What was set, checked; None: not set, so that the default of whoever uses it counts."""

    timeout: float | None = None  # seconds that a request waits for tiers at most
    min_uses: int | None = None  # of a block before it is stored
    host_bytes: int | None = None
    offload_on_evict: bool | None = None
    offload_min_priority: int | None = None
    host_write: str | int | None = None
    disk: str | None = None
    disk_bytes: int | None = None
    disk_threads: int | None = None
    disk_direct: bool | None = None
    disk_read_only: bool | None = None
    disk_timeout: float | None = None
    disk_compression: str | None = None
    disk_dtype: str | None = None
    remote: str | None = None  # may hold a password: `repr` leaves it out
    remote_namespace: str | None = None
    remote_ttl: float | None = None
    remote_timeout: float | None = None
    remote_max_value_bytes: int | None = None
    remote_compression: str | None = None
    remote_dtype: str | None = None

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "remote"}
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
        size = DEFAULT_DISK_BYTES if self.disk_bytes is None else self.disk_bytes
        return _with_options(f"disk:{self.disk}?bytes={size}", self._options("disk_", skip="bytes"))

    @property
    def remote_address(self) -> str | None:
        """The remote tier as `open_tier` takes it."""
        return None if self.remote is None else _with_options(self.remote, self._options("remote_"))

    def engine_options(self) -> dict[str, Any]:
        """The arguments of `Engine` that say the same."""
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
            name, value = each.name.removeprefix(prefix), getattr(self, each.name)
            if each.name.startswith(prefix) and value is not None and name != skip:
                found[_IN_ADDRESS.get(name, name)] = str(int(value)) if isinstance(value, bool) else f"{value}"
        return found


class _Setting(NamedTuple):
    """A value as it was found, and where: for errors."""

    value: Any
    source: str


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
    for name, setting in _of_environment(os.environ if environ is None else environ).items():
        if setting.value == "":
            _take_away(found, name)
        else:
            found[name] = setting
    for name, value in (options or {}).items():
        if value is not None:
            found[name] = _Setting(value, f"--{_OPTIONS.get(name, name).replace('_', '-')}")
    checked = {name: _KINDS[name].check(setting) for name, setting in found.items()}
    _check_together(found, checked)
    return TierConfig(**checked)


# --- sources -----------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds; ConfigError with the file where it is none."""
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
    return found


def _of_file(path: Path) -> dict[str, _Setting]:
    file = read_toml(path)
    section = file.get(SECTION, {} if OTHER_SECTIONS.intersection(file) else None)
    if not isinstance(section, dict):
        raise ConfigError(f"the configuration {path} has no section [{SECTION}]")
    for name in section:
        if name not in _KINDS:
            raise ConfigError(f"{path}: [{SECTION}] has no key {show(name)}; it has {', '.join(_KINDS)}")
    return {name: _Setting(value, f"{path}: {SECTION}.{name}") for name, value in section.items()}


def _of_environment(environ: Mapping[str, str]) -> dict[str, _Setting]:
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in _KINDS or variable != variable.upper():
            known = ", ".join(PREFIX + each.upper() for each in _KINDS)
            raise ConfigError(f"the environment has {show(variable)}, which is no setting of tiers; these are: {known}")
        found[name] = _Setting(value, variable)
    return found


def _take_away(found: dict[str, _Setting], name: str) -> None:
    """An empty variable: the setting counts as not set, and with a tier goes what belongs to it."""
    for each in list(found):
        if each == name or (name in ("disk", "remote") and each.startswith(f"{name}_")):
            del found[each]


def _toml() -> Any:
    try:
        return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise ConfigError("a configuration file needs tomli on Python 3.10: pip install 'kvpool[tiers]'") from None


# --- values ------------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What a setting may be: `read` raises for anything else."""

    rule: str
    read: Callable[[Any], Any]
    is_secret: bool = False

    def check(self, setting: _Setting) -> Any:
        try:
            return self.read(setting.value)
        except (ValueError, TypeError, KeyError):
            shown = "" if self.is_secret else f" = {show(setting.value)}"
            raise ConfigError(f"{setting.source}{shown} must be {self.rule}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _directory(value: Any) -> str:
    if "?" in _text(value):  # which begins the options of an address
        raise ValueError
    return str(value)


def _address(value: Any) -> str:
    if "://" not in _text(value):
        raise ValueError
    return str(value)


def _size(low: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = parse_bytes(value, "size") if isinstance(value, str) else _whole(value)
        return _within(number, low, MAX_BYTES)

    return read


def _count(low: int, high: int) -> Callable[[Any], int]:
    return lambda value: _within(_whole(int(value) if isinstance(value, str) else value), low, high)


def _seconds(high: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool):
            raise TypeError
        seconds = float(value)
        if not 0.001 <= seconds <= high:
            raise ValueError
        return seconds

    return read


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}[_text(value).lower()]


def _choice(choices: tuple[str, ...]) -> _Kind:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return _Kind(f"one of {', '.join(choices)}", read)


def _host_write(value: Any) -> str | int:
    return value if value in HOST_WRITES else _count(1, MAX_COUNT)(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _within(number: int, low: int, high: int) -> int:
    if not low <= number <= high:
        raise ValueError
    return number


_FLAG = _Kind("true or false", _flag)
_SECONDS = _Kind(f"a number of seconds from 0.001 to {MAX_SECONDS:g}", _seconds(MAX_SECONDS))
_BYTES = _Kind('a size above 0, as 1048576 or "50GB"', _size(1))
_CODEC = _choice(CODECS)
_DTYPE = _choice(tuple(ITEM_BYTES))
_KINDS = {
    "timeout": _Kind(f"a number of seconds from 0.001 to {LONGEST_TIMEOUT:g}", _seconds(LONGEST_TIMEOUT)),
    "min_uses": _Kind(f"a whole number from 1 to {MAX_COUNT}", _count(1, MAX_COUNT)),
    "host_bytes": _Kind('a size, as 0 or "8GB"', _size(0)),
    "offload_on_evict": _FLAG,
    "offload_min_priority": _Kind("a whole number from 0 to 100", _count(0, 100)),
    "host_write": _Kind(f"back, through, or a number of uses from 1 to {MAX_COUNT}", _host_write),
    "disk": _Kind("the path of a directory, without a question mark", _directory),
    "disk_bytes": _BYTES,
    "disk_threads": _Kind("a whole number from 1 to 64", _count(1, 64)),
    "disk_direct": _FLAG,
    "disk_read_only": _FLAG,
    "disk_timeout": _SECONDS,
    "disk_compression": _CODEC,
    "disk_dtype": _DTYPE,
    "remote": _Kind("the address of a store: redis://, rediss://, s3:// or mooncake://", _address, is_secret=True),
    "remote_namespace": _Kind("a name", _text),
    "remote_ttl": _SECONDS,
    "remote_timeout": _SECONDS,
    "remote_max_value_bytes": _BYTES,
    "remote_compression": _CODEC,
    "remote_dtype": _DTYPE,
}
_IN_ADDRESS = {"compression": "compress"}
_OPTIONS = {"timeout": "tier_timeout", "host_bytes": "host_memory"}  # names of options where they differ
_STORES = {  # settings that not all stores have
    "remote_namespace": ("redis", "rediss", "mooncake"),
    "remote_ttl": ("redis", "rediss"),
    "remote_max_value_bytes": ("redis", "rediss", "s3"),
}


# --- together ----------------------------------------------------------------------------------------------------------


def _check_together(found: Mapping[str, _Setting], checked: Mapping[str, Any]) -> None:
    """Every setting must have an effect."""
    for name, setting in found.items():
        tier, divider, _ = name.partition("_")
        if tier in ("disk", "remote") and divider and tier not in found:
            raise ConfigError(f"{setting.source} = {show(setting.value)} needs {SECTION}.{tier} as well")
        if (tier == "offload" or name == "host_write") and not checked.get("host_bytes"):
            raise ConfigError(f"{setting.source} = {show(setting.value)} needs {SECTION}.host_bytes as well")
        if name.endswith("_dtype") and f"{tier}_compression" not in found:
            raise ConfigError(f"{setting.source} = {show(setting.value)} needs {SECTION}.{tier}_compression as well")
    if "remote" in checked:
        _check_remote(found, checked["remote"])


def _check_remote(found: Mapping[str, _Setting], address: str) -> None:
    scheme = address.partition("://")[0]
    given = {part.partition("=")[0] for part in urlsplit(address).query.split("&")}
    for name, setting in found.items():
        option = name.removeprefix("remote_")
        if not name.startswith("remote_"):
            continue
        if scheme not in _STORES.get(name, (scheme,)):
            stores = ", ".join(f"{each}://" for each in _STORES[name])
            raise ConfigError(f"{setting.source} = {show(setting.value)} is for {stores}, and the store is {scheme}://")
        if _IN_ADDRESS.get(option, option) in given:
            raise ConfigError(
                f"{setting.source} = {show(setting.value)} is in the address of the store, too; say it once"
            )


def _with_options(address: str, options: Mapping[str, str]) -> str:
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
    return address if not query else f"{address}{'&' if '?' in address else '?'}{query}"
