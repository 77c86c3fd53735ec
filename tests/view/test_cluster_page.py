"""The page of a proxy in a real browser: every node as the router sees it, and why requests went where they went."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from chromium import Chromium, Page, find_chromium

from kvpool.cluster.wire_events import BlockStored

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from live_app import Live  # noqa: E402

PROGRAM = find_chromium()
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium: install Debian's package chromium, or name one in KVPOOL_CHROMIUM"
)
SIZE = 16
TEXTS = "[...document.querySelectorAll('{}')].map((one) => one.textContent)"


class Shown:
    """A proxy behind a real socket whose nodes hold and do what a test says."""

    def __init__(self, num_nodes: int, key: str | None = None) -> None:
        from kvpool.cluster.proxy.app import Proxy, create_proxy_app, holders_of
        from kvpool.cluster.proxy.backends import Backend

        self.nodes = [f"http://127.0.0.1:{9 + at}" for at in range(num_nodes)]  # nobody listens there
        backends = [Backend.parse(url) for url in self.nodes]
        self.proxy = Proxy(backends, block_size=SIZE, health_seconds=1e6, may_look=holders_of(key))
        self._live = Live(create_proxy_app(self.proxy), "critical")
        self.url = self._live.url
        self.rng = random.Random(num_nodes)
        self.until(lambda: all(node["state"] == "silent" for node in self.proxy.backends.described().values()))
        for node in self.nodes[1:] or self.nodes:
            self.proxy.router.set_ready(node, True)

    def until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(3000):
            if is_so():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not come true in half a minute")

    def cache(self, node: str, prompt: list[int], medium: str = "GPU") -> None:
        hashes = [hash(tuple(prompt[: end + SIZE])) & (2**64 - 1) for end in range(0, len(prompt), SIZE)]
        self.proxy.index.apply(node, [BlockStored(hashes, None, prompt, SIZE, medium)])

    def traffic(self, num_requests: int) -> None:
        """Conversations that go on, each answer cached where it was sent."""
        prompts: list[list[int]] = [[at] * 512 for at in range(8)]
        for number in range(num_requests):
            prompt = [
                *self.rng.choice(prompts),
                *(self.rng.randrange(1000) for _ in range(SIZE * self.rng.randrange(1, 60))),
            ]
            route = self.proxy.router.route(prompt, session=number % 40)
            self.cache(str(route.node), prompt, self.rng.choice(("GPU", "GPU", "CPU", "STORAGE")))
            prompts.append(prompt)
            if self.rng.random() < 0.9:
                route.end()

    def close(self) -> None:
        self.proxy.view.is_closing = True
        self._live.stop(waits=False)


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    made = Shown(3)
    made.traffic(60)
    yield made
    made.close()


@pytest.fixture
def page(browser: Chromium, shown: Shown) -> Iterator[Page]:
    made = browser.open(f"{shown.url}/")
    made.until("kvpool.look && document.querySelectorAll('#node-list li').length == 3")
    yield made
    assert made.problems() == []
    made.ask("Page.close")


@needs_browser
def test_given_nodes_when_the_page_is_open_then_each_has_its_state_blocks_hits_and_load(
    page: Page, shown: Shown
) -> None:
    loads, blocks = shown.proxy.router.nodes, shown.proxy.index.node_blocks()
    for at, node in enumerate(shown.nodes):
        texts = page.value(
            TEXTS.format(f"#node-list li:nth-child({at + 1}) .name, #node-list li:nth-child({at + 1}) .told")
        )
        assert texts[0] == node.removeprefix("http://")
        assert texts[1].startswith(f"{blocks[node].gpu} GPU · {blocks[node].cpu} host · {blocks[node].storage} storage")
        assert f"{loads[node].num_requests} in flight" in texts[2]
        hits = loads[node].num_hit_tokens / max(1, loads[node].num_prompt_tokens)
        assert loads[node].num_prompt_tokens == 0 or texts[2].startswith(f"{100 * hits:.0f} % hits")
    assert page.value(TEXTS.format("#node-list .badge")) == ["silent", "ready", "ready"]
    assert page.value(TEXTS.format("#tiles b"))[0] == "2 of 3"
    most = max(sum(held) for held in blocks.values())
    full = next(step for step in (500, 1000, 2000, 5000) if step >= most)
    assert page.value("document.getElementById('nodes-count').textContent").startswith(f"a full bar is {full:,} blocks")
    shares = page.value("[...document.querySelectorAll('#node-list .m-gpu')].map((one) => parseFloat(one.style.width))")
    assert shares == pytest.approx([100 * blocks[node].gpu / full for node in shown.nodes], abs=0.01)


@needs_browser
def test_given_no_traffic_yet_then_every_chart_has_its_axes(browser: Chromium) -> None:
    shown = Shown(1)
    try:
        page = browser.open(f"{shown.url}/")
        page.until("document.querySelectorAll('#chart-list figure:not([hidden]) canvas[data-top]').length == 4")
        assert page.value("[...document.querySelectorAll('#chart-list canvas')].map((one) => one.dataset.top)") == [
            "100",
            "1",
            "1",
            "1",
        ]
        page.ask("Page.close")
    finally:
        shown.close()


@needs_browser
def test_given_decisions_when_a_node_is_chosen_then_its_own_are_shown_with_their_reasons(
    page: Page, shown: Shown
) -> None:
    told = shown.proxy.router.decisions
    page.until(f"document.querySelectorAll('#decision-list li').length == {len(told)}")
    assert page.value(TEXTS.format("#decision-list .badge")) == [decision.reason for decision in told]
    page.value("document.querySelectorAll('#node-list button')[1].click()")
    own = [decision for decision in told if decision.node == shown.nodes[1]]
    assert 0 < len(own) < len(told)
    page.until(f"document.querySelectorAll('#decision-list li').length == {len(own)}")
    page.press("Escape")
    page.until("kvpool.chosen === null && document.getElementById('clear').hidden")


@needs_browser
def test_given_a_node_that_comes_and_goes_when_the_page_is_open_then_it_says_so(page: Page, shown: Shown) -> None:
    shown.proxy.router.set_ready(shown.nodes[0], True)
    page.until("document.querySelectorAll('#node-list .badge')[0].textContent === 'ready'")
    shown.proxy.router.set_ready(shown.nodes[0], False)
    page.until("document.querySelectorAll('#node-list .badge')[0].textContent === 'silent'")


@needs_browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_given_a_phone_and_64_nodes_then_nothing_is_wider_than_it_and_all_has_a_name(
    browser: Chromium, scheme: str
) -> None:
    shown = Shown(64)
    try:
        page = browser.open(f"{shown.url}/", width=390, height=844, scale=2.0, mobile=True, scheme=scheme)
        page.until("document.querySelectorAll('#node-list li').length == 64")
        assert page.value("document.documentElement.scrollWidth") == 390
        unnamed = page.value("""[...document.querySelectorAll('button, input, canvas, [role=region]')]
            .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
            .map((one) => one.outerHTML.slice(0, 80))""")
        assert unnamed == []
        assert page.problems() == []
        page.ask("Page.close")
    finally:
        shown.close()


@needs_browser
def test_given_a_key_when_the_page_is_opened_then_it_asks_for_it(browser: Chromium) -> None:
    shown = Shown(1, key="secret")
    try:
        page = browser.open(f"{shown.url}/")
        page.until("document.getElementById('key-dialog').open")
        assert page.value("document.getElementById('key-problem').textContent") == ""
        page.value("document.getElementById('key').value = 'secret'")
        page.value("document.querySelector('#key-dialog form').requestSubmit()")
        page.until("document.querySelectorAll('#node-list li').length == 1")
        page.ask("Page.close")
        assert httpx.get(f"{shown.url}/route/stats", trust_env=False).status_code == 401
        told = httpx.get(f"{shown.url}/route/stats", headers={"authorization": "Bearer secret"}, trust_env=False)
        assert set(told.json()["nodes"]) == set(shown.nodes)
    finally:
        shown.close()


@pytest.mark.slow
def test_given_no_key_when_asked_under_another_name_then_the_view_is_refused(shown: Shown) -> None:
    for path in ("/route/stats", "/metrics", "/view/stream"):
        assert httpx.get(shown.url + path, headers={"host": "evil.example"}, trust_env=False).status_code == 403
    assert httpx.get(shown.url + "/route/stats", headers={"host": "[::1]"}, trust_env=False).status_code == 200
    assert httpx.get(f"{shown.url}/view/nothing.js", trust_env=False).status_code == 404
