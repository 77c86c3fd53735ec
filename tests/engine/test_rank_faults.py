"""A rank that dies or hangs ends its engine with one error, and nothing of the ranks is left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import random_prompt, tiny_config

sys.path.append(str(Path(__file__).resolve().parents[1] / "tiers"))
from servers import eventually

from kvpool.engine import Engine, Generation, SamplingParams
from kvpool.engine.rank_channel import Channel
from kvpool.engine.rank_group import HOST_BACKEND
from kvpool.engine.ranks import Ranks
from kvpool.errors import KVPoolError, RankError
from kvpool.scope import ReuseScope

LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)
PROMPT = random_prompt(20).tolist()


def engine(**settings: object) -> Engine:
    return Engine(tiny_config("llama"), **{"device": "cpu", "kv_blocks": 64, **settings})


def running(made: Engine, and_then: Callable[[], None]) -> Generation:
    """A request that decodes. `and_then` is called after its first token, in the engine's thread."""
    calls = iter([and_then])
    return made.submit(PROMPT, LONG, on_chunk=lambda chunk: next(calls, lambda: None)())


def check_that_nothing_is_left(ranks: Ranks) -> None:
    assert all(process.returncode is not None for process in ranks.processes)
    assert all(channel.socket.fileno() < 0 for channel in ranks.channels)
    assert not Path(ranks._directory).exists()
    assert not torch.distributed.is_initialized()
    assert "kvpool-ranks" not in {thread.name for thread in threading.enumerate()}


def test_given_ranks_that_others_have_started_then_all_that_have_ended_are_named() -> None:
    far: list[socket.socket] = []

    class Met(Ranks):
        def _start_all(self) -> None:
            for rank in range(1, self.size):
                (steps, _steps), (tiers, _tiers) = socket.socketpair(), socket.socketpair()
                far.extend((_steps, _tiers))
                self._add(rank, Channel(steps, 60.0), Channel(tiers, 60.0))

    for gone, said in [([3], "rank 3 has ended"), ([2, 3], "rank 2 and rank 3 have ended")]:
        with Met(4, device="cpu") as ranks:
            for rank in gone:
                far[2 * rank - 2].close()
            assert str(ranks.fail()) == f"{said}; no rank can go on without the others"
        while far:
            far.pop().close()


@pytest.mark.slow
def test_given_four_ranks_then_tokens_are_equal_and_a_killed_one_ends_the_engine() -> None:
    short = SamplingParams(max_new_tokens=8)
    with engine() as one:
        expected = one.generate([PROMPT], short)[0].token_ids
    with engine(tensor_parallel=4) as four:
        assert (four.shape.layers[0].q_heads, four.shape.layers[0].kv_heads) == (1, 1)  # each KV head is on two ranks
        assert four.generate([PROMPT], short)[0].token_ids == expected
        ranks = four._leader.ranks
        generation = running(four, lambda: ranks.processes[1].send_signal(signal.SIGKILL))
        with pytest.raises(KVPoolError, match="RankError: rank 2 was killed by signal 9; no rank can go on"):
            generation.result()
        assert four.is_closed
        with pytest.raises(KVPoolError, match="rank 2 was killed"):
            four.submit(PROMPT)
    check_that_nothing_is_left(ranks)


@pytest.mark.slow
def test_given_a_rank_that_hangs_then_the_engine_ends_within_the_deadline() -> None:
    with Ranks(2, device="cpu", seconds=8.0) as ranks:
        with engine(tensor_parallel=ranks) as two:
            generation = running(two, lambda: os.kill(ranks.processes[0].pid, signal.SIGSTOP))
            with pytest.raises(KVPoolError, match="rank 1 did not answer within 8 s"):
                generation.result()
        with pytest.raises(RankError, match="did not answer"):
            engine(tensor_parallel=ranks)
    check_that_nothing_is_left(ranks)


@pytest.mark.slow
def test_given_a_rank_that_dies_while_nothing_runs_then_the_engine_is_closed_and_the_next_is_warm_from_disk(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"tensor_parallel": 2, "disk": tmp_path, "tier_timeout": 60.0}
    two = engine(**settings)
    tokens = two.generate([PROMPT])[0].token_ids
    assert two._tiers is not None
    assert two._tiers.flush(60.0)
    key = two._tiers.keys.of_prompt(np.array(PROMPT, np.int32), ReuseScope()).keys[0][0]
    eventually(lambda: two._leader.shards.find([key], time.monotonic() + 60.0) == [True], "rank 1 has stored its shard")
    ranks = two._leader.ranks
    ranks.processes[0].kill()
    assert two._thread._inbox.closed.wait(60)
    with pytest.raises(KVPoolError, match="rank 1 was killed by signal 9"):
        two.generate([PROMPT])
    two.close()
    check_that_nothing_is_left(ranks)
    with engine(**settings) as again:
        (done,) = again.generate([PROMPT])
        assert (done.token_ids, done.num_cached_tokens) == (tokens, 16)


@pytest.mark.slow
def test_given_a_rank_that_cannot_open_its_tier_then_no_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "rank-1-of-2").write_text("no folder")
    with pytest.raises(RankError, match=r"rank 1 failed: ConfigError: .*rank-1-of-2"):
        engine(tensor_parallel=2, disk=tmp_path)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_given_ranks_that_talk_through_host_memory_as_on_one_gpu_then_tokens_are_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpool.engine.ranks.rank_backend", lambda devices: HOST_BACKEND)
    short = SamplingParams(max_new_tokens=8)
    with Ranks(2, device="cpu") as ranks:
        for family in ("llama", "phi3"):  # the second gathers in its layers, too
            settings: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "dtype": "bfloat16"}
            with Engine(tiny_config(family), tensor_parallel=ranks, overlap=True, **settings) as two:
                assert torch.distributed.get_backend() == HOST_BACKEND
                found = two.generate([PROMPT], short)[0].token_ids
            with Engine(tiny_config(family), **settings) as one:
                assert found == one.generate([PROMPT], short)[0].token_ids
