"""Layers that keep a state: where steps read and leave it, which states are kept, and what they let others reuse."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool import DType, KVCacheConfig, KVCacheHandle, KVCacheManager, LayerSpec, StatePart, StateSpec, Tier
from kvpool.errors import ConfigError, InvalidArgumentError, OutOfBlocksError, SequenceStateError
from kvpool.pools.pool import CopyKind

SIZE = 4
ATTENDS = LayerSpec(kv_heads=1, head_dim=8)
KEEPS = StateSpec((StatePart("conv", (9, 4), DType.FLOAT32),))
STATES = 1  # the group of the layers that keep a state


def make(gpu: tuple[int, int] = (32, 12), **options: Any) -> KVCacheManager:
    config = KVCacheConfig([ATTENDS, KEEPS, KEEPS], SIZE, gpu_blocks=gpu, **{"watermark": 0.0} | options)
    return KVCacheManager(config)


def compute(manager: KVCacheManager, handle: KVCacheHandle, stop: int) -> list[tuple[int, int, int]]:
    """Computes a prompt up to `stop` in the steps that the manager asks for: (end, source, target) of each."""
    steps = []
    while (start := handle.num_committed) < stop:
        end = manager.step_end(handle, start, stop)
        manager.extend(handle, max(0, end - handle.num_reserved))
        places = manager.state_places([handle], start, end)
        steps.append((end, int(places.sources[0]), int(places.targets[0])))
        manager.commit(handle, end - start)
        manager.check()
    return steps


def decode(manager: KVCacheManager, handle: KVCacheHandle, tokens: list[int]) -> None:
    for token in tokens:
        manager.extend(handle)
        manager.commit(handle, [token])
        manager.check()


def finish(manager: KVCacheManager, name: str, prompt: list[int], answer: list[int] = ()) -> None:  # type: ignore[assignment]
    handle = manager.allocate(name, prompt, reserve=0)
    compute(manager, handle, len(prompt))
    decode(manager, handle, list(answer))
    manager.free(handle)


def test_all_layers_that_keep_a_state_are_one_group_whose_block_is_a_checkpoint() -> None:
    group = make().config.groups[STATES]
    assert (group.layers, group.block_bytes, group.bytes_per_token) == ((1, 2), 2 * KEEPS.bytes, 0)
    assert [group.max_live_blocks(n) for n in (0, 1, 4, 5, 4096)] == [0, 1, 1, 2, 2]
    with pytest.raises(InvalidArgumentError, match="keep a state"):
        _ = group.attention


def test_a_prompt_is_computed_in_steps_that_leave_a_checkpoint_before_its_last_block() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(19)), reserve=0)
    steps = compute(manager, handle, 19)
    assert [end for end, _, _ in steps] == [16, 19]
    assert steps[0][1] == -1  # it begins
    assert steps[1][1] == steps[0][2] != steps[1][2]  # the checkpoint is read, and stays as it is


def test_layers_that_keep_a_state_have_no_slots_for_tokens() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(5)))
    slots = manager.slot_mapping([handle], 0, 5)
    assert (slots[1 - STATES] >= 0).all()
    assert (slots[STATES] == -1).all()


def test_a_step_inside_a_block_replaces_the_state() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(5)), reserve=0)
    compute(manager, handle, 5)
    manager.extend(handle)
    places = manager.state_places([handle], 5, 6)
    assert places.sources == places.targets


def test_a_decoding_sequence_keeps_the_states_behind_its_prompt_and_its_last_block() -> None:
    manager = make()
    handle = manager.allocate("a", [1, 2], reserve=0)
    compute(manager, handle, 2)
    for token in range(14):
        manager.extend(handle)
        manager.commit(handle, [token])
        pool = next(pool for pool in manager.stats().pools if pool.pool == 1 and pool.tier == Tier.GPU)
        assert pool.referenced <= 2
        assert pool.cached == 0
    manager.free(handle)
    assert manager.match_prefix([1, 2, *range(14), 9]).num_tokens == 16
    assert manager.match_prefix([1, 2, *range(11)]).num_tokens == 0


def test_a_sequence_behind_a_cached_prefix_drops_the_states_that_it_passes_too() -> None:
    manager = make()
    finish(manager, "a", list(range(9)))  # leaves one behind 8 tokens
    handle = manager.allocate("b", [*range(8), 20], reserve=0)
    compute(manager, handle, 9)
    decode(manager, handle, list(range(30, 45)))
    manager.free(handle)
    assert manager.stats().pool(STATES).cached == 2  # that one, and the last
    assert manager.match_prefix([*range(8), 20, *range(30, 45), 9]).num_tokens == 24


@pytest.mark.parametrize("how", ["read", "pinned"])
def test_a_passed_state_stays_while_it_is_read_or_pinned(how: str) -> None:
    manager = make()
    handle = manager.allocate("a", [1, 2], reserve=0)
    compute(manager, handle, 2)
    decode(manager, handle, [3, 4])
    if how == "read":
        manager.allocate("b", [1, 2, 3, 4, 5], reserve=0)
    else:
        manager.cache.pin([1, 2, 3, 4])
    decode(manager, handle, [6, 7, 8, 9])
    assert manager.match_prefix([1, 2, 3, 4, 5]).num_tokens == 4
    manager.check()


def test_a_prefix_with_more_states_below_than_the_gpu_holds_is_reused_in_part() -> None:
    manager = make(gpu=(64, 12), host_blocks=(64, 12), checkpoint_every=SIZE)
    prompt = list(range(34))
    for name, length in (("a", 16), ("b", 34)):
        finish(manager, name, prompt[:length])
    manager.cache.offload(4)  # the second half, with three states
    assert manager.match_prefix(prompt).tokens_by_tier == {Tier.GPU: 16, Tier.HOST: 12}
    manager.cache.resize(3, pool=STATES)
    assert manager.can_allocate(prompt).num_cached_tokens == 16
    assert manager.allocate("c", prompt).num_cached_tokens == 16
    manager.check()


def test_a_prompt_is_reused_up_to_the_last_checkpoint() -> None:
    manager = make()
    finish(manager, "a", list(range(19)))
    assert manager.match_prefix(list(range(19))).num_tokens == 16
    assert manager.match_prefix(list(range(15))).num_tokens == 0  # only behind 16 tokens a state was kept


def test_where_prompts_part_a_checkpoint_is_made_when_the_second_comes() -> None:
    manager = make()
    finish(manager, "a", list(range(20)))
    second = manager.allocate("b", [*range(9), *[7] * 11], reserve=0)
    assert second.num_cached_tokens == 0
    assert [end for end, _, _ in compute(manager, second, 20)] == [8, 16, 20]
    third = manager.allocate("c", [*range(9), *[6] * 3], reserve=0)
    assert third.num_cached_tokens == 8


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    manager = make()
    finish(manager, "a", list(range(10)), answer=[50, 51, 52, 53, 54])
    assert manager.match_prefix([*range(10), 50, 51, 52, 53, 54, 8, 8, 8]).num_tokens == 12


def test_checkpoint_every_keeps_more_of_a_prompt() -> None:
    manager = make(checkpoint_every=8)
    handle = manager.allocate("a", list(range(30)), reserve=0)
    assert [end for end, _, _ in compute(manager, handle, 30)] == [8, 16, 24, 28, 30]
    manager.free(handle)
    assert manager.match_prefix([*range(18), 99, 99]).num_tokens == 16


def test_a_step_that_does_not_end_where_a_place_was_leaves_no_checkpoint_there() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(4)))
    manager.extend(handle, 3)
    places = manager.state_places([handle], 0, 7)  # one step over both places
    manager.commit(handle, [0, 1, 2, 3, 70, 71, 72])
    manager.check()
    assert handle.block_ids(STATES).tolist() == [-1, int(places.targets[0])]
    manager.free(handle)
    assert manager.match_prefix([*range(4), 9]).num_tokens == 0


def test_a_fork_copies_the_state_before_either_writes_it() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(6)), reserve=0)
    compute(manager, handle, 6)
    (fork,) = manager.fork(handle, "b")
    manager.take_copies()
    manager.extend_batch([handle, fork])
    places = manager.state_places([handle, fork], 6, 7)
    assert len({*places.targets.tolist()}) == 2
    (copy,) = [op for op in manager.take_copies() if op.group == STATES]
    assert (copy.kind, copy.num_tokens) == (CopyKind.COPY_ON_WRITE, None)
    manager.check()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(8)), reserve=0)
    compute(manager, handle, 8)
    (fork,) = manager.fork(handle, "b")
    manager.extend_batch([handle, fork])
    places = manager.state_places([handle, fork], 8, 9)
    assert places.sources[0] == places.sources[1]
    assert len({*places.targets.tolist(), int(places.sources[0])}) == 3
    assert not [op for op in manager.take_copies() if op.group == STATES]


def test_a_sequence_goes_back_to_a_kept_state_and_to_no_other() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(10)), reserve=0)
    compute(manager, handle, 10)
    decode(manager, handle, [20, 21, 22, 23])
    with pytest.raises(SequenceStateError, match=r"states were kept behind these numbers of its 14 tokens: 8, 12$"):
        manager.rewind(handle, 1)
    manager.rewind(handle, 2)
    manager.check()
    assert handle.num_written == 12
    manager.extend(handle)
    places = manager.state_places([handle], 12, 13)
    assert places.sources != places.targets


def test_a_step_with_drafts_leaves_its_state_before_them() -> None:
    """Its places cross the end of a block, where the state stays as a checkpoint once the drafts are rewound."""
    manager = make()
    handle = manager.allocate("a", list(range(7)), reserve=0)
    compute(manager, handle, 7)
    manager.extend(handle, 4)  # one token and three drafts
    places = manager.state_places([handle], 7, 8)
    assert places.sources == places.targets
    manager.rewind(handle, 3)
    manager.commit(handle, [7])
    manager.check()
    manager.extend(handle, 3)
    following = manager.state_places([handle], 8, 9)
    assert following.sources == places.targets != following.targets  # the checkpoint is read, and stays as it is
    manager.rewind(handle, 3)
    manager.free(handle)
    assert manager.match_prefix(list(range(9))).num_tokens == 8
    manager.check()


def test_a_sequence_that_goes_back_to_a_kept_state_gives_the_blocks_behind_it_back() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(10)), reserve=0)
    compute(manager, handle, 10)
    decode(manager, handle, [20, 21, 22, 23])
    manager.rewind(handle, 2)
    assert handle.num_blocks == 3
    manager.check()


def test_places_that_were_not_written_can_be_given_back() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(6)), reserve=0)
    compute(manager, handle, 6)
    live = manager.extend(handle, 12) is not None and manager.state_places([handle], 6, 7).sources
    manager.rewind(handle, 11)
    manager.check()
    assert manager.state_places([handle], 6, 7).sources == live


def test_a_state_behind_published_blocks_stays_the_rows_own_when_places_behind_them_are_given_back() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(12)), reserve=0)
    manager.extend(handle, 10)
    state = manager.state_places([handle], 0, 8).targets
    manager.commit(handle, 8)  # publishes two blocks; the state behind them lies in the third column
    manager.rewind(handle, 2)
    assert handle.num_blocks == 3
    manager.check()
    manager.extend(handle, 2)
    following = manager.state_places([handle], 8, 10)
    assert following.sources == following.targets == state
    manager.free(handle)
    assert manager.match_prefix(list(range(12))).num_tokens == 0
    manager.check()


def test_swapping_brings_the_live_state_back() -> None:
    manager = make(host_blocks=(16, 4))
    handle = manager.allocate("a", list(range(10)), reserve=0)
    compute(manager, handle, 10)
    manager.swap_out(handle)
    manager.check()
    assert [op.num_blocks for op in manager.take_copies() if op.group == STATES] == [1]
    manager.swap_in(handle)
    manager.check()
    manager.extend(handle)
    assert manager.state_places([handle], 10, 11).sources[0] >= 0


def test_a_narrowed_sequence_comes_back_from_the_host_without_a_state() -> None:
    manager = make(host_blocks=(16, 4))
    handle = manager.allocate("a", list(range(10)), reserve=4, lookahead=2)
    manager.commit(handle, 4)
    manager.narrow(handle, 10)
    manager.swap_out(handle)
    manager.swap_in(handle)
    manager.check()
    manager.extend(handle, 6)
    manager.check()
    with pytest.raises(SequenceStateError, match="no state at position 4; start at num_written"):
        manager.state_places([handle], 4, 10)


def test_checkpoints_inside_runs_leave_before_those_at_their_ends() -> None:
    manager = make(gpu=(64, 6))
    finish(manager, "a", list(range(10)), answer=list(range(50, 64)))  # checkpoints behind 8 and 24 tokens
    for number in range(2):
        finish(manager, f"b{number}", list(range(100 + 20 * number, 119 + 20 * number)))
    manager.check()
    assert manager.match_prefix([*range(10), *range(50, 64), 1, 2]).num_tokens == 24
    assert manager.match_prefix([*range(10), 1, 2]).num_tokens == 8
    for number in range(2, 4):
        finish(manager, f"b{number}", list(range(100 + 20 * number, 119 + 20 * number)))
    assert manager.match_prefix([*range(10), *range(50, 64), 1, 2]).num_tokens == 24
    assert manager.match_prefix([*range(10), 1, 2]).num_tokens == 0


def test_a_prompt_that_fills_its_blocks_finds_a_checkpoint_before_its_last_token_when_it_comes_again() -> None:
    """The one behind all of it serves longer prompts only. Where memory is short, the earlier one stays for both."""
    manager = make(gpu=(32, 5), checkpoint_every=SIZE)
    prompt = list(range(16))
    finish(manager, "a", prompt)  # checkpoints behind 4, 8, 12 and 16 tokens
    finish(manager, "b", list(range(100, 117)))
    assert manager.match_prefix(prompt).num_tokens == 12
    assert manager.match_prefix([*prompt, 0]).num_tokens == 12


def test_a_run_takes_its_last_checkpoint_to_the_host_and_back() -> None:
    manager = make(host_blocks=(16, 4))
    finish(manager, "a", list(range(19)))
    assert manager.cache.offload(4) == 4
    manager.check()
    match = manager.match_prefix([*range(16), 7, 7])
    assert (match.num_tokens, match.tokens_by_tier) == (16, {Tier.HOST: 16})
    handle = manager.allocate("b", [*range(16), 7, 7], reserve=0)
    manager.check()
    assert handle.num_cached_tokens == 16
    assert manager.state_places([handle], 16, 16 + len(manager.extend(handle)[0])).sources[0] >= 0


def test_a_pin_keeps_the_last_checkpoint_of_its_prefix() -> None:
    manager = make(gpu=(64, 4))
    finish(manager, "a", list(range(19)))
    manager.cache.pin(list(range(19)))
    for name in "bcd":
        finish(manager, name, [ord(name)] * 10)
    manager.check()
    assert manager.match_prefix(list(range(19))).num_tokens == 16


def test_a_full_pool_of_states_refuses_a_request_that_attention_has_room_for() -> None:
    manager = make(gpu=(32, 2))
    manager.allocate("a", [1, 2])
    manager.allocate("b", [3, 4])
    assert not manager.can_allocate([5, 6])
    with pytest.raises(OutOfBlocksError, match="pool 1"):
        manager.allocate("c", [5, 6])


def test_what_has_no_state_or_no_csr_says_so() -> None:
    plain = KVCacheManager(KVCacheConfig([ATTENDS], SIZE, gpu_blocks=4))
    handle = plain.allocate("a", [1])
    with pytest.raises(InvalidArgumentError, match="no layer of this model keeps a state"):
        plain.state_places([handle], 0, 1)
    assert plain.step_end(handle, 0, 1) == 1
    manager = make()
    handle = manager.allocate("a", [1])
    with pytest.raises(InvalidArgumentError, match="state_places"):
        manager.batch([handle]).csr(STATES)
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        manager.state_places([handle], 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_unfilled_blocks": True}, "where a block ends only"),
        ({"checkpoint_every": 6}, "multiple of block_size=4"),
        ({"checkpoint_every": 2}, "checkpoint_every=2"),
        ({"checkpoint_every": 8, "layers": [ATTENDS]}, "no layer keeps a state"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheConfig(**{"layers": [ATTENDS, KEEPS], "block_size": SIZE, "gpu_blocks": 8} | options)


def test_a_request_that_was_swapped_before_its_first_step_comes_back_with_a_place_for_its_state() -> None:
    manager = make(host_blocks=(16, 4))
    handle = manager.allocate("a", [1, 2, 3])
    manager.swap_out(handle)
    manager.swap_in(handle)
    manager.check()
    places = manager.state_places([handle], 0, 3)
    assert (places.sources[0], places.targets[0] >= 0) == (-1, True)


def test_a_fork_that_passes_a_shared_place_leaves_it_to_the_others() -> None:
    manager = make()
    handle = manager.allocate("a", list(range(9)), reserve=0)
    compute(manager, handle, 8)
    manager.extend(handle, 8)
    (fork,) = manager.fork(handle, "b")
    for each in (handle, fork):
        manager.commit(each, [8, *range(20, 27)])
        manager.check()
    manager.free(handle)
    manager.free(fork)
    manager.check()
