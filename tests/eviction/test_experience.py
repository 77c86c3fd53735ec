"""What is learned from a known history, in numbers: kinds, values by age, and when values are worked out anew."""

from __future__ import annotations

import pytest
from stand_in import StandInRun

from kvpool.eviction import AdaptivePolicy
from kvpool.eviction.experience import EDGES, LOWEST, MAX_AGE, NUM_KINDS, Experience, as_shared, bin_of, kind_of
from kvpool.eviction.ghosts import Ghosts
from kvpool.eviction.kind_rows import WEIGHTS
from kvpool.scope import NUM_HINTS

KINDS = (
    kind_of(0, 0, 0, 5),
    kind_of(4, 1, 1, 2),
    kind_of(4, 1, 1, 2, hint=1),
    kind_of(9, 5, 0, 3),
    as_shared(kind_of(0, 0, 0, 4)),
    as_shared(kind_of(7, 9, 0, 4, hint=2)),
    LOWEST,
)
BINS = (0, 1, 4, 9, 14, 20, 30)


def experienced() -> Experience:
    """Seven kinds, met every half a second for half a minute, some of them reused sooner or later."""
    experience = Experience()
    for step in range(60):
        since = step * 500
        for number, kind in enumerate(KINDS):
            cohort = since * NUM_KINDS + kind
            experience.follow(cohort, since, 3 + number)
            if (step * 7 + number * 3) % (number + 2) == 0:
                later = since + 300 * (1 + (step * 5 + number) % 9) * (number + 1)
                experience.count(cohort, later, 2 + number)
                experience.follow(cohort, later, -2 - number)
        if step % 20 == 19:
            experience.digest(since + 400, 0.9)
    return experience


def test_values_follow_from_what_was_reused_at_which_age() -> None:
    worth = experienced().worth(40, 9000.0)
    found = [[worth.of(kind)[place] for place in BINS] for kind in (*KINDS, kind_of(3, 2, 2, 100))]
    expected = [
        [7.594756e-05, 9.156521e-05, 0.0001106766, 5.23235e-05, 1.21495e-05, 2.710797e-08, 2.710797e-08],
        [4.923776e-05, 5.922281e-05, 7.148721e-05, 3.359391e-05, 7.800498e-06, 1.740447e-08, 1.740447e-08],
        [2.738396e-05, 3.064704e-05, 5.248118e-05, 2.816993e-05, 1.016932e-07, 3.460876e-08, 1.257242e-08],
        [2.978673e-05, 3.576682e-05, 4.313138e-05, 2.01817e-05, 4.686186e-06, 1.045582e-08, 1.045582e-08],
        [1.471553e-05, 1.504459e-05, 1.555276e-05, 4.88848e-05, 5.264354e-09, 5.264354e-09, 5.264354e-09],
        [2.075986e-07, 2.185862e-07, 2.377549e-07, 6.37548e-07, 4.244478e-09, 4.244478e-09, 4.244478e-09],
        [2.026026e-05, 2.430791e-05, 2.929894e-05, 1.368079e-05, 3.176676e-06, 7.087799e-09, 7.087799e-09],
        [2.935586e-05, 3.482749e-05, 4.252926e-05, 2.328908e-05, 4.350686e-06, 9.601504e-08, 1.251499e-08],
    ]
    assert found == [pytest.approx(row, rel=1e-5) for row in expected]


@pytest.mark.parametrize(("capacity", "turnover"), [(1, 0.0), (1, 1.0), (64, 1.0), (40, 9000.0)])
def test_where_nothing_is_known_reuse_gets_rarer_with_age(capacity: int, turnover: float) -> None:
    time = max(turnover, 1.0)
    usual = 1 / (capacity * time / 32 + 1)
    ends = [*EDGES[1:], MAX_AGE]
    rarer = [usual / 4 / ((start + end) / 2 / (time + 1) + 0.125) for start, end in zip(EDGES, ends, strict=True)]
    most = [12 / (end - start) for start, end in zip(EDGES, ends, strict=True)]
    expected = [min(rate, cap) for rate, cap in zip(rarer, most, strict=True)]
    assert Experience().worth(capacity, turnover).of(5) == pytest.approx(expected, rel=1e-6)


def test_what_always_comes_at_once_is_worth_twelve_reuses_in_the_time_of_its_bin() -> None:
    experience = Experience()
    for moment in range(2000):
        experience.count(moment * NUM_KINDS + 3, moment, 1000)
    experience.follow(3, 0, 1)
    experience.digest(1, 1.0)
    assert experience.worth(1, 1.0).of(3)[0] == 12 / 256


