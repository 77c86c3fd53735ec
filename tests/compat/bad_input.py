"""Every public call of the adapters with every kind of wrong value in every parameter.

A call ends in an error of `kvpool.errors` that names the value, with nothing changed; or the value is one that the
parameter takes (`Subject.takes`), because its documentation says so. Each system has a test file that lists its subjects
and, in `KNOWN_FAILURES`, the parameters that do not hold to this yet, as `Class.method(parameter)`.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool import KVCacheHandle, KVCacheManager, compat
from kvpool.checks import show
from kvpool.compat import ferrum, pyagent
from kvpool.errors import KVPoolError
from kvpool.storage import DataPlane
from wrong_values import NASTY

CONSTRUCTOR = "__init__"
_TIMES = ("last_access",)


@dataclass
class Subject:
    """A class or function with what it needs: an object in use, good arguments, and which odd values it takes.

    `good` and `takes` are looked up by "method.parameter", then by "parameter". A good argument that is a function is called
    with the object first. Optional parameters are given only where `good` has them by "method.parameter".
    """

    kind: Any
    make: Callable[[], Any] | None = None  # None: only its constructor is tried, others have its methods
    good: Mapping[str, Any] = field(default_factory=dict)
    takes: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.kind.__name__)

    def good_value(self, target: Any, method: str, parameter: str) -> Any:
        value = self.good.get(f"{method}.{parameter}", self.good.get(parameter))
        return value(target) if isinstance(value, types.FunctionType) else value

    def may_take(self, method: str, parameter: inspect.Parameter, value: Any) -> bool:
        rule = self.takes.get(f"{method}.{parameter.name}", self.takes.get(parameter.name))
        if value is None and parameter.default is None:
            return True
        return rule is not None and bool(rule(value))


# --- what parameters take ---------------------------------------------------------------------------------------------


def is_int(low: int = 0, high: int = 2**40) -> Callable[[Any], bool]:
    """Whole numbers in a range, also numpy's; bools are none."""

    def fits(value: Any) -> bool:
        try:
            return not is_flag(value) and low <= operator.index(value) <= high
        except Exception:
            return False

    return fits


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def is_flag(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def is_id(value: Any) -> bool:
    """A request's id: anything that can be found again by an equal one."""
    try:
        return hash(value) is not None and bool(value == value)
    except Exception:
        return False


def is_tokens(value: Any) -> bool:
    try:
        array = np.asarray(value)
    except Exception:
        return False
    return array.ndim == 1 and (not array.size or array.dtype.kind in "iu") and not (array < 0).any()


# --- what an object holds ---------------------------------------------------------------------------------------------


def holdings(thing: Any, seen: set[int] | None = None) -> Any:
    """All that can be seen of an object: of managers their books, of stores their bytes, of adapters their attributes."""
    seen = set() if seen is None else seen
    if isinstance(thing, (torch.Tensor, np.ndarray)):
        array = thing.contiguous().view(torch.uint8).numpy() if isinstance(thing, torch.Tensor) else thing
        return array.tobytes() if array.dtype != object else array.tolist()
    if isinstance(thing, (str, bytes, int, float, type(None), type)):
        return repr(thing)
    if id(thing) in seen:
        return id(thing)
    seen.add(id(thing))
    if isinstance(thing, KVCacheManager):
        return _of_manager(thing)
    if isinstance(thing, DataPlane):
        stores = [holdings(store.data) for store in thing.stores.values() if hasattr(store, "data")]
        return [stores, holdings(thing._pending, seen)]
    if isinstance(thing, Mapping):
        return [(holdings(key, seen), holdings(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [holdings(item, seen) for item in thing]
    if type(thing).__module__.startswith("kvpool.compat"):
        return [(key, holdings(value, seen)) for key, value in vars(thing).items() if key not in _TIMES]
    return id(thing)


def _of_manager(manager: KVCacheManager) -> Any:
    stats = replace(manager.stats(), allocation_failures=0, extend_failures=0)  # these are counted
    groups = range(len(manager.config.groups))
    requests = [
        (
            *(repr(handle.request_id), handle.num_reserved, handle.num_written, handle.num_committed, handle.serial),
            [handle.block_ids(group).tolist() for group in groups],
            None if handle.swapped is None else [ids.tolist() for ids in handle.swapped],
            handle.token_ids.tolist(),
        )
        for handle in manager.handles
    ]
    copies = [(op.kind, op.src.tolist(), op.dst.tolist()) for op in manager._cache.copies]
    return [stats, requests, copies, len(manager._guard.pressure_callbacks)]


# --- calls ------------------------------------------------------------------------------------------------------------


def methods_of(subject: Subject, modules: tuple[str, ...]) -> list[str]:
    """The constructor (or the function itself) and the public methods that these modules define."""
    if subject.make is None:
        return [CONSTRUCTOR]
    found = [CONSTRUCTOR]
    for name in dir(subject.kind):
        static = inspect.getattr_static(subject.kind, name)
        owner = next((base for base in subject.kind.__mro__ if name in vars(base)), object)
        is_method = isinstance(static, (types.FunctionType, classmethod, staticmethod))
        if is_method and not name.startswith("_") and owner.__module__.startswith(modules):
            found.append(name)
    return [name for name in found if parameters_of(subject, name) and not is_refusal(subject, name)]


def is_refusal(subject: Subject, method: str) -> bool:
    """Whether a method refuses every call, whatever it is given."""
    return method != CONSTRUCTOR and getattr(subject.kind, method).__annotations__.get("return") == "NoReturn"


def parameters_of(subject: Subject, method: str) -> list[inspect.Parameter]:
    call = subject.kind if method == CONSTRUCTOR else getattr(subject.kind, method)
    given = inspect.signature(call).parameters.values()
    return [p for p in given if p.name != "self" and p.kind is not p.VAR_KEYWORD]


def call(subject: Subject, target: Any, method: str, wrong: str, value: Any) -> Any:
    """Calls a method with one wrong argument, and good ones for what it needs besides."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in parameters_of(subject, method):
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if parameter.name == wrong:
            argument = value
        elif {wrong, parameter.name} == {"tokens", "num_tokens"} and not required:
            continue  # a prompt is given by one of them
        elif required or f"{method}.{parameter.name}" in subject.good:
            argument = subject.good_value(target, method, parameter.name)
        else:
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            given.append(argument)
        else:
            named[parameter.name] = argument
    return (subject.kind if method == CONSTRUCTOR else getattr(target, method))(*given, **named)


def complaints_about(subject: Subject, method: str) -> dict[str, list[str]]:
    """By `Class.method(parameter)`: raw errors, values taken that nobody takes, changes, errors that name no value."""
    found: dict[str, list[str]] = {}
    make = subject.make if method != CONSTRUCTOR and subject.make is not None else _nothing
    target = make()
    before = holdings(target)
    for parameter in parameters_of(subject, method):
        place = subject.name if method == CONSTRUCTOR else f"{subject.name}.{method}"
        for value in NASTY:
            what, wrongs = f"{place}({parameter.name}={show(value)})", []
            taken = subject.may_take(method, parameter, value)
            if taken and method == CONSTRUCTOR and isinstance(value, int) and value >= 2**31:
                continue  # would make a pool of that size
            try:
                call(subject, target, method, parameter.name, value)
                refused = False
                if not taken:
                    wrongs.append("was taken")
            except KVPoolError as error:
                refused = True
                if not taken and not _names(str(error), value):
                    wrongs.append(f"is refused without being named: {error}")
            except Exception as error:
                refused = True
                wrongs.append(f"raised {error!r:.200}")
            wrongs += _state_complaints(target)
            if refused and holdings(target) != before:
                wrongs.append("was refused and changed something")
            if wrongs or not refused:
                target = make()
                before = holdings(target)
            found.setdefault(f"{place}({parameter.name})", []).extend(f"{what} {wrong}" for wrong in wrongs)
    return {place: wrongs for place, wrongs in found.items() if wrongs}


def _nothing() -> None:
    """A constructor needs no object."""


def _state_complaints(target: Any) -> list[str]:
    manager = getattr(target, "manager", None)
    try:
        if isinstance(manager, KVCacheManager):
            manager.check()
    except KVPoolError as error:
        return [f"broke the books: {error}"]
    return []


def _names(message: str, value: Any) -> bool:
    """Whether an error shows a value, a part of it, or what kind of thing it is."""
    shown = [show(value)[:60], str(value)[:60], type(value).__name__]
    if isinstance(value, np.ndarray):
        shown += [str(value.dtype), str(value.shape)]
    if isinstance(value, (list, tuple, set, dict)) or (isinstance(value, np.ndarray) and value.ndim):
        shown += [*map(show, value), "object", "()"]  # how numpy and tuples call what becomes of them
    if isinstance(value, int) and value.bit_length() > 64:
        shown.append("integer")
    return any(text in message for text in shown)


def check_calls(subject: Subject, method: str, known_failures: Mapping[str, str]) -> None:
    """Fails where a parameter takes what it should not and is not known to, and where a known failure is none any more."""
    found = complaints_about(subject, method)
    place = subject.name if method == CONSTRUCTOR else f"{subject.name}.{method}"
    known = {name for name in known_failures if name.partition("(")[0] == place}
    new = [wrong for name, wrongs in found.items() if name not in known for wrong in wrongs]
    assert not new, "\n".join(new)
    assert known <= found.keys(), f"no failures any more: {sorted(known - found.keys())}"


def cases(subjects: Iterable[Subject], *modules: str) -> Any:
    """All (subject, method) of a system, as pytest parameters."""
    pairs = [(subject, method) for subject in subjects for method in methods_of(subject, modules)]
    return pytest.mark.parametrize(("subject", "method"), [pytest.param(s, m, id=f"{s.name}.{m}") for s, m in pairs])


def kinds_in(system: str) -> set[str]:
    """The public classes and functions of a system's modules that take arguments from users: no enums, no answers."""
    names = [(module, name) for module in (compat, pyagent, ferrum) for name in module.__all__]
    kinds = {getattr(module, name) for module, name in names}
    start = f"kvpool.compat.{system}"
    return {kind.__name__ for kind in kinds if kind.__module__.startswith(start) and not _is_answer(kind)}


def _is_answer(kind: Any) -> bool:
    is_answer = isinstance(kind, type) and (issubclass(kind, tuple) or kind.__name__.endswith("Stats"))
    return is_answer or hasattr(kind, "__members__")


def live(target: Any) -> KVCacheHandle:
    """The handle of the request that every object in use has."""
    found: KVCacheHandle = target.manager.get("live")
    return found
