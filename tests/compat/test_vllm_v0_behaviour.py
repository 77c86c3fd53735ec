"""What vLLM V0's own tests of its block manager, tables and allocators check, asked of the same names here.

Where the answers differ on purpose, a row of docs/compat-vllm-v0.md says so, and the test names the difference.
"""

from __future__ import annotations

import pytest

from kvpool.compat import AllocStatus, BlockManager, NaiveBlockAllocator, PrefixCachingBlockAllocator
from kvpool.config.layers import ceil_div
from kvpool.errors import OutOfBlocksError

ALLOCATORS = (NaiveBlockAllocator, PrefixCachingBlockAllocator)
both_allocators = pytest.mark.parametrize("kind", ALLOCATORS)


def blocks_of(tokens: int, size: int) -> int:
    return ceil_div(tokens, size)


def used(blocks: BlockManager, num_blocks: int) -> int:
    return num_blocks - blocks.get_num_free_gpu_blocks()


# --- the block manager ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [8, 40, 80])
@pytest.mark.parametrize("watermark", [0.0, 0.5])
def test_given_a_prompt_then_it_fits_or_never_does_by_the_watermark(num_blocks: int, watermark: float) -> None:
    blocks = BlockManager(16, num_blocks, 1024, watermark=watermark)
    kept = int(watermark * num_blocks)
    for needed in range(2, num_blocks):
        expected = AllocStatus.NEVER if num_blocks - needed < kept else AllocStatus.OK
        assert blocks.can_allocate([1] * (16 * needed)) is expected


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("prompt", [1, 7, 8])
@pytest.mark.parametrize("appended", [1, 8, 129])
@pytest.mark.parametrize("lookahead", [0, 10])
def test_given_tokens_and_lookahead_when_appended_then_only_missing_blocks_are_taken(
    size: int, prompt: int, appended: int, lookahead: int
) -> None:
    blocks = BlockManager(size, 1024, 0, watermark=0.1)
    blocks.allocate("a", [1] * prompt)
    before = used(blocks, 1024)
    blocks.append_slots("a", lookahead, num_tokens=appended)
    taken = used(blocks, 1024) - before
    assert taken == blocks_of(prompt + appended + lookahead, size) - blocks_of(prompt, size)


@pytest.mark.parametrize("caching", [False, True])
def test_given_a_group_when_it_is_swapped_out_and_in_then_no_block_is_missing_or_too_many(caching: bool) -> None:
    blocks = BlockManager(8, 4, 4, watermark=0, enable_caching=caching)
    blocks.allocate("a", [1] * 7)
    table = blocks.get_block_table("a")
    assert blocks.can_swap_out(["a"])
    pairs = blocks.swap_out(["a"])
    assert [src for src, _ in pairs] == table
    assert (blocks.get_num_free_gpu_blocks(), blocks.get_num_free_cpu_blocks()) == (4, 3)
    assert blocks.can_swap_in(["a"], 1) is AllocStatus.OK
    back = blocks.swap_in(["a"])
    assert back == [(pairs[0][1], blocks.get_block_table("a")[0])]
    assert (blocks.get_num_free_gpu_blocks(), blocks.get_num_free_cpu_blocks()) == (3, 4)


@pytest.mark.parametrize("lookahead", [3, 8, 10])
@pytest.mark.parametrize("caching", [False, True])
def test_given_a_swapped_group_then_its_return_is_possible_now_later_or_never(lookahead: int, caching: bool) -> None:
    blocks = BlockManager(8, 4, 4, watermark=0, enable_caching=caching)
    blocks.allocate("a", [1] * 23)
    table = blocks.get_block_table("a")
    assert blocks.can_swap_out(["a"])
    assert [src for src, _ in blocks.swap_out(["a"])] == table
    assert (blocks.get_num_free_gpu_blocks(), blocks.get_num_free_cpu_blocks()) == (4, 1)
    assert blocks.can_swap_in(["a"], lookahead) is (AllocStatus.OK if lookahead <= 8 else AllocStatus.NEVER)
    blocks.allocate("b", list(range(10000, 10015)))
    assert blocks.can_swap_in(["a"], lookahead) is (AllocStatus.LATER if lookahead <= 8 else AllocStatus.NEVER)


