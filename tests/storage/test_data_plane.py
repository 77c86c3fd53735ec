"""The data plane as an engine uses it: writing, reading, copies, resizing, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier  # noqa: E402
from kvpool.errors import (  # noqa: E402
    InvalidArgumentError,
    OutOfBlocksError,
    SequenceStateError,
    SharedBlockError,
    StorageMemoryError,
    TransferError,
)
from kvpool.storage import BlockStore, DataPlane, data_plane  # noqa: E402
from kvpool.storage.data_plane import _table_blocks  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FULL = LayerSpec(kv_heads=2, head_dim=4)
HEADS, DIM = 2, 4


class Engine:
    """A manager, its data plane, and random keys and values."""

    def __init__(self, device: str = "cpu", layers: Any = (FULL, FULL), **options: Any) -> None:
        sizes = {"gpu_blocks": 12, "host_blocks": 8, "disk_blocks": 4}
        plane_options = {
            name: options.pop(name) for name in ("check_writes", "factors", "checksums") if name in options
        }
        self.manager = KVCacheManager(KVCacheConfig(layers, 4, watermark=0, **{**sizes, **options}))
        self.plane = DataPlane(self.manager, device, **plane_options)
        self.device = device

    def values(self, num_tokens: int, seed: int = 0) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        made = torch.randn(2, num_tokens, HEADS, DIM).bfloat16().to(self.device)
        return made[0], made[1]

    def prompt(self, name: str, tokens: list[int], seed: int = 0) -> Any:
        """A request whose prompt is written in every layer and committed."""
        handle = self.manager.allocate(name, tokens)
        step = self.plane.prepare(self.manager.slot_mapping([handle], handle.num_written, len(tokens)))
        k, v = self.values(len(tokens), seed)
        for layer in range(len(self.manager.config.layers)):
            self.plane.write(step, k[handle.num_written :], v[handle.num_written :], layer)
        self.manager.commit(handle)
        return handle


@pytest.fixture(params=DEVICES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(request.param, check_writes=True)
    yield made
    made.plane.close()


def test_given_a_prompt_when_read_in_pieces_then_each_piece_is_what_was_written(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(11)))
    k, v = engine.values(11)
    for start, count in ((0, 11), (3, 6), (8, 3), (11, 0)):
        found = engine.plane.read(handle, 1, start, count)
        assert torch.equal(found[0], k[start : start + count])
        assert torch.equal(found[1], v[start : start + count])
    assert torch.equal(engine.plane.read(handle, 0, 5)[0], k[5:])


def test_given_memory_then_what_is_allocated_is_what_the_configuration_says(engine: Engine) -> None:
    config = engine.manager.config
    assert engine.plane.num_bytes == {tier: config.pool_bytes(tier) for tier in (Tier.GPU, Tier.HOST, Tier.DISK)}


def test_given_forks_when_both_write_then_neither_sees_the_other(engine: Engine) -> None:
    first = engine.prompt("a", list(range(6)))
    (second,) = engine.manager.fork(first, "b")
    batch = engine.manager.batch([first, second])
    step = engine.plane.prepare(engine.manager.extend_batch(batch), batch)
    k, v = engine.values(2, seed=5)
    for layer in (0, 1):
        engine.plane.write(step, k, v, layer)
    engine.manager.commit_batch(batch, [7, 8])
    prompt = engine.values(6)[0]
    for number, handle in enumerate((first, second)):
        assert torch.equal(engine.plane.read(handle, 1)[0], torch.cat([prompt, k[number : number + 1]]))


def test_given_a_swapped_request_then_it_is_read_from_the_host_and_comes_back_the_same(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(10)))
    k = engine.values(10)[0]
    engine.manager.swap_out(handle)
    engine.manager.cache.reset()
    assert torch.equal(engine.plane.read(handle, 1)[0].cpu(), k.cpu())
    engine.prompt("b", list(range(100, 140)), seed=3)  # takes every block that was left
    engine.manager.free(engine.manager.get("b"), keep=False)
    engine.manager.swap_in(handle)
    assert torch.equal(engine.plane.read(handle, 0)[0], k)


def test_given_slots_of_one_group_or_of_all_then_write_takes_both(engine: Engine) -> None:
    handle = engine.manager.allocate("a", [1, 2, 3])
    slots = engine.manager.slot_mapping([handle], 0, 3)
    k, v = engine.values(3)
    engine.plane.write(slots, k, v, 0)
    engine.plane.write(slots[0].tolist(), k, v, 1)
    engine.manager.commit(handle)
    assert torch.equal(engine.plane.read(handle, 0)[1], engine.plane.read(handle, 1)[1])


def test_given_planned_copies_when_something_is_written_or_read_then_they_run_first(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(8)))
    engine.manager.free(handle)
    engine.manager.cache.offload(2)
    again = engine.manager.allocate("b", [*range(8), 9])
    assert again.num_cached_tokens == 8
    assert torch.equal(engine.plane.read(again, 0)[0], engine.values(8)[0])


# --- refused -----------------------------------------------------------------------------------------------------------


def test_given_positions_that_are_not_written_then_reading_them_is_refused(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(6)))
    engine.manager.extend(handle, 2)
    for start, count in ((0, 7), (6, 1), (-1, 1), (7, 0)):
        with pytest.raises(InvalidArgumentError):
            engine.plane.read(handle, 0, start, count)


def test_given_a_published_block_then_writing_it_is_refused_and_its_bytes_stay(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(6)))
    published = int(handle.block_ids()[0])
    with pytest.raises(SharedBlockError, match="published"):
        engine.plane.write([4 * published], *engine.values(1, seed=9), 0)
    with pytest.raises(SharedBlockError):
        engine.plane.prepare([[4 * published + 3]])
    assert torch.equal(engine.plane.read(handle, 0)[0], engine.values(6)[0])


def test_given_a_block_of_two_forks_then_writing_it_without_its_copy_is_refused(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(6)))
    engine.manager.fork(handle, "b")
    with pytest.raises(SharedBlockError):
        engine.plane.write([4 * int(handle.block_ids()[1]) + 2], *engine.values(1), 0)


def test_given_the_last_block_of_a_fully_cached_prompt_then_writing_it_is_refused(engine: Engine) -> None:
    engine.prompt("a", list(range(8)))
    again = engine.manager.allocate("b", list(range(8)))
    assert (again.num_cached_tokens, again.num_reserved) == (7, 8)
    assert engine.manager.slot_mapping([again], 7, 8).tolist() == [[-1]]
    with pytest.raises(SharedBlockError):
        engine.plane.write([4 * int(again.block_ids()[1]) + 3], *engine.values(1), 0)


def test_given_wrong_slots_then_they_are_refused_by_name(engine: Engine) -> None:
    k, v = engine.values(1)
    for slots, message in (
        ([48], "slot 48 .* outside its store, which has 48"),
        ([-2], "-2"),
        ([0.5], "integers"),
        ([[0], [1]], "integers"),
        ([[[0]]], "integers"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            engine.plane.write(slots, k, v, 0)
    with pytest.raises(InvalidArgumentError, match="layer group"):
        engine.plane.prepare([0])


def test_given_wrong_values_then_they_are_refused_by_name(engine: Engine) -> None:
    handle = engine.manager.allocate("a", [1, 2])
    slots = engine.manager.slot_mapping([handle], 0, 2)
    k, v = engine.values(2)
    for wrong_k, wrong_v, message in (
        (k[:1], v, "k must be .* got torch.bfloat16 .1, 2, 4"),
        (k, v[..., :2], "v must be"),
        (k.int(), v, "floating-point"),
        (k.tolist(), v, "list"),
        (k, None, "stores .k. and .v., got .k."),
        (k.to("meta"), v, "on meta"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            engine.plane.write(slots, wrong_k, wrong_v, 0)
    for layer in (-1, 2, True, "0"):
        with pytest.raises(InvalidArgumentError, match="layer"):
            engine.plane.write(slots, k, v, layer)


@pytest.mark.parametrize("device", ["cuda", "meta", "cuda:99"])
def test_given_a_device_that_is_not_there_then_it_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="device"):
        Engine(device)


def test_given_a_k_only_layer_then_it_takes_and_gives_no_v() -> None:
    engine = Engine(layers=[LayerSpec(kv_heads=1, head_dim=6, k_only=True, dtype="float32")])
    handle = engine.manager.allocate("a", [1, 2, 3])
    slots, k = engine.manager.slot_mapping([handle], 0, 3), torch.randn(3, 1, 6)
    with pytest.raises(InvalidArgumentError, match="stores 'k', got 'k' and 'v'"):
        engine.plane.write(slots, k, k, 0)
    with pytest.raises(InvalidArgumentError, match="stores 'k', got 'latent'"):
        engine.plane.write_parts(slots, {"latent": k}, 0)
    engine.plane.write(slots, k, None, 0)
    engine.manager.commit(handle)
    found, none = engine.plane.read(handle, 0)
    assert torch.equal(found, k)
    assert none is None
    assert engine.plane.read(handle, 0, raw=True)[1] is None


def test_given_a_window_then_what_left_it_cannot_be_read() -> None:
    engine = Engine(layers=[FULL, LayerSpec(kv_heads=HEADS, head_dim=DIM, window=4)])
    handle = engine.prompt("a", list(range(16)))
    assert torch.equal(engine.plane.read(handle, 1, 13)[0], engine.values(16)[0][13:])
    with pytest.raises(SequenceStateError, match="position 2 left the window"):
        engine.plane.read(handle, 1, 2)


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.03), ("int4", 0.4), ("fp8_e4m3", 0.2), ("fp8_e5m2", 0.4)])
def test_given_a_quantised_cache_then_reading_gives_nearly_what_was_written_and_raw_what_is_stored(
    dtype: str, error: float
) -> None:
    layer = LayerSpec(kv_heads=HEADS, head_dim=DIM, dtype=dtype)
    engine = Engine(layers=[layer, layer], factors={0: (0.5, 2.0), 1: (0.5, 2.0)})
    handle = engine.prompt("a", list(range(7)))
    k, v = engine.values(7)
    found = engine.plane.read(handle, 1)
    assert (found[0] - k.float()).abs().max() < error
    assert (found[1] - v.float()).abs().max() < error
    raw_k, raw_v = engine.plane.read(handle, 1, raw=True)
    cache = engine.plane.layer_cache(1)
    assert (raw_k.dtype, raw_v.dtype) == (cache["k"].data.dtype, cache["v"].data.dtype)
    assert raw_k.shape == (7, HEADS, DIM)
    assert raw_v.shape == (7, HEADS, DIM // 2 if dtype == "int4" else DIM)


def test_given_cross_attention_then_the_encoder_s_tokens_have_slots_of_their_own() -> None:
    engine = Engine(layers=[FULL, LayerSpec(kv_heads=HEADS, head_dim=DIM, cross_attention=True)], gpu_blocks=12)
    handle = engine.manager.allocate("a", [1, 2], cross_tokens=6)
    k, v = engine.values(6)
    engine.plane.write(engine.plane.cross_slots(handle, 1), k, v, 1)
    assert torch.equal(engine.plane.read(handle, 1)[0], k)


def test_given_a_failed_copy_then_it_and_those_behind_it_come_first_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    handle = engine.prompt("a", list(range(8)))
    engine.manager.swap_out(handle)
    submit = engine.plane.transfers.submit

    def fail(ops: Any, **options: Any) -> Any:
        raise TransferError("broken", ops)

    monkeypatch.setattr(engine.plane.transfers, "submit", fail)
    with pytest.raises(TransferError):
        engine.plane.run_copies()
    monkeypatch.setattr(engine.plane.transfers, "submit", submit)
    assert torch.equal(engine.plane.read(handle, 0)[0], engine.values(8)[0])


# --- shape -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.GPU, Tier.HOST, Tier.DISK])
def test_given_a_pool_that_shrinks_and_grows_then_every_sequence_keeps_its_bytes(engine: Engine, tier: Tier) -> None:
    handle, other = engine.prompt("a", list(range(6))), engine.prompt("b", list(range(50, 55)), seed=2)
    before = engine.plane.stores[0, tier].num_blocks
    engine.plane.resize(4, tier=tier)
    assert engine.plane.stores[0, tier].num_blocks == engine.manager.stats().pool(tier=tier).total == 4
    engine.plane.resize(before + 3, tier=tier)
    assert engine.plane.stores[0, tier].num_blocks == before + 3
    assert torch.equal(engine.plane.read(handle, 1)[0], engine.values(6)[0])
    assert torch.equal(engine.plane.read(other, 0)[1], engine.values(5, 2)[1])


def test_given_a_pool_in_use_when_it_cannot_shrink_then_manager_and_store_stay_as_they_were(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(20)))
    with pytest.raises(OutOfBlocksError):
        engine.plane.resize(2)
    assert engine.plane.stores[0, Tier.GPU].num_blocks == 12
    assert torch.equal(engine.plane.read(handle, 1)[0], engine.values(20)[0])


def test_given_no_memory_to_grow_then_manager_and_store_stay_as_they_were(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: BlockStore, num_blocks: int) -> None:
        raise StorageMemoryError("full")

    monkeypatch.setattr(BlockStore, "_allocate", no_memory)
    with pytest.raises(StorageMemoryError):
        engine.plane.resize(50)
    monkeypatch.undo()
    assert engine.manager.stats().pool().total == engine.plane.stores[0, Tier.GPU].num_blocks == 12


def test_given_a_size_or_pool_that_is_wrong_then_nothing_changes(engine: Engine) -> None:
    for num_blocks, options in ((0, {}), (-1, {}), (5, {"pool": 3}), (5, {"tier": Tier.REMOTE})):
        with pytest.raises(InvalidArgumentError):
            engine.plane.resize(num_blocks, **options)
    assert engine.plane.stores[0, Tier.GPU].num_blocks == 12


def test_given_a_manager_that_was_resized_behind_its_back_then_the_error_names_the_remedy() -> None:
    engine = Engine()
    engine.manager.cache.resize(40)
    handle = engine.manager.allocate("a", num_tokens=80)
    with pytest.raises(InvalidArgumentError, match="outside its store"):
        engine.plane.prepare(engine.manager.slot_mapping([handle], 0, 80))


def test_given_copies_beyond_a_store_then_they_wait_for_its_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(gpu_blocks=3)
    handle = engine.prompt("a", list(range(10)))
    engine.manager.cache.resize(6)  # behind the plane's back
    (other,) = engine.manager.fork(handle, "b")
    engine.manager.extend(other, 1)  # copies the last block into one that the store does not have
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"DataPlane\.resize"):
            engine.plane.run_copies()
    engine.plane.stores[0, Tier.GPU].resize(6)
    assert torch.equal(engine.plane.read(other, 0)[0], engine.values(10)[0])


def test_given_no_choice_then_writes_are_checked_on_a_cpu() -> None:
    assert [Engine(check_writes=choice).plane.check_writes for choice in (None, True, False)] == [True, True, False]


def test_given_copies_of_a_scheduler_that_are_wrong_then_they_are_refused_and_none_is_kept() -> None:
    engine = Engine()
    handle = engine.prompt("a", list(range(10)))
    (other,) = engine.manager.fork(handle, "b")
    engine.manager.extend(other, 1)
    copies = engine.manager.take_copies()
    assert len(copies) == 1
    wrong = copies[0]._replace(dst=np.array([99], np.int32))
    with pytest.raises(InvalidArgumentError):
        engine.plane.run_copies([*copies, wrong])
    engine.plane.run_copies(copies).wait()
    assert torch.equal(engine.plane.read(other, 0)[0], engine.values(10)[0])
    engine.plane.close()


def test_given_a_batch_then_a_step_reads_the_blocks_of_its_tables_the_first_of_the_pool_too() -> None:
    manager = Engine().manager
    handles = [manager.allocate(name, [number] * 6) for number, name in enumerate("ab")]
    assert sorted(_table_blocks(manager.batch(handles), 0).tolist()) == [0, 1, 2, 3]


# --- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_given_a_captured_write_then_replaying_it_writes_the_slots_of_the_day() -> None:
    engine = Engine("cuda")
    handle = engine.manager.allocate("a", list(range(8)))
    slots = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    k, v = engine.values(4)
    engine.plane.write(slots, k, v, 0)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.plane.write(slots, k, v, 0)
    for start in (0, 4):
        step = engine.plane.prepare(engine.manager.slot_mapping([handle], start, start + 4))
        slots.copy_(step.tensor[0])
        k.copy_(engine.values(4, seed=start + 1)[0])
        graph.replay()
    engine.manager.commit(handle)
    expected = torch.cat([engine.values(4, seed=1)[0], engine.values(4, seed=5)[0]])
    assert torch.equal(engine.plane.read(handle, 0)[0], expected)


@pytest.mark.gpu
def test_given_an_offload_that_overlaps_then_blocks_written_meanwhile_wait_for_it() -> None:
    """Many blocks leave; at once their places are written again: what left must be the old bytes."""
    layer = LayerSpec(kv_heads=8, head_dim=128)
    manager = KVCacheManager(KVCacheConfig([layer] * 8, 16, gpu_blocks=512, host_blocks=512, watermark=0))
    plane = DataPlane(manager, "cuda")
    old, new = (torch.full((512 * 16, 8, 128), value, dtype=torch.bfloat16, device="cuda") for value in (1.0, 2.0))
    first = manager.allocate("a", num_tokens=512 * 16)
    step = plane.prepare(manager.slot_mapping([first], 0, 512 * 16))
    for number in range(8):
        plane.write(step, old, old, number)
    manager.commit(first, 512 * 16)
    manager.swap_out(first)
    second = manager.allocate("b", num_tokens=512 * 16)
    step = plane.prepare(manager.slot_mapping([second], 0, 512 * 16), manager.batch([second]))
    for number in range(8):
        plane.write(step, new, new, number)
    manager.commit(second, 512 * 16)
    assert all((plane.read(first, number)[0] == 1.0).all() for number in range(8))
    assert all((plane.read(second, number)[0] == 2.0).all() for number in range(8))
    plane.close()


def test_given_no_writable_block_then_the_manager_says_so() -> None:
    engine = Engine()
    assert not engine.manager.writable_blocks().any()
    handle = engine.prompt("a", list(range(6)))
    assert np.flatnonzero(engine.manager.writable_blocks()).tolist() == [int(handle.block_ids()[1])]
    engine.manager.swap_out(handle)
    assert not engine.manager.writable_blocks().any()


def host_rows(engine: Engine, num_blocks: int) -> Any:
    rows = torch.zeros((num_blocks, engine.manager.config.groups[0].block_bytes), dtype=torch.uint8)
    return rows.pin_memory() if engine.device == "cuda" else rows


def test_given_blocks_read_as_bytes_when_they_are_written_into_others_then_tokens_read_the_same(engine: Engine) -> None:
    first = engine.prompt("first", list(range(8)), seed=3)
    rows = host_rows(engine, 2)
    engine.plane.read_blocks(first.block_ids(0).copy(), 0, rows)()
    second = engine.manager.allocate("second", list(range(50, 58)))
    engine.plane.write_blocks(second.block_ids(0).copy(), 0, rows)()
    engine.manager.commit(second)
    for layer in range(2):
        for ours, theirs in zip(engine.plane.read(first, layer), engine.plane.read(second, layer), strict=True):
            assert torch.equal(ours, theirs)


def test_given_rows_that_lie_apart_then_blocks_are_written_from_them(engine: Engine) -> None:
    first = engine.prompt("first", list(range(8)), seed=3)
    rows = host_rows(engine, 2)
    engine.plane.read_blocks(first.block_ids(0).copy(), 0, rows)()
    apart = host_rows(engine, 5)
    apart[3], apart[1] = rows[0], rows[1]
    second = engine.manager.allocate("second", list(range(50, 58)))
    ids = second.block_ids(0).copy()
    engine.plane.write_blocks(ids, 0, [apart[3].numpy(), apart[1].numpy()])()
    engine.manager.commit(second)
    for layer in range(2):
        for ours, theirs in zip(engine.plane.read(first, layer), engine.plane.read(second, layer), strict=True):
            assert torch.equal(ours, theirs)
    for wrong in ([apart[3].numpy()], [apart[3].numpy(), apart[1].numpy()[:-1]]):
        with pytest.raises(InvalidArgumentError, match="as many rows of"):
            engine.plane.write_blocks(ids, 0, wrong)


def test_given_blocks_that_were_taken_then_they_are_copied_as_they_were_to_rows_that_lie_apart(engine: Engine) -> None:
    first = engine.prompt("first", list(range(8)), seed=3)
    ids, rows, apart = first.block_ids(0).copy(), host_rows(engine, 2), host_rows(engine, 5)
    engine.plane.read_blocks(ids, 0, rows)()
    near = torch.empty_like(rows, device=engine.device)
    taken = engine.plane.take_blocks(ids, 0, near)
    store = engine.plane.stores[0, Tier.GPU]
    assert isinstance(store, BlockStore)
    store.data.zero_()
    targets = [apart[3].numpy(), apart[1].numpy()]
    with ThreadPoolExecutor(1) as threads:  # a tier's thread does it, in which nothing has used the device before
        threads.submit(taken.copy_to, targets, [1, 0]).result()
        assert threads.submit(taken.are_in, targets, [1, 0]).result()
    assert not taken.are_in(targets, [0, 1])
    assert torch.equal(apart[3], rows[1])
    assert torch.equal(apart[1], rows[0])
    assert not apart[[0, 2, 4]].any()
    with pytest.raises(InvalidArgumentError, match="do not fit"):
        engine.plane.take_blocks(ids, 0, near[:1])


def test_given_whole_blocks_read_or_written_then_later_transfers_do_not_take_them_for_part_of_the_step_before(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = engine.manager.allocate("a", list(range(8)))
    batch = engine.manager.batch([handle])
    announced: list[Any] = []
    monkeypatch.setattr(engine.plane.transfers, "announce", announced.append)
    for touch in (engine.plane.read_blocks, engine.plane.write_blocks):
        engine.plane.prepare(engine.manager.slot_mapping([handle], 0, 8), batch)
        assert announced[-1] is not None
        touch(handle.block_ids(0).copy(), 0, host_rows(engine, 2))()
        assert announced[-1] is None


@pytest.mark.gpu
def test_given_whole_blocks_written_behind_a_step_then_an_offload_takes_what_was_written() -> None:
    engine = Engine("cuda")
    step, written = (
        engine.manager.allocate(name, list(range(start, start + 8))) for name, start in (("a", 0), ("b", 50))
    )
    rows = host_rows(engine, 2).fill_(7)
    engine.plane.prepare(engine.manager.slot_mapping([step], 0, 8), engine.manager.batch([step]))
    torch.cuda._sleep(500_000_000)
    engine.plane.write_blocks(written.block_ids(0).copy(), 0, rows)
    engine.manager.commit(written)
    engine.manager.free(written)
    engine.manager.cache.offload(2)
    engine.plane.run_copies(overlap=True).wait()
    host = engine.plane.stores[0, Tier.HOST]
    assert isinstance(host, BlockStore)
    assert int((host.data == 7).all(dim=1).sum()) == 2
    engine.plane.close()


def test_given_an_offload_planned_from_blocks_then_it_runs_before_they_are_written(engine: Engine) -> None:
    kept = engine.prompt("kept", list(range(48)), seed=5)  # the whole pool
    want = engine.plane.read(kept, 1)[0].clone()
    engine.manager.free(kept)
    other = engine.manager.allocate("other", list(range(100, 132)))  # evicts to the host
    engine.plane.write_blocks(other.block_ids(0).copy(), 0, host_rows(engine, 8))()
    engine.manager.free(other, keep=False)
    again = engine.manager.allocate("again", list(range(48)))
    assert torch.equal(engine.plane.read(again, 1)[0], want[: again.num_written])


def test_given_blocks_or_rows_that_cannot_be_then_they_are_refused(engine: Engine) -> None:
    handle = engine.prompt("a", list(range(8)))
    ids = handle.block_ids(0).copy()
    with pytest.raises(InvalidArgumentError, match="contiguous uint8"):
        engine.plane.read_blocks(ids, 0, host_rows(engine, 1))
    with pytest.raises(InvalidArgumentError, match="not all among"):
        engine.plane.read_blocks(ids + 12, 0, host_rows(engine, 2))
    with pytest.raises(SharedBlockError):
        engine.plane.write_blocks(ids, 0, host_rows(engine, 2))


# --- threads ---------------------------------------------------------------------------------------------------------


class Meanwhile:
    """Runs `act` in another thread the first time that a function is called, and goes on when it is done, or waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None]) -> None:
        self._call, self._act, self._pool = getattr(owner, name), act, ThreadPoolExecutor(1)
        self._done: Any = None
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._done is None:
            self._done = self._pool.submit(self._act)
            wait([self._done], timeout=0.3)
        return self._call(*arguments, **options)

    def join(self) -> None:
        self._done.result()
        self._pool.shutdown()


