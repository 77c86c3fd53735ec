"""The adapters of an engine: which it knows by name, and which of them are on the device.

The weights of an adapter stay on disk until a request needs them. At most `max_adapters` are on the device. If another one is
needed, the least recently used one that no request uses leaves.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvpool.checks import show
from kvpool.engine.step_part import StepInputs, StepPart
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError
from kvpool.model.adapters import Adapter, AdapterStacks, read_adapter
from kvpool.model.probing import run_probe
from kvpool.scheduling import BatchPlan
from kvpool.scope import ReuseScope


class AdapterInfo(NamedTuple):
    """An adapter that an engine knows. `id` is a digest of its content, and the `adapter` of its requests' `ReuseScope`."""

    path: str
    id: str
    rank: int
    on_device: bool


@dataclass
class _Known:
    path: str
    id: str
    rank: int
    weights: Adapter | None = None  # from when a request needs them until they are on the device


class EngineAdapters(StepPart):
    """The adapters of one engine. Its thread calls what changes them; any thread may call `scope` and `info`."""

    def __init__(self, model: Any, max_adapters: int = 1, language_only: bool = False) -> None:
        self.stacks = AdapterStacks(model, max_adapters)
        self._language_only = language_only
        self._known: dict[str, _Known] = {}
        self._slots: OrderedDict[str, int] = OrderedDict()  # by id, the least recently used first
        self._users: Counter[str] = Counter()  # requests in the scheduler, by id
        self.num_users: Callable[[str], int] = _nobody  # requests that are not over, by id

    def info(self) -> dict[str, AdapterInfo]:
        """All adapters by name."""
        known = dict(self._known)
        return {name: AdapterInfo(one.path, one.id, one.rank, one.id in self._slots) for name, one in known.items()}

    def read(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Reads and checks an adapter that is to be added. From any thread."""
        if not isinstance(name, str) or not name or name != name.strip():
            raise InvalidArgumentError(f"the name of an adapter must be a text, got {show(name)}")
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidArgumentError(f"adapter {name!r}: give the directory of its files, got {show(path)}")
        adapter = self._of_file(path)
        self.stacks.check(adapter)
        return adapter

    def _of_file(self, path: str | os.PathLike[str]) -> Adapter:
        adapter = read_adapter(path, self.stacks.parameter_sizes)
        return self.stacks.language_part(adapter) if self._language_only else adapter

    def _again(self, known: _Known) -> Adapter:
        """The weights from disk; raises ConfigError if they are not those that were loaded under this name."""
        adapter = self._of_file(known.path)
        if adapter.id != known.id:
            raise ConfigError(f"the adapter in {known.path} has changed since it was loaded; load it again")
        return adapter

    def scope(self, name: str | None, scope: ReuseScope | None) -> ReuseScope:
        """The reuse scope of a request with an adapter. If its weights are not at hand, they are read now."""
        given = ReuseScope() if scope is None else scope
        if not isinstance(given, ReuseScope):
            raise InvalidArgumentError(f"scope must be a ReuseScope, got {show(scope)}")
        if given.adapter:
            raise InvalidArgumentError(
                f"scope names the adapter {show(given.adapter)}: the engine sets that itself, so write adapter=NAME"
            )
        if name is None:
            return given
        known = self._find(name)
        if known.id not in self._slots and known.weights is None:
            known.weights = self._again(known)
        return replace(given, adapter=known.id)

    def _find(self, name: object) -> _Known:
        known = self._known.get(name) if isinstance(name, str) else None
        if known is None:
            names = ", ".join(self._known) or "none"
            raise InvalidArgumentError(f"there is no adapter {show(name)}; loaded: {names}")
        return known

    # --- in the engine's thread --------------------------------------------------------------------------------------

    def add(self, name: str, path: str | os.PathLike[str], adapter: Adapter) -> bool:
        """Adds or replaces an adapter; returns whether stacks have changed."""
        before = self._known.get(name)
        if before is not None and before.id != adapter.id:
            self._refuse_users(name, before.id, "replaced")
        has_changed = self.stacks.make_room(adapter, lambda: run_probe(self.stacks.model))
        if before is not None and before.id != adapter.id:
            self._forget(name)
        self._known[name] = known = _Known(os.fspath(path), adapter.id, adapter.rank)
        if adapter.id not in self._slots and len(self._slots) < self.stacks.num_slots:
            self._fill(known, adapter)
        return has_changed

    def remove(self, name: str) -> None:
        """Forgets an adapter; raises SequenceStateError if requests use it."""
        self._refuse_users(name, self._find(name).id, "unloaded")
        self._forget(name)

    def _refuse_users(self, name: str, adapter_id: str, what: str) -> None:
        if count := self.num_users(adapter_id):
            raise SequenceStateError(
                f"adapter {name!r} cannot be {what}: {count} requests use it; wait for them or cancel them"
            )

    def _forget(self, name: str) -> None:
        gone = self._known.pop(name)
        if all(other.id != gone.id for other in self._known.values()):
            self._slots.pop(gone.id, None)

    def place(self, adapter_id: str) -> bool:
        """Puts an adapter on the device for one more request; False if requests of other adapters use all slots."""
        if adapter_id not in self._slots:
            known = next((one for one in self._known.values() if one.id == adapter_id), None)
            if known is None:
                raise InvalidArgumentError("the adapter of this request was unloaded before the request began")
            if len(self._slots) == self.stacks.num_slots and all(self._users[used] for used in self._slots):
                return False
            self._fill(known, known.weights or self._again(known))
        self._slots.move_to_end(adapter_id)
        self._users[adapter_id] += 1
        return True

    def _fill(self, known: _Known, adapter: Adapter) -> None:
        free = set(range(self.stacks.num_slots)).difference(self._slots.values())
        if not free:
            unused = next(used for used in self._slots if not self._users[used])
            free.add(self._slots.pop(unused))
        slot = min(free)
        self.stacks.fill(slot, adapter)
        self._slots[known.id] = slot
        known.weights = None

    def let_go(self, adapter_id: str) -> None:
        """A request with this adapter is over."""
        self._users[adapter_id] -= 1

    def inputs(self, plan: BatchPlan, inputs: StepInputs) -> None:
        """Says where the adapter of each token is, if a token has one."""
        if self._slots:
            slots = [self._slots[name] if (name := row.request.scope.adapter) else -1 for row in plan.sequences]
            if max(slots) >= 0:
                inputs.adapter_slots = np.repeat(slots, np.diff(plan.query_start))

    def close(self) -> None:
        """Gives the memory back, and the model is as it was."""
        self._slots.clear()
        self.stacks.close()
        self.num_users = _nobody  # it refers to the engine's loop, which refers to this


def _nobody(adapter_id: str) -> int:
    return 0