@pytest.mark.parametrize("lookahead", [0, 2, 10])
@pytest.mark.parametrize("caching", [False, True])
def test_given_one_block_then_a_return_whose_new_token_and_lookahead_need_two_is_never_possible(
    lookahead: int, caching: bool
) -> None:
    blocks = BlockManager(8, 1, 1, watermark=0, enable_caching=caching)
    blocks.allocate("a", [1] * 5)
    blocks.swap_out(["a"])
    unseen = 1  # V0's sequences know it, here it counts as lookahead
    fits = 5 + unseen + lookahead <= 8
    assert blocks.can_swap_in(["a"], unseen + lookahead) is (AllocStatus.OK if fits else AllocStatus.NEVER)


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("prompt", [10, 300, 1000])
@pytest.mark.parametrize("window", [20, 32, 200, 512])
def test_given_a_window_then_a_sequence_never_holds_more_than_in_v0(size: int, prompt: int, window: int) -> None:
    """V0 kept a null block, and one or two blocks that the next query no longer reads."""
    blocks = BlockManager(size, 1024, 0, watermark=0.1, sliding_window=window)
    blocks.allocate("a", [1] * prompt)
    assert used(blocks, 1024) == blocks_of(prompt, size)
    for number in range(50):
        blocks.append_slots("a", 0)
        assert used(blocks, 1024) <= window // size + 4
        assert used(blocks, 1024) >= min(blocks_of(prompt + number, size), window // size)


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 129])
def test_given_equal_prompts_then_naive_tables_share_nothing_and_caching_ones_all_full_blocks(length: int) -> None:
    """Here blocks are shared once the first prompt is computed; V0 shared them before."""
    tokens = list(range(length))
    for kind in ALLOCATORS:
        allocator = kind(1024, 16)
        for number in range(1, 6):
            allocator.allocate(number, tokens)
            allocator.mark_blocks_as_computed(number, None)
            shared = length // 16 if kind is PrefixCachingBlockAllocator else 0
            assert used(allocator, 1024) == shared + number * (blocks_of(length, 16) - shared)


@both_allocators
@pytest.mark.parametrize("length", [1, 16, 129])
def test_given_a_table_when_it_is_made_and_freed_again_then_all_its_blocks_are_free(kind: type, length: int) -> None:
    allocator = kind(1024, 16)
    for _ in range(5):
        allocator.allocate("a", list(range(length)))
        assert used(allocator, 1024) == blocks_of(length, 16)
        assert None not in allocator.get_block_table("a")
        allocator.free("a")
        assert allocator.get_num_free_blocks() == 1024


@both_allocators
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("length", [1, 16, 129])
@pytest.mark.parametrize("more", [1, 16, 129])
def test_given_empty_places_then_tokens_fill_them_without_another_block(
    kind: type, size: int, length: int, more: int
) -> None:
    allocator = kind(1024, size)
    allocator.allocate("a", list(range(length)))
    assert len(allocator.get_block_table("a")) == blocks_of(length, size)
    allocator.append_slots("a", more, num_tokens=0)
    assert len(allocator.get_block_table("a")) == blocks_of(length + more, size)
    before = allocator.get_num_free_blocks()
    allocator.append_slots("a", num_tokens=more)
    assert allocator.get_num_free_blocks() == before


@both_allocators
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("at_once", [1, 4, 129])
def test_given_tokens_in_pieces_then_the_table_knows_them_in_order(kind: type, size: int, at_once: int) -> None:
    allocator = kind(1024, size)
    allocator.allocate("a", list(range(9)))
    allocator.mark_blocks_as_computed("a", None)
    appended = list(range(129))
    for start in range(0, 129, at_once):
        piece = appended[start : start + at_once]
        allocator.append_slots("a", num_tokens=len(piece))
        allocator.mark_blocks_as_computed("a", piece)
        assert allocator.handle("a").token_ids.tolist() == [*range(9), *appended[: start + len(piece)]]


