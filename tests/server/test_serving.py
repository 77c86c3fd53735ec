"""Keys, limits, clients that leave, the cache by HTTP, and what an operator reads; over real HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live import Live, access, call, openai_client, refusal, until

from kvpool import ReuseHint
from kvpool.errors import ConfigError, NeverFitsError, OutOfBlocksError, PinBudgetError
from kvpool.server import Access, Caller, Limits
from kvpool.server.auth import CacheShare, new_key
from kvpool.server.errors import Problem, problem_of
from kvpool.server.limits import Gate
from kvpool.version import __version__

PROMPT = "w5 w6 w7 w8 w9 w10 w11 w12 w13"


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_given_keys_then_only_their_holders_are_answered(serve: Callable[..., Live]) -> None:
    live = serve(access=access("acme"))
    with openai_client(live, "sk-acme") as client:
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).choices
    with openai_client(live, "sk-guess") as client, pytest.raises(openai.AuthenticationError, match="not known"):
        client.completions.create(model="tiny", prompt=PROMPT)
    assert refusal(live, "/v1/models")[1]["code"] == "missing_api_key"
    assert call(live, "/health") == {"status": "ok"}


def test_given_an_engine_that_has_ended_then_health_says_that_no_request_would_be_answered(
    live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine), "is_closed", property(lambda _: True))
    for path in ("/health", "/ready"):
        status, error = refusal(live, path)
        assert (status, error["code"]) == (503, "unavailable")


def asked_as(live: Live, path: str, host: str, **headers: str) -> int:
    """The status of a request that a page in a browser makes under a name of its own for this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    body = None if path == "/metrics" else json.dumps({"prompt": PROMPT})
    sent = {"content-type": "application/json", "host": host, **headers}
    connection.request("GET" if body is None else "POST", path, body, sent)
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/cache/invalidate", "/metrics"])
def test_given_no_keys_when_another_name_leads_to_this_machine_then_nothing_is_answered(live: Live, path: str) -> None:
    assert asked_as(live, path, "evil.example:8000") == 403
    assert [asked_as(live, path, f"{name}:8000") for name in ("localhost", "127.0.0.1", "[::1]")] == [200] * 3


def test_given_keys_or_a_proxy_in_front_then_any_name_will_do(serve: Callable[..., Live]) -> None:
    locked = serve(access=access("root"))
    assert asked_as(locked, "/metrics", "kvpool.example", authorization="Bearer sk-root") == 200
    behind = serve(any_name=True)
    assert asked_as(behind, "/metrics", "kvpool.example") == 200


def test_given_an_allowed_site_then_its_pages_may_ask_and_those_of_others_may_not(serve: Callable[..., Live]) -> None:
    live = serve(allow_origins=("https://chat.example",))
    for site, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
        answer = httpx.get(f"{live.url}/version", headers={"origin": site})
        assert answer.json() == {"version": __version__}
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_given_a_form_of_a_foreign_page_then_it_changes_nothing(live: Live) -> None:
    # A page may send plain text and forms to any address without asking the server; JSON it may not.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert asked_as(live, "/v1/cache/invalidate", "127.0.0.1", **{"content-type": kind}) == 400
        assert asked_as(live, "/v1/completions", "127.0.0.1", **{"content-type": kind}) == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/cache/warm"])
def test_given_answers_refusals_and_failures_then_no_prompt_and_no_key_is_logged(
    serve: Callable[..., Live], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    live = serve(access=access("acme"))
    text = "w5 confidential w6"
    bodies: list[Any] = [{"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 1}]
    bodies += [{"prompt": {"text": text}, "messages": text}, {"prompt": text, "messages": [], "max_tokens": -1}, [text]]
    with caplog.at_level("DEBUG"):
        for body in bodies:
            for key in ("sk-acme", "sk-confidential"):
                with contextlib.suppress(urllib.error.HTTPError):
                    call(live, path, body, key)
    assert "confidential" not in caplog.text
    assert "sk-" not in caplog.text


def test_given_two_tenants_then_neither_reuses_the_others_prompt(serve: Callable[..., Live]) -> None:
    live = serve(access=access("a", "b"))
    cached = []
    for tenant in ("a", "b", "a", "b"):
        with openai_client(live, f"sk-{tenant}") as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 8, 8]


def test_given_a_shared_cache_then_tenants_reuse_each_others_prompts(serve: Callable[..., Live]) -> None:
    live = serve(access=access("a", "b", share=True))
    cached = []
    for tenant in ("a", "b"):
        with openai_client(live, f"sk-{tenant}") as client:
            answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 8]


def test_given_salts_then_only_equal_ones_share(client: Any) -> None:
    cached = []
    for salt in ("x", "y", "x", ""):
        answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"cache_salt": salt})
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 8, 0]


