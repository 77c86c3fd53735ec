"""The bounds of a recording: what is just allowed is done, and one more is refused; a writer that fails or is too slow."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheConfig, KVCacheManager, LayerSpec, Tier
from kvpool.errors import TraceError
from kvpool.recording import TraceRecorder, operations, playback, recorder, replay_recording, writer
from kvpool.recording.lines import Lines
from kvpool.recording.operations import pack

PROMPT = [0, 0, pack(np.arange(8, dtype=np.int32))]
LAYERS = [{"kv_heads": 1, "head_dim": 8}]
HEADER = {"kvpool_recording": 2, "policy": "lru", "layers": LAYERS, "block_size": 4, "gpu_blocks": [64]}


def replayed(path: Path, *lines: Any, **header: Any) -> Any:
    path.write_text("\n".join(json.dumps(line) for line in (HEADER | header, *lines)))
    return replay_recording(path)


def make_manager() -> KVCacheManager:
    return KVCacheManager(KVCacheConfig([LayerSpec(1, 8)], 4, gpu_blocks=64), clock=lambda: 0.0)


FIRST = ["a", 0.0, 1, PROMPT, {}]
SECOND = ["a", 0.0, 2, PROMPT, {}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["q", 0.0, 1, float("inf"), None], "a share"),
        (["q", 0.0, 1, 0, float("nan")], "a share"),
        (["q", 0.0, 1, -1, None], "a number=-1"),
        (["q", 0.0, 1, 2**40 + 1, None], "a number=1099511627777"),
        (["p", 0.0, True], "a number=True"),
        (["p", True, 1], "time=True"),
        (["p", 2.0**40 + 1, 1], "at most 2**40"),
        (["p", -(2.0**40) - 1, 1], "at most 2**40"),
        (["c", 0.0, [1], None, "AA!AAAA=="], "is no text of tokens"),
        (["c", 0.0, [1], None, 5], "5 must be a text"),
        (["t", 0.0, 1, PROMPT, None, float("inf")], "a duration"),
        (["t", 0.0, 1, PROMPT, [1, 2, 3, 4], None], "must be [tenant, scope]"),
        (["t", 0.0, 1, [0, 0, "", 1], None, None], "must be [earlier sequence"),
        (["a", 0.0, 2, PROMPT, {"lease": 1}], "must be true or false"),
        (["a", 0.0, 2, PROMPT, []], "must be an object"),
        (["a", 0.0, 2, [0, 0, pack(np.array([3, -1], np.int32))], {}], "a token is -1"),
        (["v", 0.0, 1, 0, len(Tier)], f"a tier={len(Tier)}"),
        (["v", 0.0, 1, 0, -1], "a tier=-1"),
        (["u", 0.0, 1, 2], "no operation"),
        (["u", 0.0], "no operation"),
        (7, "no operation"),
    ],
)
def test_given_an_argument_just_beyond_what_it_may_be_then_the_line_is_refused(
    tmp_path: Path, line: Any, reason: str
) -> None:
    with pytest.raises(TraceError, match=r"line 3 of r") as refused:
        replayed(tmp_path / "r", FIRST, line)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        ["p", 2.0**40, 1],
        ["p", -(2.0**40), 1],
        ["p", 3, 1],
        ["q", 0.0, 2**40, 0, 8],
        ["q", 0.0, 1, 0.5, 0.75],
        ["v", 0.0, 0, 0, 2],
        ["c", 0.0, [1], [0], ""],
        ["t", 0.0, 2**40, 1, None, None],
    ],
)
def test_given_an_argument_that_is_just_allowed_then_the_line_is_played(tmp_path: Path, line: Any) -> None:
    assert replayed(tmp_path / "r", FIRST, ["p", 0.0, 1], *([] if line[0] == "p" else [line])).requests == 1
    assert replayed(tmp_path / "r", FIRST, line if line[0] == "p" else ["p", 0.0, 1]).requests == 1


def test_given_as_many_prompt_tokens_as_may_be_then_all_are_read_and_one_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_TOKENS", 16)
    assert replayed(tmp_path / "r", FIRST, SECOND).requests == 2
    monkeypatch.setattr(operations, "MAX_TOKENS", 15)
    with pytest.raises(TraceError, match="more than 15 tokens in all; read fewer"):
        replayed(tmp_path / "r", FIRST, SECOND)


def test_given_a_prompt_that_shares_all_of_an_earlier_one_then_it_is_that_one(tmp_path: Path) -> None:
    stats = replayed(tmp_path / "r", FIRST, ["p", 0.0, 1], ["a", 0.0, 2, [1, 8, ""], {}])
    assert (stats.prompt_tokens, stats.hit_tokens["GPU"]) == (16, 7)
    with pytest.raises(TraceError, match="no earlier prompt 1 has 9 tokens"):
        replayed(tmp_path / "r", FIRST, ["a", 0.0, 2, [1, 9, ""], {}])


@pytest.mark.parametrize(
    ("lines", "num_columns"),
    [
        ([["a", 0.0, 1, None, {"num_tokens": 1200}]], 300),
        ([["a", 0.0, 1, None, {"num_tokens": 4, "lookahead": 1196}]], 300),
        ([["a", 0.0, 1, None, {"num_tokens": 4}], ["e", 0.0, [1], 1196, 0]], 300),
        ([["a", 0.0, 1, None, {"num_tokens": 4}], ["e", 0.0, [1], [1100], 96]], 300),
    ],
)
def test_given_block_tables_that_just_fit_then_they_are_made_and_larger_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[Any], num_columns: int
) -> None:
    num_rows = make_manager().inspect.table_shape[1]
    monkeypatch.setattr(playback, "MAX_TABLE_BLOCKS", num_columns * num_rows)
    assert replayed(tmp_path / "r", *lines, gpu_blocks=[300]).requests == 1
    monkeypatch.setattr(playback, "MAX_TABLE_BLOCKS", num_columns * num_rows - 1)
    with pytest.raises(TraceError, match="of 1,200 tokens would take too much memory"):
        replayed(tmp_path / "r", *lines, gpu_blocks=[300])


def test_given_slots_of_several_sequences_then_their_sum_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, stop, refused in ((16, [8, 8], False), (15, [8, 8], True), (7, 8, True)):
        monkeypatch.setattr(playback, "MAX_SLOTS", limit)
        lines = [
            FIRST,
            SECOND,
            ["s", 0.0, [1, 2], [0, 0], stop] if isinstance(stop, list) else ["s", 0.0, [1], 0, stop],
        ]
        if refused:
            with pytest.raises(TraceError, match=f"the slots of more than {limit} tokens"):
                replayed(tmp_path / "r", *lines)
        else:
            replayed(tmp_path / "r", *lines)


@pytest.mark.parametrize("tier", ["gpu_blocks", "host_blocks"])
def test_given_as_many_blocks_as_may_be_then_the_manager_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    header = {"gpu_blocks": [60], tier: [60]}
    total = sum(blocks for [blocks] in header.values())
    monkeypatch.setattr(playback, "MAX_BLOCKS", total)
    replayed(tmp_path / "r", ["h", 0.0, total, 0, 0], **header)
    with pytest.raises(TraceError, match=f"a pool of {total + 1} blocks is asked for"):
        replayed(tmp_path / "r", ["h", 0.0, total + 1, 0, 0], **header)
    monkeypatch.setattr(playback, "MAX_BLOCKS", total - 1)
    with pytest.raises(TraceError, match=f"has {total} blocks; more than {total - 1} cannot"):
        replayed(tmp_path / "r", **header)


# --- the recorder -----------------------------------------------------------------------------------------------------


def test_a_program_may_end_while_it_records(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t").attach(make_manager()) as following:
        assert following._thread is not None
        assert following._thread.daemon


class SlowWriter(writer.RecordingWriter):
    """Waits before its first operation until it is told to go on."""

    go_on = threading.Event()

    def write(self, operation: tuple[Any, ...]) -> str | None:
        assert self.go_on.wait(30)
        return super().write(operation)


def test_given_a_writer_that_falls_behind_then_the_recording_ends_cleanly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RecordingWriter", SlowWriter)
    monkeypatch.setattr(recorder, "MAX_PENDING", 4)
    monkeypatch.setattr(recorder, "_WAKE_AT", 2)
    manager = make_manager()
    SlowWriter.go_on.clear()
    with TraceRecorder(tmp_path / "t").attach(manager) as following:
        for number in range(20):
            manager.allocate(number, [number] * 5)
        assert following.stopped_because == "the writer is 4 operations behind"
        assert len(following._pending) <= 5
        SlowWriter.go_on.set()
    assert not following._pending
    assert (
        json.loads((tmp_path / "t").read_bytes().splitlines()[-1])["end"]["stopped_because"]
        == following.stopped_because
    )
    assert manager.stats().requests == 20


def test_given_a_file_that_cannot_be_written_then_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    manager = make_manager()
    with TraceRecorder("/dev/full").attach(manager) as following:
        monkeypatch.setattr(writer.RecordingWriter, "write", _fails)
        for number in range(9):
            manager.allocate(number, [number] * 5)
    assert following.stopped_because == "cannot write /dev/full: No space left on device"
    assert not following._pending


def test_given_an_operation_that_cannot_be_written_then_the_recorder_says_so_and_the_manager_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no line")

    kv = make_manager()
    following = TraceRecorder(tmp_path / "t").attach(kv)
    monkeypatch.setattr("kvpool.recording.writer.RecordingWriter.write", fail)
    kv.free(kv.allocate("one", [1, 2, 3]))
    following.close()
    assert following.stopped_because == "an operation cannot be written: ValueError('no line')"


def _fails(self: writer.RecordingWriter, operation: tuple[Any, ...]) -> None:
    raise OSError(28, "No space left on device")


def test_given_the_last_operation_that_max_bytes_allows_then_it_is_written_and_the_next_is_not(tmp_path: Path) -> None:
    def size(max_bytes: int) -> tuple[int, str | None]:
        manager = make_manager()
        with TraceRecorder(tmp_path / "t", max_bytes=max_bytes).attach(manager) as following:
            for number in range(3):
                manager.allocate(number, [number] * 5)
        return len((tmp_path / "t").read_bytes().splitlines()) - 2, following.stopped_because

    size(10**6)
    lines = (tmp_path / "t").read_bytes().splitlines(keepends=True)
    two = sum(map(len, lines[:3]))
    assert size(two) == (2, "max_bytes is reached")
    assert size(two + 1) == (3, "max_bytes is reached")
    assert size(10**6) == (3, None)
    assert size(1) == (1, "max_bytes is reached")


def test_only_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    with Lines(tmp_path / "t") as lines:
        assert list(lines) == [b"one\n", b"\xef\xbb\xbftwo\n"]


def test_given_a_batch_whose_last_tokens_were_replaced_when_it_decodes_on_then_the_replay_finds_what_it_has(
    tmp_path: Path,
) -> None:
    manager = make_manager()
    with TraceRecorder(tmp_path / "t").attach(manager):
        handles = [manager.allocate(first, [first] * 3) for first in (1, 2)]
        for handle in handles:
            manager.commit(handle)
        batch = manager.batch(handles)
        for token in (5, 6, 7):
            manager.extend_batch(batch)
            manager.commit_batch(batch, [token, token])
        for handle in handles:
            manager.rewind(handle, 2)
            manager.extend(handle, 2)
            manager.commit(handle, [8, 9])
        for token in (10, 11):
            manager.extend_batch(batch)
            manager.commit_batch(batch, [token, token])
        manager.free_batch(handles)
        assert manager.allocate("again", [1, 1, 1, 5, 8, 9, 10, 11, 0]).num_cached_tokens == 8
    assert replay_recording(tmp_path / "t").hit_tokens == manager.stats().hit_tokens


@pytest.mark.parametrize("parts", [5, [5], [{}], [{"name": "conv"}]])
def test_given_a_state_that_is_none_then_the_header_is_refused(tmp_path: Path, parts: Any) -> None:
    with pytest.raises(TraceError, match=r"line 1 of r describes no manager: parts=.* must be a list of objects"):
        replayed(tmp_path / "r", layers=[*LAYERS, {"parts": parts}])


def test_given_images_of_several_sequences_in_one_commit_then_the_replay_tells_them_apart(tmp_path: Path) -> None:
    manager = make_manager()
    with TraceRecorder(tmp_path / "t").attach(manager) as following:
        handles = [manager.allocate(name, num_tokens=8) for name in range(2)]
        images = [(2, 2, "cat"), (8 + 3, 2, "dog")]
        manager.commit_batch(handles, [9] * 16, [8, 8], multimodal=images)
        manager.free_batch(handles)
        for name, image in enumerate([(2, 2, "cat"), (3, 2, "dog"), (3, 2, "cat")]):
            manager.free(manager.allocate(("again", name), [9] * 9, multimodal=[image]))
    assert following.stopped_because is None
    assert manager.stats().hit_tokens["GPU"] == 8 + 8 + 3
    assert replay_recording(tmp_path / "t").hit_tokens == manager.stats().hit_tokens


@pytest.mark.parametrize("line", ["{oops", "nonsense", "[1", '"a'])
def test_given_a_line_that_is_no_json_then_it_is_named_with_the_reason(tmp_path: Path, line: str) -> None:
    (tmp_path / "r").write_text(f"{json.dumps(HEADER)}\n{line}\n")
    with pytest.raises(TraceError, match=r"^line 2 of r is broken \(it is not JSON \("):
        replay_recording(tmp_path / "r")
