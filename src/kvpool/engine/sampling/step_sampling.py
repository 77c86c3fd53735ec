"""Sampling of a step: which parameters, seeds and counts belong to which row of the logits, cached while the batch stays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.engine.generation import Generation, TokenLogprob
from kvpool.engine.sampling.choosing import Sampled, SamplingRows, TokenCounts, TokenMask, sample, seed_of, uniforms_for
from kvpool.engine.sampling.grammar import num_words
from kvpool.engine.sampling.params import SamplingParams
from kvpool.pools.arrays import Int64Array
from kvpool.scheduling.batch_plan import BatchPlan
from kvpool.scheduling.request import ScheduledSequence
from kvpool.storage.moving import upload


class _Masked(NamedTuple):
    """Samples of a sequence that may not choose every token."""

    generation: Generation
    sample: int
    first: int  # row
    repeat: int  # rows from there on: samples that begin together


class _Rows(NamedTuple):
    """What the sampled rows of a batch have in common from step to step."""

    params: SamplingRows
    source: Int64Array | None  # row of the logits that each sample is drawn from; None: one each, in order
    seeds: npt.NDArray[np.uint64]
    prompt_lengths: Int64Array
    lanes: Tensor
    masked: tuple[_Masked, ...]


class StepSampler:
    """Turns the logits of a plan into one token per sample, on the device."""

    def __init__(self, vocabulary: int, max_sequences: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._max_sequences = max_sequences
        self._device = device
        self._counts: TokenCounts | None = None  # made when the first request with penalties comes
        self._cached: tuple[object, _Rows] | None = None

    def track(self, sequence: ScheduledSequence, generation: Generation, tokens: npt.NDArray[np.int32]) -> None:
        """A sequence with penalties got a lane, or branched: its counts start with what it has."""
        if sequence.lane < 0:
            return
        if self._counts is None:
            self._counts = TokenCounts(self._max_sequences, self._vocabulary, self._device)
        length = len(generation.prompt)
        self._counts.start(sequence.lane, tokens[:length], tokens[length:])

    def sample(
        self,
        plan: BatchPlan,
        logits: Tensor,
        generations: Mapping[Hashable, Generation],
        catch_up: Callable[[], None],
    ) -> Sampled:
        """One token per sample of the plan, behind each draft too; `generations` are found by request id.

        `catch_up` is called where the choice needs every token before it on the host: the device computes logits meanwhile.
        """
        rows = self._rows(plan, generations)
        mask = None
        if rows.masked:
            catch_up()
            mask = self._mask(rows.masked)
        if rows.source is not None:
            logits = logits.index_select(0, upload(rows.source, self._device))
        uniforms = None
        if not rows.params.greedy:
            uniforms = upload(uniforms_for(rows.seeds, self._steps(plan, rows)), self._device)
        sampled = sample(logits, rows.params, uniforms, self._counts, rows.lanes, mask)
        if self._counts is not None and rows.params.penalised:
            self._counts.add(rows.lanes, sampled.tokens)
        return sampled

    def _rows(self, plan: BatchPlan, generations: Mapping[Hashable, Generation]) -> _Rows:
        # The manager's batch of a plan that only decodes is the same object while nobody joins or leaves.
        alone = plan.num_tokens == plan.num_decode and plan.decode_batch is not None
        if alone and self._cached is not None and self._cached[0] is plan.decode_batch:
            return self._cached[1]
        rows = self._make_rows(plan, generations)
        self._cached = (plan.decode_batch, rows) if alone else None
        return rows

    def _make_rows(self, plan: BatchPlan, generations: Mapping[Hashable, Generation]) -> _Rows:
        chosen = plan.sampling_rows
        drafts = plan.num_drafts[chosen]
        repeats = plan.num_samples[chosen] + drafts  # a row has drafts or several samples, never both
        source = None
        if int(repeats.max(initial=1)) > 1:
            firsts = np.cumsum(drafts + 1) - (drafts + 1)
            within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
            source = np.repeat(firsts, repeats) + np.where(np.repeat(drafts, repeats) > 0, within, 0)
        params: list[SamplingParams] = []
        seeds, lengths, masked = [], [], []
        for row, repeat, draft in zip(chosen.tolist(), repeats.tolist(), drafts.tolist(), strict=True):
            sequence = plan.sequences[row]
            generation, index = generations[sequence.request.id], sequence.index
            if generation.params.grammar is not None:
                masked.append(_Masked(generation, index, len(params), repeat))
            params += [generation.params] * repeat
            lengths += [len(generation.prompt)] * repeat
            seeds += [seed_of(generation.seed, index + (0 if draft else number)) for number in range(repeat)]
        return _Rows(
            SamplingRows(params, self._device),
            source,
            np.array(seeds, np.uint64),
            np.array(lengths, np.int64),
            upload(np.repeat(plan.lanes[chosen], repeats), self._device),
            tuple(masked),
        )

    def _mask(self, masked: tuple[_Masked, ...]) -> TokenMask:
        """What the grammars of these samples allow now."""
        words = np.empty((len(masked), num_words(self._vocabulary)), np.int32)
        for at, each in enumerate(masked):
            each.generation.fill_mask(each.sample, words[at])
        repeats = np.array([each.repeat for each in masked])
        rows = np.concatenate([np.arange(each.first, each.first + each.repeat) for each in masked])
        return TokenMask(upload(rows, self._device), upload(words.repeat(repeats, axis=0), self._device))

    def _steps(self, plan: BatchPlan, rows: _Rows) -> Int64Array:
        """How many tokens each sample's sequence has sampled before."""
        positions = plan.positions[plan.logits_indices]
        if rows.source is not None:
            positions = positions[rows.source]
        return positions + 1 - rows.prompt_lengths


def logprob_of(sampled: Sampled, at: int, token: int, num_top: int) -> TokenLogprob:
    """The log probability of sample `at`, whose token is known, and of the `num_top` best ones. Tensors are on the host."""
    assert sampled.logprobs is not None
    top: tuple[tuple[int, float], ...] = ()
    if num_top and sampled.top_tokens is not None and sampled.top_logprobs is not None:
        tokens, values = sampled.top_tokens[at, :num_top].tolist(), sampled.top_logprobs[at, :num_top].tolist()
        top = tuple(zip(tokens, values, strict=True))
    return TokenLogprob(token, float(sampled.logprobs[at]), top)
