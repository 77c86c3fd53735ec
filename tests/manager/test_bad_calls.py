"""Every public method with every kind of wrong value: an error of ours or an answer, and the books hold afterwards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, ReuseHint, Tier
from kvpool.core.handle import SequenceBatch
from kvpool.errors import KVPoolError
from kvpool.manager.aio import AsyncKVCacheManager
from kvpool.manager.inspection import Inspector
from kvpool.manager.upkeep import CacheUpkeep
from kvpool.scheduling import Request, Scheduler
from wrong_values import NASTY, Raises

LAYERS = [LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=2, head_dim=8, window=8)]


def new_manager() -> KVCacheManager:
    config = KVCacheConfig(LAYERS, block_size=4, gpu_blocks=24, host_blocks=24, watermark=0.0)
    manager = KVCacheManager(config)
    manager.free(_committed(manager, "old", [5] * 8))
    _committed(manager, "live", [1] * 9, session="s")
    manager.swap_out(_committed(manager, "away", [2] * 5))
    return manager


def _committed(manager: KVCacheManager, name: str, tokens: list[int], **options: Any) -> KVCacheHandle:
    handle = manager.allocate(name, tokens, **options)
    manager.commit(handle)
    return handle


def good_arguments(manager: KVCacheManager) -> dict[str, Any]:
    """What each parameter is when another one is wrong."""
    live = manager.get("live")
    return {
        **{"handle": live, "batch": [live], "handles": live, "pin": manager.cache.pin([5] * 8), "request_id": "new"},
        **{"request_ids": "new", "tokens": [1, 2, 3], "prefix": [5] * 8, "num_blocks": 1, "block_id": 0, "start": 0},
        **{
            "stop": 1,
            "tenant": "t",
            "logits": "logits",
            "callback": print,
            "num_tokens": 1,
            "requests": [],
            "position": 1,
        },
        **{"hint": ReuseHint("stop"), "media": {0: Tier.DISK}},
    }


def public_methods(kind: type) -> list[str]:
    names = [name for name in dir(kind) if not name.startswith("_")]
    found = [name for name in names if inspect.isroutine(inspect.getattr_static(kind, name))]
    assert found, f"{kind} has no methods"
    return found


def parameters(method: Any) -> list[inspect.Parameter]:
    return [p for p in signature(method).parameters.values() if p.name not in ("self", "options")]


def call(method: Any, good: dict[str, Any], wrong: str, value: Any) -> Any:
    """Calls a method with one wrong argument and good ones for what it needs besides."""
    taken = parameters(method)
    given: list[Any] = []
    named: dict[str, Any] = {}
    needed = {"tokens"} if {"tokens", "num_tokens", "scope"} <= {p.name for p in taken} else {"prefix"}
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in taken)
    for parameter in taken:
        if parameter.name == wrong:
            argument = value
        elif parameter.default is parameter.empty or (
            parameter.name in needed and wrong not in ("num_tokens", "session")
        ):
            argument = good[parameter.name]
        else:
            continue
        if has_rest:
            given.append(argument)
        else:
            named[parameter.name] = argument
    return method(*given, **named)


def complaints_about(make: Callable[[], tuple[KVCacheManager, Any, dict[str, Any]]], name: str) -> list[str]:
    """What is wrong about bad calls of a method: they raised something raw, or left broken books."""
    found: list[str] = []
    manager, target, good = make()
    for parameter in parameters(getattr(type(target), name)):
        for value in NASTY:
            what = f"{name}({parameter.name}={value!r})"
            refused = False
            try:
                result = call(getattr(target, name), good, parameter.name, value)
                if inspect.iscoroutine(result):
                    asyncio.run(asyncio.wait_for(result, 5.0))
            except KVPoolError:
                refused = True
            except Exception as error:
                found.append(f"{what} raised {error!r}")
            try:
                manager.check()
            except KVPoolError as error:
                found.append(f"{what} broke the books: {error}")
            if not refused:
                manager, target, good = make()
    return found


def for_the_manager() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, manager, good_arguments(manager)


@pytest.mark.quick("allocate")
@pytest.mark.parametrize("name", public_methods(KVCacheManager))
def test_the_manager_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_the_manager, name)


def for_the_cache() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, manager.cache, good_arguments(manager)


@pytest.mark.quick("count_loaded")
@pytest.mark.parametrize("name", public_methods(CacheUpkeep))
def test_the_cache_of_a_manager_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_the_cache, name)


def for_an_inspector() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, manager.inspect, {**good_arguments(manager), "tiers": Tier.GPU}


@pytest.mark.parametrize("name", public_methods(Inspector))
def test_an_inspector_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_an_inspector, name)


def for_a_batch() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, manager.batch([manager.get("live")]), {}


@pytest.mark.parametrize("name", public_methods(SequenceBatch))
def test_a_batch_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_a_batch, name)


def for_a_handle() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, manager.get("live"), {}


@pytest.mark.parametrize("name", public_methods(KVCacheHandle))
def test_a_handle_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_a_handle, name)


def for_asyncio() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    return manager, AsyncKVCacheManager(manager), good_arguments(manager)


def test_the_asynchronous_manager_refuses_wrong_values() -> None:
    assert not complaints_about(for_asyncio, "allocate")


@pytest.mark.parametrize("keep", NASTY)
def test_an_asynchronous_sequence_with_a_wrong_flag_allocates_nothing(keep: Any) -> None:
    manager = new_manager()

    async def use() -> None:
        async with AsyncKVCacheManager(manager).sequence("new", [1, 2, 3], keep=keep):
            pass

    if isinstance(keep, (bool, np.bool_)):
        asyncio.run(use())
    else:
        with pytest.raises(KVPoolError):
            asyncio.run(use())
    assert [handle.request_id for handle in manager.handles] == ["live", "away"]
    manager.check()


def for_the_scheduler() -> tuple[KVCacheManager, Any, dict[str, Any]]:
    manager = new_manager()
    scheduler = Scheduler(manager)
    scheduler.add(Request("r", [1, 2, 3], max_new_tokens=4))
    scheduler.complete(scheduler.step(), [7])
    (sequence,) = scheduler.sequences("r")
    prompt = scheduler.token_ids(sequence)
    good = {"request": Request("new", prompt, max_new_tokens=2), "parent": sequence, "sequence": sequence}
    return manager, scheduler, {**good, "request_id": "r", "drafts": [1], "plan": scheduler.step(), "seconds": 0.5}


@pytest.mark.quick("abandon", "landed")
@pytest.mark.parametrize("name", public_methods(Scheduler))
def test_the_scheduler_refuses_wrong_values(name: str) -> None:
    assert not complaints_about(for_the_scheduler, name)


@pytest.mark.quick("id")
@pytest.mark.parametrize("field", [p.name for p in parameters(Request)])
def test_a_request_refuses_wrong_values(field: str) -> None:
    """What is accepted can be planned."""
    for value in NASTY:
        given = {"id": "new", "prompt": [1, 2, 3], "max_new_tokens": 2, field: value}
        manager, scheduler, _ = for_the_scheduler()
        try:
            scheduler.add(Request(**given))
        except KVPoolError:
            continue
        except Exception as error:
            pytest.fail(f"Request({field}={value!r}) raised {error!r}")
        scheduler.step()
        manager.check()


@pytest.mark.parametrize("method", ["eq", "hash"])
def test_two_ids_that_cannot_be_told_apart_are_refused(method: str) -> None:
    manager = new_manager()
    with pytest.raises(KVPoolError, match="hashable and comparable"):
        manager.fork(manager.get("live"), Raises(method), Raises(method))
    manager.check()
    assert len(manager.handles) == 2


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("method", ["extend_batch", "mark_written", "commit_batch", "commit_batch with ids"])
def test_counts_that_are_not_one_for_each_sequence_are_refused(method: str, counts: list[int]) -> None:
    manager = new_manager()
    batch = [manager.allocate(name, [7, 8, 9]) for name in ("first", "second")]
    calls: dict[str, Callable[[], Any]] = {
        "extend_batch": lambda: manager.extend_batch(batch, counts),
        "mark_written": lambda: manager.mark_written(batch, counts),
        "commit_batch": lambda: manager.commit_batch(batch, None, counts),
        "commit_batch with ids": lambda: manager.commit_batch(batch, [7] * len(counts), counts),
    }
    with pytest.raises(KVPoolError, match=f"^got {len(counts)} counts for a batch of 2 sequences$"):
        calls[method]()
    assert [(each.num_reserved, each.num_written, each.num_committed) for each in batch] == [(3, 0, 0)] * 2
    manager.check()
