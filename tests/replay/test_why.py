"""`explain` over real traces: equal to an oracle that keeps everything, and little is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from everything import Everything
from kvpool import KVCacheConfig, KVCacheManager, MissCause, ReuseScope
from kvpool.replay import read_trace
from managers import FULL

SLICES = {  # so many requests, and so few blocks that they are evicted again and again
    "mooncake_conversation_trace.jsonl": (300, 600),
    "mooncake_arxiv_first1000.jsonl": (300, 600),
    "lmcache_magagent_b16.jsonl": (250, 600),
    "wekacc_dev.jsonl.gz": (80, 3000),
}


def manager_of(num_blocks: int, remembered: int | None) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig([FULL], block_size=1, gpu_blocks=num_blocks, watermark=0.0, remembered_blocks=remembered)
    )


@pytest.mark.parametrize("remembered", [None, 2000])
@pytest.mark.parametrize("name", SLICES)
def test_given_a_trace_then_every_token_has_the_cause_that_an_oracle_gives(
    traces_dir: Path, name: str, remembered: int | None
) -> None:
    num_requests, num_blocks = SLICES[name]
    manager = manager_of(num_blocks, remembered)
    everything, seen = Everything(manager), set()
    for number, request in enumerate(read_trace(traces_dir / name).head(num_requests)):
        tokens = request.ids.tolist()
        if not 0 < len(tokens) <= num_blocks:
            continue
        everything.look()
        hit = manager.match_prefix(tokens).num_tokens
        spans = manager.inspect.explain(tokens)
        # What is diverged is looked at in the state machine: here a window is compared with all that ever was.
        plain = [s._replace(cause=MissCause.FIRST_SEEN) if s.cause is MissCause.DIVERGED else s for s in spans]
        everything.check(plain, tokens, ReuseScope(), hit, forgets=True)
        seen |= {span.cause for span in spans}
        handle = manager.allocate(number, tokens)
        everything.note(handle, tokens)
        manager.commit(handle)
        manager.free(handle)
    assert MissCause.EVICTED in seen


@pytest.mark.parametrize("name", SLICES)
def test_given_a_trace_and_the_usual_memory_then_at_most_a_twentieth_is_forgotten(traces_dir: Path, name: str) -> None:
    manager, missed, forgotten = manager_of(1000, None), 0, 0
    for number, request in enumerate(read_trace(traces_dir / name).head(1000)):
        if not 0 < len(request.ids) <= 1000:
            continue
        handle = manager.allocate(number, request.ids)
        missed += sum(handle.missed_tokens.values())
        forgotten += handle.missed_tokens.get(MissCause.FORGOTTEN, 0)
        manager.commit(handle)
        manager.free(handle)
    assert forgotten <= 0.05 * missed