def test_given_a_file_of_keys_then_it_is_read_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key, line = new_key("acme")
    file.write_text(f"# who may ask\n{line}\n{new_key('root')[1]} admin\n")
    read = Access.read(file, {"KVPOOL_API_KEYS": "other:sk-1,root:sk-2:admin"})
    assert read.caller(key) == Caller("acme", False, f"acme/{line.split()[1][:8]}")
    assert (read.caller("sk-1").tenant, read.caller("sk-2").is_admin) == ("other", True)
    assert key not in line
    for wrong in ("acme", "acme short", f"{line} boss", f"{line} admin more"):
        file.write_text(f"\n{wrong}\n")
        with pytest.raises(ConfigError, match="line 2"):
            Access.read(file, {})
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="no key"):
        Access.read(file, {})
    with pytest.raises(ConfigError, match="cannot read"):
        Access.read(tmp_path / "missing", {})


# --- how much ---------------------------------------------------------------------------------------------------------


def test_given_too_many_requests_then_the_next_is_told_to_come_back(serve: Callable[..., Live], engine: Any) -> None:
    live = serve(limits=Limits(requests=1))
    with openai_client(live) as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt=PROMPT)
        assert refused.value.response.headers["retry-after"] == "1"
        stream.close()
        until(lambda: call(live, "/ready")["under_way"] == 0)
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1).choices
    assert 'kvpool_http_refused_total{status="429"} 1.0' in call(live, "/metrics")


@pytest.mark.parametrize("announce", [True, False])
def test_given_a_large_body_then_it_is_refused(serve: Callable[..., Live], announce: bool) -> None:
    live = serve(limits=Limits(body_bytes=1000))
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    body = json.dumps({"prompt": "w5 " * 1000}).encode()
    headers = {"content-type": "application/json"}
    # The server may close while the client still sends
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if announce:
            connection.request("POST", "/v1/completions", body, headers)
        else:
            parts = (body[at : at + 300] for at in range(0, len(body), 300))
            connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "too_large"
    connection.close()


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b"\xff", b'{"prompt": 7}', b""])
def test_given_a_body_that_is_no_request_then_status_400_says_why(live: Live, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 400
    assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
    connection.close()


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_given_a_client_that_leaves_then_its_request_ends_at_once(live: Live, engine: Any, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    body = {"prompt": PROMPT, "max_tokens": 490, "stream": stream, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    until(lambda: engine.stats().num_running == 1)
    connection.sock.close()  # type: ignore[union-attr]
    connection.close()
    until(lambda: engine.stats().num_running == 0 and call(live, "/ready")["under_way"] == 0)
    assert engine.stats().cache.num_sequences == 0


@pytest.mark.slow
def test_given_many_streams_at_once_then_each_is_its_own(live: Live, engine: Any) -> None:
    from kvpool.engine import SamplingParams

    prompts = [f"w{number} w{number + 1} w{number + 2}" for number in range(24)]
    expected = [result.text for result in engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0))]
    found = [""] * len(prompts)

    def read(number: int) -> None:
        with openai_client(live) as client:
            wanted = dict(model="tiny", prompt=prompts[number], max_tokens=12, temperature=0, stream=True)
            for part in client.completions.create(**wanted):
                found[number] += part.choices[0].text

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected


# --- the cache by HTTP ------------------------------------------------------------------------------------------------


def test_given_a_cached_prompt_then_it_can_be_asked_for_kept_and_forgotten(live: Live) -> None:
    assert call(live, "/v1/cache/query", {"prompt": PROMPT})["cached_tokens"] == 0
    assert call(live, "/v1/cache/warm", {"prompt": PROMPT})["prompt_tokens"] == 9
    assert call(live, "/v1/cache/query", {"prompt": PROMPT}) == {
        "prompt_tokens": 9,
        "cached_tokens": 8,
        "tiers": {"GPU": 8},
    }
    pin = call(live, "/v1/cache/pin", {"prompt": PROMPT})
    assert pin["pinned_tokens"] == 8
    assert call(live, "/v1/cache/stats")["tiny"]["pools"][0]["pinned"] == 2
    assert call(live, f"/v1/cache/pin/{pin['id']}", method="DELETE")["pinned_tokens"] == 0
    assert refusal(live, f"/v1/cache/pin/{pin['id']}", method="DELETE")[0] == 404
    assert call(live, "/v1/cache/invalidate", {"prompt": PROMPT})["removed_blocks"] == 1  # from its last whole block on
    assert call(live, "/v1/cache/query", {"prompt": PROMPT})["cached_tokens"] == 4
    assert call(live, "/v1/cache/invalidate", {"everything": True})["removed_blocks"] == 1
    assert call(live, "/v1/cache/query", {"prompt": PROMPT})["cached_tokens"] == 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sesion_id": "s1"},
        {"tenant": ""},
        {"session_id": "s1", "everything": True},
        {"session_id": "s1", "prompt": PROMPT},
        {"session_id": "s1", "cache_salt": "a"},
    ],
)
def test_given_a_misspelt_or_empty_invalidation_then_nothing_is_forgotten(live: Live, body: Any) -> None:
    call(live, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1, "session_id": "s1"})
    status, error = refusal(live, "/v1/cache/invalidate", body)
    assert (status, error["param"]) == (400, "sesion_id" if "sesion_id" in body else "everything")
    assert call(live, "/v1/cache/query", {"prompt": PROMPT})["cached_tokens"] > 0