def test_given_copies_that_a_thread_has_taken_when_another_writes_the_freed_blocks_then_they_are_copied_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(gpu_blocks=4)
    first = engine.prompt("first", list(range(11)), seed=1)
    engine.manager.swap_out(first)
    meanwhile = Meanwhile(
        monkeypatch, engine.plane.transfers, "submit", lambda: engine.prompt("second", list(range(20, 35)), seed=2)
    )
    engine.plane.run_copies()
    meanwhile.join()
    for found, expected in zip(engine.plane.read(first, 1), engine.values(11, seed=1), strict=True):
        assert torch.equal(found, expected)


def test_given_a_request_that_is_swapped_out_while_it_is_read_then_no_other_request_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(gpu_blocks=4)
    first = engine.prompt("first", list(range(11)), seed=1)

    def take_its_blocks() -> None:
        engine.manager.swap_out(first)
        engine.prompt("second", list(range(20, 35)), seed=2)

    meanwhile = Meanwhile(monkeypatch, data_plane, "read_values", take_its_blocks)
    found = engine.plane.read(first, 1)
    meanwhile.join()
    assert torch.equal(found[0], engine.values(11, seed=1)[0])
    assert torch.equal(engine.plane.read(first, 1)[0], engine.values(11, seed=1)[0])


