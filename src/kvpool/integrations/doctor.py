"""`kvpool doctor`: one screen of what is installed, which parts of kvpool work with it, and what to pass to `vllm serve`."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ConfigError
from kvpool.integrations.vllm_versions.installed import adapter_name, installed_version
from kvpool.version import __version__, compiled

if TYPE_CHECKING:
    import typer

VersionOf = Callable[[str], str | None]


class Part(NamedTuple):
    """A part of kvpool: the packages of which it needs one each, and how to get them."""

    name: str
    needs: tuple[str, ...]
    extra: str


PARTS = (
    Part("data plane, attention", ("torch",), "torch"),
    Part("engine", ("torch", "transformers", "safetensors"), "hf"),
    Part("server", ("torch", "transformers", "fastapi", "uvicorn"), "server"),
    Part("events and routing", ("pyzmq", "msgspec", "httpx", "starlette"), "cluster"),
    Part("server on Ray Serve", ("ray", "torch", "transformers", "fastapi", "pyzmq"), "ray"),
    Part("disk tier", ("xxhash",), "tiers"),
    Part("Redis and Valkey tier", ("xxhash", "valkey-glide-sync"), "redis"),
    Part("S3 tier", ("xxhash", "obstore"), "s3"),
    Part("Mooncake tier", ("xxhash", "mooncake-transfer-engine-non-cuda"), "mooncake"),
    Part("cache for llama.cpp", ("xxhash", "llama-cpp-python"), "llama"),
)

TRANSFER = {
    "kv_connector": "KVPoolConnector",
    "kv_connector_module_path": "kvpool.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "8GB", "disk": "/var/cache/kvpool", "disk_bytes": "50GB"},
}


def version_of(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def diagnosis(find: VersionOf = version_of, vllm: Callable[[], str | None] = installed_version) -> list[str]:
    """The lines of the screen."""
    kind = "compiled" if compiled else "pure Python"
    lines = [f"kvpool {__version__} ({kind}), Python {platform.python_version()}, numpy {find('numpy')}", ""]
    lines += [_part_line(part, find) for part in PARTS]
    version = vllm()
    try:
        adapter_name(version)
    except ConfigError as error:
        return [*lines, f"  no   vLLM connector: {error}"]
    disk = find("xxhash") is not None
    transfer = TRANSFER if disk else {**TRANSFER, "kv_connector_extra_config": {"host_bytes": "8GB"}}
    return [
        *lines,
        f"  yes  vLLM connector (vLLM {version})",
        "",
        "Pass to vllm serve:",
        f"  --kv-transfer-config '{json.dumps(transfer)}'",
        *([] if disk else ["With pip install 'kvpool[tiers]' it can have a disk below the host."]),
    ]


def _part_line(part: Part, find: VersionOf) -> str:
    found = {package: find(package) for package in part.needs}
    if missing := [package for package, version in found.items() if version is None]:
        return f"  no   {part.name}: {_listed(missing)} not installed; pip install 'kvpool[{part.extra}]'"
    return f"  yes  {part.name} ({', '.join(f'{package} {version}' for package, version in found.items())})"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def register(app: typer.Typer, name: str) -> None:
    """Adds the command."""

    @app.command(name, help="What is installed, which parts work with it, and what to pass to vllm serve.")
    def doctor() -> None:
        print("\n".join(diagnosis()))
