"""What the wrappers for earlier systems share: a manager, requests named by ids, bytes when asked for, and known settings."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from enum import Enum
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from kvpool.checks import as_count, show
from kvpool.config import KVCacheConfig
from kvpool.core.handle import KVCacheHandle
from kvpool.errors import ConfigError, InvalidArgumentError, SequenceStateError, StorageError, UnknownRequestError
from kvpool.kinds import kind_of
from kvpool.manager import KVCacheManager
from kvpool.pools.arrays import Int32Array, as_token_array

if TYPE_CHECKING:
    from torch import Tensor

    from kvpool.storage import DataPlane
    from kvpool.storage.data_plane import StepSlots

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

CONFIG_SETTINGS = frozenset(field.name for field in fields(KVCacheConfig) if field.init)


def knows_settings(name: str, settings: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function refuse keywords that are neither parameters of its own nor among `settings`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        own = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        known = sorted({*own, *settings})

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for given in kwargs:
                if given not in known:
                    nearest = get_close_matches(given, known, cutoff=0.5)
                    hint = f"the nearest: {', '.join(nearest)}" if nearest else f"it knows {', '.join(known)}"
                    raise ConfigError(f"{name} has no setting {given!r}; {hint}")
            return function(*args, **kwargs)

        return checked

    return decorate


def checked_settings(cls: C) -> C:
    """Makes a dataclass refuse unknown fields in the same way."""
    setattr(cls, "__init__", knows_settings(cls.__name__)(vars(cls)["__init__"]))  # noqa: B010 - mypy refuses the assignment
    return cls


class Adapter:
    """Holds the manager that does the work, and the data plane behind it from the first byte on.

    `device` is where the bytes of the GPU tier lie: "cuda" or "cpu"; None takes a GPU if there is one.
    """

    def __init__(self, manager: KVCacheManager, *, device: str | None = None) -> None:
        if not isinstance(manager, KVCacheManager):
            raise InvalidArgumentError(f"{type(self).__name__} wraps a KVCacheManager, got {manager!r}")
        self.manager = manager
        self._device = None if device is None else device_name(device)
        self._plane: DataPlane | None = None
        self._making = threading.Lock()

    def handle(self, request: Hashable | KVCacheHandle) -> KVCacheHandle:
        """The handle of a request, given by its id or its handle."""
        if not isinstance(request, KVCacheHandle):
            return self.manager.get(request)
        if self.manager.get(request.request_id) is not request:
            raise UnknownRequestError(f"the handle of request {request.request_id!r} was freed or is another manager's")
        return request

    def table(self, request: Hashable | KVCacheHandle, group: int) -> list[int | None]:
        """Block ids of one layer group; None where a block left its window."""
        return list(self.handle(request).block_table(group))

    def commit_known(self, request: Hashable | KVCacheHandle, tokens: Any) -> KVCacheHandle:
        """`tokens`, all of them from the start, are written: those that are not final yet become so."""
        handle, ids = self.handle(request), as_token_array(tokens)
        known = handle.token_ids[: len(ids)]
        if not np.array_equal(known, ids[: len(known)]):
            raise InvalidArgumentError(f"request {handle.request_id!r} holds other tokens than those to store")
        if len(ids) > handle.num_committed:
            self.manager.commit(handle, ids[handle.num_committed :])
        return handle

    # --- bytes -------------------------------------------------------------------------------------------------------

    @property
    def plane(self) -> DataPlane:
        """The bytes behind the blocks. They are allocated when this is first asked for, and need torch."""
        with self._making:
            if self._plane is None:
                torch = import_torch()
                from kvpool.storage import DataPlane

                device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
                self._plane = DataPlane(self.manager, device, check_writes=True)
            return self._plane

    def write(self, request: Hashable | KVCacheHandle, layer: int, start: int, key: Any, value: Any = None) -> None:
        """Keys and values of one or more tokens from position `start` on, in one layer; numbers, arrays or tensors.

        Positions are written in their order at first, in any layer; from then on they can be read, as zeros in layers that
        were not written, and written again. In a layer of cross-attention positions are the encoder's.
        """
        handle, plane, group = self.handle(request), self.plane, self._group(layer)
        k, v = self._values(key, value, layer)
        stop = as_count(start, "start") + len(k)
        if not kind_of(self.manager.config.groups[group]).grows:
            if stop > handle.num_fixed_tokens:
                self._refuse_places(handle, handle.num_fixed_tokens, stop)
            plane.write(plane.cross_slots(handle, group)[start:stop], k, v, layer)
            return
        if start > handle.num_written:
            raise SequenceStateError(
                f"request {handle.request_id!r} has {handle.num_written} written tokens; write position {handle.num_written} "
                f"before {start}, since a token between them could not be read"
            )
        if stop > handle.num_reserved:
            self._make_places(handle, stop)
        num_new = max(0, stop - handle.num_written)
        while not self._write_at_once(handle, start, len(k) - num_new, k, v, layer):
            pass  # another thread moved the blocks
        if num_new:
            self.manager.mark_written(handle, num_new)

    def _write_at_once(
        self, handle: KVCacheHandle, start: int, num_old: int, k: Tensor, v: Tensor | None, layer: int
    ) -> bool:
        """Writes tokens, `num_old` of them again, if their blocks stay where they are until that is done."""
        rows = self.manager.slot_mapping([handle], start, start + len(k))
        with self.plane.step(partial(self._if_unmoved, handle, start, rows)) as step:
            if step is None:
                return False
            self._clear(step._replace(tensor=step.tensor[:, num_old:]))
            self.plane.write(step, k, v, layer)
            return True

    def _if_unmoved(self, handle: KVCacheHandle, start: int, rows: Int32Array) -> Int32Array | None:
        """Slots of tokens of a request from `start` on, if these are still theirs."""
        columns = np.arange(start, start + rows.shape[1]) // self.manager.config.block_size
        for group, slots in zip(self.manager.config.groups, rows, strict=True):
            used = slots >= 0
            if used.any():
                blocks = slots[used] // self.manager.config.block_size
                if not np.array_equal(handle.block_ids(group.index)[columns[used]], blocks):
                    return None
        return rows

    def _make_places(self, handle: KVCacheHandle, stop: int) -> None:
        """What is to be written lies behind the places of a request; refused, where a system does not allow it."""
        self._refuse_places(handle, handle.num_reserved, stop)

    @staticmethod
    def _refuse_places(handle: KVCacheHandle, length: int, stop: int) -> None:
        raise SequenceStateError(
            f"request {handle.request_id!r} has places for {length} tokens; extend it before position {stop - 1} is written"
        )

    def _clear(self, step: StepSlots) -> None:
        """Positions that are written for the first time: zeros in every layer, whatever their blocks held before."""
        num_tokens = step.tensor.shape[1]
        if not num_tokens:
            return
        import torch

        for layer in range(len(self.manager.config.layers)):
            spec = self.manager.config.attention_layer(layer)
            if not spec.cross_attention:
                values = {
                    part.name: torch.zeros(num_tokens, part.heads, part.width, device=self.plane.device)
                    for part in spec.parts
                }
                self.plane.write_parts(step, values, layer)

    def read(
        self, request: Hashable | KVCacheHandle, layer: int, start: int = 0, num_tokens: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values of written tokens of one layer, [token, head, element], wherever their blocks are now."""
        handle, group = self.handle(request), self.manager.config.groups[self._group(layer)]
        first = as_count(start, "start")
        stop = first if num_tokens is None else first + as_count(num_tokens, "num_tokens")
        length = kind_of(group).pick(handle.num_written, handle.num_fixed_tokens)
        if stop > length:
            raise InvalidArgumentError(
                f"request {handle.request_id!r} has {length} written tokens; those up to {stop} cannot be read before they "
                f"are written (start={show(start)}, num_tokens={show(num_tokens)})"
            )
        return self.plane.read(handle, layer, first, num_tokens)

    def _group(self, layer: int, name: str = "layer") -> int:
        groups = self.manager.config.group_of_layer
        return groups[layer_index(layer, len(groups), name)]

    def _values(self, key: Any, value: Any, layer: int) -> tuple[Tensor, Tensor | None]:
        """Given keys and values as float tensors [token, head, element] on the device, of as many tokens each."""
        keys, *values = self.manager.config.attention_layer(layer).parts
        if (value is None) == bool(values):
            raise InvalidArgumentError(f"layer {layer} {'stores values too' if values else 'stores keys only'}")
        k = self._tensor(key, layer, keys.heads, keys.width)
        v = None if value is None else self._tensor(value, layer, values[0].heads, values[0].width)
        if v is not None and len(v) != len(k):
            raise InvalidArgumentError(f"layer {layer} got keys of {len(k)} tokens and values of {len(v)}")
        return k, v

    def _tensor(self, numbers: Any, layer: int, heads: int, width: int) -> Tensor:
        import torch

        try:
            tensor = torch.as_tensor(numbers, device=self.plane.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InvalidArgumentError(f"layer {layer} takes numbers, got {show(numbers)}: {error}") from None
        if not tensor.numel() or tensor.numel() % (heads * width):
            raise InvalidArgumentError(
                f"layer {layer} takes {heads} heads of {width} elements for every token, "
                f"got {show(numbers)} of shape {tuple(tensor.shape)}"
            )
        tensor = tensor.reshape(-1, heads, width)
        return tensor if tensor.is_floating_point() else tensor.float()

    def close(self) -> None:
        """Gives the bytes back, if there are any."""
        with self._making:
            plane, self._plane = self._plane, None
        if plane is not None:
            plane.close()


class CountingAdapter(Adapter):
    """`allocate` and `extend` by numbers of tokens, as PyAgent and ferrum spell them."""

    def allocate(self, request_id: Hashable, num_tokens: int | None = None, *, tokens: Any = None) -> KVCacheHandle:
        """Blocks for a number of tokens; or for the prompt's `tokens`, whose cached prefix is then reused."""
        return self.manager.allocate(request_id, tokens, num_tokens=num_tokens)

    def extend(self, request_id: Hashable | KVCacheHandle, additional_tokens: int = 1) -> KVCacheHandle:
        """Places for more tokens. A new block is taken only when the last one is full; a shared one is copied first."""
        handle = self.handle(request_id)
        self.manager.extend(handle, additional_tokens)
        return handle


def layer_index(layer: Any, num_layers: int, name: str = "layer") -> int:
    """The index of a layer as an int; bools are none."""
    try:
        return as_count(layer, name, maximum=num_layers - 1)
    except InvalidArgumentError:
        raise InvalidArgumentError(f"{name} {show(layer)} is outside the model's {num_layers} layers") from None


def device_name(device: Any) -> str:
    """The name of a device that is given as a name, as an enum of names or as `torch.device`."""
    text = device.value if isinstance(device, Enum) else device
    if type(device).__module__ == "torch":
        text = str(device)
    if not isinstance(text, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise InvalidArgumentError(
            f"device={show(device)}: blocks live on 'cpu', 'cuda' or one of several GPUs, 'cuda:1'"
        )
    return text


def import_torch() -> Any:
    """torch, or an error that says how to get it: only bytes need it."""
    try:
        import torch
    except ImportError:
        raise StorageError(
            "keys and values need torch: pip install '.[torch]' in a checkout of kvpool; block ids alone do not"
        ) from None
    return torch
