"""A draft model guesses the next tokens of each sequence; the engine's model verifies them in one step.

The layers of both models are layers of one cache. So the draft's keys and values are paged, found again as prefixes, forked,
swapped and rewound with those of the model. A step with drafts is planned first, with places for them. Then the draft
computes the tokens that it does not know yet and guesses, one step for each guess, and the model computes them all.
A guess is drawn with the parameters and the random number of the token that it stands for. It is accepted if the model draws
the same token: drafts change no answer, neither a greedy one nor that of a seed. Where tokens are drawn without a seed, they
come from the model's distribution, and more guesses are accepted (`Guesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvpool.engine.generation import Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.runner import ModelRunner
from kvpool.engine.sampling import Guesses, StepSampler
from kvpool.errors import ConfigError
from kvpool.model.loading import LoadedModel
from kvpool.model.probing import ModelShape
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan, ScheduledSequence, SchedulerConfig
from kvpool.sequences.batch import SequenceBatch

PROBE_STEPS = 32  # behind so many, the other choice is measured
MOST_PROBE_STEPS = 256  # while drafts do not pay
MARGIN = 1.05  # drafts must give so many times the tokens a second: beginning and ending with them costs some, too
PLAIN_STEPS = 3  # without drafts, to measure these: the first one had to wait for the last with drafts


class DraftStats(NamedTuple):
    """How drafts do. `SchedulerStats` counts those that were verified and accepted."""

    length: int  # tokens that a step drafts for a sequence
    acceptance: float  # how likely a draft is right if those before it are


class DraftLength:
    """Chooses how many tokens a step drafts for a sequence: as many as give most tokens a second.

    If each draft is right with probability p, given that those before it are, n drafts give 1 + p + ... + p^n tokens. Seconds
    are measured for each n, in batches of similar size; those of other n are estimated from the nearest one.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.chosen = most
        self._right, self._tried = 0.5, 1.0
        self._seconds: dict[int, dict[int, float]] = {}  # by the bits of the batch size, then by drafts
        self._interval = PROBE_STEPS
        self._since_probe = 0
        self._num_plain = 0  # steps without drafts, one after another

    @property
    def acceptance(self) -> float:
        """How likely a draft is right if those before it are, by the last hundred steps or so."""
        return self._right / self._tried

    def choose(self, num_sequences: int) -> int:
        """How many tokens the next step should draft for each of so many sequences."""
        seconds = self._seconds.get(num_sequences.bit_length(), {})
        for number in (0, self.most):  # first measure these
            if number not in seconds:
                self.chosen = number
                return number
        best = max(range(1, self.most + 1), key=lambda number: self._rate(number, seconds))
        self.chosen = best if self._rate(best, seconds) > MARGIN * self._rate(0, seconds) else 0
        self._since_probe += 1
        if self.chosen:
            self._interval = PROBE_STEPS
        if self._since_probe <= self._interval:
            return self.chosen
        if self._since_probe == self._interval + (PLAIN_STEPS if self.chosen else 1):
            self._since_probe = 0
            self._interval = PROBE_STEPS if self.chosen else min(2 * self._interval, MOST_PROBE_STEPS)
        return 0 if self.chosen else 1

    def _rate(self, number: int, seconds: Mapping[int, float]) -> float:
        """Tokens a second of one sequence with so many drafts."""
        nearest = min((other for other in seconds if other), key=lambda other: abs(other - number))
        estimate = seconds[0] + (seconds[nearest] - seconds[0]) * number / nearest
        tokens = sum(self.acceptance**power for power in range(number + 1))
        return tokens / max(seconds.get(number, estimate), 1e-9)

    def observe(self, num_sequences: int, number: int, seconds: float) -> None:
        """A step that only decoded took so long with so many drafts of each sequence."""
        self._num_plain = 0 if number else self._num_plain + 1
        if self._num_plain == 1:  # it did not overlap with the step before it
            return
        known = self._seconds.setdefault(num_sequences.bit_length(), {})
        before = known.setdefault(number, seconds)
        known[number] = before + 0.2 * (min(seconds, 2 * before) - before)  # one stall must not count for long

    def verified(self, right: int, tried: int) -> None:
        """Of the drafts of a step, `tried` were compared with the model's token, up to the first wrong one."""
        self._right = 0.98 * self._right + right
        self._tried = 0.98 * self._tried + tried


