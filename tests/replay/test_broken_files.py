"""No file, however it was broken or crafted, raises anything but an error of ours, or takes memory without bound."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import broken_files
import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.cli import main
from kvpool.config.model_config import layers_from_hf
from kvpool.errors import ConfigError, InvalidArgumentError, NeverFitsError, OutOfBlocksError
from kvpool.recording import lines as lines_module
from kvpool.recording import operations as operations_module
from kvpool.recording import playback as recording_module
from kvpool.replay import TraceBuilder, TraceError, read_trace, replay_recording
from kvpool.replay import trace as trace_module
from kvpool.replay.bounds import MODELS, run_model
from kvpool.replay.costs import count_weights
from kvpool.scheduling.cost_model import read_costs

GOOD = b'{"timestamp": 0, "input_length": 1000, "output_length": 7, "hash_ids": [1, 2]}\n'
MIB = 2**20
HEADER, *LINES = broken_files.SAMPLES["recording"].splitlines(keepends=True)


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """What happens inside never holds more memory than this."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.quick("0")
@pytest.mark.parametrize("first", range(0, 900, 150))
def test_given_files_broken_in_any_way_then_they_are_read_or_refused_with_an_error_of_ours(
    tmp_path: Path, first: int
) -> None:
    for seed in range(first, first + 150):
        try:
            broken_files.check(seed, tmp_path)
        except Exception as error:
            pytest.fail(f"python tests/replay/broken_files.py 1 {seed}: {error!r}")


# --- compression and lines --------------------------------------------------------------------------------------------


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


COMPRESSIONS: list[Callable[[bytes], bytes]] = [gzip.compress, zstd]


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_given_a_small_file_that_is_one_endless_line_then_it_is_refused_and_memory_stays_bounded(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(compress(GOOD) + compress(b"a" * MIB) * 1500)
    assert path.stat().st_size < 2 * MIB
    with at_most(160 * MIB), pytest.raises(TraceError, match=r"line 2 of .*bomb is longer than 32 MiB"):
        read_trace(path)


def test_given_one_member_that_decompresses_to_gigabytes_then_little_of_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(zstd(b"\n" * (256 * MIB)))
    with at_most(120 * MIB), pytest.raises(TraceError, match="starts with an empty line"):
        read_trace(path)


def test_given_a_line_at_the_limit_then_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").write_bytes(GOOD * 2)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", len(GOOD))
    assert len(read_trace(tmp_path / "t")) == 2
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", len(GOOD) - 1)
    with pytest.raises(TraceError, match="line 1 of"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_given_members_behind_each_other_then_all_are_read(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "t").write_bytes(compress(GOOD * 2 + GOOD[:9]) + compress(GOOD[9:]) + bytes(512))
    assert len(read_trace(tmp_path / "t")) == 3


@pytest.mark.parametrize("compress", COMPRESSIONS)
@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data + b"junk", lambda data: data[:12]])
def test_given_damaged_compression_then_the_file_is_refused_not_shortened(
    tmp_path: Path, compress: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    for data, read in ((GOOD * 10, read_trace), (broken_files.SAMPLES["recording"], replay_recording)):
        (tmp_path / "t").write_bytes(damage(compress(data)))
        with pytest.raises(TraceError, match=r"ends or breaks after line \d+"):
            read(tmp_path / "t")


def test_given_a_pipe_then_it_is_read_like_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with (tmp_path / "pipe").open("wb", buffering=0) as stream:
            data = gzip.compress(GOOD * 3)
            stream.write(data[:1])
            stream.write(data[1:])

    writer = threading.Thread(target=write)
    writer.start()
    assert len(read_trace(tmp_path / "pipe")) == 3
    writer.join()


def test_given_a_folder_or_an_impossible_name_then_it_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a\0b"):
        with pytest.raises(TraceError, match="cannot open"):
            read_trace(path)


def test_given_a_byte_order_mark_and_carriage_returns_then_nothing_is_broken(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n") * 2)
    trace = read_trace(tmp_path / "t")
    assert (len(trace), trace.problems.broken) == (2, [])


# --- values of a trace ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 100_000, "it nests too deep"),
        ('{"timestamp": ' + "9" * 5_000 + "}", "too many digits"),
        ('{"hash_ids": [1], "timestamp": NaN}', "timestamp=nan"),
        ('{"hash_ids": [1], "timestamp": 1e999}', "timestamp=inf"),
        ('{"hash_ids": [1], "timestamp": ' + "9" * 400 + "}", "timestamp=(an integer of"),
        ('{"hash_ids": [1], "timestamp": 1700000000000000000}', "milliseconds, at most 2**53"),
        ('{"hash_ids": [1], "input_length": 9223372036854775808}', "input_length=9223372036854775808 must be at most"),
        ('{"hash_ids": [1], "output_length": true}', "output_length=True must be an integer"),
        ('{"hash_ids": [true]}', "ids must be integers or strings"),
        ('{"hash_ids": [99999999999, [1]]}', "ids must be integers or strings"),
        ('{"hash_ids": [1], "session": {}}', "session={} must be a text"),
        ('{"hash_ids": [1], "tenant": "' + "x" * 2_000 + '"}', "tenant='xxx"),
    ],
)
def test_given_an_impossible_value_then_its_line_is_skipped_and_nothing_of_it_stays(
    tmp_path: Path, line: str, reason: str
) -> None:
    (tmp_path / "t").write_bytes(GOOD + line.encode() + b"\n" + GOOD)
    trace = read_trace(tmp_path / "t")
    assert [request.ids.tolist() for request in trace] == [[1, 2], [1, 2]]
    [(number, text)] = trace.problems.broken
    assert number == 2
    assert reason in text
    assert len(text) < 300


