"""BatchPlan: what one step computes, as the arrays that a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvpool.config import KVCacheConfig, Tier
from kvpool.core.batch import SequenceBatch
from kvpool.core.kind import StatePlaces
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import BoolArray, Int32Array, Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling.cost_model import CostModel
from kvpool.scheduling.request import Finished, ScheduledSequence


@dataclass(eq=False)
class BatchPlan:
    """One step. Row i computes the tokens `query_start[i]:query_start[i + 1]` of the flat arrays for `sequences[i]`.

    The first `num_decode` rows decode, the others are chunks of prompts. Run `copies` first, in order and after the
    forward pass of the plan before; then the forward pass; then give `complete` the samples. Read tables (`batch.csr()`,
    `batch.padded_table()`) before the next `step()`: it moves the lengths on.
    """

    number: int
    sequences: tuple[ScheduledSequence, ...]
    num_decode: int
    token_ids: Int32Array  # -1: sampled by a plan in flight; take the newest sample of its lane on the device
    positions: Int64Array
    slots: Int32Array  # [layer group, token]: where keys and values go, -1: nowhere
    query_start: Int32Array  # [row + 1]
    kv_lengths: Int64Array  # [row]: tokens that the last query of the row sees, itself included
    lanes: Int64Array  # [row]
    num_samples: Int64Array  # [row]: tokens to sample behind the row's last token; 0: its prompt goes on
    num_drafts: Int64Array  # [row]: the last so many tokens of the row are drafts; sample behind each, and before
    is_uniform: bool  # every row decodes one token and samples one
    copies: list[CopyOp]
    states: StatePlaces | None = None  # where layers that keep a state read and leave it
    num_kept: Int64Array | None = None  # [row]: behind so many of the row's tokens they leave it; drafts follow
    admitted: list[ScheduledSequence] = field(default_factory=list)
    resumed: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[ScheduledSequence] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)  # over without a sample: deadlines, refused requests
    departures: int = 0  # with the residences: rows of sequences that left since are stale
    chunk_residences: tuple[int, ...] = ()
    decode_batch: SequenceBatch | None = None
    manager: KVCacheManager | None = field(default=None, repr=False)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute (there may be copies): all sequences wait for a plan in flight or for memory, or are done."""
        return not self.sequences

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - int(self.query_start[self.num_decode])

    @cached_property
    def has_unknown_tokens(self) -> bool:
        """Whether samples of a plan in flight are among its tokens."""
        return bool((self.token_ids < 0).any())

    @cached_property
    def decodes_several(self) -> BoolArray:
        """[row]: it decodes and has several tokens: drafts, or accepted drafts that are computed again."""
        several: BoolArray = np.diff(self.query_start) > 1
        several[self.num_decode :] = False
        return several

    @cached_property
    def sampling_rows(self) -> Int64Array:
        """Rows that sample behind their last token, in the order of the tokens that `complete` takes."""
        return np.arange(len(self.lanes)) if self.is_uniform else np.flatnonzero(self.num_samples)

    @cached_property
    def logits_indices(self) -> Int64Array:
        """Flat indices of the tokens whose logits are needed: the last of each sampling row, and those before drafts."""
        rows = self.sampling_rows
        ends = self.query_start[rows + 1].astype(np.int64)
        counts = self.num_drafts[rows] + 1
        if not self.num_drafts.any():
            return ends - 1
        first = np.repeat(ends - counts - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
        return first + np.arange(int(counts.sum()))

    @cached_property
    def first_samples(self) -> Int64Array:
        """The index of the first sample of each sampling row, where a row has one sample more than drafts, or several."""
        counts: Int64Array = (self.num_samples + self.num_drafts)[self.sampling_rows]
        firsts: Int64Array = np.cumsum(counts) - counts
        return firsts

    @cached_property
    def batch(self) -> SequenceBatch:
        """All rows as a batch of the manager, for CSR lists and padded tables."""
        if self.decode_batch is not None and self.num_decode == len(self.sequences):
            return self.decode_batch
        assert self.manager is not None
        return self.manager.batch([sequence.live_handle() for sequence in self.sequences])

    def current_rows(self, departures: int) -> BoolArray:
        """Rows whose sequence has not left the GPU since; `departures` are those that the scheduler counts now."""
        current = np.ones(len(self.sequences), np.bool_)
        if self.departures != departures:
            current[:] = [sequence.is_running for sequence in self.sequences]
            for row, residence in enumerate(self.chunk_residences, self.num_decode):
                current[row] &= self.sequences[row].residence == residence
        return current

    def seconds(self, costs: CostModel, config: KVCacheConfig) -> float:
        """Seconds that this step takes by a cost model; simulators add them up."""
        seconds = costs.transfer_seconds(transferred_bytes(self.copies, config))
        seconds += costs.decode_seconds(self.num_decode, int(self.kv_lengths[: self.num_decode].sum()))
        return seconds + sum(costs.prefill_seconds(num_tokens, context) for num_tokens, context in self.prefills())

    def prefills(self) -> list[tuple[int, int]]:
        """Tokens of each chunk of a prompt, and the tokens before it."""
        counts = np.diff(self.query_start)[self.num_decode :]
        contexts = self.kv_lengths[self.num_decode :] - counts
        return list(zip(counts.tolist(), contexts.tolist(), strict=True))


def transferred_bytes(copies: list[CopyOp], config: KVCacheConfig) -> int:
    """Bytes that copies move over the link between GPU and host."""
    return sum(
        op.num_blocks * config.groups[op.group].block_bytes
        for op in copies
        if Tier.GPU in (op.src_tier, op.dst_tier) and op.src_tier != op.dst_tier
    )
