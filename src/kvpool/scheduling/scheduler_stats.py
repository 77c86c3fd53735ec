"""What a scheduler counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerStats:
    """Counters since the scheduler was made; tokens and sequences, never mixed."""

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # of admitted prompts, not computed
    preemptions: int = 0
    swapped_out: int = 0  # preemptions by swap
    swapped_in: int = 0
    recomputed_tokens: int = 0  # computed once and given up by preemptions
    stalls: int = 0  # running sequences that had to sit out a step for want of memory
    prefix_waits: int = 0  # times a request waited for a prefix that another one was computing
    prefetched_blocks: int = 0
    arrival_waits: int = 0  # times a sequence was held back until its blocks had come from a lower tier
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    finished: int = 0  # requests
