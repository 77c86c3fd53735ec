"""Both sides of a connector under a toy engine: what is loaded is what was computed, whatever goes wrong in between."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest, give_way, image, lora

from kvpool.errors import TransferError
from kvpool.integrations.connector.orders import JobProgress, Report
from kvpool.integrations.connector.pages import EnginePages, HostRows, LinkedPages, Move
from kvpool.tiers import Outcome


def served(toy: ToyEngine, request: ToyRequest, **options: Any) -> int:
    """Serves a request and makes sure that its pages are right."""
    loaded = toy.serve(request, **options)
    whole = len(request.all_token_ids) // BLOCK
    assert toy.holds(request, toy.last_pages(request), whole)
    return loaded


def test_given_a_prompt_that_was_computed_when_it_comes_again_then_its_whole_blocks_come_from_the_host(
    engine: Any,
) -> None:
    toy = engine()
    assert served(toy, ToyRequest("a", PROMPT)) == 0
    assert served(toy, ToyRequest("b", PROMPT)) == 16
    assert toy.computed == 18 + 2


def test_given_a_prompt_of_whole_blocks_when_it_comes_again_then_its_last_block_is_computed(engine: Any) -> None:
    toy = engine()
    served(toy, ToyRequest("a", PROMPT[:16]))
    assert served(toy, ToyRequest("b", PROMPT[:16])) == 12


def test_given_blocks_in_the_engines_own_cache_then_only_those_behind_them_are_loaded(engine: Any) -> None:
    toy = engine()
    served(toy, ToyRequest("a", PROMPT))
    assert served(toy, ToyRequest("b", PROMPT), local_blocks=3) == 4


def test_given_a_prompt_in_chunks_then_every_chunk_is_stored(engine: Any) -> None:
    toy = engine()
    served(toy, ToyRequest("a", PROMPT), chunk=5)
    assert served(toy, ToyRequest("b", PROMPT)) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (dict(cache_salt="ada"), dict(cache_salt="bob")),
        (dict(lora_request=lora("sql")), dict()),
        (dict(mm_features=[image("cat", 0, 3)]), dict(mm_features=[image("dog", 0, 3)])),
    ],
    ids=["salt", "adapter", "image"],
)
def test_given_another_scope_then_nothing_is_shared(engine: Any, one: dict[str, Any], other: dict[str, Any]) -> None:
    toy = engine()
    served(toy, ToyRequest("a", PROMPT, **one))
    assert served(toy, ToyRequest("b", PROMPT, **other)) == 0
    assert served(toy, ToyRequest("c", PROMPT, **one)) == 16


def test_given_two_images_behind_the_same_text_then_the_text_before_them_is_found(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, mm_features=[image("cat", 9, 3)]))
    assert toy.look_up(ToyRequest("b", PROMPT, mm_features=[image("dog", 9, 3)])) == 8


def test_given_embeddings_instead_of_tokens_then_nothing_is_stored(engine: Any) -> None:
    toy = engine()
    toy.serve(ToyRequest("a", PROMPT, prompt_embeds=object()))
    assert served(toy, ToyRequest("b", PROMPT)) == 0


def test_given_a_host_that_is_smaller_than_the_prompt_then_the_engine_computes_and_nothing_breaks(engine: Any) -> None:
    toy = engine(host_blocks=2)
    served(toy, ToyRequest("a", PROMPT))
    assert served(toy, ToyRequest("b", PROMPT)) == 0
    assert toy.scheduler.stats()["no_room"] > 0


def test_given_a_quota_then_a_salt_keeps_no_more_than_it_may(engine: Any) -> None:
    toy = engine(host_blocks=16, quotas={"ada": {"maximum": 2}}, policy="lru")
    served(toy, ToyRequest("a", PROMPT, cache_salt="ada"))
    served(toy, ToyRequest("b", PROMPT, cache_salt="bob"))
    served(toy, ToyRequest("c", list(range(50)), cache_salt="bob"))
    assert toy.scheduler.host.manager.cache.quotas()["ada"].maximum
    assert served(toy, ToyRequest("d", PROMPT, cache_salt="ada")) <= 2 * BLOCK


def test_given_a_reset_then_nothing_that_was_stored_is_found_not_even_in_a_tier(engine: Any, tmp_path: Path) -> None:
    toy = engine(disk=str(tmp_path))
    served(toy, ToyRequest("a", PROMPT))
    toy.scheduler.reset()
    assert served(toy, ToyRequest("b", PROMPT)) == 0
    assert served(toy, ToyRequest("c", PROMPT)) == 16


# --- unconfirmed and failed ------------------------------------------------------------------------------------------


def test_given_a_store_that_no_worker_confirmed_then_nobody_finds_it(engine: Any) -> None:
    toy = engine()
    request = ToyRequest("a", PROMPT)
    toy.look_up(request)
    toy.scheduler.follow("a", [[0, 1, 2, 3, 4]], 18)
    orders = toy.scheduler.orders(is_idle=False)
    assert len(orders.stores) == 1
    assert toy.look_up(ToyRequest("b", PROMPT)) == 0


def test_given_two_workers_then_a_store_counts_when_both_have_confirmed_it(engine: Any) -> None:
    toy = engine(num_workers=2)
    request = ToyRequest("a", PROMPT)
    toy.look_up(request)
    toy.scheduler.follow("a", [[0, 1, 2, 3, 4]], 18)
    orders = toy.scheduler.orders(is_idle=False)
    for worker, expected in zip(toy.workers, (0, 16), strict=True):
        worker.store(orders)
        toy.scheduler.take_report(worker.take_report())
        assert toy.look_up(ToyRequest("b", PROMPT)) == expected


# --- tiers -----------------------------------------------------------------------------------------------------------


def test_given_a_disk_when_the_engine_is_started_again_then_the_prompt_comes_from_there(
    engine: Any, tmp_path: Path
) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    second = engine(disk=str(tmp_path))
    assert served(second, ToyRequest("b", PROMPT)) == 16
    assert second.scheduler.stats()["from_tiers"] == 4
    assert served(second, ToyRequest("c", PROMPT)) == 16
    assert second.scheduler.stats()["from_host"] == 4


def test_given_two_workers_and_a_disk_then_each_brings_its_own_part(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path), num_workers=2)
    served(first, ToyRequest("a", PROMPT))
    first.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
    assert served(engine(disk=str(tmp_path), num_workers=2), ToyRequest("b", PROMPT)) == 16


def test_given_another_layout_then_blocks_on_the_disk_are_not_found(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    assert served(engine(disk=str(tmp_path), layout="toy 2"), ToyRequest("b", PROMPT)) == 0


@pytest.mark.slow
def test_given_damage_on_the_disk_then_the_engine_computes_from_there_on(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    from toy import content

    damaged = content(PROMPT[:12], 0, "//[]") * 2
    slabs = [path for path in tmp_path.rglob("*") if path.is_file() and damaged in path.read_bytes()]
    assert len(slabs) == 1
    data = bytearray(slabs[0].read_bytes())
    data[data.index(damaged)] ^= 1
    slabs[0].write_bytes(data)
    second = engine(disk=str(tmp_path))
    assert served(second, ToyRequest("b", PROMPT)) == 16  # promised, of which two blocks came
    assert second.scheduler.stats()["failed"] == 2
    assert second.computed == 18 - 8
    assert served(second, ToyRequest("c", PROMPT)) == 16


def test_given_more_in_the_engines_own_cache_than_on_the_host_then_what_tiers_bring_is_right(
    engine: Any, tmp_path: Path
) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    second = engine(disk=str(tmp_path))
    assert served(second, ToyRequest("b", PROMPT), local_blocks=2) == 8
    assert served(second, ToyRequest("c", PROMPT)) == 16


def test_given_a_full_host_then_no_more_is_loaded_from_tiers_than_it_takes(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    assert served(engine(disk=str(tmp_path), host_blocks=3), ToyRequest("b", PROMPT)) == 12


def test_given_a_tier_that_hangs_then_the_engine_computes_and_the_rows_stay_held_until_it_lets_go(
    engine: Any, tmp_path: Path
) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    second = engine(disk=str(tmp_path), timeout=0.05, host_blocks=4)
    (watched,) = second.workers[0]._tiers.watched
    lets_go, load = threading.Event(), watched.tier._load

    def hanging(*arguments: Any) -> Any:
        lets_go.wait()
        return load(*arguments)

    watched.tier._load = hanging
    assert served(second, ToyRequest("b", PROMPT)) == 16
    assert second.computed == 18
    assert second.scheduler.host.manager.inspect.num_free_blocks() == 0
    lets_go.set()
    while not second.scheduler.stats()["failed"]:
        second._step_loads(set())
        give_way()
    assert second.scheduler.stats()["failed"] == 4


def test_given_a_tier_whose_stores_hang_then_the_engine_goes_on_and_stores_again_when_it_lets_go(
    engine: Any, tmp_path: Path
) -> None:
    toy, lets_go = engine(disk=str(tmp_path), host_blocks=8), threading.Event()
    (watched,) = toy.workers[0]._tiers.watched
    store = watched.tier._store

    def hanging(*arguments: Any) -> Any:
        lets_go.wait()
        return store(*arguments)

    watched.tier._store = hanging
    for number in range(40):  # the host evicts most of it, and nothing of that is in the tier
        served(toy, ToyRequest(str(number), [number, *PROMPT]))
    assert served(toy, ToyRequest("again", [39, *PROMPT])) == 16
    lets_go.set()
    toy.workers[0]._storer.flush(10.0)
    served(toy, ToyRequest("b", PROMPT))
    toy.close()
    assert served(engine(disk=str(tmp_path)), ToyRequest("c", PROMPT)) == 16


def test_given_a_load_that_was_given_up_when_the_request_is_looked_up_again_then_tiers_are_left_alone(
    engine: Any, tmp_path: Path
) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    first.close()
    second, lets_go = engine(disk=str(tmp_path), timeout=0.05), threading.Event()
    second.workers[0]._tiers.watched[0].tier._load = lambda *arguments: lets_go.wait() and []
    request = ToyRequest("b", PROMPT)
    assert second.look_up(request) == 16
    second.scheduler.order_load(request, [[0, 1, 2, 3, 4]], 16)
    while "b" not in second._step_loads(set()):
        give_way()
    assert second.look_up(request) == 0
    lets_go.set()


@pytest.mark.quick("0-1")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_given_random_prompts_with_common_beginnings_then_every_page_is_right(
    engine: Any, tmp_path: Path, seed: int, num_workers: int
) -> None:
    rng = random.Random(seed)
    begins = [[rng.randrange(9) for _ in range(rng.randrange(8, 30))] for _ in range(6)]
    for life in range(2):
        toy = engine(disk=str(tmp_path), host_blocks=12, num_workers=num_workers)
        for number in range(40):
            tokens = rng.choice(begins)[: rng.randrange(8, 40)] + [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
            request = ToyRequest(str(number), tokens, cache_salt=rng.choice([None, "ada"]))
            own = rng.choice([0, 0, (len(tokens) - 1) // BLOCK // 2])
            served(toy, request, local_blocks=own, chunk=rng.choice([3, 8, 1000]))
            if life and rng.random() < 0.05:
                toy.scheduler.reset()
        stats = toy.scheduler.stats()
        toy.close()
        assert stats["from_host"]
    assert stats["from_tiers"]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_given_pages_on_a_gpu_then_every_page_is_right(engine: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    begins = [[rng.randrange(9) for _ in range(rng.randrange(60, 120))] for _ in range(4)]
    for _ in range(2):
        toy = engine(disk=str(tmp_path), host_blocks=60, num_pages=64, device="cuda", pages=LinkedPages)
        for number in range(40):
            tokens = rng.choice(begins)[: rng.randrange(8, 120)] + [
                rng.randrange(9) for _ in range(rng.randrange(1, 6))
            ]
            served(toy, ToyRequest(str(number), tokens), chunk=rng.choice([7, 40, 1000]))
        stats = toy.scheduler.stats()
        toy.close()
    assert stats["from_host"]
    assert stats["from_tiers"]


# --- copies that go on beside the steps --------------------------------------------------------------------------------


class LatePages(EnginePages):
    """A link that copies pages only when somebody has looked three times, or the engine is about to write them again."""

    copies_later = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[Callable[[], Any]] = []

    def read(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        looks = iter(range(3))
        copy, read = [moves], super().read

        def run() -> None:
            if copy:
                read(copy.pop(), host)

        self.waiting.append(run)

        def is_over() -> bool:
            if next(looks, None) is None:
                run()
            return not copy

        return is_over

    def fence(self) -> None:
        for run in self.waiting:
            run()
        self.waiting.clear()

    settle = fence


@pytest.mark.quick("0-1")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_given_stores_that_come_late_when_pages_are_given_to_others_then_rows_hold_what_was_computed(
    engine: Any, seed: int, num_workers: int
) -> None:
    rng = random.Random(seed)
    begins = [[rng.randrange(9) for _ in range(rng.randrange(8, 30))] for _ in range(6)]
    toy = engine(host_blocks=64, num_pages=12, num_workers=num_workers, pages=LatePages)
    for number in range(60):
        tokens = rng.choice(begins)[: rng.randrange(8, 40)] + [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
        served(toy, ToyRequest(str(number), tokens), chunk=rng.choice([3, 8, 1000]))
    assert toy.scheduler.stats()["from_host"]


def test_given_a_page_that_a_store_still_reads_when_another_request_gets_it_then_the_step_waits(engine: Any) -> None:
    toy = engine()
    toy.look_up(ToyRequest("a", PROMPT))
    toy.scheduler.follow("a", [[0, 1, 2, 3, 4]], 18)
    orders = toy.scheduler.orders(is_idle=False)
    assert not orders.fence
    toy.look_up(ToyRequest("b", [*PROMPT[:8], 1, 2, 3]))
    toy.scheduler.follow("b", [[0, 1, 5]], 11, num_computed=8)  # shares the first two
    sharing = toy.scheduler.orders(is_idle=False)
    assert not sharing.fence
    toy.scheduler.follow_on([("b", [[3]], 12)])
    assert toy.scheduler.orders(is_idle=False).fence
    toy.scheduler.follow("c", [[9, 2]], 8)
    assert toy.scheduler.orders(is_idle=False).fence
    longer = ToyRequest("d", [5] * 9)
    toy.look_up(longer)
    toy.scheduler.order_load(longer, [[1, 6, 7]], 8)
    loading = toy.scheduler.orders(is_idle=False)
    assert (loading.fence, loading.fences_loads) == (False, True)
    toy.scheduler.take_report(Report({store.job: JobProgress(1, 4) for store in orders.stores}))
    toy.scheduler.follow("e", [[1]], 4)
    assert toy.scheduler.orders(is_idle=False).fence, "the other request stores it, too"
    toy.scheduler.take_report(Report({store.job: JobProgress(1, 4) for store in sharing.stores}))
    toy.scheduler.follow("f", [[0, 1, 2, 3]], 8)
    assert not toy.scheduler.orders(is_idle=False).fence


def test_given_a_page_that_a_store_still_reads_when_another_connector_loads_into_it_then_the_store_comes_first(
    engine: Any,
) -> None:
    toy = engine(pages=LatePages)
    toy.look_up(ToyRequest("a", PROMPT))
    toy.scheduler.follow("a", [[0, 1, 2, 3, 4]], 18)
    worker, orders = toy.workers[0], toy.scheduler.orders(is_idle=False)
    toy._fill(2, b"a" * 32, b"a" * 32)
    worker.begin_step(orders)
    worker.store(orders)
    toy.scheduler.leave_to_others("b", [[5, 6]])
    unhurried = toy.scheduler.orders(is_idle=False)
    assert not unhurried.settles
    worker.begin_step(unhurried)
    toy.scheduler.leave_to_others("c", [[7, 2]])
    worker.begin_step(toy.scheduler.orders(is_idle=False))
    toy._fill(2, b"c" * 32, b"c" * 32)
    assert worker._host.array[orders.stores[0].rows[2]].tobytes() == b"a" * 64


class BrokenPages(EnginePages):
    """A link that refuses one copy."""

    is_broken = False

    def write(self, moves: Sequence[Move], host: HostRows) -> Callable[[], bool]:
        if moves and self.is_broken:
            self.is_broken = False
            raise TransferError("the driver refused a batch of 4 copies with error 700")
        return super().write(moves, host)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_given_a_link_that_refuses_a_copy_then_all_pages_of_the_load_are_computed_again(
    engine: Any, tmp_path: Path, where: str
) -> None:
    toy = engine(disk=str(tmp_path), pages=BrokenPages)
    served(toy, ToyRequest("a", PROMPT))
    if where == "disk":
        toy.close()
        toy = engine(disk=str(tmp_path), pages=BrokenPages)
    toy.workers[0]._pages.is_broken = True
    assert served(toy, ToyRequest("b", PROMPT)) == 16
    assert toy.scheduler.stats()["failed"] == 4
    assert served(toy, ToyRequest("c", PROMPT)) == 16
    assert toy.scheduler.stats()["failed"] == 4


def test_given_a_load_that_fails_on_one_of_two_workers_then_its_pages_are_computed_again_on_both(engine: Any) -> None:
    toy = engine(num_workers=2, pages=BrokenPages)
    served(toy, ToyRequest("a", PROMPT))
    toy.workers[1]._pages.is_broken = True
    longer = PROMPT[:16] + list(range(8))
    assert served(toy, ToyRequest("b", longer)) == 16
    assert toy.scheduler.stats()["failed"] == 4
    assert served(toy, ToyRequest("c", longer)) == 20


def test_given_a_tier_that_lost_a_block_of_one_worker_then_no_worker_uses_its_part(engine: Any, tmp_path: Path) -> None:
    first = engine(disk=str(tmp_path), num_workers=2)
    served(first, ToyRequest("a", PROMPT))
    first.close()
    second = engine(disk=str(tmp_path), num_workers=2)
    (watched,) = second.workers[1]._tiers.watched
    load = watched.tier._load
    watched.tier._load = lambda keys, out, *rest: load(keys[:1], out[:1], *rest) + [Outcome.MISS] * (len(keys) - 1)
    assert served(second, ToyRequest("b", PROMPT)) == 16  # promised, of which one block came
    assert second.computed == 18 - 4
    assert second.scheduler.stats()["failed"] == 3
    assert served(second, ToyRequest("c", PROMPT)) == 16


def test_given_read_only_then_prefixes_come_from_the_disk_of_another_and_nothing_goes_there(
    engine: Any, tmp_path: Path
) -> None:
    first = engine(disk=str(tmp_path))
    served(first, ToyRequest("a", PROMPT))
    assert first.workers[0]._storer.flush(30.0)
    second = engine(disk=str(tmp_path), read_only=True)
    assert served(second, ToyRequest("b", PROMPT)) == 16
    assert served(second, ToyRequest("c", PROMPT[1:])) == 0
    assert served(second, ToyRequest("d", PROMPT[1:])) == 16
    assert [stats.num_values for stats in first.workers[0].tier_stats()] == [4]
