"""Tiers of the ranks of one engine: how rank 0 tells the others what to store and load, and how they answer.

Orders that touch blocks go between the messages of steps, in order with them. Loads go over a socket of their own, because a
rank is busy with a step for most of the time. Both are JSON. Each load has a number, which its answer repeats.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvpool.engine.rank_channel import OK, Channel
from kvpool.quiet import QuietErrors
from kvpool.tiers.contract import Worth
from kvpool.tiers.keys import KeyPattern
from kvpool.tiers.transport.shard_keeper import ShardKeeper
from kvpool.tiers.transport.shards import ShardPart

_quiet = QuietErrors(logging.getLogger("kvpool"))


# --- rank 0 --------------------------------------------------------------------------------------------------------------


class _Question:
    """What all other ranks were asked: each answers which blocks it has. It is a `ShardLoad`, too."""

    def __init__(self, tiers: RankTiers, number: int, num_ranks: int, num_blocks: int, due: float) -> None:
        self._tiers = tiers
        self.number = number
        self._due = due
        self._num_silent = num_ranks
        self._there = np.ones(num_blocks, bool)
        self._answered = threading.Event()
        self._is_over = False

    def heard(self, there: str) -> None:
        """One rank has answered."""
        self._there &= np.frombuffer(there.encode(), np.uint8) == ord("1")
        self._num_silent -= 1
        if not self._num_silent:
            self._answered.set()

    def wait(self) -> list[bool]:
        if not self._answered.wait(max(0.0, self._due - time.monotonic())):
            return [False] * len(self._there)
        there: list[bool] = self._there.tolist()
        return there

    def write(self, parts: Sequence[ShardPart]) -> None:
        self._is_over = True
        listed = [[part.group, part.begin, part.end, part.blocks.tolist()] for part in parts]
        self._tiers.forget(self.number)
        self._tiers.order(["write", self.number, listed])

    def release(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._tiers.forget(self.number)
            self._tiers.ask(["release", self.number])


class RankTiers:
    """The tiers of the other ranks, as rank 0 sees them: the `Shards` of its transport.

    `order` takes what goes out in order with steps, from any thread. `flush` sends it, in the engine's thread; `flush_soon`
    has that done.
    """

    def __init__(
        self, order: Callable[[list[Any]], None], flush: Callable[[], None], flush_soon: Callable[[], None]
    ) -> None:
        self.order = order
        self.flush = flush
        self._flush_soon = flush_soon
        self._channels: Sequence[Channel] = ()
        self._new_number: Callable[[], int] = int
        self._questions: dict[int, _Question] = {}
        self._sending = threading.Lock()

    def connect(self, channels: Sequence[Channel], new_number: Callable[[], int]) -> None:
        """The other ranks are there. Numbers must be new to them, also after an engine before this one."""
        self._channels, self._new_number = channels, new_number

    def heard(self, content: bytes | bytearray) -> None:
        """A rank has answered."""
        number, there = json.loads(content)
        question = self._questions.get(number)
        if question is not None:  # else the request has gone on without it
            question.heard(there)

    def ask(self, what: list[Any]) -> None:
        """Sends something to all other ranks, out of order. A rank that is gone hears nothing; the engine ends with it."""
        content = json.dumps(what).encode()
        with self._sending:
            for channel in self._channels:
                with suppress(OSError):
                    channel.send(OK, content)

    def forget(self, number: int) -> None:
        """Nobody waits for the answers any more."""
        self._questions.pop(number, None)

    def _question(self, num_blocks: int, due: float) -> _Question:
        made = _Question(self, self._new_number(), len(self._channels), num_blocks, due)
        self._questions[made.number] = made
        return made

    def find(self, keys: Sequence[bytes], due: float) -> list[bool]:
        question = self._question(len(keys), due)
        self.ask(["find", question.number, _hex(keys), due - time.monotonic()])
        there = question.wait()
        self.forget(question.number)
        return there

    def load(self, keys: Sequence[Sequence[bytes]], due: float) -> _Question:
        question = self._question(sum(map(len, keys)), due)
        self.ask(["load", question.number, list(map(_hex, keys)), due - time.monotonic()])
        return question

    def store(self, group: int, keys: Sequence[bytes], blocks: Sequence[int], worths: Sequence[Worth]) -> None:
        self.order(["store", group, _hex(keys), list(blocks), list(worths)])

    def remove(self, keys: Sequence[bytes]) -> None:
        self.order(["remove", _hex(keys)])
        self._flush_soon()

    def purge(self, pattern: KeyPattern) -> None:
        self.order(["purge", None if pattern.space is None else pattern.space.hex(), pattern.tag.hex()])
        self._flush_soon()


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


# --- other ranks ---------------------------------------------------------------------------------------------------------


class RankAnswers:
    """The thread of a rank that hears rank 0's questions, of one engine after another."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.keeper: ShardKeeper | None = None  # of the engine that runs now
        threading.Thread(target=self._run, name="kvpool-rank-tiers", daemon=True).start()

    def _run(self) -> None:
        with suppress(EOFError, OSError):  # rank 0 is gone, and the process ends
            while True:
                _, message = self._channel.receive()
                try:
                    self._hear(*json.loads(message))
                except Exception as error:
                    _quiet.error(error, "a question of rank 0 about tiers failed; it computes what it does not get")

    def _hear(self, what: str, number: int, *arguments: Any) -> None:
        keeper = self.keeper
        if keeper is None:  # the engine that asked is closed
            return
        answer = partial(self._answer, number)
        if what == "find":
            keeper.find(_keys(arguments[0]), arguments[1], answer)
        elif what == "load":
            keeper.load(number, list(map(_keys, arguments[0])), arguments[1], answer)
        else:
            keeper.release(number)

    def _answer(self, number: int, there: Sequence[bool]) -> None:
        content = json.dumps([number, "".join("01"[is_there] for is_there in there)]).encode()
        with self._sending, suppress(OSError):
            self._channel.send(OK, content)


def obey(keeper: ShardKeeper, what: str, *arguments: Any) -> None:
    """Does what rank 0 ordered between two steps."""
    if what == "write":
        number, parts = arguments
        keeper.write(
            number, [ShardPart(group, begin, end, np.array(ids, np.int32)) for group, begin, end, ids in parts]
        )
    elif what == "store":
        group, keys, blocks, worths = arguments
        keeper.store(group, _keys(keys), blocks, [Worth(*worth) for worth in worths])
    elif what == "remove":
        keeper.remove(_keys(arguments[0]))
    else:
        space, tag = arguments
        keeper.purge(KeyPattern(None if space is None else bytes.fromhex(space), bytes.fromhex(tag)))


def _keys(listed: Sequence[str]) -> list[bytes]:
    return list(map(bytes.fromhex, listed))
