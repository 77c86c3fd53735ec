"""A trace recorded from a live manager: replayed, it gives the manager's own counters; read, it gives nothing away."""

from __future__ import annotations

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvpool import DType, KVCacheConfig, KVCacheManager, LayerSpec, ReuseHint, ReuseScope, eviction
from kvpool.config.layers import TokenPart
from kvpool.errors import InvalidArgumentError, OutOfBlocksError
from kvpool.eviction import KeyedPolicy, Run, register_policy
from kvpool.recording.lines import Lines, open_bytes
from kvpool.recording.playback import header_of, manager_from
from kvpool.replay import TraceError, TraceRecorder, read_trace, replay_recording


def make_manager(**options: Any) -> KVCacheManager:
    settings = {"block_size": 4, "gpu_blocks": 56, "host_blocks": 16, **options}
    layers = [LayerSpec(kv_heads=1, head_dim=16), LayerSpec(kv_heads=1, head_dim=16, window=8)]
    return KVCacheManager(KVCacheConfig(layers[: settings.pop("num_groups", 1)], **settings))


def drive(manager: KVCacheManager, steps: int = 300) -> None:
    """An engine in miniature: overlapping conversations, chunked prefill, decoding, forks, rewinds, swaps."""
    random = np.random.default_rng(11)
    prompts = [random.integers(0, 50, 10).tolist() for _ in range(6)]
    live: list[Any] = []
    for step in range(steps):
        if len(live) < 4:
            base = prompts[int(random.integers(6))]
            prompt = base + random.integers(0, 50, int(random.integers(1, 9))).tolist()
            scope = ReuseScope(tenant="b") if random.random() < 0.2 else ReuseScope()
            try:
                handle = manager.allocate(step, prompt, scope=scope, reserve=int(random.integers(1, len(prompt) + 1)))
            except OutOfBlocksError:
                manager.free_batch(live)
                live = []
                continue
            live.append(handle)
        try:
            handle = live[-1]
            manager.commit(handle)
            if handle.num_committed < handle.num_prompt_tokens:
                manager.extend(handle, handle.num_prompt_tokens - handle.num_reserved)
                manager.commit(handle, handle.num_prompt_tokens - handle.num_committed)
            batch = manager.batch(live)
            manager.extend_batch(batch)
            manager.commit_batch(batch, random.integers(0, 50, len(live)))
            choice = random.random()
            if choice < 0.05:
                live.extend(manager.fork(live[0], f"fork {step}"))
            elif choice < 0.1:
                manager.rewind(live[-1], 1)
            elif choice < 0.15 and manager.can_swap_out(live[0]):
                manager.swap_out(live[0])
                manager.swap_in(live[0])
        except OutOfBlocksError:
            manager.free(live.pop())
        if live and random.random() < 0.3:
            finished = live.pop(int(random.integers(len(live))))
            prompts[int(random.integers(6))] = finished.token_ids[:30].tolist()
            manager.free(finished)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_given_the_name_of_a_compressed_file_then_the_recording_is_compressed_and_can_be_replayed(
    tmp_path: Path, suffix: str
) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path, manager = tmp_path / f"live.kvtrace{suffix}", make_manager()
    with TraceRecorder(path).attach(manager) as recorder:
        handle = manager.allocate("a", list(range(8)))
        manager.commit(handle)
        manager.free(handle)
    assert recorder.stopped_because is None
    assert path.read_bytes()[:2] == {"": b'{"', ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5"}[suffix]
    assert replay_recording(path).requests == 1


@pytest.mark.quick("options0", "options3")
@pytest.mark.parametrize(
    "options", [{}, {"host_blocks": None}, {"eviction_policy": "s3fifo"}, {"num_groups": 2}, {"partial_match": False}]
)
def test_given_a_live_manager_when_its_recording_is_replayed_then_all_counters_agree(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    manager = make_manager(**options)
    with TraceRecorder(tmp_path / "live.kvtrace.gz").attach(manager) as recorder:
        drive(manager)
    assert recorder.stopped_because is None
    live, again = manager.stats(), replay_recording(tmp_path / "live.kvtrace.gz")
    assert live.hit_blocks["GPU"] > 100
    for name in (
        "requests",
        "prompt_tokens",
        "hit_blocks",
        "hit_tokens",
        "partial_hit_tokens",
        "blocks_allocated",
        "blocks_merged",
        "offloaded_blocks",
        "onboarded_blocks",
        "evictions",
        "forks",
        "rewinds",
        "swaps_out",
    ):
        assert getattr(again, name) == getattr(live, name), name


def test_given_a_recording_then_it_can_be_read_as_a_trace_and_shows_no_token(tmp_path: Path) -> None:
    manager = make_manager()
    path = tmp_path / "live.kvtrace"
    prompt = [17] * 12
    with TraceRecorder(path).attach(manager):
        for name in ("a", "b"):
            handle = manager.allocate(name, [*prompt, len(name)])
            manager.commit(handle)
            manager.extend(handle)
            manager.commit(handle, [23])
            manager.free(handle)
    trace = read_trace(path)
    assert (trace.format, len(trace), trace.output_lengths.tolist()) == ("recording", 2, [1, 1])
    first, second = (request.ids for request in trace)
    assert first.tolist() == second.tolist()
    assert len(set(first.tolist())) == 13, "equal tokens at different places must look different"
    assert 17 not in first.tolist()


def test_given_two_recordings_of_the_same_prompts_then_they_have_nothing_in_common(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "two"):
        manager = make_manager()
        with TraceRecorder(tmp_path / name).attach(manager):
            manager.allocate(1, list(range(20)))
        seen.append(set(read_trace(tmp_path / name)[0].ids.tolist()))
    assert not seen[0] & seen[1]


def test_given_a_shared_prefix_then_it_is_written_once(tmp_path: Path) -> None:
    manager = make_manager(gpu_blocks=4096)
    with TraceRecorder(tmp_path / "t").attach(manager):
        for number in range(10):
            manager.allocate(number, [*range(1000), number])
    assert (tmp_path / "t").stat().st_size < 2 * 1000 * 4 * 4 / 3


def test_given_prompts_that_differ_in_one_token_then_they_share_the_whole_blocks_before_it_and_stay_different(
    tmp_path: Path,
) -> None:
    manager = make_manager(gpu_blocks=64)
    prompts = [[*range(8)]] + [[*range(at), 99, *range(at + 1, 8)] for at in range(8)]
    with TraceRecorder(tmp_path / "t").attach(manager):
        for number, prompt in enumerate(prompts):
            manager.allocate(number, prompt)
    lines = [json.loads(line) for line in (tmp_path / "t").read_text().splitlines()[1:-1]]
    assert [prefix[:2] for _, _, _, prefix, _ in lines] == [[0, 0]] * 5 + [[1, 4]] * 4  # of the first prompt
    first, *others = (request.ids.tolist() for request in read_trace(tmp_path / "t"))
    assert [[mine == its for mine, its in zip(ids, first, strict=True)].index(False) for ids in others] == [*range(8)]


def test_given_a_gzip_file_that_repeats_what_stands_32_kib_before_then_it_is_read(tmp_path: Path) -> None:
    line = np.random.default_rng(3).bytes(16_000).hex().encode() + b"\n"
    (tmp_path / "t").write_bytes(gzip.compress(2 * line))
    with Lines(tmp_path / "t") as lines:
        assert list(lines) == [line, line]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_given_a_compressed_file_with_a_wrong_byte_then_reading_it_says_where(tmp_path: Path, suffix: str) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"t{suffix}"
    with open_bytes(path, "wb") as stream:
        stream.write(np.random.default_rng(3).bytes(16_000).hex().encode() + b"\n")
    content = bytearray(path.read_bytes())
    content[12:40] = b"\xff" * 28
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"t.* ends or breaks after line 0: (?!it was cut off)"), Lines(path) as lines:
        list(lines)


def test_given_no_package_for_zstd_then_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match="pip install zstandard"):
        open_bytes(tmp_path / "t.zst", "wb")


