"""The proxy in front of servers that answer, refuse, die before their first word and die in the middle of a sentence."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import managers
from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.proxy.backends import Backend, Backends, NodeLostError, ProxyLimits
from kvpool.cluster.proxy.passing import (
    as_chat,
    given_tokens,
    read_routing_request,
    session_of,
    tokenize_body,
)
from kvpool.cluster.router import Router
from kvpool.errors import ConfigError

pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from live_app import Live  # noqa: E402

SIZE = 4
WORDS = 12


class FakeServer:
    """A server with a real cache that it announces, whose model says w0 w1 w2; a test says how it behaves."""

    def __init__(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Route

        from kvpool.cluster.publisher import EventPublisher

        self.manager = managers.make_manager(gpu_blocks=64)
        self.publisher = EventPublisher(self.manager, "tcp://127.0.0.1:0", heartbeat=0.05)
        self.behaviour = "answers"
        self.prompts: list[list[int]] = []
        self.num_left = 0  # clients that did not wait
        self.adapters = {"m"}  # names that it answers to
        self.num_unknown = 0  # requests for others
        paths = {"/ready": self.ready, "/tokenize": self.tokenize, "/v1/models": self.models, "/echo": self.echo}
        paths |= {"/v1/completions": self.complete, "/echo/{rest:path}": self.echo}
        paths["/v1/cache/invalidate"] = self.invalidate
        routes = [Route(path, call, methods=["GET", "POST"]) for path, call in paths.items()]
        self.live = Live(Starlette(routes=routes), "critical")

    @property
    def backend(self) -> str:
        return f"{self.live.url}={self.publisher.endpoint},{self.publisher.replay_endpoint}"

    async def ready(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        if self.behaviour.startswith("hangs"):
            await self.nobody(request)
        return JSONResponse({}, status_code=200 if self.behaviour != "drains" else 503)

    async def nobody(self, request: Any) -> None:
        """Says nothing until whoever asked has left."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1

    async def models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse({"data": ["m"]})

    async def echo(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        headers = [[name.decode(), value.decode("latin-1")] for name, value in request.headers.raw]
        path = request.scope["raw_path"] + b"?" + request.scope["query_string"]
        answer = JSONResponse([*headers, ["path", path.decode()]])
        answer.set_cookie("a", "1")
        answer.set_cookie("b", "2")
        return answer

    async def tokenize(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        garbled = {"content-encoding": "gzip"} if self.behaviour == "garbles" else None
        body = await request.json()
        if (unknown := self.unknown(body)) is not None:
            return unknown
        return JSONResponse({"tokens": [int(word) for word in body["prompt"].split()]}, headers=garbled)

    def unknown(self, body: Any) -> Any:
        """The answer to a request for a model that is not here; None if it is."""
        from starlette.responses import JSONResponse

        if body.get("model", "m") in self.adapters:
            return None
        self.num_unknown += 1
        return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, status_code=404)

    async def complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        body = await request.json()
        if self.behaviour in ("drains", "refuses"):
            return JSONResponse({"error": {}}, status_code=503)
        if (unknown := self.unknown(body)) is not None:
            return unknown
        if self.behaviour == "is wrong":
            return JSONResponse({"error": {"message": "no such model"}}, status_code=404)
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [int(word) for word in body["prompt"].split()]
        self.prompts.append(prompt)
        if self.behaviour in ("waits", "hangs"):
            await self.nobody(request)
        cached = self.manager.match_prefix(prompt).num_tokens
        handle = self.manager.allocate(len(self.prompts), prompt)
        self.manager.commit(handle, len(prompt) - handle.num_cached_tokens)
        self.manager.free(handle)

        async def words() -> AsyncIterator[bytes]:
            for at in range(WORDS):
                if at == {"dies at once": 0, "dies later": 3}.get(self.behaviour):
                    raise ConnectionError
                if (at, self.behaviour) == (3, "hangs later"):
                    await asyncio.Event().wait()
                yield f"data: w{at}\n\n".encode()
            yield b"data: [DONE]\n\n"

        if body.get("stream"):
            return StreamingResponse(words(), media_type="text/event-stream")
        if self.behaviour == "dies at once":
            return StreamingResponse(words(), media_type="application/json", headers={"content-length": "1000"})
        return JSONResponse({"cached": cached})

    async def invalidate(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body = await request.json()
        if (unknown := self.unknown(body)) is not None:
            return unknown
        if self.behaviour == "refuses" or body == {}:
            return JSONResponse({"error": {"message": "name something"}}, status_code=400)
        return JSONResponse({"removed_blocks": self.manager.cache.invalidate(body["prompt"])})

    def close(self) -> None:
        self.live.stop(waits=False)
        self.publisher.close()


class Fleet:
    """Some servers and a proxy in front of them."""

    def __init__(self, num_servers: int, **options: Any) -> None:
        from kvpool.cluster.proxy.app import Proxy, create_proxy_app

        self.servers = [FakeServer() for _ in range(num_servers)]
        backends = [Backend.parse(server.backend) for server in self.servers]
        self.proxy = Proxy(backends, block_size=SIZE, health_seconds=0.02, **options)
        self.live = Live(create_proxy_app(self.proxy), "critical")
        self.client = httpx.Client(base_url=self.live.url, timeout=60, trust_env=False)
        self.by_url = {server.live.url: server for server in self.servers}
        self.until(lambda: all(load.is_ready for load in self.proxy.router.nodes.values()))

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end, "it did not come true in half a minute"
            time.sleep(0.005)

    def ask(self, prompt: Any, **options: Any) -> Any:
        answer = self.client.post("/v1/completions", json={"prompt": prompt, **options})
        return answer, self.by_url.get(answer.headers.get("x-kvpool-node", ""))

    def others(self, server: FakeServer | None) -> list[FakeServer]:
        return [each for each in self.servers if each is not server]

    def mend(self) -> None:
        """All servers answer again, and the proxy knows it."""
        for server in self.servers:
            server.behaviour = "answers"
        self.until(lambda: all(load.is_ready for load in self.proxy.router.nodes.values()))

    def close(self) -> None:
        self.client.close()
        self.live.stop(waits=False)
        for server in self.servers:
            server.close()


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[Fleet]:
    fleet = Fleet(3)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Iterator[Fleet]:
    yield shared_fleet
    shared_fleet.mend()
    loads = shared_fleet.proxy.router
    shared_fleet.until(lambda: all(load.num_requests == load.num_waiting_tokens == 0 for load in loads.nodes.values()))


def test_given_a_prompt_that_one_server_cached_when_asked_as_tokens_or_text_then_it_goes_there(fleet: Fleet) -> None:
    prompt = list(range(100, 140))
    _, first = fleet.ask(prompt)
    fleet.until(lambda: first.live.url in fleet.proxy.index.match(prompt))
    for again in (prompt, " ".join(map(str, prompt)), [*prompt, 7]):
        answer, server = fleet.ask(again)
        assert server is first
        assert answer.json()["cached"] >= 36


def test_given_a_request_to_forget_a_prompt_then_every_server_forgets_it(fleet: Fleet) -> None:
    prompt = list(range(7000, 7012))
    for server in fleet.servers:
        handle = server.manager.allocate("to forget", prompt)
        server.manager.commit(handle, len(prompt))
        server.manager.free(handle)
    answer = fleet.client.post("/v1/cache/invalidate", json={"prompt": prompt})
    assert (answer.status_code, answer.json()) == (200, {"removed_blocks": 3})  # the last block of each
    assert fleet.client.post("/v1/cache/invalidate", json={"prompt": prompt}).json() == {"removed_blocks": 0}
    refused = fleet.client.post("/v1/cache/invalidate", json={})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "name something")


def test_given_servers_that_may_not_have_forgotten_it_then_the_answer_names_them_and_what_was_done(
    fleet: Fleet,
) -> None:
    first, second, _ = fleet.servers
    first.behaviour, second.adapters = "refuses", {"other"}
    answer = fleet.client.post("/v1/cache/invalidate", json={"model": "m", "prompt": [1, 2, 3, 4, 5]})
    second.adapters = {"m"}
    assert answer.status_code == 503
    words = f"{first.live.url} answered 400; 1 others have forgotten it (0 blocks): ask again"
    assert answer.json()["error"]["message"] == words


def test_given_a_stream_when_it_runs_then_every_part_passes_through(fleet: Fleet) -> None:
    answer, _ = fleet.ask([1, 2, 3], stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == "".join(f"data: w{at}\n\n" for at in range(WORDS)) + "data: [DONE]\n\n"


@pytest.mark.parametrize("behaviour", ["refuses", "dies at once"])
@pytest.mark.parametrize("stream", [True, False])
def test_given_a_server_that_fails_before_its_first_word_then_another_one_answers(
    fleet: Fleet, behaviour: str, stream: bool
) -> None:
    prompt = [*range(200, 240), stream, len(behaviour)]
    _, first = fleet.ask(prompt)
    first.behaviour = behaviour
    answer, second = fleet.ask(prompt, stream=stream)
    assert answer.status_code == 200
    assert second in fleet.others(first)


def test_given_a_server_that_dies_in_a_stream_then_the_client_reads_an_error_and_no_end(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.behaviour = "dies later"
    answer, _ = fleet.ask([5, 6, 7], stream=True)
    assert answer.text.startswith("data: w0\n\ndata: w1\n\ndata: w2\n\n")
    assert "[DONE]" not in answer.text
    error = json.loads(answer.text.rsplit("data: ", 1)[1])["error"]
    assert error["code"] == "node_lost"


def test_given_no_server_that_answers_then_the_client_is_told_so_and_how_to_go_on(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.behaviour = "refuses"
    answer, _ = fleet.ask([1, 2, 3])
    assert answer.status_code in (502, 503)
    assert answer.json()["error"]["code"] == "no_node"
    assert answer.headers["retry-after"] == "1"


def test_given_a_server_that_drains_then_it_gets_no_requests_and_what_it_held_is_learnt_again_later(
    fleet: Fleet,
) -> None:
    prompt = list(range(300, 340))
    _, first = fleet.ask(prompt)
    fleet.until(lambda: first.live.url in fleet.proxy.index.match(prompt))
    first.behaviour = "drains"
    fleet.until(lambda: not fleet.proxy.router.nodes[first.live.url].is_ready)
    assert first.live.url not in fleet.proxy.index.match(prompt)
    _, second = fleet.ask([*range(400, 440)])
    assert second in fleet.others(first)
    first.behaviour = "answers"
    fleet.until(lambda: first.live.url in fleet.proxy.index.match(prompt))


def test_given_a_refusal_of_the_request_itself_then_it_passes_through_and_nobody_else_is_asked(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.behaviour = "is wrong"
    answer, server = fleet.ask([1, 2, 3])
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "no such model"
    assert server in fleet.servers


def test_given_an_adapter_that_one_server_has_then_its_requests_go_there_and_the_others_are_asked_once() -> None:
    fleet = Fleet(3)
    try:
        has = fleet.servers[2]
        has.adapters.add("sql")
        for prompt in ([1, 2, 3], "4 5 6", [7, 8]) * 2:
            answer, server = fleet.ask(prompt, model="sql")
            assert (answer.status_code, server) == (200, has)
        assert [each.num_unknown <= 1 for each in fleet.others(has)] == [True, True]

        answer, server = fleet.ask([1, 2, 3], model="nobody's")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        asked = sum(each.num_unknown for each in fleet.servers)
        answer, server = fleet.ask([1, 2, 3], model="nobody's")
        assert answer.status_code == 404
        assert sum(each.num_unknown for each in fleet.servers) == asked + 1
    finally:
        fleet.close()


def test_given_the_name_of_an_adapter_in_events_then_routing_knows_it() -> None:
    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        return {"tokens": [5, 6], "cache_keys": [], "lora_name": "digest"}

    asked = asyncio.run(read_routing_request("/v1/completions", {}, b'{"prompt": "x", "model": "sql"}', tokenize))
    assert (asked.tokens, asked.lora_name) == ([5, 6], "digest")


def test_given_other_paths_and_bodies_that_cannot_be_read_then_a_server_sees_them(fleet: Fleet) -> None:
    assert fleet.client.get("/v1/models").json() == {"data": ["m"]}
    assert fleet.client.post("/v1/completions", content=b"{").status_code == 500  # the fake's own answer
    assert fleet.client.get("/nowhere").status_code == 404


@pytest.mark.parametrize("body", [b'{"prompt": [1%s]}' % (b"0" * 30), b'{"prompt": [-1]}', b"[" * 200_000])
def test_given_a_prompt_that_no_model_has_then_it_is_for_a_server_to_refuse(fleet: Fleet, body: bytes) -> None:
    answer = fleet.client.post("/v1/completions", content=body)
    assert answer.headers["x-kvpool-node"] in fleet.by_url


def test_given_headers_then_they_pass_as_they_are_and_no_client_gets_the_cookies_of_another(fleet: Fleet) -> None:
    given = [(b"x-name", "José".encode("latin-1")), (b"x-two", b"1"), (b"x-two", b"2")]
    for _ in range(len(fleet.servers) + 1):
        answer = httpx.get(f"{fleet.live.url}/echo", headers=given, trust_env=False)
        seen = [header for header in answer.json() if header[0].startswith(("x-", "cookie"))]
        assert seen == [["x-name", "José"], ["x-two", "1"], ["x-two", "2"]]
        assert [cookie[:3] for cookie in answer.headers.get_list("set-cookie")] == ["a=1", "b=2"]


def test_given_the_proxy_when_asked_for_its_statistics_then_nodes_decisions_and_the_index_are_there(
    fleet: Fleet,
) -> None:
    fleet.ask([1, 2, 3])
    said = fleet.client.get("/route/stats").json()
    assert set(said["nodes"]) == set(fleet.by_url)
    assert said["router"]["num_routes"] > 0
    assert all(node["events"]["num_applied"] > 0 for node in said["nodes"].values())


def test_given_the_proxy_when_prometheus_asks_then_it_gets_figures_of_every_server_from_the_proxy_itself(
    fleet: Fleet,
) -> None:
    families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families
    _, server = fleet.ask([1, 2, 3])
    answer = fleet.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "x-kvpool-node" not in answer.headers
    rows = {family.name: family.samples for family in families(answer.text)}
    assert len(rows) == answer.text.count("# TYPE") > 10
    for name in ("node_ready", "node_requests", "node_prompt_tokens", "node_blocks", "node_messages"):
        assert {row.labels["node"] for row in rows[f"kvpool_route_{name}"]} == set(fleet.by_url)
    told = fleet.client.get("/route/stats").json()
    routes = {row.labels["node"]: row.value for row in rows["kvpool_route_node_routes"]}
    assert routes == {url: node["num_routes"] for url, node in told["nodes"].items()}
    assert routes[server.live.url] > 0
    reasons = {row.labels["reason"]: row.value for row in rows["kvpool_route_decisions"]}
    assert sum(reasons.values()) == told["router"]["num_routes"]


@pytest.mark.parametrize(
    ("body", "question", "tokens"),
    [
        ({"prompt": [1, 2]}, None, [1, 2]),
        ({"prompt": [[1, 2], [3]]}, None, [1, 2]),
        ({"prompt": "a", "model": "m"}, {"model": "m", "prompt": "a"}, []),
        ({"prompt": ["a", "b"], "cache_salt": "s"}, {"cache_salt": "s", "prompt": "a"}, []),
        ({"messages": [1], "tools": [2]}, {"messages": [1], "tools": [2], "endpoint": "/v1/completions"}, []),
        ({"input": "a"}, {"input": "a", "endpoint": "/v1/completions"}, []),
        ({"prompt": [True]}, None, []),
        ({"prompt": [-1, 2]}, None, []),
        ({"prompt": [2**31]}, None, []),
        ({}, None, []),
    ],
)
def test_given_a_body_then_its_tokens_are_known_or_asked_for(body: Any, question: Any, tokens: list[int]) -> None:
    assert tokenize_body("/v1/completions", body) == question
    assert list(given_tokens(body)) == tokens


def test_given_a_question_about_the_cache_then_its_own_endpoint_stays() -> None:
    body = {"messages": [1], "endpoint": "/v1/messages"}
    assert tokenize_body("/v1/cache/query", body) == body


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"input": "a", "instructions": "s"}, [("system", "s"), ("user", "a")]),
        (
            {
                "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]},
                    {"role": "user", "content": "behind it"},
                ],
            },
            [("system", "st"), ("user", "a")],
        ),
        ({"system": 3, "messages": 4}, []),
    ],
)
def test_given_a_server_that_reads_chats_only_then_it_is_asked_about_the_beginning_as_a_chat(
    body: Any, chat: Any
) -> None:
    questions: list[Any] = []

    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        questions.append(question)
        return {"tokens": [7]} if "endpoint" not in question else {}

    made = as_chat(body)
    assert (None if made is None else [(each["role"], each["content"]) for each in made["messages"]]) == chat
    asked = asyncio.run(read_routing_request("/v1/messages", {}, json.dumps(body).encode(), tokenize))
    assert [list(asked.tokens), questions[1:]] == ([[], []] if made is None else [[7], [made]])


