"""`kvpool tier`: ls, stat, verify, compact, purge, warm."""

from __future__ import annotations

import dataclasses
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvpool.errors import InvalidArgumentError
from kvpool.files import read_plain, write_plain
from kvpool.terminal import check_files, console, progress_bar, write_json
from kvpool.tiers.contract import Outcome
from kvpool.tiers.disk.slab import is_held
from kvpool.tiers.disk.upkeep import Space, Upkeep
from kvpool.tiers.opening import open_tier
from kvpool.tiers.options import TierURL
from kvpool.tiers.settings import PREFIX, read_tiers
from kvpool.tiers.upkeep import (
    PurgeRequest,
    innermost,
    listed,
    opened_store,
    print_notes,
    purge_directory,
    purge_store,
    read_space,
    shown_bytes,
    store_figures,
    store_spaces,
    verify_store,
)

AT_ONCE = 32
_T = TypeVar("_T")
DirectoryArgument = Annotated[
    str | None,
    typer.Argument(help="The directory of a disk tier (default: `disk` of the settings).", show_default=False),
]
AddressArgument = Annotated[
    str | None,
    typer.Argument(
        help="A directory, or the address of a store (default: `disk` of the settings, else `remote`).",
        show_default=False,
    ),
]
ConfigOption = Annotated[Path | None, typer.Option(envvar="KVPOOL_CONFIG", help="A TOML file with a section [tiers].")]
Json = Annotated[str | None, typer.Option(help="Write the figures as JSON; - for stdout.")]
SpaceOption = Annotated[
    str | None, typer.Option("--space", help="Only the values of this fingerprint, as `kvpool tier ls` shows it.")
]


def register(app: typer.Typer, name: str) -> None:
    """Adds the group of commands to the application."""
    group = typer.Typer(help="Look after what outlives a process: disk tiers and remote stores.", no_args_is_help=True)
    for command in (ls, stat, verify, compact, purge, warm):
        group.command(command.__name__)(command)
    app.add_typer(group, name=name)


