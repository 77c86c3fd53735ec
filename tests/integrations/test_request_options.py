"""What a request asks for its own blocks: not to be kept, for how long, how firmly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import ReuseHint
from kvpool.errors import ConfigError
from kvpool.integrations.connector.requests import NO_OPTIONS, RequestOptions, scope_of
from kvpool.prefix.tree import match_tokens

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest, lora


def wishing(name: str, prompt: list[int] = PROMPT, **wishes: Any) -> ToyRequest:
    return ToyRequest(name, prompt, kv_transfer_params={"kvpool": wishes})


def fill(toy: ToyEngine, number: int) -> None:
    """Other prompts, more than the host holds."""
    for each in range(number):
        toy.serve(ToyRequest(f"other {each}", [1000 + each] * 17))


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, {"kvpool": {}}])
def test_given_nothing_of_ours_then_a_request_has_no_wishes(params: Any) -> None:
    assert RequestOptions.of(params) == NO_OPTIONS


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"no_stor": True}, "may hold no_store, ttl, priority, pin"),
        ("no_store", "may hold"),
        ({"no_store": 1}, "no_store must be true or false"),
        ({"ttl": 0}, "ttl=0 must be seconds above 0"),
        ({"ttl": "a day"}, "ttl"),
        ({"pin": -1}, "pin=-1 must be seconds"),
        ({"priority": 101}, "priority must be an int in 0..100"),
        ({"expected_seconds": -1}, "expected_seconds"),
    ],
)
def test_given_a_wish_that_cannot_be_then_it_is_named(wishes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RequestOptions.of({"kvpool": wishes})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("no_store", "kv_transfer_params must be a mapping"),
        ([{"kvpool": {}}], "kv_transfer_params must be a mapping"),
        ({"no_store": True}, r"no_store belongs into \{'kvpool': \{…\}\}"),
        ({"ttl": 5, "do_remote_prefill": True}, r"ttl belongs into"),
        ({"kv_pool": {"ttl": 5}}, r"'kv_pool'; did you mean 'kvpool'\?"),
        ({"KVPool": {"ttl": 5}}, r"'KVPool'; did you mean 'kvpool'\?"),
    ],
)
def test_given_wishes_in_the_wrong_place_then_it_is_said_where_they_belong(params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RequestOptions.of(params)


@pytest.mark.parametrize(
    "wishes",
    [{name: value} for name in ("ttl", "pin", "priority") for value in (float("nan"), float("inf"), True, "1", [1], {})]
    + [{"expected_seconds": value} for value in (float("nan"), True, "1", [1], {})]
    + [{"ttl": 10**400}, {"no_store": None}, {"no_store": "true"}, {1: 2}, None, 5, [], ["no_store"]],
    ids=str,
)
def test_given_anything_that_a_client_may_send_then_the_request_is_served(engine: Any, wishes: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, kv_transfer_params={"kvpool": wishes}))
    assert toy.serve(ToyRequest("b", PROMPT)) == 16
    with pytest.raises(ConfigError):
        RequestOptions.of({"kvpool": wishes})


def test_given_a_client_whose_every_request_is_wrong_then_one_line_a_minute_tells(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    toy = engine(host_blocks=12)
    with caplog.at_level(logging.WARNING, "kvpool"):
        for number in range(5):
            toy.serve(wishing(f"a{number}", ttl=-5))
            toy.serve(wishing(f"b{number}", [number] * 17, pin=60))
    assert len([record for record in caplog.records if "must be seconds above 0" in record.message]) == 1
    assert len([record for record in caplog.records if "is not pinned" in record.message]) == 1


def test_given_no_store_then_nothing_is_kept_and_what_others_left_is_used(engine: Any) -> None:
    toy = engine()
    toy.serve(wishing("a", no_store=True))
    assert toy.serve(ToyRequest("b", PROMPT)) == 0
    assert toy.serve(wishing("c", no_store=True)) == 16


def test_given_a_wish_that_cannot_be_then_the_request_is_served_and_a_line_is_written(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    toy = engine()
    with caplog.at_level(logging.WARNING, "kvpool"):
        toy.serve(wishing("a", ttl=-5))
    assert "request a: ttl=-5 must be seconds above 0" in caplog.text
    assert toy.serve(ToyRequest("b", PROMPT)) == 16


def test_given_a_ttl_then_the_host_forgets_after_it_and_tiers_never_get_it(engine: Any, tmp_path: Path) -> None:
    now = [1000.0]
    toy = engine(disk=str(tmp_path), clock=lambda: now[0])
    toy.serve(wishing("a", ttl=60))
    assert toy.look_up(ToyRequest("b", PROMPT)) == 16
    toy.scheduler.orders(is_idle=True)
    now[0] += 61
    assert toy.look_up(ToyRequest("c", PROMPT)) == 0
    toy.close()
    assert engine(disk=str(tmp_path)).look_up(ToyRequest("d", PROMPT)) == 0


def test_given_a_time_that_ends_between_look_up_and_load_then_what_was_found_is_loaded(engine: Any) -> None:
    now = [1000.0]
    toy = engine(clock=lambda: now[0])
    toy.serve(wishing("a", ttl=60))
    request = ToyRequest("b", PROMPT)
    assert toy.look_up(request) == 16
    now[0] += 61  # a moment later, in truth
    toy.scheduler.order_load(request, [[0, 1, 2, 3, 4]], 16)
    (load,) = toy.scheduler.orders(is_idle=False).loads
    assert load.num_present == len(load.rows) == 4


def test_given_priorities_then_the_lower_one_leaves_first(engine: Any) -> None:
    toy = engine(host_blocks=12, policy="priority")
    toy.serve(wishing("a", priority=90))
    toy.serve(wishing("b", [7] * 17, priority=5))
    fill(toy, 2)
    assert toy.look_up(ToyRequest("c", PROMPT)) == 16
    assert toy.look_up(ToyRequest("d", [7] * 17)) == 0


@pytest.mark.parametrize(
    ("wished", "of_end", "known"),
    [
        ({"expected_seconds": 3}, None, ReuseHint(expected_seconds=3)),
        ({}, ReuseHint(stop="length"), ReuseHint(stop="length")),
        ({"expected_seconds": 3}, ReuseHint(stop="stop"), ReuseHint(expected_seconds=3)),
        ({}, None, ReuseHint()),
    ],
)
def test_given_hints_then_the_policy_knows_what_the_request_said_or_else_why_it_stopped(
    engine: Any, wished: dict[str, float], of_end: ReuseHint | None, known: ReuseHint
) -> None:
    toy = engine()
    toy.serve(wishing("a", **wished), hint=of_end)
    manager = toy.scheduler.host.manager
    match = match_tokens(
        manager._cache, scope_of(ToyRequest("b", PROMPT), toy.scheduler._epoch, ""), np.array(PROMPT, np.int32)
    )
    assert [node.hint for node in match.path] == [known.code]


def test_given_a_pinned_prompt_then_it_stays_until_the_pin_is_ended(engine: Any) -> None:
    toy = engine(host_blocks=12, policy="lru")
    toy.serve(wishing("a", pin=3600))
    fill(toy, 5)
    assert toy.serve(wishing("b", pin=0)) == 16
    fill(toy, 5)
    assert toy.serve(ToyRequest("c", PROMPT)) == 0


def test_given_more_pins_than_half_the_host_then_one_is_refused_with_a_line(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    toy = engine(host_blocks=12)
    toy.serve(wishing("a", pin=60))
    with caplog.at_level(logging.WARNING, "kvpool"):
        toy.serve(wishing("b", [7] * 17, pin=60))
        toy.look_up(ToyRequest("c", PROMPT))
    assert "the prompt of b is not pinned: pinning 16 more tokens would exceed" in caplog.text


def test_given_a_pinned_prompt_when_everything_is_reset_then_its_blocks_are_free(engine: Any) -> None:
    toy = engine(host_blocks=12)
    toy.serve(wishing("a", pin=3600))
    toy.look_up(ToyRequest("b", [1] * (BLOCK + 1)))
    toy.scheduler.reset()
    assert toy.scheduler.host.manager.inspect.num_free_blocks() == 12


def test_given_an_adapter_whose_files_changed_then_nothing_is_shared_with_its_old_weights(
    engine: Any, tmp_path: Path
) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, lora_request=lora("sql", str(tmp_path))))
    assert toy.look_up(ToyRequest("b", PROMPT, lora_request=lora("sql", str(tmp_path)))) == 16
    weights.write_bytes(b"other")
    assert toy.look_up(ToyRequest("c", PROMPT, lora_request=lora("sql", str(tmp_path)))) == 0