def test_given_tools_of_another_form_then_a_chat_has_them_as_functions() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, {"type": "function", "name": "g"}]
    chat = as_chat({"system": "s", "messages": [], "tools": tools, "model": "m"})
    assert chat is not None
    assert [tool["function"] for tool in chat["tools"]] == [
        {"name": "f", "description": "d", "parameters": {"type": "object"}},
        {"name": "g"},
    ]


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"prompt_cache_key": "s1"}, {"session_id": "s1"}),
        ({"metadata": {"user_id": "user_1f_account_2e_session_s1"}}, {"session_id": "s1"}),
        ({"metadata": {"user_id": '{"device_id": "d", "session_id": "s1"}'}, "user": "u"}, {"session_id": "s1"}),
        ({"metadata": {"user_id": "u"}}, {"user": "u"}),
        ({"metadata": {"user_id": "[1]"}}, {"user": "[1]"}),
        ({"metadata": {"user_id": 5}, "user": 6}, {}),
    ],
)
def test_given_what_agents_send_then_their_session_is_known(body: Any, same: Any) -> None:
    assert session_of(body, {}) == session_of(same, {})


def test_given_a_conversation_that_no_server_can_make_tokens_then_its_beginning_is_its_session() -> None:
    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        return {}

    def session(*said: str) -> str | None:
        turns = [{"role": "developer", "content": "s"}, *({"role": "user", "content": text} for text in said)]
        body = json.dumps({"input": turns}).encode()
        return asyncio.run(read_routing_request("/v1/responses", {}, body, tokenize)).session

    assert session("a") == session("a", "b") != session("b")


