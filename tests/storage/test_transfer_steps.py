"""Which transfers must be waited for: found by counts per block, compared with asking every transfer."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from kvpool import CopyKind, CopyOp, KVCacheConfig, LayerSpec, Tier
from kvpool.storage import BlockStore, GroupLayout
from kvpool.storage.transfer_steps import DiskEnd, StepInFlight, StepsInFlight, Stores, TransferStep, plan_steps

NUM_BLOCKS = 12
CONFIG = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=4)], 4, gpu_blocks=NUM_BLOCKS, host_blocks=NUM_BLOCKS)
TIERS = st.sampled_from([Tier.GPU, Tier.HOST])
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=4, unique=True)


def make_stores() -> Stores:
    layouts = {0: GroupLayout(CONFIG.groups[0])}
    return {(0, tier): BlockStore(CONFIG.pools[0], tier, layouts) for tier in (Tier.GPU, Tier.HOST)}


STORES = make_stores()


class End:
    """The end of a transfer, as a test wants it."""

    def __init__(self) -> None:
        self.is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True

    order = wait


def make_step(stores: Stores, source: Tier, target: Tier, src: list[int], dst: list[int]) -> TransferStep:
    op = CopyOp(CopyKind.ONBOARD, 0, source, target, np.array(src, np.int32), np.array(dst, np.int32))
    (step,) = plan_steps([op], stores, CONFIG.groups)
    return step


@st.composite
def steps(draw: st.DrawFn) -> TransferStep:
    source, target = draw(TIERS), draw(TIERS)
    src = draw(BLOCKS)
    free = [block for block in range(NUM_BLOCKS) if source != target or block not in src]
    dst = draw(st.permutations(free))[: len(src)]
    return make_step(STORES, source, target, src, dst)


@given(st.lists(st.one_of(steps(), st.integers(0, 5)), max_size=12), steps(), TIERS, BLOCKS, st.none() | BLOCKS)
def test_what_must_be_waited_for_is_what_every_transfer_says_of_itself(
    history: list[TransferStep | int], new: TransferStep, tier: Tier, written: list[int], read: list[int] | None
) -> None:
    in_flight = StepsInFlight()
    for event in history:
        if isinstance(event, TransferStep):
            in_flight.add(StepInFlight(event, End()))
            continue
        for item in [*in_flight][event : event + 1]:
            item.completion.wait()
        in_flight.forget_done()
        assert not any(end.done() for _, end in in_flight)
    assert in_flight.before(new) == [end for step, end in in_flight if step.conflicts(new)]
    store, writes = STORES[0, tier], np.array(written, np.int32)
    reads = None if read is None else np.array(read, np.int32)
    assert in_flight.before_work(store, writes, reads) == [
        end
        for step, end in in_flight
        if step.writes(store, writes) or step.reads(store, writes) or step.writes(store, reads)
    ]
    assert in_flight.touching(store) == [end for step, end in in_flight if store in (step.source, step.target)]


def test_given_many_pieces_that_do_not_meet_then_none_is_compared_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def conflicts(self: TransferStep, later: TransferStep) -> bool:
        raise AssertionError("compared with a piece that it does not meet")

    monkeypatch.setattr(TransferStep, "conflicts", conflicts)
    in_flight = StepsInFlight()
    for block in range(NUM_BLOCKS):
        piece = make_step(STORES, Tier.HOST, Tier.GPU, [block], [block])
        assert in_flight.before(piece) == []
        in_flight.add(StepInFlight(piece, End()))
    assert len(in_flight) == NUM_BLOCKS


def test_given_steps_that_are_over_then_those_that_failed_are_kept_until_they_are_taken() -> None:
    stores, in_flight = make_stores(), StepsInFlight()
    made = [make_step(stores, Tier.HOST, Tier.GPU, [number], [number]) for number in range(3)]
    futures: list[Future[None]] = [Future() for _ in made]
    for step, future in zip(made, futures, strict=True):
        in_flight.add(StepInFlight(step, DiskEnd(future)))
    futures[0].set_result(None)
    futures[1].set_exception(OSError("a full disk"))
    in_flight.forget_done()
    assert [step for step, _ in in_flight] == made[1:]
    assert in_flight.take_failed() == made[1:2]
    assert [step for step, _ in in_flight] == made[2:]


def test_given_a_store_that_grew_then_its_new_blocks_are_met_by_nobody() -> None:
    stores = make_stores()
    in_flight = StepsInFlight()
    in_flight.add(StepInFlight(make_step(stores, Tier.HOST, Tier.GPU, [1], [2]), End()))
    gpu = stores[0, Tier.GPU]
    gpu.resize(2 * NUM_BLOCKS)
    assert in_flight.before(make_step(stores, Tier.HOST, Tier.GPU, [3], [2 * NUM_BLOCKS - 1])) == []
    assert len(in_flight.before_work(gpu, np.array([2], np.int32), None)) == 1
