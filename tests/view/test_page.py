"""The page of the live view in a real browser: what it draws is what the manager holds, by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from chromium import Chromium, Page, find_chromium

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.tiers.contract import TierStats
from kvpool.view import LiveView, serve
from kvpool.view.sampling import FREE
from kvpool.view.tier_rows import tier_row
from kvpool.view.view_command import Traffic

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium: install Debian's package chromium, or name one in KVPOOL_CHROMIUM"
)
WORDS = """Object.fromEntries([...kvpool.store.pools].map(([name, pool]) =>
    [name, [...pool.high].map((high, block) => [high, pool.low[block]])]))"""
ENTER_KEY = "document.getElementById('key').value = '{}'; document.querySelector('#key-dialog form').requestSubmit()"
BUTTONS = "document.querySelectorAll('#request-list button:enabled')"


@pytest.fixture
def traffic() -> Traffic:
    made = Traffic(512)
    for _ in range(120):
        made.step()
    return made


@pytest.fixture
def view(traffic: Traffic) -> Iterator[LiveView]:
    with serve(traffic.manager, port=0, rate=25.0, more=traffic.more) as made:
        yield made


@pytest.fixture
def page(browser: Chromium, view: LiveView) -> Iterator[Page]:
    made = browser.open(view.url)
    made.until("kvpool.grids.size && kvpool.drawn.frames")
    yield made
    assert made.problems() == []
    made.ask("Page.close")


def settled(page: Page, traffic: Traffic) -> None:
    """Waits until the page has seen a frame that was made after now."""
    number = page.value("kvpool.store.frames.at(-1).number")
    traffic.manager.cache.evict(0)  # an operation, so that there is something to tell
    page.until(f"kvpool.store.frames.at(-1).number > {number + 1}")
    page.until(f"kvpool.store.now.sequences.length == {len(traffic._running)}")


def test_given_traffic_when_it_stops_then_the_page_holds_every_block_as_the_manager_does(
    page: Page, traffic: Traffic
) -> None:
    for _ in range(30):
        traffic.step()
    settled(page, traffic)
    told = page.value(WORDS)
    for pool in traffic.manager.inspect.snapshot().pools:
        words = np.array(told[f"{pool.tier.name}/{pool.pool}"], np.uint64)[:, 0]
        assert (words & np.uint64(7) == FREE).tolist() == pool.is_free.tolist()
        assert (words >> np.uint64(3) & np.uint64(31)).tolist() == np.minimum(pool.num_holders, 31).tolist()
    stats = traffic.manager.stats().pool(0, Tier.GPU)
    counted = f"{stats.referenced:,} in use · {stats.cached:,} cached · {stats.free:,} free"
    page.until(f"document.querySelector('.pool .count').textContent.startsWith('{counted}')")


def test_given_the_grid_when_arrow_keys_and_enter_are_pressed_then_a_block_is_described(page: Page) -> None:
    page.value("document.querySelector('.pool canvas').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.press(key)
    assert page.value("document.getElementById('announce').textContent").startswith("Block 2: ")
    page.press("Enter")
    page.until("document.querySelector('#details h3')?.textContent === 'Block 2 on GPU'")
    assert page.value("document.querySelector('#details dt').textContent") == "state"


def test_given_a_request_when_it_is_clicked_then_its_table_is_told_and_its_blocks_alone_are_bright(page: Page) -> None:
    page.until(f"{BUTTONS}.length")
    page.value(f"{BUTTONS}[0].click()")
    page.until("[...document.querySelectorAll('#details dt')].some((term) => term.textContent === 'block table')")
    lit = page.until("[...kvpool.grids.get('GPU/0').grid.chosen ?? []].reduce((sum, one) => sum + one, 0)")
    serial = page.value(f"{BUTTONS}[0].parentNode.request.serial")
    held = page.value(
        f"kvpool.tablesOf(kvpool.store.now, {serial})[0].reduce((sum, one, at) => sum + (at % 2 ? one : 0), 0)"
    )
    assert lit == held
    page.press("Escape")
    page.until("kvpool.grids.get('GPU/0').grid.chosen === null")


def test_given_a_pause_when_time_goes_back_then_the_page_shows_what_was(page: Page, traffic: Traffic) -> None:
    before, place = page.value("[[...kvpool.store.pools.get('GPU/0').high], kvpool.store.frames.length - 1]")
    for _ in range(20):
        traffic.step()
    settled(page, traffic)
    assert page.value("[...kvpool.store.pools.get('GPU/0').high]") != before
    page.value(f"kvpool.goTo({place})")
    page.until("kvpool.grids.get('GPU/0').grid.pool !== kvpool.store.pools.get('GPU/0')")  # it shows what is kept
    assert page.value("[...kvpool.grids.get('GPU/0').grid.pool.high]") == before
    page.value("document.getElementById('forward').click()")
    assert page.value("kvpool.paused") == place + 1
    page.value("document.getElementById('back').click()")
    assert page.value("kvpool.paused") == place
    page.value("document.getElementById('pause').click()")
    assert page.value("kvpool.paused") is None


@pytest.mark.quick("dark-state")
@pytest.mark.parametrize("mode", ["state", "tenant", "age", "priority"])
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_given_a_way_of_colouring_when_it_is_chosen_then_the_grid_has_the_colours_of_its_legend(
    page: Page, mode: str, scheme: str
) -> None:
    page.resize(1280, 800, scheme=scheme)
    page.value(f"document.querySelector('input[value={mode}]').click()")
    words = {"state": "pinned", "tenant": "acme", "age": "older", "priority": "80–100"}[mode]
    page.until(f"[...document.querySelectorAll('#legend li')].some((item) => item.textContent === '{words}')")
    page.until("new Set(kvpool.grids.get('GPU/0').grid.pixels).size >= 3")


def test_given_a_way_of_colouring_that_was_chosen_before_the_script_ran_then_it_counts(page: Page) -> None:
    chosen = (
        "const input = document.querySelector('input[value=tenant]'); if (input) { input.click(); it.disconnect(); }"
    )
    early = f"new MutationObserver((_, it) => {{ {chosen} }}).observe(document, {{ childList: true, subtree: true }});"
    page.ask("Page.addScriptToEvaluateOnNewDocument", source=early)
    page.ask("Page.reload")
    page.until("[...document.querySelectorAll('#legend li')].some((item) => item.textContent === 'acme')")


def test_given_a_phone_when_the_page_is_opened_then_nothing_is_wider_than_it(browser: Chromium, view: LiveView) -> None:
    page = browser.open(view.url, width=390, height=844, scale=2.0, mobile=True)
    page.until("kvpool.grids.size && kvpool.drawn.frames")
    assert page.value("document.documentElement.scrollWidth") == 390
    box = page.value("document.querySelector('.pool canvas').getBoundingClientRect().toJSON()")
    assert 0 <= box["left"] < 40
    assert 320 < box["right"] <= 390
    edges = page.value("""[...document.querySelectorAll('main > section:not([hidden])')].map((card) => {
        const { top, bottom } = card.getBoundingClientRect(); return [top, bottom]; })""")
    assert all(above[1] <= below[0] for above, below in pairwise(edges)), "cards stand one below the other"
    assert page.problems() == []
    page.ask("Page.close")


def test_given_everything_that_can_be_used_then_it_has_a_name(page: Page) -> None:
    unnamed = page.value("""[...document.querySelectorAll('button, input, select, textarea, canvas, [role=region]')]
        .filter((one) => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length
            || one.getAttribute('aria-labelledby'))).map((one) => one.outerHTML.slice(0, 80))""")
    assert unnamed == []


def test_given_a_key_when_the_page_is_opened_then_it_asks_for_it(browser: Chromium, traffic: Traffic) -> None:
    with serve(traffic.manager, port=0, key="secret") as view:
        page = browser.open(view.url)
        page.until("document.getElementById('key-dialog').open")
        assert page.value("document.getElementById('key-problem').textContent") == "", "nobody has been wrong yet"
        page.value(ENTER_KEY.format("wrong"))
        page.until("document.getElementById('key-dialog').open && document.getElementById('key-problem').textContent")
        page.value(ENTER_KEY.format("secret"))
        page.until("kvpool.drawn.frames")
        page.ask("Page.close")


def test_given_keyed_tiers_then_the_page_shows_how_full_they_are_and_who_filled_them(
    browser: Chromium, traffic: Traffic
) -> None:
    node = TierStats(
        "node", hits=3, misses=1, stored=2, num_values=7, used_bytes=3 * 2**20, capacity_bytes=8 * 2**20,
        holders={"engine-0": 2**20, "engine-1": 2 * 2**20},
    )  # fmt: skip
    down = TierStats("redis", problem="no answer")
    rows = [tier_row(node), tier_row(down)]
    with serve(traffic.manager, port=0, rate=25.0, more=lambda: {"tiers": rows}) as view:
        page = browser.open(view.url)
        page.until("document.querySelectorAll('#keyed-list > li').length == 2")
        assert not page.value("document.getElementById('keyed').hidden")
        assert page.value("[...document.querySelectorAll('#keyed-list .room')].map((one) => one.textContent)") == [
            "3.0 MiB of 8.0 MiB, 7 values, 75 % of 4 loads here, 2 stored by this engine",
            "no answer",
        ]
        assert page.value("[...document.querySelectorAll('#keyed-list .keys li')].map((one) => one.textContent)") == [
            "engine-1 2.0 MiB",
            "engine-0 1.0 MiB",
        ]
        assert page.value("[...document.querySelectorAll('#keyed-list .bar i')].map((one) => one.style.width)") == [
            "25%",
            "12.5%",
        ]
        assert page.problems() == []
        page.ask("Page.close")


def test_given_a_large_pool_of_which_little_is_used_then_the_used_blocks_are_large_and_the_others_a_number(
    browser: Chromium,
) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=7000, host_blocks=300)
    manager = KVCacheManager(config)
    manager.allocate(("r", 0), list(range(40)))
    with serve(manager, port=0, rate=25.0) as view:
        page = browser.open(view.url, width=2560, height=1300)
        page.until("kvpool.drawn.frames && kvpool.grids.get('GPU/0').grid.blocks == 64")
        assert page.value("kvpool.grids.get('HOST/0').grid.blocks") == 64, "an empty pool is there, too"
        assert page.value("kvpool.grids.get('GPU/0').grid.cell") == 40
        words = "10 in use · 0 cached · 6,990 free, 6,936 of them not drawn"
        page.until(f"document.querySelector('.pool .count').textContent === '{words}'")
        page.until("document.querySelector('#request-list .name')?.textContent === 'r'")
        manager.allocate("s", list(range(4000)))
        page.until("kvpool.grids.get('GPU/0').grid.blocks > 1010")
        assert page.problems() == []
        page.ask("Page.close")


def test_given_charts_then_their_axes_have_numbers_and_they_fill_a_wide_screen(
    browser: Chromium, view: LiveView
) -> None:
    page = browser.open(view.url, width=2560, height=1300)
    page.until("document.querySelectorAll('#chart-list figure:not([hidden]) canvas[data-top]').length == 3")
    assert page.value("document.querySelector('#chart-list canvas').dataset.top") == "100"
    box = page.value("""Object.fromEntries(['#blocks', '#inspector', '#charts', '#tree', '#events'].map((name) => {
        const { left, right } = document.querySelector(name).getBoundingClientRect(); return [name, [left, right]]; }))""")
    assert box["#charts"] == [20, 2540]
    assert box["#blocks"][1] + 12 == box["#inspector"][0]
    assert box["#tree"][1] + 12 == box["#events"][0]
    page.ask("Page.close")


@pytest.mark.slow
def test_given_a_selected_block_and_a_selected_request_then_what_is_told_of_them_stays_true(
    page: Page, traffic: Traffic
) -> None:
    page.until(f"{BUTTONS}.length")
    page.value(f"{BUTTONS}[0].click()")
    page.until("document.querySelector('#details dd')?.textContent === 'decode'")
    for handle in traffic.manager.handles:
        traffic.manager.free(handle)
    page.until("document.querySelector('#details dd').textContent === 'ended'")
    assert page.value("kvpool.grids.get('GPU/0').grid.chosen") is None
    handle = traffic.manager.allocate("new", [1, 2, 3])
    page.until("document.querySelectorAll('#request-list button').length == 1")
    page.value(f"kvpool.grids.get('GPU/0').grid.on.choose({int(handle.block_ids()[0])})")
    held = "[...document.querySelectorAll('#details dt')].find((dt) => dt.textContent === 'held by')"
    page.until(f"{held}?.nextSibling.textContent === 'new'")
    traffic.manager.free(handle)
    traffic._running.clear()
    page.until(f"{held}.nextSibling.textContent === 'nobody'")
