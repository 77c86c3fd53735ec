"""From an engine's settings to its tiers: a directory on a disk, a remote store by its URL, tiers of the caller's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvpool.config import KVCacheConfig
from kvpool.config.layers import check_number, show
from kvpool.engine.tiering.identity import model_id, weights_id
from kvpool.engine.tiering.link import TierLink
from kvpool.errors import ConfigError
from kvpool.scheduling import Scheduler
from kvpool.storage import DataPlane
from kvpool.tiers import Fingerprint, KeyedTier, KeySpace
from kvpool.tiers.planning import BlockKeys

DEFAULT_TIMEOUT = 2.0
LONGEST_TIMEOUT = 3600.0


class TierSettings:
    """Which tiers an engine has, checked before a model is loaded."""

    def __init__(
        self,
        tiers: Sequence[KeyedTier] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.tiers = _checked_tiers(tiers)
        self.timeout = check_number("tier_timeout", timeout, "a number of seconds above 0")
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise ConfigError(f"tier_timeout={timeout} must be above 0 and at most {LONGEST_TIMEOUT:g} seconds")

    def link(self, model: Any, config: KVCacheConfig, scheduler: Scheduler, plane: DataPlane) -> TierLink | None:
        """Opens the tiers and joins them to an engine; None if there are none."""
        if not self.tiers:
            return None
        if not config.enable_prefix_caching:
            raise ConfigError("tiers need enable_prefix_caching: what they bring is found by content")
        space = KeySpace(Fingerprint.of(config, model_id(model), weights_id(model)))
        return TierLink(self.tiers, BlockKeys(space, config), scheduler, plane, timeout=self.timeout)


def _checked_tiers(tiers: object) -> tuple[KeyedTier, ...]:
    if tiers is None:
        return ()
    if isinstance(tiers, (str, os.PathLike, KeyedTier)) or not isinstance(tiers, Sequence):
        raise ConfigError(f"tiers must be a list of KeyedTier, fastest first, got {show(tiers)}")
    for tier in tiers:
        if not isinstance(tier, KeyedTier):
            raise ConfigError(f"tiers must be a list of KeyedTier, fastest first; {show(tier)} is none")
    return tuple(tiers)