def test_given_a_size_limit_then_the_file_ends_cleanly_there(tmp_path: Path) -> None:
    manager = make_manager(gpu_blocks=4096)
    with TraceRecorder(tmp_path / "t", max_bytes=4000).attach(manager) as recorder:
        for number in range(100):
            manager.free(manager.allocate(number, np.arange(number * 50, number * 50 + 50)))
    assert recorder.stopped_because == "max_bytes is reached"
    lines = (tmp_path / "t").read_bytes().splitlines()
    assert json.loads(lines[-1])["end"]["stopped_because"] == "max_bytes is reached"
    assert (tmp_path / "t").stat().st_size < 5000
    assert 0 < len(read_trace(tmp_path / "t")) < 100
    assert replay_recording(tmp_path / "t").requests == len(read_trace(tmp_path / "t"))


def test_given_a_full_disk_then_the_engine_goes_on_and_the_recorder_says_why_it_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    manager = make_manager(gpu_blocks=4096)
    with TraceRecorder("/dev/full").attach(manager) as recorder:
        for number in range(3000):
            manager.free(manager.allocate(number, range(number, number + 50)))
    assert recorder.stopped_because is not None
    assert "No space left" in recorder.stopped_because
    assert caplog.messages == ["the recording /dev/full ended early: cannot write /dev/full: No space left on device"]
    assert manager.stats().requests == 3000


