"""vLLM V0's spellings: answers, pairs, swaps, encoder tables, and the worker that moves the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvpool import AllocStatus, KVCacheConfig, KVCacheManager, LayerSpec, Tier, compat
from kvpool.compat import (
    BlockManager,
    CacheEngine,
    Device,
    Evictor,
    KVCacheUtils,
    NaiveBlockAllocator,
    PrefixCachingBlockAllocator,
)
from kvpool.core.handle import BlockTable
from kvpool.errors import (
    ConfigError,
    DuplicateRequestError,
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    UnknownRequestError,
)
from kvpool.events import Stored
from kvpool.eviction import EvictionPolicy, make_policy
from kvpool.pools.pool import CopyKind, CopyOp
from kvpool.scheduling import Scheduler

torch = pytest.importorskip("torch")

PROMPT = list(range(16))
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "compat-vllm-v0.md").read_text(encoding="utf-8")


def test_given_the_defaults_then_they_are_v0s() -> None:
    blocks = BlockManager(4, 99)
    assert blocks.get_prefix_cache_hit_rate() == -1.0
    assert PrefixCachingBlockAllocator(16, 4).get_prefix_cache_hit_rate() == 0.0


@pytest.mark.parametrize(("watermark", "num_blocks", "kept"), [(0.01, 99, 0), (0.01, 100, 1), (0.3, 3, 0), (0.5, 5, 2)])
def test_given_a_watermark_then_its_blocks_are_rounded_down(watermark: float, num_blocks: int, kept: int) -> None:
    blocks = BlockManager(4, num_blocks, watermark=watermark)
    fits = 4 * (num_blocks - kept)
    assert blocks.can_allocate([1] * fits) is AllocStatus.OK
    assert blocks.can_allocate([1] * (fits + 1)) is AllocStatus.NEVER


def test_given_a_fork_when_both_write_then_one_block_is_copied_once() -> None:
    blocks = BlockManager(4, 16, 8)
    blocks.allocate("a", [1, 2, 3, 4, 5])
    blocks.mark_blocks_as_computed("a", 5)
    blocks.fork("a", "b")
    assert blocks.can_append_slots(["a", "b"])
    assert blocks.append_slots("b") == [(1, 2)]
    assert blocks.append_slots("a") == []
    assert blocks.get_block_table("a")[0] == blocks.get_block_table("b")[0]
    assert blocks.get_common_computed_block_ids(["a", "b"]) == [0]


def test_given_lookahead_slots_when_appending_then_drafts_get_places_of_their_own() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.can_allocate([1] * 60) is AllocStatus.OK
    assert blocks.can_allocate([1] * 60, num_lookahead_slots=5) is AllocStatus.NEVER
    blocks.allocate("a", [1, 2, 3, 4], num_lookahead_slots=1)
    assert len(blocks.get_block_table("a")) == 2
    blocks.append_slots("a", num_tokens=1, num_lookahead_slots=8)
    assert len(blocks.get_block_table("a")) == 4
    blocks.free("a")
    assert blocks.get_num_free_gpu_blocks() == 16


def test_given_the_lookahead_as_v0s_scheduler_passes_it_then_one_token_and_the_drafts_get_places() -> None:
    blocks = BlockManager(4, 16, 8)
    blocks.allocate("a", [1, 2, 3, 4])
    blocks.mark_blocks_as_computed("a", 4)
    for token in range(3):
        blocks.append_slots("a", 0)
        blocks.mark_blocks_as_computed("a", [token])
    blocks.append_slots("a", 5)
    assert blocks.handle("a").num_reserved == 8
    assert len(blocks.get_block_table("a")) == 4


def test_given_a_lookahead_when_asked_about_swapping_in_then_its_blocks_count() -> None:
    blocks = BlockManager(4, 8, 8, watermark=0.0, enable_caching=False)
    blocks.allocate("away", [1] * 8)
    blocks.mark_blocks_as_computed("away", 8)
    blocks.swap_out(["away"])
    blocks.allocate("here", [1] * 24)
    assert blocks.can_swap_in(["away"], 0) is AllocStatus.OK
    assert blocks.can_swap_in(["away"], num_lookahead_slots=1) is AllocStatus.LATER
    assert blocks.can_swap_in(["away"], 24) is AllocStatus.LATER
    assert blocks.can_swap_in(["away"], 25) is AllocStatus.NEVER


@pytest.mark.parametrize("enable_caching", [True, False])
def test_given_a_group_that_can_never_come_back_when_asked_then_it_is_never_whoever_is_there(
    enable_caching: bool,
) -> None:
    blocks = BlockManager(4, 8, 8, watermark=0.0, enable_caching=enable_caching)
    blocks.allocate("away", list(range(22)))
    blocks.mark_blocks_as_computed("away", 22)
    blocks.swap_out(["away"])
    for others in (0, 2, 4):
        if others:
            blocks.allocate(f"others {others}", [100] * 8)
        wanted = AllocStatus.OK if others < 4 else AllocStatus.LATER
        assert blocks.can_swap_in(["away"], 2) is wanted
        assert blocks.can_swap_in(["away"], 10) is (AllocStatus.LATER if others else AllocStatus.OK)
        assert blocks.can_swap_in(["away"], 11) is AllocStatus.NEVER
    blocks.manager.check()


def test_given_a_device_as_v0_names_it_then_the_cache_of_it_is_meant() -> None:
    blocks = BlockManager(4, 16, 8, enable_caching=True)
    for name in ("a", "b"):
        blocks.allocate(name, PROMPT)
        blocks.mark_blocks_as_computed(name, None)
    assert blocks.get_prefix_cache_hit_rate(Device.GPU) == blocks.get_prefix_cache_hit_rate() == 4 / 8
    assert blocks.get_prefix_cache_hit_rate(device="cpu") == 0.0
    assert blocks.reset_prefix_cache(Device.GPU) is False
    for name in ("a", "b"):
        blocks.free(name)
    assert blocks.reset_prefix_cache(Device.CPU) is True
    assert blocks.manager.match_prefix(PROMPT).num_tokens == 15
    assert blocks.reset_prefix_cache(device=Device.GPU) is True
    assert blocks.manager.match_prefix(PROMPT).num_tokens == 0
    with pytest.raises(InvalidArgumentError, match="device='tpu'"):
        blocks.reset_prefix_cache("tpu")


def test_given_a_reset_then_the_hit_rate_begins_anew() -> None:
    blocks = BlockManager(4, 16, 8, enable_caching=True)
    for expected in (4 / 8, 4 / 8):
        for name in ("a", "b"):
            blocks.allocate(name, PROMPT)
            blocks.mark_blocks_as_computed(name, None)
            blocks.free(name)
        assert blocks.get_prefix_cache_hit_rate() == blocks.get_prefix_cache_hit_rate("gpu") == expected
        assert blocks.reset_prefix_cache("cpu")
        assert blocks.get_prefix_cache_hit_rate("gpu") == expected
        assert blocks.reset_prefix_cache()
        assert blocks.get_prefix_cache_hit_rate() == blocks.get_prefix_cache_hit_rate(Device.GPU) == 0.0


def test_given_the_same_tokens_under_another_lora_then_nothing_is_shared() -> None:
    blocks = BlockManager(4, 32, enable_caching=True)
    for name, lora, cached in (("a", 1, 0), ("b", 2, 0), ("c", 0, 0), ("d", 1, 15), ("e", 2, 15), ("f", 0, 15)):
        blocks.allocate(name, PROMPT, lora_int_id=lora)
        assert blocks.get_num_cached_tokens(name) == cached
        blocks.mark_blocks_as_computed(name, None)
    long = list(range(16)) + [7] * 68
    assert blocks.can_allocate(long, lora_int_id=1) is AllocStatus.OK
    assert blocks.can_allocate(long, lora_int_id=3) is AllocStatus.LATER


def test_given_calls_of_v0_that_nobody_needs_then_the_error_says_why() -> None:
    blocks = BlockManager(4, 16)
    with pytest.raises(InvalidArgumentError, match="noted where it happens"):
        blocks.access_all_blocks_in_seq("a", 1.0)
    with pytest.raises(InvalidArgumentError, match=r"free\(seq_id\)"):
        blocks.remove_seq_from_computed_blocks_tracker("a")


def test_given_a_group_of_forks_when_swapped_then_shared_blocks_move_once_and_stay_shared() -> None:
    blocks = BlockManager(4, 16, 8, enable_caching=False)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    blocks.fork("a", "b")
    assert blocks.can_swap_out(["a", "b"])
    assert [dst for _, dst in blocks.swap_out(["a", "b"])] == [0, 1, 2, 3]
    assert blocks.get_num_free_cpu_blocks() == 4
    assert blocks.can_swap_in(["a", "b"]) is AllocStatus.OK
    assert len(blocks.swap_in(["a", "b"])) == 4
    assert blocks.get_block_table("a") == blocks.get_block_table("b")
    assert blocks.get_prefix_cache_hit_rate() == -1.0
    blocks.manager.check()


def test_given_a_sliding_window_when_a_sequence_grows_then_the_blocks_before_it_are_dropped_from_its_table() -> None:
    blocks = BlockManager(4, 16, sliding_window=8)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    for token in range(20):
        blocks.append_slots("a")
        blocks.mark_blocks_as_computed("a", [token])
    table = blocks.get_block_table("a")
    assert len(table) == 9
    assert sum(block is not None for block in table) <= 3
    assert blocks.get_num_free_gpu_blocks() >= 13
    blocks.fork("a", "b")
    blocks.free("a")
    blocks.free("b")
    assert blocks.reset_prefix_cache() is True
    assert blocks.manager.inspect.num_free_blocks() == 16


def test_given_live_sequences_when_resetting_the_prefix_cache_then_it_says_no() -> None:
    blocks = BlockManager(4, 16, enable_caching=True)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    assert blocks.reset_prefix_cache() is False
    blocks.free("a")
    blocks.allocate("b", PROMPT)
    assert blocks.get_num_cached_tokens("b") == 15
    assert blocks.get_prefix_cache_hit_rate() == pytest.approx(4 / 8)
    blocks.free("b")
    assert blocks.reset_prefix_cache() is True
    assert blocks.manager.inspect.num_free_blocks() == 16


def test_given_a_manager_whose_copies_pairs_cannot_express_when_wrapped_then_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="one layer group"):
        BlockManager(4, 16, manager=KVCacheManager(KVCacheConfig([LayerSpec(1, 8)], 4, gpu_blocks=16)))
    with pytest.raises(InvalidArgumentError, match="wraps a KVCacheManager, got 'manager'"):
        BlockManager(4, 16, manager="manager")  # type: ignore[arg-type]


@pytest.mark.parametrize(("sliding_window", "swapped"), [(8, False), (None, True)])
def test_given_blocks_that_left_the_table_then_the_common_ones_end_before_them(
    sliding_window: int | None, swapped: bool
) -> None:
    blocks = BlockManager(4, 32, 16, sliding_window=sliding_window, enable_caching=False)
    blocks.allocate("a", PROMPT)
    blocks.mark_blocks_as_computed("a", 16)
    blocks.fork("a", "b")
    if swapped:
        blocks.swap_out(["a", "b"])
    assert blocks.get_common_computed_block_ids(["a", "b"]) == []
    assert blocks.get_common_computed_block_ids([]) == []


# --- encoders ---------------------------------------------------------------------------------------------------------


def test_given_an_encoder_then_its_table_belongs_to_the_request_until_free_cross() -> None:
    blocks = BlockManager(4, 16, encoder_decoder=True)
    assert blocks.can_allocate(PROMPT, num_encoder_tokens=9) is AllocStatus.OK
    assert blocks.can_allocate(PROMPT, num_encoder_tokens=49) is AllocStatus.NEVER
    blocks.allocate("s0", PROMPT, num_encoder_tokens=9, request_id="request")
    blocks.mark_blocks_as_computed("s0", 16)
    table = blocks.get_cross_block_table("request")
    assert len(table) == 3
    assert not set(table) & set(blocks.get_block_table("s0"))
    assert blocks.get_num_free_gpu_blocks() == 16 - 4 - 3
    blocks.fork("s0", "s1")
    blocks.free("s0")
    blocks.free("s1")
    assert blocks.get_cross_block_table("request") == table
    assert blocks.get_num_free_gpu_blocks() == 16 - 3
    blocks.free_cross("request")
    assert blocks.get_num_free_gpu_blocks() == 16
    for call in (blocks.free_cross, blocks.get_cross_block_table):
        with pytest.raises(UnknownRequestError, match="no table of encoder blocks"):
            call("request")
    blocks.manager.check()


def test_given_free_cross_before_free_then_the_decoder_goes_on_with_the_encoders_blocks() -> None:
    blocks = BlockManager(4, 16, encoder_decoder=True)
    blocks.allocate("s0", PROMPT[:4], num_encoder_tokens=4)
    blocks.free_cross("s0")
    assert blocks.get_num_free_gpu_blocks() == 14
    blocks.free("s0")
    assert blocks.get_num_free_gpu_blocks() == 16


def test_given_a_swapped_sequence_when_it_is_freed_then_its_encoders_table_keeps_its_length_and_all_blocks_are_free() -> (
    None
):
    blocks = BlockManager(4, 16, 8, encoder_decoder=True)
    blocks.allocate("s0", PROMPT[:4], num_encoder_tokens=4)
    blocks.mark_blocks_as_computed("s0", 4)
    blocks.swap_out(["s0"])
    blocks.free("s0")
    assert blocks.get_cross_block_table("s0") == [None]
    blocks.free_cross("s0")
    assert (blocks.get_num_free_gpu_blocks(), blocks.get_num_free_cpu_blocks()) == (16, 8)


def test_given_encoder_inputs_then_only_decoders_with_equal_keys_share() -> None:
    blocks = BlockManager(4, 64, enable_caching=True, encoder_decoder=True)
    for name, key, cached in (("a", "", 0), ("b", "", 0), ("c", "audio", 0), ("d", "audio", 15), ("e", "song", 0)):
        blocks.allocate(name, PROMPT, num_encoder_tokens=4, encoder_key=key)
        assert blocks.get_num_cached_tokens(name) == cached
        blocks.mark_blocks_as_computed(name, 16 - cached)


def test_given_a_group_with_an_encoder_when_swapped_then_its_blocks_move_along_and_stay_shared() -> None:
    blocks = BlockManager(4, 32, 16, encoder_decoder=True, enable_caching=False)
    blocks.allocate("s0", PROMPT, num_encoder_tokens=8, request_id="request")
    blocks.mark_blocks_as_computed("s0", 16)
    blocks.fork("s0", "s1")
    assert blocks.can_swap_out(["s0", "s1"])
    assert len(blocks.swap_out(["s0", "s1"])) == 4 + 2
    assert blocks.get_cross_block_table("request") == [None, None]
    assert blocks.get_num_free_gpu_blocks() == 32
    assert blocks.can_swap_in(["s0", "s1"]) is AllocStatus.OK
    assert len(blocks.swap_in(["s0", "s1"])) == 4 + 2
    assert blocks.handle("s1").block_ids(1).tolist() == blocks.get_cross_block_table("request")
    blocks.manager.check()


def test_given_mistakes_with_encoders_then_they_raise_and_change_nothing() -> None:
    plain = BlockManager(4, 16)
    with pytest.raises(InvalidArgumentError, match="encoder_decoder=True"):
        plain.get_cross_block_table("a")
    with pytest.raises(InvalidArgumentError, match="cross_tokens=4"):
        plain.allocate("a", PROMPT, num_encoder_tokens=4)
    blocks = BlockManager(4, 32, encoder_decoder=True)
    blocks.allocate("a", PROMPT, num_encoder_tokens=4)
    with pytest.raises(DuplicateRequestError, match="free_cross"):
        blocks.allocate("b", PROMPT, num_encoder_tokens=4, request_id="a")
    assert blocks.get_num_free_gpu_blocks() == 32 - 5
    with pytest.raises(ConfigError, match="as fields of the layers"):
        BlockManager(4, 16, layers=[LayerSpec(1, 8)], sliding_window=8)
    with pytest.raises(ConfigError, match="no setting 'num_gpu_block'; the nearest: num_gpu_blocks"):
        BlockManager(4, num_gpu_block=16)  # type: ignore[call-arg]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_given_pairs_when_the_cache_engine_runs_them_then_forks_and_swapped_groups_keep_every_byte() -> None:
    blocks = BlockManager(4, 16, 8, layers=[LayerSpec(2, 8)] * 2, enable_caching=False, device="cpu")
    engine = CacheEngine(blocks)
    assert engine.get_cache_block_size(4, [LayerSpec(2, 8)] * 2) == 4 * 2 * 2 * 2 * 8 * 2
    blocks.allocate("a", PROMPT[:6])
    given = torch.randn(2, 2, 6, 2, 8).bfloat16()
    for layer, (k, v) in enumerate(given):
        blocks.write("a", layer, 0, k, v)
    blocks.mark_blocks_as_computed("a", 6)
    blocks.fork("a", "b")
    pairs = blocks.append_slots("b")
    assert pairs == [(1, 2)]
    engine.copy(pairs)
    blocks.write("b", 0, 6, torch.full((1, 2, 8), 5.0), torch.full((1, 2, 8), 5.0))
    engine.swap_out(blocks.swap_out(["a", "b"]))
    engine.plane.layer_cache(0)["k"].data.fill_(0)  # others use the blocks meanwhile
    engine.plane.layer_cache(1)["v"].data.fill_(0)
    engine.swap_in(blocks.swap_in(["a", "b"]))
    for name in ("a", "b"):
        for layer, (k, v) in enumerate(given):
            found_k, found_v = blocks.read(name, layer, 0, 6)
            assert torch.equal(found_k, k)
            assert torch.equal(found_v, v)
    assert blocks.read("b", 0, 6)[0].unique().tolist() == [5.0]


def numbers_in(engine: CacheEngine, table: list[int | None], num_tokens: int) -> list[float]:
    """The first number of every token's key, as V0's worker reads it: through a table of block ids."""
    return engine.gpu_cache[0][0][table].flatten(0, 1)[:num_tokens, 0, 0].tolist()


def test_given_bytes_that_v0s_worker_wrote_when_nobody_marks_them_then_swaps_and_copies_on_write_keep_them() -> None:
    """The naive allocator of V0 knows no marking: what was scheduled is written when the next step is."""
    for caching in (False, True):
        blocks = BlockManager(4, 16, 16, layers=[LayerSpec(1, 4)], device="cpu", enable_caching=caching)
        engine = CacheEngine(blocks)

        def write(seq: str, start: int, *numbers: float) -> None:
            for position, number in enumerate(numbers, start):
                engine.gpu_cache[0][0][blocks.get_block_table(seq)[position // 4], position % 4] = number  # noqa: B023

        blocks.allocate("a", PROMPT[:6], num_lookahead_slots=8)
        write("a", 0, 1, 2, 3, 4, 5, 6)
        assert blocks.can_append_slots(["a"])
        assert blocks.append_slots("a") == []
        write("a", 6, 7)
        blocks.fork("a", "b")
        pairs = blocks.append_slots("b")
        assert [src for src, _ in pairs] == blocks.get_block_table("a")[1:]
        engine.copy(pairs)
        write("b", 7, 8)
        assert blocks.append_slots("a") == []
        write("a", 7, 9)
        assert blocks.can_swap_out(["a", "b"])
        engine.swap_out(blocks.swap_out(["a", "b"]))
        blocks.allocate("others", PROMPT)
        engine.gpu_cache[0][0].fill_(-1)
        engine.swap_in(blocks.swap_in(["b", "a"]))
        assert numbers_in(engine, blocks.get_block_table("a"), 8) == [1, 2, 3, 4, 5, 6, 7, 9]
        assert numbers_in(engine, blocks.get_block_table("b"), 8) == [1, 2, 3, 4, 5, 6, 7, 8]
        blocks.manager.check()


def test_given_samples_of_a_prompt_that_nobody_marks_when_the_next_step_begins_then_each_writes_into_its_own_copy() -> (
    None
):
    for first in ("s0", "s1"):
        blocks = BlockManager(4, 16, 16, layers=[LayerSpec(1, 4)], device="cpu", enable_caching=False)
        engine = CacheEngine(blocks)
        blocks.allocate("s0", PROMPT[:6])
        for sample in ("s1", "s2"):
            blocks.fork("s0", sample)
        engine.gpu_cache[0][0][blocks.get_block_table("s0")] = 5
        assert blocks.can_append_slots([first])
        engine.copy(blocks.append_slots(first))
        engine.gpu_cache[0][0][blocks.get_block_table(first)[1], 2] = 6
        blocks.fork("s2", "s3")
        for sample in {"s0", "s1", "s2"} - {first}:
            assert numbers_in(engine, blocks.get_block_table(sample), 7) == [5] * 7
        assert numbers_in(engine, blocks.get_block_table(first), 7) == [5] * 6 + [6]
        assert blocks.get_block_table("s3") == blocks.get_block_table("s2")
        blocks.manager.check()


def test_given_drafts_in_lookahead_slots_when_a_fork_takes_them_over_then_they_are_copied() -> None:
    blocks = BlockManager(4, 16, layers=[LayerSpec(1, 4)], device="cpu")
    engine = CacheEngine(blocks)
    blocks.allocate("a", PROMPT[:4], num_lookahead_slots=4)
    engine.gpu_cache[0][0][blocks.get_block_table("a")] = torch.tensor([[3], [9]]).bfloat16()[:, :, None, None]
    assert blocks.append_slots("a", 4, num_tokens=0) == []
    blocks.fork("a", "b")
    pairs = blocks.append_slots("b", num_tokens=3)  # three drafts were accepted
    assert pairs == [(blocks.get_block_table("a")[1], blocks.get_block_table("b")[1])]
    engine.copy(pairs)
    assert numbers_in(engine, blocks.get_block_table("b"), 7) == [3.0] * 4 + [9.0] * 3


def test_given_a_window_when_nobody_marks_what_is_written_then_blocks_before_it_are_given_back() -> None:
    blocks = BlockManager(4, 16, sliding_window=8, enable_caching=False)
    blocks.allocate("a", PROMPT)
    for _ in range(20):
        blocks.append_slots("a")
    assert sum(block is not None for block in blocks.get_block_table("a")) <= 4
    blocks.manager.check()


def test_given_an_encoders_layer_then_its_keys_are_written_and_read_by_the_encoders_positions() -> None:
    layers = [LayerSpec(2, 8), LayerSpec(2, 8, cross_attention=True)]
    blocks = BlockManager(4, 16, layers=layers, device="cpu")
    blocks.allocate("a", PROMPT[:4], num_encoder_tokens=6)
    encoded = torch.randn(6, 2, 8).bfloat16()
    blocks.write("a", 1, 0, encoded, encoded)
    blocks.write("a", 0, 0, encoded[:4], encoded[:4])
    blocks.fork("a", "b")
    assert torch.equal(blocks.read("b", 1)[0], encoded)
    assert torch.equal(blocks.read("b", 0)[0], encoded[:4])


def test_given_encoder_blocks_of_another_size_then_pairs_cannot_name_them() -> None:
    layers = [LayerSpec(2, 8), LayerSpec(4, 8, cross_attention=True)]
    with pytest.raises(ConfigError, match="as large as the decoder's"):
        BlockManager(4, 16, layers=layers)
    config = KVCacheConfig([LayerSpec(2, 8), LayerSpec(2, 8, window=4)], 4, gpu_blocks=16, partial_match=False)
    with pytest.raises(ConfigError, match="one layer group"):
        BlockManager(4, 16, manager=KVCacheManager(config))


# --- as its document has it -------------------------------------------------------------------------------------------


def test_given_samples_forked_before_the_prompt_is_computed_then_all_read_it_and_write_copies() -> None:
    """V0's `allocate` forks the samples of a group at once, and the prompt is computed in the step after."""
    blocks = BlockManager(4, 16, 8, layers=[LayerSpec(1, 4)], device="cpu")
    engine = CacheEngine(blocks)
    blocks.allocate("s0", PROMPT[:6])
    for sample in ("s1", "s2"):
        blocks.fork("s0", sample)
    assert blocks.get_block_table("s1") == blocks.get_block_table("s0") == [0, 1]
    with pytest.raises(SequenceStateError, match="0 of 6 tokens are computed"):
        blocks.read("s1", 0)
    for call in (lambda: blocks.fork("s0", "s1"), lambda: blocks.allocate("s1", [1])):
        with pytest.raises(DuplicateRequestError):
            call()
    prompt = torch.randn(6, 1, 4).bfloat16()
    blocks.write("s0", 0, 0, prompt, prompt)
    blocks.mark_blocks_as_computed("s0", 6)
    pairs = {sample: blocks.append_slots(sample) for sample in ("s1", "s2", "s0")}
    assert [len(copies) for copies in pairs.values()] == [1, 1, 0]
    for number, (sample, copies) in enumerate(pairs.items()):
        engine.copy(copies)
        blocks.write(sample, 0, 6, torch.full((1, 1, 4), float(number)), torch.zeros(1, 1, 4))
    for number, sample in enumerate(pairs):
        keys = blocks.read(sample, 0)[0]
        assert torch.equal(keys[:6], prompt)
        assert keys[6].unique().tolist() == [float(number)]
    blocks.manager.check()


