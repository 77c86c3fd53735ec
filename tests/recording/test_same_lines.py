"""Every operation of a manager, as its recording has it: the same lines as ever, and the same again when it is replayed.

The keys of the hashes are fixed here, so that `same_lines.kvtrace` has the very bytes. A change that is meant to write
something else writes it again, and says in its commit what is else: `python tests/recording/test_same_lines.py`.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from kvpool import (
    DType,
    KVCacheConfig,
    KVCacheManager,
    LayerSpec,
    Retention,
    ReuseHint,
    ReuseScope,
    StatePart,
    StateSpec,
    Tier,
    TokenRange,
)
from kvpool.recording import TraceRecorder, writer
from kvpool.recording.lines import Lines
from kvpool.recording.operations import VERBS, Operations
from kvpool.recording.playback import _Player

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for programs that run without pytest
from managers import counted

WRITTEN = Path(__file__).with_name("same_lines.kvtrace")
OF_B = ReuseScope(tenant="b")
SOUND = ReuseScope(tenant="a", encoder="sound")


def conversations(manager: KVCacheManager, clock: list[float]) -> None:
    """All that requests do, one after the other."""
    prompt = list(range(20))
    retention = Retention([TokenRange(0, 6, 80, 9.0), TokenRange(6, None, 20)], decode_priority=50, decode_duration=3.5)
    first = manager.allocate("first", prompt, session="chat", retention=retention, reserve=8, lookahead=3, ttl=500.0)
    clock[0] += 0.25
    manager.commit(first)
    manager.extend(first, 12, lookahead=2)
    manager.commit(first, 12)
    other = manager.allocate("other", [*prompt[:10], 77, 78], scope=OF_B)
    manager.commit(other, [*prompt[:10], 77, 78])
    both = manager.batch([first, other])
    clock[0] += 1 / 3
    for step in range(6):
        manager.extend_batch(both)
        manager.mark_written(both)
        manager.commit_batch(both, [100 + step, 200 + step])
    manager.extend_batch(both, [1, 3], 1)
    manager.commit_batch(both, [7, 8, 9, 10], [1, 3])
    manager.slot_mapping(both, [0, 2], [4, 3])
    manager.slot_mapping([first], 1, 5)
    manager.store_last_logits(other, object())
    manager.rewind(first, 3)
    manager.hint(first, ReuseHint("tool_use"))
    forks = manager.fork(first, "second", "third")
    manager.extend_batch(forks, 1)
    manager.commit_batch(forks, [300, 300])
    manager.free_batch(forks, keep=False)
    manager.free(first, hint=ReuseHint(expected_seconds=float("inf")))
    clock[0] += 2.0
    manager.free(other)
    image = manager.allocate("image", [1, 2, 50, 50, 50, 3], multimodal=[(2, 3, "cat")])
    manager.commit(image)
    manager.extend(image, 3)
    manager.commit(image, [50, 50, 4], multimodal=[(0, 2, "dog")])
    manager.free(image)
    swapped = [manager.allocate(name, [*prompt[:9], name]) for name in (400, 401)]
    for handle in swapped:
        manager.commit(handle)
    manager.swap_out(*swapped)
    manager.swap_in(*swapped)
    manager.free_batch(swapped)
    unknown = manager.allocate("unknown", num_tokens=5, lease=True)
    manager.commit(unknown, [5, 6, 7, 8, 9])
    manager.free(unknown)
    manager.free(manager.allocate("heard", [9, 9, 9], cross_tokens=6, scope=SOUND))


def upkeep(manager: KVCacheManager, clock: list[float]) -> None:
    """All that operators do."""
    cache, prompt = manager.cache, list(range(20))
    of_tokens = cache.pin(prompt, ttl=60.0)
    manager.commit(held := manager.allocate("held", [*prompt, 1, 2]))
    of_handle = cache.pin(held)
    cache.unpin(of_handle)
    cache.unpin(of_tokens)
    manager.free(held)
    cache.set_quota("b", guaranteed=2, maximum=0.5)
    clock[0] += 7.0
    cache.offload(2)
    cache.onboard(prompt)
    cache.evict(1)
    cache.evict(1, tier=Tier.HOST)
    cache.defragment()
    cache.resize(30)
    cache.resize(12, tier=Tier.HOST)
    cache.invalidate([1, 2, 50, 50, 50, 3], multimodal=[(2, 3, "cat")])
    cache.invalidate(prompt, scope=OF_B)
    cache.invalidate(scope=SOUND)
    manager.sessions.fork("chat", "agent")
    turn = manager.allocate("turn", [*prompt, 1, 2], session="agent")
    manager.commit(turn)
    manager.free(turn)
    manager.sessions.pause("chat", 30.0)
    manager.sessions.resume("chat")
    manager.sessions.end("chat")
    manager.sessions.end("agent")
    manager.free(manager.allocate("of b", prompt, scope=OF_B, session="chat"))
    manager.sessions.end("chat", tenant="b")
    cache.invalidate(session="chat")
    cache.invalidate(tenant="b")
    cache.reset()


def stateful(manager: KVCacheManager, clock: list[float]) -> None:
    """What only requests with states do."""
    handle = manager.allocate("a", list(range(6)))
    manager.narrow(handle, 4)
    manager.commit(handle)
    clock[0] += 1.0
    manager.free(handle)


def recorded(path: Path, layers: list[Any], *drives: Any, **options: Any) -> KVCacheManager:
    """Drives a new manager and records it, with keys that everybody knows."""
    clock, keys = [100.0], itertools.count(1)
    manager = KVCacheManager(KVCacheConfig(layers, 4, **options), clock=lambda: clock[0])
    with mock.patch.object(writer.secrets, "randbits", lambda bits: next(keys) * 0x123456789ABCDEF % 2**bits):
        recorder = TraceRecorder(path).attach(manager)
    with recorder:
        for drive in drives:
            drive(manager, clock)
    assert recorder.stopped_because is None
    return manager


PLAIN = [LayerSpec(1, 8), LayerSpec(1, 8, window=6), LayerSpec(1, 8, cross_attention=True)]
STATES = [LayerSpec(1, 8), StateSpec((StatePart("conv", (4,), DType.FLOAT32),))]


def both_recordings(folder: Path) -> list[tuple[Path, KVCacheManager]]:
    plain, states = folder / "plain", folder / "states"
    return [
        (plain, recorded(plain, PLAIN, conversations, upkeep, gpu_blocks=120, host_blocks=40, watermark=0.0)),
        (states, recorded(states, STATES, stateful, gpu_blocks=24, watermark=0.0, checkpoint_every=4)),
    ]


def lines_of(path: Path) -> list[Any]:
    """The lines of a recording; where one means the sequences of an earlier line, it names them."""
    lines, batch = [json.loads(line) for line in path.read_bytes().splitlines()], None
    for line in lines:
        if isinstance(line, list) and line[0] in "ecwsfoi":
            line[2] = batch if line[2] is None else line[2]
            batch = line[2] if len(line[2]) > 1 else batch
    return lines


def masked(value: Any) -> Any:
    """Lines without tokens: of these the number is left. What a replay hides once more looks different."""
    if isinstance(value, list) and (value[:1] == ["c"] or len(value) == 3):
        *others, last = value
        return [*others, len(last) if isinstance(last, str) else last]
    if isinstance(value, list):
        return [masked(part) for part in value]
    return value


def test_given_the_same_operations_then_the_same_lines_are_written_as_ever(tmp_path: Path) -> None:
    written = b"".join(path.read_bytes() for path, _ in both_recordings(tmp_path))
    now, before = written.splitlines(), WRITTEN.read_bytes().splitlines()
    assert now == before
    assert {json.loads(line)[0] for line in now if line.startswith(b"[")} == set(VERBS)


def test_given_a_recording_when_its_replay_is_recorded_then_the_operations_are_the_same(tmp_path: Path) -> None:
    for path, manager in both_recordings(tmp_path):
        with Lines(path) as lines:
            player = _Player(Operations(lines), None)
            with TraceRecorder(tmp_path / "again").attach(player.manager):
                stats = player.run()
        assert counted(stats) == counted(manager.stats())
        before, again = (masked(lines_of(each)) for each in (path, tmp_path / "again"))
        assert again == before
        player.manager.check()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        WRITTEN.write_bytes(b"".join(path.read_bytes() for path, _ in both_recordings(Path(made))))
