"""Parts of the scheduler by themselves: what a plan says about its rows, what lanes keep, in which order policies look."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import add, make_engine, request

from kvpool.errors import InvalidArgumentError, NeverFitsError
from kvpool.scheduling import BatchPlan, Request
from kvpool.scheduling.policies import LongestPrefixMatch
from kvpool.scheduling.running import Lanes


def plan_of(lengths: list[int], drafts: list[int], samples: list[int], num_decode: int) -> BatchPlan:
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = len(lengths)
    return BatchPlan(
        number=0,
        sequences=tuple(SimpleNamespace() for _ in range(rows)),  # type: ignore[arg-type]
        num_decode=num_decode,
        token_ids=np.zeros(int(start[-1]), np.int32),
        positions=np.zeros(int(start[-1]), np.int64),
        slots=np.zeros((1, int(start[-1])), np.int32),
        query_start=start,
        kv_lengths=np.array(lengths, np.int64) + 5,
        lanes=np.arange(rows),
        num_samples=np.array(samples, np.int64),
        num_drafts=np.array(drafts, np.int64),
        is_uniform=False,
        copies=[],
    )


def test_the_rows_of_a_plan_say_where_their_logits_and_samples_are() -> None:
    random = Random(3)
    for _ in range(60):
        num_decode, num_chunks = random.randrange(4), random.randrange(1, 4)
        drafts = [random.choice((0, 0, 1, 3)) for _ in range(num_decode)] + [0] * num_chunks
        lengths = [count + random.choice((1, 1, 2)) for count in drafts[:num_decode]]
        lengths += [random.randrange(1, 6) for _ in range(num_chunks)]
        samples = [1] * num_decode + [random.choice((0, 1, 2)) for _ in range(num_chunks)]
        plan = plan_of(lengths, drafts, samples, num_decode)
        sampling = [row for row, count in enumerate(samples) if count]
        ends = np.cumsum(lengths).tolist()
        logits = [place for row in sampling for place in range(ends[row] - drafts[row] - 1, ends[row])]
        counts = [samples[row] + drafts[row] for row in sampling]
        assert plan.sampling_rows.tolist() == sampling
        assert plan.logits_indices.tolist() == logits
        assert plan.first_samples.tolist() == [sum(counts[:place]) for place in range(len(counts))]
        assert plan.decodes_several.tolist() == [row < num_decode and n > 1 for row, n in enumerate(lengths)]
        assert (plan.num_tokens, plan.num_prefill_tokens) == (sum(lengths), sum(lengths[num_decode:]))
        assert plan.prefills() == [(length, 5) for length in lengths[num_decode:]]
        assert not plan.is_empty


def sequence_of(asked: Request) -> Any:
    return SimpleNamespace(request=asked, tokens=asked.prompt, group=SimpleNamespace(branched=False))


def test_given_a_request_with_more_stop_tokens_then_the_others_stop_where_they_did() -> None:
    lanes = Lanes(3)
    few = lanes.take(sequence_of(request("few", 2, stop_token_ids=[7])))
    none = lanes.take(sequence_of(request("none", 2)))
    many = lanes.take(sequence_of(request("many", 2, stop_token_ids=[0, 1, 2])))
    assert {few: {7, -1}, none: {-1}, many: {0, 1, 2}} == {lane: set(lanes.stops[lane].tolist()) for lane in range(3)}


@pytest.mark.parametrize(
    ("samples", "expected"), [([], 0), ([1, 2], 2), ([5], 1), ([1, 5, 2, 5], 2), ([1, 2, 6], 3), ([6, 5], 1)]
)
def test_tokens_count_up_to_the_first_that_stops(samples: list[int], expected: int) -> None:
    assert request("r", 2, stop_token_ids=[5, 6]).num_until_stop(np.array(samples, np.int32)) == expected


class Waiting:
    """A sequence in a queue."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.group = SimpleNamespace(arrival=name)
        self.index = 0

    def __lt__(self, other: Waiting) -> bool:
        return self.name < other.name


@pytest.mark.parametrize(("limit", "expected"), [(1, [2]), (3, [2, 1, 0]), (4, [2, 1, 0, 3]), (9, [2, 1, 0, 3, 4, 5])])
def test_the_longest_match_goes_first_among_those_that_waited_longest(limit: int, expected: list[int]) -> None:
    policy = LongestPrefixMatch(window=3)
    for name in range(6):
        policy.push(Waiting(name))  # type: ignore[arg-type]
    assert [each.name for each in policy.candidates(limit, lambda each: each.name)] == expected  # type: ignore[attr-defined]


def test_given_several_samples_where_all_is_promised_then_together_they_must_fit() -> None:
    engine = make_engine(capacity="guaranteed")
    add(engine, request("one", 4, 40))
    with pytest.raises(NeverFitsError):
        add(engine, request("two", 4, 40, n=2))
    add(engine, request("shorter", 4, 20, n=2))


def test_a_row_with_drafts_takes_one_token_at_least_and_one_more_than_drafts_at_most() -> None:
    engine = make_engine(max_draft_tokens=4)
    add(engine, request("r", 4, 9))
    [sequence] = engine.step().sequences
    engine.scheduler.propose(sequence, [1, 2])
    plan = engine.scheduler.step()
    assert plan.num_drafts.tolist() == [2]
    for wrong in (0, 4):
        with pytest.raises(InvalidArgumentError, match=f"got {wrong} tokens; its row samples 1 with 2 drafts"):
            engine.scheduler.complete(plan, [1] * wrong, [wrong])


def test_a_sequence_beside_others_of_its_request_loses_only_what_they_do_not_hold() -> None:
    engine = make_engine(policy="fcfs")
    add(engine, request("several", 8, 9, n=2), request("single", 8, 9, first=50))
    for _ in range(3):
        engine.step()
    queues = engine.scheduler._queues
    for sequence in queues.running.members:
        places = int(queues.running.lanes.places[sequence.lane])
        kept = 8 if sequence.request.id == "several" else 0
        assert queues._recompute_seconds(sequence) == queues.costs.prefill_seconds(places - kept, kept)
