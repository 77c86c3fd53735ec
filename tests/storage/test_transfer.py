"""The transfer engine: order, joining, hazards, failures, checksums."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool import CopyKind, CopyOp, KVCacheConfig, LayerSpec, Tier  # noqa: E402
from kvpool.errors import ChecksumError, InvalidArgumentError, TransferError  # noqa: E402
from kvpool.storage import BlockStore, DiskStore, GroupLayout, TransferEngine  # noqa: E402
from kvpool.storage.transfer import block_checksums  # noqa: E402
from kvpool.storage.transfer_steps import plan_steps  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU, HOST, DISK = Tier.GPU, Tier.HOST, Tier.DISK
NUM_BLOCKS = 8
CONFIG = KVCacheConfig(
    [LayerSpec(kv_heads=2, head_dim=8)] * 3, 4, gpu_blocks=NUM_BLOCKS, host_blocks=NUM_BLOCKS, disk_blocks=NUM_BLOCKS
)


class Cache:
    """Stores of every tier whose blocks hold their own number plus 16 times their tier, and an engine."""

    def __init__(self, device: str, **options: Any) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        pool, layouts = CONFIG.pools[0], {0: GroupLayout(CONFIG.groups[0])}
        gpu = self.device if device == "cuda" else None
        self.gpu = BlockStore(pool, GPU, layouts, device=self.device)
        self.host = BlockStore(pool, HOST, layouts, gpu=gpu)
        self.disk = DiskStore(pool)
        self.stores: dict[Any, Any] = {(0, GPU): self.gpu, (0, HOST): self.host, (0, DISK): self.disk}
        for tier in (GPU, HOST, DISK):
            for block in range(NUM_BLOCKS):
                self.fill(tier, block, block + 16 * tier)
        self.engine = TransferEngine(self.stores, CONFIG.groups, self.device, **options)

    def fill(self, tier: Tier, block: int, value: int) -> None:
        store = self.stores[0, tier]
        if tier is DISK:
            store.write(np.array([block], np.int32), [np.full(store.block_bytes, value, np.uint8)])
        else:
            store.data[block] = value

    def values(self, tier: Tier) -> list[int]:
        """The value of each block; 255 where its bytes differ."""
        store = self.stores[0, tier]
        if tier is DISK:
            rows = [np.empty(store.block_bytes, np.uint8) for _ in range(NUM_BLOCKS)]
            store.read(np.arange(NUM_BLOCKS, dtype=np.int32), rows)
            data = np.stack(rows)
        else:
            data = store.data.cpu().numpy()
        return [int(row[0]) if (row == row[0]).all() else 255 for row in data]

    def close(self) -> None:
        self.engine.close()
        for store in self.stores.values():
            store.close()


@pytest.fixture(params=DEVICES)
def cache(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made = Cache(request.param)
    yield made
    made.close()


def op(
    source: Tier, target: Tier, src: list[int], dst: list[int], num_tokens: int | None = None, **changes: Any
) -> CopyOp:
    made = CopyOp(CopyKind.OFFLOAD, 0, source, target, np.array(src, np.int32), np.array(dst, np.int32), num_tokens)
    return made._replace(**changes)


@pytest.mark.parametrize("target", [GPU, HOST, DISK])
@pytest.mark.parametrize("source", [GPU, HOST, DISK])
def test_given_blocks_when_they_move_between_any_two_tiers_then_they_arrive_and_the_source_stays(
    cache: Cache, source: Tier, target: Tier
) -> None:
    before = cache.values(source)
    cache.engine.submit([op(source, target, [5, 1], [2, 7])]).wait()
    found = cache.values(target)
    assert [found[2], found[7]] == [5 + 16 * source, 1 + 16 * source]
    assert [found[0], found[3]] == [16 * target, 3 + 16 * target]
    if source is not target:
        assert cache.values(source) == before


@pytest.mark.parametrize("source", [GPU, HOST, DISK])
def test_given_a_copy_of_the_first_tokens_then_the_others_of_the_target_are_untouched(
    cache: Cache, source: Tier
) -> None:
    cache.engine.submit([op(source, GPU, [5], [2], 3)]).wait()
    view = cache.gpu.layer_cache(0, 2)
    assert (view["k"].data[2, :3].contiguous().view(torch.uint8) == 5 + 16 * source).all()
    assert (view["k"].data[2, 3].contiguous().view(torch.uint8) == 2).all()


def test_given_operations_that_depend_on_each_other_then_they_run_in_order(cache: Cache) -> None:
    cache.engine.submit(
        [
            op(GPU, HOST, [0], [0]),  # leaves
            op(GPU, GPU, [1], [0]),  # its place is taken,
            op(GPU, GPU, [0], [2]),  # copied from,
            op(HOST, DISK, [0], [4]),  # what left goes further down
            op(GPU, HOST, [2], [0]),  # and makes room
            op(DISK, GPU, [4], [3]),  # and comes back
            op(HOST, GPU, [0], [5]),
        ]
    ).wait()
    found = cache.values(GPU)
    assert [found[0], found[2], found[3], found[5]] == [1, 1, 0, 1]


def test_given_a_long_chain_between_all_tiers_then_the_last_block_holds_the_first_bytes(cache: Cache) -> None:
    chain = [(GPU, HOST), (HOST, DISK), (DISK, GPU), (GPU, DISK), (DISK, HOST), (HOST, GPU)]
    ops = [op(a, b, [i % NUM_BLOCKS], [(i + 1) % NUM_BLOCKS]) for i, (a, b) in enumerate(chain * 3)]
    cache.engine.submit(ops, overlap=True).wait()
    assert cache.values(GPU)[len(ops) % NUM_BLOCKS] == 0


def test_given_operations_in_a_row_then_independent_ones_are_joined_and_dependent_ones_are_not() -> None:
    stores = Cache("cpu").stores

    def sizes(*ops: CopyOp) -> list[int]:
        return [len(step.src) for step in plan_steps(ops, stores, CONFIG.groups)]

    assert sizes(op(GPU, HOST, [0, 1], [3, 2]), op(GPU, HOST, [1, 2], [4, 5])) == [4]
    assert sizes(op(GPU, GPU, [0], [1], 2), op(GPU, GPU, [0], [2], 3)) == [2]
    assert sizes(op(GPU, GPU, [0], [1]), op(GPU, GPU, [1], [2])) == [1, 1]  # reads what was written
    assert sizes(op(GPU, GPU, [0, 3], [1, 4]), op(GPU, GPU, [5], [0])) == [2, 1]  # writes what was read
    assert sizes(op(GPU, HOST, [0], [1]), op(GPU, HOST, [2], [1])) == [1, 1]  # writes what was written
    assert sizes(op(GPU, GPU, [0], [1]), op(GPU, GPU, [2], [3], 2)) == [1, 1]  # a part of a block
    assert sizes(op(GPU, HOST, [0], [1]), op(HOST, GPU, [1], [0])) == [1, 1]
    assert sizes(op(GPU, HOST, [], [])) == []


def test_given_many_blocks_over_the_link_then_each_step_has_a_piece_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = Cache("cpu").stores
    monkeypatch.setattr("kvpool.storage.transfer_steps.PIECE_BYTES", 3 * CONFIG.pools[0].block_bytes)

    def pieces(*ops: CopyOp) -> list[list[int]]:
        return [step.src.tolist() for step in plan_steps(ops, stores, CONFIG.groups)]

    assert pieces(op(GPU, HOST, [0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0])) == [[0, 1, 2], [3, 4, 5], [6]]
    assert pieces(op(HOST, GPU, [0, 1], [0, 1]), op(HOST, GPU, [2], [2]), op(HOST, GPU, [3], [3])) == [[0, 1, 2], [3]]
    assert pieces(op(GPU, GPU, [0, 1, 2, 3], [4, 5, 6, 7])) == [[0, 1, 2, 3]]  # no link
    (*_, last) = plan_steps([op(GPU, HOST, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])], stores, CONFIG.groups)
    assert [part.dst.tolist() for part in last.ops] == [[3, 4]]  # what is tried again if it fails
    assert pieces(op(GPU, HOST, [], [])) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(group=1), "layer group 1"),
        (dict(dst_tier=Tier.REMOTE), "REMOTE"),
        (dict(src=np.array([8, 0], np.int32)), "whose store has 8"),
        (dict(dst=np.array([-1, 0], np.int32)), "-1"),
        (dict(dst=np.array([1, 1], np.int32)), "distinct"),
        (dict(src=np.array([1], np.int32)), "as many"),
        (dict(src=np.array([], np.int32)), "as many"),
        (dict(dst=np.array([], np.int32)), "as many"),
        (dict(dst_tier=GPU, dst=np.array([1, 2], np.int32)), "same blocks"),
        (dict(num_tokens=5), "a block has 4"),
        (dict(num_tokens=0), "a block has 4"),
    ],
)
def test_given_a_wrong_operation_then_nothing_of_the_batch_is_carried_out(wrong: dict[str, Any], message: str) -> None:
    cache = Cache("cpu")
    good = op(GPU, HOST, [0, 1], [3, 4])
    with pytest.raises(InvalidArgumentError, match=message):
        cache.engine.submit([good, good._replace(**wrong)])
    assert cache.values(HOST) == [16 + block for block in range(NUM_BLOCKS)]
    cache.close()


class Gate:
    """Holds the disk worker inside a transfer until it is told to go on."""

    def __init__(self, disk: DiskStore, error: Exception | None = None) -> None:
        self.go, self.error, self._write = threading.Event(), error, disk.write
        disk.write = self  # type: ignore[assignment]

    def __call__(self, *arguments: Any) -> None:
        assert self.go.wait(30)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self._write(*arguments)


def test_given_a_transfer_under_way_then_it_is_not_done_and_its_callback_comes_when_it_is() -> None:
    cache = Cache("cpu")
    gate, called = Gate(cache.disk), threading.Event()
    transfer = cache.engine.submit([op(HOST, DISK, [1], [2])])
    transfer.add_callback(lambda done: called.set())
    assert not transfer.done()
    assert not called.is_set()
    gate.go.set()
    transfer.wait()
    assert called.wait(30)
    assert transfer.done()
    cache.close()


def test_given_transfers_of_other_blocks_to_disk_then_they_run_one_after_the_other() -> None:
    cache, inside, most, second = Cache("cpu"), 0, 0, threading.Event()
    write = cache.disk.write

    def count(*arguments: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if inside == 2:
            second.set()
        second.wait(0.2)  # so long the other one may come in, if it can
        write(*arguments)
        inside -= 1

    cache.disk.write = count  # type: ignore[method-assign]
    for block in (1, 2):
        cache.engine.submit([op(HOST, DISK, [block], [block])])
    cache.engine.wait_for(cache.disk)
    assert most == 1
    assert cache.values(DISK)[1:3] == [16 + 1, 16 + 2]
    cache.close()


def test_given_a_transfer_that_is_done_then_a_callback_is_called_at_once_and_may_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = Cache("cpu")
    cache.engine.submit([op(GPU, HOST, [1], [2])]).add_callback(lambda done: 1 / 0)
    assert "callback raised" in caplog.text
    cache.close()


def test_given_a_block_that_a_transfer_still_reads_when_another_overwrites_it_then_it_waits() -> None:
    cache = Cache("cpu")
    gate = Gate(cache.disk)
    cache.engine.submit([op(HOST, DISK, [1], [2])])
    threading.Timer(0, gate.go.set).start()  # let it go only once the next one is on its way
    cache.engine.submit([op(GPU, HOST, [5], [1])])
    cache.engine.wait_for(cache.disk)
    assert cache.values(DISK)[2] == 16 + 1
    assert cache.values(HOST)[1] == 5
    cache.close()


def test_given_blocks_that_come_from_disk_when_they_are_about_to_be_read_then_the_reader_waits() -> None:
    cache = Cache("cpu")
    gate = Gate(cache.disk)
    cache.engine.submit([op(HOST, DISK, [1], [2]), op(DISK, GPU, [2], [4])], overlap=True)
    cache.engine.before_compute(0, written=np.array([5], np.int32), read=np.array([6], np.int32))  # others do not wait
    assert cache.values(GPU)[4] == 4
    gate.go.set()
    cache.engine.before_compute(0, written=np.array([5], np.int32), read=np.array([4], np.int32))
    assert cache.values(GPU)[4] == 16 + 1
    cache.close()


def test_given_transfers_that_overlap_when_a_later_one_does_not_then_it_waits_for_all() -> None:
    cache = Cache("cpu")
    gate = Gate(cache.disk)
    cache.engine.submit([op(HOST, DISK, [1], [2]), op(DISK, GPU, [2], [4])], overlap=True)
    gate.go.set()
    cache.engine.submit([])
    assert cache.values(GPU)[4] == 16 + 1
    cache.close()


@pytest.mark.gpu
def test_given_blocks_on_their_way_to_the_host_when_the_cpu_moves_them_there_then_it_waits() -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=8, head_dim=128)] * 32, 16, gpu_blocks=300, host_blocks=600)
    layouts, device = {0: GroupLayout(config.groups[0])}, torch.device("cuda", 0)
    gpu = BlockStore(config.pools[0], GPU, layouts, device=device)
    host = BlockStore(config.pools[0], HOST, layouts, gpu=device)
    engine = TransferEngine({(0, GPU): gpu, (0, HOST): host}, config.groups, device)
    gpu.data.fill_(7)
    low, high = list(range(300)), list(range(300, 600))
    engine.submit([op(GPU, HOST, low, low), op(HOST, HOST, low, high)]).wait()
    assert (host.data[300:] == 7).all()
    engine.close()
    host.close()


@pytest.mark.gpu
def test_given_an_announced_step_then_transfers_of_other_blocks_run_beside_it_and_those_of_its_own_behind_it() -> None:
    cache = Cache("cuda")
    cache.engine.submit([op(GPU, HOST, [0], [0]), op(HOST, GPU, [0], [0])], overlap=True).wait()  # made on first use
    cache.engine.announce({0: [np.array([1, 2], np.int32)]})
    torch.cuda._sleep(2_000_000_000)
    over = torch.cuda.current_stream().record_event()
    cache.engine.submit([op(GPU, HOST, [3], [4]), op(HOST, GPU, [5], [6])], overlap=True).wait()
    assert not over.query()
    cache.engine.submit([op(HOST, GPU, [5], [2])], overlap=True).wait()
    assert over.query()
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["never announced", "announced as any block", "without overlap"])
def test_given_a_step_that_may_touch_any_block_then_transfers_wait_for_it(how: str) -> None:
    cache = Cache("cuda")
    if how != "never announced":
        cache.engine.announce({0: [np.array([1], np.int32)]})
    if how == "announced as any block":
        cache.engine.announce(None)
    if how == "without overlap":
        cache.engine.submit([])
    torch.cuda._sleep(500_000_000)
    over = torch.cuda.current_stream().record_event()
    cache.engine.submit([op(HOST, GPU, [5], [6])], overlap=True).wait()
    assert over.query()
    cache.close()


def test_given_a_disk_that_fails_then_the_source_is_kept_until_it_is_tried_again() -> None:
    cache = Cache("cpu")
    gate = Gate(cache.disk, TransferError("no space left"))
    gate.go.set()
    transfer = cache.engine.submit([op(HOST, DISK, [1], [2])])
    with pytest.raises(TransferError, match="no space"):
        transfer.wait()
    overwriting = [op(GPU, HOST, [4], [6]), op(GPU, HOST, [5], [1])]
    with pytest.raises(TransferError, match="no space") as caught:
        cache.engine.submit([op(GPU, GPU, [0], [3]), *overwriting])
    assert caught.value.remaining == overwriting  # joined: neither was carried out
    assert cache.values(HOST)[1] == 16 + 1
    cache.engine.retry_failed().wait()
    cache.engine.submit(caught.value.remaining).wait()
    assert cache.values(DISK)[2] == 16 + 1
    assert cache.values(HOST)[1] == 5
    cache.close()


def test_given_a_failed_transfer_then_its_callback_is_told_all_the_same() -> None:
    cache = Cache("cpu")
    gate, called = Gate(cache.disk, TransferError("broken")), threading.Event()
    transfer = cache.engine.submit([op(HOST, DISK, [1], [2])])
    transfer.add_callback(lambda done: called.set())
    gate.go.set()
    assert called.wait(30)
    cache.close()


# --- checksums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [8, 12, 7, 4096])
def test_given_two_blocks_that_differ_then_their_checksums_do(block_bytes: int) -> None:
    data = torch.randint(0, 256, (1, block_bytes), dtype=torch.uint8).repeat(4, 1)
    data[1, -1] ^= 1
    data[2] = data[2].roll(1)
    sums = block_checksums(data, np.arange(4, dtype=np.int32)).tolist()
    assert sums[0] == sums[3]
    assert len({*sums[:3]}) == (3 if (data[2] != data[0]).any() else 2)


@pytest.fixture(params=DEVICES)
def checked(request: pytest.FixtureRequest) -> Iterator[Cache]:
    made = Cache(request.param, checksums=True)
    yield made
    made.close()


def test_given_bytes_that_change_on_the_host_then_their_return_is_an_error(checked: Cache) -> None:
    checked.engine.submit([op(GPU, HOST, [1, 2], [3, 4])]).wait()
    checked.host.data[4, 17] ^= 1
    transfer = checked.engine.submit([op(HOST, GPU, [3, 4], [5, 6])])
    with pytest.raises(ChecksumError, match=r"blocks \[4\] of pool 0 came back from HOST"):
        transfer.wait()


def test_given_bytes_that_change_on_disk_then_their_return_is_an_error(checked: Cache) -> None:
    checked.engine.submit([op(GPU, HOST, [1, 2], [3, 4]), op(HOST, DISK, [3, 4], [0, 1])]).wait()
    checked.engine.submit([op(DISK, GPU, [0], [5])]).wait()
    checked.fill(DISK, 1, 99)
    with pytest.raises(ChecksumError, match=r"blocks \[1\] of pool 0 came back from DISK"):
        checked.engine.submit([op(DISK, GPU, [1], [7])]).wait()


def test_given_a_checksum_then_it_travels_through_all_tiers_with_its_block(checked: Cache) -> None:
    checked.engine.submit(
        [op(GPU, HOST, [1], [3]), op(HOST, HOST, [3], [5]), op(HOST, DISK, [5], [0]), op(DISK, HOST, [0], [7])]
    ).wait()
    checked.host.data[7, 0] ^= 1
    with pytest.raises(ChecksumError):
        checked.engine.submit([op(HOST, GPU, [7], [2])]).wait()


def test_given_blocks_whose_sum_nobody_took_then_they_are_not_verified(checked: Cache) -> None:
    checked.engine.submit([op(HOST, GPU, [3], [2])]).wait()
    assert checked.values(GPU)[2] == 16 + 3