def test_notes_wait_for_the_next_digest() -> None:
    experience = Experience()
    assert not experience.has_news
    experience.follow(1, 0, 4)
    assert (experience.num_noted, experience.has_news) == (1, False)
    experience.count(1, 5, 4)
    assert (experience.num_noted, experience.has_news) == (2, True)
    experience.digest(9, 1.0)
    assert (experience.num_noted, experience.has_news) == (0, False)


def test_kinds_are_told_apart_by_place_fan_out_hint_turn_and_size() -> None:
    def place(kind: int) -> tuple[int, int, int, int]:
        rest, size = divmod(kind, 11)
        rest, turn = divmod(rest, 4)
        return *divmod(rest, NUM_HINTS), turn, size

    fans = {(known, out): place(kind_of(known, out, 0, 0))[0] for known in (0, 1, 2) for out in (0, 1, 2, 3, 4)}
    assert {key: fan for key, fan in fans.items() if key[0] < 2 and fan} == {}
    assert [fans[2, out] for out in range(5)] == [1, 1, 2, 2, 3]
    assert [place(kind_of(2, 0, turn, 0))[2] for turn in (0, 2, 3, 4, 9)] == [0, 2, 3, 3, 3]
    assert [place(kind_of(2, 0, 0, new))[3] for new in (0, 1, 2, 3, 4, 511, 512, 1023, 1024, 5000)] == [
        0,
        1,
        2,
        2,
        3,
        9,
        10,
        10,
        10,
        10,
    ]
    assert place(kind_of(2, 4, 3, 1, NUM_HINTS - 1)) == (3, NUM_HINTS - 1, 3, 1)
    last = kind_of(9, 9, 9, 9999, NUM_HINTS - 1)
    assert (as_shared(0), as_shared(last), as_shared(as_shared(last))) == (last + 1, LOWEST - 1, LOWEST - 1)


def test_ages_fall_into_bins_that_widen() -> None:
    assert EDGES[:4] == [0, 256, 346, 467]
    assert EDGES[-1] < MAX_AGE <= EDGES[-1] * 1.36
    for number, edge in enumerate(EDGES):
        assert bin_of(edge) == number
        assert bin_of(max(0, edge - 1)) == max(0, number - 1)
    assert bin_of(MAX_AGE) == bin_of(2 * MAX_AGE) == len(EDGES) - 1


def test_what_followed_a_run_counts_as_reused_as_far_as_its_lost_blocks_reach() -> None:
    learned = Experience()
    ghosts = Ghosts(learned)
    for number, leader in ((2, 1), (3, 2), (4, 3)):
        run = StandInRun(num_blocks=2, fingerprint=number)
        ghosts.bury(run, run.tokens, 2, leader, 10 * NUM_KINDS + number, 0)
    ghosts.count_behind(1, 3, 50)
    assert learned._reused == [2, 40, 2, 3, 40, 1]  # kind, age, blocks
    assert (list(ghosts.by_fingerprint), ghosts.num_blocks) == ([4], 2)


def test_a_reused_run_that_was_trimmed_counts_what_followed_it() -> None:
    policy = AdaptivePolicy()
    parent = StandInRun(num_blocks=3, fingerprint=1)
    child = StandInRun(num_blocks=1, start=3, fingerprint=2, parent=parent)
    for run in (child, parent):
        policy.add(run)
    policy.evicted(child)
    parent.num_blocks = 2
    policy.trimmed(parent)
    parent.hits = 1
    policy.remove(parent)
    assert policy.num_ghost_blocks == 0


def test_blocks_weigh_more_the_deeper_they_stand() -> None:
    policy = AdaptivePolicy()
    policy.weigh(1.0)
    depths = {
        depth: policy._weight_class(StandInRun(start=depth - 2, num_blocks=3)) for depth in (2, 3, 4, 7, 15, 10**9)
    }
    assert depths == {2: 3, 3: 4, 4: 5, 7: 6, 15: 8, 10**9: WEIGHTS - 1}


def test_values_are_worked_out_when_enough_was_met() -> None:
    policy = AdaptivePolicy()
    enough = {}
    for met in (0, 16 * 32, 16 * 33, 16 * 256, 10**6):
        policy._num_met_before = met
        policy._learned.has_news = True
        enough[met] = policy._enough_to_learn()
    policy._learned.has_news = False
    assert (enough, policy._enough_to_learn()) == ({0: 32, 512: 32, 528: 33, 4096: 256, 10**6: 256}, 1024)