def test_given_samples_that_wait_when_their_parent_ends_then_they_go_on_without_it() -> None:
    blocks = BlockManager(4, 16)
    blocks.allocate("s0", PROMPT[:6])
    for sample in ("s1", "s2", "s3"):
        blocks.fork("s0", sample)
    blocks.free("s3")
    blocks.free("s0")
    blocks.mark_blocks_as_computed("s1", 6)
    assert blocks.get_common_computed_block_ids(["s1", "s2"]) == [blocks.get_block_table("s1")[0]]
    assert len(blocks.append_slots("s2")) == 1
    for sample in ("s1", "s2"):
        blocks.free(sample)
    assert blocks.get_num_free_gpu_blocks() == 16


@pytest.mark.parametrize("wrong", [[(0, 99)], [(0, -1)], [(0.5, 1)], [(True, 1)], [(0, 1, 2)], [5], None, [(0, 0)]])
def test_given_a_pair_that_cannot_be_copied_then_it_is_refused_and_the_engine_goes_on(wrong: object) -> None:
    blocks = BlockManager(4, 16, 8, layers=[LayerSpec(1, 4)], device="cpu")
    engine = CacheEngine(blocks)
    engine.gpu_cache[0][0].fill_(1)
    for call in (engine.copy, engine.swap_in, engine.swap_out):
        if wrong == [(0, 0)] and call != engine.copy:
            continue
        with pytest.raises(InvalidArgumentError):
            call(wrong)  # type: ignore[arg-type]
    engine.gpu_cache[0][0][0] = 7
    engine.copy([(0, 1)])
    assert engine.gpu_cache[0][0][1].unique().tolist() == [7.0]
    engine.swap_out([(1, 3)])
    assert engine.cpu_cache[0][0][3].unique().tolist() == [7.0]


