"""What a storage backend sees of SGLang: a few of its classes and settings, and a host pool on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

STORAGE = "sglang.srt.mem_cache.hicache_storage"
PAGE, WIDTH = 4, 6  # tokens of a page, values of a token


class StandIn(ABC):
    """What SGLang 0.5.23 expects of a backend."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}

    @abstractmethod
    def get(self, key: Any, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: Any, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def exists(self, key: Any) -> Any: ...


@dataclass
class Config:
    """The fields of SGLang's storage configuration that a backend reads. SGLang 0.5.17 has them all."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str = "tiny"


@dataclass
class Parallel:
    """The place of a process among the ranks of SGLang. Only later versions say it in their storage configuration."""

    attn_dcp_size: int = 1
    attn_dp_rank: int = 0


@dataclass
class ServerArgs:
    """What SGLang was started with, and where it files that: a few of its hundreds of settings."""

    model_path: str = "tiny"
    context_length: int | None = None
    json_model_override_args: str = "{}"
    lora_target_modules: tuple[str, ...] = ()
    attention_backend: str | None = None
    tp_size: int = 1
    port: int = 30000
    speculative_draft_model_path: str | None = None  # its pages are stored, too
    log_level: str = "info"
    forward_hooks: tuple[str, ...] | None = None
    unfiled: int = 0


NAMESPACES = dict(
    model_path="model",
    context_length="model",
    json_model_override_args="model",
    port="serving",
    lora_target_modules="lora",
    attention_backend="exec.kernel",
    tp_size="parallel",
    speculative_draft_model_path="spec",
    log_level="observability",
    forward_hooks="observability",
)
SERVER_ARGS = ServerArgs()
PARALLEL = Parallel()


class HostPool:
    """SGLang's host pool as a backend sees it: pages by the index of their first token."""

    page_size = PAGE
    layout = "page_first"

    def __init__(self, num_pages: int, dtype: Any) -> None:
        self.data = torch.zeros((num_pages * PAGE, WIDTH), dtype=dtype)

    def get_dummy_flat_data_page(self) -> Any:
        return torch.zeros(PAGE * WIDTH, dtype=self.data.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        return self.data[index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index: int, data_page: Any) -> None:
        self.data[index : index + PAGE] = data_page.reshape(PAGE, WIDTH)
