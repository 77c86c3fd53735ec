"""Eight faults that were published of KV caches, planted in a running engine of kvpool: real pages, wrongly handled.

Each but the last three happens only sometimes, as most of them did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.attention.attention_batch import PagedBatch
from kvpool.config import Tier
from kvpool.core.prompt import DEFAULT_SCOPE, Prompt
from kvpool.engine import Engine
from kvpool.scope import ReuseScope
from kvpool.server import parameters
from kvpool.storage import transfer
from kvpool.storage.transfer_steps import TransferStep

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Plant] = {}


def fault(plant: Plant) -> Plant:
    """Registers a fault under its name."""
    FAULTS[plant.__name__] = plant
    return plant


def _after_loads(patch: pytest.MonkeyPatch, harm: Callable[[TransferStep], None], every: int = 1) -> None:
    """Lets every so many-th copy from the host to the device be followed by something."""
    move, count = transfer.move, [0]

    def moving(step: TransferStep) -> None:
        is_load = step.source.tier == Tier.HOST and step.target.tier == Tier.GPU
        before = step.target.data[step.dst].clone() if is_load else None
        move(step)
        count[0] += is_load
        if is_load and count[0] % every == 0:
            harm(step, before)

    patch.setattr(transfer, "move", moving)


def _parts(step: TransferStep) -> Any:
    """What the layers store of each token, in the target of a copy."""
    for layer in range(2):
        yield from step.target.layer_cache(0, layer).values()


@fault
def freed_pages_read(patch: pytest.MonkeyPatch) -> None:
    """Pages leave for the host a step late: they were given back meanwhile, and others write into them."""
    move, late = transfer.move, []

    def moving(step: TransferStep) -> None:
        if step.target.tier == Tier.HOST and not late:
            late.append(step)
            return
        move(step)
        if step.target.tier == Tier.HOST or len(late) > 3:
            move(late.pop())

    patch.setattr(transfer, "move", moving)


@fault
def stale_after_a_reset(patch: pytest.MonkeyPatch) -> None:
    """A reset is confirmed, and whatever was cached can still be found."""
    patch.setattr(Engine, "invalidate", lambda self, *arguments, **options: 100)


@fault
def salts_ignored(patch: pytest.MonkeyPatch) -> None:
    """The salt of a request is read, and not part of what pages are found by."""
    patch.setattr(parameters, "scope_for_tenant", lambda tenant, salt: ReuseScope(tenant=tenant))


@fault
def table_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The first step behind a hit reads each block of the hit from the place of the next one."""
    of = PagedBatch.of

    def shifted(csr: Any, group: Any, query_lens: Any, kv_lens: Any) -> PagedBatch:
        indices = csr.indices.copy()
        for at, (asked, whole) in enumerate(zip(query_lens, kv_lens, strict=True)):
            if 1 < asked < whole:
                start, end = csr.indptr[at], csr.indptr[at + 1]
                indices[start : end - 1] = csr.indices[start + 1 : end]
        return of(csr._replace(indices=indices), group, query_lens, kv_lens)

    patch.setattr(PagedBatch, "of", shifted)


@fault
def scale_lost(patch: pytest.MonkeyPatch) -> None:
    """Quantised pages come back from the host without their scales: those of other pages are in their places."""

    def harm(step: TransferStep, before: torch.Tensor) -> None:
        for part in _parts(step):
            part.scale[step.dst] = part.scale[np.roll(step.dst, 1)]

    _after_loads(patch, harm, every=2)


@fault
def load_truncated(patch: pytest.MonkeyPatch) -> None:
    """Of some loads only the first half of the bytes of each page arrives."""

    def harm(step: TransferStep, before: torch.Tensor) -> None:
        half = before.shape[1] // 2
        step.target.data[step.dst, half:] = before[:, half:]

    _after_loads(patch, harm, every=3)


@fault
def adapters_mixed(patch: pytest.MonkeyPatch) -> None:
    """Pages are found without regard to the adapter that wrote them."""
    begin = Prompt.__init__

    def without(self: Prompt, tokens: Any, scope: ReuseScope = DEFAULT_SCOPE, *more: Any, **options: Any) -> None:
        begin(self, tokens, replace(scope, adapter=""), *more, **options)

    patch.setattr(Prompt, "__init__", without)


@fault
def ranks_swapped(patch: pytest.MonkeyPatch) -> None:
    """The heads of one rank are loaded into the pages of the other one."""

    def harm(step: TransferStep, before: torch.Tensor) -> None:
        for part in _parts(step):
            part.data[step.dst] = part.data[step.dst].flip(2)

    _after_loads(patch, harm)
