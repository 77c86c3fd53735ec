"""What a request says about its blocks: `kv_transfer_params={"kvpool": {"no_store": true}}` in vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpool.config.layers import check_number, show
from kvpool.errors import ConfigError, KVPoolError
from kvpool.prefix.retention import Retention, TokenRange

KEY = "kvpool"


@dataclass(frozen=True)
class RequestOptions:
    """How the blocks of one request are kept.

    >>> RequestOptions.of({"kvpool": {"ttl": 60, "priority": 80}}).ttl
    60
    """

    no_store: bool = False
    """Nothing of it is kept; it may use what others left."""
    ttl: float | None = None
    """Seconds without use after which the host forgets its blocks. They do not go to tiers, where they would stay."""
    priority: int | None = None
    """0 (leaves the host first) to 100; 35 is usual."""
    pin: float | None = None
    """Seconds that the whole blocks of its prompt cannot be evicted from the host, from its end on. 0 ends such a pin."""

    @classmethod
    def of(cls, params: Any) -> RequestOptions:
        """From what an engine hands over with a request; `ConfigError` for what cannot be."""
        if params is None:
            return NO_WISHES
        names = [each.name for each in fields(cls)]
        if not isinstance(params, Mapping):
            raise ConfigError(f"kv_transfer_params must be a mapping, as {{{KEY!r}: {{…}}}}; got {show(params)}")
        if KEY not in params:
            _check_others(params, names)
            return NO_WISHES
        given = params[KEY]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ConfigError(f"kv_transfer_params[{KEY!r}] may hold {', '.join(names)}; got {show(given)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if type(self.no_store) is not bool:
            raise ConfigError(f"no_store must be true or false, got {show(self.no_store)}")
        if self.ttl is not None and check_number("ttl", self.ttl, "seconds above 0") <= 0:
            raise ConfigError(f"ttl={self.ttl} must be seconds above 0")
        if self.pin is not None and check_number("pin", self.pin, "seconds, or 0 to end a pin") < 0:
            raise ConfigError(f"pin={self.pin} must be seconds, or 0 to end a pin")
        if self.priority is not None:
            self.retention()

    def retention(self) -> Retention | None:
        """The priority in the manager's words."""
        if self.priority is None:
            return None
        try:
            return Retention([TokenRange(0, None, self.priority)], decode_priority=self.priority)
        except KVPoolError as error:
            raise ConfigError(str(error)) from None


def _check_others(params: Mapping[Any, Any], names: list[str]) -> None:
    """Other connectors have keys of their own there; what looks like ours in a wrong place is not passed over."""
    for key in params:
        if key in names:
            raise ConfigError(f"{key} belongs into {{{KEY!r}: {{…}}}} in kv_transfer_params")
        if difflib.get_close_matches(str(key).lower(), [KEY], cutoff=0.8):
            raise ConfigError(f"kv_transfer_params has {show(key)}; did you mean {KEY!r}?")


NO_WISHES = RequestOptions()
