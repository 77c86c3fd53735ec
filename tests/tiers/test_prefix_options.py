"""What tiers can bring of a prompt: the longest prefix for which every layer group has what is read."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, MultimodalItem, ReuseScope
from kvpool.events import Stored
from kvpool.tiers import Fingerprint, KeySpace
from kvpool.tiers.keys import named
from kvpool.tiers.transport.block_keys import BlockKeys, cached_groups
from kvpool.tiers.transport.prefix_options import (
    HERE,
    NOWHERE,
    Sources,
    next_query,
    prefix_options,
    read_columns,
    usable_blocks,
)

FULL = LayerSpec(kv_heads=1, head_dim=8)
SLIDING = LayerSpec(kv_heads=1, head_dim=8, window=8)
CHUNKED = LayerSpec(kv_heads=1, head_dim=8, chunk=8)
SINKS = LayerSpec(kv_heads=1, head_dim=8, window=8, sink_tokens=4)
SIZE = 4


def config(*layers: LayerSpec) -> KVCacheConfig:
    return KVCacheConfig(list(layers), block_size=SIZE, gpu_blocks=8)


def sources(text: str) -> Sources:
    """A digit for the tier that has a block, `h` for one that is here, `.` for none."""
    return np.array([NOWHERE if c == "." else HERE if c == "h" else int(c) for c in text], np.int16)


@pytest.mark.parametrize(
    ("layers", "where", "num_tokens", "blocks"),
    [
        ([FULL], ["00000"], 21, 5),
        ([FULL], ["00.00"], 21, 2),
        ([FULL], ["....."], 21, 0),
        ([FULL, SLIDING], ["00000", "...00"], 21, 5),
        ([FULL, SLIDING], ["00000", "000.0"], 21, 3),  # the window of five blocks has a gap, that of three does not
        ([FULL, SLIDING], ["00000", "....0"], 21, 0),
        ([SLIDING], ["...00"], 21, 5),
        ([FULL, SLIDING], ["000..", "00000"], 21, 3),
        ([FULL, SINKS], ["00000", "...00"], 21, 0),
        ([FULL, SINKS], ["00000", "0..00"], 21, 5),
        ([FULL, CHUNKED], ["0000", "...."], 17, 4),  # the next chunk begins there: nothing before it is read
        ([FULL, CHUNKED], ["0000", "...."], 16, 2),  # the last token is computed, and it reads its chunk
        ([FULL, CHUNKED], ["0000", "..00"], 16, 4),
    ],
)
def test_given_blocks_in_tiers_then_the_usable_prefix_has_all_that_is_read(
    layers: list[LayerSpec], where: list[str], num_tokens: int, blocks: int
) -> None:
    groups = cached_groups(config(*layers))
    assert usable_blocks(groups, [sources(each) for each in where], num_tokens, SIZE) == blocks


@pytest.mark.parametrize("num_tokens", [33, 32])
@pytest.mark.parametrize("layer", [SLIDING, SINKS, CHUNKED, LayerSpec(kv_heads=1, head_dim=8, window=9)])
def test_given_only_the_columns_that_are_read_then_the_prefix_is_usable_and_without_any_of_them_it_is_not(
    layer: LayerSpec, num_tokens: int
) -> None:
    (group,) = cached_groups(config(layer))
    needed = read_columns(group, 0, 8, num_tokens, SIZE)
    there = np.full(8, NOWHERE, np.int16)
    there[needed] = 0
    assert usable_blocks([group], [there], num_tokens, SIZE) == 8
    for column in needed:
        gap = there.copy()
        gap[column] = NOWHERE
        assert usable_blocks([group], [gap], num_tokens, SIZE) < 8


def test_given_a_prompt_that_ends_with_its_last_block_then_its_last_token_is_computed() -> None:
    assert next_query(8, 32, SIZE) == 31
    assert next_query(8, 33, SIZE) == 32


def test_given_several_tiers_then_there_is_an_option_for_each_that_makes_the_prefix_longer() -> None:
    groups = cached_groups(config(FULL, SLIDING))
    found = prefix_options(groups, [sources("hh0010"), sources("hh0010")], 2, 25, SIZE, 2)
    size = groups[0].spec.block_bytes
    assert [option.num_blocks for option in found] == [4, 6]
    assert found[0].num_bytes == (4 * size, 0)
    assert found[1].num_bytes == (3 * size + size, 2 * size)  # the window of six blocks is two, one from each tier


def test_given_nothing_beyond_what_is_here_then_there_is_no_option() -> None:
    groups = cached_groups(config(FULL))
    assert prefix_options(groups, [sources("hh.0")], 2, 17, SIZE, 1) == []


def test_given_cross_attention_then_its_blocks_have_no_keys() -> None:
    layers = config(FULL, LayerSpec(kv_heads=1, head_dim=8, cross_attention=True))
    keys = BlockKeys(KeySpace(Fingerprint.of(layers, "m", "w")), layers)
    assert len(keys.of_prompt(np.arange(9, dtype=np.int32), ReuseScope()).keys) == 1


def test_given_prompts_with_a_common_beginning_then_their_first_keys_are_equal_in_each_group_and_scope() -> None:
    layers = config(FULL, SLIDING)
    keys = BlockKeys(KeySpace(Fingerprint.of(layers, "m", "w")), layers)
    one = keys.of_prompt(np.array([*range(8), 1, 1, 1, 1, 9], np.int32), ReuseScope())
    two = keys.of_prompt(np.array([*range(8), 2, 2, 2, 2], np.int32), ReuseScope())
    other = keys.of_prompt(np.arange(8, dtype=np.int32), ReuseScope(tenant="b"))
    assert one.num_blocks == two.num_blocks == 3
    for of_one, of_two in zip(one.keys, two.keys, strict=True):
        assert [a == b for a, b in zip(of_one, of_two, strict=True)] == [True, True, False]
    assert not set(one.keys[0]) & {*one.keys[1], *other.keys[0]}


def test_given_images_then_a_prompt_has_the_keys_of_the_blocks_that_a_manager_caches_for_it() -> None:
    """Whole, and in pieces that begin inside an image, as what a request computes is offered to tiers."""
    manager = KVCacheManager(config(FULL))
    tokens, items = np.array([1, 2, *[9] * 9, 3, 4, 5, 6, 7], np.int32), (MultimodalItem(2, 9, "cat"),)
    handle = manager.allocate("a", tokens, multimodal=items)
    manager.commit(handle)
    with manager.subscribe() as subscription:
        (stored,) = (event for event in subscription.poll().events if isinstance(event, Stored))
    keys = BlockKeys(KeySpace(Fingerprint.of(manager.config, "model", "weights")), manager.config)
    (own,) = keys.of_prompt(tokens, ReuseScope(), items).keys
    assert (own,) == keys.of_digests(named(ReuseScope(), stored.digests))
    rest = keys.digests(stored.digests[0], tokens[4:], [items[0]._replace(position=-2)])
    assert tuple(rest) == stored.digests[1:]
    for others in ((items[0]._replace(key="dog"),), ()):
        assert not set(own) & set(keys.of_prompt(tokens, ReuseScope(), others).keys[0])


def test_given_blocks_of_one_token_then_a_prefix_of_one_block_needs_that_block() -> None:
    groups = cached_groups(KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=1, gpu_blocks=8))
    for found, blocks in ((NOWHERE, 0), (0, 1)):
        assert usable_blocks(groups, [np.array([found, NOWHERE], np.int16)], 2, 1) == blocks
