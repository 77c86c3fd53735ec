"""Requests with images: the scheduler tells the manager of them wherever it asks for a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from support import add, make_engine

from kvpool import MultimodalItem
from kvpool.scheduling import Request
from managers import make_manager

IMAGE = 99
PROMPT = [*range(6), *[IMAGE] * 6, 7, 8, 9, 10]
CAT, DOG = [(6, 6, "cat")], [(6, 6, "dog")]


def looking(name: str, items: Any, prompt: list[int] = PROMPT, max_new_tokens: int = 4, **options: Any) -> Request:
    return Request(name, prompt, max_new_tokens, multimodal=items, **options)


def test_a_request_keeps_its_images_as_items() -> None:
    assert looking("a", iter(CAT)).multimodal == (MultimodalItem(6, 6, "cat"),)


def test_given_different_images_then_requests_share_the_text_before_them() -> None:
    engine = make_engine(make_manager(gpu_blocks=64))
    for name, items, cached in (("a", CAT, 0), ("b", DOG, 6), ("c", CAT, 6 + 15)):
        add(engine, looking(name, items))
        engine.drain()
        assert engine.scheduler.stats.cached_tokens == cached


def test_given_equal_images_then_the_second_waits_for_the_first_and_given_others_it_does_not() -> None:
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=16)
    add(engine, looking("a", CAT), looking("b", CAT))
    engine.step()
    engine.step()
    assert engine.scheduler.stats.prefix_waits == 1
    engine.drain()
    engine = make_engine(make_manager(gpu_blocks=64), max_tokens_per_step=16)
    add(engine, looking("a", [(0, 4, "cat")]), looking("b", [(0, 4, "dog")]))
    engine.step()
    engine.step()
    assert engine.scheduler.stats.prefix_waits == 0


def test_given_too_little_memory_then_preempted_requests_find_their_own_images_again() -> None:
    engine = make_engine(make_manager(gpu_blocks=9), preemption="recompute")
    requests = [looking(name, items, max_new_tokens=12) for name, items in (("a", CAT), ("b", DOG))]
    add(engine, *requests)
    engine.drain()
    assert engine.scheduler.stats.recomputed_tokens > 0
    engine.assert_right(*requests)
    resident = [engine.manager.match_prefix(PROMPT, multimodal=items).num_tokens for items in (CAT, DOG)]
    assert max(resident) == len(PROMPT) - 1
    assert engine.manager.match_prefix(PROMPT).num_tokens == 6


def test_given_stored_logits_of_a_prompt_that_ends_with_an_image_then_it_decodes_its_last_placeholder() -> None:
    prompt, items = PROMPT[:12], CAT
    manager = make_manager(gpu_blocks=64)
    engine = make_engine(manager)
    first = looking("a", items, prompt)
    add(engine, first)
    engine.step()
    (sequence,) = engine.scheduler.sequences("a")
    assert manager.store_last_logits(sequence.live_handle(), "logits")
    engine.drain()
    second = looking("b", items, prompt)
    add(engine, second)
    before = engine.scheduler.stats.prefill_tokens
    engine.drain()
    engine.assert_right(first, second)
    assert engine.scheduler.stats.prefill_tokens == before, "nothing of the prompt is computed but its last token"
    tokens = [*prompt, *engine.finished["b"].token_ids.tolist()]
    assert manager.match_prefix(tokens, multimodal=items).num_tokens >= 12
    assert manager.match_prefix(tokens).num_tokens == 6
    assert manager.stats().num_cached_runs <= 3


@pytest.mark.parametrize(("items", "shares"), [(CAT, True), (DOG, False), ((), False)])
def test_given_another_image_then_a_fork_does_not_share_the_parents_blocks(items: Any, shares: bool) -> None:
    engine = make_engine(make_manager(gpu_blocks=64))
    add(engine, looking("parent", CAT, max_new_tokens=12))
    for _ in range(3):
        engine.step()
    (parent,) = engine.scheduler.sequences("parent")
    child = looking("child", items, engine.scheduler.token_ids(parent).tolist())
    assert engine.scheduler.fork(parent, child) is shares
    engine.drain()
    engine.assert_right(child)


def test_given_several_images_then_a_prompt_ends_with_one_if_the_last_reaches_its_end() -> None:
    items = [MultimodalItem(0, 4, "cat"), MultimodalItem(6, 2, "dog")]
    asked = Request("a", list(range(10)), 2, multimodal=items)
    assert [asked.ends_with_item(num_tokens) for num_tokens in (4, 6, 8, 10)] == [False, False, True, False]
