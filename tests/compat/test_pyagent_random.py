"""PyAgent's calls at random against a slow model: what every request and every single block should hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvpool.compat import KVCacheAllocator, KVCacheBlock, KVCacheConfig, KVCacheManager, KVCacheTransfer
from kvpool.errors import OutOfBlocksError

torch = pytest.importorskip("torch")

CONFIG = KVCacheConfig(2, 1, 2, "float32", "cpu", block_size=4, num_gpu_blocks=16, num_cpu_blocks=8)


def requests_at_random(seed: int) -> None:
    draw, cache = random.Random(seed), KVCacheManager(CONFIG)
    lengths: dict[int, int] = {}
    written: dict[int, Any] = {}  # [layer, token, K or V]
    swapped: set[int] = set()
    pressed: list[str] = []
    cache.on_memory_pressure(lambda: pressed.append("critical"))
    was_critical = False
    for step in range(200):
        live = sorted(lengths.keys() - swapped)
        name = draw.choice(live) if live else -1
        verb = draw.choice(["allocate", "extend", "write", "write", "swap_out", "swap_in", "free", "defragment"])
        failed = False
        try:
            if verb == "allocate":
                wanted = draw.randrange(1, 20)
                fits = cache.can_allocate(wanted)
                blocks = cache.allocate(step, wanted)
                assert fits
                assert blocks.gpu_blocks == cache.get_block_table(step, 1)
                lengths[step], written[step] = wanted, np.zeros((2, 0, 2), np.float32)
            elif verb == "swap_in" and swapped:
                name = draw.choice(sorted(swapped))
                cache.swap_in(name)
                swapped.discard(name)
            elif verb == "defragment":
                cache.manager.cache.defragment()
            elif name == -1 or verb == "swap_in":
                continue
            elif verb == "extend":
                cache.extend(name, 3)
                lengths[name] += 3
            elif verb == "write" and written[name].shape[1] < lengths[name]:
                start = written[name].shape[1]
                made = np.random.default_rng(step).random(
                    (2, draw.randrange(1, lengths[name] - start + 1), 2), np.float32
                )
                for layer in range(2):
                    k, v = (np.repeat(made[layer, :, part, None, None], 2, axis=2) for part in range(2))
                    cache.write(name, layer, start, k, v)
                written[name] = np.concatenate([written[name], made], axis=1)
            elif verb == "swap_out":
                cache.swap_out(name)
                swapped.add(name)
            elif verb == "free":
                cache.free(name)
                del lengths[name], written[name]
        except OutOfBlocksError:
            assert verb in ("allocate", "extend", "swap_out", "swap_in")
            failed = verb in ("allocate", "extend")
        is_critical = cache.manager.inspect.pressure.name == "CRITICAL"
        assert len(pressed) == (failed or (is_critical and not was_critical))
        pressed.clear()
        was_critical = is_critical
        cache.manager.check()
        for request, values in written.items():
            for layer in range(2):
                keys, found = cache.read(request, layer)
                assert np.array_equal(keys[:, 0, 1].numpy(), values[layer, :, 0])
                assert np.array_equal(found[:, 0, 1].numpy(), values[layer, :, 1])
    for request in lengths:
        cache.free(request)
    assert cache.get_num_free_blocks() == 16


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(2))
def test_given_random_calls_then_every_request_reads_what_the_model_says(seed: int) -> None:
    requests_at_random(seed)


@pytest.mark.parametrize("seed", range(2))
def test_given_random_single_blocks_then_each_holds_what_the_model_says(seed: int) -> None:
    draw, allocator, transfer = random.Random(seed), KVCacheAllocator(CONFIG), KVCacheTransfer(CONFIG)
    held: dict[KVCacheBlock, tuple[Any, int]] = {}  # its number, and how many users it has
    for step in range(200):
        layer, verb = draw.randrange(2), draw.choice(["gpu", "gpu", "cpu", "write", "copy", "acquire", "free"])
        block = draw.choice(list(held)) if held else None
        if verb in ("gpu", "cpu"):
            made = allocator.allocate_gpu_block(layer) if verb == "gpu" else allocator.allocate_cpu_block(layer)
            if made is not None:
                held[made] = (0.0, 1)
        elif block is None:
            continue
        elif verb == "write":
            np.copyto(block.key_cache, np.full((4, 1, 2), float(step), np.float32))
            block.value_cache[:] = -float(step)
            held[block] = (float(step), held[block][1])
        elif verb == "copy":
            target = draw.choice([other for other in held if held[other][1] == 1] or [block])
            if target is not block and held[target][1] == 1:
                transfer.copy_blocks([block], [target])
                held[target] = (held[block][0], 1)
        elif verb == "acquire":
            block.acquire()
            held[block] = (held[block][0], held[block][1] + 1)
        else:
            allocator.free_block(block)
            number, users = held.pop(block)
            if users > 1:
                held[block] = (number, users - 1)
        for other, (number, users) in held.items():
            assert other.ref_count == users
            assert (other.key_cache == number).all()
            assert (other.value_cache == -number).all()
        used = [sum(other.layer_idx == layer and other.tier == 0 for other in held) for layer in range(2)]
        assert (allocator.get_num_free_gpu_blocks(), allocator.usage) == (16 - max(used), sum(used) / 32)
