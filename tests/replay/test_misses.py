"""`kvpool replay --why`: every token that missed counts for one cause, with the seconds that computing it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool.cli import main
from kvpool.config import DType, LayerSpec, StatePart, StateSpec
from kvpool.replay import ReplayConfig, Trace, TraceBuilder, read_trace, replay
from kvpool.replay.misses import Missed
from kvpool.replay.simulate import PrefillTime

PER_TOKEN = PrefillTime(seconds_per_token=1.0, seconds_per_pair=0.0)
STATE = StateSpec((StatePart("state", (64, 16), DType.FLOAT32),))


def alternating() -> Trace:
    """Two prompts of 40 tokens in turn, the second time with a longer end; a block is 16 tokens, the last one is not full."""
    trace = TraceBuilder("two", unit=16)
    for time in range(2):
        for first in (0, 10):
            trace.add(time, [first, first + 1, first + 2], 40, 0)
    return trace.build()


def test_given_room_for_one_prompt_then_what_was_evicted_is_worth_its_seconds() -> None:
    result = replay(alternating(), ReplayConfig("lru", capacity=3, time=PER_TOKEN, why=True))
    assert result.missed == {"first_seen": Missed(80, 80.0), "evicted": Missed(80, 80.0)}
    assert result.row()["missed_tokens_evicted"] == 80
    assert result.row()["missed_seconds_evicted"] == 80.0


def test_given_room_for_all_then_only_last_tokens_miss_the_second_time() -> None:
    result = replay(alternating(), ReplayConfig("lru", capacity=None, time=PER_TOKEN, why=True))
    assert result.missed == {"first_seen": Missed(80, 80.0), "rest_of_block": Missed(2, 2.0)}


def test_given_no_question_then_nothing_is_said() -> None:
    result = replay(alternating(), ReplayConfig("lru", capacity=3))
    assert result.missed == {}
    assert not any(name.startswith("missed") for name in result.row())


def test_given_a_token_in_front_then_what_follows_diverged() -> None:
    trace = TraceBuilder("tokens", unit=1)
    prompt = list(range(100, 140))
    result = replay(
        trace.add(0, prompt, 40, 0).add(1, [7, *prompt], 41, 0).build(), ReplayConfig("lru", block_size=4, why=True)
    )
    assert {cause: missed.tokens for cause, missed in result.missed.items()} == {"first_seen": 41, "diverged": 40}


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 20},
        {"capacity": 20, "host": 30},
        {"capacity": 20, "block_size": 32},
        {"capacity": 200, "layers": (LayerSpec(kv_heads=1, head_dim=8), STATE)},
    ],
)
def test_given_any_cache_then_hits_and_causes_are_all_tokens(workload: Trace, options: dict[str, object]) -> None:
    result = replay(workload, ReplayConfig("adaptive", why=True, **options))  # type: ignore[arg-type]
    assert sum(missed.tokens for missed in result.missed.values()) == result.requested_tokens - result.hit_tokens
    assert set(result.missed) >= {"first_seen", "evicted"}


@pytest.fixture(scope="module")
def workload() -> Trace:
    """Conversations that grow behind three system prompts, in turn; some ends do not fill a block."""
    trace = TraceBuilder("chats", unit=16)
    for turn in range(1, 9):
        for chat in range(12):
            ids = [chat % 3, 1000 * (chat + 1), *range(1000 * (chat + 1) + 1, 1000 * (chat + 1) + 3 * turn)]
            trace.add(100 * turn + chat, ids, 16 * len(ids) - chat % 4, 0)
    return trace.build()


def test_given_a_trace_then_the_command_has_a_row_for_each_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 1, "hash_ids": [%d, %d]}'
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line % (time, time % 2 * 5, time % 2 * 5 + 1) for time in range(6)))
    assert len(read_trace(path)) == 6
    assert (
        main(["replay", str(path), "--capacity", "2", "--policy", "lru", "--why", "--json", str(tmp_path / "out")]) == 0
    )
    shown = capsys.readouterr().out
    assert "why tokens missed" in shown
    assert "evicted" in shown
    (row, *_) = json.loads((tmp_path / "out").read_text())
    assert (row["missed_tokens_first_seen"], row["missed_tokens_evicted"]) == (2048, 4096)
    assert row["missed_seconds_evicted"] > row["missed_seconds_first_seen"] > 0