def test_given_images_of_a_prompt_then_their_blocks_have_keys_as_in_events() -> None:
    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        return {"tokens": list(range(13)), "cache_keys": ["scope"], "images": [[6, 3, "cat"]]}

    asked = asyncio.run(read_routing_request("/v1/messages", {}, b'{"messages": []}', tokenize))
    assert asked.extra_keys(4) == [["scope"], ["cat@2"], ["cat@-2"]]


def test_given_two_keys_then_their_sessions_of_one_name_are_two() -> None:
    sessions = {session_of({"user": "alice"}, {"authorization": key}) for key in ("a", "b")}
    assert len(sessions) == 2
    assert session_of({}, {}) is None


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_given_a_caller_with_a_key_then_its_prompt_is_made_tokens_with_it_and_its_sessions_are_its_own(
    header: str,
) -> None:
    seen: list[dict[str, str]] = []

    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        seen.append(credentials)
        return {"tokens": [1, 2]}

    body = json.dumps({"messages": [], "user": "alice"}).encode()
    asked = [
        asyncio.run(read_routing_request("/v1/messages", {header: key, "x-other": "1"}, body, tokenize)) for key in "ab"
    ]
    assert seen == [{header: "a"}, {header: "b"}]
    assert len({each.session for each in asked}) == 2


