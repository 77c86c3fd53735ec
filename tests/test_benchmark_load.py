"""Load on an endpoint: what is asked, in what order, and the figures of what came; against a trivial server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from load import Endpoint, LoadRequest, RequestResult, figures, run_load, synthetic
from trivial_server import TrivialServer


def loaded(server: TrivialServer, requests: list[LoadRequest], **options: Any) -> list[RequestResult]:
    settings: dict[str, Any] = dict(num_clients=4, timeout=30.0) | options
    return asyncio.run(run_load(Endpoint.at(server.url, "m"), requests, **settings))[0]


def mix(num_requests: int = 12, **options: Any) -> list[LoadRequest]:
    settings: dict[str, Any] = dict(prompt_tokens=20, shared_tokens=12, num_prefixes=2, max_tokens=5) | options
    return synthetic(num_requests, **settings)


def test_given_a_mix_then_prompts_share_their_beginnings_and_nothing_else() -> None:
    prompts = [request.prompt.split() for request in mix(40)]
    assert {len(prompt) for prompt in prompts} == {20}
    assert len({tuple(prompt[:12]) for prompt in prompts}) == 2
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 40
    assert mix(40) == mix(40)
    assert mix(40) != mix(40, seed=1)


@pytest.mark.parametrize("split", [0, 3, 40])
def test_given_streams_then_tokens_times_and_usage_are_counted(split: int) -> None:
    with TrivialServer(split=split) as server:
        outcomes = loaded(server, mix())
    for outcome in outcomes:
        assert (outcome.tokens, len(outcome.gaps), outcome.prompt_tokens, outcome.cached_tokens) == (5, 4, 10, 5)
        assert outcome.first is not None
        assert outcome.error == ""
    assert {body["model"] for body in server.bodies} == {"m"}


def test_given_clients_then_no_more_requests_run_at_once() -> None:
    with TrivialServer(gap=0.002) as server:
        loaded(server, mix(20), num_clients=3)
    assert len(server.bodies) == 20
    assert server.most_at_once <= 3


def test_given_hundreds_of_streams_then_one_process_follows_them_all() -> None:
    with TrivialServer(gap=0.02) as server:
        outcomes = loaded(server, mix(500, max_tokens=8), num_clients=500)
    assert [outcome.tokens for outcome in outcomes if not outcome.error] == [8] * 500
    assert server.most_at_once > 50


def test_given_refusals_then_they_are_told_apart_from_answers() -> None:
    with TrivialServer(refuse_from=5) as server:
        found = figures(loaded(server, mix()), 2.0)
    assert (found["completed"], found["requests_per_second"]) == (5, 2.5)
    assert found["errors"] == {"status 429: too many": 7}


def test_given_nobody_there_then_requests_fail_with_the_reason() -> None:
    with TrivialServer() as server:
        pass
    found = figures(loaded(server, mix(2)), 1.0)
    assert found["completed"] == 0
    assert "ConnectionRefusedError" in next(iter(found["errors"]))
