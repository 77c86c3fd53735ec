"""What serving on Ray is made of, without Ray: tickets, the table of replicas, calls without sockets, settings."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from models import tiny_model

from kvpool.cli import main
from kvpool.cluster.proxy.passing import RoutingRequest
from kvpool.cluster.subscriber import FeedStats
from kvpool.cluster.wire_events import BlockStored
from kvpool.engine import Engine
from kvpool.engine.options import EngineOptions
from kvpool.errors import ConfigError, KVPoolError
from kvpool.server import ServedModel, create_app
from kvpool.server.on_ray.engine_replica import MOST_WAITING, EngineReplica, Head, called, placed, scope_for
from kvpool.server.on_ray.ray_application import needs_of, travelling
from kvpool.server.on_ray.ray_settings import RaySettings, read_ray, routing_of
from kvpool.server.on_ray.replica_table import ReplicaTable, Ticket
from kvpool.server.serve_settings import ModelSettings

SIZE = 4
PROMPT = list(range(1, 13))


class Follower:
    """Follows nobody: a test says what its replica holds."""

    def __init__(self, index: Any, name: str, events: str, replay: str) -> None:
        self.index, self.name = index, name
        self.stats = FeedStats(0, 0, 0, 0, 0)
        self.is_closed = False
        index.add_node(name)

    def holds(self, tokens: list[int]) -> None:
        count = len(tokens) // SIZE
        self.index.apply(self.name, [BlockStored(list(range(1, count + 1)), None, tokens[: count * SIZE], SIZE, "GPU")])

    def close(self) -> None:
        self.is_closed = True


class Book(ReplicaTable):
    """A table whose followers a test can reach."""

    def __init__(self, *names: str) -> None:
        self.made: dict[str, Follower] = {}
        super().__init__(follow=self._make)
        self.set(said(*names))

    def _make(self, index: Any, name: str, events: str, replay: str) -> Follower:
        self.made[name] = Follower(index, name, events, replay)
        return self.made[name]


def said(*names: str) -> dict[str, dict[str, Any]]:
    return {name: {"block_size": SIZE, "events": f"tcp://{name}:1", "replay": f"tcp://{name}:2"} for name in names}


def loads(book: ReplicaTable) -> dict[str, int]:
    return {name: node["num_requests"] for name, node in book.described()["nodes"].items()}


# --- tickets and the table -------------------------------------------------------------------------------------------


def test_given_a_prompt_that_a_replica_holds_then_it_goes_there_and_counts_until_it_ends() -> None:
    book = Book("a", "b", "c")
    book.made["b"].holds(PROMPT)
    ticket = Ticket(RoutingRequest([*PROMPT, 99], (), None))
    assert book.choose(ticket, "abc") == "b"
    assert ticket.route is not None
    assert ticket.route.hit.gpu == len(PROMPT)
    assert loads(book) == {"a": 0, "b": 1, "c": 0}
    ticket.end()
    assert loads(book) == {"a": 0, "b": 0, "c": 0}


def test_given_a_replica_that_did_not_take_a_request_then_others_are_asked_first_and_it_again_in_the_end() -> None:
    book = Book("a", "b")
    book.made["b"].holds(PROMPT)
    ticket = Ticket(RoutingRequest(PROMPT, (), None))
    assert [book.choose(ticket, "ab") for _ in range(3)] == ["b", "a", "b"]
    assert sum(loads(book).values()) == 1  # of three choices the last one counts


def test_given_a_replica_that_failed_then_another_one_gets_the_request_while_there_is_one() -> None:
    book = Book("a", "b")
    book.made["b"].holds(PROMPT)
    ticket = Ticket(RoutingRequest(PROMPT, (), None))
    assert book.choose(ticket, "ab") == "b"
    assert ticket.num_replicas == 2
    ticket.fail()
    assert ticket.num_replicas == 0  # nobody was there for the next attempt yet
    assert book.choose(ticket, "ab") == "a"
    ticket.fail()
    assert book.choose(ticket, "b") == "b"


def test_given_a_request_that_is_over_when_a_replica_is_still_chosen_for_it_then_nothing_stays_open() -> None:
    book = Book("a")
    ticket = Ticket()
    ticket.end()
    assert book.choose(ticket, "a") == "a"
    assert loads(book) == {"a": 0}


def test_given_a_ticket_when_it_is_sent_then_nothing_of_it_arrives() -> None:
    assert pickle.loads(pickle.dumps(Ticket(RoutingRequest(PROMPT, (), "alice")))) is None


def test_given_replicas_that_come_and_go_then_what_they_held_comes_and_goes_with_them() -> None:
    book = Book("a", "b")
    book.made["b"].holds(PROMPT)
    book.set(said("a", "c"))
    assert set(loads(book)) == {"a", "c"}
    assert book.made["b"].is_closed or book._leaving
    assert book.choose(Ticket(RoutingRequest(PROMPT, (), None)), "abc") in ("a", "c")
    book.set(said("b"))  # the same name anew
    book.close()
    assert book.described()["index"]["num_blocks"] == 0
    assert all(follower.is_closed for follower in book.made.values())


def test_given_a_replica_that_dies_then_only_the_others_are_chosen_before_ray_knows() -> None:
    book = Book("a", "b")
    book.made["b"].holds(PROMPT)
    book.remove("b")
    book.remove("b")
    assert {book.choose(Ticket(RoutingRequest(PROMPT, (), None)), "ab") for _ in range(3)} == {"a"}


def test_given_more_replicas_than_a_router_knows_then_the_rest_is_left_to_ray() -> None:
    book = Book(*(f"r{number}" for number in range(65)))
    assert len(loads(book)) == 64
    assert book.choose(Ticket(), ["r64"]) is None


def test_given_a_book_before_the_first_replica_then_it_chooses_none() -> None:
    book = ReplicaTable()
    assert book.choose(Ticket(), ()) is None
    assert book.described()["nodes"] == {}


# --- calls without sockets -------------------------------------------------------------------------------------------


def collect(app: Any, content: bytes = b"") -> list[Head | bytes]:
    async def run() -> list[Head | bytes]:
        return [part async for part in called(app, scope_for("POST", "/x", b"a=1", []), content)]

    return asyncio.run(run())


def answering(*parts: bytes, kind: bytes = b"application/json", fails: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", kind)]})
        for at, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": fails or at < len(parts) - 1})
            await asyncio.sleep(0)
        if fails:
            raise ValueError("broken")

    return app


def test_given_an_answer_then_it_comes_whole_and_a_stream_part_by_part() -> None:
    assert collect(answering(b"a", b"b", b"c")) == [Head(201, [(b"content-type", b"application/json")], b"abc")]
    head, *rest = collect(answering(b"", b"a", b"b", b"c", kind=b"text/event-stream; charset=utf-8"))
    assert isinstance(head, Head)
    assert head.body
    assert head.body + b"".join(part for part in rest if isinstance(part, bytes)) == b"abc"
    assert rest


def test_given_an_application_that_fails_then_its_caller_learns_it() -> None:
    with pytest.raises(ConnectionError, match="in the middle"):
        collect(answering(b"a", kind=b"text/event-stream", fails=True))

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        return None

    with pytest.raises(RuntimeError, match="not answered"):
        collect(silent)


def test_given_a_caller_that_stops_to_listen_then_the_work_is_cancelled() -> None:
    seen: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"content"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def run() -> None:
        parts = called(endless, scope_for("GET", "/", b"", []), b"content")
        assert isinstance(await anext(parts), Head)
        await parts.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert seen == ["cancelled"]


@pytest.mark.parametrize("goes_on", [True, False])
def test_given_a_listener_that_takes_nothing_then_the_application_waits_and_can_still_be_left(goes_on: bool) -> None:
    num_sent, num_parts = 0, 10 * MOST_WAITING

    async def hasty(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for at in range(num_parts):
            await send({"type": "http.response.body", "body": b"%d " % at, "more_body": at < num_parts - 1})
            num_sent += 1
            await asyncio.sleep(0)

    async def run() -> bytes:
        parts = called(hasty, scope_for("GET", "/", b"", []), b"")
        head = await anext(parts)
        assert isinstance(head, Head)
        for _ in range(2 * num_parts):  # turns in which it could send everything
            await asyncio.sleep(0)
        assert num_sent <= len(head.body.split()) + MOST_WAITING
        if not goes_on:
            await parts.aclose()  # type: ignore[attr-defined]
            return head.body
        return head.body + b"".join([part async for part in parts if isinstance(part, bytes)])

    numbers = [int(number) for number in asyncio.run(asyncio.wait_for(run(), 60)).split()]
    assert numbers == list(range(num_parts if goes_on else len(numbers)))


def test_given_an_engine_that_has_failed_then_its_replica_is_not_healthy_and_its_server_not_ready() -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    async def ready() -> int:
        head = await anext(called(app, scope_for("GET", "/ready", b"", []), b""))
        assert isinstance(head, Head)
        return head.status

    with Engine(tiny_model("llama"), device="cpu", kv_blocks=16) as engine:
        replica = EngineReplica.__new__(EngineReplica)  # what Ray would have made
        app = create_app([ServedModel("tiny", engine)])
        replica._engine, replica._app, replica._tracing = engine, app, None
        asyncio.run(replica.check_health())
        assert asyncio.run(ready()) == 200
        engine._thread.tell(fail, lambda error: None)
        with pytest.raises(KVPoolError):
            engine.generate([[1, 2, 3]])
        with pytest.raises(KVPoolError, match="the device is gone"):
            asyncio.run(replica.check_health())
        assert asyncio.run(ready()) == 503


# --- settings --------------------------------------------------------------------------------------------------------


def model(**options: Any) -> ModelSettings:
    return ModelSettings("m", EngineOptions(**options), None, 8)


def test_given_a_replica_then_it_has_events_and_a_disk_of_its_own(tmp_path: Path) -> None:
    options = placed(model(disk=str(tmp_path)), "10.0.0.7", 2).options
    assert (options.publish, options.disk) == ("tcp://10.0.0.7:0", str(tmp_path / "replica-2"))
    assert placed(model(), "fd00::1", 0).options.publish == "tcp://[fd00::1]:0"
    assert placed(model(), "10.0.0.7", 0).options.disk is None


def test_given_paths_then_they_mean_the_same_on_every_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    options = travelling([model(model="model", disk="cache")]).options
    assert (options.model, options.disk) == (str(tmp_path / "model"), str(tmp_path / "cache"))
    assert travelling([model(model="someone/elsewhere")]).options.model == "someone/elsewhere"


@pytest.mark.parametrize(
    "models", [[], [model(), model()], [model(record="x")], [model(publish="tcp://127.0.0.1:5557")]]
)
def test_given_what_several_engines_cannot_do_then_it_is_refused(models: list[ModelSettings]) -> None:
    with pytest.raises(ConfigError):
        travelling(models)


def write(folder: Path, text: str) -> Path:
    path = folder / "kvpool.toml"
    path.write_text(text)
    return path


def test_given_a_file_then_options_override_it_and_the_rest_is_rays(tmp_path: Path) -> None:
    text = "[ray]\nreplicas = 3\n[ray.engines]\nhealth_check_period_s = 2\n[ray.routing]\nsession_tokens = 7\n"
    path = write(tmp_path, text)
    settings = read_ray(path, {"replicas": None})
    assert (settings.replicas, settings.engines) == (3, {"health_check_period_s": 2})
    assert routing_of(settings).session_tokens == 7
    assert read_ray(path, {"replicas": 5}).replicas == 5
    assert read_ray(None, {}) == RaySettings()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ray = 1", "must be a section"),
        ("[ray]\nreplica = 1", "has no key 'replica'"),
        ("[ray]\nreplicas = 0", "replicas"),
        ("[ray]\nreplicas = 65", "replicas"),
        ("[ray]\naddress = 1", "address must be of type str"),
        ("[ray]\nwait_seconds = 0", "wait_seconds"),
        ("[ray]\nengines = 1", r"\[ray.engines\] must be a section"),
        ("[ray.engines]\nname = 'x'", "names of their own"),
        ("[ray]\nreplicas = 2\n[ray.engines]\nnum_replicas = 2", "say it once"),
        ("[ray.engines]\nnum_replicas = 100", "more than the 64"),
        ("[ray.engines.autoscaling_config]\nmax_replicas = 100", "more than the 64"),
        ("[ray.routing]\nsession = 1", r"\[ray.routing\] has no key"),
        ("[ray.routing]\nhot_requests = 0", "hot_requests"),
    ],
)
def test_given_a_wrong_section_then_the_error_names_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_ray(write(tmp_path, text), {})


def test_given_replicas_without_ray_then_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", "2", "--model", "nowhere"]) == 2
    assert "--replicas is for --ray" in capsys.readouterr().err


def test_given_no_ray_then_one_line_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert main(["serve", "--ray", "--model", "nowhere"]) == 2
    assert "serving on Ray needs ray: pip install '.[ray]' in a checkout of kvpool" in capsys.readouterr().err


def test_given_a_device_then_a_replica_asks_ray_for_one_gpu() -> None:
    assert needs_of(EngineOptions(device="cuda")) == {"num_cpus": 1, "num_gpus": 1}
    assert needs_of(EngineOptions(device="cpu")) == {"num_cpus": 1}
    with pytest.raises(ConfigError, match="Ray gives each replica its GPU"):
        needs_of(EngineOptions(device="cuda:1"))
