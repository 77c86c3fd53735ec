"""What `kvpool tier` does to tiers: count values, list whose they are, check them, and purge them.

A purge removes the values of a model, a tenant, a scope or a text, old values, or everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.files import read_json
from kvpool.pools.arrays import Int32Array, as_token_array
from kvpool.scope import ReuseScope
from kvpool.terminal import console, progress_bar
from kvpool.tiers.compressed_tier import CompressedTier
from kvpool.tiers.contract import KeyedTier, Listing, Outcome, Purged
from kvpool.tiers.disk.upkeep import Checked, Progress, Space, Upkeep, remove_everything
from kvpool.tiers.keys import SPACE_BYTES, Fingerprint, KeyPattern, KeySpace, scope_tag
from kvpool.tiers.node.connection import LostNodeError
from kvpool.tiers.node.node_tier import NodeTier
from kvpool.tiers.opening import open_tier
from kvpool.tiers.remote.remote_tier import RemoteTier

STORE_SECONDS = 3600.0
BATCH_BYTES = 32 << 20
BATCH_KEYS = 256
Store: TypeAlias = RemoteTier[Any] | NodeTier
"""A tier that several processes use, and that may say what it holds."""


@contextmanager
def opened_store(address: str) -> Iterator[Store]:
    """The store at an address, without the compression over it."""
    with open_tier(address) as tier:
        store = innermost(tier)
        assert isinstance(store, (RemoteTier, NodeTier))
        yield store


def innermost(tier: KeyedTier) -> KeyedTier:
    """The tier that holds the bytes."""
    while isinstance(tier, CompressedTier):
        tier = tier.inner
    return tier


def listed(store: Store) -> Listing:
    """What a store holds; raises if the store cannot list it."""
    if not store.can_list:
        raise InvalidArgumentError(
            f"{store.name} cannot list what it holds; `kvpool tier stat` says whether it answers, `kvpool tier purge` takes "
            "values out, and the metrics of its master count them"
        )
    return store.listed(timeout=STORE_SECONDS)


def store_figures(store: Store) -> dict[str, Any]:
    """How full a store is. `problem` says why figures may be too small. If the store does not answer, there are none."""
    if isinstance(store, NodeTier):
        return _node_figures(store)
    if store.can_list:
        sizes, problem = listed(store)
    else:
        sizes, problem = {}, _answer(store)
    is_known = store.can_list and (bool(sizes) or not problem)
    return {
        "store": store.name,
        "values": len(sizes) if is_known else None,
        "value_bytes": sum(sizes.values()) if is_known else None,
        "spaces": len({key[:SPACE_BYTES] for key in sizes}) if is_known else None,
        "problem": problem,
        "notes": [] if store.can_list else ["it cannot list what it holds; the metrics of its master count it"],
    }


def _node_figures(node: NodeTier) -> dict[str, Any]:
    """How full a node is, and who holds what."""
    try:
        stats = node.node_stats()
    except (OSError, LostNodeError) as error:
        return {"store": node.name, "problem": str(error) or "no answer in time"}
    slots = [f"{s['slots'] - s['free']:,} of {s['slots']:,} of {shown_bytes(s['bytes'])}" for s in stats.pop("slots")]
    clients = [f"{c['engine']} ({c['pid']}): {c['leased']} leased" for c in stats.pop("clients")]
    engines = [f"{name}: {shown_bytes(used)}" for name, used in stats.pop("engines").items()]
    tenants = [f"{tag}: {shown_bytes(used)}" for tag, used in stats.pop("tenants").items()]
    behind = [f"{t['name']}: {t['hits']:,} hits {t['problem']}".strip() for t in stats.pop("behind")]
    lists = {"slots": slots, "connected": clients, "engines": engines, "tenants": tenants, "behind": behind}
    return {"store": node.name, **stats, **{name: ", ".join(each) for name, each in lists.items()}, "problem": ""}


def _answer(store: Store) -> str:
    """Asks for a value that does not exist. Returns why there was no answer; empty if there was one."""
    end = time.monotonic() + 2 * store.timeout  # the first probe may still be in flight
    while (problem := store.stats().problem) and time.monotonic() < end:
        time.sleep(0.01)
    if not problem:
        store.contains([bytes(32)])
    return store.stats().problem


def store_spaces(listing: Listing) -> list[Space]:
    """Whose values a store holds, largest first. A store keeps neither descriptions of models nor times of use."""
    found: dict[bytes, Space] = {}
    for key, size in listing.sizes.items():
        space = found.setdefault(key[:SPACE_BYTES], Space(key[:SPACE_BYTES], None))
        space.num_values += 1
        space.value_bytes += size
    return sorted(found.values(), key=lambda space: (-space.value_bytes, space.prefix))


def verify_store(store: Store, listing: Listing, progress: Progress, *, repair: bool) -> tuple[Checked, str]:
    """Loads every value, which checks it. Also returns why some could not be checked; empty if all were.

    Values that are evicted meanwhile do not count.
    """
    result, problem = Checked(), listing.problem
    for keys in _batches(listing.sizes):
        out = [bytearray(listing.sizes[key]) for key in keys]
        outcomes = store.load(keys, out, timeout=max(60.0, store.timeout))
        if lost := store.stats().problem:
            return result, problem or lost
        damaged = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.FAILED]
        if Outcome.LATE in outcomes:
            return result, problem or "some values did not come within a minute"
        whole = outcomes.count(Outcome.OK)
        result.num_values += whole + len(damaged)
        result.num_bytes += sum(len(view) for view, outcome in zip(out, outcomes, strict=True) if outcome == Outcome.OK)
        result.damaged += [key.hex() for key in damaged]
        if repair:
            result.removed += store.remove(damaged, timeout=max(60.0, store.timeout)).count(Outcome.OK)
        progress(len(keys))
    return result, problem


def _batches(sizes: dict[bytes, int]) -> Iterator[list[bytes]]:
    """Keys whose values are loaded together."""
    batch: list[bytes] = []
    room = BATCH_BYTES
    for key, size in sizes.items():
        if batch and (size > room or len(batch) == BATCH_KEYS):
            yield batch
            batch, room = [], BATCH_BYTES
        batch.append(key)
        room -= size
    if batch:
        yield batch


# --- purging ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PurgeRequest:
    """Which values to remove: the options of `kvpool tier purge`."""

    pattern: KeyPattern
    scope: ReuseScope
    tokens: Int32Array | None
    fingerprints: Path | None
    unused_days: float | None
    everything: bool

    @classmethod
    def of(
        cls,
        space: str | None,
        tenant: str | None,
        adapter: str,
        salt: str,
        tokens: Path | None,
        fingerprints: Path | None,
        unused_days: float | None,
        everything: bool,
    ) -> PurgeRequest:
        """Checks the options of the command."""
        named = [space, tenant, adapter or None, salt or None, tokens]
        if everything and (unused_days is not None or any(each is not None for each in named)):
            raise InvalidArgumentError("--all takes everything; leave out the other options")
        if not everything and unused_days is None and all(each is None for each in named):
            raise InvalidArgumentError("say what to take out: --space, --tenant, --tokens, --unused-days or --all")
        if (adapter or salt) and tenant is None:
            raise InvalidArgumentError('--adapter and --salt are those of a --tenant; --tenant "" is no tenant')
        if fingerprints is not None and tokens is None:
            raise InvalidArgumentError("--fingerprints says whose the --tokens are; without them it has no effect")
        scope, prefix = ReuseScope(tenant or "", adapter, salt=salt), read_space(space)
        if tenant is None:
            pattern = KeyPattern(prefix)
        elif adapter or salt:
            pattern = KeyPattern.of_scope(scope, prefix)
        else:
            pattern = KeyPattern.of_tenant(tenant, prefix)
        ids = None if tokens is None else as_token_array(_read(tokens, "a list of token ids"), str(tokens))
        return cls(pattern, scope, ids, fingerprints, unused_days, everything)

    def keys(self, described: list[Any]) -> tuple[list[bytes], list[str]]:
        """The keys of the text, in the scope, for every described model; and why there are none for some models."""
        assert self.tokens is not None
        spaces, problems = [], []
        for fields in described:
            try:
                spaces.append(KeySpace(Fingerprint.from_description(fields)))
            except InvalidArgumentError as error:
                problems.append(str(error))
        spaces = [each for each in spaces if self.pattern.space in (None, each.prefix)]
        if not spaces:
            remedy = "--tokens needs the fingerprint of a model: see --fingerprints and --space"
            raise InvalidArgumentError(problems[0] if problems else remedy)
        keys = [key for each in spaces for key in each.of_tokens(self.tokens, self.scope)]
        if not keys:
            raise InvalidArgumentError(f"--tokens names {len(self.tokens)} tokens, which fill no block")
        return keys, problems if self.pattern.space is None else []

    def described(self) -> list[Any]:
        """The fingerprints in the file that was named, as `kvpool tier ls --json` writes them."""
        fields = {} if self.fingerprints is None else _read(self.fingerprints, "what `kvpool tier ls --json` writes")
        spaces = fields.get("spaces") if isinstance(fields, dict) else None
        return [each["description"] for each in spaces or [] if isinstance(each, dict) and each.get("description")]


def purge_directory(path: Path, wanted: PurgeRequest, quiet: bool) -> None:
    """Removes values from a directory that no other process uses."""
    out = console(to_stderr=False)
    if wanted.everything:
        out.print(f"{shown_bytes(remove_everything(path))} removed")
        return
    before = None if wanted.unused_days is None else round((time.time() - wanted.unused_days * 86_400) * 1e6)
    with (
        Upkeep(path, writing=True) as upkeep,
        progress_bar("purging", upkeep.num_values, quiet) as progress,
    ):
        pattern, keys = wanted.pattern, None
        problems: list[str] = []
        if wanted.tokens is not None:
            described = wanted.described() or list(upkeep.directory.descriptions().values())
            found, problems = wanted.keys(described)
            pattern, keys = KeyPattern(pattern.space, scope_tag(wanted.scope)), set(found)
        removed = upkeep.purge(progress, pattern=pattern, keys=keys, used_before=before)
    out.print(f"{removed:,} values removed; `kvpool tier compact {path}` gives the space back to the disk")
    print_notes(out, upkeep.notes)
    _end_with(problems)


def print_notes(out: Any, notes: list[str]) -> None:
    """What a directory has that could not be used, a line each."""
    for note in notes:
        out.print(f"note: {note}", style="yellow")


def purge_store(address: str, wanted: PurgeRequest) -> None:
    """Removes values from a store. Others may use it meanwhile."""
    if wanted.unused_days is not None:
        raise InvalidArgumentError("--unused-days is for directories: a store has a time to live or rules of its own")
    problems: list[str] = []
    with open_tier(address) as tier:
        if wanted.tokens is None:
            purged = tier.purge(wanted.pattern, timeout=STORE_SECONDS)
        else:
            keys, problems = wanted.keys(wanted.described())
            outcomes = tier.remove(keys, timeout=STORE_SECONDS)
            is_complete = all(outcome in (Outcome.OK, Outcome.MISS) for outcome in outcomes)
            purged = Purged(outcomes.count(Outcome.OK), is_complete)
        problem = tier.stats().problem
    out = console(to_stderr=False)
    out.print(f"{purged.removed:,} values removed")
    if not purged.is_complete:
        out.print(f"some may be left: {problem or 'see the log'}; run it again", style="red")
        raise typer.Exit(1)
    _end_with(problems)


def _end_with(problems: list[str]) -> None:
    """Ends the command with status 1 if the keys of the text could not be made for some models."""
    for problem in problems:
        console(to_stderr=False).print(f"some may be left: {problem}", style="red", markup=False)
    if problems:
        raise typer.Exit(1)


def _read(path: Path, what: str) -> Any:
    return read_json(path, InvalidArgumentError, f"it must hold {what}")


def read_space(text: str | None) -> bytes | None:
    """The first bytes of a fingerprint, as people write them."""
    try:
        prefix = None if text is None else bytes.fromhex(text)
    except ValueError:
        prefix = b""
    if prefix is not None and len(prefix) != SPACE_BYTES:
        raise InvalidArgumentError(
            f"--space {text!r} must be {2 * SPACE_BYTES} hexadecimal digits; see `kvpool tier ls`"
        )
    return prefix


def shown_bytes(count: int) -> str:
    """A size that people can read."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
