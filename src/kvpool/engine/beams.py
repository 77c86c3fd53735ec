"""Beam search as transformers does it: the best continuations of all beams go on, as forks that share every block."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvpool.engine.generation import Sample
from kvpool.engine.params import SamplingParams
from kvpool.pools.arrays import Int32Array, Int64Array
from kvpool.scheduling import BatchPlan
from kvpool.scheduling.request import Request, ScheduledSequence
from kvpool.storage.moving import upload


class _Beam(NamedTuple):
    score: float  # sum of log probabilities
    tokens: tuple[int, ...]


class _Hypothesis(NamedTuple):
    """A finished beam."""

    score: float  # with the length penalty
    tokens: tuple[int, ...]
    reason: str


class Ranking(NamedTuple):
    """The best continuations of a request's beams, best first: `tokens[i]` behind `sequences[rows[i]]`."""

    sequences: tuple[ScheduledSequence, ...]
    scores: Tensor
    rows: Tensor
    tokens: Tensor

    def to_host(self) -> Ranking:
        """A copy for the host. It is complete once the device has done the copy."""
        return Ranking(self.sequences, *(part.to("cpu", non_blocking=True) for part in self[1:]))


class BeamSearch:
    """The search of one request. `rank` finds the best continuations of its beams, `advance` decides which go on.

    `rank` keeps the best `num_beams` continuations, and as many more for each stop token. Of the first `num_beams`, those
    that stop become results. The best that do not stop become the next beams. The search ends when the worst result is
    better than the best beam would be if it ended now, or at `max_new_tokens`; with `early_stopping`, when there are enough
    results.
    """

    def __init__(self, params: SamplingParams, request: Request) -> None:
        self._params = params
        self._stops = frozenset(request.stop_ids)
        self._running: list[_Beam] = []
        self._beams: dict[ScheduledSequence, _Beam] = {}  # the running ones, by their sequence
        self._next: dict[ScheduledSequence, list[_Beam]] = {}
        self._hypotheses: list[_Hypothesis] = []

    def rank(self, sequences: Sequence[ScheduledSequence], logits: Tensor) -> Ranking:
        """The best continuations of all beams, on the device: `logits[i]` follow the tokens of `sequences[i]`."""
        known = [self._beam(sequence).score for sequence in sequences]
        scores = logits.float().log_softmax(-1)
        scores += upload(np.array(known, np.float32), scores.device).unsqueeze(1)
        num_kept = min((1 + len(self._stops)) * self._params.num_beams, scores.numel())
        best = scores.flatten().topk(num_kept)
        tokens = best.indices % scores.shape[1]
        return Ranking(tuple(sequences), best.values, best.indices // scores.shape[1], tokens)

    def advance(self, ranking: Ranking) -> None:
        """One step: decides which of the ranked continuations, now on the host, go on."""
        params, width, sequences = self._params, self._params.num_beams, ranking.sequences
        beams = [self._beam(sequence) for sequence in sequences]
        self._next = {sequence: [] for sequence in sequences}
        length = len(beams[0].tokens) + 1
        running: list[_Beam] = []
        best = zip(ranking.scores.tolist(), ranking.rows.tolist(), ranking.tokens.tolist(), strict=True)
        for rank, (score, row, token) in enumerate(best):
            tokens = (*beams[row].tokens, token)
            stops = token in self._stops
            if stops or length == params.max_new_tokens:
                if rank < width:
                    self._keep(_Hypothesis(self._penalised(score, length), tokens, "stop" if stops else "length"))
            elif len(running) < width:
                running.append(_Beam(score, tokens))
                self._next[sequences[row]].append(running[-1])
        if not running or self._cannot_improve(self._penalised(max(running).score, length)):
            running, self._next = [], {sequence: [] for sequence in sequences}
        self._running = running

    def _beam(self, sequence: ScheduledSequence) -> _Beam:
        return self._beams.get(sequence, _Beam(0.0, ()))

    def _keep(self, hypothesis: _Hypothesis) -> None:
        self._hypotheses.append(hypothesis)
        self._hypotheses.sort(key=lambda kept: -kept.score)
        del self._hypotheses[self._params.num_beams :]

    def _cannot_improve(self, best_running: float) -> bool:
        full = len(self._hypotheses) == self._params.num_beams
        return full and (self._params.early_stopping or best_running <= self._hypotheses[-1].score)

    def continuations(self, sequence: ScheduledSequence) -> Int32Array:
        """The tokens that a beam goes on with; empty if it ends here."""
        return np.array([beam.tokens[-1] for beam in self._next[sequence]], np.int32)

    def forked(self, sequence: ScheduledSequence, children: Sequence[ScheduledSequence]) -> None:
        """Assigns the continuations of a beam: the first to its own sequence, the others to the forks of it."""
        self._beams.pop(sequence, None)
        self._beams.update(zip([sequence, *children], self._next.pop(sequence, []), strict=False))

    def results(self, reason: str) -> list[Sample]:
        """The results, best first. If the search was cut short for `reason`, its unfinished beams follow them."""
        # Not the beams in `_beams`: if the request ended while a step was in flight, its sequences were not forked.
        beams = sorted(self._running, reverse=True) if self._running or self._hypotheses else [_Beam(0.0, ())]
        unfinished = [_Hypothesis(self._penalised(beam.score, len(beam.tokens)), beam.tokens, reason) for beam in beams]
        return [
            Sample(index, list(kept.tokens), finish_reason=kept.reason, score=kept.score)
            for index, kept in enumerate([*self._hypotheses, *unfinished][: self._params.n])
        ]

    def _penalised(self, score: float, length: int) -> float:
        return score / math.pow(max(1, length), self._params.length_penalty)


class StepBeams(NamedTuple):
    """The searches whose beams are in a step, and how each ranks what may follow them."""

    rankings: Sequence[tuple[BeamSearch, Ranking]]

    @classmethod
    def rank(cls, plan: BatchPlan, logits: Tensor, searches: Mapping[Hashable, BeamSearch]) -> StepBeams:
        """Ranks what may follow all beams of a step. `searches` are by request id."""
        if not plan.is_steered.any():
            return cls(())
        rows = plan.sampling_rows
        row_of_logits = np.cumsum(plan.num_drafts[rows] + 1) - 1
        places: dict[BeamSearch, list[int]] = {}
        for at in np.flatnonzero(plan.is_steered[rows]).tolist():
            places.setdefault(searches[plan.sequences[int(rows[at])].request.id], []).append(at)
        rankings = []
        for search, mine in places.items():
            sequences = [plan.sequences[row] for row in rows[mine].tolist()]
            of_beams = logits.index_select(0, upload(row_of_logits[mine], logits.device))
            rankings.append((search, search.rank(sequences, of_beams)))
        return cls(rankings)

    def to_host(self) -> StepBeams:
        """A copy for the host. It is complete once the device has done the copy."""
        return StepBeams([(search, ranking.to_host()) for search, ranking in self.rankings])

    @property
    def searches(self) -> dict[ScheduledSequence, BeamSearch]:
        """The search of each beam of the step, also of a search that is over."""
        return {sequence: search for search, ranking in self.rankings for sequence in ranking.sequences}

    def advance(
        self, plan: BatchPlan, tokens: Int32Array, counts: Int64Array, samples_at: Int64Array
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Decides which continuations go on. They take the place of the samples of their rows: of the `counts` samples of
        each row, which are at `samples_at` of the sampled `tokens`.
        """
        for search, ranking in self.rankings:
            search.advance(ranking)
        searches = self.searches
        pieces = np.split(samples_at, np.cumsum(counts)[:-1])
        picked, chosen = list[Int64Array](), list[Int32Array]()
        for at, row in enumerate(plan.sampling_rows.tolist()):
            sequence, indices = plan.sequences[row], pieces[at]
            next_tokens = tokens[indices]
            if plan.is_steered[row]:
                next_tokens = searches[sequence].continuations(sequence)
                indices = np.full(len(next_tokens), plan.first_samples[at])
            counts[at] = len(next_tokens)
            picked.append(indices)
            chosen.append(next_tokens)
        return np.concatenate(chosen).astype(np.int32), counts, np.concatenate(picked)
