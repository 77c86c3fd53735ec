"""vLLM's helpers for hashing and sizes, its names of devices, and what the arguments of its block manager mean here."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from kvpool.checks import as_count, show
from kvpool.config import KVCacheConfig, LayerSpec, Tier
from kvpool.config.layers import MAX_BLOCK_SIZE
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.pools.arrays import as_token_array
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.scope import ReuseScope


class Device(Enum):
    """Where V0 kept blocks."""

    GPU = "gpu"
    CPU = "cpu"


class KVCacheUtils:
    """Hashes and sizes. `config` is a `kvpool.KVCacheConfig`, as `BlockManager.manager.config`.

    >>> first = KVCacheUtils.hash_block_tokens(None, [1, 2, 3, 4])
    >>> KVCacheUtils.hash_request_tokens(4, [1, 2, 3, 4, 5])[0] == first
    True
    """

    @staticmethod
    def hash_block_tokens(parent_block_hash: bytes | None, token_ids: Any, *, lora_int_id: int = 0) -> bytes:
        """The digest of a block with these tokens behind a block with that digest; None: it is the first."""
        tokens = as_token_array(token_ids)
        parent = root_digest(scope_of(lora_int_id)) if parent_block_hash is None else parent_block_hash
        if not isinstance(parent, bytes) or not len(tokens):
            raise InvalidArgumentError(
                f"a block has tokens and its parent's digest, got {show(token_ids)} and {show(parent_block_hash)}"
            )
        return chain_digests(parent, tokens, len(tokens))[0]

    @staticmethod
    def hash_request_tokens(block_size: int, token_ids: Any, *, lora_int_id: int = 0) -> list[bytes]:
        """The digests of all whole blocks of a prompt, as events name them."""
        tokens, size = as_token_array(token_ids), as_count(block_size, "block_size", 1, MAX_BLOCK_SIZE)
        return chain_digests(root_digest(scope_of(lora_int_id)), tokens[: len(tokens) // size * size], size)

    @staticmethod
    def get_num_blocks(block_size: int, layers: Sequence[LayerSpec], available_memory: int) -> int:
        """How many blocks of a model with one layer group fit into so many bytes."""
        return KVCacheConfig(layers, block_size, gpu_blocks=1).blocks_in(available_memory)[0]

    @staticmethod
    def check_enough_kv_cache_memory(config: KVCacheConfig, max_model_len: int) -> None:
        """A ValueError that says what would fit if no sequence of that length does."""
        _checked(config).require_fit(max_model_len)

    @staticmethod
    def estimate_max_model_len(config: KVCacheConfig) -> int | None:
        """The longest sequence that fits; None: no limit."""
        return _checked(config).longest_sequence()

    @staticmethod
    def get_max_concurrency(config: KVCacheConfig, max_model_len: int) -> int:
        """How many sequences of that length fit at once."""
        return _checked(config).max_sequences(max_model_len)


def _checked(config: object) -> KVCacheConfig:
    if not isinstance(config, KVCacheConfig):
        raise InvalidArgumentError(f"config must be a kvpool.KVCacheConfig, got {show(config)}")
    return config


def scope_of(lora_int_id: int, encoder_key: str = "") -> ReuseScope:
    lora = as_count(lora_int_id, "lora_int_id")
    return ReuseScope(adapter=str(lora) if lora else "", encoder=encoder_key)


def tier_of(device: object) -> Tier:
    """The tier that V0's `Device.GPU` and `Device.CPU` mean, or their names."""
    name = str(getattr(device, "name", device)).upper()
    if name not in ("GPU", "CPU"):
        raise InvalidArgumentError(f"device={show(device)} must be V0's Device.GPU or Device.CPU, or 'gpu' or 'cpu'")
    return Tier.GPU if name == "GPU" else Tier.HOST


def check_sizes(config: KVCacheConfig, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
    """Refuses sizes that contradict those of a manager that exists already."""
    [pool] = config.pools if len(config.pools) == 1 else [None]
    given = {"block_size": block_size, "num_gpu_blocks": num_gpu_blocks, "num_cpu_blocks": num_cpu_blocks}
    if pool is None:
        return  # which is refused for other reasons
    there = [config.block_size, pool.num_blocks[Tier.GPU], pool.num_blocks[Tier.HOST] if num_cpu_blocks else 0]
    for (name, value), actual in zip(given.items(), there, strict=True):
        if value != actual:
            raise ConfigError(f"{name}={value}, but the manager has {actual}")
