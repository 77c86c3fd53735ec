"""Graphs without a GPU: what a graph does, done again by running the step on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpool.attention import AttentionPlan, PagedBatch, PlanBuffers
from kvpool.attention.torch_backend import TorchBackend
from kvpool.engine import Engine
from kvpool.engine.graphs import CaptureError, RecordedStep
from kvpool.engine.runner import ModelRunner
from kvpool.engine.step_part import StepParts
from kvpool.engine.warm_up import WarmUp
from kvpool.errors import UnsupportedAttentionError
from kvpool.kernels.attention_spec import AttentionSpec


class FakeRecorder:
    """Runs a step again where a graph would be replayed; `refuses` is the reason why it cannot record."""

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.num_replays = 0

    def record(self, step: Callable[[], Tensor]) -> RecordedStep:
        output = step()
        if self.refuses is not None:
            raise CaptureError(self.refuses)

        def replay() -> None:
            self.num_replays += 1
            output.copy_(step())

        return RecordedStep(replay, output)

    def num_bytes(self) -> int:
        return 0


class _Buffers(PlanBuffers):
    newest: AttentionPlan


class _PlanInBuffers(AttentionPlan):
    def __init__(self, buffers: _Buffers) -> None:
        newest = buffers.newest
        super().__init__(newest.backend, newest.spec, newest.num_query_tokens, newest.block_size)
        self.buffers = buffers


class ReplanningBackend(TorchBackend):
    """Plans into buffers as backends for GPUs do: whoever runs an earlier plan reads the newest one."""

    graphs = True

    def __init__(self, *, mixed: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self._mixed = mixed

    def reserve(
        self,
        spec: AttentionSpec,
        *,
        max_sequences: int,
        max_blocks: int,
        max_query_tokens: int | None = None,
        max_keys: int | None = None,
        beside: PlanBuffers | None = None,
    ) -> PlanBuffers:
        tokens = max_query_tokens or max_sequences
        if tokens > max_sequences and not self._mixed:
            raise UnsupportedAttentionError("this backend captures one query a sequence")
        return _Buffers(spec, max_sequences, tokens, max_blocks, max_keys)

    def plan(self, spec: AttentionSpec, batch: PagedBatch, buffers: PlanBuffers | None = None) -> AttentionPlan:
        if buffers is None:
            return super().plan(spec, batch)
        assert isinstance(buffers, _Buffers)
        buffers.check(spec, batch)
        buffers.newest = super().plan(spec, batch.padded(buffers.max_query_tokens))
        return _PlanInBuffers(buffers)

    def run(self, q: Tensor, cache: Any, plan: AttentionPlan, **options: Any) -> Tensor:
        return super().run(q, cache, plan.buffers.newest if isinstance(plan, _PlanInBuffers) else plan, **options)


def graph_runner(engine: Engine, *, mixed: bool = True, **options: Any) -> ModelRunner:
    """A runner for the model and the blocks of an engine, which may have graphs; `options` are those of `ModelRunner`."""
    return ModelRunner(engine._loop.runner.model, engine.shape, engine.plane, ReplanningBackend(mixed=mixed), **options)


def use_runner(engine: Engine, runner: ModelRunner) -> None:
    """Has an engine that has not run yet run its steps by another runner, which may have graphs."""
    loop = engine._loop
    warm_up = WarmUp(runner, engine._parts.inbox, {})
    engine._parts, loop.runner = engine._parts._replace(warm_up=warm_up), runner
    for moment, calls in vars(StepParts([warm_up])).items():
        getattr(loop.parts, moment).extend(calls)
