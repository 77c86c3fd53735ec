"""`kvpool doctor`: one screen of what is installed, which parts work with it, and how to start other engines with kvpool."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ConfigError
from kvpool.integrations.llama_identity import check_version
from kvpool.integrations.vllm_versions.installed import adapter_name, installed_version, version_of
from kvpool.kernels import compiled_attention
from kvpool.version import __version__, compiled

if TYPE_CHECKING:
    import typer

VersionOf = Callable[[str], str | None]


class Feature(NamedTuple):
    """A feature of kvpool, the packages that it needs (`a|b`: one of them), and the extra that brings them."""

    name: str
    needs: tuple[str, ...]
    extra: str


FEATURES = (
    Feature("command line", ("typer", "rich"), "cli"),
    Feature("data plane, attention", ("torch",), "torch"),
    Feature("engine", ("torch", "transformers", "safetensors"), "hf"),
    Feature("server", ("torch", "transformers", "fastapi", "uvicorn"), "server"),
    Feature("events and routing", ("pyzmq", "msgspec", "httpx", "starlette"), "cluster"),
    Feature("server on Ray Serve", ("ray", "torch", "transformers", "fastapi", "pyzmq"), "ray"),
    Feature("disk tier", ("xxhash",), "tiers"),
    Feature("Redis and Valkey tier", ("xxhash", "valkey-glide-sync"), "redis"),
    Feature("S3 tier", ("xxhash", "obstore"), "s3"),
    Feature("Mooncake tier", ("xxhash", "mooncake-transfer-engine-non-cuda|mooncake-transfer-engine"), "mooncake"),
)

_DISK = "/var/cache/kvpool"
_NO_DISK = "With pip install '.[tiers]' in a checkout of kvpool"
TRANSFER = {
    "kv_connector": "KVPoolConnector",
    "kv_connector_module_path": "kvpool.integrations.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_bytes": "8GB", "disk": _DISK, "disk_bytes": "50GB"},
}
BACKEND = {
    "backend_name": "kvpool",
    "module_path": "kvpool.integrations.sglang",
    "class_name": "KVPoolStorage",
    "interface_v1": 1,
    "kvpool": {"disk": _DISK, "disk_bytes": "50GB"},
}


def diagnosis(find: VersionOf = version_of) -> list[str]:
    """The lines of the screen."""
    kind = "with C modules" if compiled else "pure Python"
    return [
        f"kvpool {__version__} ({kind}), Python {platform.python_version()}, numpy {find('numpy')}",
        "",
        *(_feature_line(feature, find) for feature in FEATURES),
        *([] if find("torch") is None else [_attention_line()]),
        "",
        "Inside other engines:",
        *_vllm_lines(find),
        *_sglang_lines(find),
        *_llama_lines(find),
    ]


def _feature_line(feature: Feature, find: VersionOf) -> str:
    found = [_first_found(package, find) for package in feature.needs]
    if missing := [package for package, version in found if version is None]:
        remedy = f"pip install '.[{feature.extra}]' in a checkout of kvpool"
        return f"  no   {feature.name}: {_listed(missing)} not installed; {remedy}"
    return f"  yes  {feature.name} ({', '.join(f'{package} {version}' for package, version in found)})"


def _attention_line() -> str:
    module = compiled_attention()
    if module is None:
        return "  yes  attention on CPUs (by torch; kvpool's own is not compiled, which needs a C compiler)"
    return f"  yes  attention on CPUs (compiled, {module.instructions()[0]})"


def _first_found(package: str, find: VersionOf) -> tuple[str, str | None]:
    """The first of these packages that is installed, or the first one. Any of them will do."""
    names = package.split("|")
    return next(((name, version) for name in names if (version := find(name)) is not None), (names[0], None))


def _vllm_lines(find: VersionOf) -> list[str]:
    version = installed_version(find)
    try:
        adapter_name(version)
    except ConfigError as error:
        return [f"  no   vLLM: {error}"]
    transfer = TRANSFER if _has_disk(find) else {**TRANSFER, "kv_connector_extra_config": {"host_bytes": "8GB"}}
    # Packages of another name have no working `vllm` command.
    command = (
        "vllm serve MODEL" if find("vllm") else "python -m vllm.entrypoints.launchers.api_server.entry --model MODEL"
    )
    return [
        f"  yes  vLLM {version} (docs/vllm.md). Start it with",
        f"         {command} --kv-transfer-config '{json.dumps(transfer)}'",
        *([] if _has_disk(find) else [f"       {_NO_DISK} it can have a disk below the host."]),
    ]


def _sglang_lines(find: VersionOf) -> list[str]:
    version = find("sglang")
    if version is None:
        return ["  no   SGLang: sglang is not installed"]
    if not _has_disk(find):
        return [f"  no   SGLang {version}: its backend needs a tier. {_NO_DISK} it works."]
    return [
        f"  yes  SGLang {version} (docs/sglang.md; written for 0.5.23, not run on a GPU yet). Start it with",
        "         python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache "
        f"--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{json.dumps(BACKEND)}'",
    ]


def _llama_lines(find: VersionOf) -> list[str]:
    version = find("llama-cpp-python")
    if version is None:
        return ["  no   llama.cpp: llama-cpp-python is not installed; pip install '.[llama]' in a checkout of kvpool"]
    try:
        check_version(version)
    except ConfigError as error:
        return [f"  no   llama.cpp: {error}"]
    if not _has_disk(find):
        return [f"  no   llama.cpp (llama-cpp-python {version}): its cache needs a tier. {_NO_DISK} it works."]
    return [
        f"  yes  llama.cpp (llama-cpp-python {version}; docs/llama-cpp.md). In Python:",
        f'         from kvpool.integrations.llama_cpp import KVPoolCache; llm.set_cache(KVPoolCache(llm, disk="{_DISK}"))',
    ]


def _has_disk(find: VersionOf) -> bool:
    return find("xxhash") is not None


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def register(app: typer.Typer, name: str) -> None:
    """Adds the command."""

    @app.command(
        name,
        help="What is installed, which parts work with it, and how to start vLLM, SGLang or llama.cpp with kvpool.",
    )
    def doctor() -> None:
        print("\n".join(diagnosis()))
