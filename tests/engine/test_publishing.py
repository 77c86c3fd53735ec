"""An engine that announces what it caches."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import tiny_config
from published import published_tokens

from kvpool.cluster.publisher import EventPublisher
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ConfigError, TraceError


def test_given_publish_when_an_engine_answers_then_a_subscriber_learns_the_blocks_of_prompt_and_answer() -> None:
    prompt = list(range(1, 41))
    with Engine(tiny_config("llama"), kv_blocks=32, publish="tcp://127.0.0.1:0") as engine:
        assert engine.publishes is not None
        answer = engine.generate([prompt], SamplingParams(max_new_tokens=10))[0]
        tokens = published_tokens(engine.publishes.replay_endpoint, 48)
    assert tokens == [*prompt, *answer.token_ids][:48]
    assert engine.publishes is None


@pytest.mark.parametrize("endpoint", [5557, "5557", "tcp://127.0.0.1", "tcp://127.0.0.1:99999"])
def test_given_a_wrong_endpoint_when_an_engine_is_made_then_it_is_refused(endpoint: object) -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        Engine(tiny_config("llama"), kv_blocks=8, publish=endpoint)  # type: ignore[arg-type]


def test_given_a_recording_that_cannot_begin_then_what_the_engine_has_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[EventPublisher] = []
    monkeypatch.setattr(EventPublisher, "close", lambda publisher: closed.append(publisher))
    with pytest.raises(TraceError, match="missing") as kept:  # it refers to the engine, which so has a reference
        Engine(tiny_config("llama"), kv_blocks=8, publish="tcp://127.0.0.1:0", record=tmp_path / "missing" / "trace")
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].close()
    del kept
