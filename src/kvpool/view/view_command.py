"""`kvpool view`: the live view on made-up traffic, without a model: chats of several tenants that continue later."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from kvpool.config import KVCacheConfig, LayerSpec
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import OutOfBlocksError, PinBudgetError
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array
from kvpool.scope import Retention, ReuseScope, TokenRange
from kvpool.view.http import serve
from kvpool.view.session_rows import MOST_SESSIONS, session_rows

TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")
BLOCK_SIZE = 16
_VOCABULARY = 32_000
_MAX_WAITING = 12
_NUM_CHATS = 400
_ARRIVALS = 2  # per step, at most
_STEPS_AHEAD = 200  # so that there is something to see


@dataclass
class _RunningChat:
    chat: int
    handle: KVCacheHandle
    tokens: Int32Array
    left: int  # tokens still to come


@dataclass
class Traffic:
    """Chats with the system prompts of five tenants. What a step does depends only on `seed`."""

    gpu_blocks: int = 4096
    seed: int = 0
    manager: KVCacheManager = field(init=False)

    def __post_init__(self) -> None:
        config = KVCacheConfig(
            [LayerSpec(kv_heads=8, head_dim=128)] * 32,
            block_size=BLOCK_SIZE,
            gpu_blocks=self.gpu_blocks,
            host_blocks=self.gpu_blocks // 2,
        )
        self.manager = KVCacheManager(config)
        self._random = np.random.default_rng(self.seed)
        self._most_running = 48
        tokens = self.gpu_blocks * BLOCK_SIZE
        self._turn = max(tokens // 1000, BLOCK_SIZE)  # new tokens of one question, about
        self._systems = {tenant: [self._ids(4 * self._turn) for _ in range(2)] for tenant in TENANTS}
        self._chats: dict[int, tuple[str, Int32Array]] = {}
        self._waiting: deque[tuple[int, float]] = deque()
        self._running: list[_RunningChat] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def step(self) -> None:
        """One step of an engine: chats arrive and are admitted, all running ones get a few tokens, some end."""
        with self._lock:
            for _ in range(_ARRIVALS):
                self._arrive()
            self._admit()
            self._decode()

    def run(self, stop: threading.Event, steps_per_second: float = 25.0) -> None:
        """Steps until `stop` is set."""
        while not stop.wait(1.0 / steps_per_second):
            self.step()

    def more(self) -> dict[str, Any]:
        """Who waits, and what is cached of chats, for the page."""
        with self._lock:
            waiting = [
                [f"chat-{chat}", self._chats[chat][0], len(self._chats[chat][1]), round(time.monotonic() - since, 1)]
                for chat, since in self._waiting
            ]
        known = self.manager.sessions.list(limit=MOST_SESSIONS)
        sessions = session_rows(known, lambda info: info.name)
        return {"waiting": waiting, "num_waiting": len(waiting), "sessions": sessions}

    def _ids(self, num_tokens: int) -> Int32Array:
        return self._random.integers(0, _VOCABULARY, max(num_tokens, 1), np.int32)

    def _arrive(self) -> None:
        if len(self._waiting) >= _MAX_WAITING or self._random.random() > 0.6:
            return
        busy = {one.chat for one in self._running} | {chat for chat, _ in self._waiting}
        known = [chat for chat in self._chats if chat not in busy]
        if known and (len(self._chats) >= _NUM_CHATS or self._random.random() < 0.6):
            chat = known[int(len(known) * self._random.random() ** 0.5)]  # the newest are likelier to go on
            tenant, tokens = self._chats[chat]
        else:
            chat = next(self._numbers)
            tenant = TENANTS[int(len(TENANTS) * self._random.random() ** 1.6)]
            tokens = self._systems[tenant][int(self._random.random() < 0.3)]
            if len(self._chats) >= _NUM_CHATS and known:
                del self._chats[known[0]]
        question = self._ids(int(self._turn * (0.3 + 2 * self._random.random())))
        self._chats[chat] = (tenant, np.concatenate([tokens, question]))
        self._waiting.append((chat, time.monotonic()))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._most_running:
            chat, _ = self._waiting[0]
            tenant, tokens = self._chats[chat]
            scope = ReuseScope(tenant=tenant)
            if not self.manager.can_allocate(tokens, scope=scope):
                return
            first = len(self._systems[tenant][0])
            retention = Retention([TokenRange(0, first, 80)], decode_priority=20) if chat % 3 == 0 else None
            handle = self.manager.allocate(
                f"chat-{chat}", tokens, scope=scope, retention=retention, session=f"chat-{chat}"
            )
            self._waiting.popleft()
            self.manager.take_copies()
            self.manager.commit(handle)
            if chat % 20 == 0:
                self._pin(tokens[:first], scope)
            length = int(self._turn * (0.2 + self._random.random()))
            self._running.append(_RunningChat(chat, handle, tokens, max(length, 8)))

    def _pin(self, tokens: Int32Array, scope: ReuseScope) -> None:
        try:
            self.manager.cache.pin(tokens, scope, ttl=60.0)
        except PinBudgetError:
            return

    def _decode(self) -> None:
        some = max(self._turn // 40, 1)
        for one in list(self._running):
            count = min(some, one.left)
            try:
                self.manager.extend(one.handle, count)
            except OutOfBlocksError:  # the youngest chat ends early
                count = one.left = 0
            self.manager.take_copies()
            if count:
                tokens = self._ids(count)
                self.manager.commit(one.handle, tokens)
                one.tokens = np.concatenate([one.tokens, tokens])
                one.left -= count
            if not one.left:
                self._end(one)

    def _end(self, one: _RunningChat) -> None:
        self.manager.free(one.handle)
        self._running.remove(one)
        tenant, _ = self._chats[one.chat]
        limit = 40 * self._turn
        if len(one.tokens) < limit:
            self._chats[one.chat] = (tenant, one.tokens)
        else:
            del self._chats[one.chat]


def register(app: typer.Typer, name: str) -> None:
    """Adds the command to the application."""
    app.command(name)(view)


def view(
    blocks: Annotated[
        int, typer.Option(help="Blocks of the pool on the GPU; the host has half as many.", min=64)
    ] = 4096,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8077,
    seed: Annotated[int, typer.Option(help="Which traffic.")] = 0,
) -> None:
    """Open the live view on made-up traffic: a real manager, chats of five tenants, no model.

    \b
    kvpool view                     then open http://127.0.0.1:8077/
    kvpool view --blocks 100000

    For your own: `kvpool serve` shows its model at /, and kvpool.view.serve(manager) any manager in your process.
    """
    traffic, stop = Traffic(blocks, seed), threading.Event()
    for _ in range(_STEPS_AHEAD):
        traffic.step()
    with serve(traffic.manager, port=port, title="made-up traffic", more=traffic.more) as page:
        working = threading.Thread(target=traffic.run, args=(stop,), daemon=True)
        working.start()
        print(f"the live view is at {page.url}; Ctrl-C ends it", flush=True)
        try:
            page.wait()
        except KeyboardInterrupt:
            print()
        finally:
            stop.set()
            working.join()
