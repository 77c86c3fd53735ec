"""The adaptive policy: it learns what comes back, forgets what does not, and keeps the books straight."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import StandInRun

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.eviction import AdaptivePolicy, make_policy
from kvpool.eviction.adaptive import _MIN_CAPACITY, EPOCHS_PER_CACHE, MOST_NEWCOMERS, MOST_NOTES
from kvpool.eviction.experience import (
    EDGES,
    LOWEST,
    MAX_AGE,
    NUM_KINDS,
    Experience,
    _best_rates,
    as_shared,
    kind_of,
)
from kvpool.eviction.ghosts import Ghosts, num_shared
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, replay
from kvpool.replay.bounds import run_model
from kvpool.replay.synth import WorkloadModel, synthesise
from kvpool.scope import NUM_HINTS
from managers import make_manager


def scan_and_chat(num_rounds: int = 150) -> Trace:
    """Short chats that always come back, between long one-time documents that flush an LRU cache."""
    builder = TraceBuilder("scan and chat", unit=16)
    fresh = iter(range(10_000, 10**7))
    for number in range(num_rounds):
        chat = [number % 8 * 10 + depth for depth in range(6)]
        builder.add(number * 1000.0, chat, 16 * len(chat), 0)
        for _ in range(3):
            document = [next(fresh) for _ in range(24)]
            builder.add(number * 1000.0, document, 16 * len(document), 0)
    return builder.build()


def chats_and_strays(num_rounds: int = 400) -> Trace:
    """Questions that nobody follows up beside chats whose second turn always comes: only the turn tells them apart."""
    builder = TraceBuilder("chats and strays", unit=16)
    fresh = iter(range(1000, 10**7))
    system, waiting = [1, 2, 3, 4], []
    for number in range(num_rounds):
        begun = [*system, *(next(fresh) for _ in range(4))]
        waiting.append([*begun, *(next(fresh) for _ in range(4))])
        strays = [[*system, *(next(fresh) for _ in range(8))] for _ in range(3)]
        goes_on = [waiting[-2], [*waiting.pop(0), next(fresh)]] if len(waiting) > 12 else []
        for prompt in [begun, *strays, *goes_on]:
            builder.add(number * 1000.0, prompt, 16 * len(prompt), 0)
    return builder.build()


def kind(run: StandInRun) -> int:
    """The kind that a policy without experience gives a run."""
    policy = AdaptivePolicy()
    policy.add(run)
    policy.victim()
    return int(run.entry.cohort % NUM_KINDS)


def test_given_the_name_then_it_is_made() -> None:
    assert isinstance(make_policy("adaptive"), AdaptivePolicy)


def test_given_nothing_learned_then_the_least_recently_used_goes_first() -> None:
    policy = AdaptivePolicy()
    runs = [StandInRun(last_access=tick, created=tick, fingerprint=tick) for tick in (3, 1, 2)]
    for run in runs:
        policy.add(run)
    order = []
    while len(policy):
        victim = policy.victim()
        order.append(victim.last_access)
        policy.evicted(victim)
        policy.remove(victim)
    assert order == [1, 2, 3]
    with pytest.raises(LookupError, match="no run can be evicted"):
        policy.victim()


def test_given_priorities_then_the_lowest_goes_first_whatever_its_age() -> None:
    policy = AdaptivePolicy()
    old, cheap = StandInRun(last_access=1, fingerprint=1), StandInRun(last_access=9, priority=0, fingerprint=2)
    policy.add(old)
    policy.add(cheap)
    assert policy.victim() is cheap


def test_given_a_run_that_comes_and_goes_then_add_and_remove_are_idempotent() -> None:
    policy = AdaptivePolicy()
    run = StandInRun(last_access=1)
    for _ in range(2):
        policy.add(run)
        assert run in policy
        assert len(policy) == 1
    for _ in range(2):
        policy.remove(run)
        assert run not in policy
        assert len(policy) == 0
    policy.add(run)
    policy.clear()
    assert len(policy) == 0
    assert run.entry is None


def test_given_newcomers_then_they_are_candidates_before_they_are_put_in_order() -> None:
    policy = AdaptivePolicy()
    runs = [StandInRun(last_access=tick, fingerprint=tick) for tick in range(3)]
    for run in runs:
        policy.add(run)
    assert len(policy) == 3
    assert all(run in policy and run not in AdaptivePolicy() for run in runs)
    policy.clear()
    assert len(policy) == 0
    assert [run.entry for run in runs] == [None] * 3


def test_given_a_newcomer_that_is_hit_before_anything_had_to_leave_then_nothing_is_learned_from_it() -> None:
    policy, other = AdaptivePolicy(), AdaptivePolicy()
    run, same = StandInRun(last_access=1, fingerprint=1), StandInRun(last_access=1, fingerprint=1)
    policy.add(run)
    other.add(same)
    assert other.victim() is same  # here it is put in order before it is hit
    for hit in (run, same):
        hit.hits = 1
    policy.remove(run)
    other.remove(same)
    assert run not in policy
    assert len(policy) == 0
    for each in (policy, other):
        each._learn()
    assert policy._learned._hits.sum() == 0 < other._learned._hits.sum()


def test_given_a_newcomer_that_comes_and_goes_then_it_is_one_candidate() -> None:
    policy, run, other = AdaptivePolicy(), StandInRun(last_access=1, fingerprint=1), StandInRun(last_access=2)
    for _ in range(3):
        policy.add(run)
        policy.add(run)
        policy.remove(run)
        policy.remove(run)
    assert len(policy) == 0
    assert run.entry is None
    policy.add(run)
    policy.add(other)
    assert len(policy) == 2
    assert policy.victim() is run
    assert len(policy) == 2


def test_given_newcomers_that_leave_before_anything_had_to_then_the_policy_does_not_keep_them() -> None:
    policy, stays = AdaptivePolicy(), StandInRun(last_access=0)
    policy.add(stays)
    for number in range(1, 500):
        run = StandInRun(last_access=number, fingerprint=number)
        policy.add(run)
        policy.remove(run)
    assert len(policy._newcomers) < 100
    assert policy.victim() is stays


def test_given_a_newcomer_that_moved_to_another_policy_when_its_first_one_is_cleared_then_it_stays_there() -> None:
    policy, below, run = AdaptivePolicy(), AdaptivePolicy(), StandInRun(last_access=1, fingerprint=1)
    policy.add(run)
    policy.remove(run)
    below.add(run)
    policy.clear()
    assert run in below
    assert below.victim() is run


def test_a_run_is_of_the_kind_of_the_request_that_published_it() -> None:
    first = kind(StandInRun(num_blocks=8, fingerprint=1))
    second = kind(StandInRun(num_blocks=8, start=8, turn=1, fan_out=1, fingerprint=1))
    branch = kind(StandInRun(num_blocks=8, start=8, fan_out=5, fingerprint=1))
    longer = kind(StandInRun(num_blocks=16, fingerprint=1))
    assert len({first, second, branch, longer}) == 4
    assert kind(StandInRun(num_blocks=9, fingerprint=1)) == first  # powers of two


def test_a_run_of_the_lowest_priority_is_a_kind_of_its_own() -> None:
    assert kind(StandInRun(num_blocks=8, priority=0, fingerprint=1)) == LOWEST
    assert kind(StandInRun(num_blocks=1, start=8, turn=3, priority=0, fingerprint=1)) == LOWEST


def test_when_what_had_left_comes_back_then_its_turn_is_counted_on() -> None:
    policy = AdaptivePolicy()
    left = StandInRun(num_blocks=8, turn=2, fingerprint=7, last_access=1)
    policy.add(left)
    assert policy.victim() is left
    policy.evicted(left)
    policy.remove(left)
    back = StandInRun(num_blocks=11, fingerprint=7, last_access=2)
    policy.add(back)
    assert policy.victim() is back
    assert (back.turn, back.fan_out) == (3, 1)
    assert back.entry.cohort % NUM_KINDS == kind_of(num_known=8, fan_out=1, turn=3, num_new=3)


def test_when_what_many_had_used_comes_back_then_it_still_counts_as_used_by_many() -> None:
    ghosts = Ghosts(Experience())
    for hits, num_uses in ((0, 1), (2, 3), (3, 4), (9, 10)):
        run = StandInRun(fingerprint=hits, hits=hits, turn=2)
        ghosts.bury(run, run.tokens, 1, None, 0, 0)
        assert ghosts.recognise(run, 1) == (1, 2, num_uses)


def test_given_a_prompt_that_departs_from_one_that_had_left_then_only_what_they_share_came_back() -> None:
    policy = AdaptivePolicy()
    left = StandInRun(num_blocks=4, fingerprint=1, turn=1, content=(1, 2, 3, 4))
    policy.add(left)
    policy.evicted(policy.victim())
    other = StandInRun(num_blocks=6, fingerprint=1, created=1, last_access=1, content=(1, 2, 8, 9, 10, 11))
    policy.add(other)
    policy.victim()
    assert (other.turn, other.fan_out) == (0, 2)  # a branch, not the next turn
    assert policy._learned._reused[2::3] == [2]
    assert policy.num_ghost_blocks == 0  # the rest is followed no longer


def num_followed(policy: AdaptivePolicy) -> int:
    """Blocks whose age is counted, so that the policy knows how long they could have been reused."""
    policy._learn()
    return int(policy._learned._alive_blocks.sum())


def test_given_a_prompt_that_begins_like_one_that_had_left_then_blocks_are_followed_as_often_as_they_are_there() -> (
    None
):
    policy = AdaptivePolicy()
    policy.add(StandInRun(num_blocks=4, fingerprint=1, content=(1, 2, 3, 4)))
    left = policy.victim()
    policy.evicted(left)
    policy.remove(left)
    assert num_followed(policy) == policy.num_ghost_blocks == 4
    policy.add(StandInRun(num_blocks=6, fingerprint=1, last_access=1, content=(1, 2, 3, 9, 10, 11)))
    policy.victim()
    assert policy.num_ghost_blocks == 0
    assert num_followed(policy) == 6


def test_given_a_run_that_was_trimmed_before_it_left_then_all_of_it_is_recognised() -> None:
    policy = AdaptivePolicy()
    left = StandInRun(num_blocks=6, fingerprint=1, content=(1, 2, 3, 4, 5, 6))
    policy.add(left)
    policy.victim()
    left.num_blocks, left.content = 2, (1, 2)
    policy.trimmed(left)
    policy.evicted(left)
    back = StandInRun(num_blocks=7, fingerprint=1, last_access=1, content=(1, 2, 3, 4, 5, 8, 9))
    policy.add(back)
    policy.victim()
    assert policy._learned._reused[2::3] == [5]


def test_given_a_run_whose_head_was_reused_then_its_rest_is_recognised_by_its_own_tokens() -> None:
    policy = AdaptivePolicy()
    run = StandInRun(num_blocks=6, fingerprint=1, content=(1, 2, 3, 4, 5, 6))
    policy.add(run)
    policy.victim()
    policy.remove(run)
    run.start, run.num_blocks, run.fingerprint, run.content = 2, 4, 2, (3, 4, 5, 6)
    policy.add(run)
    policy.evicted(policy.victim())
    back = StandInRun(num_blocks=5, start=2, fingerprint=2, last_access=1, content=(3, 4, 5, 6, 7))
    policy.add(back)
    policy.victim()
    assert policy._learned._reused[2::3] == [2, 4]


@given(left=st.lists(st.integers(0, 2), max_size=9), right=st.lists(st.integers(0, 2), max_size=9))
def test_what_two_prompts_share_is_counted_from_their_beginning(left: list[int], right: list[int]) -> None:
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert num_shared(np.array(left, np.int32).tobytes(), np.array(right, np.int32).tobytes()) == shared


@pytest.mark.parametrize("token", [8, 11])
def test_given_blocks_of_several_tokens_then_a_ghost_is_compared_by_all_of_them(token: int) -> None:
    ghosts, tokens = Ghosts(Experience()), np.arange(12, dtype=np.int32)
    left = StandInRun(num_blocks=3)
    ghosts.bury(left, tokens, 3, None, 0, 0)
    back = StandInRun(num_blocks=4)
    back.tokens = np.append(tokens, np.arange(4, dtype=np.int32))
    back.tokens[token] += 1
    assert ghosts.recognise(back, 1) == (2, 0, 2)


def test_what_a_run_shares_is_judged_by_the_request_that_shared_it_last() -> None:
    policy = AdaptivePolicy()
    shared = StandInRun(num_blocks=8, hits=1, fingerprint=1, last_access=5)
    new = StandInRun(num_blocks=4, start=8, turn=1, fan_out=1, fingerprint=2, last_access=5)
    new.parent = shared
    policy.add(new)
    assert policy.victim() is new
    policy.evicted(new)
    policy.remove(new)
    policy.add(shared)
    assert shared.entry.cohort % NUM_KINDS == as_shared(kind_of(num_known=8, fan_out=1, turn=1, num_new=4))


def test_given_chats_that_go_on_then_they_are_kept_over_questions_that_nobody_follows_up() -> None:
    trace = chats_and_strays()
    lru, adaptive, best = (
        result.hit_blocks
        for result in (
            replay(trace, ReplayConfig("lru", 160)),
            replay(trace, ReplayConfig("adaptive", 160)),
            run_model(trace, "optimum", 160),
        )
    )
    assert adaptive - lru > 0.8 * (best - lru)


def test_given_a_run_that_is_trimmed_then_it_keeps_its_place_and_all_of_it_is_followed() -> None:
    policy = AdaptivePolicy()
    first, second = (StandInRun(last_access=tick, num_blocks=6, fingerprint=tick) for tick in (1, 2))
    policy.add(first)
    policy.add(second)
    assert policy.victim() is first
    first.num_blocks = 2
    policy.trimmed(first)
    assert policy.victim() is first
    assert (len(policy), policy._num_blocks) == (2, 8)
    policy.evicted(first)
    policy.remove(first)
    assert policy.num_ghost_blocks == 6
    first.num_blocks = 5
    policy.trimmed(first)  # one that is no candidate becomes one
    assert first in policy


def test_given_ghosts_that_always_come_back_then_only_those_that_are_followed_are_kept() -> None:
    ghosts = Ghosts(Experience())
    run = StandInRun(fingerprint=1)
    for _ in range(1_000):
        ghosts.bury(run, run.tokens, 1, None, 0, 0)
        ghosts.recognise(run, 1)
    assert ghosts.num_blocks == 0
    assert len(ghosts._queue) < 100


def test_given_ghosts_that_were_forgotten_then_nothing_of_them_is_kept() -> None:
    ghosts = Ghosts(Experience())
    for number in range(100):
        run = StandInRun(fingerprint=number)
        ghosts.bury(run, run.tokens, 1, None, 0, 0)
    ghosts.trim(60, 1)
    youngest = [ghost.fingerprint for ghost in ghosts._queue if ghost is not None]
    assert youngest == list(ghosts.by_fingerprint) == list(range(40, 100))


def test_given_as_many_new_blocks_as_the_cache_holds_then_a_fixed_number_of_epochs_has_passed() -> None:
    policy = AdaptivePolicy()
    for tick in range(_MIN_CAPACITY):
        policy.add(StandInRun(last_access=tick, fingerprint=tick))
    policy.victim()
    assert policy._num_epochs == EPOCHS_PER_CACHE


def test_given_many_newcomers_then_only_so_many_wait() -> None:
    policy = AdaptivePolicy()
    for tick in range(MOST_NEWCOMERS + 5):
        policy.add(StandInRun(last_access=tick, fingerprint=tick))
    assert len(policy._newcomers) == 5
    assert len(policy) == MOST_NEWCOMERS + 5
    assert policy.victim().last_access == 0


def test_given_blocks_that_are_followed_then_they_are_exposed_as_long_as_they_had_each_age() -> None:
    learned = Experience()
    learned.follow(0, 0, 5)  # of two kinds
    learned.follow(1, 0, 2)
    learned.follow(0, 1000, -1)
    learned.digest(2000, 1.0)
    assert learned._exposure[:, 0].tolist() == [5 * EDGES[1], 2 * EDGES[1]]
    assert learned._exposure.sum(axis=1).tolist() == [4 * 2000 + 1000, 2 * 2000]
    assert not learned._exposure[:, np.array(EDGES) >= 2000].any()


def test_given_time_in_one_piece_or_in_many_then_the_same_exposure_is_counted() -> None:
    random = np.random.default_rng(3)
    often, once = Experience(), Experience()
    followed: dict[int, int] = {}
    for now in range(0, 300_000, 1000):
        for _ in range(2):
            cohort = int(random.integers(now + 1)) // 1000 * 1000 * NUM_KINDS + int(random.integers(4))
            blocks = int(random.integers(20)) - followed.get(cohort, 0) // 2
            followed[cohort] = followed.get(cohort, 0) + blocks
            for learned in (often, once):
                learned.follow(cohort, now, blocks)
        often.digest(now, 1.0)
    once.digest(299_000, 1.0)
    rows = [once._rows[kind] for kind in often._rows]
    assert np.allclose(often._exposure, once._exposure[rows])


@pytest.mark.parametrize("peak", [0, 5, 20])
def test_values_are_the_best_rates_that_any_time_of_keeping_gives(peak: int) -> None:
    hazard = 1e-4 * np.exp(-np.abs(np.arange(len(EDGES)) - peak) / 4)[None]
    widths = np.diff([*EDGES, MAX_AGE])
    for start, best in enumerate(_best_rates(hazard.copy(), peak)[0]):
        left, hits, time, rates = 1.0, 0.0, 0.0, []
        for rate, width in zip(hazard[0, start:], widths[start:], strict=True):
            fading = np.exp(-rate * width)
            hits, time, left = hits + left * (1 - fading), time + left * (1 - fading) / rate, left * fading
            rates.append(hits / time)
        assert best == pytest.approx(max(rates))
    assert np.isfinite(_best_rates(0 * hazard, peak)).all()


def test_given_hints_after_which_reuse_comes_soon_or_late_then_each_is_valued_by_ages_of_its_own() -> None:
    soon, late = (kind_of(0, 0, 0, 8, hint) for hint in (1, 2))
    learned = Experience()
    for since in range(0, 4_000_000, 10_000):
        for kind, age, is_reused in ((soon, 2_000, since % 40_000), (late, 300_000, since % 20_000)):
            cohort = since * NUM_KINDS + kind
            learned.follow(cohort, since, 8)
            learned.follow(cohort, since + (age if is_reused else 1_000_000), -8)
            if is_reused:
                learned.count(cohort, since + age, 8)
    learned.digest(5_000_000, 1.0)
    worth = learned.worth(400, 200_000.0)
    values = {kind: worth.of(kind) for kind in (soon, late)}
    young, old = (bisect_right(EDGES, age) - 1 for age in (1_000, 200_000))
    assert values[soon][young] > 10 * values[late][young]
    assert values[late][old] > 10 * values[soon][old]


def test_given_a_known_history_then_values_are_those_with_which_the_hit_rates_of_the_docs_were_measured() -> None:
    """Whoever changes how values are computed measures the hit rates again, then these numbers."""
    kinds = [kind_of(0, 0, 0, 8), kind_of(4, 1, 1, 30), kind_of(9, 3, 2, 300, 1), kind_of(9, 9, 9, 3000, 2)]
    kinds += [as_shared(kind_of(9, 9, 1, 2)), LOWEST]
    learned = Experience()
    for turn in range(40):
        since = turn * 5_000
        for place, kind in enumerate(kinds):
            cohort, age = since * NUM_KINDS + kind, 700 * (place + 1) ** 2 + 90 * turn
            learned.follow(cohort, since, 8)
            if (turn + place) % 3:
                learned.count(cohort, since + age, 5)
                learned.follow(cohort, since + age, -8)
        if turn % 10 == 9:
            learned.digest(since + 4_000, 0.9)
    worth = learned.worth(600, 30_000.0)
    values = [worth.of(kind)[::6] for kind in [*kinds, kinds[0] + 1]]  # the last one was never met
    expected = [
        [6.84383e-05, 8.51702e-05, 1.87154e-05, 1.04608e-07, 6.9713e-08, 5.97095e-08, 9.88077e-09, 1.63272e-09],
        [5.63359e-05, 6.97539e-05, 1.52649e-05, 8.53223e-08, 5.68603e-08, 4.87011e-08, 8.0591e-09, 1.3317e-09],
        [4.04843e-05, 4.52607e-05, 0.000126879, 1.94068e-07, 1.09762e-07, 4.89061e-08, 8.09301e-09, 1.33731e-09],
        [3.02564e-05, 3.22e-05, 4.86662e-05, 1.82251e-07, 1.01347e-07, 4.6722e-08, 7.73159e-09, 1.27759e-09],
        [2.08862e-05, 2.13332e-05, 2.46091e-05, 1.21938e-06, 3.036e-07, 5.06769e-08, 8.38604e-09, 1.38573e-09],
        [3.40019e-05, 4.17205e-05, 9.06383e-06, 5.06617e-08, 3.37619e-08, 2.89172e-08, 4.78524e-09, 7.90725e-10],
        [6.2874e-05, 7.8062e-05, 1.71208e-05, 9.56955e-08, 6.37732e-08, 5.46221e-08, 9.0389e-09, 1.49361e-09],
    ]
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_given_nothing_seen_then_what_is_shared_is_worth_more_than_the_rest_before_and_after_a_digest() -> None:
    learned = Experience()
    before = learned.worth(64, 32_000.0)
    learned.digest(1_000, 0.9)
    after = learned.worth(64, 32_000.0)
    own, shared = [kind_of(0, 0, 0, 4), kind_of(9, 9, 3, 400, 2)], [as_shared(kind_of(9, out, 0, 0)) for out in (1, 4)]
    for kinds in (own, shared):
        assert all(values.of(kind) == before.of(kinds[0]) for values in (before, after) for kind in kinds)
    np.testing.assert_allclose(np.array(before.of(shared[0])) / before.of(own[0]), 1.181821)  # as by one block
    small = learned.worth(1, 1.0)
    assert small.of(shared[0])[-1] / small.of(own[0])[-1] == pytest.approx(4.0)  # at most, in the smallest cache, too


def test_given_a_kind_that_was_not_met_then_it_is_worth_what_others_of_its_fan_out_and_hint_are() -> None:
    learned = Experience()
    often, seldom = as_shared(kind_of(9, 9, 0, 0)), kind_of(9, 9, 0, 4)
    for since in range(0, 400_000, 10_000):
        for kind in (often, seldom):
            learned.follow(since * NUM_KINDS + kind, since, 8)
            learned.follow(since * NUM_KINDS + kind, since + 5_000, -8)
        learned.count(since * NUM_KINDS + often, since + 5_000, 8)
    learned.digest(400_000, 1.0)
    worth = learned.worth(80, 50_000.0)
    assert worth.of(as_shared(kind_of(9, 9, 3, 0))) == pytest.approx(worth.of(often), rel=0.1)
    assert worth.of(often)[4] > worth.of(kind_of(9, 1, 3, 400))[4] > worth.of(kind_of(9, 9, 3, 400))[4]


def test_what_is_shared_leads_by_one_reuse_of_the_usual_length() -> None:
    own, shared = kind_of(9, 2, 0, 8), as_shared(kind_of(9, 2, 0, 8))

    def lead(num_runs: int, blocks: int) -> float:
        learned = Experience()
        for kind in (own, shared):
            for moment in range(num_runs):
                learned.follow(kind, moment, 2 * blocks)
                learned.count(kind, 4_000 + moment, blocks)
        learned.digest(9_000, 1.0)
        worth = learned.worth(1_000, 9_000.0)
        return worth.of(shared)[0] / worth.of(own)[0]

    assert lead(1, 800) > lead(10, 80) > lead(100, 8) > 1.0  # the same blocks in more runs say more


def test_kinds_are_numbered_without_gaps() -> None:
    fans, sizes = [(0, 0), (9, 1), (9, 3), (9, 4)], [0, *(2**power for power in range(12))]
    own = {
        kind_of(num_known, fan_out, turn, size, hint)
        for num_known, fan_out in fans
        for turn in range(6)
        for size in sizes
        for hint in range(NUM_HINTS)
    }
    assert sorted({*own, *map(as_shared, own), LOWEST}) == list(range(NUM_KINDS))


def test_what_is_shared_is_of_one_kind_however_much_is_added_to_it() -> None:
    assert len({as_shared(kind_of(9, 9, 0, size)) for size in (0, 1, 30, 5000)}) == 1
    told_apart = [kind_of(0, 0, 0, 4), *(kind_of(9, out, turn, 4, 1) for out in (1, 2, 4) for turn in range(3))]
    assert len(set(map(as_shared, told_apart))) == len(told_apart)


def test_kinds_tell_sizes_apart_in_powers_of_two_up_to_512_blocks() -> None:
    assert len({kind_of(0, 0, 0, size) for size in (0, *(2**power for power in range(10)))}) == 11
    assert kind_of(0, 0, 0, 512) == kind_of(0, 0, 0, 4096)


def test_what_is_shared_goes_on_a_conversation_if_one_request_has_shared_it() -> None:
    once, twice = (kind(StandInRun(num_blocks=8, hits=hits, turn=1)) for hits in (1, 2))
    assert (once, twice) == (as_shared(kind_of(8, 1, 2, 0)), as_shared(kind_of(8, 2, 0, 0)))


def test_what_was_said_about_the_continuation_makes_a_kind_of_its_own() -> None:
    said = {kind(StandInRun(num_blocks=8, fingerprint=1, hint=hint)) for hint in range(NUM_HINTS)}
    assert len(said) == NUM_HINTS


def test_given_documents_that_flush_the_cache_then_what_comes_back_is_kept() -> None:
    trace = scan_and_chat()
    lru, adaptive = (replay(trace, ReplayConfig(name, 200)).hit_blocks for name in ("lru", "adaptive"))
    best = run_model(trace, "optimum", 200).hit_blocks
    assert lru == 0
    assert adaptive > 0.5 * best


def test_given_popular_beginnings_in_a_cache_of_a_few_prompts_then_those_asked_for_most_are_kept() -> None:
    shared, own = WorkloadModel(16, 0.1, num_stems=74, stem_blocks=120.0, unshared=0.04), (3.4, 1.5)
    model = replace(shared, first_blocks=own, continues=(0.0,))
    traces = [synthesise(model, 700, seed=seed) for seed in range(3)]
    adaptive, s3fifo = (
        sum(replay(trace, ReplayConfig(policy, 777)).hit_blocks for trace in traces)
        for policy in ("adaptive", "s3fifo")
    )
    assert adaptive > s3fifo


def test_given_eviction_under_load_then_the_manager_stays_consistent() -> None:
    random = np.random.default_rng(5)
    layers = [LayerSpec(kv_heads=1, head_dim=16)]
    manager = KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=64, host_blocks=64, eviction_policy="adaptive"))
    for number in range(400):
        stem = int(random.integers(12)) * 100
        prompt = [*range(stem, stem + int(random.integers(4, 40))), *random.integers(5000, 9000, 3).tolist()]
        handle = manager.allocate(number, prompt)
        manager.commit(handle)
        manager.free(handle)
        manager.take_copies()
        if number % 40 == 0:
            manager.check()
    manager.check()
    assert sum(manager.stats().hit_blocks.values()) > 0


def test_given_many_evictions_then_ghosts_are_bounded_by_the_cache() -> None:
    trace = scan_and_chat()
    policies = []

    def make() -> AdaptivePolicy:
        policies.append(AdaptivePolicy())
        return policies[-1]

    layers = [LayerSpec(kv_heads=1, head_dim=1)]
    manager = KVCacheManager(KVCacheConfig(layers, 1, gpu_blocks=200, watermark=0.0), policy=make)
    for number, request in enumerate(trace):
        handle = manager.allocate(number, request.ids)
        manager.commit(handle)
        manager.free(handle)
    assert 0 < max(policy.num_ghost_blocks for policy in policies) <= 4 * 200


def test_given_ever_new_sessions_and_tenants_then_what_is_held_of_them_is_bounded() -> None:
    policy, blocks, most = AdaptivePolicy(), 0, [0, 0]
    for tick in range(4_000):
        above = StandInRun(fingerprint=-1 - tick) if tick % 2 else None
        run = StandInRun(
            num_blocks=1 + tick % 7,
            start=4 * (tick % 2),
            last_access=tick,
            created=tick,
            last_access_at=tick * 0.3,
            fingerprint=tick,
            turn=tick % 3,
            hint=tick % 4,
            session=f"s{tick}",
            tenant=f"t{tick}",
            parent=above,
        )
        policy.add(run)
        blocks += run.num_blocks
        while blocks > 200:
            victim = policy.victim()
            blocks -= victim.num_blocks
            policy.evicted(victim)
            policy.remove(victim)
        order, learned, ghosts = policy._order, policy._learned, policy._ghosts
        held = [
            ghosts.by_fingerprint,
            ghosts._queue,
            ghosts._followers,
            policy._epochs,
            order._rows,
            order._by_value,
            order._by_age,
            learned._alive,
            learned._rows,
            learned._begun,
            learned._ended,
        ]
        half = tick // 2_000
        most[half] = max(most[half], sum(map(len, held)))
    assert most[1] <= 1.1 * most[0]
    assert policy.num_ghost_blocks <= 4 * 206  # a run comes before another one goes


def test_given_prompts_that_only_come_again_then_what_is_noted_of_them_is_bounded() -> None:
    policy, run = AdaptivePolicy(), StandInRun(last_access=0, fingerprint=1)
    policy.add(run)
    for tick in range(1, 3 * MOST_NOTES):
        policy.remove(run)
        run.hits, run.last_access = tick, tick
        policy.add(run)
    assert policy._learned.num_noted <= MOST_NOTES + 2
    assert policy.victim() is run


def test_given_only_runs_that_were_used_before_they_came_then_what_is_noted_of_them_is_bounded() -> None:
    policy = AdaptivePolicy()
    for tick in range(1, 3 * MOST_NOTES):
        policy.add(StandInRun(last_access=tick, created=tick, fingerprint=tick, hits=1))
        if tick > 64:
            policy.evicted(policy.victim())
    assert policy._learned.num_noted <= MOST_NOTES + 2


def test_runs_that_come_back_at_once_or_hardly_ever_have_a_value_at_every_age() -> None:
    learned = Experience()
    for age in range(0, 64_000, 1000):  # reused so often early that almost nothing of it is left behind
        learned.follow(0, age, 1_000_000)
        learned.count(0, age + 1, 1_000_000)
        learned.follow(0, age + 1, -1_000_000)
    learned.follow(0, 128_000, 1_000_000)
    learned.digest(256_000, 1.0)
    values = learned.worth(64, 32_000.0).of(0)
    assert all(0.0 < value < 10 for value in values)
    late = values[bisect_right(EDGES, 128_000) - 1]
    assert late < 0.01 * values[0]


def test_runs_know_the_turn_of_their_request_and_how_many_went_on_from_the_same_place() -> None:
    manager = make_manager(gpu_blocks=64)

    def serve(prompt: list[int]) -> tuple[int, int]:
        handle = manager.allocate(len(prompt), prompt)
        manager.commit(handle)
        node = manager._cache.rows.tips[handle.row]
        manager.free(handle)
        return node.turn, node.fan_out

    chat = list(range(12))
    assert serve(chat) == (0, 0)
    for turn in (1, 2, 3):
        chat += range(100 * turn, 100 * turn + 8)
        assert serve(chat) == (turn, 1)
    others = [serve([*range(12), *range(1000 * other, 1000 * other + 8)]) for other in (1, 2)]
    assert others == [(0, 4), (0, 5)]  # three turns of the chat had passed there
