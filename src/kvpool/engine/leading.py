"""Rank 0 of a divided model: starts the other ranks for an engine, tells them every step, and ends with them."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.config import LayerGroup
from kvpool.engine.drafts import DraftModel
from kvpool.engine.rank_channel import COPIES, OK, ORDER, TIERS
from kvpool.engine.rank_meeting import as_ranks, devices_for
from kvpool.engine.rank_tiers import RankTiers
from kvpool.engine.ranks import START_SECONDS, Ranks, Watch, rank_backend
from kvpool.engine.runner import ModelRunner
from kvpool.engine.settings import EngineSettings
from kvpool.engine.spans import Span
from kvpool.engine.step_message import (
    BlockLists,
    GuessSteps,
    SentPictures,
    StepInputs,
    encode,
    encode_copies,
    encode_guesses,
    make_lists,
)
from kvpool.errors import ConfigError, InvalidArgumentError, KVPoolError
from kvpool.model.sharding import Sharding
from kvpool.model.vision import Shown
from kvpool.pools.arrays import Int64Array
from kvpool.pools.pool import CopyOp
from kvpool.scheduling import BatchPlan
from kvpool.storage import DataPlane
from kvpool.tiers.keys import Shard

_CLOSE_SECONDS = 20.0  # ranks store what is in flight to their tiers before they end


class EngineSpec(NamedTuple):
    """What a rank needs to build its part of an engine."""

    model: Any
    settings: EngineSettings


class Leader:
    """The ranks of one engine, as rank 0 sees them."""

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        asked = settings.tensor_parallel
        for name, given in (("model", model), ("draft", settings.draft)):
            if isinstance(given, torch.nn.Module):
                raise InvalidArgumentError(
                    f"tensor_parallel with a loaded {name}: every rank loads its own part; give the directory or the "
                    f"configuration of the {name}"
                )
        self._owned = False
        devices = asked.devices if isinstance(asked, Ranks) else devices_for(asked, settings.device)
        backend = asked.backend if isinstance(asked, Ranks) else rank_backend(devices)
        if settings.cuda_graphs and backend != "nccl":
            raise ConfigError(
                f"cuda_graphs=True on {devices[0]}: ranks that are not on GPUs of their own talk through gloo, which CUDA "
                "graphs cannot record"
            )
        graphs = settings.cuda_graphs if backend == "nccl" else False
        self.settings = replace(settings, device=str(devices[0]), cuda_graphs=graphs)
        self.sharding = Sharding(0, len(devices), devices[0], self._join)
        self._model = model
        self._device = settings.device  # as it was given: None and cuda mean a GPU for each rank
        self.shard = Shard(0, len(devices))
        self.shards = RankTiers(self._order, self._flush, self._flush_soon)
        self._pending: deque[CopyOp | list[Any]] = deque()  # copies, and orders about tiers, since the last step
        self._tell: Callable[[Callable[[], None]], None] | None = None  # has something called in the engine's thread
        self._ranks: Ranks | None = None
        self._watch: Watch | None = None
        self._groups: Sequence[LayerGroup] = ()
        self._started = False

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
        self._owned = not isinstance(asked, Ranks) and not self._ranks.outlive_engines
        self._ranks.in_use = True
        self._ranks.set_seconds(START_SECONDS)
        self._ranks.connect()
        self.shards.connect(self._ranks.tier_channels, self._ranks.numbers.__next__)
        self._ranks.tell_all(OK, spec)
        return self._ranks.mesh

    def loaded(self) -> None:
        """Waits until every rank has its weights: from now on they answer each other in time."""
        self.ranks.each_answers()
        self.ranks.set_seconds(self.ranks.seconds)
        self.ranks.tell_all(OK)

    def exchange(self, value: str) -> list[str]:
        """What every rank says, in their order."""
        values = [value, *(answer.decode() for answer in self.ranks.each_answers())]
        self.ranks.tell_all(OK, json.dumps(values).encode())
        return values

    def start(
        self,
        plane: DataPlane,
        runner: ModelRunner,
        drafts: DraftModel | None,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        """Waits until every rank is ready, and sends them every step from now on.

        `tell` has something called in the engine's thread, the only one that sends steps. Ranks that fail raise there.
        """
        self.ranks.each_answers()
        self._started = True
        self._tell = tell
        self._groups = plane.config.groups
        plane.mirror, runner.mirror = self._pending.extend, self._step
        runner.order = runner.adapters.order = self._tell_now
        if drafts is not None:
            drafts.runner.mirror, drafts.mirror = partial(self._step, by_draft=True), self._guess
        self._watch = Watch(self.ranks, self._stop, self.shards.heard)

    def _stop(self, failure: KVPoolError) -> None:
        def stop() -> None:
            raise failure

        assert self._tell is not None
        self._tell(stop)

    def _order(self, what: list[Any]) -> None:
        """Something about tiers, from any thread."""
        self._pending.append(what)

    def _flush_soon(self) -> None:
        if self._tell is not None:
            self._tell(self._flush)

    def _flush(self) -> None:
        """Sends what waits for the next step."""
        if self._ranks is not None and (copies := self._send_orders()):
            self.ranks.tell_all(COPIES, encode_copies(copies))

    def _tell_now(self, *order: Any) -> None:
        """Has all ranks do something before the next step, in the engine's thread."""
        self._flush()
        self.ranks.tell_all(ORDER, json.dumps(order).encode())

    def _send_orders(self) -> list[CopyOp]:
        """Sends the orders about tiers, with the copies before them; returns the copies behind them."""
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        behind: list[Any] = []
        for is_copy, each in groupby(pending, lambda item: isinstance(item, CopyOp)):
            if behind:
                self.ranks.tell_all(COPIES, encode_copies(behind))
            behind = list(each)
            if not is_copy:
                self.ranks.tell_all(TIERS, json.dumps(behind).encode())
                behind = []
        return behind

    def _step(
        self,
        plan: BatchPlan,
        token_ids: Tensor,
        positions: Int64Array,
        shown: Shown | None,
        spans: Sequence[Span],
        launch: bool,
        keep: Int64Array | None,
        adapter_slots: Int64Array | None,
        *,
        by_draft: bool = False,
    ) -> None:
        is_guessed = self.settings.draft is not None and bool(plan.num_drafts.any())
        unknown = is_guessed or plan.has_unknown_tokens
        pictures = None
        if shown is not None or spans or positions is not plan.positions:
            pictures = SentPictures(np.atleast_2d(positions), spans)
            if shown is not None:
                layers, rows, size = shown.features.shape
                pictures = pictures._replace(features=(layers, rows, size))
        step = StepInputs(self._send_orders(), plan, launch, keep, adapter_slots, pictures, unknown, by_draft)
        self.ranks.tell_step(partial(encode, step, make_lists(plan, self._groups)))
        if unknown:
            torch.distributed.broadcast(token_ids, 0)
        if shown is not None:
            for part in shown:
                torch.distributed.broadcast(part.contiguous(), 0)

    def _guess(self, steps: GuessSteps) -> None:
        self._flush()
        self.ranks.tell_step(partial(encode_guesses, steps, BlockLists.of(steps.batch, self._groups)))

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
        if ranks.failure is None and (self._started or not self._owned):
            ranks.set_seconds(max(ranks.seconds, _CLOSE_SECONDS))
            with suppress(KVPoolError):  # a rank that does not end makes them fail
                ranks.end_engine()
        ranks.in_use = False
        if self._owned:
            ranks.close()
