"""What the live view answers, whoever carries the answers: its page, and what is asked of single blocks."""

from __future__ import annotations

from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from kvpool.config import Tier
from kvpool.errors import InvalidArgumentError
from kvpool.manager.picture import RunsPicture
from kvpool.view.hub import Hub

PREFIX = "/view/"
_PAGES = {"/": "index.html", "/docs": "api.html"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Asset(NamedTuple):
    """A file of the page."""

    content: bytes
    kind: str


def asset(path: str) -> Asset | None:
    """The file behind a path: the page at `/`, a server's API at `/docs`, what they load below `/view/`; None for others."""
    name = _PAGES.get(path) or path.removeprefix(PREFIX)
    stem, _, ending = name.partition(".")
    if not stem.replace("-", "").isalnum() or ending not in _KINDS or not (path in _PAGES or path.startswith(PREFIX)):
        return None
    file = resources.files("kvpool.view").joinpath("page", name)
    return Asset(file.read_bytes(), _KINDS[ending]) if file.is_file() else None


def block_details(hub: Hub, pool: int, tier: str, block_id: int) -> dict[str, Any]:
    """Whose a block is now, and what hangs on it: the run it belongs to, the way to it, and what continues it."""
    try:
        where = Tier[tier]
    except KeyError:
        raise InvalidArgumentError(f"there is no tier {tier!r}; pools exist on GPU, HOST and DISK") from None
    block = hub.manager.block(block_id, pool=pool, tier=where)
    details: dict[str, Any] = {
        "block": block.block_id,
        "pool": block.pool,
        "tier": block.tier.name,
        "state": block.state.value,
        "group": block.group,
        "position": block.position,
        "published": block.is_published,
        "requests": [str(request)[:80] for request in block.request_ids[:32]],
        "num_requests": len(block.request_ids),
    }
    look = hub.last_look
    runs = hub.manager.runs_picture() if look is None or look.runs is None else look.runs
    found = _run_of(runs, pool, where, block_id)
    return details | ({} if found is None else {"run": _run_details(runs, found, hub.manager.now)})


def _run_of(runs: RunsPicture, pool: int, tier: Tier, block_id: int) -> int | None:
    ends = np.cumsum(runs.num_blocks)
    for of_pool, ids in zip(runs.pools, runs.block_ids, strict=True):
        if of_pool == pool:
            places = np.searchsorted(ends, np.flatnonzero(ids == block_id), side="right")
            matching = places[runs.tier[places] == tier]
            if len(matching):
                return int(matching[0])
    return None


def _run_details(runs: RunsPicture, run: int, now: float) -> dict[str, Any]:
    below = np.zeros(len(runs.number), np.bool_)
    below[run] = True
    for place in range(run + 1, len(below)):  # parents stand before their children
        below[place] = runs.parent[place] >= 0 and below[runs.parent[place]]
    above, parent = 0, int(runs.parent[run])
    while parent >= 0:
        above, parent = above + 1, int(runs.parent[parent])
    scope = runs.scopes[int(runs.scope[run])]
    return {
        "number": int(runs.number[run]),
        "start": int(runs.start[run]),
        "blocks": int(runs.num_blocks[run]),
        "tenant": scope.tenant,
        "adapter": scope.adapter,
        "priority": int(runs.priority[run]),
        "pinned": bool(runs.is_pinned[run]),
        "hits": int(runs.num_hits[run]),
        "idle_seconds": max(0.0, round(now - float(runs.last_access_at[run]), 1)),
        "runs_above": above,
        "children": int((runs.parent == run).sum()),
        "runs_below": int(below.sum()) - 1,
        "blocks_below": int(runs.num_blocks[below].sum()) - int(runs.num_blocks[run]),
    }
