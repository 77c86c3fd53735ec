"""Text that streams: whole characters only, stop strings cut exactly, nothing lost at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine.text import Pieces, TextStream, bytes_of, overlap


class ByteTokenizer:
    """One token per byte, so that characters are split across tokens; 256 is a special token."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = bytes(token for token in token_ids if token < 256)
        return kept.decode("utf-8", errors="replace")


def stream(text: str, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    sink = TextStream(ByteTokenizer(), stop)
    pieces = [sink.push(token) for token in text.encode()]
    return [*pieces, sink.finish()], sink


@given(st.text())
def test_given_any_text_byte_by_byte_then_the_pieces_join_to_it_and_none_holds_half_a_character(text: str) -> None:
    pieces, sink = stream(text)
    assert "".join(pieces) == text == sink.text
    assert all(piece.encode().decode() == piece for piece in pieces)


@given(st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_given_stop_strings_then_the_text_ends_before_the_first_of_them(text: str, stop: list[str]) -> None:
    pieces, sink = stream(text, stop)
    # The first stop that is complete wins; of those complete at the same letter, the one that begins first.
    expected, stopped = text, None
    for end in range(len(text) + 1):
        found = [text[:end].find(word) for word in stop if text[:end].endswith(word)]
        if found:
            expected, stopped = text[: min(found)], True
            break
    assert "".join(pieces) == expected
    assert (sink.stopped is not None) == bool(stopped)


def test_given_text_that_may_become_a_stop_string_then_it_is_held_back_until_it_does_not() -> None:
    sink = TextStream(ByteTokenizer(), ["END"])
    assert [sink.push(token) for token in b"xENxE"] == ["x", "", "", "ENx", ""]
    assert sink.finish() == "E"


def test_given_tokens_that_end_no_text_then_stop_strings_count_from_there_on() -> None:
    sink = TextStream(ByteTokenizer(), ["END"], min_tokens=4)
    assert "".join(sink.push(token) for token in b"ENDENDxEND!") == "ENDENDx"
    assert (sink.stopped, sink.text) == ("END", "ENDENDx")
    late = TextStream(ByteTokenizer(), ["END"], min_tokens=3)
    assert [late.push(token) for token in b"ENDEND!"] == ["E", "N", "D", "", "", "", ""]


def test_given_bytes_that_never_become_a_character_then_they_are_shown_in_the_end() -> None:
    sink = TextStream(ByteTokenizer())
    assert sink.push(0xFF) == ""
    assert sink.finish() == "\N{REPLACEMENT CHARACTER}"


def test_given_eight_tokens_that_are_no_character_then_they_are_shown_without_waiting_for_more() -> None:
    sink = TextStream(ByteTokenizer())
    shown = [len(sink.push(0xFF)) for _ in range(17)]
    assert shown == [0] * 7 + [8] + [0] * 7 + [8] + [0]


def test_given_pieces_then_each_token_is_decoded_once_for_both_ways_to_see_special_ones() -> None:
    class Speaking(ByteTokenizer):
        def __init__(self) -> None:
            self.asked: list[tuple[tuple[int, ...], bool]] = []

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.asked.append((tuple(token_ids), skip_special_tokens))
            return super().decode(token_ids) + ("" if skip_special_tokens else "<end>" * (256 in token_ids))

    tokenizer = Speaking()
    pieces = Pieces(tokenizer)
    assert [pieces.decode([token]) for token in (72, 256, 72, 256)] == ["H", "", "H", ""]
    assert [pieces.decode([256], skip_special_tokens=False) for _ in range(2)] == ["<end>"] * 2
    assert tokenizer.asked == [((72,), True), ((256,), True), ((256,), False)]
    assert pieces.decode([72, 105]) == "Hi"
    assert pieces.decode([]) == ""


def test_given_special_tokens_then_they_leave_no_text() -> None:
    sink = TextStream(ByteTokenizer())
    assert [sink.push(token) for token in (72, 256, 105)] == ["H", "", "i"]


def test_given_many_special_tokens_then_they_are_not_decoded_again_with_every_further_one() -> None:
    class Counting(ByteTokenizer):
        num_decoded = 0

        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            self.num_decoded += len(token_ids)
            return super().decode(token_ids, skip_special_tokens)

    tokenizer = Counting()
    sink = TextStream(tokenizer)
    assert "".join(sink.push(token) for token in (72, *[256] * 1000, 105)) == "Hi"
    assert tokenizer.num_decoded < 10 * 1000


def test_given_tokens_after_a_stop_then_they_add_nothing() -> None:
    sink = TextStream(ByteTokenizer(), ["."])
    assert [sink.push(token) for token in b"a.b"] == ["a", "", ""]
    assert sink.finish() == ""
    assert sink.text == "a"


def test_given_a_sentencepiece_tokenizer_then_spaces_between_words_survive() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "s": 3}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    sink = TextStream(tokenizer)
    assert "".join(sink.push(token) for token in (1, 2, 3)) + sink.finish() == "Hello worlds"


@pytest.mark.parametrize("stop", ["a", "ab", "aab", "aba"])
def test_given_a_text_then_the_longest_end_that_a_stop_begins_with_is_held_back_and_never_the_whole_stop(
    stop: str,
) -> None:
    texts = ["".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length)]
    for text in texts:
        expected = max(length for length in range(len(stop)) if text.endswith(stop[:length]))
        assert overlap(text, stop) == expected


@pytest.mark.parametrize(
    ("name", "spelled"),
    [("Ã", b"\xc3"), ("ðŁ", b"\xf0\x9f"), ("<0xE2>", b"\xe2"), ("Ġ©", b" \xa9"), ("▁\N{REPLACEMENT CHARACTER}", None)],
)
def test_given_a_part_of_a_character_then_its_bytes_are_those_of_its_name(name: str, spelled: bytes | None) -> None:
    class Parts:
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return "\N{REPLACEMENT CHARACTER}"

        def convert_ids_to_tokens(self, token: int) -> str:
            return name

    assert bytes_of(Parts(), 5) == (spelled or "\N{REPLACEMENT CHARACTER}".encode())


def test_given_whole_characters_then_their_bytes_are_those_of_the_text() -> None:
    class Words:
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return " é"

    assert bytes_of(Words(), 5) == " é".encode()
