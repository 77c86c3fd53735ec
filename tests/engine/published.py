"""What an engine publishes, as somebody reads it who asks for all of it again."""

from __future__ import annotations

import pytest

from kvpool.cluster.wire_events import BlockStored, decode_batch

zmq = pytest.importorskip("zmq", reason="pip install 'kvpool[cluster]'")


def published_tokens(replay_endpoint: str, count: int) -> list[int]:
    """The tokens of all blocks that were announced, once there are so many."""
    context = zmq.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, 60_000)
        asking.connect(replay_endpoint)
        tokens: list[int] = []
        while len(tokens) < count:  # the engine's thread may still be at the last block
            tokens = []
            asking.send_multipart((b"", (0).to_bytes(8, "big")))
            while payload := asking.recv_multipart()[-1]:
                events = decode_batch(payload).events
                tokens += [token for event in events if isinstance(event, BlockStored) for token in event.tokens]
        return tokens
    finally:
        context.destroy(linger=0)