def test_given_text_that_is_no_utf_8_then_its_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(GOOD + b'{"hash_ids": ["\xc3\x28"]}\n')
    assert "no UTF-8 text" in read_trace(tmp_path / "t").problems.broken[0][1]


def test_given_the_largest_ids_and_texts_then_all_get_small_numbers(tmp_path: Path) -> None:
    records = [{"hash_ids": [2**31 - 2, 2**31 - 3]}, {"hash_ids": ["a", "b", "c", 2**31 - 2]}]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, records)))
    assert read_trace(tmp_path / "t", block_size=16).ids.tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize(("name", "value"), [("MAX_IDS", 5), ("MAX_REQUESTS", 2)])
def test_given_more_than_a_trace_can_hold_then_the_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    (tmp_path / "t").write_bytes(GOOD * 3)
    monkeypatch.setattr(trace_module, name, value)
    with pytest.raises(TraceError, match=r"too many for a trace in memory; .*--limit"):
        read_trace(tmp_path / "t", max_errors=100)
    assert len(read_trace(tmp_path / "t", limit=2)) == 2


@pytest.mark.parametrize("name", MODELS)
def test_given_ids_far_apart_then_bounds_take_memory_for_those_that_are_there(name: str) -> None:
    trace = TraceBuilder("t", unit=16).add(0, [5, 2**31 - 2], 32, 0).add(1, [5, 2**31 - 2], 32, 0).build()
    with at_most(MIB):
        assert run_model(trace, name, 2).hit_blocks == 2


def test_given_lengths_that_no_block_can_have_then_the_block_size_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(GOOD.replace(b"1000", b"2147483647"))
    with pytest.raises(TraceError, match="give the number of tokens behind an id as block_size"):
        read_trace(tmp_path / "t")
    assert read_trace(tmp_path / "t", block_size=512).unit == 512
    with pytest.raises(TraceError, match="block_size=0"):
        read_trace(tmp_path / "t", block_size=0)


def azure(path: Path, *times: str) -> Path:
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{time},374,44" for time in times)]))
    return path


def test_given_times_of_several_zones_then_they_are_one_time_line(tmp_path: Path) -> None:
    times = (
        "2024-05-10 00:00:00.009930+00:00",
        "2024-05-10 00:00:01+00:00",
        "2024-05-10T02:00:02.5+0200",
        "2024-05-10 00:00:03Z",
    )
    trace = read_trace(azure(tmp_path / "a.csv", *times))
    assert trace.timestamps.tolist() == pytest.approx([0, 990.07, 2490.07, 2990.07])


def test_given_times_with_and_without_a_zone_then_those_unlike_the_first_are_skipped(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path / "a.csv", "2024-05-10 00:00:00", "2024-05-10 00:00:01Z", "2024-05-10 00:00:02"))
    assert trace.timestamps.tolist() == [0, 2000]
    assert trace.problems.broken == [(3, "some times of this file name their zone and others do not")]


@pytest.mark.parametrize(
    "row",
    [
        "2024-13-10 00:00:00,1,1",
        "noon,1,1",
        "2024-05-10 00:00:00,1",
        "2024-05-10 00:00:00,-1,1",
        "2024-05-10 00:00:00,9" + "9" * 30 + ",1",
    ],
)
def test_given_a_broken_row_then_it_is_skipped_and_named(tmp_path: Path, row: str) -> None:
    path = azure(tmp_path / "a.csv", "2024-05-10 00:00:00")
    path.write_text(f"{path.read_text()}\n{row}\n")
    trace = read_trace(path)
    assert len(trace) == 1
    assert trace.problems.broken[0][0] == 3


# --- recordings -------------------------------------------------------------------------------------------------------


def write_recording(path: Path, *lines: object, **header: Any) -> Path:
    first = {**json.loads(HEADER), **header}
    path.write_text("\n".join(json.dumps(line) for line in (first, *lines)))
    return path


