"""What `kvpool tier purge` takes out of a directory or a store: a model, a tenant, a scope, a text, old values, all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.jsonfile import read_json
from kvpool.pools.arrays import Int32Array, as_token_array
from kvpool.scope import ReuseScope
from kvpool.terminal import console, progress_bar
from kvpool.tiers.contract import Outcome, Purged
from kvpool.tiers.disk.upkeep import Upkeep, remove_everything
from kvpool.tiers.keys import SPACE_BYTES, Fingerprint, KeyPattern, KeySpace, scope_tag
from kvpool.tiers.opening import open_tier
from kvpool.tiers.store_upkeep import STORE_SECONDS


@dataclass(frozen=True)
class Wanted:
    """What to take out, as it was asked for."""

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
    ) -> Wanted:
        """Checks the options of the command."""
        named = [space, tenant, adapter or None, salt or None, tokens]
        if everything and (unused_days is not None or any(each is not None for each in named)):
            raise InvalidArgumentError("--all takes everything; leave out the other options")
        if not everything and unused_days is None and all(each is None for each in named):
            raise InvalidArgumentError("say what to take out: --space, --tenant, --tokens, --unused-days or --all")
        if (adapter or salt) and tenant is None:
            raise InvalidArgumentError('--adapter and --salt are those of a --tenant; --tenant "" is nobody\'s')
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
        """Of the text, in the scope, for every model that is described; and why none were made for some of them."""
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


def purge_directory(path: Path, wanted: Wanted, quiet: bool) -> None:
    """Takes values out of a directory that nobody else uses."""
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
    _end_with(problems)


def purge_store(address: str, wanted: Wanted) -> None:
    """Takes values out of a store that others may use meanwhile."""
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
    """Ends the command with status 1 where the text of some models could not be named."""
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
