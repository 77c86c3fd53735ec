"""Which kinds of layers can be kept outside of vLLM? Where a model has another kind, one line says so before it starts."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from kvpool.errors import ConfigError

# Derived kinds are not served: they keep their pages otherwise.
_SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def checked_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block; what this connector does not serve is refused with one line."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('KVPoolConnector needs "kv_load_failure_policy": "recompute" in --kv-transfer-config')
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("KVPoolConnector does not serve context parallelism: blocks are divided between ranks there")
    groups = kv_cache_config.kv_cache_groups
    refused = {reason for group in groups if (reason := _reason(group)) is not None} if groups else {"no layers"}
    if refused:
        raise ConfigError(
            "KVPoolConnector serves layers with full attention and sliding windows; this model has "
            f"{' and '.join(sorted(refused))}. Leave --kv-transfer-config out for it"
        )
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    if len(sizes) > 1:
        raise ConfigError(f"KVPoolConnector needs one block size for all layers; this model has {sorted(sizes)}")
    return sizes.pop()


def is_windowed(group: Any) -> bool:
    """Whether pages of this group are given up as the sequence grows."""
    return isinstance(group.kv_cache_spec, SlidingWindowSpec)


def _reason(group: Any) -> str | None:
    """Why a group of layers cannot be served; None if it can."""
    spec = group.kv_cache_spec
    if isinstance(spec, MambaSpec):
        return "layers with a state (MambaSpec: Mamba, linear attention, short convolutions), right at one position"
    if type(spec) not in _SERVED:
        return f"layers of the kind {type(spec).__name__}"
    if getattr(spec, "non_causal", False):
        return "layers that attend to later tokens, so that a block depends on more than what is before it"
    if getattr(group, "host_resident", False):
        return "layers that vLLM keeps on the host itself"
    return None
