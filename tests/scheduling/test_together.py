"""Tokens that see one another: one step computes all of them, whatever limits a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import add, make_engine, request

from kvpool.errors import InvalidArgumentError, NeverFitsError
from managers import make_manager


def cuts(engine: Any, name: str) -> list[int]:
    """Where the steps of a request end, until all is done."""
    ends = []
    while engine.scheduler.has_work:
        plan = engine.step()
        rows = [row for row, sequence in enumerate(plan.sequences) if sequence.request.id == name]
        ends += plan.kv_lengths[rows].tolist()
        engine.manager.check()
    return ends


@pytest.mark.parametrize("limits", [{}, {"max_chunk_tokens": 3}, {"max_step_seconds": 1e-9}])
def test_given_a_span_then_no_step_ends_inside_it(limits: dict[str, Any]) -> None:
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=12, max_sequences=4, **limits)
    add(engine, request("a", 5, first=100, max_new_tokens=30), request("b", 40, together=[(9, 17), (17, 26)]))
    ends = cuts(engine, "b")
    assert 40 in ends
    assert not {*range(10, 17), *range(18, 26)} & set(ends)


def test_given_others_that_take_the_step_then_a_span_waits_and_its_request_is_not_passed() -> None:
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=12, max_sequences=4)
    add(engine, request("a", 8, first=100), request("b", 9, together=[(0, 9)]), request("c", 2, first=200))
    first, second = engine.step(), engine.step()
    assert [sequence.request.id for sequence in first.sequences] == ["a"]
    assert [sequence.request.id for sequence in second.sequences] == ["a", "b", "c"]
    assert np.diff(second.query_start).tolist() == [1, 9, 2]


def test_given_a_cached_part_of_a_span_then_the_rest_is_computed_at_once() -> None:
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=12, max_sequences=4)
    add(engine, request("a", 8))
    engine.drain()
    add(engine, request("b", 20, together=[(4, 13)], max_new_tokens=1))
    assert cuts(engine, "b")[0] >= 13


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_given_too_little_memory_then_spans_are_still_computed_whole(mode: str) -> None:
    manager = make_manager(gpu_blocks=14, host_blocks=16)
    engine = make_engine(manager, max_tokens_per_step=16, max_sequences=4, preemption=mode)
    requests = [
        request(name, 20, 14, first=100 * number, together=[(3, 12)]) for number, name in enumerate("abc", start=1)
    ]
    add(engine, *requests)
    ends = cuts(engine, "c")
    assert not set(range(4, 12)) & set(ends)
    assert engine.scheduler.stats.preemptions > 0
    engine.assert_right(*requests)


def test_given_a_span_that_fits_into_no_step_then_the_request_is_refused() -> None:
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=12, max_sequences=4)
    with pytest.raises(NeverFitsError, match=r"compute 10 of its tokens at once.*max_tokens_per_step=13"):
        engine.scheduler.add(request("a", 20, together=[(2, 12)]))


@pytest.mark.parametrize("together", [5, [3], [(1, 1)], [(0, 21)], [(0, 5), (4, 6)], [("a", 2)]])
def test_given_no_spans_of_the_prompt_then_a_request_is_refused(together: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        request("a", 20, together=together)
