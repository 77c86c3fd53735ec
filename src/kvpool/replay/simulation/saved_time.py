"""What found blocks are worth in seconds: what computing them would have taken, less what loading them takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.pools.arrays import Int64Array
from kvpool.replay.planning.gpus import DISK_BYTES_PER_SECOND
from kvpool.scheduling.cost_model import LinearCostModel

_USUAL = LinearCostModel()
USUAL_TOKEN_BYTES = 131_072  # of K and V, of the 8-billion-parameter model whose costs are the usual ones


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of computing and loading prefixes; by default of an 8-billion-parameter model on one large GPU.

    >>> PrefillTime(seconds_per_token=1.0, seconds_per_pair=0.5).computing(np.array([0, 2])).tolist()
    [0.0, 3.5]
    """

    seconds_per_token: float = _USUAL.prefill_seconds_per_token
    seconds_per_pair: float = _USUAL.seconds_per_token_pair  # of tokens, one of which attends to the other
    host_seconds_per_token: float = USUAL_TOKEN_BYTES / _USUAL.transfer_bytes_per_second
    disk_seconds_per_token: float = USUAL_TOKEN_BYTES / DISK_BYTES_PER_SECOND

    @classmethod
    def of(cls, costs: LinearCostModel, token_bytes: int) -> PrefillTime:
        """By the costs of a machine and the bytes that its model keeps of a token."""
        return cls(
            costs.prefill_seconds_per_token,
            costs.seconds_per_token_pair,
            token_bytes / costs.transfer_bytes_per_second,
            token_bytes / DISK_BYTES_PER_SECOND,
        )

    @property
    def depth_cost(self) -> float:
        """How much more a token costs for each one before it, in units of a first token."""
        return self.seconds_per_pair / self.seconds_per_token if self.seconds_per_token else 0.0

    def computing(self, num_tokens: Int64Array) -> npt.NDArray[np.float64]:
        """Seconds that the first tokens of prompts take to compute."""
        tokens = num_tokens.astype(np.float64)
        seconds: npt.NDArray[np.float64] = tokens * (self.seconds_per_token + (tokens + 1) / 2 * self.seconds_per_pair)
        return seconds

    def loading(self, blocks_by_tier: Mapping[str, int], block_size: int) -> float:
        """Seconds that blocks take to come up from lower tiers."""
        of_host = blocks_by_tier.get("HOST", 0) * self.host_seconds_per_token
        return block_size * (of_host + blocks_by_tier.get("DISK", 0) * self.disk_seconds_per_token)
