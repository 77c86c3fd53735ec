"""The sessions of an engine, before its thread runs and while it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from models import tiny_model

from kvpool import ReuseHint
from kvpool.core.sessions import SessionState
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import UnknownSessionError

PROMPT = list(range(5, 30))
ONE = SamplingParams(max_new_tokens=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny_model("llama"), device="cpu", kv_blocks=64, block_size=4) as made:
        yield made


def test_given_an_engine_then_its_sessions_are_forked_pause_go_on_and_end(engine: Engine) -> None:
    with pytest.raises(UnknownSessionError):  # before anything ran
        engine.sessions.get("main")
    engine.generate([PROMPT], ONE, session="main", hint=ReuseHint(expected_seconds=9.0))
    assert engine.sessions.get("main").state is SessionState.PAUSED  # its request said when it goes on
    assert engine.sessions.resume("main") == 0
    engine.sessions.fork("main", "helper")
    engine.generate([[*PROMPT, *range(40, 60)]], ONE, session="helper")
    assert engine.sessions.pause("helper", 3.0) == 0
    assert [info.name for info in engine.sessions.list()] == ["helper", "main"]
    kept = engine.sessions.get("main").tokens_by_tier
    assert engine.sessions.end("helper") == 5
    assert engine.sessions.get("main").tokens_by_tier == kept
    assert [info.name for info in engine.sessions.list(limit=5)] == ["main"]


def test_given_an_end_while_a_request_runs_that_expects_more_then_its_session_stays_ended(engine: Engine) -> None:
    generation = engine.submit(
        PROMPT,
        SamplingParams(max_new_tokens=3),
        session="short",
        hint=ReuseHint(expected_seconds=9.0),
        on_chunk=lambda chunk: engine.sessions.end("short"),
    )
    generation.result()
    assert engine.sessions.get("short").state is SessionState.ENDED
