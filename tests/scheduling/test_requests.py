from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import add, make_engine, request
from toy_engine import expected_output

from kvpool import ReuseScope
from kvpool.errors import ConfigError, DuplicateRequestError, InvalidArgumentError, NeverFitsError, UnknownRequestError
from kvpool.scheduling import Request, Scheduler, SchedulerConfig
from kvpool.scheduling.request import MAX_PRIORITY
from managers import make_manager


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": []}, "hashable"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": [-1]}, "negative"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"n": 0}, "n must lie"),
        ({"priority": 1.5}, "priority"),
        ({"scope": "alice"}, "ReuseScope"),
        ({"stop_token_ids": [-3]}, "stop_token_ids"),
        ({"stop_token_ids": 2}, "stop_token_ids must hold ids, got 2"),
        ({"deadline": float("nan")}, "deadline"),
        ({"arrival": "now"}, "arrival"),
        ({"cross_tokens": -1}, "cross_tokens"),
        ({"ttl": -1.0}, "ttl"),
        ({"ttl": 0.0}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"priority": MAX_PRIORITY + 1}, "priority"),
        ({"priority": -MAX_PRIORITY - 1}, "priority"),
        ({"retention": 3}, "retention"),
        ({"session": 3}, "session"),
        ({"multimodal": [(0, 2, "cat")]}, "there are only 1"),
        ({"multimodal": "cat"}, "multimodal"),
    ],
)
def test_given_a_wrong_value_then_the_request_is_refused_and_names_it(options: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {"id": "r", "prompt": [1], "max_new_tokens": 1}
    with pytest.raises(InvalidArgumentError, match=message):
        Request(**right | options)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": 1e-9},
        {"priority": MAX_PRIORITY},
        {"priority": -MAX_PRIORITY},
        {"cross_tokens": 0},
        {"deadline": -1.0, "arrival": -2.0},
    ],
)
def test_given_a_value_at_its_bound_then_the_request_has_it(options: dict[str, Any]) -> None:
    made = Request("r", [1], 1, **options)
    assert {name: getattr(made, name) for name in options} == options


def test_given_a_lane_whose_last_sequence_had_more_stop_tokens_then_the_next_does_not_stop_at_them() -> None:
    engine = make_engine(max_sequences=1)
    plain = request("plain", 6, 6)
    tokens = expected_output(plain)
    add(engine, request("stops", 6, 6, first=90, stop_token_ids=[*tokens, 70]))
    engine.drain()
    few = Request("few", plain.prompt, 6, stop_token_ids=[70])
    add(engine, few)
    engine.drain()
    assert engine.finished["few"].token_ids.tolist() == tokens


def test_given_a_prompt_when_the_caller_changes_its_array_then_the_request_keeps_what_it_was_given() -> None:
    tokens = np.array([1, 2, 3], np.int32)
    made = Request("r", tokens, 2, scope=ReuseScope(tenant="a"))
    tokens[:] = 9
    assert made.prompt.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens_per_step": 0}, "max_tokens_per_step"),
        ({"max_tokens_per_step": 4, "max_sequences": 5}, "less than max_sequences"),
        ({"max_chunk_tokens": 0}, "max_chunk_tokens"),
        ({"capacity": "some"}, "'max_utilisation', 'guaranteed'"),
        ({"preemption": "kill"}, "'auto', 'swap', 'recompute'"),
        ({"wait_for_prefix": 1}, "wait_for_prefix"),
        ({"prefetch_requests": -1}, "prefetch_requests"),
        ({"max_draft_tokens": True}, "max_draft_tokens"),
    ],
)
def test_given_a_wrong_setting_then_the_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**options)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("max_tokens_per_step", 1, 2**24),
        ("max_sequences", 1, 2**16),
        ("max_chunk_tokens", 1, 2**24),
        ("max_draft_tokens", 0, 2**24),
        ("prefetch_requests", 0, 2**16),
    ],
)
def test_given_a_limit_then_it_is_allowed_and_one_beyond_it_is_not(name: str, lowest: int, highest: int) -> None:
    others = {"max_sequences": 1} if name == "max_tokens_per_step" else {"max_tokens_per_step": 2**24}
    for bound, beyond in ((lowest, lowest - 1), (highest, highest + 1)):
        assert getattr(SchedulerConfig(**others | {name: bound}), name) == bound
        with pytest.raises(ConfigError, match=name):
            SchedulerConfig(**others | {name: beyond})


@pytest.mark.parametrize(("step", "chunk", "expected"), [(10, None, 10), (10, 4, 4), (10, 10, 10), (10, 64, 10)])
def test_given_a_chunk_size_then_a_step_has_no_more_of_one_prompt(step: int, chunk: int | None, expected: int) -> None:
    assert SchedulerConfig(max_tokens_per_step=step, max_sequences=10, max_chunk_tokens=chunk).chunk_tokens == expected


def test_given_a_sequence_then_its_prompt_is_the_same_object_until_its_tokens_are_others() -> None:
    """The manager remembers what it found out about a prompt: a new object would be looked up again in every step."""
    engine = make_engine()
    add(engine, request("r", 6))
    (sequence,) = engine.scheduler.sequences("r")
    first = sequence.prompt
    assert sequence.prompt is first
    sequence.tokens = np.append(sequence.tokens, np.int32(7))
    assert sequence.prompt is not first
    assert sequence.prompt.tokens is sequence.tokens


