"""The tiers of one model: which they are, and the keys of its blocks there. Needs torch.

Blocks of one model must never reach another, so keys depend on all weights of the model. Reading them takes a fraction of a
second: the rows and the columns of every tensor are summed as integers. These sums are exact and the same on any device.
They change if one number changes, or if two change places.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpool.checks import show
from kvpool.config import KVCacheConfig
from kvpool.errors import ConfigError
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.identity import OF_TRANSFORMERS, settings_id
from kvpool.tiers.keys import Fingerprint, KeySpace
from kvpool.tiers.model_code import classes_of, code_of, foreign_forwards, name_of
from kvpool.tiers.opening import open_tiers
from kvpool.tiers.settings import TierConfig
from kvpool.tiers.transport.block_keys import BlockKeys


class OpenedTiers(NamedTuple):
    """Tiers in the order in which they are asked, and how they are used."""

    tiers: Sequence[KeyedTier]
    keys: BlockKeys
    timeout: float
    min_uses: int
    owned: Sequence[KeyedTier]  # tiers that the user of this object must close


@dataclass(frozen=True)
class ModelTiers:
    """The tiers of an engine or a `CachePool`. They are checked before a model is loaded, and opened afterwards.

    They are asked in this order: the caller's own tiers, the disk, the remote store.
    """

    given: tuple[KeyedTier, ...]
    disk: str | None  # addresses
    remote: str | None
    timeout: float
    min_uses: int

    @classmethod
    def of(cls, tiers: Any, disk: Any, disk_bytes: Any, **keywords: Any) -> ModelTiers:
        """From the keywords of a client: `tiers`, and settings of `TierConfig`. `disk` may also be an address."""
        given = _checked_tiers(tiers)
        address = disk if isinstance(disk, str) and disk.startswith("disk:") else None
        if address is None:
            path = os.fspath(disk) if isinstance(disk, os.PathLike) else disk
            config = TierConfig.of(disk=path, disk_bytes=disk_bytes, **keywords)
            address = config.disk_address
        else:
            config = TierConfig.of(**keywords)
            if disk_bytes is not None:
                raise ConfigError(
                    f"disk_bytes={show(disk_bytes)} beside the address of a disk tier: write ?bytes= in the address"
                )
        assert config.timeout is not None and config.min_uses is not None
        return cls(given, address, config.remote_address, config.timeout, config.min_uses)

    def open(
        self,
        model: Any,
        config: KVCacheConfig,
        *,
        are_rotated: bool = False,
    ) -> OpenedTiers | None:
        """Opens the tiers for the keys and values of a model, or returns None if there are none.

        Keys and values that are rotated before they are stored have other names than those that are not.
        """
        if not self.given and self.disk is None and self.remote is None:
            return None
        if not config.enable_prefix_caching:
            raise ConfigError("tiers need enable_prefix_caching, because loaded blocks are found by their content")
        _check_forwards(model)
        name = model_id(model) + " with rotated keys and values" * are_rotated
        space = KeySpace(Fingerprint.of(config, name, weights_id(model)))
        opened = open_tiers((self.disk, self.remote), space)
        for tier in self.given:
            tier.introduce(space)
        return OpenedTiers([*self.given, *opened], BlockKeys(space, config), self.timeout, self.min_uses, opened)


def _checked_tiers(tiers: object) -> tuple[KeyedTier, ...]:
    if tiers is None:
        return ()
    if isinstance(tiers, str) or not isinstance(tiers, Sequence):
        raise ConfigError(f"tiers must be a list of KeyedTier, fastest first, got {show(tiers)}")
    for tier in tiers:
        if not isinstance(tier, KeyedTier):
            raise ConfigError(f"tiers must be a list of KeyedTier, fastest first; {show(tier)} is no KeyedTier")
    return tuple(tiers)


# --- which model is this? --------------------------------------------------------------------------------------------

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Attributes of modules that change no key or value.
_OF_MODULES = frozenset({"training", "gradient_checkpointing", "max_seq_len_cached", "name_or_path", "loss_type"})


def model_id(model: Any) -> str:
    """The class of a model and the version of transformers, and digests of its configuration and of its modules.

    Of a module count its class, numbers and strings, as those of positions, norms and scales, and the functions that it
    calls. Of adapters that peft put into its layers, it also says which are active and how they are scaled.
    """
    modules = {
        name: [name_of(module)]
        + [
            [field, code_of(value)]
            for field, value in sorted(vars(module).items())
            if not field.startswith("_") and field not in _OF_MODULES
            if isinstance(value, (bool, int, float, str)) or callable(value)
        ]
        for name, module in model.named_modules()
    }
    import transformers

    named = (
        f"{type(model).__name__} of transformers {transformers.__version__} "
        f"{settings_id(model.config, OF_TRANSFORMERS)} {settings_id([modules, classes_of(model)])}"
    )
    adapted = {
        name: [
            module.active_adapters,
            module.disable_adapters,
            module.merged_adapters,
            getattr(module, "scaling", None),
        ]
        for name, module in model.named_modules()
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    }
    return f"{named} {settings_id(adapted)}" if adapted else named


def _check_forwards(model: Any) -> None:
    for forward in foreign_forwards(model):
        raise ConfigError(
            f"{type(model).__name__} has the forward hook, or the forward of one module, {show(forward)}: nobody can tell "
            "what it does to keys and values, so that its blocks in tiers could not be told from another model's; remove "
            "it, or leave disk, remote and tiers out"
        )


@torch.no_grad()
def weights_id(model: Any) -> str:
    """A digest of all parameters and buffers of a model, also those that it does not save: names, types and contents."""
    found = {**model.state_dict(), **dict(model.named_buffers())}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.is_quantized:
            raise ConfigError(
                f"the weight {name} of {type(model).__name__} has no numbers that can be read, so that its blocks in tiers "
                "could not be told from another model's; leave disk, remote and tiers out"
            )
    tensors = sorted(found.items())
    read: dict[tuple[int, torch.Size], int] = {}  # tied weights are read once
    sums: list[Tensor] = []
    for _, tensor in tensors:
        place = tensor.data_ptr(), tensor.shape
        if place not in read:
            read[place] = len(sums)
            sums.append(_content(tensor))
    ends = list(itertools.accumulate(map(len, sums), initial=0))
    contents = torch.cat([each.cpu() for each in sums]).numpy() if sums else None
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype)]).encode())
        if contents is not None:
            index = read[tensor.data_ptr(), tensor.shape]
            digest.update(contents[ends[index] : ends[index + 1]].tobytes())
    return digest.hexdigest()


def _content(tensor: Tensor) -> Tensor:
    """The words of a vector as int64; of other tensors the sums of their columns and of their rows."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.uint8))
    if tensor.ndim < 2 or not len(words):
        return words.to(torch.int64)
    table = words.view(-1, len(words) // (tensor.numel() // tensor.shape[-1]))
    return torch.cat([table.sum(0, dtype=torch.int64), table.sum(1, dtype=torch.int64)])
