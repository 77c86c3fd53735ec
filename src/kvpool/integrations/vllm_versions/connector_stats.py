"""The counters of the connector in the log of vLLM and at `/metrics`: one counter for each of `COUNTS`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.integrations.connector.counts import COUNTS


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """Counts of one step, or sums of several."""

    def reset(self) -> None:
        """Begins anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Of this and another worker, side or step."""
        for name, number in other.data.items():
            self.data[name] = self.data.get(name, 0) + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {f"kvpool {name}": number for name, number in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of `COUNTS`, as `vllm:kvpool_<name>_total`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {}
        for name, meaning in COUNTS.items():
            family = counter(name=f"vllm:kvpool_{name}", documentation=f"kvpool: {meaning}.", labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = family.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what was counted since the last call."""
        for name, number in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(number)
