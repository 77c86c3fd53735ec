"""Trace files: every format, compressed or not, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvpool import ReuseHint
from kvpool.replay import Trace, TraceBuilder, TraceError, read_trace, write_trace
from kvpool.replay.trace import to_blocks

TOKENS = {"timestamp": 0, "tokens": [7, 8, 9, 10]}
GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}


def write(path: Path, *records: object) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_given_a_trace_when_written_and_read_then_it_is_the_same(
    tmp_path: Path, chat_trace: Trace, suffix: str
) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"chat.jsonl{suffix}"
    write_trace(chat_trace, path)
    again = read_trace(path)
    assert again.ids.tolist() == chat_trace.ids.tolist()
    assert again.offsets.tolist() == chat_trace.offsets.tolist()
    assert again.timestamps.tolist() == chat_trace.timestamps.tolist()
    assert again.unit == chat_trace.unit


def test_given_token_lines_then_they_are_read_as_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"timestamp": 5.5, "tokens": [7, 8, 9], "output_length": 2, "session": 3})
    trace = read_trace(path)
    assert (trace.format, trace.unit, trace[0].ids.tolist(), trace[0].session) == ("tokens", 1, [7, 8, 9], "3")
    assert trace[0].timestamp == 5.5


def test_given_expected_continuations_then_they_are_read_and_written_and_survive_a_change_of_blocks(
    tmp_path: Path,
) -> None:
    lines = ({**TOKENS, "expected_seconds": 3, "stop": "tool_use"}, TOKENS, {**TOKENS, "expected_seconds": -1})
    trace = read_trace(write(tmp_path / "t.jsonl", *lines), max_errors=1)
    assert trace.expected == (3.0, None)
    write_trace(trace, tmp_path / "again.jsonl")
    again = to_blocks(read_trace(tmp_path / "again.jsonl"), 2)
    assert again.hints() == [ReuseHint("tool_calls", 3.0), None] == again.head(2).full_blocks_only().hints()


@pytest.mark.parametrize("size", [3, 48, 100, 512])
def test_given_blocks_of_any_size_then_they_are_read_as_they_were_written(tmp_path: Path, size: int) -> None:
    builder = TraceBuilder("t")
    for length in (size + 1, 5 * size - 1, 9 * size, 20 * size - 1, 1):
        builder.add(0, [1] * length, length, 0)
    write_trace(to_blocks(builder.build(), size), tmp_path / "blocks.jsonl")
    assert read_trace(tmp_path / "blocks.jsonl").unit == size


def test_given_reasons_to_stop_then_known_ones_are_read_and_written(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", *({**GOOD, "stop": stop} for stop in ("tool_use", "stop", "", 7, "fell asleep")), GOOD
    )
    trace = read_trace(path)
    assert trace.stops == ("tool_calls", "stop", None, None, None, None)
    write_trace(trace, tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl").stops == trace.stops
    assert trace.head(2).stops == trace.full_blocks_only().stops[:2] == trace.stops[:2]


def test_given_an_azure_file_then_lengths_are_read_and_reuse_is_unknown(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    trace = read_trace(path)
    assert (len(trace), trace.reuse_known, trace.input_lengths.tolist()) == (2, False, [374, 396])
    assert trace.duration == pytest.approx(4.314579, abs=1e-6)


def test_given_an_azure_file_with_other_columns_then_they_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("Model,GeneratedTokens,TIMESTAMP,ContextTokens\r\nm,44,2023-11-16 18:15:46.68,374\r\n")
    request = read_trace(path)[0]
    assert (request.input_length, request.output_length) == (374, 44)


def test_given_an_azure_file_without_a_column_then_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("arrival,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    with pytest.raises(TraceError, match=r"must name TIMESTAMP,ContextTokens,GeneratedTokens once each"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "Expecting"),
        ("[1, 2]", "JSON object"),
        ({"timestamp": 0, "input_length": 5}, "hash_ids is missing"),
        ({**GOOD, "input_length": -3}, "input_length=-3"),
        ({**GOOD, "input_length": 0}, "input_length is 0, but"),
        ({**GOOD, "timestamp": "noon"}, "timestamp='noon'"),
        ({**GOOD, "hash_ids": [[1]]}, "ids must be integers or strings"),
    ],
)
def test_given_a_broken_line_then_it_is_skipped_and_named(tmp_path: Path, line: object, reason: str) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD, line, GOOD))
    assert len(trace) == 2
    [(number, text)] = trace.problems.broken
    assert number == 2
    assert reason in text


def test_given_too_many_broken_lines_then_the_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, *["{"] * 4)
    assert len(read_trace(path, max_errors=4)) == 1
    with pytest.raises(TraceError, match=r"more than 3 broken lines.*line 2"):
        read_trace(path, max_errors=3)


def test_given_odd_requests_then_they_work_and_are_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {**GOOD, "timestamp": 9},
        GOOD,
        {**GOOD, "input_length": 0, "hash_ids": []},
        {**GOOD, "hash_ids": [4, 4]},
    )
    problems = read_trace(path).problems
    assert (problems.unsorted, problems.zero_length, problems.repeating) == (1, 1, 1)
    assert len(problems.sentences()) == 3


def test_given_ids_that_are_large_or_text_then_they_are_renumbered_consistently(tmp_path: Path) -> None:
    lines = [{**GOOD, "hash_ids": ids} for ids in ([3, 4], [3, 2**60], [2**60, -1], ["a", 3])]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    first, second, third, fourth = (request.ids.tolist() for request in trace)
    assert trace.problems.renumbered
    assert first[0] == second[0] == fourth[1]
    assert second[1] == third[0]
    assert len({*first, *second, *third, *fourth}) == 5


@pytest.mark.parametrize(("length", "count", "unit"), [(1000, 2, 512), (1024, 2, 512), (304, 19, 16), (300, 19, 16)])
def test_given_lengths_then_the_block_size_is_inferred(tmp_path: Path, length: int, count: int, unit: int) -> None:
    record = {**GOOD, "input_length": length, "hash_ids": list(range(count))}
    assert read_trace(write(tmp_path / "t.jsonl", record)).unit == unit


def test_given_ids_for_more_tokens_than_a_block_has_then_no_size_is_tried(tmp_path: Path) -> None:
    record = {**GOOD, "input_length": 2**22 * 8 // 5, "hash_ids": [1, 2, 3]}  # 1.1 million sizes would fit
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        with pytest.raises(TraceError, match="about 2,236,962 tokens"):
            read_trace(write(tmp_path / "t.jsonl", record))
    finally:
        sys.setprofile(None)
    assert calls["call"] < 10_000


def test_given_a_file_that_is_missing_empty_or_cut_then_the_message_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot open"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="empty"):
        read_trace(write(tmp_path / "t.jsonl"))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:-20])
    with pytest.raises(TraceError, match="ends or breaks"):
        read_trace(cut)


def test_given_an_unknown_format_then_the_known_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="mooncake"):
        read_trace(write(tmp_path / "t.jsonl", GOOD), format="parquet")


def test_given_full_blocks_only_then_the_partial_last_block_is_gone(tmp_path: Path) -> None:
    records = [GOOD, {**GOOD, "input_length": 1024}]
    trace = read_trace(write(tmp_path / "t.jsonl", *records)).full_blocks_only()
    assert [request.ids.tolist() for request in trace] == [[1], [1, 2]]


def test_given_a_limit_then_reading_stops_there(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, GOOD, GOOD)
    assert len(read_trace(path, limit=2)) == 2
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(TraceError, match="limit="):
            read_trace(path, limit=wrong)
    assert len(read_trace(write(tmp_path / "t.jsonl", GOOD, GOOD, GOOD), limit=2)) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_given_a_full_disk_then_writing_a_trace_names_the_file(chat_trace: Trace) -> None:
    with pytest.raises(
        TraceError, match="cannot write /dev/full: No space left on device; what is there is a part of it"
    ):
        write_trace(chat_trace, "/dev/full")