def test_given_a_session_then_what_it_computed_can_be_forgotten(client: Any, live: Live) -> None:
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"session_id": "s1"})
    assert call(live, "/v1/cache/invalidate", {"session_id": "s2"})["removed_blocks"] == 0
    assert call(live, "/v1/cache/invalidate", {"session_id": "s1"})["removed_blocks"] == 2


def test_given_a_prompt_that_was_warmed_in_a_session_then_it_is_forgotten_with_it(live: Live) -> None:
    call(live, "/v1/cache/warm", {"prompt": PROMPT, "session_id": "s1"})
    assert call(live, "/v1/cache/invalidate", {"session_id": "s2"})["removed_blocks"] == 0
    assert call(live, "/v1/cache/invalidate", {"session_id": "s1"})["removed_blocks"] == 2
    assert call(live, "/v1/cache/query", {"prompt": PROMPT})["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["query", "warm", "prefetch", "invalidate"])
def test_given_a_time_for_what_is_not_pinned_then_it_is_refused(live: Live, path: str) -> None:
    status, error = refusal(live, f"/v1/cache/{path}", {"prompt": PROMPT, "ttl_seconds": 60})
    assert (status, error["param"]) == (400, "ttl_seconds")


def test_given_a_session_in_a_header_and_an_expected_continuation_then_the_cache_knows_both(
    client: Any, live: Live, engine: Any
) -> None:
    client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=1,
        extra_headers={"x-session-id": "s3"},
        extra_body={"expected_seconds": 3},
    )
    (root,) = engine.manager._cache.roots.values()
    assert {node.hint for node in root.children.values()} == {ReuseHint(expected_seconds=3).code}
    assert call(live, "/v1/cache/invalidate", {"session_id": "s3"})["removed_blocks"] == 2
    with pytest.raises(openai.BadRequestError, match="x-session-id"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, extra_headers={"x-session-id": "s" * 257})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_given_an_answer_that_calls_a_tool_then_the_policy_is_told_without_being_asked(
    path: str, live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.engine.requests.TOOL_CALL_MARKS", ("w",))  # every answer is a call
    function = {"name": "w33", "parameters": {}}
    tool = {
        "/v1/chat/completions": {"type": "function", "function": function},
        "/v1/messages": {"name": "w33", "input_schema": {}},
        "/v1/responses": {"type": "function", **function},
    }[path]
    said = [{"role": "user", "content": " ".join(f"w{number}" for number in range(9))}]
    body = {"model": "tiny", "stop_token_ids": list(range(160)), "tools": [tool]}
    said_as, length = ("input", "max_output_tokens") if path == "/v1/responses" else ("messages", "max_tokens")
    call(live, path, body | {said_as: said, length: 4})
    (root,) = engine.manager._cache.roots.values()
    assert {node.hint for node in root.children.values()} == {ReuseHint("tool_calls").code}


def test_given_tenants_then_each_sees_and_changes_its_own_cache_only(serve: Callable[..., Live]) -> None:
    live = serve(access=access("a", "b", "root"))
    call(live, "/v1/cache/warm", {"prompt": PROMPT, "session_id": "s"}, "sk-a")
    pin = call(live, "/v1/cache/pin", {"prompt": PROMPT}, "sk-a")
    assert call(live, "/v1/cache/query", {"prompt": PROMPT}, "sk-b")["cached_tokens"] == 0
    assert refusal(live, f"/v1/cache/pin/{pin['id']}", None, "sk-b", "DELETE")[0] == 404
    for others in ({"everything": True}, {"session_id": "s"}, {"prompt": PROMPT}):
        assert call(live, "/v1/cache/invalidate", others, "sk-b")["removed_blocks"] == 0
    assert call(live, "/v1/cache/query", {"prompt": PROMPT}, "sk-a")["cached_tokens"] == 8
    assert refusal(live, "/v1/cache/stats", None, "sk-a")[0] == 403
    assert "tiny" in call(live, "/v1/cache/stats", None, "sk-root")
    assert call(live, f"/v1/cache/pin/{pin['id']}", None, "sk-a", "DELETE")["pinned_tokens"] == 0


def test_given_a_quota_then_a_tenant_keeps_no_more_than_its_share(serve: Callable[..., Live], engine: Any) -> None:
    live = serve(access=access("a", "b", quotas={"a": CacheShare(guaranteed=1, maximum=3)}))
    try:
        for tenant in "ab":
            for start in (0, 20, 40):
                prompt = " ".join(f"w{start + number}" for number in range(9))
                call(live, "/v1/cache/warm", {"prompt": prompt}, f"sk-{tenant}")
        look = engine.stats().cache
        assert (look.tenants["a"], look.pools[0].cached) == ((3,), 3 + 6)
        assert engine.manager.cache.quotas()["a"].guaranteed == (1,)
    finally:
        engine.manager.cache.set_quota("a")


def test_given_a_file_of_keys_with_quotas_then_they_are_read_and_contradictions_refused(tmp_path: Path) -> None:
    lines = [new_key(tenant)[1] for tenant in ("a", "a", "b")]
    file = tmp_path / "keys"
    file.write_text(f"{lines[0]} guaranteed=10% maximum=0.5\n{lines[1]} admin\n{lines[2]} maximum=500\n")
    assert Access.read(file, {}).quotas == {"a": CacheShare(0.1, 0.5), "b": CacheShare(0, 500)}
    for wrong, words in (
        (f"{lines[0]} maximum=10%\n{lines[1]} maximum=20%", "another quota"),
        (f"{lines[0]} maximum=150%", "write 20%"),
        (f"{lines[0]} maximum=-1", "write 20%"),
        (f"{lines[0]} minimum=1", "guaranteed=SHARE"),
        (f"{lines[0]} maximum=1 maximum=1", "once each"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=words):
            Access.read(file, {})
    file.write_text(f"{lines[0]} maximum=10%")
    with pytest.raises(ConfigError, match="share one cache"):
        Access.read(file, {}, share=True)


def test_given_pins_that_ended_by_themselves_then_the_server_forgets_them(serve: Callable[..., Live]) -> None:
    live = serve(limits=Limits(pins_per_tenant=2))
    call(live, "/v1/cache/warm", {"prompt": PROMPT})
    brief = [call(live, "/v1/cache/pin", {"prompt": PROMPT, "ttl_seconds": 1e-9})["id"] for _ in range(5)]
    assert [refusal(live, f"/v1/cache/pin/{name}", method="DELETE")[0] for name in brief] == [404] * 5
    lasting = call(live, "/v1/cache/pin", {"prompt": PROMPT})["id"]
    call(live, "/v1/cache/invalidate", {"everything": True})
    assert refusal(live, f"/v1/cache/pin/{lasting}", method="DELETE")[0] == 404


def test_given_everything_of_a_tenant_is_forgotten_then_its_salts_are_too_and_others_stay(
    serve: Callable[..., Live],
) -> None:
    live = serve(access=access("a", "b", "root"))

    def cached(tenant: str, salt: str = "") -> int:
        body = {"prompt": PROMPT, "cache_salt": salt}
        return int(call(live, "/v1/cache/query", body, f"sk-{tenant}")["cached_tokens"])

    def warm() -> None:
        for tenant, salt in (("a", ""), ("a", "x"), ("a", "y"), ("b", "")):
            call(live, "/v1/cache/warm", {"prompt": PROMPT, "cache_salt": salt}, f"sk-{tenant}")

    warm()
    assert call(live, "/v1/cache/invalidate", {"cache_salt": "x"}, "sk-a") == {"removed_blocks": 2}
    assert [cached("a"), cached("a", "x"), cached("a", "y"), cached("b")] == [8, 0, 8, 8]
    assert call(live, "/v1/cache/invalidate", {"everything": True}, "sk-a") == {"removed_blocks": 4}
    assert [cached("a"), cached("a", "y"), cached("b")] == [0, 0, 8]
    warm()
    assert refusal(live, "/v1/cache/invalidate", {"tenant": "a"}, "sk-b")[0] == 403
    assert call(live, "/v1/cache/invalidate", {"tenant": "a", "everything": True}, "sk-root") == {"removed_blocks": 6}
    assert [cached("a"), cached("a", "x"), cached("b")] == [0, 0, 8]


def test_given_as_many_pins_as_a_tenant_may_have_then_the_next_is_refused(serve: Callable[..., Live]) -> None:
    live = serve(access=access("a", "b"), limits=Limits(pins_per_tenant=2))
    for tenant in "ab":
        call(live, "/v1/cache/warm", {"prompt": PROMPT}, f"sk-{tenant}")
    pins = [call(live, "/v1/cache/pin", {"prompt": PROMPT}, "sk-a")["id"] for _ in range(2)]
    status, error = refusal(live, "/v1/cache/pin", {"prompt": PROMPT}, "sk-a")
    assert (status, error["code"]) == (429, "too_many_pins")
    pins_of_b = [call(live, "/v1/cache/pin", {"prompt": PROMPT}, "sk-b")["id"]]
    call(live, f"/v1/cache/pin/{pins.pop()}", None, "sk-a", "DELETE")
    pins.append(call(live, "/v1/cache/pin", {"prompt": PROMPT}, "sk-a")["id"])
    for tenant, names in (("a", pins), ("b", pins_of_b)):
        for name in names:
            call(live, f"/v1/cache/pin/{name}", None, f"sk-{tenant}", "DELETE")


# --- what an operator reads -------------------------------------------------------------------------------------------


def test_given_a_lack_of_room_then_a_tenant_learns_nothing_of_the_others(caplog: Any) -> None:
    errors = [
        NeverFitsError("request 8 can never run: it needs 90 blocks, 64 in all"),
        OutOfBlocksError("a request needs 9 blocks; 2 of 64 are free"),
        PinBudgetError("pinning 8 more tokens would exceed max_pinned_tokens=100 (96 are pinned)"),
    ]
    with caplog.at_level("INFO", "kvpool"):
        told = [str(problem_of(error)) for error in errors]
    assert not any(character.isdigit() for character in "".join(told))
    assert [str(error) in caplog.text for error in errors] == [True] * 3


def test_given_requests_that_end_before_their_first_token_then_no_whole_request_is_quicker_than_its_first_token(
    serve: Callable[..., Live],
) -> None:
    live = serve()
    client = openai_client(live)
    for _ in range(3):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
        refusal(live, "/v1/completions", {"prompt": [1] * 600, "max_tokens": 200})
    client.completions.create(model="tiny", prompt=[PROMPT, PROMPT], max_tokens=2)
    text = call(live, "/metrics")
    assert 'kvpool_first_token_seconds_count{model="tiny"} 4.0' in text, "one for each request of a client"
    assert 'kvpool_request_seconds_count{model="tiny"} 4.0' in text
    assert 'kvpool_requests_ended_total{model="tiny",outcome="completed"} 4.0' in text
    first, whole = (
        float(re.search(rf'^kvpool_{name}_seconds_sum{{model="tiny"}} (\S+)$', text, re.M)[1])  # type: ignore[index]
        for name in ("first_token", "request")
    )
    assert first <= whole
    client.close()


def test_given_traffic_then_the_metrics_tell_of_it(client: Any, live: Live) -> None:
    for _ in range(2):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3)
    text = call(live, "/metrics")
    assert 'kvpool_generated_tokens_total{model="tiny"} 6.0' in text
    assert 'kvpool_first_token_seconds_count{model="tiny"} 2.0' in text
    assert 'kvpool_queue_seconds_count{model="tiny"} 2.0' in text
    assert 'kvpool_hit_tokens_total{model="tiny",tier="GPU"}' in text
    assert 'kvpool_blocks{model="tiny",pool="0",state="free",tier="GPU"}' in text
    from prometheus_client.parser import text_string_to_metric_families

    assert len(list(text_string_to_metric_families(text))) > 20


def test_given_texts_and_tokens_then_each_becomes_the_other(live: Live) -> None:
    tokens = call(live, "/tokenize", {"prompt": "w5 w6"})
    assert (tokens["tokens"], tokens["count"]) == ([5, 6], 2)
    assert call(live, "/detokenize", {"tokens": [5, 6]}) == {"prompt": "w5 w6"}
    said = call(live, "/tokenize", {"messages": [{"role": "w1", "content": "w5"}]})
    assert said["tokens"] == [1, 5]
    assert refusal(live, "/tokenize", {})[0] == 400


def test_given_a_key_with_as_many_requests_as_it_may_have_then_it_is_refused_and_others_are_not() -> None:
    gate = Gate(Limits(requests=4, requests_per_key=2))
    with gate.passed("a"), gate.passed("a"):
        with pytest.raises(Problem, match="this key has 2 requests under way"), gate.passed("a"):
            pass
        with gate.passed("b", 2), pytest.raises(Problem, match="no more requests now"), gate.passed("c"):
            pass
    with gate.passed("a", 2):
        assert gate.under_way == 2


def test_given_several_prompts_then_each_counts_as_a_request(serve: Callable[..., Live]) -> None:
    live = serve(limits=Limits(requests=3, requests_per_key=3))
    assert call(live, "/v1/completions", {"prompt": ["w5", "w6", "w7"], "max_tokens": 1})["usage"]["prompt_tokens"] == 3
    status, error = refusal(live, "/v1/completions", {"prompt": ["w5"] * 4, "max_tokens": 1})
    assert (status, error["param"]) == (400, "prompt")
    with openai_client(live) as client:
        stream = client.completions.create(
            model="tiny", prompt=["w5", "w6"], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert refusal(live, "/v1/completions", {"prompt": ["w5", "w6"]})[0] == 429
        assert call(live, "/v1/completions", {"prompt": "w5", "max_tokens": 1})["choices"]
        stream.close()
        until(lambda: call(live, "/ready")["under_way"] == 0)


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/completions", "POST"), ("/v1/cache/pin", "GET, POST"), ("/health", "GET")]
)
def test_given_a_wrong_method_then_the_answer_names_the_right_ones(live: Live, path: str, methods: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(live, path, method="PUT")
    with refused.value:
        assert (refused.value.code, refused.value.headers["allow"]) == (405, methods)


def test_given_a_failure_of_ours_then_it_is_told_in_the_same_form(
    live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "token_ids", lambda prompt: 1 // 0)
    status, error = refusal(live, "/tokenize", {"prompt": "w5"})
    assert (status, error["type"], error["message"]) == (500, "server_error", "this server failed: ZeroDivisionError")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "return_tensors"])
def test_given_arguments_of_the_tokenizer_as_variables_of_the_template_then_they_are_refused(
    live: Live, name: str
) -> None:
    body = {"messages": [{"role": "w1", "content": "w5"}], "max_tokens": 1}
    assert call(live, "/v1/chat/completions", body | {"chat_template_kwargs": {"thinking": True}})["choices"]
    status, error = refusal(live, "/v1/chat/completions", body | {"chat_template_kwargs": {name: "w7"}})
    assert (status, error["param"]) == (400, "chat_template_kwargs")


def test_given_a_conversation_on_which_the_template_fails_then_it_is_the_conversation_that_is_wrong(
    live: Live, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0]['name'] + 1 }}")
    status, error = refusal(
        live, "/v1/chat/completions", {"messages": [{"role": "user", "content": "w5", "name": "w6"}]}
    )
    assert status == 400
    assert "chat template refuses" in error["message"]


def test_given_a_body_of_another_type_then_the_answer_names_the_right_one(live: Live) -> None:
    request = urllib.request.Request(live.url + "/v1/completions", b'{"prompt": "w5"}', {"content-type": "text/plain"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert "content-type: application/json" in json.loads(refused.value.read())["error"]["message"]


def test_given_an_unknown_path_then_it_is_refused_in_the_same_form(live: Live) -> None:
    assert refusal(live, "/v2/nothing")[1]["message"] == "GET /v2/nothing: Not Found"


def test_given_a_deadline_that_passes_then_the_answer_ends_early(client: Any) -> None:
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=490, extra_body={"deadline_ms": 1, "ignore_eos": True}
    )
    assert answer.usage.completion_tokens < 490
    assert answer.choices[0].finish_reason == "length"