@both_allocators
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("length", [1, 9, 129])
@pytest.mark.parametrize("computed", [False, True])
def test_given_a_fork_then_it_costs_nothing_and_outlives_its_parent(
    kind: type, size: int, length: int, computed: bool
) -> None:
    allocator = kind(1024, size)
    allocator.allocate("parent", list(range(length)))
    if computed:
        allocator.mark_blocks_as_computed("parent", None)
    before = allocator.get_num_free_blocks()
    allocator.fork("parent", "child")
    table = allocator.get_block_table("child")
    assert table == allocator.get_block_table("parent")
    allocator.free("parent")
    assert (allocator.get_num_free_blocks(), allocator.get_block_table("child")) == (before, table)
    allocator.free("child")
    assert allocator.get_num_free_blocks() == 1024


@both_allocators
@pytest.mark.parametrize("length", [1, 16, 129])
@pytest.mark.parametrize("more", [1, 16, 129])
@pytest.mark.parametrize("lookahead", [0, 1, 16, 129])
@pytest.mark.parametrize("appender", ["parent", "child"])
def test_given_a_fork_when_one_appends_then_what_it_shares_there_is_copied_and_the_other_keeps_its_table(
    kind: type, length: int, more: int, lookahead: int, appender: str
) -> None:
    allocator, size = kind(1024, 8), 8
    allocator.allocate("parent", list(range(length)), lookahead)
    allocator.fork("parent", "child")
    static = "child" if appender == "parent" else "parent"
    original = allocator.get_block_table("parent")
    in_use = used(allocator, 1024)
    touched = blocks_of(max(length + lookahead, length + more), size) - length // size
    pairs = allocator.append_slots(appender, num_tokens=more)
    assert allocator.get_block_table(static)[: blocks_of(length, size)] == original[: blocks_of(length, size)]
    assert allocator.get_block_table(appender) != original
    assert 0 < used(allocator, 1024) - in_use <= touched
    assert bool(pairs) == bool(length % size or lookahead)
    if length % size:
        column = length // size
        assert pairs[0] == (original[column], allocator.get_block_table(appender)[column])
    allocator.free(static)
    allocator.free(appender)
    assert allocator.get_num_free_blocks() == 1024


@both_allocators
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("length", [1, 16, 129])
@pytest.mark.parametrize("lookahead", [0, 1, 7, 8])
def test_given_shared_blocks_then_can_append_slots_counts_at_least_what_appending_takes(
    kind: type, size: int, length: int, lookahead: int
) -> None:
    for spare in range(4 + lookahead):
        allocator = kind(blocks_of(length, size) + spare, size)
        allocator.allocate("a", list(range(length)))
        allocator.fork("a", "b")
        if allocator.can_append_slots(["a"], lookahead):
            allocator.append_slots("a", lookahead)
        else:
            with pytest.raises(OutOfBlocksError):
                allocator.append_slots("a", lookahead)


# --- allocators -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("1-1-NaiveBlockAllocator")
@both_allocators
@pytest.mark.parametrize("num_blocks", [1, 1024])
@pytest.mark.parametrize("size", [1, 16])
def test_given_no_free_block_then_a_value_error_says_so_and_a_freed_one_is_the_next(
    kind: type, num_blocks: int, size: int
) -> None:
    allocator = kind(num_blocks, size)
    for number in range(num_blocks):
        assert allocator.get_num_free_blocks() == num_blocks - number
        allocator.allocate(number, [number] * size)
    for name in range(num_blocks, num_blocks + 100):
        with pytest.raises(ValueError, match="free or evictable"):
            allocator.allocate(name, [name] * size)
        [block] = allocator.get_block_table(name - 1)
        allocator.free(name - 1)
        allocator.allocate(name, [name] * size)
        assert allocator.get_block_table(name) == [block]


