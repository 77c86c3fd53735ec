"""What running requests hold of the host: their own blocks, and no more than somebody else can spare."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("xxhash")

from toy import BLOCK, PROMPT, ToyEngine, ToyRequest, image

from kvpool.integrations.connector.orders import NO_PAGE


class Running:
    """A request that decodes in steps of its own, so that several can run side by side."""

    def __init__(self, toy: ToyEngine, name: str, prompt: list[int], first_page: int, **options: Any) -> None:
        self.toy, self.request, self.first_page = toy, ToyRequest(name, list(prompt), **options), first_page
        toy.look_up(self.request)
        toy.scheduler.follow(name, [self._pages(0)], len(prompt))
        self._step()

    def _pages(self, start: int) -> list[int]:
        return list(range(self.first_page + start, self.first_page - (-len(self.request.all_token_ids) // BLOCK)))

    def decode(self, tokens: list[int]) -> None:
        for token in tokens:
            known = -(-len(self.request.all_token_ids) // BLOCK)
            self.request.all_token_ids.append(token)
            step = self.request.request_id, [self._pages(known)], len(self.request.all_token_ids)
            self.toy.scheduler.follow_on([step])
            self._step()

    def _step(self) -> None:
        orders = self.toy.scheduler.orders(is_idle=False)
        for worker in self.toy.workers:
            worker.load(orders)
            worker.store(orders)
        self.toy._report()

    def end(self) -> None:
        self.toy.scheduler.finish(self.request.request_id)
        self.toy.idle()


def found(toy: ToyEngine, tokens: list[int], **options: Any) -> int:
    """Whole blocks that the host has of these tokens."""
    probe = ToyRequest("probe", [*tokens, 1], **options)
    number = toy.look_up(probe) // BLOCK
    toy.scheduler.finish("probe")
    return number


def test_given_a_request_that_decodes_then_its_blocks_are_found_while_it_runs_and_afterwards(engine: Any) -> None:
    toy = engine()
    running = Running(toy, "a", PROMPT, 0)
    running.decode(list(range(14)))
    assert found(toy, running.request.all_token_ids) == 8
    running.end()
    assert found(toy, running.request.all_token_ids) == 8
    assert toy.scheduler.host.manager.inspect.num_free_blocks() + 8 == 16


def test_given_steps_that_fill_no_block_then_nothing_is_ordered(engine: Any) -> None:
    toy = engine(host_blocks=64)
    running = Running(toy, "a", PROMPT[:16], 0)
    asked: list[str] = []
    manager = toy.scheduler.host.manager
    extend, allocate = manager.extend_batch, manager.allocate
    manager.extend_batch = lambda *given: asked.append("extend") or extend(*given)
    manager.allocate = lambda *given, **options: asked.append("allocate") or allocate(*given, **options)
    running.decode(list(range(7 * BLOCK)))
    assert asked == ["extend"]  # rows for eight blocks at once, and no look-up


def test_given_a_host_that_running_requests_would_fill_then_another_gets_room(engine: Any) -> None:
    toy = engine(host_blocks=12)
    for name in range(3):
        Running(toy, str(name), [name, *PROMPT[1:]], 5 * name)
    assert toy.serve(ToyRequest("d", list(range(40)))) == 0
    assert found(toy, list(range(40))) == 10
    assert toy.scheduler.stats()["no_room"] == 0


def test_given_rows_that_were_let_go_then_the_request_goes_on_storing(engine: Any) -> None:
    toy = engine(host_blocks=12)
    running = Running(toy, "a", PROMPT, 0)
    toy.serve(ToyRequest("b", list(range(20))))
    running.decode(list(range(6)))
    assert found(toy, running.request.all_token_ids) == 6


def test_given_a_sampled_token_that_was_taken_back_then_blocks_are_stored_under_those_that_were_used(
    engine: Any,
) -> None:
    toy = engine()
    running = Running(toy, "a", PROMPT[:15], 0)
    request = running.request
    request.all_token_ids.append(999)  # sampled, and not computed
    toy.look_up(request)
    request.all_token_ids[-1:] = [7, 8, 9, 10, 11]  # the session goes on with another prompt
    toy.scheduler.follow_on([("a", [[4]], 20)])
    running._step()
    assert found(toy, [*PROMPT[:15], 7, 8, 9, 10, 11]) == 5
    assert found(toy, [*PROMPT[:15], 999]) == 3


def test_given_an_image_that_a_session_got_later_then_what_follows_is_not_stored(engine: Any) -> None:
    toy = engine()
    running = Running(toy, "a", PROMPT[:16], 0)
    running.request.mm_features.append(image("cat", 17, 2))
    running.decode([1, 2, 3, 4])
    assert found(toy, running.request.all_token_ids) == 4


def test_given_pages_that_left_their_window_before_they_were_stored_then_nothing_of_them_is_kept(engine: Any) -> None:
    toy = engine()
    running = Running(toy, "a", PROMPT[:8], 0)
    running.request.all_token_ids += PROMPT[8:16]
    toy.scheduler.follow_on([("a", None, 16)], lambda name: [[0, 1, NO_PAGE, 3]])
    running._step()
    assert found(toy, PROMPT[:16]) == 2
    running.decode([1, 2, 3, 4])
    running.end()
    assert found(toy, PROMPT[:16]) == 2
    assert toy.scheduler.host.manager.inspect.num_free_blocks() == 14
