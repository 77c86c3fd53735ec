"""Forgetting: what is invalidated leaves the cache of a client and never comes back from its tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvpool.pools.arrays import Int32Array
from kvpool.prefix.digests import root_digest
from kvpool.scheduling import Request
from kvpool.scope import ReuseScope
from kvpool.tiers.keys import KeyPattern, named, tenant_digest, tenant_tag
from kvpool.tiers.transport.fetching import Fetch
from kvpool.tiers.transport.forgetting import Lineage
from kvpool.tiers.transport.prefix_options import BlockKeys
from kvpool.tiers.transport.storing import Storer


class Forgetting:
    """Holds `lock` while something is forgotten; who brings blocks into the cache asks `is_valid` and holds it meanwhile."""

    def __init__(self, keys: BlockKeys, lineage: Lineage, storer: Storer) -> None:
        self.lock = threading.RLock()
        self._keys = keys
        self._lineage = lineage
        self._storer = storer

    def everything(self, drop: Callable[[], int]) -> int:
        """All content; `drop` takes it out of the cache and returns how many blocks left."""
        with self.lock:
            removed = drop()
            self._keys.forgotten.forget_all()
        self._remove(None)
        return removed

    def content(
        self, drop: Callable[[], int], prefix: Int32Array | None, scope: ReuseScope | None, session: str | None
    ) -> int:
        """What `KVCacheManager.invalidate` forgets, which is called as `drop` and checks the arguments."""
        with self.lock:
            removed = drop()
            marks = self._beginnings(prefix, scope, session)
            old = self._names_of(marks, prefix, scope)
            if marks:
                self._keys.forgotten.forget(marks)
        self._remove(marks, old)
        if prefix is None and session is None:
            pattern = KeyPattern.of_scope(ReuseScope() if scope is None else scope, self._keys.space.prefix)
            self._storer.purge(pattern)
        return removed

    def of_tenant(self, drop: Callable[[], int], tenant: str) -> int:
        """Everything of a tenant in all its scopes, also in those that only tiers know of; `drop` checks the argument."""
        with self.lock:
            removed = drop()
            self._keys.forgotten.forget([tenant_digest(tenant)])
        self._remove_named(self._lineage.take_tagged(tenant_tag(tenant)))
        self._storer.purge(KeyPattern.of_tenant(tenant, self._keys.space.prefix))
        return removed

    def is_valid(self, request: Request, fetch: Fetch) -> bool:
        """Whether nothing of what was loaded for a request was forgotten meanwhile."""
        if fetch.prompt.version == self._keys.forgotten.version:
            return True
        now, end = self._keys.of_prompt(request.prompt, request.scope, request.multimodal), fetch.num_blocks
        return all(new[:end] == old[:end] for new, old in zip(now.keys, fetch.prompt.keys, strict=True))

    def _beginnings(self, prefix: Int32Array | None, scope: ReuseScope | None, session: str | None) -> list[bytes]:
        """The last full block of a prefix, the root of a scope, or the first blocks that requests of a session computed."""
        if session is not None:
            return self._lineage.of_session(session)
        root = root_digest(ReuseScope() if scope is None else scope)
        return [root] if prefix is None else self._keys.digests(root, prefix)[-1:]

    def _names_of(self, marks: Sequence[bytes], prefix: Int32Array | None, scope: ReuseScope | None) -> list[bytes]:
        """The last block of a prefix as it was stored before now, by whomever: without it nothing behind it is reached."""
        if prefix is None or not marks:
            return []
        own = ReuseScope() if scope is None else scope
        root, forgotten = root_digest(own), self._keys.forgotten
        used, _ = forgotten.renamed(self._keys.salt_of(own, root), self._keys.digests(root, prefix))
        return named(own, {marks[-1], used[-1]})

    def _remove(self, marks: Sequence[bytes] | None, names: Sequence[bytes] = ()) -> None:
        """Takes values out of the tiers whose keys are known, in the background."""
        self._remove_named([*names, *self._lineage.take(marks)])

    def _remove_named(self, names: Sequence[bytes]) -> None:
        gone = list(dict.fromkeys(names))
        self._storer.remove([key for of_group in self._keys.of_digests(gone) for key in of_group])
