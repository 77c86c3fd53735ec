"""Embeddings: the last hidden states of a prompt's tokens, pooled into one vector while its steps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvpool.checks import show
from kvpool.errors import InvalidArgumentError, UnsupportedModelError
from kvpool.model.probing import run_probe

POOLINGS = ("last", "mean")


class Pooled:
    """The hidden states of one prompt: of its last token, or the sum over its tokens so far."""

    def __init__(self, pooling: str, source: torch.nn.Module) -> None:
        self.is_mean = pooling == "mean"
        self.source = source  # the module whose results are pooled
        self._state: Tensor | None = None
        self._num_tokens = 0

    def add(self, hidden: Tensor, position: int) -> None:
        """Takes `hidden` [token, size] from a position on. A preempted prompt computes some tokens again."""
        new = hidden[self._num_tokens - position :]
        if not len(new):
            return
        if not self.is_mean:
            self._state = new[-1].clone()  # so that the states of the other tokens can go
        else:
            total = new.float().sum(0)
            self._state = total if self._state is None else self._state + total
        self._num_tokens += len(new)

    def vector(self, normalize: bool) -> npt.NDArray[np.float32]:
        """The embedding, on the host."""
        assert self._state is not None
        vector = self._state.float() / (self._num_tokens if self.is_mean else 1)
        if normalize:
            vector = vector / vector.norm().clamp(min=1e-12)
        return vector.cpu().numpy()


def check_pooling(pooling: object) -> None:
    """Refuses unknown ways to pool."""
    if pooling not in POOLINGS:
        raise InvalidArgumentError(f"pooling={show(pooling)} is unknown; known: {', '.join(POOLINGS)}")


def vectors(pooled: Sequence[Pooled | None], normalize: bool) -> npt.NDArray[np.float32]:
    """The embeddings of prompts that are computed, [prompt, size]."""
    if not pooled:
        return np.empty((0, 0), np.float32)
    return np.stack([each.vector(normalize) for each in pooled if each is not None])


def source_of(model: Any) -> torch.nn.Module:
    """The module whose result the head of a language model takes: all hidden states of a step, behind the last norm.

    Found by running a few tokens. Raises UnsupportedModelError if something is computed between it and the head.
    """
    # By address. A module that only passes a result on replaces the one inside.
    results: dict[int, torch.nn.Module] = {}
    taken: list[int] = []

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(first := _first(output), Tensor):
            results[first.data_ptr()] = module

    head = model.get_output_embeddings()
    hooks = [module.register_forward_hook(note) for module in model.modules() if module not in (model, head)]
    hooks.append(head.register_forward_pre_hook(lambda module, inputs: taken.append(inputs[0].data_ptr())))
    try:
        run_probe(model)
    finally:
        for hook in hooks:
            hook.remove()
    if len(taken) != 1 or taken[0] not in results:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its logits from something else than the result of one of its modules, so it "
            "gives no embeddings"
        )
    return results[taken[0]]


def hidden_of(output: Any) -> Tensor:
    """The hidden states [token, size] of a step, from what its `source_of` returned."""
    states: Tensor = _first(output)[0]
    return states


def _first(output: Any) -> Any:
    """The hidden states that a module returns: a tensor, the first of several, or those of an output of transformers."""
    return output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
