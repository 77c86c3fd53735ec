"""Which LoRA adapter each token of a step has, for the projections that compute the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class AdapterStep(NamedTuple):
    """Which adapter each token of a step has: what `group_tokens` gives, on the device of the stacks."""

    stacks: object  # of which model the adapters are
    groups: Tensor

    def slots(self, num_tokens: int) -> Tensor:
        """The slot of each token's adapter; -1 for a token without one."""
        slots = self.groups.new_full((num_tokens + 1,), -1)  # the last one for -1, which stands for no token
        used = self.groups[:, :1] >= 0
        slots[self.groups[:, 1:].where(used, -1).long()] = self.groups[:, :1]
        return slots[:-1].long()

    def of_some(self, num_tokens: int, tokens: Tensor) -> AdapterStep:
        """The same for a call that computes only some of `num_tokens` tokens, in this order."""
        places = self.groups.new_full((num_tokens + 1,), -1)  # the last one for -1, which stands for no token
        places[tokens] = torch.arange(len(tokens), dtype=places.dtype, device=places.device)
        groups = self.groups.clone()
        groups[:, 1:] = places[self.groups[:, 1:].long()]
        return self._replace(groups=groups)


_STEP: ContextVar[AdapterStep | None] = ContextVar("kvpool_adapters", default=None)


@contextmanager
def adapting(step: AdapterStep | None) -> Iterator[None]:
    """While it is open, the projections of a model add what the adapters of a step add, in this thread or task."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


@contextmanager
def adapting_some(num_tokens: int, choose: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While it is open, projections get some of the `num_tokens` tokens that they would get, each with its adapter.

    `choose` picks these out of the places of all tokens, in the order in which projections get them.
    """
    step = _STEP.get()
    if step is None:
        yield
        return
    with adapting(step.of_some(num_tokens, choose(torch.arange(num_tokens, device=step.groups.device)))):
        yield


def current_step() -> AdapterStep | None:
    """The adapters of what this thread or task computes; None: none."""
    return _STEP.get()
