"""An engine that announces what it caches."""

from __future__ import annotations

import pytest
from models import tiny_config

from kvpool.cluster.wire_events import BlockStored, decode_batch
from kvpool.engine import Engine, SamplingParams
from kvpool.errors import ConfigError

zmq = pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")


def test_given_publish_when_an_engine_answers_then_a_subscriber_learns_the_blocks_of_prompt_and_answer() -> None:
    context = zmq.Context()
    prompt = list(range(1, 41))
    with Engine(tiny_config("llama"), kv_blocks=32, publish="tcp://127.0.0.1:0") as engine:
        assert engine.publishes is not None
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, 30_000)
        asking.connect(engine.publishes.replay_endpoint)
        answer = engine.generate([prompt], SamplingParams(max_new_tokens=10))[0]
        tokens: list[int] = []
        while len(tokens) < 48:  # the engine's thread may still be at the last block
            tokens = []
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
            while payload := asking.recv_multipart()[-1]:
                events = decode_batch(payload).events
                tokens += [token for event in events if isinstance(event, BlockStored) for token in event.tokens]
    context.destroy(linger=0)
    assert tokens == [*prompt, *answer.token_ids][:48]
    assert engine.publishes is None


@pytest.mark.parametrize("endpoint", [5557, "5557", "tcp://127.0.0.1", "tcp://127.0.0.1:99999"])
def test_given_a_wrong_endpoint_when_an_engine_is_made_then_it_is_refused(endpoint: object) -> None:
    with pytest.raises(ConfigError, match="tcp://"):
        Engine(tiny_config("llama"), kv_blocks=8, publish=endpoint)  # type: ignore[arg-type]
