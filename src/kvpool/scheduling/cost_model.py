"""What a step, a prompt or a transfer costs in seconds: the scheduler's only idea of the hardware."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol, runtime_checkable

from kvpool.errors import InvalidArgumentError


@runtime_checkable
class CostModel(Protocol):
    """Predicts times. The scheduler compares them to choose victims and how they give way; a simulator adds them up."""

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        """Computing `num_tokens` tokens of one prompt behind `context` tokens that are there already."""

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        """One token for each of `num_sequences` sequences that together read `context` tokens."""

    def transfer_seconds(self, num_bytes: int) -> float:
        """Moving bytes between the GPU and the host, one way."""


@runtime_checkable
class LearningCostModel(CostModel, Protocol):
    """A cost model that corrects itself from measured times."""

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        """A measured forward pass: `prefills` as (tokens, context), and `num_sequences` that decoded over `context`."""

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A measured transfer between GPU and host."""


class LinearCostModel:
    """Linear costs with a correction that follows what is measured (an exponentially weighted mean).

    Attention makes a prompt's cost grow with its context: `seconds_per_token_pair` times the tokens that each token sees.
    The defaults describe an 8-billion-parameter model on one large GPU; call `Scheduler.observe` and
    `observe_transfer` with measured times and they stop mattering.

    >>> costs = LinearCostModel(prefill_seconds_per_token=1e-4, seconds_per_token_pair=0.0)
    >>> costs.observe_step([(100, 0)], 0, 0, seconds=0.02)  # twice as slow as thought: the next guess moves towards it
    >>> round(costs.prefill_seconds(100, 0), 4)
    0.012
    """

    def __init__(
        self,
        *,
        prefill_seconds_per_token: float = 4e-5,
        seconds_per_token_pair: float = 1e-9,
        decode_seconds_per_step: float = 5e-3,
        decode_seconds_per_sequence: float = 1e-5,
        decode_seconds_per_context_token: float = 3e-8,
        transfer_latency: float = 2e-5,
        transfer_bytes_per_second: float = 2e10,
        smoothing: float = 0.2,
    ) -> None:
        positive = {"transfer_bytes_per_second": transfer_bytes_per_second, "smoothing": smoothing}
        others = {
            "prefill_seconds_per_token": prefill_seconds_per_token,
            "seconds_per_token_pair": seconds_per_token_pair,
            "decode_seconds_per_step": decode_seconds_per_step,
            "decode_seconds_per_sequence": decode_seconds_per_sequence,
            "decode_seconds_per_context_token": decode_seconds_per_context_token,
            "transfer_latency": transfer_latency,
        }
        for name, value in (positive | others).items():
            if value < 0 or (name in positive and value == 0):
                raise InvalidArgumentError(
                    f"{name} must be {'over 0' if name in positive else '0 or more'}, got {value}"
                )
        if smoothing > 1:
            raise InvalidArgumentError(
                f"smoothing must be at most 1 (believe only the last measurement), got {smoothing}"
            )
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.seconds_per_token_pair = seconds_per_token_pair
        self.decode_seconds_per_step = decode_seconds_per_step
        self.decode_seconds_per_sequence = decode_seconds_per_sequence
        self.decode_seconds_per_context_token = decode_seconds_per_context_token
        self.transfer_latency = transfer_latency
        self.transfer_bytes_per_second = transfer_bytes_per_second
        self.smoothing = smoothing
        self.prefill_scale = self.decode_scale = self.transfer_scale = 1.0  # measured over predicted

    def prefill_seconds(self, num_tokens: int, context: int) -> float:
        pairs = num_tokens * (context + (num_tokens + 1) / 2)
        seconds = num_tokens * self.prefill_seconds_per_token + pairs * self.seconds_per_token_pair
        return self.prefill_scale * seconds

    def decode_seconds(self, num_sequences: int, context: int) -> float:
        if not num_sequences:
            return 0.0
        seconds = self.decode_seconds_per_step + num_sequences * self.decode_seconds_per_sequence
        return self.decode_scale * (seconds + context * self.decode_seconds_per_context_token)

    def transfer_seconds(self, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        return self.transfer_scale * (self.transfer_latency + num_bytes / self.transfer_bytes_per_second)

    def observe_step(
        self, prefills: Sequence[tuple[int, int]], num_sequences: int, context: int, seconds: float
    ) -> None:
        """Steps that only decode correct the decode cost; what others take on top of it corrects the prefill cost."""
        decode = self.decode_seconds(num_sequences, context)
        if not prefills:
            self.decode_scale *= self._correction(seconds, decode)
        else:
            predicted = sum(self.prefill_seconds(num_tokens, before) for num_tokens, before in prefills)
            self.prefill_scale *= self._correction(seconds - decode, predicted)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """A measured transfer between GPU and host."""
        self.transfer_scale *= self._correction(seconds, self.transfer_seconds(num_bytes))

    def _correction(self, measured: float, predicted: float) -> float:
        if not (0 < measured < inf and predicted > 0):  # nothing ran, or the clock did not move
            return 1.0
        return 1.0 + self.smoothing * (measured / predicted - 1.0)
