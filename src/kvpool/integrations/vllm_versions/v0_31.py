"""vLLM 0.31: what all versions have in common, and nothing else."""

from __future__ import annotations

from kvpool.integrations.vllm_versions.connector import EXPECTED, CommonConnector

__all__ = ["EXPECTED", "KVPoolConnector"]


class KVPoolConnector(CommonConnector):
    """kvpool's host cache and tiers below vLLM's own cache."""
