"""Several requests admitted in one operation: what becomes of each, and that nobody can tell them from single ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import managers
from kvpool import KVCacheHandle
from kvpool.errors import DuplicateRequestError, InvalidArgumentError, NeverFitsError, OutOfBlocksError
from kvpool.recording import TraceRecorder, replay_recording

make_manager = partial(managers.make_manager, gpu_blocks=8, clock=lambda: 7.0)


def test_given_several_requests_then_each_has_its_handle_in_their_order() -> None:
    manager = make_manager()
    first, second = manager.allocate_batch(
        [{"request_id": "a", "tokens": [1, 2, 3, 4, 5]}, {"request_id": "b", "num_tokens": 9, "lookahead": 3}]
    )
    assert isinstance(first, KVCacheHandle)
    assert isinstance(second, KVCacheHandle)
    assert manager.handles == [first, second]
    assert (first.num_reserved, second.num_reserved, second.num_blocks) == (5, 9, 3)
    manager.check()


def test_given_requests_that_are_refused_then_the_others_are_admitted_and_each_refusal_is_named() -> None:
    manager = make_manager()
    results = manager.allocate_batch(
        [
            {"request_id": "a", "tokens": [1] * 20},
            {"request_id": "a", "tokens": [2]},
            {"request_id": "b", "tokens": [3] * 40},
            {"request_id": "c", "tokens": [4] * 16},
            {"request_id": "d", "tokens": [4] * 9, "reserve": 10},
            {"request_id": "e", "tokens": [5] * 12},
        ]
    )
    kinds = [
        KVCacheHandle,
        DuplicateRequestError,
        NeverFitsError,
        OutOfBlocksError,
        InvalidArgumentError,
        KVCacheHandle,
    ]
    assert [type(result) for result in results] == kinds
    assert [handle.request_id for handle in manager.handles] == ["a", "e"]
    manager.check()


def test_given_the_prompt_of_an_earlier_one_in_the_batch_then_it_is_found_in_flight_as_after_single_calls() -> None:
    manager = make_manager()
    manager.allocate_batch([{"request_id": "a", "tokens": [1] * 8}])
    assert manager.match_prefix([1] * 8).in_flight


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([{"request_id": "a", "tokens": [1]}, {"tokens": [1]}], r"has a request_id .*got \['tokens'\]"),
        ([{"request_id": "a", "tokens": [1]}, {"request_id": "b", "token": [1]}], "may have .*reserve.*'token'"),
        ([{"request_id": "a", "tokens": [1]}, "b"], "a mapping of allocate's arguments, got 'b'"),
        (7, "a list of requests, got 7"),
    ],
)
def test_given_something_that_is_no_request_then_nothing_is_admitted(requests: Any, message: str) -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match=message):
        manager.allocate_batch(requests)
    assert manager.handles == []


def test_given_a_batch_then_callbacks_run_once_and_see_all_of_it() -> None:
    manager, seen = make_manager(), []
    manager.on_operation(lambda: seen.append(len(manager._cache.requests)))
    manager.allocate_batch([{"request_id": name, "tokens": [1]} for name in "abc"])
    assert seen == [3]


def test_given_a_recording_then_a_batch_replays_as_the_single_admissions_it_is(tmp_path: Path) -> None:
    manager = make_manager(gpu_blocks=6)
    with TraceRecorder(tmp_path / "r.jsonl") as recorder:
        recorder.attach(manager)
        for start in range(0, 12, 2):
            results = manager.allocate_batch(
                [{"request_id": start + n, "tokens": [1, 2, 3, 4, start + n, 6, 7, 8, 9]} for n in (0, 1, 2)]
            )
            handles = [result for result in results if isinstance(result, KVCacheHandle)]
            assert len(handles) == 2  # the third finds no room
            for handle in handles:
                manager.commit(handle)
            manager.free_batch(handles)
    replayed = replay_recording(tmp_path / "r.jsonl")
    assert manager.stats().allocation_failures == 6  # which changed nothing, so a recording does not hold them
    assert replayed == replace(manager.stats(), allocation_failures=0)
