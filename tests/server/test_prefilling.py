"""`/v1/prefill` on one server, `/v1/cache/prefetch` and the answer on another: by HTTP as between engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live import Live, access, call, refusal, word_tokenizer
from models import tiny_model

from kvpool.engine import Engine
from kvpool.scheduling import SchedulerConfig
from kvpool.server import ServedModel, create_app
from kvpool.tiers import MemoryTier

PROMPT = [number * 7 % 150 for number in range(1, 91)]
SIZE = 8


class Pair:
    """Two servers of one model with a store between them."""

    def __init__(self) -> None:
        store = MemoryTier(2**26)
        limits = SchedulerConfig(max_tokens_per_step=32, max_sequences=8)
        model = tiny_model("llama")
        settings: dict[str, Any] = {"kv_blocks": 64, "block_size": SIZE, "tiers": [store], "scheduler": limits}
        self.engines = [Engine(model, tokenizer=word_tokenizer(), device="cpu", **settings) for _ in range(2)]
        apps = [create_app([ServedModel("tiny", engine)], access=access("a", "b")) for engine in self.engines]
        self.prefill, self.decode = (Live(app) for app in apps)

    def close(self) -> None:
        for live, engine in zip((self.prefill, self.decode), self.engines, strict=True):
            live.stop()
            engine.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_given_a_prompt_computed_by_one_server_then_the_other_answers_it_and_computes_only_its_end(pair: Pair) -> None:
    said = call(pair.prefill, "/v1/prefill", {"prompt": PROMPT}, "sk-a")
    assert (said["object"], said["stored_tokens"], said["usage"]["prompt_tokens"]) == ("prefill", 88, 90)
    assert call(pair.decode, "/v1/cache/prefetch", {"prompt": PROMPT}, "sk-a") == {
        "prompt_tokens": 90,
        "cached_tokens": 88,
    }
    assert call(pair.decode, "/v1/cache/prefetch", {"prompt": PROMPT}, "sk-b")["cached_tokens"] == 0  # of a, not of b
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = call(pair.decode, "/v1/completions", body, "sk-a")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 88
    assert answer["choices"][0]["text"] == call(pair.prefill, "/v1/completions", body, "sk-b")["choices"][0]["text"]


def test_given_a_stream_then_it_tells_what_is_there_and_ends_with_the_answer(pair: Pair) -> None:
    text = call(pair.prefill, "/v1/prefill", {"prompt": PROMPT[::-1], "stream": True}, "sk-a")
    *told, end, nothing = text.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in told]
    assert [event["object"] for event in events] == ["prefill.progress"] * (len(events) - 1) + ["prefill"]
    stored = [event["stored_tokens"] for event in events]
    assert stored == sorted(stored)
    assert (stored[0], stored[-1], end, nothing) == (0, 88, "data: [DONE]", "")


def test_given_a_prompt_that_never_fits_then_both_forms_say_so(pair: Pair) -> None:
    too_long = [5] * 600
    assert refusal(pair.prefill, "/v1/prefill", {"prompt": too_long}, "sk-a")[0] == 400
    assert '"error"' in call(pair.prefill, "/v1/prefill", {"prompt": too_long, "stream": True}, "sk-a")


def test_given_a_server_without_tiers_then_it_refuses(serve: Any) -> None:
    live = serve()
    for path in ("/v1/prefill", "/v1/cache/prefetch"):
        status, error = refusal(live, path, {"prompt": PROMPT})
        assert status == 400
        assert "tier" in error["message"]


def test_given_a_session_then_what_was_prefilled_and_prefetched_in_it_is_forgotten_with_it(pair: Pair) -> None:
    asked = {"prompt": PROMPT[9:], "session_id": "s1"}
    call(pair.prefill, "/v1/prefill", asked, "sk-a")
    call(pair.decode, "/v1/cache/prefetch", asked, "sk-a")
    for live in (pair.prefill, pair.decode):
        assert call(live, "/v1/cache/invalidate", {"session_id": "s2"}, "sk-a")["removed_blocks"] == 0
        assert call(live, "/v1/cache/invalidate", {"session_id": "s1"}, "sk-a")["removed_blocks"] > 0
        assert call(live, "/v1/cache/query", {"prompt": PROMPT[9:]}, "sk-a")["cached_tokens"] == 0
