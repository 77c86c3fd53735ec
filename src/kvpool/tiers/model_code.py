"""What the modules of a model do beside their weights: their classes, and the functions that they call.

Code of packages with versions is known by its name. Other code counts as it is: the instructions and constants of functions,
and what they were made with. What a function reads from its module or from files is not seen.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

# What the code of these packages does follows from the configuration, the weights and the versions.
_KNOWN = frozenset({"kvpool", "torch", "transformers", "accelerate", "peft", "compressed_tensors"})
_PLAIN = (bool, int, float, str)


def foreign_forwards(model: nn.Module) -> list[Callable[..., Any]]:
    """Hooks around forwards, and what single modules have in place of their class's forward, as those that steer a model.

    Nobody can tell what they do to keys and values.
    """
    return [
        forward
        for module in model.modules()
        for forward in (
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
            *(value for name, value in vars(module).items() if name == "forward"),
        )
        if not _is_known(forward)
    ]


def name_of(value: Any) -> str:
    """The name of a class or function, or of an object's class: the same in every process."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def classes_of(model: nn.Module) -> dict[str, list[Any]]:
    """The classes of a model's modules and those that they come from: their functions that are not known by name."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__[:-1]}
    return {name_of(kind): [*map(name_of, kind.__mro__), *_functions_of(kind)] for kind in kinds}


def code_of(value: Any, above: tuple[int, ...] = ()) -> Any:
    """What a callable does, as far as that can be told, in values that JSON can hold. `above` are those that hold it."""
    if value is None or isinstance(value, _PLAIN):
        return value
    inside: list[Any] = []
    if id(value) in above:
        return name_of(value)
    if isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords, *value.keywords.values()]
    elif isinstance(value, (list, tuple)):
        inside = [*value]
    elif isinstance(value, MethodType):
        return code_of(value.__func__, above)
    elif isinstance(value, FunctionType):
        if not _is_known(value):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            defaults = (value.__defaults__ or (), *(value.__kwdefaults__ or {}).values())
            inside = [_digest(value.__code__), *cells, *defaults]
    elif not hasattr(value, "__qualname__"):
        numbers = [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, _PLAIN)]
        return [name_of(value), *_functions_of(type(value)), *numbers]
    return [name_of(value), *(code_of(part, (*above, id(value))) for part in inside)]


def _functions_of(kind: type) -> list[Any]:
    """The functions of a class that are not known by its name, and what they do."""
    found = []
    for name, value in sorted(vars(kind).items()):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and not (_is_known(function) and _package(kind) in _KNOWN):
            found.append([name, code_of(function)])
    return found


def _is_known(value: Any) -> bool:
    """Whether all code of a callable, also what it wraps, comes from packages that are known by their versions."""
    return all(_package(part) in _KNOWN for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    """A callable and what it calls in turn."""
    while value is not None:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, MethodType):
            value = value.__func__
        else:
            yield value
            value = getattr(value, "__wrapped__", None)


def _package(value: Any) -> str:
    """Where code was written, whatever a decorator says of it."""
    module = getattr(value, "__globals__", {}).get("__name__") or getattr(value, "__module__", None)
    return str(module or type(value).__module__).partition(".")[0]


def _digest(code: CodeType) -> str:
    """The instructions of a function and what is written in them; not where it stands."""
    digest = hashlib.sha256(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(_digest(constant).encode())
        else:
            digest.update(repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()