def test_given_pairs_in_a_tensor_as_v0s_worker_gets_them_then_they_are_carried_out() -> None:
    blocks = BlockManager(4, 16, 8, layers=[LayerSpec(1, 4)], device="cpu")
    engine = CacheEngine(blocks)
    engine.gpu_cache[0][0][:] = torch.arange(16.0)[:, None, None, None]
    engine.copy(torch.tensor([(0, 1), (2, 3)]))
    engine.swap_out(torch.tensor([(3, 0)], dtype=torch.int64).view(-1, 2))
    engine.swap_in(torch.tensor([(0, 5)]))
    engine.swap_in(torch.tensor([], dtype=torch.int64).view(-1, 2))
    assert engine.gpu_cache[0][0][[1, 3, 5], 0, 0, 0].tolist() == [0.0, 2.0, 2.0]
    for wrong in (torch.tensor([0, 1]), torch.tensor([(0.0, 1.0)]), torch.tensor([(0, 1, 2)]), torch.tensor([(0, 99)])):
        with pytest.raises(InvalidArgumentError):
            engine.copy(wrong)


def test_given_a_wrong_copy_when_the_data_plane_runs_it_then_it_is_not_kept() -> None:
    blocks = BlockManager(4, 16, layers=[LayerSpec(1, 4)], device="cpu")
    ids = (np.array([0], np.int32), np.array([99], np.int32))
    with pytest.raises(InvalidArgumentError, match="99"):
        blocks.plane.run_copies([CopyOp(CopyKind.COPY_ON_WRITE, 0, Tier.GPU, Tier.GPU, *ids)])
    blocks.plane.run_copies().wait()


