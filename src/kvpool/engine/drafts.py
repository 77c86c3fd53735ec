"""A draft model guesses the next tokens of each sequence; the engine's model verifies them in one step.

The layers of both models are layers of one cache. So the draft's keys and values are paged, found again as prefixes, forked,
swapped and rewound with those of the model. A step with drafts is planned first, with places for them. Then the draft
computes the tokens that it does not know yet and guesses, one step for each guess, and the model computes them all.
A guess is drawn with the parameters and the random number of the token that it stands for. It is accepted if the model draws
the same token: drafts change no answer, neither a greedy one nor that of a seed. Where tokens are drawn without a seed, they
come from the model's distribution, and more guesses are accepted (`Guesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvpool.attention import PagedBatch
from kvpool.engine.generation import Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.runner import ModelRunner
from kvpool.engine.sampling import Guesses, StepSampler
from kvpool.engine.step_message import GuessSteps
from kvpool.errors import ConfigError
from kvpool.model.loading import LoadedModel
from kvpool.model.probing import ModelShape
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan, ScheduledSequence, SchedulerConfig
from kvpool.sequences.batch import CSRTable, SequenceBatch

PROBE_AFTER = 32  # steps; behind so many, the other choice is measured
MOST_PROBE_AFTER = 256  # while the choice stays
PROBE_STEPS = 3  # that measure it. The first does not count: behind others it waits, or the draft has to catch up
FORGETTING = 0.997  # how much less each draft counts than the next one, for how often they are right
MARGIN = 1.05  # drafts must give so many times the tokens a second: beginning and ending with them costs some, too
CATCH_UP_STEPS = 64  # without drafts; behind so many, the draft computes what these have added
MOST_MISSING = 2048  # tokens that the draft catches up with; if it lacks more, it waits for other sequences


class DraftStats(NamedTuple):
    """How drafts do. `SchedulerStats` counts those that were verified and accepted."""

    length: int  # tokens that a step drafts for a sequence
    acceptance: float  # how likely a draft is right if those before it are


class DraftLength:
    """Chooses how many tokens a step drafts for a sequence: as many as give most tokens a second.

    If each draft is right with probability p, given that those before it are, n drafts give 1 + p + ... + p^n tokens. Seconds
    are measured for each n, in batches of similar size; those of other n are estimated from the nearest ones.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.chosen = most
        self._right, self._tried = 0.5, 1.0
        self._seconds: dict[int, dict[int, float]] = {}  # by the bits of the batch size, then by drafts
        self._interval = PROBE_AFTER
        self._since_probe = 0
        self._drafted: bool | None = None  # whether the last step had drafts

    @property
    def acceptance(self) -> float:
        """How likely a draft is right if those before it are, by the last few hundred of them."""
        return self._right / self._tried

    def choose(self, num_sequences: int) -> int:
        """How many tokens the next step should draft for each of so many sequences."""
        seconds = self._seconds.get(num_sequences.bit_length(), {})
        for number in (0, self.most):  # first measure these
            if number not in seconds:
                self.chosen = number
                return number
        best = max(range(1, self.most + 1), key=lambda number: self._rate(number, seconds))
        before, self.chosen = self.chosen, best if self._rate(best, seconds) > MARGIN * self._rate(0, seconds) else 0
        self._since_probe += 1
        if bool(before) != bool(self.chosen):
            self._interval = PROBE_AFTER
        if self._since_probe <= self._interval:
            return self.chosen
        if self._since_probe >= self._interval + PROBE_STEPS:
            self._since_probe = 0
            self._interval = min(2 * self._interval, MOST_PROBE_AFTER)
        return 0 if self.chosen else best

    def _rate(self, number: int, seconds: Mapping[int, float]) -> float:
        """Tokens a second of one sequence with so many drafts."""
        tokens = sum(self.acceptance**power for power in range(number + 1))
        return tokens / max(seconds[number] if number in seconds else _estimate(number, seconds), 1e-9)

    def observe(self, num_sequences: int, number: int, seconds: float) -> None:
        """A step that only decoded took so long with so many drafts of each sequence."""
        before, self._drafted = self._drafted, number > 0
        if before != self._drafted:  # it took longer than the next ones will
            return
        known = self._seconds.setdefault(num_sequences.bit_length(), {})
        average = known.setdefault(number, seconds)
        known[number] = average + 0.2 * (min(seconds, 2 * average) - average)  # one stall must not count for long

    def verified(self, right: int, tried: int) -> None:
        """Of the drafts of a step, `tried` were compared with the model's token, up to the first wrong one."""
        kept = FORGETTING**tried
        self._right = kept * self._right + right
        self._tried = kept * self._tried + tried


