"""The process of a rank other than 0: `python -m kvpool.engine.rank_process FD FD`. `Ranks` starts it.

It loads its part of a model, runs the steps that rank 0 sends, and waits for the next model. It ends with rank 0.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from kvpool.engine.drafts import DraftModel
from kvpool.engine.engine_parts import assemble, load_draft
from kvpool.engine.leading import EngineSpec
from kvpool.engine.loop import EngineLoop
from kvpool.engine.rank_channel import COPIES, END, ERROR, OK, ORDER, TIERS, Channel
from kvpool.engine.rank_group import Hello, join_ranks
from kvpool.engine.rank_meeting import connect, launched, watch_link
from kvpool.engine.rank_tiers import RankAnswers, obey
from kvpool.engine.runner import ModelRunner
from kvpool.engine.spans import Span
from kvpool.engine.step_message import GuessSteps, SentPictures, decode, decode_copies
from kvpool.errors import UnsupportedModelError
from kvpool.kernels.layout import current
from kvpool.model.loading import load_model
from kvpool.model.sharding import Sharding
from kvpool.model.vision import Shown
from kvpool.pools.arrays import Int64Array
from kvpool.tiers.keys import Shard
from kvpool.tiers.transport.shard_keeper import ShardKeeper
from kvpool.tiers.transport.shards import Shards


class EngineEnded(Exception):  # no error
    """Rank 0 has closed the engine."""


class Follower:
    """One rank: its channels to rank 0, and the mesh of all."""

    shards: Shards | None = None  # only rank 0 tells others what to do

    def __init__(self, hello: Hello, channel: Channel, answers: RankAnswers) -> None:
        self._hello = hello
        self._channel = channel
        self._answers = answers
        self.shard = Shard(hello.rank, hello.size)
        self._device = torch.device(hello.device)
        channel.send(OK)
        own = channel.socket.getsockname()
        self._mesh = join_ranks(hello, hello.address if channel.socket.family == socket.AF_UNIX else own[0])

    def serve(self, spec: EngineSpec) -> None:
        """Builds the part of an engine and runs its steps until the engine is closed."""
        with suppress(EngineEnded):
            settings = spec.settings
            sharding = Sharding(self._hello.rank, self._hello.size, self._device, lambda: self._mesh)
            loaded = load_model(spec.model, device=self._device, dtype=settings.dtype, sharding=sharding)
            draft = load_draft(settings, loaded, sharding.of_draft())
            self._channel.send(OK)
            self._receive()
            # Rank 0 compares the vocabularies: its tokenizer may be another one
            tokenizer = None if draft is None else draft.tokenizer
            settled = settings, settings.limits(), settings.model_tiers()
            self._run(assemble(loaded.model, *settled, draft, tokenizer, ranks=self).loop)
        self._channel.send(END)

    def _receive(self) -> tuple[bytes, bytearray]:
        kind, message = self._channel.receive()
        if kind == END:
            raise EngineEnded
        return kind, message

    def exchange(self, value: str) -> list[str]:
        """What every rank says, in their order."""
        self._channel.send(OK, value.encode())
        values: list[str] = json.loads(self._receive()[1])
        return values

    def _run(self, loop: EngineLoop) -> None:
        runner, drafts, tiers = loop.runner, loop.drafts, loop.tiers
        keeper = None if tiers is None else ShardKeeper(tiers.transport, runner.plane)
        self._answers.keeper = keeper
        try:
            self._channel.send(OK)
            with current(self._device):
                self._run_steps(runner, drafts, keeper)
        finally:
            self._answers.keeper = None
            if tiers is not None and keeper is not None:
                keeper.close()
                tiers.close()
            runner.plane.close()
            runner.close()
            if drafts is not None:
                drafts.runner.close()

    @torch.inference_mode()
    def _run_steps(self, runner: ModelRunner, drafts: DraftModel | None, keeper: ShardKeeper | None) -> None:
        while True:
            kind, message = self._receive()
            if kind == COPIES:
                runner.plane.run_copies(decode_copies(message), overlap=True)
                continue
            if kind == TIERS:
                assert keeper is not None
                for order in json.loads(message):
                    obey(keeper, *order)
                continue
            if kind == ORDER:
                _obey(runner, *json.loads(message))
                continue
            step = decode(message)
            if isinstance(step, GuessSteps):
                assert drafts is not None
                drafts.follow(step)
                continue
            runner.plane.run_copies(step.copies, overlap=True)
            token_ids = runner.upload(step.plan.token_ids.astype(np.int64))
            if step.unknown:
                torch.distributed.broadcast(token_ids, 0)
            computing = drafts.runner if step.by_draft and drafts is not None else runner
            seen = () if step.pictures is None else _seen(runner, step.pictures)
            computing.run(
                step.plan, token_ids, *seen, launch=step.launch, keep=step.keep, adapter_slots=step.adapter_slots
            )


def _seen(runner: ModelRunner, pictures: SentPictures) -> tuple[Int64Array, Shown | None, Sequence[Span]]:
    """The arguments of a step with images, whose features come from rank 0."""
    positions, shown = pictures.positions if runner.num_axes > 1 else pictures.positions[0], None
    if pictures.features[1]:
        rows = torch.empty(pictures.features[1], dtype=torch.int64, device=runner.device)
        shown = Shown(rows, torch.empty(pictures.features, dtype=runner.model.dtype, device=runner.device))
        for part in shown:
            torch.distributed.broadcast(part, 0)
    return positions, shown, pictures.spans


def _obey(runner: ModelRunner, what: str, *details: Any) -> None:
    """Does something between two steps that rank 0 does at the same time."""
    if what == "hidden_source":
        with suppress(UnsupportedModelError):  # which rank 0 gets, too, and tells who asked
            runner.hidden_source()
    elif runner.adapters.obey(*details):
        runner.drop_adapted_graphs()


def follow(channel: Channel, asked: Channel) -> int:
    """Serves engines until rank 0 is gone. Returns the exit status of the process."""
    try:
        hello = Hello(*json.loads(channel.receive()[1]))
        torch.set_num_threads(hello.num_threads)
        channel.take_memory(hello.size, hello.rank)
        watch_link(channel.socket, hello.seconds)
        follower = Follower(hello, channel, RankAnswers(asked))
        while True:
            follower.serve(pickle.loads(channel.receive()[1]))
            gc.collect()
    except EOFError:
        return 0
    except BaseException as error:
        with suppress(OSError):
            channel.send(ERROR, f"{type(error).__name__}: {error}".encode())
        return 1


def serve_if_launched(asked: Any, device: Any) -> None:
    """In a process that torchrun has started with a rank other than 0: serves engines until rank 0 ends, then exits."""
    launch = launched(asked) if isinstance(asked, int) else None
    if launch is not None and launch.rank:
        code = follow(*connect(launch, device))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without waiting for a group whose other ranks may be gone


def main(steps: int, tiers: int) -> None:
    """The process that `Ranks` starts, with the numbers of its sockets."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when it ends, and takes this process with it
        signal.signal(number, signal.SIG_IGN)
    code = follow(*(Channel(socket.socket(fileno=descriptor), None) for descriptor in (steps, tiers)))
    os._exit(code)  # without waiting for a group whose other ranks may be gone


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
