"""TierSettings: the tiers of one model, from the settings of an engine or a pool of transformers. Needs torch.

They are tiers of the caller's own, a directory on a disk, and a remote store by its address.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpool.config import KVCacheConfig
from kvpool.config.layers import MAX_BYTES, check_int, check_number, show
from kvpool.errors import ConfigError
from kvpool.tiers.contract import KeyedTier
from kvpool.tiers.disk import DiskTier
from kvpool.tiers.keys import Fingerprint, KeySpace
from kvpool.tiers.model_identity import model_id, weights_id
from kvpool.tiers.open import open_tier
from kvpool.tiers.tier_settings import DEFAULT_DISK_BYTES, LONGEST_TIMEOUT, REQUEST_TIMEOUT
from kvpool.tiers.transport.prefix_options import BlockKeys


class OpenedTiers(NamedTuple):
    """Tiers in the order in which they are asked, and how they are used."""

    tiers: Sequence[KeyedTier]
    keys: BlockKeys
    timeout: float
    min_uses: int
    owned: Sequence[KeyedTier]  # those that whoever uses them closes


class TierSettings:
    """Which tiers a client has, in the order in which they are asked; checked before a model is loaded."""

    def __init__(
        self,
        tiers: Sequence[KeyedTier] | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        remote: str | None = None,
        timeout: float = REQUEST_TIMEOUT,
        min_uses: int = 1,
    ) -> None:
        self._given = _checked_tiers(tiers)
        if disk is not None and (not isinstance(disk, (str, os.PathLike)) or not os.fspath(disk)):
            raise ConfigError(f"disk must be the path of a directory, got {show(disk)}")
        if disk_bytes is not None:
            check_int("disk_bytes", disk_bytes, 1, MAX_BYTES)
            if disk is None:
                raise ConfigError(f"disk_bytes={disk_bytes} needs disk, the directory to keep them in")
            if _is_address(disk):
                raise ConfigError(
                    f"disk_bytes={disk_bytes} beside the address of a disk tier: write ?bytes= in the address"
                )
        if remote is not None and not isinstance(remote, str):
            raise ConfigError(f"remote must be the address of a tier, like redis://localhost, got {show(remote)}")
        self._disk = disk
        self._disk_bytes = DEFAULT_DISK_BYTES if disk_bytes is None else disk_bytes
        self._remote = remote
        self._min_uses = check_int("tier_min_uses", min_uses, 1, 2**31)
        self._timeout = check_number("tier_timeout", timeout, "a number of seconds above 0")
        if not 0 < self._timeout <= LONGEST_TIMEOUT:
            raise ConfigError(f"tier_timeout={timeout} must be above 0 and at most {LONGEST_TIMEOUT:g} seconds")

    def open(self, model: Any, config: KVCacheConfig) -> OpenedTiers | None:
        """Opens the tiers for the keys and values of a model; None if there are none."""
        if not self._given and self._disk is None and self._remote is None:
            return None
        if not config.enable_prefix_caching:
            raise ConfigError("tiers need enable_prefix_caching: what they bring is found by content")
        space = KeySpace(Fingerprint.of(config, model_id(model), weights_id(model)))
        opened = self._open()
        tiers = [*self._given, *opened]
        for tier in tiers:
            tier.introduce(space)
        return OpenedTiers(tiers, BlockKeys(space, config), self._timeout, self._min_uses, opened)

    def _open(self) -> list[KeyedTier]:
        """The tiers that are opened here, to be closed by whoever uses them."""
        opened: list[KeyedTier] = []
        try:
            if self._disk is not None and _is_address(self._disk):
                opened.append(open_tier(self._disk))
            elif self._disk is not None:
                opened.append(DiskTier(self._disk, self._disk_bytes))
            if self._remote is not None:
                opened.append(open_tier(self._remote))
        except BaseException:
            for tier in opened:
                tier.close()
            raise
        return opened


def _is_address(disk: str | os.PathLike[str]) -> bool:
    """Whether this is `disk:DIRECTORY?bytes=…` and not a directory."""
    return isinstance(disk, str) and disk.startswith("disk:")


def _checked_tiers(tiers: object) -> tuple[KeyedTier, ...]:
    if tiers is None:
        return ()
    if isinstance(tiers, str) or not isinstance(tiers, Sequence):
        raise ConfigError(f"tiers must be a list of KeyedTier, fastest first, got {show(tiers)}")
    for tier in tiers:
        if not isinstance(tier, KeyedTier):
            raise ConfigError(f"tiers must be a list of KeyedTier, fastest first; {show(tier)} is none")
    return tuple(tiers)