def test_given_a_manager_and_sizes_that_contradict_it_then_the_error_names_both() -> None:
    manager = BlockManager(8, 16, 4).manager
    assert BlockManager(8, 16, manager=manager).get_num_free_cpu_blocks() == 4
    for sizes, message in (
        ((8, 999, 0), "num_gpu_blocks=999, but the manager has 16"),
        ((4, 16, 0), "block_size=4, but the manager has 8"),
        ((8, 16, 7), "num_cpu_blocks=7, but the manager has 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            BlockManager(*sizes, manager=manager)


def test_given_an_eviction_policy_then_the_manager_evicts_by_it() -> None:
    made: list[EvictionPolicy] = []

    def make() -> EvictionPolicy:
        made.append(make_policy("fifo"))
        return made[-1]

    BlockManager(4, 16, eviction_policy=make)
    assert made
    blocks = BlockManager(4, 16, enable_caching=True, eviction_policy=Evictor)
    for number in range(3):
        blocks.allocate(number, [number] * 16)
        blocks.mark_blocks_as_computed(number, None)
        blocks.free(number)
    blocks.allocate("again", [0] * 16)
    blocks.free("again")
    blocks.allocate("new", [7] * 24)
    kept = {number: blocks.manager.match_prefix([number] * 16).num_tokens for number in range(3)}
    assert kept == {0: 15, 1: 8, 2: 15}
    for wrong, message in (("nobody", "nobody"), (len, "cannot be called without arguments")):
        with pytest.raises((ConfigError, InvalidArgumentError), match=message):
            BlockManager(4, 16, eviction_policy=wrong)  # type: ignore[arg-type]


def test_given_the_allocators_then_one_shares_prefixes_and_both_copy_on_write() -> None:
    for kind, cached in ((NaiveBlockAllocator, 0), (PrefixCachingBlockAllocator, 15)):
        allocator = kind(num_blocks=16, block_size=4)
        allocator.allocate("a", PROMPT)
        allocator.mark_blocks_as_computed("a", 16)
        allocator.allocate("b", PROMPT)
        assert allocator.get_num_cached_tokens("b") == cached
        allocator.fork("a", "c")
        allocator.free("b")
        assert (allocator.get_num_free_blocks(), allocator.get_num_total_blocks()) == (12, 16)
        for name in (
            "allocate_mutable_block",
            "allocate_immutable_block",
            "promote_to_immutable_block",
            "cow_block_if_not_appendable",
            "clear_copy_on_writes",
        ):
            with pytest.raises(InvalidArgumentError, match=f"{name}: blocks belong to sequences here"):
                getattr(allocator, name)()
        with pytest.raises(ValueError, match="has 16") as full:  # as V0's NoFreeBlocksError is one
            allocator.allocate("long", list(range(100)))
        assert isinstance(full.value, OutOfBlocksError)


def test_given_an_evictor_then_the_oldest_goes_first_and_of_equals_the_deepest() -> None:
    evictor = Evictor()
    for block, tokens, time in ((0, 16, 1.0), (1, 32, 1.0), (2, 16, 0.5), (3, 16, 9.0)):
        evictor.add(block, 100 + block, tokens, time)
    evictor.update(2, 5.0)
    evictor.remove(3)
    assert [evictor.evict() for _ in range(3)] == [(1, 101), (0, 100), (2, 102)]
    assert evictor.num_blocks == 0
    for wrong in (evictor.evict, lambda: evictor.update(0, 1.0), lambda: evictor.remove(0)):
        with pytest.raises(InvalidArgumentError, match="evictor"):
            wrong()


def test_given_the_helpers_then_they_say_what_events_and_configurations_say() -> None:
    blocks = BlockManager(4, 16, enable_caching=True)
    listener = blocks.manager.subscribe()
    blocks.allocate("a", PROMPT, lora_int_id=3)
    blocks.mark_blocks_as_computed("a", None)
    [stored] = [event for event in listener.poll().events if isinstance(event, Stored)]
    digests = KVCacheUtils.hash_request_tokens(4, [*PROMPT, 99], lora_int_id=3)
    assert list(stored.digests) == digests
    assert KVCacheUtils.hash_block_tokens(digests[0], PROMPT[4:8]) == digests[1]
    assert KVCacheUtils.hash_block_tokens(None, PROMPT[:4], lora_int_id=4) != digests[0]
    layers = [LayerSpec(2, 8)] * 2
    assert KVCacheUtils.get_num_blocks(4, layers, 10 * CacheEngine.get_cache_block_size(4, layers) + 1) == 10
    config = blocks.manager.config
    assert KVCacheUtils.estimate_max_model_len(config) == 64
    assert KVCacheUtils.get_max_concurrency(config, 20) == 3
    KVCacheUtils.check_enough_kv_cache_memory(config, 64)
    with pytest.raises(ValueError, match="the longest that fits has 64 tokens"):
        KVCacheUtils.check_enough_kv_cache_memory(config, 65)


def test_given_v0s_names_then_they_are_there_and_are_what_this_package_has() -> None:
    assert [compat.AllocStatus, compat.Scheduler, compat.BlockTable] == [AllocStatus, Scheduler, BlockTable]
    assert {device.name for device in compat.Device} == {"GPU", "CPU"}


DOCUMENT = [
    "BlockManager",
    "BlockTable",
    "NaiveBlockAllocator",
    "PrefixCachingBlockAllocator",
    "Evictor",
    "CacheEngine",
    "Scheduler",
    "KVCacheUtils",
]


@pytest.mark.parametrize("name", DOCUMENT)
def test_given_a_component_of_the_document_then_the_page_says_what_it_is_here(name: str) -> None:
    assert f"\n| `{name}` |" in PAGE
    assert name in compat.__all__


@pytest.mark.parametrize("kind", [BlockManager, CacheEngine, Evictor, KVCacheUtils])
def test_given_the_calls_then_the_page_names_each(kind: type) -> None:
    ours = {"handle", "table", "commit_known", "plane", "write", "read", "close"}  # of every adapter
    calls = [name for name in dir(kind) if not name.startswith("_") and name not in ours]
    assert [name for name in calls if f"`{name}`" not in PAGE and f"`{kind.__name__}.{name}`" not in PAGE] == []
