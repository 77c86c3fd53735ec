"""Load on an endpoint: what is asked, in what order and pace, and the figures of what came; against a trivial server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from trivial_server import TrivialServer

from kvpool.clients.load import Endpoint, LoadRequest, RequestResult, figures, of_trace, run_load, synthetic
from kvpool.errors import InvalidArgumentError
from kvpool.replay.trace import TraceBuilder


def loaded(server: TrivialServer, requests: list[LoadRequest], **options: Any) -> list[RequestResult]:
    settings: dict[str, Any] = dict(num_clients=4, timeout=30.0) | options
    return asyncio.run(run_load(Endpoint.at(server.url, model="m", key="sk"), requests, **settings))[0]


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


def test_given_a_rate_then_requests_are_due_at_it() -> None:
    dues = [request.due for request in mix(4000, rate=50.0)]
    assert dues[0] == 0.0
    assert dues == sorted(dues)
    assert 70 < dues[-1] < 90


def test_given_a_trace_then_equal_blocks_become_equal_words() -> None:
    trace = TraceBuilder("t", unit=4).add(1000.0, [1, 2], 8, 7).add(3000.0, [1, 3], 6, 0).build()
    first, second = of_trace(trace, speed=2.0)
    assert first.prompt.split()[:4] == second.prompt.split()[:4]
    assert [len(request.prompt.split()) for request in (first, second)] == [8, 6]
    assert [(request.due, request.max_tokens) for request in (first, second)] == [(0.0, 7), (1.0, 1)]
    assert [request.max_tokens for request in of_trace(trace, max_tokens=3)] == [3, 1]


@pytest.mark.parametrize("split", [0, 3, 40])
def test_given_streams_then_tokens_times_and_usage_are_counted(split: int) -> None:
    with TrivialServer(split=split) as server:
        outcomes = loaded(server, mix())
    for outcome in outcomes:
        assert (outcome.tokens, len(outcome.gaps), outcome.prompt_tokens, outcome.cached_tokens) == (5, 4, 10, 5)
        assert outcome.first is not None
        assert outcome.error == ""
    assert {body["model"] for body in server.bodies} == {"m"}
    assert set(server.keys) == {"bearer sk"}


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


def test_given_bounds_then_goodput_counts_what_kept_them() -> None:
    outcomes = [
        RequestResult(0.0, first=0.1, total=1.0, gaps=[0.01, 0.03], tokens=3),
        RequestResult(0.0, first=0.9, total=1.0, gaps=[0.01], tokens=2),
        RequestResult(0.0, first=0.1, total=1.0, gaps=[0.5], tokens=2),
        RequestResult(0.0, error="status 500"),
    ]
    assert figures(outcomes, 2.0)["goodput_per_second"] == 1.5
    bounded = figures(outcomes, 2.0, first_ms=500, between_ms=50)
    assert (bounded["goodput_per_second"], bounded["goodput_share"]) == (0.5, 0.25)
    assert bounded["first_token_ms"]["p50"] == pytest.approx(100.0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999"])
def test_given_an_address_that_is_none_then_it_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--url"):
        Endpoint.at(url)


def test_given_the_command_then_it_finds_the_model_and_writes_figures(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("rich")
    from kvpool.cli import main

    with TrivialServer() as server:
        arguments = ["bench", "serve", "--url", f"{server.url}/v1", "--requests", "6", "--max-tokens", "3", "-q"]
        assert main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
        assert main([*arguments, "--clients", "2", "--rate", "3"]) == 2
        assert main(["bench", "serve", "--url", server.url, "--api", "talk"]) == 2
    assert {body["model"] for body in server.bodies} == {"trivial"}
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["output_tokens"], found["cached_prompt_share"]) == (6, 18, 0.5)
    printed = capsys.readouterr()
    assert "6 of 6 requests" in printed.out
    assert "two ways to set the pace" in printed.err


def test_given_the_command_and_nobody_there_then_one_line_says_so(capsys: Any) -> None:
    pytest.importorskip("typer")
    from kvpool.cli import main

    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "no model is listed at 127.0.0.1:9" in capsys.readouterr().err
