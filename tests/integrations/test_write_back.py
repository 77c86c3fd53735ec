"""Write-back under an engine with a cache of its own: the host gets what that cache loses, and every page is right."""

from __future__ import annotations

import itertools
import random
import string
from collections import OrderedDict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from toy import BLOCK, ToyEngine, ToyRequest, give_way, introduction, lora

from kvpool.errors import ConfigError
from kvpool.integrations.connector.orders import NO_PAGE, Orders
from kvpool.integrations.connector.requests import TrackedRequest
from kvpool.integrations.connector.scheduler_side import SchedulerSide
from kvpool.integrations.connector.settings import ConnectorSettings
from kvpool.integrations.connector.write_back import WriteBack
from kvpool.scope import ReuseScope

LOWER, UPPER = string.ascii_lowercase, string.ascii_uppercase


class OwnCache:
    """As vLLM's: free pages in the order in which they are taken; pages without a name first, then the ends of prompts."""

    def __init__(self, num_pages: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self.names: dict[int, Any] = {}
        self.pages: dict[Any, int] = {}
        self.users = [0] * num_pages
        self.num_pages = num_pages

    def next_to_go(self, number: int) -> Iterable[int]:
        return list(self.free)[:number]

    def name_of(self, page: int) -> Any | None:
        return self.names.get(page)

    def found(self, names: list[Any]) -> list[int]:
        """The pages of the first blocks that are here."""
        here = [self.pages.get(name) for name in names]
        return here[: here.index(None)] if None in here else here  # type: ignore[return-value]

    def take(self, found: list[int], number: int) -> list[int]:
        """A request uses what was found, and gets so many other pages."""
        for page in found:
            self.use(page)
        taken = []
        for _ in range(number):
            page, _ = self.free.popitem(last=False)
            self.users[page] = 1
            if (name := self.names.pop(page, None)) is not None:
                del self.pages[name]
            taken.append(page)
        return found + taken

    def use(self, page: int) -> None:
        self.users[page] += 1
        self.free.pop(page, None)

    def give_name(self, page: int, name: Any) -> None:
        if name not in self.pages and page not in self.names:
            self.names[page], self.pages[name] = name, page

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.free[page] = None
                self.free.move_to_end(page, last=page in self.names)

    def forget(self) -> None:
        self.names.clear()
        self.pages.clear()


class CachingEngine(ToyEngine):
    """A toy engine that keeps prompts in its pages, as long as nobody needs them."""

    def __init__(self, *, num_pages: int, step_pages: int, **options: Any) -> None:
        self.own = OwnCache(num_pages)
        super().__init__(num_pages=num_pages, cache=self.own, step_pages=step_pages, **options)
        self.cached = self.loaded = 0

    def _new_pages(self, pages: list[int], num_tokens: int) -> list[int]:
        new = self.own.take([], max(0, -(-num_tokens // BLOCK) - len(pages)))
        pages += new
        return new

    def serve(self, request: ToyRequest, *, local_blocks: int = 0, chunk: int = 1000) -> int:
        tokens, names = request.all_token_ids, request.block_hashes
        found = self.own.found(names[: (len(tokens) - 1) // BLOCK])
        count = self.look_up(request, len(found) * BLOCK)
        pages = self.own.take(found, count // BLOCK)
        self.scheduler.order_load(request, [pages], count)
        done = len(found) * BLOCK + count
        while count and request.request_id not in self._step_loads(set()):
            give_way()
        self._prefill(request, pages, done, chunk)
        for page, name in zip(pages, names, strict=False):
            self.own.give_name(page, name)
        assert self.holds(request, pages, len(names))
        self.scheduler.finish(request.request_id)
        self.own.give_back(pages)
        self.idle()
        self.cached += len(found)
        self.loaded += count // BLOCK
        return count


def chats(seed: int, number: int) -> list[ToyRequest]:
    """Turns of conversations that grow, behind two beginnings."""
    rng = random.Random(seed)
    shared = [[rng.randrange(9) for _ in range(13)] for _ in range(2)]
    history: dict[int, list[int]] = {}
    requests = []
    for turn in range(number):
        chat = rng.randrange(7)
        tokens = history.setdefault(chat, list(rng.choice(shared)))
        tokens += [rng.randrange(9) for _ in range(rng.randrange(3, 11))]
        if len(tokens) > 90:
            del tokens[13:]
        requests.append(ToyRequest(str(turn), list(tokens), cache_salt=rng.choice([None, None, "ada"])))
    return requests


@pytest.mark.quick("0-3-1")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("step_pages", [3, 30])
@pytest.mark.parametrize("seed", range(3))
def test_given_write_back_then_every_page_is_right(engine: Any, seed: int, step_pages: int, num_workers: int) -> None:
    toy = engine(kind=CachingEngine, num_pages=40, step_pages=step_pages, host_blocks=30, num_workers=num_workers)
    for request in chats(seed, 120):
        toy.serve(request, chunk=random.Random(request.request_id).choice([5, 12]))
    assert toy.loaded


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(3))
def test_given_a_host_as_large_as_the_engines_cache_then_write_back_finds_more_and_copies_less(
    engine: Any, seed: int
) -> None:
    seen = {}
    for how in ("back", "through"):
        clock = itertools.count().__next__  # the policy of "through" looks at ages
        toy = engine(kind=CachingEngine, num_pages=40, step_pages=3, host_blocks=40, host_write=how, clock=clock)
        for request in chats(seed, 150):
            toy.serve(request, chunk=12)
        seen[how] = (toy.cached + toy.loaded, toy.scheduler.stats()["stored"])
    assert seen["back"][0] > seen["through"][0]
    assert seen["back"][1] < seen["through"][1]


@pytest.mark.parametrize("host_blocks", [40, 4])
def test_given_room_in_the_engines_cache_then_nothing_is_copied(engine: Any, host_blocks: int) -> None:
    toy = engine(kind=CachingEngine, num_pages=400, step_pages=8, host_blocks=host_blocks)
    for request in chats(1, 20):
        toy.serve(request)
    assert toy.scheduler.stats()["stored"] == 0


def test_given_a_disk_then_blocks_are_stored_when_they_are_computed(engine: Any, tmp_path: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=400, step_pages=8, host_blocks=40, disk=str(tmp_path))
    toy.serve(ToyRequest("a", list(range(17))))
    assert toy.scheduler.stats()["stored"] == 4


def test_given_a_pin_or_a_priority_then_a_line_says_that_they_have_no_effect(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    toy = engine(kind=CachingEngine, num_pages=400, step_pages=8, host_blocks=40)
    toy.serve(ToyRequest("a", list(range(17)), kv_transfer_params={"kvpool": {"pin": 60}}))
    assert "request a: priority, pin and expected_seconds have no effect" in caplog.text


@pytest.mark.parametrize(
    "options",
    [*({"kv_transfer_params": {"kvpool": each}} for each in ({"no_store": True}, {"ttl": 60})), {"prompt_embeds": 1}],
)
def test_given_a_request_that_the_host_may_not_keep_then_nothing_of_it_is_stored(
    engine: Any, options: dict[str, Any]
) -> None:
    toy = engine(kind=CachingEngine, num_pages=12, step_pages=12, host_blocks=40)
    toy.serve(ToyRequest("a", list(range(17)), **options))
    for name, begin in (("b", 100), ("c", 200), ("d", 300)):
        toy.serve(ToyRequest(name, list(range(begin, begin + 25))))
    assert toy.look_up(ToyRequest("e", list(range(17)))) == 0
    assert toy.look_up(ToyRequest("f", list(range(100, 125)))) == 24


NO_STORE = {"kvpool": {"no_store": True}}


def displace(toy: CachingEngine, begin: int) -> None:
    """Serves requests until the engine has lost all others."""
    for number in range(3):
        tokens = list(range(begin + 100 * number, begin + 100 * number + 25))
        toy.serve(ToyRequest(f"displaces {begin} {number}", tokens), chunk=8)


@pytest.mark.parametrize("adapter", [None, lora("ada")])
def test_given_a_request_that_is_not_kept_then_it_hits_blocks_of_others_and_these_are_kept(
    engine: Any, adapter: Any
) -> None:
    toy = engine(kind=CachingEngine, num_pages=14, step_pages=4, host_blocks=40)

    def ask(name: str, **options: Any) -> ToyRequest:
        return ToyRequest(name, list(range(17)), lora_request=adapter, **options)

    toy.serve(ask("a"))
    toy.serve(ask("b", kv_transfer_params=NO_STORE))
    assert toy.cached == 4  # in the engine's own cache
    displace(toy, 1000)
    assert toy.serve(ask("c", kv_transfer_params=NO_STORE)) == 16
    host = toy.scheduler.host
    host._free += list(iter(host._take_row, None))  # all blocks leave the host
    displace(toy, 2000)
    assert toy.look_up(ask("d")) == 16


@pytest.mark.parametrize("step_pages", [4, 14])
def test_given_an_adapter_with_the_name_of_another_then_what_the_other_computed_is_not_found_for_it(
    engine: Any, step_pages: int
) -> None:
    toy = engine(kind=CachingEngine, num_pages=14, step_pages=step_pages, host_blocks=40)
    toy.serve(ToyRequest("a", list(range(17)), lora_request=lora("ada", "first")))
    toy.serve(ToyRequest("b", list(range(17)), lora_request=lora("ada", "second")))
    assert toy.cached == 4  # the engine knows adapters by name, as vLLM 0.31
    displace(toy, 1000)
    assert toy.look_up(ToyRequest("c", list(range(17)), lora_request=lora("ada", "second"))) == 0
    assert toy.look_up(ToyRequest("d", list(range(17)), lora_request=lora("ada", "first"))) == 16


@pytest.mark.parametrize("step_pages", [4, 14])
def test_given_a_reset_of_the_host_only_then_what_the_engine_had_before_is_not_stored_later(
    engine: Any, step_pages: int
) -> None:
    toy = engine(kind=CachingEngine, num_pages=14, step_pages=step_pages, host_blocks=40)
    toy.serve(ToyRequest("a", list(range(17))))
    toy.scheduler.reset()
    toy.serve(ToyRequest("b", list(range(17))))
    assert toy.cached == 4
    displace(toy, 1000)
    assert toy.look_up(ToyRequest("c", list(range(17)))) == 0
    toy.serve(ToyRequest("d", list(range(17))))
    displace(toy, 2000)
    assert toy.look_up(ToyRequest("e", list(range(17)))) == 16


def test_given_a_load_of_more_than_a_step_then_what_it_displaces_is_stored(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=20, step_pages=2, host_blocks=60)
    first, second = (ToyRequest(name, list(range(begin, begin + 61))) for name, begin in (("a", 0), ("b", 100)))
    toy.serve(first, chunk=8)
    toy.serve(second, chunk=8)  # the engine gives up all of the first
    toy.serve(ToyRequest("c", list(range(61))), chunk=8)  # the load displaces most of the second
    assert toy.loaded > 10
    assert all(name in toy.own.pages or name in toy.scheduler.host._rows for name in second.block_hashes)


def test_given_what_the_engine_has_again_then_it_leaves_the_host_first(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=14, step_pages=3, host_blocks=18)  # two prompts, and three on the host
    loaded = []
    for turn, name in enumerate("abcdaeb"):
        begin = ord(name) * 100
        toy.serve(ToyRequest(str(turn), list(range(begin, begin + 25))), chunk=12)
        loaded.append(toy.loaded)
    assert loaded[-3:-1] == [6, 6]
    assert loaded[-1] > 6


def test_given_a_reset_while_copies_are_in_flight_then_their_rows_can_be_used_again(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=30, step_pages=3, host_blocks=24)
    num_resets = 0
    for turn in range(8):
        for name in "abcde":
            begin = ord(name) * 100
            request = ToyRequest(f"{name}{turn}", list(range(begin, begin + 25)))
            here = toy.own.found(request.block_hashes)
            found = toy.look_up(request, len(here) * BLOCK)
            if not found or turn % 2 == 0:
                toy.serve(request, chunk=12)
                continue
            pages = toy.own.take(here, found // BLOCK)
            toy.scheduler.order_load(request, [pages], found)
            toy.scheduler.reset()  # the load is in flight
            num_resets += 1
            toy.own.forget()
            while request.request_id not in toy._step_loads(set()):
                give_way()
            toy.own.give_back(pages)
    assert toy.loaded
    assert num_resets
    toy.scheduler.reset()
    toy.idle()
    assert sorted(toy.scheduler.host._free) == list(range(24))


def test_given_a_request_that_cannot_begin_then_what_should_have_stayed_for_it_is_stored_in_time() -> None:
    own = OwnCache(20)
    host = WriteBack(own, 40, 3, itertools.count(1).__next__)
    for page, name in enumerate("abcd"):
        own.give_name(page, name)
    host.order(1, Orders())
    host.confirm(1, 4)
    host.taken(None, [own.take([], 4)])
    for page, name in zip(own.free, "ABCDEFGHIJKL", strict=False):
        own.give_name(page, name)
    request = SimpleNamespace(all_token_ids=range(33), block_hashes=list("ABCDabcd"))
    tracked = TrackedRequest(request, BLOCK, ReuseScope(), ())
    assert host.look_up(tracked, 16) == 16
    later = Orders()
    host.order(1, later)
    assert later.stores[0].pages == [[4, 5, 6, 7]]


def _host_and_engine(num_blocks: int) -> tuple[WriteBack, OwnCache]:
    """A host full of blocks with upper letters, and an engine as large, whose blocks have lower ones."""
    own, numbers = OwnCache(num_blocks), itertools.count(1)
    host = WriteBack(own, num_blocks, 1, numbers.__next__)
    for page, name in zip(range(num_blocks), UPPER, strict=False):
        own.give_name(page, name)
    for _ in range(num_blocks):
        orders = Orders()
        host.order(0, orders)
        for store in orders.stores:
            host.confirm(store.job, len(store.rows))
        host.taken(None, [own.take([], 1)])
    own.users = [0] * num_blocks
    own.free = OrderedDict.fromkeys(range(num_blocks))
    for page, name in zip(range(num_blocks), LOWER, strict=False):
        own.give_name(page, name)
    assert {*host._rows} == {*UPPER[:num_blocks]}
    return host, own


def _asks_for(names: str) -> TrackedRequest:
    request = ToyRequest(names, list(range(len(names) * BLOCK + 1)))
    request = SimpleNamespace(**{**vars(request), "block_hashes": list(names)})
    return TrackedRequest(request, BLOCK, ReuseScope(), ())


def test_given_a_full_host_then_what_a_load_displaces_takes_the_rows_of_what_it_brings() -> None:
    host, own = _host_and_engine(20)
    asks = _asks_for(UPPER[:10])
    assert host.look_up(asks, 0) == 10 * BLOCK
    orders = Orders()
    host.order_load(asks, [own.take([], 10)], 10 * BLOCK, orders)
    (load,) = orders.loads
    displaced = [page for turn in load.displaced for page in turn.pages]
    assert displaced == load.pages[0]
    assert [turn.rows[0] for turn in load.displaced[1:]] == load.rows[:9]
    assert [turn.before for turn in load.displaced] == list(range(10))
    host.check()
    host.confirm(load.job, 10)
    host.check()
    names = host._rows.keys()
    assert names & {*UPPER} == {*UPPER[12:20], "J"}, "K went for the first page, and L for that of the next step"
    assert {*LOWER[:10]} <= names


def test_given_a_load_that_fails_then_what_it_moved_is_on_the_host_no_more() -> None:
    host, own = _host_and_engine(20)
    asks, orders = _asks_for(UPPER[:10]), Orders()
    host.look_up(asks, 0)
    host.order_load(asks, [own.take([], 10)], 10 * BLOCK, orders)
    host.confirm(orders.loads[0].job, 0)
    host.check()
    assert not host._rows.keys() & {*LOWER, *UPPER[:9]}
    assert host.saved.spoiled == 10
    assert host.loaded.failed == 10


def test_given_a_block_whose_row_a_load_gives_away_then_others_wait_until_the_engine_has_it() -> None:
    host, own = _host_and_engine(20)
    asks, orders = _asks_for(UPPER[:10]), Orders()
    host.look_up(asks, 0)
    host.order_load(asks, [own.take([], 10)], 10 * BLOCK, orders)
    again = _asks_for(UPPER[:10] + "MN")
    assert host.look_up(again, 0) is None
    host.confirm(orders.loads[0].job, 10)
    assert host.look_up(again, 9 * BLOCK) == 3 * BLOCK


def test_given_two_loads_of_a_block_then_its_row_is_given_away_by_neither() -> None:
    host, own = _host_and_engine(20)
    orders, both = Orders(), (_asks_for(UPPER[:4]), _asks_for(UPPER[:4] + "z"))
    for asks in both:
        assert host.look_up(asks, 0) == 4 * BLOCK
    pages = own.take([], 4)
    host.order_load(both[0], [pages], 4 * BLOCK, orders)
    assert orders.loads[0].displaced == [], "another request was looked up last: nobody knows what these pages held"
    assert host.look_up(both[1], 0) == 4 * BLOCK
    host.order_load(both[1], [own.take([], 4)], 4 * BLOCK, orders)
    rows = [row for turn in orders.loads[1].displaced for row in turn.rows]
    assert len(rows) == 3, "the next page to go was stored already"
    assert not {*rows} & {*orders.loads[0].rows}
    host.check()


def test_given_a_block_that_finds_no_room_in_several_steps_then_it_counts_once() -> None:
    own = OwnCache(20)
    host = WriteBack(own, 1, 1, itertools.count(1).__next__)
    own.give_name(0, "a")
    host.order(0, Orders())  # its row is in use until the workers have copied it
    for name in "bc":
        (page,) = own.take([], 1)
        own.give_name(page + 1, name)
        for _ in range(3):
            host.taken(None, [[page]])
            host.order(0, Orders())
    assert host.saved.no_room == 2


def test_given_a_store_that_failed_then_the_block_is_stored_again_when_it_is_looked_at_again() -> None:
    own = OwnCache(20)
    host = WriteBack(own, 4, 1, itertools.count(1).__next__)
    own.give_name(0, "a")
    host.order(0, Orders())
    host.confirm(1, 0)
    assert (host.saved.stored, host.saved.spoiled) == (0, 1)
    host.taken(None, [[9]])
    again = Orders()
    host.order(0, again)
    assert again.stores[0].pages == [[0]]
    host.confirm(2, 1)
    assert (host.saved.stored, host.saved.spoiled) == (1, 1)
    assert not host.has_waiting


def test_given_a_load_that_failed_in_part_then_it_is_counted_and_nothing_is_promised_again() -> None:
    own = OwnCache(20)
    host = WriteBack(own, 8, 2, itertools.count(1).__next__)
    for page, name in enumerate("ab"):
        own.give_name(page, name)
    host.order(0, Orders())
    host.confirm(1, 2)
    request = SimpleNamespace(request_id="r", all_token_ids=range(9), block_hashes=["a", "b"], mm_features=[])
    tracked = TrackedRequest(request, BLOCK, ReuseScope(), ())
    assert host.look_up(tracked, 0) == 8
    orders = Orders()
    host.order_load(tracked, [[5, 6]], 8, orders)
    assert tracked.hits == (2, 0, 0)
    host.confirm(orders.loads[0].job, 1)
    assert (host.loaded.hits, host.loaded.from_host, host.loaded.failed) == (1, 1, 1)
    assert host.look_up(tracked, 0) == 0


def test_given_an_engine_that_only_loads_then_nothing_is_stored() -> None:
    own = OwnCache(20)
    own.give_name(0, "a")
    side = SchedulerSide(
        ConnectorSettings(host_blocks=8), BLOCK, [introduction(8)], stores=False, cache=own, step_pages=4
    )
    assert side.look_up(ToyRequest("r", list(range(33))), 0) == 0
    assert side.orders(is_idle=False).stores == []


def test_given_pages_that_nobody_can_find_any_more_then_they_are_not_stored(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=20, step_pages=4, host_blocks=40)
    toy.serve(ToyRequest("a", list(range(17))))
    toy.own.forget()  # the engine has reset its cache
    toy.serve(ToyRequest("b", list(range(100, 171))))
    toy.serve(ToyRequest("c", list(range(200, 240))))
    assert toy.look_up(ToyRequest("d", list(range(17)))) == 0


def test_given_a_preempted_request_then_its_blocks_are_stored_before_others_get_its_pages(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=12, step_pages=12, host_blocks=40)
    request = ToyRequest("a", list(range(17)))
    toy.look_up(request)
    pages = toy.own.take([], 5)
    toy._prefill(request, pages, 0, 1000)
    for page, name in zip(pages, request.block_hashes, strict=False):
        toy.own.give_name(page, name)
    toy.own.give_back(pages)
    toy.serve(ToyRequest("b", list(range(100, 120))))
    toy.serve(ToyRequest("c", list(range(200, 245))))
    assert toy.look_up(request) == 16


def test_given_pages_that_left_their_window_then_no_row_is_kept_for_their_blocks(engine: Any) -> None:
    toy = engine(kind=CachingEngine, num_pages=12, step_pages=12, host_blocks=40)
    request = ToyRequest("a", list(range(17)))
    toy.look_up(request)
    pages = [NO_PAGE, NO_PAGE, *toy.own.take([], 3)]  # few are free, so blocks are stored as they fill
    toy.scheduler.follow("a", [pages], 17, num_computed=8)
    toy._step_loads(set())
    toy.idle()
    assert toy.scheduler.stats()["stored"] == 2
    assert toy.look_up(ToyRequest("b", list(range(17)))) == 0


@pytest.mark.parametrize(
    "setting", [{"policy": "lru"}, {"ttl": 5.0}, {"quotas": {"ada": {"maximum": 0.5}}}, {"disk": "."}]
)
def test_given_a_setting_that_needs_blocks_when_they_are_computed_then_they_are_stored_then(setting: Any) -> None:
    assert not ConnectorSettings.of(setting).writes_back
    with pytest.raises(ConfigError, match=f"host_write='back' has no {next(iter(setting))}"):
        ConnectorSettings.of({**setting, "host_write": "back"})


def test_given_a_wrong_moment_then_it_is_named() -> None:
    with pytest.raises(ConfigError, match="host_write must be one of back, through, got 'later'"):
        ConnectorSettings.of({"host_write": "later"})
