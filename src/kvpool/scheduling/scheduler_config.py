"""SchedulerConfig: how much may run at once, in which order, and how sequences are preempted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvpool.checks import check_bool, check_int, check_seconds
from kvpool.errors import ConfigError
from kvpool.scheduling.policies import SchedulingPolicy, make_scheduling_policy

MAX_TOKENS_PER_STEP = 2**24
MAX_SEQUENCES = 2**16


class CapacityMode(str, Enum):
    """What a request is promised when it is admitted."""

    MAX_UTILISATION = "max_utilisation"  # room for its known tokens; later it may be preempted
    GUARANTEED = "guaranteed"  # room for everything it may generate: it is never preempted


class PreemptionMode(str, Enum):
    """What happens to a preempted sequence."""

    AUTO = "auto"  # swap or recompute: whichever costs less for this sequence, by the cost model
    SWAP = "swap"  # to the host while it has room, otherwise recompute
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and choices of a `Scheduler`; checked on construction.

    >>> SchedulerConfig(max_tokens_per_step=512, max_sequences=64, policy="priority").capacity.value
    'max_utilisation'
    """

    max_tokens_per_step: int = 2048  # shared by decode (first) and prefill
    max_sequences: int = 256  # on the GPU at once
    max_chunk_tokens: int | None = None  # of one prompt in one step; None: as many as the step allows
    # Of a step in which sequences decode: prompts get the time that is left, by the cost model. None: no limit.
    max_step_seconds: float | None = None
    policy: str | Callable[[], SchedulingPolicy] = "soonest_first_token"
    capacity: CapacityMode | str = CapacityMode.MAX_UTILISATION
    preemption: PreemptionMode | str = PreemptionMode.AUTO
    max_draft_tokens: int = 0  # of one sequence in one step (speculative decoding)
    wait_for_prefix: bool = True  # do not compute a prefix that a running request computes already
    prefetch_requests: int = 2  # this many requests next in line get their offloaded prefixes onboarded ahead of time

    def __post_init__(self) -> None:
        check_int(self.max_tokens_per_step, "max_tokens_per_step", 1, MAX_TOKENS_PER_STEP)
        check_int(self.max_sequences, "max_sequences", 1, MAX_SEQUENCES)
        if self.max_tokens_per_step < self.max_sequences:
            raise ConfigError(
                f"max_tokens_per_step={self.max_tokens_per_step} is less than max_sequences={self.max_sequences}: "
                f"every running sequence decodes one token in each step"
            )
        if self.max_chunk_tokens is not None:
            check_int(self.max_chunk_tokens, "max_chunk_tokens", 1, MAX_TOKENS_PER_STEP)
        if self.max_step_seconds is not None:
            check_seconds(self.max_step_seconds, "max_step_seconds")
        check_int(self.max_draft_tokens, "max_draft_tokens", 0, MAX_TOKENS_PER_STEP)
        check_int(self.prefetch_requests, "prefetch_requests", 0, MAX_SEQUENCES)
        check_bool(self.wait_for_prefix, "wait_for_prefix")
        for name, kind in (("capacity", CapacityMode), ("preemption", PreemptionMode)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError:
                choices = ", ".join(repr(item.value) for item in kind)
                raise ConfigError(f"{name} must be one of {choices}, got {value!r}") from None
        make_scheduling_policy(self.policy)  # an unknown name is refused here

    @property
    def chunk_tokens(self) -> int:
        """The most tokens of one prompt in one step."""
        return min(self.max_tokens_per_step, self.max_chunk_tokens or self.max_tokens_per_step)
