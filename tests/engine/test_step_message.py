"""Ranks read from a message exactly the step that rank 0 planned."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec
from kvpool.config import Tier
from kvpool.engine.rank_channel import SLOT_BYTES, SLOTS, StepMemory
from kvpool.engine.spans import Span
from kvpool.engine.step_message import GuessSteps, SentPictures, StepInputs, decode, encode, encode_guesses, make_lists
from kvpool.pools.pool import CopyKind, CopyOp
from kvpool.scheduling import BatchPlan, Request, Scheduler, SchedulerConfig

LAYERS = [LayerSpec(2, 16), LayerSpec(2, 16, window=20)]
ARRAYS = ("token_ids", "positions", "slots", "query_start", "kv_lengths", "num_samples", "num_drafts", "logits_indices")


def plans() -> list[BatchPlan]:
    """A chunk of prompts, prompts beside decoding sequences, and a step in which all decode."""
    manager = KVCacheManager(KVCacheConfig(LAYERS, block_size=4, gpu_blocks=64))
    scheduler = Scheduler(manager, SchedulerConfig(max_tokens_per_step=32, max_sequences=8))
    made = []
    for number, length in enumerate((45, 7, 10)):
        scheduler.add(Request(number, np.arange(length) + 100 * number, max_new_tokens=20))
    while not made or not made[-1].is_uniform:
        plan = scheduler.step()
        make_lists(plan, manager.config.groups)
        made.append(plan)
        scheduler.complete(plan, np.full(len(plan.sampling_rows), 7, np.int32))
    return made


def message(step: StepInputs) -> bytearray:
    return bytearray(encode(step, step.plan.batch, lambda count: np.empty(count, np.int32)))


def test_given_the_steps_of_a_scheduler_then_messages_hold_them() -> None:
    made = plans()
    assert len(made) > 2
    for plan in made:
        lists = plan.batch
        read = decode(message(StepInputs([], plan)))
        for name in ARRAYS:
            found, expected = getattr(read.plan, name), getattr(plan, name)
            np.testing.assert_array_equal(found, expected, name)
            assert found.dtype == expected.dtype
        for group in range(2):
            for found, expected in zip(read.plan.batch.csr(group), lists.csr(group), strict=True):
                assert np.array_equal(found, expected)
        same = ("number", "num_decode", "num_tokens", "is_uniform", "is_empty")
        assert [getattr(read.plan, name) for name in same] == [getattr(plan, name) for name in same]
        assert (read.copies, *read[2:]) == ([], False, None, None, None, False, False)


def test_given_copies_and_kept_tokens_then_the_message_holds_them() -> None:
    plan = plans()[0]
    blocks = np.array([3, 5, 8], np.int32)
    copies = [
        CopyOp(CopyKind.SWAP_OUT, 1, Tier.GPU, Tier.HOST, blocks, blocks + 1),
        CopyOp(CopyKind.COPY_ON_WRITE, 0, Tier.GPU, Tier.GPU, blocks[:1], blocks[2:], 3),
    ]
    seen = SentPictures(np.stack([plan.positions, plan.positions + 3]), [Span(1, 4, 9)], (1, 5, 64))
    read = decode(message(StepInputs(copies, plan, True, np.array([0, 4]), plan.positions - 1, seen, True, True)))
    np.testing.assert_array_equal(read.pictures.positions, seen.positions)
    assert read.pictures[1:] == seen[1:]
    assert read.adapter_slots.tolist() == (plan.positions - 1).tolist()
    assert (read.launch, read.unknown, read.by_draft) == (True, True, True)
    assert read.keep.tolist() == [0, 4]
    assert [(*op[:4], op.src.tolist(), op.dst.tolist(), op.num_tokens) for op in read.copies] == [
        (*op[:4], op.src.tolist(), op.dst.tolist(), op.num_tokens) for op in copies
    ]


def test_given_shared_memory_then_ranks_read_from_it_what_rank_0_wrote_and_slots_wait_for_all() -> None:
    memory = StepMemory(4)
    if memory.descriptor < 0:
        pytest.skip("needs memory without a file: Linux")
    others = [StepMemory(4, rank, os.dup(memory.descriptor)) for rank in (1, 2)]
    for rank in (1, 2):
        memory.share(rank)  # rank 3 is on another machine
    assert memory.take(SLOT_BYTES // 4 + 1) is None
    for number in range(2 * SLOTS):
        taken = memory.take(5)
        assert taken is not None
        assert taken[0] == number
        taken[1][:] = np.arange(5) + number
        for other in others:
            assert np.frombuffer(other.read(number, 5), np.int32).tolist() == list(range(number, number + 5))
    for _ in range(SLOTS):
        assert memory.take(1) is not None
    others[0].read(2 * SLOTS, 1)
    assert memory.take(1) is None  # rank 2 has not read the oldest
    others[1].read(2 * SLOTS, 1)
    assert memory.take(1) is not None
    for each in (memory, *others):
        each.close()


@pytest.mark.parametrize("num_steps", [1, 2])
def test_given_steps_that_guess_then_the_message_holds_them(num_steps: int) -> None:
    plan = plans()[1]
    positions = [np.append(plan.kv_lengths, plan.kv_lengths[0] - 1), plan.kv_lengths + 1][:num_steps]
    slots = np.arange(2 * sum(map(len, positions)), dtype=np.int32).reshape(2, -1)
    steps = GuessSteps(positions, slots, np.array([0]), plan.batch)
    read = decode(bytearray(encode_guesses(steps, plan.batch, lambda count: np.empty(count, np.int32))))
    for found, expected in zip((*read.positions, *read[1:3]), (*steps.positions, *steps[1:3]), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    for group in range(2):
        for found, expected in zip(read.batch.csr(group), plan.batch.csr(group), strict=True):
            assert np.array_equal(found, expected)
