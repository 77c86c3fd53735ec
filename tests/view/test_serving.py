"""The live view over HTTP: who may look, what a stream brings, and that nobody who watches makes others wait."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from following import Mirror, Random, events_in

from kvpool import KVCacheManager, ReuseScope
from kvpool.errors import ConfigError, InvalidArgumentError
from kvpool.view import LiveView, serve
from kvpool.view.hub import MAX_PENDING, MAX_VIEWERS, Hub, Viewer
from managers import cached, make_manager, running


@pytest.fixture
def manager() -> KVCacheManager:
    return make_manager(gpu_blocks=64)


@pytest.fixture
def view(manager: KVCacheManager) -> Iterator[LiveView]:
    with serve(manager, port=0, rate=50.0) as made:
        yield made


def get(view: LiveView, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(view.url + path.removeprefix("/"), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {}, error.read()


class Following:
    """A page that reads its stream."""

    def __init__(self, view: LiveView) -> None:
        self._connection = HTTPConnection("127.0.0.1", view.port, timeout=30)
        self._connection.request("GET", "/view/stream")
        self._answer: HTTPResponse = self._connection.getresponse()
        assert self._answer.status == 200
        self._text = b""

    def next(self) -> tuple[str, dict[str, Any]]:
        while b"\n\n" not in self._text:
            part = self._answer.read1(1 << 16)
            assert part, "the stream ended"
            self._text += part
        first, _, self._text = self._text.partition(b"\n\n")
        ((name, data),) = events_in(first + b"\n\n")
        return name, data

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_given_a_view_when_its_page_is_asked_for_then_all_that_it_loads_is_there(view: LiveView) -> None:
    status, headers, page = get(view, "/")
    assert status == 200
    assert "default-src 'self'" in headers["content-security-policy"]
    assert b"http://" not in page
    assert b"https://" not in page
    names = {word.split(b'"')[0].decode() for word in page.split(b'"/view/')[1:]}
    assert {"main.js", "style.css", "icon.svg"} <= names
    seen: set[str] = set()
    while names - seen:
        name = (names - seen).pop()
        seen.add(name)
        status, headers, content = get(view, f"/view/{name}")
        assert status == 200, name
        if name.endswith(".js"):
            assert headers["content-type"].startswith("text/javascript")
            names |= {word.split(b'"')[0].decode() for word in content.split(b'from "/view/')[1:]}
    assert {"store.js", "grid.js", "tree.js"} <= seen


@pytest.mark.parametrize(
    "path", ["/view/../pages.py", "/view/%2e%2e/pages.py", "/view/missing.js", "/view/", "/other", "/view/.js"]
)
def test_given_a_path_that_is_no_part_of_the_page_then_there_is_nothing(view: LiveView, path: str) -> None:
    connection = HTTPConnection("127.0.0.1", view.port, timeout=30)
    connection.request("GET", path)
    assert connection.getresponse().status == 404
    connection.close()


def test_given_a_stream_when_the_manager_works_then_frames_tell_of_it(view: LiveView, manager: KVCacheManager) -> None:
    page, mirror = Following(view), Mirror()
    name, hello = page.next()
    assert (name, hello["block_size"], hello["group_pools"]) == ("hello", 4, [0])
    name, first = page.next()
    mirror.apply(first)
    running(manager, "a", 20)
    while not mirror.tables:
        _, frame = page.next()
        mirror.apply(frame)
    assert list(mirror.tables.values()) == [[[0, 1, 2, 3, 4]]]
    assert mirror.rest["sequences"][0][1:] == ["a", 0, 0, 20, 0, 20, 20, {}]
    page.close()


def test_given_the_last_page_is_closed_then_nobody_looks_at_the_manager(
    view: LiveView, manager: KVCacheManager
) -> None:
    pages = [Following(view), Following(view)]
    for page in pages:
        assert page.next()[0] == "hello"
        assert page.next()[0] == "frame"
    thread = view.hub._thread
    assert thread is not None
    assert manager.events.listening
    for page in pages:
        page.close()
    while thread.is_alive():  # a stream notices when it writes, so something must happen
        cached(manager, 4)
        thread.join(0.01)
    assert view.hub.num_viewers == 0
    assert not manager.events.listening


def test_given_a_key_when_it_is_not_sent_then_nothing_is_told(manager: KVCacheManager) -> None:
    with serve(manager, port=0, key="secret") as view:
        assert get(view, "/")[0] == 200
        for path in ("/view/stream", "/view/block?id=0"):
            assert get(view, path)[0] == 401
            assert get(view, path, authorization="Bearer wrong")[0] == 401
            assert get(view, path, authorization="Basic secret")[0] == 401
        assert get(view, "/view/block?id=0", authorization="Bearer secret")[0] == 200


def test_given_no_key_when_another_name_leads_to_this_machine_then_nothing_is_told(view: LiveView) -> None:
    assert get(view, "/view/block?id=0", host="evil.example:80")[0] == 401
    assert get(view, "/view/block?id=0", host="localhost:80")[0] == 200


def test_given_an_address_that_others_reach_then_a_view_needs_a_key(manager: KVCacheManager) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        serve(manager, host="0.0.0.0", port=0)
    with pytest.raises(InvalidArgumentError, match="KVCacheManager"):
        serve("manager")  # type: ignore[arg-type]


def test_given_a_block_when_it_is_asked_for_then_its_holders_and_what_hangs_on_it_are_told(
    view: LiveView, manager: KVCacheManager
) -> None:
    scope = ReuseScope(tenant="acme")
    cached(manager, 8, scope=scope)
    for number in range(2):
        handle = manager.allocate(number, [*range(8), *range(100 * (number + 1), 100 * (number + 1) + 8)], scope=scope)
        manager.commit(handle)
    details = json.loads(get(view, "/view/block?pool=0&tier=GPU&id=0")[2])
    assert details["state"] == "referenced"
    assert details["requests"] == ["0", "1"]
    assert details["run"]["tenant"] == "acme"
    assert (details["run"]["blocks"], details["run"]["children"], details["run"]["blocks_below"]) == (2, 2, 4)
    assert "tokens" not in details
    assert "run" not in json.loads(get(view, "/view/block?id=60")[2])


@pytest.mark.parametrize("query", ["", "id=x", "id=64", "id=-1", "id=0&pool=9", "id=0&tier=MOON", "id=0&tier=REMOTE"])
def test_given_a_block_that_does_not_exist_when_it_is_asked_for_then_the_answer_says_so(
    view: LiveView, query: str
) -> None:
    status, _, body = get(view, f"/view/block?{query}")
    assert status == 400
    assert json.loads(body)["error"]["message"]


def test_given_a_viewer_that_does_not_read_then_it_is_left_with_a_snapshot_and_told_what_it_missed() -> None:
    viewer = Viewer(lambda: None)
    for _ in range(MAX_PENDING):
        viewer.offer(b"event: frame\ndata: {}\n\n", lambda: pytest.fail("not yet"))
    viewer.offer(b"lost", lambda: b'event: frame\ndata: {"after": null}\n\n')
    assert list(events_in(viewer.take())) == [("skipped", {"messages": MAX_PENDING}), ("frame", {"after": None})]
    assert viewer.take() == b""


def test_given_a_slow_and_a_quick_viewer_when_the_manager_works_then_both_end_with_the_same_picture() -> None:
    traffic = Random(3)
    hub = Hub(traffic.manager, rate=1000.0)
    news = threading.Event()
    quick, slow = hub.join(news.set), hub.join(lambda: None)
    mirror, late = Mirror(), Mirror()

    def read(viewer: Viewer, into: Mirror) -> int:
        skipped = 0
        for name, data in events_in(viewer.take()):
            if name == "frame":
                into.apply(data)
            elif name == "skipped":
                skipped = data["messages"]
        return skipped

    while slow.num_skipped < 3 * MAX_PENDING:
        traffic.step()
        news.wait(30)
        news.clear()
        read(quick, mirror)
    hub.close()
    read(quick, mirror)
    assert read(slow, late) == slow.num_skipped
    assert mirror.number == late.number
    assert {key: words.tolist() for key, words in mirror.words.items()} == {
        key: words.tolist() for key, words in late.words.items()
    }


def test_given_as_many_viewers_as_there_may_be_then_one_more_is_refused(manager: KVCacheManager) -> None:
    hub = Hub(manager)
    viewers = [hub.join(lambda: None) for _ in range(MAX_VIEWERS)]
    with pytest.raises(InvalidArgumentError, match="close one"):
        hub.join(lambda: None)
    for viewer in viewers:
        hub.leave(viewer)
    hub.close()


def test_given_what_else_is_known_when_it_changes_then_the_page_is_told(manager: KVCacheManager) -> None:
    waiting: list[list[Any]] = []
    hub = Hub(manager, rate=1000.0, more=lambda: {"waiting": [*waiting], "num_waiting": len(waiting)})
    news, mirror = threading.Event(), Mirror()
    viewer = hub.join(news.set)
    waiting.append(["chat-1", "acme", 12, 0.5])
    while not mirror.rest.get("more", {}).get("num_waiting"):
        assert news.wait(30)
        news.clear()
        for name, data in events_in(viewer.take()):
            if name == "frame":
                mirror.apply(data)
    assert mirror.rest["more"]["waiting"] == [["chat-1", "acme", 12, 0.5]]
    hub.close()
