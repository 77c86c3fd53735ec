"""A draft guesses the next tokens of each sequence; the engine's model verifies them in one step.

The draft is a smaller model, or the MTP layers that come with the model. Its layers are layers of the same cache. So its keys
and values are paged, found again as prefixes, forked, swapped and rewound with those of the model. A step with drafts is
planned first, with places for them. Then the draft computes the tokens that it does not know yet and guesses, one step for
each guess, and the model computes them all.
A guess is drawn with the parameters and the random number of the token that it stands for. It is accepted if the model draws
the same token: drafts change no answer, neither a greedy one nor that of a seed. Where tokens are drawn without a seed, they
come from the model's distribution, and more guesses are accepted (`Guesses`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvpool.attention import PagedBatch
from kvpool.engine.generation import Generation
from kvpool.engine.params import SamplingParams
from kvpool.engine.runner import ModelRunner
from kvpool.engine.sampling import Guesses, StepSampler
from kvpool.engine.speculation import DraftLength, DraftStats, HiddenStates
from kvpool.model.probing import ModelShape
from kvpool.pools.arrays import Int32Array, Int64Array, within
from kvpool.scheduling import BatchPlan, ScheduledSequence, SchedulerConfig
from kvpool.sequences.batch import CSRTable, SequenceBatch

CATCH_UP_STEPS = 64  # without drafts; behind so many, the draft computes what these have added
MOST_MISSING = 2048  # tokens that the draft catches up with; if it lacks more, it waits for other sequences
HEAD_STEPS = 16  # like CATCH_UP_STEPS, of MTP layers: the hidden states of so many tokens are kept


class GuessSteps(NamedTuple):
    """The steps in which a draft model guesses: every row has one token in each, and some rows one more in the first."""

    positions: Sequence[Int64Array]  # of each step
    slots: Int32Array  # [layer group, token] of all steps
    again: Int64Array  # rows whose older token stands behind the newest of all rows, in the first step
    batch: SequenceBatch

    @property
    def sizes(self) -> list[int]:
        """Tokens of each step."""
        return [len(piece) for piece in self.positions]


class DraftModel:
    """Runs the draft in the steps of the engine: a model, or MTP layers, which guess one after another and read `hidden`.

    The last MTP layer goes on where more tokens are to be guessed than there are layers.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        shape: ModelShape,
        vocabulary: int,
        limits: SchedulerConfig,
        generations: Mapping[Hashable, Generation],
        tokens_of: Callable[[ScheduledSequence], Int32Array],
        hidden: HiddenStates | None = None,
    ) -> None:
        self.runners = runners
        self.runner = runners[0]
        self.length = DraftLength(limits.max_draft_tokens)
        self._vocab_size = shape.vocab_size
        self._vocabulary = vocabulary  # of the engine's model
        self._generations = generations  # by request id
        self._sampler = StepSampler(vocabulary, limits.max_sequences, self.runner.device, generations)
        self._tokens_of = tokens_of
        self._hidden = hidden
        self._back = len(runners) - 1  # known tokens that are computed again: layers read what those before compute
        self._max_tokens = limits.max_tokens_per_step + self._back * limits.max_sequences
        # Tokens that the first step which guesses computes beside the newest one
        self._most_behind = 1 if hidden is None else limits.max_draft_tokens + self._back
        self._known: dict[int, tuple[ScheduledSequence, int, int]] = {}  # by lane: whose, in which residence, how many
        self._num_plain = 0  # steps without drafts since the draft has caught up
        self._num_missing = 0  # tokens that it did not know when that was found to be too much

    def stats(self) -> DraftStats:
        """How drafts do now."""
        return DraftStats(self.length.chosen, self.length.acceptance)

    def choose(self, num_sequences: int) -> int:
        """How many tokens the next step should draft for each of so many sequences."""
        return 0 if self._num_missing > MOST_MISSING else self.length.choose(num_sequences)

    def run(self, plan: BatchPlan, token_ids: Tensor) -> tuple[Tensor, Guesses | None]:
        """The token ids of a step, on the device, with the draft's guesses in the places of drafts.

        Also those guesses that need not be the tokens of a seed. Of sequences that decode, the draft computes what it does
        not know yet when a step has drafts, and now and then besides.
        """
        drafting = np.flatnonzero(plan.num_drafts)
        self._num_plain += not len(drafting)
        is_overdue = self._num_plain >= (CATCH_UP_STEPS if self._hidden is None else HEAD_STEPS)
        if not (len(drafting) or is_overdue):
            return token_ids, None
        firsts = self._catch_up(plan, is_overdue)
        if not len(drafting):
            return token_ids, None
        return self._guess(plan, token_ids, drafting, firsts[drafting])

    def after(self, plan: BatchPlan) -> None:
        """Computes the prompts of a step that was launched: MTP layers read what the model computed in it."""
        if self._hidden is not None:
            self._hidden.begin(plan)
        rows = np.arange(plan.num_decode, len(plan.sequences))
        if len(rows):
            ends = plan.kv_lengths[rows]
            _, firsts = self._begin_at(plan, rows, ends - np.diff(plan.query_start)[rows])
            self._compute(plan, rows, firsts, ends)
            self._note(plan, rows, ends)
        if self._hidden is not None:
            self._hidden.end()

    def _catch_up(self, plan: BatchPlan, is_overdue: bool) -> Int64Array:
        """Computes what is missing before the newest tokens of rows that decode.

        If little is missing before a row's drafts, it is left to their first step. Returns for each row the first token that
        this step computes.
        """
        rows = np.arange(plan.num_decode)
        drafts = plan.num_drafts[rows]
        ends = plan.kv_lengths[rows] - drafts - 1  # the newest token is computed with the drafts
        known, firsts = self._begin_at(plan, rows, ends)
        missing = ends - firsts
        is_short = firsts + self._back > known  # MTP layers begin one after another, and too late for the last of them
        wanted = (drafts > 0) & (missing > np.where(is_short, 0, self._most_behind))
        if is_overdue:
            self._num_plain = 0
            if self._hidden is None:  # MTP layers compute all that they can
                self._num_missing = int(missing.sum())
            wanted |= (drafts == 0) & (missing > 0) & (self._num_missing <= MOST_MISSING)
        chosen = np.flatnonzero(wanted)
        if len(chosen):
            self._compute(plan, chosen, firsts[chosen], ends[chosen])
            known[chosen] = ends[chosen]
            firsts[chosen] = np.maximum(firsts[chosen], ends[chosen] - self._back)
        # A draft model knows its guesses but the last; MTP layers compute them again from what the model says of them
        guessed = plan.kv_lengths[rows] - (1 if self._hidden is None else drafts)
        by_all = drafts.max(initial=0) > self._back  # each layer computes one step of the guesses
        self._note(plan, rows, np.where((drafts > 0) & (firsts + self._back <= known) & by_all, guessed, known))
        return firsts

    def _begin_at(self, plan: BatchPlan, rows: Int64Array, starts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """How many of the first `starts` tokens of some rows the draft has computed, and where it goes on.

        Of one that came from the cache, from the host or from another sequence, a draft model may lack the last ones. MTP
        layers could not compute them: what the model computed for them is not in the cache.
        """
        known, lowest = starts.copy(), np.zeros(len(rows), np.int64)
        for at, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
            sequence = plan.sequences[row]
            found = self._known.get(sequence.lane)
            if self._hidden is None:
                known[at] = max(0, start - 2 * CATCH_UP_STEPS)
            else:
                known[at] = lowest[at] = self._hidden.first(sequence, start)
            if found is not None and found[:2] == (sequence, sequence.residence):
                known[at] = max(min(found[2], start), lowest[at])
        return known, np.maximum(known - self._back, lowest)

    def _note(self, plan: BatchPlan, rows: Int64Array, known: Int64Array) -> None:
        """Remembers how many tokens of some rows the draft has computed."""
        for row, number in zip(rows.tolist(), known.tolist(), strict=True):
            sequence = plan.sequences[row]
            self._known[sequence.lane] = sequence, sequence.residence, number

    def _compute(self, plan: BatchPlan, rows: Int64Array, firsts: Int64Array, ends: Int64Array) -> None:
        """The draft computes tokens `firsts..ends` of some rows, in as many steps as that takes."""
        while len(rows):
            before = np.cumsum(ends - firsts) - (ends - firsts)
            stops = np.clip(firsts + self._max_tokens - before, firsts, ends)
            stops = np.where((stops < ends) & (stops - firsts <= self._back), firsts, stops)
            now = stops > firsts
            if self._hidden is None:
                self.runner.run(*self._step(plan, rows[now], firsts[now], stops[now]))
            else:
                self._compute_heads(self._hidden, plan, rows[now], firsts[now], stops[now])
            left = stops < ends
            rows, ends = rows[left], ends[left]
            firsts = np.where(now, stops - self._back, firsts)[left]

    def _compute_heads(
        self,
        hidden: HiddenStates,
        plan: BatchPlan,
        rows: Int64Array,
        firsts: Int64Array,
        stops: Int64Array,
    ) -> None:
        """Each MTP layer computes tokens `firsts..stops` of some rows.

        A layer reads what the one before it computed for the token before, so it begins one token later. At the first token
        of which anything is known, all begin.
        """
        everyone = zip(rows.tolist(), firsts.tolist(), strict=True)
        is_first = np.array([hidden.first(plan.sequences[row], first) >= first for row, first in everyone])
        inputs: Tensor | None = None
        for number, runner in enumerate(self.runners):
            if inputs is None:
                pieces = zip(rows.tolist(), firsts.tolist(), stops.tolist(), strict=True)
                places = [hidden.before(plan.sequences[row], first, stop, row) for row, first, stop in pieces]
                hidden.read(np.concatenate(places), runner.previous)
            else:
                runner.previous[: len(inputs)] = inputs
            runner.run(*self._step(plan, rows, firsts, stops))
            if number == self._back:
                return
            counts = stops - firsts
            offsets, firsts = np.cumsum(counts) - counts, firsts + ~is_first
            going = firsts < stops
            rows, firsts, stops, is_first, offsets = (each[going] for each in (rows, firsts, stops, is_first, offsets))
            if not len(rows):
                return
            sources = np.repeat(offsets - is_first, stops - firsts) + within(stops - firsts)
            sources[(np.cumsum(stops - firsts) - (stops - firsts))[is_first]] = -1
            inputs = runner.states_at(sources)

    def _step(
        self, plan: BatchPlan, rows: Int64Array, firsts: Int64Array, stops: Int64Array
    ) -> tuple[BatchPlan, Tensor]:
        """A step that computes tokens `firsts..stops` of some rows of a plan, and its token ids on the device."""
        assert plan.manager is not None
        sequences = tuple(plan.sequences[row] for row in rows.tolist())
        pieces = zip(sequences, firsts.tolist(), stops.tolist(), strict=True)
        tokens = np.concatenate([self._tokens_of(sequence)[first:stop] for sequence, first, stop in pieces])
        tokens = np.minimum(tokens, self._vocab_size - 1)  # see `_readable`
        counts = stops - firsts
        query_start = np.append(0, np.cumsum(counts)).astype(np.int32)
        step = BatchPlan(
            number=plan.number,
            sequences=sequences,
            num_decode=0,
            token_ids=tokens,
            positions=np.repeat(firsts, counts) + within(counts),
            slots=plan.manager.slot_mapping(_batch(plan, sequences), firsts, stops),
            query_start=query_start,
            kv_lengths=stops,
            lanes=plan.lanes[rows],
            num_samples=np.zeros(len(counts), np.int64),
            num_drafts=np.zeros(len(counts), np.int64),
            is_steered=np.zeros(len(counts), np.bool_),
            is_uniform=False,
            copies=[],
            manager=plan.manager,
        )
        return step, self.runner.upload(tokens.astype(np.int64))

    def _guess(
        self, plan: BatchPlan, token_ids: Tensor, rows: Int64Array, firsts: Int64Array
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
        # What is missing is computed beside the newest token, for example the last of drafts that were all right.
        older = _Older.of(firsts, positions[0])
        pieces = zip(sequences, firsts.tolist(), positions[0].tolist(), strict=True)
        again = [self._tokens_of(sequence)[first:stop] for sequence, first, stop in pieces]
        slots = np.where(is_draft, plan.slots[:, places], -1)
        steps = _guess_steps(plan, batch, older, positions, slots, drafts, len(self.runners))
        numbers = [newest, (newest + 1 + ahead)[is_draft], np.flatnonzero(is_draft), *again]
        first, targets, sources, rest = self.runner.upload(np.concatenate(numbers, dtype=np.int64)).split_with_sizes(
            [*(len(n) for n in numbers[:3]), len(older.rows)]
        )
        drawing = self._sampler.drawing(plan, rows, positions)
        inputs = torch.cat([token_ids.index_select(0, first), rest])
        if self._hidden is not None:
            self._read_hidden(self._hidden, sequences, older, positions[0])
        guesses, distributions = list[Tensor](), list[Tensor | None]()
        for turn, (runner, ready) in enumerate(self._prepared(steps)):
            inputs = self._readable(inputs)
            logits = runner.decode(inputs, *ready)
            guess, given = drawing.guess(self._of_model(logits[: len(rows)]), turn)
            guesses.append(guess)
            distributions.append(given)
            inputs = self._next_inputs(turn, inputs, guess, older) if turn + 1 < len(ahead) else guess
        drafted = torch.cat(guesses).index_select(0, sources)
        token_ids = token_ids.index_copy(0, targets, drafted)
        if distributions[0] is None:
            return token_ids, None
        free = [_is_free(self._generations[sequence.request.id].params) for sequence in sequences]
        kept = np.flatnonzero(is_draft & free)
        if not len(kept):
            return token_ids, None
        samples = plan.first_samples[np.searchsorted(plan.sampling_rows, rows)] + ahead
        of = self.runner.upload(kept)
        drawn_from = torch.cat([each for each in distributions if each is not None]).index_select(0, of)
        return token_ids, Guesses(samples.ravel()[kept], torch.cat(guesses).index_select(0, of), drawn_from)

    def _read_hidden(
        self, hidden: HiddenStates, sequences: tuple[ScheduledSequence, ...], older: _Older, newest: Int64Array
    ) -> None:
        """Gives the first MTP layer what the model computed for the tokens before those of the first step that guesses."""
        places = [hidden.before(each, stop, stop + 1) for each, stop in zip(sequences, newest.tolist(), strict=True)]
        pieces = zip(sequences, older.firsts.tolist(), newest.tolist(), strict=True)
        places += [hidden.before(sequence, first, stop) for sequence, first, stop in pieces]
        hidden.read(np.concatenate(places), self.runner.previous)

    def _next_inputs(self, turn: int, inputs: Tensor, guess: Tensor, older: _Older) -> Tensor:
        """The tokens of the next step that guesses. Each row of an MTP layer moves on by one token."""
        if self._hidden is None:
            return guess
        runner, other = (self.runners[min(at, self._back)] for at in (turn, turn + 1))
        if turn < self._back and len(older.rows):
            guess = torch.cat([guess, inputs.index_select(0, self.runner.upload(older.next_rows))])
        other.previous[: len(guess)] = runner.hidden[: len(guess)]
        return guess

    def _prepared(self, steps: GuessSteps) -> Iterator[tuple[ModelRunner, tuple[Tensor, Tensor, list[PagedBatch]]]]:
        """Who runs each step that guesses, its positions and slots on the device, and which keys its rows see."""
        sizes = steps.sizes
        groups = {kind.group.index for runner in self.runners for kind in runner.kinds}
        tables = {index: steps.batch.csr(index) for index in groups}
        to = self.runner.plane.prepare(steps.slots, steps.batch).tensor.split_with_sizes(sizes, dim=1)
        where = self.runner.upload(np.concatenate(steps.positions)).split_with_sizes(sizes)
        for turn, (piece, at, into) in enumerate(zip(steps.positions, where, to, strict=True)):
            runner = self.runners[min(turn, self._back)]
            kinds = [(tables[kind.group.index], kind.group.block_size) for kind in runner.kinds]
            yield runner, (at, into, [_paged(table, steps.again, piece + 1, size) for table, size in kinds])

    def _readable(self, token_ids: Tensor) -> Tensor:
        """Token ids that the draft has embeddings for. What only the model pads its vocabulary with does not matter."""
        return token_ids.clamp(max=self._vocab_size - 1) if self._vocabulary > self._vocab_size else token_ids

    def _of_model(self, logits: Tensor) -> Tensor:
        """The draft's logits in the vocabulary of the model."""
        missing = self._vocabulary - self._vocab_size
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _batch(plan: BatchPlan, sequences: tuple[ScheduledSequence, ...]) -> SequenceBatch:
    """The batch of some sequences of a plan, in its order."""
    assert plan.manager is not None
    if len(sequences) == len(plan.sequences):
        return plan.batch
    return plan.manager.batch([each.live_handle() for each in sequences])


def _is_free(params: SamplingParams) -> bool:
    """Whether tokens are drawn and nobody asked for those of a seed: then more guesses can be accepted."""
    return params.seed is None and not params.is_greedy


class _Older(NamedTuple):
    """Tokens before the newest ones that the steps which guess compute, too."""

    firsts: Int64Array  # of each sequence
    rows: Int64Array  # [token]: of which sequence
    positions: Int64Array
    # Where the token behind each stands in a step: the newest tokens of all sequences come first, then these
    next_rows: Int64Array

    @classmethod
    def of(cls, firsts: Int64Array, newest: Int64Array) -> _Older:
        """Those from `firsts` up to the newest tokens."""
        counts = newest - firsts
        rows = np.repeat(np.arange(len(firsts)), counts)
        next_rows = len(firsts) + 1 + np.arange(len(rows))
        is_last = within(counts) == counts[rows] - 1
        return cls(firsts, rows, firsts[rows] + within(counts), np.where(is_last, rows, next_rows))


def _guess_steps(
    plan: BatchPlan,
    batch: SequenceBatch,
    older: _Older,
    positions: Int64Array,
    slots: Int32Array,
    drafts: Int64Array,
    num_models: int,
) -> GuessSteps:
    """The steps that guess, from the newest tokens' `positions` and `slots`: [step, row] and [layer group, step, row].

    `num_models` guess one after another. The first step of each has the older tokens of some rows, too.
    """
    assert plan.manager is not None
    pieces, columns = list(positions), list(slots.swapaxes(0, 1))
    if len(older.rows):
        ends = positions[0] + drafts
        found = plan.manager.slot_mapping(batch, older.firsts, ends)
        before = np.cumsum(ends - older.firsts) - (ends - older.firsts) - older.firsts
        for turn in range(min(num_models, len(pieces))):
            where = older.positions + turn
            held = np.minimum(where, ends[older.rows] - 1)  # behind its last draft, a row writes nothing
            to = np.where(where == held, found[:, before[older.rows] + held], -1)
            pieces[turn] = np.append(pieces[turn], held)
            columns[turn] = np.concatenate([columns[turn], to], axis=1)
    return GuessSteps(pieces, np.concatenate(columns, axis=1, dtype=np.int32), older.rows, batch)


def _paged(table: CSRTable, again: Int64Array, lengths: Int64Array, block_size: int) -> PagedBatch:
    """A row with one query for each sequence of a table, and one more for some of them, as attention sees them."""
    indptr, indices = table.indptr, table.indices
    if len(lengths) >= len(indptr):
        lists = [indices[indptr[at] : indptr[at + 1]] for at in again.tolist()]
        indptr = np.append(indptr, indptr[-1] + np.cumsum([len(each) for each in lists]))
        indices = np.concatenate([indices, *lists])
    return PagedBatch.build(indptr, indices, np.ones(len(lengths), np.int64), lengths, block_size=block_size)
