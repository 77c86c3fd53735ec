"""Keys of blocks in tiers. A key depends on everything that must be equal before two processes may share bytes.

    fingerprint (8) | tenant (2) | scope (2) | SHA-256 of fingerprint, layer group and digest of the block (20)

By its first bytes, a purge finds all values of one model, tenant or scope (decision 12). Ranks that share a model have
fingerprints of their own. The hash takes that of rank 0, so the keys of the shards of one block differ in their first 8
bytes only, and a rank makes its keys from those of rank 0 (`KeySpace.own`). The digest (`prefix/digests.py`)
depends on the reuse scope and on all tokens up to the end of the block. Nobody can read tokens or the name of a tenant from
a key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.checks import check_int, show
from kvpool.config import KVCacheConfig, LayerGroup, StateSpec
from kvpool.config.layers import described
from kvpool.errors import InvalidArgumentError
from kvpool.files import other_format
from kvpool.prefix.digests import DIGEST_BYTES, chain_digests, root_digest
from kvpool.scope import MultimodalItem, ReuseScope

FORMAT_VERSION = 3
"""Grows when the bytes of a block or the making of a key change; older values are then never found."""

SPACE_BYTES = 8
TENANT_BYTES = 2
TAG_BYTES = 4
_NO_TAG = bytes(TAG_BYTES)
MAX_SHARDS = 2**16


@dataclass(frozen=True)
class Shard:
    """Which part of every head dimension this process holds: rank `rank` of `of` tensor-parallel ones."""

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        check_int(self.of, "Shard.of", 1, MAX_SHARDS, InvalidArgumentError)
        check_int(self.rank, "Shard.rank", 0, self.of - 1, InvalidArgumentError)


WHOLE = Shard()


@dataclass(frozen=True)
class Fingerprint:
    """Everything that must be equal before one process may use the bytes of another.

    `model` names the architecture and all settings that it computes with (`settings_id`). `weights` identifies the weights
    (`files_id`). `layout` says how bytes lie in a block if another engine than kvpool's wrote them. The other fields come
    from the configuration of the cache.
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
        """The fingerprint of a cache with this configuration, for a model whose weights `weights` identifies."""
        for name, value in (("model", model), ("weights", weights), ("layout", layout)):
            if not isinstance(value, str) or not value:
                raise InvalidArgumentError(f"{name} must be a string that is not empty, got {show(value)}")
        return cls(
            model, weights, config.block_size, tuple(_described(group) for group in config.groups), layout, shard
        )

    @property
    def digest(self) -> bytes:
        """32 bytes that change if any field changes."""
        message = json.dumps(self.describe(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(b"kvpool fingerprint\0" + message.encode()).digest()

    def describe(self) -> dict[str, Any]:
        """Its fields as JSON-able values, for people who look into a tier."""
        return asdict(self)

    @classmethod
    def from_description(cls, fields: Any) -> Fingerprint:
        """The fingerprint that `describe` described. Raises if another version of kvpool made keys differently."""
        version = fields.get("version") if isinstance(fields, dict) else None
        remedy = "purge its values by --space instead"
        if version is not None and (problem := other_format(version, FORMAT_VERSION, FORMAT_VERSION, remedy)):
            raise InvalidArgumentError(f"the description of the model {show(fields.get('model'))} {problem}")
        try:
            shard = Shard(**fields["shard"])
            found = cls(**{**fields, "groups": tuple(fields["groups"]), "shard": shard})
            check_int(found.block_size, "block_size", 1, 2**20, InvalidArgumentError)
        except (TypeError, KeyError, InvalidArgumentError):
            raise InvalidArgumentError(f"this describes no fingerprint: {show(fields)}") from None
        return found


def _described(group: LayerGroup) -> str:
    """The fields of a layer group: shapes and types, and which tokens its layers see."""
    if isinstance(group.spec, StateSpec):
        spec: dict[str, Any] = {"parts": [[part.name, part.shape, part.dtype.value] for part in group.spec.parts]}
    else:
        spec = described(group.spec)
        dtype = group.spec.dtype
        spec["dtype"] = dtype.value if dtype.of_keys is dtype else f"{dtype.value} with keys in {dtype.of_keys.value}"
    fields = {**spec, "layers": list(group.layers), "bytes": group.block_bytes}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def tenant_digest(tenant: str) -> bytes:
    """A digest that stands for all scopes of a tenant, as the digest of a root stands for one scope."""
    return hashlib.sha256(b"kvpool tenant\0" + tenant.encode("utf-8", "surrogatepass")).digest()


def tenant_tag(tenant: str) -> bytes:
    """The two bytes of keys that stand for a tenant. One in 65,536 other tenants has the same."""
    return tenant_digest(tenant)[:TENANT_BYTES]


def scope_tag(scope: ReuseScope) -> bytes:
    """The four bytes of keys that stand for a scope: those of its tenant, and two of its own."""
    own = hashlib.sha256(b"kvpool scope\0" + root_digest(scope)).digest()[: TAG_BYTES - TENANT_BYTES]
    return tenant_tag(scope.tenant) + own


def named(scope: ReuseScope, digests: Iterable[bytes]) -> list[bytes]:
    """Digests of blocks with the tag of their scope before them, as `KeySpace.keys` takes them."""
    tag = scope_tag(scope)
    return [tag + digest for digest in digests]


@dataclass(frozen=True)
class KeyPattern:
    """Keys with the same first bytes: of one model, of a tenant or scope, or of both.

    Tags are short, so values of others may match: of one in 65,536 tenants, of one in four billion scopes.

    >>> KeyPattern.of_tenant("acme").matches(bytes(8) + tenant_tag("acme") + bytes(22))
    True
    """

    space: bytes | None = None
    """The first bytes of a fingerprint; None: of all models."""
    tag: bytes = b""

    def __post_init__(self) -> None:
        if self.space is not None and (not isinstance(self.space, bytes) or len(self.space) != SPACE_BYTES):
            raise InvalidArgumentError(f"KeyPattern.space must be {SPACE_BYTES} bytes or None, got {show(self.space)}")
        if not isinstance(self.tag, bytes) or len(self.tag) not in (0, TENANT_BYTES, TAG_BYTES):
            raise InvalidArgumentError(f"KeyPattern.tag must be a tag of a tenant or a scope, got {show(self.tag)}")

    @classmethod
    def of_tenant(cls, tenant: str, space: bytes | None = None) -> KeyPattern:
        """All that a tenant stored, with any adapter and salt."""
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"a tenant is named by a string, got {show(tenant)}")
        return cls(space, tenant_tag(tenant))

    @classmethod
    def of_scope(cls, scope: ReuseScope, space: bytes | None = None) -> KeyPattern:
        """All that was stored in exactly this scope."""
        if not isinstance(scope, ReuseScope):
            raise InvalidArgumentError(f"scope must be a ReuseScope, got {show(scope)}")
        return cls(space, scope_tag(scope))

    def matches(self, key: bytes) -> bool:
        """Whether a key has this pattern."""
        return (self.space is None or key.startswith(self.space)) and key.startswith(self.tag, SPACE_BYTES)


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
        self.prefix = fingerprint.digest[:SPACE_BYTES]
        digest = replace(fingerprint, shard=Shard(0, fingerprint.shard.of)).digest
        self._roots = [
            hashlib.sha256(b"kvpool block\0" + digest + group.to_bytes(4, "little"))
            for group in range(len(fingerprint.groups))
        ]

    def keys(self, digests: Iterable[bytes], group: int = 0) -> list[bytes]:
        """The keys of blocks of one layer group, from their digests in the prefix cache with a tag before each (`named`).

        Without a tag, a purge of a tenant or a scope does not find them.
        """
        root, prefix = self._roots[group], self.prefix
        keys = []
        for digest in digests:
            tag = digest[:-DIGEST_BYTES] or _NO_TAG
            hashed = root.copy()
            hashed.update(digest[-DIGEST_BYTES:])
            keys.append(prefix + tag + hashed.digest()[: 32 - SPACE_BYTES - TAG_BYTES])
        return keys

    def of_tokens(
        self, tokens: npt.NDArray[np.int32], scope: ReuseScope, multimodal: Sequence[MultimodalItem] = ()
    ) -> list[bytes]:
        """The keys of all full blocks of a text, of all layer groups: those to remove if a tier must forget the text."""
        size = self.fingerprint.block_size
        whole = tokens[: len(tokens) // size * size]
        names = named(scope, chain_digests(root_digest(scope), whole, size, multimodal))
        return [key for group in range(len(self._roots)) for key in self.keys(names, group)]
