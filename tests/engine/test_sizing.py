"""How much memory the cache may have: steps as large as the limits allow must fit beside it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import tiny_model  # noqa: E402

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec  # noqa: E402
from kvpool.engine import sizing  # noqa: E402
from kvpool.engine.graphs import decode_sizes, list_room  # noqa: E402
from kvpool.engine.sizing import GRAPH_BYTES, kv_budget, link_bytes_per_second, run_largest_step  # noqa: E402
from kvpool.errors import StorageMemoryError  # noqa: E402
from kvpool.model.probing import inspect_model  # noqa: E402
from kvpool.scheduling import SchedulerConfig  # noqa: E402
from kvpool.storage import DataPlane  # noqa: E402


@pytest.mark.parametrize(("drafts", "num_rows"), [(0, 8), (4, 40), (500, 600)])
def test_given_limits_then_the_largest_step_has_all_tokens_and_samples_behind_every_draft(
    drafts: int, num_rows: int
) -> None:
    model = tiny_model("llama")
    shape = inspect_model(model)
    seen = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    limits = SchedulerConfig(max_tokens_per_step=600, max_sequences=8, max_draft_tokens=drafts)  # 512 positions
    assert run_largest_step(model, shape, model.device, limits).shape == (num_rows, shape.vocab_size)
    assert seen == [(1, 600)]


@pytest.mark.parametrize("smallest", [1, 2])
@pytest.mark.parametrize("max_sequences", [1, 2, 3, 64, 512, 1000])
def test_given_any_limit_then_every_batch_has_a_graph_that_is_not_much_larger(
    max_sequences: int, smallest: int
) -> None:
    sizes = decode_sizes(max_sequences, smallest)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= smallest
    assert sizes[-1] == max(max_sequences, smallest)


@pytest.mark.parametrize(("longest", "room"), [(None, 400), (64, 8 * 16), (1000, 400)])
def test_given_sequences_that_share_blocks_then_their_lists_may_outgrow_the_pool(
    longest: int | None, room: int
) -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=100, max_seq_len=longest)
    assert list_room(config, config.groups[0], 8) == room


@pytest.mark.parametrize(("num_bytes", "num_blocks"), [(0, 1), (1024, 1), (2048, 2), (2**24, 6)])
def test_given_two_tiers_then_the_speed_between_them_is_that_of_the_blocks_that_both_have(
    num_bytes: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def half_a_second(source: Any, target: Any) -> float:
        assert source.shape == target.shape
        copied.append(len(source))
        return 0.5

    layers = [LayerSpec(kv_heads=1, head_dim=32, dtype="float32"), LayerSpec(kv_heads=2, head_dim=16, dtype="float32")]
    config = KVCacheConfig(layers, block_size=4, gpu_blocks=8, host_blocks=6)
    assert {pool.block_bytes for pool in config.pools} == {1024}
    plane = DataPlane(KVCacheManager(config), "cpu")
    monkeypatch.setattr(sizing, "copy_seconds", half_a_second)
    speed = link_bytes_per_second(plane, num_bytes)
    assert copied == [num_blocks] * len(config.pools)
    assert speed == num_blocks * 1024 / 0.5


@pytest.mark.gpu
def test_given_more_sequences_then_the_memory_of_their_logits_is_left_free() -> None:
    model = tiny_model("llama", vocab_size=2**17).to("cuda")
    shape, where = inspect_model(model), model.device
    few, many = (
        kv_budget(model, shape, where, 0.5, SchedulerConfig(max_tokens_per_step=512, max_sequences=number))
        for number in (8, 512)
    )
    row = 4 * 2**17  # float32 logits: kept by every graph, and several times while they are sampled from
    assert few - many > row * (sum(decode_sizes(512)) + 512)


@pytest.mark.gpu
def test_given_too_small_a_share_then_the_error_names_the_limits_to_lower() -> None:
    model = tiny_model("llama").to("cuda")
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(StorageMemoryError, match="max_sequences"):
        kv_budget(model, inspect_model(model), model.device, GRAPH_BYTES / 2 / free, SchedulerConfig())
