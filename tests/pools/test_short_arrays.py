"""Operations on short arrays: C and numpy must do the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.pools import arrays
from tool_files import compiled_module

NAMES = ("are_ids", "copied", "put", "as_bytes", "num_common", "block_sums")
TOKENS = np.arange(10, 18, dtype=np.int32)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled_module("_short_arrays", tmp_path_factory.mktemp("short"))


@pytest.fixture(params=["numpy", "C"])
def ops(request: pytest.FixtureRequest) -> Any:
    if request.param == "C":
        return request.getfixturevalue("in_c")
    return SimpleNamespace(**{name: getattr(arrays, f"_{name}") for name in NAMES})


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (2, 5), (3, 3), (6, 99), (9, 12), (5, 2)])
def test_a_part_of_an_array_is_that_of_a_slice(ops: Any, start: int, stop: int) -> None:
    copy = ops.copied(TOKENS, start, stop)
    assert copy.tolist() == TOKENS[start:stop].tolist()
    assert (copy.dtype, copy.base, copy.flags.writeable) == (np.int32, None, True)
    assert ops.as_bytes(TOKENS, start, stop) == TOKENS[start:stop].tobytes()


def test_a_copy_leaves_the_array_alone_that_it_was_made_of(ops: Any) -> None:
    source = TOKENS.copy()
    ops.copied(source, 0, 8)[:] = 0
    assert source.tolist() == TOKENS.tolist()


@pytest.mark.parametrize(("at", "start", "stop"), [(0, 0, 8), (3, 2, 5), (8, 1, 1), (7, 7, 8)])
def test_what_is_put_stands_there_and_nothing_else_changes(ops: Any, at: int, start: int, stop: int) -> None:
    target = np.full(8, -1, np.int32)
    expected = target.tolist()
    expected[at : at + stop - start] = TOKENS[start:stop].tolist()
    ops.put(target, at, TOKENS, start, stop)
    assert target.tolist() == expected


def test_a_part_may_be_put_over_itself(ops: Any) -> None:
    both = TOKENS.copy()
    ops.put(both, 2, both, 0, 6)
    assert both.tolist() == [10, 11, *range(10, 16)]


@pytest.mark.parametrize("at", [6, 9])
def test_what_does_not_fit_is_refused(ops: Any, at: int) -> None:
    target = np.zeros(8, np.int32)
    with pytest.raises(ValueError, match=r"written|broadcast"):
        ops.put(target, at, TOKENS, 0, 3)
    assert not target.any()


def test_what_is_read_only_is_not_written(ops: Any) -> None:
    target = np.zeros(8, np.int32)
    target.setflags(write=False)
    with pytest.raises(ValueError, match=r"written|read-only"):
        ops.put(target, 0, TOKENS, 0, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TOKENS, True),
        (np.zeros(1, np.int32), True),
        (np.array([2**31 - 1], np.int32), True),
        (np.array([*range(40), -1], np.int32), False),
        (np.empty(0, np.int32), False),
        (TOKENS.astype(np.int64), False),
        (TOKENS.astype(">i4"), False),
        (TOKENS[::2], False),
        (TOKENS.reshape(2, 4), False),
        ([1, 2, 3], False),
        (None, False),
    ],
)
def test_ids_are_what_needs_no_change(ops: Any, given: Any, expected: bool) -> None:
    assert ops.are_ids(given) is expected


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((TOKENS[::2], 0, 1), TypeError),
        ((TOKENS.astype(np.int64), 0, 1), TypeError),
        (([1, 2], 0, 1), TypeError),
        ((TOKENS, 0), TypeError),
        ((TOKENS, 0, 1.5), TypeError),
        ((TOKENS, -1, 1), IndexError),
        ((TOKENS, 0, -1), IndexError),
        ((TOKENS, 0, 2**80), OverflowError),
    ],
)
def test_in_c_what_is_no_part_of_an_int32_array_is_refused(
    in_c: Any, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    for read in (in_c.copied, in_c.as_bytes):
        with pytest.raises(error):
            read(*arguments)
    with pytest.raises(error):
        in_c.put(TOKENS.copy(), 0, *arguments)


@pytest.mark.parametrize("target", [np.zeros(8), np.zeros(8, np.int32)[::2], [0] * 8])
def test_in_c_what_is_no_int32_array_is_not_written(in_c: Any, target: Any) -> None:
    with pytest.raises(TypeError):
        in_c.put(target, 0, TOKENS, 0, 1)


@given(st.binary(max_size=12), st.binary(max_size=12))
def test_the_common_beginning_of_bytes_equals_brute_force(left: bytes, right: bytes) -> None:
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert arrays._num_common(left, right) == expected


@pytest.mark.parametrize(
    ("left", "right"), [(b"", b""), (b"", b"a"), (b"abc", b"abd"), (b"ab", b"abd"), (b"abd", b"ab"), (b"\x00", b"\xff")]
)
def test_in_c_the_common_beginning_is_the_same(in_c: Any, left: bytes, right: bytes) -> None:
    assert in_c.num_common(left, right) == arrays._num_common(left, right)
    with pytest.raises(TypeError):
        in_c.num_common(left, bytearray(right))
    with pytest.raises(TypeError):
        in_c.num_common(left)


@pytest.mark.parametrize(("size", "num_blocks"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_each_block_has_a_checksum_of_all_its_tokens(ops: Any, size: int, num_blocks: int) -> None:
    tokens = np.array([2**31 - 1, -(2**31), 0, 7, 1, 2, 3, -1], np.int32)
    sums = [0] * num_blocks
    for index, token in enumerate(tokens.tolist()):
        sums[index // size] = (sums[index // size] * 2654435761 + token) % 2**32
    assert ops.block_sums(tokens, num_blocks) == np.array(sums, np.uint32).tobytes()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((TOKENS[::2], 2), TypeError),
        ((TOKENS.astype(np.int64), 2), TypeError),
        ((TOKENS,), TypeError),
        ((TOKENS, 1.5), TypeError),
        ((TOKENS, 0), ValueError),
        ((TOKENS, -1), ValueError),
        ((TOKENS, 9), ValueError),
        ((TOKENS, 2**80), OverflowError),
    ],
)
def test_in_c_what_cannot_be_blocks_is_refused(in_c: Any, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        in_c.block_sums(*arguments)


def test_an_array_that_is_not_aligned_is_taken_as_ids() -> None:
    buffer = bytearray(1 + 4 * len(TOKENS))
    given = np.frombuffer(buffer, np.int32, offset=1)
    given[:] = TOKENS
    assert arrays.as_token_array(given).tolist() == TOKENS.tolist()
    assert arrays.copied(arrays.as_token_array(given), 1, 3).tolist() == [11, 12]
