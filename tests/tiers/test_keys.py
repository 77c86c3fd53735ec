"""Keys of blocks outside the process: equal for equal bytes, different for anything else."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, LayerSpec, ReuseScope
from kvpool.errors import InvalidArgumentError
from kvpool.prefix.digests import chain_digests, root_digest
from kvpool.tiers import Fingerprint, KeyPattern, KeySpace, Shard
from kvpool.tiers.envelope import HEADER_BYTES, is_whole, seal
from kvpool.tiers.keys import named

EVERYBODY = ReuseScope()


def config(block_size: int = 4, **layer: object) -> KVCacheConfig:
    fields = dict(kv_heads=2, head_dim=8) | layer
    return KVCacheConfig([LayerSpec(**fields), LayerSpec(**fields, window=8)], block_size, gpu_blocks=8)


def space(cache: KVCacheConfig | None = None, model: str = "m", weights: str = "w", **more: object) -> KeySpace:
    return KeySpace(Fingerprint.of(cache or config(), model, weights, **more))


def digests(tokens: list[int], scope: ReuseScope = EVERYBODY, block_size: int = 4) -> list[bytes]:
    return chain_digests(root_digest(scope), np.array(tokens, np.int32), block_size)


def test_given_two_processes_with_the_same_model_then_their_keys_are_equal() -> None:
    found = digests([1, 2, 3, 4, 5, 6, 7, 8])
    assert space().keys(found) == space().keys(found)
    assert len(set(space().keys(found))) == 2


@pytest.mark.parametrize(
    "other",
    [
        space(model="other"),
        space(weights="other"),
        space(layout="vllm 0.32"),
        space(shard=Shard(0, 2)),
        space(shard=Shard(1, 2)),
        space(config(block_size=8)),
        space(config(dtype="float16")),
        space(config(dtype="int8")),
        space(config(kv_heads=4)),
        space(config(head_dim=16)),
        space(config(extra_parts=[("index", "bfloat16", 1, 8)])),
        KeySpace(dataclasses.replace(space().fingerprint, version=99)),
    ],
)
def test_given_anything_that_changes_bytes_then_no_key_is_equal(other: KeySpace) -> None:
    found = digests([1, 2, 3, 4])
    assert not set(other.keys(found)) & set(space().keys(found))
    assert other.prefix != space().prefix


def test_given_int4_then_its_keys_name_the_format_whose_keys_have_8_bits() -> None:
    groups = [json.loads(group) for group in space(config(dtype="int4")).fingerprint.groups]
    assert {group["dtype"] for group in groups} == {"int4 with keys in int8"}  # "int4" had 4 bits for both


def test_given_another_layer_group_prefix_or_scope_then_the_keys_differ() -> None:
    keys = space()
    found = digests([1, 2, 3, 4])
    others = [*keys.keys(found, group=1), *keys.keys(digests([9, 9, 9, 9, 1, 2, 3, 4])[1:])]
    others += keys.keys(digests([1, 2, 3, 4], ReuseScope(tenant="a")))
    assert len({*others, *keys.keys(found)}) == 4


def test_given_a_scope_then_its_names_are_in_no_key() -> None:
    secret = ReuseScope(tenant="acme-salt-1234")
    assert all(b"acme" not in key for key in space().keys(digests([1, 2, 3, 4], secret)))


def test_given_a_tenant_or_a_scope_then_its_keys_are_alike_and_nobody_elses() -> None:
    scopes = [ReuseScope("a"), ReuseScope("a", salt="s"), ReuseScope("a", adapter="x"), ReuseScope("b")]
    keys = [space().keys(named(scope, digests([1, 2, 3, 4], scope)))[0] for scope in scopes]
    for pattern, meant in (
        (KeyPattern(), [True] * 4),
        (KeyPattern(space().prefix), [True] * 4),
        (KeyPattern(bytes(8)), [False] * 4),
        (KeyPattern.of_tenant("a"), [True, True, True, False]),
        (KeyPattern.of_tenant("a", bytes(8)), [False] * 4),
        (KeyPattern.of_scope(scopes[1]), [False, True, False, False]),
        (KeyPattern.of_scope(scopes[3], space().prefix), [False, False, False, True]),
    ):
        assert [pattern.matches(key) for key in keys] == meant


def test_given_a_text_then_its_keys_are_those_of_its_whole_blocks_in_every_layer_group() -> None:
    scope = ReuseScope("a")
    tokens = np.arange(10, dtype=np.int32)
    names = named(scope, digests(list(range(8)), scope))
    assert space().of_tokens(tokens, scope) == [key for group in (0, 1) for key in space().keys(names, group)]
    assert space().of_tokens(tokens[:3], scope) == []


def test_given_a_description_then_the_fingerprint_is_had_back_or_it_is_refused() -> None:
    known = space().fingerprint
    assert Fingerprint.from_description(json.loads(json.dumps(known.describe()))) == known
    for wrong in (
        None,
        {},
        {"model": "m"},
        {**known.describe(), "shard": {"rank": 2, "of": 1}},
        {**known.describe(), "x": 1},
        {**known.describe(), "block_size": "4"},
        {**known.describe(), "block_size": 0},
        {**known.describe(), "block_size": 2**20 + 1},
    ):
        with pytest.raises(InvalidArgumentError, match="describes no fingerprint"):
            Fingerprint.from_description(wrong)


@pytest.mark.parametrize("block_size", [1, 2**20])
def test_given_a_block_size_at_its_bound_then_the_description_is_read(block_size: int) -> None:
    described = {**space().fingerprint.describe(), "block_size": block_size}
    assert Fingerprint.from_description(described).block_size == block_size


@pytest.mark.parametrize("wrong", [dict(space=b"short"), dict(space="text" * 2), dict(tag=b"abc"), dict(tag=None)])
def test_given_a_pattern_that_cannot_be_then_it_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"KeyPattern.{next(iter(wrong))}"):
        KeyPattern(**wrong)


@pytest.mark.parametrize("wrong", [dict(model=""), dict(weights=""), dict(model=None), dict(layout=7)])
def test_given_no_name_then_the_fingerprint_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        space(**wrong)


@pytest.mark.parametrize(("rank", "of"), [(1, 1), (-1, 2), (0, 0), ("0", 1)])
def test_given_a_wrong_shard_then_it_is_refused(rank: int, of: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Shard\."):
        Shard(rank, of)


def test_given_a_sealed_value_then_any_change_is_seen() -> None:
    key, data = bytes(range(32)), memoryview(bytearray(range(256)) * 20)
    header = seal(key, data)
    assert len(header) == HEADER_BYTES
    assert is_whole(header, key, data)
    assert not is_whole(header, bytes(32), data)
    assert not is_whole(header, key, data[:-1])
    assert not is_whole(header[:-10], key, data)
    for bit in (0, 7, 5000 * 8 + 3):
        data[bit // 8] ^= 1 << bit % 8
        assert not is_whole(header, key, data)
        data[bit // 8] ^= 1 << bit % 8
    for byte in range(HEADER_BYTES - 8):
        broken = bytearray(header)
        broken[byte] ^= 16
        assert not is_whole(broken, key, data)


def test_keys_are_made_as_they_were_when_values_were_stored() -> None:
    """What an earlier process stored is found only while the making of keys stays as it is, byte by byte."""
    made = Fingerprint("größe", "w", 4, ("g0", "g1"), shard=Shard(1, 2))
    message = (
        '{"block_size":4,"groups":["g0","g1"],"layout":"kvpool","model":"gr\\u00f6\\u00dfe",'
        '"shard":{"of":2,"rank":%d},"version":3,"weights":"w"}'
    )
    own, first = (hashlib.sha256(b"kvpool fingerprint\0" + (message % rank).encode()).digest() for rank in (1, 0))
    assert made.digest == own
    digest = bytes(range(32))
    for group in (0, 1):
        hashed = hashlib.sha256(b"kvpool block\0" + first + group.to_bytes(4, "little") + digest).digest()
        assert KeySpace(made).keys([digest, b"tags" + digest], group) == [
            own[:8] + bytes(4) + hashed[:20],
            own[:8] + b"tags" + hashed[:20],
        ]


def test_a_layer_group_is_described_with_its_fields_in_order() -> None:
    for described in space().fingerprint.groups:
        assert described == json.dumps(json.loads(described), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Shard(0, 0),
        lambda: Shard(1, 1),
        lambda: Shard(-1, 1),
        lambda: Shard(0, 2**16 + 1),
        lambda: Shard(0, True),
        lambda: KeyPattern.of_tenant(7),  # type: ignore[arg-type]
        lambda: KeyPattern.of_scope("a"),  # type: ignore[arg-type]
        lambda: Fingerprint.from_description({**space().fingerprint.describe(), "version": 2}),
        lambda: Fingerprint.from_description({**space().fingerprint.describe(), "version": 4}),
        lambda: Fingerprint.from_description({**space().fingerprint.describe(), "block_size": 0}),
        lambda: Fingerprint.from_description({**space().fingerprint.describe(), "block_size": 2**20 + 1}),
    ],
)
def test_shards_patterns_and_descriptions_beyond_their_limits_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        wrong()


def test_shards_and_descriptions_at_their_limits_are_taken() -> None:
    assert (Shard(2**16 - 1, 2**16).rank, Shard().of) == (2**16 - 1, 1)
    for block_size in (1, 2**20):
        fields = {**space().fingerprint.describe(), "block_size": block_size}
        assert Fingerprint.from_description(fields).block_size == block_size
    with pytest.raises(InvalidArgumentError, match="the description of the model 'm' has format 4"):
        Fingerprint.from_description({**space().fingerprint.describe(), "version": 4})