@pytest.mark.parametrize(
    ("headers", "salt", "isolated_by"),
    [
        ({"authorization": "Bearer acme's"}, None, ("acme's scope",)),
        ({}, "mine", ("acme's scope",)),
        ({}, None, ()),
    ],
)
def test_given_token_ids_then_only_what_isolates_their_caller_is_asked_for(
    headers: dict[str, str], salt: str | None, isolated_by: tuple[str, ...]
) -> None:
    questions: list[dict[str, Any]] = []

    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        assert credentials == headers
        questions.append(question)
        return {"tokens": [99], "cache_keys": ["acme's scope"]}

    body = {"model": "m", "prompt": [1, 2, 3]} | ({"cache_salt": salt} if salt else {})
    asked = asyncio.run(read_routing_request("/v1/completions", headers, json.dumps(body).encode(), tokenize))
    assert (asked.tokens, asked.first_keys) == ([1, 2, 3], isolated_by)
    named = {name: value for name, value in body.items() if name != "prompt"}
    assert [{**question, "prompt": ""} for question in questions] == [{**named, "prompt": ""}] * len(isolated_by)


def test_given_token_ids_and_servers_that_know_no_scopes_then_the_salt_isolates_them() -> None:
    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        return {}

    asked = asyncio.run(read_routing_request("/v1/completions", {}, b'{"prompt": [1, 2], "cache_salt": "s"}', tokenize))
    assert (asked.tokens, asked.first_keys) == ([1, 2], ("s",))


