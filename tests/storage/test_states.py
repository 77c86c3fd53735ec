"""States in slots: exact bytes, parts that do not touch each other, copies, tiers and checksums as for blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvpool import CopyKind, CopyOp, DType, LayerSpec, StatePart, StateSpec, Tier  # noqa: E402
from kvpool.config import KVCacheConfig, PoolSpec  # noqa: E402
from kvpool.errors import ChecksumError, InvalidArgumentError  # noqa: E402
from kvpool.storage import BlockStore, DiskStore, GroupLayout, StateLayout, StateSlots, TransferEngine  # noqa: E402
from kvpool.storage.moving import read_out, write_in  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU, HOST, DISK = Tier.GPU, Tier.HOST, Tier.DISK
DELTA = StateSpec((StatePart("conv", (5, 3), DType.BFLOAT16), StatePart("recurrent", (2, 3, 4), DType.FLOAT32)))
SHORT = StateSpec((StatePart("conv", (7, 2), DType.FLOAT16),))
SPECS = {4: SHORT, 1: DELTA, 6: DELTA}
PARTS = [(layer, part) for layer in sorted(SPECS) for part in SPECS[layer].parts]
NUM_SLOTS = 6


class Group(NamedTuple):
    """What transfers ask of a layer group."""

    pool: int = 0


class States:
    """Slots on every tier; on the GPU tier each element is its own number."""

    def __init__(self, device: str, **options: Any) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
        layout = StateLayout(SPECS)
        pool = PoolSpec(0, layout.block_bytes, (0,), dict.fromkeys((GPU, HOST, DISK), NUM_SLOTS))
        gpu = self.device if device == "cuda" else None
        self.store = BlockStore(pool, GPU, {0: layout}, device=self.device)
        self.host = BlockStore(pool, HOST, {0: layout}, gpu=gpu)
        self.stores: dict[Any, Any] = {(0, GPU): self.store, (0, HOST): self.host, (0, DISK): DiskStore(pool)}
        self.engine = TransferEngine(self.stores, [Group()], self.device, **options)  # type: ignore[list-item]
        self.store.data.zero_()
        self.slots = StateSlots(self.store)

    def ids(self, *slots: int) -> Any:
        return torch.tensor(slots, device=self.device)

    def values(self, layer: int, part: StatePart, slots: int = 1) -> Any:
        """Values of a part, other ones in each part and slot, which every dtype can hold."""
        number = PARTS.index((layer, part))
        count = slots * int(np.prod(part.shape))
        return (torch.arange(count, device=self.device) % 23 + 30 * number).view(slots, *part.shape)

    def fill(self, *slots: int) -> None:
        for layer, part in PARTS:
            self.slots.scatter(layer, part.name, self.ids(*slots), self.values(layer, part, len(slots)))

    def holds(self, slot: int, like: int = 0) -> bool:
        """Whether a slot holds what `fill` wrote into its slot number `like`."""
        return all(
            torch.equal(
                self.slots.gather(layer, part.name, self.ids(slot))[0].double(),
                self.values(layer, part, like + 1)[like].double(),
            )
            for layer, part in PARTS
        )

    def copy(self, source: Tier, target: Tier, src: list[int], dst: list[int]) -> Any:
        pairs = np.array(src, np.int32), np.array(dst, np.int32)
        return self.engine.submit([CopyOp(CopyKind.COPY_ON_WRITE, 0, source, target, *pairs)])

    def close(self) -> None:
        self.engine.close()
        for store in self.stores.values():
            store.close()


@pytest.fixture(params=DEVICES)
def states(request: pytest.FixtureRequest) -> Any:
    made = States(request.param, checksums=True)
    yield made
    made.close()


def test_a_slot_takes_the_bytes_of_its_states(states: States) -> None:
    assert states.store.block_bytes == 2 * DELTA.bytes + SHORT.bytes == 2 * (32 + 96) + 32
    assert states.store.num_bytes == NUM_SLOTS * states.store.block_bytes
    for (layer, name), view in states.store.views(0).items():
        (part,) = (part for part in SPECS[layer].parts if part.name == name)
        assert view.shape == (NUM_SLOTS, *part.shape)
        assert view[0].is_contiguous()
        assert view.data_ptr() % 16 == states.store.data.data_ptr() % 16


def test_parts_do_not_touch_each_other(states: States) -> None:
    states.fill(3, 1, 4)
    assert [states.holds(slot, like) for slot, like in ((3, 0), (1, 1), (4, 2))] == [True] * 3
    for layer, part in PARTS:
        assert not states.slots.gather(layer, part.name, states.ids(0, 2, 5)).any()


def test_gathered_states_are_copies_in_the_order_asked_for(states: States) -> None:
    states.fill(0, 1)
    part = DELTA.parts[1]
    gathered = states.slots.gather(1, "recurrent", states.ids(1, 0, 1))
    assert gathered.is_contiguous()
    assert torch.equal(gathered, states.values(1, part, 2)[[1, 0, 1]].float())
    gathered.zero_()
    assert states.holds(0, 0)


def test_states_are_stored_in_their_own_dtype(states: States) -> None:
    states.slots.scatter(4, "conv", states.ids(2), torch.full((1, 7, 2), 1 / 3, device=states.device))
    stored = states.slots.gather(4, "conv", states.ids(2))
    assert stored.dtype == torch.float16
    assert torch.equal(stored, torch.full_like(stored, 1 / 3))


def test_a_copied_slot_is_a_state_of_its_own(states: States) -> None:
    states.fill(0)
    states.copy(GPU, GPU, [0], [5]).wait()
    states.fill(1, 0)
    assert states.holds(5, 0)
    assert states.holds(0, 1)


@pytest.mark.parametrize("below", [HOST, DISK])
def test_states_go_down_a_tier_and_come_back(states: States, below: Tier) -> None:
    states.fill(2, 3)
    states.copy(GPU, below, [2, 3], [1, 0]).wait()
    states.store.data.fill_(255)
    states.copy(below, GPU, [0, 1], [4, 5]).wait()
    assert states.holds(4, 1)
    assert states.holds(5, 0)


def test_a_state_that_changed_below_is_noticed(states: States) -> None:
    states.fill(0)
    states.copy(GPU, HOST, [0], [0]).wait()
    states.host.data[0, 33] ^= 1
    with pytest.raises(ChecksumError):
        states.copy(HOST, GPU, [0], [1]).wait()


def test_whole_states_leave_for_keyed_tiers_as_bytes(states: States) -> None:
    states.fill(1, 2)
    on_gpu = states.device.type == "cuda"
    rows = torch.empty((2, states.store.block_bytes), dtype=torch.uint8, pin_memory=on_gpu)
    link: Any = torch.cuda.Stream() if on_gpu else None
    read_out(states.store, np.array([2, 1], np.int32), rows, link)()
    write_in(states.store, np.array([4, 5], np.int32), rows, None)()
    assert states.holds(4, 1)
    assert states.holds(5, 0)


def test_a_resized_store_keeps_its_states(states: States) -> None:
    states.fill(0)
    states.store.resize(NUM_SLOTS + 3)
    assert states.holds(0, 0)
    states.fill(NUM_SLOTS + 2)
    assert states.holds(NUM_SLOTS + 2, 0)


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([-2], [0], r"sources \[-2\] are not all among the 6 slots"),
        ([NUM_SLOTS], [0], "sources"),
        ([0], [-1], "targets"),
        ([0], [NUM_SLOTS], "targets"),
        ([0, 1], [2, 2], "name a slot twice"),
        ([0, 1], [2, 0], "slot 0 is read for one sequence and written for another"),
    ],
)
def test_slots_that_a_step_cannot_use_are_refused(sources: list[int], targets: list[int], message: str) -> None:
    states = States("cpu")
    with pytest.raises(InvalidArgumentError, match=message):
        states.slots.check(np.array(sources, np.int32), np.array(targets, np.int32))
    states.close()


def test_sequences_may_begin_from_one_state_and_go_on_in_place() -> None:
    states = States("cpu")
    states.slots.check(np.array([0, 0, -1, 3], np.int32), np.array([1, 2, 4, 3], np.int32))
    states.slots.check(np.array([0, 0], np.int32), np.array([1, 2], np.int32))
    with pytest.raises(InvalidArgumentError, match="slot 0"):
        states.slots.check(np.array([0, 0], np.int32), np.array([0, 2], np.int32))
    states.close()


def test_keys_and_values_are_no_states() -> None:
    config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], 4, gpu_blocks=2)
    store = BlockStore(config.pools[0], GPU, {0: GroupLayout(config.groups[0])})
    with pytest.raises(InvalidArgumentError, match="keeps keys and values"):
        StateSlots(store)