def test_given_a_request_that_is_swapped_out_before_it_is_read_then_its_copies_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(gpu_blocks=4)
    first = engine.prompt("first", list(range(11)), seed=1)
    meanwhile = Meanwhile(
        monkeypatch, engine.plane.transfers, "submit", lambda: engine.manager.swap_out(first) and None
    )
    found = engine.plane.read(first, 1)
    meanwhile.join()
    assert torch.equal(found[0], engine.values(11, seed=1)[0])


def test_given_a_callback_of_a_resize_then_it_may_wait_for_another_thread_that_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    handle = engine.prompt("a", list(range(11)))
    found: list[Any] = []

    def read_elsewhere() -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(wait([pool.submit(engine.plane.read, handle, 0)], timeout=5).done)

    for size in (20, 10):
        stop = engine.manager.on_operation(read_elsewhere)
        engine.plane.resize(size)
        stop()
    assert [bool(done) for done in found] == [True, True]


def test_given_threads_with_requests_of_their_own_then_each_reads_what_it_wrote(eager_thread_switches: None) -> None:
    engine = Engine(gpu_blocks=6, host_blocks=12, disk_blocks=0, enable_prefix_caching=False)

    def live(name: str) -> None:
        for _ in range(40):
            k, v = torch.randn(2, 7, HEADS, DIM).bfloat16()
            try:
                handle = engine.manager.allocate(name, num_tokens=7)
            except OutOfBlocksError:
                continue
            engine.plane.write(engine.manager.slot_mapping([handle], 0, 7), k, v, 1)
            engine.manager.mark_written(handle, 7)
            with suppress(OutOfBlocksError):
                engine.manager.swap_out(handle)
            assert torch.equal(engine.plane.read(handle, 1)[0], k)
            assert torch.equal(engine.plane.read(handle, 1)[1], v)
            with suppress(OutOfBlocksError, SequenceStateError):
                engine.manager.swap_in(handle)
                assert torch.equal(engine.plane.read(handle, 1)[0], k)
            engine.manager.free(handle)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(live, name) for name in "abcd"]:
            done.result()
    engine.manager.check()