def _estimate(number: int, seconds: Mapping[int, float]) -> float:
    """The seconds of a step with so many drafts, from those of other numbers. The first draft costs more than the others."""
    nearest = sorted((other for other in seconds if other), key=lambda other: abs(other - number))[:2]
    one, other = nearest if len(nearest) > 1 else (nearest[0], 0)
    slope = (seconds[one] - seconds[other]) / (one - other)
    return max(seconds[0], seconds[one] + slope * (number - one))


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
        self._num_plain = 0  # steps without drafts since the draft has caught up
        self._num_missing = 0  # tokens that it did not know when that was found to be too much
        self.mirror: Callable[[GuessSteps], None] | None = None  # tells other ranks which steps follow

    def stats(self) -> DraftStats:
        """How drafts do now."""
        return DraftStats(self.length.chosen, self.length.acceptance)

    def choose(self, num_sequences: int) -> int:
        """How many tokens the next step should draft for each of so many sequences."""
        return 0 if self._num_missing > MOST_MISSING else self.length.choose(num_sequences)

    def run(
        self,
        plan: BatchPlan,
        token_ids: Tensor,
        generations: Mapping[Hashable, Generation],
        tokens_of: Callable[[ScheduledSequence], Int32Array],
    ) -> tuple[Tensor, Guesses | None]:
        """The token ids of a step, on the device, with the draft's guesses in the places of drafts.

        Also those guesses that need not be the tokens of a seed. The draft computes prompts in the same steps as the model.
        Of sequences that decode, it computes what it does not know yet when a step has drafts, and now and then besides.
        """
        drafting = np.flatnonzero(plan.num_drafts)
        self._num_plain += not len(drafting)
        is_overdue = self._num_plain >= CATCH_UP_STEPS
        if not (len(drafting) or plan.num_prefill_tokens or is_overdue):
            return token_ids, None
        firsts = self._catch_up(plan, is_overdue, tokens_of)
        if not len(drafting):
            return token_ids, None
        return self._guess(plan, token_ids, drafting, firsts[drafting], generations, tokens_of)

    def _catch_up(
        self, plan: BatchPlan, is_overdue: bool, tokens_of: Callable[[ScheduledSequence], Int32Array]
    ) -> Int64Array:
        """Computes prompts, and what is missing before the newest tokens of rows that decode.

        If one token is missing before a row's drafts, it is left to their first step. Returns how many tokens of each row
        the draft knew before it guesses.
        """
        num_decode = plan.num_decode
        ends = plan.kv_lengths - plan.num_drafts
        ends[:num_decode] -= 1  # the newest token is computed with the drafts
        starts = plan.kv_lengths - np.diff(plan.query_start)
        starts[:num_decode] = ends[:num_decode]
        rows = zip(plan.sequences, starts.tolist(), strict=True)
        firsts = np.array([self._num_known(sequence, start) for sequence, start in rows], np.int64)
        wanted = plan.num_drafts > 0
        wanted[num_decode:] = True
        if is_overdue:
            self._num_plain = 0
            self._num_missing = int((ends - firsts)[:num_decode].sum())
            wanted[:num_decode] |= self._num_missing <= MOST_MISSING
        wanted &= ends - firsts > (plan.num_drafts > 0)
        chosen = np.flatnonzero(wanted)
        if len(chosen):
            self._compute(plan, chosen, firsts[chosen], ends[chosen], tokens_of)
            firsts[chosen] = ends[chosen]
        known = np.where(plan.num_drafts > 0, plan.kv_lengths - 1, firsts)  # the last draft is not computed
        for sequence, number in zip(plan.sequences, known.tolist(), strict=True):
            self._known[sequence.lane] = sequence, sequence.residence, number
        return firsts

    def _num_known(self, sequence: ScheduledSequence, start: int) -> int:
        """How many of the first `start` tokens of a sequence the draft has computed.

        Of one that came from the cache, from the host or from another sequence, the last ones may be missing.
        """
        known = self._known.get(sequence.lane)
        if known is not None and known[:2] == (sequence, sequence.residence):
            return min(known[2], start)
        return max(0, start - 2 * CATCH_UP_STEPS)

    def _compute(
        self,
        plan: BatchPlan,
        rows: Int64Array,
        firsts: Int64Array,
        ends: Int64Array,
        tokens_of: Callable[[ScheduledSequence], Int32Array],
    ) -> None:
        """The draft computes tokens `firsts..ends` of some rows, in as many steps as that takes."""
        assert plan.manager is not None
        while len(rows):
            before = np.cumsum(ends - firsts) - (ends - firsts)
            stops = np.clip(firsts + self._max_tokens - before, firsts, ends)
            now = stops > firsts
            sequences = tuple(plan.sequences[row] for row in rows[now].tolist())
            pieces = zip(sequences, firsts[now].tolist(), stops[now].tolist(), strict=True)
            tokens = np.concatenate([tokens_of(sequence)[first:stop] for sequence, first, stop in pieces])
            tokens = np.minimum(tokens, self._vocab_size - 1)  # see `_readable`
            counts = (stops - firsts)[now]
            query_start = np.append(0, np.cumsum(counts)).astype(np.int32)
            step = BatchPlan(
                number=plan.number,
                sequences=sequences,
                num_decode=0,
                token_ids=tokens,
                positions=np.repeat(stops[now] - query_start[1:], counts) + np.arange(len(tokens)),
                slots=plan.manager.slot_mapping(_batch(plan, sequences), firsts[now], stops[now]),
                query_start=query_start,
                kv_lengths=stops[now],
                lanes=plan.lanes[rows[now]],
                num_samples=np.zeros(len(counts), np.int64),
                num_drafts=np.zeros(len(counts), np.int64),
                is_steered=np.zeros(len(counts), np.bool_),
                is_uniform=False,
                copies=[],
                manager=plan.manager,
            )
            self.runner.run(step, self.runner.upload(tokens.astype(np.int64)))
            left = stops < ends
            rows, firsts, ends = rows[left], stops[left], ends[left]

    def _guess(
        self,
        plan: BatchPlan,
        token_ids: Tensor,
        rows: Int64Array,
        firsts: Int64Array,
        generations: Mapping[Hashable, Generation],
        tokens_of: Callable[[ScheduledSequence], Int32Array],
    ) -> tuple[Tensor, Guesses | None]:
        """Guesses the drafts of some rows, one step for each. A guess becomes the next input on the device.

        All rows take part in all steps. Behind its last draft, a row computes something that nobody reads.
        """
        sequences = tuple(plan.sequences[row] for row in rows.tolist())
        batch, drafts = _batch(plan, sequences), plan.num_drafts[rows]
        newest = plan.query_start[rows + 1] - drafts - 1
        ahead = np.arange(int(drafts.max()))[:, None]
        is_draft = ahead < drafts  # [step, row]
        places = newest + np.minimum(ahead, drafts - 1)
        positions = plan.positions[places]
        # Where all drafts of the last step were right, the last of them is computed now, beside the newest token.
        behind = np.flatnonzero(firsts < positions[0])
        older = [int(tokens_of(sequences[at])[firsts[at]]) for at in behind.tolist()]
        slots = np.where(is_draft, plan.slots[:, places], -1)
        steps = self._steps(plan, batch, behind, firsts, positions, slots)
        if self.mirror is not None:
            self.mirror(steps)
        numbers = [newest, (newest + 1 + ahead)[is_draft], np.flatnonzero(is_draft), np.array(older, np.int64)]
        first, targets, sources, again = self.runner.upload(np.concatenate(numbers)).split_with_sizes(
            [len(n) for n in numbers]
        )
        drawing = self._sampler.drawing(plan, rows, generations, positions)
        inputs = torch.cat([token_ids.index_select(0, first), again])
        guesses, distributions = list[Tensor](), list[Tensor | None]()
        for turn, ready in enumerate(self._prepared(steps)):
            inputs = self._readable(inputs)
            if self.mirror is not None:
                torch.distributed.broadcast(inputs, 0)
            logits = self.runner.decode(inputs, *ready)
            inputs, given = drawing.guess(self._of_model(logits[: len(rows)]), turn)
            guesses.append(inputs)
            distributions.append(given)
        drafted = torch.cat(guesses).index_select(0, sources)
        token_ids = token_ids.index_copy(0, targets, drafted)
        if distributions[0] is None:
            return token_ids, None
        free = [_is_free(generations[sequence.request.id].params) for sequence in sequences]
        kept = np.flatnonzero(is_draft & free)
        if not len(kept):
            return token_ids, None
        samples = plan.first_samples[np.searchsorted(plan.sampling_rows, rows)] + ahead
        of = self.runner.upload(kept)
        drawn_from = torch.cat([each for each in distributions if each is not None]).index_select(0, of)
        return token_ids, Guesses(samples.ravel()[kept], torch.cat(guesses).index_select(0, of), drawn_from)

    def follow(self, steps: GuessSteps) -> None:
        """Takes part in the guesses of rank 0, on another rank of a divided model."""
        for ready in self._prepared(steps):
            inputs = torch.empty_like(ready[0])
            torch.distributed.broadcast(inputs, 0)
            self.runner.decode(inputs, *ready)

    def _steps(
        self,
        plan: BatchPlan,
        batch: SequenceBatch,
        behind: Int64Array,
        firsts: Int64Array,
        positions: Int64Array,
        slots: Int32Array,
    ) -> GuessSteps:
        """The steps that guess. The first has the older tokens of the rows `behind`, too."""
        assert plan.manager is not None
        older = firsts[behind]
        first_slots = slots[:, 0]
        if len(behind):
            first_slots = np.concatenate(
                [first_slots, plan.manager.slot_mapping(batch, firsts, positions[0])], axis=1, dtype=np.int32
            )
        flat = np.concatenate([first_slots, *slots[:, 1:].swapaxes(0, 1)], axis=1, dtype=np.int32)
        return GuessSteps([np.append(positions[0], older), *positions[1:]], flat, behind, batch)

    def _prepared(self, steps: GuessSteps) -> Iterator[tuple[Tensor, Tensor, list[PagedBatch]]]:
        """Positions and slots of each step that guesses, on the device, and which keys its rows see."""
        sizes = steps.sizes
        tables = [(steps.batch.csr(kind.group.index), kind.group.block_size) for kind in self.runner.kinds]
        to = self.runner.plane.prepare(steps.slots, steps.batch).tensor.split_with_sizes(sizes, dim=1)
        where = self.runner.upload(np.concatenate(steps.positions)).split_with_sizes(sizes)
        again = steps.again
        for piece, at, into in zip(steps.positions, where, to, strict=True):
            yield at, into, [_paged(table, again, piece + 1, size) for table, size in tables]
            again = again[:0]

    def _readable(self, token_ids: Tensor) -> Tensor:
        """Token ids that the draft has embeddings for. What only the model pads its vocabulary with does not matter."""
        return token_ids.clamp(max=self._vocab_size - 1) if self._vocabulary > self._vocab_size else token_ids

    def _of_model(self, logits: Tensor) -> Tensor:
        """The draft's logits in the vocabulary of the model."""
        missing = self._vocabulary - self._vocab_size
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _paged(table: CSRTable, again: Int64Array, lengths: Int64Array, block_size: int) -> PagedBatch:
    """A row with one query for each sequence of a table, and one more for some of them, as attention sees them."""
    indptr, indices = table.indptr, table.indices
    if len(again):
        lists = [indices[indptr[at] : indptr[at + 1]] for at in again.tolist()]
        indptr = np.append(indptr, indptr[-1] + np.cumsum([len(each) for each in lists]))
        indices = np.concatenate([indices, *lists])
    return PagedBatch.build(indptr, indices, np.ones(len(lengths), np.int64), lengths, block_size=block_size)


def _batch(plan: BatchPlan, sequences: tuple[ScheduledSequence, ...]) -> SequenceBatch:
    """The batch of some sequences of a plan, in its order."""
    assert plan.manager is not None
    everyone = len(sequences) == len(plan.sequences)
    return plan.batch if everyone else plan.manager.batch([each.live_handle() for each in sequences])


def _is_free(params: SamplingParams) -> bool:
    """Whether tokens are drawn and nobody asked for those of a seed: then more guesses can be accepted."""
    return params.seed is None and not params.is_greedy


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