@pytest.mark.parametrize("num_blocks", [1, 64])
@pytest.mark.parametrize("size", [1, 16])
def test_given_a_pool_that_is_full_of_one_prompt_then_the_same_prompt_fits_and_another_does_not(
    num_blocks: int, size: int
) -> None:
    allocator = PrefixCachingBlockAllocator(num_blocks, size)
    tokens = list(range(num_blocks * size))
    allocator.allocate("first", tokens)
    allocator.mark_blocks_as_computed("first", None)
    for number in range(3):
        allocator.allocate(number, tokens)
        assert allocator.get_block_table(number) == allocator.get_block_table("first")
    for other in ([7] * size, [*tokens, 7]):
        with pytest.raises(OutOfBlocksError):
            allocator.allocate("other", other)
    for freed in range(3):
        allocator.free(freed)
        assert allocator.get_num_free_blocks() == 0
    allocator.free("first")
    assert allocator.get_num_free_blocks() == num_blocks


def test_given_a_batch_of_equal_prompts_then_none_is_found_before_one_is_computed_and_all_merge_then() -> None:
    allocator = PrefixCachingBlockAllocator(16, 16)
    tokens = list(range(64))
    for number in range(3):
        allocator.allocate(number, tokens)
        assert allocator.get_num_cached_tokens(number) == 0
    for number in range(3):
        allocator.mark_blocks_as_computed(number, None)
    assert used(allocator, 16) == 4
    assert allocator.get_common_computed_block_ids([0, 1, 2]) == allocator.get_block_table(0)


@pytest.mark.parametrize("split", [1, 16, 31, 500])
def test_given_prompts_that_part_then_their_common_blocks_are_those_before(split: int) -> None:
    allocator = PrefixCachingBlockAllocator(256, 16)
    tokens = list(range(1024))
    for name, prompt in (("a", tokens), ("b", tokens[:split] + [9999] * (1024 - split))):
        allocator.allocate(name, prompt)
        allocator.mark_blocks_as_computed(name, None)
    assert len(allocator.get_common_computed_block_ids(["a", "b"])) == split // 16


def test_given_chains_of_different_age_then_the_end_of_the_oldest_goes_first() -> None:
    allocator = PrefixCachingBlockAllocator(64, 16)
    old, young = list(range(32)), list(range(5000, 5000 + 62 * 16))
    for name, tokens in (("old", old), ("young", young)):
        allocator.allocate(name, tokens)
        allocator.mark_blocks_as_computed(name, None)
    last = allocator.get_block_table("old")[-1]
    for name in ("old", "young"):
        allocator.free(name)
    allocator.allocate("new", [9999] * 16)
    assert allocator.get_block_table("new") == [last]
    assert allocator.manager.match_prefix([*old, 1]).num_blocks == 1
    assert allocator.manager.match_prefix([*young, 1]).num_blocks == 62


def test_given_another_prompt_that_needs_half_the_pool_then_half_of_the_first_is_still_cached() -> None:
    allocator = PrefixCachingBlockAllocator(8, 4)
    for name, tokens in (("a", list(range(32))), ("b", list(range(32, 48)))):
        allocator.allocate(name, tokens)
        allocator.mark_blocks_as_computed(name, None)
        allocator.free(name)
    assert allocator.manager.match_prefix(list(range(33))).num_blocks == 4
    assert allocator.manager.match_prefix(list(range(32, 49))).num_blocks == 4


def test_given_lookups_then_the_hit_rate_is_found_blocks_by_all() -> None:
    allocator = PrefixCachingBlockAllocator(4, 16)
    assert allocator.get_prefix_cache_hit_rate() == 0.0
    for number in range(1005):
        allocator.allocate(number, list(range(16)))
        allocator.mark_blocks_as_computed(number, None)
        if number < 2:
            assert allocator.get_prefix_cache_hit_rate() == number / (number + 1)
    assert allocator.get_prefix_cache_hit_rate() > 0.99
    assert not allocator.reset_prefix_cache()
    for number in range(1005):
        allocator.free(number)
    assert allocator.reset_prefix_cache()
    assert allocator.get_prefix_cache_hit_rate() == 0.0
