"""`retention` of a request: which of its tokens stay cached longer, go first, or are pinned; by OpenAI's own client."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from live import Live, call, openai_client, until

from kvpool import ReuseScope, web
from kvpool.engine.pictures import PicturedPrompt
from kvpool.server import Limits
from kvpool.server.errors import Problem
from kvpool.server.pins import TenantPins

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two blocks of four tokens, and one token


def ask(client: Any, *retention: dict[str, Any], **wanted: Any) -> Any:
    """The answer with its headers."""
    given = dict(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logit_bias={"42": 100}) | wanted
    return client.completions.with_raw_response.create(**given, extra_body={"retention": list(retention)})


def pins(client: Any) -> list[dict[str, Any]]:
    return list(client.get("/cache/pin", cast_to=object)["pins"])


def test_given_priorities_then_the_runs_of_the_prompt_and_of_the_answer_have_them(client: Any, engine: Any) -> None:
    first, rest, answer = (
        {"end": 4, "priority": 90, "ttl_seconds": 600},
        {"start": 4, "priority": 60},
        {"part": "answer"},
    )
    ask(client, first, rest, {**answer, "priority": 5})
    kept = sorted((run.start, run.priority) for run in engine.manager.inspect.runs())
    assert kept[:2] == [(0, 90), (1, 60)]  # starts are counted in blocks
    assert kept[-1] == (3, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_given_a_pin_then_it_holds_until_it_is_ended(client: Any, engine: Any, stream: bool) -> None:
    answer = ask(client, {"end": 8, "pin": True}, stream=stream)
    name = answer.headers["x-kvpool-pins"]
    assert pins(client) == [{"id": name, "model": "tiny", "pinned_tokens": 8}]
    if stream:
        assert list(answer.parse())
    engine.manager.cache.evict(128)
    assert engine.manager.match_prefix(PROMPT).num_tokens == 8
    client.delete(f"/cache/pin/{name}", cast_to=object)
    assert pins(client) == []
    engine.manager.cache.evict(128)
    assert engine.manager.match_prefix(PROMPT).num_tokens == 0


def test_given_as_many_pins_as_a_tenant_may_have_then_a_request_for_one_more_is_refused_before_it_runs(
    serve: Callable[..., Live], engine: Any
) -> None:
    with openai_client(serve(limits=Limits(pins_per_tenant=1))) as client:
        name = ask(client, {"pin": True}).headers["x-kvpool-pins"]
        requests = engine.stats().cache.requests
        with pytest.raises(openai.RateLimitError, match="1 pins hold"):
            ask(client, {"pin": True})
        assert engine.stats().cache.requests == requests
        client.delete(f"/cache/pin/{name}", cast_to=object)


def test_given_more_pins_in_a_request_than_there_is_room_for_then_none_of_them_holds(
    serve: Callable[..., Live],
) -> None:
    with openai_client(serve(limits=Limits(pins_per_tenant=1))) as client:
        with pytest.raises(openai.RateLimitError, match="1 pins hold"):
            ask(client, {"end": 4, "pin": True}, {"end": 8, "pin": True})
        assert pins(client) == []


@pytest.mark.parametrize("stream", [False, True])
def test_given_a_client_that_leaves_before_the_first_token_then_its_request_ends_and_none_of_its_pins_holds(
    live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    asked, left, goes_on = threading.Event(), threading.Event(), threading.Event()
    pin, gone = engine.manager.cache.pin, web.gone

    def pin_slowly(self: Any, tokens: Any, *more: Any) -> Any:
        if len(tokens) == 8:
            asked.set()
            assert goes_on.wait(30)
        return pin(tokens, *more)

    async def notice(receive: Any) -> None:
        await gone(receive)
        left.set()

    monkeypatch.setattr(type(engine.manager.cache), "pin", pin_slowly)
    monkeypatch.setattr(web, "gone", notice)
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    retention = [{"end": 4, "pin": True}, {"end": 8, "pin": True}]
    body = {"prompt": PROMPT, "max_tokens": 490, "ignore_eos": True, "stream": stream, "retention": retention}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    assert asked.wait(30)
    connection.sock.close()  # type: ignore[union-attr]
    connection.close()
    assert left.wait(30)
    call(live, "/health")  # the server has had the time to give the request up
    goes_on.set()
    until(lambda: call(live, "/ready")["under_way"] == 0 and engine.stats().num_running == 0)
    assert call(live, "/v1/cache/pin") == {"pins": []}
    assert call(live, "/v1/cache/stats")["tiny"]["pools"][0]["pinned"] == 0


def test_given_pins_that_are_asked_for_at_once_then_no_more_are_made_than_a_tenant_may_have() -> None:
    made: list[Any] = []

    def pin(*asked: Any) -> Any:
        made.append(SimpleNamespace(num_tokens=8))
        return made[-1]

    manager = SimpleNamespace(cache=SimpleNamespace(is_pinned=made.__contains__, pin=pin))
    model: Any = SimpleNamespace(name="tiny", engine=SimpleNamespace(manager=manager))
    book = TenantPins(2)

    async def all_at_once() -> list[Any]:
        prompt = PicturedPrompt(np.arange(8, dtype=np.int32))
        asked = (book.pin("a", model, prompt, ReuseScope("a"), None) for _ in range(5))
        return await asyncio.gather(*asked, return_exceptions=True)

    assert sum(isinstance(answer, Problem) for answer in asyncio.run(all_at_once())) == 3
    assert len(made) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([{}], "retention.0: give a priority, or pin"),
        ([{"priority": 101}], "retention.0.priority"),
        ([{"start": 4, "end": 4, "priority": 1}], "tokens 4 to 4 are none"),
        ([{"start": 4, "pin": True}], "a pin begins at the first token"),
        ([{"part": "answer", "pin": True}], "no range and no pin"),
        ([{"part": "answer", "priority": 1}] * 2, "two entries for the answer"),
        ([{"end": 8, "priority": 1}, {"start": 4, "priority": 2}], "overlap"),
        ([{"priority": 1, "ttl_seconds": 0}], "retention.0.ttl_seconds"),
    ],
)
def test_given_a_wrong_entry_then_it_is_named(client: Any, wrong: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, *wrong)


def test_given_a_pin_for_several_prompts_then_it_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="a request with one"):
        ask(client, {"pin": True}, prompt=["w5", "w6"])
