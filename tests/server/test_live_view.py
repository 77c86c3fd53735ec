"""The live view of a server: at `/`, for administrators, with who waits and where the tokens of a prompt come from."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from live import openai_client, until

from kvpool import ReuseScope
from kvpool.engine import SamplingParams
from kvpool.server.auth import Access, Caller

sys.path.insert(0, str(Path(__file__).parents[1] / "view"))

from chromium import Chromium, Page, find_chromium
from following import Mirror, events_in

if TYPE_CHECKING:
    from live import Live

ADMIN, PLAIN = {"authorization": "Bearer sk-admin"}, {"authorization": "Bearer sk-acme"}
QUESTION = [{"role": "user", "content": " ".join(f"w{number}" for number in range(55, 75))}]


def access() -> Access:
    keys = {"sk-admin": Caller("ops", True, "ops"), "sk-acme": Caller("acme", False, "acme")}
    return Access({hashlib.sha256(key.encode()).hexdigest(): caller for key, caller in keys.items()})


def read_until(live: Live, mirror: Mirror, is_enough: Callable[[], bool]) -> dict[str, Any]:
    """Follows the stream until something is true; returns what the server says it shows."""
    connection = HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request("GET", "/view/stream")
    answer = connection.getresponse()
    assert answer.status == 200
    text, hello = b"", {}
    while not is_enough():
        part = answer.read1(1 << 16)
        assert part, "the stream ended"
        whole, _, text = (text + part).rpartition(b"\n\n")
        for name, data in events_in(whole + b"\n\n") if whole else ():
            if name == "frame":
                mirror.apply(data)
            else:
                hello = data
    answer.close()
    connection.close()
    return hello


def test_given_a_server_when_its_root_is_opened_then_it_is_the_page(live: Live) -> None:
    page = httpx.get(live.url)
    assert page.status_code == 200
    assert "main.js" in page.text
    assert httpx.get(f"{live.url}/view/main.js").headers["content-type"].startswith("text/javascript")
    assert httpx.get(f"{live.url}/view/missing.js").status_code == 404


def test_given_keys_when_somebody_else_than_an_administrator_looks_then_it_is_refused(
    serve: Callable[..., Live],
) -> None:
    live = serve(access=access())
    for path in ("stream", "block?id=0"):
        assert httpx.get(f"{live.url}/view/{path}").status_code == 401
        refused = httpx.get(f"{live.url}/view/{path}", headers=PLAIN)
        assert refused.status_code == 403
        assert "admin key" in refused.json()["error"]["message"]
    assert httpx.get(f"{live.url}/view/block?id=0", headers=ADMIN).json()["state"] == "free"
    assert httpx.get(f"{live.url}/").status_code == 200


def test_given_a_stream_when_a_request_was_answered_then_its_blocks_and_latencies_are_told(
    live: Live, client: Any
) -> None:
    usage = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4).usage
    mirror = Mirror()
    hello = read_until(live, mirror, lambda: bool(mirror.rest.get("more", {}).get("latency")))
    assert (hello["model"], hello["models"], hello["chat"]) == ("tiny", ["tiny"], True)
    assert hello["device"] == "CPU"
    assert mirror.rest["more"]["generated"] == usage.completion_tokens
    assert mirror.rest["pools"][0]["cached"] >= 5
    assert mirror.rest["more"]["waiting"] == []
    assert len(mirror.rest["more"]["latency"]["first_token_ms"]) == 2
    assert mirror.rest["more"]["sessions"][0].keys() >= {"name", "state", "here", "below", "missing", "own"}
    live.app.state.server.views._hubs["tiny"].close()


def test_given_requests_with_and_without_a_session_then_each_is_named_as_its_client_named_it(live: Live) -> None:
    asked = {"prompt": "w1 w2 w3", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with (
        httpx.stream("POST", f"{live.url}/v1/completions", json={**asked, "session_id": "talk-7"}) as first,
        httpx.stream("POST", f"{live.url}/v1/completions", json=asked, headers={"x-request-id": "mine"}) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        mirror = Mirror()
        read_until(live, mirror, lambda: len(mirror.rest.get("sequences", ())) == 2)
        assert sorted(row[1] for row in mirror.rest["sequences"]) == ["mine", "talk-7"]
    live.app.state.server.views._hubs["tiny"].close()
    model = next(iter(live.app.state.server.models.values()))
    until(lambda: not model.named)


def test_given_a_prompt_that_is_cached_when_the_chat_box_asks_then_its_pieces_and_their_tiers_are_told(
    serve: Callable[..., Live],
) -> None:
    live = serve(access=access())
    with openai_client(live, "sk-acme") as client:
        first = httpx.post(f"{live.url}/view/prompt", json={"messages": QUESTION}, headers=PLAIN).json()
        assert first["tiers"] == []
        assert first["pieces"][-1] == "w74"
        usage = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4).usage
        assert usage is not None
        again = httpx.post(f"{live.url}/view/prompt", json={"messages": QUESTION}, headers=PLAIN).json()
        assert again["tiers"] == [["GPU", usage.prompt_tokens - 1]]
        other = httpx.post(f"{live.url}/view/prompt", json={"messages": QUESTION}, headers=ADMIN).json()
        assert other["tiers"] == [], "another tenant's cache shows nothing"


@pytest.mark.slow
def test_given_a_browser_when_the_docs_are_opened_then_every_path_is_there_and_nothing_from_elsewhere(
    live: Live,
) -> None:
    if (program := find_chromium()) is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name one in KVPOOL_CHROMIUM")
    with Chromium(program) as browser:
        page = browser.open(f"{live.url}/docs")
        page.until("document.querySelectorAll('summary').length")
        shown = page.value("[...document.querySelectorAll('summary code')].map((one) => one.textContent)")
        document = httpx.get(f"{live.url}/openapi.json").json()
        assert shown == [f"{method.upper()}{path}" for path, all_of in document["paths"].items() for method in all_of]
        assert page.value("document.body.textContent.includes('repetition_penalty')")
        loaded = page.value("performance.getEntriesByType('resource').map((one) => one.name)")
        assert all(name.startswith(live.url) for name in loaded)
        assert page.problems() == []


def test_given_a_browser_when_somebody_chats_then_the_tokens_from_the_cache_are_coloured(live: Live) -> None:
    if (program := find_chromium()) is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name one in KVPOOL_CHROMIUM")
    with Chromium(program) as browser:
        page = browser.open(live.url)
        page.until("kvpool.drawn.frames && !document.getElementById('chat').hidden")
        assert chat(page) == 0
        page.value("document.getElementById('chat-new').click()")
        assert chat(page) >= 16
        assert page.problems() == []


def chat(page: Page) -> int:
    """Asks the question in the chat box; returns how many tokens of it are coloured as cached."""
    said = json.dumps(QUESTION[0]["content"])
    page.value(f"document.getElementById('chat-text').value = {said}")
    page.value("document.getElementById('chat-form').requestSubmit()")
    page.until(
        "document.getElementById('chat').ariaBusy === 'false' && document.querySelector('#talk .answer').textContent"
    )
    coloured: int = page.value("document.querySelectorAll('.token.from-GPU').length")
    return coloured


def test_given_more_requests_than_fit_then_those_that_wait_are_told(engine: Any) -> None:
    assert engine.waiting() == []
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    scope = ReuseScope(tenant="acme")
    asked = [engine.submit([number] * 150, params, scope=scope) for number in range(8)]
    waiting = engine.waiting()
    assert len(waiting) >= 5
    assert {(one.tenant, one.num_tokens) for one in waiting} == {("acme", 150)}
    assert len(engine.waiting(2)) == 2
    for generation in asked:
        generation.cancel()
    for generation in asked:
        generation.result(30)
    assert engine.waiting() == []


@pytest.fixture(scope="module")
def remembering() -> Iterator[Any]:
    """An engine that knows why prompts miss; its blocks are small, and its context is long."""
    from live import word_tokenizer
    from models import tiny_model

    from kvpool.engine import Engine

    options: dict[str, Any] = {"cache": {"remembered_blocks": None}, "kv_blocks": 2048, "block_size": 4}
    with Engine(
        tiny_model("llama", max_position_embeddings=8192), tokenizer=word_tokenizer(), device="cpu", **options
    ) as made:
        yield made


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium: install Debian's package chromium")
def test_given_prompts_that_missed_then_the_page_says_why_of_a_request_and_of_the_last_hour(remembering: Any) -> None:
    from live import Live

    from kvpool.server import ServedModel, create_app

    live, program = Live(create_app([ServedModel("tiny", remembering)])), find_chromium()
    words = [f"w{number}" for number in range(60)]
    asked = {"prompt": " ".join(words), "max_tokens": 1}
    httpx.post(f"{live.url}/v1/completions", json=asked)
    changed = {
        "prompt": " ".join([*words[:6], "w90", *words[7:]]),
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
    }
    assert program is not None
    with Chromium(program) as browser:
        page = browser.open(live.url)
        page.until("kvpool.grids.size && kvpool.drawn.frames")
        with httpx.stream("POST", f"{live.url}/v1/completions", json=changed) as running:
            assert running.headers["x-kvpool-missed"] == "diverged=53, first_seen=1"
            page.until("document.querySelector('#request-list .tokens')?.textContent.includes('53 diverged')")
            shares = "[...document.querySelectorAll('#request-list .bar i')].map((part) => part.className)"
            assert page.value(shares) == ["b-cached", "cause-first_seen", "cause-diverged", "b-new", "b-ahead"]
            page.value("document.querySelector('#request-list button').click()")
            page.until("document.getElementById('details').textContent.includes('53 diverged, 1 first seen')")
        page.until("document.getElementById('missed-count').textContent.includes('of 120 prompt tokens')")
        hour = "[...document.querySelectorAll('#missed-list li')].map((row) => row.dataset.key)"
        assert page.value(hour) == ["first_seen", "diverged"]
        assert "53 tokens, 44.2 % of prompts" in page.value("document.querySelector('[data-key=diverged]').textContent")
        if picture := os.environ.get("KVPOOL_PICTURE"):
            page.picture(Path(picture), whole=True)
        assert page.problems() == []
    live.app.state.server.views._hubs["tiny"].close()
    live.stop()


def test_given_words_in_base64_then_no_text_of_a_prompt_is_in_the_stream(live: Live, client: Any) -> None:
    client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=4)
    mirror = Mirror()
    read_until(live, mirror, lambda: "tree" in mirror.rest)
    text = json.dumps(mirror.rest)
    assert not any(word in text for word in QUESTION[0]["content"].split())
    assert base64.b64encode(b"w40 w41") not in text.encode()
