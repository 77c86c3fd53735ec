"""PyAgent's spellings: its nine classes with real bytes, and the manager behind them."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import MemoryPressure, Tier, create_kv_cache_manager
from kvpool.compat import (
    DeviceType,
    KVCacheAllocator,
    KVCacheBlocks,
    KVCacheTransfer,
    PagedKVCache,
    pyagent,
)
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    SharedBlockError,
    StorageError,
    UnknownRequestError,
)

torch = pytest.importorskip("torch")

PROMPT = list(range(16))


def make_cache(num_blocks: int = 16, **settings: object) -> pyagent.KVCacheManager:
    return create_kv_cache_manager(2, 2, 8, num_blocks, 4, **settings)  # type: ignore[arg-type]


def test_given_defaults_when_created_then_the_pool_has_1000_blocks_of_16_float16_tokens() -> None:
    cache = create_kv_cache_manager(num_layers=2, num_heads=4, head_dim=64)
    assert cache.get_num_free_blocks() == 1000
    assert cache.manager.config.bytes_per_token == 2 * 2 * 4 * 64 * 2
    assert cache.usage == 0.0


def test_given_a_half_full_block_when_extending_then_a_block_is_taken_only_past_its_end() -> None:
    cache = make_cache()
    cache.allocate("a", 6)
    assert cache.extend("a", 2).gpu_blocks == []
    assert cache.extend("a", 1).gpu_blocks == [2]
    assert cache.get_block_table("a", 1) == [0, 1, 2]
    cache.free("a")
    assert cache.get_num_free_blocks() == 16


def test_given_a_cached_prompt_then_its_blocks_are_free_for_others() -> None:
    """As `can_allocate` says: a program that waits for so many free blocks would wait for ever."""
    cache = make_cache()
    cache.allocate("a", tokens=list(range(16)))
    cache.commit("a", None)
    cache.free("a")
    assert (cache.get_num_free_blocks(), cache.can_allocate(16 * 4)) == (16, True)
    pin = cache.manager.cache.pin(list(range(16)))
    assert cache.get_num_free_blocks() == 12
    cache.manager.cache.unpin(pin)


def test_given_mistakes_then_they_raise_and_change_nothing() -> None:
    cache = make_cache()
    cache.allocate("a", 8)
    with pytest.raises(DuplicateRequestError):
        cache.allocate("a", 8)
    with pytest.raises(OutOfBlocksError):
        cache.extend("a", 1000)
    for call in (cache.extend, cache.free, cache.get_block_table, cache.swap_out):
        with pytest.raises(UnknownRequestError):
            call("nobody")
    with pytest.raises(InvalidArgumentError):
        cache.allocate("b", -1)
    assert cache.get_num_free_blocks() == 14
    cache.manager.check()


def test_given_pressure_when_it_changes_then_every_callback_hears_it_until_stopped() -> None:
    cache = make_cache()
    heard: list[MemoryPressure] = []
    stop = cache.on_memory_pressure(lambda change: heard.append(change.level))
    cache.allocate("a", 64)
    stop()
    cache.free("a")
    assert heard == [MemoryPressure.CRITICAL]


# --- its own configuration --------------------------------------------------------------------------------------------


def small(**settings: Any) -> pyagent.KVCacheConfig:
    fields: dict[str, Any] = dict(num_layers=2, num_heads=2, head_dim=8, block_size=4, device="cpu", num_gpu_blocks=8)
    return pyagent.KVCacheConfig(**{**fields, **settings})


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"), [("float16", 16), ("float32", 32), ("bfloat16", 16), ("fp8", 8), ("int8", 8 + 2)]
)
def test_given_a_type_then_the_sizes_are_the_bytes_that_a_block_really_takes(dtype: str, bytes_per_head: int) -> None:
    config = small(dtype=pyagent.DType(dtype))
    assert config.kv_size_per_token == 2 * 2 * 2 * bytes_per_head  # layers, K and V, heads
    assert config.block_size_bytes == 4 * config.kv_size_per_token
    cache = PagedKVCache(config)
    assert cache.plane.num_bytes[Tier.GPU] == 8 * config.block_size_bytes


def test_given_pyagents_defaults_then_they_are_those_of_its_documentation() -> None:
    config = pyagent.KVCacheConfig(num_layers=2, num_heads=4, head_dim=64)
    assert (config.dtype, config.device, config.block_size) == (pyagent.DType.FLOAT16, DeviceType.CUDA, 16)
    assert (config.num_gpu_blocks, config.num_cpu_blocks) == (1000, 0)
    assert PagedKVCache(config).get_num_free_blocks() == 1000  # ids need no GPU


def test_given_memory_in_place_of_blocks_then_it_is_divided_by_what_a_block_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.storage.memory.free_bytes", lambda device: 100 * 2048)
    config = small(num_gpu_blocks=None, gpu_memory_utilization=0.5, swap_space_gb=1 / 1024)
    assert config.block_size_bytes == 512
    assert (config.num_gpu_blocks, config.num_cpu_blocks) == (200, 2048)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(gpu_memory_utilization=0.9), "num_gpu_blocks and gpu_memory_utilization both"),
        (dict(num_cpu_blocks=4, swap_space_gb=1), "num_cpu_blocks and swap_space_gb both"),
        (dict(swap_space_gb=-1), "swap_space_gb=-1"),
        (dict(device="mps"), "'cuda' or 'cpu'"),
        (dict(device="tpu"), "device='tpu'"),
        (dict(dtype="float12"), "no known dtype"),
        (dict(num_layers=0), "num_layers=0"),
        (dict(enable_chunked_prefill="yes"), "enable_chunked_prefill='yes'"),
        (dict(num_block=8), "no setting 'num_block'; the nearest: .*num_gpu_blocks"),
    ],
)
def test_given_a_setting_that_cannot_work_then_the_error_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(**settings)


def test_given_a_prompt_in_chunks_then_it_takes_places_chunk_by_chunk_unless_that_is_off() -> None:
    cache = PagedKVCache(small())
    assert cache.allocate_for_request("a", 16, reserve=4).num_blocks == 1
    assert cache.extend_allocation("a", 12).num_blocks == 3
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        PagedKVCache(small(enable_chunked_prefill=False)).allocate_for_request("a", 16, reserve=4)


def test_given_no_prefix_caching_then_equal_prompts_share_nothing() -> None:
    for enabled, cached in ((True, 15), (False, 0)):
        cache = pyagent.KVCacheManager(small(enable_prefix_caching=enabled))
        cache.allocate("a", tokens=PROMPT)
        cache.commit("a", 16)
        cache.free("a")
        cache.allocate("b", tokens=PROMPT)
        assert cache.handle("b").num_cached_tokens == cached


# --- PagedKVCache and KVCacheManager ----------------------------------------------------------------------------------


def test_given_a_request_then_its_blocks_are_listed_once_and_the_table_is_the_same_for_all_layers() -> None:
    cache = PagedKVCache(small())
    blocks = cache.allocate_for_request("a", 10)
    assert (blocks.gpu_blocks, blocks.cpu_blocks, blocks.num_blocks) == ([0, 1, 2], [], 3)
    assert cache.extend_allocation("a", 2) == KVCacheBlocks()  # the last block has room
    assert cache.extend_allocation("a", 5).gpu_blocks == [3, 4]
    assert [cache.get_block_table("a", layer) for layer in range(2)] == [[0, 1, 2, 3, 4]] * 2
    assert (cache.usage, cache.get_num_free_blocks()) == (5 / 8, 3)
    cache.free_request("a")
    assert cache.usage == 0.0


def test_given_too_little_memory_then_nothing_is_given_and_nothing_changes() -> None:
    cache = pyagent.KVCacheManager(small(num_cpu_blocks=8))
    cache.allocate("a", 20)
    with pytest.raises(OutOfBlocksError):
        cache.allocate("b", 16)
    with pytest.raises(OutOfBlocksError):
        cache.extend("a", 100)
    with pytest.raises(UnknownRequestError):
        cache.extend("b", 1)
    assert (cache.get_num_free_blocks(), cache.get_blocks("a").num_blocks) == (3, 5)
    for wrapper in (PagedKVCache, KVCacheAllocator):
        with pytest.raises(ConfigError, match="PyAgent's KVCacheConfig"):
            wrapper(cache.manager.config)  # type: ignore[arg-type]


def test_given_written_keys_when_a_request_is_swapped_out_and_in_then_every_byte_comes_back() -> None:
    cache = pyagent.KVCacheManager(small(num_cpu_blocks=8))
    cache.allocate("a", 10)
    given = [(torch.randn(10, 2, 8).half(), torch.randn(10, 2, 8).half()) for _ in range(2)]
    for layer, (k, v) in enumerate(given):
        cache.write("a", layer, 0, k, v)
    cache.extend("a", 4)  # one more block, with nothing in it: it stays behind
    assert cache.swap_out("a") == 3
    assert cache.get_blocks("a") == KVCacheBlocks(cpu_blocks=[0, 1, 2])
    cache.allocate("b", 10)
    cache.write("b", 0, 0, torch.ones(10, 2, 8), torch.ones(10, 2, 8))  # into the blocks that were given up
    cache.swap_in("a")
    assert cache.get_blocks("a").cpu_blocks == []
    for layer, (k, v) in enumerate(given):
        found_k, found_v = cache.read("a", layer)
        assert torch.equal(found_k, k)
        assert torch.equal(found_v, v)
    assert cache.get_blocks("a").num_blocks == 4
    cache.close()


def test_given_a_manager_then_its_parts_have_pyagents_names() -> None:
    manager = pyagent.KVCacheManager(small())
    assert manager.paged_cache is manager
    assert isinstance(manager.transfer, KVCacheTransfer)
    assert manager.can_allocate(28)
    assert not manager.can_allocate(33)


# --- bytes through any spelling ---------------------------------------------------------------------------------------


def test_given_a_reused_block_when_only_one_layer_is_written_then_the_other_reads_zeros() -> None:
    cache = make_cache(device="cpu")
    cache.allocate("a", 4)
    for layer in range(2):
        cache.write("a", layer, 0, np.ones((4, 2, 8)), np.ones((4, 2, 8)))
    cache.free("a")
    cache.allocate("b", 4)
    cache.write("b", 0, 0, np.full((2, 2, 8), 7.0), np.full((2, 2, 8), 8.0))
    keys, values = cache.read("b", 0)
    assert keys[:, 0, 0].tolist() == [7.0, 7.0]  # only what is written can be read
    assert values is not None
    assert values[1].unique().tolist() == [8.0]
    assert not cache.read("b", 1)[0].any()
    with pytest.raises(InvalidArgumentError):
        cache.read("b", 0, 0, 4)


def test_given_a_shared_or_published_block_when_it_is_written_then_it_is_refused_and_nothing_is_lost() -> None:
    cache = make_cache(device="cpu")
    cache.allocate("a", tokens=PROMPT)
    ones = torch.ones(16, 2, 8)
    cache.write("a", 0, 0, ones, ones)
    cache.commit("a", 16)
    with pytest.raises(SharedBlockError):
        cache.write("a", 0, 0, 2 * ones, 2 * ones)
    assert cache.read("a", 0)[0].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("layer", "start", "key", "value", "error"),
    [
        (2, 0, np.ones((1, 2, 8)), np.ones((1, 2, 8)), InvalidArgumentError),
        (True, 0, np.ones((1, 2, 8)), np.ones((1, 2, 8)), InvalidArgumentError),
        (0, -1, np.ones((1, 2, 8)), np.ones((1, 2, 8)), InvalidArgumentError),
        (0, 0, np.ones((1, 2, 7)), np.ones((1, 2, 8)), InvalidArgumentError),
        (0, 0, np.ones((2, 2, 8)), np.ones((1, 2, 8)), InvalidArgumentError),
        (0, 0, np.ones((1, 2, 8)), None, InvalidArgumentError),
        (0, 0, "keys", "values", InvalidArgumentError),
        (0, 0, [[1.0], [1.0, 2.0]], [0.0] * 16, InvalidArgumentError),
        (0, 3, np.ones((2, 2, 8)), np.ones((2, 2, 8)), SequenceStateError),
    ],
)
def test_given_a_wrong_write_then_it_raises_and_no_token_counts_as_written(
    layer: int, start: int, key: Any, value: Any, error: type[Exception]
) -> None:
    cache = make_cache(device="cpu")
    cache.allocate("a", 4)
    with pytest.raises(error):
        cache.write("a", layer, start, key, value)
    assert cache.handle("a").num_written == 0


# --- single blocks ----------------------------------------------------------------------------------------------------


def test_given_an_allocator_then_layers_have_blocks_of_their_own_and_the_fullest_one_counts() -> None:
    allocator = KVCacheAllocator(small(num_cpu_blocks=2))
    blocks = [allocator.allocate_gpu_block(0) for _ in range(3)]
    assert [block.block_id for block in blocks if block] == [0, 1, 2]
    other = allocator.allocate_gpu_block(1)
    assert (other.block_id, other.layer_idx, other.ref_count, other.is_allocated) == (0, 1, 1, True)
    assert (allocator.get_num_free_gpu_blocks(), allocator.get_num_free_cpu_blocks()) == (5, 2)
    assert allocator.usage == 4 / 16
    assert [allocator.allocate_gpu_block(0) is None for _ in range(6)] == [False] * 5 + [True]
    with pytest.raises(InvalidArgumentError, match="layer_idx 2"):
        allocator.allocate_gpu_block(2)


def test_given_two_users_of_a_block_then_the_last_one_gives_it_back_and_a_third_release_is_an_error() -> None:
    allocator = KVCacheAllocator(small())
    block = allocator.allocate_gpu_block(0)
    block.acquire()
    allocator.free_block(block)
    assert (block.ref_count, allocator.get_num_free_gpu_blocks()) == (1, 7)
    allocator.free_block(block)
    assert (block.is_allocated, block.key_cache, allocator.get_num_free_gpu_blocks()) == (False, None, 8)
    with pytest.raises(InvalidArgumentError, match="not one of this allocator"):
        allocator.free_block(block)
    with pytest.raises(InvalidArgumentError, match="no reference to release"):
        block.release()
    assert allocator.get_num_free_gpu_blocks() == 8


def test_given_a_block_with_data_when_it_is_taken_again_then_it_shows_nothing_of_its_last_user() -> None:
    allocator = KVCacheAllocator(small())
    first = allocator.allocate_gpu_block(1)
    first.key_cache.fill(3)
    first.request_id, first.num_tokens = "a", 4
    allocator.free_block(first)
    again = allocator.allocate_gpu_block(1)
    assert (again.block_id, again.request_id, again.num_tokens) == (first.block_id, None, 0)
    assert not again.key_cache.any()


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp8"])
def test_given_a_transfer_when_a_block_goes_out_and_in_then_bytes_and_metadata_travel(dtype: str) -> None:
    config = small(num_cpu_blocks=2, dtype=dtype)
    allocator, transfer = KVCacheAllocator(config), KVCacheTransfer(config)
    gpu, cpu, back = allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0), allocator.allocate_gpu_block(0)
    for part in gpu.parts:
        part.view(torch.uint8).random_(0, 100)
    gpu.num_tokens, gpu.request_id, gpu.position_offset = 3, "a", 12
    transfer.swap_out(gpu, cpu)
    transfer.swap_in(cpu, back)
    assert (back.num_tokens, back.request_id, back.position_offset) == (3, "a", 12)
    for part, arrived in zip(gpu.parts, back.parts, strict=True):
        assert torch.equal(part.view(torch.uint8), arrived.view(torch.uint8))
    with pytest.raises(InvalidArgumentError, match="lies on GPU, not on HOST"):
        transfer.swap_in(gpu, back)


def test_given_lists_of_blocks_when_copied_then_all_are_or_none_is() -> None:
    config = small()
    allocator, transfer = KVCacheAllocator(config), KVCacheTransfer(config)
    a, b, c, d = (allocator.allocate_gpu_block(0) for _ in range(4))
    a.value_cache[:] = 1
    b.value_cache[:] = 2
    a.num_tokens = 4
    transfer.copy_blocks([a, b], [c, d])
    assert (np.unique(c.value_cache).tolist(), np.unique(d.value_cache).tolist(), c.num_tokens) == ([1.0], [2.0], 4)
    d.acquire()
    for sources, targets, message in (
        ([a, b], [c], "2 blocks cannot be copied to 1"),
        ([b, b], [c, d], "2 users"),
        ([b, pyagent.KVCacheBlock(9, 0)], [c, a], "has no bytes"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            transfer.copy_blocks(sources, targets)
    assert np.unique(c.value_cache).tolist() == [1.0]


def test_given_a_block_of_its_own_then_it_allocates_zeros_and_frees_them() -> None:
    block = pyagent.KVCacheBlock(block_id=5, layer_idx=0)
    block.allocate(num_heads=2, head_dim=8, block_size=4, dtype=np.float16)
    assert (tuple(block.key_cache.shape), block.value_cache.dtype) == ((4, 2, 8), np.float16)
    assert not block.key_cache.any()
    other = pyagent.KVCacheBlock(block_id=6, layer_idx=0)
    other.allocate(2, 8, 8, pyagent.DType.FLOAT16)
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        KVCacheTransfer(small()).copy_blocks([block], [other])
    block.free()
    assert (block.is_allocated, block.key_cache) == (False, None)


def test_given_no_gpu_when_bytes_are_asked_for_there_then_the_error_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = pyagent.KVCacheConfig(num_layers=1, num_heads=1, head_dim=8, num_gpu_blocks=4)
    with pytest.raises(InvalidArgumentError, match="torch finds no GPU"):
        KVCacheAllocator(config)
    with pytest.raises(InvalidArgumentError, match="torch finds no GPU"):
        _ = PagedKVCache(config).plane


def test_given_no_torch_when_bytes_are_asked_for_then_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache()
    monkeypatch.setitem(sys.modules, "torch", None)
    cache.allocate("a", 4)  # ids need none
    for call in (
        lambda: cache.plane,
        lambda: cache.write("a", 0, 0, [0.0] * 16, [0.0] * 16),
        lambda: KVCacheAllocator(small()),
    ):
        with pytest.raises(StorageError, match=r"pip install '\.\[torch\]' in a checkout"):
            call()


def test_given_a_misspelled_setting_of_the_factory_then_the_error_names_the_nearest() -> None:
    for wrong, nearest in (("num_layer", "num_layers"), ("head_dims", "head_dim"), ("evict_policy", "eviction_policy")):
        with pytest.raises(ConfigError, match=f"no setting '{wrong}'; the nearest: .*{nearest}"):
            create_kv_cache_manager(num_heads=2, **{wrong: 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no setting 'gpu_blocks'"):
        make_cache(gpu_blocks=4)


def test_given_the_docstrings_then_their_examples_are_right() -> None:
    from kvpool.compat import ferrum_manager, pyagent_blocks, pyagent_config, vllm_v0

    for module in (pyagent, pyagent_blocks, pyagent_config, ferrum_manager, vllm_v0):
        assert doctest.testmod(module).failed == 0
        assert doctest.testmod(module).attempted


def test_given_lists_then_blocks_can_be_appended_to_either_side() -> None:
    blocks = KVCacheBlocks()
    blocks.append_gpu(3)
    blocks.append_cpu(0)
    assert (blocks.gpu_blocks, blocks.cpu_blocks, blocks.num_blocks) == ([3], [0], 2)


# --- as its document has it -------------------------------------------------------------------------------------------


def test_given_a_program_written_from_the_document_alone_then_it_runs() -> None:
    from kvpool.compat import DType, KVCacheAllocator, KVCacheConfig, KVCacheManager, KVCacheTransfer, PagedKVCache

    config = KVCacheConfig(
        num_layers=2,
        num_heads=2,
        head_dim=8,
        dtype=DType.FLOAT32,
        device=DeviceType.CPU,
        block_size=4,
        num_gpu_blocks=8,
        num_cpu_blocks=4,
    )
    pressed: list[str] = []
    manager = KVCacheManager(config)
    manager.on_memory_pressure(lambda: pressed.append("critical"))
    assert manager.can_allocate(32) is True
    assert manager.allocate("a", 10).gpu_blocks == manager.get_block_table("a", 1) == [0, 1, 2]
    assert manager.extend("a", 6).num_blocks == 1
    manager.allocate("b", 16)
    assert (pressed, manager.usage, manager.get_num_free_blocks(), manager.can_allocate(1)) == (
        ["critical"],
        1.0,
        0,
        False,
    )
    manager._trigger_memory_pressure()
    manager.free("a")
    assert pressed == ["critical"] * 2
    assert manager.get_num_free_blocks() == 4
    paged = PagedKVCache(config)
    paged.allocate_for_request("r", 6)
    assert [paged._get_block_tokens("r", 0, block) for block in paged.get_block_table("r", 0)] == [4, 2]
    allocator, transfer = KVCacheAllocator(config), KVCacheTransfer(config)
    gpu, cpu = allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0)
    numbers = np.arange(64, dtype=np.float32).reshape(4, 2, 8)
    np.copyto(gpu.key_cache, numbers)
    gpu.value_cache[:] = -numbers
    gpu.num_tokens = 4
    transfer.swap_out(gpu, cpu)
    assert (cpu.key_cache == numbers).all()
    assert (cpu.value_cache == -numbers).all()
    gpu.acquire()
    assert not gpu.release()
    allocator.free_block(gpu)
    assert allocator.usage == 0.0


@pytest.mark.parametrize(
    "foreign", [lambda: KVCacheAllocator(small()).allocate_gpu_block(0), lambda: pyagent.KVCacheBlock(0, 0)]
)
def test_given_a_block_of_somebody_else_when_freed_then_it_is_refused_and_nothing_changes(foreign: Any) -> None:
    allocator, other = KVCacheAllocator(small()), foreign()
    own = allocator.allocate_gpu_block(0)
    own.key_cache[:] = 5
    references = other.ref_count
    with pytest.raises(InvalidArgumentError, match="block 0 of layer 0 is not one of this allocator"):
        allocator.free_block(other)
    assert (other.ref_count, own.ref_count, allocator.get_num_free_gpu_blocks()) == (references, 1, 7)
    assert allocator.allocate_gpu_block(0).block_id == 1
    assert (own.key_cache == 5).all()


def test_given_a_lent_block_then_only_its_allocator_takes_it_back() -> None:
    allocator = KVCacheAllocator(small())
    block = allocator.allocate_gpu_block(0)
    with pytest.raises(InvalidArgumentError, match=r"give it back with KVCacheAllocator\.free_block"):
        block.free()
    with pytest.raises(InvalidArgumentError, match="has bytes of its allocator"):
        block.allocate(2, 8, 4)
    with pytest.raises(InvalidArgumentError, match="1 blocks are in use"):
        allocator._init_pools()
    assert block.release()
    allocator.free_block(block)  # its last user has released it
    assert allocator.get_num_free_gpu_blocks() == 8
    allocator._init_pools()


def test_given_an_array_in_place_of_a_blocks_bytes_then_it_is_copied_into_them() -> None:
    allocator, transfer = KVCacheAllocator(small(num_cpu_blocks=1)), KVCacheTransfer(small())
    block, host = allocator.allocate_gpu_block(0), allocator.allocate_cpu_block(0)
    block.key_cache = np.full((4, 2, 8), 3.0)
    transfer.swap_out(block, host)
    assert (host.key_cache == 3).all()
    for wrong, message in (
        (np.ones((4, 2, 7)), r"takes shape \(4, 2, 8\), got \(4, 2, 7\)"),
        ("keys", "takes numbers, got 'keys'"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            block.value_cache = wrong
    with pytest.raises(InvalidArgumentError, match="has no bytes; allocate it"):
        pyagent.KVCacheBlock(3, 0).key_cache = np.ones(1)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_given_a_type_that_numpy_has_not_then_a_blocks_bytes_are_tensors(dtype: str) -> None:
    block = KVCacheAllocator(small(dtype=dtype)).allocate_gpu_block(0)
    assert isinstance(block.key_cache, torch.Tensor)
    block.key_cache = np.ones((4, 2, 8))
    assert block.parts[0].float().unique().tolist() == [1.0]


def test_given_callbacks_of_either_kind_then_both_are_called_and_others_are_refused() -> None:
    cache = make_cache(8)
    heard: list[Any] = []
    stops = [
        cache.on_memory_pressure(lambda: heard.append("no argument")),
        cache.on_memory_pressure(lambda change: heard.append(change.level)),
    ]
    for wrong in (lambda a, b: None, lambda *, level: None, 3):
        with pytest.raises(InvalidArgumentError, match="on_memory_pressure"):
            cache.on_memory_pressure(wrong)
    cache.allocate("a", 32)
    assert heard == ["no argument", MemoryPressure.CRITICAL]
    cache.free("a")
    assert heard[2:] == [MemoryPressure.LOW]
    for stop in stops:
        stop()
        stop()
    cache._trigger_memory_pressure()
    assert len(heard) == 3


def test_given_an_allocation_that_fails_then_the_callbacks_hear_of_it_and_may_make_room() -> None:
    cache = make_cache(8)
    cache.allocate("a", 16)
    cache.allocate("b", 12)
    heard: list[Any] = []
    cache.on_memory_pressure(lambda: heard.append("no argument"))
    cache.on_memory_pressure(lambda change: heard.append((change.level, change.reason[:20])))
    for call in (lambda: cache.allocate("c", 8), lambda: cache.extend("b", 8)):
        with pytest.raises(OutOfBlocksError):
            call()
        assert heard == ["no argument", (MemoryPressure.CRITICAL, "an allocation failed")]
        heard.clear()
    cache.on_memory_pressure(lambda: cache.free("a"))
    with pytest.raises(OutOfBlocksError):
        cache.allocate("c", 8)
    assert cache.allocate("c", 8).num_blocks == 2


def test_given_no_tokens_then_they_fit_always_and_places_may_follow() -> None:
    cache = make_cache(2)
    cache.allocate("full", 8)
    assert cache.can_allocate(0) is True
    assert cache.allocate("none", 0).num_blocks == 0
    assert cache.get_block_table("none", 0) == []
    cache.free("full")
    assert cache.extend("none", 5).num_blocks == 2
    for wrong in (-1, True, 0.0):
        with pytest.raises(InvalidArgumentError):
            cache.can_allocate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError):
        cache.allocate("chunk", 0, reserve=1)


def test_given_what_the_document_lists_as_methods_then_it_is_a_number_and_can_be_called() -> None:
    config = small()
    cache, allocator = pyagent.KVCacheManager(config), KVCacheAllocator(config)
    blocks = cache.allocate("a", 6)
    allocator.allocate_gpu_block(0)
    for number, expected in (
        (config.kv_size_per_token, 2 * 2 * 2 * 8 * 2),
        (config.block_size_bytes, 4 * 2 * 2 * 2 * 8 * 2),
        (cache.usage, 2 / 8),
        (cache.paged_cache.usage, 2 / 8),
        (allocator.usage, 1 / 16),
        (blocks.num_blocks, 2),
    ):
        assert number == number() == expected
        assert type(number()) in (int, float)


def test_given_a_full_gpu_when_cpu_blocks_are_free_then_the_error_names_the_way_to_them() -> None:
    cache = pyagent.KVCacheManager(small(num_cpu_blocks=4))
    cache.allocate("a", 32)
    for call in (lambda: cache.allocate("b", 4), lambda: cache.extend("a", 1)):
        with pytest.raises(OutOfBlocksError, match=r"swap_out\(other_request\) moves one to the 4 free CPU blocks"):
            call()
    with pytest.raises(InvalidArgumentError, match=r"get_num_free_blocks.* KVCacheAllocator\(config\)"):
        _ = cache.allocator


def test_given_more_settings_then_they_are_fields_of_kvpools_configuration() -> None:
    assert small(more={"eviction_policy": "lfu"}).cache_config.eviction_policy == "lfu"
    with pytest.raises(ConfigError, match=r"more=\{'block_size': 8\} must map names among"):
        small(more={"block_size": 8})
    assert make_cache(default_ttl=5.0).manager.config.default_ttl == 5.0


def test_given_a_block_that_is_not_the_requests_then_its_tokens_cannot_be_asked_for() -> None:
    cache = PagedKVCache(small())
    cache.allocate_for_request("a", 4)
    with pytest.raises(InvalidArgumentError, match=r"request 'a' has no block 7; its table is \[0\]"):
        cache._get_block_tokens("a", 0, 7)


DOCUMENT = {  # every name of the two documents
    "DeviceType": [],
    "DType": [],
    "KVCacheConfig": ["kv_size_per_token", "block_size_bytes"],
    "KVCacheBlock": ["allocate", "free", "acquire", "release"],
    "KVCacheBlocks": ["num_blocks", "append_gpu", "append_cpu"],
    "KVCacheAllocator": [
        *("_init_pools", "allocate_gpu_block", "allocate_cpu_block", "free_block", "get_num_free_gpu_blocks"),
        *("get_num_free_cpu_blocks", "usage"),
    ],
    "PagedKVCache": [
        *("allocate_for_request", "extend_allocation", "_get_block_tokens", "free_request", "get_block_table", "usage"),
        "get_num_free_blocks",
    ],
    "KVCacheTransfer": ["swap_out", "swap_in", "copy_blocks"],
    "KVCacheManager": [
        *("allocate", "extend", "free", "get_block_table", "usage", "get_num_free_blocks", "can_allocate"),
        *("on_memory_pressure", "_trigger_memory_pressure"),
    ],
    "create_kv_cache_manager": [],
}


@pytest.mark.parametrize("name", DOCUMENT)
def test_given_a_name_of_the_document_then_it_is_there_and_on_the_page(name: str) -> None:
    from kvpool import compat

    page = (Path(__file__).resolve().parents[2] / "docs" / "compat-pyagent.md").read_text(encoding="utf-8")
    assert f"`{name}" in page
    for member in DOCUMENT[name]:
        assert hasattr(getattr(compat, name), member)
        assert re.search(rf"`({name}\.)?{member}`", page), f"{name}.{member} is not on the page"
