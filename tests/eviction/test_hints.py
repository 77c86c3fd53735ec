"""What callers say about the continuation of a request reaches the runs that it published, and policies that ask for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheHandle, KVCacheManager, ReuseHint, ReuseScope
from kvpool.errors import InvalidArgumentError, UnknownRequestError
from kvpool.eviction import LRUPolicy, Run
from kvpool.prefix.tree import match_tokens
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, replay
from kvpool.scope import NUM_HINTS, STOPS
from managers import make_manager

TOOL = ReuseHint(stop="tool_calls")


def begin(manager: KVCacheManager, name: str, prompt: list[int]) -> KVCacheHandle:
    handle = manager.allocate(name, prompt)
    manager.commit(handle)
    return handle


def hints_of(manager: KVCacheManager, prompt: list[int]) -> list[int]:
    """The hints of the runs that hold a prompt, from its beginning."""
    match = match_tokens(manager._cache, ReuseScope(), np.array(prompt, np.int32))
    return [node.hint for node in match.path]


def calls_and_ends(num_rounds: int = 300) -> Trace:
    """Half of the sessions call a tool and go on, half of them are over: nothing but the reason to stop says which."""
    builder = TraceBuilder("calls and ends", unit=16)
    fresh = iter(range(1000, 10**7))
    waiting: list[list[int]] = []
    for number in range(num_rounds):
        calls, ends = ([next(fresh) for _ in range(8)] for _ in range(2))
        builder.add(number * 1000.0, calls, 128, 0, stop="tool_calls")
        builder.add(number * 1000.0, ends, 128, 0, stop="stop")
        waiting.append(calls)
        if len(waiting) > 10:
            prompt = [*waiting.pop(0), next(fresh)]
            builder.add(number * 1000.0, prompt, 16 * len(prompt), 0, stop="stop")
    return builder.build()


def test_hints_that_differ_in_what_they_say_have_codes_of_their_own() -> None:
    hints = [
        ReuseHint(),
        *map(ReuseHint, STOPS),
        *(ReuseHint(expected_seconds=s) for s in (0, 3, 10, 50, 200, math.inf)),
    ]
    assert [hint.code for hint in hints] == list(range(NUM_HINTS))
    assert ReuseHint("stop", expected_seconds=3).code == ReuseHint(expected_seconds=3).code


@pytest.mark.parametrize(
    ("spelled", "means"), [("tool_use", "tool_calls"), ("end_turn", "stop"), ("max_tokens", "length")]
)
def test_the_words_of_both_apis_are_understood(spelled: str, means: str) -> None:
    assert ReuseHint(spelled) == ReuseHint(means)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop": "because"},
        {"stop": 3},
        {"expected_seconds": -1},
        {"expected_seconds": "3"},
        {"expected_seconds": math.nan},
        {"expected_seconds": True},
        {"expected_seconds": 10**400},
    ],
)
def test_given_a_wrong_hint_then_it_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        ReuseHint(**wrong)


def test_what_is_said_when_a_request_ends_holds_for_what_it_published_and_not_for_what_it_shared() -> None:
    manager = make_manager(gpu_blocks=64)
    first = list(range(12))
    manager.free(begin(manager, "a", first))
    longer = [*first, *range(100, 112)]
    manager.free(begin(manager, "b", longer), hint=TOOL)
    assert hints_of(manager, longer) == [0, TOOL.code]


def test_what_is_said_about_a_request_that_published_nothing_holds_for_the_last_run_that_it_read() -> None:
    manager = make_manager(gpu_blocks=64)
    first = list(range(12))
    longer = [*first, *range(100, 112)]
    for prompt in (first, longer):
        manager.free(begin(manager, "a", prompt))
    manager.free(begin(manager, "b", [*longer, 1]), hint=TOOL)
    assert hints_of(manager, longer) == [0, TOOL.code]


def test_given_a_batch_then_each_request_keeps_its_own_hint() -> None:
    manager = make_manager(gpu_blocks=64)
    prompts = {"a": list(range(8)), "b": list(range(50, 58)), "c": list(range(80, 88))}
    handles = {name: begin(manager, name, prompt) for name, prompt in prompts.items()}
    manager.hint(handles["a"], TOOL)
    manager.hint(handles["b"], ReuseHint(expected_seconds=3))
    manager.free_batch(list(handles.values()))
    assert [hints_of(manager, prompt) for prompt in prompts.values()] == [[TOOL.code], [5], [0]]


def test_what_is_known_when_a_request_begins_holds_until_more_is_said() -> None:
    manager = make_manager(gpu_blocks=64)
    soon = ReuseHint(expected_seconds=3)
    prompts = {"a": list(range(8)), "b": list(range(50, 58))}
    for name, prompt in prompts.items():
        handle = manager.allocate(name, prompt, hint=soon)
        manager.commit(handle)
        manager.free(handle, hint=TOOL if name == "b" else None)
    assert [hints_of(manager, prompt) for prompt in prompts.values()] == [[soon.code], [TOOL.code]]
    with pytest.raises(InvalidArgumentError, match="tool_calls"):
        manager.allocate("c", [1, 2, 3], hint="tool_calls")  # type: ignore[arg-type]
    assert not manager.handles


def test_a_policy_sees_whose_run_it_is_and_which_request_made_it() -> None:
    seen: list[tuple[str, str | None, int, int, int]] = []

    class Looking(LRUPolicy):
        def key(self, run: Run) -> int:
            seen.append((run.tenant, run.session, run.turn, run.fan_out, run.hint))
            return super().key(run)

    manager = make_manager(gpu_blocks=64, policy=Looking)
    handle = manager.allocate("a", list(range(8)), scope=ReuseScope(tenant="acme"), session="chat 7")
    manager.commit(handle)
    manager.free(handle, hint=TOOL)
    assert seen == [("acme", "chat 7", 0, 0, TOOL.code)]


def test_given_a_run_that_is_cut_in_two_then_both_parts_keep_its_hint() -> None:
    manager = make_manager(gpu_blocks=64)
    prompt = list(range(16))
    manager.free(begin(manager, "a", prompt), hint=TOOL)
    manager.free(begin(manager, "b", [*prompt[:8], *range(100, 108)]))
    assert hints_of(manager, prompt) == [TOOL.code] * 2


def test_given_no_hint_or_no_live_request_then_it_is_refused_and_the_request_goes_on() -> None:
    manager = make_manager(gpu_blocks=64)
    handle = begin(manager, "a", list(range(8)))
    for call in (manager.hint, lambda handle, hint: manager.free(handle, hint=hint)):
        with pytest.raises(InvalidArgumentError, match="tool_calls"):
            call(handle, "tool_calls")
    assert handle.is_live
    manager.free(handle)
    with pytest.raises(UnknownRequestError):
        manager.hint(handle, TOOL)


def test_an_operation_inside_another_one_happens_at_the_same_moment() -> None:
    reads = iter(range(10**6))
    manager = make_manager(gpu_blocks=64, clock=lambda: float(next(reads)))
    handle = begin(manager, "a", list(range(8)))
    before = next(reads)
    manager.free(handle, hint=TOOL)
    assert next(reads) == before + 2


def test_given_the_reason_to_stop_then_what_goes_on_is_kept_over_what_is_over() -> None:
    trace = calls_and_ends()
    config = ReplayConfig("adaptive", capacity=100)
    with_reason, without = replay(trace, config).hit_blocks, replay(replace(trace, stops=None), config).hit_blocks
    assert without < 0.6 * with_reason
