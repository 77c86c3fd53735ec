"""An engine that announces what it caches."""

from __future__ import annotations

import pytest
from models import tiny_config
from published import published_tokens

from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ConfigError


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