class DraftModel:
    """Runs the draft in the steps of the engine."""

    def __init__(self, runner: ModelRunner, shape: ModelShape, vocabulary: int, limits: SchedulerConfig) -> None:
        self.runner = runner
        self.length = DraftLength(limits.max_draft_tokens)
        self._vocab_size = shape.vocab_size
        self._vocabulary = vocabulary  # of the engine's model
        self._sampler = StepSampler(vocabulary, limits.max_sequences, runner.device)
        self._max_tokens = limits.max_tokens_per_step
        self._known: dict[int, tuple[ScheduledSequence, int, int]] = {}  # by lane: whose, in which residence, how many

    def stats(self) -> DraftStats:
        """How drafts do now."""
        return DraftStats(self.length.chosen, self.length.acceptance)

    def run(
        self,
        plan: BatchPlan,
        token_ids: Tensor,
        generations: Mapping[Hashable, Generation],
        tokens_of: Callable[[ScheduledSequence], Int32Array],
    ) -> tuple[Tensor, Guesses | None]:
        """The token ids of a step, on the device, with the draft's guesses in the places of drafts.

        Also those guesses that need not be the tokens of a seed. The draft computes prompts in the same steps as the model.
        Of sequences that decode, it computes what it does not know yet when a step has drafts.
        """
        if not plan.num_drafts.any():
            if plan.num_prefill_tokens:
                rows = np.arange(plan.num_decode, len(plan.sequences))
                self._logits(*self._unknown(plan, token_ids, rows, tokens_of))
            return token_ids, None
        step, ids = self._unknown(plan, token_ids, np.arange(len(plan.sequences)), tokens_of)
        rows = np.flatnonzero(plan.num_drafts)
        places = plan.query_start[rows + 1] - plan.num_drafts[rows]
        samples = plan.first_samples[np.searchsorted(plan.sampling_rows, rows)]  # that guesses stand for
        free = np.array([_is_free(generations[plan.sequences[row].request.id].params) for row in rows.tolist()])
        token_ids, drawn = token_ids.clone(), list[Guesses]()
        batch: SequenceBatch | None = None
        for number in range(1, int(plan.num_drafts.max()) + 1):
            guesses, distributions = self._sampler.guess(step, self._logits(step, ids), generations)
            token_ids.index_copy_(0, self.runner.upload(places), guesses)
            if distributions is not None and free.any():
                of = self.runner.upload(np.flatnonzero(free))
                drawn.append(Guesses(samples[free], guesses[of], distributions[of]))
            left = plan.num_drafts[rows] > number
            if not left.all():
                rows, places, samples, free, batch = rows[left], places[left], samples[left], free[left], None
            if len(rows):
                ids = token_ids.index_select(0, self.runner.upload(places))
                step = _next_step(plan, rows, places, batch)
                batch = step.decode_batch
                places, samples = places + 1, samples + 1
        return token_ids, _joined(drawn)

    def _logits(self, step: BatchPlan, token_ids: Tensor) -> Tensor:
        """The draft's logits in the vocabulary of the model. Tokens that only one of them pads its vocabulary with do not
        matter.
        """
        missing = self._vocabulary - self._vocab_size
        if missing > 0:
            token_ids = token_ids.clamp(max=self._vocab_size - 1)
        logits = self.runner.run(step, token_ids)
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _unknown(
        self,
        plan: BatchPlan,
        token_ids: Tensor,
        rows: Int64Array,
        tokens_of: Callable[[ScheduledSequence], Int32Array],
    ) -> tuple[BatchPlan, Tensor]:
        """The tokens of some rows without their drafts, and those before them that the draft does not know, as a step."""
        assert plan.manager is not None
        sequences = tuple(plan.sequences[row] for row in rows.tolist())
        drafts = plan.num_drafts[rows]
        own = np.diff(plan.query_start)[rows] - drafts
        starts = plan.kv_lengths[rows] - drafts - own
        ends_at = (plan.kv_lengths[rows] - np.minimum(drafts, 1)).tolist()  # the draft does not compute the last one
        pairs = list(zip(sequences, starts.tolist(), strict=True))
        most = max(1, min(MOST_PROBE_STEPS, (self._max_tokens - int(own.sum())) // len(rows)))
        firsts = np.array([self._num_known(sequence, start, most) for sequence, start in pairs])
        for sequence, end in zip(sequences, ends_at, strict=True):
            self._known[sequence.lane] = sequence, sequence.residence, end
        back = starts - firsts
        if (back + own == 1).all() and drafts.all():  # the usual case where some draft was wrong
            newest = plan.query_start[rows + 1] - drafts - 1
            return _next_step(plan, rows, newest, None), token_ids.index_select(0, self.runner.upload(newest))
        again, batch = np.empty((len(plan.slots), 0), np.int32), _batch(plan, sequences)
        tokens: list[Int32Array] = []
        if back.any():
            again = plan.manager.slot_mapping(batch, firsts, starts)
            pieces = zip(pairs, firsts.tolist(), strict=True)
            tokens = [tokens_of(sequence)[first:start] for (sequence, start), first in pieces if first < start]
        counts, num_again = back + own, int(back.sum())
        ends = np.cumsum(counts)
        within = np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
        # Where each token comes from: those before the rows are first, then all of the plan.
        before = np.repeat(np.cumsum(back) - back, counts) + within
        of_plan = np.repeat(num_again + plan.query_start[rows] - back, counts) + within
        source = np.where(within < np.repeat(back, counts), before, of_plan)
        ids = token_ids
        if num_again:
            ids = torch.cat([self.runner.upload(np.concatenate(tokens).astype(np.int64)), token_ids])
        step = _step(
            plan,
            sequences,
            positions=np.repeat(firsts, counts) + within,
            slots=np.concatenate([again, plan.slots], axis=1)[:, source],
            query_start=np.append(0, ends).astype(np.int32),
            kv_lengths=plan.kv_lengths[rows] - drafts,
            lanes=plan.lanes[rows],
            num_samples=(drafts > 0).astype(np.int64),
            num_decode=0,
            is_uniform=False,
        )
        step.batch = batch
        return step, ids.index_select(0, self.runner.upload(source))

    def _num_known(self, sequence: ScheduledSequence, start: int, most: int) -> int:
        """How many of the first `start` tokens of a sequence the draft has computed, or need not compute: all but `most`.

        Of one that came from the cache, from the host or from another sequence, the last ones may be missing: the draft
        leaves out the last draft of each step, and steps without drafts.
        """
        known = self._known.get(sequence.lane)
        if known is not None and known[:2] == (sequence, sequence.residence):
            return max(start - most, min(known[2], start))
        return max(0, start - most)


def _next_step(plan: BatchPlan, rows: Int64Array, places: Int64Array, batch: SequenceBatch | None) -> BatchPlan:
    """A step that computes one draft of each row, the one at `places` of the plan."""
    sequences = tuple(plan.sequences[row] for row in rows.tolist())
    positions = plan.positions[places]
    return _step(
        plan,
        sequences,
        positions=positions,
        slots=np.ascontiguousarray(plan.slots[:, places]),
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        kv_lengths=positions + 1,
        lanes=plan.lanes[rows],
        num_samples=np.ones(len(rows), np.int64),
        num_decode=len(rows),
        is_uniform=True,
        decode_batch=_batch(plan, sequences) if batch is None else batch,
    )


def _batch(plan: BatchPlan, sequences: tuple[ScheduledSequence, ...]) -> SequenceBatch:
    """The batch of some sequences of a plan, in its order."""
    assert plan.manager is not None
    everyone = len(sequences) == len(plan.sequences)
    return plan.batch if everyone else plan.manager.batch([each.live_handle() for each in sequences])


def _step(plan: BatchPlan, sequences: tuple[ScheduledSequence, ...], **fields: Any) -> BatchPlan:
    """A step of the draft within a step of the engine. It has no drafts of its own; its tokens are on the device."""
    return BatchPlan(
        number=plan.number,
        sequences=sequences,
        token_ids=np.full(len(fields["positions"]), -1, np.int32),
        num_drafts=np.zeros(len(sequences), np.int64),
        is_steered=np.zeros(len(sequences), np.bool_),
        copies=[],
        manager=plan.manager,
        **fields,
    )


def _is_free(params: SamplingParams) -> bool:
    """Whether tokens are drawn and nobody asked for those of a seed: then more guesses can be accepted."""
    return params.seed is None and not params.is_greedy


def _joined(guesses: list[Guesses]) -> Guesses | None:
    if not guesses:
        return None
    samples, tokens, distributions = zip(*guesses, strict=True)
    return Guesses(np.concatenate(samples), torch.cat(tokens), torch.cat(distributions))


def check_vocabulary(draft: LoadedModel, draft_size: int, tokenizer: Any, vocab_size: int) -> None:
    """Refuses a draft whose token ids mean something else than the model's.

    Models of one family often pad the same vocabulary to different sizes; then the tokenizers must be equal.
    """
    if hasattr(draft.tokenizer, "get_vocab") and hasattr(tokenizer, "get_vocab"):
        if draft.tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the draft {draft.info.name} has another vocabulary than the model; use one with the same tokenizer"
            )
    elif draft_size != vocab_size:
        raise ConfigError(
            f"the draft {draft.info.name} has {draft_size} tokens, the model {vocab_size}; use one with the same vocabulary"
        )
