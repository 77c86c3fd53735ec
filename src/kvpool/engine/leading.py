"""Rank 0 of a divided model: starts the other ranks for an engine, tells them every step, and ends with them."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.engine.ranks import END, OK, START_SECONDS, STEP, Ranks, Watch, as_ranks, rank_devices
from kvpool.engine.runner import ModelRunner
from kvpool.engine.settings import EngineSettings
from kvpool.engine.step_message import StepInputs, encode, make_lists
from kvpool.errors import ConfigError, KVPoolError
from kvpool.model.sharding import Sharding
from kvpool.pools.arrays import Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling import BatchPlan
from kvpool.storage import DataPlane

NUMBER = struct.Struct("<q")


class EngineSpec(NamedTuple):
    """What a rank needs to build its part of an engine."""

    model: Any
    settings: EngineSettings


class Leader:
    """The ranks of one engine, as rank 0 sees them."""

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        asked = settings.tensor_parallel
        self._owned = not isinstance(asked, Ranks)
        devices = rank_devices(settings.device, asked) if not isinstance(asked, Ranks) else asked.devices
        if settings.cuda_graphs and len(set(devices)) == 1:
            raise ConfigError(
                f"cuda_graphs=True on {devices[0]}: ranks that are not on GPUs of their own talk through gloo, which CUDA "
                "graphs cannot record"
            )
        graphs = settings.cuda_graphs if len(set(devices)) > 1 else False
        self.settings = replace(settings, device=str(devices[0]), cuda_graphs=graphs)
        self.sharding = Sharding(0, len(devices), devices[0], self._join)
        self._model = model
        self._device = settings.device  # as it was given: None and cuda mean a GPU for each rank
        self._copies: list[CopyOp] = []  # since the last step
        self._ranks: Ranks | None = None
        self._watch: Watch | None = None
        self._num_groups = 0

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "no model was loaded"
        return self._ranks

    def _join(self) -> Any:
        """Starts the ranks and tells them what to load: the model can be divided."""
        theirs = replace(self.settings, tokenizer=None, processor=None, record=None, publish=None)
        try:
            spec = pickle.dumps(EngineSpec(self._model, replace(theirs, tensor_parallel=self.sharding.size)))
        except Exception as error:
            raise ConfigError(f"tensor_parallel: these settings cannot be sent to other processes: {error}") from error
        asked = self.settings.tensor_parallel
        self._ranks = as_ranks(asked, self._device)
        self._ranks.in_use = True
        self._ranks.set_seconds(START_SECONDS)
        self._ranks.connect()
        self._ranks.tell_all(OK, spec)
        return self._ranks.mesh

    def loaded(self) -> None:
        """Waits until every rank has its weights: from now on they answer each other in time."""
        self.ranks.each_answers()
        self.ranks.set_seconds(self.ranks.seconds)
        self.ranks.tell_all(OK)

    def agree(self, value: int) -> int:
        """The smallest value of all ranks."""
        least: int = min(value, *(NUMBER.unpack(answer)[0] for answer in self.ranks.each_answers()))
        self.ranks.tell_all(OK, NUMBER.pack(least))
        return least

    def start(self, plane: DataPlane, runner: ModelRunner, tell: Callable[[KVPoolError], None]) -> None:
        """Waits until every rank is ready, and sends them every step from now on. `tell` hears of a rank that fails."""
        self.ranks.each_answers()
        self._num_groups = len(plane.config.groups)
        plane.mirror, runner.mirror = self._copies.extend, self._step
        self._watch = Watch(self.ranks, tell)

    def _step(self, plan: BatchPlan, token_ids: Tensor, launch: bool, keep: Int64Array | None) -> None:
        step = StepInputs(self._copies, plan, launch, keep)
        self.ranks.tell_all(STEP, encode(step, make_lists(plan, self._num_groups)))
        self._copies.clear()
        if step.has_unknown_tokens:
            torch.distributed.broadcast(token_ids, 0)

    def fail(self, error: BaseException) -> KVPoolError:
        """Ends all ranks because of an error; returns what the engine ends with."""
        if self._ranks is None:
            return error if isinstance(error, KVPoolError) else KVPoolError(str(error))
        return self._ranks.fail(error=error)

    def close(self) -> None:
        """Ends the ranks, or lets them wait for the next engine. May be called twice."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        ranks, self._ranks = self._ranks, None
        if ranks is None:
            return
        ranks.in_use = False
        if self._owned:
            ranks.close()
        elif ranks.failure is None:
            ranks.tell_all(END)