def test_given_a_body_that_can_be_read_and_not_written_again_then_it_is_for_the_server_to_refuse() -> None:
    async def tokenize(question: dict[str, Any], credentials: dict[str, str]) -> dict[str, Any]:
        raise RecursionError

    asked = asyncio.run(read_routing_request("/v1/completions", {}, b'{"prompt": "w1"}', tokenize))
    assert asked.tokens == ()


def test_given_a_long_name_of_a_session_then_little_is_kept_of_it_and_nothing_of_the_key() -> None:
    session = session_of({"user": "\ud800" * 100_000}, {"authorization": "Bearer secret"})
    assert session is not None
    assert len(session) == 32
    assert "secret" not in session


# --- clients and servers that do not keep to the rules -----------------------------------------------------------------


def test_given_other_limits_then_they_are_numbers_that_make_sense() -> None:
    for wrong in ({"body_bytes": 0}, {"send_seconds": 0}, {"silence_seconds": -1.0}, {"lost_seconds": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ProxyLimits(**wrong)


@pytest.fixture(scope="module")
def strict_fleet() -> Iterator[Fleet]:
    limits = ProxyLimits(body_bytes=1000, send_seconds=1.0, lost_seconds=0.5)
    made = Fleet(3, limits=limits, health_patience=2.0)
    yield made
    made.close()


@pytest.fixture
def strict(strict_fleet: Fleet) -> Iterator[Fleet]:
    yield strict_fleet
    strict_fleet.mend()


@pytest.mark.parametrize("announced", [True, False])
def test_given_a_body_over_the_limit_then_it_is_refused_and_no_server_sees_it(strict: Fleet, announced: bool) -> None:
    body = json.dumps({"prompt": [7] * 1000}).encode()
    content = body if announced else (body[at : at + 300] for at in range(0, len(body), 300))
    answer = strict.client.post("/v1/completions", content=content)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"
    assert "1000 bytes" in answer.json()["error"]["message"]
    assert not any([7] * 1000 in server.prompts for server in strict.servers)


def test_given_the_name_of_a_stranger_then_it_is_refused_and_no_server_sees_it(strict: Fleet) -> None:
    answer = strict.client.post("/v1/completions", json={"prompt": [8] * 9}, headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_name")
    assert not any([8] * 9 in server.prompts for server in strict.servers)


def test_given_half_a_body_when_nothing_more_comes_then_it_is_refused(strict: Fleet) -> None:
    address = strict.client.base_url
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{"prompt": ['
        )
        said = b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"too_slow" in said


@pytest.mark.parametrize("stream", [True, False])
def test_given_a_client_that_leaves_before_anything_came_then_its_server_notices(fleet: Fleet, stream: bool) -> None:
    for server in fleet.servers:
        server.behaviour = "waits"
    before = sum(server.num_left for server in fleet.servers)
    body = json.dumps({"prompt": [8, 8, stream], "stream": stream}).encode()
    address = fleet.client.base_url
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        fleet.until(lambda: any([8, 8, stream] in server.prompts for server in fleet.servers))
    fleet.until(lambda: sum(server.num_left for server in fleet.servers) == before + 1)


@pytest.mark.slow
def test_given_a_server_that_answers_nobody_then_its_request_goes_elsewhere(strict: Fleet) -> None:
    prompt = list(range(500, 540))
    _, first = strict.ask(prompt)
    first.behaviour = "hangs"
    answer, second = strict.ask(prompt)
    assert answer.status_code == 200
    assert second in strict.others(first)
    assert first.prompts[-1] == prompt  # it had it


@pytest.mark.skipif(not hasattr(asyncio.Task, "uncancel"), reason="Python 3.10 does not count what cancelled a task")
@pytest.mark.parametrize(
    ("happens", "ends_with"),
    [
        (("lost",), NodeLostError),
        (("lost", "lost"), NodeLostError),
        (("left",), asyncio.CancelledError),
        (("lost", "left"), asyncio.CancelledError),
        (("left", "lost"), asyncio.CancelledError),
    ],
)
def test_given_a_client_that_leaves_as_its_server_is_given_up_then_nobody_else_is_asked(
    happens: tuple[str, ...], ends_with: type[BaseException]
) -> None:
    index, url = ClusterIndex(SIZE), "http://a"
    backends = Backends(
        [Backend(url, None, None)], index, Router(index), None, every=1.0, patience=1.0, lost_seconds=1.0
    )

    async def work() -> None:
        task: Any = asyncio.current_task()
        try:
            with backends.waiting(url):
                await asyncio.Event().wait()
        except NodeLostError:
            assert task.cancelling() == 0
            raise

    async def run() -> None:
        working = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        for what in happens:  # in one turn of the loop
            if what == "lost":
                backends._give_up(url)
            else:
                working.cancel()
        with pytest.raises(ends_with):
            await working

    asyncio.run(run())


def test_given_a_server_that_comes_and_goes_then_few_lines_are_written_and_the_last_one_is_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    index, url = ClusterIndex(SIZE), "http://a"
    backends = Backends(
        [Backend(url, None, None)], index, Router(index), None, every=1.0, patience=1.0, lost_seconds=1.0
    )
    for number in range(101):
        backends.note(url, is_ready=number % 2 == 0)
    assert len(caplog.records) == 10
    backends.note(url, is_ready=True)  # nothing changes, and the minute is not over
    assert len(caplog.records) == 10
    now += 60.0
    for _ in range(3):
        backends.note(url, is_ready=True)
    assert [record.getMessage() for record in caplog.records[8:]] == [
        "http://a takes requests",
        "http://a does not answer: it gets no requests",
        "http://a takes requests (91 more such lines were left out before)",
    ]


def test_given_a_server_that_answers_nobody_in_a_stream_then_the_client_reads_an_error_and_no_end(
    strict: Fleet,
) -> None:
    for server in strict.servers:
        server.behaviour = "hangs later"
    answer = strict.client.post("/v1/completions", json={"prompt": [9, 9], "stream": True})
    strict.until(lambda: not any(load.num_requests for load in strict.proxy.router.nodes.values()))
    assert answer.text.startswith("data: w0\n\ndata: w1\n\ndata: w2\n\n")
    assert json.loads(answer.text.rsplit("data: ", 1)[1])["error"]["code"] == "node_lost"


def test_given_servers_whose_tokens_cannot_be_read_then_a_prompt_is_answered_without_them(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.behaviour = "garbles"
    answer = fleet.client.post("/v1/completions", json={"prompt": "5 6 7 8"})
    assert answer.status_code == 200


def test_given_a_request_that_no_server_survives_then_two_get_it_and_no_third(fleet: Fleet) -> None:
    for server in fleet.servers:
        server.behaviour = "dies at once"
    prompt = [6, 6, 6]
    answer, _ = fleet.ask(prompt)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "node_lost"
    assert sum(prompt in server.prompts for server in fleet.servers) == 2


@pytest.mark.slow
def test_given_a_server_that_lives_and_says_nothing_then_it_is_not_waited_for_for_ever() -> None:
    fleet = Fleet(2, limits=ProxyLimits(silence_seconds=2.0))
    try:
        for server in fleet.servers:
            server.behaviour = "waits"
        answer, _ = fleet.ask([1, 2, 3])
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "silence"
        assert sum(len(server.prompts) for server in fleet.servers) == 1  # no other one is made to wait
    finally:
        fleet.close()


@pytest.mark.parametrize("host", ["localhost", "localhost/y", "localhost#", "localhost?"])
def test_given_a_path_then_a_server_sees_it_as_it_was_written(fleet: Fleet, host: str) -> None:
    address = fleet.client.base_url
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        head = (
            f"GET /echo/a%2Fb%3F/c?d=%26&e HTTP/1.1\r\nhost: {host}\r\nconnection: close, x-mine\r\nx-mine: 1\r\n\r\n"
        )
        connection.sendall(head.encode())
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    seen = dict(json.loads(said.partition(b"\r\n\r\n")[2]))
    assert seen["path"] == "/echo/a%2Fb%3F/c?d=%26&e"
    assert "x-mine" not in seen  # it was about the connection


def test_given_blanks_behind_the_value_of_a_header_then_the_request_passes_and_no_server_counts_as_dead(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    address = fleet.client.base_url
    body = b'{"prompt": "7 8 9"}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((address.host, address.port), timeout=30) as connection:
        connection.sendall(f"{head}x-name: a \t \r\nauthorization: Bearer k \r\n\r\n".encode() + body)
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert [7, 8, 9] in [prompt for server in fleet.servers for prompt in server.prompts]
    assert "does not answer" not in caplog.text


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "ftp://x", "http://x=5557", "http://x=tcp://y", "http://["])
def test_given_a_wrong_backend_then_it_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Backend.parse(text)
