"""Draws a setting and operations from a seed, runs them, and reduces a run that failed to the few operations it takes.

Every operation draws from a generator of its own, seeded by the run and its number, so that leaving one out does not change
what the others draw.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import wild_mistakes
import wild_requests
import wild_steps
import wild_upkeep
from wild_configs import Setting, draw_setting
from wild_machine import WildMachine

from kvpool import StateSpec
from kvpool.prefix.tree import all_nodes

WEIGHTS = {
    operation: weight
    for part in (wild_requests, wild_steps, wild_upkeep, wild_mistakes)
    for operation, weight in part.OPERATIONS.items()
}
OPERATIONS, CHANCES = list(WEIGHTS), list(WEIGHTS.values())
LOOK_EVERY = 2  # operations, for those who compare runs


@dataclass
class Failure:
    """A run that failed: `numbers` are the operations that it took."""

    seed: int
    numbers: list[int]
    error: str  # the last line: what was wrong
    trace: str
    setting: Setting


def run(
    seed: int, numbers: Iterable[int], *, check_every: int = 1, calls: list[str] | None = None, seen: Seen | None = None
) -> Failure | None:
    """Runs these operations of a seed with all checks after each, or each few.

    `calls` notes what the manager is asked, `seen` what it does.
    """
    setting = draw_setting(Random(f"setting {seed}"))
    done: list[int] = []
    machine = None
    try:
        machine = WildMachine(setting)
        if calls is not None:
            machine.manager = Noted(machine.manager, calls)  # type: ignore[assignment]
        if seen is not None:
            seen.listen(machine)
        for number in numbers:
            done.append(number)
            rng = Random(f"operation {seed} {number}")
            machine.step(rng.choices(OPERATIONS, CHANCES)[0], rng)
            if seen is not None and len(done) % LOOK_EVERY == 0:
                seen.look(machine)
            if len(done) % check_every == 0:
                machine.check()
        machine.finish()
    except Exception as error:
        return Failure(seed, done, f"{type(error).__name__}: {error}", traceback.format_exc(), setting)
    finally:
        if machine is not None:
            machine.close()
    return None


class Seen:
    """A letter for every other operation of a run. It stands for everything that the manager did and said so far."""

    def __init__(self) -> None:
        self.letters = ""
        self._digest = hashlib.sha256()
        self._told: list[Any] = []  # of events and of memory pressure
        self._events: Any = None

    def listen(self, machine: WildMachine) -> None:
        machine.manager.on_memory_pressure(self._told.append)
        if machine.config.event_buffer_size and machine.setting.listens:
            self._events = machine.manager.subscribe()

    def look(self, machine: WildMachine) -> None:
        inspect, books = machine.manager.inspect, machine.books()
        if self._events is not None:
            self._told += self._events.poll()
        pools = [pool for tiers in machine.cache.pools for pool in tiers if pool.num_blocks]
        at = len(self.letters)
        pool = pools[at % len(pools)]
        block = inspect.block(at % pool.num_blocks, pool=pool.index, tier=pool.tier)
        nodes = [(n.hint, n.hits, n.turn, n.fan_out, n.priority_until) for n in all_nodes(machine.cache)]
        now = (
            books,
            machine.manager.stats(),
            inspect.runs(),
            inspect.snapshot()._replace(tick=0),
            block,
            nodes,
            self._told,
        )
        self._digest.update(repr(_listed(now)).encode())
        self.letters += self._digest.hexdigest()[0]
        self._told.clear()
        machine.changed()


def _listed(value: Any) -> Any:
    """A value with all its arrays as lists and all its sets in order."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _listed(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    return [_listed(part) for part in value] if isinstance(value, (list, tuple)) else value


def reduced(failure: Failure, max_runs: int = 400) -> Failure:
    """The same kind of failure with as few operations as leaving some out can reach."""
    failure = run(failure.seed, failure.numbers) or failure  # found at once, if it was found late
    kind, length = failure.error.split(":")[0], max(1, len(failure.numbers) // 2)
    while length and max_runs > 0:
        start = 0
        while start < len(failure.numbers) and max_runs > 0:
            numbers = failure.numbers[:start] + failure.numbers[start + length :]
            shorter = run(failure.seed, numbers)
            max_runs -= 1
            if shorter is not None and shorter.error.split(":")[0] == kind:
                failure = shorter
            else:
                start += length
        length //= 2
    return failure


def report(failure: Failure) -> str:
    """What was wrong, and the calls that lead to it, for a test that shows it."""
    calls: list[str] = []
    run(failure.seed, failure.numbers, calls=calls)
    return "\n".join(
        [
            failure.trace,
            f"seed {failure.seed}, operations {failure.numbers}",
            f"layers {[_plain(layer) for layer in failure.setting.config.layers]}",
            str(failure.setting.config),
            f"resized first: {failure.setting.cuts}",
            f"listening: {failure.setting.listens}, recording: {failure.setting.records}",
            *calls,
            failure.error,
        ]
    )


def _plain(layer: Any) -> str:
    if isinstance(layer, StateSpec):
        return f"state of {layer.bytes} bytes"
    parts = {"window": layer.window, "chunk": layer.chunk, "sink_tokens": layer.sink_tokens or None}
    cross = ", cross_attention=True" if layer.cross_attention else ""
    return f"LayerSpec(1, {layer.head_dim}{''.join(f', {k}={v}' for k, v in parts.items() if v is not None)}{cross})"


QUIET = {"check", "gc", "handles", "events", "config", "writable_blocks", "take_copies", "get_num_free_blocks"}


class Noted:
    """A manager whose calls are written down as a test would make them."""

    def __init__(self, manager: Any, calls: list[str]) -> None:
        self._manager, self._calls = manager, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._manager, name)
        if name in QUIET or name.startswith("_") or not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            shown = [_show(a) for a in args] + [f"{k}={_show(v)}" for k, v in kwargs.items() if v is not None]
            self._calls.append(f"m.{name}({', '.join(shown)})")
            result = found(*args, **kwargs)
            if name not in ("batch", "subscribe"):
                self._calls[-1] += f"  # {_show(result)}"
            return result

        return call


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return f"[{', '.join(_show(v) for v in value)}]"
    if hasattr(value, "request_id"):
        return str(value.request_id)
    return " ".join(repr(value).split())
