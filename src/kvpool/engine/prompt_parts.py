"""What steps take from prompts beside keys and values: how likely their tokens are, and their hidden states."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpool.engine.embedding import Pooled, hidden_of
from kvpool.engine.generation import Generation
from kvpool.engine.scoring import PromptScores
from kvpool.engine.step_part import StepInputs, StepPart
from kvpool.pools.arrays import Int64Array
from kvpool.scheduling import BatchPlan


class _ScoredRow(NamedTuple):
    """A row of a step whose prompt is scored."""

    scores: PromptScores
    position: int  # of its first token
    num_tokens: int


class PromptScoring(StepPart):
    """Scores prompts: a step keeps the logits of all their tokens, behind those that tokens are sampled from."""

    def __init__(self, generations: Mapping[Hashable, Generation]) -> None:
        self._generations = generations  # by request id
        self._rows: list[_ScoredRow] = []  # of the step that is being launched

    def inputs(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Asks for the logits of the prompts that are scored."""
        self._rows = []
        wanted: list[Int64Array] = [plan.logits_indices]
        for row in range(plan.num_decode, len(plan.sequences)):
            generation = self._generations.get(plan.sequences[row].request.id)
            if generation is None or generation.scores is None or generation.scores.is_complete:
                continue
            first, stop = plan.query_start[row : row + 2].tolist()
            self._rows.append(_ScoredRow(generation.scores, int(plan.positions[first]), stop - first))
            wanted.append(np.arange(first, stop, dtype=np.int64))
        if self._rows:
            inputs.keep = np.concatenate(wanted)

    def after(self, plan: BatchPlan, logits: Tensor) -> Tensor:
        """Takes the logits of the prompts."""
        at = sampling = len(logits) - sum(row.num_tokens for row in self._rows)
        for row in self._rows:
            row.scores.add(logits[at : at + row.num_tokens], row.position)
            at += row.num_tokens
        return logits[:sampling]


class PromptPooling(StepPart):
    """Pools the hidden states of prompts. A step with such a prompt runs without a graph, because a graph calls no module."""

    def __init__(self, generations: Mapping[Hashable, Generation]) -> None:
        self._generations = generations  # by request id
        self._rows: list[tuple[int, Pooled]] = []  # of the step that is being launched
        self._hidden: list[Tensor] = []

    def inputs(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Listens to the module that returns the hidden states."""
        self._rows = []
        for row in range(plan.num_decode, len(plan.sequences)):
            generation = self._generations.get(plan.sequences[row].request.id)
            if generation is not None and generation.pooled is not None:
                self._rows.append((row, generation.pooled))
        if self._rows:
            hook = self._rows[0][1].source.register_forward_hook(self._hear)
            inputs.launch = True
            inputs.closing.callback(hook.remove)

    def _hear(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._hidden = [hidden_of(output)]

    def after(self, plan: BatchPlan, logits: Tensor) -> Tensor:
        """Pools the hidden states of each prompt."""
        for row, pooled in self._rows:
            first, stop = plan.query_start[row : row + 2].tolist()
            pooled.add(self._hidden[0][first:stop], int(plan.positions[first]))
        self._rows, self._hidden = [], []
        return logits
