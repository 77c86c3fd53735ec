"""A `Prompt` in place of tokens: the same answers, and one walk of the tree for as long as nothing changes."""

from __future__ import annotations

import copy
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheHandle, KVCacheManager, LayerSpec, Prompt, ReuseScope
from kvpool.core.cache import Cache
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.eviction import LRUPolicy
from kvpool.scheduling import Request, Scheduler, SchedulerConfig
from kvpool.sequences import admit
from managers import FULL, Clock, make_manager

SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
TEXT = list(range(12))


def computed(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> None:
    """A request that came and went: what it computed is cached."""
    handle = manager.allocate(name, tokens, **options)
    manager.commit(handle)
    manager.free(handle)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the prompts for which the tree was walked."""
    lengths: list[int] = []
    walk = admit.match_tokens

    def counted(cache: Cache, scope: ReuseScope, tokens: Any, *args: Any, **options: Any) -> Any:
        lengths.append(len(tokens))
        return walk(cache, scope, tokens, *args, **options)

    monkeypatch.setattr(admit, "match_tokens", counted)
    return lengths


def test_given_a_prompt_when_it_is_matched_asked_about_and_admitted_then_the_tree_is_walked_once(
    walks: list[int],
) -> None:
    manager = make_manager()
    prompt = Prompt(TEXT)
    assert manager.match_prefix(prompt).num_tokens == 0
    assert manager.can_allocate(prompt, wait_for_prefix=True)
    manager.allocate("a", prompt)
    assert walks == [12]


def test_given_a_scheduler_when_it_admits_requests_then_the_tree_is_walked_once_for_each(walks: list[int]) -> None:
    manager = make_manager(gpu_blocks=32)
    computed(manager, "before", TEXT)
    scheduler = Scheduler(manager, SchedulerConfig(policy="fcfs"))  # others look for prefixes before they admit
    walks.clear()
    for number, length in enumerate((13, 17, 21)):
        scheduler.add(Request(number, [*TEXT, *range(100 * (number + 1), 100 * (number + 1) + length - 12)], 4))
    assert len(scheduler.step().sequences) == 3
    assert walks == [13, 17, 21]


def test_given_a_refused_admission_then_what_was_found_still_holds(walks: list[int]) -> None:
    manager = make_manager(gpu_blocks=4)
    manager.allocate("other", num_tokens=8)
    prompt = Prompt(TEXT)
    for _ in range(2):
        with pytest.raises(OutOfBlocksError):
            manager.allocate("a", prompt)
    assert walks == [12]


CHANGES: dict[str, Callable[[KVCacheManager], object]] = {
    "commit": lambda manager: computed(manager, "more", TEXT),
    "evict": lambda manager: manager.cache.evict(16),
    "invalidate": lambda manager: manager.cache.invalidate(TEXT),
    "reset": lambda manager: manager.cache.reset(),
    "offload": lambda manager: manager.cache.offload(1),
    "pin": lambda manager: manager.cache.pin(TEXT),
    "defragment": lambda manager: manager.cache.defragment(),
    "resize": lambda manager: manager.cache.resize(1),
    "allocate": lambda manager: manager.allocate("next", num_tokens=20),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("layers", [(FULL,), (FULL, SLIDING)], ids=["full", "sliding"])
def test_given_something_that_changes_the_cache_then_a_prompt_is_answered_as_its_tokens_are(
    change: Callable[[KVCacheManager], object], layers: tuple[LayerSpec, ...]
) -> None:
    manager = make_manager(*layers, host_blocks=8)
    computed(manager, "before", TEXT[:8])
    prompt = Prompt([*TEXT, 99])
    manager.match_prefix(prompt)
    change(manager)
    assert manager.match_prefix(prompt) == manager.match_prefix([*TEXT, 99])
    assert manager.can_allocate(prompt) == manager.can_allocate([*TEXT, 99])


def test_given_content_whose_time_is_over_then_a_prompt_does_not_find_it_again() -> None:
    clock = Clock()
    manager = make_manager(clock=clock)
    computed(manager, "before", TEXT, ttl=5.0)
    prompt = Prompt([*TEXT, 99])
    assert manager.match_prefix(prompt).num_tokens == 12
    clock.now = 6.0
    assert manager.match_prefix(prompt).num_tokens == 0


def test_given_another_manager_then_a_prompt_finds_what_that_one_has() -> None:
    first, second = make_manager(), make_manager()
    computed(first, "a", TEXT)
    prompt = Prompt([*TEXT, 99])
    assert [m.match_prefix(prompt).num_tokens for m in (first, second, first)] == [12, 0, 12]


def test_given_another_manager_that_is_asked_in_another_thread_then_the_tokens_admitted_are_those_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each manager has a lock of its own, so the other one may be asked between a plan and the admission."""
    first, second = make_manager(), make_manager()
    prompt = Prompt(TEXT, multimodal=[(4, 4, "cat")])
    plan = admit.plan_admission

    def interrupted(cache: Cache, *args: Any) -> Any:
        planned = plan(cache, *args)
        if cache is first._cache:
            second.free(second.allocate("other", prompt))
        return planned

    monkeypatch.setattr(admit, "plan_admission", interrupted)
    assert first.allocate("a", prompt).token_ids.tolist() == TEXT
    first.check()


class AskingPolicy(LRUPolicy):
    """Asks about a prompt while an operation evicts something."""

    ask: Callable[[], object] = staticmethod(lambda: None)

    def victim(self) -> Any:
        self.ask()
        return super().victim()


@pytest.mark.parametrize(
    "evict",
    [
        lambda manager: manager.cache.evict(2),
        lambda manager: manager.allocate("next", num_tokens=16 * 4),
    ],
    ids=["evict", "allocate"],
)
def test_given_a_question_in_the_middle_of_an_operation_then_its_answer_does_not_outlive_it(
    evict: Callable[[KVCacheManager], object],
) -> None:
    policy = AskingPolicy()
    manager = make_manager(policy=lambda: policy)
    computed(manager, "before", TEXT)
    prompt = Prompt([*TEXT, 99])
    policy.ask = lambda: manager.match_prefix(prompt)
    evict(manager)
    policy.ask = lambda: None
    assert manager.match_prefix(prompt) == manager.match_prefix([*TEXT, 99])


def test_given_a_question_in_the_middle_of_an_operation_then_it_is_answered_from_what_is_there_at_that_moment() -> None:
    policy = AskingPolicy()
    manager = make_manager(policy=lambda: policy)
    for first in (0, 100):
        computed(manager, f"before {first}", list(range(first, first + 12)))
    prompt = Prompt([*TEXT, 99])
    manager.match_prefix(prompt)
    answers: list[Any] = []
    policy.ask = lambda: answers.append((manager.match_prefix(prompt), manager.match_prefix([*TEXT, 99])))
    manager.cache.evict(6)
    assert [found.num_tokens for found, _ in answers] == [12, 0]
    assert all(found == expected for found, expected in answers)


def test_given_a_batch_that_admits_one_prompt_twice_then_the_second_does_not_reuse_what_the_first_took_over() -> None:
    manager = make_manager(copy_on_partial_reuse=False)
    computed(manager, "before", TEXT)
    prompt = Prompt([*TEXT[:10], 99, 98])
    manager.match_prefix(prompt)
    first, second = manager.allocate_batch([{"request_id": name, "tokens": prompt} for name in "ab"])
    assert isinstance(first, KVCacheHandle)
    assert isinstance(second, KVCacheHandle)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (10, 8)
    manager.check()


def test_given_a_prompt_that_was_matched_then_its_copies_are_prompts_and_not_caches() -> None:
    manager = make_manager()
    computed(manager, "a", TEXT)
    prompt = Prompt(TEXT, multimodal=[(8, 2, "cat")])
    manager.match_prefix(prompt)
    for same in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert len(pickle.dumps(same)) < 2000
        assert manager.match_prefix(same) == manager.match_prefix(prompt)


@pytest.mark.parametrize("name", ["tokens", "scope", "items", "cross_tokens"])
def test_given_a_prompt_then_nothing_of_it_can_be_changed(name: str) -> None:
    prompt = Prompt(TEXT)
    with pytest.raises(AttributeError):
        setattr(prompt, name, getattr(Prompt([1], ReuseScope(tenant="t")), name))
    assert prompt.tokens is not None
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 7


def test_given_random_operations_then_prompts_that_are_kept_are_answered_as_their_tokens_are() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        manager = make_manager(*rng.choice([(FULL,), (FULL, SLIDING)]), gpu_blocks=12, host_blocks=rng.choice([0, 6]))
        texts = [[rng.randrange(2) for _ in range(rng.randrange(1, 20))] for _ in range(6)]
        prompts = [Prompt(text) for text in texts]
        for number in range(60):
            which = rng.randrange(6)
            if manager.can_allocate(prompts[which]) and rng.random() < 0.6:
                handle = manager.allocate(number, prompts[which])
                assert handle.token_ids.tolist() == texts[which]
                manager.commit(handle)
            elif manager.handles:
                manager.free(rng.choice(manager.handles), keep=rng.random() < 0.8)
            if rng.random() < 0.1:
                manager.cache.evict(rng.randrange(4))
            for prompt, text in zip(prompts, texts, strict=True):
                assert manager.match_prefix(prompt) == manager.match_prefix(text)
            manager.check()


def test_given_an_array_that_changes_later_then_the_prompt_does_not() -> None:
    tokens = np.arange(12, dtype=np.int32)
    prompt = Prompt(tokens)
    tokens[:] = 7
    manager = make_manager()
    assert manager.allocate("a", prompt).token_ids.tolist() == TEXT


def test_given_images_and_a_scope_then_a_prompt_reuses_what_the_same_arguments_do() -> None:
    manager = make_manager(host_blocks=8)
    scope, image = ReuseScope(tenant="t"), [(4, 4, "cat")]
    computed(manager, "a", TEXT, scope=scope, multimodal=image)
    prompt = Prompt([*TEXT, 99], scope, image)
    assert manager.match_prefix(prompt).num_tokens == 12
    assert manager.match_prefix(Prompt([*TEXT, 99], scope, [(4, 4, "dog")])).num_tokens == 4
    manager.cache.offload(16)
    assert manager.cache.onboard(prompt) == 3
    manager.cache.unpin(manager.cache.pin(prompt))
    assert manager.allocate("b", prompt).num_cached_tokens == 12
    assert manager.cache.invalidate(prompt) == 1  # the last of its full blocks
    assert manager.match_prefix(prompt).num_tokens == 8


@pytest.mark.parametrize(
    "beside", [{"scope": ReuseScope(tenant="t")}, {"multimodal": [(0, 1, "k")]}, {"cross_tokens": 4}]
)
def test_given_a_prompt_and_what_belongs_to_it_beside_it_then_the_call_is_refused(beside: dict[str, Any]) -> None:
    manager = make_manager()
    with pytest.raises(InvalidArgumentError, match="give them to Prompt, not beside it"):
        manager.allocate("a", Prompt(TEXT), **beside)
    assert not manager.handles


@pytest.mark.parametrize("arguments", [([1.5],), (None,), ([-1],), ([1], "scope"), ([1], ReuseScope(), None, -1)])
def test_given_a_prompt_that_cannot_be_one_then_it_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        Prompt(*arguments)


@pytest.mark.parametrize("named", [False, True], ids=["tokens", "a prompt"])
def test_given_a_request_that_came_and_went_then_nobody_holds_its_array_of_tokens(named: bool) -> None:
    manager = make_manager()
    array = np.arange(400, dtype=np.int32)
    gone = weakref.ref(array)
    tokens: Any = Prompt(array[:12], copy=False) if named else array[:12]
    assert manager.can_allocate(tokens)
    computed(manager, "a", tokens)
    del array, tokens
    assert gone() is None


@pytest.mark.parametrize("ask", [KVCacheManager.match_prefix, KVCacheManager.can_allocate])
def test_given_a_question_about_tokens_then_nobody_holds_their_array(ask: Callable[..., Any]) -> None:
    manager = make_manager()
    array = np.arange(400, dtype=np.int32)
    gone = weakref.ref(array)
    ask(manager, array[:12])
    del array
    assert gone() is None
