"""vLLM 0.32: it also asks where loaded tokens came from, for its metrics."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.integrations.vllm_versions import connector

EXPECTED = {
    **connector.EXPECTED,
    "get_required_kvcache_layout": ("vllm_config",),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
}


class KVPoolConnector(connector.KVPoolConnector):
    """kvpool's host cache and tiers below vLLM's own cache."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On CUDA, the bytes of a block side by side for all layers: one copy moves a block, instead of one for each layer.

        Models with states keep blocks that kernels divide, which vLLM allows only where each layer lies by itself.
        """
        return "BLHNC" if current_platform.is_cuda() and not vllm_config.model_config.is_hybrid else None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Of the tokens to be loaded: how many from the host, the disk and the remote store."""
        sources = (CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED)
        numbers = self._ready_scheduler.hit_blocks(request)
        return {source: number * self._block_size for source, number in zip(sources, numbers, strict=True) if number}