def test_given_tenants_and_sessions_then_the_trace_tells_them_apart_and_names_none(tmp_path: Path) -> None:
    manager = make_manager()
    with TraceRecorder(tmp_path / "t").attach(manager):
        for number, tenant in enumerate(("acme", "", "globex", "acme")):
            scope = ReuseScope(tenant=tenant)
            manager.free(manager.allocate(number, range(9), scope=scope, session=f"{tenant} chat"))
    trace = read_trace(tmp_path / "t")
    first, nobody, second, again = trace.tenants or ()
    assert nobody is None
    assert first == again != second
    assert trace.sessions is not None
    assert len(set(trace.sessions)) == 3
    assert b"acme" not in (tmp_path / "t").read_bytes()
    assert trace.ids_of(0).tolist() == trace.ids_of(3).tolist() != trace.ids_of(2).tolist()


class NotesHints(KeyedPolicy):
    """LRU that notes what was said about the runs it is given."""

    seen: ClassVar[list[int]] = []

    def key(self, run: Run) -> int:
        self.seen.append(run.hint)
        return run.last_access


def test_given_hints_then_the_recording_has_them_and_a_replay_gives_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "_POLICIES", dict(eviction._POLICIES))  # other tests look at the names of policies
    register_policy("test-recorder-hints")(NotesHints)
    manager = make_manager()
    hints = [ReuseHint("tool_calls"), ReuseHint(expected_seconds=3), ReuseHint(expected_seconds=math.inf), None]
    with TraceRecorder(tmp_path / "t").attach(manager):
        for number, hint in enumerate(hints):
            handle = manager.allocate(number, range(50 * number, 50 * number + 9))
            manager.commit(handle)
            manager.free(handle, hint=hint)
    assert read_trace(tmp_path / "t").stops == ("tool_calls", None, None, None)
    NotesHints.seen.clear()
    replay_recording(tmp_path / "t", policy="test-recorder-hints")
    assert NotesHints.seen == [hint.code if hint is not None else 0 for hint in hints]


def test_given_a_closed_recorder_then_the_manager_is_as_before(tmp_path: Path) -> None:
    manager = make_manager()
    assert manager._guard.observers == ()
    recorder = TraceRecorder(tmp_path / "t").attach(manager)
    with pytest.raises(InvalidArgumentError, match="follows a manager already"):
        recorder.attach(manager)
    recorder.close()
    recorder.close()
    assert manager._guard.observers == ()


def test_given_a_broken_or_foreign_file_then_a_recording_is_refused(tmp_path: Path) -> None:
    manager = make_manager()
    with TraceRecorder(tmp_path / "t").attach(manager):
        manager.allocate(1, list(range(20)))
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-30])
    with pytest.raises(TraceError, match="line 3 of t is broken"):
        replay_recording(tmp_path / "t")
    (tmp_path / "other").write_text('{"timestamp": 1}\n')
    with pytest.raises(TraceError, match="no kvpool recording"):
        replay_recording(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        TraceRecorder(tmp_path / "t", max_bytes=0)


def test_given_named_and_unnamed_encoder_inputs_when_replayed_then_the_same_decoders_share(tmp_path: Path) -> None:
    layers = [LayerSpec(kv_heads=1, head_dim=8), LayerSpec(kv_heads=1, head_dim=8, cross_attention=True)]
    manager = KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=64))
    path = tmp_path / "live.kvtrace"
    with TraceRecorder(path).attach(manager):
        for number, key in enumerate(("one", "", "one", "", "two")):
            scope = ReuseScope(encoder=key)
            handle = manager.allocate(number, range(12), cross_tokens=4, scope=scope)
            manager.commit(handle)
            manager.free(handle)
    assert sum(manager.stats().hit_tokens.values()) == 11
    assert replay_recording(path).hit_tokens == manager.stats().hit_tokens


def test_given_an_indexers_keys_then_a_header_gives_the_same_layers_and_names_them_only_where_they_are() -> None:
    layers = [LayerSpec(1, 8), LayerSpec(1, 8, k_only=True, extra_parts=(TokenPart("index", DType.BFLOAT16, 1, 4),))]
    header = json.loads(json.dumps(header_of(KVCacheManager(KVCacheConfig(layers, 4, gpu_blocks=64)))))
    assert ["extra_parts" in layer for layer in header["layers"]] == [False, True]
    assert manager_from(header, None, lambda: 0.0).config.layers == tuple(layers)
