"""What must be equal, besides the tokens, before one request may reuse the blocks of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.errors import InvalidArgumentError


class MultimodalItem(NamedTuple):
    """An image, a clip or another input that stands behind placeholder tokens.

    It takes `length` tokens from `position` on. `key` is its name by content, usually a hash: inputs with equal keys are
    taken for equal. Blocks up to its first token are shared whatever it is, that one and those behind it only with prompts
    that have the same item at the same place.
    """

    position: int
    length: int
    key: str | bytes | int


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """What must be equal, besides the tokens, before one request may reuse the blocks of another.

    `tenant` isolates tenants from each other, `adapter` names a LoRA, `weights` a version of the model. `multimodal`
    isolates whole prompts by what is behind their placeholder tokens, as (content hash, token offset); their order counts.
    (To share the text before an image, give `allocate` its `MultimodalItem`s instead.) `encoder` names the input of an
    encoder by its content: a decoder's keys and values depend on it, so requests with `cross_tokens` and no such name
    share nothing. `salt` separates further, within a tenant and its quota.

    >>> ReuseScope(adapter="sql-lora") == ReuseScope(adapter="sql-lora")
    True
    >>> ReuseScope(tenant="ab") == ReuseScope(tenant="a", adapter="b")
    False
    """

    tenant: str = ""
    adapter: str = ""
    weights: str = ""
    multimodal: tuple[tuple[str, int], ...] = ()
    encoder: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        for name in ("tenant", "adapter", "weights", "encoder", "salt"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidArgumentError(f'ReuseScope.{name} must be a string ("" = none), got {value!r}')
        if not isinstance(self.multimodal, tuple):
            raise InvalidArgumentError(
                f"ReuseScope.multimodal must be a tuple of (content hash, token offset) pairs, got {self.multimodal!r}"
            )
        for item in self.multimodal:
            _check_multimodal_item(item)


def _check_multimodal_item(item: object) -> None:
    if not isinstance(item, tuple) or len(item) != 2:
        raise InvalidArgumentError(f"a multimodal item must be a tuple (content hash, token offset), got {item!r}")
    content_hash, offset = item
    if not isinstance(content_hash, str):
        raise InvalidArgumentError(f"a multimodal content hash must be a string, got {content_hash!r}")
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise InvalidArgumentError(f"a multimodal token offset must be an int >= 0, got {offset!r}")