def ls(address: AddressArgument = None, config: ConfigOption = None, json: Json = None) -> None:
    """List whose values a tier holds: a line for each model, with how many, how large, and when they were last used.

    Works while an engine uses the tier. A store knows neither the names of models nor when values were used. Exit status 1
    if it does not answer.

    \b
    kvpool tier ls /var/cache/kvpool
    kvpool tier ls redis://127.0.0.1:6379
    """
    from rich.table import Table

    check_files(json)
    where = _place(address, config)
    problem = ""
    if isinstance(where, Path):
        with Upkeep(where) as upkeep:
            spaces, notes = upkeep.spaces(), upkeep.notes
    else:
        with opened_store(where) as store:
            listing = listed(store)
            spaces, notes, problem, where = store_spaces(listing), [], listing.problem, store.name
    table = Table(box=None, pad_edge=False)
    for title, justify in (("space", "left"), ("model", "left"), ("weights", "left"), ("values", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("bytes", justify="right")
    table.add_column("last used")
    for space in spaces:
        about = space.description or {}
        weights = str(about.get("weights", "?"))
        table.add_row(
            space.prefix.hex(),
            str(about.get("model", "?")),
            weights[:16],
            f"{space.num_values:,}",
            shown_bytes(space.value_bytes),
            shown_time(space.last_use),
        )
    out = console(to_stderr=json == "-")
    out.print(table if spaces else "" if problem else f"{where} holds no values")
    print_notes(out, notes)
    if json is not None:
        write_json(json, {"spaces": [_space_fields(space) for space in spaces], "notes": notes, "problem": problem})
    _end_with(problem)


def stat(
    address: AddressArgument = None,
    config: ConfigOption = None,
    json: Json = None,
) -> None:
    """Show how full a tier is: slabs and slots of a directory, values of a store. Exit status 1 if a store does not answer.

    \b
    kvpool tier stat /var/cache/kvpool
    kvpool tier stat redis://127.0.0.1:6379
    """
    check_files(json)
    where = _place(address, config)
    if isinstance(where, Path):
        figures = _directory_figures(where)
    else:
        with opened_store(where) as store:
            figures = store_figures(store)
    out = console(to_stderr=json == "-")
    for name, value in figures.items():
        if name not in ("notes", "problem") and value not in (None, ""):
            out.print(f"{name.replace('_', ' '):>18}  {f'{value:,}' if isinstance(value, int) else value}")
    print_notes(out, figures.get("notes", []))
    if json is not None:
        write_json(json, figures)
    _end_with(figures.get("problem", ""))


def verify(
    address: AddressArgument = None,
    config: ConfigOption = None,
    repair: Annotated[bool, typer.Option(help="Take out what is damaged; no engine may use a directory then.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    json: Json = None,
) -> None:
    """Read every value and compare it with its checksum. Exit status 1 if something is damaged, or a store does not answer.

    Engines never use a damaged value: every load compares the checksum. This command tells whether the disk is healthy.
    """
    check_files(json)
    where = _place(address, config)
    problem = ""
    if isinstance(where, Path):
        with Upkeep(where, writing=repair) as upkeep:
            with progress_bar("verifying", upkeep.num_values, quiet) as progress:
                result = upkeep.verify(progress, repair=repair)
            notes = upkeep.notes
    else:
        with opened_store(where) as store:
            listing, notes = listed(store), []
            with progress_bar("verifying", len(listing.sizes), quiet) as progress:
                result, problem = verify_store(store, listing, progress, repair=repair)
    out = console(to_stderr=json == "-")
    out.print(
        f"{result.num_values - len(result.damaged):,} of {result.num_values:,} values are whole, "
        f"{shown_bytes(result.num_bytes)}"
    )
    for place in result.damaged:
        out.print(f"damaged: {place}{' (taken out)' if repair else ''}", style="red")
    print_notes(out, notes)
    if json is not None:
        write_json(json, {**dataclasses.asdict(result), "notes": notes, "problem": problem})
    _end_with(problem)
    if result.damaged and not repair:
        raise typer.Exit(1)


def compact(
    directory: DirectoryArgument = None,
    config: ConfigOption = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    json: Json = None,
) -> None:
    """Move values together and give empty slabs back to the disk, for instance after `purge`.

    A tier that runs needs no compaction: it reuses its slots. No engine may use the directory meanwhile.
    """
    check_files(json)
    with Upkeep(_directory(directory, config, "compact"), writing=True) as upkeep:
        with progress_bar("moving", upkeep.num_values, quiet) as progress:
            given_back = upkeep.compact(progress)
        left, notes = upkeep.num_values, upkeep.notes
    out = console(to_stderr=json == "-")
    out.print(f"{shown_bytes(given_back)} given back, {left:,} values are left")
    print_notes(out, notes)
    if json is not None:
        write_json(json, {"given_back_bytes": given_back, "num_values": left, "notes": notes})


def purge(
    address: AddressArgument = None,
    config: ConfigOption = None,
    space: SpaceOption = None,
    tenant: Annotated[str | None, typer.Option(help='Only what this tenant stored; "" is nobody\'s.')] = None,
    adapter: Annotated[str, typer.Option(help="Of the tenant, only with this adapter and --salt.")] = "",
    salt: Annotated[
        str, typer.Option(help="Of the tenant, only with this salt and --adapter.", envvar="KVPOOL_PURGE_SALT")
    ] = "",
    tokens: Annotated[
        Path | None,
        typer.Option(help="A JSON list of token ids: the blocks of this text, in the scope of the options above."),
    ] = None,
    fingerprints: Annotated[
        Path | None, typer.Option(help="Of a store's models, for --tokens: what `kvpool tier ls --json` wrote.")
    ] = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, max=36_500, help="Only what was not used for so many days.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All files of kvpool, also of older formats.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
) -> None:
    """Take values out: of one model, a tenant, a text, unused ones, or all. Exit status 1 if some may be left.

    Files that are not kvpool's stay. No engine may use the directory; a store may be in use.

    \b
    kvpool tier purge DIR --unused-days 30 && kvpool tier compact DIR
    kvpool tier purge redis://127.0.0.1:6379 --tenant acme
    kvpool tier purge redis://127.0.0.1:6379 --tenant acme --salt SESSION
    kvpool tier purge DIR --tokens ids.json
    """
    where = _place(address, config)
    wanted = PurgeRequest.of(space, tenant, adapter, salt, tokens, fingerprints, unused_days, everything)
    if isinstance(where, Path):
        purge_directory(where, wanted, quiet)
    else:
        purge_store(where, wanted)


def warm(
    directory: DirectoryArgument = None,
    target: Annotated[
        str | None,
        typer.Argument(help="Where to: the address of a tier (default: `remote` of the settings).", show_default=False),
    ] = None,
    config: ConfigOption = None,
    space: SpaceOption = None,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    json: Json = None,
) -> None:
    """Copy the values of a directory to another tier, the most recently used first, until it is full.

    Engines that use the other tier find them: one on a new machine, or all that share a store. Works while an engine uses the
    directory.

    \b
    kvpool tier warm /var/cache/kvpool redis://127.0.0.1:6379
    kvpool tier warm /mnt/old disk:/mnt/new?bytes=500GB
    """
    check_files(json)
    source = _directory(directory, config, "warm")
    target = _needed(target, read_tiers(config).remote_address, "an address to copy to", "remote")
    counts = dict.fromkeys(Outcome, 0)
    with open_tier(target) as tier, Upkeep(source) as upkeep:
        with progress_bar("copying", upkeep.num_values, quiet) as progress:
            batch: list[tuple[bytes, bytes]] = []
            for value in upkeep.values(progress, read_space(space) or b""):
                batch.append((value.key, bytes(value.data)))
                if len(batch) == AT_ONCE:
                    _send(tier, batch, counts)
                    batch = []
                    if counts[Outcome.REFUSED] > counts[Outcome.OK]:
                        break  # it is full
            _send(tier, batch, counts)
        problem = tier.stats().problem
    _copy_descriptions(upkeep, tier)
    stored, left = counts[Outcome.OK], sum(counts.values()) - counts[Outcome.OK]
    out = console(to_stderr=json == "-")
    out.print(f"{stored:,} values are in {target.partition('?')[0].rpartition('@')[2]}, {left:,} were not taken")
    print_notes(out, [*upkeep.notes, problem] if problem else upkeep.notes)
    if json is not None:
        write_json(json, {"stored": stored, "not_taken": left, "problem": problem})
    if left and not stored:
        raise typer.Exit(1)


def shown_time(microseconds: int) -> str:
    """A time of last use. Values that were found again by their headers have none."""
    if not microseconds:
        return "unknown"
    return datetime.fromtimestamp(microseconds / 1e6, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _directory(given: str | None, config: Path | None, command: str) -> Path:
    """The directory that was named, or that of the settings."""
    if given is None:
        return _needed(None, read_tiers(config).directory, "a directory", "disk")
    where = _place(given, config)
    if not isinstance(where, Path):
        remedy = (
            "a store gives space back by itself" if command == "compact" else "its values are where others find them"
        )
        raise InvalidArgumentError(f"`kvpool tier {command}` is for directories: {remedy}")
    return where


def _place(given: str | None, config: Path | None) -> Path | str:
    """The directory or the address of a store that was named, or the directory of the settings, or their store."""
    if given is None:
        settings = read_tiers(config)
        if settings.directory is not None:
            return settings.directory
        return _needed(None, settings.remote_address, "a directory or an address", "disk")
    if "://" in given or given.startswith("node:"):
        return given
    path = Path(given) if os.path.isdir(given) else Path(TierURL.local(given).path).expanduser()
    if not path.is_dir():
        raise InvalidArgumentError(
            f"there is no directory {str(path)!r}; the address of a store is as redis://127.0.0.1:6379"
        )
    return path


def _end_with(problem: str) -> None:
    """Ends the command with status 1 if a store did not answer, or only in part."""
    if problem:
        console(to_stderr=True).print(f"the store does not answer: {problem}", style="red", markup=False)
        raise typer.Exit(1)


def _needed(given: _T | None, configured: _T | None, what: str, key: str) -> _T:
    """The argument, or the value of the settings."""
    found = configured if given is None else given
    if found is None:
        variable = f"{PREFIX}{key.upper()}"
        raise InvalidArgumentError(
            f"name {what}, or set `{key}` in the section [tiers] of --config FILE, or {variable}"
        )
    return found


def _send(tier: Any, batch: list[tuple[bytes, bytes]], counts: dict[Outcome, int]) -> None:
    if batch:
        for outcome in tier.store([key for key, _ in batch], [data for _, data in batch], timeout=60.0):
            counts[outcome] += 1


def _copy_descriptions(upkeep: Upkeep, tier: Any) -> None:
    """Copies the fingerprints to another directory; keys of compressed values begin with the same bytes."""
    directory = getattr(innermost(tier), "directory", None)
    if directory is not None:
        for path in upkeep.directory.path.glob("space-*.json"):
            target = directory.path / path.name
            if not target.exists():
                write_plain(target, read_plain(path))


def _directory_figures(path: Path) -> dict[str, Any]:
    with Upkeep(path) as upkeep:
        slots = sum(slab.num_slots for slab in upkeep.slabs)
        held = [int(is_held(slab.records).sum()) for slab in upkeep.slabs]
        return {
            "slabs": len(upkeep.slabs),
            "file_bytes": sum(slab.num_bytes for slab in upkeep.slabs),
            "slots": slots,
            "values": sum(held),
            "value_bytes": sum(int(slab.records["length"].sum()) for slab in upkeep.slabs),
            "free_slots": slots - sum(held),
            "slot_sizes": ", ".join(shown_bytes(size) for size in sorted({slab.slot_bytes for slab in upkeep.slabs})),
            "written_by": upkeep.directory.owner(),
            "notes": upkeep.notes,
        }


def _space_fields(space: Space) -> dict[str, Any]:
    return {**dataclasses.asdict(space), "prefix": space.prefix.hex()}