def test_given_one_sequence_that_never_fits_then_the_reason_does_not_speak_of_several() -> None:
    engine = make_engine(make_manager(gpu_blocks=4), capacity="guaranteed")
    with pytest.raises(NeverFitsError, match="16 and 2 new tokens need 5 blocks"):
        add(engine, request("r", 16, 2))


def test_given_plans_then_they_are_numbered_from_one_on() -> None:
    engine = make_engine()
    add(engine, request("r", 6, 3))
    assert [engine.step().number for _ in range(3)] == [1, 2, 3]


def test_given_no_manager_then_the_scheduler_says_what_it_takes() -> None:
    with pytest.raises(ConfigError, match="KVCacheManager"):
        Scheduler(make_manager().config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"policy": "fcfs"}}, "SchedulerConfig, got dict"),
        ({"cost_model": 3.0}, "CostModel, got float"),
        ({"clock": 0.0}, "clock"),
    ],
)
def test_given_a_wrong_part_then_the_scheduler_says_what_it_takes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheduler(make_manager(), **options)


def test_given_a_request_that_can_never_fit_when_it_is_added_then_it_is_refused_at_once_with_the_reason() -> None:
    engine = make_engine(make_manager(gpu_blocks=4))
    add(engine, request("fits exactly", 10, 7))
    with pytest.raises(NeverFitsError, match="5 blocks of pool 0, which has 4"):
        add(engine, request("too long", 10, 8))
    engine.drain()
    assert list(engine.finished) == ["fits exactly"]


def test_given_a_longest_sequence_when_a_request_goes_over_it_then_it_is_refused() -> None:
    engine = make_engine(make_manager(max_seq_len=12))
    add(engine, request("right", 10, 3))
    with pytest.raises(NeverFitsError, match="max_seq_len=12"):
        add(engine, request("wrong", 10, 4))
    engine.drain()


def test_given_cross_tokens_and_a_model_without_an_encoder_then_the_request_is_refused_at_once() -> None:
    with pytest.raises(NeverFitsError, match="cross_attention"):
        Scheduler(make_manager()).add(Request("r", [1, 2], 1, cross_tokens=5))


def test_given_more_samples_than_sequences_may_run_then_the_request_is_refused() -> None:
    engine = make_engine(max_sequences=2)
    with pytest.raises(NeverFitsError, match="n=3"):
        add(engine, request("r", 3, n=3))


def test_given_an_id_that_is_scheduled_when_it_is_added_again_then_it_is_refused_until_the_first_is_over() -> None:
    engine = make_engine()
    add(engine, request("r", 3))
    with pytest.raises(DuplicateRequestError, match="'r'"):
        add(engine, request("r", 3))
    engine.drain()
    engine.finished.clear()
    add(engine, request("r", 3))
    engine.drain()


def test_given_another_user_of_the_manager_when_an_id_is_taken_then_adding_it_is_refused() -> None:
    manager = make_manager()
    engine = make_engine(manager)
    manager.allocate(("r", 0), [1, 2, 3])
    with pytest.raises(DuplicateRequestError, match="manager"):
        add(engine, request("r", 3))
    assert not engine.scheduler.has_work


def test_given_something_that_is_no_request_then_it_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="takes a Request"):
        make_engine().scheduler.add("r")  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["cancel", "finish", "sequences"])
def test_given_an_unknown_id_then_the_error_names_it(verb: str) -> None:
    with pytest.raises(UnknownRequestError, match="'ghost'"):
        getattr(make_engine().scheduler, verb)("ghost")


@pytest.mark.parametrize("verb", ["propose", "token_ids"])
def test_given_something_that_is_no_sequence_then_it_is_refused(verb: str) -> None:
    arguments = ([1],) if verb == "propose" else ()
    with pytest.raises(InvalidArgumentError, match="sequence"):
        getattr(make_engine().scheduler, verb)("a", *arguments)


def test_given_a_waiting_request_that_is_cancelled_then_nobody_waits_any_more() -> None:
    engine = make_engine()
    add(engine, request("a", 3))
    engine.scheduler.cancel("a")
    assert (engine.scheduler.num_waiting, engine.scheduler.waiting(9), engine.scheduler.has_work) == (0, [], False)


@pytest.mark.parametrize("sign", [1, -1])
def test_given_a_priority_of_32_bits_then_it_is_allowed_and_one_beyond_it_is_not(sign: int) -> None:
    assert request("a", 3, priority=sign * 2**31).priority == sign * 2**31
    with pytest.raises(InvalidArgumentError, match="priority"):
        request("a", 3, priority=sign * (2**31 + 1))


def test_given_no_settings_then_a_step_has_2048_tokens_of_256_sequences() -> None:
    assert (SchedulerConfig().max_tokens_per_step, SchedulerConfig().max_sequences) == (2048, 256)


def test_given_a_hint_that_cannot_be_asked_then_the_log_names_its_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(answer: Any) -> None:
        raise LookupError("no tokenizer")

    assert request("a", 3, hint=broken).hint_at_end(np.array([1], np.int32)) is None
    assert "the hint of request 'a' could not be asked" in caplog.text
