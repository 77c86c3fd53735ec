"""Prefill servers compute long prompts for the servers that answer; the blocks go through a shared tier.

    prefill server   POST /v1/prefill          computes the prompt, and reports how much of it is in the tier
    decode server    POST /v1/cache/prefetch   loads each chunk while the next is computed; then it gets the request

Nothing here can fail a request. If something goes wrong, the decode server computes what it could not load.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from kvpool.cluster.index import ClusterIndex
from kvpool.cluster.proxy.backends import Backend, Backends
from kvpool.cluster.proxy.passing import RoutingRequest, credentials
from kvpool.cluster.router import Route, Router, RoutingConfig
from kvpool.errors import NoNodeError

MIN_TOKENS = 256
MOST_SECONDS = 60.0  # for a handover
log = logging.getLogger("kvpool")


class PrefillPool:
    """The prefill servers of a proxy. A prompt goes there when its decode server lacks `min_tokens` of it.

    If a server sends nothing for `silence_seconds`, or is not done after `MOST_SECONDS`, the request goes on without it.
    `watching` are the arguments of `Backends`.
    """

    def __init__(
        self,
        backends: list[Backend],
        client: httpx.AsyncClient,
        *,
        block_size: int,
        routing: RoutingConfig | None,
        min_tokens: int,
        silence_seconds: float,
        watching: Mapping[str, float],
    ) -> None:
        self._client = client
        self._min_tokens, self._silence = min_tokens, silence_seconds
        self.index = ClusterIndex(block_size)
        self.router = Router(self.index, routing)
        self.backends = Backends(backends, self.index, self.router, client, **watching)
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    async def hand_over(self, asked: RoutingRequest, route: Route, headers: Mapping[str, str]) -> None:
        """Has a prefill server compute the prompt for the node of its route, if that is worth it. Never raises."""
        left = len(asked.tokens) - route.hit.storage
        if left < self._min_tokens:
            self._counts["direct"] += 1
            return
        try:
            own = self.router.route(
                asked.tokens,
                session=asked.session,
                lora_name=asked.lora_name,
                extra_keys=asked.extra_keys(self.index.block_size),
            )
        except NoNodeError:
            self._fall_back("no_node", "no prefill server is ready")
            return
        route.first_token()  # its node does not compute the prompt
        passed = credentials(headers)
        loading = _TierLoading(self._client, str(route.node), asked, passed, self._silence)
        try:
            await asyncio.wait_for(self._follow(str(own.node), asked, passed, loading), MOST_SECONDS)
            await loading.finish()
            if loading.num_loaded < loading.num_there:
                raise _HandoverError("not_loaded", f"{route.node} could not load what was stored for it")
            self._counts["handed_over"] += 1
        except _HandoverError as error:
            await loading.finish()  # the decode server need not compute what came nevertheless
            self._fall_back(error.reason, str(error))
        except (TimeoutError, asyncio.TimeoutError):
            self._fall_back("late", f"{own.node} was not done after {MOST_SECONDS:g} seconds")
        finally:
            loading.cancel()
            own.end()
            self._counts["tokens"] += loading.num_loaded
            self._counts["blocks"] += loading.num_loaded // self.index.block_size

    async def _follow(self, node: str, asked: RoutingRequest, headers: dict[str, str], loading: _TierLoading) -> None:
        """Has a server compute the prompt, and every chunk loaded as it comes. Raises if the prompt is not complete."""
        body = {**asked.named, "prompt": list(asked.tokens), "stream": True}
        try:
            async with self._client.stream(
                "POST", f"{node}/v1/prefill", json=body, headers=headers, timeout=self._silence
            ) as answer:
                if answer.status_code != 200:
                    raise _HandoverError("refused", f"{node} refused with status {answer.status_code}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    said = json.loads(line[len("data: ") :])
                    if "error" in said:
                        raise _HandoverError("refused", f"{node} failed: {said['error']}")
                    loading.reach(int(said["stored_tokens"]))
                    if said["object"] == "prefill":
                        break
                else:
                    raise _HandoverError("lost", f"{node} ended in the middle")
        except httpx.RequestError as error:
            self.backends.note(node, is_ready=False)
            raise _HandoverError("lost", f"{node} did not answer: {type(error).__name__}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise _HandoverError("refused", f"{node} answered what cannot be read: {error}") from None
        size, num_tokens = self.index.block_size, len(asked.tokens)
        if loading.num_there < num_tokens // size * size:
            raise _HandoverError("cut", f"{node} could store {loading.num_there} of {num_tokens} tokens")

    def _fall_back(self, reason: str, words: str) -> None:
        """Lets the decode server compute the rest of the prompt."""
        self._reasons[reason] += 1
        log.info("%s: the decode server computes", words)

    def described(self) -> dict[str, Any]:
        """Servers and counts, for people."""
        counts = {name: self._counts[name] for name in ("handed_over", "blocks", "tokens", "direct")}
        return {
            "nodes": self.backends.described(),
            "router": self.router.stats()._asdict(),
            **counts,
            "fallbacks": dict(self._reasons),
        }


class _HandoverError(Exception):
    """A prompt was not handed over completely. Has a word for the counters, and a sentence."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class _TierLoading:
    """Tells a decode server to load a prompt from the shared tier, again each time the tier has more of it."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        node: str,
        asked: RoutingRequest,
        headers: dict[str, str],
        silence_seconds: float,
    ) -> None:
        self.num_loaded = self.num_there = 0
        self._client = client
        self._node = node
        self._asked = asked
        self._headers = headers
        self._silence = silence_seconds
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def reach(self, num_tokens: int) -> None:
        """The tier has so many tokens now."""
        self.num_there = max(self.num_there, num_tokens)
        is_idle = self._task is None or self._task.done()
        if self.num_there > self.num_loaded and is_idle and not self._has_failed:
            self._task = asyncio.create_task(self._load())

    async def _load(self) -> None:
        while self.num_loaded < self.num_there and not self._has_failed:
            wanted = self.num_there
            body = {**self._asked.named, "prompt": list(self._asked.tokens[:wanted])}
            try:
                answer = await self._client.post(
                    f"{self._node}/v1/cache/prefetch", json=body, headers=self._headers, timeout=self._silence
                )
                found = int(answer.json()["cached_tokens"]) if answer.status_code == 200 else 0
            except (httpx.RequestError, ValueError, KeyError, TypeError):
                found = 0
            if found < wanted - 1:  # the last token of a prompt is never found
                self._has_failed = True
                return
            self.num_loaded = wanted

    async def finish(self) -> None:
        """Waits until the decode server has loaded everything, or has failed to."""
        if self._task is not None:
            await self._task

    def cancel(self) -> None:
        """Ends it, because nobody waits for it any more."""
        if self._task is not None:
            self._task.cancel()
