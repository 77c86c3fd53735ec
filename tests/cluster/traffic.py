"""Conversations for tests of real clusters, and what one infinite cache would have reused of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import httpx

BLOCK = 16
PATIENCE = 180


class Closable(Protocol):
    """Something that has processes and can end them, however many of them it has so far."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(made: Closable) -> Iterator[None]:
    """Around what starts processes in a constructor: if it fails, those that run already are ended."""
    try:
        yield
    except BaseException:
        made.close()
        raise


def until(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, f"{what}: not in {PATIENCE} seconds"
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        return bool(httpx.get(url, timeout=5, trust_env=False).status_code == 200)
    except httpx.TransportError:
        return False


class Traffic:
    """Conversations with shared beginnings; every turn is the last one and more."""

    def __init__(self, seed: int, talks: int = 14) -> None:
        rng = random.Random(seed)
        beginnings = [[rng.randrange(1, 150) for _ in range(64)] for _ in range(3)]
        self.rng = rng
        self.talks = [beginnings[at % 3] + [rng.randrange(1, 150) for _ in range(20)] for at in range(talks)]
        self.seen: set[tuple[int, ...]] = set()
        self.got = self.ideal = 0
        self.said: dict[tuple[int, ...], str] = {}

    def turn(self, ask: Callable[[int, list[int]], Any]) -> None:
        """One more turn of each conversation, four at a time; counts hits against one cache that keeps everything."""
        for at, talk in enumerate(self.talks):
            self.talks[at] = talk + [self.rng.randrange(1, 150) for _ in range(32)]
        with ThreadPoolExecutor(4) as threads:
            for talk, answer in zip(self.talks, threads.map(ask, range(len(self.talks)), self.talks), strict=True):
                assert answer.status_code == 200, answer.text
                body = answer.json()
                self.got += body["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) // BLOCK
                prefixes = [tuple(talk[:end]) for end in range(BLOCK, len(talk), BLOCK)]
                self.ideal += sum(prefix in self.seen for prefix in prefixes)
                self.seen.update(prefixes)
                self.said[tuple(talk)] = body["choices"][0]["text"]

    @property
    def share(self) -> float:
        return self.got / self.ideal


def post(url: str, prompt: list[int], **options: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **options}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE, trust_env=False)
