from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import InvalidArgumentError
from kvpool.prefix import digests
from kvpool.prefix.digests import DIGEST_BYTES, chain_digests, root_digest
from kvpool.scope import MultimodalItem, ReuseScope
from tool_files import compiled_module

ROOT = root_digest(ReuseScope())

text = st.text(st.characters(), max_size=6)
scopes = st.builds(
    ReuseScope,
    tenant=text,
    adapter=text,
    weights=text,
    multimodal=st.lists(st.tuples(text, st.integers(0, 2**70)), max_size=3).map(tuple),
    encoder=text,
    salt=text,
)


def tokens_of(*token_ids: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(token_ids, dtype=np.int32)


def test_each_digest_is_sha256_of_the_previous_digest_and_little_endian_tokens() -> None:
    first = hashlib.sha256(ROOT + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, -6, 7, 2**31 - 1)).digest()
    assert chain_digests(ROOT, tokens_of(1, 2, 3, 4, 5, -6, 7, 2**31 - 1), 4) == [first, second]


def test_digests_of_the_wire_format_never_change() -> None:
    # Stored outside the process (disk, remote tier): a change here must come with a new tag in the encoding.
    assert ROOT.hex() == hashlib.sha256(b"kvpool scope 1\0" + bytes(24)).hexdigest()
    scope = ReuseScope("t", "é", "", (("ff", 12),))
    fields = [b"t", "é".encode(), b"", b"ff", b"12"]
    message = b"kvpool scope 1\0" + b"".join(struct.pack("<Q", len(field)) + field for field in fields)
    assert root_digest(scope) == hashlib.sha256(message).digest()
    heard = ReuseScope("t", "é", "", (("ff", 12),), encoder="audio")
    assert root_digest(heard) == hashlib.sha256(message + struct.pack("<Q", 5) + b"audio").digest()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=24), st.integers(1, 5), st.integers(0, 24))
def test_a_chain_continued_from_any_block_equals_the_whole_chain(
    token_ids: list[int], block_size: int, cut_blocks: int
) -> None:
    tokens = np.array(token_ids[: len(token_ids) // block_size * block_size], dtype=np.int32)
    whole = chain_digests(ROOT, tokens, block_size)
    head = chain_digests(ROOT, tokens[: cut_blocks * block_size], block_size)
    tail = chain_digests(head[-1] if head else ROOT, tokens[cut_blocks * block_size :], block_size)
    assert head + tail == whole
    assert len(whole) == len(tokens) // block_size


def test_equal_tokens_at_another_place_have_another_digest() -> None:
    digests = chain_digests(ROOT, tokens_of(7, 7, 7, 7, 7, 7), 2)
    assert len(set(digests)) == 3


def test_blocks_that_differ_only_in_zeros_have_different_digests() -> None:
    assert chain_digests(ROOT, tokens_of(1, 0, 0, 0), 4) != chain_digests(ROOT, tokens_of(1, 0), 2)
    assert len(set(chain_digests(ROOT, tokens_of(0, 0, 0, 0), 1))) == 4


def test_strided_and_read_only_tokens_give_the_same_digests() -> None:
    tokens = np.arange(32, dtype=np.int32)
    strided = np.repeat(tokens, 3)[::3]
    frozen = tokens.copy()
    frozen.flags.writeable = False
    expected = chain_digests(ROOT, tokens, 16)
    assert chain_digests(ROOT, strided, 16) == expected
    assert chain_digests(ROOT, frozen, 16) == expected


@pytest.fixture(scope="module")
def hash_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes, bytes, int], list[bytes]]:
    """What wheels have compiled for runs of blocks, built from its source."""
    return compiled_module("_sha256_chain", tmp_path_factory.mktemp("chain")).hash_run  # type: ignore[no-any-return]


@pytest.mark.parametrize("block_bytes", [4, 20, 24, 28, 64, 84, 88, 92, 128, 1024])
def test_given_a_processor_that_hashes_then_the_compiled_chain_is_the_same(
    hash_run: Callable[[bytes, bytes, int], list[bytes]], block_bytes: int
) -> None:
    data = np.random.default_rng(block_bytes).bytes(5 * block_bytes)
    expected, parent = [], ROOT
    for start in range(0, len(data), block_bytes):
        parent = hashlib.sha256(parent + data[start : start + block_bytes]).digest()
        expected.append(parent)
    assert hash_run(ROOT, data, block_bytes) == expected
    assert hash_run(ROOT, b"", block_bytes) == []


def test_given_half_a_block_then_the_compiled_chain_refuses_it(
    hash_run: Callable[[bytes, bytes, int], list[bytes]],
) -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        hash_run(ROOT, bytes(6), 4)
    with pytest.raises(ValueError, match="32 bytes"):
        hash_run(b"short", bytes(4), 4)


def test_no_tokens_give_no_digests() -> None:
    assert chain_digests(ROOT, tokens_of(), 16) == []


@given(scopes, scopes)
def test_roots_are_equal_exactly_when_scopes_are(one: ReuseScope, other: ReuseScope) -> None:
    assert (root_digest(one) == root_digest(other)) == (one == other)
    assert len(root_digest(one)) == DIGEST_BYTES


