"""Whose bytes are these? Keys of blocks outside the process, rooted in everything that makes bytes compatible.

A key is the fingerprint's first eight bytes, so that all values of one model can be found together, and 24 bytes of
SHA-256 over the whole fingerprint, the layer group and the block's digest (`prefix/announcing/digests.py`), which is
chained over every token before it and the reuse scope. Neither a token nor a tenant's name can be read from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvpool.config import KVCacheConfig, LayerGroup
from kvpool.config.layers import check_int, show
from kvpool.errors import InvalidArgumentError

FORMAT_VERSION = 1
"""Grows when the bytes of a block or the making of a key change; older values are then never found."""

SPACE_BYTES = 8
MAX_SHARDS = 2**16


@dataclass(frozen=True)
class Shard:
    """Which part of every head dimension this process holds: rank `rank` of `of` tensor-parallel ones."""

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        check_int("Shard.of", self.of, 1, MAX_SHARDS, InvalidArgumentError)
        check_int("Shard.rank", self.rank, 0, self.of - 1, InvalidArgumentError)


WHOLE = Shard()


@dataclass(frozen=True)
class Fingerprint:
    """Everything that must be equal before one process may use the bytes of another.

    `model` names the architecture and `weights` identifies the numbers in it; `layout` says how the bytes lie in a block
    where another engine than kvpool's wrote them. The rest comes from the configuration of the cache.
    """

    model: str
    weights: str
    block_size: int
    groups: tuple[str, ...]
    layout: str = "kvpool"
    shard: Shard = WHOLE
    version: int = FORMAT_VERSION

    @classmethod
    def of(
        cls, config: KVCacheConfig, model: str, weights: str, *, layout: str = "kvpool", shard: Shard = WHOLE
    ) -> Fingerprint:
        """The fingerprint of a cache of this configuration, for a model whose numbers `weights` identifies."""
        for name, value in (("model", model), ("weights", weights), ("layout", layout)):
            if not isinstance(value, str) or not value:
                raise InvalidArgumentError(f"{name} must be a string that is not empty, got {show(value)}")
        return cls(
            model, weights, config.block_size, tuple(_described(group) for group in config.groups), layout, shard
        )

    @property
    def digest(self) -> bytes:
        """32 bytes that differ as soon as anything in it does."""
        message = json.dumps(self.describe(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(b"kvpool fingerprint\0" + message.encode()).digest()

    def describe(self) -> dict[str, Any]:
        """Its fields as JSON-able values, for people who look into a tier."""
        return asdict(self)


def _described(group: LayerGroup) -> str:
    """What decides the bytes of a block of this layer group."""
    spec = group.spec
    fields = {
        "layers": list(group.layers),
        "heads": spec.kv_heads,
        "k": spec.head_dim,
        "v": 0 if spec.k_only else spec.value_dim,
        "dtype": spec.dtype.value,
        "bytes": group.block_bytes,
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


class KeySpace:
    """The keys of all blocks that share one fingerprint.

    >>> from kvpool import KVCacheConfig, LayerSpec
    >>> config = KVCacheConfig([LayerSpec(kv_heads=1, head_dim=8)], block_size=4, gpu_blocks=8)
    >>> space = KeySpace(Fingerprint.of(config, model="tiny", weights="v1"))
    >>> key, = space.keys([bytes(32)])
    >>> len(key), key.startswith(space.prefix)
    (32, True)
    """

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        digest = fingerprint.digest
        self.prefix = digest[:SPACE_BYTES]
        self._roots = [
            hashlib.sha256(b"kvpool block\0" + digest + group.to_bytes(4, "little"))
            for group in range(len(fingerprint.groups))
        ]

    def keys(self, digests: Iterable[bytes], group: int = 0) -> list[bytes]:
        """The keys of blocks of one layer group, from their digests in the prefix cache."""
        root, prefix = self._roots[group], self.prefix
        keys = []
        for digest in digests:
            hashed = root.copy()
            hashed.update(digest)
            keys.append(prefix + hashed.digest()[: 32 - SPACE_BYTES])
        return keys
