"""A connector that brings zeros: tests with a real vLLM that cannot tell it from the right one would prove nothing."""

from __future__ import annotations

from typing import Any

from kvpool.integrations.vllm import KVPoolConnector


class Poisoned(KVPoolConnector):  # type: ignore[misc]  # it is made when vLLM is known
    """Zeroes every row before it is loaded."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads nothing but zeros."""
        for load in self._step_orders.loads:
            self._ready_worker._host.array[load.rows] = 0
        super().start_load_kv(forward_context, **kwargs)


class PoisonedStates(KVPoolConnector):  # type: ignore[misc]
    """Loads blocks as they are, and zeroes the states behind them."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads no state but zeros."""
        for load in self._step_orders.loads:
            self._ready_worker._state_host.array[load.checkpoint.row] = 0
        super().start_load_kv(forward_context, **kwargs)