def test_moving_characters_between_neighbouring_fields_changes_the_root() -> None:
    confusable = [
        ReuseScope("ab"),
        ReuseScope("a", "b"),
        ReuseScope("", "ab"),
        ReuseScope("", "", "ab"),
        ReuseScope(salt="ab"),
        ReuseScope("a", salt="b"),
        ReuseScope(encoder="ab"),
        ReuseScope(encoder="a", salt="b"),
        ReuseScope(encoder="b", salt="a"),
        ReuseScope(multimodal=(("ab", 0),)),
        ReuseScope(multimodal=(("a", 0), ("b", 0))),
        ReuseScope(multimodal=(("b", 0), ("a", 0))),
        ReuseScope(multimodal=(("a", 10),)),
        ReuseScope(multimodal=(("a1", 0),)),
        ReuseScope("\ud83d\ude00"),
        ReuseScope("\U0001f600"),
    ]
    for one, other in itertools.combinations(confusable, 2):
        assert root_digest(one) != root_digest(other), (one, other)


def test_equal_scopes_are_one_dictionary_key() -> None:
    assert {ReuseScope("t", multimodal=(("h", 3),)): 1}[ReuseScope("t", multimodal=(("h", 3),))] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant": None},
        {"adapter": 7},
        {"weights": b"v1"},
        {"multimodal": [("h", 0)]},
        {"multimodal": ("h0",)},
        {"multimodal": (["h", 0],)},
        {"multimodal": (("h",),)},
        {"multimodal": ((b"h", 0),)},
        {"multimodal": (("h", -1),)},
        {"multimodal": (("h", True),)},
        {"multimodal": (("h", 1.0),)},
    ],
)
def test_a_malformed_scope_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        ReuseScope(**fields)


@pytest.mark.parametrize(
    ("parent", "tokens", "block_size", "message"),
    [
        (b"short", tokens_of(1), 1, "32 bytes"),
        (ROOT, tokens_of(1), 0, "block_size must be >= 1, got 0"),
        (ROOT, tokens_of(1, 2, 3), 2, "cut them to 2"),
        (ROOT, np.array([1, 2]), 2, "int64"),
        (ROOT, np.zeros((2, 2), dtype=np.int32), 2, r"shape \(2, 2\)"),
        (ROOT, [1, 2], 2, "a list"),
    ],
)
def test_a_malformed_chain_is_refused(parent: bytes, tokens: Any, block_size: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        chain_digests(parent, tokens, block_size)


def test_items_count_in_every_block_that_has_placeholders_of_them() -> None:
    tokens = tokens_of(*range(16))
    items = [
        MultimodalItem(-2, 4, "a"),
        MultimodalItem(3, 6, b"bc"),
        MultimodalItem(11, 1, 7),
        MultimodalItem(14, 9, "d"),
    ]
    names = {"a": b"sa", b"bc": b"bbc", 7: b"i\x07", "d": b"sd"}
    parent, expected = ROOT, []
    for block in range(4):
        message = struct.pack("<4i", *range(4 * block, 4 * block + 4))
        for position, length, key in items:
            if set(range(position, position + length)) & set(range(4 * block, 4 * block + 4)):
                name = names[key]
                message += b"\xff" * 4 + struct.pack("<3q", position - 4 * block, length, len(name)) + name
        parent = hashlib.sha256(parent + message).digest()
        expected.append(parent)
    assert chain_digests(ROOT, tokens, 4, items) == expected


@pytest.mark.parametrize(
    ("scope", "tag", "fields"),
    [
        (ReuseScope(), b"kvpool scope 1\0", ["", "", ""]),
        (ReuseScope("t", "a", weights="w"), b"kvpool scope 1\0", ["t", "a", "w"]),
        (ReuseScope("t", encoder="e"), b"kvpool scope 1\0", ["t", "", "", "e"]),
        (ReuseScope("t", salt="s"), b"kvpool salted scope 1\0", ["t", "", "", "s"]),
        (ReuseScope("t", multimodal=(("x", 3),)), b"kvpool scope 1\0", ["t", "", "", "x", "3"]),
    ],
)
def test_the_root_of_a_scope_is_sha256_of_its_fields_with_their_lengths(
    scope: ReuseScope, tag: bytes, fields: list[str]
) -> None:
    message = tag + b"".join(struct.pack("<q", len(field)) + field.encode() for field in fields)
    assert root_digest(scope) == hashlib.sha256(message).digest()


def test_where_whole_runs_are_hashed_in_one_call_the_digests_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_run(parent: bytes, packed: Any, block_bytes: int) -> list[bytes]:
        content = packed.tobytes()
        return digests._hash_each(
            parent, [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
        )

    tokens, items = tokens_of(*range(16)), [MultimodalItem(3, 6, "a")]
    monkeypatch.setattr(digests, "_hash_run", None)
    one_by_one = chain_digests(ROOT, tokens, 4), chain_digests(ROOT, tokens, 4, items)
    monkeypatch.setattr(digests, "_hash_run", hash_run)
    assert (chain_digests(ROOT, tokens, 4), chain_digests(ROOT, tokens, 4, items)) == one_by_one
