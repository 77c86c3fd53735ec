"""The process of a rank other than 0: `python -m kvpool.engine.rank_process FD`. `Ranks` starts it.

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
from contextlib import suppress

import numpy as np
import torch

from kvpool.engine.engine_parts import assemble
from kvpool.engine.leading import NUMBER, EngineSpec
from kvpool.engine.ranks import END, ERROR, OK, Channel, Hello, join_ranks
from kvpool.engine.runner import ModelRunner
from kvpool.engine.step_message import decode
from kvpool.kernels.layout import current
from kvpool.model.loading import load_model
from kvpool.model.sharding import Sharding


class Follower:
    """One rank: its channel to rank 0, and the mesh of all."""

    def __init__(self, hello: Hello, channel: Channel) -> None:
        self._hello = hello
        self._channel = channel
        self._device = torch.device(hello.device)
        channel.send(OK)
        self._mesh = join_ranks(hello.rank, hello.size, self._device, hello.backend, hello.directory, hello.seconds)

    def serve(self, spec: EngineSpec) -> None:
        """Builds the part of an engine and runs its steps until the engine is closed."""
        settings = spec.settings
        sharding = Sharding(self._hello.rank, self._hello.size, self._device, lambda: self._mesh)
        loaded = load_model(spec.model, device=self._device, dtype=settings.dtype, sharding=sharding)
        self._channel.send(OK)
        self._channel.receive()
        parts = assemble(loaded.model, settings, settings.limits(), settings.model_tiers(), agree=self._agree)
        self._channel.send(OK)
        runner = parts.loop.runner
        try:
            with current(self._device):
                self._run_steps(runner)
        finally:
            parts.plane.close()
            runner.close()

    def _agree(self, value: int) -> int:
        self._channel.send(OK, NUMBER.pack(value))
        least: int = NUMBER.unpack(self._channel.receive()[1])[0]
        return least

    @torch.inference_mode()
    def _run_steps(self, runner: ModelRunner) -> None:
        while True:
            kind, message = self._channel.receive()
            if kind == END:
                return
            step = decode(message)
            runner.plane.run_copies(step.copies, overlap=True)
            token_ids = runner.upload(step.plan.token_ids.astype(np.int64))
            if step.has_unknown_tokens:
                torch.distributed.broadcast(token_ids, 0)
            runner.run(step.plan, token_ids, launch=step.launch, keep=step.keep)


def main(descriptor: int) -> None:
    """Serves engines until rank 0 is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when it ends, and takes this process with it
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor), None)
    try:
        hello = Hello(*json.loads(channel.receive()[1]))
        torch.set_num_threads(hello.num_threads)
        follower = Follower(hello, channel)
        while True:
            follower.serve(pickle.loads(channel.receive()[1]))
            gc.collect()
    except EOFError:
        pass
    except BaseException as error:
        with suppress(OSError):
            channel.send(ERROR, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)  # without waiting for a group whose other ranks may be gone


if __name__ == "__main__":
    main(int(sys.argv[1]))