PROMPT = [0, 0, operations_module.pack(np.arange(8, dtype=np.int32))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([], "no operation"),
        (["?", 0], "no operation"),
        ([["a"], 0], "no operation"),
        (["p", 0], "no operation"),
        (["p", "noon", 1], "time='noon'"),
        (["p", float("inf"), 1], "time=inf"),
        (["p", -1e300, 1], "at most 2**40"),
        (["p", 0, 7], "sequence 7 is not live"),
        (["u", 0, 7], "there is no pin 7"),
        (["e", 0, [1], [-1], 0], "a number=-1"),
        (["e", 0, {}, 1, 0], "must be a list of numbers"),
        (["f", 0, [1], 1], "must be true or false"),
        (["c", 0, [1], None, "AAA"], "is no text of tokens"),
        (["c", 0, [1], None, "/////w=="], "cannot be negative"),
        (["a", 0, 2, [9, 4, ""], {}], "no earlier prompt 9 has 4 tokens"),
        (["a", 0, 2, [1, 99, ""], {}], "no earlier prompt 1 has 99 tokens"),
        (["a", 0, 2, PROMPT, {"colour": 1}], "'colour' is unknown"),
        (["a", 0, 2, PROMPT, {"retention": {"ranges": [{"start": 1}]}}], "a token range lacks end"),
        (["a", 0, 1, PROMPT, {}], "already live"),
        (["t", 0, 1, PROMPT, [1], None], "must be [tenant, scope]"),
        (["t", 0, 1, [1, 2], None, None], "must be [earlier sequence"),
        (["c", 0, [1], None, "AA!AAA=="], "is no text of tokens"),
        (["a", 0, 2, PROMPT, {"retention": {"ranges": 5}}], "5 must be a list"),
        (["v", 0, 1, 0, 9], "a tier=9"),
    ],
)
def test_given_an_operation_that_cannot_be_then_its_line_and_the_reason_are_told(
    tmp_path: Path, line: list[Any], reason: str
) -> None:
    path = write_recording(tmp_path / "r", ["a", 0, 1, PROMPT, {}], line)
    with pytest.raises(TraceError, match=r"line 3 of r (is broken|cannot be done again)") as refused:
        replay_recording(path)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("line", "header", "reason"),
    [
        (["h", 0, 2**31 - 1, 0, 0], {}, "a pool of 2,147,483,647 blocks"),
        (["s", 0, [1], 0, 2**40], {}, "slots of more than"),
        (["a", 0, 2, None, {"num_tokens": 2**40}], {}, "would take too much memory"),
        (["e", 0, [1], 2**40, 0], {}, "would take too much memory"),
        (["z", 0], {"gpu_blocks": 2**31 - 1}, "blocks; more than 67,108,864 cannot be replayed"),
        (["z", 0], {"host_blocks": 2**31 - 1}, "blocks; more than 67,108,864 cannot be replayed"),
    ],
)
def test_given_a_recording_that_asks_for_huge_arrays_then_they_are_not_made(
    tmp_path: Path, line: list[Any], header: dict[str, Any], reason: str
) -> None:
    path = write_recording(tmp_path / "r", ["a", 0, 1, PROMPT, {}], line, **header)
    with at_most(512 * MIB), pytest.raises(TraceError) as refused:
        replay_recording(path)
    assert reason in str(refused.value)


def test_given_more_sequences_than_an_engine_has_then_they_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recording(tmp_path / "r", ["a", 0, 1, PROMPT, {}], ["k", 0, 1, [2, 3, 4]])
    assert replay_recording(path).forks == 3
    monkeypatch.setattr(recording_module, "MAX_SEQUENCES", 3)
    with pytest.raises(TraceError, match="line 3 of r cannot be done again: more than 3 sequences"):
        replay_recording(path)


def test_given_lines_behind_the_end_then_the_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(broken_files.SAMPLES["recording"] * 2)
    for read in (read_trace, replay_recording):
        with pytest.raises(TraceError, match=r"is broken \(it follows the end\)"):
            read(tmp_path / "r")


def test_given_few_bytes_that_repeat_a_long_prompt_then_the_sum_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_recording(
        tmp_path / "r", *(["a", 0, serial, PROMPT if serial == 1 else [1, 8, ""], {}] for serial in range(1, 9))
    )
    monkeypatch.setattr(operations_module, "MAX_TOKENS", 40)
    for read in (read_trace, replay_recording):
        with pytest.raises(TraceError, match=r"line 7 of r .*more than 40 tokens"):
            read(path)
    assert len(read_trace(path, limit=5)) == 5


def test_given_an_operation_that_does_not_fit_any_more_then_the_error_stays_the_managers_and_names_the_line(
    tmp_path: Path,
) -> None:
    path = write_recording(tmp_path / "r", ["a", 0, 1, PROMPT, {}], ["a", 0, 2, PROMPT, {"lookahead": 999}])
    with pytest.raises(NeverFitsError, match="line 3 of r does not fit any more"):
        replay_recording(path)
    assert issubclass(NeverFitsError, OutOfBlocksError)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"layers": 3}, "layers=3 must be a list of objects"),
        ({"layers": [3]}, "a layer is 3, and must be an object"),
        ({"layers": [{"heads": 1}]}, "a layer is .*, and must be an object with fields of"),
        ({"layers": [{"kv_heads": 1}]}, "a layer lacks head_dim"),
        ({"layers": [{"parts": 5}]}, "parts=5 must be a list of objects"),
        ({"layers": [{"parts": [{"name": "conv"}]}]}, "parts=.* must be a list of objects"),
        ({"block_size": "x"}, "block_size"),
        ({"policy": []}, "must be the name of a policy"),
        ({"gpu_blocks": -1}, "gpu_blocks"),
    ],
)
def test_given_a_header_that_describes_no_manager_then_it_is_refused(
    tmp_path: Path, header: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TraceError, match=f"line 1 of r describes no manager: .*{reason}"):
        replay_recording(write_recording(tmp_path / "r", **header))


def test_given_counts_for_other_sequences_then_a_recording_is_no_trace(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "r", ["a", 0, 1, PROMPT, {}], ["c", 0, [1], [1, 1], "AAAAAA=="])
    with pytest.raises(TraceError, match=r"line 3 of r is broken \(2 counts for 1 sequences\)"):
        read_trace(path)


def test_given_every_option_of_allocate_then_a_recording_may_have_it() -> None:
    options = set(inspect.signature(KVCacheManager.allocate).parameters) - {"self", "request_id", "tokens"}
    options -= {"multimodal", "hint"}  # mixed into the hashes of the tokens; an operation of its own
    operations_module._check_operation(["a", 0, 1, None, {}])
    for name in options:
        with pytest.raises(TraceError) as refused:
            operations_module._check_operation(["a", 0, 1, None, {name: "no value of anything"}])
        assert "is unknown" not in str(refused.value)


def test_given_blank_lines_then_the_numbers_count_them(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(HEADER + b"\n\n{\n")
    for read in (read_trace, replay_recording):
        with pytest.raises(TraceError, match="line 4 of r is broken"):
            read(tmp_path / "r")


# --- measurements, configs, commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters", 0),
        ("parameters", 1.5),
        ("memory_bytes", -1),
        ("layers", [3]),
        ("layers", 3),
        ("costs", 3),
        ("machine", {}),
        ("errors", []),
    ],
)
def test_given_a_measurement_with_an_impossible_value_then_it_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    found = json.loads(broken_files.SAMPLES["costs"])
    found["measurement"][name] = value
    (tmp_path / "c.json").write_text(json.dumps(found))
    with pytest.raises(InvalidArgumentError, match=r"the measurement in .* is broken .*kvpool bench"):
        read_costs(tmp_path / "c.json")


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 5_000, "1" * 5_000, " " * (16 * MIB + 1)])
def test_given_a_config_or_measurement_that_nobody_meant_then_it_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    for read in (read_costs, layers_from_hf, count_weights):
        with pytest.raises(InvalidArgumentError if read is read_costs else ConfigError, match=r"config\.json"):
            read(path)


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": float("inf")},
        {"hidden_size": "x"},
        {"num_attention_heads": 0},
        {"q_lora_rank": "x"},
        {"vocab_size": 10**400},
    ],
)
def test_given_a_config_with_an_impossible_size_then_its_weights_are_not_counted(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        count_weights({**json.loads(broken_files.SAMPLES["config"]), **values})


def test_given_configs_inside_each_other_then_the_innermost_is_found() -> None:
    inner = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}
    for _ in range(5_000):
        inner = {"thinker_config": inner}
    assert len(layers_from_hf(inner)) == 2


def test_given_text_that_looks_like_markup_then_a_command_shows_it_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "[b].jsonl").write_bytes(GOOD + b'{"hash_ids": [1], "timestamp": "[/red]"}\n')
    assert main(["trace", "info", str(tmp_path / "[b].jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "timestamp='[/red]'" in shown
    assert "[b].jsonl" in shown


def test_given_a_broken_file_then_a_command_says_so_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.gz").write_bytes(gzip.compress(GOOD * 99)[:-9])
    for words in (
        ["trace", "info"],
        ["replay"],
        ["replay", "--exact"],
        ["plan", "--model", "x", "--gpu", "h200", "--trace"],
    ):
        assert main([*words, str(tmp_path / "t.gz")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
